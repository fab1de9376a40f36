"""The recipes of the repository run, the demo's model is what they need, and mistakes that users often make are told."""

from __future__ import annotations

import ast
import asyncio
import copy
import dataclasses
import importlib.util
import json
import logging
import operator
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.conversations import Says, a_row, hold
from support.recipes import save_recipe
from support.servers import Answer, serving
from turnwise import Opening, Reply, assembly, environment, user_message
from turnwise.cli import main
from turnwise.config.recipe import load
from turnwise.data.gsm8k import main as preprocess
from turnwise.environments.tools.schema import FromSchema, schema_of
from turnwise.errors import ConfigError, DataError, RunError
from turnwise.options.schema import Config
from turnwise.training.checkpoint import Checkpoints
from turnwise.types import Row
from turnwise.user_code.references import resolve

# The recipes that come with the repository run as they are, and the demo learns what it promises.


ROOT = Path(__file__).parent.parent

SHARED = ROOT.parent / "shared"


@pytest.fixture
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes name files relative to where one runs them, as the README does."""
    monkeypatch.chdir(ROOT)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("from_the_root")
@pytest.mark.parametrize(
    "recipe", sorted(str(path.relative_to(ROOT / "recipes")) for path in (ROOT / "recipes").rglob("*.yaml"))
)
def test_every_recipe_is_valid(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, notes = load(ROOT / "recipes" / recipe)
    assert isinstance(config, Config)
    assert notes == []


@pytest.mark.slow
@pytest.mark.usefixtures("from_the_root")
def test_the_calculator_recipe_takes_two_steps(tmp_path: Path) -> None:
    out = tmp_path / "run"
    small = ["train.steps=2", "train.batch_size=4", "train.group_size=4", "eval.max_rows=2"]
    assert main(["train", "recipes/calculator.yaml", *small, f"output={out}"]) == 0
    metrics = lines(out / "metrics.jsonl")
    assert [one["step"] for one in metrics] == [1, 2]
    assert all(one["failed"] == 0 and one["template_mismatch"] == 0 for one in metrics)
    assert all(0 < one["ratio/max_deviation"] < 1e-3 for one in metrics)
    assert all(one["tool_calls/mean"] >= 0.8 for one in metrics)
    assert [one["step"] for one in lines(out / "evaluations.jsonl")] == [0, 2]


@pytest.mark.usefixtures("from_the_root")
@pytest.mark.parametrize(
    ("turns", "reward", "wasted"),
    [
        (["7", "11", "9", "10"], 1.0, 0.0),
        (["7", "5", "twelve", "13"], 0.25, 0.5),  # 5 is below 7, which was too low
        (["10"], 1.0, 0.0),
        (["99", "1000000000", "0", "no"], 0.0, 1.0),
    ],
)
def test_the_number_game_counts_guesses_that_were_excluded(turns: list[str], reward: float, wasted: float) -> None:
    game = resolve("recipes/smollm2/game.py:number_game", key="environment.use")
    found = hold(Says(*turns), game, row=a_row(secret=10, low=3, high=17))
    assert sum(turn.reward for turn in found.turns) == reward
    assert found.metrics["wasted"] == wasted


@pytest.mark.usefixtures("from_the_root")
@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("6 * 4 = 24\n#### 24", 1.0),
        ("24 eggs.\n#### 24", 1.0),
        ("6 + 4 = 10\n#### 10", 0.3),  # right, with numbers of the question
        ("4 / 0 = 4\n#### 4", 0.1),
        ("6 * 5 = 30\n#### 30", 0.1),  # 5 is no number of the question
        ("6 + 4 = 11\n#### 11", 0.1),
        ("6 * 4 = 24", 0.0),
    ],
)
def test_parts_of_a_solution_are_worth_something(text: str, reward: float) -> None:
    solved = resolve("recipes/smollm2/gsm8k.py:solved", key="environment.use")
    row = a_row(
        "A box has 6 rows of 4 eggs, and 0 are broken. How many eggs are there?", answer="6*4=<<6*4=24>>24\n#### 24"
    )
    found = hold(Says(text), solved, row=row)
    assert sum(turn.reward for turn in found.turns) == reward
    assert found.metrics["right"] == (reward == 1)


@pytest.mark.usefixtures("from_the_root")
def test_answers_with_a_calculator_are_worth_what_they_have_in_common_with_the_right_ones(tmp_path: Path) -> None:
    """The first rows are 24/4 and 32*37. A call that the calculator does not answer is worth nothing."""
    turns = [
        ['[calculator(expression="24/4")]', "The answer is 6."],
        ['[calculator(expression="32+37")]', "The answer is 69."],
    ]
    others = [["The answer is 6."], ['[calculator(expression="32*many")]', "I do not know."]]
    for number, (texts, rewards) in enumerate(((turns, [1.5, 0.25]), (others, [1.0, 0.0]))):
        script = tmp_path / f"{number}.jsonl"
        script.write_text("".join(f"{json.dumps(one)}\n" for one in texts))
        engine = ["engine.name=scripted", f"engine.script={script}", "model.path=demo/model", "rollout.max_rows=2"]
        out = tmp_path / str(number)
        words = [*engine, "override_checks=[tool calls, round trip]", "--out", str(out)]
        assert main(["rollout", "recipes/smollm2/tool.yaml", *words]) == 0
        assert [one["reward"] for one in lines(out / "trajectories.jsonl")] == rewards


def gsm8k(folder: Path, source: Path | None) -> Path:
    """Real rows where there are some, else rows of the same form."""
    for name in ("train.jsonl", "test.jsonl"):
        if source is not None:
            rows = source.joinpath(name).read_text(encoding="utf-8").splitlines()[:64]
        else:
            answer = "It is <<1200+34=1234>>1,234 in all.\n#### 1,234"
            rows = [
                json.dumps({"question": f"What is {n} plus 1,200 + {34 - n}?", "answer": answer}) for n in range(16)
            ]
        (folder / name).write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("from_the_root")
def test_gsm8k_runs_on_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SHARED / "gsm8k"
    monkeypatch.setenv("GSM8K", str(gsm8k(tmp_path, real if real.is_dir() else None)))
    out = tmp_path / "run"
    small = [
        "train.steps=2",
        "train.batch_size=2",
        "train.group_size=2",
        "eval.max_rows=2",
        "limits.tokens_per_turn=32",
    ]
    assert main(["train", "recipes/gsm8k.yaml", *small, f"output={out}"]) == 0
    metrics, conversations = lines(out / "metrics.jsonl"), lines(out / "trajectories.jsonl")
    assert len(metrics) == 2
    assert len(conversations) == 8
    assert all(one["failed"] == 0 and one["template_mismatch"] == 0 for one in metrics)
    assert all(one["ratio/max_deviation"] < 1e-3 for one in metrics)
    for one in conversations:
        assert one["messages"][0]["role"] == "system"
        assert "####" in one["row"]["answer"]
        for segment in one["segments"]:
            assert (
                len(segment["token_ids"]) == len(segment["turn"]) == len(segment["logprobs"]) == len(segment["version"])
            )


@pytest.mark.slow
@pytest.mark.usefixtures("from_the_root")
def test_gsm8k_runs_in_a_clone_as_it_is_and_without_held_out_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GSM8K", raising=False)
    small = ["train.steps=1", "train.batch_size=2", "train.group_size=2", "limits.tokens_per_turn=32", "data.eval=null"]
    assert main(["train", "recipes/gsm8k.yaml", *small, f"output={tmp_path / 'run'}"]) == 0
    assert "data.eval=null removes the recipe's eval.max_rows, which need held-out rows" in " ".join(
        capsys.readouterr().out.split()
    )
    conversations = lines(tmp_path / "run" / "trajectories.jsonl")
    assert [one["error"] for one in conversations] == [None] * 4
    assert all("####" in one["row"]["answer"] for one in conversations)


def published(folder: Path) -> Path:
    """A file of GSM8K as it is published: real rows where there are some."""
    return gsm8k(folder, SHARED / "gsm8k" if (SHARED / "gsm8k").is_dir() else None)


TWO_STEPS = [
    "train.steps=2",
    "train.batch_size=2",
    "train.group_size=2",
    "limits.tokens_per_turn=32",
    "checkpoint.keep=1",
]


def two_steps(recipe: str, out: Path, *options: str) -> list[dict[str, Any]]:
    """Its conversations, after two steps in which nothing broke."""
    assert main(["train", f"recipes/{recipe}.yaml", *TWO_STEPS, *options, f"output={out}"]) == 0
    metrics, conversations = lines(out / "metrics.jsonl"), lines(out / "trajectories.jsonl")
    assert [one["step"] for one in metrics] == [1, 2]
    assert [(one["failed"], one["template_mismatch"]) for one in metrics] == [(0, 0)] * 2, [
        one["error"] for one in conversations
    ]
    return [one for one in conversations if one["error"] is None]


@pytest.mark.usefixtures("from_the_root")
@pytest.mark.slow
@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_gsm8k_with_an_interaction_runs_on_the_rows_of_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    data = tmp_path / "data"
    for split in ("train", "test"):
        source = published(tmp_path) / f"{split}.jsonl"
        command = ["--source", str(source), "--kind", "interaction", "--format", format, "--out", str(data)]
        assert preprocess(command) == 0
    monkeypatch.setenv("GSM8K_INTERACTION", str(data))
    files = [] if format == "parquet" else [f"data.train={data}/train.jsonl", f"data.eval={data}/test.jsonl"]
    for one in two_steps("gsm8k_interaction", tmp_path / "run", "limits.turns=2", "eval.max_rows=2", *files):
        assert one["row"]["extra_info"]["interaction_kwargs"]["name"] == "gsm8k"
        assert one["stop"] in ("done", "max_turns", "length")


@pytest.mark.usefixtures("from_the_root")
@pytest.mark.slow
def test_gsm8k_with_a_tool_runs_on_the_rows_of_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    for split in ("train", "test"):
        source = published(tmp_path) / f"{split}.jsonl"
        assert preprocess(["--source", str(source), "--kind", "tool", "--format", "parquet", "--out", str(data)]) == 0
    monkeypatch.setenv("GSM8K_TOOL", str(data))
    for one in two_steps("gsm8k_tool", tmp_path / "run", "limits.turns=2", "eval.max_rows=2"):
        assert [tool["function"]["name"] for tool in one["tools"]] == ["calc_gsm8k_reward"]


@pytest.mark.usefixtures("from_the_root")
@pytest.mark.slow
def test_the_mcp_recipe_takes_two_steps(tmp_path: Path) -> None:
    conversations = two_steps("mcp", tmp_path / "run", "limits.tokens_per_turn=64", "eval.max_rows=2")
    outcomes = [outcome for one in conversations for turn in one["turns"] for outcome in turn["tool_calls"]]
    assert {tool["function"]["name"] for one in conversations for tool in one["tools"]} == {"calculator"}
    assert any(outcome["error"] is None and (outcome["content"] or "").lstrip("-").isdigit() for outcome in outcomes)


@pytest.mark.slow
@pytest.mark.usefixtures("from_the_root")
def test_the_gym_recipe_takes_two_steps(tmp_path: Path) -> None:
    conversations = two_steps("gym", tmp_path / "run", "limits.tokens_per_turn=64")
    assert all(one["messages"][0]["content"].endswith("?") for one in conversations)
    assert any("right" in turn["info"] for one in conversations for turn in one["turns"])
    told = [message["content"] for one in conversations for message in one["messages"] if message["role"] == "user"]
    assert any(text.startswith(("Right.", "No, it is ")) for text in told)


@pytest.mark.usefixtures("from_the_root")
@pytest.mark.slow
def test_the_recipe_of_a_modelled_user_takes_two_steps(tmp_path: Path) -> None:
    conversations = two_steps("modelled_user", tmp_path / "run", "limits.tokens_per_turn=64", "eval.max_rows=2")
    assert any(sum(message["role"] == "user" for message in one["messages"]) == 2 for one in conversations)


@pytest.mark.usefixtures("from_the_root")
@pytest.mark.slow
def test_a_modelled_user_behind_an_endpoint_takes_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the overrides that the page tells."""
    monkeypatch.setenv("USER_MODEL_KEY", "swordfish")
    said = Answer({"choices": [{"message": {"content": "And?"}}]})
    with serving(lambda question, number: said) as server:
        endpoint = f'{{url: "{server.url}/v1", model: Qwen/Qwen3-8B, api_key_env: USER_MODEL_KEY}}'
        options = ["environment.arguments.chat_model=null", f"environment.arguments.endpoint={endpoint}"]
        conversations = two_steps(
            "modelled_user", tmp_path / "run", "limits.tokens_per_turn=64", "eval.max_rows=2", *options
        )
    assert any(message["content"] == "And?" for one in conversations for message in one["messages"])
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer swordfish"}


