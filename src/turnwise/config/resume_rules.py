"""Which options of a recipe may change when a run is resumed. `RULES` has a rule for each option; a test checks that.

A resumed run must give the same result as a run without interruption. So an option may change freely only if it does not affect
the training steps. Any other change is refused, unless `resume_changes` names the option.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from turnwise.errors import ConfigError, RunError, nearest
from turnwise.options.environment_values import same_value, with_digests
from turnwise.options.schema import Config
from turnwise.options.section import Section, Use, named_sections

__all__ = ["RULES", "Rule", "check_options", "named_changes", "option_values", "refuse_unknown_names"]

Rule = Literal["free", "rows", "named", "new", "fixed"]


def _all(rule: Rule, prefix: str, names: str) -> dict[str, Rule]:
    return {f"{prefix}{name}": rule for name in names.split()}


def _of_all_classes(rule: Rule, section: str) -> dict[str, Rule]:
    """The same rule for the options of all classes of a section that is chosen by name."""
    classes = named_sections(Config)[section].values()
    return {f"{section}.{name}": rule for cls in classes for name in cls.model_fields}


RULES: Mapping[str, Rule] = {
    # the weights and the state of the optimizer come from the checkpoint
    "model.path": "named",
    "model.gguf_file": "free",  # model.path is the directory that was made of it
    "model.dtype": "fixed",
    "model.autocast": "named",
    "model.device": "free",
    "model.gradient_checkpointing": "free",
    "model.kernels": "named",
    "model.router_replay": "named",
    "model.chat_template_kwargs": "named",
    **_all("fixed", "model.lora.", "rank alpha target_modules rslora dora"),
    **_all("fixed", "model.quantization.", "bits type double"),
    # the source of the rows may change; their contents are compared
    **_all("rows", "data.", "train split subset columns system_prompt max_rows"),
    **_all("free", "data.", "eval eval_split"),
    **_all("named", "data.", "max_prompt_tokens shuffle weights"),  # rows are compared before long ones are dropped
    "data.return_multi_modal_inputs": "free",
    "data.escape_control_tokens": "named",
    **_all("named", "data.curriculum.", "low high keep column"),
    # the environment and its tools
    **_all("named", "environment.", "use arguments"),
    "environment.thread": "free",
    **_all("named", "tools[].", "use arguments"),
    **_all("free", "tools[].", "thread timeout retries retry_timeouts"),
    **_all("named", "mcp.", "servers select also use scope titles"),
    **_all("free", "mcp.", "timeout retries retry_timeouts start_timeout max_sessions"),
    **_all(
        "named",
        "tool_calls.",
        "describe constrain choice max_parallel_calls max_calls max_tool_response_length tool_response_truncate_side "
        "tool_response_unit",
    ),
    # policies of agents
    **_all("named", "policies[].", "name path dtype bits endpoint reference temperature top_p top_k min_p"),
    **_all("named", "policies[].", "train lr loss credit"),
    "policies[].lora": "new",  # the checkpoint has the adapters of those that the run has trained
    **_all("free", "policies[].", "memory_gb"),
    # sampling
    **_all("named", "engine.", "name script"),
    **_all("free", "engine.", "slots memory_gb threads"),
    **_all(
        "free", "engine.", "url model api_key_env request max_tokens_field timeout retries"
    ),  # endpoints train nothing
    **_all("free", "engine.", "requests_per_minute tokens_per_minute"),
    **_all("free", "rollout_server.", "url token_env timeout weights_directory"),
    **_all(
        "free",
        "engine.",
        "mode python replicas tensor_parallel data_parallel devices arguments weight_transfer weight_folder check_weights_every "
        "sleep start_timeout",
    ),
    "engine.grammars": "named",
    **_all("free", "engine.", "keep_seeds update_mode"),
    **_all("named", "sampling.", "temperature top_p top_k min_p stop response_format"),
    **_all("named", "limits.", "turns tokens_per_turn tokens response_tokens context"),
    **_all("named", "limits.", "agents agent_turns agent_tokens"),
    **_all("free", "limits.", "seconds_per_turn seconds"),
    "tokenization_sanity_check": "free",
    **_all("named", "", "thinking use_inference_chat_template tool_format"),
    # rewards and optimization
    **_all("named", "reward.trajectory[].", "use arguments weight name"),
    **_all("named", "reward.turns[].", "use arguments weight name"),
    **_all("named", "reward.group[].", "use arguments weight name"),
    **_all("named", "reward.batch[].", "use arguments weight name"),
    **_all("named", "reward.kl.", "coef estimator target horizon"),
    "reward.timeout": "free",
    "reference.path": "fixed",  # the checkpoint does not hold the reference model
    "reference.source": "free",
    **_all("named", "reference.", "sync_every sync_weight"),
    **_all("named", "teacher.", "signal coef gamma clip divergence beta top_k column"),
    "teacher.timeout": "free",
    **_all("named", "teacher.models[].", "name path dtype bits weight context"),
    **_all("free", "teacher.models[].", "url server"),
    **_of_all_classes("named", "credit"),
    "critic.path": "fixed",  # with an adapter, its base model is not in the checkpoint
    **_all("named", "critic.", "lr clip warmup_steps"),
    "loss_mask": "named",
    **_all("free", "train.", "steps epochs"),
    **{f"{part}.optimizer.{name}": "fixed" for part in ("train", "sft") for name in ("name", "master_weights")},
    **{f"{part}.optimizer.offload": "free" for part in ("train", "sft")},
    **{f"{part}.optimizer.grad_accum_dtype": "named" for part in ("train", "sft")},
    **_all(
        "named",
        "train.",
        "batch_size group_size lr lr_schedule warmup_steps weight_decay betas max_grad_norm minibatches ppo_epochs",
    ),
    **_all("named", "train.", "max_staleness dynamic_sampling overlong_filter min_group_size replace_failed"),
    "train.group_timeout": "free",
    **_of_all_classes("named", "loss"),
    **_all("named", "correction.", "level action low high weight_level normalize_weights decoupled"),
    "correction.off_policy_sequence_mask_delta": "named",
    **_all("named", "correction.reject.", "level estimator low high"),
    **_all("free", "train.", "micro_batch_tokens share_prompts"),
    **_all("free", "eval.", "max_rows samples_per_row every pass_reward"),
    **_all("free", "eval.sampling.", "temperature top_p top_k min_p"),
    **_all("free", "rollout.", "max_rows samples_per_row"),
    **_all("free", "sft.", "steps epochs micro_batch_tokens eval_every max_eval_rows max_recorded_rows"),
    **_all("named", "sft.", "lr lr_schedule warmup_steps weight_decay betas max_grad_norm normalizer too_long"),
    "sft.batch_size": "fixed",  # the position in the data is counted in steps
    # the run itself
    **_all("free", "checkpoint.", "every keep background best"),
    **_all("free", "cluster.", "launcher address trainers backend timeout heartbeat restarts"),
    **_all("free", "cluster.workers.", "count num_cpus num_gpus resources runtime_env max_concurrent start_timeout"),
    **_all("free", "cluster.ranks.", "num_cpus num_gpus resources runtime_env start_timeout"),
    "cluster.fsdp.param_dtype": "named",
    **_all("free", "cluster.mesh.", "replicate shard context tensor expert"),
    **_all("free", "cluster.fsdp.", "reduce_dtype reshard_after_forward gradient_sync offload"),
    **_all("free", "record.", "every best_and_worst trainer_logprobs"),
    "record.compression": "fixed",  # a run has a single file of conversations
    **_all(
        "free",
        "health.",
        "window zero_std tool_use entropy duplicates length ratio mismatch kl reward_correlation reward_drop teacher_gap "
        "teacher_growth failed cut slow_rank",
    ),
    **_all("free", "health.", "constant_reward stop"),
    **_all("free", "loggers[].", "name project run conversations arguments"),
    **_all("free", "trace.", "backend conversations project"),
    **_all("free", "", "max_concurrent output resume resume_changes replace override_checks"),
    **_all("named", "", "seed deterministic"),
}


_OF_ENTRIES: dict[str, list[str]] = {}
"""For each option whose value is a list of sections, such as `tools`, the options of an entry."""
for _option, _found, _field in (rule.partition("[].") for rule in RULES):
    if _found:
        _OF_ENTRIES.setdefault(_option, []).append(_field)

_START_OPTIONS = ("resume", "resume_changes", "replace", "output")
"""Options of how a run starts. Changes of these are not reported."""


def option_values(config: Config) -> dict[str, Any]:
    """The value of each option as plain data, by its dotted name; `tools[].timeout` is the list of all tools' timeouts.

    Options of engines that the recipe does not use are left out. Values from environment variables have a digest instead
    (`same_value` compares them).
    """
    return dict(_values(config, with_digests(config.model_dump(mode="json"), config.origins), ""))


def _values(section: Section, plain: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name in type(section).model_fields:
        value, key = getattr(section, name), f"{prefix}{name}"
        if isinstance(value, Section) and type(value) is not Use:
            yield from _values(value, plain[name], f"{key}.")
        elif key in _OF_ENTRIES:
            for field in _OF_ENTRIES[key]:
                yield f"{key}[].{field}", [use[field] for use in plain[name]]
        else:
            yield key, plain[name]


def refuse_unknown_names(config: Config) -> None:
    """Refuse names in `resume_changes` that are not options, that cannot change, or that may change without being named.

    Raises ConfigError.
    """
    if config.resume_changes and config.resume != "auto":
        raise ConfigError("resume_changes has no effect without resume=auto: remove it, or set resume=auto")
    for name in config.resume_changes:
        if name not in RULES:
            inside = [
                one for one, rule in RULES.items() if one.startswith(f"{name}.") and rule not in ("fixed", "free")
            ]
            if inside:
                raise ConfigError(
                    f"resume_changes: {name} is a section: name the options in it that differ, such as {', '.join(inside[:3])}. "
                    f"Without resume_changes, the refusal says which these are"
                )
            raise ConfigError(f"resume_changes: there is no option {name}{nearest(name, RULES)}")
        if RULES[name] == "fixed":
            raise ConfigError(f"resume_changes: {name} cannot change when a run is resumed; remove it")
        if RULES[name] == "free":
            raise ConfigError(f"resume_changes: {name} may always change; remove it from the list")


@dataclass(frozen=True, slots=True)
class Change:
    """An option with which a run is resumed, and which was another one before."""

    option: str
    before: Any
    now: Any
    schedule: str = "constant"
    """`lr_schedule` of the option's section."""

    @property
    def note(self) -> str:
        """For the user."""
        section, _, name = self.option.partition(".")
        moved = name in ("steps", "epochs") and self.schedule != "constant"
        effect = f"; {section}.lr_schedule={self.schedule} now ends at the new last step: the next rates are others"
        return f"resuming with {self.option}={_short(self.now)} (was {_short(self.before)}){effect if moved else ''}"


