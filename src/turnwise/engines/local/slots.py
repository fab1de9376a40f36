"""Who lives where in the cache: which conversation holds which row, which tokens are computed there, who must go first.

A slot is a name for a resident token sequence; it holds a row of memory as long as it is resident, and rows may be moved
under it. It knows tokens and recency. It refuses to know requests, sampling and the model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.engines.local.kv_cache import FIRST_CAPACITY, FIRST_ROWS, KVCache

__all__ = ["BLOCK", "Match", "Slots"]

BLOCK = 16
"""Tokens in a block of the prefix search."""
FREE = -1
_PRIME = np.uint64(0x9E3779B97F4A7C55)


@dataclass(frozen=True, slots=True)
class Match:
    """The slot that shares most with a prompt, and how many tokens that is."""

    slot: int = FREE
    tokens: int = 0


class Slots:
    """The resident sequences. Arrays are indexed by slot; `rows` by `row_S[slot]`."""

    def __init__(self, rows: KVCache, *, count: int, context: int) -> None:
        self.rows = rows
        self.count = count
        self.context = context
        self.evictions = 0
        self.layout = 0
        """Another number whenever a slot has moved to another row."""
        self.row_S = np.full(count, FREE, dtype=np.int64)
        self.length_S = np.zeros(count, dtype=np.int64)
        """Tokens whose keys and values are in the row."""
        self.tokens_SC = np.zeros((count, 0), dtype=np.int32)
        self.busy_S = np.zeros(count, dtype=bool)
        """Whether a request is running in the slot."""
        self._hashes_SK = np.zeros((count, 0), dtype=np.uint64)
        self._powers_C = np.zeros(0, dtype=np.uint64)
        self._pending_S = np.zeros(count, dtype=bool)
        self._stale_S = np.zeros(count, dtype=bool)
        self._used_S = np.zeros(count, dtype=np.int64)
        self._tick = 0
        self._owner_S: list[str | None] = [None] * count
        self._slot_of: dict[str, int] = {}

    # the prefix search

    def hashes(self, tokens_N: np.ndarray) -> np.ndarray:
        """One number for each whole block of tokens: of everything up to its end."""
        if len(tokens_N) > len(self._powers_C):
            self._powers_C = np.full(2 * len(tokens_N), _PRIME, dtype=np.uint64).cumprod()
        terms_N = (tokens_N.astype(np.uint64) + np.uint64(1)) * self._powers_C[: len(tokens_N)]
        return terms_N.cumsum()[BLOCK - 1 :: BLOCK]

    def find(self, tokens_N: np.ndarray) -> tuple[Match, Match]:
        """Where most of these tokens are computed already, and where most of them are about to be, in this round."""
        hashes_K = self.hashes(tokens_N)[: self._hashes_SK.shape[1]]
        equal_SK = self._hashes_SK[:, : len(hashes_K)] == hashes_K
        shared_S = equal_SK.sum(axis=1) * BLOCK
        # what a pending slot keeps may be on its way there, and copies of one round are made all at once
        alive_S = (self.row_S != FREE) & ~self._stale_S & ~self._pending_S
        resident = self._longest(tokens_N, np.where(alive_S, np.minimum(shared_S, self.length_S), -1), self.length_S)
        if not self._pending_S.any():
            return resident, Match()
        everything_S = np.full(self.count, len(tokens_N))
        return resident, self._longest(tokens_N, np.where(self._pending_S, shared_S, -1), everything_S)

    def _longest(self, tokens_N: np.ndarray, shared_S: np.ndarray, limit_S: np.ndarray) -> Match:
        """Token-exact extension of the best match in whole blocks."""
        best = int(shared_S.max())
        if best < 0:
            return Match()
        slots = np.flatnonzero(shared_S == best)
        start = best - best % BLOCK
        tail_T = tokens_N[start : start + BLOCK]
        tail_T = tail_T[: max(0, self.tokens_SC.shape[1] - start)]
        more = (self.tokens_SC[slots, start : start + len(tail_T)] == tail_T).cumprod(axis=1).sum(axis=1)
        total = np.minimum(start + more, limit_S[slots])
        slot = int(slots[total.argmax()])
        return Match(slot, self.common(slot, tokens_N[: int(total.max())]))

    def common(self, slot: int, tokens_N: np.ndarray) -> int:
        """How many of the tokens the slot begins with, token by token: hashes may lie."""
        computed = min(len(tokens_N), int(self.length_S[slot])) if not self._pending_S[slot] else len(tokens_N)
        differs_N = self.tokens_SC[slot, :computed] != tokens_N[:computed]
        return int(differs_N.argmax()) if differs_N.any() else computed

    def shared(self, slots_B: np.ndarray) -> int:
        """How many first tokens these slots have in common, and computed with the same weights."""
        if self._stale_S[slots_B].any():
            return 0
        length = int(self.length_S[slots_B].min())
        same_L = (self.tokens_SC[slots_B, :length] == self.tokens_SC[slots_B[0], :length]).all(axis=0)
        return length if same_L.all() else int(same_L.argmin())

    # taking and giving back

    def of(self, conversation: str) -> int:
        """The idle slot of a conversation, or FREE."""
        slot = self._slot_of.get(conversation, FREE)
        return FREE if slot != FREE and self.busy_S[slot] else slot

    def adoptable(self, slot: int) -> bool:
        """Whether nobody needs what is in the slot beyond what it may be shared for."""
        return not self.busy_S[slot] and self._owner_S[slot] is None

    def begin(self, slot: int, conversation: str, tokens_N: np.ndarray, kept: int) -> None:
        """A request runs in the slot from now on: `kept` of the tokens are there, or are copied before the round ends."""
        if self._slot_of.get(conversation, slot) == slot:
            self._slot_of[conversation] = slot
            self._owner_S[slot] = conversation
        self.busy_S[slot] = self._pending_S[slot] = True
        self.length_S[slot] = kept
        self.tokens_SC[slot, : len(tokens_N)] = tokens_N
        self._remember(slot, tokens_N)

    def computed(self, slot: int, length: int) -> None:
        """The first `length` tokens of the slot are in its row."""
        self.length_S[slot] = length
        self._pending_S[slot] = False

    def end(self, slot: int) -> None:
        """No request runs in the slot any more; what is there may be continued or shared."""
        self.busy_S[slot] = self._pending_S[slot] = False
        self._tick += 1
        self._used_S[slot] = self._tick
        if self._stale_S[slot]:
            self._free(slot)
        else:
            self._remember(slot, self.tokens_SC[slot, : self.length_S[slot]])

    def release(self, conversation: str) -> None:
        """Nobody will continue this conversation; what is there may still be shared."""
        slot = self._slot_of.pop(conversation, None)
        if slot is not None:
            self._owner_S[slot] = None

    def flush(self) -> None:
        """The weights have changed: idle slots are freed, and running ones will be as soon as they end."""
        for slot in np.flatnonzero(self.row_S != FREE):
            if self.busy_S[slot]:
                self._stale_S[slot] = True
            else:
                self._free(int(slot))
        if self.rows.count and not self.busy_S.any() and self.rows.most_rows(self.rows.capacity) < self.count:
            # a single long conversation has made the rows long and few: do not stay so
            self.rows.resize(0, 0)

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        for slot in np.flatnonzero(self.row_S != FREE):
            self._free(int(slot))
        self.rows.resize(0, 0)

    def take(self, capacity: int, pinned: Collection[int]) -> int | None:
        """A slot with an empty row of at least `capacity` tokens, or None while there is no room for one.

        The first of: an unused row, one that only serves as a donor, a new one, the least recently used idle one.
        """
        if self.widen(capacity, pinned=pinned) is None:
            return None
        residents = int((self.row_S != FREE).sum())
        if residents == self.rows.count:
            released = [slot for slot in self._idle(pinned) if self._owner_S[slot] is None]
            most = min(self.count, self.rows.most_rows(self.rows.capacity))
            if released:
                self._free(released[0])
            elif most > self.rows.count:
                self._resize(min(most, 2 * self.rows.count), self.rows.capacity)
            elif idle := self._idle(pinned):
                self.evict(idle[0])
            else:
                return None
        slot = int((self.row_S == FREE).argmax())
        taken = set(self.row_S.tolist())
        self.row_S[slot] = next(row for row in range(self.rows.count) if row not in taken)
        return slot

    def evict(self, slot: int) -> None:
        """Free a slot that somebody may come back for: the conversation will be computed again."""
        self.evictions += 1
        self._free(slot)

    def _free(self, slot: int) -> None:
        owner = self._owner_S[slot]
        if owner is not None and self._slot_of.get(owner) == slot:
            del self._slot_of[owner]
        self._owner_S[slot] = None
        self.row_S[slot] = FREE
        self.length_S[slot] = 0
        self._hashes_SK[slot] = 0
        self.busy_S[slot] = self._pending_S[slot] = self._stale_S[slot] = False

    def _idle(self, pinned: Collection[int]) -> list[int]:
        """Idle slots, the first to go first."""
        idle = [int(slot) for slot in np.flatnonzero((self.row_S != FREE) & ~self.busy_S) if slot not in pinned]
        return sorted(idle, key=lambda slot: (self._owner_S[slot] is not None, self._used_S[slot]))

    def _remember(self, slot: int, tokens_N: np.ndarray) -> None:
        hashes_K = self.hashes(tokens_N)
        self._hashes_SK[slot, : len(hashes_K)] = hashes_K
        self._hashes_SK[slot, len(hashes_K) :] = 0

    # room

    def widen(self, capacity: int, *, pinned: Collection[int] = (), expendable: Sequence[int] = ()) -> list[int] | None:
        """Make all rows at least `capacity` tokens long. Idle slots go for it, then `expendable` ones, in their order.

        Returns the expendable slots that lost their rows, or None where it cannot be done.
        """
        if capacity <= self.rows.capacity:
            return []
        residents = int((self.row_S != FREE).sum())
        tight = min(-(-capacity // 64) * 64, self.context, self.rows.most_tokens())
        easy = min(max(2 * self.rows.capacity, FIRST_CAPACITY, tight), self.context)
        for length, least in ((easy, min(FIRST_ROWS, self.count)), (tight, 1)):
            most = min(self.count, self.rows.most_rows(length))
            if most >= max(least, residents):
                self._resize(min(max(self.rows.count, FIRST_ROWS), most), length)
                return []
        most = self.rows.most_rows(tight)
        idle = self._idle(pinned)[: residents - most]
        victims = list(expendable[: residents - most - len(idle)])
        if most == 0 or len(idle) + len(victims) < residents - most:
            return None
        for slot in idle:
            self.evict(slot)
        for slot in victims:
            self._free(slot)
        self._resize(most, tight)
        return victims

    def _resize(self, count: int, capacity: int) -> None:
        """Change the rows' number and length; residents in rows beyond `count` are moved down first."""
        homeless = np.flatnonzero(self.row_S >= count)
        if len(homeless):
            taken = set(self.row_S.tolist())
            homes = [row for row in range(count) if row not in taken][: len(homeless)]
            # whole rows: more than its own tokens may still be wanted of one that is copied from in this round
            self.rows.copy(self.row_S[homeless].tolist(), homes, min(self.rows.capacity, capacity))
            self.row_S[homeless] = homes
            self.layout += 1
        self.rows.resize(count, capacity)
        if capacity > self.tokens_SC.shape[1]:
            tokens_SC = np.zeros((self.count, capacity), dtype=np.int32)
            tokens_SC[:, : self.tokens_SC.shape[1]] = self.tokens_SC
            hashes_SK = np.zeros((self.count, capacity // BLOCK), dtype=np.uint64)
            hashes_SK[:, : self._hashes_SK.shape[1]] = self._hashes_SK
            self.tokens_SC, self._hashes_SK = tokens_SC, hashes_SK

    def compact(self, slots: Sequence[int]) -> None:
        """Move these slots into the first rows, so that a pass over them reads one unbroken range of memory."""
        movers = [slot for slot in slots if self.row_S[slot] >= len(slots)]
        inside = {int(self.row_S[slot]) for slot in slots}
        holes = [row for row in range(len(slots)) if row not in inside]
        if not movers:
            return
        slot_at = {int(row): slot for slot, row in enumerate(self.row_S) if row != FREE}
        tokens = max(int(self.length_S[slot]) for slot in movers)
        tokens = max([tokens, *(int(self.length_S[slot_at[row]]) for row in holes if row in slot_at)])
        self.rows.swap([int(self.row_S[slot]) for slot in movers], holes, tokens)
        self.layout += 1
        for slot, hole in zip(movers, holes, strict=True):
            if hole in slot_at:
                self.row_S[slot_at[hole]] = self.row_S[slot]
            self.row_S[slot] = hole
