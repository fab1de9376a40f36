"""One row of numbers for each conversation of a record, and a full-text index, in a small database beside the record.

A record of 100,000 conversations takes many seconds to parse. The index parses each line once; later it reads only lines that
were appended. If the record was cut back or written again, the index is built again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from turnwise.errors import RunError
from turnwise.record.compression import existing_file
from turnwise.record.line_file import LineFile

__all__ = ["COLUMNS", "ConversationIndex"]

_FORMAT = 1
COLUMNS = (
    "id",
    "group",
    "row",
    "step",
    "reward",
    "stop",
    "turns",
    "calls",
    "call_errors",
    "sampled",
    "tokens",
    "segments",
    "error",
    "mismatch",
    "version_min",
    "version_max",
    "started",
    "seconds",
)
"""The columns of the index. `call_errors` counts failed and malformed tool calls, `sampled` the tokens that the model sampled,
`tokens` all tokens; `error` is the kind of failure or null, `mismatch` 1 if the tokens differ from the template's."""
_CHUNK = 500  # lines between two commits: a reader sees them at once
_MOST_TEXT = 200_000  # characters of a conversation that the full-text index takes


class ConversationIndex:
    """The index of one file of trajectories, such as `runs/demo/trajectories.jsonl`.

    `path` is the plain file; if only the compressed file exists, that is read. `update` may run in another thread than the
    readers. The database is `<file>.view`; where the directory cannot be written, it is in memory.

    Raises RunError if the record cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = 0
        """Lines of the record when `update` last looked. More than `len(self)` while the index is being built."""
        self._file: LineFile | None = None
        self._writing = threading.Lock()
        self._database = _open(path.with_name(f"{path.name}.view"))

    def __len__(self) -> int:
        (count,) = self._database.execute("SELECT count(*) FROM conversations").fetchone()
        return count

    def update(self) -> None:
        """Index the lines that were appended since the last call. Does nothing while another thread is doing it."""
        if not self._writing.acquire(blocking=False):
            return
        try:
            self._extend()
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {error.strerror or error}") from None
        finally:
            self._writing.release()

    def columns(self, start: int = 0) -> dict[str, list[Any]]:
        """The columns of all indexed conversations from number `start` on, by name: one value for each conversation."""
        names = ", ".join(f'"{name}"' for name in COLUMNS)
        rows = self._database.execute(
            f"SELECT {names} FROM conversations WHERE number >= ? ORDER BY number", (start,)
        ).fetchall()
        values = zip(*rows, strict=True) if rows else ((),) * len(COLUMNS)
        return {name: list(column) for name, column in zip(COLUMNS, values, strict=True)}

    def numbers_of(self, step: int) -> list[int]:
        """Numbers of the conversations of a training step."""
        found = self._database.execute("SELECT number FROM conversations WHERE step = ? ORDER BY number", (step,))
        return [number for (number,) in found]

    def search(self, query: str) -> list[int]:
        """Numbers of the conversations that contain all words of `query`, in messages, sampled texts or columns of the row.

        The last word may be the beginning of a word. Words in "double quotes" must follow one another.
        """
        terms = list(_terms(query))
        if not terms:
            return []
        found = self._database.execute("SELECT rowid FROM texts WHERE texts MATCH ? ORDER BY rowid", (" ".join(terms),))
        return [number for (number,) in found]

    def line(self, number: int) -> bytes:
        """The line of a conversation. Raises RunError if there is none of this number."""
        file = self._file
        if number >= len(self) or file is None or number >= len(file):
            raise RunError(f"{self.path} has no conversation {number}; {len(self)} conversations are indexed")
        try:
            return file.line(number)
        except OSError as error:
            raise RunError(f"{file.path} cannot be read: {error.strerror or error}") from None

    def close(self) -> None:
        self._database.close()

    def _extend(self) -> None:
        path = existing_file(self.path)
        file = LineFile(path) if path.is_file() else None
        self._file, self.lines = file, 0 if file is None else len(file)
        indexed = len(self)
        if indexed and (file is None or not self._is_prefix(file, indexed)):
            self._clear()
            indexed = 0
        while file is not None and indexed < self.lines:
            last = min(indexed + _CHUNK, self.lines)
            self._add(indexed, file.offsets, list(file.lines(indexed, last)))
            indexed = last

    def _is_prefix(self, file: LineFile, indexed: int) -> bool:
        """Whether the record still begins with the lines that are indexed: the last of them is at its place, unchanged."""
        begin, end, checksum = self._database.execute(
            "SELECT begin_byte, end_byte, checksum FROM conversations WHERE number = ?", (indexed - 1,)
        ).fetchone()
        if indexed > self.lines or (file.offsets[indexed - 1], file.offsets[indexed]) != (begin, end):
            return False
        return _checksum(file.line(indexed - 1)) == checksum

    def _clear(self) -> None:
        with self._database as database:
            database.execute("DELETE FROM conversations")
            database.execute("DROP TABLE texts")
            database.execute(_TEXTS)

    def _add(self, first: int, offsets: Any, lines: list[bytes]) -> None:
        rows: list[tuple[Any, ...]] = []
        texts: list[tuple[int, str]] = []
        for number, line in enumerate(lines, first):
            record = _parsed(line)
            values = _row(record)
            rows.append((number, offsets[number], offsets[number + 1], _checksum(line), *(values[n] for n in COLUMNS)))
            texts.append((number, " ".join(_texts(record))[:_MOST_TEXT]))
        marks = ", ".join("?" * (4 + len(COLUMNS)))
        with self._database as database:
            database.executemany(f"INSERT INTO conversations VALUES ({marks})", rows)
            database.executemany("INSERT INTO texts (rowid, text) VALUES (?, ?)", texts)


_TEXTS = (
    "CREATE VIRTUAL TABLE IF NOT EXISTS texts USING fts5(text, content='', tokenize='unicode61 remove_diacritics 2')"
)


def _open(path: Path) -> sqlite3.Connection:
    """The database, new if it has another format, is damaged, or cannot be written."""
    for place in (path, path, Path(":memory:")):
        database = None
        try:
            database = sqlite3.connect(place, check_same_thread=False, timeout=30)
            if str(place) != ":memory:":
                database.execute("PRAGMA journal_mode=WAL")
                database.execute("PRAGMA synchronous=OFF")  # it can be built again
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version not in (0, _FORMAT):
                raise sqlite3.DatabaseError("another format")
            names = ", ".join(f'"{name}"' for name in COLUMNS)
            database.execute(
                "CREATE TABLE IF NOT EXISTS conversations "
                f"(number INTEGER PRIMARY KEY, begin_byte INTEGER, end_byte INTEGER, checksum TEXT, {names})"
            )
            database.execute(_TEXTS)
            database.execute(f"PRAGMA user_version={_FORMAT}")
            database.commit()
            return database
        except sqlite3.Error:
            if database is not None:
                database.close()
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(OSError):
                    path.with_name(path.name + suffix).unlink()
    raise RunError("the index of conversations cannot be created, not even in memory: sqlite3 with FTS5 is needed")


def _checksum(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def _parsed(line: bytes) -> Mapping[str, Any]:
    """The record of a line. A damaged line has a row without values: opening the conversation says what is wrong."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the columns. A value of another type than expected is null: the record may be damaged."""
    turns, segments = _objects(record.get("turns")), _objects(record.get("segments"))
    calls = [call for turn in turns for call in _objects(turn.get("tool_calls"))]
    versions = [v for segment in segments for v in _numbers(segment.get("version")) if v >= 0]
    error, row = record.get("error"), record.get("row")
    return {
        "id": _scalar(record.get("id")),
        "group": _scalar(record.get("group")),
        "row": _scalar(row.get("id")) if isinstance(row, dict) else None,
        "step": _number(record.get("step")),
        "reward": _number(record.get("reward")),
        "stop": _scalar(record.get("stop")),
        "turns": len(turns),
        "calls": len(calls),
        "call_errors": sum(call.get("error") is not None or call.get("parse_error") is not None for call in calls),
        "sampled": sum(turn >= 0 for segment in segments for turn in _numbers(segment.get("turn"))),
        "tokens": sum(len(_numbers(segment.get("token_ids"))) for segment in segments),
        "segments": len(segments),
        "error": str(error.get("kind")) if isinstance(error, dict) else None,
        "mismatch": int(record.get("template_mismatch") is not None),
        "version_min": min(versions, default=None),
        "version_max": max(versions, default=None),
        "started": _number(record.get("started")),
        "seconds": _number(record.get("seconds")),
    }


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _numbers(value: Any) -> list[Any]:
    return value if isinstance(value, list) and all(type(item) in (int, float) for item in value) else []


