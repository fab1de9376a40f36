"""Numbers in what a model says: finding the final answer and comparing it.

Used by environments that check answers and by reward functions; knows texts only.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Literal

__all__ = ["Method", "final_answer", "same_number", "truth"]

Method = Literal["strict", "flexible"]

_MARKED = re.compile(r"####\s*\$?\s*(-?\$?[\d.,]*\d)")
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def final_answer(text: str, method: Method = "strict") -> str | None:
    """The final answer in a text, or None.

    `strict` takes the number after the last `####`; `flexible` takes that, or else the last number of the text.

    Example: `final_answer("so 3 + 4, that is #### 7")` is `"7"`.
    """
    marked = _MARKED.findall(text)
    if marked:
        return _plain(marked[-1])
    if method == "strict":
        return None
    numbers = _NUMBER.findall(text)
    return _plain(numbers[-1]) if numbers else None


def truth(answer: object) -> str:
    """The number that a data set's answer column holds: `72`, `"72"`, or GSM8K's whole solution with `#### 72` at its end."""
    text = str(answer)
    return final_answer(text) or _plain(text.strip())


def same_number(one: str | None, other: str | None) -> bool:
    """Whether two answers are the same number: `1,234` and `1234.0` are. Texts that are no numbers are compared as texts."""
    if one is None or other is None:
        return False
    try:
        return Decimal(_plain(one)) == Decimal(_plain(other))
    except InvalidOperation:
        return one.strip() == other.strip()


def _plain(number: str) -> str:
    return number.replace(",", "").replace("$", "").strip()
