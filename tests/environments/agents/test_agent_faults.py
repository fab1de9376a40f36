"""Wrong keys, hostile bodies, agents that crash, hang or hang up: each is answered, or fails its own conversation only."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from test_agent_clients import held, held_all, led

from support import byte_tokenizer
from support.conversations import Says, a_row, a_table, hold
from turnwise import assembly
from turnwise.chat.renderer import Renderer
from turnwise.environments.agents import AgentFunction, Program
from turnwise.environments.agents.proxy import Listening, Proxy, ProxyLease
from turnwise.environments.tools.toolbox import Tools
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rollout.context import Limits
from turnwise.rollout.prompts import RenderedPrompts
from turnwise.rollout.rollout import new_group, rollout_group
from turnwise.runs.sampling_only import conversation_context, prepare
from turnwise.types import Trajectory

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def post(
    base_url: str, key: str, body: bytes | Any, *, path: str = "/chat/completions", method: str = "POST", **headers: str
) -> tuple[int, Any]:
    """One request, without a client library: status and body."""
    address = urlsplit(base_url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=20)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, f"/v1{path}", data, {"Authorization": f"Bearer {key}", **headers})
    response = connection.getresponse()
    answer = json.loads(response.read() or b"null")
    connection.close()
    return response.status, answer


def asked(
    body: bytes | Any, *, path: str = "/chat/completions", key: str | None = None, method: str = "POST", **headers: str
) -> tuple[int, Any]:
    """A bad request in front of a good one: what it is answered, and that the conversation goes on."""
    seen: list[tuple[int, Any]] = []

    def agent(row: Any, base_url: str, api_key: str) -> None:
        seen.append(post(base_url, api_key if key is None else key, body, path=path, method=method, **headers))
        assert post(base_url, api_key, CHAT)[0] == 200

    trajectory = led(Says("a", "b"), agent)
    assert len(trajectory.turns) == 1
    return seen[0]


def test_a_wrong_key_an_unknown_conversation_and_no_key() -> None:
    status, body = asked(CHAT, key="sk-wrong")
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    assert asked(CHAT, key="")[0] == 401
    status, body = asked(CHAT, key="tw-of-an-earlier-run")
    assert status == 404
    assert "no conversation with this API key" in body["error"]["message"]
    for path in ("/models", "/models/any"):
        status, body = asked(b"", key="sk-wrong", path=path, method="GET")
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert asked(b"", path=path, method="GET")[0] == 200
    status, body = asked(CHAT, key="x", path="/messages")
    assert (status, body["type"], body["error"]["type"]) == (401, "error", "authentication_error")


def test_bodies_that_are_too_long_or_no_json() -> None:
    status, body = asked(b"{}", **{"Content-Length": str(1 << 40)})
    assert (status, body["error"]["code"]) == (413, "request_too_large")
    assert asked(b'{"model": ')[0] == 400
    assert asked(b"[1, 2]")[0] == 400
    assert asked(b"[" * 200_000)[0] == 400
    assert asked(b"\xff\xfe")[0] == 400


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/chat/completions", {**CHAT, "n": 2}, "n=2 is not supported: a conversation has one answer"),
        ("/chat/completions", {**CHAT, "logprobs": True}, "logprobs=True is not supported"),
        (
            "/chat/completions",
            {**CHAT, "response_format": {"type": "xml"}},
            "`response_format`: {'type': 'xml'} is no form",
        ),
        (
            "/chat/completions",
            {**CHAT, "tool_choice": "required"},
            "asks for 'any tool', and the tools of the request are []",
        ),
        ("/chat/completions", {**CHAT, "best_idea": 1}, "best_idea=1 is not supported: the parameter is unknown"),
        ("/chat/completions", {**CHAT, "max_tokens": 0}, "an integer of at least 1"),
        ("/chat/completions", {**CHAT, "stop": [""]}, "texts that are not empty"),
        ("/chat/completions", {"messages": []}, "at least one message"),
        ("/chat/completions", {"messages": ["Hi"]}, "message 0 has the role None"),
        (
            "/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "texts and images",
        ),
        (
            "/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}]},
            "must be a data URI",
        ),
        ("/chat/completions", {"messages": [{"role": "tool", "content": "3"}]}, "no tool_call_id"),
        ("/chat/completions", {"messages": [{"role": "assistant", "content": "I"}]}, "and it is the only one"),
        ("/chat/completions", {"messages": [*CHAT["messages"], {"role": "assistant"}]}, "and it has no text"),
        ("/chat/completions", {**CHAT, "tools": [{"type": "web_search"}]}, "tools must be functions"),
        ("/chat/completions", {**CHAT, "tools": 5}, "cannot be read"),
        ("/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "item 0 of `input` has the type"),
        (
            "/responses",
            {"input": "Hi", "text": {"format": {"type": "json_schema"}}},
            "`text`: {'type': 'json_schema'} is no form",
        ),
        ("/messages", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "texts and images"),
        ("/messages", {"messages": [{"role": "robot", "content": ""}]}, "the roles are user and assistant"),
    ],
)
def test_what_is_not_supported_is_refused_with_its_name_and_the_conversation_goes_on(
    path: str, body: Any, why: str
) -> None:
    status, answer = asked(body, path=path)
    assert status == 400
    assert why in answer["error"]["message"]


PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}, {"type": "text", "text": "?"}]}


def test_an_image_for_a_text_model_is_refused_and_the_conversation_goes_on() -> None:
    """In the first request, behind an answer, and in another history."""
    seen: list[tuple[int, Any]] = []

    def agent(row: Any, base_url: str, api_key: str) -> None:
        bad = {**CHAT, "messages": [IMAGE]}
        seen.append(post(base_url, api_key, bad))
        status, answer = post(base_url, api_key, CHAT)
        assert status == 200
        history = [*CHAT["messages"], answer["choices"][0]["message"]]
        seen.append(post(base_url, api_key, {**CHAT, "messages": [*history, IMAGE]}))
        seen.append(post(base_url, api_key, bad))
        more = {**CHAT, "messages": [*history, {"role": "user", "content": "More"}]}
        assert post(base_url, api_key, more)[0] == 200

    make = AgentFunction(function=agent)
    make.use_prompts(RenderedPrompts(a_table(Says())))
    trajectory = held(Says("a", "b"), make)
    assert trajectory.error is None, trajectory.error
    assert trajectory.assistant_texts == ["a", "b"]
    assert len(trajectory.segments) == 1
    assert [status for status, _ in seen] == [400] * 3
    for _, body in seen:
        assert "does not accept images" in body["error"]["message"]
        assert body["error"]["param"] == "messages"


def test_messages_that_the_template_refuses_are_the_requests_error() -> None:
    strict = byte_tokenizer()
    refusal = "{% if 'secret' in messages[-1].content %}{{ raise_exception('no secrets here') }}{% endif %}"
    strict.chat_template = refusal + strict.chat_template
    renderer = Renderer(strict)
    seen: list[tuple[int, Any]] = []

    def agent(row: Any, base_url: str, api_key: str) -> None:
        seen.append(post(base_url, api_key, {**CHAT, "messages": [{"role": "user", "content": "a secret"}]}))
        assert post(base_url, api_key, CHAT)[0] == 200

    make = AgentFunction(function=agent)
    make.use_prompts(RenderedPrompts(a_table(Says(), renderer=renderer)))
    assert held(Says("a"), make).error is None
    ((status, body),) = seen
    assert (status, "no secrets here" in body["error"]["message"]) == (400, True)


def test_the_recipe_gives_agents_the_check_of_its_model(model: Path, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        "import json, urllib.error, urllib.request\n"
        "def lead(row, base_url, api_key):\n"
        "    def ask(content):\n"
        "        body = json.dumps({'model': 'm', 'messages': [{'role': 'user', 'content': content}]}).encode()\n"
        "        headers = {'Authorization': f'Bearer {api_key}'}\n"
        "        request = urllib.request.Request(f'{base_url}/chat/completions', body, headers)\n"
        "        try:\n"
        "            return urllib.request.urlopen(request).status\n"
        "        except urllib.error.HTTPError as error:\n"
        "            return error.code\n"
        f"    first = ask([{{'type': 'image_url', 'image_url': {{'url': {PIXEL!r}}}}}])\n"
        "    return {'reward': 1.0, 'statuses': [first, ask('Hi')]}\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Hi"}\n')
    (tmp_path / "script.jsonl").write_text('["Yo."]\n')
    recipe = {
        "model": {"path": str(model)},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "engine": {"name": "scripted", "script": str(tmp_path / "script.jsonl")},
        "environment": {
            "use": "turnwise.environments.agents:AgentFunction",
            "arguments": {"function": f"{tmp_path}/agent.py:lead"},
        },
    }
    config = Config.model_validate(recipe)

    async def run() -> Trajectory:
        run = prepare(config, assembly.sampling(config))
        async with conversation_context(run) as context:
            group = new_group(assembly.rows(config, held_out=False, limit=None)[0], size=1, seed=0)
            return (await rollout_group(group, context)).trajectories[0]

    trajectory = asyncio.run(run())
    assert trajectory.error is None, trajectory.error
    assert trajectory.turns[0].info["agent"]["result"]["statuses"] == [400, 200]


@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/messages"])
def test_half_of_a_surrogate_pair_is_refused_and_the_conversation_goes_on(path: str) -> None:
    for text in (b'"\\ud83d"', b'"a\\udc00b"', b'"\xed\xa0\xbd"'):
        content = b'{"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": ' + text + b"}]}"
        body = content.replace(b'"messages"', b'"input"') if path == "/responses" else content
        status, answer = asked(body, path=path)
        assert (status, "half of a surrogate pair" in answer["error"]["message"]) == (400, True)
    emoji = b'{"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}'
    assert b"input" in emoji.replace(b'"messages"', b'"input"')
    seen: list[int] = []
    led(Says("a"), lambda row, base_url, api_key: seen.append(post(base_url, api_key, emoji)[0]) or None)
    assert seen == [200]


def test_rewards_that_no_float_can_hold_are_refused_and_nothing_is_lost() -> None:
    seen: list[tuple[int, Any]] = []

    def agent(row: Any, base_url: str, api_key: str) -> None:
        assert post(base_url, api_key, CHAT)[0] == 200
        for reward in (
            "9" * 400,
            "-" + "9" * 400,
            "9" * 5000,
            "1e400",
            "NaN",
            "Infinity",
            '"1"',
            "true",
            "null",
            "[1]",
        ):
            seen.append(post(base_url, api_key, b'{"reward": ' + reward.encode() + b"}", path="/reward"))
        assert post(base_url, api_key, {"reward": 1.5e308}, path="/reward")[0] == 200
        seen.append(post(base_url, api_key, {"reward": 1.5e308}, path="/reward"))  # the sum is infinite
        assert post(base_url, api_key, {"reward": -1.5e308}, path="/reward")[0] == 200
        assert post(base_url, api_key, {"reward": 2}, path="/reward")[0] == 200

    assert led(Says("a"), agent).turns[0].reward == 2.0
    assert [status for status, _ in seen] == [400] * 11
    assert "`reward` must be a finite number" in seen[0][1]["error"]["message"]


def test_arguments_that_are_no_object_and_an_unknown_response() -> None:
    calls = [{"id": "x", "type": "function", "function": {"name": "add", "arguments": "[1"}}]
    messages = [{"role": "assistant", "content": None, "tool_calls": calls}, *CHAT["messages"]]
    status, body = asked({"messages": messages})
    assert (status, "must be a JSON object" in body["error"]["message"]) == (400, True)
    assert asked({"input": "Hi", "previous_response_id": "resp_1"}, path="/responses")[0] == 404
    assert asked(CHAT, path="/embeddings")[0] == 404


def test_a_request_after_the_end_is_refused() -> None:
    kept: list[tuple[str, str]] = []

    def agent(row: Any, base_url: str, api_key: str) -> None:
        kept.append((base_url, api_key))
        post(base_url, api_key, CHAT)

    lease = ProxyLease()
    lease.proxy()  # keeps the server
    try:
        led(Says("a"), agent)
        status, body = post(*kept[0], CHAT)
    finally:
        lease.release()
    assert (status, body["error"]["code"]) == (410, "conversation_ended")


def test_the_server_ends_with_its_last_user() -> None:
    first, second = ProxyLease(), ProxyLease()
    url = first.proxy().url
    assert second.proxy().url == url
    first.release()
    first.release()  # twice is no error
    assert post(url, "x", CHAT)[0] == 401
    second.release()
    with pytest.raises(ConnectionRefusedError):
        post(url, "x", CHAT)
    assert third_url() != url


def test_a_server_that_cannot_serve_is_told_and_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("not a certificate")
    with pytest.raises(ConfigError, match=r"bad\.pem' cannot be used"):
        Proxy(Listening(certificate=(str(tmp_path / "bad.pem"),) * 2))
    proxy = Proxy()
    proxy._serving.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        proxy.close()
    with pytest.raises(ConnectionRefusedError):
        post(proxy.url, "x", CHAT)


def third_url() -> str:
    lease = ProxyLease()
    try:
        return lease.proxy().url
    finally:
        lease.release()


def failed(trajectory: Trajectory) -> str:
    assert trajectory.error is not None
    assert trajectory.error.kind == "environment"
    return trajectory.error.message


class Asked(Says):
    """Says when a request has come, so that a client hangs up while the model is answering, on a busy machine too."""

    def __init__(self, *texts: str) -> None:
        super().__init__(*texts, seconds=600.0)
        self.asked = threading.Event()
        self.cancelled = 0

    async def generate(self, request: Any) -> Any:
        self.asked.set()
        try:
            return await super().generate(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


def test_a_client_that_hangs_up_fails_its_conversation_and_the_agent_is_ended() -> None:
    left = threading.Event()

    def agent(row: Any, base_url: str, api_key: str) -> None:
        address = urlsplit(base_url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        headers = {"Authorization": f"Bearer {api_key}"}
        connection.request("POST", "/v1/chat/completions", json.dumps(CHAT).encode(), headers)
        engine.asked.wait(60)
        connection.close()
        left.set()

    async def endless(row: Any, base_url: str, api_key: str) -> None:
        try:
            await asyncio.to_thread(agent, row, base_url, api_key)
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    ended: list[bool] = []
    engine = Asked("a")
    trajectory = held(engine, AgentFunction(function=endless))
    assert "closed its connection while the model was answering" in failed(trajectory)
    assert left.wait(60)
    assert ended == [True]


@pytest.mark.parametrize("with_tools", [False, True])
def test_a_client_that_hangs_up_cancels_the_turn_at_once(with_tools: bool) -> None:
    """The engine's request is cancelled, its cache is released, and the agent and its environment end, long before the turn."""
    import openai

    ended: list[float] = []

    async def agent(row: Any, base_url: str, api_key: str) -> None:
        try:
            async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
                asking = asyncio.create_task(client.chat.completions.create(**CHAT))  # type: ignore[call-overload]
                while not engine.asked.is_set():
                    await asyncio.sleep(0.01)
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asking
            await asyncio.sleep(3600)
        finally:
            ended.append(time.monotonic())

    def double(number: int) -> int:
        """Twice a number."""
        return 2 * number

    engine, source = Asked("a"), AgentFunction(function=agent)
    began = time.monotonic()
    if with_tools:
        trajectory = hold(engine, lambda: Tools([double], then=source()))
        asyncio.run(source.aclose())
    else:
        trajectory = held(engine, source)
    assert "closed its connection while the model was answering" in failed(trajectory)
    assert (engine.cancelled, len(ended)) == (1, 1)
    assert ended[0] - began < 300
    assert engine.released == [trajectory.id]
    assert trajectory.turns == []


