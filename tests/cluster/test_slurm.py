"""`deploy/slurm/` as jobs of a real Slurm on this machine: Debian's slurmctld, slurmd, slurm-client and munge."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.ports import free_port
from support.recipes import save_recipe

PROGRAMS = ("sbatch", "scancel", "scontrol", "srun", "slurmctld", "slurmd", "munged")
MISSING = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd needs root"),
]
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
