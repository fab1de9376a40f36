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
from turnwise.config import Config, ScriptedEngine, Use, refuse_without_effect
from turnwise.data.rows import Order
from turnwise.doctor.check import Check
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.options import Part
from turnwise.types import Completion, Group, LogprobKind, Row, Segment, Trajectory, Turn

__all__ = ["EVIDENCE", "Named", "Proven", "Shown", "options_of", "schema", "take_effect"]


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
    return [build.learning_rate(config, step) for step in range(config.train.steps)]


def _advantages(config: Config) -> list[list[float]]:
    """Of a group with these rewards."""
    group = Group(id="g", row=_ROW, trajectories=[_trajectory(str(n)) for n in range(4)])
    for one, reward in zip(group.trajectories, (1.0, 0.0, 0.0, 3.0), strict=True):
        one.reward = reward
    build.credit(config)(group)
    return [one.advantages for one in group.trajectories]


def _weights(config: Config) -> list[float] | str:
    """Of the turns of a conversation with a tool and a user in it; a rule of the user's own is its name."""
    if ":" in config.loss_mask.use:
        return f"{config.loss_mask.use}({config.loss_mask.arguments})"
    one = _trajectory("1")
    build.loss_mask(config)(one)
    return [turn.weight for turn in one.turns]


def _order(config: Config) -> list[tuple[int, int]]:
    return list(Order(64, seed=config.seed, shuffle=config.data.shuffle).take(0, 64))


def _rows(config: Config) -> list[Any]:
    return [(row.id, list(row.messages), dict(row.fields)) for row in build.rows(config)]


def _reward_functions(config: Config) -> list[Any]:
    found = build.scorer(config)
    functions = [*found.trajectory, *found.turns]
    return [found.seconds, *((one.name, one.weight, getattr(one.function, "keywords", None)) for one in functions)]


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
        segment.context([9])
        segment.sampled(index, completion)
        one.turns.append(Turn(index=index, message=message, text=str(index), completion=completion))
    one.segments.append(segment)
    return one


_SAMPLING, _LIMITS = Shown(build.sampling), Shown(lambda config: build.limits(config, longest=None))
_OPTIMIZATION, _REWARDS, _DATA = Shown(build.optimization), Shown(_reward_functions), Shown(_rows)
_TRAINING = Proven("doctor/test_effects.py::test_an_option_of_training_changes_the_run")
_TOOLS = "test_build_tools.py"
_SFT = Proven("test_sft.py")

