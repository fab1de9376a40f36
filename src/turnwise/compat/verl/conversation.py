"""Conversations with verl's interactions and tools: one Environment around the user's classes.

`Conversations` reads the files once per run, and makes one `Conversation` per trajectory. The interaction is an environment: one
object serves all conversations, and answers each turn without a tool call. The tools are in the usual tool layer in front of it.
`Conversation` is in front of both: it collects all messages, which verl passes to interactions, and calls `calc_reward` of the
tools."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal
from uuid import uuid4

from turnwise.compat.verl.agent_loops import read_agent_loops
from turnwise.compat.verl.base import (
    AgentData,
    BaseInteraction,
    ConversationResource,
    ToolResponse,
    call,
    defines,
    follow_verl_logging,
    takes,
)
from turnwise.compat.verl.files import read_interactions, read_tools
from turnwise.compat.verl.shipped import Gsm8kInteraction
from turnwise.compat.verl.tool_parser import read_parser, with_parser
from turnwise.compat.verl.tools import ToolInstance, Wanted, read_function_tools, refuse, unanswered_kwargs, wanted
from turnwise.environments.environment import (
    Environment,
    EnvironmentFactory,
    FinalReply,
    FinalReward,
    PutInFront,
    SingleTurn,
)
from turnwise.environments.tools.toolbox import Tool, Tools
from turnwise.errors import ConfigError, Failed, nearest
from turnwise.rollout.context import RolloutContext
from turnwise.types import Failure, Message, Opening, Reply, Row, Turn
from turnwise.user_code.references import resolve
from turnwise.user_code.reward_number import added, reward_number
from turnwise.user_code.thread_loops import OwnLoop, ending, own_loop, refuse_unused_thread

_log = logging.getLogger(__name__)


def choose(interactions: Mapping[str, Any], wanted: Wanted, row: Row) -> tuple[str, Any]:
    """The interaction that a row names, or the only interaction.

    Raises Failed if the name is unknown, or if there are several interactions and the row names none.
    """
    name = wanted.interaction.get("name")
    have = ", ".join(sorted(interactions))
    if name is None:
        if len(interactions) > 1:
            raise refuse(row, f"interaction_kwargs has no name, and there are several interactions: {have}")
        (name,) = interactions
    if name not in interactions:
        raise refuse(row, f"there is no interaction {name!r}{nearest(str(name), interactions)} (there are: {have})")
    return name, interactions[name]


def interaction_keywords(interaction: Any, wanted: Wanted, row: Row) -> dict[str, Any]:
    """The keyword arguments that the interaction receives from the row.

    A `ground_truth` that is not in `interaction_kwargs` is taken from `reward_model`. If the row has it nowhere, a parameter with
    a default value keeps its default, with one warning for the class. Raises Failed if there is no default, or if the interaction
    grades as verl's Gsm8kInteraction does: the conversation could not be graded.
    """
    keywords = dict(wanted.interaction)
    if not takes(interaction.start_interaction, "ground_truth") or keywords.get("ground_truth") is not None:
        return keywords
    if wanted.truth is not None:
        keywords["ground_truth"] = wanted.truth
        return keywords
    kind = type(interaction)
    default = inspect.signature(interaction.start_interaction).parameters["ground_truth"].default
    grades = getattr(kind, "calculate_score", None) is Gsm8kInteraction.calculate_score
    place = "put it into extra_info.interaction_kwargs.ground_truth, or reward_model.ground_truth"
    if grades or default is inspect.Parameter.empty:
        raise refuse(row, f"{kind.__name__} needs the ground truth, and the row has none: {place}")
    keywords.pop("ground_truth", None)
    _tell_of_default(kind, repr(default), place)
    return keywords


@functools.cache
def _tell_of_default(kind: type, default: str, place: str) -> None:
    """Warn once that conversations without a ground truth begin with the default value."""
    _log.warning(
        "%s.start_interaction has the parameter ground_truth, and rows have none, so it is %s in their conversations. If the "
        "interaction grades with it, %s",
        kind.__name__,
        default,
        place,
    )


class Interaction:
    """A user's interaction in one conversation.

    Calls `start_interaction` at the beginning and `generate_response` for each turn. If the class overrides `calculate_score`,
    calls it when the interaction ends the conversation, and when `generate_response` returns no score. Calls
    `finalize_interaction` exactly once if the interaction was started, however the conversation ends.
    """

    def __init__(
        self,
        interaction: Any,
        *,
        id: str,
        keywords: Mapping[str, Any],
        agent_data: AgentData,
        most_answers: int | None = None,
    ) -> None:
        """`agent_data` has the messages up to the current turn. The conversation ends after `most_answers` answers."""
        self._interaction = interaction
        self._kind = type(interaction).__name__
        self._id = id
        self._keywords = keywords
        self._agent_data = agent_data
        self._left = math.inf if most_answers is None else most_answers
        self._lease = ConversationResource(self._start, self._finalize, f"the interaction {self._kind!r}")

    async def begin(self, row: Row) -> Opening:
        self._id = await self._lease.acquire()
        return Opening(messages=row.messages)

    async def step(self, turn: Turn) -> Reply:
        answer = await self._call(
            "generate_response", self._id, [dict(message) for message in self._agent_data.messages], with_row=True
        )
        if not isinstance(answer, tuple | list) or len(answer) != 4:
            raise TypeError(
                f"{self._kind}.generate_response returned {answer!r:.120}; it must return "
                f"(should_terminate_sequence, response_content, current_turn_score, additional_data)"
            )
        over, content, score, more = answer
        if more is not None and not isinstance(more, Mapping):
            raise TypeError(f"{self._kind}.generate_response returned the data {more!r:.80}; it must be a mapping")
        if content is not None and not isinstance(content, str | list):
            raise TypeError(f"{self._kind}.generate_response returned {content!r:.80} for a text")
        info: dict[str, Any] = dict(more or {})
        own = defines(type(self._interaction), "calculate_score", BaseInteraction)
        if own and (over or score is None):
            calculated = await self._call("calculate_score", self._id)
            info["calculate_score"] = calculated
            score = calculated if score is None else score
        if score is not None:
            score = info["turn_score"] = reward_number(score, f"{self._kind}.generate_response")
            self._agent_data.turn_scores.append(score)
        self._left -= 1
        done = bool(over) or self._left <= 0
        silent = done and not content
        return Reply(
            messages=() if silent else ({"role": "user", "content": content or ""},),
            reward=0.0 if score is None else score,
            done=done,
            info=info,
        )

    async def close(self) -> None:
        await self._lease.release()

    async def _start(self) -> str:
        started = await self._call("start_interaction", self._id, with_row=True)
        return self._id if started is None else str(started)

    async def _finalize(self, id: str) -> None:
        await self._call("finalize_interaction", id)

    async def _call(self, method: str, *arguments: Any, with_row: bool = False) -> Any:
        return await call(
            getattr(self._interaction, method),
            *arguments,
            keywords=self._keywords if with_row else {},
            name=f"{self._kind}.{method}",
            kind="environment",
        )


_TOOL_AGENT, _SINGLE_TURN_AGENT = "tool_agent", "single_turn_agent"
"""verl's own agents."""
_METHODS = ("start_interaction", "generate_response", "calculate_score", "finalize_interaction")
_SECONDS = 25.0  # for the release of tools; less than the time that the rollout loop allows for closing


