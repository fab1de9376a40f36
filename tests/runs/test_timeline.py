"""The line of `timeline.jsonl`: what the trainer and the conversations of a step waited for."""

from __future__ import annotations

from support.conversations import a_row
from turnwise.data.order import ChosenRow
from turnwise.rewards.scorer import GroupScoring, Scorer
from turnwise.rollout.pipeline import ActiveGroup, TakenGroups
from turnwise.rollout.rollout import new_group
from turnwise.runs.training_run import step_timeline
from turnwise.types import ToolOutcome, Turn


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
