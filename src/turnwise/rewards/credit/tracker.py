"""A value for each row from its earlier rewards: the baseline of SPO, which needs no other conversation of the row.

Single-stream Policy Optimization, arXiv 2509.13232. What a row has earned counts less the further the policy has moved since.
Results of a step take effect with `advance`, when the step is finished, so that a checkpoint holds finished steps only. Knows
numbers, and the names of rows and agents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from turnwise.options.algorithm import Spo

LARGEST_MOVE = 1e6
"""What a step counts that has moved the policy further, or whose move is not a number. Far above any `credit.half_life`."""


class Value(NamedTuple):
    """What is known of the rewards of a row."""

    mean: float
    weight: float
    """How many conversations it counts as. For rewards of 0 and 1, `mean * weight` and `(1 - mean) * weight` are the counts
    alpha and beta of the paper."""
    moved: float
    """`ValueTracker.moved` when the row was last trained on."""


class ValueTracker:
    """The values of all rows, and how far the policy has moved.

    >>> tracker = ValueTracker(Spo(initial=0.5, initial_weight=1, half_life=0.1, rho_min=0.25, rho_max=1))
    >>> tracker.value("", "row")
    0.5
    >>> tracker.add("", "row", [1.0])  # (0.5 + 1) / 2
    >>> tracker.move(0.1)  # rho is 1/2 at the next visit
    >>> tracker.advance()
    >>> tracker.value("", "row")
    0.75
    >>> tracker.add("", "row", [0.0])  # 0.75 counts as 2 / 2 conversations: 0.75 / 2
    >>> tracker.advance()
    >>> tracker.value("", "row")
    0.375
    """

    def __init__(self, options: Spo) -> None:
        self.options = options
        self.moved = 0.0
        """How far the policy has moved since the start: the sum over the finished steps, in nats per token."""
        self._values: dict[str, dict[str, Value]] = {}
        """By the name of the agent (empty: the conversation of the row), and the id of the row."""
        self._step: dict[tuple[str, str], list[float]] = {}
        """The rewards of the step in progress."""
        self.step_moved = 0.0
        """How far the update of the step in progress has moved the policy."""

    def value(self, agent: str, row: str) -> float:
        """The value of a row before the step in progress: no conversation of this step is part of it."""
        return self._known(agent, row).mean

    def add(self, agent: str, row: str, rewards: Iterable[float]) -> None:
        """Rewards of conversations on a row in the step in progress."""
        self._step.setdefault((agent, row), []).extend(rewards)

    def move(self, divergence: float) -> None:
        """How far the update of the step in progress has moved the policy, in nats per token."""
        self.step_moved = min(divergence, LARGEST_MOVE) if math.isfinite(divergence) else LARGEST_MOVE

    def advance(self) -> None:
        """The step in progress is finished."""
        for (agent, row), rewards in self._step.items():
            if rewards:
                kept = self._known(agent, row)
                old = (
                    self._rho(self.moved - kept.moved) * kept.weight
                    if row in self._values.get(agent, {})
                    else kept.weight
                )
                weight = old + len(rewards)
                mean = (old * kept.mean + math.fsum(rewards)) / weight
                self._values.setdefault(agent, {})[row] = Value(mean, weight, self.moved)
        self.moved += self.step_moved
        self._step, self.step_moved = {}, 0.0

    def written(self) -> dict[str, Any]:
        """The state after the finished steps, as JSON, for a checkpoint."""
        return {
            "moved": self.moved,
            "values": {agent: {row: [*value] for row, value in rows.items()} for agent, rows in self._values.items()},
        }

    def load(self, written: Mapping[str, Any]) -> None:
        """Go on from what `written` has given."""
        self.moved = written["moved"]
        self._values = {
            agent: {row: Value(*numbers) for row, numbers in rows.items()} for agent, rows in written["values"].items()
        }

    def _known(self, agent: str, row: str) -> Value:
        new = Value(self.options.initial, self.options.initial_weight, self.moved)
        return self._values.get(agent, {}).get(row, new)

    def _rho(self, moved: float) -> float:
        """The share of a row's weight that is kept, after the policy has moved so far since the row's last visit."""
        options = self.options
        return min(max(2.0 ** (-moved / options.half_life), options.rho_min), options.rho_max)
