"""Packs trajectories into micro-batches: each sampled token is one target, weighted by its share of the batch's average.

A group is packed as a *tree*: the tokens that its trajectories have in common (the prefix), then one branch for each
trajectory. A token sees the prefix and its own branch, at the positions that it has in its own sequence, so the prompt of a
group is computed once and the result is that of separate rows. The tokens to train on are a flat list of targets: which
token, predicted from which column, with which advantage and which weight. The weights add up to one over the batch, so the
division into micro-batches changes memory use and never the result.

Axis suffixes in this folder: B rows, L columns, N targets, T tokens of a flat row, D hidden dimension, H heads, V vocabulary;
in tree.py also G prefixes, P tokens of a prefix, R tokens of a branch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from turnwise.training.branch import Branch, branches_of, logprob_kind
from turnwise.training.loss import Targets
from turnwise.training.tree import Tree, TreeShape
from turnwise.types import Failure, LogprobKind, Media, Trajectory

__all__ = ["Batch", "MicroBatch", "pack", "stale_without_logprobs"]

_CHEAP_PADDING = 32
"""Tokens of padding in a branch that cost less than a second copy of the prefix."""
_LONGEST_SHARED = 4096
"""Tokens. Sharing needs a mask of branches by sequences; for longer sequences it costs more than the prompt."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward pass, and its N targets: either rows padded on the right, or one flat row of trees.

    Example: prompt `P P`, completions `a b` and `c`, as a tree::

        token_ids_BL = P P a b c
        position_BL  = 0 1 2 3 2
        targets: a from column 1, b from column 2, c from column 1
    """

    token_ids_BL: torch.Tensor
    position_BL: torch.Tensor
    tree: Tree | None
    """The trees of a flat row; None for padded rows."""
    row_N: torch.Tensor
    """The row of a target."""
    column_N: torch.Tensor
    """The column whose logits predict the target."""
    targets: Targets
    media_B: Sequence[Sequence[Media]] = ()
    """The images and videos in each row; empty if no row has any."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        return MicroBatch(
            token_ids_BL=self.token_ids_BL.to(device),
            position_BL=self.position_BL.to(device),
            tree=None if self.tree is None else self.tree.to(device),
            row_N=self.row_N.to(device),
            column_N=self.column_N.to(device),
            targets=self.targets.to(device),
            media_B=self.media_B,
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """The data of one optimizer step."""

    micro_batches: list[MicroBatch]
    trajectories: int
    """Trajectories that count in the average, including those without a gradient."""
    tokens: int
    """Sampled tokens of those trajectories in turns with a weight above 0."""


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

    `average="token"`: each sampled token of the batch counts by the weight of its turn. `"sequence"`: all trajectories count
    the same, however many segments they have, and tokens by weight within a trajectory.

    Trajectories whose advantages are all zero count in the average, but are not in the forward pass, because their gradient
    is zero; `keep_zero` keeps them in, for losses with further terms. Trajectories of a group with equal tokens and equal
    advantages are computed once, at the weight of all of them.

    `kinds` are the kinds of log-probability that the loss can use (`BatchRequirements.logprob_kinds`); those of other kinds
    are dropped, and `Targets.known_N` is false for their tokens.

    Turns of weight 0 (`Turn.weight`) are excluded from numerator and denominator of the average: with them in the denominator,
    the size of the gradient would depend on how much of a conversation is masked. Advantages of 0 stay in the denominator:
    without them, the other tokens would count more the fewer tokens have an advantage. Tokens of weight 0 are no targets. They
    are context, and are not computed behind the last target.

    Raises ValueError if an advantage per token has another length than its turn has sampled tokens.
    """
    weighted = [(trajectory, *_weight_sum(trajectory)) for trajectory in trajectories if trajectory.advantages]
    counted = [(trajectory, weight_sum) for trajectory, weight_sum, _ in weighted if weight_sum > 0]
    total = sum(weight_sum for _, weight_sum in counted)
    sequence_numbers = itertools.count()
    branches: list[tuple[str, Branch]] = []
    for trajectory, weight_sum in counted:
        if not keep_zero and not any(turn.weight and trajectory.has_advantage(turn.index) for turn in trajectory.turns):
            continue
        share = 1.0 / total if average == "token" else 1.0 / (len(counted) * weight_sum)
        for branch in branches_of(trajectory, kinds, share, sequence_numbers):
            branches.append((trajectory.group, branch))
    bundles = _bundles(branches, share_prompts=share_prompts)
    trees = [_Tree.of(part) for bundle in bundles for part in _split(bundle, micro_batch_tokens)]
    shareable = [share_prompts and tree.longest <= _LONGEST_SHARED and not tree.media for tree in trees]
    flat = [tree for tree, shared in zip(trees, shareable, strict=True) if shared]
    padded = [tree for tree, shared in zip(trees, shareable, strict=True) if not shared]
    return Batch(
        micro_batches=[
            *(_flat_row(chosen) for chosen in _micro_batches(flat, micro_batch_tokens, padded=False)),
            *(_padded_rows(chosen) for chosen in _micro_batches(padded, micro_batch_tokens, padded=True)),
        ],
        trajectories=len(counted),
        tokens=sum(tokens for _, _, tokens in weighted),
    )


def _weight_sum(trajectory: Trajectory) -> tuple[float, int]:
    """The sum of the weights of a trajectory's sampled tokens, and the number of tokens with a weight above 0."""
    # counted in the segments: the turn's completion still has the tokens that an environment removed (`Reply.resume`)
    counts = Counter(turn for segment in trajectory.segments for turn in segment.turn)
    turns = [turn for turn in trajectory.turns if turn.weight > 0]
    return sum(turn.weight * counts[turn.index] for turn in turns), sum(counts[turn.index] for turn in turns)


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
                    f"turn {turn} was sampled by weights of version {sampled_by}, is learnt from by version {version}, and "
                    f"has log-probabilities of the kind '{unknown[turn]}'; importance correction needs "
                    f"{' or '.join(sorted(kinds))}. Use an engine that reports them, or train.overlap=false",
                )
    return None


