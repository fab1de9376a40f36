"""Tables of verl's keys (default values, keys that become one option, keys without effect here), and the recipe builder.

Knows names and values; the keys that need computation are converted by `convert` and `convert_training`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from turnwise.compat.conversion import MISSING, RecipeBuilder, at
from turnwise.errors import ConfigError

REWARD_MANAGERS = ("reward_model.reward_manager", "reward_manager.name", "reward.reward_manager.name")
"""The keys of the reward manager in several versions of verl."""

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"

DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "critic.cliprange_value": 0.5,
    "critic.optim.lr": 1e-5,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "actor_rollout_ref.model.lora_alpha": 16,
    "algorithm.rollout_correction.bypass_mode": False,
    "algorithm.rollout_correction.loss_type": "ppo_clip",
    "algorithm.rollout_correction.rollout_is_batch_normalize": False,
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.entropy_coeff": 0.0,
    f"{ACTOR}.grad_clip": 1.0,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.optim.betas": [0.9, 0.999],
    f"{ACTOR}.optim.optimizer": "AdamW",
    f"{ACTOR}.optim.optimizer_impl": "torch.optim",
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.policy_loss.clip_cov_ratio": 0.0002,
    f"{ACTOR}.policy_loss.clip_cov_lb": 1.0,
    f"{ACTOR}.policy_loss.clip_cov_ub": 5.0,
    f"{ACTOR}.policy_loss.kl_cov_ratio": 0.0002,
    f"{ACTOR}.policy_loss.ppo_kl_coef": 0.1,
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.optim.lr_warmup_steps": -1,
    f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.0,
    f"{ACTOR}.optim.weight_decay": 0.01,
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.use_kl_loss": False,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.temperature": 1.0,
    f"{ROLLOUT}.top_k": -1,
    f"{ROLLOUT}.top_p": 1.0,
    f"{ROLLOUT}.val_kwargs.n": 1,
    f"{ROLLOUT}.val_kwargs.temperature": 0.0,
    f"{ROLLOUT}.val_kwargs.top_k": -1,
    f"{ROLLOUT}.val_kwargs.top_p": 1.0,
    f"{TURNS}.max_parallel_calls": 1,
    f"{TURNS}.max_tool_response_length": 256,
    f"{TURNS}.tool_response_truncate_side": "middle",
    f"{TURNS}.tokenization_sanity_check_mode": "strict",
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.prompt_key": "prompt",
    "data.reward_fn_key": "data_source",
    "data.shuffle": True,
    "data.train_batch_size": 1024,
    "data.train_max_samples": -1,
    "data.val_max_samples": -1,
    "custom_reward_function.name": "compute_score",
    "distillation.enabled": False,
    "distillation.teacher_key": "data_source",
    "distillation.distillation_loss.loss_mode": "k3",
    "distillation.distillation_loss.topk": 32,
    "distillation.distillation_loss.use_task_rewards": True,
    "distillation.distillation_loss.distillation_loss_coef": 1.0,
    "distillation.distillation_loss.use_policy_gradient": False,
    "distillation.distillation_loss.clip_ratio_low": 0.2,
    "distillation.distillation_loss.clip_ratio_high": 0.2,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
    "trainer.resume_mode": "auto",
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.total_epochs": 30,
}
"""verl's defaults of keys that become options, where verl's default differs or may differ from turnwise's default."""

PLAIN: dict[str, str] = {
    "data.shuffle": "data.shuffle",
    "data.seed": "seed",
    "data.return_multi_modal_inputs": "data.return_multi_modal_inputs",
    "data.train_batch_size": "train.batch_size",
    f"{ROLLOUT}.n": "train.group_size",
    f"{ROLLOUT}.temperature": "sampling.temperature",
    f"{ROLLOUT}.top_p": "sampling.top_p",
    f"{ACTOR}.optim.lr": "train.lr",
    f"{ACTOR}.optim.weight_decay": "train.weight_decay",
    f"{ACTOR}.optim.betas": "train.betas",
    f"{ACTOR}.grad_clip": "train.max_grad_norm",
    f"{ACTOR}.ppo_epochs": "train.ppo_epochs",
    f"{ACTOR}.entropy_coeff": "loss.entropy_coef",
    f"{TURNS}.tokenization_sanity_check_mode": "tokenization_sanity_check",
    f"{TURNS}.use_inference_chat_template": "use_inference_chat_template",
}
"""Keys that become one option, with the same value."""