def test_an_agent_that_raises_or_returns_nonsense() -> None:
    def raises(row: Any, base_url: str, api_key: str) -> None:
        post(base_url, api_key, CHAT)
        raise KeyError("lost")

    trajectory = held(Says("a"), AgentFunction(function=raises))
    assert failed(trajectory).startswith("KeyError: lost")
    assert "raise KeyError" in trajectory.error.traceback  # type: ignore[union-attr]
    text = held(Says("a"), AgentFunction(function=lambda row, base_url, api_key: post(base_url, api_key, CHAT) and "x"))
    assert "the result of" in failed(text)
    never = held(Says("a"), AgentFunction(function=lambda row, base_url, api_key: 1.0))
    assert "ended before its first request" in failed(never)


PROGRAM = """
import json, os, sys, time, urllib.request
row = json.loads(os.environ["TURNWISE_ROW"])
def post(path, body):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + path,
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request))
def ask(messages):
    return post("/chat/completions", {"model": "m", "messages": messages})["choices"][0]["message"]
"""


def program(tmp_path: Path, code: str, **options: Any) -> Program:
    path = tmp_path / "agent.py"
    path.write_text(PROGRAM + code, encoding="utf-8")
    return Program(command=[sys.executable, "-I", str(path)], **options)


def test_a_program_that_crashes_is_a_failure_with_its_last_output(tmp_path: Path) -> None:
    make = program(tmp_path, "ask(row['messages'])\nprint('so far')\nraise SystemExit('no luck')")
    trajectory = held(Says("a"), make)
    assert failed(trajectory).startswith("the program '")
    assert failed(trajectory).endswith("ended with the exit status 1. Its last output: no luck")
    assert trajectory.error is not None
    assert trajectory.error.traceback == "", "frames of turnwise hide the program's own output"
    killed = program(tmp_path, "ask(row['messages'])\nos.kill(os.getpid(), 9)")
    assert "was killed by signal 9" in failed(held(Says("a"), killed))
    early = program(tmp_path, "print('nothing to do')")
    assert "ended before its first request" in failed(held(Says("a"), early))


