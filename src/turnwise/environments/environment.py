"""What a user writes: the side that answers the model.

An environment sees messages and never a token. It is built for one row, used for one conversation and closed after it, so
its state is its own attributes or local variables. It does not count turns or tokens: that is what `Limits` are for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable
from typing import Concatenate, ParamSpec, Protocol, runtime_checkable

from turnwise.types import Opening, Reply, Row, Turn

__all__ = ["Environment", "EnvironmentFactory", "Once", "environment", "say"]

P = ParamSpec("P")


@runtime_checkable
class Environment(Protocol):
    """What comes next, after the model has spoken? Single use: `begin` once, `step` after each turn, `close` always."""

    async def begin(self, row: Row) -> Opening:
        """The messages that are on the table before the model speaks, and the tools that it may call."""
        ...

    async def step(self, turn: Turn) -> Reply:
        """Answer the model's turn."""
        ...

    async def close(self) -> None:
        """Give back what was taken. Called once on every path out, after `begin` failed too."""
        ...


EnvironmentFactory = Callable[[], Environment]
"""Makes a fresh environment for each conversation: a class without arguments, or a `functools.partial`."""


def say(text: str, *, reward: float = 0.0, done: bool = False) -> Reply:
    """A reply of one user message."""
    return Reply(messages=({"role": "user", "content": text},), reward=reward, done=done)


class Once:
    """Nobody answers: the model speaks once and the conversation is over."""

    async def begin(self, row: Row) -> Opening:
        return Opening(messages=row.messages)

    async def step(self, turn: Turn) -> Reply:
        return Reply(done=True)

    async def close(self) -> None:
        pass


class GeneratorEnvironment:
    """An async generator, made an environment: each `yield` hands over what comes next and receives the model's turn."""

    def __init__(self, start: Callable[[Row], AsyncGenerator[Opening | Reply, Turn]], name: str) -> None:
        self._start = start
        self._name = name
        self._generator: AsyncGenerator[Opening | Reply, Turn] | None = None

    async def begin(self, row: Row) -> Opening:
        self._generator = self._start(row)
        opening = await anext(self._generator, None)
        if opening is None:
            raise TypeError(f"the environment {self._name!r} ended before its first yield; it must yield an Opening")
        if not isinstance(opening, Opening):
            raise TypeError(
                f"the environment {self._name!r} yielded {type(opening).__name__} first; the first yield must be an "
                f"Opening, for example: turn = yield Opening(messages=row.messages)"
            )
        return opening

    async def step(self, turn: Turn) -> Reply:
        assert self._generator is not None, "step before begin"
        try:
            reply = await self._generator.asend(turn)
        except StopAsyncIteration:
            return Reply(done=True)
        if not isinstance(reply, Reply):
            raise TypeError(
                f"the environment {self._name!r} yielded {type(reply).__name__}; after the Opening every yield must be a "
                f'Reply, for example: turn = yield say("Try again.")'
            )
        return reply

    async def close(self) -> None:
        if self._generator is not None:
            await self._generator.aclose()


def environment(
    function: Callable[Concatenate[Row, P], AsyncGenerator[Opening | Reply, Turn]],
) -> Callable[P, GeneratorEnvironment]:
    """Make an environment of an async generator function. Its `finally:` is the clean-up; returning ends the conversation.

    Example, a user who asks back once::

        @environment
        async def sure(row):
            turn = yield Opening(messages=row.messages)
            turn = yield say("Are you sure?")
            yield Reply(reward=float("yes" in turn.text), done=True)

        make_environment = sure        # parameters after `row` become those of the factory
    """

    if not inspect.isasyncgenfunction(function):
        raise TypeError(f"{function.__name__!r} is no async generator function; it must be `async def` and yield")

    @functools.wraps(function)
    def factory(*args: P.args, **kwargs: P.kwargs) -> GeneratorEnvironment:
        return GeneratorEnvironment(lambda row: function(row, *args, **kwargs), function.__name__)

    signature = inspect.signature(function)
    _, *parameters = signature.parameters.values()
    # for those who check arguments beforehand: the row comes later, from the loop
    setattr(factory, "__signature__", signature.replace(parameters=parameters))  # noqa: B010
    return factory
