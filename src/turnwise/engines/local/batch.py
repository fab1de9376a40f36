"""The running requests as arrays: the last token of each, its sampled tokens, and when it stops.

Knows sampled tokens and stop conditions. Does not know the model or where keys and values lie. Work for each token is done
on entire arrays; only a request that ends, or that has stop texts, is handled individually.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from turnwise.engines.local.prefix_index import SharedPrefix
from turnwise.engines.local.requests import PartialCompletion, PendingRequest
from turnwise.engines.local.sampler import SampledTokens, SamplingTensors, random_stream, uniforms

__all__ = ["DecodeStep", "RunningBatch"]


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The batch of one decode step, in ascending order of KV rows.

    Used for all steps until a request joins, leaves or is moved to another row.
    """

    slots_B: np.ndarray
    rows_B: np.ndarray
    layout: int
    """`PrefixCache.layout` when `rows_B` was read."""
    stop_token_ids_BK: np.ndarray
    """Padded with -1."""
    max_tokens_B: np.ndarray
    sampling: SamplingTensors
    shared: SharedPrefix
    """The leading tokens that requests have in common."""
    stop_text_requests: Sequence[tuple[int, int]]
    """(slot, index in the batch) of the requests that stop at a text."""
    position_offsets_B: np.ndarray | None
    """Position of a token less its index in the sequence; None if it is 0 for all requests (no images)."""


class RunningBatch:
    """The running requests, by slot. Arrays with the suffix S are indexed by slot."""

    def __init__(self, num_slots: int, decode: Callable[[Sequence[int]], str] | None, device: torch.device) -> None:
        self._decode, self._device = decode, device
        self.requests: dict[int, PendingRequest] = {}
        """The running request of each slot."""
        self.step: DecodeStep | None = None
        """The next decode step; None if requests joined or left since the last step."""
        self._last_token_S = np.zeros(num_slots, dtype=np.int64)
        self._num_sampled_S = np.zeros(num_slots, dtype=np.int64)
        # arrays [S, N] in the order of the fields of PartialCompletion
        self._sampled = [np.zeros((num_slots, 64), dtype) for dtype in (np.int64, np.float32, np.float32, np.int64)]
        self._uniforms_SN = np.zeros((num_slots, 64), dtype=np.float32)

    def add(self, slot: int, request: PendingRequest) -> None:
        """The request runs from now on. The cache holds all its tokens but the last, which is the next input."""
        self.requests[slot] = request
        self.step = None
        while request.max_tokens > self._uniforms_SN.shape[1]:
            self._sampled = [np.concatenate([column, np.zeros_like(column)], axis=1) for column in self._sampled]
            self._uniforms_SN = np.concatenate([self._uniforms_SN, self._uniforms_SN], axis=1)
        self._uniforms_SN[slot, : request.max_tokens] = uniforms(
            np.array([random_stream(request.request.seed)]), np.arange(request.max_tokens)
        )
        partial = request.partial
        num_sampled = len(partial.token_ids)
        for column, values in zip(
            self._sampled, (partial.token_ids, partial.logprobs, partial.raw_logprobs, partial.versions), strict=True
        ):
            column[slot, :num_sampled] = values
        self._num_sampled_S[slot] = num_sampled
        self._last_token_S[slot] = partial.token_ids[-1] if num_sampled else request.prompt_N[-1]

    def remove(self, slot: int) -> tuple[PendingRequest, PartialCompletion]:
        """Take out the request of a slot, with the tokens that it has sampled."""
        self.step = None
        num_sampled = self._num_sampled_S[slot]
        partial = PartialCompletion(*(column[slot, :num_sampled].copy() for column in self._sampled))
        return self.requests.pop(slot), partial

    def make_step(self, slots: Sequence[int], rows_B: np.ndarray, *, layout: int, shared: SharedPrefix) -> DecodeStep:
        """The next decode step: `slots` are all running slots, in the order of their KV rows."""
        requests = [self.requests[slot] for slot in slots]
        samplings = [request.request.sampling for request in requests]
        offsets = [request.vision_prompt.position_offset if request.vision_prompt else 0 for request in requests]
        width = max(len(sampling.stop_token_ids) for sampling in samplings)
        stop_token_ids = [
            [*sampling.stop_token_ids, *[-1] * (width - len(sampling.stop_token_ids))] for sampling in samplings
        ]
        self.step = DecodeStep(
            slots_B=np.array(slots),
            rows_B=rows_B,
            layout=layout,
            stop_token_ids_BK=np.array(stop_token_ids, dtype=np.int64),
            max_tokens_B=np.array([request.max_tokens for request in requests]),
            sampling=SamplingTensors.of(samplings, self._device),
            shared=shared,
            stop_text_requests=[
                (slot, index) for index, (slot, each) in enumerate(zip(slots, samplings, strict=True)) if each.stop
            ],
            position_offsets_B=np.array(offsets) if any(offsets) else None,
        )
        return self.step

    def input_tokens(self, step: DecodeStep) -> np.ndarray:
        """The last token [B] of each request: the input of the step."""
        return self._last_token_S[step.slots_B]

    def uniforms(self, step: DecodeStep) -> np.ndarray:
        """The uniform random numbers [B] to sample the next tokens with."""
        return self._uniforms_SN[step.slots_B, self._num_sampled_S[step.slots_B]]

    def append(self, step: DecodeStep, sampled: SampledTokens, version: int) -> list[tuple[int, str]]:
        """Append one sampled token to each request. Returns (slot, finish reason) of the requests that end with it."""
        slots_B, num_sampled_B = step.slots_B, self._num_sampled_S[step.slots_B]
        for column, values in zip(
            self._sampled, (sampled.tokens_B, sampled.logprobs_B, sampled.raw_logprobs_B, version), strict=True
        ):
            column[slots_B, num_sampled_B] = values
        self._last_token_S[slots_B] = sampled.tokens_B
        self._num_sampled_S[slots_B] = num_sampled_B + 1
        stopped_B = (step.stop_token_ids_BK == sampled.tokens_B[:, None]).any(axis=1)
        for slot, index in step.stop_text_requests:
            stopped_B[index] |= self._ends_with_stop_text(slot)
        finished = np.flatnonzero(stopped_B | (num_sampled_B + 1 >= step.max_tokens_B))
        return [(int(slots_B[index]), "stop" if stopped_B[index] else "length") for index in finished]

    def _ends_with_stop_text(self, slot: int) -> bool:
        """Whether the newest token completes one of the request's stop texts."""
        stop_texts = self.requests[slot].request.sampling.stop
        # a token is at least one byte, so this many tokens cover the longest text; 8 more, because decoding may begin inside
        # a character
        tail = max(len(text.encode()) for text in stop_texts) + 8
        num_sampled = int(self._num_sampled_S[slot])
        assert self._decode is not None
        text = self._decode(self._sampled[0][slot, max(0, num_sampled - tail) : num_sampled].tolist())
        return any(stop_text in text for stop_text in stop_texts)
