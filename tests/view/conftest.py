"""Two runs for the viewer, and an evaluation of both."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from support.viewed_run import write_run
from turnwise.record.evaluation import EvaluationResult, compare, summarize
from turnwise.record.reader import read


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "first")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return write_run(tmp_path / "second", shift=0.05)


@pytest.fixture
def evaluation(run: Path, other: Path) -> Path:
    """The file of an evaluation whose models are the two runs."""
    models = [
        summarize(
            read(path),
            name=path.name,
            model=path.name,
            engine="local",
            single_turn=False,
            samples=12,
            pass_reward=0.3,
            source_of={},
        )
        for path in (run, other)
    ]
    result = EvaluationResult(
        data="rows.jsonl",
        rows=2,
        samples_per_row=12,
        seed=0,
        pass_reward=0.3,
        models=models,
        comparisons=[compare(models[1], models[0])],
    )
    file = run.parent / "eval.json"
    file.write_text(json.dumps(dataclasses.asdict(result)))
    return file
