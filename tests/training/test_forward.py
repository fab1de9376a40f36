"""The trainer's forward pass: log-probabilities in chunks, which of them are used, recomputation, and which rank is slower."""

from __future__ import annotations

import asyncio
import copy
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from support.tiny import tiny_model
from training.test_batch import group
from training.test_precision import SIZES, made, plain
from turnwise.engines.local import LocalEngine
from turnwise.errors import ConfigError
from turnwise.models.loading import recompute_layers
from turnwise.models.lora import add_adapter, without_adapter
from turnwise.options.algorithm import LoraSection, Nll, PpoClip
from turnwise.training.batch import pack, stale_without_logprobs
from turnwise.training.forward import Forward, TokenLogprobs, _body_and_head, try_tree_attention
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import make_loss
from turnwise.training.pace import LayerClock, Pace, SlowestRank
from turnwise.training.update import StopFlag, prepare
from turnwise.types import LogprobKind, Request, Sampling, Trajectory

# Which part of the model the trainer runs: body and head apart only where they are the model, one after the other.


WITHOUT_HEAD_DIM = {name: value for name, value in SIZES.items() if name != "head_dim"}


def test_a_head_on_a_body_is_run_on_the_targets_only() -> None:
    model = tiny_model()
    assert _body_and_head(model) == (model.model, model.lm_head)
    seen: list[torch.Size] = []
    model.lm_head.register_forward_hook(lambda module, arguments, output: seen.append(output.shape))
    (micro,) = pack(group()).micro_batches
    forward = Forward(model, Sampling())
    seen.clear()
    forward.logprobs(micro)
    assert len(micro.targets.token_N) == 13
    assert seen == [(12, 260)]  # two conversations share a sampled token, which is predicted once


@pytest.mark.parametrize(
    "config",
    [
        lambda: hf.GraniteConfig(**WITHOUT_HEAD_DIM, logits_scaling=4.0),
        lambda: hf.Gemma2Config(**SIZES, attn_logit_softcapping=None, final_logit_softcapping=2.0),
        lambda: hf.CohereConfig(**WITHOUT_HEAD_DIM, logit_scale=0.25),
    ],
    ids=["granite", "gemma2", "cohere"],
)
def test_a_model_that_changes_its_heads_logits_is_run_whole(config: Any) -> None:
    model = made(config())
    assert _body_and_head(model) == (None, None)
    one = group()[0]
    (micro,) = pack([one], share_prompts=False).micro_batches
    ids = one.segments[0].token_ids
    expected = [plain(model, ids)[place, ids[place + 1]] for place in (2, 3, 4, 7, 8)]
    torch.testing.assert_close(
        Forward(model, Sampling()).logprobs(micro)[0].detach(), torch.stack(expected), atol=1e-5, rtol=1e-5
    )


# Log-probabilities in chunks: the same values and gradients as from all logits at once, and never all logits in
# memory.


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
    found = chunked(single_ND, token_N, entropy=True)
    own_logprob_N, own_entropy_N = found.logprob_N, found.entropy_N
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
            found = TokenLogprobs(head, sampling, vocabulary=vocabulary, chunk_bytes=chunk_bytes)(
                hidden_ND, token_N, entropy=True
            )
            assert found.entropy_N is not None
            (found.logprob_N + found.entropy_N).sum().backward()
        assert seen.elements == largest


# Which log-probabilities the loss may use: those of the distribution sampled from, and others are computed or
# refused.


NONE, RAW, SAMPLED, TEMPERED = LogprobKind.NONE, LogprobKind.RAW, LogprobKind.SAMPLED, LogprobKind.TEMPERED


def of_kind(kind: LogprobKind, turns: int = 99) -> list[Trajectory]:
    """A group whose first turns have log-probabilities of this kind."""
    trajectories = group()
    for one in trajectories:
        for turn in one.turns[:turns]:
            assert turn.completion is not None
            turn.completion = replace(turn.completion, logprob_kind=kind)
    return trajectories


def policy(sampling: Sampling, **options: float) -> LocalLearner:
    return LocalLearner(tiny_model(), sampling=sampling, loss=make_loss(PpoClip(**options)), threads=1)


def flat(one: LocalLearner) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in one.model.parameters()])


@pytest.mark.parametrize(
    ("sampling", "exact"),
    [
        (Sampling(), {SAMPLED, TEMPERED, RAW}),
        (Sampling(temperature=0.7), {SAMPLED, TEMPERED}),
        (Sampling(top_k=5), {SAMPLED}),
        (Sampling(top_p=0.9), {SAMPLED}),
        (Sampling(temperature=0.7, min_p=0.1), {SAMPLED}),
    ],
)
def test_a_kind_is_exact_where_its_options_change_nothing(sampling: Sampling, exact: set[LogprobKind]) -> None:
    assert sampling.exact_kinds == exact
    assert policy(sampling).requirements.logprob_kinds == exact


