"""The arguments of a transformers model's forward for a micro-batch: token ids, positions, trees, images."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from turnwise.errors import TurnwiseError
from turnwise.models.vision import VisionAdapter
from turnwise.training.packing import MicroBatch
from turnwise.training.tree import tree_attention

__all__ = ["ModelInputs"]


class ModelInputs:
    """Prepares the inputs of one model."""

    def __init__(self, model: Any) -> None:
        self._name = type(model).__name__
        self._vision = VisionAdapter.of(model)

    @contextmanager
    def of(self, micro: MicroBatch[Any]) -> Iterator[dict[str, Any]]:
        """The arguments of the model's forward, which must be called inside the context."""
        # padded rows need neither positions nor a mask: padding is on the right, and causal attention does not look there
        inputs: dict[str, Any] = {"input_ids": micro.token_ids_BL, "use_cache": False}
        if micro.media_B:
            with self._with_media(micro) as given:
                yield {**inputs, **given}
        elif micro.tree is None:
            yield inputs
        else:
            with tree_attention(micro.tree):
                yield {**inputs, "position_ids": micro.position_BL}

    @contextmanager
    def _with_media(self, micro: MicroBatch[Any]) -> Iterator[dict[str, Any]]:
        """The arguments for rows with images or videos, which need positions of their own."""
        if self._vision is None:
            raise TurnwiseError(
                f"the conversations contain images, which {self._name} does not accept. Train a vision model, such "
                f"as Qwen2.5-VL"
            )
        rows_BL = micro.token_ids_BL.cpu().numpy()
        kinds_BL = np.stack(
            [self._vision.token_types(ids, media) for ids, media in zip(rows_BL, micro.media_B, strict=True)]
        )
        inputs: dict[str, Any] = {}
        if self._vision.uses_mrope:
            # padding gets positions as text does; no target attends to it
            axes = [self._vision.position_ids(ids, media) for ids, media in zip(rows_BL, micro.media_B, strict=True)]
            inputs["position_ids"] = torch.from_numpy(np.stack(axes, axis=1)).to(micro.token_ids_BL.device)
        kinds = torch.from_numpy(kinds_BL).to(micro.token_ids_BL.device)
        media = [item for row in micro.media_B for item in row]
        with self._vision.forward_inputs(micro.token_ids_BL, kinds, media) as given:
            yield {**inputs, **given}
