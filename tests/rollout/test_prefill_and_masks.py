"""What an environment puts before the model's next answer, and which of its tokens it does not want learnt from."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from support.conversations import Says, hold, spoken
from turnwise.environments.environment import environment
from turnwise.types import Opening, Reply, Resume, Row, Trajectory, Turn

ASKED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
MORE: Any = {"role": "user", "content": "More?"}


@environment
async def answers(row: Row, replies: list[Reply]) -> AsyncGenerator[Opening | Reply, Turn]:
    """Answers with these, one after the other."""
    yield Opening(messages=row.messages)
    for reply in replies:
        yield reply


def held(*said: str, replies: list[Reply]) -> Trajectory:
    return hold(Says(*said), lambda: answers(replies=replies))


def test_a_prefill_is_context_and_the_beginning_of_the_models_answer() -> None:
    trajectory = held("first", " second", replies=[Reply(messages=[MORE], prefill="Prefill:"), Reply(done=True)])
    assert trajectory.error is None
    assert spoken(trajectory.segments[0]) == [
        (-1, ASKED),
        (0, "first<|im_end|>"),
        (-1, "\n<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\nPrefill:"),
        (1, " second<|im_end|>"),
    ]
    assert trajectory.messages[-1] == {"role": "assistant", "content": "Prefill: second"}
    assert [turn.text for turn in trajectory.turns] == ["first", " second"]
    assert trajectory.template_mismatch is None


def test_a_prefill_may_follow_a_replaced_history_and_be_resumed() -> None:
    replies = [Reply(rewrite=[MORE], prefill="So"), Reply(resume=Resume(keep=2, add="!")), Reply(done=True)]
    trajectory = held("first", " second", " third", replies=replies)
    assert trajectory.error is None
    assert [spoken(segment) for segment in trajectory.segments] == [
        [(-1, ASKED), (0, "first<|im_end|>")],
        [
            (-1, "<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\nSo"),
            (1, " s"),
            (-1, "!"),
            (2, " third<|im_end|>"),
        ],
    ]
    assert trajectory.messages == [MORE, {"role": "assistant", "content": "So s! third"}]
    assert trajectory.template_mismatch is None


def test_masked_tokens_stay_where_they_are_and_become_context() -> None:
    replies = [Reply(messages=[MORE], masked={0: [0, 1]}), Reply(done=True, masked={0: {3}, 1: range(3)})]
    trajectory = held("abcd", "ef", replies=replies)
    assert trajectory.error is None
    (segment,) = trajectory.segments
    assert spoken(segment)[:4] == [(-1, ASKED + "ab"), (0, "c"), (-1, "d"), (0, "<|im_end|>")]
    assert 1 not in segment.turn
    learnt = [(turn, logprob) for turn, logprob in zip(segment.turn, segment.logprobs, strict=True) if turn >= 0]
    assert learnt == [(0, -3 / 8), (0, -5 / 8)]
    assert {version for turn, version in zip(segment.turn, segment.version, strict=True) if turn < 0} == {-1}
    assert trajectory.template_mismatch is None  # who said what is told apart before


def test_a_mask_of_tokens_that_were_cut_off_is_no_mistake() -> None:
    trajectory = held(
        "abcd", "ef", replies=[Reply(resume=Resume(keep=2, add="-"), masked={0: [1, 2, 4]}), Reply(done=True)]
    )
    assert trajectory.error is None
    assert spoken(trajectory.segments[0])[1:] == [(0, "a"), (-1, "b-"), (1, "ef<|im_end|>")]


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (Reply(masked={1: [0]}), r"masked=\{1: ...\}\): there is no turn 1; the turns are 0 to 0"),
        (Reply(train_on=[1]), r"train_on=\[1\]\): there is no turn 1; the turns are 0 to 0"),
        (Reply(masked={0: [3]}), r"turn 0 sampled 3 tokens, 0 to 2"),
        (Reply(prefill="x", done=True), "there is no following turn"),
        (Reply(prefill="x", resume=Resume()), "no messages, no rewrite and no prefill, and is not done"),
    ],
)
def test_a_reply_that_makes_no_sense_breaks_its_own_conversation(reply: Reply, why: str) -> None:
    trajectory = held("ab", "cd", replies=[reply])
    assert trajectory.error is not None
    assert trajectory.error.kind == "environment"
    assert re.search(why, trajectory.error.message), trajectory.error.message
