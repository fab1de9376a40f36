"""The interface of an environment: the part of a conversation that answers the model. What it may be, and what it may answer.

An environment sees messages, never tokens. It is made for one row, used for one conversation and closed after it, so its state
is its attributes or local variables. It does not count turns or tokens: `Limits` bounds them. A generator function is an
environment too (`environment`).

`ThreadedEnvironment` runs an environment in an event loop of a daemon thread, where blocking code does not block other
conversations. A call that times out is cancelled; if it does not react, the conversation ends without waiting for it.

Both kinds of session check replies here. Nothing of a reply is applied before all of it is checked; each check raises
TypeError or ValueError with the value, the rule and the fix.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, runtime_checkable

from turnwise.types import (
    EarlierHistory,
    Edit,
    EnvironmentHandle,
    Message,
    Opening,
    Reply,
    Resume,
    Row,
    SamplingChange,
    ToolOutcome,
    ToolSchema,
    Trajectory,
    Turn,
)
from turnwise.user_code.calls import leave_running, wait_for_left
from turnwise.user_code.copies import copy_row, copy_turn
from turnwise.user_code.reward_number import reward_number
from turnwise.user_code.thread_loops import ThreadLoop
from turnwise.user_code.threads import ThreadedObject

if TYPE_CHECKING:
    from turnwise.environments.tools.tool import Tool, Toolbox

# the interface, and generators

P = ParamSpec("P")

_CLEANING_SECONDS = 10.0
"""The time that the `finally` of a generator may take after its conversation was cancelled."""

Generating = AsyncGenerator[Opening | Reply, Turn] | Generator[Opening | Reply, Turn, None]
"""The return types of a generator function that `environment` accepts."""


@runtime_checkable
class Environment(Protocol):
    """Answers the model in one conversation. Single use: `begin` once, `step` after each turn, `close` always."""

    async def begin(self, row: Row) -> Opening:
        """Return the messages before the model's first turn, and the tools that the model may call."""
        ...

    async def step(self, turn: Turn) -> Reply:
        """Return the answer to a turn of the model."""
        ...

    async def close(self) -> None:
        """Release all resources. Called exactly once, also after an error or if `begin` failed."""
        ...


EnvironmentFactory = Callable[[], Environment]
"""Makes a new environment for each conversation: a class without arguments, or a `functools.partial`."""


PutInFront = Callable[["Sequence[Tool | Toolbox]", Environment], Environment]
"""Wraps an environment in `Tools`: the given tools, and the tools of the recipe."""


@runtime_checkable
class EnvironmentSource(Protocol):
    """An object that a recipe can name instead of an environment. It is built once per run and makes the environments."""

    def tools(self) -> Sequence[Tool]:
        """The tools of its environments. They are checked before the run."""
        ...

    def make(self, in_front: PutInFront) -> Environment:
        """A new environment. `in_front(tools, environment)` wraps an environment in these tools and the recipe's tools."""
        ...

    async def aclose(self) -> None:
        """Close the resources that its environments share."""
        ...


@runtime_checkable
class FinalReward(Protocol):
    """An environment with a reward for the complete conversation, also if a limit ended it."""

    async def final_reward(self) -> float | None:
        """Return the reward to add to the last turn, or None for no reward.

        Called once, if a limit ended the conversation and there was no error. An environment that ends the conversation itself
        puts this reward into its last `Reply`.
        """
        ...


@runtime_checkable
class FinalReply(Protocol):
    """An environment that has more to say than a reward when a limit has ended the conversation, or that must see the last
    turn."""

    async def final_reply(self, turn: Turn) -> Reply:
        """Return a last `Reply` to the last turn, in place of `FinalReward.final_reward`: its reward, info, metrics and masks.

        `step` was not called with this turn if the limit cut it (`turn.finish_reason` is `length`). Called once, if a limit ended
        the conversation and there was no error.
        """
        ...


