"""Agents that an environment opens: trajectories of their own in one episode, their groups, limits, failures and rewards."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from support.conversations import RENDERER, Says, a_row, a_table, call, hold, hold_all, spoken
from turnwise import Opening, Reply, Row, Turn, current_episode, environment, user_message
from turnwise.environments.environment import SingleTurn
from turnwise.environments.tools.toolbox import Tool, Tools
from turnwise.errors import Failed
from turnwise.options.algorithm import Gigpo, Grpo, Remax
from turnwise.rewards.credit import credit_of
from turnwise.rewards.functions import GroupReward, TrajectoryReward
from turnwise.rewards.scorer import Scorer
from turnwise.rollout.context import Limits
from turnwise.rollout.pipeline import with_groups_of_agents
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.types import Failure, Group, Stop, Trajectory
from turnwise.user_code.calls import Deadline
from turnwise.user_code.calls import limits as deadlines

Steps = AsyncGenerator[Opening | Reply, Turn]
ASK = [{"role": "system", "content": "You search."}]


class Script(Says):
    """Says what stands in `texts` of a conversation, by the part of its id after the row: `0/searcher`."""

    def __init__(self, texts: dict[str, list[Any]]) -> None:
        super().__init__()
        self._texts = texts

    async def generate(self, request: Any) -> Any:
        said = self._said.get(request.conversation, 0)
        self._turns = (*[""] * said, self._texts[request.conversation.split("/", 1)[1]][said])
        return await super().generate(request)


@environment
async def asks_searcher(row: Row) -> Steps:
    turn = yield Opening(messages=row.messages)
    async with current_episode().agent("searcher", messages=ASK) as searcher:
        found = await searcher.turn(turn.text)
        again = await searcher.turn("And who?", reward=0.25)
        searcher.add_reward(0.5)
    turn = yield user_message(f"{found.text}, {again.text}")
    yield Reply(reward=1.0, done=True)


def test_an_agents_turns_are_a_trajectory_of_its_own_with_their_tokens_and_rewards() -> None:
    trajectory = hold(Script({"0": ["when", "ok"], "0/searcher": ["1048", "Harald"]}), asks_searcher)
    assert trajectory.error is None
    (agent,) = trajectory.agents
    assert (agent.id, agent.group, agent.agent, agent.episode) == ("1/0/searcher", "1/searcher", "searcher", "1/0")
    assert (agent.stop, [turn.text for turn in agent.turns]) == (Stop.DONE, ["1048", "Harald"])
    assert [turn.reward for turn in agent.turns] == [0.25, 0.5]
    assert [text for turn, text in spoken(agent.segments[0]) if turn >= 0] == ["1048<|im_end|>", "Harald<|im_end|>"]
    assert agent.segments[0].logprobs[-1] == -7 / 8  # the seventh token of the turn, as `completion` gives it
    assert [message["content"] for message in agent.messages][:2] == ["You search.", "when"]
    assert "1048, Harald" in [message["content"] for message in trajectory.messages]
    assert agent.seed != trajectory.seed


def test_agents_of_one_name_are_one_group_over_the_episodes_of_a_row_and_each_side_has_its_own_credit() -> None:
    """Four games on a row: the sides are compared with the same side of the other games, and not with each other."""

    @environment
    async def game(row: Row) -> Steps:
        async with current_episode().agent("second", messages=row.messages) as second:
            mine = yield Opening(messages=row.messages)
            theirs = await second.turn()
            won = float(len(mine.text) - len(theirs.text))
            second.add_reward(-won)
            yield Reply(reward=won, done=True)

    engine = Script({f"{n}": ["x" * (n + 1)] for n in range(4)} | {f"{n}/second": ["yyy"] for n in range(4)})
    group = new_group(a_row(), size=4, seed=0)
    asyncio.run(rollout_groups([group], a_table(engine, game)))
    asyncio.run(Scorer().score([group]))
    groups = with_groups_of_agents([group])
    assert [(each.id, len(each.trajectories)) for each in groups] == [("1", 4), ("1/second", 4)]
    assert [[each.reward for each in one.trajectories] for one in groups] == [[-2, -1, 0, 1], [2, 1, 0, -1]]
    credit_of(Grpo(scale="none"), weights={})(groups)
    first, second = ([each.advantages for each in one.trajectories] for one in groups)
    assert first == [[-1.5], [-0.5], [0.5], [1.5]]
    assert second == [[1.5], [0.5], [-0.5], [-1.5]]


def test_agents_are_compared_with_the_mean_of_the_greedy_agents_of_their_name_and_without_one_the_log_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @environment
    async def asks(row: Row) -> Steps:
        first = yield Opening(messages=row.messages)
        for said in first.text.split():
            try:
                async with current_episode().agent("helper", messages=ASK) as helper:
                    helped = await helper.turn(said)
                    helper.add_reward(float(helped.text))
            except Failed:
                pass
        yield Reply(reward=1.0, done=True)

    def held(size: int, texts: dict[str, list[Any]]) -> Group:
        group = new_group(a_row(), size=size, seed=0)
        asyncio.run(rollout_groups([group], a_table(Script(texts), asks)))
        asyncio.run(Scorer().score([group]))
        return group

    group = held(2, {"0": ["x"], "0/helper": ["1"], "1": ["x"], "1/helper": ["0"]})
    broken = {"0": ["a b c"], "0/helper": [RuntimeError("boom")], "0/helper/2": ["0.5"], "0/helper/3": ["0.25"]}
    (group.baseline,) = held(1, broken).trajectories
    credit_of(Remax(), weights={})(with_groups_of_agents([group]))
    assert [agent.advantages for one in group.trajectories for agent in one.agents] == [[0.625], [-0.375]]
    assert not caplog.records
    (group.baseline,) = held(1, {"0": ["a"], "0/helper": [RuntimeError("boom")]}).trajectories
    credit_of(Remax(), weights={})(with_groups_of_agents([group]))
    assert "agent 'helper' in the group 1/helper are not trained on" in caplog.text
    assert "which has 1, and none with a reward" in caplog.text


def test_gigpo_compares_turns_of_agents_in_the_states_that_the_environment_says() -> None:
    @environment
    async def walks(row: Row) -> Steps:
        first = yield Opening(messages=row.messages)
        async with current_episode().agent("walker", messages=ASK) as walker:
            await walker.turn("Where?")
            turn = await walker.turn("And then?", info={"room": first.text})
            walker.add_reward(float(turn.text))
            turn.info["room"] = "exit"
        yield Reply(reward=0.0, done=True)

    said = {str(n): [room] for n, room in enumerate(["hall", "hall", "attic"])}
    walked = {f"{n}/walker": ["on", last] for n, last in enumerate(["1", "0", "2"])}
    group = new_group(a_row(), size=3, seed=0)
    asyncio.run(rollout_groups([group], a_table(Script(said | walked), walks)))
    asyncio.run(Scorer().score([group]))
    _, walkers = with_groups_of_agents([group])
    credit_of(Gigpo(state_key="room", gamma=1.0, scale="none"), weights={})([walkers])
    assert [one.error for one in walkers.trajectories] == [None] * 3
    assert [[turn.info["room"] for turn in one.turns] for one in walkers.trajectories] == [
        ["hall", "exit"],
        ["hall", "exit"],
        ["attic", "exit"],
    ]
    # all begin in the same state, with the returns 1, 0 and 2; the first two are in the hall then, with 1 and 0
    assert [one.advantages for one in walkers.trajectories] == [[0.0, 0.5], [-2.0, -1.5], [2.0, 1.0]]


@pytest.mark.parametrize(
    ("given", "reward", "parts"),
    [
        ({"shares_reward": True}, 1.5, {"turns": 0.5, "episode": 1.0}),
        ({}, 0.5, {"turns": 0.5}),
        ({"train": False}, 0.5, {"turns": 0.5}),
    ],
)
def test_an_agent_has_the_reward_that_it_is_given_and_shares_in_that_of_the_row_if_it_is_said(
    given: dict[str, Any], reward: float, parts: dict[str, float]
) -> None:
    @environment
    async def one(row: Row) -> Steps:
        yield Opening(messages=row.messages)
        async with current_episode().agent("critic", messages=ASK, **given) as critic:
            await critic.turn("Good?")
            critic.add_reward(0.5)
        yield Reply(reward=1.0, done=True)

    group = new_group(a_row(), size=1, seed=0)
    asyncio.run(rollout_groups([group], a_table(Script({"0": ["a"], "0/critic": ["b"]}), one)))
    asyncio.run(Scorer().score([group]))
    (agent,) = group.trajectories[0].agents
    assert (agent.reward, agent.rewards) == (reward, parts)
    assert len(group.of_agents()) == given.get("train", True)


def test_reward_functions_may_add_rewards_to_turns_of_agents_and_set_nothing_else() -> None:
    def helpful(trajectory: Trajectory) -> float:
        trajectory.agents[0].turns[-1].add_reward(0.25, "helpful")
        trajectory.agents[0].turns[0].info["seen"] = True
        return 2.0

    def of_group(trajectories: list[Trajectory]) -> list[float]:
        trajectories[0].agents[0].turns[0].add_reward(1.0, "compared")
        return [0.0] * len(trajectories)

    def sets(trajectory: Trajectory) -> float:
        trajectory.agents[0].advantages = [1.0]
        return 0.0

    def scored(scorer: Scorer) -> Trajectory:
        group = new_group(a_row(), size=1, seed=0)
        texts = Script({"0": ["when", "ok"], "0/searcher": ["1048", "Harald"]})
        asyncio.run(rollout_groups([group], a_table(texts, asks_searcher)))
        asyncio.run(scorer.score([group]))
        return group.trajectories[0]

    trajectory = scored(
        Scorer(trajectory=[TrajectoryReward("helpful", helpful)], groups=[GroupReward("group", of_group)])
    )
    (agent,) = trajectory.agents
    assert agent.reward == 0.25 + 0.5 + 0.25 + 1.0  # the first two are those of the environment
    assert [turn.rewards for turn in agent.turns] == [
        {"environment": 0.25, "compared": 1.0},
        {"environment": 0.5, "helpful": 0.25},
    ]
    assert (agent.turns[0].info, trajectory.reward) == ({"seen": True}, 3.0)
    failed = scored(Scorer(trajectory=[TrajectoryReward("sets", sets)]))
    assert failed.error is not None
    assert "it has set trajectory.advantages" in failed.error.message


def failing(steps: Any, texts: dict[str, list[Any]], **table: Any) -> Any:
    """The conversation of an environment which opens agents after the first turn of the row's conversation."""

    @environment
    async def opens(row: Row) -> Steps:
        yield Opening(messages=row.messages)
        yield user_message(str(await steps(current_episode())), done=True)

    return hold(Script({"0": ["hi"], **texts}), opens, **table)