class Conversations:
    """The environment factory for verl's interaction file and tool file; created once per run.

    Example, in a recipe::

        environment:
          use: turnwise.compat.verl:Conversations
          arguments:
            interactions: interaction_config.yaml
            tools: tool_config.yaml

    The column `agent_name` of a row selects what leads the conversation: `tool_agent` (the tools and the interaction),
    `single_turn_agent` (one turn, without tools), or an agent loop of the user.
    """

    def __init__(
        self,
        *,
        interactions: str | None = None,
        tools: str | None = None,
        then: str | EnvironmentFactory | None = None,
        max_user_turns: int | None = None,
        tool_timeout: float = 30.0,
        rewards: Literal["add", "record"] = "add",
        function_tools: str | None = None,
        agent_loops: str | Sequence[str] | None = None,
        default_agent: str | None = None,
        config: str | Mapping[str, Any] | None = None,
        tool_parser: str | None = None,
        thread: bool = False,
    ) -> None:
        """Read the files.

        `function_tools` is a Python file with `@function_tool`. `agent_loops` is verl's `agent_loop_config_path`, a Python file
        with `@register`, or a list of them; `config` has values of verl's configuration for the loops: a mapping or a YAML file.
        `tool_parser` is a class that derives from verl's `ToolParser`, and reads the tool calls of all turns in place of
        `tool_format`. `default_agent` leads the conversations of rows without `agent_name`: `tool_agent` if it is not set.

        `then` is an environment of turnwise behind the tools, instead of an interaction; a text is a reference. The
        conversation ends after `max_user_turns` answers of the interaction. `tool_timeout` is the time limit of a call in
        seconds, unless a tool's own `timeout` is longer. `rewards` is `add` or `record`: `add` adds the rewards of tools and
        interactions to the turns' rewards; `record` only records them, so that the reward functions alone are the objective,
        as in verl's trainer. `thread` runs the `async` methods of interactions and tools in an event loop of the conversation's
        own, in a thread, so that they may block; agent loops are not affected. Raises ConfigError.
        """
        if interactions is None and tools is None and function_tools is None and agent_loops is None:
            raise ConfigError("set interactions, tools, function_tools or agent_loops: one of verl's files")
        if config is not None and agent_loops is None:
            raise ConfigError("config has no effect without agent_loops, which read it: remove it, or set agent_loops")
        if interactions is not None and then is not None:
            raise ConfigError(f"interactions={interactions} and then={then} would both answer the model: choose one")
        if max_user_turns is not None and (interactions is None or max_user_turns < 1):
            problem = "has no effect without interactions" if interactions is None else "must be above 0"
            raise ConfigError(f"max_user_turns={max_user_turns} {problem}")
        if not (tool_timeout > 0 and math.isfinite(tool_timeout)):
            raise ConfigError(f"tool_timeout={tool_timeout}; give a number of seconds above 0")
        _check_rewards(rewards, then)
        follow_verl_logging()
        self.records_rewards = rewards == "record"
        """Whether the rewards of tools and interactions are only recorded, and not added to the turns' rewards."""
        self._interactions = read_interactions(interactions) if interactions is not None else {}
        self._then = resolve(then, key="then") if isinstance(then, str) else then
        self._most_answers = max_user_turns
        self._functions = {} if function_tools is None else read_function_tools(function_tools, timeout=tool_timeout)
        self._loops = None if agent_loops is None else read_agent_loops(agent_loops, config=config)
        self._parser = (
            None if tool_parser is None else read_parser(tool_parser, key="environment.arguments.tool_parser")
        )
        self._default_agent = default_agent or _TOOL_AGENT
        self._refuse_unknown_agent(default_agent)
        self._tools, self._servers = read_tools(tools, timeout=tool_timeout) if tools is not None else ([], [])
        self.thread = thread
        """Whether `async` methods run in a thread of their conversation."""
        if thread:
            refuse_unused_thread("what the files name", self._methods())

    def _methods(self) -> list[Callable[..., Any]]:
        """The methods of the user's classes that conversations call."""
        of_tools = [
            method
            for tool in self._tools
            for method in (
                getattr(tool.instance, name, None) for name in ("create", "execute", "calc_reward", "release")
            )
        ]
        of_interactions = [
            method
            for interaction in self._interactions.values()
            for method in (getattr(interaction, name, None) for name in _METHODS)
        ]
        functions = [function.fn for function, _ in self._functions.values()]
        return [method for method in (*of_tools, *of_interactions, *functions) if callable(method)]

    def _refuse_unknown_agent(self, name: str | None) -> None:
        """Raises ConfigError if `default_agent` names no agent."""
        if name is not None and name not in self.agents:
            raise ConfigError(
                f"default_agent={name!r}{nearest(name, self.agents)}; there are: {', '.join(self.agents)}"
            )

    @property
    def agents(self) -> list[str]:
        """The names that the column `agent_name` may have."""
        return sorted({_TOOL_AGENT, _SINGLE_TURN_AGENT, *(self._loops.names if self._loops is not None else ())})

    def tools(self) -> Sequence[Tool]:
        """The tools of the files, not bound to a conversation: for checks and for display."""
        return [*(tool.tool for tool in self._tools), *(tool for _, tool in self._functions.values())]

    def use_context(self, context: RolloutContext) -> RolloutContext:
        """Take what agent loops need of the run, before its first conversation. Returns the context of the conversations."""
        if self._loops is not None:
            self._loops.use_context(context)
        return context if self._parser is None else with_parser(context, self._parser)

    def make(self, in_front: PutInFront | None = None) -> Environment:
        """The environment of one conversation. `in_front` puts tools in front of an environment, also verl's own tools."""
        return _ByAgent(self, in_front or (lambda tools, then: Tools(tools, then=then) if tools else then))

    def led_by(self, row: Row, in_front: PutInFront) -> Environment:
        """The environment of the row's conversation, by the column `agent_name`. Raises Failed for an unknown agent."""
        name = row.fields.get("agent_name")
        name = self._default_agent if name is None else str(name)
        if self._loops is not None and name in self._loops.names:
            if in_front((), environment := self._loops.environment(name, row, self._instances())) is not environment:
                raise Failed(
                    Failure(
                        "environment",
                        f"the recipe's tools cannot be offered by the agent loop {name!r}, which writes its own prompts: "
                        f"remove tools "
                        f"and mcp from the recipe",
                    )
                )
            return environment
        if name == _SINGLE_TURN_AGENT:
            return SingleTurn()
        if name != _TOOL_AGENT:
            raise refuse(
                row, f"agent_name={name!r}{nearest(name, self.agents)} (the agents are: {', '.join(self.agents)})"
            )
        return Conversation(self, in_front)

    def _instances(self) -> list[Any]:
        """The users' objects behind the tools, for agent loops, which call them themselves."""
        return [*(tool.instance for tool in self._tools), *(function for function, _ in self._functions.values())]

    __call__ = make

    async def aclose(self) -> None:
        """Disconnect from the MCP servers, after the last conversation."""
        for server in self._servers:
            await server.aclose()

    def instances(self, row: Row, data: AgentData) -> tuple[list[ToolInstance], Environment]:
        """The tools and the environment behind them for a conversation of the row, not begun yet. Raises Failed."""
        id = data.request_id
        wants = wanted(row, [*(tool.name for tool in self._tools), *self._functions])
        offered = [tool for tool in self._tools if wants.selection is None or tool.name in wants.selection]
        tools = [ToolInstance(tool, id, wants, data) for tool in offered]
        data.tools_kwargs = wants.tools
        if self._interactions:
            _, interaction = choose(self._interactions, wants, row)
            keywords = interaction_keywords(interaction, wants, row)
            data.interaction, data.interaction_kwargs = interaction, keywords
            return tools, Interaction(
                interaction, id=id, keywords=keywords, agent_data=data, most_answers=self._most_answers
            )
        if self._then is None:
            unanswered_kwargs(wants)
        return tools, self._then() if self._then is not None else SingleTurn()

    def functions(self, row: Row) -> list[Tool]:
        """The functions that the model is offered in a conversation of the row."""
        selection = wanted(row, [*(tool.name for tool in self._tools), *self._functions]).selection
        return [tool for name, (_, tool) in self._functions.items() if selection is None or name in selection]


