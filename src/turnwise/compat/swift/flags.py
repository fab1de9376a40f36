"""Tables of ms-swift's arguments.

Arguments that become one option with the same value, arguments that must have the value which turnwise always uses, and
arguments of machinery that does not exist here. `arguments` and the `convert_*` modules convert the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ALIASES", "CHOICES", "DEFAULTS", "FIXED", "LISTS", "MACHINERY", "OPTIONS", "REWARDS", "SHARE_OF_STEPS"]

REWARDS = frozenset({"toolbench"})
"""Reward functions of ms-swift that turnwise does not have. A plugin may define a function of the same name."""

SHARE_OF_STEPS = "a value below 1 is a share of all steps in ms-swift, but {} is a number of steps: set it"
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
}
"""ms-swift's defaults that differ from ours or that a computation needs."""

ALIASES: Mapping[str, str] = {
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
    "rlhf_type": (("grpo",), "only GRPO can be converted"),
    "repetition_penalty": ((1, 1.0), "there is no repetition penalty here"),
    "top_entropy_quantile": ((1, 1.0), "all tokens are trained on, whatever their entropy"),
    "reward_model": ((None, []), "call the reward model in a reward function: reward.trajectory"),
    "reward_model_plugin": (
        (None, []),
        "call the reward model in a reward function: reward.trajectory",
    ),
    "teacher_model": ((None,), "there is no distillation here"),
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
    "quant_method": ((None,), "models are not quantized here"),
    "quant_bits": ((None,), "models are not quantized here"),
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
    (r"offload_.*|move_model_batches", "the trainer's memory is not offloaded; engine.sleep frees the engine's memory while the "
     "model is trained"),
    (r"vllm_.*", "give the argument to vLLM in engine.arguments"),
    (r"use_ray|infer_backend|lmdeploy_.*|sglang_.*|api_key|max_logprobs", "about other engines: options under engine"),
    (r"fsdp_.*|zero.*|ddp|ddp_.*|local_rank", "about memory and devices: for several devices, set cluster=local or "
     "cluster=torchrun (docs/cluster.md)"),
    (r"tp_.*|pp_.*|sequence_parallel(_size)?|tensor_model_parallel_size|(pipeline_model|context|expert_model|expert_tensor)_parallel_"
     r"size", "neither a layer nor a sequence is divided among ranks: the weights of all layers are (docs/cluster.md)"),
    (r"padding_free|packing|use_liger_kernel|"
     r"gradient_checkpointing_kwargs|attn_impl|vit_gradient_checkpointing|dataloader_.*|dataset_num_proc|torch_compile|"
     r"load_from_cache_file|use_logits_to_keep|tensor_model_parallel_size|.*_parallel_size|bf16|fp16|device_map|"
     r"average_tokens_across_devices|ddp|local_rank|attention_backend|recompute_.*|sequence_parallel|.*_fusion|"
     r"optimizer_cpu_offload|use_precision_aware_optimizer|colocate_groups|gpus",
     "about memory and devices: train.micro_batch_tokens and model.device"),
    (r"logging_.*|report_to|log_.*|run_name|wandb_.*|swanlab_.*|tensorboard.*|num_completions_to_print|"
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
