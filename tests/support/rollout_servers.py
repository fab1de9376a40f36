"""A rollout server in a thread, as `turnwise serve` runs it, and requests to it."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from turnwise.commands.serve import ServeOptions, serve
from turnwise.config.recipe import load
from turnwise.options.engines import RolloutServerSection
from turnwise.options.schema import Config
from turnwise.rollout_server.client import RolloutClient, TrainerIdentity, trainer_name
from turnwise.rollout_server.server import Address
from turnwise.rollout_server.wire import served_options

TOKEN = "swordfish"


@dataclass
class Running:
    """A running server."""

    config: Config
    host: str
    port: int
    token: str

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """The status and the answer, parsed if it is JSON. Bytes are sent as they are."""
        status, text, _ = self.request(method, path, body, **headers)
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text.decode()

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers by their names in lower case."""
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        sent = {"Authorization": f"Bearer {self.token}"}
        if content is not None:
            sent["Content-Type"] = "application/json"
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        with closing(connection):
            connection.request(method, path, content, sent)
            response = connection.getresponse()
            return response.status, response.read(), {name.lower(): value for name, value in response.headers.items()}

    def rollouts(self, *ids: str, **body: Any) -> list[dict[str, Any]]:
        """The events of finished conversations, in the order of their arrival."""
        status, text, _ = self.request("POST", "/rollouts", {"conversations": [conversation(id) for id in ids], **body})
        assert status == 200, text
        lines = [line[6:] for line in text.decode().splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]", lines[-1]
        return [json.loads(line) for line in lines[:-1]]


def conversation(id: str, text: str = "1+1?", *, seed: int = 0, **fields: Any) -> dict[str, Any]:
    """A conversation of a request."""
    return {
        "id": id,
        "group": id.partition("/")[0],
        "seed": seed,
        "row": {"id": id.partition("/")[0], "messages": [{"role": "user", "content": text}], "fields": fields},
    }


@contextmanager
def running(
    recipe: Path | Config, *overrides: str, token: str | None = TOKEN, queue: int = 1024, port: int = 0
) -> Iterator[Running]:
    """Serve a recipe until the block ends."""
    config = recipe if isinstance(recipe, Config) else load(recipe, overrides)[0]
    options = ServeOptions(host="127.0.0.1", port=port, token=token, most_waiting=queue)
    ready, found, problems = threading.Event(), list[Running](), list[BaseException]()
    stop: list[Any] = []

    async def until_stopped() -> None:
        def on_ready(address: Address, token: str) -> None:
            found.append(Running(config, address.host, address.port, token))
            ready.set()

        work = asyncio.ensure_future(serve(config, options, Console(quiet=True), on_ready=on_ready))
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(work.cancel))
        await asyncio.wait([work])
        if not work.cancelled():
            work.result()

    def run() -> None:
        try:
            asyncio.run(until_stopped())
        except BaseException as error:
            problems.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    if problems:
        thread.join()
        raise problems[0]
    try:
        yield found[0]
    finally:
        stop[0]()
        thread.join()
    if problems:
        raise problems[0]


def client_of(server: Running, config: Config | None = None, **changes: Any) -> RolloutClient:
    """A client of the server, with the options of a trainer that has the same recipe."""
    tokenizer = server.ask("GET", "/info")[1]["tokenizer"]
    names = {"url": server.url, "timeout": 20.0}
    section = {name: changes.pop(name, names.get(name)) for name in ("url", "timeout", "weights_directory")}
    trainer = TrainerIdentity(
        name=changes.pop("trainer", trainer_name("runs/test")),
        tokenizer=changes.pop("tokenizer", tokenizer),
        recipe=changes.pop("recipe", served_options(config or server.config)),
        base=changes.pop("base", None),
        vision=changes.pop("vision", None),
    )
    options = RolloutServerSection.model_validate(section)
    token = changes.pop("token", server.token)
    assert not changes
    return RolloutClient(section["url"], options, token=token, trainer=trainer)
