"""`turnwise show` and `turnwise view`: runs as text, and in the browser.

`show` prints the summary of a run, single conversations, or one metric. Both read what `record` wrote, and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, RenderableType
from rich.text import Text

from turnwise.commands.command import Context, count, damage_notes, port, print_lines, step_or_last
from turnwise.errors import ConfigError, RunError, counted
from turnwise.record.completeness import check_record
from turnwise.record.failures import FailureGroup, FailureGroups, ToolCallCounts
from turnwise.record.lines import existing_file
from turnwise.record.metric_names import metric_here, metric_hint, metric_of, reward_part
from turnwise.record.reader import RecordedTrajectories, evaluated_runs, read, read_lines, token_texts
from turnwise.record.summary import (
    evaluations_of,
    find_summaries,
    held_out_change,
    may_be_run,
    summarize_run,
)
from turnwise.record.writer import trajectory_lines
from turnwise.terminal.conversation import conversation
from turnwise.terminal.runs import (
    change_line,
    option_lines,
    print_left_out,
    print_over_seeds,
    print_runs,
    records_as_csv,
    run_records,
    seed_records,
    state_line,
    warning_lines,
)
from turnwise.terminal.tables import evaluations_table, exact_number, number, sparkline, steps_table
from turnwise.types import Trajectory

# `turnwise show`

_COLUMNS = {
    "reward": "reward/mean",
    "±": "reward/std",
    "turns": "turns/mean",
    "calls": "tool_calls/mean",
    "errors": "tool_errors/mean",
    "failed": "failed",
    "zero std": "groups/zero_std",
    "entropy": "entropy",
    "s/step": "seconds/step",
}
_SFT_COLUMNS = {
    "epoch": "epoch",
    "loss": "loss",
    "grad norm": "grad_norm",
    "turns": "turns/mean",
    "left out": "left_out",
    "failed": "failed",
    "s/step": "seconds/step",
}


_IF_ANY = ("errors", "failed", "zero std", "left out")
"""Columns that are left out where they are 0 in all steps: a line is to fit into 80 characters."""


def _columns(metrics: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> dict[str, str]:
    """The columns of the table of steps."""
    return {
        label: name
        for label, name in columns.items()
        if label not in _IF_ANY or any(line.get(name) not in (None, 0) for line in metrics)
    }


def register_show(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Print the summary of a run, single conversations, or one metric, as text (docs/record.md). Several runs, and "
        "directories of runs such as a sweep, are printed as a table: final and best values, and the options that differ."
    )
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN",
        help="the directory of a run, such as runs/demo, of an evaluation, or of several runs",
    )  # fmt: skip
    _add_selection(parser)
    parser.add_argument(
        "--metric", metavar="NAME", action="append", default=[],
        help="the value of a metric in every step, such as reward/mean, or eval/NAME on held-out rows (docs/metrics.md); of "
        "several runs, a column of the table; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--sort",
        metavar="COLUMN",
        help="sort the table of runs, best first, by the last value of a metric (NAME.best: by its best value), or by an option",
    )
    parser.add_argument(
        "--over-seeds",
        action="store_true",
        help="in the table of runs, one row for the finished runs that differ in the seed only: number, mean, standard deviation",
    )
    parser.add_argument(
        "--check", action="store_true",
        help="whether the record is complete: every step once, every group, no id twice; the exit status is 1 if it is not",
    )  # fmt: skip
    printed = "the table of runs, or with --metric the steps of one run, as"
    parser.add_argument(
        "--json",
        action="store_true",
        help=f"print {printed} JSON; with --step, --worst, ... these conversations as JSON lines (docs/record.md)",
    )
    parser.add_argument("--csv", action="store_true", help=f"print {printed} CSV")
    parser.set_defaults(command=_run_show)


def _add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose conversations of a run, and how they are printed."""
    parser.add_argument("--id", metavar="ID", help="the conversation with this id")
    parser.add_argument(
        "--step",
        type=step_or_last,
        metavar="N",
        help="the conversations of step N; last: of the last step of the record, with --eval of the last evaluation",
    )
    parser.add_argument(
        "--row", metavar="ID",
        help="the conversations on the row with this id (without a column of ids: its number from 1) in all steps, one line "
        "each: step, sample, reward, last answer; with --step, --worst, ..., these conversations in full",
    )  # fmt: skip
    for name, which in (("--worst", "lowest"), ("--best", "highest")):
        help_ = f"the N conversations with the {which} reward; of equal ones the latest"
        parser.add_argument(name, type=count, default=0, metavar="N", help=help_)
    parser.add_argument("--last", type=count, default=0, metavar="N", help="the N latest conversations")
    parser.add_argument(
        "--eval",
        action="store_true",
        dest="evaluation",
        help="read evaluations on held-out rows instead of training steps",
    )
    parser.add_argument("--failed", action="store_true", help="the conversations that ended with an error")
    parser.add_argument(
        "--tokens",
        action="store_true",
        help="also print every token: id, text, turn, weight, log-probability, version of the weights",
    )


