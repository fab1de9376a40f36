"""Builds the engines of a recipe whose tokens are sampled by servers."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

from turnwise.chat.renderer import Renderer
from turnwise.config.engine_checks import refuse_engine
from turnwise.config.schema import Config, ServerEngineSection, SglangEngineSection, VllmEngineSection
from turnwise.engines.engine import Engine
from turnwise.engines.publisher import CopiedWeights, SharedWeights, WeightPublisher
from turnwise.engines.remote.collective import Backend
from turnwise.engines.remote.devices import devices_of_servers, visible_devices
from turnwise.engines.remote.engine import RemoteEngine
from turnwise.engines.remote.http import HttpLimits, HttpServer
from turnwise.engines.remote.kv_memory import cpu_memory_gb, kv_token_bytes
from turnwise.engines.remote.ownership import Owner
from turnwise.engines.remote.publisher import ProbeOptions, RemoteWeights
from turnwise.engines.remote.replicas import Replica
from turnwise.engines.remote.server_api import ServerApi
from turnwise.engines.remote.weights import WeightCopies, WeightFiles, WeightStore
from turnwise.errors import ConfigError, DataError
from turnwise.json_yaml import parse_json, read_text
from turnwise.models.model_config import context_length, vocabulary_size
from turnwise.ray_workers.rollouts import RayRollouts
from turnwise.rollout_server.client import RolloutClient, ServerWeights
from turnwise.training.learner import Learner

__all__ = ["cache_gb", "given_servers", "http_limits", "longest_context", "model_facts", "publisher", "server_engine"]

_ROUNDING = {True: 1e-4, False: 0.5}
"""The largest difference of log-probabilities between server and trainer, if both compute in float32 and if not. Weights that
did not arrive differ by more than 1."""


def server_engine(
    config: Config,
    options: ServerEngineSection,
    renderer: Renderer,
    *,
    trained: bool,
    version: int,
    owner: Owner | None = None,
) -> Engine:
    """The engine on servers of a recipe. `trained`: its weights are updated during the run. `owner`: see `sampling_engine`.

    The servers are started by `Engine.start`. Raises ConfigError.
    """
    refuse_engine(config)
    _refuse_sleep_on_cpu(config, options)
    adapter = trained and config.model.lora.rank is not None
    api, replicas = _servers(
        config, options, _vocab_size(config), trained=trained, adapter=adapter, owner=owner or Owner()
    )
    return RemoteEngine(
        api,
        replicas,
        decode=renderer.decode,
        files=_weight_store(options) if trained else None,
        version=version,
        patience=options.start_timeout,
        context=config.limits.context or longest_context(config),
    )


def _python(options: ServerEngineSection) -> str:
    """The interpreter that runs the servers."""
    return sys.executable if options.python is None else os.path.expanduser(options.python)


def _refuse_sleep_on_cpu(config: Config, options: ServerEngineSection) -> None:
    """Raise ConfigError if servers that turnwise would start cannot free their memory."""
    from turnwise.engines.vllm.launch import on_cpu

    if options.sleep and options.url is None and on_cpu(config.model.device):
        raise ConfigError(
            f"engine.sleep=true needs a GPU: on the CPU, vLLM 0.32 ignores it and SGLang 0.5.23 does not start. The model is on "
            f"the CPU (model.device={config.model.device}): remove engine.sleep"
        )


def _devices(config: Config, options: ServerEngineSection) -> list[str]:
    """The GPUs of each server that turnwise starts, as `CUDA_VISIBLE_DEVICES`; empty on the CPU. Raises ConfigError."""
    from turnwise.engines.vllm.launch import on_cpu

    if on_cpu(config.model.device):
        return []
    return devices_of_servers(
        options.devices,
        servers=options.replicas,
        per_server=options.tensor_parallel * options.data_parallel,
        trainer=0 if options.sleep else _trainer_devices(config),
        visible=visible_devices(),
    )


def _trainer_devices(config: Config) -> int:
    """The number of GPUs of this machine that the trainer uses: those with the lowest numbers."""
    if not config.cluster.distributed:
        return 1
    return int(os.environ.get("LOCAL_WORLD_SIZE") or config.cluster.trainers or 1)


def _weight_store(options: ServerEngineSection) -> WeightStore:
    """Where weights are kept on their way to the servers."""
    if options.weight_transfer == "collective":
        return WeightCopies()
    return WeightFiles(None if options.weight_folder is None else Path(options.weight_folder).expanduser().absolute())


def _backend(config: Config) -> Backend:
    """The backend of broadcasts: NCCL if the servers that turnwise would start are on GPUs."""
    from turnwise.engines.vllm.launch import on_cpu

    return "gloo" if on_cpu(config.model.device) else "nccl"


def _servers(
    config: Config, options: ServerEngineSection, vocab_size: int, *, trained: bool, adapter: bool, owner: Owner
) -> tuple[ServerApi, list[Replica]]:
    """The requests of the recipe's kind of server, and the servers."""
    if isinstance(options, SglangEngineSection):
        return _sglang(config, options, vocab_size, trained=trained, adapter=adapter, owner=owner)
    assert isinstance(options, VllmEngineSection)
    from turnwise.engines.vllm.api import VllmApi

    if options.mode == "in_process":
        from turnwise.engines.vllm.in_process import InProcessApi, InProcessServer

        api = InProcessApi(vocab_size=vocab_size, labels=trained, backend=_backend(config), owner=owner)
        return api, [Replica(InProcessServer(_launch_options(config, options, adapter=adapter)), "")]
    api = VllmApi(vocab_size=vocab_size, labels=trained, adapter=adapter, backend=_backend(config), owner=owner)
    return api, _vllm_replicas(config, options, adapter=adapter)


