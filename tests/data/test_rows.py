"""Rows: columns, splits and messages become what a conversation starts from; images in all forms in which users give them."""

from __future__ import annotations

import base64
import io
import json
import logging
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from support.vision import picture
from turnwise.data.conversations import read_conversations
from turnwise.data.images import digest, load_image, media_kind, media_value, probe_image
from turnwise.data.order import Order
from turnwise.data.rows import read_rows
from turnwise.errors import DataError
from turnwise.record.trajectory_json import MediaStore
from turnwise.types import Row
from turnwise.user_code.references import reference_to

# Rows: read from every kind of source, refused with the number of the bad one, used in an order that is found again.


THREE: list[dict[str, Any]] = [{"prompt": f"{n}+1?", "answer": n + 1} for n in range(3)]


def jsonl(path: Path, *records: Any, name: str = "rows.jsonl") -> str:
    """A file of these lines; a text is written as it is."""
    lines = [record if isinstance(record, str) else json.dumps(record, ensure_ascii=False) for record in records]
    (path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path / name)


@pytest.fixture
def _caches(tmp_path: Path) -> None:
    import datasets

    # `datasets` keeps an arrow copy of every parquet file
    datasets.config.HF_DATASETS_CACHE = tmp_path / "cache"


def refused(source: str, **options: Any) -> str:
    with pytest.raises(DataError) as error:
        read_rows(source, **options)
    return str(error.value)


# sources


@pytest.mark.usefixtures("_caches")
def test_jsonl(tmp_path: Path) -> None:
    source = jsonl(tmp_path, THREE[0], "", THREE[1], "   ", THREE[2])
    assert read_rows(source) == [
        Row(id="1", messages=[{"role": "user", "content": "0+1?"}], fields={"answer": 1}),
        Row(id="3", messages=[{"role": "user", "content": "1+1?"}], fields={"answer": 2}),
        Row(id="5", messages=[{"role": "user", "content": "2+1?"}], fields={"answer": 3}),
    ]


@pytest.mark.usefixtures("_caches")
@pytest.mark.parametrize("name", ["rows.json", "rows.ndjson"])
def test_other_names_of_jsonl(tmp_path: Path, name: str) -> None:
    assert [row["answer"] for row in read_rows(jsonl(tmp_path, *THREE, name=name))] == [1, 2, 3]


@pytest.mark.usefixtures("_caches")
def test_jsonl_with_characters_that_look_like_line_breaks(tmp_path: Path) -> None:
    text = "a\u2028b\x85c\x0bd"
    assert read_rows(jsonl(tmp_path, {"prompt": text}))[0].messages[0]["content"] == text


@pytest.mark.usefixtures("_caches")
def test_parquet(tmp_path: Path) -> None:
    import datasets

    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list(THREE).to_parquet(str(path))
    rows = read_rows(str(path))
    assert [(row.id, row.messages[0]["content"], row["answer"]) for row in rows] == [
        ("1", "0+1?", 1),
        ("2", "1+1?", 2),
        ("3", "2+1?", 3),
    ]


@pytest.mark.usefixtures("_caches")
def test_parquet_messages_have_only_their_own_keys(tmp_path: Path) -> None:
    import datasets

    path = tmp_path / "rows.parquet"
    prompt = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yo", "name": "bot"},
    ]
    datasets.Dataset.from_list([{"prompt": prompt}]).to_parquet(str(path))
    assert read_rows(str(path))[0].messages == prompt


@pytest.mark.usefixtures("_caches")
def test_a_directory_saved_by_datasets_with_and_without_splits(tmp_path: Path) -> None:
    import datasets

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


@pytest.mark.usefixtures("_caches")
def test_columns_are_mapped_and_the_others_kept(tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"question": "1+1?", "solution": "2", "level": 3})
    (row,) = read_rows(source, columns={"prompt": "question", "answer": "solution"})
    assert row.messages == [{"role": "user", "content": "1+1?"}]
    assert row.fields == {"level": 3, "answer": "2"}
    (row,) = read_rows(source, columns={"prompt": "question", "id": "level"})
    assert (row.id, row.fields) == ("3", {"solution": "2"})
    (row,) = read_rows(source, columns={"prompt": "question", "source": "level"})
    assert (row.source, row.fields) == ("3", {"solution": "2", "source": 3})
    rows = read_rows(
        [source, jsonl(tmp_path, {"question": "?", "level": 4}, name="b.jsonl")],
        columns={"prompt": "question", "source": "level"},
    )
    assert [row.source for row in rows] == [source, str(tmp_path / "b.jsonl")]  # data sets are kinds, too


