"""What a run leaves behind, written so that a run that is killed at any moment can go on.

`trajectories.jsonl` holds one object a trajectory, `metrics.jsonl` one a step. Both are only appended to; a checkpoint
remembers how long they were and their checksums, and resuming cuts them back to that, so no step is in them twice. The format of
a trajectory is documented in docs/record.md and is stable.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from turnwise.config.schema import Config
from turnwise.errors import Failed, RunError, boundary, text_of
from turnwise.record.media_store import MediaStore
from turnwise.record.run_lock import RunLock
from turnwise.types import Trajectory, Turn

__all__ = ["RunDirectory", "refuse_run_directory", "trajectory_record", "write_config", "write_trajectories"]


def trajectory_record(trajectory: Trajectory, *, gallery: MediaStore | None = None, **extra: Any) -> dict[str, Any]:
    """A trajectory as plain data: what one line of `trajectories.jsonl` holds. Its images are hung in the `gallery`."""
    shown = gallery or MediaStore(None)
    fields = {name: value for name, value in trajectory.row.fields.items() if name != "multi_modal_inputs"}  # tensors
    return {
        **extra,
        "id": trajectory.id,
        "group": trajectory.group,
        "row": {**_written(shown, fields), "id": trajectory.row.id},
        "stop": trajectory.stop,
        "error": None if trajectory.error is None else dataclasses.asdict(trajectory.error),
        "reward": trajectory.reward,
        "rewards": trajectory.rewards,
        **({"metrics": trajectory.metrics} if trajectory.metrics else {}),
        "tools": list(trajectory.tools),
        "messages": _written(shown, trajectory.messages),
        "turns": [_turn(turn, trajectory, shown) for turn in trajectory.turns],
        "segments": [
            {
                "token_ids": list(segment.token_ids),
                "logprobs": [round(logprob, 7) for logprob in segment.logprobs],
                "turn": list(segment.turn),
                "version": list(segment.version),
                **({"media": [shown.label(one) for one in segment.media]} if segment.media else {}),
            }
            for segment in trajectory.segments
        ],
        "logprob_kind": trajectory.logprob_kind,
        "template_mismatch": trajectory.template_mismatch,
        "seconds": round(trajectory.seconds, 4),
    }


def _turn(turn: Turn, trajectory: Trajectory, shown: MediaStore) -> dict[str, Any]:
    outcomes = {outcome.id: outcome for outcome in turn.outcomes}
    calls: list[dict[str, Any]] = []
    for call in turn.calls:
        outcome = outcomes.get(call.id)
        calls.append(
            {
                "id": call.id,
                "name": call.name,
                "arguments": _written(shown, call.arguments),
                "text": call.text,
                "content": outcome.content if outcome else None,
                "error": outcome.error if outcome else None,
                **({"traceback": outcome.traceback} if outcome and outcome.traceback else {}),
                "reward": outcome.reward if outcome and math.isfinite(outcome.reward) else None,
                "attempts": outcome.attempts if outcome else None,
                "seconds": round(outcome.seconds, 4) if outcome else None,
            }
        )
    return {
        "message": turn.message,
        "text": turn.text,
        "reward": turn.reward if math.isfinite(turn.reward) else None,
        "advantage": trajectory.advantages[turn.index] if trajectory.advantages else None,
        "weight": turn.weight,
        "info": _written(shown, turn.info),
        "tool_calls": calls,
        "finish_reason": turn.finish_reason,
        "seconds": {"engine": round(turn.seconds_engine, 4), "environment": round(turn.seconds_environment, 4)},
    }


def _written(shown: MediaStore, value: Any) -> Any:
    """Something of a user's as plain data; what cannot be read is named instead."""
    try:
        with boundary("record"):
            return shown.plain(value)
    except Failed as failed:
        if isinstance(failed.__cause__, OSError):
            raise failed.__cause__ from None  # an image that cannot be written is ours to tell
        told = f"cannot be written: {failed.failure.message}"
        return {"unwritable": told} if isinstance(value, Mapping) else told


def _line(value: Mapping[str, Any]) -> str:
    # what a user puts into `info` or a row need not be JSON; it must not end a run either
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=text_of) + "\n"
    except (TypeError, ValueError, RecursionError):
        return json.dumps(_plain(value), ensure_ascii=False, default=text_of) + "\n"


