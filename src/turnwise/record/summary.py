"""What a person wants to know first of a run, and of several runs side by side.

That is: how a run ended, its warnings with their steps, what its metrics came to, and the options that differ from the defaults
or between runs.

Reads `run.json`, `config.yaml`, `metrics.jsonl`, `evaluations.jsonl` and `warnings.jsonl` of a run, and no conversations (except
`held_out_change`, which reads those of two evaluations): fifty runs take less than a second. Metrics of evaluations on held-out
rows have the prefix `eval/`, as in experiment trackers. This module prints nothing.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, mean, stdev
from typing import TYPE_CHECKING, Any

from turnwise.errors import RunError
from turnwise.json_yaml import RecordedLoader, parse_json, parse_yaml, read_text
from turnwise.record.lines import existing_file
from turnwise.record.reader import RecordedTrajectories, evaluated_runs, read_lines
from turnwise.record.run_directory import is_being_written
from turnwise.record.writer import CHOSEN

if TYPE_CHECKING:
    from turnwise.options.section import Section
    from turnwise.record.evaluation import Estimate, PairedTest

SET = "set"
"""The option of a run in a sweep that names its set of options."""
EVALUATION = "eval/"
"""The prefix of metrics on held-out rows."""
_PLACE = ("output", "resume", "resume_changes", "replace")
"""Options that say where a run is written and how it begins, and not what it does."""
_TRAINED = ("train", "sft")
_DOWN = re.compile(
    r"(^|/)(loss|kl|failed|tool_errors|template_mismatch|left_out|divergence|none|too_small|timed_out|max_deviation|clip_fraction)"
    r"(/|$)|^seconds/|^stop/(?!done$)|zero_std|duplicates"
)
"""The metrics of which a low value is the better one."""
_NEITHER = re.compile(
    r"^(?!metrics/|reward/source/|(.*/)?rewards?/(.*/)?mean$)(.*/)?(entropy|step|epoch|lr|grad_norm|conversations|segments|turns|tool_calls|tokens|version|std|coef|value_mean|experts|"
    r"selection|staleness|dropped|replaced|skipped)(/|$)|^ranks/"
)
"""The metrics of which neither a low nor a high value is the better one. Of those of a person's own, a high one is."""

# one run


@dataclass(slots=True)
class MetricValues:
    """What a metric came to in a run: its last, lowest and highest value, and the steps of the lowest and the highest."""

    last: float
    lowest: float
    lowest_step: int | None
    highest: float
    highest_step: int | None

    def add(self, value: float, step: int | None) -> None:
        """Count the value of a further step. Of equal values, the first step counts."""
        self.last = value
        if value < self.lowest:
            self.lowest, self.lowest_step = value, step
        if value > self.highest:
            self.highest, self.highest_step = value, step

    def best(self, name: str) -> tuple[float | None, int | None]:
        """The best value of the metric `name` and its step: the lowest of losses and failures, otherwise the highest. None of
        metrics without a better direction, as of `entropy` and `turns/mean`."""
        if not lower_is_better(name) and _NEITHER.search(name.removeprefix(EVALUATION)):
            return None, None
        return (self.lowest, self.lowest_step) if lower_is_better(name) else (self.highest, self.highest_step)