@pytest.mark.parametrize("kind", [NONE, RAW, TEMPERED])
def test_numbers_of_another_distribution_are_computed_again_before_the_first_step(kind: LogprobKind) -> None:
    """As if the engine had reported those of the trainer's own weights; in the second pass too, when these have changed."""
    sampling = Sampling(temperature=0.7, top_k=50)
    one, other = policy(sampling), policy(sampling)
    batch = pack(of_kind(kind), kinds=one.requirements.logprob_kinds)
    (micro,) = batch.micro_batches
    assert not micro.targets.known_N.any()
    assert not micro.targets.behaviour_logprob_N.any()
    update = asyncio.run(one.update([batch], lr=1e-2, epochs=2))
    assert update.max_deviation == 0.0  # there is nothing to compare with

    known = pack(group(), kinds=other.requirements.logprob_kinds)
    (micro,) = known.micro_batches
    with torch.no_grad():
        own_N, _ = other._forward.logprobs(micro)
    known = replace(known, micro_batches=[replace(micro, targets=replace(micro.targets, behaviour_logprob_N=own_N))])
    expected = asyncio.run(other.update([known], lr=1e-2, epochs=2))
    assert torch.equal(flat(one), flat(other))
    assert (update.loss, update.kl) == (expected.loss, expected.kl)


def test_what_is_known_is_used_beside_what_is_not() -> None:
    (micro, *rest) = pack(of_kind(NONE, turns=1)).micro_batches
    assert not rest
    # the second turn of the first trajectory is the only one that is no first turn
    assert micro.targets.known_N.tolist() == [
        token == 12 or index == 4 for index, token in enumerate(micro.targets.token_N.tolist())
    ]
    assert micro.targets.behaviour_logprob_N[micro.targets.known_N].tolist() == [-0.5, -0.5]
    one = policy(Sampling())
    (completed,) = prepare(one, pack(of_kind(NONE, turns=1)), StopFlag()).batch.micro_batches
    own_N = one._forward.logprobs(micro)[0].detach()
    assert torch.equal(
        completed.targets.behaviour_logprob_N,
        torch.where(micro.targets.known_N, micro.targets.behaviour_logprob_N, own_N),
    )
    update = asyncio.run(one.update([pack(of_kind(NONE, turns=1))], lr=0.0))
    known = (own_N - micro.targets.behaviour_logprob_N)[micro.targets.known_N].exp()
    assert update.max_deviation == pytest.approx(float((known - 1).abs().max()), rel=1e-5)


def test_the_likelihood_needs_no_log_probabilities_of_the_engine() -> None:
    one = LocalLearner(tiny_model(), sampling=Sampling(), loss=make_loss(Nll()), share_prompts="never")
    batch = pack(of_kind(NONE), share_prompts=False)
    assert prepare(one, batch, StopFlag()).batch is batch


def test_unknown_log_probabilities_of_older_weights_break_their_trajectory() -> None:
    whole, unknown = group()[0], of_kind(NONE)[0]
    kinds = Sampling().exact_kinds
    assert stale_without_logprobs(unknown, kinds=kinds, version=0) is None
    assert stale_without_logprobs(whole, kinds=kinds, version=1) is None
    failure = stale_without_logprobs(unknown, kinds=kinds, version=1)
    assert failure is not None
    assert failure.kind == "engine"
    assert "turn 0 was sampled by weights of version 0, is used to train version 1" in failure.message
    assert "of the kind 'none'; importance correction needs raw or sampled or tempered" in failure.message


# Gradient checkpointing: the same gradients with fewer saved tensors, from layers that are computed twice.


def gradients(model: Any, *, share_prompts: bool) -> tuple[list[torch.Tensor], int, int]:
    """The gradients of all trained parameters, the bytes that the forward pass saves, and the calls of the first layer's MLP."""
    calls: list[None] = []
    handle = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(None))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    own = {parameter.data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    (micro,) = pack(group(), share_prompts=share_prompts).micro_batches
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        logprob_N, _ = Forward(model, Sampling(temperature=0.9)).logprobs(micro)
        loss = (logprob_N * micro.targets.advantage_N).sum()
    calls_before = len(calls)
    result = torch.autograd.grad(loss, parameters)
    handle.remove()
    return list(result), sum(saved.values()), len(calls) - calls_before


@pytest.mark.parametrize("share_prompts", [True, False], ids=["trees", "rows"])
@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "lora"])
def test_gradients_are_equal_and_activations_are_not_kept(lora: bool, share_prompts: bool) -> None:
    model = tiny_model(num_hidden_layers=4)
    if lora:
        add_adapter(model, LoraSection(rank=4, alpha=8.0))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_()
    if share_prompts:
        assert try_tree_attention(model)
    expected, kept, again = gradients(model, share_prompts=share_prompts)
    assert again == 0
    recompute_layers(model)
    assert not any(module.training for module in model.modules())
    actual, less, again = gradients(model, share_prompts=share_prompts)
    assert again == 1
    assert less < kept / 3
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


