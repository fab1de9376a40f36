"""Reads ms-swift's arguments from a command line, a script, or a YAML or JSON file.

Knows the tables of arguments (those that become one option with the same value, those that must have the value which turnwise
always uses, those of machinery that does not exist here) and the types of the arguments that the conversion computes with. Words
of a command line are texts. Each argument is parsed once, here; a value of another type raises an error that names the argument,
the value and the type. The types of arguments that are only reported are guessed. Does not know what an argument means for a
recipe; `convert` and `convert_training` do."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from turnwise.compat.conversion import RecipeBuilder
from turnwise.errors import ConfigError
from turnwise.json_yaml import check_text, parse_json, parse_yaml, read_text

REWARDS = frozenset({"toolbench"})
"""Reward functions of ms-swift that turnwise does not have. A plugin may define a function of the same name."""

SHARE_OF_STEPS = "a value below 1 is a share of all steps there, but {} is a number of steps: set it"
"""Why `save_steps` and `eval_steps` are not converted; the place is for the option."""

DEFAULTS: Mapping[str, Any] = {
    "temperature": 0.9,
    "max_completion_length": 512,
    "beta": 0.04,
    "num_generations": 8,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "loss_type": "grpo",
    "tuner_type": "lora",
    "lora_rank": 8,
    "lora_alpha": 32,
    "max_resample_times": 3,
    "num_iterations": 1,
    "per_device_train_batch_size": 1,
    "warmup_ratio": 0.0,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "num_train_epochs": 3.0,
    "seed": 42,
    "lmbda": 0.5,
    "teacher_kl_coef": 1.0,
    "teacher_tag_key": "dataset",
}
"""ms-swift's defaults that differ from ours or that a computation needs."""

GKD_DEFAULTS: Mapping[str, Any] = {"beta": 0.5, "num_generations": 1}
"""ms-swift's defaults that are others with `rlhf_type` gkd."""

REWARD_FREE = (
    "advantage_estimator", "scale_rewards", "dynamic_sample", "max_resample_times", "overlong_filter", "loss_type",
    "importance_sampling_level", "epsilon", "epsilon_high", "delta", "tau_pos", "tau_neg", "off_policy_sequence_mask_delta",
    "rollout_importance_sampling_mode", "rollout_importance_sampling_threshold", "num_iterations", "kl_in_reward",
    "reward_funcs", "reward_weights", "ref_model", "sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha",
    "top_entropy_quantile",
)  # fmt: skip
"""Arguments of GRPO that have no effect with `rlhf_type` gkd."""

ALIASES: Mapping[str, str] = {
    "activation_checkpointing": "gradient_checkpointing",  # since transformers 5.24
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
    "train_type": "tuner_type",
    "sft_type": "tuner_type",
    "model_id_or_path": "model",
    "learning_rate_scheduler": "lr_scheduler_type",
    "use_async_engine": "vllm_use_async_engine",
    "max_model_len": "vllm_max_model_len",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "tensor_parallel_size": "vllm_tensor_parallel_size",
    "data_parallel_size": "vllm_data_parallel_size",
    "lr": "learning_rate",  # of `megatron rlhf`, as are the four below
    "train_iters": "max_steps",
    "micro_batch_size": "per_device_train_batch_size",
    "lr_warmup_fraction": "warmup_ratio",
    "lr_warmup_iters": "warmup_steps",
    "plugin": "external_plugins",
    "stop": "stop_words",
    "dtype": "torch_dtype",
}
"""Other names of arguments."""

LISTS = frozenset(
    {
        "dataset",
        "val_dataset",
        "external_plugins",
        "reward_funcs",
        "reward_weights",
        "stop_words",
        "report_to",
        "target_modules",
        "vllm_server_base_url",
        "vllm_server_host",
        "vllm_server_port",
    }
)
"""Arguments that take several values."""

OPTIONS: Mapping[str, str] = {
    "model": "model.path",
    "system": "data.system_prompt",
    "enable_thinking": "model.chat_template_kwargs.enable_thinking",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "min_p": "sampling.min_p",
    "stop_words": "sampling.stop",
    "vllm_max_model_len": "limits.context",
    "num_generations": "train.group_size",
    "num_iterations": "train.ppo_epochs",
    "learning_rate": "train.lr",
    "weight_decay": "train.weight_decay",
    "max_grad_norm": "train.max_grad_norm",
    "top_entropy_quantile": "loss.top_entropy_quantile",
    "dataset_shuffle": "data.shuffle",
    "seed": "seed",
    "output_dir": "output",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
}
"""Arguments that become one option, with the same value."""

