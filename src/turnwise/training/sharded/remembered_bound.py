"""What happens when the memory of a rank's GPU runs out in a pass: all ranks end, and start again with half of its micro-batch.

One process throws its gradients away and goes on (`training/micro_batch_bound.py`). A rank cannot: in each layer the others
gather weights with it, and add gradients up with it, and whoever is behind leaves them waiting. Where the memory ran out, the
rank has issued some of the operations of the pass, and the others more or fewer. Nothing brings them together again in the same
processes: an operation that waits ends with its process group only, and FSDP's state in the middle of a pass (gathered layers,
sums that are on their way, hooks that have not run) cannot be reset from outside. So the pass ends for all ranks, and with it
their processes.

What is learnt stays: the rank writes the bound into the directory of the run before the others hear of it, so that the bound is
there however they end. Each start reads it (`resume=auto`, `cluster.restarts`, torchrun's `--max-restarts`), and a start with a
bound packs smaller micro-batches, which never changes the result. Each start that ends so has halved a micro-batch, so that this
comes to an end.

Knows files and torch's error. Does not know models or process groups.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from turnwise.training.batch import MicroBatch

FILE = "micro_batch_bound.json"
"""In the directory of a run: the most tokens of a micro-batch of each model, and for which GPUs and ranks that is."""


class MicroBatchTooLarge(RuntimeError):
    """The memory of this rank's GPU did not suffice for a micro-batch. `again`: the next start computes smaller ones."""

    def __init__(self, text: str, *, again: bool) -> None:
        super().__init__(text)
        self.again = again


def lasting(error: BaseException) -> str | None:
    """What is wrong and what to change, if a rank has ended because of a memory that would not suffice in a new start either;
    None for other errors."""
    if isinstance(error, MicroBatchTooLarge):
        return None if error.again else str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"the memory of its GPU ran out between passes: {error}. Set model.gradient_checkpointing=true, "
            f"cluster.fsdp.offload=cpu or a smaller engine.memory_gb"
        )
    return None


@dataclass(frozen=True, slots=True)
class RememberedBound:
    """The bound of one model in the file that all ranks see. A bound of other GPUs, or of another number of ranks, is none."""

    file: Path | None
    """None: nothing is remembered."""
    model: str
    """`policy` or `critic`."""
    card: str
    """The GPU of this rank, for messages."""
    place: str
    """For which GPUs and which arrangement of ranks the bound holds; the same on all ranks."""

    def tokens(self) -> int | None:
        """The most tokens of a micro-batch; None as long as memory has not run out."""
        found = self._read().get(self.model)
        return found if isinstance(found, int) else None

    @contextmanager
    def during(self, micro: MicroBatch[Any] | None) -> Iterator[None]:
        """A pass over a micro-batch; None: over one of two tokens, in a round in which the rank has none.

        Raises MicroBatchTooLarge if the memory runs out.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise self._exceeded(micro, str(error)) from error

    def _exceeded(self, micro: MicroBatch[Any] | None, reason: str) -> MicroBatchTooLarge:
        size = 2 if micro is None else micro.token_ids_BL.numel()
        if micro is None or len(micro.sequences) < 2:
            return MicroBatchTooLarge(
                f"the memory of {self.card} ran out in the pass over one sequence of {size} tokens, which cannot be divided "
                f"among micro-batches: {reason}\n"
                f"Set model.gradient_checkpointing=true, cluster.fsdp.offload=cpu or cluster.mesh.context, or smaller limits of "
                f"a conversation",
                again=False,
            )
        half = max(size // 2, 1)  # below the present bound, because only one sequence may be above it
        text = f"the memory of {self.card} ran out in a micro-batch of {size} tokens ({reason})\n"
        try:
            self._write(half)
        except OSError as error:
            text += (
                f"Set micro_batch_tokens={half}: {self.file}, where it would be remembered, cannot be written ({error})"
            )
            return MicroBatchTooLarge(text, again=False)
        kept = "" if self.file is None else f". The next start has it from {self.file}, with the same result"
        return MicroBatchTooLarge(f"{text}Set micro_batch_tokens={half}{kept}", again=self.file is not None)

    def _read(self) -> dict[str, Any]:
        try:
            found = {} if self.file is None else json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # none yet, or written by hand
            return {}
        return found if isinstance(found, dict) and found.get("place") == self.place else {}

    def _write(self, tokens: int) -> None:
        if self.file is None:
            return
        content = {**self._read(), "place": self.place, self.model: tokens}
        own = self.file.with_name(f".{self.file.name}.{os.getpid()}")  # another rank may write at the same time
        own.write_text(json.dumps(content) + "\n", encoding="utf-8")
        own.replace(self.file)
