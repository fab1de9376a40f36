"""Attention over trees: prefixes that are computed once, and the branches that grow out of them.

All tokens of a micro-batch stand in one flat row, so that nothing but attention ever sees padding. Attention gathers them:
prefixes attend to themselves, branches to their prefix and to themselves. It is registered with transformers as an attention
implementation and is an ordinary one (`sdpa`) whenever no tree is being computed.
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
    """Where a prefix and its branches stand in the flat row: `start` and lengths, the branches following the prefix."""

    start: int
    prefix: int
    branches: Sequence[int]


@dataclass(frozen=True, slots=True)
class Tree:
    """Index tensors of a flat row of T tokens: G prefixes of at most P tokens, N branches of at most R."""

    prefix_GP: torch.Tensor
    """Flat places of the prefixes' tokens; padding names the first token."""
    branch_NR: torch.Tensor
    """Flat places of the branches' tokens, likewise."""
    prefix_of_N: torch.Tensor
    seen_N1RK: torch.Tensor
    """Which of its prefix's P and its own R tokens a branch's token sees: K = P + R."""
    place_T: torch.Tensor
    """Where a token's result is among the G * P + N * R gathered ones."""

    @classmethod
    def of(cls, shapes: Sequence[TreeShape]) -> Tree:
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
            return rows.transpose(1, 2).repeat_interleave(repeat, dim=1)

        prefix_key, prefix_value = (gathered(x, self.prefix_GP, repeat) for x in (key_HTD, value_HTD))
        prefix_out = F.scaled_dot_product_attention(
            gathered(query_HTD, self.prefix_GP), prefix_key, prefix_value, is_causal=True, scale=scaling
        )
        branch_out = F.scaled_dot_product_attention(
            gathered(query_HTD, self.branch_NR),
            torch.cat([prefix_key[self.prefix_of_N], gathered(key_HTD, self.branch_NR, repeat)], dim=2),
            torch.cat([prefix_value[self.prefix_of_N], gathered(value_HTD, self.branch_NR, repeat)], dim=2),
            attn_mask=self.seen_N1RK,
            scale=scaling,
        )
        results = torch.cat([out.transpose(1, 2).flatten(0, 1) for out in (prefix_out, branch_out)])
        return results[self.place_T]


_growing: ContextVar[Tree | None] = ContextVar("tree", default=None)


@contextmanager
def tree_attention(tree: Tree) -> Iterator[None]:
    """Inside, the attention of models that use tree attention is that of `tree`."""
    token = _growing.set(tree)
    try:
        yield
    finally:
        _growing.reset(token)


def use_tree_attention(model: Any) -> None:
    """Give a transformers model an attention that can compute trees. Everything else stays what it is.

    Raises ValueError if the model's attention cannot be exchanged.
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
    tree = _growing.get()
    if tree is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    if ignored := unsupported(others, known=("dropout", "is_causal")):
        raise TypeError(f"tree attention does not compute {', '.join(ignored)}")
    return tree.attend(query[0], key[0], value[0], scaling).unsqueeze(0), None


def _mask(*arguments: Any, **options: Any) -> torch.Tensor | None:
    # a mask of all tokens by all tokens would be large, and nobody would look at it
    return None if _growing.get() is not None else sdpa_mask(*arguments, **options)