def publisher(config: Config, engine: Engine, learner: Learner, model: Any | None = None) -> WeightPublisher:
    """How the learner's weights reach the recipe's engine. `model` is the model of the embedded engine."""
    if isinstance(engine, RolloutClient):
        return ServerWeights(engine, learner)
    if isinstance(engine, RayRollouts):
        return RemoteWeights(engine, learner, _probe_options(config))
    if not isinstance(engine, RemoteEngine):
        if config.cluster.distributed:
            return CopiedWeights(engine, lambda: learner.copy_weights(model))
        return SharedWeights(engine)
    assert isinstance(config.engine, ServerEngineSection)
    return RemoteWeights(engine, learner, _probe_options(config), sleeper=engine if config.engine.sleep else None)


def _probe_options(config: Config) -> ProbeOptions | None:
    """How servers are probed; None for an embedded engine."""
    if not isinstance(config.engine, ServerEngineSection):
        return None
    return ProbeOptions(
        vocab_size=_vocab_size(config), every=config.engine.check_weights_every, tolerance=_ROUNDING[config.exact]
    )


def _vocab_size(config: Config) -> int:
    """The number of token ids of the recipe's model. Raises ConfigError."""
    vocab_size = vocabulary_size(model_facts(config))
    if vocab_size is None:
        raise ConfigError(
            f"the config.json of {config.model.path} has no vocab_size, which engine.name={config.engine.name} needs"
        )
    return vocab_size


def longest_context(config: Config) -> int | None:
    """The longest context of the recipe's model in tokens, from its config.json; None if it does not say."""
    return context_length(model_facts(config))


def model_facts(config: Config) -> dict[str, Any]:
    """The contents of config.json in model.path. Raises ConfigError if there is no such file."""
    file = Path(config.model.path).expanduser() / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"engine.name={config.engine.name} needs model.path to be a directory with a config.json, and there is no {file}. "
            f"Download the model, and give the path of its directory"
        )
    try:
        facts = parse_json(read_text(file, error=DataError), where=str(file), error=DataError)
    except DataError as error:
        raise ConfigError(str(error)) from error
    if not isinstance(facts, dict):
        raise ConfigError(f"{file} must contain a JSON object")
    return facts


def http_limits(options: ServerEngineSection) -> HttpLimits:
    """The time limits of requests to the servers."""
    return HttpLimits(answer=options.timeout, idle=options.timeout)


