"""`MultiTurnScheduler` as its users know it, and what it says to one turn of the model.

Hooks may be sync or async. Sync ones run beside the event loop, so that a tool that takes its time holds up nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from turnwise.compat.swift.masks import Returned
from turnwise.compat.swift.messages import said, without_answer
from turnwise.compat.swift.protocol import (
    ChatCompletionResponseChoice,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
)
from turnwise.user_code.run_in_thread import run_in_thread

__all__ = ["Answer", "MultiTurnScheduler", "RolloutScheduler", "answer", "call", "multi_turns"]

multi_turns: dict[str, type[Any]] = {}
"""The registry: a plugin adds to it, `name` selects from it."""


class RolloutScheduler:
    """What schedulers have in common: an engine, a bound of turns, hooks."""

    max_turns: int | None = None
    infer_engine: Any = None
    _tokenizer: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """`(infer_engine, max_turns)`; in older versions of ms-swift `(max_turns)`. A number is the latter in either place."""
        self.infer_engine = kwargs.get("infer_engine")
        self._tokenizer = kwargs.get("tokenizer")
        self.max_turns = kwargs.get("max_turns")
        for value in args[:2]:
            if isinstance(value, int):
                self.max_turns = value
            elif value is not None:
                self.infer_engine = value

    @property
    def tokenizer(self) -> Any:
        """The one that the constructor was given, else that of the recipe's `environment.arguments.tokenizer`."""
        return self._tokenizer if self._tokenizer is not None else self.infer_engine.tokenizer

    @property
    def engine(self) -> Any:
        """Another name of `infer_engine`."""
        return self.infer_engine

    def __getattr__(self, name: str) -> Any:
        """What a scheduler does not have itself, its engine may have."""
        engine = None if name.startswith("__") else self.__dict__.get("infer_engine")
        if engine is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(engine, name)

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """Before the model speaks for the first time; requests are changed in place. Here there is always one."""

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """After each turn, the last one too. `done` overrides `check_finished`; `rollout_infos` are kept."""
        return {}

    async def on_trajectory_end(self, infer_request: RolloutInferRequest) -> None:
        """When the conversation is over, on every path out. (ms-swift has no such hook.)

        Gym schedulers that a plugin copied from ms-swift have `_close_and_remove(uuid)`: that is called.
        """
        if callable(close := getattr(type(self), "_close_and_remove", None)):
            await call(close, self, str(infer_request.uuid))

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> RolloutOutput | list[RolloutOutput]:
        """The whole conversation: here one turn."""
        response = await self.infer_engine.infer_async(infer_request, request_config)
        choice = response.choices[0]
        said(infer_request.messages, choice.message.content)
        ids = list(choice.token_ids)
        return RolloutOutput(response, infer_request.messages, [ids], [[1] * len(ids)])

    async def async_infer(self, infer_requests: Any, request_config: Any, *args: Any, **kwargs: Any) -> Any:
        """All conversations of a batch at once; here the loop holds them, so nobody calls it. Raises RuntimeError."""
        raise RuntimeError("async_infer holds all conversations of a batch; here each has its own, begun by the loop")


