"""Libraries that run a conversation themselves and ask for the model's turns: an event loop in one thread for all conversations
of a source, and the source that is such a library's side of `AgentEnvironment`."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from turnwise.compat.providers.provider import LibraryEnvironments
from turnwise.environments.agents.environment import AgentConnection, AgentEnvironment, AgentError, AgentResult
from turnwise.environments.environment import Environment, ModelPrompts
from turnwise.errors import ConfigError, Failed
from turnwise.types import Row
from turnwise.user_code.calls import forget
from turnwise.user_code.thread_loops import ThreadLoop

T = TypeVar("T")

_CLEANING_SECONDS = 20.0
"""How long rollouts that were cancelled may take to release what they hold, such as sandboxes."""


class LibraryThread:
    """Runs coroutines of a library in a thread that begins with the first of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: ThreadLoop | None = None
        self._running: set[Future[Any]] = set()

    async def run(self, function: Callable[[], Awaitable[T]]) -> T:
        """Await a function in the thread. If the caller is cancelled, the function is too; its cleaning goes on."""
        if self._thread is None:
            self._thread = ThreadLoop(self._name)
        ended, cancel = self._thread.start(function, kind="environment", context=contextvars.copy_context())
        self._running.add(ended)
        ended.add_done_callback(self._running.discard)
        waiting = asyncio.wrap_future(ended)
        waiting.add_done_callback(forget)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            cancel()
            raise

    async def close(self, release: Callable[[], Awaitable[Any]] | None = None) -> None:
        """Wait for rollouts that clean up, await `release` in the thread, and end it."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        # a copy, because rollouts leave the set in the other thread
        running = [asyncio.wrap_future(future) for future in list(self._running)]
        if running:
            await asyncio.wait(running, timeout=_CLEANING_SECONDS)
        try:
            if release is not None:
                async with asyncio.timeout(_CLEANING_SECONDS):
                    await thread.run(release, kind="environment")
        except (Failed, TimeoutError) as error:
            logging.getLogger(__name__).warning("%s was not closed: %s", self._name, error)
        finally:
            thread.stop(wait=False)


class LibraryRollouts(LibraryEnvironments):
    """Makes conversations that a library leads in its own event loop (an EnvironmentSource).

    `label` is the name as recipes write it, `seconds_to_finish` how long the library may score and clean up after a limit of the
    recipe. Raises ConfigError for a number that is not at least 0.
    """

    def __init__(self, label: str, seconds_to_finish: float) -> None:
        if not seconds_to_finish >= 0:
            raise ConfigError(
                f"environment.arguments.seconds_to_finish is {seconds_to_finish!r}; it must be at least 0"
            )
        self._label, self._seconds_to_finish = label, seconds_to_finish
        self._prompts: ModelPrompts | None = None
        self._thread = LibraryThread(label)

    async def run(self, row: Row, row_json: str, connection: AgentConnection) -> AgentResult:
        """One conversation and its rewards. Raises AgentError."""
        raise NotImplementedError

    def use_prompts(self, prompts: ModelPrompts) -> None:
        """Refuse messages that the model cannot receive."""
        self._prompts = prompts

    def __call__(self) -> Environment:
        return AgentEnvironment(self, None, seconds_to_finish=self._seconds_to_finish, prompts=self._prompts)

    async def in_library(self, function: Callable[[], Awaitable[T]]) -> T:
        """Await a function in the library's event loop. Raises AgentError with the library's error."""
        try:
            return await self._thread.run(function)
        except Failed as failed:
            raise AgentError(f"{self._label} failed: {failed.failure.message}") from failed

    async def aclose(self) -> None:
        """Wait for rollouts that clean up."""
        await self._thread.close()
