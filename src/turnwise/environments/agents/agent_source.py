"""What the environment sources of agents have in common: a share of the server, and an environment for each conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from turnwise.environments.agents.agent_environment import AgentConnection, AgentEnvironment, AgentResult
from turnwise.environments.agents.proxy import ProxyLease
from turnwise.environments.environment import Environment, MessageCheck
from turnwise.errors import ConfigError
from turnwise.types import Row

__all__ = ["AgentSource"]


class AgentSource:
    """Makes the environments of an agent (an EnvironmentSource). Subclasses run the agent.

    Raises ConfigError if `seconds_to_finish` is negative.
    """

    def __init__(self, *, seconds_to_finish: float) -> None:
        if not seconds_to_finish >= 0:
            raise ConfigError(f"seconds_to_finish={seconds_to_finish!r} must be at least 0")
        self._seconds_to_finish = seconds_to_finish
        self._lease = ProxyLease()
        self._check: MessageCheck | None = None

    def __call__(self) -> AgentEnvironment:
        """The environment of one conversation."""
        return AgentEnvironment(self, self._lease.proxy, seconds_to_finish=self._seconds_to_finish, check=self._check)

    def use_check(self, check: MessageCheck) -> None:
        """Refuse requests whose messages the model cannot receive, with the status 400."""
        self._check = check

    def tools(self) -> Sequence[Any]:
        """None: an agent offers its tools in its requests."""
        return ()

    def make(self, in_front: Callable[[Sequence[Any], Environment], Environment]) -> Environment:
        """The environment of one conversation, behind the recipe's tools."""
        return in_front((), self())

    async def aclose(self) -> None:
        """Stop the server, unless another environment source uses it."""
        await asyncio.to_thread(self._lease.release)

    async def run(self, row: Row, row_json: str, connection: AgentConnection) -> AgentResult:
        """Run the agent of one conversation until it ends."""
        raise NotImplementedError
