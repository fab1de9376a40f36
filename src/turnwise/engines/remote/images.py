"""Images in requests to servers: which images can be sent, and the name of an image's contents.

turnwise has expanded the placeholders and run the model's processor. A server receives these token ids and these tensors, and
neither encodes nor processes anything again. So the server and the trainer have the same ids and the same pixels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.errors import EngineError
from turnwise.types import Media, Request

_INPUTS = {"pixel_values", "image_grid_thw"}
"""The processed inputs of the families whose images servers take: Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""


def checked_images(request: Request, engine: str) -> Sequence[Media]:
    """The images of a request, in order. Raises EngineError if one of them cannot be sent to a server of this `engine`."""
    for item in request.media:
        if item.kind != "image":
            raise EngineError(
                f"the request contains a {item.kind}, and engine.name={engine} takes images only. Use engine.name=local for "
                f"conversations with videos"
            )
        if set(item.inputs) != _INPUTS:
            raise EngineError(
                f"the model's processor returns {', '.join(sorted(item.inputs))} for an image, and engine.name={engine} takes "
                f"the images of Qwen2-VL, Qwen2.5-VL and Qwen3-VL only ({' and '.join(sorted(_INPUTS))}). Use engine.name=local "
                f"for other model families"
            )
        if len(set(request.token_ids[item.start : item.start + item.length])) != 1:
            raise EngineError(
                f"the image at tokens {item.start} to {item.start + item.length - 1} has other tokens between its placeholders, "
                f"which engine.name={engine} does not take. Use engine.name=local"
            )
    return request.media


def tensor_bytes(tensor: Any) -> bytes:
    """The bytes of a tensor's values, in order."""
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def content_hash(inputs: Mapping[str, Any]) -> str:
    """SHA-256 of the processed tensors of an image: equal for equal images, as 64 hexadecimal digits."""
    content = hashlib.sha256()
    for name in sorted(inputs):
        content.update(name.encode())
        content.update(tensor_bytes(inputs[name]))
    return content.hexdigest()