@runtime_checkable
class ProvidesHandle(Protocol):
    """An environment that gives reward functions access to an object after the conversation."""

    def environment_handle(self) -> EnvironmentHandle | None:
        """Return a handle of the object, or None.

        Called before `close`, if the conversation ended without an error; `close` must then not change the object. The
        handle's `release` is called after the reward functions.
        """
        ...


# further agents of an episode


class EpisodeAgent(Protocol):
    """An agent that an environment has opened (`CurrentEpisode.agent`). Its turns are a trajectory of its own."""

    @property
    def trajectory(self) -> Trajectory:
        """The record of its conversation."""
        ...

    async def turn(
        self,
        messages: str | Sequence[Message] = (),
        *,
        reward: float | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> Turn:
        """Append messages to its conversation, a text as one message of a user, and let the model take a turn.

        `reward` is first added to the reward of its turn before, and `info` to the `info` of that turn. With
        tools, the calls are answered and the model goes on until a turn has no call.

        Raises Failed, of the kind `agent`: if its conversation has failed, or has ended because of a limit; if it is taking a
        turn, so that the caller would wait for itself; or if the limits of the episode are reached (`limits.agent_turns`,
        `limits.agent_tokens`).
        """
        ...

    def add_reward(self, value: float) -> None:
        """Add to the reward of its last turn. Raises ValueError if it has taken none, or if the value is not a finite number."""
        ...

    async def close(self) -> None:
        """End its conversation. Rewards can still be added until the conversation of the row has ended."""
        ...

    async def __aenter__(self) -> EpisodeAgent: ...

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None: ...


class CurrentEpisode(Protocol):
    """The conversation of a row, and the agents that its environment has opened."""

    def agent(
        self,
        name: str,
        *,
        messages: Sequence[Message] = (),
        tools: Sequence[Tool | Toolbox | Callable[..., Any] | ToolSchema] = (),
        train: bool | None = None,
        shares_reward: bool = False,
        sampling: SamplingChange | None = None,
        policy: str | None = None,
    ) -> EpisodeAgent:
        """An agent, to be opened with `async with`: the same model in a conversation of its own, which begins with `messages`.

        `name` is the role of the agent: those with the same name in the episodes of a row are one group, whose rewards are
        compared. `tools` are functions and classes, which are called as those of a recipe, or schemas, whose calls the caller
        answers with messages. Its turns are trained on, unless `train` is False. Its reward is what the environment gives it;
        with `shares_reward`, the reward of the row's conversation is added. `policy` is the name of a policy of the recipe
        (`policies`), which takes the turns instead of the trained model; those of a frozen policy are not trained on.

        Raises ValueError for a name that is not allowed, and for a frozen policy with `train=True`; Failed, of the kind `agent`,
        if the episode has `limits.agents`, or the recipe has no such policy.
        """
        ...


_episode: ContextVar[CurrentEpisode | None] = ContextVar("turnwise_episode", default=None)


def current_episode() -> CurrentEpisode:
    """The episode of the running conversation, in which its environment and its tools may open further agents::

        async with current_episode().agent("searcher", messages=instructions) as searcher:
            found = await searcher.turn("When was Oslo founded?")

    Raises RuntimeError outside of a conversation.
    """
    episode = _episode.get()
    if episode is None:
        raise RuntimeError(
            "current_episode() was called outside of a conversation: call it in a method of an environment or in a tool"
        )
    return episode


@contextlib.contextmanager
def in_episode(episode: CurrentEpisode) -> Iterator[None]:
    """Inside, `current_episode` returns this episode."""
    token = _episode.set(episode)
    try:
        yield
    finally:
        _episode.reset(token)


def user_message(
    text: str,
    *,
    reward: float | None = None,
    rewards: Mapping[str, float] | None = None,
    info: Mapping[str, Any] | None = None,
    done: bool = False,
) -> Reply:
    """A `Reply` with one user message. The other arguments are those of `Reply`."""
    return Reply(
        messages=({"role": "user", "content": text},), reward=reward, rewards=rewards or {}, info=info or {}, done=done
    )


class SingleTurn:
    """Ends the conversation after the first turn of the model."""

    async def begin(self, row: Row) -> Opening:
        return Opening(messages=row.messages)

    async def step(self, turn: Turn) -> Reply:
        return Reply(done=True)

    async def close(self) -> None:
        pass


class ModelPrompts(Protocol):
    """What an environment can ask about messages of others, which it has not given to the model yet.

    `arguments` are further arguments of the chat template. All methods raise TurnwiseError. All but `check_size` take time that
    grows with the texts, and may be called from any thread.
    """

    def check_size(self, messages: Sequence[Message], tools: Sequence[ToolSchema], prompt: str | Sequence[int]) -> None:
        """Refuse what is too long for any prompt, before anything is done whose time grows with it. `prompt` is one that the
        environment writes itself."""
        ...

    def check_messages(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, opening: bool, arguments: Mapping[str, Any]
    ) -> None:
        """Refuse messages that can be in no prompt of the model. `opening`: they begin a conversation, or replace its history;
        otherwise they follow a turn of the model."""
        ...

    def check_turn(
        self, tools: Sequence[ToolSchema], change: SamplingChange, *, prefill: str, arguments: Mapping[str, Any]
    ) -> None:
        """Refuse a form of a turn that cannot be sampled here, or that the beginning of the turn, `prefill`, does not have."""
        ...

    def count_tokens(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, prefill: str, arguments: Mapping[str, Any]
    ) -> int:
        """The number of tokens of a prompt that is rendered from these messages, with the beginning of the answer."""
        ...

    def encode(self, text: str, behind: int | None) -> Sequence[int]:
        """The tokens of a prompt that the environment writes itself, or of its continuation behind the token `behind`."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, with control tokens. Refuses numbers that are no tokens."""
        ...

    def token_prefix(self, token_ids: Sequence[int], text: str) -> tuple[int, str]:
        """The most tokens whose text is a prefix of `text`: their number, and their text."""
        ...


class GeneratorEnvironment:
    """An environment made from a generator: each `yield` returns an Opening or Reply, and receives the model's next turn.

    An async generator runs in the event loop. A sync generator runs in threads, so it may block.
    """

    def __init__(self, start: Callable[[Row], Generating], name: str) -> None:
        self._start = start
        self._name = name
        self._generator: _Async | _Sync | None = None

    async def begin(self, row: Row) -> Opening:
        started = self._start(copy_row(row))
        if isinstance(started, AsyncGenerator):
            self._generator = _Async(started)
        else:
            self._generator = _Sync(lambda: self._start(copy_row(row)), started, self._name)
        opening = await self._generator.first()
        if opening is _OVER:
            raise TypeError(f"the environment {self._name!r} ended before its first yield; it must yield an Opening")
        if not isinstance(opening, Opening):
            raise TypeError(
                f"the environment {self._name!r} yielded {type(opening).__name__} first; the first yield must be an "
                f"Opening, for example: turn = yield Opening(messages=row.messages)"
            )
        return opening

    async def step(self, turn: Turn) -> Reply:
        assert self._generator is not None, "step before begin"
        reply = await self._generator.send(turn)
        if reply is _OVER:
            return Reply(done=True)
        if not isinstance(reply, Reply):
            raise TypeError(
                f"the environment {self._name!r} yielded {type(reply).__name__}; after the Opening every yield must be a "
                f'Reply, for example: turn = yield user_message("Try again.")'
            )
        return reply

    async def close(self) -> None:
        if self._generator is not None:
            await self._generator.close()


_OVER = object()
"""Stands for the end of a generator."""


class _Async:
    """An async generator, run in the event loop.

    Its `finally` runs in the step that is cancelled, not in `close`. So a cancelled step is left running, and `close` waits
    for it.
    """

    def __init__(self, generator: AsyncGenerator[Opening | Reply, Turn]) -> None:
        self._generator = generator
        self._step: asyncio.Task[Any] | None = None

    async def first(self) -> Any:
        self._step = leave_running()
        return await anext(self._generator, _OVER)

    async def send(self, turn: Turn) -> Any:
        self._step = leave_running()
        try:
            return await self._generator.asend(turn)
        except StopAsyncIteration:
            return _OVER

    async def close(self) -> None:
        step = self._step
        if step is not None and step is not asyncio.current_task() and not step.done():
            await wait_for_left(step, _CLEANING_SECONDS)
        await self._generator.aclose()


class _Sync:
    """A sync generator, run in threads."""

    def __init__(self, start: Callable[[], Any], generator: Any, name: str) -> None:
        self._start = start
        self._generator = generator
        self._begun = False
        self._turns: list[Turn] = []
        self._foreign = ThreadedObject(lambda: None, lambda _: self._generator.close(), name=name)

    async def first(self) -> Any:
        await self._foreign.make()
        opening = await self._ask(lambda: next(self._generator, _OVER))
        self._begun = True
        return opening

    async def send(self, turn: Turn) -> Any:
        def send() -> Any:
            try:
                return self._generator.send(copy_turn(turn))
            except StopIteration:
                return _OVER

        reply = await self._ask(send)
        self._turns.append(turn)
        return reply

    async def _ask(self, ask: Callable[[], Any]) -> Any:
        stopped = False

        def once() -> Any:
            nonlocal stopped
            if stopped:
                self._start_again()
            stopped = True
            return ask()

        return await self._foreign.ask(once)

    def _start_again(self) -> None:
        """Run a new generator up to the point where the last one was stopped.

        A generator is stopped in a thread if its code needs the main thread. A stopped generator cannot continue.
        """
        self._generator = self._start()
        if self._begun:
            next(self._generator)
        for turn in self._turns:
            self._generator.send(copy_turn(turn))

    async def close(self) -> None:
        await self._foreign.close()


def environment(
    function: Callable[Concatenate[Row, P], Generating],
) -> Callable[P, GeneratorEnvironment]:
    """Make an environment from a generator function, sync or async.

    Returning ends the conversation. Code in `finally:` runs at the end of every conversation.

    Example, a user who asks one question::

        @environment
        async def sure(row):
            turn = yield Opening(messages=row.messages)
            turn = yield user_message("Are you sure?")
            yield Reply(reward=float("yes" in turn.text), done=True)

        make_environment = sure        # parameters after `row` become those of the factory

    A function without `async` may block: it runs in threads, not in the event loop.
    """

    if not (inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function)):
        raise TypeError(f"{function.__name__!r} is not a generator function; it must contain yield")

    @functools.wraps(function)
    def factory(*args: P.args, **kwargs: P.kwargs) -> GeneratorEnvironment:
        return GeneratorEnvironment(lambda row: function(row, *args, **kwargs), function.__name__)

    signature = inspect.signature(function)
    _, *parameters = signature.parameters.values()
    # the recipe's arguments are checked against this signature; the rollout loop passes the row later
    setattr(factory, "__signature__", signature.replace(parameters=parameters))  # noqa: B010
    return factory


