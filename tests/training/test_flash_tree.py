"""The attention of a flat row by torch's flash kernels for sequences of many lengths, and of a row that is cut into parts. Only
CUDA has the kernels: here they are computed from their definition, behind the same names in ATen, so torch checks each call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from support.fake_cuda import fake_cuda
from support.hybrids import CONFIGS, hybrid
from support.tiny import tiny_model
from training.test_batch import conversations
from turnwise.errors import ConfigError
from turnwise.models.model_config import refuse_uncut
from turnwise.models.precision import additive_mask
from turnwise.training import flash_tree
from turnwise.training import tree as tree_module
from turnwise.training.batch import MicroBatch, pack
from turnwise.training.flash_tree import JoinPlan, problem_of
from turnwise.training.forward import Forward, try_tree_attention
from turnwise.training.recurrent_tree import has_recurrent_layers
from turnwise.training.sharded.together import Cut
from turnwise.training.tree import FlatRow, Tree, _TreeMask, tree_attention
from turnwise.types import Sampling

CPU = torch.device("cpu")
wrong: dict[str, float] = {}
"""What the kernel computes falsely."""


def parts(start_q: torch.Tensor, start_k: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    for index in range(len(start_q) - 1):
        yield slice(*start_q[index : index + 2].tolist()), slice(*start_k[index : index + 2].tolist())


def scores(query: torch.Tensor, key: torch.Tensor, causal: bool, scale: float | None) -> torch.Tensor:
    """Of one sequence, float32 [H, Q, K]."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    found = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * (scale or query.shape[-1] ** -0.5)
    if causal:
        found = found.masked_fill(torch.ones(found.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    return found


def kernel(
    query: Any, key: Any, value: Any, start_q: Any, start_k: Any, longest_q: Any, longest_k: Any,
    dropout: Any, causal: Any, debug: Any, *, scale: Any = None, **others: Any,
) -> Any:  # fmt: skip
    assert (dropout, debug, start_q.dtype, start_k.dtype) == (0.0, False, torch.int32, torch.int32)
    assert (longest_q, longest_k) == (int(start_q.diff().max()), int(start_k.diff().max()))
    output, sums = torch.empty_like(query), torch.empty(query.shape[1], len(query))
    for q, k in parts(start_q, start_k):
        score = scores(query[q], key[k], causal, scale)
        of_heads = value[k].float().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        output[q] = torch.einsum("hqk,khd->qhd", score.softmax(-1), of_heads).to(query.dtype)
        sums[:, q] = score.logsumexp(-1) + wrong.get("sums", 0.0)
    state = torch.zeros(2, dtype=torch.uint64)
    return output, sums, state, state.clone(), torch.empty(0)


def kernel_backward(
    gradient: Any, query: Any, key: Any, value: Any, output: Any, sums: Any, start_q: Any, start_k: Any,
    longest_q: Any, longest_k: Any, dropout: Any, causal: Any, state: Any, unused: Any, *, scale: Any = None, **others: Any,
) -> Any:  # fmt: skip
    assert gradient.is_contiguous()
    assert sums.is_contiguous()
    assert sums.dtype == torch.float32
    found = [torch.zeros_like(one, dtype=torch.float32) for one in (query, key, value)]
    groups = (key.shape[1], query.shape[1] // key.shape[1])
    for q, k in parts(start_q, start_k):
        weight = (scores(query[q], key[k], causal, scale) - sums[:, q].unsqueeze(-1)).exp()
        keys, values = (one[k].float().repeat_interleave(groups[1], dim=1) for one in (key, value))
        given = gradient[q].float()
        of_weight = torch.einsum("qhd,khd->hqk", given, values)
        of_score = weight * (of_weight - (given * output[q].float()).sum(-1).T.unsqueeze(-1))
        of_score = of_score * (scale or query.shape[-1] ** -0.5) * wrong.get("gradient", 1.0)
        found[0][q] = torch.einsum("hqk,khd->qhd", of_score, keys)
        found[1][k] = torch.einsum("hqk,qhd->khd", of_score, query[q].float()).unflatten(1, groups).sum(2)
        found[2][k] = torch.einsum("hqk,qhd->khd", weight, given).unflatten(1, groups).sum(2)
    return tuple(part.to(query.dtype) for part in found)


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", kernel, "CPU")
    library.impl("_flash_attention_backward", kernel_backward, "CPU")
    yield
    library._destroy()
    wrong.clear()


def test_runs_with_the_same_context_are_one_group_of_queries() -> None:
    contexts = [np.arange(0), np.array([0, 1, 2]), np.array([0, 1]), np.array([0, 1, 2])]
    plan = JoinPlan.of([4, 1, 2, 3], contexts, CPU)
    assert plan.own.start_q.tolist() == [0, 4, 5, 7, 10]
    assert (plan.own.causal, plan.own.longest_q, plan.own.longest_k) == (True, 4, 4)
    assert plan.place_Q.tolist() == [4, 7, 8, 9, 5, 6]
    assert plan.place_K.tolist() == [0, 1, 2, 0, 1]
    assert plan.context is not None
    assert (plan.context.start_q.tolist(), plan.context.start_k.tolist()) == ([0, 4, 6], [0, 3, 5])
    assert (plan.context.causal, plan.context.longest_q, plan.context.longest_k) == (False, 4, 3)
    assert JoinPlan.of([4, 1], [np.arange(0), np.arange(0)], CPU).context is None


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_a_device_whose_kernel_is_right_is_used(key_heads: int) -> None:
    assert problem_of(CPU, torch.bfloat16, 4, key_heads, 16) is None


@pytest.mark.parametrize(("what", "value", "message"), [("sums", 0.1, "of the"), ("gradient", 0.9, "of the query")])
def test_a_device_whose_kernel_is_wrong_is_not_used(what: str, value: float, message: str) -> None:
    wrong[what] = value
    assert message in (problem_of(CPU, torch.bfloat16, 4, 2, 16) or "")


def test_a_kernel_that_refuses_its_arguments_is_not_used() -> None:
    def refuses(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("no kernel for this head size")

    library = torch.library.Library("aten", "IMPL")
    with pytest.warns(UserWarning, match="[Oo]verrid"):
        library.impl("_flash_attention_forward", refuses, "CPU", allow_override=True)
    assert problem_of(CPU, torch.bfloat16, 4, 2, 16) == "no kernel for this head size"
    library._destroy()


def gradients_of(micro: MicroBatch[Any], dtype: torch.dtype) -> list[torch.Tensor]:
    """Log-probabilities and gradients of a tiny model on the device that is not there."""
    with fake_cuda() as traffic:
        model = tiny_model().to("cuda").to(dtype)
        assert try_tree_attention(model)
        logprob_N, _ = Forward(model, Sampling()).logprobs(micro.to(torch.device("cuda")))
        logprob_N.mean().backward()
        found = [logprob_N, *(parameter.grad for parameter in model.parameters())]
        assert not traffic.mixed
    return [torch.as_tensor(one.detach().tolist()) for one in found]


@pytest.mark.slow
def test_a_model_has_the_log_probabilities_and_gradients_of_the_masked_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    (micro,) = pack(conversations(), micro_batch_tokens=1000).micro_batches
    assert micro.tree is not None
    assert any(len(run.context) for run in micro.tree.runs)
    exact = gradients_of(micro, torch.float32)
    masked = gradients_of(micro, torch.bfloat16)
    calls: list[torch.dtype] = []

    def computes(query: torch.Tensor, key: torch.Tensor, dtype: torch.dtype, *, assumed: bool) -> bool:
        calls.append(dtype)
        return dtype == torch.bfloat16

    monkeypatch.setattr(flash_tree, "computes", computes)
    micro.tree.memo.clear()
    flash = gradients_of(micro, torch.bfloat16)
    assert torch.bfloat16 in calls
    for right, plain, own in zip(exact, masked, flash, strict=True):
        bound = 2 * float((plain - right).abs().max()) + 1e-3 * float(right.abs().max())
        assert float((own - right).abs().max()) <= bound


@pytest.mark.parametrize(("window", "all_keys"), [(None, True), (100, True), (3, False)])
def test_a_window_that_hides_keys_is_left_to_the_masked_calls(window: int | None, all_keys: bool) -> None:
    (micro,) = pack(conversations(), micro_batch_tokens=1000).micro_batches
    assert isinstance(micro.tree, Tree)
    assert _TreeMask(micro.tree, window, False)._sees_all() is all_keys


def test_no_kernel_is_used_on_a_cpu_or_in_float32() -> None:
    query = torch.zeros(3, 4, 16)
    assert not flash_tree.computes(query, query, torch.bfloat16)
    with fake_cuda():
        there = query.to("cuda")
        assert not flash_tree.computes(there, there, torch.float32)
        assert not flash_tree.computes(there, there, torch.bfloat16)  # torch sees no GPU here


# A row that is cut into parts has the attention and the gradients of the whole row, on every way to compute
# attention. The ranks are threads here; `tests/cluster/test_sharded.py` compares passes and updates of real ranks


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
