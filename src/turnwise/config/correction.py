"""The section `correction` of a recipe: rollout correction, and its checks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from turnwise.config.section import Section, changed_options

__all__ = ["CorrectionSection", "RejectionSection"]

Bound = Annotated[float, Field(gt=0)]


class RejectionSection(Section):
    """A rule that removes tokens or sequences from the loss and from its average."""

    level: Literal["token", "sequence", "geometric", "max"] | None = None
    """The tokens over which the divergence is computed. Null: nothing is removed by this rule. `token`: each token.
    `sequence`: the sum over a token sequence. `geometric`: the mean over a token sequence. `max`: the largest value of a
    token sequence (not with `k1`)."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """The estimator of the divergence. `k1`: the logarithm of the ratio; its bounds are ratios. `k2`, `k3`: a number that is
    never negative; only `correction.reject.high` applies."""
    low: Bound | None = None
    """The smallest ratio that is kept (`k1` only). Null: no lower bound."""
    high: Bound = 2.0
    """The largest ratio (`k1`) or divergence (`k2`, `k3`) that is kept."""

    @model_validator(mode="after")
    def _bounds(self) -> RejectionSection:
        if self.estimator == "k1" and self.level == "max":
            raise PydanticCustomError("reject", "level=max needs estimator=k2 or k3")
        if self.estimator != "k1" and self.low is not None:
            raise PydanticCustomError("reject", "low has no effect with estimator=k2 or k3: remove it")
        if self.low is not None and self.low > self.high:
            raise PydanticCustomError("reject", "low must not be above high")
        if self.level is None and changed_options(self):
            raise PydanticCustomError(
                "reject", "estimator, low and high have no effect without level: set correction.reject.level"
            )
        return self


class CorrectionSection(Section):
    """Rollout correction: importance weights for the difference between the engine's and the trainer's probabilities
    (docs/losses.md)."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """How probability ratios (the trainer's probability divided by the engine's) are combined before they are compared with the
    bounds. `token`: each token has its own ratio. `sequence`: all tokens of a token sequence have the product of their ratios.
    `geometric`: all tokens of a token sequence have the geometric mean of their ratios."""
    action: Literal["truncate", "mask", "icepop", "reject", "measure"] | None = None
    """How tokens whose ratio is outside `correction.low` and `correction.high` are treated. Null: there is no correction.
    `truncate`: the weight is the ratio, clamped to the bounds. `mask`: the weight is the ratio, and 0 above `correction.high`.
    `icepop`: the weight is the ratio, and 0 outside `correction.low` and `correction.high`. `reject`: tokens or sequences
    outside the bounds are removed, also from the average, and the others have weight 1. `measure`: all weights are 1; the
    differences are only measured."""
    low: Bound | None = None
    """The lower bound of the ratio. Null: no lower bound. `icepop` needs it."""
    high: Bound | None = 2.0
    """The upper bound of the ratio. Null: no upper bound."""
    weight_level: Literal["token", "sequence", "geometric"] | None = None
    """How ratios are combined into the weight of a token, with `mask` and `icepop`: the values are those of `correction.level`.
    Null: the weight is the ratio that is compared with the bounds."""
    normalize_weights: bool = False
    """Whether the weights of a batch are divided by their mean over all its conversations."""
    reject: RejectionSection = RejectionSection()
    decoupled: bool = True
    """Whether the ratios of the loss compare with the weights before the update (decoupled PPO). False: they compare with the
    engine's probabilities. The ratio then includes the correction already, so that only `reject` and `measure` are possible."""
    off_policy_sequence_mask_delta: Bound | None = None
    """The largest mean of log(engine's probability / present probability) over a token sequence; above it, tokens with a
    negative advantage have no policy loss (DeepSeek-V3.2). Null: no such mask."""

    @model_validator(mode="after")
    def _combination(self) -> CorrectionSection:
        problem = self._problem()
        if problem is not None:
            raise PydanticCustomError("correction", "{message}", {"message": problem})
        return self

    def _problem(self) -> str | None:
        of_action = [name for name in changed_options(self) if name != "off_policy_sequence_mask_delta"]
        if self.action is None and of_action:
            return f"{', '.join(of_action)} has no effect without correction.action: set it, or remove {', '.join(of_action)}"
        if self.action == "measure" and {"low", "high", "level"} & set(of_action):
            return "low, high and level have no effect with action=measure: remove them"
        if self.low is not None and self.high is not None and self.low > self.high:
            return f"low={self.low:g} must not be above high={self.high:g}"
        if self.action == "icepop" and (self.low is None or self.high is None):
            return "action=icepop needs low and high, such as low=0.5 high=5"
        if self.action == "mask" and (self.low is not None or self.high is None):
            return "action=mask has only an upper bound: set high and remove low, or use action=icepop"
        if self.action == "reject" and self.low is None and self.high is None:
            return "action=reject needs low or high"
        if self.weight_level is not None and (self.action not in ("mask", "icepop") or self.weight_level == self.level):
            return "weight_level has an effect only with action=mask or icepop and another level: remove it"
        if self.normalize_weights and self.action in ("reject", "measure"):
            return f"normalize_weights has no effect with action={self.action} (all weights are 1): remove it"
        if not self.decoupled and self.action not in ("reject", "measure"):
            return (
                f"decoupled=false and action={self.action} would correct twice: use action=reject or remove decoupled"
            )
        return None
