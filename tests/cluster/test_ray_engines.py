"""Rollout workers on Ray whose engines are real vLLM servers: started by the worker, and given by their address."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import engine_env
import pytest

from cluster.ray_clusters import cluster
from cluster.test_ray_training import trained
from support.recipes import save_recipe
from support.tiny import save_rows
from turnwise.engines.remote import guard
from turnwise.engines.remote.server_process import free_port
from turnwise.engines.vllm.launch import server_environment

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.ray,
    pytest.mark.engines,
    pytest.mark.skipif(
        not engine_env.is_complete("vllm"), reason="no environment of vLLM: `make test-engines` makes it"
    ),
]

PLACES = Path(__file__).parent / "lossy_places.py"
MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
STEPS, GROUPS, SIZE = 2, 2, 4
OPTIONS = ["--enforce-eager", "--max-model-len", "512"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with cluster({"engines": 1}) as started:
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


def test_a_killed_server_of_a_worker_is_started_again_and_its_conversations_go_on(
    recipe: Path, tmp_path: Path, address: str
) -> None:
    lossy = overrides(address, "kills_its_server_once", tmp_path)
    trajectories, metrics = trained(recipe, tmp_path / "run", *lossy)
    assert_complete(trajectories, metrics)
    assert sum(line["workers/lost"] for line in metrics) == 0
    (log,) = (tmp_path / "run").glob("**/engine/vllm-0.log")
    assert log.read_text(encoding="utf-8", errors="replace").count("[turnwise] starting the server") == 2


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


def test_the_server_of_a_killed_worker_takes_its_replacement_at_once(
    recipe: Path, tmp_path: Path, address: str, server: str
) -> None:
    """vLLM keeps the claim of a trainer for 15 minutes. The replacement has five minutes to be ready."""
    lossy = [*overrides(address, "kills_its_worker_once", tmp_path), f"engine={{name: vllm, url: '{server}'}}"]
    trajectories, metrics = trained(recipe, tmp_path / "run", *lossy, "cluster.workers.start_timeout=300")
    assert_complete(trajectories, metrics)
    assert sum(line["workers/lost"] for line in metrics) == 1
    assert sum(line["workers/restarted_conversations"] for line in metrics) >= 1
