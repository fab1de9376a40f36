"""Processed images of a request as one text, which SGLang's route takes where it expects the address of an image.

turnwise writes the text (`encode_images`), and `processors.qwen` reads it in SGLang's server (`decode_images`).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

_PREFIX = "turnwise-images:"


def encode_images(tensors: dict[str, Any], places: Sequence[tuple[int, int]]) -> str:
    """The tensors of all images of a prompt, and the first and the last placeholder of each image."""
    import torch

    encoded = {
        name: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "data": base64.b64encode(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).decode(),
        }
        for name, tensor in tensors.items()
    }
    return _PREFIX + json.dumps({"tensors": encoded, "places": [list(place) for place in places]})


def decode_images(image: Any) -> Any:
    """The images as SGLang takes the output of a processor; anything that `encode_images` did not write as it is."""
    text = image if isinstance(image, str) else getattr(image, "url", None)
    if not isinstance(text, str) or not text.startswith(_PREFIX):
        return image
    import torch

    content = json.loads(text.removeprefix(_PREFIX))
    tensors = {
        name: torch.frombuffer(
            bytearray(base64.b64decode(entry["data"])), dtype=getattr(torch, entry["dtype"])
        ).reshape(entry["shape"])
        for name, entry in content["tensors"].items()
    }
    return {"format": "processor_output", **tensors, "offsets": content["places"]}
