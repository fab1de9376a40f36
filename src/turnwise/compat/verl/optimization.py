"""Converts verl's keys about optimization and about the run; `arguments` converts the other keys."""

from __future__ import annotations

from turnwise.compat.verl.keys import ACTOR, ROLLOUT
from turnwise.compat.verl.losses import convert_losses
from turnwise.compat.verl.recipe_builder import VerlRecipeBuilder

__all__ = ["adapter", "lengths", "optimization", "steps", "trainer"]


_ESTIMATORS = {
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


def adapter(builder: VerlRecipeBuilder) -> None:
    """Set model.lora and model.gradient_checkpointing. With `lora_rank` 0, verl trains all weights."""
    rank, alpha, targets, excluded, checkpointing = (
        f"actor_rollout_ref.model.{name}"
        for name in ("lora_rank", "lora_alpha", "target_modules", "exclude_modules", "enable_gradient_checkpointing")
    )
    if builder.is_set(checkpointing):
        builder.set("model.gradient_checkpointing", bool(builder.value(checkpointing)), checkpointing)
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
    name = _ESTIMATORS.get(str(builder.value(key)))
    if name is None:
        builder.set("credit.name", "grpo")
        builder.reject(
            key,
            f"these estimators can be converted: {', '.join(_ESTIMATORS)}",
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
    if warmup is None and builder.number(share) > 0:
        reason = "the number of steps depends on the rows, which cannot be read here: set lr_warmup_steps"
        builder.reject(share, reason, changes_training=True)
    if warmup is not None:
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
