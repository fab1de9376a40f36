"""A row that is cut into parts has the attention and the gradients of the whole row, on every way to compute attention. The ranks
are threads here; `tests/cluster/test_sharded.py` compares passes and updates of real ranks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from support.hybrids import CONFIGS, hybrid
from training.test_flash_tree import kernels
from turnwise.errors import ConfigError
from turnwise.models.model_config import refuse_uncut
from turnwise.models.precision import additive_mask
from turnwise.training import flash_tree
from turnwise.training import tree as tree_module
from turnwise.training.forward import try_tree_attention
from turnwise.training.recurrent_tree import has_recurrent_layers
from turnwise.training.sharded.together import Cut
from turnwise.training.tree import FlatRow, Tree, _TreeMask, tree_attention

__all__ = ["kernels"]

SEQUENCES = [(1, 2, 3, 4), (1, 2, 3, 5, 6, 7, 8, 9), (1, 2, 3, 5, 6, 10), (1, 2, 3, 5, 6, 10, 11), (12, 13)]
ROW = FlatRow.of([np.array(sequence) for sequence in SEQUENCES])
HEADS = (4, 2, 2, 4)
"""Of queries, keys, values and gradients."""


class Threads:
    """The `KeyExchange` of a thread among those that compute the parts of a row."""

    def __init__(self, rank: int, slots: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self._rank, self._slots, self._barrier = rank, slots, barrier

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._slots[self._rank] = tensor
        self._barrier.wait(60)
        found = list(self._slots)
        self._barrier.wait(60)
        return found

    def gathered(self, key_TJD: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._all(key_TJD))

    def summed(self, gradient_KJD: torch.Tensor) -> torch.Tensor:
        total = torch.stack(self._all(gradient_KJD)).sum(0)
        return total.chunk(len(self._slots))[self._rank]


def attended(
    tree: Tree, tensors: list[torch.Tensor], window: int | None, sink_H: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """The output [T, H, D], and the gradients of query, key and value [T, H, D], and of sinks."""
    query, key, value, gradient = (tensor.detach().clone() for tensor in tensors)
    own = [one.requires_grad_() for one in (query, key, value)]
    sinks = None if sink_H is None else sink_H.detach().clone().requires_grad_()
    query_HTD, key_HTD, value_HTD = (one.transpose(0, 1) for one in own)
    output = _TreeMask(tree, window, False).attend(query_HTD, key_HTD, value_HTD, None, sinks)
    output.backward(gradient)
    return [output.detach(), *(one.grad for one in (*own, sinks) if one is not None and one.grad is not None)]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", ["cpu", "accelerator", "flash kernel"])
def test_parts_have_the_attention_of_the_whole_row(
    kind: str, window: int | None, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_tree, "computes", lambda *_, assumed: kind == "flash kernel")
    accelerated = kind != "cpu"
    generator = torch.Generator().manual_seed(0)
    tokens = len(ROW.token_ids)
    whole = [torch.randn(tokens, heads, 8, generator=generator) for heads in HEADS]
    expected = attended(replace(Tree.of(ROW.runs), accelerated=accelerated), whole, window)
    cut, slots = Cut(tokens, ranks), [torch.empty(0)] * ranks
    padded = [torch.nn.functional.pad(one, (0, 0, 0, 0, 0, cut.padding)) for one in whole]
    barrier = threading.Barrier(ranks)

    def part(rank: int) -> list[torch.Tensor]:
        tree = cut.tree(ROW.runs, rank, Threads(rank, slots, barrier))
        places = torch.from_numpy(cut.places(rank))
        return attended(replace(tree, accelerated=accelerated), [one[places] for one in padded], window)

    with ThreadPoolExecutor(ranks) as threads:
        parts = list(threads.map(part, range(ranks)))
    key_T = torch.from_numpy(cut.key_of(np.arange(tokens)))
    for right, *of_ranks in zip(expected, *parts, strict=True):
        assert torch.allclose(torch.cat(of_ranks)[key_T], right, atol=1e-5)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_large_masks_are_made_in_pieces(window: int | None, sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(len(ROW.token_ids), heads, 8, generator=generator) for heads in HEADS]
    sink_H = torch.randn(HEADS[0], generator=generator) if sinks else None
    tree = Tree.of(ROW.runs)
    expected = attended(tree, tensors, window, sink_H)
    made: list[int] = []

    def noted(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        made.append(hidden.numel())
        return additive_mask(hidden, dtype)

    monkeypatch.setattr(tree_module, "additive_mask", noted)
    monkeypatch.setattr(tree_module, "_MOST_MASKED_PAIRS", 16)
    found = attended(tree, tensors, window, sink_H)
    longest = max(bucket.key_NK.numel() for bucket in tree.buckets)
    assert max(made) <= max(16, longest) < max(b.query_NR.numel() * b.key_NK.shape[1] for b in tree.buckets)
    for one, right in zip(found, expected, strict=True):
        assert torch.allclose(one, right, atol=1e-5)


@pytest.mark.parametrize(("tokens", "ranks"), [(1, 2), (2, 2), (7, 2), (8, 2), (25, 4)])
def test_each_rank_has_two_pieces_of_a_row(tokens: int, ranks: int) -> None:
    cut = Cut(tokens, ranks)
    places = [cut.places(rank) for rank in range(ranks)]
    assert {len(own) for own in places} == {2 * cut.piece}
    assert sorted(np.concatenate(places)) == list(range(tokens + cut.padding))
    assert cut.key_of(np.concatenate(places)).tolist() == list(range(tokens + cut.padding))
    assert cut.padding < 2 * ranks


def gradients(model: Any, tree: Tree, ids: np.ndarray, position: np.ndarray, chosen: np.ndarray) -> list[torch.Tensor]:
    """The logits [T, V] of a tree's tokens, and the gradient of the embedding for the sum of squares of the `chosen` ones."""
    ids_1T, position_1T = (torch.from_numpy(column[None]) for column in (ids, position))
    embedding = model.get_input_embeddings().weight
    with tree_attention(tree):
        logits_TV = model(ids_1T, position_ids=position_1T, use_cache=False).logits[0]
    return [logits_TV.detach(), *torch.autograd.grad(logits_TV[chosen].square().sum(), embedding)]


