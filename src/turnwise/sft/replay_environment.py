"""An environment that replays a given conversation: its replies are the recorded messages and do not depend on the completion.

Fine-tuning uses it to produce tokens: a scripted engine returns the assistant messages, and this environment all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from turnwise.types import Message, Opening, Reply, Row, ToolSchema, Turn

__all__ = ["Replay", "rounds"]

Round = tuple[Message, list[Message]]
"""An assistant message, and the messages between it and the next assistant message."""


class Replay:
    """Begins with the row's messages before the first assistant message, and answers each turn with the messages that follow it.

    The row's column `tools` defines the tools of the conversation; the argument `tools` is used for rows without this column.
    The conversation is done after the last assistant message. Messages after that one are recorded, and the model is not
    called for them.
    """

    def __init__(self, tools: Sequence[ToolSchema] = ()) -> None:
        self._tools = tools
        self._rounds: list[Round] = []

    async def begin(self, row: Row) -> Opening:
        opening, self._rounds = rounds(row.messages)
        return Opening(messages=opening, tools=row.fields.get("tools", self._tools))

    async def step(self, turn: Turn) -> Reply:
        assistant, answers = self._rounds.pop(0) if self._rounds else ({}, [])
        ids = {
            str(written.get("id")): call.id
            for written, call in zip(assistant.get("tool_calls") or (), turn.calls, strict=False)
        }
        return Reply(messages=[_answering(answer, ids) for answer in answers], done=not self._rounds)

    async def close(self) -> None:
        pass


def _answering(message: Message, ids: Mapping[str, str]) -> Message:
    """A tool message with the id that its call has in this conversation.

    The id in the data can differ from it: templates that print no ids lose the id of the data.
    """
    id = str(message.get("tool_call_id"))
    return {**message, "tool_call_id": ids[id]} if message["role"] == "tool" and id in ids else message


def rounds(messages: Sequence[Message]) -> tuple[list[Message], list[Round]]:
    """The messages before the first assistant message, and each assistant message with the messages that follow it.

    Example: system, user, assistant, tool, assistant gives `[system, user]` and `[(assistant, [tool]), (assistant, [])]`.
    """
    opening: list[Message] = []
    result: list[Round] = []
    for message in messages:
        if message["role"] == "assistant":
            result.append((message, []))
        else:
            (result[-1][1] if result else opening).append(message)
    return opening, result
