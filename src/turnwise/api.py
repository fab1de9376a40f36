"""turnwise from Python: the commands as functions, with live objects and typed results.

Example::

    import turnwise
    from turnwise import Opening, Reply, environment

    @environment
    async def echo(row):
        turn = yield Opening(messages=row.messages)
        yield Reply(reward=float(row["answer"] in turn.text), done=True)

    result = turnwise.train(model="demo/model", rows=[{"prompt": "2+2?", "answer": "4"}], environment=echo, train={"steps": 5})
    print(result.metrics[-1]["reward/mean"], result.trajectories[-1].messages)

The functions work where an event loop is running, as in a notebook. The options are those of a recipe (`Options`, and
docs/recipes.md). Errors are `TurnwiseError`s.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, Unpack

from turnwise.errors import ConfigError
from turnwise.local_paths import as_given
from turnwise.options.schema import Config
from turnwise.recipe import Options, Recipe, rows_option, saved_model
from turnwise.record.evaluation import Comparison, EvaluationResult, ModelResult, read_results
from turnwise.record.reader import RecordedTrajectories, evaluation_frame, metrics_frame, read_lines, trajectories_frame
from turnwise.types import Group, Trajectory
from turnwise.user_code.copies import copy_containers

if TYPE_CHECKING:
    from rich.console import Console

    from turnwise.record.run_directory import RunDirectory
    from turnwise.runs.evaluation import NamedOptions
    from turnwise.runs.run_state import RunState

__all__ = [
    "Callback",
    "EvaluationRun",
    "Options",
    "Recipe",
    "RunResult",
    "Step",
    "StopTraining",
    "evaluate",
    "rollout",
    "sft",
    "train",
]

T = TypeVar("T")

Evaluated: TypeAlias = "str | Path | RunResult | tuple[Any, Any] | Mapping[str, Any]"
"""A model of `evaluate`."""


class StopTraining(Exception):
    """Raised by a callback to end the run after this step. A checkpoint is written, as at the end of a run."""


@dataclass(frozen=True)
class Step:
    """A finished step of training, or an evaluation."""

    number: int
    """The number of finished steps."""
    metrics: Mapping[str, Any]
    """The metrics by name (docs/metrics.md)."""
    file: Path
    """The file that holds the trajectories of all steps."""

    @cached_property
    def trajectories(self) -> list[Trajectory]:
        """The trajectories of the step, as recorded."""
        recorded, found = RecordedTrajectories(self.file), list[Trajectory]()
        for place in reversed(range(len(recorded))):
            trajectory = recorded[place]
            if trajectory.step != self.number:
                break
            found.append(trajectory)
        return found[::-1]


class Callback(Protocol):
    """Receives the finished steps and evaluations of a run, in the event loop of the run. A plain function receives the steps.

    A callback that raises StopTraining ends the run after the step. Another exception ends the run as an error does: a checkpoint
    of the last finished step is written.
    """

    def on_step(self, step: Step) -> None:
        """Called after each step."""
        ...

    def on_evaluation(self, step: Step) -> None:
        """Called after each evaluation on held-out rows."""
        ...


Callbacks = Sequence[Callback | Callable[[Step], None]]


@dataclass(frozen=True)
class RunResult:
    """What a run has left in its directory."""

    directory: Path

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each step."""
        return list(read_lines(self.directory / "metrics.jsonl"))

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """The metrics of each evaluation; empty without held-out rows."""
        return list(read_lines(self.directory / "evaluations.jsonl"))

    @property
    def trajectories(self) -> RecordedTrajectories:
        """All conversations, each read when it is asked for."""
        return RecordedTrajectories(self.directory)

    @property
    def model(self) -> Path:
        """The directory of the trained model, or of its adapter. Raises ConfigError if the run trained nothing."""
        path = self.directory / "checkpoint"
        if not path.exists():
            raise ConfigError(f"{self.directory} has no checkpoint: conversations without training leave no model")
        return path

    def metrics_frame(self) -> Any:
        """The metrics as a pandas data frame: one row for each step."""
        return metrics_frame(self.directory)

    def _repr_html_(self) -> str:
        """What a notebook shows: how the run ended, its curve, its metrics, and three conversations. All texts are escaped."""
        from turnwise.terminal.run_card import run_html

        return run_html(self.directory)

    def to_pandas(self) -> Any:
        """The conversations as a pandas data frame: one row for each (`record.to_pandas`)."""
        return trajectories_frame(self.directory)


