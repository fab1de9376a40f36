"""Damaged configurations of verl, of its tools and interactions: each is converted, or refused with a `TurnwiseError`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from fuzz.mutations import RAW, VALUES, accepted_or_refused, mutated_text, mutated_tree, write
from turnwise.commands.convert import as_recipe
from turnwise.compat.verl.convert import from_verl_arguments

ROUNDS = 60

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


def damaged(tree: Any, draw: random.Random) -> str:
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
    for _ in range(ROUNDS):
        write(Path(f"config/{name}.yaml"), damaged(FILES[name], draw))
        more = [f"actor_rollout_ref.rollout.n={draw.choice(RAW + VALUES)}"] if draw.random() < 0.2 else []
        found = accepted_or_refused(from_verl_arguments, more, folder="config", name="main")
        converted.append(found is not None)
        assert found is None or as_recipe(found).encode("utf-8")
    assert set(converted) >= {True}
