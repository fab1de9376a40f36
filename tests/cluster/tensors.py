"""Comparison of tensors by name, for the programs of ranks."""

from __future__ import annotations

import torch

__all__ = ["difference"]


def difference(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference, as a share of the largest value."""
    assert actual.keys() == expected.keys(), (sorted(actual), sorted(expected))
    largest = max(float(tensor.float().abs().max()) for tensor in expected.values())
    return max(float((actual[name].float() - expected[name].float()).abs().max()) for name in expected) / largest
