"""A format of tool calls learned from a chat template, for templates that no named format can parse.

The template renders probe calls. The text around the names and the arguments gives the marks of the format: a turn with one
call is compared with a turn with two.

    one     <calls> <call> CALL </call> </calls>
    two     <calls> <call> CALL </call> <call> CALL </call> </calls>
                                ^^^^^^^^^^^^^^ between
    opening <call>, closing </call>, around (<calls>, </calls>)

Four kinds are tried in this order, and the first that parses the probe calls back is accepted. Arguments are

- a JSON object with the name inside it, in a list or one by one: `<call>{"function": {"name": "f", "parameters": {...}}}</call>`,
- a JSON object after the name: `<|call|>f<|args|>{...}<|end|>`,
- one by one between marks: `<invoke name="f"><parameter name="key">value</parameter></invoke>`, or
- written as in Python: `<functions>[f(key="value")]</functions>`.

Invariant: a learned format has an opening mark, because without one a call could not be distinguished from content. Exception:
the format of GLM-4, in which the first line of the turn is the name of an offered tool, and a JSON object follows. Knows
rendered texts. Does not know the names of model families.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from turnwise.chat.tool_calls.json_formats import JsonFormat, Llama3, NameThenJson
from turnwise.chat.tool_calls.marked_formats import MarkedArguments
from turnwise.chat.tool_calls.parsing import (
    MalformedCall,
    ParsedCalls,
    ToolFormat,
    arguments_of,
    decode,
    name_and_arguments,
    skip_space,
    tool_names,
)
from turnwise.chat.tool_calls.pythonic import PythonCalls
from turnwise.errors import TemplateError
from turnwise.types import ToolCall, ToolSchema

# Probe calls that the template renders

LEARNED = "learned"
"""The name of every learned format."""

Arguments = dict[str, Any]
Write = Callable[[Sequence[Arguments]], str]
"""Renders an assistant message with one call of `probe_tool` for each arguments, as text that the model would have to sample.
Raises TemplateError or returns "" if the template does not accept such a message."""

TOOL = "probe_tool"
PROBE_TOOLS: Sequence[ToolSchema] = ({"type": "function", "function": {"name": TOOL}},)
"""The tool on offer when probe calls are parsed back."""
FIRST, SECOND = {"alpha": "valuea", "beta": "valueb"}, {"alpha": "valuec", "beta": "valued"}
"""Arguments whose keys and values are easy to find in the rendered text."""
NUMBERS = {"alpha": 731, "beta": 732}
PROBES: tuple[Arguments, ...] = (
    {"text": 'a "b" </x>', "number": 3, "nested": {"list": [1, None]}},
    {"text": "a b", "number": 3},
)
"""Arguments that a learned format must parse back: the first, or at least the second."""


class ProbeWriter:
    """Renders probe calls; the text ends where the turn of the model ends. `ends` are texts that end a turn."""

    def __init__(self, write: Write, ends: Sequence[str]) -> None:
        self._write, self._ends = write, [end for end in ends if end]

    def __call__(self, *calls: Arguments) -> str:
        """The text of a turn with a call of `probe_tool` for each of these arguments; "" if the template refuses it."""
        text = self._write(calls)
        positions = [position for end in self._ends if (position := text.find(end)) >= 0]
        return text[: min(positions, default=len(text))]


# JSON values in a rendered probe call

_OPENING = re.compile(r"[\[{\"]")


def json_values(text: str, at: int) -> Iterator[tuple[int, int, Any]]:
    """(start, end, value) of the JSON lists, objects and strings in a text, outer values before the values inside them."""
    while (opening := _OPENING.search(text, at)) is not None:
        start = at = opening.start()
        at += 1
        try:
            value, end = decode(text, start)
        except MalformedCall:
            continue
        yield start, end, value


def equals_arguments(value: Any, arguments: Arguments) -> bool:
    """Whether the value is these arguments, as an object or as JSON in a string."""
    if isinstance(value, str):
        try:
            value, _ = decode(value, 0)
        except MalformedCall:
            return False
    return value == arguments


# Marks around calls

NEVER = r"(?!)"
"""A regular expression that matches nothing."""
_BRACKETS = tuple("<[{(|｜◁")


@dataclass(frozen=True, slots=True)
class CallSpan:
    """Where a call is in a text, without its marks: indices `start` to `end`."""

    start: int
    end: int
    arguments: tuple[int, int]
    """Start and end of the arguments."""


@dataclass(frozen=True, slots=True)
class CallMarks:
    """The texts around calls."""

    opening: str
    closing: str
    around: tuple[str, ...]
    """Texts before the first call and after the last call of a turn."""
    example: str
    """A call as the template writes it."""

    @property
    def ignored_pattern(self) -> str:
        """Regular expression of the marks around all calls of a turn."""
        return "|".join(flexible(text) for text in self.around if text.strip())


def find_marks(written: ProbeWriter, find: Callable[[str, int], CallSpan | None]) -> CallMarks | None:
    """The marks around the calls that `find(text, start)` finds; None if there is no call."""
    single = written(FIRST)
    call = find(single, 0)
    if call is None:
        return None
    example = _example(single, call)
    two = written(FIRST, SECOND)
    first = find(two, 0) if two else None
    second = find(two, first.end) if first is not None else None
    if first is not None and second is not None:
        before, between, after = two[: first.start], two[first.end : second.start], two[second.end :]
        closing, opening = split_marks(before, between, after)
        if opening.strip():
            around = (before[: len(before) - len(opening)].strip(), after[len(closing) :].strip())
            return CallMarks(opening.strip(), closing.strip(), around, example)
    # the template takes one call only, or writes all calls between one pair of marks
    return CallMarks(single[: call.start].strip(), single[call.end :].strip(), (), example)


def _example(text: str, call: CallSpan) -> str:
    start, end = call.arguments
    example = (
        text[:start].replace(TOOL, "<tool>")
        + ("{...}" if text[start] == "{" else text[start:end])
        + text[end:].replace(TOOL, "<tool>")
    )
    return example.replace("alpha", "<name>").replace("valuea", "<value>").strip()


def split_marks(before: str, between: str, after: str) -> tuple[str, str]:
    """Split the text between two calls into the closing mark of the first, which `after` begins with too, and the opening mark
    of the second, which `before` ends with too.

    If the two overlap, because both begin with the same bracket, the second mark begins after white space or at a bracket.
    """
    longest_closing = len(_common_start(between, after))
    earliest_opening = len(between) - len(_common_end(before, between))
    if longest_closing < earliest_opening:  # there is a separator between the two marks
        return between[:longest_closing], between[earliest_opening:]
    candidates = range(longest_closing, earliest_opening - 1, -1)
    split = next((n for n in candidates if between[n - 1 : n].isspace()), None)
    if split is None:
        split = next((n for n in reversed(candidates) if between[n : n + 1] in _BRACKETS), earliest_opening)
    return between[:split], between[split:]


def _common_start(left: str, right: str) -> str:
    length = next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return left[:length]


def _common_end(left: str, right: str) -> str:
    return _common_start(left[::-1], right[::-1])[::-1]


def is_mark(text: str) -> bool:
    """Whether a text can mark calls: it has letters or digits, and characters that are not used in prose."""
    return bool(re.search(r"\w", text) and re.search(r"[^\w\s,.;:!?'\"()-]", text))


def flexible(text: str) -> str:
    """A regular expression for a text with any amount of white space in place of its white space."""
    return r"\s*".join(re.escape(part) for part in re.split(r"\s+", text))


# Calls that are a JSON object with the name

_NEXT_OBJECT = re.compile(r"\s*,?\s*(?=\{)")


@dataclass(frozen=True, slots=True)
class _Shape:
    """Where name and arguments are in a decoded call."""

    inside: str | None
    """The key of the object that holds them; None if it is the call itself."""
    name: str | None
    """The key of the name; None if the name is the only key, and the arguments are its value."""
    arguments: str
    """The key of the arguments."""

    def name_and_arguments(self, value: Any) -> tuple[str, Arguments]:
        """Name and arguments of a decoded call. Raises MalformedCall."""
        if self.inside is not None and isinstance(value, dict):
            value = value.get(self.inside, value)
        if self.name is not None:
            wrong_key = "arguments" if self.arguments == "parameters" else "parameters"
            return name_and_arguments(value, name_key=self.name, argument_keys=(self.arguments,), wrong_key=wrong_key)
        if not isinstance(value, dict) or len(value) != 1:
            raise MalformedCall("the call must be an object with the tool's name as its only key", 0)
        ((name, arguments),) = value.items()
        return name, arguments_of(arguments)


def _find_shape(value: Any, inside: str | None = None) -> _Shape | None:
    """The shape of a decoded probe call with the arguments `FIRST`."""
    if not isinstance(value, dict):
        return None
    if list(value) == [TOOL]:
        return _Shape(inside, None, "")
    name = next((key for key, item in value.items() if item == TOOL), None)
    arguments = next((key for key, item in value.items() if equals_arguments(item, FIRST)), None)
    if name is not None and arguments is not None:
        return _Shape(inside, name, arguments)
    if inside is None:
        return next((shape for key, item in value.items() if (shape := _find_shape(item, key))), None)
    return None


class _JsonObjects(JsonFormat):
    """Objects that hold the name, one after the other or in a list, between marks."""

    name = LEARNED

    def __init__(self, marks: CallMarks, shape: _Shape) -> None:
        self.example, self.ignored_pattern = marks.example, marks.ignored_pattern
        self.opening_pattern, self.closing_mark = flexible(marks.opening), marks.closing
        self.closing_pattern = flexible(marks.closing) if marks.closing else NEVER
        self.name_key = shape.name or "name"
        self._shape = shape
        super().__init__()

    def name_and_arguments(self, value: Any) -> tuple[str, Arguments]:
        return self._shape.name_and_arguments(value)

    def read_calls(self, text: str, mark: re.Match[str], tools: Sequence[ToolSchema]) -> ParsedCalls:
        at = skip_space(text, mark.end())
        calls: list[ToolCall] = []
        while True:
            new_calls, end = self.read_json(text, at)
            calls += new_calls
            following = _NEXT_OBJECT.match(text, end) if new_calls and new_calls[-1].error is None else None
            if following is None:
                return calls, end
            at = following.end()

    def _end_of_call(self, text: str, end: int) -> int:
        following = _NEXT_OBJECT.match(text, end)
        return end if following or not self.closing_mark else super()._end_of_call(text, end)


def learn_json_object(written: ProbeWriter) -> ToolFormat | None:
    """The format, if calls are JSON objects that hold the name. Without an opening mark it is Llama 3's format."""

    def find(text: str, at: int) -> CallSpan | None:
        for start, end, value in json_values(text, at):
            items = value if isinstance(value, list) else [value]
            if items and all(isinstance(item, dict) for item in items) and TOOL in text[start:end]:
                return CallSpan(start, end, (start, start))
        return None

    text = written(FIRST)
    call = find(text, 0)
    marks = None if call is None else find_marks(written, find)
    if call is None or marks is None:
        return None
    value, _ = decode(text, call.start)
    shape = _find_shape(value[0] if isinstance(value, list) else value)
    if shape is None:
        return None
    example = re.sub(r"\{[^{}]*\bvaluea\b[^{}]*\}", "{...}", text).replace(TOOL, "<tool>").strip()
    return _JsonObjects(replace(marks, example=example), shape) if is_mark(marks.opening) else Llama3(example)


