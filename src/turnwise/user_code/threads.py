"""Daemon threads that run one job after another: starting a thread takes longer than most tools.

There is no limit. A job that never returns keeps its thread, and each waiting job has a thread. Jobs begin in the order in which
they are given: all threads take them from one queue.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

__all__ = ["start"]

_MAX_IDLE = 64
"""Idle threads that are kept; each takes some 50 KiB."""


class _Threads:
    """The threads of this process."""

    def __init__(self) -> None:
        self.idle = 0
        """Threads that wait, less the jobs that wait for them."""
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[str, Callable[[], None]]] = queue.SimpleQueue()

    def start(self, name: str, job: Callable[[], None]) -> None:
        with self._lock:
            new = not self.idle
            self.idle -= not new
        self._jobs.put((name, job))
        if new:
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        thread = threading.current_thread()
        while True:
            thread.name, job = self._jobs.get()
            job()
            del job  # it refers to the caller's objects
            thread.name = "idle"
            with self._lock:
                if self.idle >= _MAX_IDLE:
                    return
                self.idle += 1


_threads = _Threads()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.__init__)  # a forked process has none of these threads


def start(job: Callable[[], None], *, name: str) -> None:
    """Run `job`, which does not raise, in a thread with this name."""
    _threads.start(name, job)
