"""Option names of TRL, verl and ms-swift with the turnwise option for each, for hints in error messages."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "ABSENT",
    "CALLED",
    "RENAMED",
    "RENAMED_ARGUMENTS",
    "VALUES",
    "called_here",
    "renamed_arguments",
    "value_hint",
]

CALLED: dict[str, tuple[str, ...]] = {
    "train.lr": ("learning_rate",),
    "train.lr_schedule": ("lr_scheduler_type", "lr_scheduler", "scheduler"),
    "train.warmup_steps": ("warmup_ratio", "lr_warmup_steps", "lr_warmup_steps_ratio"),
    "train.steps": ("max_steps", "total_training_steps", "num_train_epochs", "num_epochs", "total_epochs"),
    "train.batch_size": ("train_batch_size", "per_device_train_batch_size", "rollout_batch_size"),
    "train.group_size": ("num_generations", "n", "rollout_n", "num_return_sequences"),
    "train.minibatches": ("ppo_mini_batch_size", "mini_batch_size", "steps_per_generation", "num_mini_batches"),
    "train.ppo_epochs": ("num_iterations",),
    "train.micro_batch_tokens": (
        "gradient_accumulation_steps", "micro_batch_size", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu",
        "ppo_max_token_len_per_gpu", "use_dynamic_bsz",
    ),
    "loss.kl_coef": ("beta", "kl_loss_coef", "use_kl_loss", "kl_beta"),
    "reward.kl.coef": ("kl_in_reward", "use_kl_in_reward", "init_kl_coef"),
    "reward.kl.estimator": ("kl_penalty",),
    "reward.kl.target": ("target_kl", "kl_ctrl"),
    "reward.kl.horizon": ("kl_horizon",),
    "reference.path": ("ref_model", "reference_model", "ref_model_path", "ref_path"),
    "reference.source": ("disable_adapter", "create_reference_model"),
    "reference.sync_every": ("sync_ref_model", "ref_model_sync_steps"),
    "reference.sync_weight": ("ref_model_mixup_alpha",),
    "loss.entropy_coef": ("entropy_coeff", "entropy_bonus"),
    "loss.clip_low": ("epsilon", "clip_ratio", "clip_ratio_low", "cliprange"),
    "loss.clip_high": ("epsilon_high", "clip_ratio_high"),
    "loss.kl_estimator": ("kl_loss_type", "use_bias_correction_kl"),
    "correction.action": ("rollout_importance_sampling_mode", "vllm_importance_sampling_mode", "rollout_correction"),
    "correction.level": ("rollout_is",),
    "correction.high": (
        "rollout_importance_sampling_threshold", "rollout_is_threshold", "vllm_importance_sampling_clip_max",
    ),
    "correction.low": ("vllm_importance_sampling_clip_min",),
    "correction.normalize_weights": ("rollout_is_batch_normalize",),
    "correction.decoupled": ("bypass_mode",),
    "correction.reject.level": ("rollout_rs",),
    "correction.reject.high": ("rollout_rs_threshold",),
    "correction.off_policy_sequence_mask_delta": ("off_policy_mask_threshold",),
    "loss.dual_clip": ("clip_ratio_c", "delta"),
    "loss.name": ("loss_mode", "policy_loss"),
    "loss.level": ("importance_sampling_level",),
    "loss.tau_positive": ("tau_pos", "sapo_temperature_pos"),
    "loss.tau_negative": ("tau_neg", "sapo_temperature_neg"),
    "train.max_grad_norm": ("grad_clip", "gradient_clipping", "clip_grad_norm"),
    "train.optimizer.name": ("optim", "optimizer_type"),
    "train.optimizer.offload": ("optimizer_offload", "offload_optimizer", "cpu_offload"),
    "train.betas": ("adam_beta1", "adam_beta2", "adam_betas"),
    "loss.normalizer": ("loss_type", "loss_agg_mode", "loss_average"),
    "loss.constant_length": ("loss_scale_factor",),
    "train.max_staleness": (
        "async_generate", "async_training", "staleness_threshold", "max_off_policyness", "max_head_offpolicyness",
        "max_async_level", "async_steps", "max_lag",
    ),
    "train.group_timeout": ("rollout_timeout", "group_deadline"),
    "train.replace_failed": ("resample_failed",),
    "limits.turns": ("max_turns", "num_turns", "max_assistant_turns", "max_user_turns", "max_tool_calling_iterations"),
    "limits.tokens_per_turn": ("max_completion_length", "max_new_tokens", "max_tokens"),
    "limits.response_tokens": ("max_response_length",),
    "limits.context": ("max_prompt_length", "max_length", "max_model_len", "max_seq_length", "max_context_length"),
    "model.path": ("model_name_or_path", "model_name", "model_id", "pretrained_model_name_or_path"),
    "model.gradient_checkpointing": (
        "gradient_checkpointing", "enable_gradient_checkpointing", "activation_checkpointing",
    ),
    "model.lora.rank": (
        "lora", "lora_rank", "lora_r", "use_peft", "peft_config", "peft", "adapter", "tuner_type", "train_type",
    ),
    "model.lora.alpha": ("lora_alpha",),
    "model.lora.target_modules": ("target_modules", "lora_target_modules"),
    "model.lora.rslora": ("use_rslora",),
    "model.lora.dora": ("use_dora",),
    "model.dtype": ("torch_dtype", "fp16", "precision"),
    "model.autocast": ("bf16", "mixed_precision", "amp"),
    "data.train": ("dataset", "dataset_name", "train_files", "train_file", "train_dataset"),
    "data.eval": ("val_files", "eval_dataset", "val_dataset", "validation_files", "test_files"),
    "data.columns": ("prompt_key", "column_mapping", "reward_fn_key"),
    "data.system_prompt": ("system",),
    "data.weights": ("interleave_prob", "probabilities", "mixture_weights", "data_weights"),
    "data.curriculum": ("curriculum_sampler", "difficulty", "pass_rate"),
    "train.dynamic_sampling": (
        "dynamic_sample", "max_resample_times", "filter_groups", "max_num_gen_batches", "filter_zero_std",
    ),
    "train.overlong_filter": ("mask_truncated_completions", "overlong_filtering", "filter_overlong"),
    "data.shuffle": ("shuffle_dataset",),
    "data.max_rows": ("max_samples", "train_max_samples"),
    "reward.batch": ("reward_funcs", "reward_functions"),
    "reward.trajectory": ("reward_fn", "custom_reward_function", "reward_model"),
    "credit.name": ("adv_estimator", "advantage_estimator"),
    "credit.scale": ("scale_rewards", "norm_adv_by_std_in_grpo", "f_norm"),
    "credit.gamma": ("discount", "discount_factor"),
    "credit.lam": ("gae_lambda", "lambda"),
    "critic.lr": ("critic_lr", "value_lr", "learning_rate_critic"),
    "critic.clip": ("cliprange_value", "value_clip", "vf_clip", "clip_range_vf"),
    "critic.path": ("value_model", "value_model_path", "critic_model_path"),
    "critic.warmup_steps": ("critic_warmup", "value_pretrain_steps"),
    "credit.turn_gamma": ("high_level_gamma",),
    "credit.whiten": ("whiten_advantages", "whiten_rewards"),
    "credit.omega": ("step_advantage_w",),
    "checkpoint.every": ("save_steps", "save_freq", "save_strategy"),
    "checkpoint.keep": ("save_total_limit", "max_actor_ckpt_to_keep"),
    "engine.memory_gb": ("gpu_memory_utilization", "vllm_gpu_memory_utilization", "sglang_mem_fraction_static"),
    "engine.tensor_parallel": (
        "tensor_parallel_size", "tensor_model_parallel_size", "vllm_tensor_parallel_size", "tp_size",
    ),
    "engine.data_parallel": ("data_parallel_size", "vllm_data_parallel_size", "dp_size"),
    "engine.sleep": ("sleep_level", "vllm_enable_sleep_mode", "enable_sleep_mode", "free_cache_engine"),
    "engine.name": ("use_vllm", "rollout_backend"),
    "engine.mode": ("vllm_mode",),
    "engine.url": ("base_url", "api_base", "openai_base_url"),
    "engine.api_key_env": ("api_key", "openai_api_key"),
    "eval.samples_per_row": ("num_trials", "n_samples", "num_return_samples"),
    "eval.every": ("eval_steps", "test_freq", "eval_strategy", "evaluation_strategy"),
    "environment": ("multi_turn_scheduler", "interaction", "env", "environment_factory", "multi_turn"),
    "tools": ("tool_config_path", "function_tool"),
    "tokenization_sanity_check": ("tokenization_sanity_check_mode", "sanity"),
    "tool_format": ("tool_call_parser", "tool_parser"),
    "sampling.stop": ("stop_words", "stop_strings"),
    "max_concurrent": ("max_num_seqs", "max_concurrency"),
    "cluster.fsdp": ("fsdp", "fsdp_config"),
    "output": ("output_dir", "default_local_dir", "save_path"),
    "resume": ("resume_from_checkpoint", "resume_mode"),
    "replace": ("overwrite_output_dir",),
    "deterministic": ("full_determinism",),
}  # fmt: skip
"""For each option of turnwise: names of the same or the most similar option in other libraries."""

ABSENT: dict[str, tuple[str, ...]] = {
    "turnwise trains an adapter without dropout, because the engine samples without dropout: leave it out": ("lora_dropout",),
    "turnwise loads an adapter by the path of its directory: set model.path to it": ("lora_adapter_path", "adapters"),
    "turnwise trains no adapter on quantised weights: set model.lora.rank and model.dtype=bfloat16": ("qlora",),
    "turnwise does not quantise weights; model.dtype=bfloat16 halves their memory": (
        "load_in_4bit", "load_in_8bit", "quantization",
    ),
    "experiment trackers are in the section loggers: loggers=[wandb], or a list of mappings with name, project and run": (
        "report_to", "logger", "wandb", "tensorboard", "mlflow", "swanlab", "trackio", "wandb_project", "project_name",
        "swanlab_project", "run_name", "experiment_name", "swanlab_exp_name",
    ),
    "the metrics of every step are written: leave it out": ("logging_steps", "logging_strategy", "logging_first_step"),
    "rollout workers on a Ray cluster are in the section cluster: cluster=ray (docs/cluster.md)": (
        "ray_init", "ray_kwargs",
    ),
    "training on several devices is in the section cluster: cluster=local or cluster=torchrun (docs/cluster.md)": (
        "deepspeed", "nnodes", "n_gpus_per_node", "num_processes",
    ),
    "the critic is a model of its own with its own optimizer, so its loss has no coefficient: set critic.lr": (
        "vf_coef", "value_loss_coef", "value_loss_coeff",
    ),
}  # fmt: skip
"""For each hint: names of other libraries that have no counterpart in turnwise."""

RENAMED: dict[str, str] = {
    "concurrent": "max_concurrent",
    "data.limit": "data.max_rows",
    "data.system": "data.system_prompt",
    "eval.rows": "eval.max_rows",
    "eval.samples": "eval.samples_per_row",
    "reward.seconds": "reward.timeout",
    "rollout.rows": "rollout.max_rows",
    "rollout.samples": "rollout.samples_per_row",
    "sanity": "tokenization_sanity_check",
    "sft.batch_rows": "sft.batch_size",
    "sft.eval_rows": "sft.max_eval_rows",
    "sft.record_rows": "sft.max_recorded_rows",
    "sft.loss_average": "sft.normalizer",
    "sft.schedule": "sft.lr_schedule",
    "train.clip_high": "loss.clip_high",
    "train.clip_low": "loss.clip_low",
    "train.entropy_coef": "loss.entropy_coef",
    "train.epochs": "train.ppo_epochs",
    "train.group": "train.group_size",
    "train.kl_coef": "loss.kl_coef",
    "train.loss_average": "loss.normalizer",
    "train.overlap": "train.max_staleness",
    "train.rows": "train.batch_size",
    "train.schedule": "train.lr_schedule",
}
"""Options of earlier versions of turnwise, and their present names."""

VALUES: dict[str, dict[str, str]] = {
    "credit.name": {
        "reinforce_plus_plus": "credit.name=reinforce_pp",
        "reinforce_plus_plus_baseline": "credit.name=reinforce_pp_baseline",
        "grpo_vectorized": "credit.name=grpo",
        "rloo_vectorized": "credit.name=rloo",
        "dr_grpo": "credit.name=grpo credit.scale=none",
        "turn_ppo": "credit.name=turn_gae",
        "bi_level_gae": "credit.name=bilevel_gae",
        "gigpo_mean_norm": "credit.name=gigpo",
        "gigpo_mean_std_norm": "credit.name=gigpo credit.scale=std",
    },
    "loss.name": {
        "grpo": "loss.name=ppo_clip loss.normalizer=trajectory",
        "bnpo": "loss.name=ppo_clip loss.normalizer=token",
        "dapo": "loss.name=ppo_clip loss.normalizer=token loss.clip_high=0.28",
        "vanilla": "loss.name=ppo_clip",
        "dr_grpo": "loss.name=ppo_clip loss.normalizer=constant loss.constant_length=<tokens> credit.scale=none",
        "gpg": "loss.name=reinforce",
    },
}
"""Values of other libraries, and the options of turnwise with the same meaning."""

RENAMED_ARGUMENTS: dict[str, dict[str, str]] = {
    "turnwise.environments.modelled_user:ModelledUser": {
        "exchanges": "max_user_turns",
        "speaker": "chat_model",
        "stop": "stop_phrase",
        "system": "system_prompt",
        "system_column": "system_prompt_column",
    },
}
"""Arguments of turnwise's own classes in earlier versions, and their present names."""

