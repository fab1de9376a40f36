"""Chooses the rows of a run one after the other, and knows which of them were used.

The order of the rows depends on the seed only. A checkpoint stores a `DataState`: which rows were trained on, and which were
started and have to be started again. Knows nothing of conversations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.data.curriculum import Curriculum, PassRates, pass_rates_of
from turnwise.data.order import RowOrder
from turnwise.types import Group, Row

__all__ = ["ChosenRow", "DataState", "RowSource"]


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
        ((_, index),) = self.order.take(position, 1)
        return self.rows[index]

    def _skips(self, last: int) -> bool:
        """Whether the curriculum skips the row at the present position. It skips none from the position `last` on."""
        if self.curriculum is None or self.position >= last:
            return False
        return self.curriculum.skips(self._row(self.position), self.position, self.pass_rates)
