"""Refuses options of the section `cluster` that have no effect, and recipes that several ranks cannot train."""

from __future__ import annotations

from pathlib import Path

from turnwise.config.optimization import OptimizationSection
from turnwise.config.schema import Config
from turnwise.config.section import changed_options
from turnwise.config.server_engines import ServerEngineSection

__all__ = ["cluster_problems"]

Problem = tuple[bool, str]


def cluster_problems(config: Config, options: OptimizationSection) -> list[Problem]:
    """Problems of the section cluster, in training or fine-tuning. `options` are those of the optimizer."""
    cluster, fsdp, optimizer = config.cluster, config.cluster.fsdp, options.optimizer
    of_ray = _options_of_ray(config)
    sections = ("launcher", "fsdp", "address", "workers", "ranks")
    changed = [name for name in changed_options(cluster) if name not in sections]
    changed += [f"fsdp.{name}" for name in changed_options(fsdp)]
    of_ranks = [name for name in changed if name != "heartbeat"]
    of_local = next((name for name in changed if name in ("trainers", "restarts")), None)
    several = cluster.distributed
    return [
        (
            cluster.launcher == "none" and bool(changed),
            f"cluster.{next(iter(changed), '')} has no effect in one process: set cluster.launcher (local or torchrun), or "
            f"remove it",
        ),
        (
            cluster.launcher != "ray" and bool(of_ray),
            f"cluster.{next(iter(of_ray), '')} has no effect with cluster.launcher={cluster.launcher}: set cluster.launcher=ray, "
            f"or remove it",
        ),
        *_ray_problems(config, of_ranks),
        (
            cluster.launcher == "torchrun" and of_local is not None,
            f"cluster.{of_local} has no effect with cluster.launcher=torchrun, which starts the ranks itself (--nproc-per-node, "
            f"--max-restarts): remove it, or set cluster.launcher=local",
        ),
        (
            several and fsdp.param_dtype == config.model.dtype,
            f"cluster.fsdp.param_dtype={fsdp.param_dtype} has no effect with model.dtype={config.model.dtype}: remove one of "
            f"them",
        ),
        (
            several and fsdp.param_dtype is not None and config.model.autocast,
            "cluster.fsdp.param_dtype and model.autocast both compute passes in bfloat16: remove one of them",
        ),
        (
            several and fsdp.offload == "cpu" and (config.model.device == "cpu" or config.deterministic),
            "cluster.fsdp.offload=cpu has no effect, because the model is on the CPU: remove it",
        ),
        (
            several and optimizer.name != "adamw",
            f"optimizer.name={optimizer.name} cannot be used with several ranks, because its state depends on how weight "
            f"matrices are divided: use adamw, whose state is divided among the ranks",
        ),
        (
            several and optimizer.offload != "none",
            "optimizer.offload=cpu cannot be used with several ranks: set cluster.fsdp.offload=cpu",
        ),
        (
            several and optimizer.master_weights != "float32",
            f"optimizer.master_weights={optimizer.master_weights} cannot be used with several ranks: remove it. The float32 "
            f"copies of the weights are divided among the ranks",
        ),
        (
            several and config.model.device not in ("auto", "cpu", "cuda"),
            f"model.device={config.model.device} cannot be used with several ranks, because each rank has a device of its own: "
            f"set auto, cuda or cpu",
        ),
    ]


def _options_of_ray(config: Config) -> list[str]:
    """The changed options that only Ray uses."""
    cluster = config.cluster
    return [
        *(name for name in changed_options(cluster) if name == "address"),
        *(f"workers.{name}" for name in changed_options(cluster.workers)),
        *(f"ranks.{name}" for name in changed_options(cluster.ranks)),
    ]


def _ray_problems(config: Config, of_ranks: list[str]) -> list[Problem]:
    """Problems of ranks and rollout workers on Ray. `of_ranks` are the changed options that only several ranks use."""
    cluster, workers = config.cluster, config.cluster.workers.count
    ray, ranks = cluster.launcher == "ray", cluster.launcher == "ray" and cluster.distributed
    of_ranks = [*of_ranks, *(f"ranks.{name}" for name in changed_options(cluster.ranks))]
    engine = config.engine if isinstance(config.engine, ServerEngineSection) else None
    servers = [] if engine is None else engine.urls
    server = config.rollout_server.url
    return [
        (
            ray and not ranks and bool(of_ranks),
            f"cluster.{next(iter(of_ranks), '')} has no effect with cluster.launcher=ray, where the process of the command "
            f"trains: remove it, or set cluster.trainers, the number of training ranks on the Ray cluster",
        ),
        (
            ranks and cluster.ranks.num_gpus == 1 and config.model.device == "cpu",
            "cluster.ranks.num_gpus=1 has no effect with model.device=cpu: remove one of them",
        ),
        (
            ranks and cluster.ranks.num_gpus == 0 and config.model.device == "cuda",
            "cluster.ranks.num_gpus=0 reserves no GPU, and model.device=cuda needs one for each rank: remove one of them",
        ),
        (
            ranks and "working_dir" in cluster.ranks.runtime_env and not Path(config.output).expanduser().is_absolute(),
            f"output={config.output} is relative to the working directory of the ranks, which is a copy that Ray removes "
            f"(cluster.ranks.runtime_env.working_dir): give the path of a directory that the machines share",
        ),
        (
            ray and server is not None,
            f"cluster.launcher=ray runs conversations in rollout workers, and rollout_server.url={server} on a server: "
            f"remove one of them",
        ),
        (
            ray and engine is not None and engine.url is not None and len(servers) < workers,
            f"cluster.workers.count={workers} needs at least {workers} servers in engine.url, because each server belongs to one "
            f"rollout worker; there are {len(servers)}. Set a smaller cluster.workers.count, or add servers",
        ),
        *_problems_of_servers_in_workers(config, ray),
        (
            ray and config.deterministic,
            "deterministic=true cannot be combined with cluster.launcher=ray, because the batches of the workers' engines "
            "depend on timing: remove one of them",
        ),
    ]


def _problems_of_servers_in_workers(config: Config, ray: bool) -> list[Problem]:
    """Problems of servers that rollout workers use as their engines."""
    engine, gpus = config.engine, config.cluster.workers.num_gpus
    if not ray or not isinstance(engine, ServerEngineSection):
        return []
    needed = engine.replicas * engine.tensor_parallel * engine.data_parallel
    on_gpus = engine.url is None and config.model.device != "cpu" and engine.devices is None
    return [
        (
            on_gpus and (needed > 1 or gpus > 0) and gpus < needed,
            f"cluster.workers.num_gpus={gpus:g}: the servers of each rollout worker need {needed} GPUs (engine.replicas="
            f"{engine.replicas} x engine.tensor_parallel={engine.tensor_parallel} x engine.data_parallel="
            f"{engine.data_parallel}): set cluster.workers.num_gpus={needed}, or model.device=cpu",
        ),
        (
            engine.sleep,
            "engine.sleep=true has no effect with cluster.launcher=ray, where the servers use the GPUs of the rollout workers: "
            "remove it",
        ),
    ]
