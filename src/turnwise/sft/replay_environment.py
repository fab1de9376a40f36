"""A conversation that was held before, held again: who answered then says the same now, whatever the model says.

It is how fine-tuning gets its tokens: the model's part is said by a scripted engine, and everything between is this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from turnwise.types import Message, Opening, Reply, Row, ToolSchema, Turn

__all__ = ["Replay", "rounds"]

Round = tuple[Message, list[Message]]
"""What the model said, and the messages after it."""


class Replay:
    """Opens with the row's messages before the first of the assistant, and answers each turn with those that follow next.

    The row's column `tools` says what is offered; `tools` is for rows without one. It ends with the last assistant message:
    what stands behind that is recorded, and nobody answers it.
    """

    def __init__(self, tools: Sequence[ToolSchema] = ()) -> None:
        self._tools = tools
        self._rounds: list[Round] = []

    async def begin(self, row: Row) -> Opening:
        opening, self._rounds = rounds(row.messages)
        return Opening(messages=opening, tools=row.fields.get("tools", self._tools))

    async def step(self, turn: Turn) -> Reply:
        said, answers = self._rounds.pop(0) if self._rounds else ({}, [])
        ids = {
            str(written.get("id")): call.id
            for written, call in zip(said.get("tool_calls") or (), turn.calls, strict=False)
        }
        return Reply(messages=[_answering(one, ids) for one in answers], done=not self._rounds)

    async def close(self) -> None:
        pass


def _answering(message: Message, ids: Mapping[str, str]) -> Message:
    """A tool's answer with the id that its call has in this conversation: templates that print no ids lose the data's."""
    id = str(message.get("tool_call_id"))
    return {**message, "tool_call_id": ids[id]} if message["role"] == "tool" and id in ids else message


def rounds(messages: Sequence[Message]) -> tuple[list[Message], list[Round]]:
    """The messages before the first one of the assistant, and then each of those with what follows it.

    Example: system, user, assistant, tool, assistant gives `[system, user]` and `[(assistant, [tool]), (assistant, [])]`.
    """
    opening: list[Message] = []
    found: list[Round] = []
    for message in messages:
        if message["role"] == "assistant":
            found.append((message, []))
        else:
            (found[-1][1] if found else opening).append(message)
    return opening, found
