"""Values that are written without saying of which type they are: the tool's schema decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.chat.tool_calls.json_text import decode_all
from turnwise.chat.tool_calls.parsing import MalformedCall
from turnwise.types import ToolSchema

__all__ = ["properties", "typed"]

_PYTHONS_WORDS = {"True": True, "False": False, "None": None}  # templates write `value | string`
_TYPES: dict[str, type | tuple[type, ...]] = {
    "null": type(None),
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "array": list,
    "object": dict,
}


def properties(tools: Sequence[ToolSchema], name: str) -> Mapping[str, Any]:
    """The schemas of a tool's parameters, by name; none where the tool is not on offer or declares none."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            declared = parameters.get("properties") if isinstance(parameters, dict) else None
            return declared if isinstance(declared, dict) else {}
    return {}


def typed(text: str, schema: Any) -> Any:
    """What a text means.

    A declared string is the text, whatever it looks like. Otherwise it is JSON, or one of Python's words for true, false and
    null, if it can be read as that, and the text if not. Where a string is one of several declared types, it is JSON only if
    that is of one of the others.
    """
    declared = _declared(schema)
    if declared == {"string"}:
        return text
    stripped = text.strip()
    if stripped in _PYTHONS_WORDS:
        value = _PYTHONS_WORDS[stripped]
    else:
        try:
            value = decode_all(stripped)
        except MalformedCall:
            return text
    if "string" in declared and not any(_is_a(value, kind) for kind in declared):
        return text
    return value


def _is_a(value: Any, kind: str) -> bool:
    if isinstance(value, bool) and kind in ("integer", "number"):
        return False
    return kind in _TYPES and isinstance(value, _TYPES[kind])


def _declared(schema: Any) -> set[str]:
    """The types that a schema allows, by JSON schema's names; empty where it does not say."""
    if not isinstance(schema, dict):
        return set()
    kinds = schema.get("type")
    found = {kinds} if isinstance(kinds, str) else {kind for kind in kinds or [] if isinstance(kind, str)}
    for union in ("anyOf", "oneOf"):
        for choice in schema.get(union) or []:
            found |= _declared(choice)
    choices = schema.get("enum")
    if not found and isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        found = {"string"}
    if found and schema.get("nullable"):
        found.add("null")
    return found
