"""Tools as a layer in front of whatever answers the model otherwise.

The layer finds the tool for each call of a turn, runs them together, and puts their answers in the order of the calls. It
holds the instances of tool classes for its one conversation. It knows nothing of how a model writes its calls; it gets them
read.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence, Set
from contextvars import Context
from dataclasses import replace
from typing import Any, TypeVar

from turnwise.environments.environment import Environment, FinalReward, SingleTurn
from turnwise.environments.tools.result import Answer, ToolResponse, failed
from turnwise.environments.tools.tool import Tool, Toolbox
from turnwise.environments.tools.truncation import Truncation
from turnwise.errors import ConfigError, Failed, nearest
from turnwise.types import Failure, Message, Opening, Reply, Row, ToolCall, ToolSchema, Turn
from turnwise.user_code.calls import call, own_context, spawn
from turnwise.user_code.deadlines import deadline
from turnwise.user_code.run_in_thread import run_in_thread

__all__ = ["Tool", "ToolResponse", "Toolbox", "Tools", "Truncation"]

T = TypeVar("T")
_CLOSING_SECONDS = 12.0  # for the tools, and for the environment behind them: together within what the loop allows
_log = logging.getLogger(__name__)


class Tools:
    """A layer: turns that call tools are answered by the tools, all others by `then`.

    A tool is a function, a class whose public methods are tools, or one of either made ready with `Tool` or `Toolbox`.

    Example: a calculator in front of a user who checks the answer::

        make_environment = lambda: Tools([calculator], then=checked_answer())
    """

    def __init__(
        self,
        tools: Sequence[Tool | Toolbox | Callable[..., Any]],
        *,
        then: Environment | None = None,
        max_parallel_calls: int | None = None,
        truncation: Truncation | None = None,
    ) -> None:
        """`max_parallel_calls` bounds the calls of one turn, `truncation` the texts of tools that have none of their own."""
        if max_parallel_calls is not None and max_parallel_calls <= 0:
            raise ConfigError(f"max_parallel_calls={max_parallel_calls} allows no call at all; give a number above 0")
        ready = [_ready(tool, truncation) for tool in tools]
        if type(then) is Tools:  # a layer in front of a layer is one layer: each call finds its tool
            ready = [*then._ready, *ready]
            bounds = [bound for bound in (max_parallel_calls, then._most) if bound is not None]
            max_parallel_calls, then = min(bounds, default=None), then._then
        self._ready = ready
        self._most = max_parallel_calls
        self._then = then if then is not None else SingleTurn()
        every = [tool for one in ready for tool in (one.tools if isinstance(one, Toolbox) else (one,))]
        self._tools = {tool.name: tool for tool in every}
        if len(self._tools) < len(every):
            names = [tool.name for tool in every]
            _refuse_twice(next(name for name in names if names.count(name) > 1))
        self._instances = [_Instance(one) for one in ready if isinstance(one, Toolbox)]
        self._shared: dict[str, _Instance] = {}
        """Of tools that share an instance with others: that instance."""
        self._offered_behind: Set[str] = frozenset()
        """Names of tools that the environment behind offers, and answers, itself."""

    async def begin(self, row: Row) -> Opening:
        opening = await self._then.begin(row)
        self._take_offered_behind(opening.tools)
        for instance in self._instances:
            for tool in await instance.make():
                self._tools[tool.name] = tool
                self._shared[tool.name] = instance
        return replace(opening, tools=self._with_own(opening.tools))

    async def step(self, turn: Turn) -> Reply:
        behind = [call for call in turn.calls if call.error is None and call.name in self._offered_behind]
        ours = [call for call in turn.calls if call not in behind]
        if not ours or (behind and all(call.error is not None for call in ours)):
            return await self._step_behind(turn)  # who answers the others tells of those that cannot be read too
        if not behind:
            return _reply(await self._answer(ours, turn.tools))
        answering = spawn(self._answer(ours, turn.tools), context=own_context())
        try:
            reply = await self._step_behind(replace(turn, calls=tuple(behind)))
            return _joined(turn, _reply(await answering), reply)
        finally:
            answering.cancel()  # where the side behind broke; otherwise it is over

    async def _step_behind(self, turn: Turn) -> Reply:
        """The reply of the environment behind. If it changes its tools, those of this layer stay beside them."""
        reply = await self._then.step(turn)
        if reply.tools is None:
            return reply
        self._take_offered_behind(reply.tools)
        return replace(reply, tools=self._with_own(reply.tools))

    def _take_offered_behind(self, tools: Sequence[ToolSchema]) -> None:
        self._offered_behind = _names_of(tools)
        for name in self._tools:
            if name in self._offered_behind:
                _refuse_twice(name)

    def _with_own(self, tools: Sequence[ToolSchema]) -> Sequence[ToolSchema]:
        return (*tools, *(tool.schema for tool in self._tools.values()))

    async def final_reward(self) -> float:
        return await self._then.final_reward() if isinstance(self._then, FinalReward) else 0.0

    async def close(self) -> None:
        """Close the tools, then the environment behind, each within its own time.

        Raises Failed with what could not be closed.
        """
        instances, self._instances = self._instances, []
        closing = [(instance.close, f"the tools {instance.name}") for instance in instances]
        problems = await asyncio.gather(*(_closed(*one) for one in closing))
        problems.append(await _closed(self._then.close, f"the environment {type(self._then).__name__}"))
        if told := [problem for problem in problems if problem is not None]:
            raise Failed(Failure("environment", "; ".join(told)))

    async def _answer(self, calls: Sequence[ToolCall], offered: Sequence[ToolSchema]) -> list[Answer]:
        """Run calls together; those that are too many are told so, and those that cannot be run do not count.

        `offered` are the tools that the model was offered: an environment in front of this layer may have withdrawn some.
        """
        withdrawn = self._tools.keys() - _names_of(offered) if offered else frozenset[str]()
        runnable = [
            call for call in calls if call.error is None and call.name in self._tools and call.name not in withdrawn
        ]
        too_many = {id(call) for call in runnable[self._most :]} if self._most is not None else set()

        async def one(call: ToolCall) -> Answer:
            if id(call) in too_many:
                text = (
                    f"at most {self._most} tool call{'s' * (self._most != 1)} can be made at once, and this turn has "
                    f"{len(runnable)}: this one was not made; make it in your next turn"
                )
                return failed(call, "parallel", text)
            return await self._run(call, withdrawn)

        if len(calls) == 1:
            return [await one(calls[0])]
        tasks = [spawn(one(call), context=own_context()) for call in calls]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()  # those that are left when somebody is cancelled

    async def _run(self, call: ToolCall, withdrawn: Set[str]) -> Answer:
        if call.error is not None:
            return failed(call, "malformed", call.error)
        tool = self._tools.get(call.name)
        if tool is None or call.name in withdrawn:
            names = [name for name in (*self._offered_behind, *self._tools) if name not in withdrawn]
            have = ", ".join(sorted(names))
            return failed(
                call,
                "unknown_tool",
                f"there is no tool {call.name!r}{nearest(call.name, names)} (the tools are: {have})",
            )
        instance = self._shared.get(call.name)
        return await (tool.answer(call) if instance is None else instance.answer(tool, call))


class _Instance:
    """The instance of a tool class that one conversation has."""

    def __init__(self, box: Toolbox) -> None:
        self._box = box
        self._making: asyncio.Task[Any] | None = None
        self._turn = asyncio.Lock()
        self._context: Context | None = None

    @property
    def name(self) -> str:
        """The name of the class."""
        return self._box.name

    async def make(self) -> list[Tool]:
        """Make it, beside the event loop, and return its tools."""
        self._context = own_context()
        self._making = self._spawn(run_in_thread(self._box.make, name=self._box.name, kind="environment"))
        made = await asyncio.shield(self._making)  # a conversation may end meanwhile; what is made must still be closed
        return [replace(tool, function=getattr(made, tool.name)) for tool in self._box.tools]

    async def answer(self, tool: Tool, call: ToolCall) -> Answer:
        """Run a call of one of its tools, when it is its turn."""
        async with self._turn:
            return await self._spawn(tool.answer(call))

    async def close(self) -> None:
        """Close it, if there is one."""
        making, self._making = self._making, None
        if making is None:
            return
        if not making.done():
            making.add_done_callback(self._close_late)
        elif not making.cancelled() and making.exception() is None:
            await self._spawn(self._close(making.result()))

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """In the context of this instance: what one call of it sets is there in the next one."""
        return spawn(coroutine, context=self._context)

    async def _close(self, made: Any) -> None:
        if not self._box.closes:
            return

        async def close() -> None:
            if inspect.iscoroutinefunction(made.close):
                await made.close()
            else:
                result = await run_in_thread(made.close, name=f"{self._box.name}.close", kind="environment")
                if inspect.isawaitable(result):
                    await result

        # a call of its own: it runs in a task of this instance, which nobody else could end where it swallows cancellation
        await call(close, kind="environment", name=f"{self._box.name}.close")

    def _close_late(self, making: asyncio.Future[Any]) -> None:
        if not making.cancelled() and making.exception() is None:
            _late.add(task := self._spawn(_closed(lambda: self._close(making.result()), f"the tools {self._box.name}")))
            task.add_done_callback(self._closed_late)

    def _closed_late(self, task: asyncio.Future[str | None]) -> None:
        _late.discard(task)
        if not task.cancelled() and task.exception() is None and (problem := task.result()) is not None:
            _log.warning("the tools %s could not be closed: %s", self._box.name, problem)


_late: set[asyncio.Future[str | None]] = set()
"""Instances that are being closed after their conversation was over: the event loop itself remembers tasks weakly only."""


async def _closed(close: Callable[[], Awaitable[None]], name: str) -> str | None:
    """Why something could not be closed in time, or None."""
    try:
        async with deadline(_CLOSING_SECONDS):
            await call(close, kind="environment", name=f"{name}.close")
    except Failed as failed:
        return failed.failure.message
    except TimeoutError:
        return f"{name} did not close in {_CLOSING_SECONDS:g} s"
    return None


def _names_of(tools: Sequence[ToolSchema]) -> Set[str]:
    """The names of the tools with these schemas."""
    return {str(tool["function"]["name"]) for tool in tools}


def _ready(tool: Tool | Toolbox | Callable[..., Any], truncation: Truncation | None) -> Tool | Toolbox:
    if isinstance(tool, type):
        tool = Toolbox.of(tool)
    elif not isinstance(tool, Tool | Toolbox):
        tool = Tool.of(tool)
    if truncation is None:
        return tool
    if isinstance(tool, Toolbox):
        return replace(tool, tools=tuple(_shortened(one, truncation) for one in tool.tools))
    return _shortened(tool, truncation)


def _shortened(tool: Tool, truncation: Truncation) -> Tool:
    return tool if tool.truncation is not None else replace(tool, truncation=truncation)


def _refuse_twice(name: str) -> None:
    raise ConfigError(f"two tools have the name {name!r}; a model could not tell them apart: rename one")


def _reply(answers: Sequence[Answer]) -> Reply:
    info: dict[str, Any] = {}
    for answer in answers:
        info.update(answer.info)
    return Reply(
        messages=[answer.message for answer in answers],
        outcomes=tuple(answer.outcome for answer in answers),
        reward=sum(answer.outcome.reward for answer in answers),
        info=info,
    )


def _joined(turn: Turn, ours: Reply, theirs: Reply) -> Reply:
    """One reply of two to the same turn: tool messages in the order of the calls, then what else was said."""
    if theirs.resume is not None:
        raise TypeError(
            "a turn called tools of two layers, and the one behind answered with Reply.resume; it must answer with messages"
        )
    order = {call.id: number for number, call in enumerate(turn.calls)}

    def place(message: Message) -> int:
        return order.get(str(message.get("tool_call_id")), len(order))

    return replace(
        theirs,
        messages=sorted([*ours.messages, *theirs.messages], key=place),
        outcomes=tuple(sorted([*ours.outcomes, *theirs.outcomes], key=lambda one: order.get(one.id, len(order)))),
        reward=ours.reward + theirs.reward,
        info={**ours.info, **theirs.info},
    )