CHOICES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "async_generate": ("train.max_staleness", {"true": 1, "false": 0}),
    "torch_dtype": ("model.dtype", {"bfloat16": "bfloat16", "float32": "float32"}),
    "optim": (
        "train.optimizer.name",
        {
            **dict.fromkeys(
                ("adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw", "paged_adamw_32bit"), "adamw"
            ),
            **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw_8bit"),
        },
    ),
    "lr_scheduler_type": (
        "train.lr_schedule",
        {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"},
    ),
}
"""Arguments whose values have other names here. Values that are missing here are not supported."""

FIXED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    # argument: the accepted values, and why no other value is possible
    "rlhf_type": (("grpo", "gkd"), "only GRPO and GKD can be converted"),
    "teacher_adapters": (
        (None, []),
        "set teacher_model to the adapter's directory, whose adapter_config.json names the model under it",
    ),
    "teacher_model_revision": ((None,), "download the revision, and set teacher_model to its directory"),
    "repetition_penalty": ((1, 1.0), "there is no repetition penalty here"),
    "reward_model": ((None, []), "call the reward model in a reward function: reward.trajectory"),
    "reward_model_plugin": (
        (None, []),
        "call the reward model in a reward function: reward.trajectory",
    ),
    "response_prefix": ((None, ""), "the beginning of an answer is set by the chat template, or by a scheduler"),
    "add_non_thinking_prefix": (
        (None,),
        "the model's own chat template writes the turns of a data set: set its arguments in model.chat_template_kwargs",
    ),
    "agent_template": ((None,), "tool calls are written by the model's chat template (tool_format)"),
    "truncation_strategy": (
        (None, "delete"),
        "prompts are not truncated here: a row that leaves no room for an answer ends with an error",
    ),
    "num_generations_eval": ((None, 1), "set eval.samples_per_row"),
    "adapters": ((None, []), "training does not start from an adapter: merge the adapter into the model first"),
    "freeze_parameters": ((None, []), "all parameters are trained here"),
    "streaming": ((False,), "a data set is read into memory"),
    "tree_rollout": ((False,), "the conversations of a group are independent"),
}
"""Arguments that must have a given value. Any other value would change the training, and is reported."""

