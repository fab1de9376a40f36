"""Values of a recipe that come from environment variables: `${NAME}` and `${NAME:-default}`.

Such a value may be a key or a password. Whatever is written or sent (config.yaml, checkpoints, experiment trackers, the rollout
server) has the reference `${NAME}` as the recipe has it, and never the value; where two recipes are compared, a short digest
stands beside the reference. The values that look like secrets are also hidden in messages (`errors.hide`).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from turnwise.errors import ConfigError, hide
from turnwise.json_yaml import check_text

__all__ = ["Origin", "Origins", "insert_values", "same_value", "with_digests", "with_references"]

_REFERENCE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_MARKED = re.compile(r"(?s).* \(sha256:([0-9a-f]{8})\)")
_SECRET_NAME = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
_SECRET_TEXT = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w+=-]{20,}")
"""What a key without a telling name looks like: long, with letters and digits, and neither a path nor a URL."""
_SHORTEST_SECRET = 6
"""Shorter values are not hidden in messages, where they would replace ordinary words."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A text of a recipe in which environment variables are named."""

    reference: str
    """The text as the recipe has it: `Bearer ${KEY}`."""
    value: str
    """The text with the values of the variables."""


Origins = Mapping[tuple[str | int, ...], Origin]
"""For each place in a recipe whose value came from the environment: the keys that lead to it, and its text."""


def insert_values(tree: Any, *, where: str) -> tuple[Any, Origins]:
    """A copy of a tree with the values of environment variables, and where they are.

    Example: `{"model": {"path": "${MODEL:-demo}"}}` becomes `{"model": {"path": "demo"}}`, with an origin at ("model", "path").

    Raises ConfigError if a variable is not set and has no default. `where` begins the message.
    """
    origins: dict[tuple[str | int, ...], Origin] = {}

    def visit(node: Any, path: tuple[str | int, ...]) -> Any:
        if isinstance(node, dict):
            return {key: visit(value, (*path, key)) for key, value in node.items()}
        if isinstance(node, list):
            return [visit(value, (*path, place)) for place, value in enumerate(node)]
        if not isinstance(node, str) or "${" not in node:
            return node
        names = [str(step) for step in path if not isinstance(step, int)]
        value = _REFERENCE.sub(lambda match: _value(match, ": ".join([where, *names])), node)
        if value != node:
            origins[path] = Origin(node, value)
        return value

    return visit(tree, ()), origins


def _value(match: re.Match[str], where: str) -> str:
    name, default = match.group(1), match.group(2)
    value = os.environ.get(name)
    if value is None:
        if default is None:
            raise ConfigError(
                f"{where}: the environment variable {name} is not set; set it, or write ${{{name}:-default}}"
            )
        return default
    if (problem := check_text(value)) is not None:
        raise ConfigError(f"{where}: the environment variable {name} cannot be used: {problem}")
    if len(value) >= _SHORTEST_SECRET and (_SECRET_NAME.search(name) or _SECRET_TEXT.fullmatch(value)):
        hide(value, shown=f"${{{name}}}")
    return value


def with_references(plain: Any, origins: Origins) -> Any:
    """Plain data of a recipe with references in place of the values that came from the environment."""
    return _replaced(plain, origins, lambda origin, value: origin.reference)


def with_digests(plain: Any, origins: Origins) -> Any:
    """The same for comparisons: `${KEY} (sha256:5f2d1c0a)`. A changed value gives another digest."""
    return _replaced(plain, origins, lambda origin, value: f"{origin.reference} (sha256:{_digest(value)})")


def same_value(first: Any, second: Any) -> bool:
    """Whether two values are equal, where one or both may be of `with_digests`: then the digests decide, not the references."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same_value(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same_value, first, second))
    digests = [_MARKED.fullmatch(value) if isinstance(value, str) else None for value in (first, second)]
    if not any(digests):
        return first == second
    a, b = (
        _digest(value) if digest is None else digest.group(1)
        for value, digest in zip((first, second), digests, strict=True)
    )
    return a == b


def _digest(value: Any) -> str:
    # of 32 bits: it shows that a value changed, and fits far too many values to find one from it
    return hashlib.sha256(str(value).encode("utf-8", "surrogatepass")).hexdigest()[:8]


def _replaced(plain: Any, origins: Origins, replacement: Callable[[Origin, Any], str]) -> Any:
    """A copy of `plain` with the values at the places of `origins` replaced.

    A value is left where it is another one by now: a program may have changed the recipe since it was read.
    """
    if not origins:
        return plain
    under: dict[tuple[str | int, ...], Origin] = dict(origins)

    def visit(node: Any, path: tuple[str | int, ...], origin: Origin | None) -> Any:
        origin = under.get(path, origin)  # a text may be short for a mapping: `environment: ${NAME}`
        if isinstance(node, dict):
            return {key: visit(value, (*path, key), origin) for key, value in node.items()}
        if isinstance(node, list | tuple):
            return [visit(value, (*path, place), origin) for place, value in enumerate(node)]
        return replacement(origin, node) if origin is not None and _is_value(node, origin.value) else node

    return visit(plain, (), None)


def _is_value(value: Any, text: str) -> bool:
    """Whether a checked value is what the text was read as: `1e-4` is 0.0001, and `~/model` a path without `~`."""
    if isinstance(value, bool) or value is None:
        return str(value).lower() == text.strip().lower()
    if isinstance(value, int | float):
        try:
            return float(text) == value
        except ValueError:
            return False
    return value in (text, os.path.expanduser(text))
