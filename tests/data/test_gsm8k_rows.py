"""GSM8K as it is published, made into rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.data.gsm8k import main, make_row, preprocess
from turnwise.data.rows import read_rows
from turnwise.environments.gsm8k import ground_truth
from turnwise.errors import DataError

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
