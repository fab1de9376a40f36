"""How a template writes reasoning, found by rendering probes: the message field, the marks around it, the headers.

Nothing is looked up by model family. Reasoning given in its own field shows the marks that the template writes around it. A
generation prompt that opens reasoning shows the opening mark. A text constant of the template is a closing mark if the template
drops everything in front of it. Only if none of this shows marks, the source is searched for the marks of well-known families.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from turnwise.chat.probes import QUESTION, assistant_message, probe_call
from turnwise.chat.tool_calls.reasoning import MARKS, ReasoningMarks
from turnwise.errors import TemplateError
from turnwise.types import Message

__all__ = ["ReasoningFormat", "find_reasoning_format"]

_REASONING, _ANSWER = "reasoning-4b9e27", "answer-91c2d0"
_KEYS = ("reasoning_content", "thinking", "reasoning")
_KEY = re.compile(r"think|thought|reason|analysis", re.IGNORECASE)
_BRACKETED = re.compile(r"(?:<[^<>\s]+>|\[[^\[\]\s]+\]|\{[^{}\s]+\}|\([^()\s]+\)|◁[^◁▷\s]+▷)\Z")
_BRACKETS_CLOSE = ">])}▷"
_CUT_MARK = re.compile(r"[<\[({◁][^>\])}▷]*\Z")
_ENDS_AND_BEGINS = (("end", "start"), ("END", "START"), ("end", "begin"), ("END", "BEGIN"), ("close", "open"))
_ENDS_AND_BEGINS += (("_end", ""), ("end_", ""), ("eo", "bo"))
"""Parts of a closing mark, each with the part that stands in the opening mark instead."""


class Render(Protocol):
    """Renders messages. Raises TemplateError if the template refuses them."""

    def __call__(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a template writes reasoning."""

    key: str | None
    """The field of an assistant message that holds the reasoning; None if reasoning can only be part of the content."""
    marks: ReasoningMarks
    """The marks around reasoning in a turn's text."""

    @property
    def supported(self) -> bool:
        """Whether the template handles reasoning. Only then is a turn's text split into reasoning and answer."""
        return self.key is not None or bool(self.marks.own)

    def without_reasoning(self, text: str, opened: bool = False) -> str:
        """A turn's text without its reasoning. `opened`: the text begins inside reasoning."""
        return self.marks.split(text, opened=opened)[1] if self.supported else text


def find_reasoning_format(render: Render, source: str) -> ReasoningFormat:
    """Find out how a template writes reasoning. `source` is its Jinja source."""
    prober = _ReasoningProber(render, source)
    key = prober.find_key()
    pair, headers = prober.find_marks_around(key) if key is not None else (None, ())
    pairs = [pair] if pair is not None else [marks for marks in [prober.find_removed_marks()] if marks is not None]
    if not pairs:  # the template writes and removes no marks; it may name them in a system prompt
        pairs = [marks for marks in MARKS if marks[0] in source or prober.mentions(marks[1])]
    return ReasoningFormat(key, ReasoningMarks(tuple(pairs), headers if pairs else ()))


