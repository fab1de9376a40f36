"""Converts verl's keys about on-policy distillation (`distillation.*`) into the section `teacher`.

verl has two forms: the policy gradient of the sampled tokens' log-ratio (`use_policy_gradient` with `k1`), which is
`teacher.signal: sampled`, and a term of the loss (`forward_kl_topk`), which is `teacher.signal: divergence`. Knows these keys;
the keys of the loss, of credit and of sampling are converted before."""

from __future__ import annotations

import os
from collections.abc import Mapping

from turnwise.compat.conversion import MISSING, at, leaves
from turnwise.compat.verl.keys import ACTOR, ROLLOUT, VerlRecipeBuilder

__all__ = ["convert_teacher"]

_PLACE = "distillation"
_SWITCH, _MODELS, _COLUMN = (f"{_PLACE}.{name}" for name in ("enabled", "teacher_models", "teacher_key"))
_LOSS = f"{_PLACE}.distillation_loss"
_MODE, _TOP_K, _REWARDS, _COEF, _CLIP, _FLOOR, _GRADIENT = (
    f"{_LOSS}.{name}"
    for name in (
        "loss_mode",
        "topk",
        "use_task_rewards",
        "distillation_loss_coef",
        "loss_max_clamp",
        "log_prob_min_clamp",
        "use_policy_gradient",
    )
)
_CLIPPING = tuple(f"{_LOSS}.{name}" for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"))


def convert_teacher(builder: VerlRecipeBuilder) -> None:
    """Set teacher, and credit=none without task rewards. credit, loss, sampling and train are set before."""
    on = builder.value(_SWITCH)
    if on is not True:
        if on not in (False, None):
            builder.reject(_SWITCH, "it must be true or false", changes_training=True)
        builder.convert("nothing: there is no teacher", _SWITCH)
        return  # the table of keys without effect has the others
    builder.convert("teacher", _SWITCH)
    _models(builder)
    if builder.value(_REWARDS) is True:
        builder.convert("nothing: rewards are learnt from as well", _REWARDS)
        builder.set("teacher.coef", builder.number(_COEF), _COEF)
    else:
        _without_rewards(builder)
    _signal(builder)
    policy = f"{_LOSS}.policy_loss_mode"
    builder.reject(policy, "the loss of the policy is used; verl has vanilla only")
    for key in (
        f"{_PLACE}.n_gpus_per_node",
        f"{_PLACE}.nnodes",
        f"{_LOSS}.use_chunked_topk",
        f"{_LOSS}.chunked_topk_chunk_size",
    ):
        builder.reject(
            key, "how verl distributes work and memory; a local teacher is divided among the ranks as the policy is"
        )


def _models(builder: VerlRecipeBuilder) -> None:
    """Set the teachers. With others beside it, verl ignores the entry `teacher_model`."""
    given = at(builder.tree, _MODELS)
    models = (
        {name: one for name, one in given.items() if isinstance(one, Mapping)} if isinstance(given, Mapping) else {}
    )
    others = {name: one for name, one in models.items() if name != "teacher_model"}
    if others and "teacher_model" in models:
        for key, _ in leaves(models["teacher_model"], f"{_MODELS}.teacher_model."):
            builder.reject(key, "verl ignores the entry teacher_model beside others: give it another name")
    models = others or models
    unnamed = [name for name, one in models.items() if not one.get("model_path") or (others and one.get("key") is None)]
    if not models or unnamed:
        what = f"{_MODELS}.{unnamed[0]} needs model_path, and key beside others" if unnamed else "name a teacher"
        builder.reject(_SWITCH, what, changes_training=True)
        return
    paths = {name: os.path.expanduser(str(one["model_path"])) for name, one in models.items()}
    keys = [f"{_MODELS}.{name}.{part}" for name in models for part in ("model_path", "key")]
    if others:
        entries = [{"name": str(one["key"]), "path": paths[name]} for name, one in models.items()]
        builder.set("teacher.models", entries, *keys)
    else:
        builder.set("teacher.path", next(iter(paths.values())), *keys)
    if len(others) > 1:
        builder.set("teacher.column", builder.value(_COLUMN), _COLUMN)
    else:
        builder.reject(_COLUMN, "it has no effect with one teacher, also not in verl")
    for name, one in models.items():
        for key, _ in leaves(one, f"{_MODELS}.{name}."):
            if key not in keys:
                builder.reject(
                    key, "verl runs the teacher on servers of its own; for that, set teacher.url in the recipe"
                )
    reason = (
        "verl runs the teacher on GPUs of its own; here it is loaded beside the policy, or set teacher.url to a server"
    )
    builder.assume("teacher.path", ", ".join(paths.values()), reason)
    if builder.value(f"{ROLLOUT}.temperature") != 1:
        reason = "both distributions have this temperature here; the log-probabilities of verl's teacher have the temperature 1"
        builder.assume(f"{ROLLOUT}.temperature", builder.value(f"{ROLLOUT}.temperature"), reason)


def _without_rewards(builder: VerlRecipeBuilder) -> None:
    """Learn from the teacher alone: verl leaves the whole loss of the policy out."""
    estimator = "algorithm.adv_estimator"
    builder.convert("credit.name=none", _REWARDS)
    builder.reject(_COEF, "it has no effect without use_task_rewards, also not in verl")
    if builder.get("credit.name") == "gae":
        reason = "without use_task_rewards no critic is needed: set grpo"
        builder.reject(estimator, reason, changes_training=True, even_default=True)
        return
    builder.recipe["credit"] = {}
    builder.set("credit.name", "none")
    for key in (estimator, "algorithm.norm_adv_by_std_in_grpo", "algorithm.gamma"):
        builder.reject(key, "it has no effect without use_task_rewards, also not in verl")
    for key in (f"{ACTOR}.use_kl_loss", f"{ACTOR}.entropy_coeff"):
        if builder.value(key):
            reason = "without use_task_rewards, verl leaves this term out: remove it"
            builder.reject(key, reason, changes_training=True)


def _signal(builder: VerlRecipeBuilder) -> None:
    mode, gradient = str(builder.value(_MODE)), builder.value(_GRADIENT) is True
    # the gradient of k2, half of the squared difference, is that of the policy gradient with the difference as advantage
    if mode in (("kl", "k1") if gradient else ("mse", "k2")):
        _sampled(builder, mode)
    elif mode == "forward_kl_topk" and not gradient:
        _divergence(builder)
    else:
        reason = (
            "these can be converted: k1 with use_policy_gradient=True, and k2 or forward_kl_topk with "
            "use_policy_gradient=False. The gradients of the others are not those of a divergence from the teacher"
        )
        builder.reject(_MODE, reason, changes_training=True, even_default=True)
        for key in (_GRADIENT, _TOP_K, _CLIP, _FLOOR, *_CLIPPING):
            builder.reject(key, "loss_mode is not converted")


def _sampled(builder: VerlRecipeBuilder, mode: str) -> None:
    builder.set("teacher.signal", "sampled", _MODE, _GRADIENT)
    builder.reject(_TOP_K, "it has no effect with this loss_mode, also not in verl")
    builder.reject(_FLOOR, "it has no effect with this loss_mode, also not in verl")
    one_step = builder.get("train.minibatches", 1) == 1 and builder.get("train.ppo_epochs", 1) == 1
    if builder.get("loss.name", "ppo_clip") != "ppo_clip":
        reason = "the part of the teacher has the loss vanilla in verl: set loss_mode=vanilla"
        builder.reject(f"{ACTOR}.policy_loss.loss_mode", reason, changes_training=True, even_default=True)
    if mode in ("mse", "k2"):
        if builder.value(_CLIP) is not None:
            reason = "it bounds half of the squared difference: set loss_mode=k1 and use_policy_gradient=True"
            builder.reject(_CLIP, reason, changes_training=True)
        if not one_step:
            reason = "with several optimizer steps, the log-ratio of k2 changes in each: set k1 with use_policy_gradient=True"
            builder.reject(_MODE, reason, changes_training=True)
    elif builder.value(_CLIP) is not None:
        builder.set("teacher.clip", builder.number(_CLIP), _CLIP)
    builder.convert("nothing: the difference has no bound", _CLIP)
    if one_step:
        for key in _CLIPPING:
            builder.reject(key, "has no effect with one optimizer step per batch: the ratio is 1")
        return
    if builder.get("credit.name") != "none":
        reason = "with several optimizer steps, verl clips the ratio of the teacher's part apart: set one (ppo_mini_batch_size)"
        builder.reject(_REWARDS, reason, changes_training=True, even_default=True)
    for key, option in zip(_CLIPPING[1:], ("loss.clip_low", "loss.clip_high"), strict=True):
        builder.set(option, builder.value(key), key)
    builder.reject(_CLIPPING[0], "clip_ratio_low and clip_ratio_high are used, also in verl")


def _divergence(builder: VerlRecipeBuilder) -> None:
    builder.set("teacher.signal", "divergence", _MODE, _GRADIENT)
    builder.set("teacher.divergence", "forward_kl", _MODE)
    builder.set("teacher.top_k", builder.count(_TOP_K), _TOP_K)
    reason = "verl adds up the terms of these tokens only; here all other tokens are one class beside them"
    builder.assume(_TOP_K, builder.value(_TOP_K), reason)
    for key in (_CLIP, _FLOOR):
        if at(builder.tree, key) not in (MISSING, None):
            reason = "the divergence has no bounds here, beyond which tokens have no gradient: set null"
            builder.reject(key, reason, changes_training=True)
        builder.convert("nothing: there is no bound", key)
    for key in _CLIPPING:
        builder.reject(key, "has no effect without use_policy_gradient, also not in verl")
