"""What fits into the memory of a GPU: numbers that a recipe leaves open, and a recipe for a model and a card.

`fitted` replaces the micro-batch and the KV cache that a recipe leaves open; the start of a run, `turnwise doctor` and
`turnwise init --gpu` use it. `choose` tries ways to train a model, from full training to an adapter on weights in 4 bits, in the
order of what they cost in learning, and takes the first that fits. Both only use predictions (`doctor/memory.py`): they need the
model's configuration, no weights and no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from turnwise.doctor.check import Check
from turnwise.doctor.memory import (
    ASLEEP_BYTES,
    OF_ENGINE,
    SERVER_CACHE,
    USABLE,
    Prediction,
    Workload,
    changed,
    empty_parameters,
    held_bytes,
    kv_bytes_of_row,
    on_gpu,
    peak_check,
    phases,
    predict,
    read_model_config,
    workload_of,
)
from turnwise.errors import ConfigError, Failed, boundary
from turnwise.local_paths import refuse_other_than_model, unreadable
from turnwise.models.device import gpu_memory, sees_gpu, why_no_gpu
from turnwise.models.model_config import context_length
from turnwise.options.engines import LimitsSection, VllmEngineSection
from turnwise.options.schema import Config

MOST_TOKENS = 16384
"""Tokens of a micro-batch above which a GPU gains nothing."""
_STEP_TOKENS = 256
"""A micro-batch has a multiple of so many tokens."""
_LEAST_TOKENS = 512
LEAST_ROWS = 8
"""Conversations whose keys and values the cache must hold, so that sampling is not slower than training needs."""
_CACHE_STEP = 0.1
"""GiB, to which the memory of the cache is rounded down."""
_LEAST_SERVER = 1.0
"""GiB of KV cache below which the starter's recipe names no server on the trainer's GPU."""


def fitted(config: Config, model_config: Any, workload: Workload, *, section: str, gib: float) -> Config:
    """The recipe with numbers in place of `micro_batch_tokens: null` and `engine.memory_gb: null`, for a GPU with so much memory.

    A recipe for a CPU or several processes is returned as it is. Where no micro-batch fits, the number is that of the smallest.
    `section` is `train` or `sft`.
    """
    if not on_gpu(config) or config.cluster.distributed:
        return config
    return completed(
        config, workload, section=section, gib=gib, needs=_of_process(config, model_config, workload, section, gib)
    )


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What a recipe needs of a GPU, in bytes, without what the engine has for sampling."""

    update: Callable[[Config], float]
    """During an update, with the recipe's `micro_batch_tokens`."""
    sampling: Callable[[Config], float] | None
    """While conversations are sampled; None if the cache stays during updates, so that it has what they leave."""
    most_tokens: int = MOST_TOKENS
    """Tokens of a micro-batch above which nothing is gained."""


def _of_process(config: Config, model_config: Any, workload: Workload, section: str, gib: float) -> MemoryNeeds:
    """The needs of a process that trains alone, which frees a large cache before an update unless conversations run meanwhile."""

    def update(config: Config) -> float:
        return without_cache(predict(config, model_config, workload, section=section, on_update=True, card_gib=gib))

    def sampling(config: Config) -> float:
        return held_bytes(config, model_config, section, "sampling")

    return MemoryNeeds(update, None if config.train.max_staleness > 0 else sampling)


def without_cache(prediction: Prediction) -> float:
    """The bytes of all uses of memory but those that the engine has for sampling."""
    return sum(part.bytes for part in prediction.parts if part.name not in OF_ENGINE)


def completed(config: Config, workload: Workload, *, section: str, gib: float, needs: MemoryNeeds) -> Config:
    """`fitted`, for what the recipe needs of a GPU with so much memory, whichever processes train."""
    limit = USABLE * gib * 2**30
    embedded = config.engine.embedded if section == "train" and not config.runs_conversations_elsewhere else None
    tokens, update = _micro_batch(config, workload, section, gib, needs)
    if getattr(config, section).micro_batch_tokens is None:
        config = changed(config, [section, "micro_batch_tokens"], tokens)
    if update > limit:
        return config
    if embedded is not None and embedded.memory_gb is None:
        used = update if needs.sampling is None else needs.sampling(config)
        left = (limit - used) / 2**30
        if left >= _CACHE_STEP:
            config = changed(config, ["engine", "memory_gb"], cache_step(left))
    return config


