"""Checks a message of a data set and converts it to the form that the rest of turnwise uses.

That form is OpenAI's: `role`, `content` as a text or a list of parts, `tool_calls` with arguments as a mapping. This module
does not depend on rows, templates or loss weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise.data.absent_values import AbsentValues
from turnwise.errors import DataError, nearest
from turnwise.json_yaml import half_character, parse_json
from turnwise.types import Message

__all__ = ["ROLES", "clean_message"]

ROLES = ("system", "developer", "user", "assistant", "tool")
_PARTS = ("text", "image", "image_url", "video", "video_url")


def clean_message(message: Any, where: str, absent: AbsentValues) -> Message:
    """The message without null keys, and with the arguments of calls as mappings, of which `absent` drops nulls. Error messages
    begin with `where`.

    Raises DataError if the role is unknown, the content is neither a text nor a list of known parts, a call has no name, or
    its arguments are not an object.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(f'{where} is {message!r:.80}; a message is {{"role": ..., "content": ...}}')
    # in parquet, each message has the keys of all messages; absent values are null
    kept = {key: value for key, value in message.items() if value is not None}
    role = kept["role"]
    if role not in ROLES:
        raise DataError(f"{where} has the role {role!r}{nearest(role, ROLES)}; the roles are: {', '.join(ROLES)}")
    calls = kept.pop("tool_calls", None)
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise DataError(
                f"{where}: `tool_calls` must be a list of calls in an assistant message; it is {calls!r:.80}"
            )
        kept["tool_calls"] = [_call(call, n, where, absent) for n, call in enumerate(calls)]
    kept["content"] = _content(kept, where)
    if (problem := half_character(kept)) is not None:
        raise DataError(f"{where} cannot be encoded: {problem}")
    return kept


def _content(message: Message, where: str) -> Any:
    content = message.get("content")
    if content is None:
        if message["role"] == "assistant" and message.get("tool_calls"):
            return ""
        raise DataError(f"{where} (role {message['role']!r}) has no content; write a text, or remove the message")
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else []
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in parts]
    if not kinds or any(kind not in _PARTS for kind in kinds):
        raise DataError(
            f"{where} has the content {content!r:.80}; content is a text, or a list of parts of the types {', '.join(_PARTS)}"
        )
    texts = [part.get("text") for part in content if part["type"] == "text"]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f'{where} has a part without a text in {content!r:.80}; it is {{"type": "text", "text": ...}}')
    if message["role"] != "assistant":
        return content
    if len(texts) != len(content):
        raise DataError(
            f"{where}: an assistant message contains only text, and this message has the part {content!r:.80}"
        )
    return "".join(texts)


def _call(call: Any, number: int, where: str, absent: AbsentValues) -> dict[str, Any]:
    """A call in the OpenAI format, with its arguments as a mapping: templates would encode a JSON text as JSON again."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(
            f'{where} has a call {call!r:.80}; a call is {{"type": "function", "function": {{"name": ..., "arguments": ...}}}}'
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parse_json(
            arguments or "{}",
            where=f"{where}: the arguments of {function['name']!r}: this text",
            error=DataError,
        )
    if arguments is not None and not isinstance(arguments, Mapping):
        raise DataError(f"{where}: the arguments of {function['name']!r} must be an object; they are {arguments!r:.80}")
    return {
        "id": str(call.get("id") or f"call_{number}"),
        "type": "function",
        "function": {"name": function["name"], "arguments": absent.arguments(function["name"], arguments or {})},
    }
