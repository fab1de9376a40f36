"""Parses tool calls from the text of a turn.

A format splits the text of a turn into reasoning, content and calls. A malformed call becomes a `ToolCall` with an error, which
is returned to the model; the other calls of the turn are kept. Text inside a reasoning block is never a call. `find_format`
finds the format of a chat template from the template itself; if no named format fits, the format is learned from the text that
the template writes. docs/tool_calls.md lists the formats and their behaviour for common mistakes.
"""

from turnwise.chat.reasoning import KNOWN, MARKS, ReasoningBlock, ReasoningMarks
from turnwise.chat.tool_calls.describe import describe_tools, undescribed
from turnwise.chat.tool_calls.formats import FORMATS, FromResponseTemplate, detect, find_format, format_by_name
from turnwise.chat.tool_calls.json_formats import Hermes
from turnwise.chat.tool_calls.learned import DESCRIBED, described_format
from turnwise.chat.tool_calls.parsing import MarkedFormat, ParsedText, ToolFormat

__all__ = [
    "DESCRIBED",
    "FORMATS",
    "KNOWN",
    "MARKS",
    "FromResponseTemplate",
    "Hermes",
    "MarkedFormat",
    "ParsedText",
    "ReasoningBlock",
    "ReasoningMarks",
    "ToolFormat",
    "describe_tools",
    "described_format",
    "detect",
    "find_format",
    "format_by_name",
    "undescribed",
]
