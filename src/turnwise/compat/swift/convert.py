"""Converts ms-swift's arguments into a recipe, with a report: what was converted, what was not, and why.

Knows the arguments about conversations, rewards, engines, rollout servers, devices and adapters; `convert_training` knows those
about training, and the tables of `read_arguments` those that need no computation. Arguments that are not given have ms-swift's
default where it differs from turnwise's. `from_rollout_arguments` reads the arguments of `swift rollout` for `turnwise serve`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from turnwise.compat.conversion import ConversionReport, convert_kernels, convert_loggers
from turnwise.compat.swift.convert_teacher import TEACHER_ARGUMENTS, convert_gkd, convert_opd
from turnwise.compat.swift.convert_training import (
    convert_batches,
    convert_credit,
    convert_data,
    convert_divergence,
    convert_loss,
    convert_sample_filters,
    convert_steps,
    note_hub_names,
)
from turnwise.compat.swift.outcomes import orms
from turnwise.compat.swift.plugins import named_scheduler, registered_reward
from turnwise.compat.swift.read_arguments import (
    CHOICES,
    FIXED,
    MACHINERY,
    OPTIONS,
    REWARDS,
    SHARE_OF_STEPS,
    SwiftRecipeBuilder,
    read_arguments,
)
from turnwise.compat.swift.rewards import REWARD_DEFAULTS
from turnwise.compat.swift.schedulers import multi_turns
from turnwise.errors import ConfigError, nearest
from turnwise.json_yaml import read_text

_ADAPTER = ("lora_rank", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora")


def convert_adapter(builder: SwiftRecipeBuilder) -> None:
    """Set model.lora, model.gradient_checkpointing and model.kernels. Without `tuner_type`, an adapter of rank 8 is trained."""
    checkpointing = builder.values.get("gradient_checkpointing")
    if checkpointing is not None:
        builder.set("model.gradient_checkpointing", bool(checkpointing), "gradient_checkpointing")
    convert_kernels(builder, "use_liger_kernel")
    _convert_experts(builder)
    _convert_quantization(builder)
    tuner = builder.value("tuner_type")
    if tuner != "lora":
        for key in _ADAPTER:
            builder.reject(key, f"has no effect with tuner_type={tuner}")
        if tuner == "full":
            builder.convert("nothing: without model.lora.rank, all weights are trained", "tuner_type")
        else:
            reason = "turnwise trains all weights (full) or a LoRA adapter (lora)"
            builder.reject("tuner_type", reason, changes_training=True)
        return
    builder.set("model.lora.rank", builder.value("lora_rank"), "tuner_type", "lora_rank")
    builder.set("model.lora.alpha", float(builder.value("lora_alpha")), "lora_alpha")
    for key, option in (("use_rslora", "model.lora.rslora"), ("use_dora", "model.lora.dora")):
        if builder.has(key):
            builder.set(option, bool(builder.value(key)), key)
    if builder.values.get("lora_dropout"):
        reason = "there is no dropout: with it, the trainer's probabilities would not be those of the engine"
        builder.reject("lora_dropout", reason, changes_training=True)
    builder.convert("nothing: there is no dropout", "lora_dropout")
    _convert_targets(builder)


def _convert_experts(builder: SwiftRecipeBuilder) -> None:
    """Set model.router_replay and loss.router_aux_loss_coef. ms-swift's R3 replays the experts of the engine."""
    mode = builder.values.get("router_replay_mode")
    if mode in ("R3", "disabled"):
        builder.set("model.router_replay", mode == "R3", "router_replay_mode")
    elif mode is not None:
        reason = "turnwise replays the experts that the engine chose while sampling: use R3"
        builder.reject("router_replay_mode", reason, changes_training=True)
    for name in ("router_aux_loss_coef", "moe_aux_loss_coeff"):
        if builder.values.get(name) is not None:
            builder.set("loss.router_aux_loss_coef", float(builder.values[name]), name)


