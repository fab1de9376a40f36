"""Refuses, at start-up, options of engines, of the section `cluster` and of `turnwise serve` that have no effect.

It also refuses what an engine cannot serve and what several ranks cannot train. Each message says which option to change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError
from turnwise.models.device import known_dtype
from turnwise.options.algorithm import OptimizationSection
from turnwise.options.engines import ClusterSection, ServerEngineSection, SglangEngineSection, VllmEngineSection
from turnwise.options.schema import Config
from turnwise.options.section import changed_options

# engines

_OF_STARTED = (
    "python",
    "replicas",
    "tensor_parallel",
    "data_parallel",
    "devices",
    "arguments",
    "memory_gb",
    "keep_seeds",
)
"""Options of servers that turnwise starts."""
_OF_SERVERS = ("url", "api_key_env", "python", "replicas", "timeout", "start_timeout")
"""Options without effect for an engine in the process of turnwise."""


def refuse_engine(config: Config) -> None:
    """Refuse what the recipe's engine cannot do, before anything is started. Raises ConfigError."""
    for holds, message in _problems(config):
        if holds:
            raise ConfigError(message)


_NO_FILES = ("collective", "ipc")
"""Ways of new weights to servers that write no files."""


def _problems(config: Config) -> list[tuple[bool, str]]:
    engine, name = config.engine.servers, config.engine.name
    if engine is None:
        return []
    changed = changed_options(engine)
    started = next((option for option in _OF_STARTED if option in changed), None)
    own = _OF_ENGINE.get(name) or (lambda recipe, section: [])
    return [
        *own(config, engine),
        *(
            (holds, f"the policy {policy.name!r}: {message}")
            for policy in config.served_policies
            for holds, message in own(config.of_policy(policy), engine)
        ),
        (
            engine.url is not None and started is not None,
            f"engine.{started} has no effect with engine.url, because turnwise then starts no server: remove one of them",
        ),
        (
            engine.url == [],
            "engine.url is an empty list: give at least one address, or null to let turnwise start a server",
        ),
        (
            engine.url is None and engine.api_key_env is not None,
            "engine.api_key_env has no effect without engine.url, because turnwise makes the token of a server that it starts: "
            "remove it",
        ),
        *_transfer_problems(config, engine),
        (
            config.model.device == "cpu" and (engine.devices is not None or engine.data_parallel > 1),
            "engine.devices and engine.data_parallel need GPUs, and the model is on the CPU (model.device=cpu): remove them",
        ),
        (
            config.deterministic,
            f"deterministic=true cannot be combined with engine.name={name}, because the order of its requests depends on "
            f"timing: use engine.name=local",
        ),
        (
            engine.sleep and config.train.max_staleness > 0,
            "engine.sleep=true cannot be combined with train.max_staleness, which samples during training: remove one"
            " of them",
        ),
    ]


def _transfer_problems(config: Config, engine: ServerEngineSection) -> list[tuple[bool, str]]:
    """Problems of how new weights reach the servers."""
    transfer, without_files = f"engine.weight_transfer={engine.weight_transfer}", engine.weight_transfer in _NO_FILES
    return [
        (
            without_files and engine.weight_folder is not None,
            f"engine.weight_folder has no effect with {transfer}, which writes no files: remove one",
        ),
        (
            without_files and config.model.lora.rank is not None,
            f"{transfer} cannot be combined with model.lora.rank, because adapters are loaded from files: remove "
            f"engine.weight_transfer",
        ),
        (
            without_files and engine.data_parallel > 1,
            f"{transfer} cannot be combined with engine.data_parallel={engine.data_parallel}, because the copies of the model in "
            f"a server have no common group: use engine.replicas",
        ),
        (
            engine.weight_transfer == "ipc" and (engine.url is not None or config.cluster.launcher == "ray"),
            "engine.weight_transfer=ipc needs servers that the trainer's process starts on its machine: remove engine.url and "
            "cluster.launcher=ray, or set engine.weight_transfer=files or collective",
        ),
    ]


def _vllm_problems(config: Config, engine: VllmEngineSection) -> list[tuple[bool, str]]:
    sampling, evaluation = config.sampling, config.eval.sampling
    hottest = max(sampling.temperature, evaluation.temperature or 0.0)
    unused = next((option for option in _OF_SERVERS if option in changed_options(engine)), None)
    return [
        (
            engine.mode == "in_process" and unused is not None,
            f"engine.{unused} has no effect with engine.mode=in_process: remove it, or set engine.mode=server",
        ),
        (
            sampling.top_p < 1 and sampling.min_p > 0,
            f"sampling.top_p={sampling.top_p} and sampling.min_p={sampling.min_p} cannot be combined with engine.name=vllm: vLLM "
            f"applies min_p before top_p, and the trainer computes the distribution with top_p first. Remove one of them",
        ),
        (
            hottest > 2,
            f"a sampling temperature of {hottest} is above 2, the highest of vLLM: lower it, or use engine.name=local",
        ),
        (
            config.model.lora.rank is not None and config.model.lora.dora,
            "model.lora.dora=true cannot be combined with engine.name=vllm, which cannot load such adapters: remove one of them",
        ),
    ]


