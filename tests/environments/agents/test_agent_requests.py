"""What real clients ask for besides a plain answer: beginnings of answers, forms, counts, earlier answers, and late rewards."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
import urllib.error
import urllib.request
from collections.abc import Sequence
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
from support.conversations import CUE, Says, a_row, a_table, call, hold_all, spoken
from turnwise.chat.renderer import Renderer
from turnwise.environments.agents import AgentFunction
from turnwise.environments.agents.requests import AgentAnswer, AgentConversation, ChatRequest, Refused, ReportedRewards
from turnwise.errors import GrammarError
from turnwise.rollout.context import Limits
from turnwise.rollout.prompts import EndpointPrompts, RenderedPrompts
from turnwise.types import SamplingChange, Trajectory
from turnwise.user_code.threads import off_loop

USER = "<|im_start|>user\n{}<|im_end|>\n"
ADD: dict[str, Any] = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def led(engine: Says, function: Any, *, limits: Limits | None = None, **arguments: Any) -> Trajectory:
    """The conversation that a function leads, whose requests are compared with the prompts of the model."""
    make, table = (
        AgentFunction(function=function, **arguments),
        dict[str, Any]({} if limits is None else {"limits": limits}),
    )
    make.use_prompts(RenderedPrompts(a_table(engine, **table)))
    try:
        (trajectory,) = hold_all(engine, make, row=a_row(), **table)
    finally:
        asyncio.run(make.aclose())
    return trajectory


# beginnings of answers


@pytest.mark.parametrize("as_two", [False, True])
def test_the_model_continues_the_beginning_of_its_answer(as_two: bool) -> None:
    """The client sends beginning and answer back as one message, or as two."""
    seen: list[str] = []

    def agent(row: Any, base_url: str, api_key: str) -> None:
        client, messages = openai_client(base_url, api_key), list(row.messages)
        begun = {"role": "assistant", "content": "It is "}
        answer = client.chat.completions.create(model="m", messages=[*messages, begun]).choices[0].message
        seen.append(answer.content)
        both = [begun, answer] if as_two else [{"role": "assistant", "content": "It is " + answer.content}]
        messages += [*both, {"role": "user", "content": "More"}, {"role": "assistant", "content": "No"}]
        seen.append(client.chat.completions.create(model="m", messages=messages).choices[0].message.content)

    trajectory = led(Says("5.", "thing."), agent)
    assert trajectory.error is None, trajectory.error
    assert seen == ["5.", "thing."]
    (segment,) = trajectory.segments
    assert spoken(segment) == [
        (-1, f"{USER.format('Hi')}{CUE}It is "),
        (0, "5.<|im_end|>"),
        (-1, f"\n{USER.format('More')}{CUE}No"),
        (1, "thing.<|im_end|>"),
    ]
    assert [message["content"] for message in trajectory.messages] == ["Hi", "It is 5.", "More", "Nothing."]
    assert relations(trajectory) == (1, 0, 0)
    assert trajectory.template_mismatch is None


def test_an_answer_that_was_cut_is_continued_in_its_place() -> None:
    """Anthropic's clients must leave out white space at the end of what they send back."""
    seen: list[tuple[str, str]] = []

    def agent(row: Any, base_url: str, api_key: str) -> None:
        client, text = anthropic_client(base_url, api_key), ""
        for most in (4, 3, 100):
            begun = [{"role": "assistant", "content": text.rstrip()}] if text else []
            answer = client.messages.create(model="m", max_tokens=most, messages=[*row.messages, *begun])
            seen.append((answer.content[0].text, answer.stop_reason))
            text = text.rstrip() + answer.content[0].text
        messages = [*row.messages, {"role": "assistant", "content": text}, {"role": "user", "content": "More"}]
        seen.append((client.messages.create(model="m", max_tokens=9, messages=messages).content[0].text, ""))

    trajectory = led(Says("abc def", " d.efg", "f.", "Yes."), agent)
    assert trajectory.error is None, trajectory.error
    assert seen == [("abc ", "max_tokens"), (" d.", "max_tokens"), ("f.", "end_turn"), ("Yes.", "")]
    (segment,) = trajectory.segments
    assert spoken(segment) == [
        (-1, USER.format("Hi") + CUE),
        (0, "abc"),
        (1, " d."),
        (2, "f.<|im_end|>"),
        (-1, f"\n{USER.format('More')}{CUE}"),
        (3, "Yes.<|im_end|>"),
    ]
    assert trajectory.messages[1]["content"] == "abc d.f."
    assert relations(trajectory) == (2, 1, 0)  # the space that was left out
    assert trajectory.template_mismatch is None


