"""The environment of a conversation that an agent leads: each request of the agent is one turn of the rollout loop.

The agent runs beside the loop. Either the agent works and the environment waits for its next request, or the model samples and
the agent waits for its answer. The end of the agent is the end of the conversation.

A request extends what is held, changes the last answer a little, or begins a new segment. Its messages are compared with those
of the request before, and with the answer to that request. Clients write an answer in their own form when they send it back,
so two messages also count as equal if only their form differs: white space at the ends of the content, the formatting of JSON,
missing reasoning, ids of calls.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

from turnwise.environments.agents.proxy import Proxy
from turnwise.environments.agents.requests import (
    AgentAnswer,
    AgentConversation,
    AgentRequest,
    Refused,
    answer_message,
    log_forced,
)
from turnwise.environments.environment import MessageCheck
from turnwise.errors import Failed, TurnwiseError, boundary
from turnwise.types import EarlierHistory, Edit, Message, Opening, Reply, Row, ToolSchema, Turn
from turnwise.user_code.calls import own_context, spawn
from turnwise.user_code.reward_number import added

# how a request continues the conversation

_MOST_LIVE = 64
"""Histories that are compared with a request."""


class Relation(StrEnum):
    """How the messages of a request relate to the conversation that is held. The values are names in metrics."""

    EXTENDED = "extended"
    """They repeat the conversation exactly, and new messages follow."""
    REALIGNED = "realigned"
    """They repeat the conversation but for the last answer, which the client wrote a little differently."""
    RETURNED = "returned"
    """They continue an earlier history of the conversation, such as that of another agent."""
    FORKED = "forked"
    """They are another history. A new segment begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """The relation of a request to the conversation, and what follows from it."""

    relation: Relation
    new: int = 0
    """Index of the first new message; 0 with a fork."""
    edit: Edit | None = None
    """With REALIGNED, the change of the last turn. None if only the form of the answer differs: the sampled tokens stay."""
    reason: str = ""
    """What differs, for the record; empty with EXTENDED."""


def continuation(held: Sequence[Message], messages: Sequence[Message], text: str) -> Continuation:
    """Compare the messages of a request with the conversation `held`, whose last message is the answer of the last turn.

    `text` is the sampled text of that turn.
    """
    last = len(held) - 1
    for index, (before, now) in enumerate(zip(held[:last], messages, strict=False)):
        if not _same_form(before, now):
            return _fork(f"message {index} ({now['role']}) differs")
    if len(messages) <= len(held):
        return _fork(f"the request has {len(messages)} messages, and the conversation had {len(held)}")
    answer, repeated = held[last], messages[last]
    if repeated["role"] != "assistant":
        return _fork(f"message {last} is not the last answer: its role is {repeated['role']}")
    if _same(answer, repeated):
        return Continuation(relation=Relation.EXTENDED, new=len(held))
    if _same_form(answer, repeated):
        return Continuation(relation=Relation.REALIGNED, new=len(held), reason="the form of the last answer differs")
    edit = _edit(answer, repeated, text)
    if edit is None:
        return _fork("the last answer differs")
    return Continuation(
        relation=Relation.REALIGNED, new=len(held), edit=edit, reason="the text of the last answer differs"
    )


@dataclass(frozen=True, slots=True)
class LiveHistory:
    """A history of a conversation, its last answer included."""

    messages: Sequence[Message]
    tools: Sequence[ToolSchema]
    arguments: Mapping[str, Any]
    """The arguments of the chat template (`chat_template_kwargs`)."""
    text: str
    """The sampled text of the last turn."""


class LiveHistories:
    """The histories of a conversation that a later request may continue, besides the present one."""

    def __init__(self) -> None:
        self._replaced = 0
        """How often the history was replaced: the index of the next history in `Trajectory.previous_histories`."""
        self._live: dict[int, LiveHistory] = {}
        """By their index; the latest last."""

    def replace(self, present: LiveHistory, returned: int | None) -> None:
        """The present history is replaced: by the history `returned`, or by a new history."""
        self._live[self._replaced] = present
        self._replaced += 1
        if returned is not None:
            del self._live[returned]
        while len(self._live) > _MOST_LIVE:
            del self._live[next(iter(self._live))]

    def find(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], arguments: Mapping[str, Any]
    ) -> EarlierHistory | None:
        """The latest history that these messages continue with no other text in its answers, and whose prompts were written with
        the same tools and template arguments; None if there is none."""
        for index, live in reversed(self._live.items()):
            if list(live.tools) == list(tools) and live.arguments == arguments:
                found = continuation(live.messages, messages, live.text)
                if found.new and found.edit is None:
                    return EarlierHistory(index=index, first_new=found.new)
        return None


def _fork(reason: str) -> Continuation:
    return Continuation(relation=Relation.FORKED, reason=reason)