HANDLED: tuple[str, ...] = (
    "actor_rollout_ref.model.path", "actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora_alpha",
    "actor_rollout_ref.model.target_modules", "actor_rollout_ref.model.exclude_modules",
    "actor_rollout_ref.model.enable_gradient_checkpointing", "actor_rollout_ref.model.use_liger",
    "actor_rollout_ref.actor.router_replay.mode",
    "actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff",
    "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo",
    "algorithm.use_kl_in_reward", "algorithm.kl_penalty", "algorithm.kl_ctrl.type", "algorithm.kl_ctrl.kl_coef",
    "algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl",
    "algorithm.filter_groups.enable", "algorithm.filter_groups.max_num_gen_batches", "algorithm.filter_groups.metric",
    "algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_is_threshold",
    "algorithm.rollout_correction.rollout_is_batch_normalize", "algorithm.rollout_correction.rollout_rs",
    "algorithm.rollout_correction.rollout_rs_threshold", "algorithm.rollout_correction.bypass_mode",
    "algorithm.rollout_correction.loss_type",
    f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.policy_loss.clip_cov_ratio", f"{ACTOR}.policy_loss.clip_cov_lb",
    f"{ACTOR}.policy_loss.clip_cov_ub", f"{ACTOR}.policy_loss.kl_cov_ratio", f"{ACTOR}.policy_loss.ppo_kl_coef",
    f"{ACTOR}.tau_pos", f"{ACTOR}.tau_neg", f"{ACTOR}.optim.optimizer",
    f"{ACTOR}.optim.optimizer_impl",
    f"{ACTOR}.clip_ratio", f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high", f"{ACTOR}.clip_ratio_c",
    f"{ACTOR}.fsdp_config.model_dtype", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type", f"{ACTOR}.loss_agg_mode",
    f"{ACTOR}.optim.lr_scheduler_type", f"{ACTOR}.optim.lr_warmup_steps", f"{ACTOR}.optim.lr_warmup_steps_ratio",
    f"{ACTOR}.optim.warmup_style", f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.use_kl_loss",
    f"{ROLLOUT}.max_model_len", f"{ROLLOUT}.top_k", f"{ROLLOUT}.val_kwargs.n", f"{ROLLOUT}.val_kwargs.temperature",
    f"{ROLLOUT}.val_kwargs.top_k", f"{ROLLOUT}.val_kwargs.top_p",
    f"{ROLLOUT}.interaction_config_file", f"{ROLLOUT}.tool_kwargs.tools_config_file",
    f"{ROLLOUT}.prompt_length", f"{ROLLOUT}.response_length",
    f"{ROLLOUT}.agent.agent_loop_config_path", f"{ROLLOUT}.agent.default_agent_loop",
    f"{TURNS}.enable", f"{TURNS}.format", f"{TURNS}.function_tool_path",
    f"{TURNS}.interaction_config_path", f"{TURNS}.max_assistant_turns",
    f"{TURNS}.max_parallel_calls", f"{TURNS}.max_tool_response_length", f"{TURNS}.max_user_turns",
    f"{TURNS}.tool_config_path", f"{TURNS}.tool_response_truncate_side",
    "data.apply_chat_template_kwargs",
    "data.filter_overlong_prompts", "data.image_key", "data.max_prompt_length", "data.max_response_length",
    "data.prompt_key", "data.return_raw_chat", "data.reward_fn_key", "data.tool_config_path", "data.train_files",
    "data.train_max_samples", "data.val_files", "data.val_max_samples", "data.video_key",
    "custom_reward_function.name", "custom_reward_function.path", "custom_reward_function.reward_kwargs",
    "reward.custom_reward_function.name", "reward.custom_reward_function.path",
    "reward.custom_reward_function.reward_kwargs",
    "distillation.enabled", "distillation.teacher_models", "distillation.teacher_key",
    *(
        f"distillation.distillation_loss.{name}"
        for name in (
            "loss_mode", "topk", "use_task_rewards", "distillation_loss_coef", "loss_max_clamp", "log_prob_min_clamp",
            "use_policy_gradient", "policy_loss_mode", "clip_ratio", "clip_ratio_low", "clip_ratio_high",
        )
    ),
    "rollout.multiturn.enabled", "rollout.multiturn.max_turns", "rollout.multiturn.stop_tokens",
    "rollout.multiturn.environment.tools", "rollout.multiturn.environment.type",
    "trainer.default_local_dir", "trainer.device", "trainer.experiment_name", "trainer.logger", "trainer.max_actor_ckpt_to_keep",
    "trainer.project_name", "trainer.resume_mode", "trainer.save_freq", "trainer.test_freq", "trainer.total_epochs",
    "trainer.total_training_steps",
)  # fmt: skip
"""Keys that `convert` and `convert_training` convert one by one."""

