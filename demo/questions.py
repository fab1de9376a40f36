"""Arithmetic word questions: the demo's model is fine-tuned on conversations about them, and then trained by RL on them.

Each kind of question has its text, the expression that answers it, and a function that computes the answer. All answers are
exact integers. This module does not know models, and evaluates no text.

Example: `questions(seed=1, count=2)` draws two rows such as::

    {"prompt": [{"role": "user", "content": "Tom has 12 apples and buys 3 bags of 4 apples. How many ..."}],
     "answer": "24", "expression": "12+3*4"}
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

__all__ = ["KINDS", "Kind", "questions"]

NAMES = ("Tom", "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Ines", "Kate", "Leo", "Mia")
THINGS = ("apples", "pears", "marbles", "stickers", "cards", "shells", "beads", "coins", "pencils", "cookies")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of question. `{a}`, `{b}` and `{c}` stand for the numbers, in the order in which the text has them."""

    text: str
    expression: str
    answer: Callable[..., int]
    """The same as `expression`, computed from the numbers."""
    numbers: Callable[[random.Random], tuple[int, ...]]
    """Draws numbers for which the answer is not negative and not a fraction."""


def _between(*ranges: tuple[int, int]) -> Callable[[random.Random], tuple[int, ...]]:
    return lambda rng: tuple(rng.randint(low, high) for low, high in ranges)


def _spent(rng: random.Random) -> tuple[int, ...]:
    first, second, left = (rng.randint(2, 30) for _ in range(3))
    return first + second + left, first, second


def _shared(rng: random.Random) -> tuple[int, ...]:
    friends, each = rng.randint(2, 9), rng.randint(2, 12)
    return friends * each, friends


def _packed(rng: random.Random) -> tuple[int, ...]:
    lost, boxes, each = rng.randint(2, 20), rng.randint(2, 6), rng.randint(2, 12)
    return lost + boxes * each, lost, boxes


def _given_away(rng: random.Random) -> tuple[int, ...]:
    held, boxes = rng.randint(4, 20), rng.randint(2, 9)
    return held, boxes, rng.randint(2, held * boxes - 1)


def _paid(rng: random.Random) -> tuple[int, ...]:
    other = rng.randint(8, 30)
    return other + rng.randint(2, 20), other, rng.randint(2, 9)


def _bus(rng: random.Random) -> tuple[int, ...]:
    people = rng.randint(12, 60)
    return people, rng.randint(2, people - 1), rng.randint(2, 30)


KINDS: tuple[Kind, ...] = (
    Kind(
        text="{name} has {a} {things} and buys {b} bags of {c} {things}. How many {things} does {name} have now?",
        expression="{a}+{b}*{c}",
        answer=lambda a, b, c: a + b * c,
        numbers=_between((2, 60), (2, 9), (2, 20)),
    ),
    Kind(
        text="{name} fills boxes with {a} {things} each. There are {b} boxes, and {name} gives {c} {things} to {friend}. "
        "How many {things} are left?",
        expression="{a}*{b}-{c}",
        answer=lambda a, b, c: a * b - c,
        numbers=_given_away,
    ),
    Kind(
        text="{name} had {a} euros, spent {b} on Monday and {c} on Tuesday. How many euros are left?",
        expression="{a}-{b}-{c}",
        answer=lambda a, b, c: a - b - c,
        numbers=_spent,
    ),
    Kind(
        text="Every day {name} reads {a} pages in the morning and {b} pages at night. How many pages is that in {c} days?",
        expression="({a}+{b})*{c}",
        answer=lambda a, b, c: (a + b) * c,
        numbers=_between((2, 30), (2, 30), (2, 14)),
    ),
    Kind(
        text="{name} shares {a} {things} fairly among {b} friends. How many {things} does each friend get?",
        expression="{a}/{b}",
        answer=lambda a, b: a // b,
        numbers=_shared,
    ),
    Kind(
        text="A garden has {a} rows of {b} trees. How many trees grow in it?",
        expression="{a}*{b}",
        answer=lambda a, b: a * b,
        numbers=_between((2, 40), (2, 40)),
    ),
    Kind(
        text="In a bag there are {a} red, {b} green and {c} blue {things}. How many {things} are in the bag?",
        expression="{a}+{b}+{c}",
        answer=lambda a, b, c: a + b + c,
        numbers=_between((2, 60), (2, 60), (2, 60)),
    ),
    Kind(
        text="{name} earns {a} euros an hour and {friend} earns {b}. How much more does {name} earn in {c} hours?",
        expression="({a}-{b})*{c}",
        answer=lambda a, b, c: (a - b) * c,
        numbers=_paid,
    ),
    Kind(
        text="A bus carries {a} people. At the next stop {b} get off and {c} get on. How many people does it carry now?",
        expression="{a}-{b}+{c}",
        answer=lambda a, b, c: a - b + c,
        numbers=_bus,
    ),
    Kind(
        text="{name} had {a} {things}, lost {b} of them and put the others into {c} equal piles. "
        "How many {things} are in a pile?",
        expression="({a}-{b})/{c}",
        answer=lambda a, b, c: (a - b) // c,
        numbers=_packed,
    ),
)


def questions(seed: int, count: int, *, without: Container[str] = ()) -> list[dict[str, Any]]:
    """Draw `count` rows with different texts, none of which is in `without`. The same seed draws the same rows."""
    rng = random.Random(seed)
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < count:
        row = _row(rng)
        text = row["prompt"][0]["content"]
        if text not in without:
            rows.setdefault(text, row)
    return list(rows.values())


def _row(rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(KINDS)
    numbers = kind.numbers(rng)
    named = dict(zip("abc", numbers, strict=False))
    name, friend = rng.sample(NAMES, 2)
    text = kind.text.format(name=name, friend=friend, things=rng.choice(THINGS), **named)
    return {
        "prompt": [{"role": "user", "content": text}],
        "answer": str(kind.answer(*numbers)),
        "expression": kind.expression.format(**named),
    }
