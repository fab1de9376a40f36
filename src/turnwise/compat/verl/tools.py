"""verl's tools in turnwise's tool layer, with the classes that call a service, and the row's fields for tools.

One object serves all conversations, with one instance per conversation. `create` is called when the conversation begins,
`execute` for each call, `calc_reward` once after the conversation, and `release` exactly once, however the conversation ends.
Schemas, checks of arguments, time limits and error messages for the model are the same as for other tools.

- The functions of `@function_tool` (`verl.tools.function_tool`) are tools like all others. They return what verl's may: a text, a
  mapping, a `ToolResponse`, or a tuple of up to three with a reward and metrics; any other value becomes its text.
- Search, SandboxFusion and MCP tools have verl's names, attributes and options. Subclasses may override the same methods as in
  verl: `execute`, `execute_search`, `execute_code`, `_call_tool`, `_parse_tool_result`. The clients of the services are in
  `turnwise.environments`. Their sync functions run in a pool: `execution_pool.execute.remote(function, ...)`, without Ray.
- `interaction_kwargs`, `tools_kwargs` and `tool_selection` are in the row's `extra_info`, or columns of their own. In parquet,
  each row has the keys of all rows, so null means not set."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
import os
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from uuid import uuid4

from turnwise.compat.verl.base import (
    AgentData,
    BaseTool,
    ConversationResource,
    OpenAIFunctionToolSchema,
    ToolResponse,
    call,
    read_response,
    read_schema,
    takes,
)
from turnwise.compat.verl.helpers import perform_single_search_batch
from turnwise.compat.verl.names import verl_names
from turnwise.environments.mcp import McpServers
from turnwise.environments.sandbox.fusion import SandboxFusion
from turnwise.environments.search import Search
from turnwise.environments.tools import result as tool_result
from turnwise.environments.tools.tool import Tool
from turnwise.errors import ConfigError, Failed, boundary, nearest
from turnwise.services.json_service import ServiceError
from turnwise.types import Failure, Row
from turnwise.user_code.references import load_file
from turnwise.user_code.reward_number import reward_number
from turnwise.user_code.threads import run_in_thread

_log = logging.getLogger(__name__)
_KINDS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The fields of a row for its interaction and its tools."""

    interaction: Mapping[str, Any]
    """`interaction_kwargs`."""
    tools: Mapping[str, Mapping[str, Mapping[str, Any]]]
    """`tools_kwargs`, by tool name and by kind such as `create_kwargs`."""
    selection: tuple[str, ...] | None
    """The names of the tools that the model is offered; None means all."""
    truth: Any
    """`reward_model.ground_truth`."""

    def keywords(self, tool: str, kind: str) -> Mapping[str, Any]:
        """The keywords of one kind for one tool."""
        return self.tools.get(tool, {}).get(kind, {})


def refuse(row: Row, problem: str) -> Failed:
    """A failure of kind `row`."""
    return Failed(Failure("row", f"row {row.id!r}: {problem}"))