_NO = "turnwise does not support it"
FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "algorithm.use_pf_ppo": ((False,), _NO),
    f"{ACTOR}.loss_scale_factor": ((None,), _NO),
    f"{ACTOR}.shuffle": ((False,), "minibatches follow the order of the rows"),
    f"{ACTOR}.freeze_vision_tower": ((False,), "all parameters are trained"),
    f"{ACTOR}.optim.override_optimizer_config": ((None, {}), _NO),
    f"{ACTOR}.optim.min_lr_ratio": ((0, 0.0, None), "a schedule ends at 0"),
    f"{ACTOR}.optim.num_cycles": ((0.5,), "a cosine goes down once"),
    f"{ACTOR}.optim.total_training_steps": ((-1, None), "set trainer.total_training_steps"),
    f"{ACTOR}.optim.clip_grad": ((1.0, None), "set actor_rollout_ref.actor.grad_clip"),
    "actor_rollout_ref.model.custom_chat_template": ((None,), "put the template into the model's directory"),
    "actor_rollout_ref.model.trust_remote_code": ((False,), "turnwise does not run code of a model repository"),
    "actor_rollout_ref.model.external_lib": ((None,), "turnwise does not run code of a model repository"),
    "actor_rollout_ref.model.lora_adapter_path": ((None,), "merge the adapter into the model first"),
    "actor_rollout_ref.model.override_config": (({}, None), "change the model's config.json"),
    "actor_rollout_ref.model.tokenizer_path": ((None,), "the tokenizer is that of the model's directory"),
    "actor_rollout_ref.model.hf_config_path": ((None,), "the configuration is that of the model's directory"),
    "actor_rollout_ref.model.mtp.enable": ((False,), _NO),
    "data.tokenizer": ((None,), "the tokenizer is that of the model's directory"),
    "data.custom_cls.path": ((None,), "rows are read as they are: write the rows that the class yields to a file"),
    "data.sampler.class_path": ((None,), "rows are used in order or shuffled"),
    "data.datagen.path": ((None,), "rows are not generated during training"),
    "data.trust_remote_code": ((False,), "turnwise does not run code of a data set"),
    "data.truncation": (("error",), "prompts are not truncated"),
    f"{ROLLOUT}.do_sample": ((True,), "training needs a temperature above 0"),
    f"{ROLLOUT}.ignore_eos": ((False,), "a turn ends with its stop token"),
    f"{ROLLOUT}.quantization": ((None,), "the engine samples with the trainer's weights"),
    f"{ROLLOUT}.skip_rollout": ((False,), "use engine.name=scripted and `turnwise rollout` to replay given turns"),
    f"{ROLLOUT}.agent.custom_async_server.path": ((None,), _NO),
    f"{TURNS}.completion_callback": ((None,), "write it as an environment (README)"),
    f"{TURNS}.num_repeat_rollouts": ((None,), _NO),
    "reward_model.enable": ((False,), "call the reward model in a reward function: custom_reward_function"),
    "reward_model.reward_manager": (("naive", "batch"), "one score for a conversation: custom_reward_function"),
    "reward_model.sandbox_fusion.url": ((None,), "call the service in a reward function: custom_reward_function"),
    "reward_manager.name": (("naive", "batch"), "one score for a conversation: custom_reward_function"),
    "reward.reward_manager.name": (("naive", "batch"), "one score for a conversation: reward.custom_reward_function"),
    "reward.reward_model.enable": ((False,), "call the reward model in a reward function: custom_reward_function"),
    "reward_manager.source": (("register",), "one score for a conversation: custom_reward_function"),
    "trainer.val_only": ((False,), "use `turnwise rollout`"),
    "trainer.resume_from_path": ((None,), "set trainer.default_local_dir to the run's directory, and resume_mode=auto"),
}
"""Keys that must have a given value, and why no other value is possible."""

