"""verl's keys of the optimization and of the run, as options of a recipe: the other half of `arguments`."""

from __future__ import annotations

from turnwise.compat.verl.keys import ACTOR, ROLLOUT
from turnwise.compat.verl.ledger import Ledger

__all__ = ["lengths", "optimization", "steps", "trainer"]


def lengths(book: Ledger) -> None:
    """verl bounds the prompt, and all that follows it: what tools and users say counts."""
    prompt = book.whole(f"{ROLLOUT}.prompt_length") or book.whole("data.max_prompt_length") or 0
    answer = book.whole(f"{ROLLOUT}.response_length") or book.whole("data.max_response_length") or 0
    longest = book.whole(f"{ROLLOUT}.max_model_len")
    book.set("limits.context", min(prompt + answer, longest or prompt + answer))
    book.carry("limits.context", "data.max_prompt_length", f"{ROLLOUT}.prompt_length", f"{ROLLOUT}.max_model_len")
    book.set("limits.tokens_per_turn", answer)
    book.set("limits.response_tokens", answer)
    book.carry("limits.response_tokens, limits.context", "data.max_response_length", f"{ROLLOUT}.response_length")


def optimization(book: Ledger) -> None:
    """Credit, loss and optimizer."""
    key = "algorithm.adv_estimator"
    if book.value(key) == "grpo":
        book.set("credit.name", "grpo", key)
    else:
        book.leave(key, "there is grpo: algorithm.adv_estimator=grpo", matters=True, default=True)
    key = "algorithm.norm_adv_by_std_in_grpo"
    book.set("credit.scale", "std" if book.value(key) else "none", key)
    book.set("sampling.top_k", book.whole(f"{ROLLOUT}.top_k") or 0, f"{ROLLOUT}.top_k")
    book.choice(
        f"{ACTOR}.loss_agg_mode", "train.loss_average", {"token-mean": "token", "seq-mean-token-mean": "sequence"}
    )
    dtypes = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
    if book.says(key := f"{ACTOR}.fsdp_config.model_dtype"):
        book.choice(key, "model.dtype", dtypes)
    if book.says(key := "trainer.device"):
        book.choice(key, "model.device", {"cuda": "cuda", "cpu": "cpu"})
    _divergence(book)
    _schedule(book)
    _minibatches(book)


