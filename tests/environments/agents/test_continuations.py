"""What a request makes of the conversation that is held: it extends, realigns or forks."""

from __future__ import annotations

from typing import Any

import pytest
from test_agent_clients import ADD, held, led, openai_client, relations

from support import byte_tokenizer
from support.conversations import CUE, Says, call, spoken
from support.templates import SWITCHES
from turnwise.chat.renderer import Renderer
from turnwise.environments.agents import AgentFunction
from turnwise.environments.agents.environment import Relation, continuation
from turnwise.environments.agents.requests import tool_call
from turnwise.types import Edit, Message, Trajectory

USER: Message = {"role": "user", "content": "Hi"}
MORE: Message = {"role": "user", "content": "More"}


def says(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


CALLS = {"tool_calls": [tool_call("call_0", "add", {"a": 1, "b": 2})]}


@pytest.mark.parametrize(
    ("held", "repeated", "relation", "edit"),
    [
        (says("Five."), says("Five."), Relation.EXTENDED, None),
        (says(" Five.\n"), says("Five."), Relation.REALIGNED, None),
        (says("Five.", reasoning_content="hm"), says("Five."), Relation.REALIGNED, None),
        (says("Five.", reasoning_content="hm"), says("Five.", reasoning_content="other"), Relation.FORKED, None),
        (says("", **CALLS), says("", **CALLS), Relation.EXTENDED, None),
        (
            says("", **CALLS),
            says("", tool_calls=[tool_call("call_0", "add", '{"a":1,  "b":2}')]),
            Relation.REALIGNED,
            None,
        ),
        (says("", **CALLS), says("", tool_calls=[tool_call("x", "add", '{"b":2, "a":1}')]), Relation.REALIGNED, None),
        (says("", **CALLS), says("", tool_calls=[tool_call("call_0", "add", {"a": 1})]), Relation.FORKED, None),
        (says("", **CALLS), says(""), Relation.FORKED, None),
        # a ReAct agent removes what the model wrote behind its action
        (says("Act: look\nObs: a cat"), says("Act: look"), Relation.REALIGNED, Edit(keep=9)),
        (says("Act: look\nObs: a cat"), says("Act: look!"), Relation.REALIGNED, Edit(keep=9, add="!")),
        (says("It is 5."), says("It was 77777."), Relation.FORKED, None),  # most of it is new
        (says("It is 5."), says(""), Relation.FORKED, None),
        (says("It is 5."), MORE, Relation.FORKED, None),
    ],
)
def test_the_last_answer_as_the_client_repeats_it(held: Message, repeated: Message, relation: str, edit: Any) -> None:
    found = continuation([USER, held], [USER, repeated, MORE], str(held["content"]))
    assert (found.relation, found.edit) == (relation, edit)
    assert found.new == (0 if relation is Relation.FORKED else 2)


def test_earlier_messages_may_differ_in_form_only() -> None:
    held = [USER, says("a "), MORE, says("b")]
    assert continuation(held, [USER, says("a"), MORE, says("b"), MORE], "b").relation is Relation.EXTENDED
    other = continuation(held, [USER, says("A"), MORE, says("b"), MORE], "b")
    assert (other.relation, other.reason) == (Relation.FORKED, "message 1 (assistant) differs")
    again = continuation(held, held[:3], "b")
    assert again.reason == "the request has 3 messages, and the conversation had 4"


def test_an_edit_is_made_where_the_content_is_in_the_sampled_text() -> None:
    found = continuation([USER, says("It is 5.")], [USER, says("It is 5"), MORE], "<think>It is</think>\nIt is 5.")
    assert found.edit == Edit(keep=len("<think>It is</think>\nIt is 5"))
    assert continuation([USER, says("It is 5.")], [USER, says("It is 5"), MORE], "other").relation is Relation.FORKED


def conversation(*requests: list[Message], said: list[str], tools: Any = None) -> Trajectory:
    """The agent sends these lists of messages, one after the other."""

    def agent(row: Any, base_url: str, api_key: str) -> None:
        client = openai_client(base_url, api_key)
        for number, messages in enumerate(requests):
            offered: Any = {"tools": tools[number]} if tools and tools[number] else {}
            client.chat.completions.create(model="m", messages=messages, **offered)  # type: ignore[arg-type]

    return led(Says(*said), agent)


ASKED = "<|im_start|>user\nHi<|im_end|>\n" + CUE
THEN = f"\n<|im_start|>user\nMore<|im_end|>\n{CUE}"


def test_a_client_that_strips_white_space_changes_no_token() -> None:
    trajectory = conversation([USER], [USER, says("Five."), MORE], said=["Five. \n", "Yes."])
    assert relations(trajectory) == (0, 1, 0)
    (segment,) = trajectory.segments
    assert spoken(segment) == [(-1, ASKED), (0, "Five. \n<|im_end|>"), (-1, THEN), (1, "Yes.<|im_end|>")]
    assert trajectory.template_mismatch is None


def test_text_that_the_client_changes_is_context() -> None:
    trajectory = conversation([USER], [USER, says("Look!"), MORE], said=["Look and see", "Yes."])
    assert relations(trajectory) == (0, 1, 0)
    (segment,) = trajectory.segments
    assert spoken(segment) == [(-1, ASKED), (0, "Look"), (-1, f"!<|im_end|>{THEN}"), (1, "Yes.<|im_end|>")]
    assert trajectory.template_mismatch is None
    assert trajectory.turns[0].info["agent"] == {
        "next_request": "realigned",
        "reason": "the text of the last answer differs",
    }


def test_another_history_begins_a_segment_and_the_old_one_stays() -> None:
    summary: Message = {"role": "user", "content": "Sum: 5"}
    trajectory = conversation([USER], [summary], [summary, says("b"), MORE], said=["a", "b", "c"])
    assert relations(trajectory) == (1, 0, 1)
    first, second = trajectory.segments
    assert spoken(first) == [(-1, ASKED), (0, "a<|im_end|>")]
    assert spoken(second)[0] == (-1, f"<|im_start|>user\nSum: 5<|im_end|>\n{CUE}")
    assert [text for turn, text in spoken(second) if turn >= 0] == ["b<|im_end|>", "c<|im_end|>"]
    assert trajectory.previous_histories == [[USER, says("a")]]


def test_agents_that_take_turns_continue_their_own_segments() -> None:
    """A, B, A, B, A: two segments, each the complete conversation of one agent, with each token once."""
    other: Message = {"role": "user", "content": "Other"}

    def agent(row: Any, base_url: str, api_key: str) -> None:
        ask = openai_client(base_url, api_key).chat.completions.create
        held: dict[str, list[Any]] = {"a": [USER], "b": [other]}
        for name in "ababa":
            answer = ask(model="m", messages=held[name]).choices[0].message
            held[name] += [{"role": "assistant", "content": answer.content}, MORE]

    trajectory = led(Says("a1", "b1", "a2", "b2", "a3"), agent)
    assert trajectory.template_mismatch is None
    assert [trajectory.metrics[f"agent/{name}"] for name in ("extended", "realigned", "returned", "forked")] == [
        0,
        0,
        3,
        1,
    ]
    first, second = trajectory.segments
    assert [text for turn, text in spoken(first) if turn >= 0] == ["a1<|im_end|>", "a2<|im_end|>", "a3<|im_end|>"]
    assert [text for turn, text in spoken(second) if turn >= 0] == ["b1<|im_end|>", "b2<|im_end|>"]
    assert sorted({*first.turn} - {-1}) == [0, 2, 4]
    assert "".join(text for _, text in spoken(second)).count("Other") == 1
    assert [message["content"] for message in trajectory.messages] == ["Hi", "a1", "More", "a2", "More", "a3"]
    histories = [*trajectory.previous_histories, trajectory.messages]
    for turn in trajectory.turns:
        assert turn.message_index is not None
        assert histories[turn.history][turn.message_index] == turn.message
    assert trajectory.turns[1].info["agent"] == {"next_request": "returned", "reason": "it continues the history 0"}


def test_a_history_is_not_continued_with_other_tools_or_another_answer() -> None:
    other: Message = {"role": "user", "content": "Other"}
    changed = [USER, says("something else"), MORE]
    trajectory = conversation([USER], [other], changed, said=["a1", "b1", "c1"])
    assert trajectory.metrics["agent/forked"] == 2
    assert len(trajectory.segments) == 3
    tools: Any = [{"type": "function", "function": ADD}]
    again = [USER, says("a1"), MORE]
    trajectory = conversation([USER], [other], again, said=["a1", "b1", "c1"], tools=[None, None, tools])
    assert (trajectory.metrics["agent/forked"], trajectory.metrics["agent/returned"]) == (2, 0)
    trajectory = conversation([USER], [other], again, said=["a1", "b1", "c1"], tools=[tools, None, tools])
    assert (trajectory.metrics["agent/forked"], trajectory.metrics["agent/returned"]) == (1, 1)
    assert len(trajectory.segments) == 2


def test_the_same_request_again_is_another_sample() -> None:
    trajectory = conversation([USER], [USER], said=["a", "b"])
    assert relations(trajectory) == (0, 0, 1)
    assert [spoken(segment) for segment in trajectory.segments] == [
        [(-1, ASKED), (0, "a<|im_end|>")],
        [(-1, ASKED), (1, "b<|im_end|>")],
    ]


def test_other_tools_begin_a_segment() -> None:
    tools = [{"type": "function", "function": ADD}]
    trajectory = conversation([USER], [USER, says("a"), MORE], said=["a", "b"], tools=[None, tools])
    assert relations(trajectory) == (0, 0, 1)
    assert trajectory.turns[0].info["agent"]["reason"] == "the tools differ"
    assert len(trajectory.segments) == 2
    assert [turn.tools for turn in trajectory.turns] == [(), tuple(tools)]


def test_a_request_may_carry_arguments_of_the_chat_template() -> None:
    """As vLLM's clients send them: `extra_body={"chat_template_kwargs": {"enable_thinking": False}}`."""
    renderer = Renderer(byte_tokenizer(SWITCHES))
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    empty = "<|im_start|>assistant\n<think>\n\n</think>\n\n"

    def asks(*requests: tuple[list[Message], dict[str, Any]]) -> Trajectory:
        def agent(row: Any, base_url: str, api_key: str) -> None:
            ask = openai_client(base_url, api_key).chat.completions.create
            for messages, body in requests:
                ask(model="m", messages=messages, extra_body=body)  # type: ignore[arg-type]

        return led(Says("a", "b", "c"), agent, renderer=renderer)

    again = [USER, says("a"), MORE]
    one = asks(([USER], off), (again, off))
    assert relations(one) == (1, 0, 0)
    texts = [text for turn, text in spoken(one.segments[0]) if turn < 0]
    assert [text.endswith(empty) for text in texts] == [True, True]
    assert one.template_mismatch is None
    two = asks(([USER], {}), (again, off))
    assert two.turns[0].info["agent"]["reason"] == "the arguments of the chat template differ"
    assert [turn.chat_template_kwargs for turn in two.turns] == [{}, {"enable_thinking": False}]
    assert [spoken(segment)[0][1].endswith(empty) for segment in two.segments] == [False, True]
    other: Message = {"role": "user", "content": "Other"}
    three = asks(([USER], {}), ([other], off), (again, {}))  # the last request continues the history of the first
    assert [three.metrics[f"agent/{name}"] for name in ("forked", "returned")] == [1, 1]
    assert [[text.endswith(empty) for turn, text in spoken(segment) if turn < 0] for segment in three.segments] == [
        [False, False],
        [True],
    ]
    four = asks(([USER], {}), ([other], off), (again, off))
    assert (four.metrics["agent/forked"], len(four.segments)) == (2, 3)
    with pytest.raises(AssertionError, match=r"'enable_thinkng', which the chat template of .* never reads"):
        asks(([USER], {"chat_template_kwargs": {"enable_thinkng": False}}))
    with pytest.raises(AssertionError, match="`chat_template_kwargs` must be an object"):
        asks(([USER], {"chat_template_kwargs": "x"}))


def test_a_client_that_formats_json_in_another_way_changes_no_token() -> None:
    tools = [{"type": "function", "function": ADD}]
    said = call("add", '{"a": 1, "b": 2}')
    compact = says("", tool_calls=[tool_call("call_0", "add", '{"a":1,"b":2}')])
    result: Message = {"role": "tool", "tool_call_id": "call_0", "content": "3"}
    trajectory = conversation([USER], [USER, compact, result], said=[said, "3."], tools=[tools, tools])
    assert relations(trajectory) == (0, 1, 0)
    (segment,) = trajectory.segments
    assert [text for turn, text in spoken(segment) if turn >= 0] == [f"{said}<|im_end|>", "3.<|im_end|>"]


def test_requests_at_the_same_time_are_answered_one_after_the_other() -> None:
    import asyncio

    import openai

    async def agent(row: Any, base_url: str, api_key: str) -> None:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        ask = client.chat.completions.create
        answers = await asyncio.gather(*(ask(model="m", messages=[USER]) for _ in range(3)))  # type: ignore[list-item]
        assert sorted(str(answer.choices[0].message.content) for answer in answers) == ["a", "b", "c"]
        await client.close()

    engine = Says("a", "b", "c", seconds=0.02)
    trajectory = held(engine, AgentFunction(function=agent))
    assert trajectory.error is None
    assert (engine.together, relations(trajectory)) == (1, (0, 0, 2))


def test_stop_texts_and_the_length_of_a_turn_are_the_clients_and_sampling_is_the_recipes() -> None:
    def agent(row: Any, base_url: str, api_key: str) -> None:
        client = openai_client(base_url, api_key)
        create: Any = client.chat.completions.create
        answer = create(model="m", messages=[USER], stop=["Obs:"], max_tokens=99, temperature=0.1, seed=3)
        assert answer.choices[0].message.content == "Act "
        create(model="m", messages=[USER, answer.choices[0].message, MORE], tool_choice="none")

    engine = Says("Act Obs:", "b")
    trajectory = led(engine, agent)
    first, second = (request.sampling for request in engine.requests)
    assert (first.stop, first.max_tokens, first.temperature) == (("Obs:",), 99, 1.0)
    assert (second.stop, second.max_tokens) == ((), 400)
    assert trajectory.turns[0].info["agent"] == {"forced": {"temperature": 0.1, "seed": 3}}
    assert trajectory.metrics["agent/forced"] == 1.0
    assert relations(trajectory) == (1, 0, 0)
    assert "Act Obs:<|im_end|>" in [text for _, text in spoken(trajectory.segments[0])]  # its tokens stay
