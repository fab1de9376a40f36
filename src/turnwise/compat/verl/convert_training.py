"""Converts verl's keys about training: optimization, steps, policy loss, KL divergence and rollout correction.

Reads no files; `convert` calls the functions."""

from __future__ import annotations

from typing import Any

from turnwise.compat.conversion import convert_kernels, convert_loggers
from turnwise.compat.verl.keys import ACTOR, ROLLOUT, VerlRecipeBuilder

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
    """Report keys that have no effect because importance weights, or rejection, are switched off."""
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


_LOSSES = {
    "vanilla": "ppo_clip",
    "gspo": "gspo",
    "sapo": "sapo",
    "cispo": "cispo",
    "gpg": "reinforce",
    "clip_cov": "ppo_clip",
    "kl_cov": "ppo_clip",
}
"""verl's values of loss_mode, and their names here."""

_MODE = f"{ACTOR}.policy_loss.loss_mode"
_OF_COVARIANCES = {
    "clip_cov": {
        f"{ACTOR}.policy_loss.clip_cov_ratio": "loss.clip_cov_ratio",
        f"{ACTOR}.policy_loss.clip_cov_lb": "loss.clip_cov_low",
        f"{ACTOR}.policy_loss.clip_cov_ub": "loss.clip_cov_high",
    },
    "kl_cov": {
        f"{ACTOR}.policy_loss.kl_cov_ratio": "loss.kl_cov_ratio",
        f"{ACTOR}.policy_loss.ppo_kl_coef": "loss.kl_cov_coef",
    },
}
"""For each loss_mode that chooses tokens by covariances: verl's keys, and their options here."""

_KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
"""verl's values of kl_loss_type, and their names here. With a `+`, verl uses the gradient of k2."""


def convert_losses(builder: VerlRecipeBuilder) -> None:
    """Set the sections loss and correction. train.minibatches, train.ppo_epochs and model.dtype are set before."""
    one_step = builder.get("train.minibatches", 1) == 1 and builder.get("train.ppo_epochs", 1) == 1
    name = loss_of_bypass_mode(builder) or _named_loss(builder)
    if name != "ppo_clip":
        builder.set("loss.name", name)
    _normalizer(builder, name)
    _clipping(builder, name, one_step=one_step)
    _covariances(builder, one_step=one_step)
    _temperatures(builder, name, one_step=one_step)
    _divergence(builder)
    _divergence_in_reward(builder)
    convert_rollout_correction(builder, one_step=one_step)


def _named_loss(builder: VerlRecipeBuilder) -> str:
    key, mode = _MODE, builder.value(_MODE)
    name = _LOSSES.get(str(mode))
    if name is None:
        builder.reject(
            key,
            f"these losses can be converted: {', '.join(_LOSSES)}; one of your own is a function (loss: path/to/file.py:name, "
            f"docs/own_algorithm.md)",
            changes_training=True,
        )
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
    mode = None if builder.value(_BYPASS) is True else builder.value(_MODE)
    if mode == "kl_cov":  # without clipping: the ratio is at least 0, and never as large as the upper bound
        builder.set("loss.clip_low", 1.0)
        builder.set("loss.clip_high", 1e6)
    for key in (clip, low, high):
        if key not in builder.converted:  # null, or replaced by the other two keys
            builder.convert("loss.clip_low, loss.clip_high, from the other clip_ratio keys", key)
    if name != "ppo_clip" or mode in _OF_COVARIANCES:
        of = f"loss_mode={mode}" if name == "ppo_clip" else f"loss.name={name}"
        builder.reject(dual, f"has no effect with {of}, also not in verl")
    elif builder.is_set(dual):
        builder.set("loss.dual_clip", builder.value(dual), dual)


