"""Reads a line of `trajectories.jsonl` back as a `Trajectory`. The format is described in docs/record.md.

A record may be damaged by a full disk, a killed run or an editor. Every defect is a `RunError` with the file, the line, the key,
the value and the rule; nothing is guessed.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from turnwise.errors import RunError
from turnwise.record.encode import SCHEMA
from turnwise.record.media_store import StoredImage
from turnwise.types import (
    Failure,
    LogprobKind,
    Media,
    Message,
    MismatchKind,
    Row,
    Segment,
    Stop,
    TemplateMismatch,
    ToolCall,
    ToolOutcome,
    ToolSchema,
    Trajectory,
    Turn,
    Usage,
)

__all__ = ["decode_trajectory"]

E = TypeVar("E", Stop, LogprobKind, MismatchKind)

_REQUIRED: Any = object()


class _Fields:
    """A JSON object of the record. Each method returns the value of a key, and refuses a value of another type.

    `default` is returned where the key is missing; without a default, a missing key is a defect.
    """

    def __init__(self, value: Any, place: str, path: str = "") -> None:
        self.place = place
        """The file and line, for error messages."""
        self._path = path
        if not isinstance(value, dict):
            self.refuse("", "must be an object", value)
        self.values: Mapping[str, Any] = value

    def refuse(self, key: str, rule: str, value: Any) -> NoReturn:
        """Raise RunError for the value of a key."""
        path = f"{self._path}.{key}".strip(".") or "the line"
        raise RunError(
            f"{self.place} is damaged: {path} {rule}; got {value!r:.80}. Restore the file, or remove the line"
        )

    def _get(self, key: str, kind: str, types: type | tuple[type, ...], default: Any) -> Any:
        value = self.values.get(key, default)
        if value is _REQUIRED:
            path = f"{self._path}.{key}".strip(".")
            raise RunError(f"{self.place} is damaged: the key {path} is missing. Restore the file, or remove the line")
        if value is default:
            return value
        if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
            self.refuse(key, f"must be {kind}", value)
        return value

    def text(self, key: str, default: str = _REQUIRED) -> str:
        return self._get(key, "a text", str, default)

    def text_or_none(self, key: str, default: str | None = None) -> str | None:
        return None if self.values.get(key) is None else self.text(key)

    def integer(self, key: str, default: int = _REQUIRED) -> int:
        return self._get(key, "an integer", int, default)

    def integer_or_none(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.integer(key)

    def number(self, key: str, default: float = _REQUIRED) -> float:
        """A number; null, which the writer writes for NaN and infinity, is NaN."""
        value = self._get(key, "a number", (int, float, type(None)), default)
        return math.nan if value is None else value

    def number_or_none(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        return self._get(key, "true or false", bool, default)

    def list(self, key: str, default: list[Any] = _REQUIRED) -> list[Any]:
        return self._get(key, "a list", list, default)

    def mapping(self, key: str, default: dict[str, Any] = _REQUIRED) -> dict[str, Any]:
        return self._get(key, "an object", dict, default)

    def numbers(self, key: str) -> dict[str, float]:
        """An object whose values are numbers; empty where it is missing."""
        fields = self.fields(key, {})
        return {name: fields.number(name) for name in fields.values}

    def fields(self, key: str, default: dict[str, Any] = _REQUIRED) -> _Fields:
        return _Fields(self.mapping(key, default), self.place, f"{self._path}.{key}".strip("."))

    def each(self, key: str, default: list[Any] = _REQUIRED) -> list[_Fields]:
        """The objects of a list."""
        path = f"{self._path}.{key}".strip(".")
        return [_Fields(value, self.place, f"{path}.{n}") for n, value in enumerate(self.list(key, default))]


def decode_trajectory(value: Any, *, where: str, media: Path | None = None) -> Trajectory:
    """The trajectory of a parsed line. `where` names the line in errors; `media` is the folder with the run's images.

    The row's prompt is not in the record: `row.messages` holds the messages before the model's first turn. Turns have no
    `completion`; the sampled tokens are in the segments.

    Raises RunError if the line has a newer schema, a key is missing, or a value is not what the format says.
    """
    record = _Fields(value, where)
    schema = record.integer("schema", 1)
    if not 1 <= schema <= SCHEMA:
        raise RunError(
            f"{where} has schema {schema}, and this version of turnwise reads the schemas 1 to {SCHEMA}: update turnwise"
        )
    messages = _messages(record, "messages")
    previous = record.list("previous_histories", [])
    histories = [_messages_of(record, f"previous_histories.{n}", history) for n, history in enumerate(previous)]
    tools: list[ToolSchema] = _objects(record, "tools")
    turns = _turns(record, tools, [*histories, messages])
    error = None if record.values.get("error") is None else record.fields("error")
    row = record.mapping("row", {})
    mismatch, mismatch_kind = (
        record.text_or_none("template_mismatch"),
        _enum(MismatchKind, record, "template_mismatch_kind"),
    )
    return Trajectory(
        id=record.text("id"),
        group=record.text("group", ""),
        row=Row(
            id=str(row.get("id", "")),
            messages=_opening([*histories, messages][0], turns),
            fields={
                **{name: value for name, value in row.items() if name != "id"},
                **record.mapping("row_columns", {}),
            },
        ),
        step=record.integer_or_none("step"),
        messages=messages,
        previous_histories=histories,
        tools=tools,
        turns=turns,
        segments=[_segment(fields, len(turns), media) for fields in record.each("segments")],
        stop=_enum(Stop, record, "stop"),
        error=None if error is None else _failure(error),
        reward=record.number_or_none("reward"),
        rewards=record.numbers("rewards"),
        metrics=record.numbers("metrics"),
        advantages=_estimates(record, "advantage"),
        values=_estimates(record, "value"),
        returns=_estimates(record, "return"),
        penalties=[[e] if isinstance(e, float | int) else e for e in _estimates(record, "penalty")],
        logprob_kind=_enum(LogprobKind, record, "logprob_kind") or LogprobKind.NONE,
        template_mismatch=None if mismatch is None else TemplateMismatch(mismatch_kind, mismatch),
        started=record.number_or_none("started"),
        seconds=record.number("seconds"),
    )


def _enum(kind: type[E], record: _Fields, key: str) -> E | None:
    """The member of an enumeration; None where the key is missing or null."""
    value = record.text_or_none(key)
    if value is None:
        return None
    if value not in set(kind):
        record.refuse(key, f"must be one of {', '.join(kind)}", value)
    return kind(value)


def _failure(fields: _Fields) -> Failure:
    return Failure(fields.text("kind"), fields.text("message"), traceback=fields.text("traceback", ""))


def _messages(record: _Fields, key: str) -> list[Message]:
    return _messages_of(record, key, record.list(key))


def _messages_of(record: _Fields, path: str, value: Any) -> list[Message]:
    if not isinstance(value, list):
        record.refuse(path, "must be a list of messages", value)
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            record.refuse(f"{path}.{number}", "must be a message with a role", message)
    return value


def _objects(record: _Fields, key: str) -> list[dict[str, Any]]:
    return [dict(fields.values) for fields in record.each(key, [])]


def _opening(first_history: Sequence[Message], turns: Sequence[Turn]) -> list[Message]:
    """The messages before the model's first turn."""
    if not turns:
        return list(first_history)
    index = turns[0].message_index
    if index is None:  # schema 1
        index = next((n for n, message in enumerate(first_history) if message == turns[0].message), len(first_history))
    return list(first_history[:index])


