"""Calls written as in Python: `[f(a=1), g()]`, without marks (Llama 4) or between marks (LFM2).

    <|tool_call_start|>[search(query="weather", days=3), now()]<|tool_call_end|>

The list is split at its commas first, so a malformed call does not affect its neighbours. Then Python's parser (`ast`) parses
each value, which must be a literal; nothing is evaluated. A valid Python literal means what it means in Python (triple quotes,
adjacent strings). Templates also write three things that Python refuses, and they are accepted: JSON's `true`, `false` and
`null`; line breaks in a string; quotes in a string that are not escaped. For the last, a call that is no valid Python is parsed
again by a lenient rule: a quote ends a string only if a comma, a colon or a closing bracket follows. A value may not hold the
opening mark of a list.

Malformed calls: parsing continues at the next `, name(`, or at the end of the list. How much text may be parsed twice is limited
(`_MAX_REPARSE`), so that hostile text does not take quadratic time.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Sequence
from typing import Any

from turnwise.chat.tool_calls.parsing import (
    MalformedCall,
    MarkedFormat,
    ParsedCalls,
    refuse_unwritable,
    skip_space,
    tool_names,
    well_formed_call,
)
from turnwise.types import ToolCall, ToolSchema

_NAME = r"[^\W\d][\w.\-]*"
_HEAD = re.compile(rf"(?P<name>{_NAME})\s*\(")
_ARGUMENT = re.compile(r"\s*(?P<key>[^\W\d][\w.\-]*)\s*=(?!=)")
_CLOSES = r"\s*(?:[,)\]}:]|\Z)"
_MARK = r"""(?P<mark>[\[\](){},'"])"""
_PYTHON_TOKENS = re.compile(
    rf"""(?P<string>\'\'\'(?:[^'\\]|\\.|'(?!''))*+\'\'\'|\"\"\"(?:[^"\\]|\\.|"(?!""))*+\"\"\""""
    rf"""|'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+")|{_MARK}""",
    re.DOTALL,
)
"""String literals and punctuation, as in Python."""
_LENIENT_TOKENS = re.compile(
    rf"""(?P<string>'(?:[^'\\]|\\.|'(?!{_CLOSES}))*+'|"(?:[^"\\]|\\.|"(?!{_CLOSES}))*+")|{_MARK}""",
    re.DOTALL,
)
"""The same, for strings with quotes that are not escaped."""
_TO_ESCAPE = re.compile(r"""\\.|["'\n\r\0]""", re.DOTALL)
_ESCAPES = {"\n": r"\n", "\r": r"\r", "\0": r"\0"}
_PAIRS = {"(": ")", "[": "]", "{": "}"}
_WORDS = {"true": True, "false": False, "null": None}
_MAX_DEPTH = 50  # of brackets inside each other
_MAX_REPARSE = (
    8  # characters parsed in vain, as a multiple of the list's length, before the rest of the list is given up
)


class PythonCalls(MarkedFormat):
    """A list of calls after an opening mark. A subclass that sets attributes in `__init__` calls `super().__init__` after."""

    closing_pattern: str
    """Regular expression of the closing mark after the list."""
    unmarked = False
    """Whether there is no real opening mark, so that a list may be content."""

    def __init__(self) -> None:
        closing = self.closing_pattern
        self._opening = re.compile(self.opening_pattern)
        self._closing = re.compile(closing)
        self._closing_or_end = re.compile(rf"\s*(?:{closing}|\Z)")
        self._recovery = re.compile(rf"{closing}|\Z")
        # the next call, or the end of the list; possessive and with a look-behind, so that white space is scanned only once
        self._next_call = re.compile(rf",\s*(?={_NAME}\s*\()|(?=\]\s*+{closing})|(?<!\s)(?=\s*+{closing})|\Z")

    def read_calls(self, text: str, mark: re.Match[str], tools: Sequence[ToolSchema]) -> ParsedCalls:
        begin = skip_space(text, mark.end())
        following = self._opening.search(text, begin + 1)
        limit = following.start() if following else len(text)
        calls, at = self._items(text, begin + text.startswith("[", begin), limit)
        if self.unmarked and not _are_calls(calls, tools):
            return [], begin + 1
        if not calls:
            calls.append(self.malformed("the list is empty", text[begin:at]))
        close = self._closing_or_end.match(text, at, limit)
        if close is None and not self.unmarked:
            stop = self._recovery.search(text, at, limit)
            first, last = stop.span() if stop else (limit, limit)
            calls.append(
                self.malformed(
                    f"{text[at:first].strip()[:20]!r} follows the list; write all calls in one list", text[at:first]
                )
            )
            return calls, last
        return calls, close.end() if close else at

    def _items(self, text: str, at: int, limit: int) -> tuple[list[ToolCall], int]:
        """The calls of a list whose first call begins at `at`, and the index after the list."""
        calls: list[ToolCall] = []
        wasted, max_wasted = 0, _MAX_REPARSE * (limit - at)  # characters parsed in vain
        while (at := skip_space(text, at)) < limit:
            if text.startswith("]", at):
                return calls, at + 1
            if self._closing.match(text, at):
                return calls, at
            try:
                name, arguments, end, wasted_here = _read_call(text, at, limit, strict=wasted <= max_wasted)
                wasted += wasted_here
            except MalformedCall as problem:
                wasted += problem.at - at
                give_up = problem.give_up or wasted > max_wasted
                following = None if give_up else self._next_call.search(text, at, limit)
                first, end = following.span() if following else (limit, limit)
                head = _HEAD.match(text, at, limit)
                calls.append(self.malformed(problem, text[at:first], head["name"] if head else ""))
                at = end
                continue
            if isinstance(arguments, MalformedCall):
                calls.append(self.malformed(arguments, text[at:end], name))
            else:
                calls.append(well_formed_call(name, arguments, text[at:end]))
            at = skip_space(text, end)
            if text.startswith(",", at):
                at += 1
            elif not text.startswith("]", at) and not ("\n" in text[end:at] and _HEAD.match(text, at, limit)):
                return calls, at  # only calls on separate lines need no comma
        return calls, limit


def _are_calls(calls: Sequence[ToolCall], tools: Sequence[ToolSchema]) -> bool:
    """Whether a list without marks is a list of calls: a call is well-formed, or has the name of a tool (any name if no tools
    are known)."""
    known = tool_names(tools)
    return any(call.error is None or not known or call.name in known for call in calls)


def _read_call(text: str, at: int, limit: int, *, strict: bool) -> tuple[str, dict[str, Any] | MalformedCall, int, int]:
    """The call at `at`: its name, its arguments or why they are malformed, the index after it, and the number of characters
    that were parsed in vain. `strict`: parse it as Python first, and leniently only if that fails.

    Raises MalformedCall if the end of the call is not found.
    """
    wasted = at
    if strict:
        try:
            name, written, wasted = _split_call(text, at, limit, _PYTHON_TOKENS)
            return name, _arguments(written, wasted), wasted, 0
        except MalformedCall as problem:
            wasted = max(wasted, limit if problem.give_up else problem.at)
    try:
        name, written, end = _split_call(text, at, limit, _LENIENT_TOKENS)
    except MalformedCall as problem:
        raise MalformedCall(str(problem), max(wasted, problem.at), give_up=problem.give_up) from None
    try:
        return name, _arguments(written, end), end, wasted - at
    except MalformedCall as problem:
        return name, problem, end, wasted - at


def _split_call(text: str, at: int, limit: int, tokens: re.Pattern[str]) -> tuple[str, list[str], int]:
    """The call at `at`: its name, the Python source of each argument, and the index after it. Raises MalformedCall."""
    head = _HEAD.match(text, at, limit)
    if head is None:
        raise MalformedCall(f"{text[at : min(at + 20, limit)]!r} is not a call of the form <tool>(<name>=<value>)", at)
    arguments: list[str] = []
    pieces: list[str] = []
    open_brackets = [")"]
    begin = head.end()
    for token in tokens.finditer(text, head.end(), limit):
        pieces.append(text[begin : token.start()].replace("\n", " "))  # between brackets a line may end anywhere
        begin = token.end()
        mark = token[0]
        if token["string"] is not None:
            pieces.append(_as_python_string(mark))
            continue
        if mark in "'\"":
            raise MalformedCall("a string is not closed", token.start(), give_up=True)
        if mark in _PAIRS:
            open_brackets.append(_PAIRS[mark])
            if len(open_brackets) > _MAX_DEPTH:
                raise MalformedCall("the arguments are nested too deeply", token.start())
        elif mark != "," and mark != open_brackets.pop():
            raise MalformedCall(
                f"{text[token.start() : token.start() + 20]!r} closes a bracket that is not open", token.start()
            )
        if not open_brackets or (mark == "," and len(open_brackets) == 1):
            arguments.append("".join(pieces))
            pieces.clear()
            if not open_brackets:
                return head["name"], arguments, token.end()
        else:
            pieces.append(mark)
    raise MalformedCall("the closing ) is missing", limit)


def _as_python_string(literal: str) -> str:
    """A string literal that Python accepts: line breaks and its own quotes escaped; in triple quotes both are allowed."""
    if literal[:3] in ("'''", '"""') and len(literal) > 5:
        return re.sub(r"\\.|[\r\0]", lambda match: _ESCAPES.get(match[0], match[0]), literal, flags=re.DOTALL)

    def escape(match: re.Match[str]) -> str:
        character = match[0]
        return _ESCAPES.get(character) or ("\\" + character if character == literal[0] else character)

    return literal[0] + _TO_ESCAPE.sub(escape, literal[1:-1]) + literal[0]


def _arguments(written: Sequence[str], at: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if len(written) > 1 and not written[-1].strip():
        written = written[:-1]  # a comma after the last one
    if len(written) == 1 and not written[0].strip():
        return {}
    for text in written:
        argument = _ARGUMENT.match(text)
        if argument is None:
            raise MalformedCall(f"{text.strip()[:20]!r} has no name; write arguments as <name>=<value>", at)
        arguments[argument["key"]] = _literal(text[argument.end() :].strip(), at)
    return arguments


def _literal(source: str, at: int) -> Any:
    """The value of a Python literal. Raises MalformedCall."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unknown escapes, such as \d in a regular expression
            value = _value(ast.parse(source, mode="eval").body)
    except MalformedCall:
        raise
    except SyntaxError as error:
        raise MalformedCall(f"{source[:20]!r}: {error.msg}", at) from None
    except (ValueError, RecursionError, MemoryError):  # a number of too many digits; an expression nested too deep
        raise MalformedCall(f"{source[:20]!r} is too long", at) from None
    if "\\" in source:
        value = _join_surrogates(value)
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
    raise MalformedCall(f"{ast.unparse(node)[:20]!r} is not a literal value", 0)


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise MalformedCall("the keys of a dictionary must be strings", 0)


def _join_surrogates(value: Any) -> Any:
    """The value with surrogate pairs (JSON escapes characters beyond U+FFFF as two) joined to characters."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    if isinstance(value, list):
        return [_join_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_join_surrogates(key): _join_surrogates(item) for key, item in value.items()}
    return value


class Lfm2(PythonCalls):
    """LFM2 and LFM2.5: `<|tool_call_start|>[f(a=1), g()]<|tool_call_end|>`."""

    name = "lfm2"
    example = "<|tool_call_start|>[<tool>(<name>=<value>, ...)]<|tool_call_end|>"
    opening_pattern, closing_pattern = r"<\|tool_call_start\|>", r"<\|tool_call_end\|>"


class Pythonic(PythonCalls):
    """Llama 4: `[f(a=1), g()]` at the beginning of a line, or between `<|python_start|>` and `<|python_end|>`."""

    name = "pythonic"
    example = "[<tool>(<name>=<value>, ...)]"
    opening_pattern = rf"(?:\A|(?<=[\n>]))[ \t]*(?:<\|python_start\|>\s*)?(?=\[\s*{_NAME}\s*\()"
    closing_pattern = r"<\|python_end\|>"
    unmarked = True
