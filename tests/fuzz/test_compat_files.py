"""Arguments of ms-swift and configurations of verl with random mistakes: each is converted or refused by name."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from fuzz.mutations import RAW, VALUES, accepted_or_refused, mutated_text, mutated_tree, write
from turnwise.commands.convert import as_recipe
from turnwise.compat.swift import from_swift_arguments
from turnwise.compat.verl.convert import from_verl_arguments
from turnwise.config.recipe import load
from turnwise.options.schema import Config

# Damaged arguments of ms-swift: each list of words, script and file is converted, or refused with a `TurnwiseError`.


ROUNDS = 60

WORDS = shlex.split(
    """--rlhf_type grpo --model Qwen/Qwen2.5-7B --dataset a.jsonl#5 --val_dataset a.jsonl --external_plugins plug.py
    --reward_funcs accuracy cosine mine --reward_weights 1 0.5 1 --multi_turn_scheduler math_tip_trick --max_turns 3
    --num_generations 8 --num_iterations 2 --max_completion_length 512 --learning_rate 1e-6 --max_steps 10 --beta 0.04
    --temperature 0.9 --top_p 0.9 --top_k 5 --loss_scale last_round --system sys.txt --columns '{"a": "b"}'
    --use_gym_env true --gym_env x --output_dir out --deepspeed zero2 --per_device_train_batch_size 4
    --gradient_accumulation_steps 2 --steps_per_generation 4 --lora_rank 8 --stop_words a b --seed 42 --data_seed 42
    --vllm_max_model_len 2048 --truncation_strategy delete --agent_template hermes --warmup_ratio 0.05 --adam_beta1 0.9
    --lr_scheduler_type cosine --scale_rewards group --epsilon 0.2 --num_train_epochs 1 --save_steps 10 --eval_steps 5
    --async_generate true --cosine_max_len 99 --split_dataset_ratio 0.1 --completion_length_limit_scope total"""
)

DAMAGE = [
    *("", "ten", "-1", "1e999", "nan", "null", "true", "[]", "{}", "{", "[1", "x" * 3000, "9" * 5000, "9" * 100, "[" * 3000),
    *("--x", "--", "/etc", "/nope", "~nobody/x", "bad.json", "deep.yaml", "a.jsonl#10", "a.jsonl#x", "a.jsonl#", "0", "1.5"),
    *("a:b", "a=b", "'", '"', "${X}", "1,2", "plug.py", "*.py", "NPROC_PER_NODE=0", f"NNODES={'9' * 5000}", "\0", "\ud800"),
    *('{"a": 1}', '{"a": ["b"]}', '{"a": "b", "a": "c"}', "[1, [2]]", "1e300", "1e18", "a b"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the files lie in, and that is worked in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plug.py").write_text("x = args.max_steps\n", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n' * 3, encoding="utf-8")
    (tmp_path / "bad.json").write_text("[[[", encoding="utf-8")
    (tmp_path / "deep.yaml").write_text(f"beta: {'[' * 3000}", encoding="utf-8")
    (tmp_path / "sys.txt").write_bytes(b"\xff")
    return tmp_path


def damaged(draw: random.Random) -> list[str]:
    """The words with a few replaced, removed or added; the system's file is readable in most."""
    words = [word for word in WORDS if word not in ("--system", "sys.txt") or draw.random() < 0.1]
    for _ in range(draw.choice([1, 1, 2, 3, 6])):
        place, kind = draw.randrange(len(words)), draw.random()
        if kind < 0.6:
            words[place] = draw.choice(DAMAGE)
        elif kind < 0.8:
            del words[place]
        else:
            words.insert(place, draw.choice(DAMAGE))
    return words


def converts_or_is_refused(source: list[str] | Path) -> bool:
    """Whether it was converted; its recipe is one, or is refused with a message too."""
    found = accepted_or_refused(from_swift_arguments, source)
    if found is not None:
        loaded = accepted_or_refused(load, write(Path("recipe.yaml"), as_recipe(found)))
        assert loaded is None or isinstance(loaded[0], Config)
    return found is not None


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("seed", range(2))
def test_damaged_words_are_converted_or_refused_with_a_message(seed: int) -> None:
    draw = random.Random(seed)
    outcomes = {converts_or_is_refused(damaged(draw)) for _ in range(ROUNDS)}
    assert outcomes == {True, False}  # the damage is neither harmless nor total


@pytest.mark.usefixtures("folder")
def test_a_damaged_script_is_converted_or_refused_with_a_message(folder: Path) -> None:
    draw = random.Random(2)
    script = folder / "s.sh"
    for _ in range(ROUNDS):
        quoted = [word if "\0" in word else shlex.quote(word) for word in damaged(draw)]
        text = "A=$A$A\nNPROC_PER_NODE=2 swift rlhf " + " \\\n  ".join(quoted)
        converts_or_is_refused(write(script, mutated_text(text, draw) if draw.random() < 0.5 else text))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("ending", ["json", "yaml"])
