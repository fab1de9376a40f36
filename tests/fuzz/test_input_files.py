"""Hostile input: files of users with random mistakes, and whatever can be sampled in place of a tool call."""

from __future__ import annotations

import json
import random
import shlex
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fuzz.mutations import RAW, VALUES, accepted_or_refused, mutated_text, mutated_tree, places, write
from support.conversations import Says, a_row, call, hold
from support.costs import costs_its_length
from support.tool_calls import FAMILIES, TOOLS, Case, Family, cases, outcome, tools_for
from turnwise.assembly import read_scripts
from turnwise.chat.renderer import Renderer
from turnwise.chat.tool_calls import FORMATS, ToolFormat, format_by_name
from turnwise.commands.convert import as_recipe
from turnwise.commands.show import Selection, show
from turnwise.compat.swift import from_swift_arguments
from turnwise.compat.verl.convert import from_verl_arguments
from turnwise.config.recipe import load
from turnwise.config.sft_checks import refuse_sft_without_effect
from turnwise.config.train_checks import refuse_without_effect
from turnwise.data.conversations import read_conversations
from turnwise.data.images import load_image
from turnwise.data.rows import read_rows
from turnwise.environments.mcp import McpServers
from turnwise.environments.search import read_corpus
from turnwise.environments.tools.toolbox import Tools
from turnwise.errors import DataError, RunError, TurnwiseError
from turnwise.options.schema import Config
from turnwise.record.trajectory_json import trajectory_record
from turnwise.user_code.references import resolve

# Damaged recipes, overrides and data files: each is read, or refused with a `TurnwiseError`; nothing else is ever
# raised.


ROUNDS = 250
"""Data files of each test."""

RECIPE_ROUNDS = 80
"""Recipes of each test: PyYAML is slow."""

ROOT = Path(__file__).parent.parent.parent

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="

ROWS: list[dict[str, Any]] = [
    {
        "prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "<image> hi"}],
        "images": [f"data:image/png;base64,{PNG}"],
        "answer": 3,
        "id": "x",
    },
    {"prompt": "Q", "answer": "#### 2", "extra_info": {"a": [1, 2]}},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
            {"role": "tool", "content": "z", "tool_call_id": "1"},
            {"role": "assistant", "content": "done", "weight": 0.5},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    },
]


