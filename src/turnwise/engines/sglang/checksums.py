"""The checksums of the weights of a SGLang server, compared with those of an update."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.engines.remote.images import tensor_bytes
from turnwise.engines.remote.weight_shapes import read_header, read_shapes
from turnwise.engines.remote.weights import WeightUpdate
from turnwise.errors import EngineError

__all__ = ["Contents", "check_checksums", "contents_of", "file_contents"]

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""SGLang keeps these weights as one: the rows of the parts, one after the other."""
_PADDED = ("embed_tokens.weight", "lm_head.weight")
_PADDING = 64
"""SGLang fills these weights up with rows of zeros, to a multiple of so many rows, unless the model's class has an embedding of
its own (Gemma 3)."""
_BLOCK = 16 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Contents:
    """The weights of an update."""

    shapes: Mapping[str, Sequence[int]]
    """The shape of each weight, by name."""
    read: Callable[[str], Iterator[bytes]]
    """The bytes of a weight, in blocks."""


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
    header, start = read_header(file)

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
        expected = {digest.hexdigest()[:16]}
        if name.endswith(_PADDED):
            rows = weights.shapes[name][0]
            digest.update(bytes(size // rows * (-rows % _PADDING)))
            expected.add(digest.hexdigest()[:16])
        if checksum not in expected:
            raise EngineError(
                f"{server} has other values of {name} than the trainer: their checksums are {checksum} and "
                f"{' or '.join(sorted(expected))}"
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