def wanted(row: Row, tools: Sequence[str]) -> Wanted:
    """Read a row; `tools` are the names of the existing tools.

    Keywords for an unknown tool are ignored, with one warning. Raises Failed if the row contradicts itself, or selects an
    unknown tool.
    """
    tools = tuple(tools)
    info = _mapping(row, "extra_info", row.fields.get("extra_info"))

    def column(name: str) -> Any:
        return info[name] if info.get(name) is not None else row.fields.get(name)

    given: dict[str, Mapping[str, Mapping[str, Any]]] = {}
    for tool, kinds in _mapping(row, "tools_kwargs", column("tools_kwargs")).items():
        if kinds is None:
            continue
        if tool not in tools:  # rows are prepared for several tool files: verl ignores it too
            _tell_of(tool, tools)
            continue
        of_tool: dict[str, Mapping[str, Any]] = {}
        given[tool] = of_tool
        for kind, keywords in _mapping(row, f"tools_kwargs.{tool}", kinds).items():
            if keywords is None:
                continue
            if kind not in _KINDS:
                known = ", ".join(_KINDS)
                raise refuse(row, f"tools_kwargs.{tool} has a key {kind!r}{nearest(kind, _KINDS)} (there are: {known})")
            of_tool[kind] = _mapping(row, f"tools_kwargs.{tool}.{kind}", keywords)
    selection = column("tool_selection")
    for tool in selection or ():
        if tool not in tools:
            have = ", ".join(sorted(tools)) or "none"
            raise refuse(row, f"tool_selection names a tool {tool!r}{nearest(tool, tools)} (the tools are: {have})")
    if column("need_tools_kwargs") and not column("tools_kwargs"):
        raise refuse(row, "need_tools_kwargs is set, and the row has no tools_kwargs")
    reward_model = row.fields.get("reward_model")
    return Wanted(
        interaction=_mapping(row, "interaction_kwargs", column("interaction_kwargs")),
        tools=given,
        selection=None if selection is None else tuple(selection),
        truth=reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None,
    )


@functools.cache
def _tell_of(tool: str, tools: tuple[str, ...]) -> None:
    """Warn once that rows have keywords for an unknown tool."""
    have = ", ".join(sorted(tools)) or "none"
    _log.warning(
        "rows have tools_kwargs for a tool %r%s: they are not used (the tools are: %s)",
        tool,
        nearest(tool, tools),
        have,
    )


def unanswered_kwargs(wants: Wanted) -> None:
    """Warn once that a row has `interaction_kwargs`, and there is no interaction that reads them."""
    if any(value is not None for value in wants.interaction.values()):  # in parquet, null means not set
        _tell_of_interaction(str(wants.interaction.get("name") or ""))


@functools.cache
def _tell_of_interaction(name: str) -> None:
    _log.warning(
        "rows have interaction_kwargs%s, and no interaction file is given: they are not used, and the model's answers end the "
        "conversation. Set environment.arguments.interactions to the file, or remove the column",
        f" (name: {name!r})" if name else "",
    )


