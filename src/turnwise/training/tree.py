"""Attention over prefix trees: a prefix that several sequences have in common is computed once, at any depth.

All sequences of a micro-batch are in one flat row without padding, and each common prefix is in the row once. A sequence is
therefore not contiguous in the row: its tokens continue a *context*, which another sequence has brought into the row. Only
attention has to know this. It gathers, for each run of consecutive tokens, the keys of the run's context and of the run itself,
in the order of the sequence. A token sees the keys up to its own position, or those inside the model's sliding window or chunk.

The attention is registered with transformers under a name of its own, and is the ordinary `sdpa` whenever no tree is computed.

Axis suffixes: T tokens of the flat row, N runs of at most R tokens, K keys of a run (its context and the run itself), H heads,
D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from turnwise.models.precision import (
    additive_mask,
    product_dtype,
    query_scale,
    scales_queries,
    set_text_attention,
    unsupported,
)
from turnwise.models.transfer import Move, to_device
from turnwise.training import flash_tree
from turnwise.training.flash_tree import JoinPlan

_NAME = "turnwise_tree"
_CALL_PAIRS = 16_384
"""Pairs of a query and a key that cost as much as a further call of the attention function."""
_MOST_MASKED_PAIRS = 1 << 24
"""A run with more pairs of a query and a key shares no prefix: its mask would need more memory than sharing saves."""


def shared_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """The number of leading tokens of `second` that are computed with `first`, its neighbor in lexicographic order."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    shared = int(differs.argmax()) if differs.any() else length
    return shared if (len(second) - shared) * len(second) <= _MOST_MASKED_PAIRS else 0


@dataclass(frozen=True, slots=True)
class FlatRun:
    """Consecutive tokens of the flat row that continue a context."""

    start: int
    """Place of the first token in the flat row."""
    length: int
    context: np.ndarray
    """Places of the tokens before the run in its sequence, from the first token of the sequence; empty for a root."""


@dataclass(frozen=True, slots=True)
class FlatRow:
    """Sequences in one row, in which each common prefix is present once.

    Example: the sequences `p q a b`, `p q a c` and `p q x`::

        token_ids = p q a b c x    position = 0 1 2 3 3 2
        runs      = p q a b | c with context p q a | x with context p q
        places    = [0 1 2 3], [0 1 2 4], [0 1 5]
    """

    token_ids: np.ndarray
    position: np.ndarray
    """Position of each token in its sequence."""
    runs: Sequence[FlatRun]
    places: Sequence[np.ndarray]
    """For each sequence, the places of its tokens in the row."""

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray], keys: Sequence[np.ndarray] | None = None) -> FlatRow:
        """Lay out sequences of token ids. They must be in lexicographic order, in which neighbors share the longest prefixes.

        Tokens are shared where their `keys` are equal, and the order is that of the keys; None: the token ids are the keys.
        """
        keys = sequences if keys is None else keys
        token_ids: list[np.ndarray] = []
        position: list[np.ndarray] = []
        places: list[np.ndarray] = []
        runs: list[FlatRun] = []
        start = 0
        for index, sequence in enumerate(sequences):
            shared = shared_prefix(keys[index - 1], keys[index]) if index else 0
            context = places[-1][:shared] if shared else np.empty(0, dtype=np.int64)
            length = len(sequence) - shared
            places.append(np.concatenate([context, np.arange(start, start + length)]))
            if not length:  # the same tokens as the sequence before
                continue
            runs.append(FlatRun(start, length, context))
            token_ids.append(sequence[shared:])
            position.append(np.arange(shared, len(sequence)))
            start += length
        return cls(np.concatenate(token_ids), np.concatenate(position), runs, places)


class KeyExchange(Protocol):
    """Brings the keys, and values, of tokens that other processes compute."""

    def gathered(self, key_TJD: torch.Tensor) -> torch.Tensor:
        """The keys of all processes, one after the other, from those of this process. Without a gradient."""
        ...

    def summed(self, gradient_KJD: torch.Tensor) -> torch.Tensor:
        """The gradient of this process's keys, added up over all processes, from this process's gradient of all keys."""
        ...


