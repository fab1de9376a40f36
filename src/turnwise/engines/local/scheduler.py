"""Continuous batching: a step starts waiting requests, prefills them, and samples one token for each running request.

No token is prefilled twice, unless the state of a recurrent layer was lost. A request continues the slot of its conversation, or
copies the longest prefix that another slot holds. If a request shares a longer prefix with another request of the same round, it
waits for the next round. Example: 16 prompts with a common system prompt, 8 samples each. Round 1 prefills one prompt; round 2
prefills what differs in the other 15 prompts; round 3 starts the other samples by copying.

Running requests are arrays. Work for each token is done on entire arrays; only a request that ends, or that has stop texts, is
handled individually. Sampling takes one number of a counter-based random stream for each token, and the inverse of the
distribution. Invariant: the random number of a token depends only on (seed, index of the token in the completion), so a request
samples the same tokens whatever else is in the batch.

Knows requests, limits, the queue and the order of work in a step. Does not know the event loop (`engine`), which row a sequence
lies in (`cache`), or the model (`forward`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count

import numpy as np
import torch

from turnwise.engines.local.cache import FREE, PrefixCache, PrefixMatch, SharedPrefix
from turnwise.engines.local.forward import CachedForward, VisionForward, VisionPrompt
from turnwise.engines.local.linears import ModelRows
from turnwise.errors import EngineError, GrammarError
from turnwise.models.cpu import TorchThreads
from turnwise.models.distribution import AllowedTokens, cumulative, sampling_logits
from turnwise.models.grammar import Matcher
from turnwise.types import Completion, LogprobKind, Request, Routes, Sampling

# Requests: what was asked for, what has been sampled so far, and whether it can be served


@dataclass(frozen=True, slots=True)
class PartialCompletion:
    """The tokens that a request has sampled so far, as columns [N]."""

    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    raw_logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    versions: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def completion(
        self, finish_reason: str, *, prompt_tokens: int, cached_tokens: int, routes: Routes | None
    ) -> Completion:
        """The finished completion of a prompt with `prompt_tokens` tokens, of which `cached_tokens` were in the cache."""
        return Completion(
            token_ids=self.token_ids.tolist(),
            logprobs=self.logprobs.tolist(),
            versions=self.versions.tolist(),
            finish_reason="stop" if finish_reason == "stop" else "length",
            logprob_kind=LogprobKind.SAMPLED,
            raw_logprobs=self.raw_logprobs.tolist(),
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            routes=routes,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class PendingRequest:
    """A request from the call of `generate` until its future is resolved: waiting or running."""

    request: Request
    prompt_N: np.ndarray
    """Token ids; placeholders of images are replaced by the negative keys of `VisionPrompt`."""
    vision_prompt: VisionPrompt | None
    """The images in the prompt."""
    max_tokens: int
    """Tokens that may be sampled: `Sampling.max_tokens`, or the rest of the context if that is less."""
    future: asyncio.Future[Completion]
    model: int = 0
    """The number of the model that samples; models with the same base weights are in one batch."""
    matcher: Matcher | None = None
    """Where the turn is in its grammar, after all tokens sampled so far; None without a constraint."""
    partial: PartialCompletion = field(default_factory=PartialCompletion)
    """Tokens sampled before the request was preempted."""
    routes: Routes | None = None
    """The experts of the first tokens: those of the request, or longer ones after it was preempted."""
    cached_tokens: int | None = None
    """Tokens of the prompt that were in the cache when the request started; None before the start."""
    arrival: int = field(default_factory=count().__next__)
    """Order of arrival."""

    @property
    def token_ids(self) -> np.ndarray:
        """The prompt, and the tokens sampled before the request was preempted."""
        if not len(self.partial.token_ids):
            return self.prompt_N
        return np.concatenate([self.prompt_N, self.partial.token_ids.astype(np.int32)])


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The requests that an engine can serve."""

    context: int
    """The largest number of tokens in a conversation."""
    vocab_size: int
    cache_tokens: int
    """Tokens that fit into the memory budget of the KV cache."""
    token_bytes: int
    """Bytes that a token takes in the KV cache."""
    row_bytes: int
    """Bytes that a conversation takes besides: the states of recurrent layers."""
    can_decode: bool
    """Whether the engine can turn token ids into text, which stop texts need."""

    def max_tokens(self, prompt_N: np.ndarray, sampling: Sampling) -> int:
        """The number of tokens that may be sampled after the prompt. Raises EngineError if this request can never be served."""
        self._check_prompt(prompt_N)
        length = len(prompt_N)
        if sampling.max_tokens < 1 or sampling.temperature < 0:
            raise EngineError(
                f"max_tokens is {sampling.max_tokens} and temperature {sampling.temperature}: max_tokens must be at least 1, "
                "and temperature must not be negative (0 is greedy)"
            )
        if length >= self.context:
            raise EngineError(
                f"the prompt has {length} tokens and the context {self.context}: no token can be sampled after it. "
                "Shorten the conversation (limits.context), or raise the engine's context"
            )
        if sampling.stop and not self.can_decode:
            raise EngineError(
                f"the request stops at the texts {list(sampling.stop)}, and this engine cannot turn tokens into text: create "
                "it with LocalEngine(..., decode=tokenizer.decode), or use stop_token_ids"
            )
        max_tokens = min(sampling.max_tokens, self.context - length)
        needed = length + max_tokens
        if needed > self.cache_tokens:
            gigabytes = (needed * self.token_bytes + self.row_bytes) / 2**30
            raise EngineError(
                f"the prompt has {length} tokens and may be continued by {max_tokens}, but the cache has room for "
                f"{self.cache_tokens} at most. Give it more memory (engine.memory_gb={gigabytes:.3g} or more), or ask for fewer "
                "tokens"
            )
        return max_tokens

    def _check_prompt(self, prompt_N: np.ndarray) -> None:
        if len(prompt_N) == 0:
            raise EngineError(
                "the prompt is empty: it must have at least one token, such as the token that begins a text"
            )
        if prompt_N.min() < 0 or prompt_N.max() >= self.vocab_size:
            raise EngineError(
                f"the prompt contains token ids from {prompt_N.min()} to {prompt_N.max()}; the model has 0 to "
                f"{self.vocab_size - 1}. The tokenizer must be the model's own"
            )


