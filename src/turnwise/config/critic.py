"""The section `critic` of a recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from turnwise.config.section import NonEmpty, Section

__all__ = ["CriticSection"]


class CriticSection(Section):
    """The critic: a second model that estimates the sum of the later rewards. It is used if `credit.name` is `gae`, `turn_gae`,
    `critic` or `bilevel_gae`. It is trained in each step, with the optimizer options of `train` except the learning rate
    (docs/credit.md)."""

    path: NonEmpty | None = None
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
