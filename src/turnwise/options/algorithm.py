"""The sections of a recipe about learning: credit, critic, loss, correction, reference, train and sft.

Each estimator of advantages and each loss has a class with its own options; `credit.name` and `loss.name` choose the class.
The options of the optimizer are declared once, for `train` and `sft`. A section checks only its own values; combinations with
other sections are the subject of `train_checks` and `sft_checks`.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from turnwise.options.section import (
    NamedSection,
    NonEmpty,
    NotNegative,
    OwnFunction,
    PathText,
    Positive,
    Section,
    changed_options,
    short_for,
)

# credit

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


class CreditSection(NamedSection):
    """How rewards become advantages (docs/credit.md)."""

    needs_values: ClassVar[Literal["turn", "token"] | None] = None
    """The values of a critic that the estimator needs: of the state before each turn, or before each sampled token."""
    needs_baseline: ClassVar[bool] = False
    """Whether the estimator needs one more conversation on each row, at temperature 0."""
    needs_turn_rewards: ClassVar[bool] = False
    """Whether the estimator means nothing without rewards of turns."""
    needs_scores: ClassVar[bool] = False
    """Whether the estimator needs scores of states in `turn.info`."""
    normalises_parts: ClassVar[bool] = False
    """Whether each reward function is normalised by itself."""
    of_later_turns: ClassVar[tuple[str, ...]] = ()
    """The options that change nothing in conversations of one turn."""

    @property
    def compares_group(self) -> bool:
        """Whether the conversations of a row are compared with each other."""
        return self.needs_values is None and not self.needs_baseline


class NoCredit(CreditSection):
    """All advantages are 0: rewards are measured, and nothing is learnt from them. For training by a teacher alone
    (docs/distillation.md)."""

    name: Literal["none"] = "none"

    @property
    def compares_group(self) -> bool:
        return False


class ScaledSection(CreditSection):
    """Options of estimators that divide advantages by a standard deviation."""

    scale: Scale = "std"


class AutoCredit(ScaledSection):
    """`turn_return` if turns can have rewards, else `grpo`. The choice is printed when the run starts. Turns can have rewards if
    `limits.turns` is above 1, and the recipe has a function in `reward.turns`, tools, or an environment that may give rewards."""

    name: Literal["auto"] = "auto"


class Grpo(ScaledSection):
    """The reward of a conversation minus the mean reward of its group (arXiv 2402.03300)."""

    name: Literal["grpo"] = "grpo"


class Rloo(CreditSection):
    """The reward of a conversation minus the mean reward of the other conversations of its group (arXiv 2402.14740)."""

    name: Literal["rloo"] = "rloo"


class ReinforcePp(CreditSection):
    """REINFORCE++: the return from a token on, whitened over all tokens of the batch (arXiv 2501.03262)."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    gamma: Discount = 1.0
    """The discount for each sampled token. 1: no discount."""

    @property
    def compares_group(self) -> bool:
        return False


class ReinforcePpBaseline(CreditSection):
    """REINFORCE++ with a baseline: the reward minus the mean of the group, whitened over all tokens of the batch (arXiv
    2501.03262)."""

    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"


class Remax(CreditSection):
    """ReMax: the reward minus the reward of one more conversation on the same row, at temperature 0 (arXiv 2310.10505)."""

    needs_baseline: ClassVar[bool] = True
    name: Literal["remax"] = "remax"


class Opo(CreditSection):
    """OPO: the reward minus the mean reward of the group, weighted by the length of conversations (arXiv 2505.23585)."""

    name: Literal["opo"] = "opo"


class Gpg(CreditSection):
    """GPG: the reward minus the mean of the group, multiplied by a factor that is larger if more groups of the batch have equal
    rewards (arXiv 2504.02546)."""

    name: Literal["gpg"] = "gpg"


class Gdpo(CreditSection):
    """GDPO: the result of each reward function is normalised within the group; then their sum is normalised over the batch (arXiv
    2601.05242)."""

    normalises_parts: ClassVar[bool] = True
    name: Literal["gdpo"] = "gdpo"


