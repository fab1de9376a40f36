"""Traces with the real weave library. A local server stands for its two services: wandb and the trace server."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("weave") is None, reason="needs weave: pip install 'turnwise[weave]'"),
]

PROGRAM = """
import sys
from pathlib import Path

sys.path[:0] = {path!r}
from test_loggers import send
from turnwise.loggers.tracers import start_tracer

send(start_tracer("weave", conversations=1, project="team/project", directory=Path({folder!r})))
"""


class Services(BaseHTTPRequestHandler):
    """Answers as wandb and the trace server do, as far as weave needs it."""

    protocol_version = "HTTP/1.1"
    calls: list[dict[str, Any]]

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        value: dict[str, Any] = {"digest": "d"}
        if self.path == "/graphql":
            viewer = {"id": "1", "username": "me", "entity": "team", "defaultEntity": {"name": "team"}}
            value = {"data": {"viewer": viewer, "project": {"id": "1", "name": "project"}}}
        elif self.path == "/server_info":
            value = {"min_required_weave_python_version": "0.0.1", "trace_server_version": "99.0.0"}
        elif self.path.endswith("/calls/complete"):
            self.calls += json.loads(body)["batch"]
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def services() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    calls: list[dict[str, Any]] = []
    handler = type("Handler", (Services,), {"calls": calls})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", calls
    server.shutdown()
    server.server_close()


def traced(folder: Path, url: str) -> str:
    """Trace two conversations with weave in a process of its own, because weave changes the state of its process."""
    environment = {
        "WANDB_BASE_URL": url, "WF_TRACE_SERVER_URL": url, "WANDB_API_KEY": "a" * 40, "HOME": str(folder),
        "PATH": "/usr/bin:/bin",
        "WANDB_ERROR_REPORTING": "false", "WEAVE_SENTRY_ENV": "off", "WEAVE_PRINT_CALL_LINK": "false",
    }  # fmt: skip
    program = PROGRAM.format(path=[str(Path(__file__).parent), *sys.path], folder=str(folder))
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def test_a_conversation_is_a_tree_of_calls(tmp_path: Path, services: tuple[str, list[dict[str, Any]]]) -> None:
    url, calls = services
    traced(tmp_path, url)
    (root,) = [call for call in calls if call["parent_id"] is None]
    assert root["op_name"].startswith("weave:///team/project/op/conversation")
    children = [call for call in calls if call["parent_id"] == root["id"]]
    assert sorted(call["display_name"] for call in children) == ["turn 0", "turn 1"]
    (turn,) = [call for call in children if call["display_name"] == "turn 0"]
    inside = {call["display_name"]: call for call in calls if call["parent_id"] == turn["id"]}
    assert set(inside) == {"generate", "environment"}
    engine = inside["generate"]
    (tool,) = [call for call in calls if call["parent_id"] == inside["environment"]["id"]]
    assert tool["display_name"] == "add"
    assert (engine["started_at"], engine["ended_at"]) == ("1970-01-01T00:01:40Z", "1970-01-01T00:01:41Z")
    assert engine["output"] == "add"
    assert tool["exception"] is not None  # the outcome has an error
    assert tool["inputs"]["step"] == 3
    assert {call["trace_id"] for call in calls} == {root["trace_id"]}


def test_a_trace_server_that_is_down_does_not_end_the_run(tmp_path: Path) -> None:
    text = traced(tmp_path, "http://127.0.0.1:9")
    assert text.count("trace.backend=weave: its service cannot be reached") == 1
