"""What becomes of another system's configuration: a recipe, what was carried over, and what could not be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Converted", "UnsupportedKey"]


@dataclass(frozen=True, slots=True)
class UnsupportedKey:
    """A key that has no place in the recipe."""

    key: str
    value: Any
    reason: str
    """Why, and what to do instead."""
    matters: bool = False
    """The training would be another one without it: `turnwise train` refuses it."""

    def __str__(self) -> str:
        return f"{self.key}={self.value!r}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Converted:
    """A recipe, made of another system's configuration."""

    recipe: dict[str, Any]
    """The tree of a recipe, as its YAML would be read."""
    carried: dict[str, str] = field(default_factory=dict)
    """Of each key that was carried over: the option of the recipe that it became, or what it became in a few words."""
    left: list[UnsupportedKey] = field(default_factory=list)
    """The keys that were not carried over; with `carried`, every key that was given."""

    guessed: list[UnsupportedKey] = field(default_factory=list)
    """What the configuration does not say and was guessed, or means something else here than there: to be looked at."""

    def refused(self) -> list[UnsupportedKey]:
        """Those without which the training would be another one."""
        return [left for left in self.left if left.matters]
