"""Sampling and tools that change in the middle of a conversation."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from support import byte_tokenizer
from support.conversations import RENDERER, Says, call, hold, scripted, spoken
from support.families import family_renderer, template_files
from turnwise.chat.renderer import Renderer
from turnwise.environments.environment import environment, user_message
from turnwise.environments.tools.toolbox import Tools
from turnwise.rollout.context import Limits
from turnwise.sft.replay import lines
from turnwise.types import (
    Message,
    Opening,
    Reply,
    Resume,
    Row,
    Sampling,
    SamplingChange,
    Stop,
    ToolSchema,
    Trajectory,
    Turn,
)

# `Reply(tools=...)`: other tools begin a new segment, rendered in full, and the calls of later turns are read with
# them.


FILES = {path.stem: path for path in template_files()}

real = pytest.mark.skipif(not FILES, reason="no chat templates on this machine: pip install trl==1.16.0")


def schema(name: str, **parameters: str) -> ToolSchema:
    """A tool whose parameters have these types."""
    properties = {parameter: {"type": kind, "description": "A value."} for parameter, kind in parameters.items()}
    function = {
        "name": name,
        "description": f"Does {name}.",
        "parameters": {"type": "object", "properties": properties},
    }
    return {"type": "function", "function": function}


LOOK, COUNT = schema("look", text="string"), schema("count", number="integer")

HI: Message = {"role": "user", "content": "Hi"}

MORE: Message = {"role": "user", "content": "More?"}


def answer(number: int, name: str, content: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{number}", "name": name, "content": content}


@environment
async def replies(
    row: Row, replies: Sequence[Reply], tools: Sequence[ToolSchema] = (LOOK,)
) -> AsyncGenerator[Opening | Reply, Turn]:
    """Offers tools, and replies with these, one after the other."""
    yield Opening(messages=row.messages, tools=tools)
    for reply in replies:
        yield reply
    yield Reply(done=True)


def held(said: list[str], *given: Reply, tools: Sequence[ToolSchema] = (LOOK,), **context: Any) -> Trajectory:
    return hold(said, lambda: replies(replies=given, tools=tools), **context)


def one_pass(renderer: Renderer, messages: Sequence[Message], tools: Any) -> list[int]:
    """The prompt that an inference server makes of a conversation, by the tokenizer alone."""
    text = renderer.tokenizer.apply_chat_template(
        list(messages), tools=list(tools) or None, add_generation_prompt=True, tokenize=False
    )
    return renderer.tokenizer.encode(text, add_special_tokens=False)


def prompt(trajectory: Trajectory, segment: int, turn: int) -> list[int]:
    columns = trajectory.segments[segment]
    return list(columns.token_ids[: columns.turn.index(turn)])


def sound(trajectory: Trajectory) -> Trajectory:
    """Nothing broke, the tokens are the template's, and each sampled token is in one place."""
    assert (trajectory.error, trajectory.template_mismatch) == (None, None)
    sampled = [turn for segment in trajectory.segments for turn in segment.turn if turn >= 0]
    assert len(sampled) == trajectory.sampled_tokens
    return trajectory


def test_other_tools_begin_a_new_segment_that_is_rendered_in_full() -> None:
    said = [call("look", '{"text": "x"}'), call("count", '{"number": 1}'), "Two."]
    seen, found = answer(0, "look", "y"), answer(1, "count", "2")
    trajectory = sound(held(said, Reply(messages=[seen], tools=[COUNT]), Reply(messages=[found])))
    first, second = trajectory.segments
    assert [text for turn, text in spoken(first) if turn >= 0] == [said[0] + "<|im_end|>"]
    assert [text for turn, text in spoken(second) if turn >= 0] == [text + "<|im_end|>" for text in said[1:]]
    assert prompt(trajectory, 0, 0) == one_pass(RENDERER, [HI], [LOOK])
    assert prompt(trajectory, 1, 1) == one_pass(RENDERER, trajectory.messages[:3], [COUNT])
    assert prompt(trajectory, 1, 2) == one_pass(RENDERER, trajectory.messages[:5], [COUNT])
    assert [message["role"] for message in trajectory.messages] == ["user", *["assistant", "tool"] * 2, "assistant"]
    assert trajectory.previous_histories == []
    # what was offered when
    assert [turn.tools for turn in trajectory.turns] == [(LOOK,), (COUNT,), (COUNT,)]
    assert trajectory.tools == (COUNT,)


