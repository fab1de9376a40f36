"""Attention of a decode step against float64 formulas: rows with gaps, a common prefix, rows much longer than the others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from turnwise.engines.local.fused_attention import AttentionDims, DecodeAttention

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
@pytest.mark.parametrize("common_prefix", [0, 90])
@pytest.mark.parametrize("long_rows", [0, 1, 5, 40])
def test_each_row_attends_to_its_own_tokens(gaps: bool, common_prefix: int, long_rows: int) -> None:
    draw = np.random.default_rng(long_rows)
    torch.manual_seed(0)
    rows_B = np.sort(draw.choice(50, 40, replace=False)) if gaps else np.arange(40)
    positions_B = common_prefix + draw.integers(1, 30, 40)
    positions_B[draw.choice(40, long_rows, replace=False)] += draw.integers(150, 280, long_rows)
    kv = torch.randn(2, 50, DIMS.kv_heads, 512, DIMS.head_dim)
    kv[:, rows_B, :, :common_prefix] = kv[:, rows_B[:1], :, :common_prefix]
    q_BHD = torch.randn(40, DIMS.heads, DIMS.head_dim)
    attention = DecodeAttention(DIMS, rows_B, positions_B, common_prefix)
    output_BD = attention(kv, q_BHD)
    assert torch.allclose(output_BD.double(), reference(kv, q_BHD, rows_B, positions_B), atol=1e-5)


def test_other_rows_are_not_padded_to_a_long_row() -> None:
    positions_B = np.full(40, 120)
    positions_B[7] = 400
    kv = torch.randn(2, 40, DIMS.kv_heads, 512, DIMS.head_dim)
    # NaN where only a padded computation would read
    kv[:, np.arange(40) != 7, :, 121:] = torch.nan
    output_BD = DecodeAttention(DIMS, np.arange(40), positions_B, 0)(kv, torch.randn(40, DIMS.heads, DIMS.head_dim))
    assert bool(output_BD.isfinite().all())
