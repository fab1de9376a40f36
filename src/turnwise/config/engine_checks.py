"""Refuses options of engines that have no effect, and combinations that an engine cannot serve."""

from __future__ import annotations

from turnwise.config.schema import Config
from turnwise.config.section import changed_options
from turnwise.config.server_engines import ServerEngineSection, SglangEngineSection, VllmEngineSection
from turnwise.errors import ConfigError

__all__ = ["refuse_engine"]

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
_OF_SERVERS = ("url", "api_key_env", "python", "replicas", "devices", "timeout", "start_timeout")
"""Options without effect for an engine in the process of turnwise."""


def refuse_engine(config: Config) -> None:
    """Refuse what the recipe's engine cannot do, before anything is started. Raises ConfigError."""
    for holds, message in _problems(config):
        if holds:
            raise ConfigError(message)


def _problems(config: Config) -> list[tuple[bool, str]]:
    engine, name = config.engine, config.engine.name
    if not isinstance(engine, ServerEngineSection):
        return []
    changed = changed_options(engine)
    started = next((option for option in _OF_STARTED if option in changed), None)
    return [
        *(_vllm_problems(config, engine, changed) if isinstance(engine, VllmEngineSection) else []),
        *(_sglang_problems(config, engine) if isinstance(engine, SglangEngineSection) else []),
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
        (
            engine.weight_transfer == "collective" and engine.weight_folder is not None,
            "engine.weight_folder has no effect with engine.weight_transfer=collective, which writes no files: remove one",
        ),
        (
            engine.weight_transfer == "collective" and config.model.lora.rank is not None,
            "engine.weight_transfer=collective cannot be combined with model.lora.rank, because adapters are loaded from "
            "files: remove engine.weight_transfer",
        ),
        (
            engine.weight_transfer == "collective" and engine.data_parallel > 1,
            f"engine.weight_transfer=collective cannot be combined with engine.data_parallel={engine.data_parallel}, because the "
            f"copies of the model in a server have no common group: use engine.replicas",
        ),
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


def _vllm_problems(config: Config, engine: VllmEngineSection, changed: list[str]) -> list[tuple[bool, str]]:
    sampling, evaluation = config.sampling, config.eval.sampling
    hottest = max(sampling.temperature, evaluation.temperature or 0.0)
    unused = next((option for option in _OF_SERVERS if option in changed), None)
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
