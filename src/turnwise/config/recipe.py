"""Reads a recipe: one YAML file, environment variables, and the dotted overrides of the command line.

`load` applies overrides, inserts environment variables (`${NAME}`, `${NAME:-default}`), and validates the result against the
schema. The error lists all problems. For an unknown key it names the turnwise option if the key is an option of TRL, verl or
ms-swift, or one that was renamed, and the most similar names otherwise.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from turnwise.config.resume_rules import RULES
from turnwise.errors import ConfigError, nearest, without_hidden
from turnwise.json_yaml import parse_yaml, read_text
from turnwise.local_paths import no_file
from turnwise.models.device import known_dtype
from turnwise.models.gguf import dequantized
from turnwise.options.algorithm import LoraSection
from turnwise.options.environment_values import insert_values
from turnwise.options.schema import Config
from turnwise.options.section import OWN, Section, name_of, named, named_sections, shared_options

# names of other systems, and names that have changed

CALLED: dict[str, tuple[str, ...]] = {
    "teacher.path": ("teacher_model", "teacher_model_name_or_path", "teacher_model_path"),
    "teacher.url": ("teacher_model_server", "teacher_model_server_url"),
    "teacher.coef": ("teacher_kl_coef", "distillation_loss_coef", "teacher_tau"),
    "teacher.top_k": ("gkd_logits_topk", "loss_top_k", "topk_logits_k"),
    "teacher.column": ("teacher_tag_key", "teacher_key"),
    "train.lr": ("learning_rate",),
    "train.lr_schedule": ("lr_scheduler_type", "lr_scheduler", "scheduler"),
    "train.warmup_steps": ("lr_warmup_steps",),
    "train.steps": ("max_steps", "total_training_steps"),
    "train.epochs": ("num_train_epochs", "num_epochs", "total_epochs"),
    "train.batch_size": ("train_batch_size", "rollout_batch_size", "prompts", "prompts_per_step", "num_prompts"),
    "train.group_size": ("num_generations", "n", "rollout_n", "num_return_sequences"),
    "train.minibatches": ("num_mini_batches",),
    "train.ppo_epochs": ("num_iterations", "num_ppo_epochs", "update_epochs"),
    "train.micro_batch_tokens": ("ppo_max_token_len_per_gpu",),
    "loss.kl_coef": ("beta", "kl_loss_coef", "kl_beta"),
    "reward.kl.coef": ("init_kl_coef",),
    "reward.kl.target": ("target_kl",),
    "reward.kl.horizon": ("kl_horizon",),
    "reference.path": ("ref_model", "reference_model", "ref_model_path", "ref_path"),
    "reference.sync_every": ("ref_model_sync_steps",),
    "reference.sync_weight": ("ref_model_mixup_alpha",),
    "loss.entropy_coef": ("entropy_coeff", "entropy_bonus"),
    "loss.clip_low": ("clip_ratio_low", "epsilon_low"),
    "loss.clip_high": ("epsilon_high", "clip_ratio_high"),
    "loss.kl_estimator": ("kl_loss_type",),
    "correction.level": ("rollout_is",),
    "correction.high": (
        "rollout_importance_sampling_threshold", "rollout_is_threshold", "vllm_importance_sampling_clip_max",
    ),
    "correction.low": ("vllm_importance_sampling_clip_min",),
    "correction.normalize_weights": ("rollout_is_batch_normalize",),
    "correction.reject.level": ("rollout_rs",),
    "correction.reject.high": ("rollout_rs_threshold",),
    "correction.off_policy_sequence_mask_delta": ("off_policy_mask_threshold",),
    "loss.dual_clip": ("clip_ratio_c", "delta"),
    "loss.clip_cov_low": ("clip_cov_lb",),
    "loss.clip_cov_high": ("clip_cov_ub",),
    "loss.kl_cov_ratio": ("kl_cov_frac",),
    "loss.kl_cov_coef": ("ppo_kl_coef",),
    "loss.name": ("loss_mode", "policy_loss"),
    "loss.level": ("importance_sampling_level",),
    "loss.tau_positive": ("tau_pos", "sapo_temperature_pos"),
    "loss.tau_negative": ("tau_neg", "sapo_temperature_neg"),
    "train.max_grad_norm": ("grad_clip", "gradient_clipping", "clip_grad_norm"),
    "train.optimizer.name": ("optim", "optimizer_type"),
    "train.betas": ("adam_betas",),
    "loss.normalizer": ("loss_agg_mode", "loss_average"),
    "loss.constant_length": ("loss_scale_factor",),
    "train.max_staleness": ("max_off_policyness", "max_head_offpolicyness", "max_async_level", "async_steps", "max_lag"),
    "train.group_timeout": ("rollout_timeout", "group_deadline"),
    "train.replace_failed": ("resample_failed",),
    "limits.turns": ("max_turns", "num_turns", "max_assistant_turns"),
    "limits.tokens_per_turn": ("max_new_tokens", "max_tokens"),
    "limits.response_tokens": ("max_response_length",),
    "limits.context": ("max_length", "max_model_len", "max_seq_length", "max_context_length"),
    "model.path": ("model_name_or_path", "model_name", "model_id", "pretrained_model_name_or_path"),
    "model.gradient_checkpointing": (
        "gradient_checkpointing", "enable_gradient_checkpointing", "activation_checkpointing",
    ),
    "model.kernels": ("use_liger_kernel", "use_liger", "liger_kernel"),
    "model.router_replay": ("routing_replay", "rollout_routing_replay", "use_rollout_routing_replay"),
    "loss.router_aux_loss_coef": ("moe_aux_loss_coeff", "aux_loss_coef", "load_balancing_loss_coef"),
    "model.lora": ("lora", "peft_config", "peft"),
    "model.lora.rank": ("lora_rank", "lora_r"),
    "model.lora.alpha": ("lora_alpha",),
    "model.lora.target_modules": ("target_modules", "lora_target_modules"),
    "model.lora.rslora": ("use_rslora",),
    "model.lora.dora": ("use_dora",),
    "model.quantization.bits": ("quant_bits",),
    "model.quantization.type": ("bnb_4bit_quant_type",),
    "model.quantization.double": ("bnb_4bit_use_double_quant", "use_bnb_nested_quant"),
    "model.dtype": ("torch_dtype",),
    "model.autocast": ("bf16", "amp"),
    "data.train": ("dataset", "dataset_name", "train_files", "train_file", "train_dataset"),
    "data.eval": ("val_files", "eval_dataset", "val_dataset", "validation_files", "test_files"),
    "data.columns": ("column_mapping",),
    "data.system_prompt": ("system",),
    "data.weights": ("interleave_prob", "probabilities", "mixture_weights", "data_weights"),
    "data.curriculum": ("curriculum_sampler",),
    "train.dynamic_sampling": ("max_resample_times",),
    "train.overlong_filter": ("mask_truncated_completions", "overlong_filtering", "filter_overlong"),
    "data.shuffle": ("shuffle_dataset",),
    "data.max_rows": ("max_samples", "train_max_samples"),
    "reward.trajectory": ("reward_functions",),
    "credit.name": ("adv_estimator", "advantage_estimator"),
    "credit.gamma": ("discount", "discount_factor"),
    "credit.lam": ("gae_lambda", "lambda"),
    "critic.lr": ("critic_lr", "value_lr", "learning_rate_critic"),
    "critic.clip": ("cliprange_value", "value_clip", "vf_clip", "clip_range_vf"),
    "critic.path": ("value_model", "value_model_path", "critic_model_path"),
    "critic.warmup_steps": ("critic_warmup", "value_pretrain_steps"),
    "credit.turn_gamma": ("high_level_gamma",),
    "credit.whiten": ("whiten_advantages",),
    "credit.omega": ("step_advantage_w",),
    "checkpoint.every": ("save_steps", "save_freq"),
    "checkpoint.keep": ("save_total_limit", "max_actor_ckpt_to_keep"),
    "cluster.mesh.expert": ("expert_parallel_size", "expert_model_parallel_size", "ep_size"),
    "checkpoint.best": ("metric_for_best_model", "load_best_model_at_end"),
    "engine.tensor_parallel": (
        "tensor_parallel_size", "tensor_model_parallel_size", "vllm_tensor_parallel_size", "tp_size",
    ),
    "engine.data_parallel": ("data_parallel_size", "vllm_data_parallel_size", "dp_size"),
    "engine.sleep": ("vllm_enable_sleep_mode", "enable_sleep_mode", "free_cache_engine"),
    "engine.name": ("rollout_backend",),
    "engine.url": ("base_url", "api_base", "openai_base_url"),
    "eval.samples_per_row": ("num_trials", "n_samples", "num_return_samples"),
    "eval.every": ("eval_steps", "test_freq"),
    "environment": ("env",),
    "tools": ("function_tool",),
    "tokenization_sanity_check": ("tokenization_sanity_check_mode", "sanity"),
    "tool_format": ("tool_call_parser", "tool_parser"),
    "sampling.stop": ("stop_words", "stop_strings"),
    "max_concurrent": ("max_num_seqs", "max_concurrency"),
    "cluster.fsdp": ("fsdp", "fsdp_config"),
    "output": ("output_dir", "default_local_dir", "save_path"),
    "replace": ("overwrite_output_dir",),
    "deterministic": ("full_determinism",),
}  # fmt: skip
"""For each option of turnwise: names in other libraries of an option whose values have the same meaning.

