"""Log-probabilities of a packed batch under a transformers model: the only forward pass of the learner.

Axis suffixes are those of packing.py: B rows, L columns, N targets, U distinct predictions, T tokens of a flat row, D hidden
dimension, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from turnwise.errors import ConfigError
from turnwise.models.allocator import trim_kept
from turnwise.models.attention import narrow_window, set_text_attention
from turnwise.models.autocast import autocast, output_layer_in_float32
from turnwise.training.model_inputs import ModelInputs
from turnwise.training.packing import MicroBatch
from turnwise.training.token_logprobs import LOGITS_BYTES, TokenLogprobs, logprobs_of_logits
from turnwise.training.tree import FlatRow, Tree, tree_attention, use_tree_attention
from turnwise.types import Sampling

__all__ = ["Forward", "shares_prefixes", "try_tree_attention"]


class Forward:
    """Computes log-probabilities of the targets of a micro-batch, of the distribution that `sampling` draws from.

    `chunk_bytes` is the memory for logits (see `TokenLogprobs`). A model whose logits are not its output layer on its body's
    hidden states (logits that are scaled or capped) is run in one piece, with the logits of all targets in memory. With
    `autocast`, matrix products are computed in bfloat16, and the output layer and log-probabilities in float32.
    """

    def __init__(
        self, model: Any, sampling: Sampling, *, chunk_bytes: int = LOGITS_BYTES, autocast: bool = False
    ) -> None:
        self._model = model
        self._autocast = autocast
        self._sampling = sampling
        self._inputs = ModelInputs(model)
        if autocast:
            output_layer_in_float32(model)
        self._body, head = _body_and_head(model)
        vocabulary = model.config.get_text_config().vocab_size
        self._head = (
            None if head is None else TokenLogprobs(head, sampling, vocabulary=vocabulary, chunk_bytes=chunk_bytes)
        )
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def chunks_logits(self) -> bool:
        """Whether the logits of all targets are never in memory at once."""
        return self._head is not None

    def logprobs(self, micro: MicroBatch[Any], *, entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities [N] of the targets; with `entropy`, also the entropy [N] of the distribution of each target."""
        with self._inputs.of(micro) as inputs, autocast(micro.token_ids_BL.device, self._autocast):
            if self._body is not None and self._head is not None:
                hidden_UD = self._body(**inputs)[0][micro.row_U, micro.column_U]
                if torch.is_grad_enabled():
                    trim_kept()  # what is free between the activations is of no use for the logits: memory is fullest with them
                logprob_U, entropy_U = self._head(hidden_UD, micro.token_U, entropy=entropy)
            else:
                logits_UV = self._logits(micro, inputs)
                logprob_U, entropy_U = logprobs_of_logits(logits_UV, micro.token_U, self._sampling, entropy=entropy)
        return logprob_U[micro.prediction_N], None if entropy_U is None else entropy_U[micro.prediction_N]

    def _logits(self, micro: MicroBatch[Any], inputs: dict[str, Any]) -> torch.Tensor:
        """Logits [U, V] of the distinct predictions, from the model's own forward."""
        if not self._takes_logits_to_keep:
            return self._model(**inputs).logits[micro.row_U, micro.column_U]
        kept, place_U = torch.unique(micro.column_U, return_inverse=True)
        return self._model(**inputs, logits_to_keep=kept).logits[micro.row_U, place_U]


_TREE_LAYERS = {"full_attention", "sliding_attention"}
"""Types of layers whose attention depends on nothing but the keys and their distance to the query."""
_PROBE_WINDOW = 3
"""Tokens of a sliding window while the model is tested: less than the length of the test sequences."""
_PROBE = ((11, 7, 5, 3, 2), (11, 7, 13, 17, 19, 23, 29), (11, 7, 13, 17, 31), (11, 7, 13, 17, 31, 37), (43, 41))
"""Token ids of the test sequences, in lexicographic order: a tree of depth 4, and a sequence that shares nothing."""


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

    A model that does not support it (recurrent layers, attention in chunks, soft caps or sinks, an attention of its own) is
    unchanged.
    """
    config = model.config.get_text_config()
    if not _TREE_LAYERS.issuperset(getattr(config, "layer_types", None) or []):
        return False
    previous = config._attn_implementation
    vocabulary = model.get_input_embeddings().num_embeddings
    sequences = sorted({tuple(token % vocabulary for token in sequence) for sequence in _PROBE})
    with torch.no_grad(), narrow_window(config, _PROBE_WINDOW):
        expected = [_logits_of(model, sequence) for sequence in sequences]
        try:
            use_tree_attention(model)
            if _tree_gives(model, sequences, expected):
                return True
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
            pass  # the attention takes other arguments or another mask, or cannot be replaced
    if config._attn_implementation != previous:
        set_text_attention(model, previous)
    return False


def _logits_of(model: Any, sequence: Sequence[int]) -> torch.Tensor:
    """Logits [T, V] of a sequence in a plain forward pass."""
    return model(torch.tensor([sequence], device=model.device), use_cache=False).logits[0].float()


def _tree_gives(model: Any, sequences: Sequence[Sequence[int]], expected: Sequence[torch.Tensor]) -> bool:
    """Whether the logits of the sequences in a tree, and of each sequence alone, equal those of the previous attention."""
    row = FlatRow.of([np.array(sequence) for sequence in sequences])
    ids, position = (torch.from_numpy(values[None]).to(model.device) for values in (row.token_ids, row.position))
    with tree_attention(Tree.of(row.runs).to(model.device)):
        shared_TV = model(ids, position_ids=position, use_cache=False).logits[0].float()
    tolerance = 1e-3 if model.dtype == torch.float32 else 1e-1
    return all(
        torch.allclose(actual_LV, expected_LV, atol=tolerance, rtol=tolerance)
        for sequence, places, expected_LV in zip(sequences, row.places, expected, strict=True)
        for actual_LV in (shared_TV[torch.from_numpy(places)], _logits_of(model, sequence))
    )


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
