"""Converts ms-swift's numbers of processes, and how DeepSpeed divides a model among them: the section `cluster` of a recipe."""

from __future__ import annotations

from typing import Any

from turnwise.compat.swift.recipe_builder import SwiftRecipeBuilder

__all__ = ["PLACEMENT_ARGUMENTS", "convert_placement"]

PLACEMENT_ARGUMENTS = ("deepspeed",)
"""The arguments that this module converts."""
_STAGES: dict[str, dict[str, Any]] = {
    "zero2": {"cluster.fsdp.reshard_after_forward": False},
    "zero3": {},
    "zero2_offload": {"cluster.fsdp.reshard_after_forward": False, "cluster.fsdp.offload": "cpu"},
    "zero3_offload": {"cluster.fsdp.offload": "cpu"},
}
"""ms-swift's names of its DeepSpeed configurations, and the same with torch's fully_shard."""


def convert_placement(builder: SwiftRecipeBuilder) -> None:
    """Set `cluster` if the trainer has several processes (`NPROC_PER_NODE`, `NNODES`): `local`, or `torchrun` on several
    machines."""
    processes, nodes, key = builder.given.processes, builder.given.nodes, "deepspeed"
    if processes == 1:
        builder.reject(
            key, "has no effect with one process (NPROC_PER_NODE); for several, set cluster=local (docs/cluster.md)"
        )
        return
    optimizer = builder.get("train.optimizer.name", "adamw")
    if optimizer != "adamw":
        reason = f"{processes} processes cannot train with train.optimizer.name={optimizer}: use adamw, and set cluster=local"
        builder.assume("cluster.launcher", "none", reason)
        builder.reject(key, reason)
        return
    start = f"with NPROC_PER_NODE and NNODES, ms-swift trains in {processes} processes"
    if nodes == 1:
        builder.set("cluster.launcher", "local")
        builder.set("cluster.trainers", processes)
        builder.assume("cluster.trainers", processes, f"{start}; change the number if your machine has other GPUs")
    else:
        builder.set("cluster.launcher", "torchrun")
        command = f"torchrun --nnodes {nodes} --nproc-per-node {processes // nodes} -m turnwise train RECIPE"
        builder.assume("cluster.launcher", "torchrun", f"{start}: start `{command}` on each machine (docs/slurm.md)")
    stage = str(builder.values.get(key))
    if stage in _STAGES:
        for option, value in _STAGES[stage].items():
            builder.set(option, value, key)
        builder.convert("cluster.fsdp", key)
    else:
        builder.reject(
            key, f"these configurations can be converted: {', '.join(_STAGES)}. The model is divided among all ranks"
        )
