"""What the viewer knows of one run directory (files, metrics, conversations, images) and of evaluations.

The evaluations are those of `turnwise eval` whose models are among the runs that the viewer shows. Reads the record, and
changes nothing in it; labels are in a file of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from turnwise.errors import RunError
from turnwise.record.datasets import sft_rows
from turnwise.record.evaluation import read_results
from turnwise.record.failures import group_failures
from turnwise.record.labels import Label, LabelChanged, read_labels, write_label
from turnwise.record.lines import existing_file, line_checksum
from turnwise.record.metric_names import metric_of
from turnwise.record.reader import parse_line, read_lines, recorded_options, token_texts
from turnwise.record.summary import (
    RunSummary,
    changed_from_defaults,
    differing_options,
    groups_over_seeds,
    held_out_change,
    may_be_run,
    over_seeds,
    summarize_run,
)
from turnwise.record.trajectory_json import decode_trajectory
from turnwise.types import LogprobKind, Sampling
from turnwise.view.index import ConversationIndex, recorded_parts
from turnwise.view.statistics import statistics

# runs

FILES = {"train": "trajectories.jsonl", "eval": "eval_trajectories.jsonl"}
"""The files of conversations: those of the steps or of a rollout, and those of the evaluations on held-out rows."""
_DIGEST = re.compile("[0-9a-f]{64}")
_METRICS = {"train": "metrics.jsonl", "eval": "evaluations.jsonl"}


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run directories among `paths` and directly below them, the newest first, and the models of the evaluations there.

    A run comes with its evaluation (`turnwise eval` writes `RUN-eval`). Raises RunError if a path is neither a run nor a
    directory that contains runs.
    """
    runs: list[Path] = []
    for path in paths:
        if not (found := runs_at(path)):
            raise RunError(
                f"{path.absolute()} is not a run and contains none: a run has the file trajectories.jsonl or run.json. Give the "
                f"directory of a run, such as runs/demo, or a directory of runs, such as runs"
            )
        known = {run.resolve() for run in runs}
        runs += [run for run in found if run.resolve() not in known]
    return runs


def runs_at(path: Path) -> list[Path]:
    """The run directories of one path; empty if there are none."""
    if _is_run(path):
        beside = path.with_name(f"{path.name}-eval") if path.name else path
        return [path, *_runs_below(beside)] if os.path.isfile(beside / "eval.json") else [path]
    found: list[Path] = []
    for folder in _folders(path):
        found += [folder] if _is_run(folder) else _runs_below(folder) if _is_evaluation(folder) else []
    return found


def _runs_below(path: Path) -> list[Path]:
    return [folder for folder in _folders(path) if _is_run(folder)]


def _folders(path: Path) -> list[Path]:
    """The directories in a directory, the newest first."""
    try:
        below = [(entry.stat().st_mtime, entry) for entry in sorted(path.iterdir()) if entry.is_dir()]
    except OSError:  # not a directory, or a run that is being moved away
        return []
    return [entry for _, entry in sorted(below, key=lambda one: one[0], reverse=True)]


def _is_evaluation(path: Path) -> bool:
    return os.path.isfile(path / "eval.json") or next(path.glob("*/evaluation.json"), None) is not None


def _is_run(path: Path) -> bool:
    # os.path: a directory that may not be read is none. A run that failed in its first step has only run.json and its recipe
    files = (*FILES.values(), *_METRICS.values())
    return any(os.path.isfile(existing_file(path / name)) for name in files) or may_be_run(path)


