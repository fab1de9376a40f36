"""The environment of a conversation that an agent leads: each request of the agent is one turn of the rollout loop.

The agent runs beside the loop. Either the agent works and the environment waits for its next request, or the model samples and
the agent waits for its answer. The end of the agent is the end of the conversation.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from turnwise.environments.agents.chat_request import AgentAnswer, Refused, answer_message
from turnwise.environments.agents.continuation import (
    Continuation,
    LiveHistories,
    LiveHistory,
    Relation,
    continuation,
)
from turnwise.environments.agents.conversation import AgentConversation, AgentRequest
from turnwise.environments.agents.parameters import log_forced
from turnwise.environments.agents.proxy import Proxy
from turnwise.environments.environment import MessageCheck
from turnwise.errors import Failed, TurnwiseError, boundary
from turnwise.types import EarlierHistory, Message, Opening, Reply, Row, Turn
from turnwise.user_code.calls import own_context, spawn

__all__ = ["Agent", "AgentConnection", "AgentEnvironment", "AgentError", "AgentResult"]

_KEY = "agent"
"""The key in `Turn.info` of what this environment records."""


class AgentError(TurnwiseError):
    """An agent failed in its own code or process. The message says how; turnwise's own traceback would not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConnection:
    """How an agent reaches the server."""

    url: str
    """The address without a path: the base URL of Anthropic's clients."""
    key: str
    """The API key, which is valid for one conversation."""

    @property
    def openai_url(self) -> str:
        """The base URL of OpenAI's clients."""
        return f"{self.url}/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentResult:
    """How an agent ended."""

    reward: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)
    """Recorded in `Turn.info["agent"]` of the last turn."""


class Agent(Protocol):
    """Code of the user that leads a conversation."""

    async def run(self, row: Row, row_json: str, connection: AgentConnection) -> AgentResult:
        """Run until the agent ends. If this call is cancelled, everything that the agent has started is ended.

        Raises whatever makes the conversation fail.
        """
        ...


class AgentEnvironment:
    """One conversation of an agent.

    If a limit of the recipe ends the conversation, the agent has `seconds_to_finish` to end by itself. Its next request is
    refused with the status 410. A request that `check` refuses is answered with the status 400, and the conversation goes on.
    """

    def __init__(
        self,
        agent: Agent,
        proxy: Callable[[], Proxy],
        *,
        seconds_to_finish: float,
        check: MessageCheck | None = None,
    ) -> None:
        self._agent = agent
        self._check = check
        self._start_proxy = proxy
        self._seconds_to_finish = seconds_to_finish
        self._run: _AgentRun | None = None
        self._histories = LiveHistories()

    async def begin(self, row: Row) -> Opening:
        run = self._run = _AgentRun(self._agent, row, self._start_proxy())
        pending = await run.next_request()
        while pending is not None and run.refuses(pending, self._check, pending.messages, opening=True):
            pending = await run.next_request()
        if pending is None:
            run.result()  # raises the agent's exception, if there was one
            raise ValueError(
                "the agent ended before its first request: it must send its requests to the base URL that it is given"
            )
        request = pending.request
        return Opening(
            messages=pending.messages,
            tools=request.tools,
            sampling=request.sampling,
            chat_template_kwargs=request.chat_template_kwargs,
            watch_sampling=run.until_abandoned,
        )

    async def step(self, turn: Turn) -> Reply:
        run = self._run
        assert run is not None, "step before begin"
        answered = run.answer(turn)
        while (pending := await run.next_request()) is not None:
            found, earlier = _relation(answered, pending, turn, self._histories)
            first = found.new if earlier is None else earlier.first_new
            if not run.refuses(pending, self._check, pending.messages[first:], opening=not first):
                reward = run.conversation.take_reward()
                return _reply(answered, pending, turn, reward, found, earlier, self._histories)
        reward, result = run.conversation.take_reward(), run.result()
        info = _info({**answered.info, **result.info})
        return Reply(done=True, reward=reward + result.reward, info=info, metrics=answered.metrics(None))

    async def final_reward(self) -> float:
        """The rewards that the agent reported, and its result if it ends in time."""
        run = self._run
        if run is None:
            return 0.0
        run.conversation.end("the conversation has ended, because it reached a limit of the recipe")
        result = await run.result_within(self._seconds_to_finish)
        if run.last_turn is not None and result.info:
            run.last_turn.info[_KEY] = {**run.last_turn.info.get(_KEY, {}), **result.info}
        return run.conversation.take_reward() + result.reward

    async def close(self) -> None:
        if self._run is not None:
            await self._run.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answered:
    """A request that was answered."""

    pending: AgentRequest
    message: Message
    """The answer as the client received it."""

    @property
    def info(self) -> dict[str, Any]:
        """What is recorded of the request."""
        forced = self.pending.request.forced
        return {"forced": dict(forced)} if forced else {}

    def metrics(self, relation: Relation | None) -> dict[str, float]:
        """What is counted of this request, and of the relation of the next request to the conversation."""
        return {
            **{f"agent/{kind}": float(kind is relation) for kind in Relation},
            "agent/forced": float(bool(self.pending.request.forced)),
        }