def whole_recipe() -> dict[str, Any]:
    config, _ = load(RECIPES[0])
    return config.model_dump(mode="json")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_damaged_recipe_is_read_or_refused_with_a_message(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    outcomes: list[bool] = []
    for _ in range(RECIPE_ROUNDS):
        text = draw.choice(RECIPES).read_text(encoding="utf-8")
        kind = draw.random()
        if kind < 0.4:
            tree = yaml.safe_load(text) if draw.random() < 0.6 else whole_recipe()
            text = yaml.dump(mutated_tree(tree, draw))
        elif kind < 0.7:
            lines = text.split("\n")
            place = draw.randrange(len(lines))
            lines[place] = f"{lines[place].partition(':')[0]}: {draw.choice(RAW)}"
            text = "\n".join(lines)
        else:
            text = mutated_text(text, draw)
        loaded = accepted_or_refused(load, write(tmp_path / "recipe.yaml", text))
        outcomes.append(loaded is not None)
        if loaded is not None:
            accepted_or_refused(refuse_without_effect, loaded[0])
            accepted_or_refused(refuse_sft_without_effect, loaded[0])
    assert set(outcomes) == {True, False}  # the damage is neither harmless nor total


@pytest.mark.slow
def test_a_damaged_override_is_read_or_refused_with_a_message() -> None:
    draw = random.Random(0)
    keys = [".".join(map(str, place)) for place in places(whole_recipe())]
    keys += ["a..b", ".", "", "x", "engine.name", "train.lr.x", "tools.0.use", "environment.arguments.x"]
    for _ in range(RECIPE_ROUNDS):
        value = draw.choice(RAW) if draw.random() < 0.5 else str(draw.choice(VALUES))
        override = f"{draw.choice(keys)}{draw.choice(['=', '=', '=', ''])}{value}"
        loaded = accepted_or_refused(load, draw.choice(RECIPES), [override])
        assert loaded is None or isinstance(loaded[0], Config)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("read", [read_rows, read_conversations])
def test_a_damaged_row_is_read_or_refused_with_a_message(read: Any, seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    for _ in range(ROUNDS):
        text = json.dumps(mutated_tree(draw.choice(ROWS), draw))
        if draw.random() < 0.3:
            text = mutated_text(text, draw)
        columns = draw.choice([{}, {}, {"answer": "answer"}, {"id": "id"}, {"prompt": "messages"}])
        rows = accepted_or_refused(read, str(write(tmp_path / "rows.jsonl", text)), columns=columns, system="s")
        for row in rows or ():
            assert str(row).encode("utf-8")  # no half of a surrogate pair came through


# values that were accepted once, and made a run wrong


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.betas=[5, 9]", "train.betas.0: input should be less than 1"),
        ("train.lr=.inf", "train.lr: input should be a finite number"),
        ("train.weight_decay=.inf", "train.weight_decay: input should be a finite number"),
        ("loss.entropy_coef=.nan", "loss.entropy_coef: input should be a finite number"),
        ("sampling.temperature=.inf", "sampling.temperature: input should be a finite number"),
        ('data.train=""', "data.train: it must not be empty"),
        ('model.path="  "', "model.path: it must not be empty"),
        ('output="a\\0b"', "contains a NUL character"),
        ('sampling.stop=[""]', "sampling.stop.0: string should have at least 1 character"),
        ("environment.arguments.x=!!set {a}", "is a set; write a text, a number, a list or a mapping"),
        (f"seed={'9' * 5000}", "is not YAML: an integer has more than 4,300 digits; write it as a text"),
        (f"seed=!!int {'z' * 5000}", "a value does not fit its type: invalid literal for int() with base 10: 'zzz"),
        (f"seed={'9' * 40}", "an integer does not fit into 64 bits"),
        ("environment.arguments={a: 1, a: 2}", "the key 'a' occurs twice"),
        ("environment.arguments.x=&a [*a]", "nested deeper than 64 levels, or an alias contains itself"),
    ],
)
def test_values_that_make_no_sense_are_refused(override: str, message: str) -> None:
    with pytest.raises(TurnwiseError) as error:
        load(ROOT / "recipes" / "calculator.yaml", [override])
    assert message in str(error.value)
    assert len(str(error.value)) < 500


def test_a_date_in_a_recipe_stays_a_text() -> None:
    config, _ = load(ROOT / "recipes" / "calculator.yaml", ["environment.arguments.day=2020-01-31"])
    assert config.environment.arguments["day"] == "2020-01-31"


def test_aliases_that_expand_to_billions_of_values_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    with pytest.raises(TurnwiseError, match="contains more than 1,000,000 values"):
        load(write(tmp_path / "recipe.yaml", "\n".join(lines)))


def test_options_of_turnwise_rollout_are_refused_in_training() -> None:
    config, _ = load(ROOT / "recipes" / "calculator.yaml", ["rollout.max_rows=3"])
    with pytest.raises(TurnwiseError, match=r"rollout\.max_rows has no effect in training"):
        refuse_without_effect(config)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "Q", "answer": null}', "the column 'answer' is null, and the recipe uses it as 'answer'"),
        ('{"prompt": "Q", "answer": 1, "answer": 2}', "the key 'answer' occurs twice"),
        ('{"prompt": "\\ud800", "answer": 1}', "contains half of a surrogate pair"),
        ('{"prompt": [{"role": "wizard", "content": "Q"}], "answer": 1}', "message 1 has the role 'wizard'"),
        ('{"prompt": [{"role": "user", "content": 7}], "answer": 1}', "message 1 has the content 7"),
        ('{"prompt": [{"role": "user", "content": [{"type": "text"}]}], "answer": 1}', "has a part without a text"),
        (f'{{"prompt": "Q", "answer": {"[" * 100}{"]" * 100}}}', "nested deeper than 64 levels"),
        (f'{{"prompt": "Q", "answer": {"9" * 5000}}}', "an integer has more than 4,300 digits; write it as a text"),
    ],
)
def test_rows_that_make_no_sense_are_refused(row: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TurnwiseError) as error:
        read_rows(str(write(tmp_path / "rows.jsonl", row)), columns={"answer": "answer"})
    assert message in str(error.value)
    assert "rows.jsonl:1" in str(error.value)