def _sglang_problems(config: Config, engine: SglangEngineSection) -> list[tuple[bool, str]]:
    sampling, lora = config.sampling, config.model.lora
    filters = [name for name in ("top_k", "top_p", "min_p") if name in changed_options(sampling)]
    return [
        (
            len(filters) > 1 and "top_k" in filters,
            f"sampling.{' and sampling.'.join(filters)} cannot be combined with engine.name=sglang: SGLang does not renormalize "
            f"the probabilities after top_k, and the trainer does. Remove one of them",
        ),
        (
            lora.rank is not None and lora.dora,
            "model.lora.dora=true cannot be combined with engine.name=sglang, which cannot load such adapters: remove one",
        ),
        (
            lora.rank is not None and engine.update_mode == "in_place",
            "engine.update_mode=in_place has no effect with model.lora: running requests are sent again with the new adapter. "
            "Remove engine.update_mode",
        ),
        (
            engine.keep_seeds and config.model.device == "cpu",
            "engine.keep_seeds=true needs a GPU, because SGLang has no deterministic inference on the CPU: remove it, or use "
            "engine.name=local",
        ),
    ]


_OF_ENGINE: dict[str, Callable[[Config, Any], list[tuple[bool, str]]]] = {
    "vllm": _vllm_problems,
    "sglang": _sglang_problems,
}
"""What only the engine of this name refuses."""


def refuse_experts_of_servers(config: Config, facts: Mapping[str, Any], *, on_cpu: bool) -> None:
    """Refuse model.router_replay with servers that cannot report experts. `facts` are the contents of the model's config.json;
    `on_cpu` says that turnwise starts the servers on the CPU. Raises ConfigError."""
    if on_cpu:
        reason = {
            "vllm": "vLLM 0.32 reports experts with its second model runner only, which needs Triton",
            "sglang": "SGLang 0.5.23 keeps experts in memory that it registers with CUDA",
        }
        raise ConfigError(
            f"model.router_replay=true needs a GPU with engine.name={config.engine.name}: "
            f"{reason.get(config.engine.name, 'servers report experts there only')}. The model is on the CPU (model.device="
            f"{config.model.device}): use engine.name=local, or remove model.router_replay"
        )
    text = facts.get("text_config", facts)
    if config.engine.name == "sglang" and not isinstance(text.get("num_experts_per_tok"), int):
        raise ConfigError(
            f"model.router_replay=true cannot be combined with engine.name=sglang for this model: SGLang 0.5.23 reads the number "
            f"of experts of a token from num_experts_per_tok, which the config.json of {config.model.path} does not have. Use "
            f"engine.name=vllm or local, or remove model.router_replay"
        )


# several processes

_AGENTS = "turnwise.environments.agents:"
"""The environments whose conversations talk to a server of this process."""

Problem = tuple[bool, str]


def _changed_of_ranks(cluster: ClusterSection) -> list[str]:
    """The options of ranks that are not the defaults, and those of all processes."""
    sections = ("launcher", "fsdp", "mesh", "address", "workers", "ranks")
    plain = [name for name in changed_options(cluster) if name not in sections]
    return plain + [
        f"{name}.{option}" for name in ("fsdp", "mesh") for option in changed_options(getattr(cluster, name))
    ]


def _unarranged(cluster: ClusterSection) -> str | None:
    """Why the ranks cannot be arranged as cluster.mesh says, if their number is in the recipe."""
    if cluster.trainers is None:
        return None  # the ranks themselves find out
    try:
        cluster.mesh.shape(cluster.trainers)
    except ConfigError as problem:
        return str(problem)
    return None


