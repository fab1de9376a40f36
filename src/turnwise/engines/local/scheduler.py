"""Who may start: the queue, and the rounds in which waiting requests get a slot and their prompts are computed.

It knows how to compute no token twice: a request continues its conversation's own slot, or copies the longest prefix that
is resident, and where it shares more with a request of the same round it waits for the next one. So of 16 prompts with a
common preamble and 8 samples each, the first round computes one prompt, the second the other prompts' own parts, and the
third nothing but starts the rest. It refuses to know how a token is sampled and who waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from turnwise.engines.local.batch import PendingRequest
from turnwise.engines.local.forward import Forward
from turnwise.engines.local.slots import BLOCK, FREE, Match, Slots
from turnwise.engines.local.vision import VisionForward
from turnwise.models.torch_threads import TorchThreads

__all__ = ["Scheduler", "Stats"]

LEAST_COPY = 8
"""Fewer tokens than this are computed rather than copied."""
STEP_TOKENS = 8192
"""Prompt tokens that may be computed between two decode steps: those who are speaking wait for no more than that."""
BATCH_TOKENS = 4096
"""Tokens of one pass over prompts, padding included."""


@dataclass(slots=True)
class Stats:
    """What the engine has done since it was made."""

    prefilled_tokens: int = 0
    """Prompt tokens that the model was run on."""
    reused_tokens: int = 0
    """Prompt tokens that were in the conversation's own slot."""
    copied_tokens: int = 0
    """Prompt tokens that were taken from another slot."""
    sampled_tokens: int = 0
    decode_steps: int = 0
    evictions: int = 0
    """Idle conversations that lost their slot."""
    preemptions: int = 0
    """Running requests that lost their slot and were put back into the queue."""


@dataclass(slots=True)
class _Round:
    started: list[tuple[int, PendingRequest]] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    """(from slot, to slot, tokens)"""
    tokens: int = 0
    """To be computed."""


class Scheduler:
    """The queue in front of the slots."""

    def __init__(self, slots: Slots, forward: Forward, threads: TorchThreads, stats: Stats) -> None:
        self._slots, self._forward, self._threads, self._stats = slots, forward, threads, stats
        self.waiting: deque[PendingRequest] = deque()

    def admit(self) -> Iterator[tuple[int, PendingRequest]]:
        """Start whoever can be started; yields slot and ticket of each, its prompt computed but for the last token."""
        left = STEP_TOKENS
        while self.waiting and left > 0:
            chosen = self._choose(left)
            if not chosen.started:
                return
            self._copy(chosen)
            self._prefill(chosen)
            left -= max(1, chosen.tokens)
            yield from chosen.started

    def _choose(self, tokens: int) -> _Round:
        """Give slots to waiting requests, in their order, until `tokens` are to be computed or there is no slot left."""
        chosen, deferred = _Round(), []
        while self.waiting and chosen.tokens < tokens:
            ticket = self.waiting.popleft()
            placed = self._place(ticket, chosen)
            if placed is None:
                self.waiting.appendleft(ticket)
                break
            if not placed:
                deferred.append(ticket)
        self.waiting.extendleft(reversed(deferred))
        return chosen

    def _place(self, ticket: PendingRequest, chosen: _Round) -> bool | None:
        """Give the request a slot. False: it should wait for a request of this round. None: there is no room."""
        slots, tokens_N = self._slots, ticket.so_far
        # the last token is left for the first decode step, which gives the logits
        wanted_N = tokens_N[:-1]
        donor, ahead = slots.find(wanted_N)
        if ahead.tokens >= donor.tokens + BLOCK:
            return False
        conversation = ticket.request.conversation
        own = slots.of(conversation)
        own_kept = slots.common(own, wanted_N) if own != FREE else 0
        if donor.slot == own or donor.tokens < own_kept + LEAST_COPY:
            donor = Match()
        slot = self._room(len(tokens_N), own, donor, chosen)
        if slot is None and donor.slot != FREE:
            # it may be the donor that takes the last of the room
            donor = Match()
            slot = self._room(len(tokens_N), own, donor, chosen)
        if slot is None:
            return None
        kept = max(own_kept, donor.tokens)
        if ticket.vision_prompt is not None:
            kept = ticket.vision_prompt.whole(kept)
        self._stats.reused_tokens += min(own_kept, kept)
        self._stats.copied_tokens += max(kept - own_kept, 0)
        self._stats.prefilled_tokens += len(tokens_N) - kept
        if donor.slot not in (FREE, slot):
            chosen.copies.append((donor.slot, slot, kept))
        slots.begin(slot, conversation, wanted_N, kept)
        chosen.tokens += len(wanted_N) - kept
        chosen.started.append((slot, ticket))
        return True

    def _room(self, capacity: int, own: int, donor: Match, chosen: _Round) -> int | None:
        """A slot whose row is long enough: the conversation's own, the donor itself where nobody needs it, or another."""
        pinned = {source for source, _, _ in chosen.copies} | {donor.slot, own}
        if self._slots.widen(capacity, pinned=pinned) is None:
            return None
        if own != FREE:
            return own
        if donor.slot != FREE and self._slots.adoptable(donor.slot):
            return donor.slot
        return self._slots.take(capacity, pinned)

    def _copy(self, chosen: _Round) -> None:
        if not chosen.copies:
            return
        row_S = self._slots.row_S
        sources, targets, tokens = zip(*chosen.copies, strict=True)
        self._slots.rows.copy(row_S[list(sources)].tolist(), row_S[list(targets)].tolist(), max(tokens))

    def _prefill(self, chosen: _Round) -> None:
        """Compute what is missing, the short ones together and the long ones in pieces."""
        slots = self._slots
        ends = {slot: len(ticket.so_far) - 1 for slot, ticket in chosen.started}
        sights = {slot: ticket.vision_prompt for slot, ticket in chosen.started}
        todo = sorted((slot for slot, end in ends.items() if end > slots.length_S[slot]), key=lambda slot: ends[slot])
        while todo:
            # of one length, so that little is padded; the longest sets how many fit
            todo.sort(key=lambda slot: ends[slot] - slots.length_S[slot])
            longest, batch = 0, []
            for slot in todo:
                longest = min(BATCH_TOKENS, ends[slot] - int(slots.length_S[slot]))
                if batch and longest * (len(batch) + 1) > BATCH_TOKENS:
                    break
                batch.append(slot)
            starts_N = slots.length_S[batch]
            stops_N = [min(ends[slot], int(slots.length_S[slot]) + BATCH_TOKENS) for slot in batch]
            sights_N = [sights[slot] for slot in batch]
            stops_N = [
                stop if sight is None else sight.whole(stop, int(start))
                for sight, start, stop in zip(sights_N, starts_N, stops_N, strict=True)
            ]
            tokens_N = [
                slots.tokens_SC[slot, start:stop] for slot, start, stop in zip(batch, starts_N, stops_N, strict=True)
            ]
            with self._threads.during("prefill", sum(map(len, tokens_N))):
                if isinstance(self._forward, VisionForward) and any(sights_N):
                    self._forward.see(slots.rows, slots.row_S[batch], starts_N, tokens_N, sights_N)
                else:
                    self._forward.prefill(slots.rows, slots.row_S[batch], starts_N, tokens_N)
            for slot, stop in zip(batch, stops_N, strict=True):
                slots.length_S[slot] = stop
            todo = [slot for slot in todo if ends[slot] > slots.length_S[slot]]
        for slot, end in ends.items():
            slots.computed(slot, end)