def _running(marker: str) -> list[str]:
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    marker = f"marker-{os.getpid()}"
    child = f"import subprocess\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)', '{marker}'])"
    code = f"{child}\nask(row['messages'])\ntime.sleep(3600)"
    path = tmp_path / marker
    path.mkdir()
    make = program(path, code)
    trajectory = held(Says("a"), make, limits=Limits(seconds_per_turn=3.0))
    assert (trajectory.stop, trajectory.error.kind) == ("deadline", "deadline")  # type: ignore[union-attr]
    for _ in range(50):
        if not _running(marker):
            break
        time.sleep(0.1)
    assert _running(marker) == []


def test_one_bad_agent_leaves_the_others_alone() -> None:
    def agent(row: Any, base_url: str, api_key: str) -> float:
        with lock:
            number = next(numbers)
        post(base_url, api_key, CHAT)
        if number == 1:
            raise ValueError("bad")
        return float(number)

    lock, numbers = threading.Lock(), iter(range(4))
    trajectories = held_all(Says("a"), AgentFunction(function=agent), size=4)
    assert sorted(sum(turn.reward for turn in trajectory.turns) for trajectory in trajectories) == [0.0, 0.0, 2.0, 3.0]
    assert [trajectory.error is not None for trajectory in trajectories].count(True) == 1


