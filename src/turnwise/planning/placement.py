"""What a recipe needs, for training and for `turnwise sft`: the numbers of a step, and where the parts of the run are placed.

Reads the recipe, the rows and the configuration of the model. Loads no weights, and imports no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.errors import ConfigError, counted
from turnwise.options.algorithm import steps_of_epochs
from turnwise.options.schema import Config

# training


@dataclass(frozen=True, slots=True)
class PlanLine:
    """A line of the plan: a name and its value."""

    name: str
    value: str


def batch_lines(config: Config, *, rows: int, ranks: int = 1) -> list[PlanLine]:
    """The numbers of a training step. `rows` is the number of rows of the data set."""
    train, limits = config.train, config.limits
    conversations = train.batch_size * train.group_size
    lines = [
        PlanLine("conversations of a step", f"{train.batch_size} rows x {train.group_size} = {conversations}"),
        PlanLine(
            "optimizer steps of a step",
            f"{train.minibatches} minibatch{'es' if train.minibatches > 1 else ''} x {counted(train.ppo_epochs, 'epoch')} = "
            f"{train.minibatches * train.ppo_epochs}, each on "
            f"{_sizes(conversations, train.minibatches)} conversations",
        ),
    ]
    bounds = [bound for bound in (limits.context, limits.tokens) if bound is not None]
    if bounds:
        lines.append(PlanLine("tokens of a step", f"at most {conversations * min(bounds):,}"))
    started = min(conversations * (train.max_staleness + 1), conversations * train.total_steps)
    lines.append(
        PlanLine(
            "running conversations",
            f"at most {min(started, config.max_concurrent)}: {started} may be started (train.max_staleness="
            f"{train.max_staleness}), max_concurrent={config.max_concurrent}",
        )
    )
    if ranks > 1:
        mean = conversations / train.minibatches / config.cluster.mesh.sets(ranks)
        lines.append(
            PlanLine(
                "conversations of a rank",
                f"{mean:.3g} for each optimizer step, on average: micro-batches are shared out by their tokens",
            )
        )
    epochs = train.total_steps * train.batch_size / max(1, rows)
    lines.append(PlanLine("rows", f"{rows:,}; {counted(train.total_steps, 'step')}, each row {epochs:.3g} times"))
    return lines


def _sizes(conversations: int, parts: int) -> str:
    """The sizes of parts that differ by at most 1. Example: `2 or 3`."""
    small, rest = divmod(conversations, parts)
    return f"{small} or {small + 1}" if rest else str(small)


def trainer_lines(config: Config, *, device: str, ranks: int = 1) -> list[PlanLine]:
    """Where the training runs. `device` is the device of the trainer, such as `cpu` or `cuda`."""
    launcher = config.cluster.launcher
    several = config.cluster.distributed
    trainer = (
        f"{ranks} ranks, each on a device of its own ({device}), started by {launcher}"
        if several
        else f"1 process on {device}"
    )
    if several and launcher == "ray":
        trainer = f"{ranks} ranks on the Ray cluster, on as few machines as possible, each with {_rank_resources(config, device)}"
    lines = [PlanLine("trainer", trainer)]
    if several:
        groups, shard, context, tensor = config.cluster.mesh.shape(ranks)
        part = shard * context * tensor
        copies = "" if groups == 1 else f"; {groups} groups of {part} ranks have a complete model each (HSDP)"
        kinds = [f"{kind} parallelism" for kind, size in (("context", context), ("tensor", tensor)) if size > 1]
        together = f"; {context * tensor} ranks compute each micro-batch together ({', '.join(kinds)})" if kinds else ""
        lines.append(
            PlanLine(
                "model",
                f"each rank has 1/{part} of weights, gradients and optimizer state (fully_shard){copies}{together}",
            )
        )
    return lines


def placement_lines(config: Config, *, device: str, ranks: int = 1, servers: str = "") -> list[PlanLine]:
    """Which part of the run uses which device. `device` is the device of the trainer, such as `cpu` or `cuda`; `servers` says
    which one started servers use."""
    launcher, several = config.cluster.launcher, config.cluster.distributed
    lines = trainer_lines(config, device=device, ranks=ranks)
    engine = config.engine
    if engine.embedded is not None:
        where = (
            f"on rank 0, on {device}, with a complete copy of the weights"
            if several
            else f"in the trainer's process, on {device}, with the trainer's weights"
        )
        lines.append(PlanLine("engine", where))
    else:
        lines.append(PlanLine("engine", _engine_text(config) + (f", {servers}" if servers else "")))
    where = "on rank 0" if several else "in the trainer's process"
    if launcher == "ray":
        workers = config.cluster.workers
        where = (
            f"in {workers.count} rollout workers on a Ray cluster, each with {workers.num_cpus:g} CPUs, "
            f"{workers.num_gpus:g} GPUs and at most {workers.max_concurrent} conversations"
        )
        if engine.embedded is not None:
            lines[-1] = PlanLine("engine", "in each rollout worker, with a copy of the weights")
        elif engine.starts_servers:
            lines[-1] = PlanLine("engine", f"in each rollout worker: {lines[-1].value}")
    if config.rollout_server.url is not None:
        where = f"on the rollout server {config.rollout_server.url}"
    lines.append(PlanLine("environments and tools", where))
    return lines


def _rank_resources(config: Config, device: str) -> str:
    """What Ray reserves for a rank."""
    ranks = config.cluster.ranks
    gpus = int(device == "cuda") if ranks.num_gpus is None else ranks.num_gpus
    custom = "".join(f", {name}={amount:g}" for name, amount in ranks.resources.items())
    return f"{ranks.num_cpus:g} CPUs, {gpus} GPUs{custom}"


def _engine_text(config: Config) -> str:
    options = config.engine.model_dump()
    urls = options.get("url")
    if urls:
        urls = [urls] if isinstance(urls, str) else urls
        return f"{options['name']}: {len(urls)} servers ({', '.join(urls)})"
    servers, per_server = options["replicas"], options["tensor_parallel"] * options["data_parallel"]
    return (
        f"{options['name']}: {counted(servers, 'server')}, started by the run, x {per_server} devices (tensor_parallel="
        f"{options['tensor_parallel']}, data_parallel={options['data_parallel']}) = {servers * per_server} devices"
    )


# fine-tuning


@dataclass(frozen=True, slots=True)
class ConversationTokens:
    """The length of a given conversation."""

    tokens: int
    """Tokens of its longest sequence, before `limits.context` is applied."""
    trained: int
    """Tokens with a weight in the loss."""


def fine_tuning_lines(
    config: Config, *, rows: int, counted: Sequence[ConversationTokens], context: int | None, ranks: int = 1
) -> list[PlanLine]:
    """The numbers of a step of fine-tuning on `rows` conversations, of which some were `counted`. `context` is the most tokens of
    a conversation."""
    sft, sets = config.sft, config.cluster.mesh.sets(ranks)
    steps = sft.steps or steps_of_epochs(sft.epochs, rows, sft.batch_size)
    lines = [
        PlanLine("conversations of a step", f"sft.batch_size={sft.batch_size}, one optimizer step"),
        PlanLine(
            "steps", f"{steps}: {rows:,} conversations, each used {steps * sft.batch_size / max(1, rows):.3g} times"
        ),
    ]
    if ranks > 1:
        lines.append(
            PlanLine(
                "conversations of a rank",
                f"{sft.batch_size / sets:.3g} for each step, on average: micro-batches are shared out by their tokens",
            )
        )
    if counted:
        lines += _length_lines(config, counted, rows, context)
    return lines


def _length_lines(
    config: Config, counted: Sequence[ConversationTokens], rows: int, context: int | None
) -> list[PlanLine]:
    fitting = [one for one in counted if context is None or one.tokens <= context]
    kept = counted if config.sft.too_long == "cut" else fitting
    used = [min(one.tokens, context or one.tokens) for one in kept]
    if not used:
        return [PlanLine("tokens", f"all {len(counted):,} counted conversations have more than {context:,} tokens")]
    which = "" if len(counted) == rows else f" (of {len(counted):,} counted conversations)"
    trained = sum(one.trained for one in kept) / len(kept)
    lines = [
        PlanLine("tokens of a conversation", f"{statistics.mean(used):,.0f} on average, at most {max(used):,}{which}"),
        PlanLine("trained tokens of a conversation", f"{trained:,.0f} on average"),
        PlanLine("tokens of a step", f"{config.sft.batch_size * statistics.mean(used):,.0f} on average"),
    ]
    if len(fitting) < len(counted):
        what = "cut to it" if config.sft.too_long == "cut" else "left out (sft.too_long)"
        lines.append(
            PlanLine("too long", f"{len(counted) - len(fitting):,} have more than {context:,} tokens, and are {what}")
        )
    return lines


def refuse_idle_ranks(config: Config, ranks: int) -> None:
    """Raise ConfigError if some ranks would have no conversation."""
    size, sets = config.sft.batch_size, config.cluster.mesh.sets(ranks)
    if size < sets:
        raise ConfigError(
            f"{sets} ranks{config.cluster.mesh.of_sets} and {size} conversations for each optimizer step (sft.batch_size="
            f"{size}): at least {sets - size} would compute nothing. Use at most {size}, or larger batches"
        )
