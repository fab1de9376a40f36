"""The game of recipes/smollm2/game.py for TRL's side, which lives in an environment without turnwise.

Plain Python without imports of either system. `tests/test_scripts.py` plays it beside the recipe's environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

TRIES = 4


class Game:
    """One game, about a row with `secret`, `low` and `high`."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.secret, self.low, self.high = row["secret"], row["low"], row["high"]
        self.reward = 0.0
        """Of the whole game: 0 until it has ended, and if a turn was cut."""
        self._tried = self._wasted = 0

    def answer(self, text: str) -> str | None:
        """What the game says to a turn; None: the game has ended."""
        found = re.match(r"\s*(\d{1,6})\b", text)
        guess = int(found[1]) if found else None
        self._tried += 1
        self._wasted += guess is None or not self.low <= guess <= self.high
        if guess == self.secret or self._tried == TRIES:
            self.reward = 1.0 if guess == self.secret else (1 - self._wasted / TRIES) / 2
            return None
        if guess is None:
            return "A number, please."
        if guess < self.secret:
            self.low = max(self.low, guess + 1)
            return "Higher."
        self.high = min(self.high, guess - 1)
        return "Lower."