class TurnReturn(ScaledSection):
    """The sum of the rewards from a turn on, minus the mean of this sum over the other conversations at the same turn. Unbiased
    if `credit.scale` is `none` and `credit.gamma` is 1."""

    of_later_turns: ClassVar[tuple[str, ...]] = ("gamma",)
    name: Literal["turn_return"] = "turn_return"
    gamma: Discount = 1.0
    """The discount for each turn. 1: no discount."""


class Shared(CreditSection):
    """All turns have the reward of the conversation, minus a baseline."""

    name: Literal["shared"] = "shared"
    baseline: Baseline = "group"

    @property
    def compares_group(self) -> bool:
        return self.baseline == "group"


class Discounted(CreditSection):
    """A turn has the reward of the conversation, discounted once for each later turn, minus a baseline."""

    of_later_turns: ClassVar[tuple[str, ...]] = ("gamma",)
    name: Literal["discounted"] = "discounted"
    gamma: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """The discount for each later turn."""
    baseline: Baseline = "group"

    @property
    def compares_group(self) -> bool:
        return self.baseline == "group"


class Kevin(ScaledSection):
    """Kevin: discounted returns, normalised over all turns of the group (arXiv 2507.11948)."""

    of_later_turns: ClassVar[tuple[str, ...]] = ("gamma",)
    name: Literal["kevin"] = "kevin"
    gamma: Discount = 0.4
    """The discount for each turn. 1: no discount."""


class Gigpo(CreditSection):
    """GiGPO: the advantage of the conversation, plus an advantage that compares turns in the same state (arXiv 2505.10978)."""

    of_later_turns: ClassVar[tuple[str, ...]] = ("gamma",)
    name: Literal["gigpo"] = "gigpo"
    omega: Factor = 1.0
    """The weight of the advantage that compares turns in the same state."""
    gamma: Discount = 0.95
    """The discount for each turn, in the returns of turns in the same state. 1: no discount."""
    scale: GroupScale = "none"
    state_key: NonEmpty | None = None
    """The key in `Turn.info` with the name of the state after the turn, which the environment sets. Turns in states with the same
    name are compared. Null: two states are equal if the model received the same messages since its last turn."""


class MtGrpo(CreditSection):
    """MT-GRPO: the normalised reward of the turn plus the normalised outcome (arXiv 2505.11821). Biased."""

    needs_turn_rewards: ClassVar[bool] = True
    name: Literal["mt_grpo"] = "mt_grpo"
    outcome_weight: Factor = 1.0
    """The weight of the outcome (the reward of the last turn) in the advantages of all turns except the last."""
    scale: GroupScale = "std"


class Igpo(CreditSection):
    """IGPO: the sum of the normalised rewards from the turn on (arXiv 2510.14967). Biased."""

    needs_turn_rewards: ClassVar[bool] = True
    name: Literal["igpo"] = "igpo"
    gamma: Discount = 1.0
    """The discount for each turn. 1: no discount."""
    normalise: Literal["separate", "joint"] = "separate"
    """How rewards are normalised in the group. `separate`: the rewards of last turns and the rewards of all other turns are
    normalised separately. `joint`: all rewards are normalised together."""
    scale: GroupScale = "std"


class TurnPotential(ScaledSection):
    """The advantage of `grpo`, plus the changes of a score of the state from turn to turn. Biased, unless the score predicts the
    reward."""

    needs_scores: ClassVar[bool] = True
    of_later_turns: ClassVar[tuple[str, ...]] = ("decay",)
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


class Gae(CreditSection):
    """Generalised advantage estimation over tokens, with a critic (arXiv 1506.02438)."""

    needs_values: ClassVar[Literal["turn", "token"] | None] = "token"
    name: Literal["gae"] = "gae"
    gamma: Discount = 1.0
    """The discount for each sampled token. 1: no discount."""
    lam: Share = 0.95
    """The lambda of generalised advantage estimation. 1: the critic is only a baseline. 0: the target is the reward of one token
    plus the critic's value after it."""
    whiten: Whiten = True