@pytest.mark.parametrize("same", [[LOOK], (LOOK,), [schema("look", text="string")]])
def test_the_same_tools_begin_no_segment(same: Sequence[ToolSchema]) -> None:
    trajectory = sound(held(["a", "b"], Reply(messages=[MORE], tools=same)))
    assert len(trajectory.segments) == 1
    assert trajectory.tools == (LOOK,)


def test_a_conversation_may_begin_without_tools_get_some_and_lose_them_again() -> None:
    said = [call("look"), call("look"), call("look")]
    given = [Reply(messages=[MORE], tools=[LOOK]), Reply(messages=[answer(0, "look", "y")], tools=[])]
    trajectory = sound(held(said, *given, tools=()))
    assert [[one.name for one in turn.calls] for turn in trajectory.turns] == [[], ["look"], []]
    assert [turn.message["content"] for turn in trajectory.turns] == [said[0], "", said[2]]
    assert [turn.tools for turn in trajectory.turns] == [(), (LOOK,), ()]
    assert len(trajectory.segments) == 3
    assert prompt(trajectory, 2, 2) == one_pass(RENDERER, trajectory.messages[:5], [])


@real
@pytest.mark.parametrize(
    "stem",
    [
        "qwen2_5", "qwen3", "qwen3_5_nothink", "qwen3_instruct_2507", "glm4moe", "llama3_1", "gemma4", "gptoss",
        "lfm2_v2", "nemotron_3_nano",
    ],
)  # fmt: skip
@pytest.mark.parametrize("thinking", ["keep", "branch", "strip_at_user"])
def test_of_real_templates_the_new_segment_is_what_a_server_renders_with_the_new_tools(
    stem: str, thinking: str
) -> None:
    renderer = family_renderer(FILES[stem])

    def calls(number: int, name: str, arguments: dict[str, Any]) -> Message:
        function = {"name": name, "arguments": arguments}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}],
        }

    seen, found = answer(0, "look", "y"), answer(1, "count", "2")
    rounds = [(calls(0, "look", {"text": "x"}), [seen]), (calls(1, "count", {"number": 1}), [found])]
    ending: tuple[Message, list[Message]] = ({"role": "assistant", "content": "Two."}, [])
    said = lines(renderer, [HI], [*rounds, ending], [COUNT])
    trajectory = sound(
        hold(
            scripted(said, renderer=renderer),
            lambda: replies(replies=[Reply(messages=[seen], tools=[COUNT]), Reply(messages=[found])]),
            renderer=renderer,
            thinking=thinking,
        )
    )
    (first,), (second,), third = (turn.calls for turn in trajectory.turns)
    assert (first.name, dict(first.arguments), first.error) == ("look", {"text": "x"}, None)
    # formats that write arguments without types take them from the schema of the new tool
    assert (second.name, dict(second.arguments), second.error) == ("count", {"number": 1}, None)
    assert third == ()
    if renderer.profile.turn.content != "text" or not renderer.profile.reasoning.supported:
        assert prompt(trajectory, 1, 1) == one_pass(renderer, trajectory.messages[:3], [COUNT])
    assert {turn: number for number, one in enumerate(trajectory.segments) for turn in one.turn if turn >= 0}[1] == 1


