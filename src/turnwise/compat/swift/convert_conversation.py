"""Converts ms-swift's arguments about multi-turn conversations: the scheduler, its plugins, turns, lengths, the loss mask."""

from __future__ import annotations

from typing import Any

from turnwise.compat.swift.recipe_builder import SwiftRecipeBuilder
from turnwise.compat.swift.scheduler import multi_turns

__all__ = ["convert_conversation"]

_UNBOUNDED_TURNS = 100
"""limits.turns for a scheduler without `max_turns`."""
_ENVIRONMENT = (
    "multi_turn_scheduler", "max_turns", "use_gym_env", "gym_env", "context_manager", "external_plugins",
)  # fmt: skip


def convert_conversation(builder: SwiftRecipeBuilder) -> None:
    """The environment, the limits of a conversation, and the loss mask."""
    values = builder.values
    _convert_lengths(builder)
    name = values.get("multi_turn_scheduler")
    if name is None and (values.get("use_gym_env") or values.get("gym_env")):
        name = "gym_scheduler"
    if name is None:
        builder.reject("max_turns", "there is no scheduler, so a conversation has one turn")
    _check_rollout_command(builder, name)
    turns = (values.get("max_turns") or _UNBOUNDED_TURNS) if name is not None else 1
    builder.set("limits.turns", turns, *(["max_turns"] if name is not None else []))
    arguments = {} if name is None else _scheduler_arguments(builder, name)
    builder.set("environment", {"use": "turnwise.compat.swift:scheduler", "arguments": arguments}, *_ENVIRONMENT)
    _convert_loss_scale(builder, multi_turn=name is not None)


def _convert_lengths(builder: SwiftRecipeBuilder) -> None:
    length = builder.value("max_completion_length")
    builder.set("limits.tokens_per_turn", length, "max_completion_length")
    if builder.values.get("completion_length_limit_scope") == "total":
        builder.set("limits.tokens", length, "completion_length_limit_scope", "max_completion_length")
    else:
        builder.convert("limits.tokens_per_turn", "completion_length_limit_scope")


def _scheduler_arguments(builder: SwiftRecipeBuilder, name: str) -> dict[str, Any]:
    """`environment.arguments` of the scheduler `name`."""
    values = builder.values
    keys = ("max_turns", "use_gym_env", "gym_env", "context_manager")
    arguments = {"name": name, **{key: values[key] for key in keys if values.get(key) is not None}}
    plugins = values.get("external_plugins") or []
    if plugins:
        arguments["external_plugins"] = plugins
    if plugins or name not in multi_turns:  # a plugin's scheduler may use the tokenizer, which is loaded on first use
        arguments["tokenizer"] = values.get("model")
    return arguments


def _check_rollout_command(builder: SwiftRecipeBuilder, name: str | None) -> None:
    """In server mode, the scheduler is an argument of `swift rollout`. Report if that command was not given."""
    if name is None and builder.values.get("vllm_mode") == "server" and builder.given.rollout == "unknown":
        reason = (
            "the arguments of `swift rollout`, which may name a scheduler, are not given, so a conversation has one turn. Give "
            "them too, or vllm_mode=colocate if there is no scheduler"
        )
        builder.reject("vllm_mode", reason, changes_training=True)
    if builder.given.rollout == "comment":
        reason = "the command was read from a comment of the script: check that it is the command you run"
        builder.assume("swift rollout", name, reason)


def _convert_loss_scale(builder: SwiftRecipeBuilder, *, multi_turn: bool) -> None:
    scale = str(builder.values.get("loss_scale") or ("default" if multi_turn else "last_round"))
    scale = scale.removesuffix("+base") if scale != "base" else "default"
    if scale not in ("default", "all", "last_round"):
        kinds = ", ".join(part for part in scale.split("+") if part not in ("default", "all", "last_round"))
        reason = (
            f"default, last_round and all can be converted. {kinds} weighs parts of the text of a turn, and turnwise weighs "
            f"turns: write a function of a turn that returns its weight, and name it in loss_mask (docs/loss_masks.md)"
        )
        builder.reject("loss_scale", reason, changes_training=True)
    elif multi_turn and scale == "last_round":
        builder.set("loss_mask", "last_round", "loss_scale")
    else:
        builder.convert("loss_mask", "loss_scale")
