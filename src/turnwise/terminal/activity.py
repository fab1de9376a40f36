"""The present activity of a run, which shows the user during a long step that the run makes progress."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console

__all__ = ["Activity", "Advance", "Heartbeat"]


class Advance(Protocol):
    """Counts a finished item of a part of a step."""

    def __call__(self, tokens: int = 0, /) -> None:
        """`tokens` is the number of tokens that were sampled for the item."""
        ...


@dataclass(slots=True)
class Activity:
    """The part of a step that is running. The run writes it; a display reads it, possibly in another thread."""

    label: str = ""
    """`step 4: conversations`; empty before the first step."""
    done: int = 0
    total: int = 0
    """0 for a part without a count."""
    tokens: int = 0
    """The tokens that were sampled for the finished items of the part."""
    began: float = field(default_factory=time.monotonic)
    """When the step began, by `time.monotonic`."""
    part_began: float = field(default_factory=time.monotonic, init=False)
    _parts: int = field(default=0, init=False)

    def step(self, step: int) -> None:
        """Record that a step begins. Steps are counted from 1."""
        self.began = time.monotonic()
        self.part(step, "conversations")

    def part(self, step: int, name: str, total: int = 0) -> Advance:
        """Record that a part of a step begins, with `total` items.

        Returns a function to call after each item. It has no effect after another part began: with `train.max_staleness`, the
        conversations of later steps continue during training.
        """
        self.label, self.done, self.total, self.tokens = f"step {step}: {name}", 0, total, 0
        self.part_began = time.monotonic()
        self._parts += 1
        own = self._parts

        def advance(tokens: int = 0, /) -> None:
            if self._parts == own:
                self.advance(tokens)

        return advance

    def advance(self, tokens: int = 0, /) -> None:
        """Count a finished item, for which `tokens` tokens were sampled."""
        self.done += 1
        self.tokens += tokens

    def speed(self) -> str:
        """The sampled tokens per second of the part, such as `1,234 tokens/s`; empty without sampled tokens."""
        seconds = time.monotonic() - self.part_began
        return f"{self.tokens / seconds:,.0f} tokens/s" if self.tokens and seconds > 0 else ""

    def text(self) -> str:
        """The activity as text, such as `step 4: conversations 37 of 128, 1,234 tokens/s, 61 s`."""
        if not self.label:
            return ""
        count = f" {self.done} of {self.total}" if self.total else ""
        speed = f", {speed}" if (speed := self.speed()) else ""
        return f"{self.label}{count}{speed}, {time.monotonic() - self.began:.0f} s"


class Heartbeat:
    """Prints a line every `seconds` seconds during a long step, if the console is not a terminal with a live display."""

    def __init__(self, activity: Activity, console: Console, *, seconds: float = 60.0) -> None:
        self._activity = activity
        self._console = console
        self._seconds = seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> None:
        if not self._console.is_terminal:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _beat(self) -> None:
        while not self._ended.wait(self._seconds):
            if time.monotonic() - self._activity.began >= self._seconds and (text := self._activity.text()):
                self._console.print(text, highlight=False, markup=False, soft_wrap=True)
