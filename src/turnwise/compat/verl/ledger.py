"""What becomes of a configuration's keys, written down: the recipe in the making, what was carried over and what was not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise.compat.converted import UnsupportedKey
from turnwise.compat.yaml_files import MISSING, at
from turnwise.errors import ConfigError

__all__ = ["Ledger"]


class Ledger:
    """A configuration, and the recipe that is made of it."""

    def __init__(self, tree: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """`defaults` are the values of keys that the configuration does not have."""
        self.tree = tree
        self.recipe: dict[str, Any] = {}
        self.carried: dict[str, str] = {}
        self.left: list[UnsupportedKey] = []
        self._defaults = defaults

    def value(self, key: str) -> Any:
        """The value of a key, or its default."""
        value = at(self.tree, key)
        return self._defaults.get(key) if value is MISSING else value

    def says(self, key: str) -> bool:
        """Whether the configuration says a key, and not null."""
        return at(self.tree, key) not in (MISSING, None)

    def set(self, option: str, value: Any, *keys: str) -> None:
        """Set an option of the recipe; `keys` are those that made it."""
        node = self.recipe
        *parents, last = option.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
        self.carry(option, *keys)

    def carry(self, what: str, *keys: str) -> None:
        """Tick keys off that became `what`."""
        for key in keys:
            if at(self.tree, key) is not MISSING and not any(left.key == key for left in self.left):
                self.carried[key] = f"{self.carried[key]}, {what}" if key in self.carried else what

    def leave(self, key: str, reason: str, *, matters: bool = False, default: bool = False) -> None:
        """Leave a key out, if it was given; `default`: if it was not, too, for its default matters."""
        given = at(self.tree, key)
        if (given is not MISSING or default) and not any(left.key == key for left in self.left):
            self.carried.pop(key, None)
            self.left.append(UnsupportedKey(key, self.value(key), reason, matters))

    def whole(self, key: str) -> int | None:
        """A number of things; None where there is none, which verl writes as null or -1. Raises ConfigError."""
        value = self.value(key)
        if value is None or (isinstance(value, int | float) and value < 0):
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{key} must be a whole number; it is {value!r}")
        return value

    def number(self, key: str) -> float:
        """A number. Raises ConfigError."""
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not -(2**63) <= value < 2**63:  # nor nan
            raise ConfigError(f"{key} must be a number of 64 bits; it is {value!r:.80}")
        return value

    def choice(self, key: str, option: str, names: dict[str, str]) -> None:
        """Set an option that has other names for the same values."""
        value = self.value(key)
        if isinstance(value, str) and value in names:
            self.set(option, names[value], key)
        else:
            self.leave(key, f"{option} knows, by verl's names: {', '.join(names)}", matters=True)
