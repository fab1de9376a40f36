"""The sections of a recipe about learning: credit, critic, loss, correction, reference, adapters, train and sft.

Each estimator of advantages and each loss has a class with its own options; `credit.name` and `loss.name` choose the class.
The options of the optimizer are declared once, for `train` and `sft`. A section checks only its own values; combinations with
other sections are the subject of `train_checks` and `sft_checks`.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal

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
    StepsOrShare,
    changed_options,
    short_for,
)

# credit

Discount = Annotated[float, Field(gt=0, le=1)]
TurnDiscount = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Factor = Annotated[float, Field(gt=0)]
Scale = Annotated[
    Literal["std", "batch", "none"],
    Field(
        description="Advantages are divided by the standard deviation of the group (`std`, GRPO), of the step (`batch`), or not "
        "(`none`, Dr. GRPO)."
    ),
]
GroupScale = Annotated[
    Literal["std", "none"],
    Field(description="Differences are divided by the standard deviation of those compared (`std`), or not (`none`)."),
]
Baseline = Annotated[
    Literal["group", "none"],
    Field(description="Subtracted: the mean of the group's others (`group`), or nothing (`none`)."),
]
Whiten = Annotated[
    bool,
    Field(description="Subtract the batch's mean advantage, and divide by the standard deviation."),
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
        """Whether the conversations of a row are compared with each other: `train.group_size=1` is refused then."""
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
    """Discount per sampled token. 1: none."""

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


class Spo(CreditSection):
    """SPO: the reward minus the value of the row, a mean of its rewards in earlier steps, whitened over the conversations of the
    batch (arXiv 2509.13232)."""

    name: Literal["spo"] = "spo"
    initial: float = 0.5
    """Value of a new row."""
    initial_weight: NotNegative = 1.0
    """How many conversations `initial` counts as."""
    half_life: Factor = 0.06
    """How far the policy moves, in nats per token, until what was known of a row counts half."""
    rho_min: Annotated[float, Field(gt=0, le=1)] = 0.875
    """The least share of a row's weight that is kept between visits. 1: all rewards count alike."""
    rho_max: Annotated[float, Field(gt=0, le=1)] = 0.96
    """The largest share."""
    whiten: Whiten = True

    @property
    def compares_group(self) -> bool:
        return False

    @model_validator(mode="after")
    def _ordered(self) -> Spo:
        if self.rho_min > self.rho_max:
            raise PydanticCustomError(
                "rho",
                "{message}",
                {
                    "message": f"rho_min={self.rho_min:g} is above rho_max={self.rho_max:g}: lower rho_min, or raise rho_max"
                },
            )
        return self


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
    gamma: TurnDiscount = 1.0
    """Discount per turn. 1: none. 0: a turn has its own reward only."""


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
    """Discount per later turn."""
    baseline: Baseline = "group"

    @property
    def compares_group(self) -> bool:
        return self.baseline == "group"


class Kevin(ScaledSection):
    """Kevin: discounted returns, normalised over all turns of the group (arXiv 2507.11948)."""

    of_later_turns: ClassVar[tuple[str, ...]] = ("gamma",)
    name: Literal["kevin"] = "kevin"
    gamma: TurnDiscount = 0.4
    """Discount per turn. 1: none. 0: a turn has its own reward only."""


class Gigpo(CreditSection):
    """GiGPO: the advantage of the conversation, plus an advantage that compares turns in the same state (arXiv 2505.10978)."""

    of_later_turns: ClassVar[tuple[str, ...]] = ("gamma",)
    name: Literal["gigpo"] = "gigpo"
    omega: Factor = 1.0
    """Weight of the comparison of turns in the same state."""
    gamma: TurnDiscount = 0.95
    """Discount per turn in the returns that are compared. 1: none."""
    scale: GroupScale = "none"
    state_key: NonEmpty | None = None
    """Key in `Turn.info` of the state after the turn. Null: the messages since the model's last turn."""


class MtGrpo(CreditSection):
    """MT-GRPO: the normalised reward of the turn plus the normalised outcome (arXiv 2505.11821). Biased."""

    needs_turn_rewards: ClassVar[bool] = True
    name: Literal["mt_grpo"] = "mt_grpo"
    outcome_weight: Factor = 1.0
    """Weight of the last turn's reward in the advantages of earlier turns."""
    scale: GroupScale = "std"


