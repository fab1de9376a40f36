"""The results of an evaluation, which eval.json holds, and their statistics.

The statistics are pure functions of numbers. Conversations on one row are not independent, so all intervals and tests are
computed from one number for each row: the mean of its conversations (clustered by row). `summarize` makes the results from the
recorded conversations of a model. This module reads finished trajectories and runs nothing.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from turnwise.errors import RunError
from turnwise.json_yaml import read_text
from turnwise.types import Trajectory
from turnwise.user_code.reward_number import reaches

# statistics

CONFIDENCE = 0.95
"""The confidence level of all intervals."""
_EXACT_ROWS = 16  # rows for which all sign flips are enumerated: 65,536
_FLIPS = 20_000
_TINY = 1e-12  # differences below this are rounding errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over rows with its confidence interval. All are None without rows; the interval needs two rows."""

    mean: float | None
    low: float | None
    high: float | None
    rows: int
    """Number of rows with a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTest:
    """Two models on the same rows: the first minus the second."""

    difference: Estimate
    p_t: float | None
    """Two-sided p-value of the paired t-test; None with fewer than two rows."""
    p_sign_flip: float | None
    """Two-sided p-value of the sign-flip permutation test; None without rows."""
    better: int
    """Rows in which the first model has the larger mean."""
    worse: int
    equal: int


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one value for each row, with the t interval of `CONFIDENCE`.

    Example: `estimate([0.0, 1.0, 1.0])` has the mean 0.667 and the interval -0.768 to 2.101.
    """
    rows = len(values)
    if not rows:
        return Estimate(mean=None, low=None, high=None, rows=0)
    mean = statistics.fmean(values)
    if rows == 1:
        return Estimate(mean=mean, low=None, high=None, rows=1)
    half = t_quantile(0.5 + CONFIDENCE / 2, rows - 1) * statistics.stdev(values) / math.sqrt(rows)
    return Estimate(mean=mean, low=mean - half, high=mean + half, rows=rows)


def rate_estimate(shares: Sequence[float], *, samples: int) -> Estimate:
    """The mean of one share from 0 to 1 for each row, with a Wilson interval of `CONFIDENCE`, which stays in [0, 1].

    Each share is of at most `samples` conversations. The interval has the effective number of independent conversations of
    clustered data: the number whose variance the row means have (Korn and Graubard, 1998), at least the number of rows where
    all are equal. Example: `rate_estimate([0.0, 1.0, 1.0], samples=1)` has the mean 0.667 and the interval 0.044 to 0.989.
    """
    plain = estimate(shares)
    if plain.mean is None or plain.low is None:
        return plain
    rows, p = plain.rows, plain.mean
    variance = statistics.variance(shares) / rows
    most = float(rows * max(1, samples))
    effective = min(most, p * (1 - p) / variance) if variance > _TINY else float(rows)
    z = t_quantile(0.5 + CONFIDENCE / 2, rows - 1)
    middle = (p + z * z / (2 * effective)) / (1 + z * z / effective)
    half = z * math.sqrt(p * (1 - p) / effective + (z / (2 * effective)) ** 2) / (1 + z * z / effective)
    return Estimate(mean=p, low=max(0.0, min(p, middle - half)), high=min(1.0, max(p, middle + half)), rows=rows)


def reward_estimate(by_row: Sequence[Sequence[float]]) -> Estimate:
    """The mean reward over rows, of the rewards of each row's conversations: with the interval of a share where all rewards are 0
    or 1, which stays in [0, 1], and else the t interval."""
    if all(reward in (0.0, 1.0) for rewards in by_row for reward in rewards):
        return _rate_of_rows(by_row)
    return estimate([fmean(rewards) for rewards in by_row])


def _rate_of_rows(by_row: Sequence[Sequence[float]]) -> Estimate:
    """`rate_estimate` of the shares of the rows, of a 0 or 1 for each conversation of a row."""
    return rate_estimate([fmean(values) for values in by_row], samples=max(map(len, by_row), default=1))


def pass_at_k(n: int, passed: int, k: int) -> float:
    """The probability that at least one of k samples passes: `1 - C(n - passed, k) / C(n, k)`.

    The unbiased estimate from n samples of which `passed` pass (Chen et al., 2021, https://arxiv.org/abs/2107.03374). Raises
    ValueError if k is not from 1 to n.
    """
    _check(n, passed, k)
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def pass_all_k(n: int, passed: int, k: int) -> float:
    """pass^k, the probability that all of k samples pass: `C(passed, k) / C(n, k)`.

    The unbiased estimate from n samples of which `passed` pass (Yao et al., 2024, https://arxiv.org/abs/2406.12045). Raises
    ValueError if k is not from 1 to n.
    """
    _check(n, passed, k)
    return math.comb(passed, k) / math.comb(n, k)


def _check(n: int, passed: int, k: int) -> None:
    if not 1 <= k <= n or not 0 <= passed <= n:
        raise ValueError(f"k={k} and passed={passed} of n={n} samples: k must be 1 to n, and passed 0 to n")


