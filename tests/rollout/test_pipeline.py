"""The pipeline of groups: what is started, taken and dropped, within which limits; which rows a step uses, and which of its
trajectories."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from support.conversations import Says, a_row, a_table, completion
from support.instant_loop import run_instantly
from support.recipes import save_recipe
from support.tiny import save_rows
from support.training import train_silently
from turnwise.config.recipe import load
from turnwise.data.order import (
    Curriculum,
    DataState,
    Order,
    RowSource,
    WeightedOrder,
    initial_pass_rates,
    pass_rates_of,
    weighted_order,
)
from turnwise.environments.environment import SingleTurn
from turnwise.errors import ConfigError, DataError
from turnwise.options.algorithm import TrainSection
from turnwise.rewards.functions import BatchReward
from turnwise.rewards.scorer import Scorer
from turnwise.rollout.context import Limits
from turnwise.rollout.pipeline import Pipeline, TakenGroups, capacity, choose
from turnwise.train import assemble
from turnwise.types import Completion, Group, Opening, Reply, Request, Row, Stop, Trajectory, Turn

# The pipeline between conversations and training: real loops, a scripted engine, random latencies, a clock that
# jumps.


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

    options: TrainSection
    seed: int
    fails: float = 0.0
    concurrent: int = 256
    scorer: Scorer = field(default_factory=Scorer)
    rows: Sequence[Row] = tuple(ROWS)
    baselines: bool = False

    def pipeline(self, state: DataState, version: int) -> Pipeline:
        generator = random.Random(self.seed + version)
        engine = Sleeps(self.seed)
        engine.version = version
        context = a_table(engine, lambda: Users(generator, self.fails), concurrent=self.concurrent)
        source = RowSource(self.rows, Order(len(self.rows), seed=0), None, state)
        return Pipeline(
            context=context,
            scorer=self.scorer,
            source=source,
            options=self.options,
            seed=0,
            version=version,
            baselines=self.baselines,
        )

    async def run(self, pipeline: Pipeline, taken: list[TakenGroups], states: list[DataState]) -> None:
        """Finish the run. Appends the groups of each step and the state after it."""
        generator = random.Random(self.seed)
        async with pipeline:
            while pipeline.version < self.options.total_steps:
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


def random_options(generator: random.Random, **options: int) -> TrainSection:
    return TrainSection(
        batch_size=generator.randint(1, 4),
        group_size=generator.randint(1, 3),
        steps=generator.randint(3, 9),
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
    assert positions == list(range(options.total_steps * options.batch_size))
    if options.max_staleness <= 1:
        rows = [[active.row.position for active in groups.active] for groups in taken]
        assert rows == [
            list(range(step * options.batch_size, (step + 1) * options.batch_size))
            for step in range(options.total_steps)
        ]
    assert states[-1] == DataState(position=len(positions))
    assert (pipeline.active, pipeline._tasks) == ([], set())


def test_slow_conversations_are_overtaken_and_trained_on_in_a_later_step() -> None:
    options = TrainSection(batch_size=2, group_size=1, steps=12, max_staleness=4)
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
        if version == options.total_steps:
            break
    assert version == options.total_steps
    assert len(used) == len(set(used))
    assert sorted(used) == list(range(state.position))
    assert not state.unfinished
    assert all(len(values) == 1 for values in seeds.values())


def test_with_failures_steps_are_complete_and_what_was_replaced_is_counted() -> None:
    options = TrainSection(batch_size=3, group_size=2, steps=8, max_staleness=2, min_group_size=2, replace_failed=3)
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
    options = TrainSection(batch_size=3, group_size=2, steps=4, max_staleness=max_staleness)
    simulation, taken = (
        Simulation(options, 3, baselines=True, scorer=Scorer(batch=[batch_reward(calls)])),
        list[TakenGroups](),
    )
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
    options = TrainSection(batch_size=2, group_size=3, steps=5, max_staleness=max_staleness, group_timeout=20.0)
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
    options = TrainSection(batch_size=1, group_size=3, steps=1, group_timeout=20.0)
    simulation = Simulation(options, 0, concurrent=1)
    pipeline = simulation.pipeline(DataState(), 0)
    Hangs.made = 2
    pipeline.context = replace(pipeline.context, make_environment=Hangs)
    taken: list[TakenGroups] = []
    run_instantly(simulation.run(pipeline, taken, []))
    assert [t.stop for t in taken[0].groups[0].trajectories] == ["deadline"] * 3
    assert Hangs.made == 3


def test_an_error_in_turnwise_ends_the_run_and_all_tasks_are_cancelled() -> None:
    options = TrainSection(batch_size=2, group_size=2, steps=3, max_staleness=2)
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


# How many groups are started, and which of them a step takes.


@pytest.mark.parametrize(
    ("max_staleness", "version", "kept", "active", "expected"),
    [
        (0, 0, 0, 0, 4),
        (0, 0, 0, 4, 0),
        (0, 3, 2, 0, 2),  # two of the step's groups are replaced
        (1, 0, 0, 0, 8),
        (1, 0, 4, 4, 0),  # the next step's groups run during the training
        (1, 1, 0, 4, 4),
        (3, 5, 1, 9, 6),  # (3 + 5 + 1) * 4 - (5 * 4 + 1 + 9)
        (3, 8, 0, 0, 8),  # of 10 steps, two are left
        (0, 9, 0, 6, 0),
    ],
)
def test_as_many_groups_are_started_as_the_formula_says(
    max_staleness: int, version: int, kept: int, active: int, expected: int
) -> None:
    groups = capacity(max_staleness=max_staleness, batch_size=4, version=version, steps=10, kept=kept, active=active)
    assert groups == expected


@pytest.mark.parametrize(
    ("latest", "ready", "count", "in_order", "expected"),
    [
        ([5, 5, 5], "yyn", 2, False, [0, 1]),
        ([5, 5, 5], "nyy", 2, False, [1, 2]),
        ([5, 5, 5], "nyy", 2, True, None),
        ([5, 5, 5], "nny", 2, False, None),
        ([3, 5, 5], "nyy", 2, False, None),  # no later step may train on the first
        ([4, 5, 5], "nyy", 2, False, [1, 2]),
        ([4, 4, 4, 5, 5], "nnnyy", 2, False, None),  # three are left for the next step, which takes two
        ([4, 4, 4, 5, 5], "ynnyy", 2, False, [0, 3]),
        ([6, 4, 5], "yyy", 2, False, [1, 2]),  # the earliest first
        ([], "", 1, False, None),
    ],
)
def test_a_step_takes_the_groups_that_are_due_first_and_waits_for_those_that_no_later_step_may_use(
    latest: list[int], ready: str, count: int, in_order: bool, expected: list[int] | None
) -> None:
    flags = [letter == "y" for letter in ready]
    assert choose(latest, flags, count=count, version=3, batch_size=2, in_order=in_order) == expected


def test_if_all_groups_have_ended_there_are_always_some_to_take() -> None:
    for seed in range(300):
        generator = random.Random(seed)
        batch_size, max_staleness = generator.randint(1, 4), generator.randint(0, 4)
        latest: list[int] = []
        for version in range(30):
            count = capacity(
                max_staleness=max_staleness,
                batch_size=batch_size,
                version=version,
                steps=99,
                kept=0,
                active=len(latest),
            )
            latest += [version + max_staleness] * count
            ready = [generator.random() < 0.5 for _ in latest]
            options = {"count": batch_size, "version": version, "batch_size": batch_size, "in_order": False}
            chosen = choose(latest, ready, **options) or choose(latest, [True] * len(latest), **options)
            assert chosen is not None
            assert all(latest[index] >= version for index in chosen)
            latest = [last for index, last in enumerate(latest) if index not in chosen]
            assert all(last > version for last in latest)


# Bounds of a conversation.


def after(*lengths: int) -> Trajectory:
    """A trajectory whose turns have so many tokens."""
    turns = [
        Turn(index=n, message={"role": "assistant", "content": ""}, text="", completion=completion([70] * length))
        for n, length in enumerate(lengths)
    ]
    return Trajectory(id="1/0", group="1", row=a_row(), turns=turns)


def test_the_first_bound_that_is_met_says_why_there_is_no_further_turn() -> None:
    limits = Limits(turns=3, tokens=10, context=50)
    assert limits.stop_reason(after(), 49) is None
    assert limits.stop_reason(after(4, 5), 49) is None
    assert limits.stop_reason(after(1, 1, 1), 49) is Stop.MAX_TURNS
    assert limits.stop_reason(after(4, 6), 49) is Stop.MAX_TOKENS
    assert limits.stop_reason(after(4, 5), 50) is Stop.CONTEXT
    assert limits.stop_reason(after(5, 5, 5), 60) is Stop.MAX_TURNS
    assert Limits(turns=9, context=None, tokens=None).stop_reason(after(4000), 10**6) is None
    response = Limits(turns=9, response_tokens=30, context=50)
    assert response.stop_reason(after(4), 49, 29) is None
    assert response.stop_reason(after(4), 49, 30) is Stop.MAX_RESPONSE


def test_the_room_of_a_turn_is_the_smallest_bound_and_it_names_it() -> None:
    limits = Limits(tokens_per_turn=8, tokens=20, context=50)
    assert limits.completion_budget(after(), 30) == (8, Stop.LENGTH)
    assert limits.completion_budget(after(8, 6), 30) == (6, Stop.MAX_TOKENS)
    assert limits.completion_budget(after(8), 45) == (5, Stop.CONTEXT)
    assert limits.completion_budget(after(8, 4), 42) == (8, Stop.LENGTH)  # all three: the turn's own comes first
    assert Limits(tokens_per_turn=8).completion_budget(after(9000), 9000) == (8, Stop.LENGTH)
    assert Limits(tokens_per_turn=8, response_tokens=30).completion_budget(after(8), 45, 25) == (5, Stop.MAX_RESPONSE)


# Which rows a step uses, and which of its trajectories: dynamic sampling, overlong filter, weights of data sets, curriculum.


PLACES = Path(__file__).parents[1] / "support" / "places.py"


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    return save_recipe(
        tmp_path,
        model,
        data={"train": str(save_rows(tmp_path / "train.jsonl")), "shuffle": False},
        environment=f"{PLACES}:equal_in_even_rows",
        limits={"turns": 1, "tokens_per_turn": 96},
        train={"steps": 2, "batch_size": 4, "group_size": 3, "lr": 0.01},
    )


def run(recipe: Path, *overrides: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The metrics and the trajectories of a training run."""
    config, _ = load(recipe, overrides)
    train_silently(assemble(config))
    files = (Path(config.output) / name for name in ("metrics.jsonl", "trajectories.jsonl"))
    metrics, trajectories = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    return metrics, trajectories


