"""Options of ranks and of rollout workers, and the files of deploy/: what they reach, and what is refused. No Ray is needed."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from rich.console import Console

from support.recipes import PLACES, save_recipe
from turnwise import assembly
from turnwise.assembly.learners import rank_device
from turnwise.assembly.runners import ray_options, ray_rollouts, worker_recipe
from turnwise.cli import main
from turnwise.commands import ranks as rank_processes
from turnwise.commands.ranks import _Launcher
from turnwise.config.recipe import load
from turnwise.config.sft_checks import refuse_sft_without_effect
from turnwise.config.train_checks import refuse_without_effect
from turnwise.errors import NOT_AGAIN, ConfigError
from turnwise.options.engines import ClusterSection, FsdpSection, RanksSection, WorkersSection
from turnwise.options.schema import Config
from turnwise.ray_workers import ray_api
from turnwise.ray_workers.ray_api import connect, needs_text, resources_text
from turnwise.ray_workers.rollouts import RayRollouts, choose_worker
from turnwise.rollout_server.client import trainer_name
from turnwise.train import assemble
from turnwise.training.sharded import ranks

AGENT = "environment={{use: turnwise.environments.agents:Program, arguments: {{command: ls, {}}}}}"  # the arguments of its server

# Options of ranks and of rollout workers: how they are written, what they reach, and what is refused. No Ray is
# needed.


# Options of the section cluster: how they are written, what they reach, and what is refused.


@pytest.fixture(autouse=True)
def no_cluster_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster of this machine, or the file that one has left, is nothing to these tests."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "no_ray"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return save_recipe(tmp_path, tmp_path / "model", cluster="torchrun")


def test_a_text_is_the_launcher(recipe: Path) -> None:
    assert load(recipe)[0].cluster.launcher == "torchrun"
    local = load(recipe, ["cluster=local", "cluster.trainers=3"])[0].cluster
    assert (local.launcher, local.trainers) == ("local", 3)
    assert load(recipe, ["cluster.heartbeat=5"])[0].cluster.launcher == "torchrun"
    with pytest.raises(ConfigError, match=r"cluster\.launcher"):
        load(recipe, ["cluster=slurm"])


def test_options_of_the_recipe_reach_the_ranks(recipe: Path) -> None:
    changed = ["cluster.backend=gloo", "cluster.timeout=7", "cluster.heartbeat=3", "model.device=cpu"]
    fsdp = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16", "reshard_after_forward": "false"}
    fsdp |= {"gradient_sync": "batch", "offload": "cpu"}
    config, _ = load(recipe, [*changed, *(f"cluster.fsdp.{name}={value}" for name, value in fsdp.items())])
    cluster = config.cluster
    assert (rank_device(config), cluster.backend, cluster.timeout, cluster.heartbeat) == ("cpu", "gloo", 7, 3)
    expected = FsdpSection(
        param_dtype="bfloat16",
        reduce_dtype="bfloat16",
        reshard_after_forward=False,
        gradient_sync="batch",
        offload="cpu",
    )
    assert cluster.fsdp == expected
    gradients = (2**30, 2**30 + 1)
    assert [FsdpSection().adds_up_each(size) for size in gradients] == [False, True]
    assert [expected.adds_up_each(size) for size in gradients] == [False, False]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.launcher=none", "cluster.timeout=5"], "cluster.timeout has no effect in one process"),
        (["cluster.launcher=none", "cluster.fsdp.offload=cpu"], "cluster.fsdp.offload has no effect in one process"),
        (["cluster.launcher=none", "cluster.mesh.shard=2"], "cluster.mesh.shard has no effect in one process"),
        (
            ["cluster.launcher=local", "cluster.trainers=4", "cluster.mesh.replicate=3"],
            "cluster.mesh.replicate=3, and there are 4 ranks: use a multiple of 3",
        ),
        (
            ["cluster.launcher=local", "cluster.trainers=4", "cluster.mesh={replicate: 2, shard: 4}"],
            "cluster.mesh.replicate=2 and cluster.mesh.shard=4, and there are 4 ranks: use 8 ranks",
        ),
        (
            ["cluster.launcher=local", "cluster.trainers=4", "cluster.mesh={shard: 2, tensor: 4}"],
            "cluster.mesh.shard=2 and cluster.mesh.tensor=4, and there are 4 ranks: use a multiple of 8",
        ),
        (
            ["cluster.launcher=local", "cluster.trainers=4", "cluster.mesh={expert: 2, tensor: 2}"],
            "cluster.mesh.expert=2 and cluster.mesh.tensor=2: each rank of `tensor` has some of the experts already",
        ),
        (
            ["cluster.launcher=local", "cluster.trainers=4", "cluster.mesh.expert=3"],
            "a group has 4 ranks (`shard` x `context`), which must be a multiple of it",
        ),
        (["cluster.mesh.tensor=2", "model.lora={rank: 4, dora: true}"], "needs complete weight vectors"),
        (["cluster.mesh.tensor=2", "model.kernels=liger"], "model.kernels=liger needs complete layers"),
        (["cluster.trainers=2"], "cluster.trainers has no effect with cluster.launcher=torchrun"),
        (["cluster.restarts=2"], "cluster.restarts has no effect with cluster.launcher=torchrun"),
        (["cluster.fsdp.param_dtype=bfloat16", "model.dtype=bfloat16"], "has no effect with model.dtype=bfloat16"),
        (["cluster.fsdp.param_dtype=bfloat16", "model.autocast=true"], "both compute passes in bfloat16"),
        (["cluster.fsdp.offload=cpu", "model.device=cpu"], "cluster.fsdp.offload=cpu has no effect"),
        (["train.optimizer.name=adafactor"], "cannot be used with several ranks"),
        (["train.optimizer.offload=cpu", "cluster.fsdp.offload=cpu"], "has no effect with cluster.fsdp.offload=cpu"),
        (["model.device=cuda:1"], "each rank has a device of its own"),
    ],
)
def test_what_has_no_effect_or_cannot_be_trained_is_refused(recipe: Path, overrides: list[str], message: str) -> None:
    config, _ = load(recipe, overrides)
    with pytest.raises(ConfigError) as caught:
        refuse_without_effect(config)
    assert message in str(caught.value)


@pytest.mark.parametrize("command", ["train", "sft"])
def test_what_is_wrong_with_a_recipe_is_told_once_on_each_machine(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    waited: list[tuple[float, Any]] = []
    plain, own = time.sleep, threading.get_ident()

    def sleep(seconds: float) -> None:
        if threading.get_ident() != own:  # a thread of an earlier test
            return plain(seconds)
        waited.append((seconds, signal.getsignal(signal.SIGTERM)))

    monkeypatch.setattr(time, "sleep", sleep)
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert main([command, str(recipe), "train.lrr=1"]) == 1
        assert "there is no option train.lrr" in capsys.readouterr().err
    # the second waits to be ended by torchrun without a word, before it tells what then is a problem of its own
    assert waited == [(10.0, signal.SIG_DFL)]


def test_fine_tuning_refuses_the_same(tmp_path: Path) -> None:
    recipe = save_recipe(tmp_path, tmp_path / "model", sft={"optimizer": {"name": "adafactor"}}, cluster="torchrun")
    tree = ["environment=turnwise.environments.environment:SingleTurn"]
    with pytest.raises(ConfigError, match="cannot be used with several ranks"):
        refuse_sft_without_effect(load(recipe, tree)[0])


# Options of rollout workers on Ray: how they are written, what they reach, and what is refused. No Ray is needed.


SINGLE_TURN = "turnwise.environments.environment:SingleTurn"


@pytest.fixture
def ray_recipe(tmp_path: Path, model: Path) -> Path:
    return save_recipe(tmp_path, model, cluster="ray")


def test_an_address_is_the_launcher_ray_with_this_address(ray_recipe: Path) -> None:
    cluster = load(ray_recipe)[0].cluster
    assert (cluster.launcher, cluster.address, cluster.distributed) == ("ray", None, False)
    cluster = load(ray_recipe, ["cluster=ray://head:10001", "cluster.workers.count=3"])[0].cluster
    assert (cluster.launcher, cluster.address, cluster.workers.count) == ("ray", "ray://head:10001", 3)
    again = load(ray_recipe, ["cluster=ray://head:10001", "cluster.address=ray://head:10001"])[0].cluster
    assert again.address == "ray://head:10001"
    with pytest.raises(ConfigError, match=r"cluster\.address=ray://other:10001 is another: remove one of them"):
        load(ray_recipe, ["cluster=ray://head:10001", "cluster.address=ray://other:10001"])


def test_options_of_the_recipe_reach_the_workers(ray_recipe: Path) -> None:
    workers = {"count": 4, "num_cpus": 0.5, "num_gpus": 2, "resources": "{tools: 1.5}", "max_concurrent": 7}
    workers |= {"runtime_env": "{env_vars: {A: b}}", "start_timeout": 9}
    overrides = ["cluster.address=auto", "cluster.heartbeat=3"]
    config, _ = load(ray_recipe, [*overrides, *(f"cluster.workers.{name}={value}" for name, value in workers.items())])
    options = ray_options(config, assembly.renderer(config))
    assert options.address == "auto"
    needs = options.cluster.workers
    assert (needs.count, needs.num_cpus, needs.num_gpus, needs.resources) == (4, 0.5, 2, {"tools": 1.5})
    assert (needs.runtime_env, needs.max_concurrent, needs.start_timeout) == ({"env_vars": {"A": "b"}}, 7, 9)
    assert options.cluster.heartbeat == 3
    assert needs_text(needs) == "num_cpus=0.5, num_gpus=2, tools=1.5"
    free = {"memory": 9.6e9, "CPU": 1.5, "object_store_memory": 2.0**30, "node:10.0.0.1": 1.0, "tools": 0.5}
    assert resources_text(free) == "CPU=1.5, memory=8.9 GiB, object_store_memory=1.0 GiB, tools=0.5"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], True),
        (["cluster.workers.num_gpus=0.5"], False),
        (["model.device=cpu"], False),
        (["engine={name: vllm, url: 'http://a:1'}"], False),
        (["engine=vllm"], True),
    ],
)
def test_workers_that_sample_on_cpus_beside_free_gpus_are_told(
    ray_recipe: Path,
    options: list[str],
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config, _ = load(ray_recipe, ["model.device=auto", *options])
    rollouts = RayRollouts(ray_options(config, assembly.renderer(config)), lambda number: lambda: None)
    for free in (2, 0):
        monkeypatch.setattr(ray_api, "free_gpus", lambda free=free: free)
        rollouts._tell_unused_gpus()
    text = "rollout workers sample on CPUs, and the cluster has 2 free GPUs. Set cluster.workers.num_gpus=1"
    assert [text in record.message for record in caplog.records] == [True] * told


def test_options_of_the_recipe_reach_the_ranks_on_ray(ray_recipe: Path) -> None:
    words = [
        "cluster.trainers=3",
        "cluster.ranks={num_cpus: 4, resources: {trainer: 1}, runtime_env: {env_vars: {A: b}}, start_timeout: 9}",
    ]
    config, _ = load(ray_recipe, [*words, "cluster.address=auto", "cluster.workers={count: 2, num_cpus: 0.5}"])
    assert config.cluster.distributed
    needs = config.cluster.ranks
    assert (needs.num_cpus, needs.resources, needs.start_timeout) == (4, {"trainer": 1}, 9)
    assert needs.runtime_env == {"env_vars": {"A": "b"}}
    assert needs_text(needs) == "num_cpus=4, num_gpus=0, trainer=1"
    assert needs_text(config.cluster.workers) == "num_cpus=0.5, num_gpus=0"
    chosen, _ = load(ray_recipe, ["cluster.trainers=3", "cluster.ranks.num_gpus=1"])
    assert needs_text(chosen.cluster.ranks) == "num_cpus=1, num_gpus=1"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster=none", "cluster.workers.count=2"], "cluster.workers.count has no effect with cluster.launcher=none"),
        (["cluster=local", "cluster.address=auto"], "cluster.address has no effect with cluster.launcher=local"),
        (["cluster.restarts=2"], "cluster.restarts has no effect with cluster.launcher=ray, where the process of the"),
        (
            ["cluster.ranks.num_gpus=1"],
            "cluster.ranks.num_gpus has no effect with cluster.launcher=ray, where the process",
        ),
        (
            ["cluster=local", "cluster.ranks.num_gpus=1"],
            "cluster.ranks.num_gpus has no effect with cluster.launcher=local",
        ),
        (["cluster.trainers=2", "model.device=cpu", "cluster.ranks.num_gpus=1"], "has no effect with model.device=cpu"),
        (["cluster.trainers=2", "model.device=cuda", "cluster.ranks.num_gpus=0"], "reserves no GPU"),
        (
            ["cluster.trainers=2", "cluster.ranks.runtime_env={working_dir: .}", "output=runs/a"],
            "output=runs/a is relative to the working directory of the ranks, which is a copy",
        ),
        (["cluster.trainers=2", "train.optimizer.name=adafactor"], "cannot be used with several ranks"),
        (["cluster.fsdp.offload=cpu"], "cluster.fsdp.offload has no effect with cluster.launcher=ray"),
        (["rollout_server.url=http://x"], "rollout_server.url=http://x on a server: remove one of them"),
        (
            ["engine={name: vllm, url: [http://a, http://b]}", "cluster.workers.count=3"],
            "cluster.workers.count=3 needs at least 3 servers in engine.url",
        ),
        (
            ["engine={name: vllm, tensor_parallel: 2, replicas: 2}", "cluster.workers.num_gpus=2"],
            "cluster.workers.num_gpus=2: the servers of each rollout worker need 4 GPUs",
        ),
        (["engine={name: vllm, sleep: true}"], "engine.sleep=true has no effect with cluster.launcher=ray"),
        (["deterministic=true"], "deterministic=true cannot be combined with cluster.launcher=ray"),
        (
            [AGENT.format("server: {listen: 127.0.0.1:8443}"), "cluster.workers.count=2"],
            "arguments.server.listen=127.0.0.1:8443 cannot be used with cluster.workers.count=2: each rollout worker has",
        ),
        (
            [AGENT.format("server: {listen: 127.0.0.1:0, public_url: https://a.b}"), "cluster.workers.count=2"],
            "arguments.server.public_url=https://a.b cannot be used with cluster.workers.count=2",
        ),
    ],
)
def test_what_has_no_effect_is_refused(ray_recipe: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_without_effect(load(ray_recipe, overrides)[0])
    assert message in str(refused.value)


def test_agents_of_several_workers_use_free_ports(ray_recipe: Path) -> None:
    for listen, count in (("127.0.0.1:0", 2), ("127.0.0.1:8443", 1)):
        agent = AGENT.format(f"listen: {listen}")
        refuse_without_effect(load(ray_recipe, [agent, f"cluster.workers.count={count}"])[0])


def test_the_servers_of_the_recipe_are_divided_among_the_workers(ray_recipe: Path) -> None:
    servers = "engine={name: vllm, url: [http://a, http://b, http://c]}"
    config, _ = load(ray_recipe, [servers, "cluster.workers.count=2"])
    recipes = [worker_recipe(config, number) for number in range(2)]
    assert [of_worker.engine.url for of_worker in recipes] == [["http://a", "http://c"], ["http://b"]]
    assert all(of_worker.runs_conversations_elsewhere is None for of_worker in recipes)
    assert [of_worker.output for of_worker in recipes] == [f"{config.output}/worker-{number}" for number in range(2)]
    single, _ = load(ray_recipe, ["engine={name: sglang, url: http://a}"])
    assert worker_recipe(single, 0).engine.url == ["http://a"]


def test_servers_know_a_worker_by_its_run_and_its_number(ray_recipe: Path) -> None:
    """The worker that replaces a killed one has the same name, so a server takes it at once."""
    servers = "engine={name: vllm, url: [http://a, http://b]}"
    config, _ = load(ray_recipe, [servers, "cluster.workers.count=2"])
    names: list[list[str]] = []
    for output in ("runs/a", "runs/a", "runs/b"):
        rollouts = ray_rollouts(config.model_copy(update={"output": output}), assembly.renderer(config))
        makes = [rollouts.pool._make(number) for number in range(2)]
        names.append([make.args[1] for make in makes if isinstance(make, functools.partial)])
    assert names[0] == names[1]
    assert len({*names[0], *names[2]}) == 4
    for engine in ("vllm", "sglang"):
        alone, _ = load(ray_recipe, ["cluster=none", f"engine={{name: {engine}, url: http://a}}", "limits.context=64"])
        made = assembly.engine(alone, assembly.renderer(alone), updated=True)
        assert made._api._owner.name == trainer_name(alone.output)  # a resumed run has the same name


def test_fine_tuning_has_no_conversations_to_run_on_ray(tmp_path: Path, model: Path) -> None:
    recipe = save_recipe(tmp_path, model, sft={"steps": 1}, environment={"use": SINGLE_TURN}, cluster="ray")
    with pytest.raises(ConfigError, match=r"cluster\.launcher=ray has no effect in fine-tuning"):
        refuse_sft_without_effect(load(recipe)[0])
    with pytest.raises(ConfigError, match=r"cluster\.workers\.count has no effect in fine-tuning"):
        refuse_sft_without_effect(load(recipe, ["cluster.trainers=2", "cluster.workers.count=2"])[0])
    refuse_sft_without_effect(load(recipe, ["cluster.trainers=2"])[0])  # ranks on the Ray cluster


def test_reward_functions_that_read_the_environment_are_refused(ray_recipe: Path) -> None:
    config, _ = load(ray_recipe, [f"reward.trajectory=['{PLACES}:reads_environment']"])
    with pytest.raises(ConfigError, match=r"which is in a rollout worker: .* or remove cluster\.launcher=ray"):
        assemble(config)


@pytest.mark.parametrize(
    ("running", "most", "own", "chosen"),
    [
        ([0, 0], 10, None, 0),
        ([1, 0], 10, None, 1),
        ([4, 0], 10, 0, 0),  # the group's prefix is there
        ([5, 0], 10, 0, 1),  # overloaded
        ([20, 10], 30, 0, 1),
        ([19, 10], 30, 0, 0),
        ([None, 9], 10, 0, 1),  # lost
        ([3, 2], 3, 0, 1),  # full
        ([3, None], 3, None, None),
        ([None, None], 3, None, None),
    ],
)
def test_a_group_stays_on_its_worker_unless_it_is_overloaded_full_or_lost(
    running: list[int | None], most: int, own: int | None, chosen: int | None
) -> None:
    assert choose_worker(running, most=most, own=own) == chosen


def test_a_client_server_that_cannot_start_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's error is a heading and a traceback; the reason is the last line."""
    ray = pytest.importorskip("ray")

    def fails(**_: object) -> None:
        raise ConnectionAbortedError(
            "Initialization failure from server:\nTraceback (most recent call last):\n  File 'proxier.py', line 1\n"
            "RuntimeError: Starting Ray client server failed. See ray_client_server_23000.err for detailed logs.\n"
        )

    monkeypatch.setattr(ray, "init", fails)
    with pytest.raises(
        ConfigError, match=r"from server: RuntimeError: Starting Ray client server failed\. See ray_client"
    ):
        connect("ray://head:10001", WorkersSection())


