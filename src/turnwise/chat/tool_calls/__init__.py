"""How models write tool calls, and how their text is read back.

A format takes the text of one turn apart into what was thought, what was said and what was called. A call that cannot be read
becomes a `ToolCall` with an error, which goes back to the model: nothing is lost, and a good call is not lost because its
neighbour is bad. Calls inside a thinking block are not calls. Which format a template writes is found out by `find_format`,
from the template itself; where no named format fits, the shape is learned from what it writes. docs/tool_calls.md has the
formats and what each makes of the calls that usually go wrong.
"""

from turnwise.chat.tool_calls.formats import FORMATS, by_name, detect, find_format
from turnwise.chat.tool_calls.json_formats import Hermes
from turnwise.chat.tool_calls.parsing import ParsedText, ToolFormat
from turnwise.chat.tool_calls.reasoning import KNOWN, MARKS, Thought, ThoughtMarks, split_reasoning, thoughts
from turnwise.chat.tool_calls.response_template import FromResponseTemplate

__all__ = [
    "FORMATS",
    "KNOWN",
    "MARKS",
    "FromResponseTemplate",
    "Hermes",
    "ParsedText",
    "Thought",
    "ThoughtMarks",
    "ToolFormat",
    "by_name",
    "detect",
    "find_format",
    "split_reasoning",
    "thoughts",
]
