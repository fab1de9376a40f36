"""The pipeline between conversations and training: it starts groups, scores them when they end, and hands them to the trainer.

The trainer calls `take` for the groups of the next step and `publish` when it has published new weights. The staleness of a
group is the number of training steps from the weights that sampled its first token to the step that trains on it.
`max_staleness` bounds it by pacing: a group is started only if it can be trained on in time, and a step waits for the groups
that no later step may train on. With 0, groups are started by `take` and the trainer waits for all of them; otherwise they run
in the background, also during training. A conversation that runs while the weights change goes on under the new weights. No
conversation is discarded for its age.

All tasks belong to the pipeline. When its block is left, they are cancelled and awaited, so that all environments are closed.
Pacing is made of pure functions of counts and versions. The pipeline knows rows, conversations and rewards; it does not know
how the weights are trained, published or saved.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from turnwise.data.order import ChosenRow, DataState, RowSource
from turnwise.options.algorithm import TrainSection
from turnwise.rewards.scorer import GroupScoring, Scorer
from turnwise.rollout.context import ConversationContext, Runner
from turnwise.rollout.rollout import new_group, rollout_groups, runner_of
from turnwise.types import Failure, Group, Trajectory
from turnwise.user_code.calls import forget
from turnwise.user_code.reward_number import equal_rewards

# pacing


def capacity(*, max_staleness: int, batch_size: int, version: int, steps: int, kept: int, active: int) -> int:
    """How many groups may be started now.

    This is `(max_staleness + version + 1) * batch_size - (accepted + running)`, from AReaL (arXiv 2505.24298), where
    `version` is the number of finished training steps, and each of them has used `batch_size` groups. `kept` groups are taken for
    the step in progress; `active` groups are started and not taken. A run of `steps` steps starts no group that no step can use.

    Example: with batch_size=4 and max_staleness=1, 8 groups are started at the beginning, and 4 more after each step.
    """
    groups = min(max_staleness + version + 1, steps) * batch_size
    return max(0, groups - version * batch_size - kept - active)


def choose(
    latest: Sequence[int], ready: Sequence[bool], *, count: int, version: int, batch_size: int, in_order: bool
) -> list[int] | None:
    """Which `count` of the active groups the step takes that trains version `version`; None if it must wait.

    The groups are in the order in which they were started. `latest` is the last version that each may train, and `ready` whether
    its conversations have ended. The groups with the earliest `latest` are taken first. The step waits if the groups that are
    left could then not all be trained on in time, at `batch_size` groups a step. With `in_order`, only the first `count` groups
    are taken.

    Example: `choose([2, 2, 3], [False, True, True], count=1, version=1, batch_size=1, in_order=False)` is `[1]`: the first group
    can still be taken in the next step.
    """
    order = sorted(range(len(latest)), key=lambda index: (latest[index], index))
    chosen = list(range(count)) if in_order else [index for index in order if ready[index]][:count]
    if len(chosen) < count or len(latest) < count or not all(ready[index] for index in chosen):
        return None
    left = [latest[index] for index in order if index not in set(chosen)]
    if any(last < version + 1 + number // batch_size for number, last in enumerate(left)):
        return None
    return sorted(chosen)


# groups that teach nothing: without differences, most estimators give advantages of 0


def has_reward_differences(group: Group) -> bool:
    """Whether the trajectories of a group that have a reward differ in it, or in the rewards of their turns, by more than
    rounding. A trajectory without a reward is not compared: it gets no advantage."""
    scored = [
        trajectory for trajectory in group.trajectories if not trajectory.failed and trajectory.reward is not None
    ]
    totals = [trajectory.reward for trajectory in scored if trajectory.reward is not None]
    by_turn = [{turn.index: turn.reward for turn in trajectory.turns} for trajectory in scored]
    turns = {index for rewards in by_turn for index in rewards}
    return not equal_rewards(totals) or any(
        not equal_rewards(rewards.get(index, 0.0) for rewards in by_turn) for index in turns
    )


def _has_differences(group: Group) -> bool:
    """Whether the conversations of a group have reward differences, or those of one of its agents."""
    return any(map(has_reward_differences, with_groups_of_agents([group])))


def with_groups_of_agents(groups: Sequence[Group]) -> list[Group]:
    """The groups, each followed by those of the agents that the environments of its conversations have opened."""
    return [each for group in groups for each in (group, *group.of_agents())]


# the pipeline


@dataclass(slots=True, kw_only=True, eq=False)
class ActiveGroup:
    """A group that was started: its conversations wait, run or have ended."""

    group: Group
    row: ChosenRow
    scoring: GroupScoring
    baseline: GroupScoring | None = None
    version: int | None = None
    """The version of the weights when the first conversation started; None before."""
    started: float | None = None
    """When the first conversation started, in Unix seconds; None before."""
    ended: float | None = None
    """When all conversations had ended and their rewards were computed, in Unix seconds; None before."""
    deadline: float | None = None
    """When its conversations are ended, in the event loop's time; None before the start, and without a time limit."""
    timed_out: bool = False
    """Whether `group_timeout` ended some of its conversations."""
    too_small: bool = False
    """Whether too many of its conversations failed, so that it is not trained on. Set by `take`."""
    replaced: bool = False
    """Whether another group was taken in its place. Set by `take`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenGroups:
    """The groups of a step."""

    active: Sequence[ActiveGroup]
    """All groups that the step has used, in the order in which they were started; a replacement is after all earlier groups."""
    trained: Sequence[Group]
    """The groups to train on: those with enough finished conversations. If groups were replaced by `dynamic_sampling`, groups
    without reward differences are left out, unless no others are left. Each is followed by the groups of its agents."""
    skipped: int
    """How many rows were skipped since the last step (curriculum)."""
    asked: float
    """When the trainer asked for the groups, in Unix seconds."""
    taken: float
    """When it got them."""
    waited_for: str | None
    """The id of the group for which the trainer waited last; None if all groups were there when it asked."""
    running: int
    """The number of groups that were started and not taken, at this time."""

    @property
    def groups(self) -> list[Group]:
        """All groups that the step has used."""
        return [active.group for active in self.active]

    @property
    def seconds(self) -> float:
        """The time from the start of the first conversation to the end of the last."""
        started = [active.started for active in self.active if active.started is not None]
        return max((active.ended or 0.0 for active in self.active), default=0.0) - min(started, default=0.0)


@dataclass(slots=True, kw_only=True)
class Pipeline:
    """Runs the conversations of a training run. `async with pipeline:` owns their tasks."""

    context: ConversationContext
    scorer: Scorer
    source: RowSource
    options: TrainSection
    """The section `train`, with known steps: no group is started that no step would use."""
    seed: int
    baselines: bool = False
    """Whether each group has one more conversation at temperature 0 (`Group.baseline`)."""
    version: int
    """The version of the published weights: the number of finished training steps."""
    on_finished: Callable[[int], None] = lambda tokens: None
    """Called with the number of sampled tokens when a conversation has ended and its rewards were computed."""
    active: list[ActiveGroup] = field(default_factory=list, init=False)
    """The groups that were started and not taken, in the order in which they were started."""
    kept: int = field(default=0, init=False)
    """How many groups were taken for the step in progress, without those that are replaced."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _error: BaseException | None = field(default=None, init=False)
    """What ended a task: an error in turnwise. Raised by `take`."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set when a group has ended."""
    _slots: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.context.max_concurrent)

    async def __aenter__(self) -> Pipeline:
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for task in tasks:
            forget(task)

    async def take(self) -> TakenGroups:
        """The groups of the next step, all scored. Waits until there are enough.

        Groups that `dynamic_sampling` or `replace_failed` replace are part of the result.
        """
        options, asked, skipped = self.options, time.time(), self.source.skipped
        groups: list[ActiveGroup] = []
        round_ = 0
        # With batch_size=4 and dynamic_sampling=1, round 0 takes 4 groups, of which 1 has no reward differences: kept=3. Round 1
        # takes 1 more, which is kept whatever its rewards are: kept=4. So there are at most
        # max(dynamic_sampling, replace_failed) + 1 rounds. A replaced group is neither in `active` nor counted in `kept`, so
        # `capacity` lets another group start in its place. Invariant: a step uses batch_size groups of the capacity, however
        # many groups it has replaced; therefore `kept` stays until `publish`.
        while (count := options.batch_size - self.kept) > 0:
            new = await self._next(count)
            for active in new:
                finished = sum(not trajectory.failed for trajectory in active.group.trajectories)
                active.too_small = finished < options.min_group_size
                active.replaced = self._is_replaced(active, round_)
            groups += new
            self.kept += sum(not active.replaced for active in new)
            round_ += 1
        last = max(groups, key=lambda active: active.ended or 0.0)
        self.source.update_pass_rates([active.group for active in groups])
        return TakenGroups(
            active=groups,
            trained=with_groups_of_agents(self._trained(groups)),
            skipped=self.source.skipped - skipped,
            asked=asked,
            taken=time.time(),
            waited_for=last.group.id if (last.ended or 0.0) > asked else None,
            running=len(self.active),
        )

    def publish(self, version: int) -> None:
        """The weights of a finished step are published as `version`: more groups may be started."""
        self.version, self.kept = version, 0
        if self.options.max_staleness:
            self._start_groups()

    @property
    def state(self) -> DataState:
        """The rows that the finished steps have used. Groups that were started are unfinished until a step takes them."""
        return self.source.state((active.row for active in self.active), step=self.version)

    def _is_replaced(self, active: ActiveGroup, round_: int) -> bool:
        options = self.options
        if active.too_small and round_ < options.replace_failed:
            return True
        return round_ < options.dynamic_sampling and not _has_differences(active.group)

    def _trained(self, groups: Sequence[ActiveGroup]) -> list[Group]:
        options = self.options
        trained = [active.group for active in groups if not active.too_small]
        if options.dynamic_sampling and any(active.replaced for active in groups):
            return [group for group in trained if _has_differences(group)] or trained
        return trained

    async def _next(self, count: int) -> list[ActiveGroup]:
        """Take `count` groups, as soon as `choose` allows it."""
        options = self.options
        while True:
            self._start_groups()
            chosen = choose(
                [(self.version if a.version is None else a.version) + options.max_staleness for a in self.active],
                [active.ended is not None for active in self.active],
                count=count,
                version=self.version,
                batch_size=options.batch_size,
                in_order=options.max_staleness <= 1,
            )
            if chosen is not None:
                break
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        groups = [self.active[index] for index in chosen]
        self.active = [active for active in self.active if active not in groups]
        if self.scorer.batch:
            await self.scorer.score_batch([active.scoring for active in groups])
            await self.scorer.score_batch([active.baseline for active in groups if active.baseline is not None])
        return groups

    # starting groups

    def _start_groups(self) -> None:
        """Start as many groups as the pacing allows."""
        options = self.options
        count = capacity(
            max_staleness=options.max_staleness,
            batch_size=options.batch_size,
            version=self.version,
            steps=options.total_steps,
            kept=self.kept,
            active=len(self.active),
        )
        first = self.version * options.batch_size + self.kept + len(self.active)
        numbers = range(first, first + count)
        groups = []
        for chosen, row in self.source.next_rows(count, (number // options.batch_size for number in numbers)):
            group = new_group(row, size=options.group_size, seed=self.seed, prefix=chosen.prefix)
            groups.append(ActiveGroup(group=group, row=chosen, scoring=GroupScoring(self.scorer, group)))
        self.active += groups
        # in lockstep, the engine receives the requests of all conversations together
        for together in [groups] if self.context.lockstep and groups else [[group] for group in groups]:
            task = asyncio.create_task(self._run(together))
            self._tasks.add(task)
            task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()
        self._changed.set()

    async def _run(self, groups: Sequence[ActiveGroup]) -> None:
        """Run and score the conversations of groups."""
        options = self.options
        step = options.batch_size * (options.group_size + self.baselines) if options.max_staleness else 0
        self.scorer.share_scope(step=step)
        of_group = {active.group.id: active for active in groups}
        score = self._scoring({active.group.id: active.scoring for active in groups}, self.on_finished)
        context = replace(
            self.context,
            make_runner=lambda context: self._timed_runner(of_group, context),
            runner_supports_lockstep=True,  # as far as its own runner, which the context was checked for
        )
        await rollout_groups([active.group for active in groups], context, on_finished=score, slots=self._slots)
        if self.baselines:
            await self._run_baselines(groups)
        for active in groups:
            active.ended = time.time()

    async def _run_baselines(self, groups: Sequence[ActiveGroup]) -> None:
        """Run and score one conversation at temperature 0 for each group.

        For reward functions that compare, such a conversation is a group of its own.
        """
        alone = [greedy_group(active.group) for active in groups]
        for active, single in zip(groups, alone, strict=True):
            active.baseline = GroupScoring(self.scorer, single)
            active.group.baseline = single.trajectories[0]
        score = self._scoring({a.baseline.group.id: a.baseline for a in groups if a.baseline is not None})
        greedy = replace(self.context, sampling=replace(self.context.sampling, temperature=0.0))
        await rollout_groups(alone, greedy, on_finished=score, slots=self._slots)

    def _scoring(
        self, scorings: dict[str, GroupScoring], on_finished: Callable[[int], None] = lambda tokens: None
    ) -> Callable[[Trajectory], Awaitable[None]]:
        """What is awaited with each trajectory that has ended. `scorings` are by the id of the group."""

        async def finished(trajectory: Trajectory) -> None:
            await scorings[trajectory.group].finished(trajectory)
            on_finished(trajectory.sampled_tokens)

        return finished

    def _timed_runner(self, groups: dict[str, ActiveGroup], context: ConversationContext) -> Runner:
        """A runner that notes when a group starts, and ends its conversations after `group_timeout`."""
        run, timeout = runner_of(replace(context, make_runner=self.context.make_runner)), self.options.group_timeout

        async def run_timed(trajectory: Trajectory) -> Trajectory:
            active = groups[trajectory.group]
            if active.started is None:
                active.version, active.started = self.version, time.time()
                active.deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
            limit = asyncio.timeout_at(active.deadline)
            try:
                async with limit:
                    if timeout is not None:  # a conversation that waited too long for its start is cancelled here
                        await asyncio.sleep(0)
                    await run(trajectory)
            except TimeoutError:
                if not limit.expired():
                    raise
                if trajectory.stop is None:  # else only the closing of its environment took too long
                    active.timed_out = True
                    trajectory.fail(
                        Failure(
                            "deadline",
                            f"the conversation had not ended train.group_timeout={timeout:g} seconds after the first "
                            f"conversation of its group started",
                        )
                    )
            return trajectory

        return run_timed


def greedy_group(group: Group) -> Group:
    """A group of one empty trajectory, for the conversation at temperature 0 on the same row."""
    name = f"{group.id}:greedy"
    return Group(id=name, row=group.row, trajectories=[Trajectory(id=f"{name}/0", group=name, row=group.row)])
