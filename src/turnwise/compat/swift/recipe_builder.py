"""Builds a recipe from ms-swift's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise.compat.conversion import RecipeBuilder
from turnwise.compat.swift.command_line import SwiftArguments
from turnwise.compat.swift.flags import DEFAULTS

__all__ = ["SwiftRecipeBuilder"]


class SwiftRecipeBuilder(RecipeBuilder):
    """Looks arguments such as `max_completion_length` up, and builds a recipe from them."""

    def __init__(self, given: SwiftArguments) -> None:
        super().__init__()
        self.given = given

    @property
    def values(self) -> Mapping[str, Any]:
        """The arguments that were given, without ms-swift's defaults."""
        return self.given.values

    def has(self, key: str) -> bool:
        return key in self.given.values

    def value(self, key: str) -> Any:
        value = self.given.values.get(key)
        return DEFAULTS.get(key) if value is None else value
