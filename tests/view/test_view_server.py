"""The viewer's server: what it answers, and whom it refuses."""

from __future__ import annotations

import http.client
import json
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


def test_the_address_with_the_token_sets_a_cookie(server: ViewServer) -> None:
    status, headers, _ = get(server, f"/?token={server.token}", token=None)
    assert status == 303
    assert headers["location"] == "/"
    assert "HttpOnly" in headers["set-cookie"]
    assert "SameSite=strict" in headers["set-cookie"]
    assert get(server, "/?token=wrong", token=None)[0] == 401


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


def test_find_runs(run: Path, other: Path, tmp_path: Path) -> None:
    assert find_runs([run, tmp_path, run]) == [run, other]
    with pytest.raises(RunError, match="is not a run and contains none"):
        find_runs([tmp_path / "missing"])


def test_a_port_in_use(server: ViewServer) -> None:
    with pytest.raises(ConfigError, match="give another --port"):
        ViewServer([], port=server.port)
