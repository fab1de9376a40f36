"""A trajectory as one line of `trajectories.jsonl`, and back; its images beside it. The format is described in docs/record.md.

Rows, messages, `info` and tool results hold values of user code and of the model. Whatever they contain, the line is valid
JSON that `decode_trajectory` accepts, and reading it and writing it again gives the same bytes. A record may be damaged by a
full disk, a killed run or an editor: every defect is a `RunError` with the file, the line, the key, the value and the rule;
nothing is guessed.

Each image is written once, under the hash of its content, and the line refers to it by that hash. This module knows where
images are in messages, rows and the `info` of an environment; it does not know what they are for.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import os
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from turnwise.data.images import digest, is_image, load_image, media_kind, media_value
from turnwise.errors import DataError, Failed, RunError, boundary, text_of
from turnwise.types import (
    Constraint,
    Failure,
    LogprobKind,
    Media,
    Message,
    MismatchKind,
    Routes,
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

# images

_MAX_MEDIA_DEPTH = 56
"""Nested containers of a value. The record puts a value into at most five more, and JSON is read to a depth of 64."""
_MAX_TEXT = 1000
"""Characters that are kept of a container that is nested deeper."""
_ATOMS = frozenset((int, float, bool, type(None)))
_DATA_URI = "data:image/"


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image of a trajectory that was read from a record: the hash of its content, not its pixels."""

    sha256: str
    """Of mode, size and pixels (`turnwise.data.images.digest`)."""
    size: tuple[int, int] | None
    """Width and height; None where the record has none."""
    folder: Path | None = None

    @property
    def path(self) -> Path | None:
        """The file of the image; None where the images of the run were not written, as for images that were given as files."""
        path = None if self.folder is None else self.folder / f"{self.sha256}.png"
        return path if path is not None and path.is_file() else None


class MediaStore:
    """A folder of `<sha256>.png`. It is created when the first image is written; with None, no image is written."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def plain(self, value: Any, *, inside: tuple[int, ...] = ()) -> Any:
        """The value with references in place of images; a path stays a path. Keys of mappings become texts.

        Example: `{"type": "image", "image": <PIL image>}` gives `{"type": "image", "image": "sha256:4a1c...", "size": [8, 8]}`.
        `inside` are the ids of the containers around the value.
        """
        if type(value) in _ATOMS or (type(value) is str and not value.startswith(_DATA_URI)):
            return value  # first, because nearly all values are of these types
        if id(value) in inside:
            return value  # a circle: the writer of JSON cuts it off at its own depth
        if len(inside) >= _MAX_MEDIA_DEPTH:
            return text_of(value)[:_MAX_TEXT] if isinstance(value, Mapping | list | tuple) else value
        inside = (*inside, id(value))
        if isinstance(value, Mapping):
            kind = media_kind(value)
            if kind == "image" and (image := self._store(media_value(value))) is not None:
                return {"type": "image", "image": f"sha256:{digest(image)}", "size": list(image.size)}
            if isinstance(value.get("bytes"), bytes) and (image := self._store(value)) is not None:
                return f"sha256:{digest(image)}"
            return {_key(key): self.plain(item, inside=inside) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(item, inside=inside) for item in value]
        if (image := self._store(value)) is not None:
            return f"sha256:{digest(image)}"
        return value

    def label(self, media: Media) -> dict[str, Any]:
        """The description of an image or a video among the tokens of a segment, as the record has it."""
        frames = media.source if isinstance(media.source, list) else [media.source]
        images = [_description(frame) for frame in frames]
        grid = media.inputs.get(f"{media.kind}_grid_thw")
        sizes = [None if image.size is None else list(image.size) for image in images]
        several = isinstance(media.source, list) or media.kind == "video"
        return {
            "kind": media.kind,
            "start": media.start,
            "length": media.length,
            "grid": None if grid is None else [int(count) for count in grid[0]],
            "sha256": [image.sha256 for image in images] if several else images[0].sha256,
            "size": sizes if several else sizes[0],
        }

    def _store(self, value: Any) -> Any:
        """Write the image if it is not written yet. Returns it, or None for a path and for a value that is not an image."""
        source = value.get("bytes") if isinstance(value, Mapping) else value
        uri = isinstance(source, str) and source.startswith(_DATA_URI)
        if not (is_image(source) or isinstance(source, bytes) or uri):
            return None
        try:
            image = load_image(source, where="an image of the record")
        except DataError:
            return None  # reported where the image was used
        self.keep(image, digest(image))
        return image

    def keep(self, image: Any, name: str) -> None:
        """Write a PIL image under the hash of its content, unless it is written already."""
        if self._folder is None:
            return
        file = self._folder / f"{name}.png"
        if not file.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary = file.with_suffix(".writing")
            image.save(temporary, "PNG", compress_level=1)
            os.replace(temporary, file)


def _key(key: Any) -> str:
    return key if isinstance(key, str) else text_of(key)


def _description(frame: Any) -> StoredImage:
    """Name and size of an image, of one that was read from a record, or of a file that is named only."""
    if isinstance(frame, StoredImage):
        return frame
    return StoredImage(digest(frame), frame.size) if is_image(frame) else StoredImage(str(frame), None)


# writing

SCHEMA = 3
"""Version of the format. Lines without the key `schema` have version 1."""

_ROUTES_LEVEL = 1
"""How zlib compresses the numbers of experts: they are nearly random, so more effort gains nothing."""
_MAX_DEPTH = 62
_MAX_INTEGER_BITS = 14_000  # Python refuses to write integers of more than 4,300 digits


def trajectory_line(trajectory: Trajectory, media: MediaStore) -> bytes:
    """One line of `trajectories.jsonl`. Images are written to `media`."""
    return encode_line(trajectory_record(trajectory, media=media), separators=(",", ":"))


def encode_line(value: Mapping[str, Any], *, separators: tuple[str, str] = (", ", ": ")) -> bytes:
    """A JSON object and a newline, in UTF-8. NaN and infinity become null, other values without a JSON type their text."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=text_of, separators=separators)
    except (TypeError, ValueError, RecursionError):
        text = json.dumps(_json_value(value), ensure_ascii=False, default=text_of, separators=separators)
    text += "\n"
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        # Half of a surrogate pair, which a model can write, is written as \udxxx. Two halves that meet are one character:
        # a JSON parser would join them, and the line would not be the same when it is written again.
        joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        return joined.encode("utf-8", "backslashreplace")


