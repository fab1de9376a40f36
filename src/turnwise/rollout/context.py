"""The dependencies that all conversations of a run share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from turnwise.chat.renderer import Renderer, Thinking
from turnwise.engines.engine import Engine
from turnwise.environments.environment import EnvironmentFactory
from turnwise.rollout.limits import Limits
from turnwise.types import Sampling, Trajectory

__all__ = ["RolloutContext", "Runner", "RunnerFactory"]

Runner = Callable[[Trajectory], Awaitable[Trajectory]]
"""Runs one conversation: fills an empty trajectory and returns it.

A failure is recorded in the trajectory (`Trajectory.fail`); only cancellation is raised. A cancelled runner frees everything
that belongs to the conversation.
"""
RunnerFactory = Callable[["RolloutContext"], Runner]
"""Makes the runner of the conversations that share a context."""


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
    make_runner: RunnerFactory | None = None
    """Makes another runner than `rollout.rollout`, such as a client of a rollout server. None: the conversations run in this
    process. All conversations with this context use the runner, also those of evaluations and baselines."""
