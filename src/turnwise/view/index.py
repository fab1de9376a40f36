"""One row of numbers for each conversation of a record, and a full-text index, in a small database beside the record.

A record of 100,000 conversations takes many seconds to parse. The index parses each line once, the newest first; later it reads
only lines that were appended. If the record was cut back or written again, the index is built again.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from turnwise.errors import RunError, message_pattern
from turnwise.record.lines import LineFile, existing_file, line_checksum
from turnwise.record.metrics import split_parts

_FORMAT = 5
COLUMNS = (
    "id",
    "group",
    "episode",
    "agent",
    "row",
    "step",
    "reward",
    "advantage",
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
"""The columns of the index. `episode` is the id of the row's conversation, also for those of the agents that its environment
opened, and `agent` the name of such an agent or null. `advantage` is the mean over the sampled tokens, `call_errors` counts
failed and malformed tool calls, `sampled` the tokens that the model sampled, `tokens` all tokens; `error` is the kind of failure
or null, `mismatch` 1 if the tokens differ from the template's."""
EXCERPTS = ("question", "answer", "parts", "failure")
"""Texts of each conversation, which are read for a few conversations only: the beginning of the last message of the user before
the first answer, the beginning of the last answer, the parts of the reward as JSON, and the message of its failure."""
CALLS = ("tool", "seconds", "error", "message", "pattern")
"""Of each tool call: the name of the tool, its seconds, the kind of its error, the beginning of what the model was told then, and
the same without what varies from call to call (`message_pattern`). The last three are null without an error."""
_LONGEST_EXCERPT = 300  # characters
_MOST_TURNS = 32  # of a conversation, whose rewards are kept
_BLOCK_LINES = 500  # lines between two commits: a reader sees them at once
_BLOCK_BYTES = 1 << 24
_MOST_TEXT = 200_000  # characters of a conversation that the full-text index takes


