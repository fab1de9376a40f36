"""The embedded engine: it samples with the trainer's own model, in the trainer's process, from many conversations at once.

It knows the queue, the step and the event loop: requests join and leave between two decode steps, and everything happens
in the loop's own thread. It refuses to know how the cache is laid out (`slots`, `rows`), how the model is run (`forward`)
and how a token is drawn (`sampler`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import count

import numpy as np
import torch
from transformers import PreTrainedModel

from turnwise.engines.local.batch import Decode, PendingRequest, RunningBatch
from turnwise.engines.local.forward import choose_forward
from turnwise.engines.local.kv_cache import KVCache
from turnwise.engines.local.sampler import draw
from turnwise.engines.local.scheduler import Scheduler, Stats
from turnwise.engines.local.slots import Slots
from turnwise.engines.local.vision import VisionForward, VisionPrompt
from turnwise.errors import EngineError
from turnwise.models.torch_threads import TorchThreads
from turnwise.types import Completion, Request

__all__ = ["LocalEngine"]

SPINS = 16
"""Turns of the event loop, at most, in which conversations may come back before the next step."""


class LocalEngine:
    """An `Engine` over a model of this process.

    `slots` bounds the conversations that are kept, `memory_gb` the bytes of their cache, which starts small and grows;
    `context` the tokens of one (None: what the model was made for). `decode` turns token ids into text, for requests with
    stop texts. `threads=0` finds out by itself how many torch threads pay off; a fixed number makes runs repeatable.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int = 256,
        memory_gb: float = 2.0,
        context: int | None = None,
        threads: int = 0,
        decode: Callable[[Sequence[int]], str] | None = None,
        version: int = 0,
    ) -> None:
        parameter = next(model.parameters())
        self._forward = choose_forward(model)
        self._model, self._decode, self._version = model, decode, version
        self._context, self._vocabulary = _context(model, context), model.config.get_text_config().vocab_size
        rows = KVCache(
            self._forward.shapes, dtype=parameter.dtype, device=parameter.device, budget=int(memory_gb * 2**30)
        )
        self._slots = Slots(rows, count=slots, context=self._context)
        self._stats = Stats()
        self._threads = TorchThreads(threads)
        self._admission = Scheduler(self._slots, self._forward, self._threads, self._stats)
        self._batch = RunningBatch(slots, decode, parameter.device)
        self._numbers = count()
        self._layout = 0
        self._open: set[PendingRequest] = set()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._finished_some = True

    @property
    def version(self) -> int:
        """The version of the weights that it samples with now."""
        return self._version

    @property
    def stats(self) -> Stats:
        """What it has done since it was made."""
        self._stats.evictions = self._slots.evictions
        return self._stats

    @property
    def cache_bytes(self) -> int:
        """What the cache takes now."""
        return self._slots.rows.bytes

    async def generate(self, request: Request) -> Completion:
        """Continue `request.token_ids`; cancelling the call frees its row at once.

        Raises EngineError if the engine is closed, the model fails, or the request can never be served.
        """
        if self._closed:
            raise EngineError("the engine is closed: make a new LocalEngine, or generate before close()")
        ticket = self._ticket(request)
        self._start()
        self._open.add(ticket)
        self._admission.waiting.append(ticket)
        try:
            return await ticket.future
        finally:
            self._forget(ticket)

    def release(self, conversation: str) -> None:
        """The conversation is over: its slot serves as a donor of its prefix until somebody else needs it."""
        self._slots.release(conversation)

    async def load_weights(self, version: int, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Sample with these weights from now on; what was computed with the former ones is not continued or shared.

        Requests that are running go on with their own cache, and their next tokens carry the new version. Raises
        EngineError, before anything is changed, if the names are not those of the model.
        """
        if weights is not None:
            _copy_weights(self._model, weights)
        self._version = version
        self._forward.refresh()
        self._slots.flush()
        self._batch.step = None

    async def close(self) -> None:
        """Give back the cache; requests that are running fail."""
        self._closed = True
        self._fail("the engine was closed while the request was running")
        if self._task is not None and not self._task.get_loop().is_closed():
            self._task.cancel()
        self._task = None

    def _ticket(self, request: Request) -> PendingRequest:
        """Check that the request can be served, and give it a number."""
        prompt_N = np.asarray(request.token_ids, dtype=np.int32)
        sampling, length = request.sampling, len(prompt_N)
        if length == 0:
            raise EngineError(
                "the prompt is empty: it must have at least one token, such as the one that begins a text"
            )
        if prompt_N.min() < 0 or prompt_N.max() >= self._vocabulary:
            raise EngineError(
                f"the prompt holds token ids from {prompt_N.min()} to {prompt_N.max()}; the model has 0 to "
                f"{self._vocabulary - 1}. The tokenizer must be the model's own"
            )
        if sampling.max_tokens < 1 or sampling.temperature < 0:
            raise EngineError(
                f"max_tokens is {sampling.max_tokens} and temperature {sampling.temperature}; the former must be at "
                "least 1, the latter not negative (0 is greedy)"
            )
        if length >= self._context:
            raise EngineError(
                f"the prompt has {length} tokens and the context {self._context}: nothing can be said after it. "
                "Shorten the conversation (limits.context), or raise the engine's context"
            )
        if sampling.stop and self._decode is None:
            raise EngineError(
                f"the request stops at the texts {list(sampling.stop)}, and this engine cannot read: make it with "
                "LocalEngine(..., decode=tokenizer.decode), or use stop_token_ids"
            )
        limit = min(sampling.max_tokens, self._context - length)
        most, need = self._slots.rows.most_tokens(), length + limit
        if need > most:
            gigabytes = need * self._slots.rows.token_bytes / 2**30
            raise EngineError(
                f"the prompt has {length} tokens and may be continued by {limit}, but the cache holds {most} at most. "
                f"Give it more memory (memory_gb={gigabytes:.3g} or more), or ask for fewer tokens"
            )
        sight = self._look(prompt_N, request)
        return PendingRequest(
            request=request,
            number=next(self._numbers),
            prompt_N=prompt_N if sight is None else sight.keys_N,
            vision_prompt=sight,
            limit=limit,
            future=asyncio.get_running_loop().create_future(),
        )

    def _look(self, prompt_N: np.ndarray, request: Request) -> VisionPrompt | None:
        if not request.media:
            return None
        if not isinstance(self._forward, VisionForward):
            raise EngineError(
                f"the request holds {len(request.media)} images or videos, and {type(self._model).__name__} takes none. "
                f"Use a model that sees, or messages of text"
            )
        return self._forward.look(prompt_N, request.media)

    # the stepping task

    def _start(self) -> None:
        """See that the stepping task runs, in this event loop."""
        loop = asyncio.get_running_loop()
        if self._task is not None and self._task.get_loop() is not loop:
            self._task = None
            if self._open:
                self._fail("the event loop of the request has ended")
        if self._task is None or self._task.done():
            self._forward.refresh()
            self._task = loop.create_task(self._run())

    async def _run(self) -> None:
        """Step until there is nothing to do."""
        self._finished_some = True
        while True:
            try:
                await self._listen()
            except asyncio.CancelledError:
                self._refuse("the engine's stepping task was cancelled")
                raise
            if not self._open:
                return
            try:
                self._step()
            except Exception as error:  # whatever the model raises: the requests fail, the engine goes on
                self._fail(f"the embedded engine could not make a step: {type(error).__name__}: {error}", error)

    async def _listen(self) -> None:
        """Let the conversations run; after somebody has finished, wait a little for those that come straight back."""
        quiet = 0
        for _ in range(SPINS if self._finished_some else 1):
            before = len(self._admission.waiting)
            await asyncio.sleep(0)
            quiet = 0 if len(self._admission.waiting) > before else quiet + 1
            if quiet == 3:
                break
        self._finished_some = False

    def _step(self) -> None:
        """Start who can start, run one decode step for all who are running, and answer those who have ended."""
        batch, slots = self._batch, self._slots
        with self._forward.guard():
            for slot, ticket in self._admission.admit():
                batch.join(slot, ticket)
            if not batch.tickets:
                raise EngineError(f"no slot for any of {len(self._admission.waiting)} waiting requests")
            step = batch.step
            if step is None or self._layout != slots.layout:
                step = self._arrange()
            if int(slots.length_S[step.slots_B].max()) >= slots.rows.capacity:
                self._make_room()
                step = self._arrange()
            fed_B, positions_B = batch.feed(step), slots.length_S[step.slots_B]
            with self._threads.during("decode", len(fed_B)):
                if step.shifts_B is not None and isinstance(self._forward, VisionForward):
                    logits_BV = self._forward.decode_shifted(slots.rows, step.rows_B, positions_B, fed_B, step.shifts_B)
                else:
                    logits_BV = self._forward.decode(slots.rows, step.rows_B, positions_B, fed_B, step.shared)
                drawn = draw(logits_BV, step.options, batch.uniforms(step))
        slots.tokens_SC[step.slots_B, positions_B] = fed_B
        slots.length_S[step.slots_B] = positions_B + 1
        self._stats.decode_steps += 1
        self._stats.sampled_tokens += len(fed_B)
        for slot, finish in batch.record(step, drawn, self._version):
            ticket, said = batch.leave(slot)
            slots.end(slot)
            self._finished_some = True
            if not ticket.future.done():
                ticket.future.set_result(said.completion(finish))

    def _arrange(self) -> Decode:
        """The rows that run now, moved together where the gaps between them have become wide."""
        slots, running = self._slots, list(self._batch.tickets)
        if int(slots.row_S[running].max()) >= len(running) * 5 // 4 + 2:
            slots.compact(running)
        running.sort(key=lambda slot: slots.row_S[slot])
        self._layout = slots.layout
        return self._batch.arrange(running, slots.row_S[running], slots.shared(np.array(running)))

    def _make_room(self) -> None:
        """Room for one more token in every running row; where there is none, the youngest requests make way."""
        running = sorted(self._batch.tickets, key=lambda slot: -self._batch.tickets[slot].number)
        victims = self._slots.widen(int(self._slots.length_S[running].max()) + 1, expendable=running[:-1])
        assert victims is not None, "a single request always fits: generate() has seen to it"
        for slot in victims:
            ticket, ticket.partial = self._batch.leave(slot)
            self._admission.waiting.appendleft(ticket)
            self._stats.preemptions += 1

    def _forget(self, ticket: PendingRequest) -> None:
        """The caller has its answer, or has gone away: free what the request holds."""
        self._open.discard(ticket)
        if ticket in self._admission.waiting:
            self._admission.waiting.remove(ticket)
        for slot, running in self._batch.tickets.items():
            if running is ticket:
                self._batch.leave(slot)
                self._slots.end(slot)
                return

    def _fail(self, message: str, cause: Exception | None = None) -> None:
        """Every open request fails, and nothing that is in the cache is trusted any more."""
        self._refuse(message, cause)
        self._open.clear()
        self._admission.waiting.clear()
        for slot in list(self._batch.tickets):
            self._batch.leave(slot)
        self._slots.clear()

    def _refuse(self, message: str, cause: Exception | None = None) -> None:
        for ticket in self._open:
            if not ticket.future.done() and not ticket.future.get_loop().is_closed():
                error = EngineError(message)
                error.__cause__ = cause
                ticket.future.set_exception(error)


def _context(model: PreTrainedModel, context: int | None) -> int:
    """The longest conversation: what was asked for, within the positions that the model knows."""
    longest: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is None and longest is None:
        raise EngineError(f"{type(model).__name__} does not say how many positions it knows: give the engine a context")
    if context is not None and not 1 < context <= (longest or context):
        raise EngineError(f"context is {context}; it must be 2 to {longest}, the positions that the model knows")
    return context or longest or 0


def _copy_weights(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors into the parameters and buffers of the same names."""
    own = model.state_dict(keep_vars=True)
    unknown = sorted(set(weights) - set(own))
    # of a tied pair, one is enough
    given = {own[name].data_ptr() for name in weights if name in own}
    missing = sorted(name for name, tensor in own.items() if name not in weights and tensor.data_ptr() not in given)
    shapes = [name for name, tensor in weights.items() if name in own and own[name].shape != tensor.shape]
    for wrong, what in ((unknown, "are not the model's"), (missing, "are missing"), (shapes, "have another shape")):
        if wrong:
            raise EngineError(
                f"{len(wrong)} of the weights {what}: {', '.join(wrong[:3])}{', ...' if len(wrong) > 3 else ''}. "
                "load_weights takes the whole state dict of the same model, or None where it was changed in place"
            )
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)
