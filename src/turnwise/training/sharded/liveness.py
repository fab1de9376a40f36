"""Signs of life: which rank of a training has ended or does not respond.

Each rank counts in the store while its process runs, and watches the counters of the others. A rank that raises writes its error
there. Knows nothing of models.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed.distributed_c10d import Store

__all__ = ["Liveness", "LostRank"]

_PAUSE = 1.0
"""Seconds between two signs of life."""
_PATIENCE = 5.0
"""After a lost connection: seconds until the rank at its other end is known by its missing signs of life."""


@dataclass(frozen=True, slots=True)
class LostRank:
    """A rank that has ended, or that has given no sign of life."""

    rank: int
    place: str
    """Its machine and process."""
    reason: str

    def __str__(self) -> str:
        return f"trainer rank {self.rank} ({self.place}) {self.reason}"


class Liveness:
    """The signs of life of this rank, and those of the others. `limit` is in seconds."""

    def __init__(self, store: Store, *, rank: int, size: int, limit: float) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._rank = rank
        self._limit = limit
        self._seen = {other: (-1, time.monotonic()) for other in range(size) if other != rank}
        self._places: dict[int, str] = {}
        self._closing = threading.Event()
        self.on_lost: Callable[[LostRank], None] = lambda lost: None
        """Called in a thread of its own if a rank gives no sign of life for `limit` seconds."""
        self._store.set(f"place/{rank}", f"{socket.gethostname()}, process {os.getpid()}")
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)
        self._thread.start()

    def report(self, error: BaseException) -> None:
        """Write down why this rank ends."""
        with self._lock:
            self._store.set(f"error/{self._rank}", f"{type(error).__name__}: {error}")

    def lost(self) -> LostRank | None:
        """The rank whose connection was lost, after waiting until it is known; None if all ranks are alive.

        An error that a rank has written down names it at once.
        """
        started = time.monotonic()
        while True:
            lost = self._find(since=started)
            if lost is not None or time.monotonic() - started > _PATIENCE:
                return lost
            time.sleep(_PAUSE / 4)

    def close(self) -> None:
        """End the thread. This rank gives no further signs of life."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        count = 0
        while not self._closing.wait(_PAUSE):
            count += 1
            try:
                with self._lock:
                    self._store.set(f"alive/{self._rank}", str(count))
                self._read()
            except RuntimeError:  # the store is gone, and with it the rank or the agent that holds it
                if not self._closing.is_set():
                    self.on_lost(LostRank(0, "the store of the ranks", "cannot be reached"))
                return
            now = time.monotonic()
            for other, (_, since) in self._seen.items():
                if now - since > self._limit:
                    reason = f"has given no sign of life for {self._limit:g} seconds (cluster.heartbeat)"
                    self.on_lost(LostRank(other, self._place(other), reason))
                    return

    def _read(self) -> None:
        for other, (seen, _) in list(self._seen.items()):
            with self._lock:
                if not self._store.check([f"alive/{other}"]):
                    continue
                count = int(self._store.get(f"alive/{other}"))
                if other not in self._places and self._store.check([f"place/{other}"]):
                    self._places[other] = self._store.get(f"place/{other}").decode()
            if count != seen:
                self._seen[other] = (count, time.monotonic())

    def _find(self, *, since: float) -> LostRank | None:
        """A rank that has written down an error, or that has given no sign of life for some seconds."""
        for other in self._seen:
            try:
                with self._lock:
                    if self._store.check([f"error/{other}"]):
                        text = self._store.get(f"error/{other}").decode(errors="replace")
                        return LostRank(other, self._place(other), f"has ended: {text}")
            except RuntimeError:
                return LostRank(0, self._place(0), "has ended, or its machine cannot be reached")
        now = time.monotonic()
        for other, (_, seen) in self._seen.items():
            if now - since > 3 * _PAUSE and now - seen > 3 * _PAUSE:
                return LostRank(other, self._place(other), "has ended, or does not answer")
        return None

    def _place(self, other: int) -> str:
        return self._places.get(other, "place unknown")
