"""The section `credit` of a recipe: a class for each estimator of advantages, chosen by `credit.name`."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, Tag

from turnwise.config.section import NonEmpty, Section

__all__ = [
    "ESTIMATORS",
    "AnyCredit",
    "AutoCreditSection",
    "BilevelGaeSection",
    "CreditSection",
    "CriticCreditSection",
    "DiscountedSection",
    "Estimator",
    "GaeSection",
    "GdpoSection",
    "GigpoSection",
    "GpgSection",
    "GrpoSection",
    "IgpoSection",
    "KevinSection",
    "MtGrpoSection",
    "OpoSection",
    "ReinforcePpBaselineSection",
    "ReinforcePpSection",
    "RemaxSection",
    "RlooSection",
    "SharedSection",
    "TurnGaeSection",
    "TurnPotentialSection",
    "TurnReturnSection",
]

Discount = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Factor = Annotated[float, Field(gt=0)]
Scale = Annotated[
    Literal["std", "batch", "none"],
    Field(
        description="The number that advantages are divided by. `std`: the standard deviation of the rewards (or returns) of the "
        "group, as in GRPO. `batch`: the standard deviation over all groups of the step. `none`: 1, as in Dr. GRPO."
    ),
]
GroupScale = Annotated[
    Literal["std", "none"],
    Field(
        description="The number that rewards are divided by after their mean is subtracted. `std`: the standard deviation of the "
        "rewards that are compared. `none`: 1."
    ),
]
Baseline = Annotated[
    Literal["group", "none"],
    Field(
        description="The number that is subtracted from the rewards. `group`: the mean of the other conversations of the group. "
        "`none`: 0, so that the advantages are the rewards."
    ),
]
Whiten = Annotated[
    bool,
    Field(
        description="Whether the advantages of the batch are whitened: their mean is subtracted, and they are divided by their "
        "standard deviation."
    ),
]


class CreditSection(Section):
    """How rewards become advantages (docs/credit.md)."""


class ScaledSection(CreditSection):
    """Options of estimators that divide advantages by a standard deviation."""

    scale: Scale = "std"


class AutoCreditSection(ScaledSection):
    """`turn_return` if turns can have rewards, else `grpo`. The choice is printed when the run starts. Turns can have rewards if
    `limits.turns` is above 1, and the recipe has a function in `reward.turns`, tools, or an environment that may give rewards."""

    name: Literal["auto"] = "auto"


class GrpoSection(ScaledSection):
    """The reward of a conversation minus the mean reward of its group (arXiv 2402.03300)."""

    name: Literal["grpo"] = "grpo"


class RlooSection(CreditSection):
    """The reward of a conversation minus the mean reward of the other conversations of its group (arXiv 2402.14740)."""

    name: Literal["rloo"] = "rloo"


class ReinforcePpSection(CreditSection):
    """REINFORCE++: the return from a token on, whitened over all tokens of the batch (arXiv 2501.03262)."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    gamma: Discount = 1.0
    """The discount for each sampled token. 1: no discount."""


class ReinforcePpBaselineSection(CreditSection):
    """REINFORCE++ with a baseline: the reward minus the mean of the group, whitened over all tokens of the batch (arXiv
    2501.03262)."""

    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"


class RemaxSection(CreditSection):
    """ReMax: the reward minus the reward of one more conversation on the same row, at temperature 0 (arXiv 2310.10505)."""

    name: Literal["remax"] = "remax"


class OpoSection(CreditSection):
    """OPO: the reward minus the mean reward of the group, weighted by the length of conversations (arXiv 2505.23585)."""

    name: Literal["opo"] = "opo"


class GpgSection(CreditSection):
    """GPG: the reward minus the mean of the group, multiplied by a factor that is larger if more groups of the batch have equal
    rewards (arXiv 2504.02546)."""

    name: Literal["gpg"] = "gpg"


class GdpoSection(CreditSection):
    """GDPO: the result of each reward function is normalised within the group; then their sum is normalised over the batch (arXiv
    2601.05242)."""

    name: Literal["gdpo"] = "gdpo"


class TurnReturnSection(ScaledSection):
    """The sum of the rewards from a turn on, minus the mean of this sum over the other conversations at the same turn. Unbiased
    if `credit.scale` is `none` and `credit.gamma` is 1."""

    name: Literal["turn_return"] = "turn_return"
    gamma: Discount = 1.0
    """The discount for each turn. 1: no discount."""


class SharedSection(CreditSection):
    """All turns have the reward of the conversation, minus a baseline."""

    name: Literal["shared"] = "shared"
    baseline: Baseline = "group"


class DiscountedSection(CreditSection):
    """A turn has the reward of the conversation, discounted once for each later turn, minus a baseline."""

    name: Literal["discounted"] = "discounted"
    gamma: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """The discount for each later turn."""
    baseline: Baseline = "group"


class KevinSection(ScaledSection):
    """Kevin: discounted returns, normalised over all turns of the group (arXiv 2507.11948)."""

    name: Literal["kevin"] = "kevin"
    gamma: Discount = 0.4
    """The discount for each turn. 1: no discount."""


class GigpoSection(CreditSection):
    """GiGPO: the advantage of the conversation, plus an advantage that compares turns in the same state (arXiv 2505.10978)."""

    name: Literal["gigpo"] = "gigpo"
    omega: Factor = 1.0
    """The weight of the advantage that compares turns in the same state."""
    gamma: Discount = 0.95
    """The discount for each turn, in the returns of turns in the same state. 1: no discount."""
    scale: GroupScale = "none"
    state_key: NonEmpty | None = None
    """The key in `Turn.info` with the name of the state after the turn, which the environment sets. Turns in states with the same
    name are compared. Null: two states are equal if the model received the same messages since its last turn."""


