"""How a template writes thoughts, found by asking it: the message field, the marks around a thought, the headers.

Nothing is looked up by model family. A thought given in its field shows the marks that the template writes around it. A
generation prompt that opens a thought shows the opening mark. A text constant of the template that makes it drop what stands
before that constant is a closing mark. Only where the template shows none of this is its source searched for the marks of
well-known families.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from turnwise.chat.probes import QUESTION, probe_call, words
from turnwise.chat.tool_calls.reasoning import MARKS, ThoughtMarks
from turnwise.errors import TemplateError
from turnwise.types import Message

__all__ = ["ThoughtProfile", "find_thoughts"]

_THOUGHT, _SAID = "thought-4b9e27", "said-91c2d0"
_KEYS = ("reasoning_content", "thinking", "reasoning")
_KEY = re.compile(r"think|thought|reason|analysis", re.IGNORECASE)
_BRACKETED = re.compile(r"(?:<[^<>\s]+>|\[[^\[\]\s]+\]|\{[^{}\s]+\}|\([^()\s]+\)|◁[^◁▷\s]+▷)\Z")
_OPENS_INSTEAD = (("/", ""), ("end", "start"), ("END", "START"), ("end", "begin"), ("END", "BEGIN"), ("close", "open"))
_OPENS_INSTEAD += (("_end", ""), ("end_", ""), ("eo", "bo"))


class Render(Protocol):
    """Renders messages with or without the generation prompt. Raises TemplateError if the template refuses them."""

    def __call__(self, messages: Sequence[Message], *, cue: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class ThoughtProfile:
    """How a template writes thoughts."""

    key: str | None
    """The field of an assistant message that holds the thought, or None: thoughts stand in the content, if anywhere."""
    marks: ThoughtMarks

    @property
    def thinks(self) -> bool:
        """Whether the template knows of thinking. Only then is a turn's text split into thoughts and words."""
        return self.key is not None or bool(self.marks.own)


def find_thoughts(render: Render, source: str) -> ThoughtProfile:
    """Ask a template how it writes thoughts. `source` is its Jinja source."""
    asked = _Asked(render, source)
    key = asked.key()
    pair, header = asked.around(key) if key is not None else (None, "")
    found = [pair] if pair is not None else [one for one in [asked.removed()] if one is not None]
    if not found:  # the template writes and removes no marks; it may mention them, in a system prompt say
        found = [marks for marks in MARKS if marks[0] in source or asked.mentions(marks[1])]
    return ThoughtProfile(key, ThoughtMarks(tuple(found), (header,) if header and found else ()))


