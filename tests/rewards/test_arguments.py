"""The arguments of reward functions: chosen by the names of parameters, checked before the run."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.conversations import Says, a_row, hold_all
from turnwise import assembly
from turnwise.cli import main
from turnwise.environments.environment import environment, user_message
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rewards.functions import (
    BatchReward,
    CallPlan,
    GroupReward,
    TrajectoryReward,
    TurnReward,
    parameters_of,
    plan_call,
)
from turnwise.rewards.scorer import Scorer
from turnwise.types import EnvironmentHandle, Group, Opening, Reply, Trajectory, Turn


@environment
async def asks(row: Any):  # type: ignore[no-untyped-def]
    yield Opening(messages=row.messages)
    yield Reply(messages=user_message("And?").messages, info={"mood": "calm", "seen": 1}, reward=0.25)
    yield Reply(done=True, info={"mood": "glad"})


def a_group(id: str = "1", *, size: int = 2, **fields: Any) -> Group:
    """Conversations of two turns, "a" and "b"."""
    row = a_row("Hi", id=id, **fields)
    return Group(id=id, row=row, trajectories=hold_all(Says("a", "b"), asks, row=row, size=size))


def run(scorer: Scorer, *groups: Group) -> list[list[float | None]]:
    """The rewards by group, without the 0.25 of the environment."""
    asyncio.run(scorer.score(groups))
    return [[None if t.reward is None else t.reward - 0.25 for t in group.trajectories] for group in groups]


def error(trajectory: Trajectory) -> str:
    assert trajectory.error is not None
    assert trajectory.error.kind == "reward"
    return trajectory.error.message


def of_trajectory(function: Any) -> TrajectoryReward:
    return TrajectoryReward("f", function, plan=plan_call(function, "trajectory", name="f"))


def of_turn(function: Any) -> TurnReward:
    return TurnReward("f", function, plan=plan_call(function, "turns", name="f"))


def of_group(function: Any) -> GroupReward:
    return GroupReward("f", function, plan=plan_call(function, "group", name="f"))


def of_batch(function: Any) -> BatchReward:
    return BatchReward("f", function, plan=plan_call(function, "batch", name="f"))


def test_a_function_of_a_trajectory_gets_what_its_parameters_name() -> None:
    group, given = a_group(size=1, answer="4", level=3), dict[str, Any]()
    (trajectory,) = group.trajectories
    trajectory.environment = EnvironmentHandle("the object", lambda: None)
    before = copy.deepcopy(group)

    def all_values(
        trajectory: Any, completion: Any, messages: Any, turns: Any, row: Any, info: Any, group: Any, environment: Any,
        answer: Any, level: int = 0, missing: str = "default",
    ) -> float:  # fmt: skip
        given.update({name: value for name, value in locals().items() if name != "given"})
        return 1.0

    assert run(Scorer([of_trajectory(all_values)]), group) == [[1.0]]
    assert given == {
        "trajectory": before.trajectories[0],
        "completion": "a\nb",  # not the text of the user
        "messages": trajectory.messages,
        "turns": trajectory.turns,
        "row": trajectory.row,
        "info": {"mood": "glad", "seen": 1},
        "group": before,
        "environment": "the object",
        "answer": "4",
        "level": 3,
        "missing": "default",
    }


def test_async_functions_and_keyword_arguments_get_them_too() -> None:
    async def by_keyword(*, completion: str, answer: str) -> float:
        await asyncio.sleep(0)
        return float(completion == answer)

    def everything(completion: str, **columns: Any) -> float:
        return float(columns == {"answer": "a\nb", "level": 3})

    group = a_group(answer="a\nb", level=3)
    assert run(Scorer([of_trajectory(by_keyword), of_trajectory(everything)]), group) == [[2.0, 2.0]]


def test_a_function_of_turns_gets_the_turn_and_its_index() -> None:
    def second(turn: Turn, index: int, completion: str, answer: str) -> float:
        return float(index) if completion == answer and turn.text == "b" else 0.0

    def by_type(one: Trajectory, of: Turn) -> float:
        return 10.0 * (one.turns[of.index] is of)

    group = a_group(size=1, answer="a\nb")
    assert run(Scorer(turns=[of_turn(second), of_turn(by_type)]), group) == [[21.0]]
    assert [turn.reward for turn in group.trajectories[0].turns] == [10.25, 11.0]


def test_functions_of_a_group_and_of_the_batch_get_lists() -> None:
    calls: list[tuple[int, list[str], Any]] = []

    def together(completions: list[str], answer: list[str], rows: Any, level: Any = None) -> list[float]:
        calls.append((len(completions), answer, level))
        return [float(row.id) for row in rows]

    def of_the_row(row: Any, group: Group, trajectories: Sequence[Trajectory]) -> list[float]:
        assert group.row == row
        return [100.0] * len(trajectories)

    groups = [a_group("1", answer="x"), a_group("2", size=3, answer="y", level=5)]
    assert run(Scorer(groups=[of_group(together)]), *groups) == [[1.0, 1.0], [2.0, 2.0, 2.0]]
    assert calls == [(2, ["x", "x"], None), (3, ["y"] * 3, [5] * 3)]
    calls.clear()
    groups = [a_group("1", answer="x"), a_group("2", size=3, answer="y", level=5)]
    assert run(Scorer(groups=[of_group(of_the_row)], batch=[of_batch(together)]), *groups) == [[101.0] * 2, [102.0] * 3]
    assert calls == [(5, ["x", "x", "y", "y", "y"], [None, None, 5, 5, 5])]


def test_a_reward_that_normalises_over_the_step_is_right_in_the_batch() -> None:
    def normalised(rows: Any) -> list[float]:
        mean = sum(float(row.id) for row in rows) / len(rows)
        return [float(row.id) - mean for row in rows]

    groups = [a_group("1"), a_group("4", size=1)]
    assert run(Scorer(batch=[of_batch(normalised)]), *groups) == [[-1.0, -1.0], [2.0]]


def test_each_function_is_called_as_soon_as_its_conversations_have_ended() -> None:
    groups, called = [a_group("1"), a_group("2")], list[str]()

    def function(form: str) -> Any:
        def note(trajectories: Sequence[Trajectory]) -> list[float]:
            called.append(f"{form} {[one.id for one in trajectories]}")
            return [1.0] * len(trajectories)

        return note

    def alone(trajectory: Trajectory) -> float:
        called.append(trajectory.id)
        return 1.0

    def with_group(trajectory: Trajectory, group: Group) -> float:
        called.append(f"{trajectory.id} of {group.id}")
        return 1.0

    async def finish() -> list[int]:
        scorer = Scorer(
            [of_trajectory(alone), of_trajectory(with_group)],
            groups=[of_group(function("group"))],
            batch=[of_batch(function("batch"))],
        )
        score = scorer.scoring_callback(groups)
        (a, b), (c, d) = (group.trajectories for group in groups)
        return [len(await score(one)) for one in (a, c, b, d)]

    assert asyncio.run(finish()) == [0, 0, 0, 4]
    assert called == [
        "1/0", "2/0", "1/1", "1/0 of 1", "1/1 of 1", "group ['1/0', '1/1']",
        "2/1", "2/0 of 2", "2/1 of 2", "group ['2/0', '2/1']",
        "batch ['1/0', '1/1', '2/0', '2/1']",
    ]  # fmt: skip
    assert {one.reward for group in groups for one in group.trajectories} == {4.25}


def test_none_means_does_not_apply_where_the_annotation_says_so() -> None:
    def sometimes(trajectory: Trajectory) -> float | None:
        return None if trajectory.id == "1/0" else 2.0

    def turn_sometimes(turn: Turn) -> float | None:
        return None if turn.index == 0 else 3.0

    group = a_group()
    assert run(Scorer([of_trajectory(sometimes)], [of_turn(turn_sometimes)]), group) == [[3.0, 5.0]]
    assert [one.rewards for one in group.trajectories] == [{"turns": 0.25, "f": 3.0}, {"turns": 0.25, "f": 5.0}]
    group = a_group()
    assert run(Scorer([of_trajectory(sometimes)]), group) == [[0.0, 2.0]]
    assert [one.rewards for one in group.trajectories] == [{"turns": 0.25}, {"turns": 0.25, "f": 2.0}]


def test_a_missing_object_of_the_environment_or_column_of_a_row_fails_its_conversation() -> None:
    def reads(completion: str, environment: Any) -> float:
        return 1.0

    def reads_if_there(completion: str, environment: Any = None) -> float:
        return float(environment is None)

    group = a_group()
    run(Scorer([of_trajectory(reads)]), group)
    assert error(group.trajectories[0]).startswith(
        "the reward function 'f': it has the parameter `environment`, and the recipe's environment gives no object"
    )
    assert run(Scorer([of_trajectory(reads_if_there)]), a_group()) == [[1.0, 1.0]]
    groups = [a_group("1", answer="x"), a_group("2")]

    def needs(completion: str, answer: str) -> float:
        return 1.0

    assert run(Scorer([of_trajectory(needs)]), *groups) == [[1.0, 1.0], [None, None]]
    assert "it has the parameter 'answer', and row '2' has no such column; its columns are: none" in error(
        groups[1].trajectories[0]
    )


# what is refused before the run


@pytest.mark.parametrize(
    ("function", "form", "message"),
    [
        (
            lambda completon: 1.0,
            "trajectory",
            "f cannot be called as a reward function: it has none of the parameters traj",
        ),
        (
            lambda completion, turn: 1.0,
            "trajectory",
            "it has the parameter 'turn', which functions in reward.turns have",
        ),
        (
            lambda completions: 1.0,
            "turns",
            "'completions', which functions in reward.group and reward.batch have; functions",
        ),
        (lambda completion: 1.0, "batch", "'completion', which functions in reward.trajectory and reward.turns have"),
        (
            lambda trajectories, row: 1.0,
            "batch",
            "'row', which functions in reward.trajectory and reward.turns and reward.g",
        ),
        (
            lambda a, b, /: 1.0,
            "trajectory",
            "it needs more than 1 arguments by position, and reward.trajectory calls it wi",
        ),
        (lambda: 1.0, "trajectory", "so it does not depend on the conversation: add one of them"),
        (3, "trajectory", "f cannot be called as a reward function: 3 is not a callable object"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(function: Any, form: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_call(function, form, name="f")
    assert message in str(refused.value)


def test_signatures_without_names_are_called_by_position() -> None:
    assert plan_call(lambda one, /: 1.0, "trajectory", name="f") == CallPlan("trajectory", ("trajectory",))
    assert plan_call(lambda *several: 1.0, "turns", name="f").positional == ("trajectory", "turn")


def test_a_parameter_that_is_no_column_of_the_data_is_refused_with_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def right(completion, anser): return 1.0\n")
    row = {"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4", "level": 1}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    recipe = {
        "model": {"path": str(Path(__file__).parents[2] / "demo" / "model")},
        "data": {"train": "rows.jsonl"},
        "reward": {"trajectory": ["mine.py:right"]},
        "train": {"steps": 1},
    }
    config = Config.model_validate(recipe)
    message = (
        "the reward function 'right' has the parameter 'anser', which is neither a value of the conversation (trajectory, "
        "completion, messages, turns, row, info, group, environment) nor a column of the data (answer, level); did you mean "
        "'answer'? Rename the parameter, give it a default value, or map a column to it: data.columns.anser=<column>"
    )
    with pytest.raises(ConfigError) as refused:
        assembly.scorer(config).refuse_unknown_columns(assembly.rows(config))
    assert str(refused.value) == message
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    for command in ("train", "rollout"):
        arguments = ["--out", "out"] if command == "rollout" else []
        assert main([command, "recipe.yaml", *arguments]) == 1
        assert "did you mean 'answer'?" in " ".join(capsys.readouterr().err.split())


# functions of the batch that fail


def test_a_batch_function_that_raises_for_a_conversation_fails_that_conversation_only() -> None:
    calls: list[int] = []

    def parses(trajectories: Sequence[Trajectory]) -> list[float]:
        calls.append(len(trajectories))
        if any(one.id == "2/1" for one in trajectories):
            raise ValueError("no JSON")
        return [float(len(trajectories))] * len(trajectories)

    groups = [a_group("1"), a_group("2")]
    assert run(Scorer(batch=[of_batch(parses)]), *groups) == [[3.0, 3.0], [3.0, None]]
    assert error(groups[1].trajectories[1]) == "the reward function 'f': ValueError: no JSON"
    assert calls == [4, 1, 1, 1, 1, 3]


@pytest.mark.parametrize("form", [of_group, of_batch])
def test_an_exception_in_the_list_fails_its_conversation_only(form: Any) -> None:
    def gathered(trajectories: Sequence[Trajectory]) -> list[Any]:
        return [1.0, RuntimeError("the judge is gone")]

    group = a_group()
    scorer = Scorer(groups=[form(gathered)]) if form is of_group else Scorer(batch=[form(gathered)])
    assert run(scorer, group) == [[1.0, None]]
    assert error(group.trajectories[1]) == "the reward function 'f': RuntimeError: the judge is gone"


def test_a_batch_function_with_a_wrong_result_fails_all_with_the_rule() -> None:
    group = a_group()
    assert run(Scorer(batch=[of_batch(lambda trajectories: [1.0, 2.0, 3.0])]), group) == [[None, None]]
    assert error(group.trajectories[0]) == (
        "the reward function 'f' gave 3 values for the 2 trajectories of the batch; it must give a list with a number, or None, "
        "for each of them, in their order"
    )


# functions that hang


def spin() -> Any:
    while True:
        pass


def sleep() -> Any:
    try:
        time.sleep(60)
    except Exception:
        return 1.0
    return 1.0


def swallow() -> float:
    try:
        time.sleep(60)
    except BaseException:
        return 1.0
    return 1.0


@pytest.mark.parametrize("hang", [spin, sleep, swallow])
@pytest.mark.parametrize("form", ["trajectory", "turns", "group", "batch"])
def test_a_sync_function_that_hangs_is_interrupted_and_fails_its_conversations(hang: Any, form: str) -> None:
    def trajectory(trajectory: Trajectory) -> float:
        return hang() if trajectory.id == "1/1" else 1.0

    def turn(trajectory: Trajectory, turn: Turn) -> float:
        return hang() if trajectory.id == "1/1" else 0.5

    def several(trajectories: Sequence[Trajectory]) -> list[float]:
        return hang()

    limit, group = 0.05, a_group()
    scorer = {
        "trajectory": lambda: Scorer([of_trajectory(trajectory)], timeout=limit),
        "turns": lambda: Scorer(turns=[of_turn(turn)], timeout=limit),
        "group": lambda: Scorer(groups=[of_group(several)], timeout=limit),
        "batch": lambda: Scorer(batch=[of_batch(several)], timeout=limit),
    }[form]()
    started = time.monotonic()
    assert run(scorer, group) == [[1.0, None] if form in ("trajectory", "turns") else [None, None]]
    assert time.monotonic() - started < 30
    assert error(group.trajectories[1]) == (
        "the reward function 'f' took longer than reward.timeout=0.05 and was interrupted: make it faster, or raise the limit"
    )


def test_an_async_function_of_the_batch_that_hangs_fails_its_conversations() -> None:
    async def hangs(trajectories: Sequence[Trajectory]) -> list[float]:
        await asyncio.sleep(60)
        return []

    group = a_group()
    assert run(Scorer(batch=[of_batch(hangs)], timeout=0.05), group) == [[None, None]]
    assert error(group.trajectories[0]) == "the reward function 'f' took longer than reward.timeout=0.05"


def test_training_evaluation_and_rollouts_call_a_batch_function_once_for_all_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def centred(completions, number, trajectories):\n"
        "    with open('calls.txt', 'a') as calls:\n"
        "        calls.write(f'{sorted(number)}\\n')\n"
        "    lengths = [t.sampled_tokens for t in trajectories]\n"
        "    return [length - sum(lengths) / len(lengths) for length in lengths]\n"
    )
    rows = [{"prompt": [{"role": "user", "content": f"{n} + 1?"}], "number": n} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    recipe = {
        "model": {"path": str(Path(__file__).parents[2] / "demo" / "model")},
        "data": {"train": "rows.jsonl", "eval": "rows.jsonl", "shuffle": False},
        "reward": {"batch": ["mine.py:centred"]},
        "train": {"steps": 1, "batch_size": 2, "group_size": 2},
        "limits": {"tokens_per_turn": 16},
        "rollout": {"samples_per_row": 2},
        "output": "run",
    }
    (tmp_path / "recipe.yaml").write_text(
        json.dumps({name: part for name, part in recipe.items() if name != "rollout"})
    )
    assert main(["train", "recipe.yaml"]) == 0
    assert (tmp_path / "calls.txt").read_text().splitlines() == ["[0, 1, 2]", "[0, 0, 1, 1]", "[0, 1, 2]"]
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert metrics["rewards/centred/mean"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["failed"] == 0.0
    unused = ("train", "output")
    (tmp_path / "recipe.yaml").write_text(
        json.dumps({name: part for name, part in recipe.items() if name not in unused})
    )
    assert main(["rollout", "recipe.yaml", "--out", "out"]) == 0
    assert (tmp_path / "calls.txt").read_text().splitlines()[3:] == ["[0, 0, 1, 1, 2, 2]"]
    records = [json.loads(line) for line in (tmp_path / "out" / "trajectories.jsonl").read_text().splitlines()]
    assert sum(record["rewards"]["centred"] for record in records) == pytest.approx(0.0, abs=1e-9)


def test_the_page_lists_the_parameters_that_there_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    table = page.partition("| parameter in `reward.trajectory`")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:3]] for line in table.splitlines()[2:]]
    names = [[set(re.findall(r"`(\w+)`", cell)) for cell in row] for row in cells]
    assert set().union(*(single for single, _ in names)) == set(parameters_of("turns"))
    assert set().union(*(several for _, several in names)) == set(parameters_of("group"))
