"""Statistics of the conversations of a run over its steps: rewards of parts and turns, and tool calls.

They are computed from the index. Knows no files, and nothing of the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnwise.view.index import ConversationIndex

_MOST_TURNS = 8  # curves in one chart
_MOST_MESSAGES = 50
_ANY = "*"
_OF_ROWS = "agent IS NULL"  # as reward/mean: without the agents that environments opened


def statistics(index: ConversationIndex) -> dict[str, Any]:
    """What the page of statistics shows. `steps` is the axis of all curves, whose values are null where a step has none.

    `parts` and `turns` have mean rewards: by the name of the part, and of turn 0, 1, ... `tools` has for each tool the sums, and
    the calls, errors and mean seconds of each step; `messages` has the errors by message, the most frequent first, with the
    latest conversation of each. Raises RunError if the index cannot be read.
    """
    steps = [
        step for (step,) in index.query("SELECT DISTINCT step FROM conversations WHERE step IS NOT NULL ORDER BY 1")
    ]
    place = {step: n for n, step in enumerate(steps)}
    parts, turns = _of_rewards(index, "parts", place), _of_rewards(index, "turn_rewards", place)
    return {
        "steps": steps,
        "parts": parts,
        "turns": [turns[n] for n in sorted(turns)[:_MOST_TURNS]],
        "tools": _tools(index, place),
        "messages": _messages(index),
    }


def _of_rewards(index: ConversationIndex, column: str, place: dict[float, int]) -> dict[Any, list[float | None]]:
    """The mean over the conversations of a step of each entry of a JSON column, by its key."""
    found = index.query(
        f"SELECT step, one.key, avg(one.value) FROM excerpts JOIN conversations USING (number), json_each({column}) AS one "
        f"WHERE step IS NOT NULL AND {_OF_ROWS} AND one.value IS NOT NULL GROUP BY 1, 2"
    )
    curves: dict[Any, list[float | None]] = {key: [None] * len(place) for key in sorted({key for _, key, _ in found})}
    for step, key, mean in found:
        curves[key][place[step]] = mean
    return curves


def _tools(index: ConversationIndex, place: dict[float, int]) -> list[dict[str, Any]]:
    """The tools, the most used first."""
    sums = index.query(
        "SELECT tool, count(*), count(error), avg(seconds), max(seconds), count(DISTINCT number) FROM calls "
        "GROUP BY 1 ORDER BY 2 DESC"
    )
    names = ("tool", "calls", "errors", "seconds", "longest", "conversations")
    tools = {row[0]: {**dict(zip(names, row, strict=True)), "by_step": _curves(len(place))} for row in sums}
    by_step = index.query(
        "SELECT tool, step, count(*), count(calls.error), avg(calls.seconds) FROM calls JOIN conversations USING (number) "
        "WHERE step IS NOT NULL GROUP BY 1, 2"
    )
    for tool, step, *values in by_step:
        for curve, value in zip(tools[tool]["by_step"].values(), values, strict=True):
            curve[place[step]] = value
    return list(tools.values())


def _curves(steps: int) -> dict[str, list[float | None]]:
    return {"calls": [0] * steps, "errors": [0] * steps, "seconds": [None] * steps}


def _messages(index: ConversationIndex) -> list[dict[str, Any]]:
    # SQLite takes the other columns from the row with the maximum
    found = index.query(
        "SELECT tool, calls.error, pattern, message, count(*), count(DISTINCT number), max(number), id, step "
        "FROM calls JOIN conversations USING (number) WHERE calls.error IS NOT NULL GROUP BY 1, 2, 3 ORDER BY 5 DESC LIMIT ?",
        _MOST_MESSAGES,
    )
    names = ("tool", "error", "pattern", "message", "calls", "conversations", "number", "id", "step")
    return [dict(zip(names, row, strict=True)) for row in found]


def with_calls(index: ConversationIndex, *, tool: str | None, error: str | None, pattern: str | None) -> Sequence[int]:
    """The numbers of the conversations with a call of a tool; if given, with this error ("*": any), and this pattern of its
    message."""
    conditions = {"tool": tool, "error": error, "pattern": pattern}
    given = {name: value for name, value in conditions.items() if value is not None}
    if any_error := error == _ANY:
        del given["error"]
    where = " AND ".join([*(f"{name} = ?" for name in given), *(["error IS NOT NULL"] if any_error else [])]) or "TRUE"
    found = index.query(f"SELECT DISTINCT number FROM calls WHERE {where} ORDER BY 1", *given.values())
    return [number for (number,) in found]