def rows_of(trajectories: list[dict[str, Any]], step: int) -> list[int]:
    """The rows of the groups of a step, in the order in which they were sampled."""
    return list(dict.fromkeys(int(one["row"]["id"]) for one in trajectories if one["step"] == step))


def test_groups_without_differences_are_replaced(recipe: Path) -> None:
    # rows 2, 4, 6, 8 give equal rewards: of rows 1 to 4 two groups are replaced by rows 5, 6 and then one by row 7
    metrics, trajectories = run(recipe, "train.dynamic_sampling=3")
    assert rows_of(trajectories, 1) == [1, 2, 3, 4, 5, 6, 7]
    assert metrics[0]["groups/replaced"] == 3
    assert metrics[0]["groups/zero_std"] == pytest.approx(3 / 7)
    trained = {
        int(one["row"]["id"])
        for one in trajectories
        if one["step"] == 1 and any(turn["advantage"] for turn in one["turns"])
    }
    assert trained == {1, 3, 5, 7}
    assert rows_of(trajectories, 2)[0] == 8, "the next step goes on behind the rows that were used"


def test_sums_of_weighted_rewards_that_differ_by_rounding_are_equal(recipe: Path, tmp_path: Path) -> None:
    # 0.1 + 0.2 for the conversations with an odd number, 0.3 for the others
    (tmp_path / "sums.py").write_text(
        "def odd(trajectory): return float(int(trajectory.id[-1]) % 2)\n"
        "def also_odd(trajectory): return float(int(trajectory.id[-1]) % 2)\n"
        "def even(trajectory): return float(int(trajectory.id[-1]) % 2 == 0)\n"
    )
    uses = [("odd", 0.1), ("also_odd", 0.2), ("even", 0.3)]
    parts = ", ".join(f"{{use: {tmp_path}/sums.py:{name}, weight: {weight}}}" for name, weight in uses)
    metrics, trajectories = run(
        recipe,
        "train.dynamic_sampling=1",
        "train.steps=1",
        f"environment={PLACES}:indifferent",
        "environment.arguments.reward=0.0",
        f"reward.trajectory=[{parts}]",
    )
    assert len({one["reward"] for one in trajectories}) == 2
    assert metrics[0]["groups/zero_std"] == 1
    assert metrics[0]["groups/replaced"] == 4
    assert metrics[0]["reward/std"] == 0.0
    assert {turn["advantage"] for one in trajectories for turn in one["turns"]} == {0.0}


