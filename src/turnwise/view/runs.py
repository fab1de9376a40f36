"""What the viewer knows of one run directory: its files, metrics, conversations and images."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from turnwise.errors import RunError
from turnwise.record.metric_names import metric_of
from turnwise.record.reader import read_lines
from turnwise.record.token_texts import recorded_options, token_texts
from turnwise.sampling import LogprobKind, Sampling
from turnwise.view.index import ConversationIndex

__all__ = ["FILES", "ViewedRun", "find_runs", "times"]

FILES = {"train": "trajectories.jsonl", "eval": "eval_trajectories.jsonl"}
"""The files of conversations: those of the steps or of a rollout, and those of the evaluations on held-out rows."""
_METRICS = {"train": "metrics.jsonl", "eval": "evaluations.jsonl"}


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run directories among `paths` and directly below them, the newest last.

    Raises RunError if a path is neither a run nor a directory that contains runs.
    """
    runs: list[Path] = []
    for path in paths:
        if _is_run(path):
            found = [path]
        else:
            below = sorted(path.iterdir()) if path.is_dir() else []
            found = sorted((p for p in below if p.is_dir() and _is_run(p)), key=lambda p: p.stat().st_mtime)
        if not found:
            raise RunError(
                f"{path.absolute()} is not a run and contains none: a run has the file trajectories.jsonl. Give the directory "
                f"of a run, such as runs/demo, or a directory of runs, such as runs"
            )
        runs += [run for run in found if run.resolve() not in {other.resolve() for other in runs}]
    return runs


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in (*FILES.values(), *_METRICS.values()))


class ViewedRun:
    """A run directory that the viewer shows. It is read again when it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.indexes = {kind: ConversationIndex(path / name) for kind, name in FILES.items()}
        self._metrics: dict[str, tuple[tuple[int, int], list[dict[str, Any]]]] = {}

    def summary(self) -> dict[str, Any]:
        """Name, path, and how much there is of everything. The page asks for it again while the run goes on."""
        return {
            "name": self.path.name,
            "path": str(self.path.absolute()),
            "conversations": {kind: len(index) for kind, index in self.indexes.items()},
            "lines": {kind: index.lines for kind, index in self.indexes.items()},
            "metrics": {kind: len(self.metrics(kind)) for kind in _METRICS},
        }

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl (`train`) or evaluations.jsonl (`eval`). Raises RunError if a line is damaged."""
        path = self.path / _METRICS[kind]
        try:
            status = path.stat()
        except OSError:
            return []
        stamp = (status.st_size, status.st_mtime_ns)
        if self._metrics.get(kind, (None, []))[0] != stamp:
            self._metrics[kind] = (stamp, list(read_lines(path)))
        return self._metrics[kind][1]

    def metric_table(self, kind: str) -> dict[str, Any]:
        """The metrics as columns, with the unit and meaning of each."""
        lines = self.metrics(kind)
        names = list(dict.fromkeys(name for line in lines for name in line))
        about = {name: metric for name in names if (metric := metric_of(name)) is not None}
        return {
            "columns": {name: [line.get(name) for line in lines] for name in names},
            "about": {name: {"unit": metric.unit, "meaning": metric.meaning} for name, metric in about.items()},
        }

    def conversation(self, kind: str, number: int) -> dict[str, Any]:
        """A conversation as it was recorded, with the text of each token (`token_texts`, one list for each segment).

        `exact_logprobs` is whether the engine's log-probabilities are those of the sampled distribution, as the trainer's are.
        Raises RunError if there is none of this number, or its line is damaged.
        """
        index = self.indexes[kind]
        try:
            record = json.loads(index.line(number))
        except (ValueError, RecursionError) as error:
            raise RunError(f"{index.path}:{number + 1} is damaged: {error}") from None
        segments = record.get("segments") if isinstance(record, dict) else None
        if not isinstance(segments, list):
            raise RunError(f"{index.path}:{number + 1} is damaged: it is not a conversation")
        texts = [self._texts(segment.get("token_ids") or []) for segment in segments]
        exact = record.get("logprob_kind") in self._exact_kinds
        return {**record, "number": number, "token_texts": texts, "exact_logprobs": exact}

    def image(self, name: str) -> Path | None:
        """The file of a recorded image by its sha256; None if there is none."""
        path = self.path / "media" / f"{name}.png"
        return path if len(name) == 64 and name.isalnum() and path.is_file() else None

    def timeline(self, step: int) -> list[dict[str, Any]]:
        """What happened when in a training step: for each conversation, the times of its turns, in Unix seconds."""
        numbers = self.indexes["train"].numbers_of(step)
        return [times(self.conversation_record("train", number), number) for number in numbers]

    def conversation_record(self, kind: str, number: int) -> dict[str, Any]:
        """A conversation as it was recorded. Raises RunError."""
        try:
            record = json.loads(self.indexes[kind].line(number))
        except (ValueError, RecursionError):
            return {}
        return record if isinstance(record, dict) else {}

    def close(self) -> None:
        for index in self.indexes.values():
            index.close()

    @cached_property
    def _decode(self) -> Callable[[int], str] | None:
        try:
            return token_texts(self.path)
        except RunError:  # the ids are shown without texts
            return None

    @cached_property
    def _exact_kinds(self) -> Collection[str]:
        """The kinds of log-probability that the recipe's sampling makes equal to those of the sampled distribution."""
        options = recorded_options(self.path).get("sampling")
        if not isinstance(options, dict):
            return {LogprobKind.SAMPLED}
        known = {name: options[name] for name in ("temperature", "top_p", "top_k", "min_p") if name in options}
        return Sampling(**known).exact_kinds

    def _texts(self, token_ids: Sequence[int]) -> list[str | None]:
        if self._decode is None:
            return [None] * len(token_ids)
        cache = {token: self._decode(token) for token in set(token_ids)}
        return [cache[token] for token in token_ids]


def times(record: dict[str, Any], number: int) -> dict[str, Any]:
    """The times of a recorded conversation and of its turns, in Unix seconds and in seconds."""
    turns = []
    for turn in record.get("turns") or []:
        seconds = turn.get("seconds") or {}
        turns.append([turn.get("started"), seconds.get("engine") or 0, seconds.get("environment") or 0])
    return {
        "number": number,
        "id": record.get("id"),
        "started": record.get("started"),
        "seconds": record.get("seconds"),
        "turns": turns,
        "stop": record.get("stop"),
        "reward": record.get("reward"),
    }