@pytest.mark.usefixtures("from_the_root")
@pytest.mark.parametrize("recipe", ["gsm8k_tool", "gsm8k_interaction", "mcp", "gym", "modelled_user"])
def test_a_recipe_has_a_page_that_tells_its_command(recipe: str) -> None:
    name = "gsm8k" if recipe.startswith("gsm8k") else recipe  # one page for two recipes
    page = (ROOT / "recipes" / f"{name}.md").read_text(encoding="utf-8")
    assert f"turnwise train recipes/{recipe}.yaml" in page
    assert page.count("\n") <= 60


@pytest.mark.usefixtures("from_the_root")
@pytest.mark.slow
@pytest.mark.skipif(not SHARED.joinpath("gsm8k").is_dir(), reason="the whole data set is not here")
def test_every_row_of_gsm8k_can_be_answered_right_and_wrong(tmp_path: Path) -> None:
    """The mechanics on real rows: a scripted model gives the true answer to the even ones, at the second try."""
    source = SHARED / "gsm8k" / "test.jsonl"
    rows = lines(source)
    script = tmp_path / "script.jsonl"
    calls = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call>'
    texts = [
        [calls, "#### -1", f"So it is {row['answer'].splitlines()[-1]}"] if n % 2 == 0 else ["#### -1", "I give up."]
        for n, row in enumerate(rows)
    ]
    script.write_text("\n".join(json.dumps(text) for text in texts))
    options = [f"data.train={source}", "engine.name=scripted", f"engine.script={script}"]
    assert main(["rollout", "recipes/gsm8k.yaml", *options, "--out", str(tmp_path / "out")]) == 0
    done = lines(tmp_path / "out" / "trajectories.jsonl")
    assert [one["row"]["answer"] for one in done] == [row["answer"] for row in rows]
    assert [one["reward"] for one in done] == [0.5 if n % 2 == 0 else 0.0 for n in range(len(rows))]
    assert {one["error"] for one in done} == {None}
    assert {one["template_mismatch"] for one in done} == {None}


