"""The section `loss` of a recipe: a class for each loss, chosen by `loss.name`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from turnwise.config.section import NotNegative, Positive, Section

__all__ = [
    "LOSSES",
    "CispoSection",
    "GspoSection",
    "LossSection",
    "Normalizer",
    "PpoClipSection",
    "ReinforceSection",
    "SapoSection",
]

Normalizer = Annotated[
    Literal["token", "sequence", "trajectory", "constant"],
    Field(
        description="How the loss of a batch is averaged. `token`: over tokens, so that a long conversation counts more than a "
        "short conversation. `trajectory`: over conversations, which all count the same. `sequence`: over token sequences "
        "(segments), which all count the same; a conversation has several sequences if its history was rewritten. `constant`: "
        "the sum over tokens is divided by the number of conversations times `loss.constant_length`."
    ),
]


class LossSection(Section):
    """Options of all losses."""

    normalizer: Normalizer = "token"
    constant_length: Positive | None = None
    """The number of tokens for `loss.normalizer: constant`, such as the largest number of tokens of a conversation. The summed
    loss is divided by this number and by the number of conversations."""
    kl_coef: NotNegative = 0.0
    """The weight of the KL term in the loss: the KL divergence of the policy from the reference model, which is the model before
    training. 0: there is no KL term, and no reference model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_corrected"] = "k3"
    """The estimator of the KL term. `k3`: its value is never negative and has low variance. `k2`: its expected gradient is that
    of the KL divergence. `k1`: its expected gradient is 0. `k3_corrected`: k3 times the probability ratio, which is unbiased
    also for off-policy tokens."""
    entropy_coef: float = 0.0
    """The weight of the entropy bonus, which is subtracted from the loss. A weight above 0 keeps sampling diverse. 0: no
    bonus."""


class PpoClipSection(LossSection):
    """The clipped surrogate loss of PPO, which GRPO and DAPO use. Each token has its own probability ratio."""

    name: Literal["ppo_clip"] = "ppo_clip"
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The lower bound of PPO clipping: probability ratios of tokens are clipped at 1 - `loss.clip_low`."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """The upper bound of PPO clipping: probability ratios of tokens are clipped at 1 + `loss.clip_high`. A value above
    `loss.clip_low` is DAPO's clip-higher."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """The largest probability ratio of tokens with a negative advantage (dual clip). A token with a larger ratio has no gradient.
    Null: no such bound."""


class GspoSection(LossSection):
    """The clipped surrogate loss of GSPO. All tokens of a sequence have the same ratio: the geometric mean of their probability
    ratios."""

    name: Literal["gspo"] = "gspo"
    normalizer: Normalizer = "sequence"
    level: Literal["sequence", "turn"] = "sequence"
    """The tokens that have the same ratio. `sequence`: all sampled tokens of a sequence. `turn`: all sampled tokens of a turn."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 3e-4
    """The lower bound: ratios of sequences (or turns) are clipped at 1 - `loss.clip_low`. The bound is small because these ratios
    are much closer to 1 than ratios of tokens."""
    clip_high: Annotated[float, Field(gt=0)] = 4e-4
    """The upper bound: ratios of sequences (or turns) are clipped at 1 + `loss.clip_high`. The bound is small because these
    ratios are much closer to 1 than ratios of tokens."""


class CispoSection(LossSection):
    """CISPO: REINFORCE, where the weight of each token is its clipped probability ratio. Clipped tokens keep their gradient."""

    name: Literal["cispo"] = "cispo"
    clip_low: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The lower bound: the weight of a token is at least 1 - `loss.clip_low`. 1: no lower bound."""
    clip_high: Annotated[float, Field(gt=0)] = 4.0
    """The upper bound: the weight of a token is at most 1 + `loss.clip_high`."""


class SapoSection(LossSection):
    """SAPO: a smooth gate instead of clipping. The further the probability ratio of a token is from 1, the smaller its weight."""

    name: Literal["sapo"] = "sapo"
    normalizer: Normalizer = "sequence"
    tau_positive: Annotated[float, Field(gt=0)] = 1.0
    """How quickly the weight of tokens with a positive advantage falls when the ratio moves away from 1. Larger is quicker."""
    tau_negative: Annotated[float, Field(gt=0)] = 1.05
    """How quickly the weight of tokens with a negative advantage falls when the ratio moves away from 1. Larger is quicker."""


class ReinforceSection(LossSection):
    """REINFORCE: the log-probability times the advantage, without a probability ratio. GPG also uses this loss."""

    name: Literal["reinforce"] = "reinforce"


LOSSES = (PpoClipSection, GspoSection, CispoSection, SapoSection, ReinforceSection)
"""A class for each loss."""
