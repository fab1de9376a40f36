"""Converts verl's keys `algorithm.rollout_correction.*` into the section correction."""

from __future__ import annotations

from typing import Any

from turnwise.compat.verl.keys import ACTOR
from turnwise.compat.verl.recipe_builder import VerlRecipeBuilder

__all__ = ["convert_rollout_correction", "loss_of_bypass_mode"]

_WEIGHTS, _HIGH, _NORMALIZE, _RULE, _BOUNDS, _BYPASS, _LOSS = (
    f"algorithm.rollout_correction.{name}"
    for name in (
        "rollout_is",
        "rollout_is_threshold",
        "rollout_is_batch_normalize",
        "rollout_rs",
        "rollout_rs_threshold",
        "bypass_mode",
        "loss_type",
    )
)
_LEVELS = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric", "seq_max": "max"}
"""The first part of a value of rollout_rs, and correction.reject.level."""


def loss_of_bypass_mode(builder: VerlRecipeBuilder) -> str | None:
    """The loss that bypass_mode selects instead of policy_loss.loss_mode; None without bypass_mode."""
    if builder.value(_BYPASS) is not True:
        builder.convert("nothing: verl's default", _BYPASS)
        builder.reject(_LOSS, "has no effect without bypass_mode")
        return None
    builder.reject(f"{ACTOR}.policy_loss.loss_mode", "has no effect with bypass_mode, also not in verl")
    name = builder.value(_LOSS)
    if name in ("ppo_clip", "reinforce"):
        builder.convert(f"loss.name={name}", _LOSS)
        return name
    builder.reject(_LOSS, "it can be ppo_clip or reinforce", changes_training=True)
    return "ppo_clip"


def convert_rollout_correction(builder: VerlRecipeBuilder, *, one_step: bool) -> None:
    """Set correction. loss.normalizer and model.dtype are set before. `one_step`: one optimizer step for each batch."""
    bypass = builder.value(_BYPASS) is True
    ratio_of_engine = bypass and builder.get("loss.name", "ppo_clip") == "ppo_clip"
    if builder.value(_WEIGHTS) and ratio_of_engine:
        reason = "has no effect with bypass_mode and loss_type=ppo_clip, also not in verl"
        for key in (_WEIGHTS, _HIGH, _NORMALIZE):
            builder.reject(key, reason)
    weights = bool(builder.value(_WEIGHTS)) and not ratio_of_engine
    rule = bool(builder.value(_RULE))
    _report_unused(builder)
    if not weights and not rule:
        builder.convert("nothing: without correction, ratios compare with the engine's probabilities", _BYPASS)
        return
    if builder.get("model.dtype") != "bfloat16":
        _report_equal_probabilities(builder)
        return
    if bypass and not one_step:
        reason = (
            "verl computes weights and rejections with the present weights, and turnwise once before the update. This is the "
            "same with one optimizer step per batch only"
        )
        builder.reject(_BYPASS, reason, changes_training=True)
        for key in (_WEIGHTS, _HIGH, _NORMALIZE, _RULE, _BOUNDS):
            builder.reject(key, "bypass_mode is not converted", changes_training=True)
        return
    if weights:
        _convert_weights(builder, rule=rule)
    if rule and _convert_rule(builder) and not weights:
        builder.set("correction.action", "measure")
        if ratio_of_engine:
            builder.set("correction.decoupled", False, _BYPASS)
    builder.convert("correction", _BYPASS)


def _report_unused(builder: VerlRecipeBuilder) -> None:
    """Keys of weights without weights, and of a rule without a rule."""
    if not builder.value(_WEIGHTS):
        builder.convert("nothing: tokens have no weights", _WEIGHTS)
        for key in (_HIGH, _NORMALIZE):
            builder.reject(key, "has no effect without rollout_is")
    if not builder.value(_RULE):
        builder.convert("nothing: no tokens are rejected", _RULE)
        builder.reject(_BOUNDS, "has no effect without rollout_rs")


def _report_equal_probabilities(builder: VerlRecipeBuilder) -> None:
    """Without bfloat16, all ratios are 1. A bound below 1 would still scale the loss in verl."""
    reason = "all ratios are 1: the engine samples with the trainer's own weights in the same precision (model.dtype=float32)"
    bounds = _numbers(builder.value(_HIGH))
    scales = bool(builder.value(_WEIGHTS)) and bool(bounds) and max(bounds) < 1
    for key in (_WEIGHTS, _HIGH, _NORMALIZE, _RULE, _BOUNDS, _BYPASS):
        builder.reject(key, reason, changes_training=scales and key == _HIGH)


