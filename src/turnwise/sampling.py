"""How tokens are sampled, and of which distribution a log-probability is.

Data only: the loop, engines and trainer share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["LogprobKind", "Sampling", "SamplingChange"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. `temperature=0` is greedy; `top_k=0`, `top_p=1` and `min_p=0` switch that filter off.

    The filters apply in this order, each on what the one before has left: temperature, top-k, top-p, min-p.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    """Texts that end the turn; the token that completes one is kept, whole."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the turn; the token is kept."""

    @property
    def filtered(self) -> bool:
        """Whether the distribution sampled from leaves tokens out."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def exact_kinds(self) -> frozenset[LogprobKind]:
        """The kinds of log-probability that are, under these options, of the distribution sampled from."""
        kinds = {LogprobKind.SAMPLED}
        if not self.filtered:
            kinds.add(LogprobKind.TEMPERED)
            if self.temperature == 1.0:
                kinds.add(LogprobKind.RAW)
        return frozenset(kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingChange:
    """What an environment changes about the sampling of the following turns, until its next change.

    None is the recipe's value, so `SamplingChange()` ends all changes. There is no change of the temperature or the filters: the
    trainer computes log-probabilities with the temperature of the recipe, for all tokens of a run.
    """

    max_tokens: int | None = None
    """Sampled tokens of one turn, at least 1; `limits.tokens_per_turn` still holds. A turn that is cut ends the conversation."""
    stop: Sequence[str] | None = None
    """Texts that end a turn, in place of `sampling.stop`."""


class LogprobKind(StrEnum):
    """Of which distribution a reported log-probability is: engines differ (research: vLLM `raw`, SGLang `tempered`)."""

    SAMPLED = "sampled"
    """The distribution that was sampled from: after temperature and filters, renormalised."""
    TEMPERED = "tempered"
    """After temperature, before the filters."""
    RAW = "raw"
    """`log_softmax(logits)`: neither temperature nor filters."""
    NONE = "none"
    """Nothing was sampled (a scripted line): the numbers are zeros and mean nothing."""
