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
        "(segments), which all count the same; a conversation has several if its history was rewritten. `constant`: the sum "
        "over tokens is divided by the number of conversations times `loss.constant_length`."
    ),
]


class LossSection(Section):
    """Options of all losses."""

    normalizer: Normalizer = "token"
    constant_length: Positive | None = None
    """The number of tokens by which `loss.normalizer: constant` divides the sum of a conversation, such as the largest number
    of tokens of a conversation."""
    kl_coef: NotNegative = 0.0
    """The weight of the KL term in the loss: the KL divergence from the model before training. 0: there is no KL term, and no
    reference model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_corrected"] = "k3"
    """The estimator of the KL term. `k3`: never negative, low variance. `k2`: its gradient is that of the KL divergence.
    `k1`: its gradient is 0 on average. `k3_corrected`: k3 times the probability ratio, unbiased for off-policy tokens."""
    entropy_coef: float = 0.0
    """The weight of the entropy bonus, which is subtracted from the loss. A weight above 0 keeps sampling diverse. 0: no
    bonus."""


class PpoClipSection(LossSection):
    """The clipped surrogate of PPO, which GRPO and DAPO use. A probability ratio for each token."""

    name: Literal["ppo_clip"] = "ppo_clip"
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The lower bound of PPO clipping: probability ratios of tokens are clipped at 1 - `loss.clip_low`."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """The upper bound of PPO clipping: probability ratios of tokens are clipped at 1 + `loss.clip_high`. A value above
    `loss.clip_low` is DAPO's clip-higher."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """The largest ratio of a token with a negative advantage (dual clip); above it, the token has no gradient. Null: no such
    bound."""


class GspoSection(LossSection):
    """The clipped surrogate of GSPO. All tokens of a sequence have one ratio: the geometric mean of their probability
    ratios."""

    name: Literal["gspo"] = "gspo"
    normalizer: Normalizer = "sequence"
    level: Literal["sequence", "turn"] = "sequence"
    """The tokens that share a ratio. `sequence`: all sampled tokens of a sequence. `turn`: the tokens of a turn."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 3e-4
    """The lower bound: ratios of sequences are clipped at 1 - `loss.clip_low`. They are much closer to 1 than ratios of
    tokens."""
    clip_high: Annotated[float, Field(gt=0)] = 4e-4
    """The upper bound: ratios of sequences are clipped at 1 + `loss.clip_high`. They are much closer to 1 than ratios of
    tokens."""


class CispoSection(LossSection):
    """CISPO: REINFORCE with a weight for each token, its clipped probability ratio. Clipped tokens keep their gradient."""

    name: Literal["cispo"] = "cispo"
    clip_low: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The lower bound: the weight of a token is at least 1 - `loss.clip_low`. 1: no lower bound."""
    clip_high: Annotated[float, Field(gt=0)] = 4.0
    """The upper bound: the weight of a token is at most 1 + `loss.clip_high`."""


class SapoSection(LossSection):
    """SAPO: a smooth gate instead of clipping. The weight of a token falls gradually as its probability ratio leaves 1."""

    name: Literal["sapo"] = "sapo"
    normalizer: Normalizer = "sequence"
    tau_positive: Annotated[float, Field(gt=0)] = 1.0
    """How quickly the weight of tokens with a positive advantage falls."""
    tau_negative: Annotated[float, Field(gt=0)] = 1.05
    """How quickly the weight of tokens with a negative advantage falls."""


class ReinforceSection(LossSection):
    """REINFORCE: the log-probability times the advantage, without a probability ratio. GPG uses it, too."""

    name: Literal["reinforce"] = "reinforce"


LOSSES = (PpoClipSection, GspoSection, CispoSection, SapoSection, ReinforceSection)
"""A class for each loss."""
