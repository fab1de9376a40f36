"""The environment of a conversation that an agent leads: each request of the agent is one turn of the rollout loop.

The agent runs beside the loop. Either the agent works and the environment waits for its next request, or the model samples and
the agent waits for its answer. The end of the agent is the end of the conversation.

`histories.py` says how a request continues the conversation. If an agent writes its prompts itself (`/v1/completions`), its texts
are encoded behind the tokens that were sampled.
"""

from __future__ import annotations

import asyncio
import collections
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from turnwise.environments.agents.histories import (
    ContextText,
    Continuation,
    LiveHistories,
    LiveHistory,
    Relation,
    TokenHistories,
    continuation,
)
from turnwise.environments.agents.proxy import Proxy
from turnwise.environments.agents.requests import (
    AgentAnswer,
    AgentConversation,
    AgentRequest,
    ChatRequest,
    Refused,
    answer_message,
    before_stop,
    log_forced,
    template_messages,
)
from turnwise.environments.environment import ModelPrompts
from turnwise.errors import Failed, TurnwiseError, boundary
from turnwise.types import EarlierHistory, Message, Opening, Reply, Row, ToolSchema, Turn
from turnwise.user_code.calls import own_context, spawn, waiting_for_others
from turnwise.user_code.reward_number import added
from turnwise.user_code.threads import off_loop

# the environment

