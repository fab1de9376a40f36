"""Log-probabilities in chunks: the same values and gradients as from all logits at once, and never all logits in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.tiny import tiny_model
from training.test_batch import group
from turnwise.training.batch import pack
from turnwise.training.forward import Forward, TokenLogprobs
from turnwise.types import Sampling

N, D, V = 50, 8, 1000
CHUNK = 4 * V * 7
"""Bytes: chunks of 7 targets, of which the 50 targets fill seven and one more."""


def reference(
    weight_VD: torch.Tensor, bias_V: torch.Tensor, hidden_ND: torch.Tensor, token_N: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies [N] in float64, written from the definition, one target after the other."""
    logprobs, entropies = [], []
    for hidden_D, token in zip(hidden_ND, token_N.tolist(), strict=True):
        logits_V = (weight_VD @ hidden_D + bias_V) / sampling.temperature
        order = logits_V.argsort(descending=True).tolist()
        kept = order[: sampling.top_k] if sampling.top_k else order
        if sampling.top_p < 1:
            probs = logits_V[kept].softmax(0).tolist()
            reached, count = 0.0, 0
            while reached < sampling.top_p:
                reached, count = reached + probs[count], count + 1
            kept = kept[:count]
        largest = logits_V.max().item()
        if sampling.min_p:
            kept = [place for place in kept if (logits_V[place] - largest).exp().item() >= sampling.min_p]
        kept = sorted({*kept, token})
        probs = logits_V[kept].softmax(0)
        logprobs.append(probs[kept.index(token)].log())
        entropies.append(-(probs * probs.log()).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("frozen", [False, True], ids=["head is trained", "head is frozen"])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.7, top_p=0.9), Sampling(top_k=20), Sampling(temperature=1.3, min_p=0.05)],
    ids=["plain", "top_p", "top_k", "min_p"],
)
def test_values_and_gradients_are_those_of_the_definition(sampling: Sampling, frozen: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight_VD, bias_V, hidden_ND = (
        torch.randn(size, generator=generator, dtype=torch.float64) for size in ((V, D), (V,), (N, D))
    )
    token_N = torch.randint(V, (N,), generator=generator)
    of_logprob_N, of_entropy_N = (torch.randn(N, generator=generator, dtype=torch.float64) for _ in range(2))
    exact = [tensor.clone().requires_grad_() for tensor in (weight_VD, bias_V, hidden_ND)]
    logprob_N, entropy_N = reference(*exact, token_N, sampling)
    expected = torch.autograd.grad((logprob_N * of_logprob_N + entropy_N * of_entropy_N).sum(), exact)

    head = torch.nn.Linear(D, V)
    with torch.no_grad():
        head.weight.copy_(weight_VD)
        head.bias.copy_(bias_V)
    head.requires_grad_(not frozen)
    single_ND = hidden_ND.float().requires_grad_()
    chunked = TokenLogprobs(head, sampling, vocabulary=V, chunk_bytes=CHUNK)
    own_logprob_N, own_entropy_N = chunked(single_ND, token_N, entropy=True)
    torch.testing.assert_close(own_logprob_N.double(), logprob_N, atol=2e-5, rtol=1e-5)
    assert own_entropy_N is not None
    torch.testing.assert_close(own_entropy_N.double(), entropy_N, atol=2e-5, rtol=1e-5)
    (own_logprob_N * of_logprob_N + own_entropy_N * of_entropy_N).sum().backward()
    own = [head.weight.grad, head.bias.grad, single_ND.grad]
    for gradient, of_definition in zip(own[2:] if frozen else own, expected[2:] if frozen else expected, strict=True):
        assert gradient is not None
        torch.testing.assert_close(gradient.double(), of_definition, atol=1e-4, rtol=1e-4)
    assert not frozen or head.weight.grad is None


def both(model: Any, *, entropy: bool = False, sampling: Sampling | None = None) -> list[list[torch.Tensor]]:
    """Log-probabilities, and the gradients of all parameters: in one piece, and in chunks of 3 targets."""
    (micro,) = pack(group()).micro_batches
    weight_N = torch.randn(len(micro.targets.token_N), generator=torch.Generator().manual_seed(1))
    results = []
    for chunk_bytes in (1 << 30, 3 * 4 * model.config.vocab_size):
        forward = Forward(model, sampling or Sampling(), chunk_bytes=chunk_bytes)
        logprob_N, entropy_N = forward.logprobs(micro, entropy=entropy)
        loss = (logprob_N * weight_N).sum()
        loss = loss if entropy_N is None else loss - 0.1 * entropy_N.sum()
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(loss, parameters)
        results.append([logprob_N.detach(), *gradients])
    return results


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_gets_the_same_gradients_in_chunks(tied: bool, entropy: bool) -> None:
    """Tied weights get the sum of both gradients: that of the embedding and that of the output layer."""
    sampling = Sampling(temperature=0.8, top_k=100)
    for expected, actual in zip(
        *both(tiny_model(tie_word_embeddings=tied), entropy=entropy, sampling=sampling), strict=True
    ):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_a_frozen_head_is_run_once_for_each_chunk_and_a_trained_head_twice() -> None:
    (micro,) = pack(group(), share_prompts=False).micro_batches
    for frozen, times in ((True, 1), (False, 2)):
        model = tiny_model(tie_word_embeddings=False)
        model.lm_head.requires_grad_(not frozen)
        forward = Forward(model, Sampling(), chunk_bytes=3 * 4 * 260)
        calls: list[int] = []
        model.lm_head.register_forward_hook(lambda module, arguments, output, calls=calls: calls.append(len(output)))
        forward.logprobs(micro)[0].sum().backward()
        assert calls == [3, 3, 3, 3, 1] * times


class Largest(TorchDispatchMode):
    """Records the largest tensor that an operation returns, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("frozen", [False, True], ids=["head is trained", "head is frozen"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_p=0.9)], ids=["plain", "top_p"])
def test_no_tensor_holds_the_logits_of_all_targets(sampling: Sampling, frozen: bool) -> None:
    vocabulary, width = 4000, 4
    head = torch.nn.Linear(width, vocabulary).requires_grad_(not frozen)
    hidden_ND = torch.randn(300, width, requires_grad=True)
    token_N = torch.randint(vocabulary, (300,))
    for chunk_bytes, largest in ((10 * 4 * vocabulary, 10 * vocabulary), (1 << 30, 300 * vocabulary)):
        with Largest() as seen:
            logprob_N, entropy_N = TokenLogprobs(head, sampling, vocabulary=vocabulary, chunk_bytes=chunk_bytes)(
                hidden_ND, token_N, entropy=True
            )
            assert entropy_N is not None
            (logprob_N + entropy_N).sum().backward()
        assert seen.elements == largest
