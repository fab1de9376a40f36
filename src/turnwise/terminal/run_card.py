"""A run as a person shares it: as HTML for a notebook, and as the model card of its checkpoint.

The HTML has no script, and every text in it is escaped: the model wrote some of them.
"""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.errors import RunError, counted
from turnwise.record.reader import RecordedTrajectories, read_lines
from turnwise.record.summary import RunMetrics, RunSummary, changed_from_defaults, summarize_run
from turnwise.terminal.runs import option_text, state_line
from turnwise.types import Trajectory

_METRICS = ("reward/mean", "eval/reward/mean", "eval/pass_rate", "loss", "eval/loss", "entropy", "turns/mean", "failed")
_LONGEST = 4000
"""Characters of a message in a notebook."""
_RECENT = 256
"""Conversations, from the end of the record, of which the best, the worst and the median are shown."""


# HTML


def run_html(directory: Path) -> str:
    """How a run ended, its curve, its metrics, and three of its latest conversations: best, median and worst.

    Raises RunError if the directory is not a run.
    """
    run = summarize_run(directory)
    title = html.escape(state_line(run).plain)
    warnings = "".join(
        f"<li>step {w.step}: {html.escape(w.name)}: {html.escape(w.text)}</li>" for w in run.warnings[:10]
    )
    name = "reward/mean" if "reward/mean" in run.metrics else "loss"
    parts = [
        f"<p style='white-space:pre-wrap'><b>{title}</b></p>",
        f"<ul>{warnings}</ul>" if warnings else "",
        _curve(list(read_lines(directory / "metrics.jsonl", damaged=[])), name),
        _html_table(run),
        *(_conversation(label, one) for label, one in _three(directory)),
    ]
    return f"<div>{''.join(parts)}</div>"


def _curve(lines: Sequence[Mapping[str, Any]], name: str, width: int = 480, height: int = 120) -> str:
    """A metric over the steps as SVG; nothing with fewer than two values."""
    points = [(i, line[name]) for i, line in enumerate(lines) if type(line.get(name)) in (int, float)]
    if len(points) < 2:
        return ""
    low, high = min(value for _, value in points), max(value for _, value in points)
    across, up = width / max(points[-1][0], 1), height / ((high - low) or 1.0)
    path = " ".join(f"{x * across:.1f},{height - (y - low) * up:.1f}" for x, y in points)
    return (
        f"<figure style='margin:0'><svg viewBox='-4 -4 {width + 8} {height + 8}' width='{width}' role='img' "
        f"aria-label='{html.escape(name)}'><polyline points='{path}' fill='none' stroke='#2563eb' stroke-width='2'/></svg>"
        f"<figcaption>{html.escape(name)}: {low:z.3g} to {high:z.3g}, last {points[-1][1]:z.3g}</figcaption></figure>"
    )


def _html_table(run: RunSummary) -> str:
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in _rows(run))
    return (
        f"<table><tr><th>metric</th><th>last</th><th>best</th><th>step of the best</th></tr>{rows}</table>"
        if rows
        else ""
    )


def _rows(run: RunSummary) -> list[tuple[str, str, str, str]]:
    rows: list[tuple[str, str, str, str]] = []
    for name in _METRICS:
        of_policy = name == "loss" and run.kind == "train"  # a policy loss says nothing of how good the policy is
        if (values := run.metrics.get(name)) is not None and not of_policy:
            best, step = values.best(name)
            no_best = best is None
            rows.append((name, f"{values.last:z.4g}", "" if no_best else f"{best:z.4g}", "" if no_best else str(step)))
    return rows


