"""Checks of the weights of a SGLang server: names and shapes before an update, checksums after an update.

SGLang accepts an update in which weights are missing, and dies at a weight of another shape. Both are found here, before the
update is sent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.engines.remote.images import tensor_bytes
from turnwise.engines.remote.weights import WeightUpdate
from turnwise.errors import EngineError

__all__ = ["Contents", "WeightShapes", "check_checksums", "contents_of", "file_contents", "read_shapes"]

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""SGLang keeps these weights as one: the rows of the parts, one after the other."""
_PADDED = ("embed_tokens.weight", "lm_head.weight")
_PADDING = 64
"""SGLang fills these weights up with rows of zeros, to a multiple of so many rows."""
_BLOCK = 16 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Contents:
    """The weights of an update."""

    shapes: Mapping[str, Sequence[int]]
    """The shape of each weight, by name."""
    read: Callable[[str], Iterator[bytes]]
    """The bytes of a weight, in blocks."""


@dataclass(frozen=True, slots=True)
class WeightShapes:
    """The names and the shapes of all weights of a model."""

    shapes: Mapping[str, Sequence[int]]

    def check(self, given: Mapping[str, Sequence[int]]) -> None:
        """Raise EngineError if an update does not have all of these weights, with these shapes, and no others.

        The weights of an output layer may be missing: tied embeddings have one name in a file.
        """
        missing = sorted(name for name in self.shapes if name not in given and name != "lm_head.weight")
        unknown = sorted(name for name in given if name not in self.shapes)
        other = sorted(name for name, shape in given.items() if list(self.shapes.get(name, shape)) != list(shape))
        for names, problem in (
            (missing, "are missing"),
            (unknown, "are not the model's"),
            (other, "have another shape"),
        ):
            if names:
                raise EngineError(
                    f"{len(names)} of the weights {problem}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}. "
                    f"An update must have all weights of the model that the server serves"
                )


def read_shapes(files: Sequence[Path]) -> WeightShapes:
    """The names and shapes in the headers of safetensors files."""
    return WeightShapes(
        {name: entry["shape"] for file in files for name, entry in _header(file)[0].items() if name != "__metadata__"}
    )


def contents_of(update: WeightUpdate) -> Contents:
    """The weights of an update: a file, or tensors on the CPU."""
    if update.tensors is None:
        assert update.path is not None
        return file_contents(update.path)
    tensors = update.tensors
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    return Contents(shapes, lambda name: iter([tensor_bytes(tensors[name])]))


def file_contents(file: Path) -> Contents:
    """The weights of a safetensors file."""
    header, start = _header(file)

    def read(name: str) -> Iterator[bytes]:
        begin, end = header[name]["data_offsets"]
        with file.open("rb") as stream:
            stream.seek(start + begin)
            while begin < end:
                block = stream.read(min(_BLOCK, end - begin))
                begin += len(block)
                yield block

    return Contents(read_shapes([file]).shapes, read)


def check_checksums(server: str, reported: Mapping[str, str], weights: Contents) -> None:
    """Raise EngineError if a server on a CPU reports other SHA-256 checksums than those of the update's tensors.

    `reported` maps the server's names of weights to the first 8 bytes of the checksum, in hexadecimal digits.
    """
    for name, checksum in reported.items():
        parts = list(_parts(name, weights.shapes))
        if not parts:  # a buffer, or a weight that SGLang computes
            continue
        digest, size = hashlib.sha256(), 0
        for part in parts:
            for block in weights.read(part):
                digest.update(block)
                size += len(block)
        if name.endswith(_PADDED):
            rows = weights.shapes[name][0]
            digest.update(bytes(size // rows * (-rows % _PADDING)))
        if digest.hexdigest()[:16] != checksum:
            raise EngineError(
                f"{server} has other values of {name} than the trainer: their checksums are {checksum} and "
                f"{digest.hexdigest()[:16]}"
            )


def _parts(name: str, header: Mapping[str, object]) -> Iterator[str]:
    """The names in the file of a weight of the server, in order."""
    if name in header:
        yield name
        return
    for fused, parts in _FUSED.items():
        names = [name.replace(f".{fused}.", f".{part}.") for part in parts]
        if f".{fused}." in name and all(part in header for part in names):
            yield from names


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and the position of the first tensor's bytes."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        return json.loads(stream.read(size)), 8 + size
