"""Agents in real clients' words, other people's agents unchanged, and conversations that go on from others."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support import byte_tokenizer
from support.agent_clients import (  # noqa: F401
    anthropic_client,
    clients_are_closed,
    imported,
    openai_client,
    relations,
)
from support.conversations import CUE, RENDERER, Says, a_row, call, hold_all, spoken
from support.own_environment import interpreter
from support.templates import SWITCHES, THINKS
from turnwise.chat.renderer import Renderer
from turnwise.environments.agents import AgentFunction, Program
from turnwise.environments.agents.histories import Relation, continuation
from turnwise.environments.agents.requests import tool_call
from turnwise.errors import ConfigError
from turnwise.rollout.context import Limits
from turnwise.types import Edit, Message, Trajectory

# The real clients of OpenAI and Anthropic talk to the server, and all of their turns are in the record.


USER = "<|im_start|>user\n{}<|im_end|>\n"

ADD: dict[str, Any] = {
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}

CALL = call("add", '{"a": 2, "b": 3}')


def held(engine: Says, make: AgentFunction | Program, **table: Any) -> Trajectory:
    """A conversation of an agent, whose server ends with it."""
    return held_all(engine, make, size=1, **table)[0]


def held_all(engine: Says, make: AgentFunction | Program, *, size: int, **table: Any) -> list[Trajectory]:
    try:
        return hold_all(engine, make, size=size, **table)
    finally:
        asyncio.run(make.aclose())


def led(engine: Says, function: Any, **table: Any) -> Trajectory:
    trajectory = held(engine, AgentFunction(function=function), **table)
    assert trajectory.error is None, trajectory.error
    return trajectory


@pytest.mark.slow
def test_chat_completions_become_turns_with_tokens_and_log_probabilities() -> None:
    seen: list[Any] = []

    def agent(row: Any, base_url: str, api_key: str) -> dict[str, Any]:
        client, messages = openai_client(base_url, api_key), list(row.messages)
        for question in ("More", None):
            answer = client.chat.completions.create(model="any", messages=messages)
            seen.append(answer)
            messages += [answer.choices[0].message, {"role": "user", "content": question}]
        return {"reward": 0.5, "note": row["note"]}

    trajectory = led(Says("Yo.", "It is 5."), agent, row=a_row(note="n"))
    assert (trajectory.stop, trajectory.turns[1].reward) == ("done", 0.5)
    (segment,) = trajectory.segments
    more = f"\n{USER.format('More')}{CUE}"
    assert spoken(segment) == [
        (-1, USER.format("Hi") + CUE), (0, "Yo.<|im_end|>"), (-1, more), (1, "It is 5.<|im_end|>"),
    ]  # fmt: skip
    sampled = [logprob for logprob, turn in zip(segment.logprobs, segment.turn, strict=True) if turn == 0]
    assert sampled == [-0.125, -0.25, -0.375, -0.5]
    assert trajectory.template_mismatch is None
    assert relations(trajectory) == (1, 0, 0)
    assert trajectory.turns[1].info == {"agent": {"result": {"reward": 0.5, "note": "n"}}}
    first, second = seen
    assert (first.model, first.choices[0].message.content, first.choices[0].finish_reason) == ("any", "Yo.", "stop")
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (21, 4)
    assert second.usage.prompt_tokens == 21 + 4 + len(RENDERER.encode(more))


def test_an_answer_that_the_clients_limit_cuts_is_given_to_it_and_the_conversation_goes_on() -> None:
    seen: list[Any] = []

    def agent(row: Any, base_url: str, api_key: str) -> None:
        client, messages = openai_client(base_url, api_key), list(row.messages)
        cut = client.chat.completions.create(model="m", messages=messages, max_tokens=4).choices[0]
        seen.append((cut.message.content, cut.finish_reason))
        messages += [cut.message, {"role": "user", "content": "More"}]
        whole = client.chat.completions.create(model="m", messages=messages).choices[0]
        seen.append((whole.message.content, whole.finish_reason))
        stream = client.chat.completions.create(model="m", messages=messages, max_completion_tokens=2, stream=True)
        seen.append([chunk.choices[0].finish_reason for chunk in stream][-1])

    trajectory = led(Says("abcdefgh", "whole", "xyz"), agent)
    assert seen == [("abcd", "length"), ("whole", "stop"), "length"]
    assert trajectory.stop == "done"
    assert [turn.finish_reason for turn in trajectory.turns] == ["length", "stop", "length"]
    # the end of the turn is written as context: the model has not sampled it
    assert spoken(trajectory.segments[0])[:4] == [
        (-1, USER.format("Hi") + CUE),
        (0, "abcd"),
        (-1, f"<|im_end|>\n{USER.format('More')}{CUE}"),
        (1, "whole<|im_end|>"),
    ]
    assert trajectory.template_mismatch is None


def test_the_other_apis_say_that_an_answer_was_cut() -> None:
    seen: list[Any] = []

    def agent(row: Any, base_url: str, api_key: str) -> None:
        openai_ = openai_client(base_url, api_key)
        response = openai_.responses.create(model="m", input="Hi", max_output_tokens=4)
        seen.append((response.status, response.incomplete_details.reason, response.output_text))  # type: ignore[union-attr]
        with openai_.responses.stream(model="m", input="Ho", max_output_tokens=4) as stream:
            seen.append(list(stream)[-1].type)
        message = anthropic_client(base_url, api_key).messages.create(
            model="m", max_tokens=4, messages=[{"role": "user", "content": "Hu"}]
        )
        seen.append((message.stop_reason, message.content[0].text))  # type: ignore[union-attr]

    led(Says("abcdefgh", "abcdefgh", "abcdefgh"), agent)
    assert seen == [
        ("incomplete", "max_output_tokens", "abcd"),
        "response.incomplete",
        ("max_tokens", "abcd"),
    ]


def test_an_answer_that_a_limit_of_the_recipe_cuts_ends_the_conversation() -> None:
    import openai

    seen: list[int] = []

    def agent(row: Any, base_url: str, api_key: str) -> None:
        for most in (4, 100):
            try:
                openai_client(base_url, api_key).chat.completions.create(
                    model="m", messages=list(row.messages), max_tokens=most
                )
                seen.append(200)
            except openai.APIStatusError as error:
                seen.append(error.status_code)

    trajectory = led(Says("abcdefgh", "abcdefgh"), agent, limits=Limits(tokens_per_turn=6))
    assert (seen, trajectory.stop) == ([200, 410], "length")
    assert [turn.text for turn in trajectory.turns] == ["abcd", "abcdef"]


def test_tool_calls_go_to_the_client_and_its_results_come_back() -> None:
    def agent(row: Any, base_url: str, api_key: str) -> float:
        client, messages = openai_client(base_url, api_key), list(row.messages)
        tools = [{"type": "function", "function": ADD}]
        answer = client.chat.completions.create(model="m", messages=messages, tools=tools).choices[0]  # type: ignore[arg-type]
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        (wanted,) = answer.message.tool_calls
        assert (wanted.function.name, json.loads(wanted.function.arguments)) == ("add", {"a": 2, "b": 3})
        messages += [answer.message, {"role": "tool", "tool_call_id": wanted.id, "content": "5"}]
        last = client.chat.completions.create(model="m", messages=messages, tools=tools)  # type: ignore[arg-type]
        return float(last.choices[0].message.content == "It is 5.")

    trajectory = led(Says(CALL, "It is 5."), agent)
    assert (trajectory.turns[1].reward, relations(trajectory)) == (1.0, (1, 0, 0))
    assert len(trajectory.segments) == 1
    assert trajectory.tools == ({"type": "function", "function": ADD},)
    assert trajectory.messages[2] == {"role": "tool", "tool_call_id": "call_0", "content": "5", "name": "add"}
    assert [text for turn, text in spoken(trajectory.segments[0]) if turn >= 0] == [
        f"{CALL}<|im_end|>",
        "It is 5.<|im_end|>",
    ]


def test_a_stream_of_chat_completions_is_put_together_by_the_client() -> None:
    def agent(row: Any, base_url: str, api_key: str) -> None:
        client, messages = openai_client(base_url, api_key), list(row.messages)
        tools = [{"type": "function", "function": ADD}]
        options: Any = {"model": "m", "tools": tools, "stream_options": {"include_usage": True}}
        with client.chat.completions.stream(messages=messages, **options) as stream:
            deltas = [event.delta for event in stream if event.type == "content.delta"]
            done = stream.get_final_completion()
        assert ([len(delta) for delta in deltas if delta], "".join(deltas)) == ([40, 40, 20], "x" * 100)
        assert done.choices[0].message.content == "x" * 100
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (trajectory_prompt[0], 101)
        messages += [done.choices[0].message, {"role": "user", "content": "Add"}]
        with client.chat.completions.stream(messages=messages, **options) as stream:
            done = stream.get_final_completion()
        (wanted,) = done.choices[0].message.tool_calls
        assert (wanted.function.arguments, done.choices[0].finish_reason) == ('{"a": 2, "b": 3}', "tool_calls")

    trajectory_prompt = [0]

    class Watched(Says):
        async def generate(self, request: Any) -> Any:
            trajectory_prompt[0] = trajectory_prompt[0] or len(request.token_ids)
            return await super().generate(request)

    trajectory = led(Watched("x" * 100, CALL), agent)
    assert relations(trajectory) == (1, 0, 0)


def test_responses_with_tools_a_stream_and_a_stored_conversation() -> None:
    def agent(row: Any, base_url: str, api_key: str) -> None:
        client = openai_client(base_url, api_key)
        tools: Any = [{"type": "function", "strict": False, **ADD}]
        items: list[Any] = [{"role": "user", "content": "2 and 3?"}]
        options: Any = {"model": "m", "instructions": "Add.", "tools": tools}
        first = client.responses.create(input=items, **options)
        (wanted,) = first.output
        assert (wanted.type, wanted.name, wanted.arguments) == ("function_call", "add", '{"a": 2, "b": 3}')
        items += [*first.output, {"type": "function_call_output", "call_id": wanted.call_id, "output": "5"}]
        with client.responses.stream(input=items, **options) as stream:
            deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
            second = stream.get_final_response()
        assert ("".join(deltas), second.output_text, second.status) == ("It is 5.", "It is 5.", "completed")
        third = client.responses.create(input="Sure?", previous_response_id=second.id, **options)
        assert third.output_text == "Yes."
        assert third.usage.output_tokens == 5

    trajectory = led(Says(CALL, "It is 5.", "Yes."), agent)
    assert relations(trajectory) == (2, 0, 0)
    assert [message["role"] for message in trajectory.messages] == [
        "system", "user", "assistant", "tool", "assistant", "user", "assistant",
    ]  # fmt: skip
    assert len(trajectory.segments) == 1
    assert trajectory.template_mismatch is None


def test_anthropic_messages_with_tools_and_a_stream() -> None:
    def agent(row: Any, base_url: str, api_key: str) -> None:
        client = anthropic_client(base_url, api_key)
        tools: Any = [{"name": "add", "description": ADD["description"], "input_schema": ADD["parameters"]}]
        options: Any = {"model": "m", "max_tokens": 300, "system": [{"type": "text", "text": "Add."}], "tools": tools}
        messages: list[Any] = [{"role": "user", "content": "2 and 3?"}]
        first = client.messages.create(messages=messages, **options)
        assert (first.stop_reason, first.usage.output_tokens) == ("tool_use", len(CALL) + 1)
        (wanted,) = first.content
        assert (wanted.type, wanted.name, wanted.input) == ("tool_use", "add", {"a": 2, "b": 3})
        result = {"type": "tool_result", "tool_use_id": wanted.id, "content": [{"type": "text", "text": "5"}]}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        with client.messages.stream(messages=messages, **options) as stream:
            assert "".join(stream.text_stream) == "It is 5."
            second = stream.get_final_message()
        assert (second.stop_reason, second.content[0].text) == ("end_turn", "It is 5.")
        messages += [{"role": "assistant", "content": second.content}, {"role": "user", "content": "Again"}]
        with client.messages.stream(messages=messages, **options) as stream:
            third = stream.get_final_message()
        assert third.content[0].input == {"a": 2, "b": 3}

    engine = Says(CALL, "It is 5.", CALL)
    trajectory = led(engine, agent)
    assert relations(trajectory) == (2, 0, 0)
    assert len(trajectory.segments) == 1
    assert trajectory.messages[0] == {"role": "system", "content": "Add."}
    assert [request.sampling.max_tokens for request in engine.requests] == [300] * 3


def test_reasoning_is_sent_and_its_absence_in_the_next_request_changes_no_token() -> None:
    seen: list[Any] = []

    def agent(row: Any, base_url: str, api_key: str) -> None:
        client = anthropic_client(base_url, api_key)
        first = client.messages.create(model="m", max_tokens=99, messages=row.messages)
        seen.append([block.type for block in first.content])
        text = [block for block in first.content if block.type == "text"]
        messages: list[Any] = [*row.messages, {"role": "assistant", "content": text}, {"role": "user", "content": "So"}]
        client.messages.create(model="m", max_tokens=99, messages=messages)

    trajectory = led(Says("<think>\nhm\n</think>\n\nFive.", "Yes."), agent, renderer=Renderer(byte_tokenizer(THINKS)))
    assert seen == [["thinking", "text"]]
    assert relations(trajectory) == (0, 1, 0)
    assert len(trajectory.segments) == 1


# A real agent library, unchanged: `openai-agents`, with the Responses API and with chat completions.


@pytest.mark.slow
@pytest.mark.parametrize("api", ["responses", "chat completions"])
def test_an_agent_of_openai_agents_with_a_tool(api: str) -> None:
    import openai

    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    results: list[Any] = []

    async def agent(row: Any, base_url: str, api_key: str) -> float:
        agents.set_tracing_disabled(True)

        @agents.function_tool
        def add(a: int, b: int) -> int:
            """Adds two numbers."""
            return a + b

        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            model_of = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
            adder = agents.Agent(
                name="Adder", instructions="Add.", tools=[add], model=model_of(model="m", openai_client=client)
            )
            result = await agents.Runner.run(adder, str(row.messages[0]["content"]))
        results.append(result.final_output)
        return float("5" in result.final_output)

    said = [call("add", '{"a": 2, "b": 3}'), "It is 5."]
    trajectory = led(Says(*said), agent, row=a_row("2 and 3?"))
    assert results == ["It is 5."]
    assert (trajectory.stop, trajectory.turns[1].reward, relations(trajectory)) == ("done", 1.0, (1, 0, 0))
    (segment,) = trajectory.segments
    assert [text for turn, text in spoken(segment) if turn >= 0] == [f"{text}<|im_end|>" for text in said]
    assert [message["role"] for message in trajectory.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert trajectory.messages[3]["content"] == "5"
    assert trajectory.template_mismatch is None


# Environments of other systems, unchanged: `verifiers` (taskset, harness and reward) and OpenEnv (server and client).


PEERS = Path(__file__).parents[2] / "support" / "peers"


@pytest.mark.slow
def test_an_environment_of_verifiers_runs_unchanged() -> None:
    python = interpreter("verifiers", "verifiers==0.4.0", "verifiers.v1")
    make = Program(command=[python, str(PEERS / "verifiers_agent.py")], reward="json")
    trajectory = held(Says("It is 6.", "It is 5."), make)
    assert trajectory.error is None, trajectory.error
    assert (trajectory.turns[1].reward, relations(trajectory)) == (1.0, (1, 0, 0))  # the reward function of the taskset
    (segment,) = trajectory.segments
    assert [text for turn, text in spoken(segment) if turn >= 0] == ["It is 6.<|im_end|>", "It is 5.<|im_end|>"]
    assert [message["content"] for message in trajectory.messages] == ["2 and 3?", "It is 6.", "Sure?", "It is 5."]
    wrong = held(
        Says("It is 5.", "It is 6."), Program(command=[python, str(PEERS / "verifiers_agent.py")], reward="json")
    )
    assert (wrong.error, wrong.turns[1].reward) == (None, 0.0)


@pytest.mark.slow
def test_an_environment_of_openenv_runs_by_its_client() -> None:
    python = interpreter("openenv", "openenv-core==0.3.0", "openenv.core")
    make = Program(command=[python, str(PEERS / "openenv_agent.py")], reward="json")
    trajectory = held(Says("5", "8", "7"), make)
    assert trajectory.error is None, trajectory.error
    assert [message["content"] for message in trajectory.messages] == [
        "A number below 10?", "5", "Higher.", "8", "Lower.", "7",
    ]  # fmt: skip
    assert (trajectory.turns[2].reward, relations(trajectory), len(trajectory.segments)) == (1.0, (2, 0, 0), 1)


# What a request makes of the conversation that is held: it extends, realigns or forks.


CONTINUATIONS_USER: Message = {"role": "user", "content": "Hi"}

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
    found = continuation([CONTINUATIONS_USER, held], [CONTINUATIONS_USER, repeated, MORE], str(held["content"]))
    assert (found.relation, found.edit) == (relation, edit)
    assert found.new == (0 if relation is Relation.FORKED else 2)


def test_earlier_messages_may_differ_in_form_only() -> None:
    held = [CONTINUATIONS_USER, says("a "), MORE, says("b")]
    assert continuation(held, [CONTINUATIONS_USER, says("a"), MORE, says("b"), MORE], "b").relation is Relation.EXTENDED
    other = continuation(held, [CONTINUATIONS_USER, says("A"), MORE, says("b"), MORE], "b")
    assert (other.relation, other.reason) == (Relation.FORKED, "message 1 (assistant) differs")
    again = continuation(held, held[:3], "b")
    assert again.reason == "the request has 3 messages, and the conversation had 4"


def test_an_edit_is_made_where_the_content_is_in_the_sampled_text() -> None:
    found = continuation(
        [CONTINUATIONS_USER, says("It is 5.")],
        [CONTINUATIONS_USER, says("It is 5"), MORE],
        "<think>It is</think>\nIt is 5.",
    )
    assert found.edit == Edit(keep=len("<think>It is</think>\nIt is 5"))
    assert (
        continuation(
            [CONTINUATIONS_USER, says("It is 5.")], [CONTINUATIONS_USER, says("It is 5"), MORE], "other"
        ).relation
        is Relation.FORKED
    )
    # the answer again, behind the text that stopped it, and in the reasoning
    for text, reasoning in (("go! go", {}), ("go?</think>go! go", {"reasoning_content": "go?"})):
        found = continuation(
            [CONTINUATIONS_USER, says("go", **reasoning)], [CONTINUATIONS_USER, says("gox"), MORE], text
        )
        assert found.edit == Edit(keep=text.index("!"), add="x")


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
    trajectory = conversation(
        [CONTINUATIONS_USER], [CONTINUATIONS_USER, says("Five."), MORE], said=["Five. \n", "Yes."]
    )
    assert relations(trajectory) == (0, 1, 0)
    (segment,) = trajectory.segments
    assert spoken(segment) == [(-1, ASKED), (0, "Five. \n<|im_end|>"), (-1, THEN), (1, "Yes.<|im_end|>")]
    assert trajectory.template_mismatch is None


def test_text_that_the_client_changes_is_context() -> None:
    trajectory = conversation(
        [CONTINUATIONS_USER], [CONTINUATIONS_USER, says("Look!"), MORE], said=["Look and see", "Yes."]
    )
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
    trajectory = conversation([CONTINUATIONS_USER], [summary], [summary, says("b"), MORE], said=["a", "b", "c"])
    assert relations(trajectory) == (1, 0, 1)
    first, second = trajectory.segments
    assert spoken(first) == [(-1, ASKED), (0, "a<|im_end|>")]
    assert spoken(second)[0] == (-1, f"<|im_start|>user\nSum: 5<|im_end|>\n{CUE}")
    assert [text for turn, text in spoken(second) if turn >= 0] == ["b<|im_end|>", "c<|im_end|>"]
    assert trajectory.previous_histories == [[CONTINUATIONS_USER, says("a")]]


def test_agents_that_take_turns_continue_their_own_segments() -> None:
    """A, B, A, B, A: two segments, each the complete conversation of one agent, with each token once."""
    other: Message = {"role": "user", "content": "Other"}

    def agent(row: Any, base_url: str, api_key: str) -> None:
        ask = openai_client(base_url, api_key).chat.completions.create
        held: dict[str, list[Any]] = {"a": [CONTINUATIONS_USER], "b": [other]}
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
    changed = [CONTINUATIONS_USER, says("something else"), MORE]
    trajectory = conversation([CONTINUATIONS_USER], [other], changed, said=["a1", "b1", "c1"])
    assert trajectory.metrics["agent/forked"] == 2
    assert len(trajectory.segments) == 3
    tools: Any = [{"type": "function", "function": ADD}]
    again = [CONTINUATIONS_USER, says("a1"), MORE]
    trajectory = conversation([CONTINUATIONS_USER], [other], again, said=["a1", "b1", "c1"], tools=[None, None, tools])
    assert (trajectory.metrics["agent/forked"], trajectory.metrics["agent/returned"]) == (2, 0)
    trajectory = conversation([CONTINUATIONS_USER], [other], again, said=["a1", "b1", "c1"], tools=[tools, None, tools])
    assert (trajectory.metrics["agent/forked"], trajectory.metrics["agent/returned"]) == (1, 1)
    assert len(trajectory.segments) == 2


def test_the_same_request_again_is_another_sample() -> None:
    trajectory = conversation([CONTINUATIONS_USER], [CONTINUATIONS_USER], said=["a", "b"])
    assert relations(trajectory) == (0, 0, 1)
    assert [spoken(segment) for segment in trajectory.segments] == [
        [(-1, ASKED), (0, "a<|im_end|>")],
        [(-1, ASKED), (1, "b<|im_end|>")],
    ]


def test_other_tools_begin_a_segment() -> None:
    tools = [{"type": "function", "function": ADD}]
    trajectory = conversation(
        [CONTINUATIONS_USER], [CONTINUATIONS_USER, says("a"), MORE], said=["a", "b"], tools=[None, tools]
    )
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

    again = [CONTINUATIONS_USER, says("a"), MORE]
    one = asks(([CONTINUATIONS_USER], off), (again, off))
    assert relations(one) == (1, 0, 0)
    texts = [text for turn, text in spoken(one.segments[0]) if turn < 0]
    assert [text.endswith(empty) for text in texts] == [True, True]
    assert one.template_mismatch is None
    two = asks(([CONTINUATIONS_USER], {}), (again, off))
    assert two.turns[0].info["agent"]["reason"] == "the arguments of the chat template differ"
    assert [turn.chat_template_kwargs for turn in two.turns] == [{}, {"enable_thinking": False}]
    assert [spoken(segment)[0][1].endswith(empty) for segment in two.segments] == [False, True]
    other: Message = {"role": "user", "content": "Other"}
    three = asks(
        ([CONTINUATIONS_USER], {}), ([other], off), (again, {})
    )  # the last request continues the history of the first
    assert [three.metrics[f"agent/{name}"] for name in ("forked", "returned")] == [1, 1]
    assert [[text.endswith(empty) for turn, text in spoken(segment) if turn < 0] for segment in three.segments] == [
        [False, False],
        [True],
    ]
    four = asks(([CONTINUATIONS_USER], {}), ([other], off), (again, off))
    assert (four.metrics["agent/forked"], len(four.segments)) == (2, 3)
    with pytest.raises(AssertionError, match=r"'enable_thinkng', which the chat template of .* never reads"):
        asks(([CONTINUATIONS_USER], {"chat_template_kwargs": {"enable_thinkng": False}}))
    with pytest.raises(AssertionError, match="`chat_template_kwargs` must be an object"):
        asks(([CONTINUATIONS_USER], {"chat_template_kwargs": "x"}))


def test_a_client_that_formats_json_in_another_way_changes_no_token() -> None:
    tools = [{"type": "function", "function": ADD}]
    said = call("add", '{"a": 1, "b": 2}')
    compact = says("", tool_calls=[tool_call("call_0", "add", '{"a":1,"b":2}')])
    result: Message = {"role": "tool", "tool_call_id": "call_0", "content": "3"}
    trajectory = conversation(
        [CONTINUATIONS_USER], [CONTINUATIONS_USER, compact, result], said=[said, "3."], tools=[tools, tools]
    )
    assert relations(trajectory) == (0, 1, 0)
    (segment,) = trajectory.segments
    assert [text for turn, text in spoken(segment) if turn >= 0] == [f"{said}<|im_end|>", "3.<|im_end|>"]


def test_requests_at_the_same_time_are_answered_one_after_the_other() -> None:
    import asyncio

    import openai

    async def agent(row: Any, base_url: str, api_key: str) -> None:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        ask = client.chat.completions.create
        answers = await asyncio.gather(*(ask(model="m", messages=[CONTINUATIONS_USER]) for _ in range(3)))  # type: ignore[list-item]
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
        answer = create(model="m", messages=[CONTINUATIONS_USER], stop=["Obs:"], max_tokens=99, temperature=0.1, seed=3)
        assert answer.choices[0].message.content == "Act "
        create(model="m", messages=[CONTINUATIONS_USER, answer.choices[0].message, MORE], tool_choice="none")

    engine = Says("Act Obs:", "b")
    trajectory = led(engine, agent)
    first, second = (request.sampling for request in engine.requests)
    assert (first.stop, first.max_tokens, first.temperature) == (("Obs:",), 99, 1.0)
    assert (second.stop, second.max_tokens) == ((), 400)
    assert trajectory.turns[0].info["agent"] == {"forced": {"temperature": 0.1, "seed": 3}}
    assert trajectory.metrics["agent/forced"] == 1.0
    assert relations(trajectory) == (1, 0, 0)
    assert "Act Obs:<|im_end|>" in [text for _, text in spoken(trajectory.segments[0])]  # its tokens stay


# Agents on other machines


def certificate(folder: Path) -> dict[str, str]:
    """A certificate for 127.0.0.1 that signs itself: the arguments of an agent."""
    files = {"tls_cert": str(folder / "cert.pem"), "tls_key": str(folder / "key.pem")}
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", files["tls_cert"], "-keyout", files["tls_key"]]
    subprocess.run([*command.split(), *more], check=True, capture_output=True)
    return files


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_agents_reach_the_server_with_tls_at_a_chosen_address(tmp_path: Path) -> None:
    import ssl

    import httpx
    import openai

    files, seen = certificate(tmp_path), list[Any]()

    def agent(row: Any, base_url: str, api_key: str) -> float:
        context = ssl.create_default_context(cafile=files["tls_cert"])
        with httpx.Client(verify=context, trust_env=False) as trusted:
            client = openai.OpenAI(base_url=base_url, api_key=api_key, http_client=trusted, max_retries=0)
            seen.append(base_url)
            seen.append(client.models.retrieve("org/some-model").id)
            answer = client.chat.completions.create(model="m", messages=row.messages)
        return float(answer.choices[0].message.content == "Yo.")

    trajectory = held(Says("Yo."), AgentFunction(function=agent, server={"listen": "127.0.0.1:0", **files}))
    assert (trajectory.error, trajectory.turns[0].reward) == (None, 1.0)
    assert seen[0].startswith("https://127.0.0.1:")
    assert seen[1] == "org/some-model"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"listen": "0.0.0.0:8443"}, "without TLS their requests and keys can be read on the way"),
        ({"listen": "10.1.2.3:80", "insecure": True, "public_url": "agents"}, "must be a URL such as https"),
        ({"listen": "0.0.0.0:80", "insecure": True}, "set public_url to the one that agents use"),
        ({"listen": "localhost:80", "insecure": True}, "insecure=true has no effect with a local address"),
        ({"listen": "8443"}, "must be HOST:PORT"),
        ({"port": 8443}, "server: 'port' is unknown; the keys are listen"),
        ({"listen": 8443}, "listen=8443 must be HOST:PORT"),
        ({"listen": "10.1.2.3:²"}, "must be HOST:PORT"),
        ({"tls_cert": "/nowhere.pem"}, "belong together"),
        ({"tls_cert": "/nowhere.pem", "tls_key": "/k.pem"}, "there is no such file"),
        (
            {"tls_cert": __file__, "tls_key": __file__},
            r"test_agent_clients.py' cannot be used \(.*must be a certificate",
        ),
    ],
)
def test_where_the_server_listens_is_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AgentFunction(function=lambda row, base_url, api_key: None, server=arguments)


def test_behind_an_ingress_agents_get_its_address() -> None:
    urls = list[str]()

    def agent(row: Any, base_url: str, api_key: str) -> None:
        urls.append(base_url)
        raise ValueError("seen")

    arguments: dict[str, Any] = {"listen": "127.0.0.1:0", "public_url": "https://agents.example.org/"}
    assert held(Says("Yo."), AgentFunction(function=agent, server=arguments)).error is not None
    assert urls == ["https://agents.example.org/v1"]
