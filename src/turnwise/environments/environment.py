"""What a user writes: the side that answers the model.

An environment sees messages and never a token. It is built for one row, used for one conversation and closed after it, so
its state is its own attributes or local variables. It does not count turns or tokens: that is what `Limits` are for.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, Concatenate, ParamSpec, Protocol, runtime_checkable

from turnwise.types import EnvironmentHandle, Opening, Reply, Row, Turn
from turnwise.user_code.calls import leave_running, wait_for_left
from turnwise.user_code.threaded_object import ThreadedObject

__all__ = ["Environment", "EnvironmentFactory", "Exposes", "FinalReward", "SingleTurn", "environment", "say"]

P = ParamSpec("P")

_CLEANING_SECONDS = 10.0
"""What the `finally` of a generator may take after its conversation was ended from outside."""

Generating = AsyncGenerator[Opening | Reply, Turn] | Generator[Opening | Reply, Turn, None]
"""What a generator function gives."""


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


@runtime_checkable
class FinalReward(Protocol):
    """An environment that has something to say about the whole conversation, however it ended."""

    async def final_reward(self) -> float:
        """What is added to the last turn's reward. Asked once, if a limit ended the conversation and nothing broke: an
        environment that ends it itself says so in its last Reply."""
        ...


@runtime_checkable
class Exposes(Protocol):
    """An environment whose object reward functions may look at after the conversation."""

    def exposed(self) -> EnvironmentHandle | None:
        """Called after a conversation that did not break, before `close`, which must leave the object as it is. The scorer
        calls `release` when the reward functions have been asked."""
        ...


def say(text: str, *, reward: float = 0.0, done: bool = False) -> Reply:
    """A reply of one user message."""
    return Reply(messages=({"role": "user", "content": text},), reward=reward, done=done)


class SingleTurn:
    """Nobody answers: the model speaks once and the conversation is over."""

    async def begin(self, row: Row) -> Opening:
        return Opening(messages=row.messages)

    async def step(self, turn: Turn) -> Reply:
        return Reply(done=True)

    async def close(self) -> None:
        pass


class GeneratorEnvironment:
    """A generator, made an environment: each `yield` hands over what comes next and receives the model's turn.

    An async one runs in the event loop; a sync one beside it, so it may block.
    """

    def __init__(self, start: Callable[[Row], Generating], name: str) -> None:
        self._start = start
        self._name = name
        self._generator: _Async | _Sync | None = None

    async def begin(self, row: Row) -> Opening:
        started = self._start(row)
        if isinstance(started, AsyncGenerator):
            self._generator = _Async(started)
        else:
            self._generator = _Sync(lambda: self._start(row), started, self._name)
        opening = await self._generator.first()
        if opening is _OVER:
            raise TypeError(f"the environment {self._name!r} ended before its first yield; it must yield an Opening")
        if not isinstance(opening, Opening):
            raise TypeError(
                f"the environment {self._name!r} yielded {type(opening).__name__} first; the first yield must be an "
                f"Opening, for example: turn = yield Opening(messages=row.messages)"
            )
        return opening

    async def step(self, turn: Turn) -> Reply:
        assert self._generator is not None, "step before begin"
        reply = await self._generator.send(turn)
        if reply is _OVER:
            return Reply(done=True)
        if not isinstance(reply, Reply):
            raise TypeError(
                f"the environment {self._name!r} yielded {type(reply).__name__}; after the Opening every yield must be a "
                f'Reply, for example: turn = yield say("Try again.")'
            )
        return reply

    async def close(self) -> None:
        if self._generator is not None:
            await self._generator.close()


_OVER = object()
"""What a generator that is over yields."""


class _Async:
    """An async generator, run in the event loop.

    Its `finally` is the clean-up, and runs where the generator is cancelled: in the step, not in `close`. So a step that is
    cancelled is left running, and `close` waits for it.
    """

    def __init__(self, generator: AsyncGenerator[Opening | Reply, Turn]) -> None:
        self._generator = generator
        self._step: asyncio.Task[Any] | None = None

    async def first(self) -> Any:
        self._step = leave_running()
        return await anext(self._generator, _OVER)

    async def send(self, turn: Turn) -> Any:
        self._step = leave_running()
        try:
            return await self._generator.asend(turn)
        except StopAsyncIteration:
            return _OVER

    async def close(self) -> None:
        step = self._step
        if step is not None and step is not asyncio.current_task() and not step.done():
            await wait_for_left(step, _CLEANING_SECONDS)
        await self._generator.aclose()


class _Sync:
    """A sync generator, run beside the event loop."""

    def __init__(self, start: Callable[[], Any], generator: Any, name: str) -> None:
        self._start = start
        self._generator = generator
        self._begun = False
        self._turns: list[Turn] = []
        self._foreign = ThreadedObject(lambda: None, lambda _: self._generator.close(), name=name)

    async def first(self) -> Any:
        await self._foreign.make()
        opening = await self._ask(lambda: next(self._generator, _OVER))
        self._begun = True
        return opening

    async def send(self, turn: Turn) -> Any:
        def send() -> Any:
            try:
                return self._generator.send(turn)
            except StopIteration:
                return _OVER

        reply = await self._ask(send)
        self._turns.append(turn)
        return reply

    async def _ask(self, ask: Callable[[], Any]) -> Any:
        stopped = False

        def once() -> Any:
            nonlocal stopped
            if stopped:
                self._start_again()
            stopped = True
            return ask()

        return await self._foreign.ask(once)

    def _start_again(self) -> None:
        """Come to where it was before it was stopped in a thread, because it needs the main thread: a generator that was stopped
        cannot go on."""
        self._generator = self._start()
        if self._begun:
            next(self._generator)
        for turn in self._turns:
            self._generator.send(turn)

    async def close(self) -> None:
        await self._foreign.close()


def environment(
    function: Callable[Concatenate[Row, P], Generating],
) -> Callable[P, GeneratorEnvironment]:
    """Make an environment of a generator function, async or not. Its `finally:` is the clean-up; returning ends the
    conversation.

    Example, a user who asks back once::

        @environment
        async def sure(row):
            turn = yield Opening(messages=row.messages)
            turn = yield say("Are you sure?")
            yield Reply(reward=float("yes" in turn.text), done=True)

        make_environment = sure        # parameters after `row` become those of the factory

    Without `async` it may block: it runs beside the event loop, in threads, one after the other.
    """

    if not (inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function)):
        raise TypeError(f"{function.__name__!r} is no generator function; it must yield")

    @functools.wraps(function)
    def factory(*args: P.args, **kwargs: P.kwargs) -> GeneratorEnvironment:
        return GeneratorEnvironment(lambda row: function(row, *args, **kwargs), function.__name__)

    signature = inspect.signature(function)
    _, *parameters = signature.parameters.values()
    # for those who check arguments beforehand: the row comes later, from the loop
    setattr(factory, "__signature__", signature.replace(parameters=parameters))  # noqa: B010
    return factory