_SELECTING = ("id", "step", "row", "worst", "best", "last", "failed", "tokens")

_OF_RUNS = {"sort": "--sort sorts runs", "over_seeds": "--over-seeds is of runs"}


def _run_show(options: argparse.Namespace, context: Context) -> int:
    selectors = [f"--{name}" for name in _SELECTING if vars(options)[name] not in (None, False, 0) or name == "step"]
    selectors = [name for name in selectors if name != "--step" or options.step is not None]
    run: Path = options.runs[0]
    if options.check:
        others = [
            *selectors,
            *(
                f"--{name}"
                for name in ("metric", "sort", "over_seeds", "json", "csv", "evaluation")
                if vars(options)[name]
            ),
        ]
        if others:
            raise ConfigError(f"--check reads whole runs, and {others[0]} chooses of them: give one of them")
        return check_runs(context.console, options.runs)
    one = len(options.runs) == 1 and (_is_one(run) or not run.is_dir())
    if options.json and options.csv:
        raise ConfigError("--json and --csv are both given: give one of them")
    form = "json" if options.json else "csv" if options.csv else "text"
    of_runs = next((name for name in _OF_RUNS if vars(options)[name]), None)
    if one and options.metric and not of_runs:
        if selectors:
            raise ConfigError(f"--metric prints metrics and {selectors[0]} prints conversations: give one of them")
        _show_metrics_of_one(context.console, run, options, form)
        return 0
    if not one or of_runs or (form != "text" and not selectors):
        if selectors:
            problem = _OF_RUNS[of_runs] if one and of_runs else "give the directory of one run"
            raise ConfigError(f"{selectors[0]} prints conversations of one run: {problem}")
        show_runs(context.console, options, form=form)
        return 0
    if form == "csv":
        raise ConfigError(
            f"--csv prints tables and {selectors[0]} prints conversations: --json prints them as JSON lines"
        )
    if form == "json" and options.tokens:
        raise ConfigError("--tokens is for text: JSON lines (--json) always have the token ids, in `segments`")
    selection = Selection(
        id=options.id,
        step=options.step,
        row=options.row,
        worst=options.worst,
        best=options.best,
        last=options.last,
        failed=options.failed,
    )
    show(context.console, run, selection, evaluation=options.evaluation, tokens=options.tokens, form=form)
    return 0


def _show_metrics_of_one(console: Console, run: Path, options: argparse.Namespace, form: str) -> None:
    """Print metrics of the steps, and those of evaluations: `eval/NAME`, as in the table of runs, or all with `--eval`."""
    held_out = [name.removeprefix("eval/") for name in options.metric if options.evaluation or name.startswith("eval/")]
    of_steps = [name for name in options.metric if not (options.evaluation or name.startswith("eval/"))]
    if held_out and of_steps and form != "text":
        raise ConfigError(
            f"--metric {of_steps[0]} has a value in each step, and --metric eval/{held_out[0]} in each evaluation, which are two "
            f"tables: print one after the other"
        )
    for names, evaluation in ((of_steps, False), (held_out, True)):
        if names:
            show_metrics(console, run, names, evaluation=evaluation, form=form)


