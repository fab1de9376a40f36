"""Compressed jsonl files: gzip files of many small parts (members), each of which can be read without the others.

`zcat` and Python's `gzip.open` read the complete file. A part has complete lines. So a file that is only appended
to, and cut back to the end of a part, stays intact.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from turnwise.errors import RunError

__all__ = [
    "SUFFIX",
    "CompressedPart",
    "compressed_parts",
    "damaged_part",
    "existing_file",
    "is_compressed",
    "open_lines",
    "read_parts",
]

SUFFIX = ".gz"
_PART_BYTES = 1 << 18
"""A part ends after this number of bytes before compression: reading a line decompresses its part."""
_LEVEL = 3
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class CompressedPart:
    """A part of a compressed file."""

    begin: int
    """Where it begins in the file, in bytes."""
    end: int
    contents: bytes
    """After decompression."""


def is_compressed(path: Path) -> bool:
    """Whether the file is compressed, by its name."""
    return path.suffix == SUFFIX


def existing_file(path: Path) -> Path:
    """`path`, or the compressed file `path` + `.gz` if only that exists."""
    compressed = path.with_name(path.name + SUFFIX)
    return compressed if not path.is_file() and compressed.is_file() else path


def compressed_parts(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines as parts of a compressed file. Equal lines give equal bytes."""
    waiting: list[bytes] = []
    size = 0
    for line in lines:
        waiting.append(line)
        size += len(line)
        if size >= _PART_BYTES:
            yield gzip.compress(b"".join(waiting), _LEVEL, mtime=0)
            waiting, size = [], 0
    if waiting:
        yield gzip.compress(b"".join(waiting), _LEVEL, mtime=0)


def damaged_part(path: Path, begin: int, error: zlib.error) -> RunError:
    """The error for a part of a compressed file that cannot be decompressed."""
    return RunError(
        f"{path} is damaged: the part at byte {begin} is not gzip data ({error}). Restore the file from a copy, or cut it there: "
        f"truncate --size={begin} {path}"
    )


def read_parts(file: BinaryIO, path: Path, begin: int = 0) -> Iterator[CompressedPart]:
    """The complete parts of a compressed file from the part at `begin` on. A part that a killed run has not finished is left out.

    Raises RunError if the file is damaged.
    """
    file.seek(begin)
    data = b""
    while data := data or file.read(_READ_BYTES):
        decoder, contents, consumed = zlib.decompressobj(wbits=31), list[bytes](), 0
        while True:
            try:
                contents.append(decoder.decompress(data))
            except zlib.error as error:
                raise damaged_part(path, begin, error) from None
            consumed += len(data) - len(decoder.unused_data)
            if decoder.eof:
                break
            if not (data := file.read(_READ_BYTES)):
                return
        yield CompressedPart(begin, begin + consumed, b"".join(contents))
        begin, data = begin + consumed, decoder.unused_data


def open_lines(path: Path) -> Iterator[bytes]:
    """The lines of a plain or a compressed file. The last one has no newline if a killed run has not finished it.

    Raises OSError if the file cannot be read, RunError if it is damaged.
    """
    with path.open("rb") as file:
        if not is_compressed(path):
            yield from file
            return
        rest = b""
        for part in read_parts(file, path):
            *lines, rest = (rest + part.contents).split(b"\n")
            for line in lines:
                yield line + b"\n"
        if rest:
            yield rest
