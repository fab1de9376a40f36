"""Runs as text: a summary, and single conversations. Reads what `record` wrote, and nothing else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from turnwise.errors import Failed, RunError, boundary
from turnwise.json_yaml import parse_yaml, read_text
from turnwise.record.reader import Record, read_lines, read_trajectories

__all__ = ["conversation", "evaluations_table", "number", "show", "sparkline", "token_texts"]

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
    console: Console,
    run: Path,
    *,
    trajectory: str | None = None,
    step: int | None = None,
    worst: int = 0,
    best: int = 0,
    last: int = 0,
    failed: bool = False,
    evaluation: bool = False,
    tokens: bool = False,
) -> None:
    """Print a run's summary, or the conversations that were asked for.

    `step`, `trajectory` and `failed` select; `worst`, `best` or `last` take that many of the selected. `evaluation` reads the
    held-out conversations instead of those of training.

    Raises RunError if `run` is no run, its record is damaged, or nothing in it fits.
    """
    path = run / ("eval_trajectories.jsonl" if evaluation else "trajectories.jsonl")
    if not (run / "trajectories.jsonl").is_file():
        raise RunError(
            f"{run.absolute()} is no run: it has no trajectories.jsonl. `turnwise train`, `sft` and `rollout` make one"
        )
    if not path.is_file():
        raise RunError(f"{run.absolute()} has no evaluations: the recipe names no held-out rows (data.eval)")
    counts = [name for name, count in (("--worst", worst), ("--best", best), ("--last", last)) if count]
    if len(counts) > 1:
        raise RunError(f"{' and '.join(counts)} choose differently: give one of them")
    if trajectory is None and step is None and not failed and not counts:
        if tokens:
            raise RunError(
                "--tokens needs conversations to show: add --id, --step, --worst, --best, --last or --failed"
            )
        for part in _summary(run, path):
            console.print(part, soft_wrap=isinstance(part, Text))  # a path stays in one piece
        return
    found = [
        one
        for one in read_trajectories(path)
        if (step is None or one.get("step") == step)
        and (trajectory is None or one["id"] == trajectory)
        and (not failed or one["error"] is not None)
    ]
    if worst or best:
        scored = [one for one in found if one["reward"] is not None]
        found = sorted(scored, key=lambda one: one["reward"], reverse=bool(best))[: worst or best]
    if last:
        found = found[-last:]
    if not found:
        raise RunError(f"no conversation in {path} fits; `turnwise show {run}` tells what there is")
    decode = token_texts(run) if tokens else None
    for one in found:
        console.print(conversation(one, tokens=tokens, decode=decode))


def conversation(record: Record, *, tokens: bool = False, decode: Callable[[int], str] | None = None) -> RenderableType:
    """One conversation: its row, who said what, what the calls came to, what each turn earned.

    `decode` gives the text of a token id, for the table of tokens; None leaves the column out.
    """
    parts: list[RenderableType] = list(_about(record))
    turns = _turns_of_messages(record)
    for place, message in enumerate(record["messages"]):
        role, turn = message["role"], turns.get(place)
        parts.append(Text(_heading(role, turn, message), style=f"bold {_STYLES.get(role, '')}"))
        parts.append(Text(turn["text"] if turn else str(message.get("content") or ""), style=_STYLES.get(role, "")))
    if record["error"]:
        parts.append(Text(f"error ({record['error']['kind']}): {record['error']['message']}", style="bold red"))
    if record.get("template_mismatch"):
        parts.append(Text(f"template mismatch: {record['template_mismatch']}", style="red"))
    if tokens:
        # records from before there were weights have none: all their turns were learnt from
        weights = [turn.get("weight", 1.0) for turn in record["turns"]]
        parts += [_tokens(segment, number, weights, decode) for number, segment in enumerate(record["segments"])]
    reward = "none" if record["reward"] is None else f"{record['reward']:.3g}"
    where = f"step {record['step']}, " if "step" in record else ""
    title = f"{record['id']}  ({where}reward {reward}, stop: {record['stop']}, {record['seconds']:.2f} s)"
    return Panel(Group(*parts), title=Text(title), title_align="left")  # an id may hold [brackets]


def _about(record: Record) -> Iterator[RenderableType]:
    """The row's columns, the tools and the parts of the reward, where there are any."""
    columns = {name: value for name, value in record.get("row", {}).items() if name != "id"}
    if columns:
        yield Text("row  " + ", ".join(f"{name}={_short(value)}" for name, value in columns.items()), style="dim")
    names = [_tool_name(tool) for tool in record.get("tools", ())]
    if names:
        yield Text("tools  " + ", ".join(names), style="dim")
    parts = record.get("rewards", {})
    if parts.keys() - {"turns"}:
        yield Text("rewards  " + ", ".join(f"{name} {number(value)}" for name, value in parts.items()), style="dim")


def _tool_name(tool: Record) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, Mapping) else tool).get("name", "?"))


def _short(value: Any, length: int = 120) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= length else f"{text[:length]}… ({len(text)} characters)"


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


