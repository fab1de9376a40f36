"""The attention of a flat row by torch's flash kernels for sequences of many lengths, which only CUDA has: here they are computed
from their definition, behind the same names in ATen, so that torch checks the arguments of each call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from support.fake_cuda import fake_cuda
from support.tiny import tiny_model
from training.test_batch import conversations
from turnwise.training import flash_tree
from turnwise.training.batch import MicroBatch, pack
from turnwise.training.flash_tree import JoinPlan, problem_of
from turnwise.training.forward import Forward, try_tree_attention
from turnwise.training.tree import Tree, _TreeMask
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
