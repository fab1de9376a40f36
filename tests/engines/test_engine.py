"""What all engines share: requests in batches, the scripted engine, endpoints over HTTP, and what a new engine needs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
import yaml
from pydantic import Tag
from rich.console import Console

from support.conversations import RENDERER, STOP, Says, a_row, hold_all
from support.recipes import save_recipe
from support.servers import Answer, Server, serving
from support.tiny import save_rows
from support.training import train_silently
from turnwise import record
from turnwise.assembly.engines import ENGINES, EngineInputs
from turnwise.config.engine_checks import refuse_engine, refuse_without_effect_when_serving
from turnwise.engines.engine import Batched, SharedWeights, WeightPublisher, WeightSource
from turnwise.engines.scripted import ScriptedEngine
from turnwise.environments.calculator import calculator
from turnwise.environments.environment import Environment, SingleTurn
from turnwise.environments.tools.toolbox import Tools
from turnwise.environments.users import ScriptedUser
from turnwise.errors import EngineError
from turnwise.options.engines import AnyEngine, EngineSection, LocalEngineSection
from turnwise.options.schema import Config
from turnwise.options.section import by_name, named_sections
from turnwise.record.trajectory_json import decode_trajectory, trajectory_record
from turnwise.rollout.context import Limits, TextContext
from turnwise.rollout.rollout import new_group, rollout_group
from turnwise.runs.sampling_only import collect
from turnwise.services.chat import ChatEndpoint
from turnwise.train import assemble
from turnwise.types import (
    AnswerFormat,
    Completion,
    Edit,
    LogprobKind,
    Opening,
    Reply,
    Request,
    Resume,
    Row,
    Sampling,
    SamplingChange,
    Stop,
    Trajectory,
    Usage,
)

# What all engines share: requests in batches, and the scripted engine.


# The adapter that answers all live conversations together.


def a_request(name: str) -> Request:
    return Request(conversation=name, token_ids=[1], sampling=Sampling())


def asked(engine: Says) -> list[str]:
    return [request.conversation for request in engine.requests]


def test_nobody_is_answered_before_all_have_asked_and_then_in_their_order() -> None:
    engine = Says("x")
    batched = Batched(engine, ["a", "b", "c"])

    async def run() -> list[str]:
        first = [asyncio.create_task(batched.generate(a_request(name))) for name in ("c", "a")]
        await asyncio.sleep(0.005)
        assert asked(engine) == []
        assert not any(task.done() for task in first)
        answers = await asyncio.gather(*first, batched.generate(a_request("b")))
        return [RENDERER.decode(answer.token_ids) for answer in answers]

    assert asyncio.run(run()) == ["x<|im_end|>"] * 3
    assert asked(engine) == ["a", "b", "c"]
    assert engine.together == 3


def test_who_is_released_is_no_longer_waited_for() -> None:
    engine = Says("x", "y")
    batched = Batched(engine, ["a", "b", "c"])

    async def run() -> None:
        tasks = [asyncio.create_task(batched.generate(a_request(name))) for name in ("a", "b")]
        await asyncio.sleep(0.002)
        batched.release("c")
        await asyncio.gather(*tasks)
        batched.release("a")
        await batched.generate(a_request("b"))
        batched.release("unknown")

    asyncio.run(run())
    assert asked(engine) == ["a", "b", "b"]
    assert engine.released == ["c", "a", "unknown"]


def test_an_error_reaches_only_the_one_who_asked() -> None:
    class Picky(Says):
        async def generate(self, request: Request) -> Completion:
            if request.conversation == "b":
                raise EngineError("not you")
            return await super().generate(request)

    batched = Batched(Picky("x"), ["a", "b", "c"])

    async def run() -> list[Any]:
        return await asyncio.gather(*(batched.generate(a_request(name)) for name in "abc"), return_exceptions=True)

    a, b, c = asyncio.run(run())
    assert (a.token_ids, c.token_ids) == ([90, 2], [90, 2])
    assert isinstance(b, EngineError)
    assert str(b) == "not you"


def test_who_cancels_is_not_answered_and_the_others_are() -> None:
    engine = Says("x", seconds=0.2)
    batched = Batched(engine, ["a", "b"])

    async def run() -> Completion:
        early = asyncio.create_task(batched.generate(a_request("a")))
        await asyncio.sleep(0)
        early.cancel()  # before the batch has begun
        with contextlib.suppress(asyncio.CancelledError):
            await early
        other = asyncio.create_task(batched.generate(a_request("b")))
        await asyncio.sleep(0.002)
        assert asked(engine) == []  # `a` is alive, and may ask again
        again = asyncio.create_task(batched.generate(a_request("a")))
        await asyncio.sleep(0.01)
        again.cancel()  # in the middle of the batch
        answer = await other
        assert again.cancelled()
        return answer

    assert asyncio.run(run()).token_ids == [90, 2]
    assert asked(engine) == ["a", "b"]


def test_versions_weights_and_closing_are_those_of_the_engine() -> None:
    class Closes(Says):
        closed = 0

        async def close(self) -> None:
            self.closed += 1

    engine = Closes("x")
    batched = Batched(engine, ["a"])
    asyncio.run(batched.load_weights(3))
    asyncio.run(batched.close())
    assert (batched.version, engine.version, engine.closed) == (3, 3, 1)


# The scripted engine says its lines.


def engine(scripts: Any) -> ScriptedEngine:
    return ScriptedEngine(scripts, encode=RENDERER.encode, stop_token_id=STOP)


def ask(who: ScriptedEngine, *conversations: str, max_tokens: int = 99) -> list[Completion]:
    """Ask for a turn of each of these conversations, one after the other."""

    async def all_of_them() -> list[Completion]:
        requests = [
            Request(conversation=name, token_ids=[1], sampling=Sampling(max_tokens=max_tokens))
            for name in conversations
        ]
        return [await who.generate(request) for request in requests]

    return asyncio.run(all_of_them())


def texts(answers: Sequence[Completion]) -> list[str]:
    return [RENDERER.decode(answer.token_ids) for answer in answers]


def test_a_text_is_encoded_and_closed_and_nothing_was_sampled() -> None:
    (answer,) = ask(engine({"a": ["Hi"]}), "a")
    assert answer == Completion(
        token_ids=[42, 75, 2],
        logprobs=[0.0, 0.0, 0.0],
        versions=[0, 0, 0],
        finish_reason="stop",
        logprob_kind=LogprobKind.NONE,
    )
    (empty,) = ask(engine({"a": [""]}), "a")
    assert (empty.token_ids, empty.finish_reason) == ([2], "stop")


def test_a_text_is_cut_where_fewer_tokens_are_allowed() -> None:
    (cut,) = ask(engine({"a": ["Hello"]}), "a", max_tokens=5)
    assert (RENDERER.decode(cut.token_ids), cut.finish_reason, len(cut.logprobs)) == ("Hello", "length", 5)
    (whole,) = ask(engine({"a": ["Hello"]}), "a", max_tokens=6)
    assert (RENDERER.decode(whole.token_ids), whole.finish_reason) == ("Hello<|im_end|>", "stop")


def test_named_scripts_are_said_turn_by_turn_in_whatever_order() -> None:
    who = engine({"a": ["a0", "a1"], "b": ["b0"]})
    assert texts(ask(who, "a", "b", "a")) == ["a0<|im_end|>", "b0<|im_end|>", "a1<|im_end|>"]
    with pytest.raises(
        EngineError, match=r"the script of 'b' has 1 texts and the conversation asks for number 2; add a"
    ):
        ask(who, "b")
    with pytest.raises(EngineError, match="there is no script for the conversation 'c'"):
        ask(who, "c")


def test_a_list_is_handed_out_in_the_order_of_the_first_questions() -> None:
    who = engine([["x0", "x1"], ["y0"]])
    assert texts(ask(who, "late", "early", "late")) == ["x0<|im_end|>", "y0<|im_end|>", "x1<|im_end|>"]
    with pytest.raises(EngineError, match="all scripts are handed out, and 'third' asks for one more"):
        ask(who, "third")


def test_a_released_conversation_begins_anew() -> None:
    who = engine({"a": ["a0", "a1"]})
    assert texts(ask(who, "a")) == ["a0<|im_end|>"]
    who.release("a")
    who.release("unknown")
    assert texts(ask(who, "a", "a")) == ["a0<|im_end|>", "a1<|im_end|>"]


def test_tokens_carry_the_version_that_was_loaded() -> None:
    who = engine({"a": ["x", "y"]})
    asyncio.run(who.load_weights(7))
    (answer,) = ask(who, "a")
    assert (who.version, answer.versions) == (7, [7, 7])
    asyncio.run(who.close())


def test_a_script_that_is_too_short_breaks_its_own_conversation() -> None:
    trajectories = hold_all(engine({"1/0": ["a"], "1/1": ["a", "b"]}), lambda: ScriptedUser(["And?"]), size=2)
    assert [one.stop for one in trajectories] == ["error", "done"]
    assert trajectories[0].error is not None
    assert trajectories[0].error.kind == "engine"
    assert trajectories[0].assistant_texts == ["a"]


# What a new engine needs: the engine, its section with a line in `AnyEngine`, and a line in the table `ENGINES`.


class CountingSection(EngineSection):
    """Answers with numbers: each token is one larger than the token before it."""

    name: Literal["counting"]
    first: int = 40
    """The first token of each turn."""


class CountingEngine:
    """Its weights are a number that is added to each token."""

    loaded: ClassVar[list[int]] = []

    def __init__(self, first: int, version: int) -> None:
        self._first = first
        self.version = version

    async def start(self) -> None:
        pass

    async def generate(self, request: Request) -> Completion:
        count = request.sampling.max_tokens
        return Completion(
            token_ids=[self._first + number for number in range(count)],
            logprobs=[0.0] * count,
            versions=[self.version] * count,
            finish_reason="length",
            logprob_kind=LogprobKind.NONE,
        )

    def release(self, conversation: str) -> None:
        pass

    async def load_weights(self, version: int, weights: Mapping[str, Any] | None = None) -> None:
        self.version = version
        self.loaded.append(version)

    def publisher(self, learner: WeightSource) -> WeightPublisher:
        return SharedWeights(self)

    async def close(self) -> None:
        pass


def counting(inputs: EngineInputs) -> CountingEngine:
    options: Any = inputs.config.engine
    return CountingEngine(options.first, inputs.version)


class WithCounting(Config):
    """The schema with one more line in `AnyEngine`."""

    engine: Annotated[  # pyright: ignore[reportIncompatibleVariableOverride]
        AnyEngine | Annotated[CountingSection, Tag("counting")], by_name("local")
    ] = LocalEngineSection()


@pytest.fixture
def config(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setitem(ENGINES, "counting", counting)
    monkeypatch.setattr(CountingEngine, "loaded", [])
    recipe = save_recipe(
        tmp_path,
        model,
        limits={"turns": 1, "tokens_per_turn": 3},
        train={"steps": 2, "batch_size": 1, "group_size": 2},
        data={"train": str(save_rows(tmp_path / "train.jsonl", 2))},
        engine={"name": "counting", "first": 50},
    )
    return WithCounting.model_validate(yaml.safe_load(recipe.read_text()))


def sampled(file: Path) -> list[list[int]]:
    return [
        [token for token, turn in zip(segment.token_ids, segment.turn, strict=True) if turn >= 0]
        for trajectory in record.read(file)
        for segment in trajectory.segments
    ]


def test_a_new_engine_answers_the_conversations_of_a_recipe(config: Config, tmp_path: Path) -> None:
    assert named_sections(WithCounting)["engine"]["counting"] is CountingSection
    refuse_engine(config)
    refuse_without_effect_when_serving(config)
    with open(os.devnull, "w") as nowhere:
        summary = asyncio.run(collect(config, tmp_path / "out", Console(file=nowhere)))
    assert (summary["conversations"], summary["failed"]) == (2, 0.0)
    assert sampled(tmp_path / "out" / "trajectories.jsonl") == [[50, 51, 52], [50, 51, 52]]


def test_a_new_engine_trains_and_gets_the_weights_of_each_step(config: Config) -> None:
    train_silently(assemble(config))
    assert sampled(Path(config.output) / "trajectories.jsonl") == [[50, 51, 52]] * 4
    assert CountingEngine.loaded == [1, 2]


# Conversations with an endpoint: the one loop, and a real HTTP server that speaks the OpenAI protocol


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
