"""The dependencies that all conversations of a run share."""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.chat.renderer import Renderer, Thinking
from turnwise.engines.engine import Engine
from turnwise.environments.environment import EnvironmentFactory
from turnwise.rollout.limits import Limits
from turnwise.types import Sampling

__all__ = ["RolloutContext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """Everything that a conversation needs besides its row: engine, renderer, environment factory, sampling and limits."""

    engine: Engine
    renderer: Renderer
    make_environment: EnvironmentFactory
    """Called once for each conversation."""
    sampling: Sampling
    """`max_tokens` is replaced by what `limits` allow, and the renderer's stop tokens are added."""
    limits: Limits
    thinking: Thinking = "keep"
    """What happens to the reasoning of earlier turns when a conversation continues: see `rollout.segment_history`."""
    max_concurrent: int = 256
    """Conversations that run at the same time."""
    lockstep: bool = False
    """Whether the engine receives the requests of all running conversations as one batch, in the order of the conversations,
    so that no result depends on timing (deterministic runs)."""