# Damaged records: `turnwise show` prints them, or refuses them with the file, the line and the key.


RECORDS_ROUNDS = 60


async def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@pytest.mark.slow
def test_a_damaged_record_is_shown_or_refused_with_a_message(tmp_path: Path) -> None:
    draw = random.Random(0)
    one = hold(Says(call("add", '{"a": 1, "b": 2}'), "It is 3."), lambda: Tools([add]), row=a_row("1+2?", answer=3))
    one.reward, one.advantages = 1.0, [0.5, 0.5]
    one.step = 1
    record = json.loads(json.dumps(trajectory_record(one)))
    metrics = {"step": 1, "reward/mean": 0.5, "reward/std": 0.1, "turns/mean": 2.0, "seconds/step": 0.5}
    options: list[dict[str, Any]] = [{}, {"last": 1}, {"worst": 1, "tokens": True}, {"failed": True}, {"step": 1}]
    outcomes: set[bool] = set()
    console = Console(width=80, no_color=True)
    for _ in range(RECORDS_ROUNDS):
        lines = {"trajectories": record, "metrics": metrics, "evaluations": metrics}
        damaged = draw.choice(["trajectories", "trajectories", "metrics", "evaluations"])
        for name, value in lines.items():
            text = json.dumps(mutated_tree(value, draw) if name == damaged else value) + "\n"
            text = mutated_text(text, draw) if name == damaged and draw.random() < 0.3 else text
            (tmp_path / f"{name}.jsonl").write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            with console.capture() as captured:
                chosen = dict(draw.choice(options))
                tokens = chosen.pop("tokens", False)
                show(console, tmp_path, Selection(**chosen), tokens=tokens)
            captured.get().encode("utf-8")
            outcomes.add(True)
        except RunError as error:
            str(error).encode("utf-8")
            outcomes.add(False)
    assert outcomes == {True, False}


# Damaged files of MCP servers, corpora and scripts, and paths that cannot be: read, or refused with a
# `TurnwiseError`.


SERVICES_ROUNDS = 100

SERVERS = {
    "mcpServers": {
        "a": {"url": "https://example.org/mcp", "auth_token": "t", "headers": {"x": "y"}, "type": "http"},
        "b": {"command": "python", "args": ["-m", "x"], "env": {"A": "b"}, "cwd": ".", "type": "stdio"},
    }
}

FILES: list[tuple[Callable[..., Any], Any]] = [
    (lambda path: McpServers.from_file(path), SERVERS),
    (read_corpus, {"id": "7", "title": "Paris", "text": "Paris is the capital."}),
    (lambda path: read_scripts(str(path)), ["Hello.", "Bye."]),
]


