"""Scores trajectories: the rewards that the environment gave to turns, and the recipe's reward functions.

A function that raises, that does not return a finite number, or that takes too long fails the trajectories that it was called
for and no others: a failure is not a reward of zero, and is not part of the statistics of the group. Functions are not called
for trajectories that have failed before.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.errors import Failed, boundary
from turnwise.rewards.functions import (
    BatchReward,
    GroupReward,
    Scored,
    TrajectoryReward,
    TurnReward,
    finite_number,
    list_item,
    one_per_trajectory,
)
from turnwise.types import Failure, Group, Row, Trajectory
from turnwise.user_code.calls import (
    Interrupted,
    call,
    call_blocking,
    call_within,
    conversation,
    conversations_of_step,
    deadline,
    scored_together,
)
from turnwise.user_code.copies import ConversationCopies

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scorer:
    """Sets `Trajectory.reward` and `Trajectory.rewards`, and adds the numbers of turn functions to the rewards of turns."""

    trajectory: Sequence[TrajectoryReward] = ()
    turns: Sequence[TurnReward] = ()
    groups: Sequence[GroupReward] = ()
    batch: Sequence[BatchReward] = ()
    timeout: float | None = 120.0
    """Time limit in seconds. For async functions: of all functions of one trajectory together, and of each call of a group or
    batch function. For sync functions: of each call; it is interrupted by SIGALRM, in the main thread. None: no limit."""

    @property
    def functions(self) -> tuple[TrajectoryReward | TurnReward | GroupReward | BatchReward, ...]:
        """All functions."""
        return (*self.trajectory, *self.turns, *self.groups, *self.batch)

    @property
    def measured(self) -> frozenset[str]:
        """The names of the functions of weight 0, whose values are no part of the reward."""
        return frozenset(function.name for function in self.functions if function.weight == 0.0)

    def refuse_unknown_columns(self, rows: Iterable[Row]) -> None:
        """Refuse functions with a parameter that is neither a value of the conversation nor a column of `rows`.

        Raises ConfigError.
        """
        self.refuse_other_columns({name for row in rows for name in row.fields})

    def refuse_other_columns(self, columns: Collection[str]) -> None:
        """The same for the names of all columns. Raises ConfigError."""
        for reward in self.functions:
            reward.plan.refuse_unknown(columns, name=reward.source)
            for name, key in reward.plan.by_name:
                if name in columns and name == key:
                    _log.warning(
                        "the parameter %r of %s is a value of the conversation, and the data has a column of the same name. "
                        "For the column, use row[%r], or give it another name in data.columns",
                        name,
                        reward.source,
                        name,
                    )

    async def score(self, groups: Sequence[Group]) -> None:
        """Score all trajectories that did not fail and are not scored yet, as one batch."""
        score = self.scoring_callback(groups)
        await _run_all([score(trajectory) for group in groups for trajectory in group.trajectories])

    def scoring_callback(
        self, groups: Sequence[Group]
    ) -> Callable[[Trajectory], Coroutine[Any, Any, Sequence[Trajectory]]]:
        """A function to be awaited with each trajectory of `groups` when its conversation has ended.

        It calls the functions that can be called at that time: those of the trajectory at once, those of a group when its last
        conversation has ended, and those of the batch when all conversations of `groups` have ended. It returns the
        trajectories that are completely scored by then; their environments are closed. Call this function in the task that
        starts the conversations.
        """
        self.share_scope()
        scorings = {id(group): GroupScoring(self, group) for group in groups}
        of_trajectory = {id(trajectory): scorings[id(group)] for group in groups for trajectory in group.trajectories}

        async def finished(trajectory: Trajectory) -> Sequence[Trajectory]:
            scoring = of_trajectory[id(trajectory)]
            written = await scoring.finished(trajectory)
            if not self.batch or scoring.unfinished or any(other.unfinished for other in scorings.values()):
                return written
            return await self.score_batch([*scorings.values()])

        return finished

    def share_scope(self, *, step: int = 0) -> None:
        """Set which conversations are scored together (`scored_together`), in the task that starts the conversations. `step` is
        the number of conversations of a step, if conversations of later steps run at the same time."""
        scored_together.set("batch" if self.batch else "group")
        conversations_of_step.set(step)

    async def score_batch(self, scorings: Sequence[GroupScoring]) -> Sequence[Trajectory]:
        """Call the functions of the batch for groups whose conversations have all ended. Returns all their trajectories."""
        for reward in self.batch:
            if pending := [score for scoring in scorings for score in scoring.not_failed()]:
                await _score_together(self, reward, pending, of="the batch", isolate=True)
        return [trajectory for scoring in scorings for trajectory in scoring.write(scoring.group.trajectories)]


class GroupScoring:
    """The scoring of one group: how many of its conversations run, and the rewards of the others so far."""

    def __init__(self, scorer: Scorer, group: Group) -> None:
        self.group = group
        self.unfinished = len(group.trajectories)
        """How many conversations run or are not scored yet, apart from the functions of the batch."""
        self._scorer = scorer
        self._pending: dict[int, _PendingScore] = {}
        """By the id of the trajectory: those that did not fail and are not written yet."""
        self._by_group = bool(scorer.groups) or any(
            reward.plan.needs_group for reward in (*scorer.trajectory, *scorer.turns)
        )

    async def finished(self, trajectory: Trajectory) -> Sequence[Trajectory]:
        """A conversation has ended: call the functions that can be called now.

        Returns the trajectories that are completely scored; none if there are functions of the batch (`Scorer.score_batch`).
        """
        scorer, group = self._scorer, self.group
        if not trajectory.failed and trajectory.reward is None and trajectory.turns:
            pending = self._pending[id(trajectory)] = _PendingScore(Scored(trajectory, group))
            await _score_alone(scorer, pending, with_group=False)
        if self._by_group and self.unfinished == 1:
            await self._score_group()
        self.unfinished -= 1
        if scorer.batch or (self._by_group and self.unfinished):
            return ()
        return self.write(group.trajectories if self._by_group else [trajectory])

    def not_failed(self) -> list[_PendingScore]:
        """The scores of the trajectories that did not fail and are not written."""
        scores = [self._pending.get(id(trajectory)) for trajectory in self.group.trajectories]
        return [score for score in scores if score is not None and not score.trajectory.failed]

    async def _score_group(self) -> None:
        scorer = self._scorer
        await _run_all([_score_alone(scorer, pending, with_group=True) for pending in self.not_failed()])
        if pending := self.not_failed():
            await _run_all(
                [_score_together(scorer, reward, pending, of="a group", isolate=False) for reward in scorer.groups]
            )

    def write(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """Write the rewards into trajectories that are completely scored, and close their environments."""
        for trajectory in trajectories:
            if (pending := self._pending.pop(id(trajectory), None)) is not None:
                pending.write(may_have_none=bool(self._scorer.functions))
            for agent in trajectory.agents:
                _write_agent(agent, trajectory)
            handle, trajectory.environment = trajectory.environment, None
            if handle is not None:
                handle.release()
        return trajectories


@dataclass(slots=True)
class _PendingScore:
    """The rewards of a trajectory so far. They are written into the trajectory when all functions have returned."""

    scored: Scored
    parts: dict[str, float] = field(default_factory=dict)
    """The parts of the trajectory's reward, by the name of the function."""
    of_turns: list[tuple[str, list[float]]] = field(default_factory=list)
    """The name of each turn function, and its reward for each turn."""

    in_turns: float = 0.0
    """The part of `parts["turns"]` that is the sum of the turns' rewards."""

    @property
    def trajectory(self) -> Trajectory:
        return self.scored.trajectory

    def add_of_turns(self) -> None:
        """Add what the turns' rewards have grown by since the last call. Raises Failed."""
        now = sum(finite_number("the environment", turn.reward) for turn in self.trajectory.turns)
        self.add("turns", now - self.in_turns)
        self.in_turns = now

    def add(self, name: str, value: float) -> None:
        self.parts[name] = self.parts.get(name, 0.0) + value

    def write(self, *, may_have_none: bool) -> None:
        """`may_have_none`: a trajectory to which no source gave a number has no reward, which is not the reward 0. Else the
        environment is the only source, and the reward is the sum of what it gave: many give a number for success only, and a
        conversation that ends at a limit gets none."""
        if self.trajectory.failed:
            return
        given = self.parts.keys() > {"turns"} or any(turn.rewards for turn in self.trajectory.turns)
        if may_have_none and not given:
            return
        try:
            self.add_of_turns()  # again: a reward function may have called `Turn.add_reward`
            total = finite_number("all reward functions together", sum(self.parts.values()))
        except Failed as failed:
            self.trajectory.fail(failed.failure)
            return
        for name, values in self.of_turns:
            for turn, value in zip(self.trajectory.turns, values, strict=True):
                if value:  # that the function gave the number 0 is in `parts`
                    turn.add_reward(value, name)
        self.trajectory.rewards = self.parts
        self.trajectory.reward = total


