"""The environment of a recipe: checked once, then built for each conversation and wrapped in the recipe's tools (`Tools`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from turnwise.build.references import named_callable
from turnwise.build.tools import mcp_servers, refuse_unused_tool_options, tool, truncation
from turnwise.build.trial import close_tried_environment
from turnwise.config.schema import Config
from turnwise.environments.environment import Environment, EnvironmentFactory, MessageCheck
from turnwise.environments.mcp.servers import McpServers
from turnwise.environments.threaded_environment import ThreadedEnvironment
from turnwise.environments.tools.toolbox import Tool, Toolbox, Tools
from turnwise.errors import ConfigError, Failed, boundary
from turnwise.rollout.context import RolloutContext

__all__ = ["EnvironmentSource", "Environments", "UsesContext", "environment_factory"]

PutInFront = Callable[[Sequence[Tool | Toolbox], Environment], Environment]


@runtime_checkable
class EnvironmentSource(Protocol):
    """An object that a recipe can name instead of an environment. It is built once per run and makes the environments."""

    def tools(self) -> Sequence[Tool]:
        """The tools of its environments. They are checked before the run."""
        ...

    def make(self, in_front: PutInFront) -> Environment:
        """A new environment. `in_front(tools, environment)` wraps an environment in these tools and the recipe's tools."""
        ...

    async def aclose(self) -> None:
        """Close the resources that its environments share."""
        ...


@runtime_checkable
class UsesContext(Protocol):
    """An EnvironmentSource whose environments need what the run's conversations share, such as the renderer and the limits."""

    def use_context(self, context: RolloutContext) -> RolloutContext:
        """Called before the first conversation with a context. Returns the context that the conversations get, usually the
        same."""
        ...


@runtime_checkable
class ChecksMessages(Protocol):
    """An `EnvironmentSource` whose environments refuse messages of others, such as the requests of agents, before the session
    fails at them."""

    def use_check(self, check: MessageCheck) -> None:
        """Use this check in all environments that are made later."""
        ...


class Environments:
    """Makes the environment of each conversation. Holds shared resources, such as MCP servers, until `aclose`."""

    def __init__(self, make: EnvironmentFactory, *shared: McpServers | EnvironmentSource | None) -> None:
        self._make = make
        self._shared = shared

    def __call__(self) -> Environment:
        return self._make()

    def use_context(self, context: RolloutContext) -> RolloutContext:
        """The context of the conversations, after the environment source has seen it."""
        for resource in self._shared:
            if isinstance(resource, UsesContext):
                context = resource.use_context(context)
            if isinstance(resource, ChecksMessages):
                resource.use_check(context.renderer.check_messages)
        return context

    async def aclose(self) -> None:
        """Close the shared resources. Must be called after the last conversation, also if the run fails."""
        for resource in self._shared:
            if resource is not None:
                await resource.aclose()


def environment_factory(config: Config, *, encode: Callable[[str], Sequence[int]] | None = None) -> Environments:
    """The factory of the recipe's environments, each wrapped in the recipe's tools.

    `encode` gives the token ids of a text; it is needed to truncate texts of tools by tokens. Raises ConfigError if a
    reference is wrong, the object is not an environment, an option has no effect, or an MCP server cannot be reached.

    If conversations run in other processes (`Config.runs_conversations_elsewhere`), nothing is built.
    """
    if (option := config.runs_conversations_elsewhere) is not None:
        return Environments(lambda: _elsewhere(option))
    constructor = named_callable(config.environment, key="environment")

    tools = [tool(use, key=f"tools.{n}") for n, use in enumerate(config.tools)]
    source, environment_tools = _check_environment(config, constructor, tools)
    refuse_unused_tool_options(config, environment_has_tools=bool(environment_tools))
    max_parallel_calls, cut = config.tool_calls.max_parallel_calls, truncation(config, encode)
    servers = mcp_servers(config)
    if servers is not None:
        tools += _mcp_tools(config, servers, [*tools, *environment_tools])

    def in_front(more: Sequence[Tool | Toolbox], then: Environment) -> Environment:
        all_tools = [*tools, *more]
        return Tools(all_tools, then=then, max_parallel_calls=max_parallel_calls, truncation=cut) if all_tools else then

    if source is not None:
        return Environments(lambda: source.make(in_front), servers, source)
    if config.environment.thread:
        return Environments(lambda: in_front((), ThreadedEnvironment(constructor)), servers)
    return Environments(lambda: in_front((), constructor()), servers)


def _elsewhere(option: str) -> Environment:
    raise ConfigError(f"with {option}, the environments are in other processes: remove it to make environments here")


def _check_environment(
    config: Config, make: Callable[[], Any], tools: Sequence[Tool | Toolbox]
) -> tuple[EnvironmentSource | None, Sequence[Tool]]:
    """Build one environment and close it. Returns the object if it is an EnvironmentSource, and that source's tools.

    Raises ConfigError.
    """
    name = config.environment.use
    try:
        with boundary("environment"):
            built = make()
            source = built if isinstance(built, EnvironmentSource) else None
            environment_tools = source.tools() if source is not None else ()
            Tools([*tools, *environment_tools])  # refuses two tools of one name
    except Failed as failed:
        raise ConfigError(f"environment: {name} cannot be created: {failed.failure.message}") from failed
    if source is not None:
        if config.environment.thread:
            raise ConfigError(
                f"environment.thread has no effect with {name}, which runs the methods of other classes: remove it. To run a "
                f"blocking method in a thread, write `def` instead of `async def`"
            )
        return source, environment_tools
    if not isinstance(built, Environment):
        missing = [method for method in ("begin", "step", "close") if not hasattr(built, method)]
        if inspect.isasyncgen(built) or inspect.isgenerator(built):
            raise ConfigError(
                f"environment: {name} is a generator function without decorator: write @environment above it (from turnwise "
                f"import environment)"
            )
        raise ConfigError(
            f"environment: {name} creates a {type(built).__name__} without {', '.join(missing)}; an environment has async "
            f"methods begin(row), step(turn) and close(), or is an async generator function with @environment"
        )
    close_tried_environment(built.close, name)
    return None, ()


def _mcp_tools(config: Config, servers: McpServers, others: Sequence[Tool | Toolbox]) -> list[Tool]:
    """The tools that the MCP servers offer. Raises ConfigError, with the servers stopped."""
    options = config.mcp
    try:
        offered = servers.tools(
            options.select, timeout=options.timeout, retries=options.retries, retry_timeouts=options.retry_timeouts
        )
        Tools([*others, *offered])  # refuses two tools of one name
    except ConfigError:
        servers.close()
        raise
    return list(offered)
