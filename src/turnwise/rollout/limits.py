"""How long a conversation may be. Bounds are the loop's business; an environment never counts turns or tokens."""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.types import Stop, Trajectory

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one conversation. `None` is no bound."""

    turns: int = 8
    """Turns of the model."""
    tokens_per_turn: int = 256
    """Sampled tokens of one turn; a turn that is cut by it ends the conversation (`Stop.LENGTH`)."""
    tokens: int | None = None
    """Sampled tokens of all turns together."""
    response_tokens: int | None = None
    """Tokens of a segment after the conversation's first prompt: answers, and what tools and users said between them."""
    context: int | None = None
    """All tokens of a segment: prompt, answers and what the environment said."""
    seconds_per_turn: float | None = 120.0
    """For the model's turn and the answer to it together; also for the environment to begin."""
    seconds: float | None = 600.0
    """For the whole conversation."""

    def stop_reason(self, trajectory: Trajectory, length: int, response: int = 0) -> Stop | None:
        """Why there is no further turn, or None.

        `length` is that of the prompt of the next turn, `response` how much of it follows the first prompt; both in tokens.
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
        self, trajectory: Trajectory, length: int, response: int = 0, *, most: int | None = None
    ) -> tuple[int, Stop]:
        """How many tokens the next turn may have, and why it ends if it takes them all; the arguments are those of `reached`.

        `most` is a lower bound than `tokens_per_turn`, of this turn alone.
        """
        bounds = [(self.tokens_per_turn if most is None else min(most, self.tokens_per_turn), Stop.LENGTH)]
        if self.tokens is not None:
            bounds.append((self.tokens - trajectory.sampled_tokens, Stop.MAX_TOKENS))
        if self.response_tokens is not None:
            bounds.append((self.response_tokens - response, Stop.MAX_RESPONSE))
        if self.context is not None:
            bounds.append((self.context - length, Stop.CONTEXT))
        return min(bounds, key=lambda bound: bound[0])
