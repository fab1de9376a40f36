"""Tools that call a service: search, SandboxFusion servers and MCP servers, with verl's names, attributes and options.

The clients of the services are in `turnwise.environments`; this module contains verl's classes around them. Subclasses may
override the same methods as in verl: `execute`, `execute_search`, `execute_code`, `_call_tool`, `_parse_tool_result`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from turnwise.compat.verl.base import BaseTool
from turnwise.compat.verl.pool import Rate, init_execution_pool
from turnwise.compat.verl.schemas import OpenAIFunctionToolSchema, ToolResponse
from turnwise.compat.verl.search_batch import perform_single_search_batch
from turnwise.environments.mcp.servers import McpServers
from turnwise.environments.sandbox.fusion import SandboxFusion
from turnwise.environments.search import Search
from turnwise.environments.tools import result as tool_result
from turnwise.errors import ConfigError, nearest
from turnwise.services.json_service import ServiceError

__all__ = ["Content", "MCPBaseTool", "MCPSearchTool", "RawServers", "SandboxFusionTool", "SearchTool", "connect"]

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
