"""The index of conversations: equal to the record, extended as the record grows, built again where it was cut back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from turnwise.errors import RunError
from turnwise.view.index import ConversationIndex


def _record(number: int, text: str = "hello", **changes: object) -> bytes:
    record = {
        "schema": 2,
        "step": number // 2 + 1,
        "id": f"1.0:{number}/0",
        "group": "1.0:0",
        "row": {"id": str(number), "answer": "Zürich"},
        "stop": "done",
        "error": None,
        "reward": number / 10,
        "rewards": {},
        "tools": [],
        "messages": [{"role": "user", "content": text}],
        "turns": [{"text": "yes", "tool_calls": [{"error": "raised"}, {"error": None}]}],
        "segments": [{"token_ids": [1, 2, 3], "logprobs": [0, -1, -2], "turn": [-1, 0, 0], "version": [-1, 4, 5]}],
        "template_mismatch": None,
        "started": 12.5,
        "seconds": 1.5,
        **changes,
    }
    return (json.dumps(record) + "\n").encode()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trajectories.jsonl"
    path.write_bytes(b"".join(_record(n) for n in range(5)))
    return path


def test_columns(file: Path) -> None:
    index = ConversationIndex(file)
    index.update()
    columns = index.columns()
    assert columns["id"] == [f"1.0:{n}/0" for n in range(5)]
    assert columns["reward"] == [0, 0.1, 0.2, 0.3, 0.4]
    expected = {
        "step": 3,
        "group": "1.0:0",
        "row": "4",
        "stop": "done",
        "turns": 1,
        "calls": 2,
        "call_errors": 1,
        "sampled": 2,
        "tokens": 3,
        "segments": 1,
        "error": None,
        "mismatch": 0,
        "version_min": 4,
        "version_max": 5,
        "started": 12.5,
        "seconds": 1.5,
    }
    assert {name: columns[name][4] for name in expected} == expected
    assert index.columns(3)["id"] == ["1.0:3/0", "1.0:4/0"]
    assert json.loads(index.line(2))["id"] == "1.0:2/0"
    with pytest.raises(RunError, match="has no conversation 5"):
        index.line(5)


def test_it_grows_with_the_record_and_an_unfinished_line_waits(file: Path) -> None:
    index = ConversationIndex(file)
    index.update()
    line = _record(5)
    with file.open("ab") as end:
        end.write(line[:40])
    index.update()
    assert len(index) == 5
    with file.open("ab") as end:
        end.write(line[40:])
    index.update()
    assert index.columns()["id"][-1] == "1.0:5/0"
    again = ConversationIndex(file)
    assert len(again) == 6  # kept between two openings


@pytest.mark.parametrize("content", [b"", _record(9), b"".join(_record(n) for n in (0, 1, 2, 3, 7, 8, 9))])
def test_a_record_that_was_cut_back_is_indexed_again(file: Path, content: bytes) -> None:
    index = ConversationIndex(file)
    index.update()
    file.write_bytes(content)
    index.update()
    lines = content.splitlines()
    assert index.columns()["id"] == [json.loads(line)["id"] for line in lines]
    assert len(index.search("hello")) == len(lines)


def test_search(file: Path) -> None:
    with file.open("ab") as end:
        end.write(_record(5, text="the quick brown fox"))
        end.write(_record(6, text='a "brown" quick thing', error={"kind": "environment", "message": "it broke"}))
    index = ConversationIndex(file)
    index.update()
    assert index.search("quick brown") == [5, 6]
    assert index.search('"quick brown"') == [5]
    assert index.search("bro") == [5, 6]
    assert index.search("bro ") == []
    assert index.search("broke") == [6]
    assert index.search("zurich") == list(range(7))  # columns of the row; without accents
    for hostile in ('"', "a OR b", "text:x", "NEAR(a b)", "*", "';--", '" "', "a* b*", "\x00", "(", "-quick"):
        index.search(hostile)
    assert index.search("  ") == []


def test_damaged_lines_have_a_row(tmp_path: Path) -> None:
    file = tmp_path / "trajectories.jsonl"
    lines = [
        b"{broken\n",
        b"[1]\n",
        b"\xff\n",
        _record(3),
        b'{"turns": 5, "segments": [1, {"turn": "x"}], "reward": 1e999, "id": 7}\n',
    ]
    file.write_bytes(b"".join(lines))
    index = ConversationIndex(file)
    index.update()
    assert index.columns()["id"] == [None, None, None, "1.0:3/0", "7"]
    assert index.columns()["reward"][4] is None


def test_a_directory_that_cannot_be_written_has_its_index_in_memory(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sqlite3

    connect = sqlite3.connect

    def refuse(place: object, **options: object) -> sqlite3.Connection:
        if str(place) != ":memory:":
            raise sqlite3.OperationalError("unable to open database file")
        return connect(":memory:", **options)  # type: ignore[call-overload]

    monkeypatch.setattr(sqlite3, "connect", refuse)
    index = ConversationIndex(file)
    index.update()
    assert len(index) == 5
    assert sorted(path.name for path in file.parent.iterdir()) == ["trajectories.jsonl", "trajectories.jsonl.index"]


def test_another_format_is_replaced(file: Path) -> None:
    (file.parent / "trajectories.jsonl.view").write_bytes(b"not a database" * 100)
    index = ConversationIndex(file)
    index.update()
    assert len(index) == 5


def test_the_newest_conversations_are_indexed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise.view.index._BLOCK_LINES", 10)
    file = tmp_path / "trajectories.jsonl"
    file.write_bytes(b"".join(_record(n) for n in range(35)))
    index = ConversationIndex(file)
    assert not index.ready
    assert index.update(seconds=0) is False
    assert (index.indexed, index.lines, index.ready) == (range(25, 35), 35, True)
    assert index.columns(0, 27)["id"] == ["1.0:25/0", "1.0:26/0"]
    assert index.search("hello") == list(range(25, 35))
    assert json.loads(index.line(3))["id"] == "1.0:3/0"  # opened without an index
    assert index.numbers_of(2) == [2, 3]
    with file.open("ab") as end:  # lines that are appended meanwhile come first
        end.write(b"".join(_record(n) for n in range(35, 38)))
    index.update(seconds=0)
    assert index.indexed == range(25, 38)
    assert ConversationIndex(file).indexed == range(25, 38)  # goes on where a viewer was ended
    while not index.update(seconds=0):
        pass
    assert index.indexed == range(38)
    assert index.columns()["id"] == [f"1.0:{n}/0" for n in range(38)]
    assert index.search("hello") == list(range(38))


def test_two_viewers_of_one_record(file: Path) -> None:
    first, second = ConversationIndex(file), ConversationIndex(file)
    first.update()
    second.update()
    assert (len(first), len(second)) == (5, 5)
    assert second.search("hello") == list(range(5))
    with file.open("ab") as end:
        end.write(_record(5))
    second.update()
    first.update()
    assert first.columns()["id"] == second.columns()["id"] == [f"1.0:{n}/0" for n in range(6)]
    assert first.search("hello") == list(range(6))


def test_half_of_a_surrogate_pair_and_large_numbers(tmp_path: Path) -> None:
    file = tmp_path / "trajectories.jsonl"
    file.write_bytes(_record(0, text="half \ud83d of a pair", reward=10**30) + _record(1, metrics={"x": float("nan")}))
    index = ConversationIndex(file)
    index.update()
    assert index.columns()["id"] == ["1.0:0/0", "1.0:1/0"]
    assert index.columns()["reward"] == [None, 0.1]
    assert index.search("pair") == [0]
