"""From trajectories to what a forward pass takes, exactly: every sampled token once, every weight from the whole batch.

A group is packed as a *tree*: the tokens that its trajectories have in common, then one branch for each. A token sees the
prefix and its own branch, at the positions that it had in its own sequence, so a group's prompt is computed once and the
result is that of separate rows. What is trained on is a flat list of targets: which token, predicted from where, with which
advantage and which weight. The weights add up to one over the batch, so micro-batches change memory and never the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from turnwise.training.tree import Tree, TreeShape
from turnwise.types import Failure, LogprobKind, Media, Segment, Trajectory, Turn

__all__ = ["Batch", "MicroBatch", "pack", "stale_without_logprobs"]

_PADDED_GLADLY = 32
"""Tokens of padding in a branch that are not worth a second copy of the prefix."""
_LONGEST_SHARED = 4096
"""Tokens. Sharing needs a mask of branches by sequences; beyond this it costs more than the prompt."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass takes, and its N targets: either rows padded on the right, or one flat row of trees.

    Example: prompt `P P`, answers `a b` and `c`, as a tree::

        token_ids_BL = P P a b c
        position_BL  = 0 1 2 3 2
        targets: a from column 1, b from column 2, c from column 1
    """

    token_ids_BL: torch.Tensor
    position_BL: torch.Tensor
    tree: Tree | None
    row_N: torch.Tensor
    """The row of a target."""
    column_N: torch.Tensor
    """The column whose logits predict the target."""
    target_N: torch.Tensor
    """The sampled token."""
    old_logprob_N: torch.Tensor
    """As the engine reported it; 0 where `known_N` is false."""
    known_N: torch.Tensor
    """Whether the engine reported it of the distribution sampled from. Where it did not, the trainer computes it, before the
    first optimizer step."""
    advantage_N: torch.Tensor
    weight_N: torch.Tensor
    """Share of the token in the batch's average: above 0, for a token of weight 0 is no target."""
    media_B: Sequence[Sequence[Media]] = ()
    """The images and videos in each row; empty where there are none in any."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        names = [name for name in MicroBatch.__dataclass_fields__ if name not in ("tree", "media_B")]
        moved: dict[str, Any] = {name: getattr(self, name).to(device) for name in names}
        return MicroBatch(tree=None if self.tree is None else self.tree.to(device), media_B=self.media_B, **moved)


@dataclass(frozen=True, slots=True)
class Batch:
    """All that one optimizer step learns from."""

    micro_batches: list[MicroBatch]
    trajectories: int
    """That count in the average, those with nothing to learn from included."""
    tokens: int
    """Sampled tokens of those trajectories, as far as they have a weight."""


def pack(
    trajectories: Sequence[Trajectory],
    *,
    average: Literal["token", "sequence"] = "token",
    micro_batch_tokens: int = 8192,
    share_prompts: bool = True,
    keep_zero: bool = False,
    kinds: Collection[LogprobKind] = (LogprobKind.SAMPLED,),
) -> Batch:
    """Pack the trajectories that have advantages.

    `average="token"`: every sampled token of the batch counts by the weight of its turn. `"sequence"`: all trajectories count
    the same, however many segments they have, and by weight within. Trajectories without any advantage other than zero
    count in the average and are left out of the forward pass, because their gradient is zero; `keep_zero` keeps them in,
    for losses with further terms. Trajectories of a group that say the very same thing for the same advantage are
    computed once, at the weight of all of them.

    `kinds` are the kinds of log-probability that the loss can use (`Sampling.exact_kinds`); those of other kinds are left out,
    and `MicroBatch.known_N` says so.

    What has no weight (`Turn.weight` 0) is in neither the sum nor what it is divided by, unlike an advantage of zero. An
    advantage of zero is a finding about what was said: to leave it out of the average would make the others count more the
    less there is to learn. A weight of zero says that nobody asked: to keep it in would scale the gradient with how much
    of a conversation is masked, which depends on its length and on nothing that was learnt. It is no target and, behind
    the last token that is one, not computed; before that it is context like what the model heard.
    """
    every = [(one, _weighed(one)) for one in trajectories if one.advantages]
    counted = [(one, weight) for one, (weight, _) in every if weight > 0]
    total = sum(weight for _, weight in counted)
    branches: dict[tuple[str, bytes], list[_Branch]] = {}
    places: dict[tuple[str, bytes], int] = {}
    for one, mass in counted:
        weights = [turn.weight for turn in one.turns]
        if not keep_zero and not any(weight and gain for weight, gain in zip(weights, one.advantages, strict=True)):
            continue
        known = [_kind(one, turn) in kinds for turn in one.turns]
        share = 1.0 / total if average == "token" else 1.0 / (len(counted) * mass)
        for segment in one.segments:
            branch = _Branch.of(segment, one.advantages, weights, known, share)
            if branch is not None:
                # what a group has in common is its opening; after it everybody goes their own way
                together = share_prompts and len(branch.token_ids) <= _LONGEST_SHARED and not branch.media
                common = branch.token_ids[: branch.prefix].tobytes() if together else branch.identity
                bundle = branches.setdefault((one.group, common), [])
                # a group often says the same thing several times: it is computed once, at the weight of all of them
                place = places.setdefault((one.group, branch.identity), len(bundle))
                if place < len(bundle):
                    bundle[place] = replace(branch, share=bundle[place].share + branch.share)
                else:
                    bundle.append(branch)
    trees = [_Tree.of(part) for bundle in branches.values() for part in _split(bundle, micro_batch_tokens)]
    able = [share_prompts and tree.longest <= _LONGEST_SHARED and not tree.media for tree in trees]
    flat = [tree for tree, shares in zip(trees, able, strict=True) if shares]
    apart = [tree for tree, shares in zip(trees, able, strict=True) if not shares]
    return Batch(
        micro_batches=[
            *(_flat(chosen) for chosen in _micro(flat, micro_batch_tokens, padded=False)),
            *(_rows(chosen) for chosen in _micro(apart, micro_batch_tokens, padded=True)),
        ],
        trajectories=len(counted),
        tokens=sum(tokens for _, (_, tokens) in every),
    )


def _weighed(trajectory: Trajectory) -> tuple[float, int]:
    """The weights of a trajectory's sampled tokens, summed up, and how many tokens have one."""
    # of the segments: what an environment took back (`Turn.cut`) is in the turn's completion still
    counts = Counter(turn for segment in trajectory.segments for turn in segment.turn)
    turns = [turn for turn in trajectory.turns if turn.weight > 0]
    return sum(turn.weight * counts[turn.index] for turn in turns), sum(counts[turn.index] for turn in turns)


