"""The dependencies that all conversations of a run share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from turnwise.chat.renderer import Renderer, Thinking
from turnwise.engines.engine import Engine
from turnwise.environments.environment import EnvironmentFactory
from turnwise.errors import ConfigError
from turnwise.rollout.limits import Limits
from turnwise.services.chat_endpoint import ChatService
from turnwise.types import Sampling, Trajectory

__all__ = ["ConversationContext", "RolloutContext", "Runner", "RunnerFactory", "TextContext"]

Runner = Callable[[Trajectory], Awaitable[Trajectory]]
"""Runs one conversation: fills an empty trajectory and returns it.

A failure is recorded in the trajectory (`Trajectory.fail`); only cancellation is raised. A cancelled runner frees everything
that belongs to the conversation.
"""
RunnerFactory = Callable[["RolloutContext"], Runner]
"""Makes the runner of the conversations that share a context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationContext:
    """What a conversation needs besides its row and a model: environment factory, sampling and limits."""

    make_environment: EnvironmentFactory
    """Called once for each conversation."""
    sampling: Sampling
    """`max_tokens` is replaced by what `limits` allow, and the renderer's stop tokens are added."""
    limits: Limits
    max_concurrent: int = 256
    """Conversations that run at the same time."""
    lockstep: bool = False
    """Whether the engine receives the requests of all running conversations as one batch, in the order of the conversations,
    so that no result depends on timing (deterministic runs)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext(ConversationContext):
    """The context of conversations that are recorded as tokens: also an engine and a renderer."""

    engine: Engine
    renderer: Renderer
    thinking: Thinking = "keep"
    """What happens to the reasoning of earlier turns when a conversation continues: see `rollout.segment_history`."""
    make_runner: RunnerFactory | None = None
    """Makes another runner than `rollout.rollout`, such as a client of a rollout server. None: the conversations run in this
    process. All conversations with this context use the runner, also those of evaluations and baselines."""
    runner_supports_lockstep: bool = False
    """Whether the results of `make_runner`'s runners do not depend on timing if `lockstep` is set."""

    def __post_init__(self) -> None:
        if self.lockstep and self.make_runner is not None and not self.runner_supports_lockstep:
            raise ConfigError(
                "deterministic=true (lockstep) cannot be combined with this make_runner: the requests of its conversations do "
                "not reach the engine as one batch, so results depend on timing. Remove one of them, or set "
                "runner_supports_lockstep=True if the runner guarantees the order itself"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextContext(ConversationContext):
    """The context of conversations with an endpoint, which answers messages with a message: there are no tokens. `lockstep`
    has no effect."""

    chat: ChatService
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The name of the field of a request that bounds the tokens of the answer."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the server's chat template, sent with each request: the recipe's; a row's are added."""
