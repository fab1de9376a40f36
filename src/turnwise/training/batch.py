"""From trajectories to what a forward pass takes, exactly: every sampled token once, every weight from the whole batch.

A batch row is a *tree*: the tokens that the trajectories of a group have in common, then one branch for each. A token sees
the trunk and its own branch, at the positions that it had in its own sequence, so a group's prompt is computed once and the
result is that of separate rows. What is trained on is a flat list of targets: which token, predicted from where, with which
advantage and which weight. The weights add up to one over the batch, so micro-batches change memory and never the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from turnwise.types import Segment, Trajectory

__all__ = ["Batch", "MicroBatch", "pack"]

TRUNK, PADDING = 0, -1
_LONGEST_TREE = 1024
"""Attention within a row costs its length squared: beyond this, trees are split, down to two sequences long."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Trees for one forward pass, padded on the right, and their N targets.

    Example: prompt `P P`, answers `a b` and `c`, makes one row::

        token_ids_BL = P P a b c
        position_BL  = 0 1 2 3 2
        branch_BL    = 0 0 1 1 2        (0 is the trunk, -1 padding)
        targets: a from column 1, b from column 2, c from column 1
    """

    token_ids_BL: torch.Tensor
    position_BL: torch.Tensor
    branch_BL: torch.Tensor
    row_N: torch.Tensor
    """The row of a target."""
    column_N: torch.Tensor
    """The column whose logits predict the target."""
    target_N: torch.Tensor
    """The sampled token."""
    old_logprob_N: torch.Tensor
    """As the engine reported it."""
    advantage_N: torch.Tensor
    weight_N: torch.Tensor
    """Share of the token in the batch's average."""

    @property
    def is_tree(self) -> bool:
        """Whether any row has more than one branch, and so needs a mask of its own."""
        return bool((self.branch_BL > 1).any())

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        return MicroBatch(*(getattr(self, name).to(device) for name in MicroBatch.__dataclass_fields__))


@dataclass(frozen=True, slots=True)
class Batch:
    """All that one optimizer step learns from."""

    micro_batches: list[MicroBatch]
    trajectories: int
    """That count in the average, those with nothing to learn from included."""
    tokens: int
    """Sampled tokens of those trajectories."""


def pack(
    trajectories: Sequence[Trajectory],
    *,
    average: Literal["token", "sequence"] = "token",
    micro_batch_tokens: int = 8192,
    share_prompts: bool = True,
    keep_zero: bool = False,
) -> Batch:
    """Pack the trajectories that have advantages.

    `average="token"`: all sampled tokens of the batch weigh the same. `"sequence"`: all trajectories do, however many
    segments they have. Trajectories without any advantage other than zero count in the average and are left out of the
    forward pass, because their gradient is zero; `keep_zero` keeps them in, for losses with further terms.
    """
    counted = [one for one in trajectories if one.advantages]
    tokens = sum(one.sampled_tokens for one in counted)
    branches: dict[tuple[str, bytes], list[_Branch]] = {}
    for one in counted:
        if not keep_zero and not any(one.advantages):
            continue
        weight = 1.0 / tokens if average == "token" else 1.0 / (len(counted) * one.sampled_tokens)
        for number, segment in enumerate(one.segments):
            branch = _Branch.of(segment, one.advantages, weight)
            if branch is not None:
                # what a group has in common is its opening; after it everybody goes their own way
                trunk = branch.token_ids[: branch.trunk].tobytes()
                key = (one.group, trunk) if share_prompts else (f"{one.id}:{number}", trunk)
                branches.setdefault(key, []).append(branch)
    trees = [_Tree.of(part) for bundle in branches.values() for part in _split(bundle, micro_batch_tokens)]
    return Batch(
        micro_batches=[_stack(chosen) for chosen in _micro(trees, micro_batch_tokens)],
        trajectories=len(counted),
        tokens=tokens,
    )


@dataclass(frozen=True, slots=True)
class _Branch:
    """One segment up to its last sampled token, as numpy columns."""

    token_ids: np.ndarray
    turn: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    """One for each token; 0 where it was not sampled."""
    weight: float
    trunk: int
    """Length of the opening: what comes before the first sampled token."""

    @classmethod
    def of(cls, segment: Segment, advantages: Sequence[float], weight: float) -> _Branch | None:
        turn = np.array(segment.turn, dtype=np.int64)
        sampled = np.flatnonzero(turn >= 0)
        if not len(sampled):
            return None
        end = int(sampled[-1]) + 1  # nothing is predicted from what was heard after the last word
        turn = turn[:end]
        return cls(
            token_ids=np.array(segment.token_ids[:end], dtype=np.int64),
            turn=turn,
            logprobs=np.array(segment.logprobs[:end], dtype=np.float32),
            advantages=np.where(turn >= 0, np.array(advantages, dtype=np.float32)[turn], 0.0).astype(np.float32),
            weight=weight,
            trunk=int(sampled[0]),
        )


