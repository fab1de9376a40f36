"""The results of an evaluation: from the recorded conversations of each model to typed numbers, which eval.json holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from pydantic import TypeAdapter, ValidationError

from turnwise.errors import RunError
from turnwise.evaluation.statistics import (
    CONFIDENCE,
    Estimate,
    PairedTest,
    estimate,
    paired_test,
    pass_all_k,
    pass_at_k,
    rate_estimate,
)
from turnwise.json_yaml import read_text
from turnwise.types import Trajectory
from turnwise.user_code.reward_number import reaches

__all__ = [
    "Comparison",
    "Cost",
    "EvaluationResult",
    "ModelResult",
    "ResultPart",
    "compare",
    "prompt_tokens",
    "read_results",
    "summarize",
]

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultPart:
    """Some of a model's conversations: those of one data source, or those with one number of turns."""

    conversations: int
    """Those that did not fail."""
    reward: Estimate
    pass_rate: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the conversations cost, failed conversations included. A mean is None without conversations."""

    prompt_tokens: int
    """The prompts of all turns, each in full: what an endpoint without a cache would charge."""
    sampled_tokens: int
    tokens_per_conversation: float | None
    """Prompt and sampled tokens."""
    seconds_per_conversation: float | None
    """From the opening to the last reply. Conversations run at the same time, so the sum is more than the time of the run."""
    engine_seconds_per_conversation: float | None
    """The part of it that was spent waiting for the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResult:
    """One model on all rows."""

    name: str
    model: str
    """The path, hub name or endpoint."""
    engine: str
    single_turn: bool
    """Whether the model had one turn in each conversation (`--single-turn`)."""
    conversations: int
    """All, failed conversations included."""
    failed: int
    """Failed conversations are in no mean; the number of rows in `reward` shows whether rows are missing."""
    reward: Estimate
    pass_rate: Estimate
    pass_at: Mapping[int, Estimate] = field(default_factory=dict)
    """pass@k by k, over the rows with at least k conversations that did not fail."""
    pass_all: Mapping[int, Estimate] = field(default_factory=dict)
    """pass^k by k, over the same rows."""
    sources: Mapping[str, ResultPart] = field(default_factory=dict)
    """By data source; empty if there is only one."""
    turns: Mapping[int, ResultPart] = field(default_factory=dict)
    """By the number of turns that the conversation had."""
    turns_mean: float | None
    stops: Mapping[str, int] = field(default_factory=dict)
    cost: Cost
    row_rewards: Mapping[str, float] = field(default_factory=dict)
    """The mean reward of each row, by its id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two entries of an evaluation on the rows that both have."""

    first: str
    second: str
    test: PairedTest
    """Of the mean rewards of the rows: first minus second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """The contents of eval.json."""

    schema: int = SCHEMA
    data: str
    rows: int
    samples_per_row: int
    seed: int
    pass_reward: float
    confidence: float = CONFIDENCE
    models: Sequence[ModelResult] = ()
    comparisons: Sequence[Comparison] = ()
    """Each further model with the first model; with `--single-turn`, several turns with one turn of the same model."""


def summarize(
    trajectories: Iterable[Trajectory],
    *,
    name: str,
    model: str,
    engine: str,
    single_turn: bool,
    samples: int,
    pass_reward: float,
    source_of: Mapping[str, str],
) -> ModelResult:
    """The result of one model from its recorded conversations. `source_of` has the data source of each row id.

    Only what the record holds is read, so an interrupted and resumed evaluation has the same numbers.
    """
    every = list(trajectories)
    finished = [trajectory for trajectory in every if not trajectory.failed and trajectory.reward is not None]
    passes: Callable[[Trajectory], float] = lambda t: float(reaches(_reward(t), pass_reward))  # noqa: E731
    counts = [(len(values), round(sum(values))) for values in _by_row(finished, passes).values()]
    ks = _ks(samples)
    sources = sorted({source_of.get(t.row.id, "") for t in finished})
    numbers_of_turns = sorted({len(t.turns) for t in finished})
    return ModelResult(
        name=name,
        model=model,
        engine=engine,
        single_turn=single_turn,
        conversations=len(every),
        failed=sum(trajectory.failed for trajectory in every),
        reward=_clustered(finished, _reward),
        pass_rate=_share(finished, passes),
        pass_at={k: rate_estimate([pass_at_k(n, c, k) for n, c in counts if n >= k], samples=1) for k in ks},
        pass_all={k: rate_estimate([pass_all_k(n, c, k) for n, c in counts if n >= k], samples=1) for k in ks},
        sources={
            source: _part([t for t in finished if source_of.get(t.row.id, "") == source], passes) for source in sources
        }
        if len(sources) > 1
        else {},
        turns={number: _part([t for t in finished if len(t.turns) == number], passes) for number in numbers_of_turns},
        turns_mean=_mean([len(t.turns) for t in finished]),
        stops=dict(Counter(str(t.stop) for t in every).most_common()),
        cost=_cost(every),
        row_rewards={row: fmean(values) for row, values in _by_row(finished, _reward).items()},
    )


def compare(first: ModelResult, second: ModelResult) -> Comparison:
    """The paired test of two models on the rows that both have."""
    rows = [row for row in first.row_rewards if row in second.row_rewards]
    test = paired_test([first.row_rewards[row] for row in rows], [second.row_rewards[row] for row in rows])
    return Comparison(first=first.name, second=second.name, test=test)


def read_results(path: Path) -> EvaluationResult:
    """The results in an `eval.json`. Raises RunError if the file is missing or damaged."""
    try:
        return TypeAdapter(EvaluationResult).validate_json(read_text(path, error=RunError))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(step) for step in first["loc"])
        raise RunError(
            f"{path} is damaged: {place}: {first['msg']}. Run the evaluation again with resume=auto"
        ) from None


def prompt_tokens(trajectory: Trajectory) -> int:
    """The tokens of the prompts of all turns together: as an endpoint reported them, or from the segments.

    The prompt of a turn is everything in its segment before its first sampled token.
    """
    reported = sum(turn.usage.prompt_tokens for turn in trajectory.turns if turn.usage is not None)
    counted: set[int] = set()
    total = reported
    for segment in trajectory.segments:
        for position, turn in enumerate(segment.turn):
            if turn >= 0 and turn not in counted:
                counted.add(turn)
                total += position
    return total


def _reward(trajectory: Trajectory) -> float:
    return 0.0 if trajectory.reward is None else trajectory.reward


def _by_row(trajectories: Sequence[Trajectory], value: Callable[[Trajectory], float]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        values.setdefault(trajectory.row.id, []).append(value(trajectory))
    return values


def _clustered(trajectories: Sequence[Trajectory], value: Callable[[Trajectory], float]) -> Estimate:
    return estimate([fmean(values) for values in _by_row(trajectories, value).values()])


def _share(trajectories: Sequence[Trajectory], value: Callable[[Trajectory], float]) -> Estimate:
    """The share of conversations whose value is 1."""
    by_row = list(_by_row(trajectories, value).values())
    return rate_estimate([fmean(values) for values in by_row], samples=max(map(len, by_row), default=1))


def _part(trajectories: Sequence[Trajectory], passes: Callable[[Trajectory], float]) -> ResultPart:
    return ResultPart(
        conversations=len(trajectories),
        reward=_clustered(trajectories, _reward),
        pass_rate=_share(trajectories, passes),
    )


def _ks(samples: int) -> list[int]:
    """1, 2, 4, ... and the number of samples."""
    powers = [2**n for n in range(samples.bit_length()) if 2**n <= samples]
    return sorted({*powers, samples})


def _cost(trajectories: Sequence[Trajectory]) -> Cost:
    prompts = [prompt_tokens(trajectory) for trajectory in trajectories]
    sampled = [trajectory.sampled_tokens for trajectory in trajectories]
    engine = [sum(turn.seconds_engine for turn in trajectory.turns) for trajectory in trajectories]
    return Cost(
        prompt_tokens=sum(prompts),
        sampled_tokens=sum(sampled),
        tokens_per_conversation=_mean([p + s for p, s in zip(prompts, sampled, strict=True)]),
        seconds_per_conversation=_mean([trajectory.seconds for trajectory in trajectories]),
        engine_seconds_per_conversation=_mean(engine),
    )


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
