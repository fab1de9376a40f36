"""Images between a rollout server and its client.

Each image is sent once in each direction, as a PNG file under the hash of its pixels (`data.images.digest`). Messages refer to it
by `sha256:<hash>`, as in the record. PNG keeps all pixels, and client and server have the same image processor, so the trainer
computes the same tensors for the model as the server did. The tensors themselves are not sent.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.chat.media import MediaProcessor
from turnwise.data.images import digest, is_image, load_image, media_kind, media_value
from turnwise.data.media import COLUMNS
from turnwise.errors import DataError, EngineError, TurnwiseError
from turnwise.record.media_store import MediaStore, StoredImage
from turnwise.types import Media, Message, Row, Segment

__all__ = [
    "MAX_BODY",
    "CollectedImages",
    "PackedRows",
    "ReceivedImages",
    "change_each",
    "encoded_png",
    "processed_again",
    "processor_fingerprint",
    "unpack_row",
    "with_changed_media",
]

MAX_BODY = 256 << 20
"""Bytes of a request with conversations and their images, at most."""
_REFERENCE = re.compile(r"sha256:([0-9a-f]{64})")
_TENSORS = "multi_modal_inputs"


def processor_fingerprint(vision: MediaProcessor | None) -> str | None:
    """SHA-256 of the kind and the files of a model's image processor; None for a text model."""
    if vision is None:
        return None
    hashed = hashlib.sha256(type(getattr(vision.processor, "image_processor", None)).__name__.encode())
    for file in sorted(vision.files, key=lambda file: file.name):
        content = file.read_bytes()
        hashed.update(f"{file.name}:{len(content)}:".encode() + content)
    return hashed.hexdigest()


@dataclass(slots=True)
class PackedRows:
    """The client's rows as JSON values, and their images."""

    images: dict[str, bytes] = field(default_factory=dict)
    """PNG files by the hash of their pixels."""
    given: dict[int, dict[str, Any]] = field(default_factory=dict)
    """For each row (by `id(row)`): its images as the row has them, such as a path, by the same hash."""

    def pack(self, row: Row) -> tuple[list[Message], dict[str, Any]]:
        """The messages and the fields of a row, with references in place of images.

        Raises EngineError if an image cannot be read, a video is a file, or the images are too large for a request.
        """
        where, given = f"row {row.id}", self.given.setdefault(id(row), {})
        try:
            messages = with_changed_media(row.messages, lambda value: self._reference(value, given, where))
            fields = {name: value for name, value in row.fields.items() if name != _TENSORS}
            for column in COLUMNS.values():
                if isinstance(values := fields.get(column), list | tuple):
                    fields[column] = [
                        change_each(value, lambda item: self._reference(item, given, where)) for value in values
                    ]
        except DataError as error:
            raise EngineError(f"{error}. A rollout server cannot run this row") from error
        size = sum(map(len, self.images.values())) * 4 // 3
        if size > MAX_BODY:
            raise EngineError(
                f"the images of a request have {size >> 20} MiB, and a rollout server takes {MAX_BODY >> 20} MiB: make the "
                f"images smaller, or, with deterministic=true, train.batch_size"
            )
        return messages, fields

    def _reference(self, value: Any, given: dict[str, Any], where: str) -> str:
        image = load_image(value, where=f"an image of {where}")
        name = digest(image)
        given.setdefault(name, value)
        if name not in self.images:
            self.images[name] = _png(image)
        return f"sha256:{name}"


def unpack_row(
    messages: Sequence[Message], fields: Mapping[str, Any], images: Mapping[str, str]
) -> tuple[list[Message], dict[str, Any]]:
    """The messages and the fields of a row, with PNG files (bytes) in place of references to `images`, which are in base64.

    Images in messages may also be data URIs. Raises EngineError for paths and unknown references.
    """

    def opened(value: Any) -> Any:
        if isinstance(value, str) and (match := _REFERENCE.fullmatch(value)) is not None:
            return _decoded(images, match.group(1))
        if isinstance(value, str) and value.startswith("data:image/"):
            return value
        raise EngineError(
            f"an image of a message is {value!r:.80}: it must be sha256:<hash> of an image in `images`, or a data URI. The "
            f"server opens no files or addresses for its clients"
        )

    unpacked = dict(fields)
    for column in COLUMNS.values():
        if isinstance(values := unpacked.get(column), list):
            unpacked[column] = [change_each(value, opened) if _is_reference(value) else value for value in values]
    return with_changed_media(messages, opened), unpacked