FORGETS = (
    "{%- for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content if loop.last else message.content.split('</think>')[-1] }}"
    "{%- for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{%- endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Leaves out all thoughts but those of the last message."""


@pytest.mark.parametrize("thinking", ["keep", "branch", "strip_at_user"])
def test_thinking_policies_combine_with_a_change_of_tools(thinking: str) -> None:
    renderer = Renderer(byte_tokenizer(FORGETS), unchecked=["tools shown"])
    said = ["<think>One.</think>a", "<think>Two.</think>b", "<think>Three.</think>c"]
    given = [Reply(messages=[MORE], tools=[COUNT]), user_message("And?")]
    trajectory = sound(hold(scripted(said, renderer=renderer), lambda: replies(replies=given), renderer=renderer,
                            thinking=thinking))  # fmt: skip
    # the new prompt is the template's, which leaves the earlier thought out, under every policy
    assert prompt(trajectory, 1, 1) == one_pass(renderer, trajectory.messages[:3], [COUNT])
    # after it the policy decides as ever
    assert len(trajectory.segments) == (2 if thinking == "keep" else 3)
    served = one_pass(renderer, trajectory.messages[:5], [COUNT])
    assert (prompt(trajectory, -1, 2) == served) == (thinking != "keep")


def test_strip_at_user_strips_where_a_user_speaks_and_not_where_only_the_tools_change() -> None:
    renderer = Renderer(
        byte_tokenizer(FORGETS.replace("loop.last", "true")), unchecked=["tools shown"]
    )  # leaves no thought out
    said = ["<think>One.</think>" + call("look"), "<think>Two.</think>b", "c"]
    given = [Reply(messages=[answer(0, "look", "y")], tools=[COUNT]), user_message("And?")]
    trajectory = sound(hold(scripted(said, renderer=renderer), lambda: replies(replies=given), renderer=renderer,
                            thinking="strip_at_user"))  # fmt: skip
    texts = [renderer.decode(segment.token_ids) for segment in trajectory.segments]
    assert ["One." in text for text in texts] == [True, True, False]
    assert ["Two." in text for text in texts] == [False, True, False]


def test_other_tools_beside_a_rewrite_a_prefill_and_a_change_of_the_sampling() -> None:
    engine = Says("a", "b", "c")
    given = [
        Reply(rewrite=[HI], messages=[MORE], tools=[COUNT]),
        Reply(messages=[MORE], tools=[LOOK], prefill="Let", sampling=SamplingChange(max_tokens=7)),
    ]
    trajectory = sound(hold(engine, lambda: replies(replies=given)))
    assert len(trajectory.segments) == 3
    assert prompt(trajectory, 1, 1) == one_pass(RENDERER, [HI, MORE], [COUNT])
    assert RENDERER.decode(prompt(trajectory, 2, 2)).endswith("<|im_start|>assistant\nLet")
    assert trajectory.turns[2].message["content"] == "Letc"
    assert engine.requests[2].sampling.max_tokens == 7
    assert [turn.tools for turn in trajectory.turns] == [(LOOK,), (COUNT,), (LOOK,)]


def test_the_length_of_the_new_prompt_counts_for_the_limits() -> None:
    limits = Limits(turns=8, tokens_per_turn=50, context=350)
    long = schema("x" * 400, text="string")
    trajectory = held(["a", "b"], Reply(messages=[MORE], tools=[long]), limits=limits)
    assert (trajectory.stop, len(trajectory.turns), len(trajectory.segments)) == (Stop.CONTEXT, 1, 1)
    assert (trajectory.error, trajectory.template_mismatch) == (None, None)


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (Reply(tools=[COUNT], done=True), r"Reply\(tools=..., done=True\): there is no following turn"),
        (Reply(tools=[COUNT], resume=Resume()), r"Reply\(resume=..., tools=...\): the prompt of the resumed turn already lists"),
        (Reply(tools="look"), r"Reply\(tools='look'\): tools must be a list of schemas"),
        (Reply(tools=[{"name": "look"}]), r"one of them is \{'name': 'look'\}; each must be a schema in the OpenAI"),
        (Reply(tools=[LOOK, LOOK]), r"two tools have the name 'look'"),
    ],
)  # fmt: skip
def test_tools_that_make_no_sense_break_their_own_conversation(reply: Reply, why: str) -> None:
    trajectory = held(["a", "b"], reply)
    assert trajectory.error is not None
    assert trajectory.error.kind == "environment"
    assert re.search(why, trajectory.error.message), trajectory.error.message


