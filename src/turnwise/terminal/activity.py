"""The present activity of a run, which shows the user during a long step that the run makes progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console

__all__ = ["Activity", "Heartbeat"]


@dataclass(slots=True)
class Activity:
    """The part of a step that is running. The run writes it; a display reads it, possibly in another thread."""

    label: str = ""
    """`step 4: conversations`; empty before the first step."""
    done: int = 0
    total: int = 0
    """0 for a part without a count."""
    began: float = field(default_factory=time.monotonic)
    """When the step began, by `time.monotonic`."""
    _parts: int = field(default=0, init=False)

    def step(self, step: int) -> None:
        """Record that a step begins. Steps are counted from 1."""
        self.began = time.monotonic()
        self.part(step, "conversations")

    def part(self, step: int, name: str, total: int = 0) -> Callable[[], None]:
        """Record that a part of a step begins, with `total` items.

        Returns a function to call after each item. It has no effect after another part began: with `train.max_staleness`, the
        conversations of later steps continue during training.
        """
        self.label, self.done, self.total = f"step {step}: {name}", 0, total
        self._parts += 1
        own = self._parts

        def advance() -> None:
            if self._parts == own:
                self.done += 1

        return advance

    def advance(self) -> None:
        """Count a finished item, in a run with a single part."""
        self.done += 1

    def text(self) -> str:
        """The activity as text, such as `step 4: conversations 37 of 128, 61 s`."""
        count = f" {self.done} of {self.total}" if self.total else ""
        return f"{self.label}{count}, {time.monotonic() - self.began:.0f} s" if self.label else ""


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
