"""The memory of each training rank and of each engine outside the trainer's process, before a run starts.

A recipe whose number of ranks or whose combination of options is impossible is refused. The engines are those in rollout
workers and on servers that turnwise starts; the embedded engine of one process is predicted in `doctor/memory.py`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers.modeling_layers import GradientCheckpointingLayer

from turnwise import assembly
from turnwise.assembly.engines import cache_gb
from turnwise.config.train_checks import needs_critic, needs_reference
from turnwise.doctor.check import Check
from turnwise.doctor.fit import (
    MOST_TOKENS,
    MemoryNeeds,
    completed,
    computed_notes,
    computed_numbers,
    with_smallest,
    without_cache,
)
from turnwise.doctor.memory import (
    OF_ENGINE,
    PROGRAM_BYTES,
    SERVER_BYTES,
    USABLE,
    MemoryPart,
    Prediction,
    Workload,
    cache_holds,
    changed,
    compared,
    default_tokens,
    empty_model,
    kv_cache_bytes,
    machine_gib,
    not_predicted,
    on_gpu,
    predict,
    read_model_config,
    server_cache_holds,
    server_weights,
    weight_bytes,
    workload_of,
)
from turnwise.doctor.what_fits import Fitting
from turnwise.errors import ConfigError, Failed, boundary
from turnwise.models.device import GpuMemory, known_dtype
from turnwise.models.model_config import (
    DISPATCH_STYLE,
    DIVIDED_STYLES,
    RECURRENT_TYPES,
    context_length,
    key_widths,
    planned_styles,
    refuse_indivisible,
    refuse_uncut,
    refuse_undivided_experts,
    tensor_plan,
)
from turnwise.options.engines import local_ranks
from turnwise.options.schema import Config
from turnwise.options.section import changed_options
from turnwise.planning.placement import PlanLine

# ranks

_OF_ENGINE = (*OF_ENGINE, "policies of agents")
_OF_PASSES = ("activations", "logits and other temporary tensors")
_RANK_PROGRAM_BYTES, _RANK_PEFT_BYTES = 400 * 2**20, 60 * 2**20
"""Bytes of the program of a rank without conversations, and of peft in a rank."""
_DIVIDED = ("weights", "reference model", "teachers", "critic", "optimizer", "copies for a checkpoint")


def number_of_ranks(config: Config, given: int | None) -> int:
    """The number of ranks of the recipe; 1 without the section cluster. `given` is the number that torchrun will start.

    Raises ConfigError if a number is given that contradicts the recipe, or if cluster.mesh needs one and none is given.
    """
    cluster = config.cluster
    if not cluster.distributed:
        known = 1
    elif cluster.launcher in ("local", "ray"):
        known = local_ranks(cluster)
    else:
        number = given or int(os.environ.get("WORLD_SIZE", "0"))
        if not number and changed_options(cluster.mesh):
            raise ConfigError(
                "cluster.mesh arranges the ranks that torchrun starts, and their number is not in the recipe: add --ranks N"
            )
        return number or 1
    if given is not None and given != known:
        raise ConfigError(
            f"--ranks {given}: the recipe has {known} ranks (cluster.launcher={cluster.launcher}). --ranks is for "
            f"cluster=torchrun; set cluster.trainers for cluster=local and ray"
        )
    return known


def refuse_impossible(config: Config, ranks: int, model_config: Any) -> None:
    """Raise ConfigError for a recipe that cannot run on any machine: the value, the rule and the fix."""
    engine, text = config.engine, model_config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    tensor_parallel = getattr(engine, "tensor_parallel", 1)
    if heads is not None and heads % tensor_parallel:
        raise ConfigError(
            f"engine.tensor_parallel={tensor_parallel}: the {heads} attention heads of {config.model.path} must be divided "
            f"equally among the devices of a server: use a divisor of {heads}"
        )
    conversations = config.train.batch_size * config.train.group_size
    per_step = conversations // config.train.minibatches
    mesh, sets = config.cluster.mesh, config.cluster.mesh.sets(ranks)
    if per_step < sets:
        raise ConfigError(
            f"{sets} ranks{mesh.of_sets} and {per_step} conversations for each optimizer step (train.batch_size="
            f"{config.train.batch_size} x train.group_size={config.train.group_size}, train.minibatches="
            f"{config.train.minibatches}): at least {sets - per_step} would compute nothing. Use at most {per_step}, or larger "
            f"batches"
        )
    refuse_undivided(config, model_config)


def refuse_undivided(config: Config, model_config: Any, *, section: str = "train") -> None:
    """Raise ConfigError if `cluster.mesh` cannot divide a model that the ranks have. Those whose configuration cannot be read are
    left to the run."""
    mesh, others = config.cluster.mesh, []
    if section == "train":
        others = [config.reference.path if needs_reference(config) else None]
        others += [config.critic.path if needs_critic(config) else None]
        others += [source.path for source in assembly.teacher_sources(config).values() if source is not None]
    found = [model_config]
    for path in others:
        with contextlib.suppress(Failed), boundary("model"):
            found += [] if path is None else [read_model_config(path)]
    for one in found:
        if mesh.context > 1:
            refuse_uncut(one, mesh.context)
        if mesh.tensor > 1:
            refuse_indivisible(one, mesh.tensor)
        if mesh.expert > 1:
            refuse_undivided_experts(one, mesh.expert)


@dataclass(frozen=True, slots=True)
class _Units:
    """Bytes of the units that FSDP gathers."""

    layer: int
    """The largest layer."""
    layers: int
    """All layers."""
    root: int
    """All weights outside of the layers: embedding, output layer, vision part."""
    whole: float
    """The part of the layers' weights that `cluster.mesh.tensor` does not divide, as linear attention."""
    experts: float
    """The part that `cluster.mesh.expert` divides."""


