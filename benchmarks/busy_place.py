"""The environment of ray_rollouts.py: it computes in each turn, as a game or a parser does."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from turnwise.environments.environment import environment, user_message
from turnwise.types import Opening, Reply, Row, Turn

_CPU_SECONDS = 0.005


@environment
async def busy(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """Four turns with 5 milliseconds of computation after each."""
    turn = yield Opening(messages=row.messages)
    for _ in range(3):
        _compute()
        turn = yield user_message("And?")
    _compute()
    yield Reply(reward=len(turn.text), done=True)


def _compute() -> None:
    end = time.thread_time() + _CPU_SECONDS
    while time.thread_time() < end:
        pass
