"""The agents that an environment opens beside the conversation of its row: a searcher, the other side of a game, a critic.

Each agent has a conversation of its own, which the one loop (`rollout.rollout`) runs as every other: with tokens, limits and
failures of its own. The environment of that conversation waits until the environment that has opened the agent asks for the next
turn, and hands the turn over. So an episode is several trajectories, and none of them knows another's tokens.

Invariants: an agent runs only while its turn is awaited, except for its tools. A request for a turn of an agent that is taking
one is refused at once, so no agent can wait for itself, directly or through others. When the conversation of the row has ended,
no agent runs any more.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from turnwise.engines.engine import Batched
from turnwise.environments.environment import Environment
from turnwise.environments.tools.toolbox import Tool, Toolbox, Tools
from turnwise.errors import Failed, nearest, text_of
from turnwise.rollout.context import ConversationContext, Limits, RolloutContext, seed_of
from turnwise.types import Failure, Message, Opening, Reply, Row, SamplingChange, Stop, ToolSchema, Trajectory, Turn
from turnwise.user_code.calls import asking_agent, conversation_name, own_context, spawn, waiting_for_opener
from turnwise.user_code.calls import limits as deadlines_of_caller
from turnwise.user_code.copies import copy_containers
from turnwise.user_code.reward_number import added, reward_number

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
"""Names of agents: they are parts of the ids of groups and of the names of metrics."""

AgentTool = Tool | Toolbox | Callable[..., Any] | ToolSchema


class RunningEpisode:
    """The conversation of `trajectory` and its agents (`environments.environment.CurrentEpisode`). `run` runs the
    conversation of an agent: the loop."""

    def __init__(
        self,
        trajectory: Trajectory,
        context: ConversationContext,
        run: Callable[[Trajectory, ConversationContext], Awaitable[Trajectory]],
    ) -> None:
        self.trajectory = trajectory
        self.context = context
        self.run = run
        self.agents: list[AskedAgent] = []
        self.turns = 0
        """Turns of all agents that have begun, or that callers wait for."""
        self.over = False
        """Whether the conversation of the row has ended."""
        self._loop = asyncio.get_running_loop()

    def agent(
        self,
        name: str,
        *,
        messages: Sequence[Message] = (),
        tools: Sequence[AgentTool] = (),
        train: bool | None = None,
        shares_reward: bool = False,
        sampling: SamplingChange | None = None,
        policy: str | None = None,
    ) -> AskedAgent:
        """See `CurrentEpisode.agent`."""
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise ValueError(
                f"the name {name!r:.80} of an agent must be a letter, and up to 63 letters, digits, '_', '.' or '-' after it"
            )
        if len(self.agents) >= self.context.limits.agents:
            raise agent_failure(
                f"the environment opens the agent {name!r}, and has opened {len(self.agents)} agents already, which is "
                f"limits.agents: raise that limit, or open fewer agents"
            )
        if policy is not None:
            self._refuse_policy(name, policy, train)
        number = sum(agent.trajectory.agent == name for agent in self.agents)
        root, own = self.trajectory, name if not number else f"{name}/{number + 1}"
        trajectory = Trajectory(
            id=f"{root.id}/{own}",
            group=f"{root.group}/{name}{'' if policy is None else f'@{policy}'}",
            row=root.row,
            seed=seed_of(f"{root.seed}:{own}"),
            agent=name,
            policy=policy or "",
            episode=root.id,
            trained=train is not False and (policy is None or self.context.policies[policy].trained),
            shares_reward=shares_reward,
        )
        opening = Opening(
            messages=list(messages), tools=[tool for tool in tools if isinstance(tool, dict)], sampling=sampling
        )
        agent = AskedAgent(self, trajectory, opening, [tool for tool in tools if not isinstance(tool, dict)])
        self.agents.append(agent)
        return agent

    def _refuse_policy(self, name: str, policy: str, train: bool | None) -> None:
        """Raises Failed if the recipe has no such policy, and ValueError if it is frozen and to be trained."""
        policies = self.context.policies
        if policy not in policies:
            known = ", ".join(map(repr, policies)) or "none"
            raise agent_failure(
                f"the agent {name!r} names the policy {policy!r}, and the recipe has {known}{nearest(policy, policies)}: add it "
                f"to `policies`"
            )
        if train and not policies[policy].trained:
            raise ValueError(
                f"train=True has no effect on the agent {name!r}, which the frozen policy {policy!r} plays: remove one of the two"
            )

    def refuse_elsewhere(self) -> None:
        """Raises Failed if the caller is not in the event loop of the conversation, or if the conversation has ended."""
        if asyncio.get_running_loop() is not self._loop:
            raise agent_failure(
                "agents take turns in the event loop of the conversations, and the caller is in another one: remove "
                "environment.thread (or `thread` of the tool), and call blocking code with asyncio.to_thread"
            )
        if self.over:
            raise agent_failure("the conversation of the row has ended, so its agents take no further turns")

    def limits_left(self) -> Limits:
        """The limits of an agent that begins now: those of the recipe, within the tokens that the agents before it have left.

        Raises Failed if they have left nothing.
        """
        limits = self.context.limits
        tokens = sum(agent.sampled_tokens for agent in self.trajectory.agents)
        bounds = {"agent_turns": (limits.agent_turns, self.turns), "agent_tokens": (limits.agent_tokens, tokens)}
        for name, (most, used) in bounds.items():
            if most is not None and used >= most:
                raise agent_failure(
                    f"the agents of the conversation have reached limits.{name}={most}: raise that limit"
                )
        if limits.agent_tokens is None:
            return limits
        rest = limits.agent_tokens - tokens
        return limits.model_copy(update={"tokens": rest if limits.tokens is None else min(limits.tokens, rest)})

    def failure_of_row(self) -> str:
        """Why agents fail that were open when the conversation of the row failed."""
        error = self.trajectory.error
        assert error is not None
        return f"the conversation of the row failed: {error.kind}: {error.message}"

    async def close(self) -> None:
        """End all agents. An agent that the environment has not closed fails the conversation of the row, unless that failed.
        If it failed, an agent that a limit has ended and nobody has closed fails too: its rewards are not complete."""
        self.over = True
        left = [agent for agent in self.agents if agent.running]
        reason = "the conversation of the row ended before the agent was closed"
        if self.trajectory.failed:
            reason = self.failure_of_row()
        await asyncio.gather(*(agent.abort(reason) for agent in (self.agents if self.trajectory.failed else left)))
        for trajectory in self.trajectory.agents:
            if trajectory.stop is None:  # its task was cancelled by other code
                trajectory.fail(Failure("episode", "the conversation of the agent was cancelled"))
        if left and not self.trajectory.failed:
            names = ", ".join(repr(agent.trajectory.agent) for agent in left)
            self.trajectory.fail(
                Failure(
                    "agent",
                    f"the environment never closed the agent {names}: open agents with `async with`, or await close()",
                )
            )


def agent_failure(message: str) -> Failed:
    """What an environment receives from its agents."""
    return Failed(Failure("agent", message))


class AskedAgent:
    """One agent (`environments.environment.EpisodeAgent`). Each turn of the model is the answer to a call of `turn`."""

    def __init__(
        self,
        episode: RunningEpisode,
        trajectory: Trajectory,
        opening: Opening,
        tools: Sequence[Tool | Toolbox | Callable[..., Any]],
    ) -> None:
        self.trajectory = trajectory
        self._episode = episode
        self._opening = opening
        self._tools = tools
        self._task: asyncio.Task[Trajectory] | None = None
        """Runs the conversation, from the first turn on."""
        self._answer: asyncio.Future[Turn] | None = None
        """What the caller of `turn` waits for."""
        self._asked: asyncio.Future[Sequence[Message] | None] | None = None
        """What the conversation waits for after a turn: the next messages, or None for its end."""
        self._reward: float | None = None
        """The reward of the last turn, until the next request."""
        self._closed = False
        self._granted = False
        """Whether the turn that is asked for is counted in `RunningEpisode.turns`, and has not begun."""

    # what the environment calls that has opened the agent

    @property
    def running(self) -> bool:
        """Whether its conversation has not ended."""
        return self._task is not None and not self._task.done()

    async def turn(
        self,
        messages: str | Sequence[Message] = (),
        *,
        reward: float | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> Turn:
        """See `EpisodeAgent.turn`."""
        self._episode.refuse_elsewhere()
        name = self.trajectory.agent
        if self._closed:
            raise agent_failure(f"the agent {name!r} is closed: ask for its turns inside its `async with` block")
        if self._answer is not None:
            raise agent_failure(
                f"a turn of the agent {name!r} is asked for while it takes one, so the caller would wait for itself or for "
                f"another task: await one turn after the other, and let no tool of an agent ask that agent"
            )
        if reward is not None:
            self.add_reward(reward)
        if info:
            self._add_info(info)
        if self._task is not None and self._asked is None:  # a limit has ended its conversation
            await asyncio.wait({self._task})
            raise self._ended()
        new = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        limits = self._episode.limits_left()
        self._episode.turns += 1
        self._granted = True
        answer = self._answer = asyncio.get_running_loop().create_future()
        with self._awaited():
            if self._asked is not None:
                asked, self._asked = self._asked, None
                asked.set_result(new)
            else:
                self._opening = dataclasses.replace(self._opening, messages=[*self._opening.messages, *new])
                self._begin(limits)
            assert self._task is not None
            try:
                with asking_agent():
                    await asyncio.wait({self._task, answer}, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                await self.abort("the environment stopped waiting for a turn of the agent")
                raise
            finally:
                self._answer = None
                if self._granted:  # its conversation has ended before the turn began
                    self._granted = False
                    self._episode.turns -= 1
        if answer.done():
            return answer.result()
        raise self._ended()

    def add_reward(self, value: float) -> None:
        """See `EpisodeAgent.add_reward`."""
        number = reward_number(value, f"the reward of the agent {self.trajectory.agent!r}")
        if not self.trajectory.turns:
            raise ValueError(
                f"the agent {self.trajectory.agent!r} gets the reward {number:g} and has taken no turn: rewards belong to turns"
            )
        if self._asked is None:
            self.trajectory.turns[-1].add_reward(number, "environment")
        else:  # the turn is being answered: the reward is part of the reply
            self._reward = added([self._reward, number])

    async def close(self) -> None:
        """See `EpisodeAgent.close`."""
        if self._episode.trajectory.failed:  # what closes it now only cleans up: its rewards are not complete
            return await self.abort(self._episode.failure_of_row())
        self._closed = True
        if self._task is None or self._task.done():
            return
        if self._answer is not None:
            return await self.abort("the environment closed the agent while it took a turn")
        if self._asked is not None:
            asked, self._asked = self._asked, None
            asked.set_result(None)
        await asyncio.wait({self._task})

    async def abort(self, reason: str) -> None:
        """End its conversation now, as a failed one. No effect if it has ended and was closed before."""
        closed, self._closed = self._closed, True
        if self._task is None or (closed and self._task.done()):
            return
        try:
            if not self._task.done():
                if not self._task.cancelling():  # a second cancellation would end its cleanup
                    self._task.cancel()
                await asyncio.wait({self._task})
        finally:  # also if the caller is cancelled in that wait
            if not self.trajectory.failed:
                self.trajectory.fail(Failure("episode", reason))

    async def __aenter__(self) -> AskedAgent:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # a generator that is closed has not failed itself: the conversation of the row has ended, which `close` looks at
        if error is None or isinstance(error, GeneratorExit):
            await self.close()
        else:
            await self.abort(
                f"the environment failed while the agent was open: {type(error).__name__}: {text_of(error)}"
            )

    def _add_info(self, info: Mapping[str, Any]) -> None:
        """Add entries to the `info` of its last turn."""
        if not self.trajectory.turns:
            raise ValueError(
                f"the agent {self.trajectory.agent!r} gets the entries {', '.join(map(str, info))} of `info` and has taken no "
                f"turn: entries belong to turns"
            )
        self.trajectory.turns[-1].info.update(copy_containers(dict(info)))

    def _begin(self, limits: Limits) -> None:
        """Start its conversation."""
        episode, tools = self._episode, self._tools

        def make() -> Environment:
            environment = _AgentEnvironment(self._opening, self.next_reply, self.take_last_turn)
            return Tools(tools, then=environment) if tools else environment

        given, policy = episode.context, self.trajectory.policy
        if policy:
            given = given.policies[policy].context(given)
        context = dataclasses.replace(given, make_environment=make, limits=limits, begin_turn=self.begin_turn)
        episode.trajectory.agents.append(self.trajectory)
        own = own_context()
        own.run(deadlines_of_caller.set, ())  # those of the caller end with its call; its conversation goes on
        self._task = spawn(_run(episode, self.trajectory, context), context=own, name=f"agent {self.trajectory.id}")

    def _awaited(self) -> _Awaited:
        """While its turn is awaited: in lockstep, the engine waits for its request instead of one of the caller."""
        context = self._episode.context
        engine = context.engine if isinstance(context, RolloutContext) else None
        number = 1 + self._episode.agents.index(self)
        return _Awaited(
            engine if isinstance(engine, Batched) else None, self.trajectory.id, conversation_name(), number
        )

    def _ended(self) -> Failed:
        """Why it takes no turn any more."""
        name, trajectory = self.trajectory.agent, self.trajectory
        if (error := trajectory.error) is not None:
            return agent_failure(f"the agent {name!r} failed: {error.kind}: {error.message}")
        return agent_failure(
            f"the conversation of the agent {name!r} has ended after {len(trajectory.turns)} turns, for the reason "
            f"{trajectory.stop} (see `limits`): catch turnwise.errors.Failed where an agent may reach its limits"
        )

    # what the environment of its conversation calls

    def begin_turn(self) -> Stop | None:
        """Count a turn that begins: the one that is asked for, or a further one after calls of tools."""
        most = self._episode.context.limits.agent_turns
        if self._granted:
            self._granted = False
        elif most is not None and self._episode.turns >= most:
            return Stop.MAX_TURNS
        else:
            self._episode.turns += 1
        return None

    async def next_reply(self, turn: Turn) -> Reply:
        """Hand a turn over, and wait for the next request."""
        asked = self._asked = asyncio.get_running_loop().create_future()
        self._hand_over(turn)
        with waiting_for_opener():
            messages = await asked
        reward, self._reward = self._reward, None
        return Reply(reward=reward, done=True) if messages is None else Reply(messages=messages, reward=reward)

    def take_last_turn(self, turn: Turn) -> None:
        """A limit has ended the conversation. A turn that it has cut was not handed over yet."""
        if turn.finish_reason == "length":
            self._hand_over(turn)

    def _hand_over(self, turn: Turn) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(turn)


class _AgentEnvironment:
    """What answers the model in the conversation of an agent: the calls of `AskedAgent.turn`."""

    def __init__(
        self, opening: Opening, next_reply: Callable[[Turn], Awaitable[Reply]], take_last_turn: Callable[[Turn], None]
    ) -> None:
        self._opening = opening
        self._next_reply = next_reply
        self._take_last_turn = take_last_turn

    async def begin(self, row: Row) -> Opening:
        return self._opening

    async def step(self, turn: Turn) -> Reply:
        return await self._next_reply(turn)

    async def final_reply(self, turn: Turn) -> Reply:
        self._take_last_turn(turn)
        return Reply(done=True)

    async def close(self) -> None:
        pass


async def _run(episode: RunningEpisode, trajectory: Trajectory, context: ConversationContext) -> Trajectory:
    return await episode.run(trajectory, context)


class _Awaited:
    """`with` around the time in which a caller waits for a turn of an agent."""

    def __init__(self, engine: Batched | None, agent: str, asker: str, number: int) -> None:
        self._engine = engine
        self._agent = agent
        self._asker = asker
        self._number = number

    def __enter__(self) -> None:
        if self._engine is not None:
            self._engine.await_agent(self._agent, self._asker, self._number)

    def __exit__(self, *_: object) -> None:
        if self._engine is not None:
            self._engine.agent_answered(self._agent, self._asker)
