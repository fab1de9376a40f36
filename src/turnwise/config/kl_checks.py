"""Options of the KL divergence and of the reference model that have no effect or contradict the rest of the recipe."""

from __future__ import annotations

from turnwise.config import credit as sections
from turnwise.config.schema import Config
from turnwise.config.section import changed_options

__all__ = ["kl_problems", "needs_reference"]


def needs_reference(config: Config) -> bool:
    """Whether the recipe measures the KL divergence from a reference model, in the loss or in the reward."""
    return config.loss.kl_coef > 0 or config.reward.kl.coef > 0


def kl_problems(config: Config) -> list[tuple[bool, str]]:
    """Whether the recipe has a problem, and the error message for it."""
    loss, kl = config.loss, config.reward.kl
    changed = next((name for name in changed_options(kl) if name != "coef"), None)
    return [
        (
            loss.kl_coef == 0 and loss.kl_estimator != "k3",
            f"loss.kl_estimator={loss.kl_estimator} has no effect without a KL term: set loss.kl_coef, or remove it",
        ),
        (
            kl.coef == 0 and changed is not None,
            f"reward.kl.{changed} has no effect without a KL divergence in the reward: set reward.kl.coef, or remove it",
        ),
        (
            kl.target is None and changed == "horizon",
            f"reward.kl.horizon={kl.horizon} has no effect with a constant coefficient: set reward.kl.target, or remove it",
        ),
        (
            kl.coef > 0 and isinstance(config.credit, sections.GdpoSection),
            "credit.name=gdpo normalises each part of the reward, so reward.kl.coef would have no effect: set loss.kl_coef "
            "instead, or another credit.name",
        ),
        *_reference_problems(config),
    ]


def _reference_problems(config: Config) -> list[tuple[bool, str]]:
    steps = config.train.known_steps
    reference, adapter = config.reference, config.model.lora.rank is not None
    changed = next(iter(changed_options(reference)), None)
    return [
        (
            changed is not None and not needs_reference(config),
            f"reference.{changed} has no effect without a KL divergence: set loss.kl_coef or reward.kl.coef, or remove it",
        ),
        (
            reference.path is not None and reference.source != "auto",
            f"reference.source={reference.source} has no effect with reference.path={reference.path}: remove one of them",
        ),
        (
            reference.source == "adapter_off" and not adapter,
            "reference.source=adapter_off needs an adapter, and the recipe trains all weights: set model.lora.rank, or remove "
            "reference.source",
        ),
        (
            reference.sync_every is None and "sync_weight" in changed_options(reference),
            "reference.sync_weight has no effect without reference.sync_every: set it, or remove reference.sync_weight",
        ),
        (
            reference.sync_every is not None and adapter,
            "reference.sync_every changes the weights of the reference model, and with model.lora.rank the policy is these "
            "weights and an adapter: remove one of them",
        ),
        (
            reference.sync_every is not None and steps is not None and reference.sync_every >= steps,
            f"reference.sync_every={reference.sync_every} must be less than train.steps={steps}: the reference "
            f"model would not change",
        ),
    ]
