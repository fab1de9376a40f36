"""The one place where somebody else's exception becomes data."""

from __future__ import annotations

import asyncio
import os

import pytest

from support import byte_tokenizer
from support.conversations import Says, hold
from support.templates import STRANGE_CALLS
from turnwise import errors
from turnwise.chat.renderer import Renderer
from turnwise.environments.tools.toolbox import Tool, Tools
from turnwise.errors import ConfigError, Failed, TurnwiseError, boundary, nearest
from turnwise.types import Failure


def caught(error: BaseException, kind: str = "environment") -> Failure:
    with pytest.raises(Failed) as failed, boundary(kind):
        raise error
    assert failed.value.__cause__ is error or failed.value is error
    return failed.value.failure


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("no"), "ValueError: no"),
        (RuntimeError(), "RuntimeError"),
        (KeyError("x"), "KeyError: x"),
        (KeyError("the key 'x'"), "KeyError: the key 'x'"),
        (KeyError(), "KeyError"),
        (KeyError(5), "KeyError: 5"),
        (ConfigError("write it otherwise"), "write it otherwise"),
        (StopIteration(3), "StopIteration: 3"),
        (TimeoutError(), "TimeoutError"),
        (OSError(2, "No such file"), "FileNotFoundError: [Errno 2] No such file"),
    ],
)
def test_what_is_raised_becomes_a_failure_of_its_side(error: Exception, message: str) -> None:
    assert caught(error) == Failure("environment", message)


def test_the_innermost_boundary_wins() -> None:
    with pytest.raises(Failed) as failed, boundary("environment"), boundary("tokens"):
        raise ValueError("no")
    assert failed.value.failure == Failure("tokens", "ValueError: no")
    assert caught(Failed(Failure("row", "too long"))) == Failure("row", "too long")


@pytest.mark.parametrize("error", [asyncio.CancelledError(), KeyboardInterrupt()])
def test_what_ends_the_run_passes(error: BaseException) -> None:
    with pytest.raises(type(error)), boundary("environment"):
        raise error


def test_an_exit_ends_no_more_than_its_conversation() -> None:
    assert caught(SystemExit(3)) == Failure("environment", "the code tried to exit the process (status 3)")


def test_nothing_raised_is_nothing_caught() -> None:
    with boundary("environment"):
        value = 5
    assert value == 5


def test_a_failed_conversation_is_no_error_of_ours() -> None:
    assert not issubclass(Failed, TurnwiseError)
    assert str(Failed(Failure("row", "why"))) == "why"


def test_a_hint_names_what_is_near_and_nothing_else() -> None:
    assert nearest("lrr", ["lr", "steps"]) == "; did you mean 'lr'?"
    assert nearest("colour", ["lr", "steps"]) == ""
    assert nearest("x", []) == ""


def test_an_error_of_ours_that_no_line_of_a_user_led_to_has_no_traceback() -> None:
    tool = Tool.of(print_text)
    trajectory = hold(Says("a"), lambda: Tools([tool]), renderer=Renderer(byte_tokenizer(STRANGE_CALLS)))
    assert trajectory.error is not None
    assert "Set the format (for example tool_format=hermes)" in trajectory.error.message
    assert trajectory.error.traceback == ""


def print_text(text: str) -> str:
    """Print a text."""
    return text


def test_the_files_whose_frames_are_left_out_exist() -> None:
    assert [path for path in errors._MACHINERY if not os.path.exists(path)] == []