def _write_agent(agent: Trajectory, opened_by: Trajectory) -> None:
    """Write the reward of an agent's conversation: what the environment gave to its turns, and if it shares in it, the reward of
    the conversation whose environment opened it. Without that reward, it has none.

    The functions of a recipe are written for the conversation of a row. They see the others in `Trajectory.agents`.
    """
    shared = opened_by.reward if agent.shares_reward else 0.0
    given = any(turn.rewards for turn in agent.turns)
    if (
        agent.failed
        or agent.reward is not None
        or shared is None
        or not (agent.trained or given or agent.shares_reward)
    ):
        return
    try:
        of_turns = sum(finite_number("the environment", turn.reward) for turn in agent.turns)
        total = finite_number("the environment", of_turns + shared)
    except Failed as failed:
        agent.fail(failed.failure)
        return
    agent.rewards = {"turns": of_turns, **({"episode": shared} if agent.shares_reward else {})}
    agent.reward = total


async def _score_alone(scorer: Scorer, pending: _PendingScore, *, with_group: bool) -> None:
    """Call the functions of a trajectory and of its turns: those that need the group, or those that do not."""
    trajectory, source = pending.trajectory, "the reward functions"
    with conversation(trajectory.id):
        try:
            async with deadline(scorer.timeout):
                if not with_group:
                    pending.add_of_turns()
                for reward in scorer.turns:
                    if reward.plan.needs_group == with_group:
                        await _score_turns(scorer, reward, pending)
                for reward in scorer.trajectory:
                    if reward.plan.needs_group == with_group:
                        value = await _single(scorer, reward, pending.scored, ConversationCopies())
                        if value is not None:
                            pending.add(reward.name, reward.weight * value)
        except Failed as failed:
            trajectory.fail(failed.failure)
        except TimeoutError:
            trajectory.fail(_too_slow(source, scorer))


