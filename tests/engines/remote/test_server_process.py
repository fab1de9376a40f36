"""Processes of servers: started, watched and ended, their devices and their memory."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.ports import free_port
from turnwise import assembly
from turnwise.assembly.engines import trainer_gpus
from turnwise.config.recipe import checked
from turnwise.engines.remote.engine import RemoteEngine
from turnwise.engines.remote.http import HttpServer
from turnwise.engines.remote.launch import replicas_of
from turnwise.engines.remote.server_process import (
    HeldPort,
    PortTaken,
    ServerCommand,
    ServerProcess,
    devices_of_servers,
    python_path,
    start_advice,
    visible_devices,
)
from turnwise.engines.remote.servers import Replica, Replicas
from turnwise.errors import ConfigError, EngineError
from turnwise.models.model_config import cpu_memory_gb, kv_token_bytes
from turnwise.options.engines import ClusterSection, VllmEngineSection, local_ranks

# Server processes that turnwise starts: log, time limit, death, and their end with turnwise.


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


def process(tmp_path: Path, script: str = SERVER, **options: Any) -> tuple[ServerProcess, int]:
    port = HeldPort()
    return ServerProcess(_command(tmp_path, script, port.number, **options), port), port.number


def _command(
    tmp_path: Path, script: str, port: int, *, timeout: float = 20.0, given: Sequence[str] = ()
) -> ServerCommand:
    return ServerCommand(
        name="test server",
        arguments=[sys.executable, "-c", script, str(port), str(tmp_path / "pids")],
        log=tmp_path / "logs" / "server.log",
        start_timeout=timeout,
        given=given,
    )


# another server that takes the port of one that is starting, and answers in its place
FOREIGN = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_): pass
import sys
http.server.HTTPServer((sys.argv[2], int(sys.argv[1])), Handler).serve_forever()
"""


@contextlib.contextmanager
def foreign(port: int, host: str = "127.0.0.1") -> Iterator[None]:
    other = subprocess.Popen([sys.executable, "-c", FOREIGN, str(port), host])
    try:
        wait_for(lambda: _answers(port))
        yield
    finally:
        other.kill()
        other.wait()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def test_a_port_is_given_to_no_other_program_before_the_server_listens() -> None:
    port = HeldPort()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port.number))
    chosen: set[int] = set()
    with contextlib.ExitStack() as sockets:  # what programs get that ask for any port
        for _ in range(500):
            one = sockets.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
            chosen.add(one.getsockname()[1])
    assert port.number not in chosen
    number = port.number
    socket.create_server(("127.0.0.1", number)).close()  # a server's own socket
    del port
    with socket.socket() as other:
        other.bind(("127.0.0.1", number))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_server_of_another_program_on_the_port_is_not_taken_for_the_own_one(tmp_path: Path, host: str) -> None:
    async def main() -> None:
        port = HeldPort()
        server = HttpServer(f"http://127.0.0.1:{port.number}")
        slow = f"import time; time.sleep(300)\n{SERVER}"  # it would find the port in use
        own = ServerProcess(_command(tmp_path, slow, port.number), port)
        with foreign(port.number, host):
            own.start()
            with pytest.raises(PortTaken, match=rf"has not got the port {port.number} of 127.0.0.1: another program"):
                await own.wait_until(lambda: server.healthy("/"))
        assert not own.running
        await own.stop()
        await server.close()

    asyncio.run(main())


def test_a_server_whose_port_was_taken_starts_on_another_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ports: list[int] = []

    def command(number: int, port: int, token: str) -> ServerCommand:
        ports.append(port)
        return _command(tmp_path, SERVER, port)

    async def main() -> None:
        async def prepared(replica: Replica) -> None:
            assert await replica.server.healthy("/")

        (replica,) = replicas_of(VllmEngineSection(name="vllm"), "/", command)
        replicas = Replicas([replica], prepare=prepared, patience=1.0)
        with foreign(ports[0]):
            await replicas.start()
            assert replica.ready
            assert replica.server.url == f"http://127.0.0.1:{ports[1]}"
        await replicas.close()

    asyncio.run(main())
    assert len(set(ports)) == 2
    assert "It is started on another port" in caplog.text