def _three(directory: Path) -> list[tuple[str, Trajectory]]:
    """The best, the median and the worst of the latest conversations of rows with a reward; fewer if there are fewer."""
    try:
        latest = RecordedTrajectories(directory, damaged=[])[-_RECENT:]
    except RunError:  # a run that has recorded none yet
        return []
    scored = sorted((t for t in latest if t.reward is not None and not t.agent), key=lambda t: -(t.reward or 0.0))
    places = dict.fromkeys((0, len(scored) // 2, len(scored) - 1)) if scored else {}
    return [(label, scored[place]) for label, place in zip(("best", "median", "worst"), places, strict=False)]


def _conversation(label: str, one: Trajectory) -> str:
    messages = "".join(
        f"<p style='white-space:pre-wrap;margin:2px'><b>{html.escape(str(message.get('role')))}</b> "
        f"{html.escape(_text(message))}</p>"
        for message in one.messages
    )
    return f"<details><summary>{label}: reward {one.reward:g}, {html.escape(one.id)}</summary>{messages}</details>"


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, default=str, ensure_ascii=False)
    if calls := message.get("tool_calls"):
        text = f"{text or ''}\n{json.dumps(calls, default=str, ensure_ascii=False)}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


# model card


def model_card(directory: Path, *, name: str, curve: bool, link: str = "checkpoint") -> str:
    """The README.md of a model repository: what was trained until the checkpoint that `link` names (`checkpoint`: the newest;
    `best`), the metrics until then, and the recipe.

    `curve` is whether the repository has the picture curve.png. Raises RunError if the directory is not a run.
    """
    run = summarize_run(directory)
    ran, run = run.step, _until_checkpoint(run, link)
    base = str(run.options.get("model.path", ""))
    known = base.count("/") == 1 and not base.startswith((".", "/", "~")) and not Path(base).exists()
    adapter = any(key == "model.lora.rank" and value is not None for key, value in run.options.items())
    head = ["---", "library_name: peft" if adapter else "library_name: transformers", "pipeline_tag: text-generation"]
    head += [f"base_model: {base}"] if known else []
    head += ["tags:", "- turnwise", "- reinforcement-learning" if run.kind == "train" else "- sft", "---"]
    further = f", and it went on to step {ran}" if ran != run.step else ""
    done = f"{run.step} of {counted(run.steps, 'step')}" if run.steps is not None else counted(run.step or 0, "step")
    how = "reinforcement learning over multi-turn conversations" if run.kind == "train" else "supervised fine-tuning"
    metrics = ["| metric | last | best | step of the best |", "|---|---|---|---|"]
    metrics += [f"| `{name_}` | {last} | {best} | {step} |" for name_, last, best, step in _rows(run)]
    options = ["| option | value | default |", "|---|---|---|"]
    for key, (value, default) in changed_from_defaults(run.options).items():
        options.append(f"| `{key}` | `{_cell(published(value))}` | `{_cell(default)}` |")
    lines = [
        *head,
        "",
        f"# {name.rpartition('/')[2]}",
        "",
        f"Trained with [turnwise](https://pypi.org/project/turnwise/) by {how}: {done} (the run: {run.state}{further}), "
        f"from `{_cell(published(base))}`.",
        "",
        *(["![The curve of the run](curve.png)", ""] if curve else []),
        *metrics,
        "",
        "## Recipe",
        "",
        "The complete recipe is `recipe.yaml`. These options differ from the defaults:",
        "",
        *options,
        "",
    ]
    return "\n".join(lines)


def published(value: Any) -> Any:
    """A value of a recipe as others may see it: of what lies on this machine, in lists and mappings too, only the name.

    Example: `/home/ann/rows/train.jsonl` is `train.jsonl`, and `/home/ann/env.py:game` is `env.py:game`, if there are such files.
    """
    if isinstance(value, Mapping):
        return {name: published(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [published(part) for part in value]
    if not isinstance(value, str) or not value.startswith(("/", "~")):
        return value
    place, *name = value.partition(":")
    path = Path(place).expanduser()
    try:
        known = path.parent.is_dir()
    except OSError:  # too long for a name
        known = False
    of_root = path.parent == path.parent.parent  # such as /think, which is no path
    return "".join((path.name, *name)) if known and not of_root else value


def _until_checkpoint(run: RunSummary, link: str) -> RunSummary:
    """The run as it was when the checkpoint that `link` names was written: with this step, and the metrics of the steps until
    then. The run itself where its checkpoint has no step."""
    try:
        # checkpoint -> checkpoints/step-000004/model
        about = json.loads(((run.path / link).resolve().parent / "checkpoint.json").read_text(encoding="utf-8"))
        step = about["step"]
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):  # a model that was put there by hand
        return run
    lines, evaluations = (
        [line for line in read_lines(run.path / name, damaged=[]) if line.get("step", 0) <= step]
        for name in ("metrics.jsonl", "evaluations.jsonl")
    )
    return dataclasses.replace(run, step=step, metrics=RunMetrics(lines, evaluations))


def _cell(value: Any) -> str:
    return option_text(value).replace("|", "\\|").replace("`", "'")
