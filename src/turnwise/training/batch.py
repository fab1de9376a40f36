"""Packs trajectories into micro-batches: each sampled token is one target, weighted by its share of the batch's average.

Sequences of a micro-batch share their prefixes (packing.py).

The tokens to train on are a flat list of targets: which token, predicted from which column, with which advantage and which
weight. A sampled token that several sequences share is one *prediction* and several targets, each with its own advantage and
weight. The weights are those of the batch (normalizer.py), so the division into micro-batches changes memory use and never
the result.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from turnwise.training.branch import Branch, branches_of, logprob_kind
from turnwise.training.normalizer import token_shares, weight_sums
from turnwise.training.options import Normalization
from turnwise.training.packing import MicroBatch, pack_sequences
from turnwise.training.targets import Targets
from turnwise.types import Failure, LogprobKind, Trajectory

__all__ = ["Batch", "divide_evenly", "has_gradient", "pack", "share_saved", "stale_without_logprobs"]

_OVER_TOKENS = Normalization("token")


@dataclass(frozen=True, slots=True)
class Batch:
    """The data of one optimizer step."""

    micro_batches: list[MicroBatch[Targets]]
    without_gradient: list[MicroBatch[Targets]]
    """Trajectories whose advantages are all zero, where rollout correction needs their log-probabilities and the loss needs
    nothing of them. They are not in the pass with gradients."""
    trajectories: int
    """Trajectories that count in the average, including those without a gradient."""
    tokens: int
    """Sampled tokens of those trajectories in turns with a weight above 0."""
    sequence_tokens: int
    """Tokens of the sequences in the forward pass, each sequence up to its last target."""
    computed_tokens: int
    """The same, where a prefix that sequences of a micro-batch share is counted once. Padding is not counted."""
    sources: Mapping[int, Sequence[tuple[str, int]]]
    """For each sequence (`Targets.sequence_N`), the segments with its tokens: the id of the trajectory and the index of the
    segment. Equal sequences of a group are one sequence with several segments."""


def share_saved(batches: Sequence[Batch]) -> float:
    """The share of the sequences' tokens that are not computed, because sequences of a micro-batch share prefixes."""
    tokens = sum(batch.sequence_tokens for batch in batches)
    return 1 - sum(batch.computed_tokens for batch in batches) / tokens if tokens else 0.0


def pack(
    trajectories: Sequence[Trajectory],
    *,
    normalization: Normalization = _OVER_TOKENS,
    micro_batch_tokens: int = 8192,
    parallel: int = 1,
    share_prompts: bool = True,
    keep_zero: bool = False,
    measure_zero: bool = False,
    compared: Collection[str] = (),
    kinds: Collection[LogprobKind] = (LogprobKind.SAMPLED,),
    version: int | None = None,
) -> Batch:
    """Pack the trajectories that have advantages.

    `normalization` sets how the loss is averaged (`normalizer.token_shares`): over tokens, which count by the weight of their
    turn, over segments or over trajectories, which then all count the same, or divided by a constant for each trajectory.

    Trajectories whose advantages are all zero count in the average, but are not in the forward pass, because their gradient
    is zero; `keep_zero` keeps them in, for losses with further terms, and `compared` those with these ids. `measure_zero` puts
    the others into `Batch.without_gradient`, because rollout correction is of all trajectories. Sequences of a group with equal
    tokens and equal advantages are one sequence, at the weight of all of them.

    `parallel` micro-batches are computed at the same time: there are as many as keep all workers busy, of similar sizes.

    `kinds` are the kinds of log-probability that the loss can use (`BatchRequirements.logprob_kinds`); those of other kinds
    are dropped, and `Targets.known_N` is false for their tokens. `version` is that of the weights that are trained.

    Turns of weight 0 (`Turn.weight`) are excluded from numerator and denominator of the average: with them in the denominator,
    the size of the gradient would depend on how much of a conversation is masked. Advantages of 0 stay in the denominator:
    without them, the other tokens would count more the fewer tokens have an advantage. Tokens of weight 0 are no targets. They
    are context, and are not computed behind the last target.

    Raises ValueError if an advantage per token has another length than its turn has sampled tokens, or if the normalizer would
    divide by 0.
    """
    weighted = [(trajectory, *weight_sums(trajectory)) for trajectory in trajectories if trajectory.advantages]
    counted = [(trajectory, sums) for trajectory, sums, _ in weighted if any(sums)]
    shares = token_shares([sums for _, sums in counted], normalization)
    in_loss = [keep_zero or one.id in compared or has_gradient(one) for one, _ in counted]
    merged = _branches_of_all(counted, shares, kinds, in_loss, measure_zero=measure_zero)
    make_targets = functools.partial(_targets, version=version)
    size = {"micro_batch_tokens": micro_batch_tokens, "parallel": parallel}
    micro_batches, without_gradient = (
        pack_sequences(part, make_targets, **size, share_prompts=share_prompts) for part in merged
    )
    branches = [branch for part in merged for branch in part]
    return Batch(
        micro_batches=micro_batches,
        without_gradient=without_gradient,
        trajectories=len(counted),
        tokens=sum(tokens for _, _, tokens in weighted),
        sequence_tokens=sum(len(branch.token_ids) for branch in branches),
        computed_tokens=_computed_tokens(branches, [*micro_batches, *without_gradient], share_prompts=share_prompts),
        sources={branch.number: branch.sources for branch in branches},
    )