MACHINERY: tuple[tuple[str, str], ...] = (
    # the first pattern that matches is used; the result of training does not depend on these arguments
    (r"rollout_importance_sampling_.*|log_rollout_offpolicy_metrics", "the engine uses the trainer's weights, so "
     "there is no mismatch to correct; the metric ratio/max_deviation shows how much they differ"),
    (r"vllm_server_group_port", "weights are sent as files, not by NCCL: rollout_server.weights_directory"),
    (r"vllm_reasoning_parser", "reasoning is parsed by the model's own chat template"),
    (r"host|port", "options --host and --port of `turnwise serve`"),
    (r"offload_.*|move_model_batches", "train.optimizer.offload=sampling moves the optimizer's state while the engine samples; "
     "engine.sleep frees the engine's memory while the model is trained"),
    (r"vllm_.*", "give the argument to vLLM in engine.arguments"),
    (r"teacher_deepspeed|offload_teacher_model|teacher_model_type", "a local teacher is divided among the ranks as the "
     "trained model is (cluster.fsdp), and its architecture is read from config.json"),
    (r"use_ray|infer_backend|lmdeploy_.*|sglang_.*|api_key|max_logprobs", "about other engines: options under engine"),
    (r"fsdp_.*|zero.*|ddp|ddp_.*|local_rank", "about memory and devices: for several devices, set cluster=local or "
     "cluster=torchrun (docs/cluster.md)"),
    (r"tp_.*|pp_.*|sequence_parallel(_size)?|tensor_model_parallel_size|(pipeline_model|context|expert_model|expert_tensor)_parallel_"
     r"size", "neither a layer nor a sequence is divided among ranks: the weights of all layers are (docs/cluster.md)"),
    (r"padding_free|packing|"
     r"gradient_checkpointing_kwargs|attn_impl|vit_gradient_checkpointing|dataloader_.*|dataset_num_proc|torch_compile|"
     r"load_from_cache_file|use_logits_to_keep|tensor_model_parallel_size|.*_parallel_size|bf16|fp16|device_map|"
     r"average_tokens_across_devices|ddp|local_rank|attention_backend|recompute_.*|sequence_parallel|.*_fusion|"
     r"optimizer_cpu_offload|use_precision_aware_optimizer|colocate_groups|gpus",
     "about memory and devices: train.micro_batch_tokens and model.device"),
    (r"logging_.*|log_.*|run_name|wandb_.*|swanlab_.*|tensorboard.*|num_completions_to_print|"
     r"disable_tqdm|add_version|create_checkpoint_symlink|push_to_hub|hub_.*|use_hf|check_model|ignore_args_error|"
     r"save_only_model|save_strategy|save_safetensors|safe_serialization|eval_strategy|eval_on_start|metric.*|"
     r"load_best_model_at_end|no_save_(optim|rng)|no_load_(optim|rng)|finetune|logging_dir|overwrite_output_dir|include_.*|task_type|per_device_eval_batch_size",
     "about files and logs: everything is written to the run's directory (docs/record.md)"),
    (r"model_type|template|template_backend", "the architecture is read from config.json, and the model's chat template is used"),
    (r"vera_.*|adalora_.*|galore.*|lorap_.*", "belongs to another tuner_type"),
    (r"merge_lora", "`turnwise merge` writes a model with the adapter merged into its weights"),
    (r"freeze_vit|freeze_aligner|freeze_llm|vit_lr|aligner_lr|max_pixels|min_pixels", "about vision models: all parameters "
     "are trained at train.lr; the model's processor sets the number of pixels"),
    (r"resume_from_checkpoint|resume_only_model", "a run is resumed by resume=auto"),
)  # fmt: skip
"""Arguments of machinery that does not exist here."""


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
            "global_batch_size", "gkd_logits_topk",
            "cosine_max_len", "repetition_n_grams", "soft_max_length", "vllm_tensor_parallel_size",
            "vllm_pipeline_parallel_size", "vllm_data_parallel_size", "vllm_max_num_seqs", "vllm_server_port",
            "vllm_max_lora_rank",
        ),
        _count,
    ),
    **dict.fromkeys(
        (
            "lora_alpha", "seed", "data_seed", "top_k", "max_length", "max_steps", "warmup_steps", "save_total_limit",
            "soft_cache_length", "ref_model_sync_steps", "sleep_level", "quant_bits",
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
            "vllm_mm_processor_cache_gb", "vllm_server_timeout", "router_aux_loss_coef", "moe_aux_loss_coeff",
            "lmbda", "sft_alpha", "teacher_kl_coef", "top_entropy_quantile",
            "sdar_loss_coef",
        ),
        _number,
    ),
    "num_train_epochs": _above_zero,
    **dict.fromkeys(("save_steps", "eval_steps"), _steps),
    **dict.fromkeys(
        (
            "async_generate", "dataset_shuffle", "use_gym_env", "use_hf", "use_rslora", "use_dora", "gradient_checkpointing",
            "use_liger_kernel", "bnb_4bit_use_double_quant",
            "kl_in_reward", "sync_ref_model", "use_vllm", "vllm_enforce_eager", "vllm_disable_custom_all_reduce",
            "vllm_disable_cascade_attn", "vllm_enable_expert_parallel", "vllm_enable_prefix_caching", "vllm_use_async_engine",
            "vllm_enable_lora", "vllm_server_pass_dataset", "enable_thinking",
            "seq_kd",
        ),
        _flag,
    ),
    **dict.fromkeys(
        (
            "deepspeed", "fsdp", "tuner_type", "target_modules", "importance_sampling_level", "loss_type", "ref_model",
            "model", "system", "output_dir", "dataset", "val_dataset", "external_plugins", "reward_funcs", "stop_words",
            "completion_length_limit_scope", "loss_scale", "multi_turn_scheduler", "gym_env", "context_manager", "vllm_mode",
            "vllm_quantization", "vllm_server_base_url", "vllm_server_host", "router_replay_mode", "quant_method",
            "bnb_4bit_quant_type", "teacher_model", "teacher_tag_key", "advantage_reweight", "report_to",
        ),
        _text,
    ),
    "columns": _texts_of_texts,
    "teacher_model_server": _guess,
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


_ROLLOUT = re.compile(r"(\w+=\S+\s+)*(\S*/)?swift\s+rollout\b")
_MOST_CHARACTERS = 10_000_000