def check_options(
    previous: Mapping[str, Any], now: Mapping[str, Any], *, named: Sequence[str], where: str, checkpoint: str
) -> list[Change]:
    """Compare the options of a run with the options that it is resumed with. Returns the changed options, without those of rows.

    An option that is missing in `previous` was added to turnwise later; its default value is assumed.
    Raises RunError if an option changed that must not change.
    """
    defaults = option_values(Config.model_validate({"model": {"path": "model"}, "data": {"train": "rows.jsonl"}}))
    before = {key: _as_now(previous.get(key, defaults.get(key)), value) for key, value in now.items()}
    changed = [key for key, value in before.items() if not same_value(value, now[key]) and key not in _START_OPTIONS]
    rules = {key: _rule(key, before, now) for key in changed}
    refused = [key for key in changed if rules[key] == "fixed" or (rules[key] == "named" and key not in named)]
    if refused:
        lines = "\n  ".join(f"{key}={_short(now[key])} (the run used {_short(before[key])})" for key in refused)
        names = [key for key in refused if rules[key] == "named"]
        fixed = [key for key in refused if rules[key] == "fixed"]
        also = f"; to change them for the next steps, set {named_changes(names)}" if names else ""
        never = f"; {', '.join(fixed)} cannot change" if fixed else ""
        if "model.dtype" in fixed:
            never += (
                f" (model.dtype=auto is bfloat16 on GPUs that compute in it, and float32 elsewhere: write "
                f"model.dtype={before['model.dtype']})"
            )
        raise RunError(
            f"the run in {where} cannot be resumed with other options:\n  {lines}\nUse the values of the run{also}{never}. Or "
            f"start another run from its weights: output=runs/<name> model.path={checkpoint}"
        )
    return [
        Change(key, before[key], now[key], schedule=now.get(f"{key.partition('.')[0]}.lr_schedule", "constant"))
        for key in changed
        if RULES[key] != "rows"
    ]


def _rule(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Rule:
    """The rule of a changed option. What is `new` is fixed for the policies that the run has trained."""
    if RULES[key] != "new":
        return RULES[key]
    names, trains = "policies[].name", "policies[].train"
    of_run = zip(before[names], before[trains], before[key], strict=True)
    known = {name: value for name, trained, value in of_run if trained}
    of_now = dict(zip(now[names], now[key], strict=True))
    return "fixed" if any(not same_value(known[name], of_now[name]) for name in known.keys() & of_now) else "named"


def _as_now(before: Any, now: Any) -> Any:
    """The value of an option that was a name when the run was started, and takes a reference with arguments now."""
    is_reference = isinstance(now, Mapping) and set(now) == {"use", "arguments"}
    return {"use": before, "arguments": {}} if is_reference and isinstance(before, str) else before


def named_changes(names: Sequence[str]) -> str:
    """The override that names these options as changed, for a shell. A name with `[]`, as of a list, is quoted for YAML."""
    listed = ", ".join(f'"{name}"' if "[" in name else name for name in names)
    return f"resume_changes='[{listed}]'"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:100]}..."