def _kind(trajectory: Trajectory, turn: Turn) -> LogprobKind:
    return turn.completion.logprob_kind if turn.completion is not None else trajectory.logprob_kind


def stale_without_logprobs(trajectory: Trajectory, *, kinds: Collection[LogprobKind], version: int) -> Failure | None:
    """Why a trajectory cannot be learnt from by weights of this version: its log-probabilities are of a kind that the loss
    cannot use, and can no longer be computed, because older weights sampled its tokens. None where it can.
    """
    unknown = {turn.index: kind for turn in trajectory.turns if (kind := _kind(trajectory, turn)) not in kinds}
    if not unknown:
        return None
    for segment in trajectory.segments:
        for turn, sampled_by in zip(segment.turn, segment.version, strict=True):
            if turn in unknown and sampled_by != version:
                return Failure(
                    "engine",
                    f"turn {turn} was sampled by weights of version {sampled_by}, is learnt from by version {version}, and "
                    f"has log-probabilities of the kind '{unknown[turn]}'; importance correction needs "
                    f"{' or '.join(sorted(kinds))}. Use an engine that reports them, or train.overlap=false",
                )
    return None


@dataclass(frozen=True, slots=True)
class _Branch:
    """One segment up to its last target, as numpy columns."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    """One for each token; 0 where it is no target."""
    weights: np.ndarray
    """Of the turn of each token; 0 where it is no target."""
    known: np.ndarray
    """Whether the log-probability of each token can be used."""
    share: float
    """What a token of weight 1 counts in the batch's average."""
    prefix: int
    """Length of the opening: what comes before the first sampled token."""
    identity: bytes
    """Equal for branches that differ in nothing but rounding: tokens, turns, advantages, their weights in the loss, the
    version of the model's weights that they are from, whether their log-probabilities can be used, and images."""
    media: Sequence[Media]

    @classmethod
    def of(
        cls,
        segment: Segment,
        advantages: Sequence[float],
        weights: Sequence[float],
        known: Sequence[bool],
        share: float,
    ) -> _Branch | None:
        turn = np.array(segment.turn, dtype=np.int64)
        weight = np.where(turn >= 0, np.array(weights, dtype=np.float64)[turn], 0.0)
        targets = np.flatnonzero(weight)
        if not len(targets):
            return None
        end = int(targets[-1]) + 1  # nothing is predicted from what comes after the last word that counts
        turn, weight = turn[:end], weight[:end]
        token_ids = np.array(segment.token_ids[:end], dtype=np.int64)
        gains = np.where(weight > 0, np.array(advantages, dtype=np.float32)[turn], 0.0).astype(np.float32)
        version = np.array(segment.version[:end], dtype=np.int64)
        usable = np.array(known, dtype=bool)[turn]
        media = [one for one in segment.media if one.start < end]
        # the tensors themselves: a group has those of its prompt in common
        seen = np.array([(id(one.inputs), one.start) for one in media], dtype=np.int64)
        return cls(
            token_ids=token_ids,
            logprobs=np.where(usable, np.array(segment.logprobs[:end], dtype=np.float32), np.float32(0.0)),
            advantages=gains,
            weights=weight,
            known=usable,
            share=share,
            # also where the first turns have no weight: the opening is what a group has in common
            prefix=int(np.flatnonzero(turn >= 0)[0]),
            identity=b"".join(column.tobytes() for column in (token_ids, turn, gains, weight, version, usable, seen)),
            media=media,
        )