def test_the_failure_of_an_agent_is_raised_to_the_environment_which_may_go_on() -> None:
    caught: list[Failure] = []

    async def steps(episode: Any) -> str:
        async with episode.agent("broken", messages=ASK) as broken, episode.agent("sound", messages=ASK) as sound:
            try:
                await broken.turn("Now")
            except Failed as failed:
                caught.append(failed.failure)
            return (await sound.turn("Now")).text

    trajectory = failing(steps, {"0/broken": [RuntimeError("out of memory")], "0/sound": ["here"]})
    assert trajectory.error is None
    assert [message["content"] for message in trajectory.messages][-1] == "here"
    assert [(agent.agent, agent.failed) for agent in trajectory.agents] == [("broken", True), ("sound", False)]
    assert caught == [Failure("agent", "the agent 'broken' failed: engine: RuntimeError: out of memory")]
    assert trajectory.agents[0].error.kind == "engine"


async def a_hundred(episode: Any) -> None:
    for _ in range(100):
        async with episode.agent("helper", messages=ASK) as agent:
            await agent.turn("Go")


async def never_closed(episode: Any) -> None:
    await episode.agent("helper", messages=ASK).turn("Go")


async def twice_at_once(episode: Any) -> None:
    async with episode.agent("helper", messages=ASK) as agent:
        await asyncio.gather(agent.turn("Go"), agent.turn("Go"))


