"""The requests that are running now, as columns: what each of them is fed next, what it has said, and when it ends.

It knows sampled tokens and why a request stops. It refuses to know the model and where keys and values lie. Work for each
token is done on whole columns; only a request that ends, or that waits for a text, is looked at one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from turnwise.engines.local.sampler import Drawn, Options, stream, uniforms
from turnwise.engines.local.vision import VisionPrompt
from turnwise.types import Completion, LogprobKind, Request

__all__ = ["Decode", "PartialCompletion", "PendingRequest", "RunningBatch"]


@dataclass(frozen=True, slots=True)
class PartialCompletion:
    """What a request has sampled so far, as columns [N]."""

    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    raw_logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    versions: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def completion(self, finish: str) -> Completion:
        """The engine's answer."""
        return Completion(
            token_ids=self.token_ids.tolist(),
            logprobs=self.logprobs.tolist(),
            versions=self.versions.tolist(),
            finish_reason="stop" if finish == "stop" else "length",
            logprob_kind=LogprobKind.SAMPLED,
            raw_logprobs=self.raw_logprobs.tolist(),
        )


@dataclass(slots=True, kw_only=True, eq=False)
class PendingRequest:
    """A request on its way through the engine."""

    request: Request
    number: int
    """Order of arrival."""
    prompt_N: np.ndarray
    """Token ids; the placeholders of images go by names of their own (`VisionPrompt`)."""
    vision_prompt: VisionPrompt | None
    """The images in the prompt."""
    limit: int
    """Tokens that it may sample: `max_tokens`, or what the context leaves."""
    future: asyncio.Future[Completion]
    partial: PartialCompletion = field(default_factory=PartialCompletion)
    """What it had sampled when it lost its row."""

    @property
    def so_far(self) -> np.ndarray:
        """Everything up to now: the prompt, and what had been sampled."""
        if not len(self.partial.token_ids):
            return self.prompt_N
        return np.concatenate([self.prompt_N, self.partial.token_ids.astype(np.int32)])


@dataclass(frozen=True, slots=True)
class Decode:
    """The rows of one decode step in ascending order of their place in the cache; made anew only when somebody joins,
    leaves or is moved."""

    slots_B: np.ndarray
    rows_B: np.ndarray
    stops_BK: np.ndarray
    """Token ids that end the row's turn, padded with -1."""
    limits_B: np.ndarray
    options: Options
    shared: int
    """How many first tokens all rows have in common."""
    listeners: Sequence[tuple[int, int]]
    """(slot, index in the batch) of the requests that end at a text."""
    shifts_B: np.ndarray | None
    """How far positions are from places; None where all places are positions."""


class RunningBatch:
    """Columns indexed by slot."""

    def __init__(self, slots: int, decode: Callable[[Sequence[int]], str] | None, device: torch.device) -> None:
        self._decode, self._device = decode, device
        self.tickets: dict[int, PendingRequest] = {}
        """Who runs in which slot."""
        self._feed_S = np.zeros(slots, dtype=np.int64)
        self._produced_S = np.zeros(slots, dtype=np.int64)
        self._columns = [np.zeros((slots, 64), dtype) for dtype in (np.int64, np.float32, np.float32, np.int64)]
        """What was sampled: token ids, log-probabilities, raw ones, versions, as in `ParsedTurn`."""
        self._numbers_SN = np.zeros((slots, 64), dtype=np.float32)
        self.step: Decode | None = None
        """The rows of the next step; None if others run now than in the step before."""

    def join(self, slot: int, ticket: PendingRequest) -> None:
        """The request's cache holds all but its last token, which is fed next."""
        self.tickets[slot] = ticket
        done = len(ticket.partial.token_ids)
        while ticket.limit > self._numbers_SN.shape[1]:
            self._columns = [np.concatenate([column, np.zeros_like(column)], axis=1) for column in self._columns]
            self._numbers_SN = np.concatenate([self._numbers_SN, self._numbers_SN], axis=1)
        self._numbers_SN[slot, : ticket.limit] = uniforms(
            np.array([stream(ticket.request.seed)]), np.arange(ticket.limit)
        )
        said = ticket.partial
        for column, past in zip(
            self._columns, (said.token_ids, said.logprobs, said.raw_logprobs, said.versions), strict=True
        ):
            column[slot, :done] = past
        self._produced_S[slot] = done
        self._feed_S[slot] = said.token_ids[-1] if done else ticket.prompt_N[-1]
        self.step = None

    def leave(self, slot: int) -> tuple[PendingRequest, PartialCompletion]:
        """Take the request out, with what it has sampled."""
        self.step = None
        done = self._produced_S[slot]
        return self.tickets.pop(slot), PartialCompletion(*(column[slot, :done].copy() for column in self._columns))

    def arrange(self, slots: Sequence[int], rows_B: np.ndarray, shared: int) -> Decode:
        """Make a step of these slots, which are all that run, in the order of their rows."""
        tickets = [self.tickets[slot] for slot in slots]
        samplings = [ticket.request.sampling for ticket in tickets]
        shifts = [ticket.vision_prompt.shift if ticket.vision_prompt is not None else 0 for ticket in tickets]
        widest = max(len(sampling.stop_token_ids) for sampling in samplings)
        stops = [[*each.stop_token_ids, *[-1] * (widest - len(each.stop_token_ids))] for each in samplings]
        self.step = Decode(
            slots_B=np.array(slots),
            rows_B=rows_B,
            stops_BK=np.array(stops, dtype=np.int64),
            limits_B=np.array([ticket.limit for ticket in tickets]),
            options=Options.of(samplings, self._device),
            shared=shared,
            listeners=[
                (slot, index) for index, (slot, each) in enumerate(zip(slots, samplings, strict=True)) if each.stop
            ],
            shifts_B=np.array(shifts) if any(shifts) else None,
        )
        return self.step

    def feed(self, step: Decode) -> np.ndarray:
        """The tokens [B] to run the model on."""
        return self._feed_S[step.slots_B]

    def uniforms(self, step: Decode) -> np.ndarray:
        """The numbers [B] to draw the next tokens with."""
        return self._numbers_SN[step.slots_B, self._produced_S[step.slots_B]]

    def record(self, step: Decode, drawn: Drawn, version: int) -> list[tuple[int, str]]:
        """Write down what was drawn. Returns the slots that have ended, with the reason."""
        slots_B, produced_B = step.slots_B, self._produced_S[step.slots_B]
        for column, value in zip(
            self._columns, (drawn.tokens_B, drawn.logprobs_B, drawn.raw_logprobs_B, version), strict=True
        ):
            column[slots_B, produced_B] = value
        self._feed_S[slots_B] = drawn.tokens_B
        self._produced_S[slots_B] = produced_B + 1
        stopped_B = (step.stops_BK == drawn.tokens_B[:, None]).any(axis=1)
        for slot, index in step.listeners:
            stopped_B[index] |= self._heard(slot)
        ended = np.flatnonzero(stopped_B | (produced_B + 1 >= step.limits_B))
        return [(int(slots_B[index]), "stop" if stopped_B[index] else "length") for index in ended]

    def _heard(self, slot: int) -> bool:
        """Whether the newest token completes one of the request's stop texts."""
        stops = self.tickets[slot].request.sampling.stop
        # a token is at least a byte, so this many hold the longest text; some more, for characters cut at the left
        tail = max(len(text.encode()) for text in stops) + 8
        done = int(self._produced_S[slot])
        assert self._decode is not None
        text = self._decode(self._columns[0][slot, max(0, done - tail) : done].tolist())
        return any(stop in text for stop in stops)
