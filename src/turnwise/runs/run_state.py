"""The state of a run, whether it trains or fine-tunes: what it reads at its start, its finished steps, and how it ends.

The inputs are rows, renderer and run directory, without any weights. A finished step leaves behind its record, its checkpoint
when one is due, and what the loggers of the recipe (experiment trackers and traces) are sent.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import time
from asyncio import CancelledError
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from turnwise import assembly
from turnwise.chat.media import process_row_media
from turnwise.chat.renderer import Renderer
from turnwise.data.order import RowOrder
from turnwise.doctor.template import preflight, preflight_rows, unread_columns
from turnwise.errors import HealthError, RunError, TurnwiseError, text_of
from turnwise.local_paths import has_all_weights, saved_policy
from turnwise.loggers.logger import Loggers
from turnwise.loggers.tracers import start_tracer
from turnwise.loggers.trackers import Start, start_tracker
from turnwise.models.device import slow_products
from turnwise.options.algorithm import LossSection, OptimizationSection
from turnwise.options.schema import Config
from turnwise.record.metric_names import metric_hint
from turnwise.record.metrics import template_mismatches
from turnwise.record.reader import read_lines
from turnwise.record.run_directory import RunDirectory
from turnwise.record.summary import lower_is_better
from turnwise.record.writer import Retention
from turnwise.rewards.turn_weights import TurnWeighting
from turnwise.runs.resuming import OpenedRun, open_run, write_models
from turnwise.terminal.report import Activity
from turnwise.training import fingerprint
from turnwise.training.batch import Batch, pack
from turnwise.training.checkpoint import Checkpoints, PendingCheckpoint, WritingThread, copied_to_cpu
from turnwise.training.learner import Critic, Learner, Writers, no_shards
from turnwise.types import Row, Trajectory

# inputs

ReadRows = Callable[[Config, bool], list[Row]]
"""Reads the training rows, or the held-out rows if the second argument is true."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """Everything of a run that does not need the model's weights."""

    config: Config
    """The recipe, with `train.steps` in place of `train.epochs`; `opened.config` is the recipe as it was written."""
    opened: OpenedRun
    renderer: Renderer
    rows: list[Row]
    held_out: list[Row]
    """Empty without data.eval."""
    notes: list[str]
    """Notes for the person who starts the run: on the chat template, and on rows that are left out."""


def read_inputs(config: Config, kind: Literal["train", "sft"], read: ReadRows) -> RunInputs:
    """Open the run directory, read the rows, load the tokenizer and check the chat template.

    A resumed run is compared with the run that was started: rows and tokenizer must be the same. Raises TurnwiseError.
    """
    opened = open_run(config, kind)
    rows = read(config, False)
    held_out = read(config, True) if config.data.eval is not None else []
    opened.compare_rows(rows)
    renderer = assembly.renderer(config, opened.source)
    tokenizer = fingerprint.of_tokenizer(renderer.tokenizer)
    opened.compare_tokenizer(tokenizer)
    tools_in_rows = kind == "sft" and any(row.fields.get("tools") for row in [*rows, *held_out])
    row_notes = preflight_rows(config, renderer, [*rows, *held_out], tools=tools_in_rows)  # its errors name the row
    notes = preflight(
        config, renderer, source=str(opened.source), tools=tools_in_rows, rows=rows, training=kind == "train",
        tokenizer=tokenizer,
    )  # fmt: skip
    if not config.cluster.distributed:  # ranks divide the model among them
        from turnwise.doctor.fit import fitted_to_card  # torch
        from turnwise.doctor.memory import longest_prompt, refuse_too_large

        notes += refuse_too_large(config, str(opened.source), section=kind)
        prompt = longest_prompt(config, rows, renderer) if kind == "train" else None
        config, computed = fitted_to_card(config, str(opened.source), section=kind, prompt=prompt)
        notes += computed
    notes += [] if (slow := slow_products(config)) is None else [slow]
    notes += row_notes
    notes += unread_columns(config, rows) if kind == "train" else []
    rows, dropped = assembly.drop_long_prompts(config, rows, renderer)
    held_out, held_out_dropped = assembly.drop_long_prompts(config, held_out, renderer)
    notes += [*dropped, *(f"held-out rows: {note}" for note in held_out_dropped)]
    if kind == "train" and len(rows) < config.train.batch_size:
        notes.append(
            f"train.batch_size={config.train.batch_size} is more than the {len(rows)} rows of data.train, so a step uses rows "
            f"more than once: set train.batch_size={len(rows)}, and raise train.group_size for more conversations of each row"
        )
    processed = process_row_media([*rows, *held_out], renderer.vision, wanted=config.data.return_multi_modal_inputs)
    return RunInputs(
        config=config.with_known_steps(len(rows)),
        opened=opened,
        renderer=renderer,
        rows=processed[: len(rows)],
        held_out=processed[len(rows) :],
        notes=notes,
    )


