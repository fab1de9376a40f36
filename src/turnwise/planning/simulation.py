"""How fast a run would be on other devices: a simulation with the measured times of a recorded run.

It is a discrete-event simulation: time jumps from event to event. `measure` reads the record of a run; the simulation draws
conversations from this `MeasuredWorkload`. The number of turns, their tokens and the waiting times of a conversation stay
together, because they depend on each other; for the same reason, the conversations of a row stay together. The engine replicas
share their speed among the turns that they sample (continuous batching). Groups are started and taken by the functions that
the real pipeline uses (`rollout/pipeline.py`). The network, failures, and differences between the weights of early and late
steps (longer answers) are not modelled.

`predict_scaling` compares synchronous, one-step-off and asynchronous training. A synchronous run uses all devices for
sampling, and then all for training. The other modes divide the devices: some sample while the others train. The simulated run
has the batch of the recipe, or, with `scale_batch`, as many times the batch as there are devices.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean, median

import numpy as np

from turnwise.errors import ConfigError, RunError
from turnwise.record.reader import read, read_lines
from turnwise.rollout.pipeline import capacity, choose
from turnwise.types import Trajectory

# the measured workload


@dataclass(frozen=True, slots=True)
class TurnCost:
    """What a turn needs from the engine and from the environment."""

    prompt_tokens: int
    """The tokens that the engine has not seen yet: the opening of the conversation, or the reply to the turn before."""
    sampled_tokens: int
    environment: float
    """Seconds of the environment and its tools after the turn."""


ConversationCost = tuple[TurnCost, ...]


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """The time of a turn on an engine replica that samples `k` turns at the same time.

    A turn takes `request + prefill * prompt_tokens + sampled_tokens * (token + sharing * k)` seconds.
    """

    request: float
    prefill: float
    token: float
    sharing: float


@dataclass(frozen=True, slots=True)
class TrainingSpeed:
    """The time of a training step."""

    per_token: float
    """Seconds of the training computation for each token of the conversations of the step."""
    other: float
    """Seconds of a step in which neither the trainer computes nor waits: records, checkpoints, metrics."""


@dataclass(frozen=True, slots=True)
class MeasuredWorkload:
    """What was measured in a run."""

    groups: Sequence[Sequence[ConversationCost]]
    """The finished conversations, by row."""
    engine: EngineSpeed
    training: TrainingSpeed
    steps: int
    """The number of recorded steps that were used."""
    steps_per_hour: float
    """The speed of the measured run in these steps."""
    staleness: int = 0
    """The largest staleness of a token in these steps. Above 0, engine and trainer have slowed each other down."""

    @property
    def turns(self) -> float:
        """Turns of a conversation, on average."""
        return fmean(len(conversation) for group in self.groups for conversation in group)


def measure(run: str | Path) -> MeasuredWorkload:
    """The workload of a recorded training run.

    The first step is left out if there are more than two: it contains one-time work. Use a run with `train.max_staleness: 0`:
    its engine and its trainer did not slow each other down.

    Raises RunError if the run has no metrics of training steps, or no times of turns (records of schema 1).
    """
    lines = [line for line in read_lines(Path(run) / "metrics.jsonl") if "seconds/train" in line]
    trajectories = [t for t in read(run) if not t.failed and t.turns and t.step is not None]
    if not lines or not trajectories:
        raise RunError(f"{run} has no finished training step to measure; train some steps first: turnwise train RECIPE")
    if any(turn.started is None for t in trajectories for turn in t.turns):
        raise RunError(f"{run} has no times of turns (an old record); train some steps with this version of turnwise")
    first = min(line["step"] for line in lines) if len(lines) > 2 else 0
    lines = [line for line in lines if line["step"] > first]
    trajectories = [t for t in trajectories if t.step is not None and t.step > first]
    tokens = {line["step"]: 0 for line in lines}
    for trajectory in trajectories:
        if trajectory.step in tokens:
            tokens[trajectory.step] += sum(len(segment.token_ids) for segment in trajectory.segments)
    by_group = groupby(sorted(trajectories, key=lambda t: t.group), key=lambda t: t.group)
    return MeasuredWorkload(
        groups=[[conversation_cost(t) for t in group] for _, group in by_group],
        engine=fit_engine_speed(trajectories),
        training=_fit_training_speed(lines, tokens),
        steps=len(lines),
        steps_per_hour=3600 / max(1e-9, fmean(line["seconds/step"] for line in lines)),
        staleness=max(int(line.get("staleness/max", 0)) for line in lines),
    )


def conversation_cost(trajectory: Trajectory) -> ConversationCost:
    """The tokens and the waiting times of each turn of a conversation."""
    new, sampled = dict.fromkeys(range(len(trajectory.turns)), 0), dict.fromkeys(range(len(trajectory.turns)), 0)
    for segment in trajectory.segments:
        context = 0
        for turn in segment.turn:
            if turn < 0:
                context += 1
            else:
                new[turn] += context
                sampled[turn] += 1
                context = 0
    return tuple(TurnCost(new[turn.index], sampled[turn.index], turn.seconds_environment) for turn in trajectory.turns)


def fit_engine_speed(trajectories: Iterable[Trajectory]) -> EngineSpeed:
    """Fit `EngineSpeed` to the times of recorded turns by least squares, with coefficients of 0 or more.

    `k` of a turn is the mean number of turns that were in the engine during the turn.
    """
    rows, ends = [], []
    for trajectory in trajectories:
        for turn, cost in zip(trajectory.turns, conversation_cost(trajectory), strict=True):
            if turn.started is not None and cost.sampled_tokens:
                rows.append((cost.prompt_tokens, cost.sampled_tokens, turn.seconds_engine))
                ends.append((turn.started, turn.started + turn.seconds_engine))
    prompt, sampled, seconds = np.array(rows, dtype=float).T
    concurrent = _mean_concurrency(np.array(ends))
    columns = np.stack([np.ones_like(prompt), prompt, sampled, sampled * concurrent], axis=1)
    return EngineSpeed(*_least_squares(columns, seconds))


def _mean_concurrency(intervals: np.ndarray) -> np.ndarray:
    """For each interval `[start, end]`, the mean number of intervals that are open during it, itself included."""
    times = np.concatenate([intervals[:, 0], intervals[:, 1]])
    changes = np.concatenate([np.ones(len(intervals)), -np.ones(len(intervals))])
    order = np.argsort(times, kind="stable")
    times, open_ = times[order], np.cumsum(changes[order])
    # the integral of the number of open intervals, at each change
    integral = np.concatenate([[0.0], np.cumsum(open_[:-1] * np.diff(times))])
    areas = np.interp(intervals[:, 1], times, integral) - np.interp(intervals[:, 0], times, integral)
    return areas / np.maximum(intervals[:, 1] - intervals[:, 0], 1e-9)


def _least_squares(columns: np.ndarray, values: np.ndarray) -> list[float]:
    """Least squares with coefficients of 0 or more: the most negative coefficient is set to 0 until none is left."""
    used = list(range(columns.shape[1]))
    while used:
        solution = np.linalg.lstsq(columns[:, used], values, rcond=None)[0]
        if solution.min() >= 0:
            break
        used.pop(int(solution.argmin()))
    else:
        solution = np.array([])
    result = [0.0] * columns.shape[1]
    for place, value in zip(used, solution, strict=True):
        result[place] = float(value)
    return result


def _fit_training_speed(lines: Sequence[dict], tokens: dict[int, int]) -> TrainingSpeed:
    """Steps of one run have nearly equal numbers of tokens, so a part that does not depend on them is not known."""
    per_token = [line["seconds/train"] / max(1, tokens[line["step"]]) for line in lines]
    other = [max(0.0, line["seconds/step"] - line["seconds/waiting"] - line["seconds/train"]) for line in lines]
    return TrainingSpeed(per_token=fmean(per_token), other=median(other))


# the simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The devices and the options of a simulated run."""

    batch_size: int
    group_size: int
    max_staleness: int
    max_concurrent: int
    """The largest number of running conversations."""
    steps: int
    replicas: int = 1
    """Engine replicas, each as fast as the engine of the measured run."""
    training_speedup: float = 1.0
    """How many times as fast the trainer is as that of the measured run."""
    shared: bool = False
    """Whether engine and trainer use the same devices: while both work, each has half of its speed."""
    update_seconds: float = 0.0
    """How long the engines stand still while new weights are loaded."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """What a simulation has found. Shares are of the simulated time."""

    seconds: float
    """The time of all steps together."""
    steps_per_hour: float
    """Without the first steps, in which the pipeline fills."""
    tokens_per_second: float
    """Sampled tokens that were trained on, per second of the complete run."""
    staleness_mean: float
    staleness_max: int
    engine_idle: float
    """The share of the time in which a replica has no turn to sample, averaged over the replicas."""
    trainer_idle: float
    """The share of the time in which the trainer waits for conversations."""


@dataclass(slots=True, eq=False)
class _Group:
    members: list[ConversationCost]
    left: int
    version: int | None = None
    ended: bool = False
    sampled: list[tuple[int, float]] = field(default_factory=list)
    """Tokens of each turn, and the version that sampled them: the mean of the versions at its start and its end."""


@dataclass(slots=True, eq=False)
class _Conversation:
    group: _Group
    turns: ConversationCost
    replica: _Replica
    place: int = 0
    """The index of the present turn."""
    version: int = 0
    """The version of the weights at the start of the present turn."""


@dataclass(slots=True, eq=False)
class _Replica:
    """An engine replica. All its turns advance at the same speed, so one clock of sampled tokens serves them all."""

    speed: EngineSpeed
    clock: float = 0.0
    """Tokens that a turn would have sampled if it had run from the start."""
    updated: float = 0.0
    """The time to which `clock` belongs."""
    factor: float = 1.0
    """The part of its speed that the replica has: less while it shares devices, 0 while weights are loaded."""
    turns: list[tuple[float, int, _Conversation]] = field(default_factory=list)
    """A heap of the turns that are sampled, by the value of `clock` at their end."""
    busy: float = 0.0
    epoch: int = 0
    """Counts the changes: an end that was computed before the last change is void."""
    conversations: int = 0

    def advance(self, now: float) -> None:
        """Bring the clock to the time `now`."""
        elapsed, self.updated = now - self.updated, now
        if self.turns:
            self.clock += elapsed * self.rate
            self.busy += elapsed

    @property
    def rate(self) -> float:
        """Tokens per second of each turn."""
        return self.factor / max(1e-9, self.speed.token + self.speed.sharing * len(self.turns))

    def next_end(self) -> float | None:
        """When the next turn ends if nothing changes; None if no turn is sampled or the replica stands still."""
        if not self.turns or not self.factor:
            return None
        return self.updated + max(0.0, self.turns[0][0] - self.clock) / self.rate


class _Simulation:
    def __init__(self, workload: MeasuredWorkload, setup: Setup) -> None:
        self.workload, self.setup = workload, setup
        self.random = random.Random(setup.seed)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.serial = 0
        self.replicas = [_Replica(workload.engine) for _ in range(setup.replicas)]
        self.active: list[_Group] = []
        self.waiting: deque[tuple[_Group, ConversationCost]] = deque()
        self.running = 0
        self.version = 0
        self.training = False
        self.work = 0.0
        """The rest of the update in progress, in seconds of a trainer that has its devices for itself; 0 without an update."""
        self.worked = 0.0
        """The time to which `work` belongs."""
        self.updates = 0
        """Counts the planned ends of updates: only the last one is valid."""
        self.asked = 0.0
        self.idle = 0.0
        self.ends: list[float] = []
        self.staleness = 0.0
        self.oldest = 0
        self.tokens = 0

    # events

    def at(self, time: float, call: Callable[[], None]) -> None:
        self.serial += 1
        heapq.heappush(self.events, (time, self.serial, call))

    def run(self) -> None:
        self.ask()
        while len(self.ends) < self.setup.steps:
            time, _, call = heapq.heappop(self.events)
            self.now = max(self.now, time)
            call()

    # the engine

    def schedule(self, replica: _Replica) -> None:
        """Plan the next end of a turn of the replica, after a change."""
        replica.epoch += 1
        end, epoch = replica.next_end(), replica.epoch
        if end is not None:
            self.at(end, lambda: self.turn_sampled(replica) if replica.epoch == epoch else None)

    def set_factor(self, factor: float) -> None:
        """Change the speed of all replicas."""
        for replica in self.replicas:
            replica.advance(self.now)
            replica.factor = factor
            self.schedule(replica)

    def begin_turn(self, conversation: _Conversation) -> None:
        turn, speed = conversation.turns[conversation.place], conversation.replica.speed
        conversation.version = self.version
        delay = speed.request + speed.prefill * turn.prompt_tokens
        self.at(self.now + delay, lambda: self.begin_sampling(conversation))

    def begin_sampling(self, conversation: _Conversation) -> None:
        replica, turn = conversation.replica, conversation.turns[conversation.place]
        self.serial += 1
        number = self.serial
        self.change(
            replica,
            lambda: heapq.heappush(replica.turns, (replica.clock + turn.sampled_tokens, number, conversation)),
        )

    def turn_sampled(self, replica: _Replica) -> None:
        conversation = replica.turns[0][2]
        self.change(replica, lambda: heapq.heappop(replica.turns))
        turn = conversation.turns[conversation.place]
        conversation.group.sampled.append((turn.sampled_tokens, (conversation.version + self.version) / 2))
        conversation.place += 1
        self.at(self.now + turn.environment, lambda: self.answered(conversation))

    def answered(self, conversation: _Conversation) -> None:
        if conversation.place < len(conversation.turns):
            self.begin_turn(conversation)
            return
        self.running -= 1
        conversation.replica.conversations -= 1
        group = conversation.group
        group.left -= 1
        group.ended = not group.left
        self.start_conversations()
        if group.ended and not self.training:
            self.take()

    # the pipeline

    def start_groups(self) -> None:
        setup = self.setup
        count = capacity(
            max_staleness=setup.max_staleness,
            batch_size=setup.batch_size,
            version=self.version,
            steps=setup.steps,
            kept=0,
            active=len(self.active),
        )
        for _ in range(count):
            source = self.random.choice(self.workload.groups)
            members = [self.random.choice(source) for _ in range(setup.group_size)]
            group = _Group(members, left=len(members))
            self.active.append(group)
            self.waiting.extend((group, member) for member in members)
        self.start_conversations()

    def start_conversations(self) -> None:
        while self.waiting and self.running < self.setup.max_concurrent:
            group, turns = self.waiting.popleft()
            if group.version is None:
                group.version = self.version
            replica = min(self.replicas, key=lambda replica: replica.conversations)
            replica.conversations += 1
            self.running += 1
            self.begin_turn(_Conversation(group, turns, replica))

    # the trainer

    def ask(self) -> None:
        """The trainer asks for the groups of the next step."""
        self.training, self.asked = False, self.now
        self.start_groups()
        self.take()

    def take(self) -> None:
        """Begin the training if the groups of the step are ready."""
        setup, active = self.setup, self.active
        chosen = choose(
            [(self.version if group.version is None else group.version) + setup.max_staleness for group in active],
            [group.ended for group in active],
            count=setup.batch_size,
            version=self.version,
            batch_size=setup.batch_size,
            in_order=setup.max_staleness <= 1,
        )
        if chosen is None:
            return
        groups = [active[index] for index in chosen]
        taken = set(map(id, groups))
        self.active = [group for group in active if id(group) not in taken]
        self.training = True
        self.idle += self.now - self.asked
        tokens = sum(turn.prompt_tokens + turn.sampled_tokens for g in groups for c in g.members for turn in c)
        for group in groups:
            self.staleness += sum(tokens * (self.version - version) for tokens, version in group.sampled)
            self.tokens += sum(tokens for tokens, _ in group.sampled)
            self.oldest = max(self.oldest, self.version - (group.version or 0))
        self.train(self.workload.training.per_token * tokens / setup.training_speedup)

    def train(self, seconds: float) -> None:
        """Begin an update of `seconds` of a trainer that has its devices for itself."""
        self.work, self.worked = seconds, self.now
        if self.setup.shared:
            self.set_factor(0.5)
        self.schedule_update()

    def schedule_update(self) -> None:
        """Plan the end of the update, after a change of the trainer's speed."""
        self.updates += 1
        number = self.updates
        end = self.now + self.work / self.trainer_speed
        self.at(end, lambda: self.updated() if self.updates == number else None)

    @property
    def trainer_speed(self) -> float:
        return 0.5 if self.setup.shared and any(replica.turns for replica in self.replicas) else 1.0

    def change(self, replica: _Replica, call: Callable[[], object]) -> None:
        """Change the turns of a replica. If it shares devices with a working trainer, the trainer's speed may change as well."""
        before = self.trainer_speed
        replica.advance(self.now)
        call()
        self.schedule(replica)
        if self.work and self.trainer_speed != before:
            self.work = max(0.0, self.work - (self.now - self.worked) * before)
            self.worked = self.now
            self.schedule_update()

    def updated(self) -> None:
        """The weights are updated: load them into the engines."""
        self.work = 0.0
        self.set_factor(0.0 if self.setup.update_seconds else 1.0)
        self.at(self.now + self.setup.update_seconds, self.published)

    def published(self) -> None:
        self.set_factor(1.0)
        self.version += 1
        if self.setup.max_staleness:
            self.start_groups()
        self.at(self.now + self.workload.training.other, self.finished)

    def finished(self) -> None:
        self.ends.append(self.now)
        if len(self.ends) < self.setup.steps:
            self.ask()


