"""What a completion is: exact ids, log-probabilities of the declared kind, stop reasons, seeds, limits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
import torch

from engines.conformance.reference import assert_could_be_sampled, reference_logprobs
from engines.conformance.subjects import SCRIPT, STOP, Subject
from turnwise.errors import EngineError
from turnwise.types import Completion, Request, Sampling

QUESTION = "<|im_start|>user\nTom has 12 apples and buys 3 bags of 4 apples.<|im_end|>\n<|im_start|>assistant\n"
SAMPLINGS = {
    "temperature 1": {},
    "temperature 0.6": {"temperature": 0.6},
    "greedy": {"temperature": 0.0},
    "top-p": {"top_p": 0.7, "temperature": 1.2},
    "top-k": {"top_k": 5},
    "min-p": {"min_p": 0.1},
}


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens, of different lengths."""
    draw = random.Random(seed)
    return [[draw.randrange(3, 760) for _ in range(draw.randrange(5, 60))] for _ in range(count)]


def assert_exact(subject: Subject, request: Request, completion: Completion) -> None:
    """The completion's columns agree with each other and with the trainer's model."""
    ids, claims = list(completion.token_ids), subject.claims
    assert len(ids) == len(completion.logprobs) == len(completion.versions)
    assert all(type(token) is int and 0 <= token < 760 for token in ids)
    assert set(completion.versions) == {subject.engine.version}
    assert completion.logprob_kind is claims.logprob_kind
    if not claims.samples:
        assert list(completion.logprobs) == [0.0] * len(ids)
        return
    assert_could_be_sampled(subject.model, request.token_ids, ids, request.sampling)
    kind = subject.kind(request.sampling)
    expected = reference_logprobs(subject.model, request.token_ids, ids, request.sampling, kind)
    assert list(completion.logprobs) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=list(SAMPLINGS))
def test_ids_and_logprobs_are_those_of_the_model(subject: Subject, sampling: dict[str, float]) -> None:
    requests = [
        subject.request(prompt, seed=index, max_tokens=16, stop_token_ids=(STOP,), **sampling)
        for index, prompt in enumerate(prompts(6))
    ]
    for request, completion in zip(requests, subject.ask(*requests), strict=True):
        assert_exact(subject, request, completion)
        ids = list(completion.token_ids)
        assert STOP not in ids[:-1]
        assert (len(ids), completion.finish_reason) == (16, "length") or (
            ids[-1] == STOP and completion.finish_reason == "stop"
        )
        if not subject.claims.samples:
            assert ids == [*subject.renderer.encode(SCRIPT[0]), STOP][:16]


def test_raw_logprobs_are_those_of_the_logits(subject: Subject) -> None:
    request = subject.request(prompts(1)[0], max_tokens=8, temperature=0.5, top_k=7)
    (completion,) = subject.ask(request)
    if completion.raw_logprobs is not None:
        from turnwise.types import LogprobKind

        ids = completion.token_ids
        raw = reference_logprobs(subject.model, request.token_ids, ids, request.sampling, LogprobKind.RAW)
        assert list(completion.raw_logprobs) == pytest.approx(raw, abs=1e-4)


# stop reasons


def greedy(subject: Subject, prompt: Sequence[int], count: int = 40) -> list[int]:
    """The most probable tokens after a prompt, without any stop."""
    completion = subject.ask_one(prompt, temperature=0.0, max_tokens=count)
    assert (len(completion.token_ids), completion.finish_reason) == (count, "length")
    return list(completion.token_ids)


def question(subject: Subject) -> list[int]:
    """A question as the model knows it: the greedy answer ends a turn."""
    return subject.renderer.encode(QUESTION)


def test_a_stop_token_ends_the_completion_and_is_kept(subject: Subject) -> None:
    if not subject.claims.samples:
        completion = subject.ask_one(question(subject), max_tokens=40, stop_token_ids=(STOP,))
        assert (completion.token_ids[-1], completion.finish_reason) == (STOP, "stop")
        return
    tokens = greedy(subject, question(subject))
    for stop in (tokens[3], tokens[7]):
        end = tokens.index(stop) + 1
        completion = subject.ask_one(question(subject), temperature=0.0, max_tokens=40, stop_token_ids=(STOP, stop))
        first_stop = min(end, tokens.index(STOP) + 1 if STOP in tokens else end)
        assert list(completion.token_ids) == tokens[:first_stop]
        assert completion.finish_reason == "stop"
        # with exactly as many tokens as there may be, it is still a stop
        same = subject.ask_one(question(subject), temperature=0.0, max_tokens=first_stop, stop_token_ids=(STOP, stop))
        assert (list(same.token_ids), same.finish_reason) == (tokens[:first_stop], "stop")


