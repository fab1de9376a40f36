"""Conversations with an endpoint: the one loop, and a real HTTP server that speaks the OpenAI protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from support.conversations import a_row
from support.servers import Answer, Server, serving
from turnwise.environments.calculator import calculator
from turnwise.environments.environment import Environment, SingleTurn
from turnwise.environments.tools.toolbox import Tools
from turnwise.environments.users import ScriptedUser
from turnwise.record.trajectory_json import decode_trajectory, trajectory_record
from turnwise.rollout.context import Limits, TextContext
from turnwise.rollout.rollout import new_group, rollout_group
from turnwise.services.chat import ChatEndpoint
from turnwise.types import (
    AnswerFormat,
    Edit,
    Opening,
    Reply,
    Resume,
    Row,
    Sampling,
    SamplingChange,
    Stop,
    Trajectory,
    Usage,
)

FULL = Answer({"error": {"code": "context_length_exceeded"}}, 400)


def said(
    content: str | None,
    *calls: tuple[str, str, str],
    reason: str = "stop",
    usage: Sequence[int] | None = (10, 5),
    **more: Any,
) -> Answer:
    message: dict[str, Any] = {"role": "assistant", "content": content, **more}
    if calls:
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, name, arguments in calls
        ]
    counts = {} if usage is None else {"usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}}
    return Answer({"choices": [{"message": message, "finish_reason": reason}], **counts})


def hold(
    *answers: Answer,
    make: Callable[[], Environment] = SingleTurn,
    row: Row | None = None,
    limits: Limits | None = None,
    sampling: Sampling | None = None,
    **options: Any,
) -> tuple[Trajectory, Server]:
    """One conversation, and the server that answered it."""
    with serving(lambda question, number: answers[number]) as server:
        endpoint = ChatEndpoint(server.url, "m", pause=0.0, **options)
        context = TextContext(
            chat=endpoint,
            make_environment=make,
            sampling=sampling or Sampling(),
            limits=limits or Limits(turns=8, tokens_per_turn=100),
        )
        group = new_group(row or a_row(), size=1, seed=3)
        asyncio.run(rollout_group(group, context))
    return group.trajectories[0], server


def test_messages_and_sampling_are_sent_and_the_answer_is_a_turn() -> None:
    sampling = Sampling(temperature=0.5, top_p=0.9, stop=("###",))
    trajectory, server = hold(said("Four.", usage=(12, 3)), sampling=sampling)
    (asked,) = server.asked
    seed = asked.pop("seed")
    assert asked == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["###"],
        "max_tokens": 100,
    }
    assert 0 <= seed < 2**31
    (turn,) = trajectory.turns
    assert (turn.text, turn.message, turn.finish_reason) == ("Four.", {"role": "assistant", "content": "Four."}, "stop")
    assert (turn.usage, trajectory.sampled_tokens) == (Usage(prompt_tokens=12, completion_tokens=3), 3)
    assert (trajectory.stop, trajectory.error, trajectory.segments) == (Stop.DONE, None, [])
    again, _ = hold(said("Four.", usage=(12, 3)), sampling=sampling)
    other = trajectory_record(again)
    assert [other["turns"][0]["usage"]] == [{"prompt_tokens": 12, "completion_tokens": 3}]
    assert decode_trajectory(other, where="x").turns[0].usage == turn.usage


def test_native_tool_calls_are_run_and_their_results_are_sent_back() -> None:
    trajectory, server = hold(
        said(None, ("a1", "calculator", '{"expression": "2+2"}'), reason="tool_calls", reasoning_content="Hm."),
        said("It is 4."),
        make=lambda: Tools([calculator], then=SingleTurn()),
    )
    assert trajectory.error is None
    assert [outcome.content for outcome in trajectory.turns[0].outcomes] == ["4"]
    assert trajectory.turns[0].reasoning == "Hm."
    assert [tool["function"]["name"] for tool in server.asked[0]["tools"]] == ["calculator"]
    call = {"id": "a1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "2+2"}'}}
    assert server.asked[1]["messages"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},  # without the reasoning
        {"role": "tool", "content": "4", "tool_call_id": "a1"},
    ]


@pytest.mark.parametrize("arguments", ['{"expression": ', "[1]", "4"])
def test_a_malformed_call_is_told_to_the_model_and_stays_a_call_of_the_protocol(arguments: str) -> None:
    trajectory, server = hold(
        said("", ("a1", "calculator", arguments), ("a2", "calculator", '{"expression": "1+1"}')),
        said("Sorry."),
        make=lambda: Tools([calculator], then=SingleTurn()),
    )
    assert [outcome.error for outcome in trajectory.turns[0].outcomes] == ["malformed", None]
    assistant, *results = server.asked[1]["messages"][1:]
    assert [call["id"] for call in assistant["tool_calls"]] == [result["tool_call_id"] for result in results]
    assert assistant["tool_calls"][0]["function"]["arguments"] == "{}"
    assert "cannot be parsed" in results[0]["content"]
    assert all(json.loads(call["function"]["arguments"]) is not None for call in assistant["tool_calls"])


def test_reasoning_in_the_content_is_split_off() -> None:
    trajectory, server = hold(
        said("<think>\nLong.\n</think>\n\nShort."), said("b"), make=lambda: ScriptedUser(["And?"])
    )
    assert (trajectory.turns[0].reasoning, trajectory.turns[0].text) == ("Long.", "Short.")
    assert server.asked[1]["messages"][1] == {"role": "assistant", "content": "Short."}


def test_limits_are_applied_to_the_reported_tokens() -> None:
    user = lambda: ScriptedUser(["And?"] * 9)  # noqa: E731
    trajectory, server = hold(
        said("a", usage=(10, 30)),
        said("b", usage=(50, 30)),
        make=user,
        limits=Limits(turns=8, tokens_per_turn=40, tokens=60),
    )
    assert (trajectory.stop, len(trajectory.turns)) == (Stop.MAX_TOKENS, 2)
    assert [asked["max_tokens"] for asked in server.asked] == [40, 30]
    trajectory, server = hold(
        said("a", usage=(10, 30)), make=user, limits=Limits(turns=8, tokens_per_turn=40, context=40)
    )
    assert (trajectory.stop, len(trajectory.turns)) == (Stop.CONTEXT, 1)
    trajectory, _ = hold(said("a", reason="length", usage=(10, 40)), make=user, limits=Limits(tokens_per_turn=40))
    assert (trajectory.stop, trajectory.turns[0].finish_reason) == (Stop.LENGTH, "length")
    trajectory, _ = hold(said("a", usage=None), make=user, limits=Limits(tokens=60))
    assert trajectory.error is not None
    assert "limits.tokens=60 cannot be applied, because the endpoint does not report" in trajectory.error.message


def test_a_full_context_is_a_stop_reason_and_not_an_error() -> None:
    user = lambda: ScriptedUser(["And?"] * 9)  # noqa: E731
    trajectory, server = hold(said("a"), FULL, FULL, make=user)
    assert (trajectory.stop, trajectory.error, len(trajectory.turns)) == (Stop.CONTEXT, None, 1)
    # the prompt fits, and max_tokens beside it does not: the server's own bound is used
    trajectory, server = hold(FULL, said("a", reason="length", usage=(10, 3)))
    assert (trajectory.stop, len(trajectory.turns)) == (Stop.CONTEXT, 1)
    assert ["max_tokens" in asked for asked in server.asked] == [True, False]
    trajectory, _ = hold(FULL, FULL)
    assert trajectory.error is not None
    assert (trajectory.error.kind, trajectory.stop) == ("row", Stop.ERROR)


class Replies:
    """Answers with given replies."""

    def __init__(self, *replies: Reply, opening: Opening | None = None) -> None:
        self._replies, self._opening = list(replies), opening

    async def begin(self, row: Row) -> Opening:
        return self._opening or Opening(messages=row.messages)

    async def step(self, turn: Any) -> Reply:
        return self._replies.pop(0)

    async def close(self) -> None:
        pass


def test_rewrites_tools_and_sampling_changes_reach_the_endpoint() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    changed = Reply(
        rewrite=[{"role": "user", "content": "Anew"}],
        tools=[tool],
        sampling=SamplingChange(max_tokens=7, stop=["!"]),
    )
    trajectory, server = hold(said("a"), said("b"), make=lambda: Replies(changed, Reply(done=True)))
    asked = server.asked[1]
    assert asked["messages"] == [{"role": "user", "content": "Anew"}]
    assert (asked["tools"], asked["max_tokens"], asked["stop"]) == ([tool], 7, ["!"])
    assert [len(history) for history in trajectory.previous_histories] == [2]
    assert [(turn.history, turn.message_index) for turn in trajectory.turns] == [(0, 1), (1, 1)]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(resume=Resume(keep=0)), "Reply(resume=...) changes or begins a turn of the model as text"),
        (Reply(edit=Edit(keep=0)), "Reply(edit=...) changes or begins a turn of the model as text"),
        (Reply(prefill="Sure"), "Reply(prefill=...) changes or begins a turn of the model as text"),
        (
            Reply(messages=[{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]),
            "an OpenAI-compatible endpoint gets text only",
        ),
        (
            Reply(sampling=SamplingChange(answer_format=AnswerFormat(kind="regex", value="yes|no"))),
            "SamplingChange(answer_format=...)): the turns of an OpenAI-compatible endpoint are not sampled under a grammar",
        ),
        (Reply(sampling=SamplingChange(tool_choice="required")), "or leave tool_choice out"),
    ],
)
def test_what_text_cannot_do_fails_the_conversation(reply: Reply, message: str) -> None:
    trajectory, _ = hold(said("a"), make=lambda: Replies(reply))
    assert trajectory.error is not None
    assert message in trajectory.error.message


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (Answer({"error": "no"}, 401), "engine", 'returned the status 401: {"error": "no"}'),
        (
            said("a", reason="stop", tool_calls=7),
            "engine",
            "tool_calls of an endpoint's message must be a list or null; got 7",
        ),
        (said(7), "engine", "the content of an endpoint's message must be a text or null; got 7"),  # type: ignore[arg-type]
    ],
)
def test_an_endpoint_that_fails_fails_its_conversation(answer: Answer, kind: str, message: str) -> None:
    trajectory, _ = hold(answer)
    assert trajectory.error is not None
    assert trajectory.error.kind == kind
    assert message in trajectory.error.message
    assert trajectory.reward is None