class TurnGae(CreditSection):
    """Generalised advantage estimation over turns, with a critic that estimates the value before each turn (arXiv 2512.17008)."""

    needs_values: ClassVar[Literal["turn", "token"] | None] = "turn"
    name: Literal["turn_gae"] = "turn_gae"
    gamma: Discount = 0.99
    """The discount for each turn. 1: no discount."""
    lam: Share = 0.9
    """The lambda of generalised advantage estimation. 1: the critic is only a baseline. 0: the target is the reward of one turn
    plus the critic's value after it."""
    whiten: Whiten = True


class CriticCredit(CreditSection):
    """The sum of the rewards from a turn on, minus the critic's value of the state before the turn."""

    needs_values: ClassVar[Literal["turn", "token"] | None] = "turn"
    name: Literal["critic"] = "critic"
    gamma: Discount = 1.0
    """The discount for each turn. 1: no discount."""
    whiten: Whiten = True


class BilevelGae(CreditSection):
    """Generalised advantage estimation over turns, then over the tokens of each turn, with a critic (arXiv 2510.16907)."""

    needs_values: ClassVar[Literal["turn", "token"] | None] = "token"
    name: Literal["bilevel_gae"] = "bilevel_gae"
    gamma: Discount = 1.0
    """The discount for each sampled token within a turn. 1: no discount."""
    lam: Share = 0.95
    """The lambda of generalised advantage estimation, for turns and for tokens."""
    turn_gamma: Discount = 0.95
    """The discount for each turn. 1: no discount."""
    whiten: Whiten = True


class OwnCredit(OwnFunction, CreditSection):
    """An estimator of your own: a function in a file (docs/own_algorithm.md)."""

    name: Literal["own"] = "own"

    @property
    def compares_group(self) -> bool:
        return False


class OwnCreditOfTurnValues(OwnCredit):
    """The same, if the function declares a critic of turns."""

    needs_values: ClassVar[Literal["turn", "token"] | None] = "turn"


class OwnCreditOfTokenValues(OwnCredit):
    """The same, if the function declares a critic of tokens."""

    needs_values: ClassVar[Literal["turn", "token"] | None] = "token"


class OwnCreditOfBaseline(OwnCredit):
    """The same, if the function declares a greedy baseline."""

    needs_baseline: ClassVar[bool] = True


OWN_CREDIT: dict[tuple[Literal["turn", "token"] | None, bool], type[OwnCredit]] = {
    (None, False): OwnCredit,
    ("turn", False): OwnCreditOfTurnValues,
    ("token", False): OwnCreditOfTokenValues,
    (None, True): OwnCreditOfBaseline,
}
"""The class for what a function declares: the critic whose values it needs, and whether it needs a baseline. A recipe has the
first class; which of the others it is, is known when the function is imported (`chosen_estimator`)."""

ESTIMATORS = (
    AutoCredit,
    Grpo,
    Rloo,
    TurnReturn,
    Shared,
    Discounted,
    CriticCredit,
    Remax,
    Opo,
    Gpg,
    Gdpo,
    ReinforcePp,
    ReinforcePpBaseline,
    Gae,
    TurnGae,
    BilevelGae,
    Gigpo,
    Kevin,
    MtGrpo,
    Igpo,
    TurnPotential,
    NoCredit,
    OwnCredit,
)
"""The class for each `credit.name`. `rewards.credit` has its function."""


# critic


