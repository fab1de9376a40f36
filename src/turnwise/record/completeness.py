"""Whether the record of a run is complete: every step once, every group of a step, every conversation of a group, no id twice.

A killed run, a full disk or an edited file leave gaps that a reader of single lines does not see. The files of a run are compared
with each other: `metrics.jsonl`, `timeline.jsonl` (which groups a step had), the conversations, `run.json`, and the options.
Nothing is repaired here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.record.lines import existing_file
from turnwise.record.reader import read, read_lines
from turnwise.record.summary import RunSummary, summarize_run

_MOST = 10
"""Findings of one kind that are named one by one."""


@dataclass(frozen=True, slots=True)
class RecordCheck:
    """What was read of a run, and what is missing in it or stands twice."""

    run: RunSummary
    conversations: int
    """Those of rows in `trajectories.jsonl`."""
    findings: Sequence[str]
    """A line for each finding: the file, and what is wrong."""


def check_record(path: Path) -> RecordCheck:
    """Read all files of a run and compare them. A running run is compared as far as its steps are finished.

    Raises RunError as `summarize_run`.
    """
    run = summarize_run(path)
    damaged: list[str] = []
    file = existing_file(path / "trajectories.jsonl")
    found = _read(file, damaged)
    findings = list(_of_conversations(file, found, _group_size(run)))
    if run.step is not None:
        metrics = list(read_lines(path / "metrics.jsonl", damaged=damaged))
        findings += [*_of_steps(path, run, metrics), *_of_training(file, run, metrics, found)]
        findings += _of_evaluations(path, run, damaged)
    return RecordCheck(run, sum(map(len, found.groups.values())), [*damaged, *findings])


# conversations


@dataclass(slots=True)
class _Conversations:
    """What the lines of a file of conversations say. Keys begin with the step."""

    ids: Counter[tuple[int | None, str]] = field(default_factory=Counter)
    groups: dict[tuple[int | None, str], list[str]] = field(default_factory=dict)
    """The ids of the conversations of rows, by their group."""
    agents: dict[tuple[int | None, str], str] = field(default_factory=dict)
    """The id of an agent, by that of the conversation whose environment opened it."""

    def of_steps(self) -> Counter[int | None]:
        """The number of conversations of rows in each step."""
        counts: Counter[int | None] = Counter()
        for (step, _), ids in self.groups.items():
            counts[step] += len(ids)
        return counts


def _read(file: Path, damaged: list[str]) -> _Conversations:
    found = _Conversations()
    for one in read(file, damaged=damaged) if file.is_file() else ():
        found.ids[one.step, one.id] += 1
        if one.episode:
            found.agents[one.step, one.episode] = one.id
        else:
            found.groups.setdefault((one.step, one.group), []).append(one.id)
    return found


def _of_conversations(file: Path, found: _Conversations, size: int | None) -> Iterator[str]:
    """Ids that stand twice, conversations that a group of `size` lacks (None: a group may have any), and agents without the
    conversation that opened them."""
    yield from _first(
        f"{file}: the id {id}{_in(step)} stands {times} times" for (step, id), times in found.ids.items() if times > 1
    )
    yield from _first(
        f"{file}: {group}/{number}{_in(step)} is missing"
        for (step, group), ids in found.groups.items()
        for number in _absent(group, ids, size)
    )
    yield from _first(
        f"{file}: {row}{_in(step)} is missing, whose environment opened the agent {agent}"
        for (step, row), agent in found.agents.items()
        if (step, row) not in found.ids
    )


def _absent(group: str, ids: Iterable[str], size: int | None) -> list[int]:
    """The numbers that are missing in a group, whose ids are `<group>/<number>`; a greedy baseline has another id."""
    ends = [id.removeprefix(f"{group}/") for id in ids]
    numbers = {int(end) for end in ends if end.isdigit()}
    return [] if size is None or not numbers else sorted({*range(max(size, *(one + 1 for one in numbers)))} - numbers)


def _in(step: int | None) -> str:
    return "" if step is None else f" of step {step}"


def _group_size(run: RunSummary) -> int | None:
    """The conversations of a group that are recorded; None if that differs from group to group."""
    if run.kind == "sft":
        return 1
    name = {"train": "train.group_size", "eval": "eval.samples_per_row", "rollout": "rollout.samples_per_row"}[run.kind]
    changed = any(change["option"] in (name, "record.best_and_worst") for change in run.changes)
    size = run.options.get(name)
    thinned = run.kind == "train" and run.options.get("record.best_and_worst") is not None
    thinned |= run.options.get("engine.name") == "scripted"  # the script says how many there are
    return None if changed or thinned or type(size) is not int else size


# steps


def _of_steps(path: Path, run: RunSummary, metrics: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Steps that metrics.jsonl lacks or has twice, also those that run.json counts after its last line."""
    times = Counter(line["step"] for line in metrics if isinstance(line.get("step"), int))
    last = max([*times, run.noted_step or 0])
    yield from (
        f"{path / 'metrics.jsonl'}: {text} missing" for text in _ranges(set(range(1, last + 1)) - set(times), "is")
    )
    yield from _first(
        f"{path / 'metrics.jsonl'}: step {n} stands {many} times" for n, many in times.items() if many > 1
    )


