"""The client of SandboxFusion, against a real server that speaks its protocol."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from support.conversations import Says, call, hold
from support.servers import Answer, serving
from turnwise.environments.sandbox import SandboxError, SandboxFusion
from turnwise.environments.tools.tool import Toolbox
from turnwise.environments.tools.toolbox import Tools
from turnwise.errors import ConfigError
from turnwise.services.json_service import ServiceError


def ran(
    stdout: str = "", stderr: str = "", return_code: Any = 0, status: str = "Finished", **more: Any
) -> dict[str, Any]:
    """What the server says of a program."""
    result = {"status": status, "stdout": stdout, "stderr": stderr, "return_code": return_code, "execution_time": 0.1}
    whole = "Success" if status == "Finished" and not return_code else "Failed"
    return {"status": whole, "message": "", "compile_result": None, "run_result": result, "files": {}, **more}


def result_text(*answers: Answer, **options: Any) -> str:
    """What the model is told when the server answers so, one after the other."""
    with serving(lambda question, number: answers[min(number, len(answers) - 1)]) as server:
        return asyncio.run(SandboxFusion(server.url, pause=0, **options).code_interpreter("print(1)"))


def test_the_request_is_the_servers_own() -> None:
    with serving(lambda question, number: Answer(ran("1\n"))) as server:
        for url in (server.url, f"{server.url}/", f"{server.url}/run_code"):
            tool = SandboxFusion(url, language="cpp", run_timeout=5, compile_timeout=7, memory_limit_mb=256)
            assert asyncio.run(tool.code_interpreter("\ud83dprint('ä')")) == "1"
    assert (
        server.asked
        == [
            {
                "code": "\ud83dprint('ä')",
                "language": "cpp",
                "run_timeout": 5,
                "compile_timeout": 7,
                "memory_limit_MB": 256,
            }
        ]
        * 3
    )
    assert server.paths == ["/run_code"] * 3


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (ran("4\n"), "4"),
        (ran(""), "[the program ended without printing anything]"),
        (ran("4\n", "careful\n"), "4\ncareful"),
        (ran("", "ValueError: no\n", 1), "ValueError: no\n[exit status 1]"),
        (ran("on\n", "", None, "TimeLimitExceeded"), "on\n[stopped: the program ran longer than 3 s]"),
        (ran("", "", None, "Error"), "[stopped: the server reported Error]"),
        (
            ran(compile_result={"status": "Finished", "return_code": 1, "stderr": "main.cpp:1: error"})
            | {"status": "Failed"},
            "main.cpp:1: error\n[exit status 1]",
        ),
        (
            ran(compile_result={"status": "TimeLimitExceeded", "return_code": None}) | {"status": "Failed"},
            "[stopped: the compilation took longer than 10 s]",
        ),
        (ran(compile_result={"status": "Finished", "return_code": 0, "stderr": "warning"}), "[the program ended"),
    ],
)
def test_the_model_sees_what_the_program_printed_and_how_it_ended(answer: dict[str, Any], text: str) -> None:
    assert result_text(Answer(answer), run_timeout=3).startswith(text)


def test_a_long_output_is_cut_in_the_middle() -> None:
    assert result_text(Answer(ran("a" * 50 + "b" * 50)), output_chars=10) == (
        "aaaaa\n[... 90 characters of output left out ...]\nbbbbb"
    )


@pytest.mark.parametrize("bad", [Answer("busy", 503), Answer("", 500), Answer("slow down", 429), Answer(hang_up=True)])
def test_what_may_pass_is_tried_again(bad: Answer) -> None:
    assert result_text(bad, bad, Answer(ran("1"))) == "1"


def test_it_is_tried_as_often_as_was_said_and_no_more() -> None:
    with serving(lambda question, number: Answer({"detail": "busy"}, 503)) as server:
        with pytest.raises(ServiceError, match=r"was called 3 times: status 503: .*busy"):
            asyncio.run(SandboxFusion(server.url, retries=2, pause=0).code_interpreter("1"))
        assert len(server.asked) == 3
        with pytest.raises(ServiceError, match="was called once: status 503"):
            asyncio.run(SandboxFusion(server.url, retries=0).code_interpreter("1"))


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (Answer("what?", 404), ServiceError, 'returned the status 404: "what\\?"'),
        (Answer(b"<html>hello</html>"), ServiceError, "must return JSON; it returned: '<html>hello</html>'"),
        (Answer(b"\xff\xfe\x00"), ServiceError, "must return JSON; it returned: "),
        (Answer(b"[" * 100_000), ServiceError, "must return JSON; it returned: "),
        (Answer([1]), ServiceError, r"must return a JSON object; it returned: '\[1\]'"),
        (Answer({}), SandboxError, "could not run the program: {}"),
        (Answer({"status": "SandboxError", "message": "no pod"}), SandboxError, "could not run the program: no pod"),
        (Answer({"status": "Success"}), SandboxError, "returned no run_result"),
        (Answer({"status": "Success", "run_result": "fine"}), SandboxError, "returned no run_result"),
    ],
)
def test_what_the_server_does_wrong_is_an_error_and_no_output(answer: Answer, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        result_text(answer)


def test_a_server_that_hangs_is_given_up() -> None:
    started = time.perf_counter()
    with pytest.raises(ServiceError, match=r"was called 2 times: no answer within 0.2 s"):
        result_text(Answer(ran("1"), seconds=30), timeout=0.2, retries=1)
    assert time.perf_counter() - started < 25


def test_a_server_that_is_not_there_is_reported() -> None:
    with pytest.raises(ServiceError, match=r"was called 2 times: ConnectionRefusedError"):
        asyncio.run(SandboxFusion("http://127.0.0.1:9", retries=1, pause=0).code_interpreter("1"))


def test_conversations_share_how_many_may_ask_at_once() -> None:
    with serving(lambda question, number: Answer(ran("1"), seconds=0.05)) as server:

        async def many() -> list[str]:
            tools = [SandboxFusion(server.url, max_concurrent=2) for _ in range(6)]
            return await asyncio.gather(*(tool.code_interpreter("1") for tool in tools))

        assert asyncio.run(many()) == ["1"] * 6
    assert server.most_at_once == 2


def test_a_model_sees_the_error_of_a_broken_server_and_goes_on() -> None:
    with serving(lambda question, number: Answer("no", 400)) as server:
        toolbox = Toolbox.of(SandboxFusion, arguments={"url": server.url})
        trajectory = hold(Says(call("code_interpreter", '{"code": "1"}'), "so be it"), lambda: Tools([toolbox]))
    (told,) = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert told.startswith("Error: the service http://127.0.0.1")
    assert told.endswith('returned the status 400: "no"')
    assert trajectory.turns[0].outcomes[0].error == "raised"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "localhost:8080"}, "is not the address of a service; it must have the form http://host:port/path"),
        ({"url": "http://h", "run_timeout": 0}, "run_timeout is 0; it must be above 0"),
        ({"url": "http://h", "retries": -1}, "retries=-1 and pause=1.0 must be 0 or more"),
        ({"url": "http://h", "max_concurrent": 0}, "max_concurrent is 0; it must be above 0"),
    ],
)
def test_what_cannot_work_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SandboxFusion(**options)