def test_the_time_is_that_of_the_server_whose_clock_is_another() -> None:
    day = 86_400

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def date_time_string(self, timestamp: float | None = None) -> str:
            return "soon" if self.path == "/none" else super().date_time_string(int(time.time()) + day)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    async def main() -> None:
        server = HttpServer(f"http://127.0.0.1:{listening.server_port}")
        assert abs(server.now() - time.time()) < 5
        await server.get("/none")
        assert abs(server.now() - time.time()) < 5
        await server.get("/")
        assert abs(server.now() - time.time() - day) < 5
        await server.close()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        serving = threading.Thread(target=listening.serve_forever)
        serving.start()
        asyncio.run(main())
        listening.shutdown()
        serving.join()


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


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("ImportError: libcudart.so.13: cannot open shared object file: No such file or directory", "not a build for"),
        ("ModuleNotFoundError: No module named 'vllm._C'", "not a build for"),
        ("RuntimeError: Failed to infer device type, please set the environment variable", "not a build for"),
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 11040).", "update the driver"),
        (
            "ModuleNotFoundError: No module named 'vllm'",
            "Set engine.python to the Python interpreter of an environment of its own",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "engine.memory_gb"),
        ("ValueError: ... Try increasing `gpu_memory_utilization` when initializing", "engine.memory_gb"),
        ("ValueError: no such model", ""),
    ],
)
def test_what_a_server_says_at_its_start_is_told_with_what_to_change(said: str, advice: str) -> None:
    told = start_advice(f"Traceback:\n{said}\n")
    assert advice in told if advice else told == ""


ARGUMENTS = ["--enforce-eager", "--kv-cache-dtype", "fp8", "--max-model-len=90000"]


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (
            "NotImplementedError: FP8 KV cache on CPU requires x86 with AVX-512 or AMX.",
            "has --kv-cache-dtype fp8, which",
        ),
        ("api_server.py: error: argument --kv-cache-dtype: invalid choice: 'fp8'", "has --kv-cache-dtype fp8, which"),
        ("ValueError: kv_cache_dtype is not supported", "has --kv-cache-dtype fp8, which"),
        ("ValueError: the model's max seq len (90000) is larger than", "has --max-model-len=90000, which"),
        ("ValueError: a model of this type is unknown", f"[{', '.join(ARGUMENTS)}] was given to the engine as it is"),
    ],
)
def test_an_argument_of_the_recipe_that_an_error_is_about_is_named(said: str, named: str) -> None:
    told = start_advice(said, ARGUMENTS)
    assert told.startswith(f"engine.arguments{'=' if named.startswith('[') else ' '}{named}")
    assert told.endswith("change or remove it")


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
    own, port = process(tmp_path, script, given=["--max-model-len", "9000"])
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
    *_, status, above, cause, advice = message.splitlines()
    assert "ended with status 1" in status
    assert (above, cause) == ("Errors above it in the log:", "  ValueError: 1.2 GiB KV cache is needed")
    assert advice.startswith("The memory does not suffice"), "the last line says what to change"
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

    with pytest.raises(EngineError, match=r"(?s)no_such_engine.*\nSet engine\.python to the Python interpreter"):
        asyncio.run(server.wait_until(never))


# The GPUs of servers that turnwise starts: seen in the environment of their processes.


MODEL = Path(__file__).resolve().parents[3] / "demo" / "model"

# in the place of an engine's interpreter: writes what the server was started with
PROGRAM = """#!{python}
import json, os, sys, time
file = {folder!r} + "/" + str(os.getpid()) + ".json"
ranks = [name for name in os.environ if name.endswith(("RANK", "WORLD_SIZE")) or name.startswith(("MASTER", "TURNWISE_STORE"))]
shown = {{"arguments": sys.argv[1:], "devices": os.environ.get("CUDA_VISIBLE_DEVICES"), "of ranks": ranks}}
open(file + ".part", "w").write(json.dumps(shown))
os.rename(file + ".part", file)
time.sleep(60)
"""