def test_a_beginning_of_another_history_begins_a_segment() -> None:
    def agent(row: Any, base_url: str, api_key: str) -> None:
        client = openai_client(base_url, api_key)
        for question in ("Hi", "Ho"):
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "We"}]
            client.chat.completions.create(model="m", messages=messages)

    trajectory = led(Says("ll", " do"), agent)
    assert trajectory.error is None, trajectory.error
    assert [spoken(segment)[0][1] for segment in trajectory.segments] == [
        f"{USER.format(question)}{CUE}We" for question in ("Hi", "Ho")
    ]


def test_a_call_cannot_be_continued() -> None:
    seen: list[str] = []

    def agent(row: Any, base_url: str, api_key: str) -> None:
        client, messages = openai_client(base_url, api_key), list(row.messages)
        tools = [{"type": "function", "function": ADD}]
        answer = client.chat.completions.create(model="m", messages=messages, tools=tools).choices[0].message
        import openai

        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="m", messages=[*messages, answer], tools=tools)
        seen.append(refused.value.message)

    assert led(Says(call("add", '{"a": 1}')), agent).error is None
    assert "has a tool call, which is complete: send its result" in seen[0]


# what is no turn


def test_tokens_are_counted_and_answers_can_be_asked_for_again() -> None:
    seen: dict[str, Any] = {}

    def agent(row: Any, base_url: str, api_key: str) -> None:
        client, other = openai_client(base_url, api_key), anthropic_client(base_url, api_key)
        tools: Any = [{"name": "add", "input_schema": ADD["parameters"]}]
        messages: Any = [*row.messages, {"role": "assistant", "content": "Well"}]
        seen["counted"] = other.messages.count_tokens(model="m", messages=messages, tools=tools).input_tokens
        answer = other.messages.create(model="m", messages=messages, tools=tools, max_tokens=9)
        seen["used"] = answer.usage.input_tokens
        first = client.responses.create(model="m", input="Hi", instructions="Be brief.")
        more: Any = {"model": "m", "input": "More", "previous_response_id": first.id}
        seen["behind"] = client.responses.input_tokens.count(**more).input_tokens
        again = client.responses.retrieve(first.id)
        seen["again"] = (again.id, again.output_text, again.instructions)
        seen["same"] = again == first
        seen["input_tokens"] = client.responses.input_tokens.count(model="m", input="Hi").input_tokens
        whole = client.chat.completions.create(model="m", messages=row.messages)
        seen["chat"] = client.chat.completions.retrieve(whole.id).choices[0].message.content
        import openai

        with pytest.raises(openai.NotFoundError, match="no answer with the id"):
            client.responses.retrieve("resp_0")
        seen["id"] = first.id

    trajectory = led(Says("!", "Yes.", "Yo."), agent)
    assert trajectory.error is None, trajectory.error
    assert len(trajectory.turns) == 3
    assert seen["counted"] == seen["used"] > 100  # the tool is part of the prompt
    assert seen["again"] == (seen["id"], "Yes.", "Be brief.")
    assert seen["same"]
    assert (seen["input_tokens"], seen["chat"]) == (21, "Yo.")
    assert seen["behind"] > 21 + len("Yes.More")


# forms


