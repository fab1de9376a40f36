"""A training from outside of the Ray cluster, by its client server (`ray://`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.ray_clusters import cluster
from cluster.test_ray_training import tokens, trained
from support.training import save_short_recipe
from turnwise.engines.remote.server_process import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.ray]


def test_a_training_from_outside_of_the_cluster_is_that_of_one_process(model: Path, tmp_path: Path) -> None:
    recipe = save_short_recipe(tmp_path, model)
    alone, _ = trained(recipe, tmp_path / "alone")
    port = free_port()
    with cluster({"tools": 1}, {"tools": 1}, client_port=port):
        command = [sys.executable, "-m", "turnwise", "train", str(recipe), f"output={tmp_path / 'outside'}"]
        command += [
            f"cluster=ray://127.0.0.1:{port}",
            "cluster.workers.count=2",
            "cluster.workers.resources={tools: 1}",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    trajectories, metrics = (
        [json.loads(line) for line in (tmp_path / "outside" / name).read_text(encoding="utf-8").splitlines()]
        for name in ("trajectories.jsonl", "metrics.jsonl")
    )
    assert tokens(trajectories) == tokens(alone)
    assert sum(line["workers/lost"] for line in metrics) == 0
