"""Environments: the part of a conversation that answers the model. Tools, simulated users, sandboxes, MCP servers."""
