"""Reads the files of a run: trajectories, one by one or by their number, and the objects of other jsonl files.

Every defect of a file is a `RunError` with the file and the line. What a line holds is the business of `decode`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from turnwise.errors import RunError
from turnwise.json_yaml import parse_json
from turnwise.record.decode import decode_trajectory
from turnwise.record.line_index import line_offsets
from turnwise.types import Trajectory

__all__ = ["RecordedTrajectories", "evaluated_runs", "read", "read_lines", "trajectories_file"]


def trajectories_file(run_or_file: str | Path) -> Path:
    """`trajectories.jsonl` of a run directory, or the file itself. For an evaluation of a single model: that of the model.

    Raises RunError if there is no such file.
    """
    path = Path(run_or_file)
    file = path / "trajectories.jsonl" if path.is_dir() else path
    if path.is_dir() and not file.is_file() and (models := evaluated_runs(path)):
        if len(models) > 1:
            names = ", ".join(str(model) for model in models)
            raise RunError(f"{path.absolute()} is an evaluation of {len(models)} models: read one of {names}")
        file = models[0] / "trajectories.jsonl"
    if not file.is_file():
        raise RunError(f"there is no file {file.absolute()}; give a run directory or a file of trajectories")
    return file


def evaluated_runs(path: Path) -> list[Path]:
    """The run directories of the models in the directory of an evaluation; empty for another directory."""
    if (path / "trajectories.jsonl").is_file():
        return []
    return sorted(
        file.parent for file in path.glob("*/evaluation.json") if (file.parent / "trajectories.jsonl").is_file()
    )


def read(run_or_file: str | Path) -> Iterator[Trajectory]:
    """The trajectories of a run or of one of its files, in their order, each read when it is asked for.

    A last line that a killed run has not finished is skipped. Images are references (`StoredImage`).

    Raises RunError if the file is missing or cannot be read, or a line is damaged or has a newer schema.
    """
    path = trajectories_file(run_or_file)
    for number, value in _objects(path):
        yield decode_trajectory(value, where=f"{path}:{number}", media=path.parent / "media")


class RecordedTrajectories(Sequence[Trajectory]):
    """The trajectories of a run or of one of its files, by number: `RecordedTrajectories("runs/demo")[-1]`.

    Opening the file finds where each line begins (`line_index`); a trajectory is read when it is asked for, without reading the
    others. Lines that are appended later are not seen.

    Raises RunError if the file is missing or cannot be read; on access, if the line is damaged or has a newer schema.
    """

    def __init__(self, run_or_file: str | Path) -> None:
        self.path = trajectories_file(run_or_file)
        try:
            self._offsets: array[int] = line_offsets(self.path)
        except OSError as error:
            raise _unreadable(self.path, error) from None

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...

    @overload
    def __getitem__(self, index: slice) -> list[Trajectory]: ...

    def __getitem__(self, index: int | slice) -> Trajectory | list[Trajectory]:
        if isinstance(index, slice):
            return [self._read(number) for number in range(*index.indices(len(self)))]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"there is no trajectory {index}: {self.path} has {len(self)}")
        return self._read(number)

    def _read(self, number: int) -> Trajectory:
        begin, end = self._offsets[number], self._offsets[number + 1]
        where = f"{self.path}:{number + 1}"
        try:
            with self.path.open("rb") as file:
                file.seek(begin)
                line = file.read(end - begin)
        except OSError as error:
            raise _unreadable(self.path, error) from None
        return decode_trajectory(_parsed(line, where), where=where, media=self.path.parent / "media")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a jsonl file such as `metrics.jsonl`; none where there is no such file.

    A last line that a killed run has not finished is skipped. Raises RunError if the file cannot be read or another line is
    damaged.
    """
    if path.is_file():
        for _, value in _objects(path):
            yield value


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number of each line, and its object."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    value = _parsed(line, f"{path}:{number}")
                except RunError:
                    if line.endswith(b"\n"):
                        raise
                    return  # the last line, and not finished
                yield number, value
    except OSError as error:
        raise _unreadable(path, error) from None


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RunError(f"{where} is damaged: it is not UTF-8 ({error.reason} at byte {error.start + 1})") from None
    value = parse_json(text, where=where, error=RunError, own=True)
    if not isinstance(value, dict):
        raise RunError(f"{where} is damaged: a line is a JSON object; this is a {type(value).__name__}")
    return value


def _unreadable(path: Path, error: OSError) -> RunError:
    return RunError(f"{path} cannot be read: {error.strerror or error}")