def _number(value: Any) -> float | None:
    return value if type(value) in (int, float) and abs(value) < 2**62 else None


def _scalar(value: Any) -> str | None:
    return None if value is None else str(value)[:500].encode("utf-8", "replace").decode()


def _texts(record: Mapping[str, Any]) -> Iterator[str]:
    """The texts that a search finds."""
    for text in (*_strings(record.get("messages")), *_strings(record.get("row")), *_strings(record.get("error"))):
        yield text.encode("utf-8", "replace").decode()  # a model may write half of a surrogate pair
    for turn in _objects(record.get("turns")):
        if isinstance(text := turn.get("text"), str):
            yield text.encode("utf-8", "replace").decode()


def _strings(value: Any, depth: int = 0) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif depth < 8 and isinstance(value, dict):
        for item in value.values():
            yield from _strings(item, depth + 1)
    elif depth < 8 and isinstance(value, list):
        for item in value:
            yield from _strings(item, depth + 1)


def _terms(query: str) -> Iterator[str]:
    """The query in the language of FTS5: each word or quoted phrase as a string, so that no character has a meaning."""
    parts = query.replace("\0", " ").split('"')
    for place, part in enumerate(parts):
        words = part.split()
        if place % 2:  # inside quotes
            if words:
                yield '"' + " ".join(words) + '"'
            continue
        for number, word in enumerate(words):
            last = place == len(parts) - 1 and number == len(words) - 1 and not query.endswith(" ")
            yield f'"{word}"' + ("*" if last else "")