def _divergence(book: Ledger) -> None:
    switch, weight, kind = (f"{ACTOR}.{name}" for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type"))
    if book.value(switch) is not True:
        book.carry("train.kl_coef=0", switch)
        for key in (weight, kind):
            book.leave(key, "belongs to use_kl_loss, which is off")
        return
    book.set("train.kl_coef", book.value(weight), switch, weight)
    if book.value(kind) not in ("low_var_kl", "k3"):
        book.leave(kind, "the estimator is k3, which is verl's low_var_kl", matters=True)
    book.carry("train.kl_coef", kind)


def _schedule(book: Ledger) -> None:
    old, new = f"{ACTOR}.optim.warmup_style", f"{ACTOR}.optim.lr_scheduler_type"
    for key in (old, new):
        if book.says(key):
            book.choice(key, "train.lr_schedule", {"constant": "constant", "cosine": "cosine"})
        book.carry("train.lr_schedule", key)


def _minibatches(book: Ledger) -> None:
    key = f"{ACTOR}.ppo_mini_batch_size"
    rows, size = book.whole("data.train_batch_size") or 0, book.whole(key) or 0
    if not size or rows % size:
        book.leave(key, f"the {rows} rows of data.train_batch_size cannot be divided by it", matters=True, default=True)
        return
    book.set("train.minibatches", rows // size, key)
    clips = [f"{ACTOR}.{name}" for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")]
    if rows == size and book.value(f"{ACTOR}.ppo_epochs") == 1:
        for clip in clips:
            book.leave(clip, "has no effect with one optimizer step a batch: the ratio is 1")
        return
    for clip, option in zip(clips[1:3], ("train.clip_low", "train.clip_high"), strict=True):
        book.set(option, book.value(clip if book.says(clip) else clips[0]), clip if book.says(clip) else clips[0])
    for clip in clips[:3]:
        if clip not in book.carried:  # a null beside it, or one that the two others have replaced
            book.carry("train.clip_low, train.clip_high, by its neighbours", clip)
    book.leave(clips[3], "a negative advantage has no second bound", matters=True)


def steps(book: Ledger, rows: int | None) -> int | None:
    """How many steps there are: as many as are given, or as the epochs over `rows` have; None where nobody knows."""
    total, epochs = "trainer.total_training_steps", "trainer.total_epochs"
    if (many := book.whole(total)) is not None:
        book.leave(epochs, "total_training_steps says how long it takes")
    elif rows is None:
        reason = "how many steps they have depends on the rows, which cannot be read here: say total_training_steps"
        book.leave(epochs, reason, matters=True, default=True)
    else:
        size = book.whole("data.train_batch_size") or 1
        many = (book.whole(epochs) or 0) * (rows // size)
        if not many:
            book.leave(
                epochs, f"the {rows} rows are fewer than data.train_batch_size={size}", matters=True, default=True
            )
    if many:
        book.set("train.steps", many, total, epochs)
    _warmup(book, many)
    return many


def _warmup(book: Ledger, steps: int | None) -> None:
    number, share = f"{ACTOR}.optim.lr_warmup_steps", f"{ACTOR}.optim.lr_warmup_steps_ratio"
    warmup = book.whole(number)
    if warmup is None and steps is not None:
        warmup = int(book.number(share) * steps)
    if warmup is not None:
        book.set("train.warmup_steps", warmup)
    book.carry("train.warmup_steps", number, share)


def trainer(book: Ledger, steps: int | None) -> None:
    """Where the run is written, what is kept, and when it is evaluated."""
    folder = ("trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name")
    if book.says(folder[0]):
        book.set("output", book.value(folder[0]), folder[0])
        for key in folder[1:]:
            book.leave(key, "default_local_dir says where the run is written")
    elif any(map(book.says, folder)):
        book.set("output", f"checkpoints/{book.value(folder[1])}/{book.value(folder[2])}", *folder)
    book.choice("trainer.resume_mode", "resume", {"auto": "auto", "disable": "never"})
    every = book.whole("trainer.save_freq") or steps
    if every:
        book.set("checkpoint.every", min(every, steps or every))
    book.carry("checkpoint.every", "trainer.save_freq")
    if (keep := book.whole("trainer.max_actor_ckpt_to_keep")) is not None:
        book.set("checkpoint.keep", keep, "trainer.max_actor_ckpt_to_keep")
    else:
        book.leave("trainer.max_actor_ckpt_to_keep", "two checkpoints stay: checkpoint.keep")
    held_out = {
        "trainer.test_freq": ("eval.every", book.whole("trainer.test_freq") or 0),
        "data.val_max_samples": ("eval.max_rows", book.whole("data.val_max_samples")),
        f"{ROLLOUT}.val_kwargs.n": ("eval.samples_per_row", book.whole(f"{ROLLOUT}.val_kwargs.n")),
    }
    sampling = {
        f"{ROLLOUT}.val_kwargs.temperature": ("temperature", book.number(f"{ROLLOUT}.val_kwargs.temperature")),
        f"{ROLLOUT}.val_kwargs.top_p": ("top_p", book.number(f"{ROLLOUT}.val_kwargs.top_p")),
        f"{ROLLOUT}.val_kwargs.top_k": ("top_k", book.whole(f"{ROLLOUT}.val_kwargs.top_k") or 0),
    }
    for key, (option, drawn) in sampling.items():
        if "eval" in book.recipe.get("data", {}):
            book.set(f"eval.sampling.{option}", drawn, key)
        else:
            book.leave(key, "there are no held-out rows: data.val_files")
    for key, (option, value) in held_out.items():
        if "eval" not in book.recipe.get("data", {}):
            book.leave(key, "there are no held-out rows: data.val_files")
        elif value:
            book.set(option, value, key)
        else:
            book.carry(f"{option}, which is not set", key)
