"""Converts ms-swift's arguments about training: data, loss, correction, batches, credit and steps.

Each function converts the arguments of one part of the recipe. Reads no files; `convert` calls the functions."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

from turnwise.compat.swift.read_arguments import SHARE_OF_STEPS, SwiftRecipeBuilder, positive_integer
from turnwise.errors import ConfigError
from turnwise.json_yaml import parse_json

_NORMALIZERS = {
    "grpo": "trajectory",
    "bnpo": "token",
    "dapo": "token",
    "dr_grpo": "constant",
    "cispo": "token",
    "sapo": "trajectory",
}
"""For each value of loss_type that can be converted, the average over tokens."""

_ON_POLICY = "it has no effect with one optimizer step on each batch: the ratio is 1"


def convert_loss(builder: SwiftRecipeBuilder, minibatches: int) -> None:
    """Set the sections loss and correction. Options of the ratio have no effect with one optimizer step on each batch."""
    off_policy = minibatches > 1 or builder.value("num_iterations") > 1 or bool(builder.values.get("async_generate"))
    loss_type = str(builder.value("loss_type") or "grpo").lower()
    if loss_type not in _NORMALIZERS:
        reason = f"these losses of {builder.system} can be converted: {', '.join(_NORMALIZERS)}"
        builder.reject("loss_type", reason, changes_training=True, even_default=True)
        loss_type = "grpo"
    else:
        builder.set("loss.normalizer", _NORMALIZERS[loss_type], "loss_type")
    if loss_type == "dr_grpo":
        builder.set("loss.constant_length", builder.value("max_completion_length"), "loss_type")
    if loss_type == "cispo":
        _convert_cispo(builder, off_policy)
    elif loss_type == "sapo":
        _convert_sapo(builder, off_policy)
    else:
        sequence_level = _convert_level(builder)
        _convert_clipping(builder, sequence_level, off_policy)
    if loss_type in ("cispo", "sapo"):
        if builder.values.get("importance_sampling_level") not in (None, "token"):
            reason = f"loss.name={loss_type} has a ratio for each token"
            builder.reject("importance_sampling_level", reason, changes_training=True)
        builder.convert("nothing: the ratio is that of a token", "importance_sampling_level")
        builder.reject("delta", f"it has no effect with loss_type={loss_type}, also not in {builder.system}")
    if loss_type != "sapo":
        for key in ("tau_pos", "tau_neg"):
            builder.reject(key, "it has no effect without loss_type=sapo")
    _convert_correction(builder, loss_type, off_policy)


def convert_samples(builder: SwiftRecipeBuilder) -> None:
    """Who samples what GKD of ms-swift and TRL learns from: here the student samples every conversation (`lmbda` 1), and nobody
    samples answers of the teacher."""
    if builder.value("lmbda") != 1:
        reason = (
            "only conversations of the student are learnt from: set lmbda=1. To learn from given answers as well, train with "
            "`turnwise sft` first (docs/sft.md)"
        )
        builder.reject("lmbda", reason, changes_training=True, even_default=True)
    builder.convert("nothing: every conversation is sampled by the student", "lmbda")
    if builder.values.get("seq_kd"):
        reason = "no answers are sampled from the teacher: sample them with `turnwise rollout`, and train with `turnwise sft`"
        builder.reject("seq_kd", reason, changes_training=True)
    builder.convert("nothing: no answers are sampled from the teacher", "seq_kd")


def convert_divergence(builder: SwiftRecipeBuilder, minibatches: int) -> None:
    """Set loss.kl_coef or reward.kl.coef, and the reference model. model.lora is set before.

    In the reward, ms-swift's estimator is k1, and it subtracts the sum over all tokens, as turnwise does with grpo and rloo.
    """
    coef, key = builder.value("beta"), "kl_in_reward"
    estimator = str(builder.values.get("advantage_estimator") or "grpo").lower()
    in_reward = builder.values.get(key)
    if in_reward is None:
        in_reward = estimator in ("rloo", "reinforce_plus_plus")
    if in_reward and coef and str(builder.values.get("scale_rewards")).lower() == "gdpo":
        builder.reject(key, "with scale_rewards=gdpo, the KL divergence is a term of the loss, also in ms-swift")
        in_reward = False
    if in_reward and coef:
        builder.set("reward.kl.coef", coef, "beta", key)
    else:
        builder.set("loss.kl_coef", coef, "beta")
        builder.convert("loss.kl_coef", key)
    path, sync = "ref_model", "sync_ref_model"
    if not coef:
        for name in (path, sync, "ref_model_sync_steps", "ref_model_mixup_alpha"):
            builder.reject(name, "it has no effect with beta=0")
        return
    if builder.values.get(path) is not None:
        builder.set("reference.path", builder.values[path], path)
    builder.convert("nothing: the reference model is the model before training", path)
    _convert_sync(builder, minibatches * int(builder.value("num_iterations")))


def _convert_sync(builder: SwiftRecipeBuilder, optimizer_steps: int) -> None:
    """Set reference.sync_every and sync_weight. ms-swift counts optimizer steps, and a training step has `optimizer_steps`."""
    sync, every, weight = "sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha"
    if not builder.values.get(sync):
        builder.convert("nothing: the reference model does not change", sync)
        for key in (every, weight):
            builder.reject(key, "it has no effect without sync_ref_model")
        return
    if builder.get("model.lora.rank") is not None:
        reason = "an adapter is trained, and the policy has no weights of its own that could be mixed with the reference model"
        builder.reject(sync, reason, changes_training=True)
        for key in (every, weight):
            builder.reject(key, "sync_ref_model is not converted")
        return
    steps = int(builder.value(every))
    if steps % optimizer_steps:
        reason = (
            f"it counts optimizer steps, and the {steps} steps between two changes are not a multiple of the {optimizer_steps} "
            f"optimizer steps of a training step"
        )
        builder.reject(every, reason, changes_training=True, even_default=True)
    builder.set("reference.sync_every", max(1, steps // optimizer_steps), sync, every)
    builder.set("reference.sync_weight", builder.value(weight), weight)


def _convert_level(builder: SwiftRecipeBuilder) -> bool:
    """Set loss.name. Returns whether the tokens of a sequence have one ratio.

    `sequence` and `sequence_token` have the same gradient if the tokens of a sequence have the same advantage, as they have
    with a group's advantages.
    """
    key = "importance_sampling_level"
    level = builder.values.get(key) or "token"
    if level in ("sequence", "sequence_token"):
        builder.set("loss.name", "gspo", key)
        return True
    if level == "token":
        builder.convert("nothing: the ratio is that of a token", key)
    else:
        builder.reject(key, "it can be token, sequence or sequence_token", changes_training=True)
    return False


def _convert_clipping(builder: SwiftRecipeBuilder, sequence_level: bool, off_policy: bool) -> None:
    """Set the bounds of the ratio of ppo_clip or gspo."""
    low, high = builder.values.get("epsilon"), builder.values.get("epsilon_high")
    if off_policy:
        if low is not None or sequence_level:  # gspo's own default is much smaller than ms-swift's 0.2
            builder.set("loss.clip_low", 0.2 if low is None else low, "epsilon")
        if high is not None or low is not None or sequence_level:
            upper = next(value for value in (high, low, 0.2) if value is not None)
            builder.set("loss.clip_high", upper, "epsilon", "epsilon_high")
    else:
        for key in ("epsilon", "epsilon_high"):
            builder.reject(key, _ON_POLICY)
    delta = builder.values.get("delta")
    upper = 1 + next(value for value in (high, low, 0.2) if value is not None)
    if delta is None:
        builder.convert("nothing: without loss.dual_clip, there is no such bound", "delta")
    elif delta < upper:
        reason = (
            f"loss.dual_clip bounds tokens with a negative advantage only. This is the same only if delta is at least "
            f"1 + epsilon_high, here {upper:g}"
        )
        builder.reject("delta", reason, changes_training=True)
    elif not off_policy:
        builder.reject("delta", _ON_POLICY)
    elif sequence_level:
        builder.reject("delta", "loss.name=gspo has no bound of this kind", changes_training=True)
    else:
        builder.set("loss.dual_clip", delta, "delta")


def _convert_cispo(builder: SwiftRecipeBuilder, off_policy: bool) -> None:
    """Set the upper bound of the weight: in ms-swift, epsilon_high itself, and not 1 + epsilon_high."""
    low, high = builder.values.get("epsilon"), builder.values.get("epsilon_high")
    upper = next(value for value in (high, low, 0.2) if value is not None)
    if upper <= 1:
        reason = (
            f"with cispo, epsilon_high is the largest weight in {builder.system}, not its distance from 1, and {upper:g} scales "
            f"the loss down: set epsilon_high above 1, such as 5"
        )
        builder.reject("loss_type", reason, changes_training=True)
    else:
        builder.set("loss.name", "cispo", "loss_type")
    if not off_policy:
        for key in ("epsilon", "epsilon_high"):
            builder.reject(key, _ON_POLICY)
        return
    if upper > 1:
        builder.set("loss.clip_high", upper - 1, "epsilon_high" if high is not None else "epsilon")
    builder.reject("epsilon", f"it has no effect with loss_type=cispo and epsilon_high, also not in {builder.system}")
    builder.convert("nothing: loss_type is not converted", "epsilon_high")


def _convert_sapo(builder: SwiftRecipeBuilder, off_policy: bool) -> None:
    builder.set("loss.name", "sapo", "loss_type")
    for key, option in (("tau_pos", "loss.tau_positive"), ("tau_neg", "loss.tau_negative")):
        if not off_policy:
            builder.reject(key, _ON_POLICY)
        elif builder.values.get(key) is not None:
            builder.set(option, builder.values[key], key)
    for key in ("epsilon", "epsilon_high"):
        builder.reject(key, f"it has no effect with loss_type=sapo, also not in {builder.system}")


_CORRECTIONS = {
    "token_truncate": {"action": "truncate"},
    "token_mask": {"action": "mask"},
    "sequence_truncate": {"action": "truncate", "level": "geometric"},
    "sequence_mask": {"action": "mask", "level": "geometric", "weight_level": "token"},
}
"""The modes of ms-swift's importance sampling. Its ratio of a sequence is the geometric mean."""


