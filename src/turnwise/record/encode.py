"""Writes a trajectory as JSON: one line of `trajectories.jsonl`. The format is described in docs/record.md.

Rows, messages, `info` and tool results hold values of user code and of the model. Whatever they contain, the line is valid
JSON that `decode` accepts, and reading it and writing it again gives the same bytes.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from turnwise.errors import Failed, boundary, text_of
from turnwise.record.media_store import MediaStore
from turnwise.types import Segment, ToolCall, ToolOutcome, ToolSchema, Trajectory, Turn

__all__ = ["SCHEMA", "encode_line", "trajectory_line", "trajectory_record"]

SCHEMA = 3
"""Version of the format. Lines without the key `schema` have version 1."""

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
    error, mismatch = trajectory.error, trajectory.template_mismatch
    return {
        "schema": SCHEMA,
        **_present({"step": trajectory.step}),
        "id": trajectory.id,
        "group": trajectory.group,
        "row": {**_plain_mapping(store, fields), "id": trajectory.row.id},
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
        "segments": [_segment(segment, store, exact=exact_logprobs) for segment in trajectory.segments],
        "logprob_kind": trajectory.logprob_kind,
        "template_mismatch": None if mismatch is None else mismatch.message,
        **_present({"template_mismatch_kind": None if mismatch is None else mismatch.kind}),
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
        "tool_calls": [_call(call, outcomes.get(call.id), store) for call in turn.calls],
        "finish_reason": turn.finish_reason,
        **({} if turn.usage is None else {"usage": _present(dataclasses.asdict(turn.usage))}),
        **_present({"started": _time(turn.started)}),
        "seconds": {"engine": round(turn.seconds_engine, 4), "environment": round(turn.seconds_environment, 4)},
    }


def _call(call: ToolCall, outcome: ToolOutcome | None, store: MediaStore) -> dict[str, Any]:
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


def _segment(segment: Segment, store: MediaStore, *, exact: bool) -> dict[str, Any]:
    trained = segment.trainer_logprobs
    return {
        "token_ids": list(segment.token_ids),
        "logprobs": _rounded(segment.logprobs, exact=exact),
        **({"trainer_logprobs": _rounded(trained, exact=exact)} if trained else {}),
        "turn": list(segment.turn),
        "version": list(segment.version),
        **({"media": [store.label(media) for media in segment.media]} if segment.media else {}),
    }


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