@pytest.mark.usefixtures("from_the_root")
@pytest.mark.slow
def test_the_demo_learns_what_it_promises(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "turnwise.cli", "train", "recipes/calculator.yaml", f"output={out}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [one["reward/mean"] for one in lines(out / "metrics.jsonl")]
    assert rewards[0] <= 0.6
    assert sum(rewards[-5:]) / 5 >= 0.93
    before, after = lines(out / "evaluations.jsonl")
    assert before["reward/mean"] <= 0.6
    assert after["reward/mean"] >= 0.9
    assert "held-out questions" in done.stdout
    assert "held-out reward 0." in done.stdout  # with intervals and the paired test
    assert (out / "curve.png").stat().st_size > 10_000


@pytest.mark.usefixtures("from_the_root")
def test_the_modelled_user_loads_its_model_once_and_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    module = resolve("recipes/modelled_user.py:user", key="chat_model").__globals__
    load, threads = module["_load"], []

    def loading() -> Any:
        threads.append(threading.current_thread())
        return load()

    monkeypatch.setitem(module, "_load", loading)
    module["chat_model"].cache_clear()

    async def ask() -> list[str]:
        question = [{"role": "user", "content": "Are you sure?"}]
        return await asyncio.gather(module["user"](question), module["user"](question))

    answers = asyncio.run(ask())
    assert len(answers) == 2
    assert all(answers)
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


# Mistakes that many users make, each with the message that says what to write.


CODE = """
from turnwise import Opening, Reply, environment

async def forgotten(row):
    turn = yield Opening(messages=row.messages)
    yield Reply(done=True)

async def forgotten_too(**options):
    yield None

def trl(completions, answer, **kwargs):
    return [1.0 for _ in completions]

def trl_prompts(prompts, **kwargs):
    return [1.0 for _ in prompts]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0
"""


@pytest.fixture
def place(tmp_path: Path) -> str:
    (tmp_path / "code.py").write_text(CODE)
    return str(tmp_path / "code.py")


@pytest.mark.parametrize("name", ["forgotten", "forgotten_too"])
def test_a_generator_without_decorator_is_told_to_have_one(model: Path, tmp_path: Path, place: str, name: str) -> None:
    recipe = save_recipe(tmp_path, model, environment=f"{place}:{name}")
    with pytest.raises(ConfigError, match=r"generator function.*write @environment above it"):
        assembly.environment_factory(load(recipe)[0], encode=None)


@pytest.mark.parametrize(
    ("form", "name", "told"),
    [
        ("trajectory", "trl", "turnwise.compat.trl:TrlReward"),
        ("trajectory", "trl_prompts", "turnwise.compat.trl:TrlReward"),
        ("batch", "trl_prompts", "turnwise.compat.trl:TrlReward"),
        ("trajectory", "compute_score", "turnwise.compat.verl:CustomScore"),
        ("batch", "compute_score", "turnwise.compat.verl:CustomScore"),
    ],
)
def test_a_reward_function_of_another_system_is_told_its_adapter(
    model: Path, tmp_path: Path, place: str, form: str, name: str, told: str
) -> None:
    config, _ = load(save_recipe(tmp_path, model, reward={form: [f"{place}:{name}"]}))
    with pytest.raises(ConfigError) as caught:
        assembly.scorer(config).refuse_unknown_columns(assembly.rows(config))
    assert told in str(caught.value)


def test_a_row_says_where_the_prompt_and_the_columns_are() -> None:
    row = Row(id="7", messages=[{"role": "user", "content": "?"}], fields={"answer": "4"})
    for read in (lambda: row["prompt"], lambda: row["messages"]):
        with pytest.raises(KeyError, match=r"the messages of the prompt are row\.messages"):
            read()
    with pytest.raises(
        AttributeError, match=r"a row has no attribute 'answer': the column 'answer' is row\['answer'\]"
    ):
        row.answer  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"the messages of the prompt are row\.messages"):
        row.prompt  # type: ignore[attr-defined]  # noqa: B018
    assert copy.deepcopy(row) == copy.copy(row) == pickle.loads(pickle.dumps(row)) == row


