"""The terminal, where nothing that a model, a tool or an environment wrote has an effect.

A terminal obeys escape sequences: they set its title, its clipboard, its colours, and hide text. In all that is printed here,
control characters are shown as text (`\\x1b`); the only ones that work are those of the console itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.style import Style

__all__ = ["Terminal", "printable"]

# C0 without tabulator and line feed, DEL, C1, and what changes the direction of text
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The same with control characters as text.

    Example: `"\\x1b]0;owned\\x07"` becomes `"\\\\x1b]0;owned\\\\x07"`.
    """
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


class Terminal(Console):
    """A console that shows control characters of what it is given as text."""

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
        texts = [printable(str(one)) for one in objects]
        super().out(*texts, sep=sep, end=end, style=style, highlight=highlight)
