"""Images in ms-swift's requests and answers: in lists beside the messages, as base64 or as paths that the server can read."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.compat.swift.messages import messages_of
from turnwise.compat.swift.protocol import RolloutInferRequest
from turnwise.data.images import load_image, media_kind, media_value, probe_image
from turnwise.errors import DataError
from turnwise.rollout_server.images import encoded_png
from turnwise.serve.http import RequestRefused
from turnwise.types import Message

__all__ = ["encoded_media", "with_images"]


def with_images(messages: Sequence[Message], images: Any, videos: Any, where: str) -> list[Message]:
    """The messages of a request with its images as parts, at the tags `<image>`.

    Raises RequestRefused if an image cannot be read, or if the numbers of tags and images differ.
    """
    if not images and not videos and not any(isinstance(message.get("content"), list) for message in messages):
        return list(messages)
    if videos:
        raise RequestRefused(400, f"{where}.videos: this server takes images only")
    images = images if isinstance(images, list) else [images]
    opened = [_opened(value, f"{where}.images.{number}") for number, value in enumerate(images)]
    plain = [_opened_parts(message, where) for message in messages]
    try:
        return messages_of(RolloutInferRequest(messages=plain, images=opened))
    except (ValueError, TypeError) as error:
        raise RequestRefused(400, f"{where}: {error}") from None


def encoded_media(shown: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
    """`images` of `rollout_infos`: the images of the messages in order, as PNG files in base64."""
    return {"images": [encoded_png(load_image(value, where="an image of a message")) for value in shown["image"]]}


def _opened_parts(message: Message, where: str) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts: list[Any] = []
    for part in content:
        kind = media_kind(part) if isinstance(part, Mapping) else None
        if kind is not None and (value := media_value(part)) is not None:
            part = {"type": kind, kind: _opened(value, f"{where}.messages")}
        parts.append(part)
    return {**message, "content": parts}


def _opened(value: Any, where: str) -> Any:
    """An image as bytes, a data URI or a path. Raises RequestRefused if it is none."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str) and not value.startswith(("data:", "http://", "https://")) and not _is_file(value):
        try:
            value = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise RequestRefused(
                400, f"{where} is {value!r:.80}: it must be base64, or the path of a file that this server can read"
            ) from None
    try:
        probe_image(value, where=where)
    except DataError as error:
        raise RequestRefused(400, str(error)) from None
    return value


def _is_file(text: str) -> bool:
    try:
        return len(text) < 4096 and Path(text).is_file()
    except (OSError, ValueError):
        return False
