"""MCP: real servers, started by the tests, over stdio and over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.conversations import Says, call, hold, hold_all
from turnwise import assembly
from turnwise.config.recipe import checked
from turnwise.environments.mcp import McpServer, McpServers, _end_of, _own_words, _Sessions, _without_titles
from turnwise.environments.tools.result import Answer
from turnwise.environments.tools.toolbox import Tool, ToolResponse, Tools
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rollout.context import Limits
from turnwise.types import ToolCall

SCRIPT = str(Path(__file__).parent.parent / "support" / "mcp_server.py")
STDIO = McpServer(command=sys.executable, args=[SCRIPT, "stdio"], env={"SERVER_API_KEY": "k"})
SMALL = McpServer(command=sys.executable, args=["-I", "-S", SCRIPT.replace("mcp_server", "small_mcp_server")])
"""For what does not depend on the SDK's server, whose imports take a second."""


@contextlib.contextmanager
def servers(**named: McpServer) -> Iterator[McpServers]:
    made = McpServers(named)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def web_server(kind: str, port: int | None = None) -> Iterator[int]:
    """A server process on a free port of this machine."""
    if port is None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, SCRIPT, kind, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(1000):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.02)
        yield port
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def stdio() -> Iterator[list[Tool]]:
    """The tools of one server over stdio."""
    with pytest.MonkeyPatch.context() as patch, servers(tests=STDIO) as made:
        patch.setenv("SECRET_TOKEN", "s")
        yield made.tools(timeout=10.0)


def ask(tools: list[Tool], name: str, /, **arguments: Any) -> Answer:
    """One call, in an event loop of its own."""
    return asyncio.run(asking(tools, name, **arguments))


async def asking(tools: list[Tool], name: str, /, **arguments: Any) -> Answer:
    (tool,) = [tool for tool in tools if tool.name == name]
    return await tool.answer(ToolCall(id="call_0", name=name, arguments=arguments, text=""))