def _bundles(branches: Sequence[tuple[str, Branch]], *, share_prompts: bool) -> list[list[Branch]]:
    """Branches (with their groups) by common prefix. Equal branches are merged into one, with the sum of their shares."""
    bundles: dict[tuple[str, bytes], dict[bytes, Branch]] = {}
    for group, branch in branches:
        identity = branch.identity()
        shareable = share_prompts and len(branch.token_ids) <= _LONGEST_SHARED and not branch.media
        # a group shares its opening; behind it, trajectories differ
        common = branch.token_ids[: branch.prefix].tobytes() if shareable else identity
        bundle = bundles.setdefault((group, common), {})
        equal = bundle.get(identity)
        bundle[identity] = branch if equal is None else replace(equal, share=equal.share + branch.share)
    return [list(bundle.values()) for bundle in bundles.values()]


def _split(bundle: list[Branch], micro_batch_tokens: int) -> Iterator[list[Branch]]:
    """Divide a bundle into parts that share one copy of the prefix and fit into a forward pass."""
    part: list[Branch] = []
    length = 0
    for branch in sorted(bundle, key=lambda branch: -len(branch.token_ids)):
        own = len(branch.token_ids) - branch.prefix
        # attention pads branches to the longest: a second copy of the prefix is cheaper for a much shorter branch
        short = bool(part) and 2 * own + _CHEAP_PADDING < len(part[0].token_ids) - branch.prefix
        if part and (short or length + own > micro_batch_tokens):
            yield part
            part, length = [], 0
        length += own if part else len(branch.token_ids)
        part.append(branch)
    yield part


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tree:
    """A prefix and its branches, one after the other, and the columns that predict the targets."""

    branches: list[Branch]
    shape: TreeShape
    """With `start` 0: the place in the flat row is not known yet."""
    token_ids: np.ndarray
    position: np.ndarray
    column: np.ndarray
    """One for each target of the branches, in their order."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence in it."""
        return self.shape.prefix + max(self.shape.branches)

    @property
    def media(self) -> Sequence[Media]:
        """Only a tree of a single branch has media: rows with images are not shared."""
        return self.branches[0].media

    @classmethod
    def of(cls, branches: list[Branch]) -> _Tree:
        prefix = branches[0].prefix
        ids, positions = [branches[0].token_ids[:prefix]], [np.arange(prefix)]
        columns: list[np.ndarray] = []
        start = prefix
        for branch in branches:
            length = len(branch.token_ids)
            ids.append(branch.token_ids[prefix:])
            positions.append(np.arange(prefix, length))
            # a token is predicted from the column before it; the first one of a branch from the last one of the prefix
            before = np.arange(start - 1, start + length - prefix - 1)
            before[0] = prefix - 1
            columns.append(before[branch.is_target[prefix:]])
            start += length - prefix
        return cls(
            branches=branches,
            shape=TreeShape(0, prefix, [len(branch.token_ids) - prefix for branch in branches]),
            token_ids=np.concatenate(ids),
            position=np.concatenate(positions),
            column=np.concatenate(columns),
        )