# rewards


def test_rewards_that_the_program_reports_belong_to_the_turn_before(tmp_path: Path) -> None:
    code = """
first = ask(row["messages"])
post("/reward", {"reward": 0.25})
ask([*row["messages"], first, {"role": "user", "content": row["more"]}])
post("/reward", {"reward": 1})
print("done")
"""
    trajectory = held(Says("a", "b"), program(tmp_path, code), row=a_row(more="More"))
    assert trajectory.error is None
    assert [turn.reward for turn in trajectory.turns] == [0.25, 1.0]
    assert trajectory.turns[1].info["agent"] == {"exit_status": 0, "stdout": "done\n"}
    assert trajectory.metrics == {
        "agent/extended": 1,
        "agent/realigned": 0,
        "agent/returned": 0,
        "agent/forked": 0,
        "agent/forced": 0,
    }


@pytest.mark.parametrize(("code", "reward"), [("", 1.0), ("sys.exit(1)", 0.0)])
def test_an_exit_status_is_a_reward(tmp_path: Path, code: str, reward: float) -> None:
    make = program(tmp_path, f"ask(row['messages'])\n{code}", reward="exit_status")
    assert held(Says("a"), make).turns[0].reward == reward


def test_other_exit_statuses_are_failures(tmp_path: Path) -> None:
    make = program(tmp_path, "ask(row['messages'])\nsys.exit(2)", reward="exit_status")
    assert "exit status 2" in failed(held(Says("a"), make))