def test_a_prompt_that_ends_with_the_answer_is_refused(
    model: Path, tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"prompt": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}\n{"prompt": "3+3?"}\n'
    )
    single = "turnwise.environments.environment:SingleTurn"
    with pytest.raises(
        DataError, match=r"the prompt of 1 of 2 rows ends with a message of the assistant \(row '1': '4'\)"
    ):
        assembly.rows(load(save_recipe(tmp_path, model, data={"train": str(rows)}, environment=single))[0])
    own = load(save_recipe(tmp_path, model, data={"train": str(rows)}, environment=f"{place}:forgotten"))[0]
    with caplog.at_level(logging.WARNING):
        assert len(assembly.rows(own)) == 2
    assert "forgotten takes it out" in caplog.text


def test_a_docstring_that_describes_no_parameter_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def weather(city: str) -> str:
        """Tell the weather.

        Args:
            town: The town.
        """
        return city

    with caplog.at_level(logging.WARNING):
        schema_of(weather)
    assert "describes town under Args, and the tool has no such parameter" in caplog.text


@pytest.mark.parametrize("schema", [-1, [], {}, True])
def test_a_schema_whose_dialect_is_no_text_is_refused(schema: Any) -> None:
    with pytest.raises(ConfigError, match=r"the parameters of the tool 't' are not a JSON Schema: \$schema: "):
        FromSchema({"$schema": schema, "type": "object"}, "t")


