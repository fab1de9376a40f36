"""Each test begins with the registries of ms-swift as turnwise fills them, and no plugin loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from turnwise.compat.swift import plugins
from turnwise.compat.swift.rewards import orms
from turnwise.compat.swift.schedulers import context_managers, envs, multi_turns

_REGISTRIES: list[dict[str, Any]] = [multi_turns, orms, envs, context_managers, plugins.NAMES["rm_plugins"]]
_FIRST = [dict(registry) for registry in _REGISTRIES]
"""Their content when pytest reads this file, before any test."""


def _restore() -> None:
    for registry, first in zip(_REGISTRIES, _FIRST, strict=True):
        registry.clear()
        registry.update(first)
    plugins._loaded.cache_clear()  # a plugin that is not run again registers nothing


@pytest.fixture(autouse=True)
def registries_and_plugins_of_this_test() -> Iterator[None]:
    """Plugins register in dictionaries of the process, and run once: no test may find those of another."""
    _restore()
    yield
    _restore()
