"""Runs on several ranks: the same metrics as in one process, what happens if a rank is lost, and jobs of a real Slurm."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.forked import Forked
from support.ports import free_port
from support.recipes import save_recipe
from turnwise.cli import main
from turnwise.local_paths import WEIGHTS_IN_PARTS

pytestmark = pytest.mark.cluster

SOURCE = Path(__file__).parent.parent.parent / "src"
FAULTS = Path(__file__).parent.parent / "support" / "writing_faults.py"
COMPARED = ("loss", "kl", "grad_norm", "reward/mean", "tokens/trained", "ratio/max_deviation")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return save_recipe(
        tmp_path_factory.mktemp("recipe"),
        model,
        train={"steps": 3, "batch_size": 2, "group_size": 4, "lr": 1e-3, "micro_batch_tokens": 64, "minibatches": 2},
        limits={"turns": 3, "tokens_per_turn": 12},
        checkpoint={"every": 1, "keep": 3},
        deterministic=True,
    )


Launcher = subprocess.Popen[str] | Forked


def start(
    recipe: Path,
    *words: str,
    restarts: int | None = None,
    fresh: bool = False,
    name: str = "train",
    paths: Sequence[Path] = (),
) -> Launcher:
    """Start the ranks; by torchrun, with this number of restarts. `fresh`: not forked from a process that has imported
    everything; nor with `paths`, where Python finds a `sitecustomize` for each process."""
    searched = os.pathsep.join(map(str, (*paths, SOURCE, SOURCE.parent / "tests")))
    environment = {**os.environ, "PYTHONPATH": searched, "OMP_NUM_THREADS": "1"}
    turnwise = [name, str(recipe), *words]
    if restarts is None and not fresh and not paths:
        return Forked(turnwise, env=environment)
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    command = [sys.executable, *(several if restarts is not None else []), "-m", "turnwise", *turnwise]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: Launcher) -> str:
    try:
        output, _ = process.communicate(timeout=600)
    finally:
        process.kill()
    return output


def run(recipe: Path, *words: str) -> str:
    """Train to the end; in this process, unless there are several ranks. Returns what was printed by theirs."""
    if not any(word.startswith("cluster=") for word in words):
        assert main(["train", str(recipe), *words]) == 0
        return ""
    process = start(recipe, *words, fresh=True)
    output = finish(process)
    assert process.returncode == 0, output
    return output


def metrics(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def compared(folder: Path, steps: int) -> list[float]:
    lines = metrics(folder)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line[name] for line in lines[:steps] for name in COMPARED]


@pytest.fixture(scope="module")
def in_one_process(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    run(recipe, f"output={folder}", "train.steps=8")
    return folder


def rank_process(launcher: Launcher, rank: int) -> int:
    """The process of a rank that the launcher has started. Torchrun may have other children; forked ranks have its variables."""
    children = [
        int(child)
        for found in Path(f"/proc/{launcher.pid}/task").glob("*/children")
        for child in found.read_text().split()
    ]
    if isinstance(launcher, Forked):
        assert len(children) == 2, children
        return children[rank]
    for child in children:
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return child
    raise AssertionError(f"the launcher has no rank {rank}")


def wait_for_steps(folder: Path, count: int, process: Launcher) -> None:
    deadline = time.monotonic() + 900
    while len(metrics(folder)) < count:
        assert process.poll() is None, finish(process)
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"{len(metrics(folder))} of {count} steps: {finish(process)}")
        time.sleep(0.05)


def test_a_killed_rank_is_named_and_the_run_resumes_in_one_process(
    recipe: Path, tmp_path: Path, in_one_process: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    words = ["cluster=local", "cluster.trainers=2", "train.steps=5000", "checkpoint.background=true"]
    process = start(recipe, f"output={folder}", *words)
    wait_for_steps(folder, 2, process)
    os.kill(rank_process(process, 1), signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 1
    assert "trainer rank 1" in output
    assert "SIGKILL" in output
    assert "resume=auto" in output
    done = len(metrics(folder))
    model = folder / "checkpoint"
    assert not list(model.glob("*.safetensors"))
    assert main(["rollout", str(recipe), f"model.path={model}", "--out", str(tmp_path / "rollout")]) == 1
    assert f"`turnwise merge {model}`" in capsys.readouterr().err
    assert main(["merge", str(folder), "--out", str(tmp_path / "merged")]) == 0
    run(recipe, f"output={folder}", "resume=auto", f"train.steps={done + 2}")
    saved = json.loads((model / ".." / "checkpoint.json").read_text())["step"]
    assert (saved, len(metrics(folder))) == (done + 2, done + 2)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert all(bool(torch.isfinite(weight).all()) for weight in merged.parameters())
    steps = min(done + 2, 8)
    assert compared(folder, steps) == pytest.approx(compared(in_one_process, steps), abs=1e-5, rel=1e-4)


def test_a_run_of_one_process_goes_on_with_two_ranks_which_start_again_after_a_loss(
    recipe: Path, tmp_path: Path, in_one_process: Path
) -> None:
    folder = tmp_path / "run"
    run(recipe, f"output={folder}", "train.steps=2")
    words = ["resume=auto", "cluster=local", "cluster.trainers=2", "cluster.restarts=1", "train.steps=400"]
    process = start(recipe, f"output={folder}", *words)
    wait_for_steps(folder, 4, process)
    os.kill(rank_process(process, 0), signal.SIGKILL)
    wait_for_steps(folder, len(metrics(folder)) + 2, process)
    process.send_signal(signal.SIGTERM)
    output = finish(process)
    assert process.returncode == 143, output
    assert "trainer rank 0" in output
    assert "starting all ranks again" in output
    steps = min(len(metrics(folder)), 8)
    assert compared(folder, steps) == pytest.approx(compared(in_one_process, steps), abs=1e-5, rel=1e-4)


@pytest.mark.parametrize("fault", ["kill-other:3", "full:3"])
def test_a_rank_that_is_lost_or_cannot_write_leaves_the_checkpoint_before(
    recipe: Path, tmp_path: Path, in_one_process: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    words = [f"output={folder}", f"environment={FAULTS}:low_bytes"]
    monkeypatch.setenv("TURNWISE_TEST_WRITING", fault)
    beside = ["cluster=local", "cluster.trainers=2", "train.steps=5000", "checkpoint.background=true"]
    process = start(recipe, *words, *beside)
    output = finish(process)
    assert process.returncode == 1, output
    monkeypatch.delenv("TURNWISE_TEST_WRITING")
    reason = "trainer rank 1" if fault == "kill-other:3" else "(rank 0: [Errno 28] No space left on device)"
    assert reason in output
    saved = json.loads((folder / "checkpoint" / ".." / "checkpoint.json").read_text())["step"]
    assert saved == 2
    run(recipe, *words, "resume=auto", "train.steps=5")
    assert compared(folder, 5) == pytest.approx(compared(in_one_process, 5), abs=1e-5, rel=1e-4)


def test_a_critic_on_two_ranks_has_the_metrics_of_one_process_and_goes_on_there(recipe: Path, tmp_path: Path) -> None:
    words = ["credit.name=gae", "critic.lr=1e-3", "credit.lam=0.9"]
    run(recipe, f"output={tmp_path / 'one'}", *words)
    ranks = ["cluster=local", "cluster.trainers=2", "checkpoint.background=true"]
    run(recipe, f"output={tmp_path / 'two'}", *words, *ranks, "train.steps=2")
    checkpoint = (tmp_path / "two" / "checkpoint").resolve().parent
    assert (checkpoint / "shards" / "critic" / ".metadata").is_file()
    assert (checkpoint / "critic" / "value_head.safetensors").is_file()
    run(recipe, f"output={tmp_path / 'two'}", *words, "resume=auto")
    names = ("critic/loss", "critic/grad_norm", "critic/value_mean", *COMPARED)
    one, two = ([[line[name] for name in names] for line in metrics(tmp_path / run)] for run in ("one", "two"))
    assert len(one) == 3
    assert one[0][0] > 0
    for of_one, of_two in zip(one, two, strict=True):
        assert of_two == pytest.approx(of_one, abs=1e-4, rel=1e-3)


def test_torchrun_gives_the_metrics_of_one_process_and_starts_ranks_again_after_a_loss(
    recipe: Path, tmp_path: Path, in_one_process: Path
) -> None:
    folder = tmp_path / "run"
    words = ["cluster=torchrun", "resume=auto", "train.steps=8"]
    process = start(recipe, f"output={folder}", *words, restarts=1)
    wait_for_steps(folder, 2, process)
    os.kill(rank_process(process, 1), signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 0, output
    assert "resuming after step" in output
    assert "step 8" in output
    assert (folder / "checkpoint" / "model.safetensors").is_file()
    assert len(metrics(folder)) == 8
    assert compared(folder, 8) == pytest.approx(compared(in_one_process, 8), abs=1e-5, rel=1e-4)


def test_ranks_go_on_from_parts_and_the_best_and_the_newest_model_are_complete_at_the_end(
    tmp_path: Path, model: Path
) -> None:
    """Fine-tuning: no process needs a complete model."""
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": messages}) + "\n")
    recipe = save_recipe(
        tmp_path,
        model,
        environment="turnwise.environments.environment:SingleTurn",
        data={"train": str(rows), "eval": str(rows)},
        sft={"steps": 5000, "batch_size": 1, "lr": 1e-3, "eval_every": 1},
        checkpoint={"every": 1, "keep": 2, "best": "loss"},
    )
    folder, words = tmp_path / "run", ["cluster=local", "cluster.trainers=2"]
    process = start(recipe, f"output={folder}", *words, name="sft")
    wait_for_steps(folder, 2, process)
    process.send_signal(signal.SIGTERM)
    output = finish(process)
    assert process.returncode == 143, output
    before = (folder / "checkpoint").resolve()
    assert (before / WEIGHTS_IN_PARTS).is_file()
    done = len(metrics(folder))
    # the loss becomes worse: the best checkpoint is the one before
    more = ["resume=auto", f"sft.steps={done + 1}", "sft.lr=100", "resume_changes=[sft.lr]"]
    process = start(recipe, f"output={folder}", *words, *more, name="sft")
    output = finish(process)
    assert process.returncode == 0, output
    assert f"resuming after step {done}" in output
    evaluations = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert evaluations[-1]["loss"] > evaluations[-2]["loss"]
    newest, best = (folder / "checkpoint").resolve(), (folder / "best").resolve()
    assert (newest.parent.name, best) == (f"step-{done + 1:06d}", before)
    for place in (newest, best):
        assert not (place / WEIGHTS_IN_PARTS).exists()
        assert AutoModelForCausalLM.from_pretrained(place) is not None
    # not when the run was resumed
    written, saved = best / "model.safetensors", newest.parent / "shards" / ".metadata"
    assert written.stat().st_mtime_ns > saved.stat().st_mtime_ns


def test_a_rank_that_hangs_ends_the_run_in_time(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["cluster=local", "cluster.trainers=2", "cluster.heartbeat=8", "train.steps=5000"]
    process = start(recipe, f"output={folder}", *words)
    wait_for_steps(folder, 1, process)
    hanging = rank_process(process, 1)
    os.kill(hanging, signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        while rank_alive(process, 0) and time.monotonic() - stopped < 120:
            time.sleep(0.2)
        assert time.monotonic() - stopped < 120
    finally:
        os.kill(hanging, signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 1
    assert "trainer rank 1" in output
    assert "no sign of life for 8 seconds" in output


_OUT_OF_MEMORY = """
import os, sys

