"""What the doctor found, as data: a line for each question, and how such lines look."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.text import Text

from turnwise.errors import TurnwiseError
from turnwise.types import Segment

__all__ = ["Check", "Run", "Status", "as_json", "run_lengths", "show", "worst", "wrong"]

Status = Literal["ok", "note", "fail"]

_ORDER: tuple[Status, ...] = ("ok", "note", "fail")
_SHOWN = 200
"""Characters of a run: enough to see where it begins and where it ends."""
_STYLES = {"ok": "green", "note": "yellow", "fail": "bold red"}


@dataclass(frozen=True, slots=True)
class Run:
    """An unbroken run of tokens of one turn, or of nobody's."""

    turn: int
    """The turn that sampled it, -1 where nobody did."""
    weight: float
    """Of its tokens in the loss; 0 where nobody sampled them."""
    text: str


@dataclass(frozen=True, slots=True)
class Check:
    """The answer to one question about a model, or about a model and a recipe."""

    name: str
    status: Status
    """`note` is what a person should know and may leave as it is; `fail` is what makes the training wrong."""
    text: str
    """One line."""
    runs: Sequence[Run] = ()
    """A conversation to look at."""
    details: Sequence[tuple[str, str]] = ()
    """Names and values, a line each."""


def wrong(name: str, error: TurnwiseError) -> Check:
    """What a person can put right, on one line."""
    return Check(name, "fail", " ".join(str(error).split()))


def worst(statuses: Sequence[Status]) -> Status:
    """The worst of several; `ok` of none."""
    return _ORDER[max((_ORDER.index(status) for status in statuses), default=0)]


def run_lengths(segment: Segment) -> list[tuple[int, int, int]]:
    """Turn, beginning and end of each unbroken run of tokens with the same turn."""
    runs: list[tuple[int, int, int]] = []
    start = 0
    for end in range(1, len(segment) + 1):
        if end == len(segment) or segment.turn[end] != segment.turn[start]:
            runs.append((segment.turn[start], start, end))
            start = end
    return runs


def as_json(model: str, checks: Sequence[Check]) -> str:
    """One object: `{"model", "status", "checks": [{"name", "status", "text", "runs": [...], "details": [...]}]}`.

    A run is `{"turn", "weight", "text"}`, a detail `[name, value]`.
    """
    found = {"model": model, "status": _sum(checks), "checks": [asdict(one) for one in checks]}
    return json.dumps(found, ensure_ascii=False, indent=1)


def show(checks: Sequence[Check], console: Console) -> None:
    """A line for each check, what is trained on in bold, and the sum."""
    width = max(len(one.name) for one in checks)
    for one in checks:
        line = Text.assemble(
            (f"{one.status:4}", _STYLES[one.status]), "  ", (f"{one.name:{width}}", "bold"), "  ", one.text
        )
        console.print(line, soft_wrap=True)
        details_width = max([width, *(len(name) for name, _ in one.details)])
        for name, value in one.details:
            console.print(Text.assemble("      ", (f"{name:{details_width}}", "dim"), "  ", value), soft_wrap=True)
        for run in one.runs:
            mark = "context" if run.turn < 0 else f"turn {run.turn}" + ("" if run.weight == 1 else f" x{run.weight:g}")
            # a run's line ends are shown as such: what counts is where one run ends and the next begins
            text = (_short(repr(run.text)[1:-1]), "bold green" if run.weight > 0 else "dim")
            console.print(Text.assemble("      ", (f"{mark:{width}}", "dim"), "  ", text), soft_wrap=True)
    counts = {status: sum(one.status == status for one in checks) for status in _ORDER}
    verdict = "not right for training" if counts["fail"] else "right for training"
    console.print(
        Text(f"{verdict}: {counts['ok']} ok, {counts['note']} to know, {counts['fail']} wrong", _STYLES[_sum(checks)])
    )


def _sum(checks: Sequence[Check]) -> Status:
    return worst([one.status for one in checks])


def _short(text: str) -> str:
    """Its beginning and its end: a description of tools fills pages."""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} [...] {text[-_SHOWN // 2 :]}"