def _micro_batches(trees: list[_Tree], micro_batch_tokens: int, *, padded: bool) -> Iterator[list[_Tree]]:
    """Trees of similar length together, as many as fit; if `padded`, the padding counts too."""
    chosen: list[_Tree] = []
    tokens = longest = 0
    for tree in sorted(trees, key=lambda tree: (-max(tree.shape.branches), -len(tree.token_ids))):
        longest = max(longest, len(tree.token_ids))
        tokens = (len(chosen) + 1) * longest if padded else tokens + len(tree.token_ids)
        if chosen and tokens > micro_batch_tokens:
            yield chosen
            chosen, tokens, longest = [], len(tree.token_ids), len(tree.token_ids)
        chosen.append(tree)
    if chosen:
        yield chosen


def _flat_row(trees: list[_Tree]) -> MicroBatch:
    """Trees one after the other in a single row."""
    starts = np.cumsum([0, *(len(tree.token_ids) for tree in trees)])[:-1]
    shapes = [replace(tree.shape, start=int(start)) for tree, start in zip(trees, starts, strict=True)]
    columns = [tree.column + start for tree, start in zip(trees, starts, strict=True)]
    return MicroBatch(
        token_ids_BL=torch.from_numpy(np.concatenate([tree.token_ids for tree in trees])[None]),
        position_BL=torch.from_numpy(np.concatenate([tree.position for tree in trees])[None]),
        tree=Tree.of(shapes),
        row_N=torch.zeros(sum(len(column) for column in columns), dtype=torch.int64),
        column_N=torch.from_numpy(np.concatenate(columns)),
        targets=_targets(trees),
    )


def _padded_rows(trees: list[_Tree]) -> MicroBatch:
    """A row for each sequence, padded on the right."""
    length = max(len(tree.token_ids) for tree in trees)
    token_ids = np.zeros((len(trees), length), dtype=np.int64)
    for row, tree in zip(token_ids, trees, strict=True):
        row[: len(tree.token_ids)] = tree.token_ids
    rows = [np.full(len(tree.column), row) for row, tree in enumerate(trees)]
    return MicroBatch(
        token_ids_BL=torch.from_numpy(token_ids),
        position_BL=torch.arange(length).expand(len(trees), length),
        tree=None,
        row_N=torch.from_numpy(np.concatenate(rows)),
        column_N=torch.from_numpy(np.concatenate([tree.column for tree in trees])),
        targets=_targets(trees),
        media_B=[tree.media for tree in trees] if any(tree.media for tree in trees) else (),
    )


def _targets(trees: list[_Tree]) -> Targets:
    """The targets of all branches, in the order of the trees' columns."""
    branches = [branch for tree in trees for branch in tree.branches]

    def column(values: Callable[[Branch], np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([values(branch)[branch.is_target] for branch in branches]))

    return Targets(
        token_N=column(lambda branch: branch.token_ids),
        sequence_N=column(lambda branch: np.full(len(branch.turn), branch.number)),
        turn_N=column(lambda branch: branch.turn),
        version_N=column(lambda branch: branch.version),
        behaviour_logprob_N=column(lambda branch: branch.logprobs),
        known_N=column(lambda branch: branch.known),
        advantage_N=column(lambda branch: branch.advantages),
        weight_N=column(lambda branch: (branch.share * branch.weights).astype(np.float32)),
    )