async def _score_turns(scorer: Scorer, reward: TurnReward, pending: _PendingScore) -> None:
    """Call a function for each turn. A turn to which it does not apply gets nothing. No entry if it applies to no turn."""
    copies = ConversationCopies()  # one for all turns: a copy for each would take time that grows with the square
    values = [
        await _single(scorer, reward, replace(pending.scored, turn=turn), copies)
        for turn in pending.scored.trajectory.turns
    ]
    weighted = [0.0 if value is None else reward.weight * value for value in values]
    if not values or any(value is not None for value in values):
        pending.add(reward.name, sum(weighted))
    pending.of_turns.append((reward.name, weighted))


async def _score_together(
    scorer: Scorer, reward: GroupReward | BatchReward, pending: Sequence[_PendingScore], *, of: str, isolate: bool
) -> None:
    """Call a function of several trajectories. A wrong item of its list fails its own trajectory.

    If the function raises, all the trajectories fail. With `isolate`, it is then called for each trajectory alone; those for
    which it raises again fail, and it is called a second time for the others together.
    """
    copies = ConversationCopies()
    try:
        values = await _several(scorer, reward, pending, of, copies)
    except Failed as failed:
        broken = [score for score in pending if isolate and await _raises_alone(scorer, reward, score, of)]
        others = [score for score in pending if not score.trajectory.failed]
        if broken and others:
            return await _score_together(scorer, reward, others, of=of, isolate=False)
        for score in pending:
            score.trajectory.fail(failed.failure)
        return
    except TimeoutError:
        for score in pending:
            score.trajectory.fail(_too_slow(reward.source, scorer))
        return
    for score, value in zip(pending, values, strict=True):
        try:
            with boundary("reward", where=reward.source):
                copies.accept(score.trajectory)
            if (number := list_item(reward.source, value)) is not None:
                score.add(reward.name, reward.weight * number)
        except Failed as failed:
            score.trajectory.fail(failed.failure)