# an environment in a thread


@runtime_checkable
class SharesObject(Protocol):
    """An environment that may share an object of the user with those of other conversations."""

    shares: bool
    """Whether it does: the object must then stay in one event loop."""


class ThreadedEnvironment:
    """Runs another environment in the event loop of a separate thread, so that its `async` methods may block.

    The other environment is also made in that thread, when the conversation begins.
    """

    def __init__(self, make: Callable[[], Environment], *, name: str = "environment") -> None:
        self._make = make
        self._name = name
        self._thread: ThreadLoop | None = None
        self._environment: Environment | None = None

    async def begin(self, row: Row) -> Opening:
        self._thread = ThreadLoop(self._name)

        async def begin() -> Opening:
            self._environment = self._make()
            return await self._environment.begin(row)

        return await self._thread.run(begin, kind="environment")

    async def step(self, turn: Turn) -> Reply:
        assert self._thread is not None, "step before begin"
        return await self._thread.run(lambda: self._begun_environment.step(turn), kind="environment")

    async def final_reply(self, turn: Turn) -> Reply:
        inner = self._environment
        if self._thread is None or not isinstance(inner, FinalReply):
            return Reply(done=True, reward=await self.final_reward())
        return await self._thread.run(lambda: inner.final_reply(turn), kind="environment")

    async def final_reward(self) -> float | None:
        if self._thread is None or not isinstance(self._environment, FinalReward):
            return None
        return await self._thread.run(self._environment.final_reward, kind="environment")

    def environment_handle(self) -> EnvironmentHandle | None:
        inner = self._environment
        return inner.environment_handle() if isinstance(inner, ProvidesHandle) else None

    async def close(self) -> None:
        if self._thread is None:
            return

        async def close() -> None:
            if self._environment is not None:
                await self._environment.close()

        try:
            await self._thread.run(close, kind="environment")
        finally:
            self._thread.stop(wait=False)

    @property
    def _begun_environment(self) -> Environment:
        assert self._environment is not None, "step before begin"
        return self._environment


