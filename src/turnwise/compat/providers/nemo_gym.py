"""`environment: nemo_gym:http://127.0.0.1:11001`: a resources server of NeMo Gym, which runs elsewhere or is started here.

NeMo Gym needs Python 3.12, so turnwise only talks HTTP with the server, in the way of NeMo Gym's own agents. A server with
`/verify` is played as its `simple_agent` does: `/seed_session`, a POST request for each call, and `/verify` of all turns at the
end. One with `/reset` and `/step` is played as its `gymnasium_agent` does. The server's cookies are a conversation's session.

A row is a line of NeMo Gym's data: `responses_create_params` (messages and tools of OpenAI's Responses API), and the columns that
the server reads. A name instead of a URL is a server of the installed package `nemo-gym`, which the Python of the argument
`python` runs (`nemo_gym_server.py`), with the lines of its `data/example.jsonl` as rows."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import os
import select
import subprocess
import tempfile
import threading
import time
import urllib.request
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any
from urllib.error import URLError
from urllib.parse import quote

from turnwise.compat.object_factory import number, plain
from turnwise.compat.providers.provider import About, LibraryEnvironments, Restarts
from turnwise.data.rows import ProvidedRows
from turnwise.environments.agents.requests import AgentAnswer, ChatRequest, Refused, answer_message, template_messages
from turnwise.environments.agents.responses import Responses
from turnwise.environments.environment import Environment
from turnwise.environments.tools.result import Answer, failed
from turnwise.errors import ConfigError, Failed, nearest
from turnwise.json_yaml import parse_json
from turnwise.types import Failure, Message, Opening, Reply, Row, ToolCall, ToolOutcome, Turn
from turnwise.user_code.threads import run_in_thread

_PROGRAM = Path(__file__).with_name("nemo_gym_server.py")
_FIND = """
import importlib.metadata, importlib.util, json, pathlib, sys
found = importlib.util.find_spec("resources_servers")
folders = [pathlib.Path(path) for path in found.submodule_search_locations] if found else []
names = {file.parent.name: str(file.parent) for folder in folders for file in folder.glob("*/app.py")}
print(json.dumps(names))
"""
_ASKING = 20.0
"""Seconds to find the servers of a package, or the routes of a server."""
_NO_CALLS = "environment.arguments.execute_calls has no effect on a server with /step, which answers calls itself: remove it from"
_CONNECTING = 4
"""How often a request is sent that gets no connection."""


class NemoGym(LibraryEnvironments):
    """Makes the conversations with a resources server (an EnvironmentSource with rows).

    Args:
        name: The URL of a running resources server, or the name of one in the package: a folder of `resources_servers`.
        python: The interpreter of the environment with the package, for a name.
        config: Further options of the server's configuration, for a name.
        execute_calls: Send the model's calls to the server, as NeMo Gym's `simple_agent` does. False: a turn with calls is
            the last one, and `/verify` judges it, as with its `non_executing_simple_agent`.
        seconds: The time for each request.
        seconds_to_start: The time that the server has to start, for a name.

    Raises ConfigError.
    """

    writes_prompt = True

    def __init__(
        self,
        name: str,
        *,
        python: str | None = None,
        config: Mapping[str, Any] | None = None,
        execute_calls: bool = True,
        seconds: float = 60.0,
        seconds_to_start: float = 120.0,
    ) -> None:
        try:
            self.aiohttp = importlib.import_module("aiohttp")
        except ImportError:
            raise ConfigError("environment: nemo_gym needs aiohttp: pip install 'turnwise[http]'") from None
        for key, value in (("seconds", seconds), ("seconds_to_start", seconds_to_start)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"environment.arguments.{key} is {value!r}; it must be a number above 0")
        self.name, self.seconds, self.execute_calls = name, float(seconds), execute_calls
        self._server: _Server | None = None
        if name.startswith(("http://", "https://")):
            if given := [key for key, value in (("python", python), ("config", config)) if value is not None]:
                raise ConfigError(
                    f"environment.arguments.{given[0]} has no effect with the URL of a running server: remove it"
                )
            self._url = name.rstrip("/")
            self._kind = _kind_of(self._url)
            if self._kind == "step" and not execute_calls:
                raise ConfigError(f"{_NO_CALLS} {name}")
        else:
            if python is None:
                raise ConfigError(
                    f"environment: nemo_gym:{name} is no URL. Name a running resources server (http://127.0.0.1:11001), or set "
                    f"environment.arguments.python to the Python of an environment with the package nemo-gym, which needs "
                    f"Python 3.12 (pip install nemo-gym)"
                )
            self._server = _Server(name, python, dict(config or {}), seconds_to_start)

    def about(self) -> About:
        """What the server brings."""
        brought = "" if self._server is None else f", or the {len(self._server.examples)} examples of the server"
        return About(rows=f"those of data.train, lines of NeMo Gym's data{brought}")

    def rows(self, count: int | None, *, held_out: bool) -> ProvidedRows:
        """The examples of a server that is started here."""
        if held_out or self._server is None or not self._server.examples:
            raise ConfigError(
                f"nemo_gym:{self.name} brings no {'held-out ' if held_out else ''}rows: set "
                f"{'data.eval' if held_out else 'data.train'} to a file or data set of NeMo Gym's lines, which have "
                f"`responses_create_params`"
            )
        return ProvidedRows(records=self._server.examples[:count])

    async def place(self) -> tuple[str, str]:
        """The URL of the server, and `verify` or `step`. Starts it, if that is to be done here. Raises Failed."""
        if self._server is not None:
            self._url, self._kind = await run_in_thread(self._server.started, name=self.name, kind="environment")
        if self._kind == "step" and not self.execute_calls:
            raise Failed(Failure("environment", f"{_NO_CALLS} nemo_gym:{self.name}"))
        return self._url, self._kind

    def __call__(self) -> Environment:
        return _GymSession(self)

    async def aclose(self) -> None:
        """Stop the server, if it was started here."""
        if self._server is not None:
            await run_in_thread(self._server.stop, name=self.name, kind="environment", closes=True)


# the server


def _kind_of(url: str) -> str:
    """`verify` or `step`. Raises ConfigError if no resources server answers."""
    try:
        with urllib.request.urlopen(f"{url}/openapi.json", timeout=_ASKING) as answer:
            routes = list(json.load(answer)["paths"])
    except (URLError, OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"environment: nemo_gym:{url} does not list its routes (GET /openapi.json): {error!r:.200}. Is a resources server of "
            f"NeMo Gym running there? Give its own URL, not that of the head server"
        ) from None
    for kind, needed in (("step", {"/reset", "/step"}), ("verify", {"/seed_session", "/verify"})):
        if needed <= set(routes):
            return kind
    raise ConfigError(
        f"environment: nemo_gym:{url} has the routes {', '.join(routes)[:200]}; a resources server has /seed_session and "
        f"/verify, or /reset and /step"
    )


@dataclass(frozen=True, slots=True)
class _Running:
    """A server that was started."""

    url: str
    kind: str
    """`verify` or `step`."""
    process: subprocess.Popen[Any]
    log: IO[str]
    end: Callable[[], Any]
    """Ends the process."""


class _Server:
    """A server of the package, in a process of another Python, which is started when it is first needed."""

    def __init__(self, name: str, python: str, config: Mapping[str, Any], seconds: float) -> None:
        self._name, self._python, self._config, self._seconds = name, python, config, seconds
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._restarts = Restarts("have ended")
        names = self._names()
        if name not in names:
            raise ConfigError(
                f"environment: nemo-gym has no resources server {name!r}{nearest(name, names)}; it has {', '.join(sorted(names))}"
            )
        self._folder = Path(names[name])

    @cached_property
    def examples(self) -> list[dict[str, Any]]:
        """The lines of its `data/example.jsonl`."""
        file = self._folder / "data" / "example.jsonl"
        if not file.is_file():
            return []
        lines = file.read_text(encoding="utf-8").splitlines()
        return [
            parse_json(line, where=f"{file}:{number}", error=ConfigError)
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]

    def started(self) -> tuple[str, str]:
        """Its URL and kind. One that has ended is replaced. Raises Failed if it does not start, or if too many have ended."""
        with self._lock:
            self._leave_ended()
            if self._running is None:
                try:
                    self._running = self._start()
                except ConfigError as error:
                    raise Failed(Failure("environment", str(error))) from None
            return self._running.url, self._running.kind

    def stop(self) -> None:
        """End the process. It can be started again."""
        with self._lock:
            if self._running is not None:
                self._running.end()
            self._running, self._restarts = None, Restarts("have ended")

    def _leave_ended(self) -> None:
        """Forget a server that has ended, so that another one is started. Raises Failed."""
        running = self._running
        if running is None or (status := running.process.poll()) is None:
            return
        why = f"the server nemo_gym:{self._name} has ended with the status {status}; it said: {_last(running.log)}"
        if (refused := self._restarts.refused(why)) is not None:
            raise Failed(Failure("environment", refused))
        running.end()
        self._running = None

    def _names(self) -> dict[str, str]:
        """The folders of the package's resources servers by name. Raises ConfigError."""
        try:
            asked = subprocess.run(
                [self._python, "-c", _FIND], capture_output=True, text=True, timeout=_ASKING, env=_surroundings()
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"environment.arguments.python: {self._python!r} does not run: {error}") from None
        names = json.loads(asked.stdout) if asked.returncode == 0 else {}
        if not names:
            raise ConfigError(
                f"environment.arguments.python: {self._python!r} has no package nemo-gym: `{self._python} -m pip install "
                f"nemo-gym` (it needs Python 3.12){': ' + asked.stderr[-300:] if asked.returncode else ''}"
            )
        return names

    def _start(self) -> _Running:
        port, port_there = os.pipe()
        parent_there, parent = os.pipe()
        log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed with the process
        try:
            process = subprocess.Popen(
                [
                    self._python,
                    "-P",
                    str(_PROGRAM),
                    self._name,
                    str(port_there),
                    str(parent_there),
                    json.dumps(self._config),
                ],
                pass_fds=(port_there, parent_there),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env=_surroundings(),
            )
        finally:
            os.close(port_there)
            os.close(parent_there)
        # the process ends when `parent` is closed, also if this process is killed
        end = weakref.finalize(self, _end, process, parent, log)
        line = _line(port, self._seconds)
        if not line:
            said = _last(log)
            end()
            raise ConfigError(
                f"nemo_gym:{self._name} did not start within {self._seconds:g} s. Some servers need packages of their own (its "
                f"requirements.txt), or model servers, which only NeMo Gym itself starts. It said: {said}"
            )
        url = f"http://127.0.0.1:{int(line)}"
        until = time.monotonic() + self._seconds
        while True:
            try:
                return _Running(url, _kind_of(url), process, log, end)
            except ConfigError:
                if process.poll() is not None or time.monotonic() > until:
                    end()
                    raise
                time.sleep(0.05)