def test_directories_that_ray_cannot_copy_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ray copies directories when it connects: an actor may name addresses only."""
    ray = pytest.importorskip("ray")
    given: list[Any] = []

    def fails(*, runtime_env: Any, **_: object) -> None:
        given.append(runtime_env)
        raise ray.exceptions.RuntimeEnvSetupError("Package size (600MiB) exceeds the limit (512MiB)")

    monkeypatch.setattr(ray, "init", fails)
    monkeypatch.chdir(tmp_path)
    copied = {"working_dir": ".", "excludes": ["*.pt"], "py_modules": ["s3://bucket/a.zip"], "env_vars": {"A": "b"}}
    with pytest.raises(ConfigError, match=r"cluster\.workers\.runtime_env: .*exceeds.*runtime_env\.excludes="):
        connect(None, WorkersSection(runtime_env=copied))
    assert given == [{"working_dir": str(tmp_path), "excludes": ["*.pt"]}]
    with pytest.raises(
        ConfigError, match=r"cluster\.ranks\.runtime_env\.working_dir: there is no directory or file nowhere"
    ):
        connect(None, RanksSection(runtime_env={"working_dir": "nowhere"}))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="this process is connected already"):
        connect(None, WorkersSection(runtime_env=copied))
    assert connect(None, WorkersSection(runtime_env={"working_dir": "s3://bucket/a.zip"})) is False


# The files in deploy/: scripts that bash accepts, manifests with the keys of KubeRay, and commands that turnwise
# accepts.


ROOT = Path(__file__).parent.parent.parent

SLURM = ROOT / "deploy" / "slurm"

RAY = "ray" in typing.get_args(ClusterSection.model_fields["launcher"].annotation)

needs_ray = pytest.mark.skipif(not RAY, reason="cluster.launcher=ray is not part of this version")

_STEP = """trap 'touch "$CALLS.saved"; exit 143' TERM; touch "$CALLS.started"; while true; do /bin/sleep 0.05; done"""
COMMANDS = {
    "scontrol": "printf 'node1\\nnode2\\n'",
    "srun": """