A name whose values mean something else belongs into `DIFFERENT`: a value that is copied would make another training.
"""

DIFFERENT: dict[str, tuple[str, ...]] = {
    "a ratio is a value of train.warmup_steps below 1: write warmup_steps=0.1": ("warmup_ratio", "lr_warmup_steps_ratio"),
    "it counts conversations of one device, and train.batch_size counts rows of a step: write per_device_train_batch_size x "
    "gradient_accumulation_steps x devices / num_generations": ("per_device_train_batch_size",),
    "it is a number of rows, and train.minibatches is the number of parts of a step: write train_batch_size / "
    "ppo_mini_batch_size": ("ppo_mini_batch_size", "mini_batch_size"),
    "train.minibatches is the number of optimizer steps on the conversations of a step: write steps_per_generation / "
    "gradient_accumulation_steps": ("steps_per_generation",),
    "one optimizer step is on all conversations of a step (train.minibatches: 1), and memory is limited by "
    "train.micro_batch_tokens, the tokens of a forward pass, which does not change the result: leave it out": (
        "gradient_accumulation_steps", "micro_batch_size", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu",
        "use_dynamic_bsz",
    ),
    "the KL term of the loss is on if loss.kl_coef is above 0": ("use_kl_loss",),
    "the KL divergence is in the reward if reward.kl.coef is above 0": ("kl_in_reward", "use_kl_in_reward"),
    "write reward.kl.estimator=k1 for kl, k2 for mse, k3 for low_var_kl": ("kl_penalty",),
    "a constant coefficient is reward.kl.coef; an adaptive one also has reward.kl.target and reward.kl.horizon": ("kl_ctrl",),
    "with an adapter, the reference model is the model without it: write reference.source=adapter_off": ("disable_adapter",),
    "there is a reference model if loss.kl_coef or reward.kl.coef is above 0: leave it out": ("create_reference_model",),
    "a policy of agents is trained with policies: {NAME: {train: true}}": ("policies_to_train",),
    "the environment chooses the policy of an agent: episode.agent(..., policy=NAME)": ("policy_mapping_fn",),
    "the reference model follows the policy if reference.sync_every is a number of steps": ("sync_ref_model",),
    "it is both bounds of PPO clipping: write loss.clip_low and loss.clip_high": ("epsilon", "clip_ratio", "cliprange"),
    "write loss.kl_estimator=k3_corrected": ("use_bias_correction_kl",),
    "the section correction has other values (docs/losses.md): token_truncate is correction.action=truncate, and token_mask "
    "is correction.action=mask": (
        "rollout_importance_sampling_mode", "vllm_importance_sampling_mode",
    ),
    "the section is called correction, with other options (docs/losses.md); `turnwise convert` converts it": (
        "rollout_correction",
    ),
    "correction.decoupled is the opposite: write correction.decoupled=false for bypass_mode=true": ("bypass_mode",),
    "write train.optimizer.offload=sampling (while the engine samples) or cpu (always)": (
        "optimizer_offload", "offload_optimizer", "cpu_offload",
    ),
    "write both decay rates: train.betas=[<adam_beta1>,<adam_beta2>]": ("adam_beta1", "adam_beta2"),
    "losses are in loss.name, and how a loss is averaged is in loss.normalizer (docs/losses.md)": ("loss_type",),
    "train.max_staleness is a number of steps: write 1 to sample the next step during training": (
        "async_generate", "async_training",
    ),
    "it is a share of conversations, and train.max_staleness is the age of the weights in steps: write at least 1": (
        "staleness_threshold",
    ),
    "write train.dynamic_sampling, the number of times that groups without reward differences are replaced in a step": (
        "dynamic_sample", "filter_groups", "filter_zero_std",
    ),
    "it also counts the first batch: write train.dynamic_sampling=<max_num_gen_batches - 1>": ("max_num_gen_batches",),
    "limits.turns counts turns of the model: write one more than the number of user turns": ("max_user_turns",),
    "limits.turns counts turns of the model: write one more than the number of tool rounds": ("max_tool_calling_iterations",),
    "limits.tokens_per_turn is the limit of a turn, and limits.response_tokens that of all tokens after the prompt, tool results "
    "included": ("max_completion_length",),
    "rows with longer prompts are left out with data.max_prompt_tokens (prompts are never cut); limits.context is the limit of "
    "the complete conversation": ("max_prompt_length",),
    "an adapter is trained if model.lora.rank is set (16 is common)": ("use_peft", "tuner_type", "train_type"),
    "an adapter to train is in model.lora; a trained adapter is loaded by model.path": ("adapter",),
    "there is no float16 here: write model.dtype=bfloat16, or model.autocast=true": ("fp16",),
    "write model.dtype for the parameters, or model.autocast=true for mixed precision in bfloat16": (
        "precision", "mixed_precision",
    ),
    "write data.columns={prompt: <name of the column>}": ("prompt_key",),
    "a reward function receives each column of the row by the name of its parameter (docs/rewards.md): leave it out": (
        "reward_fn_key",
    ),
    "a column of pass rates is data.curriculum.column, and data.curriculum.low and high say which rows are skipped": (
        "difficulty", "pass_rate",
    ),
    "a function that is written for TRL (lists of completions and columns) is called by reward.batch=[{use: "
    "turnwise.compat.trl:TrlReward, arguments: {function: file.py:name}}]; a function of one conversation is "
    "reward.trajectory=[file.py:name]": ("reward_funcs",),
    "a compute_score function that is written for verl is called by reward.trajectory=[{use: turnwise.compat.verl:CustomScore, "
    "arguments: {path: file.py, name: compute_score}}]; another function is reward.trajectory=[file.py:name]": (
        "custom_reward_function", "compute_score", "reward_fn",
    ),
    "call the reward model in a function of reward.trajectory, or use turnwise.rewards.http:HttpReward (docs/rewards.md)": (
        "reward_model",
    ),
    "write credit.scale=std for group or true, batch for batch, and none for false (docs/credit.md)": (
        "scale_rewards", "norm_adv_by_std_in_grpo", "f_norm",
    ),
    "the section is called teacher (docs/distillation.md); `turnwise convert` converts that of verl": ("distillation",),
    "only conversations of the student are learnt from, as with lmbda=1: leave it out, or train with `turnwise sft` first": (
        "lmbda", "seq_kd", "sft_alpha",
    ),
    "to learn from the teacher alone, write credit=none": ("use_task_rewards",),
    "write teacher.signal=sampled for a policy gradient (k1), and teacher.signal=divergence for a term of the loss": (
        "use_policy_gradient", "distillation_loss",
    ),
    "rewards are not whitened here; credit.whiten is for advantages": ("whiten_rewards",),
    "checkpoint.every is a number of steps; null writes checkpoints as often as 3 % of the time allow": ("save_strategy",),
    "eval.every is a number of steps; 0 evaluates before and after training": ("eval_strategy", "evaluation_strategy"),
    "the embedded engine has engine.memory_gb, a number of GiB and no share; with engine.name=vllm or sglang, write "
    "engine.arguments={gpu_memory_utilization: 0.5} (sglang: mem_fraction_static)": (
        "gpu_memory_utilization", "vllm_gpu_memory_utilization", "sglang_mem_fraction_static",
    ),
    "write engine.sleep=true": ("sleep_level",),
    "write engine.name=vllm": ("use_vllm",),
    "for colocate, write engine.name=vllm engine.sleep=true; for a server, engine.url (docs/engines.md)": ("vllm_mode",),
    "write the name of the environment variable that has the key, not the key: engine.api_key_env=OPENAI_API_KEY": (
        "api_key", "openai_api_key",
    ),
    "conversations have several turns if an environment or tools are set and limits.turns is above 1": ("multi_turn",),
    "a scheduler of ms-swift is run by environment={use: turnwise.compat.swift:scheduler, arguments: {name: <name>, "
    "external_plugins: [plugin.py]}} (docs/swift.md)": ("multi_turn_scheduler",),
    "an interaction of verl is run by the recipe that `turnwise convert` writes (docs/verl.md)": ("interaction",),
    "a class of TRL is run by environment={use: turnwise.compat.trl:TrlEnvironments, arguments: {environment: file.py:Class}}": (
        "environment_factory",
    ),
    "a tool file of verl is read by the recipe that `turnwise convert` writes (docs/verl.md); tools=[file.py:function] names "
    "functions": ("tool_config_path",),
    "write resume=auto; the checkpoint is found in output": ("resume_from_checkpoint", "resume_mode"),
}  # fmt: skip
"""For each hint: names of other libraries whose values have another meaning than those of our option. The hint converts them."""

_LOSS_TYPES = {
    "grpo": "loss.normalizer=trajectory",
    "bnpo": "loss.normalizer=token",
    "dapo": "loss.normalizer=token",
    "dr_grpo": "loss.normalizer=constant loss.constant_length=<max_completion_length>",
    "cispo": "loss.name=cispo loss.clip_high=<epsilon_high - 1>",
    "sapo": "loss.name=sapo",
}
"""The values of TRL's and ms-swift's `loss_type`. Their `dr_grpo` does not change how rewards are scaled."""

ABSENT: dict[str, tuple[str, ...]] = {
    "turnwise trains an adapter without dropout, because the engine samples without dropout: leave it out": ("lora_dropout",),
    "turnwise loads an adapter by the path of its directory: set model.path to it": ("lora_adapter_path", "adapters"),
    "weights in 4 bits under an adapter are model.quantization.bits=4 with model.lora.rank": (
        "load_in_4bit", "qlora", "quantization_config", "quant_method",
    ),
    "turnwise has no weights in 8 bits: use model.quantization.bits=4 with model.lora.rank, or model.dtype=bfloat16": (
        "load_in_8bit",
    ),
    "products with weights in 4 bits are computed in model.dtype": ("bnb_4bit_compute_dtype",),
    "with teacher.top_k, all other tokens are always one class: leave it out": ("loss_add_tail",),
    "write teacher.signal=sampled to learn from the sampled token, as with \"sampled\": leave it out": (
        "reverse_kl_top_1_mode",
    ),
    "download the revision, and set teacher.path to its directory": ("teacher_model_revision",),
    "the options of a teacher's model are teacher.dtype and teacher.bits": ("teacher_model_init_kwargs",),
    "each step samples from new weights; train.max_staleness is how old they may be: leave it out": (
        "vllm_sync_frequency",
    ),
    "experiment trackers are in the section loggers: loggers=[wandb], or a list of mappings with name, project and run": (
        "report_to", "logger", "wandb", "tensorboard", "mlflow", "swanlab", "trackio", "wandb_project", "project_name",
        "swanlab_project", "run_name", "experiment_name", "swanlab_exp_name",
    ),
    "it is a block of verl's configuration, and this command reads the file: `turnwise convert --config-path <its directory> "
    "--config-name <its name without .yaml> --out recipe.yaml` (docs/verl.md)": ("multiturn",),
    "the metrics of every step are written: leave it out": ("logging_steps", "logging_strategy", "logging_first_step"),
    "rollout workers on a Ray cluster are in the section cluster: cluster=ray (docs/cluster.md)": (
        "ray_init", "ray_kwargs",
    ),
    "training on several devices is in the section cluster: cluster=local or cluster=torchrun (docs/cluster.md)": (
        "deepspeed", "nnodes", "n_gpus_per_node", "num_processes",
    ),
    "all columns of a row are kept, for reward functions and environments: leave it out": ("remove_unused_columns",),
    "a run is uploaded after its end: `turnwise push RUN`": ("push_to_hub", "hub_model_id", "hub_strategy"),
    "turnwise has no such option: leave it out": (
        "torch_compile", "attn_implementation", "dataloader_num_workers",
    ),
    "the distribution that is sampled from must be the one that is trained, so sampling has no penalties: leave it out": (
        "repetition_penalty", "frequency_penalty", "presence_penalty",
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

_LIGER = {"true": "model.kernels=liger", "false": "model.kernels=none"}
VALUES_THERE: dict[str, dict[str, str]] = {
    "loss_type": _LOSS_TYPES,
    "loss_agg_mode": {
        "token-mean": "loss.normalizer=token",
        "seq-mean-token-mean": "loss.normalizer=trajectory",
        "seq-mean-token-sum": "loss.normalizer=constant loss.constant_length=1",
    },
    "adv_estimator": VALUES["credit.name"],
    "advantage_estimator": VALUES["credit.name"],
    "loss_mode": VALUES["loss.name"],
    "optim": {
        "adamw_torch": "train.optimizer.name=adamw",
        "adamw_torch_fused": "train.optimizer.name=adamw",
        "adamw_hf": "train.optimizer.name=adamw",
        "adamw_8bit": "train.optimizer.name=adamw_8bit",
        "adamw_bnb_8bit": "train.optimizer.name=adamw_8bit",
        "paged_adamw_8bit": "train.optimizer.name=adamw_8bit",
    },
    "kl_loss_type": {
        "kl": "loss.kl_estimator=k1",
        "mse": "loss.kl_estimator=k2",
        "low_var_kl": "loss.kl_estimator=k3",
    },
    "lr_scheduler_type": {"constant_with_warmup": "train.lr_schedule=constant"},
    "use_liger_kernel": _LIGER,
    "use_liger": _LIGER,
    "scale_rewards": {"group": "credit.scale=std", "batch": "credit.scale=batch", "none": "credit.scale=none"},
}
"""For options of other libraries: their values, and the options of turnwise with the same meaning."""

RENAMED_ARGUMENTS: dict[str, dict[str, str]] = {
    "turnwise.environments.users:ModelledUser": {
        "exchanges": "max_user_turns",
        "speaker": "chat_model",
        "stop": "stop_phrase",
        "system": "system_prompt",
        "system_column": "system_prompt_column",
    },
}
"""Arguments of turnwise's own classes in earlier versions, and their present names."""