_CALLED = {name: option for option, names in CALLED.items() for name in names}
_ABSENT = {name: hint for hint, names in ABSENT.items() for name in names}


def renamed_arguments(reference: str, arguments: Iterable[str]) -> str:
    """A hint for a message: `; speaker is called chat_model here`, or the empty text if no argument was renamed."""
    names = RENAMED_ARGUMENTS.get(reference, {})
    return "".join(f"; {name} is called {names[name]} here" for name in arguments if name in names)


def value_hint(option: str, value: str) -> str:
    """A hint for a message about a value of another library: `; write loss.name=ppo_clip`, or an empty text."""
    here = VALUES.get(option, {}).get(value)
    return "" if here is None else f"; write {here}"


def called_here(name: str, *, section: str = "", options: frozenset[str] = frozenset()) -> str:
    """A hint for a message: `; it is called train.lr here`, or an empty text for an unknown name.

    `section` is the section of the recipe that contains the name, and `options` are its options. If the option exists in
    that section, too, the hint names it there (`sft.lr`, not `train.lr`).
    """
    name = name.replace("-", "_").lower()
    if (new := RENAMED.get(f"{section}.{name}" if section else name)) is not None:
        return f"; it is called {new} here"
    if (hint := _ABSENT.get(name)) is not None:
        return f"; {hint}"
    option = _CALLED.get(name)
    if option is None:
        return ""
    last = option.rpartition(".")[2]
    return f"; it is called {f'{section}.{last}' if section and last in options else option} here"