def _convert_correction(builder: SwiftRecipeBuilder, loss_type: str, off_policy: bool) -> None:
    """Set the correction, if the engine's probabilities can differ from the trainer's; else there is nothing to correct."""
    mask = "off_policy_sequence_mask_delta"
    mismatch = bool(builder.values.get("async_generate")) or builder.get("model.dtype") == "bfloat16"
    if builder.values.get(mask) is not None and (off_policy or mismatch):
        builder.set(f"correction.{mask}", builder.values[mask], mask)
        if loss_type == "bnpo" or builder.value("beta"):
            reason = f"{builder.system} also removes these sequences from the denominators and from the KL term"
            builder.assume(mask, builder.values[mask], reason)
    else:
        builder.reject(mask, _ON_POLICY)
    mode, key = builder.values.get("rollout_importance_sampling_mode"), "rollout_importance_sampling_mode"
    if mode not in _CORRECTIONS or not mismatch:
        return
    for option, value in _CORRECTIONS[mode].items():
        builder.set(f"correction.{option}", value, key)
    threshold = builder.values.get("rollout_importance_sampling_threshold")
    if threshold is not None:
        builder.set("correction.high", threshold, "rollout_importance_sampling_threshold")
    if builder.value("beta"):
        builder.assume(key, mode, "in ms-swift, the weight also multiplies the KL term; here it does not")
    if builder.values.get("importance_sampling_level") == "sequence" and mode != "sequence_truncate":
        reason = (
            f"with {mode}, the tokens of a sequence have different weights: set sequence_token, which turnwise computes"
        )
        builder.reject("importance_sampling_level", reason, changes_training=True)


