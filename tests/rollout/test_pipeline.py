"""The pipeline between conversations and training: real loops, a scripted engine, random latencies, a clock that jumps."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from support.conversations import Says, a_row, a_table
from support.instant_loop import run_instantly
from turnwise.data.order import DataState, Order, RowSource
from turnwise.environments.environment import SingleTurn
from turnwise.rewards.functions import BatchReward
from turnwise.rewards.scorer import Scorer
from turnwise.rollout.pipeline import Pipeline, PipelineOptions, TakenGroups
from turnwise.types import Completion, Opening, Reply, Request, Row, Trajectory, Turn

ROWS = [a_row(id=str(n)) for n in range(7)]


class Sleeps(Says):
    """An engine whose answers take random times: most are short, some are long. Each token has the version of its end."""

    def __init__(self, seed: int) -> None:
        super().__init__(*["a"] * 9)
        self._random = random.Random(seed)

    async def generate(self, request: Request) -> Completion:
        await asyncio.sleep(self._random.lognormvariate(0.0, 1.5))
        return await super().generate(request)


class Users:
    """Asks back a random number of times, and rewards at random."""

    def __init__(self, generator: random.Random, fails: float) -> None:
        self.generator = generator
        self.fails = fails

    async def begin(self, row: Row) -> Opening:
        return Opening(messages=row.messages)

    async def step(self, turn: Turn) -> Reply:
        await asyncio.sleep(self.generator.lognormvariate(0.0, 1.5))
        if self.generator.random() < self.fails:
            raise RuntimeError("no luck")
        message = {"role": "user", "content": "And?"}
        done = turn.index == 6 or self.generator.random() < 0.4
        return Reply(messages=[] if done else [message], done=done, reward=float(self.generator.random() < 0.5))

    async def close(self) -> None:
        pass


@dataclass
class Simulation:
    """A training run without training: the trainer takes groups, sleeps, and publishes weights."""

    options: PipelineOptions
    seed: int
    fails: float = 0.0
    concurrent: int = 256
    scorer: Scorer = field(default_factory=Scorer)
    rows: Sequence[Row] = tuple(ROWS)

    def pipeline(self, state: DataState, version: int) -> Pipeline:
        generator = random.Random(self.seed + version)
        engine = Sleeps(self.seed)
        engine.version = version
        context = a_table(engine, lambda: Users(generator, self.fails), concurrent=self.concurrent)
        source = RowSource(self.rows, Order(len(self.rows), seed=0), None, state)
        return Pipeline(context=context, scorer=self.scorer, source=source, options=self.options, version=version)

    async def run(self, pipeline: Pipeline, taken: list[TakenGroups], states: list[DataState]) -> None:
        """Finish the run. Appends the groups of each step and the state after it."""
        generator = random.Random(self.seed)
        async with pipeline:
            while pipeline.version < self.options.steps:
                groups = await pipeline.take()
                await asyncio.sleep(generator.random() * 4)
                await pipeline.context.engine.load_weights(pipeline.version + 1)
                pipeline.publish(pipeline.version + 1)
                taken.append(groups)
                states.append(pipeline.state)


def staleness(step: int, taken: TakenGroups) -> list[int]:
    """The age of each token of the step's trained groups."""
    return [
        step - version
        for group in taken.trained
        for trajectory in group.trajectories
        for segment in trajectory.segments
        for version in segment.version
        if version >= 0
    ]


def random_options(generator: random.Random, **options: int) -> PipelineOptions:
    return PipelineOptions(
        batch_size=generator.randint(1, 4),
        group_size=generator.randint(1, 3),
        steps=generator.randint(3, 9),
        seed=0,
        max_staleness=generator.randint(0, 4),
        **options,
    )