class Igpo(CreditSection):
    """IGPO: the sum of the normalised rewards from the turn on (arXiv 2510.14967). Biased."""

    needs_turn_rewards: ClassVar[bool] = True
    name: Literal["igpo"] = "igpo"
    gamma: TurnDiscount = 1.0
    """Discount per turn. 1: none. 0: a turn has its own reward only."""
    normalise: Literal["separate", "joint"] = "separate"
    """Rewards of last turns and of all others are normalised in the group `separate` or `joint`."""
    scale: GroupScale = "std"


class TurnPotential(ScaledSection):
    """The advantage of `grpo`, plus the changes of a score of the state from turn to turn. Biased, unless the score predicts the
    reward."""

    needs_scores: ClassVar[bool] = True
    of_later_turns: ClassVar[tuple[str, ...]] = ("decay",)
    name: Literal["turn_potential"] = "turn_potential"
    key: NonEmpty = "potential"
    """Key in `Turn.info` of the score of the state after the turn: a number or null."""
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """A change counts 1 for its turn, `decay` for the turn before, its square before that, ..., divided by their sum."""
    weight: Factor = 1.0
    """Factor of the changes."""
    initial: float = 0.0
    """Score of the state before the first turn."""


class Gae(CreditSection):
    """Generalised advantage estimation over tokens, with a critic (arXiv 1506.02438)."""

    needs_values: ClassVar[Literal["turn", "token"] | None] = "token"
    name: Literal["gae"] = "gae"
    gamma: Discount = 1.0
    """Discount per sampled token. 1: none."""
    lam: Share = 0.95
    """Lambda of GAE. 1: the critic is only a baseline. 0: one token's reward plus the critic's next value."""
    whiten: Whiten = True


class TurnGae(CreditSection):
    """Generalised advantage estimation over turns, with a critic that estimates the value before each turn (arXiv 2512.17008)."""

    needs_values: ClassVar[Literal["turn", "token"] | None] = "turn"
    name: Literal["turn_gae"] = "turn_gae"
    gamma: TurnDiscount = 0.99
    """Discount per turn. 1: none. 0: a turn has its own reward only."""
    lam: Share = 0.9
    """Lambda of GAE. 1: the critic is only a baseline. 0: one turn's reward plus the critic's next value."""
    whiten: Whiten = True


class CriticCredit(CreditSection):
    """The sum of the rewards from a turn on, minus the critic's value of the state before the turn."""

    needs_values: ClassVar[Literal["turn", "token"] | None] = "turn"
    name: Literal["critic"] = "critic"
    gamma: TurnDiscount = 1.0
    """Discount per turn. 1: none. 0: a turn has its own reward only."""
    whiten: Whiten = True


class BilevelGae(CreditSection):
    """Generalised advantage estimation over turns, then over the tokens of each turn, with a critic (arXiv 2510.16907)."""

    needs_values: ClassVar[Literal["turn", "token"] | None] = "token"
    name: Literal["bilevel_gae"] = "bilevel_gae"
    gamma: Discount = 1.0
    """Discount per sampled token within a turn. 1: none."""
    lam: Share = 0.95
    """Lambda of GAE, for turns and tokens."""
    turn_gamma: TurnDiscount = 0.95
    """Discount per turn. 1: none. 0: a turn has its own reward only."""
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
    Spo,
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
    """The critic, a second model that estimates later rewards, of `gae`, `turn_gae`, `critic` and `bilevel_gae`
    (docs/credit.md). Its optimizer is that of `train`, but for the learning rate."""

    path: PathText | None = None
    """Its start: directory, hub name, or `critic` of a checkpoint, with the same vocabulary. Null: `model.path`."""
    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Learning rate, constant."""
    clip: Annotated[float, Field(gt=0)] | None = 0.5
    """Value clipping: how far an estimate may move towards its target in a step."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps at the start that train only the critic."""


# loss

Normalizer = Annotated[
    Literal["token", "sequence", "trajectory", "constant"],
    Field(description="What the loss is averaged over (docs/losses.md)."),
]


