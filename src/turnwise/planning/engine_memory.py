"""The memory of engines that are not in the trainer's process: in rollout workers, and on servers that turnwise starts."""

from __future__ import annotations

from typing import Any

from turnwise import build
from turnwise.build.server_engines import cache_gb
from turnwise.config.schema import Config, LocalEngineSection, ServerEngineSection
from turnwise.doctor.engine_memory import kv_cache_bytes
from turnwise.doctor.memory import PROGRAM_BYTES, workload_of
from turnwise.doctor.traced_pass import empty_model
from turnwise.models.model_config import context_length
from turnwise.planning.placement import PlanLine

__all__ = ["engine_memory_lines"]


def engine_memory_lines(config: Config, model_config: Any) -> list[PlanLine]:
    """The predicted memory of a rollout worker with the embedded engine, or of each device of a started server; empty if the
    engine is in the trainer's process, or on servers that others have started."""
    engine = config.engine
    if isinstance(engine, LocalEngineSection) and config.cluster.launcher == "ray":
        workers, workload = config.cluster.workers, workload_of(config, model_config, "train")
        started = workload.conversations * (config.train.max_staleness + 1)
        cache = kv_cache_bytes(
            config, model_config, conversations=min(started, workers.max_concurrent), tokens=workload.tokens
        )
        weights = _weights(config, model_config)
        text = _sum({"weights": weights, "KV cache": cache, "program": PROGRAM_BYTES})
        return [PlanLine("memory of a worker", f"{text}, without the environments")]
    if isinstance(engine, ServerEngineSection) and engine.url is None:
        weights = _weights(config, model_config) / engine.tensor_parallel
        cache = cache_gb(config, config.limits.context or context_length(model_config.to_dict()))
        if cache is None:
            rest = f"weights {_gib(weights)}; {config.engine.name} chooses the size of its KV cache (engine.memory_gb)"
        else:
            rest = _sum({"weights": weights, "KV cache": cache * 2**30})
        return [PlanLine("memory of a server's device", rest)]
    return []


def _weights(config: Config, model_config: Any) -> float:
    model = empty_model(build.model_options(config), model_config)
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _sum(parts: dict[str, float]) -> str:
    return f"{_gib(sum(parts.values()))} GiB: " + ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"
