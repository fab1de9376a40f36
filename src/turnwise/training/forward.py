"""The only forward pass of the learner: log-probabilities of a packed batch, without the logits of all targets in memory.

A transformers model computes the hidden states of a micro-batch. The output layer then runs on chunks of targets, whose logits
are dropped after use. If the output layer is trained, the backward pass computes them again (those of at most four chunks are
kept); if not, the forward pass already computes the gradients. So the largest tensor is [C, V] for a chunk of C targets, in both
passes, and the values and gradients are those of one large matrix. Models that scale or cap their logits after the output layer
compute all logits at once.

Knows a model's body, its output layer, and the distribution that is sampled from. Does not know losses, advantages or optimizer
steps. Invariant: prefix trees are used only if a small tree gives the log-probabilities of separate sequences.

Axis suffixes are those of batch.py: B rows, L columns, N targets, U distinct predictions, T tokens of a flat row, D hidden
dimension, V vocabulary; also C targets of a chunk, K values of each target.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from turnwise.errors import ConfigError, Failed, TurnwiseError, boundary
from turnwise.models.allocator import trim_kept
from turnwise.models.device import gpu_memory, sees_gpu
from turnwise.models.distribution import AllowedTokens, sampling_logits
from turnwise.models.experts import Choice, RouterPass, Routers
from turnwise.models.model_config import RECURRENT_TYPES, TYPES_BY_TOKEN
from turnwise.models.precision import autocast, narrow_window, output_layer_in_float32, set_text_attention
from turnwise.models.vision import VisionAdapter, own_tokens
from turnwise.training.batch import MicroBatch
from turnwise.training.divergence import Compared, TeacherComparison
from turnwise.training.recurrent_tree import has_recurrent_layers, use_recurrent_tree
from turnwise.training.tree import FlatRow, Tree, tree_attention, use_tree_attention
from turnwise.types import Sampling

_log = logging.getLogger(__name__)

# Inputs: the arguments of the model's forward for a micro-batch


class ModelInputs:
    """Prepares the inputs of one model."""

    def __init__(self, model: Any) -> None:
        self._name = type(model).__name__
        self._vision = VisionAdapter.of(model)

    @contextmanager
    def of(self, micro: MicroBatch[Any]) -> Iterator[dict[str, Any]]:
        """The arguments of the model's forward, which must be called inside the context."""
        # padded rows need neither positions nor a mask: padding is on the right, and causal attention does not look there
        inputs: dict[str, Any] = {"input_ids": micro.token_ids_BL, "use_cache": False}
        if micro.media_B:
            part = nullcontext() if micro.own_T is None else own_tokens(micro.own_T)
            among_others = nullcontext() if micro.tree is None else tree_attention(micro.tree)
            with self._with_media(micro) as given, part, among_others:
                yield {**inputs, **given}
        elif micro.tree is None:
            yield inputs
        else:
            with tree_attention(micro.tree):
                yield {**inputs, "position_ids": micro.position_BL}

    @contextmanager
    def _with_media(self, micro: MicroBatch[Any]) -> Iterator[dict[str, Any]]:
        """The arguments for rows with images or videos, which need positions of their own."""
        if self._vision is None:
            raise TurnwiseError(
                f"the conversations contain images, which {self._name} does not accept. Train a vision model, such "
                f"as Qwen2.5-VL"
            )
        rows_BL = micro.token_ids_BL.cpu().numpy()
        kinds_BL = np.stack(
            [self._vision.token_types(ids, media) for ids, media in zip(rows_BL, micro.media_B, strict=True)]
        )
        inputs: dict[str, Any] = {}
        if self._vision.uses_mrope:
            # padding gets positions as text does; no target attends to it
            axes = [self._vision.position_ids(ids, media) for ids, media in zip(rows_BL, micro.media_B, strict=True)]
            inputs["position_ids"] = torch.from_numpy(np.stack(axes, axis=1)).to(micro.token_ids_BL.device)
        elif micro.own_T is not None:
            inputs["position_ids"] = micro.position_BL
        kinds = torch.from_numpy(kinds_BL).to(micro.token_ids_BL.device)
        media = [item for row in micro.media_B for item in row]
        with self._vision.forward_inputs(micro.token_ids_BL, kinds, media) as given:
            yield {**inputs, **given}


# Chunks: values of targets, computed for a chunk of targets at a time in both passes