# the check of replies


def annotate_turns(trajectory: Trajectory, turn: Turn, reply: Reply, *, source: str = "environment") -> None:
    """Check a reply to `turn`, the last turn, and write what it says of the turns: reward (as a part with the name `source`),
    info, outcomes, `observed`, `train_on`, and its metrics.

    Raises TypeError or ValueError, with nothing written.
    """
    check_reply(reply, turn, trajectory.turns)
    parts = {name: reward_number(value, f"Reply(rewards=...), {name}") for name, value in reply.rewards.items()}
    earlier = {
        index: reward_number(value, f"Reply(earlier_rewards=...), turn {index}")
        for index, value in reply.earlier_rewards.items()
    }
    if reply.reward is not None:
        turn.add_reward(reward_number(reply.reward, "Reply(reward=...)"), source)
    for name, value in parts.items():
        turn.add_reward(value, name)
    for index, value in earlier.items():
        trajectory.turns[index].add_reward(value, source)
    turn.observed = reply.observation or (turn.observed and source == "final_reward")
    turn.info.update(reply.info)
    turn.outcomes = tuple(reply.outcomes) or turn.outcomes
    for name, value in reply.metrics.items():
        trajectory.metrics[name] = trajectory.metrics.get(name, 0.0) + value
    for index in reply.train_on:
        trajectory.turns[index].train_on = True