def test_a_choice_of_no_tools() -> None:
    seen: list[tuple[int, Any]] = []

    def agent(row: Any, base_url: str, api_key: str) -> None:
        for mode in ("required", "auto"):
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": []}}
            body = {"messages": row.messages, "tools": [{"type": "function", "function": ADD}], "tool_choice": choice}
            seen.append(post(f"{base_url}/chat/completions", api_key, body))

    trajectory = led(Says("a"), agent)
    assert trajectory.error is None, trajectory.error
    assert [status for status, _ in seen] == [400, 200]
    assert seen[0][1]["error"]["param"] == "tool_choice"
    assert trajectory.turns[0].tools == ()


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
    ],
)
@pytest.mark.parametrize("of_server", [False, True])
def test_a_form_is_refused_where_no_grammar_can_be_sampled(body: Any, parameter: str, of_server: bool) -> None:
    seen: list[tuple[int, Any]] = []

    def agent(row: Any, base_url: str, api_key: str) -> None:
        request = {"messages": row.messages, "tools": [{"type": "function", "function": ADD}]}
        seen.append(post(f"{base_url}/chat/completions", api_key, {**request, **body}))
        assert post(f"{base_url}/chat/completions", api_key, request)[0] == 200

    make = AgentFunction(function=agent)
    make.use_prompts(EndpointPrompts() if of_server else RenderedPrompts(a_table(Says())))
    try:
        (trajectory,) = hold_all(Says("a"), make)
    finally:
        asyncio.run(make.aclose())
    assert trajectory.error is None, trajectory.error
    ((status, answer),) = seen
    assert (status, answer["error"]["param"]) == (400, parameter)
    assert answer["error"]["message"].startswith(f"`{parameter}`: the ")
    assert "engine.name=local" in answer["error"]["message"]


