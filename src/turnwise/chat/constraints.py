"""The grammar of a turn: which text a constrained turn may consist of, from the tools, the format of calls and the answer's form.

Reasoning stays free. Outside of reasoning, text is free up to the opening mark of a call, and from there on only a complete call
of an offered tool is possible, whose arguments follow the tool's schema. With `choice=required`, the turn is reasoning and calls;
with a form of the answer, it is reasoning and an answer in this form, or calls where tools are on offer. In both cases reasoning
begins with its mark, and no text is in front of it:

    auto        (text call)* text        required    call+        answer    call+ | answer

How a call is written comes from the chat template, or from the format's example where the template writes no calls. A grammar is
text in the Lark dialect of llguidance, which `models/grammar.py` compiles. Knows texts and schemas. Does not know logits.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from turnwise.chat.probes import assistant_message, probe_call
from turnwise.chat.reasoning import MARKS, ReasoningMarks
from turnwise.chat.template import Template
from turnwise.chat.tool_calls import ToolFormat
from turnwise.chat.tool_calls.learned import ProbeWriter, equals_arguments, json_values, split_marks
from turnwise.errors import GrammarError, TemplateError
from turnwise.models.grammar import TokenMasks
from turnwise.types import AnswerFormat, Constraint, SamplingChange, ToolSchema

# What is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Constrained:
    """What a recipe, or an environment, says of the form of turns."""

    calls: bool = False
    """Whether tool calls are always well-formed (`tool_calls.constrain`)."""
    choice: Literal["auto", "required"] = "auto"
    """Whether each turn must call a tool."""
    names: tuple[str, ...] | None = None
    """The tools that a turn may call; None: all that are offered."""
    single: bool = False
    """Whether a turn ends behind its first call."""
    answer: AnswerFormat | None = None
    """The form of an answer; None: free text."""

    def changed(self, change: SamplingChange) -> Constrained:
        """With what an environment asks for instead; None changes nothing."""
        names = self.names if change.tool_names is None else tuple(change.tool_names)
        return replace(
            self,
            answer=change.answer_format or self.answer,
            choice=change.tool_choice or self.choice,
            names=names,
            single=change.single_call or self.single,
        )

    def anything(self, tools: Sequence[ToolSchema]) -> bool:
        """Whether a turn that is offered these tools is constrained."""
        of_calls = self.calls or self.choice == "required" or self.names is not None or self.single
        return self.answer is not None or (bool(tools) and of_calls)


FREE = Constrained()
"""No constraint."""

# How the model writes calls

_NAME = "probe_tool"
_FIRST, _SECOND = {"text": "x"}, {"text": "y"}
_TOOL_NAME = re.compile(r"[\w.:/-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTexts:
    """The texts around the name and the JSON arguments of calls: `begin (opening name middle {...} closing) separator ... end`"""

    opening: str
    middle: str
    closing: str
    begin: str = ""
    separator: str | None = None
    """None: a turn has one call."""
    end: str = ""
    mark: str
    """The text at the beginning of `opening`, or of `begin`, that no free text contains."""

    @classmethod
    def of(cls, template: Template, format: ToolFormat, *, ends: Sequence[str]) -> CallTexts:
        """Those that a template writes, or those of the format's example. `ends` are texts that end a turn.

        Raises TemplateError if calls of this format cannot be constrained.
        """
        start = template.completion_text(assistant_message("placeholder")).partition("placeholder")[0].rstrip()

        def write(calls: Sequence[Mapping[str, Any]]) -> str:
            try:
                return template.completion_text(probe_call(*calls)).removeprefix(start)
            except TemplateError:
                return ""

        written = ProbeWriter(write, ends)
        one, two = "", ""
        if template.writes_calls:
            one, two = written(_FIRST).strip(), written(_FIRST, _SECOND).strip()
        if not one:
            one = format.example.replace("<tool>", _NAME).replace("{...}", json.dumps(_FIRST))
        found = cls._found(one, two, format)
        if found is None or not found._reads_back(format):
            raise TemplateError(
                f"calls of the format {format.name} cannot be constrained: a grammar needs the name and the arguments of a call "
                f"as JSON between texts that are the same in each call, and begin with a mark of two or more characters. Remove "
                f"tool_calls.constrain, tool_calls.choice and tool_choice=required, or use a model with another format "
                f"(docs/tool_calls.md)"
            )
        return found

    @classmethod
    def _found(cls, one: str, two: str, format: ToolFormat) -> CallTexts | None:
        single, first = _parts(one, _FIRST), _parts(two, _FIRST)
        if single is None:
            return None
        before, middle, after = single
        begin, opening, closing, separator, end = "", before.lstrip(), after.rstrip(), None, ""
        second = None if first is None else _parts(first[2], _SECOND)
        if first is not None and second is not None:
            if first[1] != middle or second[1] != middle:
                return None  # the calls of a turn are numbered
            closing, opening = split_marks(first[0], second[0], second[2])
            if not (first[0].endswith(opening) and second[2].startswith(closing)):
                return None
            begin, end = first[0][: len(first[0]) - len(opening)], second[2][len(closing) :]
            separator = second[0][len(closing) : len(second[0]) - len(opening)]
        mark = re.match(getattr(format, "opening_pattern", r"(?!)"), (begin + opening).lstrip())
        text = (begin + opening).lstrip() if mark is None else mark[0]
        if len(text.strip()) < 2:
            return None
        return cls(
            opening=opening,
            middle=middle,
            closing=closing,
            begin=begin,
            separator=separator,
            end=end,
            mark=text.strip(),
        )

    def _reads_back(self, format: ToolFormat) -> bool:
        text = self.begin + self.opening + _NAME + self.middle + json.dumps(_FIRST) + self.closing + self.end
        calls = format.parse(text).calls
        return len(calls) == 1 and calls[0].error is None and calls[0].name == _NAME and calls[0].arguments == _FIRST


def _parts(text: str, arguments: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """The texts before the name of the first call, between name and arguments, and after these; None if there is no call."""
    at = text.find(_NAME)
    for start, end, value in json_values(text, at + len(_NAME)) if at >= 0 else ():
        if isinstance(value, dict) and equals_arguments(value, dict(arguments)):
            return text[:at], text[at + len(_NAME) : start], text[end:]
    return None


# The grammar


def turn_constraint(
    wanted: Constrained,
    tools: Sequence[ToolSchema],
    *,
    calls: CallTexts | None,
    marks: ReasoningMarks | None,
    opened: bool,
    stops: Sequence[int],
    before: str,
    special: Mapping[str, int],
    masks: TokenMasks,
) -> Constraint:
    """The constraint of a turn that is offered these tools. `marks` are those of reasoning, None without reasoning; `opened`: the
    prompt has opened reasoning. `special` are the special tokens by their texts. A stop token that is ordinary text is text for
    the grammar, and ends a turn wherever it is sampled.

    Raises GrammarError, with the place in the schema, if a schema cannot be compiled.
    """
    size = sum(len(str(tool)) for tool in tools) + (0 if wanted.answer is None else len(wanted.answer.value))
    if size > _LONGEST:
        raise GrammarError(
            f"the schemas of a form of the turn have {size} characters, and at most {_LONGEST} are compiled: make them shorter, "
            f"or do without constrained output"
        )
    grammar = _grammar(
        wanted,
        json.dumps(list(tools)),
        calls,
        (marks.own or MARKS[:1]) if marks is not None else (),
        opened,
        tuple(special.items()),
        masks,
    )
    return Constraint(grammar=grammar, stops=tuple(sorted(set(stops) & set(special.values()))), before=before)


_LONGEST = 1 << 18
"""Characters of schemas from which a grammar is made: their compilation takes seconds."""
_MOST_TRIED = 64
"""Parts of a schema that are tried to find the one that cannot be compiled."""


@functools.lru_cache(maxsize=64)
def _grammar(
    wanted: Constrained,
    tools_json: str,
    calls: CallTexts | None,
    marks: tuple[tuple[str, str], ...],
    opened: bool,
    special: tuple[tuple[str, int], ...],
    masks: TokenMasks,
) -> str:
    tools = _callable(json.loads(tools_json), wanted.names)
    writer = _Writer(dict(special))
    rules = ["%llguidance {}", "TEXT: /(.|\\n)*/", "WS: /[ \\t\\n]{0,8}/"]
    forced = wanted.answer is not None or wanted.choice == "required"
    thoughts = [f"thought_{number}" for number in range(len(marks))]
    for name, (opening, closing) in zip(thoughts, marks, strict=True):
        # text in front of reasoning is part of the answer
        begin = f"{name}_open: {writer.sequence(opening)}" if forced else writer.up_to(f"{name}_open", opening)
        rules += [begin, writer.up_to(f"{name}_close", closing), f"{name}: {name}_open {name}_close"]
    if tools and calls is not None:
        rules += _call_rules(tools, calls, writer, masks, single=wanted.single)
    if wanted.answer is not None:
        rules.append(_answer_rule(wanted.answer, masks))
    first = " | ".join(f"{name}_close" for name in thoughts) if opened else ""
    head = f"({first}) " if first else ""
    if forced:
        start = f"start: {_forced_start(wanted, head, thoughts, calls=bool(tools))}"
    else:
        before = [*([] if wanted.single else ["call_in_text"]), *thoughts]
        blocks = f"{head}({' | '.join(before)})* " if before else head
        unclosed = "".join(f" | {blocks}{name}_open TEXT" for name in thoughts)
        last = "(TEXT | call_in_text WS)" if wanted.single else "TEXT"
        start = f"start: {blocks}{last}{unclosed}{' | TEXT' if head else ''}"
    return "\n".join([*rules, start]) + "\n"


def _forced_start(wanted: Constrained, head: str, thoughts: Sequence[str], *, calls: bool) -> str:
    """A turn without free text: reasoning, which `head` closes if the prompt has opened it, and calls or an answer. White space
    may stand around each of them, but not around an answer of a regular expression, which is exact; there, it only separates the
    answer from reasoning."""
    ends, before = {"calls": "calls WS"} if calls else {}, {"calls": "WS ", "answer": "WS "}
    if wanted.answer is not None and wanted.choice == "auto":
        exact = wanted.answer.kind == "regex"
        ends["answer"], before["answer"] = ("answer", "") if exact else ("answer WS", "WS ")
    reasoned = f"WS ({' | '.join(ends.values())})"
    if head:
        return f"{head}{reasoned}"
    first = [f"{min(before.values())}({' | '.join(thoughts)}) {reasoned}"] if thoughts else []
    return " | ".join([*first, *(f"{before[name]}{end}" for name, end in ends.items())])


def _callable(tools: Sequence[ToolSchema], names: Sequence[str] | None) -> Sequence[ToolSchema]:
    """The tools that a turn may call. Raises GrammarError if a name is that of no tool."""
    offered = [tool["function"]["name"] for tool in tools]
    if names is None:
        return tools
    if missing := [name for name in names if name not in offered]:
        raise GrammarError(
            f"the turn may only call {missing[0]!r:.80}, which is not on offer: the tools are {', '.join(offered)[:400]}"
        )
    return [tool for tool in tools if tool["function"]["name"] in names]


def _call_rules(
    tools: Sequence[ToolSchema], calls: CallTexts, writer: _Writer, masks: TokenMasks, *, single: bool
) -> Iterator[str]:
    texts = writer.sequence
    lead = (calls.begin + calls.opening).lstrip()
    yield writer.up_to("call_mark", calls.mark)
    rest = texts(lead[len(calls.mark) :])
    more = "" if single or calls.separator is None else f" ({texts(calls.separator + calls.opening)} named_call)*"
    yield f"call_in_text: call_mark {rest} named_call{more} {texts(calls.end)}"
    yield f"calls: {texts(lead)} named_call{more} {texts(calls.end)}"
    yield "named_call: " + " | ".join(f"call_{number}" for number in range(len(tools)))
    for number, tool in enumerate(tools):
        name = tool["function"]["name"]
        if not _TOOL_NAME.fullmatch(name):
            raise GrammarError(
                f"the tool {name!r:.80} cannot be in a grammar: names have letters, digits and . : / - _ only"
            )
        schema = _arguments_schema(tool["function"].get("parameters"))
        _refuse_schema(schema, masks, f"tool {name}: parameters")
        yield f"call_{number}: {_quoted(name)} {texts(calls.middle)} args_{number} {texts(calls.closing)}"
        yield f"args_{number}: %json {_with_bounded_space(schema)}"


def _arguments_schema(parameters: Any) -> dict[str, Any]:
    """The schema of a tool's arguments. What the schema does not name is no argument, unless it says so."""
    schema = dict(parameters or {"type": "object", "properties": {}})
    return schema if "$ref" in schema or "additionalProperties" in schema else {**schema, "additionalProperties": False}


