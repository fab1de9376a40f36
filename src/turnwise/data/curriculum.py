"""Chooses the rows of a step by their pass rates: rows that are too hard or too easy for the model are mostly skipped.

A group whose trajectories all fail or all succeed has no reward differences and teaches nothing. The pass rate of a row is the
mean reward of its last group, so a row is skipped only after it was used once, or if the data gives an initial pass rate.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turnwise.errors import DataError
from turnwise.types import Group, Row
from turnwise.user_code.reward_number import reaches

__all__ = ["Curriculum", "PassRates", "initial_pass_rates", "pass_rates_of"]

PassRates = Mapping[str, float]
"""The last known pass rate of each row that has one, by `Row.id`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """Which rows are skipped.

    Example: `Curriculum(low=0.0, high=1.0, keep=0.1, seed=0)` skips nine of ten uses of a row whose last conversations all had
    the reward 0, or all had the reward 1.
    """

    low: float
    """Rows with at most this pass rate are too hard."""
    high: float
    """Rows with at least this pass rate are too easy."""
    keep: float
    """The probability that such a row is used all the same, so that its pass rate is measured again. Above 0."""
    seed: int

    def skips(self, row: Row, place: int, rates: PassRates) -> bool:
        """Whether the row is skipped at this place in the order of rows. Depends on the arguments and the seed only."""
        rate = rates.get(row.id)
        if rate is None or not (reaches(self.low, rate) or reaches(rate, self.high)):
            return False
        return random.Random(f"{self.seed}:curriculum:{place}").random() >= self.keep


def pass_rates_of(groups: Sequence[Group]) -> dict[str, float]:
    """The mean reward of each group, by the id of its row. Failed trajectories do not count."""
    rewards = {
        group.row.id: [t.reward for t in group.trajectories if t.reward is not None and not t.failed]
        for group in groups
    }
    return {row: statistics.fmean(values) for row, values in rewards.items() if values}


def initial_pass_rates(rows: Sequence[Row], column: str | None) -> dict[str, float]:
    """The pass rates in a column of the data. Rows where it is null have none.

    Raises DataError if a row lacks the column, or if a value is not a number.
    """
    rates: dict[str, float] = {}
    if column is None:
        return rates
    for row in rows:
        if column not in row.fields:
            raise DataError(
                f"data.curriculum.column={column}: row {row.id!r} has no such column; its columns are: "
                f"{', '.join(sorted(row.fields)) or 'none'}"
            )
        rate = row.fields[column]
        if rate is None:
            continue
        if isinstance(rate, bool) or not isinstance(rate, int | float):
            raise DataError(
                f"data.curriculum.column={column}: row {row.id!r} has {rate!r:.80}; a pass rate must be a number, such as 0.25"
            )
        rates[row.id] = float(rate)
    return rates
