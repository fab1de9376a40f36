"""The GPUs of servers that turnwise starts: seen in the environment of their processes."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from turnwise import assembly
from turnwise.config.recipe import checked
from turnwise.engines.remote.engine import RemoteEngine
from turnwise.engines.remote.server_process import devices_of_servers
from turnwise.errors import ConfigError

MODEL = Path(__file__).resolve().parents[3] / "demo" / "model"
# in the place of an engine's interpreter: writes what the server was started with
PROGRAM = """#!{python}
import json, os, sys, time
file = {folder!r} + "/" + str(os.getpid()) + ".json"
shown = {{"arguments": sys.argv[1:], "devices": os.environ.get("CUDA_VISIBLE_DEVICES")}}
open(file + ".part", "w").write(json.dumps(shown))
os.rename(file + ".part", file)
time.sleep(60)
"""


def started(tmp_path: Path, engine: dict[str, Any], **sections: Any) -> list[dict[str, Any]]:
    """What the processes of the recipe's servers see, in the order of the servers."""
    program, folder = tmp_path / "python", tmp_path / "seen"
    folder.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable, folder=str(folder)))
    program.chmod(0o755)
    tree = {
        "model": {"path": str(MODEL), "device": "cuda"},
        "data": {"train": "rows.jsonl"},
        "engine": {"python": str(program), **engine},
        "output": str(tmp_path / "run"),
        **sections,
    }
    config = checked(tree, source="test")
    made = assembly.engine(config, assembly.renderer(config), object())
    assert isinstance(made, RemoteEngine)
    processes = [replica.process for replica in made._replicas.all if replica.process is not None]
    shown: list[dict[str, Any]] = []
    try:
        for process in processes:
            process.start()
            deadline = time.monotonic() + 20
            while len(files := sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)) <= len(shown):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            shown.append(json.loads(files[-1].read_text()))
    finally:
        for process in processes:
            process.kill()
        asyncio.run(made.close())
    return shown


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_each_server_sees_its_own_devices(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7,8")
    servers = started(tmp_path, {"name": name, "replicas": 2, "tensor_parallel": 2, "data_parallel": 2})
    # the first GPU is the trainer's
    assert [server["devices"] for server in servers] == ["1,2,3,4", "5,6,7,8"]
    sizes = {
        "vllm": ("--tensor-parallel-size 2", "--data-parallel-size 2"),
        "sglang": ("--tp-size=2", "--dp-size=2"),
    }[name]
    for server in servers:
        arguments = " ".join(server["arguments"])
        assert all(size in arguments for size in sizes)
        assert "--base-gpu-id" not in arguments  # the server's devices have the numbers from 0 on


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_named_devices_are_numbers_of_visible_devices(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    servers = started(tmp_path, {"name": name, "replicas": 3, "devices": [2, 0, 2]})
    assert [server["devices"] for server in servers] == ["GPU-c", "GPU-a", "GPU-c"]


def test_the_devices_of_all_ranks_of_the_trainer_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    cluster = {"launcher": "local", "trainers": 2}
    (tmp_path / "ranks").mkdir()
    (server,) = started(tmp_path / "ranks", {"name": "vllm", "tensor_parallel": 2}, cluster=cluster)
    assert server["devices"] == "2,3"
    # a sleeping engine shares the trainer's GPU
    (tmp_path / "sleep").mkdir()
    (server,) = started(tmp_path / "sleep", {"name": "vllm", "sleep": True})
    assert server["devices"] == "0"


def test_a_machine_without_a_spare_device_shares_the_trainers() -> None:
    assert devices_of_servers(None, servers=2, per_server=1, trainer=1, visible=["0", "1"]) == ["0", "1"]
    assert devices_of_servers(None, servers=1, per_server=1, trainer=1, visible=["3"]) == ["3"]
    assert devices_of_servers(None, servers=2, per_server=1, trainer=1, visible=[]) == []


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"replicas": 3}, r"3 servers with 1 GPUs each need 3 GPUs, and 2 are visible"),
        ({"devices": [0, 1]}, r"engine\.devices=\[0, 1\] names 2 GPUs, and .* need 1"),
        ({"devices": [2]}, r"engine\.devices=\[2\]: this machine has 2 visible GPUs"),
        ({"url": "http://a:1", "tensor_parallel": 2}, r"engine\.tensor_parallel has no effect with engine\.url"),
        ({"url": "http://a:1", "devices": [0]}, r"engine\.devices has no effect with engine\.url"),
        ({"data_parallel": 2, "weight_transfer": "collective"}, r"cannot be combined with engine\.data_parallel=2"),
        ({"mode": "in_process", "devices": [0]}, r"engine\.devices has no effect with engine\.mode=in_process"),
    ],
)
def test_devices_that_do_not_fit_are_refused(
    engine: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    tree = {
        "model": {"path": str(MODEL), "device": "cuda"},
        "data": {"train": "rows.jsonl"},
        "engine": {"name": "vllm", "python": "/env/bin/python", **engine}
        if "url" not in engine
        else {"name": "vllm", **engine},
    }
    if engine.get("mode") == "in_process":
        tree["engine"].pop("python")
    config = checked(tree, source="test")
    with pytest.raises(ConfigError, match=message):
        assembly.engine(config, assembly.renderer(config), object())


@pytest.mark.parametrize("option", [{"devices": [0]}, {"data_parallel": 2}])
def test_devices_are_refused_on_the_cpu(option: dict[str, Any]) -> None:
    tree = {
        "model": {"path": str(MODEL), "device": "cpu"},
        "data": {"train": "r.jsonl"},
        "engine": {"name": "vllm", **option},
    }
    config = checked(tree, source="test")
    with pytest.raises(ConfigError, match=r"engine\.devices and engine\.data_parallel need GPUs"):
        assembly.engine(config, assembly.renderer(config), object())
