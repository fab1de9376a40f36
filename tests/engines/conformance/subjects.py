"""The engines that the conformance suite tests, and what each of them declares.

`Claims` says which cases an engine can do. A case that an engine does not claim asserts what the engine does instead, so that a
claim can be neither missing nor wrong.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from turnwise.chat.renderer import Renderer
from turnwise.engines.engine import Engine
from turnwise.engines.local import LocalEngine
from turnwise.engines.scripted import ScriptedEngine
from turnwise.models.lora import add_adapter
from turnwise.options.algorithm import LoraSection
from turnwise.types import Completion, LogprobKind, Request, Sampling

T = TypeVar("T")

MODEL = Path(__file__).resolve().parents[3] / "demo" / "model"
"""A Qwen3 of 0.7 million parameters with tied embeddings, which calls a calculator."""
STOP = 2
"""The token that ends a turn of this model: <|im_end|>."""
SCRIPT = ["The answer is 12.", "Now it is 15.", "#### 15"]
"""The texts of each conversation with the scripted engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What an engine declares."""

    logprob_kind: LogprobKind
    samples: bool = True
    """Whether tokens are sampled. False: the engine returns given texts."""
    seeded: bool = True
    """Whether the same seed gives the same tokens, whatever else runs."""
    takes_weights: bool = True
    """Whether `load_weights` takes a state dict."""
    recomputes: bool = False
    """Whether a request that runs during an update goes on as if its prefix had been computed with the new weights."""
    cache_block: int | None = None
    """The prefix cache holds multiples of this number of tokens; None: `Completion.cached_tokens` is not reported."""
    greedy_is_certain: bool = True
    """Whether the log-probability of a token at temperature 0 is 0, where `logprob_kind` is `sampled`. False: it is that of the
    logits."""
    processes: bool = False
    """Whether the engine runs servers in processes of their own, which can die."""


class Subject(ABC):
    """An engine under test, the model whose weights it must have, and the event loop in which it lives."""

    name: str
    claims: Claims
    engine: Engine

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.renderer = Renderer.from_pretrained(MODEL)
        self.model = load_model()
        """The trainer's model: the reference for log-probabilities."""
        self._asked = 0

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the engine's event loop. A case may take fifteen minutes at most, on a busy machine."""
        return self.runner.run(asyncio.wait_for(coroutine, 900))

    def request(
        self, token_ids: Sequence[int], *, conversation: str | None = None, seed: int = 0, **sampling: Any
    ) -> Request:
        """A request, of a new conversation unless one is given."""
        self._asked += 1
        return Request(
            conversation=conversation or f"conversation {self._asked}",
            token_ids=list(token_ids),
            sampling=Sampling(**sampling),
            seed=seed,
        )

    def ask(self, *requests: Request) -> list[Completion]:
        """The completions of requests that are sent together."""

        async def all_of_them() -> list[Completion]:
            return await asyncio.gather(*(self.engine.generate(request) for request in requests))

        return self.run(all_of_them())

    def ask_one(self, token_ids: Sequence[int], **options: Any) -> Completion:
        """The completion of one request."""
        return self.ask(self.request(token_ids, **options))[0]

    def kind(self, sampling: Sampling) -> LogprobKind:
        """The kind of log-probability to compare with."""
        greedy = sampling.temperature == 0 and not self.claims.greedy_is_certain
        return LogprobKind.RAW if greedy else self.claims.logprob_kind

    async def publish(self, version: int) -> None:
        """Give the engine the present weights of `model`."""
        await self.engine.load_weights(version, state_of(self.model))

    @abstractmethod
    async def running(self) -> int:
        """The number of requests that hold resources of the engine."""

    def slowed(self) -> AbstractContextManager[None]:
        """Sample slowly, so that no request ends before a case has done what it does to requests that run."""
        return nullcontext()

    def kill(self) -> None:
        """Kill the processes of the engine's servers."""
        raise AssertionError(f"{self.name} has no processes")

    def close(self) -> None:
        """Free everything."""
        self.run(self.engine.close())
        self.runner.close()


class Scripted(Subject):
    """The scripted engine with three texts for each conversation."""

    name = "scripted"
    claims = Claims(logprob_kind=LogprobKind.NONE, samples=False, takes_weights=False)

    def __init__(self) -> None:
        super().__init__()
        self.engine = ScriptedEngine([SCRIPT] * 1000, encode=self.renderer.encode, stop_token_id=STOP)

    async def running(self) -> int:
        return 0


def sampling(engine: LocalEngine) -> int:
    """How many requests of an embedded engine have sampled a token, and are not ended or cancelled."""
    batch = engine._core.batch
    begun = sum(int(batch._num_sampled_S[slot] > 0) for slot in list(batch.requests))
    return min(begun, len(engine._requests))


class Local(Subject):
    """The embedded engine, on a copy of the model."""

    name = "local"
    claims = Claims(logprob_kind=LogprobKind.SAMPLED, cache_block=1)

    def __init__(self) -> None:
        super().__init__()
        self._engine = self.engine = LocalEngine(
            load_model(), decode=self.renderer.decode, threads=1, memory_gb=0.25, masks=self.renderer.masks
        )

    async def running(self) -> int:
        return sampling(self._engine)


class Adapted(Subject):
    """An engine whose weights are those of the demo's model with a LoRA adapter, and are updated by other adapters."""

    raw = (Sampling(), LogprobKind.RAW)

    def __init__(self) -> None:
        super().__init__()
        add_adapter(self.model, LoraSection(rank=8, alpha=16.0))

    async def publish_damaged(self, version: int) -> None:
        """Give the engine an adapter that is not one."""
        raise AssertionError(f"{self.name} takes no files")


class AdaptedLocal(Adapted):
    """The embedded engine on the trainer's own model."""

    name = "local"
    claims = Claims(logprob_kind=LogprobKind.SAMPLED, cache_block=1)

    def __init__(self) -> None:
        super().__init__()
        self._engine = self.engine = LocalEngine(self.model, decode=self.renderer.decode, threads=1, memory_gb=0.25)

    async def publish(self, version: int) -> None:
        await self.engine.load_weights(version)

    async def running(self) -> int:
        return sampling(self._engine)


def load_model() -> PreTrainedModel:
    """The demo's model in float32."""
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def state_of(model: PreTrainedModel) -> Mapping[str, torch.Tensor]:
    """The weights by Hugging Face's names, without the second name of tied weights."""
    return {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


def change(model: PreTrainedModel, seed: int) -> None:
    """A change of all weights, about as large as many training steps."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