class ViewedRun:
    """A run directory that the viewer shows. It is read again when it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.indexes = {kind: ConversationIndex(path / name) for kind, name in FILES.items()}
        self._metrics: dict[str, tuple[tuple[int, int], list[dict[str, Any]]]] = {}
        self._statistics: dict[str, tuple[tuple[int, range], dict[str, Any]]] = {}
        self._change: tuple[int, dict[str, Any] | None] | None = None
        self._decoders: dict[str, Callable[[int], str] | None] = {}
        self.problem: str | None = None
        """Why a file of the run, or a part of it, cannot be read; None if there is no problem."""
        self.evaluated = (path / "evaluation.json").is_file()
        """Whether it is a model of an evaluation (`turnwise eval`): there are conversations, and no curves."""
        self.name = f"{path.absolute().parent.name}/{path.name}" if self.evaluated else path.absolute().name
        """The name of the directory; of a model of an evaluation, with the name of the evaluation."""

    def update(self, seconds: float | None = None) -> bool:
        """Index conversations that are not indexed yet, for about `seconds` for each file; None: all of them.

        Returns whether all are indexed.
        """
        problem, complete = None, True
        for index in self.indexes.values():
            try:
                complete &= index.update(seconds)
                problem = next(iter(index.damage), problem)
            except (RunError, OSError) as error:
                problem = str(error)
        self.problem = problem
        return complete

    def summary(self) -> dict[str, Any]:
        """Name, path, and how much there is of everything. The page asks for it again while the run goes on."""
        problem, counts = self.problem, dict.fromkeys(_METRICS, 0)
        for kind in _METRICS:
            try:
                counts[kind] = len(self.metrics(kind))
            except RunError as error:  # one damaged run does not hide the others
                problem = str(error)
        return {
            "name": self.name,
            "evaluated": self.evaluated,
            "path": str(self.path.absolute()),
            "problem": problem,
            "recorded": self._recorded,
            "conversations": {kind: len(index) for kind, index in self.indexes.items()},
            "lines": {kind: max(index.lines, len(index)) for kind, index in self.indexes.items()},
            "indexed": {kind: _indexed(index) for kind, index in self.indexes.items()},
            "metrics": counts,
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

    def overview(self) -> dict[str, Any]:
        """What a person wants to know first: how the run ended, its warnings, what it reached, its options, its latest failures,
        and the best, median and worst conversation of its last step. Raises RunError if its recipe cannot be read."""
        about = summarize_run(self.path)
        index = self.indexes["train"]
        ranked = index.by_reward()
        chosen = {"best": ranked[:1], "median": ranked[len(ranked) // 2 : len(ranked) // 2 + 1], "worst": ranked[-1:]}
        numbers = {name: found[0] for name, found in chosen.items() if found}
        return {
            **state_of(about),
            "warnings": [dataclasses.asdict(warning) for warning in about.warnings],
            "options": [[name, *values] for name, values in changed_from_defaults(about.options).items()],
            "held_out": self._held_out(),
            "failures": [dataclasses.asdict(group) for group in group_failures(index.failures())[:10]],
            "examples": {name: row for name, number in numbers.items() for row in index.rows([number])},
        }

    def statistics(self, kind: str) -> dict[str, Any]:
        """Rewards of parts and turns, and tool calls, over the steps; computed again when there are further conversations."""
        index = self.indexes[kind]
        stamp = (index.generation, index.indexed)
        known = self._statistics.get(kind)
        if known is None or known[0] != stamp:
            known = self._statistics[kind] = (stamp, statistics(index))
        return known[1]

    def _held_out(self) -> dict[str, Any] | None:
        """How training changed the rewards on held-out rows; computed again when there is a further evaluation."""
        evaluations = len(self.metrics("eval"))
        if self._change is None or self._change[0] != evaluations:
            found = held_out_change(self.path)
            self._change = (evaluations, None if found is None else dataclasses.asdict(found))
        return self._change[1]

    def conversation(self, kind: str, number: int) -> dict[str, Any]:
        """A conversation as it was recorded, with the text of each token (`token_texts`, one list for each segment), and with the
        parts that its reward is the sum of (`reward_parts`).

        `exact_logprobs` is whether the engine's log-probabilities are those of the sampled distribution, as the trainer's are.
        Raises RunError if there is none of this number, or its line is damaged or has a newer schema.
        """
        line, record = self._read(kind, number)
        policy = record.get("policy") or ""
        texts = [self._texts(segment["token_ids"], policy) for segment in record["segments"]]
        exact = record.get("logprob_kind") in self._exact_kinds
        # the page does not show experts, which are most of a recorded segment
        segments = [{key: column for key, column in one.items() if key != "routes"} for one in record["segments"]]
        more = {"number": number, "checksum": line_checksum(line), "token_texts": texts, "exact_logprobs": exact}
        return {**record, "segments": segments, "reward_parts": recorded_parts(record), **more}

    def labels(self) -> list[dict[str, Any]]:
        """The labels and notes of conversations. `replaced`: the record has another conversation of this id and step now, as
        after a resume, for which they do not hold. Raises RunError if their file is damaged."""
        labels = read_labels(self.path)
        of_kind = {kind: {label.id for label in labels if label.kind == kind} for kind in FILES}
        known = {kind: self.indexes[kind].checksums(ids) if ids else {} for kind, ids in of_kind.items()}
        found: list[dict[str, Any]] = []
        for label in labels:
            present = known.get(label.kind, {}).get((label.id, label.step), {label.checksum})
            found.append({**dataclasses.asdict(label), "replaced": label.checksum not in present})
        return found

    def write_label(
        self, kind: str, number: int, *, checksum: str, labels: Sequence[str], note: str, revision: int
    ) -> dict[str, Any]:
        """Label a conversation whose line had this `checksum` when it was read. Raises LabelChanged, RunError."""
        line, record = self._read(kind, number)
        if line_checksum(line) != checksum:
            raise LabelChanged("the record was written again since the conversation was read: load the page again")
        label = Label(
            kind=kind,
            id=record["id"],
            step=record.get("step"),
            checksum=checksum,
            labels=tuple(labels),
            note=note,
            revision=revision,
        )
        return dataclasses.asdict(write_label(self.path, label))

    def selection(self, kind: str, numbers: Sequence[int], form: str, file: IO[bytes]) -> tuple[int, dict[str, int]]:
        """Write conversations to `file`: as they were recorded (`form` is jsonl), or as rows of `turnwise dataset --what sft`.

        Returns the number of lines, and how many conversations are left out, by reason. Raises RunError.
        """
        lines, left_out = 0, Counter[str]()
        for number in numbers:
            if form == "jsonl":
                found = [self.indexes[kind].line(number).rstrip(b"\n")]
            else:
                try:
                    trajectory = decode_trajectory(self._record(kind, number), where=f"conversation {number}")
                except RunError:  # it hides nothing else, as on the page
                    if number >= self.indexes[kind].lines:
                        raise
                    left_out["are damaged"] += 1
                    continue
                found = [json.dumps(row, ensure_ascii=False).encode() for row in sft_rows([trajectory], left_out)]
            file.writelines(line + b"\n" for line in found)
            lines += len(found)
        return lines, dict(left_out)

    def image(self, name: str) -> Path | None:
        """The file of a recorded image by its sha256; None if there is none."""
        path = self.path / "media" / f"{name}.png"
        # a run may come from another person: a link in it leads to any file of this machine
        return path if _DIGEST.fullmatch(name) and path.is_file() and not path.is_symlink() else None

    def timeline(self, step: int) -> dict[str, Any]:
        """What happened when in a training step, in Unix seconds: the times of its conversations (`conversations`), and the lines
        of timeline.jsonl of this step and of the steps in which these conversations ran (`steps`).
        """
        conversations: list[dict[str, Any]] = []
        for number in self.indexes["train"].numbers_of(step):
            with contextlib.suppress(RunError):  # shown when the conversation is opened
                conversations.append(times(self._record("train", number), number))
        return {"conversations": conversations, "steps": self.steps_until(step)}

    def steps_until(self, step: int | None) -> list[dict[str, Any]]:
        """The line of timeline.jsonl of a step, and those of the steps since its first group was started."""
        lines = [line for line in read_lines(self.path / "timeline.jsonl") if _is_timeline(line)]
        (line,) = [line for line in lines if line.get("step") == step][:1] or [None]
        if line is None:
            return []
        started = [group["started"] for group in line["groups"] if _is_number(group.get("started"))]
        begin = min([*started, line["asked"]])
        return [other for other in lines if other["step"] <= step and other["trained"] >= begin]

    def _record(self, kind: str, number: int) -> dict[str, Any]:
        """A conversation as it was recorded. Raises RunError."""
        return self._read(kind, number)[1]

    def _read(self, kind: str, number: int) -> tuple[bytes, dict[str, Any]]:
        """The line of a conversation, and its object. Raises RunError."""
        index = self.indexes[kind]
        where = f"{index.path}:{number + 1}"
        try:
            line = index.line(number)
            return line, _parsed(line, where)
        except RunError:  # the file was written again, as by a run that is resumed, and the places of its lines are old
            index.look_again()
            line = index.line(number)
            return line, _parsed(line, where)

    def close(self) -> None:
        for index in self.indexes.values():
            index.close()

    def _decode(self, policy: str) -> Callable[[int], str] | None:
        """The texts of tokens that the model of a frozen policy has seen; of the trained model with an empty name."""
        if policy not in self._decoders:
            try:
                self._decoders[policy] = token_texts(self.path, policy)
            except RunError:  # the ids are shown without texts
                self._decoders[policy] = None
        return self._decoders[policy]

    @cached_property
    def _recorded(self) -> dict[str, Any]:
        """Which conversations the run records: the options `record.every` and `record.best_and_worst`, and the group size."""
        try:
            options = recorded_options(self.path)
        except RunError:
            return {}
        record, train = options.get("record"), options.get("train")
        record, train = record if isinstance(record, dict) else {}, train if isinstance(train, dict) else {}
        every, extremes = record.get("every") or 1, record.get("best_and_worst")
        if not isinstance(every, int) or (
            every == 1 and extremes is None
        ):  # `${NAME}`, of another process's environment
            return {}
        return {"every": every, "best_and_worst": extremes, "group_size": train.get("group_size")}

    @cached_property
    def _exact_kinds(self) -> Collection[str]:
        """The kinds of log-probability that the recipe's sampling makes equal to those of the sampled distribution."""
        try:
            options = recorded_options(self.path).get("sampling")
        except RunError:
            options = None
        if not isinstance(options, dict):
            return {LogprobKind.SAMPLED}
        known = {name: options[name] for name in ("temperature", "top_p", "top_k", "min_p") if name in options}
        if not all(isinstance(value, int | float) for value in known.values()):  # `${NAME}`
            return {LogprobKind.SAMPLED}
        return Sampling(**known).exact_kinds

    def _texts(self, token_ids: Sequence[int], policy: str) -> list[str | None]:
        decode = self._decode(policy)
        if decode is None:
            return [None] * len(token_ids)
        cache = {token: decode(token) for token in set(token_ids)}
        return [cache[token] for token in token_ids]


