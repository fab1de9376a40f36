"""Log-probabilities of a packed batch under a transformers model: the only forward pass of the learner.

Axis suffixes are those of batch.py: B rows, L columns, N targets, T tokens of a flat row, D hidden dimension, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from turnwise.errors import TurnwiseError
from turnwise.models.attention import set_text_attention
from turnwise.models.vision import VisionAdapter
from turnwise.training.batch import MicroBatch
from turnwise.training.token_logprobs import LOGITS_BYTES, TokenLogprobs, logprobs_of_logits
from turnwise.training.tree import Tree, TreeShape, tree_attention, use_tree_attention
from turnwise.types import Sampling

__all__ = ["Forward", "try_tree_attention"]


class Forward:
    """Computes log-probabilities of the targets of a micro-batch, of the distribution that `sampling` draws from.

    `chunk_bytes` is the memory for logits (see `TokenLogprobs`). A model whose logits are not its output layer on its body's
    hidden states (logits that are scaled or capped) is run in one piece, with the logits of all targets in memory.
    """

    def __init__(self, model: Any, sampling: Sampling, *, chunk_bytes: int = LOGITS_BYTES) -> None:
        self._model = model
        self._sampling = sampling
        self._body, head = _body_and_head(model)
        vocabulary = model.config.get_text_config().vocab_size
        self._head = (
            None if head is None else TokenLogprobs(head, sampling, vocabulary=vocabulary, chunk_bytes=chunk_bytes)
        )
        self._vision = VisionAdapter.of(model)
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def chunks_logits(self) -> bool:
        """Whether the logits of all targets are never in memory at once."""
        return self._head is not None

    def logprobs(self, micro: MicroBatch, *, entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities [N] of the targets; with `entropy`, also the entropy [N] of the distribution of each target."""
        token_N = micro.targets.token_N
        with self._inputs(micro) as inputs:
            if self._body is not None and self._head is not None:
                hidden_BLD = self._body(**inputs)[0]
                return self._head(hidden_BLD[micro.row_N, micro.column_N], token_N, entropy=entropy)
            return logprobs_of_logits(self._logits(micro, inputs), token_N, self._sampling, entropy=entropy)

    @contextmanager
    def _inputs(self, micro: MicroBatch) -> Iterator[dict[str, Any]]:
        """The arguments of the model's forward, which must be called inside the context."""
        # padded rows need neither positions nor a mask: padding is on the right, and causal attention does not look there
        inputs: dict[str, Any] = {"input_ids": micro.token_ids_BL, "use_cache": False}
        if micro.media_B:
            with self._media_inputs(micro) as given:
                yield {**inputs, **given}
        elif micro.tree is None:
            yield inputs
        else:
            with tree_attention(micro.tree):
                yield {**inputs, "position_ids": micro.position_BL}

    @contextmanager
    def _media_inputs(self, micro: MicroBatch) -> Iterator[dict[str, Any]]:
        """The arguments for rows with images or videos, which need positions of their own."""
        if self._vision is None:
            raise TurnwiseError(
                f"the conversations contain images, and {type(self._model).__name__} takes none. Train a vision model, such "
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
        kinds = torch.from_numpy(kinds_BL).to(micro.token_ids_BL.device)
        media = [item for row in micro.media_B for item in row]
        with self._vision.forward_inputs(micro.token_ids_BL, kinds, media) as given:
            yield {**inputs, **given}

    def _logits(self, micro: MicroBatch, inputs: dict[str, Any]) -> torch.Tensor:
        """Logits [N, V] that predict the targets, from the model's own forward."""
        if not self._takes_logits_to_keep:
            return self._model(**inputs).logits[micro.row_N, micro.column_N]
        kept, place_N = torch.unique(micro.column_N, return_inverse=True)
        return self._model(**inputs, logits_to_keep=kept).logits[micro.row_N, place_N]


def try_tree_attention(model: Any) -> bool:
    """Give a model tree attention if its logits stay the same, which is tested on a small tree. Returns whether it has it.

    A model that does not support it (sliding windows, recurrent layers, soft caps or sinks, an attention of its own) is
    unchanged.
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None)
    if any(kind != "full_attention" for kind in kinds) or (window is not None and not kinds):
        return False
    previous = config._attn_implementation
    sequence = _probe_sequence(model)
    with torch.no_grad():
        expected_LV = model(sequence, use_cache=False).logits[0]
    try:
        use_tree_attention(model)
        if _tree_gives(model, expected_LV):
            return True
    except (TypeError, ValueError, RuntimeError, IndexError):
        pass  # the attention takes other arguments, or cannot be replaced
    if config._attn_implementation != previous:
        set_text_attention(model, previous)
    return False


_PREFIX, _OTHER, _BRANCH = (11, 7), (5, 3, 2), (13, 17)
"""Token ids of the test tree: a prefix and two branches."""


def _probe_sequence(model: Any) -> torch.Tensor:
    """The prefix and the second branch as a separate sequence [1, L]."""
    return torch.tensor([_PREFIX + _BRANCH], device=model.device) % model.get_input_embeddings().num_embeddings


def _tree_gives(model: Any, expected_LV: torch.Tensor) -> bool:
    """Whether the logits of a tree's second branch, and of its sequence alone, equal those of the previous attention."""
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.tensor([_PREFIX + _OTHER + _BRANCH], device=model.device) % vocabulary
    position = torch.tensor([[0, 1, 2, 3, 4, 2, 3]], device=model.device)
    tree = Tree.of([TreeShape(0, len(_PREFIX), [len(_OTHER), len(_BRANCH)])]).to(model.device)
    with torch.no_grad():
        with tree_attention(tree):
            shared_TV = model(ids, position_ids=position, use_cache=False).logits[0]
        alone_LV = model(_probe_sequence(model), use_cache=False).logits[0]
    tolerance = 1e-3 if model.dtype == torch.float32 else 1e-1
    return all(
        torch.allclose(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)
        for actual, expected in ((shared_TV[-len(_BRANCH) :], expected_LV[-len(_BRANCH) :]), (alone_LV, expected_LV))
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
