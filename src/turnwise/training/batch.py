"""Trajectories become micro-batches: columns of tokens, shares of the average, and packing as prefix trees.

Each sampled token of weight above 0 is a target: which token, predicted from which column, with which advantage and which
weight. A target's weight is its share of the average over the batch of one optimizer step (`token_shares`). Invariant: the
division into micro-batches changes memory use and never the result.

The sequences of a micro-batch form a *prefix tree*: tokens that several sequences have in common from the beginning are
computed once, whichever groups, trajectories or segments the sequences belong to. This includes sampled tokens: two
conversations that were sampled identically up to some token share all tokens before the difference. A sampled token that
several sequences share is one *prediction* and several targets, each with its own advantage and weight. A token sees the tokens
of its own sequence, at the positions that they have in the sequence, so the result is that of separate rows (`tree.py`).

Knows turns, segments and token ids. Does not know losses, models, or where rewards and advantages come from. The packing does
not read the columns of the targets (`Targets` for the policy, `ValueTargets` for the critic): its caller makes them.

Axis suffixes in this folder: B rows, L columns, N targets, U distinct predictions, T tokens of a flat row, D hidden dimension,
H heads, V vocabulary; in tree.py others, which are listed there.
"""

from __future__ import annotations

import functools
import itertools
import math
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import torch

from turnwise.errors import GrammarError
from turnwise.models.distribution import AllowedTokens
from turnwise.models.grammar import AllowedColumn, TokenMasks
from turnwise.models.transfer import Movable, Move, to_device
from turnwise.options.algorithm import LossSection
from turnwise.training.losses import Targets
from turnwise.training.tree import FlatRow, Tree, shared_prefix
from turnwise.types import Constraint, Failure, LogprobKind, Media, Segment, Trajectory, Turn

# Columns: one segment of a trajectory as arrays, up to its last target


def logprob_kind(trajectory: Trajectory, turn: Turn) -> LogprobKind:
    """The kind of log-probability that the engine reported for a turn."""
    return turn.completion.logprob_kind if turn.completion is not None else trajectory.logprob_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One segment up to its last target, as numpy columns of equal length: one entry for each token."""

    token_ids: np.ndarray
    turn: np.ndarray
    version: np.ndarray
    logprobs: np.ndarray
    """0 where `known` is false."""
    known: np.ndarray
    """Whether the loss can use the log-probability of the token."""
    advantages: np.ndarray
    """0 where the token is no target."""
    values: np.ndarray | None
    """The critic's estimates; None without a critic."""
    weights: np.ndarray
    """Weight of the token's turn; 0 where the token is no target."""
    number: int
    """`Targets.sequence_N` of its tokens."""
    share: float
    """Share of a token of weight 1 in the batch's average."""
    sources: tuple[tuple[str, int], ...]
    """The segments that it stands for: the id of the trajectory, and the index of the segment."""
    media: Sequence[Media]
    routes: np.ndarray | None
    """The experts of each token (`PackedSequence.routes`)."""
    allowed: AllowedColumn | None = None
    """What a grammar allowed at each token (`PackedSequence.allowed`)."""
    teacher: np.ndarray | None = None
    """The scores of each token by the teacher, [T, 1 + 2K] (`Trajectory.teacher_scores`); 0 where it was not sampled."""
    teacher_shares: tuple[float, ...] = ()
    """`Trajectory.teacher_shares`."""

    @property
    def is_target(self) -> np.ndarray:
        """Whether the token is trained on."""
        return self.weights > 0

    @property
    def copies(self) -> int:
        """The segments that it stands for."""
        return len(self.sources)

    def identity(self) -> bytes:
        """Equal for two branches that differ in nothing but the rounding of log-probabilities, so that one can stand for both."""
        # media by the tensors themselves: a group shares those of its prompt
        seen = np.array([(id(media.inputs), media.start) for media in self.media], dtype=np.int64)
        columns = (self.token_ids, self.turn, self.advantages, self.weights, self.version, self.known, seen)
        routes = b"" if self.routes is None else self.routes.tobytes()
        scores = b"" if self.teacher is None else self.teacher.tobytes()
        allowed = b"" if self.allowed is None else self.allowed.identity()
        more = (routes, scores, allowed, repr(self.teacher_shares).encode())
        return b"".join([*(column.tobytes() for column in columns), *more])


def branches_of(
    trajectory: Trajectory,
    kinds: Collection[LogprobKind],
    shares: Sequence[float],
    sequence_numbers: Iterator[int],
    masks: TokenMasks | None = None,
) -> Iterator[Branch]:
    """The segments of a trajectory that have targets. `shares`: `Branch.share` for each segment; `masks` computes what grammars
    allowed.

    Raises ValueError if an advantage per token has another length than its turn has sampled tokens, and GrammarError if the
    tokens of a turn with a constraint are not those that its grammar allows.
    """
    turn_weights = np.array([turn.weight for turn in trajectory.turns], dtype=np.float64)
    known_turns = np.array([logprob_kind(trajectory, turn) in kinds for turn in trajectory.turns], dtype=bool)
    of_advantages = _token_columns(trajectory, trajectory.advantages, "advantages")
    of_values: Sequence[np.ndarray | None] = [None] * len(trajectory.segments)
    if trajectory.values:
        of_values = _token_columns(trajectory, trajectory.values, "values")
    columns = zip(trajectory.segments, shares, of_advantages, of_values, _teacher_scores(trajectory), strict=True)
    for index, (segment, share, advantages, values, scores) in enumerate(columns):
        turn = np.array(segment.turn, dtype=np.int64)
        # turn_weights[-1] is the last turn's weight, which must not count for tokens that the model did not sample
        weights = np.where(turn >= 0, turn_weights[turn], 0.0)
        targets = np.flatnonzero(weights)
        if not len(targets):
            continue
        end = int(targets[-1]) + 1  # nothing is predicted from the tokens after the last target
        turn, weights = turn[:end], weights[:end]
        known = known_turns[turn]
        logprobs = np.array(segment.logprobs[:end], dtype=np.float32)
        yield Branch(
            token_ids=np.array(segment.token_ids[:end], dtype=np.int64),
            turn=turn,
            version=np.array(segment.version[:end], dtype=np.int64),
            logprobs=np.where(known, logprobs, np.float32(0.0)),
            known=known,
            advantages=np.where(weights > 0, advantages[:end], np.float32(0.0)),
            values=None if values is None else values[:end],
            weights=weights,
            number=next(sequence_numbers),
            share=share,
            sources=((trajectory.id, index),),
            media=[media for media in segment.media if media.start < end],
            routes=routes_of(segment, end),
            allowed=_allowed_of(trajectory, segment, weights, masks),
            teacher=None if scores is None else scores[:end],
            teacher_shares=trajectory.teacher_shares,
        )


