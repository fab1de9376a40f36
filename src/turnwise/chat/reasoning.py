"""How a template writes reasoning (field, marks, headers), and the reasoning in the text of a turn.

The format is found by rendering probes; nothing is looked up by model family. Reasoning given in its own field shows the marks
that the template writes around it. A generation prompt that opens reasoning shows the opening mark. A text constant of the
template is a closing mark if the template drops everything in front of it. Only if none of this shows marks, the source is
searched for the marks of well-known families.

    <think>Is it 4?</think>It is 4.         reasoning "Is it 4?", content "It is 4."

In a turn, the marks of well-known families are always recognised too. Invariant: text inside marks is reasoning, and a tool
call inside reasoning is never executed. A reasoning block ends at its closing mark, or at the end of a truncated text; inside a
block, other marks are ignored. Harmony and ATEM write messages with headers; the headers of messages that are not reasoning are
removed (`SCAFFOLD`). Knows texts. Does not know tokens, or which reasoning stays in a conversation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from turnwise.chat.probes import QUESTION, RenderMessages, assistant_message, probe_call
from turnwise.errors import TemplateError
from turnwise.types import Message

# Turns: reasoning found in text by its marks

MARKS: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),  # DeepSeek, Qwen, GLM, Nemotron, LFM2, Kimi K2 and most others
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("◁think▷", "◁/think▷"),  # Kimi-VL
    ("<|channel|>analysis<|message|>", "<|end|>"),  # gpt-oss
    (" to=self<|message|>", "<|eom|>"),  # Muse Glimmer
)
"""Opening and closing mark of reasoning, by family."""

_HEAD = r"(?:<\|start\|>assistant)?"
SCAFFOLD = (
    r"(?:<\|e(?:nd|om)\|>)?<\|start\|>assistant(?: to=[^\s<]+)?(?:<\|channel\|>\w+)?<\|message\|>"
    r"|<\|channel\|>(?:final|commentary)<\|message\|>| to=user<\|message\|>|<\|(?:START|END)_(?:RESPONSE|TEXT)\|>"
)
"""Regular expression of the headers of messages that are not reasoning."""


@dataclass(frozen=True, slots=True)
class ReasoningBlock:
    """A block of reasoning. `start` and `end` are its indices in the turn, marks included; `text` is without marks."""

    start: int
    end: int
    text: str
    at: int
    """The index in the turn at which `text` begins."""


@dataclass(frozen=True, slots=True)
class _Patterns:
    """The compiled patterns of `ReasoningMarks`."""

    opening: re.Pattern[str]
    """An opening mark, with the group `mark`."""
    repeated_opening: re.Pattern[str]
    """White space before an opening mark."""
    closing: re.Pattern[str]
    """A closing mark of a block that the generation prompt has opened: only the template's own marks if they are known."""
    opening_or_scaffold: re.Pattern[str]
    empty_block_at_end: re.Pattern[str]
    """An opening mark, and optionally a closing mark, at the end of a text."""