# Start: slots, reuse of prefixes, prefill

MIN_COPY_TOKENS = 8
"""A prefix is copied from another slot if it saves at least this many tokens of prefill."""
MAX_PREFILL_TOKENS_PER_STEP = 8192
"""Prompt tokens that may be prefilled between two decode steps: running requests wait no longer than that."""
PREFILL_CHUNK_TOKENS = 4096
"""Tokens of one prefill pass, padding included. Longer prompts are prefilled in chunks."""
WORTH_WAITING = 0.125
"""The part of a decode step's work that waiting requests may miss before they start: a prefill of one short prompt takes as long
as a decode step, and hardly less than a prefill of several."""
LONGEST_WAIT = 4
"""Decode steps that a request waits at most for others to start with it."""


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
    states: list[tuple[int, PrefixMatch]] = field(default_factory=list)
    """(slot, which state it begins with) of the slots that do not go on from their current one."""
    sources: dict[bytes, PrefixMatch] = field(default_factory=dict)
    """By the tokens of a prompt: the slot from which it is copied entirely. Other samples of the prompt need no search."""
    prefill_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A prompt to be prefilled up to, not including, the token with the index `end`."""

    slot: int
    end: int
    vision_prompt: VisionPrompt | None
    routes: Routes | None
    """The experts that are known of its first tokens."""


class Scheduler:
    """The queue of waiting requests."""

    def __init__(self, cache: PrefixCache, forward: CachedForward, threads: TorchThreads, stats: Stats) -> None:
        self._cache, self._forward, self._threads, self._stats = cache, forward, threads, stats
        self.waiting: deque[PendingRequest] = deque()
        self._steps_missed: list[float] = []
        """Of each decode step since a request waits: the waiting requests, as a part of the running ones."""

    def admit(self, running: int) -> Iterator[tuple[int, PendingRequest]]:
        """Start requests while `running` others run. Yields (slot, request), with the prompt prefilled but for its last token.

        Requests that arrive one by one start together: many others would wait for a prefill of each of them.
        """
        if self._await_others(running):
            return
        self._steps_missed.clear()
        budget = MAX_PREFILL_TOKENS_PER_STEP
        while self.waiting and budget > 0:
            started = self._plan_round(budget)
            if not started.started:
                return
            self._copy_prefixes(started)
            self._prefill(started)
            budget -= max(1, started.prefill_tokens)
            yield from started.started

    def _await_others(self, running: int) -> bool:
        """Whether the waiting requests, which are few beside those that run, let another decode step pass."""
        if not (self.waiting and running):
            return False
        self._steps_missed.append(len(self.waiting) / running)
        return len(self._steps_missed) <= LONGEST_WAIT and sum(self._steps_missed) < WORTH_WAITING

    def _plan_round(self, budget: int) -> _Round:
        """Give slots to waiting requests in order of arrival, until `budget` tokens are to be prefilled or no slot is left."""
        plan, deferred = _Round(), []
        # a request with the tokens of a deferred request is deferred, too: the other samples of a group need no search
        deferred_tokens: set[bytes] = set()
        while self.waiting and plan.prefill_tokens < budget:
            request = self.waiting.popleft()
            tokens = request.token_ids.tobytes() + (b"" if request.routes is None else request.routes.data)
            tokens += bytes([request.model])
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
        own = cache.own_prefix(own_slot, prefix_N, request.model) if own_slot != FREE else PrefixMatch()
        own = cache.computed_with(own, request.routes)
        own_tokens = own.tokens
        enough = own_tokens + MIN_COPY_TOKENS
        if key in plan.sources:
            source, in_round = plan.sources[key], PrefixMatch()
        else:
            source, in_round = cache.longest_prefix(prefix_N, request.model, besides=own_slot, at_least=enough)
            source = cache.computed_with(source, request.routes)
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
        if request.vision_prompt is not None and not cache.kv.states:  # a state is never inside an image
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
        begins_with = source if source.slot != FREE else own
        if cached == 0 or begins_with.slot != slot or begins_with.state != 0:
            plan.states.append((slot, begins_with if cached else PrefixMatch()))
        cache.start_request(slot, conversation, prefix_N, cached, request.model)
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
        if self._cache.kv.states:
            self._begin_states(plan.states)

    def _begin_states(self, states: Sequence[tuple[int, PrefixMatch]]) -> None:
        """Give rows the recurrent states that their sequences begin with."""
        cache = self._cache
        if others := [(slot, state) for slot, state in states if state.slot != FREE]:
            rows = [(state.state, int(cache.row_S[state.slot]), int(cache.row_S[slot])) for slot, state in others]
            cache.kv.load_states(*zip(*rows, strict=True))
        # after that: a slot that begins anew may be the source of another
        if new := [slot for slot, state in states if state.slot == FREE]:
            cache.kv.clear_states(cache.row_S[new].tolist())

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
        prompts = [
            _Prefill(slot, len(request.token_ids) - 1, request.vision_prompt, request.routes)
            for slot, request in plan.started
        ]
        unfinished = sorted((prompt for prompt in prompts if prompt.end > length_S[prompt.slot]), key=lambda p: p.end)
        while unfinished:
            # prompts of similar length go together, so that little is padded
            unfinished.sort(key=lambda prompt: prompt.end - length_S[prompt.slot])
            self._prefill_pass(self._take_chunk(unfinished))
            unfinished = [prompt for prompt in unfinished if prompt.end > length_S[prompt.slot]]
        for prompt in prompts:
            self._cache.finish_prefill(prompt.slot, prompt.end)
        if self._cache.kv.states:
            self._cache.save_states([prompt.slot for prompt in prompts])

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
        for prompt, start, stop in zip(batch, starts_N, stops_N, strict=True):
            cache.kv.prescribe(int(cache.row_S[prompt.slot]), int(start), stop, prompt.routes)
        with self._threads.during("prefill", sum(map(len, tokens_N))):
            if isinstance(self._forward, VisionForward) and any(vision_prompts):
                self._forward.prefill_with_images(cache.kv, cache.row_S[slots], starts_N, tokens_N, vision_prompts)
            else:
                models_N = cache.model_S[slots]
                self._forward.prefill(cache.kv, cache.row_S[slots], starts_N, tokens_N, models_N)
        cache.length_S[slots] = stops_N

    def _chunk_end(self, prompt: _Prefill, start: int) -> int:
        """The end of the next chunk; an image is never divided."""
        stop = min(prompt.end, start + PREFILL_CHUNK_TOKENS)
        return stop if prompt.vision_prompt is None else prompt.vision_prompt.snap_to_image_edge(stop, start)


# Sampling

_STEP = np.uint64(0x9E3779B97F4A7C15)
_WORD = (1 << 64) - 1


def _splitmix64(state: np.ndarray) -> np.ndarray:
    """The output function of splitmix64 (Steele et al., 2014) on uint64; the multiplications overflow on purpose."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def random_stream(seed: int) -> np.uint64:
    """The start of the random stream of `seed`; hashed, so that neighbouring seeds are unrelated."""
    return _splitmix64(np.array([seed & _WORD], dtype=np.uint64) ^ _STEP)[0]