def test_half_a_character_of_an_environment_is_named() -> None:
    @environment
    async def cut(row: Row):  # type: ignore[no-untyped-def]
        yield Opening(messages=row.messages)
        yield user_message("cut \ud83d")
        yield Reply(done=True)

    one = hold(Says("a", "b"), cut)
    assert one.error is not None
    assert one.error.kind == "environment"
    assert "a message with the role 'user' cannot be encoded" in one.error.message
    assert r"contains '\ud83d' at position 4, which is half of a surrogate pair" in one.error.message


def test_checkpoints_are_refused_before_training_where_they_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(RunError, match=r"checkpoint is a directory, and the run would write a link"):
        Checkpoints(tmp_path).refuse_other_files()
    (tmp_path / "checkpoint").rmdir()
    (tmp_path / "checkpoint").symlink_to("checkpoint")  # a link to itself
    Checkpoints(tmp_path).refuse_other_files()
    with pytest.raises(RunError, match="points to no checkpoint"):
        Checkpoints(tmp_path).find()
    (tmp_path / "checkpoint").unlink()
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(RunError, match="checkpoints is a file"):
        Checkpoints(tmp_path).refuse_other_files()


def test_a_folder_in_the_way_of_the_link_stops_a_run_before_its_first_step(model: Path, tmp_path: Path) -> None:
    from turnwise.train import assemble

    (tmp_path / "run" / "checkpoint").mkdir(parents=True)
    recipe = save_recipe(tmp_path, model, train={"steps": 1, "batch_size": 1, "group_size": 2, "lr": 0.01})
    for override in ("replace=false", "replace=true", "resume=auto"):
        with pytest.raises(RunError, match="checkpoint is a directory"):
            assemble(load(recipe, [override])[0])


