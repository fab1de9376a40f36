"""A simulation of a training run: conversations, engine replicas, the pacing of the pipeline, and the trainer.

It is a discrete-event simulation: time jumps from event to event. Conversations are drawn from a measured `MeasuredWorkload`. The
engine replicas share their speed among the turns that they sample (continuous batching). Groups are started and taken by the
functions that the real pipeline uses (`rollout/pacing.py`).

What is not modelled: the network, failures, and differences between the weights of early and late steps (longer answers).
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from turnwise.planning.workload import ConversationCost, EngineSpeed, MeasuredWorkload
from turnwise.rollout.pacing import capacity, choose

__all__ = ["Setup", "SimulationResult", "simulate"]


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
