"""Simulated users."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from support.conversations import Says, a_row, hold
from turnwise.environments.users import ScriptedUser, checked_answer

WRONG = "That is not right. Read the question again and have another try."


def test_a_scripted_user_says_its_lines_and_leaves() -> None:
    trajectory = hold(Says("a", "b", "c"), lambda: ScriptedUser(["one", "two"]))
    assert [message["content"] for message in trajectory.messages] == ["Hi", "a", "one", "b", "two", "c"]
    assert trajectory.stop == "done"
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 0.0]


def test_a_scripted_user_without_lines_listens_once() -> None:
    assert hold(Says("a"), ScriptedUser).assistant_texts == ["a"]


def test_the_lines_are_a_list_and_not_one_text() -> None:
    with pytest.raises(TypeError, match="one for each message; got the single text 'one'"):
        ScriptedUser("one")


def check(*said: str, answer: Any = 72, **options: Any) -> list[tuple[float, dict[str, Any], str]]:
    """Reward, info and the message after it, of each turn of a conversation with the checking user."""
    trajectory = hold(Says(*said), functools.partial(checked_answer, **options), row=a_row("?", answer=answer))
    assert (trajectory.stop, trajectory.error) == ("done", None)
    heard = [message["content"] for message in trajectory.messages if message["role"] == "user"][1:]
    heard += [""] * (len(trajectory.turns) - len(heard))
    return [(turn.reward, turn.info, after) for turn, after in zip(trajectory.turns, heard, strict=True)]


def test_a_right_answer_at_the_first_try_earns_one() -> None:
    assert check("It is #### 72") == [(1.0, {"answer": "72", "try": 1}, "")]
    assert check("#### $72.0", answer="24+48 = 72\n#### 72") == [(1.0, {"answer": "72.0", "try": 1}, "")]


def test_a_right_answer_after_a_wrong_one_earns_a_part() -> None:
    assert check("#### 71", "#### 72") == [(0.0, {}, WRONG), (0.5, {"answer": "72", "try": 2}, "")]
    assert check("1", "2", "#### 72", tries=3, retry_factor=0.1, wrong="No.") == [
        (0.0, {}, "No."),
        (0.0, {}, "No."),
        (0.1**2, {"answer": "72", "try": 3}, ""),
    ]


def test_after_the_last_try_the_user_gives_up() -> None:
    assert check("#### 71", "#### 70") == [(0.0, {}, WRONG), (0.0, {"answer": "70", "try": 2}, "")]
    assert check("dunno", tries=1) == [(0.0, {"answer": None, "try": 1}, "")]


def test_how_the_answer_is_found_is_an_option() -> None:
    assert check("it is 72", tries=1) == [(0.0, {"answer": None, "try": 1}, "")]
    assert check("it is 72", tries=1, method="flexible") == [(1.0, {"answer": "72", "try": 1}, "")]


def test_a_row_without_the_answer_is_reported_with_the_fix() -> None:
    trajectory = hold(Says("#### 72"), checked_answer, row=a_row("?", solution=72))
    assert trajectory.error is not None
    assert trajectory.error.kind == "environment"
    assert trajectory.error.message == (
        "KeyError: row '1' has no column 'answer'; its columns are: solution. "
        "Add the column to the data, or map another column to it: data.columns.answer=<column>"
    )