def given_servers(options: ServerEngineSection, health_path: str) -> list[Replica]:
    """Replicas for the servers in engine.url. Raises ConfigError if the variable in engine.api_key_env is not set."""
    assert options.url is not None
    token = None
    if options.api_key_env is not None:
        token = os.environ.get(options.api_key_env)
        if not token:
            raise ConfigError(
                f"engine.api_key_env={options.api_key_env}: there is no such environment variable. Set it to the token of the "
                f"servers in engine.url, or remove engine.api_key_env"
            )
    return [Replica(HttpServer(url, token=token, limits=http_limits(options)), health_path) for url in options.urls]


def _vllm_replicas(config: Config, options: VllmEngineSection, *, adapter: bool) -> list[Replica]:
    from turnwise.engines.vllm.launch import HEALTH, started_replicas

    if options.url is not None:
        return given_servers(options, HEALTH)
    return started_replicas(_launch_options(config, options, adapter=adapter), options.replicas, http_limits(options))


def _launch_options(config: Config, options: VllmEngineSection, *, adapter: bool) -> Any:
    from turnwise.engines.vllm.launch import VllmLaunch, on_cpu

    context = config.limits.context or longest_context(config)
    return VllmLaunch(
        python=_python(options),
        model=str(Path(config.model.path).expanduser().absolute()),
        dtype=_dtype(config),
        context=context,
        memory_gb=cache_gb(config, context),
        max_requests=math.ceil(config.max_concurrent / options.replicas),
        cpu=on_cpu(config.model.device),
        lora_rank=config.model.lora.rank if adapter else None,
        vision="vision_config" in model_facts(config),
        sleep=options.sleep,
        tensor_parallel=options.tensor_parallel,
        data_parallel=options.data_parallel,
        devices=[] if options.mode == "in_process" else _devices(config, options),
        arguments=options.arguments,
        logs=Path(config.output) / "engine",
        start_timeout=options.start_timeout,
    )


def cache_gb(config: Config, context: int | None) -> float | None:
    """The KV cache in GB of each server that the run starts; None if the server chooses it. `context` is the longest sequence."""
    from turnwise.engines.vllm.launch import on_cpu

    assert isinstance(config.engine, ServerEngineSection)
    memory_gb = config.engine.memory_gb
    if memory_gb is None and on_cpu(config.model.device) and context is not None:
        return cpu_memory_gb(model_facts(config), _dtype(config), context)
    return memory_gb


def _dtype(config: Config) -> str:
    """The data type of the weights on servers."""
    return "bfloat16" if config.model.autocast else config.model.dtype


def _sglang(
    config: Config, options: SglangEngineSection, vocab_size: int, *, trained: bool, adapter: bool, owner: Owner
) -> tuple[ServerApi, list[Replica]]:
    from turnwise.engines.sglang.api import SglangApi, model_shapes
    from turnwise.engines.sglang.launch import HEALTH, SglangLaunch, started_replicas
    from turnwise.engines.vllm.launch import on_cpu

    facts, model = model_facts(config), Path(config.model.path).expanduser().absolute()
    context = config.limits.context or context_length(facts)
    if context is None:
        raise ConfigError(
            f"the config.json of {model} names no longest context, which engine.name=sglang needs: set limits.context"
        )
    api = SglangApi(
        vocab_size=vocab_size,
        context=context,
        labels=trained,
        adapter=adapter,
        pause=options.update_mode,
        shapes=model_shapes(model) if trained and not adapter else None,
        backend=_backend(config),
        owner=owner,
    )
    if options.url is not None:
        return api, given_servers(options, HEALTH)
    launch = SglangLaunch(
        python=_python(options),
        model=str(model),
        dtype=_dtype(config),
        cpu=on_cpu(config.model.device),
        context=context,
        token_bytes=kv_token_bytes(facts, _dtype(config)),
        memory_gb=cache_gb(config, context),
        lora_rank=config.model.lora.rank if adapter else None,
        keep_seeds=options.keep_seeds,
        sleep=options.sleep,
        tensor_parallel=options.tensor_parallel,
        data_parallel=options.data_parallel,
        devices=_devices(config, options),
        arguments=options.arguments,
        logs=Path(config.output) / "engine",
        start_timeout=options.start_timeout,
    )
    return api, started_replicas(launch, options.replicas, http_limits(options))
