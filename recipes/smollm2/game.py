"""A number game for a small real model: find a number between two others by the answers `higher` and `lower`."""

from __future__ import annotations

import re
from collections.abc import Generator

from turnwise import Opening, Reply, Row, Turn, environment, user_message

EXAMPLE = (
    ("user", "Between 20 and 35."),
    ("assistant", "27"),
    ("user", "Higher."),
    ("assistant", "31"),
    ("user", "Lower."),
    ("assistant", "29"),
    ("user", "Right!"),
)
"""A game in the prompt: the model has 135 million parameters and does not know the game from a description."""


@environment
def number_game(row: Row, tries: int = 4) -> Generator[Opening | Reply, Turn, None]:
    """The model guesses the row's number `secret`, which is between `low` and `high`.

    The reward is 1 if it finds the number within the tries (halving the range finds each of 15 numbers in four tries). If not,
    each try that the answers before did not exclude is worth 1/2 divided by the tries: a model that finds a number in one game of
    twenty learns from the other games, too. The metrics are `found` and `wasted`, the share of tries that were excluded or no
    numbers.
    """
    secret, low, high = row["secret"], row["low"], row["high"]
    shown = [{"role": role, "content": text} for role, text in EXAMPLE]
    turn = yield Opening(messages=[*shown, {"role": "user", "content": f"Between {low} and {high}."}])
    wasted = 0
    for last in [False] * (tries - 1) + [True]:
        found = re.match(r"\s*(\d{1,6})\b", turn.text)
        guess = int(found[1]) if found else None
        wasted += guess is None or not low <= guess <= high
        if guess == secret or last:
            right, share = guess == secret, wasted / tries
            reward = 1.0 if right else (1 - share) / 2
            yield Reply(reward=reward, metrics={"found": float(right), "wasted": share}, done=True)
            return
        if guess is None:
            answer = "A number, please."
        elif guess < secret:
            low, answer = max(low, guess + 1), "Higher."
        else:
            high, answer = min(high, guess - 1), "Lower."
        turn = yield user_message(answer)
