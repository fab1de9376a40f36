"""Starts waiting requests: gives each a slot in the cache, reuses the longest cached prefix, and prefills the rest.

No token is prefilled twice. A request continues the slot of its conversation, or copies the longest prefix that another slot
holds. If a request shares a longer prefix with another request of the same round, it waits for the next round. Example: 16
prompts with a common system prompt, 8 samples each. Round 1 prefills one prompt; round 2 prefills what differs in the other
15 prompts; round 3 starts the other samples by copying.

Knows the queue and the cache. Does not know how tokens are sampled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from turnwise.engines.local.forward import CachedForward
from turnwise.engines.local.prefix_cache import FREE, PrefixCache, PrefixMatch
from turnwise.engines.local.requests import PendingRequest
from turnwise.engines.local.vision import VisionForward, VisionPrompt
from turnwise.models.torch_threads import TorchThreads

__all__ = ["Scheduler", "Stats"]

MIN_COPY_TOKENS = 8
"""A prefix is copied from another slot if it saves at least this many tokens of prefill."""
MAX_PREFILL_TOKENS_PER_STEP = 8192
"""Prompt tokens that may be prefilled between two decode steps: running requests wait no longer than that."""
PREFILL_CHUNK_TOKENS = 4096
"""Tokens of one prefill pass, padding included. Longer prompts are prefilled in chunks."""


@dataclass(slots=True)
class Stats:
    """Counters since the engine was created."""

    prefilled_tokens: int = 0
    """Prompt tokens that the model was run on."""
    reused_tokens: int = 0
    """Prompt tokens that were in the slot of the conversation."""
    copied_tokens: int = 0
    """Prompt tokens that were copied from another slot."""
    sampled_tokens: int = 0
    decode_steps: int = 0
    evictions: int = 0
    """Idle conversations that lost their slot."""
    preemptions: int = 0
    """Running requests that lost their slot and were put back into the queue."""


class _Placement(Enum):
    STARTED = auto()
    DEFERRED = auto()
    """The request shares a longer prefix with a request of this round: it should wait for the next round."""
    NO_ROOM = auto()


@dataclass(frozen=True, slots=True)
class _Copy:
    """Tokens that a slot takes over from another slot: those from `start` to `stop`."""

    source: int
    target: int
    start: int
    """0, or the number of tokens that a conversation's own slot has already."""
    stop: int


