"""Tools that ask a service: search, a SandboxFusion server, and the servers of MCP, with verl's names and options.

What speaks to the services is ours (`turnwise.environments`); here are verl's classes around it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

from turnwise.compat.verl.base import BaseTool
from turnwise.compat.verl.schemas import OpenAIFunctionToolSchema, ToolResponse
from turnwise.environments import tool_result
from turnwise.environments.mcp import McpServers
from turnwise.environments.sandbox.fusion import SandboxFusion
from turnwise.environments.search import Search
from turnwise.errors import ConfigError, nearest

__all__ = ["Content", "MCPBaseTool", "MCPSearchTool", "RawServers", "SandboxFusionTool", "SearchTool"]


class _Rate:
    """At most so many calls a second, evenly, over all conversations."""

    def __init__(self, per_second: float | None) -> None:
        self._pause = 1.0 / per_second if per_second else 0.0
        self._next = 0.0

    async def turn(self) -> None:
        """Wait until it is one's turn."""
        now = time.monotonic()
        mine, self._next = max(now, self._next), max(now, self._next) + self._pause
        if mine > now:
            await asyncio.sleep(mine - now)


class SearchTool(BaseTool):
    """`search(query_list)`, answered by a retrieval service.

    Options (`config`): `retrieval_service_url`, `topk`, `timeout` in seconds, `num_workers` requests at once over all
    conversations, `rate_limit` requests a second (verl's bounded the requests at once by it too),
    `enable_global_rate_limit: false` to have no such limit.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        options = ("retrieval_service_url", "topk", "timeout", "num_workers", "rate_limit", "enable_global_rate_limit")
        _check("SearchTool", config, options, needs=options[0])
        self._search = Search(
            config["retrieval_service_url"],
            topk=config.get("topk", 3),
            timeout=float(config.get("timeout", 30)),
            concurrent=config.get("num_workers", 120),
        )
        self._rate = _Rate(config.get("rate_limit", 120) if config.get("enable_global_rate_limit", True) else None)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any] | None]:
        queries = parameters.get("query_list")
        if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
            raise ValueError(f"query_list must be a list of texts; it is {queries!r:.80}")
        await self._rate.turn()
        return ToolResponse(text=await self._search.search(queries)), 0.0, {"query_count": len(queries)}


class SandboxFusionTool(BaseTool):
    """`code_interpreter(code)`, run on a SandboxFusion server.

    Options (`config`): `sandbox_fusion_url`, `default_timeout` in seconds, `default_language`, `memory_limit_mb`,
    `num_workers` programs at once over all conversations, `rate_limit` programs a second, `enable_global_rate_limit: false`
    to have no such limit. Unlike verl's, it tells the model what went wrong.
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
        _check("SandboxFusionTool", config, options, needs=options[0])
        self._fusion = SandboxFusion(
            config["sandbox_fusion_url"],
            language=config.get("default_language", "python"),
            run_timeout=float(config.get("default_timeout", 30)),
            memory_limit_mb=config.get("memory_limit_mb", 1024),
            concurrent=config.get("num_workers", 10),
        )
        self._rate = _Rate(config.get("rate_limit", 10) if config.get("enable_global_rate_limit", True) else None)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any] | None]:
        code = parameters.get("code", "")
        await self._rate.turn()
        return ToolResponse(text=await self._fusion.code_interpreter(str(code))), None, None


class Content(tool_result.ToolResponse):
    """A result as the server gave it, beside how we read it."""

    __slots__ = ("blocks",)

    def __init__(self, response: tool_result.ToolResponse, blocks: list[Any]) -> None:
        super().__init__(response.text, response.image, response.video)
        object.__setattr__(self, "blocks", blocks)


class RawServers(McpServers):
    """Servers whose results keep their content, for `_parse_tool_result`."""

    def parse_result(self, content: list[Any]) -> tool_result.ToolResponse:
        return Content(super().parse_result(content), content)


AskServer = Callable[[dict[str, Any]], Awaitable[tool_result.ToolResponse]]


class MCPBaseTool(BaseTool):
    """A tool of an MCP server. Override `_parse_tool_result` to read results in another way.

    Options (`config`): `timeout` of a call in seconds, `rate_limit` calls a second.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        if type(self) in (MCPBaseTool, MCPSearchTool):  # a user's own class may have options of its own
            _check(type(self).__name__, config, ("timeout", "rate_limit"))
        self._rate = _Rate(config.get("rate_limit"))
        self._ask: AskServer | None = None

    def connect(self, ask: AskServer) -> None:
        """Say how the server is asked; the loader of the tool file does."""
        self._ask = ask

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any] | None]:
        if self._ask is None:
            raise RuntimeError(f"the tool {self.name!r} has no server; it must come from a tool file with `mcp`")
        await self._rate.turn()
        response = await self._ask(parameters)
        blocks = (
            response.blocks if isinstance(response, Content) else [SimpleNamespace(type="text", text=response.text)]
        )
        text, info = self._parse_tool_result(blocks)
        return ToolResponse(text=text, image=response.image, video=response.video), 0.0, info

    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        """What the model is told of a result, and what else is to be kept. Images are told beside the text."""
        return " ".join(part.text for part in content if part.type == "text"), {}


class MCPSearchTool(MCPBaseTool):
    """A search engine behind MCP: verl's example of `_parse_tool_result`. Its results are told as they are."""


def _check(kind: str, config: Mapping[str, Any], known: tuple[str, ...], *, needs: str | None = None) -> None:
    for name in config:
        if name not in (*known, "type"):
            raise ConfigError(
                f"{kind} has no option {name!r}{nearest(name, known)}; its options are: {', '.join(known)}"
            )
    if needs is not None and not isinstance(config.get(needs), str):
        raise ConfigError(f"{kind} needs the option {needs}: the address of the service, http://host:port/path")