if os.environ.get("RANK") == os.environ["FAULTY_RANK"]:
    import torch
    from turnwise.training import forward

    values = forward.Forward.values

    def short_of_memory(self, micro, **options):
        found = values(self, micro, **options)
        if micro.token_ids_BL.numel() > int(os.environ["MOST_TOKENS"]) and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return found

    forward.Forward.values = short_of_memory
"""
"""A rank whose memory runs out between forward and backward pass, in which the others wait for it."""


@pytest.mark.parametrize("faulty", [0, 1])
def test_ranks_start_again_with_smaller_micro_batches_where_the_memory_of_one_runs_out(
    recipe: Path, tmp_path: Path, in_one_process: Path, faulty: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_OUT_OF_MEMORY)
    monkeypatch.setenv("FAULTY_RANK", str(faulty))
    monkeypatch.setenv("MOST_TOKENS", "70")
    folder = tmp_path / "run"
    words = [f"output={folder}", "cluster=local", "cluster.trainers=2", "train.micro_batch_tokens=4096"]
    process = start(recipe, *words, paths=[tmp_path])
    output = finish(process)
    assert process.returncode == 1, output
    size = int(re.findall(r"ran out in a micro-batch of (\d+) tokens \(CUDA out of memory", output)[0])
    assert f"Set micro_batch_tokens={size // 2}. The next start has it from" in output
    assert f"trainer rank {faulty} (" in output
    assert json.loads((folder / "micro_batch_bound.json").read_text()) == {
        "place": "2 ranks (1 x 2 x 1 x 1) on device cpu",
        "policy": size // 2,
    }
    process = start(recipe, *words, "resume=auto", "cluster.restarts=3", paths=[tmp_path])
    output = finish(process)
    assert process.returncode == 0, output
    assert f"at most {size // 2} tokens in each micro-batch" in " ".join(output.split())
    assert compared(folder, 3) == pytest.approx(compared(in_one_process, 3), abs=1e-5, rel=1e-4)


@pytest.mark.parametrize("faulty", [0, 1])
def test_ranks_are_not_started_again_where_the_memory_of_one_does_not_suffice_for_a_sequence(
    recipe: Path, tmp_path: Path, faulty: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_OUT_OF_MEMORY)
    monkeypatch.setenv("FAULTY_RANK", str(faulty))
    monkeypatch.setenv("MOST_TOKENS", "4")
    words = [f"output={tmp_path / 'run'}", "cluster=local", "cluster.trainers=2", "cluster.restarts=3"]
    process = start(recipe, *words, "train.micro_batch_tokens=1", paths=[tmp_path])
    output = " ".join(finish(process).split())
    assert process.returncode == 1, output
    (first,) = re.findall(
        r"trainer rank (\d) [^:]*has ended: the memory of device cpu ran out in the pass over one", output
    )
    assert int(first) == faulty
    assert "Traceback" not in output, output
    assert "Set model.gradient_checkpointing=true, cluster.fsdp.offload=cpu or cluster.mesh.context" in output
    assert "Then start the command again with resume=auto" in output
    assert "starting all ranks again" not in output


_GPUS = """
import os