_Values = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From hidden states [C, D] and a column [C] to values [K, C]. `TokenLogprobs` passes places of targets as the column."""


def in_chunks(
    function: _Values, hidden_ND: torch.Tensor, token_N: torch.Tensor, parameters: Sequence[torch.Tensor], chunk: int
) -> torch.Tensor:
    """The values [K, N] of `function`, which has the trainable `parameters`, computed for `chunk` targets at a time."""
    if not torch.is_grad_enabled() or not (parameters or hidden_ND.requires_grad):
        pairs = zip(hidden_ND.split(chunk), token_N.split(chunk), strict=True)
        return torch.cat([function(hidden_CD, token_C) for hidden_CD, token_C in pairs], dim=1)
    if parameters:
        return _Recomputed.apply(function, chunk, hidden_ND, token_N, *parameters)
    return _WithSlopes.apply(function, chunk, hidden_ND, token_N)


class _Recomputed(torch.autograd.Function):
    """The backward pass computes each chunk again, and adds up the gradients of the head's parameters over the chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        function: _Values,
        chunk: int,
        hidden_ND: torch.Tensor,
        token_N: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.function, ctx.chunk = function, chunk
        ctx.save_for_backward(hidden_ND, token_N, *parameters)
        pairs = zip(hidden_ND.split(chunk), token_N.split(chunk), strict=True)
        return torch.cat([function(hidden_CD, token_C) for hidden_CD, token_C in pairs], dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        hidden_ND, token_N, *parameters = ctx.saved_tensors
        pieces = zip(
            hidden_ND.split(ctx.chunk), token_N.split(ctx.chunk), gradients[0].split(ctx.chunk, dim=1), strict=True
        )
        grad_hidden: list[torch.Tensor] = []
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        for hidden_CD, token_C, gradient_KC in pieces:
            with torch.enable_grad():
                own_CD = hidden_CD.detach().requires_grad_()
                values_KC = ctx.function(own_CD, token_C)
            grad_own_CD, *others = torch.autograd.grad(values_KC, [own_CD, *parameters], gradient_KC, allow_unused=True)
            grad_hidden.append(grad_own_CD)
            for place, gradient in enumerate(others):
                if gradient is not None:
                    total = sums[place]
                    sums[place] = gradient if total is None else total.add_(gradient)
            del values_KC, others  # before the next chunk is computed
        return None, None, torch.cat(grad_hidden), None, *sums


class _WithSlopes(torch.autograd.Function):
    """For a head without trainable parameters, as with LoRA on the body only.

    A value depends on the hidden state of its own target only, so its gradient is known up to a factor that comes from the
    loss. The forward pass computes these gradients with each chunk, and nothing is computed twice.
    """

    @staticmethod
    def forward(
        ctx: Any, function: _Values, chunk: int, hidden_ND: torch.Tensor, token_N: torch.Tensor
    ) -> torch.Tensor:
        parts: list[torch.Tensor] = []
        slopes: list[torch.Tensor] = []
        for hidden_CD, token_C in zip(hidden_ND.split(chunk), token_N.split(chunk), strict=True):
            with torch.enable_grad():
                own_CD = hidden_CD.detach().requires_grad_()
                rows = function(own_CD, token_C).unbind()
            ones_C = torch.ones_like(rows[0])
            slopes_KCD = [
                torch.autograd.grad(row_C, own_CD, ones_C, retain_graph=row_C is not rows[-1])[0] for row_C in rows
            ]
            slopes.append(torch.stack(slopes_KCD))
            parts.append(torch.stack([row_C.detach() for row_C in rows]))
            del rows  # and with it the chunk's logits
        ctx.save_for_backward(torch.cat(slopes, dim=1))
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        (slopes_KND,) = ctx.saved_tensors
        weighted_KND = slopes_KND * gradients[0].unsqueeze(-1).to(slopes_KND.dtype)
        return None, None, weighted_KND.sum(dim=0), None


# Log-probabilities of targets from hidden states

LOGITS_BYTES = 128 * 2**20
"""The memory for the logits of a chunk on a CPU, and the least on a GPU."""
_LOGITS_BYTES_ON = ((40 * 2**30, 2**30), (12 * 2**30, 2**28))
"""The same on GPUs with so many bytes or more. Large chunks are faster, and a pass needs three or four tensors of this size."""


def logits_bytes(card: int | None) -> int:
    """The memory for the logits of a chunk on a GPU with so many free bytes; None: unknown."""
    return next((size for least, size in _LOGITS_BYTES_ON if card is not None and card >= least), LOGITS_BYTES)


def _logits_bytes_on(device: torch.device) -> int:
    if device.type != "cuda" or not sees_gpu():
        return LOGITS_BYTES
    return logits_bytes(gpu_memory(str(device)).free)


_KEPT_CHUNKS = 4
"""A trained output layer runs in one piece if all logits fit into the memory of so many chunks. They are kept for the backward
pass then, because computing them again takes time."""


_CACHED_BYTES = 4 * 2**20
"""The logits whose sum a CPU computes at a time, so that they stay in its cache between the operations."""


class TokenLogprobs:
    """Log-probabilities, and entropies, of target tokens under the distribution that `sampling` draws from.

    `head` is the model's output layer: any module from hidden states [C, D] to logits [C, V], such as a linear layer with or
    without bias, with tied weights or with an adapter. `vocabulary` is V, and `chunk_bytes` the memory for the logits of a
    chunk. The head is computed in float32, also under autocast (`models/precision.py`).
    """

    def __init__(
        self,
        head: torch.nn.Module,
        sampling: Sampling,
        *,
        vocabulary: int,
        chunk_bytes: int = LOGITS_BYTES,
    ) -> None:
        self._head = head
        self._sampling = sampling
        # a linear layer needs its input for the backward pass, and not its output
        self._plain = type(head) is torch.nn.Linear
        self._max_chunk = max(1, chunk_bytes // (4 * vocabulary))

    def __call__(
        self,
        hidden_ND: torch.Tensor,
        token_N: torch.Tensor,
        *,
        place_N: torch.Tensor | None = None,
        entropy: bool = False,
        comparison: TeacherComparison | None = None,
        allowed: AllowedTokens | None = None,
    ) -> TargetValues:
        """Log-probabilities [N]; with `entropy`, also the entropy [N] of the distribution of each target; with a `comparison`,
        what it finds. `place_N`: the hidden states are those of these places in `token_N`, `comparison` and `allowed`; None: of
        all."""
        if place_N is None:
            place_N = torch.arange(len(hidden_ND), device=hidden_ND.device)
        measured: list[Compared] = []

        def values(hidden_CD: torch.Tensor, place_C: torch.Tensor) -> torch.Tensor:
            # the logits have no name here, so that bfloat16 logits are freed when they have been converted
            found = values_of_logits(
                self._head(hidden_CD),
                token_N[place_C],
                self._sampling,
                entropy=entropy,
                overwrite=self._plain,
                comparison=comparison,
                place_N=place_C,
                allowed=None if allowed is None else allowed.at(place_C),
            )
            measured.append(found.compared)
            return torch.stack(found.with_gradient)

        parameters = [parameter for parameter in self._head.parameters() if parameter.requires_grad]
        divided = comparison is not None and comparison.of_distribution
        max_chunk = max(1, self._max_chunk // 2) if divided else self._max_chunk
        count = -(-len(hidden_ND) // max_chunk)
        if parameters and torch.is_grad_enabled() and count <= _KEPT_CHUNKS and not divided:
            count = 1
        # chunks of about the same size, so that no small chunk is left at the end
        chunk = max(1, -(-len(hidden_ND) // max(count, 1)))
        in_one = len(hidden_ND) <= chunk and not divided
        values_KN = values(hidden_ND, place_N) if in_one else in_chunks(values, hidden_ND, place_N, parameters, chunk)
        # joined now: the backward pass computes the chunks again, and appends to the list
        return TargetValues(
            logprob_N=values_KN[0],
            entropy_N=values_KN[1] if entropy else None,
            compared=Compared.joined(measured, values_KN[-1] if divided else None),
        )

    def logits(self, hidden_CD: torch.Tensor) -> torch.Tensor:
        """Logits [C, V] of the output layer."""
        return self._head(hidden_CD)

    def scores(
        self, hidden_ND: torch.Tensor, token_N: torch.Tensor, top_k: int, vocabulary: int | None
    ) -> torch.Tensor:
        """See `Forward.scores`."""
        pairs = zip(hidden_ND.split(self._max_chunk), token_N.split(self._max_chunk), strict=True)
        return torch.cat(
            [
                _scores_of_logits(self._head(hidden_CD)[:, :vocabulary], token_C, self._sampling, top_k)
                for hidden_CD, token_C in pairs
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetValues:
    """What a pass computes of each of the N targets."""

    logprob_N: torch.Tensor
    entropy_N: torch.Tensor | None = None
    compared: Compared = Compared()
    """What the comparison with a teacher finds."""

    @property
    def with_gradient(self) -> list[torch.Tensor]:
        """The columns that have gradients."""
        columns = (self.logprob_N, self.entropy_N, self.compared.divergence_N)
        return [value_N for value_N in columns if value_N is not None]

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> TargetValues:
        """The same with each column changed."""
        compared = [
            None if value_N is None else change(value_N)
            for value_N in (self.compared.divergence_N, self.compared.agrees_N, self.compared.teacher_logprob_N)
        ]
        return TargetValues(
            logprob_N=change(self.logprob_N),
            entropy_N=None if self.entropy_N is None else change(self.entropy_N),
            compared=Compared(*compared),
        )


def values_of_logits(
    logits_NV: torch.Tensor,
    token_N: torch.Tensor,
    sampling: Sampling,
    *,
    entropy: bool,
    overwrite: bool = False,
    comparison: TeacherComparison | None = None,
    place_N: torch.Tensor | None = None,
    allowed: AllowedTokens | None = None,
) -> TargetValues:
    """What is asked for, from logits [N, V], which the backward pass may `overwrite`. `place_N`: the places of the targets, for
    the comparison; None: 0 to N - 1. `allowed`: what a grammar lets pass there."""
    logits_NV = _sampled_from(logits_NV, token_N, sampling, allowed)
    if place_N is None:
        place_N = torch.arange(len(token_N), device=token_N.device)
    if not entropy and (comparison is None or not comparison.of_distribution):
        compared = Compared() if comparison is None else comparison.at(logits_NV, token_N, place_N)
        return TargetValues(logprob_N=_TargetLogprobs.apply(logits_NV, token_N, overwrite), compared=compared)
    all_NV = logits_NV.log_softmax(dim=-1)
    logprob_N = all_NV.gather(-1, token_N.unsqueeze(-1)).squeeze(-1)
    # tokens that top-k, top-p or min-p removed have probability 0 and log-probability -inf: their product counts as 0
    entropy_N = -(all_NV.exp() * all_NV.masked_fill(all_NV.isinf(), 0.0)).sum(dim=-1) if entropy else None
    return TargetValues(
        logprob_N=logprob_N,
        entropy_N=entropy_N,
        compared=Compared() if comparison is None else comparison.at(all_NV, token_N, place_N),
    )


def logprobs_of_logits(
    logits_NV: torch.Tensor, token_N: torch.Tensor, sampling: Sampling, *, entropy: bool, overwrite: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities [N], and with `entropy` entropies [N], from logits [N, V], which the backward pass may `overwrite`."""
    found = values_of_logits(logits_NV, token_N, sampling, entropy=entropy, overwrite=overwrite)
    return found.logprob_N, found.entropy_N


def _sampled_from(
    logits_NV: torch.Tensor, token_N: torch.Tensor, sampling: Sampling, allowed: AllowedTokens | None = None
) -> torch.Tensor:
    """Logits [N, V] of the distribution that is sampled from."""
    return sampling_logits(
        logits_NV,
        temperature_N=sampling.temperature,
        top_k_N=sampling.top_k,
        top_p_N=sampling.top_p,
        min_p_N=sampling.min_p,
        keep_N=token_N,
        allowed=allowed,
    )


def _scores_of_logits(logits_NV: torch.Tensor, token_N: torch.Tensor, sampling: Sampling, top_k: int) -> torch.Tensor:
    """See `Forward.scores`."""
    all_NV = _sampled_from(logits_NV, token_N, sampling).log_softmax(dim=-1)
    top_NK, ids_NK = all_NV.topk(top_k, dim=-1)
    own_N1 = all_NV.gather(-1, token_N.unsqueeze(-1))
    return torch.cat([own_N1.double(), ids_NK.double(), top_NK.double()], dim=-1)


class _TargetLogprobs(torch.autograd.Function):
    """The log-probability [N] of one token of each row of logits [N, V].

    As `F.cross_entropy`, with fewer tensors of the size of the logits: between the passes only the logits are kept, and the
    backward pass makes one more, the gradient `g * (onehot - softmax)`. With `overwrite`, it writes the gradient into the
    logits: no other function may need them, and there can be one backward pass only.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, token_N: torch.Tensor, overwrite: bool) -> torch.Tensor:
        # tensors without contents (doctor/memory.py) are of another class: they have nothing to keep in a cache
        in_cache = logits_NV.device.type == "cpu" and type(logits_NV) is torch.Tensor
        # logsumexp makes a tensor of the size of its input
        block = (_CACHED_BYTES if in_cache else LOGITS_BYTES) // (4 * logits_NV.shape[1])
        total_N = torch.cat([part.logsumexp(dim=-1) for part in logits_NV.split(max(1, block))])
        ctx.save_for_backward(logits_NV, token_N, total_N)
        ctx.overwrite = overwrite
        return logits_NV.gather(-1, token_N.unsqueeze(-1)).squeeze(-1) - total_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits_NV, token_N, total_N = ctx.saved_tensors
        gradient_N1 = gradients[0].unsqueeze(-1)
        result_NV = torch.sub(logits_NV, total_N.unsqueeze(-1), out=logits_NV if ctx.overwrite else None)
        return result_NV.exp_().mul_(-gradient_N1).scatter_add_(-1, token_N.unsqueeze(-1), gradient_N1), None, None


# The forward pass, and the test whether the model can compute prefix trees


class Forward:
    """Computes log-probabilities of the targets of a micro-batch, of the distribution that `sampling` draws from.

    `chunk_bytes` is the memory for logits (see `TokenLogprobs`); None: 128 MiB on a CPU, and up to 1 GiB on a GPU. A model whose
    logits are not its output layer on its body's hidden states (logits that are scaled or capped) is run in one piece, with the
    logits of all targets in memory. With `autocast`, matrix products are computed in bfloat16, and the output layer and
    log-probabilities in float32. With `router_replay`, tokens go through the experts that were recorded for them
    (`MicroBatch.routes_TLK`). Of a micro-batch that several processes compute together, the output layer computes the targets of
    this process only (`MicroBatch.share`).

    Raises ConfigError with `router_replay`, if the model is no mixture of experts, or its experts cannot be prescribed.
    """

    def __init__(
        self,
        model: Any,
        sampling: Sampling,
        *,
        chunk_bytes: int | None = None,
        autocast: bool = False,
        router_replay: bool = False,
    ) -> None:
        self._model = model
        self._autocast = autocast
        self._sampling = sampling
        self._inputs = ModelInputs(model)
        self.router_replay = router_replay
        """Whether the recorded experts are used."""
        self.routers = Routers.required(model) if router_replay else Routers.watchable(model)
        """Where the model chooses experts; None if it has none, or if they cannot be watched."""
        if autocast:
            output_layer_in_float32(model)
        self._body, head = _body_and_head(model)
        vocabulary = model.config.get_text_config().vocab_size
        self._head = (
            None
            if head is None
            else TokenLogprobs(
                head,
                sampling,
                vocabulary=vocabulary,
                chunk_bytes=chunk_bytes or _logits_bytes_on(model.device),
            )
        )
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    def logprobs(
        self, micro: MicroBatch[Any], *, entropy: bool = False, on_choice: Callable[[Choice], None] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities [N] of the targets; with `entropy`, also the entropy [N] of the distribution of each target.

        `on_choice` is called with the experts of each layer of a model that has `routers`.
        """
        found = self.values(micro, entropy=entropy, on_choice=on_choice)
        return found.logprob_N, found.entropy_N

    def values(
        self,
        micro: MicroBatch[Any],
        *,
        entropy: bool = False,
        on_choice: Callable[[Choice], None] | None = None,
        comparison: TeacherComparison | None = None,
    ) -> TargetValues:
        """As `logprobs`, with what a `comparison` with a teacher finds at each target."""
        with self._inputs.of(micro) as inputs, self._experts(micro, on_choice):
            output_CX = self._output(micro, inputs)
            token_U, allowed, place_C = micro.token_U, micro.allowed, None
            if comparison is not None:  # equal predictions may be compared with different teachers
                token_U = token_U[micro.prediction_N]
                allowed = None if allowed is None else allowed.at(micro.prediction_N)
            output_C = None if comparison is None else micro.prediction_N
            if micro.share is not None:
                output_C, place_C = micro.share.places(each=comparison is not None)
            if output_C is not None:
                output_CX = output_CX[output_C]
            if self._head is not None:
                if torch.is_grad_enabled():
                    trim_kept()  # what is free between the activations is of no use for the logits: memory is fullest with them
                # outside of autocast, where a frozen head would compute its gradients in bfloat16 (`_WithSlopes`)
                found = self._head(
                    output_CX, token_U, place_N=place_C, entropy=entropy, comparison=comparison, allowed=allowed
                )
            else:
                if place_C is not None:
                    token_U, allowed = token_U[place_C], None if allowed is None else allowed.at(place_C)
                found = values_of_logits(
                    output_CX,
                    token_U,
                    self._sampling,
                    entropy=entropy,
                    comparison=comparison,
                    place_N=place_C,
                    allowed=allowed,
                )
        if (share := micro.share) is not None:
            found = found.map(lambda value_C: share.joined(value_C, each=comparison is not None))
        if comparison is not None:
            return found
        entropy_U = found.entropy_N
        return TargetValues(
            logprob_N=found.logprob_N[micro.prediction_N],
            entropy_N=None if entropy_U is None else entropy_U[micro.prediction_N],
        )

    @torch.no_grad()
    def entropies(self, micro: MicroBatch[Any]) -> torch.Tensor:
        """Of each target: its log-probability, and the entropy of its distribution. Shape [N, 2]. Without gradients."""
        found = self.values(micro, entropy=True)
        return torch.stack(found.with_gradient, dim=-1)

    @torch.no_grad()
    def scores(self, micro: MicroBatch[Any], top_k: int, *, vocabulary: int | None = None) -> torch.Tensor:
        """Of each target: its log-probability, the `top_k` most likely tokens, and their log-probabilities. Float64, shape
        [N, 1 + 2 top_k], in which token ids are exact. `vocabulary`: the distribution is that over this many tokens, the first of
        the vocabulary; None: over all. Without gradients."""
        with self._inputs.of(micro) as inputs:
            output_UX, token_U, share = self._output(micro, inputs), micro.token_U, micro.share
            if share is not None:
                token_U = token_U[share.places(each=False)[1]]
            if self._head is not None:
                scores_UX = self._head.scores(output_UX, token_U, top_k, vocabulary)
            else:
                scores_UX = _scores_of_logits(output_UX[:, :vocabulary], token_U, self._sampling, top_k)
        return (scores_UX if share is None else share.joined(scores_UX, each=False))[micro.prediction_N]

    @torch.no_grad()
    def distributions(self, micro: MicroBatch[Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function from places [C] of targets to the log-probabilities [C, V] of all tokens there. It keeps one hidden state
        for each prediction. Without gradients."""
        with self._inputs.of(micro) as inputs:
            output_UX = self._output(micro, inputs)

        @torch.no_grad()
        def rows(place_C: torch.Tensor) -> torch.Tensor:
            chosen_C = micro.prediction_N[place_C]
            logits_CV = output_UX[chosen_C] if self._head is None else self._head.logits(output_UX[chosen_C])
            return _sampled_from(logits_CV, micro.token_U[chosen_C], self._sampling).log_softmax(dim=-1)

        return rows

    def _output(self, micro: MicroBatch[Any], inputs: dict[str, Any]) -> torch.Tensor:
        """Of each prediction: the hidden state [U, D] where the output layer is run by itself, else the logits [U, V]."""
        with autocast(micro.token_ids_BL.device, self._autocast):
            if self._body is not None and self._head is not None:
                return self._body(**inputs)[0][micro.row_U, micro.column_U]
            return self._logits(micro, inputs)

    def _experts(
        self, micro: MicroBatch[Any], on_choice: Callable[[Choice], None] | None
    ) -> AbstractContextManager[None]:
        replay_TLK = micro.routes_TLK if self.router_replay else None
        if self.routers is None or (on_choice is None and replay_TLK is None):
            return nullcontext()
        recorded = None if replay_TLK is None else tuple(replay_TLK.shape[1:])
        if recorded not in (None, (self.routers.layers, self.routers.top_k)):
            raise ConfigError(
                f"model.router_replay=true: the recorded conversations have {recorded[1]} experts for a token in {recorded[0]} "
                f"layers, and {type(self._model).__name__} chooses {self.routers.top_k} in {self.routers.layers}. Engine and "
                f"trainer must have the same model"
            )
        return RouterPass(on_choice or (lambda choice: None), replay_TLK).active()

    def _logits(self, micro: MicroBatch[Any], inputs: dict[str, Any]) -> torch.Tensor:
        """Logits [U, V] of the distinct predictions, from the model's own forward."""
        if not self._takes_logits_to_keep:
            return self._model(**inputs).logits[micro.row_U, micro.column_U]
        kept, place_U = torch.unique(micro.column_U, return_inverse=True)
        return self._model(**inputs, logits_to_keep=kept).logits[micro.row_U, place_U]


_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "attention")
_TREE_LAYERS = {*_ATTENTION, *RECURRENT_TYPES, *TYPES_BY_TOKEN}
"""Types of layers that may compute a tree: attention that depends on nothing but keys and positions, layers with a state, and
layers that compute each token by itself."""
_PROBE_VOCABULARY = 64
"""Tokens of the small model that is tested in place of one in lower precision."""
_PROBE_WINDOW = 3
"""Tokens of a sliding window while the model is tested: less than the length of the test sequences."""
_PROBE = (
    (11, 7, 5, 3, 2, 59, 61),
    (11, 7, 13, 17, 19, 23, 29),
    (11, 7, 13, 17, 31),
    (11, 7, 13, 17, 31, 37, 47),
    (43, 41, 53, 1, 4, 6, 8),
)
"""Token ids of the test sequences: a tree of depth 4, and a sequence that shares nothing. All but the one that is a prefix of
another have one length, and are computed in one batch where they are not in a tree."""


def shares_prefixes(model: Any, share_prompts: str, *, refusal: str) -> bool:
    """Whether prefixes of sequences are computed once, as `train.share_prompts` (`auto`, `always`, `never`) asks for. If so, the
    model has tree attention afterwards.

    Raises ConfigError with `refusal`, the reason, if it is `always` and the model cannot.
    """
    shares = share_prompts != "never" and try_tree_attention(model)
    if share_prompts == "always" and not shares:
        raise ConfigError(f"train.share_prompts=always: {refusal}; use auto or never")
    return shares


def try_tree_attention(model: Any) -> bool:
    """Give a model tree attention if its logits stay the same, which is tested on a small tree. Returns whether it has it.

    A model that does not support it (recurrent layers that do not continue from a state, an attention of
    its own) is unchanged.
    """
    if not _TREE_LAYERS.issuperset(getattr(model.config.get_text_config(), "layer_types", None) or []):
        return False
    # In lower precision two right ways to compute may differ by more than a wrong one: other kernels compute calls with a mask,
    # and a trained model enlarges their rounding on sequences without sense. What is tested is the architecture, so a small
    # model of it is compared in float32, and of the model itself only that it computes a tree at all. Gradients are those of the
    # small model, too: the weights of a model that is divided among ranks are not there for two backward passes.
    exact, recurrent = model.dtype == torch.float32, has_recurrent_layers(model)
    like = None if exact and not recurrent else _small_in_float32(model)
    known = like is not None and _with_tree(like, gradients=recurrent)
    shares = _with_tree(model, compares=exact or not known, gradients=recurrent and not known)
    _log.info("%s: common prompts are computed %s", type(model).__name__, "once" if shares else "for each sequence")
    return shares


def _small_in_float32(model: Any) -> Any | None:
    """A model of the same class and sizes with random float32 weights, as few layers as have all types, and a small vocabulary.
    None if its configuration does not allow that."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    try:
        with boundary("model"), torch.random.fork_rng(devices=[]), torch.device(model.device):
            torch.manual_seed(0)
            _shorten(text)
            if (vision := getattr(config, "vision_config", None)) is not None and hasattr(vision, "depth"):
                vision.depth = 1
            small = type(model)._from_config(config, dtype=torch.float32).eval()
            for parameter in small.parameters():
                if parameter.dim() > 1:  # so large that a wrong attention changes the logits as much as a right one
                    torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    except Failed:
        return None
    return small


def _shorten(config: Any) -> None:
    """Change a text configuration to a few layers and tokens, in place."""
    layers, types = config.num_hidden_layers, list(getattr(config, "layer_types", None) or [])
    few = min(layers, max(2, *(types.index(kind) + 1 for kind in set(types)))) if types else min(layers, 2)
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == layers:
            setattr(config, name, value[:few])
    config.num_hidden_layers, config.vocab_size = few, _PROBE_VOCABULARY
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, None)


def _with_tree(model: Any, *, compares: bool = True, gradients: bool) -> bool:
    """Give a model tree attention. Returns whether it has it: if not, it is unchanged. With `compares`, only if its logits on a
    small tree stay the same; without, if they are finite. With `gradients`, only if these do, too."""
    config = model.config.get_text_config()
    previous = config._attn_implementation
    vocabulary = model.get_input_embeddings().num_embeddings
    sequences = sorted({tuple(token % vocabulary for token in sequence) for sequence in _PROBE})
    with torch.no_grad(), narrow_window(config, _PROBE_WINDOW):
        expected = _logits_of(model, sequences) if compares else []
        restore = None
        try:
            restore = use_recurrent_tree(model)
            use_tree_attention(model)
            if not compares:
                if bool(_tree_logits(model, FlatRow.of([np.array(one) for one in sequences])).isfinite().all()):
                    return True
            elif _tree_gives(model, sequences, expected) and (not gradients or _gradient_passes(model, sequences)):
                return True
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
            pass  # the attention takes other arguments or another mask, or cannot be replaced
    if restore is not None:
        restore()
    if config._attn_implementation != previous:
        set_text_attention(model, previous)
    return False


def _logits_of(model: Any, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits [T, V] of each sequence in plain forward passes, one for all sequences of a length."""
    logits_by_length: dict[int, Iterator[torch.Tensor]] = {}
    for length in {len(sequence) for sequence in sequences}:
        ids_BT = torch.tensor([sequence for sequence in sequences if len(sequence) == length], device=model.device)
        logits_by_length[length] = iter(model(ids_BT, use_cache=False).logits.float())
    return [next(logits_by_length[len(sequence)]) for sequence in sequences]


def _tree_gives(model: Any, sequences: Sequence[Sequence[int]], expected: Sequence[torch.Tensor]) -> bool:
    """Whether the logits of the sequences in a tree, and of each sequence alone, equal those of the previous attention."""
    row = FlatRow.of([np.array(sequence) for sequence in sequences])
    shared_TV = _tree_logits(model, row)
    tolerance = 1e-3 if model.dtype == torch.float32 else 1e-1
    return all(
        torch.allclose(actual_LV, expected_LV, atol=tolerance, rtol=tolerance)
        for alone_LV, places, expected_LV in zip(_logits_of(model, sequences), row.places, expected, strict=True)
        for actual_LV in (shared_TV[torch.from_numpy(places)], alone_LV)
    )


def _tree_logits(model: Any, row: FlatRow) -> torch.Tensor:
    """Logits [T, V] of a flat row."""
    ids, position = (torch.from_numpy(values[None]).to(model.device) for values in (row.token_ids, row.position))
    with tree_attention(Tree.of(row.runs).to(model.device)):
        return model(ids, position_ids=position, use_cache=False).logits[0].float()


def _gradient_passes(model: Any, sequences: Sequence[Sequence[int]]) -> bool:
    """Whether the last logits of the sequence that shares most have the same gradient for its embedded tokens in a tree as alone:
    kernels of recurrent layers may have none for the state that they begin with."""
    row = FlatRow.of([np.array(sequence) for sequence in sequences])
    chosen = max(range(len(sequences)), key=lambda index: len(row.runs[index].context))
    ids, position = (torch.from_numpy(values[None]).to(model.device) for values in (row.token_ids, row.position))
    place_L = torch.from_numpy(row.places[chosen]).to(model.device)
    embed = model.get_input_embeddings()
    with torch.enable_grad():
        shared_1TD = embed(ids).detach().requires_grad_()
        own_1LD = embed(ids[:, place_L]).detach().requires_grad_()
        with tree_attention(Tree.of(row.runs).to(model.device)):
            shared_TV = model(inputs_embeds=shared_1TD, position_ids=position, use_cache=False).logits[0]
        own_LV = model(inputs_embeds=own_1LD, use_cache=False).logits[0]
        (found_1TD,) = torch.autograd.grad(shared_TV[place_L[-1]].float().square().mean(), shared_1TD)
        (expected_1LD,) = torch.autograd.grad(own_LV[-1].float().square().mean(), own_1LD)
    tolerance = 1e-3 if model.dtype == torch.float32 else 1e-1
    scale = float(expected_1LD.abs().max())
    return torch.allclose(found_1TD[:, place_L], expected_1LD, atol=tolerance * scale, rtol=tolerance)


def _body_and_head(model: Any) -> tuple[Any, Any]:
    """The model without its output layer, and the output layer, if applying both gives the model's logits; else `(None, None)`.

    With them, logits are computed for targets only. Models that scale or cap their logits do not qualify.
    """
    body, head = getattr(model, "model", None), model.get_output_embeddings()
    if body is None or head is None or not isinstance(body, torch.nn.Module):
        return None, None
    ids = torch.arange(4, device=model.device)[None]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        try:
            split = head(body(input_ids=ids, use_cache=False)[0])
        except (TypeError, RuntimeError):
            return None, None
    if split.shape != expected.shape or not torch.equal(split, expected):
        return None, None
    return body, head
