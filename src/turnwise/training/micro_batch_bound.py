"""What happens when the memory of a GPU runs out in a pass over micro-batches: they are packed again, half as large.

No figure from before a run is certain: activations depend on lengths, prefixes and kernels, and other processes may use the same
GPU. So the gradients of the present optimizer step are thrown away, and its micro-batches are packed again and computed again.
Invariant: the division into micro-batches never changes the result (`batch.py`), so the update is that of a batch that was packed
so from the start. The bound holds for the rest of the run, and is in its checkpoints.

Knows micro-batches and torch's error. Does not know models, losses or optimizers. Not for several ranks, whose passes wait for
each other (`sharded/remembered_bound.py`).
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar, cast

import torch

from turnwise.errors import RunError
from turnwise.models.transfer import Move
from turnwise.training.batch import MicroBatch, pack_again

M = TypeVar("M", bound=MicroBatch[Any])
S = TypeVar("S")
_log = logging.getLogger(__name__)
_STATE = "micro_batch_bound"


class MicroBatchBound:
    """The most tokens of a micro-batch that are known to fit into the memory of a device.

    `free` gives gradients and freed blocks of the device back.
    """

    def __init__(self, device: torch.device, *, free: Callable[[], None]) -> None:
        self.tokens: int | None = None
        """None as long as memory has not run out. A longer sequence is a micro-batch alone."""
        self.exceeded = 0
        """How often memory has run out in this process."""
        self._device, self._free = device, free

    def of_batch(
        self,
        micro_batches: Sequence[M],
        compute: Callable[[Sequence[M], Callable[[], None]], S],
        on_micro_batch: Callable[[], None],
    ) -> tuple[Sequence[M], S]:
        """The result of `compute` for the micro-batches of a batch, and the micro-batches that it was computed of.

        `compute` calls the function that it receives after each micro-batch, in their order, and begins anew when it is called
        again. Raises RunError if memory does not suffice for one sequence.
        """
        parts = self._fitting(micro_batches)
        while True:
            done = 0

            def count() -> None:
                nonlocal done
                done += 1
                on_micro_batch()

            try:
                return parts, compute(parts, count)
            except torch.OutOfMemoryError as error:
                reason = str(error)
            # here, and not in the `except`: as long as the error exists, its frames hold the activations
            self._lower(parts[min(done, len(parts) - 1)], reason)
            parts = self._fitting(parts)

    def measured(self, micro: MicroBatch[Any], compute: Callable[[MicroBatch[Any]], torch.Tensor]) -> torch.Tensor:
        """The numbers [N] of the targets of a micro-batch, which `compute` computes without reading the columns of targets.

        Raises RunError if memory does not suffice for one sequence.
        """
        if not self._above(micro):  # what is above it has failed before
            try:
                return compute(micro)
            except torch.OutOfMemoryError as error:
                reason = str(error)
            self._lower(micro, reason)
        places = _DividedPlaces(torch.arange(len(micro.prediction_N)))
        parts = pack_again([replace(micro, targets=places)], self.tokens or 1)
        result = [(part.targets.place_N, self.measured(part, compute)) for part in parts]
        order_N = torch.cat([place_N for place_N, _ in result]).argsort()
        return torch.cat([number_N for _, number_N in result])[order_N.to(result[0][1].device)]

    def _fitting(self, micro_batches: Sequence[M]) -> Sequence[M]:
        """The micro-batches, packed again if one of several sequences is above the bound."""
        if self.tokens is None:
            return micro_batches
        above = any(map(self._above, micro_batches))
        return cast("Sequence[M]", pack_again(micro_batches, self.tokens)) if above else micro_batches

    def _above(self, micro: MicroBatch[Any]) -> bool:
        """Whether a micro-batch has more tokens than the bound, and can be divided."""
        return self.tokens is not None and len(micro.sequences) > 1 and _size(micro) > self.tokens

    def _lower(self, micro: MicroBatch[Any], reason: str) -> None:
        """Take half of the tokens of a micro-batch, for which memory did not suffice, as the bound. Raises RunError."""
        tokens = _size(micro)
        if len(micro.sequences) < 2:
            raise RunError(
                f"the memory of {card_of(self._device)} ran out in the pass over one sequence of {tokens} tokens, which cannot "
                f"be divided among micro-batches: {reason}\n"
                f"Set model.gradient_checkpointing=true, model.dtype=bfloat16 or model.lora.rank, or smaller limits of a "
                f"conversation, and start the same command again with resume=auto; turnwise doctor says what each of them saves"
            )
        self.tokens = max(min(tokens, self.tokens or tokens) // 2, 1)  # never above the present bound
        self.exceeded += 1
        self._free()
        gc.collect()  # what a circle of references still holds
        self._free()
        _log.warning(
            "the memory of %s ran out in a micro-batch of %d tokens: its passes are computed again with at most %d tokens in "
            "each micro-batch, and so are all later ones. The result is the same; micro_batch_tokens=%d in the recipe saves the "
            "failed pass. (%s)",
            card_of(self._device),
            tokens,
            self.tokens,
            self.tokens,
            reason,
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs of the bound: nothing if there is none."""
        return {} if self.tokens is None else {_STATE: {"tokens": self.tokens, "card": card_of(self._device)}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue with what `state` returned. The bound of another card is forgotten."""
        saved = state.get(_STATE)
        if saved is not None and saved["card"] == card_of(self._device):
            self.tokens = saved["tokens"]


@dataclass(frozen=True, slots=True)
class _DividedPlaces:
    """Where the numbers of a micro-batch belong in that from which it was divided."""

    place_N: torch.Tensor

    def moved(self, move: Move) -> Self:
        return replace(self, place_N=move(self.place_N))


def _size(micro: MicroBatch[Any]) -> int:
    return micro.token_ids_BL.numel()


def card_of(device: torch.device) -> str:
    """The name and the memory of a GPU, such as `NVIDIA H100 80GB HBM3 (79.2 GiB)`; the name of another device."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"device {device}"
    card = torch.cuda.get_device_properties(device)
    return f"{card.name} ({card.total_memory / 2**30:.1f} GiB)"