def _tokens(
    segment: Record, number: int, weights: Sequence[float], decode: Callable[[int], str] | None
) -> RenderableType:
    table = Table(title=f"segment {number}: {len(segment['token_ids'])} tokens", title_justify="left", box=None)
    for name in ("token_ids", "turn", "weight", "logprobs", "version"):
        table.add_column(name, justify="right")
    if decode is not None:
        table.add_column("text", overflow="fold")
    for column in zip(segment["token_ids"], segment["turn"], segment["logprobs"], segment["version"], strict=True):
        token, turn, logprob, version = column
        weight = weights[turn] if turn >= 0 else 0.0
        style = "green" if weight else "yellow" if turn >= 0 else "dim"
        cells = [str(token), str(turn), f"{weight:g}", f"{logprob:.4f}", str(version)]
        texts = [] if decode is None else [Text(json.dumps(decode(token), ensure_ascii=False))]
        table.add_row(*cells, *texts, style=style)
    return table


def token_texts(run: Path) -> Callable[[int], str] | None:
    """The text of each token id by the run's own tokenizer; None where no `tokenizer.json` is found.

    Raises RunError if the tokenizer cannot be read.
    """
    from tokenizers import Tokenizer

    file = next((file for file in _tokenizer_files(run) if file.is_file()), None)
    if file is None:
        return None
    try:
        with boundary("tokenizer"):  # tokenizers raises no class of its own
            tokenizer = Tokenizer.from_file(str(file))
    except Failed as failed:
        raise RunError(f"{file} cannot be read as a tokenizer: {failed.failure.message}") from None
    return lambda token: tokenizer.decode([token], skip_special_tokens=False) if 0 <= token < 2**32 else "?"


def _tokenizer_files(run: Path) -> Iterator[Path]:
    """Where a run's tokenizer may lie: in its newest checkpoint, or in the model that it began with."""
    yield run / "checkpoint" / "tokenizer.json"
    yield from sorted(run.glob("checkpoints/step-*/tokenizer.json"), reverse=True)
    config = run / "config.yaml"
    tree = (
        parse_yaml(read_text(config, error=RunError), where=str(config), error=RunError) if config.is_file() else None
    )
    model = tree.get("model") if isinstance(tree, dict) else None
    if isinstance(model, dict) and isinstance(model.get("path"), str):
        yield Path(model["path"]).expanduser() / "tokenizer.json"


def _summary(run: Path, path: Path) -> Iterator[RenderableType]:
    """The steps, the evaluations, and the conversations of `path`: how they ended and what broke."""
    metrics = list(read_lines(run / "metrics.jsonl"))
    if metrics:
        # fine-tuning has a loss and no reward
        curve = "reward/mean" if "reward/mean" in metrics[0] else "loss"
        values = [one[curve] for one in metrics if isinstance(one.get(curve), int | float)]
        yield Text(f"{run}: {len(metrics)} steps, {curve.partition('/')[0]} {sparkline(values)}")
        yield _steps_table(metrics, _COLUMNS if curve != "loss" else _SFT_COLUMNS)
    evaluations = list(read_lines(run / "evaluations.jsonl"))
    if evaluations:
        yield evaluations_table(evaluations)
    stops: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    number, last = 0, ""
    for one in read_trajectories(path):
        number, last = number + 1, one["id"]
        stops[one["stop"]] += 1
        if one["error"]:
            errors[f"{one['error']['kind']}: {one['error']['message']}"] += 1
    yield Text(f"{number} conversations; " + ", ".join(f"{stop} {count}" for stop, count in stops.most_common()))
    for error, count in errors.most_common(5):
        yield Text(f"  {count} x {error}", style="red")
    if number:
        held_out = "" if path.name == "trajectories.jsonl" else " --eval"
        yield Text(f"one of them: turnwise show {run}{held_out} --id {last}", style="dim")


def _steps_table(metrics: Sequence[Record], columns: Mapping[str, str]) -> Table:
    table = Table(box=None)
    for label in ("step", *columns):
        table.add_column(label, justify="right")
    stride = max(1, len(metrics) // 10)
    chosen = [one for place, one in enumerate(metrics) if place % stride == 0 or place == len(metrics) - 1]
    for one in chosen:
        table.add_row(str(one.get("step", "-")), *(number(one.get(name)) for name in columns.values()))
    return table


def evaluations_table(evaluations: Sequence[Record]) -> Table:
    """The first evaluation beside the last one; where there is only one, as after an early Ctrl-C, that one alone."""
    first, last = evaluations[0], evaluations[-1]
    title = "held-out questions" if "reward/mean" in last else "held-out conversations"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    shown = [first, last] if len(evaluations) > 1 else [last]
    for label, one in zip(("before", "after") if len(shown) > 1 else ("so far",), shown, strict=True):
        table.add_column(f"{label} (step {one.get('step', '-')})", justify="right")
    names = ["reward/mean", "reward/std", "turns/mean", "tool_calls/mean", "tool_errors/mean", "entropy"]
    names = names if "reward/mean" in last else ["loss"]
    names += [name for name in last if name.startswith("stop/") and (first.get(name) or last.get(name))]
    for name in names:
        table.add_row(name, *(number(one.get(name)) for one in shown))
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
