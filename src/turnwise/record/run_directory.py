"""The directory of a run: which files it has, who may write them, and how a killed run is resumed.

`trajectories.jsonl` holds one object per trajectory, `metrics.jsonl` one per step. Both are only appended to; a checkpoint
notes their lengths and checksums, and resuming cuts them back to that, so that no step is in them twice.

One process at a time writes a directory. The lock is the kernel's: it is gone with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import struct
import sys
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.errors import RunError
from turnwise.json_yaml import parse_json, read_text
from turnwise.record.lines import SUFFIX, LineFile
from turnwise.record.reader import read_lines
from turnwise.record.trajectory_json import encode_line
from turnwise.record.writer import AppendedFile, replace_file, trajectory_lines, write_config, writing
from turnwise.types import Trajectory

if TYPE_CHECKING:
    from turnwise.options.schema import (
        Config,
    )  # takes half a second to load, which commands that only read runs do not need

# the lock

_log = logging.getLogger(__name__)
_LOCK = ".lock"
_HELD: set[tuple[int, int]] = set()
"""The lock files that this process holds, by device and inode."""
_FLOCK = "@qqihh" if sys.platform == "darwin" else "@hhqqi"
"""The fields of the kernel's `struct flock`: type, whence, start, length and process, in the order of the system."""


class RunLock:
    """A lock on a directory that exists, held from `__init__` until `release`, or until the process ends.

    Raises RunError if another process holds it. A POSIX record lock: child processes do not inherit it, so a child that
    outlives the run does not hold it.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / _LOCK
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._close = weakref.finalize(self, _close, descriptor, identity := _identity(os.fstat(descriptor)))
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                _log.warning(
                    "%s cannot be locked (%s), so a second run in the same directory would not be detected",
                    directory,
                    error.strerror,
                )
                return
            holder = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip() or "unknown"
            self._close()
            raise RunError(
                f"another process ({holder}) is writing {directory}: wait until it has ended, or choose another directory"
            ) from None
        _HELD.add(identity)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Let others write the directory. A second call does nothing."""
        self._close()


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _close(descriptor: int, identity: tuple[int, int]) -> None:
    _HELD.discard(identity)
    os.close(descriptor)


def is_being_written(directory: Path) -> bool:
    """Whether a process holds the lock of a directory, this process included. Takes no lock, and changes nothing."""
    path = directory / _LOCK
    try:
        # a process that closes any descriptor of a file loses its own locks on it: a file that this process holds stays closed
        if _identity(path.stat()) in _HELD:
            return True
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    exclusive = {"hhqqi": (fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0), "qqihh": (0, 0, 0, fcntl.F_WRLCK, os.SEEK_SET)}
    layout = _FLOCK.lstrip("@")
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, struct.pack(_FLOCK, *exclusive[layout]))
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return struct.unpack(_FLOCK, answer)[layout.index("h")] != fcntl.F_UNLCK


# the directory