def _allowed_of(
    trajectory: Trajectory, segment: Segment, weights: np.ndarray, masks: TokenMasks | None
) -> AllowedColumn | None:
    """What grammars allowed at the first tokens of a segment, as many as have `weights`; None if its targets had none."""
    constrained = _constrained_turns(trajectory, segment, weights)
    if not constrained:
        return None
    if masks is None:
        raise GrammarError(
            f"trajectory {trajectory.id} has turns that a grammar constrained, and nothing here computes the masks of their "
            f"tokens: their log-probabilities would be those of another distribution"
        )
    return masks.column(segment.token_ids, len(weights), constrained)


def _constrained_turns(trajectory: Trajectory, segment: Segment, weights: np.ndarray) -> list[tuple[Constraint, int]]:
    """The constraints of the turns with a weight in a segment, each with the place after the turn's last token."""
    turn = np.array(segment.turn, dtype=np.int64)[: len(weights)]
    return [
        (constraint, int(np.flatnonzero(turn == index)[-1]) + 1)
        for index in np.unique(turn[weights > 0]).tolist()
        if (constraint := trajectory.turns[index].constraint) is not None
    ]


def routes_of(segment: Segment, end: int) -> np.ndarray | None:
    """The experts of the first `end` tokens, int16 [T, layers, experts of a token], -1 where they are not known; None if the
    engine did not record them."""
    routes = segment.routes
    if routes is None:
        return None
    shape = (-1, routes.layers, routes.top_k)
    numbers = np.frombuffer(routes.data, dtype=f"<u{routes.number_bytes}").reshape(shape)[:end].astype(np.int16)
    unknown = np.full((end - len(numbers), *numbers.shape[1:]), -1, dtype=np.int16)
    return np.concatenate([numbers, unknown])


def _token_columns(trajectory: Trajectory, entries: Sequence[float | Sequence[float]], name: str) -> list[np.ndarray]:
    """The entry of each token, a float32 column for each segment; 0 where the model did not sample the token. `entries` are
    `Trajectory.advantages`, or others in that form, and `name` is their name.

    Raises ValueError if an entry is a sequence, and its turn has another number of sampled tokens.
    """
    turns = [np.array(segment.turn, dtype=np.int64) for segment in trajectory.segments]
    if all(isinstance(entry, float | int) for entry in entries):
        values = np.array(entries, dtype=np.float32)
        return [np.where(turn >= 0, values[turn], np.float32(0.0)) for turn in turns]
    columns = [np.zeros(len(turn), dtype=np.float32) for turn in turns]
    for index, entry in enumerate(entries):
        places = [np.flatnonzero(turn == index) for turn in turns]
        count = sum(len(place) for place in places)
        values = np.array([entry] * count if isinstance(entry, float | int) else entry, dtype=np.float32)
        if len(values) != count:
            raise ValueError(
                f"trajectory {trajectory.id}: turn {index} has {count} sampled tokens and {len(values)} {name}; an entry "
                f"of Trajectory.{name} is one number, or one number for each sampled token of the turn in the segments"
            )
        for column, place in zip(columns, places, strict=True):
            column[place], values = values[: len(place)], values[len(place) :]
    return columns


def _teacher_scores(trajectory: Trajectory) -> list[np.ndarray | None]:
    """The scores of each token by the teacher, a column for each segment; 0 where the model did not sample the token."""
    if not trajectory.teacher_scores:
        return [None] * len(trajectory.segments)
    turns = [np.array(segment.turn, dtype=np.int64) for segment in trajectory.segments]
    width = next(len(rows[0]) for rows in trajectory.teacher_scores if len(rows))
    columns = [np.zeros((len(turn), width), dtype=np.float64) for turn in turns]
    for index, rows in enumerate(trajectory.teacher_scores):
        left = np.array(rows, dtype=np.float64).reshape(-1, width)
        for column, turn in zip(columns, turns, strict=True):
            places = np.flatnonzero(turn == index)
            column[places], left = left[: len(places)], left[len(places) :]
    return list(columns)


# Average: the share of each token in the loss of a batch


def weight_sums(trajectory: Trajectory) -> tuple[list[float], int]:
    """For each segment, the sum of the weights of its sampled tokens; and the number of tokens with a weight above 0."""
    # counted in the segments: the turn's completion still has the tokens that an environment removed (`Reply.resume`)
    weights = [turn.weight for turn in trajectory.turns]
    counts = [_counts(segment) for segment in trajectory.segments]
    sums = [float(sum(weights[turn] * count for turn, count in segment.items())) for segment in counts]
    return sums, sum(count for segment in counts for turn, count in segment.items() if weights[turn] > 0)