_PROMPT_COLUMNS = ("messages", "prompt", "query", "problem", "question")
_FILES = (".jsonl", ".json", ".parquet", ".csv", ".txt", ".arrow")


def convert_data(builder: SwiftRecipeBuilder) -> None:
    """Data sets, columns, held-out rows and the data's seed."""
    for key, option in (("dataset", "data.train"), ("val_dataset", "data.eval")):
        _convert_data_set(builder, key, option)
    if not builder.values.get("dataset"):
        builder.reject("dataset", "no data set is given: set data.train", changes_training=True, even_default=True)
    _convert_columns(builder)
    values = builder.values
    if values.get("split_dataset_ratio"):
        reason = "held-out rows must be a separate file or split: set data.eval"
        builder.reject("split_dataset_ratio", reason, changes_training=True)
    else:
        builder.convert("nothing: no rows are held out", "split_dataset_ratio")
    if values.get("data_seed") == builder.value("seed"):
        builder.convert("seed", "data_seed")
    else:
        builder.reject("data_seed", "one seed is used for everything: seed")


def _convert_data_set(builder: SwiftRecipeBuilder, key: str, option: str) -> None:
    names = builder.values.get(key) or []
    if len(names) > 1:
        if any("#" in name or (":" in name and not os.path.exists(name)) for name in names):
            reason = (
                f"a subset (:) or a number of rows (#) belongs to one data set: write the rows to a file for {option}"
            )
            builder.reject(key, reason, changes_training=True)
            return
        builder.set(option, list(names), key)
        return
    for given in names:
        name, hashed, limit = given.partition("#")  # ms-swift's form: name:subset#rows
        name, _, subset = name.partition(":") if not os.path.exists(name) else (name, "", "")
        builder.set(option, name, key)
        if subset:
            builder.set("data.subset", subset, key)
        if hashed:
            rows = positive_integer(f"--{key} {given}: the number of rows", limit)
            builder.set("data.max_rows" if key == "dataset" else "eval.max_rows", rows, key)