_CALLED = {name: option for option, names in CALLED.items() for name in names}
_HINTS = {name: hint for hints in (ABSENT, DIFFERENT) for hint, names in hints.items() for name in names}


def renamed_arguments(reference: str, arguments: Iterable[str]) -> str:
    """A hint for a message: `; speaker is called chat_model here`, or the empty text if no argument was renamed."""
    names = RENAMED_ARGUMENTS.get(reference, {})
    return "".join(f"; {name} is called {names[name]} here" for name in arguments if name in names)


def value_hint(option: str, value: str) -> str:
    """A hint for a message about a value of another library: `; write loss.name=ppo_clip`, or an empty text."""
    here = VALUES.get(option, {}).get(value)
    return "" if here is None else f"; write {here}"


def called_here(name: str, *, value: object = None, section: str = "", options: frozenset[str] = frozenset()) -> str:
    """A hint for a message: `; it is called train.lr here`, or an empty text for an unknown name.

    `value` is what the recipe gives for the name: it may have another name here, too. `section` is the section of the recipe
    that contains the name, and `options` are its options. If the option exists in that section, too, the hint names it there
    (`sft.lr`, not `train.lr`).
    """
    name = name.replace("-", "_").lower()
    if (new := RENAMED.get(f"{section}.{name}" if section else name)) is not None:
        return f"; it is called {new} here"
    given = str(value).lower() if isinstance(value, bool) else value
    if isinstance(given, str) and (here := VALUES_THERE.get(name, {}).get(given)) is not None:
        return f"; write {here}"
    if (hint := _HINTS.get(name)) is not None:
        return f"; {hint}"
    option = _CALLED.get(name)
    if option is None:
        return ""
    last = option.rpartition(".")[2]
    return f"; it is called {f'{section}.{last}' if section and last in options else option} here"


