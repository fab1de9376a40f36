"""Converts configurations of TRL into a recipe, with a report: what was converted, what was not, and why.

Reads the words of `trl grpo --config FILE --name value` or `trl distillation`, the YAML file of `--config`, and the JSON of a
GRPOConfig, DistillationConfig, ServerDistillationConfig or GKDConfig (`training_args.to_json_string()`, with all its defaults);
of a script (`trl_script.py`), the literals.
Names and defaults are those of TRL 1.16, with names of earlier versions. Arguments about loss, batches, credit and steps mean
the same in ms-swift, which is built on TRL: `compat/swift/convert_training.py` converts them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from turnwise.compat.conversion import ConversionReport, UnsupportedKey, convert_kernels, convert_loggers
from turnwise.compat.swift.convert_training import (
    convert_batches,
    convert_credit,
    convert_divergence,
    convert_length,
    convert_loss,
    convert_sample_filters,
    convert_samples,
)
from turnwise.compat.swift.read_arguments import (
    ARGUMENT_TYPES,
    CHOICES,
    MACHINERY,
    REWARD_FREE,
    SHARE_OF_STEPS,
    SwiftArguments,
    SwiftRecipeBuilder,
    parse_argument,
)
from turnwise.compat.trl_script import TrainingScript, definitions, program, read_script
from turnwise.config.recipe import called_here
from turnwise.data.rows import records
from turnwise.errors import ConfigError, DataError, nearest
from turnwise.json_yaml import parse_json, parse_yaml, read_text

__all__ = ["from_trl_arguments"]

Trainer = Literal["grpo", "distillation", "server", "gkd"]

# names and defaults

_ALIASES: Mapping[str, str] = {
    "mask_truncated_completions": "overlong_filter",
    "off_policy_mask_threshold": "off_policy_sequence_mask_delta",
    "sapo_temperature_pos": "tau_pos",
    "sapo_temperature_neg": "tau_neg",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
    "lora_target_modules": "target_modules",
    "lora_r": "lora_rank",
    "torch_dtype": "dtype",
    "evaluation_strategy": "eval_strategy",
    "activation_checkpointing": "gradient_checkpointing",  # since transformers 5.24
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
"""Names of TRL and of its earlier versions, and those of the functions that convert them. Reports have the user's names."""

_DEFAULTS: Mapping[str, Any] = {
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "warmup_ratio": 0.0,
    "seed": 42,
    "num_generations": 8,
    "max_completion_length": 512,
    "max_new_tokens": 128,
    "temperature": 1.0,
    "beta": 0.0,
    "num_iterations": 1,
    "loss_type": "dapo",
    "gradient_checkpointing": True,
    "dtype": "float32",
    "lora_rank": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "use_bias_correction_kl": True,
    "max_resample_times": 0,
    "lmbda": 1.0,
    "loss_top_k": 1,
}
"""Defaults that differ from turnwise's, or that a computation needs."""

_OF_TRAINER: Mapping[Trainer, Mapping[str, Any]] = {
    "grpo": {},
    "distillation": {"beta": 1.0, "num_generations": 1},
    "server": {"beta": 1.0, "num_generations": 1, "vllm_server_port": 8001},
    "gkd": {
        "beta": 0.5,
        "num_generations": 1,
        "lmbda": 0.5,
        "temperature": 0.9,
        "learning_rate": 2e-5,
        "max_length": 1024,
        "loss_type": "nll",
        "remove_unused_columns": True,
    },
}
"""Defaults that are others in a trainer."""

_UNCHANGED: Mapping[str, Any] = {
    "epsilon": 0.2, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0,
    "top_p": 1.0, "top_k": 0, "top_entropy_quantile": 1.0, "entropy_coef": 0.0, "scale_rewards": "group",
    "importance_sampling_level": "token", "vllm_mode": "colocate", "vllm_model_impl": "vllm", "vllm_tensor_parallel_size": 1,
    "vllm_gpu_memory_utilization": 0.3, "vllm_server_host": "0.0.0.0",
    "vllm_server_port": 8000, "vllm_server_timeout": 240.0, "vllm_group_port": 51216,
    "vllm_importance_sampling_correction": True, "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005, "entropy_target": 0.2,
    "tau_pos": 1.0, "tau_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
    "multi_objective_aggregation": "sum_then_normalize", "shuffle_dataset": True, "pad_to_multiple_of": "auto",
    "ds3_gather_for_generation": True, "log_multimodal": True, "loss_add_tail": True, "reverse_kl_top_1_mode": "sampled",
    "optim": "adamw_torch_fused", "average_tokens_across_devices": True, "report_to": [], "project": "huggingface",
    "logging_strategy": "steps", "logging_nan_inf_filter": True, "log_level": "passive", "log_level_replica": "warning",
    "log_on_each_node": True, "include_num_input_tokens_seen": "no", "per_device_eval_batch_size": 8, "eval_strategy": "no",
    "save_strategy": "steps", "hub_strategy": "every_save", "dataloader_pin_memory": True, "dataloader_in_order": True,
    "train_sampling_strategy": "random", "length_column_name": "length", "ddp_timeout": 1800, "skip_memory_metrics": True,
    "local_rank": -1, "max_steps": -1, "model_revision": "main", "lora_task_type": "CAUSAL_LM", "bnb_4bit_quant_type": "nf4",
    "dataset_train_split": "train", "dataset_test_split": "test", "eval_do_concat_batches": True, "hub_token": "<HUB_TOKEN>",
    "push_to_hub_token": "<PUSH_TO_HUB_TOKEN>", "logging_steps": 10, "completion_only_loss": None,
    "dataset_text_field": "text", "truncation_mode": "keep_start", "packing_strategy": "bfd",
    "repetition_penalty": 1.0,
}  # fmt: skip
"""Further defaults: a JSON has all of them, and none needs a line in the report."""

