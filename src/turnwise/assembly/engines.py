"""Builds the engine of a recipe: the embedded one, the scripted one, or one on servers that turnwise starts or that run already.

Training, rollouts, fine-tuning and `turnwise doctor` all use this module. A combination of options that the chosen engine cannot
serve is refused here, before anything starts. `ENGINES` at the end has the engine of each name; `runners.py` decides whether an
engine of this process samples at all.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.assembly.learners import model_source
from turnwise.chat.renderer import Renderer
from turnwise.config.engine_checks import refuse_engine, refuse_experts_of_servers
from turnwise.engines import scripted
from turnwise.engines.engine import Engine
from turnwise.engines.remote.engine import RemoteEngine
from turnwise.engines.remote.experts import ExpertLayers
from turnwise.engines.remote.launch import MakeServers, ServedModel, given_token, interpreter, on_cpu, server_name
from turnwise.engines.remote.publisher import ProbeOptions
from turnwise.engines.remote.server_process import devices_of_servers, installed_version, visible_devices
from turnwise.engines.remote.servers import Owner
from turnwise.engines.remote.weights import SharedCopies, WeightCopies, WeightFiles, WeightStore
from turnwise.errors import ConfigError, DataError, Failed, boundary
from turnwise.json_yaml import parse_json, read_text
from turnwise.local_paths import hub_directory, looks_like_path, refuse_other_than_model, unreadable
from turnwise.models.device import gpu_number, known_dtype
from turnwise.models.model_config import context_length, cpu_memory_gb, vocabulary_size
from turnwise.options.algorithm import LoraSection
from turnwise.options.engines import ServerEngineSection, VllmEngineSection, local_ranks
from turnwise.options.schema import Config
from turnwise.rollout_server.client import trainer_name

_log = logging.getLogger(__name__)

# engines on servers

_ROUNDING = {True: 1e-4, False: 0.5}
"""The largest difference of log-probabilities between server and trainer, if both compute in float32 and if not. Weights that
did not arrive differ by more than 1."""
_QUANTIZED = 1.0
"""The mean difference where the server computes with 8 bits. It was up to 0.4 with SmolLM2-135M, whose weights and activations
were rounded to FP8 or int8 (per tensor, channel or token); single tokens differed by up to 1.2, and by
2.5 with FP8 keys in vLLM."""


def _on_servers(inputs: EngineInputs, make: MakeServers) -> Engine:
    """The engine on servers of a recipe, whose kind of server `make` knows. The servers are started by `Engine.start`.

    Raises ConfigError.
    """
    config, options = inputs.config, inputs.config.engine.servers
    assert options is not None
    refuse_engine(config)
    refuse_other_than_model(config.model.path, error=ConfigError)
    _refuse_sleep_on_cpu(config, options)
    facts, vocab_size = model_facts(config), _vocab_size(config)
    context = config.limits.context or context_length(facts)
    trainer = trainer_gpus(config) if inputs.trained else []
    recipes = (config, *map(config.of_policy, config.served_policies))
    ranks = [recipe.model.lora.rank for recipe in recipes if recipe.model.lora.rank is not None]
    devices = functools.cache(functools.partial(_devices, config, options, tuple(trainer)))
    transfer = _weight_transfer(config, options, trainer if inputs.model is not None else [], devices)
    served = ServedModel(
        path=str(_model_directory(config, weights=True).absolute()),
        facts=facts,
        dtype=_dtype(config),
        cpu=on_cpu(config.model.device),
        vocab_size=vocab_size,
        context=context,
        memory_gb=cache_gb(config, context) if options.starts_servers else None,
        max_requests=math.ceil(config.max_concurrent / options.replicas),
        trained=inputs.trained,
        lora_rank=max(ranks) if ranks and inputs.trained else None,
        adapters=max(1, len(ranks)),
        devices=devices,
        logs=Path(config.output) / "engine",
        owner=inputs.owner,
        experts=_expert_layers(config, facts),
        trainer_gpu=trainer[0] if trainer else 0,
        shares=inputs.trained and transfer == "ipc",
    )
    api, replicas = make(options, served)
    return RemoteEngine(
        api,
        replicas,
        decode=inputs.renderer.decode,
        files=_weight_store(options, transfer) if inputs.trained else None,
        version=inputs.version,
        patience=options.start_timeout,
        context=context,
        probe=probe_options(config),
        sleeps=options.sleep,
        constrains=options.constrains,
    )


def _expert_layers(config: Config, facts: Mapping[str, Any]) -> ExpertLayers | None:
    """The layers whose experts the servers report; None without model.router_replay. Raises ConfigError if they cannot."""
    if not config.model.router_replay:
        return None
    engine = config.engine.servers
    assert engine is not None
    from turnwise.models.experts import layers_with_experts  # torch
    from turnwise.models.loading import model_without_weights

    model = model_without_weights(str(Path(config.model.path).expanduser()))
    layers, experts = layers_with_experts(model)
    refuse_experts_of_servers(config, facts, on_cpu=engine.starts_servers and on_cpu(config.model.device))
    return ExpertLayers(layers, model.config.get_text_config().num_hidden_layers, experts)


def _refuse_sleep_on_cpu(config: Config, options: ServerEngineSection) -> None:
    """Raise ConfigError if servers that turnwise would start cannot free their memory."""
    if options.sleep and options.url is None and on_cpu(config.model.device):
        raise ConfigError(
            f"engine.sleep=true needs a GPU: on the CPU, vLLM 0.32 ignores it and SGLang 0.5.23 does not start. The model is on "
            f"the CPU (model.device={config.model.device}): remove engine.sleep"
        )


def _devices(config: Config, options: ServerEngineSection, trainer: Sequence[int]) -> list[str]:
    """The GPUs of each server that turnwise starts, as `CUDA_VISIBLE_DEVICES`; empty on the CPU. `trainer` are the numbers of the
    GPUs on which the model is trained. Raises ConfigError."""
    if on_cpu(config.model.device):
        return []
    names = visible_devices()
    devices = devices_of_servers(
        options.devices,
        servers=options.replicas,
        per_server=options.tensor_parallel * options.data_parallel,
        trainer=trainer,
        share=options.sleep,
        visible=names,
    )
    used = {name for one in devices for name in one.split(",")}
    if not options.sleep and (shared := [n for n, name in enumerate(names) if n in trainer and name in used]):
        _log.warning(
            "the engine samples on GPU %s, on which the model is trained, and keeps its memory meanwhile: set engine.memory_gb "
            "so that both fit, engine.sleep=true to free it during training, or engine.devices to use other GPUs",
            ", ".join(map(str, shared)),
        )
    return devices


def trainer_gpus(config: Config) -> list[int]:
    """The numbers of the visible GPUs on which this process and the other ranks of this machine train. Empty on Ray, where each
    process sees its own GPUs only."""
    cluster = config.cluster
    if cluster.launcher == "ray":
        return []
    if cluster.distributed:
        return list(range(int(os.environ.get("LOCAL_WORLD_SIZE") or local_ranks(cluster))))
    return [gpu_number(config.model.device)]


def place_of_servers(config: Config) -> str:
    """Which GPUs the servers that the run starts use, for a recipe that uses GPUs; empty without such servers."""
    engine, beside = config.engine.servers, servers_beside_trainer(config)
    if engine is None or not engine.starts_servers or config.runs_conversations_elsewhere:
        return ""
    if beside:
        number = trainer_gpus(config)[0]
        meanwhile = "in turns with it (engine.sleep)" if engine.sleep else "at the same time"
        return f"on GPU {number}, which the trainer uses {meanwhile}"
    if engine.devices is not None:
        return f"on the GPUs {', '.join(map(str, engine.devices))}"
    if beside is None:
        return "on other GPUs than the trainer's if the machine has enough, else also on the trainer's (engine.devices)"
    return f"on the GPUs {', '.join(_devices(config, engine, trainer_gpus(config)))}"


def startable(config: Config) -> str:
    """What is known of the servers of a recipe without starting them: the version of the engine, or where the servers are.

    Raises the TurnwiseError with which their start would fail, as far as that is known in a moment.
    """
    engine = config.engine.servers
    assert engine is not None
    _refuse_sleep_on_cpu(config, engine)
    model_facts(config)
    if engine.url is not None:
        given_token(engine.api_key_env)
        return f"{len(engine.urls)} at {', '.join(engine.urls)}, which were not asked"
    if elsewhere := config.runs_conversations_elsewhere:
        return f"in other processes ({elsewhere}), which were not asked"
    _devices(config, engine, trainer_gpus(config))
    if isinstance(config.engine, VllmEngineSection) and config.engine.mode == "in_process":
        if importlib.util.find_spec(config.engine.name) is None:
            from turnwise.engines.vllm.in_process import not_here

            raise not_here(f"No module named {config.engine.name!r}")
        return f"none: {config.engine.name} in this process"
    python, name = interpreter(engine), config.engine.name
    version = installed_version(server_name(name, 0), python, name)
    return f"{' '.join([name, version]).strip()}, in the environment of {python}"


def servers_beside_trainer(config: Config) -> int | None:
    """How many of the servers that the run starts use the GPU on which this process (rank 0) trains, for a recipe that uses GPUs.
    None if that depends on how many GPUs there are, and this machine has none."""
    engine = config.engine.servers
    if engine is None or not engine.starts_servers or config.runs_conversations_elsewhere:
        return 0
    trainer = trainer_gpus(config)
    if engine.devices is not None:
        return engine.devices.count(trainer[0])
    if engine.sleep:
        return 1
    if not (names := visible_devices()):
        return None
    needed = engine.replicas * engine.tensor_parallel * engine.data_parallel
    return int(len(set(range(len(names))) - set(trainer)) < needed)


def _weight_transfer(
    config: Config, options: ServerEngineSection, trainer: Sequence[int], devices: Callable[[], Sequence[str]]
) -> str:
    """`engine.weight_transfer`, chosen here if the recipe leaves it open. `trainer` are the numbers of the GPUs on which this
    machine trains, `devices` the GPUs of each server. Raises ConfigError if servers do not see the memory that they should read.
    """
    names = [] if on_cpu(config.model.device) else visible_devices()
    trained_on = names[trainer[0]] if trainer and trainer[0] < len(names) else None
    if options.weight_transfer == "ipc" and trained_on is not None:
        apart = [number for number, used in enumerate(devices()) if trained_on not in used.split(",")]
        if apart:
            raise ConfigError(
                f"engine.weight_transfer=ipc: server {apart[0]} uses the GPUs {devices()[apart[0]]} and does not see GPU "
                f"{trained_on}, on which the model is trained: name it in engine.devices, or set engine.weight_transfer=files "
                f"or collective"
            )
    if options.weight_transfer is not None:
        return options.weight_transfer
    needs_files = options.weight_folder is not None or config.model.lora.rank is not None or not options.starts_servers
    if needs_files or trained_on is None or config.cluster.launcher != "none":
        return "files"
    return "ipc" if all(used == trained_on for used in devices()) else "files"


def _weight_store(options: ServerEngineSection, transfer: str) -> WeightStore:
    """Where weights are kept on their way to the servers."""
    if transfer == "collective":
        return WeightCopies()
    files = WeightFiles(None if options.weight_folder is None else Path(options.weight_folder).expanduser().absolute())
    if transfer == "ipc":
        return SharedCopies(files if options.weight_transfer is None else None)
    return files


def probe_options(config: Config) -> ProbeOptions | None:
    """How servers are probed; None for an embedded engine."""
    engine = config.engine.servers
    if engine is None:
        return None
    return ProbeOptions(
        vocab_size=_vocab_size(config),
        every=engine.check_weights_every,
        tolerance=_ROUNDING[config.exact] if engine.quantization is None else _QUANTIZED,
        averaged=engine.quantization is not None,
        bfloat16=not config.exact,
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
    """The contents of config.json of model.path. Raises ConfigError if there is no such file."""
    file = _model_directory(config, weights=False) / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"engine.name={config.engine.name} needs model.path to be a hub id, or a directory with a config.json, and there is "
            f"no {file}"
        )
    try:
        facts = parse_json(read_text(file, error=DataError), where=str(file), error=DataError)
    except DataError as error:
        raise ConfigError(str(error)) from error
    if not isinstance(facts, dict):
        raise ConfigError(f"{file} must contain a JSON object")
    return facts


def _model_directory(config: Config, *, weights: bool) -> Path:
    """The directory of the recipe's model, which servers load; a model of the hub is downloaded. Raises ConfigError."""
    path = config.model.path
    if looks_like_path(path):
        return Path(path).expanduser()
    try:
        with boundary("model"):
            return hub_directory(path, weights=weights)
    except Failed as failed:
        raise ConfigError(unreadable("model" if weights else "model configuration", path, failed)) from failed


