"""Which options to change so that a step of a recipe fits into the memory that there is.

Ways that need less memory are tried on the recipe itself, in the order of what they cost in learning and time. Each is predicted
as `turnwise doctor` predicts a recipe, so that what is found here is found to fit there. Only options that the recipe can have
are changed, and what it has of them already stays. Knows predictions (`doctor/memory.py`, `doctor/fit.py`), and prints nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from turnwise import assembly
from turnwise.config.sft_checks import refuse_sft_without_effect
from turnwise.config.train_checks import refuse_without_effect
from turnwise.doctor.check import Check
from turnwise.doctor.fit import (
    LEAST_ROWS,
    WAYS,
    cache_step,
    computed_numbers,
    fitted,
    server_cache,
    value_of,
    with_smallest,
)
from turnwise.doctor.memory import (
    USABLE,
    Prediction,
    Workload,
    changed,
    default_tokens,
    held_bytes,
    kv_bytes_of_row,
    machine_gib,
    not_predicted,
    on_gpu,
    peak_check,
    predict,
    read_model_config,
    server_parts,
    workload_of,
)
from turnwise.errors import ConfigError, Failed, boundary
from turnwise.models.device import gpu_memory, known_dtype, sees_gpu
from turnwise.options.engines import LocalEngineSection
from turnwise.options.schema import Config

_COMPUTED = object()
"""Stands for a number that is computed for the memory that there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory into which a step must fit."""

    model_config: Any
    workload: Workload
    section: str
    """`train` or `sft`."""
    gib: float
    of_card: bool
    """Whether it is that of a GPU, for which a run computes the numbers that a recipe leaves open."""

    @property
    def usable(self) -> float:
        """The GiB that options to change are chosen for."""
        return USABLE * self.gib if self.of_card else self.gib


# the check


def fit_check(
    config: Config,
    path: str,
    *,
    section: str,
    memory_gb: float | None = None,
    longest: int | None = None,
    prompt: int | None = None,
) -> Check:
    """The predicted peak of a training step, with the numbers that a run would compute for a GPU; if it does not fit, options
    with which it fits. Started servers are counted on the GPU that they use.

    `memory_gb` is the memory in GiB; None: that of the GPU, or of the machine. `longest` is the known length of the longest
    conversation, and `prompt` that of the longest prompt. Without a prediction, the check is a note.

    Raises ConfigError if `limits.context` is longer than the model allows.
    """
    gib = machine_gib(config) if memory_gb is None else memory_gb
    try:
        with boundary("model"):
            model_config = read_model_config(path)
        workload = workload_of(config, model_config, section, longest=longest, prompt=prompt)
        with boundary("model"):
            memory = Memory(
                model_config=model_config,
                workload=workload,
                section=section,
                gib=gib,
                of_card=on_gpu(config) and gib != float("inf"),
            )
            check = _with_servers(config, memory, _checked(config, memory))
    except Failed as failed:
        return not_predicted(failed)
    if memory_gb is None and on_gpu(config) and sees_gpu():
        check = replace(check, details=[*check.details, ("GPU", str(gpu_memory(config.model.device)))])
    return check


def _checked(config: Config, memory: Memory) -> Check:
    """The check of the trainer's device."""
    known = completed(config, memory)
    check = peak_check(
        known,
        memory.model_config,
        memory.workload,
        section=memory.section,
        limit=memory.gib,
        card_gib=memory.gib,
    )
    numbers = computed_numbers(config, known, memory.section)
    if numbers:
        check = replace(check, details=[*check.details, ("computed", ", ".join(numbers))])
    if check.status == "ok":
        return check
    text = check.text + with_smallest(numbers, memory.section, memory.workload)
    found = what_fits(config, memory)
    if not found.fits and memory.of_card and memory.section == "train" and assembly.servers_beside_trainer(config):
        embedded = what_fits(changed(config, ["engine"], LocalEngineSection()), memory)
        if embedded.fits:
            found = replace(embedded, options={"engine": "local", **embedded.options})
    otherwise = "use a smaller model, shorter conversations (limits.context), or more memory"
    if memory.usable < found.gib <= memory.gib:
        otherwise = f"more than {USABLE:.0%} of {memory.gib:.1f} GiB; {otherwise}"
    advice = found.advice(otherwise)
    return replace(check, text=f"{text}: {advice}")


