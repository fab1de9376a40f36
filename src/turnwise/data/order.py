"""Which row comes next: shuffled epochs, several data sets with weights, a curriculum, and the rows that were used.

The order depends on the seed only. A checkpoint stores a `DataState`: which rows were trained on, and which were started and
have to be started again.

The curriculum mostly skips rows that are too hard or too easy for the model: a group whose trajectories all fail or all
succeed has no reward differences and teaches nothing. The pass rate of a row is the mean reward of its last group, so a row is
skipped only after it was used once, or if the data gives an initial pass rate. This module knows nothing of conversations.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from turnwise.errors import ConfigError, DataError
from turnwise.types import Group, Row
from turnwise.user_code.reward_number import reaches

# the order of rows


class Order:
    """The order of the rows of one data set. Each epoch has its own shuffle.

    `take(position, count)` depends on the seed only, so a checkpoint stores just the number of rows used so far.
    """

    def __init__(self, length: int, *, seed: int, shuffle: bool = True) -> None:
        self._length = length
        self._seed = seed
        self._shuffle = shuffle
        self._epoch: tuple[int, Sequence[int]] = (-1, ())

    def take(self, position: int, count: int) -> list[tuple[int, int]]:
        """`(epoch, index)` of `count` rows, after the first `position` rows were used."""
        return [self._at(place) for place in range(position, position + count)]

    def _at(self, place: int) -> tuple[int, int]:
        epoch, offset = divmod(place, self._length)
        if epoch != self._epoch[0]:
            indices = list(range(self._length))
            if self._shuffle:
                random.Random(f"{self._seed}:{epoch}").shuffle(indices)
            self._epoch = (epoch, indices)
        return epoch, self._epoch[1][offset]


class WeightedOrder:
    """The order of rows from several data sets, mixed by weights. Each data set has epochs of its own.

    After n rows, every data set has given its share of n, rounded: the next row is from the data set that is furthest behind its
    share. Example: with the weights 2 and 1 the data sets are A B A A B A ...

    `lengths` are the numbers of rows of the data sets, whose rows are numbered one after the other.
    """

    def __init__(self, lengths: Sequence[int], weights: Sequence[float], *, seed: int, shuffle: bool = True) -> None:
        self._shares = [weight / sum(weights) for weight in weights]
        self._firsts = [sum(lengths[:number]) for number in range(len(lengths))]
        self._orders = [
            Order(length, seed=seed if number == 0 else _other_seed(seed, number), shuffle=shuffle)
            for number, length in enumerate(lengths)
        ]
        self._counts = [0] * len(lengths)
        """How many of the first `_place` rows each data set has given."""
        self._place = 0

    def take(self, position: int, count: int) -> list[tuple[int, int]]:
        """`(epoch, index)` of `count` rows, after the first `position` rows were used. The epoch is that of the data set."""
        if self._place > position:  # the counts only go forward, so an earlier position counts from the start again
            self._counts, self._place = [0] * len(self._counts), 0
        while self._place < position:
            self._count(self._next())
        rows: list[tuple[int, int]] = []
        for _ in range(count):
            source = self._next()
            ((epoch, index),) = self._orders[source].take(self._counts[source], 1)
            rows.append((epoch, self._firsts[source] + index))
            self._count(source)
        return rows

    def _count(self, source: int) -> None:
        self._counts[source] += 1
        self._place += 1

    def _next(self) -> int:
        """The data set of the next row."""
        place = self._place + 1
        behind = [share * place - count for share, count in zip(self._shares, self._counts, strict=True)]
        return behind.index(max(behind))


RowOrder = Order | WeightedOrder
"""`take(position, count)` gives `(epoch, index)` of the next rows."""


def _other_seed(seed: int, number: int) -> int:
    return random.Random(f"{seed}/{number}").getrandbits(63)


def weighted_order(rows: Sequence[Row], weights: Mapping[str, float], *, seed: int, shuffle: bool) -> WeightedOrder:
    """The order of `rows` by the weight of each data set (`Row.source`). The rows of a data set stand next to each other.

    Raises ConfigError if a data set has no rows.
    """
    lengths = {source: len(list(found)) for source, found in groupby(rows, key=lambda row: row.source)}
    if missing := [source for source in weights if source not in lengths]:
        raise ConfigError(
            f"data.weights: no row is left of {missing[0]} (data.max_rows or data.max_prompt_tokens excludes them all): "
            f"raise that limit, or remove the data set"
        )
    return WeightedOrder(list(lengths.values()), [weights[source] for source in lengths], seed=seed, shuffle=shuffle)


# the curriculum

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


# the rows that were used


@dataclass(frozen=True, slots=True)
class ChosenRow:
    """The use of a row for one group."""

    position: int
    """The position in the order of the rows. A row has one position in each epoch."""
    step: int
    """The training step that the row was chosen for, counted from 0. An asynchronous run may train on it in another step."""
    place: int
    """The number of rows that were chosen for this step before."""

    @property
    def prefix(self) -> str:
        """The beginning of the ids of the group and its trajectories, such as `3.0:` for the first row of the third step."""
        return f"{self.step + 1}.{self.place}:"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataState:
    """Which rows were used: the rows before `position` that are not `unfinished` were trained on, replaced or skipped."""

    position: int = 0
    """The first position that was not considered yet."""
    unfinished: Sequence[ChosenRow] = ()
    """Rows whose groups were started, and that no finished step has used. A resumed run starts them again."""
    places: Mapping[int, int] = field(default_factory=dict)
    """How many rows were chosen for each step that is not finished, counted from 0."""
    pass_rates: PassRates = field(default_factory=dict)
    """The pass rate of each row that has one. Empty without a curriculum."""

    @classmethod
    def read(cls, place: Mapping[str, Any], pass_rates: PassRates) -> DataState:
        """The state that `written` has written into a checkpoint. `pass_rates` are those of a new run."""
        return cls(
            position=place.get("position", 0),
            unfinished=tuple(ChosenRow(*numbers) for numbers in place.get("unfinished", ())),
            places={int(step): count for step, count in place.get("places", {}).items()},
            pass_rates={**pass_rates, **place.get("pass_rates", {})},
        )

    def written(self, *, curriculum: bool) -> dict[str, Any]:
        """The state as JSON, for a checkpoint."""
        written: dict[str, Any] = {"position": self.position}
        if self.unfinished:
            written["unfinished"] = [[row.position, row.step, row.place] for row in self.unfinished]
        if self.places:
            written["places"] = {str(step): count for step, count in self.places.items()}
        if curriculum:
            written["pass_rates"] = dict(self.pass_rates)
        return written


class RowSource:
    """Chooses rows. First those that a stopped run has left unfinished, then new ones in order."""

    def __init__(self, rows: Sequence[Row], order: RowOrder, curriculum: Curriculum | None, state: DataState) -> None:
        self.rows = rows
        self.order = order
        self.curriculum = curriculum
        """Which rows are skipped; None skips no row."""
        self.position = state.position
        self.again = list(state.unfinished)
        """Rows of the stopped run that were not started again yet."""
        self.places = dict(state.places)
        self.pass_rates = state.pass_rates
        self.skipped = 0
        """How many rows were skipped."""

    def next_rows(self, count: int, steps: Iterable[int]) -> list[tuple[ChosenRow, Row]]:
        """The next `count` rows. `steps` is the training step of each, counted from 0; rows that are started again keep theirs.

        Rows that the curriculum skips are passed over. If it skips all rows of an entire pass, the next rows are used as they
        come: a step always has its rows.
        """
        chosen: list[tuple[ChosenRow, Row]] = []
        last = self.position + len(self.rows)
        for step in steps:
            if len(chosen) == count:
                break
            if self.again:
                again = self.again.pop(0)
                chosen.append((again, self._row(again.position)))
                continue
            while self._skips(last):
                self.skipped += 1
                self.position += 1
            place = self.places[step] = self.places.get(step, 0) + 1
            chosen.append((ChosenRow(self.position, step, place - 1), self._row(self.position)))
            self.position += 1
        return chosen

    def state(self, unfinished: Iterable[ChosenRow], *, step: int) -> DataState:
        """The state after `step` finished steps, with the rows that were started and not used."""
        return DataState(
            position=self.position,
            unfinished=(*unfinished, *self.again),
            places={number: count for number, count in self.places.items() if number >= step},
            pass_rates=self.pass_rates,
        )

    def update_pass_rates(self, groups: Sequence[Group]) -> None:
        """Store the pass rates of finished groups."""
        if self.curriculum is not None:
            self.pass_rates = {**self.pass_rates, **pass_rates_of(groups)}

    def _row(self, position: int) -> Row:
        ((epoch, index),) = self.order.take(position, 1)
        return self.rows[index].in_pass(epoch)

    def _skips(self, last: int) -> bool:
        """Whether the curriculum skips the row at the present position. It skips none from the position `last` on."""
        if self.curriculum is None or self.position >= last:
            return False
        return self.curriculum.skips(self._row(self.position), self.position, self.pass_rates)
