"""A training run: everything that the loop of `train` needs, assembled from a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise import build
from turnwise.config.schema import Config
from turnwise.config.train_checks import refuse_without_effect, refuse_without_reward
from turnwise.data.curriculum import Curriculum, PassRates, initial_pass_rates, pass_rates_of
from turnwise.engines.publisher import WeightPublisher
from turnwise.rewards.credit import Credit
from turnwise.rewards.scorer import Scorer
from turnwise.rollout.rollout import RolloutContext
from turnwise.runs.assembly import read_inputs
from turnwise.runs.critic_training import CriticTraining
from turnwise.runs.kl_reward import KlReward
from turnwise.runs.learning_watch import LearningWatch
from turnwise.runs.resuming import OpenedRun
from turnwise.runs.run_state import RunState
from turnwise.training.learner import Learner
from turnwise.types import Group, Row

__all__ = ["DataState", "TrainingRun", "assemble"]


@dataclass(frozen=True, slots=True)
class DataState:
    """A position in the rows of a run."""

    position: int = 0
    """The number of rows that were used or skipped."""
    pass_rates: PassRates = field(default_factory=dict)
    """The pass rate of each row that has one. Empty without a curriculum."""
    keep_pass_rates: bool = False
    """Whether there is a curriculum, which needs pass rates."""

    def after(self, groups: Sequence[Group]) -> DataState:
        """The state with the pass rates of these groups."""
        if not self.keep_pass_rates:
            return self
        return replace(self, pass_rates={**self.pass_rates, **pass_rates_of(groups)})


@dataclass(slots=True, kw_only=True)
class TrainingRun(RunState):
    """A training run, ready to continue after `step` steps."""

    context: RolloutContext
    environments: build.Environments
    """The factory in `context`, which is closed at the end of the run."""
    scorer: Scorer
    credit: Credit
    publisher: WeightPublisher
    """Hands new weights to the engine."""
    watch: LearningWatch
    curriculum: Curriculum | None
    """Which rows are skipped; None skips no row."""
    kl_reward: KlReward | None
    """The KL divergence in the reward; None without `reward.kl`."""
    data: DataState
    """The rows that the finished steps have used."""
    data_after_step: DataState
    """The same with the step in progress. It becomes `data` when the step is finished."""

    def next_rows(self, data: DataState, count: int) -> tuple[list[Row], DataState]:
        """The next `count` rows after `data`, and the position after them.

        Rows that the curriculum skips are passed over. If it skips all rows of an entire pass, the next rows are used as they
        come: a step always has its rows.
        """
        rows: list[Row] = []
        place, last = data.position, data.position + len(self.rows)
        while len(rows) < count:
            ((_, index),) = self.order.take(place, 1)
            row = self.rows[index]
            if self.curriculum is None or place >= last or not self.curriculum.skips(row, place, data.pass_rates):
                rows.append(row)
            place += 1
        return rows, replace(data, position=place)

    def data_position(self) -> dict[str, Any]:
        place = {**RunState.data_position(self), "position": self.data.position}
        if self.kl_reward is not None:
            place["kl_coef"] = self.kl_reward.coef
        return place if self.curriculum is None else {**place, "pass_rates": dict(self.data.pass_rates)}

    @property
    def critic_training(self) -> CriticTraining | None:
        """The use of the critic; None without a critic."""
        level = self.credit.needs_values
        return None if self.critic is None or level is None else CriticTraining(self.critic, level, self.config)

    def advance_data(self) -> None:
        self.data = self.data_after_step


def assemble(config: Config) -> TrainingRun:
    """Check a recipe, and load and build what it names. A run in `output` is resumed if the recipe says so.

    Raises TurnwiseError before anything is computed.
    """
    refuse_without_effect(config)
    refuse_without_reward(config)
    scorer, weigh_turns = build.scorer(config), build.turn_weighting(config)
    credit = build.credit(config, scorer)
    inputs = read_inputs(config, "train", _read_rows)
    if (note := build.credit_note(config)) is not None:
        inputs.notes.append(note)
    scorer.refuse_unknown_columns([*inputs.rows, *inputs.held_out])
    opened, renderer = inputs.opened, inputs.renderer
    environments = build.environment_factory(config, encode=renderer.encode)
    learner = build.learner(config, opened.source, before_training=opened.before_training)
    opened.compare_model(learner)
    critic = None if credit.needs_values is None else build.critic(config, opened.source, learner.model, opened.critic)
    if critic is not None:
        opened.compare_critic(critic)
    engine = build.engine(config, renderer, learner.model, version=opened.step)
    build.connect_engine(scorer, engine, renderer)
    context = build.rollout_context(config, renderer, engine, environments, longest=learner.context_length)
    curriculum = build.curriculum(config)
    data = _data_state(opened, inputs.rows, config, curriculum=curriculum is not None)
    opened.begin(learner, critic)
    return TrainingRun(
        inputs=inputs,
        learner=learner,
        critic=critic,
        options=config.train,
        steps=config.train.steps,
        weigh_turns=weigh_turns,
        normalization=build.normalization(config.loss),
        context=context,
        environments=environments,
        scorer=scorer,
        credit=credit,
        publisher=build.publisher(config, engine, learner),
        watch=LearningWatch(config),
        curriculum=curriculum,
        kl_reward=_kl_reward(config, learner, opened),
        data=data,
        data_after_step=data,
    )


def _kl_reward(config: Config, learner: Learner, opened: OpenedRun) -> KlReward | None:
    """The KL divergence in the reward. A resumed run goes on with its adaptive coefficient."""
    options = config.reward.kl
    if options.coef == 0:
        return None
    coef = opened.number("kl_coef", options.coef) if options.target is not None else options.coef
    return KlReward(learner, options, config.train.micro_batch_tokens, coef)


def _data_state(opened: OpenedRun, rows: Sequence[Row], config: Config, *, curriculum: bool) -> DataState:
    """The position in the rows at the start of a new or a resumed run."""
    position = opened.number("position")
    if not curriculum:
        return DataState(position)
    rates = initial_pass_rates(rows, config.data.curriculum.column)
    if opened.saved is not None:
        rates |= opened.saved.about["place"].get("pass_rates", {})
    return DataState(position, rates, keep_pass_rates=True)


def _read_rows(config: Config, held_out: bool) -> list[Row]:
    return build.rows(config, held_out=held_out, limit=config.eval.max_rows if held_out else None)