# The demo's model, template and questions: they are small, they load, and they keep what the demo needs of them


DEMO = Path(__file__).resolve().parents[1] / "demo"
LARGEST = 4 * 2**20  # bytes of the model's directory
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "The expression, for example (3+4)*5."}},
            "required": ["expression"],
        },
    },
}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def call(*expressions, content=None, as_text=False):
    arguments = [{"expression": expression} for expression in expressions]
    functions = [{"name": "calculator", "arguments": json.dumps(one) if as_text else one} for one in arguments]
    calls = [{"type": "function", "id": f"call_{i}", "function": one} for i, one in enumerate(functions)]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def said(role, content):
    return {"role": role, "content": content}


TOM = said("user", "Tom has 12 apples and buys 3 bags of 4 apples. How many apples does Tom have now?")
WRONG = said("user", "That is not right. Read the question again and have another try.")
RIGHT_CALL = [call("12+3*4"), said("tool", "24"), said("assistant", "#### 24")]
WRONG_CALL = [call("12+3"), said("tool", "15"), said("assistant", "#### 15")]
CONVERSATIONS = {
    "answer": [TOM, said("assistant", "#### 24")],
    "tool": [TOM, *RIGHT_CALL],
    "error": [TOM, call("12+*4"), said("tool", "Error: '12+*4' is not an arithmetic expression"), *RIGHT_CALL],
    "retry": [TOM, *WRONG_CALL, WRONG, *RIGHT_CALL],
    "parallel": [TOM, call("3*4", "12+12"), said("tool", "12"), said("tool", "24"), said("assistant", "#### 24")],
    "content and calls": [TOM, call("3*4", content="First the bags."), said("tool", "12"), *RIGHT_CALL],
    "arguments as text": [TOM, call("3*4", as_text=True), said("tool", "12"), *RIGHT_CALL],
    "system": [said("system", "Be exact."), TOM, *WRONG_CALL, said("system", "Careful."), WRONG, *RIGHT_CALL],
}
ODD_TEXTS = [
    "",
    " \t ",
    "\n\n\r\n x",
    "Zoë's naïve café",
    "价格是 24 元",
    "👩‍🚀🏽 ½ ٣ Ⅷ",
    "e\u0301 is not \u00e9",
    "a\u00a0b\u200dc\u2028d",
    "\x00\x7f\uffff",
    '{"x": [1, 2.5e-6], "y": "\\n"}  1,234',
]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO / "model")


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location("demo_questions", DEMO / "questions.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # a dataclass looks up its module while it is made
        spec.loader.exec_module(module)
        yield module


def read(name):
    return [json.loads(line) for line in (DEMO / name).read_text().splitlines()]


def value(node):
    """An expression's value, exactly as its tree says: nothing of what is tested takes part in it."""
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    assert isinstance(node, ast.Constant)
    assert isinstance(node.value, int)
    return node.value


def test_the_model_is_small():
    assert sum(path.stat().st_size for path in (DEMO / "model").rglob("*")) <= LARGEST


def test_the_model_loads_and_agrees_with_its_tokenizer(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model")
    end, pad = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert model.config.vocab_size == len(tokenizer) <= 800
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == end
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == pad


def test_the_model_has_the_template_of_the_repository(tokenizer):
    assert tokenizer.chat_template == (DEMO / "chat_template.jinja").read_text()


def test_the_prompt_is_short(tokenizer):
    ids = tokenizer.apply_chat_template([TOM], tools=[CALCULATOR], add_generation_prompt=True)["input_ids"]
    assert len(ids) < 110


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, [CALCULATOR]], ids=["no tools", "tools"])
def test_a_longer_conversation_extends_a_shorter_one(tokenizer, name, tools):
    messages = CONVERSATIONS[name]
    whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    for n, following in enumerate(messages):
        if n == 0 or messages[n - 1]["role"] == following["role"] == "tool":
            continue  # the results of one turn are one message: they come together
        cue = following["role"] == "assistant"
        shorter = tokenizer.apply_chat_template(messages[:n], tools=tools, add_generation_prompt=cue, tokenize=False)
        assert whole.startswith(shorter)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_turn_has_the_same_tokens_alone_and_in_the_conversation(tokenizer, name):
    messages = CONVERSATIONS[name]
    whole = tokenizer.apply_chat_template(messages, tools=[CALCULATOR])["input_ids"]
    for n, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(messages[:n], tools=[CALCULATOR], add_generation_prompt=True)
            assert whole[: len(prompt["input_ids"])] == prompt["input_ids"]