def gone(pid: int) -> bool:
    """Whether a process that was not ours to wait for has ended."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


# schemas


def test_the_full_schemas_of_a_server_are_listed(stdio: list[Tool]) -> None:
    schemas = {tool.name: tool.schema for tool in stdio}
    assert list(schemas) == [
        "add",
        "visit",
        "slow",
        "meet",
        "remember",
        "given_up",
        "image",
        "fail",
        "refuse",
        "die",
        "env",
        "pid",
        "large",
    ]
    assert schemas["visit"]["type"] == "function"
    function = schemas["visit"]["function"]
    assert (function["name"], function["description"]) == ("visit", "Go somewhere.")
    parameters = function["parameters"]
    assert parameters["properties"]["place"] == {"$ref": "#/$defs/Place"}
    assert parameters["properties"]["tags"]["items"] == {"type": "string"}
    assert parameters["properties"]["how"]["enum"] == ["foot", "train"]
    assert parameters["properties"]["how"]["default"] == "foot"
    assert parameters["$defs"]["Place"]["properties"]["zip"]["anyOf"] == [{"type": "string"}, {"type": "null"}]
    assert parameters["required"] == ["place", "tags"]


def test_arguments_are_checked_before_the_server_is_asked(stdio: list[Tool]) -> None:
    wrong = ask(stdio, "visit", place={"zip": 1}, tags="a")
    assert wrong.outcome.error == "arguments"
    assert wrong.content == (
        "Error: place: 'city' is a required property; place.zip: 1 is not valid under any of the given schemas; "
        "tags: 'a' is not of type 'array'"
    )
    assert ask(stdio, "visit", place={"city": "Rome"}, tags=["a"]).content == "Rome ['a'] foot"


# results


def test_calls_are_answered_over_one_session_from_whichever_event_loop(stdio: list[Tool]) -> None:
    first, second = ask(stdio, "pid"), ask(stdio, "pid")
    assert first.content == second.content
    assert int(str(first.content)) != os.getpid()
    assert ask(stdio, "add", a=2, b=3).content == "5"
    assert ask(stdio, "add", a=2).content == "3"


def test_images_arrive_as_images(stdio: list[Tool]) -> None:
    answer = ask(stdio, "image", count=2)
    assert [part["type"] for part in answer.content] == ["image", "image", "text"]  # type: ignore[index]
    from PIL import Image

    image = answer.content[0]["image"]  # type: ignore[index]
    assert isinstance(image, Image.Image)
    assert (image.size, image.getpixel((0, 0))) == ((3, 2), (255, 0, 0))
    assert answer.outcome.content == "here\n[2 images]"


def test_an_error_of_a_tool_is_reported_and_not_tried_again(stdio: list[Tool]) -> None:
    answer = ask(stdio, "fail")
    assert (answer.outcome.error, answer.content) == ("raised", "Error: the pump is broken")
    assert ask([replace(tool, retries=3) for tool in stdio], "fail").outcome.attempts == 1
    answer = ask(stdio, "refuse")
    assert (answer.outcome.error, answer.content) == ("raised", 'Error: {"code": 17}')


@pytest.mark.parametrize(
    ("told", "own"),
    [
        ("Error executing tool fail: no water", "no water"),  # the SDK for Python
        ("Error executing tool fail", ""),
        ("Error executing tool other: no water", "Error executing tool other: no water"),
        ("Error calling tool 'fail': no water", "no water"),  # fastmcp
        ("MCP error -32602: no water", "no water"),  # the SDK for TypeScript
        ("no water: Error executing tool fail: x", "no water: Error executing tool fail: x"),
    ],
)
def test_what_servers_put_in_front_of_an_error_is_not_told_to_the_model(told: str, own: str) -> None:
    assert _own_words(told, "fail") == own


def test_a_server_gets_nothing_of_our_environment_that_is_not_safe(stdio: list[Tool]) -> None:
    assert os.environ["SECRET_TOKEN"] == "s"
    seen = json.loads(str(ask(stdio, "env").content))
    assert seen["SERVER_API_KEY"] == "k"
    assert seen["PATH"] == os.environ["PATH"]
    assert set(seen) <= {"HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "SERVER_API_KEY", "LC_CTYPE"}


def test_calls_run_together_and_their_timeouts_are_obeyed(stdio: list[Tool]) -> None:
    async def main() -> list[Answer]:
        return list(await asyncio.gather(*(asking(stdio, "meet", count=8) for _ in range(8))))

    assert [answer.content for answer in asyncio.run(main())] == [
        "met"
    ] * 8  # one after the other, the first would wait for ever

    tools = [replace(tool, timeout=0.2) for tool in stdio]
    answer = ask(tools, "slow", seconds=60)
    assert (answer.outcome.error, answer.content) == ("timeout", "Error: slow took longer than 0.2 s")
    assert answer.outcome.seconds < 30
    assert ask(stdio, "pid").content == ask(stdio, "pid").content  # the session is as it was
    assert ask(stdio, "given_up").content == "1"  # and the server does not go on for nobody


def test_conversations_call_the_tools_of_a_server(stdio: list[Tool]) -> None:
    engine = Says(call("add", '{"a": 20, "b": 22}') + call("pid"), call("ad"), "42")
    (one, two) = hold_all(engine, lambda: Tools(stdio), size=2)
    for trajectory in (one, two):
        assert (trajectory.stop, trajectory.error) == ("done", None)
        assert trajectory.turns[0].outcomes[0].content == "42"
        assert trajectory.turns[0].outcomes[1].error is None
        assert trajectory.turns[1].outcomes[0].error == "unknown_tool"


def test_what_a_result_means_can_be_overridden() -> None:
    class Counting(McpServers):
        def parse_result(self, content: list[Any]) -> ToolResponse:
            return ToolResponse(text=f"{len(content)} blocks, the first says {content[0].text}")

    made = Counting({"tests": SMALL})
    try:
        assert ask(made.tools(), "image").content == "2 blocks, the first says here"
        assert ask(made.tools(), "fail").content == "Error: 1 blocks, the first says the pump is broken"
    finally:
        made.close()


def test_content_of_other_kinds_is_named() -> None:
    from mcp.types import AudioContent, EmbeddedResource, ResourceLink, TextContent, TextResourceContents

    with servers(tests=SMALL) as made:
        response = made.parse_result(
            [
                TextContent(type="text", text="a"),
                AudioContent(type="audio", data="", mime_type="audio/wav"),
                ResourceLink(type="resource_link", name="page", uri="file:///page"),
                EmbeddedResource(type="resource", resource=TextResourceContents(uri="file:///x", text="inside")),
            ]
        )
        assert made.parse_result([]) == ToolResponse(text="")
    assert response.text == ("a\n[audio of the type audio/wav, which is not supported]\npage: file:///page\ninside")
    assert response.image is None


# a server's life


@pytest.mark.slow
def test_a_server_that_dies_is_reported_and_started_again() -> None:
    with servers(tests=STDIO) as made:
        tools = made.tools()

        async def main() -> list[Answer]:
            slow = asyncio.create_task(asking(tools, "slow", seconds=60))
            await asyncio.sleep(0.1)
            return [await asking(tools, "die"), await slow]

        before = int(str(ask(tools, "pid").content))
        started = time.perf_counter()
        for answer in asyncio.run(main()):
            assert answer.outcome.error == "raised"
            assert (
                answer.content
                == "Error: ConnectionError: the connection to the MCP server 'tests' was lost: Connection closed"
            )
        assert time.perf_counter() - started < 30
        after = int(str(ask(tools, "pid").content))
        assert after != before
        assert gone(before)
        # one that dies while nobody speaks with it is not even noticed
        os.kill(after, signal.SIGKILL)
        assert gone(after)
        time.sleep(0.05)
        answer = ask(tools, "add", a=1)
        assert (answer.content, answer.outcome.error) == ("2", None)


@pytest.mark.slow
def test_a_lost_server_is_worth_a_further_attempt() -> None:
    with servers(tests=STDIO) as made:
        assert ask(made.tools(retries=1), "die").outcome.attempts == 2


@pytest.mark.slow
def test_a_conversation_outlives_a_server_that_dies() -> None:
    with servers(tests=STDIO) as made:
        tools = made.tools()
        trajectory = hold(Says(call("die"), call("add", '{"a": 1}'), "2"), lambda: Tools(tools))
    assert trajectory.error is None
    assert [turn.outcomes[0].error for turn in trajectory.turns[:2]] == ["raised", None]


def test_closing_ends_the_servers_process() -> None:
    with servers(tests=SMALL) as made:
        tools = made.tools(["pid"])
        pid = int(str(ask(tools, "pid").content))
        os.kill(pid, 0)  # it is there
    assert gone(pid)
    made.close()  # once more is nothing
    answer = ask(tools, "pid")
    assert answer.content == "Error: ConnectionError: the MCP server 'tests' was closed"
    with pytest.raises(ConfigError, match="these MCP servers are closed: create a new McpServers"):
        made.tools()


def test_each_conversation_has_a_server_of_its_own_from_its_first_call_to_its_end() -> None:
    said = (call("remember", '{"word": "a"}'), call("remember", '{"word": "b"}'), "Done.")
    with servers(tests=SMALL) as made:
        box = made.toolbox(["remember"], titles=False, most=1)
        (schema,) = [tool.schema for tool in box.tools]
        assert schema["function"]["parameters"]["properties"] == {"word": {"type": "string"}}
        silent = hold(Says("No call."), lambda: Tools([box]))
        assert silent.error is None
        assert not made._connections  # nothing was started
        played = hold_all(Says(*said), lambda: Tools([box]), size=2)
        assert [trajectory.error for trajectory in played] == [None, None]
        heard = [[str(turn.outcomes[0].content).split() for turn in one.turns[:2]] for one in played]
        assert [[words for _, *words in one] for one in heard] == [[["a"], ["a", "b"]]] * 2
        pids = {int(answer[0]) for one in heard for answer in one}
        assert len(pids) == 2
        assert all(gone(pid) for pid in pids)
        assert not made._connections


def test_a_conversation_whose_session_is_lost_is_told_so_and_gets_no_empty_one() -> None:
    remember = call("remember", '{"word": "a"}')
    with servers(tests=SMALL) as made:
        box = made.toolbox(["remember", "die", "add"], retries=1)
        said = Says(remember, call("die", "{}"), remember, call("add", '{"a": 1}'), "Done.")
        lost, kept = hold_all(said, lambda: Tools([box]), size=2)
    for trajectory in (lost, kept):
        assert trajectory.error is None
        before, died, *after = [turn.outcomes[0] for turn in trajectory.turns[:4]]
        assert before.error is None
        assert (died.error, died.attempts) == ("raised", 2)
        for outcome in (died, *after):
            assert outcome.content.startswith(
                "Error: the session of this conversation with the MCP server 'tests' was lost, and with it all that earlier"
            )
        assert [outcome.attempts for outcome in after] == [1, 1]


def test_a_call_that_is_given_up_while_it_gets_its_place_gives_the_place_back() -> None:
    async def main(made: McpServers) -> None:
        free = asyncio.Semaphore(1)
        owners = {"add": made._listed[0]}

        async def in_its_loop() -> list[bool]:
            first, second = _Sessions(made, owners, free), _Sessions(made, owners, free)
            await first._enter()
            waiting = asyncio.create_task(second._enter())
            await asyncio.sleep(0)
            await first._end()  # the place goes to `second`, whose conversation ends before its call goes on
            await second._end()
            results = await asyncio.gather(waiting, return_exceptions=True)
            given_up, next_ = asyncio.create_task(_Sessions(made, owners, free)._enter()), _Sessions(made, owners, free)
            third = asyncio.create_task(next_._enter())
            given_up.cancel()
            await asyncio.wait_for(third, 10)
            await next_._end()
            return [isinstance(results[0], ConnectionError), not free.locked()]

        assert await asyncio.wrap_future(made._loop.submit(in_its_loop())) == [True, True]

    with servers(tests=SMALL) as made:
        asyncio.run(main(made))


def test_the_recipe_gives_each_conversation_its_server(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(json.dumps({"mcpServers": {"tests": SMALL.model_dump(exclude_unset=True)}}), encoding="utf-8")

    def tools(**options: Any) -> Config:
        mcp = {"servers": str(path), "select": ["remember"], **options}
        return checked({"model": "m", "data": {"train": "x"}, "mcp": mcp}, source="recipe")

    with pytest.raises(ConfigError, match=r"mcp.max_sessions=1 has no effect with mcp.scope=run"):
        assembly.environment_factory(tools(max_sessions=1))
    lockstep = tools(scope="conversation", max_sessions=1).model_copy(update={"deterministic": True})
    with pytest.raises(
        ConfigError,
        match=r"mcp.max_sessions=1 below max_concurrent=256: .* Remove mcp.max_sessions, and set max_concurrent=1",
    ):
        assembly.environment_factory(lockstep)
    with pytest.raises(ConfigError, match=r"mcp.max_sessions=1 has no effect with max_concurrent=1"):
        assembly.environment_factory(lockstep.model_copy(update={"max_concurrent": 1}))
    words = {}
    for scope in ("run", "conversation"):
        make = assembly.environment_factory(tools(scope=scope, **({"max_sessions": 1} if scope != "run" else {})))
        try:
            played = hold_all(Says(call("remember", '{"word": "a"}'), "Done."), make, size=2)
        finally:
            asyncio.run(make.aclose())
        words[scope] = sorted(str(one.turns[0].outcomes[0].content).partition(" ")[2] for one in played)
    assert words == {"run": ["a", "a a"], "conversation": ["a", "a"]}


@pytest.mark.slow
def test_resources_and_prompts_are_tools_if_the_recipe_says_so(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(json.dumps({"mcpServers": {"tests": STDIO.model_dump(exclude_unset=True)}}), encoding="utf-8")
    mcp = {"servers": str(path), "select": ["pid"], "also": ["resources", "prompts"], "scope": "conversation"}
    config = checked({"model": "m", "data": {"train": "x"}, "mcp": mcp}, source="recipe")
    make = assembly.environment_factory(config)
    asked = (
        call("list_resources"),
        call("read_resource", '{"uri": "notes://garden"}'),
        call("read_resource", '{"uri": "notes://of/Ann"}'),
        call("read_resource", '{"uri": "notes://nowhere"}'),
        call("list_prompts"),
        call("get_prompt", '{"name": "greet", "arguments": {"name": "Ann"}}'),
        "Done.",
    )
    try:
        played = hold(Says(*asked), make, limits=Limits(turns=8, tokens_per_turn=400))
    finally:
        asyncio.run(make.aclose())
    assert played.error is None, played.error
    assert [tool["function"]["name"] for tool in played.tools] == [
        "pid", "list_resources", "read_resource", "list_prompts", "get_prompt",
    ]  # fmt: skip
    listed, garden, of_ann, nowhere, prompts, greeting = (turn.outcomes[0] for turn in played.turns[:6])
    assert [entry.get("uri") or entry["uriTemplate"] for entry in json.loads(str(listed.content))] == [
        "notes://garden", "notes://of/{name}",
    ]  # fmt: skip
    assert (garden.content, of_ann.content) == ("Water the roses.", "note of Ann")
    assert (nowhere.error, str(nowhere.content).startswith("Error: ")) == ("raised", True)
    assert json.loads(str(prompts.content))[0]["arguments"] == [{"name": "name", "required": True}]
    assert greeting.content == "user: Greet Ann."
    with servers(tests=SMALL, more=SMALL) as made:
        made.tools([], also=["prompts"])
        offered = made.offered
    assert offered == {
        "tests": ["tests_list_prompts", "tests_get_prompt"],
        "more": ["more_list_prompts", "more_get_prompt"],
    }


def test_titles_are_left_out_and_parameters_of_that_name_stay() -> None:
    schema = {
        "title": "Args",
        "properties": {"title": {"title": "Title", "type": "string", "enum": ["title"]}},
        "$defs": {"X": {"title": "X"}},
    }
    bare = {"properties": {"title": {"type": "string", "enum": ["title"]}}, "$defs": {"X": {}}}
    assert _without_titles(schema) == bare


@pytest.mark.slow
def test_servers_that_nobody_closes_end_all_the_same() -> None:
    made = McpServers({"tests": STDIO})
    tools = made.tools(["pid"])
    pid = int(str(ask(tools, "pid").content))
    del made, tools
    gc.collect()
    assert gone(pid)


@pytest.mark.slow
def test_servers_end_with_the_process() -> None:
    script = (
        "import asyncio, sys; from turnwise.environments.mcp import *; from turnwise.types import ToolCall\n"
        f"made = McpServers({{'t': McpServer(command=sys.executable, args=[{SCRIPT!r}, 'stdio'])}})\n"
        "(tool,) = made.tools(['pid'])\n"
        "print(asyncio.run(tool.run(ToolCall(id='c', name='pid', arguments={}, text=''))).content)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert gone(int(ended.stdout))


@pytest.mark.slow  # the SDK gives it two seconds to leave by itself
def test_a_server_that_does_not_answer_is_given_up_and_ended(tmp_path: Path) -> None:
    script = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(100)"
    made = McpServers({"mute": McpServer(command=sys.executable, args=["-c", script])}, start_timeout=0.5)
    started = time.perf_counter()
    with pytest.raises(ConfigError, match=r"the MCP server 'mute' could not be started: no answer within 0.5 s"):
        made.tools()
    assert time.perf_counter() - started < 60
    assert gone(int((tmp_path / "pid").read_text()))
    made.close()


TALKS = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("method") == "initialize":
        version = asked["params"]["protocolVersion"]
        said = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "x", "version": "1"}}
    elif asked.get("method") == "tools/list" and LISTS:
        said = {"tools": [{"name": "look", "description": "Look.", "inputSchema": {"type": "object"}}]}
    elif asked.get("method") == "tools/call":
        said = {"content": [{"type": "text", "text": "seen"}]}
    elif "id" not in asked or asked["method"] == "tools/list":
        continue
    else:
        error = {"code": -32601, "message": "there is no such method"}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": error}), flush=True)
        continue
    print("a line that is no message\\n" * NOISE, end="")
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": said}), flush=True)
"""