def _turns(record: _Fields, tools: Sequence[ToolSchema], histories: Sequence[Sequence[Message]]) -> list[Turn]:
    turns: list[Turn] = []
    for index, fields in enumerate(record.each("turns")):
        tools = _objects(fields, "tools") if "tools" in fields.values else tools
        history, place = fields.integer("history", 0), fields.integer_or_none("message_index")
        if not 0 <= history < len(histories):
            fields.refuse("history", f"must be one of the {len(histories)} histories, counted from 0", history)
        if place is not None and not 0 <= place < len(histories[history]):
            fields.refuse("message_index", f"must be one of {len(histories[history])} messages, from 0", place)
        seconds = fields.fields("seconds", {})
        calls = [_call(call) for call in fields.each("tool_calls", [])]
        turns.append(
            Turn(
                index=index,
                message=fields.mapping("message"),
                text=fields.text("text"),
                message_index=place,
                history=history,
                # `thought_opening` is the key in files that were written before the key got its present name
                reasoning_opening=fields.text("reasoning_opening", fields.text("thought_opening", "")),
                reasoning=fields.text("reasoning", ""),
                weight=fields.number("weight", 1.0),
                observed=fields.flag("observed", False),
                train_on=fields.flag("train_on", False),
                kept_tokens=fields.integer_or_none("kept_tokens"),
                calls=tuple(call for call, _ in calls),
                outcomes=tuple(outcome for _, outcome in calls if outcome is not None),
                tools=tools,
                reward=fields.number("reward"),
                rewards=fields.numbers("rewards"),
                info=fields.mapping("info", {}),
                finish_reason=fields.text("finish_reason", "stop"),
                usage=_usage(fields),
                started=fields.number_or_none("started"),
                seconds_engine=seconds.number("engine", 0.0),
                seconds_environment=seconds.number("environment", 0.0),
            )
        )
    return turns