def _of_training(
    file: Path, run: RunSummary, metrics: Sequence[Mapping[str, Any]], found: _Conversations
) -> Iterator[str]:
    """Steps and groups without conversations, and conversations of steps that are not in metrics.jsonl."""
    steps, counts = {line.get("step") for line in metrics}, found.of_steps()
    if run.kind == "train":
        every = run.options.get("record.every") or 1
        recorded = {n for n in steps if isinstance(n, int) and (n == 1 or n == run.steps or n % every == 0)}
        changed = any(change["option"] == "record.every" for change in run.changes)
        yield from (
            f"{file}: {text} no conversations" for text in _ranges([] if changed else recorded - set(counts), "has")
        )
        yield from _first(
            f"{file}: the group {group}{_in(step)} is missing"
            for step, group in _timeline(file.parent)
            if step in counts and (step, group) not in found.groups
        )
    later = max((n for n in steps if isinstance(n, int)), default=0) + 1
    # conversations are written before the line of their step, and those of a step in which all failed have none; resume=auto
    # repeats the step
    if run.state in ("running", "killed", "failed"):
        steps.add(later)
    yield from _first(
        f"{file}: step {n} has conversations, and no line in metrics.jsonl" for n in counts if n not in steps
    )


def _timeline(path: Path) -> Iterator[tuple[int, str]]:
    """The groups of each step, as far as they are listed."""
    for line in read_lines(path / "timeline.jsonl", damaged=[]):
        for group in line.get("groups") or ():
            yield line.get("step", 0), group.get("id", "")


def _of_evaluations(path: Path, run: RunSummary, damaged: list[str]) -> Iterator[str]:
    """Evaluations that stand twice, or whose conversations are not those that evaluations.jsonl counts."""
    summary, file = path / "evaluations.jsonl", existing_file(path / "eval_trajectories.jsonl")
    lines = list(read_lines(summary, damaged=damaged))
    times = Counter(line.get("step") for line in lines)
    yield from _first(
        f"{summary}: the evaluation of step {n} stands {many} times" for n, many in times.items() if many > 1
    )
    if run.kind == "train" and lines:
        found = _read(file, damaged)
        yield from _of_conversations(file, found, None)
        counts = found.of_steps()
        for line in lines:
            step, expected = line.get("step"), line.get("conversations")
            if expected is not None and counts[step] != expected:
                yield f"{file}: {counts[step]} conversations of the evaluation of step {step}; {summary.name} says {expected}"


# messages


def _first(findings: Iterable[str]) -> Iterator[str]:
    """The first findings of a kind, and how many more there are."""
    all_ = list(findings)
    yield from all_[:_MOST]
    if (more := len(all_) - _MOST) > 0:
        yield f"{all_[0].partition(':')[0]}: {more} more of this kind"


def _ranges(numbers: Iterable[int], verb: str) -> Iterator[str]:
    """Steps that follow each other in one text. Example: 3, 4, 5 and 9 are `steps 3 to 5 are` and `step 9 is`."""
    all_ = set(numbers)
    begins, ends = (sorted(n for n in all_ if n + step not in all_) for step in (-1, 1))
    many = {"is": "are", "has": "have"}[verb]
    for begin, end in zip(begins, ends, strict=True):
        yield f"step {begin} {verb}" if begin == end else f"steps {begin} to {end} {many}"