def _split(bundle: list[_Branch], micro_batch_tokens: int) -> Iterator[list[_Branch]]:
    """Share a prefix among as many branches as a forward pass has room for."""
    part: list[_Branch] = []
    length = 0
    for branch in sorted(bundle, key=lambda branch: -len(branch.token_ids)):
        own = len(branch.token_ids) - branch.prefix
        # attention pads branches to the longest: a much shorter one is better off with a prefix of its own kind
        short = bool(part) and 2 * own + _PADDED_GLADLY < len(part[0].token_ids) - branch.prefix
        if part and (short or length + own > micro_batch_tokens):
            yield part
            part, length = [], 0
        length += own if part else len(branch.token_ids)
        part.append(branch)
    yield part


@dataclass(frozen=True, slots=True)
class _Tree:
    """A prefix and its branches, one after the other, and the targets in them."""

    shape: TreeShape
    """With `start` 0: where it comes to stand is not known yet."""
    token_ids: np.ndarray
    position: np.ndarray
    column: np.ndarray
    target: np.ndarray
    old_logprob: np.ndarray
    known: np.ndarray
    advantage: np.ndarray
    weight: np.ndarray
    media: Sequence[Media]
    """Only where there is a single branch: rows with images are not shared."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence in it."""
        return self.shape.prefix + max(self.shape.branches)

    @classmethod
    def of(cls, branches: list[_Branch]) -> _Tree:
        prefix = branches[0].prefix
        ids, positions = [branches[0].token_ids[:prefix]], [np.arange(prefix)]
        columns: list[np.ndarray] = []
        start = prefix
        for branch in branches:
            length = len(branch.token_ids)
            ids.append(branch.token_ids[prefix:])
            positions.append(np.arange(prefix, length))
            # the predecessor of a branch's first token is the prefix's last one, wherever the branch stands
            before = np.arange(start - 1, start + length - prefix - 1)
            before[0] = prefix - 1
            columns.append(before[branch.weights[prefix:] > 0])
            start += length - prefix
        pairs = [(branch, branch.weights > 0) for branch in branches]
        return cls(
            shape=TreeShape(0, prefix, [len(branch.token_ids) - prefix for branch in branches]),
            token_ids=np.concatenate(ids),
            position=np.concatenate(positions),
            column=np.concatenate(columns),
            target=np.concatenate([branch.token_ids[where] for branch, where in pairs]),
            old_logprob=np.concatenate([branch.logprobs[where] for branch, where in pairs]),
            known=np.concatenate([branch.known[where] for branch, where in pairs]),
            advantage=np.concatenate([branch.advantages[where] for branch, where in pairs]),
            weight=np.concatenate(
                [(branch.share * branch.weights[where]).astype(np.float32) for branch, where in pairs]
            ),
            media=branches[0].media,
        )


