"""verl's grader of GSM8K answers (`verl.utils.reward_score.gsm8k`), which compares texts, not numbers.

`#### 72.0` is not equal to `72` here. `turnwise.data.numeric_answers` compares numbers. This grader exists to give the same
rewards as verl.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

__all__ = ["GRADED", "compute_score", "default_compute_score", "extract_solution"]

GRADED = ("openai/gsm8k",)
"""Values of `data_source` that have a grader."""

_LOOKED_AT = 300  # number of characters at the end of a text
_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


def extract_solution(solution_str: str, method: Literal["strict", "flexible"] = "strict") -> str | None:
    """The answer in a text: after the last `#### ` (strict), or its last number (flexible); None if there is none."""
    if method not in ("strict", "flexible"):
        raise ValueError(f"the method is {method!r}; there are 'strict' and 'flexible'")
    end = solution_str[-_LOOKED_AT:]
    if method == "strict":
        marked = _MARKED.findall(end)
        return marked[-1].replace(",", "").replace("$", "") if marked else None
    numbers = [number for number in _NUMBER.findall(end) if number != "."]
    return numbers[-1] if numbers else None


def compute_score(
    solution_str: str,
    ground_truth: str,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` for the right answer, `format_score` for a wrong answer, 0 if there is no answer."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == ground_truth else format_score


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, **kwargs: Any
) -> float:
    """The score of the grader of a `data_source`. Raises NotImplementedError if it has no grader."""
    if data_source not in GRADED:
        raise NotImplementedError(
            f"turnwise has no grader of verl's for the data_source {data_source!r} (it has: {', '.join(GRADED)})"
        )
    return compute_score(solution_str, ground_truth)
