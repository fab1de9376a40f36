"""The nouns that cross folders, and errors."""

from __future__ import annotations

import asyncio
import os

import pytest

from support import byte_tokenizer
from support.conversations import Says, a_row, completion, hold
from support.templates import STRANGE_CALLS
from turnwise import errors
from turnwise.chat.renderer import Renderer
from turnwise.environments.tools.toolbox import Tool, Tools
from turnwise.errors import ConfigError, Failed, TurnwiseError, boundary, nearest
from turnwise.types import Completion, Failure, LogprobKind, Sampling, Segment, Stop, Trajectory, Turn

# The nouns: what a segment refuses, what a trajectory says of itself.


def columns(segment: Segment) -> tuple[list[int], list[float], list[int], list[int]]:
    return list(segment.token_ids), list(segment.logprobs), list(segment.turn), list(segment.version)


def test_a_segment_has_four_columns_of_one_length() -> None:
    segment = Segment()
    segment.append_context([11, 12])
    segment.append_completion(0, completion([21, 22], version=3))
    segment.append_context([31])
    segment.append_completion(1, completion([41], version=4))
    assert columns(segment) == (
        [11, 12, 21, 22, 31, 41],
        [0.0, 0.0, -0.125, -0.25, 0.0, -0.125],
        [-1, -1, 0, 0, -1, 1],
        [-1, -1, 3, 3, -1, 4],
    )
    assert len(segment) == 6
    segment.append_context([])
    segment.append_completion(2, completion([]))
    assert len(segment) == 6


@pytest.mark.parametrize(
    ("ids", "logprobs", "versions"),
    [
        ([1, 2], [0.0], [0, 0]),
        ([1, 2], [0.0, 0.0], [0]),
        ([], [0.0], []),
        ([1], [], []),
        ([1, 2**40], [0.0] * 2, [0, 0]),
    ],
)
def test_a_segment_refuses_columns_that_do_not_fit_and_stays_as_it_was(
    ids: list[int], logprobs: list[float], versions: list[int]
) -> None:
    segment = Segment()
    segment.append_context([11])
    answer = Completion(
        token_ids=ids, logprobs=logprobs, versions=versions, finish_reason="stop", logprob_kind=LogprobKind.RAW
    )
    with pytest.raises((ValueError, OverflowError)):
        segment.append_completion(0, answer)
    assert columns(segment) == ([11], [0.0], [-1], [-1])


def a_turn(index: int, text: str, ids: list[int]) -> Turn:
    message = {"role": "assistant", "content": text.upper()}
    return Turn(index=index, message=message, text=text, completion=completion(ids))


def test_a_trajectory_says_what_the_model_said_and_nobody_else() -> None:
    one = Trajectory(id="1/0", group="1", row=a_row())
    assert (one.answer, one.assistant_texts, one.sampled_tokens, one.failed) == ("", [], 0, False)
    one.messages = [{"role": "user", "content": "not mine"}]
    one.turns = [a_turn(0, "a", [1, 2]), a_turn(1, "b", [3])]
    assert (one.answer, one.assistant_texts, one.sampled_tokens) == ("B", ["a", "b"], 3)


def test_failing_keeps_what_was_said_and_takes_what_it_was_worth() -> None:
    for kind, stop in (("engine", Stop.ERROR), ("deadline", Stop.DEADLINE)):
        one = Trajectory(id="1/0", group="1", row=a_row(), turns=[a_turn(0, "a", [1])], reward=1.0, advantages=[0.5])
        one.fail(Failure(kind, "why"))
        assert (one.stop, one.failed, one.error) == (stop, True, Failure(kind, "why"))
        assert (one.reward, one.advantages, one.assistant_texts) == (None, [], ["a"])


def test_which_stops_are_failures() -> None:
    assert [str(stop) for stop in Stop if stop.failed] == ["deadline", "error"]
    assert [str(stop) for stop in Stop if not stop.failed] == [
        "done",
        "max_turns",
        "length",
        "max_tokens",
        "max_response",
        "context",
    ]


def test_which_sampling_leaves_tokens_out() -> None:
    assert not Sampling(temperature=0.3).filtered
    assert [Sampling(top_k=1).filtered, Sampling(top_p=0.99).filtered, Sampling(min_p=0.01).filtered] == [True] * 3


def test_the_reward_of_a_turn_is_the_sum_of_its_parts_by_source() -> None:
    turn = a_turn(0, "a", [1])
    for value, source in ((0.5, "environment"), (0.0, "final_reward"), (1.0, "brevity"), (0.25, "environment")):
        turn.add_reward(value, source)
    assert turn.reward == 1.75
    assert turn.rewards == {"environment": 0.75, "final_reward": 0.0, "brevity": 1.0}


# The one place where somebody else's exception becomes data.


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
