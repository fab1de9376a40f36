"""Where each line of a large jsonl file begins, so that line number N can be read without reading the others.

The offsets are found in one pass and cached beside the file in `<name>.index`. A cache that does not belong to the file as it is
now, or that is damaged, is not used: it is extended where the file has only grown, and built again otherwise.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

__all__ = ["line_offsets"]

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class _Cache:
    """The contents of an index file."""

    offsets: array[int]
    """Where each line begins, and where the last one ends."""
    modified: int
    """Modification time of the indexed file, in nanoseconds."""
    last_line: str
    """sha256 of the last line: it shows whether the file was extended or written again."""


def line_offsets(path: Path) -> array[int]:
    """The offset of each line in bytes, and the end of the last line: line n is `offsets[n]` to `offsets[n + 1]`.

    A last line without a newline is left out if it is not JSON: a killed run has not finished it. Raises OSError if the
    file cannot be read; a cache that cannot be written is no error.
    """
    index = path.with_name(f"{path.name}.index")
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        cache = _read(index)
        offsets = array("Q", [0])
        if cache is not None and cache.offsets[-1] <= status.st_size and cache.last_line == _hash(file, cache.offsets):
            offsets = cache.offsets
            if (offsets[-1], cache.modified) == (status.st_size, status.st_mtime_ns):
                return offsets
        ends_in_newline = _scan(file, offsets)
        if ends_in_newline:
            _write(index, _Cache(offsets, status.st_mtime_ns, _hash(file, offsets)))
    return offsets


def _scan(file: BinaryIO, offsets: array[int]) -> bool:
    """Append the ends of the lines after the last offset. Returns whether the last one is closed by a newline."""
    file.seek(offsets[-1])
    for line in file:
        if line.endswith(b"\n"):
            offsets.append(offsets[-1] + len(line))
            continue
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(line)
            offsets.append(offsets[-1] + len(line))
        return False
    return True


def _hash(file: BinaryIO, offsets: array[int]) -> str:
    """sha256 of the last line."""
    begin, end = (offsets[-2], offsets[-1]) if len(offsets) > 1 else (0, 0)
    file.seek(begin)
    return hashlib.sha256(file.read(end - begin)).hexdigest()


def _read(index: Path) -> _Cache | None:
    """The cache, or None where there is none that can be used."""
    try:
        head, _, body = index.read_bytes().partition(b"\n")
        about = json.loads(head)
        expected = {"format": _FORMAT, "byteorder": sys.byteorder, "sha256": hashlib.sha256(body).hexdigest()}
        if not isinstance(about, dict) or {key: about.get(key) for key in expected} != expected:
            return None
        return _Cache(array("Q", body), int(about["modified"]), str(about["last_line"]))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _write(index: Path, cache: _Cache) -> None:
    body = cache.offsets.tobytes()
    about = {
        "format": _FORMAT,
        "byteorder": sys.byteorder,
        "sha256": hashlib.sha256(body).hexdigest(),
        "modified": cache.modified,
        "last_line": cache.last_line,
    }
    temporary = index.with_name(f"{index.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # the directory may be read-only: then the index is built for each reader
        temporary.write_bytes(json.dumps(about).encode() + b"\n" + body)
        os.replace(temporary, index)
