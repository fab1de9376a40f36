"""The viewer and files that are not as they should be: each has its message, and hides no other run."""

from __future__ import annotations

import gzip
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnwise.cli import main
from turnwise.errors import RunError
from turnwise.record.writer import AppendedFile
from turnwise.view.runs import ViewedRun, evaluations
from turnwise.view.server import ViewServer, export


@pytest.fixture
def viewed(run: Path) -> Iterator[ViewedRun]:
    viewed = ViewedRun(run)
    viewed.update()
    yield viewed
    viewed.close()


def change(run: Path, number: int, **changes: object) -> None:
    """Change keys of a recorded conversation."""
    path = run / "trajectories.jsonl"
    lines = path.read_text().splitlines()
    lines[number] = json.dumps({**json.loads(lines[number]), **changes})
    path.write_text("".join(line + "\n" for line in lines))


def test_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path), "--no-browser"]) == 1
    message = capsys.readouterr().err
    assert f"{tmp_path} is not a run and contains none: a run has the file trajectories.jsonl." in message


def test_a_directory_that_is_half_written(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    with (run / "trajectories.jsonl").open("a") as file:
        file.write('{"schema": 3, "step": 4, "id": "4.0:0/0", "tur')
    viewed = ViewedRun(run)
    viewed.update()
    summary = viewed.summary()
    assert (summary["conversations"]["train"], summary["metrics"]["train"], summary["problem"]) == (24, 0, None)
    viewed.close()
    empty = run.parent / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").write_text('{"step": 1, "reward/me')  # killed in the first step
    viewed = ViewedRun(empty)
    viewed.update()
    assert viewed.summary()["metrics"]["train"] == 0
    assert viewed.timeline(1) == {"conversations": [], "steps": []}
    viewed.close()


def test_a_damaged_file_of_metrics_hides_no_other_run(run: Path, other: Path) -> None:
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text("{broken}\n" + text)
    runs = [ViewedRun(run), ViewedRun(other)]
    problems = [viewed.summary()["problem"] for viewed in runs]
    assert f"{run / 'metrics.jsonl'}:1" in problems[0]
    assert problems[1] is None
    for viewed in runs:
        viewed.close()


def test_a_truncated_and_a_damaged_compressed_record(run: Path) -> None:
    plain, path = run / "trajectories.jsonl", run / "trajectories.jsonl.gz"
    lines = plain.read_bytes().splitlines(keepends=True)
    plain.unlink()
    file = AppendedFile(path)
    for step in (lines[:8], lines[8:16], lines[16:]):
        file.append(step)
    complete = path.read_bytes()
    path.write_bytes(complete[:-50])
    viewed = ViewedRun(run)
    viewed.update()
    assert (viewed.summary()["conversations"]["train"], viewed.problem) == (16, None)  # the last part is not finished
    path.write_bytes(complete)
    viewed.update()
    assert viewed.summary()["conversations"]["train"] == 24
    second = len(gzip.compress(b"".join(lines[:8]), 3, mtime=0))
    path.write_bytes(complete[:second] + b"\0\0" + complete[second + 2 :])
    third = second + len(gzip.compress(b"".join(lines[8:16]), 3, mtime=0))
    problem = f"{path} is damaged: the part at byte {second} is not gzip data"
    with pytest.raises(RunError, match=problem):
        viewed.conversation("train", 9)
    viewed.close()
    path.with_name(f"{path.name}.index").unlink()
    viewed = ViewedRun(run)
    viewed.update()
    assert viewed.problem is not None
    assert problem in viewed.problem
    assert f"those from byte {third} on can be read" in viewed.problem
    ids = [json.loads(line)["id"] for line in lines]
    assert viewed.indexes["train"].columns()["id"] == ids[:8] + ids[16:]
    assert [viewed.conversation("train", number)["id"] for number in (7, 8)] == [ids[7], ids[16]]
    page = run.parent / "page.html"
    export([viewed], page)
    assert f"the part at byte {second}" in page.read_text()
    viewed.close()
    path.write_bytes(complete[: third + 20] + b"\xff\xff" + complete[third + 22 :])  # the last part
    viewed = ViewedRun(run)
    viewed.update()
    assert viewed.indexes["train"].columns()["id"] == ids[:16]
    assert viewed.problem is not None
    assert f"truncate --size={third}" in viewed.problem
    viewed.close()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"schema": 9}, "has schema 9, and this version of turnwise reads the schemas 1 to 3: update turnwise"),
        ({"turns": 5}, "is damaged: turns must be a list; got 5"),
        ({"segments": [7]}, "is damaged: segments.0 must be an object; got 7"),
    ],
)
def test_a_conversation_of_another_version_or_damaged(run: Path, changes: dict[str, object], problem: str) -> None:
    change(run, 3, **changes)
    viewed = ViewedRun(run)
    viewed.update()
    with pytest.raises(RunError, match=f"trajectories.jsonl:4 .*{problem}"):
        viewed.conversation("train", 3)
    assert viewed.conversation("train", 4)["id"] == "1.0:1/0"
    assert len(viewed.timeline(1)["conversations"]) >= 7
    viewed.close()


@pytest.mark.parametrize("line", ['{"step": 2}', '{"step": 2, "asked": "x", "taken": 1, "trained": 2, "groups": []}'])
def test_a_timeline_of_another_version(run: Path, line: str) -> None:
    (run / "timeline.jsonl").write_text(line + "\n")
    viewed = ViewedRun(run)
    viewed.update()
    assert viewed.timeline(2)["steps"] == []
    assert len(viewed.timeline(2)["conversations"]) == 8
    viewed.close()


def test_a_damaged_recipe_does_not_hide_conversations(run: Path) -> None:
    (run / "config.yaml").write_text("a: [")
    viewed = ViewedRun(run)
    viewed.update()
    assert viewed.conversation("train", 0)["exact_logprobs"] is True
    assert viewed.summary()["recorded"] == {}
    viewed.close()


def test_a_damaged_evaluation(run: Path, viewed: ViewedRun) -> None:
    (run.parent / "eval.json").write_text('{"schema": 1}')
    (evaluation,) = evaluations([viewed])
    assert str(run.parent / "eval.json") in evaluation["problem"]


def test_browsers_that_disconnect(viewed: ViewedRun, caplog: pytest.LogCaptureFixture) -> None:
    server = ViewServer([viewed])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with caplog.at_level(logging.WARNING):
        for data in (b"", b"GET /api/runs HTTP/1.1\r\nHost:", _request(server, "/api/runs/0/columns/train")):
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(data)
        time.sleep(0.2)
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(_request(server, "/api/runs"))
            connection.settimeout(30)
            assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
    server.stop()
    thread.join()
    assert caplog.records == []


def _request(server: ViewServer, path: str) -> bytes:
    return (
        f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {server.token}\r\n\r\n"
    ).encode()
