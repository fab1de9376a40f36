"""Rows of GSM8K, and numbers as answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.data.gsm8k import main, make_row, preprocess
from turnwise.data.numeric_answers import Grader, final_answer, grade, parsed, same_number, solution_number, truth
from turnwise.data.rows import read_rows
from turnwise.environments.gsm8k import ground_truth
from turnwise.errors import DataError

# GSM8K as it is published, made into rows.


DATA = Path(__file__).parents[3] / "shared" / "gsm8k"

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
