"""A second try is worth having: the answer is not certain from the question.

The user's message is a letter. It has a first digit, which is the hidden answer with probability 0.6, and a second digit, which
is the answer otherwise. A right answer has the reward 1. After a wrong answer, if the row allows two tries, the
user says the letter again with the mark `x`, and a right second answer has the reward 0.8.

Rows with one try train single-turn, rows with two tries train multi-turn. Both are evaluated with two tries.

The start policy prefers a digit that is never right (0.55 in both turns), and chooses the others with equal probability: a try
is right with probability 0.15, so the mean reward with two tries is 0.15 + 0.85 * 0.15 * 0.8 = 0.252. The optimum with one try is
0.6 (the first digit). The optimum with two tries is 0.6 + 0.4 * 0.8 = 0.92 (the first digit, then the second).

Training with one try never sees the second turn. Its policy for the second turn is what carries over from the first turn: if it
repeats the first digit, its reward with two tries is 0.6; if it is that of the start, 0.6 + 0.4 * 0.15 * 0.8 = 0.648. So
single-turn training should end between 0.60 and 0.65, and multi-turn training should approach 0.92, but it sees fewer first
turns for the same number of sampled tokens.

The start model knows four letters; the rows have one. With four letters, single-turn `grpo` ended at 0.49 and multi-turn `grpo`
at 0.46 for 25,000 sampled tokens, with a policy that ignores the letter. That is not a question of credit.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from typing import Any

from turnwise import Opening, Reply, Row, Turn, environment, user_message

LETTERS = "efgh"
DIGITS = "1234"
FIRST = dict(zip(LETTERS, "2413", strict=True))
SECOND = dict(zip(LETTERS, "4132", strict=True))
NEVER = dict(zip(LETTERS, "3244", strict=True))
"""The digit that the start policy prefers."""
PREFERENCE = 0.4
"""The start policy takes that digit with this probability, and any digit otherwise."""
LIKELY = 0.6
"""The probability that the first digit of the letter is the answer."""
RETRY = 0.8
"""The reward of a right second answer."""


def new_row(rng: random.Random, tries: int) -> dict[str, Any]:
    """The letter, its hidden answer, and the number of tries."""
    letter = LETTERS[0]
    answer = (FIRST if rng.random() < LIKELY else SECOND)[letter]
    return {"prompt": f"{letter}?", "letter": letter, "answer": answer, "tries": tries}


def random_conversation(rng: random.Random) -> list[dict[str, str]]:
    """A conversation of the start policy with two turns, for the warm start."""
    letter = rng.choice(LETTERS)

    def digit() -> str:
        return NEVER[letter] if rng.random() < PREFERENCE else rng.choice(DIGITS)

    return [
        {"role": "user", "content": f"{letter}?"},
        {"role": "assistant", "content": digit()},
        {"role": "user", "content": f"{letter}x"},
        {"role": "assistant", "content": digit()},
    ]


@environment
async def guessing(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """One conversation: up to two tries."""
    turn = yield Opening(messages=row.messages)
    if turn.text != row["answer"] and row["tries"] == 2:
        turn = yield user_message(f"{row['letter']}x")
        yield Reply(reward=RETRY * (turn.text == row["answer"]), done=True)
        return
    yield Reply(reward=float(turn.text == row["answer"]), done=True)
