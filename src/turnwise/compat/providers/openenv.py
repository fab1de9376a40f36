"""`environment: openenv:game.py:Game`: an environment of OpenEnv, as a class in this process, or on a server, which runs or is
started from its image.

A row is a number in the column `seed`. Each conversation has an object of the class, or a session of the server, of its own,
which its end closes. An action is a call of a tool whose parameters are the fields of the action, or the model's text if the
action has one field of a plain type. The reward of a turn is what the environment gives it."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import tempfile
import threading
import time
import typing
import urllib.request
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError

from pydantic import ValidationError

from turnwise.compat.object_factory import ObjectFactory, number, opened, plain, referred
from turnwise.compat.providers.provider import About, LibraryEnvironments, Restarts
from turnwise.data.rows import ProvidedRows, seed_rows
from turnwise.environments.agents.containers import Container, ContainerError, ContainerImage
from turnwise.environments.environment import Environment
from turnwise.environments.tools.result import failed
from turnwise.environments.tools.schema import FromSchema, WrongArguments
from turnwise.errors import ConfigError, Failed
from turnwise.types import Failure, Message, Opening, Reply, Row, ToolCall, ToolOutcome, ToolSchema, Turn
from turnwise.user_code.copies import copy_containers
from turnwise.user_code.threads import ThreadedObject, run_in_thread

_PLAIN = {"string": str, "integer": int, "number": float}
_HIDDEN = ("done", "reward", "metadata")
"""Fields of an observation that the model does not see."""
_SECONDS = 20.0
_IMAGE = "docker://"
_PORT = 8000
"""Where the servers of OpenEnv's images listen."""
_CALL_SECONDS = 120.0
"""For a call of docker or podman."""


