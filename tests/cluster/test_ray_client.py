"""A training from outside of the Ray cluster, by its client server (`ray://`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.ray_clusters import ENVIRONMENT, cluster
from cluster.test_ray_training import tokens, trained
from support.training import save_short_recipe
from turnwise.engines.remote.server_process import free_port

_FIRST_CLIENT_SERVER_DIES = """
import os, pathlib, sys

started = pathlib.Path({path!r})
if "ray.util.client.server" in sys.orig_argv and "--mode=specific-server" in sys.orig_argv and not started.exists():
    started.touch()
    os._exit(1)
"""
"""A `sitecustomize.py` of the cluster's processes: the first process that serves a client dies when it starts. Ray's proxy
forks beside threads of gRPC, and the new process can die of it."""

pytestmark = [pytest.mark.cluster, pytest.mark.ray]


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
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert died.exists()  # and the command has connected again
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    trajectories, metrics = (
        [json.loads(line) for line in (tmp_path / "outside" / name).read_text(encoding="utf-8").splitlines()]
        for name in ("trajectories.jsonl", "metrics.jsonl")
    )
    assert tokens(trajectories) == tokens(alone)
    assert sum(line["workers/lost"] for line in metrics) == 0
