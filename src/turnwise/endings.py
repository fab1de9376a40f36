"""Why a conversation ended, and how its tokens differ from the chat template's rendering.

Import these names from `turnwise.types`. This module knows neither messages nor tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Failure", "MismatchKind", "Stop", "TemplateMismatch"]


class MismatchKind(StrEnum):
    """The place of a difference between the tokens and the chat template's rendering."""

    CONTEXT = "context"
    """Tokens that the model did not sample."""
    COMPLETION = "completion"
    """Sampled tokens. They are trained on as they were sampled."""
    TEMPLATE_ERROR = "template_error"
    """The template accepted the messages turn by turn, and raises an error for all of them together."""


class Stop(StrEnum):
    """Why a conversation ended. The values are the names in the record and in the metrics (`stop/<value>`)."""

    DONE = "done"
    """The environment ended the conversation."""
    MAX_TURNS = "max_turns"
    """The model has taken `limits.turns` turns."""
    LENGTH = "length"
    """The last turn reached `limits.tokens_per_turn`, or `SamplingChange.max_tokens`, before its stop token."""
    MAX_TOKENS = "max_tokens"
    """`limits.tokens` tokens were sampled in the trajectory."""
    MAX_RESPONSE = "max_response"
    """The tokens after the first prompt reached `limits.response_tokens`, or the next prompt would reach it."""
    CONTEXT = "context"
    """The next prompt leaves no room for a turn within `limits.context`, or the last turn was cut by it."""
    DEADLINE = "deadline"
    """A turn or the trajectory took longer than `limits.seconds_per_turn` or `limits.seconds`."""
    ERROR = "error"
    """Something failed; `Trajectory.error` says what."""

    @property
    def failed(self) -> bool:
        """Whether the conversation failed. A failed trajectory is recorded, but neither scored nor trained on."""
        return self in (Stop.ERROR, Stop.DEADLINE)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a conversation failed."""

    kind: str
    """What failed: `row`, `environment`, `engine`, `tokens`, `reward`, `loss_mask` or `deadline`; `internal` is a bug in
    turnwise."""
    message: str
    """The value, the rule and the fix."""
    traceback: str = field(default="", compare=False)
    """The frames of the exception without those of turnwise, innermost last. Empty if no exception was raised."""


@dataclass(frozen=True, slots=True)
class TemplateMismatch:
    """A difference between the tokens of a segment and the tokens that the chat template writes for its messages."""

    kind: MismatchKind | None
    """None if it is not known, because an earlier version wrote the record."""
    message: str
    """The place, both texts and both lists of token ids."""

    def __str__(self) -> str:
        return self.message
