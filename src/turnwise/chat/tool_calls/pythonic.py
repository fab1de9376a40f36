"""Calls as Python writes them, `[f(a=1), g()]`: bare (Llama 4), and between marks (LFM2).

A list is taken apart at its commas first, so that one bad call leaves the others alone; then Python's own parser reads each
value, and its literals are read off the tree: nothing is evaluated. What Python reads means what it means in Python (triple
quotes, strings side by side). Three things are understood that Python refuses, because templates write them: JSON's `true`,
`false` and `null`, line breaks in a string, and a quote in a string that was not escaped: where a call is no Python, a quote
that no comma, colon or closing bracket follows closes nothing. A value may not hold the mark that opens a list.
"""

from __future__ import annotations

import ast
import functools
import math
import re
import warnings
from collections.abc import Sequence
from typing import Any

from turnwise.chat.tool_calls.json_text import refuse_unwritable
from turnwise.chat.tool_calls.reading import Found, Problem, Tagged, names_of, skip_space, well_formed
from turnwise.types import ToolCall, ToolSchema

__all__ = ["Lfm2", "PythonCalls", "Pythonic"]

_NAME = r"[^\W\d][\w.\-]*"
_HEAD = re.compile(rf"(?P<name>{_NAME})\s*\(")
_ARGUMENT = re.compile(r"\s*(?P<key>[^\W\d][\w.\-]*)\s*=(?!=)")
_CLOSES = r"\s*(?:[,)\]}:]|\Z)"
_MARK = r"""(?P<mark>[\[\](){},'"])"""
_PYTHONS = re.compile(
    rf"""(?P<string>\'\'\'(?:[^'\\]|\\.|'(?!''))*+\'\'\'|\"\"\"(?:[^"\\]|\\.|"(?!""))*+\"\"\""""
    rf"""|'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+")|{_MARK}""",
    re.DOTALL,
)
"""Strings and marks as Python has them."""
_LENIENT = re.compile(
    rf"""(?P<string>'(?:[^'\\]|\\.|'(?!{_CLOSES}))*+'|"(?:[^"\\]|\\.|"(?!{_CLOSES}))*+")|{_MARK}""",
    re.DOTALL,
)
"""The same where quotes in strings are not escaped."""
_TO_ESCAPE = re.compile(r"""\\.|["'\n\r\0]""", re.DOTALL)
_ESCAPES = {"\n": r"\n", "\r": r"\r", "\0": r"\0"}
_PAIRS = {"(": ")", "[": "]", "{": "}"}
_WORDS = {"true": True, "false": False, "null": None}
_DEEPEST = 50  # brackets inside each other
_READ_AGAIN = 8  # times that a list may be read over before no further call is looked for in it


