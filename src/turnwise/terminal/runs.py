"""Runs at a glance: the first lines of one run, and several runs as a table with the options that differ, as JSON and as CSV.

All that is said here is read by `record.summary`; this module chooses, sorts and prints.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from turnwise.errors import RunError, counted
from turnwise.record.metric_names import metric_hint
from turnwise.record.summary import (
    SET,
    HeldOutChange,
    RunSummary,
    changed_from_defaults,
    differing_options,
    groups_over_seeds,
    lower_is_better,
    over_seeds,
)

# one run

_STYLES = {"finished": "green", "running": "cyan", "stopped": "yellow", "failed": "red", "killed": "red"}
_MOST_WARNINGS = 10
_LONGEST = 200
"""Characters of an option's value or of a reason in one line."""


def state_line(run: RunSummary) -> Text:
    """How far a run is and how it ended: `runs/demo: finished, 80 steps`, `runs/a: killed after step 12 of 80`."""
    line = Text(f"{run.path}: ").append(run.state, style=_STYLES.get(run.state, ""))
    if run.step is not None:
        of = "" if run.steps in (None, run.step) else f" of {run.steps}"
        line.append(f", {counted(run.step, 'step')}" if run.state == "finished" else f" after step {run.step}{of}")
    if run.ended is not None:
        line.append(f", {time.strftime('%Y-%m-%d %H:%M', time.localtime(run.ended))}")
    if run.state == "killed" and run.step is not None:
        line.append(" (its process ended without a word: killed, or out of memory; resume=auto goes on)")
    if run.reason:
        line.append(f"\n  {_short(run.reason)}", style=_STYLES.get(run.state, ""))
    return line


def warning_lines(run: RunSummary) -> Iterator[Text]:
    """The warnings of the health monitors and checks, each with its step."""
    for warning in run.warnings[:_MOST_WARNINGS]:
        text = " ".join(warning.text.split())
        yield Text(f"  warning in step {warning.step}: {warning.name}: {text}", style="yellow")
    if (more := len(run.warnings) - _MOST_WARNINGS) > 0:
        yield Text(f"  and {more} more warnings: {run.path / 'warnings.jsonl'}", style="yellow")


def option_lines(run: RunSummary) -> Iterator[Text]:
    """Model and environment, and the options that differ from the defaults, with the default."""
    environment = {name: value for name, value in run.options.items() if name.startswith("environment") and value}
    chosen = {"model.path": run.options.get("model.path"), **environment}
    for name, value in chosen.items():
        if value is not None:
            yield Text(f"{name}  {option_text(value)}")
    changed = changed_from_defaults(run.options)
    if changed:
        yield Text("options that differ from the defaults:")
    width = max(map(len, changed), default=0)
    for name, (value, default) in changed.items():
        yield Text(f"  {name:<{width}}  {option_text(value)}").append(
            f"  (default: {option_text(default)})", style="dim"
        )
    for change in run.changes:
        before, now = option_text(change["from"]), option_text(change["to"])
        yield Text(f"  changed after step {change['after_step']}: {change['option']} from {before} to {now}")


def change_line(change: HeldOutChange) -> Text:
    """Reward on held-out rows before and after training, with intervals and the paired test."""
    from turnwise.terminal.tables import interval, p_value

    test = change.test
    p = p_value(test.p_t)
    p = f"< {p[1:]}" if p.startswith("<") else f"= {p}"
    return Text(
        f"held-out reward {interval(change.before)} → {interval(change.after)} (steps {change.first_step} and "
        f"{change.last_step}); difference {interval(test.difference, sign=True)} of {test.difference.rows} rows, "
        f"better/equal/worse {test.better}/{test.equal}/{test.worse}, p {p} (paired t-test)"
    )


def option_text(value: Any) -> str:
    """The value of an option in one line, without options of it that are not set."""
    plain = _set(value)
    return _short(plain if isinstance(plain, str) and plain else json.dumps(plain, default=str, ensure_ascii=False))


def _set(value: Any) -> Any:
    """Without options that are null or empty; a reference with nothing but `use` is its text."""
    if isinstance(value, list):
        return [_set(part) for part in value]
    if not isinstance(value, dict):
        return value
    kept = {name: _set(part) for name, part in value.items() if part not in (None, {}, [])}
    return kept["use"] if list(kept) == ["use"] else kept


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


# several runs

_WIDEST = 120
"""Characters of a line outside of a terminal, besides the path of the run."""