def talks(*, lists: bool, noise: int) -> McpServer:
    script = TALKS.replace("LISTS", str(lists)).replace("NOISE", str(noise))
    return McpServer(command=sys.executable, args=["-c", script])


def test_a_server_that_never_lists_its_tools_is_given_up() -> None:
    made = McpServers({"mute": talks(lists=False, noise=0)}, start_timeout=3.0)
    started = time.monotonic()
    try:
        with pytest.raises(ConfigError, match="the MCP server 'mute' did not list its tools within 3 s"):
            made.tools()
    finally:
        made.close()
    assert time.monotonic() - started < 40


def test_a_server_that_prints_on_its_stdout_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    with servers(loud=talks(lists=True, noise=50)) as made:
        (look,) = made.tools()
        outcomes = [asyncio.run(look.run(ToolCall(id="1", name="look", arguments={}, text=""))) for _ in range(3)]
    assert [one.content for one in outcomes] == ["seen"] * 3
    assert caplog.messages == [
        "the MCP server 'loud' writes lines to its stdout that are not JSON-RPC. They are ignored; print them to stderr"
    ]


def test_a_server_that_does_not_say_why_a_tool_failed_is_named_once_with_the_end_of_its_stderr(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with servers(pump=SMALL) as made:
        tools = made.tools()
        answers = [ask(tools, "crash") for _ in range(2)]
    assert [answer.content for answer in answers] == ["Error: crash failed without an error message"] * 2
    (message,) = caplog.messages
    assert message.startswith(
        "the MCP server 'pump' does not say why crash failed, and so the model is not told; its stderr ends with: "
        "ValueError: the pump is dry. Raise ToolError in the server"
    )


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("", ""),
        ("Starting\n  ready\n", "Starting\nready"),
        ("Traceback:\n  File x\nValueError: dry\n", "Traceback:\nFile x\nValueError: dry"),  # the reason is at the end
        ("x" * 600, "x" * 500),
        (
            "ERROR Tool 'look' raised\n  ╭─ Traceback ─╮\n  │ raise ValueError(city) │\n  ╰────╯\n  ValueError: no station in\n"
            "  Paris, but in Rome   \n        \n  The above exception was the direct\n  cause of the following exception:\n\n"
            "  ╭─ Traceback ─╮\n  │ raise │\n  ╰────╯\n  UnexpectedToolError: Error executing\n  tool look\n",
            "ValueError: no station in Paris, but in Rome",
        ),
        (
            "KeyError: 'old'\n\nTraceback\na.B1Error: one\n\nDuring handling of the above exception, another occurred:\n\n"
            "Traceback\nOSError\n\nThe above exception was the direct cause of the following exception:\n\nRuntimeError: last\n",
            "a.B1Error: one",  # not that of an earlier call
        ),
    ],
)
def test_of_exceptions_that_caused_each_other_a_server_is_quoted_with_the_first(written: str, said: str) -> None:
    assert _end_of(written) == said


