"""Converts ms-swift's arguments about LoRA and gradient checkpointing."""

from __future__ import annotations

from turnwise.compat.swift.recipe_builder import SwiftRecipeBuilder

__all__ = ["convert_adapter"]

_ADAPTER = ("lora_rank", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora")


def convert_adapter(builder: SwiftRecipeBuilder) -> None:
    """Set model.lora and model.gradient_checkpointing. Without `tuner_type`, ms-swift trains a LoRA adapter of rank 8."""
    checkpointing = builder.values.get("gradient_checkpointing")
    if checkpointing is not None:
        builder.set("model.gradient_checkpointing", bool(checkpointing), "gradient_checkpointing")
    tuner = builder.value("tuner_type")
    if tuner != "lora":
        for key in _ADAPTER:
            builder.reject(key, f"has no effect with tuner_type={tuner}")
        if tuner == "full":
            builder.convert("nothing: without model.lora.rank, all weights are trained", "tuner_type")
        else:
            reason = "turnwise trains all weights (full) or a LoRA adapter (lora)"
            builder.reject("tuner_type", reason, changes_training=True)
        return
    builder.set("model.lora.rank", builder.value("lora_rank"), "tuner_type", "lora_rank")
    builder.set("model.lora.alpha", float(builder.value("lora_alpha")), "lora_alpha")
    for key, option in (("use_rslora", "model.lora.rslora"), ("use_dora", "model.lora.dora")):
        if builder.has(key):
            builder.set(option, bool(builder.value(key)), key)
    if builder.values.get("lora_dropout"):
        reason = "there is no dropout: with it, the trainer's probabilities would not be those of the engine"
        builder.reject("lora_dropout", reason, changes_training=True)
    builder.convert("nothing: there is no dropout", "lora_dropout")
    _convert_targets(builder)


def _convert_targets(builder: SwiftRecipeBuilder) -> None:
    """Set the layers with an adapter. `all-linear` is the default here as there."""
    key = "target_modules"
    given = builder.values.get(key) or ["all-linear"]
    names = [str(name) for name in (given if isinstance(given, list) else [given])]
    if names == ["all-linear"]:
        builder.convert("nothing: all linear layers have an adapter", key)
    elif any(name.startswith("all-") for name in names):
        reason = "name the layers, such as q_proj v_proj; without names, all linear layers have an adapter"
        builder.reject(key, reason, changes_training=True)
    else:
        builder.set("model.lora.target_modules", names, key)
