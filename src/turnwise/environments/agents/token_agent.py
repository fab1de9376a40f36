"""The environment of an agent that calls the model with token ids: each call is one turn of the rollout loop.

Programs of this kind write their prompts themselves, and return the tokens of their trajectory at the end. The session appends
what the model sampled, as always. `TokenHistories` holds the conversation as the agent sees it, the tokens of each prompt and
of each answer: a request extends it, leaves out the end of the last answer, returns to an earlier history, or begins another
one.

What the agent returns is compared with what was sampled: tokens that it leaves out are not trained on, and tokens that the
model did not sample are refused. This module knows token ids and no chat template.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from turnwise.environments.agents.environment import AgentError, Relation
from turnwise.environments.agents.requests import log_forced
from turnwise.errors import Failed, boundary
from turnwise.types import EarlierHistory, Message, Opening, Reply, Row, SamplingChange, ToolSchema, Turn, common_length
from turnwise.user_code.calls import own_context, spawn

# how a prompt continues the conversation

_TOLERANCE = 1e-3
"""The difference of two log-probabilities that rounding explains: agents keep them in float32 or as text."""
_MOST_LIVE = 64
"""Histories that are compared with a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextText:
    """What tokens that the model did not sample say, for the record."""

    messages: Sequence[Message]
    tools: Sequence[ToolSchema] | None = None
    """The tools that the prompt offers; None if the tokens say nothing of tools."""


Describe = Callable[[Sequence[int], Message | None], ContextText]
"""Describes the tokens of a prompt after a message of the model (None: from the beginning)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnedSequence:
    """A trajectory as an agent returned it.

    Example: `prompt_ids=P0 P0, response_ids=A0 A0 E0 A1, mask=1 1 0 1`.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    mask: Sequence[int]
    """1 for each token of the response that is trained on."""
    logprobs: Sequence[float] | None = None
    """Of the tokens of the response; 0 where the model did not sample. None if the agent returned none."""

    def __post_init__(self) -> None:
        lengths = {
            len(self.response_ids),
            len(self.mask),
            len(self.response_ids if self.logprobs is None else self.logprobs),
        }
        if len(lengths) > 1:
            raise ValueError(
                f"the agent returned {len(self.response_ids)} response ids, a mask of {len(self.mask)} and "
                f"{'no' if self.logprobs is None else len(self.logprobs)} log-probabilities: they must have the same length"
            )


@dataclass(slots=True)
class _History:
    """One unbroken sequence of tokens. The columns have equal length."""

    tokens: list[int] = field(default_factory=list)
    sampled: list[tuple[int, int] | None] = field(default_factory=list)
    """The turn and the position in it of each token that the model sampled; None for context."""
    logprobs: list[float] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    last_turn: int = 0
    """Where the tokens of the last turn begin."""

    def append_context(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)
        self.sampled.extend([None] * len(tokens))
        self.logprobs.extend([0.0] * len(tokens))

    def cut(self, length: int) -> None:
        for column in (self.tokens, self.sampled, self.logprobs):
            del column[length:]


