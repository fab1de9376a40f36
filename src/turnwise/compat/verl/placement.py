"""Converts verl's keys for devices: how many, and how the model is divided among them. The section `cluster` of a recipe."""

from __future__ import annotations

from turnwise.compat.verl.keys import ACTOR, ROLLOUT
from turnwise.compat.verl.recipe_builder import VerlRecipeBuilder

__all__ = ["PLACEMENT", "convert_placement"]

_FSDP = f"{ACTOR}.fsdp_config"
_NODES, _GPUS = "trainer.nnodes", "trainer.n_gpus_per_node"
_DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32"}
_TENSOR, _DATA = f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.data_parallel_size"
_ONE_DEVICE = "the embedded engine uses one device; set engine.name=vllm and"
_SERVERS = ("vllm", "sglang")
_ULYSSES = (
    "ulysses_sequence_parallel_size",
    "fsdp_config.ulysses_sequence_parallel_size",
)
_REASONS = {
    **{f"{ACTOR}.{name}": "a sequence is not divided among ranks: set train.micro_batch_tokens" for name in _ULYSSES},
    f"{_FSDP}.fsdp_size": "the model is divided among all ranks",
    f"{_FSDP}.wrap_policy.min_num_params": "each layer is gathered as a unit",
    f"{_FSDP}.forward_prefetch": "torch's fully_shard gathers the next layer during the computation of a layer",
    _TENSOR: f"{_ONE_DEVICE} engine.tensor_parallel",
    _DATA: f"{_ONE_DEVICE} engine.data_parallel",
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
    """Set `cluster`: `local` on one machine, `torchrun` on several; one process for one GPU. Set `engine` if verl's servers use
    several GPUs each."""
    # several machines if their number is a variable of the scheduler: it is needed for the start only
    variable = builder.reference(_NODES)
    nodes = 2 if variable is not None else builder.count(_NODES) or 1
    gpus = builder.count(_GPUS) or 1
    _engine(builder, gpus)
    for key, reason in _REASONS.items():
        if key not in builder.converted:
            builder.reject(key, reason)
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
        machines = nodes if variable is None else variable
        start = f"torchrun --nnodes {machines} --nproc-per-node {gpus if builder.is_set(_GPUS) else 8} -m turnwise train RECIPE"
        builder.assume("cluster.launcher", "torchrun", f"start `{start}` on each machine (docs/slurm.md)")
    _fsdp(builder)


def _engine(builder: VerlRecipeBuilder, gpus: int) -> None:
    """Set `engine` to servers on several GPUs each, which the embedded engine cannot use. As in verl, they are on the GPUs of the
    trainer, and free their memory while it trains (`free_cache_engine`)."""
    name = builder.value(f"{ROLLOUT}.name")
    if name in _SERVERS and (variable := builder.reference(_TENSOR)) is not None:
        reason = f"the number of servers depends on {variable}: set engine.replicas, {gpus} GPUs divided by it"
        builder.assume("engine.replicas", 1, reason)
        _servers(builder, name, variable, builder.count(_DATA) or 1, 1)
        return
    tensor, data = builder.count(_TENSOR) or 1, builder.count(_DATA) or 1
    if tensor * data == 1:
        builder.convert("nothing: the embedded engine uses one device", _TENSOR, _DATA)
        return
    if name not in _SERVERS:
        return
    if gpus % (tensor * data):
        reason = f"a server needs {tensor} x {data} GPUs, and {_GPUS}={gpus}: set engine.name={name} and engine.tensor_parallel"
        for key in (_TENSOR, _DATA):
            builder.reject(key, reason)
        return
    _servers(builder, name, tensor, data, gpus // (tensor * data))


def _servers(builder: VerlRecipeBuilder, name: str, tensor: int | str, data: int, replicas: int) -> None:
    builder.set("engine.name", name, f"{ROLLOUT}.name")
    builder.set("engine.tensor_parallel", tensor, _TENSOR)
    builder.set("engine.data_parallel", data, _DATA)
    builder.set("engine.replicas", replicas, _GPUS)
    if builder.value(f"{ROLLOUT}.free_cache_engine") is not False:  # verl's default is true
        builder.set("engine.sleep", True, f"{ROLLOUT}.free_cache_engine")
    arguments = _arguments(builder, name)
    if arguments:
        builder.set("engine.arguments", arguments)
    reason = f"{name} must be installed (docs/engines.md); without it, use the embedded engine: engine={{name: local}}"
    builder.assume("engine.name", name, reason)


def _arguments(builder: VerlRecipeBuilder, name: str) -> list[str]:
    """The further arguments of the servers."""
    share, eager = f"{ROLLOUT}.gpu_memory_utilization", f"{ROLLOUT}.enforce_eager"
    arguments: list[str] = []
    if builder.is_set(share):
        flag = "--gpu-memory-utilization" if name == "vllm" else "--mem-fraction-static"
        arguments += [flag, f"{builder.number(share):g}"]
        builder.convert("engine.arguments", share)
    if builder.value(eager) is True:
        arguments.append("--enforce-eager" if name == "vllm" else "--disable-cuda-graph")
        builder.convert("engine.arguments", eager)
    return arguments


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
