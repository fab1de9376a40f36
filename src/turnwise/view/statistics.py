"""Statistics of the conversations of a run over its steps: rewards of parts and turns, and tool calls.

They are computed from the index, which may grow or be emptied between two of their queries: all read the numbers that were
indexed at the beginning, and what one of them has not found, the others leave out. Knows no files, and nothing of the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnwise.view.index import ConversationIndex

_MOST_CURVES = 8  # in one chart
_MOST_TOOLS = 50  # a model may invent a name for each call
_MOST_MESSAGES = 50
_ANY = "*"
_OF_ROWS = "agent IS NULL"  # as reward/mean: without the agents that environments opened
_INDEXED = "number >= ? AND number < ?"


def statistics(index: ConversationIndex) -> dict[str, Any]:
    """What the page of statistics shows. `steps` is the axis of all curves, whose values are null where a step has none.

    `parts` and `turns` have mean rewards: by the name of the part, and of turn 0, 1, ...; of more turns than fit into a chart,
    the first ones and the last (`turn_count` counts all). `tools` has the sums of the tools with the most calls, and of those
    that are drawn the calls, errors and mean seconds of each step (`by_step`, else null); `other_tools` has the sums of all other
    tools, or null. `messages` has the errors by message, the most frequent first, with the latest conversation of each. Raises
    RunError if the index cannot be read.
    """
    known = index.indexed
    found = index.query(
        f"SELECT DISTINCT step FROM conversations WHERE step IS NOT NULL AND {_INDEXED} ORDER BY 1",
        known.start,
        known.stop,
    )
    place = {step: n for n, (step,) in enumerate(found)}
    turns = _of_rewards(index, known, "turn_rewards", place)
    drawn = sorted(turns) if len(turns) <= _MOST_CURVES else [*sorted(turns)[: _MOST_CURVES - 1], max(turns)]
    tools, others = _tools(index, known, place)
    return {
        "steps": list(place),
        "parts": _of_rewards(index, known, "parts", place),
        "turns": {n: turns[n] for n in drawn},
        "turn_count": len(turns),
        "tools": tools,
        "other_tools": others,
        "messages": _messages(index, known),
    }


def _of_rewards(
    index: ConversationIndex, known: range, column: str, place: dict[float, int]
) -> dict[Any, list[float | None]]:
    """The mean over the conversations of a step of each entry of a JSON column, by its key."""
    found = index.query(
        f"SELECT step, one.key, avg(one.value) FROM excerpts JOIN conversations USING (number), json_each({column}) AS one "
        f"WHERE step IS NOT NULL AND {_INDEXED} AND {_OF_ROWS} AND one.value IS NOT NULL GROUP BY 1, 2",
        known.start,
        known.stop,
    )
    curves: dict[Any, list[float | None]] = {key: [None] * len(place) for key in sorted({key for _, key, _ in found})}
    for step, key, mean in found:
        if step in place:
            curves[key][place[step]] = mean
    return curves


def _tools(
    index: ConversationIndex, known: range, place: dict[float, int]
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The tools, the most used first, and the sums of those beyond `_MOST_TOOLS`."""
    sums = "count(*), count(error), avg(seconds), max(seconds), count(DISTINCT number)"
    ranked = index.query(
        f"SELECT tool, {sums} FROM calls WHERE {_INDEXED} GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT ?",
        known.start,
        known.stop,
        _MOST_TOOLS,
    )
    names = [row[0] for row in ranked]
    columns = ("tool", "calls", "errors", "seconds", "longest", "conversations")
    tools = [dict(zip(columns, row, strict=True)) for row in ranked]
    others = None
    if len(tools) == _MOST_TOOLS:
        ((count, *rest),) = index.query(
            f"SELECT count(DISTINCT tool), {sums} FROM calls WHERE {_INDEXED} AND tool NOT IN ({_marks(names)})",
            known.start,
            known.stop,
            *names,
        )
        others = {"tools": count, **dict(zip(columns[1:], rest, strict=True))} if count else None
    curves = _by_step(index, known, names[:_MOST_CURVES], place)
    return [{**tool, "by_step": curves.get(tool["tool"])} for tool in tools], others


def _by_step(
    index: ConversationIndex, known: range, tools: Sequence[str], place: dict[float, int]
) -> dict[str, dict[str, list[float | None]]]:
    """Calls, errors and mean seconds in each step, by tool."""
    found = index.query(
        "SELECT tool, step, count(*), count(calls.error), avg(calls.seconds) FROM calls JOIN conversations USING (number) "
        f"WHERE step IS NOT NULL AND {_INDEXED} AND tool IN ({_marks(tools)}) GROUP BY 1, 2",
        known.start,
        known.stop,
        *tools,
    )
    curves: dict[str, dict[str, list[float | None]]] = {
        tool: {"calls": [0] * len(place), "errors": [0] * len(place), "seconds": [None] * len(place)} for tool in tools
    }
    for tool, step, *values in found:
        if step in place:
            for curve, value in zip(curves[tool].values(), values, strict=True):
                curve[place[step]] = value
    return curves


def _marks(values: Sequence[Any]) -> str:
    return ", ".join("?" * len(values))


def _messages(index: ConversationIndex, known: range) -> list[dict[str, Any]]:
    # SQLite takes the other columns from the row with the maximum
    found = index.query(
        "SELECT tool, calls.error, pattern, message, count(*), count(DISTINCT number), max(number), id, step "
        f"FROM calls JOIN conversations USING (number) WHERE calls.error IS NOT NULL AND {_INDEXED} "
        "GROUP BY 1, 2, 3 ORDER BY 5 DESC LIMIT ?",
        known.start,
        known.stop,
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
