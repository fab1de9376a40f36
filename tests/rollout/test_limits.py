"""Bounds of a conversation."""

from __future__ import annotations

from support.conversations import a_row, completion
from turnwise.rollout.context import Limits
from turnwise.types import Stop, Trajectory, Turn


def after(*lengths: int) -> Trajectory:
    """A trajectory whose turns have so many tokens."""
    turns = [
        Turn(index=n, message={"role": "assistant", "content": ""}, text="", completion=completion([70] * length))
        for n, length in enumerate(lengths)
    ]
    return Trajectory(id="1/0", group="1", row=a_row(), turns=turns)


def test_the_first_bound_that_is_met_says_why_there_is_no_further_turn() -> None:
    limits = Limits(turns=3, tokens=10, context=50)
    assert limits.stop_reason(after(), 49) is None
    assert limits.stop_reason(after(4, 5), 49) is None
    assert limits.stop_reason(after(1, 1, 1), 49) is Stop.MAX_TURNS
    assert limits.stop_reason(after(4, 6), 49) is Stop.MAX_TOKENS
    assert limits.stop_reason(after(4, 5), 50) is Stop.CONTEXT
    assert limits.stop_reason(after(5, 5, 5), 60) is Stop.MAX_TURNS
    assert Limits(turns=9, context=None, tokens=None).stop_reason(after(4000), 10**6) is None
    response = Limits(turns=9, response_tokens=30, context=50)
    assert response.stop_reason(after(4), 49, 29) is None
    assert response.stop_reason(after(4), 49, 30) is Stop.MAX_RESPONSE


def test_the_room_of_a_turn_is_the_smallest_bound_and_it_names_it() -> None:
    limits = Limits(tokens_per_turn=8, tokens=20, context=50)
    assert limits.completion_budget(after(), 30) == (8, Stop.LENGTH)
    assert limits.completion_budget(after(8, 6), 30) == (6, Stop.MAX_TOKENS)
    assert limits.completion_budget(after(8), 45) == (5, Stop.CONTEXT)
    assert limits.completion_budget(after(8, 4), 42) == (8, Stop.LENGTH)  # all three: the turn's own comes first
    assert Limits(tokens_per_turn=8).completion_budget(after(9000), 9000) == (8, Stop.LENGTH)
    assert Limits(tokens_per_turn=8, response_tokens=30).completion_budget(after(8), 45, 25) == (5, Stop.MAX_RESPONSE)
