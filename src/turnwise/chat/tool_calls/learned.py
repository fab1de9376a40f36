"""A format of tool calls that is learned from what a chat template writes, where none of the named formats reads it.

The template writes probe calls. What stands around the name and the arguments are the marks of the format; the arguments are
one JSON object, or stand one by one between marks, or are written as in Python. A format is accepted only if it reads the
probes back. It needs a mark in front of the calls: without one, words could not be told from calls. The exception is GLM-4's
shape: the name of a tool on offer is the turn's first line, and a JSON object follows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.chat.tool_calls.json_formats import JsonTagged, NameFirst
from turnwise.chat.tool_calls.json_text import arguments_of, decode, named
from turnwise.chat.tool_calls.llama3 import Llama3
from turnwise.chat.tool_calls.pythonic import PythonCalls
from turnwise.chat.tool_calls.reading import Found, Problem, ToolFormat, names_of, skip_space
from turnwise.chat.tool_calls.xml_formats import MarkedArguments
from turnwise.types import ToolCall, ToolSchema

__all__ = ["LEARNED", "PROBE_TOOLS", "learn"]

LEARNED = "learned"
"""The name of a format that was learned."""

Arguments = dict[str, Any]
Write = Callable[[Sequence[Arguments]], str]
"""What the template writes for an assistant message that calls `probe_tool` once for each arguments, as the model has to say
it. Raises TemplateError or gives "" where the template takes no such message."""

_NAME = "probe_tool"
PROBE_TOOLS: Sequence[ToolSchema] = ({"type": "function", "function": {"name": _NAME}},)
"""The tool on offer when probe calls are read back."""
_FIRST, _SECOND = {"alpha": "valuea", "beta": "valueb"}, {"alpha": "valuec", "beta": "valued"}
_NUMBERS = {"alpha": 731, "beta": 732}
_PROBES: tuple[Arguments, ...] = (
    {"text": 'a "b" </x>', "number": 3, "nested": {"list": [1, None]}},
    {"text": "a b", "number": 3},
)
_NEVER = r"(?!)"


@dataclass(frozen=True, slots=True)
class _Call:
    """Where a call stands in a text: its name, and what is between the marks. `start` to `end` is all of it."""

    start: int
    end: int
    arguments: tuple[int, int]
    """Where the arguments begin and end."""


@dataclass(frozen=True, slots=True)
class _Marks:
    """What stands around calls, as texts."""

    opening: str
    closing: str
    around: tuple[str, ...]
    """What stands before the first call and behind the last one, and belongs to neither."""
    how: str
    """A call as the template writes it."""

    @property
    def scaffold(self) -> str:
        return "|".join(_flexible(text) for text in self.around if text.strip())


def learn(write: Write, *, ends: Sequence[str] = ()) -> ToolFormat | None:
    """The format in which the template writes calls, or None. `ends` are the texts that end a turn of the model."""

    def written(*calls: Arguments) -> str:
        text = write(calls)
        found = [place for end in ends if end and (place := text.find(end)) >= 0]
        return text[: min(found, default=len(text))]

    for candidate in (_json, _name_first, _marked, _python):
        if (format := candidate(written)) is not None and _reads_back(format, written):
            return format
    format = _bare_name(written)
    return format if format is not None and _reads_back(format, written, several=False) else None


def _reads_back(format: ToolFormat, written: Callable[..., str], *, several: bool = True) -> bool:
    """Whether it reads the probes; with `several`, two calls in a turn too, where the template takes them."""

    def read(*calls: Arguments) -> bool:
        text = written(*calls)
        found = format.parse(text, tools=PROBE_TOOLS).calls
        return [(call.name, dict(call.arguments), call.error) for call in found] == [
            (_NAME, one, None) for one in calls
        ]

    # some templates write nested values in a way that is neither JSON nor Python: the model may still write JSON
    both = not several or not written(_FIRST, _SECOND) or read(_FIRST, _SECOND)
    return both and read(_FIRST) and any(read(probe) for probe in _PROBES)


# where calls stand, and what is around them


def _marks(written: Callable[..., str], find: Callable[[str, int], _Call | None]) -> _Marks | None:
    one = written(_FIRST)
    call = find(one, 0)
    if call is None:
        return None
    before, after = one[: call.start], one[call.end :]
    how = (
        one[: call.arguments[0]].replace(_NAME, "<tool>")
        + ("{...}" if one[call.arguments[0]] == "{" else one[slice(*call.arguments)])
        + one[call.arguments[1] :].replace(_NAME, "<tool>")
    )
    for name, word in (("alpha", "<name>"), ("valuea", "<value>")):
        how = how.replace(name, word)
    two = written(_FIRST, _SECOND)
    first = find(two, 0) if two else None
    second = find(two, first.end) if first is not None else None
    if first is None or second is None:
        return _Marks(before.strip(), after.strip(), (), how.strip())
    before, between, after = two[: first.start], two[first.end : second.start], two[second.end :]
    closing, opening = _split(before, between, after)
    if not opening.strip():  # all calls stand between one pair of marks
        return _Marks(before.strip(), after.strip(), (), how.strip())
    around = (before[: len(before) - len(opening)].strip(), after[len(closing) :].strip())
    return _Marks(opening.strip(), closing.strip(), around, how.strip())


def _split(before: str, between: str, after: str) -> tuple[str, str]:
    """What of `between` closes what came before it, as `after` does, and what opens the next, as `before` does.

    Where the two overlap, because both begin with the same bracket, a mark begins after white space or at a bracket.
    """
    most, least = len(_common_start(between, after)), len(between) - len(_common_end(before, between))
    if most < least:  # something stands between the two marks
        return between[:most], between[least:]
    places = range(most, least - 1, -1)
    place = next((n for n in places if between[n - 1 : n].isspace()), None)
    if place is None:
        place = next((n for n in reversed(places) if between[n : n + 1] in _BRACKETS), least)
    return between[:place], between[place:]


_BRACKETS = tuple("<[{(|｜◁")


def _common_end(one: str, other: str) -> str:
    return _common_start(one[::-1], other[::-1])[::-1]


def _common_start(one: str, other: str) -> str:
    length = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def _is_mark(text: str) -> bool:
    """Whether a text can announce calls: it has a word, and characters that do not stand in words."""
    return bool(re.search(r"\w", text) and re.search(r"[^\w\s,.;:!?'\"()-]", text))


def _flexible(text: str) -> str:
    """A regular expression of a text in which the amount of white space does not matter."""
    return r"\s*".join(re.escape(part) for part in re.split(r"\s+", text))


def _values(text: str, at: int) -> Iterator[tuple[int, int, Any]]:
    """The JSON lists and objects in a text, the outer ones first, and what follows inside those that are none."""
    while (opens := re.compile(r"[\[{\"]").search(text, at)) is not None:
        try:
            value, end = decode(text, opens.start())
        except Problem:
            at = opens.start() + 1
            continue
        yield opens.start(), end, value
        at = opens.start() + 1


# objects that hold the name: {"name": ..., "arguments": {...}}


@dataclass(frozen=True, slots=True)
class _Shape:
    """Where name and arguments are in a decoded call."""

    inside: str | None
    """The key of the object that has them, where that is not the call itself."""
    name: str | None
    """The key of the name; None where the name is the only key, and the arguments are its value."""
    arguments: str

    def named(self, value: Any) -> tuple[str, Arguments]:
        if self.inside is not None and isinstance(value, dict):
            value = value.get(self.inside, value)
        if self.name is not None:
            return named(value, name_key=self.name, keys=(self.arguments,), refused=_other(self.arguments))
        if not isinstance(value, dict) or len(value) != 1:
            raise Problem("it is no object with the tool's name as its only key", 0)
        ((name, arguments),) = value.items()
        return name, arguments_of(arguments)


def _other(key: str) -> str:
    return "arguments" if key == "parameters" else "parameters"


def _shape(value: Any, inside: str | None = None) -> _Shape | None:
    if not isinstance(value, dict):
        return None
    if list(value) == [_NAME]:
        return _Shape(inside, None, "")
    name = next((key for key, one in value.items() if one == _NAME), None)
    arguments = next((key for key, one in value.items() if _same(one, _FIRST)), None)
    if name is not None and arguments is not None:
        return _Shape(inside, name, arguments)
    if inside is None:
        return next((found for key, one in value.items() if (found := _shape(one, key))), None)
    return None


def _same(value: Any, arguments: Arguments) -> bool:
    if isinstance(value, str):
        try:
            value, _ = decode(value, 0)
        except Problem:
            return False
    return value == arguments


class _LearnedJson(JsonTagged):
    """Objects with the name, one after the other or in a list, between marks."""

    name = LEARNED

    def __init__(self, marks: _Marks, shape: _Shape) -> None:
        self.how, self.scaffold = marks.how, marks.scaffold
        self.opening, self.closing = _flexible(marks.opening), marks.closing
        self.close = _flexible(marks.closing) if marks.closing else _NEVER
        self.name_key = shape.name or "name"
        self._shape = shape

    def named(self, value: Any) -> tuple[str, Arguments]:
        return self._shape.named(value)

    def read(self, text: str, mark: re.Match[str], tools: Sequence[ToolSchema]) -> Found:
        at = skip_space(text, mark.end())
        calls: list[ToolCall] = []
        while True:
            found, end = self.read_json(text, at)
            calls += found
            following = _ANOTHER.match(text, end) if found and found[-1].error is None else None
            if following is None:
                return calls, end
            at = following.end()

    def _after_json(self, text: str, end: int) -> int:
        following = _ANOTHER.match(text, end)
        return end if following or not self.closing else super()._after_json(text, end)


_ANOTHER = re.compile(r"\s*,?\s*(?=\{)")


def _json(written: Callable[..., str]) -> ToolFormat | None:
    def find(text: str, at: int) -> _Call | None:
        for start, end, value in _values(text, at):
            items = value if isinstance(value, list) else [value]
            if items and all(isinstance(item, dict) for item in items) and _NAME in text[start:end]:
                return _Call(start, end, (start, start))
        return None

    one = written(_FIRST)
    call = find(one, 0)
    marks = None if call is None else _marks(written, find)
    if call is None or marks is None:
        return None
    value, _ = decode(one, call.start)
    shape = _shape(value[0] if isinstance(value, list) else value)
    if shape is None:
        return None
    how = re.sub(r"\{[^{}]*\bvaluea\b[^{}]*\}", "{...}", one).replace(_NAME, "<tool>").strip()
    marks = _Marks(marks.opening, marks.closing, marks.around, how)
    return _LearnedJson(marks, shape) if _is_mark(marks.opening) else Llama3(how)


# the name, then the arguments as JSON


class _LearnedNameFirst(NameFirst):
    """The name, something between, and the arguments as JSON."""

    name = LEARNED

    def __init__(self, marks: _Marks, between: str) -> None:
        self.how, self.scaffold = marks.how, marks.scaffold
        self.opening, self.closing = _flexible(marks.opening), marks.closing
        self.close = _flexible(marks.closing) if marks.closing else _NEVER
        self.head = re.compile(rf"\s*(?P<name>[\w.\-]+)\s*{_flexible(between.strip())}")

    def _after_json(self, text: str, end: int) -> int:
        return super()._after_json(text, end) if self.closing else end


def _name_first(written: Callable[..., str]) -> ToolFormat | None:
    def find(text: str, at: int) -> _Call | None:
        for start, end, value in _values(text, at):
            name = text.rfind(_NAME, at, start)
            if name >= 0 and (_same(value, _FIRST) or _same(value, _SECOND)):
                return _Call(name, end, (start, end))
        return None

    one = written(_FIRST)
    call, marks = find(one, 0), _marks(written, find)
    if call is None or marks is None or not _is_mark(marks.opening):
        return None
    return _LearnedNameFirst(marks, one[call.start + len(_NAME) : call.arguments[0]])


class _LearnedBareName(NameFirst):
    """The name of a tool on offer on the turn's first line, then the arguments as a JSON object. One call a turn."""

    name = LEARNED
    how = "<tool>\n{...}"
    opening = r"\A\s*(?=[\w.\-]+[^\S\n]*\n\s*\{)"
    close, closing = _NEVER, ""
    head = re.compile(r"(?<![\w.\-])(?P<name>[\w.\-]+)[^\S\n]*\n\s*(?=\{)")

    def read(self, text: str, mark: re.Match[str], tools: Sequence[ToolSchema]) -> Found:
        known = names_of(tools)
        head = self.head.match(text, mark.end())
        if head is None or head["name"] not in known:
            return [], mark.end()  # words
        calls, end = super().read(text, mark, tools)
        again = next((one for one in self.head.finditer(text, end) if one["name"] in known), None)
        if again is None:
            return calls, end
        return [*calls, self.bad("only one call a turn can be read", text[end:], again["name"])], len(text)

    def _after_json(self, text: str, end: int) -> int:
        return end


