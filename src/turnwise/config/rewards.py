"""The section `reward` of a recipe."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from turnwise.config.section import NonEmpty, NotNegative, Positive, Seconds, Section, Use

__all__ = ["KlRewardSection", "RewardSection", "RewardUse"]


class RewardUse(Use):
    """A reference to a reward function or to a class. An instance of the class is created once, with `arguments`, and is called
    like a function."""

    weight: float = 1.0
    """The factor by which the function's result is multiplied before it is added to the reward."""
    name: NonEmpty | None = None
    """The function's name in metrics and records. Null: the name after the colon of the reference."""


class KlRewardSection(Section):
    """The KL divergence of the policy from the reference model as a part of the reward, instead of a term of the loss
    (docs/losses.md). An estimate of the divergence is subtracted from the reward before advantages are computed: for each token
    with `credit.name` `gae`, `bilevel_gae` or `reinforce_pp`; for each turn, as the sum over its tokens, with other
    estimators. The metrics of rewards do not contain it."""

    coef: NotNegative = 0.0
    """The weight of the KL divergence in the reward. 0: the reward has no KL divergence. The reference model is that of the
    section `reference`."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """The estimator of the KL divergence in the reward, from `d`, the log-probability of a token under the policy minus its
    log-probability under the reference model. `k1`: d; only with this estimator is the gradient that of the KL divergence. `k2`:
    d^2 / 2. `k3`: exp(-d) + d - 1."""
    target: Annotated[float, Field(gt=0)] | None = None
    """The KL divergence of a token, in nats, that an adaptive coefficient aims at. `reward.kl.coef` is then the coefficient of
    the first step; it rises while the divergence is above the target, and falls while it is below. Null: the coefficient is
    constant."""
    horizon: Positive = 10000
    """How slowly an adaptive coefficient changes: the number of conversations in which it changes by at most a factor of about
    1.2."""


class RewardSection(Section):
    """Reward functions. Their results are added to the rewards that the environment gives."""

    trajectory: list[RewardUse] = []
    """Reward functions of one trajectory. Each function is called for each conversation, when the conversation has ended, and
    returns a number. The names of its parameters choose its arguments, such as `trajectory`, `completion` or a column of the row
    (docs/rewards.md)."""
    turns: list[RewardUse] = []
    """Reward functions of one turn. Each function is called for each turn of a conversation and returns a number. It can have the
    parameters `turn` and `index`, and all parameters of a function in `reward.trajectory`."""
    group: list[RewardUse] = []
    """Reward functions of a group. Each function is called once for each row. Its arguments are lists with one item for each
    trajectory of the row that did not fail, such as `trajectories` or `completions`. It returns a list of numbers. None in the
    list: the function does not apply to this trajectory."""
    batch: list[RewardUse] = []
    """Reward functions of the batch. Each function is called once for all trajectories that did not fail of a training step, an
    evaluation or a rollout, when all conversations have ended. It has the parameters and the result of a function in
    `reward.group`."""
    kl: KlRewardSection = KlRewardSection()
    timeout: Seconds | None = 120.0
    """The time limit of reward functions, in seconds. Async functions: one limit for all functions of a trajectory and its turns
    together, and one limit for each call of a function of a group or of the batch. Sync functions: one limit for each call. A
    call that exceeds its limit is interrupted and fails. Null: no limit."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        """`reward: [f.py:g]`, or `reward: f.py:g`, is short for functions of one trajectory."""
        if isinstance(value, str):
            value = [value]
        return {"trajectory": value} if isinstance(value, list | tuple) else value
