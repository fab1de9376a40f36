"""Rollout workers on Ray whose engines are real servers: one or several, asynchronous training, probes of their weights."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import engine_env
import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.ray_clusters import cluster
from cluster.test_ray import trained
from engines.conformance.subjects import change
from support.ports import free_port
from support.recipes import save_recipe
from support.tiny import save_rows
from turnwise import assembly
from turnwise.config.recipe import load
from turnwise.engines.remote import guard
from turnwise.engines.remote.servers import Probe
from turnwise.engines.vllm.launch import server_environment
from turnwise.errors import EngineError
from turnwise.models.loading import published_weights, token_logprobs
from turnwise.ray_workers.rollouts import RayRollouts
from turnwise.types import Request, Sampling

# Rollout workers on Ray whose engines are real servers: started by the worker, and given by their address. What differs
# between the engines is tested without Ray (tests/engines): here, each test has one of them.


engines_mark = pytest.mark.skipif(
    not engine_env.is_complete("vllm"), reason="no environment of vLLM: `make test-engines` makes it"
)

PLACES = Path(__file__).parent / "lossy_places.py"

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"

STEPS, GROUPS, SIZE = 2, 2, 4

OPTIONS = ["--enforce-eager", "--max-model-len", "512"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with cluster({"engines": 2}) as started:
        yield started.address


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    return save_recipe(
        folder,
        MODEL,
        data={"train": str(save_rows(folder / "train.jsonl", 4))},
        limits={"turns": 2, "tokens_per_turn": 64, "context": 512},
        train={"steps": STEPS, "batch_size": GROUPS, "group_size": SIZE, "lr": 1e-3},
        engine={"name": "vllm", "python": str(engine_env.python("vllm")), "memory_gb": 0.1, "arguments": OPTIONS[:1]},
        max_concurrent=8,
        checkpoint={"every": 100},
        cluster={"launcher": "ray", "workers": {"resources": {"engines": 1}, "start_timeout": 400}},
    )


def overrides(address: str, place: str, folder: Path) -> list[str]:
    return [
        "model.device=cpu",
        f"cluster.address={address}",
        f"environment.use={PLACES}:{place}",
        f"environment.arguments={{folder: {folder}}}",
    ]


def assert_complete(trajectories: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> None:
    """All conversations of all steps, each of them once, sampled with the trainer's weights."""
    assert set(Counter(line["id"] for line in trajectories).values()) == {1}
    assert Counter(line["step"] for line in trajectories) == {step + 1: GROUPS * SIZE for step in range(STEPS)}
    assert not [line["error"] for line in trajectories if line.get("error")]
    for line in trajectories:
        versions = {version for segment in line["segments"] for version in segment["version"] if version >= 0}
        assert versions == {line["step"] - 1}
    assert [line["step"] for line in metrics] == [1, 2]
    for line in metrics:
        # before the optimizer step, the trainer's log-probabilities are those of the server
        assert line["ratio/max_deviation"] < 1e-4


@pytest.mark.cluster
@pytest.mark.ray
@pytest.mark.engines
@engines_mark
def test_conversations_go_on_with_the_other_server_of_their_worker_until_a_killed_one_is_started_again(
    recipe: Path, tmp_path: Path, address: str
) -> None:
    killing = [*overrides(address, "kills_one_of_its_servers_once", tmp_path), "engine.replicas=2"]
    trajectories, metrics = trained(recipe, tmp_path / "run", *killing)
    assert_complete(
        trajectories, metrics
    )  # tokens of both servers are of the trainer's weights, in the second step, too
    assert sum(line["workers/lost"] for line in metrics) == 0
    answers = [turn["info"]["answers"] for line in trajectories for turn in line["turns"] if "answers" in turn["info"]]
    assert answers == [False]  # the next turn was sampled before the killed server was there again
    logs = [
        file.read_text(encoding="utf-8", errors="replace") for file in (tmp_path / "run").glob("**/engine/vllm-?.log")
    ]
    assert sorted(log.count("[turnwise] starting the server") for log in logs) == [1, 2]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a server that no worker has started, with the options of docs/engines.md."""
    port = free_port()
    command = [
        *(sys.executable, guard.__file__, str(engine_env.python("vllm")), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(MODEL), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--enable-scale-out", "--enable-prompt-tokens-details", "--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096"),
        *("--worker-extension-cls", "turnwise.engines.vllm.worker.WeightReceiver"),
        *("--kv-cache-memory-bytes", str(100 << 20), "--max-num-seqs", "8", *OPTIONS),
        *("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"),
    ]
    environment = {**os.environ, **server_environment("")}
    del environment["VLLM_API_KEY"]
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, tmp_path / "server.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 400
    while True:
        running = process.poll() is None
        assert running, log.read_text(errors="replace")[-2000:]
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-2000:]
        with suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.5)


@pytest.mark.cluster
@pytest.mark.ray
@pytest.mark.engines
@engines_mark
def test_the_server_of_a_killed_worker_takes_its_replacement_at_once(
    recipe: Path, tmp_path: Path, address: str, server: str
) -> None:
    """vLLM keeps the claim of a trainer for 15 minutes. The replacement has five minutes to be ready."""
    lossy = [*overrides(address, "kills_its_worker_once", tmp_path), f"engine={{name: vllm, url: '{server}'}}"]
    trajectories, metrics = trained(recipe, tmp_path / "run", *lossy, "cluster.workers.start_timeout=300")
    assert_complete(trajectories, metrics)
    assert sum(line["workers/lost"] for line in metrics) == 1
    assert sum(line["workers/restarted_conversations"] for line in metrics) >= 1


# Asynchronous training with several workers that have a server each, and probes of the weights of their servers.


@pytest.mark.cluster
@pytest.mark.ray
@pytest.mark.engines
@pytest.mark.skipif(
    not engine_env.is_complete("sglang"), reason="no environment of SGLang: `make test-engines` makes it"
)
def test_conversations_go_on_under_new_weights_with_versions_for_each_token(
    recipe: Path, tmp_path: Path, address: str
) -> None:
    """Two workers. The log-probabilities of tokens are those of the weights of their version, which the checkpoints have."""
    steps = 5
    words = [
        "model.device=cpu",
        f"cluster.address={address}",
        f"engine={{name: sglang, python: {engine_env.python('sglang')}, memory_gb: 0.1, start_timeout: 900}}",
        f"environment.use={PLACES}:one_after_the_other",
        "environment.arguments={turns: 3}",
        "limits.turns=3",
        "cluster.workers.start_timeout=900",
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
            # all of them: SGLang computes the tokens before an update again with the new weights
            assert_sampled_by(models, segment, set(versions))
    assert changed > 0
    assert later > 0


def assert_sampled_by(models: dict[int, Any], segment: dict[str, Any], versions: set[int]) -> None:
    """The tokens of these versions have the log-probabilities of the models of these versions."""
    for version in versions:
        expected = token_logprobs(models[version], segment["token_ids"])
        places = [place for place, sampled_by in enumerate(segment["version"]) if sampled_by == version]
        own = [segment["logprobs"][place] for place in places]
        assert own == pytest.approx([expected[place - 1] for place in places], abs=1e-3)


@pytest.mark.cluster
@pytest.mark.ray
@pytest.mark.engines
@engines_mark
def test_servers_with_other_log_probabilities_than_the_trainer_get_the_previous_weights(
    recipe: Path, address: str
) -> None:
    config = load(recipe, ["model.device=cpu", f"cluster.address={address}"])[0]
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
