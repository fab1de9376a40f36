"""Converts ms-swift's arguments about reward functions and their weights."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turnwise.compat.swift.flags import REWARDS
from turnwise.compat.swift.outcomes import orms
from turnwise.compat.swift.recipe_builder import SwiftRecipeBuilder
from turnwise.compat.swift.reward_args import REWARD_DEFAULTS
from turnwise.errors import ConfigError
from turnwise.json_yaml import read_text

__all__ = ["REWARD_ARGUMENTS", "convert_rewards"]

REWARD_ARGUMENTS = tuple(key for key in REWARD_DEFAULTS if key != "max_completion_length")
"""Arguments of ms-swift's own reward functions."""
_READS_ARGUMENT = re.compile(r"\b(?:args|trainer_state)\.([a-z_]\w*)")
"""Finds the arguments of ms-swift that the code of a reward function reads."""
_PREFIXES = {"cosine": "cosine_", "repetition": "repetition_", "soft_overlong": "soft_"}
"""Of a reward function of ms-swift: the prefix of its arguments."""


def convert_rewards(builder: SwiftRecipeBuilder) -> None:
    """Set reward.batch from `reward_funcs` and `reward_weights`. A gym environment's reward is the last weight."""
    values = builder.values
    names, weights = values.get("reward_funcs") or [], values.get("reward_weights") or []
    gym = _is_gym(builder)
    if weights and len(weights) != len(names) + gym:
        reason = f"{len(weights)} weights for {len(names) + gym} rewards"
        builder.reject("reward_weights", reason, changes_training=True)
        weights = []
    rewards: list[dict[str, Any]] = []
    for number, name in enumerate(names):
        if (reward := _reward_function(builder, name)) is not None:
            if weights and weights[number] != 1:
                reward["weight"] = float(weights[number])
            rewards.append(reward)
    if rewards:
        builder.set("reward.batch", rewards)
    if weights and gym and weights[-1] != 1:
        builder.get("environment.arguments")["gym_weight"] = float(weights[-1])
    builder.convert("reward.batch", "reward_funcs", "external_plugins", "reward_weights")
    for key in REWARD_ARGUMENTS:
        if key not in builder.converted:
            builder.reject(key, "no reward function of the configuration uses it")


def _reward_function(builder: SwiftRecipeBuilder, name: str) -> dict[str, Any] | None:
    """The item of reward.batch for one reward function; None if there is no function of that name."""
    plugins = builder.values.get("external_plugins") or []
    if name not in orms and (not plugins or (name in REWARDS and not _mentioned(name, plugins))):
        reason = f"there is no reward function {name!r}; there are {', '.join(sorted(orms))}, and those of plugins"
        builder.reject_value("reward_funcs", name, reason, changes_training=True)
        return None
    arguments: dict[str, Any] = {"use": name, **({"external_plugins": plugins} if plugins else {})}
    if args := _reward_args(builder, name, plugins):
        arguments["args"] = args
    return {"use": "turnwise.compat.swift:Reward", "name": name, "arguments": arguments}


def _reward_args(builder: SwiftRecipeBuilder, name: str, plugins: Sequence[str]) -> dict[str, Any]:
    """The arguments of ms-swift that a reward function reads from `args`, as far as their values are known."""
    if name in _PREFIXES and not _mentioned(name, plugins, if_unreadable=False):
        read = [key for key in REWARD_DEFAULTS if key.startswith(_PREFIXES[name]) or key == "max_completion_length"]
    else:
        read = sorted({key for text in _texts(plugins) for key in _READS_ARGUMENT.findall(text)})
    if name == "repetition":
        read.remove("max_completion_length")
    args = {key: value for key in read if (value := builder.value(key)) is not None}
    if "max_steps" in read and (steps := builder.get("train.steps")) is not None:
        args["max_steps"] = steps  # our steps, which `trainer_state.global_step` counts too
    builder.convert("reward.batch", *(key for key in args if key in REWARD_ARGUMENTS))
    return args


def _is_gym(builder: SwiftRecipeBuilder) -> bool:
    arguments = builder.get("environment.arguments")
    gym_schedulers = ("gym_scheduler", "openenv_scheduler")
    return bool(arguments.get("use_gym_env") or arguments.get("gym_env") or arguments.get("name") in gym_schedulers)


def _mentioned(name: str, plugins: Sequence[str], *, if_unreadable: bool = True) -> bool:
    """Whether a plugin contains `name` in quotation marks. `if_unreadable` is the answer for a plugin without a file."""
    texts = _texts(plugins)
    quoted = re.compile(rf"[\"']{re.escape(name)}[\"']")
    return (if_unreadable and len(texts) < len(plugins)) or any(quoted.search(text) for text in texts)


def _texts(plugins: Sequence[str]) -> list[str]:
    """The text of each plugin file that exists."""
    files = [os.path.expanduser(plugin) for plugin in plugins]
    return [read_text(Path(file), error=ConfigError) for file in files if os.path.isfile(file)]