@pytest.mark.usefixtures("_caches")
def test_a_prompt_is_a_text_or_messages(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rows = read_rows(jsonl(tmp_path, {"prompt": "Hi"}, {"prompt": messages}))
    assert [row.messages for row in rows] == [[messages[1]], messages]


@pytest.mark.usefixtures("_caches")
def test_the_system_prompt_is_put_before_prompts_that_have_none(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "Hi"}]
    rows = read_rows(jsonl(tmp_path, {"prompt": "Hi"}, {"prompt": own}), system="Yours.")
    assert [row.messages[0] for row in rows] == [{"role": "system", "content": "Yours."}, own[0]]
    assert [len(row.messages) for row in rows] == [2, 2]


@pytest.mark.usefixtures("_caches")
def test_only_the_first_rows(tmp_path: Path) -> None:
    source = jsonl(tmp_path, *THREE[:2], "this is never read")
    assert [row.id for row in read_rows(source, limit=2)] == ["1", "2"]
    assert len(read_rows(jsonl(tmp_path, *THREE), limit=99)) == 3


@pytest.mark.usefixtures("_caches")
def test_a_missing_column_of_a_row_is_told_when_it_is_asked_for(tmp_path: Path) -> None:
    (row,) = read_rows(jsonl(tmp_path, {"prompt": "Hi", "b": 1, "a": 2}))
    with pytest.raises(KeyError, match=r"row '1' has no column 'answer'; its columns are: a, b\. Add the column"):
        row["answer"]
    with pytest.raises(KeyError, match=r"row '1': its id is row\.id; row\[\.\.\.\] is for the columns: a, b"):
        row["id"]
    assert ("a" in row, "answer" in row, "id" in row, 0 in row) == (True, False, False, False)
    assert dict.fromkeys(row) == {"b": None, "a": None}


# what is refused


@pytest.mark.usefixtures("_caches")
def test_a_line_that_is_no_json_is_told_with_its_number(tmp_path: Path) -> None:
    source = jsonl(tmp_path, THREE[0], "", '{"prompt": "x"')
    assert refused(source) == (
        f"{source}:3: this line is not JSON (Expecting ',' delimiter at column 15): '{{\"prompt\": \"x\"'"
    )
    source = jsonl(tmp_path, THREE[0], "[1, 2]")
    assert refused(source) == f"{source}:2: a row must be a JSON object; this is a list"


@pytest.mark.usefixtures("_caches")
def test_a_file_that_is_no_text_is_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "caf\xe9"}\n')
    assert refused(str(path)) == f"{path}:1: this line is not UTF-8 (invalid continuation byte at byte 16)"
    path.write_bytes(b"PAR1 garbage")
    broken = path.rename(path.with_suffix(".parquet"))
    assert f"'{broken}' could not be loaded" in refused(str(broken))


@pytest.mark.usefixtures("_caches")
def test_a_missing_file_or_directory_is_told_with_its_whole_path(tmp_path: Path) -> None:
    for name in ("no.jsonl", "no.parquet"):
        assert refused(str(tmp_path / name)) == (
            f"there is no file {tmp_path / name}; paths are relative to the directory you run from"
        )
    assert refused(str(tmp_path / "no")).startswith(f"there is no directory {tmp_path / 'no'}; data.train takes")
    assert refused("./nowhere").startswith(f"there is no directory {Path.cwd() / 'nowhere'}")


@pytest.mark.usefixtures("_caches")
def test_a_directory_that_is_none_of_datasets_is_told(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    message = refused(str(tmp_path / "rows"))
    assert f"'{tmp_path / 'rows'}' could not be loaded" in message
    assert "a directory saved by `datasets`" in message


@pytest.mark.usefixtures("_caches")
def test_empty_data_is_told(tmp_path: Path) -> None:
    source = jsonl(tmp_path, "", "  ")
    assert refused(source) == f"{source} has no rows; at least one is needed"


@pytest.mark.usefixtures("_caches")
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


@pytest.mark.usefixtures("_caches")
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


@pytest.mark.usefixtures("_caches")
def test_rows_of_one_id_are_told_with_both_places(tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"prompt": "a", "key": 7}, {"prompt": "b", "key": 8}, {"prompt": "c", "key": "7"})
    assert refused(source, columns={"id": "key"}) == (
        f"{source}:1 and {source}:3 both have the id '7'; ids must be unique. If no column is mapped to `id`, rows are numbered"
    )


# the order


def indices(order: Order, position: int, count: int) -> list[int]:
    return [index for _, index in order.take(position, count)]