def _with_servers(config: Config, memory: Memory, check: Check) -> Check:
    """The check of the trainer's device, and of that of the servers which the run starts, if that is another one."""
    engine = config.engine.servers
    if memory.section != "train" or not memory.of_card or engine is None or not engine.starts_servers:
        return check
    shared = assembly.servers_beside_trainer(config)
    if shared or check.status == "fail":
        return check
    server = Prediction(server_parts(config, memory.model_config, memory.gib))
    if server.gib > memory.gib:
        rest = memory.gib - (server.gib - (engine.memory_gb or 0.0))
        fix = f"set engine.memory_gb={cache_step(USABLE * rest):g}" if rest > 1 else "raise engine.tensor_parallel"
        return replace(
            check,
            status="fail",
            text=f"a GPU of a server needs {server.gib:.1f} GiB ({server.text}), and there are {memory.gib:.1f} GiB: {fix}",
        )
    if shared is None:
        wanted = assembly.trainer_gpus(config)[:1] * (engine.replicas * engine.tensor_parallel * engine.data_parallel)
        beside = _checked(changed(config, ["engine", "devices"], wanted), memory)
        text = f"{check.text}, and {server.gib:.1f} GiB on a second GPU for the server. On one GPU (engine.devices={wanted})"
        status = check.status if beside.status == "ok" else "note"
        return replace(check, status=status, text=f"{text}: {beside.text}")
    return check


# what to change


@dataclass(frozen=True, slots=True)
class Fitting:
    """Options with which the recipe fits, or with which it needs the least of all that were tried."""

    options: Mapping[str, Any]
    """Values by dotted names; empty if nothing can be changed."""
    gib: float
    """The predicted peak of a step with them."""
    fits: bool

    @property
    def text(self) -> str:
        """The options as the command line has them; `null` for a number that nothing is left to compute for."""
        return " ".join(f"{name}={shown(value)}" for name, value in self.options.items())

    @property
    def remark(self) -> str:
        """What else should be changed with them."""
        return "; an adapter needs about 20 times the learning rate" if "model.lora.rank" in self.options else ""

    def advice(self, otherwise: str) -> str:
        """What to set, or where no options suffice, what to do `otherwise`."""
        if self.fits:
            return f"set {self.text} ({self.gib:.1f} GiB{self.remark})"
        if not self.text:
            return f"no option of the recipe changes that: {otherwise}"
        return f"of all changes that were tried, {self.text} needs the least, still {self.gib:.1f} GiB: {otherwise}"


def shown(value: Any) -> str:
    """The value of an option as YAML and the command line have it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def what_fits(config: Config, memory: Memory) -> Fitting:
    """The first change of the recipe with which a step fits into the memory; if there is none, the one that needs the least."""
    least = Fitting({}, float("inf"), fits=False)
    strict = _refused(config, memory.section) is None
    for rows in (LEAST_ROWS, 1):  # few conversations at a time are slow: only where nothing else fits
        for options in _candidates(config, memory):
            try:
                with boundary("model"):
                    found = _tried(config, options, memory, rows=rows, strict=strict)
            except Failed:  # such as an adapter that the model does not take
                continue
            if found is not None and found.fits:
                return found
            if found is not None and found.gib < least.gib:
                least = found
    return least


def _tried(config: Config, options: Mapping[str, Any], memory: Memory, *, rows: int, strict: bool) -> Fitting | None:
    """The prediction of the recipe with other options. None if it would be refused, or if a number that is computed would be too
    small."""
    other = config
    for name, value in options.items():
        other = changed(other, name.split("."), None if value is _COMPUTED else value)
    if strict and _refused(other, memory.section) is not None:
        return None
    held = held_bytes(other, memory.model_config, memory.section) / 2**30
    if held > memory.usable:  # known without a pass
        return Fitting(_values(options, other), held, fits=False)
    if options.get("engine.memory_gb") is _COMPUTED and other.engine.servers is not None:
        known = completed(changed(other, ["engine", "memory_gb"], cache_step(0.0)), memory)
        cache = server_cache(known, memory.model_config, memory.workload, gib=memory.gib)
        other = changed(other, ["engine", "memory_gb"], cache_step(cache))
    other = completed(other, memory)
    values = _values(options, other)
    gib = predict(other, memory.model_config, memory.workload, section=memory.section, card_gib=memory.gib).gib
    if any(value is None for value in values.values()):
        return Fitting(values, gib, fits=False)
    if (cache := values.get("engine.memory_gb")) is not None:
        needed = min(rows, memory.workload.conversations)
        if cache * 2**30 < needed * kv_bytes_of_row(other, memory.model_config, memory.workload.tokens):
            return None
    return Fitting(values, gib, fits=gib <= memory.usable)


def completed(config: Config, memory: Memory) -> Config:
    """The recipe with the numbers that a run would compute."""
    if not memory.of_card:
        return config
    return fitted(config, memory.model_config, memory.workload, section=memory.section, gib=memory.gib)


def _values(options: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The options with the numbers of a recipe in place of those that are computed."""
    return {name: value_of(config, name.split(".")) if value is _COMPUTED else value for name, value in options.items()}