# Calls with each argument between marks

_PARTS = re.compile(rf"{TOOL}|alpha|beta|value[a-d]|73[12]")
"""Name, keys and values of the probe calls."""


class _Marked(MarkedArguments):
    """An opening mark, the name, arguments between marks, a closing mark.

    `after_name` follows the name, `key_opening` precedes a key, `key_closings` follow it (for a string, for a number),
    `value_closing` follows a value, `call_closing` follows the last argument.
    """

    name = LEARNED

    def __init__(
        self,
        marks: CallMarks,
        *,
        after_name: str,
        key_opening: str,
        key_closings: Sequence[str],
        value_closing: str,
        call_closing: str,
    ) -> None:
        self.example, self.ignored_pattern = marks.example, marks.ignored_pattern
        self.closing_mark = call_closing.split()[0]
        key, end, value = flexible(key_opening), flexible(call_closing), flexible(value_closing.strip())
        key_end = "|".join(flexible(closing.rstrip(" \t\r\n")) for closing in key_closings)
        self.value_on_own_lines = all(closing.endswith("\n") for closing in key_closings) and value_closing.startswith(
            "\n"
        )
        self.opening_pattern = flexible(marks.opening)
        self.call_pattern = re.compile(rf"{self.opening_pattern}\s*(?P<name>[\w.\-]+)\s*{flexible(after_name)}")
        self.end_pattern = re.compile(rf"\s*{end}")
        self.argument_pattern = re.compile(rf"\s*{key}\s*(?P<key>[^<>\n\"]+?)\s*(?:{key_end})")
        self.value_end_pattern = re.compile(rf"{value}(?=\s*(?:{key}|{end}|\Z))")
        self.recovery_pattern = re.compile(rf"{end}|(?={self.opening_pattern})|\Z")