def _covariances(builder: VerlRecipeBuilder, *, one_step: bool) -> None:
    """Set the options of Clip-Cov and KL-Cov. verl chooses the tokens in each micro-batch, turnwise among all of a step."""
    mode = None if builder.value(_BYPASS) is True else builder.value(_MODE)
    for kind, options in _OF_COVARIANCES.items():
        for key, option in options.items():
            if kind != mode:
                builder.reject(key, f"has no effect without loss_mode={kind}, also not in verl")
            elif kind == "kl_cov" and one_step:
                builder.reject(key, "has no effect with one optimizer step per batch: the divergence is 0")
            else:
                builder.set(option, builder.number(key), key)


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
    estimator = _KL_ESTIMATORS.get(name.removesuffix("+"))
    if estimator is None:
        builder.reject(kind, f"these estimators can be converted: {', '.join(_KL_ESTIMATORS)}", changes_training=True)
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
    if (estimator := _KL_ESTIMATORS.get(name)) is None:
        reason = f"these estimators can be converted: {', '.join(_KL_ESTIMATORS)}"
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


_ADVANTAGE_ESTIMATORS = {
    "gae": "gae",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "remax": "remax",
    "opo": "opo",
    "gpg": "gpg",
}
"""verl's estimators, and their names here."""


def lengths(builder: VerlRecipeBuilder) -> None:
    """Set the limits. verl bounds the prompt, and everything after it: messages of tools and users count too."""
    prompt = builder.count(f"{ROLLOUT}.prompt_length") or builder.count("data.max_prompt_length") or 0
    answer = builder.count(f"{ROLLOUT}.response_length") or builder.count("data.max_response_length") or 0
    longest = builder.count(f"{ROLLOUT}.max_model_len")
    builder.set("limits.context", min(prompt + answer, longest or prompt + answer))
    builder.convert("limits.context", "data.max_prompt_length", f"{ROLLOUT}.prompt_length", f"{ROLLOUT}.max_model_len")
    builder.set("limits.tokens_per_turn", answer)
    builder.set("limits.response_tokens", answer)
    builder.convert("limits.response_tokens, limits.context", "data.max_response_length", f"{ROLLOUT}.response_length")


_AUXILIARY = f"{ACTOR}.megatron.override_transformer_config.moe_aux_loss_coeff"


def _experts(builder: VerlRecipeBuilder) -> None:
    """Set model.router_replay and loss.router_aux_loss_coef. verl's R3 replays the experts of the engine."""
    mode = f"{ACTOR}.router_replay.mode"
    if builder.is_set(mode):
        if builder.value(mode) in ("R3", "disabled"):
            builder.set("model.router_replay", builder.value(mode) == "R3", mode)
        else:
            reason = "turnwise replays the experts that the engine chose while sampling: use mode R3"
            builder.reject(mode, reason, changes_training=True)
    if builder.is_set(_AUXILIARY):
        builder.set("loss.router_aux_loss_coef", builder.number(_AUXILIARY), _AUXILIARY)


def adapter(builder: VerlRecipeBuilder) -> None:
    """Set model.lora, model.gradient_checkpointing, model.kernels and what concerns experts. With `lora_rank` 0, all weights are
    trained."""
    rank, alpha, targets, excluded, checkpointing = (
        f"actor_rollout_ref.model.{name}"
        for name in ("lora_rank", "lora_alpha", "target_modules", "exclude_modules", "enable_gradient_checkpointing")
    )
    if builder.is_set(checkpointing):
        builder.set("model.gradient_checkpointing", bool(builder.value(checkpointing)), checkpointing)
    convert_kernels(builder, "actor_rollout_ref.model.use_liger")
    _experts(builder)
    if not builder.count(rank):
        builder.convert("nothing: without model.lora.rank, all weights are trained", rank)
        for key in (alpha, targets, excluded):
            builder.reject(key, "has no effect without lora_rank")
        return
    builder.set("model.lora.rank", builder.count(rank), rank)
    builder.set("model.lora.alpha", builder.number(alpha), alpha)
    names = builder.value(targets)
    if names in (None, "all-linear"):
        builder.convert("nothing: all linear layers have an adapter", targets)
    else:
        builder.set("model.lora.target_modules", [names] if isinstance(names, str) else list(names), targets)
    if builder.is_set(excluded):
        builder.reject(excluded, "name the layers with an adapter in target_modules", changes_training=True)
    builder.convert("nothing: no layer is excluded", excluded)


