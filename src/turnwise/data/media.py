"""Inserts the images and videos of a row (columns `images` and `videos`) into its messages.

The placeholders are `<image>` and `<video>` in a text, and an empty part such as `{"type": "image"}` in a list of parts. If no
message has a placeholder, the images or videos are inserted at the start of the first user message, as in ms-swift and TRL.
This module resolves paths and checks the headers of images. It decodes no pixels and does not store the contents of files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.data.images import media_kind, media_value, probe_image, recorded_path
from turnwise.errors import DataError
from turnwise.types import Message

__all__ = ["COLUMNS", "with_media"]

COLUMNS = {"image": "images", "video": "videos"}
"""Column names by kind of media."""

_PLACEHOLDER = re.compile("(<image>|<video>)")


def with_media(
    messages: Sequence[Message], fields: Mapping[str, Any], *, place: str, folder: Path | None
) -> tuple[list[Message], dict[str, Any]]:
    """The messages with the row's images and videos inserted, and the fields with absolute paths.

    Example: `[{"role": "user", "content": "<image>What is it?"}]` and `{"images": ["a.png"]}` give a message of the parts
    `{"type": "image", "image": "/data/a.png"}` and `{"type": "text", "text": "What is it?"}`.

    Raises DataError if the number of placeholders differs from the number of images or videos, or a file is missing or
    unreadable.
    """
    media = {
        kind: [
            _checked(kind, value, f"{place}: {kind} {n}", folder) for n, value in enumerate(_list(fields[column]), 1)
        ]
        for kind, column in COLUMNS.items()
        if fields.get(column) is not None
    }
    messages = _marked(messages, {kind: len(values) for kind, values in media.items()})
    unused = {kind: iter(values) for kind, values in media.items()}
    places = dict.fromkeys(media, 0)
    result: list[Message] = []
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list) and not (media and isinstance(content, str) and _PLACEHOLDER.search(content)):
            result.append(message)
            continue
        parts: list[Any] = []
        for part in _parts(content, split=bool(media)):
            kind = media_kind(part)
            if kind is None:
                parts.append(part)
            elif (value := media_value(part)) is not None:
                parts.append({"type": kind, kind: _checked(kind, value, f"{place}: {kind} of a message", folder)})
            else:
                places[kind] = places.get(kind, 0) + 1
                parts.append({"type": kind, kind: next(unused.get(kind, iter(())), None)})
        result.append({**message, "content": parts})
    for kind, count in places.items():
        have = len(media.get(kind, ()))
        if count != have:
            column = COLUMNS[kind]
            raise DataError(
                f"{place}: the column {column!r} and the prompt do not match: {have} in the column, {count} placeholders in "
                f"the prompt. Write <{kind}> into the prompt for each of them, or add a content part {{'type': {kind!r}}}"
            )
    return result, {**fields, **{COLUMNS[kind]: values for kind, values in media.items()}}


def _marked(messages: Sequence[Message], counts: Mapping[str, int]) -> Sequence[Message]:
    """The messages with placeholders added to the first user message, for each kind of media without a placeholder."""
    contents = [content for message in messages if isinstance(content := message.get("content"), str | list)]
    all_parts = [part for content in contents for part in _parts(content, split=True)]
    empty = [kind for part in all_parts if (kind := media_kind(part)) is not None and media_value(part) is None]
    places = [{"type": kind} for kind, count in counts.items() if kind not in empty for _ in range(count)]
    user = (
        n
        for n, message in enumerate(messages)
        if message.get("role") == "user" and isinstance(message.get("content"), str | list)
    )
    if not places or (first := next(user, None)) is None:
        return messages
    parts = [*places, *_parts(messages[first]["content"], split=False)]
    return [*messages[:first], {**messages[first], "content": parts}, *messages[first + 1 :]]


def _parts(content: Any, *, split: bool) -> Iterator[Mapping[str, Any]]:
    """The content as parts. If `split` is set, placeholders in texts become empty parts."""
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        # in parquet, each part has the keys of all parts; absent values are null
        part = {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else part
        text = part.get("text") if isinstance(part, Mapping) else part
        if not split or not isinstance(text, str) or not _PLACEHOLDER.search(text):
            yield part if isinstance(part, Mapping) else {"type": "text", "text": part}
            continue
        for piece in _PLACEHOLDER.split(text):
            if piece in ("<image>", "<video>"):
                yield {"type": piece[1:-1]}
            elif piece:
                yield {"type": "text", "text": piece}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _checked(kind: str, value: Any, where: str, folder: Path | None) -> Any:
    """The value for the message: paths are made absolute, other values are unchanged.

    Raises DataError if the image or video is missing, or the image is unreadable.
    """
    if kind == "image":
        probe_image(value, where=where, folder=folder)
        return _absolute(value, folder)
    if isinstance(value, Mapping):
        value = media_value({"type": "video", **value})
    if isinstance(value, list | tuple) and value:
        return [_checked("image", frame, f"{where}, frame {n}", folder) for n, frame in enumerate(value, 1)]
    if not isinstance(value, str | Path) or not str(value):
        raise DataError(f"{where} is {value!r:.80}; a video is a path, or a list of frames (images)")
    path = _absolute(str(value).removeprefix("file://"), folder)
    if not os.path.isfile(path):
        raise DataError(f"{where}: there is no video file {path}")
    return path


def _absolute(value: Any, folder: Path | None) -> Any:
    """A relative path as an absolute path. It is relative to the folder of the data file."""
    if isinstance(value, Mapping):
        if value.get("bytes") is None and value.get("path") is not None:
            return _absolute(value["path"], folder)
        return value
    if not isinstance(value, str | Path) or str(value).startswith(("data:", "file://")):
        return value
    path = Path(os.path.expanduser(recorded_path(value, folder)))
    return str(path if path.is_absolute() or folder is None else (folder / path).absolute())
