"""Conversations that end as in TRL: also with a turn that has a call which cannot be parsed."""

from __future__ import annotations

from task import calculator

from turnwise import Opening, Reply, Row, Tool, Tools, Turn

__all__ = ["ToolsOfTrl"]


_CALCULATOR = Tool.of(calculator)  # once, as in TRL


class ToolsOfTrl:
    """turnwise tells the model why a call cannot be parsed, and goes on. TRL reads such a turn as the answer."""

    def __init__(self) -> None:
        self._tools = Tools([_CALCULATOR])

    async def begin(self, row: Row) -> Opening:
        return await self._tools.begin(row)

    async def step(self, turn: Turn) -> Reply:
        if any(call.error is not None for call in turn.calls):
            return Reply(done=True)
        return await self._tools.step(turn)

    async def close(self) -> None:
        await self._tools.close()