def trajectory_record(
    trajectory: Trajectory, *, media: MediaStore | None = None, exact_logprobs: bool = False
) -> dict[str, Any]:
    """A trajectory as JSON values. Its images are written to `media`; None writes none, and names them only.

    Log-probabilities have 7 decimals, or with `exact_logprobs` enough digits to read the same 32-bit numbers back.
    """
    store = media or MediaStore(None)
    fields = {name: value for name, value in trajectory.row.fields.items() if name != "multi_modal_inputs"}  # tensors
    columns = {name: value for name, value in fields.items() if name != "id"}
    error, mismatch = trajectory.error, trajectory.template_mismatch
    return {
        "schema": SCHEMA,
        **_present({"step": trajectory.step}),
        "id": trajectory.id,
        "group": trajectory.group,
        **_present({"agent": trajectory.agent, "policy": trajectory.policy, "episode": trajectory.episode}),
        **({} if trajectory.trained else {"trained": False}),
        **({"shares_reward": True} if trajectory.shares_reward else {}),
        # the id is last, also where there is a column of that name
        "row": {**_plain_mapping(store, columns), "id": trajectory.row.id},
        **({"row_columns": _plain_mapping(store, {"id": fields["id"]})} if "id" in fields else {}),
        "stop": trajectory.stop,
        "error": None if error is None else dataclasses.asdict(error),
        "reward": trajectory.reward,
        "rewards": trajectory.rewards,
        **_present({"metrics": trajectory.metrics}),
        "tools": _plain(store, list(trajectory.tools)),
        "messages": _plain(store, trajectory.messages),
        **_present({"previous_histories": _plain(store, trajectory.previous_histories)}),
        "turns": [
            _turn(turn, trajectory, store, offered)
            for turn, offered in zip(trajectory.turns, _tools_before(trajectory), strict=True)
        ],
        "segments": [_segment_json(segment, store, exact=exact_logprobs) for segment in trajectory.segments],
        "logprob_kind": trajectory.logprob_kind,
        "template_mismatch": None if mismatch is None else mismatch.message,
        **_present({"template_mismatch_kind": None if mismatch is None else mismatch.kind}),
        **_present({"escaped": dict(trajectory.escaped)}),
        **_present({"started": _time(trajectory.started)}),
        "seconds": round(trajectory.seconds, 4),
    }