def _indexed(index: ConversationIndex) -> dict[str, Any]:
    """Which conversations are indexed: from number `start` to `stop - 1`. `generation` counts how often the index was emptied;
    `ready` is whether the record was looked at."""
    indexed = index.indexed
    return {"start": indexed.start, "stop": indexed.stop, "generation": index.generation, "ready": index.ready}


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    """A line of a record. Raises RunError."""
    record = parse_line(line, where)
    decode_trajectory(record, where=where)  # the page relies on the format
    return record


def _is_timeline(line: dict[str, Any]) -> bool:
    """Whether a line of timeline.jsonl has what the page needs."""
    groups = line.get("groups")
    of_groups = isinstance(groups, list) and all(isinstance(group, dict) for group in groups)
    return of_groups and all(_is_number(line.get(name)) for name in ("step", "asked", "taken", "trained"))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def times(record: dict[str, Any], number: int) -> dict[str, Any]:
    """The times of a recorded conversation and of its turns: `[started, engine, environment, tools]`, in Unix seconds and in
    seconds. The time of tools is a part of that of the environment; tools that run in parallel count at most as much."""
    turns = []
    for turn in record.get("turns") or []:
        seconds = turn.get("seconds") or {}
        environment = seconds.get("environment") or 0
        tools = sum(call.get("seconds") or 0 for call in turn.get("tool_calls") or [])
        turns.append([turn.get("started"), seconds.get("engine") or 0, environment, min(tools, environment)])
    return {
        "number": number,
        "id": record.get("id"),
        "group": record.get("group"),
        "started": record.get("started"),
        "seconds": record.get("seconds"),
        "turns": turns,
        "stop": record.get("stop"),
        "reward": record.get("reward"),
    }


