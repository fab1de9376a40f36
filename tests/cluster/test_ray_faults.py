"""Faults of rollout workers on a Ray cluster: real processes are killed, and no conversation is lost, repeated or waited for."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.ray_clusters import add_node, cluster
from cluster.test_ray_training import trained
from support.recipes import save_recipe
from support.tiny import save_rows
from turnwise.errors import EngineError

pytestmark = [pytest.mark.cluster, pytest.mark.ray]

PLACES = Path(__file__).parent / "lossy_places.py"
STEPS, GROUPS, SIZE = 3, 2, 4


@pytest.fixture(scope="module")
def started() -> Iterator[Any]:
    with cluster({"tools": 8}, {"tools": 8}) as started:
        yield started


@pytest.fixture(scope="module")
def recipe(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    return save_recipe(
        folder,
        model,
        data={"train": str(save_rows(folder / "train.jsonl", 4))},
        limits={"turns": 2, "tokens_per_turn": 4},
        train={"steps": STEPS, "batch_size": GROUPS, "group_size": SIZE, "lr": 0.01},
        checkpoint={"every": 1},
        cluster={"launcher": "ray", "workers": {"count": 2, "resources": {"tools": 4}}},
    )


def overrides(started: Any, place: str, **arguments: Any) -> list[str]:
    return [
        f"cluster.address={started.address}",
        f"environment.use={PLACES}:{place}",
        f"environment.arguments={arguments}",
    ]


def assert_each_once(trajectories: list[dict[str, Any]], *, steps: int = STEPS) -> None:
    """Each step has each of its conversations once."""
    counts = Counter(line["id"] for line in trajectories)
    assert set(counts.values()) == {1}, counts
    assert Counter(line["step"] for line in trajectories) == {step + 1: GROUPS * SIZE for step in range(steps)}


def tokens_of(trajectories: list[dict[str, Any]]) -> dict[str, Any]:
    return {line["id"]: [segment["token_ids"] for segment in line["segments"]] for line in trajectories}


def alive(process: int) -> bool:
    with contextlib.suppress(OSError):
        return "ray::" in Path(f"/proc/{process}/cmdline").read_text(encoding="utf-8")
    return False


def test_a_killed_worker_is_replaced_and_its_conversations_run_again(
    recipe: Path, tmp_path: Path, started: Any
) -> None:
    lossy = overrides(started, "kills_its_worker_once", folder=str(tmp_path))
    trajectories, metrics = trained(recipe, tmp_path / "run", *lossy)
    assert_each_once(trajectories)
    assert not [line for line in trajectories if line.get("error")]
    assert sum(line["workers/lost"] for line in metrics) == 1
    assert sum(line["workers/restarted_conversations"] for line in metrics) >= 1
    again, of_again = trained(recipe, tmp_path / "again", *lossy)  # without a loss
    assert sum(line["workers/lost"] for line in of_again) == 0
    assert tokens_of(again) == tokens_of(trajectories)


def test_a_conversation_that_kills_its_workers_fails_and_the_others_finish(
    recipe: Path, tmp_path: Path, started: Any
) -> None:
    one_bad = [*overrides(started, "kills_its_worker"), "train.steps=1", "train.group_size=2", "train.batch_size=4"]
    trajectories, metrics = trained(recipe, tmp_path / "run", *one_bad)
    failed = {line["row"]["id"]: line["error"] for line in trajectories if line.get("error")}
    assert list(failed) == ["1"]
    assert failed["1"]["kind"] == "engine"
    assert "lost its rollout worker 3 times" in failed["1"]["message"]
    assert 3 <= metrics[0]["workers/lost"] <= 6  # the two conversations of the group, three times each at most


def test_a_worker_without_a_sign_of_life_is_replaced(recipe: Path, tmp_path: Path, started: Any) -> None:
    blocking = [*overrides(started, "blocks_once", folder=str(tmp_path)), "cluster.heartbeat=8", "train.steps=1"]
    trajectories, metrics = trained(recipe, tmp_path / "run", *blocking)
    assert_each_once(trajectories, steps=1)
    assert not [line for line in trajectories if line.get("error")]
    assert metrics[0]["workers/lost"] >= 1  # on a busy machine, another worker may be late, too


def test_a_lost_node_ends_neither_the_run_nor_its_conversations(recipe: Path, tmp_path: Path, started: Any) -> None:
    nodes = [add_node(started, {"doomed": 4}) for _ in range(2)]  # one worker on each

    def lose_a_node() -> None:
        while len(processes := [int(file.name) for file in tmp_path.iterdir() if file.name.isdigit()]) < 2:
            time.sleep(0.1)
        started.remove_node(nodes[0], allow_graceful=False)
        while all(alive(process) for process in processes):  # a worker outlives its node for a moment
            time.sleep(0.1)
        (tmp_path / "lost").touch()

    thread = threading.Thread(target=lose_a_node)
    thread.start()
    doomed = [*overrides(started, "waits_for_a_loss", folder=str(tmp_path)), "cluster.workers.resources={doomed: 3}"]
    trajectories, metrics = trained(recipe, tmp_path / "run", *doomed)
    thread.join()
    started.remove_node(nodes[1])
    assert_each_once(trajectories)
    assert not [line for line in trajectories if line.get("error")]
    assert sum(line["workers/lost"] for line in metrics) >= 1
    assert sum(line["workers/restarted_conversations"] for line in metrics) >= 1


def test_without_a_worker_conversations_fail_in_time_and_the_reason_is_told(
    recipe: Path, tmp_path: Path, started: Any
) -> None:
    nowhere = ["cluster.workers.resources={gold: 1}", "cluster.workers.start_timeout=5"]
    with pytest.raises(EngineError, match=r"was not ready after cluster\.workers\.start_timeout=5 s.*gold=1"):
        trained(recipe, tmp_path / "run", *overrides(started, "slow", folder=str(tmp_path)), *nowhere)


def test_a_killed_driver_leaves_no_worker_and_the_run_resumes(recipe: Path, tmp_path: Path, started: Any) -> None:
    words = [*overrides(started, "slow", folder=str(tmp_path)), f"output={tmp_path / 'run'}", "train.max_staleness=1"]
    command = [sys.executable, "-m", "turnwise", "train", str(recipe), *words]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text(encoding="utf-8")):
        assert driver.poll() is None
        time.sleep(0.05)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    workers = [int(file.name) for file in tmp_path.iterdir() if file.name.isdigit()]
    assert workers
    deadline = time.monotonic() + 60
    while any(alive(process) for process in workers):
        assert time.monotonic() < deadline, "the workers of a killed driver go on"
        time.sleep(0.2)
    trajectories, _ = trained(recipe, tmp_path / "run", *words, "resume=auto")
    assert_each_once(trajectories)
    assert not [line for line in trajectories if line.get("error")]


def test_the_pipeline_is_asynchronous_with_bounded_staleness_and_versions_for_each_token(
    recipe: Path, tmp_path: Path, started: Any
) -> None:
    words = [*overrides(started, "slow", folder=str(tmp_path)), "train.max_staleness=2", "train.steps=6"]
    trajectories, _ = trained(recipe, tmp_path / "run", *words)
    assert_each_once(trajectories, steps=6)
    versions = {
        line["id"]: (line["step"] - 1, {v for segment in line["segments"] for v in segment["version"] if v >= 0})
        for line in trajectories
    }
    assert all(0 <= step - version <= 2 for step, of_line in versions.values() for version in of_line)
    assert any(step - min(of_line) > 0 for step, of_line in versions.values())
    assert any(len(of_line) > 1 for _, of_line in versions.values())  # went on under new weights


def test_a_worker_runs_a_thousand_conversations_at_the_same_time(recipe: Path, tmp_path: Path, started: Any) -> None:
    words = [*overrides(started, "all_together", count=1000), "cluster.workers.count=1", "max_concurrent=1000"]
    words += ["train.steps=1", "train.batch_size=4", "train.group_size=250", "limits.tokens_per_turn=1"]
    trajectories, _ = trained(recipe, tmp_path / "run", *words)
    assert len(trajectories) == 1000
    assert not [line for line in trajectories if line.get("error")]
