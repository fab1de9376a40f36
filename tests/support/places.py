"""Environments, rewards and tools that recipes of the tests refer to, as `tests/support/places.py:name`."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from turnwise.environments.environment import environment, user_message
from turnwise.rewards.credit.credit import Episode
from turnwise.types import Opening, Reply, Row, Trajectory, Turn


@environment
async def low_bytes(row: Row, turns: int = 2) -> AsyncGenerator[Opening | Reply, Turn]:
    """Likes turns of capital letters and digits: something that even random weights can learn."""
    turn = yield Opening(messages=row.messages)
    for _ in range(turns - 1):
        turn = yield user_message("And?", reward=_liking(turn))
    yield Reply(reward=_liking(turn), done=True)


@environment
async def raises_now_and_then(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """Breaks for odd rows."""
    turn = yield Opening(messages=row.messages)
    if int(row.id) % 2:
        raise RuntimeError(f"row {row.id} does not suit me")
    yield Reply(reward=_liking(turn), done=True)


@environment
async def always_raises(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """Breaks."""
    yield Opening(messages=row.messages)
    raise RuntimeError("no luck today")


@environment
async def slow(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """Takes its time, so that a test can interrupt it."""
    turn = yield Opening(messages=row.messages)
    time.sleep(0.05)
    yield Reply(reward=_liking(turn), done=True)


def not_a_number(trajectory: Trajectory) -> float:
    """A reward that is none for every second row."""
    return math.nan if int(trajectory.row.id) % 2 else 0.0


def length(trajectory: Trajectory) -> float:
    """Fewer tokens, more reward."""
    return -float(trajectory.sampled_tokens)


def _liking(turn: Turn) -> float:
    assert turn.completion is not None
    ids = turn.completion.token_ids
    return sum(id_ < 64 for id_ in ids) / len(ids)


def scaled(trajectory: Trajectory, by: float = 1.0) -> float:
    """More tokens, more reward."""
    return by * trajectory.sampled_tokens


def turn_length(trajectory: Trajectory, turn: Turn, by: float = 1.0) -> float:
    """Longer turns, more reward."""
    return by * len(turn.text)


@environment
async def indifferent(row: Row, reward: float | None = 0.5) -> AsyncGenerator[Opening | Reply, Turn]:
    """Gives every conversation the same reward."""
    yield Opening(messages=row.messages)
    yield Reply(reward=reward, done=True)


def first_byte(trajectory: Trajectory) -> float:
    """Something that differs between conversations."""
    assert trajectory.turns[0].completion is not None
    return float(trajectory.turns[0].completion.token_ids[0])


def weighs_nothing(turn: Turn) -> float:
    """A loss mask that leaves out everything."""
    return 0.0


def ranked(trajectories: Sequence[Trajectory], by: float = 1.0) -> list[float]:
    """The places of the trajectories of a group, the shortest first."""
    lengths = sorted(one.sampled_tokens for one in trajectories)
    return [by * lengths.index(one.sampled_tokens) for one in trajectories]


@environment
async def equal_in_even_rows(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """Gives all conversations of an even row the reward 0.5, and those of an odd row their own."""
    turn = yield Opening(messages=row.messages)
    assert turn.completion is not None
    own = (sum((n + 1) * id_ for n, id_ in enumerate(turn.completion.token_ids)) % 997) / 997
    yield Reply(reward=own if int(row.id) % 2 else 0.5, done=True)


@environment
async def hangs_in_odd_rows(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """Never answers the second conversation of an odd row."""
    turn = yield Opening(messages=row.messages)
    _seen[row.id] = _seen.get(row.id, 0) + 1
    if int(row.id) % 2 and _seen[row.id] % 2 == 0:
        await asyncio.Event().wait()
    yield Reply(reward=_liking(turn), done=True)


_seen: dict[str, int] = {}


@environment
async def slow_tail(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """Takes some milliseconds for each of two turns, and twenty times as long for every seventh row."""
    turn = yield Opening(messages=row.messages)
    for _ in range(2):
        await asyncio.sleep(0.1 if int(row.id) % 7 == 0 else 0.005)
        turn = yield user_message("And?", reward=_liking(turn))
    yield Reply(reward=_liking(turn), done=True)


@environment
async def waits(row: Row, seconds: float = 0.3, log: str | None = None) -> AsyncGenerator[Opening | Reply, Turn]:
    """Waits before it answers, and notes in a file that it waits and that it was closed."""
    turn = yield Opening(messages=row.messages)
    try:
        _note(log, "waiting")
        await asyncio.sleep(seconds)
        yield Reply(reward=_liking(turn), done=True)
    finally:
        _note(log, "closed")


def _note(log: str | None, text: str) -> None:
    if log is not None:
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{text}\n")


@environment
async def blocks(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """Blocks the event loop for a second."""
    turn = yield Opening(messages=row.messages)
    time.sleep(1.0)
    yield Reply(reward=_liking(turn), done=True)


@environment
async def waits_between(row: Row, folder: str) -> AsyncGenerator[Opening | Reply, Turn]:
    """Two turns. Between them, makes the file `waiting` in the folder, and waits for the file `go`."""
    yield Opening(messages=row.messages)
    Path(folder, "waiting").touch()
    while not Path(folder, "go").exists():
        await asyncio.sleep(0.01)
    turn = yield user_message("And?")
    yield Reply(reward=_liking(turn), done=True)


def reads_environment(trajectory: Trajectory, environment: object) -> float:
    """Reads the environment's object."""
    return float(environment is not None)


def own_estimator(batch: list[list[Episode]], *, power: float = 1.0) -> list[list[list[float]]]:
    """The reward, times `power`, for all turns."""
    return [[[episode.reward * power] * episode.turns for episode in group] for group in batch]


def own_loss(logprob_N: Any, targets: Any, *, power: float = 1.0) -> Any:
    """REINFORCE, times `power`."""
    return -targets.advantage_N * logprob_N * power


def other_loss(logprob_N: Any, targets: Any) -> Any:
    """The negative log-likelihood."""
    return -logprob_N


def other_estimator(batch: list[list[Episode]]) -> list[list[list[float]]]:
    """1 for all turns."""
    return [[[1.0] * episode.turns for episode in group] for group in batch]
