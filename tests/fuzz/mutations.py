"""Seeded mutations of nested values and of texts: what a hurried person, a broken script or a bad disk does to a file."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turnwise.errors import TurnwiseError

VALUES: list[Any] = [
    *(None, True, 0, -1, 1.5, 10**30, float("inf"), float("nan"), "", "\0", "[/]", "\ud800", "\x1b]0;x\x07"),
    *([], [None], [5, 9], {}, {"role": "user"}, {"use": None}, {"a": {"b": 1}}, [[[[]]]], "x" * 5000, "aGVsbG8=" * 600),
    *("a:b", "${HOME}", "${NO_SUCH_VARIABLE}", "2020-13-45", "file:///nope", "data:image/png;base64,!!", "wizard"),
    *({"type": "image"}, {"type": "image", "image": 7}, {"type": ["x"]}, {"bytes": "a"}, {"path": 3}),
]
"""Values that stand in another value's place."""

RAW = [
    *("!!set {a}", "!!binary aGk=", "&a [*a]", "2020-01-01", "1" * 5000, "[" * 3000, "{a: 1, a: 2}", "!!int x", "*x"),
    *("!!python/object:os.system x", "!!float []", "? [a]\n: b", "0b", "1:30", "<<: 3", "!!omap [a]", "\0", "!!bool 7"),
    *("{? {a: b} : c}", "{[a]: b}", "%YAML 3.0", "[/]", "\ud800"),
]
"""Texts of YAML that stand in a value's place."""

_CHARACTERS = [
    "",
    "\0",
    "{",
    "}",
    "[",
    "]",
    ":",
    "\t",
    "&",
    "*",
    "!",
    "\ud800",
    "\x1b",
    "'",
    '"',
    "\\",
    "\n",
    ",",
    "9" * 5000,
]


def places(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside a tree of lists and dicts."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*above, key)
        yield from places(value, (*above, key))


def mutated_tree(tree: Any, draw: random.Random) -> Any:
    """A copy with one to three values replaced or removed."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.choice([1, 1, 2, 3])):
        found = list(places(tree))
        if not found:
            break
        *above, last = draw.choice(found)
        node = tree
        for key in above:
            node = node[key]
        if draw.random() < 0.15:
            del node[last]
        else:
            node[last] = copy.deepcopy(draw.choice(VALUES))
    return tree


def mutated_text(text: str, draw: random.Random) -> str:
    """A copy with a few characters replaced, or cut off somewhere."""
    if draw.random() < 0.1:
        return text[: draw.randrange(len(text) + 1)]
    characters = list(text)
    for _ in range(draw.choice([1, 2, 5, 20])):
        if characters:
            characters[draw.randrange(len(characters))] = draw.choice(_CHARACTERS)
    return "".join(characters)


def write(path: Path, text: str) -> Path:
    """Write a text that may hold half of a surrogate pair."""
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


def accepted_or_refused(read: Any, *arguments: Any, **options: Any) -> Any:
    """The result, or None where it was refused with a message that can be printed."""
    try:
        return read(*arguments, **options)
    except TurnwiseError as error:
        str(error).encode("utf-8")  # raises where half of a surrogate pair is in the message
        return None
