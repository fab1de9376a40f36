"""The task that both sides train on: arithmetic questions, a calculator, and what an answer is worth.

Plain Python without imports of either system, because the two live in different environments and must not differ in it.
"""

from __future__ import annotations

import random
import re
from typing import Any

__all__ = ["calculator", "question", "reward", "right"]

FORMS = ("{a}+{b}*{c}", "{a}*{b}-{c}", "({a}+{b})*{c}", "{a}*({b}-{c})")


def question(rng: random.Random) -> tuple[str, str]:
    """An expression, and its value: `("12+3*4", "24")`."""
    expression = rng.choice(FORMS).format(a=rng.randint(1, 99), b=rng.randint(1, 99), c=rng.randint(1, 99))
    return expression, calculator(expression)


def calculator(expression: str):  # no return type: transformers would write it into the schema, turnwise does not
    """Evaluates an arithmetic expression.

    Args:
        expression: The expression.
    """
    # never raises: what a model is told of an exception is worded differently on the two sides
    if not re.fullmatch(r"[0-9+\-*() .]{1,60}", expression) or re.search(r"\*\*|[\d)] *\(", expression):
        return "error"
    try:
        return str(eval(expression, {"__builtins__": {}}))[:20]
    except (SyntaxError, TypeError):
        return "error"


def right(text: str, answer: str) -> float:
    """1 if the text ends in `#### <answer>`, else 0."""
    said = re.search(r"####\s*(-?\d+)\s*$", text)
    return float(said is not None and said.group(1) == answer)


def reward(trajectory: Any) -> float:
    """The same, as turnwise asks for it: of the last thing that the model said."""
    return right(trajectory.answer, trajectory.row["answer"])
