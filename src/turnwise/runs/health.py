"""Monitors that warn of a training run that goes wrong, or stop it, and warnings that a run cannot learn.

A monitor of the section `health` compares a metric of the latest steps, and of the first steps of the run, with its limit.
`config` refuses recipes that cannot learn; `LearningWatch` finds the problems that only appear during the run, from the
metrics and the trajectories of each step. It warns once for each problem, with the likely cause and the fix, and hands on the
warnings of the monitors. Neither changes what is trained.
"""

from __future__ import annotations

import math
import os
import re
import statistics
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from turnwise.options.schema import Config
from turnwise.options.section import Use, changed_options
from turnwise.record.failures import ToolCallCounts
from turnwise.record.metrics import (
    CUT,
    UNNAMED_PART,
    advice_on_cut,
    cut_answers,
    cut_stops,
    lowest_correlation,
    reward_parts,
)
from turnwise.rewards.turn_weights import was_cut
from turnwise.rollout.pipeline import has_reward_differences
from turnwise.types import Failure, Group, Trajectory
from turnwise.user_code.reward_number import equal_rewards

# monitors

_LEAST_CALLS = 0.1
"""Tool calls of a conversation in the first steps, below which their number cannot collapse."""

_MANY_FAILED = 0.25
"""Share of failed conversations, from which they are the first cause of equal rewards."""

_NEARLY_ALL = 0.9
"""Share of failed tool calls, from which they may be why all rewards are equal, or from which a tool may not work at all."""

_STEPS_OF_CALLS, _LEAST_TRIED = 3, 10
"""Steps in a row in which nearly all calls of a tool fail, and its calls in them, from which it is told."""

_MANY_CALLS = 0.05
"""Share of turns with a tool call that nobody offered, above which it is no slip."""

_LOOKED_AT = 256
"""About so many turns of a step are looked at for such calls, because to look at a long one takes a millisecond."""

_ERROR = re.compile(r"\b\w*(?:Error|Exception|Iteration)\b")
_FRAME = re.compile(r'^ *File "(.+)", line (\d+)', re.MULTILINE)

_OF_REWARDS = ("zero_std", "reward_correlation")
"""Monitors of what is learnt from rewards, which is nothing with `credit: none`."""

Line = Mapping[str, Any]
"""The metrics of a step: a line of metrics.jsonl."""


@dataclass(frozen=True, slots=True)
class RunProblem:
    """A problem of a run."""

    name: str
    """The monitor, by its name in the section `health`, or another name for problems that have no option."""
    text: str
    policy: str = ""
    """The further trained policy that has the problem; empty for the model of the section `model`, and for the run."""


@dataclass(frozen=True, slots=True)
class _Limit:
    """A monitor that compares the mean of a metric over the window with its limit."""

    name: str
    metric: str
    meaning: str
    advice: str
    lowest: bool = False
    """Whether the limit is the smallest value that is accepted, instead of the largest."""
    counts_early: bool = False
    """Whether the last step of a run that is shorter than the window is enough."""


_STEPS_OF_EQUAL = 3
"""Steps in a row in which all rewards are equal, from which a model that had higher ones has lost them."""

_SURE = 4.0
"""Standard errors of the difference of two windows, from which it is no chance. The best of many windows is lucky: 3 are not
enough."""


@dataclass(frozen=True, slots=True)
class _Rewards:
    """The rewards of the steps of a window."""

    mean: float
    deviation: float
    """Standard deviation of the rewards within a step, mean of the steps."""
    error: float
    """Standard error of the mean, from the differences between the steps."""
    first: int
    last: int


_FEW_CUT = 0.2
"""At most this share of the conversations of the first step were cut if the model could end its turns."""
_LIMITS = (
    _Limit(
        "zero_std",
        "groups/zero_std",
        "the share of groups without reward differences",
        "These groups teach nothing. Choose rows that the model solves sometimes (data.curriculum, train.dynamic_sampling), or "
        "raise train.group_size. Compare the conversations of one row",
    ),
    _Limit(
        "duplicates",
        "groups/duplicates",
        "the share of conversations with the same answers as another conversation of the group",
        "The model no longer explores: raise sampling.temperature or loss.entropy_coef, or lower train.lr. Look at `entropy`",
    ),
    _Limit(
        "ratio",
        "ratio/max_deviation",
        "the largest difference from 1 of the probability ratio of trainer to engine",
        "The weights or the precision of the engine differ from the trainer's: lower train.max_staleness, compare the dtypes, or "
        "set correction.action",
    ),
    _Limit(
        "mismatch",
        "correction/k3",
        "the KL divergence of the trainer's policy from the engine's",
        "The engine samples from another distribution than the trainer computes: lower train.max_staleness, or compare the "
        "dtypes of engine and trainer. Look at correction/k3/turn_<n> for the turn where it begins",
    ),
    _Limit(
        "kl",
        "kl",
        "the KL divergence of the policy",
        "The policy moves away fast: lower train.lr, or raise loss.kl_coef. Look for answers that are no longer language",
    ),
    _Limit(
        "reward_correlation",
        "reward/correlation",
        "the lowest correlation of two parts of the reward",
        "A conversation that gets more of one part gets less of the other: compare their weights",
        lowest=True,
    ),
    _Limit(
        "failed",
        "failed",
        "the share of conversations that failed",
        "They are not trained on, so the model learns from the others only. `turnwise show {run} --failed` prints their errors",
        counts_early=True,
    ),
    _Limit(
        "slow_rank",
        "ranks/slowest",
        "the time that the layers of the slowest rank compute, as a multiple of the median rank's,",
        "All ranks wait for it: look for other processes on its machine, a GPU that is hot or has a slow link, or CPUs that are "
        "shared (OMP_NUM_THREADS)",
    ),
)