def _surroundings() -> dict[str, str]:
    """The environment variables of the other Python, which must not import our packages."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}


def _line(descriptor: int, seconds: float) -> str:
    """What is written to a pipe before it is closed; empty after the time."""

    try:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return os.read(descriptor, 64).decode() if ready else ""
    finally:
        os.close(descriptor)


def _last(log: IO[str]) -> str:
    log.seek(0)
    return log.read()[-600:].strip() or "nothing"


def _end(process: subprocess.Popen[Any], parent: int, log: IO[str]) -> None:
    os.close(parent)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    log.close()


# a conversation


class _GymSession:
    """One conversation: one session of the server."""

    def __init__(self, source: NemoGym) -> None:
        self._source = source
        self._name = f"nemo_gym:{source.name}"
        self._client: Any = None
        self._row: dict[str, Any] = {}
        self._output: list[dict[str, Any]] = []
        """The turns, and the results of their calls, as items of the Responses API."""
        self._turns = 0
        """How many turns the server has seen, or will see with the end."""

    async def begin(self, row: Row) -> Opening:
        self._url, self._kind = await self._source.place()
        self._row = plain(row.fields)
        asked = self._row.get("responses_create_params")
        if not isinstance(asked, Mapping):
            raise ValueError(
                f"row {row.id!r} has responses_create_params={asked!r:.80}; rows of nemo_gym are lines of NeMo Gym's data, with "
                f"the object responses_create_params"
            )
        self._request = request = _request(asked, row)
        aiohttp = self._source.aiohttp
        self._client = aiohttp.ClientSession(
            cookie_jar=aiohttp.CookieJar(unsafe=True),  # a server's host is often an IP address
            timeout=aiohttp.ClientTimeout(total=self._source.seconds),
        )
        messages = [*_system(row, request), *template_messages(request.conversation)]
        begun = await self._json("seed_session" if self._kind == "verify" else "reset", self._row)
        if self._kind == "step":
            messages += _observed(begun.get("observation"))
        elif "mcp" in begun:
            raise ValueError(f"{self._name} offers its tools over MCP, which nemo_gym does not: run its agent instead")
        return Opening(messages=messages, tools=request.tools, sampling=request.sampling)

    async def step(self, turn: Turn) -> Reply:
        if self._kind == "step":
            return await self._stepped(turn)
        self._add(turn)
        if not turn.calls or not self._source.execute_calls:
            return await self._verified(turn)
        offered = [tool["function"]["name"] for tool in turn.tools]
        answers = list[Answer]()
        for call in turn.calls:
            answers.append(await self._called(call, offered))
            if call.error is None:
                said = str(answers[-1].content)
                self._output.append({"type": "function_call_output", "call_id": call.id, "output": said})
        return _told(answers)

    async def final_reply(self, turn: Turn) -> Reply:
        """The end after a limit: a turn that the server has not seen is sent, and `/verify` scores what there is."""
        if self._kind == "verify":
            self._add(turn)
            return await self._verified(turn)
        if turn.index < self._turns:
            return Reply()
        reply = await self._stepped(turn)
        return Reply(reward=reply.reward, info=reply.info)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _called(self, call: ToolCall, offered: Sequence[str]) -> Answer:
        """What the server answers to a call."""
        if call.error is not None:
            return failed(call, "malformed", call.error)
        if call.name not in offered:
            problem = f"there is no tool {call.name!r:.80}; the tools are {', '.join(offered)}"
            return failed(call, "unknown_tool", problem)
        started = time.monotonic()
        status, content = await self._post(quote(call.name, safe=""), dict(call.arguments))
        error = None if status < 400 else "arguments" if status == 422 else "raised"
        return _answer_of(call, content, error=error, seconds=time.monotonic() - started)

    def _items(self, turn: Turn) -> list[dict[str, Any]]:
        """A turn as items of the Responses API."""
        return list(Responses().answer(self._request, self._answer(turn))["output"])

    def _add(self, turn: Turn) -> None:
        if turn.index >= self._turns:
            self._turns = turn.index + 1
            self._output += self._items(turn)

    def _response(self, turn: Turn, output: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The response with this output, as the server gets it."""
        return {**Responses().answer(self._request, self._answer(turn)), "output": list(output)}

    def _answer(self, turn: Turn) -> AgentAnswer:
        return AgentAnswer(
            id=f"{turn.index}",
            created=int(time.time()),
            model=self._request.model,
            message=answer_message(turn),
            prompt_tokens=turn.prompt_tokens,
            completion_tokens=0 if turn.completion is None else len(turn.completion.token_ids),
            cut=turn.finish_reason == "length",
        )

    async def _stepped(self, turn: Turn) -> Reply:
        self._turns = turn.index + 1
        told = await self._json("step", {**self._row, "response": self._response(turn, self._items(turn))})
        info = told.get("info") or {}
        results = {one["call_id"]: str(one["output"]) for one in info.get("tool_outputs") or ()}
        answers = list[Answer]()
        for call in turn.calls:
            if call.error is not None:
                answers.append(failed(call, "malformed", call.error))
            elif call.id not in results:
                answers.append(failed(call, "raised", "the environment gave this call no result"))
            else:
                answers.append(_answer_of(call, results[call.id]))
        reply = _told(answers)
        return replace(
            reply,
            messages=[*reply.messages, *_observed(told.get("observation"))],
            reward=number(told.get("reward"), f"{self._name}/step"),
            done=bool(told.get("terminated") or told.get("truncated")),
            info=plain({key: value for key, value in info.items() if key != "tool_outputs"}),
        )

    async def _verified(self, turn: Turn) -> Reply:
        told = await self._json("verify", {**self._row, "response": self._response(turn, self._output)})
        reward = number(told.get("reward"), f"{self._name}/verify")
        parts = told.get("reward_components")
        info = {key: value for key, value in told.items() if key not in (*self._row, "response", "reward")}
        if isinstance(parts, Mapping) and parts:
            parts = {str(key): number(value, f"{self._name}/verify, {key}") for key, value in parts.items()}
            if math.isclose(sum(parts.values()), reward, abs_tol=1e-9):
                return Reply(rewards=parts, done=True, info=info)
        return Reply(reward=reward, done=True, info=info)

    async def _json(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of a route of the server's own. Raises ValueError if it is not the object that it should be."""
        status, text = await self._post(route, body)
        try:
            told = json.loads(text) if status == 200 else None
        except (ValueError, RecursionError):
            told = None
        if not isinstance(told, dict):
            raise ValueError(f"{self._name}/{route} returned the status {status}: {text:.300}")
        return told

    async def _post(self, route: str, body: Mapping[str, Any]) -> tuple[int, str]:
        """Status and text of an answer. A request that reached the server is not repeated. Raises ValueError."""
        aiohttp = self._source.aiohttp
        for attempt in range(1, _CONNECTING + 1):
            try:
                async with self._client.post(f"{self._url}/{route}", json=dict(body)) as answer:
                    return answer.status, await answer.text(errors="replace")
            except aiohttp.ClientConnectorError as error:
                if attempt == _CONNECTING:
                    raise ValueError(f"{self._name}/{route} cannot be reached: {error}") from None
                await asyncio.sleep(0.25 * 2**attempt)
            except TimeoutError:
                raise ValueError(
                    f"{self._name}/{route} gave no answer within environment.arguments.seconds={self._source.seconds:g}"
                ) from None
            except aiohttp.ClientError as error:
                raise ValueError(f"{self._name}/{route}: the connection broke: {error!r:.200}") from None
        raise AssertionError


def _answer_of(call: ToolCall, content: str, *, error: str | None = None, seconds: float = 0.0) -> Answer:
    """The answer to a call with the text of the server, also if that is the text of an error."""
    outcome = ToolOutcome(
        id=call.id, name=call.name, arguments=call.arguments, content=content, error=error, seconds=seconds
    )
    return Answer(outcome=outcome, content=content)


def _told(answers: Sequence[Answer]) -> Reply:
    return Reply(messages=[answer.message for answer in answers], outcomes=tuple(answer.outcome for answer in answers))


def _request(asked: Mapping[str, Any], row: Row) -> ChatRequest:
    """What a row asks the model. Raises ValueError for what a conversation cannot have."""
    try:
        # calls of one turn are sent one after the other, as NeMo Gym's agents do whatever the row says
        return Responses().read({key: value for key, value in asked.items() if key != "parallel_tool_calls"})
    except (Refused, KeyError, TypeError) as error:
        told = error.message if isinstance(error, Refused) else repr(error)
        raise ValueError(f"responses_create_params of row {row.id!r}: {told}") from None


def _system(row: Row, request: ChatRequest) -> list[Message]:
    """The recipe's system prompt, if the row of NeMo Gym has none."""
    own = any(message["role"] == "system" for message in request.conversation)
    return [] if own else [message for message in row.messages if message["role"] == "system"]


def _observed(text: Any) -> list[Message]:
    return [{"role": "user", "content": str(text)}] if text else []
