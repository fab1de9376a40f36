"""`turnwise show RUN --metric NAME`: one metric of a run, a line for each step. Reads what `record` wrote, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from turnwise.errors import RunError
from turnwise.record.metric_names import metric_hint, metric_of
from turnwise.record.reader import read_lines
from turnwise.terminal.show import sparkline

__all__ = ["show_metric"]


def show_metric(console: Console, run: Path, name: str, *, evaluation: bool = False) -> None:
    """Print a metric's meaning, its curve, and its value in every step. `evaluation` reads evaluations.jsonl instead.

    Raises RunError if there are no metrics, or none of this name; the error names what the metric is called here.
    """
    path = run / ("evaluations.jsonl" if evaluation else "metrics.jsonl")
    lines = list(read_lines(path))
    if not lines:
        raise RunError(f"{path.absolute()} has no metrics: it is missing or empty")
    known = list(dict.fromkeys(key for line in lines for key in line))
    if name not in known:
        raise RunError(
            f"{name} is no metric in {path}{metric_hint(name, known)}. The metrics there: {', '.join(known)}"
        )
    metric = metric_of(name)
    if metric is not None:
        console.print(f"{name}: {metric.meaning}", highlight=False, markup=False, soft_wrap=True)
    values = [line[name] for line in lines if isinstance(line.get(name), int | float)]
    if values:
        console.print(sparkline(values), highlight=False, markup=False, soft_wrap=True)
    for line in lines:
        text = f"{line.get('step', '-'):>6}  {json.dumps(line.get(name))}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