async def _raises_alone(scorer: Scorer, reward: GroupReward | BatchReward, pending: _PendingScore, of: str) -> bool:
    """Whether a function raises for a trajectory alone; if so, the trajectory fails."""
    try:
        await _several(scorer, reward, [pending], of, ConversationCopies())
    except Failed as failed:
        pending.trajectory.fail(failed.failure)
        return True
    except TimeoutError:
        pending.trajectory.fail(_too_slow(reward.source, scorer))
        return True
    return False


async def _several(
    scorer: Scorer,
    reward: GroupReward | BatchReward,
    pending: Sequence[_PendingScore],
    of: str,
    copies: ConversationCopies,
) -> list[Any]:
    """The items that a function of several trajectories returns. Raises Failed or TimeoutError."""
    with conversation(reward.source):
        async with deadline(scorer.timeout):
            with boundary("reward", where=reward.source):
                positional, named = reward.plan.list_arguments([score.scored for score in pending], copies)
            returned = await _call(scorer, reward.source, lambda: reward.function(*positional, **named))
    return one_per_trajectory(reward.source, returned, len(pending), of)


async def _single(
    scorer: Scorer, reward: TrajectoryReward | TurnReward, scored: Scored, copies: ConversationCopies
) -> float | None:
    """The number of a function of a trajectory or a turn. None: the function does not apply. Raises Failed."""
    plan, source = reward.plan, reward.source

    def call_function() -> Any:
        positional, named = plan.arguments(scored, copies)
        return reward.function(*positional, **named)

    value = await _call(scorer, source, call_function)
    with boundary("reward", where=source):
        copies.accept(scored.trajectory)
    if plan.form == "turns" and isinstance(value, list | tuple):
        raise Failed(
            Failure(
                "reward",
                f"{source} gave {len(value)} numbers for one turn; a function in reward.turns is called for each turn. For a "
                f"function that returns the numbers of all turns, name turnwise.compat.trajectory_dict:DictTurnReward, with the "
                f"function as its argument `function`",
            )
        )
    return None if value is None and plan.may_return_none else finite_number(source, value)


async def _call(scorer: Scorer, source: str, function: Callable[[], Any]) -> Any:
    """Call a reward function of any kind. Raises Failed.

    A sync function runs in the event loop's thread, which is the main thread: it may set alarms, and it blocks all other work.
    """
    try:
        with boundary("reward", where=source):
            value = call_blocking(lambda: call_within(scorer.timeout, function), kind="reward", name=source)
            return await call(lambda: value, kind="reward", name=source) if inspect.isawaitable(value) else value
    except Failed as failed:
        if isinstance(failed.__cause__, Interrupted):
            message = f"{_too_slow(source, scorer).message} and was interrupted: make it faster, or raise the limit"
            raise Failed(replace(failed.failure, message=message)) from failed
        raise


def _too_slow(source: str, scorer: Scorer) -> Failure:
    return Failure("reward", f"{source} took longer than reward.timeout={scorer.timeout:g}")


async def _run_all(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> None:
    if len(coroutines) == 1:  # without a task: if no function awaits, the trajectory is scored before other tasks run
        await coroutines[0]
    else:
        await asyncio.gather(*coroutines)
