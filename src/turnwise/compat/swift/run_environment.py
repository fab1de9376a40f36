"""The environment of a scheduler that overrides `run`, and so has a control flow of its own.

`run` is started as a task. Each call of its `infer_engine` is one turn of the rollout loop: the call waits until the loop has
sampled the turn. The end of `run` is the end of the conversation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.compat.swift.engine import current_run
from turnwise.compat.swift.masks import SampledTurn, mask_outputs
from turnwise.compat.swift.messages import (
    FULL_ANSWER,
    MEDIA,
    OUTPUT_ENDS,
    append_answer,
    final_reply,
    messages_of,
    reply_between,
    request_arguments,
    request_of,
    request_tools,
)
from turnwise.compat.swift.protocol import (
    ChatCompletionResponse,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    choice_of,
    response_of,
)
from turnwise.compat.swift.scheduler import call_hook
from turnwise.errors import boundary
from turnwise.types import Message, Opening, Reply, Row, SamplingChange, ToolSchema, Turn
from turnwise.user_code.calls import own_context, spawn

__all__ = ["RunEnvironment"]


@dataclass(frozen=True)
class _EngineCall:
    """A call of `infer_engine` inside `run`: the conversation to continue, and changes to the recipe's sampling."""

    request: RolloutInferRequest
    sampling: SamplingChange


class _RunTask:
    """A scheduler's `run` as a task, which alternates with the rollout loop.

    Either `run` works and the loop waits in `next_call`, or the loop samples and `run` waits in `infer`.
    """

    def __init__(self, scheduler: Any, request: RolloutInferRequest) -> None:
        self._scheduler = scheduler
        self._call: asyncio.Future[_EngineCall] = asyncio.get_running_loop().create_future()
        self._response: asyncio.Future[ChatCompletionResponse] | None = None
        self._task = spawn(self._run(request), context=own_context())

    async def next_call(self) -> _EngineCall | None:
        """The next call of the engine; None if `run` has returned or raised."""
        await asyncio.wait({self._task, self._call}, return_when=asyncio.FIRST_COMPLETED)
        return self._call.result() if self._call.done() and not self._task.done() else None

    def respond(self, response: ChatCompletionResponse) -> None:
        """Answer the last call of the engine."""
        assert self._response is not None
        self._call = asyncio.get_running_loop().create_future()
        self._response.set_result(response)

    def result(self) -> Any:
        """The return value of `run`. Raises what `run` raised."""
        return self._task.result()

    async def cancel(self) -> None:
        """End the task if it has not ended yet."""
        if not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def infer(self, request: RolloutInferRequest, sampling: SamplingChange) -> ChatCompletionResponse:
        """A call of the engine, from inside `run`."""
        if self._call.done():
            raise RuntimeError(
                "run called its infer_engine a second time before the first response had arrived; make one call after the other"
            )
        self._response = asyncio.get_running_loop().create_future()
        self._call.set_result(_EngineCall(request, sampling))
        return await self._response

    async def _run(self, request: RolloutInferRequest) -> Any:
        current_run.set(self)
        with boundary("environment"):  # a SystemExit that leaves a task would end the event loop
            return await self._scheduler.run(request, RequestConfig(logprobs=True, return_details=True))


@dataclass
class _RunState:
    """The state of one conversation."""

    request: RolloutInferRequest
    """The request of the last engine call; before the first call, the request that `run` was started with."""
    task: _RunTask
    history: list[Message] = field(default_factory=list)
    """The messages of `request`, in our form."""
    tools: list[ToolSchema] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    """The arguments of the chat template."""
    turns: list[SampledTurn] = field(default_factory=list)
    rewrites: int = 0
    """How many times `run` replaced the history."""


