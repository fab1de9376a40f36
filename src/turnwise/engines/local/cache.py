"""The cache: rows of memory, which token sequence lies in which row, and the prefixes that sequences share.

There is one row of fixed capacity for each resident sequence, in tensors that grow within a byte budget. A slot is a resident
token sequence. It has a row as long as it is resident, and the row may change when rows are moved.

    slot   0          1          2
    row    1          0          -           row_S = [1, 0, FREE]
    state  running    idle       free        idle slots are reused, copied from, or evicted (least recently used first)

Shared prefixes are found by hashes of blocks of tokens: which slot shares the longest prefix with a prompt, and which prefix
the requests of a decode step share. A hash covers all tokens up to the end of its block. Invariant: equal hashes are not
trusted; `PrefixCache` compares the tokens before it reuses keys and values.

A recurrent layer keeps a state of fixed size for each sequence, which lies in the sequence's row beside keys and values. Keys and
values of a sequence can be cut back to any shorter prefix; a state cannot. So copies of it, snapshots, are kept where a sequence
may return to: after the first prompt of a slot (the other samples of a group begin there, and a conversation whose reasoning is
removed returns to it) and after the latest prompt (a turn that is cut or edited begins again there). A prefix is then reused only
if it ends where a state is:

    row of a slot    prompt | answer | tool result | answer so far
    first prompt     ^ snapshot 1    |             |
    latest prompt                    |             ^ snapshot 2
    state 0                                                      ^ the state after `length_S` tokens

The experts of a token (`model.router_replay`) lie in the row, too, because keys and values were computed with them. A pass reads
there which experts are prescribed for a token, and writes which were used.

Knows shapes, tokens and recency. Does not know requests, sampling or the model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from turnwise.models.allocator import long_lived, trim
from turnwise.types import Routes

# Memory: rows of keys, values and states

INITIAL_ROWS, INITIAL_CAPACITY = 8, 256
SNAPSHOTS = 2
"""Copies of the states of a row: after the first and after the latest prompt of its slot."""
_UNBOUNDED = 1 << 40
"""Tokens of a row in a cache that holds states only."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """The numbers that one cache tensor holds for one token."""

    parts: int
    """2: keys and values are in one tensor. 1: the tensor holds only the keys or only the values of a layer."""
    heads: int
    """Key-value heads."""
    head_dim: int

    @property
    def numbers_per_token(self) -> int:
        """Numbers that one token takes."""
        return self.parts * self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class StateShape:
    """A tensor that a recurrent layer keeps for one sequence, whatever its length: a state, or the window of a convolution."""

    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of one tensor."""
        return math.prod(self.size) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RouteShape:
    """The experts that the cache holds for one token."""

    layers: int
    top_k: int
    experts: int

    @property
    def dtype(self) -> torch.dtype:
        """The smallest type that has the number of each expert and one more, `none`."""
        return torch.uint8 if self.experts < 1 << 8 else torch.int16

    @property
    def none(self) -> int:
        """What stands for no expert."""
        return torch.iinfo(self.dtype).max

    @property
    def number_bytes(self) -> int:
        """`Routes.number_bytes`."""
        return 1 if self.experts <= 1 << 8 else 2

    @property
    def bytes(self) -> int:
        """Bytes of one token."""
        return self.layers * self.top_k * self.dtype.itemsize


def bytes_of_states(states: Sequence[StateShape]) -> int:
    """Bytes that the states of a row and their snapshots take."""
    return (1 + SNAPSHOTS) * sum(shape.bytes for shape in states)