def token_shares(weight_sums: Sequence[Sequence[float]], options: LossSection) -> list[list[float]]:
    """The factor of a token of weight 1 in the loss, for each segment of each trajectory; 0 for segments without weight.

    `weight_sums` has the sum of the weights of the tokens of each segment, for each trajectory that counts in the average:

    - `token`: 1 / the sum of all weights.
    - `trajectory`: 1 / (the number of trajectories x the sum of the trajectory's weights).
    - `sequence`: 1 / (the number of segments with weight x the sum of the segment's weights).
    - `constant`: 1 / (the number of trajectories x `constant_length`). Dr. GRPO, arXiv 2503.20783.

    Example: two segments of 3 and 1 tokens in the first trajectory, one of 4 in the second, all tokens of weight 1::

        weight_sums = [[3, 1], [4]]    token: [[1/8, 1/8], [1/8]]    trajectory: [[1/8, 1/8], [1/8]]
        sequence: [[1/9, 1/3], [1/12]]    constant, length 10: [[1/20, 1/20], [1/20]]

    Raises ValueError if `constant` has no length above 0.
    """
    normalizer, constant_length = options.normalizer, options.constant_length
    if normalizer == "constant" and (constant_length is None or constant_length <= 0):
        raise ValueError(f"the normalizer 'constant' divides by constant_length={constant_length}: it must be above 0")
    trajectories = len(weight_sums)
    segments = sum(weight > 0 for sums in weight_sums for weight in sums)
    total = sum(weight for sums in weight_sums for weight in sums)

    def divisor(sums: Sequence[float], weight: float) -> float:
        if normalizer == "token":
            return total
        if normalizer == "trajectory":
            return trajectories * sum(sums)
        return segments * weight if normalizer == "sequence" else trajectories * float(constant_length or 0)

    return [[1.0 / divisor(sums, weight) if weight > 0 else 0.0 for weight in sums] for sums in weight_sums]


def _counts(segment: Segment) -> Counter[int]:
    counts = Counter(segment.turn)
    del counts[-1]  # tokens that the model did not sample
    return counts


# Packing: which sequences share a micro-batch

_CUT_TOKENS = 64
"""A further micro-batch costs as much as this number of tokens, besides the tokens that are in it."""
_CPU_TOKENS, _LARGE_CPU_TOKENS, _ACCELERATOR_TOKENS = 2048, 3072, 16384
"""Tokens of a forward pass where the recipe gives no number."""


class PackedSequence(Protocol):
    """A token sequence with targets."""

    @property
    def token_ids(self) -> np.ndarray:
        """The tokens, up to the last target."""
        ...

    @property
    def is_target(self) -> np.ndarray:
        """Whether a token is a target: one entry for each token."""
        ...

    @property
    def media(self) -> Sequence[Media]:
        """The images and videos in the sequence."""
        ...

    @property
    def routes(self) -> np.ndarray | None:
        """The experts that computed each token when the sequence was sampled, int16 [T, L, K], -1 where they are not known;
        None if they were not recorded. A prefix is shared by sequences whose experts are the same, too."""
        ...

    @property
    def allowed(self) -> AllowedColumn | None:
        """What a grammar allowed at each token; None if no target was constrained."""
        ...

    @property
    def copies(self) -> int:
        """How many equal segments the sequence stands for."""
        ...


Packed = TypeVar("Packed", bound=PackedSequence)
Columns = TypeVar("Columns", bound=Movable)
"""Tensors with one entry for each target."""


class Share(Protocol):
    """What a process computes of a micro-batch that several compute together: the values of some predictions."""

    def moved(self, move: Move) -> Self:
        """The same with other tensors (`Movable.moved`)."""
        ...

    def places(self, *, each: bool) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Which of the process's predictions (None: all, in their order) have which numbers among all predictions [U]; `each`:
        among all targets [N]."""
        ...

    def joined(self, value_C: torch.Tensor, *, each: bool) -> torch.Tensor:
        """The values [U], or [N], of all predictions from those of this process. The gradient of a value goes to the process that
        has computed it."""
        ...

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of values of a process's tokens over all processes with other tokens. Each has the gradient of its part."""
        ...


@dataclass(frozen=True, slots=True)
class MicroBatch(Generic[Columns]):
    """The input of one forward pass, and its N targets: either rows padded on the right, or one flat row of prefix trees.

    Example: prompt `P P`, completions `a b`, `a c` and `d`, as a tree::

        token_ids_BL = P P a b c d
        position_BL  = 0 1 2 3 3 2
        predictions:   a from column 1, d from column 1, b from column 2, c from column 2
        targets:       a b, a c, d: prediction_N = 0 2 0 3 1
    """

    token_ids_BL: torch.Tensor
    position_BL: torch.Tensor
    tree: Tree | None
    """The prefix trees of a flat row; None for padded rows."""
    row_U: torch.Tensor
    """The row of a prediction."""
    column_U: torch.Tensor
    """The column whose logits predict the token."""
    token_U: torch.Tensor
    """The token that is predicted. No two predictions are equal in row, column and token."""
    prediction_N: torch.Tensor
    """The prediction of each target: an index into the columns with the axis U."""
    targets: Columns
    media_B: Sequence[Sequence[Media]] = ()
    """The images and videos in each row; empty if no row has any."""
    count_T: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """How often each token of the pass counts in means over tokens, float32, rows one after the other: the number of segments in
    which it precedes a target; 0 for padding and after the token that predicts the last target of a sequence."""
    routes_TLK: torch.Tensor | None = None
    """The experts of each token in each layer when it was sampled, int16, -1 where they are not known; None if no sequence has
    any."""
    allowed: AllowedTokens | None = None
    """What grammars allowed at each prediction; None if no prediction was constrained."""
    sequences: Mapping[int, PackedSequence] = field(default_factory=dict)
    """The sequences in the order of their targets, by their places in the batch, for `pack_again`."""
    kept_N: torch.Tensor | None = None
    """Which targets of the sequences are still in `targets`; None: all. Rollout correction leaves some out."""
    share: Share | None = None
    """Where several processes compute the micro-batch together: what is this process's; None: it computes all. The columns of
    tokens, `row_U` and `column_U` are then those of its own tokens and predictions, all others those of all."""
    own_T: torch.Tensor | None = None
    """The places in the rows of this process's tokens, where it has a part of rows with images: `token_ids_BL` and `position_BL`
    are then those of the whole rows, into which a model puts the images. None: it has all tokens of `token_ids_BL`."""

    @property
    def num_tokens(self) -> int:
        """The tokens that this process computes, padding included."""
        return self.token_ids_BL.numel() if self.own_T is None else len(self.own_T)

    def to(self, device: torch.device) -> Self:
        """The same on another device, without the sequences, in one copy."""
        return to_device(self, device)

    def moved(self, move: Move) -> Self:
        """The same with other tensors (`Movable.moved`), without the sequences."""
        return replace(
            self,
            token_ids_BL=move(self.token_ids_BL),
            position_BL=move(self.position_BL),
            tree=None if self.tree is None else self.tree.moved(move),
            row_U=move(self.row_U),
            column_U=move(self.column_U),
            token_U=move(self.token_U),
            prediction_N=move(self.prediction_N),
            targets=self.targets.moved(move),
            count_T=move(self.count_T),
            routes_TLK=None if self.routes_TLK is None else move(self.routes_TLK),
            allowed=None if self.allowed is None else self.allowed.moved(move),
            sequences={},
            kept_N=None,
            share=None if self.share is None else self.share.moved(move),
            own_T=None if self.own_T is None else move(self.own_T),
        )


