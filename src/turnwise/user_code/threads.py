"""Daemon threads that run one job after another: starting a thread takes longer than most tools.

There is no limit. A job that never returns keeps its thread, and other jobs run in other threads.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

__all__ = ["start"]

_MAX_IDLE = 64
"""Idle threads that are kept; each takes some 50 KiB."""


class _Worker:
    """A thread and its next job."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[tuple[str, Callable[[], None]]] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while True:
            self.thread.name, job = self.jobs.get()
            job()
            del job  # it refers to the caller's objects
            self.thread.name = "idle"
            if len(_idle) >= _MAX_IDLE:
                return
            _idle.append(self)


_idle: list[_Worker] = []
os.register_at_fork(after_in_child=_idle.clear)  # a forked process has none of these threads


def start(job: Callable[[], None], *, name: str) -> None:
    """Run `job`, which does not raise, in a thread with this name."""
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()
        worker.thread.start()
    worker.jobs.put((name, job))
