"""Converts ms-swift's arguments about batches, credit and the length of the training."""

from __future__ import annotations

import math

from turnwise.compat.swift.convert_data import count_rows
from turnwise.compat.swift.flags import SHARE_OF_STEPS
from turnwise.compat.swift.recipe_builder import SwiftRecipeBuilder

__all__ = ["convert_batches", "convert_credit", "convert_sample_filters", "convert_steps"]

_BATCH_KEYS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "generation_batch_size",
    "steps_per_generation",
    "global_batch_size",
)


def convert_batches(builder: SwiftRecipeBuilder) -> int:
    """Set train.batch_size (rows) and train.minibatches from ms-swift's generation batch (conversations).

    Returns the optimizer steps on each generation batch.
    """
    processes, group = builder.given.processes, builder.value("num_generations")
    per_micro_step = builder.value("per_device_train_batch_size") * processes
    accumulation = builder.value("gradient_accumulation_steps") or max(1, math.ceil(16 / per_micro_step))
    micro_steps = builder.value("steps_per_generation") or accumulation
    generation = builder.value("generation_batch_size") or per_micro_step * micro_steps
    global_batch = builder.values.get("global_batch_size")
    if global_batch is not None:  # megatron's: the conversations of one optimizer step
        per_micro_step, accumulation = global_batch, 1
        generations = builder.value("steps_per_generation") or 1
        generation = builder.value("generation_batch_size") or global_batch * generations
    builder.set("train.batch_size", max(1, generation // group))
    builder.convert(
        f"train.batch_size, train.minibatches ({generation} conversations a step, with {processes} processes)",
        *_BATCH_KEYS,
    )
    size = per_micro_step * accumulation
    minibatches = max(1, round(generation / size))
    if generation > size and generation % size:
        builder.reject_value(
            "gradient_accumulation_steps" if global_batch is None else "global_batch_size",
            accumulation if global_batch is None else global_batch,
            f"an optimizer step there is on {size} conversations, also of two generations; here, the {generation} conversations "
            f"of a step are divided into {minibatches} equal parts",
            changes_training=True,
        )
    if minibatches > 1:
        builder.set("train.minibatches", minibatches)
    if generation % group:
        reason = f"it does not divide the {generation} conversations of a step"
        builder.reject_value("num_generations", group, reason)
    return minibatches


_SCALES = {"group": "std", "true": "std", "batch": "batch", "none": "none", "false": "none"}
"""Values of scale_rewards, and of credit.scale."""


def convert_credit(builder: SwiftRecipeBuilder) -> None:
    """Set credit from advantage_estimator and scale_rewards."""
    keys = ("advantage_estimator", "scale_rewards")
    estimator = str(builder.values.get(keys[0]) or "grpo").lower()
    scale = builder.values.get(keys[1])
    if scale is None and not builder.has(keys[1]):  # a written `none` is None
        scale = {"rloo": "none", "reinforce_plus_plus": "batch"}.get(estimator, "group")
    scale = str(scale).lower()
    if estimator == "rloo" and scale in ("none", "false"):
        builder.set("credit.name", "rloo", *keys)
    elif estimator == "grpo" and scale == "gdpo":
        builder.set("credit.name", "gdpo", *keys)
    elif estimator == "grpo" and scale in _SCALES:
        builder.set("credit.name", "grpo", keys[0])
        builder.set("credit.scale", _SCALES[scale], keys[1])
    else:
        builder.set("credit.name", "grpo")
        reason = (
            "these values can be converted: advantage_estimator=grpo with scale_rewards=group, batch, none or gdpo, and "
            "advantage_estimator=rloo with scale_rewards=none; credit.name=reinforce_pp_baseline is like reinforce_plus_plus, "
            "but whitens tokens instead of conversations"
        )
        for key in keys:
            builder.reject(key, reason, changes_training=True)


def convert_sample_filters(builder: SwiftRecipeBuilder) -> None:
    """Set train.dynamic_sampling and train.overlong_filter."""
    builder.convert(
        "nothing: it is off", *(key for key in ("dynamic_sample", "overlong_filter") if not builder.value(key))
    )
    if builder.values.get("dynamic_sample"):
        builder.set(
            "train.dynamic_sampling", builder.value("max_resample_times"), "dynamic_sample", "max_resample_times"
        )
    else:
        builder.reject("max_resample_times", "it has no effect without dynamic_sample")
    if builder.values.get("overlong_filter"):
        builder.set("train.overlong_filter", True, "overlong_filter")


def convert_steps(builder: SwiftRecipeBuilder, minibatches: int) -> None:
    """Set train.steps, the warmup and the steps between evaluations."""
    steps = _count_steps(builder, minibatches)
    if steps is not None:
        builder.set("train.steps", steps, "max_steps")
    warmup = builder.values.get("warmup_steps")
    if warmup is None and steps is not None:
        warmup = math.ceil(builder.value("warmup_ratio") * steps)
    if warmup is None and builder.value("warmup_ratio") > 0:
        reason = "the number of steps depends on the rows, which cannot be counted here: set warmup_steps"
        builder.reject("warmup_ratio", reason, changes_training=True)
    if warmup:
        builder.set("train.warmup_steps", warmup, "warmup_steps")
    builder.convert("train.warmup_steps", "warmup_ratio", "warmup_steps")
    if isinstance(eval_steps := builder.values.get("eval_steps"), float):
        builder.reject("eval_steps", SHARE_OF_STEPS.format("eval.every"))
    elif builder.values.get("val_dataset"):
        if builder.has("eval_steps"):
            builder.set("eval.every", eval_steps, "eval_steps")
    else:
        builder.reject("eval_steps", "there are no held-out rows: set data.eval")


def _count_steps(builder: SwiftRecipeBuilder, minibatches: int) -> int | None:
    """Our steps: one of ours is one generation batch. Sets train.epochs and returns None if the number of rows is not known."""
    max_steps = builder.values.get("max_steps")
    if max_steps and max_steps > 0:
        builder.reject("num_train_epochs", "max_steps gives the length of the training")
        return max(1, round(max_steps / (minibatches * builder.value("num_iterations"))))
    epochs = builder.value("num_train_epochs")
    if (rows := count_rows(builder)) is not None:
        builder.convert("train.steps", "num_train_epochs")
        return max(1, math.ceil(epochs * rows / builder.get("train.batch_size")))
    builder.set("train.epochs", epochs, "num_train_epochs")
    return None