class SwiftArguments:
    """The given arguments; those of several commands are merged."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.overridden: dict[str, Any] = {}
        """Values for which a later command gave a different value."""
        self.environment: dict[str, str] = {}
        """Shell variables that are set before a command."""
        self.processes = 1
        """The number of processes of the trainer: `NPROC_PER_NODE` times `NNODES`."""
        self.nodes = 1
        """The number of machines of the trainer: `NNODES`."""
        self.nodes_variable: str | None = None
        """`${NAME}` if the number of machines is a variable that is not set here. `nodes` and `processes` are then for one."""
        self.rollout: Literal["given", "comment", "unknown"] = "unknown"
        """Whether the arguments of `swift rollout` were given, and whether they were found in a comment."""
        self.folders: list[Path] = [Path()]
        """Folders in which named files are searched: the working directory, and the folders around the files that were read."""
        self.files: list[Path] = []
        """The files that were read."""

    def find(self, name: str) -> Path | None:
        """The file of that name, relative to one of the folders, or None."""
        places = (folder / os.path.expanduser(name) for folder in self.folders)
        return next((place for place in places if os.path.isfile(place)), None)  # False for an invalid name

    def add(self, key: str, values: list[Any]) -> None:
        """Add one argument: its words, or its values in a file. Raises ConfigError if they are not of the argument's type."""
        if re.fullmatch(r"[A-Za-z_][\w.-]*", key) is None:
            raise ConfigError(f"{key!r:.80} is no name of an argument of ms-swift")
        key = ALIASES.get(key.replace("-", "_"), key.replace("-", "_"))
        value = parse_argument(key, values)
        if key in self.values and self.values[key] != value:
            self.overridden[key] = self.values[key]
        self.values[key] = value


def read_arguments(source: str | Path | Sequence[str] | Mapping[str, Any]) -> SwiftArguments:
    """Arguments from a mapping, from words of a command line, or from a `.yaml`, `.json` or `.sh` file.

    A command line may name a file first, as in `swift rlhf args.yaml --beta 0`; a script may hold several commands.

    Raises ConfigError.
    """
    given = SwiftArguments()
    if isinstance(source, Mapping):
        for key, value in source.items():
            given.add(str(key), [value])
    else:
        _words(given, [str(source)] if isinstance(source, str | Path) else list(source))
    if not given.values:
        raise ConfigError(f"there are no arguments of ms-swift in {source!r:.200}; they are written --name value")
    return given


def _words(given: SwiftArguments, words: Sequence[str]) -> None:
    key: str | None = None
    values: list[Any] = []

    def end() -> None:
        if key is not None:
            given.add(key, values)

    processes: dict[str, int] = {}
    for word in words:
        if word.startswith("--") and len(word) > 2:
            end()
            key, equals, value = word[2:].partition("=")
            values = [value] if equals else []
        elif key is not None:
            values.append(word)
        elif word.endswith((".yaml", ".yml", ".json", ".sh")):
            _file(given, Path(os.path.expanduser(word)))
        elif match := re.fullmatch(r"(NPROC_PER_NODE|NNODES)=(\d+)", word):
            processes[match.group(1)] = positive_integer(match.group(1), match.group(2))
        elif match := re.fullmatch(r"NNODES=(\$\{\w+\})", word):
            given.nodes_variable = match.group(1)
        elif match := re.fullmatch(r"([A-Z_]+)=(.*)", word):
            given.environment[match.group(1)] = match.group(2)
        elif word == "rollout":
            given.rollout = "given"
        elif word not in ("swift", "megatron", "rlhf", "grpo", "run"):
            raise ConfigError(
                f"{word!r} is no argument of ms-swift; they are written --name value, or in a file: args.yaml"
            )
    end()
    given.processes = max(given.processes, math.prod(processes.values()))
    given.nodes = max(given.nodes, processes.get("NNODES", 1))


def _file(given: SwiftArguments, path: Path) -> None:
    if path.absolute() in given.files:
        raise ConfigError(f"{path} is named twice, or names itself; name it once")
    given.files.append(path.absolute())
    text = read_text(path, error=ConfigError)
    given.folders += path.absolute().parents
    if path.suffix == ".sh":
        commands = _commands(text, path)
        if not any(kind == "rollout" for kind, _ in commands) and (commented := _commented(text)):
            given.rollout = "comment"
            commands += _commands(commented, path)
        elif any(kind == "rollout" for kind, _ in commands):
            given.rollout = "given"
        for _, words in commands:
            _words(given, words)
        return
    parse = parse_json if path.suffix == ".json" else parse_yaml
    tree = parse(text, where=str(path), error=ConfigError)
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must contain a mapping of arguments; it contains a {type(tree).__name__}")
    for part in ("rollout", "train"):  # files for Ray have these two sections
        if isinstance(tree.get(part), dict):
            given.rollout = "given" if part == "rollout" else given.rollout
            tree = {**tree.pop(part), **tree}
    for key, value in tree.items():
        given.add(str(key), [value])


