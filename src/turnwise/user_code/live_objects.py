"""Python objects that a program gives to a run instead of references: `live:name`.

A recipe is text. An object that can be imported is written as a reference (`package.module:name`); an object of the running
program, such as a function in a notebook, is kept here under a name. The reference `live:name` works in this process only.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from typing import Any

from turnwise.errors import ConfigError

__all__ = ["LIVE", "is_live", "live_object", "reference_to"]

LIVE = "live:"
"""The beginning of a reference to an object of this process."""

_objects: dict[str, Any] = {}


def is_live(reference: str) -> bool:
    """Whether a reference names an object of this process."""
    return reference.startswith(LIVE)


def reference_to(value: Any, *, name: str) -> str:
    """A reference to an object: by its module if it can be imported, else `live:<its name>`. `name` is for objects without one.

    The names depend only on the order in which objects are given, so a program that is started again gives the same names.
    """
    importable = _importable(value)
    if importable is not None:
        return importable
    own = getattr(value, "__name__", None)
    stem = own if isinstance(own, str) and own.isidentifier() else name
    for number in itertools.count(1):
        key = stem if number == 1 else f"{stem}_{number}"
        if key not in _objects or _objects[key] is value or _replaces(_objects[key], value):
            _objects[key] = value
            return f"{LIVE}{key}"
    raise AssertionError("unreachable")


def live_object(reference: str, *, key: str) -> Any:
    """The object of a reference `live:name`. `key` is the option of the recipe that holds the reference.

    Raises ConfigError if this process has no such object.
    """
    try:
        return _objects[reference.removeprefix(LIVE)]
    except KeyError:
        raise ConfigError(
            f"{key}: {reference!r} is an object of the Python program that made this recipe, and this process does not have it. "
            f"Run that program again, or write a reference such as path/to/file.py:name"
        ) from None


def _importable(value: Any) -> str | None:
    """`module:name` if importing it gives this very object."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module in ("__main__", "builtins") or "<" in name:
        return None
    if module.startswith("turnwise_user."):  # loaded from a file by its path
        return None
    try:
        found: Any = sys.modules.get(module) or importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return f"{module}:{name}" if found is value else None


def _replaces(old: Any, new: Any) -> bool:
    """Whether `new` is a later definition of the same function or class, as when a cell of a notebook is run again."""
    names = ("__module__", "__qualname__")
    return hasattr(new, "__qualname__") and all(getattr(old, n, None) == getattr(new, n, None) for n in names)
