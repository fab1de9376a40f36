"""Checks of the weights of a SGLang server: names and shapes before an update, checksums after an update.

SGLang accepts a file in which weights are missing, and dies at a weight of another shape. Both are found here, before the file
is sent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.errors import EngineError

__all__ = ["WeightShapes", "check_checksums", "read_shapes"]

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""SGLang keeps these weights as one: the rows of the parts, one after the other."""
_PADDED = ("embed_tokens.weight", "lm_head.weight")
_PADDING = 64
"""SGLang fills these weights up with rows of zeros, to a multiple of so many rows."""
_BLOCK = 16 << 20  # bytes


@dataclass(frozen=True, slots=True)
class WeightShapes:
    """The names and the shapes of all weights of a model."""

    shapes: Mapping[str, Sequence[int]]

    def check(self, update: Path) -> None:
        """Raise EngineError if the file does not have all of these weights, with these shapes, and no others.

        The weights of an output layer may be missing: tied embeddings have one name in a file.
        """
        given = read_shapes([update])
        missing = sorted(name for name in self.shapes if name not in given.shapes and name != "lm_head.weight")
        unknown = sorted(name for name in given.shapes if name not in self.shapes)
        other = sorted(
            name for name, shape in given.shapes.items() if list(self.shapes.get(name, shape)) != list(shape)
        )
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


def check_checksums(server: str, reported: Mapping[str, str], update: Path) -> None:
    """Raise EngineError if a server on a CPU reports other SHA-256 checksums than those of the file's tensors.

    `reported` maps the server's names of weights to the first 8 bytes of the checksum, in hexadecimal digits.
    """
    header, start = _header(update)
    with update.open("rb") as file:
        for name, checksum in reported.items():
            parts = list(_parts(name, header))
            if not parts:  # a buffer, or a weight that SGLang computes
                continue
            digest = hashlib.sha256()
            for part in parts:
                begin, end = header[part]["data_offsets"]
                file.seek(start + begin)
                while begin < end:
                    block = file.read(min(_BLOCK, end - begin))
                    digest.update(block)
                    begin += len(block)
            if name.endswith(_PADDED):
                digest.update(_padding(header[name]))
            if digest.hexdigest()[:16] != checksum:
                raise EngineError(
                    f"{server} has other values of {name} than the trainer: their checksums are {checksum} and "
                    f"{digest.hexdigest()[:16]}"
                )


def _parts(name: str, header: Mapping[str, Any]) -> Iterator[str]:
    """The names in the file of a weight of the server, in order."""
    if name in header:
        yield name
        return
    for fused, parts in _FUSED.items():
        names = [name.replace(f".{fused}.", f".{part}.") for part in parts]
        if f".{fused}." in name and all(part in header for part in names):
            yield from names


def _padding(entry: Mapping[str, Any]) -> bytes:
    """The bytes of the rows of zeros after a weight [rows, columns]."""
    (begin, end), rows = entry["data_offsets"], entry["shape"][0]
    return bytes((end - begin) // rows * (-rows % _PADDING))


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and the position of the first tensor's bytes."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        return json.loads(stream.read(size)), 8 + size
