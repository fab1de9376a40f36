"""A scheduler as an environment: the one loop asks it after each turn of the model.

Two of them. `Steps` asks `on_turn_end`, `check_finished` and `step`. `Run` is for schedulers that override `run`: that runs as
a task, and each call of its engine is one turn. Neither samples, neither counts tokens: that is the loop's affair.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from turnwise.compat.swift.engine import asking, sampling_change
from turnwise.compat.swift.masks import Sampled, masked_outputs, masked_turn
from turnwise.compat.swift.messages import (
    MEDIA,
    RECORDS,
    WHOLE,
    final_reply,
    reply_to,
    request_of,
    said,
    told,
    without_answer,
)
from turnwise.compat.swift.protocol import (
    ChatCompletionResponse,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    choice_of,
    response_of,
)
from turnwise.compat.swift.scheduler import answer, call
from turnwise.errors import boundary
from turnwise.types import Message, Opening, Reply, Row, SamplingChange, Turn
from turnwise.user_code.calls import own_context, spawn

__all__ = ["Run", "Steps"]


class Steps:
    """An environment of a scheduler's `step` and `check_finished`.

    `gym` pays each turn what `rollout_infos["total_reward"]` has grown by, times that.
    """

    def __init__(
        self, scheduler: Any, *, name: str, gym: float | None = None, lock: asyncio.Lock | None = None
    ) -> None:
        self._scheduler = scheduler
        self._name = name
        self._gym = gym
        self._lock = lock
        self._request: RolloutInferRequest | None = None
        self._tools: Any = None
        self._turns = 0
        self._paid = 0.0

    async def begin(self, row: Row) -> Opening:
        request = self._request = request_of(row, f"{row.id}-{self._name}")
        await call(self._scheduler.on_trajectory_start, [request], lock=self._lock)
        request.messages[:] = without_answer(request.messages)
        self._tools = request.tools
        return Opening(messages=told(request), tools=tuple(request.tools or ()))

    async def step(self, turn: Turn) -> Reply:
        request = self._request
        assert request is not None, "step before begin"
        if turn.index != self._turns:
            raise ValueError(
                "tools answered a turn in front of the scheduler, which has to see all of them: give it the tools itself, and "
                "remove `tools` and `mcp` from the recipe"
            )
        self._turns += 1
        choice = choice_of(turn)
        sampled, logprobs = list(choice.token_ids or ()), _logprobs(turn)
        said(request.messages, turn.text)
        before = told(request)
        answered = await answer(self._scheduler, request, choice, self._turns, lock=self._lock)
        self._request = request = answered.request
        infos = dict(answered.infos)
        for name in MEDIA:
            if name in infos:
                setattr(request, name, list(infos.pop(name)))
        after = told(request, since=len(before))
        if request.tools != self._tools:
            raise ValueError(
                "the scheduler changed the tools of a conversation that goes on; they are those of its row"
            )
        reply = final_reply(before, after) if answered.done else reply_to(before, after, turn.text)
        edited = reply.resume is not None or reply.rewrite is not None
        masked = masked_turn(answered.returned, sampled, logprobs, turn=self._turns, edited=edited)
        if masked.foreign:
            infos["not_sampled"] = masked.foreign
        if isinstance(whole := before[-1]["content"], str) and whole != turn.text:
            infos[WHOLE] = whole
        return replace(
            reply,
            info=infos,
            reward=self._earned(infos),
            masked={turn.index: masked.places} if masked.places else {},
            learn_from=[turn.index] if masked.declared else [],
            sampling=None if answered.config is None else sampling_change(answered.config),
        )

    async def close(self) -> None:
        if self._request is not None:
            await call(self._scheduler.on_trajectory_end, self._request, lock=self._lock)

    def _earned(self, infos: Mapping[str, Any]) -> float:
        if self._gym is None or "total_reward" not in infos:
            return 0.0
        earned = float(infos["total_reward"]) - self._paid
        self._paid += earned
        return earned * self._gym


class Run:
    """An environment of a scheduler's own `run`. What it asks its engine is the next turn; what it returns is the end.

    `gym` pays the last turn what `rollout_infos["total_reward"]` says, times that.
    """

    def __init__(self, scheduler: Any, *, name: str, gym: float | None = None) -> None:
        self._scheduler = scheduler
        self._name = name
        self._gym = gym
        self._request: RolloutInferRequest | None = None
        self._task: asyncio.Task[Any] | None = None
        self._asked: asyncio.Future[RolloutInferRequest] | None = None
        self._answer: asyncio.Future[ChatCompletionResponse] | None = None
        self._history: list[Message] = []
        self._turns: list[Sampled] = []
        self._tools: Any = None
        self._rewrites = 0
        self._sampling = SamplingChange()

    async def begin(self, row: Row) -> Opening:
        request = self._request = request_of(row, f"{row.id}-{self._name}")
        self._asked = asyncio.get_running_loop().create_future()
        self._task = spawn(self._start(request), context=own_context())
        asked = await self._next()
        if asked is None:
            self._task.result()  # raises what it raised
            raise ValueError(
                f"{type(self._scheduler).__name__}.run returned before it asked its infer_engine for anything"
            )
        self._request, self._history = asked, told(asked)
        if self._history[-1]["role"] == "assistant":
            raise ValueError("run asks for an answer to a conversation that begins with one; leave the answer out")
        self._tools = asked.tools
        return Opening(messages=self._history, tools=tuple(asked.tools or ()), sampling=self._sampling)

    async def step(self, turn: Turn) -> Reply:
        assert self._task is not None, "step before begin"
        assert self._request is not None
        assert self._answer is not None
        before = [dict(message) for message in self._history]
        said(before, turn.text)
        choice = choice_of(turn)
        self._turns.append(Sampled(turn.index, list(choice.token_ids or ())))
        uuid, infos = self._request.uuid, dict[str, Any]()
        if isinstance(whole := before[-1]["content"], str) and whole != turn.text:
            infos[WHOLE] = whole
        self._asked = asyncio.get_running_loop().create_future()
        self._answer.set_result(response_of(choice, uuid))
        asked = await self._next()
        if asked is None:
            return self._finished(before, infos)
        self._request, self._history = asked, told(asked, since=len(before))
        if asked.tools != self._tools:
            raise ValueError(
                "the scheduler changed the tools of a conversation that goes on; they are those of its row"
            )
        reply = reply_to(before, self._history, turn.text)
        if reply.resume is not None:
            self._turns[-1] = replace(self._turns[-1], edited=True)
        self._rewrites += reply.rewrite is not None
        return replace(reply, info=infos, sampling=self._sampling)

    async def close(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._request is not None:
            await call(self._scheduler.on_trajectory_end, self._request)

    async def ask(self, request: RolloutInferRequest, sampling: SamplingChange) -> ChatCompletionResponse:
        """A call of the engine, from inside `run`."""
        if self._asked is None or self._asked.done():
            raise RuntimeError(
                "run asks its infer_engine for a second answer before it has the first; ask one after the other"
            )
        self._answer = asyncio.get_running_loop().create_future()
        self._sampling = sampling
        self._asked.set_result(request)
        return await self._answer

    async def _start(self, request: RolloutInferRequest) -> Any:
        asking.set(self)
        with boundary("environment"):  # an exit out of a task would end the event loop
            return await self._scheduler.run(request, RequestConfig(logprobs=True, return_details=True))

    async def _next(self) -> RolloutInferRequest | None:
        """What the scheduler asks for, or None when it has returned."""
        assert self._task is not None
        assert self._asked is not None
        await asyncio.wait({self._task, self._asked}, return_when=asyncio.FIRST_COMPLETED)
        return self._asked.result() if self._asked.done() and not self._task.done() else None

    def _finished(self, before: Sequence[Message], infos: dict[str, Any]) -> Reply:
        assert self._task is not None
        assert self._request is not None
        result = self._task.result()
        outputs = list(result) if isinstance(result, list | tuple) else [result]
        if not outputs or not all(isinstance(one, RolloutOutput) for one in outputs):
            raise TypeError(
                f"{type(self._scheduler).__name__}.run must return a RolloutOutput or a list of them; it returned {result!r:.80}"
            )
        for one in outputs:
            infos.update(one.rollout_infos)
        request = self._request
        for name in MEDIA:
            if name in infos:
                request = replace(request, **{name: list(infos.pop(name))})
        last = outputs[-1].messages
        reply = Reply(done=True) if last is None else final_reply(before, told(replace(request, messages=last)))
        reward = 0.0 if self._gym is None else self._gym * self._earned(infos)
        found = masked_outputs(outputs, self._turns)
        if len(found.ends) > 1 + self._rewrites:  # else each record is a history of the conversation
            infos[RECORDS] = found.ends
        return replace(reply, info=infos, reward=reward, masked=found.masked, learn_from=found.learn_from)

    def _earned(self, infos: Mapping[str, Any]) -> float:
        if "total_reward" not in infos:
            raise ValueError(
                f"use_gym_env pays what rollout_infos['total_reward'] says, and {type(self._scheduler).__name__}.run returned "
                f"none: its rollout_infos are {sorted(infos)}"
            )
        return float(infos["total_reward"])


def _logprobs(turn: Turn) -> list[float]:
    return list(turn.completion.logprobs) if turn.completion is not None else []
