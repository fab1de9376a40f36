"""`Tools`: an environment that answers turns with tool calls, in front of another environment.

`Tools` finds the tool of each call of a turn, runs all calls concurrently, and returns the results in the order of the calls. It
holds the instances of tool classes for one conversation. It gets the calls parsed; it does not know the model's format.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence, Set
from contextvars import Context
from dataclasses import replace
from typing import Any, TypeVar

from turnwise.environments.environment import Environment, FinalReply, FinalReward, ProvidesHandle, SingleTurn
from turnwise.environments.tools.result import Answer, ToolResponse, Truncation, failed
from turnwise.environments.tools.tool import Tool, Toolbox
from turnwise.errors import ConfigError, Failed, nearest
from turnwise.types import EnvironmentHandle, Failure, Message, Opening, Reply, Row, ToolCall, ToolSchema, Turn
from turnwise.user_code.calls import call, deadline, limits, own_context, spawn
from turnwise.user_code.reward_number import added
from turnwise.user_code.threads import run_in_thread

__all__ = ["Tool", "ToolResponse", "Toolbox", "Tools", "Truncation"]

T = TypeVar("T")
_CLOSE_TIMEOUT = 12.0  # for the tools, and again for the inner environment; the loop allows more than both together
_log = logging.getLogger(__name__)


class Tools:
    """Answers turns that call tools; all other turns are answered by the environment `then`.

    A tool is a function, a class whose public methods are tools (or an object of one: its state can be read from outside), a
    `Tool` or a `Toolbox`.

    Example, a calculator and a user who checks the answer::

        make_environment = lambda: Tools([calculator], then=checked_answer())
    """

    def __init__(
        self,
        tools: Sequence[Tool | Toolbox | Callable[..., Any] | object],
        *,
        then: Environment | None = None,
        max_parallel_calls: int | None = None,
        max_calls: int | None = None,
        truncation: Truncation | None = None,
    ) -> None:
        """`max_parallel_calls` bounds the calls of one turn, `max_calls` those of the conversation. `truncation` is for tools
        without their own truncation."""
        for name, bound in (("max_parallel_calls", max_parallel_calls), ("max_calls", max_calls)):
            if bound is not None and bound <= 0:
                raise ConfigError(f"{name}={bound} is not allowed; it must be at least 1")
        ready = [_ready(tool, truncation) for tool in tools]
        if type(then) is Tools:  # two nested `Tools` become one
            ready = [*then._ready, *ready]
            max_parallel_calls = _stricter(max_parallel_calls, then._max_parallel_calls)
            max_calls, then = _stricter(max_calls, then._max_calls), then._inner
        self._ready = ready
        self._max_parallel_calls = max_parallel_calls
        self._max_calls = max_calls
        self._made = 0
        """The calls of the conversation so far, if `max_calls` bounds them."""
        self._inner = then if then is not None else SingleTurn()
        all_tools = [tool for item in ready for tool in (item.tools if isinstance(item, Toolbox) else (item,))]
        self._tools = {tool.name: tool for tool in all_tools}
        if len(self._tools) < len(all_tools):
            names = [tool.name for tool in all_tools]
            _refuse_duplicate(next(name for name in names if names.count(name) > 1))
        self._instances = [_Instance(item) for item in ready if isinstance(item, Toolbox)]
        self._shared: dict[str, _Instance] = {}
        """The instance of each tool that is a method of a class."""
        self._inner_tools: Set[str] = frozenset()
        """Names of the tools that the inner environment offers and answers."""

    async def begin(self, row: Row) -> Opening:
        opening = await self._inner.begin(row)
        self._set_inner_tools(opening.tools)
        for instance in self._instances:
            for tool in await instance.make():
                self._tools[tool.name] = tool
                self._shared[tool.name] = instance
        return replace(opening, tools=self._all_schemas(opening.tools))

    async def step(self, turn: Turn) -> Reply:
        inner = [call for call in turn.calls if call.error is None and call.name in self._inner_tools]
        ours = [call for call in turn.calls if call not in inner]
        if not ours or (inner and all(call.error is not None for call in ours)):
            return await self._step_inner(turn)  # the inner environment also answers calls that could not be parsed
        if not inner:
            return _reply(await self._answer(ours, turn.tools))
        answering = spawn(self._answer(ours, turn.tools), context=own_context())
        try:
            reply = await self._step_inner(replace(turn, calls=tuple(inner)))
            return _merge_replies(turn, _reply(await answering), reply)
        finally:
            answering.cancel()  # has an effect only if the inner environment raised

    async def _step_inner(self, turn: Turn) -> Reply:
        """The reply of the inner environment. If it changes its tools, the tools of this layer are added."""
        reply = await self._inner.step(turn)
        if reply.tools is None:
            return reply
        self._set_inner_tools(reply.tools)
        return replace(reply, tools=self._all_schemas(reply.tools))

    def _set_inner_tools(self, tools: Sequence[ToolSchema]) -> None:
        self._inner_tools = _names_of(tools)
        for name in self._tools:
            if name in self._inner_tools:
                _refuse_duplicate(name)

    def _all_schemas(self, tools: Sequence[ToolSchema]) -> Sequence[ToolSchema]:
        return (*tools, *(tool.schema for tool in self._tools.values()))

    async def final_reply(self, turn: Turn) -> Reply:
        """The inner environment's last reply after a limit ended the conversation."""
        if isinstance(self._inner, FinalReply):
            return await self._inner.final_reply(turn)
        return Reply(done=True, reward=await self.final_reward())

    async def final_reward(self) -> float | None:
        return await self._inner.final_reward() if isinstance(self._inner, FinalReward) else None

    def environment_handle(self) -> EnvironmentHandle | None:
        """The inner environment's object, for reward functions."""
        return self._inner.environment_handle() if isinstance(self._inner, ProvidesHandle) else None

    async def close(self) -> None:
        """Close the tools, then the inner environment, each with its own time limit.

        Raises Failed if one of them could not be closed.
        """
        instances, self._instances = self._instances, []
        closing = [(instance.close, f"the tools {instance.name}") for instance in instances]
        problems = await asyncio.gather(*(_closed(close, name) for close, name in closing))
        problems.append(await _closed(self._inner.close, f"the environment {type(self._inner).__name__}"))
        if messages := [problem for problem in problems if problem is not None]:
            raise Failed(Failure("environment", "; ".join(messages)))

    async def _answer(self, calls: Sequence[ToolCall], offered: Sequence[ToolSchema]) -> list[Answer]:
        """Run calls concurrently. Calls beyond the bounds get an error.

        `offered` are the tools that the model was offered: an outer environment may have withdrawn some.
        """
        withdrawn = self._tools.keys() - _names_of(offered) if offered else frozenset[str]()
        runnable = [
            call for call in calls if call.error is None and call.name in self._tools and call.name not in withdrawn
        ]
        refused = self._beyond_bounds(calls, runnable)

        async def answer(call: ToolCall) -> Answer:
            return refused[id(call)] if id(call) in refused else await self._run(call, withdrawn)

        if len(calls) == 1:
            return [await answer(calls[0])]
        tasks = [spawn(answer(call), context=own_context()) for call in calls]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()  # if this task is cancelled, some calls may still run

    def _beyond_bounds(self, calls: Sequence[ToolCall], runnable: Sequence[ToolCall]) -> dict[int, Answer]:
        """The answers to the calls of a turn that are beyond a bound, by the identity of the call. All others count as made, also
        those that cannot be run: a bound on the conversation is one on what the model tries."""
        most, refused = self._max_parallel_calls, dict[int, Answer]()
        if most is not None:
            for call in runnable[most:]:
                text = (
                    f"at most {most} tool call{'s' * (most != 1)} can be made in one turn, and this turn has {len(runnable)}. "
                    f"This call was not run; make it in your next turn"
                )
                refused[id(call)] = failed(call, "parallel", text)
        if self._max_calls is not None:
            made = [call for call in calls if id(call) not in refused]
            for call in made[max(0, self._max_calls - self._made) :]:
                text = (
                    f"at most {self._max_calls} tool call{'s' * (self._max_calls != 1)} can be made in this conversation. "
                    f"This call was not run; go on without tools"
                )
                refused[id(call)] = failed(call, "max_calls", text)
            self._made += len(made)
        return refused

    async def _run(self, call: ToolCall, withdrawn: Set[str]) -> Answer:
        if call.error is not None:
            return failed(call, "malformed", call.error)
        tool = self._tools.get(call.name)
        if tool is None or call.name in withdrawn:
            names = [name for name in (*self._inner_tools, *self._tools) if name not in withdrawn]
            have = ", ".join(sorted(names))
            return failed(
                call,
                "unknown_tool",
                f"there is no tool {call.name!r}{nearest(call.name, names)} (the tools are: {have})",
            )
        instance = self._shared.get(call.name)
        return await (tool.answer(call) if instance is None else instance.answer(tool, call))