def _edit(answer: Message, repeated: Message, text: str) -> Edit | None:
    """The change of the turn's text that makes the answer the client's. None if at least half of the client's text is new, if
    there are tool calls, or if the content is not in the sampled text."""
    old, new = answer["content"], repeated["content"]
    if answer.get("tool_calls") or repeated.get("tool_calls") or not isinstance(new, str) or not old:
        return None
    common = 0
    while common < min(len(old), len(new)) and old[common] == new[common]:
        common += 1
    start = text.rfind(old)
    if start < 0 or old == new or 2 * common <= len(new):
        return None
    return Edit(keep=start + common, add=new[common:])


def _same(first: Message, second: Message) -> bool:
    names = ("role", "content", "tool_calls", "tool_call_id")
    return _reasoning(first) == _reasoning(second) and all(
        (first.get(name) or "") == (second.get(name) or "") for name in names
    )


def _same_form(first: Message, second: Message) -> bool:
    """Whether two messages differ in their form only."""
    reasoning = _reasoning(second)
    return (
        first["role"] == second["role"]
        and _bare(first["content"]) == _bare(second["content"])
        and _calls(first) == _calls(second)
        and first.get("tool_call_id") == second.get("tool_call_id")
        and (not reasoning or not _reasoning(first) or reasoning.strip() == _reasoning(first).strip())
    )


def _reasoning(message: Message) -> str:
    return str(message.get("reasoning_content") or "")


def _bare(content: Any) -> Any:
    return content.strip() if isinstance(content, str) else content


def _calls(message: Message) -> list[tuple[str, Any]]:
    """The names and arguments of a message's calls; arguments that are not JSON as text."""
    return [
        (call["function"]["name"], _json(call["function"]["arguments"])) for call in message.get("tool_calls") or ()
    ]


def _json(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text


# the environment

_KEY = "agent"
"""The key in `Turn.info` of what this environment records."""


class AgentError(TurnwiseError):
    """An agent failed in its own code or process. The message says how; turnwise's own traceback would not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConnection:
    """How an agent reaches the server."""

    url: str
    """The address without a path: the base URL of Anthropic's clients. Empty for agents in this process, without a server."""
    key: str
    """The API key, which is valid for one conversation."""
    conversation: AgentConversation
    """The conversation, which code in this process asks without HTTP (`ask`, in the event loop of the environment)."""

    @property
    def openai_url(self) -> str:
        """The base URL of OpenAI's clients."""
        return f"{self.url}/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentResult:
    """How an agent ended."""

    reward: float | None = None
    """Added to the reward of the last turn. None: the agent gave no reward, which is not the reward 0."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Further parts of that reward, by name."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Recorded in `Turn.info["agent"]` of the last turn."""


class Agent(Protocol):
    """Code of the user that leads a conversation."""

    async def run(self, row: Row, row_json: str, connection: AgentConnection) -> AgentResult:
        """Run until the agent ends. If this call is cancelled, everything that the agent has started is ended.

        An exception fails the conversation.
        """
        ...


class AgentEnvironment:
    """One conversation of an agent.

    If a limit of the recipe ends the conversation, the agent has `seconds_to_finish` to end by itself. Its next request is
    refused with the status 410. A request that `check` refuses is answered with the status 400, and the conversation goes on.

    Without a `proxy`, the agent is code in this process: it has no server, asks `AgentConnection.conversation`, and receives the
    last turn also if a limit has cut that turn.
    """

    def __init__(
        self,
        agent: Agent,
        proxy: Callable[[], Proxy] | None,
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
        run = self._run = _AgentRun(self._agent, row, None if self._start_proxy is None else self._start_proxy())
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
        return Reply(
            done=True,
            reward=added([reward, result.reward]),
            rewards=result.rewards,
            info=info,
            metrics=answered.metrics(None),
        )

    async def final_reply(self, turn: Turn) -> Reply:
        """The rewards that the agent reported, and its result if it ends in time."""
        run = self._run
        if run is None:
            return Reply(done=True)
        if self._start_proxy is None and (run.last_turn is None or turn.index != run.last_turn.index):
            run.answer(turn)
        run.conversation.end("the conversation has ended, because it reached a limit of the recipe")
        result = await run.result_within(self._seconds_to_finish)
        info = _info({**turn.info.get(_KEY, {}), **result.info}) if result.info else {}
        reward = added([run.conversation.take_reward(), result.reward])
        return Reply(done=True, reward=reward, rewards=result.rewards, info=info)

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
    reward: float | None,
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

    def __init__(self, agent: Agent, row: Row, proxy: Proxy | None) -> None:
        text = _row_json(row)
        self.conversation = AgentConversation(text)
        self.last_turn: Turn | None = None
        """The last turn that the agent received."""
        self._row = row
        self._proxy = proxy
        self._pending: AgentRequest | None = None
        connection = AgentConnection(
            url="" if proxy is None else proxy.url, key=self.conversation.key, conversation=self.conversation
        )
        if proxy is not None:
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
        if self._proxy is not None:
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