# reading

_NAMED = named_sections(Config)
"""For each section that is chosen by name: its class for each name."""
_OWN = [section for section, classes in _NAMED.items() if OWN in classes]
"""Sections that may name a function of the user."""
_SHORT = {
    "data": "train",
    "environment": "use",
    "loss_mask": "use",
    "tool_format": "use",
    "cluster": "launcher",
    "model": "path",
    "train.optimizer": "name",
    "sft.optimizer": "name",
    **dict.fromkeys(_NAMED, "name"),
}
"""For each section that may be a text: the option that the text is."""

_ITEMS = {
    **dict.fromkeys(("tools", "reward.trajectory", "reward.turns", "reward.group", "reward.batch"), "use"),
    "loggers": "name",
}
"""The same for the items of lists."""

_OTHER_SYSTEMS = {
    "verl": (
        {"actor_rollout_ref"},
        {"algorithm", "trainer", "custom_reward_function", "reward_model", "hydra"},
        "To make a recipe from it: `turnwise convert --config-path <its directory> --config-name <its name without .yaml> --out "
        "recipe.yaml` (docs/verl.md)",
    ),
    "ms-swift": (
        {"rlhf_type"},
        {"tuner_type", "train_type", "vllm_mode", "multi_turn_scheduler", "external_plugins", "num_generations"},
        "To make a recipe from it: `turnwise convert --from swift <the file> --out recipe.yaml` (docs/swift.md)",
    ),
    "TRL": (
        {"model_name_or_path", "teacher_model_name_or_path"},
        {
            "dataset_name",
            "num_generations",
            "per_device_train_batch_size",
            "max_completion_length",
            "use_peft",
            "lmbda",
        },
        "To make a recipe from it: `turnwise convert --from trl <the file> --out recipe.yaml` (docs/trl.md)",
    ),
}
"""For each other system: a key that only its files have at their top, further keys, and what to do with such a file."""