def test_only_the_tokens_of_the_request_stop(subject: Subject) -> None:
    """The model's own end of turn is an ordinary token where the request does not name it."""
    if not subject.claims.samples:
        completion = subject.ask_one(question(subject), max_tokens=3)
        assert (len(completion.token_ids), completion.finish_reason) == (3, "length")
        return
    tokens = greedy(subject, question(subject), 60)
    assert STOP in tokens[:-1]
    completion = subject.ask_one(question(subject), temperature=0.0, max_tokens=60, stop_token_ids=(759,))
    assert list(completion.token_ids) == tokens
    assert completion.finish_reason == "length"
    sampling = Sampling(temperature=0.0)
    expected = reference_logprobs(subject.model, question(subject), tokens, sampling, subject.kind(sampling))
    assert list(completion.logprobs) == pytest.approx(expected, abs=1e-4)


def test_a_stop_text_ends_the_completion_with_the_token_that_completes_it(subject: Subject) -> None:
    if not subject.claims.samples:
        # the texts of a script are complete turns: they are not searched for stop texts
        completion = subject.ask_one(question(subject), max_tokens=40, stop=("answer",))
        assert subject.renderer.decode(completion.token_ids[:-1]) == SCRIPT[0]
        return
    tokens = greedy(subject, question(subject))
    decode = subject.renderer.decode
    stop = decode(tokens[4:6])[-3:]  # the end of one token and of the next
    end = next(count for count in range(len(tokens) + 1) if stop in decode(tokens[:count]))
    completion = subject.ask_one(question(subject), temperature=0.0, max_tokens=40, stop=("never written", stop))
    assert list(completion.token_ids) == tokens[:end]
    assert completion.finish_reason == "stop"


def test_the_limit_ends_the_completion(subject: Subject) -> None:
    for limit in (1, 3):
        completion = subject.ask_one(question(subject), max_tokens=limit, temperature=0.0)
        assert (len(completion.token_ids), completion.finish_reason) == (limit, "length")


# seeds


def test_the_same_seed_gives_the_same_tokens(subject: Subject) -> None:
    prompt = prompts(1, seed=5)[0]

    def sample(seed: int, others: int) -> tuple[int, ...]:
        requests = [subject.request(prompt, seed=seed, max_tokens=24)]
        requests += [subject.request(other, seed=9, max_tokens=24) for other in prompts(others, seed=6)]
        return tuple(subject.ask(*requests)[0].token_ids)

    alone = {sample(7, 0), sample(7, 5), sample(7, 0)}
    if not subject.claims.samples:
        assert len(alone) == 1
        return
    others = {sample(seed, 0) for seed in (8, 9, 10)}
    assert len(others | alone) >= 4, "different seeds must give different tokens"
    if subject.claims.seeded:
        assert len(alone) == 1
    else:
        assert len(alone) > 1, "the engine keeps seeds and does not declare it"


# limits


def test_a_prompt_that_leaves_no_room_is_refused(subject: Subject) -> None:
    context = subject.model.config.max_position_embeddings
    too_long = [5] * context
    if not subject.claims.samples:  # no model, no context
        assert subject.ask_one(too_long, max_tokens=4).token_ids
        return
    with pytest.raises(EngineError, match=rf"{context} tokens"):
        subject.ask_one(too_long, max_tokens=4)


def test_a_completion_ends_at_the_end_of_the_context(subject: Subject) -> None:
    if not subject.claims.samples:
        return  # no context: the previous case asserts it
    context = subject.model.config.max_position_embeddings
    prompt = [random.Random(1).randrange(3, 760) for _ in range(context - 5)]
    completion = subject.ask_one(prompt, max_tokens=400)
    assert (len(completion.token_ids), completion.finish_reason) == (5, "length")


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "empty"),
        ([3, 760], {}, "3 to 760.*0 to 759"),
        ([-1, 3], {}, "-1 to 3.*0 to 759"),
        ([3], {"max_tokens": 0}, "max_tokens is 0"),
        ([3], {"temperature": -1.0}, "temperature -1"),
    ],
)
def test_what_no_server_can_serve_is_refused_and_harms_nobody(
    subject: Subject, prompt: list[int], sampling: dict[str, float], message: str
) -> None:
    if not subject.claims.samples:
        return  # the prompt and the distribution have no effect on given texts
    good = subject.request(prompts(1)[0], max_tokens=8)

    async def both() -> list[Completion | BaseException]:
        bad = subject.request(prompt, **sampling)
        return await asyncio.gather(*map(subject.engine.generate, (bad, good)), return_exceptions=True)

    error, completion = subject.run(both())
    assert isinstance(error, EngineError)
    with pytest.raises(EngineError, match=message):
        raise error
    assert isinstance(completion, Completion)
    assert_exact(subject, good, completion)


def test_many_requests_at_once(subject: Subject) -> None:
    draw = random.Random(3)
    requests = [
        subject.request(prompt, seed=index, max_tokens=draw.randrange(1, 30), temperature=draw.choice([0.0, 0.7, 1.0]))
        for index, prompt in enumerate(prompts(40, seed=8))
    ]
    completions = subject.ask(*requests)
    for request, completion in zip(requests, completions, strict=True):
        assert_exact(subject, request, completion)
        if subject.claims.samples:
            assert len(completion.token_ids) == request.sampling.max_tokens
    if subject.claims.samples:
        entropy = -sum(sum(completion.logprobs) for completion in completions)
        assert torch.isfinite(torch.tensor(entropy))
        assert len({tuple(completion.token_ids) for completion in completions}) > 30
