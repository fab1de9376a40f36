"""Models that see, run over the slots: prompts with images in them, and the positions of what is said after them.

A slot knows tokens only, so the placeholders of an image are known to it under names of their own, made of what the image
shows: conversations share a prefix where tokens and images are the same, and nowhere else. Images are computed by the
model's own forward, whole, in the pass that computes their placeholders; no later pass needs them.
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
    """The placeholders as the model knows them."""
    keys_N: np.ndarray
    """The same with a negative number in place of each placeholder: of this image, and of the place in it."""
    media: Sequence[Media]
    position_3N: np.ndarray
    shift: int
    """What is added to the place of a token after the prompt to get its position."""

    def whole(self, stop: int, start: int = -1) -> int:
        """The last place up to `stop` that is not inside an image; the end of the image if that is not after `start`."""
        for one in self.media:
            if one.start < stop < one.start + one.length:
                return one.start if one.start > start else one.start + one.length
        return stop

    def between(self, start: int, stop: int) -> list[Media]:
        """The images from `start` to `stop`, their places as they are."""
        return [one for one in self.media if start <= one.start < stop]


class VisionForward(GenericForward):
    """The generic forward, for models whose prompts may hold images."""

    def __init__(self, model: PreTrainedModel, eyes: VisionAdapter) -> None:
        super().__init__(model)
        self._eyes = eyes
        self._known = WeakTensorKeyDictionary()
        self._tried = False

    def look(self, token_ids_N: np.ndarray, media: Sequence[Media]) -> VisionPrompt:
        """Make a prompt's images known.

        Raises EngineError if the prompt ends in an image, or places and placeholders do not fit.
        """
        keys_N, kinds_N = token_ids_N.astype(np.int32), self._eyes.kinds(token_ids_N, media)
        for one in media:
            span = np.arange(one.start, one.start + one.length)
            if one.start < 0 or one.start + one.length >= len(token_ids_N) or not kinds_N[span[0]]:
                raise EngineError(
                    f"the request has an {one.kind} at tokens {one.start} to {one.start + one.length - 1} of "
                    f"{len(token_ids_N)}; its placeholders must stand there, and a token after them"
                )
            own = span[kinds_N[span] > 0]
            keys_N[own] = self._names(one, len(own))
        position_3N = self._eyes.positions(token_ids_N, media)
        return VisionPrompt(
            token_ids_N, keys_N, tuple(media), position_3N, int(position_3N.max()) + 1 - len(token_ids_N)
        )

    def see(
        self,
        rows: KVCache,
        rows_N: np.ndarray,
        starts_N: np.ndarray,
        tokens_N: Sequence[np.ndarray],
        sights_N: Sequence[VisionPrompt | None],
    ) -> None:
        """`prefill` for rows of which some have images; the tokens of those are keys.

        Raises EngineError if the model answers differently over the slots as soon as it sees.
        """
        if not self._tried:
            self._try(next(sight for sight in sights_N if sight is not None))
            self._tried = True
        lengths_N = np.array([len(tokens) for tokens in tokens_N])
        token_NT = np.zeros((len(tokens_N), int(lengths_N.max())), dtype=np.int64)
        kinds_NT = np.zeros_like(token_NT)
        position_3NT = np.zeros((3, *token_NT.shape), dtype=np.int64)
        media: list[Media] = []
        for row, (tokens, start, sight) in enumerate(zip(tokens_N, starts_N, sights_N, strict=True)):
            stop, own = int(start) + len(tokens), slice(len(tokens))
            token_NT[row, own] = tokens
            position_3NT[:, row, own] = np.arange(start, stop)
            if sight is None:
                continue
            prompt = sight.token_ids_N[start:stop]  # behind it there may be what was sampled before the row was lost
            seen = slice(len(prompt))
            token_NT[row, seen] = prompt
            kinds_NT[row, seen] = self._eyes.kinds(sight.token_ids_N, sight.media)[start:stop]
            position_3NT[:, row, own] += sight.shift
            position_3NT[:, row, seen] = sight.position_3N[:, start:stop]
            media += sight.between(int(start), stop)
        with self._eyes.seeing(self._tensor(token_NT), self._tensor(kinds_NT), media) as given:
            self._run(rows, rows_N, starts_N, lengths_N, token_NT, given=given, position_3NT=self._axes(position_3NT))

    def decode_shifted(
        self, rows: KVCache, rows_B: np.ndarray, places_B: np.ndarray, tokens_B: np.ndarray, shifts_B: np.ndarray
    ) -> torch.Tensor:
        """`decode` where the positions are not the places, because there are images before."""
        position_3BT = np.tile((places_B + shifts_B)[:, None], (3, 1, 1))
        ones_B = np.ones_like(rows_B)
        return self._run(rows, rows_B, places_B, ones_B, tokens_B[:, None], position_3NT=position_3BT)

    def _axes(self, position_3NT: np.ndarray) -> np.ndarray | None:
        """None for a model whose positions are the places."""
        return position_3NT if self._eyes.has_axes else None

    def _names(self, one: Media, count: int) -> np.ndarray:
        """A negative number for each of an image's placeholders, made of all that the processor made of the image."""
        tensors = [value for value in one.inputs.values() if isinstance(value, torch.Tensor)]
        if (names := self._known.get(tensors[0])) is None or len(names) != count:
            content = hashlib.shake_128()
            for name, value in sorted(one.inputs.items()):
                content.update(name.encode())
                if isinstance(value, torch.Tensor):
                    content.update(value.contiguous().view(torch.uint8).numpy().tobytes())
                else:
                    content.update(repr(value).encode())
            words = np.frombuffer(content.digest(4 * count), dtype=np.uint32)
            names = self._known[tensors[0]] = -2 - (words >> 2).astype(np.int32)
        return names

    def _try(self, sight: VisionPrompt) -> None:
        """Compare the slots with the model's own pass on a prompt with images: masks of its own would show here."""
        token_1T, media = sight.token_ids_N[None].astype(np.int64), sight.media
        kinds_1T = self._eyes.kinds(sight.token_ids_N, media)[None]
        rows = KVCache(self.shapes, dtype=self._dtype, device=self._device, budget=1 << 40)
        rows.resize(1, token_1T.shape[1])
        zero, length = np.zeros(1, dtype=np.int64), np.array([token_1T.shape[1]])
        # where an image begins: a token that saw what comes after it would say so there
        keep = self._tensor(np.array([*(one.start for one in media[:8]), token_1T.shape[1] - 1]))
        with self._eyes.seeing(self._tensor(token_1T), self._tensor(kinds_1T), media) as given:
            axes = self._axes(sight.position_3N[:, None])
            slots_KV = self._run(rows, zero, zero, length, token_1T, given=given, position_3NT=axes, keep=keep)[0]
            # on its own, it works out the positions too
            lists = {name: value for name, value in self._eyes.merged(media).items() if name not in given}
            own_KV = self._model(**given, **lists, use_cache=False, logits_to_keep=keep).logits[0].float()
        gap, scale = (slots_KV - own_KV).abs().max().item(), max(1.0, own_KV.abs().max().item())
        limit = scale * (1e-3 if self._dtype == torch.float32 else 1e-1)
        if not gap <= limit:
            raise EngineError(
                f"{type(self._model).__name__} answers differently over the slots of the embedded engine once it sees an "
                f"image (its logits differ by {gap:.3g}, more than {limit:.3g}): its images do not attend as text does. "
                f"Take another model, or serve it with another engine"
            )