_OPTIONS: Mapping[str, str] = {
    "model_name_or_path": "model.path",
    "system_prompt": "data.system_prompt",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "chat_template_kwargs": "model.chat_template_kwargs",
    "num_generations": "train.group_size",
    "num_iterations": "train.ppo_epochs",
    "learning_rate": "train.lr",
    "weight_decay": "train.weight_decay",
    "max_grad_norm": "train.max_grad_norm",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "top_entropy_quantile": "loss.top_entropy_quantile",
    "entropy_coef": "loss.entropy_coef",
    "router_aux_loss_coef": "loss.router_aux_loss_coef",
    "shuffle_dataset": "data.shuffle",
    "num_generations_eval": "eval.samples_per_row",
    "seed": "seed",
    "output_dir": "output",
    "save_total_limit": "checkpoint.keep",
}
"""Arguments that become one option, with the same value."""

_OF_REWARDS = (
    *REWARD_FREE, "num_iterations", "top_entropy_quantile", "entropy_coef", "router_aux_loss_coef", "use_bias_correction_kl",
    "reward_model_name_or_path",
)  # fmt: skip
"""Arguments that distillation does not have."""

_FIXED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "repetition_penalty": ((1,), "the distribution that is sampled from must be the one that is trained"),
    "generation_kwargs": (({},), "further options of sampling: sampling.stop; others change what is sampled"),
    "model_revision": (("main",), "download the revision, and set model.path to its directory"),
    "trust_remote_code": ((), "no code of a model's repository is run"),
    "use_adaptive_entropy": ((), "the coefficient is constant: loss.entropy_coef"),
    "multi_objective_aggregation": (("sum_then_normalize",), "choose an estimator such as credit.name=gdpo (docs/credit.md)"),
    "cast_lm_head_to_fp32": ((), "log-probabilities are computed in float32 from logits of the model's own type"),
    "lr_scheduler_kwargs": (({},), "a schedule has no arguments here"),
    "label_smoothing_factor": ((0,), "labels are not smoothed"),
    "neftune_noise_alpha": ((), "embeddings get no noise"),
    "optim_args": ((), "the optimizer has the arguments train.betas and train.weight_decay"),
    "optim_target_modules": ((), "all trained parameters have one optimizer"),
    "adam_epsilon": ((1e-8,), "AdamW's epsilon is 1e-8"),
    "fp16": ((), "there is no float16 here: set bf16"),
    "load_in_8bit": ((), "there are no weights in 8 bits: set load_in_4bit with use_peft, or dtype bfloat16"),
    "lora_modules_to_save": ((), "only the adapter is trained"),
    "lora_target_parameters": ((), "an adapter is on linear layers: model.lora.target_modules"),
    "vllm_structured_outputs_regex": ((), "set sampling.response_format to a JSON schema"),
    "reward_model_name_or_path": ((), "call the reward model in a reward function: reward.trajectory (docs/rewards.md)"),
    "chat_template": ((), "the model's own template is used: save the model with this one"),
    "chat_template_path": ((), "the model's own template is used: save the model with this one"),
    "dataset_streaming": ((), "a data set is read into memory"),
    "teacher_model_revision": ((), "download the revision, and set teacher.path to its directory"),
    "disable_dropout": ((True,), "there is no dropout in training"),
    "eos_token": ((), "turns end with the tokens that the model's template and generation_config.json name"),
}  # fmt: skip
"""Arguments that must have one of these values (or none). Any other would change the training."""

_REMAINING = (
    (r"vespo_.*", "loss_type vespo is not converted"),
    (r"entropy_(coef_min|coef_max|coef_delta|target)", "it belongs to use_adaptive_entropy"),
    (r"do_(train|eval|predict)|env|config|dataset_kwargs|tf32|benchmarks|callbacks|use_transformers_.*|transformers_.*|debug|"
     r"pad_token|packing.*|eval_packing|dataset_text_field|truncation_mode|completion_only_loss|assistant_only_loss|"
     r"activation_offloading|auto_find_batch_size|parallelism_config|bnb_4bit_quant_storage|project|"
     r"trackio_.*|liger_.*|ignore_bias_buffers|model_init_kwargs|length_column_name|label_names|"
     r"torch_empty_cache_steps|num_machines|machine_rank|mixed_precision|.*_tags|cache_implementation",
     "turnwise needs no such option"),
)  # fmt: skip
"""Further arguments on which the result of training does not depend."""

# reading


class TrlArguments(SwiftArguments):
    """The given arguments, by the names of the functions that convert them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, str] = {}
        """By those names: the names that the user wrote."""
        self.trainer: Trainer | None = None
        self.unread: list[UnsupportedKey] = []
        """What a script gives that is no literal."""
        self.script: TrainingScript | None = None
        self.path = Path()
        """The file of the script."""

    def add(self, key: str, values: list[Any]) -> None:
        """Add one argument: its words, or its value in a file. Raises ConfigError if it is not of the argument's type."""
        written = key.replace("-", "_")
        if re.fullmatch(r"[A-Za-z_][\w.]*", written) is None:
            raise ConfigError(f"{key!r:.80} is no name of an argument of TRL")
        if written.startswith("no_") and not values:
            written, values = written[3:], [False]
        key = _ALIASES.get(written, written)
        if key == "warmup_steps" and values and 0 < _as_number(values[0]) < 1:  # transformers 5: a share of all steps
            key = "warmup_ratio"
        mapping = len(values) == 1 and isinstance(values[0], dict)
        if mapping and (key in _LEAST or key in ARGUMENT_TYPES):
            raise ConfigError(f"{written}: {values[0]!r:.80} is a mapping, and the argument has one value")
        if values and values[0] is not None and key in _MAPPINGS and not mapping:
            raise ConfigError(f"{written}: {values[0]!r:.80} is no mapping; in a file, write its keys below it")
        raw = key in ("deepspeed", "fsdp") or mapping
        value = values[0] if raw and values else parse_argument(key, values)
        if key in _LEAST and value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < _LEAST[key]:
                raise ConfigError(f"{written}: {value!r:.80} is no whole number of at least {_LEAST[key]}")
            if key == "num_processes":
                self.processes = value
        if key.startswith("vllm_server") and isinstance(value, list) and len(value) == 1:
            (value,) = value
        if value is None:  # a JSON has names of earlier versions beside their new ones
            key = written
        before = self.names.get(key, written)
        if before != written and self.values[key] == value:  # or both
            self.values[before], self.names[before] = None, before
        self.values[key], self.names[key] = value, written