class CollectedImages(MediaStore):
    """Collects the images of a trajectory instead of writing them. Images in `known`, which the client has, are left out."""

    def __init__(self, known: Collection[str]) -> None:
        super().__init__(None)
        self.files: dict[str, str] = {}
        """PNG files in base64, by the hash of their pixels."""
        self._known = known

    def keep(self, image: Any, name: str) -> None:
        if name not in self._known and name not in self.files:
            self.files[name] = encoded_png(image)

    def label(self, media: Media) -> dict[str, Any]:
        for frame in media.source if isinstance(media.source, list) else [media.source]:
            if is_image(frame):  # an environment may have given it as a path of the server
                self.keep(frame, digest(frame))
        return super().label(media)


def processed_again(item: Media, segment: Segment, vision: MediaProcessor | None, *, where: str) -> Media:
    """An image or a video that another process has put into a segment, with the tensors of this process's image processor.

    `item.source` are the pixels: PIL images, or files as bytes. Equal images share their tensors. Raises EngineError if the
    processor makes another number of placeholders than the segment has.
    """
    if vision is None:
        raise EngineError(f"{where} contains images, and the model of the trainer has no image processor")
    try:
        processed = vision.process(item.kind, item.source)
    except TurnwiseError as error:
        raise EngineError(f"{where}: {error}") from error
    tokens = segment.token_ids[item.start : item.start + item.length]
    if tokens.count(vision.token_ids[item.kind]) != processed.num_placeholders:
        raise EngineError(
            f"{where}: the {item.kind} at token {item.start} has {item.length} tokens, and the trainer's image processor makes "
            f"{processed.num_placeholders} placeholders of it: install the same version of transformers"
        )
    return replace(item, source=processed.source, inputs=processed.inputs)


class ReceivedImages:
    """The images of a trajectory from the server. `given` are those of its row, `files` those of the answer.

    Raises EngineError if `files` has another form.
    """

    def __init__(self, vision: MediaProcessor | None, given: Mapping[str, Any], files: Any, *, where: str) -> None:
        if not isinstance(files, Mapping):
            raise EngineError(f"{where}: `images` must be an object of PNG files in base64")
        self._vision, self._given, self._files, self._where = vision, given, files, where

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with images in place of references: as the client's row has them, else PIL images."""
        return with_changed_media(messages, lambda value: self._image(value) if _is_reference(value) else value)

    def media(self, item: Media, segment: Segment) -> Media:
        """An image or a video of a segment, with the tensors for the model. Raises EngineError."""
        frames: list[StoredImage] = item.source if isinstance(item.source, list) else [item.source]
        images = [self._image(f"sha256:{frame.sha256}") for frame in frames]
        value = images if isinstance(item.source, list) else images[0]
        return processed_again(replace(item, source=value), segment, self._vision, where=self._where)

    def _image(self, reference: str) -> Any:
        match = _REFERENCE.fullmatch(reference)
        if match is None:
            raise EngineError(
                f"{self._where} contains the video file {reference[7:87]!r}: environments must give frames"
            )
        name = match.group(1)
        if name in self._given:
            return self._given[name]
        try:
            return load_image(_decoded(self._files, name), where=f"{self._where}: the image {name[:12]}")
        except DataError as error:
            raise EngineError(str(error)) from error


def with_changed_media(messages: Sequence[Message], change: Callable[[Any], Any]) -> list[Message]:
    """The messages with `change` applied to each image, and to each frame of a video."""
    result: list[Message] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and any(isinstance(part, Mapping) and media_kind(part) for part in content):
            message = {**message, "content": [_changed_part(part, change) for part in content]}
        result.append(message)
    return result


def _changed_part(part: Any, change: Callable[[Any], Any]) -> Any:
    kind = media_kind(part) if isinstance(part, Mapping) else None
    return part if kind is None else {"type": kind, kind: change_each(media_value(part), change)}


def change_each(value: Any, change: Callable[[Any], Any]) -> Any:
    """`change` of an image, or of each frame of a video."""
    return [change(frame) for frame in value] if isinstance(value, list | tuple) else change(value)


def _is_reference(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_reference, value))
    return isinstance(value, str) and _REFERENCE.fullmatch(value) is not None


def _decoded(images: Mapping[str, Any], name: str) -> bytes:
    """A file of `images`. Raises EngineError if there is none, or if it is not base64."""
    try:
        return base64.b64decode(images[name], validate=True)
    except KeyError:
        raise EngineError(f"there is no image sha256:{name} in `images`") from None
    except (binascii.Error, ValueError, TypeError):
        raise EngineError(f"the image sha256:{name} is not base64") from None


def encoded_png(image: Any) -> str:
    """A PIL image as a PNG file in base64."""
    return base64.b64encode(_png(image)).decode()


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
