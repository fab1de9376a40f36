"""Makes torch deterministic (`deterministic: true`)."""

from __future__ import annotations

import torch

__all__ = ["use_deterministic_algorithms"]


def use_deterministic_algorithms() -> None:
    """Make torch deterministic in this process: deterministic algorithms, and one thread."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
