"""Reads data sets into rows: jsonl, parquet and Hugging Face `datasets` (a local directory or a hub id).

Columns are mapped, messages are converted to OpenAI's form (`role`, `content` as a text or a list of parts, `tool_calls` with
arguments as a mapping), and the columns `images` and `videos` are inserted into the messages. All rows are checked at
start-up: a defective row raises an error with its number before the run starts.

The placeholders of images and videos are `<image>` and `<video>` in a text, and an empty part such as `{"type": "image"}` in a
list of parts. If no message has a placeholder, the images or videos are inserted at the start of the first user message, as in
ms-swift and TRL. Paths are resolved and the headers of images are checked; no pixels are decoded and no contents of files are
stored. This module knows neither templates nor loss weights.
"""

from __future__ import annotations

import functools
import gzip
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from turnwise.data.absent_values import AbsentValues, DroppedNulls
from turnwise.data.images import media_kind, media_value, probe_image, recorded_path
from turnwise.errors import DataError, nearest
from turnwise.json_yaml import half_character, parse_json
from turnwise.local_paths import looks_like_path, no_file
from turnwise.types import Message, Row
from turnwise.user_code.copies import copy_containers
from turnwise.user_code.references import is_live, live_object

# images and videos

COLUMNS = {"image": "images", "video": "videos"}
"""Column names by kind of media."""

_PLACEHOLDER = re.compile("(<image>|<video>)")


def with_media(
    messages: Sequence[Message], fields: Mapping[str, Any], *, place: str, folder: Path | None
) -> tuple[list[Message], dict[str, Any]]:
    """The messages with the row's images and videos inserted, and the fields with absolute paths.

    Example: `[{"role": "user", "content": "<image>What is it?"}]` and `{"images": ["a.png"]}` give a message of the parts
    `{"type": "image", "image": "/data/a.png"}` and `{"type": "text", "text": "What is it?"}`.

    Raises DataError if the number of placeholders differs from the number of images or videos, or a file is missing or
    unreadable.
    """
    media = {
        kind: [
            _checked(kind, value, f"{place}: {kind} {n}", folder) for n, value in enumerate(_list(fields[column]), 1)
        ]
        for kind, column in COLUMNS.items()
        if fields.get(column) is not None
    }
    messages = _marked(messages, {kind: len(values) for kind, values in media.items()})
    unused = {kind: iter(values) for kind, values in media.items()}
    places = dict.fromkeys(media, 0)
    result: list[Message] = []
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list) and not (media and isinstance(content, str) and _PLACEHOLDER.search(content)):
            result.append(message)
            continue
        parts: list[Any] = []
        for part in _parts(content, split=bool(media)):
            kind = media_kind(part)
            if kind is None:
                parts.append(part)
            elif (value := media_value(part)) is not None:
                parts.append({"type": kind, kind: _checked(kind, value, f"{place}: {kind} of a message", folder)})
            else:
                places[kind] = places.get(kind, 0) + 1
                parts.append({"type": kind, kind: next(unused.get(kind, iter(())), None)})
        result.append({**message, "content": parts})
    for kind, count in places.items():
        have = len(media.get(kind, ()))
        if count != have:
            column = COLUMNS[kind]
            raise DataError(
                f"{place}: the column {column!r} and the prompt do not match: {have} in the column, {count} placeholders in "
                f"the prompt. Write <{kind}> into the prompt for each of them, or add a content part {{'type': {kind!r}}}"
            )
    return result, {**fields, **{COLUMNS[kind]: values for kind, values in media.items()}}


def _marked(messages: Sequence[Message], counts: Mapping[str, int]) -> Sequence[Message]:
    """The messages with placeholders added to the first user message, for each kind of media without a placeholder."""
    contents = [content for message in messages if isinstance(content := message.get("content"), str | list)]
    all_parts = [part for content in contents for part in _parts(content, split=True)]
    empty = [kind for part in all_parts if (kind := media_kind(part)) is not None and media_value(part) is None]
    places = [{"type": kind} for kind, count in counts.items() if kind not in empty for _ in range(count)]
    user = (
        n
        for n, message in enumerate(messages)
        if message.get("role") == "user" and isinstance(message.get("content"), str | list)
    )
    if not places or (first := next(user, None)) is None:
        return messages
    parts = [*places, *_parts(messages[first]["content"], split=False)]
    return [*messages[:first], {**messages[first], "content": parts}, *messages[first + 1 :]]


