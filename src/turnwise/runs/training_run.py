"""A training run: everything that the loop of `train` needs, assembled from a recipe."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turnwise import build
from turnwise.config.schema import Config
from turnwise.config.train_checks import refuse_without_effect, refuse_without_reward, training_warnings
from turnwise.data.curriculum import initial_pass_rates
from turnwise.data.row_source import DataState, RowSource
from turnwise.engines.publisher import WeightPublisher
from turnwise.errors import ConfigError
from turnwise.ray_workers.rollouts import RayRollouts
from turnwise.record.reader import read_lines
from turnwise.rewards.credit import Credit
from turnwise.rewards.scorer import Scorer
from turnwise.rollout.context import RolloutContext
from turnwise.rollout.pipeline import Pipeline, PipelineOptions
from turnwise.runs.assembly import RunInputs, read_inputs
from turnwise.runs.critic_training import CriticTraining
from turnwise.runs.kl_reward import KlReward
from turnwise.runs.learning_watch import LearningWatch
from turnwise.runs.resuming import OpenedRun
from turnwise.runs.run_state import RunState
from turnwise.training.learner import Learner
from turnwise.types import Row

__all__ = ["DataState", "TrainingRun", "assemble"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class TrainingRun(RunState):
    """A training run, ready to continue after `step` steps."""

    environments: build.Environments
    """The factory in `context`, which is closed at the end of the run."""
    credit: Credit
    publisher: WeightPublisher
    """Hands new weights to the engine."""
    watch: LearningWatch
    kl_reward: KlReward | None
    """The KL divergence in the reward; None without `reward.kl`."""
    pipeline: Pipeline
    """Runs the conversations and hands scored groups to the training loop."""
    data: DataState
    """The rows that the finished steps have used."""

    def data_position(self) -> dict[str, Any]:
        with_curriculum = self.pipeline.source.curriculum is not None
        place = {**RunState.data_position(self), **self.data.written(curriculum=with_curriculum)}
        return place if self.kl_reward is None else {**place, "kl_coef": self.kl_reward.coef}

    @property
    def context(self) -> RolloutContext:
        """What all conversations share."""
        return self.pipeline.context

    @property
    def scorer(self) -> Scorer:
        return self.pipeline.scorer

    @property
    def critic_training(self) -> CriticTraining | None:
        """The use of the critic; None without a critic."""
        level = self.credit.needs_values
        return None if self.critic is None or level is None else CriticTraining(self.critic, level, self.config)

    def worker_metrics(self) -> dict[str, int]:
        """The rollout workers that were lost since the last call; empty without rollout workers."""
        if not isinstance(self.context.engine, RayRollouts):
            return {}
        losses = self.context.engine.take_losses()
        return {
            "workers/lost": losses.workers,
            "workers/restarted_conversations": losses.restarted_conversations,
        }

    def advance_data(self) -> None:
        self.data = self.pipeline.state


def assemble(config: Config) -> TrainingRun:
    """Check a recipe, and load and build what it names. A run in `output` is resumed if the recipe says so.

    Raises TurnwiseError before anything is computed.
    """
    refuse_without_effect(config)
    refuse_without_reward(config)
    for text in training_warnings(config):
        _log.warning("%s", text)
    scorer, weigh_turns = build.scorer(config), build.turn_weighting(config)
    credit = build.credit(config, scorer)
    inputs = read_inputs(config, "train", _read_rows)
    if inputs.config is not config:
        _refuse_with_known_steps(config, inputs)
        config = inputs.config
    if (note := build.credit_note(config)) is not None:
        inputs.notes.append(note)
    scorer.refuse_unknown_columns([*inputs.rows, *inputs.held_out])
    if (option := config.runs_conversations_elsewhere) is not None:
        build.refuse_what_needs_conversations_here(scorer, [*inputs.rows, *inputs.held_out], option)
    opened, renderer = inputs.opened, inputs.renderer
    environments = build.environment_factory(config, encode=renderer.encode)
    learner = build.learner(config, opened.source, before_training=opened.before_training)
    opened.compare_model(learner)
    model = build.sampled_model(config, learner, opened.source)
    critic = None if credit.needs_values is None else build.critic(config, opened.source, learner, opened.critic)
    if critic is not None:
        opened.compare_critic(critic)
    engine = build.engine(config, renderer, model, updated=True, version=opened.step)
    build.connect_engine(scorer, engine, renderer)
    context = build.rollout_context(config, renderer, engine, environments, longest=learner.context_length)
    data = _data_state(opened, inputs.rows, config)
    opened.begin(learner, critic)
    return TrainingRun(
        inputs=inputs,
        learner=learner,
        critic=critic,
        options=config.train,
        steps=config.train.total_steps,
        weigh_turns=weigh_turns,
        loggers=build.loggers(config, step=opened.step),
        normalization=build.normalization(config.loss),
        environments=environments,
        credit=credit,
        publisher=build.publisher(config, engine, learner, model),
        watch=LearningWatch(config, _finished_steps(opened)),
        kl_reward=_kl_reward(config, learner, opened),
        pipeline=Pipeline(
            context=context,
            scorer=scorer,
            source=RowSource(inputs.rows, build.row_order(config, inputs.rows), build.curriculum(config), data),
            options=_pipeline_options(config, baselines=credit.needs_baseline),
            version=opened.step,
        ),
        data=data,
    )


def _refuse_with_known_steps(config: Config, inputs: RunInputs) -> None:
    """Check the options that depend on the number of steps, where the rows say how many steps `train.epochs` is.

    Raises ConfigError.
    """
    try:
        refuse_without_effect(inputs.config)
    except ConfigError as error:
        raise ConfigError(
            f"{error} (train.epochs={config.train.epochs:g} with {len(inputs.rows)} rows and train.batch_size="
            f"{config.train.batch_size} is train.steps={inputs.config.train.steps})"
        ) from None


def _kl_reward(config: Config, learner: Learner, opened: OpenedRun) -> KlReward | None:
    """The KL divergence in the reward. A resumed run goes on with its adaptive coefficient."""
    options = config.reward.kl
    if options.coef == 0:
        return None
    coef = opened.number("kl_coef", options.coef) if options.target is not None else options.coef
    return KlReward(learner, options, config.train.micro_batch_tokens, coef)


def _data_state(opened: OpenedRun, rows: Sequence[Row], config: Config) -> DataState:
    """The rows that were used, at the start of a new or a resumed run."""
    saved = {} if opened.saved is None else opened.saved.about["place"]
    return DataState.read(saved, initial_pass_rates(rows, config.data.curriculum.column))


def _finished_steps(opened: OpenedRun) -> list[dict[str, Any]]:
    """The metrics of the steps of a run that is resumed."""
    if not opened.step or not opened.directory.metrics.exists():
        return []
    return [line for line in read_lines(opened.directory.metrics) if line["step"] <= opened.step]


def _pipeline_options(config: Config, *, baselines: bool) -> PipelineOptions:
    train = config.train
    return PipelineOptions(
        batch_size=train.batch_size,
        group_size=train.group_size,
        steps=train.total_steps,
        seed=config.seed,
        max_staleness=train.max_staleness,
        dynamic_sampling=train.dynamic_sampling,
        replace_failed=train.replace_failed,
        min_group_size=train.min_group_size,
        group_timeout=train.group_timeout,
        baselines=baselines,
    )


def _read_rows(config: Config, held_out: bool) -> list[Row]:
    return build.rows(config, held_out=held_out, limit=config.eval.max_rows if held_out else None)
