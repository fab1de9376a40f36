"""Finds the objects that recipes refer to: `package.module:name`, `path/to/file.py:name` and `live:name`.

A recipe is text. An object that can be imported is written as a reference to its module or file; an object of the running
program, such as a function in a notebook, is kept here under a name. A reference `live:name` works in this process only.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import sys
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError, Failed, boundary, nearest
from turnwise.library_messages import silence_libraries
from turnwise.local_paths import no_file

silence_libraries()

# objects of the running program

LIVE = "live:"
"""The beginning of a reference to an object of this process."""

MOVED = {
    "turnwise.compat.trl_rewards": "turnwise.compat.trl",
    "turnwise.environments.modelled_user": "turnwise.environments.users",
    "turnwise.services.chat_model": "turnwise.services.chat",
}
"""Modules of turnwise that recipes may name and that have another name now."""

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


# objects that are imported


def resolve(reference: str, *, key: str) -> Any:
    """The object that a reference names. `key` is the option of the recipe that holds the reference.

    Raises ConfigError.
    """
    if is_live(reference):
        return live_object(reference, key=key)
    place, colon, name = reference.partition(":")
    if not colon or not place or not name:
        raise ConfigError(f"{key}: {reference!r} is not a reference; write package.module:name or path/to/file.py:name")
    if place in MOVED:
        raise ConfigError(f"{key}: {reference} is now {MOVED[place]}:{name}; write the new reference")
    try:
        with boundary("import"):
            module = _from_file(Path(place), key) if place.endswith(".py") else importlib.import_module(place)
    except Failed as failed:
        if isinstance(failed.__cause__, ConfigError):
            raise failed.__cause__ from None
        raise ConfigError(f"{key}: {place} could not be imported: {failed.failure.message}") from failed
    value = module
    for attribute in name.split("."):
        if not hasattr(value, attribute):
            raise ConfigError(f"{key}: {place} has no {name!r}{nearest(name, vars(module))}")
        value = getattr(value, attribute)
    return value


def load_file(path: Path, *, key: str) -> Any:
    """The module of a Python file, which is executed once. `key` is the option of the recipe that names the file.

    Raises ConfigError.
    """
    try:
        with boundary("import"):
            return _from_file(path, key)
    except Failed as failed:
        if isinstance(failed.__cause__, ConfigError):
            raise failed.__cause__ from None
        raise ConfigError(f"{key}: {path} could not be imported: {failed.failure.message}") from failed


def refuse_missing_file(reference: str, *, key: str) -> None:
    """Refuse a reference `path/to/file.py:name` to a file that does not exist. Imports nothing. Raises ConfigError."""
    place, colon, _ = reference.partition(":")
    if colon and place.endswith(".py") and not is_live(reference):
        _existing(Path(place), key)


def _existing(path: Path, key: str) -> Path:
    path = Path(os.path.expanduser(path)).absolute()
    if (problem := no_file(path, "file")) is not None:
        raise ConfigError(f"{key}: {problem}; paths are relative to the directory you run from")
    return path


def _from_file(path: Path, key: str) -> Any:
    path = _existing(path, key)
    name = f"turnwise_user.{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up the module by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