def uniforms(streams_B: np.ndarray, indices_B: np.ndarray) -> np.ndarray:
    """The `indices_B`-th numbers of `streams_B`: float32 in [0, 1)."""
    words_B = _splitmix64(streams_B + (indices_B.astype(np.uint64) + np.uint64(1)) * _STEP)
    return (words_B >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """The sampling options of a batch, as tensors [B]."""

    unfiltered: bool
    """Whether every request samples from softmax(logits): temperature 1 and no filter."""
    greedy_B: torch.Tensor | None
    """Which requests take the most probable token; None if none does."""
    temperature_B: torch.Tensor
    """1 for greedy requests, whose sampled token is not used."""
    top_k_B: torch.Tensor
    top_p_B: torch.Tensor
    min_p_B: torch.Tensor

    @classmethod
    def of(cls, samplings: Sequence[Sampling], device: torch.device) -> SamplingTensors:
        """Collect the options of a batch."""
        greedy = [sampling.temperature == 0 for sampling in samplings]
        return cls(
            unfiltered=all(sampling.temperature == 1 and not sampling.filtered for sampling in samplings),
            greedy_B=torch.tensor(greedy, device=device) if any(greedy) else None,
            temperature_B=torch.tensor([sampling.temperature or 1.0 for sampling in samplings], device=device),
            top_k_B=torch.tensor([sampling.top_k for sampling in samplings], device=device),
            top_p_B=torch.tensor([sampling.top_p for sampling in samplings], device=device),
            min_p_B=torch.tensor([sampling.min_p for sampling in samplings], device=device),
        )


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token for each request."""

    tokens_B: np.ndarray
    logprobs_B: np.ndarray
    """Under the distribution that was sampled from; 0 for greedy requests."""
    raw_logprobs_B: np.ndarray
    """Under softmax(logits)."""

    @property
    def overflowed(self) -> np.ndarray:
        """Indices of the requests whose logits were not finite."""
        return np.flatnonzero(np.isnan(self.raw_logprobs_B))


def sample_tokens(
    logits_BV: torch.Tensor, options: SamplingTensors, uniforms_B: np.ndarray, allowed: AllowedTokens | None = None
) -> SampledTokens:
    """Sample one token for each row of float32 logits [B, V], with one uniform random number each. `allowed`: what grammars let
    pass.

    The log-probabilities of a row whose logits are not finite are NaN; its token means nothing.
    """
    # one value that is NaN or infinite makes the sum over the row, and so the row, NaN
    raw_BV = logits_BV.log_softmax(dim=-1)
    if options.unfiltered and allowed is None:
        tokens_B1 = _inverse_cdf(raw_BV.exp(), uniforms_B)
        raw_B1 = raw_BV.gather(1, tokens_B1)
        return _sampled(tokens_B1, raw_B1, raw_B1)
    filtered_BV = sampling_logits(
        logits_BV,
        temperature_N=options.temperature_B,
        top_k_N=options.top_k_B,
        top_p_N=options.top_p_B,
        min_p_N=options.min_p_B,
        allowed=allowed,
    )
    logprobs_BV = filtered_BV.log_softmax(dim=-1)
    tokens_B1 = _inverse_cdf(logprobs_BV.exp(), uniforms_B)
    logprobs_B1 = logprobs_BV.gather(1, tokens_B1)
    if options.greedy_B is not None:
        greedy_B1 = options.greedy_B.unsqueeze(1)
        # a filter keeps the most probable token, and a grammar may not
        tokens_B1 = torch.where(greedy_B1, filtered_BV.argmax(dim=-1, keepdim=True), tokens_B1)
        logprobs_B1 = logprobs_B1.masked_fill(greedy_B1, 0.0)
    raw_B1 = raw_BV.gather(1, tokens_B1)
    return _sampled(tokens_B1, torch.where(raw_B1.isnan(), raw_B1, logprobs_B1), raw_B1)


def _sampled(tokens_B1: torch.Tensor, logprobs_B1: torch.Tensor, raw_B1: torch.Tensor) -> SampledTokens:
    """Columns on the host, by one copy: the host waits for the device once in a step."""
    # float64 holds token ids and float32 numbers exactly
    columns_B3 = torch.cat([tokens_B1.double(), logprobs_B1.double(), raw_B1.double()], dim=1).cpu().numpy()
    logprobs_B2 = columns_B3[:, 1:].astype(np.float32)
    return SampledTokens(columns_B3[:, 0].astype(np.int64), logprobs_B2[:, 0], logprobs_B2[:, 1])


def _inverse_cdf(probs_BV: torch.Tensor, uniforms_B: np.ndarray) -> torch.Tensor:
    """The first token [B, 1] at which the cumulative probability exceeds the uniform number."""
    cumulative_BV = cumulative(probs_BV)
    # scale the uniform number to the actual sum, which is only about 1 after rounding, and stay just below the sum: at the
    # sum, searchsorted would return V, or a token of probability 0
    below_total_B1 = cumulative_BV[:, -1:] * (1.0 - 2.0**-23)
    target_B1 = torch.from_numpy(uniforms_B).to(probs_BV.device).unsqueeze(1) * below_total_B1
    # nothing exceeds a number that is NaN: the row's token means nothing then, and must all the same be one
    return torch.searchsorted(cumulative_BV, target_B1, right=True).clamp_(max=probs_BV.shape[1] - 1)


# Running requests as arrays


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The batch of one decode step, in ascending order of KV rows.

    Used for all steps until a request joins, leaves or is moved to another row.
    """

    slots_B: np.ndarray
    rows_B: np.ndarray
    models: ModelRows | None
    """The models of the requests; None if there is one model."""
    versions_B: np.ndarray
    """The versions of the weights that sample."""
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
    constrained: Sequence[tuple[int, int]]
    """(slot, index in the batch) of the requests that a grammar constrains."""
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

    def make_step(
        self,
        slots: Sequence[int],
        rows_B: np.ndarray,
        *,
        models: ModelRows | None,
        versions_B: np.ndarray,
        layout: int,
        shared: SharedPrefix,
    ) -> DecodeStep:
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
            models=models,
            versions_B=versions_B,
            layout=layout,
            stop_token_ids_BK=np.array(stop_token_ids, dtype=np.int64),
            max_tokens_B=np.array([request.max_tokens for request in requests]),
            sampling=SamplingTensors.of(samplings, self._device),
            shared=shared,
            stop_text_requests=[
                (slot, index) for index, (slot, each) in enumerate(zip(slots, samplings, strict=True)) if each.stop
            ],
            constrained=[
                (slot, index)
                for index, (slot, each) in enumerate(zip(slots, requests, strict=True))
                if each.matcher is not None
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

    def allowed(self, step: DecodeStep) -> tuple[AllowedTokens | None, dict[int, GrammarError]]:
        """What grammars allow as the next tokens; None if no request is constrained. And the slots whose grammar cannot go on."""
        if not step.constrained:
            return None, {}
        index_B, masks, failed = np.full(len(step.slots_B), -1), list[np.ndarray](), dict[int, GrammarError]()
        for slot, index in step.constrained:
            matcher = self.requests[slot].matcher
            assert matcher is not None
            try:
                mask = matcher.allowed()
            except GrammarError as error:
                failed[slot] = error
                continue
            index_B[index] = len(masks)
            masks.append(mask)
        words_MW = torch.from_numpy(np.stack(masks).view(np.int32)) if masks else torch.zeros((1, 0), dtype=torch.int32)
        return AllowedTokens(words_MW.to(self._device), torch.from_numpy(index_B).to(self._device)), failed

    def append(self, step: DecodeStep, sampled: SampledTokens) -> list[tuple[int, str]]:
        """Append one sampled token to each request. Returns (slot, finish reason) of the requests that end with it."""
        slots_B, num_sampled_B = step.slots_B, self._num_sampled_S[step.slots_B]
        for column, values in zip(
            self._sampled, (sampled.tokens_B, sampled.logprobs_B, sampled.raw_logprobs_B, step.versions_B), strict=True
        ):
            column[slots_B, num_sampled_B] = values
        self._last_token_S[slots_B] = sampled.tokens_B
        self._num_sampled_S[slots_B] = num_sampled_B + 1
        for slot, index in step.constrained:
            matcher = self.requests[slot].matcher
            assert matcher is not None
            if index not in sampled.overflowed:
                matcher.advance(int(sampled.tokens_B[index]))
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


# One step of the engine

COMPACT_AFTER = 16
"""Moving a row costs as much as reading this number of rows in vain (measured; more with a long common prefix)."""


class EngineCore:
    """Waiting and running requests, the cache, and the models, which share one forward pass."""

    def __init__(
        self,
        forward: CachedForward,
        cache: PrefixCache,
        batch: RunningBatch,
        *,
        threads: TorchThreads,
        version: int,
        explain: Callable[[np.ndarray, PendingRequest], str],
    ) -> None:
        """`explain` says why the logits after these tokens of a request are not finite."""
        self.forward, self.cache, self.batch, self.threads = forward, cache, batch, threads
        self.explain = explain
        self.stats = Stats()
        self.scheduler = Scheduler(cache, forward, threads, self.stats)
        self.versions = [version]
        """The version of the weights of each model."""
        self._weights_changed = False
        self._unused_reads = 0
        """Rows that attention has read in vain since rows were moved together."""

    def add(self, request: PendingRequest) -> None:
        """Put the request into the queue."""
        self.scheduler.waiting.append(request)

    def abort(self, request: PendingRequest) -> None:
        """Remove the request, waiting or running; nothing happens if it has finished."""
        if request in self.scheduler.waiting:
            self.scheduler.waiting.remove(request)
        for slot, running in self.batch.requests.items():
            if running is request:
                self.batch.remove(slot)
                self.cache.finish_request(slot)
                return

    def reset(self) -> None:
        """Remove all requests and clear the cache."""
        self.scheduler.waiting.clear()
        for slot in list(self.batch.requests):
            self.batch.remove(slot)
        self.cache.clear()

    def use_weights(self, version: int, model: int = 0) -> None:
        """The weights of a model have changed: nothing that was computed with them before is reused by a later request."""
        self.versions[model] = version
        self._weights_changed = (
            True  # read when they are used: the weights of several models change one after the other
        )
        self.cache.invalidate(model)
        self.batch.step = None
        self._unused_reads = 0

    def read_weights(self) -> None:
        """Read the parameters of the models, which may have been replaced by other tensors, and the changed weights."""
        self.forward.reload_parameters(changed=self._weights_changed)
        self._weights_changed = False

    def step(self) -> int:
        """Start waiting requests, sample one token for each running request, and resolve the futures of those that end.

        Returns how many ended. Raises whatever the model raises; the state is then undefined until `reset`.
        """
        if self._weights_changed:
            self.read_weights()
        with self.forward.inference():
            for slot, request in self.scheduler.admit(len(self.batch.requests)):
                self.batch.add(slot, request)
            if not self.batch.requests:
                raise EngineError(f"no slot for any of {len(self.scheduler.waiting)} waiting requests")
            step, allowed = self._next_step_allowed()
            if step is None:
                return 0
            fed_B, positions_B, sampled = self._decode(step, allowed)
        self.cache.tokens_SC[step.slots_B, positions_B] = fed_B
        self.cache.length_S[step.slots_B] = positions_B + 1
        self._unused_reads += int(step.rows_B[-1]) + 1 - len(step.rows_B)
        self.stats.decode_steps += 1
        self.stats.sampled_tokens += len(fed_B)
        finished = self.batch.append(step, sampled)
        if len(overflowed := sampled.overflowed):
            self._fail(step.slots_B[overflowed].tolist())
        for slot, finish_reason in finished:
            if slot not in self.batch.requests:  # failed
                continue
            request, partial = self.batch.remove(slot)
            routes = self.cache.recorded_routes(slot)
            self.cache.finish_request(slot)
            if not request.future.done():
                completion = partial.completion(
                    finish_reason,
                    prompt_tokens=len(request.prompt_N),
                    cached_tokens=request.cached_tokens or 0,
                    routes=routes,
                )
                request.future.set_result(completion)
        return len(finished)

    def _next_step_allowed(self) -> tuple[DecodeStep | None, AllowedTokens | None]:
        """The next step and what grammars allow in it. Requests whose grammar cannot go on end; None if no other is left."""
        while self.batch.requests:
            step = self._next_step()
            allowed, failed = self.batch.allowed(step)
            if not failed:
                return step, allowed
            for slot, error in failed.items():
                request, _ = self.batch.remove(slot)
                self.cache.discard(slot)
                if not request.future.done():
                    request.future.set_exception(EngineError(str(error)))
        return None, None

    def _fail(self, slots: Sequence[int]) -> None:
        """End the requests of these slots, whose logits are not finite. The others go on."""
        for slot in slots:
            request, request.partial = self.batch.remove(slot)
            with (
                self.forward.inference()
            ):  # tensors that were made in inference mode are changed in inference mode only
                self.cache.discard(slot)
            if not request.future.done():
                request.future.set_exception(EngineError(self.explain(request.token_ids[:-1], request)))

    def _next_step(self) -> DecodeStep:
        """The step for the requests that run now; every row has room for one more token."""
        step = self.batch.step
        if step is None or step.layout != self.cache.layout or self._should_compact(step.rows_B):
            step = self._make_step()
        if int(self.cache.length_S[step.slots_B].max()) >= self.cache.kv.capacity:
            self._grow_rows()
            step = self._make_step()
        return step

    def _make_step(self) -> DecodeStep:
        """A step for the requests that run now, in the order of their rows."""
        cache, running = self.cache, list(self.batch.requests)
        if self._should_compact(cache.row_S[running]):
            with self.threads.during("compact", len(running)):
                cache.compact(running)
            self._unused_reads = 0
        running.sort(key=lambda slot: cache.row_S[slot])
        models_B = cache.model_S[running]
        return self.batch.make_step(
            running,
            cache.row_S[running],
            models=self.forward.of_models(models_B),
            versions_B=np.array(self.versions)[models_B],
            layout=cache.layout,
            shared=cache.shared_prefix(np.array(running)),
        )

    def _should_compact(self, rows_B: np.ndarray) -> bool:
        """Whether to move the running rows together: attention also reads the unused rows in between. Not before this has cost
        as much as moving does, because the next turn of a conversation often uses such a row again."""
        moving = int((rows_B >= len(rows_B)).sum())
        return 0 < moving * COMPACT_AFTER <= self._unused_reads

    def _grow_rows(self) -> None:
        """Make room for one more token in each running row; if there is not enough memory, preempt the latest requests."""
        running = sorted(self.batch.requests, key=lambda slot: -self.batch.requests[slot].arrival)
        capacity = int(self.cache.length_S[running].max()) + 1
        preempted = self.cache.ensure_capacity(capacity, preemptible=running[:-1])
        assert preempted is not None, "a single request always fits: RequestLimits.max_tokens has checked it"
        for slot in preempted:
            request, request.partial = self.batch.remove(slot)
            request.routes = self.cache.lost_routes.pop(slot, None)
            self.scheduler.waiting.appendleft(request)
            self.stats.preemptions += 1

    def _decode(self, step: DecodeStep, allowed: AllowedTokens | None) -> tuple[np.ndarray, np.ndarray, SampledTokens]:
        """Run the last token of each request and sample the next. Returns the input tokens, their positions, the samples."""
        kv, forward = self.cache.kv, self.forward
        fed_B, positions_B = self.batch.input_tokens(step), self.cache.length_S[step.slots_B]
        if kv.routes is not None:
            self._prescribe(step, positions_B)
        with self.threads.during("decode", len(fed_B)):
            if step.position_offsets_B is not None and isinstance(forward, VisionForward):
                offsets_B = step.position_offsets_B
                logits_BV = forward.decode_after_images(kv, step.rows_B, positions_B, fed_B, offsets_B, step.shared)
            else:
                logits_BV = forward.decode(kv, step.rows_B, positions_B, fed_B, step.shared, step.models)
            sampled = sample_tokens(logits_BV, step.sampling, self.batch.uniforms(step), allowed)
        return fed_B, positions_B, sampled

    def _prescribe(self, step: DecodeStep, positions_B: np.ndarray) -> None:
        """The model chooses the experts of a token, unless the last token of a prompt was computed before."""
        for slot, row, position in zip(step.slots_B.tolist(), step.rows_B.tolist(), positions_B.tolist(), strict=True):
            self.cache.kv.prescribe(row, position, position + 1, self.batch.requests[slot].routes)
