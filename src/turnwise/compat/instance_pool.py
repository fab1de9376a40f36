"""Instances of a class that many conversations use one after the other, as in TRL.

The number of instances may be limited: `self.client = Client(next(urls))` raises StopIteration after the last address. Then
conversations wait, in order of arrival, until an instance is released. An instance is released after its conversation is
scored, because reward functions may use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from bisect import insort
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
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
"""What the function that creates an instance returns if no more can be created."""


@dataclass(frozen=True, eq=False, slots=True)
class _Waiting:
    """A conversation that waits for an instance, or for its turn to create one."""

    arrival: int
    group: str
    lease: asyncio.Future[Lease]


class InstancePool:
    """The instances of one class. All methods are called in the event loop's thread."""

    def __init__(self, name: str, instances: Iterable[Any]) -> None:
        self._name = name
        self._free = list(instances)
        self._retired: list[Any] = []
        """Instances with a timed-out tool call that still runs. They are not reused; `drain` returns them."""
        self._leases: list[Lease] = []
        self._arrivals = itertools.count()
        self._waiting: list[_Waiting] = []
        """In the order of arrival."""
        self._exhausted = False
        self._step = 0
        """`conversations_of_step`."""

    async def lease(self, make: Callable[[], Awaitable[Any]]) -> Lease:
        """A lease of one instance for the calling conversation. `make` creates an instance, or returns EXHAUSTED.

        Waits if no more instances can be created. Raises Failed if no instance can become free before this conversation ends,
        and what `make` raises.
        """
        arrival = next(self._arrivals)
        while True:
            lease = await self._turn(arrival)
            if lease.ready:
                return lease
            with contextlib.ExitStack() as if_it_fails:
                if_it_fails.callback(lease.give_back, usable=False, closed=True)
                instance = await make()
                if_it_fails.pop_all()
            if instance is not EXHAUSTED:
                lease.made(instance)
                return lease
            self._exhausted = True
            self._leases.remove(lease)  # it waits at its place in the order of arrival, before later ones are served

    async def _turn(self, arrival: int) -> Lease:
        """A lease with an instance, or without one if the caller must create one now."""
        # conversations of one group are scored together, and all conversations if there is a function of the batch
        in_batch = scored_together.get() == "batch"
        self._step = 0 if in_lockstep() else conversations_of_step.get()
        group = _BATCH if in_batch else conversation_name().rpartition("/")[0]
        if not self._waiting and self._may_lend(group):
            return self._lend(group)
        if in_lockstep() and in_batch:
            raise self._too_few(_TOGETHER.format("the step"))
        if in_lockstep():
            raise self._too_few(
                "with deterministic: true no conversation waits for another: set `max_concurrent` to at most that number"
            )
        waiting = _Waiting(arrival, group, asyncio.get_running_loop().create_future())
        insort(self._waiting, waiting, key=attrgetter("arrival"))
        self._serve()
        try:
            with waiting_for_others():
                return await waiting.lease
        except asyncio.CancelledError:
            if waiting.lease.done() and not waiting.lease.cancelled() and waiting.lease.exception() is None:
                waiting.lease.result().give_back(usable=True)
            raise
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
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

    def _may_lend(self, group: str) -> bool:
        """Whether a conversation of the group, the next one in order of arrival, may get an instance or create one now.

        If the batch is scored together, a step needs all its instances at the same time. So no conversation of a later step
        may get the last instance before one of an earlier step, whose constructor runs longer and then fails. Therefore, after
        the conversations of the first step, no conversation gets an instance while a constructor runs.
        """
        steps_overlap = group == _BATCH and self._step > 0
        if steps_overlap and len(self._leases) >= self._step and not all(lease.ready for lease in self._leases):
            return False
        return bool(self._free) or not self._exhausted

    def _serve(self) -> None:
        """Give free instances to waiting conversations. Raise an error in conversations that would wait forever."""
        while self._waiting and self._may_lend(self._waiting[0].group):
            waiting = self._waiting.pop(0)
            if not waiting.lease.done():
                waiting.lease.set_result(self._lend(waiting.group))
        groups = {waiting.group for waiting in self._waiting}
        if _BATCH in groups and 0 < self._step <= len(self._leases):
            return  # the waiting conversations belong to later steps: the present step can be scored without them
        # a group, or the batch, is scored after all its conversations have ended; so waiting and ended conversations can block
        # each other
        if all(lease.ended and lease.group in groups for lease in self._leases):
            for waiting in self._waiting:
                if not waiting.lease.done():
                    waiting.lease.set_exception(self._too_few(_TOGETHER.format(self._scored(groups))))
            self._waiting.clear()

    def _scored(self, groups: set[str]) -> str:
        if _BATCH not in groups:
            return "the group"
        return f"the step ({self._step})" if self._step else "the step"

    def _too_few(self, reason: str) -> Failed:
        count = sum(lease.ready for lease in self._leases) + len(self._free)
        message = f"no more than {count} instances of {self._name} can be created (StopIteration), and {reason}"
        return Failed(Failure("environment", message))


class Lease:
    """The right of one conversation to use an instance, until it is released."""

    def __init__(self, pool: InstancePool, group: str, instance: Any) -> None:
        self._pool = pool
        self.group = group
        self.instance = instance
        self.new = False
        """Whether the instance was created for this conversation."""
        self.ended = False

    def played(self) -> None:
        """The conversation has ended, and its group is not scored yet."""
        self.ended = True
        self._pool._serve()

    @property
    def ready(self) -> bool:
        """Whether it has an instance. Otherwise the instance is being created."""
        return self.instance is not None

    def made(self, instance: Any) -> None:
        """The instance was created for this conversation."""
        self.instance = instance
        self.new = True
        self._pool._serve()

    def give_back(self, *, usable: bool, closed: bool = False) -> None:
        """Return the instance. It is reused if `usable`; otherwise `drain` returns it, unless it is `closed` already."""
        pool = self._pool
        pool._leases.remove(self)
        if self.instance is not None and (usable or not closed):
            (pool._free if usable else pool._retired).append(self.instance)
        pool._serve()