@pytest.mark.parametrize("seed", range(40))
def test_no_token_is_older_than_the_bound_and_no_group_is_lost_or_sampled_in_vain(seed: int) -> None:
    generator = random.Random(seed)
    options = random_options(generator)
    simulation = Simulation(options, seed, concurrent=generator.choice([2, 5, 256]))
    taken, states = list[TakenGroups](), list[DataState]()
    pipeline = simulation.pipeline(DataState(), 0)
    run_instantly(simulation.run(pipeline, taken, states))
    ages = [staleness(step, groups) for step, groups in enumerate(taken)]
    assert all(0 <= age <= options.max_staleness for step in ages for age in step)
    positions = sorted(active.row.position for groups in taken for active in groups.active)
    assert positions == list(range(options.steps * options.batch_size))
    if options.max_staleness <= 1:
        rows = [[active.row.position for active in groups.active] for groups in taken]
        assert rows == [
            list(range(step * options.batch_size, (step + 1) * options.batch_size)) for step in range(options.steps)
        ]
    assert states[-1] == DataState(position=len(positions))
    assert (pipeline.active, pipeline._tasks) == ([], set())


def test_slow_conversations_are_overtaken_and_trained_on_in_a_later_step() -> None:
    options = PipelineOptions(batch_size=2, group_size=1, steps=12, seed=0, max_staleness=4)
    overtaken = 0
    for seed in range(10):
        simulation, taken = Simulation(options, seed), list[TakenGroups]()
        run_instantly(simulation.run(simulation.pipeline(DataState(), 0), taken, []))
        overtaken += sum(active.row.step < step for step, groups in enumerate(taken) for active in groups.active)
        assert max(max(staleness(step, groups)) for step, groups in enumerate(taken)) > 1
    assert overtaken > 5


@pytest.mark.parametrize("seed", range(30))
def test_a_killed_run_starts_unfinished_rows_again_with_the_same_seeds(seed: int) -> None:
    generator = random.Random(seed)
    options = random_options(generator, dynamic_sampling=generator.choice([0, 0, 2]))
    simulation = Simulation(options, seed)
    used: list[int] = []
    seeds: dict[str, set[int]] = {}
    state, version = DataState(), 0
    for attempt in range(50):
        pipeline = simulation.pipeline(state, version)
        taken, states = list[TakenGroups](), [state]

        async def until_killed(
            pipeline: Pipeline = pipeline,
            taken: list[TakenGroups] = taken,
            states: list[DataState] = states,
            seconds: float = generator.expovariate(1 / (12 + 4 * attempt)),
        ) -> None:
            try:
                async with asyncio.timeout(seconds):
                    await simulation.run(pipeline, taken, states)
            except TimeoutError:
                pass

        run_instantly(until_killed())
        assert not pipeline._tasks
        for active in (*pipeline.active, *(active for groups in taken for active in groups.active)):
            for trajectory in active.group.trajectories:
                seeds.setdefault(trajectory.id, set()).add(trajectory.seed)
        used += [active.row.position for groups in taken for active in groups.active]
        version += len(taken)
        state = DataState.read(json.loads(json.dumps(states[-1].written(curriculum=False))), {})
        if version == options.steps:
            break
    assert version == options.steps
    assert len(used) == len(set(used))
    assert sorted(used) == list(range(state.position))
    assert not state.unfinished
    assert all(len(values) == 1 for values in seeds.values())


def test_with_failures_steps_are_complete_and_what_was_replaced_is_counted() -> None:
    options = PipelineOptions(
        batch_size=3, group_size=2, steps=8, seed=0, max_staleness=2, min_group_size=2, replace_failed=3
    )
    simulation, taken = Simulation(options, 1, fails=0.1), list[TakenGroups]()
    run_instantly(simulation.run(simulation.pipeline(DataState(), 0), taken, []))
    assert sum(active.replaced for groups in taken for active in groups.active) > 3
    for step, groups in enumerate(taken):
        kept = [active for active in groups.active if not active.replaced]
        assert len(kept) == 3
        assert {id(group) for group in groups.trained} == {id(a.group) for a in kept if not a.too_small}
        assert all(age <= 2 for age in staleness(step, groups))
    ids = [active.group.id for groups in taken for active in groups.active]
    assert len(ids) == len(set(ids))


