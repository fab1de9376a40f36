"""Images of a request in the form that vLLM takes: hashes, positions of the placeholders, and processed tensors.

vLLM 0.32 takes a processed image as base64 of msgpack (`vllm.v1.serial_utils`): for each input of the model the data
[dtype, shape, bytes] and a field, which says how vLLM puts the images of several requests together.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import MutableMapping
from functools import cache
from typing import Any

from turnwise.engines.remote.images import checked_images, content_hash, tensor_bytes
from turnwise.types import Media, Request

__all__ = ["image_features"]

_RAW = 3
"""vLLM's code of the msgpack extension for the bytes of a tensor."""


def image_features(request: Request) -> dict[str, Any] | None:
    """The field `features` of a request; None without images. Raises EngineError for images that vLLM does not take."""
    images = checked_images(request, "vllm")
    if not images:
        return None
    encoded = [_encode(image) for image in images]
    return {
        "mm_hashes": {"image": [content for content, _ in encoded]},
        "mm_placeholders": {"image": [{"offset": image.start, "length": image.length} for image in images]},
        "kwargs_data": {"image": [data for _, data in encoded]},
    }


@cache
def _encodings() -> MutableMapping[Any, tuple[str, str]]:
    """Hash and encoding of images, by their tensors of pixels. A conversation sends its images again with each turn."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def _encode(image: Media) -> tuple[str, str]:
    """The hash of an image, and its tensors as base64."""
    known = _encodings()
    pixels, grid = image.inputs["pixel_values"], image.inputs["image_grid_thw"]
    if pixels not in known:
        flat = {"keep_on_cpu": False, "slices": [[0, len(pixels), None]], "dim": 0}
        item = {
            "pixel_values": {"data": _tensor(pixels), "field": ["flat", flat]},
            "image_grid_thw": {"data": _tensor(grid[0]), "field": ["batched", {"keep_on_cpu": True}]},
        }
        known[pixels] = content_hash(image.inputs), base64.b64encode(_msgpack(item)).decode()
    return known[pixels]


def _tensor(tensor: Any) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor_bytes(tensor)]


def _msgpack(value: Any) -> bytes:
    """msgpack of nested dictionaries, lists, texts, integers, booleans and None; bytes become vLLM's extension for tensors."""
    match value:
        case None:
            return b"\xc0"
        case bool():
            return b"\xc3" if value else b"\xc2"
        case int():
            return struct.pack(">Bq", 0xD3, value)
        case str():
            return struct.pack(">BI", 0xDB, len(value.encode())) + value.encode()
        case bytes():
            return struct.pack(">BIb", 0xC9, len(value), _RAW) + value
        case list():
            return struct.pack(">BI", 0xDD, len(value)) + b"".join(map(_msgpack, value))
        case dict():
            return struct.pack(">BI", 0xDF, len(value)) + b"".join(
                _msgpack(part) for pair in value.items() for part in pair
            )
        case _:
            raise TypeError(f"{type(value).__name__} has no msgpack form here")
