"""The real clients of OpenAI and Anthropic talk to the server, and all of their turns are in the record."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import openai

from support import byte_tokenizer
from support.conversations import CUE, RENDERER, Says, a_row, call, hold_all, spoken
from support.templates import THINKS
from turnwise.chat.renderer import Renderer
from turnwise.environments.agents import AgentFunction, Program
from turnwise.rollout.context import Limits
from turnwise.types import Trajectory

USER = "<|im_start|>user\n{}<|im_end|>\n"
ADD: dict[str, Any] = {
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
CALL = call("add", '{"a": 2, "b": 3}')


def openai_client(base_url: str, api_key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)


def anthropic_client(base_url: str, api_key: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0)


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


def relations(trajectory: Trajectory) -> tuple[float, float, float]:
    """How often a request extended the conversation, was realigned, and forked."""
    return tuple(trajectory.metrics[f"agent/{name}"] for name in ("extended", "realigned", "forked"))  # type: ignore[return-value]


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