def presentable(turn: Turn, messages: Sequence[Message], present: Callable[[Message], Message]) -> list[Message]:
    """The messages of a reply, with those of tools in the form that the model can receive (`present`).

    An image that the model cannot receive becomes an error text. The call's outcome then says so too.
    """
    presented = [present(message) if message["role"] == "tool" else message for message in messages]
    errors = {
        str(new.get("tool_call_id")): str(new["content"])
        for old, new in zip(messages, presented, strict=True)
        if isinstance(old.get("content"), list | tuple) and isinstance(new["content"], str)
    }
    turn.outcomes = tuple(
        replace(outcome, content=errors[outcome.id], error="raised") if outcome.id in errors else outcome
        for outcome in turn.outcomes
    )
    return presented


def check_opening(opening: Opening) -> None:
    """Raises TypeError or ValueError."""
    if not opening.messages:
        raise ValueError("the environment's Opening has no messages; there is nothing to answer")
    _check_messages(opening.messages)
    _check_prefill(opening.prefill, "Opening")
    if opening.prompt_ids is not None:
        _check_prompt(opening.prompt_ids, "Opening")
        if opening.prefill:
            raise ValueError("Opening(prefill=..., prompt_ids=...): the prompt has the beginning of the turn already")
    if opening.sampling is not None:
        _check_sampling(opening.sampling, "Opening")
    if opening.chat_template_kwargs is not None:
        _check_template_arguments(opening.chat_template_kwargs, "Opening")


