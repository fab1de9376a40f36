"""`environment: verifiers:wordle`: a classic environment of verifiers, with its rows, turns, tools and rubric.

Each conversation is one `run_rollout` of the library's environment object, which all conversations of a run share. The library
asks a client for the model's turns; the client here hands each request to the conversation, as that of an agent in this process:
no server, and the tokens of the session are those that were sampled. All rollouts run in one event loop of a thread of their own,
so that tools and scorers that block hold up each other, as in the library, and not the engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import importlib.metadata
import inspect
import math
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from turnwise.compat.object_factory import number, plain
from turnwise.compat.providers.library_thread import LibraryRollouts
from turnwise.compat.providers.provider import About
from turnwise.data.rows import ProvidedRows
from turnwise.environments.agents.environment import AgentConnection, AgentError, AgentResult
from turnwise.environments.agents.requests import (
    AgentAnswer,
    AgentConversation,
    ChatRequest,
    Refused,
    content_text,
    forced_parameters,
    function_tool,
    sampling_change,
    template_arguments,
    tool_call,
)
from turnwise.errors import ConfigError, DataError, Failed, boundary, nearest
from turnwise.types import Message, Row
from turnwise.user_code.references import resolve

_ENDED = 410
"""The status of a request after the end of the conversation."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Verifiers(LibraryRollouts):
    """Makes the environments of an installed environment of verifiers (an EnvironmentSource with rows).

    Args:
        name: The name of an installed environment, as for `verifiers.load_environment`; or a reference to a function that returns
            an environment: `file.py:load_environment`.
        arguments: Keyword arguments of its `load_environment`.
        state_columns: Names of the rollout's state that are recorded in `turn.info` of the last turn.
        seconds_to_finish: How long the environment may score and clean up after a limit of the recipe has ended the conversation.

    Raises ConfigError.
    """

    def __init__(
        self,
        name: str,
        *,
        arguments: Mapping[str, Any] | None = None,
        state_columns: Sequence[str] = (),
        seconds_to_finish: float = 60.0,
    ) -> None:
        if isinstance(state_columns, str) or not all(isinstance(column, str) for column in state_columns):
            raise ConfigError(
                f"environment.arguments.state_columns is {state_columns!r:.80}; it must be a list of names"
            )
        super().__init__(f"verifiers:{name}", seconds_to_finish)
        self.name = name
        self.loaded = _load(name, dict(arguments or {}))
        self._state_columns = list(state_columns)

    @classmethod
    def names(cls) -> Sequence[str]:
        """The installed distributions that require verifiers."""
        return dependent_distributions()

    def about(self) -> About:
        """What the environment brings."""
        names = [name for name, weight in _weights(self.loaded.rubric) if weight]
        return About(rows="those of its data set", rewards=list(dict.fromkeys(names)) or ["environment"])

    def rows(self, count: int | None, *, held_out: bool) -> ProvidedRows:
        """The rows of its data set, or of its evaluation data set."""
        try:
            with boundary("environment"):
                table = self.loaded.build_eval_dataset() if held_out else self.loaded.build_dataset()
        except Failed as failed:
            raise DataError(f"verifiers:{self.name}: its data set cannot be made: {failed.failure.message}") from failed
        if table is None:
            kind, other = (
                ("evaluation data set", "data.eval") if held_out else ("data set of training rows", "data.train")
            )
            raise DataError(f"verifiers:{self.name} has no {kind}; name a file of rows in {other}")
        records = table if count is None else table.select(range(min(count, len(table))))
        return ProvidedRows(records=records)

    async def run(self, row: Row, row_json: str, connection: AgentConnection) -> AgentResult:
        """One rollout and its scores. Raises AgentError with the library's error."""
        input_ = {"example_id": 0, **row.fields, "prompt": list(row.messages)}
        client = _client_class()(connection.conversation)
        given = {**self.loaded.sampling_args}

        problems: list[str] = []

        async def rollout() -> Any:
            _problems.set(problems)
            return await self.loaded.run_rollout(input_, client, "model", given, state_columns=self._state_columns)

        output = await self._thread.run(rollout)
        if not isinstance(output, Mapping):
            raise TypeError(f"verifiers:{self.name}.run_rollout returned {output!r:.200}; it must return a mapping")
        if (error := output.get("error")) is not None:
            raise AgentError(f"verifiers:{self.name} failed: {_error_text(error)}")
        if problems:
            raise AgentError(f"verifiers:{self.name}: {problems[0]}")
        reward = number(output.get("reward"), f"the rubric of verifiers:{self.name}")
        metrics = output.get("metrics") or {}
        parts = _parts(_rubric_of(self.loaded, output.get("info")), metrics, reward)
        shown = {column: output.get(column) for column in ("stop_condition", "is_truncated", *self._state_columns)}
        return AgentResult(
            reward=None if parts else reward, rewards=parts, info={**plain(shown), "metrics": plain(metrics)}
        )

    async def aclose(self) -> None:
        """Wait for rollouts that clean up, and release what the environment holds."""
        await self._thread.close(self.loaded._teardown)