if "RANK" in os.environ:
    from turnwise.models.device import GpuMemory
    from turnwise.training.sharded.ranks import Ranks

    free = int((1.0 if os.environ["RANK"] == "1" else 4.0) * 2**30)
    Ranks.gpus = lambda self: self.share(GpuMemory("A card", 8 * 2**30, free))
"""


def test_ranks_compute_the_micro_batch_for_the_fullest_of_their_gpus(
    recipe: Path, tmp_path: Path, in_one_process: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_GPUS)
    words = ["cluster=local", "cluster.trainers=2", "train.micro_batch_tokens=null", "engine.memory_gb=0.1"]
    process = start(recipe, f"output={tmp_path / 'run'}", *words, paths=[tmp_path])
    output = " ".join(finish(process).split())
    assert process.returncode == 0, output
    computed = re.findall(
        r"computed for A card with 8.0 GiB, of which other processes use 7.0, the fullest GPU of 2 ranks, where the recipe "
        r"has no number: train.micro_batch_tokens=(\d+)",
        output,
    )
    assert [int(tokens) >= 512 for tokens in computed] == [True], output
    assert compared(tmp_path / "run", 3) == pytest.approx(compared(in_one_process, 3), abs=1e-5, rel=1e-4)


def rank_alive(launcher: Launcher, rank: int) -> bool:
    try:
        process = rank_process(launcher, rank)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (AssertionError, OSError):  # it has ended
        return False


# `deploy/slurm/` as jobs of a real Slurm on this machine: Debian's slurmctld, slurmd, slurm-client and munge.


PROGRAMS = ("sbatch", "scancel", "scontrol", "srun", "slurmctld", "slurmd", "munged")
MISSING = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
needs_slurm = pytest.mark.skipif(
    bool(MISSING) or os.geteuid() != 0,
    reason=f"not installed: {', '.join(MISSING)}" if MISSING else "slurmd needs root",
)
ROOT = Path(__file__).parents[2]
CONFIGURATION = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={controller}
SlurmdPort={daemon}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES State=UP
"""
"""Of a cluster of this machine, which seems to have two GPUs."""


