"""The environment of an agent that calls the model with token ids: each call is one turn of the rollout loop.

Programs of this kind write their prompts themselves, and return the tokens of their trajectory at the end. The session appends
what the model sampled, as always. `TokenHistories` holds the conversation as the agent sees it.

What the agent returns is compared with what was sampled: tokens that it leaves out are not trained on, and tokens that the
model did not sample are refused. This module knows token ids and no chat template.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from turnwise.environments.agents.environment import AgentError
from turnwise.environments.agents.histories import (
    Describe,
    Relation,
    ReturnedSequence,
    TokenHistories,
    unreturned_tokens,
)
from turnwise.environments.agents.requests import log_forced
from turnwise.errors import Failed, boundary
from turnwise.types import Opening, Reply, Row, SamplingChange, Turn
from turnwise.user_code.calls import own_context, spawn

# the environment

_KEY = "agent"
"""The key in `Turn.info` of what this environment records."""


class ConversationOver(AgentError):
    """The agent called the model after a limit of the recipe had ended the conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCall:
    """A call of the model."""

    prompt_ids: Sequence[int]
    """The complete prompt."""
    sampling: SamplingChange = field(default_factory=SamplingChange)
    forced: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of the agent that have no effect, because the recipe decides them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAgentResult:
    """How an agent ended."""

    reward: float | None = None
    """Added to the reward of the last turn. None: the agent gave no reward, which is not the reward 0."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Recorded in `Turn.info["agent"]` of the last turn."""
    returned: Sequence[ReturnedSequence] | None = None
    """The tokens that the agent returned; None if agents of this kind return none: all sampled tokens are then trained on."""


class TokenModel(Protocol):
    """The model, as an agent calls it."""

    async def generate(self, call: TokenCall) -> Turn:
        """The model's turn after a prompt. Calls are answered one after the other, in the order in which they arrive.

        Raises ConversationOver if a limit of the recipe has ended the conversation.
        """
        ...


class TokenAgent(Protocol):
    """Code of the user that leads a conversation with token ids."""

    async def run(self, row: Row, model: TokenModel) -> TokenAgentResult:
        """Run until the agent ends. An exception fails the conversation."""
        ...


class TokenAgentEnvironment:
    """One conversation of an agent that calls the model with token ids.

    If a limit of the recipe ends the conversation, the agent receives the turn that was cut, and has `seconds_to_finish` to
    end. A further call of the model raises `ConversationOver` in the agent.
    """

    def __init__(self, agent: TokenAgent, describe: Describe, *, seconds_to_finish: float = 10.0) -> None:
        self._agent = agent
        self._describe = describe
        self._seconds_to_finish = seconds_to_finish
        self._run: _Run | None = None

    async def begin(self, row: Row) -> Opening:
        run = self._run = _Run(self._agent, row, self._describe)
        call = await run.next_call()
        if call is None:
            run.result()  # raises the agent's exception, if there was one
            raise ValueError("the agent ended before it called the model: there is nothing to train on")
        text = run.histories.begin(call.prompt_ids)
        return Opening(
            messages=text.messages, tools=text.tools or (), sampling=call.sampling, prompt_ids=list(call.prompt_ids)
        )

    async def step(self, turn: Turn) -> Reply:
        run = self._run
        assert run is not None, "step before begin"
        run.answer(turn)
        call = await run.next_call()
        if call is None:
            return run.last_reply(run.result())
        reply, relation = run.histories.reply(call.prompt_ids)
        info = {} if relation is Relation.EXTENDED else {_KEY: {"next_request": relation.value}}
        return replace(reply, sampling=call.sampling, info=info, metrics=run.metrics(relation))

    async def final_reply(self, turn: Turn) -> Reply:
        """Give the agent the turn that a limit cut, and let it end."""
        run = self._run
        if run is None:
            return Reply(done=True)
        run.over = "the conversation has ended, because it reached a limit of the recipe"
        if turn.index >= run.answered:
            run.answer(turn)
        run.refuse_waiting()
        result = await run.result_within(self._seconds_to_finish)
        if isinstance(result, str):
            return Reply(done=True, info={_KEY: {"ended": result}})
        return run.last_reply(result)

    async def close(self) -> None:
        if self._run is not None:
            await self._run.close()


