"""Calls reward functions of ms-swift: builds their arguments from finished trajectories, and checks their results.

Knows the `args` that reward classes are made with, and the `trainer_state` that their calls get. Does not know where the
functions come from (`plugins`)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from turnwise.compat.swift.protocol import FULL_ANSWER, MEDIA, OUTPUT_ENDS, flatten_media
from turnwise.types import Message, Trajectory
from turnwise.user_code.reward_number import number_or_none
from turnwise.user_code.threads import run_in_thread

REWARD_DEFAULTS: Mapping[str, Any] = {
    "max_completion_length": 512,
    "cosine_min_len_value_wrong": -0.5,
    "cosine_max_len_value_wrong": 0.0,
    "cosine_min_len_value_correct": 1.0,
    "cosine_max_len_value_correct": 0.5,
    "cosine_max_len": None,
    "repetition_n_grams": 3,
    "repetition_max_penalty": -1.0,
    "soft_max_length": None,
    "soft_cache_length": None,
}
"""The defaults of the arguments of ms-swift's own reward functions. A length of None means `max_completion_length`."""


class RewardArgs(SimpleNamespace):
    """ms-swift's arguments as attributes: its defaults for rewards, and the values of the recipe."""

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        values = {**REWARD_DEFAULTS, **(given or {})}
        for name in ("cosine_max_len", "soft_max_length"):
            values[name] = values["max_completion_length"] if values[name] is None else values[name]
        super().__init__(**values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"args has no {name!r} here; set it in the recipe, at the reward function: arguments: {{args: {{{name}: ...}}}}",
            name=name,
            obj=self,
        )


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The fields of transformers' `TrainerState` that are known here."""

    global_step: int
    """The number of weight updates before the conversations were sampled."""
    max_steps: int
    """`max_steps` of `args`, or -1."""


def trainer_state(trajectories: Sequence[Trajectory], args: RewardArgs) -> TrainerState:
    """The state of the trainer when these trajectories were sampled."""
    versions = [max(segment.version) for trajectory in trajectories for segment in trajectory.segments if len(segment)]
    return TrainerState(max([0, *versions]), int(vars(args).get("max_steps", -1)))


def make_reward(kind: type[Any], arguments: Mapping[str, Any], args: RewardArgs) -> Any:
    """Make an object of a reward class, with `arguments`, and with `args` or single values of it if it has such parameters.

    Raises the exceptions of the class.
    """
    try:
        parameters = inspect.signature(kind).parameters
    except ValueError:  # a builtin may have no signature
        return kind(**arguments)
    known = {"args": args, **vars(args)}
    offered = {name: known[name] for name in parameters if name in known}
    if (
        any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        and "args" not in offered
        and parameters
    ):
        offered["args"] = args
    return kind(**{**offered, **arguments})


orms: dict[str, Any] = {}
"""The registry of reward functions. Plugins add to it, `use` selects from it."""


class ORM:
    """An outcome reward: `__call__(completions, **columns)` returns a number or None for each completion."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        self.args = args

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
        raise NotImplementedError(f"{type(self).__name__} has no __call__")


class AsyncORM(ORM):
    """An outcome reward with an async `__call__`."""

    async def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:  # type: ignore[override]
        raise NotImplementedError(f"{type(self).__name__} has no __call__")


async def call_reward_once(function: Any, trajectory: Trajectory, name: str) -> float:
    """The reward of one trajectory. None and NaN are 0, as in ms-swift.

    Raises ValueError if the function does not return exactly one number.
    """
    (value,) = await call_reward(function, [trajectory], name)
    if isinstance(value, TypeError):
        raise value
    return 0.0 if value is None else value


async def call_reward(
    function: Any, trajectories: Sequence[Trajectory], name: str, *, args: Any = None
) -> list[float | TypeError | None]:
    """The rewards of several trajectories, from one call of the function. None stands for None and NaN; an item that is not a
    number is an error, which fails its trajectory.

    Raises ValueError if the function does not return one number for each trajectory.
    """
    completions, columns = arguments_of(*trajectories)
    if args is not None:
        columns["trainer_state"] = trainer_state(trajectories, args)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        values = await function(completions, **columns)
    else:
        values = await run_in_thread(lambda: function(completions, **columns), name=name, kind="reward")
        values = await values if inspect.isawaitable(values) else values
    if not isinstance(values, str | list | tuple) and callable(as_list := getattr(values, "tolist", None)):
        values = as_list()  # an array or a tensor
    if not isinstance(values, list | tuple) or len(values) != len(completions):
        many = "1 completion" if len(completions) == 1 else f"{len(completions)} completions"
        raise ValueError(
            f"the reward function {name} returned {values!r:.80} for {many}; it must return a list with one number for each"
        )
    return [number_or_none(value, f"the reward function {name}") for value in values]


_GIVEN = (
    *MEDIA, "completions", "trajectory_inputs", "trainer_state", "messages", "prompt_id", "request_id", "finish_reason",
    "is_truncated", "rollout_infos", "response_token_ids",
)  # fmt: skip
"""The arguments of a reward function that are no columns."""


def columns_of(function: Any) -> tuple[str, ...]:
    """The columns of the data without which a reward function cannot be called: its parameters without a default."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[1:]  # the first: completions
    except ValueError:  # a builtin may have no signature
        return ()
    several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = [one for one in parameters if one.default is one.empty and one.kind not in several]
    return tuple(one.name for one in needed if one.name not in _GIVEN)


