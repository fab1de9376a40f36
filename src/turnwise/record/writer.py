"""Appends to the files of a run, one JSON object per line, and chooses which conversations of a step are kept.

A file is only appended to. Its checksum is kept up to date, so that a checkpoint can note length and checksum without reading
the file, and a resumed run can cut the file back to that length. The choice of conversations depends on the step and on the
rewards only, so a resumed run records what a run without interruption records.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.errors import RunError
from turnwise.json_yaml import yaml_text
from turnwise.record.lines import compressed_parts, is_compressed
from turnwise.record.trajectory_json import MediaStore, trajectory_line
from turnwise.types import Trajectory

if TYPE_CHECKING:
    from turnwise.options.schema import Config

# appending


def write_trajectories(path: Path, trajectories: Iterable[Trajectory], *, step: int | None = None) -> None:
    """Append trajectories to a jsonl file, which is compressed if its name ends in `.gz`; their images go into `media` beside it.
    `step` is set on each of them if given."""
    lines = trajectory_lines(path, trajectories, step=step)
    with path.open("ab") as file:
        file.writelines(compressed_parts(lines) if is_compressed(path) else lines)


def trajectory_lines(path: Path, trajectories: Iterable[Trajectory], *, step: int | None = None) -> Iterator[bytes]:
    """The lines of trajectories for the file `path`, each encoded when it is asked for. The lines of a conversation's agents
    stand before its own, so an episode whose last line is there is complete."""
    media = MediaStore(path.parent / "media")
    for trajectory in trajectories:
        for each in (*trajectory.agents, trajectory):
            if step is not None:
                each.step = step
            yield trajectory_line(each, media)


def write_config(path: Path, config: Config) -> None:
    """Write a resolved recipe, and as a comment what it said where the run has chosen a value. The file is replaced in one step:
    it is never half written."""
    text = yaml_text(config.written())
    replace_file(path, text + (f"{CHOSEN}{json.dumps(config.chosen)}\n" if config.chosen else ""))


CHOSEN = "# chosen for the machine; in the recipe: "
"""The last line of config.yaml, before options and values as JSON."""


def replace_file(path: Path, text: str) -> None:
    """Write a file in one step: after a crash, the file has its old or its new contents."""
    temporary = path.with_suffix(".writing")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


class AppendedFile:
    """A file that is only appended to, with its length and checksum."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        """Length of the file as far as it was written or compared by this object."""
        self.digest = hashlib.sha256()
        """Checksum of that part."""

    def append(self, lines: Iterable[bytes]) -> None:
        """Write lines at the end of the file, compressed if its name ends in `.gz`."""
        with self.path.open("ab") as file:
            for data in compressed_parts(lines) if is_compressed(self.path) else lines:
                file.write(data)
                self.digest.update(data)
                self.bytes += len(data)

    def mark(self) -> dict[str, Any]:
        """Length and checksum of the file: `{"bytes": ..., "sha256": ...}`. The file is on the disk when this returns."""
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())
        return {"bytes": self.bytes, "sha256": self.digest.hexdigest()}

    def compare(self, mark: Mapping[str, Any]) -> str | None:
        """Read the file up to the length of `mark`. Returns the difference, as a clause of a message, or None."""
        self.bytes, self.digest = 0, hashlib.sha256()
        if not self.path.exists():
            return None
        with self.path.open("rb") as file:
            while self.bytes < mark["bytes"] and (part := file.read(min(1 << 20, mark["bytes"] - self.bytes))):
                self.digest.update(part)
                self.bytes += len(part)
        if self.bytes < mark["bytes"]:
            return f"it has {self.bytes} bytes, and had {mark['bytes']} when the checkpoint was made"
        return None if self.digest.hexdigest() == mark["sha256"] else "its checksum is not that of the checkpoint"

    def cut(self) -> None:
        """Remove everything after the part that was compared."""
        if self.path.exists() and self.path.stat().st_size > self.bytes:
            os.truncate(self.path, self.bytes)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError inside into a RunError that says which file could not be written, why, and how to continue."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{error.filename or path} cannot be written: {error.strerror or error}. Earlier steps are complete; free disk "
            f"space or fix the permissions, and resume with resume=auto"
        ) from error


# the choice of conversations


@dataclass(frozen=True, slots=True)
class Retention:
    """The options `record.every` and `record.best_and_worst`."""

    every: int = 1
    """Each so many steps is recorded, and the first step and the last step."""
    best_and_worst: int | None = None
    """How many conversations with the highest rewards, with the lowest rewards and with an error are kept of each group."""

    @property
    def drops(self) -> bool:
        """Whether a conversation may be dropped."""
        return self.every > 1 or self.best_and_worst is not None

    def kept(self, trajectories: Sequence[Trajectory], *, step: int, steps: int) -> list[Trajectory]:
        """The conversations of step `step` of `steps` that are recorded, in their order."""
        if step % self.every and step not in (1, steps):
            return []
        if (count := self.best_and_worst) is None:
            return list(trajectories)
        groups: dict[str, list[Trajectory]] = {}
        for trajectory in trajectories:
            groups.setdefault(trajectory.group, []).append(trajectory)
        kept = {id(trajectory) for group in groups.values() for trajectory in _best_and_worst(group, count)}
        return [trajectory for trajectory in trajectories if id(trajectory) in kept]


def _best_and_worst(group: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """Of equal rewards, the first conversations count as the best, and the last as the worst."""
    scored = [trajectory for trajectory in group if trajectory.reward is not None]
    scored.sort(key=lambda trajectory: -(trajectory.reward or 0.0))  # stable
    unscored = [trajectory for trajectory in group if trajectory.reward is None and not trajectory.failed]
    failed = [trajectory for trajectory in group if trajectory.failed]
    return [*scored[:count], *scored[-count:], *unscored[:count], *failed[:count]]