def _check_rewards(rewards: str, then: Any) -> None:
    """Raises ConfigError."""
    if rewards not in ("add", "record"):
        raise ConfigError(f"rewards={rewards!r}; there are add and record")
    if rewards == "record" and then is not None:
        raise ConfigError(
            f"rewards=record has no effect on then={then}, which is not a class of verl: remove one of the two"
        )


class _ByAgent:
    """One conversation, led by the agent that its row names."""

    def __init__(self, setup: Conversations, in_front: PutInFront) -> None:
        self._setup = setup
        self._in_front = in_front
        self._inner: Environment | None = None
        self._loop = OwnLoop("verl") if setup.thread else None

    async def begin(self, row: Row) -> Opening:
        own_loop.set(self._loop)
        self._inner = self._setup.led_by(row, self._in_front)
        return await self._inner.begin(row)

    async def step(self, turn: Turn) -> Reply:
        assert self._inner is not None, "step before begin"
        return await self._inner.step(turn)

    async def final_reply(self, turn: Turn) -> Reply:
        if isinstance(self._inner, FinalReply):
            return await self._inner.final_reply(turn)
        reward = await self._inner.final_reward() if isinstance(self._inner, FinalReward) else None
        return Reply(done=True, reward=reward)

    async def close(self) -> None:
        with ending(self._loop):
            if self._inner is not None:
                await self._inner.close()


