"""The recipes of the repository run, and mistakes that users often make are told."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

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