def cache_gb(config: Config, context: int | None) -> float | None:
    """The KV cache in GiB on each GPU of a server that the run starts; None if the server chooses it. `context` is the longest
    sequence."""
    engine = config.engine.servers
    assert engine is not None
    memory_gb = engine.memory_gb
    if memory_gb is None and on_cpu(config.model.device) and context is not None:
        return cpu_memory_gb(model_facts(config), _dtype(config), context)
    return memory_gb


def _dtype(config: Config) -> str:
    """The data type of the weights on servers."""
    return "bfloat16" if config.model.autocast else known_dtype(config)


# the engine that samples tokens, by its name

Scripts = Mapping[str, Sequence[str]] | Sequence[Sequence[str]]
"""The assistant texts of each conversation: by conversation id, or in the order in which conversations begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInputs:
    """What an engine is made of."""

    config: Config
    renderer: Renderer
    model: Any | None
    """The loaded model, for an embedded engine."""
    trained: bool
    """Whether the weights are updated during the run."""
    version: int
    """The number of the weights that `model` has."""
    owner: Owner
    """This process, as the engine's servers know it."""


def _local(inputs: EngineInputs) -> Engine:
    config, options = inputs.config, inputs.config.engine.embedded
    assert options is not None
    if inputs.model is None:
        raise ConfigError(f"engine.name={options.name} samples from a model, and no model was loaded")
    from turnwise.engines.local import LocalEngine  # torch

    knows_longest = context_length(inputs.model.config.to_dict()) is not None  # models without attention do not
    return LocalEngine(
        inputs.model,
        context=None if knows_longest else config.limits.context,
        slots=options.slots,
        memory_gb=options.memory_gb,
        threads=1 if config.deterministic else options.threads,
        decode=inputs.renderer.decode,
        version=inputs.version,
        autocast=config.model.autocast,
        record_routes=config.model.router_replay,
        masks=inputs.renderer.masks,
    )