class Conversation:
    """One conversation with tools and an interaction."""

    def __init__(self, setup: Conversations, in_front: PutInFront) -> None:
        self._setup = setup
        self._in_front = in_front
        self._data = AgentData(request_id=str(uuid4()))
        self._tools: list[ToolInstance] = []
        self._behind: Environment | None = None
        self._last: Turn | None = None

    async def begin(self, row: Row) -> Opening:
        tools, partner = self._setup.instances(row, self._data)
        self._tools = tools
        await _together(tool.create() for tool in tools)
        self._behind = self._in_front([*(tool.tool for tool in tools), *self._setup.functions(row)], partner)
        opening = await self._behind.begin(row)
        tool_messages = [_message(tool) for tool in tools if not tool.response.is_empty()]
        messages = [*opening.messages, *tool_messages]
        self._data.hear(messages)
        return replace(opening, messages=messages)

    async def step(self, turn: Turn) -> Reply:
        assert self._behind is not None, "step before begin"
        self._data.add_turn(turn, _assistant(turn))
        if len(turn.calls) >= len(
            turn.message.get("tool_calls") or ()
        ):  # not a copy of the turn with a part of its calls
            self._last = turn
        reply = await self._behind.step(turn)
        if reply.rewrite is not None:
            self._data.rewritten(reply.rewrite)
        self._data.hear(reply.messages)
        self._data.user_turns += bool(reply.messages)
        if self._setup.records_rewards:
            reply = replace(reply, reward=None, info={**reply.info, **_given(reply.reward)})
        if not reply.done:
            return reply
        rewards = await self._rewards()
        counts = [] if self._setup.records_rewards else [*rewards.values()]
        return replace(reply, reward=added([reply.reward, *counts]), info={**reply.info, **_reward_info(rewards)})

    async def final_reward(self) -> float | None:
        rewards = await self._rewards()
        if self._last is not None:
            self._last.info.update(_reward_info(rewards))
        behind = await self._behind.final_reward() if isinstance(self._behind, FinalReward) else None
        return added([behind, *([] if self._setup.records_rewards else rewards.values())])

    async def close(self) -> None:
        await _together([*(tool.release() for tool in self._tools), *_closing(self._behind)], seconds=_SECONDS)

    async def _rewards(self) -> dict[str, float]:
        """`calc_reward` of each tool, by tool name."""
        rewards = await asyncio.gather(*(tool.calc_reward() for tool in self._tools))
        return {tool.of.name: reward for tool, reward in zip(self._tools, rewards, strict=True)}


