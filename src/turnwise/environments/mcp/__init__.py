"""Tools of MCP servers."""

from turnwise.environments.mcp.servers import McpServers

__all__ = ["McpServers"]