class RunEnvironment:
    """One conversation that a scheduler's `run` leads.

    With `gym_weight`, the reward of the last turn is `gym_weight` times `rollout_infos["total_reward"]`.
    """

    def __init__(self, scheduler: Any, *, name: str, gym_weight: float | None = None) -> None:
        self.scheduler = scheduler
        self.name = name
        self.gym_weight = gym_weight
        self._state: _RunState | None = None

    async def begin(self, row: Row) -> Opening:
        request = request_of(row, f"{row.id}-{self.name}")
        state = self._state = _RunState(request, _RunTask(self.scheduler, request))
        call = await state.task.next_call()
        if call is None:
            state.task.result()  # raises the exception of `run`, if it raised
            raise ValueError(f"{type(self.scheduler).__name__}.run returned before it called its infer_engine")
        state.history = messages_of(call.request)
        state.request, state.tools = call.request, request_tools(call.request)
        state.arguments = request_arguments(call.request)
        if state.history[-1]["role"] == "assistant":
            raise ValueError(
                "the first request of run ends with an assistant message, so there is nothing to answer: remove that message"
            )
        return Opening(
            messages=state.history, tools=state.tools, sampling=call.sampling, chat_template_kwargs=state.arguments
        )

    async def step(self, turn: Turn) -> Reply:
        state = self._state
        assert state is not None, "step before begin"
        before = [dict(message) for message in state.history]
        append_answer(before, turn.text)
        choice = choice_of(turn)
        state.turns.append(SampledTurn(turn.index, list(choice.token_ids or ())))
        infos = dict[str, Any]()
        if isinstance(answer := before[-1]["content"], str) and answer != turn.text:
            infos[FULL_ANSWER] = answer
        state.task.respond(response_of(choice, state.request.uuid))
        call = await state.task.next_call()
        if call is None:
            return self._final_reply(state, before, infos)
        state.history = messages_of(call.request, since=len(before))
        state.request = call.request
        previous, state.tools = state.tools, request_tools(call.request)
        changed_tools = None if state.tools == previous else state.tools
        reply = reply_between(before, state.history, turn.text, tools=changed_tools)
        if reply.resume is not None:
            state.turns[-1] = replace(state.turns[-1], edited=True)
        state.rewrites += reply.rewrite is not None
        previous_arguments, state.arguments = state.arguments, request_arguments(call.request)
        changed_arguments = None if state.arguments == previous_arguments else state.arguments
        return replace(reply, info=infos, sampling=call.sampling, chat_template_kwargs=changed_arguments)

    async def close(self) -> None:
        if self._state is not None:
            await self._state.task.cancel()
            await call_hook(self.scheduler.on_trajectory_end, self._state.request)

    def _final_reply(self, state: _RunState, before: Sequence[Message], infos: dict[str, Any]) -> Reply:
        outputs = self._outputs(state.task.result())
        for output in outputs:
            infos.update(output.rollout_infos)
        request = state.request
        for name in MEDIA:
            if name in infos:
                request = replace(request, **{name: list(infos.pop(name))})
        last = outputs[-1].messages
        reply = Reply(done=True) if last is None else final_reply(before, messages_of(replace(request, messages=last)))
        reward = 0.0 if self.gym_weight is None else self.gym_weight * self._total_reward(infos)
        masks = mask_outputs(outputs, state.turns)
        # with as many outputs as histories, each output is one history of the conversation, and needs no mark
        if len(masks.output_ends) > 1 + state.rewrites:
            infos[OUTPUT_ENDS] = masks.output_ends
        return replace(reply, info=infos, reward=reward, masked=masks.masked, train_on=masks.train_on)

    def _outputs(self, result: Any) -> list[RolloutOutput]:
        outputs = list(result) if isinstance(result, list | tuple) else [result]
        if not outputs or not all(isinstance(output, RolloutOutput) for output in outputs):
            raise TypeError(
                f"{type(self.scheduler).__name__}.run must return a RolloutOutput or a list of them; it returned {result!r:.80}"
            )
        return outputs

    def _total_reward(self, infos: Mapping[str, Any]) -> float:
        if "total_reward" not in infos:
            raise ValueError(
                f"use_gym_env takes the reward from rollout_infos['total_reward'], and {type(self.scheduler).__name__}.run "
                f"returned none: its rollout_infos are {sorted(infos)}"
            )
        return float(infos["total_reward"])
