"""Another process that reads weights from a shared buffer. Imports no more than it needs: `spawn` imports a target's module."""

from __future__ import annotations

from typing import Any

from turnwise.engines.remote.shared_buffer import Place, check_part, open_buffer


def read(handle: dict[str, Any], places: list[dict[str, Any]], filled: Any, answer: Any) -> None:
    """Whenever `filled` gives true: answer with the values of the part, or with what is wrong with them."""
    buffer = open_buffer(handle)
    part = [Place(**place) for place in places]
    tensors = {place.name: place.of(buffer) for place in part}
    while filled.get():
        try:
            check_part(part, tensors)
        except ValueError as error:
            answer.put(str(error))
        else:
            answer.put({name: tensor.clone().tolist() for name, tensor in tensors.items()})
