"""A scheduler of ms-swift as an environment: one with `step`, or one with a control flow of its own (`run`).

The rollout loop asks a scheduler with `step` after each turn of the model. A scheduler that overrides `run` runs as a task: each
call of its `infer_engine` waits until the rollout loop has sampled a turn, and the end of `run` is the end of the conversation.
The context variable `current_run` of that task says which conversation a call belongs to.

This module neither samples nor counts tokens; the rollout loop does both."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from turnwise.compat.swift.protocol import (
    FULL_ANSWER,
    MEDIA,
    OUTPUT_ENDS,
    ChatCompletionResponse,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    SampledTurn,
    append_answer,
    choice_of,
    final_reply,
    mask_outputs,
    mask_turn,
    messages_of,
    reply_between,
    request_arguments,
    request_of,
    request_tools,
    response_of,
    without_answers,
)
from turnwise.compat.swift.schedulers import ask_scheduler, call_hook
from turnwise.errors import ConfigError, boundary
from turnwise.types import Message, Opening, Reply, Row, SamplingChange, ToolSchema, Turn
from turnwise.user_code.calls import own_context, spawn

_FREE = {"logprobs", "top_logprobs", "prompt_logprobs", "return_details", "stream", "max_tokens", "stop"}
"""Options of a request that do not change the sampled distribution. A scheduler may set them."""


_OPTIONS = {"temperature", "top_k", "top_p", "min_p"}
"""Options of a request that the recipe has under `sampling`."""


class Run(Protocol):
    """The `run` of one conversation."""

    async def infer(self, request: RolloutInferRequest, sampling: SamplingChange) -> ChatCompletionResponse:
        """Sample the next turn, with these changes to the recipe's sampling."""
        ...


current_run: ContextVar[Run] = ContextVar("current_run")
"""The `run` that the current task belongs to."""


@functools.lru_cache(maxsize=4)
def load_tokenizer(path: str) -> Any:
    """A transformers tokenizer."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=Path(path).is_dir())
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"environment.arguments.tokenizer: no tokenizer could be loaded from {path!r}: {error}"
        ) from error


@dataclass(frozen=True)
class TemplateMeta:
    """Properties of a chat template, as in ms-swift."""

    is_thinking: bool = True
    """Whether reasoning is removed from earlier answers. Without reasoning, it has no effect."""


class Template:
    """The parts of ms-swift's template that schedulers use: the tokenizer, and removing reasoning from earlier answers."""

    def __init__(self, engine: InferEngine) -> None:
        self._engine = engine
        self.mode = "vllm"
        """As in ms-swift: in the mode `train`, reasoning is removed from earlier answers."""
        self.template_meta = TemplateMeta()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that the recipe names."""
        return self._engine.tokenizer

    def _swift_prepare_inputs(self, inputs: Any) -> None:
        """Remove the reasoning from all assistant messages of `inputs.messages`, except the last message."""
        for message in inputs.messages[:-1]:
            if message["role"] == "assistant" and isinstance(message["content"], str):
                message["content"] = message["content"].rpartition("</think>")[2].strip()


class InferEngine:
    """The `self.infer_engine` of a scheduler."""

    def __init__(self, tokenizer: str | None = None) -> None:
        self._path = tokenizer
        self.template = Template(self)
        """For `infer_engine.template.tokenizer` and `infer_engine.template.template_meta`."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that the recipe names, loaded on first use."""
        if self._path is None:
            raise ConfigError(
                "the scheduler uses a tokenizer, but the recipe names none: set environment.arguments.tokenizer to the model's "
                "directory"
            )
        return load_tokenizer(self._path)

    @property
    def default_template(self) -> Template:
        """Another name of `template`."""
        return self.template

    @property
    def engine(self) -> InferEngine:
        """This engine: there is no inner engine here."""
        return self

    async def get_tokenizer(self) -> Any:
        """For `infer_engine.engine.get_tokenizer()`."""
        return self.tokenizer

    async def infer_async(
        self,
        infer_request: RolloutInferRequest | dict[str, Any],
        request_config: RequestConfig | None = None,
        *,
        use_tqdm: bool | None = None,
        adapter_request: Any = None,
    ) -> ChatCompletionResponse:
        """Sample the next turn. Only from inside `run`, and one call at a time.

        Raises ValueError if the request changes the distribution that the recipe samples from.
        """
        if isinstance(infer_request, dict):
            infer_request = RolloutInferRequest(**infer_request)
        change = sampling_change(request_config if request_config is not None else RequestConfig())
        if adapter_request is not None:
            raise ValueError("adapter_request selects an adapter, but only one model is trained here; remove it")
        run = current_run.get(None)
        if run is None:
            raise RuntimeError("infer_async can only be called from run; step must return the next infer_request")
        return await run.infer(infer_request, change)

    def infer(
        self, infer_requests: Sequence[RolloutInferRequest], request_config: RequestConfig | None = None
    ) -> list[ChatCompletionResponse]:
        """Not supported, because it would block all other conversations. Raises RuntimeError."""
        raise RuntimeError(
            "infer_engine.infer blocks until the model has answered; write: response = await "
            "self.infer_engine.infer_async(infer_request, request_config)"
        )


