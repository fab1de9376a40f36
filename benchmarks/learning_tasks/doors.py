"""Delayed reward: six turns, of which only one decides the reward, which comes at the end.

Each message of the user is the number of the turn, a letter and a mark. The model answers with a digit from 1 to 4. In one of
the first three turns the mark is `!`: this turn decides. Each letter has one right digit, which the model must find out. All
other answers have no effect. The marks after the deciding turn show the result: `+` right, `=` wrong. The reward is 1 after a
right answer and 0 after a wrong one, and it is given after the last turn.

The start policy prefers a wrong digit for each letter (0.55) and chooses the others with equal probability: mean reward 0.15.
The optimum is 1. (With equal probabilities for all digits the start model has not learned to look at the letter, and `grpo` did
not find that out in 6,400 conversations.)

Expectation: all estimators here are unbiased, or nearly so, and differ only in noise. `grpo` gives all six turns the advantage
of the conversation. Five of these have no effect on the reward and contribute only noise. If the only reward comes at the end,
`turn_return` equals `grpo` up to a constant factor, so both learn equally fast. `gigpo` adds a second term. In the deciding turn
it has the size of the first term. After this turn it is 0, because conversations in the same state have the same result.
`turn_gae` with a good critic gives (almost) no advantage after the deciding turn, because the state already shows the result;
turns before it receive a part of the noise. So `turn_gae` and `gigpo` should learn faster than `grpo` and `turn_return`.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from typing import Any

from turnwise import Opening, Reply, Row, Turn, environment, user_message

TURNS = 6
LETTERS = "ab"
DIGITS = "1234"
RIGHT = dict(zip(LETTERS, "31", strict=True))
"""The digit that opens the door of each letter."""
WRONG = dict(zip(LETTERS, "13", strict=True))
"""The digit that the start policy prefers."""
PREFERENCE = 0.4
"""The start policy takes the wrong digit with this probability, and any digit otherwise."""


def new_row(rng: random.Random) -> dict[str, Any]:
    """The letters of the turns, and the index of the deciding turn."""
    letters, deciding = "".join(rng.choice(LETTERS) for _ in range(TURNS)), rng.randrange(TURNS // 2)
    return {"prompt": message(0, letters, "!" if deciding == 0 else "-"), "letters": letters, "deciding": deciding}


def message(turn: int, letters: str, mark: str) -> str:
    """The user's message before a turn: `2c!`."""
    return f"{turn}{letters[turn]}{mark}"


def mark(turn: int, deciding: int, right: bool) -> str:
    """The mark of a turn: before, at or after the deciding turn."""
    if turn <= deciding:
        return "!" if turn == deciding else "-"
    return "+" if right else "="


def random_conversation(rng: random.Random) -> list[dict[str, str]]:
    """A conversation of the start policy, for the warm start."""
    row = new_row(rng)
    letters, deciding, right = row["letters"], row["deciding"], False
    messages: list[dict[str, str]] = []
    for turn in range(TURNS):
        digit = WRONG[letters[turn]] if rng.random() < PREFERENCE else rng.choice(DIGITS)
        messages.append({"role": "user", "content": message(turn, letters, mark(turn, deciding, right))})
        messages.append({"role": "assistant", "content": digit})
        right = digit == RIGHT[letters[turn]] if turn == deciding else right
    return messages


@environment
async def doors(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """One conversation: six turns, and the reward after the last."""
    letters, deciding, right = row["letters"], row["deciding"], False
    answer = yield Opening(messages=row.messages)
    for turn in range(TURNS):
        if turn == deciding:
            right = answer.text == RIGHT[letters[turn]]
        if turn + 1 < TURNS:
            answer = yield user_message(message(turn + 1, letters, mark(turn + 1, deciding, right)))
    yield Reply(reward=float(right), done=True)
