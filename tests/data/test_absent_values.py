"""Nulls that Arrow puts into tool calls and schemas: no model is trained on a null that nobody wrote."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from turnwise.data.conversations import read_conversations
from turnwise.data.rows import read_rows
from turnwise.types import Row
from turnwise.user_code.references import reference_to

WEATHER = {
    "city": {"type": "string"},
    "unit": {"type": "string"},
    "day": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "near": {"type": "object", "properties": {"lake": {"type": "string"}, "sea": {"type": "string"}}},
}


def tool(name: str, properties: Mapping[str, Any], required: list[str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": "Says.", "parameters": parameters}}


def called(arguments: Any, name: str = "weather") -> list[dict[str, Any]]:
    calls = [{"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}]
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "20"},
        {"role": "assistant", "content": "20"},
    ]


def arguments(row: Row) -> Any:
    return row.messages[1]["tool_calls"][0]["function"]["arguments"]


def parquet(path: Path, *rows: Mapping[str, Any]) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), path / "rows.parquet")
    return str(path / "rows.parquet")


def on_disk(path: Path, *rows: Mapping[str, Any]) -> str:
    datasets.Dataset.from_list(list(rows)).save_to_disk(str(path / "rows"))
    return str(path / "rows")


TOOLS = [tool("weather", WEATHER, ["city"])]
OSLO = {"city": "Oslo", "near": {"sea": "Skagerrak"}}
ROME = {"city": "Rome", "unit": "F", "day": 3, "near": {"lake": "Albano"}}


@pytest.mark.parametrize("save", [parquet, on_disk])
@pytest.mark.parametrize(
    ("tools", "count"),
    [({}, 4), ({"tools": json.dumps(TOOLS)}, 4), ({"tools": TOOLS}, None)],
    ids=["no tools", "tools as text", "tools"],
)
def test_calls_have_the_arguments_that_were_written(
    tmp_path: Path, save: Any, tools: dict[str, Any], count: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    source = save(tmp_path, {"messages": called(OSLO), **tools}, {"messages": called(ROME), **tools})
    with caplog.at_level(logging.WARNING):
        assert [arguments(row) for row in read_conversations(source)] == [OSLO, ROME]
    (message,) = caplog.messages
    if count is not None:  # in a column of schemas, Arrow adds nulls too
        assert message.startswith(f"{count} nulls in tool calls and tool schemas were dropped")
        assert ", row 1, weather." in message


@pytest.mark.parametrize("save", [parquet, on_disk])
def test_the_history_of_a_prompt_has_the_arguments_that_were_written(tmp_path: Path, save: Any) -> None:
    source = save(tmp_path, {"prompt": called(OSLO)[:3]}, {"prompt": called(ROME)[:3]})
    assert [arguments(row) for row in read_rows(source)] == [OSLO, ROME]


def test_a_data_set_in_memory_is_arrow_too_and_a_list_of_rows_is_not() -> None:
    written = [OSLO, {"city": "Rome", "unit": None}]
    rows = [{"prompt": called(one)[:3]} for one in written]
    table = reference_to(datasets.Dataset.from_list(rows), name="arrow_rows")
    assert [arguments(row) for row in read_rows(table)] == [OSLO, {"city": "Rome"}]
    assert [arguments(row) for row in read_rows(reference_to(rows, name="plain_rows"))] == written


def test_a_null_that_the_schema_requires_and_allows_was_written(tmp_path: Path) -> None:
    needed = [tool("weather", WEATHER, ["city", "day"])]
    rows = [
        {"messages": called({"city": "Oslo", "day": None}), "tools": needed},
        {"messages": called(ROME), "tools": needed},
    ]
    first, _ = read_conversations(parquet(tmp_path, *rows))
    assert arguments(first) == {"city": "Oslo", "day": None}


def test_lines_of_json_lose_only_nulls_that_the_schema_does_not_allow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"city": "Oslo", "unit": None, "day": None, "other": None, "near": {"lake": None, "sea": "x"}}
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(
            json.dumps(row) + "\n" for row in [{"messages": called(given), "tools": TOOLS}, {"messages": called(given)}]
        )
    )
    with caplog.at_level(logging.WARNING):
        with_schema, without = read_conversations(str(path))
    assert arguments(with_schema) == {"city": "Oslo", "day": None, "other": None, "near": {"sea": "x"}}
    assert arguments(without) == given
    assert caplog.messages[0].startswith("2 nulls in tool calls and tool schemas were dropped")
    assert caplog.messages[0].endswith(f"(the first: {path}:1, weather.unit)")


def test_schemas_have_the_keys_that_were_written(tmp_path: Path) -> None:
    two = [tool("add", {"a": {"type": "integer", "default": 3}}, ["a"])]
    source = parquet(
        tmp_path, {"messages": called(OSLO), "tools": TOOLS}, {"messages": called({"a": 1}, "add"), "tools": two}
    )
    assert [row["tools"] for row in read_conversations(source)] == [TOOLS, two]
    prompts = parquet(tmp_path, {"prompt": "Hi", "tools": TOOLS}, {"prompt": "Hi", "tools": two})
    assert [row["tools"] for row in read_rows(prompts)] == [TOOLS, two]


def test_lists_keep_their_nulls_and_a_data_set_without_nulls_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = parquet(tmp_path, {"messages": called({"cities": ["Oslo", None]})})
    with caplog.at_level(logging.WARNING):
        assert arguments(read_conversations(source)[0]) == {"cities": ["Oslo", None]}
    assert caplog.messages == []
