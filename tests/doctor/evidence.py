"""How it is known of each option of a recipe that it takes effect.

`turnwise.doctor.options.EFFECTS` has the options whose data the doctor compares. `TESTED` and `REQUIRED` have all others;
tests/doctor/test_effects.py asserts that every option of the schema is in exactly one of the three.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["REQUIRED", "TESTED"]

REQUIRED: Mapping[str, str] = {
    "model.path": "the model",
    "data.train": "the rows",
    "data.eval": "the held-out rows",
    "environment.use": "who answers the model",
    "tools[].use": "a tool",
    "mcp.servers": "the servers' file",
    "engine.name": "the engine",
    "engine.script": "the lines of the scripted engine",
    "credit.name": "the estimator",
    "output": "the run's directory",
}
"""Options that name something a run cannot start without reading, and what they name."""


def _effects(name: str) -> str:
    return f"doctor/test_effects.py::test_{name}"


def _tools(name: str) -> str:
    return f"test_assembly.py::test_{name}"


_LEARNT = _effects("an_option_of_training_changes_what_is_learnt")
_SERVED = "rollout_server/test_training.py::test_"
_REACHES = _effects("the_option_reaches_the_part_of_the_run_that_reads_it")
_PATIENCE = _tools("what_a_ready_made_tool_says_itself_holds_unless_the_recipe_says_something_else")
_SERVERS = _tools("the_tools_of_mcp_servers_stand_beside_the_others")
_CUT = _tools("long_answers_are_cut_as_the_recipe_says")
_EVALUATIONS = _effects("evaluations_are_as_many_as_the_recipe_says")
_CHECKPOINTS = _effects("checkpoints_are_as_many_as_the_recipe_says")
_FINE_TUNED = _effects("an_option_of_fine_tuning_changes_what_is_learnt")
_MEASURED = _effects("fine_tuning_is_measured_and_written_down_as_the_recipe_says")
_ROWS = "rollout/test_pipeline.py::test_"
_ASYNCHRONOUS = "runs/test_training_run.py::test_"
_CRITIC = "training/test_critic.py::test_"
_VLLM = "engines/vllm/test_vllm.py::test_"
_REPEATED = "test_train.py::test_deterministic_runs_are_bit_identical_and_so_is_one_that_is_gone_on_with"

_THREADS = "environments/test_environment.py::test_a_recipe_asks_for_threads"
_RANKS = "cluster/test_cluster_run.py::test_"
_FSDP = ("param_dtype", "reduce_dtype", "reshard_after_forward", "gradient_sync", "offload")
_WORKERS = ("count", "num_cpus", "num_gpus", "resources", "runtime_env", "max_concurrent", "start_timeout")
_TEACHER = "training/test_teacher.py::test_"
_POLICIES = "runs/test_episodes.py::test_"
_TRAINED = "runs/test_trained_policies.py::test_"
_QUANTIZED = "training/test_lora.py::test_"
_LOGGED = "loggers/test_loggers.py::test_"
TESTED: Mapping[str, str] = {
    **{
        f"loggers[].{name}": f"{_LOGGED}the_options_reach_the_tracker"
        for name in ("project", "run", "conversations", "arguments")
    },
    "loggers[].name": f"{_LOGGED}a_run_with_tensorboard",
    **{f"trace.{name}": f"{_LOGGED}traces_in_a_file" for name in ("backend", "conversations")},
    "trace.project": f"{_LOGGED}spans_reach_an_opentelemetry_collector",
    **{f"model.{name}": _LEARNT for name in ("dtype", "autocast")},
    "model.quantization.bits": f"{_QUANTIZED}products_use_the_weights_in_4_bits_and_only_the_adapter_is_trained",
    **{
        f"model.quantization.{name}": f"{_QUANTIZED}how_weights_are_quantized_changes_them"
        for name in ("type", "double")
    },
    "model.gguf_file": "training/test_loading.py::test_a_gguf_file_is_dequantized_once_and_trained_and_saved_as_safetensors",
    "model.kernels": "training/test_kernels.py::test_layers_with_the_code_of_llama_get_the_kernels",
    "model.router_replay": "training/test_experts.py::test_a_run_records_experts_and_uses_them_again",
    "loss.router_aux_loss_coef": "training/test_experts.py::test_steps_on_the_loss_balance_the_experts",
    "model.chat_template_kwargs": "chat/test_template_arguments.py::test_rollouts_and_evaluations_use_the_arguments",
    **{
        f"cluster.{name}": f"{_RANKS}a_run_of_one_process_goes_on_with_two_ranks_which_start_again_after_a_loss"
        for name in ("launcher", "trainers", "restarts")
    },
    **{
        f"cluster.{name}": "cluster/test_cluster_options.py::test_options_of_the_recipe_reach_the_ranks"
        for name in ("backend", "timeout", *(f"fsdp.{name}" for name in _FSDP))
    },
    **{
        f"cluster.mesh.{name}": "cluster/test_sharded.py::test_a_group_of_ranks_has_the_complete_model"
        for name in ("replicate", "shard", "tensor", "expert")
    },
    "cluster.mesh.context": "cluster/test_sharded.py::test_each_rank_keeps_the_activations_of_its_tokens",
    **{
        f"cluster.{name}": "cluster/test_cluster_options.py::test_options_of_the_recipe_reach_the_workers"
        for name in ("address", *(f"workers.{name}" for name in _WORKERS))
    },
    **{
        f"cluster.ranks.{name}": "cluster/test_cluster_options.py::test_options_of_the_recipe_reach_the_ranks_on_ray"
        for name in ("num_cpus", "num_gpus", "resources", "runtime_env", "start_timeout")
    },
    "cluster.heartbeat": f"{_RANKS}a_rank_that_hangs_ends_the_run_in_time",
    "model.device": _effects("a_device_that_is_not_there_is_told"),
    "data.max_prompt_tokens": _effects("rows_with_longer_prompts_are_left_out"),
    "data.return_multi_modal_inputs": "chat/test_media.py::test_images_of_rows_can_be_made_ready_at_the_start",
    "data.escape_control_tokens": "chat/test_round_trip.py::test_the_option_says_in_whose_messages",
    "environment.arguments": "test_assembly.py::test_each_conversation_gets_a_fresh_environment_with_its_arguments",
    "environment.thread": _THREADS,
    "tools[].thread": _THREADS,
    "tools[].arguments": _tools("classes_functions_and_ready_made_tools_are_named_alike"),
    **{f"tools[].{name}": _PATIENCE for name in ("timeout", "retries", "retry_timeouts")},
    **{
        f"mcp.{name}": "environments/test_mcp.py::test_the_recipe_gives_each_conversation_its_server"
        for name in ("scope", "max_sessions")
    },
    "mcp.also": "environments/test_mcp.py::test_resources_and_prompts_are_tools_if_the_recipe_says_so",
    "mcp.titles": "environments/test_mcp.py::test_titles_are_left_out_and_parameters_of_that_name_stay",
    **{f"mcp.{name}": _SERVERS for name in ("select", "use", "timeout", "retries", "retry_timeouts", "start_timeout")},
    **dict.fromkeys(
        ("tool_calls.constrain", "tool_calls.choice", "sampling.response_format"),
        "training/test_constrained.py::test_the_options_of_the_recipe_reach_the_turns",
    ),
    **{
        f"tool_calls.{name}": _tools("calls_beyond_the_recipes_bound_are_told_so")
        for name in ("max_parallel_calls", "max_calls")
    },
    "tool_calls.max_tool_response_length": _CUT,
    "tool_calls.tool_response_truncate_side": _CUT,
    "tool_calls.tool_response_unit": _CUT,
    **{
        f"engine.{name}": _effects(f"the_{name}_of_the_recipe_are_those_of_the_engine") for name in ("slots", "threads")
    },
    **{
        f"engine.{name}": "engines/test_sglang.py::test_options_of_the_recipe" for name in ("keep_seeds", "update_mode")
    },
    "engine.memory_gb": _effects("the_memory_of_the_recipe_is_that_of_the_engine"),
    **{
        f"engine.{name}": "runs/test_training_run.py::test_the_options_of_an_endpoint_reach_its_requests"
        for name in ("url", "model", "api_key_env", "request", "max_tokens_field", "timeout", "retries")
    },
    **{
        f"engine.{name}": "runs/test_training_run.py::test_the_limits_of_an_endpoint_space_its_requests"
        for name in ("requests_per_minute", "tokens_per_minute")
    },
    **{
        f"engine.{name}": f"{_VLLM}a_started_server_gets_the_options_of_the_recipe"
        for name in ("python", "replicas", "arguments", "start_timeout")
    },
    **{
        f"engine.{name}": "engines/remote/test_server_process.py::test_each_server_sees_its_own_devices"
        for name in ("tensor_parallel", "data_parallel", "devices")
    },
    **{
        f"engine.{name}": f"{_VLLM}weights_are_written_to_the_folder_of_the_recipe_and_checked_as_often_as_it_says"
        for name in ("weight_folder", "check_weights_every", "sleep")
    },
    "engine.grammars": "training/test_constrained.py::test_turns_under_a_grammar_of_servers_are_trained_on_if_the_recipe_says_so",
    "engine.weight_transfer": "engines/test_shared_weights.py::test_memory_is_shared_with_a_server_on_the_trainers_gpu",
    "engine.mode": f"{_VLLM}the_engine_in_this_process_needs_vllm_here",
    "eval.pass_reward": "runs/test_evaluation.py::test_the_pass_rate_counts_rewards_from_the_recipes_bound",
    "tokenization_sanity_check": _REACHES,
    "override_checks": "doctor/test_template.py::test_a_check_that_fails_is_overridden_by_its_name_and_stays_visible",
    "tool_calls.describe": "doctor/test_template.py::test_tools_that_no_prompt_shows_are_refused",
    "thinking": _effects("the_thinking_policy_reaches_the_loop"),
    "use_inference_chat_template": _effects("verls_name_for_branch_is_branch"),
    "tool_format": _REACHES,
    **{
        f"reward.kl.{name}": "runs/test_kl_reward.py::"
        "test_options_of_the_divergence_and_of_the_reference_change_what_is_learnt"
        for name in ("coef", "estimator", "target", "horizon")
    },
    **{
        f"reference.{name}": "runs/test_kl_reward.py::"
        "test_options_of_the_divergence_and_of_the_reference_change_what_is_learnt"
        for name in ("path", "sync_every", "sync_weight")
    },
    "reference.source": "runs/test_kl_reward.py::"
    "test_with_an_adapter_the_model_without_it_and_a_copy_are_the_same_reference",
    **{
        f"teacher.{name}": f"{_TEACHER}options_of_the_teacher_change_what_is_learnt"
        for name in (
            "signal",
            "coef",
            "gamma",
            "clip",
            "divergence",
            "beta",
            "top_k",
            "column",
            *(f"models[].{name}" for name in ("name", "path", "dtype", "weight", "context")),
        )
    },
    **{
        f"teacher.{name}": f"{_TEACHER}a_teacher_on_a_server_gives_what_a_local_teacher_gives"
        for name in ("models[].url", "models[].server", "timeout")
    },
    "teacher.models[].bits": f"{_TEACHER}the_sources_of_local_teachers_are_those_of_the_recipe",
    **{
        f"policies[].{name}": f"{_POLICIES}frozen_policies_take_turns_with_their_own_weights_and_sampling_and_are_not_trained_on"
        for name in ("name", "path", "reference", "temperature")
    },
    **{
        f"policies[].{name}": f"{_POLICIES}what_a_policy_is_made_of_is_what_the_recipe_says"
        for name in ("dtype", "bits", "memory_gb", "top_p", "top_k", "min_p")
    },
    "policies[].train": f"{_TRAINED}each_policy_learns_from_its_own_conversations_and_a_resumed_run_has_the_same_bits",
    **{
        f"policies[].{name}": f"{_TRAINED}options_of_a_policy_change_what_it_learns_and_nothing_else_in_the_first_step"
        for name in ("lora", "lr", "loss", "credit")
    },
    "policies[].endpoint": f"{_POLICIES}a_policy_on_a_server_takes_turns_in_text",
    "critic.path": f"{_CRITIC}the_critic_starts_from_another_model_or_from_the_critic_of_a_run",
    **{f"critic.{name}": f"{_CRITIC}options_of_the_critic_change_what_is_learnt" for name in ("lr", "clip")},
    "critic.warmup_steps": f"{_CRITIC}the_policy_waits_while_the_critic_warms_up",
    "train.dynamic_sampling": f"{_ROWS}groups_without_differences_are_replaced",
    "train.overlong_filter": f"{_ROWS}cut_trajectories_are_not_trained_on",
    "data.weights": f"{_ROWS}data_sets_are_mixed_by_their_weights",
    **{f"data.curriculum.{name}": f"{_ROWS}the_curriculum_skips_rows" for name in ("low", "high", "keep", "column")},
    **{f"train.{name}": _LEARNT for name in ("batch_size", "group_size", "minibatches", "ppo_epochs")},
    "loss.name": _LEARNT,
    "train.max_staleness": "test_train.py::test_overlapping_marks_which_weights_sampled_what",
    "train.group_timeout": f"{_ASYNCHRONOUS}a_hung_conversation_does_not_stop_its_group",
    "train.min_group_size": f"{_ASYNCHRONOUS}a_group_with_too_few_conversations_is_not_trained_on",
    "train.replace_failed": f"{_ASYNCHRONOUS}failed_groups_are_replaced",
    "train.micro_batch_tokens": _effects("the_size_of_a_micro_batch_is_that_of_the_recipe"),
    "train.share_prompts": _REACHES,
    **{f"eval.{name}": _EVALUATIONS for name in ("max_rows", "samples_per_row", "every")},
    **{
        f"eval.sampling.{name}": _effects("evaluations_draw_as_their_own_sampling_says")
        for name in ("temperature", "top_p", "top_k", "min_p")
    },
    "rollout.max_rows": "commands/test_cli.py::test_only_the_first_rows_are_used_where_the_recipe_says_so",
    "rollout.samples_per_row": "commands/test_cli.py::test_the_script_says_how_many_conversations_there_are",
    **{
        f"sft.{name}": _FINE_TUNED
        for name in (
            "steps",
            "epochs",
            "batch_size",
            "lr",
            "lr_schedule",
            "warmup_steps",
            "weight_decay",
            "betas",
            "max_grad_norm",
            "normalizer",
            "too_long",
        )
    },
    **{
        f"sft.optimizer.{name}": "training/test_update.py::test_the_optimizer_of_fine_tuning_is_that_of_the_recipe"
        for name in ("name", "master_weights", "offload", "grad_accum_dtype")
    },
    "sft.micro_batch_tokens": _effects("the_size_of_a_micro_batch_of_fine_tuning_is_that_of_the_recipe"),
    **{f"sft.{name}": _MEASURED for name in ("eval_every", "max_eval_rows", "max_recorded_rows")},
    **{
        f"health.{name}": "runs/test_health.py::test_a_monitor_warns_with_value_limit_and_command"
        for name in ("zero_std", "duplicates", "ratio", "mismatch", "kl", "reward_correlation", "failed", "slow_rank")
    },
    **{
        f"health.{name}": "runs/test_health.py::test_the_last_steps_are_compared_with_the_first"
        for name in ("window", "tool_use", "entropy", "length")
    },
    **{
        f"health.{name}": "runs/test_health.py::test_a_teacher_that_teaches_nothing_and_one_that_is_not_followed_are_noticed"
        for name in ("teacher_gap", "teacher_growth")
    },
    "health.reward_drop": "runs/test_health.py::test_a_reward_that_falls_below_its_best_window_is_noticed",
    "health.cut": "runs/test_health.py::test_many_answers_that_are_cut_are_told_with_the_limit_that_cuts_most",
    "health.constant_reward": "runs/test_health.py::test_the_number_of_first_steps_is_that_of_the_recipe",
    "health.stop": "runs/test_health.py::test_a_monitor_stops_the_run_with_a_checkpoint",
    **{f"checkpoint.{name}": _CHECKPOINTS for name in ("every", "keep")},
    "checkpoint.background": "runs/test_resuming.py::test_a_checkpoint_that_is_written_in_the_background_is_that_of_its_step",
    "checkpoint.best": _effects("the_checkpoint_with_the_best_evaluation_is_kept"),
    **{
        f"record.{name}": "runs/test_replay.py::test_a_run_records_what_the_recipe_says"
        for name in ("every", "best_and_worst", "compression", "trainer_logprobs")
    },
    "rollout_server.url": f"{_SERVED}a_run_with_a_server_is_the_run_in_one_process",
    "rollout_server.token_env": f"{_SERVED}a_wrong_token_is_refused",
    "rollout_server.timeout": f"{_SERVED}the_time_limit_is_that_of_the_recipe",
    "rollout_server.weights_directory": f"{_SERVED}training_with_a_server_learns",
    "max_concurrent": _REACHES,
    "deterministic": _REPEATED,
    "resume": _REPEATED,
    "resume_changes": "runs/test_resuming.py::test_a_change_that_is_named_takes_effect",
    "replace": "test_train.py::test_a_former_run_is_not_overwritten",
}
"""The test that fails if the option has no effect: `file::function`, below tests/."""