class RunDirectory:
    """`runs/<name>/`: the resolved recipe, metrics, trajectories, checkpoints and images of one run.

    `kind` is the command whose run it is: `train` or `sft`. `compressed` is whether the files of conversations are.
    """

    def __init__(self, path: str | Path, *, kind: str = "train", compressed: bool = False) -> None:
        self._given = Path(path)
        self.path = self._given.absolute()  # user code may change the working directory
        self.kind = kind
        self.config = self.path / "config.yaml"
        self.curve = self.path / "curve.png"
        self.about = self.path / "run.json"
        """Kind of the run, the step of its newest checkpoint, options that were changed in a resume, and how it ended."""
        self.metrics = self.path / "metrics.jsonl"
        suffix = SUFFIX if compressed else ""
        self.trajectories = self.path / f"trajectories.jsonl{suffix}"
        self.evaluations = self.path / "evaluations.jsonl"
        self.eval_trajectories = self.path / f"eval_trajectories.jsonl{suffix}"
        self.timeline = self.path / "timeline.jsonl"
        self.warnings = self.path / "warnings.jsonl"
        paths = (self.metrics, self.trajectories, self.evaluations, self.eval_trajectories, self.timeline)
        self.appended = {path.name: AppendedFile(path) for path in paths}
        """The files that are only appended to, by name."""
        self.run_lock: RunLock | None = None
        self._changes: list[Mapping[str, Any]] = []

    @property
    def shown(self) -> Path:
        """The path for messages: as it was given, unless the working directory has changed."""
        return self._given if self._given.absolute() == self.path else self.path

    def lock(self) -> None:
        """Keep other processes from writing to the directory until `release`; does nothing if it does not exist yet.

        Raises RunError if another process holds the lock.
        """
        if self.run_lock is None and self.path.is_dir():
            with writing(self.path):
                self.run_lock = RunLock(self.path)

    def release(self) -> None:
        """Let other processes write to the directory. Writes the index of the conversations (`LineFile`)."""
        if self.run_lock is not None:
            for path in (self.trajectories, self.eval_trajectories):
                with contextlib.suppress(OSError, RunError):  # the next reader of the file builds the index
                    LineFile(path)
            self.run_lock.release()
            self.run_lock = None

    def refuse_unnamed_run(self, config: Config) -> None:
        """Raise RunError if the directory holds a run and the recipe says neither to resume nor to replace it."""
        if self._holds_run() and not config.replace and config.resume != "auto":
            raise RunError(
                f"{self.shown} contains a run already. To resume it: resume=auto; to move it away and start a new run: "
                f"replace=true; or choose another directory: output=runs/<name>"
            )

    def prepare(self, config: Config, *, resuming: bool) -> list[str]:
        """Make the directory ready for the run, and write the resolved recipe. Returns notes for the user.

        Raises RunError as `refuse_unnamed_run`.
        """
        notes: list[str] = []
        if not resuming:
            self.refuse_unnamed_run(config)
            if config.replace and self._holds_run():
                notes.append(f"the previous run was moved to {move_away(self.path)}")
                self.release()
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock()
            if not resuming:
                self.note_checkpoint(None)
            write_config(self.config, config)
        return notes

    def refuse_lost_checkpoints(self) -> None:
        """Refuse to start a run where there are no checkpoints but files of a run, which a new run would overwrite.

        Raises RunError.
        """
        if not self._holds_run():
            return
        keep = "To keep it, choose another directory: output=runs/<name>; to move it away and start a new run: replace=true"
        about = self._read_about()
        if about is None:
            raise RunError(
                f"{self.shown} contains files of a run, and no checkpoint to resume from (`turnwise rollout` writes none). "
                f"{keep}"
            )
        if about["kind"] != self.kind:
            raise RunError(
                f"{self.shown} contains a run of `turnwise {about['kind']}`, and no checkpoint of it. {keep}"
            )
        if about["checkpoint"] is not None:
            raise RunError(
                f"the checkpoints of the run in {self.shown} were removed; the last was of step {about['checkpoint']}. Restore "
                f"{self.path / 'checkpoints'} from a copy. {keep}"
            )

    def _read_about(self) -> dict[str, Any] | None:
        """`run.json`, or None where it is missing or damaged."""
        try:
            about = parse_json(read_text(self.about, error=RunError), where=str(self.about), error=RunError)
        except RunError:
            return None
        return about if isinstance(about, dict) and {"kind", "checkpoint"} <= about.keys() else None

    def note_checkpoint(self, step: int | None) -> None:
        """Note that there is a checkpoint of `step`, so that a lost checkpoint is noticed. None: there is none yet.

        Raises RunError if it cannot be written.
        """
        self._write_about(step, {})

    def note_end(self, how: str, *, step: int, reason: str | None = None) -> None:
        """Note how the run ended after `step` steps: `finished`, `stopped` (by a signal, a callback or a monitor) or `failed`.

        A run that goes on removes the note (`note_checkpoint`), and a process that is killed writes none.

        Raises RunError if it cannot be written.
        """
        about = self._read_about() or {"checkpoint": None}
        ended = {"how": how, "step": step, "time": round(time.time(), 3), "reason": reason}
        self._write_about(about["checkpoint"], {"ended": ended})

    def note_changes(self, changes: Sequence[Mapping[str, Any]]) -> None:
        """Note options that were changed in a resume, each as `{"after_step", "option", "from", "to"}`. They are in run.json from
        the next note on."""
        self._changes = list(changes)

    def _write_about(self, checkpoint: int | None, more: Mapping[str, Any]) -> None:
        changes = {"changes": self._changes} if self._changes else {}
        with writing(self.path):
            replace_file(
                self.about, json.dumps({"kind": self.kind, "checkpoint": checkpoint, **changes, **more}) + "\n"
            )

    def write_step(self, metrics: Mapping[str, Any], trajectories: Iterable[Trajectory]) -> None:
        """Append the metrics and trajectories of a step; `metrics["step"]` becomes the step of each trajectory.

        Raises RunError if they cannot be written.
        """
        self._append(self.trajectories, trajectories, self.metrics, metrics)

    def write_unfinished(self, trajectories: Iterable[Trajectory], *, step: int) -> None:
        """Append the conversations of a step that ended the run. Raises RunError."""
        with writing(self.path):
            self.appended[self.trajectories.name].append(trajectory_lines(self.trajectories, trajectories, step=step))

    def write_evaluation(self, summary: Mapping[str, Any], trajectories: Iterable[Trajectory]) -> None:
        """Append an evaluation: its summary to evaluations.jsonl, its conversations to eval_trajectories.jsonl."""
        self._append(self.eval_trajectories, trajectories, self.evaluations, summary)

    def _append(
        self, file: Path, trajectories: Iterable[Trajectory], summary_file: Path, summary: Mapping[str, Any]
    ) -> None:
        with writing(self.path):
            self.appended[file.name].append(trajectory_lines(file, trajectories, step=summary["step"]))
            self.appended[summary_file.name].append([encode_line(summary)])

    def write_timeline(self, entry: Mapping[str, Any]) -> None:
        """Append the timeline of a step. Raises RunError if it cannot be written."""
        with writing(self.path):
            self.appended[self.timeline.name].append([encode_line(entry)])

    def write_warning(self, *, step: int, name: str, text: str) -> None:
        """Append a warning of a step to warnings.jsonl. Raises RunError if it cannot be written."""
        with writing(self.path), self.warnings.open("ab") as file:
            file.write(encode_line({"step": step, "name": name, "text": text}))

    def cut_warnings(self, step: int) -> None:
        """Remove the warnings of the steps after `step`. They are written behind the checkpoint of their step, so the mark of a
        checkpoint says nothing of them.

        Raises RunError if the file cannot be read or written.
        """
        if self.warnings.is_file():
            kept = [line for line in read_lines(self.warnings, damaged=[]) if line.get("step", 0) <= step]
            with writing(self.path):
                replace_file(self.warnings, "".join(encode_line(line).decode() for line in kept))

    def marks(self) -> dict[str, dict[str, Any]]:
        """Length in bytes and checksum of each appended file, once its contents are on the disk."""
        with writing(self.path):
            return {name: file.mark() for name, file in self.appended.items()}

    def cut_back(self, marks: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Remove what was appended after `marks` was made; without marks, everything. Returns notes for the user.

        Raises RunError, with all files as they were, if the part before the mark has changed since.
        """
        notes: list[str] = []
        with writing(self.path):
            for name, file in self.appended.items():
                mark = marks.get(name, {"bytes": 0, "sha256": hashlib.sha256().hexdigest()})
                if (problem := file.compare(mark)) is not None:
                    raise RunError(
                        f"{file.path} is damaged: {problem}. Restore it from a copy; or move it away, and the run resumes "
                        f"without its content"
                    )
                if mark["bytes"] and not file.path.exists():
                    notes.append(f"{file.path} was removed: its lines of earlier steps are lost")
            for file in self.appended.values():
                file.cut()
        return notes

    def _holds_run(self) -> bool:
        paths = (self.about, self.config, *(file.path for file in self.appended.values()))
        return any(path.exists() for path in paths)


def move_away(path: Path) -> Path:
    """Rename a directory and return its new path; the new name has the time, and a number where that name is taken.

    Raises RunError if it cannot be renamed.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    target = path.with_name(f"{path.name}-until-{stamp}")
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}-until-{stamp}-{number}")
    with writing(path):
        shutil.move(path, target)
    return target


def refuse_run_directory(path: Path) -> None:
    """Refuse a directory that holds a training run: other conversations would overwrite its record.

    Raises RunError.
    """
    if (path / "run.json").exists() or (path / "checkpoints").exists():
        raise RunError(
            f"{path} contains a run of `turnwise train` or `sft`: choose another directory for other conversations"
        )
