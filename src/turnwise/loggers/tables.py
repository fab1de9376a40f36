"""Conversations as rows of a table, for trackers that show tables."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.types import Message, Trajectory

__all__ = ["COLUMNS", "rows", "text"]

COLUMNS = ("step", "id", "reward", "stop", "turns", "conversation")
_MOST = 20_000  # characters of a conversation


def rows(step: int, trajectories: Sequence[Trajectory]) -> list[list[str | int | float | None]]:
    """A row with `COLUMNS` for each trajectory."""
    return [[step, t.id, t.reward, str(t.stop), len(t.turns), text(t)] for t in trajectories]


def text(trajectory: Trajectory) -> str:
    """A conversation as plain text: each message after its role."""
    parts = [f"[{message.get('role')}]\n{_content(message)}" for message in trajectory.messages]
    if trajectory.error is not None:
        parts.append(f"[error: {trajectory.error.kind}]\n{trajectory.error.message}")
    return "\n\n".join(parts)[:_MOST]


def _content(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", f"<{part.get('type')}>")) for part in content if isinstance(part, dict))
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or ()]
    return "\n".join([*([str(content)] if content else []), *calls])