_QUANTIZATION = ("quant_method", "quant_bits", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")


def _convert_quantization(builder: SwiftRecipeBuilder) -> None:
    """Set model.quantization: bitsandbytes with 4 bits."""
    given = [key for key in _QUANTIZATION if builder.values.get(key) is not None]
    if not given:
        return
    if (builder.values.get("quant_method"), builder.values.get("quant_bits")) != ("bnb", 4):
        for key in given:
            reason = "turnwise quantizes the weights under an adapter with bitsandbytes: quant_method bnb, quant_bits 4"
            builder.reject(key, reason, changes_training=True)
        return
    builder.set("model.quantization.bits", 4, "quant_method", "quant_bits")
    if (kind := builder.values.get("bnb_4bit_quant_type")) is not None:
        builder.set("model.quantization.type", kind, "bnb_4bit_quant_type")
    if (double := builder.values.get("bnb_4bit_use_double_quant")) is not None:
        builder.set("model.quantization.double", bool(double), "bnb_4bit_use_double_quant")


def _convert_targets(builder: SwiftRecipeBuilder) -> None:
    """Set the layers with an adapter. `all-linear` is the default here as there."""
    key = "target_modules"
    given = builder.values.get(key) or ["all-linear"]
    names = [str(name) for name in (given if isinstance(given, list) else [given])]
    if names == ["all-linear"]:
        builder.convert("nothing: all linear layers have an adapter", key)
    elif any(name.startswith("all-") for name in names):
        reason = "name the layers, such as q_proj v_proj; without names, all linear layers have an adapter"
        builder.reject(key, reason, changes_training=True)
    else:
        builder.set("model.lora.target_modules", names, key)


_UNBOUNDED_TURNS = 100
"""limits.turns for a scheduler without `max_turns`."""
_ENVIRONMENT = (
    "multi_turn_scheduler", "max_turns", "use_gym_env", "gym_env", "context_manager", "external_plugins",
)  # fmt: skip


def convert_conversation(builder: SwiftRecipeBuilder) -> None:
    """The environment, the limits of a conversation, and the loss mask."""
    values = builder.values
    _convert_lengths(builder)
    name = values.get("multi_turn_scheduler")
    if name is None and (values.get("use_gym_env") or values.get("gym_env")):
        name = "gym_scheduler"
    if name is None:
        builder.reject("max_turns", "there is no scheduler, so a conversation has one turn")
    _check_rollout_command(builder, name)
    turns = (values.get("max_turns") or _UNBOUNDED_TURNS) if name is not None else 1
    builder.set("limits.turns", turns, *(["max_turns"] if name is not None else []))
    arguments = {} if name is None else _scheduler_arguments(builder, name)
    builder.set("environment", {"use": "turnwise.compat.swift:scheduler", "arguments": arguments}, *_ENVIRONMENT)
    _convert_loss_scale(builder, multi_turn=name is not None)


def _convert_lengths(builder: SwiftRecipeBuilder) -> None:
    length = builder.value("max_completion_length")
    builder.set("limits.tokens_per_turn", length, "max_completion_length")
    if builder.values.get("completion_length_limit_scope") == "total":
        builder.set("limits.tokens", length, "completion_length_limit_scope", "max_completion_length")
    else:
        builder.convert("limits.tokens_per_turn", "completion_length_limit_scope")


def _scheduler_arguments(builder: SwiftRecipeBuilder, name: str) -> dict[str, Any]:
    """`environment.arguments` of the scheduler `name`."""
    values = builder.values
    keys = ("max_turns", "use_gym_env", "gym_env", "context_manager")
    arguments = {"name": name, **{key: values[key] for key in keys if values.get(key) is not None}}
    plugins = values.get("external_plugins") or []
    if plugins:
        arguments["external_plugins"] = plugins
    if plugins or name not in multi_turns:  # a plugin's scheduler may use the tokenizer, which is loaded on first use
        arguments["tokenizer"] = values.get("model")
    return arguments


def _check_rollout_command(builder: SwiftRecipeBuilder, name: str | None) -> None:
    """In server mode, the scheduler is an argument of `swift rollout`. Report if that command was not given."""
    if name is None and builder.values.get("vllm_mode") == "server" and builder.given.rollout == "unknown":
        reason = (
            "the arguments of `swift rollout`, which may name a scheduler, are not given, so a conversation has one turn. Give "
            "them too, or vllm_mode=colocate if there is no scheduler"
        )
        builder.reject("vllm_mode", reason, changes_training=True)
    if builder.given.rollout == "comment":
        reason = "the command was read from a comment of the script: check that it is the command you run"
        builder.assume("swift rollout", name, reason)


def _convert_loss_scale(builder: SwiftRecipeBuilder, *, multi_turn: bool) -> None:
    scale = str(builder.values.get("loss_scale") or ("default" if multi_turn else "last_round"))
    scale = scale.removesuffix("+base") if scale != "base" else "default"
    if scale not in ("default", "all", "last_round"):
        kinds = ", ".join(part for part in scale.split("+") if part not in ("default", "all", "last_round"))
        reason = (
            f"default, last_round and all can be converted. {kinds} weighs parts of the text of a turn, and turnwise weighs "
            f"turns: write a function of a turn that returns its weight, and name it in loss_mask (docs/loss_masks.md)"
        )
        builder.reject("loss_scale", reason, changes_training=True)
    elif multi_turn and scale == "last_round":
        builder.set("loss_mask", "last_round", "loss_scale")
    else:
        builder.convert("loss_mask", "loss_scale")


REWARD_ARGUMENTS = tuple(key for key in REWARD_DEFAULTS if key != "max_completion_length")
"""Arguments of ms-swift's own reward functions."""
_READS_ARGUMENT = re.compile(r"\b(?:args|trainer_state)\.([a-z_]\w*)")
"""Finds the arguments of ms-swift that the code of a reward function reads."""
_PREFIXES = {"cosine": "cosine_", "repetition": "repetition_", "soft_overlong": "soft_"}
"""Of a reward function of ms-swift: the prefix of its arguments."""


def convert_rewards(builder: SwiftRecipeBuilder) -> None:
    """Set reward.batch from `reward_funcs` and `reward_weights`. A gym environment's reward is the last weight."""
    values = builder.values
    names, weights = values.get("reward_funcs") or [], values.get("reward_weights") or []
    gym = _is_gym(builder)
    if weights and len(weights) != len(names) + gym:
        reason = f"{len(weights)} weights for {len(names) + gym} rewards"
        builder.reject("reward_weights", reason, changes_training=True)
        weights = []
    rewards: list[dict[str, Any]] = []
    for number, name in enumerate(names):
        if (reward := _reward_function(builder, name)) is not None:
            if weights and weights[number] != 1:
                reward["weight"] = float(weights[number])
            rewards.append(reward)
    if rewards:
        builder.set("reward.batch", rewards)
    if weights and gym and weights[-1] != 1:
        builder.get("environment.arguments")["gym_weight"] = float(weights[-1])
    builder.convert("reward.batch", "reward_funcs", "external_plugins", "reward_weights")
    for key in REWARD_ARGUMENTS:
        if key not in builder.converted:
            builder.reject(key, "no reward function of the configuration uses it")


def _reward_function(builder: SwiftRecipeBuilder, name: str) -> dict[str, Any] | None:
    """The item of reward.batch for one reward function; None if there is no function of that name."""
    plugins = builder.values.get("external_plugins") or []
    if name not in orms and (not plugins or (name in REWARDS and not _mentioned(name, plugins))):
        reason = f"there is no reward function {name!r}; there are {', '.join(sorted(orms))}, and those of plugins"
        builder.reject_value("reward_funcs", name, reason, changes_training=True)
        return None
    arguments: dict[str, Any] = {"use": name, **({"external_plugins": plugins} if plugins else {})}
    if args := _reward_args(builder, name, plugins):
        arguments["args"] = args
    return {"use": "turnwise.compat.swift:Reward", "name": name, "arguments": arguments}


def _reward_args(builder: SwiftRecipeBuilder, name: str, plugins: Sequence[str]) -> dict[str, Any]:
    """The arguments of ms-swift that a reward function reads from `args`, as far as their values are known."""
    if name in _PREFIXES and not _mentioned(name, plugins, if_unreadable=False):
        read = [key for key in REWARD_DEFAULTS if key.startswith(_PREFIXES[name]) or key == "max_completion_length"]
    else:
        read = sorted({key for text in _texts(plugins) for key in _READS_ARGUMENT.findall(text)})
    if name == "repetition":
        read.remove("max_completion_length")
    args = {key: value for key in read if (value := builder.value(key)) is not None}
    if "max_steps" in read and (steps := builder.get("train.steps")) is not None:
        args["max_steps"] = steps  # our steps, which `trainer_state.global_step` counts too
    builder.convert("reward.batch", *(key for key in args if key in REWARD_ARGUMENTS))
    return args


def _is_gym(builder: SwiftRecipeBuilder) -> bool:
    arguments = builder.get("environment.arguments")
    gym_schedulers = ("gym_scheduler", "openenv_scheduler")
    return bool(arguments.get("use_gym_env") or arguments.get("gym_env") or arguments.get("name") in gym_schedulers)


def _mentioned(name: str, plugins: Sequence[str], *, if_unreadable: bool = True) -> bool:
    """Whether a plugin contains `name` in quotation marks. `if_unreadable` is the answer for a plugin without a file."""
    texts = _texts(plugins)
    quoted = re.compile(rf"[\"']{re.escape(name)}[\"']")
    return (if_unreadable and len(texts) < len(plugins)) or any(quoted.search(text) for text in texts)


def _texts(plugins: Sequence[str]) -> list[str]:
    """The text of each plugin file that exists."""
    files = [os.path.expanduser(plugin) for plugin in plugins]
    return [read_text(Path(file), error=ConfigError) for file in files if os.path.isfile(file)]


PLACEMENT_ARGUMENTS = ("deepspeed", "fsdp")
"""The arguments that this module converts."""
_STAGES: dict[str, dict[str, Any]] = {
    "zero2": {"cluster.fsdp.reshard_after_forward": False},
    "zero3": {},
    "zero2_offload": {"cluster.fsdp.reshard_after_forward": False, "cluster.fsdp.offload": "cpu"},
    "zero3_offload": {"cluster.fsdp.offload": "cpu"},
}
"""ms-swift's names of its DeepSpeed configurations, and the same with torch's fully_shard."""
_FSDP: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "full_shard": {},
    "hybrid_shard": {},
    "shard_grad_op": {"cluster.fsdp.reshard_after_forward": False},
    "offload": {"cluster.fsdp.offload": "cpu"},
    "auto_wrap": {},
}
"""The words of `fsdp` in transformers' TrainingArguments, and ms-swift's name of its own configuration."""


