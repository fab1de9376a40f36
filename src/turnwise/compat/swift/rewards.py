"""Reward functions in the form of ms-swift, asked about one finished trajectory at a time."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.answers import final_answer, same_number
from turnwise.compat.swift.messages import MEDIA, RECORDS, WHOLE, flattened
from turnwise.environments.aside import aside
from turnwise.types import Message, Trajectory

__all__ = ["ORM", "AsyncORM", "Format", "MathAccuracy", "arguments_of", "ask", "histories", "infos_of", "orms"]

_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_FORMAT = re.compile(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL)


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


class MathAccuracy(ORM):
    """1 where the answer is that of the solution: what is boxed, else in `<answer>`, else the last number.

    Numbers are compared as numbers, anything else as text. (ms-swift's own knows LaTeX, by math_verify.)
    """

    def __call__(self, completions: Sequence[str], solution: Sequence[Any] = (), **kwargs: Any) -> list[float | None]:
        pairs = zip(completions, solution, strict=True)
        return [float(same_number(_answer(one), _answer(str(truth)))) for one, truth in pairs]


class Format(ORM):
    """1 where a completion is `<think>...</think>` and `<answer>...</answer>` and nothing else."""

    def __call__(self, completions: Sequence[str], **kwargs: Any) -> list[float | None]:
        return [float(_FORMAT.fullmatch(one) is not None) for one in completions]


orms: dict[str, Any] = {"accuracy": MathAccuracy, "format": Format}
"""The registry: a plugin adds to it, `use` selects from it."""


async def ask(function: Any, trajectory: Trajectory, name: str) -> float:
    """What a reward function of ms-swift gives for a trajectory; None counts nothing, as there.

    Raises ValueError if it gives anything but one number.
    """
    completions, columns = arguments_of(trajectory)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        values = await function(completions, **columns)
    else:
        values = await aside(lambda: function(completions, **columns), name=name, kind="reward")
        values = await values if inspect.isawaitable(values) else values
    if not isinstance(values, list | tuple) or len(values) != 1:
        raise ValueError(
            f"the reward function {name} gave {values!r:.80} for 1 completion; it must give a list with a number for each"
        )
    return 0.0 if values[0] is None else float(values[0])


def arguments_of(trajectory: Trajectory) -> tuple[list[str], dict[str, list[Any]]]:
    """`completions` and the keyword arguments of a reward function, each a list of one.

    `trajectory_inputs` has all records of the trajectory: one for each history that the model has spoken in.
    """
    infos = infos_of(trajectory)
    records = [_record(trajectory, messages, infos) for messages in histories(trajectory)]
    inputs: Any = {trajectory.id: records}
    spoken = [message["content"] for message in records[-1]["messages"] if message["role"] == "assistant"]
    columns: dict[str, Any] = {name: [value] for name, value in records[-1].items()}
    return spoken[-1:] or [""], {**columns, "trajectory_inputs": inputs}


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
    goes_on = False
    for turn in trajectory.turns:
        # an answer that went on and was cut by a limit: nobody was asked about it, so it is as the renderer has read it
        words[id(turn.message)] = turn.info.get(WHOLE, turn.message.get("content") if goes_on else turn.text)
        goes_on = turn.cut is not None
    every = [*trajectory.former, trajectory.messages]
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


@functools.lru_cache(maxsize=64)
def made(make: Any, arguments: str) -> Any:
    """The one object of a reward class that all trajectories ask; `arguments` is JSON."""
    return make(**json.loads(arguments))


def _answer(text: str) -> str | None:
    if found := _BOXED.findall(text):
        return found[-1].strip()  # whole: the last number of \\frac{3}{2} would be 2
    tagged = _TAGGED.findall(text)
    rest = tagged[-1] if tagged else text
    return final_answer(rest, "flexible") or rest.strip()
