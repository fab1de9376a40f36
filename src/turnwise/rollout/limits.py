"""Bounds of a conversation: turns, tokens and seconds. The loop applies them, so an environment never counts turns or tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from turnwise.types import SamplingChange, Stop, Trajectory

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one conversation. None means no bound."""

    turns: int = 8
    """Turns of the model, at most."""
    tokens_per_turn: int = 256
    """Sampled tokens of one turn. A turn that is cut by this limit ends the conversation (`Stop.LENGTH`)."""
    tokens: int | None = None
    """Sampled tokens of all turns together."""
    response_tokens: int | None = None
    """Tokens of a segment after the conversation's first prompt: turns of the model and messages of tools and users."""
    context: int | None = None
    """All tokens of a segment: the prompt, turns of the model and messages of the environment. If the engine takes fewer tokens
    (`HasContext`), its number applies."""
    seconds_per_turn: float | None = 120.0
    """Seconds for one turn of the model and the reply to it together; also for `Environment.begin`."""
    seconds: float | None = 600.0
    """Seconds for the conversation."""

    def within(self, context: int | None) -> Limits:
        """These limits for an engine that takes at most `context` tokens in a sequence; None: as many as there are."""
        if context is None or (self.context is not None and self.context <= context):
            return self
        return replace(self, context=context)

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
