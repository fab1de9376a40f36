"""`MultiTurnScheduler` with ms-swift's interface, and `ask_scheduler`, which calls its hooks after a turn of the model.

Hooks may be sync or async. Sync hooks run in threads, so that a slow hook does not block other conversations.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from turnwise.compat.swift.masks import ReturnedTokens
from turnwise.compat.swift.messages import append_answer, without_answers
from turnwise.compat.swift.protocol import (
    ChatCompletionResponseChoice,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
)
from turnwise.user_code.run_in_thread import run_in_thread

__all__ = ["Decision", "MultiTurnScheduler", "RolloutScheduler", "ask_scheduler", "call_hook", "multi_turns"]

multi_turns: dict[str, type[Any]] = {}
"""The registry: a plugin adds to it, `name` selects from it."""


class RolloutScheduler:
    """The base class of all schedulers: an engine, a maximum number of turns, hooks."""

    max_turns: int | None = None
    infer_engine: Any = None
    _tokenizer: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """`(infer_engine, max_turns)`; in older versions of ms-swift `(max_turns)`. An integer is `max_turns` in either place."""
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
        """The tokenizer that the constructor received, otherwise the tokenizer of `environment.arguments.tokenizer`."""
        return self._tokenizer if self._tokenizer is not None else self.infer_engine.tokenizer

    @property
    def engine(self) -> Any:
        """Another name of `infer_engine`."""
        return self.infer_engine

    def __getattr__(self, name: str) -> Any:
        """Attributes that the scheduler does not have are looked up in its engine."""
        engine = None if name.startswith("__") else self.__dict__.get("infer_engine")
        if engine is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(engine, name)

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """Called before the first turn; it may change the requests in place. The list always has one request here."""

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Called after each turn, including the last. `done` overrides `check_finished`; `rollout_infos` are recorded."""
        return {}

    async def on_trajectory_end(self, infer_request: RolloutInferRequest) -> None:
        """Called when the conversation has ended, also after an error. (ms-swift has no such hook.)

        A plugin's copy of ms-swift's gym scheduler has `_close_and_remove(uuid)`, which is called here.
        """
        if callable(close := getattr(type(self), "_close_and_remove", None)):
            await call_hook(close, self, str(infer_request.uuid))

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> RolloutOutput | list[RolloutOutput]:
        """One complete conversation. This base class makes one turn."""
        response = await self.infer_engine.infer_async(infer_request, request_config)
        choice = response.choices[0]
        append_answer(infer_request.messages, choice.message.content)
        ids = list(choice.token_ids)
        return RolloutOutput(response, infer_request.messages, [ids], [[1] * len(ids)])

    async def async_infer(self, infer_requests: Any, request_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Not supported: ms-swift passes a batch of conversations, but here each conversation runs alone. Raises RuntimeError."""
        raise RuntimeError(
            "async_infer takes a batch of conversations; here each conversation runs alone, started by the rollout loop"
        )


class MultiTurnScheduler(RolloutScheduler):
    """Decides how a conversation continues after a turn. Subclasses override `step`, and `check_finished` or `run` if needed."""

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """The request of the next turn: `{"infer_request": ...}`. `current_turn` counts from 1.

        The key `request_config` changes `max_tokens` and `stop` of the following turns.
        """
        raise NotImplementedError(f"{type(self).__name__} overrides neither step nor run")

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        """Whether the conversation has ended: the turn was truncated, or there were `max_turns` turns."""
        if response_choice.finish_reason == "length":
            return True
        return bool(self.max_turns and current_turn >= self.max_turns)

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> RolloutOutput | list[RolloutOutput]:
        """One complete conversation, for subclasses that call `super().run`: calls the same hooks as the rollout loop."""
        await call_hook(self.on_trajectory_start, [infer_request])
        infer_request.messages[:] = without_answers(infer_request.messages)
        infos: dict[str, Any] = {}
        ids: list[list[int]] = []
        mask: list[list[int]] = []
        masked = False
        turn = 1
        while True:
            continues_answer = bool(infer_request.messages) and infer_request.messages[-1]["role"] == "assistant"
            response = await self.infer_engine.infer_async(infer_request, request_config)
            choice = response.choices[0]
            append_answer(infer_request.messages, choice.message.content)
            decision = await ask_scheduler(self, infer_request, choice, turn)
            infos.update(decision.infos)
            returned = decision.returned
            turn_ids = list(choice.token_ids if returned.ids is None else returned.ids)
            turn_mask = [1] * len(turn_ids) if returned.mask is None else list(returned.mask)
            masked = masked or not returned.without_mask
            if continues_answer and ids:
                ids[-1] += turn_ids
                mask[-1] += turn_mask
            else:
                ids.append(turn_ids)
                mask.append(turn_mask)
            if decision.done:
                infos["num_turns"] = turn
                return RolloutOutput(response, infer_request.messages, ids, mask if masked else [], infos)
            infer_request = decision.request
            request_config = request_config if decision.config is None else decision.config
            turn += 1

    @staticmethod
    def _extract_logprobs_from_choice(response_choice: ChatCompletionResponseChoice) -> list[float]:
        """The log-probabilities of a response, one per item of its `token_ids`."""
        return [float(token["logprob"]) for token in (response_choice.logprobs or {}).get("content") or []]


@dataclass(frozen=True)
class Decision:
    """The decision of a scheduler after a turn."""

    done: bool
    request: RolloutInferRequest
    infos: dict[str, Any]
    returned: ReturnedTokens
    config: RequestConfig | None = None
    """The `request_config` that `step` returned. It holds for the following turns."""


async def ask_scheduler(
    scheduler: Any,
    request: RolloutInferRequest,
    choice: ChatCompletionResponseChoice,
    turn: int,
    *,
    lock: asyncio.Lock | None = None,
) -> Decision:
    """Call a scheduler's hooks after a turn: `on_turn_end`, `check_finished`, and `step` if the conversation continues.

    `lock` is held during sync hooks. Raises TypeError if a hook returns a value of a wrong type.
    """
    hooked = await call_hook(scheduler.on_turn_end, request, choice, turn, lock=lock)
    hooked = _dictionary(hooked if hooked is not None else {}, scheduler, "on_turn_end")
    finished = await call_hook(scheduler.check_finished, request, choice, turn, lock=lock)
    done = bool(hooked.get("done", finished) or (scheduler.max_turns and turn >= scheduler.max_turns))
    infos = dict(hooked.get("rollout_infos") or {})
    if done:
        return Decision(True, request, infos, ReturnedTokens.of(hooked))
    result = await call_hook(scheduler.step, request, choice, turn, lock=lock)
    # before version 3.8, step returned the request; in 3.7 also the request with a dictionary
    if isinstance(result, RolloutInferRequest):
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
    returned = ReturnedTokens.of(result)
    returned = ReturnedTokens.of(hooked) if returned.empty else returned
    return Decision(False, following, infos, returned, result.get("request_config"))


async def call_hook(function: Callable[..., Any], *arguments: Any, lock: asyncio.Lock | None = None) -> Any:
    """Call a hook: an async hook in this task, a sync hook in a thread, while `lock` is held."""
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