def _micro(trees: list[_Tree], micro_batch_tokens: int, *, padded: bool) -> Iterator[list[_Tree]]:
    """Trees of like length together, as many as fit; if `padded`, the padding takes room too."""
    chosen: list[_Tree] = []
    taken = longest = 0
    for tree in sorted(trees, key=lambda tree: (-max(tree.shape.branches), -len(tree.token_ids))):
        longest = max(longest, len(tree.token_ids))
        taken = (len(chosen) + 1) * longest if padded else taken + len(tree.token_ids)
        if chosen and taken > micro_batch_tokens:
            yield chosen
            chosen, taken, longest = [], len(tree.token_ids), len(tree.token_ids)
        chosen.append(tree)
    if chosen:
        yield chosen


def _flat(trees: list[_Tree]) -> MicroBatch:
    """Trees one after the other in a single row."""
    starts = np.cumsum([0, *(len(tree.token_ids) for tree in trees)])[:-1]
    shapes = [replace(tree.shape, start=int(start)) for tree, start in zip(trees, starts, strict=True)]
    return MicroBatch(
        torch.from_numpy(np.concatenate([tree.token_ids for tree in trees])[None]),
        torch.from_numpy(np.concatenate([tree.position for tree in trees])[None]),
        Tree.of(shapes),
        torch.zeros(sum(len(tree.column) for tree in trees), dtype=torch.int64),
        torch.from_numpy(np.concatenate([tree.column + start for tree, start in zip(trees, starts, strict=True)])),
        *_targets(trees),
    )


def _rows(trees: list[_Tree]) -> MicroBatch:
    """Sequences in rows of their own, padded on the right."""
    length = max(len(tree.token_ids) for tree in trees)

    def padded(columns: list[np.ndarray]) -> torch.Tensor:
        rows = np.zeros((len(columns), length), dtype=np.int64)
        for row, column in zip(rows, columns, strict=True):
            row[: len(column)] = column
        return torch.from_numpy(rows)

    micro = MicroBatch(
        padded([tree.token_ids for tree in trees]),
        torch.arange(length).expand(len(trees), length),
        None,
        torch.from_numpy(np.concatenate([np.full(len(tree.column), row) for row, tree in enumerate(trees)])),
        torch.from_numpy(np.concatenate([tree.column for tree in trees])),
        *_targets(trees),
    )
    if not any(tree.media for tree in trees):
        return micro
    return replace(micro, media_B=[tree.media for tree in trees])


def _targets(trees: list[_Tree]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    def column(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(tree, name) for tree in trees]))

    return column("target"), column("old_logprob"), column("known"), column("advantage"), column("weight")
