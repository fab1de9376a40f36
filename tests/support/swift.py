"""Schedulers of ms-swift in conversations for tests: the real loop, their registry, an engine that says its lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from support.conversations import Says, hold
from turnwise.compat.swift import scheduler
from turnwise.compat.swift.schedulers import multi_turns
from turnwise.engines.engine import Engine
from turnwise.environments.environment import EnvironmentFactory
from turnwise.types import Row, Segment, Trajectory

ASKED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"

NAME = "under_test"


@contextmanager
def made(kind: type[Any] | str, **arguments: Any) -> Iterator[EnvironmentFactory]:
    """Makes the environments of a scheduler, as a recipe does; a class is registered meanwhile."""
    if isinstance(kind, str):
        yield partial(scheduler, kind, **arguments)
        return
    multi_turns[NAME] = kind
    try:
        yield partial(scheduler, NAME, **arguments)
    finally:
        del multi_turns[NAME]


def play(
    kind: type[Any] | str, *said: Any, row: Row | None = None, table: dict[str, Any] | None = None, **arguments: Any
) -> Trajectory:
    """One conversation of a scheduler; the first of `said` may be an engine."""
    engine: Engine = said[0] if len(said) == 1 and not isinstance(said[0], str | list) else Says(*said)
    with made(kind, **arguments) as make:
        return hold(engine, make, row=row, **(table or {}))


def whole(trajectory: Trajectory) -> Trajectory:
    """The same, if nothing broke in it and its tokens are the template's."""
    assert trajectory.error is None, trajectory.error
    assert trajectory.template_mismatch is None, trajectory.template_mismatch
    return trajectory


def learnt(segment: Segment, turn: int) -> list[int]:
    """The tokens of a turn that are learnt from."""
    return [token for token, of in zip(segment.token_ids, segment.turn, strict=True) if of == turn]
