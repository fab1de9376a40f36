"""What all conversations of a run share, and the bounds of one: turns, tokens and seconds.

The loop applies the bounds, so an environment never counts turns or tokens. The context is never changed by a conversation.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from typing import Any, Protocol

from turnwise.chat.renderer import Renderer, Thinking
from turnwise.engines.engine import (
    Batched,
    Engine,
    TokenSampler,
    WeightPublisher,
    WeightSource,
    can_constrain,
    can_continue_forms,
)
from turnwise.environments.environment import EnvironmentFactory
from turnwise.errors import ConfigError
from turnwise.options.engines import LimitsSection
from turnwise.services.chat import ChatService
from turnwise.types import Sampling, SamplingChange, Stop, Trajectory

# bounds


class Limits(LimitsSection):
    """Bounds of one conversation: the section `limits`, and what a session asks of it. None means no bound.

    A turn that `tokens_per_turn` cuts ends the conversation (`Stop.LENGTH`). If the engine takes fewer tokens than `context`
    (`HasContext`), its number applies.
    """

    def within(self, context: int | None) -> Limits:
        """These limits for an engine that takes at most `context` tokens in a sequence; None: as many as there are."""
        if context is None or (self.context is not None and self.context <= context):
            return self
        return self.model_copy(update={"context": context})

    def stop_reason(self, trajectory: Trajectory, length: int, response: int = 0) -> Stop | None:
        """The limit that prevents a further turn, or None.

        `length` is the number of tokens in the next prompt, and `response` the number of those that follow the first prompt.
        """
        if len(trajectory.turns) >= self.turns:
            return Stop.MAX_TURNS
        if self.tokens is not None and trajectory.sampled_tokens >= self.tokens:
            return Stop.MAX_TOKENS
        if self.response_tokens is not None and response >= self.response_tokens:
            return Stop.MAX_RESPONSE
        if self.context is not None and length >= self.context:
            return Stop.CONTEXT
        return None

    def completion_budget(
        self, trajectory: Trajectory, length: int, response: int = 0, change: SamplingChange | None = None
    ) -> tuple[int, Stop | None]:
        """The number of tokens that the next turn may have, and the stop reason if it reaches that number.

        `length` and `response` are those of `stop_reason`. `change` is the environment's, whose `max_tokens` is a bound too. The
        reason is None if that bound is the smallest, and the environment answers a turn that it cuts.
        """
        bounds: list[tuple[int, Stop | None]] = [(self.tokens_per_turn, Stop.LENGTH)]
        if self.tokens is not None:
            bounds.append((self.tokens - trajectory.sampled_tokens, Stop.MAX_TOKENS))
        if self.response_tokens is not None:
            bounds.append((self.response_tokens - response, Stop.MAX_RESPONSE))
        if self.context is not None:
            bounds.append((self.context - length, Stop.CONTEXT))
        if change is not None and change.max_tokens is not None:
            bounds.append((change.max_tokens, None if change.answers_cut else Stop.LENGTH))
        return min(bounds, key=lambda bound: bound[0])


# shared dependencies

Runner = Callable[[Trajectory], Awaitable[Trajectory]]
"""Runs one conversation: fills an empty trajectory and returns it.