def test_a_call_is_rendered_as_the_model_writes_it(tokenizer):
    rendered = tokenizer.apply_chat_template([TOM, call("12+3*4")], tokenize=False)
    written = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+3*4"}}\n</tool_call>'
    assert rendered.endswith(f"<|im_start|>assistant\n{written}<|im_end|>\n")
    assert tokenizer.apply_chat_template([TOM, call("12+3*4", as_text=True)], tokenize=False) == rendered
    assert tokenizer.apply_chat_template([TOM, said("assistant", written)], tokenize=False) == rendered


def test_results_of_one_turn_are_one_message(tokenizer):
    rendered = tokenizer.apply_chat_template(CONVERSATIONS["parallel"], tokenize=False)
    results = "<tool_response>\n12\n</tool_response>\n<tool_response>\n24\n</tool_response>"
    assert f"<|im_end|>\n<|im_start|>user\n{results}<|im_end|>\n<|im_start|>assistant\n" in rendered


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_every_digit_is_a_token(tokenizer):
    assert [tokenizer.decode([token]) for token in tokenizer.encode("12+345")] == ["1", "2", "+", "3", "4", "5"]


def test_answers_agree_with_expressions(maker):
    rows = maker.questions(seed=7, count=2000)
    kinds = {re.sub(r"\d+", "n", row["expression"]) for row in rows}
    assert len(kinds) == len(maker.KINDS)
    for row in rows:
        assert value(ast.parse(row["expression"], mode="eval").body) == int(row["answer"])
        assert int(row["answer"]) >= 0


def test_the_expression_has_the_numbers_of_the_question(maker):
    for row in maker.questions(seed=8, count=500):
        numbers = re.findall(r"\d+", row["prompt"][0]["content"])
        assert re.findall(r"\d+", row["expression"]) == numbers


def test_the_same_seed_draws_the_same_questions(maker):
    assert maker.questions(seed=3, count=20) == maker.questions(seed=3, count=20)
    assert maker.questions(seed=3, count=20) != maker.questions(seed=4, count=20)


def test_the_data_does_not_overlap():
    train, heldout = read("train.jsonl"), read("heldout.jsonl")
    assert (len(train), len(heldout)) == (2048, 256)
    assert len({row["prompt"][0]["content"] for row in train + heldout}) == 2048 + 256
    assert set(train[0]) == {"prompt", "answer", "expression"}


@pytest.mark.slow
def test_the_model_can_be_made_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(DEMO))
    spec = importlib.util.spec_from_file_location("demo_make_model", DEMO / "make_model.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(
        module, "LESSONS", [dataclasses.replace(lesson, steps=2, warmup=1) for lesson in module.LESSONS]
    )
    monkeypatch.setattr(module, "TRAIN", 16)
    monkeypatch.setattr(module, "HELDOUT", 4)
    monkeypatch.setattr(sys, "argv", ["make_model.py", "--out", str(tmp_path), "--threads", "1"])
    module.main()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert len(tokenizer) == model.config.vocab_size  # from 16 conversations, the vocabulary is smaller than VOCABULARY
    assert [len((tmp_path / name).read_text().splitlines()) for name in ("train.jsonl", "heldout.jsonl")] == [16, 4]