def check_reply(reply: Reply, turn: Turn, turns: Sequence[Turn]) -> None:
    """Check a reply to `turn`, the last of `turns`. Raises TypeError or ValueError."""
    if not isinstance(reply, Reply):
        raise TypeError(f"the environment answered with a {type(reply).__name__}; step must return a Reply")
    for messages in (reply.rewrite or (), reply.messages):
        _check_messages(messages)
    _check_types(reply)
    if reply.done:
        _check_done(reply)
    if reply.resume is not None:
        _check_resume(reply, reply.resume, turn)
    if reply.edit is not None:
        _check_edit(reply, reply.edit, turn)
    if reply.returns_to is not None:
        _check_return(reply, reply.returns_to)
    for index, positions in reply.masked.items():
        _check_masked(index, positions, turns)
    for name, indexes in {"train_on": reply.train_on, "earlier_rewards": reply.earlier_rewards}.items():
        for index in indexes:
            if index not in range(len(turns)):
                raise ValueError(f"Reply({name}=[{index}]): {_no_turn(index, turns)}")


def _check_types(reply: Reply) -> None:
    if not isinstance(reply.info, Mapping):
        raise TypeError(f"Reply(info={reply.info!r:.80}): info must be a dictionary")
    if not isinstance(reply.rewards, Mapping) or not all(isinstance(name, str) for name in reply.rewards):
        raise TypeError(f"Reply(rewards={reply.rewards!r:.80}): rewards must be a dictionary of numbers by name")
    _check_prefill(reply.prefill, "Reply")
    if not isinstance(reply.masked, Mapping):
        raise TypeError(f"Reply(masked={reply.masked!r:.80}): masked must be a dictionary of token positions by turn")
    for outcome in reply.outcomes:
        if not isinstance(outcome, ToolOutcome):
            raise TypeError(f"Reply(outcomes=...): one of them is {outcome!r:.80}; each must be a ToolOutcome")
    if reply.resume is not None and not (isinstance(reply.resume, Resume) and isinstance(reply.resume.add, str)):
        raise TypeError(f"Reply(resume={reply.resume!r:.80}): give Resume(keep=..., add='...')")
    if reply.resume is not None and (problem := _half_character(reply.resume.add)) is not None:
        raise ValueError(f"Resume(add=...) cannot be encoded: {problem}")
    if not isinstance(reply.metrics, Mapping):
        raise TypeError(f"Reply(metrics={reply.metrics!r:.80}): metrics must be a dictionary of numbers")
    for name, value in reply.metrics.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not isinstance(name, str) or not number:
            raise TypeError(
                f"Reply(metrics={{{name!r:.80}: {value!r:.80}}}): the name must be a text and the value a finite number"
            )
    if reply.tools is not None:
        _check_tools(reply.tools)
    if reply.sampling is not None:
        _check_sampling(reply.sampling, "Reply")
    if reply.prompt_ids is not None:
        _check_prompt(reply.prompt_ids, "Reply")
    if reply.chat_template_kwargs is not None:
        _check_template_arguments(reply.chat_template_kwargs, "Reply")


def _check_prefill(prefill: str, where: str) -> None:
    if not isinstance(prefill, str):
        raise TypeError(f"{where}(prefill={prefill!r:.80}): prefill must be a text")
    if (problem := _half_character(prefill)) is not None:
        raise ValueError(f"{where}(prefill=...) cannot be encoded: {problem}")


