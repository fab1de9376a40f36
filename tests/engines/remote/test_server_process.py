"""Server processes that turnwise starts: log, time limit, death, and their end with turnwise."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from turnwise.engines.remote.http import HttpServer
from turnwise.engines.remote.server_process import ServerCommand, ServerProcess, free_port, python_path
from turnwise.errors import EngineError

# a server with a child, as engines have workers; both write their ids
SERVER = """
import os, subprocess, sys, time, http.server
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
open(sys.argv[2], "w").write(f"{os.getpid()} {child.pid}")
print("ready", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return status != "Z"


def wait_for(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def process(tmp_path: Path, script: str = SERVER, *, timeout: float = 20.0) -> tuple[ServerProcess, int]:
    port = free_port()
    command = ServerCommand(
        name="test server",
        arguments=[sys.executable, "-c", script, str(port), str(tmp_path / "pids")],
        log=tmp_path / "logs" / "server.log",
        start_timeout=timeout,
    )
    return ServerProcess(command), port


def pids(tmp_path: Path) -> list[int]:
    return [int(word) for word in (tmp_path / "pids").read_text().split()]


def test_a_server_starts_answers_and_is_stopped_with_its_workers(tmp_path: Path) -> None:
    async def main() -> None:
        own, port = process(tmp_path)
        server = HttpServer(f"http://127.0.0.1:{port}")
        own.start()
        await own.wait_until(lambda: server.healthy("/"))
        both = pids(tmp_path)
        assert all(alive(pid) for pid in both)
        await server.close()
        await own.stop()
        assert not own.running
        wait_for(lambda: not any(alive(pid) for pid in both))
        assert "ready" in own.command.log.read_text()

    asyncio.run(main())


def test_a_server_that_dies_takes_its_workers_along_and_can_be_started_again(tmp_path: Path) -> None:
    async def main() -> None:
        own, port = process(tmp_path)
        server = HttpServer(f"http://127.0.0.1:{port}")
        for _ in range(2):
            own.start()
            await own.wait_until(lambda: server.healthy("/"))
            parent, child = pids(tmp_path)
            os.kill(parent, signal.SIGKILL)
            wait_for(lambda child=child: not alive(child) and not own.running)
        assert own.starts == 2
        assert "ended with signal SIGKILL" in own.log_tail()
        await server.close()
        own.kill()

    asyncio.run(main())


# a server with a worker that has shared memory, whose removal Python leaves to its resource tracker
SHARING = """
import os, signal, subprocess, sys, time, http.server
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=1 << 20)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
open(sys.argv[2] + ".part", "w").write(f"{os.getpid()} {child.pid} {memory._name.lstrip('/')}")
os.rename(sys.argv[2] + ".part", sys.argv[2])
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # nothing is cleaned up by the server itself
time.sleep(300)
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="the test looks at Linux's shared memory")
@pytest.mark.parametrize("way", ["stop", "kill", "stopped group", "server is killed", "trainer is killed"])
def test_the_shared_memory_of_a_server_is_removed_however_it_ends(tmp_path: Path, way: str) -> None:
    own, _ = process(tmp_path, SHARING)
    own.start()
    wait_for(lambda: (tmp_path / "pids").exists())
    first, second, name = (tmp_path / "pids").read_text().split()
    memory = Path("/dev/shm") / name
    assert memory.stat().st_size == 1 << 20
    assert own.pid is not None
    match way:
        case "stop":
            asyncio.run(own.stop())
        case "kill":
            own.kill()
        case "stopped group":  # a server that hangs
            os.killpg(own.pid, signal.SIGSTOP)
            own.kill()
        case "server is killed":
            os.kill(int(first), signal.SIGKILL)
        case "trainer is killed":
            assert own._process is not None
            assert own._process.stdin is not None
            own._process.stdin.close()
    wait_for(lambda: not any(alive(int(pid)) for pid in (first, second)) and not own.running, seconds=60.0)
    own.kill()
    own.wait_for_end()
    assert not memory.exists()


def test_a_server_that_ends_at_its_start_is_reported_with_its_log(tmp_path: Path) -> None:
    own, port = process(tmp_path, "import sys; print('no such model: x'); sys.exit(3)")
    server = HttpServer(f"http://127.0.0.1:{port}")

    async def main() -> None:
        own.start()
        with pytest.raises(EngineError, match=r"(?s)test server has ended .*no such model: x.*status 3"):
            await own.wait_until(lambda: server.healthy("/"))
        await server.close()

    asyncio.run(main())


def test_the_cause_is_named_where_it_is_far_above_the_end_of_the_log(tmp_path: Path) -> None:
    """As vLLM writes it: the process with the model fails, and the process that waits for it ends with another error."""
    script = """
import sys
print("WARNING 11-22 23:54:13 [utils.py:3] may fail with `OSError: too many open files`")
for _ in range(2):
    print("(EngineCore pid=7) ERROR 11-22 23:54:14 [core.py:12] ValueError: 1.2 GiB KV cache is needed")
for line in range(40):
    print("  File", line)
sys.exit("RuntimeError: Engine core initialization failed. See root cause above.")
"""
    own, port = process(tmp_path, script)
    server = HttpServer(f"http://127.0.0.1:{port}")
    own.command.log.parent.mkdir()
    own.command.log.write_text("OSError: of an earlier start\n")

    async def main() -> str:
        own.start()
        with pytest.raises(EngineError) as raised:
            await own.wait_until(lambda: server.healthy("/"))
        await server.close()
        return str(raised.value)

    message = asyncio.run(main())
    assert message.count("ValueError: 1.2 GiB KV cache is needed") == 1
    assert message.count("RuntimeError: Engine core initialization failed") == 1
    assert message.index("ValueError") < message.index("The end of its log") < message.index("RuntimeError")
    assert "OSError" not in message, "neither of a warning nor of an earlier start"


def test_a_server_that_is_never_ready_is_stopped_after_the_time_limit(tmp_path: Path) -> None:
    own, port = process(tmp_path, "import time; time.sleep(300)", timeout=1.0)
    server = HttpServer(f"http://127.0.0.1:{port}")

    async def main() -> None:
        own.start()
        with pytest.raises(EngineError, match=r"not ready within engine\.start_timeout=1 s"):
            await own.wait_until(lambda: server.healthy("/"))
        await server.close()

    asyncio.run(main())
    assert not own.running


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    own = ServerProcess(ServerCommand(name="vLLM", arguments=["/no/python"], log=tmp_path / "log"))
    with pytest.raises(EngineError, match=r"there is no program /no/python. Set engine\.python"):
        own.start()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path, number: int) -> None:
    script = f"""
import sys, time
from pathlib import Path
from turnwise.engines.remote.server_process import ServerCommand, ServerProcess
own = ServerProcess(ServerCommand(name="s", arguments=[sys.executable, "-c", {SERVER!r}, "{free_port()}",
    {str(tmp_path / "pids")!r}], log=Path({str(tmp_path / "log")!r})))
own.start()
time.sleep(300)
"""
    trainer = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": python_path()})
    wait_for(lambda: (tmp_path / "pids").exists() and len(pids(tmp_path)) == 2)
    both = pids(tmp_path)
    trainer.send_signal(number)
    trainer.wait()
    wait_for(lambda: not any(alive(pid) for pid in both))


def test_an_interpreter_without_the_engine_is_named_in_the_error(tmp_path: Path) -> None:
    server, _ = process(tmp_path, "import no_such_engine")
    server.start()

    async def never() -> bool:
        return False

    with pytest.raises(EngineError, match=r"(?s)Set engine\.python to the Python interpreter.*no_such_engine"):
        asyncio.run(server.wait_until(never))
