"""Training ranks and rollout workers together on a Ray cluster of several nodes: real commands, whose processes are killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.ray_clusters import cluster
from support.recipes import save_recipe
from support.tiny import save_rows
from support.training import train_run

pytestmark = [pytest.mark.cluster, pytest.mark.ray]

PLACES = Path(__file__).parent / "lossy_places.py"
STEPS, GROUPS, SIZE = 3, 2, 4
PATIENCE = 600


@pytest.fixture(scope="module")
def started() -> Iterator[Any]:
    with cluster({"tools": 2, "trainer": 1}, {"tools": 2, "trainer": 1}) as started:
        yield started


@pytest.fixture(scope="module")
def recipe(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    return save_recipe(
        folder,
        model,
        data={"train": str(save_rows(folder / "train.jsonl", 4))},
        limits={"turns": 2, "tokens_per_turn": 6},
        train={"steps": STEPS, "batch_size": GROUPS, "group_size": SIZE, "lr": 0.01},
        checkpoint={"every": 1},
    )


def on_ray(started: Any, trainers: int = 2) -> list[str]:
    """A rank and a worker on each node."""
    return [
        "cluster=ray",
        f"cluster.address={started.address}",
        f"cluster.trainers={trainers}",
        "cluster.ranks.resources={trainer: 1}",
        "cluster.ranks.num_cpus=0.5",
        "cluster.workers.count=2",
        "cluster.workers.resources={tools: 2}",
    ]


def slow(folder: Path) -> list[str]:
    return [f"environment.use={PLACES}:slow", f"environment.arguments={{folder: {folder}}}"]


class Command:
    """`turnwise train`, with its output in a file."""

    def __init__(self, recipe: Path, run: Path, *words: str) -> None:
        self.run = run
        self._log = run.with_name(f"{run.name}-{time.monotonic_ns()}.log")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "turnwise", "train", str(recipe), f"output={run}", *words],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def finish(self) -> tuple[int, str]:
        """The exit status and the output."""
        try:
            return self.process.wait(PATIENCE), self.output
        except BaseException:
            self.process.kill()
            print(self.output)
            raise

    @property
    def output(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def wait_for_steps(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while len(lines(self.run, "metrics")) < count:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def ranks(self) -> list[int]:
        """The processes of the ranks that were started last."""
        *_, last = re.findall(r"^turnwise: trainer ranks: .*$", self.output, re.MULTILINE)
        return [int(number) for number in re.findall(r"process (\d+)", last)]


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    file = run / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def assert_each_once(run: Path, *, steps: int) -> None:
    trajectories = lines(run, "trajectories")
    assert not [line for line in trajectories if line.get("error")]
    assert set(Counter(line["id"] for line in trajectories).values()) == {1}
    assert Counter(line["step"] for line in trajectories) == {step + 1: GROUPS * SIZE for step in range(steps)}


def wait_until_gone(processes: list[int]) -> None:
    deadline = time.monotonic() + 120
    while left := [process for process in processes if alive(process)]:
        assert time.monotonic() < deadline, f"the processes {left} go on"
        time.sleep(0.2)


def alive(process: int) -> bool:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{process}/cmdline").read_bytes()
        return b"turnwise" in words or b"ray::" in words
    return False


def test_two_ranks_and_two_workers_train_as_one_process(recipe: Path, tmp_path: Path, started: Any) -> None:
    _, of_one, _ = train_run(recipe, tmp_path / "one")
    status, output = Command(recipe, tmp_path / "two", *on_ray(started)).finish()
    assert status == 0, output
    assert_each_once(tmp_path / "two", steps=STEPS)
    of_two = lines(tmp_path / "two", "metrics")
    assert len(of_two) == STEPS
    for one, two in zip(of_one, of_two, strict=True):
        assert two["reward/mean"] == one["reward/mean"]
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-4)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-2)
        assert two["ratio/max_deviation"] < 1e-3
    assert "step 3" in output
    # an error of rank 0 is that of the command
    status, output = Command(recipe, tmp_path / "two", *on_ray(started)).finish()
    assert status == 1, output
    assert f"{tmp_path / 'two'}" in output
    assert "resume=auto" in output
    assert "Traceback" not in output


def test_a_killed_rank_is_named_and_all_ranks_go_on_with_staleness(recipe: Path, tmp_path: Path, started: Any) -> None:
    words = [*on_ray(started), *slow(tmp_path), "train.max_staleness=1", "cluster.restarts=1", "train.steps=8"]
    command = Command(recipe, tmp_path / "run", *words)
    command.wait_for_steps(2)
    first = command.ranks()
    os.kill(first[1], signal.SIGKILL)
    status, output = command.finish()
    assert status == 0, output
    assert f"trainer rank 1 (127.0.0.1, process {first[1]}) was ended by the signal SIGKILL" in output
    assert "starting all ranks again from the newest checkpoint" in output
    assert_each_once(tmp_path / "run", steps=8)
    staleness = [
        line["step"] - 1 - version
        for line in lines(tmp_path / "run", "trajectories")
        for segment in line["segments"]
        for version in segment["version"]
        if version >= 0
    ]
    assert set(staleness) == {0, 1}
    wait_until_gone([*first, *command.ranks()])


def test_sigterm_writes_a_checkpoint_and_the_run_resumes_on_one_rank(
    recipe: Path, tmp_path: Path, started: Any
) -> None:
    command = Command(recipe, tmp_path / "run", *on_ray(started), *slow(tmp_path), "train.steps=5000")
    command.wait_for_steps(1)
    command.process.send_signal(signal.SIGTERM)
    status, output = command.finish()
    assert status == 143, output
    assert "resume=auto" in output
    wait_until_gone(command.ranks())
    done = len(lines(tmp_path / "run", "metrics"))
    words = [*on_ray(started, trainers=1), *slow(tmp_path), "resume=auto", f"train.steps={done + 1}"]
    status, output = Command(recipe, tmp_path / "run", *words).finish()
    assert status == 0, output
    assert f"resuming after step {done}" in output
    assert_each_once(tmp_path / "run", steps=done + 1)


def test_a_killed_driver_leaves_neither_ranks_nor_workers(recipe: Path, tmp_path: Path, started: Any) -> None:
    command = Command(recipe, tmp_path / "run", *on_ray(started), *slow(tmp_path), "train.steps=5000")
    command.wait_for_steps(1)
    command.process.send_signal(signal.SIGKILL)
    command.process.wait()
    workers = [int(file.name) for file in tmp_path.iterdir() if file.name.isdigit()]
    assert len(workers) == 2
    wait_until_gone([*command.ranks(), *workers])
    done = len(lines(tmp_path / "run", "metrics"))
    train_run(recipe, tmp_path / "run", *slow(tmp_path), "resume=auto", f"train.steps={done + 1}")
    assert_each_once(tmp_path / "run", steps=done + 1)


def test_missing_resources_are_an_error_that_names_needed_and_free(recipe: Path, tmp_path: Path, started: Any) -> None:
    words = [*on_ray(started, trainers=3), "cluster.ranks.start_timeout=3"]
    status, output = Command(recipe, tmp_path / "run", *words).finish()
    assert status == 1, output
    assert "3 trainer ranks need num_cpus=0.5, num_gpus=0, trainer=1 each, and the cluster has free: CPU=4" in output
    assert "trainer=2" in output
    assert not (tmp_path / "run").exists()
    status, output = Command(recipe, tmp_path / "run", *on_ray(started), "train.optimizer.name=adafactor").finish()
    assert status == 1, output
    assert "cannot be used with several ranks" in output
    assert "trainer ranks" not in output  # nothing was started