def test_the_last_line_is_the_result(tmp_path: Path) -> None:
    code = "ask(row['messages'])\nprint('log')\nprint(json.dumps({'reward': 0.5, 'why': 'half'}))"
    (turn,) = held(Says("a"), program(tmp_path, code, reward="json")).turns
    assert (turn.reward, turn.info["agent"]["result"]) == (0.5, {"reward": 0.5, "why": "half"})
    nonsense = program(tmp_path, "ask(row['messages'])\nprint('5 of 5')", reward="json")
    assert "the last line that the program prints must be a number" in failed(held(Says("a"), nonsense))


def test_a_program_that_a_limit_ends_can_still_report_its_reward(tmp_path: Path) -> None:
    code = """
import urllib.error
messages = list(row["messages"])
while True:
    try:
        messages += [ask(messages), {"role": "user", "content": "More"}]
    except urllib.error.HTTPError as error:
        print(error.code)
        post("/reward", {"reward": 0.75})
        break
"""
    trajectory = held(Says("a", "b", "c"), program(tmp_path, code), limits=Limits(turns=2))
    assert (trajectory.stop, trajectory.error) == ("max_turns", None)
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.75]
    assert trajectory.turns[1].info["agent"]["stdout"] == "410\n"


def test_a_program_that_does_not_end_after_a_limit_is_stopped(tmp_path: Path) -> None:
    code = "messages = row['messages']\nask(messages)\ntry: ask(messages)\nexcept OSError: time.sleep(3600)"
    make = program(tmp_path, code, seconds_to_finish=0.3)
    trajectory = held(Says("a", "b"), make, limits=Limits(turns=1))
    assert (trajectory.stop, trajectory.error, trajectory.turns[0].reward) == ("max_turns", None, 0.0)
    assert "was stopped" in trajectory.turns[0].info["agent"]["ended"]