def _answer_rule(answer: AnswerFormat, masks: TokenMasks) -> str:
    if answer.kind == "regex":
        pattern = re.sub(r"\\.|/|\n", _in_slashes, answer.value, flags=re.DOTALL)
        rule = f"answer: ANSWER\nANSWER: /{pattern}/"
        if (problem := masks.problem(f"start: answer\n{rule}")) is not None:
            raise GrammarError(
                f"response_format: the regular expression {answer.value!r:.200} cannot be used: {problem}"
            )
        return rule
    schema = json.loads(answer.value) if answer.kind == "json_schema" else {"type": "object"}
    _refuse_schema(schema, masks, "response_format: schema")
    return f"answer: %json {_with_bounded_space(schema)}"


_SPACE = r"[ \t]{1,2}|\n[ \t]{0,16}"
"""White space between the parts of a JSON value: that of one line, or a new line with its indentation. Without a bound, a model
that samples new lines never comes to the next part, and each of its answers is cut."""


def _with_bounded_space(schema: Mapping[str, Any]) -> str:
    """A schema as JSON. What the user says of white space (`x-guidance`) stays."""
    own = schema.get("x-guidance", {})
    bound = {} if {"whitespace_flexible", "whitespace_pattern"} & own.keys() else {"whitespace_pattern": _SPACE}
    return json.dumps({**schema, "x-guidance": {**bound, **own}})