def post(url: str, key: str, body: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


# rewards


def test_a_reward_belongs_to_the_answer_that_it_names() -> None:
    seen: list[tuple[int, Any]] = []

    def agent(row: Any, base_url: str, api_key: str) -> None:
        client, messages = openai_client(base_url, api_key), list(row.messages)
        ids: list[str] = []
        for _ in range(3):
            answer = client.chat.completions.create(model="m", messages=messages)
            ids.append(answer.id)
            messages += [answer.choices[0].message, {"role": "user", "content": "More"}]
            if len(ids) == 2:
                seen.append(post(f"{base_url}/reward", api_key, {"reward": 1.0, "id": ids[0]}))
        seen.append(post(f"{base_url}/reward", api_key, {"reward": 0.25, "id": ids[0]}))
        seen.append(post(f"{base_url}/reward", api_key, {"reward": 2, "id": ids[1]}))
        seen.append(post(f"{base_url}/reward", api_key, {"reward": 4}))
        seen.append(post(f"{base_url}/reward", api_key, {"reward": 4, "id": "chatcmpl-0"}))
        seen.append(post(f"{base_url}/reward", api_key, {"reward": 4, "turn": 1}))

    trajectory = led(Says("a", "b", "c"), agent)
    assert trajectory.error is None, trajectory.error
    assert [turn.rewards for turn in trajectory.turns] == [{"environment": value} for value in (1.25, 2.0, 4.0)]
    assert [status for status, _ in seen] == [200] * 4 + [404, 400]
    assert "'turn' is unknown" in seen[5][1]["error"]["message"]


def test_a_reward_without_an_id_belongs_to_the_last_answer_that_the_agent_has_received() -> None:
    """Also if the model is sampling the next turn already, and if a limit cuts that turn; so does the agent's own reward."""
    engine, asked, reported = Says("a", "b" * 50), threading.Event(), threading.Event()
    generate = engine.generate

    async def slow(request: Any) -> Any:
        if len(engine.requests) == 1:
            asked.set()
            assert await asyncio.to_thread(reported.wait, 60)
        return await generate(request)

    engine.generate = slow  # type: ignore[method-assign]

    def agent(row: Any, base_url: str, api_key: str) -> float:
        client, messages = openai_client(base_url, api_key), list(row.messages)
        answer = client.chat.completions.create(model="m", messages=messages).choices[0].message
        messages += [answer, {"role": "user", "content": "More"}]

        def judge() -> None:
            assert asked.wait(60)
            assert post(f"{base_url}/reward", api_key, {"reward": 1.0})[0] == 200
            reported.set()

        judging = threading.Thread(target=judge)
        judging.start()
        with pytest.raises(Exception, match="reached a limit"):
            client.chat.completions.create(model="m", messages=messages)
        judging.join()
        return 0.5

    trajectory = led(engine, agent, limits=Limits(turns=8, tokens_per_turn=10))
    assert (trajectory.error, trajectory.stop) == (None, "length")
    assert [turn.rewards for turn in trajectory.turns] == [{"final_reward": 1.5}, {}]


def test_rewards_may_arrive_after_the_end_until_the_last_one() -> None:
    late: list[tuple[int, Any]] = []

    def agent(row: Any, base_url: str, api_key: str) -> None:
        id = post(f"{base_url}/chat/completions", api_key, {"messages": row.messages})[1]["id"]

        def judge() -> None:
            late.append(post(f"{base_url}/chat/completions", api_key, {"messages": row.messages}))
            for body in ({"reward": 1.0, "id": id}, {"reward": 0.5, "final": True}):
                late.append(post(f"{base_url}/reward", api_key, body))

        threading.Timer(2.3, judge).start()

    # the time for rewards counts for no limit
    limits = Limits(turns=8, tokens_per_turn=50, seconds_per_turn=2.0, seconds=2.0)
    trajectory = led(Says("a"), agent, seconds_for_rewards=60, limits=limits)
    assert trajectory.error is None, trajectory.error
    assert (trajectory.turns[0].reward, trajectory.stop) == (1.5, "done")
    assert late[0][0] == 410  # no further answers
    assert late[1][0] == 200


def test_a_reward_that_counts_for_nothing_is_refused() -> None:
    """After the last turn has received its rewards, as long as the conversation is not closed."""

    async def both() -> None:
        rewards = ReportedRewards()
        rewards.add(0, 1.0, False)
        assert rewards.take(0) == (1.0, {})
        rewards.add(0, 0.5, False)
        assert rewards.take(0, at_end=True) == (0.5, {})
        with pytest.raises(Refused, match="the conversation has ended") as refused:
            rewards.add(0, 0.5, False)
        assert refused.value.status == 410

    asyncio.run(both())


def test_a_conversation_without_a_reward_in_time_fails() -> None:
    def agent(row: Any, base_url: str, api_key: str) -> None:
        openai_client(base_url, api_key).chat.completions.create(model="m", messages=row.messages)

    trajectory = led(Says("a"), agent, seconds_for_rewards=0.05)
    assert trajectory.error is not None
    assert "no reward arrived within seconds_for_rewards=0.05" in trajectory.error.message


# prompts that the agent writes itself


def test_texts_are_continued_behind_the_tokens_that_were_sampled() -> None:
    """A transcript that grows, also one that leaves out the end of an answer; token ids; and another prompt."""
    seen: list[Any] = []
    first = "Q: 2+3?\nA:"

    def agent(row: Any, base_url: str, api_key: str) -> None:
        client = openai_client(base_url, api_key)

        def ask(prompt: Any, **body: Any) -> str:
            answer = client.completions.create(model="m", prompt=prompt, **body)
            seen.append((answer.choices[0].text, answer.choices[0].finish_reason, answer.usage.prompt_tokens))
            return answer.choices[0].text

        text = first + ask(first, stop=["\n"], max_tokens=20)
        text += "\nQ: 4+4?\nA:"
        text += ask(text, max_tokens=2)
        ask(text + "<|im_end|>")
        ask("Else", stream=False)
        ask([44, 45])
        stream = client.completions.create(model="m", prompt=text + "<|im_end|>", stream=True)
        seen.append("".join(chunk.choices[0].text for chunk in stream))

    trajectory = led(Says(" 5\n", " 89", "!", "where", "x", "again"), agent)
    assert trajectory.error is None, trajectory.error
    assert [one[:2] for one in seen[:5]] == [
        (" 5", "stop"), (" 8", "length"), ("!", "stop"), ("where", "stop"), ("x", "stop"),
    ]  # fmt: skip
    assert seen[0][2] == len(first)
    assert seen[5] == "again"
    segment = trajectory.segments[0]
    assert spoken(segment) == [
        (-1, first),
        (0, " 5\n"),
        (-1, "Q: 4+4?\nA:"),
        (1, " 8"),
        (-1, "<|im_end|>"),
        (2, "!<|im_end|>"),
    ]
    assert [spoken(one)[0][1] for one in trajectory.segments[1:]] == ["Else", "JK", spoken_text(segment, 5)]
    assert relations(trajectory) == (1, 1, 3)


def spoken_text(segment: Any, runs: int) -> str:
    return "".join(text for _, text in spoken(segment)[:runs])


def test_texts_and_messages_are_not_mixed_and_wrong_prompts_are_refused() -> None:
    seen: list[tuple[int, Any]] = []

    def agent(row: Any, base_url: str, api_key: str) -> None:
        for prompt in ("", ["a", "b"], [10**9]):
            seen.append(post(f"{base_url}/completions", api_key, {"prompt": prompt}))
        assert post(f"{base_url}/completions", api_key, {"prompt": "a"})[0] == 200
        seen.append(post(f"{base_url}/chat/completions", api_key, {"messages": row.messages}))

    trajectory = led(Says("b"), agent)
    assert trajectory.error is None, trajectory.error
    assert [status for status, _ in seen] == [400] * 4
    assert "is no token of the model" in seen[2][1]["error"]["message"]
    assert "all those of /v1/completions, or none" in seen[3][1]["error"]["message"]


class Forms(Says):
    """It stands in for an engine that samples under grammars; its texts are taken as they are."""

    constrains = True


# long requests


class _Threads(Renderer):
    """Notes the threads in which long texts are encoded, and forms are made."""

    def __init__(self) -> None:
        super().__init__(byte_tokenizer())
        self.used: list[str] = []
        encode = self._text_ids

        def noted(text: str) -> Sequence[int]:
            if len(text) > 100_000:
                self.used.append(threading.current_thread().name)
            return encode(text)

        self._text_ids = noted

    def constraint(self, tools: Any, change: SamplingChange, **more: Any) -> Any:  # type: ignore[override]
        if change.asks_for_form:
            self.used.append(threading.current_thread().name)
        return super().constraint(tools, change, **more)


def test_what_takes_time_with_a_long_request_is_done_beside_the_event_loop() -> None:
    renderer, seen = _Threads(), list[int]()
    long = [{"role": "user", "content": "long " * 50_000}]

    def agent(row: Any, base_url: str, api_key: str) -> None:
        def ask(path: str, **body: Any) -> None:
            seen.append(post(f"{base_url}/{path}", api_key, {"max_tokens": 5, **body})[0])

        ask("messages/count_tokens", messages=long)
        ask("chat/completions", messages=long)
        ask("chat/completions", messages=row.messages, response_format={"type": "json_object"})

    make, limits = AgentFunction(function=agent), Limits(turns=8, tokens_per_turn=400)
    make.use_prompts(RenderedPrompts(a_table(Forms(), renderer=renderer)))
    try:
        (trajectory,) = hold_all(Forms("a", "{}"), make, renderer=renderer, limits=limits)
    finally:
        asyncio.run(make.aclose())
    assert trajectory.error is None, trajectory.error
    assert seen == [200, 200, 200]
    # after that, the grammar is known, and the record is compared with the template
    assert [name.rpartition("_")[0] for name in renderer.used[:3]] == ["turnwise-text"] * 3


def test_short_requests_do_not_wait_for_long_ones() -> None:
    """However many long ones there are, and an agent has one of them counted at a time."""
    free, statuses = threading.Event(), list[int]()

    async def agent(row: Any, base_url: str, api_key: str) -> None:
        def ask(path: str, text: str) -> None:
            body = {"max_tokens": 5, "messages": [{"role": "user", "content": text}]}
            statuses.append(post(f"{base_url}/{path}", api_key, body)[0])

        long = [asyncio.create_task(off_loop(lambda: free.wait(60), long=True)) for _ in range(4)]
        await asyncio.to_thread(ask, "messages/count_tokens", "short")
        await asyncio.to_thread(ask, "chat/completions", "Hi")
        assert not any(task.done() for task in long)
        free.set()
        await asyncio.gather(*long)

    trajectory = led(Says("a"), agent, limits=Limits(turns=8, tokens_per_turn=400, seconds=40))
    assert trajectory.error is None, trajectory.error
    assert statuses == [200, 200]


def test_requests_that_are_too_long_for_any_prompt_are_refused_before_anything_is_done_with_them() -> None:
    seen: list[tuple[int, Any]] = []
    bodies: list[tuple[str, Any]] = [
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 64_001}]}),
        ("messages/count_tokens", {"messages": [{"role": "user", "content": "x" * 64_001}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}] * 1001}),
        ("completions", {"prompt": "x" * 64_001}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "user": ["", *[0] * 1_000_000]}),
    ]

    def agent(row: Any, base_url: str, api_key: str) -> None:
        seen.extend(post(f"{base_url}/{path}", api_key, body) for path, body in bodies)
        assert post(f"{base_url}/chat/completions", api_key, {"messages": row.messages})[0] == 200

    trajectory = led(Says("a"), agent, limits=Limits(turns=8, tokens_per_turn=400, context=1000))
    assert trajectory.error is None, trajectory.error
    assert len(trajectory.turns) == 1
    assert [status for status, _ in seen] == [400, 400, 400, 400, 413]
    texts = [answer["error"]["message"] for _, answer in seen]
    assert all(
        "has 64001 characters, which is too long for the model's context of 1000 tokens" in texts[i] for i in (0, 1, 3)
    )
    assert "there are 1001 messages" in texts[2]
    assert "commas, colons and brackets" in texts[4]