FLOODS = """
import json, sys
def floods():
    while True:
        sys.stdout.write("x" * 65536)
for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("method") == WHEN:
        floods()
    if asked.get("method") == "initialize":
        version = asked["params"]["protocolVersion"]
        said = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "x", "version": "1"}}
    elif asked.get("method") == "tools/list":
        said = {"tools": [{"name": "look", "description": "Look.", "inputSchema": {"type": "object"}}]}
    elif "id" in asked:
        error = {"code": -32601, "message": "there is no such method"}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": error}), flush=True)
        continue
    else:
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": said}), flush=True)
"""
ENDED = "it wrote more than 1 MiB to its stdout without a line break, and was stopped. Each message must be one shorter line"


@pytest.mark.slow
@pytest.mark.parametrize("when", ["initialize", "tools/list", "tools/call"])
def test_a_server_that_prints_without_end_is_ended_and_named(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise.environments.mcp.LONGEST_LINE", 2**20)
    server = McpServer(command=sys.executable, args=["-c", FLOODS.replace("WHEN", repr(when))])
    with servers(flood=server) as made:
        if when != "tools/call":
            with pytest.raises(ConfigError, match=f"the MCP server 'flood' .*{ENDED}"):
                made.tools()
            return
        (look,) = made.tools(timeout=60.0)
        answer = ask([look], "look")
        assert answer.content.startswith(
            f"Error: ConnectionError: the connection to the MCP server 'flood' was lost: {ENDED}"
        )  # type: ignore[union-attr]


def test_long_lines_within_the_bound_are_whole_and_bytes_that_are_no_utf_8_end_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("turnwise.environments.mcp.LONGEST_LINE", 300_000)
    script = TALKS.replace("LISTS", "True").replace("NOISE", "0").replace("json.dumps(", "dumps(")
    script = script.replace('"seen"', "chr(233) * 250_000").replace("for line", "dumps = lambda one: one\nfor line", 1)
    script = script.replace("dumps = lambda one: one", "dumps = functools.partial(json.dumps, ensure_ascii=False)")
    script = "import functools" + script + "    sys.stdout.buffer.write(bytes([255, 10]))\n"
    server = McpServer(command=sys.executable, args=["-c", script], env={"PYTHONUTF8": "1"})
    with servers(long=server) as made:
        (look,) = made.tools(timeout=60.0)
        for _ in range(3):  # lengths are not added up over lines
            answer = ask([look], "look")
            assert answer.outcome.error is None
            assert answer.content == chr(233) * 250_000


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (McpServer(command="/nowhere/server"), "could not be started: FileNotFoundError: .*/nowhere/server"),
        (
            McpServer(command=sys.executable, args=["-c", "import sys; sys.exit('no key is set')"]),
            "could not be started: MCPError: .*; its stderr ends with: no key is set",
        ),
        (McpServer(url="http://127.0.0.1:9/mcp"), "could not be reached: ConnectError: "),
        (McpServer(url="http://127.0.0.1:9/sse"), "could not be reached: ConnectError: "),
    ],
)
def test_a_server_that_cannot_be_had_is_reported_at_the_start(server: McpServer, message: str) -> None:
    with (
        servers(bad=server) as made,
        pytest.raises(ConfigError, match=f"the MCP server 'bad' {message}"),
    ):
        made.tools()


