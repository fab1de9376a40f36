"""Instances of a class that many conversations use one after the other, as in TRL.

The number of instances may be limited: `self.client = Client(next(urls))` raises StopIteration after the last address. Then
conversations wait, in order of arrival, until an instance is released. An instance is released after its conversation is
scored, because reward functions may use it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

from turnwise.errors import Failed
from turnwise.types import Failure
from turnwise.user_code.deadlines import conversation_name, in_lockstep, waiting_for_others
from turnwise.user_code.scoring_scope import conversations_of_step, scored_together

__all__ = ["EXHAUSTED", "InstancePool", "Lease"]

_BATCH = "all conversations"
_TOGETHER = (
    "conversations that are scored together need an instance each: provide as many instances as {} has conversations"
)
EXHAUSTED: Final = object()
"""Marks an instance that could not be created."""


class InstancePool:
    """The instances of one class. All methods are called in the event loop's thread."""

    def __init__(self, name: str, instances: Iterable[Any]) -> None:
        self._name = name
        self._free = list(instances)
        self._retired: list[Any] = []
        """Instances with a timed-out tool call that still runs. They are not reused; `drain` returns them."""
        self._leases: list[Lease] = []
        self._waiting: deque[tuple[str, asyncio.Future[Lease]]] = deque()
        self._exhausted = False
        self._step = 0
        """`conversations_of_step`."""

    async def lease(self) -> Lease:
        """A lease of one instance for the calling conversation. If its `instance` is None, the caller must create one.

        Waits if no more instances can be created. Raises Failed if no instance can become free before this conversation ends.
        """
        # conversations of one group are scored together, and all conversations if there is a function of the batch
        in_batch = scored_together.get() == "batch"
        self._step = conversations_of_step.get()
        group = _BATCH if in_batch else conversation_name().rpartition("/")[0]
        if not self._exhausted or (self._free and not self._waiting):
            return self._lend(group)
        if in_lockstep() and in_batch:
            raise self._too_few(_TOGETHER.format("the step"))
        if in_lockstep():
            raise self._too_few(
                "with deterministic: true no conversation waits for another: set `max_concurrent` to at most that number"
            )
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._waiting.append((group, future))
        self._serve()
        try:
            with waiting_for_others():
                return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().give_back(usable=True)
            raise
        finally:
            if (group, future) in self._waiting:
                self._waiting.remove((group, future))
                self._serve()

    def drain(self) -> list[Any]:
        """Remove and return all instances that no conversation uses. The caller must close them."""
        drained = [*self._free, *self._retired]
        self._free, self._retired = [], []
        return drained

    def _lend(self, group: str) -> Lease:
        lease = Lease(self, group, self._free.pop() if self._free else None)
        self._leases.append(lease)
        return lease

    def _serve(self) -> None:
        """Give free instances to waiting conversations. Raise an error in conversations that would wait forever."""
        while self._waiting and self._free:
            group, future = self._waiting.popleft()
            if not future.done():
                future.set_result(self._lend(group))
        groups = {group for group, _ in self._waiting}
        if _BATCH in groups and 0 < self._step <= len(self._leases):
            return  # the waiting conversations belong to later steps: the present step can be scored without them
        # a group, or the batch, is scored after all its conversations have ended; so waiting and ended conversations can block
        # each other
        if all(lease.ended and lease.group in groups for lease in self._leases):
            for _, future in self._waiting:
                if not future.done():
                    future.set_exception(self._too_few(_TOGETHER.format(self._scored(groups))))
            self._waiting.clear()

    def _scored(self, groups: set[str]) -> str:
        if _BATCH not in groups:
            return "the group"
        return f"the step ({self._step})" if self._step else "the step"

    def _too_few(self, reason: str) -> Failed:
        count = sum(lease.instance is not None for lease in self._leases) + len(self._free)
        message = f"no more than {count} instances of {self._name} can be created (StopIteration), and {reason}"
        return Failed(Failure("environment", message))


class Lease:
    """The right of one conversation to use an instance, until it is released."""

    def __init__(self, pool: InstancePool, group: str, instance: Any) -> None:
        self._pool = pool
        self.group = group
        self.instance = instance
        self.ended = False

    def played(self) -> None:
        """The conversation has ended, and its group is not scored yet."""
        self.ended = True
        self._pool._serve()

    def refused(self) -> None:
        """The class cannot make more instances."""
        self._pool._exhausted = True
        self.give_back(usable=False, closed=True)

    def give_back(self, *, usable: bool, closed: bool = False) -> None:
        """Return the instance. It is reused if `usable`; otherwise `drain` returns it, unless it is `closed` already."""
        pool = self._pool
        pool._leases.remove(self)
        if self.instance is not None and (usable or not closed):
            (pool._free if usable else pool._retired).append(self.instance)
        pool._serve()