# one call in a turn


def _masks(renderer: Renderer, text: str, **change: Any) -> bool:
    """Whether a turn may be this text."""
    tools = [{"type": "function", "function": ADD}]
    constraint = renderer.constraint(tools, SamplingChange(**change), stops=renderer.stop_token_ids)
    assert constraint is not None
    matcher = renderer.masks.matcher(constraint)
    try:
        for token in [*renderer.encode(text), renderer.stop_token_ids[0]]:
            matcher.advance(token)
    except GrammarError:
        return False
    return True


@pytest.mark.parametrize("more", [{}, {"tool_choice": "required"}])
def test_without_parallel_calls_a_turn_ends_behind_its_first_call(more: dict[str, Any]) -> None:
    renderer, one = Renderer(byte_tokenizer()), call("add", '{"a": 2}')
    assert _masks(renderer, one + one, tool_names=["add"], **more)
    assert _masks(renderer, one, single_call=True, **more)
    assert not _masks(renderer, one + one, single_call=True, **more)
    if not more:
        assert not _masks(renderer, f"{one}\n{one}", single_call=True)
        assert not _masks(renderer, f"{one} and more", single_call=True)
        assert _masks(renderer, "No call.", single_call=True)
        assert _masks(renderer, f"I call: {one}", single_call=True)


