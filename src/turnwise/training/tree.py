"""Attention over trees: a prefix is computed once for all of its branches.

All tokens of a micro-batch are in one flat row without padding. Only attention gathers them into padded rows: the tokens of a
prefix attend to the prefix, the tokens of a branch to their prefix and to the branch itself. The attention is registered with
transformers under a name of its own, and is the ordinary `sdpa` whenever no tree is computed.

Axis suffixes: T tokens of the flat row, G prefixes of at most P tokens, N branches of at most R tokens, K = P + R keys of a
branch, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from turnwise.models.attention import set_text_attention, unsupported

__all__ = ["Tree", "TreeShape", "tree_attention", "use_tree_attention"]

_NAME = "turnwise_tree"


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The place of a prefix and its branches in the flat row: `start`, then their lengths. The branches follow the prefix."""

    start: int
    prefix: int
    branches: Sequence[int]


@dataclass(frozen=True, slots=True)
class Tree:
    """Index tensors of a flat row.

    Example: a prefix `p q` with the branches `a b c` and `x`, at T = 0 1 2 3 4 5::

        prefix_GP = [[0, 1]]    branch_NR = [[2, 3, 4], [5, 0, 0]]    prefix_of_N = [0, 0]
        place_T   = 0 1 | 2 3 4 | 5         (2 places for the prefix, then 3 for each branch)
    """

    prefix_GP: torch.Tensor
    """Places in the flat row of each prefix's tokens. Padding holds 0: a valid index, whose result is never read."""
    branch_NR: torch.Tensor
    """The same for the tokens of each branch."""
    prefix_of_N: torch.Tensor
    """The row of `prefix_GP` that each branch belongs to."""
    seen_N1RK: torch.Tensor
    """Which keys a token of a branch attends to: the P places of its prefix, then the R places of its branch."""
    place_T: torch.Tensor
    """Place of each token's result among the G * P + N * R gathered results."""

    @classmethod
    def of(cls, shapes: Sequence[TreeShape]) -> Tree:
        """The index tensors of trees that fill the flat row without gaps."""
        prefixes = [shape.prefix for shape in shapes]
        owners = [number for number, shape in enumerate(shapes) for _ in shape.branches]
        lengths = [length for shape in shapes for length in shape.branches]
        longest_prefix, longest_branch = max(prefixes), max(lengths)
        prefix_GP = np.zeros((len(shapes), longest_prefix), dtype=np.int64)
        branch_NR = np.zeros((len(lengths), longest_branch), dtype=np.int64)
        place_T = np.empty(sum(prefixes) + sum(lengths), dtype=np.int64)
        number = 0
        for row, shape in enumerate(shapes):
            flat = np.arange(shape.start, shape.start + shape.prefix)
            prefix_GP[row, : shape.prefix] = flat
            place_T[flat] = row * longest_prefix + np.arange(shape.prefix)
            start = shape.start + shape.prefix
            for length in shape.branches:
                flat = np.arange(start, start + length)
                branch_NR[number, :length] = flat
                place_T[flat] = prefix_GP.size + number * longest_branch + np.arange(length)
                start, number = start + length, number + 1
        # a branch's token sees its whole prefix (not the padding behind it), and its own branch causally. Padding in a branch
        # is on the right, where no token of the branch looks
        of_prefix_NP = np.arange(longest_prefix)[None] < np.array(prefixes)[owners][:, None]
        seen_NRP = np.broadcast_to(of_prefix_NP[:, None], (len(lengths), longest_branch, longest_prefix))
        own_NRR = np.broadcast_to(np.tri(longest_branch, dtype=bool), (len(lengths), longest_branch, longest_branch))
        return cls(
            prefix_GP=torch.from_numpy(prefix_GP),
            branch_NR=torch.from_numpy(branch_NR),
            prefix_of_N=torch.tensor(owners),
            seen_N1RK=torch.from_numpy(np.concatenate([seen_NRP, own_NRR], axis=-1)).unsqueeze(1),
            place_T=torch.from_numpy(place_T),
        )

    def to(self, device: torch.device) -> Tree:
        """The same on another device."""
        return Tree(*(getattr(self, name).to(device) for name in Tree.__dataclass_fields__))

    def attend(
        self, query_HTD: torch.Tensor, key_HTD: torch.Tensor, value_HTD: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Attention of the flat row, [T, H, D]. Keys and values may have fewer heads than the query."""
        repeat = query_HTD.shape[0] // key_HTD.shape[0]

        def gathered(heads_HTD: torch.Tensor, places: torch.Tensor, repeat: int = 1) -> torch.Tensor:
            rows = heads_HTD.transpose(0, 1)[places]  # [rows, length, heads, D]
            return rows.transpose(1, 2).repeat_interleave(repeat, dim=1)  # [rows, heads * repeat, length, D]

        # prefixes: causal attention hides the padding, which is on the right
        prefix_key, prefix_value = (gathered(x, self.prefix_GP, repeat) for x in (key_HTD, value_HTD))
        prefix_out = F.scaled_dot_product_attention(
            gathered(query_HTD, self.prefix_GP), prefix_key, prefix_value, is_causal=True, scale=scaling
        )
        # branches: the keys of the prefix come first. Keys have their rotary positions already, so a branch continues at the
        # position after its prefix, wherever it is in the flat row
        branch_out = F.scaled_dot_product_attention(
            gathered(query_HTD, self.branch_NR),
            torch.cat([prefix_key[self.prefix_of_N], gathered(key_HTD, self.branch_NR, repeat)], dim=2),
            torch.cat([prefix_value[self.prefix_of_N], gathered(value_HTD, self.branch_NR, repeat)], dim=2),
            attn_mask=self.seen_N1RK,
            scale=scaling,
        )
        results = torch.cat([out.transpose(1, 2).flatten(0, 1) for out in (prefix_out, branch_out)])
        return results[self.place_T]


_current_tree: ContextVar[Tree | None] = ContextVar("tree", default=None)


@contextmanager
def tree_attention(tree: Tree) -> Iterator[None]:
    """While it is open, models with tree attention compute `tree`."""
    token = _current_tree.set(tree)
    try:
        yield
    finally:
        _current_tree.reset(token)


def use_tree_attention(model: Any) -> None:
    """Give a transformers model an attention that can compute trees; sequences are computed as before.

    Raises ValueError if the model's attention cannot be replaced.
    """
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    set_text_attention(model, _NAME)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **others: Any,  # transformers' own protocol
) -> tuple[torch.Tensor, None]:
    tree = _current_tree.get()
    if tree is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    if ignored := unsupported(others, known=("dropout", "is_causal")):
        raise TypeError(f"tree attention does not compute {', '.join(ignored)}")
    return tree.attend(query[0], key[0], value[0], scaling).unsqueeze(0), None


def _mask(*arguments: Any, **options: Any) -> torch.Tensor | None:
    # the tree has a mask of its own; one of all T x T tokens would be large and unused
    return None if _current_tree.get() is not None else sdpa_mask(*arguments, **options)
