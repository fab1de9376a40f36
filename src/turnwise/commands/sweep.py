"""`turnwise sweep`: runs of one recipe with several values of options, and their comparison.

The runs are trained one after the other, each in a process of its own (`turnwise train` or `sft`), so a run that fails, or is out
of memory, ends no other. What a sweep consists of is in `sweep.json` of its directory: started again, it skips the runs that are
finished and resumes the others; with more steps, all. With `--trials`, optuna chooses the values; there is no sampler here.

Options that go together are a named set (`--set`): the sets of a sweep are the values of one more option, `set`, until a run is
started.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import re
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.commands.command import Context, add_recipe, count, print_lines
from turnwise.errors import ConfigError, RunError
from turnwise.record.metric_names import METRICS, metric_hint
from turnwise.record.summary import SET, find_summaries, lower_is_better, may_be_run, summarize_run

if TYPE_CHECKING:
    from turnwise.options.schema import Config

# arguments

_LOG_SCALE = 10
"""A range is sampled on a logarithmic scale if its ends differ by at least this factor, as of learning rates."""
_TAIL = 12
"""Lines of a failed run that are printed."""
_RANGE = re.compile(r"(?P<low>[^.\s][^\s]*?)\.\.(?P<high>[^\s]+)")


def register_sweep(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Train a recipe with each combination of several values, one run after the other, and compare the runs. Values are "
        "separated by commas: train.lr=1e-6,3e-6 seed=0,1. Started again, a sweep skips finished runs and resumes the "
        "others; with a larger train.steps, all go on."
    )
    add_recipe(parser)
    parser.add_argument(
        "--set", metavar="NAME='OPTION=VALUE ...'", action="append", default=[], dest="sets",
        help="options that go together; each set is combined with the other values: --set lora='model.lora.rank=8 "
        "train.lr=1e-4' --set full=train.lr=1e-6 seed=0,1",
    )  # fmt: skip
    parser.add_argument("--sft", action="store_true", help="fine-tune (turnwise sft) instead of turnwise train")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="the directory of the runs; default: the recipe's output with -sweep"
    )
    parser.add_argument(
        "--metric", metavar="NAME",
        help="the metric to sort the comparison by, and to improve with --trials; default: reward/mean, or loss with --sft; with "
        "data.eval, the same on held-out rows (eval/reward/mean, eval/loss)",
    )  # fmt: skip
    parser.add_argument(
        "--trials", type=count, metavar="N",
        help="let optuna choose N combinations; a value may then be a range: train.lr=1e-6..1e-4",
    )  # fmt: skip
    parser.set_defaults(command=_run_sweep, long=True)


def _run_sweep(options: argparse.Namespace, context: Context) -> int:
    from turnwise.config.recipe import load

    overrides, out = _without_directory(options.overrides, options.out)
    varied, fixed = divided(overrides)
    sets = named_sets(options.sets, beside=overrides)
    if sets:
        varied = {SET: list(sets), **varied}
    if not varied:
        raise ConfigError(
            "no option has several values: separate them by commas, such as train.lr=1e-6,3e-6,1e-5, or give sets of options "
            "with --set"
        )
    base, _ = load(options.recipe, fixed)
    directory = out or Path(f"{base.output.rstrip('/')}-sweep")
    sweep = Sweep(directory, options.recipe, fixed, command="sft" if options.sft else "train", sets=sets)
    # `data.eval` is varied or fixed
    chosen = [*varied, *(word.partition("=")[0] for words in sets.values() for word in words)]
    evaluates = "data.eval" in chosen or base.data.eval is not None
    metric = chosen_metric(options.metric, command=sweep.command, evaluates=evaluates)
    try:
        _train_all(sweep, varied, options.trials, metric, context)
    except KeyboardInterrupt:
        told = "the same command goes on with the sweep: it skips the runs that have finished, and resumes the others"
        print_lines(context.console, [told])
        raise
    return sweep.compare(context, metric)


def _train_all(
    sweep: Sweep, varied: Mapping[str, list[str]], trials: int | None, metric: str, context: Context
) -> None:
    """Train all combinations, or with `trials` those that optuna chooses."""
    if trials is not None:
        sweep.open()
        _optimize(sweep, varied, trials, metric, context)
        return
    runs = combinations(varied)
    for words in runs.values():
        sweep.check(words)
    sweep.open()
    sweep.refuse_others(runs)
    for number, (name, words) in enumerate(runs.items(), 1):
        sweep.run(name, words, context, title=f"run {number} of {len(runs)}", metric=metric)


def chosen_metric(given: str | None, *, command: str, evaluates: bool) -> str:
    """The metric that says which run is the best: `given`, or the reward, and the loss of fine-tuning; on held-out rows if there
    are any. Raises ConfigError for a metric that the runs will not have, as far as its name says so."""
    if given is None:
        return ("eval/" if evaluates else "") + ("loss" if command == "sft" else "reward/mean")
    if given.startswith("eval/") and not evaluates:
        raise ConfigError(f"--metric {given} is of held-out rows, and the recipe has none: set data.eval")
    wanted = given.removeprefix("eval/")
    known = [metric for metric in METRICS if metric.matches(wanted)]
    if not known:
        if hint := metric_hint(wanted):
            raise ConfigError(f"--metric {given} is not a metric{hint} (docs/metrics.md lists them)")
        return given  # a name of the user's own code
    lines = {line.strip() for metric in known for line in metric.lines.split(",")}
    line = command if given == wanted else {"train": "eval", "sft": "sft eval"}[command]
    if line not in lines:
        raise ConfigError(
            f"--metric {given} is not a metric of turnwise {command}: it belongs to {', '.join(sorted(lines))}; docs/metrics.md "
            f"lists all"
        )
    return given


# values


def _without_directory(overrides: Sequence[str], out: Path | None) -> tuple[list[str], Path | None]:
    """The overrides without `output=DIR`, which is `--out DIR`, and the directory of the runs."""
    named = [word for word in overrides if word.startswith("output=") and len(split_values(word)) == 1]
    if len(named) != 1 or out is not None:  # `divided` refuses it
        return list(overrides), out
    return [word for word in overrides if word not in named], Path(named[0].removeprefix("output="))


def divided(overrides: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The options with several values or a range, and the other overrides.

    Example: `["a=1,2", "b=[1,2]", "c=x"]` gives `{"a": ["1", "2"]}` and `["b=[1,2]", "c=x"]`.
    """
    varied: dict[str, list[str]] = {}
    fixed: list[str] = []
    for word in overrides:
        key, equals, text = word.partition("=")
        values = split_values(text)
        if equals and key in ("output", "resume", "replace"):
            raise ConfigError(f"{word}: the sweep sets {key} of each run; choose its directory with --out DIR")
        if equals and (len(values) > 1 or _RANGE.fullmatch(text)):
            varied[key] = values
        else:
            fixed.append(word)
    return varied, fixed