class _Instance:
    """The instance of a tool class in one conversation."""

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
        """Make the instance, in a thread, and return its tools."""
        self._context = own_context()
        self._making = self._spawn(run_in_thread(self._box.make, name=self._box.name, kind="environment"))
        instance = await asyncio.shield(
            self._making
        )  # the conversation may be cancelled meanwhile; the instance must still be closed
        return [replace(tool, function=self._box.method(instance, tool.name)) for tool in self._box.tools]

    async def answer(self, tool: Tool, call: ToolCall) -> Answer:
        """Run a call after all earlier calls of this instance."""
        async with self._turn:
            return await self._spawn(tool.answer(call))

    async def close(self) -> None:
        """Close the instance, if it was made."""
        making, self._making = self._making, None
        if making is None:
            return
        if not making.done():
            making.add_done_callback(self._close_late)
        elif not making.cancelled() and making.exception() is None:
            await self._spawn(self._close(making.result()))

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run in the context of this instance: context variables that a call sets are visible in the next call."""
        if self._context is not None:  # it has the limits of the call that made the instance
            self._context.run(limits.set, limits.get())
        return spawn(coroutine, context=self._context)

    async def _close(self, instance: Any) -> None:
        if not self._box.closes:
            return

        async def close() -> None:
            if inspect.iscoroutinefunction(instance.close):
                await instance.close()
            else:
                result = await run_in_thread(instance.close, name=f"{self._box.name}.close", kind="environment")
                if inspect.isawaitable(result):
                    await result

        # a separate call, because this task belongs to the instance: a method that swallows cancellation could not be ended
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
"""Tasks that close instances after the end of their conversation. The event loop keeps only weak references to tasks."""


async def _closed(close: Callable[[], Awaitable[None]], name: str) -> str | None:
    """Close something. Returns why it could not be closed, or None."""
    try:
        async with deadline(_CLOSE_TIMEOUT):
            await call(close, kind="environment", name=f"{name}.close")
    except Failed as failed:
        return failed.failure.message
    except TimeoutError:
        return f"{name} did not close in {_CLOSE_TIMEOUT:g} s"
    return None


def _stricter(bound: int | None, other: int | None) -> int | None:
    """The smaller of two bounds; None is no bound."""
    return min((one for one in (bound, other) if one is not None), default=None)


def _names_of(tools: Sequence[ToolSchema]) -> Set[str]:
    """The names of the tools with these schemas."""
    return {str(tool["function"]["name"]) for tool in tools}


def _ready(tool: Tool | Toolbox | Callable[..., Any] | object, truncation: Truncation | None) -> Tool | Toolbox:
    if isinstance(tool, type):
        tool = Toolbox.of(tool)
    elif not isinstance(tool, Tool | Toolbox):
        tool = Tool.of(tool) if callable(tool) else Toolbox.around(tool)
    if truncation is None:
        return tool
    if isinstance(tool, Toolbox):
        return replace(tool, tools=tuple(_shortened(method, truncation) for method in tool.tools))
    return _shortened(tool, truncation)


def _shortened(tool: Tool, truncation: Truncation) -> Tool:
    return tool if tool.truncation is not None else replace(tool, truncation=truncation)


def _refuse_duplicate(name: str) -> None:
    raise ConfigError(f"two tools have the name {name!r}; their names must differ: rename one")


def _reply(answers: Sequence[Answer]) -> Reply:
    info: dict[str, Any] = {}
    for answer in answers:
        info.update(answer.info)
    return Reply(
        messages=[answer.message for answer in answers],
        outcomes=tuple(answer.outcome for answer in answers),
        reward=added(answer.reward for answer in answers),
        info=info,
    )


def _merge_replies(turn: Turn, ours: Reply, theirs: Reply) -> Reply:
    """One reply from two replies to the same turn: tool messages in the order of the calls, then other messages."""
    if theirs.resume is not None:
        raise TypeError(
            "a turn called tools of `Tools` and of its inner environment, and the inner environment returned Reply.resume; it "
            "must return messages"
        )
    order = {call.id: number for number, call in enumerate(turn.calls)}

    def place(message: Message) -> int:
        return order.get(str(message.get("tool_call_id")), len(order))

    return replace(
        theirs,
        messages=sorted([*ours.messages, *theirs.messages], key=place),
        outcomes=tuple(
            sorted([*ours.outcomes, *theirs.outcomes], key=lambda outcome: order.get(outcome.id, len(order)))
        ),
        reward=added([ours.reward, theirs.reward]),
        info={**ours.info, **theirs.info},
    )