def _assistant(turn: Turn) -> Message:
    """The message in verl's form: a turn with calls has its text and its calls, any other turn the unchanged text."""
    return dict(turn.message) if turn.calls else {"role": "assistant", "content": turn.text}


def _message(tool: ToolInstance) -> Message:
    """A tool message with the response of `create`."""
    response: ToolResponse = tool.response
    parts = [
        *({"type": "image", "image": image} for image in response.image or ()),
        *({"type": "video", "video": video} for video in response.video or ()),
        *([{"type": "text", "text": response.text}] if response.text else []),
    ]
    content = response.text if response.is_text_only() else parts
    return {"role": "tool", "tool_call_id": f"create_{tool.of.name}", "name": tool.of.name, "content": content}


def _given(reward: float | None) -> dict[str, Any]:
    return {"reward": reward} if reward else {}


def _reward_info(rewards: dict[str, float]) -> dict[str, Any]:
    return {"calc_reward": rewards} if rewards else {}


def _closing(environment: Environment | None) -> list[Awaitable[None]]:
    return [] if environment is None else [environment.close()]


async def _together(awaitables: Iterable[Awaitable[Any]], *, seconds: float | None = None) -> None:
    """Wait for all awaitables, also if some raise; then raise the first exception. Raises Failed after `seconds`."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    if not tasks:
        return
    try:
        _, late = await asyncio.wait(tasks, timeout=seconds)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        raise
    for task in late:
        task.cancel()
    if late:
        await asyncio.wait(late, timeout=1.0)
    problems = [task.exception() for task in tasks if task.done() and not task.cancelled()]
    for problem in problems:
        if problem is not None:
            raise problem
    if late:
        raise Failed(Failure("environment", f"releasing the tools and the interaction took longer than {seconds:g} s"))