def sampling_change(config: RequestConfig) -> SamplingChange:
    """The changes that a request makes to the recipe's sampling: `max_tokens` and `stop`. Other options must have their default.

    Raises ValueError if the request changes the sampled distribution, and TypeError if it is not a RequestConfig.
    """
    if not isinstance(config, RequestConfig):
        raise TypeError(f"request_config must be a RequestConfig; it is {config!r:.80}")
    default = RequestConfig()
    changed = [name for name in vars(default) if name not in _FREE and getattr(config, name) != getattr(default, name)]
    if changed:
        name = changed[0]
        fix = f"set sampling.{name} in the recipe" if name in _OPTIONS else "the recipe has no such option"
        raise ValueError(
            f"the scheduler's request has {name}={getattr(config, name)!r}. Training needs all tokens to be sampled from the "
            f"recipe's distribution: do not set {name} in the request_config; {fix}. A scheduler may change max_tokens and stop"
        )
    stop = [config.stop] if isinstance(config.stop, str) else config.stop
    return SamplingChange(max_tokens=config.max_tokens, stop=stop or None)


class StepEnvironment:
    """One conversation that a scheduler's `on_turn_end`, `check_finished` and `step` lead.

    With `gym_weight`, the reward of a turn is `gym_weight` times the increase of `rollout_infos["total_reward"]`.
    `lock` is given if several conversations share the scheduler.
    """

    def __init__(
        self,
        scheduler: Any,
        *,
        name: str,
        gym_weight: float | None = None,
        lock: asyncio.Lock | None = None,
        shares: bool = False,
    ) -> None:
        self.shares = shares
        self.scheduler = scheduler
        self.name = name
        self.gym_weight = gym_weight
        self.lock = lock
        self.turns = 0
        """Turns that the scheduler has seen."""
        self.total_reward = 0.0
        """The `total_reward` that has been paid out so far."""
        self._request: RolloutInferRequest | None = None
        self._tools: list[ToolSchema] = []
        self._arguments: dict[str, Any] = {}

    async def begin(self, row: Row) -> Opening:
        request = self._request = request_of(row, f"{row.id}-{self.name}")
        await call_hook(self.scheduler.on_trajectory_start, [request], lock=self.lock)
        request.messages[:] = without_answers(request.messages)
        self._tools, self._arguments = request_tools(request), request_arguments(request)
        return Opening(messages=messages_of(request), tools=self._tools, chat_template_kwargs=self._arguments)

    async def step(self, turn: Turn) -> Reply:
        request = self._request
        assert request is not None, "step before begin"
        if turn.index != self.turns:
            raise ValueError(
                "a turn was answered by tools and did not reach the scheduler, which must see all turns: give the tools to the "
                "scheduler, and remove `tools` and `mcp` from the recipe"
            )
        self.turns += 1
        choice = choice_of(turn)
        # copies, because the scheduler may append to the lists of `choice`
        sampled, logprobs = list(choice.token_ids or ()), _logprobs(turn)
        append_answer(request.messages, turn.text)
        before = messages_of(request)
        decision = await ask_scheduler(self.scheduler, request, choice, self.turns, lock=self.lock)
        self._request = request = decision.request
        infos = dict(decision.infos)
        for name in MEDIA:
            if name in infos:
                setattr(request, name, list(infos.pop(name)))
        after = messages_of(request, since=len(before))
        if decision.done:
            reply = final_reply(before, after)
        else:
            previous, self._tools = self._tools, request_tools(request)
            changed_tools = None if self._tools == previous else self._tools
            reply = reply_between(before, after, turn.text, tools=changed_tools)
            if (arguments := request_arguments(request)) != self._arguments:
                self._arguments = arguments
                reply = replace(reply, chat_template_kwargs=arguments)
        edited = reply.resume is not None or reply.rewrite is not None
        mask = mask_turn(decision.returned, sampled, logprobs, turn=self.turns, edited=edited)
        if mask.not_sampled:
            infos["not_sampled"] = mask.not_sampled
        if isinstance(answer := before[-1]["content"], str) and answer != turn.text:
            infos[FULL_ANSWER] = answer
        return replace(
            reply,
            info=infos,
            reward=self._reward(infos),
            masked={turn.index: mask.positions} if mask.positions else {},
            train_on=[turn.index] if mask.has_mask else [],
            sampling=None if decision.config is None else sampling_change(decision.config),
        )

    async def close(self) -> None:
        if self._request is not None:
            await call_hook(self.scheduler.on_trajectory_end, self._request, lock=self.lock)

    def _reward(self, infos: Mapping[str, Any]) -> float | None:
        if self.gym_weight is None or "total_reward" not in infos:
            return None
        increase = float(infos["total_reward"]) - self.total_reward
        self.total_reward += increase
        return increase * self.gym_weight


def _logprobs(turn: Turn) -> list[float]:
    return list(turn.completion.logprobs) if turn.completion is not None else []


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

    def __init__(self, scheduler: Any, *, name: str, gym_weight: float | None = None, shares: bool = False) -> None:
        self.shares = shares
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
        reward = None if self.gym_weight is None else self.gym_weight * self._total_reward(infos)
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
