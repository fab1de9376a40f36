"""Builds a recipe from verl's configuration tree."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from turnwise.compat.conversion import RecipeBuilder
from turnwise.compat.yaml_files import MISSING, at
from turnwise.errors import ConfigError

__all__ = ["VerlRecipeBuilder"]


class VerlRecipeBuilder(RecipeBuilder):
    """Reads keys such as `actor_rollout_ref.model.path` from a configuration tree, and builds a recipe from them."""

    def __init__(self, tree: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """`defaults` holds the values of keys that the configuration does not contain."""
        super().__init__()
        for key, default in defaults.items():
            self._refuse_other_than_text(tree, key, wanted=isinstance(default, str))
        for key in ("data.image_key", "data.video_key"):
            self._refuse_other_than_text(tree, key, wanted=True)
        self.tree = tree
        self.defaults = defaults

    @staticmethod
    def _refuse_other_than_text(tree: Mapping[str, Any], key: str, *, wanted: bool) -> None:
        value = at(tree, key)
        if wanted and isinstance(value, list | dict):
            raise ConfigError(f"{key} must be a text; it is {value!r:.80}")

    def has(self, key: str) -> bool:
        return at(self.tree, key) is not MISSING

    def value(self, key: str) -> Any:
        value = at(self.tree, key)
        return self.defaults.get(key) if value is MISSING else value

    def is_set(self, key: str) -> bool:
        """Whether the configuration contains the key, and its value is not null."""
        return at(self.tree, key) not in (MISSING, None)

    def reference(self, key: str) -> str | None:
        """The text `${NAME}` if the value is a variable that was not set when the configuration was read."""
        value = self.value(key)
        return value if isinstance(value, str) and re.fullmatch(r"\$\{\w+\}", value) else None

    def _or_default(self, key: str) -> Any:
        """The value of a number, or its default if the value is an unset variable, which is then reported."""
        if self.reference(key) is None:
            return self.value(key)
        default = self.defaults.get(key)
        used = "no value" if default is None else f"verl's default, {default}"
        reason = f"a number is computed with it, and the variable is not set here, so {used} was used: set the variable first"
        self.reject(key, reason, changes_training=True)
        return default

    def count(self, key: str) -> int | None:
        """An integer of at least 0; None if there is no bound, which verl writes as null, false or -1. Raises ConfigError."""
        value = self._or_default(key)
        if value is None or value is False or (isinstance(value, int | float) and value < 0):
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{key} must be an integer; it is {value!r}")
        return value

    def number(self, key: str) -> float:
        """A finite number. Raises ConfigError."""
        value = self._or_default(key)
        # the chained comparison is also false for NaN
        if isinstance(value, bool) or not isinstance(value, int | float) or not -(2**63) <= value < 2**63:
            raise ConfigError(f"{key} must be a number of 64 bits; it is {value!r:.80}")
        return value

    def choice(self, key: str, option: str, names: dict[str, str]) -> None:
        """Set an option whose values have other names in verl: `names` maps verl's name to ours."""
        value = self.value(key)
        if isinstance(value, str) and value in names:
            self.set(option, names[value], key)
        else:
            self.reject(key, f"{option} supports these values of verl: {', '.join(names)}", changes_training=True)
