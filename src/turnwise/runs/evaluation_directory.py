"""The directory of an evaluation: a run directory for each model below it, and eval.json with all numbers.

DIR/run.json                    {"kind": "eval", ...}
DIR/config.yaml                 the recipe
DIR/eval.json                   the results, once all models are finished
DIR/<model>/trajectories.jsonl  the conversations; each is appended when it is scored (compressed: trajectories.jsonl.gz)
DIR/<model>/metrics.jsonl       their metrics, in one line
DIR/<model>/config.yaml         the recipe with this model
DIR/<model>/evaluation.json     what the conversations depend on, compared when the evaluation is resumed
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.config.environment_values import same_value, with_digests
from turnwise.config.schema import Config
from turnwise.errors import RunError
from turnwise.json_yaml import parse_json, read_text
from turnwise.record.compression import SUFFIX, compressed_parts, is_compressed, open_lines
from turnwise.record.decode import decode_trajectory
from turnwise.record.encode import encode_line
from turnwise.record.reader import read
from turnwise.record.run_directory import move_away
from turnwise.record.run_lock import RunLock
from turnwise.record.writer import replace_file, write_config, write_trajectories, writing
from turnwise.types import Trajectory
from turnwise.user_code.live_objects import is_live

__all__ = ["EvaluationDirectory", "ModelDirectory"]

_UNUSED = (
    *("train", "loss", "correction", "credit", "critic", "sft", "checkpoint", "rollout", "loss_mask"),
    *("output", "resume", "resume_changes", "replace", "max_concurrent", "record"),
)
"""Sections and options that do not change a conversation of an evaluation."""
_UNUSED_OF_EVAL = ("every", "pass_reward")
_WEIGHTS = (".safetensors", ".bin")


class EvaluationDirectory:
    """The directory of an evaluation, locked until `release`.

    Raises RunError if it contains an evaluation and the recipe says neither to resume nor to replace it, if it contains
    something else, or if another process writes to it.
    """

    def __init__(self, path: Path, config: Config) -> None:
        self.path = path
        self.notes: list[str] = []
        """Notes for the person who starts the evaluation."""
        about = path / "run.json"
        if path.is_dir() and any(file.name != ".lock" for file in path.iterdir()):
            if _kind(about) != "eval":
                raise RunError(
                    f"{path} contains other files than those of an evaluation: choose another directory with --out"
                )
            if config.replace:
                self.notes.append(f"the previous evaluation was moved to {move_away(path)}")
            elif config.resume != "auto":
                raise RunError(
                    f"{path} contains an evaluation already. To resume it and keep its finished conversations: resume=auto; to "
                    f"move it away and start again: replace=true; or choose another directory with --out"
                )
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            self._lock = RunLock(path)
            (path / "eval.json").unlink(missing_ok=True)
            replace_file(about, json.dumps({"kind": "eval", "checkpoint": None}) + "\n")
            write_config(path / "config.yaml", config)

    def model(self, name: str, config: Config, rows: Mapping[str, Any]) -> ModelDirectory:
        """The directory of one model. `rows` are number and fingerprint of the rows. Raises RunError."""
        return ModelDirectory(self.path / name, config, rows)

    def write_results(self, text: str) -> None:
        """Write eval.json."""
        with writing(self.path):
            replace_file(self.path / "eval.json", text)

    def release(self) -> None:
        """Let other processes write to the directory."""
        self._lock.release()


class ModelDirectory:
    """The run directory of one model.

    Raises RunError if it has conversations of other options, rows or weights.
    """

    def __init__(self, path: Path, config: Config, rows: Mapping[str, Any]) -> None:
        self.path = path
        plain, compressed = path / "trajectories.jsonl", path / f"trajectories.jsonl{SUFFIX}"
        gzip = config.record.compression == "gzip"
        self.trajectories, self._otherwise = (compressed, plain) if gzip else (plain, compressed)
        self._config = config
        identity = path / "evaluation.json"
        now = {"options": _options(config), "rows": dict(rows), "weights": _weights(config.model.path)}
        if identity.is_file():
            previous = parse_json(read_text(identity, error=RunError), where=str(identity), error=RunError)
            _refuse_changes(previous if isinstance(previous, dict) else {}, now, path)
        with writing(path):
            path.mkdir(exist_ok=True)
            replace_file(identity, json.dumps(now, indent=1, default=str) + "\n")
            write_config(path / "config.yaml", config)

    def keep(self, wanted: Iterable[Sequence[str]]) -> set[str]:
        """Keep the finished conversations of an interrupted evaluation, and remove all others from the file. Returns their ids.

        `wanted` are the ids of the conversations that are scored together: either all of them are kept or none. Conversations
        that failed are removed, so that they run again. Raises RunError if a line is damaged.
        """
        # the option record.compression may have changed since
        recorded = self.trajectories if self.trajectories.is_file() else self._otherwise
        lines = {trajectory.id: line for trajectory, line in _complete_lines(recorded) if not trajectory.failed}
        kept = [id for together in wanted if all(id in lines for id in together) for id in together]
        with writing(self.path):
            self._replace(lines[id] for id in kept)
            self._otherwise.unlink(missing_ok=True)
        return set(kept)

    def add(self, trajectories: Iterable[Trajectory]) -> None:
        """Append scored conversations."""
        with writing(self.path):
            write_trajectories(self.trajectories, trajectories)

    def finish(self, order: Sequence[str], metrics: Mapping[str, Any]) -> None:
        """Sort the conversations by `order`, the list of their ids, and write the metrics."""
        lines = {trajectory.id: line for trajectory, line in _complete_lines(self.trajectories)}
        with writing(self.path):
            self._replace(lines[id] for id in order if id in lines)
            (self.path / "metrics.jsonl").write_bytes(encode_line(metrics))

    def read(self) -> list[Trajectory]:
        """The recorded conversations."""
        return list(read(self.trajectories))

    def _replace(self, lines: Iterable[bytes]) -> None:
        temporary = self.trajectories.with_suffix(".writing")
        with temporary.open("wb") as file:
            file.writelines(compressed_parts(lines) if is_compressed(self.trajectories) else lines)
        temporary.replace(self.trajectories)


def _kind(about: Path) -> str | None:
    """The kind of run that run.json names; None if there is none."""
    try:
        value = parse_json(read_text(about, error=RunError), where=str(about), error=RunError)
    except RunError:
        return None
    return value.get("kind") if isinstance(value, dict) else None


def _complete_lines(path: Path) -> Iterable[tuple[Trajectory, bytes]]:
    """The trajectories of a file with their lines; a last line that a killed process has not finished is left out."""
    if not path.is_file():
        return
    for number, line in enumerate(open_lines(path), 1):
        if line.endswith(b"\n"):
            where = f"{path}:{number}"
            value = parse_json(line.decode("utf-8", "replace"), where=where, error=RunError, own=True)
            yield decode_trajectory(value, where=where), line


def _options(config: Config) -> dict[str, Any]:
    """The options on which the conversations of an evaluation depend."""
    tree = with_digests(config.model_dump(mode="json", exclude=set(_UNUSED)), config.origins)
    for name in _UNUSED_OF_EVAL:
        tree["eval"].pop(name, None)
    tree["data"].pop("train", None)
    if is_live(str(tree["data"]["eval"])):
        tree["data"]["eval"] = (
            None  # rows of a Python program have another name in each call; their contents are compared
        )
    return tree


def _weights(path: str) -> list[list[Any]]:
    """Name, size and time of the weight files of a model directory; empty for a hub name."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return []
    files = sorted(file for file in folder.iterdir() if file.suffix in _WEIGHTS)
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def _refuse_changes(previous: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    before, after = dict(_leaves(previous.get("options"), "")), dict(_leaves(now["options"], ""))
    changed = [
        f"{key}={after.get(key)} (was {before.get(key)})"
        for key in after | before
        if not _same(before.get(key), after.get(key))
    ]
    if previous.get("rows") != now["rows"]:
        changed.append(f"the rows: {now['rows'].get('count')} (were {(previous.get('rows') or {}).get('count')})")
    if previous.get("weights") != now["weights"]:
        changed.append("the files with the model's weights")
    if changed:
        raise RunError(
            f"the evaluation in {path} cannot be resumed, because it was made with other values:\n  "
            + "\n  ".join(changed)
            + "\n"
            "Use the earlier values, choose another directory with --out, or start again with replace=true"
        )


def _same(before: str | None, after: str | None) -> bool:
    """Whether two leaves, as JSON, have the same value."""
    if before is None or after is None:
        return before == after
    return same_value(json.loads(before), json.loads(after))


def _leaves(node: Any, prefix: str) -> Iterable[tuple[str, str]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, json.dumps(node, default=str)