@dataclass(frozen=True)
class EvaluationRun:
    """What an evaluation has left in its directory. `EvaluationRun(Path("runs/demo-eval"))` reads an earlier evaluation."""

    directory: Path

    @cached_property
    def result(self) -> EvaluationResult:
        """All numbers, as in eval.json. Raises RunError if the evaluation is not finished."""
        return read_results(self.directory / "eval.json")

    @property
    def models(self) -> Mapping[str, ModelResult]:
        """The result of each model by its name, in the order of the evaluation."""
        return {model.name: model for model in self.result.models}

    @property
    def comparisons(self) -> Sequence[Comparison]:
        """The paired tests."""
        return self.result.comparisons

    def trajectories(self, model: str | None = None) -> RecordedTrajectories:
        """The conversations of a model, each read when it is asked for. The name may be left out if there is only one model.

        Raises ConfigError.
        """
        names = list(self.models)
        if model is None and len(names) == 1:
            (model,) = names
        if model not in names:
            raise ConfigError(f"trajectories({model!r}): give the name of one of the models: {', '.join(names)}")
        return RecordedTrajectories(self.directory / model)

    def to_pandas(self) -> Any:
        """The conversations of all models as a pandas data frame, with the column `model` (`record.to_pandas`)."""
        return evaluation_frame(self.directory, list(self.models))


def train(
    recipe: Recipe | None = None, *, callbacks: Callbacks = (), progress: bool = True, **options: Unpack[Options]
) -> RunResult:
    """Train by reinforcement learning, as `turnwise train`.

    Give a `Recipe`, or its options by keyword. `progress` shows the steps. Raises TurnwiseError, and KeyboardInterrupt after
    Ctrl-C, with a checkpoint of the last finished step.
    """
    from turnwise.terminal.train_report import TrainReport
    from turnwise.train import assemble
    from turnwise.train import train as work

    config = _config(recipe, options)
    run = assemble(config)
    report = _observed(TrainReport)(_console(progress), run, callbacks)
    return _run(run, work(run, report), report)


def sft(
    recipe: Recipe | None = None, *, callbacks: Callbacks = (), progress: bool = True, **options: Unpack[Options]
) -> RunResult:
    """Fine-tune on given conversations, as `turnwise sft`. Parameters and errors are those of `train`."""
    from turnwise.sft.fine_tune import assemble, fine_tune
    from turnwise.terminal.train_report import SftReport

    config = _config(recipe, options)
    run = assemble(config)
    report = _observed(SftReport)(_console(progress), run, callbacks)
    return _run(run, fine_tune(run, report), report)


def rollout(recipe: Recipe | None = None, *, progress: bool = True, **options: Unpack[Options]) -> RunResult:
    """Run and score conversations without training, as `turnwise rollout`. They are written to the recipe's `output`.

    Raises TurnwiseError. If all conversations fail, they are in the record, and RolloutError is raised.
    """
    from turnwise.runs.sampling_only import collect

    config = _config(recipe, options)
    out = Path(config.output)
    place = out.absolute()  # user code may change the working directory
    _wait_for(collect(config, out, _console(progress)))
    return RunResult(as_given(out, place))


def evaluate(
    recipe: Recipe | None = None,
    *,
    models: Sequence[Evaluated] | Mapping[str, Evaluated] = (),
    single_turn: bool = False,
    out: str | Path | None = None,
    progress: bool = True,
    **options: Unpack[Options],
) -> EvaluationRun:
    """Evaluate models on held-out rows (`eval_rows`), as `turnwise eval`. Returns the numbers and the conversations.

    Without `models`, the recipe's model is evaluated. Each model is a text as after `--model` (a model directory, a hub name,
    the directory of a run, `model@https://host/v1`, a YAML file with options), a `RunResult`, a pair of a transformers model and
    its tokenizer, or a mapping with options of the recipe that hold for this model only. A mapping gives the models names.
    All models answer the same rows with the same seeds; each further model is compared with the first.

    With `single_turn`, each model is also evaluated with one turn in each conversation. `out` is the directory to write to; by
    default the recipe's `output` with `-eval` behind it. An evaluation in this directory is resumed with `resume="auto"`.

    Raises TurnwiseError. If all conversations of a model fail, its means are None.
    """
    from turnwise.runs.evaluation import evaluate_models, evaluated_models
    from turnwise.terminal.tables import print_results

    if recipe is None and "eval_rows" in options and "rows" not in options:
        rows = rows_option(options.pop("eval_rows"), "eval")
        options["data"] = {"train": rows, "eval": rows, **options.get("data", {})}  # training rows have no effect here
    config = _config(recipe, options)
    directory = Path(f"{config.output.rstrip('/')}-eval") if out is None else Path(out)
    named = models.items() if isinstance(models, Mapping) else [(None, model) for model in models]
    values = [_evaluated(name, model, directory, number) for number, (name, model) in enumerate(named, 1)]
    chosen = evaluated_models(config, values, single_turn=single_turn)
    console = _console(progress)
    place = directory.absolute()  # user code may change the working directory
    print_results(console, _wait_for(evaluate_models(config, chosen, directory, console)))
    return EvaluationRun(as_given(directory, place))


