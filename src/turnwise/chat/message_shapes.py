"""Messages in the shapes that chat templates insist on: calls, ids of calls, parts of a content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.errors import TemplateError
from turnwise.types import Message

__all__ = ["check_content", "joined", "with_calls", "with_description", "with_named_ids", "with_short_ids"]

PARTS = ("text", "image", "image_url", "video")


def with_calls(message: Message, *, as_text: bool, empty: str | None) -> Message:
    """An assistant message with its calls in the shape that a template takes."""
    calls: list[dict[str, Any]] = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        arguments = function.get("arguments")
        if as_text and not isinstance(arguments, str):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls, "content": message.get("content") or empty}


def with_short_ids(message: Message) -> Message:
    """A message whose ids of calls are nine letters and digits, the same for the same id: `call_0` is `call00000`."""
    calls = [{**call, "id": _short(str(call.get("id") or ""))} for call in message.get("tool_calls") or ()]
    shortened = {**message, "tool_calls": calls} if calls else dict(message)
    if message.get("role") == "tool":
        shortened["tool_call_id"] = _short(str(message.get("tool_call_id") or ""))
    return shortened


def _short(id: str) -> str:
    if len(id) == 9 and id.isascii() and id.isalnum():
        return id
    number = id.removeprefix("call_")
    if number.isascii() and number.isdigit() and len(number) <= 5:
        return f"call{number:0>5}"
    return hashlib.blake2b(id.encode(), digest_size=5).hexdigest()[:9]


def with_named_ids(message: Message) -> Message:
    """A message whose ids of calls hold the tool's name as Kimi has it: `call_3` of `lookup` is `functions.lookup:3`."""
    calls = [
        {**call, "id": _named(str(call.get("id") or ""), str(call["function"]["name"]))}
        for call in message.get("tool_calls") or ()
    ]
    named = {**message, "tool_calls": calls} if calls else dict(message)
    if message.get("role") == "tool" and message.get("name"):
        named["tool_call_id"] = _named(str(message.get("tool_call_id") or ""), str(message["name"]))
    return named


def _named(id: str, name: str) -> str:
    if name in id:
        return id
    digits = id[len(id.rstrip("0123456789")) :]
    return f"functions.{name}:{int(digits[-9:] or 0)}"


def with_description(messages: Sequence[Message], text: str, *, accepts_system: bool) -> list[Message]:
    """The messages with a description of the tools at the end of the system message.

    Without one, it is a system message of its own, or the beginning of the first message if the template accepts none.
    """
    first = messages[0] if messages else None
    if first is not None and first.get("role") in ("system", "developer"):
        return [{**first, "content": joined(first.get("content"), text)}, *messages[1:]]
    if accepts_system or first is None:
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": joined(text, first.get("content"))}, *messages[1:]]


def joined(first: Any, second: Any) -> Any:
    """Two contents as one: texts with an empty line between them, or the parts of both."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts: list[Any] = []
    for content in (first, second):
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])
    return parts


def check_content(message: Message) -> None:
    """Raise TemplateError if the content of a message is neither a text nor a list of parts that templates know."""
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            _check_part(part, message)
    elif content is not None and not isinstance(content, str):
        raise TemplateError(
            f"the content of a {message.get('role')!r} message is a {type(content).__name__}; it must be a text, or a "
            f'list of parts such as {{"type": "text", "text": ...}} and {{"type": "image", "image": ...}}'
        )


def _check_part(part: Any, message: Message) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in PARTS or (kind == "text" and not isinstance(part.get("text"), str)):
        raise TemplateError(
            f"a {message.get('role')!r} message has a content part {part!r:.80}; parts are "
            f'{{"type": "text", "text": ...}}, {{"type": "image", "image": ...}} and {{"type": "video", "video": ...}}'
        )