def named_sets(given: Sequence[str], *, beside: Sequence[str]) -> dict[str, list[str]]:
    """The options of each set by its name; without options, it is the recipe as it is. `beside`: the other overrides.

    Example: `["lora=model.lora.rank=8 train.lr=1e-4", "plain="]` gives `{"lora": ["model.lora.rank=8", "train.lr=1e-4"],
    "plain": []}`. Raises ConfigError for names and options that cannot be, and for an option that is in a set and beside it.
    """
    sets: dict[str, list[str]] = {}
    others = {word.partition("=")[0] for word in beside}
    for text in given:
        name, equals, options = text.partition("=")
        if not equals or not re.fullmatch(r"[\w.+-]+", name):
            raise ConfigError(
                f"--set {text}: write NAME='OPTION=VALUE ...', such as lora='model.lora.rank=8 train.lr=1e-4'"
            )
        if name in sets:
            raise ConfigError(f"--set {name} is given twice: each set has a name of its own")
        try:
            sets[name] = shlex.split(options)
        except ValueError as error:
            raise ConfigError(f"--set {text}: {error}") from None
        several, _ = divided(sets[name])
        for key, values in several.items():
            raise ConfigError(f"--set {name}: {key}={','.join(values)}: in a set, an option has one value")
        for key in (word.partition("=")[0] for word in sets[name]):
            if key in others:
                raise ConfigError(
                    f"--set {name}: {key} is given beside the sets, too: give it in one of the two places"
                )
    if sets and SET in others:
        raise ConfigError("set=... is given beside --set: all sets of --set are trained, remove it")
    return sets


