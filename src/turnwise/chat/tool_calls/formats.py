"""The named formats of tool calls, the tokenizer's own, and the choice of the format that a chat template writes.

A new format is a class and an entry of `FORMATS`. Some tokenizers define a format themselves (`response_template` of
transformers), which parses the entire turn or raises: if a call is malformed, the turn becomes one malformed call, and its
well-formed calls are lost. So this format is used only if no named format parses the template; docs/tool_calls.md compares
them. Knows the text that a template writes. Does not know the names of model families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from turnwise.chat.reasoning import KNOWN, ReasoningMarks
from turnwise.chat.tool_calls.json_formats import Cohere2, DeepSeek, Harmony, Hermes, Kimi, Llama3, Mistral
from turnwise.chat.tool_calls.learned import PROBE_TOOLS, ProbeWriter, Write, learn
from turnwise.chat.tool_calls.marked_formats import FunctionGemma, Gemma4, Glm, MuseGlimmer, Qwen3Coder
from turnwise.chat.tool_calls.parsing import (
    MalformedCall,
    ParsedText,
    ToolFormat,
    arguments_of,
    refuse_unwritable,
    well_formed_call,
)
from turnwise.chat.tool_calls.pythonic import Lfm2, Pythonic
from turnwise.errors import Failed, TemplateError, boundary, nearest
from turnwise.types import ToolCall, ToolSchema

# Named formats, and the choice

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


def format_by_name(name: str) -> ToolFormat:
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
    write: Write,
    *,
    first: Sequence[ToolFormat] = (),
    own: Sequence[ToolFormat] = (),
    ends: Sequence[str] = (),
    marks: ReasoningMarks = KNOWN,
) -> ToolFormat | None:
    """The format in which a template writes calls: one of `first`, a named format, the tokenizer's `own`, or one learned from the
    template.

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
        lambda: detect(one_call, first, marks),
        lambda: detect(one_call, marked, marks),
        lambda: detect(one_call, own, marks),
        lambda: learn(written),
        lambda: detect(one_call, FORMATS, marks),
    )
    for search in searches:
        if (format := search()) is not None and leaves_nothing(format):
            return format
    return None


# The format that the tokenizer defines

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class FromResponseTemplate(ToolFormat):
    """Parses with transformers and `spec`, the attribute `response_template` of a tokenizer.

    Raises TemplateError if transformers does not accept the spec.
    """

    name = "response_template"
    example = "the chat template does"

    def __init__(self, spec: Mapping[str, Any]) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        try:
            self._spec = load_response_template(dict(spec))
        except (ValueError, TypeError) as error:
            raise TemplateError(f"the tokenizer's response_template is not valid: {error}") from error
        fields = spec["fields"]
        openings = [fields[field].get("open", "") for field in _REASONING_FIELDS if field in fields]
        self._opened = next((opening for opening in openings if isinstance(opening, str)), "")

    def read(self, text: str, *, thinking: bool, tools: Sequence[ToolSchema], marks: ReasoningMarks) -> ParsedText:
        from transformers.utils.chat_parsing import parse_response

        try:
            with boundary("tokens"):
                message = parse_response(
                    text, self._spec, prefix=self._opened if thinking else "", tools=list(tools) or None
                )
        except Failed as failed:
            reasoning, content = marks.split(text, opened=thinking)
            return ParsedText(content="", reasoning=reasoning, calls=(self.malformed(failed.failure.message, content),))
        return ParsedText(
            content=str(message.get("content") or "").strip("\n"),
            reasoning="\n".join(str(message[field]) for field in _REASONING_FIELDS if message.get(field)),
            calls=tuple(self._call(call) for call in message.get("tool_calls") or []),
        )

    def _call(self, parsed: Any) -> ToolCall:
        written = str(parsed)
        try:
            function = parsed.get("function", parsed) if isinstance(parsed, dict) else None
            if not isinstance(function, dict):
                raise MalformedCall(f"the call must be an object, but is a {type(function).__name__}", 0)
            name, arguments = function.get("name"), function.get("arguments")
            if not isinstance(name, str) or not name:
                raise MalformedCall('the "name" is missing', 0)
            arguments = arguments_of({} if arguments is None else arguments)
            refuse_unwritable(arguments, 0)  # transformers accepts NaN
            id = parsed.get("id") if isinstance(parsed, dict) else None
            return well_formed_call(name, arguments, written, id if isinstance(id, str) else "")
        except MalformedCall as problem:
            return self.malformed(problem, written)