IDLE: dict[str, str] = {
    "algorithm.gamma": "has no effect with this adv_estimator, also not in verl",
    "algorithm.lam": "has no effect with this adv_estimator, also not in verl",
    "algorithm.pf_ppo.*": "has no effect without use_pf_ppo",
    f"{ACTOR}.policy_loss.*": "has no effect with this loss_mode, also not in verl",
    "actor_rollout_ref.model.mtp.*": "has no effect without mtp.enable",
    "data.custom_cls.name": "has no effect without custom_cls.path",
    "data.sampler.class_name": "has no effect without sampler.class_path",
    "data.datagen.name": "has no effect without datagen.path",
    "trainer.critic_warmup": "this adv_estimator has no critic, also not in verl",
    "trainer.max_critic_ckpt_to_keep": "a critic is in the checkpoint of its policy: checkpoint.keep",
    "distillation.*": "has no effect without distillation.enabled",
    "reward_model.*": "has no effect without reward_model.enable",
    "reward.reward_model.*": "has no effect without reward_model.enable",
    "reward.reward_manager.*": "has no effect with the reward managers naive and batch",
    "reward.reward_kwargs.*": "has no effect with the reward managers naive and batch",
    "reward.sandbox_fusion.*": "it is for verl's graders of programs",
    "reward_manager.*": "has no effect with the reward managers naive and batch",
}
"""Keys that have no effect as long as the keys of `FIXED` have their given values, and why."""

_NO_CRITIC = "this adv_estimator has no critic, also not in verl"
_AS_POLICY = "how verl runs its critic; here the critic runs as the policy does"

