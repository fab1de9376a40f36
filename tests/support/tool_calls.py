"""How every family writes its calls, and what usually goes wrong with them: the torture table of benchmarks/README.md."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.chat.tool_calls import format_by_name
from turnwise.types import ToolCall, ToolSchema

Expected = tuple[str, dict[str, Any]] | None
"""A call that is read, or None for one that is told to be malformed."""

THINK = ("<think>", "</think>")
NEVER = re.compile(r"(?!)")


def as_json(arguments: Mapping[str, Any]) -> str:
    """Arguments as JSON."""
    return json.dumps(arguments, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One way to write calls. `inner` is what a call has for arguments, as a text."""

    format: str
    style: str = ""
    """Where a format has several ways to write."""
    call: Callable[[str, str], str]
    """A call of a name and an inner text, without what stands around all calls of a turn."""
    inner: Callable[[Mapping[str, Any]], str] = as_json
    around: tuple[str, str, str] = ("", "\n", "")
    """What stands before the calls of a turn, between them and after them."""
    close: str
    """The mark that closes a call."""
    marks: str
    """A text of all the marks that a value can hold."""
    forbidden: re.Pattern[str] = NEVER
    """What a value cannot hold."""
    keys: str = r"[a-z_]{1,8}"
    """What the name of an argument may be, as a regular expression."""
    think: tuple[str, str] = THINK
    missing: str
    """A turn with a call of `f` that has no arguments."""
    broken: str
    """An inner text that cannot be read."""
    string: str | None = None
    """A turn with a call of `f` whose arguments, x = 1, are JSON in a string; None where there is no such thing."""
    quotes: tuple[str, Expected] | None = None
    """An inner text with Python's quotes, and what becomes of it."""
    nan: tuple[str, Expected] = ('{"n": NaN}', None)
    """An inner text with NaN, and what becomes of it."""
    listed: str | None = None
    """A turn with a list of two calls, f with x = "1" and g, where that is not simply two calls."""
    unclosed_is_read: bool = True
    """Whether a call is whole without the mark that closes it."""

    @property
    def title(self) -> str:
        return f"{self.format}, {self.style}" if self.style else self.format

    def turn(self, *calls: str) -> str:
        """A turn with these calls."""
        before, between, after = self.around
        return before + between.join(calls) + after

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """A turn with these calls."""
        return self.turn(*(self.call(name, self.inner(arguments)) for name, arguments in calls))

    def read(self, text: str, tools: Sequence[ToolSchema]) -> tuple[ToolCall, ...]:
        """The calls in a turn."""
        return format_by_name(self.format).parse(text, tools=tools).calls


TOOLS: list[ToolSchema] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "string"}, "n": {"type": "number"}, "o": {"type": "object"}},
            },
        },
    }
    for name in ("f", "g")
]


