"""Builds the objects that all conversations of a recipe share: the renderer and the rollout context."""

from __future__ import annotations

from pathlib import Path

from turnwise.build.environments import Environments
from turnwise.build.values import limits, sampling
from turnwise.chat.renderer import Renderer
from turnwise.config.schema import Config
from turnwise.engines.engine import Engine
from turnwise.ray_workers.rollouts import RayRollouts
from turnwise.rollout.rollout import RolloutContext
from turnwise.rollout_server.client import RolloutClient
from turnwise.types import Sampling

__all__ = ["renderer", "rollout_context"]


def renderer(config: Config, source: str | Path | None = None) -> Renderer:
    """The renderer of the model in `source`, which is model.path unless given (a resumed run has its own copy).

    Raises TemplateError.
    """
    return Renderer.from_pretrained(
        source or config.model.path,
        sanity=config.tokenization_sanity_check,
        tool_format=config.tool_format,
        chat_template_kwargs=config.model.chat_template_kwargs,
        describe_tools=config.tool_calls.describe,
        unchecked=config.override_checks,
    )


def rollout_context(
    config: Config,
    renderer: Renderer,
    engine: Engine,
    environments: Environments,
    *,
    longest: int | None,
    sampled: Sampling | None = None,
) -> RolloutContext:
    """The shared context of the recipe's conversations. `longest` is the model's longest context in tokens, if known; `sampled`
    is the distribution that the conversations sample from, if it is not that of training.

    Raises ConfigError if the recipe's limits exceed it.
    """
    context = RolloutContext(
        engine=engine,
        renderer=renderer,
        make_environment=environments,
        sampling=sampled or sampling(config),
        limits=limits(config, longest=longest),
        thinking=config.thinking,
        max_concurrent=config.max_concurrent,
        lockstep=config.deterministic,
        make_runner=engine.make_runner if isinstance(engine, RolloutClient | RayRollouts) else None,
        runner_supports_lockstep=not isinstance(engine, RayRollouts),
    )
    return environments.use_context(context)