def _convert_weights(builder: VerlRecipeBuilder, *, rule: bool) -> None:
    """Set the importance weights: truncated at a number, or zero outside `low_high`."""
    level, bounds = builder.value(_WEIGHTS), _numbers(builder.value(_HIGH))
    if level not in ("token", "sequence"):
        builder.reject(_WEIGHTS, "it can be token or sequence", changes_training=True)
        builder.reject(_HIGH, "rollout_is is not converted", changes_training=True)
        builder.reject(_NORMALIZE, "rollout_is is not converted", changes_training=True)
        return
    if not bounds:
        reason = "it must be a number above 0, or low_high such as 0.5_5.0"
        builder.reject(_HIGH, reason, changes_training=True, even_default=True)
    builder.set("correction.level", level, _WEIGHTS)
    builder.set("correction.action", "icepop" if len(bounds) == 2 else "truncate", _WEIGHTS)
    for option, bound in zip(("low", "high")[-len(bounds) :] if bounds else (), bounds, strict=True):
        builder.set(f"correction.{option}", bound, _HIGH)
    if builder.value(_NORMALIZE) is not True:
        builder.convert("nothing: weights are not normalized", _NORMALIZE)
    elif rule or builder.get("train.minibatches", 1) > 1:
        reason = (
            "verl's mean is that of the tokens of a training step, rejected tokens included, and turnwise's that of the kept "
            "tokens of an optimizer step. This is the same without rollout_rs and with one minibatch only"
        )
        builder.reject(_NORMALIZE, reason, changes_training=True)
    else:
        builder.set("correction.normalize_weights", True, _NORMALIZE)


def _convert_rule(builder: VerlRecipeBuilder) -> bool:
    """Set correction.reject. Returns whether the rule could be converted."""
    name, bounds = str(builder.value(_RULE)), _numbers(builder.value(_BOUNDS))
    level, _, estimator = name.rpartition("_")
    problem = _problem_of_rule(builder, name, level, estimator, bounds)
    if problem is not None:
        builder.reject(_RULE, problem, changes_training=True)
        builder.reject(_BOUNDS, "rollout_rs is not converted", changes_training=True)
        return False
    builder.set("correction.reject.level", _LEVELS[level], _RULE)
    builder.set("correction.reject.estimator", estimator, _RULE)
    if estimator == "k1":  # verl compares the inverse of the ratio with its bounds
        low, high = bounds if len(bounds) == 2 else [1 / bounds[0], bounds[0]]
        builder.set("correction.reject.low", 1 / high, _BOUNDS)
        builder.set("correction.reject.high", 1 / low, _BOUNDS)
    else:
        builder.set("correction.reject.high", bounds[0], _BOUNDS)
    return True


def _problem_of_rule(
    builder: VerlRecipeBuilder, name: str, level: str, estimator: str, bounds: list[float]
) -> str | None:
    normalizer = builder.get("loss.normalizer")
    if "," in name:
        return "only one rule can be converted"
    if level not in _LEVELS or estimator not in ("k1", "k2", "k3") or (level == "seq_max" and estimator == "k1"):
        return f"there is no such rule: {', '.join(_LEVELS)}, followed by _k1, _k2 or _k3 (not seq_max_k1)"
    if not bounds or (estimator != "k1" and len(bounds) == 2):
        return "it needs rollout_rs_threshold: low_high for a k1, and a number for a k2 or k3"
    if normalizer == "constant":
        return "with seq-mean-token-sum, verl does not count rejected conversations, and turnwise counts them"
    if normalizer == "trajectory" and level == "token":
        return (
            "with an average over conversations, verl averages over the kept tokens of a conversation, and turnwise scales all "
            "kept tokens by the same factor: use token-mean, or reject sequences"
        )
    return None


def _numbers(value: Any) -> list[float]:
    """The numbers of a threshold: of 2.0 or `low_high`. Empty if it has another form, or a number is not above 0."""
    parts = value.split("_") if isinstance(value, str) else [value]
    try:
        numbers = [float(part) for part in parts]
    except (TypeError, ValueError):
        return []
    valid = len(numbers) <= 2 and all(0 < number < float("inf") for number in numbers)
    return numbers if valid and not isinstance(value, bool) else []