def paired_test(first: Sequence[float], second: Sequence[float]) -> PairedTest:
    """Compare two models by one value for each row; the values of a row have the same place in both.

    Raises ValueError if the lengths differ.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    better = sum(difference > _TINY for difference in differences)
    worse = sum(difference < -_TINY for difference in differences)
    return PairedTest(
        difference=estimate(differences),
        p_t=_paired_t_p(differences),
        p_sign_flip=sign_flip_p(differences),
        better=better,
        worse=worse,
        equal=len(differences) - better - worse,
    )


def _paired_t_p(differences: Sequence[float]) -> float | None:
    """The two-sided p-value of the t-test that the mean difference is 0."""
    if len(differences) < 2:
        return None
    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    if deviation <= _TINY:
        return 1.0 if abs(mean) <= _TINY else 0.0
    t = mean / (deviation / math.sqrt(len(differences)))
    return 2.0 * t_tail(abs(t), len(differences) - 1)


def sign_flip_p(differences: Sequence[float], *, flips: int = _FLIPS, seed: int = 0) -> float | None:
    """The two-sided p-value of the permutation test that flips the sign of each row's difference.

    The p-value is the share of sign patterns whose sum is at least as far from 0 as the observed sum. Up to 16 rows that
    differ, all patterns are enumerated; above, `flips` random patterns are drawn and the observed pattern is added.
    """
    if not differences:
        return None
    values = [difference for difference in differences if abs(difference) > _TINY]  # a difference of 0 has no sign
    bound = abs(sum(values)) - _TINY * max(1, len(values))
    if len(values) <= _EXACT_ROWS:
        signs = itertools.product((1, -1), repeat=len(values))
        extreme = sum(abs(sum(s * v for s, v in zip(pattern, values, strict=True))) >= bound for pattern in signs)
        return extreme / 2 ** len(values)
    generator = random.Random(seed)
    extreme = 0
    for _ in range(flips):
        bits = generator.getrandbits(len(values))
        extreme += abs(sum(value if bits >> place & 1 else -value for place, value in enumerate(values))) >= bound
    return (extreme + 1) / (flips + 1)


def t_cdf(t: float, degrees: int) -> float:
    """The distribution function of Student's t with `degrees` degrees of freedom."""
    return 1.0 - t_tail(t, degrees) if t >= 0 else t_tail(-t, degrees)


def t_tail(t: float, degrees: int) -> float:
    """The probability of a value above `t`, which is at least 0. Exact also where 1 minus the distribution function is rounded
    to 0: `t_tail(50.0, 30)` is about 5e-31."""
    if t < 1.0:  # near 0 the tail is 1/2 less a small number
        return 0.5 - 0.5 * _incomplete_beta(t * t / (degrees + t * t), 0.5, degrees / 2)
    return 0.5 * _incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5)


def t_quantile(p: float, degrees: int) -> float:
    """The value below which Student's t lies with probability `p`, from 0 to 1 exclusive, by bisection."""
    if p < 0.5:
        return -t_quantile(1.0 - p, degrees)
    high = 1.0
    while t_cdf(high, degrees) < p:
        high *= 2.0
    low = 0.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_cdf(middle, degrees) < p else (low, middle)
    return (low + high) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22)."""
    if x <= 0.0:
        return 0.0
    if x >= 1.0:
        return 1.0
    if x > (a + 1.0) / (a + b + 2.0):  # where the fraction converges fast
        return 1.0 - _incomplete_beta(1.0 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    # modified Lentz's method
    c, d = 1.0, 1.0 / _away_from_zero(1.0 - (a + b) * x / (a + 1.0))
    fraction = d
    for m in range(1, 400):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for numerator in (even, odd):
            d = 1.0 / _away_from_zero(1.0 + numerator * d)
            c = _away_from_zero(1.0 + numerator / c)
            fraction *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return front * fraction


def _away_from_zero(value: float) -> float:
    return value if abs(value) > 1e-300 else 1e-300


# results

SCHEMA = 1
MOST_IN_ALL_PAIRS = 4
"""Up to this number of models, all pairs are compared; above it, each further model with the first: the pairs would be many, and
p-values are not corrected for their number."""


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
    largest_reward: float | None = None
    """Of a conversation; None in the results of earlier versions."""


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
    """Each further model with the first model; then, up to `MOST_IN_ALL_PAIRS` models, each other pair (the later model is
    `first`); with `--single-turn`, several turns with one turn of the same model."""

    @property
    def compared_with_first_only(self) -> bool:
        """Whether there are too many models to compare all pairs."""
        return sum(not model.single_turn for model in self.models) > MOST_IN_ALL_PAIRS

    @property
    def largest_that_failed(self) -> float | None:
        """The largest reward of all conversations if none passed; else None, and in results of earlier versions."""
        largest = max((m.largest_reward for m in self.models if m.largest_reward is not None), default=None)
        return None if largest is None or reaches(largest, self.pass_reward) else largest


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
        reward=_rewards(finished),
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
        largest_reward=max(map(_reward, finished), default=None),
    )


def compare(first: ModelResult, second: ModelResult) -> Comparison:
    """The paired test of two models on the rows that both have."""
    rows = [row for row in first.row_rewards if row in second.row_rewards]
    test = paired_test([first.row_rewards[row] for row in rows], [second.row_rewards[row] for row in rows])
    return Comparison(first=first.name, second=second.name, test=test)


def read_results(path: Path) -> EvaluationResult:
    """The results in an `eval.json`. Raises RunError if the file is missing or damaged."""
    from pydantic import TypeAdapter, ValidationError  # takes long to load, and the statistics do not need it

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


def _rewards(trajectories: Sequence[Trajectory]) -> Estimate:
    return reward_estimate(list(_by_row(trajectories, _reward).values()))


def _share(trajectories: Sequence[Trajectory], value: Callable[[Trajectory], float]) -> Estimate:
    """The share of conversations whose value is 1."""
    return _rate_of_rows(list(_by_row(trajectories, value).values()))


def _part(trajectories: Sequence[Trajectory], passes: Callable[[Trajectory], float]) -> ResultPart:
    return ResultPart(
        conversations=len(trajectories),
        reward=_rewards(trajectories),
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