# loading


def dependent_distributions() -> list[str]:
    """The installed distributions that require verifiers."""
    return sorted(
        distribution.name
        for distribution in importlib.metadata.distributions()
        if any(re.match(r"verifiers(?![\w-])", required) for required in distribution.requires or ())
    )


def _library(module: str = "") -> Any:
    """A module of the library, which need not be installed where types are checked."""
    return importlib.import_module(f"verifiers{module}")


def _load(name: str, arguments: dict[str, Any]) -> Any:
    """The environment object. Raises ConfigError."""
    try:
        base = _library(".legacy").Environment
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"environment: verifiers:{name}: the installed verifiers {importlib.metadata.version('verifiers')} has no classic "
            f"environments ({error}): pip install 'turnwise[verifiers]'. A taskset of version 0.4 is verifiers_v1:{name}"
        ) from None
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            f"environment: verifiers:{name} sets signal handlers, which Python allows in the main thread only: start the run in "
            f"the main thread"
        )
    importlib.import_module("datasets").disable_progress_bars()
    try:
        with boundary("environment"), _own_signals():
            if ":" in name:
                loaded = resolve(name, key="environment")(**arguments)
            else:
                loaded = _library().load_environment(name, **arguments)
    except Failed as failed:
        if isinstance(failed.__cause__, ConfigError):
            raise failed.__cause__ from None
        raise ConfigError(_not_loaded(name, failed)) from failed
    if not isinstance(loaded, base):
        raise ConfigError(
            f"environment: verifiers:{name}: its load_environment returned a {type(loaded).__name__}; it must return a "
            f"verifiers.Environment"
        )
    if loaded.requires_group_rollouts:
        functions = [function.__name__ for function in _group_functions(loaded.rubric)]
        raise ConfigError(
            f"environment: verifiers:{name}: its rubric compares the rollouts of a group ({', '.join(functions)}), and here each "
            f"conversation is scored by itself: write these as a group reward of the recipe (docs/rewards.md)"
        )
    _report_failures(loaded.rubric)
    return loaded


def _not_loaded(name: str, failed: Failed) -> str:
    installed = Verifiers.names()
    cause = failed.__cause__
    # load_environment says of any ImportError that the package is missing
    inner = cause.__cause__ if cause is not None else None
    message = failed.failure.message if inner is None else f"{failed.failure.message} ({type(inner).__name__}: {inner})"
    known = f"{nearest(name, installed)}; `turnwise envs verifiers` lists the installed ones" if ":" not in name else ""
    return f"environment: verifiers:{name} cannot be loaded: {message}{known}"


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the handlers of Ctrl-C and SIGTERM: the library sets its own, which end the process at once."""
    before = {number_: signal.getsignal(number_) for number_ in _SIGNALS}
    try:
        yield
    finally:
        for number_, handler in before.items():
            if handler is not None:
                signal.signal(number_, handler)


# rubrics


def _rubric_of(loaded: Any, info: Any) -> Any:
    """The rubric that scored a rollout: in a group of environments, that of the environment the row belongs to."""
    route = info.get("env_id") if isinstance(info, Mapping) else None
    names = [route] if isinstance(route, str) else list(route or ())
    for name in names:
        if name not in getattr(loaded, "env_map", {}):
            break
        loaded = loaded.env_map[name]
    return loaded.rubric


def _weights(rubric: Any) -> list[tuple[str, float]]:
    """The functions of a rubric, or of its rubrics, with their weights."""
    return [
        (getattr(function, "__name__", repr(function)), float(weight))
        for each in _rubrics(rubric)
        for function, weight in zip(each.funcs, each.weights, strict=True)
    ]


_problems: ContextVar[list[str]] = ContextVar("turnwise_verifiers_problems")
"""Why functions of the rubric have given no reward to the rollout of this context."""


def _report_failures(rubric: Any) -> None:
    """Let the functions of a rubric that have a weight report why they give no reward: for the library it is 0."""
    for each in _rubrics(rubric):
        each.funcs = [
            _reporting(function) if weight and not hasattr(function, "_reports") else function
            for function, weight in zip(each.funcs, each.weights, strict=True)
        ]


def _reporting(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function that reports what it raises, and None."""
    name = getattr(function, "__name__", repr(function))

    @functools.wraps(function)
    async def reward(**given: Any) -> float:
        try:
            with boundary("reward"):
                value = function(**given)
                value = await value if inspect.isawaitable(value) else value
                return number(value if value is None else float(value), name)
        except Failed as failed:
            if (problems := _problems.get(None)) is not None:
                problems.append(f"the reward function {name}: {failed.failure.message}")
            raise

    reward._reports = True  # type: ignore[attr-defined]
    return reward