def fitted_to_ranks(inputs: RunInputs, learner: Learner, kind: Literal["train", "sft"]) -> RunInputs:
    """The inputs with the numbers that the recipe leaves open computed for the GPUs of the learner's ranks, which are known when
    they are connected. Those of a run in one process are known before (`read_inputs`)."""
    if not inputs.config.cluster.distributed:
        return inputs
    from turnwise.doctor.memory import longest_prompt  # torch
    from turnwise.planning.memory import fitted_to_ranks as fitted
    from turnwise.training.sharded.sharded_learner import ShardedLearner  # torch.distributed

    assert isinstance(learner, ShardedLearner)
    config = inputs.config
    prompt = longest_prompt(config, inputs.rows, inputs.renderer) if kind == "train" and learner.gpus else None
    known, notes = fitted(config, str(inputs.opened.source), learner.gpus, section=kind, prompt=prompt)
    return replace(inputs, config=known, notes=[*inputs.notes, *notes])


# steps

_CHECKPOINT_SHARE = 0.03
"""The share of a run's time that checkpoints may take if the recipe does not say how often they are written."""

_log = logging.getLogger(__name__)


def checkpoint_due(step: int, *, every: int | None, since: float, cost: float | None, writing: bool = False) -> bool:
    """Whether a checkpoint is written after a finished step.

    `every` is the number of steps between checkpoints. None: the first step has one (`cost` is None then), and later steps when
    `since`, the seconds since the last checkpoint, is so long that its `cost`, also in seconds, is at most 3 % of the time, and
    none is being written (`writing`), for which training would wait.
    """
    if every is not None:
        return step % every == 0
    return cost is None or (not writing and cost <= _CHECKPOINT_SHARE * (since + cost))


@dataclass(frozen=True, slots=True)
class _Written:
    """A checkpoint whose large files are written, or are being written in a thread."""

    pending: Future[PendingCheckpoint]
    thread: WritingThread


