"""Tables and curves of metrics, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

__all__ = ["evaluations_table", "number", "sparkline", "steps_table"]

_LEVELS = "▁▂▃▄▅▆▇█"


def steps_table(metrics: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> Table:
    table = Table(box=None)
    for label in ("step", *columns):
        table.add_column(label, justify="right")
    stride = max(1, len(metrics) // 10)
    chosen = [step for place, step in enumerate(metrics) if place % stride == 0 or place == len(metrics) - 1]
    for step in chosen:
        table.add_row(str(step.get("step", "-")), *(number(step.get(name)) for name in columns.values()))
    return table


def evaluations_table(evaluations: Sequence[Mapping[str, Any]]) -> Table:
    """The first evaluation beside the last one, of as many conversations as the last; only the last if there is only one, as
    after an early Ctrl-C. A run that was resumed with other held-out rows has evaluations that cannot be compared."""
    last = evaluations[-1]
    count = last.get("conversations")
    comparable = [one for one in evaluations if one.get("conversations") == count]
    left_out, evaluations = len(evaluations) - len(comparable), comparable
    first = evaluations[0]
    title = "held-out questions" if "reward/mean" in last else "held-out conversations"
    if left_out:
        title += f" ({left_out} evaluations of another number of conversations than {count} are left out)"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    shown = [first, last] if len(evaluations) > 1 else [last]
    for label, evaluation in zip(("before", "after") if len(shown) > 1 else ("so far",), shown, strict=True):
        table.add_column(f"{label} (step {evaluation.get('step', '-')})", justify="right")
    names = ["reward/mean", "reward/std", "pass_rate", "turns/mean", "tool_calls/mean", "tool_errors/mean", "entropy"]
    names = names if "reward/mean" in last else ["loss"]
    names = ["conversations", *names] if count is not None else names
    names += [name for name in last if name.startswith("stop/") and (first.get(name) or last.get(name))]
    for name in names:
        table.add_row(name, *(number(evaluation.get(name)) for evaluation in shown))
    return table


def number(value: Any) -> str:
    """A figure in a table; a dash where there is none."""
    return f"{value:.3f}" if isinstance(value, int | float) else "-"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """A curve in one line of text."""
    if not values:
        return ""
    shown = [values[place * len(values) // min(width, len(values))] for place in range(min(width, len(values)))]
    shown[-1] = values[-1]
    low, high = min(shown), max(shown)
    scale = (len(_LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(_LEVELS[round((value - low) * scale)] for value in shown) + f" {values[0]:.2f} → {values[-1]:.2f}"
