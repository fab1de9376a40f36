"""Converts images and videos of tools in the same way as verl's helpers (`verl.utils.dataset.vision_utils`).

Only the Python type is converted here; the model's processor resizes and splits images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise.data.images import load_image

__all__ = ["process_image", "process_video"]


def process_image(image: Any, image_patch_size: int | None = None) -> Any:
    """A PIL image in RGB, from a PIL image, a path, bytes, or a mapping `{"image": ...}` or `{"bytes": ...}`.

    `image_patch_size` is accepted for verl's callers and not used: the model's processor sets it.
    """
    if isinstance(image, Mapping) and image.get("image") is not None:
        image = image["image"]
    return load_image(image, where="process_image")


def process_video(video: Any, *, image_patch_size: int | None = None) -> list[Any]:
    """A list of frames as PIL images, from a list of images, or a mapping `{"video": [...]}`.

    Raises ValueError for a file: video files are not decoded here.
    """
    if isinstance(video, Mapping):
        video = video.get("video")
    if not isinstance(video, list | tuple):
        raise ValueError(f"a video must be a list of its frames; got {video!r:.80}: decode the file into frames first")
    return [process_image(frame) for frame in video]
