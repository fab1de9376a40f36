"""The order in which a run uses its rows: shuffled epochs, and several data sets with weights."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import groupby

from turnwise.errors import ConfigError
from turnwise.types import Row

__all__ = ["Order", "RowOrder", "WeightedOrder", "weighted_order"]


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
