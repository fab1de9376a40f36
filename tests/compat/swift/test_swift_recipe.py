"""The recipe with a plugin of ms-swift runs as it is, and the commands make recipes that run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from turnwise.cli import main

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes name files relative to where one runs them."""
    monkeypatch.chdir(ROOT)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_recipe_takes_two_steps_with_the_plugin_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "run"
    small = ["train.steps=2", "train.rows=4", "train.group=4", "eval.rows=8"]
    assert main(["train", "recipes/swift_scheduler.yaml", *small, f"output={out}"]) == 0
    metrics, conversations = lines(out / "metrics.jsonl"), lines(out / "trajectories.jsonl")
    assert [one["step"] for one in metrics] == [1, 2]
    assert all(one["failed"] == 0 and one["drift"] == 0 for one in metrics)
    assert all(0 < one["ratio/max_deviation"] < 1e-3 for one in metrics)
    assert not [name for name in metrics[0] if "ess" in name.split("/")]  # nothing is corrected, so nothing is claimed
    assert len(conversations) == 32
    assert {one["stop"] for one in conversations} <= {"done", "length"}
    assert {one["reward"] for one in conversations} <= {0.0, 0.5, 1.0}
    assert max(one["reward"] for one in conversations) == 1.0
    for one in conversations:
        assert one["rewards"] == {"turns": 0.0, "right_answer": one["reward"]}
        roles = [message["role"] for message in one["messages"]]
        assert roles[:2] == ["user", "assistant"]
        told = [turn["info"].get("told") for turn in one["turns"]]
        assert told.count(True) == sum(message["role"] == "user" for message in one["messages"][1:])
    assert any("tool" in [message["role"] for message in one["messages"]] for one in conversations)