def split_values(text: str) -> list[str]:
    """The parts between commas that are outside of brackets and quotes. Example: `[1,2],[3]` are `[1,2]` and `[3]`."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        depth += (not quote) * ((character in "[{(") - (character in ")}]"))
        if character == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def combinations(varied: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """The overrides of each run by its name: all combinations of the values. Raises ConfigError for a range."""
    for key, values in varied.items():
        if len(values) == 1 and key != SET:
            raise ConfigError(
                f"{key}={values[0]} is a range: give values with commas, or let optuna choose: --trials 20"
            )
    every = (
        [f"{key}={value}" for key, value in zip(varied, values, strict=True)]
        for values in itertools.product(*varied.values())
    )
    return {run_name(words): words for words in every}


def run_name(words: Sequence[str]) -> str:
    """The name of a run's directory: `lr=1e-6,seed=0`, or `credit.name=rloo,loss.name=gspo` where keys have the same last part.
    Names that are long, or would lose characters, end with a checksum."""
    pairs = _pairs(words)
    last = Counter(key.rpartition(".")[2] for key, _ in pairs)
    short = {key: end if last[end := key.rpartition(".")[2]] == 1 else key for key, _ in pairs}
    text = ",".join(f"{short[key]}={value}" for key, value in pairs)
    name = re.sub(r"[^\w.,=+-]", "-", text)[:100]
    return name if name == text else f"{name}-{hashlib.sha256(' '.join(words).encode()).hexdigest()[:8]}"


# runs


class Sweep:
    """The runs of a sweep in their directory."""

    def __init__(
        self,
        directory: Path,
        recipe: str,
        fixed: Sequence[str],
        *,
        command: str,
        sets: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.directory = directory
        self._recipe, self._fixed, self.command = recipe, list(fixed), command
        text = Path(recipe).read_bytes()
        self._about = {"command": command, "recipe": hashlib.sha256(text).hexdigest(), "options": self._fixed}
        self._sets = {name: list(words) for name, words in (sets or {}).items()}
        self._failed: list[str] = []
        self.runs: dict[str, list[str]] = {}
        """The overrides of each run by its name, in the order in which they were started."""

    def open(self) -> None:
        """Make the directory, or read what it holds of this sweep.

        Raises RunError if it holds something else, or runs that cannot be resumed with the recipe and the options of now.
        """
        file = self.directory / "sweep.json"
        if file.is_file():
            about = json.loads(file.read_text())
            if about.get("command") != self.command:
                raise RunError(
                    f"{self.directory} contains a sweep of turnwise {about.get('command')}: choose another directory with "
                    f"--out DIR"
                )
            self.runs = about["runs"]
            now, self._sets = self._sets, about.get("sets", {}) | self._sets
            same = all(about.get("sets", {}).get(name, words) == words for name, words in now.items())
            if not same or {key: about.get(key) for key in self._about} != self._about:
                self._refuse_other_options()
        elif self.directory.is_dir() and any(self.directory.iterdir()):
            raise RunError(f"{self.directory} contains other files: choose another directory with --out DIR")
        self.directory.mkdir(parents=True, exist_ok=True)

    def _refuse_other_options(self) -> None:
        """Refuse a recipe or fixed options with which a run of this directory cannot be resumed. Raises RunError."""
        from turnwise.config.recipe import load
        from turnwise.config.resume_rules import check_options, option_values

        for name, words in self.runs.items():
            run = self.directory / name
            if not (run / "config.yaml").is_file():  # it has not begun
                continue
            before, _ = load(run / "config.yaml")
            try:
                now = self._config(name, words)
                check_options(
                    option_values(before),
                    option_values(now),
                    named=now.resume_changes,
                    where=str(run),
                    checkpoint=str(run / "checkpoint"),
                )
            except RunError as error:
                raise RunError(
                    f"{self.directory} contains a sweep with other options: choose another directory with --out DIR, or: {error}"
                ) from None

    def _config(self, name: str, words: Sequence[str]) -> Config:
        """The recipe with which a run is started or resumed. Raises ConfigError."""
        from turnwise.config.recipe import load

        return load(self._recipe, self._overrides(name, words))[0]

    def _overrides(self, name: str, words: Sequence[str]) -> list[str]:
        """What a run is started with: the fixed options, and its own, of which those of its set are the first."""
        return [*self._options(words), "resume=auto", f"output={self.directory / name}"]

    def _options(self, words: Sequence[str]) -> list[str]:
        chosen = [one for key, name in _pairs(words) if key == SET for one in self._sets[name]]
        return [*self._fixed, *chosen, *(word for word in words if not word.startswith(f"{SET}="))]

    def refuse_others(self, runs: Mapping[str, Sequence[str]]) -> None:
        """Refuse a directory with runs of the same names and of other options. Raises RunError.

        The name of a run has the last part of each key: `lr=1e-6` is a run of `train.lr=1e-6` or of `critic.lr=1e-6`.
        """
        for name, words in runs.items():
            if self.runs.get(name, list(words)) != list(words):
                raise RunError(
                    f"{self.directory / name} is a run with {' '.join(self.runs[name])}, and not with {' '.join(words)}: choose "
                    f"another directory with --out DIR"
                )

    def check(self, words: Sequence[str]) -> None:
        """Refuse a combination that cannot be trained, before any run begins. Raises ConfigError."""
        from turnwise.commands.command import refuse_missing_files
        from turnwise.config.recipe import load
        from turnwise.config.sft_checks import refuse_sft_without_effect
        from turnwise.config.train_checks import refuse_without_effect

        config, _ = load(self._recipe, self._options(words))
        refuse_missing_files(config)
        (refuse_sft_without_effect if self.command == "sft" else refuse_without_effect)(config)

    def state(self, name: str) -> str | None:
        """How the run of this name ended; None if it was not started."""
        path = self.directory / name
        return summarize_run(path).state if may_be_run(path) else None

    def run(self, name: str, words: Sequence[str], context: Context, *, title: str, metric: str) -> None:
        """Train a run, unless it is finished, with what it prints in a file beside its directory. A run that fails is noted.
        Raises KeyboardInterrupt after a signal."""
        path, state = self.directory / name, self.state(name)
        if state == "finished" and self._has_more_steps(name, words):
            state = "shorter"
        self.runs[name] = list(words)
        about = {**self._about, **({"sets": self._sets} if self._sets else {}), "runs": self.runs}
        (self.directory / "sweep.json").write_text(json.dumps(about, indent=1) + "\n")
        if state == "finished":
            print_lines(context.console, [f"{title}: {' '.join(words)} is finished already"])
            return
        log, begun = self.directory / f"{name}.log", time.monotonic()
        resumed = "" if state is None else " (resumed)"
        print_lines(context.console, [f"{title}: {' '.join(words)} into {path}{resumed}; what it prints: {log}"])
        command = [sys.executable, "-m", "turnwise", self.command, self._recipe, *self._overrides(name, words)]
        if (status := context.stops.run(_process(command, log))) != 0:
            self._failed.append(name)
            end = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:]
            print_lines(
                context.console,
                [
                    *(f"  {line}" for line in end),
                    f"{title}: ended with status {status}; the sweep goes on",
                ],
                style="red",
            )
            return
        print_lines(
            context.console, [f"{title}: finished after {time.monotonic() - begun:.0f} s{self._value(name, metric)}"]
        )

    def _has_more_steps(self, name: str, words: Sequence[str]) -> bool:
        """Whether the recipe has more steps now than a finished run."""
        run, now = summarize_run(self.directory / name), self._config(name, words)
        if self.command == "sft":
            steps, epochs = now.sft.steps, now.sft.epochs
        else:
            steps, epochs = now.train.known_steps, now.train.epochs
        if steps is None or run.step is None:  # the number of rows decides
            return run.options.get(f"{self.command}.epochs") != epochs
        return steps > run.step

    def _value(self, name: str, metric: str) -> str:
        """The last value of a metric of a run, for people; empty where there is none."""
        from turnwise.terminal.tables import number

        path = self.directory / name
        metrics = summarize_run(path).metrics if may_be_run(path) else {}
        return f": {metric} {number(metrics[metric].last)}" if metric in metrics else ""

    def result(self, name: str, metric: str) -> float | None:
        """The last value of a metric in a run; None if the run has not finished. Raises RunError if a finished one lacks it."""
        if self.state(name) != "finished":
            return None
        metrics = summarize_run(self.directory / name).metrics
        if metric not in metrics:
            raise RunError(
                f"{self.directory / name} has no metric {metric}{metric_hint(metric, list(metrics))}: choose one with --metric. "
                f"The metrics are: {', '.join(metrics)}"
            )
        return metrics[metric].last

    def compare(self, context: Context, metric: str) -> int:
        """Print the comparison, sorted by a metric if any run has it. Returns the exit status: 1 if a run failed."""
        from turnwise.terminal.runs import (
            known_metrics,
            print_left_out,
            print_over_seeds,
            print_runs,
            run_records,
            seed_records,
        )

        summaries, problems = find_summaries([self.directory / name for name in self.runs])
        if summaries:
            names = list(dict.fromkeys(name for run in summaries for name in run.metrics))
            by = metric if metric in names else None
            shown = [] if by is None else list(dict.fromkeys([*known_metrics(summaries, []), by]))
            print_lines(context.console, [""])
            print_runs(context.console, run_records(summaries, metrics=shown, by=by))
            if by is not None:
                print_over_seeds(context.console, seed_records(summaries, metrics=shown, by=by))
            else:
                print_lines(
                    context.console, [f"not sorted: no run has the metric {metric}{metric_hint(metric, names)}"]
                )
        print_left_out(context.console, problems)
        print_lines(context.console, [f"to see them again: turnwise show {self.directory}"])
        return 1 if self._failed else 0


async def _process(command: Sequence[str], log: Path) -> int:
    """Run a command to its end, and append what it prints to a file. If this process is stopped, the command is stopped too, and
    writes its checkpoint.

    It has a session of its own: Ctrl-C in the terminal would reach it a second time, and a second signal ends a run at once.
    """
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *command, start_new_session=True, stdout=output, stderr=asyncio.subprocess.STDOUT
        )
    try:
        return await process.wait()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await process.wait()
        raise


# optuna


def _optimize(sweep: Sweep, varied: Mapping[str, Sequence[str]], trials: int, metric: str, context: Context) -> None:
    """Train `trials` runs with values that optuna chooses (its default sampler). Finished runs of the directory count.

    Raises ConfigError if optuna is not installed, and RunError if the directory has trials of other options or values, or a
    finished run lacks the metric.
    """
    try:
        import optuna  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError("--trials needs the `optuna` package: pip install 'turnwise[sweep]'") from None

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {key: _distribution(optuna, values) for key, values in varied.items()}
    earlier = {name: words for name, words in sweep.runs.items() if name.startswith("trial-")}
    for name, words in earlier.items():
        _trial(optuna, sweep.directory / name, words, distributions, None)
    # a sampler draws its first trials from its seed alone: a sweep that goes on must not draw the same ones again
    sampler = optuna.samplers.TPESampler(seed=len(earlier))
    study = optuna.create_study(direction="minimize" if lower_is_better(metric) else "maximize", sampler=sampler)
    for number in range(trials):
        name = f"trial-{number:03}"
        title = f"trial {number + 1} of {trials}"
        if (words := earlier.get(name)) is not None:  # an earlier call has chosen these values
            sweep.run(name, words, context, title=title, metric=metric)
            value = sweep.result(name, metric)
            study.add_trial(_trial(optuna, sweep.directory / name, words, distributions, value))
            continue
        trial = study.ask(distributions)
        words = [f"{key}={value}" for key, value in trial.params.items()]
        sweep.check(words)
        sweep.run(name, words, context, title=title, metric=metric)
        value = sweep.result(name, metric)
        study.tell(trial, value, state=optuna.trial.TrialState.FAIL if value is None else None)


def _trial(optuna: Any, path: Path, words: Sequence[str], distributions: Mapping[str, Any], value: float | None) -> Any:
    """A trial with values that were chosen before; without a result, it has failed.

    Raises RunError if other options were varied, or within other values.
    """
    pairs = _pairs(words)
    other = RunError(
        f"{path} is a trial with {' '.join(words)}, which are not among the values of this sweep: choose another directory with "
        f"--out DIR"
    )
    if {key for key, _ in pairs} != set(distributions):
        raise other
    state = optuna.trial.TrialState.FAIL if value is None else optuna.trial.TrialState.COMPLETE
    try:
        params = {key: _parameter(text, distributions[key]) for key, text in pairs}
        return optuna.trial.create_trial(params=params, distributions=dict(distributions), value=value, state=state)
    except ValueError:
        raise other from None


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    return [(key, value) for key, _, value in (word.partition("=") for word in words)]


def _distribution(optuna: Any, values: Sequence[str]) -> Any:
    """Values to choose from, or a range: of integers, or of numbers, on a logarithmic scale if its ends are far apart.

    Raises ConfigError if the ends of a range are not numbers.
    """
    if len(values) > 1 or (match := _RANGE.fullmatch(values[0])) is None:
        return optuna.distributions.CategoricalDistribution(list(values))
    try:
        low, high = float(match["low"]), float(match["high"])
        whole = all(re.fullmatch(r"[+-]?\d+", match[end]) for end in ("low", "high"))
        log = low > 0 and high / low >= _LOG_SCALE
        if whole:
            return optuna.distributions.IntDistribution(int(low), int(high), log=log)
        return optuna.distributions.FloatDistribution(low, high, log=log)
    except ValueError as error:
        raise ConfigError(f"{values[0]} is not a range of numbers: {error}") from None


def _parameter(text: str, distribution: Any) -> Any:
    """A value of sweep.json as optuna knows it."""
    kind = type(distribution).__name__
    return text if kind.startswith("Categorical") else int(text) if kind.startswith("Int") else float(text)
