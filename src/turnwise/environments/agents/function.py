"""`AgentFunction`: an agent that is a Python function of the user."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from turnwise.environments.agents.agent_environment import AgentConnection, AgentResult
from turnwise.environments.agents.agent_source import AgentSource
from turnwise.errors import ConfigError
from turnwise.types import Row
from turnwise.user_code.copies import copy_containers
from turnwise.user_code.object_references import resolve
from turnwise.user_code.reward_number import reward_number
from turnwise.user_code.run_in_thread import run_in_thread

__all__ = ["AgentFunction"]


class AgentFunction(AgentSource):
    """Calls a function for each conversation. The function leads the conversation with requests to `base_url`.

    Example::

        async def solve(row, base_url, api_key):
            client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
            answer = await client.chat.completions.create(model="model", messages=row.messages)
            return float("42" in answer.choices[0].message.content)

    Args:
        function: A function `(row, base_url, api_key)`, or a reference to one such as `agent.py:solve`. A function without
            `async` runs in a thread. It returns the reward, a dictionary with the key `reward`, or None.
        arguments: Further keyword arguments of the function.
        seconds_to_finish: How long the function may run on after a limit of the recipe has ended the conversation.

    Raises ConfigError.
    """

    def __init__(
        self,
        *,
        function: str | Callable[..., Any],
        arguments: Mapping[str, Any] | None = None,
        seconds_to_finish: float = 10.0,
    ) -> None:
        key = "environment.arguments.function"
        target = resolve(function, key=key) if isinstance(function, str) else function
        self.name = function if isinstance(function, str) else getattr(function, "__qualname__", "the function")
        arguments = dict(arguments or {})
        try:
            inspect.signature(target).bind("row", base_url="", api_key="", **arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{key}: {self.name} cannot be called with (row, base_url=..., api_key=..., **{arguments}): {error}"
            ) from None
        self._function: Callable[..., Any] = target
        self._arguments = arguments
        self._async = inspect.iscoroutinefunction(target)
        super().__init__(seconds_to_finish=seconds_to_finish)

    async def run(self, row: Row, row_json: str, connection: AgentConnection) -> AgentResult:
        """Call the function. Raises what it raises."""
        arguments = copy_containers(self._arguments)  # each conversation has its own
        call = functools.partial(
            self._function, row, base_url=connection.openai_url, api_key=connection.key, **arguments
        )
        result = await call() if self._async else await run_in_thread(call, name=self.name, kind="environment")
        if isinstance(result, Awaitable):
            result = await result
        if result is None:
            return AgentResult()
        values = result if isinstance(result, Mapping) else {"reward": result}
        if "reward" not in values:
            raise ValueError(
                f"{self.name} returned {result!r:.200}; it must return a number, None, or a dictionary with the key `reward`"
            )
        reward = reward_number(values["reward"], f"the result of {self.name}")
        return AgentResult(reward=reward, info={"result": dict(values)} if isinstance(result, Mapping) else {})