def _scripted(inputs: EngineInputs) -> Engine:
    file = inputs.config.engine.script_file
    assert file is not None
    scripts = read_scripts(file)
    if any(script.agents for script in scripts):
        # conversations take the scripts in the order in which they begin, so it is not known whose agent asks
        raise DataError(
            f"{file} has `agents`, the texts of a row's agents; in rollout workers, scripts belong to no row. Remove "
            f"cluster.launcher=ray, or give each conversation, also an agent's, a line of its own"
        )
    return scripted_engine(inputs.renderer, [script.turns for script in scripts])


def _openai(inputs: EngineInputs) -> Engine:
    raise ConfigError("engine.name=openai is an endpoint of messages, and no engine that samples tokens")


def _vllm(inputs: EngineInputs) -> Engine:
    from turnwise.engines.vllm.launch import servers

    return _on_servers(inputs, servers)


def _sglang(inputs: EngineInputs) -> Engine:
    from turnwise.engines.sglang.launch import servers

    return _on_servers(inputs, servers)


ENGINES: dict[str, Callable[[EngineInputs], Engine]] = {
    "local": _local,
    "scripted": _scripted,
    "openai": _openai,
    "vllm": _vllm,
    "sglang": _sglang,
}
"""What makes the engine of each `engine.name`."""