class MtGrpoSection(CreditSection):
    """MT-GRPO: the normalised reward of the turn plus the normalised outcome (arXiv 2505.11821). Biased."""

    name: Literal["mt_grpo"] = "mt_grpo"
    outcome_weight: Factor = 1.0
    """The weight of the outcome (the reward of the last turn) in the advantages of all turns except the last."""
    scale: GroupScale = "std"


class IgpoSection(CreditSection):
    """IGPO: the sum of the normalised rewards from the turn on (arXiv 2510.14967). Biased."""

    name: Literal["igpo"] = "igpo"
    gamma: Discount = 1.0
    """The discount for each turn. 1: no discount."""
    normalise: Literal["separate", "joint"] = "separate"
    """How rewards are normalised in the group. `separate`: the rewards of last turns and the rewards of all other turns are
    normalised separately. `joint`: all rewards are normalised together."""
    scale: GroupScale = "std"


class TurnPotentialSection(ScaledSection):
    """The advantage of `grpo`, plus the changes of a score of the state from turn to turn. Biased, unless the score predicts the
    reward."""

    name: Literal["turn_potential"] = "turn_potential"
    key: NonEmpty = "potential"
    """The key in `Turn.info` with the score of the state after the turn: a number, or null for no score."""
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """How much of a change counts for earlier turns. The turn of the change has the weight 1, the turn before it `decay`, the
    turn before that `decay` squared, and so on; the weights are divided by their sum. 0: the change counts for its own turn
    only."""
    weight: Factor = 1.0
    """The factor by which the changes are multiplied before they are added to the advantage of `grpo`."""
    initial: float = 0.0
    """The score of the state before the first turn."""


class GaeSection(CreditSection):
    """Generalised advantage estimation over tokens, with a critic (arXiv 1506.02438)."""

    name: Literal["gae"] = "gae"
    gamma: Discount = 1.0
    """The discount for each sampled token. 1: no discount."""
    lam: Share = 0.95
    """The lambda of generalised advantage estimation. 1: the critic is only a baseline. 0: the target is the reward of one token
    plus the critic's value after it."""
    whiten: Whiten = True


class TurnGaeSection(CreditSection):
    """Generalised advantage estimation over turns, with a critic that estimates the value before each turn (arXiv 2512.17008)."""

    name: Literal["turn_gae"] = "turn_gae"
    gamma: Discount = 0.99
    """The discount for each turn. 1: no discount."""
    lam: Share = 0.9
    """The lambda of generalised advantage estimation. 1: the critic is only a baseline. 0: the target is the reward of one turn
    plus the critic's value after it."""
    whiten: Whiten = True


class CriticCreditSection(CreditSection):
    """The sum of the rewards from a turn on, minus the critic's value of the state before the turn."""

    name: Literal["critic"] = "critic"
    gamma: Discount = 1.0
    """The discount for each turn. 1: no discount."""
    whiten: Whiten = True


class BilevelGaeSection(CreditSection):
    """Generalised advantage estimation over turns, then over the tokens of each turn, with a critic (arXiv 2510.16907)."""

    name: Literal["bilevel_gae"] = "bilevel_gae"
    gamma: Discount = 1.0
    """The discount for each sampled token within a turn. 1: no discount."""
    lam: Share = 0.95
    """The lambda of generalised advantage estimation, for turns and for tokens."""
    turn_gamma: Discount = 0.95
    """The discount for each turn. 1: no discount."""
    whiten: Whiten = True


Estimator = (
    GrpoSection
    | RlooSection
    | TurnReturnSection
    | SharedSection
    | DiscountedSection
    | CriticCreditSection
    | RemaxSection
    | OpoSection
    | GpgSection
    | GdpoSection
    | ReinforcePpSection
    | ReinforcePpBaselineSection
    | GaeSection
    | TurnGaeSection
    | BilevelGaeSection
    | GigpoSection
    | KevinSection
    | MtGrpoSection
    | IgpoSection
    | TurnPotentialSection
)
"""The section of each estimator."""

ESTIMATORS: tuple[type[CreditSection], ...] = (AutoCreditSection, *get_args(Estimator))
"""The section for each `credit.name`."""

AnyCredit = (
    Annotated[AutoCreditSection, Tag("auto")]
    | Annotated[GrpoSection, Tag("grpo")]
    | Annotated[RlooSection, Tag("rloo")]
    | Annotated[TurnReturnSection, Tag("turn_return")]
    | Annotated[SharedSection, Tag("shared")]
    | Annotated[DiscountedSection, Tag("discounted")]
    | Annotated[CriticCreditSection, Tag("critic")]
    | Annotated[RemaxSection, Tag("remax")]
    | Annotated[OpoSection, Tag("opo")]
    | Annotated[GpgSection, Tag("gpg")]
    | Annotated[GdpoSection, Tag("gdpo")]
    | Annotated[ReinforcePpSection, Tag("reinforce_pp")]
    | Annotated[ReinforcePpBaselineSection, Tag("reinforce_pp_baseline")]
    | Annotated[GaeSection, Tag("gae")]
    | Annotated[TurnGaeSection, Tag("turn_gae")]
    | Annotated[BilevelGaeSection, Tag("bilevel_gae")]
    | Annotated[GigpoSection, Tag("gigpo")]
    | Annotated[KevinSection, Tag("kevin")]
    | Annotated[MtGrpoSection, Tag("mt_grpo")]
    | Annotated[IgpoSection, Tag("igpo")]
    | Annotated[TurnPotentialSection, Tag("turn_potential")]
)
"""The section for any `credit.name`, for pydantic."""