# several runs


def state_of(about: RunSummary) -> dict[str, Any]:
    """How a run ended, and after how many steps."""
    return {name: getattr(about, name) for name in ("kind", "state", "reason", "ended", "step", "steps")}


def side_by_side(runs: Sequence[ViewedRun]) -> dict[str, Any]:
    """All runs: state, last and best values of their metrics, and the options in which they differ. A run that cannot be read has
    the key `problem`. `seeds` has the groups of finished runs that differ in the seed only, and for each metric the mean and the
    standard deviation of their last values."""
    rows: list[dict[str, Any]] = []
    summaries: list[RunSummary] = []
    numbers: dict[Path, int] = {}
    for number, run in enumerate(runs):
        try:
            about = summarize_run(run.path)
        except RunError as error:
            rows.append({"run": number, "problem": str(error)})
            continue
        summaries.append(about)
        numbers[about.path] = number
        values = {}
        for name, value in about.metrics.items():
            best, step = value.best(name)
            values[name] = {"last": value.last, "best": best, "step": step}
        rows.append(
            {
                "run": number,
                **state_of(about),
                "warnings": len(about.warnings),
                "values": values,
                "options": about.options,
            }
        )
    names = differing_options(summaries) if len(summaries) > 1 else []
    for row in rows:
        row["options"] = {name: row["options"][name] for name in names if name in row.get("options", ())}
    seeds = [
        {
            "runs": [numbers[run.path] for run in group],
            "values": {
                name: over_seeds(group, name) for name in dict.fromkeys(name for run in group for name in run.metrics)
            },
        }
        for group in groups_over_seeds(summaries, names)
    ]
    return {"options": names, "rows": rows, "seeds": seeds}


# evaluations


def evaluations(runs: Sequence[ViewedRun]) -> list[dict[str, Any]]:
    """The contents of `eval.json` beside the runs, with the number of the run of each model (`runs`, by the model's name).

    A file that cannot be read has the key `problem` instead.
    """
    folders = dict.fromkeys(run.path.parent for run in runs if (run.path.parent / "eval.json").is_file())
    return [_evaluation(folder, runs) for folder in folders]


def _evaluation(folder: Path, runs: Sequence[ViewedRun]) -> dict[str, Any]:
    numbers = {run.path.name: number for number, run in enumerate(runs) if run.path.parent == folder}
    about = {"name": folder.absolute().name, "runs": numbers}
    try:
        return {**about, **dataclasses.asdict(read_results(folder / "eval.json"))}
    except RunError as error:
        return {**about, "problem": str(error)}