@dataclass(slots=True, kw_only=True)
class RunState:
    """What training and fine-tuning have in common."""

    inputs: RunInputs
    learner: Learner
    options: OptimizationSection
    """The options of the optimizer: `train` or `sft` of the recipe."""
    steps: int
    """The number of steps of the complete run."""
    weigh_turns: TurnWeighting
    """Sets the weight of each turn in the loss (`loss_mask`)."""
    loss: LossSection
    """How the loss of a batch is averaged."""
    critic: Critic | None = None
    """The critic, where credit needs one."""
    others: Mapping[str, Learner] = field(default_factory=dict)
    """The learners of further policies that the run trains, by the names of the policies."""
    loggers: Loggers = field(default_factory=Loggers)
    """The experiment trackers and traces of the recipe."""
    retention: Retention = field(init=False)
    """Which conversations are recorded."""
    notes: list[str] = field(init=False)
    """Notes that are printed when the run starts."""
    order: RowOrder = field(init=False)
    step: int = field(init=False)
    """The number of finished steps."""
    saved: int = field(init=False)
    """The number of steps that the newest checkpoint holds."""
    evaluated: int = field(init=False)
    """The number of steps before the last evaluation, -1 before the first: a resumed run does not repeat it."""
    updating: bool = field(default=False, init=False)
    """Whether weights and record are between two steps, so that a checkpoint would be inconsistent."""
    mismatch_reported: bool = field(default=False, init=False)
    """Whether the warning about template mismatches was logged: once is enough, the metrics keep counting."""
    best_reported: bool = field(default=False, init=False)
    """Whether the warning was logged that evaluations have no value of `checkpoint.best`."""
    activity: Activity = field(default_factory=Activity, init=False)
    checkpoint_seconds: float | None = field(default=None, init=False)
    """The seconds that the last checkpoint took; None before the first."""
    saved_at: float = field(default_factory=time.monotonic, init=False)
    """When the last checkpoint was written, by `time.monotonic`."""
    _completed: Future[int] | None = field(default=None, init=False)
    """The step of the checkpoint that is being written beside the training; None if there is none."""

    def __post_init__(self) -> None:
        inputs, opened = self.inputs, self.inputs.opened
        self.notes = [*inputs.notes, *opened.notes]
        self.retention = Retention(self.config.record.every, self.config.record.best_and_worst)
        self.order = assembly.row_order(inputs.config, inputs.rows)
        self.step = self.saved = opened.step
        self.evaluated = opened.number("evaluated", -1)
        if opened.saved is not None:
            self.checkpoint_seconds = opened.saved.about["seconds"]

    @property
    def config(self) -> Config:
        return self.inputs.config

    @property
    def rows(self) -> Sequence[Row]:
        return self.inputs.rows

    @property
    def held_out(self) -> Sequence[Row]:
        return self.inputs.held_out

    @property
    def directory(self) -> RunDirectory:
        return self.inputs.opened.directory

    @property
    def checkpoints(self) -> Checkpoints:
        return self.inputs.opened.checkpoints

    @property
    def learning_rate(self) -> float:
        """The learning rate of the step that comes next."""
        return self.options.lr_at(self.step, steps=self.steps)

    def pack(
        self,
        trajectories: Sequence[Trajectory],
        *,
        compared: Collection[str] = (),
        learner: Learner | None = None,
        loss: LossSection | None = None,
    ) -> Batch:
        """Pack trajectories into a batch, as the recipe and the learner require. Those with the ids `compared` are in the pass
        with gradients also if their advantages are 0. `learner` and `loss` are those of another trained policy."""
        options, required = self.options, (learner or self.learner).requirements
        return pack(
            trajectories,
            loss=loss or self.loss,
            micro_batch_tokens=required.tokens(options.micro_batch_tokens),
            parallel=required.parallel,
            share_prompts=required.share_prompts,
            keep_zero=required.keep_zero,
            measure_zero=required.measure_zero,
            compared=compared,
            kinds=required.logprob_kinds,
            version=self.step,
            masks=self.inputs.renderer.masks,
        )

    def evaluation_due(self, every: int) -> bool:
        """Whether an evaluation comes next: before the first step, after the last, and `every` so many steps (0: no others)."""
        if not self.held_out or self.evaluated == self.step:
            return False
        return self.step == 0 or self.step >= self.steps or (every > 0 and self.step % every == 0)

    def write_evaluation(self, summary: Mapping[str, Any], trajectories: Iterable[Trajectory]) -> None:
        """Write down an evaluation of the present weights. Raises RunError."""
        recorded = list(trajectories)
        self.directory.write_evaluation(dict(summary), recorded)
        self.loggers.evaluation(summary, recorded)
        self.evaluated = self.step
        self.keep_best()

    def keep_best(self) -> None:
        """Keep the checkpoint of the present weights if their evaluation, the last one, is the best by `checkpoint.best`.

        Raises RunError if it cannot be written.
        """
        name = self.config.checkpoint.best
        if name is None:
            return
        sign = -1 if lower_is_better(name) else 1
        evaluations = list(read_lines(self.directory.evaluations))
        *before, last = [sign * float("nan" if (v := line.get(name)) is None else v) for line in evaluations]
        if math.isnan(last) and not self.best_reported:
            self.best_reported = True
            known = [key for key, value in evaluations[-1].items() if isinstance(value, int | float) and key != "step"]
            hint = metric_hint(name, known) or f"; there are: {', '.join(known)}"
            self.warn(self.step, "best", f"checkpoint.best={name}: the evaluation has no value of {name}{hint}")
        # the weights of the start are the model of the recipe, and need no checkpoint
        if self.step > 0 and not math.isnan(last) and not any(last <= value for value in before):
            self.settle()
            if self.saved != self.step:
                self.save()
            self.checkpoints.keep_best()

    def data_position(self) -> dict[str, Any]:
        """The position in the data: what a checkpoint remembers beside the number of steps."""
        return {"evaluated": self.evaluated}

    def advance_data(self) -> None:
        """Count the rows that the finished step has used."""

    def log_conversation(self, trajectories: Sequence[Trajectory]) -> None:
        """Log the story of one of the step's conversations, for `TURNWISE_LOG=debug`."""
        if not _log.isEnabledFor(logging.DEBUG):
            return
        from turnwise.terminal.conversation import log_conversation  # not in the files of an ordinary step

        log_conversation(trajectories, decode=self.inputs.renderer.decode, step=self.step + 1)

    def begin_update(self) -> None:
        """Called before the first optimizer step of a step: until the step is finished, no checkpoint can be written.

        Raises RunError if the one in the background could not be written: now the last finished step can still be saved.
        """
        if self._completed is not None and self._completed.done():
            self.settle()
        self.updating = True

    def finish_step(
        self,
        metrics: Mapping[str, Any],
        trajectories: Sequence[Trajectory],
        *,
        recorded: Sequence[Trajectory] | None = None,
        seconds: Mapping[str, float],
        started: float,
    ) -> dict[str, Any]:
        """Write down a step, with a checkpoint if one is due. Returns the step's line of metrics.jsonl.

        `trajectories` are those of the step, and `recorded` those that loggers receive and `retention` chooses from (all unless
        given). `seconds` are the times
        of the parts of the step; `started` is when it started, by `time.perf_counter`.

        The step's line is written after the large files of the checkpoint and before its last file: it holds the time that the
        checkpoint took, and the checkpoint includes the line. Raises RunError if something cannot be written; then no checkpoint
        holds the step.
        """
        self._warn_template_mismatch(trajectories)
        self.log_conversation(trajectories)
        self.updating = True
        line = {
            "step": self.step + 1,
            **metrics,
            "lr": self.learning_rate,
            **{f"seconds/{name}": round(value, 4) for name, value in seconds.items()},
        }
        written = trajectories if recorded is None else recorded
        kept = self.retention.kept(written, step=self.step + 1, steps=self.steps)
        if self.retention.drops:
            line["record/dropped"] = len(written) - len(kept)
        before = time.perf_counter()
        due = self.step + 1 == self.steps or checkpoint_due(
            self.step + 1,
            every=self.config.checkpoint.every,
            since=time.monotonic() - self.saved_at,
            cost=self.checkpoint_seconds,
            writing=self._completed is not None and not self._completed.done(),
        )
        pending = self._write_checkpoint(self.step + 1, background=self.config.checkpoint.background) if due else None
        now = time.perf_counter()
        line["seconds/checkpoint"] = round(now - before, 4) if due else 0.0
        line["seconds/step"] = round(now - started, 4)
        self.directory.write_step(line, kept)
        self.loggers.step(line, written)
        self.step += 1
        self.advance_data()
        self.updating = False
        if pending is not None:
            self._finish_checkpoint(pending, now - before)
        if self.step >= self.steps:
            self.settle()
        return line

    def save(self) -> None:
        """Write a checkpoint of the finished steps. Raises RunError if it cannot be written."""
        started = time.perf_counter()
        pending = self._write_checkpoint(self.step, background=False)
        self._finish_checkpoint(pending, time.perf_counter() - started)

    def settle(self) -> None:
        """Wait until the checkpoint is complete that is written in the background, if there is one. Raises RunError if it cannot
        be written."""
        if (completed := self._completed) is not None:
            self._completed = None
            self.saved = completed.result()
            self.directory.note_checkpoint(self.saved)

    def _write_checkpoint(self, step: int, *, background: bool) -> _Written:
        self.settle()
        self.activity.part(step, "writing a checkpoint")
        state = {
            "policy": self.learner.state(),
            **({} if self.critic is None else {"critic": self.critic.state()}),
            **({"policies": {name: one.state() for name, one in self.others.items()}} if self.others else {}),
        }
        parts = {"": self.learner, **self.others}
        writers = {
            name: part.hold() if background else Writers(part.save, part.save_shards) for name, part in parts.items()
        }
        critic = None
        if self.critic is not None:
            critic = self.critic.hold() if background else Writers(self.critic.save, self.critic.save_shards)
        main, renderer = writers.pop(""), self.inputs.renderer
        thread = WritingThread(background)
        written = thread.submit(
            functools.partial(
                self.checkpoints.write,
                step,
                save_model=functools.partial(_save_models, main, writers, self.checkpoints.model_of(step)),
                tokenizer=renderer.tokenizer,
                state=copied_to_cpu(state) if background else state,
                processor=renderer.vision,
                save_critic=None if critic is None else critic.save,
                save_shards=main.save_shards,
                save_critic_shards=no_shards if critic is None else critic.save_shards,
            )
        )
        return _Written(written, thread)

    def _finish_checkpoint(self, checkpoint: _Written, seconds: float) -> None:
        about = self.inputs.opened.about(self.data_position(), seconds)
        self.checkpoint_seconds, self.saved_at = seconds, time.monotonic()

        def complete() -> int:
            pending = checkpoint.pending.result()
            self.checkpoints.finish(pending, about)
            return pending.step

        self._completed = checkpoint.thread.submit(complete)
        checkpoint.thread.close()
        if self._completed.done():
            self.settle()

    def _warn_template_mismatch(self, trajectories: Sequence[Trajectory]) -> None:
        """Log once in a run that tokens differ from the chat template's."""
        if not self.mismatch_reported and (warning := template_mismatches(trajectories)) is not None:
            self.mismatch_reported = True
            self.warn(self.step + 1, "template_mismatch", warning)

    def warn(self, step: int, name: str, text: str) -> None:
        """Log a warning of a step, and record it. `name` says which monitor or check warns."""
        _log.warning("step %d: %s", step, text)
        self.directory.write_warning(step=step, name=name, text=text)

    def stopped_text(self, resume: str) -> str:
        """How far a stopped run is, its newest checkpoint, and the command that resumes it. Two lines.

        Reads attributes only, so that it may be called from a signal handler.
        """
        if self.saved:
            lost = f", which does not contain steps {self.saved + 1} to {self.step}" if self.saved < self.step else ""
            checkpoint = f"the newest checkpoint is that of step {self.saved}{lost}: {self.checkpoints.newest}"
        else:
            checkpoint = "there is no checkpoint yet"
        return f"stopped after step {self.step}; {checkpoint}\nresume with: {resume}"

    @contextlib.asynccontextmanager
    async def checkpoint_on_exit(self) -> AsyncIterator[None]:
        """However the run ends, write a checkpoint of the last finished step and unlock the run directory.

        A KeyboardInterrupt, which ends the process at once, writes no checkpoint.
        """
        planned = self.steps
        try:
            if self.evaluated == self.step:  # resumed: it may have been killed before the best checkpoint was noted
                self.keep_best()
            yield
            self.settle()
            self.activity.part(self.step, "writing the model")
            write_models(self.checkpoints.in_parts())
        except KeyboardInterrupt:
            raise
        except BaseException as problem:  # a signal stopped the run, or there is an error that a person can put right
            try:
                self.settle()
                if not self.updating and self.step > self.saved:
                    self.save()
            except RunError as error:
                _log.error("%s", error)
            how = "stopped" if isinstance(problem, CancelledError | HealthError) else "failed"
            self._note_end(how, None if isinstance(problem, CancelledError) else reason_of(problem))
            raise
        else:
            # a callback ends a run by a smaller number of steps
            self._note_end("finished" if self.step >= planned else "stopped", None)
        finally:
            for learner in (self.learner, *self.others.values()):
                learner.close()
            self.loggers.close()
            self.directory.release()

    def _note_end(self, how: str, reason: str | None) -> None:
        try:
            self.directory.note_end(how, step=self.step, reason=reason)
        except RunError as error:
            _log.error("%s", error)


