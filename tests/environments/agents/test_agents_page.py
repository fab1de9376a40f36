"""The examples of docs/agents.md run as they are written: a GRPO training whose environment is a program."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from turnwise.record import read
from turnwise.types import MismatchKind

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")


def block(start: str) -> str:
    """The block of code that begins with this line."""
    (text,) = [
        text for text in re.findall(r"^```\w+\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) if text.startswith(start)
    ]
    return text


def turnwise(folder: Path, *arguments: str) -> None:
    (folder / "agent.py").write_text(block("# agent.py"), encoding="utf-8")
    (folder / "solve.py").write_text(block("# solve.py"), encoding="utf-8")
    for name in ("demo",):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(
        [sys.executable, "-m", "turnwise", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=540, check=False,
    )  # fmt: skip
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"


@pytest.mark.slow
def test_the_program_of_the_page_is_trained_with_and_its_tokens_are_exact(tmp_path: Path) -> None:
    (tmp_path / "agent.yaml").write_text(block("# agent.yaml"), encoding="utf-8")
    turnwise(tmp_path, "train", "agent.yaml")
    run = tmp_path / "runs" / "agent"
    trajectories = list(read(run))
    assert len(trajectories) == 4 * 16
    assert [trajectory.error for trajectory in trajectories if trajectory.error is not None] == []
    # the strict sanity check: what the loop appended is what the template writes for the messages of the requests
    assert not [
        found for t in trajectories if (found := t.template_mismatch) and found.kind is not MismatchKind.COMPLETION
    ]
    for trajectory in trajectories:
        assert len(trajectory.segments) == 1 + int(trajectory.metrics["agent/forked"])
        assert trajectory.metrics["agent/extended"] + trajectory.metrics["agent/realigned"] == len(trajectory.turns) - 1
    assert any(
        turn.calls for trajectory in trajectories for turn in trajectory.turns
    )  # the model calls the program's tool
    assert len({trajectory.reward for trajectory in trajectories}) == 2
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if line.get("loss") is not None]
    assert len(steps) == 4
    assert all(step["ratio/max_deviation"] < 1e-3 for step in steps)  # trainer and engine agree on every token
    assert all(step["metrics/agent/forked"] == 0 and step["failed"] == 0 for step in steps)
    assert any(step["tokens/trained"] > 0 for step in steps)


@pytest.mark.slow
def test_the_function_of_the_page_runs(tmp_path: Path) -> None:
    recipe = yaml.safe_load(block("# agent.yaml"))
    recipe |= yaml.safe_load(block("environment:"))
    recipe["data"] = {"train": "rows.jsonl"}
    del recipe["train"], recipe["output"]
    rows = (ROOT / "demo" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:3]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    turnwise(tmp_path, "rollout", "recipe.yaml", "--out", "out")
    trajectories = list(read(tmp_path / "out"))
    assert trajectories
    assert [trajectory.error for trajectory in trajectories if trajectory.error is not None] == []
    assert {len(trajectory.turns) for trajectory in trajectories} == {2}