class PythonCalls(Tagged):
    close: str
    """Regular expression of the mark that follows the list."""
    bare = False
    """Whether the opening mark is so weak that what it opens may be no call."""

    def read(self, text: str, mark: re.Match[str], tools: Sequence[ToolSchema]) -> Found:
        begin = skip_space(text, mark.end())
        following = self._opens.search(text, begin + 1)
        limit = following.start() if following else len(text)
        calls, at = self._items(text, begin + text.startswith("[", begin), limit)
        if self.bare and not _meant(calls, tools):
            return [], begin + 1
        if not calls:
            calls.append(self.bad("the list is empty", text[begin:at]))
        close = self._ends.match(text, at, limit)
        if close is None and not self.bare:
            stop = self._stops.search(text, at, limit)
            first, last = stop.span() if stop else (limit, limit)
            calls.append(self.bad(f"{text[at:first].strip()[:20]!r} follows the list", text[at:first]))
            return calls, last
        return calls, close.end() if close else at

    def _items(self, text: str, at: int, limit: int) -> tuple[list[ToolCall], int]:
        """The calls of a list, and where it ends."""
        calls: list[ToolCall] = []
        read, most = 0, _READ_AGAIN * (limit - at)  # characters of calls that could not be read, and how many may be
        while (at := skip_space(text, at)) < limit:
            if text.startswith("]", at):
                return calls, at + 1
            if self._closing.match(text, at):
                return calls, at
            try:
                name, arguments, end, wasted = _read(text, at, limit, strict=read <= most)
                read += wasted
            except Problem as problem:
                read += problem.at - at
                hopeless = problem.hopeless or read > most
                following = None if hopeless else self._beyond.search(text, at, limit)
                first, end = following.span() if following else (limit, limit)
                head = _HEAD.match(text, at, limit)
                calls.append(self.bad(problem, text[at:first], head["name"] if head else ""))
                at = end
                continue
            if isinstance(arguments, Problem):
                calls.append(self.bad(arguments, text[at:end], name))
            else:
                calls.append(well_formed(name, arguments, text[at:end]))
            at = skip_space(text, end)
            if text.startswith(",", at):
                at += 1
            elif not text.startswith("]", at) and not ("\n" in text[end:at] and _HEAD.match(text, at, limit)):
                return calls, at  # calls on lines of their own need no comma
        return calls, limit

    @functools.cached_property
    def _opens(self) -> re.Pattern[str]:
        return re.compile(self.opening)

    @functools.cached_property
    def _closing(self) -> re.Pattern[str]:
        return re.compile(self.close)

    @functools.cached_property
    def _ends(self) -> re.Pattern[str]:
        return re.compile(rf"\s*(?:{self.close}|\Z)")

    @functools.cached_property
    def _stops(self) -> re.Pattern[str]:
        return re.compile(rf"{self.close}|\Z")

    @functools.cached_property
    def _beyond(self) -> re.Pattern[str]:
        """What the next call, or the end, is told by. White space is looked at from where it begins only: not over and over."""
        return re.compile(rf",\s*(?={_NAME}\s*\()|(?=\]\s*+{self.close})|(?<!\s)(?=\s*+{self.close})|\Z")


def _meant(calls: Sequence[ToolCall], tools: Sequence[ToolSchema]) -> bool:
    """Whether what looks like calls is any: one can be read, or bears the name of a tool (of any, if none are known)."""
    known = names_of(tools)
    return any(call.error is None or not known or call.name in known for call in calls)


def _read(text: str, at: int, limit: int, *, strict: bool) -> tuple[str, dict[str, Any] | Problem, int, int]:
    """The call at `at`: its name, its arguments or why they cannot be read, where it ends, and how many characters were read
    in vain. With `strict` it is read as Python first.

    Raises Problem if it has no end.
    """
    wasted = at
    if strict:
        try:
            name, written, wasted = _one(text, at, limit, _PYTHONS)
            return name, _arguments(written, wasted), wasted, 0
        except Problem as problem:
            wasted = max(wasted, limit if problem.hopeless else problem.at)
    try:
        name, written, end = _one(text, at, limit, _LENIENT)
    except Problem as problem:
        raise Problem(str(problem), max(wasted, problem.at), hopeless=problem.hopeless) from None
    try:
        return name, _arguments(written, end), end, wasted - at
    except Problem as problem:
        return name, problem, end, wasted - at


