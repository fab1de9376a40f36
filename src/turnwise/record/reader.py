"""Reads back what `record` wrote: lines of JSON, and the conversations in them, checked.

A record may be damaged by a full disk, a killed run or an editor. Every defect is a `RunError` with the file, the line and
the key; nothing is guessed. The format is that of docs/record.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NotRequired

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from turnwise.errors import RunError

__all__ = ["Record", "check_record", "read_lines", "read_trajectories"]

Record = Mapping[str, Any]
"""One line of trajectories.jsonl."""


class _Error(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]
    kind: str
    message: str


class _Turn(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]
    message: dict[str, Any]
    text: str
    reward: float | None
    advantage: float | None
    weight: NotRequired[float]


class _Segment(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]
    token_ids: list[int]
    logprobs: list[float]
    turn: list[int]
    version: list[int]


class _Trajectory(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]
    id: str
    step: NotRequired[int]
    row: NotRequired[dict[str, Any]]
    stop: str
    error: _Error | None
    reward: float | None
    rewards: NotRequired[dict[str, float | None]]
    tools: NotRequired[list[dict[str, Any]]]
    messages: list[dict[str, Any]]
    turns: list[_Turn]
    segments: list[_Segment]
    template_mismatch: NotRequired[str | None]
    seconds: float


_TRAJECTORY = TypeAdapter(_Trajectory)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a jsonl file; a last line that a killed run left half written is passed over.

    Raises RunError if the file cannot be read or another line is damaged.
    """
    for _, value in _numbered(path):
        yield value


def read_trajectories(path: Path) -> Iterator[Record]:
    """The conversations of a jsonl file, checked.

    Raises RunError as `read_lines` does, and where a key is missing or has a value of another kind.
    """
    for number, value in _numbered(path):
        yield check_record(value, where=f"{path}:{number}")


def check_record(value: Any, *, where: str) -> Record:
    """The value, if it is a conversation's record. Raises RunError with the first key that is wrong."""
    try:
        _TRAJECTORY.validate_python(value)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in problem["loc"]) or "the line"
        raise RunError(f"{where} is damaged: {key}: {problem['msg'].lower()}; got {problem['input']!r:.80}") from None
    for number, segment in enumerate(value["segments"]):
        if len({len(segment[column]) for column in ("token_ids", "logprobs", "turn", "version")}) != 1:
            raise RunError(f"{where} is damaged: segments.{number}: its columns have different lengths")
        if any(not -1 <= turn < len(value["turns"]) for turn in segment["turn"]):
            raise RunError(f"{where} is damaged: segments.{number}.turn names a turn that is not there")
    for number, message in enumerate(value["messages"]):
        if not isinstance(message.get("role"), str):
            raise RunError(f"{where} is damaged: messages.{number} has no role")
    return value


def _numbered(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    if not path.is_file():
        return
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if (value := _object(line, f"{path}:{number}")) is not None:
                    yield number, value
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from None


def _object(line: bytes, where: str) -> dict[str, Any] | None:
    """The object of a line; None for a last line that was never finished."""
    try:
        value = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        if not line.endswith(b"\n"):
            return None
        problem = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise RunError(f"{where} is damaged: {problem}") from None
    if not isinstance(value, dict):
        raise RunError(f"{where} is damaged: a line is a JSON object; this is a {type(value).__name__}")
    return value
