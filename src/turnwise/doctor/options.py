"""That each option of a recipe takes effect: what it changes, or which test of turnwise proves that it does.

An option whose value reaches plain data (`build` makes it from the recipe, for the run as for here) is shown by making that
data twice: from the recipe, and from the recipe with the option as if it had not been written. An option that only the loop
itself reads is proven by a test, named here. `EVIDENCE` knows every option of the schema; a test holds it to that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from turnwise import build
from turnwise.config.part import Part, changed_options
from turnwise.config.schema import Config, ScriptedEngine, Use
from turnwise.config.sft_checks import refuse_sft_without_effect
from turnwise.config.train_checks import refuse_without_effect, refuse_without_reward
from turnwise.data.rows import Order
from turnwise.doctor.check import Check, wrong
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.rollout.rollout import new_group
from turnwise.types import Completion, Group, LogprobKind, Row, Segment, Trajectory, Turn

__all__ = ["EVIDENCE", "Named", "Proven", "Shown", "fine_tunes", "options_of", "schema", "take_effect"]


@dataclass(frozen=True, slots=True)
class Shown:
    """What is made of the option: two recipes that differ in it must differ in this."""

    by: Callable[[Config], Any]


@dataclass(frozen=True, slots=True)
class Proven:
    """The test that fails if the option does nothing: `file::function`, below tests/."""

    test: str


@dataclass(frozen=True, slots=True)
class Named:
    """An option that says where something is, or what it is called: the run cannot begin without reading it."""

    what: str


Evidence = Shown | Proven | Named


def _rates(config: Config) -> list[float]:
    return [build.learning_rate(config.train, step, steps=config.train.steps) for step in range(config.train.steps)]


def _optimization(config: Config) -> list[Any]:
    return [build.loss_config(config), build.optimizer_config(config.train)]


def _advantages(config: Config) -> list[Any]:
    """Of a group with these rewards."""
    group = Group(id="g", row=_ROW, trajectories=[_trajectory(str(n)) for n in range(4)])
    for one, reward in zip(group.trajectories, (1.0, 0.0, 0.0, 3.0), strict=True):
        one.reward = reward
    build.credit(config)([group])
    return [one.advantages for one in group.trajectories]


def _weights(config: Config) -> list[float] | str:
    """Of the turns of a conversation with a tool and a user in it; a rule of the user's own is its name."""
    if ":" in config.loss_mask.use:
        return f"{config.loss_mask.use}({config.loss_mask.arguments})"
    one = _trajectory("1")
    build.turn_weighting(config)(one)
    return [turn.weight for turn in one.turns]


def _streams(config: Config) -> list[Any]:
    """Which rows come when, and with which random streams."""
    group = new_group(_ROW, size=2, seed=config.seed)
    order = Order(64, seed=config.seed, shuffle=config.data.shuffle)
    return [list(order.take(0, 64)), [one.seed for one in group.trajectories]]


def _rows(config: Config, held_out: bool = False) -> list[Any]:
    rows = build.rows(config, held_out=held_out)
    return [config.data.subset, *((row.id, list(row.messages), dict(row.fields)) for row in rows)]


def _held_out(config: Config) -> list[Any]:
    return _rows(config, held_out=True)


def _reward_functions(config: Config) -> list[Any]:
    found = build.scorer(config)
    uses = [*config.reward.trajectory, *config.reward.turns, *config.reward.group]
    functions = [*found.trajectory, *found.turns, *found.groups]
    made = zip(functions, uses, strict=True)
    return [found.timeout, *((one.name, one.weight, use.use, use.arguments) for one, use in made)]


_ROW = Row(id="r", messages=[{"role": "user", "content": "?"}])


def _trajectory(name: str) -> Trajectory:
    """Three turns: a tool call, an answer, and an answer to a user who asks back."""
    said = [{"role": "assistant", "content": str(n)} for n in range(3)]
    one = Trajectory(id=name, group="g", row=_ROW)
    one.messages = [
        *_ROW.messages,
        said[0],
        {"role": "tool", "content": "!"},
        said[1],
        {"role": "user", "content": "Sure?"},
        said[2],
    ]
    segment = Segment()
    for index, message in enumerate(said):
        completion = Completion(
            token_ids=[index], logprobs=[0.0], versions=[0], finish_reason="stop", logprob_kind=LogprobKind.NONE
        )
        segment.append_context([9])
        segment.append_completion(index, completion)
        one.turns.append(Turn(index=index, message=message, text=str(index), completion=completion))
    one.segments.append(segment)
    return one


_SAMPLING, _LIMITS = Shown(build.sampling), Shown(lambda config: build.limits(config, longest=None))
_OPTIMIZATION, _REWARDS, _DATA = Shown(_optimization), Shown(_reward_functions), Shown(_rows)


def _effects(name: str) -> Proven:
    return Proven(f"doctor/test_effects.py::test_{name}")