def optimization(builder: VerlRecipeBuilder) -> None:
    """Set credit, loss and optimizer."""
    _credit(builder)
    builder.set("sampling.top_k", builder.count(f"{ROLLOUT}.top_k") or 0, f"{ROLLOUT}.top_k")
    dtypes = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
    if builder.is_set(key := f"{ACTOR}.fsdp_config.model_dtype"):
        builder.choice(key, "model.dtype", dtypes)
    if builder.is_set(key := "trainer.device"):
        builder.choice(key, "model.device", {"cuda": "cuda", "cpu": "cpu"})
    _schedule(builder)
    _optimizer(builder)
    _minibatches(builder)
    _filter_groups(builder)
    convert_losses(builder)


def _filter_groups(builder: VerlRecipeBuilder) -> None:
    """Set train.dynamic_sampling. verl samples `train_batch_size` rows again and again until enough groups are left."""
    switch, metric, batches = (
        f"algorithm.filter_groups.{name}" for name in ("enable", "metric", "max_num_gen_batches")
    )
    if builder.value(switch) is not True:
        for key in (switch, metric, batches):
            builder.reject(key, "has no effect without filter_groups.enable")
        return
    most = builder.count(batches) or 0
    if most:
        # the first batch counts as well in verl
        builder.set("train.dynamic_sampling", max(1, most - 1), switch, batches)
    else:
        reason = (
            "0 samples without end in verl, and train.dynamic_sampling is a number of times: set max_num_gen_batches"
        )
        builder.reject(batches, reason, changes_training=True, even_default=True)
        builder.convert("train.dynamic_sampling", switch)
    if builder.is_set(metric) and builder.value(metric) not in ("acc", "score", "seq_reward", "seq_final_reward"):
        builder.reject(metric, "groups are compared by their rewards", changes_training=True)
    else:
        builder.convert("train.dynamic_sampling (groups are compared by their rewards)", metric)


def _credit(builder: VerlRecipeBuilder) -> None:
    key, scale = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"
    name = _ADVANTAGE_ESTIMATORS.get(str(builder.value(key)))
    if name is None:
        builder.set("credit.name", "grpo")
        builder.reject(
            key,
            f"these estimators can be converted: {', '.join(_ADVANTAGE_ESTIMATORS)}; one of your own is a function "
            f"(credit: path/to/file.py:name, docs/own_algorithm.md)",
            changes_training=True,
            even_default=True,
        )
    else:
        builder.set("credit.name", name, key)
    if name in (None, "grpo"):
        builder.set("credit.scale", "std" if builder.value(scale) else "none", scale)
    else:
        builder.reject(scale, f"has no effect with adv_estimator={builder.value(key)}, also not in verl")
    if name == "reinforce_pp":
        builder.set("credit.gamma", float(builder.number("algorithm.gamma")), "algorithm.gamma")
    if name == "gae":
        _critic(builder)
    if name == "gpg":
        reason = "alpha counts conversations without a gradient here, and rewards of 0 in verl"
        builder.assume(key, builder.value(key), reason)