def _tools_before(trajectory: Trajectory) -> Iterable[Sequence[ToolSchema]]:
    """For each turn, the tools that the turn before was offered."""
    return [trajectory.tools, *(turn.tools for turn in trajectory.turns[:-1])][: len(trajectory.turns)]


def _turn(turn: Turn, trajectory: Trajectory, store: MediaStore, offered: Sequence[ToolSchema]) -> dict[str, Any]:
    """`offered` are the tools of the turn before: this turn's are written only where they differ."""
    outcomes = {outcome.id: outcome for outcome in turn.outcomes}
    changed = turn.tools is not offered and list(turn.tools) != list(offered)
    return {
        "message": _plain(store, turn.message),
        **_present({"message_index": turn.message_index, "history": turn.history or None}),
        "text": turn.text,
        **_present({"reasoning_opening": turn.reasoning_opening, "reasoning": turn.reasoning}),
        **({"tools": _plain(store, list(turn.tools))} if changed else {}),
        **_present({"chat_template_kwargs": _plain_mapping(store, turn.chat_template_kwargs)}),
        "reward": _finite(turn.reward),
        **_present({"rewards": turn.rewards}),
        "advantage": _estimate(trajectory.advantages, turn.index),
        **({"value": _estimate(trajectory.values, turn.index)} if trajectory.values else {}),
        **({"return": _estimate(trajectory.returns, turn.index)} if trajectory.returns else {}),
        **({"penalty": _estimate(trajectory.penalties, turn.index)} if trajectory.penalties else {}),
        "weight": turn.weight,
        **_present(
            {"observed": turn.observed or None, "train_on": turn.train_on or None, "kept_tokens": turn.kept_tokens}
        ),
        "info": _plain_mapping(store, turn.info),
        "tool_calls": [_call_json(call, outcomes.get(call.id), store) for call in turn.calls],
        "finish_reason": turn.finish_reason,
        **({} if turn.constraint is None else {"constraint": dataclasses.asdict(turn.constraint)}),
        **({} if turn.usage is None else {"usage": _present(dataclasses.asdict(turn.usage))}),
        **_present({"started": _time(turn.started)}),
        "seconds": {"engine": round(turn.seconds_engine, 4), "environment": round(turn.seconds_environment, 4)},
    }


def _call_json(call: ToolCall, outcome: ToolOutcome | None, store: MediaStore) -> dict[str, Any]:
    seconds = _finite(outcome.seconds) if outcome else None
    return {
        "id": call.id,
        **_present({"written_id": call.written_id}),
        "name": call.name,
        "arguments": _plain_mapping(store, call.arguments),
        "text": call.text,
        **_present({"parse_error": call.error}),
        "content": text_of(outcome.content) if outcome else None,
        "error": text_of(outcome.error) if outcome and outcome.error is not None else None,
        **({"traceback": outcome.traceback} if outcome and outcome.traceback else {}),
        "reward": _finite(outcome.reward) if outcome else None,
        "attempts": (outcome.attempts if type(outcome.attempts) is int else 1) if outcome else None,
        "seconds": None if seconds is None else round(seconds, 4),
    }


def _segment_json(segment: Segment, store: MediaStore, *, exact: bool) -> dict[str, Any]:
    trained = segment.trainer_logprobs
    return {
        "token_ids": list(segment.token_ids),
        "logprobs": _rounded(segment.logprobs, exact=exact),
        **({"trainer_logprobs": _rounded(trained, exact=exact)} if trained else {}),
        "turn": list(segment.turn),
        "version": list(segment.version),
        **({"media": [store.label(media) for media in segment.media]} if segment.media else {}),
        **({} if segment.routes is None else {"routes": _routes_json(segment.routes)}),
    }


def _routes_json(routes: Routes) -> dict[str, Any]:
    packed = base64.b64encode(zlib.compress(routes.data, _ROUTES_LEVEL)).decode("ascii")
    return {"layers": routes.layers, "top_k": routes.top_k, "number_bytes": routes.number_bytes, "data": packed}


def _rounded(logprobs: Sequence[float], *, exact: bool) -> list[float | None]:
    """Log-probabilities; NaN is None. 9 significant digits identify a 32-bit number."""
    if exact:
        return [None if math.isnan(logprob) else float(f"{logprob:.9g}") for logprob in logprobs]
    # 0, for tokens that were not sampled, is not rounded: most tokens of a record are such tokens
    return [None if logprob != logprob else logprob and round(logprob, 7) for logprob in logprobs]


