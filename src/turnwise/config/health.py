"""The section `health` of a recipe: monitors that warn of a training run that goes wrong, or stop it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from turnwise.config.section import Positive, Section

__all__ = ["HealthSection", "Monitor"]

Share = Annotated[float, Field(ge=0, le=1)]
Above = Annotated[float, Field(gt=0)]

Monitor = Literal[
    "zero_std",
    "tool_use",
    "entropy",
    "duplicates",
    "length",
    "ratio",
    "mismatch",
    "kl",
    "reward_correlation",
    "failed",
    "constant_reward",
]


class HealthSection(Section):
    """Monitors of a training run. Each compares a metric with a limit, and warns once in a run (docs/health.md)."""

    window: Positive = 10
    """The number of latest steps whose mean is compared with the limits. `tool_use`, `entropy` and `length` compare this mean
    with the mean of the same number of steps at the start of the run."""
    zero_std: Share | None = 0.95
    """The largest share of groups without reward differences (`groups/zero_std`). Null: no warning."""
    tool_use: Share | None = 0.2
    """The smallest number of tool calls of a conversation, as a share of the number in the first steps (`tool_calls/mean`). Null:
    no warning."""
    entropy: Share | None = 0.05
    """The smallest entropy of the policy, as a share of the entropy in the first steps (`entropy`). A policy that has collapsed
    gives the same answers again and again. Null: no warning."""
    duplicates: Share | None = 0.99
    """The largest share of conversations whose answers equal those of another conversation of the group (`groups/duplicates`).
    Null: no warning."""
    length: Annotated[float, Field(gt=1)] | None = 3.0
    """The largest number of sampled tokens of a conversation, as a multiple of the number in the first steps (`tokens/sampled`).
    Null: no warning."""
    ratio: Above | None = 20.0
    """The largest value of `ratio/max_deviation`: the difference from 1 of the probability ratio of trainer to engine. Null: no
    warning."""
    mismatch: Above | None = 0.1
    """The largest KL divergence of the trainer's policy from the engine's, in nats (`correction/k3`). It is only known with
    `correction.action`. Null: no warning."""
    kl: Above | None = 1.0
    """The largest KL divergence in nats (metric `kl`): from the reference model with `loss.kl_coef`, otherwise from the policy
    that sampled. Null: no warning."""
    reward_correlation: Annotated[float, Field(ge=-1, le=1)] | None = -0.5
    """The smallest correlation of two parts of the reward (`reward/correlation`). A negative correlation means that a
    conversation that gets more of one part gets less of the other. Null: no warning."""
    failed: Share | None = 0.2
    """The largest share of conversations that fail with an error (`failed`). Null: no warning."""
    constant_reward: Positive | None = 3
    """The number of steps at the start of a run after which there is a warning if all conversations of each row had the same
    reward in all of these steps. Null: no warning."""
    stop: list[Monitor] = []
    """The monitors that stop the run, such as `[zero_std, failed]`. A checkpoint is written, and the exit status is 1. The other
    monitors only warn."""

    @model_validator(mode="after")
    def _stops_have_limits(self) -> HealthSection:
        for name in self.stop:
            if getattr(self, name) is None:
                raise PydanticCustomError(
                    "health_stop",
                    "stop contains {name}, and {name} is null, which turns this monitor off: give it a limit, or remove it from "
                    "stop",
                    {"name": name},
                )
        return self