def _rubrics(rubric: Any) -> list[Any]:
    """A rubric, or those that it consists of."""
    inner = getattr(rubric, "rubrics", None) or [env.rubric for env in getattr(rubric, "env_map", {}).values()]
    return [each for one in inner for each in _rubrics(one)] if inner else [rubric]


def _group_functions(rubric: Any) -> list[Any]:
    inner = getattr(rubric, "rubrics", None)
    return [f for each in inner for f in _group_functions(each)] if inner else rubric._get_group_reward_funcs()


def _parts(rubric: Any, metrics: Mapping[str, Any], reward: float) -> dict[str, float]:
    """The parts of a reward by the functions of the rubric; none if they do not add up to the reward, as with two functions of
    one name, or a rubric of another kind."""
    weights = dict(_weights(rubric))
    if not all(name in metrics for name in weights):
        return {}
    parts = {name: float(metrics[name]) * weight for name, weight in weights.items() if weight}
    return parts if parts and math.isclose(math.fsum(parts.values()), reward, rel_tol=1e-9, abs_tol=1e-9) else {}


def _error_text(error: Any) -> str:
    """The error of a rollout as the library records it."""
    if isinstance(error, Mapping):
        return str(error.get("error_chain_repr") or error.get("error") or dict(error))
    return f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else str(error)


# the model's turns


def _client_class() -> type[Any]:
    """The client class, made when the library is there."""
    clients, types, errors = _library(".legacy.clients"), _library(".legacy.types"), _library(".legacy.errors")

    class ConversationClient(clients.Client):  # type: ignore[misc, name-defined]
        """Hands the requests of one rollout to its conversation. The event loop of the conversation is another one."""

        def __init__(self, conversation: AgentConversation) -> None:
            super().__init__(conversation)

        async def get_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **more: Any
        ) -> Any:
            conversation: AgentConversation = self.client
            try:
                request = _request(prompt, sampling_args or {}, tools)
                asked = asyncio.run_coroutine_threadsafe(conversation.ask(request), conversation.loop)
                answer = await asyncio.wrap_future(asked)
            except Refused as refused:
                if refused.status == _ENDED:  # the library ends and scores such a rollout
                    raise errors.OverlongPromptError(refused.message) from refused
                raise errors.ModelError(refused.message) from refused
            return _response(types, answer)

        def setup_client(self, config: Any) -> Any:
            raise NotImplementedError

        async def to_native_tool(self, tool: Any) -> Any:
            raise NotImplementedError

        async def to_native_prompt(self, messages: Any) -> Any:
            raise NotImplementedError

        async def get_native_response(self, *arguments: Any, **more: Any) -> Any:
            raise NotImplementedError

        async def raise_from_native_response(self, response: Any) -> None:
            raise NotImplementedError

        async def from_native_response(self, response: Any) -> Any:
            raise NotImplementedError

        async def close(self) -> None:
            pass

    return ConversationClient


def _request(prompt: Sequence[Any], sampling_args: Mapping[str, Any], tools: Sequence[Any] | None) -> ChatRequest:
    """A request of the library. Raises Refused for what no model here can do."""
    body = {name: value for name, value in sampling_args.items() if value is not None and name != "extra_body"}
    body |= sampling_args.get("extra_body") or {}
    read = ("max_tokens", "max_completion_tokens", "stop", "chat_template_kwargs")
    return ChatRequest(
        messages=[_message(message) for message in prompt],
        tools=[function_tool(tool.name, tool.description, tool.parameters) for tool in tools or ()],
        sampling=sampling_change(body, max_tokens=read[:2], stop="stop"),
        chat_template_kwargs=template_arguments(body),
        forced=forced_parameters(body, read=read),
    )


def _message(message: Any) -> Message:
    """A message of the library in the OpenAI format."""
    given = message.model_dump(exclude_none=True)
    role = "user" if given["role"] == "text" else given["role"]
    found: Message = {"role": role, "content": content_text(given.get("content"), f"a message of {role}")}
    if role == "tool":
        found["tool_call_id"] = given["tool_call_id"]
    if given.get("reasoning_content"):
        found["reasoning_content"] = given["reasoning_content"]
    if given.get("tool_calls"):
        found["tool_calls"] = [tool_call(call["id"], call["name"], call["arguments"]) for call in given["tool_calls"]]
    return found


def _response(types: Any, answer: AgentAnswer) -> Any:
    """The model's turn as the library takes it."""
    calls = [
        types.ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in answer.calls
    ]
    message = types.ResponseMessage(
        content=answer.text,
        reasoning_content=answer.reasoning or None,
        tool_calls=calls or None,
        finish_reason="length" if answer.cut else "tool_calls" if calls else "stop",
        is_truncated=answer.cut,
    )
    usage = types.Usage(
        prompt_tokens=answer.prompt_tokens,
        reasoning_tokens=0,
        completion_tokens=answer.completion_tokens,
        total_tokens=answer.prompt_tokens + answer.completion_tokens,
    )
    return types.Response(id=answer.id, created=answer.created, model=answer.model, usage=usage, message=message)