def _critic(builder: VerlRecipeBuilder) -> None:
    """Set the options of gae and of its critic. Apart from these, the critic has the options of the policy."""
    builder.set("credit.gamma", float(builder.number("algorithm.gamma")), "algorithm.gamma")
    builder.set("credit.lam", float(builder.number("algorithm.lam")), "algorithm.lam")
    builder.set("critic.lr", builder.value("critic.optim.lr"), "critic.optim.lr")
    if builder.is_set(key := "critic.model.path"):
        builder.set("critic.path", builder.value(key), key)
    if warmup := builder.count(key := "trainer.critic_warmup"):
        builder.set("critic.warmup_steps", warmup, key)
    else:
        builder.convert("critic.warmup_steps=0", key)
    rows, size = builder.count("data.train_batch_size"), builder.count(f"{ACTOR}.ppo_mini_batch_size")
    if rows == size and builder.value(f"{ACTOR}.ppo_epochs") == 1:
        builder.reject("critic.cliprange_value", "has no effect with one optimizer step per batch")
    else:
        builder.set("critic.clip", builder.value("critic.cliprange_value"), "critic.cliprange_value")
    for name in (
        "ppo_epochs",
        "ppo_mini_batch_size",
        "loss_agg_mode",
        "optim.weight_decay",
        "optim.betas",
        "optim.optimizer",
        "optim.optimizer_impl",
        "grad_clip",
    ):
        _as_in_policy(builder, f"critic.{name}", f"{ACTOR}.{name}")
    for name in ("lora_rank", "lora_alpha", "target_modules"):
        _as_in_policy(builder, f"critic.model.{name}", f"actor_rollout_ref.model.{name}")
    for name, constant in _CONSTANT_RATE.items():
        key = f"critic.optim.{name}"
        reason = "the learning rate of the critic is constant"
        builder.reject(key, reason, changes_training=builder.value(key) not in (*constant, None))


_CONSTANT_RATE = {
    "lr_warmup_steps": (-1, 0),
    "lr_warmup_steps_ratio": (0.0,),
    "lr_scheduler_type": ("constant",),
    "warmup_style": ("constant",),
}
"""verl's options of the critic's learning rate, and the values of a constant one."""


def _as_in_policy(builder: VerlRecipeBuilder, key: str, of_policy: str) -> None:
    """Report an option of the critic, which has the same value as that of the policy here."""
    same = builder.value(key) == builder.value(of_policy)
    builder.reject(key, f"the critic has the value of {of_policy}", changes_training=not same)


def _schedule(builder: VerlRecipeBuilder) -> None:
    old, new = f"{ACTOR}.optim.warmup_style", f"{ACTOR}.optim.lr_scheduler_type"
    for key in (old, new):
        if builder.is_set(key):
            builder.choice(key, "train.lr_schedule", {"constant": "constant", "cosine": "cosine"})
        builder.convert("train.lr_schedule", key)