def test_output_is_bounded_and_a_long_row_is_read_from_the_server(tmp_path: Path) -> None:
    code = """
request = urllib.request.Request(os.environ["TURNWISE_URL"] + "/row")
request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
row = json.load(urllib.request.urlopen(request))
ask([{"role": "user", "content": row["long"][:2]}])
print("x" * 100000 + "end")
"""
    (tmp_path / "agent.py").write_text(PROGRAM.replace('json.loads(os.environ["TURNWISE_ROW"])', "None") + code)
    make = Program(command=f"{sys.executable} -I {tmp_path}/agent.py", output_chars=10)
    trajectory = held(Says("a"), make, row=a_row(long="y" * 200_000))
    assert trajectory.error is None, trajectory.error
    assert trajectory.messages[0]["content"] == "yy"
    assert trajectory.turns[0].info["agent"]["stdout"] == "xxxxxxend\n"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"command": ""}, "command is empty"),
        ({"command": "'"}, "cannot be split into words"),
        ({"command": "no-such-program x"}, "'no-such-program' does not exist"),
        ({"command": "ls", "cwd": "/nowhere"}, "no such directory"),
        ({"command": "ls", "reward": "stars"}, "choose reported, exit_status, json"),
        ({"command": "ls", "output_chars": -1}, "at least 0"),
        ({"command": "ls", "seconds_to_finish": -1}, "at least 0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Program(**options)


def test_a_function_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot be called with \(row, base_url=..., api_key=..., \*\*\{\}\)"):
        AgentFunction(function=lambda row: None)
    with pytest.raises(ConfigError, match="nowhere"):
        AgentFunction(function="nowhere.py:solve")


def test_a_row_that_json_cannot_hold_is_a_failure_with_the_name_of_the_column() -> None:
    make = AgentFunction(function=lambda row, base_url, api_key: None)
    assert "the column 'picture' cannot be given to an agent" in failed(
        held(Says("a"), make, row=a_row(picture=object()))
    )
