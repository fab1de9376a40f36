"""Drops nulls that stand for "not given" in tool calls and tool schemas, and counts them.

Arrow has one struct type for a column: each row has the keys of all rows, with null where a row has no such key. So a call
`{"city": "Oslo"}` is read as `{"city": "Oslo", "unit": null}` if another row's call has a unit (parquet files, data sets of the
`datasets` library). A model that is trained on it writes nulls that are in no row of the data. Lines of JSON have only the keys
that were written; there, a null is dropped only if the tool's schema does not allow it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger(__name__)
_TYPING = ("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref")
"""Keys by which a schema restricts values. A schema without any of them allows all, null included."""
_MEANINGFUL = ("default", "const")
"""Keys of a schema whose null says something, unless Arrow has put it there."""


@dataclass(slots=True)
class DroppedNulls:
    """How many nulls were dropped in a data set, and the place of the first."""

    count: int = 0
    first: str = ""

    def add(self, place: str) -> None:
        """Count a null."""
        self.first = self.first or place
        self.count += 1

    def report(self) -> None:
        """Log the number, if it is not 0."""
        if self.count:
            _log.warning(
                "%d null%s in tool calls and tool schemas %s dropped, as keys that the row does not have: Arrow gives each row "
                "the keys of all rows, or the tool's schema allows no null (the first: %s)",
                self.count,
                "s" if self.count > 1 else "",
                "were" if self.count > 1 else "was",
                self.first,
            )


class AbsentValues:
    """Drops the nulls of one row. `place` is the row's place for people, `tools` its column of tools."""

    def __init__(self, dropped: DroppedNulls, place: str, *, from_arrow: bool, tools: Any = None) -> None:
        self._dropped = dropped
        self._place = place
        self._from_arrow = from_arrow
        self._parameters = dict(_parameters(tools))

    def arguments(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call without the nulls that stand for "not given".

        Of Arrow's nulls, those are kept that the schema requires and allows: all rows have them, so they were written. Without a
        schema, all of them are dropped. In lines of JSON, those are dropped that the schema does not allow.
        """
        return self._object(arguments, self._parameters.get(tool), tool)

    def schema(self, value: Any, *, path: str = "tools") -> Any:
        """The schema of a tool without null keys, at any depth. `default: null` and `const: null` are kept in lines of JSON."""
        if isinstance(value, list):
            return [self.schema(item, path=path) for item in value]
        if not isinstance(value, Mapping):
            return value
        kept: dict[str, Any] = {}
        for key, item in value.items():
            if item is None and (self._from_arrow or key not in _MEANINGFUL):
                self._drop(path, key)
            else:
                kept[key] = self.schema(item, path=f"{path}.{key}")
        return kept

    def column(self, value: Any) -> Any:
        """A column of tools that an environment reads: only what Arrow has put in is dropped."""
        return self.schema(value) if self._from_arrow and isinstance(value, list) else value

    def _object(self, value: Mapping[str, Any], schema: Any, path: str) -> dict[str, Any]:
        schema = schema if isinstance(schema, Mapping) else None
        properties = _mapping(schema, "properties")
        required = (schema or {}).get("required") or ()
        kept: dict[str, Any] = {}
        for key, item in value.items():
            of_item = properties.get(key)
            if item is None and self._is_absent(key, of_item, known=schema is not None, required=key in required):
                self._drop(path, key)
            else:
                kept[key] = self._value(item, of_item, f"{path}.{key}")
        return kept

    def _value(self, value: Any, schema: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            return self._object(value, schema, path)
        if isinstance(value, list):  # lists have their own length: a null in it was written
            items = schema.get("items") if isinstance(schema, Mapping) else None
            return [self._value(item, items, path) for item in value]
        return value

    def _is_absent(self, key: str, schema: Any, *, known: bool, required: bool) -> bool:
        """Whether a null under `key` stands for "not given". `known`: the object around it has a schema."""
        if self._from_arrow:
            return not (known and required and schema is not None and _allows_null(schema))
        return known and schema is not None and not _allows_null(schema)

    def _drop(self, path: str, key: str) -> None:
        self._dropped.add(f"{self._place}, {path}.{key}")


def _parameters(tools: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Name and parameter schema of each tool in a column, which may be JSON text. What has another form is left out: other code
    refuses it."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            return []
    found: list[tuple[str, Mapping[str, Any]]] = []
    for tool in tools if isinstance(tools, Sequence) and not isinstance(tools, str) else ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("parameters"), Mapping):
            found.append((str(function.get("name")), function["parameters"]))
    return found


def _mapping(schema: Mapping[str, Any] | None, key: str) -> Mapping[str, Any]:
    value = None if schema is None else schema.get(key)
    return value if isinstance(value, Mapping) else {}


def _allows_null(schema: Any) -> bool:
    """Whether a JSON schema allows null. References and `allOf` are not followed: they count as allowing it."""
    if not isinstance(schema, Mapping) or schema.get("nullable") is True:
        return True
    given = [key for key in _TYPING if schema.get(key) is not None or (key == "const" and key in schema)]
    if not given or "$ref" in given or "allOf" in given:
        return True
    kind = schema.get("type")
    if kind is not None:
        return kind == "null" or (isinstance(kind, list) and "null" in kind)
    if "enum" in given:
        return None in schema["enum"]
    if "const" in given:
        return schema["const"] is None
    choices = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    return any(_allows_null(choice) for choice in choices)
