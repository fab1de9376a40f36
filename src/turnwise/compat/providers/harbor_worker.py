"""Harbor's environments for `harbor_package.py`: run by a Python that has the package `harbor`, which needs Python 3.12.

    python -P harbor_worker.py

A request is a line of JSON on the standard input, `{"id": 1, "do": "execute", ...}`; its answer, on the standard output and in
any order, `{"id": 1, "value": ...}` or `{"id": 1, "error": "..."}`. When the input ends, because turnwise has ended or was
killed, all environments are stopped and removed. Imports nothing of turnwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import json
import logging
import os
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

LONGEST_LINE = 1 << 26
STOP_SECONDS = 120.0
"""For one environment."""


def environment_class(backend: str) -> Any:
    """The class of one of Harbor's backends, or of an import path `module:Class`."""
    factory = importlib.import_module("harbor.environments.factory").EnvironmentFactory
    name = backend.removeprefix("harbor:")
    if name in factory.registered_names():
        kind = importlib.import_module("harbor.models.environment_type").EnvironmentType(name)
        return factory.get_environment_class(kind)
    if ":" not in name:
        raise LookupError(json.dumps(factory.registered_names()))
    return factory.get_environment_class(import_path=name)


async def started(environment: Any) -> None:
    """Start an environment. SystemExit, which means bad settings here, would end a task's event loop."""
    try:
        await environment.start(force_build=False)
    except SystemExit as error:
        raise RuntimeError(described(error)) from None


async def stopped(environment: Any) -> None:
    """Stop an environment and remove it, with its files on this machine."""
    try:
        await asyncio.wait_for(environment.stop(delete=True), STOP_SECONDS)
    finally:
        shutil.rmtree(environment.trial_paths.trial_dir, ignore_errors=True)


class LiveEnvironments:
    """The environments that are there, by the names that requests give them."""

    def __init__(self) -> None:
        self._there: dict[str, Any] = {}
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._left: list[Any] = []
        """Those that could not be stopped."""

    async def check(self, backend: str, options: dict[str, Any]) -> str:
        """The package's version, if the backend can be used."""
        found = environment_class(backend)
        found.parse_options(options)
        found.preflight(kwargs=options)
        return importlib.metadata.version("harbor")

    async def start(self, name: str, seconds: float, **given: Any) -> None:
        """Make an environment, also its image, and start it."""
        environment = self._there[name] = self._made(name, **given)
        task = self._starting[name] = asyncio.ensure_future(started(environment))
        try:
            await asyncio.wait_for(task, seconds)
        except TimeoutError:
            raise TimeoutError(f"it was not started within build_timeout_sec={seconds:g}") from None
        except asyncio.CancelledError:
            raise RuntimeError("it was stopped while it started") from None
        finally:
            del self._starting[name]

    def _made(
        self,
        name: str,
        *,
        backend: str,
        options: dict[str, Any],
        folder: str,
        task: str,
        memory_mb: int,
        network: bool,
    ) -> Any:
        config = importlib.import_module("harbor.models.task.config")
        paths = importlib.import_module("harbor.models.trial.paths").TrialPaths(
            Path(tempfile.mkdtemp(prefix="turnwise-harbor-"))
        )
        paths.mkdir()
        settings = tomllib.loads((Path(folder) / "task.toml").read_text(encoding="utf-8")).get("environment", {})
        wanted = config.EnvironmentConfig.model_validate(settings)
        policy = wanted.resolve_baseline() if network else config.NetworkPolicy(network_mode="no-network")
        return environment_class(backend)(
            environment_dir=Path(folder) / "environment",
            environment_name=task,
            session_id=name,
            trial_paths=paths,
            task_env_config=wanted,
            logger=logging.getLogger("harbor"),
            override_memory_mb=memory_mb,
            network_policy=policy,
            **options,
        )

    async def execute(
        self, name: str, command: str, cwd: str | None, env: dict[str, str], user: str | None, seconds: float
    ) -> dict[str, Any]:
        """Run a command."""
        ran = await asyncio.wait_for(
            self._there[name].exec(command, cwd=cwd, env=env, timeout_sec=int(seconds), user=user), seconds + 10
        )
        return {"output": (ran.stdout or "") + (ran.stderr or ""), "status": ran.return_code}

    async def upload(self, name: str, source: str, target: str) -> None:
        """Copy a folder or a file of this machine."""
        environment = self._there[name]
        copy = environment.upload_dir if os.path.isdir(source) else environment.upload_file
        await copy(source, target)

    async def stop(self, name: str) -> None:
        """Stop an environment and remove it, also while it starts."""
        environment = self._there.pop(name, None)
        if environment is None:
            return
        if (starting := self._starting.get(name)) is not None:
            starting.cancel()
            await asyncio.wait([starting])
        self._left.append(environment)
        await stopped(environment)
        self._left.remove(environment)

    async def remove(self, name: str, **given: Any) -> None:
        """Remove an environment that a process which has died may have left, as far as its name tells the backend which it is."""
        await stopped(self._made(name, **given))

    async def stop_all(self) -> None:
        """Stop those that are there, and try it again with those that could not be stopped."""
        again, self._left = self._left, []
        stopping = [stopped(environment) for environment in again]
        await asyncio.gather(*stopping, *(self.stop(name) for name in list(self._there)), return_exceptions=True)


def described(error: BaseException) -> str:
    """What the package says. That of SystemExit is meant for people."""
    text = str(error).strip() or type(error).__name__
    return text if isinstance(error, SystemExit) else f"{type(error).__name__}: {text}"


async def main() -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print
    sys.path.insert(0, os.getcwd())  # for import paths
    reader = asyncio.StreamReader(limit=LONGEST_LINE)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    environments, running = LiveEnvironments(), set[asyncio.Task[None]]()

    async def answer(line: bytes) -> None:
        request = json.loads(line)
        number, method = request.pop("id"), getattr(environments, request.pop("do"))
        try:
            told = {"id": number, "value": await method(**request)}
        except (Exception, SystemExit) as error:
            told = {"id": number, "error": described(error)}
        with contextlib.suppress(OSError):
            answers.write(json.dumps(told) + "\n")
            answers.flush()

    while line := await reader.readline():
        task = asyncio.ensure_future(answer(line))
        running.add(task)
        task.add_done_callback(running.discard)
    if len(sys.argv) > 1:  # `check`: one request, which is answered
        await asyncio.gather(*running)
    await environments.stop_all()
    os._exit(0)  # without the threads of libraries


if __name__ == "__main__":
    asyncio.run(main())