def _bare_name(written: Callable[..., str]) -> ToolFormat | None:
    return _LearnedBareName() if re.match(rf"\s*{_NAME}[^\S\n]*\n\s*\{{", written(_FIRST)) else None


# the name, then the arguments one by one between marks


class _LearnedMarked(MarkedArguments):
    """The name, and arguments between marks."""

    name = LEARNED

    def __init__(self, marks: _Marks, name_ends: str, keys: tuple[str, Sequence[str]], closes: str, ends: str) -> None:
        opens, closes_key = keys
        self.how, self.scaffold = marks.how, marks.scaffold
        self.says = ends.split()[0]
        head = marks.opening
        key, end, value = _flexible(opens), _flexible(ends), _flexible(closes.strip())
        key_ends = "|".join(_flexible(close.rstrip(" \t\r\n")) for close in closes_key)
        self.a_line = all(close.endswith("\n") for close in closes_key) and closes.startswith("\n")
        self.opening = _flexible(head)
        self.begins = re.compile(rf"{self.opening}\s*(?P<name>[\w.\-]+)\s*{_flexible(name_ends)}")
        self.ends = re.compile(rf"\s*{end}")
        self.argument = re.compile(rf"\s*{key}\s*(?P<key>[^<>\n\"]+?)\s*(?:{key_ends})")
        self.value_ends = re.compile(rf"{value}(?=\s*(?:{key}|{end}|\Z))")
        self.gives_up = re.compile(rf"{end}|(?={self.opening})|\Z")


