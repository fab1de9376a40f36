"""Converts verl's keys about the policy loss, its average, its clipping and the KL divergence."""

from __future__ import annotations

from turnwise.compat.verl.keys import ACTOR
from turnwise.compat.verl.recipe_builder import VerlRecipeBuilder
from turnwise.compat.verl.rollout_correction import convert_rollout_correction, loss_of_bypass_mode

__all__ = ["convert_losses"]

_LOSSES = {"vanilla": "ppo_clip", "gspo": "gspo", "sapo": "sapo", "cispo": "cispo", "gpg": "reinforce"}
"""verl's values of loss_mode, and their names here."""

_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
"""verl's values of kl_loss_type, and their names here. With a `+`, verl uses the gradient of k2."""


def convert_losses(builder: VerlRecipeBuilder) -> None:
    """Set the sections loss and correction. train.minibatches, train.ppo_epochs and model.dtype are set before."""
    one_step = builder.get("train.minibatches", 1) == 1 and builder.get("train.ppo_epochs", 1) == 1
    name = loss_of_bypass_mode(builder) or _named_loss(builder)
    if name != "ppo_clip":
        builder.set("loss.name", name)
    _normalizer(builder, name)
    _clipping(builder, name, one_step=one_step)
    _temperatures(builder, name, one_step=one_step)
    _divergence(builder)
    _divergence_in_reward(builder)
    convert_rollout_correction(builder, one_step=one_step)


def _named_loss(builder: VerlRecipeBuilder) -> str:
    key = f"{ACTOR}.policy_loss.loss_mode"
    mode = builder.value(key)
    name = _LOSSES.get(str(mode))
    if name is None:
        builder.reject(key, f"these losses can be converted: {', '.join(_LOSSES)}", changes_training=True)
        return "ppo_clip"
    builder.convert(f"loss.name={name}", key)
    return name


def _normalizer(builder: VerlRecipeBuilder, name: str) -> None:
    """Set loss.normalizer. verl's gspo and sapo always average over conversations."""
    key = f"{ACTOR}.loss_agg_mode"
    mode = builder.value(key)
    if name in ("gspo", "sapo"):
        builder.set("loss.normalizer", "trajectory")
        other_terms = builder.value(f"{ACTOR}.use_kl_loss") is True or builder.value(f"{ACTOR}.entropy_coeff")
        if mode == "seq-mean-token-mean":
            builder.convert("loss.normalizer", key)
        elif other_terms:
            reason = (
                f"loss_mode={name} averages over conversations, and only the KL and entropy terms have this average: set "
                f"seq-mean-token-mean"
            )
            builder.reject(key, reason, changes_training=True, even_default=True)
        else:
            builder.reject(key, f"has no effect with loss_mode={name}, also not in verl")
    elif mode == "seq-mean-token-sum":
        builder.set("loss.normalizer", "constant", key)
        builder.set("loss.constant_length", 1, key)
    elif mode == "seq-mean-token-sum-norm":
        reason = (
            "verl divides by the response length, but not by the number of conversations, so that the result depends on the "
            "size of micro-batches: set loss.normalizer=constant and loss.constant_length in the recipe"
        )
        builder.reject(key, reason, changes_training=True)
    else:
        builder.choice(key, "loss.normalizer", {"token-mean": "token", "seq-mean-token-mean": "trajectory"})


def _clipping(builder: VerlRecipeBuilder, name: str, *, one_step: bool) -> None:
    """Set the bounds of the ratio. The defaults of gspo and cispo are other numbers than verl's 0.2, so all are written."""
    clip, low, high, dual = (
        f"{ACTOR}.{key}" for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
    )
    if name in ("sapo", "reinforce") or one_step:
        reason = "has no effect with one optimizer step per batch: the ratio is 1"
        if name in ("sapo", "reinforce"):
            reason = f"has no effect with loss.name={name}, also not in verl"
        for key in (clip, low, high, dual):
            builder.reject(key, reason)
        return
    for key, option in ((low, "loss.clip_low"), (high, "loss.clip_high")):
        source = key if builder.is_set(key) else clip
        builder.set(option, builder.value(source), source)
    for key in (clip, low, high):
        if key not in builder.converted:  # null, or replaced by the other two keys
            builder.convert("loss.clip_low, loss.clip_high, from the other clip_ratio keys", key)
    if name != "ppo_clip":
        builder.reject(dual, f"has no effect with loss.name={name}, also not in verl")
    elif builder.is_set(dual):
        builder.set("loss.dual_clip", builder.value(dual), dual)