class CriticSection(Section):
    """The critic: a second model that estimates the sum of the later rewards. It is used if `credit.name` is `gae`, `turn_gae`,
    `critic` or `bilevel_gae`. It is trained in each step, with the optimizer options of `train` except the learning rate
    (docs/credit.md)."""

    path: PathText | None = None
    """The model that the critic starts from: a model directory, a name on the Hugging Face hub, or the directory `critic` of a
    checkpoint. It must have the same vocabulary as `model.path`. Null: `model.path`."""
    lr: Annotated[float, Field(gt=0)] = 1e-5
    """The learning rate of the critic. It is constant: the schedule and warm-up of `train` do not apply."""
    clip: Annotated[float, Field(gt=0)] | None = 0.5
    """The bound of value clipping. If the estimate for a state has moved towards its target by more than this number in a
    training step, it is not trained further in this step. Null: no bound."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """The number of training steps at the start in which only the critic is trained, and not the policy. 0: both are trained from
    the first step on."""


# loss

Normalizer = Annotated[
    Literal["token", "sequence", "trajectory", "constant"],
    Field(
        description="How the loss of a batch is averaged. `token`: over tokens, so that a long conversation counts more than a "
        "short conversation. `trajectory`: over conversations, which all count the same. `sequence`: over token sequences "
        "(segments), which all count the same; a conversation has several sequences if its history was rewritten. `constant`: "
        "the sum over tokens is divided by the number of conversations times `loss.constant_length`."
    ),
]


class LossSection(NamedSection):
    """Options of all losses."""

    has_ratio: ClassVar[bool] = True
    """Whether the loss has a probability ratio, so that tokens of earlier weights are trained on as such."""
    of_ratio: ClassVar[tuple[str, ...]] = ()
    """The options that have no effect where this ratio is 1: with one optimizer step for each batch."""
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
    router_aux_loss_coef: NotNegative = 0.0
    """The weight of the auxiliary loss of a mixture of experts, which is smaller the more evenly the experts share the tokens of
    a batch (docs/losses.md). 0: no such loss. Common values are 0.001 to 0.01."""


class PpoClip(LossSection):
    """The clipped surrogate loss of PPO, which GRPO and DAPO use. Each token has its own probability ratio."""

    of_ratio: ClassVar[tuple[str, ...]] = (
        "clip_low",
        "clip_high",
        "dual_clip",
    )

    name: Literal["ppo_clip"] = "ppo_clip"
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The lower bound of PPO clipping: probability ratios of tokens are clipped at 1 - `loss.clip_low`."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """The upper bound of PPO clipping: probability ratios of tokens are clipped at 1 + `loss.clip_high`. A value above
    `loss.clip_low` is DAPO's clip-higher."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """The largest probability ratio of tokens with a negative advantage (dual clip). A token with a larger ratio has no gradient.
    Null: no such bound."""


class Gspo(LossSection):
    """The clipped surrogate loss of GSPO. All tokens of a sequence have the same ratio: the geometric mean of their probability
    ratios."""

    of_ratio: ClassVar[tuple[str, ...]] = (
        "level",
        "clip_low",
        "clip_high",
    )

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


class Gmpo(LossSection):
    """GMPO: all tokens of a sequence have the same ratio: the geometric mean of their probability ratios, each of which is
    clipped before (arXiv 2507.20673). Single tokens with extreme ratios change it little."""

    of_ratio: ClassVar[tuple[str, ...]] = (
        "level",
        "log_clip_low",
        "log_clip_high",
    )

    name: Literal["gmpo"] = "gmpo"
    normalizer: Normalizer = "sequence"
    level: Literal["sequence", "turn"] = "sequence"
    """The tokens that have the same ratio. `sequence`: all sampled tokens of a sequence. `turn`: all sampled tokens of a turn."""
    log_clip_low: Annotated[float, Field(gt=0)] = 0.4
    """The lower bound: the logarithm of the ratio of a token with a negative advantage is at least -`loss.log_clip_low`."""
    log_clip_high: Annotated[float, Field(gt=0)] = 0.4
    """The upper bound: the logarithm of the ratio of a token with a positive advantage is at most `loss.log_clip_high`."""


class Cispo(LossSection):
    """CISPO: REINFORCE, where the weight of each token is its clipped probability ratio. Clipped tokens keep their gradient."""

    of_ratio: ClassVar[tuple[str, ...]] = (
        "clip_low",
        "clip_high",
    )

    name: Literal["cispo"] = "cispo"
    clip_low: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The lower bound: the weight of a token is at least 1 - `loss.clip_low`. 1: no lower bound."""
    clip_high: Annotated[float, Field(gt=0)] = 4.0
    """The upper bound: the weight of a token is at most 1 + `loss.clip_high`."""


