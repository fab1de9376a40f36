"""Prints a plan and the predictions of a simulation: with colours on a terminal, as aligned plain text elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from turnwise.doctor.check import Check, show
from turnwise.planning.placement import PlanLine
from turnwise.planning.scaling import ScalingRow
from turnwise.planning.workload import MeasuredWorkload

__all__ = ["print_plan", "print_scaling"]


def print_plan(console: Console, sections: Mapping[str, Sequence[PlanLine]], memory: Check) -> None:
    """Print the sections, and the check of the memory."""
    for title, lines in sections.items():
        console.print(title, style="bold", highlight=False)
        table = Table(box=None, show_header=False, padding=(0, 2))
        for line in lines:
            table.add_row(line.name, line.value)
        console.print(table, highlight=False, markup=False)
    show([memory], console, verdict=False)


def print_scaling(console: Console, workload: MeasuredWorkload, rows: Iterable[ScalingRow], *, source: str) -> None:
    """Print a line for each prediction, as soon as it is known."""
    engine = workload.engine
    console.print(
        f"measured in {source}: {workload.steps} steps at {workload.steps_per_hour:.0f} steps per hour, {workload.turns:.1f} "
        f"turns per conversation; a token takes "
        f"{1000 * engine.token:.2f} ms + {1000 * engine.sharing:.3f} ms for each running turn; training takes "
        f"{1e6 * workload.training.per_token:.1f} microseconds per token",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if workload.staleness:
        console.print(
            f"note: the measured run sampled while it trained (staleness up to {workload.staleness}), so that the engine and the "
            f"trainer slowed each other down: measure a run with train.max_staleness=0",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    console.print(
        f"{'device':>6} {'mode':<13} {'sample':>6} {'train':>6} {'steps/h':>8} {'tokens/s':>9} {'staleness':>9} "
        f"{'idle: sample':>12} {'train':>5}",
        style="bold",
        highlight=False,
        soft_wrap=True,
    )
    for row in rows:
        found = row.prediction
        console.print(
            f"{row.devices:>6} {row.mode:<13} {row.engines:>6} {row.trainers:>6} {found.steps_per_hour:>8.0f} "
            f"{found.tokens_per_second:>9,.0f} {f'{found.staleness_mean:.1f}/{found.staleness_max}':>9} "
            f"{found.engine_idle:>12.0%} {found.trainer_idle:>5.0%}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    console.print("sample, train: devices; staleness: mean/largest", style="dim", highlight=False)