def _estimate(estimates: Sequence[Any], index: int) -> float | list[float] | None:
    """The advantage, value, return or penalty of a turn: a number, or a number for each sampled token."""
    if not estimates:
        return None
    estimate = estimates[index]
    return estimate if isinstance(estimate, int | float) else [float(number) for number in estimate]


def _present(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that have a value: None, an empty text and an empty container are left out of the record."""
    return {name: value for name, value in keys.items() if value is not None and value not in ("", [], {})}


def _time(seconds: float | None) -> float | None:
    """Unix seconds, to the millisecond."""
    return None if seconds is None else round(seconds, 3)


def _finite(value: Any) -> float | None:
    """The number, or None for NaN, infinity and values that are not numbers."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def _plain(store: MediaStore, value: Any) -> Any:
    """A value of user code as JSON values, its images written to the store. A value that cannot be read is named instead."""
    try:
        with boundary("record"):
            return store.plain(value)
    except Failed as failed:
        if isinstance(failed.__cause__, OSError):
            raise failed.__cause__ from None  # an image could not be written: this ends the run
        return f"cannot be written: {failed.failure.message}"


def _plain_mapping(store: MediaStore, value: Mapping[str, Any]) -> dict[str, Any]:
    plain = _plain(store, value)
    return plain if isinstance(plain, dict) else {"unwritable": plain}


def _json_value(value: Any, depth: int = 0) -> Any:
    """The value with only what JSON can hold: texts as keys, finite numbers, a bounded depth (which also ends a circle)."""
    if depth > _MAX_DEPTH:
        return text_of(value)[:1000]
    if isinstance(value, Mapping):
        return {text_of(key): _json_value(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item, depth + 1) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:
        return text_of(value)[:1000]
    return value


# reading

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
    mismatch = record.text_or_none("template_mismatch")
    mismatch_kind = _enum(MismatchKind, record, "template_mismatch_kind")
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
        agent=record.text("agent", ""),
        policy=record.text("policy", ""),
        episode=record.text("episode", ""),
        trained=record.flag("trained", True),
        shares_reward=record.flag("shares_reward", False),
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
        escaped=Counter({name: int(number) for name, number in record.numbers("escaped").items()}),
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
                chat_template_kwargs=fields.mapping("chat_template_kwargs", {}),
                reward=fields.number("reward"),
                rewards=fields.numbers("rewards"),
                info=fields.mapping("info", {}),
                finish_reason=fields.text("finish_reason", "stop"),
                constraint=_constraint(fields),
                usage=_usage(fields),
                started=fields.number_or_none("started"),
                seconds_engine=seconds.number("engine", 0.0),
                seconds_environment=seconds.number("environment", 0.0),
            )
        )
    return turns


def _constraint(fields: _Fields) -> Constraint | None:
    if fields.values.get("constraint") is None:
        return None
    written = fields.fields("constraint")
    return Constraint(
        grammar=written.text("grammar"),
        stops=tuple(written.list("stops")),
        before=written.text("before", ""),
        start=written.integer("start"),
    )


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
    if "routes" in fields.values:
        segment.routes = _routes(fields.fields("routes"), len(segment.token_ids))
    if segment.turn and not -1 <= min(segment.turn) <= max(segment.turn) < turns:
        fields.refuse("turn", f"must be indexes of the {turns} turns, or -1", [min(segment.turn), max(segment.turn)])
    return segment


def _routes(fields: _Fields, tokens: int) -> Routes:
    numbers = {name: fields.integer(name) for name in ("layers", "top_k", "number_bytes")}
    for name, number in numbers.items():
        if number < 1 or (name == "number_bytes" and number > 2):
            fields.refuse(name, "must be 1 or 2" if name == "number_bytes" else "must be at least 1", number)
    text = fields.text("data")
    try:
        data = zlib.decompress(base64.b64decode(text, validate=True))
    except (ValueError, zlib.error):
        fields.refuse("data", "must be base64 of data that zlib has compressed", text)
    routes = Routes(**numbers, data=data)
    if len(data) % routes.token_bytes or len(routes) > tokens:
        rule = f"must have {routes.token_bytes} bytes for each of at most {tokens} tokens"
        fields.refuse("data", rule, len(data))
    return routes


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