def test_the_engine_samples_from_the_same_model_with_its_cache() -> None:
    """Also in the engine's generic pass, which runs the model's own layers with a key-value cache."""
    plain = made(__import__("transformers").Qwen2Config(**{**SIZES, "hidden_act": "gelu"}))
    recomputed = copy.deepcopy(plain)
    recompute_layers(recomputed)

    async def sampled(model: Any) -> list[int]:
        engine = LocalEngine(model, threads=1)
        request = Request(token_ids=[3, 4, 5], sampling=Sampling(max_tokens=8), seed=1, conversation="c")
        tokens = list((await engine.generate(request)).token_ids)
        await engine.close()
        return tokens

    assert asyncio.run(sampled(recomputed)) == asyncio.run(sampled(plain))


def test_a_copy_and_the_model_without_adapter_run_their_own_layers() -> None:
    model = tiny_model()
    add_adapter(model, LoraSection(rank=4, alpha=8.0))
    recompute_layers(model)
    ids = torch.arange(9)[None]
    other, base = copy.deepcopy(model), without_adapter(model)
    with torch.no_grad():
        before = base(ids).logits
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
        assert torch.equal(base(ids).logits, before)
        assert torch.equal(other(ids).logits, before)
        assert not torch.equal(model(ids).logits, before)


def test_a_model_without_layers_of_transformers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.gradient_checkpointing: Linear does not support it"):
        recompute_layers(torch.nn.Linear(2, 2))


# Which rank is slower than the others, from the time that the layers of each compute


def paces(*numbers: tuple[int, float]) -> list[Pace]:
    return [Pace(f"host{rank}", tokens, seconds) for rank, (tokens, seconds) in enumerate(numbers)]


@pytest.mark.parametrize(
    ("updates", "rank", "times"),
    [
        ([paces((100, 1.0), (100, 10.0))], 1, 10.0),
        ([paces((100, 1.0), (100, 1.0), (100, 4.0), (100, 1.0))], 2, 4.0),
        ([paces((100, 1.0), (400, 4.0), (100, 1.0))], 0, 1.0),  # more tokens
        ([paces((1000, 10.0), (1000, 10.0), (1, 0.5))], 0, 1.0),  # a small micro-batch, whose tokens take longer
        ([paces((100, 1.0), (100, 4.0), (0, 0.0))], 1, 4.0),  # a rank without micro-batches is no measure
        ([paces((100, 1.0), (0, 0.0)), paces((0, 0.0), (100, 6.0))], 1, 6.0),  # one step each
    ],
)
def test_the_slowest_rank_is_slow_in_all_and_for_each_token(updates: list[list[Pace]], rank: int, times: float) -> None:
    found = SlowestRank.of(updates)
    assert found is not None
    assert (found.rank, found.place) == (rank, f"host{rank}")
    assert found.times == pytest.approx(times)


def test_one_rank_that_computes_is_not_compared() -> None:
    assert SlowestRank.of([]) is None
    assert SlowestRank.of([[]]) is None
    assert SlowestRank.of([paces((100, 1.0), (0, 0.0))]) is None


class Sleeping(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return (x * 2).exp().exp()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_time_inside_of_layers_is_counted_while_a_pass_runs(checkpointing: bool) -> None:
    layer = Sleeping()
    layer.register_forward_hook(lambda *_: time.sleep(0.2))  # as what `fully_shard` has registered before
    clock = LayerClock([layer], "here")
    layer(torch.ones(1))  # not counted

    def run(x: Any) -> None:
        y = checkpoint(layer, x, use_reentrant=False) if checkpointing else layer(x)
        assert isinstance(y, torch.Tensor)
        y.backward()

    began = time.perf_counter()
    for _ in range(3):
        with clock.running(7):
            run(torch.ones(1, requires_grad=True))
    clocked = time.perf_counter() - began
    pace = clock.take()
    assert (pace.place, pace.tokens) == ("here", 21)
    assert 3 * 0.05 <= pace.seconds < clocked - 3 * 0.2
    assert clock.take() == Pace("here")
