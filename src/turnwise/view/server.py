"""The viewer's page: served with its data to a browser on this machine, or exported into one HTML file.

The server listens on 127.0.0.1. Every request needs the token of this server: the address that is printed contains it, and the
page keeps it in a cookie. Browsers send a cookie to all ports of a machine, so the page has a path of its own that only this
server names, and the cookie is for that path. Texts of the model are sent as JSON and shown as text: the page runs no script
but its own (Content-Security-Policy).

The page is made of ES modules, without a build step; the names by which they import libraries are in the import map. The
libraries come with the package (`static/vendor`). The exported file needs no server and no network: scripts, styles,
libraries, data and images are inside.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import importlib
import json
import logging
import mimetypes
import os
import re
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeVar

from turnwise.errors import ConfigError, RunError, text_of
from turnwise.record.labels import LabelChanged
from turnwise.services.http_server import (
    RequestRefused,
    bearer_token,
    equal_secrets,
    json_body,
    listen,
    missing_library,
    refuse_foreign_host,
    uvicorn_server,
)
from turnwise.view.index import ConversationIndex
from turnwise.view.runs import FILES, ViewedRun, evaluations, runs_at, side_by_side
from turnwise.view.statistics import with_calls

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

T = TypeVar("T")
_log = logging.getLogger(__name__)


# the files of the page

STATIC = (Path(__file__).parent / "static").resolve()
LIBRARIES = {
    "preact": "vendor/preact/preact.mjs",
    "preact/hooks": "vendor/preact/hooks.mjs",
    "htm": "vendor/htm/htm.mjs",
    "uplot": "vendor/uplot/uPlot.esm.js",
    "diff": "vendor/diff/array.js",
    "@tanstack/virtual-core": "vendor/virtual-core/index.js",
}
"""The file of each library, by the name under which the scripts import it."""


def import_map() -> str:
    """The import map, as the text between the tags."""
    return json.dumps({"imports": {name: f"./static/{path}" for name, path in LIBRARIES.items()}})


def page() -> str:
    """The HTML of the page as the server sends it."""
    scripts = sorted(path for path in STATIC.rglob("*") if path.suffix in (".js", ".mjs"))
    # all scripts are asked for at once, not only when the script that imports them has arrived
    links = (f'<link rel="modulepreload" href="static/{path.relative_to(STATIC).as_posix()}">' for path in scripts)
    text = (STATIC / "index.html").read_text(encoding="utf-8")
    return text.replace("{{import_map}}", import_map()).replace("{{preload}}", "\n".join(links))


# the server

_COOKIE = "turnwise_token"
_YEAR = (
    365 * 24 * 3600
)  # seconds for which a browser keeps the token, so that a bookmark is right also after it was closed
_SECONDS = 1.0  # between two looks at the files of the runs
_SLICE = 0.1  # seconds for which one file is indexed before another one
_QUIET = 0.05  # the index waits until no request was answered for this time,
_PAUSE = 1.0  # but no longer than this
_LONGEST_PATH = 1000  # characters
_MOST_DIGITS = 15
_MOST_EXCERPTS = 200  # conversations in one request
_MOST_FOUND = 20  # conversations of each file, in a search over all runs
_LONGEST_LABELS = 1 << 17  # bytes of the labels and the note of a conversation
_LONGEST_SELECTION = 1 << 24  # bytes of the numbers of conversations

_NAME = "the viewer"


class ViewServer:
    """The viewer on 127.0.0.1. `port` 0 selects a free port; `address` is the address to open, with the token. Runs that appear
    in `paths` later are added to `runs`.

    Raises ConfigError if the port is in use, or a library is not installed.
    """

    def __init__(
        self, runs: list[ViewedRun], *, port: int = 0, token: str | None = None, paths: Sequence[Path] = ()
    ) -> None:
        token = token or secrets.token_urlsafe(16)
        self._socket = listen(port, server=_NAME)
        self.port: int = self._socket.getsockname()[1]
        self.token = token
        self.address = f"http://127.0.0.1:{self.port}/?token={token}"
        app = application(runs, token=token, paths=paths)
        self._server = uvicorn_server(app, server=_NAME, extra="view", seconds_to_finish=1)

    def serve_forever(self) -> None:
        """Answer requests until `stop`, or Ctrl-C."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """End `serve_forever`. To be called from another thread."""
        self._server.should_exit = True


class Access(NamedTuple):
    """What the addresses of the page depend on. Both are kept: a bookmark is right also after the viewer was started again."""

    token: str
    port: int
    """0: any free port."""


def kept_access(file: Path | None = None) -> Access:
    """The token and the port of the last viewer of this user, from a file that only the user can read; a new token if there is no
    such file, or if others can read it. The port is 0 if it is in use.
    """
    file = file or _access_file()
    access = Access(secrets.token_urlsafe(16), 0)
    try:
        if not file.stat().st_mode & 0o077:
            kept = json.loads(file.read_text(encoding="utf-8"))
            access = Access(str(kept["token"]), int(kept["port"]))
    except (OSError, ValueError, KeyError, TypeError):
        return access
    if access.port:
        try:
            listen(access.port, server=_NAME).close()
        except ConfigError:  # such as another viewer
            return access._replace(port=0)
    return access


def _access_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "turnwise" / "view.json"


def keep_access(access: Access, file: Path | None = None) -> None:
    """Keep token and port for the next viewer. Where the file cannot be written, the next viewer has other addresses."""
    file = file or _access_file()
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{secrets.token_hex(4)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(json.dumps(access._asdict()))
        os.replace(temporary, file)


def application(runs: list[ViewedRun], *, token: str, paths: Sequence[Path] = ()) -> Starlette:
    """The viewer as an ASGI application. Raises ConfigError if starlette is not installed."""
    try:
        from starlette.applications import Starlette
        from starlette.routing import Mount, Route
    except ImportError:
        raise missing_library("starlette", server=_NAME, extra="view") from None
    answers = _Answers(runs)

    def json_route(path: str, answer: Callable[[Request], Any]) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                return _json(await asyncio.to_thread(answer, request))
            except RunError as error:
                return _json({"error": str(error)}, 404)

        return Route(path, endpoint)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.last_request = 0.0
        watching = asyncio.create_task(_watch(runs, app, paths))
        yield
        watching.cancel()

    routes = [
        Route("/", _page),
        Route("/static/{path:path}", _static),
        json_route("/api/runs", answers.runs),
        json_route("/api/evaluations", answers.evaluations),
        json_route("/api/side_by_side", answers.side_by_side),
        json_route("/api/search", answers.search_all),
        json_route("/api/runs/{run}/overview", answers.overview),
        json_route("/api/runs/{run}/excerpts/{kind}", answers.excerpts),
        json_route("/api/runs/{run}/metrics/{kind}", answers.metrics),
        json_route("/api/runs/{run}/columns/{kind}", answers.columns),
        json_route("/api/runs/{run}/search/{kind}", answers.search),
        json_route("/api/runs/{run}/statistics/{kind}", answers.statistics),
        json_route("/api/runs/{run}/calls/{kind}", answers.calls),
        json_route("/api/runs/{run}/conversations/{kind}/{number}", answers.conversation),
        json_route("/api/runs/{run}/conversation/{kind}", answers.conversation_of_id),
        json_route("/api/runs/{run}/timeline/{step}", answers.timeline),
        json_route("/api/runs/{run}/labels", answers.labels),
        Route("/api/runs/{run}/labels/{kind}/{number}", answers.label, methods=["POST"]),
        Route("/api/runs/{run}/selection/{kind}", answers.selection, methods=["POST"]),
        Route("/api/runs/{run}/media/{name}", answers.image),
    ]
    # without the path of the page for clients that send the token in a header
    app = Starlette(lifespan=lifespan, routes=[Mount(_page_path(token), routes=routes), *routes])
    app.add_middleware(_guard(token))
    return app


def _page_path(token: str) -> str:
    """The path under which the page and its data are. It says nothing about the token."""
    return f"/{hashlib.sha256(f'the path of the page: {token}'.encode()).hexdigest()[:32]}"


def _json(content: Any, status: int = 200) -> Response:
    """An answer in ASCII: half of a surrogate pair, which a model may write, has no encoding in UTF-8, but an escape in JSON."""
    from starlette.responses import Response

    text = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Response(text, status, media_type="application/json")


async def _watch(runs: list[ViewedRun], app: Starlette, paths: Sequence[Path]) -> None:
    """Index what the runs append, and add runs that appear, for as long as the server runs. Requests of the page go first.

    What fails is logged once, and is the problem of the run on the page; the next round tries it again.
    """
    said: set[str] = set()
    new_runs = functools.partial(_new_runs, runs, paths)
    while True:
        found = await _attempted(new_runs)
        # at the end of the list: the numbers of the runs stay as they are
        runs += _logged("looking for new runs", found, said) or []
        complete = True
        for run in runs:  # in turns, so that no run waits for the index of another one
            done = await _attempted(functools.partial(run.update, _SLICE))
            if isinstance(done, BaseException):
                run.problem = text_of(done)
            complete &= _logged(f"reading {run.path}", done, said) is not False
            waited = 0.0
            while waited < _PAUSE and time.monotonic() - app.state.last_request < _QUIET:
                await asyncio.sleep(_QUIET)
                waited += _QUIET
        if complete:
            # what the first overview needs: loaded when the first rows are shown
            await asyncio.to_thread(importlib.import_module, "turnwise.options.schema")
            await asyncio.sleep(_SECONDS)


async def _attempted(doing: Callable[[], T]) -> T | BaseException:
    """What `doing` returns in a thread, or what it raises: an error must not end the watching without a word."""
    (result,) = await asyncio.gather(asyncio.to_thread(doing), return_exceptions=True)
    return result


def _logged(what: str, result: T | BaseException, said: set[str]) -> T | None:
    """The result; None of an error, which is logged unless it is among `said`."""
    if not isinstance(result, BaseException):
        return result
    text = f"{what} failed, and is tried again: {text_of(result)}"
    if text not in said:
        said.add(text)
        _log.warning("%s", text)
    return None


def _new_runs(runs: Sequence[ViewedRun], paths: Sequence[Path]) -> list[ViewedRun]:
    known = {run.path.resolve() for run in runs}
    found = {place.resolve(): place for path in paths for place in runs_at(path)}
    return [ViewedRun(place) for resolved, place in found.items() if resolved not in known]


class _Answers:
    """What the page asks for. Raises RunError for what is not there."""

    def __init__(self, runs: Sequence[ViewedRun]) -> None:
        self._runs = runs

    def runs(self, request: Request) -> Any:
        return [run.summary() for run in self._runs]

    def evaluations(self, request: Request) -> Any:
        return evaluations(self._runs)

    def side_by_side(self, request: Request) -> Any:
        return side_by_side(self._runs)

    def overview(self, request: Request) -> Any:
        return self._run(request).overview()

    def excerpts(self, request: Request) -> Any:
        numbers = request.query_params.get("numbers", "").split(",")[:_MOST_EXCERPTS]
        known = [_whole_number("numbers", number) for number in numbers if number]
        return self._run(request).indexes[_kind(request)].excerpts(known)

    def metrics(self, request: Request) -> Any:
        return self._run(request).metric_table(_kind(request))

    def columns(self, request: Request) -> Any:
        given = request.query_params
        start, stop = _whole_number("start", given.get("start", "0")), given.get("stop")
        return (
            self._run(request)
            .indexes[_kind(request)]
            .columns(start, None if stop is None else _whole_number("stop", stop))
        )

    def search(self, request: Request) -> Any:
        return self._run(request).indexes[_kind(request)].search(request.query_params.get("query", "")[:1000])

    def search_all(self, request: Request) -> Any:
        query = request.query_params.get("query", "")[:1000]
        places = [(number, kind, run.indexes[kind]) for number, run in enumerate(self._runs) for kind in FILES]
        return [{"run": number, "kind": kind, **index.find(query, _MOST_FOUND)} for number, kind, index in places]

    def statistics(self, request: Request) -> Any:
        return self._run(request).statistics(_kind(request))

    def calls(self, request: Request) -> Any:
        given = request.query_params
        return with_calls(
            self._run(request).indexes[_kind(request)],
            tool=given.get("tool"),
            error=given.get("error"),
            pattern=given.get("pattern"),
        )

    def conversation(self, request: Request) -> Any:
        return self._run(request).conversation(_kind(request), _path_number(request, "number"))

    def conversation_of_id(self, request: Request) -> Any:
        given, run, kind = request.query_params, self._run(request), _kind(request)
        step = given.get("step")
        number = run.indexes[kind].number_of(
            given.get("id", "")[:_LONGEST_PATH], None if step is None else _whole_number("step", step)
        )
        return run.conversation(kind, number)

    def timeline(self, request: Request) -> Any:
        return self._run(request).timeline(_path_number(request, "step"))

    def labels(self, request: Request) -> Any:
        return self._run(request).labels()

    async def label(self, request: Request) -> Response:
        """Labels and a note: {checksum, labels, note, revision}. Checksum and revision are those of what the page shows."""
        try:
            given = await json_body(request, longest=_LONGEST_LABELS)
            checksum, labels, note = given["checksum"], given["labels"], given["note"]
            if not isinstance(labels, list) or not all(isinstance(text, str) for text in (checksum, note, *labels)):
                raise TypeError("another type")
            entry: dict[str, Any] = {
                "checksum": checksum,
                "labels": labels,
                "note": note,
                "revision": int(given["revision"]),
            }
            run, kind, number = self._run(request), _kind(request), _path_number(request, "number")
            return _json(await asyncio.to_thread(run.write_label, kind, number, **entry))
        except RequestRefused as refused:
            return _json({"error": str(refused)}, refused.status)
        except (KeyError, TypeError, ValueError):
            return _json({"error": "the body must be {checksum, labels: [texts], note: text, revision: number}"}, 400)
        except LabelChanged as error:
            return _json({"error": str(error)}, 409)
        except RunError as error:
            return _json({"error": str(error)}, 404)

    async def selection(self, request: Request) -> Response:
        """Conversations as JSON lines: {numbers, form}, where the form is jsonl or sft."""
        from starlette.responses import StreamingResponse

        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the answer is sent
        try:
            given = await json_body(request, longest=_LONGEST_SELECTION)
            numbers, form = given["numbers"], given["form"]
            if form not in ("jsonl", "sft") or not all(type(number) is int and number >= 0 for number in numbers):
                raise TypeError("another type")
            run, kind = self._run(request), _kind(request)
            lines, left_out = await asyncio.to_thread(run.selection, kind, numbers, form, file)
        except (RequestRefused, RunError, KeyError, TypeError) as error:
            file.close()
            status = error.status if isinstance(error, RequestRefused) else 404 if isinstance(error, RunError) else 400
            told = str(error) if status != 400 else "the body must be {numbers: [...], form: jsonl or sft}"
            return _json({"error": told}, status)
        file.seek(0)
        headers = {"X-Lines": str(lines), "X-Left-Out": json.dumps(left_out)}
        return StreamingResponse(_chunks(file), media_type="application/x-ndjson", headers=headers)

    async def image(self, request: Request) -> Response:
        from starlette.responses import FileResponse

        try:
            path = self._run(request).image(request.path_params["name"])
        except RunError:
            path = None
        if path is None:
            return _json({"error": "there is no image of this name"}, 404)
        return FileResponse(path, media_type="image/png", headers={"Cache-Control": "max-age=86400"})

    def _run(self, request: Request) -> ViewedRun:
        number = _path_number(request, "run")
        if number >= len(self._runs):
            raise RunError(f"there is no run {number}; {len(self._runs)} runs are shown")
        return self._runs[number]


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        while chunk := file.read(1 << 18):
            yield chunk


def _kind(request: Request) -> str:
    kind = request.path_params["kind"]
    if kind not in FILES:
        raise RunError(f"{kind!r} is not a kind of conversations; the kinds are {', '.join(FILES)}")
    return kind


def _path_number(request: Request, name: str) -> int:
    return _whole_number(name, request.path_params[name])


def _whole_number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > _MOST_DIGITS:
        raise RunError(f"{name} must be a number of 0 or more with at most {_MOST_DIGITS} digits; it is {text[:40]!r}")
    return int(text)


async def _page(request: Request) -> Response:
    from starlette.responses import HTMLResponse

    return HTMLResponse(page())


async def _static(request: Request) -> Response:
    from starlette.responses import FileResponse, PlainTextResponse

    try:
        path = (STATIC / request.path_params["path"]).resolve()
        if not path.is_relative_to(STATIC) or not path.is_file():
            raise ValueError("not a file of the page")
    except (OSError, ValueError):  # also a name that is too long for the file system, or that has a NUL character
        return PlainTextResponse("not found", 404)
    return FileResponse(path, media_type=_media_type(path), headers={"Cache-Control": "no-cache"})


def _media_type(path: Path) -> str:
    return {".js": "text/javascript", ".mjs": "text/javascript"}.get(
        path.suffix, mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    )


def _policy() -> str:
    """The page's Content-Security-Policy: its own files, and its import map by the map's checksum."""
    checksum = base64.b64encode(hashlib.sha256(import_map().encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'self' 'sha256-{checksum}'; style-src 'self'; img-src 'self' data:; "
        f"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _guard(token: str) -> Any:
    """Middleware that refuses requests without the token or for another host, and sets the headers of each answer."""
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.responses import PlainTextResponse, RedirectResponse

    policy, home = _policy(), _page_path(token)

    class Guard(BaseHTTPMiddleware):
        async def dispatch(self, request: Request, call_next: Any) -> Response:
            answer = await self._answer(request, call_next)
            request.app.state.last_request = time.monotonic()
            answer.headers["Content-Security-Policy"] = policy
            answer.headers["X-Content-Type-Options"] = "nosniff"
            answer.headers["Referrer-Policy"] = "no-referrer"
            return answer

        async def _answer(self, request: Request, call_next: Any) -> Response:
            path: str = request.scope["path"]
            try:
                refuse_foreign_host(request, server=_NAME)
            except RequestRefused as refused:
                return PlainTextResponse(str(refused), refused.status)
            if len(path) > _LONGEST_PATH or not path.isprintable():
                return PlainTextResponse(
                    f"the path of an address has at most {_LONGEST_PATH} characters, and no control characters", 400
                )
            if (given := request.query_params.get("token")) is not None and path in ("/", f"{home}/"):
                if not equal_secrets(given, token):
                    return PlainTextResponse("the token is wrong; open the address that turnwise view printed", 401)
                answer = RedirectResponse(f"{home}/", 303)
                answer.set_cookie(_COOKIE, token, path=f"{home}/", max_age=_YEAR, httponly=True, samesite="strict")
                return answer
            held = request.cookies.get(_COOKIE, "")
            if not (equal_secrets(held, token) or equal_secrets(bearer_token(request), token)):
                return PlainTextResponse(
                    "the token is missing: open the address that turnwise view printed, with cookies "
                    "(curl -sL -b jar -c jar 'ADDRESS')",
                    401,
                )
            return await call_next(request)

    return Guard


# the exported file

_IMAGE = re.compile(r"sha256:([0-9a-f]{64})")
_RELATIVE = re.compile(r"""(\bfrom\s*|\bimport\s*|\bimport\()["'](\./[^"']+)["']""")


def export(runs: Sequence[ViewedRun], file: Path, *, most: int = 200, ids: Sequence[str] = ()) -> int:
    """Write the page with these runs to `file`. Returns its size in bytes.

    It has the latest `most` conversations of each run, or those with the given ids, and the other conversations of their groups.

    Raises ConfigError if `most` is not positive or the file cannot be written, RunError if there is no conversation with one of
    the ids, or a record cannot be read.
    """
    if most < 1:
        raise ConfigError(f"--most is {most}; it must be at least 1")
    for run in runs:
        for index in run.indexes.values():  # a record that cannot be read is an error here
            index.update()
        run.update()  # the page names damaged parts of it
    parts = [_run(run, most, ids) for run in runs]
    missing = set(ids) - {found for part in parts for columns in part["columns"].values() for found in columns["id"]}
    if missing:
        raise RunError(f"no run has a conversation with the id {min(missing)!r}; turnwise view lists the ids")
    html = _html({"runs": parts, "evaluations": evaluations(runs), "side_by_side": side_by_side(runs)})
    try:
        file.write_text(html, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from None
    return len(html.encode())


def _run(run: ViewedRun, most: int, ids: Sequence[str]) -> dict[str, Any]:
    """The data of a run. The conversations in it are numbered from 0."""
    columns: dict[str, Any] = {}
    conversations: dict[str, dict[int, Any]] = {}
    excerpts: dict[str, dict[int, Any]] = {}
    images: dict[str, str] = {}
    calls: dict[str, list[dict[str, Any]]] = {}
    places: dict[int, int] = {}
    for kind in FILES:
        every = run.indexes[kind].columns()
        numbers = _exported(every, most, ids)
        columns[kind] = {name: [values[n] for n in numbers] for name, values in every.items()}
        conversations[kind] = {place: {**run.conversation(kind, n), "number": place} for place, n in enumerate(numbers)}
        excerpts[kind] = {place: run.indexes[kind].excerpts([n]).get(n) for place, n in enumerate(numbers)}
        calls[kind] = _calls(run.indexes[kind], numbers)
        if kind == "train":
            places = {n: place for place, n in enumerate(numbers)}
        for name in set(_IMAGE.findall(json.dumps([c.get("messages") for c in conversations[kind].values()]))):
            if (path := run.image(name)) is not None:
                images[name] = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    summary = run.summary()
    counts = {kind: len(found) for kind, found in conversations.items()}
    indexed = {kind: {"start": 0, "stop": count, "generation": 0, "ready": True} for kind, count in counts.items()}
    return {
        "summary": {
            **summary,
            "path": run.name,
            "conversations": counts,
            "lines": counts,
            "indexed": indexed,
            "left_out": {kind: summary["lines"][kind] - count for kind, count in counts.items()},
        },
        "overview": _overview(run),
        "metrics": {kind: run.metric_table(kind) for kind in FILES},
        "statistics": {kind: run.statistics(kind) for kind in FILES},
        "calls": calls,
        "labels": _labels(run, columns),
        "columns": columns,
        "excerpts": excerpts,
        "conversations": conversations,
        "timelines": _timelines(run, columns["train"]["step"], places),
        "images": images,
    }


def _calls(index: ConversationIndex, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """The tool calls of the exported conversations, with their numbers in the export."""
    places = {number: place for place, number in enumerate(numbers)}
    found = index.query("SELECT number, tool, error, pattern FROM calls")
    names = ("number", "tool", "error", "pattern")
    return [dict(zip(names, (places[n], *call), strict=True)) for n, *call in found if n in places]


def _labels(run: ViewedRun, columns: Mapping[str, Mapping[str, Sequence[Any]]]) -> list[dict[str, Any]]:
    """The labels and notes of the exported conversations only: notes on others are not meant for those who get the file."""
    exported = {(kind, *key) for kind, of in columns.items() for key in zip(of["id"], of["step"], strict=True)}
    try:
        labels = run.labels()
    except RunError:  # the conversations are shown without
        return []
    return [one for one in labels if not one["replaced"] and (one["kind"], one["id"], one["step"]) in exported]


def _overview(run: ViewedRun) -> dict[str, Any]:
    try:
        return run.overview()
    except RunError as error:
        return {"problem": str(error)}


def _exported(columns: Mapping[str, Sequence[Any]], most: int, ids: Sequence[str]) -> list[int]:
    """The numbers of the conversations to export: the latest `most`, or those with the `ids`, and all others of their groups: the
    page of a group is wrong without them."""
    names = columns["id"]
    wanted = [n for n, name in enumerate(names) if name in ids] if ids else range(len(names))[-most:]
    groups = {(columns["step"][n], columns["group"][n]) for n in wanted if columns["group"][n] is not None}
    chosen = set(wanted)
    pairs = zip(columns["step"], columns["group"], strict=True)
    return [n for n, group in enumerate(pairs) if n in chosen or group in groups]


def _timelines(run: ViewedRun, steps: Sequence[Any], places: Mapping[int, int]) -> dict[str, dict[str, Any]]:
    """The timeline of each step of which a conversation is exported, with the times of all its conversations. Those that are not
    exported have the number null."""
    lines = {step: run.timeline(int(step)) for step in dict.fromkeys(steps) if step is not None}
    for line in lines.values():
        for entry in line["conversations"]:
            entry["number"] = places.get(entry["number"])
    return {str(step): line for step, line in lines.items()}


def _html(data: dict[str, Any]) -> str:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    styles = "\n".join(
        (STATIC / name).read_text(encoding="utf-8") for name in ("vendor/uplot/uPlot.min.css", "style.css")
    )
    page = re.sub(r'<link rel="stylesheet"[^>]*>\n', "", page)
    page = page.replace("</head>", f"<style>{styles}</style>\n</head>")
    imports = json.dumps({"imports": dict(_modules())})
    page = page.replace("{{import_map}}", imports).replace("{{preload}}\n", "")
    # "<" is written as an escape: no text of a conversation can end the element
    inside = json.dumps(data, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")
    return page.replace(
        '<script type="module" src="static/app.js"></script>',
        f'<script type="application/json" id="export">{inside}</script>\n'
        '<script type="module">import "turnwise:app.js";</script>',
    )


def _modules() -> Iterator[tuple[str, str]]:
    """All scripts by the names under which they are imported, as data addresses. Imports of files become such names."""
    names = {path: name for name, path in LIBRARIES.items()}
    for file in sorted(path for path in STATIC.rglob("*") if path.suffix in (".js", ".mjs")):
        relative = file.relative_to(STATIC)

        def named(found: re.Match[str], folder: Path = relative.parent) -> str:
            path = (folder / found[2]).as_posix()
            return f'{found[1]}"{names.get(path, f"turnwise:{path}")}"'

        text = _RELATIVE.sub(named, file.read_text(encoding="utf-8"))
        text = re.sub(r"//# sourceMappingURL=.*", "", text)
        address = "data:text/javascript;base64," + base64.b64encode(text.encode()).decode()
        yield names.get(relative.as_posix(), f"turnwise:{relative.as_posix()}"), address
