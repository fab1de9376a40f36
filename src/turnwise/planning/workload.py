"""A measured workload: how long the turns, the tools and the training steps of a recorded run took.

`measure` reads the record of a run and returns a `MeasuredWorkload`, from which `simulation` draws conversations. The number of
turns, their tokens and the waiting times of a conversation stay together, because they depend on each other. For the same reason,
the conversations of a row stay together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, median

import numpy as np

from turnwise.errors import RunError
from turnwise.record.reader import read, read_lines
from turnwise.types import Trajectory

__all__ = [
    "ConversationCost",
    "EngineSpeed",
    "MeasuredWorkload",
    "TrainingSpeed",
    "TurnCost",
    "fit_engine_speed",
    "measure",
]


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
