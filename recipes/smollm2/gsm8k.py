"""Questions of GSM8K for a model of 135 million parameters: solved ones before each, and a reward for parts of a solution."""

from __future__ import annotations

import math
import re
from collections.abc import Generator

from turnwise import Opening, Reply, Row, Turn, environment
from turnwise.data.numeric_answers import final_answer, same_number, truth

EXAMPLE = (
    ("user", "A pen costs 3 dollars. How much do 4 pens cost?"),
    ("assistant", "3 * 4 = 12\n#### 12"),
    ("user", "Tom had 20 apples and gave 8 of them away. How many apples does he have left?"),
    ("assistant", "20 - 8 = 12\n#### 12"),
    ("user", "32 pages are read in 4 days, the same number on each day. How many pages are read on a day?"),
    ("assistant", "32 / 4 = 8\n#### 8"),
)
_NUMBER = r"(\d{1,6}(?:\.\d{1,4})?)"
_CALCULATION = re.compile(rf"{_NUMBER} ?([-+*/x]) ?{_NUMBER} ?= ?{_NUMBER}")


@environment
def solved(row: Row) -> Generator[Opening | Reply, Turn, None]:
    """Asks the row's question. The reward is 1 for the right answer. An answer that is the result of a right calculation with
    numbers of the question is worth 0.3, and one that only ends in `#### number` 0.1: at first, the model answers 3 of 100
    questions, and most groups of 16 have no right answer. The metrics are `right` and `calculated`."""
    shown = [{"role": role, "content": text} for role, text in EXAMPLE]
    turn = yield Opening(messages=[*shown, *row.messages])
    given = final_answer(turn.text, "strict")
    right = same_number(given, truth(row["answer"]))
    calculated = given is not None and _is_calculated(turn.text, given, str(row.messages[-1]["content"]))
    reward = 1.0 if right else 0.3 if calculated else 0.1 if given is not None else 0.0
    yield Reply(reward=reward, metrics={"right": float(right), "calculated": float(calculated)}, done=True)


def _is_calculated(text: str, given: str, question: str) -> bool:
    """Whether the last calculation is right, has numbers of the question, and gives the answer."""
    numbers = set(re.findall(_NUMBER, question))
    found = _CALCULATION.findall(text)
    if not found:
        return False
    first, operator, second, result = found[-1]
    a, b = float(first), float(second)
    values = {"+": a + b, "-": a - b, "*": a * b, "x": a * b, "/": a / b if b else math.nan}
    return {first, second} <= numbers and same_number(result, given) and math.isclose(values[operator], float(result))
