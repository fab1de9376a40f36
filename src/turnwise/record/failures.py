"""Failures of conversations and errors of tools, grouped by kind and message, the most frequent first.

Messages that differ only in numbers and quoted texts are one group (`message_pattern`). The index of the viewer groups calls by
the same key, in SQL. A call that fails is an answer to the model, and its conversation goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from turnwise.errors import message_pattern
from turnwise.types import Trajectory, Turn


@dataclass(slots=True, kw_only=True)
class FailureGroup:
    """Failures with the same message, numbers and quoted texts apart."""

    kind: str
    """What failed, such as `environment` or `reward`; of a tool call, the kind of its error (`ToolOutcome.error`)."""
    message: str
    """The message of the latest."""
    differ: bool = False
    """Whether another one has other numbers or quoted texts in its message."""
    count: int
    step: int | None
    """The step of the latest."""
    id: str
    """The id of the latest conversation."""


@dataclass(slots=True)
class FailureGroups:
    """Groups that failures are added to, in the order of the record."""

    _groups: dict[tuple[str, str], FailureGroup] = field(default_factory=dict)

    def add(self, step: int | None, id: str, kind: str, message: str) -> None:
        """Count a failure of the conversation `id`."""
        key = kind, message_pattern(message)
        group = self._groups.get(key)
        if group is None:
            self._groups[key] = FailureGroup(kind=kind, message=message, count=1, step=step, id=id)
        else:
            group.differ = group.differ or message != group.message
            group.message, group.step, group.id, group.count = message, step, id, group.count + 1

    def ranked(self) -> list[FailureGroup]:
        """The groups, the most frequent first."""
        return sorted(self._groups.values(), key=lambda group: -group.count)


def group_failures(failures: Iterable[tuple[int | None, str, str, str]]) -> list[FailureGroup]:
    """Group failures (step, id of the conversation, kind and message, in the order of the record); the most frequent first.

    Example: `timeout after 30.1 s` and `timeout after 30.4 s` are one group.
    """
    groups = FailureGroups()
    for failure in failures:
        groups.add(*failure)
    return groups.ranked()


@dataclass(slots=True)
class ToolCalls:
    """The calls of one tool, by the name that the model wrote, and their errors."""

    calls: int = 0
    failed: int = 0
    errors: FailureGroups = field(default_factory=FailureGroups)


@dataclass(slots=True)
class ToolCallCounts:
    """The calls in conversations that are added, by the name of the tool."""

    tools: dict[str, ToolCalls] = field(default_factory=dict)

    def add(self, trajectory: Trajectory) -> None:
        """Count the calls of a conversation, without those of its agents."""
        for turn in trajectory.turns:
            for tool, error, message in _calls(turn):
                of_tool = self.tools.setdefault(tool, ToolCalls())
                of_tool.calls += 1
                if error is not None:
                    of_tool.failed += 1
                    of_tool.errors.add(trajectory.step, trajectory.id, error, message.removeprefix("Error: "))

    @property
    def calls(self) -> int:
        """The number of all calls."""
        return sum(tool.calls for tool in self.tools.values())

    @property
    def failed(self) -> int:
        """The number of those that failed."""
        return sum(tool.failed for tool in self.tools.values())

    def ranked(self) -> list[tuple[str, FailureGroup]]:
        """The errors of all tools, each with the name of its tool; the most frequent first."""
        found = [(name, group) for name, tool in self.tools.items() for group in tool.errors.ranked()]
        return sorted(found, key=lambda pair: -pair[1].count)


def _calls(turn: Turn) -> Iterator[tuple[str, str | None, str]]:
    """The tool of each call, the kind of its error or None, and what the model was told. A call that cannot be parsed is
    `malformed`, also where nothing answers calls; in a turn that a limit cut, nothing would have."""
    for outcome in turn.outcomes:
        yield outcome.name, outcome.error, outcome.content
    answered = {outcome.id for outcome in turn.outcomes}
    for call in turn.calls if turn.finish_reason != "length" else ():
        if call.id not in answered:
            yield call.name, None if call.error is None else "malformed", call.error or ""