_KEY = "agent"
"""The key in `Turn.info` of what this environment records."""
_SHORT_TEXT = 1 << 15
"""Characters of a request that does not wait for longer ones of other conversations."""


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
    """Added to the reward of the last turn that the agent received. None: the agent gave no reward, which is not the reward 0."""
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

    Rewards may arrive until `seconds_for_rewards` after the end of the agent, or until one is the last (`final`). If that time
    passes without any reward, the conversation fails. The time counts for no limit of the recipe.
    """

    def __init__(
        self,
        agent: Agent,
        proxy: Callable[[], Proxy] | None,
        *,
        seconds_to_finish: float,
        seconds_for_rewards: float = 0.0,
        prompts: ModelPrompts | None = None,
    ) -> None:
        self._agent = agent
        self._prompts = prompts
        self._seconds_for_rewards = seconds_for_rewards
        self._start_proxy = proxy
        self._seconds_to_finish = seconds_to_finish
        self._run: _AgentRun | None = None
        self._way: _Way | None = None

    async def begin(self, row: Row) -> Opening:
        # the run's first conversation imports and starts the server
        proxy = None if self._start_proxy is None else await off_loop(self._start_proxy, long=False)
        run = self._run = _AgentRun(self._agent, row, proxy, self._prompts)
        while (pending := await run.next_request()) is not None:
            way = self._way = _ByMessages(run) if pending.request.prompt is None else _ByTexts(run)
            if (opening := await way.opening(pending)) is not None:
                return replace(opening, sampling=pending.request.sampling, watch_sampling=run.until_abandoned)
        run.result()  # raises the agent's exception, if there was one
        raise ValueError(
            "the agent ended before its first request: it must send its requests to the base URL that it is given"
        )

    async def step(self, turn: Turn) -> Reply:
        run, way = self._run, self._way
        assert run is not None, "step before begin"
        assert way is not None
        answered = run.answer(turn)
        way.add_turn(turn)
        while (pending := await run.next_request()) is not None:
            reply = None if run.refuses_other_api(pending, answered) else await way.reply(answered, pending, turn)
            if reply is not None:
                reward, of_earlier = run.conversation.rewards.take(turn.index)
                return replace(reply, sampling=pending.request.sampling, reward=reward, earlier_rewards=of_earlier)
        result = run.result()
        run.conversation.end("the agent has ended, so there are no further answers")
        reply = await self._last_reply(run, turn, result, {**answered.info, **result.info})
        return replace(reply, metrics=answered.metrics(None))

    async def final_reply(self, turn: Turn) -> Reply:
        """The rewards that the agent reported, and its result if it ends in time."""
        run = self._run
        if run is None:
            return Reply(done=True)
        if self._start_proxy is None and (run.last_turn is None or turn.index != run.last_turn.index):
            run.answer(turn)
        run.conversation.end("the conversation has ended, because it reached a limit of the recipe")
        result = await run.result_within(self._seconds_to_finish)
        return await self._last_reply(
            run, turn, result, {**turn.info.get(_KEY, {}), **result.info} if result.info else {}
        )

    async def _last_reply(self, run: _AgentRun, turn: Turn, result: AgentResult, info: Mapping[str, Any]) -> Reply:
        """The end of the conversation, once its rewards have arrived. Raises AgentError if they do not arrive in time."""
        if self._seconds_for_rewards:
            with waiting_for_others():  # the limits are those of the agent
                await run.conversation.rewards.until_final(self._seconds_for_rewards)
            if result.reward is None and not run.conversation.rewards.any:
                raise AgentError(
                    f"no reward arrived within seconds_for_rewards={self._seconds_for_rewards:g} after the end of the agent: "
                    f"report it in time (POST /v1/reward), with `final: true` if it is the last one, or allow more time"
                )
        reward, of_earlier = run.conversation.rewards.take(turn.index, at_end=True)
        received = run.conversation.last_answered
        if received is None or received == turn.index:
            reward = added([reward, result.reward])
        elif result.reward is not None:  # a limit has cut the last turn
            of_earlier = {**of_earlier, received: of_earlier.get(received, 0.0) + result.reward}
        return Reply(
            done=True,
            reward=reward,
            rewards=result.rewards,
            earlier_rewards=of_earlier,
            info=_info(info),
        )

    async def close(self) -> None:
        if self._run is not None:
            await self._run.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answered:
    """A request that was answered."""

    pending: AgentRequest
    message: Message
    """The answer as the client received it, with the beginning that the client gave."""

    @property
    def begun(self) -> str:
        """The beginning of the answer that the client gave."""
        return self.pending.request.prefill

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


class _Way(Protocol):
    """How the requests of an agent are continued: all of them by messages, or all by texts."""

    async def opening(self, pending: AgentRequest) -> Opening | None:
        """What the first request begins with; None if it was refused."""
        ...

    def add_turn(self, turn: Turn) -> None:
        """Take a turn of the model."""
        ...

    async def reply(self, answered: _Answered, pending: AgentRequest, turn: Turn) -> Reply | None:
        """What leads from the answered request to the next one; None if that was refused."""
        ...


class _ByMessages:
    """The messages of a request are rendered by the chat template."""

    def __init__(self, run: _AgentRun) -> None:
        self._run = run
        self._histories = LiveHistories()

    async def opening(self, pending: AgentRequest) -> Opening | None:
        if await self._run.refuses(pending, pending.messages, opening=True):
            return None
        request = pending.request
        return Opening(
            messages=pending.messages,
            tools=request.tools,
            chat_template_kwargs=request.chat_template_kwargs,
            prefill=request.prefill,
        )

    def add_turn(self, turn: Turn) -> None:
        pass

    async def reply(self, answered: _Answered, pending: AgentRequest, turn: Turn) -> Reply | None:
        changed = _changed(answered.pending.request, pending.request)
        found, earlier = self._relation(answered, pending, turn, changed)
        first = found.new if earlier is None else earlier.first_new
        if await self._run.refuses(pending, pending.messages[first:], opening=not first):
            return None
        return replace(self._reply(answered, pending, turn, found, earlier), **changed)

    def _relation(
        self, answered: _Answered, pending: AgentRequest, turn: Turn, changed: Mapping[str, Any]
    ) -> tuple[Continuation, EarlierHistory | None]:
        """How a request continues the conversation, and the earlier history that it returns to."""
        request, held = pending.request, [*answered.pending.request.conversation, answered.message]
        found = continuation(held, request.conversation, turn.text, begun=answered.begun, prefill=request.prefill)
        if changed and found.relation is not Relation.FORKED:
            # the session renders the history again, because the tools and the arguments of the template decide about the prompt
            reason = "the tools differ" if "tools" in changed else "the arguments of the chat template differ"
            found = Continuation(relation=Relation.FORKED, reason=reason)
        earlier = None
        if found.relation is Relation.FORKED:
            earlier = self._histories.find(request.conversation, request.tools, request.chat_template_kwargs)
        if earlier is not None:
            found = replace(found, relation=Relation.RETURNED, reason=f"it continues the history {earlier.index}")
        return found, earlier

    def _reply(
        self,
        answered: _Answered,
        pending: AgentRequest,
        turn: Turn,
        found: Continuation,
        earlier: EarlierHistory | None,
    ) -> Reply:
        """The reply that leads from the answered request to the next one."""
        before, request = answered.pending.request, pending.request
        if not found.new:
            held = [*before.conversation, answered.message]
            asked = LiveHistory(held, before.tools, before.chat_template_kwargs, turn.text, answered.begun)
            self._histories.replace(asked, None if earlier is None else earlier.index)
        reply = Reply(
            info=_info({**answered.info, **_recorded(found.relation, found.reason)}),
            metrics=answered.metrics(found.relation),
        )
        if found.resume is not None:
            return replace(reply, resume=found.resume)
        reply = replace(reply, prefill=request.prefill)
        if not found.new:
            return replace(reply, rewrite=pending.messages, returns_to=earlier)
        return replace(reply, messages=pending.messages[found.new :], edit=found.edit)


def _changed(before: ChatRequest, now: ChatRequest) -> dict[str, Any]:
    """What of a request decides about the prompt besides its messages, and differs from the request before: fields of a reply."""
    changed: dict[str, Any] = {}
    if list(now.tools) != list(before.tools):
        changed["tools"] = now.tools
    if now.chat_template_kwargs != before.chat_template_kwargs:
        changed["chat_template_kwargs"] = now.chat_template_kwargs
    return changed


_MOST_TEXTS, _MOST_CHARACTERS = 64, 1 << 24
"""Prompts that are compared with a text: how many at most, and how long all of them together."""


@dataclass(frozen=True, slots=True)
class _Continued:
    """A prompt that was answered: its text, its tokens, and the tokens of the answer."""

    text: str
    prompt: Sequence[int]
    sampled: Sequence[int]


class _ByTexts:
    """The agent writes its prompts itself, as texts or as token ids."""

    def __init__(self, run: _AgentRun) -> None:
        self._run = run
        self._histories = TokenHistories(self._describe)
        self._continued: collections.deque[_Continued] = collections.deque(maxlen=_MOST_TEXTS)
        """The last prompts that were answered; the latest one always."""
        self._text, self._prompt = "", list[int]()
        """The prompt that is being answered."""

    async def opening(self, pending: AgentRequest) -> Opening | None:
        if (prompt := await self._encoded(pending)) is None:
            return None
        return Opening(messages=self._histories.begin(prompt).messages, prompt_ids=prompt)

    def add_turn(self, turn: Turn) -> None:
        assert turn.completion is not None, "a prompt of tokens was answered without tokens"
        self._histories.add_turn(turn)
        self._continued.append(_Continued(self._text, self._prompt, turn.completion.token_ids))
        while len(self._continued) > 1 and sum(len(one.text) for one in self._continued) > _MOST_CHARACTERS:
            self._continued.popleft()

    async def reply(self, answered: _Answered, pending: AgentRequest, turn: Turn) -> Reply | None:
        if (prompt := await self._encoded(pending)) is None:
            return None
        reply, relation = self._histories.reply(prompt)
        info = _info({**answered.info, **_recorded(relation, "")})
        return replace(reply, info=info, metrics=answered.metrics(relation))

    async def _encoded(self, pending: AgentRequest) -> list[int] | None:
        """The tokens of a request's prompt; None if it was refused."""
        given, prompts = pending.request.prompt, self._run.prompts
        assert given is not None

        def encode() -> tuple[str, list[int]]:
            with boundary("tokens"):
                if prompts is None:
                    raise AgentError("the model's tokenizer is not known here: use /v1/chat/completions")
                if isinstance(given, str):
                    return given, self._behind_sampled(given, prompts)
                return prompts.decode(given), list(given)

        try:
            self._text, self._prompt = await off_loop(encode, long=len(given) > _SHORT_TEXT)
        except Failed as failed:
            self._run.conversation.refuse(pending, Refused(400, failed.failure.message, parameter="prompt"))
            return None
        return self._prompt

    def _behind_sampled(self, text: str, prompts: ModelPrompts) -> list[int]:
        """The tokens of a text. Where it repeats an earlier prompt and the beginning of its answer, they are those that were
        sampled, and only the rest is encoded."""
        known = [one for one in self._continued if text.startswith(one.text)]
        if not known:
            return list(prompts.encode(text, None))
        last = max(known, key=lambda one: len(one.text))
        rest = text[len(last.text) :]
        count, kept = prompts.token_prefix(last.sampled, rest)
        tokens = [*last.prompt, *last.sampled[:count]]
        return [*tokens, *prompts.encode(rest[len(kept) :], tokens[-1])] if len(kept) < len(rest) else tokens

    def _describe(self, tokens: Sequence[int], after: Message | None) -> ContextText:
        assert self._run.prompts is not None
        return ContextText(messages=[{"role": "user", "content": self._run.prompts.decode(tokens)}])


