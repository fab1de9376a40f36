"""The part of the critic in a training step: the values before each turn or token, the update, and the metrics of both.

Values are set before credit assignment, which makes `Trajectory.returns` of them; the update trains the critic on these
returns. Knows trajectories and a critic. Does not know recipes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Literal

from turnwise.training.batch import divide_evenly
from turnwise.training.learner import Critic
from turnwise.training.value_batch import ValuePacking, pack_states, pack_value_targets, set_values
from turnwise.training.value_model import explained_variance, mean_value
from turnwise.types import Group, Trajectory


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
class CriticStep:
    """The part of the critic in a training step: the values before the advantages, and the update after them."""

    critic: Critic
    _: KW_ONLY
    level: Literal["turn", "token"]
    """Whether the estimator of advantages needs a value before each turn, or before each sampled token."""
    lr: float
    epochs: int
    minibatches: int
    """Optimizer steps of an epoch."""
    warmup_steps: int
    """Steps at the beginning of the run in which only the critic is trained."""
    micro_batch_tokens: int | None
    """Tokens of a forward pass; None: the critic's default."""

    def trains_policy(self, step: int) -> bool:
        """Whether the policy is trained in a step, counted from 0; in the first `warmup_steps`, it is not."""
        return step >= self.warmup_steps

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
        trajectories = [trajectory for group in groups for trajectory in group.trajectories if _has_targets(trajectory)]
        batches = [pack_value_targets(part, self._packing()) for part in divide_evenly(trajectories, self.minibatches)]
        stats = await self.critic.update(
            batches,
            lr=self.lr,
            epochs=self.epochs,
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
            micro_batch_tokens=required.tokens(self.micro_batch_tokens),
            parallel=required.parallel,
            share_prompts=required.share_prompts,
        )


def _has_targets(trajectory: Trajectory) -> bool:
    """Whether the critic is trained on a turn of the trajectory."""
    return bool(trajectory.returns) and any(turn.weight > 0 for turn in trajectory.turns)