def started(tmp_path: Path, engine: dict[str, Any], **sections: Any) -> list[dict[str, Any]]:
    """What the processes of the recipe's servers see, in the order of the servers."""
    program, folder = tmp_path / "python", tmp_path / "seen"
    folder.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable, folder=str(folder)))
    program.chmod(0o755)
    tree = {
        "model": {"path": str(MODEL), "device": "cuda"},
        "data": {"train": "rows.jsonl"},
        "engine": {"python": str(program), **engine},
        "output": str(tmp_path / "run"),
        **sections,
    }
    config = checked(tree, source="test")
    made = assembly.engine(config, assembly.renderer(config), object())
    assert isinstance(made, RemoteEngine)
    processes = [replica.process for replica in made._replicas.all if replica.process is not None]
    shown: list[dict[str, Any]] = []
    try:
        for process in processes:
            process.start()
            deadline = time.monotonic() + 20
            while len(files := sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)) <= len(shown):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            shown.append(json.loads(files[-1].read_text()))
    finally:
        for process in processes:
            process.kill()
        asyncio.run(made.close())
    return shown


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_each_server_sees_its_own_devices(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7,8")
    servers = started(tmp_path, {"name": name, "replicas": 2, "tensor_parallel": 2, "data_parallel": 2})
    # the first GPU is the trainer's
    assert [server["devices"] for server in servers] == ["1,2,3,4", "5,6,7,8"]
    sizes = {
        "vllm": ("--tensor-parallel-size 2", "--data-parallel-size 2"),
        "sglang": ("--tp-size=2", "--dp-size=2"),
    }[name]
    for server in servers:
        arguments = " ".join(server["arguments"])
        assert all(size in arguments for size in sizes)
        assert "--base-gpu-id" not in arguments  # the server's devices have the numbers from 0 on


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_named_devices_are_numbers_of_visible_devices(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    servers = started(tmp_path, {"name": name, "replicas": 3, "devices": [2, 0, 2]})
    assert [server["devices"] for server in servers] == ["GPU-c", "GPU-a", "GPU-c"]


def test_the_devices_of_all_ranks_of_the_trainer_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    cluster = {"launcher": "local", "trainers": 2}
    (tmp_path / "ranks").mkdir()
    (server,) = started(tmp_path / "ranks", {"name": "vllm", "tensor_parallel": 2}, cluster=cluster)
    assert server["devices"] == "2,3"
    # a sleeping engine shares the trainer's GPU
    (tmp_path / "sleep").mkdir()
    (server,) = started(tmp_path / "sleep", {"name": "vllm", "sleep": True})
    assert server["devices"] == "0"


def test_servers_avoid_the_device_on_which_the_model_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    model = {"path": str(MODEL), "device": "cuda:1"}
    for number, (engine, devices) in enumerate([({}, "0"), ({"sleep": True}, "1")]):
        (tmp_path / str(number)).mkdir()
        (server,) = started(tmp_path / str(number), {"name": "vllm", **engine}, model=model)
        assert server["devices"] == devices
    assert not caplog.records
    (tmp_path / "named").mkdir()
    (server,) = started(tmp_path / "named", {"name": "vllm", "devices": [1]}, model=model)
    assert server["devices"] == "1"
    (message,) = (record.getMessage() for record in caplog.records)
    assert "the engine samples on GPU 1, on which the model is trained" in message


def test_all_ranks_of_a_launcher_that_counts_the_devices_itself_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without cluster.trainers there is a rank for each visible GPU; a rank says so in LOCAL_WORLD_SIZE."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    tree = {"model": {"path": str(MODEL), "device": "cuda"}, "data": {"train": "rows.jsonl"}, "cluster": "local"}
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert trainer_gpus(checked(tree, source="test")) == [0, 1, 2, 3]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert trainer_gpus(checked(tree, source="test")) == [0, 1, 2]
    assert trainer_gpus(checked({**tree, "cluster": {"launcher": "ray", "trainers": 2}}, source="test")) == []


@pytest.mark.parametrize(
    ("given", "names"), [("", []), ("-1", []), ("NoDevFiles", ["NoDevFiles"]), ("2, GPU-a,-1,3", ["2", "GPU-a"])]
)
def test_devices_that_are_hidden_are_none(given: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert visible_devices() == names
    assert local_ranks(ClusterSection(launcher="local")) == (len(names) or 2)


def test_a_server_is_no_training_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the variables of torchrun, a server would look for the store of the ranks."""
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TURNWISE_STORE_FD"):
        monkeypatch.setenv(name, "1")
    (server,) = started(tmp_path, {"name": "vllm"})
    assert server["of ranks"] == []


def test_a_machine_without_a_spare_device_shares_the_trainers() -> None:
    assert devices_of_servers(None, servers=2, per_server=1, trainer=[0], visible=["0", "1"]) == ["0", "1"]
    assert devices_of_servers(None, servers=1, per_server=1, trainer=[0], visible=["3"]) == ["3"]
    assert devices_of_servers(None, servers=2, per_server=1, trainer=[0], visible=[]) == []


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"replicas": 3}, r"3 servers with 1 GPUs each need 3 GPUs, and 2 are visible"),
        ({"devices": [0, 1]}, r"engine\.devices=\[0, 1\] names 2 GPUs, and .* need 1"),
        ({"devices": [2]}, r"engine\.devices=\[2\]: this machine has 2 visible GPUs"),
        ({"url": "http://a:1", "tensor_parallel": 2}, r"engine\.tensor_parallel has no effect with engine\.url"),
        ({"url": "http://a:1", "devices": [0]}, r"engine\.devices has no effect with engine\.url"),
        ({"data_parallel": 2, "weight_transfer": "collective"}, r"cannot be combined with engine\.data_parallel=2"),
    ],
)
def test_devices_that_do_not_fit_are_refused(
    engine: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    tree = {
        "model": {"path": str(MODEL), "device": "cuda"},
        "data": {"train": "rows.jsonl"},
        "engine": {"name": "vllm", "python": "/env/bin/python", **engine}
        if "url" not in engine
        else {"name": "vllm", **engine},
    }
    config = checked(tree, source="test")
    with pytest.raises(ConfigError, match=message):
        assembly.engine(config, assembly.renderer(config), object())


@pytest.mark.parametrize("option", [{"devices": [0]}, {"data_parallel": 2}])
def test_devices_are_refused_on_the_cpu(option: dict[str, Any]) -> None:
    tree = {
        "model": {"path": str(MODEL), "device": "cpu"},
        "data": {"train": "r.jsonl"},
        "engine": {"name": "vllm", **option},
    }
    config = checked(tree, source="test")
    with pytest.raises(ConfigError, match=r"engine\.devices and engine\.data_parallel need GPUs"):
        assembly.engine(config, assembly.renderer(config), object())


# The memory of a KV cache: bytes of a token, and the default of servers on the CPU.


CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 3}


def test_bytes_of_a_token_in_the_kv_cache() -> None:
    assert kv_token_bytes(CONFIG, "float32") == 2 * 3 * 2 * 32 * 4
    assert kv_token_bytes({"text_config": CONFIG}, "bfloat16") == 2 * 3 * 2 * 32 * 2
    old = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 1}
    assert kv_token_bytes(old, "float32") == 2 * 64 * 4


def test_the_cache_of_a_server_on_the_cpu_holds_a_sequence_and_at_least_a_gigabyte() -> None:
    assert cpu_memory_gb(CONFIG, "float32", 2048) == 1.0
    million = cpu_memory_gb(CONFIG, "float32", 2**20)
    assert million == (2**20 + 512) * kv_token_bytes(CONFIG, "float32") / 2**30 > 1.0