def learn_marked(written: ProbeWriter) -> ToolFormat | None:
    """The format, if each argument is between marks, after an opening mark and the name."""
    marks = find_marks(written, _find_call)
    if marks is None or not is_mark(marks.opening):
        return None
    before_key, before_value, before_second_key, before_second_value, after = _texts_between(written, FIRST)
    value_closing, key_opening = split_marks(before_key, before_second_key, after)
    closing = value_closing.strip()
    call_closing = marks.closing[len(closing) :].strip() if marks.closing.startswith(closing) else ""
    regular = before_value == before_second_value and is_mark(key_opening.strip())
    if not regular or not closing or not call_closing:
        return None
    # some templates write the type of the value after its key, so another text is there for numbers
    between_numbers = _texts_between(written, NUMBERS)
    key_closings = [before_value, between_numbers[1]] if len(between_numbers) > 1 else [before_value]
    example = written({"alpha": "valuea"}).replace(TOOL, "<tool>").replace("alpha", "<name>")
    return _Marked(
        replace(marks, example=example.replace("valuea", "<value>").strip()),
        after_name=before_key[: len(before_key) - len(key_opening)].strip(),
        key_opening=key_opening.strip(),
        key_closings=list(dict.fromkeys(key_closings)),
        value_closing=value_closing,
        call_closing=call_closing,
    )