def _one(text: str, at: int, limit: int, tokens: re.Pattern[str]) -> tuple[str, list[str], int]:
    """The call at `at`: its name, its arguments as Python source, and where it ends.

    Raises Problem.
    """
    head = _HEAD.match(text, at, limit)
    if head is None:
        raise Problem(f"{text[at : min(at + 20, limit)]!r} is no call, <tool>(<name>=<value>)", at)
    arguments: list[str] = []
    pieces: list[str] = []
    open_brackets = [")"]
    begin = head.end()
    for token in tokens.finditer(text, head.end(), limit):
        pieces.append(text[begin : token.start()].replace("\n", " "))  # between brackets a line may end anywhere
        begin = token.end()
        mark = token[0]
        if token["string"] is not None:
            pieces.append(_escaped(mark))
            continue
        if mark in "'\"":
            raise Problem("a string is not closed", token.start(), hopeless=True)
        if mark in _PAIRS:
            open_brackets.append(_PAIRS[mark])
            if len(open_brackets) > _DEEPEST:
                raise Problem("it is nested too deep", token.start())
        elif mark != "," and mark != open_brackets.pop():
            raise Problem(f"{text[token.start() : token.start() + 20]!r} closes what is not open", token.start())
        if not open_brackets or (mark == "," and len(open_brackets) == 1):
            arguments.append("".join(pieces))
            pieces.clear()
            if not open_brackets:
                return head["name"], arguments, token.end()
        else:
            pieces.append(mark)
    raise Problem("its ) is missing", limit)


def _escaped(literal: str) -> str:
    """A string literal as Python wants it: one line, its own quotes escaped; between triple quotes both may stay."""
    if literal[:3] in ("'''", '"""') and len(literal) > 5:
        return re.sub(r"\\.|[\r\0]", lambda found: _ESCAPES.get(found[0], found[0]), literal, flags=re.DOTALL)

    def escape(found: re.Match[str]) -> str:
        character = found[0]
        return _ESCAPES.get(character) or ("\\" + character if character == literal[0] else character)

    return literal[0] + _TO_ESCAPE.sub(escape, literal[1:-1]) + literal[0]


def _arguments(written: Sequence[str], at: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if len(written) > 1 and not written[-1].strip():
        written = written[:-1]  # a comma after the last one
    if len(written) == 1 and not written[0].strip():
        return {}
    for one in written:
        argument = _ARGUMENT.match(one)
        if argument is None:
            raise Problem(f"{one.strip()[:20]!r} has no name; arguments are written <name>=<value>", at)
        arguments[argument["key"]] = _literal(one[argument.end() :].strip(), at)
    return arguments


def _literal(source: str, at: int) -> Any:
    """The value of a literal.

    Raises Problem.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unknown escapes, as in a regular expression
            value = _value(ast.parse(source, mode="eval").body)
    except Problem:
        raise
    except SyntaxError as error:
        raise Problem(f"{source[:20]!r}: {error.msg}", at) from None
    except (ValueError, RecursionError, MemoryError):  # a number of too many digits; an expression nested too deep
        raise Problem(f"{source[:20]!r} is too long", at) from None
    if "\\" in source:
        value = _paired(value)
        refuse_unwritable(value, at)
    return value


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | str() | int() as value):
            return value
        case ast.Constant(value=float() as value) if math.isfinite(value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)) if math.isfinite(value):
            return -value
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise Problem(f"{ast.unparse(node)[:20]!r} is no literal", 0)


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise Problem("a key of a dictionary is no string", 0)


def _paired(value: Any) -> Any:
    """Surrogate pairs, as JSON escapes them, as the characters that they mean."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    if isinstance(value, list):
        return [_paired(item) for item in value]
    if isinstance(value, dict):
        return {_paired(key): _paired(item) for key, item in value.items()}
    return value


class Lfm2(PythonCalls):
    """`<|tool_call_start|>[f(a=1), g()]<|tool_call_end|>`."""

    name = "lfm2"
    how = "<|tool_call_start|>[<tool>(<name>=<value>, ...)]<|tool_call_end|>"
    opening, close = r"<\|tool_call_start\|>", r"<\|tool_call_end\|>"


class Pythonic(PythonCalls):
    """`[f(a=1), g()]` at the beginning of a line, or between `<|python_start|>` and `<|python_end|>`."""

    name = "pythonic"
    how = "[<tool>(<name>=<value>, ...)]"
    opening = rf"(?:\A|(?<=[\n>]))[ \t]*(?:<\|python_start\|>\s*)?(?=\[\s*{_NAME}\s*\()"
    close = r"<\|python_end\|>"
    bare = True