def _parts(content: Any, *, split: bool) -> Iterator[Mapping[str, Any]]:
    """The content as parts. If `split` is set, placeholders in texts become empty parts."""
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        # in parquet, each part has the keys of all parts; absent values are null
        part = {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else part
        text = part.get("text") if isinstance(part, Mapping) else part
        if not split or not isinstance(text, str) or not _PLACEHOLDER.search(text):
            yield part if isinstance(part, Mapping) else {"type": "text", "text": part}
            continue
        for piece in _PLACEHOLDER.split(text):
            if piece in ("<image>", "<video>"):
                yield {"type": piece[1:-1]}
            elif piece:
                yield {"type": "text", "text": piece}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _checked(kind: str, value: Any, where: str, folder: Path | None) -> Any:
    """The value for the message: paths are made absolute, other values are unchanged.

    Raises DataError if the image or video is missing, or the image is unreadable.
    """
    if kind == "image":
        probe_image(value, where=where, folder=folder)
        return _absolute(value, folder)
    if isinstance(value, Mapping):
        value = media_value({"type": "video", **value})
    if isinstance(value, list | tuple) and value:
        return [_checked("image", frame, f"{where}, frame {n}", folder) for n, frame in enumerate(value, 1)]
    if not isinstance(value, str | Path) or not str(value):
        raise DataError(f"{where} is {value!r:.80}; a video is a path, or a list of frames (images)")
    path = _absolute(str(value).removeprefix("file://"), folder)
    if not os.path.isfile(path):
        raise DataError(f"{where}: there is no video file {path}")
    return path


def _absolute(value: Any, folder: Path | None) -> Any:
    """A relative path as an absolute path. It is relative to the folder of the data file."""
    if isinstance(value, Mapping):
        if value.get("bytes") is None and value.get("path") is not None:
            return _absolute(value["path"], folder)
        return value
    if not isinstance(value, str | Path) or str(value).startswith(("data:", "file://")):
        return value
    path = Path(os.path.expanduser(recorded_path(value, folder)))
    return str(path if path.is_absolute() or folder is None else (folder / path).absolute())


# messages

ROLES = ("system", "developer", "user", "assistant", "tool")
_PARTS = ("text", "image", "image_url", "video", "video_url")


def clean_message(message: Any, where: str, absent: AbsentValues) -> Message:
    """The message without null keys, and with the arguments of calls as mappings, of which `absent` drops nulls. Error messages
    begin with `where`.

    Raises DataError if the role is unknown, the content is neither a text nor a list of known parts, a call has no name, or
    its arguments are not an object.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(f'{where} is {message!r:.80}; a message is {{"role": ..., "content": ...}}')
    # in parquet, each message has the keys of all messages; absent values are null
    kept = {key: value for key, value in message.items() if value is not None}
    role = kept["role"]
    if role not in ROLES:
        raise DataError(f"{where} has the role {role!r}{nearest(role, ROLES)}; the roles are: {', '.join(ROLES)}")
    calls = kept.pop("tool_calls", None)
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise DataError(
                f"{where}: `tool_calls` must be a list of calls in an assistant message; it is {calls!r:.80}"
            )
        kept["tool_calls"] = [_call(call, n, where, absent) for n, call in enumerate(calls)]
    kept["content"] = _content(kept, where)
    if (problem := half_character(kept)) is not None:
        raise DataError(f"{where} cannot be encoded: {problem}")
    return kept


def _content(message: Message, where: str) -> Any:
    content = message.get("content")
    if content is None:
        if message["role"] == "assistant" and message.get("tool_calls"):
            return ""
        raise DataError(f"{where} (role {message['role']!r}) has no content; write a text, or remove the message")
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else []
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in parts]
    if not kinds or any(kind not in _PARTS for kind in kinds):
        raise DataError(
            f"{where} has the content {content!r:.80}; content is a text, or a list of parts of the types {', '.join(_PARTS)}"
        )
    texts = [part.get("text") for part in content if part["type"] == "text"]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f'{where} has a part without a text in {content!r:.80}; it is {{"type": "text", "text": ...}}')
    if message["role"] != "assistant":
        return content
    if len(texts) != len(content):
        raise DataError(
            f"{where}: an assistant message contains only text, and this message has the part {content!r:.80}"
        )
    return "".join(texts)


def _call(call: Any, number: int, where: str, absent: AbsentValues) -> dict[str, Any]:
    """A call in the OpenAI format, with its arguments as a mapping: templates would encode a JSON text as JSON again."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(
            f'{where} has a call {call!r:.80}; a call is {{"type": "function", "function": {{"name": ..., "arguments": ...}}}}'
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parse_json(
            arguments or "{}",
            where=f"{where}: the arguments of {function['name']!r}: this text",
            error=DataError,
        )
    if arguments is not None and not isinstance(arguments, Mapping):
        raise DataError(f"{where}: the arguments of {function['name']!r} must be an object; they are {arguments!r:.80}")
    return {
        "id": str(call.get("id") or f"call_{number}"),
        "type": "function",
        "function": {"name": function["name"], "arguments": absent.arguments(function["name"], arguments or {})},
    }


# rows

_OWN_PROMPT = (
    ". Rows without a prompt are for environments that write it, such as turnwise.compat.trl:TrlEnvironments; a class of your "
    "own says so with `writes_prompt = True`"
)
FILES = (".jsonl", ".json", ".ndjson", ".parquet", ".gz")
"""Suffixes of data files; `.json` and `.ndjson` hold one object per line, as `.jsonl` does. `.gz` is a file of lines that is
compressed with gzip, as a run with `record.compression: gzip` writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvidedRows:
    """The rows that an environment brings."""

    records: Iterable[Mapping[str, Any]]
    """Their columns, as a data file has them. A row without a `prompt` gets its prompt from the environment."""
    by_seed: bool = False
    """Whether each row is a number in the column `seed`, from which the environment makes it: later passes over the rows then
    have other seeds, and no row is repeated."""


@runtime_checkable
class BringsRows(Protocol):
    """An `EnvironmentSource` that has rows of its own: a recipe may leave out `data.train`."""

    def rows(self, count: int | None, *, held_out: bool) -> ProvidedRows:
        """The first `count` rows, or all for None: those of training, or the `held_out` ones for `data.eval`. Raises DataError if
        there are none."""
        ...


Provides = Callable[[int | None], ProvidedRows]
"""The first rows of the environment, or as many as it has for None. Raises ConfigError if it has none."""

_HELD_OUT_SEEDS = 1_000_000_000
_SEEDS, _HELD_OUT = 10_000, 100


def seed_rows(
    count: int | None, *, held_out: bool, columns: Callable[[int], Mapping[str, Any]] = lambda seed: {}
) -> ProvidedRows:
    """Rows of seeds: 0, 1, 2 and so on, or from 1,000,000,000 on if they are held out. `columns` are the other columns of a seed.
    Without a count, there are 10,000, or 100 held-out rows."""
    first = _HELD_OUT_SEEDS if held_out else 0
    seeds = range(first, first + (count or (_HELD_OUT if held_out else _SEEDS)))
    return ProvidedRows(records=({"seed": seed, **columns(seed)} for seed in seeds), by_seed=not held_out)


def provided_count(source: str) -> tuple[int | None] | None:
    """The number of rows in `environment:64`, in a tuple; a tuple of None for `environment`; None for any other source.

    Raises DataError for a wrong number."""
    name, colon, count = source.partition(":")
    if name != "environment":
        return None
    if not colon:
        return (None,)
    if not count.isascii() or not count.isdecimal() or int(count) < 1:
        raise DataError(f"{source}: write environment:N with a number of rows of at least 1, such as environment:64")
    return (int(count),)


def read_rows(
    source: str | Sequence[str],
    *,
    columns: Mapping[str, str] | None = None,
    split: str = "train",
    subset: str | None = None,
    system: str | None = None,
    limit: int | None = None,
    writes_prompt: Callable[[], bool] = lambda: False,
    provides: Provides | None = None,
) -> list[Row]:
    """Read a data set.

    `source` is a `.jsonl`, `.json` (lines) or `.parquet` file, a directory saved by `datasets`, or a hub id; or a list of these,
    whose rows are concatenated, numbered from 1, and carry the name of their data set (`Row.source`). `columns` maps names of
    turnwise to names in the data: `{"prompt": "question"}`. The column `prompt` is a text (one user message) or a list of
    messages; `id` is optional, and so is `source`, the kind of a row of one data set. The columns `images` and `videos` replace
    the placeholders `<image>` and `<video>` in the messages. `system` is added to prompts without a system message. `empty:64` is
    a source of 64 rows without columns, and `environment` is the rows of `provides`. A row may have no prompt if `writes_prompt`
    says that the environment writes it: its messages are then one empty user message.

    Raises DataError, with the row's number, if a file is missing or empty, a line is malformed, or a column is missing.
    """
    mapping = {"prompt": "prompt", **(columns or {})}
    writes_prompt = functools.cache(writes_prompt)  # it may load a library, and there may be many rows
    return build_rows(
        source,
        lambda source_record, folder, dropped: _row(
            _prompted(source_record, mapping, writes_prompt), mapping, system, folder, dropped
        ),
        split=split,
        subset=subset,
        limit=limit,
        provides=provides,
    )


def column_names(
    source: str | Sequence[str],
    *,
    columns: Mapping[str, str] | None = None,
    split: str = "train",
    subset: str | None = None,
    limit: int | None = None,
    provides: Provides | None = None,
) -> frozenset[str]:
    """The names of the columns that the rows of `read_rows` have, also of records that are no rows: a column that is mapped and
    missing counts.

    Raises DataError if the records cannot be read.
    """
    mapping = {"prompt": "prompt", **(columns or {})}
    found = (one.record for one, _, _ in islice(_all_records(source, split, subset, provides, limit), limit))
    names = {name for record in found for name in record if name not in mapping.values()}
    return frozenset((names | set(mapping)) - ({"prompt", "id"} & set(mapping)))


def build_rows(
    source: str | Sequence[str],
    make: Callable[[SourceRecord, Path | None, DroppedNulls], Row],
    *,
    split: str,
    subset: str | None,
    limit: int | None,
    provides: Provides | None = None,
) -> list[Row]:
    """The rows that `make` builds from the records. Its second argument is the folder to which paths are relative; its third
    counts the nulls that it drops.

    Raises DataError if two rows have the same id, or there are no rows.
    """
    places: dict[str, str] = {}
    rows: list[Row] = []
    by_seed: list[int] = []
    """Indexes of the rows that the environment makes from seeds."""
    dropped = DroppedNulls()
    several = not isinstance(source, str) and len(source) > 1
    for source_record, folder, name in islice(_all_records(source, split, subset, provides, limit), limit):
        row = make(source_record, folder, dropped)
        if several:
            row = replace(row, source=name)
        if row.id in places:
            raise DataError(
                f"{places[row.id]} and {source_record.place} both have the id {row.id!r}; ids must be unique. If no column is "
                f"mapped to `id`, rows are numbered"
            )
        places[row.id] = source_record.place
        rows.append(row)
        by_seed += [len(rows) - 1] if source_record.by_seed else []
    if not rows:
        raise DataError(f"{source} has no rows; at least one is needed")
    dropped.report()
    for index in by_seed:
        rows[index] = replace(rows[index], seed_step=len(by_seed))
    return rows


def _all_records(
    source: str | Sequence[str], split: str, subset: str | None, provides: Provides | None, limit: int | None
) -> Iterator[tuple[SourceRecord, Path | None, str]]:
    """The records of one or several data sets. Each has the folder to which its paths are relative, and its data set."""
    sources = [source] if isinstance(source, str) else source
    before = 0  # number of records of the previous sources
    for name in sources:
        path = Path(os.path.expanduser(name))
        folder = path.absolute().parent if path.suffix in FILES else path.absolute() if os.path.isdir(path) else None
        last = 0
        if (count := provided_count(name)) is not None:
            found = _provided_records(name, provides, count[0] or limit)
        else:
            found = records(name, split=split, subset=subset)
        for source_record in found:
            last = source_record.number
            if before:
                source_record = replace(source_record, number=before + source_record.number)
            yield source_record, folder, name
        before += last


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """A record of a data set, its number from 1, and its place for error messages: `data.jsonl:3`."""

    record: Mapping[str, Any]
    number: int
    place: str
    from_arrow: bool = False
    """Whether it was read from an Arrow table, where each row has the keys of all rows."""
    by_seed: bool = False
    """Whether the environment makes the row from its column `seed`."""


def _provided_records(source: str, provides: Provides | None, count: int | None) -> Iterator[SourceRecord]:
    """The records of the rows that the environment brings, at most `count`. Raises DataError if there are none here."""
    if provides is None:
        raise DataError(
            f"{source} is the rows that an environment brings, and these rows have no answers to train on: name a data set of "
            f"conversations (data.train)"
        )
    rows = provides(count)
    for number, record in enumerate(islice(rows.records, count), 1):
        if not isinstance(record, Mapping):
            raise DataError(
                f"{source}, row {number}: the environment gives a {type(record).__name__}; a row must be a dict"
            )
        yield SourceRecord(record, number, f"{source}, row {number}", by_seed=rows.by_seed)


def records(source: str, *, split: str, subset: str | None) -> Iterator[SourceRecord]:
    """The records of a data set. Their contents are not checked.

    Raises DataError if the source is missing or cannot be read.
    """
    if is_live(source):
        return _live_records(source)
    if (count := _empty_rows(source)) is not None:
        return (SourceRecord({}, number, f"{source}, row {number}") for number in range(1, count + 1))
    refuse_missing_source(source)
    path = Path(os.path.expanduser(source))
    if path.suffix in FILES and path.suffix != ".parquet":
        return _lines(path)
    try:
        import datasets
    except ImportError:
        raise DataError(f"reading {source} needs the `datasets` package: pip install 'turnwise[data]'") from None
    datasets.disable_progress_bars()
    try:
        table = _load(datasets, path, source, split, subset)
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{source!r} could not be loaded: {type(error).__name__}: {error}. It must be a .jsonl or .parquet file, a "
            f"directory saved by `datasets`, or a hub id that can be reached"
        ) from error
    return (
        SourceRecord(record, number, f"{source}, row {number}", from_arrow=True)
        for number, record in enumerate(_packed(datasets, table), 1)
    )


def refuse_missing_source(source: str) -> None:
    """Refuse a path of a data set where there is no file or directory. Reads nothing. Raises DataError."""
    if is_live(source) or _empty_rows(source) is not None or provided_count(source) is not None:
        return
    path = Path(os.path.expanduser(source))
    if path.suffix in FILES:
        if (problem := no_file(path, "file")) is not None:
            raise DataError(f"{problem}; paths are relative to the directory you run from")
    elif looks_like_path(source) and not os.path.isdir(path):
        takes = "data.train takes a .jsonl or .parquet file, a directory saved by `datasets`, or a hub id"
        if os.path.isfile(path):
            raise DataError(f"{path.absolute()} is not a file of one of these kinds: {', '.join(FILES)}. {takes}")
        missing = no_file(path, "file" if path.suffix else "directory")
        raise DataError(f"{missing}; {takes}")


def _empty_rows(source: str) -> int | None:
    """The number of rows of a source such as `empty:64`; None for any other source. Raises DataError for a wrong number."""
    name, colon, count = source.partition(":")
    if name != "empty" or not colon:
        return None
    if not count.isascii() or not count.isdecimal() or int(count) < 1:
        raise DataError(f"{source}: write empty:N with a number of rows of at least 1, such as empty:64")
    return int(count)


def _live_records(source: str) -> Iterator[SourceRecord]:
    """The rows that a Python program has given: mappings, or a `datasets.Dataset`."""
    table = live_object(source, key="data.train")
    from_arrow = bool(getattr(table, "features", None))
    if from_arrow:
        import datasets

        table = _packed(datasets, table)
    for number, record in enumerate(table, 1):
        place = f"row {number}"
        if not isinstance(record, Mapping):
            raise DataError(
                f'{place} is a {type(record).__name__}; a row is a dict such as {{"prompt": "2+2?", "answer": "4"}}'
            )
        own = copy_containers(dict(record))  # the program may change its objects later
        yield SourceRecord(own, number, place, from_arrow=from_arrow)


def _packed(datasets: Any, table: Any) -> Any:
    """The data set with images as encoded bytes: decoded images would exhaust the memory."""
    many = getattr(datasets, "List", datasets.Sequence)  # `Sequence` was renamed in datasets 4
    for name, feature in (table.features or {}).items():
        if isinstance(feature, datasets.Image):
            table = table.cast_column(name, datasets.Image(decode=False))
        elif isinstance(feature, many) and isinstance(feature.feature, datasets.Image):
            table = table.cast_column(name, many(datasets.Image(decode=False)))
    return table


def _load(datasets: Any, path: Path, source: str, split: str, subset: str | None) -> Any:
    if path.suffix == ".parquet":
        return datasets.Dataset.from_parquet(str(path))
    if not ((path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()):
        return datasets.load_dataset(source, subset, split=split)
    loaded = datasets.load_from_disk(str(path))
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if split not in loaded:
        raise ValueError(f"it has no split {split!r}{nearest(split, loaded)}; its splits are: {', '.join(loaded)}")
    return loaded[split]


def _lines(path: Path) -> Iterator[SourceRecord]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                text = line.decode("utf-8").strip()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{place}: this line is not UTF-8 ({error.reason} at byte {error.start + 1})"
                ) from error
            record = parse_json(text, where=f"{place}: this line", error=DataError)
            if not isinstance(record, dict):
                raise DataError(f"{place}: a row must be a JSON object; this is a {type(record).__name__}")
            yield SourceRecord(record, number, place)


def _prompted(source: SourceRecord, mapping: Mapping[str, str], writes_prompt: Callable[[], bool]) -> SourceRecord:
    """The record, with an empty prompt if it has none and the environment writes it."""
    column = mapping["prompt"]
    if source.record.get(column) is not None or column != "prompt" or not writes_prompt():
        return source
    return replace(source, record={**source.record, column: [{"role": "user", "content": ""}]})


def _row(
    source_record: SourceRecord,
    mapping: Mapping[str, str],
    system: str | None,
    folder: Path | None,
    dropped: DroppedNulls,
) -> Row:
    record, place = source_record.record, source_record.place
    for field_name, column in mapping.items():
        if column not in record:
            have = ", ".join(record) or "none"
            raise DataError(
                f"{place} has no column {column!r}{nearest(column, record)}; its columns are: {have}. Set the right column: "
                f"data.columns.{field_name}=<column>{'' if record else _OWN_PROMPT}"
            )
        if record[column] is None and field_name != "prompt":
            raise DataError(
                f"{place}: the column {column!r} is null, and the recipe uses it as {field_name!r} (data.columns); give it a "
                f"value, or remove the row"
            )
    fields = {name: value for name, value in record.items() if name not in mapping.values()}
    fields.update((field_name, record[column]) for field_name, column in mapping.items())
    from_arrow = source_record.from_arrow
    if fields.get("tools") is not None:
        fields["tools"] = AbsentValues(dropped, place, from_arrow=from_arrow).column(fields["tools"])
    absent = AbsentValues(dropped, place, from_arrow=from_arrow, tools=fields.get("tools"))
    messages, fields = with_media(_messages(fields.pop("prompt"), place, absent), fields, place=place, folder=folder)
    if system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    name = str(fields.pop("id")) if "id" in mapping else str(source_record.number)
    kind = str(fields["source"]) if "source" in mapping else ""
    return Row(id=name, messages=messages, fields=with_template_arguments(fields, place), source=kind)


def with_template_arguments(fields: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The columns, with `chat_template_kwargs` as a mapping without null: in parquet, each row has the names of all rows.

    Example: `{"chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": None}}` gives
    `{"chat_template_kwargs": {"enable_thinking": False}}`. The mapping may also be given as JSON text. Raises DataError.
    """
    column = "chat_template_kwargs"
    given = fields.get(column)
    if given is None:
        return {name: value for name, value in fields.items() if name != column}
    if isinstance(given, str):
        given = parse_json(given or "{}", where=f"{place}: the column {column!r}", error=DataError)
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise DataError(
            f"{place}: the column {column!r} is {given!r:.80}; it must be an object with the arguments of the chat template, "
            f'such as {{"enable_thinking": false}}'
        )
    return {**fields, column: {name: value for name, value in given.items() if value is not None}}


def _messages(prompt: Any, place: str, absent: AbsentValues) -> list[Message]:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{place}: the prompt must be a text or a list of messages; it is {prompt!r:.80}")
    for message in prompt:
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or not ("content" in message or message.get("tool_calls"))
        ):
            raise DataError(f"{place}: a message needs `role` and `content`; this message is {message!r:.80}")
    return [clean_message(message, f"{place}: message {number}", absent) for number, message in enumerate(prompt, 1)]
