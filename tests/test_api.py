"""The Python interface and its nouns: recipes with live objects, typed results, errors; runs as notebooks and repositories."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import yaml

import turnwise
from support import byte_tokenizer
from support.conversations import Says, a_row, completion, hold
from support.places import low_bytes
from support.runs import a_run
from support.templates import STRANGE_CALLS
from support.tiny import save_model, tiny_model
from turnwise import Opening, Reply, environment, errors, record
from turnwise.api import EvaluationRun, Recipe, RunResult, Step, StopTraining, rollout, sft, train
from turnwise.chat.renderer import Renderer
from turnwise.cli import main
from turnwise.environments.environment import SingleTurn
from turnwise.environments.tools.toolbox import Tool, Tools
from turnwise.errors import ConfigError, DataError, Failed, TurnwiseError, boundary, nearest
from turnwise.record.run_directory import RunDirectory
from turnwise.record.writer import write_trajectories
from turnwise.types import Completion, Failure, LogprobKind, Sampling, Segment, Stop, Trajectory, Turn
from turnwise.user_code.references import is_live, live_object, reference_to

# The Python interface: recipes with live objects, the commands as functions, typed results, a running event loop.


ROWS = [{"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(4)]

SMALL = {"steps": 2, "batch_size": 2, "group_size": 2}


def local_objects() -> tuple[Any, Any, Any]:
    """An environment, a reward and a tool that cannot be imported."""

    @environment
    async def ask(row: Any, turns: int = 2) -> Any:
        yield Opening(messages=row.messages)
        for _ in range(turns - 1):
            yield Reply(messages=[{"role": "user", "content": "And?"}])
        yield Reply(reward=1.0, done=True, info={"answer": row["answer"]})

    def length(completion: str) -> float:
        return -len(completion) / 1000

    def look_up(word: str) -> str:
        """Look a word up.

        Args:
            word: The word.
        """
        return word

    return ask, length, look_up


@pytest.mark.slow
@pytest.mark.usefixtures("no_objects_left")
def test_train_with_live_objects(model: Path, tmp_path: Path) -> None:
    ask, length, look_up = local_objects()
    steps: list[Step] = []
    result = train(
        model=model,
        rows=ROWS,
        environment={"use": ask, "arguments": {"turns": 3}},
        tools=[look_up],
        reward=[length],
        train=SMALL,
        limits={"tokens_per_turn": 6, "turns": 3},
        credit="grpo",
        output=tmp_path / "run",
        callbacks=[steps.append],
        progress=False,
    )
    assert [line["step"] for line in result.metrics] == [1, 2] == [step.number for step in steps]
    assert steps[1].metrics["reward/mean"] == result.metrics[1]["reward/mean"]
    assert [t.id for t in steps[1].trajectories] == [t.id for t in result.trajectories[4:]]
    trajectory = result.trajectories[0]
    assert set(trajectory.rewards) == {"turns", "length"}
    assert trajectory.tools[0]["function"]["name"] == "look_up"
    assert (result.model / "model.safetensors").is_file()
    config = yaml.safe_load((result.directory / "config.yaml").read_text())
    assert config["environment"]["use"] == "live:ask"
    frame = result.to_pandas()
    assert list(frame["id"]) == [t.id for t in result.trajectories]
    assert frame["rewards/length"].iloc[0] == trajectory.rewards["length"]
    assert list(result.metrics_frame().index) == [1, 2]
    assert list(record.to_pandas(result.directory)["row"]) == list(frame["row"])


@pytest.mark.slow
@pytest.mark.usefixtures("no_objects_left")
def test_a_resumed_run_finds_its_objects(model: Path, tmp_path: Path) -> None:
    ask, _, _ = local_objects()
    options: dict[str, Any] = {
        "model": model, "rows": ROWS, "environment": ask, "credit": "grpo", "output": tmp_path / "run",
        "limits": {"tokens_per_turn": 4}, "deterministic": True,
    }  # fmt: skip
    train(**options, train=SMALL, progress=False)
    ask, _, _ = local_objects()  # the cell of a notebook is run again: another object of the same name
    result = train(**options, train={**SMALL, "steps": 3}, resume="auto", progress=False)
    assert [line["step"] for line in result.metrics] == [1, 2, 3]


@pytest.mark.usefixtures("no_objects_left")
def test_a_callback_can_stop_the_run(model: Path, tmp_path: Path) -> None:
    class Stops:
        evaluations = 0

        def on_step(self, step: Step) -> None:
            if step.number == 2:
                raise StopTraining

        def on_evaluation(self, step: Step) -> None:
            self.evaluations += 1

    stops = Stops()
    result = train(
        model=model, rows=ROWS, eval_rows=ROWS[:1], environment=low_bytes, limits={"tokens_per_turn": 4}, credit="grpo",
        train={**SMALL, "steps": 9}, checkpoint={"every": 100}, output=tmp_path / "run", callbacks=[stops], progress=False,
    )  # fmt: skip
    assert len(result.metrics) == 2
    assert stops.evaluations == 2 == len(result.evaluations)  # before and after training
    assert json.loads((result.model.parent / "run.json").read_text())["checkpoint"] == 2


@pytest.mark.usefixtures("no_objects_left")
def test_in_a_running_event_loop(model: Path, tmp_path: Path) -> None:
    """As in a notebook: the function is called while a loop runs in the thread."""

    async def cell() -> list[Any]:
        result = rollout(
            model=model, rows=(row for row in ROWS), environment=low_bytes, limits={"tokens_per_turn": 4},
            output=tmp_path / "out", progress=False,
        )  # fmt: skip
        return list(result.trajectories)

    trajectories = asyncio.run(cell())
    assert [t.row["answer"] for t in trajectories] == ["1", "2", "3", "4"]
    assert all(t.reward is not None for t in trajectories)


@pytest.mark.usefixtures("no_objects_left")
def test_sft(model: Path, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}] * 4
    result = sft(model=model, rows=rows, sft={"epochs": 1, "batch_size": 2}, output=tmp_path / "run", progress=False)
    assert [line["step"] for line in result.metrics] == [1, 2]
    assert result.metrics[0]["loss"] > 0


@pytest.mark.usefixtures("no_objects_left")
def test_a_model_object_and_a_data_set(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    tokenizer = byte_tokenizer()
    result = train(
        model=tiny_model(vocabulary=len(tokenizer)),
        tokenizer=tokenizer,
        rows=datasets.Dataset.from_list(ROWS),
        environment=low_bytes,
        limits={"tokens_per_turn": 4},
        train={**SMALL, "steps": 1},
        credit="grpo",
        output=tmp_path / "run",
        progress=False,
    )
    assert len(result.trajectories) == 4
    assert (tmp_path / "run-start-model" / "config.json").is_file()  # so that the run can be resumed


@pytest.mark.usefixtures("no_objects_left")
def test_yaml_and_back(model: Path, tmp_path: Path) -> None:
    recipe = Recipe(model=model, rows="rows.jsonl", environment=low_bytes, train={"steps": 7}, loss="gspo")
    assert recipe.config.environment.use == "support.places:low_bytes"
    recipe.to_yaml(tmp_path / "recipe.yaml")
    again = Recipe.from_yaml(tmp_path / "recipe.yaml", ["train.lr=3e-4"])
    assert again.config.train.lr == 3e-4
    assert again.config.model_copy(update={"train": recipe.config.train}) == recipe.config
    changed = recipe.with_options(train={"lr": 1e-5}, loss={"name": "cispo"})
    assert (changed.config.train.steps, changed.config.train.lr, changed.config.loss.name) == (7, 1e-5, "cispo")
    ask, _, _ = local_objects()
    with pytest.raises(ConfigError, match=r"live:ask.*Put them into a file"):
        recipe.with_options(environment=ask).to_yaml(tmp_path / "other.yaml")


@pytest.mark.usefixtures("no_objects_left")
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"model": "m", "rows": ROWS, "trian": {}}, "there is no option trian.*train"),
        ({"model": "m", "rows": {"prompt": "x"}}, "the rows are a dict"),
        ({"model": "m", "rows": 5}, "the rows are a int"),
        ({"model": "m", "rows": ROWS, "data": {"train": "x.jsonl"}}, "rows and data\\['train'\\] are both given"),
        ({"model": object(), "rows": ROWS}, "model is a object and tokenizer a NoneType"),
        ({"model": "m", "tokenizer": 1, "rows": ROWS}, "remove tokenizer"),
        ({"model": "m", "rows": ROWS, "train": {"steps": "many"}}, "train.steps"),
        ({"rows": ROWS}, "model is missing"),
    ],
)
def test_wrong_options(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Recipe(**options)


@pytest.mark.usefixtures("no_objects_left")
def test_wrong_calls(model: Path, tmp_path: Path) -> None:
    recipe = Recipe(model=model, rows=["missing.jsonl"], environment=low_bytes, output=tmp_path / "run")
    with pytest.raises(ConfigError, match="both given"):
        train(recipe, seed=1)
    with pytest.raises(ConfigError, match=r"Recipe\.from_yaml"):
        train("recipe.yaml")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="there is no"):
        train(recipe, progress=False)
    with pytest.raises(DataError, match="row 2 is a int"):
        train(recipe.with_options(rows=[ROWS[0], 5]), progress=False)  # type: ignore[list-item]


@pytest.mark.usefixtures("no_objects_left")
def test_references() -> None:
    _, length, _ = local_objects()
    assert reference_to(low_bytes, name="environment") == "support.places:low_bytes"
    assert reference_to(json.dumps, name="x") == "json:dumps"
    first = reference_to([1], name="rows_of_this_test")
    assert first == "live:rows_of_this_test"
    assert reference_to([1], name="rows_of_this_test") == "live:rows_of_this_test_2"  # another object
    assert live_object(first, key="data.train") == [1]
    assert reference_to(length, name="reward") == reference_to(length, name="reward") == "live:length"
    _, other, _ = local_objects()
    assert reference_to(other, name="reward") == "live:length"  # defined again
    assert live_object("live:length", key="reward") is other
    assert is_live("live:x")
    with pytest.raises(ConfigError, match="this process does not have it"):
        live_object("live:nothing", key="environment")


@pytest.fixture
def no_objects_left() -> Iterator[None]:
    from turnwise.user_code import references

    yield
    references._objects.clear()


@pytest.mark.slow
@pytest.mark.usefixtures("no_objects_left")
def test_curves_are_drawn_without_changing_the_backend_of_a_notebook(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from turnwise.terminal.train_report import draw_loss, draw_rewards
names = ("reward/mean", "reward/std", "turns/mean", "tool_calls/mean", "tool_errors/mean", "loss")
lines = [{"step": step, **dict.fromkeys(names, 0.1 * step)} for step in (1, 2)]
draw_rewards(Path("rewards.png"), lines, lines)
draw_loss(Path("loss.png"), lines, lines)
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert (tmp_path / "rewards.png").stat().st_size > 10_000
    assert (tmp_path / "loss.png").stat().st_size > 5_000


@pytest.mark.usefixtures("no_objects_left")
def test_modules_beside_functions_of_the_same_name_can_be_imported() -> None:
    import turnwise.rollout.rollout as loop
    import turnwise.sft.fine_tune as run
    import turnwise.train as steps
    from turnwise.rollout import session

    modules = sys.modules
    assert loop is modules["turnwise.rollout.rollout"]  # type: ignore[comparison-overlap]
    assert run is modules["turnwise.sft.fine_tune"]  # type: ignore[comparison-overlap]
    assert session is modules["turnwise.rollout.session"]
    assert steps is train  # the function, with the names of the module
    assert steps.assemble is modules["turnwise.train"].assemble


# `turnwise.evaluate`: the models and the numbers of `turnwise eval`, with live objects and typed results.


EVALUATE_ROWS = [{"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(3)]


def options(model: Path, tmp_path: Path, **changes: Any) -> Any:
    return {
        "model": model, "environment": low_bytes, "limits": {"tokens_per_turn": 4, "turns": 2},
        "eval": {"samples_per_row": 2, "pass_reward": 0.5}, "output": tmp_path / "run", "progress": False, **changes,
    }  # fmt: skip


def test_models_of_all_kinds_are_compared_on_the_same_rows(model: Path, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    trained = turnwise.train(
        **options(model, tmp_path, rows=EVALUATE_ROWS, eval={}), train={"steps": 1, "batch_size": 2, "group_size": 2, "lr": 0.05},
        credit="grpo",
    )  # fmt: skip
    run = turnwise.evaluate(
        **options(model, tmp_path, eval_rows=(row for row in EVALUATE_ROWS), output=tmp_path / "compared"),
        models={
            "same": str(model),
            "trained": trained,
            "object": (tiny_model(vocabulary=len(tokenizer)), tokenizer),
            "cold": {"eval": {"sampling": {"temperature": 0.01}}},
        },
    )
    assert run.directory == tmp_path / "compared-eval"
    assert list(run.models) == ["same", "trained", "object", "cold"]
    assert Path(run.models["trained"].model).resolve() == trained.model.resolve()
    pairs = [(n, "same") for n in ("trained", "object", "cold")]
    pairs += [("object", "trained"), ("cold", "trained"), ("cold", "object")]
    assert [(c.first, c.second) for c in run.comparisons] == pairs
    for name, of_model in run.models.items():
        trajectories = list(run.trajectories(name))
        assert of_model.conversations == len(trajectories) == 6
        rewards = [t.reward for t in trajectories]
        assert of_model.reward.mean == pytest.approx(sum(r for r in rewards if r is not None) / 6)
        assert of_model.cost.sampled_tokens == sum(t.sampled_tokens for t in trajectories)
    assert [t.id for t in run.trajectories("same")] == [t.id for t in run.trajectories("trained")]
    frame = run.to_pandas()
    assert list(frame["model"].unique()) == ["same", "trained", "object", "cold"]
    assert len(frame) == 24
    again = EvaluationRun(run.directory)
    assert again.result == run.result
    with pytest.raises(ConfigError, match=r"trajectories\(None\): give the name of one of the models: same, trained"):
        run.trajectories()


def test_an_evaluation_is_resumed_and_has_one_model_by_default(model: Path, tmp_path: Path) -> None:
    first = turnwise.evaluate(**options(model, tmp_path, eval_rows=EVALUATE_ROWS))
    lines = (first.directory / model.name / "trajectories.jsonl").read_bytes()
    again = turnwise.evaluate(**options(model, tmp_path, eval_rows=EVALUATE_ROWS, resume="auto"), out=first.directory)
    assert (again.directory / model.name / "trajectories.jsonl").read_bytes() == lines
    assert again.result == first.result
    assert [t.row["answer"] for t in again.trajectories()] == ["1", "1", "2", "2", "3", "3"]


def test_several_turns_against_one_turn(model: Path, tmp_path: Path) -> None:
    run = turnwise.evaluate(**options(model, tmp_path, eval_rows=EVALUATE_ROWS), single_turn=True)
    several, single = run.models.values()
    assert (several.single_turn, single.single_turn) == (False, True)
    assert set(single.turns) == {1}
    (comparison,) = run.comparisons
    assert (comparison.first, comparison.second) == (several.name, single.name)


def test_without_held_out_rows(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs held-out rows"):
        turnwise.evaluate(**options(model, tmp_path, rows=EVALUATE_ROWS, eval={}))


def test_a_recipe_file(model: Path, tmp_path: Path) -> None:
    recipe = turnwise.Recipe(
        **{
            name: value
            for name, value in options(model, tmp_path, rows=EVALUATE_ROWS, eval_rows=EVALUATE_ROWS[:1]).items()
            if name != "progress"
        }
    )
    run = turnwise.evaluate(recipe, models=[save_model(tmp_path / "other")], progress=False)
    assert list(run.models) == ["other"]
    assert run.result.rows == 1


# The nouns that cross folders, and errors


# The nouns: what a segment refuses, what a trajectory says of itself.


def columns(segment: Segment) -> tuple[list[int], list[float], list[int], list[int]]:
    return list(segment.token_ids), list(segment.logprobs), list(segment.turn), list(segment.version)


def test_a_segment_has_four_columns_of_one_length() -> None:
    segment = Segment()
    segment.append_context([11, 12])
    segment.append_completion(0, completion([21, 22], version=3))
    segment.append_context([31])
    segment.append_completion(1, completion([41], version=4))
    assert columns(segment) == (
        [11, 12, 21, 22, 31, 41],
        [0.0, 0.0, -0.125, -0.25, 0.0, -0.125],
        [-1, -1, 0, 0, -1, 1],
        [-1, -1, 3, 3, -1, 4],
    )
    assert len(segment) == 6
    segment.append_context([])
    segment.append_completion(2, completion([]))
    assert len(segment) == 6


@pytest.mark.parametrize(
    ("ids", "logprobs", "versions"),
    [
        ([1, 2], [0.0], [0, 0]),
        ([1, 2], [0.0, 0.0], [0]),
        ([], [0.0], []),
        ([1], [], []),
        ([1, 2**40], [0.0] * 2, [0, 0]),
    ],
)
def test_a_segment_refuses_columns_that_do_not_fit_and_stays_as_it_was(
    ids: list[int], logprobs: list[float], versions: list[int]
) -> None:
    segment = Segment()
    segment.append_context([11])
    answer = Completion(
        token_ids=ids, logprobs=logprobs, versions=versions, finish_reason="stop", logprob_kind=LogprobKind.RAW
    )
    with pytest.raises((ValueError, OverflowError)):
        segment.append_completion(0, answer)
    assert columns(segment) == ([11], [0.0], [-1], [-1])


def a_turn(index: int, text: str, ids: list[int]) -> Turn:
    message = {"role": "assistant", "content": text.upper()}
    return Turn(index=index, message=message, text=text, completion=completion(ids))


def test_a_trajectory_says_what_the_model_said_and_nobody_else() -> None:
    one = Trajectory(id="1/0", group="1", row=a_row())
    assert (one.answer, one.assistant_texts, one.sampled_tokens, one.failed) == ("", [], 0, False)
    one.messages = [{"role": "user", "content": "not mine"}]
    one.turns = [a_turn(0, "a", [1, 2]), a_turn(1, "b", [3])]
    assert (one.answer, one.assistant_texts, one.sampled_tokens) == ("B", ["a", "b"], 3)


def test_failing_keeps_what_was_said_and_takes_what_it_was_worth() -> None:
    for kind, stop in (("engine", Stop.ERROR), ("deadline", Stop.DEADLINE)):
        one = Trajectory(id="1/0", group="1", row=a_row(), turns=[a_turn(0, "a", [1])], reward=1.0, advantages=[0.5])
        one.fail(Failure(kind, "why"))
        assert (one.stop, one.failed, one.error) == (stop, True, Failure(kind, "why"))
        assert (one.reward, one.advantages, one.assistant_texts) == (None, [], ["a"])


def test_which_stops_are_failures() -> None:
    assert [str(stop) for stop in Stop if stop.failed] == ["deadline", "error"]
    assert [str(stop) for stop in Stop if not stop.failed] == [
        "done",
        "max_turns",
        "length",
        "max_tokens",
        "max_response",
        "context",
    ]


def test_which_sampling_leaves_tokens_out() -> None:
    assert not Sampling(temperature=0.3).filtered
    assert [Sampling(top_k=1).filtered, Sampling(top_p=0.99).filtered, Sampling(min_p=0.01).filtered] == [True] * 3


def test_the_reward_of_a_turn_is_the_sum_of_its_parts_by_source() -> None:
    turn = a_turn(0, "a", [1])
    for value, source in ((0.5, "environment"), (0.0, "final_reward"), (1.0, "brevity"), (0.25, "environment")):
        turn.add_reward(value, source)
    assert turn.reward == 1.75
    assert turn.rewards == {"environment": 0.75, "final_reward": 0.0, "brevity": 1.0}


# The one place where somebody else's exception becomes data.


def caught(error: BaseException, kind: str = "environment") -> Failure:
    with pytest.raises(Failed) as failed, boundary(kind):
        raise error
    assert failed.value.__cause__ is error or failed.value is error
    return failed.value.failure


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("no"), "ValueError: no"),
        (RuntimeError(), "RuntimeError"),
        (KeyError("x"), "KeyError: x"),
        (KeyError("the key 'x'"), "KeyError: the key 'x'"),
        (KeyError(), "KeyError"),
        (KeyError(5), "KeyError: 5"),
        (ConfigError("write it otherwise"), "write it otherwise"),
        (StopIteration(3), "StopIteration: 3"),
        (TimeoutError(), "TimeoutError"),
        (OSError(2, "No such file"), "FileNotFoundError: [Errno 2] No such file"),
    ],
)
def test_what_is_raised_becomes_a_failure_of_its_side(error: Exception, message: str) -> None:
    assert caught(error) == Failure("environment", message)


def test_the_innermost_boundary_wins() -> None:
    with pytest.raises(Failed) as failed, boundary("environment"), boundary("tokens"):
        raise ValueError("no")
    assert failed.value.failure == Failure("tokens", "ValueError: no")
    assert caught(Failed(Failure("row", "too long"))) == Failure("row", "too long")


@pytest.mark.parametrize("error", [asyncio.CancelledError(), KeyboardInterrupt()])
def test_what_ends_the_run_passes(error: BaseException) -> None:
    with pytest.raises(type(error)), boundary("environment"):
        raise error


def test_an_exit_ends_no_more_than_its_conversation() -> None:
    assert caught(SystemExit(3)) == Failure("environment", "the code tried to exit the process (status 3)")


def test_nothing_raised_is_nothing_caught() -> None:
    with boundary("environment"):
        value = 5
    assert value == 5


def test_a_failed_conversation_is_no_error_of_ours() -> None:
    assert not issubclass(Failed, TurnwiseError)
    assert str(Failed(Failure("row", "why"))) == "why"


def test_a_hint_names_what_is_near_and_nothing_else() -> None:
    assert nearest("lrr", ["lr", "steps"]) == "; did you mean 'lr'?"
    assert nearest("colour", ["lr", "steps"]) == ""
    assert nearest("x", []) == ""


def test_an_error_of_ours_that_no_line_of_a_user_led_to_has_no_traceback() -> None:
    tool = Tool.of(print_text)
    trajectory = hold(Says("a"), lambda: Tools([tool]), renderer=Renderer(byte_tokenizer(STRANGE_CALLS)))
    assert trajectory.error is not None
    assert "Set the format (for example tool_format=hermes)" in trajectory.error.message
    assert trajectory.error.traceback == ""


def print_text(text: str) -> str:
    """Print a text."""
    return text


def test_the_files_whose_frames_are_left_out_exist() -> None:
    assert [path for path in errors._MACHINERY if not os.path.exists(path)] == []


# A run as others see it: in a notebook, and as a model repository


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = a_run(tmp_path / "run", options={"model": {"path": "org/base"}, "train": {"steps": 5, "lr": 0.001}})
    (path / "checkpoint").mkdir()
    (path / "checkpoint" / "config.json").write_text("{}")
    (path / "checkpoint" / "README.md").write_text("of peft")
    return path


def test_a_notebook_shows_curve_table_and_three_conversations_and_runs_no_text_of_the_model(run: Path) -> None:
    hostile = "<script>alert(1)</script><img src=x onerror=alert(2)>"
    trajectories = [hold(Says(hostile), SingleTurn, row=a_row(hostile, id=f"<b>{n}")) for n in range(4)]
    for trajectory, reward in zip(trajectories, (0.5, 3.0, -1.0, None), strict=True):
        trajectory.reward = reward
    write_trajectories(run / "trajectories.jsonl", trajectories, step=4)
    RunDirectory(run).write_warning(step=2, name="kl", text=hostile)
    page = RunResult(run)._repr_html_()
    assert "<script" not in page
    assert "<img" not in page
    assert page.count("&lt;script&gt;alert(1)") == 3 * 2 + 1
    assert [part.split(",")[0] for part in page.split("<summary>")[1:]] == [
        "best: reward 3", "median: reward 0.5", "worst: reward -1",
    ]  # fmt: skip
    assert "<polyline points='0.0,120.0 " in page
    assert "<td>reward/mean</td><td>0.6</td><td>0.8</td><td>2</td>" in page
    assert "killed after step 4 of 5" in page


def test_the_best_checkpoint_is_pushed_with_the_metrics_until_then(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(run), "--to", "me/model", "--best", "--dry-run"]) == 1
    assert "has no best checkpoint: a run with checkpoint.best=METRIC" in " ".join(capsys.readouterr().err.split())
    model = run / "checkpoints" / "step-000002" / "model"
    model.mkdir(parents=True)
    (model / "of_step_2.json").write_text("{}")
    (model.parent / "checkpoint.json").write_text('{"step": 2}')
    (run / "best").symlink_to(model.relative_to(run))
    assert main(["push", str(run), "--to", "me/model", "--best", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "| `reward/mean` | 0.8 | 0.8 | 2 |" in out
    assert [line.split()[0] for line in out.splitlines()[-3:]] == ["README.md", "of_step_2.json", "recipe.yaml"]


def test_the_card_has_the_metrics_and_the_options_that_were_changed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(run), "--to", "me/model", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\nbase_model: org/base\n")
    assert "| `reward/mean` | 0.6 | 0.8 | 2 |" in out
    assert "| `train.lr` | `0.001` | `1e-06` |" in out
    assert [line.split()[0] for line in out.splitlines()[-3:]] == ["README.md", "config.json", "recipe.yaml"]
    assert main(["push", str(run), "--to", "model", "--dry-run"]) == 1
    assert main(["push", str(run.parent), "--to", "me/model"]) == 1
    assert "has no checkpoint" in capsys.readouterr().err


def test_the_card_of_a_run_that_was_killed_later_has_step_and_metrics_of_the_checkpoint(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run / "checkpoints" / "step-000003"
    (folder / "model").mkdir(parents=True)
    (folder / "checkpoint.json").write_text('{"step": 3}')
    (run / "checkpoint").rename(run / "other")
    (run / "checkpoint").symlink_to(folder.relative_to(run) / "model")
    assert main(["push", str(run), "--to", "me/model", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert ": 3 of 5 steps (the run: killed, and it went on to step 4), from `org/base`" in out
    assert "| `reward/mean` | 0.5 | 0.8 | 2 |" in out
    assert "| `eval/reward/mean` | 0.25 | 0.25 | 0 |" in out


class FakeHub(BaseHTTPRequestHandler):
    """The requests of a commit of small files."""

    received: list[dict[str, object]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"] or 0))
        place = f"http://{self.headers['host']}/me/model"
        answer: dict[str, object] = {"url": place, "commitOid": "0" * 40, "commitUrl": f"{place}/commit/{'0' * 40}"}
        if self.path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            answer = {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
        elif self.path.endswith("/commit/main"):
            self.received += [json.loads(line) for line in body.splitlines()]
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_push_is_one_commit_of_model_card_recipe_and_model(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    FakeHub.received = []
    rows = run.parent / "private" / "rows.jsonl"
    rows.parent.mkdir()
    rows.touch()
    config = run / "config.yaml"
    config.write_text(
        f"{config.read_text()}\ndata: {{train: ['{rows}', org/rows], eval: /no/such/rows.jsonl}}\n"
        f"environment: {rows.parent}/env.py:game\n"
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    try:
        assert main(["push", str(run), "--to", "me/model"]) == 0
    finally:
        server.shutdown()
        server.server_close()
    files = {line["value"]["path"]: line["value"] for line in FakeHub.received if line["key"] == "file"}  # type: ignore[index]
    assert set(files) == {"README.md", "config.json", "recipe.yaml"}
    card = base64.b64decode(files["README.md"]["content"]).decode()
    assert "| `train.lr` | `0.001` |" in card
    assert "of peft" not in card
    recipe = base64.b64decode(files["recipe.yaml"]["content"]).decode()
    assert str(rows.parent) not in card + recipe  # a person's directories are nobody else's
    assert yaml.safe_load(recipe)["data"] == {"train": ["rows.jsonl", "org/rows"], "eval": "/no/such/rows.jsonl"}
    assert yaml.safe_load(recipe)["environment"] == "env.py:game"
    assert "3 files are in" in capsys.readouterr().out