def _plain(value: Any, depth: int = 0) -> Any:
    """The same with what JSON has no words for: keys that are no texts, nan, a circle."""
    if depth > 80:
        return text_of(value)[:1000]
    if isinstance(value, Mapping):
        return {text_of(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_trajectories(path: Path, trajectories: Iterable[Trajectory], **extra: Any) -> None:
    """Append trajectories to a jsonl file, each with the keys in `extra` first."""
    with path.open("ab") as file:
        file.writelines(_encoded(_trajectory_lines(path, trajectories, extra)))


def _trajectory_lines(path: Path, trajectories: Iterable[Trajectory], extra: Mapping[str, Any]) -> Iterator[str]:
    gallery = MediaStore(path.parent / "media")
    return (_line(trajectory_record(one, gallery=gallery, **extra)) for one in trajectories)


def _encoded(lines: Iterable[str]) -> Iterator[bytes]:
    # half of a surrogate pair, which a model can write, becomes \\udxxx: JSON's own way to say it
    return (line.encode("utf-8", "backslashreplace") for line in lines)


def write_config(path: Path, config: Config) -> None:
    """Write a resolved recipe, whole or not at all."""
    _replace(path, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True))


def _replace(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    temporary = path.with_suffix(".writing")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


class _Appended:
    """A file that is only appended to. Its checksum is kept up to date, so that a checkpoint costs no reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        self._digest = hashlib.sha256()

    def append(self, lines: Iterable[str]) -> None:
        with self.path.open("ab") as file:
            for line in _encoded(lines):
                file.write(line)
                self._digest.update(line)
                self.bytes += len(line)

    def mark(self) -> dict[str, Any]:
        """How long it is and what its checksum is, once it is on the disk."""
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())
        return {"bytes": self.bytes, "sha256": self._digest.hexdigest()}

    def compare(self, mark: Mapping[str, Any]) -> str | None:
        """Read it up to where `mark` was made. Returns what is wrong, or None."""
        self.bytes, self._digest = 0, hashlib.sha256()
        if not self.path.exists():
            return None
        with self.path.open("rb") as file:
            while self.bytes < mark["bytes"] and (part := file.read(min(1 << 20, mark["bytes"] - self.bytes))):
                self._digest.update(part)
                self.bytes += len(part)
        if self.bytes < mark["bytes"]:
            return f"it has {self.bytes} bytes, and had {mark['bytes']} when the checkpoint was made"
        return None if self._digest.hexdigest() == mark["sha256"] else "its checksum is not that of the checkpoint"

    def cut(self) -> None:
        """Take back what stands behind the part that was compared."""
        if self.path.exists() and self.path.stat().st_size > self.bytes:
            os.truncate(self.path, self.bytes)


class RunDirectory:
    """`runs/<name>/`: the resolved recipe, metrics, trajectories, checkpoints and pictures of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"
        self.trajectories = self.path / "trajectories.jsonl"
        self.evaluations = self.path / "evaluations.jsonl"
        self.config = self.path / "config.yaml"
        self.curve = self.path / "curve.png"
        self._about = self.path / "run.json"
        self._eval_trajectories = self.path / "eval_trajectories.jsonl"
        paths = (self.metrics, self.trajectories, self.evaluations, self._eval_trajectories)
        self._appended = {path.name: _Appended(path) for path in paths}
        self._lock: RunLock | None = None
        self._kind = "train"

    def lock(self) -> None:
        """Keep other processes from writing here until `release`, if the directory is there already.

        Raises RunError if one is writing here.
        """
        if self._lock is None and self.path.is_dir():
            with writing(self.path):
                self._lock = RunLock(self.path)

    def release(self) -> None:
        """Let others write here."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def prepare(self, config: Config, *, resuming: bool, kind: str = "train") -> list[str]:
        """Make the directory ready for a run of `kind`, and write the resolved recipe. Returns notes to show.

        Raises RunError if there is a run in it already, and the recipe says neither to resume nor to replace it.
        """
        notes: list[str] = []
        self._kind = kind
        if not resuming and self._holds_a_run():
            if not config.replace and config.resume != "auto":
                raise RunError(
                    f"{self.path} holds a run already. Go on with it: resume=auto; begin anew and keep the old one under "
                    f"another name: replace=true; or choose another place: output=runs/<name>"
                )
            if config.replace:
                notes.append(f"the former run is now in {self._move_away()}")
                self.release()
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock()
            if not resuming:
                self.note_checkpoint(None)
            write_config(self.config, config)
        return notes

    def refuse_lost_checkpoints(self, kind: str) -> None:
        """Refuse to begin anew where there are no checkpoints, but something that beginning anew would destroy.

        Raises RunError.
        """
        if not self._holds_a_run():
            return
        keep = "To keep it, choose another place: output=runs/<name>; to begin anew and move it away: replace=true"
        try:
            about = json.loads(self._about.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            about = None
        if not isinstance(about, dict) or not {"kind", "checkpoint"} <= about.keys():
            raise RunError(
                f"{self.path} holds files of a run and no checkpoint to resume from (`turnwise rollout` makes none). {keep}"
            )
        if about["kind"] != kind:
            raise RunError(f"{self.path} holds a run of `turnwise {about['kind']}`, and no checkpoint of it. {keep}")
        if about["checkpoint"] is not None:
            raise RunError(
                f"the checkpoints of the run in {self.path} are gone; the last was of step {about['checkpoint']}. Restore "
                f"{self.path / 'checkpoints'} from a copy. {keep}"
            )

    def note_checkpoint(self, step: int | None) -> None:
        """Remember that there is a checkpoint of `step`, so that its loss is noticed. None: there has been none yet.

        Raises RunError if it cannot be written.
        """
        with writing(self.path):
            _replace(self._about, json.dumps({"kind": self._kind, "checkpoint": step}) + "\n")

    def write_step(self, metrics: Mapping[str, Any], trajectories: Iterable[Trajectory]) -> None:
        """Append what one step did.

        Raises RunError if it cannot be written.
        """
        self._write(self.trajectories, trajectories, self.metrics, metrics)

    def write_evaluation(self, summary: Mapping[str, Any], trajectories: Iterable[Trajectory]) -> None:
        """Append an evaluation: its summary to evaluations.jsonl, its conversations to eval_trajectories.jsonl."""
        self._write(self._eval_trajectories, trajectories, self.evaluations, summary)

    def _write(
        self, to: Path, trajectories: Iterable[Trajectory], summary_to: Path, summary: Mapping[str, Any]
    ) -> None:
        with writing(self.path):
            self._appended[to.name].append(_trajectory_lines(to, trajectories, {"step": summary["step"]}))
            self._appended[summary_to.name].append([_line(summary)])

    def marks(self) -> dict[str, dict[str, Any]]:
        """How long the appended files are now, in bytes, and their checksums. They are on the disk after this."""
        with writing(self.path):
            return {name: file.mark() for name, file in self._appended.items()}

    def cut_back(self, marks: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Take back what was appended after `marks` was made; without marks, everything. Returns notes to show.

        Raises RunError, with all files as they were, if what was written before has changed since.
        """
        notes: list[str] = []
        with writing(self.path):
            for name, file in self._appended.items():
                mark = marks.get(name, {"bytes": 0, "sha256": hashlib.sha256().hexdigest()})
                if (problem := file.compare(mark)) is not None:
                    raise RunError(
                        f"{file.path} is damaged: {problem}. Restore it from a copy; or move it away, and the run resumes "
                        f"without what was in it"
                    )
                if mark["bytes"] and not file.path.exists():
                    notes.append(f"{file.path} is gone: what it held of earlier steps is lost")
            for file in self._appended.values():
                file.cut()
        return notes

    def _holds_a_run(self) -> bool:
        paths = (self._about, self.config, *(file.path for file in self._appended.values()))
        return any(path.exists() for path in paths)

    def _move_away(self) -> Path:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        target = self.path.with_name(f"{self.path.name}-until-{stamp}")
        number = 1
        while target.exists():
            number += 1
            target = self.path.with_name(f"{self.path.name}-until-{stamp}-{number}")
        with writing(self.path):
            shutil.move(self.path, target)
        return target


def refuse_run_directory(path: Path) -> None:
    """Refuse a directory that holds a training run: other conversations would overwrite its record.

    Raises RunError.
    """
    if (path / "run.json").exists() or (path / "checkpoints").exists():
        raise RunError(
            f"{path} holds a run of `turnwise train` or `sft`: choose another directory for other conversations"
        )


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say what could not be written and why, in one line.

    Raises RunError.
    """
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{error.filename or path} cannot be written: {error.strerror or error}. What was written before is whole; make "
            f"room or fix the permissions, and go on with resume=auto"
        ) from error
