"""The sandbox runs code within its limits; Sandbox Fusion gives the same results."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import site
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import turnwise
from support.conversations import Says, a_row, call, hold
from support.jails import needs_jail
from support.servers import Answer, serving
from turnwise.environments.sandbox import (
    Bounds,
    PythonSession,
    Ran,
    Sandbox,
    SandboxError,
    SandboxFusion,
    code_interpreter,
)
from turnwise.environments.sandbox.jail import BOOT, MACHINES, Layout, filter_program, find_jail
from turnwise.environments.sandbox.machine import run_in_jail
from turnwise.environments.sandbox.python import _shared
from turnwise.environments.tools.toolbox import Toolbox, Tools
from turnwise.errors import ConfigError
from turnwise.services.json_service import ServiceError

# The sandbox as a tool: what the model is told, what is kept, and what happens where there is no jail.


@pytest.mark.parametrize(
    ("ran", "told"),
    [
        (Ran(output="4\n", status=0), "4"),
        (Ran(output="", status=0), "[the program ended without printing anything]"),
        (Ran(output="no\n", status=1), "no\n[exit status 1]"),
        (Ran(output="", status=139), "[exit status 139, SIGSEGV]"),
        (Ran(output="", status=255), "[exit status 255]"),
        (
            Ran(output="on", status=137, stopped="the program ran longer than 1 s"),
            "on\n[stopped: the program ran longer than 1 s]",
        ),
        (Ran(output="on", status=0, notes=("a", "b")), "on\n[a]\n[b]"),
    ],
)
def test_the_text_for_the_model_contains_output_status_and_notes(ran: Ran, told: str) -> None:
    assert ran.text_for_model() == told


class SlowJail:
    """Tells its first process, and ends before it is set up: until then, it sees the files of this machine."""

    SLOW = """