class KVCache:
    """Tensors [parts, rows, heads, capacity, head_dim]; all have the same rows and the same capacity (tokens per row).

    Those of `states`, [1 + SNAPSHOTS, rows, *size], hold the current state of each row, and its snapshots.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        states: Sequence[StateShape] = (),
        *,
        dtype: torch.dtype,
        device: torch.device,
        budget_bytes: int,
        routes: RouteShape | None = None,
    ) -> None:
        self._shapes, self._dtype, self._device = tuple(shapes), dtype, device
        self.route_shape = routes
        self._state_shapes = tuple(states)
        self.budget_bytes = budget_bytes
        self.token_bytes = sum(shape.numbers_per_token for shape in shapes) * dtype.itemsize
        self.token_bytes += 0 if routes is None else routes.bytes
        """Bytes that one token takes in all tensors together."""
        self.row_bytes = bytes_of_states(states)
        """Bytes that the states of a row and their snapshots take."""
        self.num_rows = 0
        self.capacity = 0
        self.tensors = [self._zeros(shape, 0, 0) for shape in shapes]
        self.states = [self._zero_states(shape, 0) for shape in states]
        self.routes = self._no_routes(0, 0)
        """The experts of the tokens, [1, rows, 1, capacity, layers * top_k]; None if they are not recorded."""

    @property
    def bytes(self) -> int:
        """Bytes that the tensors take now."""
        return self.num_rows * self._bytes_of_row(self.capacity)

    def max_rows(self, capacity: int) -> int:
        """The number of rows of `capacity` tokens that fit into the budget."""
        return self.budget_bytes // self._bytes_of_row(capacity)

    def max_capacity(self) -> int:
        """The capacity of a single row that uses the entire budget."""
        left = max(0, self.budget_bytes - self.row_bytes)
        if not self.token_bytes:
            return _UNBOUNDED if self.row_bytes <= self.budget_bytes else 0
        return left // self.token_bytes

    def _bytes_of_row(self, capacity: int) -> int:
        return capacity * self.token_bytes + self.row_bytes

    def resize(self, num_rows: int, capacity: int) -> None:
        """Reallocate to `num_rows` rows of `capacity` tokens. Contents outside the new bounds are lost.

        Tensors are replaced one at a time, so at most one of them exists twice at any moment.
        """
        kept_rows, kept_tokens = min(num_rows, self.num_rows), min(capacity, self.capacity)
        for index, shape in enumerate(self._shapes):
            tensor = self._zeros(shape, num_rows, capacity)
            if kept_rows and kept_tokens:
                tensor[:, :kept_rows, :, :kept_tokens] = self.tensors[index][:, :kept_rows, :, :kept_tokens]
            self.tensors[index] = tensor
        if self.routes is not None:
            routes = self._no_routes(num_rows, capacity)
            assert routes is not None
            routes[:, :kept_rows, :, :kept_tokens] = self.routes[:, :kept_rows, :, :kept_tokens]
            self.routes = routes
        for index, state_shape in enumerate(self._state_shapes):
            states = self._zero_states(state_shape, num_rows)
            states[:, :kept_rows] = self.states[index][:, :kept_rows]
            self.states[index] = states
        self.num_rows, self.capacity = num_rows, capacity
        trim()  # the old tensors would divide the memory that is kept

    def copy_rows(self, sources_N: Sequence[int], targets_N: Sequence[int], stop: int, *, start: int = 0) -> None:
        """Copy the tokens from `start` to `stop` of each source row over those of its target row, all at the same time."""
        if set(sources_N).isdisjoint(targets_N):
            # slice by slice: an index would first copy all sources to new memory, which takes four times as long
            runs = _runs(sources_N, targets_N)
            for tensor in self._of_tokens():
                tokens = tensor[:, :, :, start:stop]
                for source, first, end in runs:
                    tokens[:, first:end] = tokens[:, source : source + 1]
            return
        sources, targets = self._index(sources_N), self._index(targets_N)
        for tensor in self._of_tokens():
            # not index_select: from a tensor that is sliced at `stop`, it would copy the entire tensor first
            tensor[:, targets, :, start:stop] = tensor[:, sources, :, start:stop]

    def move_rows(self, sources_N: Sequence[int], targets_N: Sequence[int], stop: int) -> None:
        """Copy the first `stop` tokens of each source row, its states and its snapshots, all at the same time."""
        self.copy_rows(sources_N, targets_N, stop)
        if self.states:
            sources, targets = self._index(sources_N), self._index(targets_N)
            for states in self.states:
                states[:, targets] = states[:, sources]

    def swap_rows(self, left_N: Sequence[int], right_N: Sequence[int], tokens: int) -> None:
        """Exchange the first `tokens` tokens of each left row, and its states, with those of its right row."""
        self.move_rows([*left_N, *right_N], [*right_N, *left_N], tokens)

    def load_states(self, kept_N: Sequence[int], sources_N: Sequence[int], targets_N: Sequence[int]) -> None:
        """Make the `kept_N[n]`-th state (0: the current one) of each source row the current one of its target row.

        All at the same time: each is read before any is written.
        """
        kept, sources, targets = (self._index(rows) for rows in (kept_N, sources_N, targets_N))
        for states in self.states:
            states[0, targets] = states[kept, sources]

    def clear_states(self, rows_N: Sequence[int]) -> None:
        """These rows hold no token: the current states are those before the first token."""
        rows = self._index(rows_N)
        for states in self.states:
            states[0, rows] = 0

    def clear_row(self, row: int) -> None:
        """Overwrite all that a row holds with zeros."""
        for tensor in (*self.tensors, *self.states):
            tensor[:, row] = 0

    def save_states(self, rows_N: Sequence[int], snapshots_N: Sequence[int]) -> None:
        """Copy the current state of each row to its `snapshots_N[n]`-th (1 to SNAPSHOTS)."""
        rows, snapshots = self._index(rows_N), self._index(snapshots_N)
        for states in self.states:
            states[snapshots, rows] = states[0, rows]

    def prescribe(self, row: int, start: int, stop: int, routes: Routes | None) -> None:
        """Set the experts of the tokens from `start` to `stop` of a row before they are computed: those of `routes`, and for the
        tokens after these none, so that the model chooses. Does nothing if experts are not recorded."""
        if self.routes is None or self.route_shape is None:
            return
        self.routes[0, row, 0, start:stop] = self.route_shape.none
        if routes is not None and len(routes) > start:
            known_MW = self._routes_tensor(routes)[start:stop]
            self.routes[0, row, 0, start : start + len(known_MW)] = known_MW

    def recorded(self, row: int, tokens: int) -> Routes | None:
        """The experts of the first tokens of a row; None if they are not recorded."""
        if self.routes is None or self.route_shape is None:
            return None
        numbers_TW = self.routes[0, row, 0, :tokens].cpu().numpy()
        shape = self.route_shape
        data = numbers_TW.astype(f"<u{shape.number_bytes}").tobytes()
        return Routes(shape.layers, shape.top_k, shape.number_bytes, data)

    def same_routes(self, row: int, tokens: int, routes: Routes | None) -> int:
        """How many of the first tokens of a row were computed with the experts of `routes`, as far as these go."""
        if self.routes is None or routes is None:
            return tokens
        known_MW = self._routes_tensor(routes)[:tokens]
        differs_M = (self.routes[0, row, 0, : len(known_MW)] != known_MW).any(dim=-1)
        return int(differs_M.int().argmax()) if bool(differs_M.any()) else tokens

    def _routes_tensor(self, routes: Routes) -> torch.Tensor:
        assert self.route_shape is not None
        numbers = np.frombuffer(routes.data, dtype=f"<u{routes.number_bytes}").reshape(len(routes), -1)
        return torch.from_numpy(numbers.astype(np.int32)).to(self._device, self.route_shape.dtype)

    def _of_tokens(self) -> list[torch.Tensor]:
        """The tensors with an entry for each token."""
        return self.tensors if self.routes is None else [*self.tensors, self.routes]

    def _no_routes(self, num_rows: int, capacity: int) -> torch.Tensor | None:
        if (shape := self.route_shape) is None:
            return None
        size = (1, num_rows, 1, capacity, shape.layers * shape.top_k)
        with long_lived():
            return torch.full(size, shape.none, dtype=shape.dtype, device=self._device)

    def _index(self, rows_N: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(rows_N, dtype=np.int64)).to(self._device)

    def _zero_states(self, shape: StateShape, num_rows: int) -> torch.Tensor:
        with long_lived():
            return torch.zeros((1 + SNAPSHOTS, num_rows, *shape.size), dtype=shape.dtype, device=self._device)

    def _zeros(self, shape: KVShape, num_rows: int, capacity: int) -> torch.Tensor:
        # zeros, not empty: attention multiplies masked tokens by 0, and 0 * uninitialised memory may be NaN
        size = (shape.parts, num_rows, shape.heads, capacity, shape.head_dim)
        with long_lived():
            return torch.zeros(size, dtype=self._dtype, device=self._device)


def _runs(sources_N: Sequence[int], targets_N: Sequence[int]) -> list[tuple[int, int, int]]:
    """(source, first target, end) of neighbouring targets that have the same source."""
    runs: list[tuple[int, int, int]] = []
    for target, source in sorted(zip(targets_N, sources_N, strict=True)):
        if runs and runs[-1][0] == source and runs[-1][2] == target:
            runs[-1] = (source, runs[-1][1], target + 1)
        else:
            runs.append((source, target, target + 1))
    return runs


# Index: shared prefixes, by hashes of blocks of tokens

BLOCK = 16
"""Tokens in a block."""
SHARED_READS = 2500
"""Tokens of the rows that need not be read from which on reading a prefix once pays for the copies that it needs (measured)."""
GROUP_READS = 1200
"""Reads that must be saved for each group, if there are several: each needs matrix products of its own (measured)."""
_PRIME = np.uint64(0x9E3779B97F4A7C55)


class PrefixIndex:
    """The block hashes of each slot: a table [slots, blocks], where 0 means that the block is empty."""

    def __init__(self, num_slots: int) -> None:
        self._hashes_SK = np.zeros((num_slots, 0), dtype=np.uint64)
        self._powers_C = np.zeros(0, dtype=np.uint64)

    def set(self, slot: int, tokens_N: np.ndarray) -> None:
        """The slot holds these tokens from now on."""
        hashes_K = self._hash_blocks(tokens_N)
        self._hashes_SK[slot, : len(hashes_K)] = hashes_K
        self._hashes_SK[slot, len(hashes_K) :] = 0

    def clear(self, slot: int) -> None:
        """The slot is empty from now on."""
        self._hashes_SK[slot] = 0

    def grow(self, capacity: int) -> None:
        """Make room for sequences of `capacity` tokens."""
        hashes_SK = np.zeros((len(self._hashes_SK), capacity // BLOCK), dtype=np.uint64)
        hashes_SK[:, : self._hashes_SK.shape[1]] = self._hashes_SK
        self._hashes_SK = hashes_SK

    def shared_tokens(self, tokens_N: np.ndarray) -> np.ndarray:
        """The number of leading tokens [S] that each slot shares with `tokens_N`, in complete blocks."""
        hashes_K = self._hash_blocks(tokens_N)[: self._hashes_SK.shape[1]]
        shared_S = np.zeros(len(self._hashes_SK), dtype=np.int64)
        if len(
            hashes_K
        ):  # a prefix ends at the first block that differs, and no later hash is equal then: counting is enough
            slots = np.flatnonzero(self._hashes_SK[:, 0] == hashes_K[0])
            shared_S[slots] = (self._hashes_SK[slots, : len(hashes_K)] == hashes_K).sum(axis=1) * BLOCK
        return shared_S

    def _hash_blocks(self, tokens_N: np.ndarray) -> np.ndarray:
        """One hash [K] for each complete block: a polynomial in _PRIME over all tokens up to the end of the block."""
        if len(tokens_N) > len(self._powers_C):
            self._powers_C = np.full(2 * len(tokens_N), _PRIME, dtype=np.uint64).cumprod()
        terms_N = (tokens_N.astype(np.uint64) + np.uint64(1)) * self._powers_C[: len(tokens_N)]
        return terms_N.cumsum()[BLOCK - 1 :: BLOCK]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The first `tokens` tokens are the same in all requests of a group. Each request of the step is in one group."""

    tokens: int
    groups: Sequence[np.ndarray]
    """Indices into the batch, in ascending order."""


