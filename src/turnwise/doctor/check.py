"""The result of one check of `turnwise doctor`, and how results are printed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.text import Text

from turnwise.errors import TurnwiseError
from turnwise.types import Segment

Status = Literal["ok", "note", "fail"]

_ORDER: tuple[Status, ...] = ("ok", "note", "fail")
_SHOWN = 200
"""The longest text of a run that is printed in full, in characters."""
_STYLES = {"ok": "green", "note": "yellow", "fail": "bold red"}


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Consecutive tokens of one segment that belong to the same turn, or consecutive tokens of context."""

    turn: int
    """The turn in which the tokens were sampled; -1 for context."""
    weight: float
    """The weight of the tokens in the loss; 0 for context."""
    text: str


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check of a model, or of a model with a recipe."""

    name: str
    status: Status
    """`ok`: no problem. `note`: information; no change is needed. `fail`: the training would be wrong or would not start."""
    text: str
    """The result, on one line. After a failure also the rule and the fix."""
    runs: Sequence[TokenRun] = ()
    """An example conversation, printed below the line."""
    details: Sequence[tuple[str, str]] = ()
    """Names and values, printed below the line, one pair per line."""


def wrong(name: str, error: TurnwiseError) -> Check:
    """A failed check with the text of the error, on one line."""
    return Check(name, "fail", " ".join(str(error).split()))


def worst(statuses: Sequence[Status]) -> Status:
    """The worst of the statuses; `ok` if there are none."""
    return _ORDER[max((_ORDER.index(status) for status in statuses), default=0)]


def run_lengths(segment: Segment) -> list[tuple[int, int, int]]:
    """`(turn, start, end)` of each run of consecutive tokens that belong to the same turn; -1 is context."""
    runs: list[tuple[int, int, int]] = []
    start = 0
    for end in range(1, len(segment) + 1):
        if end == len(segment) or segment.turn[end] != segment.turn[start]:
            runs.append((segment.turn[start], start, end))
            start = end
    return runs


def as_json(model: str, checks: Sequence[Check]) -> str:
    """All checks as a JSON object: `{"model", "status", "checks": [{"name", "status", "text", "runs": [], "details": []}]}`.

    A run is `{"turn", "weight", "text"}`, a detail `[name, value]`.
    """
    report = {"model": model, "status": _overall(checks), "checks": [asdict(check) for check in checks]}
    return json.dumps(report, ensure_ascii=False, indent=1)


def show(checks: Sequence[Check], console: Console, *, verdict: bool = True) -> None:
    """Print a line for each check, and then the overall result if `verdict` is set. Tokens that are trained on are bold."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        line = Text.assemble(
            (f"{check.status:4}", _STYLES[check.status]), "  ", (f"{check.name:{width}}", "bold"), "  ", check.text
        )
        console.print(line, soft_wrap=True)
        details_width = max([width, *(len(name) for name, _ in check.details)])
        for name, value in check.details:
            console.print(Text.assemble("      ", (f"{name:{details_width}}", "dim"), "  ", value), soft_wrap=True)
        for run in check.runs:
            mark = "context" if run.turn < 0 else f"turn {run.turn}" + ("" if run.weight == 1 else f" x{run.weight:g}")
            # line ends are shown as \n, so that each run stays on one line and its first and last characters are visible
            text = (_short(repr(run.text)[1:-1]), "bold green" if run.weight > 0 else "dim")
            console.print(Text.assemble("      ", (f"{mark:{width}}", "dim"), "  ", text), soft_wrap=True)
    if verdict:
        _show_verdict(checks, console)


def _show_verdict(checks: Sequence[Check], console: Console) -> None:
    counts = {status: sum(check.status == status for check in checks) for status in _ORDER}
    text = "not ready for training" if counts["fail"] else "ready for training"
    notes = ", ".join(check.name for check in checks if check.status == "note")
    console.print(
        Text(
            f"{text}: {counts['ok']} ok, notes: {counts['note']}{f' ({notes})' if notes else ''}, failures: {counts['fail']}",
            _STYLES[_overall(checks)],
        )
    )


def _overall(checks: Sequence[Check]) -> Status:
    return worst([check.status for check in checks])


def _short(text: str) -> str:
    """The beginning and the end of a long text, such as the descriptions of tools."""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} [...] {text[-_SHOWN // 2 :]}"


def override_notes(checks: Sequence[Check], overridden: Sequence[str]) -> list[str]:
    """What the start of a run says of checks that the recipe overrides: those that fail, and those that need not be named."""
    passed = {check.name for check in checks if check.status == "ok"}
    return [f"override_checks: {check.name} fails: {check.text}" for check in checks if check.status == "fail"] + [
        f"override_checks: {name} does not fail, so it need not be named" for name in overridden if name in passed
    ]
