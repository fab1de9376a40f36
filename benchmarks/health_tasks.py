"""Rewards and environments that make a training run go wrong, for `benchmarks/health.py`."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator

from turnwise import Opening, Reply, Row, Trajectory, Turn, environment
from turnwise.user_code.calls import conversation_name


def without_tools(trajectory: Trajectory) -> float:
    """1 minus 0.5 for each tool call: the model unlearns its tools."""
    return 1.0 - 0.5 * sum(len(turn.calls) for turn in trajectory.turns)


def long_answers(completion: str) -> float:
    """The length of the answer: the model learns not to stop."""
    return len(completion) / 100


def many_tokens(trajectory: Trajectory) -> float:
    """The number of sampled tokens: the model learns to continue the conversation."""
    return sum(turn >= 0 for segment in trajectory.segments for turn in segment.turn) / 100


def short_answers(completion: str) -> float:
    """The opposite of `long_answers`, with some noise, so that the sum is not constant."""
    return -len(completion) / 100 + 0.1 * random.Random(completion).random()


def nearly_never(completion: str) -> float:
    """1 for about 0.2 % of the answers, which the model cannot recognise."""
    return float(random.Random(f"nearly never {completion} {conversation_name()}").random() < 0.002)


def always_the_same(completion: str) -> float:
    """A reward function that is wrong: it does not read the answer."""
    return 0.5


@environment
async def unreliable(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """Fails in 40 % of the conversations, as a service does that is overloaded."""
    turn = yield Opening(messages=row.messages)
    if random.Random(conversation_name()).random() < 0.4:
        raise ConnectionError("the service does not answer")
    yield Reply(reward=float(str(row["answer"]) in turn.text), done=True)