def tools_for(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> list[ToolSchema]:
    """Tools that declare which arguments are texts, as far as the names say one thing."""
    found: dict[str, dict[str, Any]] = {}
    for name, arguments in calls:
        for key, value in arguments.items():
            found.setdefault(name, {})[key] = {"type": "string"} if isinstance(value, str) else {}
    return [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
        for name, properties in found.items()
    ]


@dataclass(frozen=True)
class Case:
    """A turn, and the calls that are to be read from it."""

    name: str
    text: str
    expected: list[Expected]


def cases(family: Family) -> list[Case]:
    """The torture of one family; cases that it cannot have are left out."""
    good = family.write([("g", {"x": "1"})])
    bad = family.turn(family.call("f", family.broken))
    nested = {"o": {"a": [1, {"b": None}], "c": {}}, "n": -2.5, "x": "null"}
    in_string = {"x": f"a {family.close} b"}
    delimiters = {"x": family.marks}
    one = family.call("f", family.inner({"x": "1"}))
    unclosed = family.around[0] + one.removesuffix(family.close).rstrip("\n")
    cut = family.around[0] + one[: one.index("1")]
    opening, closing = family.think
    thought = good.replace("<|start|>assistant", "")  # a message is not in another one
    listed = family.listed or family.write([("f", {"x": "1"}), ("g", {})])
    found = [
        Case("closing mark in a value", family.write([("f", in_string)]), [("f", in_string)]),
        Case("unclosed at the end", unclosed, [("f", {"x": "1"}) if family.unclosed_is_read else None]),
        Case("cut in its arguments", cut, [None]),
        Case("only thought of", f"{opening}{thought}{closing}Done.", []),
        Case("bad, then good", f"{bad}\n{good}", [None, ("g", {"x": "1"})]),
        Case("good, then bad", f"{good}\n{bad}", [("g", {"x": "1"}), None]),
        Case("missing arguments", family.missing, [("f", {})]),
        Case("list of calls", listed, [("f", {"x": "1"}), ("g", {})]),
        Case("NaN", family.turn(family.call("f", family.nan[0])), [family.nan[1]]),
        Case("nested arguments", family.write([("f", nested)]), [("f", nested)]),
        Case("marks in a value", family.write([("f", delimiters)]), [("f", delimiters)]),
    ]
    if family.string is not None:
        found.insert(6, Case("arguments in a string", family.string, [("f", {"x": 1})]))
    if family.quotes is not None:
        inner, expected = family.quotes
        found.insert(8, Case("single quotes", family.turn(family.call("f", inner)), [expected]))
    return found


def _qwen(name: str, inner: str) -> str:
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _qwen_inner(arguments: Mapping[str, Any]) -> str:
    return "".join(f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in arguments.items())


def _glm(name: str, inner: str) -> str:
    return f"<tool_call>{name}\n{inner}</tool_call>"


def _glm_inner(arguments: Mapping[str, Any]) -> str:
    return "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n" for key, value in arguments.items()
    )


def _muse(name: str, inner: str) -> str:
    calls = f'<atem:function_calls>\n<atem:invoke name="{name}">\n{inner}</atem:invoke>\n</atem:function_calls>'
    return f" to={name}<|message|>{calls}"


def _muse_inner(arguments: Mapping[str, Any]) -> str:
    return "".join(
        f'<atem:parameter name="{key}">{_text(value)}</atem:parameter>\n' for key, value in arguments.items()
    )