NOTHING_SHARED = SharedPrefix(0, ())


def shared_prefix(tokens_BL: np.ndarray) -> SharedPrefix:
    """The prefix of the requests' tokens with which attention reads the fewest tokens; `NOTHING_SHARED` if no prefix pays."""
    common, num_requests = _equal_tokens(tokens_BL), len(tokens_BL)
    best = SharedPrefix(common, [np.arange(num_requests)])
    if (tokens_BL.shape[1] - common) * num_requests > SHARED_READS:
        best = _of_groups(tokens_BL)
    return best if (num_requests - len(best.groups) + 1) * best.tokens >= SHARED_READS else NOTHING_SHARED


def _of_groups(tokens_BL: np.ndarray) -> SharedPrefix:
    """The prefix of all requests, or a longer one of groups of them, with which the fewest tokens are read."""
    num_requests = len(tokens_BL)
    order = np.array(sorted(range(num_requests), key=lambda index: tokens_BL[index].tobytes()))
    sorted_BL = tokens_BL[order]
    # in this order, requests are neighbours of those with which they share most
    differs_NL = sorted_BL[1:] != sorted_BL[:-1]
    shared_N = np.where(differs_NL.any(axis=1), differs_NL.argmax(axis=1), sorted_BL.shape[1])
    candidates_X = np.unique(shared_N)
    breaks_X = (shared_N < candidates_X[:, None]).sum(axis=1)
    saved_X = (num_requests - 1 - breaks_X) * candidates_X - np.where(breaks_X, (breaks_X + 1) * GROUP_READS, 0)
    tokens = int(candidates_X[saved_X.argmax()])
    groups = np.split(order, np.flatnonzero(shared_N < tokens) + 1)
    return SharedPrefix(tokens, [np.sort(group) for group in groups])


