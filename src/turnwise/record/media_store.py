"""The images of a run, each written once under the name of its content, so that a record can say which one it was.

It knows where images hide in messages, rows and whatever an environment keeps. It refuses to know what they are for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.data.images import digest, is_image, load_image, media_kind, media_value
from turnwise.errors import DataError, text_of
from turnwise.types import Media

__all__ = ["MediaStore"]

_DEEPEST, _LONGEST = 60, 1000  # containers inside each other, and characters of what is inside the last one


class MediaStore:
    """A folder of `<sha256>.png`, made when the first image comes; with None, images are named and not written."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def plain(self, value: Any, *, inside: tuple[int, ...] = ()) -> Any:
        """The same with names in place of images; a path stays a path.

        Example: `{"type": "image", "image": <PIL image>}` gives `{"type": "image", "image": "sha256:4a1c...", "size": [8, 8]}`.
        `inside` are the containers on the way here.
        """
        if id(value) in inside:
            return value  # a circle: whoever writes it down must cope
        if len(inside) >= _DEEPEST:
            return text_of(value)[:_LONGEST]
        inside = (*inside, id(value))
        if isinstance(value, Mapping):
            kind = media_kind(value)
            if kind == "image" and (shown := self._store(media_value(value))) is not None:
                return {"type": "image", "image": f"sha256:{digest(shown)}", "size": list(shown.size)}
            if isinstance(value.get("bytes"), bytes) and (shown := self._store(value)) is not None:
                return f"sha256:{digest(shown)}"
            return {key: self.plain(item, inside=inside) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(item, inside=inside) for item in value]
        if (shown := self._store(value)) is not None:
            return f"sha256:{digest(shown)}"
        return value

    def label(self, media: Media) -> dict[str, Any]:
        """What a record says of an image or a video among the tokens."""
        frames = media.source if isinstance(media.source, list) else [media.source]
        names = [digest(frame) if is_image(frame) else str(frame) for frame in frames]
        sizes = [list(frame.size) if is_image(frame) else None for frame in frames]
        grid = media.inputs.get(f"{media.kind}_grid_thw")
        one = media.kind == "image"
        return {
            "kind": media.kind,
            "start": media.start,
            "length": media.length,
            "grid": None if grid is None else grid[0].tolist(),
            "sha256": names[0] if one else names,
            "size": sizes[0] if one else sizes,
        }

    def _store(self, value: Any) -> Any:
        """The image as it was shown, written down; None where the value is none, is a file's name, or cannot be read."""
        inside = value.get("bytes") if isinstance(value, Mapping) else value
        uri = isinstance(inside, str) and inside.startswith("data:image/")
        if not (is_image(inside) or isinstance(inside, bytes) or uri):
            return None
        try:
            image = load_image(inside, where="an image of the record")
        except DataError:
            return None  # it has been told where it mattered
        if self._folder is not None:
            file = self._folder / f"{digest(image)}.png"
            if not file.exists():
                self._folder.mkdir(parents=True, exist_ok=True)
                temporary = file.with_suffix(".writing")
                image.save(temporary, "PNG", compress_level=1)
                os.replace(temporary, file)
        return image