@pytest.mark.parametrize(("read", "tree"), FILES, ids=["mcp", "corpus", "script"])
def test_a_damaged_file_is_read_or_refused_with_a_message(read: Any, tree: Any, tmp_path: Path) -> None:
    draw = random.Random(0)
    outcomes: set[bool] = set()
    for _ in range(SERVICES_ROUNDS):
        text = json.dumps(mutated_tree(tree, draw))
        text = mutated_text(text, draw) if draw.random() < 0.4 else text
        outcomes.add(accepted_or_refused(read, write(tmp_path / "file.jsonl", text)) is not None)
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": ["x"], "contents": "a"}', "the `id` of a document is a text or a number; this is ['x']"),
        ('{"id": null, "contents": "a"}', "the `id` of a document is a text or a number; this is None"),
        ('{"contents": "a", "contents": "b"}', "the key 'contents' occurs twice"),
        ('{"contents": "\\ud800"}', "contains half of a surrogate pair"),
        (f'{{"id": {"9" * 5000}, "contents": "a"}}', "an integer has more than 4,300 digits; write it as a text"),
        ("[" * 3000, "nested deeper than 64 levels"),
    ],
)
def test_a_document_that_makes_no_sense_is_refused_with_its_line(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        read_corpus(write(tmp_path / "corpus.jsonl", f'{{"contents": "fine"}}\n{line}\n'))
    assert "corpus.jsonl:2" in str(error.value)
    assert message in str(error.value)


READERS: dict[str, Callable[[str], Any]] = {
    "rows": lambda path: read_rows(f"{path}.jsonl"),
    "directory": lambda path: read_rows(f"./{path}") if path[0] != "~" else read_rows(path),
    "recipe": load,
    "script": read_scripts,
    "corpus": lambda path: read_corpus(Path(path)),
    "servers": lambda path: McpServers.from_file(path),
    "reference": lambda path: resolve(f"{path}.py:name", key="environment.use"),
    "image": lambda path: load_image(path, where="the image"),
    "model": lambda path: Renderer.from_pretrained(path if path[0] == "~" else f"./{path}"),
    "swift": lambda path: from_swift_arguments([f"{path}.yaml"]),
    "verl": lambda path: from_verl_arguments([], folder=path, name="main"),
}


@pytest.mark.parametrize("path", ["x" * 3000, "~no-such-user/x", "a\0b"], ids=["long", "user", "nul"])
@pytest.mark.parametrize("reader", list(READERS))
def test_a_path_that_cannot_be_is_refused_with_a_message(reader: str, path: str) -> None:
    with pytest.raises(TurnwiseError):
        READERS[reader](path)


# Arguments of ms-swift and configurations of verl with random mistakes: each is converted or refused by name.


# Damaged arguments of ms-swift: each list of words, script and file is converted, or refused with a `TurnwiseError`.


COMPAT_ROUNDS = 60

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
    outcomes = {converts_or_is_refused(damaged(draw)) for _ in range(COMPAT_ROUNDS)}
    assert outcomes == {True, False}  # the damage is neither harmless nor total


@pytest.mark.usefixtures("folder")
def test_a_damaged_script_is_converted_or_refused_with_a_message(folder: Path) -> None:
    draw = random.Random(2)
    script = folder / "s.sh"
    for _ in range(COMPAT_ROUNDS):
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
    for _ in range(COMPAT_ROUNDS):
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

COMPAT_FILES: dict[str, Any] = {name: yaml.safe_load(text) for name, text in
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


@pytest.mark.parametrize("name", list(COMPAT_FILES))
def test_a_damaged_file_of_verl_is_converted_or_refused_with_a_message(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(name)
    monkeypatch.chdir(tmp_path)
    Path("config").mkdir()
    Path("rew.py").write_text("def compute_score(*a, **k):\n    return 1.0\n", encoding="utf-8")
    for file, tree in COMPAT_FILES.items():
        Path(f"config/{file}.yaml").write_text(yaml.dump(tree), encoding="utf-8")
    converted: list[bool] = []
    for _ in range(VERL_ROUNDS):
        write(Path(f"config/{name}.yaml"), verl_damaged(COMPAT_FILES[name], draw))
        more = [f"actor_rollout_ref.rollout.n={draw.choice(RAW + VALUES)}"] if draw.random() < 0.2 else []
        found = accepted_or_refused(from_verl_arguments, more, folder="config", name="main")
        converted.append(found is not None)
        assert found is None or as_recipe(found).encode("utf-8")
    assert set(converted) >= {True}


# Every format on the torture table, and on whatever else can be sampled


every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.title)

every_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)


@pytest.mark.parametrize(
    ("family", "case"),
    [pytest.param(family, case, id=f"{family.title}: {case.name}") for family in FAMILIES for case in cases(family)],
)
def test_no_good_call_is_lost_and_every_bad_one_is_reported(family: Family, case: Case) -> None:
    calls = family.read(case.text, TOOLS)
    assert outcome(calls) == case.expected
    for found in calls:
        if found.error is not None:
            assert found.error.startswith("this tool call cannot be parsed: ")
            assert ". Write it as " in found.error
            assert found.arguments == {}
    assert all(call.id in (call.written_id, f"call_{n}") for n, call in enumerate(calls))
    assert len({call.id for call in calls}) == len(calls)


def test_every_format_is_tortured() -> None:
    assert {family.format for family in FAMILIES} == {format.name for format in FORMATS}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), inner),
    max_leaves=5,
)