def _find_call(text: str, at: int) -> CallSpan | None:
    parts = list(_PARTS.finditer(text, at))[:5]
    texts = [part[0] for part in parts]
    if texts[:1] != [TOOL] or texts[1::2] != ["alpha", "beta"]:
        return None
    return CallSpan(parts[0].start(), parts[4].end(), (parts[1].start(), parts[4].end()))


def _texts_between(written: ProbeWriter, arguments: Arguments) -> list[str]:
    """The texts after the name, first key, first value, second key and second value."""
    text = written(arguments)
    parts = list(_PARTS.finditer(text))[:5]
    ends = [*(part.start() for part in parts[1:]), len(text)]
    return [text[part.end() : end] for part, end in zip(parts, ends, strict=True)]


# Calls with a JSON object after the name


class _NameFirst(NameThenJson):
    """An opening mark, the name, a separator, the arguments as JSON, and perhaps a closing mark."""

    name = LEARNED

    def __init__(self, marks: CallMarks, separator: str) -> None:
        self.example, self.ignored_pattern = marks.example, marks.ignored_pattern
        self.opening_pattern, self.closing_mark = flexible(marks.opening), marks.closing
        self.closing_pattern = flexible(marks.closing) if marks.closing else NEVER
        self.head_pattern = re.compile(rf"\s*(?P<name>[\w.\-]+)\s*{flexible(separator.strip())}")
        super().__init__()

    def _end_of_call(self, text: str, end: int) -> int:
        return super()._end_of_call(text, end) if self.closing_mark else end