def _save_models(main: Writers, others: Mapping[str, Writers], final: Path, folder: Path) -> None:
    """Write the model, and the adapters of further trained policies beside it. `final` is where `folder` will be."""
    main.save(folder)
    for name, writers in others.items():
        own = saved_policy(folder, name)
        own.mkdir(parents=True)
        writers.save(own)
        if has_all_weights(folder):  # the adapter is on these weights, and not on those of model.path
            about = json.loads((own / "adapter_config.json").read_text(encoding="utf-8"))
            text = json.dumps({**about, "base_model_name_or_path": str(final)}, indent=2)
            (own / "adapter_config.json").write_text(text, encoding="utf-8")


def reason_of(problem: BaseException) -> str:
    """Why a run failed: the message of an error that a person can put right; of another exception, its type too."""
    return str(problem) if isinstance(problem, TurnwiseError) else f"{type(problem).__name__}: {text_of(problem)}"


# loggers

_PROJECT = "turnwise"


def loggers(config: Config, *, step: int) -> Loggers:
    """The trackers of `loggers` and the traces of `trace`, started. `step` is the number of finished steps of a resumed run.

    Raises ConfigError if a library is not installed, or a tracker does not start.
    """
    directory = Path(config.output)
    if config.trace.backend != "weave":
        # where code of the user has imported weave, as trl does, wandb's start would start it, and ask for a key
        os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
    started = [
        start_tracker(
            use.name,
            Start(
                project=use.project or _PROJECT,
                run=use.run or directory.name,
                conversations=use.conversations,
                arguments=use.arguments,
                directory=directory,
                options=config.written(),
                step=step,
            ),
        )
        for use in config.loggers
    ]
    trace = config.trace
    if trace.backend is not None:
        project = trace.project or _PROJECT
        started.append(
            start_tracer(trace.backend, conversations=trace.conversations, project=project, directory=directory)
        )
    return Loggers(started)
