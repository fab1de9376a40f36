"""Lets SGLang's server take images of Qwen's vision models that turnwise has processed, instead of image files.

It is imported in SGLang's environment, where only the source of turnwise is on the path: no module of turnwise that needs other
packages may be imported here.
"""

from __future__ import annotations

from typing import Any, ClassVar

from sglang.srt.multimodal.processors.qwen_vl import (  # type: ignore[import-not-found] # pyright: ignore[reportMissingImports]
    QwenVLImageProcessor,
)

from turnwise.engines.sglang.images import decode_images

__all__ = ["ProcessedImages"]


class ProcessedImages(QwenVLImageProcessor):
    """SGLang's processor, for requests whose only image is a text that `encode_images` wrote. Other images are not changed."""

    models: ClassVar[list[Any]] = list(QwenVLImageProcessor.models)
    prefer_tokenized_input = True  # the token ids of a request are never decoded

    async def process_mm_data_async(
        self, image_data: Any, input_text: Any, request_obj: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """See SGLang's `BaseMultimodalProcessor`."""
        images = [decode_images(image) for image in image_data or ()]
        return await super().process_mm_data_async(images, input_text, request_obj, *args, **kwargs)
