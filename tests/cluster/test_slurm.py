"""`deploy/slurm/train.sbatch` as a job of a real Slurm on this machine: Debian's slurmctld, slurmd, slurm-client and munge."""

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
    environment = {
        **slurm,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
        "RDZV_PORT": str(free_port()),
    }

    def command(*words: str) -> str:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(*words: str) -> str:
        options = ("--nodes=1", "--gpus-per-node=2", "--cpus-per-task=1", f"--output={output}", "--parsable")
        script = str(ROOT / "deploy" / "slurm" / "train.sbatch")
        return command("sbatch", *options, script, str(recipe), f"output={run}", *words).strip()

    def state(job: str) -> str:
        shown = command("scontrol", "show", "job", job)
        return shown.partition("JobState=")[2].split()[0]

    def steps() -> list[int]:
        file = run / "metrics.jsonl"
        return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []

    first = submit()
    wait_until(lambda: len(steps()) >= 2, 600, lambda: f"{state(first)}: {output.read_text()}")
    command("scancel", "--batch", "--signal=USR1", first)  # as Slurm does before the time limit (#SBATCH --signal)
    wait_until(lambda: state(first) not in ("RUNNING", "COMPLETING"), 600, output.read_text)
    done = steps()
    assert (run / "checkpoint" / "weights_in_parts.json").exists(), output.read_text()  # complete at the end
    second = submit(f"train.steps={len(done) + 1}")
    wait_until(lambda: state(second) not in ("PENDING", "RUNNING", "COMPLETING"), 600, output.read_text)
    assert state(second) == "COMPLETED", output.read_text()
    assert steps() == list(range(1, len(done) + 2))
    assert (run / "checkpoint" / "model.safetensors").exists()