class MultiTurnScheduler(RolloutScheduler):
    """Decides what comes after a turn of the model. To be subclassed: `step`, and where needed `check_finished` or `run`."""

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """The request of the next turn: `{"infer_request": ...}`. `current_turn` counts from 1.

        A `request_config` beside it changes `max_tokens` and `stop` of the following turns.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither a step nor a run of its own")

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        """Whether the conversation is over: the answer was cut, or `max_turns` are taken."""
        if response_choice.finish_reason == "length":
            return True
        return bool(self.max_turns and current_turn >= self.max_turns)

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> RolloutOutput | list[RolloutOutput]:
        """The whole conversation, for those who override it and call this one: the same turns, from inside."""
        await call(self.on_trajectory_start, [infer_request])
        infer_request.messages[:] = without_answer(infer_request.messages)
        infos: dict[str, Any] = {}
        ids: list[list[int]] = []
        mask: list[list[int]] = []
        masked = False
        turn = 1
        while True:
            goes_on = bool(infer_request.messages) and infer_request.messages[-1]["role"] == "assistant"
            response = await self.infer_engine.infer_async(infer_request, request_config)
            choice = response.choices[0]
            said(infer_request.messages, choice.message.content)
            told = await answer(self, infer_request, choice, turn)
            infos.update(told.infos)
            these = list(choice.token_ids if told.returned.ids is None else told.returned.ids)
            those = [1] * len(these) if told.returned.mask is None else list(told.returned.mask)
            masked = masked or not told.returned.without_mask
            if goes_on and ids:
                ids[-1] += these
                mask[-1] += those
            else:
                ids.append(these)
                mask.append(those)
            if told.done:
                infos["num_turns"] = turn
                return RolloutOutput(response, infer_request.messages, ids, mask if masked else [], infos)
            infer_request = told.request
            request_config = request_config if told.config is None else told.config
            turn += 1

    @staticmethod
    def _extract_logprobs_from_choice(response_choice: ChatCompletionResponseChoice) -> list[float]:
        """The log-probabilities of a response, one for each of its `token_ids`."""
        return [float(one["logprob"]) for one in (response_choice.logprobs or {}).get("content") or []]


@dataclass(frozen=True)
class Answer:
    """What a scheduler says to a turn."""

    done: bool
    request: RolloutInferRequest
    infos: dict[str, Any]
    returned: Returned
    config: RequestConfig | None = None
    """The `request_config` that `step` returned: for the following turns."""


async def answer(
    scheduler: Any,
    request: RolloutInferRequest,
    choice: ChatCompletionResponseChoice,
    turn: int,
    *,
    lock: asyncio.Lock | None = None,
) -> Answer:
    """Ask a scheduler what comes after a turn: `on_turn_end`, `check_finished`, and `step` where it goes on.

    Raises TypeError or ValueError if it answers with what it must not.
    """
    hooked = await call(scheduler.on_turn_end, request, choice, turn, lock=lock)
    hooked = _dictionary(hooked if hooked is not None else {}, scheduler, "on_turn_end")
    finished = await call(scheduler.check_finished, request, choice, turn, lock=lock)
    done = bool(hooked.get("done", finished) or (scheduler.max_turns and turn >= scheduler.max_turns))
    infos = dict(hooked.get("rollout_infos") or {})
    if done:
        return Answer(True, request, infos, Returned.of(hooked))
    result = await call(scheduler.step, request, choice, turn, lock=lock)
    if isinstance(
        result, RolloutInferRequest
    ):  # as step did before version 3.8, and in 3.7 with a dictionary beside it
        result = {"infer_request": result}
    elif isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], RolloutInferRequest):
        result = {"infer_request": result[0], "rollout_infos": result[1]}
    result = _dictionary(result, scheduler, "step")
    following = result.get("infer_request")
    if not isinstance(following, RolloutInferRequest):
        raise TypeError(
            f"{type(scheduler).__name__}.step must return {{'infer_request': RolloutInferRequest, ...}}; its infer_request is "
            f"{following!r:.80}"
        )
    infos.update(result.get("rollout_infos") or {})
    returned = Returned.of(result)
    returned = Returned.of(hooked) if returned.nothing else returned
    return Answer(False, following, infos, returned, result.get("request_config"))


async def call(function: Callable[..., Any], *arguments: Any, lock: asyncio.Lock | None = None) -> Any:
    """Call a hook: an async one here, a sync one in a thread of its own, behind the lock if there is one."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    async with lock or contextlib.nullcontext():
        result = await run_in_thread(
            lambda: function(*arguments), name=getattr(function, "__name__", "hook"), kind="environment"
        )
    return await result if inspect.isawaitable(result) else result


def _dictionary(result: Any, scheduler: Any, hook: str) -> dict[str, Any]:
    if not isinstance(result, dict):
        raise TypeError(f"{type(scheduler).__name__}.{hook} must return a dictionary; it returned {result!r:.80}")
    return result