A failure is recorded in the trajectory (`Trajectory.fail`); only cancellation is raised. A cancelled runner frees everything
that belongs to the conversation.
"""
RunnerFactory = Callable[["ConversationContext"], Runner]
"""Makes the runner of the conversations that share a context."""


def seed_of(text: str) -> int:
    """The seed of 63 bits of a trajectory: a hash of the run's seed and the trajectory's id."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def turn_seed(seed: int, index: int) -> int:
    """The seed of a turn's random stream, from the seed of its trajectory (`Trajectory.seed`, a hash of the run's seed and the
    trajectory's id): the finaliser of splitmix64. The engine draws the turn's tokens from this stream, one number each."""
    value = (seed + (index + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 31)) & 0x7FFFFFFFFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationContext:
    """What a conversation needs besides its row and a model: environment factory, sampling and limits.

    By itself, it is the context of conversations in other processes, which `make_runner` reaches.
    """

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
    make_runner: RunnerFactory | None = None
    """Makes another runner than `rollout.rollout`, such as a client of a rollout server. None: the conversations run in this
    process. All conversations with this context use the runner, also those of evaluations and baselines."""
    begin_turn: Callable[[], Stop | None] | None = None
    """Asked before each turn of the model, after `limits`: None lets it begin, a reason ends the conversation."""
    runner_supports_lockstep: bool = False
    """Whether the results of `make_runner`'s runners do not depend on timing if `lockstep` is set."""
    policies: Mapping[str, AgentPolicy] = field(default_factory=dict)
    """What takes the turns of agents in the place of the trained model, by the names of the recipe."""

    def __post_init__(self) -> None:
        if self.lockstep and self.make_runner is not None and not self.runner_supports_lockstep:
            raise ConfigError(
                "deterministic=true (lockstep) cannot be combined with this make_runner: the requests of its conversations do "
                "not reach the engine as one batch, so results depend on timing. Remove one of them, or set "
                "runner_supports_lockstep=True if the runner guarantees the order itself"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext(ConversationContext):
    """The context of conversations in this process that are recorded as tokens: also an engine and a renderer."""

    engine: Engine
    renderer: Renderer
    thinking: Thinking = "keep"
    """What happens to the reasoning of earlier turns when a conversation continues: see `rollout.session`."""
    forms_refused: str = ""
    """Why no turn of this run may have a form (a grammar), where the engine could sample it; empty: turns may have one."""

    skip_forms: bool = False
    """Whether turns that were sampled under a grammar are not trained on (`engine.grammars: skip`)."""

    @property
    def no_begun_forms(self) -> str:
        """Why a turn that has a form cannot begin with a text of the environment, and what to do; empty if it can."""
        if can_continue_forms(self.engine):
            return ""
        return (
            "the turn begins with a text that was not sampled, and has a form: a server begins a grammar with the first token "
            "that it samples. Leave one of the two out, or use engine.name=local"
        )

    @property
    def no_forms(self) -> str:
        """Why an environment cannot ask for a form of the turn, and what to do; empty if it can."""
        if can_constrain(self.engine):
            return self.forms_refused
        return (
            "the engine does not sample under grammars: use engine.name=local, set engine.grammars (vLLM, SGLang), or leave the "
            "form out"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextContext(ConversationContext):
    """The context of conversations with an endpoint, which answers messages with a message: there are no tokens. `lockstep`
    has no effect."""

    chat: ChatService
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the server's chat template, sent with each request: the recipe's; a row's are added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPolicy:
    """What takes the turns of agents in the place of the trained model: a model in this process (`engine` and `renderer`), or on
    a server (`chat`). Without either, the engine of the conversation: replays, and checks without a model."""

    sampling: Sampling
    """The distribution that its turns are sampled from."""
    engine: Engine | None = None
    renderer: Renderer | None = None
    thinking: Thinking = "keep"
    chat: ChatService | None = None
    trained: bool = False
    """Whether its turns are trained on, with weights of their own; else it is frozen."""
    is_reference: bool = False
    """Whether it is the reference model of the run, whose weights may change (`reference.sync_every`)."""

    def context(self, given: ConversationContext) -> ConversationContext:
        """The context of an agent that this policy plays. `given` is that of the conversation whose environment opens it."""
        shared = {column.name: getattr(given, column.name) for column in fields(ConversationContext)}
        shared["sampling"] = self.sampling
        if self.chat is not None:
            return TextContext(**shared, chat=self.chat)
        if self.engine is None or self.renderer is None:
            return replace(given, sampling=self.sampling)
        batched = given.engine if isinstance(given, RolloutContext) else None
        engine = batched.beside(self.engine) if isinstance(batched, Batched) else self.engine
        return RolloutContext(**shared, engine=engine, renderer=self.renderer, thinking=self.thinking)

    async def weights_changed(self) -> None:
        """Of a frozen policy, whose weights were changed in place, or count as changed: nothing that was computed before is used
        again. They have no number: its tokens are not trained on. Other models of the same engine get theirs when the weights of
        the step are published, which comes next."""
        if self.engine is not None:
            await self.engine.load_weights(self.engine.version)

    async def close(self) -> None:
        """Free its resources. (A local engine, and an endpoint, need no start.)"""
        if self.engine is not None:
            await self.engine.close()


# runners: where the conversations of a run are


class ConversationRunner(Protocol):
    """Runs the conversations of a run: in this process, on a rollout server or in rollout workers."""

    @property
    def sampler(self) -> TokenSampler | None:
        """Answers single requests, such as those of a judge; None if there is nothing that does."""
        ...

    async def start(self) -> None:
        """Wait until conversations can begin. Raises EngineError or ConfigError."""
        ...

    def context(self, shared: ConversationContext, renderer: Renderer, thinking: Thinking) -> ConversationContext:
        """The context of the conversations, with what they need where this runner runs them."""
        ...

    def publisher(self, learner: WeightSource) -> WeightPublisher:
        """How the weights of a learner reach what samples the conversations."""
        ...

    def metrics(self) -> Mapping[str, int]:
        """What was lost since the last call, as metrics of a step; empty where nothing can be lost."""
        ...

    async def close(self) -> None:
        """Free all resources."""
        ...


class EngineRunner:
    """Conversations in this process, whose tokens `engine` samples."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def sampler(self) -> TokenSampler:
        return self._engine

    async def start(self) -> None:
        await self._engine.start()

    def context(self, shared: ConversationContext, renderer: Renderer, thinking: Thinking) -> RolloutContext:
        given = {column.name: getattr(shared, column.name) for column in fields(ConversationContext)}
        return RolloutContext(**given, engine=self._engine, renderer=renderer, thinking=thinking)

    def publisher(self, learner: WeightSource) -> WeightPublisher:
        return self._engine.publisher(learner)

    def metrics(self) -> Mapping[str, int]:
        return {}

    async def close(self) -> None:
        await self._engine.close()
