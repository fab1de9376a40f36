"""Images and videos of tools, made ready as verl's helpers make them (`verl.utils.dataset.vision_utils`).

Only the form is changed here: sizes and patches are the affair of the model's own processor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise.data.images import load_image

__all__ = ["process_image", "process_video"]


def process_image(image: Any, image_patch_size: int | None = None) -> Any:
    """A PIL image in RGB, of a PIL image, a path, bytes, or a mapping `{"image": ...}` or `{"bytes": ...}`.

    `image_patch_size` is for verl's callers: the model's processor knows it.
    """
    if isinstance(image, Mapping) and image.get("image") is not None:
        image = image["image"]
    return load_image(image, where="process_image")


def process_video(video: Any, *, image_patch_size: int | None = None) -> list[Any]:
    """A list of frames as PIL images, of a list of images, or a mapping `{"video": [...]}`.

    Raises ValueError for a file: nothing here reads films.
    """
    if isinstance(video, Mapping):
        video = video.get("video")
    if not isinstance(video, list | tuple):
        raise ValueError(
            f"a video must be a list of its frames here; got {video!r:.80}: read the file into frames first"
        )
    return [process_image(frame) for frame in video]
