"""New weights: between turns, in the middle of a turn, refused, and after the death of a server."""

from __future__ import annotations

import asyncio

import pytest
import torch

from engines.conformance.reference import reference_logprobs
from engines.conformance.subjects import Subject, change, state_of
from engines.conformance.test_conformance_life import start_requests
from engines.conformance.test_conformance_sampling import assert_exact, prompts
from turnwise.errors import EngineError
from turnwise.types import Completion


def next_version(subject: Subject) -> int:
    return subject.engine.version + 1


def publish_changed(subject: Subject) -> int:
    """Change the trainer's model and give the engine its weights. Returns their version."""
    version = next_version(subject)
    if subject.claims.takes_weights:
        change(subject.model, version)
    subject.run(subject.publish(version))
    assert subject.engine.version == version
    return version


def test_an_update_between_two_turns(subject: Subject) -> None:
    before = subject.engine.version
    first = subject.request(prompts(1, seed=20)[0], conversation="update", max_tokens=20)
    (answer,) = subject.ask(first)
    assert_exact(subject, first, answer)
    assert publish_changed(subject) == before + 1
    second = subject.request([*first.token_ids, *answer.token_ids, 7, 8], conversation="update", max_tokens=20)
    (answer,) = subject.ask(second)
    # `assert_exact`: all tokens have the new version, and the log-probabilities of the new weights after the whole history
    assert_exact(subject, second, answer)
    assert set(answer.versions) == {before + 1}
    if subject.claims.cache_block is not None:
        assert answer.cached_tokens == 0, "the keys and values of the previous weights were used"
    subject.engine.release("update")


def test_an_update_in_the_middle_of_a_turn(subject: Subject) -> None:
    """Requests that run during the update go on under the new weights."""
    if not subject.claims.samples:
        return  # a text is returned at once
    subject.ask(subject.request(prompts(1, seed=22)[0], max_tokens=8))  # the first request of a server is slow
    before, old = subject.engine.version, dict(subject.model.state_dict())
    old = {name: tensor.clone() for name, tensor in old.items()}
    prompt = prompts(1, seed=21)[0]
    # on a loaded machine, an update may take as long as hundreds of tokens
    requests = [subject.request(prompt, seed=index, max_tokens=1400) for index in range(3)]

    async def play() -> list[Completion]:
        with subject.slowed():
            running = await start_requests(subject, requests)
            change(subject.model, 99 + before)
            await subject.publish(before + 1)
        return await asyncio.gather(*running)

    completions = subject.run(play())
    for request, completion in zip(requests, completions, strict=True):
        versions = list(completion.versions)
        assert len(versions) == len(completion.token_ids) == len(completion.logprobs) == 1400
        switch = versions.index(before + 1)
        assert switch, "it has begun after the update"
        assert versions == [before] * switch + [before + 1] * (1400 - switch)
        new = reference_logprobs(subject.model, prompt, completion.token_ids, request.sampling, completion.logprob_kind)
        differ = [abs(a - b) > 1e-3 for a, b in zip(completion.logprobs, new, strict=True)]
        assert any(differ[:switch]), "the tokens before the update have the log-probabilities of the new weights"
        if subject.claims.recomputes:
            assert not any(differ[switch:])
        present = subject.model.state_dict()
        current = {name: tensor.clone() for name, tensor in present.items()}
        subject.model.load_state_dict(old)
        expected = reference_logprobs(
            subject.model, prompt, completion.token_ids[:switch], request.sampling, completion.logprob_kind
        )
        subject.model.load_state_dict(current)
        assert list(completion.logprobs[:switch]) == pytest.approx(expected, abs=2e-4)
    request = subject.request(prompt, max_tokens=10)
    assert_exact(subject, request, *subject.ask(request))


def test_weights_that_do_not_fit_leave_the_old_ones(subject: Subject) -> None:
    if not subject.claims.takes_weights:
        return
    version, state = subject.engine.version, dict(state_of(subject.model))
    name = "model.layers.1.self_attn.q_proj.weight"
    request = subject.request(prompts(1, seed=22)[0], max_tokens=12)

    def refuse(weights: dict[str, torch.Tensor]) -> None:
        with pytest.raises(EngineError):
            subject.run(subject.engine.load_weights(version + 1, weights))
        assert subject.engine.version == version
        completion = subject.ask(request)[0]
        assert_exact(subject, request, completion)
        assert set(completion.versions) == {version}

    refuse({key: tensor for key, tensor in state.items() if key != name})
    refuse({**state, name: torch.zeros(3, 4)})
    refuse({**state, "model.nothing.weight": torch.zeros(3)})


def test_servers_that_die_come_back_with_the_present_weights(subject: Subject) -> None:
    if not subject.claims.processes:
        with pytest.raises(AssertionError, match="has no processes"):
            subject.kill()
        return
    version = publish_changed(subject)
    prompt = prompts(1, seed=23)[0]
    requests = [subject.request(prompt, seed=index, max_tokens=900, temperature=0.8) for index in range(3)]

    async def play() -> list[Completion]:
        with subject.slowed():
            running = await start_requests(subject, requests)
            subject.kill()
        return await asyncio.gather(*running)

    for request, completion in zip(requests, subject.run(play()), strict=True):
        assert len(completion.token_ids) == 900
        assert set(completion.versions) == {version}
        assert_exact(subject, request, completion)