async def asks_itself(episode: Any) -> None:
    async def think() -> str:
        """Think."""
        return (await agents[0].turn("Think")).text

    agents = [episode.agent("helper", messages=ASK, tools=[think])]
    async with agents[0] as agent:
        await agent.turn("Go")
    assert "would wait for itself" in agent.trajectory.messages[3]["content"]
    raise KeyError("done")


async def without_messages(episode: Any) -> None:
    async with episode.agent("helper") as agent:
        await agent.turn()


async def wrong_name(episode: Any) -> None:
    episode.agent("0/x")


async def too_many_turns(episode: Any) -> None:
    async with episode.agent("helper", messages=ASK) as agent:
        for _ in range(3):
            await agent.turn("Go")


async def at_the_same_time(episode: Any) -> None:
    async with episode.agent("helper", messages=ASK) as one, episode.agent("helper", messages=ASK) as two:
        done = await asyncio.gather(one.turn("Go"), two.turn("Go"), return_exceptions=True)
        assert [type(each) for each in done] == [Turn, Failed]
        raise done[1]


async def after_calls(episode: Any) -> None:
    async def look() -> str:
        """Look."""
        return "ok"

    async with episode.agent("caller", messages=ASK, tools=[look]) as one, episode.agent("helper", messages=ASK) as two:
        await asyncio.gather(one.turn("Go"), two.turn("Go"))


