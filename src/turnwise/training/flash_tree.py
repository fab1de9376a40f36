"""The attention of a flat row in calls of the flash kernel for sequences of many lengths: no masks, padding or repeated heads.

A token of a prefix tree (`tree.py`) sees the tokens of its own run up to itself, and all tokens of the run's context. These are
two calls: each run alone, causal; and the tokens of all runs with the same context against the keys of that context. Each call
returns the log of the sum of exp(score) of its keys, by which the two results are joined: `sum_i exp(l_i - l) o_i`, with
`l = log sum_i exp(l_i)`. The backward pass of the kernel needs only probabilities and the joined output, so it is called for both
parts with `l` and the joined output, as in ring attention (Liu et al., arXiv 2310.01889).

torch's kernels are called by their names in ATen, which its own attention functions use. Whether they compute what is described
here is tested on each device before they are used: no GPU was at hand when this was written.

Knows lengths and places. Does not know models. Axis suffixes: T tokens of the flat row, Q of them in runs with a context, K
gathered keys of contexts, H heads, J heads of keys, D head dimension.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from turnwise.models.device import sees_gpu
from turnwise.models.transfer import copied

_log = logging.getLogger(__name__)

_LARGEST_HEAD, _HEAD_UNIT = 256, 8
"""The sizes of heads that the kernel takes: multiples of 8 up to 256."""
_SINCE = (8, 0)
"""The compute capability of the first GPUs that it runs on."""
_TOLERANCE = 0.02
"""The largest error in bfloat16, relative to the largest value, in the test of a device."""


@dataclass(frozen=True, slots=True)
class _KernelCall:
    """Which queries see which keys in a call: those of the same number, in the same order."""

    start_q: torch.Tensor
    """Where each group of queries begins, and the end of the last; int32."""
    start_k: torch.Tensor
    longest_q: int
    longest_k: int
    causal: bool


@dataclass(frozen=True, slots=True)
class JoinPlan:
    """The calls of a flat row."""

    own: _KernelCall
    context: _KernelCall | None
    """None if no run has a context."""
    place_Q: torch.Tensor
    """The tokens of runs with a context, one context after the other."""
    place_K: torch.Tensor
    """The keys of the contexts."""
    own_K: slice
    """The keys of the flat row's own tokens; all keys, unless contexts have tokens that are not in the row."""

    @classmethod
    def of(
        cls, lengths: Sequence[int], contexts: Sequence[np.ndarray], device: torch.device, first_key: int = 0
    ) -> JoinPlan:
        """The plan of runs that follow one another: the length of each, and the places among the keys of the tokens of its
        context. `first_key` is the place of the first token of the first run among them.

        Example: the sequences `p q a b`, `p q a c` and `p q x` as the runs `p q a b`, `c` and `x`: 3 causal calls of 4, 1 and 1
        tokens, and two contexts, `p q a` of `c` and `p q` of `x`.
        """
        ends = np.cumsum(lengths)
        sharing: dict[bytes, list[int]] = {}
        for index, context in enumerate(contexts):
            if len(context):
                sharing.setdefault(context.tobytes(), []).append(index)
        own = [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        queries = [np.concatenate([own[index] for index in indexes]) for indexes in sharing.values()]
        keys = [contexts[indexes[0]] for indexes in sharing.values()]
        arrays = [_starts(lengths), *(_starts([len(one) for one in part]) for part in (queries, keys))]
        arrays += [np.concatenate([np.empty(0, dtype=np.int64), *part]) for part in (queries, keys)]
        start, start_q, start_k, place_Q, place_K = copied([torch.from_numpy(array) for array in arrays], device)
        longest = max(lengths)
        context = None
        if sharing:
            context = _KernelCall(start_q, start_k, max(map(len, queries)), max(map(len, keys)), causal=False)
        own_K = slice(first_key, first_key + sum(lengths))
        return cls(_KernelCall(start, start, longest, longest, causal=True), context, place_Q, place_K, own_K)


def _starts(lengths: Sequence[int]) -> np.ndarray:
    return np.cumsum([0, *lengths]).astype(np.int32)


# The kernel: a call, and its backward pass


@dataclass(frozen=True, slots=True)
class _Result:
    """What a call returns of Q queries."""

    output_QHD: torch.Tensor
    sum_HQ: torch.Tensor
    """Log of the sum of exp(score) over the keys of each query, float32."""
    state: tuple[torch.Tensor, torch.Tensor]
    """What the backward pass of the kernel asks for; of no effect without dropout."""


def _forward(
    call: _KernelCall, query_QHD: torch.Tensor, key_KJD: torch.Tensor, value_KJD: torch.Tensor, scale: float | None
) -> _Result:
    output_QHD, sum_HQ, *state, _ = torch.ops.aten._flash_attention_forward(
        query_QHD,
        key_KJD,
        value_KJD,
        call.start_q,
        call.start_k,
        call.longest_q,
        call.longest_k,
        0.0,
        call.causal,
        False,
        scale=scale,
    )
    return _Result(output_QHD, sum_HQ, (state[0], state[1]))


def _backward(
    call: _KernelCall,
    gradient_QHD: torch.Tensor,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    result: _Result,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value (`tensors`). `result`: output and sums over all keys of the queries, those of other
    calls, too."""
    return torch.ops.aten._flash_attention_backward(
        gradient_QHD,
        *tensors,
        result.output_QHD,
        result.sum_HQ,
        call.start_q,
        call.start_k,
        call.longest_q,
        call.longest_k,
        0.0,
        call.causal,
        *result.state,
        scale=scale,
    )


# The calls of a flat row, joined


def _joined(
    plan: JoinPlan, query_THD: torch.Tensor, key_TJD: torch.Tensor, value_TJD: torch.Tensor, scale: float | None
) -> tuple[_Result, tuple[torch.Tensor, torch.Tensor]]:
    """The attention of the flat row, and the state of the call of contexts."""
    own = _forward(plan.own, query_THD, key_TJD[plan.own_K], value_TJD[plan.own_K], scale)
    if plan.context is None:
        return own, own.state
    place_Q, place_K = plan.place_Q, plan.place_K
    context = _forward(plan.context, query_THD[place_Q], key_TJD[place_K], value_TJD[place_K], scale)
    own_sum_HQ = own.sum_HQ[:, place_Q]
    total_HQ = torch.logaddexp(own_sum_HQ, context.sum_HQ)
    output_QHD = own.output_QHD[place_Q].float() * _share(own_sum_HQ, total_HQ)
    output_QHD += context.output_QHD.float() * _share(context.sum_HQ, total_HQ)
    output_THD = own.output_QHD.index_copy(0, place_Q, output_QHD.to(own.output_QHD.dtype))
    return _Result(output_THD, own.sum_HQ.index_copy(1, place_Q, total_HQ), own.state), context.state


def _share(sum_HQ: torch.Tensor, total_HQ: torch.Tensor) -> torch.Tensor:
    """The factor [Q, H, 1] of a result in the joined one."""
    return (sum_HQ - total_HQ).exp().T.unsqueeze(-1)


def _gradients(
    plan: JoinPlan,
    gradient_THD: torch.Tensor,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    result: _Result,
    context_state: tuple[torch.Tensor, torch.Tensor],
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value of the flat row."""
    all_keys, own_K = tensors[1:], plan.own_K
    query, *of_own = _backward(
        plan.own, gradient_THD, (tensors[0], all_keys[0][own_K], all_keys[1][own_K]), result, scale
    )
    key, value = (_in_place(part, own_K, whole) for part, whole in zip(of_own, all_keys, strict=True))
    if plan.context is None:
        return query, key, value
    place_Q, place_K = plan.place_Q, plan.place_K
    query_QHD, key_KJD, value_KJD = tensors[0][place_Q], tensors[1][place_K], tensors[2][place_K]
    of_queries = _Result(result.output_QHD[place_Q], result.sum_HQ[:, place_Q].contiguous(), context_state)
    parts = _backward(plan.context, gradient_THD[place_Q], (query_QHD, key_KJD, value_KJD), of_queries, scale)
    places = (place_Q, place_K, place_K)
    # in float32: a token may be the key of many contexts
    query, key, value = (
        total.float().index_add_(0, place, part.float()).to(total.dtype)
        for total, place, part in zip((query, key, value), places, parts, strict=True)
    )
    return query, key, value


def _in_place(part: torch.Tensor, own_K: slice, whole: torch.Tensor) -> torch.Tensor:
    """The gradient of all keys from that of the row's own ones."""
    if len(part) == len(whole):
        return part
    total = torch.zeros_like(whole)
    total[own_K] = part
    return total


def _of_all(exchange: Any | None, key_TJD: torch.Tensor, value_TJD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, with those that the exchange brings."""
    return (key_TJD, value_TJD) if exchange is None else (exchange.gathered(key_TJD), exchange.gathered(value_TJD))


class FlashTreeAttention(torch.autograd.Function):
    """The attention [T, H, D] of a flat row: `apply(query_THD, key_TJD, value_TJD, plan, exchange, scale)`, in half precision.
    The `exchange` (`tree.KeyExchange`) brings keys of tokens that are not in the row; None: all are."""

    @staticmethod
    def forward(
        ctx: Any,
        query_THD: torch.Tensor,
        key_TJD: torch.Tensor,
        value_TJD: torch.Tensor,
        plan: JoinPlan,
        exchange: Any | None,
        scale: float | None,
    ) -> torch.Tensor:
        all_key, all_value = _of_all(exchange, key_TJD, value_TJD)
        result, state = _joined(plan, query_THD, all_key, all_value, scale)
        ctx.save_for_backward(query_THD, key_TJD, value_TJD, result.output_QHD, result.sum_HQ, *result.state, *state)
        ctx.plan, ctx.exchange, ctx.scale = plan, exchange, scale
        return result.output_QHD

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_THD, key_TJD, value_TJD, output_THD, sum_HT, *states = ctx.saved_tensors
        result = _Result(output_THD, sum_HT, (states[0], states[1]))
        state, exchange = (states[2], states[3]), ctx.exchange
        tensors = (query_THD, *_of_all(exchange, key_TJD, value_TJD))
        query, *of_keys = _gradients(ctx.plan, gradients[0].contiguous(), tensors, result, state, ctx.scale)
        if exchange is not None:
            of_keys = [exchange.summed(one) for one in of_keys]
        return query, *of_keys, None, None, None


# Where it is used


def computes(query_THD: torch.Tensor, key_TJD: torch.Tensor, dtype: torch.dtype, *, assumed: bool = False) -> bool:
    """Whether the kernel computes the attention of such tensors in `dtype`: on a GPU that has it, if a small test is right. It is
    `assumed` for tensors without contents that stand for those of a GPU."""
    size = query_THD.shape[-1]
    if dtype not in (torch.bfloat16, torch.float16) or size > _LARGEST_HEAD or size % _HEAD_UNIT:
        return False
    if assumed or query_THD.device.type != "cuda":
        return assumed
    return _tested(str(query_THD.device), dtype, query_THD.shape[1], key_TJD.shape[1], size)


def on_card(device: str | None = None) -> bool:
    """Whether a GPU of this machine is new enough for the kernel; without a GPU, whether one would be (NVIDIA's since 2020)."""
    return not sees_gpu() or (torch.version.hip is None and torch.cuda.get_device_capability(device) >= _SINCE)


@functools.cache
def _tested(device: str, dtype: torch.dtype, heads: int, key_heads: int, size: int) -> bool:
    if not sees_gpu() or not on_card(device):
        return False
    with torch.autocast("cuda", enabled=False):
        problem = problem_of(torch.device(device), dtype, heads, key_heads, size)
    if problem is not None:
        _log.warning("attention of training: torch's flash kernel is not used on %s: %s", device, problem)
    return problem is None


_LENGTHS = (70, 5, 33, 2)
_CONTEXTS: Sequence[Callable[[], np.ndarray]] = (
    lambda: np.arange(0),
    lambda: np.arange(40),
    lambda: np.arange(40),
    lambda: np.concatenate([np.arange(40), np.arange(75, 95)]),
)
"""The tree of the test: a run, two that continue its first 40 tokens, and one that continues 20 tokens of the second of them."""


@torch.no_grad()
def problem_of(device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, size: int) -> str | None:
    """What is wrong with the results and the gradients of a small tree, compared with float32; None if nothing is."""
    contexts = [context() for context in _CONTEXTS]
    plan = JoinPlan.of(_LENGTHS, contexts, device)
    generator = torch.Generator().manual_seed(0)
    tokens = sum(_LENGTHS)
    query, key, value, gradient = (
        torch.randn(tokens, count, size, generator=generator).to(device, dtype)
        for count in (heads, key_heads, key_heads, heads)
    )
    try:
        result, state = _joined(plan, query, key, value, None)
        found = _gradients(plan, gradient, (query, key, value), result, state, None)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        return str(error)
    expected = _expected(query.float(), key.float(), value.float(), gradient.float(), _seen(contexts).to(device))
    for name, own, right in zip(
        ("output", "query", "key", "value"), (result.output_QHD, *found), expected, strict=True
    ):
        if own.shape != right.shape or not bool((own.float() - right).abs().max() <= _TOLERANCE * right.abs().max()):
            return f"the gradient of the {name} differs" if name != "output" else "its output differs"
    return None


def _seen(contexts: Sequence[np.ndarray]) -> torch.Tensor:
    """Which tokens a token sees, bool [T, T]."""
    seen_TT = np.zeros((sum(_LENGTHS),) * 2, dtype=bool)
    start = 0
    for length, context in zip(_LENGTHS, contexts, strict=True):
        rows = slice(start, start + length)
        seen_TT[rows, rows] = np.tril(np.ones((length, length), dtype=bool))
        seen_TT[rows, context] = True
        start += length
    return torch.from_numpy(seen_TT)


def _expected(
    query_THD: torch.Tensor,
    key_TJD: torch.Tensor,
    value_TJD: torch.Tensor,
    gradient_THD: torch.Tensor,
    seen_TT: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention and its gradients, from the definition."""
    heads, key_heads, scale = query_THD.shape[1], key_TJD.shape[1], query_THD.shape[2] ** -0.5
    query, gradient = query_THD.transpose(0, 1), gradient_THD.transpose(0, 1)
    key, value = (one.repeat_interleave(heads // key_heads, dim=1).transpose(0, 1) for one in (key_TJD, value_TJD))
    scores = (query @ key.transpose(1, 2) * scale).masked_fill(~seen_TT, -torch.inf)
    weight = scores.softmax(dim=-1)
    output = weight @ value
    of_weight = gradient @ value.transpose(1, 2)
    of_score = weight * (of_weight - (of_weight * weight).sum(-1, keepdim=True)) * scale
    of_key, of_value = (
        part.transpose(0, 1).unflatten(1, (key_heads, -1)).sum(2)
        for part in (of_score.transpose(1, 2) @ query, weight.transpose(1, 2) @ gradient)
    )
    return output.transpose(0, 1), (of_score @ key).transpose(0, 1), of_key, of_value