_WORK = (
    "how verl distributes work and memory; turnwise uses one process and train.micro_batch_tokens, or several processes with "
    "cluster=local or cluster=torchrun (docs/cluster.md)"
)
_RAY = "turnwise uses Ray only for rollout workers: set cluster=ray, with the address of the cluster (docs/cluster.md)"
_ENGINE = "an option of verl's engines; the embedded engine has other options (docs/recipes.md, engine.*)"
_WATCH = "metrics.jsonl, the curve and all conversations are always written (docs/record.md)"
_GREEDY = "val_kwargs.temperature selects how an evaluation samples; 0, verl's default, takes the most likely token"
MACHINERY: dict[str, str] = {
    "*._target_": "it names a class of verl",
    "hydra.*": "an option of Hydra",
    "*.profiler.*": "turnwise has no profiler",
    "global_profiler.*": "turnwise has no profiler",
    "ray_init.*": _RAY,
    "ray_kwargs.*": _RAY,
    "transfer_queue.*": _WORK,
    f"{ACTOR}.*micro_batch_size*": _WORK,
    f"{ACTOR}.ppo_max_token_len_per_gpu": _WORK,
    **{
        f"{ACTOR}.{name}": _WORK
        for name in (
            "use_dynamic_bsz",
            "use_torch_compile",
            "use_remove_padding",
            "use_fused_kernels",
            "use_prefix_grouper",
            "strategy",
            "entropy_checkpointing",
            "entropy_from_logits_with_chunking",
            "calculate_sum_pi_squared",
            "sum_pi_squared_checkpointing",
        )
    },
    f"{ACTOR}.calculate_entropy": _WATCH,
    f"{ACTOR}.fsdp_config.*": _WORK,
    f"{ACTOR}.veomni.*": _WORK,
    f"{ACTOR}.engine.*": _WORK,
    "model_engine": _WORK,
    f"{ACTOR}.megatron.*": _WORK,
    f"{ACTOR}.checkpoint.*": "a checkpoint always contains everything that is needed to resume",
    f"{ACTOR}.data_loader_seed": "minibatches follow the order of the rows",
    f"{ACTOR}.rollout_n": "rollout.n is used instead",
    f"{ACTOR}.router_replay.*": "has no effect without router_replay.mode",
    "actor_rollout_ref.ref.*": _WORK,
    "actor_rollout_ref.hybrid_engine": _WORK,
    "actor_rollout_ref.nccl_timeout": _WORK,
    **{
        f"actor_rollout_ref.model.{name}": _WORK
        for name in (
            "use_shm",
            "use_remove_padding",
            "use_fused_kernels",
            "enable_activation_offload",
            "enable_activation_offloading",
        )
    },
    "actor_rollout_ref.model.fused_kernel_options.*": _WORK,
    "actor_rollout_ref.model.tiled_mlp.*": _WORK,
    f"{ROLLOUT}.agent.num_workers": (
        "verl's workers share the servers of the engine; here each rollout worker has its own engine: for several workers, "
        "set cluster=ray and cluster.workers.count (docs/cluster.md)"
    ),
    f"{ROLLOUT}.agent.*": "it is for agent loops of the user",
    f"{ROLLOUT}.val_kwargs.*": _GREEDY,
    f"{ROLLOUT}.over_sample_rate": "slow conversations are not thrown away; limits.seconds bounds their time",
    f"{ROLLOUT}.calculate_log_probs": "the engine's log-probabilities are always recorded and compared with the trainer's",
    f"{ROLLOUT}.log_prob_*": _WORK,
    f"{ROLLOUT}.*parallel_size": _WORK,
    f"{ROLLOUT}.checkpoint_engine.*": _WORK,
    f"{ROLLOUT}.trace.*": _WATCH,
    f"{ROLLOUT}.prometheus.*": _WATCH,
    f"{ROLLOUT}.engine_kwargs.*": _ENGINE,
    f"{ROLLOUT}.server.*": _ENGINE,
    f"{ROLLOUT}.sglang_rollout_mode": _ENGINE,
    f"{ROLLOUT}.quantization_config_file": "has no effect without quantization",
    f"{ROLLOUT}.skip_dump_dir": "has no effect without skip_rollout",
    f"{ROLLOUT}.mtp*": "has no effect without mtp.enable",
    **{
        f"{ROLLOUT}.{name}": _ENGINE
        for name in (
            "name",
            "mode",
            "dtype",
            "gpu_memory_utilization",
            "enforce_eager",
            "cudagraph_capture_sizes",
            "free_cache_engine",
            "max_num_batched_tokens",
            "max_num_seqs",
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "enable_rollout_routing_replay",
            "logprobs_mode",
            "scheduling_policy",
            "load_format",
            "disable_log_stats",
            "multi_stage_wake_up",
            "skip_tokenizer_init",
            "layered_summon",
            "update_weights_bucket_megabytes",
            "limit_images",
            "use_fire_sampling",
            "seed",
        )
    },
    "reward.num_workers": _WORK,
    "data.use_shm": _WORK,
    "data.val_batch_size": _WORK,
    "data.dataloader_num_workers": _WORK,
    "data.filter_overlong_prompts_workers": _WORK,
    "data.return_raw_input_ids": "environments work on messages, not on tokens",
    "data.return_full_prompt": "environments work on messages, not on tokens",
    "data.image_patch_size": "the model's processor sets it",
    "data.validation_shuffle": "the order of held-out rows has no effect",
    "trainer.balance_batch": _WORK,
    "trainer.use_legacy_worker_impl": _WORK,
    "trainer.ray_wait_register_center_timeout": _WORK,
    "trainer.esi_redundant_time": _WORK,
    "trainer.del_local_ckpt_after_load": "checkpoint.keep sets how many checkpoints are kept",
    "trainer.default_hdfs_dir": "runs are written to a local directory",
    "trainer.log_val_generations": _WATCH,
    "trainer.rollout_data_dir": _WATCH,
    "trainer.validation_data_dir": _WATCH,
    "trainer.val_before_train": "held-out rows are always evaluated before and after training",
    "rollout.engine": _ENGINE,
}
"""Keys that change only the execution and not the result of training, and why."""


