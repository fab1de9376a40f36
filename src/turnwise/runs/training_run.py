"""A training run: everything that the loop of `train` needs, assembled from a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from turnwise import build
from turnwise.config.schema import Config
from turnwise.config.train_checks import refuse_without_effect, refuse_without_reward
from turnwise.engines.publisher import SharedWeights, WeightPublisher
from turnwise.rewards.credit import Credit
from turnwise.rewards.scorer import Scorer
from turnwise.rollout.rollout import RolloutContext
from turnwise.runs.assembly import read_inputs
from turnwise.runs.learning_watch import LearningWatch
from turnwise.runs.run_state import RunState
from turnwise.types import Row

__all__ = ["TrainingRun", "assemble"]


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
    position: int
    """The number of rows that the finished steps have used."""

    def data_position(self) -> dict[str, int]:
        return {**RunState.data_position(self), "position": self.position}

    def advance_data(self) -> None:
        self.position += self.config.train.batch_size


def assemble(config: Config) -> TrainingRun:
    """Check a recipe, and load and build what it names. A run in `output` is resumed if the recipe says so.

    Raises TurnwiseError before anything is computed.
    """
    refuse_without_effect(config)
    refuse_without_reward(config)
    scorer, credit, weigh_turns = build.scorer(config), build.credit(config), build.turn_weighting(config)
    inputs = read_inputs(config, "train", _read_rows)
    scorer.refuse_unknown_columns([*inputs.rows, *inputs.held_out])
    opened, renderer = inputs.opened, inputs.renderer
    environments = build.environment_factory(config, encode=renderer.encode)
    learner = build.learner(config, opened.source, reference=opened.reference)
    opened.compare_model(learner)
    engine = build.engine(config, renderer, learner.model, version=opened.step)
    build.connect_engine(scorer, engine, renderer)
    context = build.rollout_context(config, renderer, engine, environments, longest=learner.context_length)
    opened.begin(learner)
    return TrainingRun(
        inputs=inputs,
        learner=learner,
        options=config.train,
        steps=config.train.steps,
        weigh_turns=weigh_turns,
        context=context,
        environments=environments,
        scorer=scorer,
        credit=credit,
        publisher=SharedWeights(engine),
        watch=LearningWatch(config),
        position=opened.number("position"),
    )


def _read_rows(config: Config, held_out: bool) -> list[Row]:
    return build.rows(config, held_out=held_out, limit=config.eval.max_rows if held_out else None)