class Sapo(LossSection):
    """SAPO: a smooth gate instead of clipping. The further the probability ratio of a token is from 1, the smaller its weight."""

    of_ratio: ClassVar[tuple[str, ...]] = (
        "tau_positive",
        "tau_negative",
    )

    name: Literal["sapo"] = "sapo"
    normalizer: Normalizer = "sequence"
    tau_positive: Annotated[float, Field(gt=0)] = 1.0
    """How quickly the weight of tokens with a positive advantage falls when the ratio moves away from 1. Larger is quicker."""
    tau_negative: Annotated[float, Field(gt=0)] = 1.05
    """How quickly the weight of tokens with a negative advantage falls when the ratio moves away from 1. Larger is quicker."""


class Reinforce(LossSection):
    """REINFORCE: the log-probability times the advantage, without a probability ratio. GPG also uses this loss."""

    has_ratio: ClassVar[bool] = False

    name: Literal["reinforce"] = "reinforce"


class OwnLoss(OwnFunction, LossSection):
    """A loss of your own: a function in a file (docs/own_algorithm.md)."""

    name: Literal["own"] = "own"


LOSSES = (PpoClip, Gspo, Gmpo, Cispo, Sapo, Reinforce, OwnLoss)
"""The class for each `loss.name`. `training.losses` has its function."""


class Nll(LossSection):
    """The negative log-likelihood, for `turnwise sft`; advantages are not used. `loss.name` cannot choose it."""

    name: Literal["nll"] = "nll"


# correction

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


# reference


class ReferenceSection(Section):
    """The reference model: the policy from which the KL divergence is measured. There is one if `loss.kl_coef` or
    `reward.kl.coef` is above 0. By default it is the model before training (docs/losses.md)."""

    path: PathText | None = None
    """The reference model: a model directory, or a name on the Hugging Face hub. It must have the same vocabulary as
    `model.path`. Null: the model before training."""
    source: Literal["auto", "copy", "adapter_off"] = "auto"
    """How the model before training is kept. `copy`: as a frozen copy of its weights. `adapter_off`: with `model.lora.rank`, the
    trained model without its adapter, which needs no further memory. `auto`: `adapter_off` with an adapter, else `copy`."""
    sync_every: Positive | None = None
    """The number of training steps after which the reference model is moved towards the trained model, again and again. Null: the
    reference model does not change."""
    sync_weight: Annotated[float, Field(gt=0, le=1)] = 0.6
    """How far the reference model is moved: its new weights are `reference.sync_weight` times those of the trained model, plus
    1 - `reference.sync_weight` times its own. 1: it becomes the trained model."""


# train and sft

Beta = Annotated[float, Field(ge=0, lt=1)]

_STEPS = 100
"""The number of training steps of a recipe that gives none."""


def steps_of_epochs(epochs: float, rows: int, batch_size: int) -> int:
    """The number of steps in which each of `rows` rows is used `epochs` times: 4 for 1.5 epochs of 10 rows in batches of 4."""
    # exact: 1.1 * 10 is more than 11 in floating point, which would be a step more
    return max(1, math.ceil(Fraction(str(epochs)) * rows / batch_size))