@pytest.mark.usefixtures("_caches")
def test_every_row_is_used_once_an_epoch_and_epochs_are_shuffled_anew() -> None:
    order = Order(10, seed=3)
    first, second = order.take(0, 10), order.take(10, 10)
    assert [epoch for epoch, _ in first + second] == [0] * 10 + [1] * 10
    assert sorted(index for _, index in first) == sorted(index for _, index in second) == list(range(10))
    assert [index for _, index in first] != [index for _, index in second]
    assert [index for _, index in first] != list(range(10))


@pytest.mark.usefixtures("_caches")
def test_the_order_depends_on_the_seed_alone() -> None:
    assert indices(Order(50, seed=1), 0, 120) == indices(Order(50, seed=1), 0, 120)
    assert indices(Order(50, seed=1), 0, 50) != indices(Order(50, seed=2), 0, 50)
    assert indices(Order(5, seed=0), 0, 10) == [2, 3, 1, 0, 4, 3, 0, 2, 4, 1]


@pytest.mark.usefixtures("_caches")
def test_without_shuffling_rows_come_as_they_are() -> None:
    assert Order(3, seed=9, shuffle=False).take(2, 5) == [(0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


@pytest.mark.usefixtures("_caches")
@given(length=st.integers(1, 7), position=st.integers(0, 30), count=st.integers(0, 20), step=st.integers(1, 5))
def test_the_order_is_gone_on_with_from_one_number(length: int, position: int, count: int, step: int) -> None:
    whole = Order(length, seed=5).take(0, position + count)
    assert Order(length, seed=5).take(position, count) == whole[position:]
    pieces, order = [], Order(length, seed=5)
    for start in range(0, position + count, step):
        pieces += order.take(start, min(step, position + count - start))
    assert pieces == whole


# Nulls that Arrow puts into tool calls and schemas: no model is trained on a null that nobody wrote.


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
    import datasets

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
    import datasets

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


# Images in every form that people give them in, in rows where the prompt says, and what is refused


# Images in every form that people give them in, and what is refused.


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def test_the_same_image_comes_out_of_every_form(tmp_path: Path) -> None:
    image = picture(16, 24)
    file = tmp_path / "a picture.png"
    image.save(file)
    uri = f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"
    forms = [
        image,
        file,
        str(file),
        file.as_uri(),
        uri,
        png(image),
        {"bytes": png(image), "path": None},
        {"bytes": None, "path": str(file)},
        {"type": "image_url", "image_url": {"url": uri}},
    ]
    for form in forms:
        probe_image(form, where="it")
        assert digest(load_image(form, where="it")) == digest(image)
    assert digest(load_image(file.name, where="it", folder=tmp_path)) == digest(image)


def test_an_image_is_turned_upright_and_made_rgb(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held on its side
    picture(16, 8).save(tmp_path / "side.jpg", exif=exif)
    assert load_image(tmp_path / "side.jpg", where="it").size == (8, 16)
    clear = Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    assert load_image(png(clear), where="it").getpixel((0, 0)) == (255, 255, 255)
    assert load_image(Image.new("L", (2, 2), 7), where="it").mode == "RGB"


def test_what_is_no_image_is_refused_with_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image at all")
    cases = [
        (str(tmp_path / "missing.png"), "there is no image file"),
        (str(tmp_path / "text.png"), "it is not an image that PIL can read"),
        (b"no image", r"it \(8 bytes\) cannot be read"),
        (7, "it is 7; an image is a PIL image, a path"),
        ("https://example.org/a.png", "Download the image first"),
        ("data:text/plain,hello", "begins with data:image/"),
        ("data:image/png;base64,!!!", "cannot be read as an image"),
        ({"bytes": None, "path": None}, "contains no image"),
    ]
    for value, message in cases:
        with pytest.raises(DataError, match=message):
            load_image(value, where="it")


def test_a_file_that_is_cut_short_is_refused() -> None:
    with pytest.raises(DataError, match="cannot be read as an image"):
        load_image(png(picture(64, 64))[:-2000], where="it")


def test_a_small_file_that_unpacks_to_a_huge_image_is_refused_unopened() -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    for side in (9_000, 50_000):  # beyond our bound, and beyond PIL's own
        header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
        with pytest.raises(DataError, match=r"9000 x 9000 pixels, more than|cannot be read as an image"):
            probe_image(bomb, where="it")


def test_a_digest_names_the_content() -> None:
    assert digest(picture(seed=1)) == digest(picture(seed=1).copy())
    assert digest(picture(seed=1)) != digest(picture(seed=2))
    assert digest(Image.new("RGB", (4, 2))) != digest(Image.new("RGB", (2, 4)))


def test_parts_of_messages_are_told_apart() -> None:
    assert [media_kind({"type": kind}) for kind in ("image", "image_url", "video", "text")] == [
        "image",
        "image",
        "video",
        None,
    ]
    assert media_value({"type": "image_url", "image_url": "a.png"}) == "a.png"
    assert media_value({"type": "image", "base64": base64.b64encode(b"xy").decode()}) == b"xy"
    assert media_value({"type": "image"}) is None


# Images in a row: put where the prompt says, found beside the data file, refused at start-up where there is none.


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[None]:
    import datasets

    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path / "cache"
    yield
    datasets.config.HF_DATASETS_CACHE = before


def read(folder: Path, *records: dict[str, Any], **options: Any) -> list[Row]:
    for n in range(3):
        picture(16, 16, seed=n).save(folder / f"{n}.png")
    (folder / "rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_rows(str(folder / "rows.jsonl"), **options)


@pytest.mark.usefixtures("cache")
def test_placeholders_become_parts_in_order(tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"prompt": "<image>One and <image> two.", "images": ["0.png", "1.png"], "answer": "x"})
    (message,) = row.messages
    assert message["content"] == [
        {"type": "image", "image": str(tmp_path / "0.png")},
        {"type": "text", "text": "One and "},
        {"type": "image", "image": str(tmp_path / "1.png")},
        {"type": "text", "text": " two."},
    ]
    assert row["images"] == [str(tmp_path / "0.png"), str(tmp_path / "1.png")]
    assert row["answer"] == "x"


@pytest.mark.usefixtures("cache")
def test_one_image_need_not_be_a_list_and_columns_can_be_mapped(tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"prompt": "What is <image>?", "picture": "0.png"}, columns={"images": "picture"})
    assert [part["type"] for part in row.messages[0]["content"]] == ["text", "image", "text"]


@pytest.mark.usefixtures("cache")
def test_places_may_be_in_any_message_and_may_be_parts(tmp_path: Path) -> None:
    prompt = [
        {"role": "system", "content": "Look at <image>."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "or <image>"}]},
        {"role": "assistant", "content": "Well"},
    ]
    (row,) = read(tmp_path, {"prompt": prompt, "images": ["0.png", "1.png", "2.png"]}, system="ignored")
    system, user, assistant = row.messages
    assert system["content"][1] == {"type": "image", "image": str(tmp_path / "0.png")}
    assert user["content"] == [
        {"type": "image", "image": str(tmp_path / "1.png")},
        {"type": "text", "text": "or "},
        {"type": "image", "image": str(tmp_path / "2.png")},
    ]
    assert assistant["content"] == "Well"