def _refused(config: Config, section: str) -> str | None:
    """Why the recipe is refused, as a run would do."""
    try:
        (refuse_sft_without_effect if section == "sft" else refuse_without_effect)(config)
    except ConfigError as error:
        return str(error)
    return None


def _candidates(config: Config, memory: Memory) -> Iterator[dict[str, Any]]:
    """Options to change, those that cost the least first. None is the recipe's own value."""
    dtypes: list[dict[str, Any]] = [{}]
    if known_dtype(config) == "float32":
        lower = {"model.dtype": "bfloat16"}
        dtypes.append(lower | {"model.autocast": False} if config.model.autocast else lower)
    seen: list[dict[str, Any]] = [{}]
    for dtype in dtypes:
        for method in _methods(config, memory.section):
            for numbers in _numbers(config, memory):
                options = dtype | method | numbers
                if options not in seen:
                    seen.append(options)
                    yield options


def _methods(config: Config, section: str) -> Iterator[dict[str, Any]]:
    """The ways of `turnwise init` to train, without what the recipe has of them already."""
    options = config.sft if section == "sft" else config.train
    adapter, optimizer = config.model.lora.rank is not None, options.optimizer
    yield {}
    for way in WAYS:
        own = {
            name.replace("train.", f"{section}.", 1): value
            for name, value in way.options.items()
            if not (adapter and name.startswith("model.lora."))
        }
        changes = {
            name: value
            for name, value in own.items()
            if value_of(config, name.split(".")) != value
            and not (name.endswith("master_weights") and (adapter or optimizer.master_weights != "float32"))
            and not (name.endswith("offload") and (adapter or section == "sft" or optimizer.offload != "none"))
        }
        yield changes
        if way.name == "all weights, Kahan" and not adapter and optimizer.name == "adamw":
            yield {name: value for name, value in changes.items() if "optimizer" not in name} | {
                f"{section}.optimizer.name": "adamw_8bit"
            }


def _numbers(config: Config, memory: Memory) -> Iterator[dict[str, Any]]:
    """Other sizes of the micro-batch and of the cache, and of what a server beside the trainer has."""
    section = memory.section
    tokens = (config.sft if section == "sft" else config.train).micro_batch_tokens
    micro, cache = f"{section}.micro_batch_tokens", "engine.memory_gb"
    embedded = config.engine.embedded if section == "train" and not config.runs_conversations_elsewhere else None
    fewer: dict[str, Any] = {}
    smaller: dict[str, Any] = {}
    if memory.of_card:
        fewer = {} if tokens is None else {micro: _COMPUTED}
        smaller = {cache: _COMPUTED} if embedded is not None and embedded.memory_gb is not None else {}
    else:
        default = tokens or default_tokens(on_gpu(config))
        fewer = {micro: max(default // 4, 256)} if default > 256 else {}
        if embedded is not None:
            smaller = {cache: 0.5} if embedded.memory_gb is None else {cache: embedded.memory_gb / 4}
    yield from ({}, smaller, fewer, smaller | fewer)
    if section == "train" and memory.of_card and assembly.servers_beside_trainer(config):
        yield {cache: _COMPUTED}
        yield fewer | {cache: _COMPUTED}
        if config.engine.servers is not None and not config.engine.servers.sleep and config.train.max_staleness == 0:
            yield {"engine.sleep": True, cache: _COMPUTED}
            yield fewer | {"engine.sleep": True, cache: _COMPUTED}
