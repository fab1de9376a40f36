"""Several servers with the same model: which of them serves a conversation, and what happens when one of them is lost.

All turns of a conversation go to the same server, whose prefix cache holds the conversation. Knows servers and processes; does
not know prompts or weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from turnwise.engines.remote.http import HttpServer, ServerLost
from turnwise.engines.remote.server_process import ServerProcess
from turnwise.errors import EngineError

__all__ = ["Replica", "Replicas"]

_RECHECK = 5.0  # seconds between two checks of a server that was lost and that turnwise did not start
_MAX_RESTARTS = 5
"""Restarts of a process without a finished request in between."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Replica:
    """One server."""

    server: HttpServer
    health_path: str
    process: ServerProcess | None = None
    """None for a server that turnwise did not start."""
    ready: bool = False
    """Whether it serves the engine's present weights. False before the start and after a loss."""
    running: int = 0
    """Requests that it is serving."""
    served: float = 0.0
    """When it last finished a request, by `time.monotonic`."""
    claimed: bool = False
    """Whether this engine may own the server's weights: it has asked for them, and was not refused."""
    failed_starts: int = 0
    """Starts since the last finished request."""
    checked: float = 0.0
    """When a lost server was last asked whether it is back, by `time.monotonic`."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the server is started or restored."""

    @property
    def name(self) -> str:
        """For messages: the address of the server."""
        return self.server.url if self.process is None else f"{self.process.command.name} ({self.server.url})"


class Replicas:
    """The servers of an engine.

    `prepare` is called with a replica that has been started or found again, and gives it the engine's present weights.
    `patience` is the time in seconds to wait for a server that turnwise did not start.
    """

    def __init__(
        self, replicas: Sequence[Replica], *, prepare: Callable[[Replica], Awaitable[None]], patience: float
    ) -> None:
        self.all = list(replicas)
        self._prepare = prepare
        self._patience = patience
        self._of: dict[str, Replica] = {}
        """The replica of each conversation."""
        self._started = False
        """Whether all servers have been ready once."""
        self._restoring: set[asyncio.Future[None]] = set()
        """Restorations in the background."""

    async def start(self) -> None:
        """Start all processes, and wait until all servers are ready. Does nothing later. Raises EngineError."""
        if self._started:
            return
        for replica in self.all:  # all processes start at the same time
            if replica.process is not None and not replica.process.running:
                replica.process.start()
        results = await asyncio.gather(*(self.restore(replica) for replica in self.all), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        self._started = True

    async def all_ready(self) -> None:
        """Restore all servers that are lost. Raises EngineError if one of them does not become ready."""
        await self.start()
        for replica in self.all:
            await self.restore(replica)

    async def of(self, conversation: str) -> Replica:
        """The ready replica of a conversation: its own, or else the one with the fewest requests.

        Waits for a restart if no replica is ready. Raises EngineError if none becomes ready.
        """
        await self.start()
        own = self._of.get(conversation)
        if own is not None and own.ready:
            return own
        replica = self._least_busy() or await self._any_restored()
        self._of[conversation] = replica
        return replica

    def release(self, conversation: str) -> None:
        """Forget a conversation that has ended."""
        self._of.pop(conversation, None)

    def lose(self, replica: Replica) -> None:
        """Use a replica no more until it is restored. A process that turnwise started is ended.

        Nothing happens while the replica is restored: several requests report the same loss, one after the other.
        """
        if replica.lock.locked():
            return
        if replica.ready:
            replica.ready = False
            _log.warning("%s is lost; its requests go on at another server or after a restart", replica.name)
        if replica.process is not None:
            replica.process.kill()

    async def restore(self, replica: Replica) -> None:
        """Make a replica ready: start its process if it does not run, wait for it, and give it the present weights.

        Raises EngineError if it does not become ready.
        """
        async with replica.lock:
            if replica.ready:
                return
            if replica.process is not None:
                await self._start_process(replica, replica.process)
            else:
                await self._wait_for(replica)
            await self._prepare(replica)
            replica.ready = True

    async def stop_restoring(self) -> None:
        """Restore no server in the background any more."""
        restoring = list(self._restoring)
        for task in restoring:
            task.cancel()
        await asyncio.gather(*restoring, return_exceptions=True)

    async def close(self) -> None:
        """Close the connections, and end the processes that turnwise started."""
        for replica in self.all:
            replica.ready = False
        await self.stop_restoring()
        await asyncio.gather(*(replica.server.close() for replica in self.all))
        await asyncio.gather(*(replica.process.stop() for replica in self.all if replica.process is not None))

    def _least_busy(self) -> Replica | None:
        """A ready replica with the fewest requests; None if none is ready.

        Conversations that are between two turns count as well, by the number that each replica has been given.
        """
        ready = [replica for replica in self.all if replica.ready]
        if not ready:
            return None
        given = {id(replica): 0 for replica in ready}
        for replica in self._of.values():
            if id(replica) in given:
                given[id(replica)] += 1
        self._recheck_lost()
        return min(ready, key=lambda replica: (given[id(replica)], replica.running))

    def _recheck_lost(self) -> None:
        """Restore lost replicas in the background while others serve."""
        for replica in self.all:
            if not replica.ready and not replica.lock.locked() and time.monotonic() - replica.checked > _RECHECK:
                replica.checked = time.monotonic()
                self._in_background(asyncio.ensure_future(self.restore(replica)))

    def _in_background(self, task: asyncio.Future[None]) -> None:
        self._restoring.add(task)
        task.add_done_callback(self._restoring.discard)
        task.add_done_callback(_log_failure)

    async def _any_restored(self) -> Replica:
        """The first replica that becomes ready. Raises the EngineError of the first replica if none does."""
        tasks = [asyncio.ensure_future(self.restore(replica)) for replica in self.all]
        try:
            pending = set(tasks)
            while pending:
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if (replica := next((replica for replica in self.all if replica.ready), None)) is not None:
                    return replica
        finally:
            for task in tasks:
                if len(self.all) > 1 and not task.done():
                    self._in_background(task)  # it goes on restoring its replica
                elif not task.done():
                    task.cancel()
        for task in tasks:
            if (error := task.exception()) is not None:
                raise EngineError(str(error)) from error
        raise EngineError(f"{self.all[0].name} was lost directly after its start")

    async def _start_process(self, replica: Replica, process: ServerProcess) -> None:
        if not process.running:
            replica.failed_starts += 1
            if replica.failed_starts > _MAX_RESTARTS:
                raise EngineError(
                    f"{replica.name} has died {_MAX_RESTARTS} times without finishing a request; it is not started "
                    f"again{process.log_tail()}"
                )
            if process.starts:
                _log.warning("%s is restarted", replica.name)
            process.kill()  # what is left of the last start
            await asyncio.to_thread(process.wait_for_end)  # its port and its memory are free then
            process.start()
        await process.wait_until(lambda: replica.server.healthy(replica.health_path))

    async def _wait_for(self, replica: Replica) -> None:
        deadline = time.monotonic() + self._patience
        while not await replica.server.healthy(replica.health_path):
            if time.monotonic() > deadline:
                raise ServerLost(
                    f"there is no server at {replica.server.url} (GET {replica.health_path} was tried for "
                    f"{self._patience:g} s): start it, or correct engine.url"
                )
            await asyncio.sleep(0.5)


def _log_failure(task: asyncio.Future[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("%s", error)