def _evaluated(name: str | None, model: Evaluated, directory: Path, number: int) -> str | NamedOptions:
    """A model of `evaluate` as a value of `--model`, or as options of the recipe."""
    from turnwise.runs.evaluation import NamedOptions

    if isinstance(model, Mapping):
        return NamedOptions(name=name or f"model-{number}", options=model)
    if isinstance(model, tuple):
        name = name or f"model-{number}"
        of_object, tokenizer = model
        folder = saved_model(of_object, tokenizer, directory.with_name(f"{directory.name}-models") / name)
        return NamedOptions(name=name, options={"model": {"path": str(folder)}})
    text = str(model.directory if isinstance(model, RunResult) else model)
    return text if name is None else f"{name}={text}"


def _config(recipe: Recipe | None, options: Options) -> Config:
    if recipe is not None and options:
        raise ConfigError(
            f"a recipe and the options {', '.join(options)} are both given: give one of them, or recipe.with_options(...)"
        )
    if recipe is not None and not isinstance(recipe, Recipe):
        raise ConfigError(f"{recipe!r:.80} is not a Recipe; for a file: Recipe.from_yaml({str(recipe)!r:.80})")
    return (recipe or Recipe(**options)).config


def _console(progress: bool) -> Console:
    from rich.console import Console

    return Console(quiet=not progress)


def _observed(report: type[Any]) -> type[Any]:
    """The class of a report that also calls callbacks."""

    class Observed(report):
        def __init__(self, console: Console, run: RunState, callbacks: Callbacks) -> None:
            super().__init__(console, run.activity)
            self._run, self._callbacks = run, callbacks

        def step(self, metrics: Mapping[str, Any], problems: Sequence[str] = ()) -> None:
            super().step(metrics, problems)
            self._notify("on_step", metrics, self._directory.trajectories)

        def evaluated(self, summary: Mapping[str, Any], groups: Sequence[Group] = ()) -> None:
            super().evaluated(summary, groups)
            self._notify("on_evaluation", summary, self._directory.eval_trajectories)

        @property
        def _directory(self) -> RunDirectory:
            return self._run.directory

        def _notify(self, event: str, metrics: Mapping[str, Any], file: Path) -> None:
            for callback in self._callbacks:
                function: Any = getattr(callback, event, callback if event == "on_step" else None)
                if function is None:
                    continue  # a plain function receives the steps only
                try:
                    function(Step(metrics["step"], copy_containers(dict(metrics)), file))  # a callback may change it
                except StopTraining:
                    self._run.steps = self._run.step  # the loop ends as after the last step
                    if self._run.saved < self._run.step:
                        self._run.save()

    return Observed


def _run(run: RunState, work: Coroutine[Any, Any, None], report: Any) -> RunResult:
    from turnwise.terminal.report import Heartbeat

    try:
        with Heartbeat(run.activity, report.console):
            _wait_for(work)
    finally:
        report.close()
    return RunResult(run.directory.path)


def _wait_for(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine. If an event loop is running in this thread, as in a notebook, it runs in another thread."""
    from turnwise.commands.command import Stops

    if _loop_is_running():
        return _in_thread(work)
    # not while an exception is handled: each error of the run would be told as a consequence of it
    with Stops() as stops:
        return stops.run(work)


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _in_thread(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a thread with an event loop of its own. Ctrl-C cancels it, and waits until it has ended."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(work)
    thread = threading.Thread(target=lambda: _complete(loop, task), name="turnwise", daemon=True)
    thread.start()
    interrupted = False
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt:
            interrupted = True
            loop.call_soon_threadsafe(task.cancel)
    if interrupted:
        raise KeyboardInterrupt
    return task.result()


def _complete(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(asyncio.wait([task]))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()
