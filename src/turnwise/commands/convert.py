"""`turnwise convert`: another system's configuration, made a recipe, and every key that has no place in it, with the reason."""

from __future__ import annotations

import os
from collections.abc import Sequence

import yaml

from turnwise.compat.conversion import ConversionReport
from turnwise.errors import ConfigError

__all__ = ["SYSTEMS", "as_recipe", "converted", "refuse"]

SYSTEMS = ("verl", "swift")
"""Systems whose configurations can be read."""


def converted(
    system: str, words: Sequence[str], *, folder: str | None = None, name: str | None = None
) -> ConversionReport:
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


def as_recipe(report: ConversionReport) -> str:
    """The recipe as YAML, below comments about the keys that are not in it and about assumptions."""
    marks = {True: "CHANGES THE TRAINING, left out", False: "left out"}
    notes = [f"{marks[key.changes_training]}: {key}" for key in report.unsupported]
    notes += [f"assumed: {key}" for key in report.assumptions]
    lines = [f"# {line}" for note in notes for line in note.splitlines()]
    recipe = yaml.safe_dump(report.recipe, sort_keys=False, allow_unicode=True, width=120)
    return "\n".join([*lines, *([""] if lines else []), recipe])


def refuse(report: ConversionReport, *, how: str) -> None:
    """Refuse to train if the result would differ from the original's. `how` tells the user what to do instead.

    Raises ConfigError.
    """
    if refused := report.refused():
        lines = "\n".join(f"  {key}" for key in refused)
        raise ConfigError(
            f"these keys cannot be converted, and training without them gives a different result:\n{lines}\n{how}"
        )