def cache_step(gib: float) -> float:
    """The memory of a cache as recipes have it: rounded down, at least 0.1 GiB."""
    return max(_CACHE_STEP, round(_CACHE_STEP * int(gib / _CACHE_STEP + 1e-6), 1))


def server_cache(config: Config, model_config: Any, workload: Workload, *, gib: float) -> float:
    """The GiB that are left for the KV cache of a server beside the trainer, on a GPU with so much memory."""
    least = changed(config, ["engine", "memory_gb"], _CACHE_STEP)
    both = phases(least, model_config, workload, section="train", card_gib=gib)
    used = max(phase.gib for phase in both if any(part.name == SERVER_CACHE for part in phase.parts))
    return USABLE * gib - used + _CACHE_STEP


def least_tokens(workload: Workload) -> int:
    """The smallest micro-batch that is computed: one conversation of the longest."""
    return max(workload.tokens, _LEAST_TOKENS)


def _micro_batch(config: Config, workload: Workload, section: str, gib: float, needs: MemoryNeeds) -> tuple[int, float]:
    """The most tokens of a micro-batch on a GPU with so much memory, and the bytes of the update with them; the recipe's number,
    if it has one. The smallest, if not even one conversation fits."""
    given = getattr(config, section).micro_batch_tokens
    if given is not None:
        return given, needs.update(config)
    longest = least_tokens(workload)

    def needed(tokens: int) -> float:
        return needs.update(changed(config, [section, "micro_batch_tokens"], tokens))

    def rounded(tokens: float) -> int:
        return max(int(min(tokens, needs.most_tokens)) // _STEP_TOKENS * _STEP_TOKENS, longest)

    one, two = needed(longest), needed(2 * longest)
    limit = USABLE * gib * 2**30
    if limit < one:
        return longest, one
    if config.engine.embedded is not None and needs.sampling is None:
        limit = (one + limit) / 2  # the other half is for the cache
    tokens = rounded(longest + (limit - one) / max((two - one) / longest, 1.0))
    update = needed(tokens)
    if update > limit and tokens > 2 * longest:
        # the optimizer's step needs more than a pass over few tokens, so that further ones add more
        each = (update - two) / (tokens - 2 * longest)
        tokens = rounded(2 * longest + (limit - two) / each)
        update = needed(tokens)
    return tokens, update


def fitted_to_card(
    config: Config, path: str, *, section: str, longest: int | None = None, prompt: int | None = None
) -> tuple[Config, list[str]]:
    """`fitted` for the GPU of the recipe and the free memory on it, and a note that says the numbers. `path` is the model, and
    the lengths are those of `what_fits.fit_check`. Without such a GPU, or without a prediction, the recipe as it is."""
    if not on_gpu(config) or not sees_gpu() or config.cluster.distributed:
        return config, []
    card = gpu_memory(config.model.device)
    try:
        with boundary("model"):
            model_config = read_model_config(path)
            workload = workload_of(config, model_config, section, longest=longest, prompt=prompt)
            known = fitted(config, model_config, workload, section=section, gib=card.free / 2**30)
    except Failed as failed:
        return config, [f"no micro-batch and no cache were computed for {card}: {failed.failure.message}"]
    return known, computed_notes(config, known, section, str(card))


def computed_notes(config: Config, known: Config, section: str, cards: str) -> list[str]:
    """The numbers that `known` has in place of those that the recipe leaves open, and for which GPUs."""
    numbers = computed_numbers(config, known, section)
    return [f"computed for {cards}, where the recipe has no number: {', '.join(numbers)}"] if numbers else []


def computed_numbers(config: Config, known: Config, section: str) -> list[str]:
    """The options for which `known` has a number and `config` has none: `train.micro_batch_tokens=7424`."""
    options = [f"{section}.micro_batch_tokens"]
    if section == "train" and known.engine.embedded is not None:
        options.append("engine.memory_gb")
    values = {option: value_of(known, option.split(".")) for option in options}
    return [
        f"{option}={value}"
        for option, value in values.items()
        if value is not None and value_of(config, option.split(".")) is None
    ]


def with_smallest(numbers: Sequence[str], section: str, workload: Workload) -> str:
    """What the check of a peak that is too large says if the computed `numbers` have the smallest micro-batch; else nothing."""
    smallest = f"{section}.micro_batch_tokens={least_tokens(workload)}"
    return f", with the smallest micro-batch ({smallest})" if smallest in numbers else ""


def least_gib(config: Config, model_config: Any, workload: Workload, way: Way) -> float:
    """The memory that a way needs in a step without its activations, or for sampling with the cache of one conversation."""
    least = with_way(config, way)
    row = kv_bytes_of_row(least, model_config, workload.tokens)
    sampling = held_bytes(least, model_config, "train", "sampling") + row
    return max(held_bytes(least, model_config, "train"), sampling) / 2**30 / USABLE


# a recipe for a model and a card


@dataclass(frozen=True, slots=True)
class Way:
    """A way to train a model: options by their dotted names, and why they were chosen."""

    name: str
    options: Mapping[str, Any]
    reason: str


_RANK = 32
_AWAY = {"train.optimizer.offload": "sampling"}
_RECOMPUTED = {"model.gradient_checkpointing": True}
_KAHAN = {**_RECOMPUTED, "train.optimizer.master_weights": "kahan"}
_EIGHT_BITS = {**_RECOMPUTED, "train.optimizer.name": "adamw_8bit"}
_ALL_WEIGHTS = (
    Way("all weights", {}, "all weights are trained: weights, gradients and AdamW's state fit"),
    Way(
        "all weights, state away",
        _AWAY,
        "all weights are trained; AdamW's state is in the machine's memory but for a step, because it does not fit beside "
        "activations and KV cache",
    ),
    Way(
        "all weights, checkpointing",
        _RECOMPUTED,
        "all weights are trained; activations are computed again in the backward pass, because they do not fit",
    ),
    Way(
        "all weights, checkpointing, state away",
        {**_RECOMPUTED, **_AWAY},
        "all weights are trained; activations are computed again in the backward pass, and AdamW's state is in the machine's "
        "memory but for a step, because neither fits",
    ),
    Way(
        "all weights, Kahan",
        _KAHAN,
        "all weights are trained; their rounding errors are kept in bfloat16 (Kahan), because float32 copies do not fit",
    ),
    Way(
        "all weights, Kahan, state away",
        {**_KAHAN, **_AWAY},
        "all weights are trained; their rounding errors are kept in bfloat16 (Kahan), and AdamW's state is in the machine's "
        "memory but for a step, because float32 copies do not fit",
    ),
)
_ADAPTER: Mapping[str, Any] = {"model.lora.rank": _RANK, "model.lora.alpha": 2 * _RANK}
_LORA = (
    Way("LoRA", _ADAPTER, "an adapter is trained"),
    Way(
        "LoRA, checkpointing",
        {**_ADAPTER, **_RECOMPUTED},
        "an adapter is trained, and activations are computed again in the backward pass, because they do not fit",
    ),
)
_QLORA = Way(
    "QLoRA",
    {**_ADAPTER, **_RECOMPUTED, "model.quantization.bits": 4},
    "an adapter is trained on weights in 4 bits, and activations are computed again in the backward pass",
)
WAYS = (*_ALL_WEIGHTS, *_LORA, _QLORA)
"""Ways to train a model, in the order of preference. Larger updates are learnt with more trained weights; each further way is
slower or learns with less. Copying AdamW's state twice in a step takes less time than computing activations again; it fits into
the memory of the machine if that has as much as the GPU."""
OFFLOADED = Way(
    "all weights, AdamW's state on the CPU",
    {**_RECOMPUTED, "train.optimizer.offload": "cpu"},
    "all weights are trained; their float32 copies and AdamW's state are in the memory of the machine, where the step runs, "
    "because AdamW's state in 8 bits does not fit either",
)
"""A way that is chosen only if all weights are to be trained: its user knows the memory of the machine, and a step waits for
copies in both directions."""
Trained = Literal["all", "lora", "qlora"]
"""What `turnwise init --train` names."""
WAYS_OF: Mapping[Trained, Sequence[Way]] = {
    "all": (
        *_ALL_WEIGHTS,
        Way(
            "all weights, 8 bits",
            _EIGHT_BITS,
            "all weights are trained; AdamW's state has 8 bits, and activations are computed again, because 32 bits do not fit, "
            "not even with Kahan's sums",
        ),
        Way(
            "all weights, 8 bits, state away",
            {**_EIGHT_BITS, **_AWAY},
            "all weights are trained; AdamW's state has 8 bits and is in the machine's memory but for a step, because it does "
            "not fit otherwise",
        ),
        OFFLOADED,
    ),
    "lora": _LORA,
    "qlora": (
        Way(
            "QLoRA, no checkpointing",
            {**_ADAPTER, "model.quantization.bits": 4},
            "an adapter is trained on weights in 4 bits",
        ),
        _QLORA,
    ),
}
"""The ways of each kind, in the order of preference; the last needs the least memory."""
OFFLOADED_BYTES = 12
"""What `OFFLOADED` needs of the machine's memory for each parameter."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A recipe that fits into the memory of a GPU."""

    way: Way
    config: Config
    """The recipe with all numbers."""
    gib: float
    """The predicted peak of an update."""
    parameters: int
    """The parameters of the model."""
    rows: int
    """Conversations whose keys and values fit at the same time."""


Begin = Callable[[str], None]
"""Shows what is tried now: models with many kinds of layers take minutes."""


def choose(
    config: Config,
    model_config: Any,
    workload: Workload,
    *,
    gib: float,
    ways: Sequence[Way] = WAYS,
    begin: Begin = lambda text: None,
) -> Plan | None:
    """The first of the ways to train the recipe's model that fits into so much memory; None if none does.

    The recipe's own options of the ways are replaced, and those that it leaves open are computed.
    """
    for way in ways:
        begin(f"trying {way.name}, with conversations of {workload.tokens:,} tokens")
        if (plan := tried(way, config, model_config, workload, gib=gib)) is not None:
            return plan
    return None


def tried(way: Way, config: Config, model_config: Any, workload: Workload, *, gib: float) -> Plan | None:
    """The recipe with the options of a way and with all numbers; None if it does not fit into so much memory."""
    try:
        with boundary("model"):
            return _tried(way, with_way(config, way), model_config, workload, gib)
    except Failed:  # such as an adapter that the model does not take
        return None


def with_way(config: Config, way: Way) -> Config:
    """The recipe with the options of a way in bfloat16, and without those of the others."""
    every = (*WAYS, *(one for ways in WAYS_OF.values() for one in ways))
    tree = {name: None for one in every for name in one.options} | {"model.dtype": "bfloat16", **way.options}
    defaults = Config.model_validate({"model": {"path": "m"}, "data": {"train": "rows"}})
    for name, value in tree.items():
        names = name.split(".")
        config = changed(config, names, value_of(defaults, names) if value is None else value)
    return config


def value_of(part: Any, names: Sequence[str]) -> Any:
    """The value of an option of a section, by its dotted name."""
    for name in names:
        part = getattr(part, name)
    return part


def _tried(way: Way, config: Config, model_config: Any, workload: Workload, gib: float) -> Plan | None:
    limit = USABLE * gib * 2**30
    sampling = held_bytes(config, model_config, "train", "sampling")
    row = kv_bytes_of_row(config, model_config, workload.tokens)
    least = min(LEAST_ROWS, workload.conversations) * row
    if max(held_bytes(config, model_config, "train"), sampling + least) > limit:  # known without a pass
        return None
    known = fitted(config, model_config, workload, section="train", gib=gib)
    update = _of_process(known, model_config, workload, "train", gib).update(known)
    if update > limit:
        return None
    embedded = known.engine.embedded
    if embedded is None or embedded.memory_gb is None or embedded.memory_gb * 2**30 < least:
        return None
    cache = embedded.memory_gb * 2**30
    count, _ = empty_parameters(config, model_config)
    return Plan(
        way=way,
        config=known,
        gib=update / 2**30,
        parameters=count,
        rows=max(1, int(cache / row)) if row else workload.conversations,
    )


def learning_rate(parameters: int, *, adapter: bool) -> float:
    """A learning rate for AdamW with which training usually begins well: for all weights it falls with the size of the model, and
    for an adapter it is 20 times as large.

    Example: 1e-6 for 8 billion parameters, and 2e-5 with an adapter.
    """
    bounds = ((3e8, 1e-5), (1e9, 5e-6), (3e9, 3e-6), (6e9, 2e-6))
    rate = next((rate for most, rate in bounds if parameters < most), 1e-6)
    return 20 * rate if adapter else rate


# the starter's recipe

_TURNS, _TOKENS_PER_TURN, _BATCH, _GROUP = 6, 256, 16, 8


CONTEXTS = (4096, 2048, 1024)
"""Tokens of a conversation that are tried for the starter's recipe, the longest first."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What there is with a vLLM server on the trainer's GPU that sleeps during updates."""

    cache: float
    """GiB of the server's KV cache."""
    micro_batch_tokens: int
    """The most with which an update fits beside the sleeping server, and not more than without it."""


@dataclass(frozen=True, slots=True)
class Starter:
    """What the starter's recipe has for a model and a card."""

    plan: Plan | None
    """None: nothing fits."""
    context: int
    """The longest of `CONTEXTS` with which the plan fits, or the model's longest context."""
    least: float
    """The memory, in GiB, below which nothing fits."""
    beside: Beside | None = None
    """None: no vLLM server fits on the same GPU."""


def starter(
    path: str, model_config: Any, gib: float, *, ways: Sequence[Way] = WAYS, begin: Begin = lambda text: None
) -> Starter:
    """The way to train that `turnwise init --gpu` writes, one of `ways`, of which the last needs the least memory. `path` is the
    model, `gib` the memory of the GPU."""
    base = Config.model_validate({"model": {"path": path, "device": "cuda"}, "data": {"train": "train.jsonl"}})
    longest = context_length(model_config.to_dict()) or CONTEXTS[0]
    contexts = sorted({min(longest, context) for context in CONTEXTS}, reverse=True)
    works = [Workload(conversations=_BATCH * _GROUP, tokens=context) for context in contexts]
    least = least_gib(base, model_config, works[-1], ways[-1])
    for workload in works if least <= gib else ():
        if (plan := choose(base, model_config, workload, gib=gib, ways=ways, begin=begin)) is not None:
            beside = beside_server(plan, workload.tokens, model_config, gib)
            return Starter(plan, workload.tokens, least, beside)
    return Starter(None, contexts[-1], least)


def starter_plan(
    path: str, gib: float | None, *, trained: Trained | None = None, begin: Begin = lambda text: None
) -> tuple[dict[str, str], list[str]]:
    """For `turnwise init --gpu`: the lines of the starter's recipe that are others, and lines to print.

    `gib` is the memory of the GPU; None: what is free on that of this machine. `trained`: what is to be trained; None: the first
    of `WAYS` that fits. `begin` shows what is tried. Raises ConfigError if the model's configuration cannot be read, if there is
    no GPU to ask, or if nothing fits.
    """
    if gib is not None:
        card = f"a GPU with {gib:g} GiB"
    elif sees_gpu():
        memory = gpu_memory("cuda")
        card, gib = str(memory), memory.free / 2**30
    else:
        reason = why_no_gpu() or "there is none here"
        raise ConfigError(f"--gpu needs a number on a machine whose GPU cannot be used, such as --gpu 24: {reason}")
    refuse_other_than_model(path, error=ConfigError, weights=False, given=f"--model {path}")
    try:
        with boundary("model"):
            model_config = read_model_config(path)
    except Failed as failed:
        raise ConfigError(f"--model {path}: {unreadable('model configuration', path, failed)}") from failed
    found = starter(path, model_config, gib, ways=WAYS if trained is None else WAYS_OF[trained], begin=begin)
    if (plan := found.plan) is not None:
        begin(f"computing the memory of a step with {plan.way.name}")
        lines = [f"{path} on {card}: {plan.way.name}, {starter_check(plan, found.context, model_config, gib).text}\n"]
        return starter_lines(found, gib, trained), lines
    kinds = list(WAYS_OF)
    smaller = kinds[kinds.index(trained or kinds[-1]) + 1 :]  # each kind needs less than those before
    others = ((kind, starter(path, model_config, gib, ways=WAYS_OF[kind], begin=begin)) for kind in smaller)
    fitting = next(
        (
            f"--train {kind}, which fits ({other.plan.way.name}, with conversations of {other.context:,} tokens), "
            for kind, other in others
            if other.plan is not None
        ),
        "",
    )
    raise ConfigError(
        f"--model {path} does not fit on {card}{'' if trained is None else f' with --train {trained}'}: even "
        f"{_LEAST_WAY[trained or 'qlora']} needs {found.least:.1f} GiB and its activations, with conversations of "
        f"{found.context:,} tokens. Use {fitting}a smaller model, or several GPUs (docs/cluster.md)"
    )


_LEAST_WAY: Mapping[Trained, str] = {
    "all": "the training of all weights with checkpointing and with AdamW's state in the machine's memory",
    "lora": "an adapter with checkpointing",
    "qlora": "an adapter on weights in 4 bits",
}
"""The last of `WAYS_OF` in words."""


def starter_recipe(plan: Plan, context: int) -> Config:
    """The starter's recipe, as far as memory depends on it."""
    limits = LimitsSection(turns=_TURNS, tokens_per_turn=_TOKENS_PER_TURN, context=context)
    train = plan.config.train.model_copy(update={"batch_size": _BATCH, "group_size": _GROUP})
    return plan.config.model_copy(update={"limits": limits, "train": train})


def starter_check(plan: Plan, context: int, model_config: Any, gib: float) -> Check:
    """The check of the starter's recipe that `turnwise plan` and `turnwise doctor` make."""
    config = starter_recipe(plan, context)
    workload = workload_of(config, model_config, "train")
    return peak_check(config, model_config, workload, section="train", limit=gib, card_gib=gib)


def beside_server(plan: Plan, context: int, model_config: Any, gib: float) -> Beside | None:
    """What the starter's recipe has with a sleeping vLLM server on the same GPU; None if there is no room for it, or if the
    weights have 4 bits, which servers do not get."""
    if "model.quantization.bits" in plan.way.options:
        return None
    config = changed(
        starter_recipe(plan, context), ["engine"], VllmEngineSection(name="vllm", sleep=True, memory_gb=_LEAST_SERVER)
    )
    workload = workload_of(config, model_config, "train")
    needs, limit = _of_process(config, model_config, workload, "train", gib), USABLE * gib * 2**30
    if needs.update(config) > limit:  # the sleeping server keeps a part of its memory
        config = changed(config, ["train", "micro_batch_tokens"], None)
    tokens, update = _micro_batch(config, workload, "train", gib, needs)
    if update > limit:
        return None
    config = changed(config, ["train", "micro_batch_tokens"], tokens)
    cache = server_cache(config, model_config, workload, gib=gib)
    return Beside(cache, tokens) if cache >= _LEAST_SERVER else None


def starter_lines(found: Starter, gib: float, trained: Trained | None = None) -> dict[str, str]:
    """The lines of the starter's recipe, which has a plan, by those that they replace. `gib` is the memory of the GPU, `trained`
    what was asked for."""
    plan, context = found.plan, found.context
    assert plan is not None
    options, lora = plan.way.options, "model.lora.rank" in plan.way.options
    known = plan.config
    assert known.engine.embedded is not None
    kept = "the adapter is float32" if lora else "the optimizer keeps what bfloat16 would round away"
    model = [*(f"  # {line}" for line in _why(plan.way, context, trained)), f"  dtype: bfloat16 # {kept}"]
    if lora:
        model.append(f"  lora: {{rank: {_RANK}, alpha: {2 * _RANK}}}")
    if "model.quantization.bits" in options:
        model.append("  quantization: {bits: 4}")
    if "model.gradient_checkpointing" in options:
        model.append("  gradient_checkpointing: true # a third more time for a step")
    rate = learning_rate(plan.parameters, adapter=lora)
    train = [
        f"  lr: {_number(rate)} # for {_many(plan.parameters)} parameters"
        + (", an adapter: 20 times that of all weights" if lora else ", all of them"),
        f"  micro_batch_tokens: {known.train.micro_batch_tokens} # {_why_so_many(known.train.micro_batch_tokens, gib)}",
    ]
    fewer = found.beside is not None and found.beside.micro_batch_tokens != known.train.micro_batch_tokens
    if found.beside is not None and fewer:
        train.append(
            f"  # micro_batch_tokens: {found.beside.micro_batch_tokens} # instead, with vLLM on the same GPU (below): the server "
            f"keeps about {ASLEEP_BYTES / 2**30:g} GiB during an update"
        )
    train += _optimizer_line(plan)
    engine = [
        "correction: {action: truncate} # in bfloat16, trainer and engine round differently (docs/losses.md)",
        f"engine: {{memory_gb: {known.engine.embedded.memory_gb}}} # GiB of KV cache, for {plan.rows} conversations of {context} "
        f"tokens at a time, more if they are shorter",
        _vllm(plan, found.beside, fewer=fewer),
    ]
    return {
        "  # lora: {rank: 16} # train a LoRA adapter instead of all weights (docs/memory.md)": "\n".join(model),
        "  tokens_per_turn: 64": f"  tokens_per_turn: {_TOKENS_PER_TURN}\n  context: {context} # the memory was computed with it",
        "  lr: 3.0e-4 # for a model with billions of parameters: about 1.0e-6": "\n".join(train),
        "# engine: {name: vllm} # sample with vLLM instead of the embedded engine (docs/engines.md)": "\n".join(engine),
    }


def _why(way: Way, context: int, trained: Trained | None) -> list[str]:
    """Lines that say why the way was chosen, and what was tried before it."""
    if trained is not None:
        return [f"{way.reason} (--train {trained})"]
    if way in _ALL_WEIGHTS:
        return [way.reason]
    others = (
        "neither all weights nor an adapter on weights in bfloat16 fit" if way == _QLORA else "all weights do not fit"
    )
    return [
        f"{way.reason};",
        f"{others} with conversations of {context:,} tokens: tried for all weights were AdamW, also with gradient_checkpointing,",
        "master_weights: kahan and offload: sampling; `turnwise init --train all` also tries adamw_8bit and offload: cpu",
    ]


def _optimizer_line(plan: Plan) -> list[str]:
    """The options of the optimizer that a way has, and what they need."""
    optimizer = {
        name.rpartition(".")[2]: value
        for name, value in plan.way.options.items()
        if name.startswith("train.optimizer.")
    }
    if not optimizer:
        return []
    eight, kahan = optimizer.get("name") == "adamw_8bit", "master_weights" in optimizer
    why = ["kahan: 2 bytes for each parameter instead of 4"] if kahan else []
    if eight:
        why.append("adamw_8bit: 2 bytes for each parameter instead of 8 (pip install 'turnwise[8bit]')")
    gigabytes = ((2 if eight else 8) + (2 if kahan else 4)) * plan.parameters / 2**30
    if optimizer.get("offload") == "sampling":
        why.append(f"sampling: {gigabytes:.1f} GiB or more of the machine's memory, in two copies for each step")
    elif "offload" in optimizer:
        why.append(f"cpu: {gigabytes:.1f} GiB of the machine's memory")
    return [f"  optimizer: {{{', '.join(f'{name}: {value}' for name, value in optimizer.items())}}} # {'; '.join(why)}"]


def _many(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} billion" if parameters >= 1e8 else f"{parameters / 1e6:.1f} million"


def _why_so_many(tokens: int | None, gib: float) -> str:
    """The reason for the size of a micro-batch."""
    if tokens == MOST_TOKENS:
        return "more would not be faster"
    return f"the most with which an update fits into {USABLE:.0%} of {gib:.3g} GiB"


def _vllm(plan: Plan, beside: Beside | None, *, fewer: bool) -> str:
    """The comment of the starter's recipe on sampling with vLLM. `fewer`: with another micro-batch, which the recipe names."""
    if "model.quantization.bits" in plan.way.options:
        return "# engine: {name: vllm} is not possible with weights in 4 bits"
    if beside is None:
        return (
            "# engine: {name: vllm} does not fit on the same GPU beside the trainer: engine.devices names another GPU"
        )
    return (
        f"# engine: {{name: vllm, python: ~/vllm/bin/python, sleep: true, memory_gb: {cache_step(beside.cache)}}} # instead"
        f"{', with the other micro_batch_tokens' if fewer else ''}: samples faster, in what the trainer leaves free meanwhile "
        f"(docs/engines.md)"
    )


def _number(rate: float) -> str:
    digits, exponent = f"{rate:.1e}".split("e")
    return f"{digits}e{int(exponent)}"