_LENGTHS = {
    name: other
    for part in ("train", "sft")
    for name, other in ((f"{part}.steps", f"{part}.epochs"), (f"{part}.epochs", f"{part}.steps"))
}
"""The two options that say how long a run is: one of them on the command line replaces the other in the recipe."""


def load(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """Read a recipe, apply overrides (`train.lr=1e-4`), and check it. Returns the recipe and notes for the user.

    Raises ConfigError.
    """
    path = Path(path)
    if (problem := no_file(path, "recipe")) is not None:
        if re.match(r"[+~\w]+(\.\w+)+=", str(path)):
            raise ConfigError(
                f"{str(path)[:200]!r} is given where the recipe belongs: name the recipe first, then the changes to it (of "
                f"verl's configuration: add --config-path=config --config-name=ppo_trainer)"
            )
        raise ConfigError(f"{problem}; recipes are YAML files, such as recipes/calculator.yaml")
    tree = parse_yaml(read_text(path, error=ConfigError), where=str(path), error=ConfigError)
    if not isinstance(tree, dict):
        text = isinstance(tree, str)  # such as a script
        how = (
            f": of a script of verl, ms-swift or TRL, `turnwise convert {path} --out recipe.yaml` makes one"
            if text
            else ""
        )
        raise ConfigError(f"{path} must contain a mapping of options; it contains a {type(tree).__name__}{how}")
    notes = _override(tree, overrides)
    inserted, origins = insert_values(tree, where=str(path))
    return with_known_model(checked(inserted, source=str(path))).with_origins(origins), notes


def with_overrides(tree: Mapping[str, Any], overrides: Sequence[str], *, source: str) -> tuple[Config, list[str]]:
    """A recipe that was made by a program, with overrides (`engine.python=...`). Returns the recipe and notes for the user.

    Raises ConfigError.
    """
    changed = copy.deepcopy(dict(tree))
    notes = _override(changed, overrides)
    return with_known_model(checked(changed, source=source)), notes


def checked(tree: Mapping[str, Any], *, source: str) -> Config:
    """The recipe for a tree of options. `source` is the origin that error messages name.

    Raises ConfigError.
    """
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(without_hidden(_explain(error, source))) from None
    _refuse_without_rows(config, source)
    return config


def _refuse_without_rows(config: Config, source: str) -> None:
    """Refuse a recipe that leaves out data.train, with an environment of turnwise that brings no rows. Raises ConfigError."""
    environment = config.environment.use
    if config.data.train == "environment" and environment.startswith("turnwise.environments."):
        raise ConfigError(
            f"{source}: data.train is missing: add it to the recipe, because environment={environment} brings no rows"
        )


def with_known_model(config: Config) -> Config:
    """The recipe with a data type in place of `model.dtype: auto`, with a model directory in place of a GGUF file, and with
    rollout correction if the engine is quantized.

    The data type is that of the present machine. The first use of a file converts it. Raises ConfigError.
    """
    changes: dict[str, Any] = {"dtype": known_dtype(config)}
    if (name := config.model.gguf_file) is not None:
        changes |= {"path": str(dequantized(config.model.path, name, changes["dtype"])), "gguf_file": None}
    known = config.model_copy(update={"model": config.model.model_copy(update=changes)})
    if config.needs_correction:
        correction = config.correction.model_copy(update={"action": "truncate"})
        known = known.model_copy(update={"correction": correction})
    return known.with_chosen({"model.dtype": "auto"}) if config.model.dtype == "auto" else known


def schema_problems(tree: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """The options of a tree whose values are wrong: the option, the value and the rule. Options that are missing do not count.

    The option is empty for a rule about several options.
    """
    try:
        Config.model_validate(tree)
    except ValidationError as error:
        problems = [problem for problem in error.errors(include_url=False) if problem["type"] != "missing"]
        named = {".".join(map(str, _keys(problem["loc"]))): problem for problem in problems}
        return [(option, problem["input"], problem["msg"].lower()) for option, problem in named.items()]
    return []


_SHOWN_OVERRIDE = 120
"""Characters of an argument `key=value` in a message."""


def _override(tree: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Put `a.b=value` into the tree; values are YAML. A new `name` removes the section's options that belong to the old name."""
    notes: list[str] = []
    # names first: the other options on the command line belong to the new name
    for override in sorted(overrides, key=lambda override: not _chooses(override.partition("=")[0])):
        key, equals, text = override.partition("=")
        shown = repr(override) if len(override) <= _SHOWN_OVERRIDE else f"{override[:_SHOWN_OVERRIDE]!r}..."
        if not equals or not key:
            raise ConfigError(f"{shown} is not an override; write key=value, for example train.lr=1e-4")
        value = parse_yaml(text, where=f"{shown}: the value", error=ConfigError)
        if key in _NAMED and isinstance(value, str):  # `credit=rloo` is `credit.name=rloo`
            if key in _OWN and ":" in value:
                notes += _own_function(tree, key, value, override)
                continue
            key = f"{key}.name"
        *parents, last = key.split(".")
        if not all([*parents, last]):
            raise ConfigError(f"{shown}: {key!r} contains an empty name; write one dot between two names")
        node = _section(tree, parents, shown)
        if isinstance(node, list):
            node[_index(node, parents, last, shown)] = value
            continue
        if key == "data.eval" and value is None:
            notes += _without_held_out_rows(tree, overrides)
        if value is not None and (other := _LENGTHS.get(key)) is not None:
            notes += _without_other_length(node, key, other, overrides)
        if last == "name" and len(parents) == 1 and parents[0] in _NAMED:
            notes += _rename(node, parents[0], value, override)
        node[last] = value
    return notes


def _section(tree: dict[str, Any], parents: Sequence[str], shown: str) -> dict[str, Any] | list[Any]:
    """The mapping or list at `parents`, with short forms written out: `reward.trajectory.0` is the first item of a list, and its
    text `f.py:g` becomes `{use: f.py:g}`. A section that is not there is added, an item of a list is not. Raises ConfigError."""
    node: dict[str, Any] | list[Any] = tree
    for depth, parent in enumerate(parents):
        path = ".".join(parents[: depth + 1])
        child: Any
        if isinstance(node, list):
            index = _index(node, parents[:depth], parent, shown)
            key_of_text = _ITEMS.get(".".join(parents[:depth]))
            child = node[index]
            if isinstance(child, str) and key_of_text is not None:
                child = node[index] = {key_of_text: child}
        else:
            child = node.setdefault(parent, [] if path in _ITEMS else {})
            if isinstance(child, str) and (key_of_text := _SHORT.get(path)) is not None:
                child = node[parent] = named(child) if parent in _OWN else {key_of_text: child}
            elif isinstance(child, str | list) and path == "reward":
                child = node[parent] = {"trajectory": [child] if isinstance(child, str) else child}
            elif child is True and path == "model.lora":
                child = node[parent] = LoraSection.model_validate(child).model_dump(include={"rank"})
            elif isinstance(child, int) and path == "model.quantization":
                child = node[parent] = {"bits": child}
        if not isinstance(child, dict | list):
            raise ConfigError(f"{shown}: {path} is not a mapping of options")
        node = child
    return node


def _index(items: Sequence[Any], parents: Sequence[str], text: str, shown: str) -> int:
    """The number of an item of the list at `parents`, counted from 0. Raises ConfigError."""
    if text.isascii() and text.isdecimal() and len(text) < 9 and int(text) < len(items):
        return int(text)
    path, count = ".".join(parents), len(items)
    numbers = f"write {path}.0" + (f" to {path}.{count - 1}" if count > 1 else "") if count else "it is empty"
    raise ConfigError(f"{shown}: {path} is a list and has no item {text}: {numbers}")


def _own_function(tree: dict[str, Any], section: str, reference: str, override: str) -> list[str]:
    """`credit=file.py:name`: the section becomes that of a function. Returns a note about options that it removes."""
    old = named(tree.get(section, {}))
    if not isinstance(old, dict):
        raise ConfigError(f"{override}: {section} is not a mapping of options")
    notes = _rename(old, section, OWN, override)
    if old.get("use") != reference and old.pop("arguments", None):
        notes.append(f"{override} removes the recipe's {section}.arguments, which belonged to {old.get('use')!r}")
    tree[section] = {**old, "name": OWN, "use": reference}
    return notes


def _chooses(key: str) -> bool:
    """Whether an override of this option says which other options there are."""
    return key.endswith(".name") or key in _NAMED


def _rename(node: dict[str, Any], section: str, name: Any, override: str) -> list[str]:
    """Remove the options that belong to the section's old name and not to its new name. Returns a note that lists them."""
    classes = _NAMED[section]
    former = node.get("name", OWN if "use" in node and OWN in classes else next(iter(classes)))
    if former == name or not isinstance(name, str):  # another type is refused with the recipe
        return []
    shared = shared_options(classes[former], classes[name]) if former in classes and name in classes else set()
    dropped = [option for option in node if option != "name" and option not in shared]
    for option in dropped:
        del node[option]
    if not dropped:
        return []
    options = ", ".join(f"{section}.{option}" for option in dropped)
    return [f"{override} removes the recipe's {options}, which belonged to {former!r}"]


def _without_other_length(node: dict[str, Any], key: str, other: str, overrides: Sequence[str]) -> list[str]:
    """Remove the recipe's other option that says how long a run is, unless it is on the command line too. Returns a note."""
    section, _, name = other.partition(".")
    if node.get(name) is None or any(override.partition("=")[0] == other for override in overrides):
        return []
    return [f"{key} replaces the recipe's {section}.{name}={node.pop(name)}"]


def _without_held_out_rows(tree: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Remove the recipe's options of evaluation that are not on the command line. Returns a note that lists them."""
    overridden = [override.partition("=")[0] for override in overrides]
    dropped: list[str] = []
    for section, options in (("eval", None), ("data", ["eval_split"]), ("checkpoint", ["best"])):
        node = tree.get(section)
        if not isinstance(node, dict):
            continue
        for option in list(options or node):
            name = f"{section}.{option}"
            if option in node and not any(f"{key}.".startswith(f"{name}.") for key in overridden):
                del node[option]
                dropped.append(name)
    if not dropped:
        return []
    return [f"data.eval=null removes the recipe's {', '.join(dropped)}, which need held-out rows"]


def _explain(error: ValidationError, source: str) -> str:
    """All problems, one per line: the key, the rule, the value, the most similar name."""
    lines: list[str] = []
    unknown = {str(problem["loc"][0]) for problem in error.errors() if problem["type"] == "extra_forbidden"}
    for system, (certain, usual, how) in _OTHER_SYSTEMS.items():
        found = unknown & (certain | usual)
        if unknown & certain or len(found) > 1:
            return f"{source} is a configuration of {system} (it has {', '.join(sorted(found))}), not a recipe. {how}"
    for problem in error.errors(include_url=False):
        # pydantic adds the branch of a union to the location: `list[...]`, `function-after[...]`, `local`
        branch = str(problem["loc"][-1]) if problem["loc"] else ""
        if branch.startswith("list[") and not isinstance(problem["input"], list):
            continue  # not a list, where a text or a list is allowed: the problem of the other branch is reported
        if branch.startswith("function-after[") and isinstance(problem["input"], list):
            continue
        key = ".".join(str(step) for step in _keys(problem["loc"]))
        if problem["type"] == "extra_forbidden":
            path = [*_keys(problem["loc"][:-1]), problem["loc"][-1]]
            lines.append(_unknown(problem["loc"], path, problem["input"]))
        elif problem["type"] == "missing":
            lines.append(f"{key} is missing: add it to the recipe")
        elif problem["type"] == "union_tag_invalid":
            tag = problem.get("ctx", {}).get("tag")
            hint = value_hint(f"{key}.name", str(tag))
            section = key.rpartition(".")[2]  # also that of a policy: policies.0.loss
            own = f" ({section}: path/to/file.py:function)" if section in _OWN else ""
            names = ", ".join(_NAMED[section])
            lines.append(f"{key}.name: there is no {section} {tag!r}{hint}; there are: {names}{own}")
        elif problem["type"] == "union_tag_not_found":
            example = f"{{name: {next(iter(_NAMED[key.rpartition('.')[2]]))}}}"
            lines.append(f"{key} must be a mapping of options, such as {example}; got {problem['input']!r:.200}")
        else:
            said, value = problem["msg"], problem["input"]
            got = "got null (an option that is left out has its default)" if value is None else f"got {value!r:.200}"
            lines.append(f"{key}: {said[:1].lower()}{said[1:]}; {got}")
    return f"{source}: " + "\n".join(lines)


def _keys(location: Sequence[Any]) -> list[Any]:
    """The keys of the recipe in a location, without the branches of unions that pydantic adds."""
    return [step for step in _without_names(location) if "[" not in str(step)]


def _unknown(location: Sequence[Any], path: Sequence[Any], value: Any) -> str:
    """The message for an unknown key and its value. `path` are the keys of the recipe that lead to it, the unknown key last."""
    section, key = _section_at(location[:-1]), ".".join(str(step) for step in path)
    names = list(section.model_fields) if section is not None else []
    name = str(path[-1])
    parents = ".".join(str(key) for key in path[:-1])
    others = [other for other, cls in _NAMED.get(parents, {}).items() if name in cls.model_fields]
    if section is not None and others:
        return (
            f"{key} has no effect with {parents}.name={name_of(section)}: it is an option of another {parents} "
            f"({', '.join(others)})" + ("; null is refused too: leave it out" if value is None else "")
        )
    here = called_here(name, value=value, section=parents, options=frozenset(names))
    elsewhere = "" if here else _in_other_sections(name)
    hint = here or elsewhere or nearest(name, names)
    # an option of another section, or one of this section by a wrong name: both are said
    if hint and not (elsewhere and parents and names):
        return f"there is no option {key}{hint}"
    of = f" of {parents}" if elsewhere else ""
    return f"there is no option {key}{hint}; the options{of} are: {', '.join(names)}"


def _in_other_sections(name: str) -> str:
    """A hint where the option stands in another section: `; temperature is an option of sampling: sampling.temperature`."""
    found = [option for option in RULES if option.rpartition(".")[2] == name and "[" not in option]
    found.sort(key=lambda option: not option.startswith("train."))
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _without_names(location: Sequence[Any]) -> list[Any]:
    """A location without the name that pydantic adds for a section that is chosen by name: `loss.ppo_clip.clip_low`."""
    place = 2 if location and location[0] == "policies" else 0  # policies.0.loss
    named = len(location) > place + 1 and location[place + 1] in _NAMED.get(str(location[place]), {})
    return [*location[: place + 1], *location[place + 2 :]] if named else list(location)


def _section_at(location: Sequence[Any]) -> type[Section] | None:
    """The section of the schema for a location in the recipe."""
    section: type[Section] | None = Config
    for before, step in itertools.pairwise(("", *location)):
        if (chosen := _NAMED.get(str(before), {}).get(str(step))) is not None:  # the name of a section's class
            section = chosen
            continue
        if section is None or isinstance(step, int):
            continue
        field = section.model_fields.get(str(step))
        section = next(_sections(field.annotation), None) if field is not None else None
    return section


def _sections(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections(argument)
