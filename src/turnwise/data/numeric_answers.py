"""Finds the final number in a model's text and compares it with the right answer.

Used by environments and reward functions. There are two families. `final_answer` and `same_number` read numbers as people
write them. `parsed` and `grade` follow verl's GSM8K scorer exactly (`strict`, `flexible`), so that results can be compared with
published ones; with `robust` they read numbers as `final_answer` does.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Literal

__all__ = ["Grader", "Method", "final_answer", "grade", "parsed", "same_number", "solution_number", "truth"]

Method = Literal["strict", "flexible"]

Grader = Literal["strict", "flexible", "robust"]
"""How an answer is parsed and compared.

`strict`: the last `#### number` among the last 300 characters; the same text as the truth. verl's default.
`flexible`: the last number among the last 300 characters, including its commas; the same text as the truth. This is verl's
rule, so `1,234` and `72.` are wrong if the truth is `1234` and `72`.
`robust`: the number after the last `####`, or the last number if there is no `####`; the same number as the truth.
"""

_SPACED = r"\d{1,3}(?:[ \u00a0\u2009\u202f]\d{3})+(?![\d,])(?:\.\d+)?"  # 1 234: only after ####
_MARKED = re.compile(rf"####[\s*_`(\\$€£]*((?:[-−][ \\$€£]*)?(?:{_SPACED}|[\d.,]*\d))")
_NUMBER = re.compile(r"[-−]?\$?\d[\d,]*(?:\.\d+)?|[-−]?\.\d+")
_IGNORED = re.compile(r"[,$€£\\\s]")

_VERL_END = 300
_VERL_MARKED = re.compile(r"#### (\-?[0-9\.\,]+)")
_VERL_NUMBER = re.compile(r"(\-?[0-9\.\,]+)")


def final_answer(text: str, method: Method = "strict") -> str | None:
    """The final answer in a text, or None.

    `strict` takes the number after the last `####`. `flexible` does the same, and takes the last number of the text if there is
    no `####`.

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
    """The number that a data set's answer column holds: `72`, `"72"`, or a GSM8K solution with `#### 72` at its end.

    Raises ValueError if the value is neither a number nor a text, or is an empty text: no answer could be equal to it.
    """
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        raise ValueError(
            f"the right answer is {answer!r:.80}; it must be a number or a text. Correct the row, or leave it out"
        )
    text = str(answer)
    return final_answer(text) or _plain(text.strip())


def same_number(first: str | None, second: str | None) -> bool:
    """Whether two answers are the same number: `1,234` and `1234.0` are. Other texts are compared as texts."""
    if first is None or second is None:
        return False
    try:
        return Decimal(_plain(first)) == Decimal(_plain(second))
    except InvalidOperation:
        return first.strip() == second.strip()


def parsed(text: str, grader: Grader = "strict") -> str | None:
    """The answer that a grader parses from a text, or None.

    Example: `parsed("It is #### 1,234.", "strict")` is `"1234."`: the full stop counts as part of the number.
    """
    if grader == "robust":
        return final_answer(text, "flexible")
    end = text[-_VERL_END:]
    if grader == "strict":
        marked = _VERL_MARKED.findall(end)
        return marked[-1].replace(",", "").replace("$", "") if marked else None
    numbers = _VERL_NUMBER.findall(end)
    # if all matches are full stops, verl returns the first match
    return next((number for number in reversed(numbers) if number != "."), "." if numbers else None)


def grade(text: str, truth: str, grader: Grader = "strict") -> float:
    """1.0 if the text's answer is the truth, else 0.0. `truth` is a number as a text, as returned by `solution_number`."""
    answer = parsed(text, grader)
    if grader == "robust":
        return float(same_number(answer, truth))
    return float(answer is not None and answer == truth)


def solution_number(solution: str) -> str | None:
    """The number of a GSM8K solution as verl's preprocessing takes it: after the first `#### `, without commas."""
    match = _VERL_MARKED.search(solution)
    return match.group(1).replace(",", "") if match else None


def _plain(number: str) -> str:
    return _IGNORED.sub("", number).replace("−", "-")
