"""Reward functions in the form of ms-swift: what they are handed about finished trajectories, and what they give."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.compat.swift.args import trainer_state
from turnwise.compat.swift.messages import MEDIA, RECORDS, WHOLE, flattened
from turnwise.types import Message, Trajectory
from turnwise.user_code.reward_number import reward_number
from turnwise.user_code.run_in_thread import run_in_thread

__all__ = ["ORM", "AsyncORM", "arguments_of", "ask", "ask_all", "histories", "infos_of", "orms"]


orms: dict[str, Any] = {}
"""The registry: a plugin adds to it, `use` selects from it."""


class ORM:
    """A reward of outcomes: `__call__(completions, **columns)` gives a number, or None, for each completion."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        self.args = args

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
        raise NotImplementedError(f"{type(self).__name__} has no __call__")


class AsyncORM(ORM):
    """The same, async."""

    async def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:  # type: ignore[override]
        raise NotImplementedError(f"{type(self).__name__} has no __call__")


async def ask(function: Any, trajectory: Trajectory, name: str) -> float:
    """What a reward function of ms-swift gives for one trajectory; None and NaN count nothing, as there.

    Raises ValueError if it gives anything but one number.
    """
    (value,) = await ask_all(function, [trajectory], name)
    return 0.0 if value is None else value


async def ask_all(
    function: Any, trajectories: Sequence[Trajectory], name: str, *, args: Any = None
) -> list[float | None]:
    """What a reward function of ms-swift gives for some trajectories, asked once; None where it gives None or NaN.

    Raises ValueError if it gives anything but one number for each.
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
            f"the reward function {name} gave {values!r:.80} for {many}; it must give a list with a number for each"
        )
    numbers = [None if value is None else reward_number(value, f"the reward function {name}") for value in values]
    return [None if number is None or math.isnan(number) else number for number in numbers]


def arguments_of(*trajectories: Trajectory) -> tuple[list[str], dict[str, Any]]:
    """`completions` and the keyword arguments of a reward function, each a list with an item for each trajectory.

    `trajectory_inputs` has all records of a trajectory by its id: one for each history that the model has spoken in.
    """
    completions: list[str] = []
    rows: list[dict[str, Any]] = []
    inputs: dict[str, list[dict[str, Any]]] = {}
    for trajectory in trajectories:
        infos = infos_of(trajectory)
        records = inputs[trajectory.id] = [_record(trajectory, messages, infos) for messages in histories(trajectory)]
        rows.append(records[-1])
        spoken = [message["content"] for message in records[-1]["messages"] if message["role"] == "assistant"]
        completions.append(spoken[-1] if spoken else "")
    names = dict.fromkeys(name for row in rows for name in row)
    return completions, {**{name: [row.get(name) for row in rows] for name in names}, "trajectory_inputs": inputs}


def infos_of(trajectory: Trajectory) -> dict[str, Any]:
    """`rollout_infos`: of all turns, later ones over earlier ones, and how many there were."""
    infos: dict[str, Any] = {}
    for turn in trajectory.turns:
        infos.update(turn.info)
    for ours in (WHOLE, RECORDS):
        infos.pop(ours, None)
    return {**infos, "num_turns": len(trajectory.turns)}


def histories(trajectory: Trajectory) -> list[list[Message]]:
    """The messages of each record of a trajectory, the answers in the model's own words: thoughts and calls as they were said.

    A record is what `run` returned as an output; without such, a history that the model has spoken in.
    """
    words: dict[int, str] = {}
    goes_on, opened = False, ""
    for turn in trajectory.turns:
        opened = (
            opened if goes_on else turn.thought_opening
        )  # what the generation prompt began belongs to the answer, as in ms-swift
        # an answer that went on and was cut by a limit: nobody was asked about it, so it is as the renderer has read it
        whole = turn.info.get(WHOLE, turn.message.get("content") if goes_on else turn.text)
        words[id(turn.message)] = whole if str(whole).startswith(opened) else f"{opened}{whole}"
        goes_on = turn.kept_tokens is not None
    every = [*trajectory.previous_histories, trajectory.messages]
    ends = trajectory.turns[-1].info.get(RECORDS) if trajectory.turns else None
    if ends:
        parts = [_until(every, trajectory.turns[end].message) for end in ends[:-1]]
        every = [*(part for part in parts if part), trajectory.messages]
    return [
        [{**message, "content": words.get(id(message), message.get("content"))} for message in messages]
        for messages in every
    ]


def _until(histories: Sequence[Sequence[Message]], last: Message) -> list[Message]:
    """The history up to a message, or nothing."""
    for messages in histories:
        for number, message in enumerate(messages, 1):
            if message is last:
                return list(messages[:number])
    return []


def _record(trajectory: Trajectory, messages: Sequence[Message], infos: Mapping[str, Any]) -> dict[str, Any]:
    last = trajectory.turns[-1] if trajectory.turns else None
    ids = [list(turn.completion.token_ids) for turn in trajectory.turns if turn.completion is not None]
    texts, media = flattened(messages)
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
