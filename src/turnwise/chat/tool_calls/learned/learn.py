"""Tries each kind of learned format, and accepts the first that parses the probe calls back."""

from __future__ import annotations

from turnwise.chat.tool_calls.learned.json_object import learn_json_object
from turnwise.chat.tool_calls.learned.marked import learn_marked
from turnwise.chat.tool_calls.learned.name_first import learn_name_first, learn_unmarked_name
from turnwise.chat.tool_calls.learned.probe import FIRST, PROBE_TOOLS, PROBES, SECOND, TOOL, Arguments, ProbeWriter
from turnwise.chat.tool_calls.learned.python import learn_python
from turnwise.chat.tool_calls.parsing import ToolFormat

__all__ = ["learn"]


def learn(written: ProbeWriter) -> ToolFormat | None:
    """The format in which the template writes calls; None if no learned format parses its probe calls back."""
    for learn_kind in (learn_json_object, learn_name_first, learn_marked, learn_python):
        if (format := learn_kind(written)) is not None and _parses_back(format, written, two_calls=True):
            return format
    format = learn_unmarked_name(written)
    return format if format is not None and _parses_back(format, written, two_calls=False) else None


def _parses_back(format: ToolFormat, written: ProbeWriter, *, two_calls: bool) -> bool:
    """Whether the format parses the probe calls; `two_calls`: also two calls in a turn, if the template accepts them."""

    def parses(*calls: Arguments) -> bool:
        parsed = format.parse(written(*calls), tools=PROBE_TOOLS).calls
        return [(call.name, dict(call.arguments), call.error) for call in parsed] == [
            (TOOL, arguments, None) for arguments in calls
        ]

    if two_calls and written(FIRST, SECOND) and not parses(FIRST, SECOND):
        return False
    # one of PROBES is enough: some templates write nested values neither as JSON nor as Python, but the model may write JSON
    return parses(FIRST) and any(parses(arguments) for arguments in PROBES)
