"""`TURNWISE_LOG=debug` tells the story of one conversation: its tokens, texts, calls, results, rewards, masks and its end."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from support.conversations import a_row
from turnwise.record import read
from turnwise.terminal.conversation import CHOICE, log_conversation, story
from turnwise.types import Failure, Segment, Stop, ToolCall, ToolOutcome, Trajectory, Turn

ROOT = Path(__file__).resolve().parents[2]


def a_trajectory(id: str = "2.0:17/0") -> Trajectory:
    """Two turns: a call with its result, and an answer that a loss mask has left out."""
    call = ToolCall(id="call_0", name="add", arguments={"a": 1}, text="<call>")
    broken = ToolCall(id="call_1", name="", arguments={}, text="<ca", error="the call is not JSON")
    outcomes = (
        ToolOutcome(id="call_0", name="add", arguments={"a": 1}, content="2\x1b]0;owned\x07", seconds=0.25, reward=0.5),
        ToolOutcome(id="call_1", name="", arguments={}, content="Error: not JSON", error="malformed"),
    )
    turns = [
        Turn(
            index=0, message={"role": "assistant", "content": ""}, text="<call>\nand more", calls=(call, broken),
            outcomes=outcomes, reward=0.5, reasoning="hm", seconds_engine=0.5, seconds_environment=0.125,
        ),
        Turn(index=1, message={"role": "assistant", "content": "2"}, text="2", reward=1.0, weight=0.0, finish_reason="length"),
    ]  # fmt: skip
    segment = Segment(
        token_ids=array("l", [1, 2, 3, 10, 11, 4, 12]),
        turn=array("l", [-1, -1, -1, 0, 0, -1, 1]),
        logprobs=array("d", [0, 0, 0, -0.5, -1.5, 0, -0.25]),
        version=array("l", [-1, -1, -1, 2, 2, -1, 3]),
    )
    return Trajectory(
        id=id, group="2.0:17", row=a_row(answer="2"), turns=turns, segments=[segment], stop=Stop.MAX_TURNS,
        reward=1.5, rewards={"turns": 1.5}, advantages=[0.25, -0.5], seconds=1.25,
    )  # fmt: skip


def test_the_story_has_all_parts_in_the_order_of_the_tokens() -> None:
    texts = {1: "<system>", 2: "Add ", 3: "1 and 1.", 4: "\nresult"}
    lines = story(a_trajectory(), decode=lambda ids: "".join(texts[token] for token in ids), step=3)
    assert lines == [
        "conversation 2.0:17/0 of step 3",
        'row: answer="2"',
        "opening: tokens 0 to 2, 3 tokens, not trained on; ids 1 2 3",
        "  | <system>Add 1 and 1.",
        "turn 0: tokens 3 to 4, 2 tokens sampled in 0.50 s with weights of version 2, mean log-probability -1.000, weight 1: "
        "trained on; ids 10 11",
        "  | <call>",
        "  | and more",
        "  ended with finish reason stop",
        "  parsed reasoning:",
        "  | hm",
        '  parsed call call_0: add({"a": 1})',
        "  parsed call call_1: not a valid call: the call is not JSON",
        "  tool add (call_0), 0.25 s, reward 0.5, result:",
        "  | 2\\x1b]0;owned\\x07",
        "  tool  (call_1), 0.00 s, reward 0, error (malformed):",
        "  | Error: not JSON",
        "  reward 0.5; advantage +0.25; the environment took 0.12 s",
        "context: tokens 5 to 5, 1 token, not trained on; ids 4",
        "  | ",
        "  | result",
        "turn 1: tokens 6 to 6, 1 token sampled in 0.00 s with weights of version 3, mean log-probability -0.250, weight 0: "
        "not trained on; ids 12",
        "  | 2",
        "  ended with finish reason length",
        "  reward 1; advantage -0.5; the environment took 0.00 s",
        "mask: 2 of 7 tokens in 1 segments are trained on",
        "reward: 1.5, turns 1.5",
        "end: stop reason max_turns, 2 turns, 1.25 s",
    ]


def test_a_failed_conversation_tells_the_failure_with_its_frames() -> None:
    trajectory = a_trajectory()
    trajectory.fail(Failure("environment", "KeyError: 'x'", "place.py:3 in step"))
    lines = story(trajectory, decode=None)
    assert "error (environment): KeyError: 'x'" in lines
    assert lines[lines.index("error (environment): KeyError: 'x'") + 1] == "  | place.py:3 in step"


def test_one_conversation_is_chosen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    step = [a_trajectory("2.0:17/0"), a_trajectory("2.0:17/1"), a_trajectory("2.1:5/0")]
    log_conversation(step, decode=None, step=3)
    assert caplog.messages == []  # the level is not debug
    with caplog.at_level(logging.DEBUG, "turnwise"):
        for choice in (None, "2.0:17/1", "5/0", "7/0"):
            monkeypatch.delenv(CHOICE, raising=False)
            if choice is not None:
                monkeypatch.setenv(CHOICE, choice)
            log_conversation(step, decode=None, step=3)
    first = [message.splitlines()[0] for message in caplog.messages]
    assert first == [
        "conversation 2.0:17/0 of step 3",
        "conversation 2.0:17/1 of step 3",
        "conversation 2.1:5/0 of step 3",
        f"{CHOICE}=7/0: no conversation of this step has the id; the ids are: 2.0:17/0, 2.0:17/1, 2.1:5/0",
    ]


def turnwise(folder: Path, *words: str, **variables: str) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200", **variables}
    result = subprocess.run(
        [sys.executable, "-m", "turnwise", *words], env=environment, cwd=folder, capture_output=True, text=True
    )
    return result.returncode, result.stdout + result.stderr


def test_a_training_step_is_followed(tmp_path: Path) -> None:
    words = ["demo", "train.steps=1", "train.batch_size=2", "train.group_size=4", "data.eval=null"]
    code, output = turnwise(tmp_path, *words, TURNWISE_LOG="debug")
    assert code == 0
    first = next(iter(read(tmp_path / "runs" / "demo")))
    assert output.count(f"conversation {first.id} of step 1") == 1
    assert "opening: tokens 0 to " in output
    assert "trained on; ids" in output
    assert f"end: stop reason {first.stop}, {len(first.turns)} turns" in output
    assert "| <|im_start|>" in output  # the prompt as the model sees it
    assert "asyncio" not in output  # libraries stay quiet


def test_a_choice_without_debug_is_refused(tmp_path: Path) -> None:
    code, output = turnwise(tmp_path, "show", "runs", TURNWISE_LOG_CONVERSATION="17/0")
    assert code == 1
    assert "TURNWISE_LOG_CONVERSATION has an effect with TURNWISE_LOG=debug only: set both" in output