def known_metrics(runs: Sequence[RunSummary], wanted: Sequence[str]) -> list[str]:
    """`wanted`, or without them the metrics that matter: the mean reward, the loss of fine-tuning, and both on held-out rows.

    Raises RunError if no run has a wanted metric.
    """
    for name in wanted:
        if not any(name in run.metrics for run in runs):
            names = list(dict.fromkeys(name for run in runs for name in run.metrics))
            raise RunError(
                f"{name} is not a metric of these runs{metric_hint(name, names)}. The metrics are: {', '.join(names)}"
            )
    if wanted:
        return list(dict.fromkeys(wanted))
    losses = ("loss", "eval/loss") if any(run.kind == "sft" for run in runs) else ()
    usual = ("reward/mean", "eval/reward/mean", *losses)
    return [name for name in usual if any(name in run.metrics for run in runs)]


def _columns_for(runs: Sequence[RunSummary], wanted: Sequence[str], by: str | None) -> list[str]:
    """`known_metrics`, and the metric that the table is sorted by."""
    names, name = known_metrics(runs, wanted), (by or "").removesuffix(".best")
    return [*names, name] if name not in names and any(name in run.metrics for run in runs) else names


def run_records(
    runs: Sequence[RunSummary], *, metrics: Sequence[str] = (), by: str | None = None
) -> list[dict[str, Any]]:
    """The rows of the table, each with the same columns: run, kind, state, reason, step, steps, warnings; for each metric its
    last value (`reward/mean`), its best value (`reward/mean.best`) and the step of that; and each option that differs.

    `by` is the column to sort by: metrics from the best value, others from the smallest; runs without a value are last. Raises
    RunError if there is no such column or metric.
    """
    names, options = _columns_for(runs, metrics, by), differing_options(runs)
    records = [_record(run, names, options) for run in runs]
    if by is None:
        return records
    return _sorted(records, names, by)


def _sorted(records: list[dict[str, Any]], metrics: Sequence[str], by: str) -> list[dict[str, Any]]:
    columns = list(records[0]) if records else []
    if by not in columns and len(ends := [name for name in columns if name.endswith(f".{by}")]) == 1:
        by = ends[0]  # as it heads its column
    if by not in columns:
        raise RunError(
            f"--sort={by} is neither a metric of these runs nor a column of the table; the columns are: {', '.join(columns)}"
        )
    metric = by.removesuffix(".best")
    descending = metric in metrics and not lower_is_better(metric)

    def place(record: Mapping[str, Any]) -> tuple[int, float, str]:
        value = record[by]
        if type(value) in (int, float):
            return 0, -value if descending else value, ""
        return (2, 0.0, "") if value is None else (1, 0.0, str(value))

    return sorted(records, key=place)


def seed_records(
    runs: Sequence[RunSummary], *, metrics: Sequence[str] = (), by: str | None = None
) -> list[dict[str, Any]]:
    """A row for the finished runs that differ in `seed` only: their number (`runs`), the seeds, each option that differs
    otherwise, and of each metric the mean of its last values (`reward/mean`) and their standard deviation (`reward/mean.std`).

    None where a run lacks the metric, and for the deviation of one run. `by` and errors as in `run_records`. Empty if no run has
    finished.
    """
    names, options = _columns_for(runs, metrics, by), [name for name in differing_options(runs) if name != "seed"]
    records: list[dict[str, Any]] = []
    for group in groups_over_seeds(runs, options):
        record: dict[str, Any] = {"runs": len(group), "seeds": [run.options.get("seed") for run in group]}
        record |= {name: group[0].options.get(name) for name in options}
        for name in names:
            record[name], record[f"{name}.std"] = over_seeds(group, name)
        records.append(record)
    return records if by is None or not records else _sorted(records, names, by)


def _record(run: RunSummary, metrics: Sequence[str], options: Sequence[str]) -> dict[str, Any]:
    record: dict[str, Any] = {
        "run": str(run.path),
        "kind": run.kind,
        "state": run.state,
        "reason": run.reason,
        "step": run.step,
        "steps": run.steps,
        "warnings": len(run.warnings),
    }
    for name in metrics:
        values = run.metrics.get(name)
        best, step = (None, None) if values is None else values.best(name)
        record |= {name: None if values is None else values.last, f"{name}.best": best, f"{name}.best_step": step}
    return record | {name: run.options.get(name) for name in options}


