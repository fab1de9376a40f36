"""The number of ranks on one machine."""

from __future__ import annotations

import glob
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turnwise.config.cluster import ClusterSection

__all__ = ["local_ranks"]


def local_ranks(cluster: ClusterSection) -> int:
    """The number of ranks that `cluster.launcher=local` starts. Counts GPUs without torch, which only the ranks import."""
    if cluster.trainers is not None:
        return cluster.trainers
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = glob.glob("/dev/nvidia[0-9]*") if visible is None else [name for name in visible.split(",") if name]
    return len(gpus) or 2
