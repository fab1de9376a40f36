"""Training with rollout workers and ranks on a local Ray cluster: the conversations of one process, images, faults."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cluster import judging_rewards
from cluster.ray_clusters import ENVIRONMENT, add_node, cluster
from support.image_recipe import save_image_recipe
from support.ports import free_port
from support.recipes import save_recipe
from support.tiny import save_rows
from support.training import save_short_recipe, train_run
from support.vision import image_part, picture
from turnwise.data.images import load_image
from turnwise.errors import ConfigError, EngineError
from turnwise.options.engines import WorkersSection
from turnwise.ray_workers import ray_api, rollouts
from turnwise.ray_workers.rollout_worker import ImageFile, pickled, unpickled, with_files
from turnwise.types import Row, Trajectory

# Training with rollout workers on a Ray cluster of several nodes: the same conversations as in one process, and the
# pipeline.


@pytest.fixture(scope="module")
def started() -> Iterator[Any]:
    """The cluster of all tests that need no other one: two nodes."""
    with cluster({"tools": 8, "trainer": 1}, {"tools": 8, "trainer": 1}) as started:
        yield started


@pytest.fixture(scope="module")
def address(started: Any) -> str:
    return started.address


@pytest.fixture(scope="module")
def recipe(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_short_recipe(tmp_path_factory.mktemp("recipe"), model)


def on_ray(address: str, workers: int = 2) -> list[str]:
    return [
        "cluster=ray",
        f"cluster.address={address}",
        f"cluster.workers.count={workers}",
        "cluster.workers.num_cpus=1",
    ]


def trained(recipe: Path, out: Path, *overrides: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The trajectories and the metrics."""
    trajectories, metrics, _ = train_run(recipe, out, *overrides)
    return trajectories, metrics


def tokens(trajectories: list[dict[str, Any]]) -> dict[str, Any]:
    return {line["id"]: [(s["token_ids"], s["version"]) for s in line["segments"]] for line in trajectories}


@pytest.mark.cluster
@pytest.mark.ray
def test_two_workers_give_the_conversations_of_one_process(recipe: Path, tmp_path: Path, address: str) -> None:
    """A judge asks the engines of the workers. It samples greedily, so its answers do not depend on the process in which the
    engine is."""
    judged = [f"reward.trajectory=['{judging_rewards.__file__}:LengthOfAnswer']"]
    alone, of_alone = trained(recipe, tmp_path / "alone", *judged)
    one_each = "cluster.workers.resources={tools: 5}"  # on each node
    together, of_together = trained(recipe, tmp_path / "together", *on_ray(address), one_each, *judged)
    assert len(alone) == 3 * 8
    assert all(line.get("error") is None for line in together)
    assert tokens(together) == tokens(alone)
    for mine, other in zip(of_together, of_alone, strict=True):
        assert mine["reward/mean"] == other["reward/mean"]
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-4)
    assert of_together[-1]["ratio/max_deviation"] < 1e-3
    rewards = {line["id"]: line["rewards"] for line in alone}
    assert any(of_line["LengthOfAnswer"] for of_line in rewards.values())
    assert {line["id"]: line["rewards"] for line in together} == rewards


