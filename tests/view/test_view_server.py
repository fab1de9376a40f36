"""The viewer's server and its index: what it answers, whom it refuses, and files that are not as they should be."""

from __future__ import annotations

import gzip
import http.client
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.viewed_run import conversation, write_run
from turnwise.cli import main
from turnwise.errors import ConfigError, RunError
from turnwise.record.datasets import DatasetChoice, write_dataset
from turnwise.record.labels import Label, read_labels, write_label
from turnwise.record.writer import AppendedFile
from turnwise.view.index import ConversationIndex
from turnwise.view.runs import ViewedRun, evaluations, find_runs
from turnwise.view.server import Access, ViewServer, export, keep_access, kept_access
from turnwise.view.statistics import statistics

# The viewer's server: what it answers, whom it refuses, and files that are not as they should be.


# The viewer's server: what it answers, and whom it refuses.


@pytest.fixture
def server(run: Path) -> Iterator[ViewServer]:
    viewed = ViewedRun(run)
    viewed.indexes["train"].update()
    server = ViewServer([viewed])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.stop()
    thread.join()
    viewed.close()


def get(
    server: ViewServer, path: str, *, token: str | None = "right", host: str | None = None
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    headers = {"Host": host or f"127.0.0.1:{server.port}"}
    if token is not None:
        headers["Authorization"] = f"Bearer {server.token if token == 'right' else token}"
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, {name.lower(): value for name, value in response.getheaders()}, body


def get_json(server: ViewServer, path: str) -> object:
    status, _, body = get(server, path)
    assert status == 200, body
    return json.loads(body)


def test_what_it_answers(server: ViewServer) -> None:
    (summary,) = get_json(server, "/api/runs")  # type: ignore[misc]
    assert summary["name"] == "first"
    assert summary["conversations"]["train"] == 24
    assert summary["metrics"] == {"train": 3, "eval": 0}
    metrics = get_json(server, "/api/runs/0/metrics/train")
    assert metrics["columns"]["reward/mean"] == [0.1, 0.2, 0.3]  # type: ignore[index]
    assert metrics["about"]["reward/mean"]["unit"] == "reward"  # type: ignore[index]
    columns = get_json(server, "/api/runs/0/columns/train?start=20")
    assert columns["id"] == ["3.0:1/0", "3.0:1/1", "3.0:1/2", "3.0:1/3"]  # type: ignore[index]
    conversation = get_json(server, "/api/runs/0/conversations/train/3")
    assert conversation["id"] == "1.0:0/3"
    assert conversation["token_texts"] == [[None] * 12]
    assert get_json(server, "/api/runs/0/search/train?query=owned") == [23]
    timeline: Any = get_json(server, "/api/runs/0/timeline/2")
    assert len(timeline["conversations"]) == 8
    assert timeline["conversations"][0]["turns"] == [[100.0, 0.5, 0.25, 0.1], [101.0, 0.5, 0.25, 0]]
    assert [line["step"] for line in timeline["steps"]] == [1, 2]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/api/runs/7/metrics/train", "there is no run 7"),
        ("/api/runs/0/metrics/test", "'test' is not a kind"),
        ("/api/runs/0/columns/train?start=-1", "start must be a number"),
        ("/api/runs/0/conversations/train/99", "has no conversation 99"),
    ],
)
def test_what_is_not_there(server: ViewServer, path: str, problem: str) -> None:
    status, _, body = get(server, path)
    assert status == 404
    assert problem in json.loads(body)["error"]


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/api/runs", "/api/runs/0/columns/train"])
def test_without_the_token_nothing_is_answered(server: ViewServer, path: str) -> None:
    for token in (None, "wrong", ""):
        assert get(server, path, token=token)[0] == 401
    assert get(server, path, host="evil.example")[0] == 403  # a web page whose name resolves to 127.0.0.1


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1@evil.com",
        "127.0.0.1:80@evil.com",
        "[",
        "[::1",
        "",
        " ",
        "127.0.0.1:",
        "127.0.0.1:x",
        "127.0.0.1/x",
        "127.0.0.1.evil.com",
        "localhost.evil.com",
        "127.0.0.1, evil.com",
        "127.0.0.1#",
        "127.1",
        "2130706433",
    ],
)
def test_a_request_for_another_host_is_refused(server: ViewServer, host: str) -> None:
    answer = raw(server, f"GET /api/runs HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {server.token}\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 403 "), answer
    assert b"the header Host is" in answer


