"""Labels and notes that a person gave to conversations: the file `labels.json` beside the record.

The viewer writes it, and `turnwise dataset --label` reads it. The record itself is not changed. A resumed run samples
conversations of the same ids and steps again: a label has the checksum of the line that the person read, and does not hold for
another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from turnwise.errors import RunError

_FILE = "labels.json"
_LOCK = ".labels.json.lock"
_THREADS = threading.Lock()
_SCHEMA = 1
_MOST_REVISIONS = 2**53 - 1  # a number of JavaScript
MOST_LABELS, LONGEST_LABEL, LONGEST_NOTE = 20, 60, 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """The labels of one conversation, and a note. `kind` is `train` or `eval`; an evaluation has the same ids in each step."""

    kind: str
    id: str
    step: int | None
    checksum: str
    """Of the line of the record that the person read (`turnwise.record.lines.line_checksum`)."""
    labels: tuple[str, ...] = ()
    note: str = ""
    revision: int = 0
    """A random number, new with each change: labels that were removed and given again differ. 0: it is not in the file."""


class LabelChanged(RunError):
    """Another writer has changed the labels of the conversation since they were read."""


def read_labels(run: Path) -> list[Label]:
    """All labels of a run; empty if there is no file. Raises RunError if it is damaged or of a newer version."""
    path = run / _FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] > _SCHEMA:
            raise RunError(f"{path} has the schema {content['schema']}; this version of turnwise reads {_SCHEMA}")
        return [_label(entry) for entry in content["conversations"]]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged ({error}): correct it, or delete it") from None


def _label(entry: dict[str, Any]) -> Label:
    label = Label(**{"checksum": "", **entry, "labels": tuple(entry["labels"])})
    texts = (label.kind, label.id, label.checksum, label.note, *label.labels)
    if not all(isinstance(text, str) for text in texts) or not isinstance(label.step, int | None):
        raise TypeError(f"the entry of {label.id!r} has another type")
    return label


def write_label(run: Path, label: Label) -> Label:
    """Write the labels of one conversation, and return them with the new revision. No label and no note: they are removed.

    `label.revision` is that of the labels that the writer saw. Raises LabelChanged if another writer was faster, RunError if the
    file cannot be read or written, or a text is too long.
    """
    labels = tuple(dict.fromkeys(text.strip() for text in label.labels if text.strip()))
    if len(labels) > MOST_LABELS or any(len(text) > LONGEST_LABEL for text in labels) or len(label.note) > LONGEST_NOTE:
        raise RunError(
            f"a conversation has at most {MOST_LABELS} labels of {LONGEST_LABEL} characters, and a note of {LONGEST_NOTE}: "
            f"shorten them"
        )
    with _alone(run):
        known = {(one.kind, one.id, one.step, one.checksum): one for one in read_labels(run)}
        key = label.kind, label.id, label.step, label.checksum
        present = known.pop(key, None)
        revision = 0 if present is None else present.revision
        if revision != label.revision:
            raise LabelChanged(f"the labels of {label.id} were changed meanwhile: load the page again")
        written = Label(**{**asdict(label), "labels": labels, "revision": 1 + secrets.randbelow(_MOST_REVISIONS)})
        if labels or written.note:
            known[key] = written
        _replace(run / _FILE, list(known.values()))
    return (
        written
        if labels or written.note
        else Label(kind=label.kind, id=label.id, step=label.step, checksum=label.checksum)
    )


@contextlib.contextmanager
def _alone(run: Path) -> Iterator[None]:
    """Waits until no other writer changes the labels. A POSIX record lock on a file that is open for writing: NFS has no other
    exclusive lock. It does not hold between the threads of a process, so they have a lock of their own."""
    path = run / _LOCK
    with _THREADS:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise RunError(f"labels cannot be saved: {path} cannot be opened ({error.strerror or error})") from None
        try:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                raise RunError(f"labels cannot be saved: {path} cannot be locked ({error.strerror or error})") from None
            yield
        finally:
            os.close(descriptor)


def _replace(path: Path, labels: Sequence[Label]) -> None:
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    content = {"schema": _SCHEMA, "conversations": [asdict(label) for label in labels]}
    try:
        unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
