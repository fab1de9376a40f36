"""Converts verl's keys for devices: how many, and how the model is divided among them. The section `cluster` of a recipe."""

from __future__ import annotations

from turnwise.compat.verl.keys import ACTOR, ROLLOUT
from turnwise.compat.verl.recipe_builder import VerlRecipeBuilder

__all__ = ["PLACEMENT", "convert_placement"]

_FSDP = f"{ACTOR}.fsdp_config"
_NODES, _GPUS = "trainer.nnodes", "trainer.n_gpus_per_node"
_DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32"}
_ONE_DEVICE = "the embedded engine uses one device; set engine.name=vllm and"
_ULYSSES = (
    "ulysses_sequence_parallel_size",
    "fsdp_config.ulysses_sequence_parallel_size",
)
_REASONS = {
    **{f"{ACTOR}.{name}": "a sequence is not divided among ranks: set train.micro_batch_tokens" for name in _ULYSSES},
    f"{_FSDP}.fsdp_size": "the model is divided among all ranks",
    f"{_FSDP}.wrap_policy.min_num_params": "each layer is gathered as a unit",
    f"{_FSDP}.forward_prefetch": "torch's fully_shard gathers the next layer during the computation of a layer",
    f"{ROLLOUT}.tensor_model_parallel_size": f"{_ONE_DEVICE} engine.tensor_parallel",
    f"{ROLLOUT}.data_parallel_size": f"{_ONE_DEVICE} engine.data_parallel",
    f"{ROLLOUT}.pipeline_model_parallel_size": f"{_ONE_DEVICE} engine.arguments=[--pipeline-parallel-size, ...]",
}
_CARRIED = (
    _NODES,
    _GPUS,
    f"{_FSDP}.param_offload",
    f"{_FSDP}.optimizer_offload",
    f"{_FSDP}.reshard_after_forward",
    f"{_FSDP}.mixed_precision.param_dtype",
    f"{_FSDP}.mixed_precision.reduce_dtype",
)

PLACEMENT = (*_CARRIED, *_REASONS)
"""The keys that this module converts."""


def convert_placement(builder: VerlRecipeBuilder) -> None:
    """Set `cluster`: `local` on one machine, `torchrun` on several; one process for one GPU."""
    for key, reason in _REASONS.items():
        builder.reject(key, reason)
    nodes, gpus = builder.count(_NODES) or 1, builder.count(_GPUS) or 1
    if nodes * gpus == 1 or not (builder.is_set(_GPUS) or builder.is_set(_NODES)):
        builder.convert("nothing: one process is the default", _NODES, _GPUS)
        _in_one_process(builder)
        return
    if (optimizer := builder.get("train.optimizer.name", "adamw")) != "adamw":
        reason = f"several ranks cannot train with train.optimizer.name={optimizer}: use adamw, and set cluster=local"
        for key in _CARRIED:
            builder.reject(key, reason)
        return
    if nodes == 1:
        builder.set("cluster.launcher", "local", _NODES, _GPUS)
        builder.set("cluster.trainers", gpus, _GPUS)
    else:
        builder.set("cluster.launcher", "torchrun", _NODES, _GPUS)
        start = f"torchrun --nnodes {nodes} --nproc-per-node {gpus if builder.is_set(_GPUS) else 8} -m turnwise train RECIPE"
        builder.assume("cluster.launcher", "torchrun", f"start `{start}` on each machine (docs/slurm.md)")
    _fsdp(builder)


def _in_one_process(builder: VerlRecipeBuilder) -> None:
    """Without ranks, only the state of the optimizer can be offloaded."""
    optimizer = builder.get("train.optimizer.name", "adamw")
    offloads = builder.value(f"{_FSDP}.optimizer_offload") is True
    if offloads and optimizer == "adamw" and builder.get("model.device") != "cpu":
        builder.set("train.optimizer.offload", "cpu", f"{_FSDP}.optimizer_offload")
    for key in _CARRIED[2:]:
        if key not in builder.converted:
            builder.reject(key, "has no effect with one GPU: the model is not divided")


def _fsdp(builder: VerlRecipeBuilder) -> None:
    """Set `cluster.fsdp`."""
    offload = [f"{_FSDP}.param_offload", f"{_FSDP}.optimizer_offload"]
    if any(builder.value(key) is True for key in offload):
        # verl moves each of them between its phases; here, all parts are in the CPU's memory, or none
        builder.set("cluster.fsdp.offload", "cpu", *offload)
    else:
        builder.convert("nothing: it is the default", *offload)
    key = f"{_FSDP}.reshard_after_forward"
    if isinstance(value := builder.value(key), bool):
        builder.set("cluster.fsdp.reshard_after_forward", value, key)
    dtypes = {name: builder.value(f"{_FSDP}.mixed_precision.{name}_dtype") for name in ("param", "reduce")}
    for name, value in dtypes.items():
        key, dtype = f"{_FSDP}.mixed_precision.{name}_dtype", _DTYPES.get(str(value))
        if value is None:
            continue
        if dtype is None:
            builder.reject(key, "bf16 and fp32 are supported", changes_training=True)
        elif name == "reduce":
            builder.set("cluster.fsdp.reduce_dtype", dtype, key)
        elif dtype == "float32" or builder.get("model.dtype", "float32") == dtype:
            builder.convert("nothing: it is the type of the weights (model.dtype)", key)
        else:
            builder.set("cluster.fsdp.param_dtype", dtype, key)
