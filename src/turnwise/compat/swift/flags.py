"""What becomes of each argument of ms-swift: tables, and nothing that computes.

Arguments that become one option as they are, those whose value must be the one that holds here anyway, and those that are
about machinery which is not here. `arguments` does the rest, where several arguments make one option.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ALIASES", "CHOICES", "DEFAULTS", "FIXED", "LISTS", "MACHINERY", "OPTIONS", "REWARDS"]

REWARDS = frozenset({"math", "toolbench"})
"""Reward functions that come with ms-swift and not with us; a plugin may have one of the same name."""

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
    "num_iterations": 1,
    "per_device_train_batch_size": 1,
    "warmup_ratio": 0.0,
    "num_train_epochs": 3.0,
    "seed": 42,
}
"""Of ms-swift, where they differ from ours or are needed to compute with."""

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
    "lr": "learning_rate",  # of `megatron rlhf`, and the four below
    "train_iters": "max_steps",
    "micro_batch_size": "per_device_train_batch_size",
    "lr_warmup_fraction": "warmup_ratio",
    "lr_warmup_iters": "warmup_steps",
    "plugin": "external_plugins",
    "stop": "stop_words",
    "dtype": "torch_dtype",
}
"""Other names of the same argument."""

LISTS = frozenset(
    {"dataset", "val_dataset", "external_plugins", "reward_funcs", "reward_weights", "stop_words", "report_to"}
)
"""Arguments that take several values."""

OPTIONS: Mapping[str, str] = {
    "model": "model.path",
    "system": "data.system_prompt",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "min_p": "sampling.min_p",
    "stop_words": "sampling.stop",
    "vllm_max_model_len": "limits.context",
    "num_generations": "train.group_size",
    "num_iterations": "train.ppo_epochs",
    "beta": "train.kl_coef",
    "learning_rate": "train.lr",
    "weight_decay": "train.weight_decay",
    "max_grad_norm": "train.max_grad_norm",
    "async_generate": "train.overlap",
    "dataset_shuffle": "data.shuffle",
    "seed": "seed",
    "output_dir": "output",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
}
"""Arguments that become an option as they are."""

CHOICES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "torch_dtype": ("model.dtype", {"bfloat16": "bfloat16", "float32": "float32"}),
    "loss_type": ("train.loss_average", {"grpo": "sequence", "bnpo": "token", "dapo": "token"}),
    "scale_rewards": (
        "credit.scale",
        {"group": "std", "true": "std", "none": "none", "false": "none"},
    ),
    "lr_scheduler_type": (
        "train.lr_schedule",
        {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"},
    ),
}
"""Arguments whose values have other names here; other values of theirs are not known here."""

FIXED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    # argument: the values of it that hold here anyway, and why another cannot
    "rlhf_type": (("grpo",), "only GRPO has a place in a recipe"),
    "tuner_type": (("full",), "all parameters are trained here, there is no LoRA; mind that train.lr for all is lower"),
    "advantage_estimator": (("grpo",), "credit.name knows grpo only"),
    "importance_sampling_level": (("token",), "the ratio is each token's here"),
    "repetition_penalty": ((1, 1.0), "sampling has no repetition penalty here"),
    "delta": ((None,), "there is no upper bound of the ratio beside train.clip_high"),
    "dynamic_sample": ((False,), "groups of equal rewards are kept; they have no gradient"),
    "overlong_filter": (
        (False,),
        "answers that were cut are trained on; a reward function can tell them (is_truncated)",
    ),
    "kl_in_reward": ((False,), "the divergence is a part of the loss here (train.kl_coef)"),
    "sync_ref_model": ((False,), "the reference stays the model as it was before training"),
    "top_entropy_quantile": ((1, 1.0), "all tokens are learnt from, whatever their entropy"),
    "off_policy_sequence_mask_delta": ((None,), "no sequence is left out for being off-policy"),
    "reward_model": ((None, []), "a reward model is asked by a reward function of yours here: reward.trajectory"),
    "reward_model_plugin": (
        (None, []),
        "a reward model is asked by a reward function of yours here: reward.trajectory",
    ),
    "ref_model": ((None,), "the reference is the model as it was before training"),
    "teacher_model": ((None,), "there is no distillation here"),
    "response_prefix": ((None, ""), "what an answer begins with is the chat template's affair, or a scheduler's"),
    "enable_thinking": (
        (None, True),
        "the chat template is rendered with its own defaults: change it in the tokenizer",
    ),
    "add_non_thinking_prefix": ((None,), "the chat template is rendered with its own defaults"),
    "agent_template": ((None,), "tool calls are written as the model's own template does (tool_format)"),
    "truncation_strategy": (
        (None, "delete"),
        "no prompt is cut here: a row that leaves no room for an answer breaks its own conversation",
    ),
    "num_generations_eval": ((None, 1), "eval.samples_per_row says how many; set it"),
    "quant_method": ((None,), "models are not quantised here"),
    "quant_bits": ((None,), "models are not quantised here"),
    "adapters": ((None, []), "there is no LoRA here: merge the adapter into the model"),
    "freeze_parameters": ((None, []), "all parameters are trained here"),
    "streaming": ((False,), "a data set is read whole"),
    "tree_rollout": ((False,), "conversations of a group are held apart from each other"),
}
"""Arguments that have one value here. Another value makes another training, which is told."""

MACHINERY: tuple[tuple[str, str], ...] = (
    # patterns, the first that fits; the result of training does not depend on these
    (r"vllm_server_pass_dataset", "all columns of a row are in infer_request.data_dict always"),
    (r"rollout_importance_sampling_.*|log_rollout_offpolicy_metrics", "the engine works on the trainer's own weights, so "
     "there is no mismatch to correct; ratio/max_deviation in the metrics is how far they are apart"),
    (r"use_vllm|vllm_.*|sleep_level|offload_.*|move_model_batches|use_ray|infer_backend|lmdeploy_.*|sglang_.*|host|port|"
     r"api_key|max_logprobs", "the engine is the embedded one: options under engine"),
    (r"deepspeed|fsdp.*|ddp_.*|zero.*|tp_.*|pp_.*|sequence_parallel_size|padding_free|packing|use_liger_kernel|"
     r"gradient_checkpointing.*|attn_impl|vit_gradient_checkpointing|dataloader_.*|dataset_num_proc|torch_compile|"
     r"load_from_cache_file|use_logits_to_keep|tensor_model_parallel_size|.*_parallel_size|bf16|fp16|device_map|optim|"
     r"average_tokens_across_devices|ddp|local_rank|attention_backend|recompute_.*|sequence_parallel|.*_fusion|"
     r"optimizer_cpu_offload|use_precision_aware_optimizer|colocate_groups|gpus",
     "about memory and devices: train.micro_batch_tokens and model.device"),
    (r"logging_.*|report_to|log_.*|run_name|wandb_.*|swanlab_.*|tensorboard.*|num_completions_to_print|"
     r"disable_tqdm|add_version|create_checkpoint_symlink|push_to_hub|hub_.*|use_hf|check_model|ignore_args_error|"
     r"save_only_model|save_strategy|save_safetensors|safe_serialization|eval_strategy|eval_on_start|metric.*|"
     r"load_best_model_at_end|no_save_(optim|rng)|no_load_(optim|rng)|finetune|logging_dir|overwrite_output_dir|include_.*|task_type|per_device_eval_batch_size",
     "about files and logs: the run's directory holds all (docs/record.md)"),
    (r"model_type|template|template_backend", "the model says what it is, and its own chat template is used"),
    (r"lora_.*|target_modules|target_regex|target_parameters|modules_to_save|use_rslora|use_dora|init_weights|"
     r"merge_lora|vera_.*|adalora_.*|galore.*|lorap_.*", "of LoRA, which is not here"),
    (r"freeze_vit|freeze_aligner|freeze_llm|vit_lr|aligner_lr|max_pixels|min_pixels", "of models that see: all parameters "
     "are trained at train.lr; pixels are the processor's affair"),
    (r"resume_from_checkpoint|resume_only_model", "a run goes on with resume=auto"),
)  # fmt: skip
"""What has no place because it is about machinery that is not here."""