def _check_done(reply: Reply) -> None:
    """A last reply has nothing that only a following turn could use."""
    if reply.prefill:
        raise ValueError(
            f"Reply(prefill={reply.prefill!r:.80}, done=True): there is no following turn; leave one of them out"
        )
    if reply.sampling is not None:
        raise ValueError("Reply(sampling=..., done=True): there is no following turn; leave one of them out")
    if reply.tools is not None:
        raise ValueError("Reply(tools=..., done=True): there is no following turn; leave one of them out")
    if reply.prompt_ids is not None:
        raise ValueError("Reply(prompt_ids=..., done=True): there is no following turn; leave one of them out")
    if reply.chat_template_kwargs is not None:
        raise ValueError(
            "Reply(chat_template_kwargs=..., done=True): there is no following turn; leave one of them out"
        )


def _check_resume(reply: Reply, resume: Resume, turn: Turn) -> None:
    """A resumed turn continues in its segment, so nothing may come before its next token but the text of the resume."""
    if reply.messages or reply.done or reply.prefill or reply.rewrite is not None:
        raise ValueError(
            "a Reply with `resume` continues the model's turn, so it has no messages, no rewrite and no prefill, and is not done"
        )
    if reply.tools is not None:
        raise ValueError(
            "Reply(resume=..., tools=...): the prompt of the resumed turn already lists the present tools; change the tools in "
            "the reply to the complete turn"
        )
    if reply.prompt_ids is not None:
        raise ValueError(
            "Reply(resume=..., prompt_ids=...): the prompt says already what is kept of the turn; remove resume"
        )
    if reply.chat_template_kwargs is not None:
        raise ValueError(
            "Reply(resume=..., chat_template_kwargs=...): the prompt of the resumed turn is rendered already; change the "
            "arguments in the reply to the complete turn"
        )
    keep = resume.keep
    if keep is not None and not 0 <= keep <= len(turn.text):
        raise ValueError(
            f"Resume(keep={keep}) of an answer of {len(turn.text)} characters; keep 0 to {len(turn.text)} of it"
        )


def _check_edit(reply: Reply, edit: Edit, turn: Turn) -> None:
    """An edited turn stays in its segment, and new messages follow it."""
    if not isinstance(edit, Edit) or not isinstance(edit.add, str):
        raise TypeError(f"Reply(edit={edit!r:.80}): give Edit(keep=..., add='...')")
    if reply.rewrite is not None or reply.resume is not None or reply.done:
        raise ValueError(
            "a Reply with `edit` changes the last turn, and the conversation continues behind that turn: it has no rewrite and "
            "no resume, and is not done"
        )
    if reply.prompt_ids is not None:
        raise ValueError(
            "Reply(edit=..., prompt_ids=...): the prompt says already what is kept of the turn; remove edit"
        )
    if not isinstance(edit.keep, int) or isinstance(edit.keep, bool) or not 0 <= edit.keep <= len(turn.text):
        raise ValueError(
            f"Edit(keep={edit.keep!r:.80}) of an answer of {len(turn.text)} characters; keep 0 to {len(turn.text)} of it"
        )


def _check_return(reply: Reply, returns_to: EarlierHistory) -> None:
    """A return names a part of the rewritten history."""
    if not isinstance(returns_to, EarlierHistory):
        raise TypeError(f"Reply(returns_to={returns_to!r:.80}): give EarlierHistory(index=..., first_new=...)")
    # a prompt of tokens may continue the history directly after the model's turn, with no new message
    most = len(reply.rewrite or ()) + (reply.prompt_ids is not None)
    if reply.rewrite is None or not 0 < returns_to.first_new < most:
        raise ValueError(
            f"Reply(returns_to={returns_to!r:.80}): `rewrite` must have the complete history, with new messages from first_new on"
        )


