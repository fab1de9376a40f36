"""The search tool, against a real service: ours, and one that answers what a test wants."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from typing import Any

import pytest

from support.conversations import Says, call, hold
from support.servers import Answer, serving
from turnwise.environments.search import Document, Index, RetrievalServer, Search
from turnwise.environments.tools.tool import Toolbox
from turnwise.environments.tools.toolbox import Tools
from turnwise.errors import ConfigError
from turnwise.services.json_service import ServiceError


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
