"""Numbers in what a model says."""

from __future__ import annotations

import pytest

from turnwise.data.numeric_answers import Grader, final_answer, grade, parsed, same_number, solution_number, truth


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("#### 72", "72", "72"),
        ("3 + 4 is 7\n#### 7", "7", "7"),
        ("####72", "72", "72"),
        ("#### 1,234", "1234", "1234"),
        ("#### 1,234,567.5 apples", "1234567.5", "1234567.5"),
        ("#### $72", "72", "72"),
        ("#### $ 72", "72", "72"),
        ("#### -5", "-5", "-5"),
        ("#### -$5", "-5", "-5"),
        ("#### 72.0", "72.0", "72.0"),
        ("#### 72.", "72", "72"),
        ("#### .5", ".5", ".5"),
        ("#### 72%", "72", "72"),
        ("#### 1\nno, #### 2", "2", "2"),
        ("#### 2 or 3", "2", "2"),
        ("#### 7, said 12 people", "7", "7"),
        ("#### 1 234", "1234", "1234"),
        ("#### 1\u202f234\u00a0567.5 km", "1234567.5", "1234567.5"),
        ("#### 2010 500", "2010", "2010"),
        ("#### 1 2345", "1", "1"),
        ("#### −3", "-3", "-3"),
        ("#### **72**", "72", "72"),
        ("#### \\$1,234", "1234", "1234"),
        ("#### $-5", "-5", "-5"),
        ("#### €5", "5", "5"),
        ("### 72", None, "72"),
        ("#### so 72", None, "72"),
        ("The answer is 72.", None, "72"),
        ("It costs $1,234.50!", None, "1234.50"),
        ("from 10 down to -3", None, "-3"),
        ("it is -.5", None, "-.5"),
        ("first 3, then 4", None, "4"),
        ("no number", None, None),
        ("", None, None),
        ("####", None, None),
        ("#### ", None, None),
        ("#### -", None, None),
    ],
)
def test_the_final_answer(text: str, strict: str | None, flexible: str | None) -> None:
    assert final_answer(text) == strict
    assert final_answer(text, "strict") == strict
    assert final_answer(text, "flexible") == flexible


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        (72, "72"),
        (72.5, "72.5"),
        ("72", "72"),
        (" 1,234 ", "1234"),
        ("$5", "5"),
        ("Natalia sold 48/2 = 24.\n#### 72", "72"),
        ("seven", "seven"),
    ],
)
def test_the_truth_is_a_number_or_a_solution_that_ends_with_one(answer: object, number: str) -> None:
    assert truth(answer) == number


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("72", "72", True),
        ("72", "72.0", True),
        ("1,234", "1234.00", True),
        ("$5", "5", True),
        (".5", "0.5", True),
        ("-0", "0", True),
        ("1e3", "1000", True),
        ("72", "73", False),
        ("0.1", "0.10000000000000000001", False),
        ("1.2.3", "1.2.3", True),
        ("seven", " seven ", True),
        ("seven", "7", False),
        ("nan", "nan", False),
        (None, "7", False),
        ("7", None, False),
        (None, None, False),
    ],
)
def test_two_answers_are_the_same_number_or_the_same_text(one: str | None, other: str | None, same: bool) -> None:
    assert same_number(one, other) is same
    assert same_number(other, one) is same


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [  # as its extract_solution does, bugs and all
        ("#### 72", "72", "72"),
        ("#### 1,234", "1234", "1,234"),
        ("#### 72.", "72.", "72."),
        ("#### -3", "-3", "-3"),
        ("#### $72", None, "72"),
        ("####72", None, "72"),
        ("####  72", None, "72"),
        ("#### 1\n#### 2", "2", "2"),
        ("#### 72.0 and 5", "72.0", "5"),
        ("#### 72, so it is.", "72", "72,"),
        ("5, so it is .", None, "5,"),
        ("it is .", None, "."),
        ("no number", None, None),
        ("#### ,", "", ","),
        ("#### 7" + "x" * 300, None, None),
        ("#### 7" + "x" * 294, "7", "7"),
        ("#### 7" + "x" * 295, None, "7"),
        ("#### ٣", None, None),
        ("", None, None),
    ],
)
def test_the_graders_of_verl_read_what_verl_reads(text: str, strict: str | None, flexible: str | None) -> None:
    assert parsed(text, "strict") == strict
    assert parsed(text, "flexible") == flexible


@pytest.mark.parametrize(
    ("text", "truth", "strict", "flexible", "robust"),
    [
        ("#### 72", "72", 1, 1, 1),
        ("The answer is 72", "72", 0, 1, 1),
        ("#### 1,234", "1234", 1, 0, 1),
        ("#### $72", "72", 0, 1, 1),
        ("#### 72.0", "72", 0, 0, 1),
        ("#### 72.", "72", 0, 0, 1),
        ("#### -3", "-3", 1, 1, 1),
        ("#### 1 234", "1234", 0, 0, 1),
        ("#### 73", "72", 0, 0, 0),
        ("72 of 80", "72", 0, 0, 0),
        ("#### 72 of 80", "72", 1, 0, 1),
        ("", "72", 0, 0, 0),
    ],
)
def test_robust_is_right_where_the_graders_of_verl_are_not(
    text: str, truth: str, strict: float, flexible: float, robust: float
) -> None:
    graders: tuple[Grader, ...] = ("strict", "flexible", "robust")
    assert [grade(text, truth, grader) for grader in graders] == [strict, flexible, robust]


def test_the_number_of_a_solution_is_taken_as_verl_does() -> None:
    assert solution_number("1 + 1 = 2\n#### 1,234") == "1234"
    assert solution_number("no mark") is None
