"""Environments that come with turnwise: the calculator, GSM8K."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.conversations import Says, a_row, call, hold
from turnwise.data.numeric_answers import Grader, grade, solution_number, truth
from turnwise.environments.calculator import calculate, calculator
from turnwise.environments.gsm8k import CORRECT, INCORRECT, Gsm8kTool, ground_truth, gsm8k_interaction, gsm8k_with_tool
from turnwise.environments.tools.toolbox import Tool
from turnwise.errors import DataError
from turnwise.rollout.context import Limits
from turnwise.types import ToolCall, Trajectory

# The calculator computes, refuses everything else, and never takes long.


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3+4", "7"),
        ("(3+4)*5", "35"),
        (" 2 * -3 ", "-6"),
        ("10/4", "2.5"),
        ("10/5", "2"),
        ("0.1+0.2", "0.3"),
        ("7//2", "3"),
        ("-7//2", "-4"),
        ("7%3", "1"),
        ("2**10", "1024"),
        ("2**-1", "0.5"),
        ("2**0.5", "1.414213562"),
        ("1/3", "0.3333333333"),
        ("--5", "5"),
        ("+5", "5"),
        ("1e3", "1000"),
        ("1_000+1", "1001"),
        ("123456789*987654321", "121932631112635269"),
        ("10**30", "1" + "0" * 30),
        ("1e-20", "1e-20"),
        ("0*-1.0", "0"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("1/0", "'1/0' divides by zero"),
        ("1//0", "divides by zero"),
        ("5.0 % 0", "divides by zero"),
        ("0**-1", "divides by zero"),
        ("9**9**9", "is too large"),
        ("10**31", "is too large"),
        ("2**101", "is too large"),
        ("1e30*10", "is too large"),
        ("1e30**50", "is too large"),
        ("1e999", "is too large"),
        ("-1e999", "is too large"),
        ("1e999-1e999", "is too large"),
        ("(-8)**0.5", "is not a real number"),
        ("__import__('os').system('true')", "only numbers"),
        ("open('/etc/passwd').read()", "only numbers"),
        ("(lambda: 1)()", "only numbers"),
        ("[1][0]", "only numbers"),
        ("().__class__.__bases__", "only numbers"),
        ("x", "only numbers"),
        ("abs(-1)", "only numbers"),
        ("True + 1", "only numbers"),
        ("'a' * 3", "only numbers"),
        ("None", "only numbers"),
        ("1j", "only numbers"),
        ("1 < 2", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("7 ^ 2", "only numbers"),
        ("1 << 100", "only numbers"),
        ("~1", "only numbers"),
        ("not 1", "only numbers"),
        ("...", "only numbers"),
        ("x = 1", "is not an arithmetic expression"),
        ("import os", "is not an arithmetic expression"),
        ("1; 2", "is not an arithmetic expression"),
        ("3 +", "is not an arithmetic expression"),
        ("3 apples", "is not an arithmetic expression"),
        ("", "is not an arithmetic expression"),
        ("1,000", "only numbers"),
        ("\0", "is not an arithmetic expression"),
        ("\ud800", "is not an arithmetic expression"),
        ("(" * 150 + "1" + ")" * 40, "is not an arithmetic expression"),
        ("1" * 201, "the expression has 201 characters; at most 200 are allowed"),
    ],
)
def test_refusals(expression: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        calculate(expression)


@given(st.text(alphabet="0123456789.+-*/%()e ", max_size=60))
def test_whatever_is_asked_there_is_a_value_or_a_refusal_and_soon(expression: str) -> None:
    started = time.perf_counter()
    with contextlib.suppress(ValueError):
        assert math.isfinite(float(calculate(expression)))
    assert time.perf_counter() - started < 60


def test_as_a_tool_it_tells_the_model_what_is_wrong() -> None:
    tool = Tool.of(calculator)
    assert tool.schema["function"] == {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "The expression, for example (3+4)*5."},
            },
            "required": ["expression"],
        },
    }

    def ask(expression: object) -> tuple[str, str | None]:
        call = ToolCall(id="call_0", name="calculator", arguments={"expression": expression}, text="")
        outcome = asyncio.run(tool.run(call))
        return outcome.content, outcome.error

    assert ask("6*7") == ("42", None)
    assert ask("1/0") == ("Error: '1/0' divides by zero", "raised")
    assert ask(42) == ("Error: expression: Input should be a valid string, got 42", "arguments")


# GSM8K: the tool, the interaction, and the real data where it is.


DATA = Path(__file__).parents[3] / "shared" / "gsm8k"


def talk(*said: str, answer: Any = "72", **options: Any) -> Trajectory:
    return hold(Says(*said), functools.partial(gsm8k_interaction, **options), row=a_row("48 + 24?", answer=answer))


def test_the_texts_are_verls() -> None:
    assert CORRECT == "Your response is correct!"
    assert INCORRECT == "Your response is incorrect! You need to reflect on your answer and try again."


def test_the_interaction_goes_on_until_the_answer_is_right() -> None:
    trajectory = talk("#### 71", "it is 70", "so 72")
    assert [message["content"] for message in trajectory.messages][1:] == [
        "#### 71",
        INCORRECT,
        "it is 70",
        INCORRECT,
        "so 72",
        CORRECT,
    ]
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 1.0]
    assert [turn.info["answer"] for turn in trajectory.turns] == ["71", "70", "72"]
    assert trajectory.stop == "done"


@pytest.mark.parametrize(
    ("grader", "rewards"),
    [("strict", [0.0, 0.0, 0.0, 1.0]), ("flexible", [0.0, 0.0, 1.0]), ("robust", [0.0, 1.0])],
)
def test_the_grader_decides_when_it_is_right(grader: str, rewards: list[float]) -> None:
    said = ["#### 71", "#### 72.0", "I say 72", "72 is it"][
        : len(rewards)
    ]  # verl puts #### in front, so `72 is it` is strict
    assert [turn.reward for turn in talk(*said, grader=grader).turns] == rewards


def test_as_documented_it_reads_the_last_user_and_never_the_model() -> None:
    trajectory = hold(
        Says("#### 1", "#### 1"),
        functools.partial(gsm8k_interaction, last_user=True),
        row=a_row("Is it 72", answer="72"),
    )
    assert [turn.reward for turn in trajectory.turns] == [1.0]  # the question ends in the right number
    limits = Limits(turns=3, tokens_per_turn=400)
    never = hold(
        Says("#### 72", "#### 72", "#### 72"),
        functools.partial(gsm8k_interaction, last_user=True),
        row=a_row("48 + 24?", answer="72"),
        limits=limits,
    )
    assert [turn.reward for turn in never.turns] == [0.0, 0.0, 0.0]
    assert never.stop == "max_turns"


def test_the_tool_says_what_verls_says() -> None:
    async def calls() -> list[tuple[str, float]]:
        tool = Gsm8kTool("72")
        return [await tool.calc_gsm8k_reward(answer) for answer in ("71", "none", "#### 72", "72", "1", "72")]

    assert asyncio.run(calls()) == [
        ("Current parsed answer='71' reward=0.0", -0.05),
        ("Current parsed answer='none' reward=0", -0.05),
        ("Current parsed answer='#### 72' reward=1.0", 0.0),
        ("Current parsed answer='72' reward=1.0", -0.05),
        ("Current parsed answer='1' reward=0.0", -0.05),
        ("Current parsed answer='72' reward=1.0", 0.0),
    ]


def test_a_model_checks_its_answer_and_gives_it() -> None:
    engine = Says(
        call("calc_gsm8k_reward", '{"answer": "71"}'),
        call("calc_gsm8k_reward", '{"answer": "72"}'),
        "It is #### 72",
    )
    row = a_row("?", extra_info={"tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}}})
    trajectory = hold(engine, gsm8k_with_tool, row=row)
    assert trajectory.error is None
    told = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert told == ["Current parsed answer='71' reward=0.0", "Current parsed answer='72' reward=1.0"]
    assert [turn.reward for turn in trajectory.turns] == [-0.05, 0.0, 1.0]
    schema = trajectory.tools[0]["function"]
    assert schema["name"] == "calc_gsm8k_reward"
    assert schema["parameters"]["required"] == ["answer"]
    assert schema["parameters"]["properties"]["answer"]["type"] == "string"


def test_conversations_do_not_share_what_the_tool_remembers() -> None:
    for _ in range(2):
        engine = Says(call("calc_gsm8k_reward", '{"answer": "72"}'), "dunno")
        assert [turn.reward for turn in hold(engine, gsm8k_with_tool, row=a_row("?", answer="72")).turns] == [0.0, 0.0]


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_info": {"interaction_kwargs": {"name": "gsm8k", "query": "?", "ground_truth": "72"}}},
        {"extra_info": {"tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}}}},
        {"extra_info": {"interaction_kwargs": None}, "reward_model": {"style": "rule", "ground_truth": 72}},
        {"answer": "48 + 24 = 72\n#### 72"},
        {"answer": 72},
    ],
)
def test_the_truth_is_found_wherever_the_row_has_it(fields: dict[str, Any]) -> None:
    assert ground_truth(a_row("?", **fields)) == "72"


def test_a_row_without_a_truth_is_reported() -> None:
    with pytest.raises(DataError, match=r"row '1' has no correct answer. .*The columns of the row are: extra_info"):
        ground_truth(a_row("?", extra_info={"index": 1}))
    trajectory = hold(Says("#### 1"), gsm8k_interaction, row=a_row("?"))
    assert trajectory.error is not None
    assert trajectory.error.message.startswith("row '1' has no correct answer")


@pytest.mark.skipif(not DATA.is_dir(), reason="GSM8K is not beside the checkout")
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_solution_of_the_real_data_is_right(split: str) -> None:
    answers = [json.loads(line)["answer"] for line in (DATA / f"{split}.jsonl").read_text("utf-8").splitlines()]
    assert len(answers) == {"train": 7473, "test": 1319}[split]
    wrong: dict[Grader, list[str]] = {"strict": [], "flexible": [], "robust": []}
    for answer in answers:
        number = solution_number(answer)
        assert number is not None
        assert number == truth(answer)
        for grader, found in wrong.items():
            if not grade(answer, number, grader):
                found.append(answer)
    assert wrong["strict"] == wrong["robust"] == []
    # verl's flexible grader keeps the commas that its preprocessing takes out of the truth
    assert all("," in answer.rpartition("#### ")[2] for answer in wrong["flexible"])
    assert len(wrong["flexible"]) == sum("," in answer.rpartition("#### ")[2] for answer in answers)
