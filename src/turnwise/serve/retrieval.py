"""A small retrieval service: BM25 over a corpus in one file, offline, for `turnwise.environments.search`.

Speaks Search-R1's protocol: `POST /retrieve` with `{"queries": ["capital of France"], "topk": 3, "return_scores": true}` gives
`{"result": [[{"document": {"id": "7", "contents": "Paris\\nParis is ..."}, "score": 2.5}, ...]]}`, the best first, and only
documents that share a word with the query. It listens on this machine only; with a token, it answers nobody who has not got it.

    turnwise retrieval corpus.jsonl --port 8000
"""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError, DataError

__all__ = ["TOKEN", "Document", "Index", "RetrievalServer", "read_corpus", "serve"]

TOKEN = "TURNWISE_RETRIEVAL_TOKEN"
"""The environment variable with the token; arguments of a command are seen by everybody on the machine."""

_LONGEST_BODY = 1 << 20  # bytes
_MOST_QUERIES, _MOST_DOCUMENTS = 1000, 100


@dataclass(frozen=True, slots=True)
class Document:
    """One entry of the corpus; the first line of `contents` is its title."""

    id: str
    contents: str


def read_corpus(path: Path) -> list[Document]:
    """Read a corpus: a JSON object a line, `{"id", "title", "text"}` or `{"id", "contents"}`.

    A document without an `id` has its line's number.

    Raises DataError, with the line's number, if there is no such file or a line is something else.
    """
    try:
        documents = list(_documents(path))
    except OSError as error:
        raise DataError(f"the corpus {path} could not be read: {error.strerror}") from None
    if not documents:
        raise DataError(f"the corpus {path} is empty; at least one document is needed")
    return documents


def _documents(path: Path) -> Iterator[Document]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:  # no JSON, or no UTF-8
                raise DataError(f"{path}:{number}: this line is not JSON: {error}") from None
            if not isinstance(record, dict):
                raise DataError(f"{path}:{number}: a document must be a JSON object; this is a {type(record).__name__}")
            title, text, contents = (record.get(name) for name in ("title", "text", "contents"))
            if isinstance(title, str) and isinstance(text, str) and contents is None:
                contents = f"{' '.join(title.split())}\n{text}"  # a title of two lines would be cut in two
            if not isinstance(contents, str):
                have = ", ".join(record) or "none"
                raise DataError(
                    f"{path}:{number}: a document needs the texts `title` and `text`, or `contents`; it has: {have}"
                )
            yield Document(str(record.get("id", number)), contents)


class Index:
    """BM25 (Lucene's variant, English stop words left out) over documents.

    Raises ConfigError where the library is missing.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        try:
            import bm25s
        except ImportError:
            raise ConfigError(
                "the retrieval service needs the `bm25s` package: pip install 'turnwise[search]'"
            ) from None
        logging.getLogger("bm25s").setLevel(logging.WARNING)  # it tells every step, at a level of its own
        self._bm25s = bm25s
        self._documents = documents
        self._model: Any = None
        tokens = self._tokens([document.contents for document in documents])
        if any(tokens):  # a corpus without a single word finds nothing
            self._model = bm25s.BM25()
            self._model.index(tokens, show_progress=False)
            self._known = set(self._model.vocab_dict)

    def search(self, query: str, topk: int) -> list[tuple[Document, float]]:
        """The documents that share a word with the query, at most `topk`, the best first, equals in the corpus's order."""
        (words,) = self._tokens([query])
        if self._model is None or not (known := [word for word in words if word in self._known]):
            return []
        scores = self._model.get_scores(known)
        best = (-scores).argsort(kind="stable")[:topk]
        return [(self._documents[place], float(scores[place])) for place in best if scores[place] > 0]

    def _tokens(self, texts: list[str]) -> list[list[str]]:
        tokens: Any = self._bm25s.tokenize(texts, stopwords="en", return_ids=False, show_progress=False)
        return tokens


class RetrievalServer(ThreadingHTTPServer):
    """The service, on this machine's own address; `port` 0 takes a free one, `server_port` tells which.

    Raises ConfigError if the port is taken.
    """

    daemon_threads = True

    def __init__(self, index: Index, *, port: int = 0, token: str | None = None) -> None:
        self.index = index
        self.token = token
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"the retrieval service cannot listen on port {port}: {error}; give another --port"
            ) from None


class _Refused(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: RetrievalServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds for a client to say what it wants
    wbufsize = -1  # header and body in one piece: two would wait for each other

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, {"status": "ok"})
        else:
            self._answer(404, {"error": "POST to /retrieve"})

    def do_POST(self) -> None:
        try:
            queries, topk, scores = _read(self._question())
        except _Refused as refused:
            self.close_connection = True  # its body may not have been read
            self._answer(refused.status, {"error": str(refused)})
            return
        found = [self.server.index.search(query, topk) for query in queries]
        self._answer(200, {"result": [[_told(one, score, scores) for one, score in documents] for documents in found]})

    def log_message(self, format: str, *args: object) -> None:  # a line for each request would bury everything else
        pass

    def _question(self) -> Any:
        if self.path.rstrip("/") not in ("", "/retrieve"):
            raise _Refused(404, "POST to /retrieve")
        given = self.headers.get("Authorization", "")
        if self.server.token is not None and not hmac.compare_digest(
            given.encode("utf-8", "surrogateescape"), f"Bearer {self.server.token}".encode()
        ):
            raise _Refused(401, "the header `Authorization: Bearer <token>` is missing or wrong")
        if self.headers.get_content_type() != "application/json":  # no web page in a browser here may ask by itself
            raise _Refused(415, "Content-Type must be application/json")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise _Refused(411, "Content-Length is missing")
        if int(length) > _LONGEST_BODY:
            raise _Refused(413, f"a question may have {_LONGEST_BODY} bytes; this one has {length}")
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise _Refused(400, "the body is not JSON") from None

    def _answer(self, status: int, body: Mapping[str, Any]) -> None:
        content = json.dumps(body).encode("utf-8")
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()


def _read(question: Any) -> tuple[list[str], int, bool]:
    asked = question if isinstance(question, dict) else {}
    queries, topk, scores = asked.get("queries"), asked.get("topk"), asked.get("return_scores", False)
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise _Refused(400, '`queries` must be a list of texts, as in {"queries": ["capital of France"], "topk": 3}')
    if len(queries) > _MOST_QUERIES:
        raise _Refused(400, f"`queries` has {len(queries)} entries; at most {_MOST_QUERIES} are answered at once")
    topk = 3 if topk is None else topk
    if isinstance(topk, bool) or not isinstance(topk, int) or not 0 < topk <= _MOST_DOCUMENTS:
        raise _Refused(400, f"`topk` must be a number from 1 to {_MOST_DOCUMENTS}; it is {topk!r}")
    if not isinstance(scores, bool):
        raise _Refused(400, f"`return_scores` must be true or false; it is {scores!r}")
    return queries, topk, scores


def _told(document: Document, score: float, scores: bool) -> dict[str, Any]:
    body = {"id": document.id, "contents": document.contents}
    return {"document": body, "score": score} if scores else body


def serve(corpus: Path, *, port: int, token: str | None) -> None:
    """Read the corpus and answer until interrupted."""
    documents = read_corpus(corpus)
    with RetrievalServer(Index(documents), port=port, token=token) as server:
        address = f"http://127.0.0.1:{server.server_port}/retrieve"
        print(f"{len(documents)} documents at {address}{' (with a token)' if token else ''}", flush=True)
        server.serve_forever()