@dataclass(slots=True)
class HealthMonitors:
    """The monitors of one run. Give it each finished step, also those before the run was resumed (`past`)."""

    config: Config
    past: Iterable[Line] = ()
    _first: list[Line] = field(default_factory=list)
    _latest: deque[Line] = field(init=False)
    """The last steps, at most `health.window`."""
    _now: _Rewards | None = None
    """The rewards of the last steps."""
    _best: _Rewards | None = None
    """The window with the highest rewards so far."""
    _deviation: float = 0.0
    """The largest deviation of rewards of a window so far: solved and failed tasks have none, and are not noise."""
    _highest: Line | None = None
    """The step with the highest mean reward so far."""
    _rewarded: deque[Line] = field(default_factory=lambda: deque(maxlen=_STEPS_OF_EQUAL))
    """The last steps with rewards."""

    def __post_init__(self) -> None:
        self._latest = deque(maxlen=self.config.health.window)
        for line in self.past:
            self._add(line)

    def findings(self, line: Line, groups: Sequence[Group], slowest: str = "") -> list[RunProblem]:
        """What is wrong after a step, warned of before or not. `groups` are those of the step, `slowest` is the machine of the
        slowest rank."""
        self._add(line)
        if len(self._latest) < self.config.health.window:
            found = [self._reward_drop()]
            if line["step"] == self.config.train.total_steps:
                found += [self._compare(limit, groups, slowest) for limit in _LIMITS if limit.counts_early]
                found += [self._cut()]
            return [finding for finding in found if finding is not None]
        found = [self._compare(limit, groups, slowest) for limit in _LIMITS]
        found += [
            self._cut(),
            self._tool_use(),
            self._entropy(),
            self._length(),
            self._reward_drop(),
            self._teacher_gap(),
            self._teacher_growth(),
        ]
        return [finding for finding in found if finding is not None]

    def _add(self, line: Line) -> None:
        if len(self._first) < self.config.health.window:
            self._first.append(line)
        self._latest.append(line)
        if line.get("reward/mean") is not None:
            self._rewarded.append(line)
            if self._highest is None or line["reward/mean"] >= self._highest["reward/mean"]:
                self._highest = line
        self._now = now = self._rewards()
        if now is not None:
            self._deviation = max(self._deviation, now.deviation)
            self._best = now if self._best is None or now.mean >= self._best.mean else self._best

    def _compare(self, limit: _Limit, groups: Sequence[Group], slowest: str) -> RunProblem | None:
        bound = getattr(self.config.health, limit.name)
        if bound is None or (limit.name == "zero_std" and self.config.train.group_size == 1):
            return None
        if limit.name in _OF_REWARDS and self.config.credit.name == "none":
            return None
        value = _mean(self._latest, lambda line: line.get(limit.metric))
        if value is None or (value >= bound if limit.lowest else value <= bound):
            return None
        advice = limit.advice
        if limit.name == "reward_correlation":
            finished = [t for group in groups for t in group.trajectories if not t.failed]
            if (lowest := lowest_correlation(finished)) is not None:
                advice = f"In this step, these are {lowest[1]} and {lowest[2]}. {advice}"
        if limit.name == "slow_rank":
            advice = (
                f"In this step, it is trainer rank {self._latest[-1].get('ranks/slowest_rank')} on {slowest}. {advice}"
            )
        return self._finding(limit.name, limit.metric, f"{limit.meaning} is {value:.3g}", bound, advice)

    def _cut(self) -> RunProblem | None:
        """Many answers are cut by a limit. Without this warning, an environment seems to be silent: it is not shown them."""
        bound = self.config.health.cut
        shares = {
            stop: _mean(self._latest, lambda line, stop=stop: line.get(f"stop/{stop}", 0.0)) or 0.0 for stop in CUT
        }
        value, most = sum(shares.values()), max(CUT, key=lambda stop: shares[stop])
        if bound is None or value <= bound:
            return None
        limit = f"limits.{CUT[most]}={getattr(self.config.limits, CUT[most])}"
        return self._finding(
            "cut",
            f"stop/{most}",
            f"the share of conversations that ended in the middle of an answer is {value:.3g}, most of them cut by {limit}",
            bound,
            advice_on_cut(most) + self.broken_since_the_start(),
        )

    def broken_since_the_start(self) -> str:
        """What many cut answers mean in addition if the first step had few: the model could end its turns. Empty if it had
        many, or is the only step."""
        first = self._first[0] if self._first else {}
        share = sum(first.get(f"stop/{stop}") or 0.0 for stop in CUT)
        if not first or share > _FEW_CUT:
            return ""
        return (
            f". In step {first['step']}, only {share:.2g} of the conversations were cut: if the answers are no language any "
            f"more, the updates have broken the model (train again from the start with a lower train.lr; it is "
            f"{self.config.train.lr:g})"
        )

    def _tool_use(self) -> RunProblem | None:
        bound = self.config.health.tool_use
        first, latest = self._first_and_latest(lambda line: line.get("tool_calls/mean"))
        if bound is None or first is None or latest is None or first < _LEAST_CALLS or latest >= bound * first:
            return None
        return self._finding(
            "tool_use",
            "tool_calls/mean",
            f"a conversation has {latest:.3g} tool calls, and had {first:.3g} in the first {self.config.health.window} steps",
            bound,
            "The model stops using its tools: look whether calls fail (tool_errors/mean), or whether answers without calls get "
            "a higher reward",
        )

    def _entropy(self) -> RunProblem | None:
        bound = self.config.health.entropy
        first, latest = self._first_and_latest(lambda line: line.get("entropy"))
        if bound is None or not first or latest is None or latest >= bound * first:
            return None
        return self._finding(
            "entropy",
            "entropy",
            f"the entropy of the policy is {latest:.3g} nats, and was {first:.3g} in the first {self.config.health.window} steps",
            bound,
            "The policy has collapsed: it gives nearly the same answers again and again, and can no longer find better ones. "
            "Compare the conversations of one row (groups/duplicates). Train again from an earlier checkpoint with a lower "
            "train.lr, or with loss.entropy_coef or loss.kl_coef",
        )

    def _length(self) -> RunProblem | None:
        bound = self.config.health.length
        first, latest = self._first_and_latest(self._tokens)
        if bound is None or not first or latest is None or latest <= bound * first:
            return None
        return self._finding(
            "length",
            "tokens/sampled",
            f"a conversation has {latest:.4g} sampled tokens, and had {first:.4g} in the first {self.config.health.window} steps",
            bound,
            "Look whether the answers repeat themselves, and whether they are cut (stop/length). A reward such as soft_overlong, "
            "or loss.normalizer=constant, works against long answers",
        )

    def _reward_drop(self) -> RunProblem | None:
        bound, best, latest = self.config.health.reward_drop, self._best, self._now
        if bound is None or self.config.credit.name == "none" or changed_options(self.config.data.curriculum):
            return None  # rows that a curriculum chooses become harder
        advice = (
            f"The model forgets what it could: look whether its answers are still language, then train again from an earlier "
            f"checkpoint with a lower train.lr (it is {self.config.train.lr:g}) or with loss.kl_coef. checkpoint.best keeps the "
            f"best checkpoint"
        )
        if (lost := self._lost(bound)) is not None:
            step = self._rewarded[-1]["step"]
            look = f"`turnwise show {self.config.output} --step {step}`"
            return RunProblem("reward_drop", f"{lost} (health.reward_drop={bound:g}). {advice}. Look at {look}")
        if best is None or latest is None:
            return None
        drop, error = best.mean - latest.mean, math.hypot(best.error, latest.error)
        if drop <= bound * self._deviation or drop <= _SURE * error:
            return None
        return self._finding(
            "reward_drop",
            "reward/mean",
            f"the mean reward is {latest.mean:.3g}, and was {best.mean:.3g} in steps {best.first} to {best.last}: a fall by "
            f"{drop / self._deviation:.3g} standard deviations of the rewards of a step",
            bound,
            advice,
        )

    def _lost(self, bound: float) -> str | None:
        """That all conversations of some steps have the same reward, and one step before had higher ones. It needs no window:
        a model that an update has broken is so from one step to the next."""
        last, highest = list(self._rewarded), self._highest
        if highest is None or len(last) < _STEPS_OF_EQUAL or any(line.get("reward/std") != 0.0 for line in last):
            return None
        reward, before = last[-1]["reward/mean"], highest["reward/mean"]
        if (
            not equal_rewards([line["reward/mean"] for line in last])
            or before - reward <= bound * highest["reward/std"]
        ):
            return None
        return (
            f"every reward of steps {last[0]['step']} to {last[-1]['step']} is {reward:.3g}, and their mean was {before:.3g} in "
            f"step {highest['step']}"
        )

    def _rewards(self) -> _Rewards | None:
        """Those of the latest steps; None before there are `health.window` steps with rewards."""
        means = [mean for line in self._latest if (mean := line.get("reward/mean")) is not None]
        deviation = _mean(self._latest, lambda line: line.get("reward/std"))
        if len(means) < self.config.health.window or deviation is None:
            return None
        error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0
        first, last = self._latest[0]["step"], self._latest[-1]["step"]
        return _Rewards(statistics.fmean(means), deviation, error, first, last)

    def _teacher_gap(self) -> RunProblem | None:
        """In the first steps only: later, student and teacher should agree."""
        bound = self.config.health.teacher_gap
        value = _mean(self._latest, lambda line: line.get("teacher/divergence"))
        if bound is None or value is None or abs(value) >= bound or self._latest[-1]["step"] > self._first[-1]["step"]:
            return None
        return self._finding(
            "teacher_gap",
            "teacher/divergence",
            f"the student's log-probability of a token differs from the teacher's by {value:.3g} nats",
            bound,
            "Student and teacher agree from the start, so there is nothing to learn from this teacher: look whether teacher.path "
            "or teacher.url is the model that you mean, or whether teacher.context shows it more than the student reads",
        )

    def _teacher_growth(self) -> RunProblem | None:
        bound = self.config.health.teacher_growth
        first, latest = self._first_and_latest(lambda line: line.get("teacher/divergence"))
        if bound is None or first is None or latest is None or first <= 0 or latest <= bound * first:
            return None
        return self._finding(
            "teacher_growth",
            "teacher/divergence",
            f"the divergence from the teacher is {latest:.3g} nats per token, and was {first:.3g} in the first "
            f"{self.config.health.window} steps",
            bound,
            "The student moves away from its teacher: lower train.lr, or raise teacher.coef if rewards pull elsewhere",
        )

    def _tokens(self, line: Line) -> float | None:
        """Sampled tokens of a conversation."""
        train = self.config.train
        tokens = line.get("tokens/sampled")
        return (
            None
            if tokens is None
            else tokens / ((train.batch_size + line.get("groups/replaced", 0)) * train.group_size)
        )

    def _first_and_latest(self, value: Callable[[Line], float | None]) -> tuple[float | None, float | None]:
        """The means of the first and of the latest steps; None until these are different steps."""
        if self._latest[0]["step"] <= self._first[-1]["step"]:
            return None, None
        return _mean(self._first, value), _mean(self._latest, value)

    def _finding(self, name: str, metric: str, problem: str, bound: float, advice: str) -> RunProblem:
        run, first, last = self.config.output, self._latest[0]["step"], self._latest[-1]["step"]
        advice = advice.replace("{run}", run)
        return RunProblem(
            name,
            f"{problem} (mean of steps {first} to {last}; the limit is health.{name}={bound:g}). {advice}. Look at "
            f"`turnwise show {run} --metric {metric}` and `turnwise show {run} --step {last}`, or `turnwise view {run}`",
        )


