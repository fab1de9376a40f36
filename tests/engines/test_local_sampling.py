"""What the embedded engine draws, and the log-probabilities that it reports of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engines.test_local_tokens import ask, make, one_thread, tokens  # noqa: F401
from turnwise.engines.local import LocalEngine
from turnwise.engines.local.scheduler import SamplingTensors, random_stream, sample_tokens, uniforms
from turnwise.models.distribution import sampling_logits
from turnwise.types import Completion, LogprobKind, Request, Sampling

SAMPLINGS = {
    "plain": Sampling(max_tokens=24),
    "temperature": Sampling(temperature=0.7, max_tokens=24),
    "top-p": Sampling(top_p=0.8, max_tokens=24),
    "top-k": Sampling(temperature=1.3, top_k=5, max_tokens=24),
    "min-p": Sampling(min_p=0.05, max_tokens=24),
    "all": Sampling(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, max_tokens=24),
    "greedy": Sampling(temperature=0, max_tokens=24),
}


def request(name: str, seed: int = 0, conversation: str | None = None) -> Request:
    prompt = tokens(20 + len(name))
    return Request(conversation=conversation or name, token_ids=prompt, sampling=SAMPLINGS[name], seed=seed)


def logits_of(model: torch.nn.Module, asked: Request, said: Completion) -> torch.Tensor:
    """The model's own logits [N, V] at the sampled tokens, in one pass."""
    whole = torch.tensor([[*asked.token_ids, *said.token_ids]])
    with torch.no_grad():
        return model(input_ids=whole).logits[0, len(asked.token_ids) - 1 : -1].float()


def picked(logits_NV: torch.Tensor, said: Completion) -> list[float]:
    ids_N1 = torch.tensor(said.token_ids).unsqueeze(1)
    return logits_NV.log_softmax(dim=-1).gather(1, ids_N1).squeeze(1).tolist()


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_log_probabilities_are_those_of_one_pass(family: str) -> None:
    model = make(family)
    requests = [request(name) for name in SAMPLINGS]
    for asked, said in zip(requests, ask(LocalEngine(model, threads=1), *requests), strict=True):
        logits_NV = logits_of(model, asked, said)
        assert said.raw_logprobs == pytest.approx(picked(logits_NV, said), abs=1e-4)
        assert said.logprob_kind is LogprobKind.SAMPLED
        sampling = asked.sampling
        if sampling.temperature == 0:
            assert list(said.logprobs) == [0.0] * 24
            assert list(said.token_ids) == logits_NV.argmax(dim=-1).tolist()
            continue
        sampled_NV = sampling_logits(
            logits_NV,
            temperature_N=sampling.temperature,
            top_k_N=sampling.top_k,
            top_p_N=sampling.top_p,
            min_p_N=sampling.min_p,
        )
        assert said.logprobs == pytest.approx(picked(sampled_NV, said), abs=1e-4)


def test_a_request_draws_the_same_in_whatever_company() -> None:
    model = make("qwen3")
    alone = [ask(LocalEngine(model, threads=1), request("plain", seed))[0].token_ids for seed in range(3)]
    others = [request("top-p", 7), request("greedy"), *[request("plain", seed, f"c{seed}") for seed in range(3)]]
    together = [said.token_ids for said in ask(LocalEngine(model, threads=1), *others)[2:]]
    assert together == alone
    assert len({tuple(each) for each in alone}) == 3


def test_one_thread_repeats_every_bit() -> None:
    model = make("qwen3")
    requests = [request(name, seed, f"{name}{seed}") for seed in range(4) for name in SAMPLINGS]
    first, second = (ask(LocalEngine(model, threads=1), *requests) for _ in range(2))
    assert first == second


def test_draws_follow_the_distribution() -> None:
    count = 20_000
    logits_NV = torch.tensor([0.0, 1.0, 2.0, -torch.inf, 0.5]).expand(count, 5)
    sampling = Sampling(temperature=0.8)
    numbers_N = uniforms(np.full(count, random_stream(3)), np.arange(count))
    drawn = sample_tokens(logits_NV, SamplingTensors.of([sampling] * count, torch.device("cpu")), numbers_N)
    share_V = np.bincount(drawn.tokens_B, minlength=5) / count
    expected_V = (logits_NV[0] / 0.8).softmax(dim=-1).numpy()
    # four standard deviations of the largest share
    assert share_V == pytest.approx(expected_V, abs=4 * 0.5 / count**0.5)
    assert share_V[3] == 0


@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-24])
def test_the_ends_of_the_stream_draw_no_impossible_token(number: float) -> None:
    logits_1V = torch.tensor([[-torch.inf, 0.0, -60.0, 0.3, -torch.inf, -torch.inf]])
    drawn = sample_tokens(
        logits_1V, SamplingTensors.of([Sampling()], torch.device("cpu")), np.array([number], dtype=np.float32)
    )
    assert drawn.tokens_B[0] in (1, 3)
    assert np.isfinite(drawn.logprobs_B).all()


def test_the_stream_is_even_and_neighbours_are_strangers() -> None:
    streams_N = np.array([random_stream(seed) for seed in range(-500, 500)], dtype=np.uint64)
    numbers_NI = np.stack([uniforms(streams_N, np.full(1000, index)) for index in range(100)], axis=1)
    assert numbers_NI.min() >= 0
    assert numbers_NI.max() < 1
    assert numbers_NI.mean() == pytest.approx(0.5, abs=0.01)
    assert abs(np.corrcoef(numbers_NI[:-1].ravel(), numbers_NI[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(numbers_NI[:, :-1].ravel(), numbers_NI[:, 1:].ravel())[0, 1]) < 0.02


def test_half_precision() -> None:
    model = make("qwen3").to(torch.bfloat16)
    asked = request("temperature")
    said = ask(LocalEngine(model, threads=1), asked)[0]
    own = picked(logits_of(model, asked, said), said)
    assert said.raw_logprobs is not None
    assert np.abs(np.array(said.raw_logprobs) - own).mean() < 0.1
