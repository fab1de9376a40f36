"""The sections of a recipe that say what answers the model: environment, tools, MCP servers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from turnwise.config.section import NonEmpty, Positive, Seconds, Section, Use, expand_reference

__all__ = ["EnvironmentUse", "McpSection", "ToolCallsSection", "ToolUse"]


class EnvironmentUse(Use):
    """A reference to an environment."""

    thread: bool = False
    """Whether the environment's `async` methods run in a thread, one for each conversation, so that they may block."""


class ToolUse(Section):
    """A tool: a typed function, or a class whose public methods are tools. Instead of `{use: text}` you can write only the
    text."""

    use: NonEmpty
    """The function or class: `package.module:name` or `path/to/file.py:name`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the class's constructor, which is called for each conversation."""
    timeout: Seconds | None = None
    """The time limit of each attempt of a call, in seconds. Null: the tool's own limit, or 30 seconds."""
    retries: Annotated[int, Field(ge=0)] | None = None
    """The number of further attempts after an exception that is not a ValueError. Null: the tool's own number, or 0."""
    retry_timeouts: bool | None = None
    """Whether a call that timed out is attempted again, too. Null: the tool's own setting, or false."""
    thread: bool | None = None
    """Whether async functions run in threads, so that they may block. Null: the tool's own setting, or false."""

    _expand = model_validator(mode="before")(expand_reference)


class McpSection(Section):
    """Tools of MCP servers."""

    servers: NonEmpty | None = None
    """A JSON file with `mcpServers`: the MCP servers whose tools the model may call. Null: no MCP servers."""
    select: list[str] | None = None
    """The names of the tools to offer. Null: all tools of the servers."""
    use: NonEmpty = "turnwise.environments.mcp:McpServers"
    """The class that calls the MCP servers: the default, or a reference to a subclass of it that converts results differently."""
    timeout: Seconds = 30.0
    """The time limit of each attempt of a call to an MCP server, in seconds."""
    retries: Annotated[int, Field(ge=0)] = 0
    """The number of further attempts if the connection to an MCP server is lost during a call."""
    retry_timeouts: bool = False
    """Whether a call to an MCP server that timed out is attempted again, too."""
    start_timeout: Seconds = 30.0
    """The time that an MCP server has to start and to answer for the first time, in seconds."""


class ToolCallsSection(Section):
    """Options that hold for all tools."""

    describe: Literal["template", "system"] = "template"
    """Who shows the tools to the model. `template`: the chat template. `system`: where the template does not show tools, their
    schemas are written into the system message, in the form of `tool_format`."""
    max_parallel_calls: Positive | None = None
    """The most tool calls that are run in one turn; each further call gets an error as its result. Null: all calls are run."""
    max_tool_response_length: Positive | None = None
    """The longest text of a tool result, in characters or tokens (`tool_calls.tool_response_unit`); longer texts are truncated.
    Null: texts are truncated at a million characters."""
    tool_response_truncate_side: Literal["left", "right", "middle"] = "middle"
    """Where text is removed from a tool result that is too long. `left` keeps the end of the text, `right` keeps the beginning,
    `middle` keeps half of the allowed length from the beginning and half from the end."""
    tool_response_unit: Literal["characters", "tokens"] = "characters"
    """The unit of `tool_calls.max_tool_response_length`."""