def _is_one(path: Path) -> bool:
    """Whether a directory is a run or an evaluation, and not a directory of runs."""
    return may_be_run(path) or os.path.isfile(path / "metrics.jsonl") or bool(evaluated_runs(path))


def show_runs(console: Console, options: argparse.Namespace, *, form: str) -> None:
    """Print several runs as a table, as JSON or as CSV. A path that is no run is named. Raises RunError if none is a run."""
    runs, problems = find_summaries(options.runs)
    if not runs:
        raise RunError(problems[0] if problems else f"{options.runs[0].absolute()} contains no runs")
    problems += damage_notes([line for run in runs for line in run.damaged])
    metrics = [
        f"eval/{name}" if options.evaluation and not name.startswith("eval/") else name for name in options.metric
    ]
    records = (seed_records if options.over_seeds else run_records)(runs, metrics=metrics, by=options.sort)
    if not records:
        raise RunError("--over-seeds is of finished runs, and none of these has finished")
    if options.over_seeds and form == "text" and all(record["runs"] == 1 for record in records):
        raise RunError(
            "--over-seeds: no two finished runs differ in the seed only; without it, the runs are printed one by one"
        )
    if form != "text":
        _print_records(console, records, form)
        print_left_out(Console(stderr=True), problems)
        return
    if not options.over_seeds:
        print_runs(console, records)
        try:
            records = seed_records(runs, metrics=metrics, by=options.sort and options.sort.removesuffix(".best"))
        except RunError:  # sorted by a column that only single runs have
            records = seed_records(runs, metrics=metrics)
    print_over_seeds(console, records)
    print_left_out(console, problems)


def check_runs(console: Console, paths: Sequence[Path]) -> int:
    """Say of each run whether its record is complete, and what is missing in it or stands twice. Returns 1 if anything is.

    Raises RunError if none of the paths is a run.
    """
    runs, problems = find_summaries(paths)
    if not runs:
        raise RunError(problems[0] if problems else f"{paths[0].absolute()} contains no runs")
    findings: list[str] = []
    for run in runs:
        checked = check_record(run.path)
        read = f"{counted(checked.conversations, 'conversation')}"
        read = read if run.step is None else f"{counted(run.step, 'step')}, {read}"
        findings += checked.findings
        says = f"{counted(len(checked.findings), 'finding')}:" if checked.findings else "complete"
        print_lines(console, [f"{run.path}: {read}; {says}"])
        print_lines(console, [f"  {text}" for text in checked.findings], style="red")
    print_left_out(console, problems)
    return int(bool(findings or problems))