class _ReasoningProber:
    """Renders the probes of one template."""

    def __init__(self, render: Render, source: str) -> None:
        self._render = render
        self._source = source
        self._strings, self._names = _constants(source)
        self._question = self._text([QUESTION]) or ""
        prompt = self._text([QUESTION], add_generation_prompt=True) or ""
        self._generation_prompt = prompt[len(self._question) :] if prompt.startswith(self._question) else ""

    def find_key(self) -> str | None:
        """The field in which the template reads an assistant message's reasoning."""
        others = [name for name in self._names if _KEY.search(name) and name not in _KEYS]
        turns: list[Message] = [assistant_message(_ANSWER), {**probe_call({"text": "x"}), "content": _ANSWER}]
        for turn in turns:
            for key in (*_KEYS, *others):
                if _REASONING in (self._text([QUESTION, {**turn, key: _REASONING}]) or ""):
                    return key
        return None

    def find_marks_around(self, key: str) -> tuple[tuple[str, str] | None, tuple[str, ...]]:
        """The marks around reasoning that is given in `key`, and the headers between reasoning and answer.

        The closing mark is what an answer and a call have in common behind reasoning: each may have a header of its own.
        """
        text = self._text([QUESTION, {**assistant_message(_ANSWER), key: _REASONING}]) or ""
        before, reasoning, after = text.partition(_REASONING)
        if not reasoning or _ANSWER not in after or not before.startswith(self._question):
            return None, ()
        start, between = before[len(self._question) :], after.partition(_ANSWER)[0]
        header = self._answer_header(start)
        closing = self._common_with_call(between, key)
        for suffix in (
            header,
            self._generation_prompt,
        ):  # unless it is the closing mark itself, without an opening mark
            bare = closing.rstrip().removesuffix(suffix.strip()).strip()
            closing = bare or closing.strip()
        if not closing:
            return None, ()
        opening = self._opening_mark(start, closing)
        if opening is None:
            return None, (header.strip("\n"),)
        counterpart = next((mark for mark in _closing_marks(opening) if closing.startswith(mark)), closing)
        # a header behind the closing mark, and what is written in front of an answer without reasoning
        headers = (between.strip().removeprefix(counterpart).strip(), header.strip("\n"))
        return _known_spelling(opening, counterpart), tuple(dict.fromkeys(text for text in headers if text.strip()))

    def _common_with_call(self, between: str, key: str) -> str:
        """The beginning of `between`, the text between reasoning and answer, that is also between reasoning and a call."""
        for content in ("", None):
            turn = {**probe_call({"text": _ANSWER}), "content": content, key: _REASONING}
            before_call = (self._text([QUESTION, turn]) or "").partition(_REASONING)[2].partition(_ANSWER)[0]
            pairs = zip(between, before_call, strict=False)
            common = between[
                : next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(between), len(before_call)))
            ]
            if common != between:
                common = _CUT_MARK.sub("", common)  # `<|END_THINKING|><|START_`
            if common.strip():
                return common
        return between

    def find_removed_marks(self) -> tuple[str, str] | None:
        """The marks by which the template removes reasoning from a content, or that its generation prompt opens."""
        opened = self._opened_by_generation_prompt()
        for closing in dict.fromkeys(text.strip() for text in self._strings):
            if len(closing) > 1 and self._removes_reasoning(f"{_REASONING}{closing}{_ANSWER}"):
                opening = opened.removesuffix(closing).strip() or next(
                    iter([*_opening_marks(closing, self._source), *self._opening_constants(closing)]), ""
                )
                if opening:
                    return _known_spelling(opening, closing)
        if opened and not any(opening in self._source for opening, _ in MARKS):
            bare = _BRACKETED.search(opened)
            pairs = [(bare[0], closing) for closing in _closing_marks(bare[0])] if bare else []
            default = pairs[0] if pairs else None
            return next((_known_spelling(*pair) for pair in pairs if pair[1] in self._source), default)
        return None

    def mentions(self, closing: str) -> bool:
        """Whether the source has a closing mark that does not end turns as well: `<|end|>` does so in Phi 3."""
        return closing in self._source and closing not in (
            self._text([QUESTION, assistant_message(_ANSWER)]) or closing
        )

    def _answer_header(self, start: str) -> str:
        """The text in front of the answer of a turn without reasoning, without its role: `<|channel|>final<|message|>`."""
        plain = self._text_before_answer([QUESTION, assistant_message(_ANSWER)])
        if plain is None or not self._generation_prompt or not plain.startswith(self._generation_prompt):
            return ""
        header = plain[len(self._generation_prompt) :]
        opening = start.removeprefix(self._generation_prompt).strip()
        return "" if not opening or opening in header else header

    def _opening_mark(self, start: str, closing: str) -> str | None:
        """The opening mark at the end of `start`, which is the turn from its beginning up to the reasoning."""
        answer = assistant_message(_ANSWER)
        heads = [
            self._text_before_answer([QUESTION, answer, QUESTION]),
            self._text_before_answer([QUESTION, answer]),
            self._generation_prompt,
        ]
        rests = [start[len(head) :].strip("\n") for head in heads if head and start.startswith(head)]
        opening = max((rest for rest in rests if rest.strip()), key=len, default="")
        if opening:
            return opening
        bare = start.rstrip()
        for candidate in _opening_marks(closing, start):
            if bare.endswith(candidate):
                return candidate
        bracketed = _BRACKETED.search(bare)
        return _opening_of_longer(closing, bare) or (bracketed[0] if bracketed else None)

    def _opened_by_generation_prompt(self) -> str:
        """The text of the generation prompt behind the role, if the template writes earlier turns without it."""
        plain = self._text_before_answer([QUESTION, assistant_message(_ANSWER), QUESTION])
        if plain is None or not plain.strip() or not self._generation_prompt.startswith(plain.rstrip()):
            return ""
        return self._generation_prompt[len(plain.rstrip()) :].strip()

    def _opening_constants(self, closing: str) -> Iterator[str]:
        """Text constants of the template that look like a mark of reasoning."""
        for text in self._strings:
            if text.strip() != closing and _KEY.search(text) and not re.search(r"[\s{}]", text.strip()):
                yield text.strip()

    def _removes_reasoning(self, content: str) -> bool:
        """Whether a turn of this content is written with its answer and without its reasoning."""
        turn = assistant_message(content)
        for messages in ([QUESTION, turn, QUESTION], [QUESTION, turn]):
            text = self._text(messages)
            if text is not None and _ANSWER in text and _REASONING not in text:
                return True
        return False

    def _text_before_answer(self, messages: Sequence[Message]) -> str | None:
        """The text between the question and the answer of a turn."""
        text = self._text(messages)
        if text is None or _ANSWER not in text or not text.startswith(self._question):
            return None
        return text[len(self._question) :].partition(_ANSWER)[0]

    def _text(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str | None:
        """The rendered messages; None if the template refuses them."""
        try:
            return self._render(messages, add_generation_prompt=add_generation_prompt)
        except TemplateError:
            return None


def _constants(source: str) -> tuple[Sequence[str], Sequence[str]]:
    """The text constants and the names in a template's source, each once."""
    import jinja2

    try:
        tokens = list(jinja2.Environment().lex(source))
    except jinja2.TemplateError:
        return (), ()
    strings = (value[1:-1].replace("\\n", "\n") for _, kind, value in tokens if kind == "string")
    names = [value for _, kind, value in tokens if kind == "name"]
    texts = list(dict.fromkeys(strings))
    return texts, list(dict.fromkeys([*names, *(text for text in texts if text.isidentifier())]))


def _opening_marks(closing: str, within: str) -> Iterator[str]:
    """The opening marks that belong to a closing mark by the usual forms: `</think>`, `[/THINK]`, `<|END_X|>`, `<x|>`."""
    if "/" in closing:
        yield closing.replace("/", "", 1)
    for ends, begins in _ENDS_AND_BEGINS:
        candidate = closing.replace(ends, begins, 1)
        if candidate != closing and candidate in within:
            yield candidate
    if closing.endswith("|>") and not closing.startswith("<|"):
        yield f"<|{closing[1:-2]}>"
    yield from (opening for opening, known in MARKS if known == closing)


def _opening_of_longer(closing: str, bare: str) -> str | None:
    """The opening mark at the end of `bare` whose counterpart is the beginning of `closing`: behind the closing mark stands a
    header. Example: `<|open|>think<|sep|>` for `<|close|>think<|sep|><|open|>response<|sep|>`."""
    for ends, begins in _ENDS_AND_BEGINS:
        place = closing.find(ends)
        if place < 0 or not begins:
            continue
        swapped = closing.replace(ends, begins, 1)
        for end in range(len(swapped) - 1, place, -1):
            if swapped[end - 1] in _BRACKETS_CLOSE and bare.endswith(swapped[:end]):
                return swapped[:end]
    return None


def _closing_marks(opening: str) -> Iterable[str]:
    """The closing marks that may belong to an opening mark."""
    known = [closing for mark, closing in MARKS if mark == opening]
    swapped = [opening.replace(begins, ends, 1) for ends, begins in _ENDS_AND_BEGINS if begins and begins in opening]
    return dict.fromkeys([*known, *swapped, f"{opening[0]}/{opening[1:]}"])


def _known_spelling(opening: str, closing: str) -> tuple[str, str]:
    """The pair as `MARKS` spells it if only white space differs: ` to=self<|message|>` begins with a space."""
    for pair in MARKS:
        if (pair[0].strip(), pair[1].strip()) == (opening.strip(), closing.strip()):
            return pair
    return opening.strip(), closing.strip()
