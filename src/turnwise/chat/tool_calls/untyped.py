"""The type of values in formats that write all values as plain text: the tool's JSON schema decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.chat.tool_calls.json_text import decode_all
from turnwise.chat.tool_calls.parsing import MalformedCall
from turnwise.types import ToolSchema

__all__ = ["properties", "typed"]

_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}  # templates write values with Jinja's `string` filter
_TYPES: dict[str, type | tuple[type, ...]] = {
    "null": type(None),
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "array": list,
    "object": dict,
}


def properties(tools: Sequence[ToolSchema], name: str) -> Mapping[str, Any]:
    """The schemas of a tool's parameters, by name; empty if the tool is not on offer or declares no parameters."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            declared = parameters.get("properties") if isinstance(parameters, dict) else None
            return declared if isinstance(declared, dict) else {}
    return {}


def typed(text: str, schema: Any) -> Any:
    """The value that a text stands for, by the schema of its parameter.

    - The schema declares a string: the text itself, also if it looks like `null` or `3`.
    - Otherwise: the value if the text is JSON or Python's True, False or None; the text itself if not.
    - The schema declares a string among other types: JSON counts only if its value has one of the declared types.
    """
    declared = _declared(schema)
    if declared == {"string"}:
        return text
    stripped = text.strip()
    if stripped in _PYTHON_CONSTANTS:
        value = _PYTHON_CONSTANTS[stripped]
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
    """The types that a schema allows, by their JSON schema names; empty if it declares none."""
    if not isinstance(schema, dict):
        return set()
    kinds = schema.get("type")
    types = {kinds} if isinstance(kinds, str) else {kind for kind in kinds or [] if isinstance(kind, str)}
    for union in ("anyOf", "oneOf"):
        for choice in schema.get(union) or []:
            types |= _declared(choice)
    choices = schema.get("enum")
    if not types and isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        types = {"string"}
    if types and schema.get("nullable"):
        types.add("null")
    return types