@pytest.mark.slow
def test_two_servers_with_a_tool_of_one_name_are_refused_unless_it_is_left_out() -> None:
    other = McpServer(command=sys.executable, args=[SCRIPT, "stdio"])
    with servers(one=STDIO, two=other) as made:
        with pytest.raises(
            ConfigError,
            match="the MCP servers 'one' and 'two' both have a tool 'add', and the names of tools must differ",
        ):
            made.tools()
        with pytest.raises(ConfigError, match="no MCP server has a tool 'ad'; did you mean 'add'"):
            made.tools(["ad"])
        assert made.tools([]) == []


def test_a_missing_library_is_reported_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"MCP servers need the official SDK: pip install 'turnwise\[mcp\]'"):
        McpServers({"tests": STDIO})
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ConfigError, match=r"need jsonschema and regex: pip install jsonschema regex"):
        Tool.from_schema({"type": "function", "function": {"name": "f"}}, lambda: "")


def test_the_sdk_keeps_quiet(stdio: list[Tool]) -> None:
    assert logging.getLogger("mcp").level == logging.WARNING
    assert not logging.getLogger("httpx2").isEnabledFor(logging.INFO)


# HTTP


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "path"), [("http", "mcp"), ("sse", "sse")])
def test_the_same_over_http(kind: str, path: str) -> None:
    with contextlib.ExitStack() as first:
        port = first.enter_context(web_server(kind))
        address = McpServer(url=f"http://127.0.0.1:{port}/{path}", auth_token="t")
        with servers(tests=address) as made:
            tools = made.tools(timeout=60.0)
            assert [tool.name for tool in tools][:2] == ["add", "visit"]
            assert ask(tools, "add", a=2, b=3).content == "5"
            assert ask(tools, "image").outcome.content == "here\n[1 image]"
            assert ask(tools, "fail").content == "Error: the pump is broken"

            async def main() -> list[Answer]:
                return list(await asyncio.gather(*(asking(tools, "meet", count=8) for _ in range(8))))

            assert [answer.content for answer in asyncio.run(main())] == ["met"] * 8
            late = ask([replace(tool, timeout=0.2) for tool in tools], "slow", seconds=60)
            assert (late.outcome.error, late.outcome.seconds < 30) == ("timeout", True)

            before = ask(tools, "pid").content
            lost = ask(tools, "die")
            assert lost.outcome.error == "raised"
            assert str(lost.content).startswith(
                "Error: ConnectionError: the connection to the MCP server 'tests' was lost"
            )
            absent = ask(tools, "add", a=1)
            assert absent.outcome.error == "raised"
            assert str(absent.content).startswith("Error: ConnectionError: the MCP server 'tests' could not be reached")
            first.close()
            with web_server(kind, port):
                assert ask(tools, "add", a=1).content == "2"
                assert ask(tools, "pid").content != before