def default_micro_batch_tokens(device: torch.device, *, large: bool = False) -> int:
    """Tokens of a forward pass where the recipe gives no number. `large`: of a large model, one micro-batch at a time."""
    on_cpu = _LARGE_CPU_TOKENS if large else _CPU_TOKENS
    return on_cpu if device.type == "cpu" else _ACCELERATOR_TOKENS


def pack_sequences(
    sequences: Sequence[Packed],
    targets: Callable[[Sequence[Packed]], Columns],
    *,
    micro_batch_tokens: int,
    parallel: int = 1,
    share_prompts: bool = True,
) -> list[MicroBatch[Columns]]:
    """Pack sequences into micro-batches of at most `micro_batch_tokens` tokens; a longer sequence is a micro-batch alone.

    `targets` gives the columns of the targets of some sequences, in the order of the sequences and their tokens. `parallel`
    micro-batches are computed at the same time: there are as many as keep all workers busy, of similar sizes. Sequences with
    images, and all sequences without `share_prompts`, are rows of their own.
    """
    shared = [sequence for sequence in sequences if share_prompts and not sequence.media]
    separate = [sequence for sequence in sequences if not share_prompts or sequence.media]
    keys = {id(sequence): _keys(sequence) for sequence in shared}
    numbers = {id(sequence): number for number, sequence in enumerate(sequences)}
    rows = [(part, True) for part in _divide(shared, keys, micro_batch_tokens, parallel=parallel)]
    rows += [(part, False) for part in _by_length(separate, micro_batch_tokens)]
    return [
        replace(
            _flat_row(part, targets(part), keys) if flat else _padded_rows(part, targets(part)),
            sequences={numbers[id(sequence)]: sequence for sequence in part},
        )
        for part, flat in rows
    ]


def pack_again(micro_batches: Sequence[MicroBatch[Columns]], micro_batch_tokens: int) -> list[MicroBatch[Columns]]:
    """The same sequences and targets as in these micro-batches of one batch, in micro-batches of at most so many tokens.

    They are divided as `pack_sequences` divides them with this number, one micro-batch at a time, and the columns of the targets
    are copied: also what was computed since they were packed. Micro-batches without a target are left out.
    """
    found = {number: sequence for micro in micro_batches for number, sequence in micro.sequences.items()}
    places = {id(sequence): place for micro in micro_batches for sequence, place in _places_of_targets(micro)}
    packed = pack_sequences(
        [found[number] for number in sorted(found)],
        lambda part: _joined_columns([places[id(sequence)] for sequence in part]),
        micro_batch_tokens=micro_batch_tokens,
        share_prompts=any(micro.tree is not None for micro in micro_batches),
    )
    if all(micro.kept_N is None for micro in micro_batches):
        return packed
    kept = [torch.cat([places[id(sequence)].kept_N for sequence in micro.sequences.values()]) for micro in packed]
    return [
        replace(micro, prediction_N=micro.prediction_N[kept_N], kept_N=kept_N)
        for micro, kept_N in zip(packed, kept, strict=True)
        if bool(kept_N.any())
    ]


@dataclass(frozen=True, slots=True)
class _PlaceOfTargets:
    """Where the targets of a sequence are in the columns of its micro-batch, and which of its targets these are."""

    columns: Any
    start: int
    end: int
    kept_N: torch.Tensor


def _places_of_targets(micro: MicroBatch[Any]) -> Iterator[tuple[PackedSequence, _PlaceOfTargets]]:
    kept_N = torch.ones(len(micro.prediction_N), dtype=torch.bool) if micro.kept_N is None else micro.kept_N
    start, following = 0, 0
    for sequence in micro.sequences.values():
        first, following = following, following + int(sequence.is_target.sum())
        own_N = kept_N[first:following]
        end = start + int(own_N.sum())
        yield sequence, _PlaceOfTargets(micro.targets, start, end, own_N)
        start = end


def _joined_columns(places: Sequence[_PlaceOfTargets]) -> Any:
    """The columns at all these places, one after the other; what is no column is that of the first."""
    first = places[0].columns
    columns = {
        column.name: torch.cat([getattr(place.columns, column.name)[place.start : place.end] for place in places])
        for column in fields(first)
        if isinstance(getattr(first, column.name), torch.Tensor)
    }
    return replace(first, **columns)


