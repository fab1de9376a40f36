"""The files in deploy/: scripts that bash accepts, manifests with the keys of KubeRay, and commands that turnwise accepts."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.recipes import save_recipe
from turnwise.config.recipe import load
from turnwise.config.train_checks import refuse_without_effect
from turnwise.options.engines import ClusterSection
from turnwise.options.schema import Config

ROOT = Path(__file__).parent.parent.parent
SLURM = ROOT / "deploy" / "slurm"
RAY = "ray" in typing.get_args(ClusterSection.model_fields["launcher"].annotation)
needs_ray = pytest.mark.skipif(not RAY, reason="cluster.launcher=ray is not part of this version")
COMMANDS = {
    "scontrol": "printf 'node1\\nnode2\\n'",
    "getent": "echo '10.0.0.1 node1'",
    "srun": 'echo "$@" >> "$CALLS"',
    "sleep": "true",
}
"""Stand-ins for commands of a Slurm cluster."""


@pytest.mark.parametrize("script", sorted(SLURM.glob("*.sbatch")), ids=lambda path: path.name)
def test_bash_accepts_the_script(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(script)], check=True)
    lines = script.read_text().splitlines()
    options = [line for line in lines if line.startswith("#SBATCH ")]
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert options
    assert all(lines.index(option) < first for option in options)  # Slurm ignores those after the first command


def calls(script: str, tmp_path: Path, *words: str) -> list[list[str]]:
    """The words of each call of `srun` by a script."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    job = {
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "7",
        "SLURM_GPUS_ON_NODE": "4",
    }
    environment = {**os.environ, **job, "PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls")}
    # reads to the end of the output, which the commands in the background share
    subprocess.run(["bash", str(SLURM / script), *words], env=environment, check=True, capture_output=True, timeout=60)
    return [shlex.split(line) for line in (tmp_path / "calls").read_text().splitlines()]


def checked(words: list[str], recipe: Path) -> Config:
    """The configuration of the words after `turnwise`, if `turnwise train` accepts them."""
    assert words[:2] == ["train", str(recipe)]
    config, _ = load(words[1], words[2:])
    refuse_without_effect(config)
    return config


def test_the_script_starts_torchrun_on_all_nodes(tmp_path: Path) -> None:
    from torch.distributed.run import get_args_parser

    recipe = save_recipe(tmp_path, tmp_path / "model")
    (words,) = calls("train.sbatch", tmp_path, str(recipe), "train.steps=5")
    options = get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
    assert (options.nnodes, options.nproc_per_node, options.rdzv_backend) == ("2", "4", "c10d")
    assert (options.rdzv_endpoint, options.rdzv_id, options.max_restarts) == ("node1:29500", "7", 3)
    assert (options.module, options.training_script) == (True, "turnwise")
    config = checked(options.training_script_args, recipe)
    assert (config.cluster.launcher, config.resume, config.train.steps) == ("torchrun", "auto", 5)


@needs_ray
def test_the_script_starts_ray_on_all_nodes_and_trains_on_the_first(tmp_path: Path) -> None:
    recipe = save_recipe(tmp_path, tmp_path / "model")
    made = calls("ray.sbatch", tmp_path, str(recipe), "train.steps=5")
    started = [words for words in made if "ray" in words]
    assert sorted(word for words in started for word in words if word.startswith("--nodelist")) == [
        "--nodelist=node1",
        "--nodelist=node2",
    ]
    assert sum("--head" in words for words in started) == 1
    (words,) = [words for words in made if "turnwise" in words]
    config: Any = checked(words[words.index("turnwise") + 1 :], recipe)
    assert (config.cluster.launcher, config.cluster.address, config.resume) == ("ray", "10.0.0.1:6379", "auto")


@needs_ray
def test_the_entrypoint_of_the_job_is_accepted(tmp_path: Path) -> None:
    recipe = save_recipe(tmp_path, tmp_path / "model")
    words = shlex.split(manifest()["spec"]["entrypoint"])
    assert words[0] == "turnwise"
    config: Any = checked([words[1], str(recipe), *words[3:]], recipe)
    assert (config.cluster.launcher, config.cluster.address, config.resume) == ("ray", "auto", "auto")


def manifest() -> Any:
    (document,) = yaml.safe_load_all((ROOT / "deploy" / "kuberay" / "rayjob.yaml").read_text())
    return document


def test_the_manifest_is_a_job_of_kuberay_whose_pods_share_a_volume() -> None:
    job = manifest()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert set(cluster) <= {"headGroupSpec", "workerGroupSpecs", "rayVersion"}
    pods = [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert "/shared" in {mount["mountPath"] for mount in container["volumeMounts"]}
        assert "nvidia.com/gpu" in container["resources"]["limits"]
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