def rank_memory(
    config: Config,
    model_config: Any,
    workload: Workload,
    ranks: int,
    *,
    rank: int = 0,
    section: str = "train",
    card_gib: float | None = None,
) -> Prediction:
    """The peak of a training step on the device of a rank. Rank 0 also has the embedded engine. `card_gib`: see `predict`.

    Weights, optimizer and reference model are divided. The layers that a pass needs are gathered: the present layer and the next
    one, and all weights outside of the layers. Activations and logits are those of a micro-batch, as in one process; with
    `cluster.mesh.tensor`, those of a model with as many heads, features and experts as a rank has, and with
    `cluster.mesh.context` those of a rank's part of the tokens, beside the keys and values of all. A layer with a state counts as
    if a rank computed it completely for all tokens.
    """
    fsdp = config.cluster.fsdp
    _, shard, context, tensor = config.cluster.mesh.shape(ranks)
    units = _units(config, model_config)
    parts = _parts(config, model_config, workload, section, card_gib)
    if fsdp.param_dtype is not None or context * tensor > 1:
        parts |= _of_passes(config, model_config, workload, section, context, tensor)
    program = _RANK_PROGRAM_BYTES if rank > 0 else PROGRAM_BYTES
    parts["program"] = program + (0 if config.model.lora.rank is None else _RANK_PEFT_BYTES)
    samples = rank == 0 and _samples(config, section)
    if not samples:
        parts = {name: size for name, size in parts.items() if name not in _OF_ENGINE}
    offloaded = fsdp.offload == "cpu"
    precision = 0.5 if fsdp.param_dtype == "bfloat16" else 1.0
    # parts of rounded sums have the type of the weights; sums of whole gradients have the type in which ranks add them up
    trained = parts["gradients"] / (4 if _adds_in_float32(config, section) else 2)
    each = fsdp.adds_up_each(4 * trained)
    # an adapter has nothing outside of the layers
    outside = 0.0 if config.model.lora.rank is not None else units.root / max(1, units.root + units.layers)
    of_layer = (1 - units.whole) / tensor + units.whole if tensor > 1 else 1.0  # of a layer's weights, on a rank
    whole = (4 if fsdp.reduce_dtype == "float32" else 2) * trained * (outside + (1 - outside) * of_layer)
    gathered = units.layers if not fsdp.reshard_after_forward else 2 * units.layer
    with_own_experts = of_layer * (1 - units.experts + units.experts / config.cluster.mesh.expert)
    gathered = units.root + gathered * with_own_experts
    inside = units.layers / max(1, units.root + units.layers)
    part = (inside * of_layer + (1 - inside) / tensor) / (shard * context)
    found = [
        *(MemoryPart(name, 0 if offloaded else parts.get(name, 0) * part) for name in _DIVIDED),
        MemoryPart("gradients", (0 if offloaded else parts["gradients"] * part) if each else whole),
        MemoryPart("gathered layers", precision * gathered + (units.layer * with_own_experts if each else 0)),
        MemoryPart("copy of the engine", parts["weights"] if samples else 0),
    ]
    known = {*_DIVIDED, "gradients"}
    return Prediction(
        [part for part in found if part.bytes] + [MemoryPart(name, parts[name]) for name in parts if name not in known]
    )