def _info(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is recorded with a turn."""
    return {_KEY: dict(values)} if values else {}


def _recorded(relation: Relation, reason: str) -> dict[str, Any]:
    """What is recorded of the next request; nothing if it only goes on."""
    if relation is Relation.EXTENDED:
        return {}
    return {"next_request": relation.value, **({"reason": reason} if reason else {})}


class _AgentRun:
    """A running agent and its requests."""

    def __init__(self, agent: Agent, row: Row, proxy: Proxy | None, prompts: ModelPrompts | None) -> None:
        text = _row_json(row)
        self.conversation = AgentConversation(text, check_size=self._check_size, count=self._count_tokens)
        self.prompts = prompts
        self.last_turn: Turn | None = None
        """The last turn that the agent received."""
        self._row = row
        self._proxy = proxy
        self._pending: AgentRequest | None = None
        self._one_count = asyncio.Lock()
        """Held while tokens are counted: all conversations share the threads in which long texts are read."""
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

    async def refuses(self, pending: AgentRequest, messages: Sequence[Message], *, opening: bool) -> bool:
        """Whether a request was answered with an error, because the model cannot receive these messages of it, or not answer in
        the form that it asks for."""
        if (prompts := self.prompts) is None:
            return False
        request, arguments = pending.request, self._arguments(pending.request)

        def check_form() -> None:
            prompts.check_turn(request.tools, request.sampling, prefill=request.prefill, arguments=arguments)

        def check_messages() -> None:
            prompts.check_messages(messages, request.tools, opening=opening, arguments=arguments)

        long = _is_long(messages, request.tools)
        for check, parameter in ((check_messages, "messages"), (check_form, request.form or "messages")):
            try:
                with boundary("tokens"):
                    await off_loop(check, long=long)
            except Failed as failed:
                message = (
                    failed.failure.message if check is check_messages else f"`{parameter}`: {failed.failure.message}"
                )
                self.conversation.refuse(pending, Refused(400, message, parameter=parameter))
                return True
        return False

    def refuses_other_api(self, pending: AgentRequest, answered: _Answered) -> bool:
        """Whether a request was answered with an error, because it has a prompt where those before had messages, or the other way
        round."""
        if (pending.request.prompt is None) is (answered.pending.request.prompt is None):
            return False
        message = "the requests of a conversation are all those of /v1/completions, or none: its prompts are written in one way"
        self.conversation.refuse(pending, Refused(400, message))
        return True

    def _check_size(self, request: ChatRequest) -> None:
        """Refuse a request that is too long for any prompt of the model. Raises Refused."""
        if self.prompts is None:
            return
        try:
            with boundary("tokens"):
                self.prompts.check_size(request.messages, request.tools, request.prompt or "")
        except Failed as failed:
            raise Refused(400, failed.failure.message, parameter="messages" if request.messages else "prompt") from None

    async def _count_tokens(self, request: ChatRequest) -> int:
        """The tokens of a request's prompt. Raises Refused."""
        if (prompts := self.prompts) is None:
            raise Refused(400, "tokens cannot be counted here, because the model's tokenizer is not known")

        def count() -> int:
            messages = template_messages(request.conversation)
            return prompts.count_tokens(
                messages, request.tools, prefill=request.prefill, arguments=self._arguments(request)
            )

        try:
            with boundary("tokens"):
                async with self._one_count:
                    return await off_loop(count, long=_is_long(request.messages, request.tools))
        except Failed as failed:
            raise Refused(400, failed.failure.message, parameter="messages") from None

    def _arguments(self, request: ChatRequest) -> dict[str, Any]:
        """The further arguments of the chat template for a request."""
        return {**self._row.chat_template_kwargs, **request.chat_template_kwargs}

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
        begun, stop = pending.request.prefill, pending.request.sampling.stop
        if pending.request.prompt is None:
            message = answer_message(turn, stop, begun)
        else:
            message = {"role": "assistant", "content": before_stop(turn.text, stop)}
        answer = AgentAnswer(
            id=uuid.uuid4().hex,
            created=int(time.time()),
            model=pending.request.model,
            message=message,
            prompt_tokens=turn.prompt_tokens,
            completion_tokens=0 if turn.completion is None else len(turn.completion.token_ids),
            cut=turn.finish_reason == "length",
        )
        self.conversation.answer(pending, answer, turn.index)
        return _Answered(pending=pending, message={**message, "content": begun + str(message["content"])})

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


def _is_long(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> bool:
    """Whether messages and tools take time to be checked: long texts, and images."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    with_media = any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts)
    return with_media or len(str(messages)) + len(str(tools)) > _SHORT_TEXT


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
