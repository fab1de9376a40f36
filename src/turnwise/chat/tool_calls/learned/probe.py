"""The probe calls that the template renders, and where their parts are in the rendered text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from turnwise.types import ToolSchema

__all__ = [
    "FIRST",
    "LEARNED",
    "NUMBERS",
    "PROBES",
    "PROBE_TOOLS",
    "SECOND",
    "TOOL",
    "Arguments",
    "ProbeWriter",
    "Write",
]

LEARNED = "learned"
"""The name of every learned format."""

Arguments = dict[str, Any]
Write = Callable[[Sequence[Arguments]], str]
"""Renders an assistant message with one call of `probe_tool` for each arguments, as text that the model would have to sample.
Raises TemplateError or returns "" if the template does not accept such a message."""

TOOL = "probe_tool"
PROBE_TOOLS: Sequence[ToolSchema] = ({"type": "function", "function": {"name": TOOL}},)
"""The tool on offer when probe calls are parsed back."""
FIRST, SECOND = {"alpha": "valuea", "beta": "valueb"}, {"alpha": "valuec", "beta": "valued"}
"""Arguments whose keys and values are easy to find in the rendered text."""
NUMBERS = {"alpha": 731, "beta": 732}
PROBES: tuple[Arguments, ...] = (
    {"text": 'a "b" </x>', "number": 3, "nested": {"list": [1, None]}},
    {"text": "a b", "number": 3},
)
"""Arguments that a learned format must parse back: the first, or at least the second."""


class ProbeWriter:
    """Renders probe calls; the text ends where the turn of the model ends. `ends` are texts that end a turn."""

    def __init__(self, write: Write, ends: Sequence[str]) -> None:
        self._write, self._ends = write, [end for end in ends if end]

    def __call__(self, *calls: Arguments) -> str:
        """The text of a turn with a call of `probe_tool` for each of these arguments; "" if the template refuses it."""
        text = self._write(calls)
        positions = [position for end in self._ends if (position := text.find(end)) >= 0]
        return text[: min(positions, default=len(text))]