def test_no_more_groups_are_replaced_than_the_recipe_says(recipe: Path) -> None:
    metrics, trajectories = run(recipe, "train.dynamic_sampling=1", "train.steps=1")
    assert rows_of(trajectories, 1) == [1, 2, 3, 4, 5, 6]
    assert metrics[0]["groups/replaced"] == 2


def test_a_step_without_any_differences_is_finished(recipe: Path) -> None:
    metrics, trajectories = run(
        recipe, "train.dynamic_sampling=2", "train.steps=1", f"environment={PLACES}:indifferent"
    )
    assert metrics[0]["grad_norm"] == 0
    assert len(trajectories) == 3 * 4 * 3


@pytest.mark.slow
def test_a_resumed_run_uses_the_same_rows(recipe: Path, tmp_path: Path) -> None:
    options = ["train.dynamic_sampling=2", "data.curriculum.low=0.2", "deterministic=true", "checkpoint.every=1"]
    _, expected = run(recipe, *options, "train.steps=4", f"output={tmp_path / 'straight'}")
    run(recipe, *options, "train.steps=2")
    _, resumed = run(recipe, *options, "train.steps=4", "resume=auto")
    for step in (1, 2, 3, 4):
        assert rows_of(resumed, step) == rows_of(expected, step), step


def test_cut_trajectories_are_not_trained_on(recipe: Path) -> None:
    def weights(*options: str) -> dict[str, set[float]]:
        _, trajectories = run(recipe, "train.steps=1", "limits.tokens_per_turn=4", *options)
        return {
            reason: {turn["weight"] for one in trajectories for turn in one["turns"] if turn["finish_reason"] == reason}
            for reason in ("stop", "length")
        }

    assert weights() == {"stop": {1.0}, "length": {1.0}}
    assert weights("train.overlong_filter=true", "replace=true") == {"stop": {1.0}, "length": {0.0}}


