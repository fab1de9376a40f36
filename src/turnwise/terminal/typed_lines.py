"""Lines that a person types, or that a file or a pipe gives, read while an event loop runs.

At a terminal, the line can be edited and its words completed (GNU readline, where Python has it). Knows nothing of conversations.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from turnwise.errors import ConfigError
from turnwise.terminal.report import printable

Complete = Callable[[str], Sequence[str]]
"""The line up to the cursor gives the words that its last word may become."""

_READ = 1 << 16  # bytes


def nothing(line: str) -> Sequence[str]:
    """Completes no word."""
    return ()


class Lines(Protocol):
    """Where the lines come from."""

    async def read(self, prompt: str, complete: Complete = nothing) -> str | None:
        """The next line, without its end. None: there is no further line. `complete` completes words at a terminal."""
        ...


def _descriptor() -> int:
    """That of the standard input. Raises ConfigError if it is none of the system's, as in a notebook."""
    try:
        return sys.stdin.fileno()
    except (OSError, AttributeError, ValueError):
        raise ConfigError(
            "there is no standard input to read from, as in a notebook: run the command in a terminal, or give its input as a "
            "file or a pipe"
        ) from None


class TypedLines:
    """The lines of standard input.

    A thread waits for each line, so that a signal can stop the program meanwhile. The thread is a daemon: one that still waits
    does not keep the program from ending. Raises ConfigError if there is no standard input.
    """

    def __init__(self) -> None:
        self._terminal = sys.stdin is not None and sys.stdin.isatty()
        self._piped = iter(()) if self._terminal else _piped_lines(_descriptor())
        self._complete: Complete = nothing

    @contextlib.contextmanager
    def editing(self) -> Iterator[None]:
        """A context in which words are completed. At its end the terminal is as it was."""
        if not self._terminal:
            yield
            return
        import termios

        settings = termios.tcgetattr(sys.stdin.fileno())
        _use_completion(lambda line: self._complete(line))
        try:
            yield
        finally:
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, settings)

    async def read(self, prompt: str, complete: Complete = nothing) -> str | None:
        self._complete = complete
        loop = asyncio.get_running_loop()
        line: asyncio.Future[str | None] = loop.create_future()

        def wait() -> None:
            found = self._wait(prompt)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(lambda: None if line.done() else line.set_result(found))

        threading.Thread(target=wait, name="typed lines", daemon=True).start()
        return await line

    def _wait(self, prompt: str) -> str | None:
        if self._terminal:
            try:
                return input(prompt)
            except (EOFError, UnicodeDecodeError):
                return None
        line = next(self._piped, None)
        # what was not typed at a terminal is not on the screen
        print(f"{prompt}{'' if line is None else printable(line)}", flush=True)
        return line


def _piped_lines(file: int) -> Iterator[str]:
    """The lines of a file that is no terminal. `sys.stdin` is not used: its lock would be held when the program ends."""
    rest = b""
    while piece := os.read(file, _READ):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.decode("utf-8", "replace").removesuffix("\r")
    if rest:
        yield rest.decode("utf-8", "replace")


def _use_completion(complete: Complete) -> None:
    """Complete words with the tabulator key, where Python has readline."""
    try:
        import readline
    except ImportError:
        return
    words: list[str] = []

    def nth(text: str, number: int) -> Any:
        if number == 0:
            words[:] = complete(readline.get_line_buffer()[: readline.get_endidx()])
        return words[number] if number < len(words) else None

    readline.set_completer_delims(" ")
    readline.set_completer(nth)
    readline.parse_and_bind("tab: complete")