def _adds_in_float32(config: Config, section: str) -> bool:
    """Whether the sums of gradients over micro-batches are float32 in one process."""
    exact = known_dtype(config) == "float32" or config.model.lora.rank is not None
    return exact or getattr(config, section).optimizer.grad_accum_dtype is not None


def _samples(config: Config, section: str) -> bool:
    """Whether rank 0 has the embedded engine."""
    return section == "train" and config.engine.embedded is not None and not config.runs_conversations_elsewhere


def _of_passes(
    config: Config, model_config: Any, workload: Workload, section: str, context: int, tensor: int
) -> dict[str, float]:
    """What passes need on a rank that computes them with others: those of a model whose weights have the gathered type."""
    dtype = config.cluster.fsdp.param_dtype or config.model.dtype
    passes = _parts(
        _of_tokens(config.model_copy(update={"model": changed(config.model, ["dtype"], dtype)}), section, context),
        _of_one_rank(model_config, tensor),
        replace(workload, tokens=-(-workload.tokens // context), prompt_tokens=-(-workload.prompt_tokens // context)),
        section,
    )
    parts = {name: passes[name] for name in _OF_PASSES}
    if context > 1:
        parts["keys and values of all tokens"] = _key_bytes(config, model_config, workload, section) / tensor
        if with_state := _part_with_state(model_config):
            parts["layers with a state, of all tokens"] = with_state * (context - 1) * passes["activations"]
    return parts


def _parts(
    config: Config, model_config: Any, workload: Workload, section: str, card_gib: float | None = None
) -> dict[str, float]:
    """The memory of one process."""
    found = predict(config, model_config, workload, section=section, on_ranks=True, card_gib=card_gib)
    return {part.name: part.bytes for part in found.parts}


def _units(config: Config, model_config: Any) -> _Units:
    model = empty_model(assembly.model_source(config), model_config)
    layers = [part for part in model.get_decoder().modules() if isinstance(part, GradientCheckpointingLayer)]
    sizes = [_bytes(layer) for layer in layers]
    total = max(1, sum(sizes))
    divided = _planned_bytes(layers, planned_styles(model, tensor_plan(model)), DIVIDED_STYLES)
    experts = _planned_bytes(layers, planned_styles(model, model.ep_plan or {}), (DISPATCH_STYLE,))
    return _Units(
        max(sizes, default=0),
        sum(sizes),
        _bytes(model) - sum(sizes),
        whole=1 - divided / total,
        experts=experts / total,
    )


def _planned_bytes(layers: Sequence[Any], planned: Mapping[Any, str], styles: Sequence[str]) -> int:
    """The weights of layers whose modules have one of these styles in transformers' plan."""
    return sum(
        parameter.numel() * parameter.element_size()
        for layer in layers
        for module in layer.modules()
        if planned.get(module) in styles
        for parameter in module.parameters(recurse=False)
    )


def _of_tokens(config: Config, section: str, context: int) -> Config:
    """The recipe with micro-batches of a rank's part of the tokens; the learner's own bound is already that of a rank."""
    tokens = getattr(config, section).micro_batch_tokens
    if tokens is None or context == 1:
        return config
    return config.model_copy(
        update={section: changed(getattr(config, section), ["micro_batch_tokens"], -(-tokens // context))}
    )


def _key_bytes(config: Config, model_config: Any, workload: Workload, section: str) -> float:
    """Keys and values of a layer, gathered for its backward pass, and their gradients before and after they are added up."""
    text, tokens = model_config.get_text_config(), getattr(config, section).micro_batch_tokens
    if tokens is None:
        tokens = config.cluster.mesh.context * default_tokens(on_gpu(config))
    width = max(key_widths(text))
    exact = (config.cluster.fsdp.param_dtype or config.model.dtype) == "float32"
    return 2 * max(tokens, workload.tokens) * width * ((4 if exact else 2) + 2 * 4)


def _part_with_state(model_config: Any) -> float:
    """The part of the layers that keep a state from token to token."""
    types = getattr(model_config.get_text_config(), "layer_types", None) or ()
    return sum(kind in RECURRENT_TYPES for kind in types) / max(1, len(types))


def _of_one_rank(model_config: Any, tensor: int) -> Any:
    """The configuration of a model whose layers have the sizes of a rank's part. The model's own for one rank, and for layers of
    different sizes: then the prediction is too large."""
    if tensor == 1 or getattr(model_config.get_text_config(), "is_heterogeneous", False):
        return model_config
    refuse_indivisible(model_config, tensor)
    own = copy.deepcopy(model_config)
    text = own.get_text_config()
    text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    for name in ("num_attention_heads", "num_key_value_heads"):
        setattr(text, name, getattr(text, name) // tensor)
    # a rank computes its experts for all tokens that chose them: on average this part of the pairs
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, getattr(text, name) // tensor)
    return own


def _bytes(module: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def fitted_on_ranks(
    config: Config, model_config: Any, workload: Workload, ranks: int, *, section: str, gib: float
) -> Config:
    """The recipe with numbers in place of `micro_batch_tokens: null` and `engine.memory_gb: null`, for ranks whose GPUs have so
    much memory each. Where no micro-batch fits, the number is that of the smallest. `section` is `train` or `sft`.

    They are those of rank 0, which needs the most: all ranks compute micro-batches that rank 0 packs. Its cache stays during an
    update.
    """

    def update(config: Config) -> float:
        return without_cache(rank_memory(config, model_config, workload, ranks, section=section, card_gib=gib))

    most = config.cluster.mesh.context * MOST_TOKENS  # a rank has a part of the tokens
    return completed(config, workload, section=section, gib=gib, needs=MemoryNeeds(update, None, most))


def fitted_to_ranks(
    config: Config, path: str, gpus: Sequence[GpuMemory], *, section: str, prompt: int | None = None
) -> tuple[Config, list[str]]:
    """`fitted_on_ranks` for the ranks of a run whose GPUs have this memory, and a note that says the numbers: they are computed
    for the GPU with the least free memory. `path` is the model. Ranks on CPUs (no `gpus`), or without a prediction: the recipe as
    it is."""
    if not gpus:
        return config, []
    least = min(gpus, key=lambda gpu: gpu.free)
    cards = f"{least}, the fullest GPU of {len(gpus)} ranks"
    try:
        with boundary("model"):
            model_config = read_model_config(path)
            workload = workload_of(config, model_config, section, prompt=prompt)
            gib = least.free / 2**30
            known = fitted_on_ranks(config, model_config, workload, len(gpus), section=section, gib=gib)
    except Failed as failed:
        return config, [f"no micro-batch and no cache were computed for {cards}: {failed.failure.message}"]
    return known, computed_notes(config, known, section, cards)


def rank_memory_check(
    config: Config,
    ranks: int,
    *,
    section: str,
    memory_gb: float | None,
    longest: int | None = None,
    prompt: int | None = None,
) -> Check:
    """As `doctor.memory.memory_check`, for the device of rank 0. On a CPU, the ranks share the memory of the machine."""
    try:
        with boundary("model"):
            model_config = read_model_config(config.model.path)
        workload = workload_of(config, model_config, section, longest=longest, prompt=prompt)
        with boundary("model"):
            shared = 1 if on_gpu(config) or config.cluster.launcher != "local" else ranks
            limit = memory_gb if memory_gb is not None else machine_gib(config) / shared
            known = config
            if on_gpu(config) and limit != float("inf"):
                known = fitted_on_ranks(config, model_config, workload, ranks, section=section, gib=limit)
            found = rank_memory(known, model_config, workload, ranks, section=section, card_gib=limit)
    except Failed as failed:
        return not_predicted(failed)
    details = [("in GiB", ", ".join(f"{part.name} {part.bytes / 2**30:.2f}" for part in found.parts))]
    text = f"predicted peak of a training step on each of {ranks} ranks: {found.gib:.1f} GiB (rank 0)"
    if _samples(config, section) and (holds := cache_holds(known, model_config, workload)) is not None:
        details.append(("the KV cache holds", holds))
    numbers = computed_numbers(config, known, section)
    if numbers:
        details.append(("computed", ", ".join(numbers)))
    check = compared(text, found.gib, limit, details, gpu=on_gpu(config))
    if check.status == "ok":
        return check
    bound = USABLE * limit if on_gpu(config) else limit
    server = ", a server engine" if _samples(config, section) else ""
    advice = _what_fits(known, model_config, workload, ranks, section, bound).advice(
        f"use more ranks{server}, a smaller model, shorter conversations (limits.context), or more memory"
    )
    return replace(check, text=f"{check.text}{with_smallest(numbers, section, workload)}: {advice}")


_WORTH = 0.98
"""A change is named if the peak is less than this share of the peak without it."""


def _what_fits(
    config: Config, model_config: Any, workload: Workload, ranks: int, section: str, limit: float
) -> Fitting:
    """The options to change, in the order of what they cost in time, until the peak is at most `limit` GiB; those that the recipe
    has already, or that hardly change it, are not named."""
    peak = rank_memory(config, model_config, workload, ranks, section=section).gib
    named: dict[str, Any] = {}
    for name, value in _changes(config, workload, section).items():
        trial = {**named, name: value}
        if name == "cluster.fsdp.offload":  # of all, so not of the optimizer's state alone
            trial.pop(f"{section}.optimizer.offload", None)
        try:
            with boundary("model"):
                found = rank_memory(_with(config, trial), model_config, workload, ranks, section=section)
        except Failed:  # such as a model that cannot compute its layers again
            continue
        if found.gib < _WORTH * peak:
            named, peak = trial, found.gib
        if peak <= limit:
            break
    return Fitting(named, peak, fits=peak <= limit)


def _changes(config: Config, workload: Workload, section: str) -> dict[str, Any]:
    """Options that need less memory, which the recipe has not."""
    changes: dict[str, Any] = {
        f"{section}.micro_batch_tokens": workload.tokens,
        "cluster.fsdp.gradient_sync": "micro_batch",
        "model.gradient_checkpointing": True,
    }
    if on_gpu(config):
        changes["cluster.fsdp.param_dtype"] = "bfloat16"
        if getattr(config, section).optimizer.master_weights == "float32":  # others are not on another device
            changes[f"{section}.optimizer.offload"] = "cpu"
        changes["cluster.fsdp.offload"] = "cpu"
    return {name: value for name, value in changes.items() if not _has(config, name, value)}


def _has(config: Config, name: str, value: Any) -> bool:
    found = functools.reduce(getattr, name.split("."), config)
    if name.endswith("micro_batch_tokens"):
        return found is not None and found <= value
    return found == value or (name == "cluster.fsdp.param_dtype" and config.model.dtype == "bfloat16")


def _with(config: Config, options: Mapping[str, Any]) -> Config:
    for name, value in options.items():
        config = changed(config, name.split("."), value)
    return config


# engines


def engine_memory_lines(config: Config, model_config: Any) -> list[PlanLine]:
    """The predicted memory of a rollout worker with the embedded engine, or of each device of a started server; empty if the
    engine is in the trainer's process, or on servers that others have started."""
    if config.engine.embedded is not None and config.cluster.launcher == "ray":
        workers, workload = config.cluster.workers, workload_of(config, model_config, "train")
        started = workload.conversations * (config.train.max_staleness + 1)
        cache = kv_cache_bytes(
            config, model_config, conversations=min(started, workers.max_concurrent), tokens=workload.tokens
        )
        weights = _weights(config, model_config)
        text = _sum({"weights": weights, "KV cache": cache, "program": PROGRAM_BYTES})
        return [PlanLine("memory of a worker", f"{text}, without the environments")]
    if (engine := config.engine.servers) is not None and engine.starts_servers:
        whole, eight = (size / engine.tensor_parallel for size in server_weights(config, model_config))
        weights = eight if engine.eight_bits else whole
        cache = cache_gb(config, config.limits.context or context_length(model_config.to_dict()))
        if cache is None:
            rest = f"weights {_gib(weights)}; {config.engine.name} chooses the size of its KV cache (engine.memory_gb)"
        else:
            parts = {"weights": weights, "KV cache": cache * 2**30}
            rest = _sum(parts | ({"the rest of the server": SERVER_BYTES} if on_gpu(config) else {}))
        if engine.quantization is not None:
            rest += (
                f" ({engine.quantization}: 8 bits inside of layers; an update brings {_gib(whole)})"
                if engine.eight_bits
                else f" ({engine.quantization}: fewer bits of the weights are not counted)"
                if engine.eight_bits is None
                else f" ({engine.quantization})"
            )
        lines = [PlanLine("memory of a server's device", rest)]
        beside = on_gpu(config) and not config.cluster.distributed and assembly.servers_beside_trainer(config)
        if cache is not None and not beside:  # else the check of the memory says it
            holds = server_cache_holds(config, model_config, workload_of(config, model_config, "train"), cache * 2**30)
            lines += [] if holds is None else [PlanLine("the KV cache of servers holds", holds)]
        return lines
    return []


def _weights(config: Config, model_config: Any) -> float:
    source = assembly.model_source(config)
    return weight_bytes(empty_model(source, model_config), source)


def _sum(parts: dict[str, float]) -> str:
    return f"{_gib(sum(parts.values()))} GiB: " + ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"
