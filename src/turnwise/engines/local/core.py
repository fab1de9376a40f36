"""The synchronous part of the engine: one step starts waiting requests and samples one token for each running request.

Knows the order of work in a step. Does not know the event loop (`engine`), the order in which requests start (`scheduler`),
the memory of the cache (`prefix_cache`, `kv_cache`), the model's family (`forward`) or sampling (`sampler`).
"""

from __future__ import annotations

import numpy as np

from turnwise.engines.local.batch import DecodeStep, RunningBatch
from turnwise.engines.local.forward import CachedForward
from turnwise.engines.local.prefix_cache import PrefixCache
from turnwise.engines.local.requests import PendingRequest
from turnwise.engines.local.sampler import SampledTokens, sample_tokens
from turnwise.engines.local.scheduler import Scheduler, Stats
from turnwise.engines.local.vision import VisionForward
from turnwise.errors import EngineError
from turnwise.models.torch_threads import TorchThreads

__all__ = ["EngineCore"]

COMPACT_AFTER = 16
"""Moving a row costs as much as reading this number of rows in vain (measured; more with a long common prefix)."""


class EngineCore:
    """Waiting and running requests, the cache, and the model."""

    def __init__(
        self, forward: CachedForward, cache: PrefixCache, batch: RunningBatch, *, threads: TorchThreads, version: int
    ) -> None:
        self.forward, self.cache, self.batch, self.threads = forward, cache, batch, threads
        self.stats = Stats()
        self.scheduler = Scheduler(cache, forward, threads, self.stats)
        self.version = version
        """The version of the weights."""
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

    def use_weights(self, version: int) -> None:
        """The model's weights have changed: nothing that was computed before is reused by a later request."""
        self.version = version
        self.forward.reload_parameters()
        self.cache.invalidate()
        self.batch.step = None

    def step(self) -> int:
        """Start waiting requests, sample one token for each running request, and resolve the futures of those that end.

        Returns how many ended. Raises whatever the model raises; the state is then undefined until `reset`.
        """
        with self.forward.inference():
            for slot, request in self.scheduler.admit():
                self.batch.add(slot, request)
            if not self.batch.requests:
                raise EngineError(f"no slot for any of {len(self.scheduler.waiting)} waiting requests")
            step = self._next_step()
            fed_B, positions_B, sampled = self._decode(step)
        self.cache.tokens_SC[step.slots_B, positions_B] = fed_B
        self.cache.length_S[step.slots_B] = positions_B + 1
        self._unused_reads += int(step.rows_B[-1]) + 1 - len(step.rows_B)
        self.stats.decode_steps += 1
        self.stats.sampled_tokens += len(fed_B)
        finished = self.batch.append(step, sampled, self.version)
        for slot, finish_reason in finished:
            request, partial = self.batch.remove(slot)
            self.cache.finish_request(slot)
            if not request.future.done():
                completion = partial.completion(
                    finish_reason, prompt_tokens=len(request.prompt_N), cached_tokens=request.cached_tokens or 0
                )
                request.future.set_result(completion)
        return len(finished)

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
        return self.batch.make_step(
            running, cache.row_S[running], layout=cache.layout, shared=cache.shared_prefix(np.array(running))
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
            self.scheduler.waiting.appendleft(request)
            self.stats.preemptions += 1

    def _decode(self, step: DecodeStep) -> tuple[np.ndarray, np.ndarray, SampledTokens]:
        """Run the last token of each request and sample the next. Returns the input tokens, their positions, the samples."""
        kv, forward = self.cache.kv, self.forward
        fed_B, positions_B = self.batch.input_tokens(step), self.cache.length_S[step.slots_B]
        with self.threads.during("decode", len(fed_B)):
            if step.position_offsets_B is not None and isinstance(forward, VisionForward):
                logits_BV = forward.decode_after_images(kv, step.rows_B, positions_B, fed_B, step.position_offsets_B)
            else:
                logits_BV = forward.decode(kv, step.rows_B, positions_B, fed_B, step.shared)
            sampled = sample_tokens(logits_BV, step.sampling, self.batch.uniforms(step))
        return fed_B, positions_B, sampled