def simulate(workload: MeasuredWorkload, setup: Setup) -> SimulationResult:
    """Predict a run of `setup.steps` training steps."""
    simulation = _Simulation(workload, setup)
    simulation.run()
    ends, steps = simulation.ends, setup.steps
    skipped = min(setup.max_staleness + 1, steps // 2)
    steady = ends[-1] - ends[skipped - 1] if skipped else ends[-1]
    for replica in simulation.replicas:
        replica.advance(simulation.now)
    busy = sum(replica.busy for replica in simulation.replicas) / len(simulation.replicas)
    return SimulationResult(
        seconds=ends[-1],
        steps_per_hour=3600 * (steps - skipped) / max(steady, 1e-9),
        tokens_per_second=simulation.tokens / ends[-1],
        staleness_mean=simulation.staleness / max(1, simulation.tokens),
        staleness_max=simulation.oldest,
        engine_idle=1 - busy / ends[-1],
        trainer_idle=simulation.idle / ends[-1],
    )


# several numbers of devices

SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
"""The shares of training devices that are compared if no share is given."""
_MOST_TURNS = 60_000
"""Turns of a simulated run: larger runs are simulated with fewer devices and a smaller batch, in proportion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingOptions:
    """What is predicted."""

    batch_size: int
    group_size: int
    max_concurrent: int
    staleness: int
    """`train.max_staleness` of the asynchronous mode."""
    devices: Sequence[int]
    measured_devices: int = 1
    """Devices of the measured run: all of them sampled, and all of them trained."""
    replica_devices: int = 1
    """Devices of an engine replica (tensor parallel)."""
    trainer_share: float | None = None
    """The share of the devices that trains; None: the share with the most steps per hour."""
    efficiency: float = 1.0
    """How fast `n` training devices are, compared with `n` times one device."""
    update_seconds: float = 0.0
    scale_batch: bool = False
    steps: int = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """A prediction for one mode and one number of devices."""

    devices: int
    mode: str
    engines: int
    """Devices that sample."""
    trainers: int
    """Devices that train."""
    batch_size: int
    prediction: SimulationResult


def predict_scaling(workload: MeasuredWorkload, options: ScalingOptions) -> Iterator[ScalingRow]:
    """Predict each mode for each number of devices.

    Raises ConfigError if a number of devices is too small for an engine replica, and one trainer beside it.
    """
    for devices in options.devices:
        if devices < options.replica_devices or (devices < options.replica_devices + 1 and devices > 1):
            raise ConfigError(
                f"{devices} devices: a run needs an engine replica ({options.replica_devices} devices) and at least one "
                f"device that trains; give more devices"
            )
        yield _row(workload, options, devices, mode="synchronous", staleness=0, trainers=devices)
        for mode, staleness in (("one step off", 1), ("asynchronous", options.staleness)):
            if devices == 1:
                yield _row(workload, options, 1, mode=mode, staleness=staleness, trainers=1)
                continue
            candidates = sorted({_trainers(devices, share, options) for share in _shares(options)})
            rows = [
                _row(workload, options, devices, mode=mode, staleness=staleness, trainers=trainers)
                for trainers in candidates
            ]
            yield max(rows, key=lambda row: row.prediction.steps_per_hour)


def _shares(options: ScalingOptions) -> Sequence[float]:
    return SHARES if options.trainer_share is None else (options.trainer_share,)


def _trainers(devices: int, share: float, options: ScalingOptions) -> int:
    """Training devices for a share: the others are complete replicas."""
    replicas = max(1, round(devices * (1 - share)) // options.replica_devices)
    return max(1, devices - replicas * options.replica_devices)


def _row(
    workload: MeasuredWorkload, options: ScalingOptions, devices: int, *, mode: str, staleness: int, trainers: int
) -> ScalingRow:
    batch_size = options.batch_size * (devices if options.scale_batch else 1)
    shared = devices == 1
    engines = devices if mode == "synchronous" or shared else devices - trainers
    replicas = max(1, engines // options.replica_devices)
    replicas_measured = max(1, options.measured_devices // options.replica_devices)
    turns = batch_size * options.group_size * workload.turns
    # a part of the run: the same number of conversations on a replica
    steps = max(staleness + 4, min(options.steps, int(_MOST_TURNS / turns)))
    part = max(1, min(int(steps * turns / _MOST_TURNS), batch_size, replicas))
    setup = Setup(
        batch_size=max(1, batch_size // part),
        group_size=options.group_size,
        max_staleness=staleness,
        max_concurrent=max(1, options.max_concurrent * (devices if options.scale_batch else 1) // part),
        steps=steps,
        replicas=max(1, replicas // replicas_measured // part),
        training_speedup=max(trainers / options.measured_devices, 1e-9)
        * (options.efficiency if trainers > options.measured_devices else 1.0)
        / part,
        shared=shared and staleness > 0,
        update_seconds=options.update_seconds,
    )
    found = simulate(workload, setup)
    return ScalingRow(
        devices=devices,
        mode=mode,
        engines=engines,
        trainers=trainers,
        batch_size=batch_size,
        prediction=replace(found, tokens_per_second=found.tokens_per_second * part),
    )
