"""What every format of tool calls shares: the result, the interface, and the walk through a turn's text.

A turn is read once, from left to right. What comes first counts: a mark of thinking opens a thought, in which nothing is a
call; the opening of a call hands over to the format, which says where the call ends, so that no mark inside a call's
arguments counts. What is neither is content. Nothing is searched for twice, so hostile text costs no more than its length.
"""

from __future__ import annotations

import abc
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from turnwise.chat.tool_calls.reasoning import KNOWN, ThoughtMarks, joined
from turnwise.types import ToolCall, ToolSchema

__all__ = [
    "Found",
    "Problem",
    "Reading",
    "Tagged",
    "ToolFormat",
    "malformed",
    "names_of",
    "numbered",
    "skip_space",
    "well_formed",
    "with_written_id",
]

Found = tuple[Sequence[ToolCall], int]
"""The calls that begin at a mark, and where the text goes on after them; none, where it was no call after all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A turn's text, taken apart."""

    content: str
    """What was said to the other side: neither thoughts nor calls, where the format has marks for them."""
    reasoning: str = ""
    """What was only thought."""
    calls: tuple[ToolCall, ...] = ()
    """The calls in order, those that cannot be read included."""


class ToolFormat(Protocol):
    """Reads the tool calls out of a turn's text."""

    name: str

    def parse(
        self,
        text: str,
        *,
        first_id: int = 0,
        thinking: bool = False,
        tools: Sequence[ToolSchema] = (),
        marks: ThoughtMarks = KNOWN,
    ) -> Reading:
        """Take a turn apart. The ids of calls are `call_<n>`, counted from `first_id`.

        `thinking` says that the text begins inside a thinking block, because the template's cue has opened it. `tools` are
        those on offer, for formats that do not say of which type a value is. `marks` are the marks around thoughts.
        """
        ...


class Problem(ValueError):
    """Why a call cannot be read. `at` is the place in the text where that was noticed."""

    def __init__(self, message: str, at: int, *, hopeless: bool = False) -> None:
        super().__init__(message)
        self.at = at
        self.hopeless = hopeless
        """Whether it is not worth while to look for another call close by: a thousand brackets are open."""


class Tagged(abc.ABC):
    """A format whose calls begin with a mark: a subclass says with which, and reads one from there."""

    name: str
    how: str
    """How a call is to be written, for the message about one that cannot be read."""
    opening: str
    """Regular expression of what a call begins with."""
    scaffold: str = ""
    """Regular expression of marks around calls and content that mean nothing themselves, the headers of messages aside."""

    def parse(
        self,
        text: str,
        *,
        first_id: int = 0,
        thinking: bool = False,
        tools: Sequence[ToolSchema] = (),
        marks: ThoughtMarks = KNOWN,
    ) -> Reading:
        content: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        at = 0
        if thinking:
            thought = marks.opened_thought(text)
            thoughts.append(thought.text)
            content.append("")
            at = thought.end
        begin = at  # of the piece of content that is being read
        pattern = self._mark(marks)
        while mark := pattern.search(text, at):
            if mark["thought"] is not None:
                thought = marks.thought_at(text, mark.start())
                thoughts.append(thought.text)
                at = thought.end
            elif mark["scaffold"] is not None:
                at = mark.end()
            else:
                found, at = self.read(text, mark, tools)
                at = max(at, mark.start() + 1)
                if not found:
                    continue  # it stays content
                calls.extend(found)
            content.append(text[begin : mark.start()])
            begin = at
        content.append(text[begin:])
        return Reading(
            content=joined(content).strip("\n"), reasoning=joined(["", *thoughts, ""]), calls=numbered(calls, first_id)
        )

    def _mark(self, marks: ThoughtMarks) -> re.Pattern[str]:
        return _compiled(marks, self.scaffold, self.opening)

    @abc.abstractmethod
    def read(self, text: str, mark: re.Match[str], tools: Sequence[ToolSchema]) -> Found:
        """The calls that begin with `mark`."""

    def bad(self, problem: Problem | str, text: str, name: str = "") -> ToolCall:
        """A call that cannot be read."""
        return malformed(problem, text, how=self.how, name=name)


@functools.lru_cache(maxsize=64)
def _compiled(marks: ThoughtMarks, scaffold: str, call: str) -> re.Pattern[str]:
    """What a turn is searched for: an opening mark of a thought, a header, or the beginning of a call."""
    headers = f"{marks.scaffold}|{scaffold}" if scaffold else marks.scaffold
    return re.compile(f"(?P<thought>{marks.opening})|(?P<scaffold>{headers})|(?P<call>{call})")


def well_formed(name: str, arguments: dict[str, Any], text: str, written_id: str = "") -> ToolCall:
    """A call without its id, which `numbered` gives."""
    return ToolCall(id="", name=name, arguments=arguments, text=text.strip(), written_id=written_id)


def malformed(problem: Problem | str, text: str, *, how: str, name: str = "") -> ToolCall:
    """A call that cannot be read, with a message for the model: what is wrong, and how it is done."""
    error = f"this tool call cannot be read: {problem}. Write it as {how}"
    return ToolCall(id="", name=name, arguments={}, text=text.strip(), error=error)


def numbered(calls: Iterable[ToolCall], first_id: int) -> tuple[ToolCall, ...]:
    """The calls with their ids: those that the model wrote, as far as they are short, plain and unique in the turn."""
    found: list[ToolCall] = []
    taken: set[str] = set()
    for number, call in enumerate(calls, first_id):
        id = call.written_id
        if not _USABLE_ID.fullmatch(id) or id in taken:
            id = f"call_{number}"
        while id in taken:  # the model wrote that for an earlier call
            id += "x"
        taken.add(id)
        found.append(replace(call, id=id))
    return tuple(found)


# templates print ids in front of a tool's answer: the model must not be able to write anything else there
_USABLE_ID = re.compile(r"[\w.:/-]{1,64}", re.ASCII)


def with_written_id(found: Found, id: str | None) -> Found:
    """The first call of those that were found, with the id that the model wrote for it."""
    calls, end = found
    return ([replace(calls[0], written_id=id), *calls[1:]], end) if calls and id else found


def names_of(tools: Sequence[ToolSchema]) -> frozenset[str]:
    """The names of the tools on offer."""
    found = (tool.get("function", tool) for tool in tools)
    return frozenset(str(one["name"]) for one in found if isinstance(one, dict) and "name" in one)


_NO_SPACE: Callable[[str, int], re.Match[str] | None] = re.compile(r"\s*").match


def skip_space(text: str, at: int) -> int:
    """The place of the first character from `at` on that is no white space."""
    space = _NO_SPACE(text, at)
    return space.end() if space else at
