"""Prompts of other people's agents as tokens, and what they say.

An agent that calls the model with token ids writes its prompts itself. Where it asks its base class to encode messages, the
model's own template does so (`encode_opening`, `encode_next`), and the messages are kept, so that the record shows them. Other
prompts are read back as far as the template's own text around one message allows; else, the record shows their text.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from turnwise.chat.probes import PriorConversation
from turnwise.chat.renderer import Renderer
from turnwise.environments.agents.histories import ContextText
from turnwise.errors import Failed, boundary
from turnwise.types import Message, ToolSchema

_MARK = "\ue000"
"""Stands for the content of a message, while the text around it is found."""


class TokenPrompts:
    """The prompts of one conversation that begins with the messages of its row."""

    def __init__(self, renderer: Renderer, row_messages: Sequence[Message]) -> None:
        self._renderer = renderer
        self._row_messages = [dict(message) for message in row_messages]
        self._known: dict[tuple[int, ...], ContextText] = {}
        """What the encoded tokens of this conversation say."""

    def encode_opening(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None = None) -> list[int]:
        """A complete prompt for these messages, with the generation prompt. Raises TemplateError if the template refuses them."""
        messages = _copied(messages)
        ids = list(self._renderer.encode_opening(messages, tools or ()).token_ids)
        self._known[tuple(ids)] = ContextText(messages=messages, tools=tools or ())
        return ids

    def encode_next(
        self,
        last_token: int,
        messages: Sequence[Message],
        *,
        before: Sequence[Message] = (),
        tools: Sequence[ToolSchema] | None = None,
    ) -> list[int]:
        """What follows a turn of the model that ended with `last_token`: new messages, and the next generation prompt.

        `before` are the messages up to that turn, as far as they are known. Raises TemplateError if the template refuses them.
        """
        messages = _copied(messages)
        prior = PriorConversation.from_messages(_copied(before), has_tools=bool(tools))
        ids = list(self._renderer.encode_bridge(last_token, messages, prior).token_ids)
        self._known[tuple(ids)] = ContextText(messages=messages)
        return ids

    def describe(self, token_ids: Sequence[int], after: Message | None) -> ContextText:
        """What the tokens of a prompt say, after the message `after` of the model (None: from the beginning)."""
        known = self._known.get(tuple(token_ids))
        if known is not None:
            return ContextText(messages=_copied(known.messages), tools=known.tools)
        text = self._renderer.decode(token_ids)
        if after is None:
            with boundary("tokens"):
                opening = self._renderer.encode_opening(self._row_messages).token_ids
                if list(opening) == list(token_ids):
                    return ContextText(messages=_copied(self._row_messages), tools=())
            return ContextText(messages=[{"role": "user", "content": text}], tools=())
        role = "tool" if after.get("tool_calls") else "user"
        return ContextText(messages=[{"role": role, "content": self._unframed(text, role, after)}])

    def _unframed(self, text: str, role: str, after: Message) -> str:
        """The content of a single message of this role, without what the template writes around it; else, all of the text."""
        message: Message = {"role": role, "content": _MARK}
        if role == "tool":
            message["tool_call_id"] = after["tool_calls"][0].get("id")
        try:
            with boundary("tokens"):
                frame = self._renderer.encode_bridge(self._renderer.stop_token_ids[0], [message]).text
        except Failed:
            return text
        before, found, behind = frame.partition(_MARK)
        body = text.strip()
        if found and body.startswith(before.strip()) and body.endswith(behind.strip()):
            inner = body[len(before.strip()) : len(body) - len(behind.strip())]
            return inner.strip()
        return text


def _copied(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies, so that neither side sees the changes of the other."""
    return [copy.deepcopy(dict(message)) for message in messages]
