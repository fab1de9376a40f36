"""Token sequences: what an engine receives, what it returns, and what is trained on.

Import these names from `turnwise.types`. This module knows token ids and refuses to know messages, templates and rewards.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from turnwise.sampling import LogprobKind, Sampling

__all__ = ["NOT_SAMPLED", "Completion", "Media", "Request", "Segment", "Usage", "common_length"]

NOT_SAMPLED = -1
"""The value of the columns `turn` and `version` for tokens that the model did not sample."""


@dataclass(slots=True, kw_only=True)
class Media:
    """An image or a video in a token sequence."""

    kind: Literal["image", "video"]
    start: int
    """Position of the first placeholder token in the sequence (a segment, a prompt, or new messages that will be appended)."""
    length: int
    """Tokens from the first to the last placeholder, both included. There may be others between them, such as timestamps."""
    source: Any
    """The input: a PIL image, or the frames of a video."""
    inputs: Mapping[str, Any]
    """The processor's output, by the model's argument names: `pixel_values` [patches, features], `image_grid_thw` [1, 3]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt that an engine continues."""

    conversation: str
    """The trajectory's id. The engine may keep the KV cache of this conversation until `Engine.release`."""
    token_ids: Sequence[int]
    """The complete prompt, from the first token."""
    media: Sequence[Media] = ()
    """The images and videos in the prompt, in order."""
    sampling: Sampling
    seed: int = 0
    """Seed of this request's own random stream. The same seed draws the same numbers, whatever else is in the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine sampled for a request. All columns have the length of `token_ids`.

    Example: a turn of two tokens, the second one the stop token::

        Completion(token_ids=[17, 2], logprobs=[-0.4, -0.01], versions=[3, 3], finish_reason="stop", logprob_kind="sampled")
    """

    token_ids: Sequence[int]
    """The sampled tokens, including the stop token if one was sampled."""
    logprobs: Sequence[float]
    """Natural logarithms of the probabilities; `logprob_kind` says of which distribution."""
    versions: Sequence[int]
    """The version of the weights that sampled each token."""
    finish_reason: Literal["stop", "length"]
    """`length` if `Sampling.max_tokens` cut the completion."""
    logprob_kind: LogprobKind
    raw_logprobs: Sequence[float] | None = None
    """`log_softmax(logits)` of the same tokens; None if the engine does not report it."""
    prompt_tokens: int | None = None
    """The number of tokens of the prompt, where `cached_tokens` is known; else it may be None."""
    cached_tokens: int | None = None
    """Prompt tokens whose keys and values the engine took from its prefix cache; None if the engine does not report it."""

    def frozen(self) -> Completion:
        """The completion with tuples as columns: user code that holds it cannot change them."""
        raw = self.raw_logprobs
        return replace(
            self,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            raw_logprobs=None if raw is None else tuple(raw),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The counts of tokens that a server reports for a turn, where the tokens themselves are not known."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    """Prompt tokens that the server took from a cache; None if it does not report them."""


@dataclass(slots=True)
class Segment:
    """An unbroken token sequence: one training row. Four columns of equal length, to which tokens are appended.

    Columns are edited in two cases only: an environment cuts the end of the last turn (`Reply.resume`, `truncate`), or it
    excludes sampled tokens from training (`Reply.masked`, `mask_tokens`).

    Example: prompt P0 (2 tokens), answer A0 (2), the environment's message E0 (1), answer A1 (1)::

        token_ids = P0 P0 A0 A0 E0 A1
        turn      = -1 -1  0  0 -1  1
    """

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    """Log-probability of the token when it was sampled; 0 for tokens that the model did not sample."""
    turn: array[int] = field(default_factory=lambda: array("i"))
    """Index of the turn that sampled the token, or -1. The loss mask *is* `turn >= 0`."""
    version: array[int] = field(default_factory=lambda: array("i"))
    """Version of the weights that sampled the token, or -1."""
    media: list[Media] = field(default_factory=list)
    """The images and videos among the tokens, in order."""
    trainer_logprobs: array[float] = field(default_factory=lambda: array("f"))
    """Log-probability of each token under the trainer's weights, in the first forward pass that trained on it: 0 for tokens that
    the model did not sample, NaN for sampled tokens that were in no forward pass. Empty until the segment is trained on."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def append_context(self, token_ids: Sequence[int], media: Sequence[Media] = ()) -> None:
        """Append tokens that the model did not sample. `Media.start` counts from the first of these tokens."""
        count = len(token_ids)
        self.media.extend(replace(item, start=item.start + len(self)) for item in media)
        self.token_ids.extend(token_ids)
        self.logprobs.extend([0.0] * count)
        self.turn.extend([NOT_SAMPLED] * count)
        self.version.extend([NOT_SAMPLED] * count)

    def append_completion(self, turn: int, completion: Completion) -> None:
        """Append the tokens that the model sampled in turn `turn`.

        Raises ValueError if the completion's columns differ in length.
        """
        count = len(completion.token_ids)
        if len(completion.logprobs) != count or len(completion.versions) != count:
            raise ValueError(
                f"the engine returned {count} token ids, {len(completion.logprobs)} log-probabilities and "
                f"{len(completion.versions)} versions; all three must have the same length"
            )
        # convert all columns before one is extended: a bad value must not leave the columns at different lengths
        ids, logprobs = array("i", completion.token_ids), array("f", completion.logprobs)
        versions = array("i", completion.versions)
        self.token_ids.extend(ids)
        self.logprobs.extend(logprobs)
        self.turn.extend([turn] * count)
        self.version.extend(versions)

    def truncate(self, length: int) -> None:
        """Remove all tokens after the first `length`. Raises ValueError if the model did not sample all of them."""
        if any(turn < 0 for turn in self.turn[length:]):
            raise ValueError(
                f"cannot remove all tokens after token {length}: some are context, and only sampled tokens at the end of a turn "
                f"can be removed"
            )
        for column in (self.token_ids, self.logprobs, self.turn, self.version):
            del column[length:]

    def mask_tokens(self, turn: int, positions: Collection[int]) -> None:
        """Turn sampled tokens of turn `turn` into context, by their positions among its sampled tokens.

        Positions of tokens that `truncate` has removed are ignored.
        """
        sampled = [index for index, sampled_in in enumerate(self.turn) if sampled_in == turn]
        for position in positions:
            if position < len(sampled):
                index = sampled[position]
                self.logprobs[index] = 0.0
                self.turn[index] = self.version[index] = NOT_SAMPLED


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of tokens that two sequences have in common at their beginnings."""
    shorter = min(len(first), len(second))
    if list(first[:shorter]) == list(second[:shorter]):  # the usual case, without a loop in Python
        return shorter
    return next(n for n in range(shorter) if first[n] != second[n])
