"""The search tool, and the services that it asks."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.conversations import Says, call, hold
from support.forked import Forked
from support.servers import Answer, serving
from turnwise.environments.search import TOKEN, Document, Index, RetrievalServer, Search, read_corpus
from turnwise.environments.tools.tool import Toolbox
from turnwise.environments.tools.toolbox import Tools
from turnwise.errors import ConfigError, DataError
from turnwise.services.json_service import ServiceError

# The search tool, against a real service: ours, and one that answers what a test wants.


def found(*contents: str) -> list[dict[str, Any]]:
    return [{"document": {"id": str(n), "contents": text}, "score": 1.0 / (n + 1)} for n, text in enumerate(contents)]


def ask(answer: Any, *queries: str, **options: Any) -> str:
    with serving(lambda question, number: Answer(answer)) as server:
        return asyncio.run(Search(server.url, pause=0, **options).search(list(queries or ["q"])))


def test_documents_are_formatted_as_in_verl() -> None:
    answer = {"result": [found('"Paris"\nA city.\nIn France.', "Rome\nIn Italy."), found("Bern\nIn Switzerland.")]}
    assert ask(answer, "paris", "bern") == (
        'Doc 1 (Title: "Paris")\nA city.\nIn France.\n\nDoc 2 (Title: Rome)\nIn Italy.\n---\n'
        "Doc 1 (Title: Bern)\nIn Switzerland."
    )


def test_queries_without_results_are_reported() -> None:
    assert ask({"result": [[], found("Bern\nIn it.")]}, "a", "b") == (
        "No documents were found.\n---\nDoc 1 (Title: Bern)\nIn it."
    )


def test_documents_are_bounded_in_number_and_length() -> None:
    assert ask({"result": [found("A\n" + "x" * 9, "B\nb", "C\nc")]}, topk=2, document_chars=4) == (
        "Doc 1 (Title: A)\nxxxx [...]\n\nDoc 2 (Title: B)\nb"
    )


def test_documents_without_scores_are_read_too() -> None:
    assert ask({"result": [[{"contents": "A\na"}]]}) == "Doc 1 (Title: A)\na"


def test_the_request_is_search_r1s() -> None:
    with serving(lambda question, number: Answer({"result": [[]]})) as server:
        asyncio.run(Search(f"{server.url}/retrieve", topk=5, token="swordfish").search(["capital of France"]))
    assert server.asked == [{"queries": ["capital of France"], "topk": 5, "return_scores": True}]
    assert server.paths == ["/retrieve"]
    assert server.headers[0]["Authorization"] == "Bearer swordfish"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "must return"),
        ({"result": []}, "received 1 queries and must return"),
        ({"result": "no"}, "must return"),
        ({"result": ["no"]}, "must return lists of documents; it returned: no"),
        ({"result": [[1]]}, "must return documents such as"),
        ({"result": [[{"document": {"contents": None}}]]}, "must return documents such as"),
    ],
)
def test_an_answer_that_is_none_is_an_error(answer: Any, message: str) -> None:
    with pytest.raises(ServiceError, match=message):
        ask(answer)


def test_the_pause_grows_and_the_deadline_bounds_it_all() -> None:
    with serving(lambda question, number: Answer("busy", 503)) as server:
        started = time.perf_counter()
        with pytest.raises(ServiceError, match="was called 3 times"):
            asyncio.run(Search(server.url, retries=2, pause=0.1).search(["q"]))
        assert time.perf_counter() - started >= 0.3  # 0.1 and 0.2
        started = time.perf_counter()
        with pytest.raises(ServiceError, match=r"status 503: .*, stopped after the deadline of 0.3 s"):
            asyncio.run(Search(server.url, retries=9, pause=60, deadline=0.3).search(["q"]))
        assert time.perf_counter() - started < 30


def test_a_call_that_is_cancelled_hangs_up() -> None:
    with serving(lambda question, number: Answer({"result": [[]]}, seconds=30)) as server:

        async def cancel() -> None:
            asking = asyncio.create_task(Search(server.url, timeout=60).search(["q"]))
            while not server.asked:
                await asyncio.sleep(0.01)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking

        asyncio.run(cancel())
        deadline = time.monotonic() + 60
        while any(thread.name.startswith("service-") for thread in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("queries", [[], ["q"] * 21])
def test_the_number_of_queries_is_bounded(queries: list[str]) -> None:
    with pytest.raises(ValueError, match=r"it must have 1 to 20"):
        asyncio.run(Search("http://127.0.0.1:9").search(queries))


def test_what_cannot_work_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="topk is 0"):
        Search("http://h", topk=0)
    for url in ("h", "ftp://h", "http://", "http://h:99999/retrieve", "http://h:port/retrieve", "http://[::1/retrieve"):
        with pytest.raises(ConfigError, match=f"{re.escape(repr(url))} is not the address of a service"):
            Search(url)
    with pytest.raises(ConfigError, match="deadline is 0; it must be above 0"):
        Search("http://h", deadline=0)


def test_tools_that_are_made_at_once_in_many_threads_share_one_service() -> None:
    made: list[Search] = []
    together = threading.Barrier(16)

    def make() -> None:
        together.wait()
        made.append(Search("http://h:8000/shared", max_concurrent=2))

    threads = [threading.Thread(target=make) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(one._service) for one in made}) == 1


def test_a_model_searches_in_our_own_service() -> None:
    index = Index([Document("1", "Paris\nThe capital of France."), Document("2", "Rome\nThe capital of Italy.")])
    with RetrievalServer(index, token="swordfish") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        arguments = {"retrieval_service_url": f"http://127.0.0.1:{server.server_port}/retrieve", "token": "swordfish"}
        toolbox = Toolbox.of(Search, arguments={**arguments, "topk": 1})
        engine = Says(call("search", '{"query_list": ["France capital", "zebra"]}'), "Paris")
        trajectory = hold(engine, lambda: Tools([toolbox]))
        server.shutdown()
    (told,) = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert told == "Doc 1 (Title: Paris)\nThe capital of France.\n---\nNo documents were found."
    schema = trajectory.tools[0]["function"]["parameters"]["properties"]["query_list"]
    assert (schema["type"], schema["items"]) == ("array", {"type": "string"})


# The retrieval service: its corpus, what it finds, and whom it answers.


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


@pytest.mark.slow
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
    with Forked(["retrieval", str(path), "--port", "0"], env={**os.environ, TOKEN: "swordfish"}) as process:
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
    missing = Forked(["retrieval", str(tmp_path / "no"), "--port", "0"])
    printed, _ = missing.communicate()
    assert missing.returncode == 1
    assert "could not be read" in printed