def engine(
    config: Config,
    renderer: Renderer,
    model: Any | None = None,
    *,
    scripts: Scripts | None = None,
    version: int = 0,
    updated: bool = False,
    owner: Owner | None = None,
) -> Engine:
    """The engine that samples for conversations in this process: the embedded engine on a loaded `model`, the scripted engine, or
    an engine on servers, whose weights are updated if there is a `model`, or with `updated`.

    `scripts` selects the scripted engine whatever `engine.name` is; with `engine.name: scripted` and no `scripts`, the texts of
    `engine.script` are used. `version` is the number of the weights that `model` has. `owner` is this process, as the
    servers know it; None: under the name of the run in `output`, which one process at a time writes. Raises ConfigError or
    DataError.
    """
    if scripts is not None:
        return scripted_engine(renderer, scripts)
    inputs = EngineInputs(
        config=config,
        renderer=renderer,
        model=model,
        trained=updated or model is not None,
        version=version,
        owner=owner or Owner(trainer_name(config.output)),
    )
    return ENGINES[config.engine.name](inputs)


def engine_model(config: Config, *, adapter: bool = False) -> Any | None:
    """The model that the recipe's engine samples from, loaded from model.path; None for an engine without weights.

    With `adapter`, the model has the adapter of model.lora, so that trained adapters can be loaded into it. For runs without
    training. In training, the learner has already loaded the model.
    """
    if config.engine.embedded is None or config.runs_conversations_elsewhere:
        return None
    from turnwise.models.loading import load_model  # torch

    source = model_source(config)
    # a new adapter changes nothing before training
    return load_model(source if adapter else source.model_copy(update={"lora": LoraSection()}))