def arguments_of(*trajectories: Trajectory) -> tuple[list[str], dict[str, Any]]:
    """`completions` and the keyword arguments of a reward function. Each is a list with one item per trajectory.

    `trajectory_inputs` maps the id of a trajectory to its records, one for each history that contains a turn of the model.
    """
    completions: list[str] = []
    rows: list[dict[str, Any]] = []
    inputs: dict[str, list[dict[str, Any]]] = {}
    for trajectory in trajectories:
        infos = infos_of(trajectory)
        records = inputs[trajectory.id] = [_record(trajectory, messages, infos) for messages in histories(trajectory)]
        rows.append(records[-1])
        answers = [message["content"] for message in records[-1]["messages"] if message["role"] == "assistant"]
        completions.append(answers[-1] if answers else "")
    names = dict.fromkeys(name for row in rows for name in row)
    return completions, {**{name: [row.get(name) for row in rows] for name in names}, "trajectory_inputs": inputs}


def infos_of(trajectory: Trajectory) -> dict[str, Any]:
    """`rollout_infos`: the infos of all turns (later turns override earlier ones) and the number of turns."""
    infos: dict[str, Any] = {}
    for turn in trajectory.turns:
        infos.update(turn.info)
    for internal in (FULL_ANSWER, OUTPUT_ENDS):
        infos.pop(internal, None)
    return {**infos, "num_turns": len(trajectory.turns)}


def histories(trajectory: Trajectory) -> list[list[Message]]:
    """The messages of each record of a trajectory. Answers are the sampled text, with reasoning and tool calls.

    Each output that `run` returned is a record. Without several outputs, each history with a turn of the model is a record.
    """
    answers: dict[int, str] = {}
    continued, opening = False, ""
    for turn in trajectory.turns:
        # text that the generation prompt began belongs to the answer, as in ms-swift
        opening = opening if continued else turn.reasoning_opening
        # for a continued answer that a limit cut off, no FULL_ANSWER was recorded: use the parsed content
        answer = turn.info.get(FULL_ANSWER, turn.message.get("content") if continued else turn.text)
        answers[id(turn.message)] = answer if str(answer).startswith(opening) else f"{opening}{answer}"
        continued = turn.kept_tokens is not None
    records = [*trajectory.previous_histories, trajectory.messages]
    ends = trajectory.turns[-1].info.get(OUTPUT_ENDS) if trajectory.turns else None
    if ends:
        parts = [_until(records, trajectory.turns[end].message) for end in ends[:-1]]
        records = [*(part for part in parts if part), trajectory.messages]
    return [
        [{**message, "content": answers.get(id(message), message.get("content"))} for message in messages]
        for messages in records
    ]


def _until(histories: Sequence[Sequence[Message]], last: Message) -> list[Message]:
    """The history up to the message `last`; empty if no history contains it."""
    for messages in histories:
        for number, message in enumerate(messages, 1):
            if message is last:
                return list(messages[:number])
    return []


def _record(trajectory: Trajectory, messages: Sequence[Message], infos: Mapping[str, Any]) -> dict[str, Any]:
    last = trajectory.turns[-1] if trajectory.turns else None
    ids = [list(turn.completion.token_ids) for turn in trajectory.turns if turn.completion is not None]
    texts, media = flatten_media(messages)
    return {
        **dict.fromkeys(MEDIA),
        **trajectory.row.fields,
        **{f"{kind}s": values for kind, values in media.items() if values},
        "messages": texts,
        "prompt_id": trajectory.group,
        "request_id": trajectory.id,
        "finish_reason": last.finish_reason if last is not None else None,
        "is_truncated": last is not None and last.finish_reason == "length",
        "rollout_infos": dict(infos),
        "response_token_ids": ids,
    }
