"""Environments and rows that come with turnwise: the calculator, GSM8K and its numbers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.conversations import Says, a_row, call, hold
from turnwise.data.gsm8k import main, make_row, preprocess
from turnwise.data.numeric_answers import Grader, final_answer, grade, parsed, same_number, solution_number, truth
from turnwise.data.rows import read_rows
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


# Rows of GSM8K, and numbers as answers


# GSM8K as it is published, made into rows.


ANSWER = "Half of 2,468 is <<2468/2=1234>>1234.\n#### 1,234"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    lines = [{"question": "Half of 2,468?", "answer": ANSWER}, {"question": "1 + 1?", "answer": "#### 2"}]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n", encoding="utf-8")
    return path


def test_rows_for_the_interaction_are_those_of_verl() -> None:
    row = make_row("Half of 2,468?", ANSWER, split="train", index=0)
    assert row["prompt"][0]["role"] == "system"
    assert {**row, "prompt": row["prompt"][1:]} == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": "Half of 2,468? Let's think step by step and output the final answer after `####`.",
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1234"},
        "extra_info": {
            "split": "train",
            "index": 0,
            "answer": ANSWER,
            "question": "Half of 2,468?",
            "interaction_kwargs": {"name": "gsm8k", "query": "Half of 2,468?", "ground_truth": "1234"},
        },
    }


def test_rows_for_the_tool_are_those_of_verl() -> None:
    row = make_row("1 + 1?", "#### 2", split="test", index=7, kind="tool")
    assert list(row) == ["data_source", "prompt", "ability", "reward_model", "extra_info", "agent_name"]
    assert row["agent_name"] == "tool_agent"
    assert row["extra_info"] == {
        "split": "test",
        "index": 7,
        "answer": "#### 2",
        "question": "1 + 1?",
        "need_tools_kwargs": True,
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "2"}}},
    }


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
@pytest.mark.parametrize("kind", ["interaction", "tool"])
def test_what_is_written_is_read_as_rows(source: Path, tmp_path: Path, format: str, kind: str) -> None:
    out = tmp_path / "out" / "deep"
    assert main(["--source", str(source), "--out", str(out), "--format", format, "--kind", kind]) == 0
    rows = read_rows(str(out / f"train.{format}"))
    assert [ground_truth(row) for row in rows] == ["1234", "2"]
    assert [message["role"] for message in rows[0].messages] == ["system", "user"]
    assert rows[1]["extra_info"]["index"] == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "train.jsonl:1: this line is not JSON"),
        ("[]", "train.jsonl:1: a row needs the texts `question` and `answer`"),
        ('{"question": "?"}', "train.jsonl:1: a row needs the texts `question` and `answer`"),
        ('{"question": "?", "answer": "72"}', "train.jsonl:1: the answer has no `#### number`: '72'"),
        ("", "has no rows; at least one is needed"),
    ],
)
def test_a_source_that_is_none_is_told_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        preprocess(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_source_is_not_overwritten(source: Path) -> None:
    before = source.read_bytes()
    with pytest.raises(DataError, match="would overwrite the source"):
        preprocess(source, source.parent)
    assert source.read_bytes() == before
    with pytest.raises(DataError, match="could not be read: No such file"):
        preprocess(source.parent / "none.jsonl", source.parent)
    with pytest.raises(DataError, match="could not be written: "):
        preprocess(source, source / "below")


@pytest.mark.skipif(not DATA.is_dir(), reason="GSM8K is not beside the checkout")
def test_the_real_data_become_rows(tmp_path: Path) -> None:
    path, count = preprocess(DATA / "test.jsonl", tmp_path)
    assert count == 1319
    assert len(read_rows(str(path))) == 1319


@pytest.mark.slow
def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "turnwise.data.gsm8k",
        "--source",
        str(tmp_path / "no.jsonl"),
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("turnwise: ")
    assert "could not be read: No such file" in done.stderr


def test_a_saved_data_set_is_a_source_too(tmp_path: Path) -> None:
    import datasets

    rows = [{"question": "Half of 2,468?", "answer": ANSWER}, {"question": "1 + 1?", "answer": "#### 2"}]
    datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)}).save_to_disk(str(tmp_path / "saved"))
    path, count = preprocess(tmp_path / "saved", tmp_path / "out", split="test", kind="tool")
    assert (path, count) == (tmp_path / "out" / "test.jsonl", 2)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        make_row(row["question"], row["answer"], split="test", index=n, kind="tool") for n, row in enumerate(rows)
    ]
    with pytest.raises(DataError, match="it has no split 'tset'; did you mean 'test'"):
        preprocess(tmp_path / "saved", tmp_path / "out", split="tset")


# Numbers in what a model says.


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
