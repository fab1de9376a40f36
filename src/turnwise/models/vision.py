"""The inputs of a vision model besides token ids: pixels, positions on three axes, and the token types.

The trainer and the embedded engine both use this module, so their inputs are equal; and equal to those that the model would
compute itself in one pass over the complete sequence. Knows the methods of transformers' image-text models (`get_rope_index`) and
the arguments of their forward. Does not know model families by name.
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

_TOKEN_TYPES = {"image": 1, "video": 2}
"""The values of `mm_token_type_ids` in transformers; 0 is text."""

_literal_ids: ContextVar[torch.Tensor | None] = ContextVar("literal_ids", default=None)
"""Token ids to embed in place of the ids that the model's forward receives."""
_own_places: ContextVar[torch.Tensor | None] = ContextVar("own_places", default=None)
"""The places [T] in the rows, one after the other, of the tokens that the language model shall compute; None: all."""


class VisionAdapter:
    """Prepares the vision inputs of one model; create it with `VisionAdapter.of`. Axes: B rows, N or T tokens of a row."""

    def __init__(self, model: Any, placeholders: Mapping[str, int]) -> None:
        """`placeholders` maps `image` and `video` to the id of the placeholder token."""
        self._model = model
        self._placeholders = dict(placeholders)
        self._text_token = next(token for token in range(3) if token not in placeholders.values())
        self._rope_index = next(
            (module.get_rope_index for module in model.modules() if callable(getattr(module, "get_rope_index", None))),
            None,
        )
        self._rope_arguments = (
            set(inspect.signature(self._rope_index).parameters) if self._rope_index is not None else set()
        )
        self._forward_arguments = set(inspect.signature(model.forward).parameters)
        embedding = model.get_input_embeddings()
        if _embed_literal_ids not in embedding._forward_hooks.values():
            embedding.register_forward_hook(_embed_literal_ids)
        language_model = model.get_decoder()
        if language_model is not None and _keep_own_tokens not in language_model._forward_pre_hooks.values():
            language_model.register_forward_pre_hook(_keep_own_tokens, with_kwargs=True)

    @classmethod
    def of(cls, model: Any) -> VisionAdapter | None:
        """The adapter of a vision model; None for a text model."""
        placeholders: dict[str, int] = {}
        for kind in _TOKEN_TYPES:
            for name in (f"{kind}_token_id", f"{kind}_token_index"):
                if isinstance(token := getattr(model.config, name, None), int):
                    placeholders.setdefault(kind, token)
        takes_pixels = any(name.startswith("pixel_values") for name in inspect.signature(model.forward).parameters)
        return cls(model, placeholders) if takes_pixels and "image" in placeholders else None

    @property
    def uses_mrope(self) -> bool:
        """Whether positions are on three axes (Qwen's M-RoPE); otherwise a position is the index of the token."""
        return self._rope_index is not None

    def token_types(self, token_ids_N: np.ndarray, media: Sequence[Media]) -> np.ndarray:
        """The type [N] of each token: 0 text, 1 placeholder of an image, 2 placeholder of a video."""
        types_N = np.zeros(len(token_ids_N), dtype=np.int64)
        for item in media:
            span = slice(item.start, item.start + item.length)
            types_N[span][token_ids_N[span] == self._placeholders.get(item.kind, -1)] = _TOKEN_TYPES[item.kind]
        return types_N

    def position_ids(self, token_ids_N: np.ndarray, media: Sequence[Media]) -> np.ndarray:
        """Positions [3, N] as the model computes them; three equal axes for a model with one axis."""
        if self._rope_index is None or not media:
            return np.tile(np.arange(len(token_ids_N)), (3, 1))
        inputs: dict[str, Any] = {
            "input_ids": torch.from_numpy(token_ids_N.astype(np.int64))[None],
            "mm_token_type_ids": torch.from_numpy(self.token_types(token_ids_N, media))[None],
            **self.merge_inputs(media),
        }
        inputs = {name: value for name, value in inputs.items() if name in self._rope_arguments}
        position_3BN, _ = self._rope_index(**inputs)
        return position_3BN[-3:, 0].numpy()

    def merge_inputs(self, media: Sequence[Media]) -> dict[str, Any]:
        """The processed inputs of several images, concatenated, by the model's names, such as `pixel_values`.

        Raises TurnwiseError if their shapes cannot be concatenated.
        """
        merged: dict[str, Any] = {}
        for name in dict.fromkeys(name for item in media for name in item.inputs):
            parts = [item.inputs[name] for item in media if name in item.inputs]
            if not isinstance(parts[0], torch.Tensor):
                merged[name] = [element for part in parts for element in part]
                continue
            if len({part.shape[1:] for part in parts}) > 1:
                parts = _pad_sizes(parts) if _has_image_sizes(name, media) else _pad_tiles(name, parts)
            merged[name] = torch.cat(parts)
        return merged

    @contextmanager
    def forward_inputs(
        self, token_ids_BT: torch.Tensor, token_types_BT: torch.Tensor, media: Sequence[Media]
    ) -> Iterator[dict[str, Any]]:
        """The arguments of the model's forward for these tokens, whose images are `media` in the order of the rows.

        The model's forward must be called inside the context: there, a placeholder without an image (type 0, because the model
        sampled it as text) is embedded as an ordinary token. Otherwise, the model would look for its image.
        """
        parameter = next(self._model.parameters())
        inputs: dict[str, Any] = {}
        for name, value in self.merge_inputs(media).items():
            if name not in self._forward_arguments or not isinstance(value, torch.Tensor):
                continue  # lists (seconds between frames) are only needed for positions, which the caller passes
            value = value.to(parameter.device)
            inputs[name] = value.to(parameter.dtype) if value.is_floating_point() else value
        for name in ("mm_token_type_ids", "token_type_ids"):  # the latter is the name in Gemma
            if media and name in self._forward_arguments:
                inputs[name] = token_types_BT
                break
        placeholders = torch.tensor(list(self._placeholders.values()), device=token_ids_BT.device)
        literal_BT = torch.isin(token_ids_BT, placeholders) & (token_types_BT == 0)
        if not media or not bool(literal_BT.any()):
            yield {"input_ids": token_ids_BT, **inputs}
            return
        # the model sees a text token in place of each literal placeholder; the hook on the embedding layer restores them
        token = _literal_ids.set(token_ids_BT)
        try:
            yield {"input_ids": token_ids_BT.masked_fill(literal_BT, self._text_token), **inputs}
        finally:
            _literal_ids.reset(token)