class ConversationIndex:
    """The index of one file of trajectories, such as `runs/demo/trajectories.jsonl`.

    `path` is the plain file; if only the compressed file exists, that is read. `update` may run in another thread than the
    readers. The database is `<file>.view`; where the directory cannot be written, it is in memory.

    Raises RunError if the record or the database cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = 0
        """Lines of the record when `update` last looked. More than `len(self)` while the index is being built."""
        self.generation = 0
        """How often the index was emptied because the record was written again."""
        self.ready = False
        """Whether `update` has looked at the record."""
        self.damage: list[str] = []
        """What is wrong with parts of a compressed record, whose conversations are left out."""
        self._file: LineFile | None = None
        self._file_state: tuple[Path, int, int] | None = None
        self._writing = threading.Lock()
        self._database = _open(path.with_name(f"{path.name}.view"))
        self.indexed = self._range()
        """Numbers of the indexed conversations. While the index is being built, these are the newest ones."""

    def __len__(self) -> int:
        return len(self.indexed)

    def update(self, seconds: float | None = None) -> bool:
        """Index lines that are not indexed yet: first the appended lines, then the others, from the end of the record to its
        beginning. Stops after about `seconds`; None: when all lines are indexed.

        Returns whether all lines are indexed. While another thread runs `update`, this does nothing and returns False.
        """
        if not self._writing.acquire(blocking=False):
            return False
        try:
            return self._extend(None if seconds is None else time.monotonic() + seconds)
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {error.strerror or error}") from None
        except sqlite3.Error as error:
            raise self._damaged(error) from None
        finally:
            self.ready = True
            self._writing.release()

    def columns(self, start: int = 0, stop: int | None = None) -> dict[str, list[Any]]:
        """The columns of the indexed conversations with numbers from `start` to `stop - 1`, by name: one value for each
        conversation, in the order of the numbers."""
        first = max(start, self.indexed.start)
        last = self.indexed.stop if stop is None else min(stop, self.indexed.stop)
        names = ", ".join(f'"{name}"' for name in COLUMNS)
        rows = self.query(
            f"SELECT {names} FROM conversations WHERE number >= ? AND number < ? ORDER BY number", first, last
        )
        values = zip(*rows, strict=True) if rows else ((),) * len(COLUMNS)
        return {name: list(column) for name, column in zip(COLUMNS, values, strict=True)}

    def rows(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Number, columns and texts (`COLUMNS`, `EXCERPTS`) of some conversations in this order; without those that are not
        indexed, also if they were when their numbers were found."""
        names = ("number", *COLUMNS, *EXCERPTS)
        selected, marks = ", ".join(f'"{name}"' for name in names), ", ".join("?" * len(numbers))
        found = self.query(
            f"SELECT {selected} FROM conversations JOIN excerpts USING (number) WHERE number IN ({marks})", *numbers
        )
        known = {row[0]: dict(zip(names, row, strict=True)) for row in found}
        return [{**known[n], "parts": json.loads(known[n]["parts"])} for n in numbers if n in known]

    def excerpts(self, numbers: Sequence[int]) -> dict[int, dict[str, Any]]:
        """The texts `EXCERPTS` of some conversations by their numbers; without those that are not indexed."""
        names, marks = ", ".join(EXCERPTS), ", ".join("?" * len(numbers))
        rows = self.query(f"SELECT number, {names} FROM excerpts WHERE number IN ({marks})", *numbers)
        found = {number: dict(zip(EXCERPTS, texts, strict=True)) for number, *texts in rows}
        return {number: {**texts, "parts": json.loads(texts["parts"])} for number, texts in found.items()}

    def failures(self, most: int = 1000) -> list[tuple[int | None, str, str, str]]:
        """The latest failures in the order of the record: step, id, kind and message of each."""
        rows = self.query(
            "SELECT step, id, error, failure FROM conversations JOIN excerpts USING (number) WHERE error IS NOT NULL "
            "ORDER BY number DESC LIMIT ?",
            most,
        )
        return [(step, id or "", kind, message or "") for step, id, kind, message in reversed(rows)]

    def by_reward(self) -> list[int]:
        """The numbers of the conversations of the last step that have a reward, the highest first."""
        return [
            number
            for (number,) in self.query(
                "SELECT number FROM conversations WHERE reward IS NOT NULL AND agent IS NULL AND step IS "
                "(SELECT max(step) FROM conversations WHERE reward IS NOT NULL) ORDER BY reward DESC, number"
            )
        ]

    def numbers_of(self, step: int) -> list[int]:
        """Numbers of the conversations of a training step."""
        return [] if self._file is None else self._file.numbers_of_step(step)

    def number_of(self, id: str, step: int | None) -> int:
        """The number of the conversation with this id; in a file of several evaluations, of the one of this step, or the last.

        Raises RunError if there is none.
        """
        file = self._file or self._open_lines()
        numbers = [] if file is None else file.numbers_of_id(id)
        if file is not None and step is not None and len(numbers) > 1:
            numbers = sorted(set(numbers) & set(file.numbers_of_step(step)))
        if not numbers:
            of_step = "" if step is None else f" of step {step}"
            raise RunError(f"{self.path} has no conversation {id!r}{of_step}")
        return numbers[-1]

    def checksums(self, ids: Iterable[str]) -> dict[tuple[str, int | None], set[str]]:
        """The checksums of the indexed lines with these ids, by id and step."""
        found: dict[tuple[str, int | None], set[str]] = {}
        wanted = json.dumps(list(ids))
        statement = "SELECT id, step, checksum FROM conversations WHERE id IN (SELECT value FROM json_each(?))"
        for id, step, checksum in self.query(statement, wanted):
            found.setdefault((id, step), set()).add(checksum)
        return found

    def search(self, query: str) -> list[int]:
        """Numbers of the conversations that contain all words of `query`, in messages, sampled texts or columns of the row.

        The last word may be the beginning of a word. Words in "double quotes" must follow one another.
        """
        terms = list(_terms(query))
        if not terms:
            return []
        found = self.query("SELECT rowid FROM texts WHERE texts MATCH ? ORDER BY rowid", " ".join(terms))
        return [number for (number,) in found]

    def find(self, query: str, most: int) -> dict[str, Any]:
        """What `search` finds, for a list of all runs: how many conversations (`total`), and the rows with texts of `most` of
        them: first those whose id is the query, then the newest."""
        found = self.search(query)
        exact = [number for (number,) in self.query("SELECT number FROM conversations WHERE id = ?", query.strip())]
        chosen = list(dict.fromkeys([*reversed(exact), *reversed(found)]))
        return {"total": len(chosen), "rows": self.rows(chosen[:most])}

    def line(self, number: int) -> bytes:
        """The line of a conversation. Raises RunError if there is none of this number."""
        file = self._file
        if file is None or number >= len(file):
            raise RunError(f"{self.path} has no conversation {number}; it has {self.lines} conversations")
        try:
            return file.line(number)
        except OSError as error:
            raise RunError(f"{file.path} cannot be read: {error.strerror or error}") from None

    def look_again(self) -> None:
        """Find the lines of the record as it is now, before the next `update` does. Raises RunError if it cannot be read."""
        try:
            self._open_lines()
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {error.strerror or error}") from None

    def close(self) -> None:
        self._database.close()

    def _extend(self, end: float | None) -> bool:
        file = self._open_lines()
        self.ready = True
        if self.indexed and (file is None or not self._is_prefix(file)):
            self._clear()
        while file is not None and (block := self._next_block(file)):
            self._add(file, block)
            if end is not None and time.monotonic() > end:
                return not self._next_block(file)
        return True

    def _open_lines(self) -> LineFile | None:
        """The record as it is now; None if there is no file."""
        path = existing_file(self.path)
        try:
            status = path.stat()
        except FileNotFoundError:
            self._file, self._file_state, self.lines, self.damage = None, None, 0, []
            return None
        state = (path, status.st_size, status.st_mtime_ns)
        if self._file is None or self._file_state != state:
            self._file = LineFile(path)
            self._file_state, self.lines, self.damage = state, len(self._file), self._file.damage
        return self._file

    def _next_block(self, file: LineFile) -> range:
        """The numbers of the lines to be indexed next; empty if all are indexed."""
        lines = len(file)
        known = self.indexed or range(lines, lines)
        if known.stop < lines:
            block = range(known.stop, min(known.stop + _BLOCK_LINES, lines))
            while len(block) > 1 and _size(file, block) > _BLOCK_BYTES:
                block = block[: len(block) // 2]
        else:
            block = range(max(known.start - _BLOCK_LINES, 0), known.start)
            while len(block) > 1 and _size(file, block) > _BLOCK_BYTES:
                block = block[len(block) // 2 :]
        return block

    def _is_prefix(self, file: LineFile) -> bool:
        """Whether the record still begins with the lines that are indexed: the last of them is at its place, unchanged."""
        last = self.indexed[-1]
        rows = self.query("SELECT begin_byte, end_byte, checksum FROM conversations WHERE number = ?", last)
        if not rows or last >= len(file) or (file.offsets[last], file.offsets[last + 1]) != rows[0][:2]:
            return False
        return line_checksum(file.line(last)) == rows[0][2]

    def _clear(self) -> None:
        with self._database as database:
            database.execute("DELETE FROM conversations")
            database.execute("DELETE FROM excerpts")
            database.execute("DELETE FROM calls")
            database.execute("DROP TABLE texts")
            database.execute(_TEXTS)
        self.indexed = range(0)
        self.generation += 1

    def _add(self, file: LineFile, block: range) -> None:
        """Index the lines of a block, which is directly before or behind the indexed lines."""
        rows: list[tuple[Any, ...]] = []
        texts: list[tuple[int, str]] = []
        excerpts: list[tuple[Any, ...]] = []
        calls: list[tuple[Any, ...]] = []
        for number, line in zip(block, file.lines(block.start, block.stop), strict=True):
            record = _parsed(line)
            values = _row(record)
            place = file.offsets[number], file.offsets[number + 1]
            rows.append((number, *place, line_checksum(line), *(values[n] for n in COLUMNS)))
            texts.append((number, " ".join(_texts(record))[:_MOST_TEXT]))
            excerpts.append((number, *_excerpts(record), _turn_rewards(record)))
            calls += [(number, *call) for call in _calls(record)]
        marks = ", ".join("?" * (4 + len(COLUMNS)))
        with self._database as database:
            database.execute("BEGIN IMMEDIATE")
            # another viewer may have indexed lines meanwhile: then its rows count
            if self._range() == self.indexed:
                database.executemany(f"INSERT INTO conversations VALUES ({marks})", rows)
                database.executemany("INSERT INTO texts (rowid, text) VALUES (?, ?)", texts)
                database.executemany(f"INSERT INTO excerpts VALUES (?{', ?' * len(EXCERPTS)}, ?)", excerpts)
                database.executemany(f"INSERT INTO calls VALUES (?{', ?' * len(CALLS)})", calls)
        self.indexed = self._range()

    def _range(self) -> range:
        """The numbers of the conversations in the database: all blocks are added at one of its ends."""
        ((first, last),) = self.query("SELECT min(number), max(number) FROM conversations")
        return range(0) if first is None else range(first, last + 1)

    def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """The rows that SQL finds in the tables `conversations`, `excerpts` and `calls`. Raises RunError."""
        try:
            return self._database.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise self._damaged(error) from None

    def _damaged(self, error: sqlite3.Error) -> RunError:
        return RunError(
            f"the index {self.path}.view cannot be used ({error}): end the viewer, delete the file, and start the viewer again"
        )


def _size(file: LineFile, block: range) -> int:
    """The bytes of the lines of a block."""
    return file.offsets[block.stop] - file.offsets[block.start]


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
            texts = ", ".join((*EXCERPTS, "turn_rewards"))
            database.execute(f"CREATE TABLE IF NOT EXISTS excerpts (number INTEGER PRIMARY KEY, {texts})")
            database.execute(f"CREATE TABLE IF NOT EXISTS calls (number INTEGER, {', '.join(CALLS)})")
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


def _agent(record: Mapping[str, Any]) -> str | None:
    """The name of an agent, as in the names of metrics: `second`, or `second@opponent` if a policy has played it."""
    name, policy = _scalar(record.get("agent") or None), _scalar(record.get("policy") or None)
    return name if policy is None else f"{name}@{policy}"


def _parsed(line: bytes) -> Mapping[str, Any]:
    """The record of a line. A damaged line has a row without values: opening the conversation says what is wrong."""
    try:
        value = from_json(line)  # three times as fast as json, but refuses half of a surrogate pair
    except ValueError:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return {}
    return value if isinstance(value, dict) else {}


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the columns. A value of another type than expected is null: the record may be damaged."""
    turns, segments = _objects(record.get("turns")), _objects(record.get("segments"))
    calls = [call for turn in turns for call in _objects(turn.get("tool_calls"))]
    versions = [v for segment in segments for v in set(_numbers(segment.get("version"))) if v >= 0]
    tokens_of_turns = [Counter(_numbers(segment.get("turn"))) for segment in segments]
    error, row = record.get("error"), record.get("row")
    return {
        "id": _scalar(record.get("id")),
        "group": _scalar(record.get("group")),
        "episode": _scalar(record.get("episode") or record.get("id")),
        "agent": _agent(record),
        "row": _scalar(row.get("id")) if isinstance(row, dict) else None,
        "step": _number(record.get("step")),
        "reward": _number(record.get("reward")),
        "advantage": _advantage(turns, tokens_of_turns),
        "stop": _scalar(record.get("stop")),
        "turns": len(turns),
        "calls": len(calls),
        "call_errors": sum(call.get("error") is not None or call.get("parse_error") is not None for call in calls),
        "sampled": sum(count for tokens in tokens_of_turns for turn, count in tokens.items() if turn >= 0),
        "tokens": sum(len(_numbers(segment.get("token_ids"))) for segment in segments),
        "segments": len(segments),
        "error": str(error.get("kind")) if isinstance(error, dict) else None,
        "mismatch": int(record.get("template_mismatch") is not None),
        "version_min": min(versions, default=None),
        "version_max": max(versions, default=None),
        "started": _number(record.get("started")),
        "seconds": _number(record.get("seconds")),
    }


def _advantage(turns: Sequence[Mapping[str, Any]], tokens_of_turns: Sequence[Mapping[Any, int]]) -> float | None:
    """The mean advantage of the sampled tokens; None without advantages."""
    total = count = 0.0
    for turn, about in enumerate(turns):
        value, tokens = about.get("advantage"), sum(tokens[turn] for tokens in tokens_of_turns)
        of_tokens = _numbers(value)
        if of_tokens:
            total, count = total + sum(of_tokens), count + len(of_tokens)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            total, count = total + value * tokens, count + tokens
    return total / count if count else None


def _excerpts(record: Mapping[str, Any]) -> tuple[str | None, ...]:
    """The values of `EXCERPTS`."""
    messages, error = _objects(record.get("messages")), record.get("error")
    roles = [message.get("role") for message in messages]
    first = roles.index("assistant") if "assistant" in roles else len(messages)
    question = next((m for m in reversed(messages[:first]) if m.get("role") != "system"), None)
    answer = next((m for m in reversed(messages) if m.get("role") == "assistant"), None)
    failure = str(error.get("message")) if isinstance(error, dict) else None
    texts = [None if m is None else " ".join(_strings(m.get("content"))) or None for m in (question, answer)]
    if texts[1] is None and answer is not None:
        texts[1] = " ".join(_strings(answer.get("tool_calls"))) or None
    return (
        *map(_excerpt, texts),
        json.dumps(recorded_parts(record)),
        _excerpt(failure),
    )


def recorded_parts(record: Mapping[str, Any]) -> dict[str, float]:
    """The parts of the reward of a recorded conversation, which add up to it."""
    return split_parts(_rewards(record), [_rewards(turn) for turn in _objects(record.get("turns"))])


def _rewards(record: Mapping[str, Any]) -> dict[str, float]:
    """The `rewards` of a conversation or of a turn that are numbers."""
    rewards = record.get("rewards")
    items = rewards.items() if isinstance(rewards, dict) else ()
    return {str(name): number for name, value in items if (number := _number(value)) is not None}


def _turn_rewards(record: Mapping[str, Any]) -> str:
    """The rewards of the first turns as JSON."""
    return json.dumps([_number(turn.get("reward")) for turn in _objects(record.get("turns"))[:_MOST_TURNS]])


def _calls(record: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """The values of `CALLS` of each tool call. A call that could not be parsed is `malformed`, and may have no name. In a turn
    that a limit cut, calls are not made."""
    for turn in _objects(record.get("turns")):
        for call in _objects(turn.get("tool_calls")):
            if turn.get("finish_reason") == "length" and call.get("content") is None:
                continue
            told = call.get("parse_error") or call.get("content")
            error = call.get("error") or ("malformed" if call.get("parse_error") is not None else None)
            message = None if error is None else _excerpt(told if isinstance(told, str) else "")
            pattern = None if message is None else message_pattern(message)
            yield _scalar(call.get("name")) or "", _number(call.get("seconds")), _scalar(error), message, pattern


def _excerpt(text: str | None) -> str | None:
    return (
        None
        if text is None
        else " ".join(text[: 4 * _LONGEST_EXCERPT].split())[:_LONGEST_EXCERPT].encode("utf-8", "replace").decode()
    )


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _numbers(value: Any) -> list[Any]:
    return value if isinstance(value, list) and set(map(type, value)) <= {int, float} else []


def _number(value: Any) -> float | None:
    return value if type(value) in (int, float) and abs(value) < 2**62 else None


def _scalar(value: Any) -> str | None:
    return None if value is None else str(value)[:500].encode("utf-8", "replace").decode()


def _texts(record: Mapping[str, Any]) -> Iterator[str]:
    """The texts that a search finds."""
    for key in ("id", "messages", "row", "row_columns", "error"):
        for text in _strings(record.get(key)):
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
