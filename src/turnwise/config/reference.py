"""The section `reference` of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from turnwise.config.section import NonEmpty, Positive, Section

__all__ = ["ReferenceSection"]


class ReferenceSection(Section):
    """The reference model: the policy from which the KL divergence is measured. There is one if `loss.kl_coef` or
    `reward.kl.coef` is above 0. By default it is the model before training (docs/losses.md)."""

    path: NonEmpty | None = None
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
