"""The loop: it runs, it stops for a reason, and what breaks in one conversation stays there."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import pytest

from support.conversations import (
    CUE,
    RENDERER,
    STOP,
    Says,
    a_row,
    a_table,
    call,
    completion,
    hold,
    hold_all,
    scripted,
    spoken,
)
from turnwise.engines.scripted import ScriptedEngine
from turnwise.environments.environment import SingleTurn, environment, user_message
from turnwise.environments.tools.toolbox import Tools
from turnwise.environments.users import ScriptedUser
from turnwise.errors import ConfigError, EngineError
from turnwise.rollout.context import Limits, RolloutContext, Runner
from turnwise.rollout.rollout import new_group, rollout, rollout_group, rollout_groups
from turnwise.types import Completion, Opening, Reply, Request, Row, Sampling, Stop, Trajectory, Turn

FOREVER = functools.partial(ScriptedUser, ["And?"] * 100)
OPENING = f"<|im_start|>user\nHi<|im_end|>\n{CUE}"  # 21 tokens
AND = f"\n<|im_start|>user\nAnd?<|im_end|>\n{CUE}"  # 24 tokens


# why a conversation ends


def test_done_when_the_environment_says_so() -> None:
    trajectory = hold(Says("Yo."), SingleTurn)
    assert (trajectory.stop, trajectory.error, trajectory.failed) == (Stop.DONE, None, False)
    assert trajectory.messages == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo."}]
    assert spoken(trajectory.segments[0]) == [(-1, OPENING), (0, "Yo.<|im_end|>")]
    (turn,) = trajectory.turns
    assert (turn.index, turn.text, turn.finish_reason, turn.reward, turn.calls) == (0, "Yo.", "stop", 0.0, ())
    assert trajectory.logprob_kind == "sampled"
    assert list(trajectory.segments[0].logprobs)[-4:] == [-0.125, -0.25, -0.375, -0.5]
    assert (trajectory.reward, trajectory.advantages) == (None, [])


def test_max_turns() -> None:
    trajectory = hold(Says(*"abcdef"), FOREVER, limits=Limits(turns=3))
    assert (trajectory.stop, trajectory.error) == (Stop.MAX_TURNS, None)
    assert trajectory.assistant_texts == ["a", "b", "c"]
    # the environment was asked after the third turn too; nobody read its answer, so it is no token
    assert trajectory.messages[-1] == {"role": "user", "content": "And?"}
    assert spoken(trajectory.segments[0])[-1] == (2, "c<|im_end|>")


def test_length_when_a_turn_is_cut() -> None:
    engine = Says("a", "bcdefg")
    trajectory = hold(engine, FOREVER, limits=Limits(tokens_per_turn=4))
    assert (trajectory.stop, trajectory.error) == (Stop.LENGTH, None)
    assert trajectory.assistant_texts == ["a", "bcde"]
    assert [turn.finish_reason for turn in trajectory.turns] == ["stop", "length"]
    assert [request.sampling.max_tokens for request in engine.requests] == [4, 4]
    assert trajectory.messages[-1] == {"role": "assistant", "content": "bcde"}  # the environment was not asked


def test_max_tokens_in_the_middle_of_a_turn_and_between_turns() -> None:
    engine = Says("abc", "defgh")
    trajectory = hold(engine, FOREVER, limits=Limits(tokens=7, tokens_per_turn=6))
    assert (trajectory.stop, trajectory.assistant_texts) == (Stop.MAX_TOKENS, ["abc", "def"])
    assert [request.sampling.max_tokens for request in engine.requests] == [6, 3]
    assert trajectory.sampled_tokens == 7
    exactly = hold(Says("abc", "de", "f"), FOREVER, limits=Limits(tokens=7))
    assert (exactly.stop, exactly.assistant_texts) == (Stop.MAX_TOKENS, ["abc", "de"])
    assert exactly.messages[-1]["content"] == "And?"


def test_context_in_the_middle_of_a_turn_and_between_turns() -> None:
    # opening 21, `a` and stop 2, bridge 24: the second answer has 3 tokens of room
    engine = Says("a", "bcdefg")
    trajectory = hold(engine, FOREVER, limits=Limits(context=50))
    assert (trajectory.stop, trajectory.assistant_texts) == (Stop.CONTEXT, ["a", "bcd"])
    assert len(trajectory.segments[0]) == 50
    assert [request.sampling.max_tokens for request in engine.requests] == [29, 3]
    no_room = hold(Says("a", "b"), FOREVER, limits=Limits(context=47))
    assert (no_room.stop, no_room.assistant_texts, no_room.error) == (Stop.CONTEXT, ["a"], None)
    assert len(no_room.segments[0]) == 23  # the bridge that does not fit is not written


def test_the_response_is_all_that_follows_the_first_prompt() -> None:
    # opening 21; `a` and stop 2, bridge 24: 26 of the 29 tokens are used before the second answer
    engine = Says("a", "bcdefg")
    trajectory = hold(engine, FOREVER, limits=Limits(response_tokens=29))
    assert (trajectory.stop, trajectory.assistant_texts) == (Stop.MAX_RESPONSE, ["a", "bcd"])
    assert len(trajectory.segments[0]) == 21 + 29
    assert [request.sampling.max_tokens for request in engine.requests] == [29, 3]
    no_room = hold(Says("a", "b"), FOREVER, limits=Limits(response_tokens=26))
    assert (no_room.stop, no_room.assistant_texts, no_room.error) == (Stop.MAX_RESPONSE, ["a"], None)
    assert len(no_room.segments[0]) == 23  # the bridge that does not fit is not written
    longer = hold(Says("a", "bcdefg"), FOREVER, row=a_row("Hi" * 50), limits=Limits(response_tokens=29))
    assert (longer.stop, longer.assistant_texts) == (Stop.MAX_RESPONSE, ["a", "bcd"])  # however long the prompt is


def test_a_prompt_that_leaves_no_room_is_the_rows_failure() -> None:
    engine = Says("a")
    trajectory = hold(engine, SingleTurn, limits=Limits(context=21))
    assert trajectory.stop is Stop.ERROR
    assert trajectory.error is not None
    assert trajectory.error.kind == "row"
    assert trajectory.error.message == (
        "the prompt has 21 tokens and limits.context is 21, so there is no room for an answer: raise it, or shorten the "
        "prompt"
    )
    assert (engine.requests, trajectory.turns, trajectory.segments) == ([], [], [])
    assert (
        hold(Says("a"), SingleTurn, limits=Limits(context=22)).stop is Stop.CONTEXT
    )  # one token, and it is no stop token


class Bounded(Says):
    """An engine whose servers were started with a short context."""

    context = 50


def test_the_context_of_the_engine_ends_conversations_if_it_is_smaller_than_that_of_the_recipe() -> None:
    for limits in (Limits(), Limits(context=4096)):
        engine = Bounded("a", "bcdefg")
        trajectory = hold(engine, FOREVER, limits=limits)
        assert (trajectory.stop, trajectory.assistant_texts, trajectory.error) == (Stop.CONTEXT, ["a", "bcd"], None)
        assert len(trajectory.segments[0]) == 50
    shorter = hold(Bounded("a", "b"), FOREVER, limits=Limits(context=47))
    assert (shorter.stop, len(shorter.segments[0])) == (Stop.CONTEXT, 23)
    long = hold(Bounded("a"), SingleTurn, row=a_row("x" * 60))
    assert long.error is not None
    assert (long.error.kind, long.segments) == ("row", [])
    assert "the prompt has 79 tokens and the engine's context is 50" in long.error.message


class Waits:
    """An environment that takes its time in one place."""

    def __init__(self, place: str, seconds: float = 30.0) -> None:
        self.place, self.seconds, self.closed = place, seconds, 0

    async def begin(self, row: Row) -> Opening:
        await self._wait("begin")
        return Opening(messages=row.messages)

    async def step(self, turn: Turn) -> Reply:
        await self._wait(f"step {turn.index}")
        return user_message("And?")

    async def close(self) -> None:
        self.closed += 1

    async def _wait(self, place: str) -> None:
        if place.startswith(self.place):
            await asyncio.sleep(self.seconds)


def test_deadline_of_a_turn_in_the_environment() -> None:
    user = Waits("step 1")
    trajectory = hold(Says(*"abc"), lambda: user, limits=Limits(seconds_per_turn=1.0))
    assert (trajectory.stop, trajectory.failed, user.closed) == (Stop.DEADLINE, True, 1)
    assert trajectory.error is not None
    assert trajectory.error.kind == "deadline"
    assert trajectory.error.message == (
        "turn 1 took longer than limits.seconds_per_turn=1, most of it in the environment: raise the limit if that needs longer"
    )
    assert trajectory.assistant_texts == ["a", "b"]
    assert 0.9 < trajectory.seconds < 30


def test_deadline_of_a_turn_in_the_engine() -> None:
    engine = Says("a", seconds=30.0)
    trajectory = hold(engine, SingleTurn, limits=Limits(seconds_per_turn=0.05))
    assert trajectory.error is not None
    assert trajectory.error.message == (
        "turn 0 took longer than limits.seconds_per_turn=0.05, most of it in the engine. The machine may be slow or busy: "
        "raise the limit, or lower limits.tokens_per_turn or max_concurrent"
    )
    assert (trajectory.turns, engine.released) == ([], ["1/0"])
    assert spoken(trajectory.segments[0]) == [(-1, OPENING)]


def test_deadline_of_a_conversation() -> None:
    trajectory = hold(Says(*"abcdefgh"), lambda: Waits("step 2"), limits=Limits(seconds=1.0))
    assert (trajectory.stop, trajectory.failed) == (Stop.DEADLINE, True)
    assert trajectory.error is not None
    assert trajectory.error.message == (
        "the conversation was in turn 2 when limits.seconds=1 was over, most of it in the environment: raise the limit if that "
        "needs longer"
    )
    assert trajectory.assistant_texts == ["a", "b", "c"]
    slow_start = hold(Says("a"), lambda: Waits("begin"), limits=Limits(seconds=0.05, seconds_per_turn=None))
    assert (slow_start.stop, slow_start.turns) == (Stop.DEADLINE, [])


def test_no_deadline_where_there_is_none() -> None:
    limits = Limits(turns=1, seconds=None, seconds_per_turn=None)
    trajectory = hold(Says("a"), lambda: Waits("step", 0.01), limits=limits)
    assert (trajectory.stop, trajectory.error) == (Stop.MAX_TURNS, None)
    assert trajectory.turns[0].seconds_environment >= 0.009


# what breaks


def the_failure(trajectory: Trajectory) -> tuple[str, str]:
    assert trajectory.stop is Stop.ERROR
    assert trajectory.failed
    assert trajectory.error is not None
    return trajectory.error.kind, trajectory.error.message


def test_an_engine_that_dies_in_the_middle() -> None:
    user = Waits("nowhere")
    engine = Says("a", EngineError("the engine is dead; restart it"))
    trajectory = hold(engine, lambda: user)
    assert the_failure(trajectory) == ("engine", "the engine is dead; restart it")
    assert trajectory.assistant_texts == ["a"]
    assert spoken(trajectory.segments[0]) == [(-1, OPENING), (0, "a<|im_end|>"), (-1, AND)]
    assert (user.closed, engine.released) == (1, ["1/0"])
    assert the_failure(hold(Says(ConnectionError("refused")))) == ("engine", "ConnectionError: refused")
    assert the_failure(hold(Says(TimeoutError("slow")))) == ("engine", "TimeoutError: slow")


def test_an_engine_whose_columns_differ_in_length() -> None:
    class Careless(Says):
        async def generate(self, request: Request) -> Completion:
            answer = await super().generate(request)
            return Completion(
                token_ids=answer.token_ids,
                logprobs=answer.logprobs[1:],
                versions=answer.versions,
                finish_reason="stop",
                logprob_kind=answer.logprob_kind,
            )

    trajectory = hold(Careless("ab"))
    assert the_failure(trajectory) == (
        "engine",
        "ValueError: the engine returned 3 token ids, 2 log-probabilities and 3 versions; all three must have the same length",
    )
    assert spoken(trajectory.segments[0]) == [(-1, OPENING)]  # nothing of it was written


def test_an_engine_that_answers_with_ids_that_are_none() -> None:
    trajectory = hold(Says([70, 2**40, STOP]))
    assert the_failure(trajectory)[0] == "engine"
    (segment,) = trajectory.segments
    assert {len(segment.token_ids), len(segment.logprobs), len(segment.turn), len(segment.version)} == {21}


class Breaks(SingleTurn):
    """Raises in one place."""

    def __init__(self, place: str) -> None:
        self.place = place
        if place == "factory":
            raise OSError("no port is free")

    async def begin(self, row: Row) -> Opening:
        if self.place == "begin":
            raise ValueError("the row does not suit me")
        return await super().begin(row)

    async def step(self, turn: Turn) -> Reply:
        if self.place == "step":
            raise KeyError("a key with 'quotes'")
        return await super().step(turn)

    async def close(self) -> None:
        if self.place == "close":
            raise RuntimeError("locked")


@pytest.mark.parametrize(
    ("place", "message", "turns"),
    [
        ("factory", "OSError: no port is free", 0),
        ("begin", "ValueError: the row does not suit me", 0),
        ("step", "KeyError: a key with 'quotes'", 1),
    ],
)
def test_an_environment_that_raises(place: str, message: str, turns: int) -> None:
    engine = Says("a")
    trajectory = hold(engine, lambda: Breaks(place))
    assert the_failure(trajectory) == ("environment", message)
    assert len(trajectory.turns) == turns
    assert engine.released == ["1/0"]


def test_an_environment_that_cannot_be_closed_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    trajectory = hold(Says("a"), lambda: Breaks("close"))
    assert (trajectory.stop, trajectory.error) == (Stop.DONE, None)
    assert caplog.messages == ["the environment of 1/0 could not be closed: RuntimeError: locked"]


class Answers(SingleTurn):
    """Begins and answers with whatever it was given."""

    def __init__(self, opening: Any = None, reply: Any = None) -> None:
        self.opening, self.reply = opening, reply

    async def begin(self, row: Row) -> Opening:
        return self.opening or Opening(messages=row.messages)

    async def step(self, turn: Turn) -> Reply:
        return self.reply


@pytest.mark.parametrize(
    ("reply", "part"),
    [
        (None, "NoneType"),
        ("Try again.", "str"),
        ({"role": "user", "content": "No."}, "dict"),
        (Reply(messages="No."), "messages must be a list of {'role': ..., 'content': ...}; one of them is 'N'"),
        (Reply(messages={"role": "user", "content": "No."}), "one of them is 'role'"),  # type: ignore[arg-type]
        (Reply(messages=[{"content": "No."}]), "one of them is {'content': 'No.'}"),
        (Reply(rewrite=["Hi"]), "one of them is 'Hi'"),  # type: ignore[list-item]
        (Reply(reward="1.0"), "TypeError: Reply(reward=...) gave the text '1.0'; a reward must be a number"),  # type: ignore[arg-type]
        (Reply(info=5), "TypeError"),  # type: ignore[arg-type]
    ],
)
def test_an_answer_that_is_no_reply_breaks_its_own_conversation_only(reply: Any, part: str) -> None:
    environments = iter([Answers(reply=reply), SingleTurn()])
    bad, good = hold_all(Says("a", "b"), lambda: next(environments), size=2)
    kind, message = the_failure(bad)
    assert kind == "environment"
    assert part in message
    assert bad.messages == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a"}]
    assert (good.stop, good.error) == (Stop.DONE, None)


def test_a_text_for_a_final_reward_is_no_number() -> None:
    class Settled(Answers):
        async def final_reward(self) -> Any:
            return "1.0"

    one = hold(Says("a"), lambda: Settled(reply=user_message("And?")), limits=Limits(turns=1))
    assert the_failure(one) == (
        "environment",
        "TypeError: final_reward() gave the text '1.0'; a reward must be a number: convert it with float(...)",
    )


@pytest.mark.parametrize(
    ("opening", "part"),
    [
        (Opening(messages=[]), "the environment's Opening has no messages; there is nothing to answer"),
        (["Hi"], "list"),
        (Opening(messages="Hi"), "messages"),  # type: ignore[arg-type]
        (Opening(messages=[{"content": "Hi"}]), "messages"),
    ],
)
def test_an_opening_that_is_none_breaks_its_own_conversation_only(opening: Any, part: str) -> None:
    trajectory = hold(Says("a"), lambda: Answers(opening=opening))
    kind, message = the_failure(trajectory)
    assert kind == "environment"
    assert part in message
    assert (trajectory.messages, trajectory.turns) == ([], [])


def test_content_that_is_no_text_breaks_its_own_conversation_only() -> None:
    reply = Reply(messages=[{"role": "user", "content": [{"type": "image"}]}])
    kind, message = the_failure(hold(Says("a", "b"), lambda: Answers(reply=reply)))
    assert (kind, message.partition(",")[0]) == ("tokens", "a message contains an image or a video")


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_bad_sibling_does_not_hurt_the_group(lockstep: bool) -> None:
    troubles = iter(["", "raise", "", "engine"])

    class Dies(Says):
        async def generate(self, request: Request) -> Completion:
            if request.conversation == "1/3":
                raise EngineError("dead")
            return await super().generate(request)

    def make() -> Any:
        trouble = next(troubles)

        @environment
        async def visits(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
            turn = yield Opening(messages=row.messages)
            if trouble == "raise":
                raise RuntimeError("boo")
            turn = yield user_message("And?")
            yield Reply(reward=1.0, done=True, info={"said": turn.text})

        return visits()

    trajectories = hold_all(Dies("a", "b"), make, size=4, lockstep=lockstep)
    assert [one.stop for one in trajectories] == ["done", "error", "done", "error"]
    assert [one.error.kind if one.error else None for one in trajectories] == [None, "environment", None, "engine"]
    assert [one.turns[-1].info for one in trajectories if not one.failed] == [{"said": "b"}] * 2


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_hanging_sibling_does_not_hurt_the_group(lockstep: bool) -> None:
    made: list[Waits] = []

    def make() -> Waits:
        made.append(Waits("step 0" if len(made) == 1 else "nowhere"))
        return made[-1]

    class Slower(Says):
        async def generate(self, request: Request) -> Completion:
            await asyncio.sleep(0.1 if len(request.token_ids) > 21 else 0.0)  # longer prompts take longer
            return await super().generate(request)

    limits = Limits(turns=3, seconds_per_turn=3.0)  # the others need little, also on a busy machine
    trajectories = hold_all(Slower("a", "b", "c"), make, size=4, lockstep=lockstep, limits=limits)
    assert [one.stop for one in trajectories] == ["max_turns", "deadline", "max_turns", "max_turns"]
    assert [one.closed for one in made] == [1, 1, 1, 1]


def test_cancelling_closes_every_environment_and_releases_every_conversation() -> None:
    made: list[Waits] = []

    def make() -> Waits:
        made.append(Waits("step 0"))
        return made[-1]

    for lockstep in (False, True):
        made.clear()
        engine = Says("a")
        groups = [new_group(a_row(id=str(n)), size=2, seed=0) for n in range(2)]

        async def cancelled(engine: Says = engine, groups: Any = groups, lockstep: bool = lockstep) -> None:
            task = asyncio.create_task(rollout_groups(groups, a_table(engine, make, lockstep=lockstep)))
            await asyncio.sleep(0.03)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert task.cancelled()
            await asyncio.sleep(0)

        asyncio.run(cancelled())
        assert [one.closed for one in made] == [1] * 4
        assert sorted(engine.released) == ["0/0", "0/1", "1/0", "1/1"]
        assert [one.stop for group in groups for one in group.trajectories] == [None] * 4


# what goes on


def test_a_reply_without_messages_lets_the_model_go_on() -> None:
    @environment
    async def nods(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
        yield Opening(messages=row.messages)
        yield Reply(reward=0.5)
        yield Reply(reward=0.25, done=True)

    trajectory = hold(Says("a", "b"), nods)
    assert (trajectory.stop, trajectory.template_mismatch) == ("done", None)
    assert spoken(trajectory.segments[0])[1:] == [(0, "a<|im_end|>"), (-1, f"\n{CUE}"), (1, "b<|im_end|>")]
    assert [turn.reward for turn in trajectory.turns] == [0.5, 0.25]


def test_a_turn_that_ends_with_a_stop_text_is_closed_by_the_bridge() -> None:
    class StopsAtText(Says):
        async def generate(self, request: Request) -> Completion:
            answer = await super().generate(request)
            return completion(answer.token_ids)  # finish_reason="stop", though there is no stop token

    engine = StopsAtText(RENDERER.encode("a###"), "b")
    trajectory = hold(engine, lambda: ScriptedUser(["And?"]), sampling=Sampling(stop=("###",), temperature=0.5))
    assert spoken(trajectory.segments[0])[1:] == [
        (0, "a###"),
        (-1, f"<|im_end|>{AND}"),
        (1, "b<|im_end|>"),
    ]
    assert trajectory.template_mismatch is None
    sampling = engine.requests[0].sampling
    assert (sampling.stop, sampling.stop_token_ids, sampling.temperature) == (("###",), (2,), 0.5)


def test_a_rewritten_history_opens_a_new_segment() -> None:
    @environment
    async def forgets(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
        turn = yield Opening(messages=row.messages)
        short = [{"role": "system", "content": f"You said {turn.text}."}, {"role": "user", "content": "Hi again"}]
        turn = yield Reply(rewrite=short, reward=1.0)
        turn = yield Reply(rewrite=turn_back, messages=[{"role": "user", "content": "And?"}], reward=2.0)
        yield Reply(done=True, reward=4.0)

    turn_back = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a"}]
    engine = Says("a", "b", "c")
    trajectory = hold(engine, forgets)
    assert (trajectory.stop, trajectory.error, trajectory.template_mismatch) == ("done", None, None)
    assert [spoken(segment) for segment in trajectory.segments] == [
        [(-1, OPENING), (0, "a<|im_end|>")],
        [
            (-1, f"<|im_start|>system\nYou said a.<|im_end|>\n<|im_start|>user\nHi again<|im_end|>\n{CUE}"),
            (1, "b<|im_end|>"),
        ],
        [(-1, f"{OPENING}a<|im_end|>{AND}"), (2, "c<|im_end|>")],  # what it said once is context now
    ]
    assert [message["content"] for message in trajectory.messages] == ["Hi", "a", "And?", "c"]
    assert [turn.reward for turn in trajectory.turns] == [1.0, 2.0, 4.0]
    assert trajectory.assistant_texts == ["a", "b", "c"]
    assert list(engine.requests[1].token_ids) == list(trajectory.segments[1].token_ids[:-2])


def test_the_context_is_that_of_a_segment_and_the_tokens_those_of_all() -> None:
    @environment
    async def forgets(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
        yield Opening(messages=row.messages)
        while True:
            yield Reply(rewrite=row.messages)

    trajectory = hold(Says(*["abc"] * 9), forgets, limits=Limits(turns=9, context=25, tokens=14))
    assert trajectory.stop is Stop.MAX_TOKENS
    assert [len(segment) for segment in trajectory.segments] == [25, 25, 25, 23]


def test_a_rewritten_history_that_does_not_fit_ends_the_conversation_whole() -> None:
    @environment
    async def rambles(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
        yield Opening(messages=row.messages)
        yield Reply(rewrite=[{"role": "user", "content": "x" * 100}])

    trajectory = hold(Says("a", "b"), rambles, limits=Limits(context=60))
    assert (trajectory.stop, trajectory.error, len(trajectory.segments)) == (Stop.CONTEXT, None, 1)


def test_the_numbers_of_calls_go_on_over_turns_and_segments() -> None:
    async def f() -> str:
        """Do it."""
        return "done"

    engine = Says(call("f") + call("f"), call("f"), "bye")
    trajectory = hold(engine, lambda: Tools([f]))
    assert [[one.id for one in turn.calls] for turn in trajectory.turns] == [["call_0", "call_1"], ["call_2"], []]
    assert [message.get("tool_call_id") for message in trajectory.messages] == [
        None, None, "call_0", "call_1", None, "call_2", None
    ]  # fmt: skip


def test_versions_are_recorded_token_by_token() -> None:
    class Updated(Says):
        async def generate(self, request: Request) -> Completion:
            answer = await super().generate(request)
            self.version += 1  # the weights change in the middle of the conversation
            return answer

    trajectory = hold(Updated("a", "b"), lambda: ScriptedUser(["And?"]))
    (segment,) = trajectory.segments
    assert list(segment.version) == [-1] * 21 + [0, 0] + [-1] * 24 + [1, 1]
    assert list(segment.turn) == [-1] * 21 + [0, 0] + [-1] * 24 + [1, 1]


# ids, seeds, company


def test_ids_and_seeds_are_made_of_seed_prefix_row_and_number() -> None:
    row = a_row(id="r7")
    group = new_group(row, size=3, seed=1, prefix="2.0:")
    assert (group.id, group.row) == ("2.0:r7", row)
    assert [one.id for one in group.trajectories] == ["2.0:r7/0", "2.0:r7/1", "2.0:r7/2"]
    assert {one.group for one in group.trajectories} == {"2.0:r7"}
    seeds = [one.seed for one in group.trajectories]
    assert seeds == [one.seed for one in new_group(row, size=4, seed=1, prefix="2.0:").trajectories[:3]]
    others = [new_group(row, size=3, seed=2, prefix="2.0:"), new_group(row, size=3, seed=1, prefix="2.1:")]
    assert len({*seeds, *(one.seed for group in others for one in group.trajectories)}) == 9
    assert new_group(a_row(), size=1, seed=0).trajectories[0].seed == 7149609064476661333


def test_every_turn_has_a_seed_of_its_own_that_no_company_changes() -> None:
    def seeds(size: int, **table: Any) -> list[tuple[str, int]]:
        engine = Says("a", "b")
        hold_all(engine, lambda: ScriptedUser(["And?"]), size=size, **table)
        return sorted((request.conversation, request.seed) for request in engine.requests)

    alone = seeds(1)
    assert len({seed for _, seed in alone}) == 2
    assert all(0 <= seed < 2**63 for _, seed in alone)
    assert set(alone) < set(seeds(3)) == set(seeds(3, concurrent=1)) == set(seeds(3, lockstep=True))
    assert len({seed for _, seed in seeds(3)}) == 6


@pytest.mark.parametrize("concurrent", [1, 3, 100])
def test_no_more_conversations_are_held_at_once_than_allowed(concurrent: int) -> None:
    open_now, most = 0, 0

    class Counts(SingleTurn):
        async def begin(self, row: Row) -> Opening:
            nonlocal open_now, most
            open_now += 1
            most = max(most, open_now)
            return await super().begin(row)

        async def close(self) -> None:
            nonlocal open_now
            open_now -= 1

    engine = Says("a", seconds=0.002)
    trajectories = hold_all(engine, Counts, size=8, concurrent=concurrent)
    assert [one.stop for one in trajectories] == ["done"] * 8
    assert (most, engine.together, open_now) == (min(concurrent, 8), min(concurrent, 8), 0)


def test_done_is_awaited_once_for_each_conversation_that_ended_also_the_broken_ones() -> None:
    ended: list[str] = []

    async def done(trajectory: Trajectory) -> None:
        assert trajectory.stop is not None
        await asyncio.sleep(0)
        ended.append(trajectory.id)

    for lockstep in (False, True):
        ended.clear()
        groups = [new_group(a_row(id=str(n)), size=2, seed=0) for n in range(2)]
        engine = scripted(["a"], ["b"], ["c"])  # and none for the fourth
        asyncio.run(rollout_groups(groups, a_table(engine, lockstep=lockstep, concurrent=3), on_finished=done))
        assert sorted(ended) == ["0/0", "0/1", "1/0", "1/1"]
        assert [one.failed for group in groups for one in group.trajectories] == [False, False, False, True]


def test_one_trajectory_and_one_group_can_be_held_by_themselves() -> None:
    group = new_group(a_row(), size=2, seed=0)
    assert asyncio.run(rollout_group(group, a_table(Says("a")))) is group
    (one,) = new_group(a_row(), size=1, seed=0).trajectories
    assert asyncio.run(rollout(one, a_table(Says("b")))) is one
    assert [*(each.assistant_texts for each in group.trajectories), one.assistant_texts] == [["a"], ["a"], ["b"]]


@pytest.mark.parametrize("lockstep", [False, True])
def test_another_runner_runs_the_conversations_of_a_context(lockstep: bool) -> None:
    started: list[str] = []

    def make_runner(context: RolloutContext) -> Runner:
        async def run(trajectory: Trajectory) -> Trajectory:
            started.append(trajectory.id)
            return await rollout(trajectory, replace(context, engine=Says(f"of {trajectory.id}")))

        return run

    context = a_table(Says("here"), lockstep=lockstep)
    if lockstep:
        with pytest.raises(ConfigError, match=r"deterministic=true .* make_runner.* set runner_supports_lockstep=True"):
            replace(context, make_runner=make_runner)
    context = replace(context, make_runner=make_runner, runner_supports_lockstep=lockstep)
    group = new_group(a_row(id="7"), size=2, seed=0)
    asyncio.run(rollout_group(group, context))
    assert started == ["7/0", "7/1"]
    assert [one.answer for one in group.trajectories] == ["of 7/0", "of 7/1"]


def longer_and_longer(n: int) -> Callable[[], ScriptedUser]:
    return lambda: ScriptedUser(["And?"] * n)


def test_lockstep_gives_the_same_trajectories() -> None:
    def conversations(**table: Any) -> list[tuple[Any, ...]]:
        users = iter([3, 0, 1, 2, 5])
        scripts = {f"1/{n}": [f"{n}{letter}" for letter in "abcdefgh"] for n in range(5)}
        engine = ScriptedEngine(scripts, encode=RENDERER.encode, stop_token_id=STOP)
        trajectories = hold_all(engine, lambda: ScriptedUser(["And?"] * next(users)), size=5, **table)
        return [(one.id, one.assistant_texts, one.stop, one.messages, one.segments) for one in trajectories]

    free = conversations()
    assert [len(said) for _, said, *_ in free] == [4, 1, 2, 3, 6]
    assert free == conversations(lockstep=True) == conversations(lockstep=True, concurrent=2)


def test_lockstep_asks_in_batches_that_depend_on_no_timing() -> None:
    def batches(delays: list[float]) -> list[tuple[str, int]]:
        """The order in which the engine was asked: conversation and length of the prompt."""
        engine = Says(*"abcdef")
        waits = iter(delays)

        def make() -> Any:
            delay = next(waits)

            @environment
            async def user(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
                await asyncio.sleep(delay)
                yield Opening(messages=row.messages)
                for _ in range(round(delay * 1000) % 3):
                    yield user_message("And?")
                yield Reply(done=True)

            return user()

        hold_all(engine, make, size=4, lockstep=True)
        return [(request.conversation, len(request.token_ids)) for request in engine.requests]

    # turns: delay in ms modulo 3, and one
    assert batches([0.004, 0.002, 0.006, 0.001]) == [
        ("1/0", 21), ("1/1", 21), ("1/2", 21), ("1/3", 21),
        ("1/0", 47), ("1/1", 47), ("1/3", 47),
        ("1/1", 73),
    ]  # fmt: skip
    assert batches([0.004, 0.002, 0.006, 0.001]) == batches([0.001, 0.005, 0.000, 0.007])


def test_the_loop_is_quick_enough_for_a_thousand_conversations() -> None:
    started = time.perf_counter()
    trajectories = hold_all(Says("a", "b"), lambda: ScriptedUser(["And?"]), size=500)
    assert {one.stop for one in trajectories} == {Stop.DONE}
    assert time.perf_counter() - started < 60