_LEAST: Mapping[str, int] = {"num_processes": 1, "max_tool_calling_iterations": 0}
"""The least value of numbers that are no arguments of ms-swift."""
_MAPPINGS = ("model_init_kwargs", "teacher_model_init_kwargs")


def _as_number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0


_TRAINERS: Mapping[str, Trainer] = {
    "grpo": "grpo",
    "distillation": "distillation",
    "server_distillation": "server",
    "gkd": "gkd",
}


def _read(source: str | Path | Sequence[str] | Mapping[str, Any]) -> TrlArguments:
    given = TrlArguments()
    if isinstance(source, Mapping):
        _mapping(given, source)
    else:
        _words(given, [str(source)] if isinstance(source, str | Path) else list(source))
    if not given.values:
        raise ConfigError(
            f"there are no arguments of TRL in {source!r:.200}; they are written --name value, or in a file"
        )
    return given


def _words(given: TrlArguments, words: Sequence[str]) -> None:
    """The words of `trl grpo --config FILE --name value`. Those of the command line replace those of the file, as in TRL."""
    arguments: list[tuple[str, list[Any]]] = []
    files: list[str] = []
    scripts: list[str] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word[2:].partition("=")
            arguments.append((key, [value] if equals else []))
        elif arguments:
            arguments[-1][1].append(word)
        elif word.endswith((".yaml", ".yml", ".json")):
            files.append(word)
        elif word in _TRAINERS:
            given.trainer = _TRAINERS[word]
        elif word.endswith(".py"):
            scripts.append(word)
        elif re.match(r"(python|accelerate|torchrun)[\d.]*$", word):
            raise ConfigError(
                f"{word!r} starts a script, which is read, not run: write `turnwise convert --from trl FILE.py`"
            )
        elif word != "trl":
            raise ConfigError(
                f"{word!r} is no argument of TRL; write trl grpo --config FILE, the file alone (YAML or JSON), or --name value"
            )
    if scripts:
        if files or len(scripts) > 1 or any(key != "num_processes" for key, _ in arguments):
            raise ConfigError(
                f"{' '.join(words)!r:.200}: a script is converted alone, without other files or arguments of its own: write "
                f"`turnwise convert --from trl {scripts[0]}`, and change the recipe"
            )
        _script(given, Path(scripts[0]).expanduser())
    for file in [*files, *(value for key, values in arguments if key == "config" for value in values)]:
        path = Path(file).expanduser()
        parse = parse_json if path.suffix == ".json" else parse_yaml
        tree = parse(read_text(path, error=ConfigError), where=str(path), error=ConfigError)
        if not isinstance(tree, dict):
            raise ConfigError(f"{path} must contain a mapping of arguments; it contains a {type(tree).__name__}")
        _mapping(given, tree)
    for key, values in arguments:
        if key != "config":
            given.add(key, values)


def _script(given: TrlArguments, path: Path) -> None:
    """What a script says with literals; the rest is named in the report."""
    script = read_script(path)
    given.trainer, given.script, given.path = _TRAINERS[script.trainer], script, path
    _mapping(given, script.values)
    given.unread = [
        UnsupportedKey(key, text, f"{reason}: set it in the recipe (docs/trl.md)", changes_training=True)
        for key, text, reason in script.others
    ]


def _mapping(given: TrlArguments, tree: Mapping[str, Any]) -> None:
    for key, value in tree.items():
        given.add(str(key), [value])


class TrlRecipeBuilder(SwiftRecipeBuilder):
    """Looks arguments of TRL up, and builds a recipe from them."""

    system = "TRL"
    given: TrlArguments

    def __init__(self, given: TrlArguments) -> None:
        super().__init__(given)
        self.copied: list[str] = []
        """The functions of the script that are to be copied into `_BESIDE`, in its folder."""
        self.writes: list[str] = []
        """The statements that write the script's data sets, for `_ROWS` in its folder."""
        values = given.values
        self.trainer: Trainer = given.trainer or (
            "gkd"
            if "lmbda" in values
            else "server"
            if values.get("teacher_model_server_url") is not None
            else "distillation"
            if values.get("teacher_model_name_or_path") is not None
            else "grpo"
        )
        if self.trainer == "distillation" and values.get("teacher_model_server_url") is not None:
            self.trainer = "server"

    def value(self, key: str) -> Any:
        value = self.values.get(key)
        return self._default(key) if value is None else value

    def _default(self, key: str) -> Any:
        of_trainer = _OF_TRAINER[self.trainer]
        return of_trainer[key] if key in of_trainer else _DEFAULTS.get(key)

    def is_default(self, key: str) -> bool:
        """Whether a given value says nothing: it is TRL's default, or off or empty without another default."""
        value, default = self.values.get(key), self._default(key)
        default = _UNCHANGED.get(key) if default is None else default
        if value is None or (isinstance(value, str) and re.fullmatch(r"<\w+_TOKEN>", value)):  # a JSON hides tokens
            return True
        return value == default if default is not None else value in (False, 0, "", [], {})

    def reject(self, key: str, reason: str, *, changes_training: bool = False, even_default: bool = False) -> None:
        if not even_default and self.has(key) and self.is_default(key):
            self.convert("nothing: it is the default", key)
        else:
            super().reject(key, reason, changes_training=changes_training, even_default=even_default)

    def _files(self) -> dict[Path, str]:
        functions = definitions(self.given.path, self.copied) if self.copied else None
        rows = program(self.given.path, self.writes) if self.writes else None
        texts = {_BESIDE: functions, _ROWS: rows}
        return {self.given.path.parent / name: text for name, text in texts.items() if text is not None}

    def report(self) -> ConversionReport:
        """The report, with the names that the user wrote."""
        made = super().report()

        def named(keys: Sequence[UnsupportedKey]) -> list[UnsupportedKey]:
            return [replace(one, key=self.given.names.get(one.key, one.key)) for one in keys]

        unread = {one.key for one in self.given.unread}
        converted = {
            name: option
            for key, option in made.converted.items()
            if (name := self.given.names.get(key, key)) not in unread
        }
        return replace(
            made,
            converted=converted,
            values={self.given.names.get(key, key): value for key, value in made.values.items()},
            unsupported=[*self.given.unread, *(one for one in named(made.unsupported) if one.key not in unread)],
            assumptions=named(made.assumptions),
            files=self._files(),
        )


