"""The result of reading another system's configuration: a recipe, and a report about every given key."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.errors import ConfigError

__all__ = ["ConversionReport", "RecipeBuilder", "UnsupportedKey"]


@dataclass(frozen=True, slots=True)
class UnsupportedKey:
    """A key of the other system's configuration that is not in the recipe, or not with the same meaning."""

    key: str
    value: Any
    reason: str
    """Why the key is not in the recipe, and what to do instead."""
    changes_training: bool = False
    """True if training without this key gives a different result. `turnwise train` refuses such a configuration."""

    def __str__(self) -> str:
        return f"{self.key}={self.value!r}: {self.reason}"


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """A recipe made from another system's configuration, and a report about each of its keys."""

    recipe: dict[str, Any]
    """The recipe as nested dictionaries, as `yaml.safe_load` would return it."""
    converted: dict[str, str] = field(default_factory=dict)
    """For each converted key: the option of the recipe that it became, or a short description."""
    unsupported: list[UnsupportedKey] = field(default_factory=list)
    """The keys that were not converted. `converted` and `unsupported` together hold every key that was given."""
    assumptions: list[UnsupportedKey] = field(default_factory=list)
    """Values that the configuration does not contain and that were assumed, and keys whose meaning differs here.
    The user should check them."""
    failing: list[UnsupportedKey] = field(default_factory=list)
    """Options of the recipe that do not work here: values that the schema refuses, and names that could not be loaded."""

    def refused(self) -> list[UnsupportedKey]:
        """The unsupported keys without which training would give a different result."""
        return [key for key in self.unsupported if key.changes_training]


class RecipeBuilder(ABC):
    """Builds a recipe from a configuration, and records what happens to each key.

    A subclass knows how to look up a key. A key is either in `converted` or in `unsupported`. A key can be
    in both only if it has several values and one of them was rejected (`reject_value`).
    """

    def __init__(self) -> None:
        self.recipe: dict[str, Any] = {}
        self.converted: dict[str, str] = {}
        self.unsupported: list[UnsupportedKey] = []
        self.assumptions: list[UnsupportedKey] = []
        self.failing: list[UnsupportedKey] = []

    def try_name(self, option: str, value: Any, load: Callable[[], Any], *, files: Sequence[Any] = ()) -> None:
        """Load what an option of the recipe names, and report why it cannot be loaded.

        If one of `files` is not here, or its name contains a variable, nothing is loaded and this is reported.
        """
        missing = [file for file in map(str, files) if not os.path.exists(os.path.expanduser(file))]
        if missing:
            reason = f"it could not be tried, because there is no file {missing[0]} here"
            self.assumptions.append(UnsupportedKey(option, value, reason))
            return
        try:
            load()
        except ConfigError as error:
            self.failing.append(UnsupportedKey(option, value, str(error)))

    @abstractmethod
    def has(self, key: str) -> bool:
        """Whether the configuration contains the key, with any value."""

    @abstractmethod
    def value(self, key: str) -> Any:
        """The value of a key, or the other system's default."""

    def set(self, option: str, value: Any, *keys: str) -> None:
        """Set an option of the recipe. `keys` are the keys that it was made from."""
        node = self.recipe
        *parents, last = option.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
        self.convert(option, *keys)

    def get(self, option: str, default: Any = None) -> Any:
        """The value of an option in the recipe built so far."""
        node: Any = self.recipe
        for part in option.split("."):
            if not isinstance(node, dict) or part not in node:
                return default
            node = node[part]
        return node

    def convert(self, result: str, *keys: str) -> None:
        """Record that the given keys were converted to `result`. Keys that are not in the configuration are skipped."""
        for key in keys:
            if self.has(key) and not self.is_unsupported(key):
                self.converted[key] = f"{self.converted[key]}, {result}" if key in self.converted else result

    def reject(self, key: str, reason: str, *, changes_training: bool = False, even_default: bool = False) -> None:
        """Record that a key has no place in the recipe.

        A key that is not in the configuration is skipped, unless `even_default`: then the default matters too.
        """
        if (self.has(key) or even_default) and not self.is_unsupported(key):
            self.converted.pop(key, None)
            self.unsupported.append(UnsupportedKey(key, self.value(key), reason, changes_training))

    def reject_value(self, key: str, value: Any, reason: str, *, changes_training: bool = False) -> None:
        """Record that one value of a key has no place in the recipe. The key may be converted otherwise."""
        self.unsupported.append(UnsupportedKey(key, value, reason, changes_training))

    def assume(self, key: str, value: Any, reason: str) -> None:
        """Record an assumption that the user should check."""
        self.assumptions.append(UnsupportedKey(key, value, reason))

    def is_unsupported(self, key: str) -> bool:
        """Whether the key, or one value of it, was rejected."""
        return any(rejected.key == key for rejected in self.unsupported)

    def report(self) -> ConversionReport:
        """The recipe and the report about all keys."""
        return ConversionReport(self.recipe, self.converted, self.unsupported, self.assumptions, self.failing)