QUICK = ("lfm2", "jamba", "qwen3_next")


@pytest.mark.parametrize(
    "family",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted({*CONFIGS} - {"llama4"})],
)
def test_layers_with_a_state_compute_the_tokens_of_all_ranks(family: str) -> None:
    ranks, model = 2, hybrid(family)
    assert has_recurrent_layers(model)
    if not try_tree_attention(model):
        pytest.skip("computes each sequence by itself, and is refused")
    ids, position = ROW.token_ids, ROW.position
    expected = gradients(model, Tree.of(ROW.runs), ids, position, np.arange(len(ids)))
    cut, slots = Cut(len(ids), ranks), [torch.empty(0)] * ranks
    padded_ids, padded_position = (np.pad(column, (0, cut.padding)) for column in (ids, position))
    barrier = threading.Barrier(ranks)

    def part(rank: int) -> list[torch.Tensor]:
        tree, places = cut.tree(ROW.runs, rank, Threads(rank, slots, barrier)), cut.places(rank)
        return gradients(model, tree, padded_ids[places], padded_position[places], np.flatnonzero(places < len(ids)))

    with ThreadPoolExecutor(ranks) as threads:
        parts = list(threads.map(part, range(ranks)))
    key_T = torch.from_numpy(cut.key_of(np.arange(len(ids))))
    for actual, right in zip(
        (
            torch.cat([logits_TV for logits_TV, _ in parts])[key_T],
            torch.stack([gradient for _, gradient in parts]).sum(0),
        ),
        expected,
        strict=True,
    ):
        torch.testing.assert_close(actual, right, atol=1e-5 * float(right.abs().max()), rtol=1e-3)


@pytest.mark.parametrize("nested", [False, True])
def test_a_model_whose_rotary_embedding_depends_on_the_length_is_not_cut(nested: bool) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config = LlamaConfig(rope_parameters=rope)
    if nested:
        config.rope_parameters = {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(ConfigError, match=r"rotary embeddings of the type dynamic, which depend on the length"):
        refuse_uncut(config, 2)
    refuse_uncut(LlamaConfig(rope_parameters={**rope, "rope_type": "linear"}), 2)