class OptimizerSection(Section):
    """The optimizer, and what it keeps in memory (docs/memory.md)."""

    name: Literal["adamw", "adamw_8bit", "adafactor"] = "adamw"
    """The optimizer. `adamw`: AdamW, with 8 bytes of state for each trained parameter. `adamw_8bit`: AdamW with 2 bytes of state;
    it needs bitsandbytes (`pip install 'turnwise[8bit]'`). `adafactor`: Adafactor, with almost no state. Its step is the learning
    rate times the size of the weights, so it needs a larger learning rate."""
    master_weights: Literal["float32", "none", "kahan", "stochastic_rounding"] = "float32"
    """How steps are kept that are smaller than the precision of bfloat16 parameters. `float32`: in a float32 copy of the
    parameters (4 bytes for each parameter). `kahan`: the rounding error is kept as a second bfloat16 number (2 bytes).
    `stochastic_rounding`: parameters are rounded up or down at random (no memory). `none`: small steps are lost."""
    offload: Literal["none", "cpu"] = "none"
    """Where the optimizer's state and the float32 master weights are. `none`: on the device of the model. `cpu`: in the CPU's
    memory, for a model on a GPU. The optimizer step is then computed on the CPU, and is slower."""

    _expand = short_for("name")


class OptimizationSection(Section):
    """Options of the optimizer and of its batches."""

    steps: Positive | None = None
    """The number of steps."""
    batch_size: Positive = 16
    """The number of rows of each step."""
    lr: NotNegative = 1e-6
    """The learning rate after the warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate changes after the warm-up. `constant`: it does not change. `linear`: it falls to 0 at the last step
    in a straight line. `cosine`: it falls to 0 at the last step as half a cosine wave."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """The number of warm-up steps at the start; in these steps the learning rate rises linearly to its full value. 0: no
    warm-up."""
    weight_decay: NotNegative = 0.0
    """The weight decay: each step first multiplies every parameter by 1 - learning rate * weight decay. 0: no weight decay."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """The decay rates of AdamW's two moving averages: of the gradient, and of its square."""
    optimizer: OptimizerSection = OptimizerSection()
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """The largest norm of the gradient of all parameters together. A gradient with a larger norm is scaled down to this norm."""
    micro_batch_tokens: Positive | None = None
    """The largest number of tokens in one forward pass. A smaller number needs less memory and is slower; the result is the same.
    Null: 2048 on a CPU, 3072 there for a model of more than 20 million parameters in one process, 16384 on a GPU. If the
    memory of a GPU runs out, one process goes on with less."""

    def lr_at(self, step: int, *, steps: int) -> float:
        """The learning rate of a step, counted from 0, of a run with `steps` steps: linear warm-up, then constant, or decay to 0
        (linear or cosine)."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(steps - self.warmup_steps, 1)
        if self.lr_schedule == "linear":
            return self.lr * (1.0 - progress)
        if self.lr_schedule == "cosine":
            return self.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.lr


class TrainSection(OptimizationSection):
    """Options of reinforcement learning with `turnwise train`."""

    steps: Positive | None = None
    """The number of training steps. Each step samples new trajectories. Null: `train.epochs` sets the number of steps; without
    `train.epochs`, it is 100."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """The number of passes over the rows of `data.train`, instead of `train.steps`. The number of steps is `train.epochs` times
    the number of rows, divided by `train.batch_size` and rounded up. Rows that are replaced (`train.dynamic_sampling`) or skipped
    (`data.curriculum`) do not make it smaller. Null: `train.steps` sets the number of steps."""
    batch_size: Positive = 16
    """The number of rows of each step; `train.group_size` trajectories are sampled for each row."""
    group_size: Positive = 8
    """The number of trajectories that are sampled for each row. The trajectories of a row are a group: their rewards are compared
    with each other."""
    minibatches: Positive = 1
    """The number of parts into which the trajectories of a step are split. Their sizes differ by at most 1. Each part gives one
    optimizer step."""
    ppo_epochs: Positive = 1
    """The number of passes over the trajectories of a step. Each pass repeats the optimizer steps of `train.minibatches`."""
    dynamic_sampling: Annotated[int, Field(ge=0)] = 0
    """How often in a step, at most, groups without reward differences are replaced by groups of the next rows (DAPO). Replaced
    groups are recorded and counted in the metrics, but not trained on. 0: no group is replaced."""
    overlong_filter: bool = False
    """Whether trajectories whose last turn was cut by a token limit are excluded from the loss. Their rewards still count in the
    statistics of the group."""
    share_prompts: Literal["auto", "always", "never"] = "auto"
    """Whether a common prefix of several training sequences is computed only once in the forward pass: the prompt of a group, a
    common system prompt, and equal sampled tokens. A check at the start tests whether the model then gives the same
    log-probabilities. If the check fails, `auto` computes each sequence separately, and `always` is an error. `never`: each
    sequence is computed separately."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """The largest age of the weights that sampled a trajectory, in training steps, when the trajectory is trained on. 0: sampling
    and training alternate, and all trajectories come from the present weights. 1: the trajectories of the next step are sampled
    during the training of the present step. n: conversations run continuously, up to n steps ahead of the training
    (docs/pipeline.md). With a larger number, slow conversations delay training less, but the trajectories are more off-policy."""
    group_timeout: Annotated[float, Field(gt=0)] | None = None
    """The time limit of a group in seconds, from the start of its first conversation. Conversations that still run then are
    ended and count as failed; the group is trained on without them. Null: no limit."""
    min_group_size: Positive = 1
    """The smallest number of trajectories in a group that did not fail. A group with fewer is recorded, but not trained on."""
    replace_failed: Annotated[int, Field(ge=0)] = 0
    """How often in a step, at most, groups with fewer than `train.min_group_size` trajectories that did not fail are replaced by
    groups of the next rows. 0: no group is replaced, and the step trains on fewer groups."""

    @property
    def known_steps(self) -> int | None:
        """The number of training steps; None if `epochs` sets it, which depends on the number of rows."""
        return self.steps if self.steps is not None else _STEPS if self.epochs is None else None

    @property
    def total_steps(self) -> int:
        """The number of training steps of a recipe whose rows are known (`Config.with_known_steps`)."""
        steps = self.known_steps
        assert steps is not None, "the rows are read first"
        return steps


class SftSection(OptimizationSection):
    """Options of `turnwise sft`: supervised fine-tuning on the conversations of `data.train` (docs/sft.md)."""

    steps: Positive | None = None
    """The number of optimizer steps. Null: `sft.epochs` sets the number of steps."""
    epochs: Annotated[float, Field(gt=0)] = 1.0
    """The number of passes over the data. It is used if `sft.steps` is null."""
    batch_size: Positive = 16
    """The number of conversations of each optimizer step."""
    lr: Annotated[float, Field(gt=0)] = 1e-5
    """The learning rate after the warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """How the learning rate changes after the warm-up. `constant`: it does not change. `linear`: it falls to 0 at the last step
    in a straight line. `cosine`: it falls to 0 at the last step as half a cosine wave."""
    too_long: Literal["leave_out", "cut"] = "leave_out"
    """What happens to a conversation with more tokens than `limits.context`. `leave_out`: the conversation is not trained on, and
    is counted in the metric `left_out`. `cut`: the conversation is cut to its first `limits.context` tokens."""
    normalizer: Literal["token", "sequence", "trajectory"] = "token"
    """How the loss of a batch is averaged. `token`: over tokens, so that a long conversation counts more than a short
    conversation. `trajectory`: over conversations, which all count the same. `sequence`: over token sequences (segments), which
    all count the same."""
    eval_every: Annotated[int, Field(ge=0)] = 0
    """The number of steps between two measurements of the held-out loss. 0: it is measured only before and after training."""
    max_eval_rows: Positive | None = None
    """The number of held-out conversations to use, counted from the first. Null: all held-out conversations."""
    max_recorded_rows: Annotated[int, Field(ge=0)] = 32
    """The number of conversations to write to `trajectories.jsonl` with all tokens, counted from the first trained conversation.
    0: no conversation is written."""
