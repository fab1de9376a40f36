"""Converts ms-swift's arguments about the loss and about importance sampling between the engine and the trainer."""

from __future__ import annotations

from turnwise.compat.swift.recipe_builder import SwiftRecipeBuilder

__all__ = ["convert_divergence", "convert_loss"]

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
        reason = f"these losses of ms-swift can be converted: {', '.join(_NORMALIZERS)}"
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
        builder.reject("delta", f"it has no effect with loss_type={loss_type}, also not in ms-swift")
    if loss_type != "sapo":
        for key in ("tau_pos", "tau_neg"):
            builder.reject(key, "it has no effect without loss_type=sapo")
    _convert_correction(builder, loss_type, off_policy)


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
            f"with cispo, epsilon_high is the largest weight in ms-swift, not its distance from 1, and {upper:g} scales the loss "
            f"down: set epsilon_high above 1, such as 5"
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
    builder.reject("epsilon", "it has no effect with loss_type=cispo and epsilon_high, also not in ms-swift")
    builder.convert("nothing: loss_type is not converted", "epsilon_high")


def _convert_sapo(builder: SwiftRecipeBuilder, off_policy: bool) -> None:
    builder.set("loss.name", "sapo", "loss_type")
    for key, option in (("tau_pos", "loss.tau_positive"), ("tau_neg", "loss.tau_negative")):
        if not off_policy:
            builder.reject(key, _ON_POLICY)
        elif builder.values.get(key) is not None:
            builder.set(option, builder.values[key], key)
    for key in ("epsilon", "epsilon_high"):
        builder.reject(key, "it has no effect with loss_type=sapo, also not in ms-swift")


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
            reason = "ms-swift also removes these sequences from the denominators and from the KL term"
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