def test_a_damaged_file_of_arguments_is_converted_or_refused_with_a_message(ending: str, folder: Path) -> None:
    draw = random.Random(3)
    tree = {
        "rollout": {"model": "m", "max_turns": 3, "stop_words": ["a"]},
        "train": {
            "dataset": ["a.jsonl#5"],
            "columns": {"a": "b"},
            "reward_weights": [1.0],
            "beta": 0.1,
            "max_steps": 5,
        },
        "num_generations": 4,
        "scale_rewards": "group",
        "system": "s",
    }
    for _ in range(ROUNDS):
        broken = mutated_tree(tree, draw)
        if draw.random() < 0.3:
            broken["train"] = {key: draw.choice(VALUES) for key in ("beta", "dataset", "columns", "torch_dtype")}
        text = json.dumps(broken) if ending == "json" else yaml.dump(broken)
        if draw.random() < 0.3:
            text = f"{text}\nbeta: {draw.choice(RAW)}" if ending == "yaml" else mutated_text(text, draw)
        converts_or_is_refused(write(folder / f"args.{ending}", text))


# Damaged configurations of verl, of its tools and interactions: each is converted, or refused with a `TurnwiseError`.


VERL_ROUNDS = 30

MAIN = """
hydra: {searchpath: [file://verl/trainer/config]}
defaults: [_self_]
data: {train_files: a.parquet, val_files: [b.parquet], train_batch_size: 16, max_prompt_length: 256,
  max_response_length: 512, return_raw_chat: true, filter_overlong_prompts: true, truncation: error}
actor_rollout_ref:
  hybrid_engine: true
  model: {path: Qwen/Qwen2.5-3B-Instruct, enable_gradient_checkpointing: true}
  actor: {optim: {lr: 1e-6}, ppo_mini_batch_size: 16, ppo_micro_batch_size_per_gpu: 2, use_kl_loss: true,
    kl_loss_coef: 0.001, clip_ratio: 0.2, entropy_coeff: 0, loss_agg_mode: token-mean}
  rollout: {name: sglang, n: 4, temperature: 1.0, top_p: 1, top_k: -1, multi_turn: {enable: true,
    max_assistant_turns: 5, max_user_turns: 3, tool_config_path: config/tool.yaml,
    interaction_config_path: config/inter.yaml, format: hermes, max_parallel_calls: 1}}
algorithm: {adv_estimator: grpo, use_kl_in_reward: false, norm_adv_by_std_in_grpo: true}
trainer: {total_epochs: 1, total_training_steps: 5, save_freq: 5, test_freq: 1, project_name: a, logger: [console]}
custom_reward_function: {path: rew.py, name: compute_score}
"""

TOOL = """
tools:
  - class_name: verl.tools.gsm8k_tool.Gsm8kTool
    config: {type: native}
    tool_schema: {type: function, function: {name: calc_gsm8k_reward, description: d, parameters: {type: object,
      properties: {answer: {type: string, description: x}}, required: [answer]}}}
"""

INTERACTION = """
interaction:
  - name: gsm8k
    class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction
    config: {}
"""

FILES: dict[str, Any] = {name: yaml.safe_load(text) for name, text in
                         (("main", MAIN), ("tool", TOOL), ("inter", INTERACTION))}  # fmt: skip


def verl_damaged(tree: Any, draw: random.Random) -> str:
    """The YAML of a tree in which a few values, lines or characters are damaged."""
    kind = draw.random()
    if kind < 0.7:
        return yaml.dump(mutated_tree(tree, draw))
    text = yaml.dump(tree)
    if kind < 0.85:
        return mutated_text(text, draw)
    lines = text.split("\n")
    place = draw.randrange(len(lines))
    lines[place] = f"{lines[place].partition(':')[0]}: {draw.choice(RAW)}"
    return "\n".join(lines)


@pytest.mark.parametrize("name", list(FILES))
def test_a_damaged_file_of_verl_is_converted_or_refused_with_a_message(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(name)
    monkeypatch.chdir(tmp_path)
    Path("config").mkdir()
    Path("rew.py").write_text("def compute_score(*a, **k):\n    return 1.0\n", encoding="utf-8")
    for file, tree in FILES.items():
        Path(f"config/{file}.yaml").write_text(yaml.dump(tree), encoding="utf-8")
    converted: list[bool] = []
    for _ in range(VERL_ROUNDS):
        write(Path(f"config/{name}.yaml"), verl_damaged(FILES[name], draw))
        more = [f"actor_rollout_ref.rollout.n={draw.choice(RAW + VALUES)}"] if draw.random() < 0.2 else []
        found = accepted_or_refused(from_verl_arguments, more, folder="config", name="main")
        converted.append(found is not None)
        assert found is None or as_recipe(found).encode("utf-8")
    assert set(converted) >= {True}
