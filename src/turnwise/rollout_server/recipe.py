"""Which options of a recipe the server and the trainer must have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise.config.schema import Config

__all__ = ["differences", "served_options"]

_SECTIONS = (
    "environment",
    "tools",
    "mcp",
    "tool_calls",
    "limits",
    "thinking",
    "tokenization_sanity_check",
    "tool_format",
    "deterministic",
)


def served_options(config: Config) -> dict[str, Any]:
    """The options that decide about conversations, as plain data by their dotted names.

    The sampling is not among them: the trainer sends it with each request. The engine is the server's own.
    """
    plain = config.model_dump(mode="json")
    names = [*_SECTIONS, "max_concurrent"] if config.deterministic else _SECTIONS
    return dict(_flat({name: plain[name] for name in names}, ""))


def _flat(tree: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    items: list[tuple[str, Any]] = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and name != "arguments":
            items += _flat(value, f"{key}.")
        else:
            items.append((key, value))
    return items


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """A line for each option that has another value at the server (`theirs`) than at the trainer (`ours`)."""
    return [
        f"{name}={ours.get(name)!r:.80} here, {theirs.get(name)!r:.80} at the server"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]