def _temperatures(builder: VerlRecipeBuilder, name: str, *, one_step: bool) -> None:
    for key, option in ((f"{ACTOR}.tau_pos", "loss.tau_positive"), (f"{ACTOR}.tau_neg", "loss.tau_negative")):
        if name != "sapo":
            builder.reject(key, "has no effect without loss_mode=sapo")
        elif one_step:
            builder.reject(key, "has no effect with one optimizer step per batch: the ratio is 1")
        elif builder.is_set(key):
            builder.set(option, builder.number(key), key)


def _divergence(builder: VerlRecipeBuilder) -> None:
    switch, weight, kind = (f"{ACTOR}.{name}" for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type"))
    if builder.value(switch) is not True:
        builder.convert("loss.kl_coef=0", switch)
        for key in (weight, kind):
            builder.reject(key, "belongs to use_kl_loss, which is off")
        return
    builder.set("loss.kl_coef", builder.value(weight), switch, weight)
    name = str(builder.value(kind))
    estimator = _ESTIMATORS.get(name.removesuffix("+"))
    if estimator is None:
        builder.reject(kind, f"these estimators can be converted: {', '.join(_ESTIMATORS)}", changes_training=True)
        return
    estimator = "k2" if name.endswith("+") else estimator
    if estimator != "k3" and builder.value(weight):
        builder.set("loss.kl_estimator", estimator)
    builder.convert(f"loss.kl_estimator={estimator}", kind)


def _divergence_in_reward(builder: VerlRecipeBuilder) -> None:
    """Set reward.kl. verl also subtracts the penalty at each token; its estimators see the same sums as turnwise's."""
    switch, kind, control = "algorithm.use_kl_in_reward", "algorithm.kl_penalty", "algorithm.kl_ctrl"
    adaptive = (f"{control}.target_kl", f"{control}.horizon")
    if builder.value(switch) is not True:
        builder.convert("reward.kl.coef=0", switch)
        for key in (kind, f"{control}.type", f"{control}.kl_coef", *adaptive):
            builder.reject(key, "has no effect without use_kl_in_reward")
        return
    coef = builder.number(f"{control}.kl_coef")
    builder.set("reward.kl.coef", coef, switch, f"{control}.kl_coef")
    name = str(builder.value(kind)).removesuffix("+")  # the + changes a gradient, and a reward has none
    if (estimator := _ESTIMATORS.get(name)) is None:
        reason = f"these estimators can be converted: {', '.join(_ESTIMATORS)}"
        builder.reject(kind, reason, changes_training=True)
    else:
        if estimator != "k1" and coef:
            builder.set("reward.kl.estimator", estimator)
        builder.convert(f"reward.kl.estimator={estimator}", kind)
    match builder.value(f"{control}.type"):
        case "adaptive" if coef:
            for option, key in zip(("target", "horizon"), adaptive, strict=True):
                builder.set(f"reward.kl.{option}", builder.number(key), key)
            builder.convert("reward.kl.target", f"{control}.type")
        case "adaptive" | "fixed":
            builder.convert("nothing: without reward.kl.target, the coefficient is constant", f"{control}.type")
            for key in adaptive:
                builder.reject(key, "has no effect with this kl_ctrl.type and kl_coef, also not in verl")
        case _:
            builder.reject(f"{control}.type", "it can be fixed or adaptive", changes_training=True)
            for key in adaptive:
                builder.reject(key, "kl_ctrl.type is not converted", changes_training=True)
    if builder.get("credit.name") == "remax":
        reason = "verl's remax subtracts the penalties of later tokens only, turnwise's those of all tokens"
        builder.assume(switch, True, reason)
