"""Rows: read from every kind of source, refused with the number of the bad one, used in an order that is found again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.data.order import Order
from turnwise.data.rows import read_rows
from turnwise.errors import DataError
from turnwise.types import Row

THREE: list[dict[str, Any]] = [{"prompt": f"{n}+1?", "answer": n + 1} for n in range(3)]


def jsonl(path: Path, *records: Any, name: str = "rows.jsonl") -> str:
    """A file of these lines; a text is written as it is."""
    lines = [record if isinstance(record, str) else json.dumps(record, ensure_ascii=False) for record in records]
    (path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path / name)


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path) -> None:
    # `datasets` keeps an arrow copy of every parquet file
    datasets.config.HF_DATASETS_CACHE = tmp_path / "cache"


def refused(source: str, **options: Any) -> str:
    with pytest.raises(DataError) as error:
        read_rows(source, **options)
    return str(error.value)


# sources


def test_jsonl(tmp_path: Path) -> None:
    source = jsonl(tmp_path, THREE[0], "", THREE[1], "   ", THREE[2])
    assert read_rows(source) == [
        Row(id="1", messages=[{"role": "user", "content": "0+1?"}], fields={"answer": 1}),
        Row(id="3", messages=[{"role": "user", "content": "1+1?"}], fields={"answer": 2}),
        Row(id="5", messages=[{"role": "user", "content": "2+1?"}], fields={"answer": 3}),
    ]


@pytest.mark.parametrize("name", ["rows.json", "rows.ndjson"])
def test_other_names_of_jsonl(tmp_path: Path, name: str) -> None:
    assert [row["answer"] for row in read_rows(jsonl(tmp_path, *THREE, name=name))] == [1, 2, 3]


def test_jsonl_with_characters_that_look_like_line_breaks(tmp_path: Path) -> None:
    text = "a\u2028b\x85c\x0bd"
    assert read_rows(jsonl(tmp_path, {"prompt": text}))[0].messages[0]["content"] == text


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list(THREE).to_parquet(str(path))
    rows = read_rows(str(path))
    assert [(row.id, row.messages[0]["content"], row["answer"]) for row in rows] == [
        ("1", "0+1?", 1),
        ("2", "1+1?", 2),
        ("3", "2+1?", 3),
    ]


def test_parquet_messages_have_only_their_own_keys(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    prompt = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yo", "name": "bot"},
    ]
    datasets.Dataset.from_list([{"prompt": prompt}]).to_parquet(str(path))
    assert read_rows(str(path))[0].messages == prompt


def test_a_directory_saved_by_datasets_with_and_without_splits(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    table = datasets.Dataset.from_list(THREE)
    table.save_to_disk(str(one))
    datasets.DatasetDict({"train": table, "test": table.select([2])}).save_to_disk(str(two))
    assert [row["answer"] for row in read_rows(str(one))] == [1, 2, 3]
    assert [row["answer"] for row in read_rows(str(two))] == [1, 2, 3]
    assert [row["answer"] for row in read_rows(str(two), split="test")] == [3]
    message = refused(str(two), split="tests")
    assert "it has no split 'tests'; did you mean 'test'?; its splits are: train, test" in message


# columns, messages, the system prompt


def test_columns_are_mapped_and_the_others_kept(tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"question": "1+1?", "solution": "2", "level": 3})
    (row,) = read_rows(source, columns={"prompt": "question", "answer": "solution"})
    assert row.messages == [{"role": "user", "content": "1+1?"}]
    assert row.fields == {"level": 3, "answer": "2"}
    (row,) = read_rows(source, columns={"prompt": "question", "id": "level"})
    assert (row.id, row.fields) == ("3", {"solution": "2"})


def test_a_prompt_is_a_text_or_messages(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rows = read_rows(jsonl(tmp_path, {"prompt": "Hi"}, {"prompt": messages}))
    assert [row.messages for row in rows] == [[messages[1]], messages]


def test_the_system_prompt_is_put_before_prompts_that_have_none(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "Hi"}]
    rows = read_rows(jsonl(tmp_path, {"prompt": "Hi"}, {"prompt": own}), system="Yours.")
    assert [row.messages[0] for row in rows] == [{"role": "system", "content": "Yours."}, own[0]]
    assert [len(row.messages) for row in rows] == [2, 2]


def test_only_the_first_rows(tmp_path: Path) -> None:
    source = jsonl(tmp_path, *THREE[:2], "this is never read")
    assert [row.id for row in read_rows(source, limit=2)] == ["1", "2"]
    assert len(read_rows(jsonl(tmp_path, *THREE), limit=99)) == 3


def test_a_missing_column_of_a_row_is_told_when_it_is_asked_for(tmp_path: Path) -> None:
    (row,) = read_rows(jsonl(tmp_path, {"prompt": "Hi", "b": 1, "a": 2}))
    with pytest.raises(KeyError, match=r"row '1' has no column 'answer'; its columns are: a, b\. Add the column"):
        row["answer"]


# what is refused


def test_a_line_that_is_no_json_is_told_with_its_number(tmp_path: Path) -> None:
    source = jsonl(tmp_path, THREE[0], "", '{"prompt": "x"')
    assert refused(source) == (
        f"{source}:3: this line is not JSON (Expecting ',' delimiter at column 15): '{{\"prompt\": \"x\"'"
    )
    source = jsonl(tmp_path, THREE[0], "[1, 2]")
    assert refused(source) == f"{source}:2: a row must be a JSON object; this is a list"


def test_a_file_that_is_no_text_is_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "caf\xe9"}\n')
    assert refused(str(path)) == f"{path}:1: this line is not UTF-8 (invalid continuation byte at byte 16)"
    path.write_bytes(b"PAR1 garbage")
    broken = path.rename(path.with_suffix(".parquet"))
    assert f"'{broken}' could not be loaded" in refused(str(broken))


def test_a_missing_file_or_directory_is_told_with_its_whole_path(tmp_path: Path) -> None:
    for name in ("no.jsonl", "no.parquet"):
        assert refused(str(tmp_path / name)) == (
            f"there is no file {tmp_path / name}; paths are relative to the directory you run from"
        )
    assert refused(str(tmp_path / "no")).startswith(f"there is no directory {tmp_path / 'no'}; data.train takes")
    assert refused("./nowhere").startswith(f"there is no directory {Path.cwd() / 'nowhere'}")


def test_a_directory_that_is_none_of_datasets_is_told(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    message = refused(str(tmp_path / "rows"))
    assert f"'{tmp_path / 'rows'}' could not be loaded" in message
    assert "a directory saved by `datasets`" in message


def test_empty_data_is_told(tmp_path: Path) -> None:
    source = jsonl(tmp_path, "", "  ")
    assert refused(source) == f"{source} has no rows; at least one is needed"


def test_a_missing_column_is_told_with_the_nearest_and_the_fix(tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"question": "1+1?", "answers": 2})
    assert refused(source) == (
        f"{source}:1 has no column 'prompt'; its columns are: question, answers. "
        f"Set the right column: data.columns.prompt=<column>"
    )
    assert refused(source, columns={"prompt": "question", "answer": "answer"}) == (
        f"{source}:1 has no column 'answer'; did you mean 'answers'?; its columns are: question, answers. "
        f"Set the right column: data.columns.answer=<column>"
    )


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        (5, "the prompt must be a text or a list of messages; it is 5"),
        (None, "the prompt must be a text or a list of messages; it is None"),
        ([], "the prompt must be a text or a list of messages; it is []"),
        ({"role": "user"}, "the prompt must be a text or a list of messages; it is {'role': 'user'}"),
        (["Hi"], "a message needs `role` and `content`; this message is 'Hi'"),
        ([{"content": "Hi"}], "a message needs `role` and `content`; this message is {'content': 'Hi'}"),
        ([{"role": "user"}], "a message needs `role` and `content`; this message is {'role': 'user'}"),
        ([{"role": 1, "content": "Hi"}], "a message needs `role` and `content`"),
    ],
)
def test_a_prompt_that_is_none_is_told_with_its_line(tmp_path: Path, prompt: Any, problem: str) -> None:
    source = jsonl(tmp_path, THREE[0], {"prompt": prompt})
    assert refused(source).startswith(f"{source}:2: {problem}")


def test_rows_of_one_id_are_told_with_both_places(tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"prompt": "a", "key": 7}, {"prompt": "b", "key": 8}, {"prompt": "c", "key": "7"})
    assert refused(source, columns={"id": "key"}) == (
        f"{source}:1 and {source}:3 both have the id '7'; ids must be unique. If no column is mapped to `id`, rows are numbered"
    )


# the order


def indices(order: Order, position: int, count: int) -> list[int]:
    return [index for _, index in order.take(position, count)]


def test_every_row_is_used_once_an_epoch_and_epochs_are_shuffled_anew() -> None:
    order = Order(10, seed=3)
    first, second = order.take(0, 10), order.take(10, 10)
    assert [epoch for epoch, _ in first + second] == [0] * 10 + [1] * 10
    assert sorted(index for _, index in first) == sorted(index for _, index in second) == list(range(10))
    assert [index for _, index in first] != [index for _, index in second]
    assert [index for _, index in first] != list(range(10))


def test_the_order_depends_on_the_seed_alone() -> None:
    assert indices(Order(50, seed=1), 0, 120) == indices(Order(50, seed=1), 0, 120)
    assert indices(Order(50, seed=1), 0, 50) != indices(Order(50, seed=2), 0, 50)
    assert indices(Order(5, seed=0), 0, 10) == [2, 3, 1, 0, 4, 3, 0, 2, 4, 1]


def test_without_shuffling_rows_come_as_they_are() -> None:
    assert Order(3, seed=9, shuffle=False).take(2, 5) == [(0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


@given(length=st.integers(1, 7), position=st.integers(0, 30), count=st.integers(0, 20), step=st.integers(1, 5))
def test_the_order_is_gone_on_with_from_one_number(length: int, position: int, count: int, step: int) -> None:
    whole = Order(length, seed=5).take(0, position + count)
    assert Order(length, seed=5).take(position, count) == whole[position:]
    pieces, order = [], Order(length, seed=5)
    for start in range(0, position + count, step):
        pieces += order.take(start, min(step, position + count - start))
    assert pieces == whole
