"""A real HTTP server in a thread, whose answers a test decides."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Answer:
    """What the server says: a status and a body (JSON, or bytes as they are), after some seconds."""

    body: Any = None
    status: int = 200
    seconds: float = 0.0
    hang_up: bool = False
    """Close the connection without a word."""
    headers: dict[str, str] = field(default_factory=dict)
    """Further headers."""


@dataclass
class Server:
    """A running server and what it has been asked."""

    url: str
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    most_at_once: int = 0


@contextmanager
def serving(answer: Callable[[dict[str, Any], int], Answer]) -> Iterator[Server]:
    """Serve until the block ends. `answer` is given the question and how many there were before it."""
    lock, now = threading.Lock(), 0
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal now
            question = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
            with lock:
                number = len(server.asked)
                server.asked.append(question)
                server.headers.append(dict(self.headers))
                server.paths.append(self.path)
                now += 1
                server.most_at_once = max(server.most_at_once, now)
            said = answer(question, number)
            over.wait(said.seconds)
            with lock:
                now -= 1
            if said.hang_up:
                return
            body = said.body if isinstance(said.body, bytes) else json.dumps(said.body).encode()
            try:
                self.send_response(said.status)
                self.send_header("Content-Length", str(len(body)))
                for name, value in said.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)
            except OSError:  # whoever asked has gone
                pass

        do_GET = do_POST  # a question without content

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        server = Server(f"http://127.0.0.1:{http.server_port}")
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            over.set()
            http.shutdown()
            thread.join()
            time.sleep(0)