def _print_records(console: Console, records: Sequence[Mapping[str, Any]], form: str) -> None:
    text = json.dumps(records, indent=1, default=str) if form == "json" else records_as_csv(records).rstrip("\n")
    console.print(text, highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which conversations of a run are printed. Nothing set: the run's summary instead."""

    id: str | None = None
    """The conversation with this id."""
    step: int | Literal["last"] | None = None
    """Conversations of this step; `last`: of the last one of the record."""
    row: str | None = None
    """Conversations on the row with this id, without those of agents."""
    failed: bool = False
    """Conversations that ended with an error."""
    worst: int = 0
    """Of the selected conversations, this many with the lowest reward. `worst` and `best` may both be set."""
    best: int = 0
    """Of the selected conversations, this many with the highest reward."""
    last: int = 0
    """Of the selected conversations, this many from the end."""

    def counts(self) -> list[str]:
        """The counts that are set, as options of the command line."""
        return [
            name for name, count in (("--worst", self.worst), ("--best", self.best), ("--last", self.last)) if count
        ]

    def refuse_contradictions(self) -> None:
        """Raises RunError if two of the options select different conversations."""
        if self.last and len(self.counts()) > 1:
            raise RunError(f"{' and '.join(self.counts())} select different conversations: give one of them")
        if self.failed and (self.worst or self.best):
            raise RunError(
                f"{self.counts()[0]} compares rewards, and conversations that failed (--failed) have none: give --last instead"
            )

    def numbered(self, recorded: RecordedTrajectories) -> Selection:
        """With the number of the step that `last` stands for. Raises RunError if no conversation has a step."""
        return replace(self, step=recorded.last_step()) if self.step == "last" else self

    def of(self, file: Path, damaged: list[str]) -> list[Trajectory]:
        """The conversations of a file that a `numbered` selection selects. Damaged lines are left out and described in
        `damaged`."""
        if self == Selection(last=self.last):
            return RecordedTrajectories(file, damaged=damaged)[-self.last :]  # without reading the others
        matching = [
            trajectory
            for trajectory in self._candidates(file, damaged)
            if (self.step is None or trajectory.step == self.step)
            and (self.row is None or (trajectory.row.id == self.row and not trajectory.episode))
            and (not self.failed or trajectory.error is not None)
        ]
        if self.worst or self.best:
            scored = [(trajectory.reward, trajectory) for trajectory in matching if trajectory.reward is not None]
            # of equal rewards the latest first: it says what still goes wrong
            scored.reverse()
            best = sorted(scored, key=lambda pair: pair[0], reverse=True)[: self.best]
            worst = sorted(scored, key=lambda pair: pair[0])[: self.worst]
            return [trajectory for _, trajectory in (*best, *worst)]
        return matching[-self.last :] if self.last else matching

    def _candidates(self, file: Path, damaged: list[str]) -> Iterable[Trajectory]:
        """The conversations with this id or of this step, without reading the others; otherwise all."""
        if self.id is not None:
            return RecordedTrajectories(file, damaged=damaged).with_id(self.id)
        if isinstance(self.step, int):
            return RecordedTrajectories(file, damaged=damaged).of_step(self.step)
        return read(file, damaged=damaged)


def show(
    console: Console,
    run: Path,
    selection: Selection = Selection(),  # frozen
    *,
    evaluation: bool = False,
    tokens: bool = False,
    form: str = "text",
) -> None:
    """Print a run's summary, or the conversations of `selection`: as text, or in the form `json` as lines of JSON, as they stand
    in the record, those of a conversation's agents before it.

    `evaluation` reads the held-out conversations instead of the training conversations; `tokens` prints every token too.
    A damaged line of the record is left out and named. Raises RunError if `run` is not a run, or no conversation matches; that
    none failed is no error.
    """
    if (models := evaluated_runs(run)) and _show_evaluation(console, run, models, selection):
        return
    run = models[0] if models else run
    path = existing_file(run / ("eval_trajectories.jsonl" if evaluation else "trajectories.jsonl"))
    if not may_be_run(run):
        raise RunError(
            f"{run.absolute()} is not a run: it contains no trajectories.jsonl. `turnwise train`, `sft` and `rollout` write "
            f"runs"
        )
    if evaluation and not path.is_file():
        raise RunError(f"{run.absolute()} has no evaluations, because its recipe has no held-out rows (data.eval)")
    selection.refuse_contradictions()
    if selection == Selection():
        if tokens:
            raise RunError(
                "--tokens needs conversations to show: add --id, --step, --row, --worst, --best, --last or --failed"
            )
        for part in _summary(run, path):
            console.print(part, soft_wrap=isinstance(part, Text))  # paths are not wrapped
        return
    if not path.is_file():
        raise RunError(
            f"{run.absolute()} has no conversations: it ended before its first step; `turnwise show {run}` says how"
        )
    damaged: list[str] = []
    recorded = RecordedTrajectories(path, damaged=[])
    selection = selection.numbered(recorded)
    trajectories = selection.of(path, damaged)
    print_lines(Console(stderr=True) if form == "json" else console, damage_notes(damaged), style="yellow")
    if not trajectories:
        _nothing_found(console, run, selection, recorded, form=form)
    for trajectory in trajectories:
        trajectory.agents = recorded.agents_of(trajectory)
    if form == "json":
        for line in trajectory_lines(path, trajectories):
            # in ASCII: what a model wrote must not reach the terminal as it is
            console.print(json.dumps(json.loads(line)), highlight=False, markup=False, soft_wrap=True)
        return
    if selection == Selection(row=selection.row) and not tokens:
        _show_row(console, trajectories, f"turnwise show {run}{' --eval' if evaluation else ''}")
        return
    _show_in_full(console, run, trajectories, tokens=tokens)


def _show_in_full(console: Console, run: Path, trajectories: Sequence[Trajectory], *, tokens: bool) -> None:
    """Print conversations with all that they have."""
    policies = {trajectory.policy for trajectory in trajectories} if tokens else set()
    decode = {policy: token_texts(run, policy) for policy in policies}
    for trajectory in trajectories:
        console.print(conversation(trajectory, tokens=tokens, decode=decode.get(trajectory.policy)))


def _show_row(console: Console, trajectories: Sequence[Trajectory], show: str) -> None:
    """A line for each conversation on one row, by step, as the viewer has them over the steps."""
    ordered = sorted(trajectories, key=lambda trajectory: trajectory.step or 0)
    steps = {trajectory.step for trajectory in ordered}
    row, last = ordered[-1].row.id, ordered[-1].id
    print_lines(console, [f"row {row}: {counted(len(ordered), 'conversation')} in {counted(len(steps), 'step')}"])
    lines = [("step", "sample", "reward", "last answer")]
    for one in ordered:
        answer = " ".join(one.answer.split()) if one.error is None else f"failed: {one.error.kind}"
        step, sample = "-" if one.step is None else str(one.step), one.id.rpartition("/")[2]
        lines.append((step, sample, number(one.reward), answer or "(no text)"))
    widths = [max(len(line[place]) for line in lines) for place in range(3)]
    space = max(console.width, _NARROWEST_ROW) - sum(widths) - 6
    for *cells, answer in lines:
        aligned = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        shown = answer if len(answer) <= space else f"{answer[: space - 1]}…"
        print_lines(console, [f"{aligned}  {shown}"])
    print_lines(
        console, [f"in full: {show} --row {shlex.quote(row)} --step N, or --id {shlex.quote(last)}"], style="dim"
    )


_NARROWEST_ROW = 60  # characters of a line


def _nothing_found(
    console: Console, run: Path, selection: Selection, recorded: RecordedTrajectories, *, form: str
) -> None:
    """Say that no conversation failed. Raises RunError if none would match without `--failed` either."""
    if selection.failed and replace(selection, failed=False).of(recorded.path, []):
        if form == "text":
            where = "" if selection.step is None else f" of step {selection.step}"
            console.print(
                f"no conversation{where} failed (errors of tools are answers to the model: `turnwise show {run}` counts them)",
                highlight=False,
                soft_wrap=True,
            )
        return
    known = _known_steps(recorded.steps()) if selection.step is not None else ""
    if selection.row is not None:
        known += _known_rows(recorded)
    raise RunError(
        f"no conversation in {recorded.path} matches{known}; `turnwise show {run}` prints a summary of the run"
    )


_NAMED = 5  # steps or rows in a message


def _known_steps(steps: Sequence[int]) -> str:
    """The steps of a record, as a message has them: a range where none is missing."""
    if not steps:
        return ""
    if len(steps) > 1 and len(steps) == steps[-1] - steps[0] + 1:
        return f" (its steps are {steps[0]} to {steps[-1]})"
    named = [*map(str, steps)] if len(steps) <= _NAMED + 1 else [*map(str, steps[:_NAMED]), f"... {steps[-1]}"]
    return f" (its {'steps are' if len(steps) > 1 else 'step is'} {', '.join(named)})"


def _known_rows(recorded: RecordedTrajectories) -> str:
    """The ids of some rows of a record, and the option that takes them from a column `id`, if the rows have one."""
    rows = {one.row.id: one.row for one in read(recorded.path, damaged=[]) if not one.episode}
    if not rows:
        return ""
    more = ", ..." if len(rows) > _NAMED else ""
    column = any("id" in row.fields for row in rows.values())
    fix = "; their column id is none, unless the recipe has data.columns.id=id" if column else ""
    return f" (ids of rows are {', '.join(list(rows)[:_NAMED])}{more}{fix})"


def _show_evaluation(console: Console, run: Path, models: Sequence[Path], selection: Selection) -> bool:
    """Print the results of an evaluation. Returns whether that is all: a selection of conversations reads a single model.

    Raises RunError if conversations are selected and there are several models.
    """
    names = "\n".join(f"turnwise show {model}" for model in models)
    if selection != Selection():
        if len(models) > 1:
            raise RunError(
                f"{run} is an evaluation of {len(models)} models; select conversations of one model:\n{names}"
            )
        return False
    if (run / "eval.json").is_file():
        from turnwise.record.evaluation import read_results
        from turnwise.terminal.tables import print_results

        print_results(console, read_results(run / "eval.json"))
        text = f"\nthe conversations of each model:\n{names}"
    else:
        text = (
            f"this evaluation is not finished (`turnwise eval ... resume=auto` resumes it); its conversations:\n{names}"
        )
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    return True


def show_metrics(
    console: Console, run: Path, names: Sequence[str], *, evaluation: bool = False, form: str = "text"
) -> None:
    """Print of each metric its meaning and its curve, and a table of the steps with their values; in the form `json` or `csv`
    a row for each step. `evaluation` reads evaluations.jsonl instead.

    Raises RunError if there are no metrics; or, when all others are printed, none of a name: the error says what the metric is
    called here.
    """
    path = run / ("evaluations.jsonl" if evaluation else "metrics.jsonl")
    damaged: list[str] = []
    lines = list(read_lines(path, damaged=damaged))
    print_lines(console if form == "text" else Console(stderr=True), damage_notes(damaged), style="yellow")
    if not lines:
        raise RunError(f"{path.absolute()} has no metrics: it is missing or empty")
    known = list(dict.fromkeys(key for line in lines for key in line))
    names = [name if name in known else metric_here(name, known) or name for name in names]
    present = [name for name in names if name in known]
    if present and form != "text":
        columns = dict.fromkeys(("step", *present))
        _print_records(console, [{name: line.get(name) for name in columns} for line in lines], form)
    elif present:
        _show_metrics(console, lines, present)
    if missing := [
        f"{name} is not a metric in {path}{metric_hint(name, known)}" for name in names if name not in known
    ]:
        raise RunError(f"{'. '.join(missing)}. The metrics are: {', '.join(known)}")


def _show_metrics(console: Console, lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """The meaning and the curve of each metric, and a table of the steps with a column for each."""
    written: list[str] = []
    for name in names:
        if (metric := metric_of(name)) is not None:
            written.append(f"{name}: {metric.meaning}")
        if values := [line[name] for line in lines if isinstance(line.get(name), int | float)]:
            written.append(sparkline(values))
    rows = [[str(line.get("step", "-")), *(exact_number(line.get(name)) for name in names)] for line in lines]
    widths = [6, 0]  # a single metric needs no heading and no alignment
    if len(names) > 1:
        rows.insert(0, ["step", *names])
        widths = [max(6, *map(len, column)) for column in zip(*rows, strict=True)]
    written += ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    for text in written:
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def _summary(run: Path, path: Path) -> Iterator[RenderableType]:
    """How the run ended and its warnings, the options that differ from the defaults, the steps, the evaluations, and the
    conversations of `path`: how they ended, and their errors."""
    summary = summarize_run(run)
    damaged = list(summary.damaged)
    metrics = list(read_lines(run / "metrics.jsonl", damaged=damaged))
    if summary.step is not None or summary.state == "running":
        yield state_line(summary)
        yield from warning_lines(summary)
        yield from option_lines(summary)
    if metrics:
        # fine-tuning has a loss and no reward
        curve = "reward/mean" if "reward/mean" in metrics[0] else "loss"
        values = [line[curve] for line in metrics if isinstance(line.get(curve), int | float)]
        yield Text(
            f"{len(metrics)} {'step' if len(metrics) == 1 else 'steps'}, {curve.partition('/')[0]} {sparkline(values)}"
        )
        yield steps_table(metrics, _columns(metrics, _COLUMNS if curve != "loss" else _SFT_COLUMNS))
        if parts := _mean_parts(metrics[-1]):
            yield Text(
                f"rewards of step {metrics[-1].get('step', '-')}: {parts} (turnwise show RUN --metric rewards/NAME/mean)"
            )
    evaluations = list(read_lines(run / "evaluations.jsonl", damaged=damaged))
    if evaluations:
        yield evaluations_table(evaluations)
        if (change := held_out_change(run)) is not None:
            yield change_line(change)
        if (best := run / "best").is_symlink() and best.exists():
            # best -> checkpoints/step-000004/model
            yield Text(f"the best evaluation is that of {best.readlink().parent.name}: {best}")
    for folder in evaluations_of(run):
        yield Text(f"evaluated by turnwise eval: turnwise show {folder}")
    if path.is_file():
        yield from _conversations(run, path, damaged)
    else:  # it failed before its first step ended
        yield Text("no conversations are recorded")
        yield from (Text(f"  {note}", style="yellow") for note in damage_notes(damaged))


def _mean_parts(line: Mapping[str, Any]) -> str:
    """The means of the parts of the reward in a step; empty where it has one part only."""
    parts = {of[0]: value for name, value in line.items() if (of := reward_part(name)) and of[1] == "mean"}
    return ", ".join(f"{name} {number(value)}" for name, value in parts.items()) if len(parts) > 1 else ""


def _conversations(run: Path, path: Path, damaged: list[str]) -> Iterator[Text]:
    """How the conversations of a file ended, and their errors, grouped by message."""
    stops: Counter[str] = Counter()
    failed, latest, tools = FailureGroups(), "", ToolCallCounts()
    last = ""
    agents: Counter[str] = Counter()
    for trajectory in read(path, damaged=damaged):
        tools.add(trajectory)
        if trajectory.episode:
            agents[trajectory.agent] += 1
        else:
            last = trajectory.id
            stops[str(trajectory.stop)] += 1
        if (error := trajectory.error) is not None:
            failed.add(trajectory.step, trajectory.id, str(error.kind), error.message)
            latest = trajectory.id
    yield Text(
        f"{counted(stops.total(), 'conversation')}; "
        + ", ".join(f"{stop} {times}" for stop, times in stops.most_common())
    )
    if agents:
        yield Text(f"  and of agents: {', '.join(f'{name} {times}' for name, times in agents.most_common())}")
    if dropped := sum(line.get("record/dropped") or 0 for line in read_lines(run / "metrics.jsonl", damaged=[])):
        yield Text(
            f"  {dropped} conversations are not recorded (record.every, record.best_and_worst); metrics are of all"
        )
    for note in damage_notes(damaged):
        yield Text(f"  {note}", style="yellow")
    held_out = "" if path.name.startswith("trajectories") else " --eval"
    groups = failed.ranked()
    yield from (Text(f"  {_failure(group, group.kind)}", style="red") for group in groups[:_MOST_GROUPS])
    yield from _others(groups[_MOST_GROUPS:], style="red")
    if latest:
        yield Text("  failed conversations are in no mean, and are not trained on", style="dim")
        yield Text(f"  the latest failure: turnwise show {run}{held_out} --id {latest}", style="dim")
    yield from _tool_errors(tools, f"turnwise show {run}{held_out}")
    if last:
        yield Text(f"show one: turnwise show {run}{held_out} --id {last}", style="dim")


_MOST_GROUPS = 5
_LONGEST_MESSAGE = 200  # characters of what a tool says


def _tool_errors(use: ToolCallCounts, show: str) -> Iterator[Text]:
    """How many calls of each tool failed, and their errors by tool and message; nothing if none failed."""
    failed = {name: tool for name, tool in use.tools.items() if tool.failed}
    if not failed:
        return
    ranked = sorted(failed.items(), key=lambda pair: -pair[1].failed)
    counts = [f"{tool.failed} of {tool.calls} of {_shown_tool(name)}" for name, tool in ranked[:_MOST_GROUPS]]
    more = [] if len(ranked) <= _MOST_GROUPS else [f"and of {len(ranked) - _MOST_GROUPS} others"]
    yield Text(f"{use.failed} of {use.calls} calls of tools failed: {', '.join([*counts, *more])}")
    for name, group in (groups := use.ranked())[:_MOST_GROUPS]:
        yield Text(f"  {_failure(group, f'{_shown_tool(name)}, {group.kind}')}", style="yellow")
    yield from _others([group for _, group in groups[_MOST_GROUPS:]], style="yellow")
    yield Text(f"  the latest of the first: {show} --id {groups[0][1].id}", style="dim")


def _others(groups: Sequence[FailureGroup], *, style: str) -> Iterator[Text]:
    """How many failures have none of the messages before."""
    if groups:
        yield Text(f"  {sum(group.count for group in groups)} x {counted(len(groups), 'other message')}", style=style)


def _shown_tool(name: str) -> str:
    return name or "no readable name"


def _failure(group: FailureGroup, what: str) -> str:
    notes = [] if group.step is None else [f"latest in step {group.step}"]
    if group.differ:
        notes.append("others differ in numbers or quoted texts")
    said = f" ({'; '.join(notes)})" if notes else ""
    return f"{group.count} x {what}: {group.message}{said}"


# `turnwise view`


def register_view(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = "Serve a web page on this machine that shows runs, also while they go on (docs/view.md)."
    parser.add_argument(
        "runs", nargs="*", type=Path, default=[Path("runs")], metavar="RUN",
        help="directories of runs, or a directory that contains runs; default: runs",
    )  # fmt: skip
    parser.add_argument("--port", type=port, help="the port; default: that of the last time, or any free port")
    parser.add_argument("--no-browser", action="store_true", help="print the address, and open no browser")
    parser.add_argument(
        "--export",
        type=Path,
        metavar="FILE",
        help="write the page with the runs into one HTML file instead of serving it",
    )
    parser.add_argument(
        "--most", type=count, default=200, metavar="N",
        help="with --export: the number of conversations of each run in the file, the latest first; default: 200",
    )  # fmt: skip
    parser.add_argument(
        "--id", action="append", default=[], metavar="ID", help="with --export: only the conversations with these ids"
    )
    parser.set_defaults(command=_run_view)


def _run_view(options: argparse.Namespace, context: Context) -> int:
    from turnwise.view.runs import ViewedRun, find_runs

    if options.export is None and (options.id or options.most != 200):
        raise ConfigError("--id and --most choose what --export writes: add --export FILE")
    runs = [ViewedRun(path) for path in find_runs(options.runs)]
    with contextlib.ExitStack() as stack:
        for run in runs:
            stack.callback(run.close)
        if options.export is not None:
            from turnwise.view.server import export

            size = export(runs, options.export, most=options.most, ids=options.id)
            print_lines(context.console, [f"{options.export}: {size / 1e6:.1f} MB; open it in a browser"])
            return 0
        import webbrowser

        from turnwise.view.server import Access, ViewServer, keep_access, kept_access

        access = kept_access()
        server = ViewServer(
            runs, port=access.port if options.port is None else options.port, token=access.token, paths=options.runs
        )
        keep_access(Access(access.token, server.port))
        print_lines(
            context.console,
            [f"{len(runs)} {'run' if len(runs) == 1 else 'runs'} at {server.address}", "stop with Ctrl-C"],
        )
        if not options.no_browser:
            webbrowser.open(server.address)
        server.serve_forever()
    return 0
