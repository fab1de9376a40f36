"""Plain values of a recipe: sampling, limits, the optimizer's options, the learning rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from turnwise import types
from turnwise.config.schema import Config
from turnwise.errors import ConfigError
from turnwise.rollout.limits import Limits

if TYPE_CHECKING:
    from turnwise.training.policy import OptimizerConfig

__all__ = ["evaluation_sampling", "learning_rate", "limits", "model_context", "optimizer_config", "sampling"]


def sampling(config: Config) -> types.Sampling:
    """The distribution that training and rollouts sample from."""
    options = config.sampling
    return types.Sampling(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        stop=tuple(options.stop),
    )


def evaluation_sampling(config: Config) -> types.Sampling:
    """The distribution that evaluations sample from: `eval.sampling`, with null values taken from `sampling`."""
    own = {name: value for name, value in config.eval.sampling.model_dump().items() if value is not None}
    return dataclasses.replace(sampling(config), **own)


def limits(config: Config, *, longest: int | None) -> Limits:
    """The recipe's limits. `longest` is the longest context that the model allows, in tokens; None if it is unknown.

    Raises ConfigError if the recipe asks for a longer context.
    """
    options = config.limits.model_dump()
    if longest is not None:
        if options["context"] is not None and options["context"] > longest:
            raise ConfigError(f"limits.context={options['context']} is more than the {longest} that the model allows")
        options["context"] = options["context"] or longest
    return Limits(**options)


def model_context(config: Mapping[str, Any]) -> int | None:
    """The longest context in a model's config.json, in tokens. Architectures have different names for it."""
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        if isinstance(config.get(name), int):
            return config[name]
    text = config.get("text_config")
    return model_context(text) if isinstance(text, Mapping) else None


def optimizer_config(config: Config) -> OptimizerConfig:
    """The recipe's way of changing the weights."""
    from turnwise.training.policy import OptimizerConfig  # torch

    options = config.train
    return OptimizerConfig(
        lr=options.lr,
        betas=options.betas,
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        kl_coef=options.kl_coef,
        entropy_coef=options.entropy_coef,
    )


def learning_rate(config: Config, step: int) -> float:
    """The learning rate of a step, counted from 0."""
    from turnwise.training.policy import lr_at  # torch

    options = config.train
    return lr_at(
        step, lr=options.lr, schedule=options.lr_schedule, warmup_steps=options.warmup_steps, steps=options.steps
    )
