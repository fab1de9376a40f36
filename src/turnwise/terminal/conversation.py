"""One recorded conversation as text: messages, tool calls, rewards, and its tokens if wanted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from turnwise.record.reader import Record
from turnwise.terminal.tables import number

__all__ = ["conversation"]

_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


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
