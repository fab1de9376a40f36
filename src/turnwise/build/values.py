"""Plain values of a recipe: sampling and limits."""

from __future__ import annotations

import dataclasses

from turnwise import types
from turnwise.config.schema import Config
from turnwise.errors import ConfigError
from turnwise.rollout.limits import Limits

__all__ = ["evaluation_sampling", "limits", "sampling"]


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
    changed = {name: value for name, value in config.eval.sampling.model_dump().items() if value is not None}
    return dataclasses.replace(sampling(config), **changed)


def limits(config: Config, *, longest: int | None) -> Limits:
    """The recipe's limits. `longest` is the longest context that the model allows, in tokens; None if it is unknown.

    Raises ConfigError if the recipe asks for a longer context.
    """
    options = config.limits.model_dump()
    if longest is not None:
        if options["context"] is not None and options["context"] > longest:
            raise ConfigError(
                f"limits.context={options['context']} is more than the model's longest context, {longest} tokens: lower it"
            )
        options["context"] = options["context"] or longest
    return Limits(**options)
