"""Finds the objects that recipes refer to: `package.module:name` and `path/to/file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError, Failed, boundary, nearest
from turnwise.local_paths import no_file
from turnwise.user_code.live_objects import is_live, live_object

__all__ = ["load_file", "refuse_missing_file", "resolve"]


def resolve(reference: str, *, key: str) -> Any:
    """The object that a reference names. `key` is the option of the recipe that holds the reference.

    Raises ConfigError.
    """
    if is_live(reference):
        return live_object(reference, key=key)
    place, colon, name = reference.partition(":")
    if not colon or not place or not name:
        raise ConfigError(f"{key}: {reference!r} is not a reference; write package.module:name or path/to/file.py:name")
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
