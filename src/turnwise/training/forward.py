"""Log-probabilities of a packed batch under a transformers model: the only forward pass of the learner.

Axis suffixes are those of batch.py: B rows, L columns, N targets, T tokens of a flat row, D hidden dimension, V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from turnwise.errors import TurnwiseError
from turnwise.models.attention import set_text_attention
from turnwise.models.distribution import sampling_logits
from turnwise.models.vision import VisionAdapter
from turnwise.training.batch import MicroBatch
from turnwise.training.tree import Tree, TreeShape, tree_attention, use_tree_attention
from turnwise.types import Sampling

__all__ = ["Forward", "try_tree_attention"]


class Forward:
    """Computes log-probabilities of the targets of a micro-batch, of the distribution that `sampling` draws from."""

    def __init__(self, model: Any, sampling: Sampling) -> None:
        self._model = model
        self._sampling = sampling
        self._body, self._head = _body_and_head(model)
        self._vision = VisionAdapter.of(model)
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    def logprobs(self, micro: MicroBatch, *, entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities [N] of the targets; with `entropy`, also the entropy [N] of the distribution of each target."""
        sampling = self._sampling
        logits_NV = sampling_logits(
            self._logits(micro),
            temperature_N=sampling.temperature,
            top_k_N=sampling.top_k,
            top_p_N=sampling.top_p,
            min_p_N=sampling.min_p,
            keep_N=micro.targets.token_N,
        )
        if not entropy:
            return -F.cross_entropy(logits_NV, micro.targets.token_N, reduction="none"), None
        all_NV = logits_NV.log_softmax(dim=-1)
        logprob_N = all_NV.gather(-1, micro.targets.token_N.unsqueeze(-1)).squeeze(-1)
        # tokens that top-k, top-p or min-p removed have probability 0 and log-probability -inf: their product counts as 0
        entropy_N = -(all_NV.exp() * all_NV.masked_fill(all_NV.isinf(), 0.0)).sum(dim=-1)
        return logprob_N, entropy_N

    def _logits(self, micro: MicroBatch) -> torch.Tensor:
        """Logits [N, V] that predict the targets."""
        # padded rows need neither positions nor a mask: padding is on the right, and causal attention does not look there
        if micro.media_B:
            return self._logits_with_media(micro)
        inputs: dict[str, Any] = {"input_ids": micro.token_ids_BL, "use_cache": False}
        if micro.tree is None:
            return self._predictions(micro, inputs)
        with tree_attention(micro.tree):
            return self._predictions(micro, {**inputs, "position_ids": micro.position_BL})

    def _logits_with_media(self, micro: MicroBatch) -> torch.Tensor:
        """Logits [N, V] for rows with images or videos, which need positions of their own."""
        if self._vision is None:
            raise TurnwiseError(
                f"the conversations contain images, and {type(self._model).__name__} takes none. Train a vision model, such "
                f"as Qwen2.5-VL"
            )
        rows_BL = micro.token_ids_BL.cpu().numpy()
        kinds_BL = np.stack(
            [self._vision.token_types(ids, media) for ids, media in zip(rows_BL, micro.media_B, strict=True)]
        )
        inputs: dict[str, Any] = {"use_cache": False}
        if self._vision.uses_mrope:
            # padding gets positions as text does; no target attends to it
            axes = [self._vision.position_ids(ids, media) for ids, media in zip(rows_BL, micro.media_B, strict=True)]
            inputs["position_ids"] = torch.from_numpy(np.stack(axes, axis=1)).to(micro.token_ids_BL.device)
        kinds = torch.from_numpy(kinds_BL).to(micro.token_ids_BL.device)
        media = [item for row in micro.media_B for item in row]
        with self._vision.forward_inputs(micro.token_ids_BL, kinds, media) as given:
            return self._predictions(micro, {**inputs, **given})

    def _predictions(self, micro: MicroBatch, inputs: dict[str, Any]) -> torch.Tensor:
        if self._body is not None:
            hidden_BLD = self._body(**inputs)[0]
            return self._head(hidden_BLD[micro.row_N, micro.column_N])
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
