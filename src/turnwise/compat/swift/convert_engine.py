"""Converts ms-swift's arguments about vLLM: the engine of the recipe, and the rollout server of `vllm_mode server`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from turnwise.compat.swift.recipe_builder import SwiftRecipeBuilder

__all__ = ["ENGINE_ARGUMENTS", "convert_engine"]

_VALUES: Mapping[str, str] = {
    "vllm_gpu_memory_utilization": "--gpu-memory-utilization",
    "vllm_pipeline_parallel_size": "--pipeline-parallel-size",
    "vllm_max_num_seqs": "--max-num-seqs",
    "vllm_quantization": "--quantization",
    "vllm_speculative_config": "--speculative-config",
    "vllm_limit_mm_per_prompt": "--limit-mm-per-prompt",
    "vllm_mm_processor_cache_gb": "--mm-processor-cache-gb",
}
"""Arguments of vLLM with a value."""
_FLAGS: Mapping[str, str] = {
    "vllm_enforce_eager": "--enforce-eager",
    "vllm_disable_custom_all_reduce": "--disable-custom-all-reduce",
    "vllm_disable_cascade_attn": "--disable-cascade-attn",
    "vllm_enable_expert_parallel": "--enable-expert-parallel",
}
"""Arguments of vLLM without a value, which are given if the argument of ms-swift is true."""
_PARALLEL: Mapping[str, str] = {
    "vllm_tensor_parallel_size": "engine.tensor_parallel",
    "vllm_data_parallel_size": "engine.data_parallel",
}
"""Arguments that are options of the recipe."""
_SERVER = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout")
_ALWAYS: Mapping[str, str] = {
    "vllm_use_async_engine": "nothing: each conversation always runs on its own",
    "vllm_enable_lora": "nothing: vLLM always receives an adapter as an adapter",
    "vllm_max_lora_rank": "nothing: vLLM is started for the rank of model.lora.rank",
    "vllm_server_pass_dataset": "nothing: the server always receives all columns of a row",
}
_PORT = 8000

ENGINE_ARGUMENTS = (
    *_VALUES, *_PARALLEL, *_FLAGS, *_SERVER, *_ALWAYS, "use_vllm", "vllm_mode",
    "vllm_enable_prefix_caching", "vllm_engine_kwargs", "sleep_level",
)  # fmt: skip
"""The arguments that this module converts."""


def convert_engine(builder: SwiftRecipeBuilder) -> None:
    """Set `engine` and `rollout_server`. ms-swift samples with vLLM in a `swift rollout` server, and with `use_vllm`."""
    for key, result in _ALWAYS.items():
        builder.convert(result, key)
    server = builder.values.get("vllm_mode") == "server"
    wanted = builder.values.get("use_vllm")
    if wanted is False or not (wanted or server or builder.given.rollout != "unknown"):
        _without_vllm(builder)
        return
    builder.set("engine.name", "vllm", "use_vllm")
    for key, option in _PARALLEL.items():
        if (count := builder.values.get(key)) in (None, 1):
            builder.convert("nothing: it is vLLM's default", key)
        else:
            builder.set(option, count, key)
    if arguments := _vllm_arguments(builder):
        builder.set("engine.arguments", arguments)
    reason = "vLLM must be installed (docs/engines.md); without it, use the embedded engine: engine={name: local}"
    builder.assume("engine.name", "vllm", reason)
    if server:
        _convert_server(builder)
    else:
        _convert_colocated(builder)


def _without_vllm(builder: SwiftRecipeBuilder) -> None:
    for key in ENGINE_ARGUMENTS:
        if key in ("use_vllm", "vllm_mode") and not builder.values.get("use_vllm"):
            builder.convert("nothing: without use_vllm, the embedded engine samples", key)
        else:
            builder.reject(key, "has no effect without use_vllm: the embedded engine samples")


def _vllm_arguments(builder: SwiftRecipeBuilder) -> list[str]:
    """The further arguments of vLLM's servers."""
    arguments: list[str] = []
    for key, name in _VALUES.items():
        value = builder.values.get(key)
        if value is None or (key == "vllm_pipeline_parallel_size" and value == 1):
            builder.convert("nothing: it is vLLM's default", key)
            continue
        arguments += [name, _text(value)]
        builder.convert("engine.arguments", key)
    for key, name in _FLAGS.items():
        if builder.values.get(key):
            arguments.append(name)
        builder.convert("engine.arguments" if builder.values.get(key) else "nothing: it is vLLM's default", key)
    if builder.values.get("vllm_enable_prefix_caching") is False:
        arguments.append("--no-enable-prefix-caching")
    builder.convert("engine.arguments", "vllm_enable_prefix_caching")
    for name, value in (builder.values.get("vllm_engine_kwargs") or {}).items():
        flag = name.replace("_", "-")
        arguments += (
            [f"--no-{flag}"] if value is False else [f"--{flag}"] if value is True else [f"--{flag}", _text(value)]
        )
    builder.convert("engine.arguments", "vllm_engine_kwargs")
    return arguments


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _convert_colocated(builder: SwiftRecipeBuilder) -> None:
    """vLLM on the trainer's GPUs. With `sleep_level`, it frees its memory while the model is trained."""
    builder.convert("engine.name", "vllm_mode")
    if builder.values.get("sleep_level") and not builder.values.get("async_generate"):
        builder.set("engine.sleep", True, "sleep_level")
    elif builder.values.get("sleep_level"):
        builder.reject("sleep_level", "the engine samples during training (async_generate), so it cannot sleep")
    else:
        builder.convert("nothing: the engine keeps its memory", "sleep_level")
    for key in _SERVER:
        builder.reject(key, "has no effect without vllm_mode server")


def _convert_server(builder: SwiftRecipeBuilder) -> None:
    """The trainer's side of a rollout server. `turnwise serve` takes the place of `swift rollout`."""
    urls = _urls(builder)
    used = [key for key in _SERVER[:3] if builder.has(key)]
    if len(urls) > 1:
        reason = (
            f"the trainer uses one rollout server, {urls[0]} in the recipe: start that server with several replicas of the "
            f"engine (engine.replicas, or engine.url with the addresses of several vLLM servers)"
        )
        for key in used:
            builder.reject_value(key, builder.values[key], reason)
    builder.set("rollout_server.url", urls[0], "vllm_mode", *used)
    if (seconds := builder.values.get("vllm_server_timeout")) is not None:
        builder.set("rollout_server.timeout", float(seconds), "vllm_server_timeout")
    builder.reject("sleep_level", "has no effect with vllm_mode server: the server's engine has its own GPUs")
    builder.assume(
        "rollout_server.url",
        urls[0],
        "start the server with this recipe and without this option: turnwise serve RECIPE rollout_server.url=null. The trainer "
        "and the server need the same TURNWISE_SERVER_TOKEN",
    )


def _urls(builder: SwiftRecipeBuilder) -> list[str]:
    """The addresses of the servers, as ms-swift's trainer finds them."""
    if urls := _items(builder.values.get("vllm_server_base_url")):
        return [str(url) for url in urls]
    hosts = _items(builder.values.get("vllm_server_host")) or ["127.0.0.1"]
    ports = _items(builder.values.get("vllm_server_port")) or [_PORT]
    pairs = zip(hosts, [*ports, *ports[-1:] * len(hosts)], strict=False)
    return [f"http://{_reachable(str(host))}:{port}" for host, port in pairs]


def _items(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]


def _reachable(host: str) -> str:
    """An address that a client can use: a server that listens on all addresses is on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
