"""A training run: asynchronous steps, their timeline, garbage collection, and models at endpoints."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.conversations import a_row
from support.recipes import PLACES, save_recipe
from support.servers import Answer, Server, serving
from support.tiny import save_rows
from support.training import Started, overlap_surely, train_silently
from turnwise.cli import main
from turnwise.config.recipe import load
from turnwise.config.train_checks import refuse_without_effect
from turnwise.data.order import ChosenRow
from turnwise.errors import ConfigError, RolloutError
from turnwise.record.reader import read
from turnwise.rewards.scorer import GroupScoring, Scorer
from turnwise.rollout.pipeline import ActiveGroup, TakenGroups
from turnwise.rollout.rollout import new_group
from turnwise.runs.training_run import frozen_start_objects, step_timeline
from turnwise.train import assemble
from turnwise.types import ToolOutcome, Turn

# Training with `train.max_staleness`: real runs with the embedded engine.


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    return save_recipe(
        tmp_path,
        model,
        data={"train": str(save_rows(tmp_path / "train.jsonl", count=12)), "shuffle": False},
        limits={"turns": 2, "tokens_per_turn": 6},
        train={"steps": 5, "batch_size": 2, "group_size": 3, "lr": 0.01, "max_staleness": 2},
    )


def run(recipe: Path, *overrides: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The metrics and the trajectories of a training run."""
    config, _ = load(recipe, overrides)
    made = assemble(config)
    overlap_surely(made)
    train_silently(made)
    return lines(Path(config.output) / "metrics.jsonl"), lines(Path(config.output) / "trajectories.jsonl")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def versions(trajectory: dict[str, Any]) -> set[int]:
    return {version for segment in trajectory["segments"] for version in segment["version"]} - {-1}


@pytest.mark.parametrize(
    "options",
    [
        [f"environment={PLACES}:slow_tail", "max_concurrent=4"],
        ["train.dynamic_sampling=2", "train.overlong_filter=true", "data.curriculum.low=0.001"],
        ["credit.name=remax", f"reward.batch=['{PLACES}:ranked']"],
        ["credit.name=turn_gae", "train.ppo_epochs=2", "train.minibatches=2"],
        ["model.lora.rank=4", "correction.action=truncate", "loss.kl_coef=0.01"],
        ["train.max_staleness=1", "credit.name=gigpo", f"reward.group=['{PLACES}:ranked']"],
    ],
)
def test_all_parts_work_while_conversations_run_ahead(recipe: Path, options: list[str]) -> None:
    metrics, trajectories = run(recipe, *options)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5]
    assert all(line["failed"] == 0 and line["tokens/trained"] > 0 for line in metrics)
    bound = 1 if "train.max_staleness=1" in options else 2
    ages = [one["step"] - 1 - version for one in trajectories for version in versions(one)]
    assert 0 <= min(ages) <= max(ages) <= bound
    assert max(line["staleness/max"] for line in metrics) == bound
    assert all(line["staleness/mean"] <= line["staleness/max"] for line in metrics)
    assert metrics[0]["staleness/max"] == 0
    ids = [one["id"] for one in trajectories]
    assert len(ids) == len(set(ids))
    timeline = lines(recipe.parent / "run" / "timeline.jsonl")
    assert [line["step"] for line in timeline] == [1, 2, 3, 4, 5]
    for line in timeline:
        groups = line["groups"]
        sampled = {one["group"].removesuffix(":greedy") for one in trajectories if one["step"] == line["step"]}
        assert {group["id"] for group in groups} == sampled
        assert all(group["started"] <= group["ended"] <= line["taken"] <= line["trained"] for group in groups)
        assert all(line["version"] - bound <= group["version"] <= group["newest"] for group in groups)
        last = groups[-1]
        if abs(last["ended"] - line["asked"]) > 0.002:  # the times are rounded
            assert line["waited_for"] == (last["id"] if last["ended"] > line["asked"] else None)


