"""Training with `train.max_staleness`: real runs with the embedded engine."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from support.recipes import PLACES, save_recipe
from support.tiny import save_rows
from support.training import overlap_surely
from turnwise.config.recipe import load
from turnwise.errors import RolloutError
from turnwise.terminal.train_report import TrainReport
from turnwise.train import assemble, train


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    return save_recipe(
        tmp_path,
        model,
        data={"train": str(save_rows(tmp_path / "train.jsonl", count=12)), "shuffle": False},
        limits={"turns": 2, "tokens_per_turn": 6},
        train={"steps": 5, "batch_size": 2, "group_size": 3, "lr": 0.01, "max_staleness": 2},
    )


def run(recipe: Path, *overrides: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The metrics and the trajectories of a training run."""
    config, _ = load(recipe, overrides)
    with open(os.devnull, "w") as nowhere:
        made = assemble(config)
        overlap_surely(made)
        asyncio.run(train(made, TrainReport(Console(file=nowhere))))
    return lines(Path(config.output) / "metrics.jsonl"), lines(Path(config.output) / "trajectories.jsonl")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def versions(trajectory: dict[str, Any]) -> set[int]:
    return {version for segment in trajectory["segments"] for version in segment["version"]} - {-1}


@pytest.mark.parametrize(
    "options",
    [
        [f"environment={PLACES}:slow_tail", "max_concurrent=4"],
        ["train.dynamic_sampling=2", "train.overlong_filter=true", "data.curriculum.low=0.001"],
        ["credit.name=remax", f"reward.batch=['{PLACES}:ranked']"],
        ["credit.name=turn_gae", "train.ppo_epochs=2", "train.minibatches=2"],
        ["model.lora.rank=4", "correction.action=truncate", "loss.kl_coef=0.01"],
        ["train.max_staleness=1", "credit.name=gigpo", f"reward.group=['{PLACES}:ranked']"],
    ],
)
def test_all_parts_work_while_conversations_run_ahead(recipe: Path, options: list[str]) -> None:
    metrics, trajectories = run(recipe, *options)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5]
    assert all(line["failed"] == 0 and line["tokens/trained"] > 0 for line in metrics)
    bound = 1 if "train.max_staleness=1" in options else 2
    ages = [one["step"] - 1 - version for one in trajectories for version in versions(one)]
    assert 0 <= min(ages) <= max(ages) <= bound
    assert max(line["staleness/max"] for line in metrics) == bound
    assert all(line["staleness/mean"] <= line["staleness/max"] for line in metrics)
    assert metrics[0]["staleness/max"] == 0
    ids = [one["id"] for one in trajectories]
    assert len(ids) == len(set(ids))
    timeline = lines(recipe.parent / "run" / "timeline.jsonl")
    assert [line["step"] for line in timeline] == [1, 2, 3, 4, 5]
    for line in timeline:
        groups = line["groups"]
        sampled = {one["group"].removesuffix(":greedy") for one in trajectories if one["step"] == line["step"]}
        assert {group["id"] for group in groups} == sampled
        assert all(group["started"] <= group["ended"] <= line["taken"] <= line["trained"] for group in groups)
        assert all(line["version"] - bound <= group["version"] <= group["newest"] for group in groups)
        last = groups[-1]
        if abs(last["ended"] - line["asked"]) > 0.002:  # the times are rounded
            assert line["waited_for"] == (last["id"] if last["ended"] > line["asked"] else None)


def test_several_data_sets_and_evaluations_run_beside_an_asynchronous_run(recipe: Path, tmp_path: Path) -> None:
    other = save_rows(tmp_path / "other.jsonl", count=3)
    sources = [f"data.train=[{tmp_path / 'train.jsonl'}, {other}]", f"data.eval={other}", "eval.every=2"]
    metrics, trajectories = run(recipe, *sources, "data.weights=[3, 1]", "train.steps=6")
    assert len({(one["id"]) for one in trajectories}) == 36
    assert sum(f"reward/source/{other}" in line for line in metrics) >= 2
    assert [line["step"] for line in lines(tmp_path / "run" / "evaluations.jsonl")] == [0, 2, 4, 6]


