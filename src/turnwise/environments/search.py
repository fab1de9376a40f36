"""Document search with the protocol of Search-R1: the tool of the model, and a small retrieval server that works offline.

`POST /retrieve` with `{"queries": ["capital of France"], "topk": 3, "return_scores": true}` returns `{"result": [[{"document":
{"id": "7", "contents": "Paris ..."}, "score": 2.5}, ...]]}`: one list per query, best first. The first line of `contents` is
the title. The tool sends such requests to any service that speaks the protocol.

The server ranks by BM25 over a corpus in one file, and returns only documents that share a word with the query. It listens on
127.0.0.1 only. If a token is set, requests without it are refused.

    turnwise retrieval corpus.jsonl --port 8000
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from turnwise.errors import ConfigError, DataError
from turnwise.json_yaml import parse_json
from turnwise.services.http_server import (
    RequestRefused,
    json_body,
    listen,
    missing_library,
    refuse_foreign_host,
    refuse_wrong_token,
    uvicorn_server,
)
from turnwise.services.json_service import ServiceError, service

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response


# the tool

_MOST_QUERIES = 20


class Search:
    """A tool that finds documents.

    Args:
        retrieval_service_url: The address of the service, such as `http://127.0.0.1:8000/retrieve`.
        topk: The number of documents for each query.
        timeout: Seconds for one request.
        deadline: Seconds for a request with all its retries. The default allows all retries to time out.
        retries: Further requests if the service is unreachable, overloaded or returns a server error.
        pause: Seconds before the first retry; each further pause is longer by this time.
        max_concurrent: The maximum number of requests at the same time, over all conversations.
        token: Sent as a bearer token.
        document_chars: The maximum length of a document in the result, in characters.
    """

    def __init__(
        self,
        retrieval_service_url: str,
        *,
        topk: int = 3,
        timeout: float = 30.0,
        deadline: float | None = None,
        retries: int = 3,
        pause: float = 1.0,
        max_concurrent: int = 120,
        token: str | None = None,
        document_chars: int = 4000,
    ) -> None:
        for name, value in (("topk", topk), ("document_chars", document_chars)):
            if value < 1:
                raise ConfigError(f"Search: {name} is {value}; it must be at least 1")
        self._service = service(
            retrieval_service_url,
            timeout=timeout,
            deadline=deadline,
            retries=retries,
            pause=pause,
            max_concurrent=max_concurrent,
            headers=(("Authorization", f"Bearer {token}"),) if token is not None else (),
        )
        self._topk = topk
        self._document_chars = document_chars

    async def search(self, query_list: list[str]) -> str:
        """Search for documents. Several queries are answered together.

        Args:
            query_list: What to search for, a query each.
        """
        if not 0 < len(query_list) <= _MOST_QUERIES:
            raise ValueError(f"query_list has {len(query_list)} queries; it must have 1 to {_MOST_QUERIES}")
        answer = await self._service.ask({"queries": query_list, "topk": self._topk, "return_scores": True})
        results = answer.get("result")
        if not isinstance(results, list) or len(results) != len(query_list):
            raise ServiceError(
                f"the service {self._service.url} received {len(query_list)} queries and must return "
                f'{{"result": [one list for each query]}}; it returned {str(answer)[:300]}'
            )
        return "\n---\n".join(self._result(documents) for documents in results)

    def _result(self, documents: Any) -> str:
        if not isinstance(documents, Sequence) or isinstance(documents, str):
            raise ServiceError(
                f"the service {self._service.url} must return lists of documents; it returned: {str(documents)[:300]}"
            )
        texts = [self._contents(document) for document in documents[: self._topk]]
        if not texts:
            return "No documents were found."
        lines: list[str] = []
        for number, contents in enumerate(texts, 1):
            title, _, text = contents.partition("\n")
            if len(text) > self._document_chars:
                text = f"{text[: self._document_chars]} [...]"
            lines.append(f"Doc {number} (Title: {title})\n{text}")
        return "\n\n".join(lines).strip()

    def _contents(self, document: Any) -> str:
        # without scores, the service may return the documents without the outer object
        inner = document.get("document", document) if isinstance(document, Mapping) else None
        contents = inner.get("contents") if isinstance(inner, Mapping) else None
        if not isinstance(contents, str):
            raise ServiceError(
                f'the service {self._service.url} must return documents such as {{"document": {{"contents": '
                f'"Title\\ntext"}}, "score": 1.5}}; it returned {str(document)[:300]}'
            )
        return contents


# the server

TOKEN = "TURNWISE_RETRIEVAL_TOKEN"
"""The environment variable with the token. It is not an argument, because other users can see the arguments of a process."""

_LONGEST_BODY = 1 << 20  # bytes
_NAME = "the retrieval service"
_MOST_QUERIES_OF_A_REQUEST, _MOST_DOCUMENTS = 1000, 100


@dataclass(frozen=True, slots=True)
class Document:
    """One entry of the corpus; the first line of `contents` is its title."""

    id: str
    contents: str


def read_corpus(path: Path) -> list[Document]:
    """Read a corpus: one JSON object per line, `{"id", "title", "text"}` or `{"id", "contents"}`.

    The id of a document without `id` is the number of its line.

    Raises DataError, with the line's number, if the file is missing or a line is not a document.
    """
    try:
        documents = list(_documents(path))
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL character
        raise DataError(f"the corpus {path} could not be read: {getattr(error, 'strerror', None) or error}") from None
    if not documents:
        raise DataError(f"the corpus {path} is empty; at least one document is needed")
    return documents


def _documents(path: Path) -> Iterator[Document]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}: this line"
            try:
                text = line.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise DataError(f"{where} is not UTF-8: {error.reason} at byte {error.start + 1}") from None
            record = parse_json(text, where=where, error=DataError)
            if not isinstance(record, dict):
                raise DataError(f"{path}:{number}: a document must be a JSON object; this is a {type(record).__name__}")
            title, text, contents = (record.get(name) for name in ("title", "text", "contents"))
            if isinstance(title, str) and isinstance(text, str) and contents is None:
                contents = f"{' '.join(title.split())}\n{text}"  # the title is one line
            if not isinstance(contents, str):
                have = ", ".join(record) or "none"
                raise DataError(
                    f"{path}:{number}: a document needs the texts `title` and `text`, or `contents`; it has: {have}"
                )
            name = record.get("id", number)
            if isinstance(name, bool) or not isinstance(name, str | int | float):
                raise DataError(f"{path}:{number}: the `id` of a document is a text or a number; this is {name!r:.80}")
            yield Document(str(name), contents)


class Index:
    """BM25 (Lucene's variant, English stop words left out) over documents.

    Raises ConfigError if the library `bm25s` is not installed.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        try:
            import bm25s
        except ImportError:
            raise _missing("bm25s") from None
        logging.getLogger("bm25s").setLevel(logging.WARNING)  # it logs every step
        self._bm25s = bm25s
        self._documents = documents
        self._model: Any = None
        tokens = self._tokens([document.contents for document in documents])
        if any(tokens):  # a corpus without words has no index
            self._model = bm25s.BM25()
            self._model.index(tokens, show_progress=False)
            self._known = set(self._model.vocab_dict)

    def search(self, query: str, topk: int) -> list[tuple[Document, float]]:
        """At most `topk` documents that share a word with the query, best first; equal scores keep the order of the corpus."""
        (words,) = self._tokens([query])
        if self._model is None or not (known := [word for word in words if word in self._known]):
            return []
        scores = self._model.get_scores(known)
        best = (-scores).argsort(kind="stable")[:topk]
        return [(self._documents[place], float(scores[place])) for place in best if scores[place] > 0]

    def _tokens(self, texts: list[str]) -> list[list[str]]:
        tokens: Any = self._bm25s.tokenize(texts, stopwords="en", return_ids=False, show_progress=False)
        return tokens


class RetrievalServer:
    """The service on 127.0.0.1. `port` 0 selects a free port; `server_port` is its number.

    `serve_forever` answers requests until `shutdown` is called from another thread, or Ctrl-C. Leaving the `with` block frees
    the port.

    Raises ConfigError if the port is in use, or a library is not installed.
    """

    def __init__(self, index: Index, *, port: int = 0, token: str | None = None) -> None:
        self.index = index
        self._server = uvicorn_server(_application(index, token), server=_NAME, extra="search")
        self._socket = listen(port, server=_NAME)
        self._idle = threading.Event()
        self._idle.set()
        self.server_address: tuple[str, int] = self._socket.getsockname()
        """Host and port."""
        self.server_port = self.server_address[1]

    def serve_forever(self) -> None:
        """Answer requests until `shutdown`."""
        self._idle.clear()
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._idle.set()

    def shutdown(self) -> None:
        """End `serve_forever` and wait for it. To be called from another thread."""
        self._server.should_exit = True
        self._idle.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()


def _application(index: Index, token: str | None) -> Starlette:
    try:
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import JSONResponse
        from starlette.routing import Route
    except ImportError:
        raise _missing("starlette") from None

    async def retrieve(request: Request) -> Response:
        try:
            if token is None:
                refuse_foreign_host(request, server=_NAME)
            refuse_wrong_token(request, token, hint=f"send the value of the server's variable {TOKEN}")
            queries, topk, scores = _read(await json_body(request, longest=_LONGEST_BODY))
        except RequestRefused as refused:
            return JSONResponse({"error": str(refused)}, refused.status, headers=refused.headers)
        results = await run_in_threadpool(lambda: [index.search(query, topk) for query in queries])
        result = [[_result(document, score, scores) for document, score in documents] for documents in results]
        return JSONResponse({"result": result})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def not_found(request: Request) -> Response:
        return JSONResponse({"error": "POST to /retrieve"}, 404)

    return Starlette(
        routes=[
            Route("/health", health, methods=["GET"]),
            *(Route(path, retrieve, methods=["POST"]) for path in ("/", "/retrieve", "/retrieve/")),
            Route("/{path:path}", not_found, methods=["GET", "POST"]),
        ]
    )


def _missing(library: str) -> ConfigError:
    return missing_library(library, server=_NAME, extra="search")


def _read(question: Any) -> tuple[list[str], int, bool]:
    asked = question if isinstance(question, dict) else {}
    queries, topk, scores = asked.get("queries"), asked.get("topk"), asked.get("return_scores", False)
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise RequestRefused(
            400, '`queries` must be a list of texts, as in {"queries": ["capital of France"], "topk": 3}'
        )
    if len(queries) > _MOST_QUERIES_OF_A_REQUEST:
        raise RequestRefused(
            400, f"`queries` has {len(queries)} entries; at most {_MOST_QUERIES_OF_A_REQUEST} are answered at once"
        )
    topk = 3 if topk is None else topk
    if isinstance(topk, bool) or not isinstance(topk, int) or not 0 < topk <= _MOST_DOCUMENTS:
        raise RequestRefused(400, f"`topk` must be a number from 1 to {_MOST_DOCUMENTS}; it is {topk!r}")
    if not isinstance(scores, bool):
        raise RequestRefused(400, f"`return_scores` must be true or false; it is {scores!r}")
    return queries, topk, scores


def _result(document: Document, score: float, scores: bool) -> dict[str, Any]:
    body = {"id": document.id, "contents": document.contents}
    return {"document": body, "score": score} if scores else body


def serve(corpus: Path, *, port: int, token: str | None) -> None:
    """Read the corpus and answer requests until interrupted."""
    documents = read_corpus(corpus)
    with RetrievalServer(Index(documents), port=port, token=token) as server:
        address = f"http://127.0.0.1:{server.server_port}/retrieve"
        print(f"{len(documents)} documents at {address}{' (with a token)' if token else ''}", flush=True)
        server.serve_forever()
