"""What the doctor found, as data: a line for each question, and how such lines look."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.text import Text

from turnwise.types import Segment

__all__ = ["Check", "Status", "as_json", "run_lengths", "show", "worst"]

Status = Literal["ok", "note", "fail"]

_ORDER: tuple[Status, ...] = ("ok", "note", "fail")
_STYLES = {"ok": "green", "note": "yellow", "fail": "bold red"}


@dataclass(frozen=True, slots=True)
class Check:
    """The answer to one question about a model, or about a model and a recipe."""

    name: str
    status: Status
    """`note` is what a person should know and may leave as it is; `fail` is what makes the training wrong."""
    text: str
    """One line."""
    runs: Sequence[tuple[int, str]] = ()
    """A conversation to look at: the turn that sampled it (-1 where nobody did) and the text of each unbroken run of tokens."""


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
    """One object: `{"model", "status", "checks": [{"name", "status", "text", "runs"}]}`."""
    found = {"model": model, "status": worst([one.status for one in checks]), "checks": [asdict(one) for one in checks]}
    return json.dumps(found, ensure_ascii=False)


def show(checks: Sequence[Check], console: Console) -> None:
    """A line for each check, and what the model is trained on in bold."""
    width = max(len(one.name) for one in checks)
    for one in checks:
        line = Text.assemble(
            (f"{one.status:4}", _STYLES[one.status]), "  ", (f"{one.name:{width}}", "bold"), "  ", one.text
        )
        console.print(line, soft_wrap=True)
        for turn, text in one.runs:
            style = "dim" if turn < 0 else "bold green"
            mark = "context" if turn < 0 else f"turn {turn}"
            # a run's line ends are shown as such: what counts is where one run ends and the next begins
            console.print(Text.assemble("      ", (f"{mark:8}", "dim"), (repr(text)[1:-1], style)), soft_wrap=True)