def test_several_data_sets_and_evaluations_run_beside_an_asynchronous_run(recipe: Path, tmp_path: Path) -> None:
    other = save_rows(tmp_path / "other.jsonl", count=3)
    sources = [f"data.train=[{tmp_path / 'train.jsonl'}, {other}]", f"data.eval={other}", "eval.every=2"]
    metrics, trajectories = run(recipe, *sources, "data.weights=[3, 1]", "train.steps=6")
    assert len({(one["id"]) for one in trajectories}) == 36
    assert sum(f"reward/source/{other}" in line for line in metrics) >= 2
    assert [line["step"] for line in lines(tmp_path / "run" / "evaluations.jsonl")] == [0, 2, 4, 6]


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_hung_conversation_does_not_stop_its_group(recipe: Path, staleness: int) -> None:
    def run_with(seconds: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        return run(
            recipe,
            f"environment={PLACES}:hangs_in_odd_rows",
            f"train.group_timeout={seconds}",
            f"train.max_staleness={staleness}",
            "train.steps=3",
            "replace=true",
            "limits.turns=1",
        )

    for seconds in (0.5, 4.0, 32.0):  # on a busy machine, conversations that answer may need more time
        metrics, trajectories = run_with(seconds)
        if all(line["groups/too_small"] == 0 for line in metrics):
            break
    hung = [one for one in trajectories if one["error"]]
    assert hung
    assert {one["stop"] for one in hung} == {"deadline"}
    assert all(f"train.group_timeout={seconds:g} seconds" in one["error"]["message"] for one in hung)
    assert sum(line["groups/timed_out"] for line in metrics) == len({one["group"] for one in hung})
    assert all(line["groups/too_small"] == 0 and line["tokens/trained"] > 0 for line in metrics)


def test_a_group_with_too_few_conversations_is_not_trained_on(recipe: Path) -> None:
    options = [f"environment={PLACES}:raises_now_and_then", "limits.turns=1", "limits.tokens_per_turn=64"]
    metrics, trajectories = run(recipe, *options, "train.min_group_size=2", "train.steps=2")
    assert [line["groups/too_small"] for line in metrics] == [1, 1]
    trained = {one["row"]["id"] for one in trajectories if any(turn["advantage"] is not None for turn in one["turns"])}
    assert trained
    assert all(int(row) % 2 == 0 for row in trained)
    with pytest.raises(
        RolloutError, match=r"no group of step 1 has train\.min_group_size=2 conversations that did not fail"
    ):
        run(recipe, f"environment={PLACES}:always_raises", "train.min_group_size=2", "replace=true")


def test_failed_groups_are_replaced(recipe: Path) -> None:
    options = [f"environment={PLACES}:raises_now_and_then", "limits.turns=1", "limits.tokens_per_turn=64"]
    for staleness in (0, 2):
        metrics, trajectories = run(
            recipe,
            *options,
            "train.replace_failed=3",
            "train.min_group_size=2",
            "train.steps=2",
            f"train.max_staleness={staleness}",
            "replace=true",
        )
        for line in metrics:
            rows = {int(one["row"]["id"]) for one in trajectories if one["step"] == line["step"]}
            assert line["groups/replaced"] == sum(row % 2 for row in rows) > 0
            assert sum(row % 2 == 0 for row in rows) == 2


@pytest.mark.slow
def test_kill_minus_nine_loses_no_row_and_counts_none_twice(recipe: Path, tmp_path: Path) -> None:
    options = [
        f"environment={PLACES}:slow_tail", "train.steps=12", "train.max_staleness=3", "resume=auto", "checkpoint.every=1",
    ]  # fmt: skip
    metrics = tmp_path / "run" / "metrics.jsonl"
    for count, delay in ((1, 0.0), (5, 0.11), (9, 0.02)):
        Started(recipe, *options).kill_after_steps(metrics, count, delay)
    last = Started(recipe, *options)
    assert last.wait() == 0, last.log.read_text()
    assert [line["step"] for line in lines(metrics)] == list(range(1, 13))
    assert all(line["staleness/max"] <= 3 for line in lines(metrics))
    trajectories = lines(tmp_path / "run" / "trajectories.jsonl")
    ids = [one["id"] for one in trajectories]
    assert len(ids) == len(set(ids)) == 12 * 2 * 3
    # two epochs of the twelve rows: each row was trained on twice, in groups of three
    assert sorted(int(one["row"]["id"]) for one in trajectories) == sorted([*range(1, 13)] * 6)
    place = json.loads(next((tmp_path / "run" / "checkpoints").glob("*12/checkpoint.json")).read_text())["place"]
    assert (place["position"], place.get("unfinished", [])) == (24, [])


# The line of `timeline.jsonl`: what the trainer and the conversations of a step waited for.


def a_turn(*, engine: float, environment: float, calls: tuple[float, ...] = ()) -> Turn:
    outcomes = tuple(ToolOutcome(id="1", name="f", arguments={}, content="", seconds=seconds) for seconds in calls)
    message = {"role": "assistant", "content": "a"}
    turn = Turn(index=0, message=message, text="a", outcomes=outcomes)
    turn.seconds_engine, turn.seconds_environment = engine, environment
    return turn


def test_the_line_says_what_trainer_and_conversations_waited_for() -> None:
    groups = [new_group(a_row(id=str(n)), size=2, seed=0) for n in range(2)]
    (first, second), (third, fourth) = (group.trajectories for group in groups)
    first.turns = [a_turn(engine=1.0, environment=2.0, calls=(1.5,)), a_turn(engine=0.5, environment=0.0)]
    first.seconds = 4.0
    # two calls of 3 seconds each, at the same time
    second.turns, second.seconds = [a_turn(engine=2.0, environment=3.5, calls=(3.0, 3.0))], 5.5
    third.turns, third.seconds = [a_turn(engine=1.0, environment=0.25)], 1.25
    fourth.turns, fourth.seconds = [], 0.0
    active = [
        ActiveGroup(
            group=group,
            row=ChosenRow(position=n, step=0, place=n),
            scoring=GroupScoring(Scorer(), group),
            version=0,
            started=100.0,
            ended=106.0 - n,
        )
        for n, group in enumerate(groups)
    ]
    taken = TakenGroups(
        active=active, trained=groups, skipped=0, asked=103.0, taken=106.5, waited_for=groups[0].id, running=3
    )
    line = step_timeline(taken, step=1, trained=107.75)
    assert line["seconds"] == {
        "trainer_waiting": 3.5,
        "training": 1.25,
        "engine": 1.125,  # (1.5 + 2 + 1 + 0) / 4
        "tools": 1.25,  # (1.5 + 3.5 + 0 + 0) / 4
        "environment": 0.188,  # (0.5 + 0 + 0.25 + 0) / 4
        "other": 0.125,  # (0.5 + 0 + 0 + 0) / 4
    }
    later, earlier = line["groups"][1], line["groups"][0]
    assert (earlier["id"], later["id"]) == (groups[1].id, groups[0].id)
    assert later["seconds"] == {"engine": 1.75, "tools": 2.5, "environment": 0.25, "other": 0.25}
    assert earlier["seconds"] == {"engine": 0.5, "tools": 0.0, "environment": 0.125, "other": 0.0}


# During a run, the garbage collector skips what existed at the start, and runs more rarely.


async def inside(read: Callable[[], Any]) -> Any:
    async with frozen_start_objects():
        return read()


@pytest.mark.parametrize(("before", "expected"), [(700, 100_000), (200_000, 200_000), (0, 0)])
def test_the_collector_is_changed_for_the_run_only(before: int, expected: int) -> None:
    original = gc.get_threshold()
    gc.set_threshold(before, 7, 5)
    try:
        assert asyncio.run(inside(gc.get_threshold)) == (expected, 7, 5)
        assert gc.get_threshold() == (before, 7, 5)
    finally:
        gc.set_threshold(*original)


def test_what_exists_at_the_start_is_frozen_and_what_the_program_has_frozen_stays_so() -> None:
    before = gc.get_freeze_count()
    assert before > 10_000  # tests/conftest.py freezes what the tests import
    assert asyncio.run(inside(gc.get_freeze_count)) > before
    assert gc.get_freeze_count() > before


# `engine.name: openai` in a recipe: conversations without a model in the process, and what is refused.


USAGE = {"prompt_tokens": 5, "completion_tokens": 2}


def answers(question: dict[str, Any], number: int) -> Answer:
    return Answer({"choices": [{"message": {"content": "2"}, "finish_reason": "stop"}], "usage": USAGE})


def endpoint_recipe(folder: Path, url: str, **options: Any) -> Path:
    rows = str(save_rows(folder / "rows.jsonl", 3))
    return save_recipe(
        folder,
        Path("some/model"),
        engine={"name": "openai", "url": f"{url}/v1"},
        data={"train": rows},
        environment="turnwise.environments.environment:SingleTurn",
        **options,
    )


def endpoint_run(
    folder: Path, *overrides: str, answer: Callable[[dict[str, Any], int], Answer] = answers
) -> tuple[int, Server]:
    """`turnwise rollout` with an endpoint. Returns the exit status and the server."""
    with serving(answer) as server:
        status = main(["rollout", str(endpoint_recipe(folder, server.url)), "--out", str(folder / "out"), *overrides])
    return status, server


def test_a_recipe_with_an_endpoint_needs_no_model(tmp_path: Path) -> None:
    status, server = endpoint_run(tmp_path)
    assert (status, len(server.asked), {asked["model"] for asked in server.asked}) == (0, 3, {"some/model"})
    trajectories = list(read(tmp_path / "out"))
    assert [(t.id, t.answer, t.segments, t.sampled_tokens) for t in trajectories] == [
        (f"{n}/0", "2", [], 2) for n in (1, 2, 3)
    ]


def test_the_options_of_an_endpoint_reach_its_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sesame")

    def answer(question: dict[str, Any], number: int) -> Answer:
        return [Answer("busy", 500), Answer("late", seconds=5)][number] if number < 2 else answers(question, number)

    options = ["model=m", "api_key_env=SOME_KEY", "max_tokens_field=max_completion_tokens", "timeout=1", "retries=2"]
    options.append("request={seed: null, top_k: 5}")
    overrides = [*(f"engine.{option}" for option in options), "rollout.max_rows=1"]
    status, server = endpoint_run(tmp_path, *overrides, answer=answer)
    assert (status, len(server.asked)) == (0, 3)
    assert server.paths == ["/v1/chat/completions"] * 3
    assert server.headers[0]["Authorization"] == "Bearer sesame"
    (asked, *_) = server.asked
    assert (asked["model"], asked["top_k"], asked["max_completion_tokens"]) == ("m", 5, 256)
    assert not {"seed", "max_tokens"} & asked.keys()
    assert (next(iter(read(tmp_path / "out"))).answer) == "2"


@pytest.mark.parametrize("limit", ["requests_per_minute=120", "tokens_per_minute=840"])
def test_the_limits_of_an_endpoint_space_its_requests(tmp_path: Path, limit: str) -> None:
    """7 tokens each at 14 a second, or two requests a second: the third begins a second after the first."""
    times: list[float] = []

    def answer(question: dict[str, Any], number: int) -> Answer:
        times.append(time.monotonic())
        return answers(question, number)

    status, _ = endpoint_run(tmp_path, f"engine.{limit}", "limits.tokens_per_turn=1", "max_concurrent=1", answer=answer)
    assert status == 0
    assert times[2] - times[0] >= 0.9


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampling.top_k=4", "top_k=4 is not in the OpenAI protocol"),
        ("sampling.min_p=0.1", "min_p=0.1 is not in the OpenAI protocol"),
        ("deterministic=true", "deterministic=true cannot be combined with engine.name=openai"),
        ("data.max_prompt_tokens=9", "data.max_prompt_tokens needs the model's tokenizer"),
        ("data.return_multi_modal_inputs=true", "data.return_multi_modal_inputs has no effect"),
        ("engine.api_key_env=NOT_SET_ANYWHERE", "the environment variable NOT_SET_ANYWHERE is not set"),
        ("engine.request={stream: true}", "has 'stream', which is set by turnwise"),
    ],
)
def test_options_that_an_endpoint_cannot_follow_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    status, server = endpoint_run(tmp_path, override)
    assert (status, server.asked) == (1, [])
    assert message in capsys.readouterr().err


def test_a_judge_on_the_engine_of_the_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judge = {
        "use": "turnwise.rewards.judge:Judge",
        "arguments": {"engine": True, "rubric": [{"name": "right", "description": "It is right."}]},
    }
    with serving(answers) as server:
        path = endpoint_recipe(tmp_path, server.url, reward={"trajectory": [judge]})
        assert main(["rollout", str(path), "--out", str(tmp_path / "out")]) == 1
    assert "asks the engine of the run" in capsys.readouterr().err


def test_options_of_templates_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _ = endpoint_run(tmp_path, "thinking=branch")
    assert status == 0
    assert "thinking=branch: not used with an endpoint" in capsys.readouterr().out


def test_training_with_an_endpoint_is_refused_with_the_reason(tmp_path: Path) -> None:
    config, _ = load(endpoint_recipe(tmp_path, "http://127.0.0.1:1"))
    with pytest.raises(ConfigError, match="without the ids and the log-probabilities of the sampled tokens"):
        refuse_without_effect(config)