def _equal_tokens(tokens_BL: np.ndarray) -> int:
    """The number of leading tokens that are equal in all rows."""
    equal_L = (tokens_BL == tokens_BL[:1]).all(axis=0)
    return len(equal_L) if equal_L.all() else int(equal_L.argmin())


# Slots: reuse of prefixes, allocation and eviction

FREE = -1
"""No slot, or no row."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The slot that shares the longest prefix with a prompt, and the length of that prefix in tokens."""

    slot: int = FREE
    tokens: int = 0
    state: int = 0
    """Which state of the slot's row is the one after these tokens: 0 the current one, else a snapshot. No meaning in models
    without recurrent layers."""


class PrefixCache:
    """The resident sequences. Arrays with the suffix S are indexed by slot, the tensors of `kv` by `row_S[slot]`."""

    def __init__(self, kv: KVCache, *, num_slots: int, context: int) -> None:
        self.kv = kv
        self.num_slots = num_slots
        self.context = context
        """The largest number of tokens in a sequence."""
        self.evictions = 0
        self.lost_routes: dict[int, Routes] = {}
        """The experts of the tokens of running slots that lost their rows (`ensure_capacity`), until they are taken."""
        self.layout = 0
        """A counter that changes whenever a slot has moved to another row."""
        self.row_S = np.full(num_slots, FREE, dtype=np.int64)
        self.length_S = np.zeros(num_slots, dtype=np.int64)
        """Tokens whose keys and values are in the row."""
        self.tokens_SC = np.zeros((num_slots, 0), dtype=np.int32)
        self.model_S = np.zeros(num_slots, dtype=np.int64)
        """The number of the model that has computed the row. Models with the same base weights share the cache, and no prefix."""
        self.running_S = np.zeros(num_slots, dtype=bool)
        """Whether a request is running in the slot."""
        self._prefilling_S = np.zeros(num_slots, dtype=bool)
        self._stale_S = np.zeros(num_slots, dtype=bool)  # computed, at least partly, with earlier weights
        self._ends_SK = np.zeros((num_slots, 1 + SNAPSHOTS), dtype=np.int64)
        """Tokens at whose end the snapshots of a slot were taken, 0 for none. Column 0: where its prefill ends."""
        self._last_used_S = np.zeros(num_slots, dtype=np.int64)
        self._clock = 0
        self._conversation_S: list[str | None] = [None] * num_slots
        self._slot_of: dict[str, int] = {}
        self._index = PrefixIndex(num_slots)

    # prefix search

    def longest_prefix(
        self, tokens_N: np.ndarray, model: int = 0, *, besides: int = FREE, at_least: int = 0
    ) -> tuple[PrefixMatch, PrefixMatch]:
        """The longest prefix of these tokens that the model has computed, and the longest that is being prefilled in this round.

        The slot `besides` does not count. If no prefix can have `at_least` tokens, none is searched for.
        """
        shared_S = self._index.shared_tokens(tokens_N)
        others_S = self.model_S != model
        shared_S[others_S] = -1
        if besides != FREE:
            shared_S[besides] = -1
        if int(shared_S.max()) + BLOCK <= at_least:  # the tokens after the last equal block are less than a block
            return PrefixMatch(), PrefixMatch()
        # not the slots that are being prefilled: their row may not hold the tokens yet, and all copies of a round are made
        # at the same time
        usable_S = (self.row_S != FREE) & ~self._stale_S & ~self._prefilling_S & ~others_S
        prefilling_S = self._prefilling_S & ~others_S
        if self.kv.states:
            ends_SK = self._ends_SK.copy()
            ends_SK[:, 0] = self.length_S
            computed = self._best_state(tokens_N, np.where(usable_S, shared_S, -1), ends_SK)
            return computed, self._best_state(tokens_N, np.where(prefilling_S, shared_S, -1), self._ends_SK[:, :1])
        computed = self._best_match(
            tokens_N, np.where(usable_S, np.minimum(shared_S, self.length_S), -1), self.length_S
        )
        if not prefilling_S.any():
            return computed, PrefixMatch()
        no_limit_S = np.full(self.num_slots, len(tokens_N))
        return computed, self._best_match(tokens_N, np.where(prefilling_S, shared_S, -1), no_limit_S)

    def _best_match(self, tokens_N: np.ndarray, shared_S: np.ndarray, limit_S: np.ndarray) -> PrefixMatch:
        """Extend the best match in complete blocks (`shared_S`, -1 for slots that do not count) token by token."""
        best = int(shared_S.max())
        if best < 0:
            return PrefixMatch()
        slots = np.flatnonzero(shared_S == best)
        start = best - best % BLOCK
        tail_T = tokens_N[start : start + BLOCK]
        tail_T = tail_T[: max(0, self.tokens_SC.shape[1] - start)]
        equal_M = (self.tokens_SC[slots, start : start + len(tail_T)] == tail_T).cumprod(axis=1).sum(axis=1)
        total_M = np.minimum(start + equal_M, limit_S[slots])
        slot = int(slots[total_M.argmax()])
        return PrefixMatch(slot, self.common_prefix(slot, tokens_N[: int(total_M.max())]))

    def _best_state(self, tokens_N: np.ndarray, shared_S: np.ndarray, ends_SK: np.ndarray) -> PrefixMatch:
        """The longest prefix that ends where a slot has, or will have, a state. `shared_S` are complete blocks, as above."""
        # a state after `end` tokens is of use if they are all shared; the tokens of an incomplete block are compared below
        found_SK = (ends_SK > 0) & (ends_SK <= len(tokens_N)) & (ends_SK - ends_SK % BLOCK <= shared_S[:, None])
        candidates = [(int(ends_SK[slot, kept]), int(slot), int(kept)) for slot, kept in np.argwhere(found_SK)]
        for end, slot, kept in sorted(candidates, key=lambda candidate: (-candidate[0], *candidate[1:])):
            if np.array_equal(self.tokens_SC[slot, :end], tokens_N[:end]):
                return PrefixMatch(slot, end, kept)
        return PrefixMatch()

    def own_prefix(self, slot: int, tokens_N: np.ndarray, model: int = 0) -> PrefixMatch:
        """What the idle slot of a conversation has of its next prompt."""
        if self.model_S[slot] != model:
            return PrefixMatch()
        common = self.common_prefix(slot, tokens_N)
        if not self.kv.states:
            return PrefixMatch(slot, common)
        ends = [int(self.length_S[slot]), *self._ends_SK[slot, 1:].tolist()]
        end, kept = max((end, -kept) for kept, end in enumerate([end if end <= common else 0 for end in ends]))
        return PrefixMatch(slot, end, -kept)

    def common_prefix(self, slot: int, tokens_N: np.ndarray) -> int:
        """The number of leading tokens that the slot shares with `tokens_N`, compared token by token."""
        length = len(tokens_N) if self._prefilling_S[slot] else min(len(tokens_N), int(self.length_S[slot]))
        differs_N = self.tokens_SC[slot, :length] != tokens_N[:length]
        return int(differs_N.argmax()) if differs_N.any() else length

    def recorded_routes(self, slot: int) -> Routes | None:
        """The experts that have computed the tokens of a slot; None if they are not recorded."""
        return self.kv.recorded(int(self.row_S[slot]), int(self.length_S[slot]))

    def computed_with(self, match: PrefixMatch, routes: Routes | None) -> PrefixMatch:
        """As much of a match as was computed with the experts of `routes`, as far as these go."""
        if match.slot == FREE or match.tokens == 0:
            return match
        same = self.kv.same_routes(int(self.row_S[match.slot]), match.tokens, routes)
        if same == match.tokens:
            return match
        return PrefixMatch() if self.kv.states else replace(match, tokens=same)

    def shared_prefix(self, slots_B: np.ndarray) -> SharedPrefix:
        """The leading tokens that these slots, or groups of them, share, computed with the same weights."""
        length = 0 if self._stale_S[slots_B].any() else int(self.length_S[slots_B].min())
        tokens_BL = self.tokens_SC[slots_B, :length]
        # the first tokens of different models are different, so that these share nothing
        tokens_BL[:, :1] -= (self.model_S[slots_B, None] << 25).astype(np.int32)
        return shared_prefix(tokens_BL)

    # the life of a slot

    def idle_slot_of(self, conversation: str) -> int:
        """The slot of a conversation, or FREE if it has none or a request is running in it."""
        slot = self._slot_of.get(conversation, FREE)
        return FREE if slot != FREE and self.running_S[slot] else slot

    def is_released(self, slot: int) -> bool:
        """Whether the slot is idle and its conversation is over: its contents may be overwritten."""
        return not self.running_S[slot] and self._conversation_S[slot] is None

    def start_request(self, slot: int, conversation: str, tokens_N: np.ndarray, cached: int, model: int = 0) -> None:
        """A request runs in the slot from now on. The row holds the first `cached` tokens before the prefill starts."""
        if self._slot_of.get(conversation, slot) == slot:
            self._slot_of[conversation] = slot
            self._conversation_S[slot] = conversation
        # a copied prefix may go beyond what the slot has in common with it, where a snapshot of the slot is of other tokens
        own = self.common_prefix(slot, tokens_N) if self.kv.states and self.model_S[slot] == model else 0
        self.running_S[slot] = self._prefilling_S[slot] = True
        self.model_S[slot] = model
        self.length_S[slot] = cached
        self.tokens_SC[slot, : len(tokens_N)] = tokens_N
        self._index.set(slot, tokens_N)
        self._ends_SK[slot, self._ends_SK[slot] > min(own, cached)] = 0
        self._ends_SK[slot, 0] = len(tokens_N)

    def finish_prefill(self, slot: int, length: int) -> None:
        """The first `length` tokens of the slot are in its row."""
        self.length_S[slot] = length
        self._prefilling_S[slot] = False

    def save_states(self, slots: Sequence[int]) -> None:
        """Take snapshots of the states of slots whose prompts have been prefilled."""
        new: list[tuple[int, int]] = []
        for slot in slots:
            length, (_, first, *_) = int(self.length_S[slot]), self._ends_SK[slot].tolist()
            if length in self._ends_SK[slot, 1:]:  # also if nothing was prefilled
                continue
            snapshot = 1 if first == 0 else 2
            self._ends_SK[slot, snapshot] = length
            new.append((int(self.row_S[slot]), snapshot))
        if new:
            self.kv.save_states(*zip(*new, strict=True))

    def finish_request(self, slot: int) -> None:
        """No request runs in the slot any more. Its contents stay for later turns and for other prompts."""
        self.running_S[slot] = self._prefilling_S[slot] = False
        self._clock += 1
        self._last_used_S[slot] = self._clock
        if self._stale_S[slot]:
            self._free(slot)
        else:
            self._index.set(slot, self.tokens_SC[slot, : self.length_S[slot]])

    def discard(self, slot: int) -> None:
        """The slot holds values that are not finite: free it, and overwrite its row, because a masked token counts 0 * NaN."""
        self.kv.clear_row(int(self.row_S[slot]))
        self._free(slot)

    def release(self, conversation: str) -> None:
        """The conversation is over. Its slot still serves as a source of prefixes."""
        slot = self._slot_of.pop(conversation, None)
        if slot is not None:
            self._conversation_S[slot] = None

    def invalidate(self, model: int = 0) -> None:
        """The weights of a model have changed: free its idle slots now, and running slots when their request finishes."""
        for slot in np.flatnonzero((self.row_S != FREE) & (self.model_S == model)):
            if self.running_S[slot]:
                self._stale_S[slot] = True
            else:
                self._free(int(slot))
        if self.kv.num_rows and not (self.row_S != FREE).any():
            # as a new cache: when rows are lengthened decides how products are summed up, and a run that is resumed has a new one
            self.kv.resize(0, 0)

    def clear(self) -> None:
        """Free all slots and all memory."""
        for slot in np.flatnonzero(self.row_S != FREE):
            self._free(int(slot))
        self.kv.resize(0, 0)

    def _free(self, slot: int) -> None:
        conversation = self._conversation_S[slot]
        if conversation is not None and self._slot_of.get(conversation) == slot:
            del self._slot_of[conversation]
        self._conversation_S[slot] = None
        self.row_S[slot] = FREE
        self.length_S[slot] = 0
        self._ends_SK[slot] = 0
        self._index.clear(slot)
        self.running_S[slot] = self._prefilling_S[slot] = self._stale_S[slot] = False

    # allocation and eviction

    def allocate(self, capacity: int, pinned: Collection[int]) -> int | None:
        """A slot with an empty row of at least `capacity` tokens, or None if there is no room now.

        Takes the first of: an unused row, the row of a released slot, a new row, the row of the idle slot that was used least
        recently. Slots in `pinned` keep their rows.
        """
        if self.ensure_capacity(capacity, pinned=pinned) is None:
            return None
        resident = int((self.row_S != FREE).sum())
        if resident == self.kv.num_rows:
            released = [slot for slot in self._idle_slots(pinned) if self._conversation_S[slot] is None]
            max_rows = min(self.num_slots, self.kv.max_rows(self.kv.capacity))
            if released:
                self._free(released[0])
            elif max_rows > self.kv.num_rows:
                self._resize(min(max_rows, 2 * self.kv.num_rows), self.kv.capacity)
            elif idle := self._idle_slots(pinned):
                self._evict(idle[0])
            else:
                return None
        slot = int((self.row_S == FREE).argmax())
        used_R = np.zeros(self.kv.num_rows, dtype=bool)
        used_R[self.row_S[self.row_S != FREE]] = True
        self.row_S[slot] = used_R.argmin()
        return slot

    def ensure_capacity(
        self, capacity: int, *, pinned: Collection[int] = (), preemptible: Sequence[int] = ()
    ) -> list[int] | None:
        """Make all rows at least `capacity` tokens long. Within the memory budget, longer rows may mean fewer rows: first
        idle slots are evicted (except `pinned`), then running slots are freed in the order of `preemptible`.

        Returns the running slots that lost their rows; None, and changes nothing, if there is not enough room.
        """
        if capacity <= self.kv.capacity:
            return []
        resident = int((self.row_S != FREE).sum())
        smallest = min(-(-capacity // 64) * 64, self.context, self.kv.max_capacity())
        roomy = min(max(2 * self.kv.capacity, INITIAL_CAPACITY, smallest), self.context)
        # twice the capacity if enough rows of that length fit, else only as much as is needed
        for new_capacity, min_rows in ((roomy, min(INITIAL_ROWS, self.num_slots)), (smallest, 1)):
            max_rows = min(self.num_slots, self.kv.max_rows(new_capacity))
            if max_rows >= max(min_rows, resident):
                self._resize(min(max(self.kv.num_rows, INITIAL_ROWS), max_rows), new_capacity)
                return []
        max_rows = self.kv.max_rows(smallest)
        excess = resident - max_rows
        idle = self._idle_slots(pinned)[:excess]
        preempted = list(preemptible[: excess - len(idle)])
        if max_rows == 0 or len(idle) + len(preempted) < excess:
            return None
        for slot in idle:
            self._evict(slot)
        for slot in preempted:
            routes = self.recorded_routes(slot)
            if routes is not None:
                self.lost_routes[slot] = routes
            self._free(slot)
        self._resize(max_rows, smallest)
        return preempted

    def _idle_slots(self, pinned: Collection[int]) -> list[int]:
        """Idle slots in the order of eviction: released ones first, then the least recently used."""
        idle = [int(slot) for slot in np.flatnonzero((self.row_S != FREE) & ~self.running_S) if slot not in pinned]
        return sorted(idle, key=lambda slot: (self._conversation_S[slot] is not None, self._last_used_S[slot]))

    def _evict(self, slot: int) -> None:
        """Free an idle slot. If its conversation continues, its tokens are prefilled again."""
        self.evictions += 1
        self._free(slot)

    # rows

    def _resize(self, num_rows: int, capacity: int) -> None:
        """Change the number and the capacity of the rows. Slots in rows beyond `num_rows` are moved down first."""
        displaced = np.flatnonzero(self.row_S >= num_rows)
        if len(displaced):
            used_rows = set(self.row_S.tolist())
            targets = [row for row in range(num_rows) if row not in used_rows][: len(displaced)]
            # entire rows, not `length_S` tokens: a copy of this round may still read further tokens from such a row
            self.kv.move_rows(self.row_S[displaced].tolist(), targets, min(self.kv.capacity, capacity))
            self.row_S[displaced] = targets
            self.layout += 1
        self.kv.resize(num_rows, capacity)
        if capacity > self.tokens_SC.shape[1]:
            tokens_SC = np.zeros((self.num_slots, capacity), dtype=np.int32)
            tokens_SC[:, : self.tokens_SC.shape[1]] = self.tokens_SC
            self.tokens_SC = tokens_SC
            self._index.grow(capacity)

    def compact(self, slots: Sequence[int]) -> None:
        """Move these slots into the first rows, so that attention over them reads one contiguous range of memory."""
        moving = [slot for slot in slots if self.row_S[slot] >= len(slots)]
        if not moving:
            return
        occupied = {int(self.row_S[slot]) for slot in slots}
        targets = [row for row in range(len(slots)) if row not in occupied]
        slot_at = {int(row): slot for slot, row in enumerate(self.row_S) if row != FREE}
        tokens = max(int(self.length_S[slot]) for slot in moving)
        tokens = max([tokens, *(int(self.length_S[slot_at[row]]) for row in targets if row in slot_at)])
        self.kv.swap_rows([int(self.row_S[slot]) for slot in moving], targets, tokens)
        self.layout += 1
        for slot, target in zip(moving, targets, strict=True):
            if target in slot_at:
                self.row_S[slot_at[target]] = self.row_S[slot]
            self.row_S[slot] = target