def _split(bundle: list[_Branch], micro_batch_tokens: int) -> Iterator[list[_Branch]]:
    """Share a trunk among as many branches as a row has room for."""
    longest = max(len(branch.token_ids) for branch in bundle)
    room = min(micro_batch_tokens, max(_LONGEST_TREE, 2 * longest))
    part: list[_Branch] = []
    length = 0
    for branch in bundle:
        own = len(branch.token_ids) - branch.trunk
        if part and length + own > room:
            yield part
            part, length = [], 0
        length += own if part else len(branch.token_ids)
        part.append(branch)
    yield part


@dataclass(frozen=True, slots=True)
class _Tree:
    """One row: a trunk and its branches, and the targets in them."""

    token_ids: np.ndarray
    position: np.ndarray
    branch: np.ndarray
    column: np.ndarray
    target: np.ndarray
    old_logprob: np.ndarray
    advantage: np.ndarray
    weight: np.ndarray

    @classmethod
    def of(cls, branches: list[_Branch]) -> _Tree:
        trunk = branches[0].trunk
        ids, positions, marks = [branches[0].token_ids[:trunk]], [np.arange(trunk)], [np.full(trunk, TRUNK)]
        columns: list[np.ndarray] = []
        start = trunk
        for number, branch in enumerate(branches, 1):
            length = len(branch.token_ids)
            ids.append(branch.token_ids[trunk:])
            positions.append(np.arange(trunk, length))
            marks.append(np.full(length - trunk, number))
            # the predecessor of a branch's first token is the trunk's last one, wherever the branch stands in the row
            before = np.arange(start - 1, start + length - trunk - 1)
            before[0] = trunk - 1
            columns.append(before[branch.turn[trunk:] >= 0])
            start += length - trunk
        sampled = [branch.turn >= 0 for branch in branches]
        return cls(
            token_ids=np.concatenate(ids),
            position=np.concatenate(positions),
            branch=np.concatenate(marks),
            column=np.concatenate(columns),
            target=np.concatenate([b.token_ids[s] for b, s in zip(branches, sampled, strict=True)]),
            old_logprob=np.concatenate([b.logprobs[s] for b, s in zip(branches, sampled, strict=True)]),
            advantage=np.concatenate([b.advantages[s] for b, s in zip(branches, sampled, strict=True)]),
            weight=np.concatenate(
                [np.full(int(s.sum()), b.weight, dtype=np.float32) for b, s in zip(branches, sampled, strict=True)]
            ),
        )


def _micro(trees: list[_Tree], micro_batch_tokens: int) -> Iterator[list[_Tree]]:
    """Rows of like length together, as many as fit."""
    chosen: list[_Tree] = []
    for tree in sorted(trees, key=lambda tree: -len(tree.token_ids)):
        if chosen and (len(chosen) + 1) * len(chosen[0].token_ids) > micro_batch_tokens:
            yield chosen
            chosen = []
        chosen.append(tree)
    if chosen:
        yield chosen


def _stack(trees: list[_Tree]) -> MicroBatch:
    length = max(len(tree.token_ids) for tree in trees)

    def padded(columns: list[np.ndarray], fill: int) -> torch.Tensor:
        rows = np.full((len(columns), length), fill, dtype=np.int64)
        for row, column in zip(rows, columns, strict=True):
            row[: len(column)] = column
        return torch.from_numpy(rows)

    return MicroBatch(
        token_ids_BL=padded([tree.token_ids for tree in trees], 0),
        position_BL=padded([tree.position for tree in trees], 0),
        branch_BL=padded([tree.branch for tree in trees], PADDING),
        row_N=torch.from_numpy(np.concatenate([np.full(len(tree.column), row) for row, tree in enumerate(trees)])),
        column_N=torch.from_numpy(np.concatenate([tree.column for tree in trees])),
        target_N=torch.from_numpy(np.concatenate([tree.target for tree in trees])),
        old_logprob_N=torch.from_numpy(np.concatenate([tree.old_logprob for tree in trees])),
        advantage_N=torch.from_numpy(np.concatenate([tree.advantage for tree in trees])),
        weight_N=torch.from_numpy(np.concatenate([tree.weight for tree in trees])),
    )