def _check_sampling(change: SamplingChange, where: str) -> None:
    if not isinstance(change, SamplingChange):
        raise TypeError(f"{where}(sampling={change!r:.80}): give SamplingChange(max_tokens=..., stop=[...])")
    most, stop = change.max_tokens, change.stop
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise ValueError(
            f"SamplingChange(max_tokens={most!r:.80}): max_tokens must be an integer of at least 1; None is the recipe's limit"
        )
    if change.answers_cut and most is None:
        raise ValueError(
            "SamplingChange(answers_cut=True) has no effect without max_tokens: a turn that limits.tokens_per_turn cuts ends the "
            "conversation. Give max_tokens, smaller than limits.tokens_per_turn"
        )
    if stop is not None and not (
        isinstance(stop, list | tuple) and all(isinstance(text, str) and text for text in stop)
    ):
        raise ValueError(f"SamplingChange(stop={stop!r:.80}): stop must be a list of texts that are not empty")
    if not _are_token_ids(change.stop_token_ids):
        raise ValueError(f"SamplingChange(stop_token_ids={change.stop_token_ids!r:.80}): give a list of token ids")
    if (names := change.tool_names) is not None and not (names and all(isinstance(name, str) for name in names)):
        raise ValueError(f"SamplingChange(tool_names={names!r:.80}): give a list of names of tools, at least one")


def _check_prompt(prompt: Sequence[int], where: str) -> None:
    if not prompt or not _are_token_ids(prompt):
        raise ValueError(f"{where}(prompt_ids={prompt!r:.80}): give a list of token ids, at least one")


def _are_token_ids(values: object) -> bool:
    return isinstance(values, list | tuple) and all(
        isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values
    )


def _check_template_arguments(arguments: Mapping[str, Any], where: str) -> None:
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise TypeError(
            f"{where}(chat_template_kwargs={arguments!r:.80}): give a dictionary of the template's arguments, such as "
            f"{{'enable_thinking': False}}"
        )


def _check_tools(tools: Sequence[ToolSchema]) -> None:
    if not isinstance(tools, list | tuple):
        raise TypeError(f"Reply(tools={tools!r:.80}): tools must be a list of schemas; an empty list offers no tool")
    names: list[str] = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"Reply(tools=...): one of them is {tool!r:.80}; each must be a schema in the OpenAI format: "
                f"{{'type': 'function', 'function': {{'name': ..., 'description': ..., 'parameters': ...}}}}"
            )
        if name in names:
            raise ValueError(f"Reply(tools=...): two tools have the name {name!r}; the names must differ")
        if (problem := _half_character(tool)) is not None:
            raise ValueError(f"the schema of the tool {name!r} cannot be encoded: {problem}")
        names.append(name)


def _check_masked(index: int, positions: Collection[int], turns: Sequence[Turn]) -> None:
    if index not in range(len(turns)):
        raise ValueError(f"Reply(masked={{{index}: ...}}): {_no_turn(index, turns)}")
    completion = turns[index].completion
    count = 0 if completion is None else len(completion.token_ids)
    if wrong := [position for position in positions if position not in range(count)]:
        raise ValueError(
            f"Reply(masked={{{index}: {wrong[:3]}}}): turn {index} sampled {count} tokens, 0 to {count - 1}"
        )


def _no_turn(index: int, turns: Sequence[Turn]) -> str:
    return f"there is no turn {index}; the turns are 0 to {len(turns) - 1}"


def _check_messages(messages: Sequence[Message]) -> None:
    if isinstance(messages, Iterator):  # it could be read only once
        raise TypeError(f"messages must be a list; got a {type(messages).__name__}: put list(...) around it")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TypeError(
                f"messages must be a list of {{'role': ..., 'content': ...}}; one of them is {message!r:.80}"
            )
        if (problem := _half_character(message)) is not None:
            raise ValueError(f"a message with the role {message['role']!r} cannot be encoded: {problem}")


def _half_character(value: Any) -> str | None:
    """`half_character`, which is imported where a value is checked: `import turnwise` for an environment needs no YAML."""
    from turnwise.json_yaml import half_character

    return half_character(value)