class OpenEnv(LibraryEnvironments):
    """Makes the environments of a class, or of a server (an EnvironmentSource with rows).

    Args:
        name: A class `file.py:Class`, derived from OpenEnv's `Environment`; the URL of a server of an environment; or
            `docker://IMAGE`, the image of one, of which a container runs (docker or podman) for all conversations.
        arguments: Keyword arguments of the class.
        action: The class of its actions, `file.py:Class`. Null: that of the annotation of `step`, or of the base class.
        action_as: `tool`: a call of the tool `act`. `text`: the model's text is the only field of the action. Null: `text` if
            the action has one field, a text or a number; else `tool`.
        reset_columns: Columns of the row that `reset` gets, besides `seed`.
        show: Fields of the observation that the model sees. Null: all but `done`, `reward` and `metadata`.
        image_options: Further options of `docker run`. With `--network=host`, the server listens on this machine's port.
        port: Where the server in the image listens. Null: 8000.
        seconds_to_start: The time that it has to start.

    Raises ConfigError.
    """

    writes_prompt = True

    def __init__(
        self,
        name: str,
        *,
        arguments: Mapping[str, Any] | None = None,
        action: str | type[Any] | None = None,
        action_as: typing.Literal["tool", "text"] | None = None,
        reset_columns: Sequence[str] = (),
        show: Sequence[str] | None = None,
        image_options: Sequence[str] = (),
        port: int | None = None,
        seconds_to_start: float = 120.0,
    ) -> None:
        self.name = name
        self.reset_columns, self.show = list(reset_columns), None if show is None else list(show)
        self._served: _Served | None = None
        self.on_server = name.startswith(("http://", "https://", _IMAGE))
        if not name.startswith(_IMAGE) and (image_options or port is not None):
            given = "image_options" if image_options else "port"
            raise ConfigError(
                f"environment.arguments.{given} has no effect without an image (docker://IMAGE): remove it"
            )
        self.action_class: type[Any] | None = None
        if self.on_server:
            if arguments or action is not None:
                given = "arguments" if arguments else "action"
                raise ConfigError(
                    f"environment.arguments.{given} has no effect with a server, which has its own: remove it"
                )
            if name.startswith(_IMAGE):
                image = ContainerImage.of(name.removeprefix(_IMAGE), image_options)
                self._served = _Served(image, port or _PORT, seconds_to_start)
            schema = _schema_of_server(name if self._served is None else self._served.present.url)
        else:
            self._factory = ObjectFactory.of(name, arguments, wants=("reset", "step"))
            self.action_class = _action_class(referred(name, "name"), action)
            schema = self.action_class.model_json_schema()
        self.parameters = {key: value for key, value in schema.items() if key not in ("title", "description")}
        fields = {key: value for key, value in schema.get("properties", {}).items() if key != "metadata"}
        self.parameters |= {"type": "object", "properties": fields, "additionalProperties": False}
        single = next(iter(fields)) if len(fields) == 1 and next(iter(fields.values())).get("type") in _PLAIN else None
        if action_as == "text" and single is None:
            raise ConfigError(
                f"environment.arguments.action_as=text needs an action with one field, a text or a number; that of "
                f"openenv:{name} has {', '.join(fields) or 'none'}: use `tool`"
            )
        self.text_field = None if action_as == "tool" else single
        self._description = str(schema.get("description") or "Act in the environment.")

    def about(self) -> About:
        """What the environment brings."""
        return About(rows="endless, by seed")

    def rows(self, count: int | None, *, held_out: bool) -> ProvidedRows:
        """Rows of seeds."""
        return seed_rows(count, held_out=held_out)

    def opened_environment(self) -> Any:
        """An environment: an object of the class, or a session of the server. Raises Failed if the server is lost."""
        if self._served is not None:
            return self._served.session()
        return _OpenSession(self.name, lambda: None) if self.on_server else self._factory.make()

    async def aclose(self) -> None:
        """Remove the container, if one was started here."""
        if self._served is not None:
            await run_in_thread(self._served.close, name=self.name, kind="environment", closes=True)

    @property
    def tool(self) -> ToolSchema:
        """The tool whose arguments are an action."""
        function = {"name": "act", "description": self._description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def shown(self, observation: Any) -> str:
        """What the model sees of an observation: the text of a single field, else all fields as JSON."""
        fields = observation if isinstance(observation, Mapping) else observation.model_dump(mode="json")
        names = [name for name in fields if name not in _HIDDEN] if self.show is None else self.show
        if missing := [name for name in names if name not in fields]:
            raise ValueError(f"show has {missing[0]!r}, and the observation has {', '.join(fields)}")
        values = {name: plain(fields[name]) for name in names}
        only = next(iter(values.values())) if len(values) == 1 else values
        return only if isinstance(only, str) else json.dumps(only, ensure_ascii=False)

    def __call__(self) -> Environment:
        return _Episode(self)


class _OpenSession:
    """A session of a server, which is open. Its methods block."""

    def __init__(self, url: str, why_lost: Callable[[], str | None]) -> None:
        """`why_lost` says why the server is lost; None if that is not known. Raises ConnectionError if it cannot be opened."""
        self._url, self._why_lost = url, why_lost
        self._client = importlib.import_module("openenv.core").GenericEnvClient(base_url=url).sync()
        self._closed = importlib.import_module("websockets.exceptions").ConnectionClosed
        try:
            self._client.connect()
        except ConnectionError:
            self._client.close()
            raise

    def reset(self, **given: Any) -> Any:
        """The first observation. Raises Failed if the server is lost."""
        return self._told(partial(self._client.reset, **given))

    def step(self, action: Any) -> Any:
        """What an action gives. Raises Failed if the server is lost."""
        return self._told(partial(self._client.step, action))

    def close(self) -> None:
        """End the session."""
        self._client.close()

    def _told(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (self._closed, ConnectionError) as error:
            why = self._why_lost() or f"the server {self._url} has ended the session, and with it the episode ({error})"
            raise Failed(Failure("environment", why)) from None


class _ServerContainer:
    """A server in a container."""

    def __init__(self, container: Container, url: str) -> None:
        self.container, self.url = container, url
        self._lock = threading.Lock()
        self._lost: str | None = None

    def lost(self) -> str | None:
        """Why it is lost, with the last that it has printed; None while it runs."""
        with self._lock:
            if self._lost is None:
                self._lost = self._why_lost()
            return self._lost

    def said(self) -> str:
        """The last that it has printed. Raises ContainerError."""
        image = self.container.image
        return _asked([image.tool, "logs", "--tail=20", self.container.name], image)[-600:] or "nothing"

    def runs(self) -> bool:
        """Whether the container runs. Raises ContainerError if there is none."""
        image = self.container.image
        state = ["--format", "{{.State.Running}}", self.container.name]
        return _asked([image.tool, "inspect", *state], image) == "true"

    def _why_lost(self) -> str | None:
        name = f"the server of openenv:{_IMAGE}{self.container.image.image}"
        try:
            runs = self.runs()
            if runs and not _refuses(self.url):
                return None
            return f"{name} {'accepts no connection' if runs else 'has ended'}; it printed: {self.said()}"
        except ContainerError as error:
            return f"{name} has ended, and its container cannot be asked ({error})"


class _Served:
    """The server in a container: one that is lost is replaced, the last is removed at the end of the run, or of the process."""

    def __init__(self, image: ContainerImage, port: int, seconds: float) -> None:
        """Start it, and wait until the server answers. Raises ConfigError with what the container has printed."""
        self._host = any(option.split("=")[0] in ("--network", "--net") for option in image.options)
        if not self._host:  # a free port of this machine's, for it alone
            image = image.other(image.image, ["--network=bridge", f"--publish=127.0.0.1::{port}", *image.options])
        self._image, self._port, self._seconds = image, port, seconds
        self._remove_all = weakref.finalize(self, image.close)
        self._lock = threading.Lock()
        self._over, self._restarts = threading.Event(), Restarts("were lost")
        try:
            self.present = self._start()
        except ContainerError as error:
            self._remove_all()
            raise ConfigError(f"environment: openenv:{_IMAGE}{image.image}: {error}") from None

    def session(self) -> _OpenSession:
        """A session of the present server, or of the one that replaces it. Raises Failed if there is none."""
        while True:
            server = self.present
            try:
                return _OpenSession(server.url, server.lost)
            except ConnectionError:
                if (why := server.lost()) is None:
                    raise
            self._replace(server, why)

    def close(self) -> None:
        """Remove the container, and start no other."""
        self._over.set()
        with self._lock:
            self._remove_all()

    def _replace(self, server: _ServerContainer, why: str) -> None:
        """Start another server for one that is lost, unless another conversation has done so. Raises Failed."""
        with self._lock:
            if server is not self.present:
                return
            if (refused := self._restarts.refused(why)) is not None:
                raise Failed(Failure("environment", refused))
            server.container.remove()
            try:
                self.present = self._start()
            except ContainerError as error:
                raise Failed(Failure("environment", f"{why}. No other one has started: {error}")) from None

    def _start(self) -> _ServerContainer:
        """A server that answers. Raises ContainerError."""
        if self._over.is_set():
            raise ContainerError("the run has ended")
        image, container = self._image, Container(self._image)
        container.create([], cwd=None, variables={})
        _asked([image.tool, "start", container.name], image)
        asked_port = [image.tool, "port", container.name, str(self._port)]
        told = f"127.0.0.1:{self._port}" if self._host else _asked(asked_port, image)
        server = _ServerContainer(container, f"http://{told.split()[0]}")
        until = time.monotonic() + self._seconds
        while True:
            try:
                _schema_of_server(server.url)
                return server
            except ConfigError as error:
                ended = not server.runs()
                if ended or time.monotonic() > until:
                    problem = (
                        "ended" if ended else f"did not answer within seconds_to_start={self._seconds:g} ({error})"
                    )
                    said = server.said()
                    container.remove()
                    raise ContainerError(f"the server in it {problem}; it printed: {said}") from None
                if self._over.wait(0.2):
                    raise ContainerError("the run has ended") from None


def _asked(command: Sequence[str], image: ContainerImage) -> str:
    """What docker or podman prints, its errors too. Raises ContainerError."""
    with tempfile.TemporaryFile() as printed:  # a pipe would stay open in what podman leaves running
        try:
            status = subprocess.run(
                command, stdout=printed, stderr=printed, timeout=_CALL_SECONDS, check=False
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ContainerError(f"{image.tool} does not answer: {error}") from None
        printed.seek(0)
        text = printed.read().decode(errors="replace").strip()
    if status != 0:
        raise ContainerError(f"{command[1]} failed: {text[-600:]}")
    return text


def _action_class(environment: Callable[..., Any], given: str | type[Any] | None) -> type[Any]:
    """The class of an environment's actions. Raises ConfigError if it is not known."""
    base = importlib.import_module("openenv.core.env_server").Action
    found: Any = given
    if isinstance(given, str):
        found = referred(given, "environment.arguments.action")
    elif given is None and isinstance(environment, type):
        hints = typing.get_type_hints(environment.step) if hasattr(environment, "step") else {}
        arguments = [
            argument
            for one in inspect.getmro(environment)
            for generic in getattr(one, "__orig_bases__", ())
            for argument in typing.get_args(generic)
        ]
        found = next((one for one in [hints.get("action"), *arguments] if _is_action(one, base)), None)
    if not _is_action(found, base):
        raise ConfigError(
            f"environment.arguments.action is {found!r:.80}; name the class of the environment's actions, file.py:Class, derived "
            f"from OpenEnv's Action, or annotate `step(self, action: Class)`"
        )
    return found


def _is_action(value: Any, base: type[Any]) -> bool:
    return isinstance(value, type) and issubclass(value, base) and value is not base


def _refuses(url: str) -> bool:
    """Whether a server accepts no connection. One that is slow is not lost."""
    try:
        with urllib.request.urlopen(f"{url}/schema", timeout=_SECONDS):
            return False
    except HTTPError:
        return False
    except (OSError, HTTPException) as error:
        return isinstance(getattr(error, "reason", error), ConnectionError)


def _schema_of_server(url: str) -> dict[str, Any]:
    """The JSON schema of a server's actions. Raises ConfigError."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=_SECONDS) as answer:
            return dict(json.load(answer)["action"])
    except (URLError, OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"environment: openenv:{url} does not give the schema of its actions (GET /schema): {error!r:.200}. Is the server of "
            f"an OpenEnv environment running there?"
        ) from None


class _Episode:
    """One conversation."""

    def __init__(self, source: OpenEnv) -> None:
        self._source = source
        self._arguments = FromSchema(source.parameters, "act")
        self._foreign: ThreadedObject[Any] = ThreadedObject(
            source.opened_environment, lambda made: made.close(), name=f"openenv:{source.name}"
        )

    async def begin(self, row: Row) -> Opening:
        self._made = await self._foreign.make()
        given = {name: row.fields[name] for name in ("seed", *self._source.reset_columns) if name in row.fields}
        observation, _, done = await self._ask(partial(self._made.reset, **copy_containers(given)))
        if done:
            raise ValueError(f"openenv:{self._source.name} is over after reset: there is nothing to do")
        tools = [] if self._source.text_field is not None else [self._source.tool]
        return Opening(messages=opened(row.messages, observation), tools=tools)

    async def step(self, turn: Turn) -> Reply:
        if self._source.text_field is not None:
            return await self._by_text(str(turn.message.get("content") or "").strip())
        if not turn.calls:
            return Reply(messages=[{"role": "user", "content": "Call the tool `act`."}])
        messages, outcomes = list[Message](), list[ToolOutcome]()
        total: float | None = None
        done = False
        for call in turn.calls:
            action, problem, kind = (None, "the environment is over", "raised") if done else self._read(call)
            if problem is not None:
                answer = failed(call, kind, problem)
                messages.append(answer.message)
                outcomes.append(answer.outcome)
                continue
            text, reward, done = await self._act(action)
            total = total if reward is None else reward + (total or 0.0)
            messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text})
            outcomes.append(ToolOutcome(id=call.id, name=call.name, arguments=call.arguments, content=text))
        return Reply(messages=messages, outcomes=tuple(outcomes), reward=total, done=done)

    async def close(self) -> None:
        await self._foreign.close()

    async def _by_text(self, text: str) -> Reply:
        name = self._source.text_field
        assert name is not None
        kind = self._source.parameters["properties"][name]["type"]
        try:
            action = self._action({name: _PLAIN[kind](text)})
        except (ValueError, WrongArguments) as error:
            problem = str(error) if isinstance(error, WrongArguments) else f"{text!r:.80} is no {kind}"
            return Reply(messages=[{"role": "user", "content": f"Error: {problem}"}])
        shown, reward, done = await self._act(action)
        return Reply(messages=[{"role": "user", "content": shown}], reward=reward, done=done)

    def _read(self, call: ToolCall) -> tuple[Any, str | None, str]:
        """The action of a call; or why it cannot be one, and the kind of the error."""
        if call.error is not None:
            return None, call.error, "malformed"
        if call.name != "act":
            return None, f"there is no tool {call.name!r:.80}; the tool is act", "unknown_tool"
        try:
            return self._action(call.arguments), None, ""
        except WrongArguments as wrong:
            return None, str(wrong), "arguments"

    def _action(self, given: Mapping[str, Any]) -> Any:
        """The action with these fields. Raises WrongArguments, also for what only the class of the actions refuses."""
        fields = self._arguments.check(given)
        try:
            json.dumps(fields, allow_nan=False)
        except ValueError:
            raise WrongArguments("numbers must be finite") from None
        if self._source.action_class is None:
            return fields
        try:
            return self._source.action_class(**fields)
        except ValidationError as error:
            lines = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False)]
            raise WrongArguments("; ".join(lines)) from None

    async def _act(self, action: Any) -> tuple[str, float | None, bool]:
        return await self._ask(partial(self._made.step, action))

    async def _ask(self, function: Callable[[], Any]) -> tuple[str, float | None, bool]:
        """What the model sees, the reward and whether the episode is over, of a call of the environment."""
        result = await self._foreign.ask(function)
        observation = result.observation if self._source.on_server else result
        if not hasattr(result, "done") or not hasattr(result, "reward"):
            raise TypeError(
                f"openenv:{self._source.name} returned a {type(result).__name__}; it must be an OpenEnv Observation"
            )
        reward = None if result.reward is None else number(result.reward, f"openenv:{self._source.name}")
        return self._source.shown(observation), reward, bool(result.done)