class _Run:
    """A running agent and its calls of the model (a TokenModel)."""

    def __init__(self, agent: TokenAgent, row: Row, describe: Describe) -> None:
        self.histories = TokenHistories(describe)
        self.over: str | None = None
        """Why there are no further answers; None while the conversation goes on."""
        self.answered = 0
        """Turns that the agent has received."""
        self._waiting: asyncio.Queue[tuple[TokenCall, asyncio.Future[Turn]]] = asyncio.Queue()
        self._current: tuple[TokenCall, asyncio.Future[Turn]] | None = None
        self._forced = False

        async def run() -> TokenAgentResult:
            with boundary("environment"):  # a SystemExit that leaves a task would end the event loop
                return await agent.run(row, self)

        self._task = spawn(run(), context=own_context(), name="agent")

    async def generate(self, call: TokenCall) -> Turn:
        if self.over is not None:
            raise ConversationOver(self.over)
        answer: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((call, answer))
        return await answer

    async def next_call(self) -> TokenCall | None:
        """The next call of the model; None if the agent has ended."""
        arriving = asyncio.ensure_future(self._waiting.get())
        try:
            while True:
                await asyncio.wait({self._task, arriving}, return_when=asyncio.FIRST_COMPLETED)
                if self._task.done():
                    return None
                self._current = arriving.result()
                if not self._current[1].cancelled():  # else, the agent has given this call up
                    break
                arriving = asyncio.ensure_future(self._waiting.get())
        finally:
            arriving.cancel()
        call = self._current[0]
        log_forced(call.forced)
        self._forced = bool(call.forced)
        return call

    def answer(self, turn: Turn) -> None:
        """Answer the last call with a turn."""
        assert self._current is not None
        self.histories.add_turn(turn)
        self.answered = turn.index + 1
        answer = self._current[1]
        if (
            not answer.done()
        ):  # the agent may have given the call up while the model sampled; the turn is then not returned
            answer.set_result(turn)

    def metrics(self, relation: Relation | None) -> dict[str, float]:
        """What is counted of the last call, and of the relation of the next one to the conversation."""
        counts = {f"agent/{kind}": float(kind is relation) for kind in Relation}
        return {**counts, "agent/forced": float(self._forced)}

    def last_reply(self, result: TokenAgentResult) -> Reply:
        """The reply of an agent that has ended. Raises ValueError if the returned tokens contradict the record."""
        masked = {} if result.returned is None else unreturned_tokens(self.histories, result.returned)
        metrics = {**self.metrics(None), "agent/unreturned_tokens": float(sum(map(len, masked.values())))}
        info = {_KEY: dict(result.info)} if result.info else {}
        return Reply(done=True, reward=result.reward, info=info, metrics=metrics, masked=masked)

    def refuse_waiting(self) -> None:
        """Refuse the calls that wait for an answer."""
        waiting = [self._waiting.get_nowait() for _ in range(self._waiting.qsize())]
        for _, answer in [*waiting, *([self._current] if self._current is not None else [])]:
            if not answer.done():
                answer.set_exception(ConversationOver(self.over or "the conversation has ended"))
                answer.exception()  # the agent may be gone: the exception counts as seen

    def result(self) -> TokenAgentResult:
        """The result of the agent, which has ended. Raises what the agent raised."""
        return self._task.result()

    async def result_within(self, seconds: float) -> TokenAgentResult | str:
        """The result of the agent if it ends in time and without an error; else, how it ended."""
        await asyncio.wait({self._task}, timeout=seconds)
        if not self._task.done() or self._task.cancelled():
            return "it was stopped after the conversation had reached a limit"
        if isinstance(error := self._task.exception(), Failed):
            return f"after the limit it failed: {error.failure.message}"
        return self._task.result()

    async def close(self) -> None:
        """End the agent, and refuse its calls."""
        self.over = self.over or "the conversation has ended"
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.refuse_waiting()