def test_requests_without_parallel_calls_ask_for_a_single_call_in_all_apis() -> None:
    seen: list[Any] = []

    def agent(row: Any, base_url: str, api_key: str) -> None:
        client, tools = openai_client(base_url, api_key), [{"type": "function", "function": ADD}]
        for messages in (row.messages, [*row.messages, *row.messages]):
            client.chat.completions.create(model="m", messages=messages, tools=tools, parallel_tool_calls=False)  # type: ignore[arg-type]
        answer = client.responses.create(
            model="m",
            input="Hi",
            tools=[{"type": "function", "strict": True, **ADD}],
            tool_choice="required",
            parallel_tool_calls=False,
            metadata={"a": "b"},
        )
        seen.append((answer.parallel_tool_calls, answer.tool_choice, answer.metadata, answer.tools[0].type))
        form = {"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {}}, "strict": True}
        answer = client.responses.create(model="m", input="Ho", text={"format": form})  # type: ignore[arg-type]
        assert answer.text is not None
        seen.append((answer.parallel_tool_calls, answer.tool_choice, answer.text.format.type))  # type: ignore[union-attr]
        anthropic_client(base_url, api_key).messages.create(
            model="m",
            max_tokens=50,
            messages=[{"role": "user", "content": "Hu"}],
            tools=[{"name": "add", "input_schema": ADD["parameters"]}],
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        )

    trajectory = led(Forms("a", "b", call("add", '{"a": 2}'), "{}", "c"), agent)
    assert trajectory.error is None, trajectory.error
    grammars = ["" if turn.constraint is None else turn.constraint.grammar for turn in trajectory.turns]
    assert ["call_in_text WS" in grammar for grammar in grammars] == [True, True, False, False, True]
    assert seen == [(False, "required", {"a": "b"}, "function"), (True, "auto", "json_schema")]
    assert trajectory.turns[2].info["agent"]["forced"] == {"tools.strict": True}


def test_fields_of_messages_and_tools_that_have_no_effect_are_recorded() -> None:
    def agent(row: Any, base_url: str, api_key: str) -> None:
        part = {"type": "text", "text": "Hi", "odd": 1}
        body = {"messages": [{"role": "user", "content": [part], "name": "Ada"}], "tools": [], "metadata": {"x": "y"}}
        assert post(f"{base_url}/chat/completions", api_key, body)[0] == 200
        block = {"type": "tool_result", "tool_use_id": "a", "content": "no", "is_error": True}
        status, _ = post(
            f"{base_url}/messages", api_key, {"max_tokens": 5, "messages": [{"role": "user", "content": [block]}]}
        )
        assert status == 200
        refused = {
            "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "function_call": {"name": "add"}}]
        }
        status, answer = post(f"{base_url}/chat/completions", api_key, refused)
        assert (status, "has function_call" in answer["error"]["message"]) == (400, True)

    first, second = led(Says("a", "b"), agent).turns
    assert first.info["agent"]["forced"] == {"messages.name": "Ada", "messages.content.odd": 1}
    assert second.info["agent"]["forced"] == {"messages.content.is_error": True}


def test_a_reward_that_is_sent_again_counts_once() -> None:
    seen: list[int] = []

    def agent(row: Any, base_url: str, api_key: str) -> None:
        assert post(f"{base_url}/chat/completions", api_key, {"messages": row.messages})[0] == 200
        bodies: list[Any] = [
            {"reward": 0.5, "key": "a"},
            {"reward": 0.5, "key": "a"},
            {"reward": 0.25, "key": "a"},
            {"reward": 0.25, "key": "b"},
            {"reward": 0.125},
            {"reward": 0.125},
            {"reward": 1, "key": ""},
            {"reward": 1, "key": "c", "final": True},
            {"reward": 1, "key": "c", "final": True},
            {"reward": 1},
        ]
        seen.extend(post(f"{base_url}/reward", api_key, body)[0] for body in bodies)

    trajectory = led(Says("a"), agent)
    assert trajectory.error is None, trajectory.error
    assert seen == [200, 200, 409, 200, 200, 200, 400, 200, 200, 410]
    assert trajectory.turns[0].reward == 0.5 + 0.25 + 0.25 + 1


def test_requests_that_repeat_a_growing_conversation_are_kept_once() -> None:
    tools = [{"type": "function", "function": {**ADD, "description": "a" * 5000}}]

    async def lead() -> tuple[int, int, AgentConversation, list[Any]]:
        conversation = AgentConversation("{}", check_size=lambda _: None, count=lambda _: asyncio.sleep(0, 0))
        history: list[Any] = []
        tracemalloc.start()
        try:
            for turn in range(100):
                history.append({"role": "user", "content": f"{turn} {'u' * 2000}"})
                sent = json.loads(json.dumps({"messages": history, "tools": tools}))  # as a server reads it
                asking = asyncio.create_task(
                    conversation.ask(ChatRequest(messages=sent["messages"], tools=sent["tools"]))
                )
                pending = await conversation.next_request()
                message = {"role": "assistant", "content": f"{turn} {'a' * 2000}"}
                answer = AgentAnswer(
                    id=f"{turn}", created=0, model="m", message=message, prompt_tokens=0, completion_tokens=0
                )
                conversation.answer(pending, answer, turn)
                history.append((await asking).message)
                del sent, pending, asking
            return tracemalloc.get_traced_memory()[0], len(json.dumps(history)), conversation, history
        finally:
            tracemalloc.stop()

    kept, text, conversation, history = asyncio.run(lead())
    assert kept < 4 * text, (kept, text)  # each request with messages of its own: 50 times
    for turn in (0, 57, 99):
        request, answer = conversation.answered(f"{turn}")
        assert request.messages == history[: 2 * turn + 1]
        assert answer.message == history[2 * turn + 1]
        assert request.tools == tools