class _Asked:
    """One template, and what it was asked."""

    def __init__(self, render: Render, source: str) -> None:
        self._render = render
        self._source = source
        self._strings, self._names = _constants(source)
        self._before = self._write([QUESTION], cue=False) or ""
        cue = self._write([QUESTION], cue=True) or ""
        self._cue = cue[len(self._before) :] if cue.startswith(self._before) else ""

    def key(self) -> str | None:
        """The field under which the template writes an assistant message's thought."""
        others = [name for name in self._names if _KEY.search(name) and name not in _KEYS]
        turns: list[Message] = [words(_SAID), {**probe_call({"text": "x"}), "content": _SAID}]
        for turn in turns:
            for key in (*_KEYS, *others):
                if _THOUGHT in (self._write([QUESTION, {**turn, key: _THOUGHT}], cue=False) or ""):
                    return key
        return None

    def around(self, key: str) -> tuple[tuple[str, str] | None, str]:
        """The marks around a thought that is given in `key`, and the header between the thought and the words."""
        whole = self._write([QUESTION, {**words(_SAID), key: _THOUGHT}], cue=False) or ""
        before, thought, after = whole.partition(_THOUGHT)
        if not thought or _SAID not in after or not before.startswith(self._before):
            return None, ""
        full, between = before[len(self._before) :], after.partition(_SAID)[0]
        header = self._header(full)
        closing = between
        if header.strip() and closing.endswith(header):
            closing = closing[: -len(header)]
        if self._cue.strip():
            closing = closing.rstrip().removesuffix(self._cue.strip())
        closing = closing.strip()
        if not closing:
            return None, ""
        opening = self._opening(full, closing)
        return (None if opening is None else _as_known(opening, closing)), header.strip("\n")

    def removed(self) -> tuple[str, str] | None:
        """The marks by which the template takes thoughts out of a content, or with which its generation prompt opens one."""
        opened = self._opened_by_cue()
        for closing in dict.fromkeys(text.strip() for text in self._strings):
            if len(closing) > 1 and self._drops(f"{_THOUGHT}{closing}{_SAID}"):
                opening = opened.removesuffix(closing).strip() or next(
                    iter([*_counterparts(closing, self._source), *self._others(closing)]), ""
                )
                if opening:
                    return _as_known(opening, closing)
        if opened and not any(opening in self._source for opening, _ in MARKS):
            bare = _BRACKETED.search(opened)
            pairs = [(bare[0], one) for one in _closings(bare[0])] if bare else []
            return next((_as_known(*pair) for pair in pairs if pair[1] in self._source), pairs[0] if pairs else None)
        return None

    def mentions(self, closing: str) -> bool:
        """Whether the source has a closing mark that does not end turns as well: `<|end|>` does so in Phi 3."""
        return closing in self._source and closing not in (self._write([QUESTION, words(_SAID)], cue=False) or closing)

    def _header(self, full: str) -> str:
        """What stands before the words of a turn without a thought, its role aside: `<|channel|>final<|message|>`, say."""
        plain = self._plain([QUESTION, words(_SAID)])
        if plain is None or not self._cue or not plain.startswith(self._cue):
            return ""
        header = plain[len(self._cue) :]
        opening = full.removeprefix(self._cue).strip()
        return "" if not opening or opening in header else header

    def _opening(self, full: str, closing: str) -> str | None:
        """The opening mark, which `full` ends with: the turn from its beginning up to the thought."""
        heads = [self._plain([QUESTION, words(_SAID), QUESTION]), self._plain([QUESTION, words(_SAID)]), self._cue]
        rests = [full[len(head) :].strip("\n") for head in heads if head and full.startswith(head)]
        opening = max((rest for rest in rests if rest.strip()), key=len, default="")
        if opening:
            return opening
        bare = full.rstrip()
        for candidate in _counterparts(closing, full):
            if bare.endswith(candidate):
                return candidate
        bracketed = _BRACKETED.search(bare)
        return bracketed[0] if bracketed else None

    def _opened_by_cue(self) -> str:
        """What the generation prompt has behind the role, where the template writes an earlier turn without it."""
        plain = self._plain([QUESTION, words(_SAID), QUESTION])
        if plain is None or not plain.strip() or not self._cue.startswith(plain.rstrip()):
            return ""
        return self._cue[len(plain.rstrip()) :].strip()

    def _others(self, closing: str) -> Iterator[str]:
        for text in self._strings:
            if text.strip() != closing and _KEY.search(text) and not re.search(r"[\s{}]", text.strip()):
                yield text.strip()

    def _drops(self, content: str) -> bool:
        """Whether a turn of this content is written without the thought in it, and with its words."""
        for messages in ([QUESTION, words(content), QUESTION], [QUESTION, words(content)]):
            whole = self._write(messages, cue=False)
            if whole is not None and _SAID in whole and _THOUGHT not in whole:
                return True
        return False

    def _plain(self, messages: Sequence[Message]) -> str | None:
        """What stands between the question and the words of a turn."""
        whole = self._write(messages, cue=False)
        if whole is None or _SAID not in whole or not whole.startswith(self._before):
            return None
        return whole[len(self._before) :].partition(_SAID)[0]

    def _write(self, messages: Sequence[Message], *, cue: bool) -> str | None:
        try:
            return self._render(messages, cue=cue)
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


def _counterparts(closing: str, within: str) -> Iterator[str]:
    """The opening marks that belong to a closing mark by the usual forms: `</think>`, `[/THINK]`, `<|END_X|>`, `<x|>`."""
    if "/" in closing:
        yield closing.replace("/", "", 1)
    for ends, begins in _OPENS_INSTEAD[1:]:
        candidate = closing.replace(ends, begins, 1)
        if candidate != closing and candidate in within:
            yield candidate
    if closing.endswith("|>") and not closing.startswith("<|"):
        yield f"<|{closing[1:-2]}>"
    yield from (opening for opening, known in MARKS if known == closing)


def _closings(opening: str) -> Iterable[str]:
    """The closing marks that may belong to an opening mark."""
    known = [closing for mark, closing in MARKS if mark == opening]
    swapped = [opening.replace(begins, ends, 1) for ends, begins in _OPENS_INSTEAD[1:] if begins and begins in opening]
    return dict.fromkeys([*known, *swapped, f"{opening[0]}/{opening[1:]}"])


def _as_known(opening: str, closing: str) -> tuple[str, str]:
    """The pair as the table has it where only white space differs: ` to=self<|message|>` begins with a space."""
    for pair in MARKS:
        if (pair[0].strip(), pair[1].strip()) == (opening.strip(), closing.strip()):
            return pair
    return opening.strip(), closing.strip()