def batch_reward(calls: list[list[str]]) -> BatchReward:
    def ranks(trajectories: Sequence[Trajectory]) -> list[float]:
        calls.append([trajectory.id for trajectory in trajectories])
        return [float(rank) for rank, _ in enumerate(trajectories)]

    return BatchReward("ranks", ranks)


@pytest.mark.parametrize("max_staleness", [0, 3])
def test_functions_of_the_batch_get_the_groups_of_a_step(max_staleness: int) -> None:
    calls: list[list[str]] = []
    options = PipelineOptions(batch_size=3, group_size=2, steps=4, seed=0, max_staleness=max_staleness, baselines=True)
    simulation, taken = Simulation(options, 3, scorer=Scorer(batch=[batch_reward(calls)])), list[TakenGroups]()
    run_instantly(simulation.run(simulation.pipeline(DataState(), 0), taken, []))
    trajectories = [[t for group in groups.groups for t in group.trajectories] for groups in taken]
    assert calls[::2] == [[t.id for t in step] for step in trajectories]
    assert [t.rewards["ranks"] for t in trajectories[0]] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    baselines = [group.baseline for groups in taken for group in groups.groups]
    assert all(baseline is not None and baseline.reward is not None for baseline in baselines)


class Hangs(SingleTurn):
    """An environment of which every third never answers."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.hangs = type(self).made % 3 == 0

    async def step(self, turn: Turn) -> Reply:
        if self.hangs:
            await asyncio.Event().wait()
        return await super().step(turn)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_hung_environments_stop_no_group_for_ever(max_staleness: int) -> None:
    options = PipelineOptions(
        batch_size=2, group_size=3, steps=5, seed=0, max_staleness=max_staleness, group_timeout=20.0
    )
    simulation, taken = Simulation(options, 0), list[TakenGroups]()
    pipeline = simulation.pipeline(DataState(), 0)
    Hangs.made = 0
    pipeline.context = replace(pipeline.context, make_environment=Hangs)
    run_instantly(simulation.run(pipeline, taken, []))
    assert len(taken) == 5
    for groups in taken:
        for active in groups.active:
            failed = [t.error for t in active.group.trajectories if t.error is not None]
            assert [error.kind for error in failed] == ["deadline"] * len(failed)
            assert active.timed_out is bool(failed)
            assert all("train.group_timeout=20" in error.message for error in failed)
            assert sum(t.reward is not None for t in active.group.trajectories) == 3 - len(failed)
    assert sum(a.timed_out for groups in taken for a in groups.active) == 10


def test_a_conversation_that_could_not_start_in_the_time_of_its_group_fails_without_being_started() -> None:
    options = PipelineOptions(batch_size=1, group_size=3, steps=1, seed=0, group_timeout=20.0)
    simulation = Simulation(options, 0, concurrent=1)
    pipeline = simulation.pipeline(DataState(), 0)
    Hangs.made = 2
    pipeline.context = replace(pipeline.context, make_environment=Hangs)
    taken: list[TakenGroups] = []
    run_instantly(simulation.run(pipeline, taken, []))
    assert [t.stop for t in taken[0].groups[0].trajectories] == ["deadline"] * 3
    assert Hangs.made == 3


def test_an_error_in_turnwise_ends_the_run_and_all_tasks_are_cancelled() -> None:
    options = PipelineOptions(batch_size=2, group_size=2, steps=3, seed=0, max_staleness=2)
    simulation = Simulation(options, 0)
    pipeline = simulation.pipeline(DataState(), 0)
    count = Counter[str]()

    def on_finished(tokens: int) -> None:
        count["ended"] += 1
        if count["ended"] == 3:
            raise ZeroDivisionError("a bug")

    pipeline.on_finished = on_finished
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run_instantly(simulation.run(pipeline, [], []))
    assert not pipeline._tasks
