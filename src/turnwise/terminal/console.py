"""A console that is safe for text from models, tools and environments.

Escape sequences can set the title, the clipboard and the colours of a terminal, and hide text. This console prints control
characters as text (`\\x1b`); only its own control sequences reach the terminal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.style import Style

__all__ = ["Terminal", "printable"]

# C0 without tabulator and line feed, DEL, C1, and characters that change the direction of text
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The text with its control characters written as escapes.

    Example: `"\\x1b]0;owned\\x07"` becomes `"\\\\x1b]0;owned\\\\x07"`.
    """
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


class Terminal(Console):
    """A rich console that prints control characters as text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(printable(text), style)

    def out(
        self,
        *objects: Any,
        sep: str = " ",
        end: str = "\n",
        style: str | Style | None = None,
        highlight: bool | None = None,
    ) -> None:
        texts = [printable(str(value)) for value in objects]
        super().out(*texts, sep=sep, end=end, style=style, highlight=highlight)