def divide_evenly(trajectories: Sequence[Trajectory], parts: int) -> list[Sequence[Trajectory]]:
    """The trajectories in `parts` parts, in their order, whose sizes differ by at most 1. There are fewer parts if there are
    fewer trajectories. Example: 7 trajectories in 3 parts are 3, 2 and 2.
    """
    parts = min(parts, len(trajectories))
    ends = [0, *(len(trajectories) * part // parts for part in range(1, parts + 1))]
    return [trajectories[start:end] for start, end in itertools.pairwise(ends)]


def has_gradient(trajectory: Trajectory) -> bool:
    """Whether a token that is trained on has an advantage other than zero."""
    return any(turn.weight and trajectory.has_advantage(turn.index) for turn in trajectory.turns)


def _computed_tokens(branches: Sequence[Branch], micro_batches: Sequence[MicroBatch], *, share_prompts: bool) -> int:
    """The tokens of the forward pass: those of flat rows, and those of the sequences that share no prefix."""
    separate = sum(len(branch.token_ids) for branch in branches if not share_prompts or branch.media)
    return separate + sum(micro.token_ids_BL.numel() for micro in micro_batches if micro.tree is not None)


def stale_without_logprobs(trajectory: Trajectory, *, kinds: Collection[LogprobKind], version: int) -> Failure | None:
    """Why weights of this version cannot be trained on a trajectory, or None if they can.

    They cannot if its log-probabilities are of a kind that the loss cannot use, and older weights sampled its tokens, so that
    the log-probabilities can no longer be computed.
    """
    unknown = {turn.index: kind for turn in trajectory.turns if (kind := logprob_kind(trajectory, turn)) not in kinds}
    if not unknown:
        return None
    for segment in trajectory.segments:
        for turn, sampled_by in zip(segment.turn, segment.version, strict=True):
            if turn in unknown and sampled_by != version:
                return Failure(
                    "engine",
                    f"turn {turn} was sampled by weights of version {sampled_by}, is used to train version {version}, and "
                    f"has log-probabilities of the kind '{unknown[turn]}'; importance correction needs "
                    f"{' or '.join(sorted(kinds))}. Use an engine that reports them, or train.max_staleness=0",
                )
    return None


def _branches_of_all(
    counted: Sequence[tuple[Trajectory, list[float]]],
    shares: Sequence[Sequence[float]],
    kinds: Collection[LogprobKind],
    in_loss: Sequence[bool],
    *,
    measure_zero: bool,
) -> tuple[list[Branch], list[Branch]]:
    """The branches of the trajectories that are in the loss, and with `measure_zero` those of the others. Equal branches of a
    group are one."""
    sequence_numbers = itertools.count()
    parts: dict[bool, list[tuple[str, Branch]]] = {True: [], False: []}
    for (trajectory, _), shares_of_segments, trained in zip(counted, shares, in_loss, strict=True):
        if not trained and not measure_zero:
            continue
        for branch in branches_of(trajectory, kinds, shares_of_segments, sequence_numbers):
            parts[trained].append((trajectory.group, branch))
    return _merge_equal(parts[True]), _merge_equal(parts[False])


def _merge_equal(branches: Sequence[tuple[str, Branch]]) -> list[Branch]:
    """Branches (with their groups), where equal branches of a group are one, with the sum of their shares."""
    merged: dict[tuple[str, bytes], Branch] = {}
    for group, branch in branches:
        key = (group, branch.identity())
        equal = merged.get(key)
        merged[key] = branch if equal is None else _joined(equal, branch)
    return list(merged.values())


def _joined(branch: Branch, equal: Branch) -> Branch:
    """The branch at the weight of both."""
    return replace(branch, share=branch.share + equal.share, sources=(*branch.sources, *equal.sources))


def _targets(branches: Sequence[Branch], *, version: int | None) -> Targets:
    """The targets of all branches, in their order."""

    def column(values: Callable[[Branch], np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([values(branch)[branch.is_target] for branch in branches]))

    return Targets(
        token_N=column(lambda branch: branch.token_ids),
        sequence_N=column(lambda branch: np.full(len(branch.turn), branch.number)),
        turn_N=column(lambda branch: branch.turn),
        version_N=column(lambda branch: branch.version),
        copies_N=column(lambda branch: np.full(len(branch.turn), len(branch.sources))),
        behaviour_logprob_N=column(lambda branch: branch.logprobs),
        known_N=column(lambda branch: branch.known),
        version=version,
        advantage_N=column(lambda branch: branch.advantages),
        weight_N=column(lambda branch: (branch.share * branch.weights).astype(np.float32)),
    )
