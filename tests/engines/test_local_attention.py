"""Attention of a decode step against float64 formulas: rows with gaps, shared prefixes, rows much longer than the others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from turnwise.engines.local.cache import NOTHING_SHARED, SharedPrefix, shared_prefix
from turnwise.engines.local.fused import AttentionDims, DecodeAttention

DIMS = AttentionDims(heads=4, kv_heads=2, head_dim=8, scale=8**-0.5, dtype=torch.float32, device=torch.device("cpu"))


def reference(kv: torch.Tensor, q_BHD: torch.Tensor, rows_B: np.ndarray, positions_B: np.ndarray) -> torch.Tensor:
    """Softmax attention of each row over its own keys and values only, in float64."""
    group = DIMS.heads // DIMS.kv_heads
    outputs = []
    for q_HD, row, position in zip(q_BHD.double(), rows_B, positions_B, strict=True):
        keys, values = kv[:, row, :, : position + 1].double()
        heads = [
            torch.softmax(keys[head // group] @ q_HD[head] * DIMS.scale, 0) @ values[head // group]
            for head in range(DIMS.heads)
        ]
        outputs.append(torch.cat(heads))
    return torch.stack(outputs)


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("groups", [0, 1, 2, 4, 5, 7])
@pytest.mark.parametrize("long_rows", [0, 1, 5, 40])
def test_each_row_attends_to_its_own_tokens(gaps: bool, groups: int, long_rows: int) -> None:
    draw = np.random.default_rng(long_rows)
    torch.manual_seed(0)
    rows_B = np.sort(draw.choice(50, 40, replace=False)) if gaps else np.arange(40)
    prefix = 90 if groups else 0
    positions_B = prefix + draw.integers(1, 30, 40)
    positions_B[draw.choice(40, long_rows, replace=False)] += draw.integers(150, 280, long_rows)
    kv = torch.randn(2, 50, DIMS.kv_heads, 512, DIMS.head_dim)
    group_B = {
        4: np.arange(40) // 10,  # neighbors of equal groups
        5: np.searchsorted([16, 26, 30, 39], np.arange(40), side="right"),  # 16, 10, 4, 9 and 1 rows
        7: np.maximum(0, np.arange(40) - 33),
    }.get(groups, np.arange(40) % max(1, groups))
    members = [np.flatnonzero(group_B == group) for group in range(groups)]
    for group in members:
        kv[:, rows_B[group], :, :prefix] = kv[:, rows_B[group[:1]], :, :prefix]
    q_BHD = torch.randn(40, DIMS.heads, DIMS.head_dim)
    attention = DecodeAttention(DIMS, rows_B, positions_B, SharedPrefix(prefix, members))
    output_BD = attention(kv, q_BHD)
    assert torch.allclose(output_BD.double(), reference(kv, q_BHD, rows_B, positions_B), atol=1e-5)


def test_other_rows_are_not_padded_to_a_long_row() -> None:
    positions_B = np.full(40, 120)
    positions_B[7] = 400
    kv = torch.randn(2, 40, DIMS.kv_heads, 512, DIMS.head_dim)
    # NaN where only a padded computation would read
    kv[:, np.arange(40) != 7, :, 121:] = torch.nan
    output_BD = DecodeAttention(DIMS, np.arange(40), positions_B, NOTHING_SHARED)(
        kv, torch.randn(40, DIMS.heads, DIMS.head_dim)
    )
    assert bool(output_BD.isfinite().all())


def batch(*sizes: tuple[int, int]) -> np.ndarray:
    """Tokens [B, L] of groups of (requests, shared tokens); the other tokens are drawn."""
    draw = np.random.default_rng(0)
    rows = []
    for requests, shared in sizes:
        start = draw.integers(0, 1000, 400)
        rows += [np.concatenate((start[:shared], draw.integers(0, 1000, 400 - shared))) for _ in range(requests)]
    return np.stack(rows).astype(np.int32)


def test_the_samples_of_each_prompt_share_its_prefix() -> None:
    tokens_BL = batch((8, 371), (8, 380), (8, 371), (8, 390))
    tokens_BL[:, :164] = tokens_BL[0, :164]
    tokens_BL = tokens_BL[(order := np.random.default_rng(1).permutation(32))]
    shared = shared_prefix(tokens_BL)
    assert shared.tokens == 371
    assert sorted(tuple(order[group] // 8) for group in shared.groups) == [(index,) * 8 for index in range(4)]
    assert all((np.diff(group) > 0).all() for group in shared.groups)


def test_one_prefix_for_all_is_preferred_where_groups_share_little_more() -> None:
    tokens_BL = batch((8, 130), (8, 130), (8, 130), (8, 130))
    tokens_BL[:, :120] = tokens_BL[0, :120]
    shared = shared_prefix(tokens_BL)
    assert shared.tokens == 120
    assert [group.tolist() for group in shared.groups] == [list(range(32))]


def test_a_request_that_shares_nothing_is_a_group_of_its_own() -> None:
    shared = shared_prefix(batch((20, 300), (1, 0)))
    assert shared.tokens == 300
    assert sorted(map(len, shared.groups)) == [1, 20]


@pytest.mark.parametrize("tokens_BL", [batch((1, 400)), batch((20, 0)), batch((4, 300)), np.zeros((5, 0), np.int32)])
def test_a_prefix_that_saves_little_is_not_shared(tokens_BL: np.ndarray) -> None:
    assert shared_prefix(tokens_BL) == NOTHING_SHARED
