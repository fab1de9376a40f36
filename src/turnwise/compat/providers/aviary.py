"""`environment: aviary:gsm8k`: the environments of a task data set of Aviary, an environment, or a class or function of the user.

The tools are those of the library's environment, which runs them itself. A data set with a length has a row for each task, in the
column `idx`; an environment of its own takes the columns for which it has parameters."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from turnwise.compat.object_factory import number, opened, referred
from turnwise.compat.providers.provider import About, LibraryEnvironments, refuse_unknown_name
from turnwise.data.rows import ProvidedRows, seed_rows
from turnwise.environments.environment import Environment
from turnwise.environments.tools.result import Answer, failed
from turnwise.environments.tools.schema import FromSchema, WrongArguments
from turnwise.errors import ConfigError, Failed, boundary
from turnwise.types import Message, Opening, Reply, Row, ToolCall, ToolOutcome, Turn
from turnwise.user_code.copies import copy_containers
from turnwise.user_code.thread_loops import OwnLoop, ending, own_loop
from turnwise.user_code.threads import ThreadedObject, run_in_thread


class Aviary(LibraryEnvironments):
    """Makes the environments of a name (an EnvironmentSource with rows).

    Args:
        name: A task data set or an environment that Aviary knows, such as `gsm8k` or `dummy`; or a reference `file.py:name` to a
            task data set, an environment class, or a function that makes one of them (`@fenv.start()` too).
        arguments: Keyword arguments of the data set, or of the environment.
        eval_arguments: Keyword arguments that differ in the held-out data set, such as `{split: test}`.
        thread: Run `async` methods in an event loop of the conversation's own, in a thread, so that they may block.

    Raises ConfigError.
    """

    writes_prompt = True

    def __init__(
        self,
        name: str,
        *,
        arguments: Mapping[str, Any] | None = None,
        eval_arguments: Mapping[str, Any] | None = None,
        thread: bool = False,
    ) -> None:
        self.name, self.thread = name, thread
        self._make = _maker(name)
        self._arguments, self._eval_arguments = dict(arguments or {}), dict(eval_arguments or {})
        base = _library("env").TaskDataset
        self._is_data = isinstance(self._make, type) and issubclass(self._make, base)
        self._data: dict[bool, Any] = {}
        if self._is_data:
            self._data[False] = self._made(self._arguments)
            self._data[True] = self._made({**self._arguments, **self._eval_arguments}) if eval_arguments else None
        elif eval_arguments:
            raise ConfigError(
                f"environment.arguments.eval_arguments has no effect: aviary:{name} is an environment, and no data set; remove it"
            )

    @classmethod
    def names(cls) -> Sequence[str]:
        """The data sets and environments that the library knows; some need further packages."""
        library = _library("env")
        return sorted({*library.TASK_DATASET_REGISTRY, *library.ENV_REGISTRY})

    def about(self) -> About:
        """What the data set or the environment brings."""
        length = self._length(held_out=False)
        return About(
            rows=f"{length} tasks"
            if length is not None
            else "endless; a task is drawn by the library or made of columns"
        )

    def rows(self, count: int | None, *, held_out: bool) -> ProvidedRows:
        """A row for each task."""
        if held_out and self._is_data and self._data[True] is None:
            raise ConfigError(
                f"aviary:{self.name} has no held-out tasks: set environment.arguments.eval_arguments, such as {{split: test}}, "
                f"or name a file in data.eval"
            )
        length = self._length(held_out=held_out)
        if length is None:
            return seed_rows(count, held_out=held_out)
        columns = {"held_out": True} if held_out else {}
        return ProvidedRows(records=({"idx": number_, **columns} for number_ in range(length)))

    def environment(self, row: Row) -> Any:
        """The library's environment of a row. Raises DataError."""
        if not self._is_data:
            # the row decides what the recipe leaves open
            given = {name: value for name, value in _columns_of(self._make, row).items() if name not in self._arguments}
            made = self._make(**copy_containers({**given, **self._arguments}))
        else:
            held_out = bool(row.fields.get("held_out"))
            data = self._data[held_out]
            made = (
                data.get_new_env() if self._length(held_out=held_out) is None else data.get_new_env_by_idx(row["idx"])
            )
        if not isinstance(made, _library("env").Environment):
            raise TypeError(f"aviary:{self.name} made a {type(made).__name__}; it must be an aviary Environment")
        return made

    def __call__(self) -> Environment:
        return _AviaryTask(self)

    def _length(self, *, held_out: bool) -> int | None:
        data = self._data.get(held_out)
        try:
            return None if data is None else len(data)
        except TypeError:  # the library says so of a data set without an end
            return None

    def _made(self, arguments: dict[str, Any]) -> Any:
        try:
            with boundary("environment"):
                return self._make(**arguments)
        except Failed as failed:
            raise ConfigError(
                f"environment: aviary:{self.name} cannot be created with {arguments!r:.200}: {failed.failure.message}"
            ) from failed


def _library(module: str) -> Any:
    """A module of the library, which need not be installed where types are checked."""
    return importlib.import_module(f"aviary.{module}")


