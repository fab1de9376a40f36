"""Training with rollout workers on a Ray cluster of several nodes: the same conversations as in one process, and the pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import judging_rewards
from cluster.ray_clusters import cluster
from support.training import save_short_recipe, train_run

pytestmark = [pytest.mark.cluster, pytest.mark.ray]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with cluster({"tools": 1}, {"tools": 1}) as started:
        yield started.address


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


def test_two_workers_give_the_conversations_of_one_process(recipe: Path, tmp_path: Path, address: str) -> None:
    alone, of_alone = trained(recipe, tmp_path / "alone")
    together, of_together = trained(
        recipe, tmp_path / "together", *on_ray(address), "cluster.workers.resources={tools: 1}"
    )
    assert len(alone) == 3 * 8
    assert all(line.get("error") is None for line in together)
    assert tokens(together) == tokens(alone)
    for mine, other in zip(of_together, of_alone, strict=True):
        assert mine["reward/mean"] == other["reward/mean"]
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-4)
    assert of_together[-1]["ratio/max_deviation"] < 1e-3


def test_a_judge_asks_the_engines_of_the_workers(recipe: Path, tmp_path: Path, address: str) -> None:
    """It samples greedily, so its answers do not depend on the process in which the engine is."""
    judged = [f"reward.trajectory=['{judging_rewards.__file__}:LengthOfAnswer']", "reward.turns=[]"]
    alone, _ = trained(recipe, tmp_path / "alone", *judged)
    together, _ = trained(
        recipe, tmp_path / "together", *on_ray(address), "cluster.workers.resources={tools: 1}", *judged
    )
    rewards = {line["id"]: line["rewards"]["LengthOfAnswer"] for line in alone}
    assert any(rewards.values())
    assert {line["id"]: line["rewards"]["LengthOfAnswer"] for line in together} == rewards
