"""What a new engine needs: the engine, its section with a line in `AnyEngine`, and a line in the table `ENGINES`.

Nothing else of turnwise knows the engine of this file, and it answers rollouts and trains. A part that asks for the class of an
engine's section, or for its name, would not know this one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
import yaml
from pydantic import Tag
from rich.console import Console

from support.recipes import save_recipe
from support.tiny import save_rows
from support.training import train_silently
from turnwise import record
from turnwise.assembly.engines import ENGINES, EngineInputs
from turnwise.config.engine_checks import refuse_engine, refuse_without_effect_when_serving
from turnwise.engines.engine import SharedWeights, WeightPublisher, WeightSource
from turnwise.options.engines import AnyEngine, EngineSection, LocalEngineSection
from turnwise.options.schema import Config
from turnwise.options.section import by_name, named_sections
from turnwise.runs.sampling_only import collect
from turnwise.train import assemble
from turnwise.types import Completion, LogprobKind, Request


class CountingSection(EngineSection):
    """Answers with numbers: each token is one larger than the token before it."""

    name: Literal["counting"]
    first: int = 40
    """The first token of each turn."""


class CountingEngine:
    """Its weights are a number that is added to each token."""

    loaded: ClassVar[list[int]] = []

    def __init__(self, first: int, version: int) -> None:
        self._first = first
        self.version = version

    async def start(self) -> None:
        pass

    async def generate(self, request: Request) -> Completion:
        count = request.sampling.max_tokens
        return Completion(
            token_ids=[self._first + number for number in range(count)],
            logprobs=[0.0] * count,
            versions=[self.version] * count,
            finish_reason="length",
            logprob_kind=LogprobKind.NONE,
        )

    def release(self, conversation: str) -> None:
        pass

    async def load_weights(self, version: int, weights: Mapping[str, Any] | None = None) -> None:
        self.version = version
        self.loaded.append(version)

    def publisher(self, learner: WeightSource) -> WeightPublisher:
        return SharedWeights(self)

    async def close(self) -> None:
        pass


def counting(inputs: EngineInputs) -> CountingEngine:
    options: Any = inputs.config.engine
    return CountingEngine(options.first, inputs.version)


class WithCounting(Config):
    """The schema with one more line in `AnyEngine`."""

    engine: Annotated[  # pyright: ignore[reportIncompatibleVariableOverride]
        AnyEngine | Annotated[CountingSection, Tag("counting")], by_name("local")
    ] = LocalEngineSection()


@pytest.fixture
def config(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setitem(ENGINES, "counting", counting)
    monkeypatch.setattr(CountingEngine, "loaded", [])
    recipe = save_recipe(
        tmp_path,
        model,
        limits={"turns": 1, "tokens_per_turn": 3},
        train={"steps": 2, "batch_size": 1, "group_size": 2},
        data={"train": str(save_rows(tmp_path / "train.jsonl", 2))},
        engine={"name": "counting", "first": 50},
    )
    return WithCounting.model_validate(yaml.safe_load(recipe.read_text()))


def sampled(file: Path) -> list[list[int]]:
    return [
        [token for token, turn in zip(segment.token_ids, segment.turn, strict=True) if turn >= 0]
        for trajectory in record.read(file)
        for segment in trajectory.segments
    ]


def test_a_new_engine_answers_the_conversations_of_a_recipe(config: Config, tmp_path: Path) -> None:
    assert named_sections(WithCounting)["engine"]["counting"] is CountingSection
    refuse_engine(config)
    refuse_without_effect_when_serving(config)
    with open(os.devnull, "w") as nowhere:
        summary = asyncio.run(collect(config, tmp_path / "out", Console(file=nowhere)))
    assert (summary["conversations"], summary["failed"]) == (2, 0.0)
    assert sampled(tmp_path / "out" / "trajectories.jsonl") == [[50, 51, 52], [50, 51, 52]]


def test_a_new_engine_trains_and_gets_the_weights_of_each_step(config: Config) -> None:
    train_silently(assemble(config))
    assert sampled(Path(config.output) / "trajectories.jsonl") == [[50, 51, 52]] * 4
    assert CountingEngine.loaded == [1, 2]