def _mapping(row: Row, name: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise refuse(row, f"{name} must be a mapping; it is {value!r:.80}")
    return value


@dataclass(frozen=True, slots=True)
class VerlTool:
    """A user's tool object, and its description for the model."""

    instance: Any
    """The object with `create`, `execute`, `calc_reward` and `release`."""
    tool: Tool
    """The schema and the limits of the tool; each conversation sets the function."""

    @property
    def name(self) -> str:
        """The name by which the model calls the tool."""
        return self.tool.name


@dataclass(slots=True)
class ToolInstance:
    """The instance of a tool in one conversation."""

    of: VerlTool
    id: str
    wanted: Wanted
    agent_data: AgentData
    """The state of the conversation, which `execute` receives in verl v0.7."""
    response: ToolResponse = field(default_factory=ToolResponse)
    """The response that `create` returned."""
    _lease: ConversationResource[str] = field(init=False)

    def __post_init__(self) -> None:
        self._lease = ConversationResource(self._create, self._release, f"the tool {self.of.name!r}")

    async def create(self) -> None:
        """Call `create`. Raises Failed."""
        self.id = await self._lease.acquire()

    @property
    def tool(self) -> Tool:
        """The tool with this conversation's function."""
        return replace(self.of.tool, function=self._execute)

    async def calc_reward(self) -> float:
        """The reward of the conversation's calls; a list of numbers is summed. Raises Failed.

        A list of texts counts as 0: `calc_reward` of verl's own service tools returns their responses.
        """
        reward = await self._call(self.of.instance.calc_reward, "calc_reward")
        with boundary("environment"):
            if isinstance(reward, list | tuple):
                return 0.0 if any(isinstance(item, str) for item in reward) else float(sum(reward))
            return 0.0 if reward is None else reward_number(reward, f"{self.of.name}.calc_reward")

    async def release(self) -> None:
        """Call `release`. Raises Failed."""
        await self._lease.release()

    async def _create(self) -> str:
        method = self.of.instance.create
        keywords = dict(self.wanted.keywords(self.of.name, "create_kwargs"))
        # verl up to v0.6 passes separate keywords, later versions one keyword `create_kwargs`: both are supported
        as_mapping = {"create_kwargs": keywords} if takes(method, "create_kwargs", anything=True) else {}
        if as_mapping and not all(takes(method, name, anything=True) for name in keywords):
            keywords = {}
        created = await self._call(method, "create", {**keywords, **as_mapping})
        with boundary("environment"):
            if isinstance(created, tuple):
                name, returned = created if len(created) == 2 else (None, created)
                response = ToolResponse() if returned is None else read_response(returned)
                if response is None:
                    raise TypeError(
                        f"{type(self.of.instance).__name__}.create returned {created!r:.80}; it must return the "
                        f"instance_id, or (instance_id, ToolResponse)"
                    )
                created, self.response = name, response
            return str(created) if created is not None else self.id

    async def _execute(self, arguments: dict[str, Any]) -> Any:
        method = self.of.instance.execute
        keywords = dict(self.wanted.keywords(self.of.name, "execute_kwargs"))
        if takes(method, "agent_data", anything=True):  # passed since v0.7
            keywords.setdefault("agent_data", self.agent_data)
        name = f"{self.of.name}.execute"
        result = await call(method, self.id, arguments, keywords=keywords, name=name, kind="tool")
        answer, reward, info = _read(result, type(self.of.instance).__name__, self.of.name)
        if reward is not None:
            self.agent_data.tool_rewards.append(reward)
        return answer, reward, info

    async def _release(self, name: str) -> None:
        await self._call(self.of.instance.release, "release")

    async def _call(self, method: Callable[..., Any], name: str, keywords: Mapping[str, Any] | None = None) -> Any:
        if keywords is None:
            keywords = self.wanted.keywords(self.of.name, f"{name}_kwargs")
        return await call(method, self.id, keywords=keywords, name=f"{self.of.name}.{name}", kind="environment")


def _read(result: Any, kind: str, name: str) -> tuple[Any, float | None, dict[str, Any]]:
    """The result of `execute` as (answer, reward, info)."""
    reward: Any = 0.0
    info: Any = {}
    if isinstance(result, tuple):
        if not 1 <= len(result) <= 3:
            raise TypeError(f"{kind}.execute returned {len(result)} values; it must return (response, reward, metrics)")
        result, reward, info = (*result, *(0.0, {})[len(result) - 1 :])
    if (response := read_response(result)) is not None:
        answer: Any = tool_result.ToolResponse(response.text, response.image or None, response.video or None)
    elif isinstance(result, bytes | bytearray):
        answer = bytes(result).decode("utf-8", errors="replace")
    elif result is None:
        raise TypeError(f"{kind}.execute returned nothing; it must return (response, reward, metrics)")
    else:
        answer = result if isinstance(result, str | dict) else {"result": result}
    if info is not None and not isinstance(info, Mapping):
        raise TypeError(f"{kind}.execute returned the metrics {info!r:.80}; they must be a mapping")
    return (
        answer,
        (None if reward is None else reward_number(reward, f"{kind}.execute")),
        ({name: dict(info)} if info else {}),
    )


@dataclass
class FunctionTool:
    """A registered function."""

    name: str
    fn: Callable[..., Any]
    tool_schema: OpenAIFunctionToolSchema
    is_async: bool = False

    async def call(self, parameters: dict[str, Any]) -> Any:
        """Call the function; a sync function runs in a thread."""
        return await self.fn(**parameters) if self.is_async else await asyncio.to_thread(self.fn, **parameters)


FUNCTION_TOOL_REGISTRY: dict[str, FunctionTool] = {}
"""All registered functions by the names of their tools."""
_files: dict[str, list[FunctionTool]] = {}
"""The functions of each file that was loaded."""


def function_tool(name: Any = None, *, schema: OpenAIFunctionToolSchema | dict[str, Any] | None = None) -> Any:
    """Register a function as a tool: `@function_tool`, or `@function_tool("name")`.

    The schema is inferred from the type hints and the docstring (Google style), as `transformers.utils.get_json_schema` does it,
    unless `schema` is given. Raises ValueError for `*args`, for a name that another function has, and for a missing type or
    description.
    """

    def register(fn: Callable[..., Any], called: str | None) -> Callable[..., Any]:
        tool = called or fn.__name__
        own = _inferred(fn, tool) if schema is None else read_schema(schema)
        if own is None:
            raise ValueError(f"@function_tool {tool!r}: schema is {schema!r:.80}; give a schema in the OpenAI format")
        before = FUNCTION_TOOL_REGISTRY.get(tool)
        if before is not None and before.fn is not fn:
            raise ValueError(
                f"@function_tool {tool!r} of {fn.__module__}.{fn.__qualname__}: "
                f"{before.fn.__module__}.{before.fn.__qualname__} has "
                f"this name already; choose another name"
            )
        FUNCTION_TOOL_REGISTRY[tool] = FunctionTool(tool, fn, own, inspect.iscoroutinefunction(fn))
        return fn

    if callable(name):
        return register(name, None)
    return lambda fn: register(fn, name)


def get_function_tool(name: str) -> FunctionTool:
    """The registered function of this name. Raises KeyError."""
    if name not in FUNCTION_TOOL_REGISTRY:
        raise KeyError(f"there is no @function_tool {name!r}; there are: {', '.join(sorted(FUNCTION_TOOL_REGISTRY))}")
    return FUNCTION_TOOL_REGISTRY[name]


def load_function_tools_from_path(path: str) -> list[FunctionTool]:
    """The functions that a Python file registers; the file is executed once. Raises ConfigError."""
    place = os.path.abspath(os.path.expanduser(path))
    if place not in _files:
        before = dict(FUNCTION_TOOL_REGISTRY)
        with verl_names():
            load_file(Path(place), key="environment.arguments.function_tools")
        _files[place] = [tool for name, tool in sorted(FUNCTION_TOOL_REGISTRY.items()) if before.get(name) is not tool]
    return list(_files[place])


def read_function_tools(path: str, *, timeout: float) -> dict[str, tuple[FunctionTool, Tool]]:
    """The functions of a file, each with its tool, by name. `timeout` is the time limit of a call in seconds.

    Raises ConfigError.
    """
    found = load_function_tools_from_path(path)
    if not found:
        raise ConfigError(
            f"environment.arguments.function_tools: {path} registers no function: write @function_tool above one"
        )
    return {one.name: (one, tool_of(one, timeout=timeout)) for one in found}


def tool_of(registered: FunctionTool, *, timeout: float) -> Tool:
    """The tool of a registered function."""

    async def run(arguments: dict[str, Any]) -> Any:
        value = await call(registered.fn, keywords=arguments, name=registered.name, kind="tool")
        response, reward, info = normalize_function_tool_return(value)
        answer = tool_result.ToolResponse(response.text, response.image or None, response.video or None)
        return answer, reward, {registered.name: info} if info else {}

    schema = registered.tool_schema.model_dump(exclude_unset=True)
    return Tool.from_schema(schema, run, by_name=False, timeout=timeout)


def normalize_function_tool_return(ret: Any) -> tuple[ToolResponse, float, dict[str, Any]]:
    """The return value of a function as (response, reward, metrics). Raises TypeError for a tuple of another length."""
    if not isinstance(ret, tuple):
        return _response(ret), 0.0, {}
    if not 1 <= len(ret) <= 3:
        raise TypeError(
            f"a @function_tool returned a tuple of {len(ret)} values: return (response,), (response, reward) or (response, "
            f"reward, metrics)"
        )
    response, reward, metrics = (*ret, None, None)[:3]
    return _response(response), 0.0 if reward is None else float(reward), {} if metrics is None else dict(metrics)


def _response(value: Any) -> ToolResponse:
    if (response := read_response(value)) is not None:
        return response
    if isinstance(value, Mapping):
        return ToolResponse(text=json.dumps(value, ensure_ascii=False))
    return ToolResponse(text=value if isinstance(value, str) else str(value))


def _inferred(fn: Callable[..., Any], name: str) -> OpenAIFunctionToolSchema:
    parameters = inspect.signature(fn).parameters.values()
    variadic = [one.name for one in parameters if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    if variadic:
        raise ValueError(
            f"@function_tool {name!r}: {fn.__module__}.{fn.__qualname__} takes {', '.join(variadic)}, which a schema cannot "
            f"describe: name each parameter"
        )
    from transformers.utils.chat_template_utils import get_json_schema

    schema = get_json_schema(fn)
    return OpenAIFunctionToolSchema.model_validate({**schema, "function": {**schema["function"], "name": name}})


T = TypeVar("T")


class PoolMode(Enum):
    """The way in which functions are run. As in verl, only threads are supported."""

    ThreadMode = 1
    ProcessMode = 2


class Rate:
    """Allows at most `per_second` calls per second over all conversations, evenly spaced. None means no limit."""

    def __init__(self, per_second: float | None) -> None:
        self._pause = 1.0 / per_second if per_second else 0.0
        self._next = 0.0

    async def turn(self) -> None:
        """Wait until the next call may begin."""
        now = time.monotonic()
        mine, self._next = max(now, self._next), max(now, self._next) + self._pause
        if mine > now:
            await asyncio.sleep(mine - now)


class ExecutionPool:
    """Runs functions in threads: at most `workers` at the same time, at most `per_second` started per second."""

    def __init__(self, workers: int, per_second: float | None) -> None:
        self.execute = self
        """The pool itself, so that `pool.execute.remote(...)` works as with verl's Ray actor."""
        self._workers = workers
        self._rate = Rate(per_second)
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    async def remote(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        """Run a function and return its result. Raises Failed of kind `tool`, with the function's exception as the cause."""
        slot = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._workers))
        async with slot:
            await self._rate.turn()
            name = getattr(function, "__name__", type(function).__name__)
            return await run_in_thread(lambda: function(*arguments, **keywords), name=name, kind="tool")


def init_execution_pool(
    num_workers: int,
    enable_global_rate_limit: bool = True,
    rate_limit: float = 10,
    mode: PoolMode = PoolMode.ThreadMode,
) -> ExecutionPool:
    """Create a pool, with verl's arguments. Raises NotImplementedError for ProcessMode."""
    if mode is not PoolMode.ThreadMode:
        raise NotImplementedError("functions are run in threads: mode=PoolMode.ThreadMode")
    return ExecutionPool(num_workers, rate_limit if enable_global_rate_limit else None)


_Executed = tuple[ToolResponse, float | None, dict[str, Any] | None]


class _Instances(BaseTool):
    """A tool with verl's `_instance_dict`, in which subclasses keep their data of each conversation."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        truth = kwargs.get("ground_truth") or (kwargs.get("create_kwargs") or {}).get("ground_truth")
        self._instance_dict[instance_id] = {"response": "", "ground_truth": truth, "reward": []}
        return instance_id, ToolResponse()

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._instance_dict.pop(instance_id, None)


class SearchTool(_Instances):
    """`search(query_list)`, answered by a retrieval service; the model receives `{"result": documents}`.

    Options (`config`): `retrieval_service_url`; `topk`; `timeout` in seconds; `num_workers`, the number of simultaneous
    requests over all conversations; `rate_limit`, the number of requests per second (verl also limited the simultaneous
    requests by it); `enable_global_rate_limit: false` for no rate limit.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        options = ("retrieval_service_url", "topk", "timeout", "num_workers", "rate_limit", "enable_global_rate_limit")
        _check(self, SearchTool, options, needs=options[0])
        self.num_workers = config.get("num_workers", 120)
        self.rate_limit = config.get("rate_limit", 120)
        self.timeout = config.get("timeout", 30)
        self.enable_global_rate_limit = config.get("enable_global_rate_limit", True)
        self.retrieval_service_url: str = config["retrieval_service_url"]
        self.topk = config.get("topk", 3)
        Search(self.retrieval_service_url, topk=self.topk, timeout=float(self.timeout))  # raises if the URL is invalid
        self.execution_pool = init_execution_pool(self.num_workers, self.enable_global_rate_limit, self.rate_limit)

    def execute_search(
        self, instance_id: str, query_list: list[str], retrieval_service_url: str, topk: int, timeout: float
    ) -> tuple[str, dict[str, Any]]:
        """Send the request and wait. Returns the text for the model, and the request's metadata."""
        return perform_single_search_batch(retrieval_service_url, query_list, topk=topk, timeout=timeout)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> _Executed:
        queries = parameters.get("query_list")
        if not isinstance(queries, list) or not queries or not all(isinstance(query, str) for query in queries):
            raise ValueError(f"query_list must be a list of texts; it is {queries!r:.80}")
        text, metadata = await self.execution_pool.execute.remote(
            self.execute_search, instance_id, queries, self.retrieval_service_url, self.topk, self.timeout
        )
        if metadata.get("api_request_error"):
            raise ServiceError(str(metadata["api_request_error"]))  # counted as the tool's error
        self._instance_dict.setdefault(instance_id, {"reward": []})["reward"].append(text.strip())
        names = ("query_count", "status", "total_results", "api_request_error")
        return ToolResponse(text=text), 0.0, {name: metadata.get(name) for name in names}


class SandboxFusionTool(_Instances):
    """`code_interpreter(code)`, run on a SandboxFusion server.

    Options (`config`): `sandbox_fusion_url`, `default_timeout` in seconds, `default_language`, `memory_limit_mb`,
    `num_workers`, the number of simultaneous programs over all conversations; `rate_limit`, the number of programs per second;
    `enable_global_rate_limit: false` for no rate limit. A call may set its own `timeout` and `language`. Unlike verl's tool,
    this tool reports errors to the model.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        options = (
            "sandbox_fusion_url",
            "default_timeout",
            "default_language",
            "memory_limit_mb",
            "num_workers",
            "rate_limit",
            "enable_global_rate_limit",
        )
        _check(self, SandboxFusionTool, options, needs=options[0])
        self.num_workers = config.get("num_workers", 10)
        self.rate_limit = config.get("rate_limit", 10)
        self.default_timeout = config.get("default_timeout", 30)
        self.default_language: str = config.get("default_language", "python")
        self.enable_global_rate_limit = config.get("enable_global_rate_limit", True)
        self.sandbox_fusion_url: str = config["sandbox_fusion_url"]
        self.memory_limit_mb = config.get("memory_limit_mb", 1024)
        self._server(self.default_timeout, self.default_language)  # raises if the URL is invalid
        self.execution_pool = init_execution_pool(self.num_workers, self.enable_global_rate_limit, self.rate_limit)

    def execute_code(self, instance_id: str, code: str, timeout: float = 30, language: str = "python") -> ToolResponse:
        """Run a program and wait. Returns the text for the model."""
        return ToolResponse(text=asyncio.run(self._server(timeout, language).code_interpreter(code)))

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> _Executed:
        code = str(parameters.get("code", ""))
        timeout = parameters.get("timeout", self.default_timeout)
        language = parameters.get("language", self.default_language)
        result = await self.execution_pool.execute.remote(self.execute_code, instance_id, code, timeout, language)
        return (result if isinstance(result, ToolResponse) else ToolResponse(text=str(result))), None, None

    def _server(self, timeout: float, language: str) -> SandboxFusion:
        return SandboxFusion(
            self.sandbox_fusion_url,
            language=language,
            run_timeout=float(timeout),
            memory_limit_mb=self.memory_limit_mb,
            max_concurrent=self.num_workers,
        )


class Content(tool_result.ToolResponse):
    """A tool response together with the original content blocks of the MCP server."""

    __slots__ = ("blocks",)

    def __init__(self, response: tool_result.ToolResponse, blocks: list[Any]) -> None:
        super().__init__(response.text, response.image, response.video)
        object.__setattr__(self, "blocks", blocks)


class RawServers(McpServers):
    """MCP servers whose results keep the original content blocks, for `_parse_tool_result`."""

    def parse_result(self, content: list[Any]) -> tool_result.ToolResponse:
        return Content(super().parse_result(content), content)


AskServer = Callable[[dict[str, Any]], Awaitable[tool_result.ToolResponse]]


def connect(instance: Any, ask: AskServer) -> None:
    """Connect a tool to its MCP server. A tool of a copy of verl's class is connected through verl's `_call_tool`."""
    if isinstance(instance, MCPBaseTool):
        instance.connect(ask)
        return

    async def call_tool(instance_id: str, parameters: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        text, metadata = instance._parse_tool_result(_blocks(await ask(parameters)))
        return text, {"api_request_error": None, **metadata}

    instance._call_tool = call_tool


class MCPBaseTool(_Instances):
    """A tool of an MCP server. Override `_parse_tool_result` to read results in another way.

    Options (`config`): `timeout` of a call in seconds; `rate_limit`, the number of calls per second.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        if type(self) in (MCPBaseTool, MCPSearchTool):  # a user's own class may have options of its own
            _check(self, type(self), ("timeout", "rate_limit"))
        self.timeout = config.get("timeout", 30)
        self._rate = Rate(config.get("rate_limit"))
        self._ask: AskServer | None = None

    def connect(self, ask: AskServer) -> None:
        """Set the function that sends a call to the server. Called when the tool file is read."""
        self._ask = ask

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> _Executed:
        if type(self)._call_tool is not MCPBaseTool._call_tool:  # texts only, as in verl
            text, metadata = await self._call_tool(instance_id, parameters)
            return ToolResponse(text=text), 0.0, metadata
        response = await self._asked(parameters)
        text, metadata = self._parse_tool_result(_blocks(response))
        return ToolResponse(text=text, image=response.image, video=response.video), 0.0, metadata

    async def _call_tool(self, instance_id: str, parameters: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Call the server. Returns (the text for the model, metadata to record)."""
        return self._parse_tool_result(_blocks(await self._asked(parameters)))

    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        """The text for the model, and metadata to record. Images of the result are added by the caller."""
        return " ".join(part.text for part in content if part.type == "text"), {}

    async def _asked(self, parameters: dict[str, Any]) -> tool_result.ToolResponse:
        if self._ask is None:
            raise RuntimeError(f"the tool {self.name!r} has no server; it must come from a tool file with `mcp`")
        await self._rate.turn()
        return await self._ask(parameters)


class MCPSearchTool(MCPBaseTool):
    """A search engine on an MCP server: verl's example of `_parse_tool_result`. The results reach the model unchanged."""


def _blocks(response: tool_result.ToolResponse) -> list[Any]:
    """The content blocks of a result, as the MCP server sent them."""
    return response.blocks if isinstance(response, Content) else [SimpleNamespace(type="text", text=response.text)]


def _check(tool: BaseTool, kind: type[BaseTool], known: tuple[str, ...], *, needs: str | None = None) -> None:
    config: Mapping[str, Any] = tool.config
    if type(tool) is kind:  # a user's own class may have options of its own
        for name in config:
            if name not in (*known, "type"):
                raise ConfigError(
                    f"{kind.__name__} has no option {name!r}{nearest(name, known)}; its options are: {', '.join(known)}"
                )
    if needs is not None and not isinstance(config.get(needs), str):
        raise ConfigError(
            f"{type(tool).__name__} needs the option {needs}: the address of the service, http://host:port/path"
        )