# converting


def from_trl_arguments(source: str | Path | Sequence[str] | Mapping[str, Any]) -> ConversionReport:
    """Convert a configuration of TRL's GRPOTrainer, DistillationTrainer, ServerDistillationTrainer or GKDTrainer.

    `source` is a mapping, the words of a command line (`trl grpo --config FILE --beta 0.04`), or the path of a YAML or JSON
    file. Without the command, the trainer is known by its arguments. Raises ConfigError if the arguments cannot be read.
    """
    builder = TrlRecipeBuilder(_read(source))
    _convert_options(builder)
    _convert_model(builder)
    _convert_data(builder)
    _convert_conversation(builder)
    _convert_engine(builder)
    _convert_processes(builder)
    minibatches = convert_batches(builder)
    convert_length(builder, minibatches)
    _convert_files(builder)
    run = "run_name" if builder.values.get("run_name") else None
    convert_loggers(builder, "report_to", project=None, run=run)
    if builder.trainer == "grpo":
        convert_loss(builder, minibatches)
        convert_sample_filters(builder)
        convert_credit(builder)
        _convert_rewards(builder)
        convert_divergence(builder, minibatches)
        _convert_kl(builder, off_policy=minibatches > 1 or builder.value("num_iterations") > 1)
        _convert_correction(builder)
    else:
        _convert_teacher(builder)
    _report_other_arguments(builder)
    return builder.report()


def _convert_options(builder: TrlRecipeBuilder) -> None:
    for key, option in _OPTIONS.items():
        if builder.trainer != "grpo" and key in _OF_REWARDS:
            continue
        value = builder.value(key)
        if key == "shuffle_dataset" and builder.trainer == "gkd":
            builder.convert("nothing: rows come in a random order, also in TRL", key)
        elif value is not None and not (key in _UNCHANGED and builder.is_default(key)):
            builder.set(option, value, key)
        else:
            builder.convert("nothing: it is the default", key)
    for key in ("optim", "lr_scheduler_type"):
        option, names = CHOICES[key]
        name = str(builder.value(key)).lower()
        if key == "optim" and builder.is_default(key):
            builder.convert("nothing: it is the default", key)
        elif name in names:
            builder.set(option, names[name], key)
        else:
            builder.reject(
                key, f"{option} supports these: {', '.join(names)}", changes_training=True, even_default=True
            )
    convert_kernels(builder, "use_liger_kernel")
    betas = ("adam_beta1", "adam_beta2")
    if not all(builder.is_default(key) for key in betas):
        builder.set("train.betas", [float(builder.values.get(key) or _UNCHANGED[key]) for key in betas], *betas)
    builder.convert("nothing: it is the default", *betas)
    if not builder.values.get("model_name_or_path"):
        reason = "the configuration names no model: set model.path"
        builder.reject("model_name_or_path", reason, changes_training=True, even_default=True)


def _convert_model(builder: TrlRecipeBuilder) -> None:
    """Set the types of weights and products, and the adapter."""
    init = builder.values.get("model_init_kwargs") or {}
    dtype = str(builder.values.get("dtype") or init.get("dtype") or init.get("torch_dtype") or builder.value("dtype"))
    dtype = dtype.removeprefix("torch.")
    if dtype == "auto":
        dtype = "bfloat16"
        builder.assume("dtype", "auto", "most checkpoints are in bfloat16: check model.dtype")
    if dtype in ("float32", "bfloat16"):
        builder.set("model.dtype", dtype, "dtype")
    else:
        builder.reject("dtype", "model.dtype is float32 or bfloat16", changes_training=True, even_default=True)
    autocast = builder.values.get("bf16") is not False and not builder.values.get("fp16")  # TRL's default is bf16
    if builder.get("model.dtype") == "float32" and autocast:
        builder.set("model.autocast", True, "bf16")
    builder.convert("nothing: model.dtype says it", "bf16")
    for key, value in init.items():
        if key not in ("dtype", "torch_dtype", "attn_implementation", "device_map", "use_cache") and value is not None:
            builder.reject_value(
                "model_init_kwargs", {key: value}, "turnwise has no such option of a model", changes_training=True
            )
    builder.convert("model.dtype", "model_init_kwargs")
    _convert_adapter(builder)