@pytest.mark.usefixtures("cache")
def test_an_image_may_stand_in_its_message(tmp_path: Path) -> None:
    content = [{"type": "image", "image": "2.png"}, {"type": "image_url", "image_url": {"url": "1.png"}}]
    (row,) = read(tmp_path, {"prompt": [{"role": "user", "content": content}]})
    assert row.messages[0]["content"] == [
        {"type": "image", "image": str(tmp_path / "2.png")},
        {"type": "image", "image": str(tmp_path / "1.png")},
    ]


@pytest.mark.usefixtures("cache")
def test_images_without_any_place_stand_at_the_start_of_the_first_user_message(tmp_path: Path) -> None:
    told = [{"role": "system", "content": "Look."}, {"role": "user", "content": "Which?"}]
    (row,) = read(tmp_path, {"prompt": told, "images": ["0.png", "1.png"]})
    assert row.messages[0]["content"] == "Look."
    assert row.messages[1]["content"] == [
        {"type": "image", "image": str(tmp_path / "0.png")},
        {"type": "image", "image": str(tmp_path / "1.png")},
        {"type": "text", "text": "Which?"},
    ]


@pytest.mark.usefixtures("cache")
def test_without_images_a_text_is_a_text(tmp_path: Path) -> None:
    rows = read(tmp_path, {"prompt": "What does <image> mean in HTML?"}, {"prompt": "And?", "images": None})
    assert [row.messages[0]["content"] for row in rows] == ["What does <image> mean in HTML?", "And?"]


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"prompt": "<image> and <image>", "images": ["0.png"]},
            "the column 'images' and the prompt do not match: 1 in the column, 2 placeholders in the prompt",
        ),
        (
            {"prompt": "<image>", "images": ["0.png", "1.png"]},
            "2 in the column, 1 placeholders in the prompt.*Write <image> into",
        ),
        ({"prompt": "<image>", "images": []}, "0 in the column, 1 placeholders in the prompt"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "0 in the column, 1 placeholders in the prompt",
        ),
        ({"prompt": "<image>", "images": ["9.png"]}, "image 1: there is no image file .*9.png"),
        ({"prompt": "<image>", "images": ["rows.jsonl"]}, "it is not an image that PIL can read"),
        ({"prompt": "<image>", "images": ["https://x.org/a.png"]}, "Download the image first"),
        ({"prompt": "<video>", "videos": [7]}, "video 1 is 7; a video is a path, or a list of frames"),
        ({"prompt": "<video>", "videos": ["a.mp4"]}, "there is no video file"),
        ({"prompt": "<video>", "videos": [["0.png", "9.png"]]}, "video 1, frame 2: there is no image file"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_rows_number(
    tmp_path: Path, record: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=rf"rows.jsonl:2: .*{message}"):
        read(tmp_path, {"prompt": "<image>", "images": "0.png"}, record)


@pytest.mark.usefixtures("cache")
def test_videos_are_lists_of_frames_or_files(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"?")
    (row,) = read(tmp_path, {"prompt": "<video><video>", "videos": [["0.png", "1.png"], "a.mp4"]})
    assert row.messages[0]["content"] == [
        {"type": "video", "video": [str(tmp_path / "0.png"), str(tmp_path / "1.png")]},
        {"type": "video", "video": str(tmp_path / "a.mp4")},
    ]


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("many", [True, False])
def test_images_in_parquet_are_bytes_until_they_are_looked_at(tmp_path: Path, many: bool) -> None:
    import datasets

    buffer = io.BytesIO()
    picture(8, 16, seed=4).save(buffer, "PNG")
    value: Any = {"bytes": buffer.getvalue(), "path": None}
    feature = datasets.Image()
    table = datasets.Dataset.from_dict(
        {"prompt": ["<image>?"], "images": [[value] if many else value]},
        features=datasets.Features(
            {"prompt": datasets.Value("string"), "images": datasets.List(feature) if many else feature}
        ),
    )
    table.to_parquet(str(tmp_path / "rows.parquet"))
    (row,) = read_rows(str(tmp_path / "rows.parquet"))
    image = row.messages[0]["content"][0]["image"]
    assert image["bytes"] == buffer.getvalue()
    assert digest(load_image(image, where="it")) == digest(picture(8, 16, seed=4))


@pytest.mark.usefixtures("cache")
def test_parts_in_parquet_have_only_their_own_keys(tmp_path: Path) -> None:
    import datasets

    picture(8, 8).save(tmp_path / "0.png")
    content = [{"type": "image", "text": None}, {"type": "text", "text": "What?"}]
    record = {"prompt": [{"role": "user", "content": content}], "images": ["0.png"]}
    datasets.Dataset.from_list([record]).to_parquet(str(tmp_path / "rows.parquet"))
    (row,) = read_rows(str(tmp_path / "rows.parquet"))
    assert row.messages[0]["content"] == [
        {"type": "image", "image": str(tmp_path / "0.png")},
        {"type": "text", "text": "What?"},
    ]


@pytest.mark.usefixtures("cache")
def test_images_of_a_record_are_found_beside_it(tmp_path: Path) -> None:
    """trajectories.jsonl of a run is data for `turnwise sft`: its messages refer to images by their hash."""
    store = MediaStore(tmp_path / "media")
    drawing = picture(16, 16, seed=5)
    content = store.plain([{"type": "image", "image": drawing}, {"type": "text", "text": "What?"}])
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "A square."}]
    (tmp_path / "trajectories.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    (row,) = read_conversations(str(tmp_path / "trajectories.jsonl"))
    path = row.messages[0]["content"][0]["image"]
    assert path == str(tmp_path / "media" / f"{digest(drawing)}.png")
    assert digest(load_image(path, where="the image")) == digest(drawing)


@pytest.mark.usefixtures("cache")
def test_an_image_that_the_record_lacks_is_refused(tmp_path: Path) -> None:
    missing = "sha256:" + "0" * 64
    with pytest.raises(DataError, match=f"there is no image file .*/media/{'0' * 64}.png"):
        read(tmp_path, {"prompt": [{"role": "user", "content": [{"type": "image", "image": missing}]}]})
    with pytest.raises(DataError, match="there is no image file"):  # not a hash: an ordinary path
        read(tmp_path, {"prompt": "<image>", "images": ["sha256:../../secret"]})
