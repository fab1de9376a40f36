"""Finds the reasoning in the text of a turn by its opening and closing marks.

    <think>Is it 4?</think>It is 4.         reasoning "Is it 4?", content "It is 4."

The marks of a template are found by rendering (`chat/reasoning_format.py`). The marks of well-known families are always
recognised too: text inside them is reasoning, and a tool call inside reasoning must never be executed. A reasoning block ends
at its closing mark, or at the end of a truncated text. Inside a block, other marks are ignored. Harmony and ATEM write messages
with headers; the headers of messages that are not reasoning are removed (`SCAFFOLD`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["KNOWN", "MARKS", "ReasoningBlock", "ReasoningMarks", "join_pieces", "reasoning_blocks", "split_reasoning"]

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


def reasoning_blocks(text: str, *, opened: bool = False) -> list[ReasoningBlock]:
    """The blocks of reasoning in a text, by the marks of well-known families."""
    return KNOWN.reasoning_blocks(text, opened=opened)


def split_reasoning(text: str, *, opened: bool = False) -> tuple[str, str]:
    """Reasoning and content, by the marks of well-known families."""
    return KNOWN.split(text, opened=opened)


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