def _convert_columns(builder: SwiftRecipeBuilder) -> None:
    columns: dict[str, str] = {}
    for name, meaning in (builder.values.get("columns") or {}).items():
        columns["prompt" if meaning in ("messages", "query", "prompt", "problem") else meaning] = name
    builder.convert("data.columns", "columns")
    if "prompt" not in columns:
        known = _prompt_column(builder)
        columns["prompt"] = known or "messages"
        if known is None and builder.values.get("dataset"):
            reason = "the data could not be read here, so the prompt column was assumed: check data.columns.prompt"
            builder.assume("columns", "messages", reason)
    if columns != {"prompt": "prompt"}:
        builder.set("data.columns", columns)


def _prompt_column(builder: SwiftRecipeBuilder) -> str | None:
    """The column that holds the conversations, read from the first row; None if there is no readable file."""
    first = first_row(builder) or {}
    return next((name for name in _PROMPT_COLUMNS if name in first), None)


def first_row(builder: SwiftRecipeBuilder) -> dict[str, Any] | None:
    """The first row of data.train; None if there is no readable file."""
    path = Path(str(builder.get("data.train", "")))
    if path.suffix not in (".jsonl", ".json") or not os.path.isfile(path):
        return None
    try:
        with path.open(encoding="utf-8-sig") as lines:
            first: Any = parse_json(next(lines, "{}"), where=str(path), error=ConfigError)
    except (ConfigError, OSError, UnicodeDecodeError):
        return None
    return first if isinstance(first, dict) else None


def note_hub_names(builder: SwiftRecipeBuilder) -> None:
    """Record names that ms-swift looks up on ModelScope, and turnwise on Hugging Face."""
    if builder.values.get("use_hf"):
        return
    for key, option in (("model", "model.path"), ("dataset", "data.train"), ("val_dataset", "data.eval")):
        name = str(builder.get(option, ""))
        if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not os.path.exists(name) and Path(name).suffix not in _FILES:
            reason = "ms-swift loads it from ModelScope, turnwise from Hugging Face: check that both are the same"
            if key != "model":
                reason += (
                    "; ms-swift also prepares the columns of data sets that it knows, turnwise does not (data.columns)"
                )
            builder.assume(key, name, reason)


def count_rows(builder: SwiftRecipeBuilder) -> int | None:
    """The number of rows to train on; None if it cannot be found out here."""
    path, limit = Path(str(builder.get("data.train", ""))), builder.get("data.max_rows")
    if path.suffix != ".jsonl" or not os.path.isfile(path) or not os.access(path, os.R_OK):
        return limit
    with path.open("rb") as lines:
        count = sum(bool(line.strip()) for line in lines)
    return min(count, limit or count)


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
    size = per_micro_step * accumulation
    minibatches = max(1, round(generation / size))
    options = "train.batch_size" + (", train.minibatches" if minibatches > 1 else "")
    builder.convert(f"{options} ({generation} conversations a step, with {processes} processes)", *_BATCH_KEYS)
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
    convert_length(builder, minibatches)
    if isinstance(eval_steps := builder.values.get("eval_steps"), float):
        builder.reject("eval_steps", SHARE_OF_STEPS.format("eval.every"))
    elif builder.values.get("val_dataset"):
        if builder.has("eval_steps"):
            builder.set("eval.every", eval_steps, "eval_steps")
    else:
        builder.reject("eval_steps", "there are no held-out rows: set data.eval")


def convert_length(builder: SwiftRecipeBuilder, minibatches: int) -> None:
    """Set train.steps or train.epochs, and the warmup."""
    steps = _count_steps(builder, minibatches)
    if steps is not None:
        builder.set("train.steps", steps, "max_steps")
    warmup = builder.values.get("warmup_steps")
    if warmup is None and steps is not None:
        warmup = math.ceil(builder.value("warmup_ratio") * steps)
    if warmup is None:  # the number of steps depends on the rows, which cannot be counted here
        warmup = builder.value("warmup_ratio")
    if warmup:
        builder.set("train.warmup_steps", warmup, "warmup_steps")
    builder.convert("train.warmup_steps", "warmup_ratio", "warmup_steps")


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