@pytest.mark.slow
def test_a_token_is_sent_with_every_request() -> None:
    seen: list[str] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        seen.append(head.decode())
        writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async def main() -> None:
        listening = await asyncio.start_server(refuse, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        address = McpServer(url=f"http://127.0.0.1:{port}/mcp", auth_token="secret", headers={"X-Team": "a"})
        made = McpServers({"closed": address}, start_timeout=5.0)
        try:
            with pytest.raises(ConfigError, match="the MCP server 'closed' could not be reached"):
                await asyncio.to_thread(made.tools)
        finally:
            await made.aclose()
            listening.close()

    asyncio.run(main())
    assert seen
    for head in seen:
        assert "authorization: bearer secret" in head.lower()
        assert "x-team: a" in head.lower()


# files


def test_a_file_names_servers_of_both_kinds(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(
        json.dumps(
            {
                "mcpServers": {
                    "SSE Server": {"url": "https://example.org/sse?x=1", "auth_token": "t"},
                    "HTTP Server": {"url": "https://example.org/mcp", "type": "streamable-http"},
                    "STDIO Server": {"command": "npx", "args": ["-y", "server-mcp@0.2.1"], "env": {"KEY": "k"}},
                }
            }
        )
    )
    made = McpServers.from_file(path)
    try:
        connections = {one.name: one._server for one in made._connections}
    finally:
        made.close()
    assert [server.sse for server in connections.values()] == [True, False, False]
    assert connections["STDIO Server"].args == ["-y", "server-mcp@0.2.1"]
    assert McpServer(url="http://x/sse", type="http").sse is False
    assert McpServer(url="http://x/events", type="sse").sse is True


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"mcp.json is not JSON .Expecting property name"),
        ("[]", r'mcp.json must contain \{"mcpServers": '),
        ('{"servers": {}}', r'mcp.json must contain \{"mcpServers": '),
        ('{"mcpServers": {}}', "there are no MCP servers"),
        ('{"mcpServers": {"a": {}}}', r"mcp.json: mcpServers.a: exactly one of url and command must be set"),
        ('{"mcpServers": {"a": {"url": "http://x", "command": "y"}}}', "exactly one of url and command must be set"),
        ('{"mcpServers": {"a": {"url": "x"}}}', "the url 'x' must begin with http:// or https://"),
        ('{"mcpServers": {"a": {"url": "http://x", "env": {}}}}', "env has no effect with a url"),
        ('{"mcpServers": {"a": {"command": "x", "auth_token": "t"}}}', "auth_token has no effect with a command"),
        ('{"mcpServers": {"a": {"command": "x", "arg": []}}}', "there is no option 'arg'; did you mean 'args'?"),
        ('{"mcpServers": {"a": {"command": "x", "args": "y"}}}', "args: Input should be a valid list"),
        ('{"mcpServers": {"a": {"command": "x", "env": {"N": 1}}}}', "env.N: Input should be a valid string"),
        ('{"mcpServers": {"a": {"command": "x", "type": "sse"}}}', "type='sse' cannot be used with a command"),
        ('{"mcpServers": {"a": "npx"}}', "mcpServers.a: Input should be a valid dictionary"),
        (None, "mcp.json cannot be read: No such file"),
    ],
)
def test_a_file_that_names_none_is_reported(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "mcp.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        McpServers.from_file(path)
