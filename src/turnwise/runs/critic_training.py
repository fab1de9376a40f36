"""The critic in a training run: its values for the trajectories of a step, and its update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from turnwise.config.schema import Config
from turnwise.training.batch import divide_evenly
from turnwise.training.critic import Critic
from turnwise.training.value_batch import ValuePacking, pack_states, pack_value_targets, set_values
from turnwise.training.value_loss import explained_variance, mean_value
from turnwise.types import Group, Trajectory

__all__ = ["CriticMetrics", "CriticTraining"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticMetrics:
    """The metrics `critic/<field>` of a training step."""

    loss: float
    explained_variance: float | None
    clip_fraction: float
    grad_norm: float
    value_mean: float | None

    def named(self) -> dict[str, float | None]:
        """The metrics by their names in metrics.jsonl."""
        return {f"critic/{column.name}": getattr(self, column.name) for column in fields(self)}


@dataclass(frozen=True, slots=True)
class CriticTraining:
    """A critic, and how a recipe uses it."""

    critic: Critic
    level: Literal["turn", "token"]
    """Whether the estimator of advantages needs a value before each turn, or before each sampled token."""
    config: Config

    def trains_policy(self, step: int) -> bool:
        """Whether the policy is trained in a step, counted from 0; in the steps of `critic.warmup_steps`, it is not."""
        return step >= self.config.critic.warmup_steps

    async def set_values(self, groups: Sequence[Group]) -> None:
        """Set `Trajectory.values` of all trajectories that have a reward. Before credit."""
        trajectories = [
            trajectory
            for group in groups
            for trajectory in group.trajectories
            if trajectory.reward is not None and not trajectory.failed
        ]
        batch = pack_states(trajectories, self._packing())
        set_values(trajectories, await self.critic.values(batch), self.level)

    async def update(
        self,
        groups: Sequence[Group],
        *,
        cancellable: bool,
        on_first_step: Callable[[], None],
    ) -> CriticMetrics:
        """Train the critic on the trajectories of a step, with as many optimizer steps as the policy."""
        options = self.config.train
        trajectories = [trajectory for group in groups for trajectory in group.trajectories if _has_targets(trajectory)]
        batches = [
            pack_value_targets(part, self._packing()) for part in divide_evenly(trajectories, options.minibatches)
        ]
        stats = await self.critic.update(
            batches,
            lr=self.config.critic.lr,
            epochs=options.ppo_epochs,
            cancellable=cancellable,
            on_first_step=on_first_step,
        )
        return CriticMetrics(
            loss=stats.loss,
            explained_variance=explained_variance(batches),
            clip_fraction=stats.clip_fraction,
            grad_norm=stats.grad_norm,
            value_mean=mean_value(batches),
        )

    def _packing(self) -> ValuePacking:
        required = self.critic.requirements
        return ValuePacking(
            level=self.level,
            micro_batch_tokens=self.config.train.micro_batch_tokens or required.micro_batch_tokens,
            parallel=required.parallel,
            share_prompts=required.share_prompts,
        )


def _has_targets(trajectory: Trajectory) -> bool:
    """Whether the critic is trained on a turn of the trajectory."""
    return bool(trajectory.returns) and any(turn.weight > 0 for turn in trajectory.turns)
