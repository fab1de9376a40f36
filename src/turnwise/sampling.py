"""Sampling options, and which distribution a log-probability belongs to. The loop, the engines and the trainer share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["LogprobKind", "Sampling", "SamplingChange"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. `temperature=0` is greedy decoding; `top_k=0`, `top_p=1` and `min_p=0` disable a filter.

    The order is temperature, top-k, top-p, min-p. Each filter applies to the tokens that the previous filter has kept.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    """Texts that end the turn. The token that completes a stop text is kept, with all of its text."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the turn. The stop token is kept."""

    @property
    def filtered(self) -> bool:
        """Whether a filter excludes tokens from the sampled distribution."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def exact_kinds(self) -> frozenset[LogprobKind]:
        """The kinds of log-probability that equal those of the sampled distribution under these options."""
        kinds = {LogprobKind.SAMPLED}
        if not self.filtered:
            kinds.add(LogprobKind.TEMPERED)
            if self.temperature == 1.0:
                kinds.add(LogprobKind.RAW)
        return frozenset(kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingChange:
    """A change of the sampling by an environment. It applies from the next turn until the next change.

    None stands for the recipe's value, so `SamplingChange()` ends all changes. Temperature and filters cannot change within a
    run: the trainer computes the log-probabilities of all tokens with the recipe's values.
    """

    max_tokens: int | None = None
    """Sampled tokens of one turn, at least 1. `limits.tokens_per_turn` still applies. A cut turn ends the conversation."""
    answers_cut: bool = False
    """Whether the environment answers a turn that `max_tokens` cut, so that the conversation goes on. A turn that a limit of the
    recipe cut always ends the conversation."""
    stop: Sequence[str] | None = None
    """Texts that end a turn, instead of `sampling.stop`."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end a turn, besides those of the recipe and of the model."""


class LogprobKind(StrEnum):
    """The distribution of a reported log-probability. Engines differ: vLLM reports `raw` by default, SGLang `tempered`."""

    SAMPLED = "sampled"
    """The sampled distribution: after temperature and filters, renormalized."""
    TEMPERED = "tempered"
    """After temperature, before the filters."""
    RAW = "raw"
    """`log_softmax(logits)`: before temperature and filters."""
    NONE = "none"
    """Nothing was sampled (scripted texts), or kinds are mixed. The numbers must not be used."""
