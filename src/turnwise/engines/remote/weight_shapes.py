"""Names and shapes of a model's weights, and the check that an update has all of them.

Used by the trainer, and inside vLLM's workers, where only the source of turnwise is on the path: needs no other packages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.errors import EngineError

__all__ = ["WeightShapes", "read_header", "read_shapes", "refuse_weights"]


@dataclass(frozen=True, slots=True)
class WeightShapes:
    """The names and the shapes of all weights of a model."""

    shapes: Mapping[str, Sequence[int]]

    def check(self, given: Mapping[str, Sequence[int]]) -> None:
        """Raise EngineError if an update does not have all of these weights, with these shapes, and no others.

        The weights of an output layer may be missing or added: tied embeddings have one name in a file.
        """
        tied = {"lm_head.weight"}
        missing = sorted(self.shapes.keys() - given.keys() - tied)
        unknown = sorted(given.keys() - self.shapes.keys() - tied)
        other = sorted(name for name, shape in given.items() if list(self.shapes.get(name, shape)) != list(shape))
        refuse_weights(
            missing, unknown, other, rule="An update must have all weights of the model that the server serves"
        )


def refuse_weights(missing: Sequence[str], unknown: Sequence[str], other_shape: Sequence[str], *, rule: str) -> None:
    """Raise EngineError if one of these lists has names of weights. `rule` says what an update must have."""
    for names, problem in (
        (missing, "are missing"),
        (unknown, "are not the model's"),
        (other_shape, "have another shape"),
    ):
        if names:
            raise EngineError(
                f"{len(names)} of the weights {problem}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}. {rule}"
            )


def read_shapes(files: Sequence[Path]) -> WeightShapes:
    """The names and shapes in the headers of safetensors files."""
    return WeightShapes(
        {
            name: entry["shape"]
            for file in files
            for name, entry in read_header(file)[0].items()
            if name != "__metadata__"
        }
    )


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and the position of the first tensor's bytes."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        return json.loads(stream.read(size)), 8 + size
