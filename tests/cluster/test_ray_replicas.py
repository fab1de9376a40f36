"""Rollout workers with several servers of vLLM or SGLang, asynchronous training with them, and probes of their weights."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import engine_env
import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.ray_clusters import cluster
from cluster.test_ray_training import trained
from engines.conformance.subjects import change
from support.recipes import save_recipe
from support.tiny import save_rows
from turnwise import assembly
from turnwise.config.recipe import load
from turnwise.engines.remote.servers import Probe
from turnwise.errors import EngineError
from turnwise.models.loading import published_weights, token_logprobs
from turnwise.ray_workers.rollouts import RayRollouts
from turnwise.types import Request, Sampling

pytestmark = [pytest.mark.cluster, pytest.mark.ray, pytest.mark.engines]

PLACES = Path(__file__).parent / "lossy_places.py"
MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engine(request: pytest.FixtureRequest) -> str:
    if not engine_env.is_complete(request.param):
        pytest.skip(f"no environment of {request.param}: `make test-engines` makes it")
    return request.param


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with cluster({"engines": 2}) as started:
        yield started.address


@pytest.fixture
def recipe(engine: str, address: str, tmp_path: Path) -> Path:
    arguments = ["--enforce-eager"] if engine == "vllm" else []
    servers = {"name": engine, "python": str(engine_env.python(engine)), "memory_gb": 0.1, "arguments": arguments}
    workers = {"resources": {"engines": 1}, "start_timeout": 900}
    return save_recipe(
        tmp_path,
        MODEL,
        data={"train": str(save_rows(tmp_path / "train.jsonl", 4))},
        limits={"turns": 2, "tokens_per_turn": 64, "context": 512},
        train={"steps": 1, "batch_size": 2, "group_size": 4, "lr": 1e-3},
        engine={**servers, "start_timeout": 900},
        max_concurrent=8,
        checkpoint={"every": 100},
        cluster={"launcher": "ray", "address": address, "workers": workers},
    )


def test_conversations_go_on_with_the_other_server_of_their_worker(recipe: Path, tmp_path: Path, engine: str) -> None:
    killing = ["model.device=cpu", f"environment.use={PLACES}:kills_one_of_its_servers_once"]
    killing += [f"environment.arguments={{folder: {tmp_path}}}", "engine.replicas=2"]
    trajectories, metrics = trained(recipe, tmp_path / "run", *killing)
    assert len({line["id"] for line in trajectories}) == 8
    assert not [line["error"] for line in trajectories if line.get("error")]
    assert metrics[0]["ratio/max_deviation"] < 1e-4  # tokens of both servers are of the trainer's weights
    assert metrics[0]["workers/lost"] == 0
    answers = [turn["info"]["answers"] for line in trajectories for turn in line["turns"] if "answers" in turn["info"]]
    assert answers == [False]  # the next turn was sampled before the killed server was there again
    logs = [file.read_text(encoding="utf-8", errors="replace") for file in (tmp_path / "run").rglob(f"{engine}-?.log")]
    assert sorted(log.count("[turnwise] starting the server") for log in logs) == [1, 2]


def test_conversations_go_on_under_new_weights_with_versions_for_each_token(
    recipe: Path, tmp_path: Path, engine: str
) -> None:
    """Two workers. The log-probabilities of tokens are those of the weights of their version, which the checkpoints have."""
    steps = 5
    words = [
        "model.device=cpu",
        f"environment.use={PLACES}:one_after_the_other",
        "environment.arguments={turns: 3}",
        "limits.turns=3",
    ]
    words += ["cluster.workers.count=2", "train.max_staleness=2", f"train.steps={steps}", "limits.tokens_per_turn=120"]
    words += ["checkpoint.every=1", f"checkpoint.keep={steps}", "train.group_size=2"]
    trajectories, _ = trained(recipe, tmp_path / "run", *words)
    assert Counter(line["step"] for line in trajectories) == {step + 1: 4 for step in range(steps)}
    assert not [line["error"] for line in trajectories if line.get("error")]
    models = {0: AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)}
    for step in range(1, steps + 1):
        folder = tmp_path / "run" / "checkpoints" / f"step-{step:06d}" / "model"
        models[step] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    changed, later = 0, 0
    for line in trajectories:
        for segment in line["segments"]:
            versions = [version for version in segment["version"] if version >= 0]
            assert versions == sorted(versions)
            assert all(0 <= line["step"] - 1 - version <= 2 for version in versions)
            changed += len(set(versions)) > 1
            later += versions[0] > 0
            # vLLM keeps what it has computed with the old weights: there, only the first version is exact
            exact = set(versions) if engine == "sglang" else {versions[0]}
            assert_sampled_by(models, segment, exact)
    assert changed > 0
    assert later > 0


def assert_sampled_by(models: dict[int, Any], segment: dict[str, Any], versions: set[int]) -> None:
    """The tokens of these versions have the log-probabilities of the models of these versions."""
    for version in versions:
        expected = token_logprobs(models[version], segment["token_ids"])
        places = [place for place, sampled_by in enumerate(segment["version"]) if sampled_by == version]
        own = [segment["logprobs"][place] for place in places]
        assert own == pytest.approx([expected[place - 1] for place in places], abs=1e-3)


def test_servers_with_other_log_probabilities_than_the_trainer_get_the_previous_weights(
    recipe: Path, engine: str
) -> None:
    config = load(recipe, ["model.device=cpu"])[0]
    rollouts = assembly.runner(config, assembly.renderer(config), updated=True)
    assert isinstance(rollouts, RayRollouts)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    right = Probe(prompt=[5, 17, 300], tokens=24, logprobs=partial(token_logprobs, model), tolerance=1e-4)

    async def play() -> None:
        try:
            await rollouts.start()
            await rollouts.update(1, published_weights(model), right)
            greedy = Request(conversation="a", token_ids=[5, 6, 7], sampling=Sampling(max_tokens=20, temperature=0.0))
            before = await rollouts.generate(greedy)
            wrong = Probe(prompt=[5, 17, 300], tokens=24, logprobs=partial(token_logprobs, other), tolerance=1e-4)
            with pytest.raises(EngineError, match="has other weights than the trainer: the log-probabilities"):
                await rollouts.update(2, published_weights(model), wrong)
            after = await rollouts.generate(greedy)
            assert (rollouts.version, set(before.versions), set(after.versions)) == (1, {1}, {1})
            assert list(after.token_ids) == list(before.token_ids)
            assert list(after.logprobs) == pytest.approx(list(before.logprobs), abs=1e-4)
            await rollouts.update(2, published_weights(other), wrong)  # the servers have these weights, too
            assert set((await rollouts.generate(greedy)).versions) == {2}
        finally:
            await rollouts.close()

    other = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    change(other, 3)
    asyncio.run(play())
