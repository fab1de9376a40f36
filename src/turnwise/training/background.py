"""Long computations in a thread, which stop early if the asyncio task that waits for them is cancelled.

This module does not depend on the computation.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

__all__ = ["Passes", "StopFlag", "run_cancellable", "run_to_completion"]

M = TypeVar("M")
S = TypeVar("S")
T = TypeVar("T")
Report = Callable[[], None]


class StopFlag(threading.Event):
    """Whether a computation is to stop early. Set by the event loop, read by the thread."""

    def until_set(self, items: Iterable[T]) -> Iterator[T]:
        """The items, until the flag is set. After that, no further item is taken from the iterable."""
        if self.is_set():
            return
        for item in items:
            yield item
            if self.is_set():
                return


def _in_thread(work: Callable[[StopFlag], T], stop: StopFlag) -> asyncio.Future[T]:
    # a thread that ends with the work: while there are more OpenMP threads than cores, those that decode sleep in between
    executor, context = ThreadPoolExecutor(1, "passes"), contextvars.copy_context()
    result = asyncio.get_running_loop().run_in_executor(executor, lambda: context.run(work, stop))
    executor.shutdown(wait=False)
    return result


async def run_cancellable(work: Callable[[StopFlag], T]) -> T:
    """Run `work` in a thread. If the caller is cancelled, CancelledError is raised at once and the flag is set.

    The result of work that was stopped early is discarded.
    """
    stop = StopFlag()
    try:
        return await _in_thread(work, stop)
    except asyncio.CancelledError:
        stop.set()
        raise


async def run_to_completion(work: Callable[[StopFlag], T]) -> T:
    """Run `work` in a thread to its end. A cancellation in between is raised at the next `await` of the task after the end."""
    running = _in_thread(work, StopFlag())
    cancelled = False
    while not running.done():
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled and (task := asyncio.current_task()) is not None:
        task.cancel()
    return running.result()


class Passes(ABC, Generic[M, S]):
    """What a learner and a critic have in common: gradients of batches, and optimizer steps. Both methods block."""

    @abstractmethod
    def accumulate(self, micro_batches: Sequence[M], on_micro_batch: Report, stop: StopFlag) -> S:
        """Replace the gradients by those of a batch. Returns its loss and metrics."""

    @abstractmethod
    def step(self, lr: float) -> float:
        """Take an optimizer step. Returns the norm of the gradient before clipping."""

    async def take_steps(
        self, batches: list[list[M]], report: Report, on_first: Report, lr: float, epochs: int, cancellable: bool
    ) -> tuple[list[S], list[float]]:
        """Take one optimizer step for each batch, `epochs` times over. Returns the sums and the norm of the gradient of each.

        `report` is called after each micro-batch, and `on_first` before the first step. Gradients are computed in a thread. The
        weights change in the event loop's thread, never in the middle of an engine's step. If cancelled before the first step and
        `cancellable`, CancelledError is raised at once, and the thread ends after its micro-batch; else, after the last step.
        """
        sums: list[S] = []
        norms: list[float] = []
        for batch in batches * epochs:
            in_thread = run_cancellable if cancellable and not sums else run_to_completion
            total = await in_thread(lambda stop, batch=batch: self.accumulate(batch, report, stop))
            if not sums:
                on_first()
            norms.append(self.step(lr))
            sums.append(total)
        return sums, norms
