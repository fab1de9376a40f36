"""One recorded conversation as text: messages, tool calls, rewards, and its tokens if wanted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from turnwise.record.links import turns_of_messages
from turnwise.terminal.tables import number
from turnwise.types import Message, Segment, ToolSchema, Trajectory, Turn

__all__ = ["conversation"]

_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


def conversation(
    trajectory: Trajectory, *, tokens: bool = False, decode: Callable[[int], str] | None = None
) -> RenderableType:
    """One conversation: its row, the messages, the results of tool calls, the reward of each turn.

    `decode` gives the text of a token id, for the table of tokens; None leaves the column out.
    """
    parts: list[RenderableType] = list(_about(trajectory))
    for message, turns in zip(trajectory.messages, turns_of_messages(trajectory), strict=True):
        style = _STYLES.get(message["role"], "")
        for turn in turns or [None]:
            parts.append(Text(_heading(message, turn, trajectory.advantages), style=f"bold {style}"))
            parts.append(Text(turn.text if turn else str(message.get("content") or ""), style=style))
    if trajectory.error is not None:
        parts.append(Text(f"error ({trajectory.error.kind}): {trajectory.error.message}", style="bold red"))
    if trajectory.template_mismatch:
        parts.append(Text(f"template mismatch: {trajectory.template_mismatch}", style="red"))
    if tokens:
        weights = [turn.weight for turn in trajectory.turns]
        parts += [_tokens(segment, number, weights, decode) for number, segment in enumerate(trajectory.segments)]
    reward = "none" if trajectory.reward is None else f"{trajectory.reward:.3g}"
    step = "" if trajectory.step is None else f"step {trajectory.step}, "
    title = f"{trajectory.id}  ({step}reward {reward}, stop: {trajectory.stop}, {trajectory.seconds:.2f} s)"
    return Panel(Group(*parts), title=Text(title), title_align="left")  # an id may hold [brackets]


def _about(trajectory: Trajectory) -> Iterator[RenderableType]:
    """The row's columns, the tools and the parts of the reward, where there are any."""
    columns = trajectory.row.fields
    if columns:
        yield Text("row  " + ", ".join(f"{name}={_short(value)}" for name, value in columns.items()), style="dim")
    names = [_tool_name(tool) for tool in trajectory.tools]
    if names:
        yield Text("tools  " + ", ".join(names), style="dim")
    parts = trajectory.rewards
    if parts.keys() - {"turns"}:
        yield Text("rewards  " + ", ".join(f"{name} {number(value)}" for name, value in parts.items()), style="dim")


def _tool_name(tool: ToolSchema) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, Mapping) else tool).get("name", "?"))


def _short(value: Any, length: int = 120) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= length else f"{text[:length]}… ({len(text)} characters)"


def _heading(message: Message, turn: Turn | None, advantages: Sequence[float | Sequence[float]]) -> str:
    role = message["role"]
    if role == "tool":
        return f"tool {message.get('name', '')} ({message.get('tool_call_id', '')})"
    if turn is None:
        return role
    heading = f"{role}  reward {turn.reward:.3g}"
    if advantages:
        advantage = advantages[turn.index]
        heading += ", advantage " + (f"{advantage:+.2f}" if isinstance(advantage, int | float) else "per token")
    if turn.weight != 1.0:
        heading += f", weight {turn.weight:g}"
    if turn.kept_tokens is not None:
        heading += f", cut after {turn.kept_tokens} tokens"
    return heading


def _tokens(
    segment: Segment, number: int, weights: Sequence[float], decode: Callable[[int], str] | None
) -> RenderableType:
    table = Table(title=f"segment {number}: {len(segment)} tokens", title_justify="left", box=None)
    for name in ("token_ids", "turn", "weight", "logprobs", "version"):
        table.add_column(name, justify="right")
    if decode is not None:
        table.add_column("text", overflow="fold")
    for column in zip(segment.token_ids, segment.turn, segment.logprobs, segment.version, strict=True):
        token, turn, logprob, version = column
        weight = weights[turn] if turn >= 0 else 0.0
        style = "green" if weight else "yellow" if turn >= 0 else "dim"
        cells = [str(token), str(turn), f"{weight:g}", f"{logprob:.4f}", str(version)]
        texts = [] if decode is None else [Text(json.dumps(decode(token), ensure_ascii=False))]
        table.add_row(*cells, *texts, style=style)
    return table