def _commented(text: str) -> str:
    """The `swift rollout` command in the script's comments, which the user runs in another terminal; empty if there is none."""
    lines: list[str] = []
    for line in text.splitlines():
        words = line.lstrip().removeprefix("#").strip()
        if not line.lstrip().startswith("#") or (not lines and _ROLLOUT.match(words) is None):
            if lines:
                break
            continue
        lines.append(words)
        if not words.endswith("\\"):
            break
    return "\n".join(lines).rstrip("\\")


def _commands(text: str, path: Path) -> list[tuple[str, list[str]]]:
    """The name and the words of each `swift rlhf` and `swift rollout` command in a script, with the variables set before it.

    Variables that the script or the environment sets to plain texts are expanded. Others stay as `${NAME}`.
    """
    commands: list[tuple[str, list[str]]] = []
    variables: dict[str, str] = {}
    for line in _lines(text, path):
        words = [re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda match: _variable(match, variables), word) for word in line]
        words = [part for word in words for part in _launched(word)]
        at = next((n for n, word in enumerate(words) if word.rpartition("/")[2] in ("swift", "megatron")), len(words))
        if words[at + 1 : at + 2] not in (["rlhf"], ["rollout"]):
            pairs = (word.partition("=") for word in words if re.match(r"\w+=", word))
            variables.update({name: value for name, _, value in pairs})
            if sum(map(len, variables.values())) > _MOST_CHARACTERS:
                raise ConfigError(f"{path}: its variables grow beyond {_MOST_CHARACTERS:,} characters, such as A=$A$A")
            continue
        kind = words[at + 1]
        words = [*(word for word in words[:at] if re.match(r"\w+=", word)), *words[at + 2 :]]
        words = words[: next((n for n, word in enumerate(words) if re.match(r"[&|;<>#]|\d>", word)), None)]
        words = [re.sub(r"\$(\w+)", r"${\1}", word) for word in words]  # unset variables stay as references
        if unset := [word for word in words if re.search(r"\$", re.sub(r"\$\{[A-Za-z_]\w*\}", "", word))]:
            raise ConfigError(f"{path}: {unset[0]!r} needs a shell; write its value")
        commands.append((kind, words))
    if not commands:
        raise ConfigError(f"{path} has neither `swift rlhf` nor `swift rollout` in it")
    return commands


def _launched(word: str) -> list[str]:
    """A word, or the command that it means: launchers receive `swift/cli/rlhf.py` and the number of processes."""
    if match := re.fullmatch(r"(?:.*/)?swift/cli/(rlhf|rollout)\.py", word):
        return ["swift", match.group(1)]
    if match := re.fullmatch(r"--nproc_per_node=(\d+)", word):
        return [f"NPROC_PER_NODE={match.group(1)}"]
    return [word]


def _lines(text: str, path: Path) -> Iterator[list[str]]:
    """The words of each command. A command continues after a backslash, and while a quotation is open."""
    waiting, quoted = "", False
    for line in text.splitlines():
        if not quoted and line.lstrip().startswith("#"):
            continue  # a comment does not continue after a backslash
        if not quoted and line.endswith("\\"):
            waiting += line[:-1] + " "
            continue
        waiting += line
        try:
            words = shlex.split(re.sub(r"\\\n", " ", waiting))  # no comments of `shlex`: `dataset#500` has none
        except ValueError:
            waiting, quoted = waiting + "\n", True
            continue
        waiting, quoted = "", False
        yield words
    try:
        yield shlex.split(waiting)  # the last line ended with a backslash
    except ValueError:
        raise ConfigError(
            f"{path}: {waiting.strip()[:80]!r} cannot be read as a shell does: its quotation is never closed"
        ) from None


def _variable(match: re.Match[str], variables: Mapping[str, str]) -> str:
    name = match.group(1) or match.group(2)
    return variables.get(name, os.environ.get(name, match.group(0)))


class SwiftRecipeBuilder(RecipeBuilder):
    """Looks arguments such as `max_completion_length` up, and builds a recipe from them."""

    system: ClassVar[str] = "ms-swift"
    """The system's name in reasons. TRL's arguments are looked up by a subclass (`compat/trl_convert.py`)."""

    def __init__(self, given: SwiftArguments) -> None:
        super().__init__()
        self.given = given

    @property
    def values(self) -> Mapping[str, Any]:
        """The arguments that were given, without defaults."""
        return self.given.values

    def has(self, key: str) -> bool:
        return key in self.given.values

    def value(self, key: str) -> Any:
        value = self.given.values.get(key)
        if value is None and self.values.get("rlhf_type") == "gkd" and key in GKD_DEFAULTS:
            return GKD_DEFAULTS[key]
        return DEFAULTS.get(key) if value is None else value