@dataclass(frozen=True)
class ReasoningMarks:
    """The marks around reasoning in the turns of one template.

    Example: `ReasoningMarks(own=(("<mm:think>", "</mm:think>"),))` reads these marks, and those in `MARKS`.
    """

    own: tuple[tuple[str, str], ...] = ()
    """Opening and closing marks that the template itself writes or removes. They take precedence over `MARKS`."""
    headers: tuple[str, ...] = ()
    """Texts that the template writes between reasoning and content: headers that are removed."""
    closing_of: Mapping[str, str] = field(init=False, repr=False, compare=False)
    """The closing mark of each opening mark, longer opening marks first."""
    opening: str = field(init=False, repr=False, compare=False)
    """Regular expression of an opening mark."""
    scaffold: str = field(init=False, repr=False, compare=False)
    """Regular expression of the headers of messages that are not reasoning."""
    _patterns: _Patterns = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pairs = {**dict(MARKS), **dict(self.own)}
        closing_of = {opening: pairs[opening] for opening in sorted(pairs, key=len, reverse=True)}
        opening = _HEAD + "(?:" + "|".join(re.escape(mark) for mark in closing_of) + ")"
        scaffold = "|".join([*(re.escape(header) for header in self.headers), SCAFFOLD])
        closings = {closing for _, closing in self.own or MARKS}
        blocks = (rf"{re.escape(mark)}\s*(?:{re.escape(closing)}\s*)?" for mark, closing in closing_of.items())
        patterns = _Patterns(
            opening=re.compile(f"{_HEAD}(?P<mark>{'|'.join(map(re.escape, closing_of))})"),
            repeated_opening=re.compile(rf"\s*(?={opening})"),
            closing=re.compile("|".join(map(re.escape, sorted(closings, key=len, reverse=True)))),
            opening_or_scaffold=re.compile(f"(?P<reasoning>{opening})|{scaffold}"),
            empty_block_at_end=re.compile(rf"(?:{'|'.join(blocks)})\Z"),
        )
        for name, value in (
            ("closing_of", closing_of),
            ("opening", opening),
            ("scaffold", scaffold),
            ("_patterns", patterns),
        ):
            object.__setattr__(self, name, value)

    def block_at(self, text: str, start: int) -> ReasoningBlock:
        """The block whose opening mark is at `start`."""
        opens = self._patterns.opening.match(text, start)
        if opens is None:
            raise ValueError(f"no reasoning begins at character {start}")
        closing = self.closing_of[opens["mark"]]
        closes = text.find(closing, opens.end())
        inner = closes if closes >= 0 else len(text)
        end = closes + len(closing) if closes >= 0 else len(text)
        return ReasoningBlock(start, end, *_trimmed(text, opens.end(), inner))

    def opened_block(self, text: str) -> ReasoningBlock:
        """The block that the generation prompt has opened and in which the text begins. The model may repeat the opening mark."""
        if again := self._patterns.repeated_opening.match(text):
            block = self.block_at(text, again.end())
            return ReasoningBlock(0, block.end, block.text, block.at)
        closes = self._patterns.closing.search(text)
        if closes is None:
            return ReasoningBlock(0, len(text), *_trimmed(text, 0, len(text)))
        return ReasoningBlock(0, closes.end(), *_trimmed(text, 0, closes.start()))

    def reasoning_blocks(self, text: str, *, opened: bool = False) -> list[ReasoningBlock]:
        """The blocks in a text, in order. `opened`: the text begins inside a block."""
        return self._walk(text, opened=opened)[0]

    def split(self, text: str, *, opened: bool = False) -> tuple[str, str]:
        """Reasoning and content. `opened`: the text begins inside a block.

        White space is removed where a block was; a text without marks is returned unchanged.
        """
        blocks, content = self._walk(text, opened=opened)
        return join_pieces(["", *(block.text for block in blocks), ""]), join_pieces(content)

    def reasoning_opening(self, text: str) -> str:
        """The opening mark at the end of a generation prompt, with the white space after it; "" if there is none."""
        bare = text.rstrip()
        mark = next((opening for opening in self.closing_of if bare.endswith(opening)), None)
        return "" if mark is None else text[len(bare) - len(mark) :]

    def without_reasoning_opening(self, text: str) -> str:
        """A generation prompt without the opened block or the empty block at its end."""
        return self._patterns.empty_block_at_end.sub("", text)

    def _walk(self, text: str, *, opened: bool) -> tuple[list[ReasoningBlock], list[str]]:
        """The blocks, and the pieces of content between them."""
        blocks: list[ReasoningBlock] = []
        content: list[str] = []
        at = 0
        if opened:
            blocks.append(self.opened_block(text))
            content.append("")
            at = blocks[0].end
        while mark := self._patterns.opening_or_scaffold.search(text, at):
            content.append(text[at : mark.start()])
            at = mark.end()
            if mark["reasoning"] is not None:
                blocks.append(self.block_at(text, mark.start()))
                at = blocks[-1].end
        content.append(text[at:])
        return blocks, content


KNOWN = ReasoningMarks()
"""The marks of well-known families, for texts whose template is not known."""


def _trimmed(text: str, start: int, end: int) -> tuple[str, int]:
    """`text[start:end]` without surrounding white space, and the index at which it begins."""
    trimmed = text[start:end].strip()
    return trimmed, text.index(trimmed, start)


def join_pieces(pieces: Sequence[str]) -> str:
    """Join the pieces of a text that remain after other text was removed: each piece on its own line, without empty pieces and
    without white space where pieces are joined."""
    last = len(pieces) - 1
    trimmed = (
        piece.strip() if 0 < n < last else piece.lstrip() if n else piece.rstrip() if last else piece
        for n, piece in enumerate(pieces)
    )
    return "\n".join(piece for piece in trimmed if piece)


# Templates: how they write reasoning

_REASONING, _ANSWER = "reasoning-4b9e27", "answer-91c2d0"
_KEYS = ("reasoning_content", "thinking", "reasoning")
_KEY = re.compile(r"think|thought|reason|analysis", re.IGNORECASE)
_BRACKETED = re.compile(r"(?:<[^<>\s]+>|\[[^\[\]\s]+\]|\{[^{}\s]+\}|\([^()\s]+\)|◁[^◁▷\s]+▷)\Z")
_BRACKETS_CLOSE = ">])}▷"
_CUT_MARK = re.compile(r"[<\[({◁][^>\])}▷]*\Z")
_ENDS_AND_BEGINS = (("end", "start"), ("END", "START"), ("end", "begin"), ("END", "BEGIN"), ("close", "open"))
_ENDS_AND_BEGINS += (("_end", ""), ("end_", ""), ("eo", "bo"))
"""Parts of a closing mark, each with the part that stands in the opening mark instead."""


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


def find_reasoning_format(render: RenderMessages, source: str) -> ReasoningFormat:
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

    def __init__(self, render: RenderMessages, source: str) -> None:
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

        The closing mark is what an answer and a call have in common after reasoning: each may have a header of its own.
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
        """The text of the generation prompt after the role, if the template writes earlier turns without it."""
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
    """The opening mark at the end of `bare` whose counterpart is the beginning of `closing`: after the closing mark stands a
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