def learn_name_first(written: ProbeWriter) -> ToolFormat | None:
    """The format, if calls are the name and then a JSON object, after an opening mark."""

    def find(text: str, at: int) -> CallSpan | None:
        for start, end, value in json_values(text, at):
            name = text.rfind(TOOL, at, start)
            if name >= 0 and (equals_arguments(value, FIRST) or equals_arguments(value, SECOND)):
                return CallSpan(name, end, (start, end))
        return None

    text = written(FIRST)
    call, marks = find(text, 0), find_marks(written, find)
    if call is None or marks is None or not is_mark(marks.opening):
        return None
    return _NameFirst(marks, text[call.start + len(TOOL) : call.arguments[0]])


class _UnmarkedName(NameThenJson):
    """The name of a tool on offer on the first line of the turn, then the arguments as a JSON object. One call in a turn."""

    name = LEARNED
    example = "<tool>\n{...}"
    opening_pattern = r"\A\s*(?=[\w.\-]+[^\S\n]*\n\s*\{)"
    closing_pattern, closing_mark = NEVER, ""
    head_pattern = re.compile(r"(?<![\w.\-])(?P<name>[\w.\-]+)[^\S\n]*\n\s*(?=\{)")

    def read_calls(self, text: str, mark: re.Match[str], tools: Sequence[ToolSchema]) -> ParsedCalls:
        known = tool_names(tools)
        head = self.head_pattern.match(text, mark.end())
        if head is None or head["name"] not in known:
            return [], mark.end()  # content
        calls, end = super().read_calls(text, mark, tools)
        second = next((match for match in self.head_pattern.finditer(text, end) if match["name"] in known), None)
        if second is None:
            return calls, end
        return [*calls, self.malformed("only one call in a turn is allowed", text[end:], second["name"])], len(text)

    def _end_of_call(self, text: str, end: int) -> int:
        return end


def learn_unmarked_name(written: ProbeWriter) -> ToolFormat | None:
    """The format, if the first line of the turn is the name and a JSON object follows."""
    return _UnmarkedName() if re.match(rf"\s*{TOOL}[^\S\n]*\n\s*\{{", written(FIRST)) else None


# Calls written as in Python, between marks

_CALL = re.compile(rf"{TOOL}\s*\(\s*alpha\s*=.*?value[bd]['\"]?\s*\)", re.DOTALL)


class _Python(PythonCalls):
    name = LEARNED

    def __init__(self, marks: CallMarks) -> None:
        self.example, self.ignored_pattern = marks.example, marks.ignored_pattern
        self.opening_pattern = flexible(marks.opening.removesuffix("[").rstrip())
        self.closing_pattern = flexible(marks.closing.removeprefix("]").lstrip()) or NEVER
        super().__init__()


def learn_python(written: ProbeWriter) -> ToolFormat | None:
    """The format, if calls are written as in Python between two marks."""

    def find(text: str, at: int) -> CallSpan | None:
        call = _CALL.search(text, at)
        return call and CallSpan(call.start(), call.end(), (call.end() - 1, call.end() - 1))

    marks = find_marks(written, find)
    if marks is None or not is_mark(marks.opening.removesuffix("[")) or not marks.closing.removeprefix("]"):
        return None
    return _Python(replace(marks, example=re.sub(r"\(.*\)", "(<name>=<value>, ...)", marks.example, flags=re.DOTALL)))


