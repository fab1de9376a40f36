"""A training run: everything that the loop of `train` needs, assembled from a recipe.

Beside the assembly, this file writes the timeline of a step: when its groups ran, what their conversations waited for, and how
long the trainer waited for the groups (docs/record.md). Objects that exist at the start are frozen, so that Python's garbage
collector stays fast. The algorithm is in `train.py`, and the calculations are in `training/`.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from turnwise import assembly
from turnwise.chat.renderer import Renderer
from turnwise.config.train_checks import (
    refuse_without_effect,
    refuse_without_reward,
    short_run_notes,
    training_warnings,
)
from turnwise.data.order import DataState, RowSource, initial_pass_rates
from turnwise.engines.engine import TokenSampler, WeightPublisher
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.record.reader import read_lines
from turnwise.rewards.credit import Credit
from turnwise.rewards.scorer import Scorer
from turnwise.rewards.turn_weights import of_all_agents
from turnwise.rollout.context import AgentPolicy, ConversationContext, ConversationRunner
from turnwise.rollout.pipeline import ActiveGroup, Pipeline, TakenGroups
from turnwise.runs.health import LearningWatch
from turnwise.runs.resuming import OpenedRun
from turnwise.runs.run_state import RunInputs, RunState, fitted_to_ranks, loggers, read_inputs
from turnwise.training.critic_step import CriticStep
from turnwise.training.kl_reward import KlReward
from turnwise.training.learner import Critic, Learner
from turnwise.training.teacher import TeacherStep
from turnwise.types import NOT_SAMPLED, Group, Row, Trajectory

__all__ = [
    "MAX_GROUPS",
    "DataState",
    "TrainingRun",
    "assemble",
    "frozen_start_objects",
    "step_timeline",
]


# the assembly

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPolicy:
    """A policy that the run trains: who owns its weights, how they reach what samples with them, and what it learns from."""

    name: str
    """Its name in the recipe; empty for the model of the section `model`."""
    recipe: Config
    """The recipe as the policy reads it (`Config.of_policy`)."""
    learner: Learner
    publisher: WeightPublisher
    credit: Credit
    """Advantages from the rewards of its own conversations."""

    def own(self, groups: Iterable[Group]) -> list[Group]:
        """Those of the groups whose turns it took."""
        return [group for group in groups if group.policy == self.name]


@dataclass(slots=True, kw_only=True)
class TrainingRun(RunState):
    """A training run, ready to continue after `step` steps."""

    environments: assembly.Environments
    """The factory in `context`, which is closed at the end of the run."""
    policies: Sequence[TrainedPolicy]
    """All policies that are trained: first the model of the recipe, and then those of `policies`."""
    runner: ConversationRunner
    """Runs the conversations of `pipeline`; it is closed at the end of the run."""
    watch: LearningWatch
    critic_step: CriticStep | None
    """The values of the critic and its update; None without a critic."""
    kl_reward: KlReward | None
    """The KL divergence in the reward; None without `reward.kl`."""
    teacher_step: TeacherStep | None
    """The scores of teachers; None without a teacher."""
    pipeline: Pipeline
    """Runs the conversations and hands scored groups to the training loop."""
    data: DataState
    """The rows that the finished steps have used."""

    def data_position(self) -> dict[str, Any]:
        with_curriculum = self.pipeline.source.curriculum is not None
        place = {**RunState.data_position(self), **self.data.written(curriculum=with_curriculum)}
        values = {one.name: one.credit.tracker.written() for one in self.policies if one.credit.tracker is not None}
        place |= {"values": values} if values else {}
        return place if self.kl_reward is None else {**place, "kl_coef": self.kl_reward.coef}

    @property
    def context(self) -> ConversationContext:
        """What all conversations share."""
        return self.pipeline.context

    @property
    def scorer(self) -> Scorer:
        return self.pipeline.scorer

    @property
    def takes_turns(self) -> bool:
        """Whether training and sampling use the memory of a GPU in turns, and the optimizers leave it (`optimizer.offload`)."""
        return self.config.train.optimizer.offload == "sampling"

    def free_memory(self) -> None:
        """Give back the memory of devices that no learner needs before the next update."""
        for policy in self.policies:
            policy.learner.free_memory()
        if self.critic_step is not None:
            self.critic_step.critic.free_memory()

    def learning_rate_of(self, policy: TrainedPolicy) -> float:
        """The learning rate of a policy in the step that comes next."""
        return policy.recipe.train.lr_at(self.step, steps=self.steps)

    def advance_data(self) -> None:
        self.data = self.pipeline.state
        for policy in self.policies:
            if policy.credit.tracker is not None:
                policy.credit.tracker.advance()


def assemble(config: Config) -> TrainingRun:
    """Check a recipe, and load and build what it names. A run in `output` is resumed if the recipe says so.

    Raises TurnwiseError before anything is computed.
    """
    refuse_without_effect(config)
    refuse_without_reward(config)
    for text in training_warnings(config):
        _log.warning("%s", text)
    scorer, weigh_turns = assembly.scorer(config), assembly.turn_weighting(config)
    credits = {name: assembly.credit(recipe, scorer) for name, recipe in _recipes(config).items()}
    credit = credits[_MAIN]
    inputs = read_inputs(config, "train", _read_rows)
    config = inputs.config
    inputs.notes.extend(short_run_notes(config, "train", config.train.total_steps))
    if (note := assembly.credit_note(config)) is not None:
        inputs.notes.append(note)
    _refuse_unusable_rows(config, scorer, inputs, credits.values())
    opened, renderer = inputs.opened, inputs.renderer
    environments = assembly.environment_factory(config, encode=renderer.encode)
    learner = assembly.learner(config, opened.source, before_training=opened.before_training)
    opened.compare_model(learner)
    inputs = fitted_to_ranks(inputs, learner, "train")
    config = inputs.config
    model = assembly.sampled_model(config, learner, opened.source)
    critic = None if credit.needs_values is None else assembly.critic(config, opened.source, learner, opened.critic)
    if critic is not None:
        opened.compare_critic(critic)
    runner = assembly.runner(config, renderer, model, updated=True, version=opened.step)
    assembly.connect_engine(scorer, runner.sampler, renderer)
    others = _further_learners(config, learner, opened)
    of_agents = _of_agents(config, renderer, model, learner, others, opened.step, runner.sampler)
    longest = learner.context_length
    context = assembly.conversation_context(config, renderer, runner, environments, longest=longest, policies=of_agents)
    data = _data_state(opened, inputs.rows, config)
    _load_values(opened, credits)
    opened.begin(learner, critic, others)
    policies = list(_trained_policies(config, {_MAIN: learner, **others}, runner, of_agents, credits))
    return TrainingRun(
        inputs=inputs,
        learner=learner,
        critic=critic,
        others=others,
        options=config.train,
        steps=config.train.total_steps,
        weigh_turns=of_all_agents(weigh_turns),
        loggers=loggers(config, step=opened.step),
        loss=config.loss,
        environments=environments,
        policies=policies,
        runner=runner,
        watch=LearningWatch(config, _finished_steps(opened), renderer.turn_parser.writes_call, scorer.measured),
        critic_step=_critic_step(config, critic, credit.needs_values),
        kl_reward=_kl_reward(config, learner, opened),
        teacher_step=assembly.teacher_step(config, learner, renderer),
        pipeline=_pipeline(
            inputs, context, scorer, data, baselines=any(one.needs_baseline for one in credits.values())
        ),
        data=data,
    )


def _pipeline(
    inputs: RunInputs, context: ConversationContext, scorer: Scorer, data: DataState, *, baselines: bool
) -> Pipeline:
    config = inputs.config
    return Pipeline(
        context=context,
        scorer=scorer,
        source=RowSource(inputs.rows, assembly.row_order(config, inputs.rows), assembly.curriculum(config), data),
        options=config.train,
        seed=config.seed,
        baselines=baselines,
        version=inputs.opened.step,
    )


def _refuse_unusable_rows(config: Config, scorer: Scorer, inputs: RunInputs, credits: Iterable[Credit]) -> None:
    """Refuse what reward functions, teachers and estimators miss in the rows. Raises ConfigError."""
    rows = [*inputs.rows, *inputs.held_out]
    if any(row.seed_step for row in inputs.rows) and any(credit.tracker is not None for credit in credits):
        # each pass has other seeds: a value would be stored for every row, and never be read
        raise ConfigError(
            f"credit.name=spo has no effect on the rows that {config.environment.use} makes by seed: none is used twice, so that "
            f"each has the value credit.initial. Use credit.name=reinforce_pp, or set data.train to a file with the same seeds "
            f'in each pass, of lines such as {{"seed": 0}}'
        )
    scorer.refuse_unknown_columns(rows)
    if (option := config.runs_conversations_elsewhere) is not None:
        assembly.refuse_what_needs_conversations_here(scorer, rows, option)
    assembly.refuse_unusable_teachers(config, inputs.rows, inputs.renderer)


def _of_agents(
    config: Config,
    renderer: Renderer,
    model: Any | None,
    learner: Learner,
    others: Mapping[str, Learner],
    version: int,
    engine: TokenSampler | None,
) -> dict[str, AgentPolicy]:
    """What takes turns of agents in this process; empty where the conversations run in others. `model` is that of the embedded
    `engine`, and `others` are the learners of trained policies, whose weights have the number `version`."""
    if config.runs_conversations_elsewhere is not None:
        return {}
    trained = {name: assembly.sampled_model(config, other, config.model.path) for name, other in others.items()}
    reference = assembly.reference_model(config, learner)
    loaded = {"reference": reference, "trained": trained, "version": version}
    return assembly.agent_policies(config, renderer, model, **loaded, engine=engine)


_MAIN = ""
"""The name of the model of the section `model` among the policies that are trained."""


def _recipes(config: Config) -> dict[str, Config]:
    """The recipe as each policy reads it that is trained."""
    return {_MAIN: config, **{policy.name: config.of_policy(policy) for policy in config.trained_policies}}


def _further_learners(config: Config, learner: Learner, opened: OpenedRun) -> dict[str, Learner]:
    """The learners of the trained policies beside that of the section `model`, whose learner is `learner`."""
    return {
        policy.name: assembly.policy_learner(
            config.of_policy(policy), policy.name, learner, opened.saved_policy(policy.name)
        )
        for policy in config.trained_policies
    }


def _trained_policies(
    config: Config,
    learners: Mapping[str, Learner],
    runner: ConversationRunner,
    of_agents: Mapping[str, AgentPolicy],
    credits: Mapping[str, Credit],
) -> Iterator[TrainedPolicy]:
    """All policies that are trained, by their learners and estimators. `runner` has the engine of the first one, and `of_agents`
    those of the others."""
    for name, recipe in _recipes(config).items():
        engine, learner = of_agents[name].engine if name else None, learners[name]
        publisher = runner.publisher(learner) if engine is None else engine.publisher(learner)
        yield TrainedPolicy(name=name, recipe=recipe, learner=learner, publisher=publisher, credit=credits[name])


def _critic_step(config: Config, critic: Critic | None, level: Literal["turn", "token"] | None) -> CriticStep | None:
    """How the recipe uses its critic; None without a critic."""
    if critic is None or level is None:
        return None
    train = config.train
    return CriticStep(
        critic,
        level=level,
        lr=config.critic.lr,
        epochs=train.ppo_epochs,
        minibatches=train.minibatches,
        warmup_steps=config.critic.warmup_steps,
        micro_batch_tokens=train.micro_batch_tokens,
    )


def _kl_reward(config: Config, learner: Learner, opened: OpenedRun) -> KlReward | None:
    """The KL divergence in the reward. A resumed run goes on with its adaptive coefficient."""
    options = config.reward.kl
    if options.coef == 0:
        return None
    coef = opened.number("kl_coef", options.coef) if options.target is not None else options.coef
    return KlReward(
        learner,
        estimator=options.estimator,
        coef=coef,
        target=options.target,
        horizon=options.horizon,
        micro_batch_tokens=config.train.micro_batch_tokens,
    )


def _data_state(opened: OpenedRun, rows: Sequence[Row], config: Config) -> DataState:
    """The rows that were used, at the start of a new or a resumed run."""
    saved = {} if opened.saved is None else opened.saved.about["place"]
    return DataState.read(saved, initial_pass_rates(rows, config.data.curriculum.column))


def _load_values(opened: OpenedRun, credits: Mapping[str, Credit]) -> None:
    """The values of rows of a run that is resumed. An estimator without values in the checkpoint begins anew."""
    saved = {} if opened.saved is None else opened.saved.about["place"].get("values", {})
    for name, credit in credits.items():
        if credit.tracker is not None and name in saved:
            credit.tracker.load(saved[name])


def _finished_steps(opened: OpenedRun) -> list[dict[str, Any]]:
    """The metrics of the steps of a run that is resumed."""
    if not opened.step or not opened.directory.metrics.exists():
        return []
    return [line for line in read_lines(opened.directory.metrics) if line["step"] <= opened.step]


def _read_rows(config: Config, held_out: bool) -> list[Row]:
    return assembly.rows(config, held_out=held_out, limit=config.eval.max_rows if held_out else None)


# the timeline

MAX_GROUPS = 256
"""The largest number of groups in the timeline of a step, so that its size is bounded."""


def step_timeline(taken: TakenGroups, *, step: int, trained: float) -> dict[str, Any]:
    """The line of `timeline.jsonl` for a step, counted from 1. `trained` is when the new weights were published, in Unix seconds.

    Of a step with more than `MAX_GROUPS` groups, the groups that ended last are kept.
    """
    groups = sorted(taken.active, key=lambda active: active.ended or 0.0)[-MAX_GROUPS:]
    return {
        "step": step,
        "version": step - 1,
        "asked": round(taken.asked, 3),
        "taken": round(taken.taken, 3),
        "trained": round(trained, 3),
        "waited_for": taken.waited_for,
        "running": taken.running,
        "seconds": {
            "trainer_waiting": round(taken.taken - taken.asked, 3),
            "training": round(trained - taken.taken, 3),
            **_waits(trajectory for group in taken.groups for trajectory in group.trajectories),
        },
        "omitted": len(taken.active) - len(groups),
        "groups": [_of_group(active) for active in groups],
    }


def _of_group(active: ActiveGroup) -> dict[str, Any]:
    columns = [segment.version for trajectory in active.group.trajectories for segment in trajectory.segments]
    newest = max((max(column, default=NOT_SAMPLED) for column in columns), default=NOT_SAMPLED)
    return {
        "id": active.group.id,
        "position": active.row.position,
        "started": None if active.started is None else round(active.started, 3),
        "ended": None if active.ended is None else round(active.ended, 3),
        "version": active.version,
        "newest": None if newest == NOT_SAMPLED else newest,
        "use": "replaced" if active.replaced else "too_small" if active.too_small else "trained",
        "timed_out": active.timed_out,
        "seconds": _waits(active.group.trajectories),
    }


def _waits(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """What a conversation waited for, in seconds, as means over the conversations: the engine, tools, the environment without its
    tools, and other things, such as other conversations in the event loop."""
    parts: dict[str, list[float]] = {"engine": [], "tools": [], "environment": [], "other": []}
    for trajectory in trajectories:
        engine = sum(turn.seconds_engine for turn in trajectory.turns)
        replies = sum(turn.seconds_environment for turn in trajectory.turns)
        # the calls of a turn may run at the same time
        tools = sum(
            min(sum(outcome.seconds for outcome in turn.outcomes), turn.seconds_environment)
            for turn in trajectory.turns
        )
        rest = max(0.0, trajectory.seconds - engine - replies)
        for values, seconds in zip(parts.values(), (engine, tools, replies - tools, rest), strict=True):
            values.append(seconds)
    return {name: round(fmean(values), 3) if values else 0.0 for name, values in parts.items()}


# garbage collection

_NEW_OBJECTS = 100_000
"""New objects between two collections, instead of Python's 700 to 2,000. A step's tokens and messages are many objects and no
garbage: Python's own number takes 1.5 % of the time of a small model's step."""


@asynccontextmanager
async def frozen_start_objects() -> AsyncIterator[None]:
    """Inside the context, the garbage collector skips all objects that exist when the context begins.

    These are modules, classes and the model: a million objects, which a full collection visits each time, and which stay until
    the end of the run anyway. Collections are rarer, too. A threshold of 0 stays: it turns the collector off. If the
    program has frozen objects itself before, nothing is thawed at the end: Python cannot thaw some of them.
    """
    # gc.get_freeze_count() visits all frozen objects, for a tenth of a second; one of the oldest objects answers the same
    frozen_before = all(one is not sys.modules for one in gc.get_objects())
    gc.collect()
    gc.freeze()
    new, *older = gc.get_threshold()
    gc.set_threshold(new and max(new, _NEW_OBJECTS), *older)
    try:
        yield
    finally:
        gc.set_threshold(new, *older)
        if not frozen_before:
            gc.unfreeze()
