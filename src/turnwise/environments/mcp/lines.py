"""Limits the length of the lines that an MCP server writes to its stdout.

The SDK buffers a line without a length limit, but lets the caller choose the encoding of the pipe. This module registers an
encoding that enforces the limit: UTF-8 with a decoder that counts the characters since the last line break. Above the limit
the decoder drops all further text and calls its listener, which ends the server.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from contextvars import ContextVar

__all__ = ["ENCODING", "LONGEST_LINE", "listen"]

ENCODING = "turnwise_bounded_utf_8"
LONGEST_LINE = 16 * 2**20
"""In characters. An image in a result is one line. The time that the SDK needs for a line is quadratic in its length."""

_listener: ContextVar[Callable[[], None] | None] = ContextVar("turnwise_mcp_line_too_long", default=None)


def listen(listener: Callable[[], None]) -> None:
    """Set the listener: decoders created later in this task and its child tasks call `listener` when a line is too long."""
    _listener.set(listener)


class _Decoder(codecs.IncrementalDecoder):
    def __init__(self, errors: str = "strict") -> None:
        super().__init__(errors)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)
        self._on_long_line = _listener.get()
        self._length = 0
        """Characters in the current line so far."""

    def decode(self, input: bytes, final: bool = False) -> str:  # type: ignore[override]
        if self._length > LONGEST_LINE:
            return ""
        text = self._utf8.decode(input, final)
        before, line_break, rest = text.rpartition("\n")
        self._length = len(rest) + (0 if line_break else self._length)
        if self._length <= LONGEST_LINE:
            return text
        if self._on_long_line is not None:
            self._on_long_line()
        return before + line_break


def _search(name: str) -> codecs.CodecInfo | None:
    if name != ENCODING:
        return None
    return codecs.CodecInfo(
        codecs.utf_8_encode, codecs.utf_8_decode, incrementaldecoder=_Decoder, name=ENCODING
    )  # encoding is plain UTF-8


codecs.register(_search)