class LossSection(NamedSection):
    """How advantages become a gradient (docs/losses.md)."""

    has_ratio: ClassVar[bool] = True
    """Whether the loss has a probability ratio, so that tokens of earlier weights are trained on as such."""
    of_ratio: ClassVar[tuple[str, ...]] = ()
    """The options that have no effect where this ratio is 1: with one optimizer step for each batch."""
    normalizer: Normalizer = "token"
    constant_length: Positive | None = None
    """Tokens for `constant`, such as the longest conversation's."""
    kl_coef: NotNegative = 0.0
    """Weight of the KL divergence from the reference model."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_corrected"] = "k3"
    """`k1`, `k2`, `k3` or `k3_corrected` (docs/losses.md#kl-divergence)."""
    entropy_coef: float = 0.0
    """Weight of the entropy, which keeps sampling diverse."""
    router_aux_loss_coef: NotNegative = 0.0
    """Weight of the loss that balances experts; common: 0.001 to 0.01."""
    top_entropy_quantile: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the tokens, those of largest entropy, that have a policy loss. 1: all."""
    clip_cov_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Clip-Cov: share of tokens without policy loss, at random among covariances between the bounds."""
    clip_cov_low: float = 1.0
    """Lower bound of the covariance."""
    clip_cov_high: float = 5.0
    """Upper bound of the covariance."""
    kl_cov_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """KL-Cov: share of tokens, those of largest covariance, whose loss has a divergence."""
    kl_cov_coef: Annotated[float, Field(gt=0)] = 1.0
    """Weight of this divergence."""

    @property
    def selects_by_covariance(self) -> bool:
        """Whether tokens are chosen by their covariances."""
        return self.clip_cov_ratio > 0 or self.kl_cov_ratio > 0


class PpoClip(LossSection):
    """The clipped surrogate loss of PPO, which GRPO and DAPO use. Each token has its own probability ratio."""

    of_ratio: ClassVar[tuple[str, ...]] = (
        "clip_low",
        "clip_high",
        "dual_clip",
    )

    name: Literal["ppo_clip"] = "ppo_clip"
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Probability ratios of tokens are clipped at 1 - this."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """Upper bound of the ratio: 1 + this. Above `clip_low`: DAPO's clip-higher."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Tokens with a negative advantage and a larger ratio have no gradient."""


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
    """Tokens of a `sequence` or of a `turn` share a ratio."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 3e-4
    """Ratios of sequences (or turns) are clipped at 1 - this."""
    clip_high: Annotated[float, Field(gt=0)] = 4e-4
    """Upper bound of the ratio: 1 + this."""


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
    """Tokens of a `sequence` or of a `turn` share a ratio."""
    log_clip_low: Annotated[float, Field(gt=0)] = 0.4
    """With a negative advantage, the log of a token's ratio is at least minus this."""
    log_clip_high: Annotated[float, Field(gt=0)] = 0.4
    """With a positive advantage, it is at most this."""


class Cispo(LossSection):
    """CISPO: REINFORCE, where the weight of each token is its clipped probability ratio. Clipped tokens keep their gradient."""

    of_ratio: ClassVar[tuple[str, ...]] = (
        "clip_low",
        "clip_high",
    )

    name: Literal["cispo"] = "cispo"
    clip_low: Annotated[float, Field(gt=0, le=1)] = 1.0
    """A token's weight is at least 1 - this. 1: no bound."""
    clip_high: Annotated[float, Field(gt=0)] = 4.0
    """A token's weight is at most 1 + this."""


class Sapo(LossSection):
    """SAPO: a smooth gate instead of clipping. The further the probability ratio of a token is from 1, the smaller its weight."""

    of_ratio: ClassVar[tuple[str, ...]] = (
        "tau_positive",
        "tau_negative",
    )

    name: Literal["sapo"] = "sapo"
    normalizer: Normalizer = "sequence"
    tau_positive: Annotated[float, Field(gt=0)] = 1.0
    """How quickly weights fall as the ratio leaves 1, for positive advantages."""
    tau_negative: Annotated[float, Field(gt=0)] = 1.05
    """The same for negative advantages."""


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
    """A divergence of each `token`, its sum over a `sequence`, its mean (`geometric`) or largest value (`max`)."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """`k1`: the ratio's logarithm, bounds are ratios. `k2`, `k3`: only `high` applies."""
    low: Bound | None = None
    """Smallest ratio kept (`k1`)."""
    high: Bound = 2.0
    """Largest ratio (`k1`) or divergence (`k2`, `k3`) kept."""

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
    """Importance weights for the difference between the engine's and the trainer's probabilities (docs/losses.md)."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """The ratio of each `token`, the product over a `sequence`, or its `geometric` mean."""
    action: Literal["truncate", "mask", "icepop", "reject", "measure"] | None = None
    """The importance weight (docs/losses.md#rollout-correction). Left out: none, or `truncate` if `engine.arguments`
    quantize. Null: none."""
    low: Bound | None = None
    """Lower bound; `icepop` needs it."""
    high: Bound | None = 2.0
    """Upper bound."""
    weight_level: Literal["token", "sequence", "geometric"] | None = None
    """With `mask` and `icepop`: the ratio that weighs a token. Null: that of `level`."""
    normalize_weights: bool = False
    """Divide the weights by their mean over the batch's conversations."""
    reject: RejectionSection = RejectionSection()
    decoupled: bool = True
    """Ratios compare with the weights before the update; false: with the engine's probabilities."""
    off_policy_sequence_mask_delta: Bound | None = None
    """Bound of DeepSeek-V3.2's mask of off-policy sequences."""

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
    """The reference model, from which the KL divergence is measured if `loss.kl_coef` or `reward.kl.coef` is above 0
    (docs/losses.md)."""

    path: PathText | None = None
    """Directory or hub name, with the same vocabulary. Null: the model before training."""
    source: Literal["auto", "copy", "adapter_off"] = "auto"
    """The model before training is a frozen `copy`, or with `model.lora` the model without its adapter (`adapter_off`)."""
    sync_every: Positive | None = None
    """Steps after which it moves towards the trained model."""
    sync_weight: Annotated[float, Field(gt=0, le=1)] = 0.6
    """How far: 1 copies the trained model."""


# adapters

_USUAL_RANK = 16
"""The rank of `model.lora: true`."""


class LoraSection(Section):
    """A LoRA adapter: small matrices that are added to the layers of the model are trained, and the model's own weights are
    frozen."""

    rank: Positive | None = None
    """Rank of an adapter that is trained instead of the weights (docs/memory.md); 16 is common."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale: the adapter's product is multiplied by alpha / rank."""
    target_modules: Annotated[list[NonEmpty], Field(min_length=1)] | None = None
    """Linear layers, by names or ends, such as `[q_proj, v_proj]`. Null: all but some (docs/memory.md)."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank)."""
    dora: bool = False
    """Also train the length of each weight vector (DoRA); slower."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        """`lora: true` is an adapter with the usual rank, `lora: 8` one with this rank, `false` or `null` none."""
        if value is None or isinstance(value, bool):
            return {"rank": _USUAL_RANK} if value else {}
        return {"rank": value} if isinstance(value, int) else value


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
    """Bytes per trained parameter: `adamw` 8, `adamw_8bit` 2, `adafactor` almost 0 (with larger rates)."""
    master_weights: Literal["float32", "none", "kahan", "stochastic_rounding"] = "float32"
    """How steps below bfloat16's precision are kept: `float32` copy (4 bytes), `kahan` (2), `stochastic_rounding`, `none`."""
    grad_accum_dtype: Literal["float32"] | None = None
    """Type in which the gradients of micro-batches are added up: `float32` takes 2 bytes more. Null: that of the weights."""
    offload: Literal["none", "sampling", "cpu"] = "none"
    """Where state and master weights are in the CPU's memory: while an engine on the same GPU samples (`sampling`), or always
    (`cpu`), where the step then runs."""

    _expand = short_for("name")


class OptimizationSection(Section):
    """Options of the optimizer and of its batches."""

    steps: Positive | None = None
    """Optimizer steps. Null: `epochs` decides."""
    batch_size: Positive = 16
    """Conversations of an optimizer step."""
    lr: NotNegative = 1e-6
    """Learning rate after the warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: `constant`, or to 0 at the last step (`linear`, `cosine`)."""
    warmup_steps: StepsOrShare = 0
    """Steps at the start in which the rate rises linearly; below 1, their share of all steps."""
    weight_decay: NotNegative = 0.0
    """Each step multiplies parameters by 1 - learning rate * this."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of AdamW's averages."""
    optimizer: OptimizerSection = OptimizerSection()
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Norm to which a larger gradient is scaled down."""
    micro_batch_tokens: Positive | None = None
    """Most tokens of a forward pass: memory and speed, not the result. Null: 16384 on a GPU, or what fits; 2048 or 3072 on a
    CPU."""

    def warmup(self, steps: int) -> int:
        """The number of warm-up steps of a run with `steps` steps. A share is rounded up, as in transformers."""
        share = self.warmup_steps < 1
        return math.ceil(round(self.warmup_steps * steps, 9)) if share else int(self.warmup_steps)

    def lr_at(self, step: int, *, steps: int) -> float:
        """The learning rate of a step, counted from 0, of a run with `steps` steps: linear warm-up, then constant, or decay to 0
        (linear or cosine)."""
        warmup = self.warmup(steps)
        if step < warmup:
            return self.lr * (step + 1) / warmup
        progress = (step - warmup) / max(steps - warmup, 1)
        if self.lr_schedule == "linear":
            return self.lr * (1.0 - progress)
        if self.lr_schedule == "cosine":
            return self.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.lr


class TrainSection(OptimizationSection):
    """Reinforcement learning with `turnwise train`."""

    steps: Positive | None = None
    """Training steps. Null: set by `train.epochs`, else 100."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over `data.train`, instead of `train.steps`."""
    batch_size: Positive = 16
    """Rows of a step, each with `train.group_size` trajectories."""
    group_size: Positive = 8
    """Trajectories of a row: a group, whose rewards are compared."""
    minibatches: Positive = 1
    """Parts of a step's trajectories, each with an optimizer step."""
    ppo_epochs: Positive = 1
    """Passes over a step's trajectories."""
    dynamic_sampling: Annotated[int, Field(ge=0)] = 0
    """How often in a step groups without reward differences are replaced by next rows' (DAPO)."""
    overlong_filter: bool = False
    """Leave trajectories that a token limit cut out of the loss."""
    share_prompts: Literal["auto", "always", "never"] = "auto"
    """Compute shared prefixes once: `auto`, if a check at the start finds equal log-probabilities; `always`, else an error;
    `never`."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """How many steps old the sampling weights may be (docs/pipeline.md). 0: sampling and training alternate."""
    group_timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds of a group; conversations still running then have failed."""
    min_group_size: Positive = 1
    """Groups with fewer trajectories that did not fail are not trained on."""
    replace_failed: Annotated[int, Field(ge=0)] = 0
    """How often in a step such groups are replaced by next rows'."""

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
    """Fine-tuning with `turnwise sft` (docs/sft.md)."""

    steps: Positive | None = None
    """Optimizer steps. Null: set by `sft.epochs`."""
    epochs: Annotated[float, Field(gt=0)] = 1.0
    """Passes over the data, if `sft.steps` is null."""
    batch_size: Positive = 16
    """Conversations of an optimizer step."""
    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Learning rate after the warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """After the warm-up: `constant`, or to 0 at the last step (`linear`, `cosine`)."""
    too_long: Literal["leave_out", "cut"] = "leave_out"
    """Conversations above `limits.context` tokens: `leave_out` (counted in the metric `left_out`), or `cut`."""
    normalizer: Literal["token", "sequence", "trajectory"] = "token"
    """The loss is averaged over each `token`, `trajectory` or `sequence` (segment)."""
    eval_every: Annotated[int, Field(ge=0)] = 0
    """Steps between held-out losses. 0: only before and after training."""
    max_eval_rows: Positive | None = None
    """Most held-out conversations."""
    max_recorded_rows: Annotated[int, Field(ge=0)] = 32
    """Conversations that `trajectories.jsonl` gets, from the first."""