def cluster_problems(config: Config, options: OptimizationSection) -> list[Problem]:
    """Problems of the section cluster, in training or fine-tuning. `options` are those of the optimizer."""
    cluster, fsdp, optimizer = config.cluster, config.cluster.fsdp, options.optimizer
    of_ray = _options_of_ray(config)
    changed = _changed_of_ranks(cluster)
    of_ranks = [name for name in changed if name != "heartbeat"]
    of_local = next((name for name in changed if name in ("trainers", "restarts")), None)
    several = cluster.distributed
    unarranged = _unarranged(cluster) if several else None
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
        (unarranged is not None, unarranged or ""),
        (
            several and fsdp.param_dtype == known_dtype(config),
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
            several and optimizer.name == "adafactor",
            "optimizer.name=adafactor cannot be used with several ranks, because its state depends on complete weight matrices: "
            "use adamw or adamw_8bit",
        ),
        (
            several and optimizer.offload != "none" and fsdp.offload != "none",
            f"optimizer.offload={optimizer.offload} has no effect with cluster.fsdp.offload=cpu, which has the optimizer's state "
            "in the CPU's memory, too: remove one of them",
        ),
        *(_problems_of_divided_layers(config) if several and cluster.mesh.tensor > 1 else ()),
        (
            several and config.model.device not in ("auto", "cpu", "cuda"),
            f"model.device={config.model.device} cannot be used with several ranks, because each rank has a device of its own: "
            f"set auto, cuda or cpu",
        ),
    ]


def _problems_of_divided_layers(config: Config) -> list[Problem]:
    """What cannot be used with `cluster.mesh.tensor`."""
    return [
        (
            config.model.lora.dora,
            "model.lora.dora needs complete weight vectors, which cluster.mesh.tensor divides: remove one of them",
        ),
        (
            config.model.kernels == "liger",
            "model.kernels=liger needs complete layers, which cluster.mesh.tensor divides: set auto or none",
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
    engine = config.engine.servers
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
        *_problems_of_agents_in_workers(config, ray),
        (
            ray and config.deterministic,
            "deterministic=true cannot be combined with cluster.launcher=ray, because the batches of the workers' engines "
            "depend on timing: remove one of them",
        ),
    ]


def _problems_of_servers_in_workers(config: Config, ray: bool) -> list[Problem]:
    """Problems of servers that rollout workers use as their engines."""
    engine, gpus = config.engine.servers, config.cluster.workers.num_gpus
    if not ray or engine is None:
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


def _problems_of_agents_in_workers(config: Config, ray: bool) -> list[Problem]:
    """Problems of the servers that agents talk to: each rollout worker has its own."""
    server, workers = config.environment.arguments.get("server"), config.cluster.workers.count
    if not (ray and workers > 1 and config.environment.use.startswith(_AGENTS) and isinstance(server, dict)):
        return []
    listen, public_url = server.get("listen"), server.get("public_url")
    return [
        (
            public_url is not None,
            f"environment.arguments.server.public_url={public_url} cannot be used with cluster.workers.count={workers}: each "
            f"rollout worker has a server for its own agents, and one address cannot lead to all of them. Remove it, or set "
            f"cluster.workers.count=1",
        ),
        (
            listen is not None and not str(listen).endswith(":0"),
            f"environment.arguments.server.listen={listen} cannot be used with cluster.workers.count={workers}: each rollout "
            f"worker has a server for its own agents, and two on one machine cannot have the same port. Set the port 0 (a free "
            f"one), or cluster.workers.count=1",
        ),
    ]


# grammars


def no_grammar(config: Config) -> str:
    """Why no turn can be sampled under a grammar, such as that the sampled distribution would be another one than the trainer's;
    empty if turns can."""
    problems = [
        (
            not config.engine.constrains,
            f"engine.name={config.engine.name} samples no turn under a grammar: "
            + ("set engine.grammars" if config.engine.servers is not None else "use engine.name=local"),
        ),
        (
            config.teacher.on,
            "the teacher scores tokens without the masks of a grammar, so its distribution has more tokens than were allowed: "
            "remove teacher, or the form",
        ),
        (
            config.reward.kl.coef > 0,
            f"reward.kl.coef={config.reward.kl.coef:g} compares with a reference model without the masks of a grammar: set "
            f"loss.kl_coef instead, which applies them, or remove the form",
        ),
    ]
    return next((message for holds, message in problems if holds), "")


def refuse_grammar(config: Config) -> None:
    """Refuse the recipe's own forms of turns, which hold for all turns. Raises ConfigError."""
    reason = no_grammar(config)
    if not reason and not config.engine.trains_constrained:
        reason = "with engine.grammars=skip, no such turn is trained on: set engine.grammars=train"
    if reason:
        raise ConfigError(f"tool_calls.constrain, tool_calls.choice, sampling.response_format: {reason}")


# `turnwise serve`


def refuse_without_effect_when_serving(config: Config) -> None:
    """Refuse recipes that cannot be served. Options of training are those of the trainer, which may use the same recipe.

    Raises ConfigError.
    """
    if config.engine.script_file is not None:
        raise ConfigError(
            "engine.name=scripted cannot be served: its texts belong to the conversations of one call of `turnwise rollout`"
        )
    if config.rollout_server.url is not None:
        raise ConfigError(
            f"rollout_server.url={config.rollout_server.url} is for the trainer: a server samples with its own engine. Remove "
            f"the option: turnwise serve RECIPE rollout_server.url=null"
        )
