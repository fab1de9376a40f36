"""LoRA adapters that are replaced while the engine runs. The base weights stay."""

from __future__ import annotations

import asyncio

import pytest
import torch

from engines.conformance.reference import reference_logprobs
from engines.conformance.subjects import Adapted
from engines.conformance.test_conformance_life import start_requests
from engines.conformance.test_conformance_sampling import assert_exact, prompts
from turnwise.errors import EngineError
from turnwise.types import Completion


def change_adapter(subject: Adapted, seed: int) -> None:
    """Give both factors of all layers random values: a new adapter changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in subject.model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def test_an_adapter_is_loaded_between_turns(adapted: Adapted) -> None:
    prompt = prompts(1, seed=30)[0]
    base = reference_logprobs(adapted.model, prompt[:1], prompt[1:], *adapted.raw)
    for seed in (1, 2):
        version = adapted.engine.version + 1
        change_adapter(adapted, seed)
        assert reference_logprobs(adapted.model, prompt[:1], prompt[1:], *adapted.raw) != pytest.approx(base, abs=0.1)
        adapted.run(adapted.publish(version))
        assert adapted.engine.version == version
        requests = [adapted.request(prompt, conversation=f"a{n}", seed=n, max_tokens=24) for n in range(4)]
        for request, completion in zip(requests, adapted.ask(*requests), strict=True):
            assert_exact(adapted, request, completion)


def test_requests_that_run_go_on_with_the_new_adapter(adapted: Adapted) -> None:
    before, prompt = adapted.engine.version, prompts(1, seed=31)[0]
    requests = [adapted.request(prompt, seed=index, max_tokens=900) for index in range(2)]

    async def play() -> list[Completion]:
        with adapted.slowed():
            running = await start_requests(adapted, requests)
            change_adapter(adapted, 3)
            await adapted.publish(before + 1)
        return await asyncio.gather(*running)

    for request, completion in zip(requests, adapted.run(play()), strict=True):
        versions = list(completion.versions)
        switch = versions.index(before + 1)
        assert versions == [before] * switch + [before + 1] * (900 - switch)
        if adapted.claims.recomputes:
            kind = completion.logprob_kind
            new = reference_logprobs(adapted.model, prompt, completion.token_ids, request.sampling, kind)
            assert list(completion.logprobs[switch:]) == pytest.approx(new[switch:], abs=2e-4)


def test_an_adapter_that_cannot_be_loaded_leaves_the_old_one(adapted: Adapted) -> None:
    if not adapted.claims.processes:
        return  # the engine samples with the trainer's own adapter: there is no other
    version = adapted.engine.version
    with pytest.raises(EngineError):
        adapted.run(adapted.publish_damaged(version + 1))
    assert adapted.engine.version == version
    request = adapted.request(prompts(1, seed=32)[0], max_tokens=12)
    completion = adapted.ask(request)[0]
    assert set(completion.versions) == {version}
    assert_exact(adapted, request, completion)