def _relation(
    answered: _Answered, pending: AgentRequest, turn: Turn, histories: LiveHistories
) -> tuple[Continuation, EarlierHistory | None]:
    """How a request continues the conversation, and the earlier history that it returns to."""
    before, request = answered.pending.request, pending.request
    same_tools = list(request.tools) == list(before.tools)
    same_arguments = request.chat_template_kwargs == before.chat_template_kwargs
    found = continuation([*before.conversation, answered.message], request.conversation, turn.text)
    if not (same_tools and same_arguments) and found.relation is not Relation.FORKED:
        # the session renders the history again, because the tools and the arguments of the template decide about the prompt
        reason = "the arguments of the chat template differ" if same_tools else "the tools differ"
        found = replace(found, relation=Relation.FORKED, reason=reason)
    earlier = None
    if found.relation is Relation.FORKED:
        earlier = histories.find(request.conversation, request.tools, request.chat_template_kwargs)
    if earlier is not None:
        found = replace(found, relation=Relation.RETURNED, reason=f"it continues the history {earlier.index}")
    return found, earlier


def _reply(
    answered: _Answered,
    pending: AgentRequest,
    turn: Turn,
    reward: float,
    found: Continuation,
    earlier: EarlierHistory | None,
    histories: LiveHistories,
) -> Reply:
    """The reply that leads from the answered request to the next one."""
    before, request = answered.pending.request, pending.request
    same_tools = list(request.tools) == list(before.tools)
    same_arguments = request.chat_template_kwargs == before.chat_template_kwargs
    if not found.new:
        held = [*before.conversation, answered.message]
        asked = LiveHistory(held, before.tools, before.chat_template_kwargs, turn.text)
        histories.replace(asked, None if earlier is None else earlier.index)
    info = {**answered.info, **({} if found.relation is Relation.EXTENDED else _recorded(found))}
    reply = Reply(
        reward=reward,
        info=_info(info),
        metrics=answered.metrics(found.relation),
        sampling=request.sampling,
        tools=None if same_tools else request.tools,
        chat_template_kwargs=None if same_arguments else request.chat_template_kwargs,
    )
    if not found.new:
        return replace(reply, rewrite=pending.messages, returns_to=earlier)
    return replace(reply, messages=pending.messages[found.new :], edit=found.edit)


