"""The evaluations of `turnwise eval` whose models are among the runs that the viewer shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turnwise.errors import RunError
from turnwise.evaluation.results import read_results
from turnwise.view.runs import ViewedRun

__all__ = ["evaluations"]


def evaluations(runs: Sequence[ViewedRun]) -> list[dict[str, Any]]:
    """The contents of `eval.json` beside the runs, with the number of the run of each model (`runs`, by the model's name).

    A file that cannot be read has the key `problem` instead.
    """
    folders = dict.fromkeys(run.path.parent for run in runs if (run.path.parent / "eval.json").is_file())
    return [_evaluation(folder, runs) for folder in folders]


def _evaluation(folder: Path, runs: Sequence[ViewedRun]) -> dict[str, Any]:
    numbers = {run.path.name: number for number, run in enumerate(runs) if run.path.parent == folder}
    about = {"name": folder.absolute().name, "runs": numbers}
    try:
        return {**about, **dataclasses.asdict(read_results(folder / "eval.json"))}
    except RunError as error:
        return {**about, "problem": str(error)}