class _Gathered(torch.autograd.Function):
    """The keys of all processes, which are kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, key_TJD: torch.Tensor, exchange: KeyExchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.gathered(key_TJD)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.exchange.summed(gradients[0]), None


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Runs of similar size, which are computed in one call. Padding holds 0: a valid place, whose result is never read."""

    query_NR: torch.Tensor
    """Places in the flat row of each run's tokens."""
    key_NK: torch.Tensor
    """Places among the keys of the tokens of each run's context and of the run itself, in the order of the sequence."""
    position_NR: torch.Tensor
    """The index in `key_NK` of each token of a run: its position in the sequence. Padding has the position of the first token,
    because a token that sees no key would give NaN."""
    roots: bool
    """Whether no run has a context."""
    range_R: Sequence[tuple[int, int]]
    """The lowest and the highest position of each column of tokens. Not on the device, which nothing has to wait for."""
    first: int = 0
    """The position of the first of `key_NK`."""

    @classmethod
    def of(cls, runs: Sequence[FlatRun], first_key: int) -> _Bucket:
        contexts = np.array([len(run.context) for run in runs])
        lengths = np.array([run.length for run in runs])
        query_NR = np.zeros((len(runs), int(lengths.max())), dtype=np.int64)
        key_NK = np.zeros((len(runs), int((contexts + lengths).max())), dtype=np.int64)
        for row, run in enumerate(runs):
            own = np.arange(run.start, run.start + run.length)
            query_NR[row, : run.length] = own
            key_NK[row, : len(run.context)] = run.context
            key_NK[row, len(run.context) : len(run.context) + run.length] = first_key + own
        offset_R = np.arange(query_NR.shape[1])
        position_NR = contexts[:, None] + np.where(offset_R < lengths[:, None], offset_R, 0)
        return cls(
            torch.from_numpy(query_NR),
            torch.from_numpy(key_NK),
            torch.from_numpy(position_NR),
            not contexts.any(),
            list(zip(position_NR.min(axis=0).tolist(), position_NR.max(axis=0).tolist(), strict=True)),
        )

    def moved(self, move: Move) -> _Bucket:
        """The same with other tensors (`Movable.moved`)."""
        moved = (move(self.query_NR), move(self.key_NK), move(self.position_NR))
        return _Bucket(*moved, self.roots, self.range_R, self.first)

    def pieces(self, pairs: int, window: int | None = None, *, chunked: bool = False) -> Iterator[_Bucket]:
        """The bucket in pieces with some of the tokens of each run, and the keys that they see, of at most `pairs` pairs of a
        query and a key if a piece has more than one token of a run. Their results follow one another along R. `window` and
        `chunked` as in `mask`."""
        (runs, longest), keys = self.query_NR.shape, self.key_NK.shape[1]
        most = pairs // runs
        step = most // keys
        if window is not None:  # a piece of s columns has at most s + width keys
            width = window + max(high - low for low, high in self.range_R)
            step = max(step, (math.isqrt(width * width + 4 * most) - width) // 2)
        step = max(1, min(longest, step))
        for start in range(0, longest, step):
            range_R = self.range_R[start : start + step]
            low, high = min(low for low, _ in range_R), max(high for _, high in range_R)
            first = 0 if window is None else (low // window * window if chunked else max(0, low - window + 1))
            yield _Bucket(
                self.query_NR[:, start : start + step],
                self.key_NK[:, first : high + 1],
                self.position_NR[:, start : start + step],
                False,
                range_R,
                first,
            )

    def mask(self, window: int | None, *, chunked: bool = False) -> torch.Tensor | None:
        """Which keys a token sees, [N, 1, R, K]; None if causal attention without a mask gives the same.

        `window`: of a sliding window, or the length of a chunk, if attention is `chunked`.
        """
        keys = self.key_NK.shape[1]
        if self.roots and (window is None or keys <= window):
            return None
        key_K = torch.arange(self.first, self.first + keys, device=self.key_NK.device)
        position_NR1 = self.position_NR.unsqueeze(-1)
        seen_NRK = key_K <= position_NR1
        if window is not None and chunked:
            seen_NRK &= key_K // window == position_NR1 // window
        elif window is not None:
            seen_NRK &= key_K > position_NR1 - window
        return seen_NRK.unsqueeze(1)

    def heads(
        self, query_THD: torch.Tensor, key_THD: torch.Tensor, value_THD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [N, H, R, D], keys and values [N, H, K, D] of the runs."""
        places = (self.query_NR, self.key_NK, self.key_NK)
        tensors = zip((query_THD, key_THD, value_THD), places, strict=True)
        query_NHRD, key_NHKD, value_NHKD = (tensor_THD[place].transpose(1, 2) for tensor_THD, place in tensors)
        return query_NHRD, key_NHKD, value_NHKD

    def attend(
        self,
        query_THD: torch.Tensor,
        key_THD: torch.Tensor,
        value_THD: torch.Tensor,
        mask_N1RK: torch.Tensor | None,
        scaling: float | None,
        sink_H: torch.Tensor | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Attention of the runs, [N * R, H, D], in operations of torch that have a gradient."""
        query_NHRD, key_NHKD, value_NHKD = self.heads(query_THD, key_THD, value_THD)
        if softcap is not None:
            output_NHRD = _with_soft_cap(query_NHRD, key_NHKD, value_NHKD, mask_N1RK, softcap, scaling)
            return output_NHRD.transpose(1, 2).flatten(0, 1)
        if sink_H is not None:
            output_NHRD = _with_sinks(query_NHRD, key_NHKD, value_NHKD, mask_N1RK, sink_H, scaling)
            return output_NHRD.transpose(1, 2).flatten(0, 1)
        # the fast kernels take no mask together with grouped heads
        grouped = mask_N1RK is None
        if not grouped:
            repeats = query_THD.shape[1] // key_THD.shape[1]
            key_NHKD, value_NHKD = (heads.repeat_interleave(repeats, dim=1) for heads in (key_NHKD, value_NHKD))
        # keys have their rotary positions already, so a run continues at the position after its context, and its place in the
        # flat row does not matter
        output_NHRD = F.scaled_dot_product_attention(
            query_NHRD,
            key_NHKD,
            value_NHKD,
            attn_mask=mask_N1RK,
            is_causal=mask_N1RK is None,
            scale=scaling,
            enable_gqa=grouped,
        )
        return output_NHRD.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class WholeRow:
    """A row of which each process has a part, for layers that need all tokens before a token."""

    runs: Sequence[FlatRun]
    """Those of all tokens."""
    key_T: torch.Tensor
    """The place of each token of the row among those of all processes, one process after the other."""
    own_T: torch.Tensor
    """The places in the row of this process's tokens."""

    def moved(self, move: Move) -> Self:
        """The same with other tensors (`Movable.moved`)."""
        return replace(self, key_T=move(self.key_T), own_T=move(self.own_T))


@dataclass(frozen=True, slots=True)
class Tree:
    """Index tensors of a flat row, for the attention."""

    buckets: Sequence[_Bucket]
    place_T: torch.Tensor
    """Place of each token's result among the results of all buckets, padding included."""
    runs: Sequence[FlatRun]
    memo: dict[str, Any] = field(default_factory=dict, compare=False)
    """What layers of one kind have derived from the runs, once for all of them."""
    accelerated: bool = False
    """Whether attention is computed as on an accelerator, which keeps the gathered keys for the backward pass."""
    first_key: int = 0
    """The place among the keys of the flat row's first token."""
    exchange: KeyExchange | None = None
    """Where some keys are those of other processes; None: the keys are those of the flat row."""
    whole: WholeRow | None = None
    """The row of all processes, if there is an `exchange`."""
    assumes_flash: bool = False
    """Whether the flash kernel is taken to be there, for a pass on tensors without contents that stands for one on a GPU."""

    @classmethod
    def of(
        cls,
        runs: Sequence[FlatRun],
        *,
        first_key: int = 0,
        exchange: KeyExchange | None = None,
        whole: WholeRow | None = None,
    ) -> Tree:
        """The index tensors of runs that fill the flat row without gaps. With an `exchange`, contexts are places among the keys
        of all processes, where the row's own begin at `first_key`."""
        groups = list(_by_size(runs))
        place_T = np.empty(sum(run.length for run in runs), dtype=np.int64)
        start = 0
        for group in groups:
            longest = max(run.length for run in group)
            for run in group:
                place_T[run.start : run.start + run.length] = np.arange(start, start + run.length)
                start += longest
        buckets = [_Bucket.of(group, first_key) for group in groups]
        return cls(buckets, torch.from_numpy(place_T), runs, first_key=first_key, exchange=exchange, whole=whole)

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        return to_device(self, device)

    def moved(self, move: Move) -> Self:
        """The same with other tensors (`Movable.moved`)."""
        buckets, place_T = [bucket.moved(move) for bucket in self.buckets], move(self.place_T)
        whole = None if self.whole is None else self.whole.moved(move)
        return replace(self, buckets=buckets, place_T=place_T, accelerated=place_T.device.type != "cpu", whole=whole)

    def with_all_tokens(
        self, hidden_TD: torch.Tensor, compute: Callable[[torch.Tensor, Sequence[FlatRun]], torch.Tensor]
    ) -> torch.Tensor:
        """What `compute` gives for this process's tokens, from the hidden states and runs of the tokens of all processes. Each
        computes all tokens, and the gradients of its own results."""
        if self.exchange is None or self.whole is None:
            return compute(hidden_TD, self.runs)
        whole = self.whole
        all_TD = _Gathered.apply(hidden_TD, self.exchange).index_select(0, whole.key_T)
        return compute(all_TD, whole.runs).index_select(0, whole.own_T)

    def join_plan(self, device: torch.device) -> JoinPlan:
        """The calls of the flash kernel, made once for all layers."""
        if "join_plan" not in self.memo:
            lengths, contexts = [run.length for run in self.runs], [run.context for run in self.runs]
            self.memo["join_plan"] = JoinPlan.of(lengths, contexts, device, self.first_key)
        return self.memo["join_plan"]


def _by_size(runs: Sequence[FlatRun]) -> Iterator[list[FlatRun]]:
    """Divide runs into buckets: few, and with little padding. Roots without a context, which need no mask, are separate."""
    for roots in (True, False):
        group: list[FlatRun] = []
        length = keys = 0
        for run in sorted((run for run in runs if (len(run.context) == 0) == roots), key=_keys):
            padded = (len(group) + 1) * max(length, run.length) * _keys(run)
            separate = len(group) * length * keys + run.length * _keys(run) + _CALL_PAIRS
            if group and padded > separate:
                yield group
                group, length = [], 0
            group.append(run)
            length, keys = max(length, run.length), _keys(run)
        if group:
            yield group


def _keys(run: FlatRun) -> int:
    return len(run.context) + run.length


@dataclass(frozen=True, slots=True)
class _TreeMask:
    """What layers of one kind receive as their attention mask: the tree, and which keys before a token they see.

    Layers pass their mask on to the attention function unread. It therefore also arrives there when gradient checkpointing
    computes a layer again, in the backward pass.
    """

    tree: Tree
    window: int | None
    """The sliding window, or the length of a chunk if attention is `chunked`; None: all keys are seen."""
    chunked: bool
    _kept: dict[tuple[torch.dtype, int], torch.Tensor | None] = field(default_factory=dict)
    """The masks as summands of the scores, by dtype and number of the bucket: all layers use the same in both passes."""

    def _additive(self, number: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The mask of a bucket as a summand of the scores: -inf where a token does not see a key, else 0."""
        if (dtype, number) not in self._kept:
            self._kept[dtype, number] = self._made(self.tree.buckets[number], dtype)
        return self._kept[dtype, number]

    def _made(self, bucket: _Bucket, dtype: torch.dtype) -> torch.Tensor | None:
        seen = bucket.mask(self.window, chunked=self.chunked)
        return None if seen is None else additive_mask(~seen, dtype)

    def pieces(self, dtype: torch.dtype) -> Iterator[Iterator[tuple[_Bucket, torch.Tensor | None]]]:
        """For each bucket, its pieces with their masks. Large masks are not kept: a rank with a quarter of 32,768 tokens would
        have masks of 1 GiB, which take little time to make beside the attention."""
        for number, bucket in enumerate(self.tree.buckets):
            if self._is_large(bucket):
                pieces = bucket.pieces(_MOST_MASKED_PAIRS, self.window, chunked=self.chunked)
                yield ((piece, self._made(piece, dtype)) for piece in pieces)
            else:
                yield iter([(bucket, self._additive(number, dtype))])

    def _is_large(self, bucket: _Bucket) -> bool:
        """Whether a bucket has a mask that is not made as a whole."""
        masked = not bucket.roots or (self.window is not None and bucket.key_NK.shape[1] > self.window)
        return masked and bucket.query_NR.numel() * bucket.key_NK.shape[1] > _MOST_MASKED_PAIRS

    def keys_of_all(self, *heads_TJD: torch.Tensor) -> Sequence[torch.Tensor]:
        """Keys and values, with those of other processes if there are any. Without a gradient."""
        exchange = self.tree.exchange
        return heads_TJD if exchange is None else [exchange.gathered(one) for one in heads_TJD]

    def _sees_all(self) -> bool:
        """Whether each token sees all tokens before it in its sequence."""
        return self.window is None or all(_keys(run) <= self.window for run in self.tree.runs)

    def attend(
        self,
        query_HTD: torch.Tensor,
        key_HTD: torch.Tensor,
        value_HTD: torch.Tensor,
        scaling: float | None,
        sink_H: torch.Tensor | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Attention of the flat row, [T, H, D]. Keys and values may have fewer heads than the query, and values another size of
        heads than keys (latent attention). `sink_H` are the heads' sinks: a score of a key without a value. `softcap` bounds the
        scores."""
        size, width = query_HTD.shape[-1], value_HTD.shape[-1]
        if size != width:  # the kernels take one size: zeros change neither scores nor results
            scaling = size**-0.5 if scaling is None else scaling
            query_HTD, key_HTD, value_HTD = (
                F.pad(heads_HTD, (0, max(size, width) - heads_HTD.shape[-1]))
                for heads_HTD in (query_HTD, key_HTD, value_HTD)
            )
            return self.attend(query_HTD, key_HTD, value_HTD, scaling, sink_H, softcap)[..., :width]
        query_THD, key_THD, value_THD = (heads_HTD.transpose(0, 1) for heads_HTD in (query_HTD, key_HTD, value_HTD))
        if not self.tree.accelerated and softcap is None:
            query_THD, key_THD, value_THD = (
                heads.to(product_dtype(heads)) for heads in (query_THD, key_THD, value_THD)
            )
            return _GatheredAttention.apply(query_THD, key_THD, value_THD, sink_H, self, scaling)
        if sink_H is None and softcap is None and self._sees_all():
            dtype = product_dtype(query_THD)
            if flash_tree.computes(query_THD, key_THD, dtype, assumed=self.tree.assumes_flash):
                query_THD, key_THD, value_THD = (heads.to(dtype) for heads in (query_THD, key_THD, value_THD))
                plan = self.tree.join_plan(query_THD.device)
                return flash_tree.FlashTreeAttention.apply(
                    query_THD, key_THD, value_THD, plan, self.tree.exchange, scaling
                )
        if self.tree.exchange is not None:
            key_THD, value_THD = (_Gathered.apply(heads, self.tree.exchange) for heads in (key_THD, value_THD))
        dtype = product_dtype(query_THD)
        heads = query_THD, key_THD, value_THD
        results: list[torch.Tensor] = []
        for number, bucket in enumerate(self.tree.buckets):
            if self._is_large(bucket):
                results.append(self._attend_in_pieces(bucket, dtype, *heads, scaling, sink_H, softcap))
            else:  # one tensor for all layers: of a mask of booleans, each layer would make such a summand and keep it
                results.append(bucket.attend(*heads, self._additive(number, dtype), scaling, sink_H, softcap))
        return torch.cat(results)[self.tree.place_T]

    def _attend_in_pieces(
        self,
        bucket: _Bucket,
        dtype: torch.dtype,
        query_THD: torch.Tensor,
        key_THD: torch.Tensor,
        value_THD: torch.Tensor,
        *options: Any,
    ) -> torch.Tensor:
        """`_Bucket.attend` of a bucket with a large mask. Each piece is computed again for the backward pass: the layers together
        would keep the masks of all pieces."""

        def attend(piece: _Bucket, *heads_THD: torch.Tensor) -> torch.Tensor:
            query_THD, key_THD, value_THD = heads_THD
            results = piece.attend(query_THD, key_THD, value_THD, self._made(piece, dtype), *options)
            return results.unflatten(0, piece.query_NR.shape)

        parts = [
            checkpoint(attend, piece, query_THD, key_THD, value_THD, use_reentrant=False, preserve_rng_state=False)
            for piece in bucket.pieces(_MOST_MASKED_PAIRS, self.window, chunked=self.chunked)
        ]
        return torch.cat(parts, dim=1).flatten(0, 1)


class _GatheredAttention(torch.autograd.Function):
    """The attention of a flat row on a CPU, [T, H, D]. The keys of each run are gathered again for the backward pass: keeping
    them would take more memory than all queries, keys and values of the row."""

    @staticmethod
    def forward(
        ctx: Any,
        query_THD: torch.Tensor,
        key_TJD: torch.Tensor,
        value_TJD: torch.Tensor,
        sink_H: torch.Tensor | None,
        tree_mask: _TreeMask,
        scale: float | None,
    ) -> torch.Tensor:
        outputs: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        all_key, all_value = tree_mask.keys_of_all(key_TJD, value_TJD)
        for pieces in tree_mask.pieces(query_THD.dtype):
            of_bucket: list[torch.Tensor] = []
            for piece, mask in pieces:
                heads = piece.heads(query_THD, all_key, all_value)
                output_NHRD, sum_NHR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    *heads, 0.0, mask is None, attn_mask=mask, scale=scale
                )
                if sink_H is not None:
                    total_NHR = torch.logaddexp(sum_NHR, sink_H.to(sum_NHR.dtype)[None, :, None])
                    output_NHRD = output_NHRD * (sum_NHR - total_NHR).exp().unsqueeze(-1).to(output_NHRD.dtype)
                    sum_NHR = total_NHR
                of_bucket.append(output_NHRD)
                sums.append(sum_NHR)  # log of the sum of exp(score) over the keys of each query, and its sink
            outputs.append(torch.cat(of_bucket, dim=2).transpose(1, 2).flatten(0, 1))
        output_THD = torch.cat(outputs)[tree_mask.tree.place_T]
        # Eight completions of 100 tokens after a prompt of 1000: the row has 1800 tokens, and the gathered keys are 8 x 1100 =
        # 8800, for each layer. The backward pass gathers them again. The sums are one number for each query and head; without
        # them, it would have to compute all scores once more before it could compute probabilities.
        # The sums stay as each bucket has them, padding included, and are not put in the order of the row: a padded query has
        # other scores than the token whose place it holds. With that token's sum, its probabilities could be infinite, and
        # infinite times its gradient of 0 is NaN. The output may be that of the other token: it is only multiplied by the 0.
        ctx.save_for_backward(query_THD, key_TJD, value_TJD, output_THD, sink_H, *sums)
        ctx.tree_mask, ctx.scale = tree_mask, scale
        return output_THD

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: with gradient checkpointing, reading it computes the layer again
        # torch's backward pass in bfloat16 takes 1.5 to 4 times as long as in float32
        dtype = torch.promote_types(gradients[0].dtype, torch.float32)
        query_THD, key_TJD, value_TJD, output_THD = (tensor.to(dtype) for tensor in saved[:4])
        tree = ctx.tree_mask.tree
        all_key, all_value = ctx.tree_mask.keys_of_all(key_TJD, value_TJD)
        # the gradients of the results of all buckets: 0 for padding, which then changes no gradient
        padded = [bucket.query_NR.numel() for bucket in tree.buckets]
        grad_results = query_THD.new_zeros(sum(padded), *query_THD.shape[1:])
        grad_results.index_copy_(0, tree.place_T, gradients[0].to(dtype))
        grad_queries: list[torch.Tensor] = []
        grad_key, grad_value = torch.zeros_like(all_key), torch.zeros_like(all_value)
        sums = iter(saved[5:])
        sink_H = None if saved[4] is None else saved[4].to(dtype)
        grad_sink = None if sink_H is None else torch.zeros_like(sink_H)
        results = zip(tree.buckets, ctx.tree_mask.pieces(dtype), grad_results.split(padded), strict=True)
        for bucket, pieces, grad_result in results:
            of_bucket: list[torch.Tensor] = []
            rest = grad_result.unflatten(0, bucket.query_NR.shape)
            for piece, mask in pieces:
                grad_NRHD, rest = rest.tensor_split([piece.query_NR.shape[1]], dim=1)
                own_NRHD, sum_NHR = output_THD[piece.query_NR], next(sums)
                # With sinks, the sums are those of keys and sink, and the outputs those with the sink: then the kernel computes
                # gradients of scores, probability * (gradient of probability - D), that are right for the keys, because the sink
                # has no value and so no part in D = gradient of output * output. The sink itself gets -probability * D.
                grad_heads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    grad_NRHD.transpose(1, 2),
                    *piece.heads(query_THD, all_key, all_value),
                    own_NRHD.transpose(1, 2),
                    sum_NHR,
                    0.0,
                    mask is None,
                    attn_mask=mask,
                    scale=ctx.scale,
                )
                if sink_H is not None and grad_sink is not None:
                    share_NHR = (sink_H[None, :, None] - sum_NHR).exp()
                    grad_sink -= (share_NHR * (grad_NRHD * own_NRHD).sum(-1).transpose(1, 2)).sum((0, 2))
                of_bucket.append(grad_heads[0].transpose(1, 2))
                # a token is the key of many runs (a prompt, of all its completions): its gradients are added up over all of them
                for total, part in zip((grad_key, grad_value), grad_heads[1:], strict=True):
                    total.index_add_(0, piece.key_NK.flatten(), part.transpose(1, 2).flatten(0, 1))
            grad_queries.append(torch.cat(of_bucket, dim=1).flatten(0, 1))
        grad_query = torch.cat(grad_queries)[tree.place_T]
        if tree.exchange is not None:
            grad_key, grad_value = tree.exchange.summed(grad_key), tree.exchange.summed(grad_value)
        grads = (part.to(gradients[0].dtype) for part in (grad_query, grad_key, grad_value))
        return *grads, None if grad_sink is None else grad_sink.to(saved[4].dtype), None, None


def _with_sinks(
    query_NHRD: torch.Tensor,
    key_NJKD: torch.Tensor,
    value_NJKD: torch.Tensor,
    mask: torch.Tensor | None,
    sink_H: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Attention [N, H, R, D] with sinks (gpt-oss): each head has one more score in its softmax, of a key without a value.

    `mask` says which keys a token sees (bool), or is a summand of the scores; None: attention is causal.
    """
    (_, heads, rows, _), keys = query_NHRD.shape, key_NJKD.shape[2]
    key_NHKD, value_NHKD = (
        F.pad(tensor.repeat_interleave(heads // tensor.shape[1], dim=1), (0, 0, 0, 1))
        for tensor in (key_NJKD, value_NJKD)
    )
    if mask is None:
        mask = torch.ones(rows, keys, dtype=torch.bool, device=query_NHRD.device).tril(keys - rows)
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query_NHRD.dtype).masked_fill(~mask, -torch.inf)
    scores = (len(query_NHRD), heads, rows)
    bias = torch.cat(
        [mask.expand(*scores, keys), sink_H.to(mask.dtype)[None, :, None, None].expand(*scores, 1)], dim=-1
    )
    return F.scaled_dot_product_attention(query_NHRD, key_NHKD, value_NHKD, attn_mask=bias, scale=scaling)


def _with_soft_cap(
    query_NHRD: torch.Tensor,
    key_NJKD: torch.Tensor,
    value_NJKD: torch.Tensor,
    mask: torch.Tensor | None,
    softcap: float,
    scaling: float | None,
) -> torch.Tensor:
    """Attention [N, H, R, D] whose scores s are `softcap * tanh(s / softcap)` (Gemma 2). No kernel of torch computes it: all
    scores are in memory, as in transformers' own.

    `mask` says which keys a token sees (bool), or is a summand of the scores; None: attention is causal.
    """
    (_, heads, rows, size), keys = query_NHRD.shape, key_NJKD.shape[2]
    key_NHKD, value_NHKD = (
        tensor.repeat_interleave(heads // tensor.shape[1], dim=1) for tensor in (key_NJKD, value_NJKD)
    )
    if mask is None:
        mask = torch.ones(rows, keys, dtype=torch.bool, device=query_NHRD.device).tril(keys - rows)
    scores_NHRK = query_NHRD @ key_NHKD.transpose(2, 3) * (size**-0.5 if scaling is None else scaling)
    scores_NHRK = (scores_NHRK / softcap).tanh() * softcap
    scores_NHRK = scores_NHRK.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores_NHRK + mask
    return scores_NHRK.softmax(dim=-1, dtype=torch.float32).to(query_NHRD.dtype) @ value_NHKD


_current_tree: ContextVar[Tree | None] = ContextVar("tree", default=None)


@contextmanager
def tree_attention(tree: Tree) -> Iterator[None]:
    """A forward pass inside the context computes `tree`, if the model has tree attention."""
    token = _current_tree.set(tree)
    try:
        yield
    finally:
        _current_tree.reset(token)


def current_tree() -> Tree | None:
    """The tree that a forward pass computes; None outside of `tree_attention`."""
    return _current_tree.get()


def use_tree_attention(model: Any) -> None:
    """Give a transformers model an attention that can compute trees; sequences are computed as before.

    Raises ValueError if the model's attention cannot be replaced.
    """
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    set_text_attention(model, _NAME)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | _TreeMask | None,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    **others: Any,  # transformers' own protocol; `s_aux` are sinks
) -> tuple[torch.Tensor, None]:
    if not isinstance(attention_mask, _TreeMask):
        if _current_tree.get() is not None:
            raise TypeError("the model does not pass its attention mask on to the attention function")
        if softcap is not None:
            output_NHRD = _with_soft_cap(query, key, value, attention_mask, softcap, scaling)
            return output_NHRD.transpose(1, 2).contiguous(), None
        if s_aux is not None:
            output_NHRD = _with_sinks(query, key, value, attention_mask, s_aux, scaling)
            return output_NHRD.transpose(1, 2).contiguous(), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    if ignored := unsupported(others, known=("dropout", "is_causal")):
        raise TypeError(f"tree attention does not compute {', '.join(ignored)}")
    if scales_queries(module):
        # rounded after the product, as the model's own scale is
        query = (query * _scale_by_position(module, attention_mask.tree, query.device)).to(query.dtype)
    return attention_mask.attend(query[0], key[0], value[0], scaling, s_aux, softcap).unsqueeze(0), None


def _scale_by_position(module: Any, tree: Tree, device: torch.device) -> torch.Tensor:
    """What changes the scale of a query by its place in the flat row into that by its position in its sequence, [T, 1]."""
    if "query_scale" not in tree.memo:
        ends = [len(run.context) + run.length for run in tree.runs]
        position_T = torch.cat([torch.arange(end - run.length, end) for run, end in zip(tree.runs, ends, strict=True)])
        place_T = torch.arange(len(position_T))
        ratio_T = query_scale(module, position_T) / query_scale(module, place_T)
        tree.memo["query_scale"] = ratio_T.unsqueeze(-1).to(device)
    return tree.memo["query_scale"]


def _mask(*arguments: Any, local_size: int | None = None, **options: Any) -> torch.Tensor | _TreeMask | None:
    # transformers' own protocol; `local_size` is the sliding window or the chunk of the layers that the mask is for
    tree = _current_tree.get()
    if tree is None:
        return sdpa_mask(*arguments, local_size=local_size, **options)
    config = options.get("config")
    chunked = getattr(config, "attention_chunk_size", None) is not None and not getattr(config, "sliding_window", None)
    return _TreeMask(tree, local_size, chunked)