@contextmanager
def own_tokens(place_T: torch.Tensor) -> Iterator[None]:
    """A context in which the language model computes the tokens at these places of the rows only, as one row; embeddings and
    images are those of whole rows, because a model puts images into the embeddings by the placeholders that it counts."""
    token = _own_places.set(place_T)
    try:
        yield
    finally:
        _own_places.reset(token)


def _has_image_sizes(name: str, media: Sequence[Media]) -> bool:
    """Whether each image [images, channels, height, width] has an `image_sizes` entry (Pixtral), by which the
    model ignores padding."""
    for item in media:
        if name not in item.inputs:
            continue
        pixels, sizes = item.inputs[name], item.inputs.get("image_sizes")
        if (
            pixels.ndim != 4
            or not isinstance(sizes, torch.Tensor)
            or sizes.tolist() != [list(pixels.shape[2:])] * len(pixels)
        ):
            return False
    return True


def _pad_sizes(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Images [images, channels, height, width] padded to the largest height and width with zeros at the bottom and the right,
    as the processor pads images that it processes together."""
    height, width = (max(part.shape[axis] for part in parts) for axis in (2, 3))
    return [torch.nn.functional.pad(part, (0, width - part.shape[3], 0, height - part.shape[2])) for part in parts]


def _pad_tiles(name: str, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors [1, tiles, ...] padded with blank tiles to the same number, as processors do that cut an image into tiles.

    Raises TurnwiseError if they differ in anything but the number of tiles.
    """
    if any(part.ndim < 4 for part in parts) or len({part.shape[2:] for part in parts}) > 1:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts[:4])
        raise TurnwiseError(
            f"the images of one pass have {name} of the shapes {shapes}, which cannot be concatenated. Resize the images for "
            f"this model to one size"
        )
    num_tiles = max(part.shape[1] for part in parts)
    blanks = [part.new_zeros((part.shape[0], num_tiles - part.shape[1], *part.shape[2:])) for part in parts]
    return [torch.cat(pair, dim=1) for pair in zip(parts, blanks, strict=True)]


def _embed_literal_ids(module: Any, arguments: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
    """A forward hook of the embedding layer: inside `forward_inputs`, embed the original token ids."""
    token_ids_BT = _literal_ids.get()
    if token_ids_BT is None or not arguments or arguments[0].shape != token_ids_BT.shape:
        return None
    return module.forward(token_ids_BT)


def _keep_own_tokens(
    module: Any, arguments: tuple[Any, ...], given: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A forward hook before the language model: inside `own_tokens`, leave the other tokens out. Raises TurnwiseError if the
    model gives its language model something that cannot be divided among tokens, such as a mask."""
    place_T = _own_places.get()
    if place_T is None:
        return None
    given = {name: value for name, value in given.items() if value is not None}
    kept = {name: value for name, value in given.items() if not isinstance(value, torch.Tensor | list)}
    embedding_BLD, image_BL = given.get("inputs_embeds"), given.get("visual_pos_masks")
    of_tokens = {"inputs_embeds", "position_ids", "visual_pos_masks", "deepstack_visual_embeds"}
    unknown = [repr(name) for name in given if name not in {*kept, *of_tokens} or name == "attention_mask"]
    if arguments or embedding_BLD is None or unknown:
        what = ", ".join(unknown) or "token ids in place of embeddings"
        raise TurnwiseError(
            f"cluster.mesh.context: {type(module).__name__} takes {what}, which cannot be divided among ranks with parts of "
            f"a conversation with images. Use cluster.mesh.shard instead"
        )
    kept["inputs_embeds"] = embedding_BLD.flatten(0, 1)[place_T].unsqueeze(0)
    if (position_XBL := given.get("position_ids")) is not None:  # one axis, or three or four before the rows
        kept["position_ids"] = position_XBL.flatten(-2)[..., place_T].unsqueeze(-2)
    if image_BL is not None:
        # features of images that later layers add (Qwen3-VL): a row for each placeholder, in the order of the tokens
        feature_T, own_T = image_BL.flatten().cumsum(0) - 1, image_BL.flatten()[place_T]
        kept["visual_pos_masks"] = own_T.unsqueeze(0)
        chosen = feature_T[place_T][own_T]
        kept["deepstack_visual_embeds"] = [layer_PD[chosen] for layer_PD in given.get("deepstack_visual_embeds", [])]
    return arguments, kept
