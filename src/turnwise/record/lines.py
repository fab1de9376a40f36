"""Large jsonl files: compressed in parts, and read by the number, the id or the step of a line.

A compressed file is a gzip file of many small parts (members), each of which can be read without the others; `zcat` and
Python's `gzip.open` read the complete file. A part has complete lines, so a file that is only appended to, and cut back to the
end of a part, stays intact.

The places of the lines are found in one pass and cached beside the file in `<name>.index`. A cache that does not belong to the
file as it is now, or that is damaged, is not used: it is extended where the file has only grown, and built again otherwise.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import sys
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from turnwise.errors import RunError

# compressed parts

SUFFIX = ".gz"
_PART_BYTES = 1 << 18
"""A part ends after this number of bytes before compression: reading a line decompresses its part."""
_LEVEL = 3
_COPY_BYTES = 1 << 16
_PART_HEAD = b"\x1f\x8b\x08" + bytes(5)
"""The first bytes of a part, as `gzip.compress` writes them: no name and no time."""


@dataclass(frozen=True, slots=True)
class CompressedPart:
    """A part of a compressed file."""

    begin: int
    """Where it begins in the file, in bytes."""
    end: int
    contents: bytes
    """After decompression; empty if the part is damaged."""
    damage: str | None = None
    """What is wrong with the part and what can be done; None if nothing is."""


def is_compressed(path: Path) -> bool:
    """Whether the file is compressed, by its name."""
    return path.suffix == SUFFIX


def existing_file(path: Path) -> Path:
    """`path`, or the compressed file `path` + `.gz` if only that exists."""
    compressed = path.with_name(path.name + SUFFIX)
    # os.path: a directory that may not be read has none, and is no error here
    return compressed if not os.path.isfile(path) and os.path.isfile(compressed) else path


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


def read_parts(file: BinaryIO, path: Path, begin: int = 0) -> Iterator[CompressedPart]:
    """The complete parts of a compressed file from the part at `begin` on. A last part that a killed run has not finished is left
    out. A damaged part has its `damage` instead of contents: it ends where the next part begins that can be read.
    """
    file.seek(begin)
    data = b""
    while data := data or file.read(_COPY_BYTES):
        decoder, contents, consumed, error = zlib.decompressobj(wbits=31), list[bytes](), 0, "it does not end"
        while not decoder.eof:
            try:
                contents.append(decoder.decompress(data))
            except zlib.error as wrong:
                error = str(wrong)
                break
            consumed += len(data) - len(decoder.unused_data)
            if not decoder.eof and not (data := file.read(_COPY_BYTES)):
                break
        if decoder.eof:
            yield CompressedPart(begin, begin + consumed, b"".join(contents))
            begin, data = begin + consumed, decoder.unused_data
            continue
        behind = _next_part(file, begin)
        if behind is None and not data:
            return  # not finished
        end = file.seek(0, os.SEEK_END) if behind is None else behind
        yield CompressedPart(begin, end, b"", _damage(path, begin, None if behind is None else end, error))
        begin, data = file.seek(end), b""


def _next_part(file: BinaryIO, begin: int) -> int | None:
    """Where the first part behind the part at `begin` begins that can be read; None if there is none."""
    file.seek(begin)
    data = file.read()
    place = data.find(_PART_HEAD, 1)
    while place >= 0:
        decoder = zlib.decompressobj(wbits=31)
        with contextlib.suppress(zlib.error):
            decoder.decompress(data[place:])
            if decoder.eof:
                return begin + place
        place = data.find(_PART_HEAD, place + 1)
    return None


def _damage(path: Path, begin: int, behind: int | None, error: str) -> str:
    """The text for a part that cannot be decompressed. `behind` is where the next one begins; None if it is the last one."""
    text = f"{path} is damaged: the part at byte {begin} is not gzip data ({error})"
    if behind is None:
        return f"{text}. Restore the file from a copy, or cut it there: truncate --size={begin} {path}"
    return (
        f"{text}. Its conversations are left out; those from byte {behind} on can be read. Restore the file from a copy"
    )


def open_lines(path: Path, *, damaged: list[str] | None = None) -> Iterator[bytes]:
    """The lines of a plain or a compressed file. The last one has no newline if a killed run has not finished it. With a list
    `damaged`, a damaged part of a compressed file is left out and described in it.

    Raises OSError if the file cannot be read, RunError if it is damaged.
    """
    with path.open("rb") as file:
        if not is_compressed(path):
            yield from file
            return
        rest = b""
        for part in read_parts(file, path):
            if part.damage is not None:
                if damaged is None:
                    raise RunError(part.damage)
                damaged.append(part.damage)
            *lines, rest = (rest + part.contents).split(b"\n")
            for line in lines:
                yield line + b"\n"
        if rest:
            yield rest


_FORMAT = 2
_READ_BYTES = 1 << 20
_NO_STEP = -1
# `{"schema": 3, "step": 7, "id": "7.0:12/3"`: the beginning of a line, as the record writes it
_HEAD = re.compile(rb'\{"schema": ?\d+, ?(?:"step": ?(\d+), ?)?"id": ?("(?:[^"\\]|\\.)*")')


@dataclass(slots=True)
class _Places:
    """Where the lines are: the contents of an index file."""

    offsets: array[int] = field(default_factory=lambda: array("Q", [0]))
    """Where each line begins, and where the last one ends, in bytes of the file without compression."""
    part_begins: array[int] = field(default_factory=lambda: array("Q", [0]))
    """Of a compressed file: where each part begins in the file, and where the last one ends."""
    part_offsets: array[int] = field(default_factory=lambda: array("Q", [0]))
    """The same without compression."""
    steps: array[int] = field(default_factory=lambda: array("q"))
    """The step of each line; -1 where it has none."""
    ids: list[bytes] = field(default_factory=list)
    """The id of each line, as JSON; empty where it has none."""
    modified: int = 0
    """Modification time of the indexed file, in nanoseconds."""
    last_line: str = ""
    """sha256 of the last line: it shows whether the file was extended or written again."""

    def add(self, line: bytes) -> None:
        """Add the next line, with its newline."""
        self.offsets.append(self.offsets[-1] + len(line))
        step, id = _head(line)
        self.steps.append(step)
        self.ids.append(id)


def line_checksum(line: bytes) -> str:
    """The SHA-256 of a line of a record, not compressed, with its newline."""
    return hashlib.sha256(line).hexdigest()


class LineFile:
    """A file as it was when this object was made: lines that are appended later are not seen.

    A last line without a newline is left out if it is not JSON: a killed run has not finished it. Damaged parts of a compressed
    file are left out too (`damage`). A cache that cannot be written is no error. Raises OSError if the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        index = path.with_name(f"{path.name}.index")
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            self._places = _read(index) or _Places()
            if not self._is_prefix(file, status.st_size):
                self._places = _Places()
            if (self._end, self._places.modified) == (status.st_size, status.st_mtime_ns):
                return
            if self._scan(file):
                self._places.modified = status.st_mtime_ns
                self._places.last_line = self._hash(file)
                _write(index, self._places)

    def __len__(self) -> int:
        return len(self._places.offsets) - 1

    @property
    def offsets(self) -> array[int]:
        """Where each line begins, and where the last one ends: line n is `offsets[n]` to `offsets[n + 1]`, in the contents of the
        file without compression."""
        return self._places.offsets

    @property
    def damage(self) -> list[str]:
        """What is wrong with the parts of a compressed file that were left out. Raises OSError."""
        places = self._places
        ends = zip(places.part_offsets, places.part_offsets[1:], strict=False)
        empty = [places.part_begins[number] for number, (begin, end) in enumerate(ends) if begin == end]
        if not empty:
            return []
        with self.path.open("rb") as file:
            found = [next(read_parts(file, self.path, begin), None) for begin in empty]
        return [part.damage for part in found if part is not None and part.damage is not None]

    def line(self, number: int) -> bytes:
        """The line of this number, counted from 0. Raises OSError, RunError."""
        with self.path.open("rb") as file:
            return self._bytes(file, self.offsets[number], self.offsets[number + 1])

    def lines(self, begin: int, end: int) -> Iterator[bytes]:
        """The lines from number `begin` to `end - 1`. Raises OSError, RunError."""
        with self.path.open("rb") as file:
            data = self._bytes(file, self.offsets[begin], self.offsets[end])
        start = self.offsets[begin]
        for number in range(begin, end):
            yield data[self.offsets[number] - start : self.offsets[number + 1] - start]

    def numbers_of_id(self, id: str) -> list[int]:
        """The numbers of the lines with this id, in ascending order."""
        wanted = json.dumps(id, ensure_ascii=False).encode("utf-8", "backslashreplace")
        return [number for number, other in enumerate(self._places.ids) if other == wanted]

    def numbers_of_ids_below(self, id: str) -> list[int]:
        """The numbers of the lines whose id is `<id>/...`, such as those of an episode's agents, in ascending order."""
        prefix = json.dumps(f"{id}/", ensure_ascii=False).encode("utf-8", "backslashreplace")[:-1]
        return [number for number, other in enumerate(self._places.ids) if other.startswith(prefix)]

    def all_steps(self) -> list[int]:
        """The training steps that lines have, in order, each once."""
        return sorted({step for step in self._places.steps if step != _NO_STEP})

    def numbers_of_step(self, step: int) -> list[int]:
        """The numbers of the lines of this step, in ascending order."""
        return [number for number, other in enumerate(self._places.steps) if other == step]

    @property
    def _end(self) -> int:
        """The end of the indexed part of the file, in bytes of the file."""
        return self._places.part_begins[-1] if is_compressed(self.path) else self.offsets[-1]

    def _is_prefix(self, file: BinaryIO, size: int) -> bool:
        """Whether the file begins with the lines of the cache: it is as long, and their last one is unchanged."""
        if self._end > size:
            return False
        try:
            return self._places.last_line == self._hash(file)
        except RunError:  # a compressed file that was written again
            return False

    def _scan(self, file: BinaryIO) -> bool:
        """Add the lines behind the last one. Returns whether the last one is closed by a newline."""
        rest = b""
        for contents in self._contents(file):
            *lines, rest = (rest + contents).split(b"\n")
            for line in lines:
                self._places.add(line + b"\n")
        with contextlib.suppress(ValueError, RecursionError):
            if rest:
                json.loads(rest)
                self._places.add(rest)
        return not rest

    def _contents(self, file: BinaryIO) -> Iterator[bytes]:
        """The uncompressed contents after the last indexed line."""
        places = self._places
        if not is_compressed(self.path):
            file.seek(self._end)
            while data := file.read(_READ_BYTES):
                yield data
            return
        for part in read_parts(file, self.path, self._end):
            places.part_begins.append(part.end)
            places.part_offsets.append(places.part_offsets[-1] + len(part.contents))
            yield part.contents

    def _bytes(self, file: BinaryIO, begin: int, end: int) -> bytes:
        """The bytes from `begin` to `end` of the contents without compression."""
        if not is_compressed(self.path):
            file.seek(begin)
            return file.read(end - begin)
        places = self._places
        number = bisect_right(places.part_offsets, begin) - 1
        first, contents = places.part_offsets[number], b""
        while first + len(contents) < end:
            start, number = places.part_begins[number], number + 1
            if places.part_offsets[number - 1] == places.part_offsets[number]:
                continue  # a damaged part
            file.seek(start)
            try:
                contents += zlib.decompress(file.read(places.part_begins[number] - start), wbits=31)
            except zlib.error as error:  # it was not when the file was indexed
                behind = _next_part(file, start)
                raise RunError(_damage(self.path, start, behind, str(error))) from None
        return contents[begin - first : end - first]

    def _hash(self, file: BinaryIO) -> str:
        """sha256 of the last line."""
        begin, end = (self.offsets[-2], self.offsets[-1]) if len(self) else (0, 0)
        return hashlib.sha256(self._bytes(file, begin, end)).hexdigest()


