"""Bounds the lines that an MCP server writes to its stdout.

The SDK collects a line until it ends, however long it gets. It lets us choose the encoding of that pipe, so the bound is in an
encoding of our own: UTF-8 whose decoder counts the characters since the last line break. Past the bound it drops everything
and tells its listener, who ends the server.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from contextvars import ContextVar

__all__ = ["ENCODING", "LONGEST_LINE", "listen"]

ENCODING = "turnwise_bounded_utf_8"
LONGEST_LINE = 16 * 2**20
"""Characters; an image in an answer is one line. The SDK's time for a line grows with the square of its length."""

_listener: ContextVar[Callable[[], None] | None] = ContextVar("turnwise_mcp_line_too_long", default=None)


def listen(told: Callable[[], None]) -> None:
    """Decoders that this task and its children make from now on call `told` at a line that is too long."""
    _listener.set(told)


class _Decoder(codecs.IncrementalDecoder):
    def __init__(self, errors: str = "strict") -> None:
        super().__init__(errors)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)
        self._told = _listener.get()
        self._length = 0
        """Characters of the line so far."""

    def decode(self, input: bytes, final: bool = False) -> str:  # type: ignore[override]
        if self._length > LONGEST_LINE:
            return ""
        text = self._utf8.decode(input, final)
        before, line_break, rest = text.rpartition("\n")
        self._length = len(rest) + (0 if line_break else self._length)
        if self._length <= LONGEST_LINE:
            return text
        if self._told is not None:
            self._told()
        return before + line_break


def _search(name: str) -> codecs.CodecInfo | None:
    if name != ENCODING:
        return None
    return codecs.CodecInfo(
        codecs.utf_8_encode, codecs.utf_8_decode, incrementaldecoder=_Decoder, name=ENCODING
    )  # the other direction is plain UTF-8


codecs.register(_search)
