"""The plan of a recipe for training: batch arithmetic, and a memory that is too small."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.recipes import save_recipe
from turnwise.cli import main


def test_the_command_prints_the_plan(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = {"steps": 3, "batch_size": 2, "group_size": 4, "minibatches": 2}
    recipe = save_recipe(tmp_path, model, train=train, limits={"tokens": 24, "turns": 1})
    assert main(["plan", str(recipe)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "conversations of a step 2 rows x 4 = 8" in text
    assert "2 minibatches x 1 epochs = 2, each on 4 conversations" in text
    assert "at most 192" in text
    assert "memory predicted peak of a training step" in text
    assert "ready for training" not in text


def test_the_command_refuses_a_plan_that_does_not_fit(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = save_recipe(tmp_path, model)
    assert main(["plan", str(recipe), "--memory-gb", "0.1"]) == 1
    assert "and there are 0.1 GiB" in capsys.readouterr().out
