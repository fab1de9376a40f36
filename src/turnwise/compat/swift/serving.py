"""Reads the arguments of `swift rollout` for `turnwise serve`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from turnwise.compat.conversion import ConversionReport
from turnwise.compat.swift.arguments import from_swift_arguments
from turnwise.compat.swift.command_line import read_arguments

__all__ = ["from_rollout_arguments"]

_NO_DATA = "rows come from the trainer"
_SERVED = ("model", "engine", "environment", "sampling", "limits", "thinking", "tool_format", "seed")
"""The sections of a recipe that a server uses."""


def from_rollout_arguments(words: Sequence[str]) -> tuple[ConversionReport, dict[str, Any]]:
    """The recipe of a server, and the arguments `host` and `port` where they are given.

    The recipe names no data and no training: a server receives its rows and its weights from the trainer. ms-swift's defaults
    for training are therefore not reported. Raises ConfigError.
    """
    words = words if "rollout" in words else ["rollout", *words]
    given = read_arguments(words).values
    report = from_swift_arguments(words)
    recipe = {name: section for name, section in report.recipe.items() if name in _SERVED}
    recipe["model"] = {name: value for name, value in recipe.get("model", {}).items() if name != "lora"}
    recipe["data"] = {"train": _NO_DATA}
    address = {name: given[name] for name in ("host", "port") if given.get(name) is not None}
    unsupported = [key for key in report.unsupported if key.key in given and key.key not in address]
    return replace(report, recipe=recipe, unsupported=unsupported), address