def test_a_template_without_tools_refuses_those_that_come_later() -> None:
    renderer = Renderer(byte_tokenizer("{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
                                       "{% if add_generation_prompt %}assistant: {% endif %}"))  # fmt: skip
    trajectory = hold(scripted(["a", "b"], renderer=renderer), lambda: replies(replies=[Reply(messages=[MORE], tools=[LOOK])],
                      tools=()), renderer=renderer)  # fmt: skip
    assert trajectory.error is not None
    assert trajectory.error.kind == "tokens"
    assert "writes no tool calls" in trajectory.error.message
    assert len(trajectory.turns) == 1


# tools as a layer


async def look(a: int) -> str:
    """Look.

    Args:
        a: A number.
    """
    return str(a)


async def add(a: int) -> str:
    """Add one.

    Args:
        a: A number.
    """
    return str(a + 1)


def test_the_tools_of_a_layer_stay_when_the_environment_behind_changes_its_own() -> None:
    given = [Reply(messages=[MORE], tools=[COUNT]), Reply(messages=[answer(0, "count", "2")])]
    trajectory = sound(hold(Says("a", call("count"), call("add", '{"a": 1}'), call("look"), "b"),
                            lambda: Tools([add], then=replies(replies=given))))  # fmt: skip
    names = [[tool["function"]["name"] for tool in turn.tools] for turn in trajectory.turns]
    assert names == [["look", "add"], *[["count", "add"]] * 4]
    assert [message["content"] for message in trajectory.messages if message["role"] == "tool"][:2] == ["2", "2"]
    # a tool that the environment behind offers no more is unknown
    (outcome,) = trajectory.turns[3].outcomes
    assert outcome.error == "unknown_tool"
    assert "the tools are: add, count" in outcome.content