def _divide(sequences: Sequence[Packed], keys: _Keys, micro_batch_tokens: int, *, parallel: int) -> list[list[Packed]]:
    """Divide sequences into micro-batches, in lexicographic order: the largest micro-batch is the first.

    Neighbors share the longest prefixes in this order. If micro-batches are computed in parallel, the limit is lowered as far as
    their number allows, so that they have similar sizes and no worker waits for the last one.
    """
    # big-endian bytes sort as the numbers themselves
    ordered = sorted(sequences, key=lambda sequence: keys[id(sequence)].astype(">u8").tobytes())
    if not ordered:
        return []
    lengths = np.array([len(sequence.token_ids) for sequence in ordered])
    neighbors = itertools.pairwise(keys[id(sequence)] for sequence in ordered)
    shared = np.array([0, *(shared_prefix(*pair) for pair in neighbors)])
    cuts, sizes = _cut(lengths, shared, micro_batch_tokens)
    if parallel > 1 and int((lengths - shared).sum()) > parallel * _CUT_TOKENS:
        # `_cut` minimises tokens, not the largest size: 5 sequences of 500 tokens with the limit 2048 are [500, 2000], and one of
        # two workers waits. So search for the smallest limit that needs no more rounds of `parallel` micro-batches:
        # 1250 gives [500, 1000, 1000], which is one too many, 1625 gives [1000, 1500].
        # Invariant: `cuts` are at most `most` micro-batches of at most `high` tokens (a longer sequence is alone). A smaller
        # difference than the cost of a micro-batch is not worth a further step of the search.
        most = -(-len(sizes) // parallel) * parallel
        low, high = max(sizes) // (2 * parallel), max(sizes)
        while high - low > _CUT_TOKENS:
            middle = (low + high) // 2
            other_cuts, other_sizes = _cut(lengths, shared, middle)
            if len(other_sizes) <= most:
                cuts, sizes, high = other_cuts, other_sizes, min(middle, max(other_sizes))
            else:
                low = middle
    parts = [ordered[start:end] for start, end in itertools.pairwise(cuts)]
    return [parts[index] for index in sorted(range(len(parts)), key=lambda index: -sizes[index])]


_FACTOR = np.uint64(0x9E3779B97F4A7C55)


_Keys = Mapping[int, np.ndarray]
"""The keys of each sequence, by its `id`."""


def _keys(sequence: PackedSequence) -> np.ndarray:
    """A number for each token, uint64: two tokens with different experts have different numbers."""
    ids = sequence.token_ids.astype(np.uint64)
    if sequence.routes is None:
        return ids
    experts = (sequence.routes.reshape(len(ids), -1).astype(np.int64) + 2).astype(np.uint64)
    powers = np.full(experts.shape[1] + 1, _FACTOR, dtype=np.uint64).cumprod()
    # a hash of 64 bits, because whole routes would make long keys: two different tokens have the same number by chance once in
    # 1e19 comparisons
    mixed = (experts * powers[1:]).sum(axis=1) + (ids + np.uint64(1)) * powers[0]
    return mixed ^ (mixed >> np.uint64(29))


def _cut(lengths: np.ndarray, shared: np.ndarray, limit: int) -> tuple[list[int], list[int]]:
    """Where to cut a row of sequences into micro-batches of at most `limit` tokens; a longer sequence is a micro-batch alone.

    `shared` are the tokens that each sequence shares with the sequence before it. Each cut computes the prefix at the cut a
    second time. The cuts are those with the smallest number of tokens in all micro-batches, by dynamic programming. Returns the
    cuts, from 0 to the number of sequences, and the tokens of each micro-batch.
    """
    # own[j] - own[i]: tokens of the sequences i to j - 1, without the prefixes that they share with the sequence before them
    own = np.concatenate([[0], np.cumsum(lengths - shared)])
    # A micro-batch of the sequences i to j - 1 computes all of sequence i, because the prefix that it shares is in another
    # micro-batch, and of each later sequence what it does not share: lengths[i] + own[j] - own[i + 1]. So its size is a number
    # of i plus a number of j, opening[i] + own[j]. Sequences `p q a b`, `p q a c`, `p q x`:
    #     lengths = 4 4 3   shared = 0 3 2   own = 0 4 5 6   opening = 0 -1 -3
    #     all three: opening[0] + own[3] = 6 (p q a b c x)   the last two: opening[1] + own[3] = 5 (p q a c x)
    opening = lengths - own[1:]
    # cost[j]: the smallest cost of the sequences 0 to j - 1; before[j]: where the last of their micro-batches begins
    cost = np.zeros(len(lengths) + 1, dtype=np.int64)
    before = np.zeros(len(lengths) + 1, dtype=np.int64)
    first = 0
    for end in range(1, len(lengths) + 1):
        # opening never rises (shared[i + 1] <= lengths[i]) and own never falls: too early for one end is too early for later ones
        while first < end - 1 and opening[first] + own[end] > limit:
            first += 1
        # own[end] is the same for all beginnings, so it changes the cost and not the choice
        costs = cost[first:end] + opening[first:end]
        before[end] = first + int(costs.argmin())
        cost[end] = costs.min() + own[end] + _CUT_TOKENS
    cuts = [len(lengths)]
    while cuts[-1]:
        cuts.append(int(before[cuts[-1]]))
    cuts.reverse()
    return cuts, [int(opening[start] + own[end]) for start, end in itertools.pairwise(cuts)]


def _by_length(sequences: Sequence[Packed], micro_batch_tokens: int) -> Iterator[list[Packed]]:
    """Sequences of similar length together, as many as fit into a micro-batch with their padding."""
    part: list[Packed] = []
    for sequence in sorted(sequences, key=lambda sequence: -len(sequence.token_ids)):
        if part and (len(part) + 1) * len(part[0].token_ids) > micro_batch_tokens:
            yield part
            part = []
        part.append(sequence)
    if part:
        yield part


def _flat_row(sequences: Sequence[PackedSequence], targets: Columns, keys: _Keys) -> MicroBatch[Columns]:
    """A single row, in which each common prefix is present once. The sequences are in lexicographic order."""
    row = FlatRow.of([sequence.token_ids for sequence in sequences], [keys[id(sequence)] for sequence in sequences])
    column_N = np.concatenate([places[_columns(one)] for one, places in zip(sequences, row.places, strict=True)])
    token_N = _target_tokens(sequences)
    # one number for each pair of column and token: equal pairs are one prediction. Token ids need fewer than 32 bits
    keys_N, allowed = column_N << 32 | token_N, _allowed(sequences)
    if allowed is not None:  # of which other tokens were allowed, too
        _, keys_N = np.unique(np.stack([keys_N, allowed.index_N.numpy()]), axis=1, return_inverse=True)
    _, first_U, prediction_N = np.unique(keys_N, return_index=True, return_inverse=True)
    return MicroBatch(
        token_ids_BL=torch.from_numpy(row.token_ids[None]),
        position_BL=torch.from_numpy(row.position[None]),
        tree=Tree.of(row.runs),
        row_U=torch.zeros(len(first_U), dtype=torch.int64),
        column_U=torch.from_numpy(column_N[first_U]),
        token_U=torch.from_numpy(token_N[first_U]),
        prediction_N=torch.from_numpy(prediction_N),
        targets=targets,
        allowed=None if allowed is None else allowed.at(torch.from_numpy(first_U)),
        **_of_tokens(sequences, row.places, len(row.token_ids)),
    )


def _padded_rows(sequences: Sequence[PackedSequence], targets: Columns) -> MicroBatch[Columns]:
    """A row for each sequence, padded on the right."""
    length = max(len(sequence.token_ids) for sequence in sequences)
    token_ids = np.zeros((len(sequences), length), dtype=np.int64)
    for row, sequence in zip(token_ids, sequences, strict=True):
        row[: len(sequence.token_ids)] = sequence.token_ids
    columns = [_columns(sequence) for sequence in sequences]
    token_N = _target_tokens(sequences)
    return MicroBatch(
        token_ids_BL=torch.from_numpy(token_ids),
        position_BL=torch.arange(length).expand(len(sequences), length),
        tree=None,
        row_U=torch.from_numpy(np.repeat(np.arange(len(sequences)), [len(column) for column in columns])),
        column_U=torch.from_numpy(np.concatenate(columns)),
        token_U=torch.from_numpy(token_N),
        prediction_N=torch.arange(len(token_N)),
        targets=targets,
        allowed=_allowed(sequences),
        media_B=[sequence.media for sequence in sequences] if any(sequence.media for sequence in sequences) else (),
        **_of_tokens(
            sequences,
            [np.arange(len(one.token_ids)) + row * length for row, one in enumerate(sequences)],
            token_ids.size,
        ),
    )


def _of_tokens(sequences: Sequence[PackedSequence], places: Sequence[np.ndarray], tokens: int) -> dict[str, Any]:
    """The columns of `tokens` tokens of a pass, in which each sequence has its tokens at `places`."""
    count = np.zeros(tokens, dtype=np.float32)
    known = next((sequence.routes for sequence in sequences if sequence.routes is not None), None)
    routes = None if known is None else np.full((tokens, *known.shape[1:]), -1, dtype=np.int16)
    for sequence, place in zip(sequences, places, strict=True):
        count[place[:-1]] += sequence.copies
        if routes is not None and sequence.routes is not None:
            routes[place] = sequence.routes
    return {"count_T": torch.from_numpy(count), "routes_TLK": None if routes is None else torch.from_numpy(routes)}


def _allowed(sequences: Sequence[PackedSequence]) -> AllowedTokens | None:
    """What grammars allowed at the targets of all sequences; None if no target was constrained."""
    columns = [(sequence.allowed, sequence.is_target) for sequence in sequences]
    width = next((column.words_MW.shape[1] for column, _ in columns if column is not None), None)
    if width is None:
        return None
    numbers: dict[bytes, int] = {}
    index: list[np.ndarray] = []
    for column, is_target in columns:
        if column is None:
            index.append(np.full(int(is_target.sum()), -1))
            continue
        own = [numbers.setdefault(words.tobytes(), len(numbers)) for words in column.words_MW]
        index.append(np.array([*own, -1])[column.index_T[is_target]])
    words = np.frombuffer(b"".join(numbers), dtype=np.int32).reshape(-1, width)
    return AllowedTokens(torch.from_numpy(words.copy()), torch.from_numpy(np.concatenate(index)))


def _columns(sequence: PackedSequence) -> np.ndarray:
    """The places that the targets are predicted from: each is the place of the token before the target."""
    return np.flatnonzero(sequence.is_target) - 1


def _target_tokens(sequences: Sequence[PackedSequence]) -> np.ndarray:
    return np.concatenate([sequence.token_ids[sequence.is_target] for sequence in sequences])


# Batch: the trajectories of one optimizer step, packed


@dataclass(frozen=True, slots=True)
class Batch:
    """The data of one optimizer step."""

    micro_batches: list[MicroBatch[Targets]]
    without_gradient: list[MicroBatch[Targets]]
    """Trajectories whose advantages are all zero, where rollout correction or the selection of tokens needs their
    log-probabilities and the loss needs nothing of them. They are not in the pass with gradients."""
    trajectories: int
    """Trajectories that count in the average, including those without a gradient."""
    tokens: int
    """Sampled tokens of those trajectories in turns with a weight above 0."""
    sequence_tokens: int
    """Tokens of the sequences in the forward pass, each sequence up to its last target."""
    computed_tokens: int
    """The same, where a prefix that sequences of a micro-batch share is counted once. Padding is not counted."""
    sources: Mapping[int, Sequence[tuple[str, int]]]
    """For each sequence (`Targets.sequence_N`), the segments with its tokens: the id of the trajectory and the index of the
    segment. Equal sequences of a group are one sequence with several segments."""


def share_saved(batches: Sequence[Batch]) -> float:
    """The share of the sequences' tokens that are not computed, because sequences of a micro-batch share prefixes."""
    tokens = sum(batch.sequence_tokens for batch in batches)
    return 1 - sum(batch.computed_tokens for batch in batches) / tokens if tokens else 0.0


def pack(
    trajectories: Sequence[Trajectory],
    *,
    loss: LossSection = LossSection(),
    micro_batch_tokens: int = 8192,
    parallel: int = 1,
    share_prompts: bool = True,
    keep_zero: bool = False,
    measure_zero: bool = False,
    compared: Collection[str] = (),
    kinds: Collection[LogprobKind] = (LogprobKind.SAMPLED,),
    version: int | None = None,
    masks: TokenMasks | None = None,
) -> Batch:
    """Pack the trajectories that have advantages.

    `loss` sets how the loss is averaged (`token_shares`): over tokens, which count by the weight of their
    turn, over segments or over trajectories, which then all count the same, or divided by a constant for each trajectory.

    Trajectories whose advantages are all zero count in the average, but are not in the forward pass, because their gradient
    is zero; `keep_zero` keeps them in, for losses with further terms, and `compared` those with these ids. `measure_zero` puts
    the others into `Batch.without_gradient`, because rollout correction and the selection of tokens are of all trajectories.
    Sequences of a group with equal tokens and equal advantages are one sequence, at the weight of all of them.

    `parallel` micro-batches are computed at the same time: there are as many as keep all workers busy, of similar sizes.

    `kinds` are the kinds of log-probability that the loss can use (`BatchRequirements.logprob_kinds`); those of other kinds
    are dropped, and `Targets.known_N` is false for their tokens. `version` is that of the weights that are trained. `masks`
    computes again what grammars allowed, for turns with a constraint.

    Turns of weight 0 (`Turn.weight`) are excluded from numerator and denominator of the average: with them in the denominator,
    the size of the gradient would depend on how much of a conversation is masked. Advantages of 0 stay in the denominator:
    without them, the other tokens would count more the fewer tokens have an advantage. Tokens of weight 0 are no targets. They
    are context, and are not computed after the last target.

    Raises ValueError if an advantage per token has another length than its turn has sampled tokens, or if the normalizer would
    divide by 0; GrammarError if the mask of a constrained turn cannot be computed again.
    """
    weighted = [(trajectory, *weight_sums(trajectory)) for trajectory in trajectories if trajectory.advantages]
    counted = [(trajectory, sums) for trajectory, sums, _ in weighted if any(sums)]
    shares = token_shares([sums for _, sums in counted], loss)
    in_loss = [keep_zero or one.id in compared or has_gradient(one) for one, _ in counted]
    merged = _branches_of_all(counted, shares, kinds, in_loss, measure_zero=measure_zero, masks=masks)
    make_targets = functools.partial(_targets, version=version)
    size = {"micro_batch_tokens": micro_batch_tokens, "parallel": parallel}
    micro_batches, without_gradient = (
        pack_sequences(part, make_targets, **size, share_prompts=share_prompts) for part in merged
    )
    branches = [branch for part in merged for branch in part]
    return Batch(
        micro_batches=micro_batches,
        without_gradient=without_gradient,
        trajectories=len(counted),
        tokens=sum(tokens for _, _, tokens in weighted),
        sequence_tokens=sum(len(branch.token_ids) for branch in branches),
        computed_tokens=_computed_tokens(branches, [*micro_batches, *without_gradient], share_prompts=share_prompts),
        sources={branch.number: branch.sources for branch in branches},
    )


def divide_evenly(trajectories: Sequence[Trajectory], parts: int) -> list[Sequence[Trajectory]]:
    """The trajectories in `parts` parts, in their order, whose sizes differ by at most 1. There are fewer parts if there are
    fewer trajectories. Example: 7 trajectories in 3 parts are 3, 2 and 2.
    """
    parts = min(parts, len(trajectories))
    ends = [0, *(len(trajectories) * part // parts for part in range(1, parts + 1))]
    return [trajectories[start:end] for start, end in itertools.pairwise(ends)]


def has_gradient(trajectory: Trajectory) -> bool:
    """Whether a token that is trained on has an advantage other than zero."""
    return any(turn.weight and trajectory.has_advantage(turn.index) for turn in trajectory.turns)


def _computed_tokens(branches: Sequence[Branch], micro_batches: Sequence[MicroBatch], *, share_prompts: bool) -> int:
    """The tokens of the forward pass: those of flat rows, and those of the sequences that share no prefix."""
    separate = sum(len(branch.token_ids) for branch in branches if not share_prompts or branch.media)
    return separate + sum(micro.token_ids_BL.numel() for micro in micro_batches if micro.tree is not None)


def stale_without_logprobs(trajectory: Trajectory, *, kinds: Collection[LogprobKind], version: int) -> Failure | None:
    """Why weights of this version cannot be trained on a trajectory, or None if they can.

    They cannot if its log-probabilities are of a kind that the loss cannot use, and older weights sampled its tokens, so that
    the log-probabilities can no longer be computed.
    """
    unknown = {turn.index: kind for turn in trajectory.turns if (kind := logprob_kind(trajectory, turn)) not in kinds}
    if not unknown:
        return None
    for segment in trajectory.segments:
        for turn, sampled_by in zip(segment.turn, segment.version, strict=True):
            if turn in unknown and sampled_by != version:
                return Failure(
                    "engine",
                    f"turn {turn} was sampled by weights of version {sampled_by}, is used to train version {version}, and "
                    f"has log-probabilities of the kind '{unknown[turn]}'; importance correction needs "
                    f"{' or '.join(sorted(kinds))}. Use an engine that reports them, or train.max_staleness=0",
                )
    return None


def outside_of_grammar(trajectory: Trajectory, masks: TokenMasks) -> Failure | None:
    """Why a trajectory cannot be trained on that has a token which the grammar of its turn does not allow, or None if it can."""
    if all(turn.constraint is None for turn in trajectory.turns):
        return None
    weights_of_turns = np.array([turn.weight for turn in trajectory.turns], dtype=np.float64)
    for segment in trajectory.segments:
        turn = np.array(segment.turn, dtype=np.int64)
        weights = np.where(turn >= 0, weights_of_turns[turn], 0.0)
        try:
            masks.check(segment.token_ids, _constrained_turns(trajectory, segment, weights))
        except GrammarError as error:
            return Failure("engine", str(error))
    return None


def _branches_of_all(
    counted: Sequence[tuple[Trajectory, list[float]]],
    shares: Sequence[Sequence[float]],
    kinds: Collection[LogprobKind],
    in_loss: Sequence[bool],
    *,
    measure_zero: bool,
    masks: TokenMasks | None,
) -> tuple[list[Branch], list[Branch]]:
    """The branches of the trajectories that are in the loss, and with `measure_zero` those of the others. Equal branches of a
    group are one."""
    sequence_numbers = itertools.count()
    parts: dict[bool, list[tuple[str, Branch]]] = {True: [], False: []}
    for (trajectory, _), shares_of_segments, trained in zip(counted, shares, in_loss, strict=True):
        if not trained and not measure_zero:
            continue
        for branch in branches_of(trajectory, kinds, shares_of_segments, sequence_numbers, masks):
            parts[trained].append((trajectory.group, branch))
    return _merge_equal(parts[True]), _merge_equal(parts[False])


def _merge_equal(branches: Sequence[tuple[str, Branch]]) -> list[Branch]:
    """Branches (with their groups), where equal branches of a group are one, with the sum of their shares."""
    merged: dict[tuple[str, bytes], Branch] = {}
    for group, branch in branches:
        key = (group, branch.identity())
        equal = merged.get(key)
        merged[key] = branch if equal is None else _joined(equal, branch)
    return list(merged.values())


def _joined(branch: Branch, equal: Branch) -> Branch:
    """The branch at the weight of both."""
    return replace(branch, share=branch.share + equal.share, sources=(*branch.sources, *equal.sources))


def _targets(branches: Sequence[Branch], *, version: int | None) -> Targets:
    """The targets of all branches, in their order."""

    def column(values: Callable[[Branch], np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([values(branch)[branch.is_target] for branch in branches]))

    return Targets(
        token_N=column(lambda branch: branch.token_ids),
        sequence_N=column(lambda branch: np.full(len(branch.turn), branch.number)),
        turn_N=column(lambda branch: branch.turn),
        version_N=column(lambda branch: branch.version),
        copies_N=column(lambda branch: np.full(len(branch.turn), len(branch.sources))),
        behaviour_logprob_N=column(lambda branch: branch.logprobs),
        known_N=column(lambda branch: branch.known),
        version=version,
        advantage_N=column(lambda branch: branch.advantages),
        value_N=column(_values) if all(branch.values is not None for branch in branches) else None,
        weight_N=column(lambda branch: (branch.share * branch.weights).astype(np.float32)),
        **_of_teachers(branches),
    )


def _values(branch: Branch) -> np.ndarray:
    assert branch.values is not None
    return branch.values


def _of_teachers(branches: Sequence[Branch]) -> dict[str, Any]:
    """The columns of `Targets` about teachers; none without teachers."""
    if branches[0].teacher_shares:
        shares = [np.tile(branch.teacher_shares, (int(branch.is_target.sum()), 1)) for branch in branches]
        return {"teacher_share_NT": torch.from_numpy(np.concatenate(shares).astype(np.float32))}
    scores = [branch.teacher[branch.is_target] for branch in branches if branch.teacher is not None]
    if not scores:
        return {}
    score_NX = torch.from_numpy(np.concatenate(scores))
    top_k = score_NX.shape[1] // 2
    return {
        "teacher_logprob_N": score_NX[:, 0].float(),
        "teacher_ids_NK": score_NX[:, 1 : 1 + top_k].long(),
        "teacher_top_logprob_NK": score_NX[:, 1 + top_k :].float(),
    }


# The trainer's log-probabilities, written into the segments beside those of the engine


def set_trainer_logprobs(
    trajectories: Sequence[Trajectory], batches: Sequence[Batch], logprobs: Sequence[Mapping[int, np.ndarray]]
) -> None:
    """Set `Segment.trainer_logprobs` of the segments that were in a forward pass. `logprobs` are `UpdateStats.logprobs`.

    Raises ValueError if a sequence has another number of log-probabilities than its segment has targets.
    """
    by_id = {trajectory.id: trajectory for trajectory in trajectories}
    for batch, of_sequences in zip(batches, logprobs, strict=False):
        for sequence, values in of_sequences.items():
            for id, index in batch.sources[sequence]:
                trajectory = by_id[id]
                weights = np.array([turn.weight for turn in trajectory.turns])
                trajectory.segments[index].trainer_logprobs = _column(trajectory.segments[index], weights, values)


def _column(segment: Segment, turn_weights: np.ndarray, values: np.ndarray) -> array[float]:
    """A value for each token of the segment. The targets are the tokens of turns with a weight above 0."""
    turn = np.array(segment.turn, dtype=np.int64)
    column = np.where(turn >= 0, np.float32(math.nan), np.float32(0.0)).astype(np.float32)
    targets = np.flatnonzero((turn >= 0) & (turn_weights[turn] > 0))
    if len(targets) != len(values):
        raise ValueError(f"a segment has {len(targets)} targets and {len(values)} log-probabilities of the trainer")
    column[targets] = values
    return array("f", column.tobytes())
