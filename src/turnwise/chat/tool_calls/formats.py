"""The named formats, and the choice of the format that a chat template writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from turnwise.chat.tool_calls.gemma import FunctionGemma, Gemma4
from turnwise.chat.tool_calls.harmony import Harmony
from turnwise.chat.tool_calls.json_formats import Cohere2, DeepSeek, Hermes, Kimi, Mistral
from turnwise.chat.tool_calls.learned import PROBE_TOOLS, ProbeWriter, Write, learn
from turnwise.chat.tool_calls.llama3 import Llama3
from turnwise.chat.tool_calls.parsing import ToolFormat
from turnwise.chat.tool_calls.pythonic import Lfm2, Pythonic
from turnwise.chat.tool_calls.reasoning import KNOWN, ReasoningMarks
from turnwise.chat.tool_calls.xml_formats import Glm, MuseGlimmer, Qwen3Coder
from turnwise.errors import TemplateError, nearest

__all__ = ["FORMATS", "by_name", "detect", "find_format"]

FORMATS: tuple[ToolFormat, ...] = (
    Hermes(),
    Qwen3Coder(),
    Glm(),
    DeepSeek(),
    Kimi(),
    Mistral(),
    Cohere2(),
    Harmony(),
    Gemma4(),
    FunctionGemma(),
    MuseGlimmer(),
    Lfm2(),
    Pythonic(),
    Llama3(),
)
"""All named formats. Formats without marks are last: they would also parse the calls inside the marks of other formats."""

_UNMARKED = ("pythonic", "llama3")
"""Formats without marks. A template that writes marks around such a call has another format."""
_PROBE = {"text": 'a "b" </x>', "number": 3, "nested": {"list": [1, None]}}


def by_name(name: str) -> ToolFormat:
    """The format of that name. Raises TemplateError if there is none."""
    formats = {format.name: format for format in FORMATS}
    if name not in formats:
        raise TemplateError(
            f"there is no tool-call format {name!r}{nearest(name, formats)}; there are: {', '.join(formats)}"
        )
    return formats[name]


def detect(
    write: Callable[[str, dict[str, Any]], str],
    formats: Sequence[ToolFormat] = FORMATS,
    marks: ReasoningMarks = KNOWN,
) -> ToolFormat | None:
    """The first of these formats that parses a probe call back from the text that a template writes; None if none does.

    `write(name, arguments)` renders a conversation that ends with an assistant message with that call.
    """
    name = "probe_tool"
    written = write(name, _PROBE)
    for candidate in formats:
        calls = [
            call for call in candidate.parse(written, marks=marks).calls if call.name == name and call.error is None
        ]
        if len(calls) == 1 and dict(calls[0].arguments) == _PROBE:
            return candidate
    return None


def find_format(
    write: Write, *, own: Sequence[ToolFormat] = (), ends: Sequence[str] = (), marks: ReasoningMarks = KNOWN
) -> ToolFormat | None:
    """The format in which a template writes calls: a named format, the tokenizer's `own`, or a format learned from the template.

    `write(calls)` returns the text that the model would have to sample for calls of `probe_tool` with these arguments, `ends`
    are texts that end a turn of the model, `marks` the marks around reasoning.
    """
    written = ProbeWriter(write, ends)

    def one_call(name: str, arguments: dict[str, Any]) -> str:
        return written(arguments).replace("probe_tool", name)

    def leaves_nothing(format: ToolFormat) -> bool:
        """Whether the format also parses the text that the template writes around a call: otherwise it is another format."""
        return not format.parse(one_call("probe_tool", {"text": "x"}), tools=PROBE_TOOLS, marks=marks).content.strip()

    marked = [format for format in FORMATS if format.name not in _UNMARKED]
    searches: tuple[Callable[[], ToolFormat | None], ...] = (
        lambda: detect(one_call, marked, marks),
        lambda: detect(one_call, own, marks),
        lambda: learn(written),
        lambda: detect(one_call, FORMATS, marks),
    )
    for search in searches:
        if (format := search()) is not None and leaves_nothing(format):
            return format
    return None