def lower_is_better(name: str) -> bool:
    """Whether a low value of a metric is the better one, as of `loss` and `failed`."""
    return _DOWN.search(name.removeprefix(EVALUATION)) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWarning:
    """A line of warnings.jsonl."""

    step: int
    name: str
    """The monitor, by its name in the section `health`, or another name for checks that have no option."""
    text: str
    """The problem, its likely cause and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run. `metrics` has those with a finite number in any step; `options` are those of its recipe, as `train.lr`, and in a
    sweep with sets of options `set`, the name of its own."""

    path: Path
    kind: str
    """The command: `train`, `sft`, `eval` (one model of an evaluation) or `rollout`."""
    state: str
    """`running` (a process holds the lock of the directory), `finished`, `stopped` (by a person, a signal, a callback or
    `health.stop`), `failed` (an error ended it: `reason`) or `killed` (the process ended without a word)."""
    reason: str | None = None
    """Why a run failed, or which monitor stopped it."""
    ended: float | None = None
    """When it ended, in Unix seconds; None while it is running, of killed runs, and of runs of an earlier version."""
    step: int | None
    """The number of finished steps; None without training."""
    steps: int | None
    """The number of steps of the complete run; None if the number of rows decides."""
    noted_step: int | None = None
    """The last step that run.json names: that of the newest checkpoint, or the one after which the run ended."""
    metrics: Mapping[str, MetricValues]
    options: Mapping[str, Any]
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """The values that the run used where its recipe leaves them to the machine."""
    warnings: Sequence[RunWarning] = ()
    changes: Sequence[Mapping[str, Any]] = ()
    """Options that were changed when the run was resumed: `after_step`, `option`, `from` and `to`."""
    damaged: Sequence[str] = field(default=())
    """Lines that could not be read and are left out."""


def summarize_run(path: Path) -> RunSummary:
    """Read the summary of a run directory. Raises RunError if it is none, or if its recipe cannot be read."""
    about = _about(path)
    kind = about.get("kind") if about.get("kind") in _TRAINED else None
    if not may_be_run(path):
        raise RunError(
            f"{path.absolute()} is not a run: it contains neither run.json of a training run nor trajectories.jsonl. "
            f"`turnwise train`, `sft`, `rollout` and `eval` write runs"
        )
    damaged: list[str] = []
    options, chosen = _recorded_values(path)
    options = _set_of(path) | options
    lines = list(read_lines(path / "metrics.jsonl", damaged=damaged))
    evaluations = list(read_lines(path / "evaluations.jsonl", damaged=damaged))
    ended = about.get("ended")
    note: Mapping[str, Any] = ended if isinstance(ended, dict) else {}
    if kind is not None:
        step = next((line["step"] for line in reversed(lines) if isinstance(line.get("step"), int)), 0)
        metrics = RunMetrics(lines, evaluations)
        steps = _number_of_steps(kind, options)
        state = _state(note, about, step, steps, lines, options.get(f"{kind}.epochs"))
    else:
        step = steps = None
        kind = "eval" if (path / "evaluation.json").is_file() else "rollout"
        metrics = RunMetrics([], lines) if kind == "eval" else RunMetrics(lines)
        state = "finished" if lines else "killed"  # the metrics are written at the end
    if is_being_written(path) or (kind == "eval" and not lines and is_being_written(path.parent)):
        state, note = "running", {}
    return RunSummary(
        path=path,
        kind=kind,
        state=state,
        reason=note.get("reason"),
        ended=note.get("time"),
        step=step,
        steps=steps,
        noted_step=max((n for n in (about.get("checkpoint"), note.get("step")) if type(n) is int), default=None),
        metrics=metrics,
        options=options,
        chosen=chosen,
        warnings=recorded_warnings(path, damaged=damaged),
        changes=_changes(about),
        damaged=damaged,
    )


def recorded_warnings(path: Path, *, damaged: list[str] | None = None) -> list[RunWarning]:
    """The warnings of a run in their order; empty for a run of an earlier version. Errors as `read_lines`."""
    return [
        RunWarning(step=line["step"], name=line["name"], text=line["text"])
        for line in read_lines(path / "warnings.jsonl", damaged=damaged)
        if isinstance(line.get("step"), int) and isinstance(line.get("name"), str) and isinstance(line.get("text"), str)
    ]


def _about(path: Path) -> Mapping[str, Any]:
    """`run.json`; empty where there is none, or where it is damaged: the other files are shown all the same."""
    file = path / "run.json"
    if not os.path.isfile(file):  # also where the directory may not be read
        return {}
    try:
        about = parse_json(read_text(file, error=RunError), where=str(file), error=RunError)
    except RunError:
        return {}
    return about if isinstance(about, dict) else {}