def test_a_tool_that_was_withdrawn_is_not_run() -> None:
    @environment
    async def withdraws(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
        tools = Tools([add, look])
        turn = yield await tools.begin(row)
        offered = [tool for tool in turn.tools if tool["function"]["name"] != "add"]
        turn = yield Reply(messages=[MORE], tools=offered)
        yield await tools.step(turn)
        yield Reply(done=True)

    trajectory = sound(hold(Says("a", call("add", '{"a": 1}'), "b"), withdraws))
    (outcome,) = trajectory.turns[1].outcomes
    assert outcome.error == "unknown_tool"
    assert "there is no tool 'add'" in outcome.content
    assert outcome.content.endswith("(the tools are: look)")


# What an environment changes about the sampling of the following turns: how many tokens, and which texts end a turn.


SAMPLING_MORE: Any = {"role": "user", "content": "More?"}


@environment
async def changes(
    row: Row, replies: list[Reply], opening: SamplingChange | None = None
) -> AsyncGenerator[Opening | Reply, Turn]:
    """Answers with these, one after the other."""
    yield Opening(messages=row.messages, sampling=opening)
    for reply in replies:
        yield reply


def changed(**values: Any) -> Reply:
    return Reply(messages=[SAMPLING_MORE], sampling=SamplingChange(**values))


def asked(engine: Says) -> list[tuple[int, tuple[str, ...]]]:
    return [(one.sampling.max_tokens, one.sampling.stop) for one in engine.requests]


def test_a_change_holds_for_the_following_turns_until_the_next_change() -> None:
    engine = Says("one", "two", "three", "four")
    replies = [changed(max_tokens=9, stop=["!"]), user_message("Go on."), changed(stop=[]), Reply(done=True)]
    trajectory = hold(
        engine,
        lambda: changes(replies=replies),
        sampling=Sampling(stop=("END",)),
        limits=Limits(turns=8, tokens_per_turn=20),
    )
    assert trajectory.error is None
    assert asked(engine) == [(20, ("END",)), (9, ("!",)), (9, ("!",)), (20, ())]
    assert {one.sampling.temperature for one in engine.requests} == {1.0}


def test_an_empty_change_ends_all_changes() -> None:
    engine = Says("one", "two", "three")
    replies = [changed(max_tokens=9, stop=["!"]), changed(), Reply(done=True)]
    hold(engine, lambda: changes(replies=replies), sampling=Sampling(stop=("END",)), limits=Limits(tokens_per_turn=20))
    assert asked(engine) == [(20, ("END",)), (9, ("!",)), (20, ("END",))]


def test_the_next_turn_has_no_more_tokens_than_the_change_says() -> None:
    trajectory = hold(Says("first", "second"), lambda: changes(replies=[changed(max_tokens=3)]))
    assert [text for turn, text in spoken(trajectory.segments[0]) if turn >= 0] == ["first<|im_end|>", "sec"]
    assert (trajectory.stop, trajectory.turns[1].finish_reason) == (Stop.LENGTH, "length")
    assert trajectory.template_mismatch is None


def test_an_environment_can_answer_a_turn_that_its_own_limit_cut() -> None:
    replies = [changed(max_tokens=3, answers_cut=True), changed(max_tokens=3, answers_cut=True), Reply(done=True)]
    trajectory = hold(Says("one", "second", "third"), lambda: changes(replies=replies))
    assert (trajectory.stop, trajectory.error) == (Stop.DONE, None)
    assert [(turn.text, turn.finish_reason) for turn in trajectory.turns] == [
        ("one", "stop"), ("sec", "length"), ("thi", "length"),
    ]  # fmt: skip
    assert [text for turn, text in spoken(trajectory.segments[0]) if turn >= 0] == ["one<|im_end|>", "sec", "thi"]
    assert trajectory.template_mismatch is None


def test_a_limit_of_the_recipe_ends_the_conversation_whatever_the_environment_does() -> None:
    for limits, stop in (
        (Limits(tokens_per_turn=3), Stop.LENGTH),
        (Limits(tokens=6), Stop.MAX_TOKENS),
        (Limits(context=52), Stop.CONTEXT),
    ):
        replies = [changed(max_tokens=4, answers_cut=True), Reply(done=True)]
        trajectory = hold(
            Says("on", "second", "third"), lambda replies=replies: changes(replies=replies), limits=limits
        )
        assert (trajectory.stop, trajectory.turns[-1].finish_reason) == (stop, "length")
        assert len(trajectory.turns) == 2


def test_a_change_never_raises_a_limit() -> None:
    trajectory = hold(
        Says("one", "second"),
        lambda: changes(replies=[changed(max_tokens=100)]),
        limits=Limits(tokens_per_turn=5),
    )
    assert trajectory.turns[1].text == "secon"
    assert trajectory.stop is Stop.LENGTH
    trajectory = hold(
        Says("one", "second"),
        lambda: changes(replies=[changed(max_tokens=5)]),
        limits=Limits(tokens_per_turn=50, tokens=6),
    )
    assert trajectory.turns[1].text == "se"
    assert trajectory.stop is Stop.MAX_TOKENS


def test_an_opening_changes_the_first_turn_and_tools_in_front_keep_that() -> None:
    for make in (
        lambda: changes(replies=[], opening=SamplingChange(max_tokens=2)),
        lambda: Tools([], then=changes(replies=[], opening=SamplingChange(max_tokens=2))),
    ):
        trajectory = hold(Says("first"), make)
        assert [list(turn.completion.token_ids) for turn in trajectory.turns if turn.completion] == [
            list(RENDERER.encode("fi"))
        ]


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (Reply(sampling=SamplingChange(max_tokens=3), done=True), "there is no following turn"),
        (changed(max_tokens=0), r"max_tokens=0\): max_tokens must be an integer of at least 1"),
        (changed(answers_cut=True), r"answers_cut=True\) has no effect without max_tokens"),
        (changed(max_tokens=True), r"max_tokens=True\)"),
        (changed(max_tokens=2.5), r"max_tokens=2.5\)"),
        (changed(stop="END"), r"stop='END'\): stop must be a list of texts that are not empty"),
        (changed(stop=[""]), r"stop=\[''\]\)"),
        (Reply(sampling={"max_tokens": 3}), r"Reply\(sampling=\{'max_tokens': 3\}\): give SamplingChange"),  # type: ignore[arg-type]
    ],
)
def test_a_change_that_makes_no_sense_breaks_its_own_conversation(reply: Reply, why: str) -> None:
    trajectory: Trajectory = hold(Says("ab", "cd"), lambda: changes(replies=[reply]))
    assert trajectory.error is not None
    assert trajectory.error.kind == "environment"
    assert re.search(why, trajectory.error.message), trajectory.error.message