def test_a_hung_conversation_does_not_stop_its_group(recipe: Path) -> None:
    for staleness in (0, 2):
        metrics, trajectories = run(
            recipe,
            f"environment={PLACES}:hangs_in_odd_rows",
            "train.group_timeout=0.5",
            f"train.max_staleness={staleness}",
            "train.steps=3",
            "replace=true",
            "limits.turns=1",
        )
        hung = [one for one in trajectories if one["error"]]
        assert hung
        assert {one["stop"] for one in hung} == {"deadline"}
        assert all("train.group_timeout=0.5 seconds" in one["error"]["message"] for one in hung)
        assert sum(line["groups/timed_out"] for line in metrics) == len({one["group"] for one in hung})
        assert all(line["groups/too_small"] == 0 and line["tokens/trained"] > 0 for line in metrics)


def test_a_group_with_too_few_conversations_is_not_trained_on(recipe: Path) -> None:
    options = [f"environment={PLACES}:raises_now_and_then", "limits.turns=1", "limits.tokens_per_turn=64"]
    metrics, trajectories = run(recipe, *options, "train.min_group_size=2", "train.steps=2")
    assert [line["groups/too_small"] for line in metrics] == [1, 1]
    trained = {one["row"]["id"] for one in trajectories if any(turn["advantage"] is not None for turn in one["turns"])}
    assert trained
    assert all(int(row) % 2 == 0 for row in trained)
    with pytest.raises(
        RolloutError, match=r"no group of step 1 has train\.min_group_size=2 conversations that did not fail"
    ):
        run(recipe, f"environment={PLACES}:always_raises", "train.min_group_size=2", "replace=true")


def test_failed_groups_are_replaced(recipe: Path) -> None:
    options = [f"environment={PLACES}:raises_now_and_then", "limits.turns=1", "limits.tokens_per_turn=64"]
    for staleness in (0, 2):
        metrics, trajectories = run(
            recipe,
            *options,
            "train.replace_failed=3",
            "train.min_group_size=2",
            "train.steps=2",
            f"train.max_staleness={staleness}",
            "replace=true",
        )
        for line in metrics:
            rows = {int(one["row"]["id"]) for one in trajectories if one["step"] == line["step"]}
            assert line["groups/replaced"] == sum(row % 2 for row in rows) > 0
            assert sum(row % 2 == 0 for row in rows) == 2


class Started:
    """The command line in a process of its own."""

    def __init__(self, recipe: Path, *overrides: str) -> None:
        self.log = recipe.with_name(f"log-{time.monotonic_ns()}.txt")
        command = [sys.executable, "-m", "turnwise.cli", "train", str(recipe), *overrides]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def kill_after_steps(self, path: Path, count: int, delay: float) -> None:
        deadline = time.monotonic() + 180
        while not path.exists() or path.read_text().count("\n") < count:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(delay)
        self.process.kill()
        self.process.wait()


@pytest.mark.slow
def test_kill_minus_nine_loses_no_row_and_counts_none_twice(recipe: Path, tmp_path: Path) -> None:
    options = [
        f"environment={PLACES}:slow_tail", "train.steps=12", "train.max_staleness=3", "resume=auto", "checkpoint.every=1",
    ]  # fmt: skip
    metrics = tmp_path / "run" / "metrics.jsonl"
    for count, delay in ((1, 0.0), (4, 0.05), (6, 0.11), (9, 0.02)):
        Started(recipe, *options).kill_after_steps(metrics, count, delay)
    last = Started(recipe, *options)
    assert last.process.wait(timeout=300) == 0, last.log.read_text()
    assert [line["step"] for line in lines(metrics)] == list(range(1, 13))
    assert all(line["staleness/max"] <= 3 for line in lines(metrics))
    trajectories = lines(tmp_path / "run" / "trajectories.jsonl")
    ids = [one["id"] for one in trajectories]
    assert len(ids) == len(set(ids)) == 12 * 2 * 3
    # two epochs of the twelve rows: each row was trained on twice, in groups of three
    assert sorted(int(one["row"]["id"]) for one in trajectories) == sorted([*range(1, 13)] * 6)
    place = json.loads(next((tmp_path / "run" / "checkpoints").glob("*12/checkpoint.json")).read_text())["place"]
    assert (place["position"], place.get("unfinished", [])) == (24, [])
