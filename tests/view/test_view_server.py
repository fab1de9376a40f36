"""The viewer's server: what it answers, and whom it refuses."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from turnwise.errors import ConfigError, RunError
from turnwise.view.runs import ViewedRun, find_runs
from turnwise.view.server import ViewServer


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
    assert find_runs([run, tmp_path, run]) == [run, other]
    with pytest.raises(RunError, match="is not a run and contains none"):
        find_runs([tmp_path / "missing"])


def test_a_port_in_use(server: ViewServer) -> None:
    with pytest.raises(ConfigError, match="give another --port"):
        ViewServer([], port=server.port)
