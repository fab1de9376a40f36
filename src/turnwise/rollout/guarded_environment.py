"""A user's environment as the loop calls it: no method can end the run, and each is called in a task of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from turnwise.environments.environment import Environment, EnvironmentFactory, FinalReply, FinalReward, ProvidesHandle
from turnwise.errors import Failed, boundary
from turnwise.types import EnvironmentHandle, Opening, Reply, Row, Turn
from turnwise.user_code.calls import call, call_blocking
from turnwise.user_code.copies import copy_containers, copy_opening, copy_reply, copy_row, copy_turn, take_rewards
from turnwise.user_code.deadlines import deadline
from turnwise.user_code.reward_number import reward_number

__all__ = ["GuardedEnvironment"]

T = TypeVar("T")
_CLOSING_SECONDS = 30.0  # an environment whose `close` does not return must not stop the run
_log = logging.getLogger(__name__)


class GuardedEnvironment:
    """The environment of one conversation. All methods raise Failed, of the kind `environment`, whatever the user's code raises;
    `close` raises nothing."""

    __slots__ = ("_environment", "_watch_sampling")

    def __init__(self, make_environment: EnvironmentFactory) -> None:
        self._environment: Environment = call_blocking(
            make_environment, kind="environment", name="making an environment", shared=True
        )
        self._watch_sampling: Callable[[], Awaitable[None]] | None = None

    async def begin(self, row: Row) -> Opening:
        opening = await self._call(lambda: self._environment.begin(copy_row(row)), "begin")
        if isinstance(opening, Opening):  # else, the session refuses it
            self._watch_sampling = opening.watch_sampling
        with boundary("environment"):
            return copy_opening(opening)

    async def step(self, turn: Turn) -> Reply:
        given = copy_turn(turn)
        reply = await self._call(lambda: self._environment.step(given), "step")
        with boundary("environment"):
            take_rewards(turn, given)
            for name, value in turn.info.items():  # written by the environment, which may change the object later
                turn.info[name] = copy_containers(value)
            return copy_reply(reply)

    async def watched(self, sampling: Callable[[], Awaitable[T]]) -> T:
        """The result of `sampling`. It is cancelled if the environment does not wait for the turn any more."""
        if self._watch_sampling is None:
            return await sampling()
        turn = asyncio.ensure_future(sampling())
        watch = asyncio.ensure_future(self._call(self._watch_sampling, "watch_sampling"))
        try:
            await asyncio.wait({turn, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not turn.done():
                watch.result()  # raises
            return await turn
        finally:
            turn.cancel()
            watch.cancel()
            await asyncio.gather(turn, watch, return_exceptions=True)

    async def final_reply(self, turn: Turn) -> Reply:
        """What the environment says after a limit ended the conversation, whose last turn is `turn`: `final_reply`, or a reply
        with `final_reward`; an empty reply without a method of these names."""
        environment = self._environment
        if isinstance(environment, FinalReply):
            return await self._call(lambda: environment.final_reply(turn), "final_reply")
        if not isinstance(environment, FinalReward):
            return Reply(done=True)
        reward = await self._call(environment.final_reward, "final_reward")
        with boundary("environment"):
            return Reply(done=True, reward=reward_number(reward, "final_reward()"))

    def environment_handle(self) -> EnvironmentHandle | None:
        """The object that reward functions may read after the conversation, if the environment exposes one."""
        with boundary("environment"):
            return self._environment.environment_handle() if isinstance(self._environment, ProvidesHandle) else None

    async def close(self, conversation: str) -> None:
        """Close the environment. If that fails, the conversation is kept and a warning is logged."""
        try:
            async with deadline(_CLOSING_SECONDS):
                await self._call(self._environment.close, "close")
        except (Failed, TimeoutError) as error:
            reason = str(error) or f"no answer in {_CLOSING_SECONDS:g} s"
            _log.warning("the environment of %s could not be closed: %s", conversation, reason)

    async def _call(self, method: Callable[[], Awaitable[T]], method_name: str) -> T:
        name = f"the environment {type(self._environment).__name__}.{method_name}"
        return await call(method, kind="environment", name=name)
