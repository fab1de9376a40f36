"""Questions with a calculator, for a model whose chat template knows no tools: the prompt shows calls as a conversation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator

from turnwise import Opening, Reply, Row, Trajectory, Turn, environment
from turnwise.data.numeric_answers import final_answer, same_number, truth

EXAMPLES = (
    ("A shelf has 12 rows of 7 books. How many books stand in it?", "12*7", "84"),
    ("In a bag there are 30 red, 14 green and 25 blue pens. How many pens are in the bag?", "30+14+25", "69"),
    ("Sam shares 45 nuts fairly among 5 friends. How many nuts does each friend get?", "45/5", "9"),
    ("Paul had 81 euros, spent 13 on Monday and 22 on Tuesday. How many euros are left?", "81-13-22", "46"),
)
"""One question of each kind, with the expression and its value."""


@environment
def questions(row: Row) -> Generator[Opening | Reply, Turn, None]:
    """Asks the row's question after the examples. The first turn without a call ends the conversation."""
    shown: list[dict[str, str]] = []
    for question, expression, value in EXAMPLES:
        shown += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": f'[calculator(expression="{expression}")]'},
            {"role": "tool", "content": value},
            {"role": "assistant", "content": f"The answer is {value}."},
        ]
    yield Opening(messages=[*shown, *row.messages])
    yield Reply(done=True)


def right(trajectory: Trajectory, answer: str) -> float:
    """1 if the last number of the last turn is the row's `answer`."""
    return float(same_number(final_answer(trajectory.answer, "flexible"), truth(answer)))


def expression(trajectory: Trajectory, expression: str) -> float:
    """Up to 0.5 for a call that the calculator answered: the share of numbers and operators that it has in common with the row's
    `expression`. Without it, most groups of conversations have no differences at first.

    Example: `62-29` for `62-29-24` gives 0.3 (3 of 5 in common).
    """
    wanted, best = _parts(expression), 0.0
    for turn in trajectory.turns:
        for outcome in turn.outcomes:
            if outcome.error is None:
                written = _parts(str(outcome.arguments["expression"]))
                best = max(best, (written & wanted).total() / (written | wanted).total())
    return best / 2


def _parts(text: str) -> Counter[str]:
    return Counter(re.findall(r"\d+|[-+*/]", text))