def _gemma(quote: str) -> Callable[[Any], str]:
    def write(value: Any) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{key}:{write(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(write(item) for item in value) + "]"
        return json.dumps(value)

    return write


def _python_inner(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


def _lfm2_inner(arguments: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key}={as_json(value) if isinstance(value, dict) else repr(value)}" for key, value in arguments.items()
    )


_FENCE = "```"
_SINGLE = ("{'x': '1'}", None)
_STRING = json.dumps('{"x": 1}')
_XML_QUOTES = {"o": "{'a': 1}"}
_XML_NAN = {"n": "NaN"}

FAMILIES: list[Family] = [
    Family(
        format="hermes",
        call=lambda name, inner: f'<tool_call>\n{{"name": "{name}", "arguments": {inner}}}\n</tool_call>',
        close="\n</tool_call>",
        marks='<think></tool_call><tool_call>\n{"name": "g"}\n</tool_call></think>',
        keys=".*",
        missing='<tool_call>{"name": "f"}</tool_call>',
        broken='{"x": ',
        string=f'<tool_call>{{"name": "f", "arguments": {_STRING}}}</tool_call>',
        quotes=_SINGLE,
        listed='<tool_call>[{"name": "f", "arguments": {"x": "1"}}, {"name": "g", "arguments": {}}]</tool_call>',
    ),
    Family(
        format="qwen3_coder",
        call=_qwen,
        inner=_qwen_inner,
        close="\n</tool_call>",
        marks="a</parameter>b</function></tool_call>c<parameter=x>d<tool_call><think>",
        forbidden=re.compile(r"<function=|</parameter>\s*<parameter="),
        missing="<tool_call>\n<function=f>\n</function>\n</tool_call>",
        broken="<parameter=x>\n1\n",
        quotes=(_qwen_inner(_XML_QUOTES), ("f", _XML_QUOTES)),
        nan=(_qwen_inner(_XML_NAN), ("f", _XML_NAN)),
    ),
    Family(
        format="glm",
        call=_glm,
        inner=_glm_inner,
        close="</tool_call>",
        marks="a</arg_value>b</tool_call>c<arg_key>d</arg_key><arg_value><tool_call><think>",
        forbidden=re.compile(r"<tool_call>\s*[^\s<]*\s*(?:<arg_key>|</tool_call>|\Z)|</arg_value>\s*<arg_key>"),
        missing="<tool_call>f\n</tool_call>",
        broken="<arg_key>x</arg_key>\n1\n",
        quotes=(_glm_inner(_XML_QUOTES), ("f", _XML_QUOTES)),
        nan=(_glm_inner(_XML_NAN), ("f", _XML_NAN)),
        unclosed_is_read=False,
    ),
    Family(
        format="deepseek",
        style="V3 and R1",
        call=lambda name, inner: (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n{_FENCE}json\n{inner}\n{_FENCE}<｜tool▁call▁end｜>"
        ),
        around=("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
        close="<｜tool▁call▁end｜>",
        marks=f"\n{_FENCE}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>g<think>",
        keys=".*",
        missing=f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{_FENCE}json\n{_FENCE}<｜tool▁call▁end｜>",
        broken='{"x": ',
        string=f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{_STRING}<｜tool▁call▁end｜>",
        quotes=_SINGLE,
    ),
    Family(
        format="deepseek",
        style="V3.1",
        call=lambda name, inner: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{inner}<｜tool▁call▁end｜>",
        around=("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
        close="<｜tool▁call▁end｜>",
        marks="<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<think>",
        keys=".*",
        missing="<｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜>",
        broken='{"x": ',
        string=f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{_STRING}<｜tool▁call▁end｜>",
        quotes=_SINGLE,
    ),
    Family(
        format="kimi",
        call=lambda name, inner: (
            f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{inner}<|tool_call_end|>"
        ),
        around=("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
        close="<|tool_call_end|>",
        marks="<|tool_call_end|><|tool_calls_section_end|><|tool_call_begin|>functions.g:0<|tool_call_argument_begin|>{}",
        keys=".*",
        missing="<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|><|tool_call_end|>",
        broken='{"x": ',
        string=f"<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{_STRING}<|tool_call_end|>",
        quotes=_SINGLE,
    ),
    Family(
        format="mistral",
        style="list",
        call=lambda name, inner: f'{{"name": "{name}", "arguments": {inner}}}',
        around=("[TOOL_CALLS][", ", ", "]"),
        close="]",
        marks='[TOOL_CALLS][{"name": "g"}] ]g[ARGS]{} [THINK]',
        keys=".*",
        think=("[THINK]", "[/THINK]"),
        missing='[TOOL_CALLS][{"name": "f"}]',
        broken='{"x": ',
        string=f'[TOOL_CALLS][{{"name": "f", "arguments": {_STRING}}}]',
        quotes=_SINGLE,
    ),
    Family(
        format="mistral",
        style="name first",
        call=lambda name, inner: f"[TOOL_CALLS]{name}[ARGS]{inner}",
        around=("", "", ""),
        close="]",
        marks='[TOOL_CALLS][{"name": "g"}] ]g[ARGS]{} [THINK]',
        keys=".*",
        think=("[THINK]", "[/THINK]"),
        missing="[TOOL_CALLS]f[ARGS]",
        broken='{"x": ',
        string=f"[TOOL_CALLS]f[ARGS]{_STRING}",
        quotes=_SINGLE,
    ),
    Family(
        format="cohere2",
        call=lambda name, inner: f'{{"tool_call_id": "0", "tool_name": "{name}", "parameters": {inner}}}',
        around=("<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>"),
        close="\n]<|END_ACTION|>",
        marks='<|END_ACTION|>]<|START_ACTION|>[{"tool_name": "g"}]<|START_THINKING|>',
        keys=".*",
        think=("<|START_THINKING|>", "<|END_THINKING|>"),
        missing='<|START_ACTION|>[{"tool_name": "f"}]<|END_ACTION|>',
        broken='{"x": ',
        string=f'<|START_ACTION|>[{{"tool_name": "f", "parameters": {_STRING}}}]<|END_ACTION|>',
        quotes=_SINGLE,
    ),
    Family(
        format="harmony",
        style="as the template",
        call=lambda name, inner: (
            f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{inner}<|call|>"
        ),
        around=("", "", ""),
        close="<|call|>",
        marks="<|call|><|end|><|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}<|call|>",
        keys=".*",
        think=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
        missing="<|start|>assistant to=functions.f<|channel|>commentary json<|message|><|call|>",
        broken='{"x": ',
        string=f" to=functions.f<|channel|>commentary json<|message|>{_STRING}<|call|>",
        quotes=_SINGLE,
    ),
    Family(
        format="harmony",
        style="as the model",
        call=lambda name, inner: (
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{inner}<|call|>"
        ),
        around=("", "<|start|>assistant", ""),
        close="<|call|>",
        marks="<|call|><|end|><|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}<|call|>",
        keys=".*",
        think=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
        missing="<|channel|>commentary to=functions.f <|constrain|>json<|message|><|call|>",
        broken='{"x": ',
        string=f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{_STRING}<|call|>",
        quotes=_SINGLE,
    ),
    Family(
        format="gemma4",
        call=lambda name, inner: f"<|tool_call>call:{name}{inner}<tool_call|>",
        inner=_gemma('<|"|>'),
        around=("", "", ""),
        close="<tool_call|>",
        marks="<tool_call|>,y:1}]<|tool_call>call:g{}<|channel>thought",
        forbidden=re.compile(re.escape('<|"|>')),
        think=("<|channel>thought\n", "<channel|>"),
        missing="<|tool_call>call:f{}<tool_call|>",
        broken="{x:",
        quotes=("{x:'1'}", None),
        nan=("{n:NaN}", None),
    ),
    Family(
        format="functiongemma",
        call=lambda name, inner: f"<start_function_call>call:{name}{inner}<end_function_call>",
        inner=_gemma("<escape>"),
        around=("", "", ""),
        close="<end_function_call>",
        marks="<end_function_call>,y:1}]<start_function_call>call:g{}",
        forbidden=re.compile("<escape>"),
        missing="<start_function_call>call:f{}<end_function_call>",
        broken="{x:",
        quotes=("{x:'1'}", None),
        nan=("{n:NaN}", None),
    ),
    Family(
        format="muse_glimmer",
        call=_muse,
        inner=_muse_inner,
        around=("", "<|eom|><|start|>assistant", ""),
        close="\n</atem:function_calls>",
        marks='a</atem:parameter>b</atem:invoke></atem:function_calls>c<atem:parameter name="x">d',
        forbidden=re.compile(r"<atem:invoke|</atem:parameter>\s*<atem:parameter"),
        think=(" to=self<|message|>", "<|eom|><|start|>assistant to=user<|message|>"),
        missing='<atem:invoke name="f">\n</atem:invoke>',
        broken='<atem:parameter name="x">1\n',
        quotes=(_muse_inner(_XML_QUOTES), ("f", _XML_QUOTES)),
        nan=(_muse_inner(_XML_NAN), ("f", _XML_NAN)),
    ),
    Family(
        format="lfm2",
        call=lambda name, inner: f"{name}({inner})",
        inner=_lfm2_inner,
        around=("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
        close="]<|tool_call_end|>",
        marks='it\'s, ]) "so"} <|tool_call_end|><think>',
        forbidden=re.compile(re.escape("<|tool_call_start|>")),
        missing="<|tool_call_start|>[f()]<|tool_call_end|>",
        broken="x=",
        nan=("n=NaN", None),
    ),
    Family(
        format="pythonic",
        call=lambda name, inner: f"{name}({inner})",
        inner=_python_inner,
        around=("[", ", ", "]"),
        close="]",
        marks='it\'s, ]) "so"} <think>',
        missing="[f()]",
        broken="x=",
        nan=("n=NaN", None),
    ),
    Family(
        format="llama3",
        call=lambda name, inner: f'{{"name": "{name}", "parameters": {inner}}}',
        around=("", "; ", ""),
        close="}",
        marks='}; {"name": "g", "parameters": {}}<think>',
        keys=".*",
        missing='{"name": "f"}',
        broken='{"x": ',
        string=f'{{"name": "f", "parameters": {_STRING}}}',
        quotes=_SINGLE,
        listed='[{"name": "f", "parameters": {"x": "1"}}, {"name": "g", "parameters": {}}]',
        unclosed_is_read=False,
    ),
]


def outcome(calls: Sequence[ToolCall]) -> list[Expected]:
    """What was read, in the terms of `Case.expected`."""
    return [(call.name, dict(call.arguments)) if call.error is None else None for call in calls]
