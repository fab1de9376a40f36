"""Agents as environments: a program or function that talks to an OpenAI- or Anthropic-compatible server.

`Program` starts a command for each conversation, `AgentFunction` calls a function. docs/agents.md explains both.
"""

from turnwise.environments.agents.agents import AgentFunction, Program

__all__ = ["AgentFunction", "Program"]