def test_data_sets_are_mixed_by_their_weights(recipe: Path, tmp_path: Path) -> None:
    other = save_rows(tmp_path / "other.jsonl", count=3)
    sources = f"data.train=[{tmp_path / 'train.jsonl'}, {other}]"
    metrics, trajectories = run(recipe, sources, "data.weights=[3, 1]", "train.steps=3")
    rows = [row for step in (1, 2, 3) for row in rows_of(trajectories, step)]
    # rows 9, 10 and 11 are those of the second data set: one of four
    assert rows == [1, 2, 9, 3, 4, 5, 10, 6, 7, 8, 11, 1]
    of_other = [one["reward"] for one in trajectories if one["step"] == 1 and one["row"]["id"] == "9"]
    assert metrics[0][f"reward/source/{other}"] == pytest.approx(sum(of_other) / 3)


def test_the_order_follows_the_weights() -> None:
    order = WeightedOrder([5, 3], [2, 1], seed=0, shuffle=False)
    sources = [index >= 5 for _, index in order.take(0, 9000)]
    assert sum(sources) == 3000
    for count in range(1, 200):
        assert abs(sum(sources[:count]) - count / 3) < 1, "never further than a row from the share"
    assert [pair for pair in order.take(0, 12) if pair[1] >= 5] == [(0, 5), (0, 6), (0, 7), (1, 5)]


def test_an_order_with_weights_depends_on_the_position_only() -> None:
    expected = WeightedOrder([5, 3, 4], [2, 1, 0.5], seed=7).take(0, 60)
    order = WeightedOrder([5, 3, 4], [2, 1, 0.5], seed=7)
    for position in (40, 3, 0, 41):
        assert order.take(position, 19) == expected[position : position + 19]
    assert Counter(index for _, index in expected if index < 5) == Counter(
        {n: Counter(i for _, i in expected)[n] for n in range(5)}
    )


def test_a_data_set_without_rows_is_refused() -> None:
    rows = [Row(id="1", messages=[], source="a")]
    with pytest.raises(ConfigError, match=r"data.weights: no row is left of b \(data.max_rows"):
        weighted_order(rows, {"a": 1.0, "b": 2.0}, seed=0, shuffle=False)


