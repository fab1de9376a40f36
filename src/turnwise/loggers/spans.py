"""The timed spans of a conversation: the conversation, its turns, and in each turn the engine's call and the tool calls.

The spans are made from the finished trajectory, which has all times. Nothing is measured during the conversation for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from turnwise.loggers.tables import text
from turnwise.types import Trajectory, Turn

__all__ = ["Span", "spans_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A piece of time, with the pieces inside it."""

    name: str
    kind: str
    """`conversation`, `turn`, `engine`, `environment` or `tool`."""
    start: float
    """Unix seconds."""
    end: float
    inputs: Any = None
    outputs: Any = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    children: tuple[Span, ...] = ()


def spans_of(trajectory: Trajectory) -> Span | None:
    """The spans of a conversation; None if its times are unknown."""
    if trajectory.started is None:
        return None
    children = tuple(span for turn in trajectory.turns if (span := _turn(turn)) is not None)
    end = max([trajectory.started + trajectory.seconds, *(span.end for span in children)])
    return Span(
        name=trajectory.id,
        kind="conversation",
        start=trajectory.started,
        end=end,
        inputs=trajectory.messages[: trajectory.turns[0].message_index] if trajectory.turns else [],
        outputs=text(trajectory),
        attributes={
            "group": trajectory.group,
            "row": trajectory.row.id,
            "reward": trajectory.reward,
            "stop": str(trajectory.stop),
            **{f"rewards.{name}": value for name, value in trajectory.rewards.items()},
        },
        error=None if trajectory.error is None else f"{trajectory.error.kind}: {trajectory.error.message}",
        children=children,
    )


def _turn(turn: Turn) -> Span | None:
    if turn.started is None or turn.ended is None:
        return None
    answered = turn.started + turn.seconds_engine
    tokens = None if turn.completion is None else len(turn.completion.token_ids)
    engine = Span(
        name="generate",
        kind="engine",
        start=turn.started,
        end=answered,
        outputs=turn.text,
        attributes={"finish_reason": turn.finish_reason, **({} if tokens is None else {"sampled_tokens": tokens})},
    )
    tools = tuple(_tools(turn, answered))
    end = max([turn.ended, *(tool.end for tool in tools)])
    environment = Span(name="environment", kind="environment", start=answered, end=end, children=tools)
    return Span(
        name=f"turn {turn.index}",
        kind="turn",
        start=turn.started,
        end=end,
        outputs=turn.message,
        attributes={"reward": turn.reward, "weight": turn.weight},
        children=(engine, environment),
    )


def _tools(turn: Turn, start: float) -> Iterator[Span]:
    """The tool calls of a turn. They run at the same time; only their duration is recorded."""
    for outcome in turn.outcomes:
        yield Span(
            name=outcome.name,
            kind="tool",
            start=start,
            end=start + outcome.seconds,
            inputs=dict(outcome.arguments),
            outputs=outcome.content,
            attributes={"attempts": outcome.attempts, "reward": outcome.reward},
            error=outcome.error,
        )