def records_as_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """The rows as CSV with a header; lists and mappings are JSON."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(records[0])
    for record in records:
        writer.writerow([json.dumps(v) if isinstance(v, list | dict | bool) else v for v in record.values()])
    return file.getvalue()


def print_runs(console: Console, records: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows of `run_records` as a table, and why runs failed or were stopped. What is equal in all rows is said once,
    above."""
    from turnwise.terminal.tables import number

    columns = list(records[0])
    metrics = [name.removesuffix(".best") for name in columns if name.endswith(".best")]
    fixed = ("run", "kind", "state", "reason", "step", "steps", "warnings")
    options = _without_set(records, columns[len(fixed) + 3 * len(metrics) :])
    kinds = list(dict.fromkeys(record["kind"] for record in records))
    shown: list[list[str]] = [["run", *(["kind"] if len(kinds) > 1 else []), "state", "step"]]
    warned = any(record["warnings"] for record in records)
    shown[0] += [*(["warnings"] if warned else []), *metrics, *(_label(name, options) for name in options)]
    for record in records:
        step = "-" if record["step"] is None else str(record["step"])
        if record["steps"] not in (None, record["step"]):
            step += f"/{record['steps']}"
        row = [record["run"], *([record["kind"]] if len(kinds) > 1 else []), record["state"], step]
        row += [str(record["warnings"] or "-")] if warned else []
        for name in metrics:
            best, last = record[f"{name}.best"], record[name]
            at = "" if best is None or best == last else f" ({number(best)} @{record[f'{name}.best_step']})"
            row.append(f"{number(last)}{at}")
        shown.append(row + ["-" if record[name] is None else _cell(record[name]) for name in options])
    _print_columns(console, shown, options)
    for record in records:
        if record["reason"]:
            text = f"{record['run']}: {record['state']}: {_short(record['reason'])}"
            console.print(text, style=_STYLES.get(record["state"]), highlight=False, markup=False, soft_wrap=True)
    if metrics:
        console.print("metrics: the last value (the best value @its step, where that is another)", style="dim")


def print_over_seeds(console: Console, records: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows of `seed_records` as a table. Nothing if no two runs differ in the seed only."""
    from turnwise.terminal.tables import number, print_table

    if max((record["runs"] for record in records), default=0) < 2:
        return
    columns = list(records[0])[2:]
    metrics = [name.removesuffix(".std") for name in columns if name.endswith(".std")]
    options = _without_set(records, columns[: len(columns) - 2 * len(metrics)])
    rows = [["seeds", *(_label(name, options) for name in options), *metrics]]
    for record in records:
        means = [
            number(record[name]) + ("" if (std := record[f"{name}.std"]) is None else f" ± {number(std)}")
            for name in metrics
        ]
        rows.append([str(record["runs"]), *(option_text(record[name]) for name in options), *means])
    console.print("\nover the seeds: mean ± standard deviation of the last values", highlight=False)
    print_table(console, rows, keys=1 + len(options))


def _without_set(records: Sequence[Mapping[str, Any]], options: Sequence[str]) -> list[str]:
    """`options` without those that have one value in each set of a sweep: the name of the set says them."""
    if SET not in options or any(record[SET] is None for record in records):
        return list(options)

    def is_of_set(name: str) -> bool:
        pairs = {json.dumps([record[SET], record[name]], default=str) for record in records}
        return name != SET and len(pairs) == len({record[SET] for record in records})

    return [name for name in options if not is_of_set(name)]


def _print_columns(console: Console, shown: Sequence[Sequence[str]], options: Sequence[str]) -> None:
    """The table. If it is too wide, the options, which are its last columns, are a second table: the rows of it, unless there are
    more runs than options."""
    from turnwise.terminal.tables import print_table

    widths = [max(len(row[place]) for row in shown) + 2 for place in range(len(shown[0]))]
    widest = console.width if console.is_terminal else _WIDEST + widths[0]
    if sum(widths) <= widest or not options:
        print_table(console, shown, widest=widest)
        return
    print_table(console, [row[: -len(options)] for row in shown], widest=widest)
    console.print("\noptions that differ:", highlight=False)
    if len(shown) - 1 > len(options):
        print_table(console, [[row[0], *row[-len(options) :]] for row in shown], widest=widest)
        return
    columns = zip(*(row[-len(options) :] for row in shown[1:]), strict=True)
    rows = [[name, *values] for name, values in zip(options, columns, strict=True)]
    print_table(console, [["option", *(row[0] for row in shown[1:])], *rows], widest=widest)


def _label(name: str, options: Sequence[str]) -> str:
    """The last part of an option's name, if no other option of the table ends with it."""
    last = name.rpartition(".")[2]
    return name if sum(other.rpartition(".")[2] == last for other in options) > 1 else last


def _cell(value: Any) -> str:
    text = option_text(value)
    return text if len(text) <= 40 else f"…{text[-39:]}"


def print_left_out(console: Console, problems: Sequence[str]) -> None:
    """Name the paths that are not shown, and why."""
    for problem in problems:
        console.print(f"left out: {problem}", style="yellow", highlight=False, markup=False, soft_wrap=True)