def _of(table: dict[str, str], key: str) -> str | None:
    if key in table:
        return table[key]
    return next((reason for pattern, reason in table.items() if fnmatchcase(key, pattern)), None)


def idle(key: str, *, critic: bool = False) -> str | None:
    """Why a key has no effect, or None. `critic`: whether the estimator of advantages has a critic."""
    if key.startswith("critic."):
        return _AS_POLICY if critic else _NO_CRITIC
    return _of(IDLE, key)


def machinery(key: str) -> str | None:
    """Why a key does not change the result of training, or None."""
    return _of(MACHINERY, key)


class VerlRecipeBuilder(RecipeBuilder):
    """Reads keys such as `actor_rollout_ref.model.path` from a configuration tree, and builds a recipe from them."""

    def __init__(self, tree: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """`defaults` holds the values of keys that the configuration does not contain."""
        super().__init__()
        for key, default in defaults.items():
            self._refuse_other_than_text(tree, key, wanted=isinstance(default, str))
        for key in ("data.image_key", "data.video_key"):
            self._refuse_other_than_text(tree, key, wanted=True)
        self.tree = tree
        self.defaults = defaults

    @staticmethod
    def _refuse_other_than_text(tree: Mapping[str, Any], key: str, *, wanted: bool) -> None:
        value = at(tree, key)
        if wanted and isinstance(value, list | dict):
            raise ConfigError(f"{key} must be a text; it is {value!r:.80}")

    def has(self, key: str) -> bool:
        return at(self.tree, key) is not MISSING

    def value(self, key: str) -> Any:
        value = at(self.tree, key)
        return self.defaults.get(key) if value is MISSING else value

    def is_set(self, key: str) -> bool:
        """Whether the configuration contains the key, and its value is not null."""
        return at(self.tree, key) not in (MISSING, None)

    def reference(self, key: str) -> str | None:
        """The text `${NAME}` if the value is a variable that was not set when the configuration was read."""
        value = self.value(key)
        return value if isinstance(value, str) and re.fullmatch(r"\$\{\w+\}", value) else None

    def _or_default(self, key: str) -> Any:
        """The value of a number, or its default if the value is an unset variable, which is then reported."""
        if self.reference(key) is None:
            return self.value(key)
        default = self.defaults.get(key)
        used = "no value" if default is None else f"verl's default, {default}"
        reason = f"a number is computed with it, and the variable is not set here, so {used} was used: set the variable first"
        self.reject(key, reason, changes_training=True)
        return default

    def count(self, key: str) -> int | None:
        """An integer of at least 0; None if there is no bound, which verl writes as null, false or -1. Raises ConfigError."""
        value = self._or_default(key)
        if value is None or value is False or (isinstance(value, int | float) and value < 0):
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{key} must be an integer; it is {value!r}")
        return value

    def number(self, key: str) -> float:
        """A finite number. Raises ConfigError."""
        value = self._or_default(key)
        # the chained comparison is also false for NaN
        if isinstance(value, bool) or not isinstance(value, int | float) or not -(2**63) <= value < 2**63:
            raise ConfigError(f"{key} must be a number of 64 bits; it is {value!r:.80}")
        return value

    def choice(self, key: str, option: str, names: dict[str, str]) -> None:
        """Set an option whose values have other names in verl: `names` maps verl's name to ours."""
        value = self.value(key)
        if isinstance(value, str) and value in names:
            self.set(option, names[value], key)
        else:
            self.reject(key, f"{option} supports these values of verl: {', '.join(names)}", changes_training=True)
