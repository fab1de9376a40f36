"""Refuses, at start-up, options of a recipe that have no effect in `turnwise serve` or contradict it."""

from __future__ import annotations

from turnwise.config.schema import Config
from turnwise.errors import ConfigError

__all__ = ["refuse_without_effect_when_serving"]


def refuse_without_effect_when_serving(config: Config) -> None:
    """Refuse recipes that cannot be served. Options of training are those of the trainer, which may use the same recipe.

    Raises ConfigError.
    """
    if config.engine.name == "scripted":
        raise ConfigError(
            "engine.name=scripted cannot be served: its texts belong to the conversations of one call of `turnwise rollout`"
        )
    if config.rollout_server.url is not None:
        raise ConfigError(
            f"rollout_server.url={config.rollout_server.url} is for the trainer: a server samples with its own engine. Remove "
            f"the option: turnwise serve RECIPE rollout_server.url=null"
        )