def _in_slashes(found: re.Match[str]) -> str:
    """A part of a pattern as it stands between slashes on one line: escaped characters stay escaped."""
    return {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}.get(found[0], found[0])


class _Writer:
    """Writes texts as parts of a grammar: special tokens by their numbers, white space of any length, the rest as it is."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        names = sorted((text for text in special if text.strip()), key=len, reverse=True)
        self._pattern = re.compile("|".join([r"\s+", *(re.escape(name) for name in names)]))

    def sequence(self, text: str) -> str:
        """The text."""
        parts, at = list[str](), 0
        for found in self._pattern.finditer(text):
            parts += [_quoted(text[at : found.start()]), "WS" if found[0].isspace() else self._token(found[0])]
            at = found.end()
        return " ".join(part for part in [*parts, _quoted(text[at:])] if part)

    def up_to(self, rule: str, mark: str) -> str:
        """A rule for free text up to a mark, which the text does not contain, and the mark."""
        if mark in self._special:
            return f"{rule}: TEXT {self._token(mark)}"
        return f"{rule}[lazy]: TEXT {_quoted(mark)}"

    def _token(self, text: str) -> str:
        return f"<[{self._special[text]}]>"


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


# Schemas that cannot be compiled

_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
_OF_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")


def _refuse_schema(schema: Any, masks: TokenMasks, where: str) -> None:
    """Raise GrammarError with the place of the smallest part of a schema that cannot be compiled."""
    definitions = {
        name: schema[name] for name in ("$defs", "definitions") if isinstance(schema, dict) and name in schema
    }

    tried = itertools.count()

    def problem(part: Any) -> str | None:
        if next(tried) > _MOST_TRIED:
            return None  # the place is known less exactly
        given = {**definitions, **part} if isinstance(part, dict) else part
        return masks.problem(f"start: a\na: %json {json.dumps(given)}\n")

    if (found := problem(schema)) is None:
        return
    path, part, found = _smallest(schema, "", found, problem)
    raise GrammarError(
        f"{where}{path or ' (at its top)'} cannot be a grammar: {found.partition('compile JSON schema: ')[2] or found}; the "
        f"part is {json.dumps(part):.200}. Change it, or do without constrained output"
    )


def _smallest(part: Any, path: str, found: str, problem: Callable[[Any], str | None]) -> tuple[str, Any, str]:
    for below, child in _children(part):
        if (of_child := problem(child)) is not None:
            return _smallest(child, f"{path}/{below}", of_child, problem)
    return path, part, found


def _children(part: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(part, dict):
        return
    for key in _OF_NAMES:
        if isinstance(of := part.get(key), dict):
            yield from ((f"{key}/{name}", child) for name, child in of.items())
    for key in _OF_LISTS:
        if isinstance(of := part.get(key), list):
            yield from ((f"{key}/{number}", child) for number, child in enumerate(of))
    yield from ((key, part[key]) for key in _SINGLE if isinstance(part.get(key), dict))
