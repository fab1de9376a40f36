"""The monitors of the section `health`: which metric each compares with its limit, and its warning.

A monitor reads the metrics of the latest steps, and of the first steps of the run. It does not change the run.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.config.schema import Config
from turnwise.record.group_metrics import lowest_correlation
from turnwise.types import Group

__all__ = ["HealthMonitors", "RunProblem"]

_LEAST_CALLS = 0.1
"""Tool calls of a conversation in the first steps, below which their number cannot collapse."""

Line = Mapping[str, Any]
"""The metrics of a step: a line of metrics.jsonl."""


@dataclass(frozen=True, slots=True)
class RunProblem:
    """A problem of a run."""

    name: str
    """The monitor, by its name in the section `health`, or another name for problems that have no option."""
    text: str


@dataclass(frozen=True, slots=True)
class _Limit:
    """A monitor that compares the mean of a metric over the window with its limit."""

    name: str
    metric: str
    meaning: str
    advice: str
    lowest: bool = False
    """Whether the limit is the smallest value that is accepted, instead of the largest."""


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

    def __post_init__(self) -> None:
        self._latest = deque(maxlen=self.config.health.window)
        for line in self.past:
            self._add(line)

    def findings(self, line: Line, groups: Sequence[Group]) -> list[RunProblem]:
        """What is wrong after a step, warned of before or not. `groups` are those of the step."""
        self._add(line)
        if len(self._latest) < self.config.health.window:
            return []
        found = [self._compare(limit, groups) for limit in _LIMITS]
        return [
            finding for finding in (*found, self._tool_use(), self._entropy(), self._length()) if finding is not None
        ]

    def _add(self, line: Line) -> None:
        if len(self._first) < self.config.health.window:
            self._first.append(line)
        self._latest.append(line)

    def _compare(self, limit: _Limit, groups: Sequence[Group]) -> RunProblem | None:
        bound = getattr(self.config.health, limit.name)
        if bound is None or (limit.name == "zero_std" and self.config.train.group_size == 1):
            return None
        value = _mean(self._latest, lambda line: line.get(limit.metric))
        if value is None or (value >= bound if limit.lowest else value <= bound):
            return None
        advice = limit.advice
        if limit.name == "reward_correlation":
            finished = [t for group in groups for t in group.trajectories if not t.failed]
            if (lowest := lowest_correlation(finished)) is not None:
                advice = f"In this step, these are {lowest[1]} and {lowest[2]}. {advice}"
        return self._finding(limit.name, limit.metric, f"{limit.meaning} is {value:.3g}", bound, advice)

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