_ADAPTER = ("lora_rank", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora")


def _convert_adapter(builder: TrlRecipeBuilder) -> None:
    if not builder.values.get("use_peft"):
        for key in (*_ADAPTER, "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant"):
            builder.reject(key, "it has no effect without use_peft, also not in TRL")
        builder.convert("nothing: all weights are trained", "use_peft")
        return
    builder.set("model.lora.rank", builder.value("lora_rank"), "use_peft", "lora_rank")
    builder.set("model.lora.alpha", float(builder.value("lora_alpha")), "lora_alpha")
    for key, option in (("use_rslora", "model.lora.rslora"), ("use_dora", "model.lora.dora")):
        if builder.values.get(key):
            builder.set(option, True, key)
    if builder.value("lora_dropout"):
        reason = (
            "there is no dropout (TRL's default is 0.05): the trainer's probabilities would not be those of the engine"
        )
        builder.reject("lora_dropout", reason, changes_training=True, even_default=True)
    builder.convert("nothing: there is no dropout", "lora_dropout")
    given = builder.values.get("target_modules")
    names = [str(name) for name in (given if isinstance(given, list) else [given])] if given else []
    if names == ["all-linear"]:
        builder.convert("nothing: all linear layers have an adapter", "target_modules")
    elif names:
        builder.set("model.lora.target_modules", names, "target_modules")
    else:
        builder.set("model.lora.target_modules", ["q_proj", "v_proj"])
        reason = (
            "peft chooses these layers of most models if none are named; without model.lora.target_modules, it is all"
        )
        builder.assume("target_modules", None, reason)
    if builder.values.get("load_in_4bit"):
        builder.set("model.quantization.bits", 4, "load_in_4bit")
        builder.set("model.quantization.type", builder.value("bnb_4bit_quant_type") or "nf4", "bnb_4bit_quant_type")
        if builder.values.get("use_bnb_nested_quant"):
            builder.set("model.quantization.double", True, "use_bnb_nested_quant")


def _convert_data(builder: TrlRecipeBuilder) -> None:
    values = builder.values
    mixture = values.get("datasets") or []
    if mixture:
        _convert_mixture(builder, mixture)
    elif values.get("dataset_name"):
        builder.set("data.train", values["dataset_name"], "dataset_name")
        if values.get("dataset_config"):
            builder.set("data.subset", values["dataset_config"], "dataset_config")
    elif not _convert_script_data(builder):
        reason = "the configuration names no data set: set data.train"
        builder.reject("dataset_name", reason, changes_training=True, even_default=True)
    split, held_out = values.get("dataset_train_split") or "train", values.get("dataset_test_split") or "test"
    if split != "train":
        builder.set("data.split", split, "dataset_train_split")
    builder.convert("nothing: it is the default", "dataset_train_split")
    evaluates = str(values.get("eval_strategy") or "no").lower() not in ("no", "false")
    if evaluates and builder.get("data.train") is not None:
        own = builder.get("data.eval")
        builder.set("data.eval", own or builder.get("data.train"), "eval_strategy")
        if held_out != "test":
            builder.set("data.eval_split", held_out, "dataset_test_split")
        steps = values.get("eval_steps")
        if isinstance(steps, float):
            builder.reject("eval_steps", SHARE_OF_STEPS.format("eval.every"))
        elif steps:
            builder.set("eval.every", steps, "eval_steps")
        if builder.trainer == "grpo" and not values.get("num_generations_eval"):
            builder.set("eval.samples_per_row", builder.value("num_generations"), "num_generations")
        reason = "TRL evaluates on the same data set's split dataset_test_split: set data.eval to null if there is none"
        if own is None:
            builder.assume("data.eval", builder.get("data.train"), reason)
    else:
        builder.convert("nothing: there are no evaluations", "eval_strategy", "eval_steps")
    builder.convert("nothing: it is the default", "dataset_test_split")
    if (longest := values.get("max_prompt_length")) is not None:
        builder.set("data.max_prompt_tokens", longest, "max_prompt_length")
        builder.assume(
            "max_prompt_length",
            longest,
            "TRL cut longer prompts from the left; here rows with longer prompts are not used",
        )
    if values.get("data_seed") in (None, builder.value("seed")):
        builder.convert("seed", "data_seed")
    else:
        builder.reject("data_seed", "one seed is used for everything: seed")


def _convert_mixture(builder: TrlRecipeBuilder, mixture: Any) -> None:
    """Set data.train to the data sets of `datasets`, a list of mappings with `path`."""
    if not isinstance(mixture, list) or not all(isinstance(one, Mapping) and one.get("path") for one in mixture):
        raise ConfigError(f"datasets: {mixture!r:.80} is no list of mappings with path")
    paths = [str(one["path"]) for one in mixture]
    builder.set("data.train", paths[0] if len(paths) == 1 else paths, "datasets")
    if len(mixture) == 1 and mixture[0].get("name"):
        builder.set("data.subset", mixture[0]["name"], "datasets")
    for one in mixture:
        left = {key: one[key] for key in ("data_dir", "data_files", "fraction") if one.get(key) is not None}
        left |= {key: one[key] for key in ("name", "split") if one.get(key) not in (None, "train") and len(mixture) > 1}
        if left:
            reason = "write the rows to a file, and name it in data.train (data.weights mixes data sets)"
            builder.reject_value("datasets", {"path": one["path"], **left}, reason, changes_training=True)
    builder.reject(
        "test_split_size", "held-out rows must be a separate file or split: set data.eval", changes_training=True
    )


def _convert_conversation(builder: TrlRecipeBuilder) -> None:
    length = "max_new_tokens" if builder.trainer == "gkd" else "max_completion_length"
    builder.set("limits.tokens_per_turn", builder.value(length), length)
    rounds, script = builder.values.get("max_tool_calling_iterations"), builder.given.script
    calls = script is not None and script.calls_tools
    # without a bound of calls, TRL bounds tokens only: there is no turn without a token
    unbounded = builder.value(length) if calls else 1
    builder.set("limits.turns", unbounded if rounds is None else rounds + 1, "max_tool_calling_iterations")
    if script is not None:
        _convert_tools(builder, script.tools)
    if not (calls or rounds):
        return
    # TRL bounds the whole completion: a tool result that would exceed it is dropped, and the last answer is cut there
    builder.set("limits.response_tokens", builder.value(length), length)
    if calls or rounds is None:
        return
    reason = (
        "name the tools in `tools`, or the class of environment_factory in environment={use: "
        "turnwise.compat.trl:TrlEnvironments, arguments: {environment: file.py:Class}}; with neither, set limits.turns=1 and "
        "remove limits.response_tokens (docs/trl.md)"
    )
    builder.assume("limits.turns", rounds + 1, reason)


def _convert_tools(builder: TrlRecipeBuilder, names: Sequence[str]) -> None:
    """Set tools to functions of the script, or that it imports."""
    found = [_of_script(builder, name, "tools") or _imported(builder, name) for name in names]
    if found:
        builder.set("tools", [use for use in found if use is not None], "tools")


_ENGINE = (
    "vllm_mode", "vllm_enable_sleep_mode", "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout",
    "vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size",
)  # fmt: skip


def _convert_engine(builder: TrlRecipeBuilder) -> None:
    values = builder.values
    if not values.get("use_vllm"):
        for key in _ENGINE:
            builder.reject(key, "it has no effect without use_vllm: the embedded engine samples")
        builder.convert("nothing: the embedded engine samples", "use_vllm")
        return
    builder.set("engine.name", "vllm", "use_vllm")
    reason = "vLLM must be installed (docs/engines.md); without it, use the embedded engine: engine={name: local}"
    builder.assume("engine.name", "vllm", reason)
    if values.get("vllm_max_model_length"):
        builder.set("limits.context", values["vllm_max_model_length"], "vllm_max_model_length")
    if values.get("vllm_mode") == "server":
        host, port = values.get("vllm_server_host") or "0.0.0.0", values.get("vllm_server_port") or 8000
        here = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
        address = values.get("vllm_server_base_url") or here
        builder.set("engine.url", address, "vllm_mode", *_ENGINE[2:5])
        reason = "start it with `vllm serve` as docs/engines.md says, in place of `trl vllm-serve`"
        builder.assume("engine.url", address, reason)
        for key in (
            "vllm_gpu_memory_utilization",
            "vllm_tensor_parallel_size",
            "vllm_enable_sleep_mode",
            "vllm_server_timeout",
        ):
            builder.reject(key, "it is an argument of the server, which you start")
        return
    builder.convert("engine.name", "vllm_mode")
    if values.get("vllm_enable_sleep_mode"):
        builder.set("engine.sleep", True, "vllm_enable_sleep_mode")
    if (parallel := values.get("vllm_tensor_parallel_size") or 1) > 1:
        builder.set("engine.tensor_parallel", parallel, "vllm_tensor_parallel_size")
    if (share := values.get("vllm_gpu_memory_utilization")) is not None:
        builder.set("engine.arguments", ["--gpu-memory-utilization", str(share)], "vllm_gpu_memory_utilization")
    for key in _ENGINE[2:6]:
        builder.reject(key, "it has no effect without vllm_mode=server, also not in TRL")
    builder.convert("nothing: it is the default", *_ENGINE)


def _convert_processes(builder: TrlRecipeBuilder) -> None:
    """Set `cluster` from `num_processes`, an argument of accelerate that the command line and some files have."""
    processes = builder.given.processes
    if processes > 1:
        builder.set("cluster.launcher", "local", "num_processes")
        builder.set("cluster.trainers", processes, "num_processes")
        builder.assume(
            "cluster.trainers", processes, "change it if your machine has another number of GPUs (docs/cluster.md)"
        )
    elif not builder.has("num_processes"):
        reason = (
            "train.batch_size and train.minibatches depend on the number of devices: for several, convert again with "
            "--num_processes"
        )
        builder.assume("num_processes", 1, reason)
    builder.convert("nothing: one process trains", "num_processes")


def _convert_files(builder: TrlRecipeBuilder) -> None:
    values = builder.values
    every, strategy = values.get("save_steps"), str(values.get("save_strategy") or "steps").lower()
    if strategy != "steps":
        builder.reject(
            "save_strategy", "checkpoint.every is a number of steps; without it, checkpoints take 3 % of the time"
        )
        builder.reject("save_steps", f"it has no effect with save_strategy={strategy}")
    elif isinstance(every, float):
        builder.reject("save_steps", SHARE_OF_STEPS.format("checkpoint.every"))
    elif every:
        builder.set("checkpoint.every", every, "save_steps")
    builder.convert("checkpoint.every", "save_strategy")
    if values.get("use_cpu"):
        builder.set("model.device", "cpu", "use_cpu")
    builder.convert("nothing: accelerate is not used", "accelerator_config")
    if values.get("full_determinism"):
        builder.set("deterministic", True, "full_determinism")


def _convert_script_data(builder: TrlRecipeBuilder) -> bool:
    """Set data.train and data.eval to the data sets of a script: of the hub, or files that one line of the script writes. Returns
    whether the script names rows."""
    script = builder.given.script
    if script is None or "train_dataset" not in script.rows:
        return False
    for key, option, file in (
        ("train_dataset", "data.train", "train.jsonl"),
        ("eval_dataset", "data.eval", "eval.jsonl"),
    ):
        if (text := script.rows.get(key)) is None:
            continue
        name, _, split = script.hub.get(key, "").rpartition(":")
        if not name:
            builder.set(option, file, key)
            builder.assume(option, file, _written_by(builder, f"{text}.to_json({file!r})"))
            continue
        builder.set(option, name, key)
        if split:
            builder.set("data.split" if option == "data.train" else "data.eval_split", split, key)
    return True


_ROWS = "my_rows.py"


def _written_by(builder: TrlRecipeBuilder, statement: str) -> str:
    """What writes a data set of the script as a file: a program that `--out` writes, or a line to be added."""
    program_file = builder.given.path.parent / _ROWS
    if program(builder.given.path, [statement]) is None:
        return f"the file must be written once: in {builder.given.path}, where the trainer is made, {statement}"
    if program_file.exists():
        return f"{program_file} must write the file ({statement}), and is left as it is: run it once"
    builder.writes.append(statement)
    return f"`python {program_file}`, which --out writes, writes the file: run it once ({statement})"


_REWARDS: Mapping[str, dict[str, Any]] = {
    **{
        name: {"function": f"trl.rewards:{name}"}
        for name in ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
    },
    "get_soft_overlong_punishment": {
        "function": "trl.rewards:get_soft_overlong_punishment",
        "arguments": {"max_completion_len": 1280, "soft_punish_cache": 256},
    },
}
"""The reward functions of `trl grpo`, and its arguments of them."""


def _convert_rewards(builder: TrlRecipeBuilder) -> None:
    """Set reward.batch. Names are TRL's own functions, or paths such as `my_lib.rewards.exact`."""
    script = builder.given.script
    names = builder.values.get("reward_funcs") or ([] if script is None else script.rewards)
    weights = builder.values.get("reward_weights") or [1.0] * len(names)
    if len(weights) != len(names):
        reason = f"{len(weights)} weights for {len(names)} rewards"
        builder.reject("reward_weights", reason, changes_training=True)
        weights = [1.0] * len(names)
    rewards: list[dict[str, Any]] = []
    texts = {"texts": True} if _has_text_prompts(builder) else {}
    for name, weight in zip(names, weights, strict=True):
        arguments = _REWARDS.get(name.removeprefix("trl.rewards."))
        function = None if arguments else _of_script(builder, name, "reward_funcs") or _imported(builder, str(name))
        arguments = arguments or (function and {"function": function} | texts)
        if arguments is None:
            reason = (
                "it is a function of the script, not of `trl grpo`: add {use: turnwise.compat.trl:TrlReward, arguments: "
                "{function: file.py:name}} to reward.batch (docs/trl.md)"
            )
            builder.reject_value("reward_funcs", name, reason, changes_training=True)
            continue
        weighted = {} if weight == 1 else {"weight": float(weight)}
        rewards.append({"use": "turnwise.compat.trl:TrlReward", "name": str(name), **weighted, "arguments": arguments})
    if rewards:
        builder.set("reward.batch", rewards, "reward_funcs", "reward_weights")
    elif not names:
        reason = "no reward functions are named (a script gives them to GRPOTrainer): name them in reward.batch (docs/trl.md)"
        builder.reject("reward_funcs", reason, changes_training=True, even_default=True)
    builder.convert("reward.batch", "reward_weights")


def _has_text_prompts(builder: TrlRecipeBuilder) -> bool:
    """Whether the data are a file whose first prompt is a text: then TRL gives reward functions texts. False for other data."""
    source = str(builder.get("data.train"))
    if not Path(source).is_file():
        return False
    try:
        first = next(iter(records(source, split="train", subset=None)), None)
    except DataError:  # the check of the recipe says what is wrong
        return False
    return first is not None and isinstance(first.record.get("prompt"), str)


_BESIDE = "my_rewards.py"


def _of_script(builder: TrlRecipeBuilder, name: str, key: str) -> str | None:
    """`file.py:name` of a function that the script defines and gives to `key`; None for another name. The file is the script, or
    one beside it if the script would train when it is imported."""
    script = builder.given.script
    if script is None or name not in script.defined:
        return None
    if not script.trains_when_imported:
        return f"{builder.given.path}:{name}"
    beside = builder.given.path.parent / _BESIDE
    would = f"{builder.given.path} would train when it is imported"
    if beside.exists():
        builder.assume(key, name, f"{would}: {beside} must have this function, and is left as it is")
    elif definitions(builder.given.path, [name]) is None:
        builder.assume(key, name, f"{would}: copy this function, with what it uses, into {beside}")
    else:
        builder.copied.append(name)
        builder.assume(key, name, f"{would}: --out copies this function, with what it uses, into {beside}")
    return f"{beside}:{name}"


def _imported(builder: TrlRecipeBuilder, name: str) -> str | None:
    """`file.py:name` or `module:name` of a function that `name` imports, such as `my_lib.rewards.exact`; None for a name without
    module."""
    module, _, function = name.rpartition(".")
    if not module:
        return None
    # TRL imports from the working directory first, and Python a script's modules from the script's folder
    places = [Path()] if builder.given.script is None else [builder.given.path.parent, Path()]
    files = [(place / Path(*module.split("."))).with_suffix(".py") for place in places]
    return f"{next((file for file in files if file.is_file()), module)}:{function}"


def _convert_kl(builder: TrlRecipeBuilder, *, off_policy: bool) -> None:
    """Set loss.kl_estimator: TRL multiplies k3 by the ratio, which is 1 with one optimizer step on each batch."""
    key = "use_bias_correction_kl"
    if builder.value("beta") and builder.values.get(key) is not False and off_policy:
        builder.set("loss.kl_estimator", "k3_corrected", key)
    builder.convert("nothing: k3 is the default, and the ratio is 1", key)


_CORRECTIONS: Mapping[str, dict[str, str]] = {
    "token_truncate": {"action": "truncate", "level": "token"},
    "token_mask": {"action": "mask", "level": "token"},
    "sequence_truncate": {"action": "truncate", "level": "sequence"},
    "sequence_mask": {"action": "mask", "level": "sequence"},
}


def _convert_correction(builder: TrlRecipeBuilder) -> None:
    """Set correction: with vLLM, TRL weighs by the ratio to the engine's probabilities unless it is turned off."""
    switch = "vllm_importance_sampling_correction"
    mode, high, low = (f"vllm_importance_sampling_{name}" for name in ("mode", "clip_max", "clip_min"))
    if not builder.values.get("use_vllm") or builder.values.get(switch) is False:
        for key in (mode, high, low):
            builder.reject(key, f"it has no effect without use_vllm and {switch}, also not in TRL")
        builder.convert("nothing: nothing is corrected", switch)
        return
    known = _CORRECTIONS.get(str(builder.value(mode)))
    if known is None:
        builder.reject(mode, f"it can be {', '.join(_CORRECTIONS)}", changes_training=True, even_default=True)
        return
    lower = builder.values.get(low)
    if known["action"] == "mask" and lower is not None:  # a mask with both bounds
        known = {**known, "action": "icepop"}
    for option, value in known.items():
        builder.set(f"correction.{option}", value, mode, switch)
    builder.set("correction.high", builder.value(high), high)
    if lower is not None:
        builder.set("correction.low", lower, low)
    builder.convert("nothing: there is no lower bound", low)


def _convert_teacher(builder: TrlRecipeBuilder) -> None:
    """Set teacher, credit and loss of DistillationTrainer, ServerDistillationTrainer and GKDTrainer."""
    builder.set("credit.name", "none")
    builder.set("loss.normalizer", "token")
    beta = builder.value("beta")
    if builder.trainer == "server":
        _convert_server(builder, beta)
    else:
        path = builder.values.get("teacher_model_name_or_path")
        if path is None:
            reason = "a script gives the teacher to the trainer: set teacher.path"
            builder.reject("teacher_model_name_or_path", reason, changes_training=True, even_default=True)
            path = "TEACHER"
        builder.set("teacher.path", path, "teacher_model_name_or_path")
        builder.set("teacher.signal", "divergence")
        _convert_divergence(builder, beta)
        if builder.get("cluster.launcher") is not None:
            reason = "on several devices, the divergence is over the teacher's likely tokens only: set 64"
            builder.assume("teacher.top_k", None, reason)
    init = builder.values.get("teacher_model_init_kwargs") or {}
    dtype = str(init.get("dtype") or init.get("torch_dtype") or "").removeprefix("torch.")
    if dtype in ("float32", "bfloat16") and dtype != builder.get("model.dtype"):
        builder.set("teacher.dtype", dtype, "teacher_model_init_kwargs")
    builder.convert("teacher.dtype", "teacher_model_init_kwargs")
    for key in ("top_p", "top_k", "min_p"):
        if builder.values.get(key) not in (None, 0, 1):
            reason = (
                "the divergence is that of complete distributions, and the student must sample from its own: remove it"
            )
            builder.reject(key, reason, changes_training=True)
            builder.recipe.get("sampling", {}).pop(key, None)
    if builder.trainer == "gkd":
        convert_samples(builder)
        builder.reject("max_length", "prompts are not cut here: limits.context bounds a conversation")
    for key in _OF_REWARDS:
        builder.reject(key, "distillation learns nothing from rewards")


def _convert_divergence(builder: TrlRecipeBuilder, beta: float) -> None:
    if beta in (0, 1):
        builder.set("teacher.divergence", "reverse_kl" if beta else "forward_kl", "beta")
    else:
        builder.set("teacher.divergence", "jsd", "beta")
        builder.set("teacher.beta", beta, "beta")


def _convert_server(builder: TrlRecipeBuilder, beta: float) -> None:
    """TRL's server gives the teacher's likely tokens (`beta` 0), or the sampled one (`beta` above 0)."""
    url = builder.values.get("teacher_model_server_url")
    if url is None:
        reason = "name the teacher's server: set teacher.url"
        builder.reject("teacher_model_server_url", reason, changes_training=True, even_default=True)
    else:
        builder.set("teacher.url", url, "teacher_model_server_url")
        builder.assume("teacher.url", url, "start the teacher with `vllm serve` in place of `trl vllm-serve`")
    builder.convert("nothing: the server has loaded the teacher", "teacher_model_name_or_path")
    if builder.value("temperature") != 1:
        reason = "a server gives log-probabilities at temperature 1: sample from these (temperature=1)"
        builder.reject("temperature", reason, changes_training=True)
    if beta == 1:
        builder.set("teacher.signal", "sampled", "beta", "loss_top_k", "reverse_kl_top_1_mode")
        reason = (
            "TRL's loss is the divergence of two classes, the sampled token and all others; here the log-ratio of the sampled "
            "token is its advantage, whose expected gradient is that of the complete reverse KL"
        )
        builder.assume("beta", beta, reason)
        builder.convert("nothing: only the sampled token counts", "loss_add_tail")
        return
    builder.set("teacher.signal", "divergence")
    builder.set("teacher.top_k", builder.value("loss_top_k"), "loss_top_k")
    _convert_divergence(builder, beta)
    if beta:
        reason = "TRL's likely token is the sampled one with beta above 0; here it is the teacher's: set beta=0 or 1"
        builder.reject("beta", reason, changes_training=True, even_default=True)
    if builder.values.get("loss_add_tail") is False:
        builder.reject_value("loss_add_tail", False, "all other tokens are one class", changes_training=True)
    builder.convert("nothing: all other tokens are one class", "loss_add_tail")


def _report_other_arguments(builder: TrlRecipeBuilder) -> None:
    """Record every argument that has not been looked at yet."""
    reported = {*builder.converted, *(rejected.key for rejected in builder.unsupported)}
    for key in sorted(set(builder.values) - reported):
        written = builder.given.names[key]
        if builder.is_default(key):
            builder.convert("nothing: it is the default", key)
        elif key in _FIXED:
            accepted, reason = _FIXED[key]
            if builder.values[key] in accepted:
                builder.convert("nothing: turnwise always works this way", key)
            else:
                builder.reject(key, reason, changes_training=True)
        elif hint := called_here(written):
            builder.reject(key, hint.removeprefix("; "))
        elif reason := _needless(key):
            builder.reject(key, reason)
        else:
            near = nearest(written, {*_OPTIONS, *_FIXED, *_DEFAULTS, *_UNCHANGED})
            builder.reject(key, f"TRL 1.16 has no such argument{near}", changes_training=True)


def _needless(key: str) -> str | None:
    return next((reason for pattern, reason in (*_REMAINING, *MACHINERY) if re.fullmatch(pattern, key)), None)
