"""Runs as text: a summary, and single conversations. Reads what `record` wrote, and nothing else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from turnwise.errors import RunError

__all__ = ["conversation", "evaluations_table", "read_lines", "show", "sparkline"]

Record = Mapping[str, Any]

_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}
_LEVELS = "▁▂▃▄▅▆▇█"
_COLUMNS = {
    "reward": "reward/mean",
    "±": "reward/std",
    "turns": "turns/mean",
    "calls": "tool_calls/mean",
    "errors": "tool_errors/mean",
    "failed": "failed",
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


def show(
    console: Console, run: Path, *, trajectory: str | None, step: int | None, worst: int, failed: bool, tokens: bool
) -> None:
    """Print a run's summary, or the conversations that were asked for.

    Raises RunError if `run` is no run, or nothing in it fits.
    """
    path = run / "trajectories.jsonl"
    if not path.is_file():
        raise RunError(
            f"{run.absolute()} is no run: it has no trajectories.jsonl. `turnwise train`, `sft` and `rollout` make one"
        )
    if trajectory is None and step is None and not worst and not failed:
        console.print(_summary(run))
        return
    records = [one for one in read_lines(path) if step is None or one.get("step") == step]
    if trajectory is not None:
        records = [one for one in records if one["id"] == trajectory]
    if failed:
        records = [one for one in records if one["error"] is not None]
    if worst:
        records = sorted((one for one in records if one["reward"] is not None), key=lambda one: one["reward"])[:worst]
    if not records:
        raise RunError(f"no conversation in {path} fits; `turnwise show {run}` tells what there is")
    for one in records:
        console.print(conversation(one, tokens=tokens))


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a jsonl file; a last line that a killed run left half written is passed over."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                if line.endswith("\n"):
                    raise RunError(f"{path}:{number} is damaged: {error.msg} at column {error.colno}") from error


def conversation(record: Record, *, tokens: bool = False) -> RenderableType:
    """One conversation: who said what, what the calls came to, what each turn earned."""
    parts: list[RenderableType] = []
    turns = _turns_of_messages(record)
    for place, message in enumerate(record["messages"]):
        role, turn = message["role"], turns.get(place)
        parts.append(Text(_heading(role, turn, message), style=f"bold {_STYLES.get(role, '')}"))
        parts.append(Text(turn["text"] if turn else str(message.get("content") or ""), style=_STYLES.get(role, "")))
    if record["error"]:
        parts.append(Text(f"error ({record['error']['kind']}): {record['error']['message']}", style="bold red"))
    if record.get("drift"):
        parts.append(Text(f"drift: {record['drift']}", style="red"))
    if tokens:
        # records from before there were weights have none: all their turns were learnt from
        weights = [turn.get("weight", 1.0) for turn in record["turns"]]
        parts += [_tokens(segment, number, weights) for number, segment in enumerate(record["segments"])]
    reward = "none" if record["reward"] is None else f"{record['reward']:.3g}"
    where = f"step {record['step']}, " if "step" in record else ""
    title = f"{record['id']}  ({where}reward {reward}, stop: {record['stop']}, {record['seconds']:.2f} s)"
    return Panel(Group(*parts), title=Text(title), title_align="left")  # an id may hold [brackets]


def _turns_of_messages(record: Record) -> dict[int, Record]:
    """The turn behind each message that the model sampled; from the end, because a rewritten history leaves turns out."""
    waiting, found = list(record["turns"]), {}
    for place, message in reversed(list(enumerate(record["messages"]))):
        at = next((n for n in reversed(range(len(waiting))) if waiting[n]["message"] == message), None)
        if at is not None:
            found[place] = waiting[at]
            del waiting[at:]
    return found


def _heading(role: str, turn: Record | None, message: Record) -> str:
    if role == "tool":
        return f"tool {message.get('name', '')} ({message.get('tool_call_id', '')})"
    if turn is None:
        return role
    advantage = "" if turn["advantage"] is None else f", advantage {turn['advantage']:+.2f}"
    weight = turn.get("weight", 1.0)
    weighed = "" if weight == 1.0 else f", weight {weight:g}"
    return f"{role}  reward {turn['reward'] or 0:.3g}{advantage}{weighed}"


def _tokens(segment: Record, number: int, weights: Sequence[float]) -> RenderableType:
    table = Table(title=f"segment {number}: {len(segment['token_ids'])} tokens", title_justify="left", box=None)
    for name in ("token_ids", "turn", "weight", "logprobs", "version"):
        table.add_column(name, justify="right")
    for column in zip(segment["token_ids"], segment["turn"], segment["logprobs"], segment["version"], strict=True):
        token, turn, logprob, version = column
        weight = weights[turn] if turn >= 0 else 0.0
        style = "green" if weight else "yellow" if turn >= 0 else "dim"
        table.add_row(str(token), str(turn), f"{weight:g}", f"{logprob:.4f}", str(version), style=style)
    return table


def _summary(run: Path) -> RenderableType:
    parts: list[RenderableType] = []
    metrics = list(read_lines(run / "metrics.jsonl"))
    if metrics:
        told = (
            "reward/mean" if "reward/mean" in metrics[0] else "loss"
        )  # the latter of fine-tuning, which rewards nothing
        values = [one[told] for one in metrics if one[told] is not None]
        parts.append(Text(f"{run}: {len(metrics)} steps, {told.partition('/')[0]} {sparkline(values)}"))
        parts.append(_steps_table(metrics, _COLUMNS if told != "loss" else _SFT_COLUMNS))
    evaluations = list(read_lines(run / "evaluations.jsonl"))
    if evaluations:
        parts.append(evaluations_table(evaluations))
    stops: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    number, last = 0, ""
    for one in read_lines(run / "trajectories.jsonl"):
        number, last = number + 1, one["id"]
        stops[one["stop"]] += 1
        if one["error"]:
            errors[f"{one['error']['kind']}: {one['error']['message']}"] += 1
    parts.append(
        Text(f"{number} conversations; " + ", ".join(f"{stop} {count}" for stop, count in stops.most_common()))
    )
    parts += [Text(f"  {count} x {error}", style="red") for error, count in errors.most_common(5)]
    parts.append(Text(f"one of them: turnwise show {run} --id {last}", style="dim"))
    return Group(*parts)


def _steps_table(metrics: Sequence[Record], columns: Mapping[str, str]) -> Table:
    table = Table(box=None)
    for label in ("step", *columns):
        table.add_column(label, justify="right")
    stride = max(1, len(metrics) // 10)
    chosen = [one for place, one in enumerate(metrics) if place % stride == 0 or place == len(metrics) - 1]
    for one in chosen:
        table.add_row(str(one["step"]), *(number(one.get(name)) for name in columns.values()))
    return table


def evaluations_table(evaluations: Sequence[Record]) -> Table:
    """The first evaluation beside the last one."""
    first, last = evaluations[0], evaluations[-1]
    title = "held-out questions" if "reward/mean" in last else "held-out conversations"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column(f"before (step {first['step']})", justify="right")
    table.add_column(f"after (step {last['step']})", justify="right")
    names = ["reward/mean", "reward/std", "turns/mean", "tool_calls/mean", "tool_errors/mean", "entropy"]
    names = names if "reward/mean" in last else ["loss"]
    names += [name for name in last if name.startswith("stop/") and (first.get(name) or last.get(name))]
    for name in names:
        table.add_row(name, number(first.get(name)), number(last.get(name)))
    return table


def number(value: float | None) -> str:
    """A figure in a table; what there is no figure for is a dash."""
    return "-" if value is None else f"{value:.3f}"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """A curve in one line of text."""
    if not values:
        return ""
    shown = [values[place * len(values) // min(width, len(values))] for place in range(min(width, len(values)))]
    shown[-1] = values[-1]
    low, high = min(shown), max(shown)
    scale = (len(_LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(_LEVELS[round((value - low) * scale)] for value in shown) + f" {values[0]:.2f} → {values[-1]:.2f}"