def _tools(name: str) -> Proven:
    return Proven(f"test_build_tools.py::test_{name}")


_LEARNT = _effects("an_option_of_training_changes_what_is_learnt")
_REACHES = _effects("the_option_reaches_the_part_of_the_run_that_reads_it")
_PATIENCE = _tools("what_a_ready_made_tool_says_itself_holds_unless_the_recipe_says_something_else")
_SERVERS = _tools("the_tools_of_mcp_servers_stand_beside_the_others")
_CUT = _tools("long_answers_are_cut_as_the_recipe_says")
_EVALUATIONS = _effects("evaluations_are_as_many_as_the_recipe_says")
_CHECKPOINTS = _effects("checkpoints_are_as_many_as_the_recipe_says")
_FINE_TUNED = _effects("an_option_of_fine_tuning_changes_what_is_learnt")
_MEASURED = _effects("fine_tuning_is_measured_and_written_down_as_the_recipe_says")
_REPEATED = Proven("test_train.py::test_deterministic_runs_are_bit_identical_and_so_is_one_that_is_gone_on_with")

_THREADS = Proven("environments/test_threaded_environment.py::test_a_recipe_asks_for_threads")
EVIDENCE: Mapping[str, Evidence] = {
    "model.path": Named("the model"),
    "model.dtype": _LEARNT,
    "model.device": _effects("a_device_that_is_not_there_is_told"),
    "data.train": Named("the rows"),
    "data.eval": Named("the held-out rows"),
    "data.eval_split": Shown(_held_out),
    **{f"data.{name}": _DATA for name in ("split", "subset", "columns", "system_prompt", "max_rows")},
    "data.shuffle": Shown(_streams),
    "data.max_prompt_tokens": _effects("rows_with_longer_prompts_are_left_out"),
    "data.return_multi_modal_inputs": Proven("chat/test_media.py::test_images_of_rows_can_be_made_ready_at_the_start"),
    "environment.use": Named("who answers the model"),
    "environment.arguments": Proven(
        "test_build.py::test_each_conversation_gets_a_fresh_environment_with_its_arguments"
    ),
    "environment.thread": _THREADS,
    "tools[].thread": _THREADS,
    "tools[].use": Named("a tool"),
    "tools[].arguments": _tools("classes_functions_and_ready_made_tools_are_named_alike"),
    **{f"tools[].{name}": _PATIENCE for name in ("timeout", "retries", "retry_timeouts")},
    "mcp.servers": Named("the servers' file"),
    **{f"mcp.{name}": _SERVERS for name in ("select", "use", "timeout", "retries", "retry_timeouts", "start_timeout")},
    "tool_calls.max_parallel_calls": _tools("calls_beyond_the_recipes_bound_are_told_so"),
    "tool_calls.max_tool_response_length": _CUT,
    "tool_calls.tool_response_truncate_side": _CUT,
    "tool_calls.tool_response_unit": _CUT,
    "engine.name": Named("the engine"),
    "engine.script": Named("the lines of the scripted engine"),
    **{
        f"engine.{name}": _effects(f"the_{name}_of_the_recipe_are_those_of_the_engine") for name in ("slots", "threads")
    },
    "engine.memory_gb": _effects("the_memory_of_the_recipe_is_that_of_the_engine"),
    **{f"sampling.{name}": _SAMPLING for name in ("temperature", "top_p", "top_k", "min_p", "stop")},
    **{
        f"limits.{name}": _LIMITS
        for name in ("turns", "tokens_per_turn", "tokens", "response_tokens", "context", "seconds_per_turn", "seconds")
    },
    "tokenization_sanity_check": _REACHES,
    "thinking": _effects("the_thinking_policy_reaches_the_loop"),
    "use_inference_chat_template": _effects("verls_name_for_branch_is_branch"),
    "tool_format": _REACHES,
    **{
        f"reward.{of}[].{name}": _REWARDS
        for of in ("trajectory", "turns", "group")
        for name in ("use", "arguments", "weight", "name")
    },
    "reward.timeout": _REWARDS,
    "credit.name": Named("the estimator"),
    "credit.scale": Shown(_advantages),
    "loss_mask": Shown(_weights),
    **{f"train.{name}": Shown(_rates) for name in ("steps", "lr", "lr_schedule", "warmup_steps")},
    **{
        f"train.{name}": _OPTIMIZATION
        for name in ("weight_decay", "betas", "max_grad_norm", "clip_low", "clip_high", "kl_coef", "entropy_coef")
    },
    **{f"train.{name}": _LEARNT for name in ("batch_size", "group_size", "minibatches", "ppo_epochs", "loss_average")},
    "train.overlap": Proven("test_train.py::test_overlapping_marks_which_weights_sampled_what"),
    "train.micro_batch_tokens": _effects("the_size_of_a_micro_batch_is_that_of_the_recipe"),
    "train.share_prompts": _REACHES,
    **{f"eval.{name}": _EVALUATIONS for name in ("max_rows", "samples_per_row", "every")},
    **{
        f"eval.sampling.{name}": _effects("evaluations_draw_as_their_own_sampling_says")
        for name in ("temperature", "top_p", "top_k", "min_p")
    },
    "rollout.max_rows": Proven("commands/test_cli.py::test_only_the_first_rows_are_used_where_the_recipe_says_so"),
    "rollout.samples_per_row": Proven("commands/test_cli.py::test_the_script_says_how_many_conversations_there_are"),
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
            "loss_average",
            "too_long",
        )
    },
    "sft.micro_batch_tokens": _effects("the_size_of_a_micro_batch_of_fine_tuning_is_that_of_the_recipe"),
    **{f"sft.{name}": _MEASURED for name in ("eval_every", "max_eval_rows", "max_recorded_rows")},
    **{f"checkpoint.{name}": _CHECKPOINTS for name in ("every", "keep")},
    "max_concurrent": _REACHES,
    "output": Named("the run's directory"),
    "seed": Shown(_streams),
    "deterministic": _REPEATED,
    "resume": _REPEATED,
    "resume_changes": Proven("runs/test_resuming.py::test_a_change_that_is_named_takes_effect"),
    "replace": Proven("test_train.py::test_a_former_run_is_not_overwritten"),
}