case "$*" in
*hostname*) echo '10.0.0.1 172.17.0.1' ;;
*) echo "$SRUN_CPUS_PER_TASK $@" >> "$CALLS" ;;
esac
case "$*" in
*SECONDS_OF_A_STEP*) while [[ $1 != bash ]]; do shift; done; SLURM_NODEID=0 "$@" ;;
esac
""",
    "ray": "true",
    "sleep": "true",
    "torchrun": f"""
case "$*" in
*SECONDS_OF_A_STEP*) {_STEP} ;;
*) echo '[--shutdown-timeout SHUTDOWN_TIMEOUT]' ;;
esac
""",
    "turnwise": _STEP,
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


def job(tmp_path: Path) -> dict[str, str]:
    """The environment of a job of two nodes, with the stand-ins."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    of_job = {
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "7",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_CPUS_PER_TASK": "12",
    }
    return {**os.environ, **of_job, "PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls")}


def calls(script: str, tmp_path: Path, *words: str) -> list[list[str]]:
    """The words of each call of `srun` by a script."""
    # reads to the end of the output, which the commands in the background share
    command = ["bash", str(SLURM / script), *words]
    subprocess.run(command, env=job(tmp_path), check=True, capture_output=True, timeout=60)
    made = [shlex.split(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert {words[0] for words in made} == {"12"}  # CPUs of each step
    return [words[1:] for words in made]


@pytest.mark.parametrize("script", ["train.sbatch", "ray.sbatch"])
def test_before_the_time_limit_the_training_is_asked_to_end_and_the_script_waits_for_it(
    script: str, tmp_path: Path
) -> None:
    assert "#SBATCH --signal=B:USR1@900" in (SLURM / script).read_text().splitlines()
    command = ["bash", str(SLURM / script), "recipe.yaml", "note=SECONDS_OF_A_STEP"]
    with subprocess.Popen(command, env=job(tmp_path), stdout=subprocess.DEVNULL) as started:
        while not (tmp_path / "calls.started").exists():
            assert started.poll() is None
            time.sleep(0.01)
        started.send_signal(signal.SIGUSR1)
        assert started.wait(timeout=60) == 143
    assert (tmp_path / "calls.saved").exists()


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
    assert options.shutdown_timeout == 600
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
def test_the_script_ends_with_a_message_if_the_head_of_ray_does_not_start(tmp_path: Path) -> None:
    environment = job(tmp_path)
    (tmp_path / "bin" / "ray").write_text("#!/bin/bash\nexit 1\n")
    done = subprocess.run(
        ["bash", str(SLURM / "ray.sbatch"), "recipe.yaml"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.startswith("ray.sbatch: the head of Ray on node1 does not answer at 10.0.0.1:6379")
    assert "turnwise" not in (tmp_path / "calls").read_text()


def test_a_cluster_that_may_ask_for_a_token_is_told_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster at head:6379")

    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"or, if the cluster asks for a token .*, set RAY_AUTH_MODE=token$"):
            connect(address, WorkersSection())
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        with pytest.raises(
            ConfigError, match=r"correct the address or the token \(RAY_AUTH_TOKEN, or ~/\.ray/auth_token\)$"
        ):
            connect(address, WorkersSection())


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
    schema = Draft202012Validator(json.loads((Path(__file__).parent / "rayjob_schema.json").read_text()))
    assert [f"{list(error.path)}: {error.message}" for error in schema.iter_errors(job)] == []
    wrong = {**job, "spec": {**job["spec"], "backofLimit": 3, "ttlSecondsAfterFinished": "600"}}
    assert len(list(schema.iter_errors(wrong))) == 2
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


# The exit status of the command that starts ranks.


def test_a_machine_that_stood_still_takes_no_other_rank_for_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store(dict[str, str]):
        def set(self, key: str, value: str) -> None:
            self[key] = value

        def check(self, keys: list[str]) -> bool:
            return keys[0] in self

    monkeypatch.setattr(ranks, "_SIGN_PAUSE", 0.01)
    stood = [0.0]
    monkeypatch.setattr(ranks.time, "monotonic", lambda: stood[0] + len(store) + int(store["alive/0"]))
    store, lost, told = Store({"alive/0": "0"}), [], threading.Event()
    liveness = ranks.Liveness(store, rank=0, size=2, limit=20.0)  # type: ignore[arg-type]
    liveness.on_lost = lambda rank: (lost.append((int(store["alive/0"]), rank.rank)), told.set())  # type: ignore[assignment]
    while int(store["alive/0"]) < 3:  # a look is a second here
        time.sleep(0.01)
    stood[0] = 1000.0
    assert told.wait(60)
    liveness.close()
    ((looks, rank),) = lost
    assert rank == 1
    assert 18 <= looks <= 22  # the 1,000 seconds count for at most two


class EndedRanks:
    """Ranks that have ended with these statuses."""

    def __init__(self, *statuses: int | None) -> None:
        self.statuses = statuses
        self.starts = 0

    def start(self, words: object) -> None:
        self.starts += 1

    def poll(self, seconds: float) -> tuple[int | None, ...]:
        return self.statuses

    def place(self, rank: int) -> str:
        return "here"

    def reason(self, rank: int) -> None: ...

    def send_signal(self, number: int) -> None: ...

    def end(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("statuses", "expected"), [((0, 0), 0), ((1, 1), 1), ((-9, 0), 1), ((1, -9), 1), ((143, 0), 143), ((75, 1), 1)]
)
def test_the_status_of_a_lost_rank_does_not_depend_on_its_number(statuses: tuple[int, ...], expected: int) -> None:
    launcher = _Launcher(EndedRanks(*statuses), 0, Console(quiet=True), shares_terminal=True)
    assert launcher.run() == expected


@pytest.mark.parametrize(
    ("statuses", "starts"), [((75, 1), 4), ((75, 1, NOT_AGAIN), 1), ((-9, NOT_AGAIN), 1), ((None, NOT_AGAIN), 1)]
)
def test_ranks_are_not_started_again_for_an_error_that_they_would_have_again(
    statuses: tuple[int | None, ...], starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes, "_GRACE", 0.0)
    ended = EndedRanks(*statuses)
    launcher = _Launcher(ended, 3, Console(quiet=True), shares_terminal=True)
    assert launcher.run() == 1
    assert ended.starts == starts


@pytest.mark.parametrize("origin", ["option", "variable", "file"])
def test_a_cluster_that_does_not_listen_is_refused_at_once(
    origin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_api, "_HEAD_SECONDS", 0.0)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    given = None
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        if origin == "option":
            given, place, fix = address, "cluster.address=", "or correct the address"
        elif origin == "variable":
            monkeypatch.setenv("RAY_ADDRESS", address)
            place, fix = "RAY_ADDRESS=", "or correct or remove the variable"
        else:
            file = tmp_path / "ray" / "ray_current_cluster"
            file.parent.mkdir()
            file.write_text(f"{address}\n")
            place, fix = f"{file}: ", "set cluster.address=local for a cluster of this command"
        ray_api._await_head(given)
    with pytest.raises(ConfigError, match=f"{re.escape(place + address)}: nothing listens there: .*{re.escape(fix)}"):
        ray_api._await_head(given)
    for other in ("auto", "local", "ray://127.0.0.1:1"):
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "empty"))
        ray_api._await_head(other)  # Ray itself answers at once