# The choice: the first kind that parses the probe calls back


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


# Formats that a recipe describes

DESCRIBED = "described"
"""The name of every format that a recipe describes."""
_ARGUMENT = re.compile(r"(?s)(?P<opening>.*)\{key\}(?P<between>.*)\{value\}(?P<closing>.*)")


def described_format(
    *, opening: str, separator: str = "", closing: str = "", arguments: str = "json", argument: str = ""
) -> ToolFormat:
    """The format of a description: the name of the tool stands between `opening` and `separator`, the arguments follow it, and
    `closing` ends the call.

    `arguments: json`: one JSON object; without a `separator`, the name is in this object, under the key `name`, and the arguments
    under `arguments`. `arguments: tags`: each argument is a text such as `<arg name="{key}">{value}</arg>` (`argument`). White
    space in the texts may be any white space in a call.

    Example: `described_format(opening="<|call|>", separator="<|args|>", closing="<|end|>")` reads
    `<|call|>f<|args|>{"x": 1}<|end|>`.

    Raises TemplateError if the description cannot be read unambiguously.
    """
    texts = {"opening": opening, "separator": separator, "closing": closing, "argument": argument}
    if wrong := next((name for name, text in texts.items() if not isinstance(text, str)), None):
        raise TemplateError(f"tool_format.{wrong} is {texts[wrong]!r:.80}; it must be a text")
    if arguments not in ("json", "tags"):
        raise TemplateError(f"tool_format.arguments is {arguments!r:.80}; it must be json or tags")
    if not opening.strip():
        raise TemplateError(f"tool_format.opening is {opening!r}; it must be the text that begins a call")
    if arguments == "tags":
        format = _with_tags(opening, separator, closing, argument)
    elif argument:
        raise TemplateError(
            "tool_format.argument has no effect with arguments=json: remove it, or set arguments to tags"
        )
    elif separator and not separator.strip():
        raise TemplateError(
            f"tool_format.separator is white space only ({separator!r}), which may stand anywhere in a call: give the text "
            f"between the name and the arguments, or none if the name is in the JSON object"
        )
    elif separator:
        example = f"{opening}<tool>{separator}{{...}}{closing}"
        format = _NameFirst(CallMarks(opening.strip(), closing.strip(), (), example.strip()), separator)
    else:
        example = f'{opening}{{"name": "<tool>", "arguments": {{...}}}}{closing}'
        marks = CallMarks(opening.strip(), closing.strip(), (), example.strip())
        format = _JsonObjects(marks, _Shape(None, "name", "arguments"))
    format.name = DESCRIBED
    return format


def _with_tags(opening: str, separator: str, closing: str, argument: str) -> ToolFormat:
    parts = _ARGUMENT.fullmatch(argument)
    if parts is None or not parts["opening"].strip() or not parts["closing"].strip():
        raise TemplateError(
            f"tool_format.argument is {argument!r:.80}; with arguments=tags it must be an argument as written, with {{key}} "
            f'and {{value}} and a mark before and after them: <arg name="{{key}}">{{value}}</arg>'
        )
    if not parts["between"].strip() or argument.count("{key}") > 1 or argument.count("{value}") > 1:
        raise TemplateError(
            f"tool_format.argument is {argument!r:.80}; it must have {{key}} and {{value}} once, and a text between them that is "
            f"not only white space: a key and a value may have spaces of their own"
        )
    if not closing.strip():
        raise TemplateError("tool_format.closing is empty; with arguments=tags a text must end the call")
    example = f"{opening}<tool>{separator}{argument.replace('{key}', '<name>').replace('{value}', '<value>')}{closing}"
    return _Marked(
        CallMarks(opening.strip(), closing.strip(), (), example.strip()),
        after_name=separator.strip(),
        key_opening=parts["opening"].strip(),
        key_closings=[parts["between"]],
        value_closing=parts["closing"],
        call_closing=closing.strip(),
    )