EVIDENCE: Mapping[str, Evidence] = {
    "model.path": Named("the model"),
    "model.dtype": Proven("training/test_policy.py::test_bfloat16_keeps_masters_that_small_steps_are_not_lost_in"),
    "model.device": Proven("doctor/test_effects.py::test_a_device_that_is_not_there_is_told"),
    "data.train": Named("the rows"),
    "data.eval": Named("the held-out rows"),
    "data.split": _DATA,
    "data.eval_split": Proven("data/test_rows.py"),
    "data.subset": _DATA,
    "data.columns": _DATA,
    "data.system": _DATA,
    "data.shuffle": Shown(_order),
    "data.limit": _DATA,
    "environment": Named("who answers the model"),
    "tools[].use": Named("a tool"),
    "tools[].arguments": Proven(f"{_TOOLS}::test_classes_functions_and_ready_made_tools_are_named_alike"),
    **dict.fromkeys(
        ("tools[].timeout", "tools[].retries", "tools[].retry_timeouts"),
        Proven(f"{_TOOLS}::test_what_a_ready_made_tool_says_itself_holds_unless_the_recipe_says_something_else"),
    ),
    "mcp.servers": Named("the servers' file"),
    **dict.fromkeys(
        ("mcp.select", "mcp.use", "mcp.timeout", "mcp.retries", "mcp.retry_timeouts", "mcp.start_timeout"),
        Proven(f"{_TOOLS}::test_the_tools_of_mcp_servers_stand_beside_the_others"),
    ),
    "tool_calls.max_parallel_calls": Proven(f"{_TOOLS}::test_calls_beyond_the_recipes_bound_are_told_so"),
    **dict.fromkeys(
        (
            "tool_calls.max_tool_response_length",
            "tool_calls.tool_response_truncate_side",
            "tool_calls.tool_response_unit",
        ),
        Proven(f"{_TOOLS}::test_long_answers_are_cut_as_the_recipe_says"),
    ),
    "engine.name": Named("the engine"),
    "engine.script": Named("the lines of the scripted engine"),
    **dict.fromkeys(
        ("engine.slots", "engine.memory_gb"),
        Proven("engines/test_local_memory.py"),
    ),
    "engine.threads": Proven("doctor/test_effects.py::test_the_engines_options_reach_it"),
    **dict.fromkeys((f"sampling.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "stop")), _SAMPLING),
    **dict.fromkeys(
        (f"limits.{name}" for name in ("turns", "tokens_per_turn", "tokens", "context", "seconds_per_turn", "seconds")),
        _LIMITS,
    ),
    "sanity": Proven("rollout/test_renderer.py"),
    "thinking": Proven("rollout/test_thinking.py"),
    "use_inference_chat_template": Shown(lambda config: config.thinking),
    "tool_format": Proven("rollout/test_tool_calls.py"),
    "reward.trajectory[].use": _REWARDS,
    "reward.trajectory[].arguments": _REWARDS,
    "reward.trajectory[].weight": _REWARDS,
    "reward.turns[].use": _REWARDS,
    "reward.turns[].arguments": _REWARDS,
    "reward.turns[].weight": _REWARDS,
    "reward.seconds": _REWARDS,
    "credit.name": Named("the estimator"),
    "credit.scale": Shown(_advantages),
    "loss_mask": Shown(_weights),
    **dict.fromkeys((f"train.{name}" for name in ("lr", "schedule", "warmup_steps")), Shown(_rates)),
    "train.steps": Shown(_rates),
    **dict.fromkeys(
        (
            f"train.{name}"
            for name in ("weight_decay", "betas", "max_grad_norm", "clip_low", "clip_high", "kl_coef", "entropy_coef")
        ),
        _OPTIMIZATION,
    ),
    **dict.fromkeys(
        (f"train.{name}" for name in ("rows", "group", "minibatches", "epochs", "loss_average", "overlap")), _TRAINING
    ),
    "train.micro_batch_tokens": Proven("training/test_batch.py::test_packing_never_changes_what_is_trained_on"),
    "train.share_prompts": Proven(
        "training/test_batch.py::test_models_whose_layers_do_not_all_see_everything_share_no_prompts"
    ),
    **dict.fromkeys(("eval.rows", "eval.samples", "eval.every"), _TRAINING),
    "rollout.rows": Proven("test_cli.py::test_only_the_first_rows_are_used_where_the_recipe_says_so"),
    "rollout.samples": Proven("test_cli.py::test_the_script_says_how_many_conversations_there_are"),
    **dict.fromkeys((f"checkpoint.{name}" for name in ("every", "keep")), _TRAINING),
    "concurrent": Proven("rollout/test_loop.py"),
    "output": Named("the run's directory"),
    "seed": Shown(_order),
    "deterministic": Proven(
        "test_train.py::test_deterministic_runs_are_bit_identical_and_so_is_one_that_is_gone_on_with"
    ),
    "resume": Proven("test_train.py::test_deterministic_runs_are_bit_identical_and_so_is_one_that_is_gone_on_with"),
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

        if isinstance(value, Part) and not isinstance(value, Use):
            yield from _changed(value, f"{prefix}{name}.", put)
        elif isinstance(value, list) and value and all(isinstance(one, Part) for one in value):
            for place, one in enumerate(value):

                def put_one(new: Any, place: int = place, value: list[Any] = value, put: Any = put) -> Any:
                    return put([*value[:place], new, *value[place + 1 :]])

                yield from _changed(one, f"{prefix}{name}[].", put_one)
        elif field.is_required():
            yield f"{prefix}{name}", whole(part)
        elif value != field.default:
            yield f"{prefix}{name}", put(field.default)


def take_effect(config: Config) -> Check:
    """Whether each option of the recipe does something, and how that is known."""
    name = "options"
    if not isinstance(config.engine, ScriptedEngine):
        try:
            refuse_without_effect(config)
        except ConfigError as error:
            return Check(name, "fail", str(error))
    kinds: dict[type[Any], list[str]] = {Shown: [], Proven: [], Named: []}
    for option, without in options_of(config).items():
        evidence = EVIDENCE.get(option)
        if evidence is None:
            return Check(name, "fail", f"nothing shows that {option} takes effect; please report it")
        if isinstance(evidence, Shown) and without != config and _made(evidence, config) == _made(evidence, without):
            return Check(name, "fail", f"{option} is accepted and changes nothing; please report it")
        kinds[type(evidence)].append(option)
    told = (
        f"{sum(map(len, kinds.values()))} are not at their defaults: {len(kinds[Shown])} change what is made of the recipe, "
        f"{len(kinds[Proven])} are proven by tests of turnwise, {len(kinds[Named])} say what or where something is"
    )
    return Check(name, "ok", told)


def _made(evidence: Shown, config: Config) -> Any:
    try:
        return evidence.by(config)
    except TurnwiseError as error:  # without the option the recipe is wrong: so it has an effect
        return str(error)