import json, os, sys, time
info, started = map(int, sys.argv[1:])
os.write(info, json.dumps({"child-pid": os.getpid(), "pid-namespace": os.stat("/proc/self/ns/pid").st_ino}).encode())
time.sleep(0.4)
os._exit(0)
"""

    def command(self, program: Any, *, info: int, **more: Any) -> list[str]:
        return [sys.executable, "-I", "-S", "-c", self.SLOW, str(info), program[program.index(BOOT) + 1]]


def test_files_of_this_machine_do_not_count_while_a_jail_is_being_set_up() -> None:
    jail: Any = SlowJail()
    layout = Layout(writable=["/tmp", "/"], environment={})
    with pytest.raises(SandboxError, match="could not be set up"):  # and not: it created more than 5 files
        asyncio.run(run_in_jail(jail, ["true"], bounds=Bounds(files=5, disk_mb=1), data={}, layout=layout))


@needs_jail
def test_a_model_calls_it_like_any_tool() -> None:
    engine = Says(call("code_interpreter", '{"code": "print(6 * 7)"}'), "42")
    trajectory = hold(engine, lambda: Tools([code_interpreter]))
    assert [message["content"] for message in trajectory.messages if message["role"] == "tool"] == ["42"]
    assert trajectory.error is None


@needs_jail
def test_nothing_is_kept_between_two_calls() -> None:
    sandbox = Sandbox()
    assert asyncio.run(sandbox.code_interpreter("x = 1; open('x', 'w').write('1')")) != ""
    assert asyncio.run(sandbox.code_interpreter("import os; print(os.listdir(), 'x' in globals())")) == "[] False"


@needs_jail
def test_a_session_keeps_files_and_close_forgets_them() -> None:
    async def talk() -> list[str]:
        session = PythonSession()
        answers = [
            await session.code_interpreter("import os\nos.mkdir('d'); open('d/helper.py', 'w').write('X = 5')"),
            await session.code_interpreter("import d.helper; print(d.helper.X)\nraise SystemExit(2)"),
            await session.code_interpreter("import os; os.remove('d/helper.py'); print(os.listdir('d'))"),
        ]
        await session.close()
        with pytest.raises(ValueError, match="the conversation has ended: the interpreter is closed"):
            await session.code_interpreter("print(1)")
        await session.close()
        return answers

    _, second, third = asyncio.run(talk())
    assert (second, third) == ("5\n[exit status 2]", "[]")


@needs_jail
def test_a_program_that_is_stopped_leaves_the_files_of_before() -> None:
    async def talk() -> str:
        session = PythonSession(bounds={"seconds": 3})
        assert await session.code_interpreter("open('x', 'w').write('1'); print('kept')") == "kept"
        stopped = await session.code_interpreter("open('x', 'w').write('2')\nimport time; time.sleep(60)")
        assert stopped == "[stopped: the program ran longer than 3 s]\n[the file changes of this call were not kept]"
        kept = await session.code_interpreter("print(open('x').read())")
        await session.close()
        return kept

    assert asyncio.run(talk()) == "1"


@needs_jail
@pytest.mark.parametrize(
    "program",
    [
        "import os\nfor n in range(5): os.truncate(os.open(str(n), os.O_CREAT | os.O_RDWR), 60 << 20)",
        "import os\nos.mkdir('d', 0)",
        "import os\nfor _ in range(900): os.mkdir('d' * 100); os.chdir('d' * 100)",
    ],
    ids=["too large", "unreadable", "too deep"],
)
def test_files_that_cannot_be_kept_are_no_error_of_the_program(program: str) -> None:
    async def talk() -> list[str]:
        session = PythonSession()
        await session.code_interpreter("open('x', 'w').write('1')")
        told = [await session.code_interpreter(f"{program}\nprint('done')")]
        told.append(await session.code_interpreter("import os; print(os.listdir())"))
        await session.close()
        return told

    assert asyncio.run(talk()) == [
        "done\n[the file changes of this call were not kept: the files are too large, nested too deeply, or cannot be read]",
        "['x']",
    ]


@needs_jail
def test_sessions_that_are_made_at_once_share_one_sandbox() -> None:
    async def begin() -> list[PythonSession]:
        layers = [Tools([Toolbox.of(PythonSession, arguments={"max_concurrent": 3})]) for _ in range(8)]
        await asyncio.gather(*(layer.begin(a_row()) for layer in layers))
        return [layer._tools["code_interpreter"].function.__self__ for layer in layers]

    assert len({id(session._sandbox) for session in asyncio.run(begin())}) == 1


def jails() -> int:
    """How many sandboxes of this process run now."""
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another process, which has ended meanwhile
            status = (process / "status").read_text()
            found += status.startswith("Name:\tbwrap\n") and f"\nPPid:\t{os.getpid()}\n" in status
    return found


@needs_jail
@pytest.mark.slow
def test_sandboxes_run_side_by_side_up_to_a_number_and_nobody_waits_for_them() -> None:
    async def most(max_concurrent: int, code: str, until: int) -> int:
        """The most sandboxes of four calls that were seen at once, until so many are seen or all have ended."""
        sandbox, seen = Sandbox(max_concurrent=max_concurrent, bounds={"seconds": 120}), 0
        runs = [asyncio.create_task(sandbox.run(code)) for _ in range(4)]
        while seen < until and not all(run.done() for run in runs):  # a run that held up the loop would end first
            seen = max(seen, jails())
            await asyncio.sleep(0.01)
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
        return seen

    assert asyncio.run(most(4, "import time; time.sleep(100)", until=4)) == 4
    assert asyncio.run(most(1, "import time; time.sleep(0.1)", until=5)) == 1


@needs_jail
def test_a_call_that_is_cancelled_leaves_nothing_alive() -> None:
    async def cancel() -> float:
        running = asyncio.create_task(Sandbox(bounds={"seconds": 60}).run("import time\ntime.sleep(60)"))
        await asyncio.sleep(0.3)
        started = time.perf_counter()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return time.perf_counter() - started

    assert asyncio.run(cancel()) < 30  # it does not wait for the program
    assert jails() == 0


@needs_jail
def test_packages_can_be_lent(tmp_path: Path) -> None:
    lent = tmp_path / "lent"
    lent.mkdir()
    (lent / "lent.py").write_text("WORD = 'hello'")
    sandbox = Sandbox(packages=[lent])
    assert asyncio.run(sandbox.code_interpreter("import lent; print(lent.WORD)")) == "hello"
    refused = "try: open('/packages/0/lent.py', 'w')\nexcept OSError as error: print(error.strerror)"
    assert asyncio.run(sandbox.code_interpreter(refused)) == "Read-only file system"
    with pytest.raises(ConfigError, match="/nowhere must be a directory"):
        Sandbox(packages=["/nowhere"])
    lent.chmod(0o700)
    if os.getuid() == 0:
        with pytest.raises(ConfigError, match=r"as the user nobody, which cannot read .*/lent. Run: chmod -R o\+rX"):
            Sandbox(packages=[lent])


@needs_jail
def test_a_sandbox_that_cannot_be_set_up_is_no_failure_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "lent").mkdir()
    sandbox = Sandbox(packages=[tmp_path / "lent"])
    shutil.rmtree(tmp_path / "lent")
    with pytest.raises(SandboxError, match="so the program did not run: bwrap: Can't find source path"):
        asyncio.run(sandbox.run("print(1)"))


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"second": 3}, r"no bound 'second'; did you mean 'seconds'\?; its bounds are: seconds, cpu_seconds"),
        ({"seconds": 0}, "the sandbox's bound seconds is 0; it must be a number above 0"),
        ({"seconds": float("nan")}, "the sandbox's bound seconds is nan"),
        ({"processes": 1.5}, "the sandbox's bound processes is 1.5; it must be an integer"),
        ({"processes": True}, "the sandbox's bound processes is True"),
    ],
)
def test_bounds_are_numbers_above_zero(bounds: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Bounds.of(bounds)


def test_the_filter_knows_its_machines() -> None:
    for machine in MACHINES:
        program = filter_program(machine)
        assert len(program) % 8 == 0
        assert len(program) // 8 < 4096
    assert filter_program("x86_64") != filter_program("aarch64")


# --- where there is no jail


@pytest.fixture
def no_bubblewrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("PATH", str(tmp_path))
    find_jail.cache_clear()
    _shared.cache_clear()
    yield
    find_jail.cache_clear()


@pytest.mark.usefixtures("no_bubblewrap")
def test_without_bubblewrap_it_refuses_and_says_what_to_do() -> None:
    for make in (Sandbox, PythonSession):
        with pytest.raises(
            ConfigError, match=r"no `bwrap` on the PATH. To go on: install bubblewrap .* set unsandboxed=True"
        ):
            make()
    with pytest.raises(ConfigError, match="no `bwrap`"):
        asyncio.run(code_interpreter("print(1)"))


@pytest.mark.usefixtures("no_bubblewrap")
def test_a_bubblewrap_that_does_not_work_is_refused_with_its_own_words(tmp_path: Path) -> None:
    for name, script in (
        ("bwrap", "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"),
        ("setpriv", "#!/bin/sh\nexit 1\n"),
    ):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    with pytest.raises(ConfigError, match="cannot run on this machine: bwrap: No permissions to create new namespace"):
        Sandbox()


@pytest.mark.parametrize("almost", [1, "yes", None])
def test_unsandboxed_is_never_said_by_accident(almost: object) -> None:
    with pytest.raises(ConfigError, match="it must be true or false"):
        Sandbox(unsandboxed=almost)  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_bubblewrap")
@pytest.mark.slow
def test_unsandboxed_runs_in_bounds_of_time_memory_and_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNWISE_TEST_SECRET", "swordfish")

    def result_text(code: str, seconds: float = 60) -> str:
        bounds = {"seconds": seconds, "memory_mb": 512, "output_bytes": 200}
        return asyncio.run(Sandbox(unsandboxed=True, bounds=bounds).code_interpreter(code))

    assert result_text("import os; print(6 * 7, 'TURNWISE_TEST_SECRET' in os.environ)") == "42 False"
    assert result_text("x = bytearray(10**10)").endswith("MemoryError\n[exit status 1]")
    assert result_text("open('f', 'wb').truncate(10**10)").endswith("File too large\n[exit status 1]")
    assert "bytes of output left out" in result_text("print('x' * 1000)")
    assert result_text("import os\nif os.fork() == 0:\n    import time; time.sleep(99)\nprint('on')") == "on"
    assert result_text("import time; time.sleep(99)", seconds=2) == "[stopped: the program ran longer than 2 s]"


@pytest.mark.usefixtures("no_bubblewrap")
def test_unsandboxed_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def talk() -> str:
        await Sandbox(unsandboxed=True).run("open('x', 'w')")
        session = PythonSession(unsandboxed=True)
        await session.code_interpreter("open('x', 'w').write('kept')")
        kept = await session.code_interpreter("print(open('x').read())")
        await session.close()
        return kept

    assert asyncio.run(talk()) == "kept"
    assert list(tmp_path.iterdir()) == []


# --- who is not root


PLAIN = '''
import asyncio, sys
sys.path[:0] = {path!r}
from turnwise.environments.sandbox import Sandbox
from turnwise.environments.sandbox.jail import find_jail
assert find_jail().setpriv is None
sandbox = Sandbox(bounds={{"processes": 16, "seconds": 1, "files": 100}})
fork = """
import os, time
n = 0
try:
    while n < 100:
        if os.fork() == 0:
            time.sleep(1)
            os._exit(0)
        n += 1
