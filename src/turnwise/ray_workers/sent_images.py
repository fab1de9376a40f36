"""Images of conversations between the trainer and rollout workers.

The worker gets the files of a row's images with the row. It sends the images that the conversation has shown, without tensors:
the trainer computes these again with its own image processor, which is the same, and equal images share them.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import replace
from typing import Any

from turnwise.chat.media import MediaProcessor
from turnwise.data.images import image_file
from turnwise.data.media import COLUMNS
from turnwise.errors import DataError
from turnwise.rollout_server.images import change_each, processed_again, with_changed_media
from turnwise.types import Row, Trajectory

__all__ = ["ImageFile", "add_tensors", "pickled", "unpickled", "with_files", "without_tensors"]


class ImageFile(bytes):
    """The contents of an image file of the trainer's machine, in place of its path. In the trainer, it is the path again."""

    path: Any
    """The image as the trainer's row has it."""

    @classmethod
    def of(cls, value: Any, *, where: str) -> Any:
        """The file of an image; an image that is not given as a path stays as it is. Raises DataError."""
        path = image_file(value, where=where)
        if path is None:
            return value
        try:
            file = cls(path.read_bytes())
        except OSError as error:
            raise DataError(f"{where}: {path} cannot be read ({error.strerror})") from error
        file.path = value
        return file


def with_files(row: Row) -> Row:
    """The row with the contents of image files in place of their paths, in messages and columns. Raises DataError."""
    files: dict[str, Any] = {}

    def opened(value: Any) -> Any:
        where = f"an image of row {row.id}"
        if not isinstance(value, str):
            return ImageFile.of(value, where=where)
        if value not in files:  # the messages and the columns have the same images
            files[value] = ImageFile.of(value, where=where)
        return files[value]

    columns = {
        column: [change_each(value, opened) for value in values]
        for column in COLUMNS.values()
        if isinstance(values := row.fields.get(column), list | tuple)
    }
    return replace(row, messages=with_changed_media(row.messages, opened), fields={**row.fields, **columns})


def without_tensors(trajectory: Trajectory) -> None:
    """Remove the tensors of images, in the worker."""
    for segment in trajectory.segments:
        segment.media = [replace(item, inputs={}) for item in segment.media]


def add_tensors(trajectory: Trajectory, vision: MediaProcessor | None) -> None:
    """Compute the tensors of images again, in the trainer. Raises EngineError."""
    for segment in trajectory.segments:
        where = f"the conversation {trajectory.id}"
        segment.media = [processed_again(item, segment, vision, where=where) for item in segment.media]


class _Pickler(pickle.Pickler):
    """Writes paths in place of the trainer's image files."""

    def persistent_id(self, obj: Any) -> Any:
        return (obj.path,) if isinstance(obj, ImageFile) else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        return pid[0]


def pickled(trajectory: Trajectory) -> bytes:
    """The trajectory of an ended conversation as bytes, without the image files of its row."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(trajectory)
    return buffer.getvalue()


def unpickled(data: bytes) -> Trajectory:
    """The trajectory that `pickled` has written."""
    return _Unpickler(io.BytesIO(data)).load()