def _maker(name: str) -> Callable[..., Any]:
    """The class or function of a name. Raises ConfigError."""
    if ":" in name:
        return referred(name, "name")
    refuse_unknown_name(name, Aviary.names(), provider="aviary")
    library = _library("env")
    registry = library.TASK_DATASET_REGISTRY if name in library.TASK_DATASET_REGISTRY else library.ENV_REGISTRY
    try:
        with boundary("environment"):
            return library._get_cls_from_name(registry, name)
    except Failed as failed:
        raise ConfigError(
            f"environment: aviary:{name} cannot be imported: {failed.failure.message} (pip install 'fhaviary[{name}]')"
        ) from failed


def _columns_of(function: Callable[..., Any], row: Row) -> dict[str, Any]:
    """The columns of a row for which a class or function has parameters; none is required."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    return {name: row.fields[name] for name in parameters if name in row.fields}


class _AviaryTask:
    """One conversation."""

    def __init__(self, source: Aviary) -> None:
        self._source = source
        self._name = f"aviary:{source.name}"
        self._row: Row | None = None
        self._arguments: dict[str, FromSchema] = {}
        """By the name of the tool."""
        self._foreign: ThreadedObject[Any] = ThreadedObject(self._make, lambda made: made.close(), name=self._name)
        self._loop = OwnLoop(self._name) if source.thread else None

    async def begin(self, row: Row) -> Opening:
        own_loop.set(self._loop)
        self._row = row
        self._environment = await self._foreign.make()
        answered = await self._foreign.ask(self._environment.reset)
        if not isinstance(answered, tuple) or len(answered) != 2:
            raise TypeError(f"{self._name}.reset returned {answered!r:.200}; it must return (messages, tools)")
        messages, tools = answered
        shown = [_message(message) for message in messages]
        schemas = [{"type": "function", "function": tool.info.model_dump(exclude_none=True)} for tool in tools]
        self._arguments = {tool.info.name: _arguments(tool) for tool in tools}
        return Opening(messages=opened(row.messages, shown), tools=schemas)

    async def step(self, turn: Turn) -> Reply:
        refused = await self._refused(turn.calls)
        answered_here = {one.outcome.id for one in refused}
        calls = [call for call in turn.calls if call.id not in answered_here]
        if refused and not calls:
            return Reply(messages=[one.message for one in refused], outcomes=tuple(one.outcome for one in refused))
        answered = await self._foreign.ask(partial(self._environment.step, _action(turn, calls)))
        if not isinstance(answered, tuple) or len(answered) != 4:
            raise TypeError(
                f"{self._name}.step returned {answered!r:.200}; it must return (messages, reward, done, truncated)"
            )
        observations, reward, done, truncated = answered
        messages = [*(_message(message) for message in observations), *(one.message for one in refused)]
        info = {name: True for name, over in (("terminated", done), ("truncated", truncated)) if over}
        return Reply(
            messages=messages,
            reward=number(reward, f"{self._name}.step"),
            done=bool(done or truncated),
            info=info,
            outcomes=(*_outcomes(calls, messages), *(one.outcome for one in refused)),
        )

    async def close(self) -> None:
        with ending(self._loop):
            await self._foreign.close()

    async def _refused(self, calls: Sequence[ToolCall]) -> list[Answer]:
        """The answers to calls that the environment does not get: the library would raise in a tool, and end the conversation."""
        refused: list[Answer] = []
        for call in calls:
            if call.error is not None:
                refused.append(failed(call, "malformed", call.error))
            elif (arguments := self._arguments.get(call.name)) is not None:  # the environment answers other names
                check = partial(_problem, arguments, call.arguments)
                problem = (
                    check() if arguments.quick else await run_in_thread(check, name=self._name, kind="environment")
                )
                if problem is not None:
                    refused.append(failed(call, "arguments", problem))
        return refused

    def _make(self) -> Any:
        assert self._row is not None
        return self._source.environment(self._row)


def _arguments(tool: Any) -> FromSchema:
    """What a tool of the library takes. Raises ConfigError if its schema is none."""
    parameters = tool.info.parameters
    schema = {"type": "object", "properties": {}} if parameters is None else parameters.model_dump(exclude_none=True)
    taken = inspect.signature(tool._tool_fn).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
        schema.setdefault("additionalProperties", False)  # the library passes each of them to the function
    return FromSchema(schema, tool.info.name)


def _problem(arguments: FromSchema, given: Mapping[str, Any]) -> str | None:
    """Why arguments do not fit; None if they do."""
    try:
        arguments.check(given)
    except WrongArguments as wrong:
        return str(wrong)
    return None


def _action(turn: Turn, calls: Sequence[ToolCall]) -> Any:
    """The turn as a message of the library."""
    content = str(turn.message.get("content") or "") or None
    if not calls:
        return _library("message").Message(role="assistant", content=content)
    tools = _library("tools")
    requested = [
        tools.ToolCall(id=call.id, function=tools.ToolCallFunction(name=call.name, arguments=dict(call.arguments)))
        for call in calls
    ]
    return tools.ToolRequestMessage(content=content, tool_calls=requested)


def _message(message: Any) -> Message:
    """A message of the library in the OpenAI format."""
    found: Message = {"role": message.role, "content": message.deserialized_content or ""}
    if message.role == "tool":
        found |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return found


def _outcomes(calls: Sequence[ToolCall], messages: Sequence[Message]) -> list[ToolOutcome]:
    """The results of the calls that the environment has answered."""
    answers = {message["tool_call_id"]: message for message in messages if message["role"] == "tool"}
    return [
        ToolOutcome(id=call.id, name=call.name, arguments=call.arguments, content=str(answers[call.id]["content"]))
        for call in calls
        if call.id in answers
    ]
