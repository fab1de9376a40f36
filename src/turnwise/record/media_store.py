"""The images of a run. Each image is written once, under the hash of its content; the record refers to it by that hash.

This module knows where images are in messages, rows and the `info` of an environment. It does not know what they are for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.data.images import digest, is_image, load_image, media_kind, media_value
from turnwise.errors import DataError, text_of
from turnwise.types import Media

__all__ = ["MediaStore", "StoredImage"]

_MAX_DEPTH = 56
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
        if len(inside) >= _MAX_DEPTH:
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