def _info(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is recorded with a turn."""
    return {_KEY: dict(values)} if values else {}


def _recorded(found: Continuation) -> dict[str, Any]:
    return {"next_request": found.relation.value, "reason": found.reason}


class _AgentRun:
    """A running agent and its requests."""

    def __init__(self, agent: Agent, row: Row, proxy: Proxy) -> None:
        text = _row_json(row)
        self.conversation = AgentConversation(text)
        self.last_turn: Turn | None = None
        """The last turn that the agent received."""
        self._row = row
        self._proxy = proxy
        self._pending: AgentRequest | None = None
        connection = AgentConnection(url=proxy.url, key=self.conversation.key)
        proxy.add(self.conversation)

        async def run() -> AgentResult:
            with boundary("environment"):  # a SystemExit that leaves a task would end the event loop
                return await agent.run(row, text, connection)

        self._task = spawn(run(), context=own_context(), name="agent")

    async def next_request(self) -> AgentRequest | None:
        """The next request of the agent; None if the agent has ended."""
        arriving = asyncio.ensure_future(self.conversation.next_request())
        try:
            await asyncio.wait({self._task, arriving}, return_when=asyncio.FIRST_COMPLETED)
            if self._task.done():
                return None
            self._pending = arriving.result()
        finally:
            arriving.cancel()
        log_forced(self._pending.request.forced)
        return self._pending

    def refuses(
        self, pending: AgentRequest, check: MessageCheck | None, messages: Sequence[Message], *, opening: bool
    ) -> bool:
        """Whether a request was answered with an error, because the model cannot receive these messages of it."""
        if check is None:
            return False
        try:
            with boundary("tokens"):
                arguments = {**self._row.chat_template_kwargs, **pending.request.chat_template_kwargs}
                check(messages, pending.request.tools, opening=opening, arguments=arguments)
        except Failed as failed:
            self.conversation.refuse(pending, Refused(400, failed.failure.message, parameter="messages"))
            return True
        return False

    async def until_abandoned(self) -> None:
        """Wait for the end of the present request. Raises ConnectionError if the client is gone."""
        assert self._pending is not None
        await asyncio.wait({self._pending.answer})
        self._refuse_abandoned(self._pending)

    def answer(self, turn: Turn) -> _Answered:
        """Answer the last request with a turn. Raises ConnectionError if the client is gone."""
        pending = self._pending
        assert pending is not None
        self.last_turn = turn
        self._refuse_abandoned(pending)
        message = answer_message(turn, pending.request.sampling.stop)
        answer = AgentAnswer(
            id=uuid.uuid4().hex,
            created=int(time.time()),
            model=pending.request.model,
            message=message,
            prompt_tokens=turn.prompt_tokens,
            completion_tokens=0 if turn.completion is None else len(turn.completion.token_ids),
            cut=turn.finish_reason == "length",
        )
        self.conversation.answer(pending, answer)
        return _Answered(pending=pending, message=message)

    def _refuse_abandoned(self, pending: AgentRequest) -> None:
        if pending.abandoned:
            raise AgentError("the agent closed its connection while the model was answering its request")

    def result(self) -> AgentResult:
        """The result of the agent, which has ended. Raises what the agent raised."""
        return self._task.result()

    async def result_within(self, seconds: float) -> AgentResult:
        """The result of the agent if it ends in time and without an error. A refused request is no reason to fail."""
        await asyncio.wait({self._task}, timeout=seconds)
        if not self._task.done() or self._task.cancelled():
            return AgentResult(info={"ended": "it was stopped after the conversation had reached a limit"})
        error = self._task.exception()
        if isinstance(error, Failed):
            return AgentResult(info={"ended": f"after the limit it failed: {error.failure.message}"})
        return self._task.result()

    async def close(self) -> None:
        """End the agent, and refuse its requests."""
        self.conversation.end("the conversation has ended")
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._proxy.remove(self.conversation)


def _row_json(row: Row) -> str:
    """A row as JSON. Raises TypeError with the name of a column that JSON cannot hold."""
    value: dict[str, Any] = {"id": row.id, "messages": list(row.messages), **row.fields}
    for name, column in value.items():
        try:
            json.dumps(column)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"the column {name!r} cannot be given to an agent as JSON: {error}. Leave the column out of the data set"
            ) from None
    return json.dumps(value, ensure_ascii=False)