except OSError:
    print(8 < n < 16)
os._exit(0)
"""
for code in ("import os; print(os.getuid(), os.listdir())", fork, "import time; time.sleep(9)",
             "import os, time\\nfor n in range(200): os.mkdir(str(n))\\ntime.sleep(9)",
             "import ctypes, os; os.kill(1, 9); print(ctypes.CDLL(None).unshare(0x10000000))"):
    print(asyncio.run(sandbox.code_interpreter(code)))
'''


@needs_jail
@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
@pytest.mark.slow
def test_who_is_not_root_has_the_same_sandbox_in_a_user_namespace() -> None:
    python = "/usr/bin/python3"
    path = [str(Path(turnwise.__file__).parent.parent), *site.getsitepackages()]
    plain = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python, "-B", "-c"]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    probe = f"import sys; sys.path[:0] = {path!r}; import turnwise, pydantic; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([*plain, probe], capture_output=True, text=True, cwd="/", timeout=60, check=False)
    except OSError as error:
        pytest.skip(f"there is no {python} to be run by somebody else: {error}")
    if done.stdout.strip() != version:
        pytest.skip(f"{python} cannot load turnwise as somebody else: {done.stderr[-200:]}")
    done = subprocess.run(
        [*plain, PLAIN.format(path=path)], capture_output=True, text=True, cwd="/", timeout=60, check=False
    )
    assert done.stdout.splitlines() == [
        "65534 []",
        "True",
        "[stopped: the program ran longer than 1 s]",
        "[stopped: the program created more than 100 files]",
        "-1",
    ], done.stderr


# The client of SandboxFusion, against a real server that speaks its protocol.


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
