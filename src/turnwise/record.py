"""What a run leaves behind, written so that a run that is killed at any moment can go on.

`trajectories.jsonl` holds one object a trajectory, `metrics.jsonl` one a step. Both are only appended to; a checkpoint
remembers how long they were, and resuming cuts them back to that, so no step is in them twice. The format of a trajectory
is documented in docs/record.md and is stable.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from turnwise.config import Config
from turnwise.errors import Failed, RunError, boundary, text_of
from turnwise.gallery import Gallery
from turnwise.types import Trajectory, Turn

__all__ = ["RunDirectory", "trajectory_record", "write_config", "write_trajectories"]


def trajectory_record(trajectory: Trajectory, *, gallery: Gallery | None = None, **extra: Any) -> dict[str, Any]:
    """A trajectory as plain data: what one line of `trajectories.jsonl` holds. Its images are hung in the `gallery`."""
    shown = gallery or Gallery(None)
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
        "drift": trajectory.drift,
        "seconds": round(trajectory.seconds, 4),
    }


def _turn(turn: Turn, trajectory: Trajectory, shown: Gallery) -> dict[str, Any]:
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


def _written(shown: Gallery, value: Any) -> Any:
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
    gallery = Gallery(path.parent / "media")
    # half of a surrogate pair, which a model can write, becomes \\udxxx: JSON's own way to say it
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(_line(trajectory_record(one, gallery=gallery, **extra)) for one in trajectories)


def write_config(path: Path, config: Config) -> None:
    """Write a resolved recipe, whole or not at all."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    temporary = path.with_suffix(".writing")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


class RunDirectory:
    """`runs/<name>/`: the resolved recipe, metrics, trajectories, checkpoints and pictures of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"
        self.trajectories = self.path / "trajectories.jsonl"
        self.evaluations = self.path / "evaluations.jsonl"
        self.config = self.path / "config.yaml"
        self.curve = self.path / "curve.png"

    def prepare(self, config: Config, *, resuming: bool) -> list[str]:
        """Make the directory ready and write the resolved recipe. Returns notes to show.

        Raises RunError if there is a run in it already, and the recipe says neither to go on nor to replace it.
        """
        notes: list[str] = []
        if not resuming and any(path.exists() for path in (self.config, *self._appended())):
            if not config.replace and config.resume != "auto":
                raise RunError(
                    f"{self.path} holds a run already. Go on with it: resume=auto; begin anew and keep the old one under "
                    f"another name: replace=true; or choose another place: output=runs/<name>"
                )
            if config.replace:
                notes.append(f"the former run is now in {self._move_away()}")
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if resuming:
                notes += self._differences(config)
            write_config(self.config, config)
        return notes

    def write_step(self, metrics: Mapping[str, Any], trajectories: Iterable[Trajectory]) -> None:
        """Append what one step did.

        Raises RunError if it cannot be written.
        """
        with writing(self.path):
            write_trajectories(self.trajectories, trajectories, step=metrics["step"])
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(_line(metrics))

    def write_evaluation(self, summary: Mapping[str, Any], trajectories: Iterable[Trajectory]) -> None:
        """Append an evaluation: its summary to evaluations.jsonl, its conversations to eval_trajectories.jsonl."""
        with writing(self.path):
            write_trajectories(self.path / "eval_trajectories.jsonl", trajectories, step=summary["step"])
            with self.evaluations.open("a", encoding="utf-8") as file:
                file.write(_line(summary))

    def lengths(self) -> dict[str, int]:
        """How long the appended files are now, in bytes."""
        return {path.name: path.stat().st_size if path.exists() else 0 for path in self._appended()}

    def cut_back(self, lengths: Mapping[str, int]) -> None:
        """Take back what was appended after `lengths` was read."""
        with writing(self.path):
            for path in self._appended():
                length = lengths.get(path.name, 0)
                if path.exists() and path.stat().st_size > length:
                    os.truncate(path, length)

    def _appended(self) -> list[Path]:
        return [self.metrics, self.trajectories, self.evaluations, self.path / "eval_trajectories.jsonl"]

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

    def _differences(self, config: Config) -> list[str]:
        """What the recipe says now and did not say when the run began."""
        if not self.config.exists():
            return []
        old, new = _flat(yaml.safe_load(self.config.read_text(encoding="utf-8"))), _flat(config.model_dump(mode="json"))
        changed = [key for key in new if key in old and old[key] != new[key] and key not in ("resume", "replace")]
        return [f"going on with {key}={new[key]} (was {old[key]})" for key in changed]


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


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
