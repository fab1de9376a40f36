"""The types of the arguments that the conversion computes with or converts to options: integer, number, text, list, mapping.

Values are words of a command line (always texts) or values of a YAML or JSON file. Each argument is parsed once, here, as its
type. A value of another type raises an error that names the argument, the value and the type. Other arguments are only
reported, so the type of their values is guessed from the text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from turnwise.compat.swift.flags import LISTS
from turnwise.errors import ConfigError
from turnwise.json_yaml import check_text, parse_json

__all__ = ["ARGUMENT_TYPES", "parse_argument", "positive_integer"]

ArgumentType = Callable[[Any], Any]
"""Converts a word or a value of a file. Raises ValueError with the violated rule as its text, such as `is not an integer`."""

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_MOST = 2**63
_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _number(value: Any) -> int | float:
    if isinstance(value, str) and len(value) < 100 and _NUMBER.fullmatch(value.strip()):
        value = int(value) if re.fullmatch(r"[-+]?\d+", value.strip()) else float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("is not a number")
    if not -_MOST <= value < _MOST:
        raise ValueError("does not fit into 64 bits")
    return value


def _integer(value: Any) -> int:
    try:
        number = _number(value)
    except ValueError as error:
        raise ValueError(str(error).replace("a number", "an integer")) from None
    if number != int(number):
        raise ValueError("is not an integer")
    return int(number)


def _count(value: Any) -> int:
    number = _integer(value)
    if number < 1:
        raise ValueError("is not an integer of at least 1")
    return number


def _steps(value: Any) -> int | float:
    """A number of steps; a number between 0 and 1 is a fraction of all steps."""
    number = _number(value)
    return number if 0 < number < 1 else _integer(value)


def _above_zero(value: Any) -> int | float:
    number = _number(value)
    if number <= 0:
        raise ValueError("is not above 0")
    return number


def _flag(value: Any) -> bool:
    if (flag := _FLAGS.get(str(value).strip().lower())) is None:
        raise ValueError("is not true or false")
    return flag


def _text(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)  # YAML reads a name that consists of digits as a number
    if not isinstance(value, str):
        raise ValueError("is not a text")
    if (problem := check_text(value)) is not None:
        raise ValueError(f"is not accepted: {problem}")
    return value


def _texts_of_texts(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        value = _mapping(value)
    if not isinstance(value, dict) or not all(isinstance(part, str) for pair in value.items() for part in pair):
        raise ValueError('is not a mapping of texts; write \'{"their name": "our name"}\'')
    return {_text(key): _text(item) for key, item in value.items()}


def _mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = parse_json(value, where="the text", error=ConfigError)
        except ConfigError as error:
            raise ValueError(f"is not a mapping in JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError('is not a mapping; write \'{"name": "value"}\'')
    return {_text(key): item for key, item in value.items()}


def _guess(value: Any) -> Any:
    """The value of a word, guessed from its text: a number, true or false, JSON, or the text itself."""
    if not isinstance(value, str):
        return value
    _text(value)
    low = value.strip().lower()
    if low in ("true", "false"):
        return low == "true"
    try:
        return _number(value)
    except ValueError:
        pass
    if low[:1] in ("[", "{"):
        try:
            return parse_json(value, where="the text", error=ConfigError)
        except ConfigError:
            return value
    return value


ARGUMENT_TYPES: Mapping[str, ArgumentType] = {
    **dict.fromkeys(
        (
            "lora_rank", "num_generations", "num_iterations", "vllm_max_model_len", "max_completion_length", "max_turns",
            "per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation",
            "global_batch_size", "cosine_max_len", "repetition_n_grams", "soft_max_length", "vllm_tensor_parallel_size",
            "vllm_pipeline_parallel_size", "vllm_data_parallel_size", "vllm_max_num_seqs", "vllm_server_port",
            "vllm_max_lora_rank",
        ),
        _count,
    ),
    **dict.fromkeys(
        (
            "lora_alpha", "seed", "data_seed", "top_k", "max_length", "max_steps", "warmup_steps", "save_total_limit",
            "soft_cache_length", "ref_model_sync_steps", "sleep_level",
        ),
        _integer,
    ),
    **dict.fromkeys(
        (
            "temperature", "top_p", "min_p", "beta", "learning_rate", "weight_decay", "max_grad_norm", "warmup_ratio",
            "lora_dropout", "adam_beta1", "adam_beta2", "epsilon", "epsilon_high", "reward_weights", "split_dataset_ratio",
            "cosine_min_len_value_wrong", "cosine_max_len_value_wrong", "cosine_min_len_value_correct",
            "cosine_max_len_value_correct", "repetition_max_penalty", "delta", "ref_model_mixup_alpha", "tau_pos", "tau_neg",
            "off_policy_sequence_mask_delta", "rollout_importance_sampling_threshold", "vllm_gpu_memory_utilization",
            "vllm_mm_processor_cache_gb", "vllm_server_timeout",
        ),
        _number,
    ),
    "num_train_epochs": _above_zero,
    **dict.fromkeys(("save_steps", "eval_steps"), _steps),
    **dict.fromkeys(
        (
            "async_generate", "dataset_shuffle", "use_gym_env", "use_hf", "use_rslora", "use_dora", "gradient_checkpointing",
            "kl_in_reward", "sync_ref_model", "use_vllm", "vllm_enforce_eager", "vllm_disable_custom_all_reduce",
            "vllm_disable_cascade_attn", "vllm_enable_expert_parallel", "vllm_enable_prefix_caching", "vllm_use_async_engine",
            "vllm_enable_lora", "vllm_server_pass_dataset", "enable_thinking",
        ),
        _flag,
    ),
    **dict.fromkeys(
        (
            "deepspeed", "fsdp", "tuner_type", "target_modules", "importance_sampling_level", "loss_type", "ref_model",
            "model", "system", "output_dir", "dataset", "val_dataset", "external_plugins", "reward_funcs", "stop_words",
            "completion_length_limit_scope", "loss_scale", "multi_turn_scheduler", "gym_env", "context_manager", "vllm_mode",
            "vllm_quantization", "vllm_server_base_url", "vllm_server_host",
        ),
        _text,
    ),
    "columns": _texts_of_texts,
    **dict.fromkeys(("vllm_limit_mm_per_prompt", "vllm_speculative_config", "vllm_engine_kwargs"), _mapping),
}  # fmt: skip
"""The type of each argument; for a list, the type of its items."""


def parse_argument(key: str, values: list[Any]) -> Any:
    """The value of the argument `key`, from its words or from its values in a file; None if the value is `null`.

    Raises ConfigError if a value is not of the argument's type, or if there are too many values or no value.
    """
    kind = ARGUMENT_TYPES.get(key, _guess)
    if key in LISTS:
        parsed = [_read(key, kind, item) for value in values for item in _items(value)]
        return [item for item in parsed if item is not None]
    if not values and kind in (_guess, _flag):
        return True
    if kind is _guess and len(values) > 1:
        return [_read(key, kind, value) for value in values]
    if not values:
        raise ConfigError(f"--{key} has no value; write --{key} VALUE")
    if len(values) > 1:
        raise ConfigError(f"--{key} takes one value; there are {len(values)}: {values!r:.80}")
    value = values[0]
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return _read(key, kind, value)


def positive_integer(name: str, value: str) -> int:
    """An integer of at least 1 from another source than an argument, such as a shell variable. Raises ConfigError."""
    return _read(name, _count, value)


def _items(value: Any) -> list[Any]:
    """A word or a file's value as a list: JSON, or a single item (`[END]` is a stop word)."""
    if isinstance(value, str) and value.strip().startswith("["):
        value = _guess(value)
    return list(value) if isinstance(value, list | tuple) else [value]


def _read(name: str, kind: ArgumentType, value: Any) -> Any:
    if value is None or (isinstance(value, str) and value.strip().lower() in ("none", "null")):
        return None
    try:
        return kind(value)
    except ValueError as error:
        shown = name if name.isupper() or " " in name else f"--{name}"
        if isinstance(value, str) and re.search(r"\$\{\w+\}", value):
            rule = "refers to a variable that neither the script nor the environment sets: set it before `turnwise convert`"
            raise ConfigError(f"{shown}: {value!r:.80} {rule}") from None
        raise ConfigError(f"{shown}: {value!r:.80} {error}") from None