def convert_placement(builder: SwiftRecipeBuilder) -> None:
    """Set `cluster` if the trainer has several processes (`NPROC_PER_NODE`, `NNODES`): `local`, or `torchrun` on several
    machines."""
    processes, nodes, variable = builder.given.processes, builder.given.nodes, builder.given.nodes_variable
    if variable is not None:
        reason = (
            "the number of machines is not known here, so train.batch_size is that of one machine: set the variable and convert "
            "again, or multiply train.batch_size by it"
        )
        builder.reject_value("NNODES", variable, reason, changes_training=True)
    if processes == 1 and variable is None:
        _reject(
            builder, "has no effect with one process (NPROC_PER_NODE); for several, set cluster=local (docs/cluster.md)"
        )
        return
    optimizer = builder.get("train.optimizer.name", "adamw")
    if optimizer == "adafactor":
        reason = f"{processes} processes cannot train with train.optimizer.name={optimizer}: use adamw, and set cluster=local"
        builder.assume("cluster.launcher", "none", reason)
        _reject(builder, reason)
        return
    start = f"with NPROC_PER_NODE and NNODES, ms-swift trains in {processes} processes"
    if nodes == 1 and variable is None:
        builder.set("cluster.launcher", "local")
        builder.set("cluster.trainers", processes)
        builder.assume("cluster.trainers", processes, f"{start}; change the number if your machine has other GPUs")
    else:
        builder.set("cluster.launcher", "torchrun")
        command = (
            f"torchrun --nnodes {variable or nodes} --nproc-per-node {processes // nodes} -m turnwise train RECIPE"
        )
        builder.assume("cluster.launcher", "torchrun", f"{start}: start `{command}` on each machine (docs/deploy.md)")
    stage, words = str(builder.values.get("deepspeed")), str(builder.values.get("fsdp") or "").split()
    _divide(builder, "deepspeed", _STAGES, [stage])
    _divide(builder, "fsdp", _FSDP, words)
    if "hybrid_shard" in words and builder.get("cluster.launcher") == "torchrun":
        builder.set("cluster.mesh.shard", processes // nodes, "fsdp")


def _reject(builder: SwiftRecipeBuilder, reason: str) -> None:
    for key in PLACEMENT_ARGUMENTS:
        builder.reject(key, reason)


def _divide(builder: SwiftRecipeBuilder, key: str, known: Mapping[str, dict[str, Any]], words: Sequence[str]) -> None:
    """Set `cluster.fsdp` as the words of an argument say."""
    if any(word not in known for word in words):
        builder.reject(key, f"these values can be converted: {', '.join(known)}. The model is divided among all ranks")
        return
    for word in words:
        for option, value in known[word].items():
            builder.set(option, value, key)
    builder.convert("cluster.fsdp", key)


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


COMPUTED = (
    "dataset", "val_dataset", "columns", "split_dataset_ratio", "data_seed", "max_length", "max_steps", "num_train_epochs",
    "per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation",
    "global_batch_size", "learning_rate", "warmup_ratio", "warmup_steps", "adam_beta1", "adam_beta2", "epsilon",
    "epsilon_high", "off_policy_sequence_mask_delta", "loss_type", "importance_sampling_level", "beta",
    "kl_in_reward", "ref_model", "sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha",
    "delta", "tau_pos", "tau_neg", "top_k",
    "max_completion_length", "completion_length_limit_scope", "loss_scale", "multi_turn_scheduler", "max_turns",
    "external_plugins", "use_gym_env", "gym_env", "context_manager", "reward_funcs", "reward_weights", "eval_steps",
    "tuner_type", "lora_rank", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora",
    "report_to", "gradient_checkpointing", "use_liger_kernel",
    "router_replay_mode", "router_aux_loss_coef", "moe_aux_loss_coeff", *_QUANTIZATION,
    *REWARD_ARGUMENTS, *ENGINE_ARGUMENTS, *PLACEMENT_ARGUMENTS, *TEACHER_ARGUMENTS,
)  # fmt: skip
"""Arguments that are not mapped one to one: several arguments give one option, or one argument gives several options."""


def from_swift_arguments(
    source: str | Path | Sequence[str] | Mapping[str, Any], *, try_names: bool = False
) -> ConversionReport:
    """Convert the arguments of `swift rlhf --rlhf_type grpo` (or gkd) and `swift rollout` into a recipe.

    `source` is a mapping, the words of a command line, or the path of a `.yaml`, `.json` or `.sh` file. A script may contain
    both commands. With `try_names`, plugins are loaded, and names that they do not register are reported.

    Raises ConfigError if the arguments cannot be read.
    """
    builder = SwiftRecipeBuilder(read_arguments(source))
    _convert_options(builder)
    convert_data(builder)
    note_hub_names(builder)
    convert_conversation(builder)
    convert_engine(builder)
    convert_placement(builder)
    minibatches = convert_batches(builder)
    convert_steps(builder, minibatches)
    convert_adapter(builder)
    project, run = (
        next((key for key in keys if builder.values.get(key)), None)
        for keys in (("wandb_project", "swanlab_project"), ("run_name", "swanlab_exp_name", "wandb_exp_name"))
    )
    convert_loggers(builder, "report_to", project=project, run=run)
    if builder.values.get("rlhf_type") == "gkd":
        convert_gkd(builder)
        for key in REWARD_ARGUMENTS:
            builder.reject(key, "it has no effect with rlhf_type=gkd, also not in ms-swift")
    else:
        convert_loss(builder, minibatches)
        convert_sample_filters(builder)
        convert_credit(builder)
        convert_rewards(builder)
        convert_divergence(builder, minibatches)
        convert_opd(builder, rewards=bool(builder.get("reward")) or _is_gym(builder))
    _report_other_arguments(builder)
    if try_names:
        _try_names(builder)
    builder.keep_float32()
    return builder.report()


def _try_names(builder: SwiftRecipeBuilder) -> None:
    """Load the plugins, and look up the scheduler and the reward functions that the recipe names."""
    environment = builder.get("environment.arguments", {})
    plugins = [name for name in environment.get("external_plugins") or () if name.endswith(".py")]
    names = {key: environment.get(key) for key in ("name", "gym_env", "context_manager")}
    if any(names.values()):
        builder.try_name(
            "environment.arguments",
            {key: value for key, value in names.items() if value is not None},
            lambda: named_scheduler(
                names["name"],
                environment.get("external_plugins") or (),
                gym_env=names["gym_env"],
                context_manager=names["context_manager"],
            ),
            files=plugins,
        )
    for number, use in enumerate(builder.get("reward.batch", [])):
        given = use["arguments"]
        files = [name for name in given.get("external_plugins") or () if name.endswith(".py")]
        builder.try_name(
            f"reward.batch.{number}.arguments.use",
            given["use"],
            lambda given=given: registered_reward(given["use"], given.get("external_plugins") or ()),
            files=files,
        )
    if names["gym_env"] == "math_env" and builder.get("limits.context") is None:
        reason = (
            "ms-swift's math_env ends a conversation of more than 2,048 tokens of Qwen2.5: set limits.context for that"
        )
        builder.assume("gym_env", "math_env", reason)


def _convert_options(builder: SwiftRecipeBuilder) -> None:
    """Arguments that become one option each."""
    for key, option in OPTIONS.items():
        value = builder.value(key)
        if builder.has(key) and value is None:
            builder.convert("nothing: it is not set", key)
        elif key == "save_steps" and isinstance(value, float):
            builder.reject(key, SHARE_OF_STEPS.format("checkpoint.every"))
        elif value is not None and not (key == "system" and _convert_system_file(builder, value)):
            builder.set(option, value, key)
    for key, (option, names) in CHOICES.items():
        value = builder.value(key)
        name = str(value).lower()
        if (value is not None or builder.has(key)) and name in names:
            builder.set(option, names[name], key)
        elif value is not None:
            builder.reject(
                key,
                f"{option} supports these values of ms-swift: {', '.join(names)}",
                changes_training=True,
                even_default=True,
            )
        else:
            builder.convert(option, key)
    if (top_k := builder.value("top_k")) is not None:
        builder.set("sampling.top_k", max(top_k, 0), "top_k")
    betas = ("adam_beta1", "adam_beta2")
    builder.set("train.betas", [float(builder.value(key)) for key in betas], *betas)
    if builder.values.get("learning_rate") is None:
        builder.set("train.lr", 1e-5)  # ms-swift's default when all parameters are trained


def _convert_system_file(builder: SwiftRecipeBuilder, value: str) -> bool:
    """Convert `system` if it is the name of a file. ms-swift reads the file if a file of that name exists."""
    path = builder.given.find(value)
    if path is not None:
        builder.set("data.system_prompt", read_text(path, error=ConfigError), "system")
    elif value.endswith(".txt"):
        builder.reject(
            "system",
            "there is no file of that name: run from the folder that the path is relative to",
            changes_training=True,
        )
    return path is not None or value.endswith(".txt")


def _report_other_arguments(builder: SwiftRecipeBuilder) -> None:
    """Record every argument that has not been looked at yet."""
    reported = {*builder.converted, *(rejected.key for rejected in builder.unsupported)}
    for key in sorted(set(builder.values) - reported):
        _report_other(builder, key)
    recipe = str(builder.recipe)
    for key, value in builder.values.items():
        variables = re.findall(r"\$\{\w+\}", str(value))
        if variables and all(variable in recipe for variable in variables):
            reason = "the variable is not set here, and the recipe refers to it: set it before you train"
            builder.assume(key, value, reason)
        elif variables and key in builder.converted:
            reason = "the value depends on a variable that is not set here: set the variable, and convert again"
            builder.reject(key, reason, changes_training=True)
    for key, value in builder.given.overridden.items():
        used = builder.values[key]
        builder.reject_value(key, value, f"the commands give different values for it; {used!r} was used")
    for key, value in builder.given.environment.items():
        builder.reject_value(key, value, "it is a shell variable: set it yourself if your code reads it")


def _report_other(builder: SwiftRecipeBuilder, key: str) -> None:
    value = builder.value(key)
    if key in FIXED:
        accepted, reason = FIXED[key]
        if any(value is item or (value == item and not isinstance(value, bool)) for item in accepted):
            builder.convert("nothing: turnwise always works this way", key)
        else:
            builder.reject(key, reason, changes_training=True, even_default=True)
    elif (reason := _machinery(key)) is not None:
        builder.reject(key, reason)
    elif key == "max_length":
        builder.reject(key, "prompts are not truncated here: limits.context bounds a conversation")
    else:
        hint = nearest(key, {*OPTIONS, *CHOICES, *FIXED, *COMPUTED})
        builder.reject(key, f"turnwise knows no such argument of ms-swift{hint}", changes_training=True)


def _machinery(key: str) -> str | None:
    return next((reason for pattern, reason in MACHINERY if re.fullmatch(pattern, key)), None)


_NO_DATA = "rows come from the trainer"
_SERVED = ("model", "engine", "environment", "sampling", "limits", "thinking", "tool_format", "seed")
"""The sections of a recipe that a server uses."""


def from_rollout_arguments(words: Sequence[str]) -> tuple[ConversionReport, dict[str, Any]]:
    """The recipe of a server, and the arguments `host` and `port` where they are given.

    The recipe names no data and no training: a server receives its rows and its weights from the trainer. ms-swift's defaults
    for training are therefore not reported. Raises ConfigError.
    """
    words = words if "rollout" in words else ["rollout", *words]
    given = read_arguments(words).values
    report = from_swift_arguments(words)
    recipe = {name: section for name, section in report.recipe.items() if name in _SERVED}
    recipe["model"] = {name: value for name, value in recipe.get("model", {}).items() if name != "lora"}
    recipe["data"] = {"train": _NO_DATA}
    address = {name: given[name] for name in ("host", "port") if given.get(name) is not None}
    unsupported = [key for key in report.unsupported if key.key in given and key.key not in address]
    return replace(report, recipe=recipe, unsupported=unsupported), address