def scripted_engine(renderer: Renderer, scripts: Scripts, *, continue_prompt: bool = False) -> Engine:
    """An engine that answers with given texts, for a recipe or for a replay of data.

    `continue_prompt` encodes each text as a continuation of the prompt's last token, for tokenizers that split a text
    differently at its beginning.
    """
    return scripted.ScriptedEngine(
        scripts,
        encode=renderer.encode,
        stop_token_id=renderer.stop_token_ids[0],
        encode_behind=renderer.encode_continuation if continue_prompt else None,
    )


@dataclass(frozen=True, slots=True)
class ConversationScript:
    """The texts of one conversation, and of the agents that its environment opens, by their names: `second`, and `second/2` for
    another agent of that name."""

    turns: list[str]
    agents: Mapping[str, list[str]]


def read_scripts(path: str) -> list[ConversationScript]:
    """The scripts of a scripted engine: each line of the file is a JSON list of texts, or an object with `turns` and `agents`.

    Raises DataError, with the line's number.
    """
    file = Path(path)
    if not os.path.exists(file):
        raise DataError(
            f"engine.script: there is no file {file.absolute()}; paths are relative to the directory you run from"
        )
    if not os.path.isfile(file):
        raise DataError(
            f"engine.script: {file} is no regular file (it is read more than once): write the scripts to one"
        )
    scripts: list[ConversationScript] = []
    # split, not splitlines: a text may contain U+2028
    for number, line in enumerate(read_text(file, error=DataError).split("\n"), 1):
        if not line.strip():
            continue
        script = _script(parse_json(line, where=f"{path}:{number}: this line", error=DataError))
        if script is None:
            raise DataError(
                f'{path}:{number}: a script is a list of texts, for example ["Hello.", "Bye."], or with the turns of agents '
                f'{{"turns": ["Hello."], "agents": {{"second": ["Bye."]}}}}'
            )
        scripts.append(script)
    if not scripts:
        raise DataError(f"{path} is empty; write a list of texts on each line")
    return scripts


def _script(line: Any) -> ConversationScript | None:
    """The script on a line; None if it is none."""
    script = ConversationScript(line, {}) if isinstance(line, list) else None
    match line:
        case {"turns": list(turns), "agents": dict(agents), **other} if not other:
            script = ConversationScript(turns, agents)
    if script is None or not all(isinstance(texts, list) for texts in script.agents.values()):
        return None
    texts = [text for texts in (script.turns, *script.agents.values()) for text in texts]
    return script if all(isinstance(text, str) for text in texts) else None
