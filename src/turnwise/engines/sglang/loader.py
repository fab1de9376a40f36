"""Code that runs inside SGLang's schedulers (`--custom-weight-loader`): checks weights from memory that the trainer shares, and
loads them.

It is imported in SGLang's environment, where only the source of turnwise is on the path. SGLang calls it with the tensors of a
request, and has no answer for what it finds: an error ends the server, before its weights were changed by this part. turnwise
starts it again, with the weights from before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnwise.engines.remote.shared_buffer import checked_values

LOADER = "turnwise.engines.sglang.loader.load"
"""The name by which SGLang finds `load`."""
EXPECTED = "turnwise.expected"
"""The name of a tensor with what the trainer says: whether to load (1) or only to check (0), and the checksum of each tensor."""


def load(model: Any, named_tensors: Sequence[tuple[str, Any]]) -> None:
    """Check the tensors of a request, and load them if the trainer asks for it. Raises ValueError for values that are not finite,
    or not the trainer's."""
    tensors = dict(named_tensors)
    do_load, *checksums = tensors.pop(EXPECTED).tolist()
    found = checked_values(tensors)
    for (name, checksum), expected in zip(found.items(), checksums, strict=True):
        if checksum != expected:
            raise ValueError(
                f"the checksum of the weight {name} is {checksum:x} here, and {expected:x} where it was sent"
            )
    if do_load:
        model.load_weights(list(tensors.items()))
