"""The curves of a run, drawn to a picture file."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw_loss", "draw_rewards"]

_log = logging.getLogger(__name__)

Lines = Sequence[Mapping[str, Any]]
"""Lines of metrics.jsonl or evaluations.jsonl."""


def draw_rewards(path: Path, metrics: Lines, evaluations: Lines) -> None:
    """Draw reward, turns and tool use over the steps. If the file cannot be written, a warning is logged."""
    known = [step for step in metrics if step["reward/mean"] is not None]
    if not known:
        return
    steps = [step["step"] for step in known]
    figure = _figure(8, 6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.4))
    means, widths = [step["reward/mean"] for step in known], [step["reward/std"] for step in known]
    above.plot(steps, means, color="tab:green", label="training, mean")
    low, high = zip(*((mean - width, mean + width) for mean, width in zip(means, widths, strict=True)), strict=True)
    above.fill_between(steps, low, high, color="tab:green", alpha=0.12, label="± one standard deviation")
    if evaluations:
        _plot_held_out(above, evaluations, "reward/mean")
    above.set_ylabel("reward")
    above.legend(loc="lower right", frameon=False)
    for name, label in (
        ("turns/mean", "turns"),
        ("tool_calls/mean", "tool calls"),
        ("tool_errors/mean", "tool errors"),
    ):
        below.plot(steps, [step[name] for step in known], label=label)
    below.set_xlabel("step")
    below.set_ylabel("per conversation")
    below.legend(loc="lower center", bbox_to_anchor=(0.5, 0.97), ncols=3, frameon=False)
    _save(figure, (above, below), path)


def draw_loss(path: Path, metrics: Lines, evaluations: Lines) -> None:
    """Draw the loss over the steps. If the file cannot be written, a warning is logged."""
    known = [step for step in metrics if step["loss"] is not None]
    if not known:
        return
    figure = _figure(8, 4)
    axes = figure.subplots()
    axes.plot([step["step"] for step in known], [step["loss"] for step in known], color="tab:green", label="training")
    held_out = [line for line in evaluations if line["loss"] is not None]
    if held_out:
        _plot_held_out(axes, held_out, "loss")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (negative log-likelihood per token)")
    axes.legend(loc="upper right", frameon=False)
    _save(figure, (axes,), path)


def _figure(width: float, height: float) -> Any:
    """A figure that needs no display. Not made by pyplot, whose backend belongs to the notebook that calls `turnwise.api`."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _plot_held_out(axes: Any, evaluations: Lines, name: str) -> None:
    steps, values = [line["step"] for line in evaluations], [line[name] for line in evaluations]
    axes.plot(steps, values, "o--", color="tab:blue", label="held out")


def _save(figure: Any, axes: Sequence[Any], path: Path) -> None:
    for part in axes:
        part.grid(alpha=0.25)
        part.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        _log.warning("the curve could not be written to %s: %s", path, error)
