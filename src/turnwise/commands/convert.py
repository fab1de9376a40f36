"""`turnwise convert`: another system's configuration, made a recipe, and every key that has no place in it, with the reason."""

from __future__ import annotations

import os
from collections.abc import Sequence

import yaml

from turnwise.compat.converted import Converted
from turnwise.errors import ConfigError

__all__ = ["SYSTEMS", "as_recipe", "converted", "refuse"]

SYSTEMS = ("verl", "swift")
"""Systems whose configurations can be read."""


def converted(system: str, words: Sequence[str], *, folder: str | None = None, name: str | None = None) -> Converted:
    """What a system's command line means here. `folder` and `name` are verl's `--config-path` and `--config-name`.

    Raises ConfigError.
    """
    if system == "verl":
        from turnwise.compat.verl.arguments import from_verl_arguments

        return from_verl_arguments(words, folder=folder, name=name)
    if folder is not None or name is not None:
        raise ConfigError("--config-path and --config-name belong to --from verl")
    from turnwise.compat.swift.arguments import from_swift_arguments

    return from_swift_arguments(words[0] if len(words) == 1 and os.path.isfile(words[0]) else words)


def as_recipe(converted: Converted) -> str:
    """The recipe as YAML; what could not be carried over, and what was guessed, stands above it."""
    marks = {True: "CHANGES THE TRAINING, left out", False: "left out"}
    told = [f"{marks[left.matters]}: {left}" for left in converted.left] + [
        f"guessed: {one}" for one in converted.guessed
    ]
    lines = [f"# {line}" for one in told for line in one.splitlines()]
    recipe = yaml.safe_dump(converted.recipe, sort_keys=False, allow_unicode=True, width=120)
    return "\n".join([*lines, *([""] if lines else []), recipe])


def refuse(converted: Converted, *, how: str) -> None:
    """Refuse to train on what would be another training; `how` says how a person can have it all the same.

    Raises ConfigError.
    """
    if refused := converted.refused():
        lines = "\n".join(f"  {left}" for left in refused)
        raise ConfigError(f"this cannot be carried over, and the training would be another without it:\n{lines}\n{how}")