def _changes(about: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    changes = about.get("changes")
    known = {"after_step", "option", "from", "to"}
    return (
        [one for one in changes if isinstance(one, dict) and known <= one.keys()] if isinstance(changes, list) else []
    )


class RunMetrics(Mapping[str, MetricValues]):
    """The metrics with a finite number in any step, by name. Each is computed when it is asked for: a table shows a few of two
    hundred."""

    def __init__(self, lines: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]] = ()) -> None:
        self._sources = {"": lines, EVALUATION: evaluations}
        self._known: dict[str, MetricValues | None] = {}

    def __getitem__(self, name: str) -> MetricValues:
        if name not in self._known:
            prefix = EVALUATION if name.startswith(EVALUATION) else ""
            self._known[name] = _values(self._sources[prefix], name.removeprefix(prefix))
        values = self._known[name]
        if values is None:
            raise KeyError(name)
        return values

    def __iter__(self) -> Iterator[str]:
        names = (f"{prefix}{name}" for prefix, lines in self._sources.items() for line in lines for name in line)
        return (name for name in dict.fromkeys(names) if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _values(lines: Sequence[Mapping[str, Any]], name: str) -> MetricValues | None:
    found: MetricValues | None = None
    for line in lines if name != "step" else ():
        value, step = line.get(name), line.get("step")
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            continue
        if found is None:
            found = MetricValues(value, value, step, value, step)
        else:
            found.add(value, step)
    return found


def _number_of_steps(kind: str, options: Mapping[str, Any]) -> int | None:
    steps = options.get(f"{kind}.steps")
    if steps is None and kind == "train" and "train.epochs" in options and options["train.epochs"] is None:
        from turnwise.options.algorithm import TrainSection  # takes long to load, and few recipes rely on the default

        return TrainSection().total_steps
    return steps if type(steps) is int else None


def _state(
    note: Mapping[str, Any],
    about: Mapping[str, Any],
    step: int,
    steps: int | None,
    lines: Sequence[Mapping[str, Any]],
    epochs: Any,
) -> str:
    """The state of a run that no process writes. Runs of earlier versions have no note of their end."""
    if note.get("how") in ("finished", "stopped", "failed"):
        return note["how"]
    if steps is None and lines and type(epochs) in (int, float):
        passes = lines[-1].get("epoch")
        if type(passes) in (int, float) and passes >= epochs - 1e-4:  # metrics have four places
            return "finished"
    return "finished" if steps is not None and step >= steps else "killed"


# options


def _recorded_values(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a run's config.yaml by their dotted names, such as `train.lr`, and the values of those that were chosen for
    the machine; empty where there is no such file. Values of environment variables stay references: `${NAME}`.

    Raises RunError if the file cannot be read.
    """
    file = path / "config.yaml"
    if not file.is_file():
        return {}, {}
    text = read_text(file, error=RunError)
    tree = parse_yaml(text, where=str(file), error=RunError, loader=RecordedLoader)
    if not isinstance(tree, dict):
        return {}, {}
    comment, used = text.rstrip().rpartition("\n")[2], dict(_flat(tree))
    if not comment.startswith(CHOSEN):
        return used, {}
    said = parse_json(comment.removeprefix(CHOSEN), where=str(file), error=RunError)
    return used | said, {name: used.get(name) for name in said}


def _set_of(path: Path) -> dict[str, str]:
    """The name of a run's set of options, from `sweep.json` beside it; empty where there is none."""
    path = path.absolute()
    file = path.parent / "sweep.json"
    if not os.path.isfile(file):
        return {}
    try:
        about = parse_json(read_text(file, error=RunError), where=str(file), error=RunError)
        words = [word for word in about["runs"][path.name] if word.startswith(f"{SET}=")]
    except (RunError, KeyError, TypeError, AttributeError):  # the runs are shown all the same
        return {}
    return {SET: words[0].partition("=")[2]} if words else {}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def changed_from_defaults(options: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The options of a run (`RunSummary.options`) that differ from the defaults: value and default, in the order of the recipe.

    An option without a default, such as `model.path`, is left out, and so are those that say where the run is written. The
    defaults are those of the installed version. Example: `{"train.lr": (1e-4, 1e-6)}`.
    """
    from turnwise.options.schema import Config  # takes half a second to load

    defaults = dict(_defaults(Config, options, ""))
    return {
        name: (value, default)
        for name, value in options.items()
        if name not in _PLACE
        and (default := defaults.get(name, _MISSING)) is not _MISSING
        and not _same(value, default)
    }


_MISSING = object()


def _defaults(section: type[Section], options: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """The defaults of a section by dotted names. The class of a section with several is the one that the run has chosen."""
    from turnwise.options.section import name_of, section_classes

    for name, field_ in section.model_fields.items():
        key = f"{prefix}{name}"
        classes = section_classes(field_)
        named = [cls for cls in classes if "name" in cls.model_fields] if len(classes) > 1 else []
        chosen = [cls for cls in named if name_of(cls) == options.get(f"{key}.name")]
        if chosen or (len(classes) == 1 and any(option.startswith(f"{key}.") for option in options)):
            yield from _defaults((chosen or classes)[0], options, f"{key}.")
            if chosen:
                default = field_.get_default(call_default_factory=True)
                yield f"{key}.name", getattr(default, "name", _MISSING)
        elif not field_.is_required():
            default = field_.get_default(call_default_factory=True)
            if hasattr(default, "model_dump"):
                default = default.model_dump(mode="json")
            yield key, default


def _same(value: Any, default: Any) -> bool:
    return json.dumps(value, default=str, sort_keys=True) == json.dumps(default, default=str, sort_keys=True) or (
        type(value) in (int, float) and type(default) in (int, float) and value == default
    )


_TASK = ("environment.use", "data.train")
"""The options that say what a run learns."""


def differing_options(runs: Sequence[RunSummary]) -> list[str]:
    """The options with different values, in the order of the recipes. Those that some recipe lacks, as an older one does, are
    last.

    Runs of different commands, environments or rows differ in most options. Of these, only model, environment and rows are
    compared among all runs; the other options among the runs of each kind.
    """
    kinds: dict[str, list[RunSummary]] = {}
    for run in runs:
        kinds.setdefault(json.dumps([run.kind, *(run.options.get(name) for name in _TASK)], default=str), []).append(
            run
        )
    names = [
        name
        for name in dict.fromkeys(name for run in runs for name in run.options)
        if name not in _PLACE
        and (
            any(_differ(alike, name) for alike in kinds.values())
            or (name in ("model.path", *_TASK) and _differ(runs, name))
        )
    ]
    return sorted(names, key=lambda name: not all(name in run.options for run in runs))


def _differ(runs: Sequence[RunSummary], name: str) -> bool:
    """Whether recipes say different things of an option. A value that one run has chosen for the machine and another recipe gives
    (config.yaml as a recipe has it) is the same."""
    given = [run.options for run in runs]
    used = [{**run.options, **run.chosen} for run in runs]
    return all(len({json.dumps(one.get(name), default=str) for one in values}) > 1 for values in (given, used))


def groups_over_seeds(runs: Sequence[RunSummary], options: Sequence[str]) -> list[list[RunSummary]]:
    """The finished runs in groups that differ in `seed` only. `options` are all in which the runs differ."""
    groups: dict[str, list[RunSummary]] = {}
    for run in runs:
        if run.state == "finished":
            key = json.dumps([run.kind, *(run.options.get(name) for name in options if name != "seed")], default=str)
            groups.setdefault(key, []).append(run)
    return list(groups.values())


def over_seeds(group: Sequence[RunSummary], metric: str) -> tuple[float | None, float | None]:
    """The mean of the last values of a metric, and their standard deviation. None where a run lacks the metric, and for the
    deviation of one run."""
    values = [run.metrics[metric].last for run in group if metric in run.metrics]
    if len(values) < len(group):
        return None, None
    return mean(values), stdev(values) if len(values) > 1 else None


# evaluations on held-out rows


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutChange:
    """The rewards of the first and the last evaluation of a training run, on the rows that both have. A row counts once, with the
    mean of its conversations."""

    first_step: int
    last_step: int
    before: Estimate
    after: Estimate
    test: PairedTest
    """After minus before."""


def held_out_change(path: Path) -> HeldOutChange | None:
    """How training changed the reward on held-out rows. Reads the conversations of two evaluations.

    None if there are not two evaluations, or no rewards. Raises RunError if the file of their conversations cannot be read.
    """
    from turnwise.record.evaluation import paired_test, reward_estimate  # loads pydantic

    file = existing_file(path / "eval_trajectories.jsonl")
    lines = [line for line in read_lines(path / "evaluations.jsonl", damaged=[]) if type(line.get("step")) is int]
    # a run that was resumed with other held-out rows has evaluations that cannot be compared
    steps = [line["step"] for line in lines if line.get("conversations") == lines[-1].get("conversations")]
    if len(set(steps)) < 2 or not file.is_file():
        return None
    recorded = RecordedTrajectories(file, damaged=[])
    evaluated: list[dict[str, list[float]]] = []
    for step in (steps[0], steps[-1]):
        rewards: dict[str, list[float]] = {}
        for trajectory in recorded.of_step(step):
            if trajectory.reward is not None and trajectory.error is None and not trajectory.episode:
                rewards.setdefault(trajectory.row.id, []).append(trajectory.reward)
        evaluated.append(rewards)
    first, last = evaluated
    rows = [row for row in first if row in last]
    if not rows:
        return None
    before, after = [first[row] for row in rows], [last[row] for row in rows]
    return HeldOutChange(
        first_step=steps[0],
        last_step=steps[-1],
        before=reward_estimate(before),
        after=reward_estimate(after),
        test=paired_test([fmean(rewards) for rewards in after], [fmean(rewards) for rewards in before]),
    )


def evaluations_of(path: Path) -> list[Path]:
    """The directories of `turnwise eval` beside a run that evaluated its model, such as `runs/demo-eval`, by name."""
    place = path.resolve()
    beside = place.parent
    folders = sorted(file.parent for file in beside.glob("*/run.json")) if beside.is_dir() else []
    return [
        path.parent / folder.name
        for folder in folders
        if _about(folder).get("kind") == "eval" and any(_evaluates(model, place) for model in evaluated_runs(folder))
    ]


def _evaluates(model: Path, run: Path) -> bool:
    """Whether the model of an evaluation is one of the checkpoints of a run."""
    try:
        evaluated = _recorded_values(model)[0].get("model.path")
    except RunError:
        return False
    if not isinstance(evaluated, str):
        return False
    given = Path(evaluated)
    # a relative path is one of the working directory of the evaluation, which is often a directory above
    places = [given] if given.is_absolute() else [Path.cwd() / given, *(above / given for above in run.parents)]
    return any(place.resolve().is_relative_to(run) for place in places)


# several runs


def find_summaries(paths: Sequence[Path]) -> tuple[list[RunSummary], list[str]]:
    """The runs among `paths`, the models of evaluations, and the runs directly below a directory that is neither (a sweep).
    Also what is wrong with the other paths, a line for each: these do not hide the runs."""
    found: list[RunSummary] = []
    problems: list[str] = []
    for path in paths:
        places = evaluated_runs(path) or ([path] if may_be_run(path) else _below(path)) or [path]
        for place in places:
            try:
                found.append(summarize_run(place))
            except RunError as error:
                problems.append(" ".join(str(error).split()))
    return found, problems


def _below(path: Path) -> list[Path]:
    """The runs in a directory of runs, by name."""
    try:
        folders = sorted(folder for folder in path.iterdir() if folder.is_dir())
    except OSError:  # not a directory, or one that may not be read
        return []
    return [run for folder in folders for run in (evaluated_runs(folder) or ([folder] if may_be_run(folder) else []))]


def may_be_run(path: Path) -> bool:
    """Whether a directory looks like a run: it has conversations, or a `run.json` that is not that of an evaluation."""
    return os.path.isfile(existing_file(path / "trajectories.jsonl")) or _about(path).get("kind") in _TRAINED