@pytest.mark.slow
def test_the_curriculum_skips_rows(recipe: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "?", "rate": [0.0, 0.5, 1.0, None][n % 4]} for n in range(16)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rated = ["data.curriculum.column=rate", "data.curriculum.keep=0.000001", "train.steps=1"]
    metrics, trajectories = run(recipe, *rated, "data.curriculum.low=0", "data.curriculum.high=1")
    assert rows_of(trajectories, 1) == [2, 4, 6, 8]
    assert metrics[0]["rows/skipped"] == 4
    _, trajectories = run(recipe, *rated, "data.curriculum.low=0", "replace=true")
    assert rows_of(trajectories, 1) == [2, 3, 4, 6]
    _, trajectories = run(recipe, *rated, "data.curriculum.high=0.5", "replace=true")
    assert rows_of(trajectories, 1) == [1, 4, 5, 8]
    _, trajectories = run(recipe, *rated, "data.curriculum.low=0", "data.curriculum.keep=0.999999", "replace=true")
    assert rows_of(trajectories, 1) == [1, 2, 3, 4]


def test_the_curriculum_learns_pass_rates_from_the_run(recipe: Path, tmp_path: Path) -> None:
    # even rows always have the reward 0.5, and the others are not that close to it
    options = ["data.curriculum.low=0.499", "data.curriculum.high=0.501", "data.curriculum.keep=0.000001"]
    _, trajectories = run(recipe, *options, "train.steps=4", "train.batch_size=4")
    assert [rows_of(trajectories, step) for step in (1, 2)] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert [rows_of(trajectories, step) for step in (3, 4)] == [[2, 4, 6, 8]] * 2
    place = json.loads(next((tmp_path / "run" / "checkpoints").glob("*04/checkpoint.json")).read_text())["place"]
    assert {row: rate for row, rate in place["pass_rates"].items() if int(row) % 2 == 0} == dict.fromkeys("2468", 0.5)


def test_a_curriculum_that_skips_all_rows_uses_them_all_the_same(recipe: Path) -> None:
    options = ["data.curriculum.high=-1", "data.curriculum.keep=0.000001", "train.steps=3"]
    metrics, _ = run(recipe, *options)
    assert [one["rows/skipped"] for one in metrics] == [0, 0, 8]


def test_pass_rates_are_the_means_of_groups_without_failed_trajectories() -> None:
    row = Row(id="r", messages=[])
    trajectories = [
        Trajectory(id=str(n), group="g", row=row, reward=reward) for n, reward in enumerate((1.0, 0.0, None))
    ]
    assert pass_rates_of([Group(id="g", row=row, trajectories=trajectories)]) == {"r": 0.5}
    assert pass_rates_of([Group(id="g", row=row, trajectories=trajectories[2:])]) == {}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rat": 1}, "data.curriculum.column=rate: row '1' has no such column; its columns are: rat"),
        ({"rate": "high"}, "row '1' has 'high'; a pass rate must be a number"),
        ({"rate": True}, "row '1' has True; a pass rate must be a number"),
    ],
)
def test_a_column_without_pass_rates_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        initial_pass_rates([Row(id="1", messages=[], fields=fields)], "rate")
    assert message in str(caught.value)


def test_a_skipped_row_is_kept_with_the_given_probability() -> None:
    curriculum = Curriculum(low=0.0, high=1.0, keep=0.25, seed=3)
    row = Row(id="r", messages=[])
    kept = sum(not curriculum.skips(row, place, {"r": 0.0}) for place in range(4000))
    assert kept == pytest.approx(1000, abs=100)
    assert not any(curriculum.skips(row, place, {"r": 0.5}) for place in range(100))
    assert not any(curriculum.skips(row, place, {}) for place in range(100))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["train.dynamic_sampling=1", "train.group_size=1"], "train.dynamic_sampling replaces groups whose"),
        (["data.curriculum.keep=0.5"], "data.curriculum.keep has no effect without data.curriculum.low"),
        (["data.curriculum.low=1", "data.curriculum.high=0.5"], "must be less than data.curriculum.high=0.5"),
        (["data.weights=[1, 2]"], "data.weights has 2 numbers, and data.train has 1 data set"),
        (["data.train=[a.jsonl, a.jsonl]", "data.weights=[1, 2]"], "named twice in data.train"),
        (["data.weights=[1, 0]"], "data.weights"),
    ],
)
def test_options_without_effect_are_refused(recipe: Path, options: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        assemble(load(recipe, options)[0])
    assert message in str(caught.value)


def test_an_order_without_weights_is_that_of_one_data_set() -> None:
    assert Order(3, seed=0, shuffle=False).take(1, 3) == [(0, 1), (0, 2), (1, 0)]
