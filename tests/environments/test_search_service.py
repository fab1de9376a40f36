"""The retrieval service: its corpus, what it finds, and whom it answers."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from turnwise.environments.search import TOKEN, Document, Index, RetrievalServer, read_corpus
from turnwise.errors import ConfigError, DataError

CORPUS = [
    Document("1", "Paris\nParis is the capital of France."),
    Document("2", "Rome\nRome is the capital of Italy."),
    Document("3", "Cats\nA cat sleeps for most of the day."),
]


@pytest.fixture
def server() -> Iterator[RetrievalServer]:
    with RetrievalServer(Index(CORPUS)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def post(server: RetrievalServer, body: Any, *, path: str = "/retrieve", **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    with contextlib.closing(connection):
        connection.request("POST", path, content, {"Content-Type": "application/json", **named})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def test_it_finds_what_shares_words_with_the_query_the_best_first() -> None:
    index = Index(CORPUS)
    (first, score), (second, less) = index.search("the capital of Italy", 3)
    assert (first.id, second.id) == ("2", "1")
    assert score > less > 0
    assert [document.id for document, _ in index.search("capital", 3)] == ["1", "2"]  # equals: in the corpus's order
    assert [document.id for document, _ in index.search("CATS!", 3)] == ["3"]
    assert len(index.search("capital", 1)) == 1
    for nothing in ("zebra", "", "the of is", "?", "x"):
        assert index.search(nothing, 3) == []


def test_a_corpus_without_words_finds_nothing() -> None:
    assert Index([Document("1", "?\n")]).search("word", 3) == []


def test_it_speaks_search_r1s_protocol(server: RetrievalServer) -> None:
    status, answer = post(server, {"queries": ["cat", "zebra"], "topk": 2, "return_scores": True})
    assert status == 200
    (one,), nothing = answer["result"]
    assert one["document"] == {"id": "3", "contents": "Cats\nA cat sleeps for most of the day."}
    assert one["score"] > 0
    assert nothing == []
    assert post(server, {"queries": ["cat"]}) == (200, {"result": [[one["document"]]]})


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"{", 400, "the body is not JSON"),
        (b"\xff", 400, "the body is not JSON"),
        ([], 400, "`queries` must be a list of texts"),
        ({"queries": "cat"}, 400, "`queries` must be a list of texts"),
        ({"queries": [1]}, 400, "`queries` must be a list of texts"),
        ({"queries": ["x"] * 1001}, 400, "at most 1000"),
        ({"queries": [], "topk": 0}, 400, "`topk` must be a number from 1 to 100; it is 0"),
        ({"queries": [], "topk": True}, 400, "`topk`"),
        ({"queries": [], "return_scores": "yes"}, 400, "`return_scores` must be true or false"),
        (b" " * ((1 << 20) + 1), 413, "may have 1048576 bytes"),
    ],
)
def test_a_bad_question_is_refused_with_the_reason(
    server: RetrievalServer, body: Any, status: int, reason: str
) -> None:
    try:
        got, answer = post(server, body)
    except OSError:  # hung up on while still sending
        assert status == 413
        return
    assert got == status
    assert reason in answer["error"]
    assert post(server, {"queries": []}) == (200, {"result": []})  # and it goes on


def test_a_web_page_cannot_ask_by_itself(server: RetrievalServer) -> None:
    assert post(server, {"queries": []}, Content_Type="text/plain")[0] == 415


def test_other_paths_are_not_found(server: RetrievalServer) -> None:
    assert post(server, {"queries": []}, path="/etc/passwd")[0] == 404


def test_with_a_token_it_answers_only_those_who_have_it() -> None:
    with RetrievalServer(Index(CORPUS), token="swordfish") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert post(server, {"queries": []})[0] == 401
        assert post(server, {"queries": []}, Authorization="Bearer swordfisch")[0] == 401
        assert post(server, {"queries": []}, Authorization="Bearer swordfish") == (200, {"result": []})
        server.shutdown()


def test_it_listens_on_this_machine_only(server: RetrievalServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(ConfigError, match=f"cannot listen on port {server.server_port} of .*; give another --port"):
        RetrievalServer(server.index, port=server.server_port)
    with pytest.raises(ConfigError, match="cannot listen on port 70000"):
        RetrievalServer(server.index, port=70000)


def test_a_corpus_is_read_in_both_shapes(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": 7, "title": "A\\nB", "text": "a"}\n\n{"contents": "C\\nc", "url": "x"}\n', encoding="utf-8")
    assert read_corpus(path) == [Document("7", "A B\na"), Document("3", "C\nc")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "corpus.jsonl:1: this line is not JSON"),
        ("[]", "corpus.jsonl:1: a document must be a JSON object; this is a list"),
        ('{"id": "1", "title": "x"}', "needs the texts `title` and `text`, or `contents`; it has: id, title"),
        ("", "is empty; at least one document"),
    ],
)
def test_a_corpus_that_is_none_is_told_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_corpus(path)
    with pytest.raises(DataError, match="could not be read: No such file"):
        read_corpus(tmp_path / "none.jsonl")


def test_many_clients_at_once_are_all_answered(server: RetrievalServer) -> None:
    statuses: list[int] = []

    def ask() -> None:
        for _ in range(3):
            statuses.append(post(server, {"queries": ["cat"]})[0])

    clients = [threading.Thread(target=ask) for _ in range(200)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(60)
    assert statuses == [200] * 600


@pytest.mark.slow
def test_the_command_serves_until_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": "1", "title": "Cats", "text": "A cat sleeps."}\n', encoding="utf-8")
    command = [sys.executable, "-m", "turnwise.cli", "retrieval", str(path), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, TOKEN: "swordfish"}
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("1 documents at http://127.0.0.1:")
        port = int(line.rpartition(":")[2].partition("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        body = json.dumps({"queries": ["cat"], "topk": 1, "return_scores": True})
        headers = {"Content-Type": "application/json", "Authorization": "Bearer swordfish"}
        connection.request("POST", "/retrieve", body, headers)
        assert json.loads(connection.getresponse().read())["result"][0][0]["document"]["id"] == "1"
        connection.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    missing = subprocess.run(
        [*command[:4], str(tmp_path / "no"), "--port", "0"], capture_output=True, text=True, check=False
    )
    assert missing.returncode == 1
    assert "could not be read" in missing.stderr
