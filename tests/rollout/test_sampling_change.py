"""What an environment changes about the sampling of the following turns: how many tokens, and which texts end a turn."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from support.conversations import RENDERER, Says, hold, spoken
from turnwise.environments.environment import environment, user_message
from turnwise.environments.tools.toolbox import Tools
from turnwise.rollout.context import Limits
from turnwise.types import Opening, Reply, Row, Sampling, SamplingChange, Stop, Trajectory, Turn

MORE: Any = {"role": "user", "content": "More?"}


@environment
async def changes(
    row: Row, replies: list[Reply], opening: SamplingChange | None = None
) -> AsyncGenerator[Opening | Reply, Turn]:
    """Answers with these, one after the other."""
    yield Opening(messages=row.messages, sampling=opening)
    for reply in replies:
        yield reply


def changed(**values: Any) -> Reply:
    return Reply(messages=[MORE], sampling=SamplingChange(**values))


def asked(engine: Says) -> list[tuple[int, tuple[str, ...]]]:
    return [(one.sampling.max_tokens, one.sampling.stop) for one in engine.requests]


def test_a_change_holds_for_the_following_turns_until_the_next_change() -> None:
    engine = Says("one", "two", "three", "four")
    replies = [changed(max_tokens=9, stop=["!"]), user_message("Go on."), changed(stop=[]), Reply(done=True)]
    trajectory = hold(
        engine,
        lambda: changes(replies=replies),
        sampling=Sampling(stop=("END",)),
        limits=Limits(turns=8, tokens_per_turn=20),
    )
    assert trajectory.error is None
    assert asked(engine) == [(20, ("END",)), (9, ("!",)), (9, ("!",)), (20, ())]
    assert {one.sampling.temperature for one in engine.requests} == {1.0}


def test_an_empty_change_ends_all_changes() -> None:
    engine = Says("one", "two", "three")
    replies = [changed(max_tokens=9, stop=["!"]), changed(), Reply(done=True)]
    hold(engine, lambda: changes(replies=replies), sampling=Sampling(stop=("END",)), limits=Limits(tokens_per_turn=20))
    assert asked(engine) == [(20, ("END",)), (9, ("!",)), (20, ("END",))]


def test_the_next_turn_has_no_more_tokens_than_the_change_says() -> None:
    trajectory = hold(Says("first", "second"), lambda: changes(replies=[changed(max_tokens=3)]))
    assert [text for turn, text in spoken(trajectory.segments[0]) if turn >= 0] == ["first<|im_end|>", "sec"]
    assert (trajectory.stop, trajectory.turns[1].finish_reason) == (Stop.LENGTH, "length")
    assert trajectory.template_mismatch is None


def test_an_environment_can_answer_a_turn_that_its_own_limit_cut() -> None:
    replies = [changed(max_tokens=3, answers_cut=True), changed(max_tokens=3, answers_cut=True), Reply(done=True)]
    trajectory = hold(Says("one", "second", "third"), lambda: changes(replies=replies))
    assert (trajectory.stop, trajectory.error) == (Stop.DONE, None)
    assert [(turn.text, turn.finish_reason) for turn in trajectory.turns] == [
        ("one", "stop"), ("sec", "length"), ("thi", "length"),
    ]  # fmt: skip
    assert [text for turn, text in spoken(trajectory.segments[0]) if turn >= 0] == ["one<|im_end|>", "sec", "thi"]
    assert trajectory.template_mismatch is None


def test_a_limit_of_the_recipe_ends_the_conversation_whatever_the_environment_does() -> None:
    for limits, stop in (
        (Limits(tokens_per_turn=3), Stop.LENGTH),
        (Limits(tokens=6), Stop.MAX_TOKENS),
        (Limits(context=52), Stop.CONTEXT),
    ):
        replies = [changed(max_tokens=4, answers_cut=True), Reply(done=True)]
        trajectory = hold(
            Says("on", "second", "third"), lambda replies=replies: changes(replies=replies), limits=limits
        )
        assert (trajectory.stop, trajectory.turns[-1].finish_reason) == (stop, "length")
        assert len(trajectory.turns) == 2


def test_a_change_never_raises_a_limit() -> None:
    trajectory = hold(
        Says("one", "second"),
        lambda: changes(replies=[changed(max_tokens=100)]),
        limits=Limits(tokens_per_turn=5),
    )
    assert trajectory.turns[1].text == "secon"
    assert trajectory.stop is Stop.LENGTH
    trajectory = hold(
        Says("one", "second"),
        lambda: changes(replies=[changed(max_tokens=5)]),
        limits=Limits(tokens_per_turn=50, tokens=6),
    )
    assert trajectory.turns[1].text == "se"
    assert trajectory.stop is Stop.MAX_TOKENS


def test_an_opening_changes_the_first_turn_and_tools_in_front_keep_that() -> None:
    for make in (
        lambda: changes(replies=[], opening=SamplingChange(max_tokens=2)),
        lambda: Tools([], then=changes(replies=[], opening=SamplingChange(max_tokens=2))),
    ):
        trajectory = hold(Says("first"), make)
        assert [list(turn.completion.token_ids) for turn in trajectory.turns if turn.completion] == [
            list(RENDERER.encode("fi"))
        ]


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (Reply(sampling=SamplingChange(max_tokens=3), done=True), "there is no following turn"),
        (changed(max_tokens=0), r"max_tokens=0\): max_tokens must be an integer of at least 1"),
        (changed(max_tokens=True), r"max_tokens=True\)"),
        (changed(max_tokens=2.5), r"max_tokens=2.5\)"),
        (changed(stop="END"), r"stop='END'\): stop must be a list of texts that are not empty"),
        (changed(stop=[""]), r"stop=\[''\]\)"),
        (Reply(sampling={"max_tokens": 3}), r"Reply\(sampling=\{'max_tokens': 3\}\): give SamplingChange"),  # type: ignore[arg-type]
    ],
)
def test_a_change_that_makes_no_sense_breaks_its_own_conversation(reply: Reply, why: str) -> None:
    trajectory: Trajectory = hold(Says("ab", "cd"), lambda: changes(replies=[reply]))
    assert trajectory.error is not None
    assert trajectory.error.kind == "environment"
    assert re.search(why, trajectory.error.message), trajectory.error.message