def _mean(lines: Iterable[Line], value: Callable[[Line], float | None]) -> float | None:
    """The mean over the steps in which the metric is known."""
    values = [number for line in lines if (number := value(line)) is not None]
    return statistics.fmean(values) if values else None


# signs that a run cannot learn


class WritesCall(Protocol):
    """See `LearningWatch.writes_call`."""

    def __call__(self, text: str, /, *, reasoning_opening: str) -> bool: ...


_STEPS_OF_USE = 3
"""Steps in which a trained policy that the environment uses takes a turn, however seldom it chooses it."""


@dataclass(slots=True)
class LearningWatch:
    """Checks each finished step of one run."""

    config: Config
    past: Iterable[Mapping[str, Any]] = ()
    """The metrics of the steps before the run was resumed."""
    writes_call: WritesCall | None = None
    """Whether a turn's text has a call in the model's format (`TurnParser.writes_call`); None for a model without text."""
    measured: Collection[str] = ()
    """The names of the reward functions of weight 0 (`Scorer.measured`), which are measured only."""
    _monitors: HealthMonitors = field(init=False)
    _reported: set[tuple[str, str]] = field(default_factory=set)
    """Names of problems, and of the policies that have them."""
    _played: set[str] = field(default_factory=set)
    """The trained policies whose agents had a conversation to train on, in the steps that this process has seen."""
    _compared: set[str] = field(default_factory=set)
    """Those of them that had an advantage other than 0."""
    _seen: int = 0
    """Number of steps that this process has seen."""
    _equal: int = 0
    """Number of steps so far in which the rewards within each group were equal."""
    _parts: dict[str, bool] = field(default_factory=dict)
    """The named parts of the rewards that this process has seen: whether one was other than 0."""
    _calls: dict[str, deque[ToolCallCounts]] = field(default_factory=dict)
    """The calls of each tool that there is, and of all (`_ALL_TOOLS`), in the last steps that had any."""

    def __post_init__(self) -> None:
        self._monitors = HealthMonitors(self.config, self.past)

    def problems(self, metrics: Mapping[str, Any], groups: Sequence[Group], slowest: str = "") -> list[RunProblem]:
        """Problems of the run after a step that were not reported before. `metrics` are the step's metrics, `slowest` is the
        machine of the slowest rank."""
        found = self._of_step(metrics, groups)
        told = {finding.name for finding in found}
        if "constant_reward" in told:
            told.add("failed")  # it names many failures, too
        monitored = self._monitors.findings(metrics, groups, slowest)
        found += [finding for finding in monitored if finding.name not in told]
        new = [finding for finding in found if (finding.name, finding.policy) not in self._reported]
        self._reported |= {(finding.name, finding.policy) for finding in new}
        return new

    def _of_step(self, metrics: Mapping[str, Any], groups: Sequence[Group]) -> list[RunProblem]:
        """Problems that keep the run from learning."""
        finished = [trajectory for group in groups for trajectory in group.trajectories if not trajectory.failed]
        agents = [agent for trajectory in finished for agent in trajectory.agents if agent.trained]
        self._seen += 1
        self._played |= {agent.policy for agent in agents}
        self._compared |= {one.policy for one in agents if any(one.has_advantage(turn.index) for turn in one.turns)}
        if not finished:
            return []
        cut = cut_answers(finished, self.config.limits, least=1.0)
        findings = {
            "cut": cut and cut + self._monitors.broken_since_the_start(),
            "constant_reward": self._without_difference(metrics, groups, finished),
            "unused_policy": self._unused_policy(metrics),
            "tool_calls": self._unread_calls([*finished, *agents]),
            "constant_reward_of_policy": self._policy_without_difference(metrics),
            "zero_part": self._parts_that_stay_zero(metrics, finished),
            "failed_calls": self._tools_that_fail(metrics, [*finished, *agents]),
        }
        of_run = [RunProblem(name, text) for name, text in findings.items() if text is not None]
        return [*of_run, *self._of_policies(metrics, groups)]

    def _of_policies(self, metrics: Mapping[str, Any], groups: Sequence[Group]) -> list[RunProblem]:
        """Problems of the gradient of each policy that is trained, from all conversations that it is trained on."""
        found: list[RunProblem] = []
        played = [each for group in groups for each in (group, *group.of_agents())]
        recipes = {"": self.config, **{one.name: self.config.of_policy(one) for one in self.config.trained_policies}}
        for policy, recipe in recipes.items():
            own = [group for group in played if group.policy == policy]
            finished = [one for group in own for one in group.trajectories if not one.failed]
            place = f"policies/{policy}/" if policy else ""
            measured = {name.removeprefix(place): metrics[name] for name in metrics if name.startswith(place)}
            who = f"the trained policy {policy!r}: " if policy else ""
            if (noisy := self._noisy_rewards(own, recipe)) is not None:
                found.append(RunProblem("noisy_reward", who + noisy, policy))
            elif finished and (without := self._without_gradient(measured, finished)) is not None:
                found.append(RunProblem("gradient", who + without, policy))
        return found

    def _unread_calls(self, trajectories: Sequence[Trajectory]) -> str | None:
        """The model writes tool calls in turns in which no tool is offered."""
        if self.writes_call is None or ("tool_calls", "") in self._reported:
            return None
        without = [turn for trajectory in trajectories for turn in trajectory.turns if not turn.tools]
        without = without[:: 1 + len(without) // _LOOKED_AT]
        calling = sum(self.writes_call(turn.text, reasoning_opening=turn.reasoning_opening) for turn in without)
        if calling <= _MANY_CALLS * len(without):
            return None
        return (
            f"{calling} of {len(without)} turns without tools contain a tool call, which stays text: name the tool in `tools`, "
            f"unless the environment reads calls itself"
        )

    def _unused_policy(self, metrics: Mapping[str, Any]) -> str | None:
        """A trained policy took no turn to train on in the first steps."""
        unused = [policy.name for policy in self.config.trained_policies if policy.name not in self._played]
        if not unused or self._seen < _STEPS_OF_USE:
            return None
        names = " and ".join(map(repr, unused))
        return (
            f"the trained policy {names} took no turn to train on in {self._seen} steps (up to step {metrics['step']}), so it is "
            f"not trained: let the environment open an agent with it (episode.agent(..., policy={unused[0]!r}), without "
            f"train=False), or remove it from `policies`"
        )

    def _policy_without_difference(self, metrics: Mapping[str, Any]) -> str | None:
        """In the first steps, no conversation of a trained policy had an advantage."""
        equal = [
            policy.name
            for policy in self.config.trained_policies
            if policy.name in self._played - self._compared and self.config.of_policy(policy).credit.name != "none"
        ]
        first_steps = self.config.health.constant_reward
        if not equal or first_steps is None or self._seen < min(first_steps, self.config.train.total_steps):
            return None
        names = " and ".join(map(repr, equal))
        return (
            f"in {self._seen} steps (up to step {metrics['step']}), all conversations of a group of the trained policy {names} "
            f"had the same reward, so all advantages are 0 and it does not learn from rewards. An agent's reward is what the "
            f"environment adds to it (agent.add_reward), or that of the row's conversation (episode.agent(..., "
            f"shares_reward=True)); reward functions score the row's conversation only"
        )

    def _parts_that_stay_zero(self, metrics: Mapping[str, Any], finished: Sequence[Trajectory]) -> str | None:
        """Since the start, a part of the reward was 0 in each conversation, and another one was not: all curves look healthy."""
        window, left_out = self.config.health.window, {UNNAMED_PART, *self.measured}
        if self._seen > window:
            return None
        for trajectory in finished:
            for name, value in reward_parts(trajectory).items():
                if name not in left_out:
                    self._parts[name] = self._parts.get(name, False) or not equal_rewards([value, 0.0])
        zero = [name for name, seen in self._parts.items() if not seen]
        if self._seen < window or len(zero) in (0, len(self._parts)):
            return None
        names, run = " and ".join(map(repr, zero)), self.config.output
        return (
            f"the part {names} of the reward was 0 in all conversations of {self._seen} steps (up to step {metrics['step']}), so "
            f"the model learns from the other parts only. Either nothing has earned it yet, or its source never gives it: call "
            f"it on an answer that should; after a change, `turnwise replay {run} --all` compares"
        )

    def _tools_that_fail(self, metrics: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> str | None:
        """Nearly all calls of a tool, or of all, failed in the last steps that had any: rewards may differ all the same."""
        if ("failed_calls", "") in self._reported:
            return None
        counted = _counted_calls(trajectories)
        broken: list[str] = []
        for name in (*counted.tools, _ALL_TOOLS):
            use = counted if name == _ALL_TOOLS else ToolCallCounts({name: counted.tools[name]})
            # of names that the model has invented, each may be another one
            if not use.calls or (name != _ALL_TOOLS and _invented(use)):
                continue
            steps = self._calls.setdefault(name, deque(maxlen=_STEPS_OF_CALLS))
            steps.append(use)
            tried, failed = sum(each.calls for each in steps), sum(each.failed for each in steps)
            if len(steps) < _STEPS_OF_CALLS or tried < _LEAST_TRIED or not all(map(_nearly_all_fail, steps)):
                continue
            if name != _ALL_TOOLS or not broken:
                of = "of tools" if name == _ALL_TOOLS else f"of the tool {name!r}"
                broken.append(f"{failed} of {tried} calls {of} failed (most in the last: {_most_frequent_call(use)})")
        if not broken:
            return None
        return (
            f"in the last {_STEPS_OF_CALLS} steps with calls (up to step {metrics['step']}), {' and '.join(broken)}. The "
            f"conversations go on, and are rewarded, without what the tool should give: try such a call on its own. `turnwise "
            f"show {self.config.output}` counts the errors of tools by message"
        )

    def _failed_calls(self, trajectories: Sequence[Trajectory]) -> str:
        """A sentence that nearly all calls of tools failed, and how; empty if it is not so."""
        use = _counted_calls(trajectories)
        if not _nearly_all_fail(use):
            return ""
        self._reported.add(("failed_calls", ""))
        return (
            f"{use.failed} of {use.calls} calls of tools failed in the last step (most frequent: {_most_frequent_call(use)}), "
            f"which may be why. "
        )

    def _without_difference(
        self, metrics: Mapping[str, Any], groups: Sequence[Group], trajectories: Sequence[Trajectory]
    ) -> str | None:
        """In the first steps, all conversations of a row had the same reward."""
        first_steps = self.config.health.constant_reward
        if first_steps is None or metrics["step"] > first_steps or self.config.credit.name == "none":
            return None
        alone = self.config.train.group_size == 1  # a group of one has no differences
        self._equal += metrics["reward/std"] == 0.0 if alone else metrics["groups/zero_std"] == 1.0
        if self._equal < min(first_steps, self.config.train.total_steps):
            return None
        run = self.config.output
        steps = "the first step" if self._equal == 1 else f"each of the first {self._equal} steps"
        if (failed := self._many_failed(groups)) is not None:
            return (
                f"{failed}. In {steps}, the conversations of a row that did not fail had the same "
                f"reward, so all advantages are 0 and the model does not learn from rewards. `turnwise show {run} --failed` "
                f"prints their errors"
            )
        return (
            f"in {steps}, all conversations of a row had the same reward, so all advantages are 0 and the model does not learn "
            f"from rewards. {self._cause(groups, trajectories)}. "
            f"{self._failed_calls(trajectories)}{self._cut(trajectories)}Look at `turnwise show "
            f"{run} --worst 3`; after a change of the rewards, `turnwise replay {run} --all` compares them "
            f"(docs/learning.md)"
        )

    def _many_failed(self, groups: Sequence[Group]) -> str | None:
        """That many conversations of the last step failed, and how."""
        errors = [one.error for group in groups for one in group.trajectories if one.error is not None]
        number = sum(len(group.trajectories) for group in groups)
        compared = any(len(_finished(group).trajectories) > 1 for group in groups)
        if not errors or (compared and len(errors) < _MANY_FAILED * number):
            return None
        alone = "" if compared else ", so no row had two rewards to compare"
        return f"{len(errors)} of {number} conversations of the last step failed ({_most_frequent(errors)}){alone}"

    def _cause(self, groups: Sequence[Group], finished: Sequence[Trajectory]) -> str:
        """Why the rewards of each row were equal in the last step."""
        sampling, environment = self.config.sampling, self.config.environment.use
        rewards = [trajectory.reward for trajectory in finished if trajectory.reward is not None]
        names = self._reward_functions()
        compared = [group for group in map(_finished, groups) if len(group.trajectories) > 1]
        if finished and not rewards:
            return (
                f"None of the {len(finished)} conversations of the last step has a reward: the reward functions "
                f"({', '.join(names)}) returned None for all of them, which means that they do not apply, and "
                f"environment={environment} gave none. Return a number"
            )
        if compared and all(_answers(group) == 1 for group in compared):
            return (
                f"All answers to a row are identical: raise sampling.temperature ({sampling.temperature:g}), or "
                f"loosen top_k, top_p and min_p"
            )
        if rewards and equal_rewards([*rewards, 0.0]) and not names:
            return self._only_zeros(finished)
        if rewards and equal_rewards(rewards):
            source = f"the reward functions ({', '.join(names)})" if names else environment
            return (
                f"Every reward of the last step was {rewards[0]:g}. Either the task is too hard or too easy for this model, "
                f"or the rewards are wrong: try {source} on an answer that should get another reward"
            )
        return (
            "The rewards differ between rows but not within a row: the rows are too easy or too hard for this model. Choose "
            "other rows (data.curriculum, train.dynamic_sampling), or raise train.group_size"
        )

    def _cut(self, finished: Sequence[Trajectory]) -> str:
        """A sentence that half of the conversations or more ended in the middle of an answer; empty if it is not so."""
        if not (stops := cut_stops(finished)):
            return ""
        limit = CUT[max(CUT, key=stops.count)]
        return (
            f"{len(stops)} of {len(finished)} conversations of the last step ended in the middle of an answer (limits.{limit}="
            f"{getattr(self.config.limits, limit)}), which may be why. "
        )

    def _only_zeros(self, finished: Sequence[Trajectory]) -> str:
        """Why all rewards are 0 where the environment is the only source: it gave 0, or it gave nothing."""
        environment, count = self.config.environment.use, len(finished)
        if any(turn.rewards for trajectory in finished for turn in trajectory.turns):
            return (
                f"All rewards are 0: environment={environment} gave no other number to the {count} conversations of the last "
                f"step. If it gives a reward for right answers, all answers were wrong: choose easier rows or another model"
            )
        return (
            f"All rewards are 0: the recipe has no reward function, and environment={environment} gave none of the {count} "
            f"conversations of the last step a reward, not even 0. If it gives one for right answers only, all answers were "
            f"wrong: choose easier rows or another model. If it gives none, return one (Reply.reward), or add a reward function "
            f"(reward.trajectory)"
        )

    def _noisy_rewards(self, groups: Sequence[Group], recipe: Config) -> str | None:
        """All answers to a row are identical, and their rewards differ: the gradients of a group cancel."""
        compared = [group for group in map(_finished, groups) if len(group.trajectories) > 1]
        noisy = [group for group in compared if has_reward_differences(group)]
        if not noisy or any(_answers(group) > 1 or _questions(group) > 1 for group in noisy):
            return None
        names = self._reward_functions()
        source = f"The reward functions ({', '.join(names)})" if names else f"environment={self.config.environment.use}"
        first = noisy[0]
        rewards = ", ".join(f"{t.reward:g}" for t in first.trajectories[:4] if t.reward is not None)
        return (
            f"in all {len(noisy)} groups with reward differences, the answers are identical and only their rewards differ (row "
            f"{first.row.id}: {rewards}), so the gradients of a group cancel and nothing is learnt. {source} must give identical "
            f"conversations the same reward (a judge: temperature 0), and the model must give different answers: raise "
            f"sampling.temperature ({recipe.sampling.temperature:g})"
        )

    def _reward_functions(self) -> list[str]:
        return [_function_of(use) for use in self.config.reward.functions]

    def _without_gradient(self, metrics: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> str | None:
        """The gradient is 0 although there are advantages. `metrics` are those of the policy, without its name."""
        trained = [trajectory for trajectory in trajectories if trajectory.advantages]
        turns = [(turn, trajectory.has_advantage(turn.index)) for trajectory in trained for turn in trajectory.turns]
        mask = f"loss_mask={self.config.loss_mask.use}"
        if turns and not any(turn.weight for turn, _ in turns):
            excluded = self._excluded(trained, f"{mask} gives all turns the weight 0")
            return f"{excluded}, so no turn is trained on: {self._include()}"
        if metrics.get("grad_norm") != 0.0 or not any(gain for _, gain in turns):
            return None
        if metrics.get("correction/rejected") == 1.0:
            return (
                "the gradient is 0: correction.rejection removed all tokens from the loss, because trainer and engine differ "
                "more than it allows. Look at correction/k3 and ratio/max_deviation; lower train.max_staleness, compare the "
                "dtypes, or widen the bounds"
            )
        if not any(turn.weight and gain for turn, gain in turns):
            gained = [one for one in trained if any(one.has_advantage(turn.index) for turn in one.turns)]
            excluded = self._excluded(gained, f"{mask} gives the weight 0 to all turns with an advantage")
            return f"the gradient is 0: {excluded}. {self._include().capitalize()}"
        return (
            "the gradient is 0 although advantages are not: the probabilities of the sampled tokens do not depend on the "
            "weights. This happens if sampling allows one token only (top_k=1, a narrow top_p or min_p): loosen sampling"
        )

    def _excluded(self, trajectories: Sequence[Trajectory], by_mask: str) -> str:
        """What excludes these conversations from the loss; `by_mask` says what the loss mask does."""
        cut = sum(was_cut(trajectory) for trajectory in trajectories) if self.config.train.overlong_filter else 0
        others = "" if cut == len(trajectories) else f", and of the others {by_mask}"
        filtered = (
            f"train.overlong_filter excludes the {cut} conversations whose last answer was cut by a limit{others}"
        )
        return filtered if cut else by_mask

    def _include(self) -> str:
        """How turns are trained on again."""
        if self.config.train.overlong_filter:
            return (
                f"raise the limit that cuts (limits.tokens_per_turn={self.config.limits.tokens_per_turn}), set "
                f"train.overlong_filter=false, or use another loss mask (docs/loss_masks.md)"
            )
        return "use another loss mask (docs/loss_masks.md)"


def _counted_calls(trajectories: Iterable[Trajectory]) -> ToolCallCounts:
    """The calls of these conversations."""
    use = ToolCallCounts()
    for trajectory in trajectories:
        use.add(trajectory)
    return use


_ALL_TOOLS = "*"
"""Stands for all tools where calls are kept by the name of the tool."""


def _invented(use: ToolCallCounts) -> bool:
    """Whether there is no tool of these names, or no call that could be read."""
    return use.failed == use.calls and all(group.kind in ("unknown_tool", "malformed") for _, group in use.ranked())


def _nearly_all_fail(use: ToolCallCounts) -> bool:
    return use.failed >= max(1, _NEARLY_ALL * use.calls)


def _most_frequent_call(use: ToolCallCounts) -> str:
    """The most frequent error of failed calls: `timeout, 'add', 4 times: add took longer than 30 s`."""
    name, group = use.ranked()[0]
    tool = f"{name!r:.80}, " if name else ""  # a call that cannot be read has no name
    return f"{group.kind}, {tool}{group.count} times: {' '.join(group.message.split())[:160]}"


def _most_frequent(failures: Sequence[Failure]) -> str:
    """The most frequent error of these failures and its line, such as `TypeError in chain.py:16`."""
    ((most, _),) = Counter(map(_error, failures)).most_common(1)
    return most


def _error(failure: Failure) -> str:
    """The error and the innermost line of the user's code: a frame of no library, if there is any."""
    name = _ERROR.search(failure.message)
    frames: list[tuple[str, str]] = _FRAME.findall(failure.traceback)
    own = [frame for frame in frames if "site-packages" not in frame[0] and "/lib/python" not in frame[0]]
    place = [f"in {os.path.basename(file)}:{line}" for file, line in (own or frames)[-1:]]
    return " ".join([name[0] if name else failure.kind, *place])


def _function_of(use: Use) -> str:
    """The reference to a reward function; of one of another library, to that and not to what converts it."""
    wrapped = use.arguments.get("function", use.arguments.get("use"))  # TRL's, ms-swift's
    return wrapped if isinstance(wrapped, str) and use.use.startswith("turnwise.compat.") else use.use


def _finished(group: Group) -> Group:
    """The group without conversations that failed or have no reward."""
    compared = [one for one in group.trajectories if not one.failed and one.reward is not None]
    return replace(group, trajectories=compared)


def _answers(group: Group) -> int:
    """How many different sequences of answers the conversations of a group have."""
    return len({tuple(trajectory.assistant_texts) for trajectory in group.trajectories})


def _questions(group: Group) -> int:
    """How many different sequences of messages the model has answered: agents of a group may be asked different things."""

    def answered(trajectory: Trajectory) -> str:
        roles = [message["role"] for message in trajectory.messages]
        end = len(roles) - roles[::-1].index("assistant") if "assistant" in roles else 0
        return repr([(message["role"], message.get("content")) for message in trajectory.messages[:end]])

    return len(set(map(answered, group.trajectories)))