def wait_until(holds: Callable[[], bool], seconds: float, problem: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, problem()
        time.sleep(0.2)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of the commands of a Slurm cluster."""
    folder, host = tmp_path_factory.mktemp("slurm"), socket.gethostname().partition(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    text = CONFIGURATION.format(
        folder=folder, host=host, controller=free_port(), daemon=free_port(), cpus=os.cpu_count()
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text(f"NodeName={host} Name=gpu File=/dev/null,/dev/zero\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
    munge = [
        f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in ("key-file", "socket", "pid-file", "log-file")
    ]
    commands = (
        ["munged", "-F", "-f", *munge, f"--seed-file={folder}/munge.seed"],
        ["slurmctld", "-D", "-c"],
        ["slurmd", "-D", "-c"],
    )
    started: list[subprocess.Popen[bytes]] = []
    with (folder / "output").open("wb") as output:
        try:
            for command in commands:
                started.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
                if command[0] == "munged":
                    wait_until((folder / "munge.socket").exists, 60, (folder / "output").read_text)
            idle = ["sinfo", "--noheader", "--format=%T"]

            def is_idle() -> bool:
                return subprocess.run(idle, env=environment, capture_output=True, text=True).stdout.strip() == "idle"

            wait_until(is_idle, 120, (folder / "output").read_text)
            yield environment
        finally:
            for process in reversed(started):
                process.terminate()
                process.wait(60)


class Jobs:
    """The jobs of a script of deploy/slurm."""

    def __init__(self, environment: dict[str, str], script: str, output: Path, *options: str) -> None:
        self.environment = environment | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
        self.output = output
        self._words = (
            "--nodes=1",
            f"--output={output}",
            "--parsable",
            *options,
            str(ROOT / "deploy" / "slurm" / script),
        )

    def command(self, *words: str) -> str:
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, *words: object) -> str:
        return self.command("sbatch", *self._words, *map(str, words)).strip()

    def state(self, job: str) -> str:
        shown = self.command("scontrol", "show", "job", job)
        return shown.partition("JobState=")[2].split()[0]

    def wait_for_end(self, job: str) -> str:
        """The state of a job that has ended."""
        wait_until(
            lambda: self.state(job) not in ("PENDING", "RUNNING", "COMPLETING"), 600, lambda: self.output.read_text()
        )
        return self.state(job)


@needs_slurm
def test_a_job_trains_ends_with_a_checkpoint_before_its_time_limit_and_goes_on(
    slurm: dict[str, str], model: Path, tmp_path: Path
) -> None:
    recipe = save_recipe(
        tmp_path,
        model,
        train={"steps": 5000, "batch_size": 2, "group_size": 2, "lr": 1e-3},
        limits={"turns": 2, "tokens_per_turn": 8},
        checkpoint={"every": 5000},
    )
    run, output = tmp_path / "run", tmp_path / "output"
    jobs = Jobs(
        slurm | {"RDZV_PORT": str(free_port())}, "train.sbatch", output, "--gpus-per-node=2", "--cpus-per-task=1"
    )

    def steps() -> list[int]:
        file = run / "metrics.jsonl"
        return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []

    first = jobs.submit(recipe, f"output={run}")
    wait_until(lambda: len(steps()) >= 2, 600, lambda: f"{jobs.state(first)}: {output.read_text()}")
    jobs.command("scancel", "--batch", "--signal=USR1", first)  # as Slurm does before the time limit (#SBATCH --signal)
    jobs.wait_for_end(first)
    done = steps()
    assert (run / "checkpoint" / "weights_in_parts.json").exists(), output.read_text()  # complete at the end
    second = jobs.submit(recipe, f"output={run}", f"train.steps={len(done) + 1}")
    assert jobs.wait_for_end(second) == "COMPLETED", output.read_text()
    assert steps() == list(range(1, len(done) + 2))
    assert (run / "checkpoint" / "model.safetensors").exists()


@needs_slurm
@pytest.mark.ray
def test_a_job_runs_workers_on_a_ray_cluster_of_its_own(slurm: dict[str, str], model: Path, tmp_path: Path) -> None:
    """Also where the user has a token, with which `ray start` makes a cluster that asks for one."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0" * 64)
    recipe = save_recipe(
        tmp_path,
        model,
        train={"steps": 1, "batch_size": 2, "group_size": 2},
        limits={"turns": 1, "tokens_per_turn": 4},
    )
    own = {"HOME": str(tmp_path), "RAY_PORT": str(free_port())}
    output, run = tmp_path / "output", tmp_path / "run"
    jobs = Jobs(slurm | own, "ray.sbatch", output, "--gpus-per-node=2", "--cpus-per-task=1")
    job = jobs.submit(recipe, f"output={run}", "cluster.workers.num_gpus=1", "cluster.workers.num_cpus=0.5")
    assert jobs.wait_for_end(job) == "COMPLETED", output.read_text()
    lines = [json.loads(line) for line in (run / "trajectories.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1] * 4
    assert not [line for line in lines if line.get("error")]