@pytest.mark.cluster
@pytest.mark.ray
def test_workers_sample_under_grammars_and_the_trainer_computes_their_masks(
    recipe: Path, tmp_path: Path, address: str
) -> None:
    form = ["sampling.response_format={type: regex, pattern: '[0-9]{1,3}'}", "train.steps=2"]
    alone, of_alone = trained(recipe, tmp_path / "alone", *form)
    together, of_together = trained(recipe, tmp_path / "together", *on_ray(address), *form)
    assert all(line.get("error") is None for line in together)
    assert tokens(together) == tokens(alone)
    turns = [turn for line in together for turn in line["turns"]]
    assert turns
    assert all("[0-9]{1,3}" in turn["constraint"]["grammar"] for turn in turns)
    for mine, other in zip(of_together, of_alone, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert mine["ratio/max_deviation"] == pytest.approx(other["ratio/max_deviation"], abs=1e-6)
    assert of_together[0]["ratio/max_deviation"] < 1e-5


# Files of the user that only the machine of the command has.

_GAME = """
import os
from collections.abc import AsyncGenerator

from rules import points
from turnwise.environments.environment import environment, user_message
from turnwise.types import Opening, Reply, Row, Turn


@environment
async def game(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    turn = yield Opening(messages=row.messages)
    turn = yield user_message(os.getcwd())
    yield Reply(reward=points(turn.text), done=True)
"""


@pytest.mark.cluster
@pytest.mark.ray
def test_workers_get_the_directory_of_the_command_with_helpers_and_say_what_their_machine_lacks(
    recipe: Path, tmp_path: Path, started: Any
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "game.py").write_text(_GAME, encoding="utf-8")
    (project / "rules.py").write_text("def points(text):\n    return float(len(text))\n", encoding="utf-8")
    words = [*on_ray(started.address), "cluster.workers.runtime_env={working_dir: .}", "environment=game.py:game"]
    words = [word for word in words if word != "cluster.workers.count=2"] + ["train.steps=1", "limits.turns=2"]
    command = [sys.executable, "-m", "turnwise", "train", str(recipe), *words]
    done = subprocess.run(
        [*command, f"output={tmp_path / 'run'}"], cwd=project, capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "trajectories.jsonl").read_text("utf-8").splitlines()]
    assert [line["error"] for line in lines if line.get("error")] == []
    places = {
        message["content"] for line in lines for message in line["messages"] if "runtime_resources" in str(message)
    }
    assert len(places) == 1
    assert str(project) not in places

    lacking = "import os\nif 'runtime_resources' in os.getcwd():\n    import not_on_that_machine\npoints = len\n"
    (project / "rules.py").write_text(lacking, encoding="utf-8")
    done = subprocess.run(
        [*command, f"output={tmp_path / 'failed'}"],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    reason = "environment: game.py could not be imported: ModuleNotFoundError: No module named 'not_on_that_machine'"
    assert f"turnwise: rollout worker 0 on {socket.gethostname()}: {reason}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.cluster
@pytest.mark.ray
def test_the_gpu_of_a_command_that_trains_is_given_to_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that do not exist, which Ray gives away all the same."""
    with cluster(cpus=2, gpus=3) as started:
        assert ray_api.connect(started.address, WorkersSection()) is True
        import ray

        assert ray_api.free_gpus() == 3
        held = ray_api.hold_gpu("1", 60)
        worker = ray.remote(num_gpus=1, num_cpus=0)(lambda: ray.get_gpu_ids())
        given = sorted(ray.get([worker.remote() for _ in range(6)]))
        assert [1] not in given
        with pytest.raises(ConfigError, match="GPU 1 of this machine, on which the model is trained, is reserved"):
            ray_api.hold_gpu("1", 1)
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # as Ray sets it for `ray job submit --entrypoint-num-gpus 1`
        assert ray_api.hold_gpu("1", 1) is None
        ray_api.kill(held)
        ray_api.kill(ray_api.hold_gpu("1", 60))  # those that were held meanwhile are given back, too


_WAITS = (
    "import sys, time; from turnwise.options.engines import WorkersSection; from turnwise.ray_workers import ray_api; "
)
_WAITS += "ray_api.connect(sys.argv[1], WorkersSection()); print('connected', flush=True); time.sleep(600)"


@pytest.mark.cluster
@pytest.mark.ray
def test_a_head_that_is_gone_is_named_with_what_to_do() -> None:
    with cluster(cpus=1) as started:
        address = started.address
        process = subprocess.Popen(
            [sys.executable, "-c", _WAITS, address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "connected\n"
            started.head_node.kill_gcs_server(check_alive=False)
            lines = iter(process.stderr.readline, "")
            said = next((line for line in lines if line.startswith("turnwise: ")), "")
        finally:
            process.kill()
            process.communicate()
    assert f"the head of the Ray cluster ({address}) does not answer" in said
    assert "resume=auto" in said


# Images of rows and of environments in rollout workers: the trainer has the pixels that the model of the worker has
# seen.


@pytest.fixture(scope="module")
def images_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_recipe(tmp_path_factory.mktemp("vision"))


def media(trajectories: list[dict[str, Any]]) -> dict[str, Any]:
    return {line["id"]: [segment["media"] for segment in line["segments"]] for line in trajectories}


@pytest.mark.cluster
@pytest.mark.ray
def test_a_run_with_images_is_the_run_in_one_process(images_recipe: Path, tmp_path: Path, address: str) -> None:
    alone, of_alone = trained(images_recipe, tmp_path / "alone")
    together, of_together = trained(images_recipe, tmp_path / "together", *on_ray(address))
    assert len(together) == 8
    assert not [line["error"] for line in together if line.get("error")]
    assert tokens(together) == tokens(alone)
    assert media(together) == media(alone)  # places, grids and hashes of the pixels
    assert {len(images) for of_line in media(together).values() for images in of_line} == {1, 2}
    messages = {line["id"]: (line["messages"], line["row"]) for line in alone}
    assert {
        line["id"]: (line["messages"], line["row"]) for line in together
    } == messages  # images of rows are paths again
    for mine, other in zip(of_together, of_alone, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-4)
    assert of_together[0]["ratio/max_deviation"] < 1e-3


def test_the_worker_gets_files_and_the_trainer_gets_paths_again(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    picture(8, 16, seed=3).save(file)
    drawn = picture(8, 8, seed=4)
    content = [image_part(str(file)), image_part(drawn), {"type": "video", "video": [str(file), drawn]}]
    row = Row(id="7", messages=[{"role": "user", "content": content}], fields={"images": [str(file)], "other": "a.png"})
    sent = with_files(row)
    image, pixels, video = sent.messages[0]["content"]
    assert image["image"] == video["video"][0] == sent.fields["images"][0] == file.read_bytes()
    assert isinstance(image["image"], ImageFile)
    assert pixels["image"] is video["video"][1] is drawn
    assert sent.fields["other"] == "a.png"
    assert load_image(image["image"], where="here").tobytes() == Image.open(file).tobytes()
    trajectory = Trajectory(id="7/0", group="7", row=sent, messages=list(sent.messages))
    back = pickled(trajectory)
    assert file.read_bytes() not in back
    again = unpickled(back)
    assert again.messages[0]["content"][0] == image_part(str(file))
    assert again.messages[0]["content"][2]["video"][0] == str(file)
    assert again.row.fields["images"] == [str(file)]


# A training from outside of the Ray cluster, by its client server (`ray://`).


_FIRST_CLIENT_SERVER_DIES = """
import os, pathlib, sys

started = pathlib.Path({path!r})
if "ray.util.client.server" in sys.orig_argv and "--mode=specific-server" in sys.orig_argv and not started.exists():
    started.touch()
    os._exit(1)
"""
"""A `sitecustomize.py` of the cluster's processes: the first process that serves a client dies when it starts. Ray's proxy
forks beside threads of gRPC, and the new process can die of it."""


@pytest.mark.cluster
@pytest.mark.ray
def test_a_training_from_outside_of_the_cluster_is_that_of_one_process(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = save_short_recipe(tmp_path, model)
    alone, _ = trained(recipe, tmp_path / "alone")
    port, died = free_port(), tmp_path / "died"
    (tmp_path / "site").mkdir()
    script = _FIRST_CLIENT_SERVER_DIES.format(path=str(died))
    (tmp_path / "site" / "sitecustomize.py").write_text(script, encoding="utf-8")
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", os.pathsep.join([ENVIRONMENT["PYTHONPATH"], str(tmp_path / "site")]))
    with cluster({"tools": 1}, {"tools": 1}, client_port=port):
        command = [sys.executable, "-m", "turnwise", "train", str(recipe), f"output={tmp_path / 'outside'}"]
        command += [
            f"cluster=ray://127.0.0.1:{port}",
            "cluster.workers.count=2",
            "cluster.workers.resources={tools: 1}",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert died.exists()  # and the command has connected again
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    trajectories, metrics = (
        [json.loads(line) for line in (tmp_path / "outside" / name).read_text(encoding="utf-8").splitlines()]
        for name in ("trajectories.jsonl", "metrics.jsonl")
    )
    assert tokens(trajectories) == tokens(alone)
    assert sum(line["workers/lost"] for line in metrics) == 0


# Faults of rollout workers on a Ray cluster: real processes are killed, and no conversation is lost, repeated or
# waited for.


PLACES = Path(__file__).parent / "lossy_places.py"

STEPS, GROUPS, SIZE = 3, 2, 4


@pytest.fixture(scope="module")
def faults_recipe(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
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


@pytest.mark.cluster
@pytest.mark.ray
def test_a_killed_worker_is_replaced_and_its_conversations_run_again(
    faults_recipe: Path, tmp_path: Path, started: Any
) -> None:
    lossy = overrides(started, "kills_its_worker_once", folder=str(tmp_path))
    trajectories, metrics = trained(faults_recipe, tmp_path / "run", *lossy)
    assert_each_once(trajectories)
    assert not [line for line in trajectories if line.get("error")]
    assert sum(line["workers/lost"] for line in metrics) == 1
    assert sum(line["workers/restarted_conversations"] for line in metrics) >= 1
    lossy[0] = "cluster={launcher: none}"
    again, _ = trained(faults_recipe, tmp_path / "again", *lossy)  # without a loss, in this process
    assert tokens_of(again) == tokens_of(trajectories)


@pytest.mark.cluster
@pytest.mark.ray
def test_a_conversation_that_kills_its_workers_fails_and_the_others_finish(
    faults_recipe: Path, tmp_path: Path, started: Any
) -> None:
    one_bad = [*overrides(started, "kills_its_worker"), "train.steps=1", "train.group_size=2", "train.batch_size=4"]
    trajectories, metrics = trained(faults_recipe, tmp_path / "run", *one_bad)
    failed = {line["row"]["id"]: line["error"] for line in trajectories if line.get("error")}
    assert list(failed) == ["1"]
    assert failed["1"]["kind"] == "engine"
    assert "lost its rollout worker 3 times" in failed["1"]["message"]
    assert 3 <= metrics[0]["workers/lost"] <= 6  # the two conversations of the group, three times each at most


@pytest.mark.cluster
@pytest.mark.ray
def test_a_worker_without_a_sign_of_life_is_replaced(faults_recipe: Path, tmp_path: Path, started: Any) -> None:
    blocking = [*overrides(started, "blocks_once", folder=str(tmp_path)), "cluster.heartbeat=8", "train.steps=1"]
    trajectories, metrics = trained(faults_recipe, tmp_path / "run", *blocking)
    assert_each_once(trajectories, steps=1)
    assert not [line for line in trajectories if line.get("error")]
    assert metrics[0]["workers/lost"] >= 1  # on a busy machine, another worker may be late, too


@pytest.mark.cluster
@pytest.mark.ray
def test_a_lost_node_ends_neither_the_run_nor_its_conversations(
    faults_recipe: Path, tmp_path: Path, started: Any
) -> None:
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
    trajectories, metrics = trained(faults_recipe, tmp_path / "run", *doomed)
    thread.join()
    started.remove_node(nodes[1])
    assert_each_once(trajectories)
    assert not [line for line in trajectories if line.get("error")]
    assert sum(line["workers/lost"] for line in metrics) >= 1
    assert sum(line["workers/restarted_conversations"] for line in metrics) >= 1


@pytest.mark.cluster
@pytest.mark.ray
def test_without_a_worker_conversations_fail_in_time_and_the_reason_is_told(
    faults_recipe: Path, tmp_path: Path, started: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rollouts, "_NOTICE", 1.0)
    nowhere = ["cluster.workers.resources={gold: 1}", "cluster.workers.start_timeout=5"]
    with pytest.raises(EngineError, match=r"was not ready after cluster\.workers\.start_timeout=5 s.*gold=1"):
        trained(faults_recipe, tmp_path / "run", *overrides(started, "slow", folder=str(tmp_path)), *nowhere)
    assert re.search(
        r"waiting for 2 of 2 rollout workers \(0, 1\), at most .*=5 s: .*gold=1.* has free: CPU=\d", caplog.text
    )


@pytest.mark.cluster
@pytest.mark.ray
def test_a_killed_driver_leaves_no_worker_and_the_run_resumes(
    faults_recipe: Path, tmp_path: Path, started: Any
) -> None:
    words = [*overrides(started, "slow", folder=str(tmp_path)), f"output={tmp_path / 'run'}", "train.max_staleness=1"]
    command = [sys.executable, "-m", "turnwise", "train", str(faults_recipe), *words]
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
    trajectories, _ = trained(faults_recipe, tmp_path / "run", *words, "resume=auto")
    assert_each_once(trajectories)
    assert not [line for line in trajectories if line.get("error")]


@pytest.mark.cluster
@pytest.mark.ray
def test_the_pipeline_is_asynchronous_with_bounded_staleness_and_versions_for_each_token(
    faults_recipe: Path, tmp_path: Path, started: Any
) -> None:
    words = [*overrides(started, "slow", folder=str(tmp_path)), "train.max_staleness=2", "train.steps=6"]
    trajectories, _ = trained(faults_recipe, tmp_path / "run", *words)
    assert_each_once(trajectories, steps=6)
    versions = {
        line["id"]: (line["step"] - 1, {v for segment in line["segments"] for v in segment["version"] if v >= 0})
        for line in trajectories
    }
    assert all(0 <= step - version <= 2 for step, of_line in versions.values() for version in of_line)
    assert any(step - min(of_line) > 0 for step, of_line in versions.values())
    assert any(len(of_line) > 1 for _, of_line in versions.values())  # went on under new weights


@pytest.mark.cluster
@pytest.mark.ray
def test_a_worker_runs_a_thousand_conversations_at_the_same_time(
    faults_recipe: Path, tmp_path: Path, started: Any
) -> None:
    words = [*overrides(started, "all_together", count=1000), "cluster.workers.count=1", "max_concurrent=1000"]
    words += ["train.steps=1", "train.batch_size=4", "train.group_size=250", "limits.tokens_per_turn=1"]
    trajectories, _ = trained(faults_recipe, tmp_path / "run", *words)
    assert len(trajectories) == 1000
    assert not [line for line in trajectories if line.get("error")]


# Training ranks and rollout workers together on a Ray cluster of several nodes: real commands, whose processes are
# killed.


RANKS_STEPS, RANKS_GROUPS, RANKS_SIZE = 3, 2, 4

PATIENCE = 600


@pytest.fixture(scope="module")
def ranks_recipe(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    return save_recipe(
        folder,
        model,
        data={"train": str(save_rows(folder / "train.jsonl", 4))},
        limits={"turns": 2, "tokens_per_turn": 6},
        train={"steps": RANKS_STEPS, "batch_size": RANKS_GROUPS, "group_size": RANKS_SIZE, "lr": 0.01},
        checkpoint={"every": 1},
    )


def ranks_on_ray(started: Any, trainers: int = 2) -> list[str]:
    """A rank and a worker on each node."""
    return [
        "cluster=ray",
        f"cluster.address={started.address}",
        f"cluster.trainers={trainers}",
        "cluster.ranks.resources={trainer: 1}",
        "cluster.ranks.num_cpus=0.5",
        "cluster.workers.count=2",
        "cluster.workers.resources={tools: 5}",
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


def ranks_assert_each_once(run: Path, *, steps: int) -> None:
    trajectories = lines(run, "trajectories")
    assert not [line for line in trajectories if line.get("error")]
    assert set(Counter(line["id"] for line in trajectories).values()) == {1}
    assert Counter(line["step"] for line in trajectories) == {
        step + 1: RANKS_GROUPS * RANKS_SIZE for step in range(steps)
    }


def wait_until_gone(processes: list[int]) -> None:
    deadline = time.monotonic() + 120
    while left := [process for process in processes if ranks_alive(process)]:
        assert time.monotonic() < deadline, f"the processes {left} go on"
        time.sleep(0.2)


def ranks_alive(process: int) -> bool:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{process}/cmdline").read_bytes()
        return b"turnwise" in words or b"ray::" in words
    return False


@pytest.mark.cluster
@pytest.mark.ray
def test_two_ranks_and_two_workers_train_as_one_process(ranks_recipe: Path, tmp_path: Path, started: Any) -> None:
    _, of_one, _ = train_run(ranks_recipe, tmp_path / "one")
    status, output = Command(ranks_recipe, tmp_path / "two", *ranks_on_ray(started)).finish()
    assert status == 0, output
    ranks_assert_each_once(tmp_path / "two", steps=RANKS_STEPS)
    of_two = lines(tmp_path / "two", "metrics")
    assert len(of_two) == RANKS_STEPS
    for one, two in zip(of_one, of_two, strict=True):
        assert two["reward/mean"] == one["reward/mean"]
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-4)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-2)
        assert two["ratio/max_deviation"] < 1e-3
    assert "step 3" in output
    # an error of rank 0 is that of the command
    status, output = Command(ranks_recipe, tmp_path / "two", *ranks_on_ray(started)).finish()
    assert status == 1, output
    assert f"{tmp_path / 'two'}" in output
    assert "resume=auto" in output
    assert "Traceback" not in output


@pytest.mark.cluster
@pytest.mark.ray
def test_after_a_killed_rank_all_ranks_go_on_and_after_sigterm_one_rank_does(
    ranks_recipe: Path, tmp_path: Path, started: Any
) -> None:
    words = [*slow(tmp_path), "train.max_staleness=1"]
    endless = [*ranks_on_ray(started), *words, "cluster.restarts=1", "train.steps=5000"]
    command = Command(ranks_recipe, tmp_path / "run", *endless)
    command.wait_for_steps(2)
    first = command.ranks()
    os.kill(first[1], signal.SIGKILL)
    while (second := command.ranks()) == first:
        assert command.process.poll() is None, command.output
        time.sleep(0.05)
    command.wait_for_steps(len(lines(tmp_path / "run", "metrics")) + 2)
    command.process.send_signal(signal.SIGTERM)
    status, output = command.finish()
    assert status == 143, output
    assert f"trainer rank 1 (127.0.0.1, process {first[1]}) was ended by the signal SIGKILL" in output
    assert "starting all ranks again from the newest checkpoint" in output
    assert "resume=auto" in output
    wait_until_gone([*first, *second])
    done = len(lines(tmp_path / "run", "metrics"))
    one = [*ranks_on_ray(started, trainers=1), *words, "resume=auto", f"train.steps={done + 1}"]
    status, output = Command(ranks_recipe, tmp_path / "run", *one).finish()
    assert status == 0, output
    assert f"resuming after step {done}" in output
    ranks_assert_each_once(tmp_path / "run", steps=done + 1)
    staleness = [
        line["step"] - 1 - version
        for line in lines(tmp_path / "run", "trajectories")
        for segment in line["segments"]
        for version in segment["version"]
        if version >= 0
    ]
    assert set(staleness) == {0, 1}


@pytest.mark.cluster
@pytest.mark.ray
def test_a_killed_driver_leaves_neither_ranks_nor_workers(ranks_recipe: Path, tmp_path: Path, started: Any) -> None:
    command = Command(ranks_recipe, tmp_path / "run", *ranks_on_ray(started), *slow(tmp_path), "train.steps=5000")
    command.wait_for_steps(1)
    command.process.send_signal(signal.SIGKILL)
    command.process.wait()
    workers = [int(file.name) for file in tmp_path.iterdir() if file.name.isdigit()]
    assert len(workers) == 2
    wait_until_gone([*command.ranks(), *workers])
    done = len(lines(tmp_path / "run", "metrics"))
    train_run(ranks_recipe, tmp_path / "run", *slow(tmp_path), "resume=auto", f"train.steps={done + 1}")
    ranks_assert_each_once(tmp_path / "run", steps=done + 1)


@pytest.mark.cluster
@pytest.mark.ray
def test_missing_resources_are_an_error_that_names_needed_and_free(
    ranks_recipe: Path, tmp_path: Path, started: Any
) -> None:
    words = [*ranks_on_ray(started, trainers=3), "cluster.ranks.start_timeout=3"]
    status, output = Command(ranks_recipe, tmp_path / "run", *words).finish()
    assert status == 1, output
    assert "3 trainer ranks need num_cpus=0.5, num_gpus=0, trainer=1 each, and the cluster has free: CPU=4" in output
    assert "trainer=2" in output
    assert not (tmp_path / "run").exists()
    status, output = Command(
        ranks_recipe, tmp_path / "run", *ranks_on_ray(started), "train.optimizer.name=adafactor"
    ).finish()
    assert status == 1, output
    assert "cannot be used with several ranks" in output
    assert "trainer ranks" not in output  # nothing was started
