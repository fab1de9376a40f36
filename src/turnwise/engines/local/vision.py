"""The forward pass for models with images: prompts that hold images, and the positions of the tokens after them.

The prefix cache compares tokens only. So each placeholder of an image is replaced by a negative key, computed from the
contents of the image: two conversations share a prefix only where both tokens and images are the same. The model's own
forward computes an entire image in the pass that prefills its placeholders; no later pass needs the image.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel

from turnwise.engines.local.generic import GenericForward
from turnwise.engines.local.kv_cache import KVCache
from turnwise.errors import EngineError
from turnwise.models.vision import VisionAdapter
from turnwise.types import Media

__all__ = ["VisionForward", "VisionPrompt"]


@dataclass(frozen=True, slots=True)
class VisionPrompt:
    """A prompt with images."""

    token_ids_N: np.ndarray
    """Token ids as the model knows them."""
    keys_N: np.ndarray
    """The same, with a negative key in place of each placeholder: a function of the image and of the index in the image."""
    media: Sequence[Media]
    position_3N: np.ndarray
    position_offset: int
    """Position of a token after the prompt, less its index in the sequence."""

    def snap_to_image_edge(self, stop: int, start: int = -1) -> int:
        """The last index up to `stop` that is not inside an image; the end of the image if that is not after `start`."""
        for image in self.media:
            if image.start < stop < image.start + image.length:
                return image.start if image.start > start else image.start + image.length
        return stop

    def media_between(self, start: int, stop: int) -> list[Media]:
        """The images that begin from index `start` to before `stop`."""
        return [image for image in self.media if start <= image.start < stop]


class VisionForward(GenericForward):
    """The generic forward, for models whose prompts may hold images."""

    def __init__(self, model: PreTrainedModel, *, autocast: bool = False) -> None:
        super().__init__(model, autocast=autocast)
        adapter = VisionAdapter.of(self._model)
        assert adapter is not None, "the model has no images"
        self._adapter = adapter
        self._image_keys = WeakTensorKeyDictionary()
        self._verified = False

    def make_prompt(self, token_ids_N: np.ndarray, media: Sequence[Media]) -> VisionPrompt:
        """Compute keys and positions of a prompt with images.

        Raises EngineError if the prompt ends with an image, or an image is not where its placeholders are.
        """
        keys_N, token_types_N = token_ids_N.astype(np.int32), self._adapter.token_types(token_ids_N, media)
        for image in media:
            span = np.arange(image.start, image.start + image.length)
            if image.start < 0 or image.start + image.length >= len(token_ids_N) or not token_types_N[span[0]]:
                raise EngineError(
                    f"the request has an {image.kind} at tokens {image.start} to {image.start + image.length - 1} of "
                    f"{len(token_ids_N)}; its placeholders must be there, followed by at least one more token"
                )
            placeholders = span[token_types_N[span] > 0]
            keys_N[placeholders] = self._keys_of(image, len(placeholders))
        position_3N = self._adapter.position_ids(token_ids_N, media)
        return VisionPrompt(
            token_ids_N, keys_N, tuple(media), position_3N, int(position_3N.max()) + 1 - len(token_ids_N)
        )

    def prefill_with_images(
        self,
        kv: KVCache,
        rows_N: np.ndarray,
        starts_N: np.ndarray,
        tokens_N: Sequence[np.ndarray],
        prompts_N: Sequence[VisionPrompt | None],
    ) -> None:
        """`prefill` for sequences of which some have images; the tokens of those are keys.

        Raises EngineError if, with images, the model computes other logits over the cache than in a single pass.
        """
        if not self._verified:
            self._verify(next(prompt for prompt in prompts_N if prompt is not None))
            self._verified = True
        lengths_N = np.array([len(tokens) for tokens in tokens_N])
        token_NT = np.zeros((len(tokens_N), int(lengths_N.max())), dtype=np.int64)
        token_types_NT = np.zeros_like(token_NT)
        position_3NT = np.zeros((3, *token_NT.shape), dtype=np.int64)
        media: list[Media] = []
        for row, (tokens, start, prompt) in enumerate(zip(tokens_N, starts_N, prompts_N, strict=True)):
            stop, new = int(start) + len(tokens), slice(len(tokens))
            token_NT[row, new] = tokens
            position_3NT[:, row, new] = np.arange(start, stop)
            if prompt is None:
                continue
            # after the prompt, there may be tokens that were sampled before the request was preempted
            prompt_ids = prompt.token_ids_N[start:stop]
            in_prompt = slice(len(prompt_ids))
            token_NT[row, in_prompt] = prompt_ids
            token_types_NT[row, in_prompt] = self._adapter.token_types(prompt.token_ids_N, prompt.media)[start:stop]
            position_3NT[:, row, new] += prompt.position_offset
            position_3NT[:, row, in_prompt] = prompt.position_3N[:, start:stop]
            media += prompt.media_between(int(start), stop)
        with self._adapter.forward_inputs(self._tensor(token_NT), self._tensor(token_types_NT), media) as model_inputs:
            axes = self._axes(position_3NT)
            self._run(kv, rows_N, starts_N, lengths_N, token_NT, model_inputs=model_inputs, position_3NT=axes)

    def decode_after_images(
        self, kv: KVCache, rows_B: np.ndarray, index_B: np.ndarray, tokens_B: np.ndarray, offsets_B: np.ndarray
    ) -> torch.Tensor:
        """`decode` for requests with images before: positions are the index in the sequence plus `offsets_B`."""
        position_3BT = np.tile((index_B + offsets_B)[:, None], (3, 1, 1))
        ones_B = np.ones_like(rows_B)
        return self._run(kv, rows_B, index_B, ones_B, tokens_B[:, None], position_3NT=position_3BT)

    def _axes(self, position_3NT: np.ndarray) -> np.ndarray | None:
        """None for a model whose position is the index in the sequence."""
        return position_3NT if self._adapter.uses_mrope else None

    def _keys_of(self, image: Media, count: int) -> np.ndarray:
        """A negative key for each of the image's placeholders: a hash of all outputs of the processor for the image."""
        tensors = [value for value in image.inputs.values() if isinstance(value, torch.Tensor)]
        if (keys := self._image_keys.get(tensors[0])) is None or len(keys) != count:
            content = hashlib.shake_128()
            for name, value in sorted(image.inputs.items()):
                content.update(name.encode())
                if isinstance(value, torch.Tensor):
                    content.update(value.contiguous().view(torch.uint8).numpy().tobytes())
                else:
                    content.update(repr(value).encode())
            words = np.frombuffer(content.digest(4 * count), dtype=np.uint32)
            keys = self._image_keys[tensors[0]] = -2 - (words >> 2).astype(np.int32)
        return keys

    def _verify(self, prompt: VisionPrompt) -> None:
        """Compare logits over the cache with the model's own pass, on a prompt with images.

        They differ if the model uses another mask for images, for example bidirectional attention.
        """
        token_1T, media = prompt.token_ids_N[None].astype(np.int64), prompt.media
        token_types_1T = self._adapter.token_types(prompt.token_ids_N, media)[None]
        kv = KVCache(self.kv_shapes, dtype=self._dtype, device=self._device, budget_bytes=1 << 40)
        kv.resize(1, token_1T.shape[1])
        zero, length = np.zeros(1, dtype=np.int64), np.array([token_1T.shape[1]])
        # the first token of an image: its logits show whether it attends to the tokens after it
        keep = self._tensor(np.array([*(image.start for image in media[:8]), token_1T.shape[1] - 1]))
        with self._adapter.forward_inputs(self._tensor(token_1T), self._tensor(token_types_1T), media) as model_inputs:
            cache_KV = self._run(
                kv,
                zero,
                zero,
                length,
                token_1T,
                model_inputs=model_inputs,
                position_3NT=self._axes(prompt.position_3N[:, None]),
                logits_to_keep=keep,
            )[0]
            # in a pass of its own, the model computes the positions too, and may need further inputs for that
            others = {
                name: value for name, value in self._adapter.merge_inputs(media).items() if name not in model_inputs
            }
            own_KV = self._model(**model_inputs, **others, use_cache=False, logits_to_keep=keep).logits[0].float()
        difference, scale = (cache_KV - own_KV).abs().max().item(), max(1.0, own_KV.abs().max().item())
        limit = scale * (1e-3 if self._dtype == torch.float32 else 1e-1)
        if not difference <= limit:  # also if the difference is NaN
            raise EngineError(
                f"{type(self._model).__name__} computes other logits over the cache of the embedded engine when the prompt "
                f"holds an image (they differ by {difference:.3g}, more than {limit:.3g}): its images do not attend as text "
                f"does. Use another model, or serve this model with another engine"
            )
