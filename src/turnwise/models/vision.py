"""What a model that sees is given besides token ids: pixels, positions on three axes, and which tokens stand for an image.

The trainer and the embedded engine both ask here, so that they cannot disagree; and what they get is what the model would
have worked out itself in one pass over the whole sequence. It knows transformers' image-text models by their own methods
(`get_rope_index`) and the arguments of their forward; it refuses to know families by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

from turnwise.errors import TurnwiseError
from turnwise.types import Media

__all__ = ["VisionAdapter"]

_TYPES = {"image": 1, "video": 2}
"""What transformers calls `mm_token_type_ids`; 0 is text."""

_meant: ContextVar[torch.Tensor | None] = ContextVar("meant", default=None)


class VisionAdapter:
    """What one model is told of the images in its tokens. `of` makes it."""

    def __init__(self, model: Any, pads: Mapping[str, int]) -> None:
        self._model = model
        self._pads = dict(pads)
        self._other = next(token for token in range(3) if token not in pads.values())
        self._rope = next(
            (module.get_rope_index for module in model.modules() if callable(getattr(module, "get_rope_index", None))),
            None,
        )
        self._rope_takes = set(inspect.signature(self._rope).parameters) if self._rope is not None else set()
        self._takes = set(inspect.signature(model.forward).parameters)
        embedding = model.get_input_embeddings()
        if _embed_what_was_meant not in embedding._forward_hooks.values():
            embedding.register_forward_hook(_embed_what_was_meant)

    @classmethod
    def of(cls, model: Any) -> VisionAdapter | None:
        """How this model sees, or None for one that only reads."""
        pads: dict[str, int] = {}
        for kind in _TYPES:
            for name in (f"{kind}_token_id", f"{kind}_token_index"):
                if isinstance(token := getattr(model.config, name, None), int):
                    pads.setdefault(kind, token)
        sees = any(name.startswith("pixel_values") for name in inspect.signature(model.forward).parameters)
        return cls(model, pads) if sees and "image" in pads else None

    @property
    def has_axes(self) -> bool:
        """Whether positions are on three axes (Qwen's mrope) and not the places of the tokens."""
        return self._rope is not None

    def kinds(self, token_ids_N: np.ndarray, media: Sequence[Media]) -> np.ndarray:
        """For each token what it stands for: 0 itself, 1 an image, 2 a video."""
        kinds_N = np.zeros(len(token_ids_N), dtype=np.int64)
        for one in media:
            span = slice(one.start, one.start + one.length)
            kinds_N[span][token_ids_N[span] == self._pads.get(one.kind, -1)] = _TYPES[one.kind]
        return kinds_N

    def positions(self, token_ids_N: np.ndarray, media: Sequence[Media]) -> np.ndarray:
        """Positions [3, N] of the tokens, as the model itself would have them; equal axes where it has only one."""
        if self._rope is None or not media:
            return np.tile(np.arange(len(token_ids_N)), (3, 1))
        given: dict[str, Any] = {
            "input_ids": torch.from_numpy(token_ids_N.astype(np.int64))[None],
            "mm_token_type_ids": torch.from_numpy(self.kinds(token_ids_N, media))[None],
            **self.merged(media),
        }
        position_3BN, _ = self._rope(**{name: value for name, value in given.items() if name in self._rope_takes})
        return position_3BN[-3:, 0].numpy()

    def merged(self, media: Sequence[Media]) -> dict[str, Any]:
        """The tensors of several images, one after the other, by the model's names.

        Raises TurnwiseError if they cannot be laid together.
        """
        merged: dict[str, Any] = {}
        for name in dict.fromkeys(name for one in media for name in one.inputs):
            parts = [one.inputs[name] for one in media if name in one.inputs]
            if not isinstance(parts[0], torch.Tensor):
                merged[name] = [item for part in parts for item in part]
                continue
            if len({part.shape[1:] for part in parts}) > 1:
                parts = _padded(parts) if _says_its_size(name, media) else _evened(name, parts)
            merged[name] = torch.cat(parts)
        return merged

    @contextmanager
    def seeing(
        self, token_ids_BT: torch.Tensor, kinds_BT: torch.Tensor, media: Sequence[Media]
    ) -> Iterator[dict[str, Any]]:
        """The arguments of the model's forward for these tokens, whose images are `media`, row by row.

        Inside, a placeholder that stands for nothing, because the model itself sampled it, is read as the word that it is:
        the model would look for its image.
        """
        parameter = next(self._model.parameters())
        given: dict[str, Any] = {}
        for name, value in self.merged(media).items():
            if name not in self._takes or not isinstance(value, torch.Tensor):
                continue  # lists (seconds between frames) are for the positions, which the caller gives
            value = value.to(parameter.device)
            given[name] = value.to(parameter.dtype) if value.is_floating_point() else value
        for name in ("mm_token_type_ids", "token_type_ids"):  # the latter is what Gemma calls it
            if media and name in self._takes:
                given[name] = kinds_BT
                break
        pads = torch.tensor(list(self._pads.values()), device=token_ids_BT.device)
        stray_BT = torch.isin(token_ids_BT, pads) & (kinds_BT == 0)
        if not media or not bool(stray_BT.any()):
            yield {"input_ids": token_ids_BT, **given}
            return
        token = _meant.set(token_ids_BT)
        try:
            yield {"input_ids": token_ids_BT.masked_fill(stray_BT, self._other), **given}
        finally:
            _meant.reset(token)


def _says_its_size(name: str, media: Sequence[Media]) -> bool:
    """Whether each image [images, channels, height, width] comes with its height and width (Pixtral's `image_sizes`), so that
    the model leaves out what lies beyond them."""
    for one in media:
        if name not in one.inputs:
            continue
        pixels, sizes = one.inputs[name], one.inputs.get("image_sizes")
        if (
            pixels.ndim != 4
            or not isinstance(sizes, torch.Tensor)
            or sizes.tolist() != [list(pixels.shape[2:])] * len(pixels)
        ):
            return False
    return True


def _padded(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Images [images, channels, height, width] in one height and width: zeros at the bottom and on the right, as the processor
    pads images that it is given together."""
    height, width = (max(part.shape[axis] for part in parts) for axis in (2, 3))
    return [torch.nn.functional.pad(part, (0, width - part.shape[3], 0, height - part.shape[2])) for part in parts]


def _evened(name: str, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors [1, pieces, ...] with blank pieces added, as processors do for images that they cut into several.

    Raises TurnwiseError for any other difference.
    """
    if any(part.ndim < 4 for part in parts) or len({part.shape[2:] for part in parts}) > 1:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts[:4])
        raise TurnwiseError(
            f"the images of one pass have {name} of the shapes {shapes}, which cannot be laid together. Have the images of this "
            f"model in one size"
        )
    most = max(part.shape[1] for part in parts)
    blanks = [part.new_zeros((part.shape[0], most - part.shape[1], *part.shape[2:])) for part in parts]
    return [torch.cat(pair, dim=1) for pair in zip(parts, blanks, strict=True)]


def _embed_what_was_meant(module: Any, arguments: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
    token_ids_BT = _meant.get()
    if token_ids_BT is None or not arguments or arguments[0].shape != token_ids_BT.shape:
        return None
    return module.forward(token_ids_BT)
