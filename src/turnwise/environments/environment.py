"""The interface of an environment: the part of a conversation that answers the model.

An environment sees messages, never tokens. It is made for one row, used for one conversation and closed after it, so its
state is its attributes or local variables. It does not count turns or tokens: `Limits` bounds them.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, runtime_checkable

from turnwise.types import EnvironmentHandle, Message, Opening, Reply, Row, ToolSchema, Turn
from turnwise.user_code.calls import leave_running, wait_for_left
from turnwise.user_code.copies import copy_row, copy_turn
from turnwise.user_code.threaded_object import ThreadedObject

__all__ = [
    "Environment",
    "EnvironmentFactory",
    "FinalReply",
    "FinalReward",
    "MessageCheck",
    "ProvidesHandle",
    "SingleTurn",
    "environment",
    "user_message",
]

P = ParamSpec("P")

_CLEANING_SECONDS = 10.0
"""The time that the `finally` of a generator may take after its conversation was cancelled."""

Generating = AsyncGenerator[Opening | Reply, Turn] | Generator[Opening | Reply, Turn, None]
"""The return types of a generator function that `environment` accepts."""


@runtime_checkable
class Environment(Protocol):
    """Answers the model in one conversation. Single use: `begin` once, `step` after each turn, `close` always."""

    async def begin(self, row: Row) -> Opening:
        """Return the messages before the model's first turn, and the tools that the model may call."""
        ...

    async def step(self, turn: Turn) -> Reply:
        """Return the answer to a turn of the model."""
        ...

    async def close(self) -> None:
        """Release all resources. Called exactly once, also after an error or if `begin` failed."""
        ...


EnvironmentFactory = Callable[[], Environment]
"""Makes a new environment for each conversation: a class without arguments, or a `functools.partial`."""


@runtime_checkable
class FinalReward(Protocol):
    """An environment with a reward for the complete conversation, also if a limit ended it."""

    async def final_reward(self) -> float:
        """Return the reward to add to the last turn.

        Called once, if a limit ended the conversation and there was no error. An environment that ends the conversation itself
        puts this reward into its last `Reply`.
        """
        ...


@runtime_checkable
class FinalReply(Protocol):
    """An environment that has more to say than a reward when a limit has ended the conversation, or that must see the last
    turn."""

    async def final_reply(self, turn: Turn) -> Reply:
        """Return a last `Reply` to the last turn, in place of `FinalReward.final_reward`: its reward, info, metrics and masks.

        `step` was not called with this turn if the limit cut it (`turn.finish_reason` is `length`). Called once, if a limit ended
        the conversation and there was no error.
        """
        ...


@runtime_checkable
class ProvidesHandle(Protocol):
    """An environment that gives reward functions access to an object after the conversation."""

    def environment_handle(self) -> EnvironmentHandle | None:
        """Return a handle of the object, or None.

        Called before `close`, if the conversation ended without an error; `close` must then not change the object. The
        handle's `release` is called after the reward functions.
        """
        ...


def user_message(text: str, *, reward: float = 0.0, done: bool = False) -> Reply:
    """A `Reply` with one user message."""
    return Reply(messages=({"role": "user", "content": text},), reward=reward, done=done)


class SingleTurn:
    """Ends the conversation after the first turn of the model."""

    async def begin(self, row: Row) -> Opening:
        return Opening(messages=row.messages)

    async def step(self, turn: Turn) -> Reply:
        return Reply(done=True)

    async def close(self) -> None:
        pass


class MessageCheck(Protocol):
    """What an environment can ask about messages that it has not given to the model yet."""

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, opening: bool, arguments: Mapping[str, Any]
    ) -> None:
        """Raise TurnwiseError if the messages can be in no prompt of the model. `opening`: they begin a conversation, or replace
        its history; otherwise they follow a turn of the model. `arguments` are those of the chat template."""
        ...


class GeneratorEnvironment:
    """An environment made from a generator: each `yield` returns an Opening or Reply, and receives the model's next turn.

    An async generator runs in the event loop. A sync generator runs in threads, so it may block.
    """

    def __init__(self, start: Callable[[Row], Generating], name: str) -> None:
        self._start = start
        self._name = name
        self._generator: _Async | _Sync | None = None

    async def begin(self, row: Row) -> Opening:
        started = self._start(copy_row(row))
        if isinstance(started, AsyncGenerator):
            self._generator = _Async(started)
        else:
            self._generator = _Sync(lambda: self._start(copy_row(row)), started, self._name)
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
                f'Reply, for example: turn = yield user_message("Try again.")'
            )
        return reply

    async def close(self) -> None:
        if self._generator is not None:
            await self._generator.close()


_OVER = object()
"""Stands for the end of a generator."""


class _Async:
    """An async generator, run in the event loop.

    Its `finally` runs in the step that is cancelled, not in `close`. So a cancelled step is left running, and `close` waits
    for it.
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
    """A sync generator, run in threads."""

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
                return self._generator.send(copy_turn(turn))
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
        """Run a new generator up to the point where the last one was stopped.

        A generator is stopped in a thread if its code needs the main thread. A stopped generator cannot continue.
        """
        self._generator = self._start()
        if self._begun:
            next(self._generator)
        for turn in self._turns:
            self._generator.send(copy_turn(turn))

    async def close(self) -> None:
        await self._foreign.close()


def environment(
    function: Callable[Concatenate[Row, P], Generating],
) -> Callable[P, GeneratorEnvironment]:
    """Make an environment from a generator function, sync or async.

    Returning ends the conversation. Code in `finally:` runs at the end of every conversation.

    Example, a user who asks one question::

        @environment
        async def sure(row):
            turn = yield Opening(messages=row.messages)
            turn = yield user_message("Are you sure?")
            yield Reply(reward=float("yes" in turn.text), done=True)

        make_environment = sure        # parameters after `row` become those of the factory

    A function without `async` may block: it runs in threads, not in the event loop.
    """

    if not (inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function)):
        raise TypeError(f"{function.__name__!r} is not a generator function; it must contain yield")

    @functools.wraps(function)
    def factory(*args: P.args, **kwargs: P.kwargs) -> GeneratorEnvironment:
        return GeneratorEnvironment(lambda row: function(row, *args, **kwargs), function.__name__)

    signature = inspect.signature(function)
    _, *parameters = signature.parameters.values()
    # the recipe's arguments are checked against this signature; the rollout loop passes the row later
    setattr(factory, "__signature__", signature.replace(parameters=parameters))  # noqa: B010
    return factory