def test_a_request_without_a_host_or_with_two_is_refused(server: ViewServer) -> None:
    for hosts in ("", "Host: 127.0.0.1\r\nHost: evil.com\r\n"):
        answer = raw(server, f"GET /api/runs HTTP/1.1\r\n{hosts}Authorization: Bearer {server.token}\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400 "), answer
    old = raw(server, f"GET /api/runs HTTP/1.0\r\nAuthorization: Bearer {server.token}\r\n\r\n")
    assert old.startswith(b"HTTP/1.1 403 "), old


def test_tunnels_and_names_of_this_machine_are_answered(server: ViewServer) -> None:
    for host in ("127.0.0.1", "localhost", "LOCALHOST:9000", f"127.0.0.1:{server.port}"):
        assert get(server, "/api/runs", host=host)[0] == 200


def raw(server: ViewServer, request: str) -> bytes:
    """The answer to a request that is sent as it is, until the server closes the connection or is silent."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(request.encode())
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while data := connection.recv(65536):
            answer += data
    return answer


def test_the_cookie_is_for_the_page_of_this_server_only(server: ViewServer) -> None:
    """Browsers send a cookie to all ports of a machine, so its path must be one that no other server names."""
    status, headers, _ = get(server, f"/?token={server.token}", token=None)
    assert status == 303
    home, cookie = headers["location"], headers["set-cookie"]
    assert re.fullmatch("/[0-9a-f]{32}/", home)
    assert f"Path={home}" in cookie
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    held = cookie.partition(";")[0]
    assert server.token not in home
    for path in ("", "static/app.js", "api/runs", "api/runs/0/conversations/train/3"):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("GET", home + path, headers={"Cookie": held})
        assert connection.getresponse().status == 200, path
        connection.close()
        assert get(server, home + path, token=None)[0] == 401
    assert get(server, "/?token=wrong", token=None)[0] == 401
    other = ViewServer([])
    assert get(server, f"/?token={other.token}", token=None)[0] == 401
    other._socket.close()


@pytest.mark.parametrize(
    ("path", "statuses"),
    [
        ("/static/%00", {400}),
        ("/%00", {400}),
        ("/static/a%0ab", {400}),
        ("/static/" + "a" * 300, {404}),
        ("/static/" + "a" * 4000, {400}),
        ("/api/runs/0/media/" + "a" * 4000, {400}),
        ("/api/runs/0/media/" + "%C3%A4" * 64, {404}),
        ("/api/runs/" + "9" * 4300 + "/metrics/train", {400}),
        ("/api/runs/" + "9" * 40 + "/metrics/train", {404}),
        ("/api/runs/%C2%B2/metrics/train", {404}),
        ("/api/runs/0/conversations/train/" + "9" * 40, {404}),
        ("/api/runs/0/conversations/train/" + "9" * 4300, {400}),
        ("/api/runs/0/conversations/train/-1", {404}),
        ("/api/runs/0/timeline/" + "9" * 40, {404}),
        ("/api/runs/0/columns/train?start=" + "9" * 4300, {404}),
        ("/api/runs/0/columns/train?stop=" + "9" * 4300, {404}),
        ("/api/runs/0/columns/train?start=%00", {404}),
        ("/api/runs/0/search/train?query=" + "a" * 4000, {200}),
        ("/api/runs/0/search/train?query=%00", {200}),
        ("/api/runs/0/search/train?query=%ED%A0%80%22*(", {200}),
        ("/?token=%00", {401}),
        ("/?token=%ED%A0%80", {401}),
    ],
)
def test_an_address_that_nothing_has_is_refused_without_a_traceback(
    server: ViewServer, path: str, statuses: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    status, _, body = get(server, path, token="right" if "token" not in path else None)
    assert status in statuses, body
    assert not caplog.records
    assert get_json(server, "/api/runs")


@pytest.mark.parametrize(
    "path", ["/static/../server.py", "/static/%2e%2e/server.py", "/static//etc/passwd", "/static/vendor"]
)
def test_only_files_of_the_page_are_served(server: ViewServer, path: str) -> None:
    assert get(server, path)[0] == 404


def test_the_page_may_run_its_own_scripts_only(server: ViewServer) -> None:
    _, headers, _ = get(server, "/")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"


def post(server: ViewServer, path: str, body: object, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    given = {"Authorization": f"Bearer {server.token}", "Content-Type": "application/json", **headers}
    connection.request("POST", path, json.dumps(body), given)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, text


def test_labels_are_written_with_the_token_only_and_not_over_those_of_another(server: ViewServer, run: Path) -> None:
    path, read = "/api/runs/0/labels/train/3", get_json(server, "/api/runs/0/conversations/train/3")
    entry = {"checksum": read["checksum"], "labels": ["good"], "note": "", "revision": 0}  # type: ignore[index]
    assert post(server, path, entry, Authorization="Bearer wrong")[0] == 401
    assert post(server, path, entry, **{"Content-Type": "text/plain"})[0] == 415  # as a form of another page
    assert post(server, path, {**entry, "labels": "good"})[0] == 400
    assert post(server, path, {**entry, "labels": ["x" * 100]})[0] == 404
    assert not (run / "labels.json").exists()
    assert post(server, path, entry)[0] == 200
    assert post(server, path, entry)[0] == 409  # it has another revision now
    (first,) = get_json(server, "/api/runs/0/labels")  # type: ignore[misc]
    assert post(server, path, {**entry, "labels": [], "revision": first["revision"]})[0] == 200
    assert get_json(server, "/api/runs/0/labels") == []
    assert post(server, path, {**entry, "labels": ["another's"]})[0] == 200
    assert post(server, path, {**entry, "revision": first["revision"]})[0] == 409  # removed and given again meanwhile
    (label,) = get_json(server, "/api/runs/0/labels")  # type: ignore[misc]
    assert label["labels"] == ["another's"]
    assert post(server, "/api/runs/0/selection/train", {"numbers": [99], "form": "jsonl"})[0] == 404
    assert post(server, "/api/runs/0/selection/train", {"numbers": [99], "form": "sft"})[0] == 404
    assert post(server, "/api/runs/0/selection/train", {"numbers": [-1], "form": "jsonl"})[0] == 400


def test_labels_hold_for_the_text_that_was_read_only(server: ViewServer, run: Path, tmp_path: Path) -> None:
    """A run that is resumed from an earlier checkpoint samples others with the same ids and steps."""
    file = run / "trajectories.jsonl"
    for number in (3, 4):
        shown = get_json(server, f"/api/runs/0/conversations/train/{number}")
        entry = {"checksum": shown["checksum"], "labels": ["good"], "note": "", "revision": 0}  # type: ignore[index]
        assert post(server, f"/api/runs/0/labels/train/{number}", entry)[0] == 200
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    changed = json.loads(lines[4])
    changed["messages"][-1]["content"] = "sampled again"
    lines[4] = json.dumps(changed) + "\n"
    file.write_text("".join(lines), encoding="utf-8")
    viewed = ViewedRun(run)
    viewed.update()
    assert [label["replaced"] for label in viewed.labels()] == [False, True]
    write_label(run, Label(kind="train", id="4.0:0/0", step=4, checksum="", labels=("private",)))
    export([viewed], tmp_path / "part.html", ids=[json.loads(lines[3])["id"]])
    assert [found in (tmp_path / "part.html").read_text() for found in ('"labels": ["good"]', "private")] == [
        True,
        False,
    ]
    viewed.close()
    assert post(server, "/api/runs/0/labels/train/4", entry)[0] == 409  # from a page that shows the text before
    written = write_dataset(run, tmp_path / "out", DatasetChoice(what="sft", label="good"))
    assert [json.loads(line)["id"] for line in written.file.read_text().splitlines()] == [json.loads(lines[3])["id"]]
    assert sum(written.left_out.values()) == 1
    file.write_text("".join(lines[4:]), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"none of the 2 conversations .* label 'good' is in the record as it was"):
        write_dataset(run, tmp_path / "none", DatasetChoice(what="sft", label="good"))


def test_what_cannot_be_saved_or_read_is_said(server: ViewServer, run: Path, tmp_path: Path) -> None:
    (run / ".labels.json.lock").mkdir()
    shown = get_json(server, "/api/runs/0/conversations/train/3")
    entry = {"checksum": shown["checksum"], "labels": ["good"], "note": "", "revision": 0}  # type: ignore[index]
    status, text = post(server, "/api/runs/0/labels/train/3", entry)
    assert (status, "labels cannot be saved" in json.loads(text)["error"]) == (404, True)
    lines = (run / "trajectories.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    lines[4] = lines[4][:20] + "\n"
    (run / "trajectories.jsonl").write_text("".join(lines), encoding="utf-8")
    viewed = ViewedRun(run)
    viewed.update()
    with (tmp_path / "rows").open("wb") as file:
        assert viewed.selection("train", [3, 4], "sft", file) == (1, {"are damaged": 1})
    viewed.close()


def test_two_writers_of_labels_lose_nothing(run: Path) -> None:
    def write(writer: int) -> None:
        for number in range(10):
            write_label(run, Label(kind="train", id=f"{writer}/{number}", step=1, checksum="", labels=("x",)))

    writers = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for one in writers:
        one.start()
    for one in writers:
        one.join()
    assert len(read_labels(run)) == 40


def test_images(server: ViewServer, run: Path) -> None:
    name = "a" * 64
    (run / "media" / f"{name}.png").write_bytes(b"PNG")
    assert get(server, f"/api/runs/0/media/{name}")[2] == b"PNG"
    for wrong in ("b" * 64, "..%2f..%2fmetrics.jsonl", "x"):
        assert get(server, f"/api/runs/0/media/{wrong}")[0] == 404


def test_a_link_among_the_images_of_a_run_is_not_followed(server: ViewServer, run: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"SECRET")
    name = "c" * 64
    (run / "media" / f"{name}.png").symlink_to(secret)
    assert get(server, f"/api/runs/0/media/{name}")[0] == 404
    assert ViewedRun(run).image(name) is None


def test_find_runs(run: Path, other: Path, tmp_path: Path) -> None:
    """A run comes with its evaluation, and a directory of runs with the models of all evaluations in it, the newest first."""
    os.utime(other, (1, 1))
    assert find_runs([run, tmp_path, run]) == [run, other]
    evaluated = [write_run(tmp_path / "first-eval" / name) for name in ("base", "trained")]
    for place, model in enumerate(evaluated):
        (model / "evaluation.json").write_text("{}")
        os.utime(model, (place, place))
    assert find_runs([run]) == [run]  # not finished
    (tmp_path / "first-eval" / "eval.json").write_text("{}")
    assert find_runs([run]) == [run, *reversed(evaluated)]
    assert set(find_runs([tmp_path])) == {run, other, *evaluated}
    assert ViewedRun(evaluated[0]).summary()["evaluated"] is True
    with pytest.raises(RunError, match="is not a run and contains none"):
        find_runs([tmp_path / "missing"])


def test_a_bookmark_outlives_the_viewer(run: Path, tmp_path: Path) -> None:
    """Token and port are kept in a file that only the user can read."""
    file = tmp_path / "cache" / "view.json"
    first = kept_access(file)
    assert first.port == 0
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    keep_access(Access(first.token, port), file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert kept_access(file) == Access(first.token, port)
    with socket.create_server(("127.0.0.1", port)):  # another viewer
        assert kept_access(file) == Access(first.token, 0)
    file.chmod(0o644)  # others may have read the token
    assert kept_access(file).token != first.token
    file.write_text("[]")
    file.chmod(0o600)
    assert kept_access(file).port == 0


def test_a_conversation_by_its_id(server: ViewServer, run: Path) -> None:
    found = get_json(server, "/api/runs/0/conversation/train?id=2.0:0/1&step=2")
    assert isinstance(found, dict)
    assert (found["id"], found["number"]) == ("2.0:0/1", 9)
    status, _, body = get(server, "/api/runs/0/conversation/train?id=nothing")
    assert status == 404
    assert b"has no conversation 'nothing'" in body
    evaluations = [conversation(0, step=0, reward=reward) for reward in (0.25, 0.75)]
    lines = [json.dumps({**line, "step": step, "id": "0/0"}) + "\n" for step, line in enumerate(evaluations)]
    (run / "eval_trajectories.jsonl").write_text("".join(lines))
    index = ViewedRun(run).indexes["eval"]
    assert [index.number_of("0/0", step) for step in (0, 1, None)] == [0, 1, 1]


def test_a_port_in_use(server: ViewServer) -> None:
    with pytest.raises(ConfigError, match="give another --port"):
        ViewServer([], port=server.port)


# The viewer and files that are not as they should be: each has its message, and hides no other run.


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


def test_a_run_that_failed_in_its_first_step_is_shown_with_the_reason(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    ended = {"how": "failed", "time": 1.0, "reason": "no space left"}
    (run / "run.json").write_text(json.dumps({"kind": "train", "checkpoint": None, "ended": ended}))
    assert find_runs([run]) == find_runs([run.parent]) == [run]
    viewed = ViewedRun(run)
    viewed.update()
    overview = viewed.overview()
    assert (overview["state"], overview["reason"], overview["step"]) == ("failed", "no space left", 0)
    assert viewed.summary()["problem"] is None
    viewed.close()


def test_a_directory_that_cannot_be_looked_into_is_no_run(run: Path, tmp_path: Path) -> None:
    """As one without permission, which root has: the names of its files would be too long for the system."""
    deep = tmp_path
    while len(str(deep)) < 3700:
        deep /= "d" * 200
    deep /= "d" * (4070 - len(str(deep)))  # at most 4095 bytes
    deep.mkdir(parents=True)
    (deep / ("e" * 14)).mkdir()
    with pytest.raises(OSError, match="name too long"):
        (deep / ("e" * 14) / "trajectories.jsonl").stat()
    with pytest.raises(RunError, match="is not a run and contains none"):
        find_runs([deep])


def test_the_viewer_goes_on_reading_when_looking_for_new_runs_fails(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    viewed = ViewedRun(run)
    server = ViewServer([viewed], paths=[Path("\0")])  # no system call takes this path
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        until = time.monotonic() + 60
        while len(viewed.indexes["train"]) < 24 and time.monotonic() < until:
            get_json(server, "/api/runs")
            time.sleep(0.05)
        assert len(viewed.indexes["train"]) == 24
    finally:
        server.stop()
        thread.join()
        viewed.close()
    assert caplog.messages == ["looking for new runs failed, and is tried again: embedded null byte"]


@pytest.fixture
def half_a_pair(run: Path) -> str:
    """The text of a message of conversation 3, as a model may have written it."""
    text = "half \ud83d of a pair"
    rewrite(run, text)
    return text


def test_half_of_a_surrogate_pair_is_answered(half_a_pair: str, server: ViewServer) -> None:
    found: Any = get_json(server, "/api/runs/0/conversations/train/3")
    assert found["messages"][1]["content"] == half_a_pair


def test_a_record_that_was_written_again_is_read_at_the_places_of_its_lines_now(run: Path) -> None:
    viewed = ViewedRun(run)
    viewed.indexes["train"].update()
    rewrite(run, "longer " * 20)
    assert viewed.conversation("train", 3)["messages"][1]["content"] == "longer " * 20
    assert viewed.conversation("train", 5)["id"] == "1.0:1/1"
    viewed.close()


def rewrite(run: Path, text: str) -> None:
    """Give a message of conversation 3 another text."""
    messages = json.loads((run / "trajectories.jsonl").read_text().splitlines()[3])["messages"]
    messages[1]["content"] = text
    change(run, 3, messages=messages)


def test_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path), "--no-browser"]) == 1
    message = capsys.readouterr().err
    assert f"{tmp_path} is not a run and contains none: a run has the file trajectories.jsonl or run.json." in message


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


# The index of conversations: equal to the record, extended as the record grows, built again where it was cut back.


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


def test_the_columns_of_an_agent_name_it_and_its_episode(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    path.write_bytes(_record(0, id="1.0:0/0/critic", agent="critic", episode="1.0:0/0") + _record(0))
    index = ConversationIndex(path)
    index.update()
    columns = index.columns()
    assert (columns["agent"], columns["episode"]) == (["critic", None], ["1.0:0/0", "1.0:0/0"])


def test_columns(file: Path) -> None:
    index = ConversationIndex(file)
    index.update()
    columns = index.columns()
    assert columns["id"] == [f"1.0:{n}/0" for n in range(5)]
    assert columns["reward"] == [0, 0.1, 0.2, 0.3, 0.4]
    expected = {
        "step": 3,
        "group": "1.0:0",
        "episode": "1.0:4/0",
        "agent": None,
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


def test_statistics_while_the_record_is_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are indexed between any two of their queries, and the index is emptied: what is answered agrees with itself."""
    monkeypatch.setattr("turnwise.view.index._BLOCK_LINES", 2)
    file = tmp_path / "trajectories.jsonl"
    tool = [{"text": "yes", "reward": 0.5, "tool_calls": [{"name": "a tool", "error": "raised"}]}]
    content = b"".join(_record(n, turns=tool if n > 5 else []) for n in range(8)) + _record(9)
    file.write_bytes(content)
    index, query = ConversationIndex(file), ConversationIndex.query
    index.update(seconds=0)
    assert index.indexed == range(7, 9)

    def and_index(index: ConversationIndex, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        found = query(index, statement, *values)
        if statement.startswith("SELECT DISTINCT step"):
            index.update()
        return found

    monkeypatch.setattr(ConversationIndex, "query", and_index)
    found = statistics(index)
    assert (len(index), found["steps"], found["turns"]) == (9, [4, 5], {0: [0.5, None]})
    assert [(one["tool"], one["calls"], one["by_step"]["calls"]) for one in found["tools"]] == [
        ("", 2, [0, 2]),
        ("a tool", 1, [1, 0]),
    ]
    file.write_bytes(_record(0) + _record(40, step=21))  # written again, while a search is answered
    monkeypatch.setattr(ConversationIndex, "search", lambda self, text: [self.update(), 7, 8][1:])
    assert index.find("yes", 5) == {"total": 2, "rows": []}


def test_statistics_of_names_that_a_model_invents(tmp_path: Path) -> None:
    """The tools with the most calls are listed, the others are one sum; of many turns, the last is among the curves."""
    calls = [{"name": f"tool {max(0, n - 3)}", "error": "unknown_tool" if n > 60 else None} for n in range(70)]
    turns = [{"reward": float(n), "tool_calls": calls if n == 0 else []} for n in range(12)]
    path = tmp_path / "trajectories.jsonl"
    path.write_bytes(_record(0, turns=turns))
    index = ConversationIndex(path)
    index.update()
    found = statistics(index)
    assert [one["calls"] for one in found["tools"]] == [4] + [1] * 49
    assert [one["by_step"] is not None for one in found["tools"]] == [True] * 8 + [False] * 42
    others = {name: found["other_tools"][name] for name in ("tools", "calls", "conversations")}
    assert others == {"tools": 17, "calls": 17, "conversations": 1}
    assert sum(one["errors"] for one in [*found["tools"], found["other_tools"]]) == 9
    assert (found["turns"], found["turn_count"]) == ({n: [float(n)] for n in (*range(7), 11)}, 12)


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
