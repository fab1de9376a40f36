"""Cases of vLLM's engine in the process of turnwise. Run as a program in vLLM's environment, where pytest is not installed.

Each case fails by an AssertionError. At the end, the names of all cases are printed.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from engines.conformance.reference import reference_logprobs
from engines.conformance.subjects import MODEL, change, load_model, state_of
from turnwise import assembly
from turnwise.chat.renderer import Renderer
from turnwise.engines.remote.engine import RemoteEngine
from turnwise.engines.remote.servers import Probe
from turnwise.engines.remote.weights import WeightFiles
from turnwise.engines.vllm.in_process import InProcessServer
from turnwise.errors import EngineError
from turnwise.models.loading import token_logprobs
from turnwise.options.schema import Config
from turnwise.types import Completion, LogprobKind, Request, Sampling

PROMPT = [5, 17, 300, 44, 45]


class Cases:
    """One engine for all cases, which run in the order of their names."""

    def __init__(self, folder: Path, transfer: str) -> None:
        recipe = {
            "model": {"path": str(MODEL), "device": "cpu"},
            "data": {"train": str(MODEL.parent / "train.jsonl")},
            "engine": {
                "name": "vllm",
                "mode": "in_process",
                "memory_gb": 0.1,
                "arguments": ["--enforce-eager"],
                "weight_transfer": transfer,
            },
            "max_concurrent": 16,
            "output": str(folder),
        }
        self.model = load_model()
        engine = assembly.engine(Config.model_validate(recipe), Renderer.from_pretrained(MODEL), self.model)
        assert isinstance(engine, RemoteEngine)
        self.engine = engine
        (replica,) = engine._replicas.all
        assert isinstance(replica.server, InProcessServer)
        self.server = replica.server

    async def publish(self, version: int) -> None:
        probe = Probe(prompt=PROMPT[:3], tokens=24, logprobs=partial(token_logprobs, self.model), tolerance=1e-4)
        await self.engine.update(version, state_of(self.model), probe)

    def request(self, *, seed: int = 0, **sampling: float) -> Request:
        return Request(conversation=f"c{seed}", token_ids=PROMPT, sampling=Sampling(**sampling), seed=seed)  # type: ignore[arg-type]

    def assert_exact(self, request: Request, completion: Completion, *, start: int = 0) -> None:
        """The log-probabilities of the tokens from `start` are those of the model."""
        assert completion.logprob_kind is LogprobKind.SAMPLED
        expected = reference_logprobs(
            self.model, request.token_ids, completion.token_ids, request.sampling, completion.logprob_kind
        )
        differences = [abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)]
        assert max(differences[start:]) < 1e-4, max(differences[start:])

    async def case_1_tokens_and_logprobs_are_those_of_the_model(self) -> None:
        requests = [
            self.request(seed=n, max_tokens=16, temperature=temperature, top_p=top_p)
            for n, (temperature, top_p) in enumerate([(1.0, 1.0), (0.6, 1.0), (1.2, 0.8)])
        ]
        completions = await asyncio.gather(*map(self.engine.generate, requests))
        for request, completion in zip(requests, completions, strict=True):
            assert (len(completion.token_ids), completion.finish_reason) == (16, "length")
            self.assert_exact(request, completion)
        again = await self.engine.generate(requests[0])
        assert list(again.token_ids) == list(completions[0].token_ids)

    async def case_2_an_update_in_the_middle_of_a_turn(self) -> None:
        await self.publish(1)
        for version in range(1, 6):
            request = self.request(seed=version, max_tokens=400)
            running = asyncio.ensure_future(self.engine.generate(request))
            await asyncio.sleep(0.3)
            change(self.model, version)
            await self.publish(version + 1)
            versions = list((await running).versions)
            switch = versions.count(version)
            assert versions == [version] * switch + [version + 1] * (400 - switch)
            after = self.request(seed=50, max_tokens=16)
            self.assert_exact(after, await self.engine.generate(after))
            if 0 < switch < 400:
                return
        raise AssertionError("no update came in the middle of a turn")

    async def case_3_a_failed_update_leaves_the_old_weights(self) -> None:
        version, state = self.engine.version, dict(state_of(self.model))
        name = "model.layers.1.self_attn.q_proj.weight"
        for bad in (torch.zeros(3, 4), torch.full_like(state[name], torch.nan)):
            message = ""
            try:
                await self.engine.load_weights(version + 1, {**state, name: bad})
            except EngineError as error:
                message = str(error)
            assert f"goes on with version {version}" in message, message
            request = self.request(seed=60, max_tokens=16)
            completion = await self.engine.generate(request)
            assert set(completion.versions) == {version}
            self.assert_exact(request, completion)

    async def case_4_a_cancelled_request_is_freed(self) -> None:
        running = [asyncio.ensure_future(self.engine.generate(self.request(seed=n, max_tokens=500))) for n in (70, 71)]
        await asyncio.sleep(0.3)
        assert self.unfinished() == 2
        running[0].cancel()
        await asyncio.wait([running[0]])
        await asyncio.sleep(0.1)
        assert self.unfinished() == 1
        assert len((await running[1]).token_ids) == 500
        assert self.unfinished() == 0

    def unfinished(self) -> int:
        return self.server.llm.output_processor.get_num_unfinished_requests()

    async def case_5_a_dead_engine_is_reported_and_started_again_with_the_present_weights(self) -> None:
        request = self.request(seed=80, max_tokens=400)
        running = asyncio.ensure_future(self.engine.generate(request))
        await asyncio.sleep(0.3)
        warnings: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("turnwise.engines.remote.servers").addHandler(handler)
        (core,) = multiprocessing.active_children()
        core.kill()
        completion = await running
        assert len(completion.token_ids) == 400
        assert set(completion.versions) == {self.engine.version}
        self.assert_exact(request, completion)
        assert any("is lost" in warning for warning in warnings), warnings

    async def case_6_weights_as_a_file_after_broadcasts(self) -> None:
        self.engine._files, self.engine._current = WeightFiles(), None  # as if the recipe had said so
        version, state = self.engine.version, dict(state_of(self.model))
        change(self.model, 90)
        await self.publish(version + 1)
        name = "model.layers.1.self_attn.q_proj.weight"
        message = ""
        try:
            await self.engine.load_weights(version + 2, {**state, name: torch.zeros(3, 4)})
        except EngineError as error:
            message = str(error)
        assert f"goes on with version {version + 1}" in message, message
        request = self.request(seed=91, max_tokens=16)
        completion = await self.engine.generate(request)
        assert set(completion.versions) == {version + 1}
        self.assert_exact(request, completion)


async def run(folder: Path, transfer: str) -> Sequence[str]:
    """Run all cases; returns their names."""
    cases = Cases(folder, transfer)
    names = sorted(name for name in dir(cases) if name.startswith("case_"))
    try:
        await cases.engine.start()
        for name in names:
            await getattr(cases, name)()
            print(name, flush=True)
    finally:
        await cases.engine.close()
    return names


if __name__ == "__main__":
    print(f"{len(asyncio.run(run(Path(sys.argv[1]), sys.argv[2])))} cases passed")