def _minibatches(builder: VerlRecipeBuilder) -> None:
    key = f"{ACTOR}.ppo_mini_batch_size"
    rows, size = builder.count("data.train_batch_size") or 0, builder.count(key) or 0
    if not size or rows % size:
        builder.reject(
            key,
            f"the {rows} rows of data.train_batch_size cannot be divided by it",
            changes_training=True,
            even_default=True,
        )
        return
    builder.set("train.minibatches", rows // size, key)


_OPTIMIZERS = {
    ("torch.optim", "AdamW"): "adamw",
    ("torch.optim", "Adafactor"): "adafactor",
    ("bitsandbytes.optim", "AdamW8bit"): "adamw_8bit",
}
"""verl's optimizer_impl and optimizer, and train.optimizer.name."""


def _optimizer(builder: VerlRecipeBuilder) -> None:
    module, name, betas = (f"{ACTOR}.optim.{key}" for key in ("optimizer_impl", "optimizer", "betas"))
    ours = _OPTIMIZERS.get((str(builder.value(module)), str(builder.value(name))))
    if ours is None:
        reason = (
            "these optimizers can be converted: AdamW and Adafactor of torch.optim, and AdamW8bit of bitsandbytes.optim"
        )
        for key in (module, name):
            builder.reject(key, reason, changes_training=True)
        return
    if ours == "adamw":
        builder.convert("train.optimizer.name=adamw", module, name)
        return
    builder.set("train.optimizer.name", ours, module, name)
    if ours == "adafactor":
        builder.recipe["train"].pop("betas", None)
        builder.reject(betas, "has no effect with Adafactor, also not in verl")


def steps(builder: VerlRecipeBuilder, rows: int | None) -> int | None:
    """Set train.steps: the given number, or the steps of the given epochs over `rows` rows. Returns the number.

    If the number of rows is not known, sets train.epochs and returns None.
    """
    total, epochs = "trainer.total_training_steps", "trainer.total_epochs"
    if (count := builder.count(total)) is not None:
        builder.reject(epochs, "total_training_steps gives the length of the training")
    elif rows is None:
        passes = builder.count(epochs) or 1
        builder.set("train.epochs", passes, total, epochs)
        reason = "verl leaves out the rows at the end of an epoch that do not fill a batch, turnwise uses them in the next epoch"
        builder.assume("train.epochs", passes, reason)
    else:
        size = builder.count("data.train_batch_size") or 1
        count = (builder.count(epochs) or 0) * (rows // size)
        if not count:
            builder.reject(
                epochs,
                f"the {rows} rows are fewer than data.train_batch_size={size}",
                changes_training=True,
                even_default=True,
            )
    if count:
        builder.set("train.steps", count, total, epochs)
    _warmup(builder, count)
    return count


def _warmup(builder: VerlRecipeBuilder, steps: int | None) -> None:
    number, share = f"{ACTOR}.optim.lr_warmup_steps", f"{ACTOR}.optim.lr_warmup_steps_ratio"
    warmup = builder.count(number)
    if warmup is None and steps is not None:
        warmup = int(builder.number(share) * steps)
    if warmup is None:  # the number of steps depends on the rows, which cannot be read here
        warmup = builder.number(share)
    if warmup:
        builder.set("train.warmup_steps", warmup)
    builder.convert("train.warmup_steps", number, share)


def trainer(builder: VerlRecipeBuilder, steps: int | None) -> None:
    """Set the run's directory, checkpoints and evaluation."""
    folder = ("trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name")
    if builder.is_set(folder[0]):
        builder.set("output", builder.value(folder[0]), folder[0])
        for key in folder[1:]:
            builder.reject(key, "default_local_dir names the directory of the run")
    elif any(map(builder.is_set, folder)):
        builder.set("output", f"checkpoints/{builder.value(folder[1])}/{builder.value(folder[2])}", *folder)
    project, run = (key if builder.is_set(key) else None for key in folder[1:])
    convert_loggers(builder, "trainer.logger", project=project, run=run)
    builder.choice("trainer.resume_mode", "resume", {"auto": "auto", "disable": "never"})
    save_steps = builder.count("trainer.save_freq") or steps
    if save_steps:
        builder.set("checkpoint.every", min(save_steps, steps or save_steps))
    builder.convert("checkpoint.every", "trainer.save_freq")
    if (keep := builder.count("trainer.max_actor_ckpt_to_keep")) is not None:
        builder.set("checkpoint.keep", keep, "trainer.max_actor_ckpt_to_keep")
    else:
        builder.reject("trainer.max_actor_ckpt_to_keep", "two checkpoints are kept: checkpoint.keep")
    held_out = {
        "trainer.test_freq": ("eval.every", builder.count("trainer.test_freq") or 0),
        "data.val_max_samples": ("eval.max_rows", builder.count("data.val_max_samples")),
        f"{ROLLOUT}.val_kwargs.n": ("eval.samples_per_row", builder.count(f"{ROLLOUT}.val_kwargs.n")),
    }
    sampling = {
        f"{ROLLOUT}.val_kwargs.temperature": ("temperature", builder.number(f"{ROLLOUT}.val_kwargs.temperature")),
        f"{ROLLOUT}.val_kwargs.top_p": ("top_p", builder.number(f"{ROLLOUT}.val_kwargs.top_p")),
        f"{ROLLOUT}.val_kwargs.top_k": ("top_k", builder.count(f"{ROLLOUT}.val_kwargs.top_k") or 0),
    }
    for key, (option, value) in sampling.items():
        if "eval" in builder.recipe.get("data", {}):
            builder.set(f"eval.sampling.{option}", value, key)
        else:
            builder.reject(key, "there are no held-out rows: data.val_files")
    for key, (option, value) in held_out.items():
        if "eval" not in builder.recipe.get("data", {}):
            builder.reject(key, "there are no held-out rows: data.val_files")
        elif value:
            builder.set(option, value, key)
        else:
            builder.convert(f"{option}, which is not set", key)