async def after_close(episode: Any) -> None:
    async with episode.agent("helper", messages=ASK) as agent:
        await agent.turn("Go")
    await agent.turn("Go")


async def reward_too_early(episode: Any) -> None:
    async with episode.agent("helper", messages=ASK) as agent:
        agent.add_reward(1.0)


@pytest.mark.parametrize(
    ("steps", "limits", "kind", "message"),
    [
        (a_hundred, {"agents": 5}, "agent", "has opened 5 agents already, which is limits.agents"),
        (a_hundred, {"agent_turns": 3, "agents": 50}, "agent", "have reached limits.agent_turns=3"),
        (a_hundred, {"agent_tokens": 6, "agents": 50}, "agent", "have reached limits.agent_tokens=6"),
        (at_the_same_time, {"agent_turns": 1}, "agent", "have reached limits.agent_turns=1"),
        (after_calls, {"agent_turns": 2}, "agent", "'caller' has ended after 1 turns, for the reason max_turns"),
        (never_closed, {}, "agent", "never closed the agent 'helper'"),
        (twice_at_once, {}, "agent", "is asked for while it takes one"),
        (asks_itself, {}, "environment", "KeyError: done"),
        (without_messages, {}, "agent", "the agent 'helper' failed: environment: .*has no messages"),
        (wrong_name, {}, "environment", "must be a letter, and up to 63"),
        (too_many_turns, {"turns": 2}, "agent", "has ended after 2 turns, for the reason max_turns"),
        (after_close, {}, "agent", "is closed: ask for its turns inside"),
        (reward_too_early, {}, "environment", "has taken no turn"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_goes_wrong_with_an_agent_fails_its_conversation_with_a_message(
    steps: Any, limits: dict[str, int], kind: str, message: str
) -> None:
    texts = {f"0/helper{'' if n == 1 else f'/{n}'}": ["ok"] * 3 for n in range(1, 101)}
    if steps is asks_itself:
        texts["0/helper"] = [call("think"), "ok"]
    texts["0/caller"] = [call("look"), "ok"]
    trajectory = failing(steps, texts, limits=Limits(**{"turns": 8, "tokens_per_turn": 400, **limits}))
    assert trajectory.error is not None
    assert trajectory.error.kind == kind, trajectory.error
    assert re.search(message, trajectory.error.message), trajectory.error
    assert not any(agent.stop is None for agent in trajectory.agents)
    assert len(trajectory.agents) <= 5


def test_a_turn_that_a_limit_cuts_is_handed_over_and_later_rewards_still_count() -> None:
    async def steps(episode: Any) -> str:
        async with episode.agent("helper", messages=ASK) as agent:
            turn = await agent.turn("Go")
            with pytest.raises(Failed, match="has ended after 1 turns, for the reason length"):
                await agent.turn("Go on")
            agent.add_reward(0.5)
            return turn.finish_reason

    trajectory = failing(steps, {"0/helper": ["a long story"]}, limits=Limits(turns=8, tokens_per_turn=5))
    assert trajectory.error is None
    assert trajectory.messages[-1]["content"] == "length"
    (agent,) = trajectory.agents
    assert (agent.stop, agent.turns[0].reward) == (Stop.LENGTH, 0.5)


def test_tools_of_an_agent_are_called_and_the_turn_without_a_call_is_handed_over() -> None:
    def square(number: int) -> str:
        """Square.

        Args:
            number: A number.
        """
        return str(number**2)

    async def steps(episode: Any) -> str:
        async with episode.agent("helper", messages=ASK, tools=[square]) as agent:
            return (await agent.turn("7 squared?")).text

    trajectory = failing(steps, {"0/helper": [call("square", '{"number": 7}'), "it is 49"]})
    assert trajectory.error is None
    assert trajectory.messages[-1]["content"] == "it is 49"
    assert [message["role"] for message in trajectory.agents[0].messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]


def test_the_time_of_an_agents_turn_is_not_that_of_the_tool_that_asks_it() -> None:
    """The agent has limits of its own; what the tool does besides still counts."""

    async def ask(seconds: float) -> str:
        """Ask.

        Args:
            seconds: How long to wait before.
        """
        await asyncio.sleep(seconds)
        async with current_episode().agent("helper", messages=ASK) as agent:
            return (await agent.turn("?")).text

    turns = (call("ask", '{"seconds": 0}'), call("ask", '{"seconds": 2}'), "Done.")
    make = lambda: Tools([Tool.of(ask, timeout=0.5)], then=SingleTurn())  # noqa: E731
    trajectory = hold(Says(*turns, seconds=0.8), make)
    assert trajectory.error is None, trajectory.error
    assert [turn.outcomes[0].error for turn in trajectory.turns[:2]] == [None, "timeout"]


def test_a_tool_whose_agent_failed_is_not_tried_again_with_another_agent() -> None:
    async def ask() -> str:
        """Ask."""
        async with current_episode().agent("helper", messages=ASK) as agent:
            return (await agent.turn("Go")).text

    script = Script({"0": [call("ask"), "ok"], "0/helper": [RuntimeError("boom")], "0/helper/2": ["it works now"]})
    trajectory = hold(script, lambda: Tools([Tool.of(ask, retries=1)]))
    assert trajectory.error is None
    (outcome,) = trajectory.turns[0].outcomes
    assert "the agent 'helper' failed: engine: RuntimeError: boom" in outcome.content
    assert [agent.id for agent in trajectory.agents] == ["1/0/helper"]


def test_the_agents_of_a_conversation_that_fails_fail_with_it_and_those_that_were_closed_do_not() -> None:
    async def steps(episode: Any) -> None:
        async with episode.agent("early", messages=ASK) as early:
            await early.turn("Go")
        async with episode.agent("late", messages=ASK) as late:
            await late.turn("Go")
            raise KeyError("lost")

    trajectory = failing(steps, {"0/early": ["a"], "0/late": ["b"]})
    assert trajectory.error == Failure("environment", "KeyError: lost")
    early, late = trajectory.agents
    assert (early.error, early.stop) == (None, Stop.DONE)
    assert late.error == Failure("episode", "the environment failed while the agent was open: KeyError: lost")


class ClosesLate:
    """The other way to keep an agent open: over the methods of an environment, which closes it at the end."""

    async def begin(self, row: Row) -> Opening:
        self.agent = current_episode().agent("second", messages=row.messages)
        return Opening(messages=row.messages)

    async def step(self, turn: Turn) -> Reply:
        await self.agent.turn(turn.text)
        self.agent.add_reward(0.5)
        return Reply(messages=[{"role": "user", "content": "Go on"}])

    async def close(self) -> None:
        await self.agent.close()


@environment
async def closes_with_its_block(row: Row) -> Steps:
    async with current_episode().agent("second", messages=row.messages) as second:
        turn = yield Opening(messages=row.messages)
        while True:
            await second.turn(turn.text)
            second.add_reward(0.5)
            turn = yield user_message("Go on")


@pytest.mark.parametrize("opens", [closes_with_its_block, ClosesLate])
@pytest.mark.parametrize("said", ["b", "a long story"])  # the second: a limit ended the agent's conversation before
def test_agents_that_are_open_when_the_conversation_of_the_row_fails_fail_with_it(opens: Any, said: str) -> None:
    engine = Script({"0": ["a", RuntimeError("boom")], "0/second": [said]})
    trajectory = hold(engine, opens, limits=Limits(turns=8, tokens_per_turn=5))
    reason = "engine: RuntimeError: boom"
    assert trajectory.error == Failure("engine", "RuntimeError: boom")
    assert [agent.error for agent in trajectory.agents] == [
        Failure("episode", f"the conversation of the row failed: {reason}")
    ]


@pytest.mark.parametrize("opens", [closes_with_its_block, ClosesLate])
def test_agents_that_are_open_when_a_limit_ends_the_conversation_of_the_row_are_complete(opens: Any) -> None:
    trajectory = hold(
        Script({"0": ["a", "c"], "0/second": ["b", "d"]}), opens, limits=Limits(turns=2, tokens_per_turn=9)
    )
    assert (trajectory.error, trajectory.stop) == (None, Stop.MAX_TURNS)
    (agent,) = trajectory.agents
    assert (agent.error, agent.stop) == (None, Stop.DONE)


def test_an_agent_is_cut_as_a_failed_one_even_if_its_caller_is_cancelled_while_it_cleans_up() -> None:
    cleans, cleaned = asyncio.Event(), asyncio.Event()

    class Box:
        """Tools."""

        async def look(self) -> str:
            """Look."""
            asking.cancel()
            await asyncio.Event().wait()
            return ""

        async def close(self) -> None:
            cleans.set()
            await cleaned.wait()

    async def steps(episode: Any) -> str:
        nonlocal asking
        async with episode.agent("helper", messages=ASK, tools=[Box]) as agent:
            asking = asyncio.ensure_future(agent.turn("Go"))
            await cleans.wait()
            asking.cancel()
            await asyncio.wait({asking})
            cleaned.set()
        return str(asking.cancelled())

    asking: asyncio.Future[Turn]
    trajectory = failing(steps, {"0/helper": [call("look")]})
    assert (trajectory.error, trajectory.messages[-1]["content"]) == (None, "True")
    (agent,) = trajectory.agents
    assert agent.error == Failure("episode", "the environment stopped waiting for a turn of the agent")


def test_deadlines_of_the_call_that_opens_an_agent_do_not_hold_for_the_agent() -> None:
    of_row: list[Deadline] = []
    of_agent: list[Deadline] = []

    async def look() -> str:
        """Look."""
        of_agent.extend(deadlines.get())
        return "ok"

    async def steps(episode: Any) -> None:
        of_row.extend(deadlines.get())
        async with episode.agent("helper", messages=ASK, tools=[look]) as agent:
            await agent.turn("Go")

    limits = Limits(turns=8, tokens_per_turn=400, seconds=60, seconds_per_turn=30)
    trajectory = failing(steps, {"0/helper": [call("look"), "ok"]}, limits=limits)
    assert trajectory.error is None
    assert (len(of_row), len(of_agent)) == (2, 3)  # of the conversation and of the turn; and of the tool
    assert not set(of_row) & set(of_agent)


def test_time_in_which_the_environment_does_not_ask_an_agent_is_not_its_time() -> None:
    async def steps(episode: Any) -> str:
        async with episode.agent("helper", messages=ASK) as agent:
            await agent.turn("Go")
            await asyncio.sleep(0.3)
            return (await agent.turn("Go")).text

    limits = Limits(turns=8, tokens_per_turn=400, seconds=0.25, seconds_per_turn=0.25)
    trajectory = failing(steps, {"0/helper": ["a", "b"]}, limits=limits)
    assert trajectory.error is not None  # the environment itself was too slow
    assert trajectory.error.kind == "deadline"
    (agent,) = trajectory.agents
    assert agent.error is not None
    assert agent.error.kind == "episode"  # and not its own deadline


@environment
async def debate(row: Row) -> Steps:
    """Each turn of the row's conversation is answered by two agents that take their turns at the same time."""
    episode = current_episode()
    async with episode.agent("pro", messages=ASK) as pro, episode.agent("contra", messages=ASK) as contra:
        turn = yield Opening(messages=row.messages)
        for _ in range(2):
            first, second = await asyncio.gather(pro.turn(turn.text), contra.turn(turn.text))
            turn = yield user_message(first.text + second.text)


def test_in_lockstep_a_batch_has_the_requests_of_all_episodes_whoever_takes_the_turn() -> None:
    names = [str(n) for n in range(3)]
    engine = Script({name + agent: ["a", "b", "c"] for name in names for agent in ("", "/pro", "/contra")})
    trajectories = hold_all(engine, debate, size=3, lockstep=True)
    assert [trajectory.error for trajectory in trajectories] == [None] * 3
    asked = [request.conversation.split("/", 1)[1] for request in engine.requests]
    turn, agents = ["0", "1", "2"], ["0/pro", "0/contra", "1/pro", "1/contra", "2/pro", "2/contra"]
    assert asked == [*turn, *agents, *turn, *agents, *turn]
    assert engine.together == 6


def test_outside_of_a_conversation_there_is_no_episode() -> None:
    with pytest.raises(RuntimeError, match="outside of a conversation"):
        current_episode()


def test_without_agents_an_episode_leaves_no_trace() -> None:
    trajectory = hold(["Hello"])
    assert (trajectory.agents, trajectory.agent, trajectory.episode, trajectory.trained) == ([], "", "", True)
    assert RENDERER.decode(trajectory.segments[0].token_ids).endswith("Hello<|im_end|>")