@dataclass(slots=True)
class _Round:
    """Requests that start together."""

    started: list[tuple[int, PendingRequest]] = field(default_factory=list)
    """(slot, request)"""
    copies: list[_Copy] = field(default_factory=list)
    sources: dict[bytes, PrefixMatch] = field(default_factory=dict)
    """By the tokens of a prompt: the slot from which it is copied entirely. Other samples of the prompt need no search."""
    prefill_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A prompt to be prefilled up to, not including, the token with the index `end`."""

    slot: int
    end: int
    vision_prompt: VisionPrompt | None


class Scheduler:
    """The queue of waiting requests."""

    def __init__(self, cache: PrefixCache, forward: CachedForward, threads: TorchThreads, stats: Stats) -> None:
        self._cache, self._forward, self._threads, self._stats = cache, forward, threads, stats
        self.waiting: deque[PendingRequest] = deque()

    def admit(self) -> Iterator[tuple[int, PendingRequest]]:
        """Start all requests that can start now. Yields (slot, request), with the prompt prefilled but for its last token."""
        budget = MAX_PREFILL_TOKENS_PER_STEP
        while self.waiting and budget > 0:
            started = self._plan_round(budget)
            if not started.started:
                return
            self._copy_prefixes(started)
            self._prefill(started)
            budget -= max(1, started.prefill_tokens)
            yield from started.started

    def _plan_round(self, budget: int) -> _Round:
        """Give slots to waiting requests in order of arrival, until `budget` tokens are to be prefilled or no slot is left."""
        plan, deferred = _Round(), []
        # a request with the tokens of a deferred request is deferred, too: the other samples of a group need no search
        deferred_tokens: set[bytes] = set()
        while self.waiting and plan.prefill_tokens < budget:
            request = self.waiting.popleft()
            tokens = request.token_ids.tobytes()
            placement = _Placement.DEFERRED if tokens in deferred_tokens else self._place(request, tokens, plan)
            if placement is _Placement.NO_ROOM:
                self.waiting.appendleft(request)
                break
            if placement is _Placement.DEFERRED:
                deferred.append(request)
                deferred_tokens.add(tokens)
        self.waiting.extendleft(reversed(deferred))
        return plan

    def _place(self, request: PendingRequest, key: bytes, plan: _Round) -> _Placement:
        """Give the request, whose tokens are `key`, a slot, and add its copy and its prefill to the plan."""
        cache, tokens_N = self._cache, request.token_ids
        # the last token is the input of the first decode step, which gives the logits
        prefix_N = tokens_N[:-1]
        conversation = request.request.conversation
        own_slot = cache.idle_slot_of(conversation)
        own_tokens = cache.common_prefix(own_slot, prefix_N) if own_slot != FREE else 0
        enough = own_tokens + MIN_COPY_TOKENS
        if key in plan.sources:
            source, in_round = plan.sources[key], PrefixMatch()
        else:
            source, in_round = cache.longest_prefix(prefix_N, besides=own_slot, at_least=enough)
        if in_round.tokens >= max(source.tokens, own_tokens) + MIN_COPY_TOKENS:
            return _Placement.DEFERRED
        if source.tokens < enough:
            source = PrefixMatch()
        slot = self._find_slot(len(tokens_N), own_slot, source, plan)
        if slot is None and source.slot != FREE:
            # the source is pinned and may occupy the last free row: try without copying
            source = PrefixMatch()
            slot = self._find_slot(len(tokens_N), own_slot, source, plan)
        if slot is None:
            return _Placement.NO_ROOM
        cached = max(own_tokens, source.tokens)
        if request.vision_prompt is not None:
            cached = request.vision_prompt.snap_to_image_edge(cached)
        if request.cached_tokens is None:  # and not when it starts again after it was preempted
            request.cached_tokens = cached
        self._stats.reused_tokens += min(own_tokens, cached)
        self._stats.copied_tokens += max(cached - own_tokens, 0)
        self._stats.prefilled_tokens += len(tokens_N) - cached
        if source.slot not in (FREE, slot):
            plan.copies.append(_Copy(source.slot, slot, own_tokens if slot == own_slot else 0, cached))
            if source.tokens == len(prefix_N):
                plan.sources[key] = source
        cache.start_request(slot, conversation, prefix_N, cached)
        plan.prefill_tokens += len(prefix_N) - cached
        plan.started.append((slot, request))
        return _Placement.STARTED

    def _find_slot(self, capacity: int, own_slot: int, source: PrefixMatch, plan: _Round) -> int | None:
        """A slot whose row is long enough: the conversation's own, the source itself if it is released, or another."""
        pinned = {copy.source for copy in plan.copies} | {source.slot, own_slot}
        if self._cache.ensure_capacity(capacity, pinned=pinned) is None:
            return None
        if own_slot != FREE:
            return own_slot
        if source.slot != FREE and self._cache.is_released(source.slot):
            return source.slot
        return self._cache.allocate(capacity, pinned)

    def _copy_prefixes(self, plan: _Round) -> None:
        # new slots first: an own slot may be the source of a new one, and must not change before
        new = [copy for copy in plan.copies if copy.start == 0]
        own = [copy for copy in plan.copies if copy.start > 0]
        for copies in (new, own):
            if copies:
                self._copy(copies)

    def _copy(self, copies: Sequence[_Copy]) -> None:
        """Make these copies at the same time. Further tokens may be copied, too: they are equal, or overwritten later."""
        row_S = self._cache.row_S
        sources = row_S[[copy.source for copy in copies]].tolist()
        targets = row_S[[copy.target for copy in copies]].tolist()
        start, stop = min(copy.start for copy in copies), max(copy.stop for copy in copies)
        with self._threads.during("copy", len(copies) * (stop - start)):
            self._cache.kv.copy_rows(sources, targets, stop, start=start)

    def _prefill(self, plan: _Round) -> None:
        """Prefill what the rows lack: short prompts together, long ones in chunks."""
        length_S = self._cache.length_S
        prompts = [_Prefill(slot, len(request.token_ids) - 1, request.vision_prompt) for slot, request in plan.started]
        unfinished = sorted((prompt for prompt in prompts if prompt.end > length_S[prompt.slot]), key=lambda p: p.end)
        while unfinished:
            # prompts of similar length go together, so that little is padded
            unfinished.sort(key=lambda prompt: prompt.end - length_S[prompt.slot])
            self._prefill_pass(self._take_chunk(unfinished))
            unfinished = [prompt for prompt in unfinished if prompt.end > length_S[prompt.slot]]
        for prompt in prompts:
            self._cache.finish_prefill(prompt.slot, prompt.end)

    def _take_chunk(self, prompts: list[_Prefill]) -> list[_Prefill]:
        """The first prompts, in ascending order of length, that fit into one prefill pass."""
        batch: list[_Prefill] = []
        for prompt in prompts:
            longest = min(PREFILL_CHUNK_TOKENS, prompt.end - int(self._cache.length_S[prompt.slot]))
            if batch and longest * (len(batch) + 1) > PREFILL_CHUNK_TOKENS:
                break
            batch.append(prompt)
        return batch

    def _prefill_pass(self, batch: list[_Prefill]) -> None:
        """Prefill the next chunk of each prompt of the batch."""
        cache = self._cache
        slots = [prompt.slot for prompt in batch]
        vision_prompts = [prompt.vision_prompt for prompt in batch]
        starts_N = cache.length_S[slots]
        stops_N = [self._chunk_end(prompt, int(start)) for prompt, start in zip(batch, starts_N, strict=True)]
        tokens_N: list[np.ndarray] = [
            cache.tokens_SC[slot, start:stop] for slot, start, stop in zip(slots, starts_N, stops_N, strict=True)
        ]
        with self._threads.during("prefill", sum(map(len, tokens_N))):
            if isinstance(self._forward, VisionForward) and any(vision_prompts):
                self._forward.prefill_with_images(cache.kv, cache.row_S[slots], starts_N, tokens_N, vision_prompts)
            else:
                self._forward.prefill(cache.kv, cache.row_S[slots], starts_N, tokens_N)
        cache.length_S[slots] = stops_N

    def _chunk_end(self, prompt: _Prefill, start: int) -> int:
        """The end of the next chunk; an image is never divided."""
        stop = min(prompt.end, start + PREFILL_CHUNK_TOKENS)
        return stop if prompt.vision_prompt is None else prompt.vision_prompt.snap_to_image_edge(stop, start)