def _marked(written: Callable[..., str]) -> ToolFormat | None:
    order = re.compile(rf"{_NAME}|alpha|beta|value[a-d]|73[12]")

    def find(text: str, at: int) -> _Call | None:
        found = list(order.finditer(text, at))[:5]
        kinds = [one[0] for one in found]
        if kinds[:1] != [_NAME] or kinds[1::2] != ["alpha", "beta"]:
            return None
        return _Call(found[0].start(), found[4].end(), (found[1].start(), found[4].end()))

    def parts(arguments: Arguments) -> list[str]:
        """What stands between name, key, value, key and value, and behind them."""
        text = written(arguments)
        found = list(order.finditer(text))[:5]
        edges = [*(one.start() for one in found[1:]), len(text)]
        return [text[one.end() : edge] for one, edge in zip(found, edges, strict=True)]

    marks = _marks(written, find)
    if marks is None or not _is_mark(marks.opening):
        return None
    to_key, to_value, to_next, again, last = parts(_FIRST)
    typed = parts(_NUMBERS)
    closes, opens = _split(to_key, to_next, last)
    ends = marks.closing[len(closes.strip()) :].strip() if marks.closing.startswith(closes.strip()) else ""
    if to_value != again or not _is_mark(opens.strip()) or not closes.strip() or not ends:
        return None
    keys = (opens.strip(), list(dict.fromkeys([to_value, typed[1]] if len(typed) > 1 else [to_value])))
    one = written({"alpha": "valuea"})
    how = one.replace(_NAME, "<tool>").replace("alpha", "<name>").replace("valuea", "<value>").strip()
    marks = _Marks(marks.opening, marks.closing, marks.around, how)
    return _LearnedMarked(marks, to_key[: len(to_key) - len(opens)].strip(), keys, closes, ends)


# as in Python


class _LearnedPython(PythonCalls):
    """Calls as in Python between marks."""

    name = LEARNED

    def __init__(self, marks: _Marks) -> None:
        self.how, self.scaffold = marks.how, marks.scaffold
        self.opening = _flexible(marks.opening.removesuffix("[").rstrip())
        self.close = _flexible(marks.closing.removeprefix("]").lstrip()) or _NEVER


def _python(written: Callable[..., str]) -> ToolFormat | None:
    call = re.compile(rf"{_NAME}\s*\(\s*alpha\s*=.*?value[bd]['\"]?\s*\)", re.DOTALL)

    def find(text: str, at: int) -> _Call | None:
        found = call.search(text, at)
        return found and _Call(found.start(), found.end(), (found.end() - 1, found.end() - 1))

    marks = _marks(written, find)
    if marks is None or not _is_mark(marks.opening.removesuffix("[")) or not marks.closing.removeprefix("]"):
        return None
    how = re.sub(r"\(.*\)", "(<name>=<value>, ...)", marks.how, flags=re.DOTALL)
    return _LearnedPython(_Marks(marks.opening, marks.closing, marks.around, how))