def schema(part: type[Part] = Config, prefix: str = "") -> Iterator[str]:
    """Every option, dotted; `tools[].timeout` is that of each tool. A reference is one option, whatever is in it."""
    for name, field in part.model_fields.items():
        parts = [one for one in _parts(field.annotation) if one is not Use]
        many = "[]" if get_origin(field.annotation) is list else ""
        for one in parts:
            yield from schema(one, f"{prefix}{name}{many}.")
        if not parts:
            yield f"{prefix}{name}"


def _parts(annotation: Any) -> list[type[Part]]:
    if isinstance(annotation, type) and issubclass(annotation, Part):
        return [annotation]
    return [part for argument in get_args(annotation) for part in _parts(argument)]


def options_of(config: Config) -> dict[str, Config]:
    """The options of a recipe that are not at their defaults, each with the recipe as it is without it."""
    return dict(_changed(config, "", lambda part: part))


def _changed(part: Part, prefix: str, whole: Callable[[Any], Any]) -> Iterator[tuple[str, Config]]:
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)

        def put(new: Any, name: str = name) -> Any:
            return whole(part.model_copy(update={name: new}))

        if not field.is_required() and value == field.default:
            continue
        if isinstance(value, Part) and type(value) is not Use:
            yield from _changed(value, f"{prefix}{name}.", put)
        elif isinstance(value, list) and value and all(isinstance(one, Part) for one in value):
            for place, one in enumerate(value):

                def put_one(new: Any, place: int = place, value: list[Any] = value, put: Any = put) -> Any:
                    return put([*value[:place], new, *value[place + 1 :]])

                yield from _changed(one, f"{prefix}{name}[].", put_one)
        elif field.is_required():
            yield f"{prefix}{name}", whole(part)
        else:
            yield f"{prefix}{name}", put(field.default)


def take_effect(config: Config) -> Check:
    """Whether each option of the recipe does something, and how that is known."""
    name = "options"
    try:
        if fine_tunes(config):
            refuse_sft_without_effect(config)
        elif not isinstance(config.engine, ScriptedEngine):
            refuse_without_effect(config)
            refuse_without_reward(config)
    except ConfigError as error:
        return wrong(name, error)
    kinds: dict[type[Any], list[str]] = {Shown: [], Proven: [], Named: []}
    idle: list[str] = []
    for option, without in options_of(config).items():
        evidence = EVIDENCE.get(option)
        if evidence is None:
            return Check(name, "fail", f"nothing shows that {option} takes effect; please report it")
        kinds[type(evidence)].append(option)
        if isinstance(evidence, Shown) and without != config and _made(evidence, config) == _made(evidence, without):
            idle.append(option)
    told = (
        f"{sum(map(len, kinds.values()))} are set: {len(kinds[Shown]) - len(idle)} change what is made of the recipe, "
        f"{len(kinds[Proven])} are proven by tests of turnwise, {len(kinds[Named])} say what or where something is"
    )
    if idle:
        # with these rows, or in so few steps: a limit that nothing reaches, a system prompt where all rows have one
        return Check(name, "note", f"{told}; it makes no difference here to leave out {', '.join(idle)}")
    return Check(name, "ok", told)


def fine_tunes(config: Config) -> bool:
    """Whether the recipe is one for `turnwise sft`: it sets an option of that command."""
    return bool(changed_options(config.sft))


def _made(evidence: Shown, config: Config) -> Any:
    try:
        return evidence.by(config)
    except TurnwiseError as error:  # without the option the recipe is wrong: so it has an effect
        return str(error)