def _head(line: bytes) -> tuple[int, bytes]:
    """Step and id of a line. A damaged line has none: reading it says what is wrong."""
    if (match := _HEAD.match(line)) is not None:
        return _NO_STEP if match[1] is None else int(match[1]), match[2]
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return _NO_STEP, b""
    step, id = (value.get("step"), value.get("id")) if isinstance(value, dict) else (None, None)
    known = step if type(step) is int and 0 <= step < 2**63 else _NO_STEP
    return known, json.dumps(id, ensure_ascii=False).encode("utf-8", "backslashreplace") if type(id) is str else b""


def _read(index: Path) -> _Places | None:
    """The cache, or None where there is none that can be used."""
    try:
        head, _, body = index.read_bytes().partition(b"\n")
        about = json.loads(head)
        expected = {"format": _FORMAT, "byteorder": sys.byteorder, "sha256": hashlib.sha256(body).hexdigest()}
        if not isinstance(about, dict) or {key: about.get(key) for key in expected} != expected:
            return None
        parts: list[bytes] = []
        for size in about["sizes"]:
            parts.append(body[:size])
            body = body[size:]
        offsets, part_begins, part_offsets, steps, ids = parts
        return _Places(
            array("Q", offsets),
            array("Q", part_begins),
            array("Q", part_offsets),
            array("q", steps),
            ids.split(b"\n")[:-1],
            int(about["modified"]),
            str(about["last_line"]),
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _write(index: Path, places: _Places) -> None:
    columns = [places.offsets, places.part_begins, places.part_offsets, places.steps]
    parts = [*(column.tobytes() for column in columns), b"".join(id + b"\n" for id in places.ids)]
    body = b"".join(parts)
    about = {
        "format": _FORMAT,
        "byteorder": sys.byteorder,
        "sha256": hashlib.sha256(body).hexdigest(),
        "sizes": [len(part) for part in parts],
        "modified": places.modified,
        "last_line": places.last_line,
    }
    temporary = index.with_name(f"{index.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # the directory may be read-only: then the index is built for each reader
        temporary.write_bytes(json.dumps(about).encode() + b"\n" + body)
        os.replace(temporary, index)
