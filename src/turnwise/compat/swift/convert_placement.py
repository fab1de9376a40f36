"""Converts ms-swift's numbers of processes, and how DeepSpeed or FSDP divides a model among them: the section `cluster`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.compat.swift.recipe_builder import SwiftRecipeBuilder

__all__ = ["PLACEMENT_ARGUMENTS", "convert_placement"]

PLACEMENT_ARGUMENTS = ("deepspeed", "fsdp")
"""The arguments that this module converts."""
_STAGES: dict[str, dict[str, Any]] = {
    "zero2": {"cluster.fsdp.reshard_after_forward": False},
    "zero3": {},
    "zero2_offload": {"cluster.fsdp.reshard_after_forward": False, "cluster.fsdp.offload": "cpu"},
    "zero3_offload": {"cluster.fsdp.offload": "cpu"},
}
"""ms-swift's names of its DeepSpeed configurations, and the same with torch's fully_shard."""
_FSDP: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "full_shard": {},
    "shard_grad_op": {"cluster.fsdp.reshard_after_forward": False},
    "offload": {"cluster.fsdp.offload": "cpu"},
    "auto_wrap": {},
}
"""The words of `fsdp` in transformers' TrainingArguments, and ms-swift's name of its own configuration."""


def convert_placement(builder: SwiftRecipeBuilder) -> None:
    """Set `cluster` if the trainer has several processes (`NPROC_PER_NODE`, `NNODES`): `local`, or `torchrun` on several
    machines."""
    processes, nodes, variable = builder.given.processes, builder.given.nodes, builder.given.nodes_variable
    if variable is not None:
        reason = (
            "the number of machines is not known here, so train.batch_size is that of one machine: set the variable and convert "
            "again, or multiply train.batch_size by it"
        )
        builder.reject_value("NNODES", variable, reason, changes_training=True)
    if processes == 1 and variable is None:
        _reject(
            builder, "has no effect with one process (NPROC_PER_NODE); for several, set cluster=local (docs/cluster.md)"
        )
        return
    optimizer = builder.get("train.optimizer.name", "adamw")
    if optimizer != "adamw":
        reason = f"{processes} processes cannot train with train.optimizer.name={optimizer}: use adamw, and set cluster=local"
        builder.assume("cluster.launcher", "none", reason)
        _reject(builder, reason)
        return
    start = f"with NPROC_PER_NODE and NNODES, ms-swift trains in {processes} processes"
    if nodes == 1 and variable is None:
        builder.set("cluster.launcher", "local")
        builder.set("cluster.trainers", processes)
        builder.assume("cluster.trainers", processes, f"{start}; change the number if your machine has other GPUs")
    else:
        builder.set("cluster.launcher", "torchrun")
        command = (
            f"torchrun --nnodes {variable or nodes} --nproc-per-node {processes // nodes} -m turnwise train RECIPE"
        )
        builder.assume("cluster.launcher", "torchrun", f"{start}: start `{command}` on each machine (docs/slurm.md)")
    stage, words = str(builder.values.get("deepspeed")), str(builder.values.get("fsdp") or "").split()
    _divide(builder, "deepspeed", _STAGES, [stage])
    _divide(builder, "fsdp", _FSDP, words)


def _reject(builder: SwiftRecipeBuilder, reason: str) -> None:
    for key in PLACEMENT_ARGUMENTS:
        builder.reject(key, reason)


def _divide(builder: SwiftRecipeBuilder, key: str, known: Mapping[str, dict[str, Any]], words: Sequence[str]) -> None:
    """Set `cluster.fsdp` as the words of an argument say."""
    if any(word not in known for word in words):
        builder.reject(key, f"these values can be converted: {', '.join(known)}. The model is divided among all ranks")
        return
    for word in words:
        for option, value in known[word].items():
            builder.set(option, value, key)
    builder.convert("cluster.fsdp", key)
