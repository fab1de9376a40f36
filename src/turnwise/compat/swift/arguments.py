"""Converts ms-swift's arguments into a recipe, with a report: which arguments were converted, which were not, and why.

Arguments that are not given have ms-swift's default where it differs from ours. `flags` holds the tables of arguments that
need no computation; one module for each part of the recipe converts the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.compat.conversion import ConversionReport
from turnwise.compat.swift.command_line import read_arguments
from turnwise.compat.swift.convert_adapter import convert_adapter
from turnwise.compat.swift.convert_conversation import convert_conversation
from turnwise.compat.swift.convert_data import convert_data, note_hub_names
from turnwise.compat.swift.convert_engine import ENGINE_ARGUMENTS, convert_engine
from turnwise.compat.swift.convert_loss import convert_divergence, convert_loss
from turnwise.compat.swift.convert_optimization import (
    convert_batches,
    convert_credit,
    convert_sample_filters,
    convert_steps,
)
from turnwise.compat.swift.convert_placement import PLACEMENT_ARGUMENTS, convert_placement
from turnwise.compat.swift.convert_rewards import REWARD_ARGUMENTS, convert_rewards
from turnwise.compat.swift.factory import named_scheduler
from turnwise.compat.swift.flags import CHOICES, FIXED, MACHINERY, OPTIONS, SHARE_OF_STEPS
from turnwise.compat.swift.recipe_builder import SwiftRecipeBuilder
from turnwise.compat.swift.reward_functions import registered_reward
from turnwise.errors import ConfigError, nearest
from turnwise.json_yaml import read_text

__all__ = ["COMPUTED", "from_swift_arguments"]

COMPUTED = (
    "dataset", "val_dataset", "columns", "split_dataset_ratio", "data_seed", "max_length", "max_steps", "num_train_epochs",
    "per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation",
    "global_batch_size", "learning_rate", "warmup_ratio", "warmup_steps", "adam_beta1", "adam_beta2", "epsilon",
    "epsilon_high", "off_policy_sequence_mask_delta", "loss_type", "importance_sampling_level", "beta",
    "kl_in_reward", "ref_model", "sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha",
    "delta", "tau_pos", "tau_neg", "top_k",
    "max_completion_length", "completion_length_limit_scope", "loss_scale", "multi_turn_scheduler", "max_turns",
    "external_plugins", "use_gym_env", "gym_env", "context_manager", "reward_funcs", "reward_weights", "eval_steps",
    "tuner_type", "lora_rank", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora",
    "gradient_checkpointing",
    *REWARD_ARGUMENTS, *ENGINE_ARGUMENTS, *PLACEMENT_ARGUMENTS,
)  # fmt: skip
"""Arguments that are not mapped one to one: several arguments give one option, or one argument gives several options."""


def from_swift_arguments(
    source: str | Path | Sequence[str] | Mapping[str, Any], *, try_names: bool = False
) -> ConversionReport:
    """Convert the arguments of `swift rlhf --rlhf_type grpo` and `swift rollout` into a recipe.

    `source` is a mapping, the words of a command line, or the path of a `.yaml`, `.json` or `.sh` file. A script may contain
    both commands. With `try_names`, plugins are loaded, and names that they do not register are reported.

    Raises ConfigError if the arguments cannot be read.
    """
    builder = SwiftRecipeBuilder(read_arguments(source))
    _convert_options(builder)
    convert_data(builder)
    note_hub_names(builder)
    convert_conversation(builder)
    convert_engine(builder)
    convert_placement(builder)
    minibatches = convert_batches(builder)
    convert_loss(builder, minibatches)
    convert_sample_filters(builder)
    convert_steps(builder, minibatches)
    convert_credit(builder)
    convert_rewards(builder)
    convert_adapter(builder)
    convert_divergence(builder, minibatches)
    _report_other_arguments(builder)
    if try_names:
        _try_names(builder)
    return builder.report()


def _try_names(builder: SwiftRecipeBuilder) -> None:
    """Load the plugins, and look up the scheduler and the reward functions that the recipe names."""
    environment = builder.get("environment.arguments", {})
    plugins = [name for name in environment.get("external_plugins") or () if name.endswith(".py")]
    names = {key: environment.get(key) for key in ("name", "gym_env", "context_manager")}
    if any(names.values()):
        builder.try_name(
            "environment.arguments",
            {key: value for key, value in names.items() if value is not None},
            lambda: named_scheduler(
                names["name"],
                environment.get("external_plugins") or (),
                gym_env=names["gym_env"],
                context_manager=names["context_manager"],
            ),
            files=plugins,
        )
    for number, use in enumerate(builder.get("reward.batch", [])):
        given = use["arguments"]
        files = [name for name in given.get("external_plugins") or () if name.endswith(".py")]
        builder.try_name(
            f"reward.batch.{number}.arguments.use",
            given["use"],
            lambda given=given: registered_reward(given["use"], given.get("external_plugins") or ()),
            files=files,
        )
    if names["gym_env"] == "math_env" and builder.get("limits.context") is None:
        reason = (
            "ms-swift's math_env ends a conversation of more than 2,048 tokens of Qwen2.5: set limits.context for that"
        )
        builder.assume("gym_env", "math_env", reason)


def _convert_options(builder: SwiftRecipeBuilder) -> None:
    """Arguments that become one option each."""
    for key, option in OPTIONS.items():
        value = builder.value(key)
        if builder.has(key) and value is None:
            builder.convert("nothing: it is not set", key)
        elif key == "save_steps" and isinstance(value, float):
            builder.reject(key, SHARE_OF_STEPS.format("checkpoint.every"))
        elif value is not None and not (key == "system" and _convert_system_file(builder, value)):
            builder.set(option, value, key)
    for key, (option, names) in CHOICES.items():
        value = builder.value(key)
        name = str(value).lower()
        if (value is not None or builder.has(key)) and name in names:
            builder.set(option, names[name], key)
        elif value is not None:
            builder.reject(
                key,
                f"{option} supports these values of ms-swift: {', '.join(names)}",
                changes_training=True,
                even_default=True,
            )
        else:
            builder.convert(option, key)
    if (top_k := builder.value("top_k")) is not None:
        builder.set("sampling.top_k", max(top_k, 0), "top_k")
    betas = ("adam_beta1", "adam_beta2")
    builder.set("train.betas", [float(builder.value(key)) for key in betas], *betas)
    if builder.values.get("learning_rate") is None:
        builder.set("train.lr", 1e-5)  # ms-swift's default when all parameters are trained


def _convert_system_file(builder: SwiftRecipeBuilder, value: str) -> bool:
    """Convert `system` if it is the name of a file. ms-swift reads the file if a file of that name exists."""
    path = builder.given.find(value)
    if path is not None:
        builder.set("data.system_prompt", read_text(path, error=ConfigError), "system")
    elif value.endswith(".txt"):
        builder.reject(
            "system",
            "there is no file of that name: run from the folder that the path is relative to",
            changes_training=True,
        )
    return path is not None or value.endswith(".txt")


def _report_other_arguments(builder: SwiftRecipeBuilder) -> None:
    """Record every argument that has not been looked at yet."""
    reported = {*builder.converted, *(rejected.key for rejected in builder.unsupported)}
    for key in sorted(set(builder.values) - reported):
        _report_other(builder, key)
    recipe = str(builder.recipe)
    for key, value in builder.values.items():
        variables = re.findall(r"\$\{\w+\}", str(value))
        if variables and all(variable in recipe for variable in variables):
            reason = "the variable is not set here, and the recipe refers to it: set it before you train"
            builder.assume(key, value, reason)
        elif variables and key in builder.converted:
            reason = "the value depends on a variable that is not set here: set the variable, and convert again"
            builder.reject(key, reason, changes_training=True)
    for key, value in builder.given.overridden.items():
        used = builder.values[key]
        builder.reject_value(key, value, f"the commands give different values for it; {used!r} was used")
    for key, value in builder.given.environment.items():
        builder.reject_value(key, value, "it is a shell variable: set it yourself if your code reads it")


def _report_other(builder: SwiftRecipeBuilder, key: str) -> None:
    value = builder.value(key)
    if key in FIXED:
        accepted, reason = FIXED[key]
        if any(value is item or (value == item and not isinstance(value, bool)) for item in accepted):
            builder.convert("nothing: turnwise always works this way", key)
        else:
            builder.reject(key, reason, changes_training=True, even_default=True)
    elif (reason := _machinery(key)) is not None:
        builder.reject(key, reason)
    elif key == "max_length":
        builder.reject(key, "prompts are not truncated here: limits.context bounds a conversation")
    else:
        hint = nearest(key, {*OPTIONS, *CHOICES, *FIXED, *COMPUTED})
        builder.reject(key, f"turnwise knows no such argument of ms-swift{hint}", changes_training=True)


def _machinery(key: str) -> str | None:
    return next((reason for pattern, reason in MACHINERY if re.fullmatch(pattern, key)), None)