class TokenHistories:
    """The histories of one conversation: the present one, and those that a request may return to."""

    def __init__(self, describe: Describe) -> None:
        self._describe = describe
        self._current = _History()
        self._live: dict[int, _History] = {}
        """Earlier histories by their index in `Trajectory.previous_histories`; the latest last."""
        self._ended: list[_History] = []
        """Histories that cannot be continued any more."""
        self._replaced = 0
        self._tools: Sequence[ToolSchema] = ()

    @property
    def all(self) -> list[_History]:
        """All histories of the conversation."""
        return [*self._ended, *self._live.values(), self._current]

    def begin(self, prompt: Sequence[int]) -> ContextText:
        """Take the first prompt."""
        text = self._describe(prompt, None)
        self._current.append_context(prompt)
        self._current.messages = list(text.messages)
        self._tools = text.tools or ()
        return ContextText(messages=text.messages, tools=self._tools)

    def add_turn(self, turn: Turn) -> None:
        """Take a turn of the model."""
        assert turn.completion is not None
        ids, history = turn.completion.token_ids, self._current
        history.last_turn = len(history.tokens)
        history.tokens.extend(ids)
        history.sampled.extend((turn.index, position) for position in range(len(ids)))
        history.logprobs.extend(turn.completion.logprobs)
        history.messages.append(dict(turn.message))

    def reply(self, prompt: Sequence[int]) -> tuple[Reply, Relation]:
        """The reply to the last turn that leads to the request with this prompt, and the relation of the two."""
        current = self._current
        common = common_length(current.tokens, prompt)
        last = len(current.tokens) - current.last_turn
        if common == len(current.tokens):
            return self._extended(prompt, Relation.EXTENDED)
        if common < len(prompt) and 2 * (common - current.last_turn) >= last and common > current.last_turn:
            current.cut(common)
            return self._extended(prompt, Relation.REALIGNED)
        earlier = next(
            (n for n, live in reversed(self._live.items()) if common_length(live.tokens, prompt) == len(live.tokens)),
            None,
        )
        self._live[self._replaced] = current
        self._replaced += 1
        if earlier is not None:
            self._current = self._live.pop(earlier)
            first_new = len(self._current.messages)
            reply, _ = self._extended(prompt, Relation.RETURNED)
            return (
                Reply(
                    rewrite=list(self._current.messages),
                    returns_to=EarlierHistory(index=earlier, first_new=first_new),
                    tools=reply.tools,
                    prompt_ids=reply.prompt_ids,
                ),
                Relation.RETURNED,
            )
        while len(self._live) > _MOST_LIVE:
            self._ended.append(self._live.pop(next(iter(self._live))))
        self._current, before = _History(), self._tools
        text = self.begin(prompt)
        tools = None if list(before) == list(self._tools) else self._tools
        return Reply(rewrite=list(text.messages), tools=tools, prompt_ids=list(prompt)), Relation.FORKED

    def _extended(self, prompt: Sequence[int], relation: Relation) -> tuple[Reply, Relation]:
        current = self._current
        new = prompt[len(current.tokens) :]
        text = self._describe(new, current.messages[-1]) if new else ContextText(messages=())
        current.append_context(new)
        current.messages.extend(text.messages)
        changed = text.tools is not None and list(text.tools) != list(self._tools)
        if changed:
            self._tools = text.tools or ()
        reply = Reply(messages=list(text.messages), tools=self._tools if changed else None, prompt_ids=list(prompt))
        return reply, relation


def unreturned_tokens(histories: TokenHistories, returned: Sequence[ReturnedSequence]) -> Mapping[int, list[int]]:
    """The sampled tokens that the agent did not return with the mask 1, as positions by turn: they are not trained on.

    Raises ValueError if a token with the mask 1 was not sampled at that place, or if its log-probability is another one.
    """
    trained: set[tuple[int, int]] = set()
    for one in returned:
        trained |= _trained(histories.all, one)
    left_out: dict[int, list[int]] = {}
    for place in sorted(
        {place for history in histories.all for place in history.sampled if place is not None} - trained
    ):
        left_out.setdefault(place[0], []).append(place[1])
    return left_out


def _trained(histories: Sequence[_History], returned: ReturnedSequence) -> set[tuple[int, int]]:
    tokens, prompt = [*returned.prompt_ids, *returned.response_ids], len(returned.prompt_ids)
    history = max(histories, key=lambda one: common_length(one.tokens, tokens))
    common = common_length(history.tokens, tokens)
    trained: set[tuple[int, int]] = set()
    for index, weight in enumerate(returned.mask):
        if weight not in (0, 1):
            raise ValueError(f"the mask of response token {index} is {weight!r:.40}: it must be 0 or 1")
        if not weight:
            continue
        place = history.sampled[prompt + index] if prompt + index < common else None
        if place is None:
            raise ValueError(
                f"the agent returned the token {tokens[prompt + index]} at position {index} of the response with the mask 1, "
                f"and the "
                f"model did not sample it there: return sampled tokens as they are, and give all other tokens the mask 0"
            )
        if returned.logprobs is not None:
            had, got = history.logprobs[prompt + index], float(returned.logprobs[index])
            if not math.isclose(had, got, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
                raise ValueError(
                    f"the agent returned the log-probability {got:.6g} of token {index} of the response, and the engine gave "
                    f"{had:.6g}: return the log-probabilities as they are, or return none"
                )
        trained.add(place)
    return trained


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