def _usage(fields: _Fields) -> Usage | None:
    if fields.values.get("usage") is None:
        return None
    usage = fields.fields("usage")
    return Usage(
        prompt_tokens=usage.integer("prompt_tokens", 0),
        completion_tokens=usage.integer("completion_tokens", 0),
        cached_tokens=usage.integer_or_none("cached_tokens"),
    )


def _call(fields: _Fields) -> tuple[ToolCall, ToolOutcome | None]:
    """A call, and its outcome where it was run."""
    id, name, arguments = fields.text("id"), fields.text("name"), fields.mapping("arguments")
    call = ToolCall(
        id=id,
        name=name,
        arguments=arguments,
        text=fields.text("text"),
        written_id=fields.text("written_id", ""),
        error=fields.text_or_none("parse_error"),
    )
    content = fields.text_or_none("content")
    if content is None:
        return call, None
    outcome = ToolOutcome(
        id=id,
        name=name,
        arguments=arguments,
        content=content,
        error=fields.text_or_none("error"),
        reward=fields.number("reward", 0.0),
        seconds=fields.number("seconds", 0.0),
        attempts=fields.integer_or_none("attempts") or 1,
        traceback=fields.text("traceback", ""),
    )
    return call, outcome


def _estimates(record: _Fields, key: str) -> list[float | Sequence[float]]:
    """The advantage, value, return or penalty of each turn: a number, or a list with a number for each token.

    Empty if no turn has any.
    """
    estimates: list[Any] = [
        list(_column("d", fields, key)) if isinstance(fields.values.get(key), list) else fields.number_or_none(key)
        for fields in record.each("turns")
    ]
    if all(estimate is None for estimate in estimates):
        return []
    return [math.nan if estimate is None else estimate for estimate in estimates]


def _segment(fields: _Fields, turns: int, media: Path | None) -> Segment:
    segment = Segment(
        token_ids=_column("i", fields, "token_ids"),
        logprobs=_column("f", fields, "logprobs"),
        turn=_column("i", fields, "turn"),
        version=_column("i", fields, "version"),
        media=[_media(item, media) for item in fields.each("media", [])],
    )
    columns = [segment.token_ids, segment.logprobs, segment.turn, segment.version]
    if "trainer_logprobs" in fields.values:
        segment.trainer_logprobs = _column("f", fields, "trainer_logprobs")
        columns.append(segment.trainer_logprobs)
    lengths = {len(column) for column in columns}
    if len(lengths) > 1:
        fields.refuse("", "must have columns of equal length", sorted(lengths))
    if segment.turn and not -1 <= min(segment.turn) <= max(segment.turn) < turns:
        fields.refuse("turn", f"must be indexes of the {turns} turns, or -1", [min(segment.turn), max(segment.turn)])
    return segment


def _column(typecode: str, fields: _Fields, key: str) -> array[Any]:
    values = fields.list(key)
    try:
        # the writer has null for NaN and infinity
        plain = typecode == "i" or None not in values
        return array(typecode, values if plain else [math.nan if value is None else value for value in values])
    except (TypeError, OverflowError):
        number = "integers of 32 bits" if typecode == "i" else "numbers"
        fields.refuse(key, f"must be a list of {number}", values)


def _media(fields: _Fields, folder: Path | None) -> Media:
    kind = fields.text("kind")
    if kind not in ("image", "video"):
        fields.refuse("kind", "must be image or video", kind)
    names, sizes = fields.values.get("sha256"), fields.values.get("size")
    several = isinstance(names, list)
    images = [
        _image(fields, name, size, folder)
        for name, size in (zip(names, sizes or [None] * len(names), strict=False) if several else [(names, sizes)])
    ]
    grid = fields.values.get("grid")
    if grid is not None and not (isinstance(grid, list) and all(isinstance(number, int) for number in grid)):
        fields.refuse("grid", "must be a list of integers or null", grid)
    return Media(
        kind=kind,
        start=fields.integer("start"),
        length=fields.integer("length"),
        source=images if several else images[0],
        inputs={} if grid is None else {f"{kind}_grid_thw": [grid]},
    )


def _image(fields: _Fields, name: Any, size: Any, folder: Path | None) -> StoredImage:
    if not isinstance(name, str):
        fields.refuse("sha256", "must be a text", name)
    if size is not None and not (isinstance(size, list) and [type(number) for number in size] == [int, int]):
        fields.refuse("size", "must be width and height, or null", size)
    return StoredImage(name, None if size is None else (size[0], size[1]), folder)