@every_family
@settings(max_examples=20)
@given(data=st.data())
def test_what_a_template_writes_is_read_back(family: Family, data: st.DataObject) -> None:
    pieces = st.sampled_from([family.marks, family.close, '"', "'", "\n", "\\", "{", "]", "</", "ü你", " "])
    texts = st.lists(st.text(max_size=5) | pieces, max_size=4).map("".join)
    texts = texts.filter(lambda text: not family.forbidden.search(text))
    keys = st.text(max_size=8) if family.keys == ".*" else st.from_regex(family.keys, fullmatch=True)
    arguments = st.dictionaries(keys, texts | JSON.filter(lambda value: _fits(family, value)), max_size=3)
    names = st.from_regex(r"[a-z_]{1,10}", fullmatch=True)
    # a tool declares one type for each argument, so each name is called once
    calls = data.draw(st.lists(st.tuples(names, arguments), min_size=1, max_size=3, unique_by=lambda call: call[0]))
    assert outcome(family.read(family.write(calls), tools_for(calls))) == calls


def _fits(family: Family, value: Any) -> bool:
    """Whether a value holds nothing that the family has no way to write."""
    if isinstance(value, str):
        return not family.forbidden.search(value)
    if isinstance(value, list):
        return all(_fits(family, item) for item in value)
    if isinstance(value, dict):
        return all(_fits(family, item) for item in value.values())
    return True


@every_format
@settings(max_examples=30)
@given(data=st.data())
def test_whatever_is_sampled_can_be_read(format: ToolFormat, data: st.DataObject) -> None:
    family = data.draw(st.sampled_from([family for family in FAMILIES if family.format == format.name]))
    good = family.write([("f", {"x": "1"})])
    pieces = [
        *family.around,
        *family.think,
        family.close,
        family.marks,
        good,
        good[: len(good) // 2],
        "[",
        "{",
        '"',
        "'",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces) | st.text(max_size=3), max_size=12)))
    thinking = data.draw(st.booleans())
    reading = format.parse(text, first_id=2, thinking=thinking, tools=data.draw(st.sampled_from([(), TOOLS])))
    assert len({call.id for call in reading.calls}) == len(reading.calls)
    for number, found in enumerate(reading.calls, 2):
        assert found.id == found.written_id or found.id.rstrip("x") == f"call_{number}"
    assert all(call.name for call in reading.calls if call.error is None)
    assert len(reading.content) + len(reading.reasoning) <= len(text) + len(reading.calls)


HOSTILE = [
    *(
        "[",
        "{",
        "[{",
        "{[",
        '{"',
        "['",
        "[{'",
        '{"a":',
        '[{"a":1},',
        '{"name":',
        '[{"name":"f"},',
        '{"name": "f"} {',
        "; {",
    ),
    *(
        '{"type": "function", "function": {',
        '{"n":1e',
        "<|python_tag|>{",
        "'",
        "'''",
        "\n[f(",
        "\n[f(a='",
        "[f(a='',",
        "[f(a='b'c",
    ),
    *(
        "<tool_call>",
        "<tool_call>f",
        "<function=f><parameter=x>",
        "</parameter>",
        "<think>",
        "</think>",
        "\n",
        "<|channel|>",
    ),
]


@every_format
def test_hostile_text_costs_no_more_than_its_length(format: ToolFormat) -> None:
    of_format = [family for family in FAMILIES if family.format == format.name]
    good = [family.write([("f", {"x": "1"})]) for family in of_format]
    units = [*HOSTILE, *(one[: len(one) // 2] for one in good)]
    units += [family.around[0] + family.call("f", family.broken) for family in of_format]
    for unit in units:
        assert costs_its_length(partial(format.parse, tools=TOOLS), unit, before=of_format[0].around[0]), unit


@every_format
def test_white_space_costs_no_more_than_its_length_wherever_a_call_breaks_off(format: ToolFormat) -> None:
    for family in [family for family in FAMILIES if family.format == format.name]:
        good = family.write([("f", {"x": "1"})])
        begin = time.process_time()
        for length in range(1, len(good)):
            for space in (" ", "\n"):
                format.parse(good[:length] + space * 5_000 + "x", tools=TOOLS)
        assert time.process_time() - begin < 6


def test_calls_that_never_end_are_not_read_to_the_end_again_and_again() -> None:
    begin = time.process_time()
    (first, *_) = format_by_name("pythonic").parse('[f(, f(a="' * 4_000, tools=TOOLS).calls
    assert time.process_time() - begin < 6
    assert first.error is not None
