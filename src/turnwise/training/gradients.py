"""Gradients of micro-batches, added up over a batch. Small models compute several micro-batches at a time.

Knows an optimizer's parameters, and nothing of models or losses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from turnwise.models.allocator import LARGE_MODEL, gradients_first, trim_kept
from turnwise.models.torch_threads import TorchThreads
from turnwise.training.background import StopFlag
from turnwise.training.optimizer import Optimizer
from turnwise.training.packing import Columns, MicroBatch

__all__ = ["Gradients"]

S = TypeVar("S")


class Gradients:
    """Computes the gradients of micro-batches, and adds them up in the `grad` of the optimizer's parameters.

    `parallel` allows several micro-batches at a time, where that is faster. `large`: the model is large and on a CPU.
    """

    def __init__(self, optimizer: Optimizer, threads: TorchThreads, *, parallel: bool, large: bool) -> None:
        self._optimizer, self._threads = optimizer, threads
        self._around = gradients_first if large else contextlib.nullcontext
        self.parallel = _parallel(optimizer.parameters) if parallel else 1
        """How many micro-batches are computed at the same time."""
        self._workers = None
        if self.parallel > 1:
            self._workers = ThreadPoolExecutor(self.parallel, "learn", initializer=_use_one_thread)

    def of_batch(
        self,
        micro_batches: Sequence[MicroBatch[Columns]],
        loss: Callable[[MicroBatch[Columns]], tuple[torch.Tensor, Callable[[], S]]],
        *,
        on_micro_batch: Callable[[], None],
        stop: StopFlag,
    ) -> list[S]:
        """Replace the gradients by those of a batch. Returns the metrics of each micro-batch.

        `loss` returns the loss of a micro-batch, and a function that computes metrics, which is called after the backward pass.
        """
        self._optimizer.zero_grad()
        metrics: list[S] = []
        # gradients of micro-batches that are computed in parallel are added up here, not by the backward pass
        accumulated = self._optimizer.parameters if self._workers is None else ()
        # when the generator is closed early, it computes no further micro-batch
        with self._around(accumulated), contextlib.closing(self._results(micro_batches, loss)) as results:
            for metrics_of_one, gradients in stop.until_set(results):
                if gradients is not None:
                    self._optimizer.add_gradients(gradients)
                metrics.append(metrics_of_one)
                on_micro_batch()
        trim_kept()
        return metrics

    def _results(
        self, micro_batches: Sequence[MicroBatch[Any]], loss: Callable[..., tuple[torch.Tensor, Callable[[], S]]]
    ) -> Generator[tuple[S, _OfParameters | None]]:
        """The result of each micro-batch, in order. The gradients are returned if several are computed at a time."""
        if self._workers is not None and len(micro_batches) > 1:
            yield from self._workers.map(lambda micro: self._backward(micro, loss, separate=True), micro_batches)
            return
        device = self._optimizer.parameters[0].device
        for micro in micro_batches:
            with self._threads.during("learn", micro.token_ids_BL.numel()):
                result = self._backward(micro.to(device), loss, separate=False)
            yield result

    def _backward(
        self, micro: MicroBatch[Any], loss: Callable[..., tuple[torch.Tensor, Callable[[], S]]], *, separate: bool
    ) -> tuple[S, _OfParameters | None]:
        """Metrics and gradients of a micro-batch. The gradients are added to the parameters' `grad`, or returned (`separate`)."""
        total, metrics = loss(micro)
        gradients = None
        if separate:  # two threads must not add to the same `grad` at once
            gradients = torch.autograd.grad(total, self._optimizer.parameters, allow_unused=True)
        else:
            total.backward()
        with torch.no_grad():
            return metrics(), gradients


_OfParameters = Sequence[torch.Tensor | None]
"""A gradient for each parameter; None where the loss does not depend on it."""


def _use_one_thread() -> None:
    torch.get_num_threads()  # torch sets up the thread here; if it did so later, it would replace the number
    torch.set_num_threads(1)


def _parallel(parameters: Sequence[torch.nn.Parameter]) -> int:
    """How many micro-batches are computed at the same time: one for each core, where this is the fastest use of the cores.

    It is faster for small models on a CPU: their operations end before a second torch thread has started. Each worker needs
    its own copy of the gradients, so large models and models on other devices compute one micro-batch at a time.
    """
    cores, size = torch.get_num_threads(), sum(parameter.numel() for parameter in parameters)
    return 1 if size > LARGE_MODEL or parameters[0].device.type != "cpu" else min(cores, 8)
