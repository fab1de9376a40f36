"""All formats, by name and by what a template writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from turnwise.chat.tool_calls.gemma import FunctionGemma, Gemma4
from turnwise.chat.tool_calls.harmony import Harmony
from turnwise.chat.tool_calls.json_formats import Cohere2, DeepSeek, Hermes, Kimi, Mistral
from turnwise.chat.tool_calls.learned import PROBE_TOOLS, Write, learn
from turnwise.chat.tool_calls.llama3 import Llama3
from turnwise.chat.tool_calls.pythonic import Lfm2, Pythonic
from turnwise.chat.tool_calls.reading import ToolFormat
from turnwise.chat.tool_calls.reasoning import KNOWN, ThoughtMarks
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
"""All of them, those that need no marks last: they would read what others have written between their marks."""

_BARE = ("pythonic", "llama3")
"""Formats without marks. A template that puts marks around such a call has a format of its own."""
_PROBE = {"text": 'a "b" </x>', "number": 3, "nested": {"list": [1, None]}}


def by_name(name: str) -> ToolFormat:
    """The format of that name.

    Raises TemplateError if there is none.
    """
    formats = {format.name: format for format in FORMATS}
    if name not in formats:
        raise TemplateError(
            f"there is no tool-call format {name!r}{nearest(name, formats)}; there are: {', '.join(formats)}"
        )
    return formats[name]


def detect(
    write: Callable[[str, dict[str, Any]], str],
    formats: Sequence[ToolFormat] = FORMATS,
    marks: ThoughtMarks = KNOWN,
) -> ToolFormat | None:
    """The format in which a template writes calls: the one that reads a probe back, in the words around it.

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
    write: Write, *, own: Sequence[ToolFormat] = (), ends: Sequence[str] = (), marks: ThoughtMarks = KNOWN
) -> ToolFormat | None:
    """The format in which a template writes calls: a named one, the tokenizer's `own`, or one learned from the template.

    `write(calls)` gives what the model has to say for the template to write calls of `probe_tool` with these arguments;
    `ends` are the texts that end a turn of the model, `marks` those around its thoughts.
    """

    def alone(name: str, arguments: dict[str, Any]) -> str:
        text = write([arguments])
        found = [place for end in ends if end and (place := text.find(end)) >= 0]
        return text[: min(found, default=len(text))].replace("probe_tool", name)

    def clean(format: ToolFormat) -> bool:
        """Whether it reads not the call alone, but what the template puts around it too: else it is another format."""
        return not format.parse(alone("probe_tool", {"text": "x"}), tools=PROBE_TOOLS, marks=marks).content.strip()

    marked = [format for format in FORMATS if format.name not in _BARE]
    tries: tuple[Callable[[], ToolFormat | None], ...] = (
        lambda: detect(alone, marked, marks),
        lambda: detect(alone, own, marks),
        lambda: learn(write, ends=ends),
        lambda: detect(alone, FORMATS, marks),
    )
    for attempt in tries:
        if (format := attempt()) is not None and clean(format):
            return format
    return None
