"""The calls to Ray, and the actors that Ray runs in its processes. No other module imports Ray.

`WorkerActor` runs in the process of a rollout worker: it builds a `RolloutWorker` and passes calls on. `RankActor` holds the
resources of a training rank. The rank itself is a separate process that runs the command of the user: it has a main thread for
signals, an exit status, and a terminal. This module knows nothing of conversations and of training.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pty
import selectors
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.engines.remote.servers import ProbeAnswer, ProbePrompt
from turnwise.errors import ConfigError, EngineError, TurnwiseError
from turnwise.options.engines import RanksSection, WorkersSection
from turnwise.ray_workers.rollout_worker import RolloutWorker, SentWeights, WorkerInfo
from turnwise.types import Completion, Request, Sampling

# in the process of a rollout worker

MakeWorker = Callable[[], contextlib.AbstractAsyncContextManager[RolloutWorker]]
"""Makes the worker in its process. At the end of the context, its engine and environments are closed."""


class WorkerActor:
    """The methods of the actor. They run in one event loop, which the conversations use, too."""

    def __init__(self, name: str, make: MakeWorker, directory: str | None) -> None:
        """`name` is that of the worker, for messages. `directory` is the directory to which the recipe's paths are relative;
        None: that of the runtime environment."""
        self._name = name
        self._make = make
        self._directory = directory
        self._worker: RolloutWorker | None = None
        self._ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self._life: asyncio.Task[None] | None = None

    async def start(self) -> WorkerInfo:
        """Build the worker. Raises TurnwiseError, which names the worker and its machine."""
        try:
            return await self._start()
        except TurnwiseError as error:
            raise type(error)(f"{self._name} on {socket.gethostname()}: {error}") from error

    async def _start(self) -> WorkerInfo:
        if self._directory is not None:
            enter_directory(self._directory, "a rollout worker", "cluster.workers.runtime_env.working_dir")
        ready = asyncio.create_task(self._ready.wait())
        self._life = asyncio.create_task(self._live())
        await asyncio.wait([ready, self._life], return_when=asyncio.FIRST_COMPLETED)
        if self._worker is None:
            ready.cancel()
            await self._life  # raises the reason
        return self._started.info

    async def _live(self) -> None:
        """Keep the worker until `stop`. One task opens and closes its resources."""
        async with self._make() as self._worker:
            self._ready.set()
            await self._stopping.wait()

    async def run(self, empty: bytes, sampling: Sampling) -> bytes:
        """See `RolloutWorker.run`."""
        return await self._started.run(empty, sampling)

    async def generate(self, request: Request) -> Completion:
        """See `RolloutWorker.generate`."""
        return await self._started.generate(request)

    async def load_weights(self, weights: SentWeights, probe: ProbePrompt | None = None) -> list[ProbeAnswer]:
        """See `RolloutWorker.load_weights` and `load_adapter`. Conversations go on while the machine receives the weights, and
        nothing has changed if they do not arrive."""
        worker = self._started
        sent = weights.parts if weights.adapter is None else [weights.adapter]
        with _arriving(f"weights of version {weights.version}"):
            found = await asyncio.gather(*sent)
        if weights.adapter is not None:
            return await worker.load_adapter(weights.version, found[0], probe)
        return await worker.load_weights(weights.version, found, probe)

    async def ping(self) -> None:
        """Answers if the event loop of the conversations is not blocked."""

    async def stop(self) -> None:
        """Close the engine and the environments. All conversations have ended or were cancelled."""
        self._stopping.set()
        if self._life is not None:
            await self._life

    @property
    def _started(self) -> RolloutWorker:
        if self._worker is None:
            raise EngineError("the rollout worker was not started")
        return self._worker


@contextlib.contextmanager
def _arriving(what: str) -> Iterator[None]:
    """A context that raises EngineError if objects of the store cannot be had: the machine that has them is lost."""
    from ray.exceptions import RayError

    try:
        yield
    except RayError as error:
        raise EngineError(f"{what} did not arrive: {_first_line(error)}") from error


def enter_directory(directory: str, process: str, option: str) -> None:
    """Make the directory of the command the present one of this process. Raises ConfigError if the machine does not have it;
    `option` is that with which Ray copies it."""
    try:
        os.chdir(directory)
    except OSError as error:
        raise ConfigError(
            f"the machine of {process} has no directory {directory} ({error.strerror}), in which the command was started: "
            f"share it among the machines, or set {option}"
        ) from None


# in the process that holds the resources of a rank

RAY_ADDRESS = "TURNWISE_RAY_ADDRESS"
"""The environment variable of a rank with the address of its Ray cluster."""
_CHUNK = 1 << 16
_STOP_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """What the process of a rank runs."""

    words: Sequence[str]
    """The words of the command behind `turnwise`."""
    environment: Mapping[str, str]
    """Environment variables besides those of the actor."""
    terminals: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """The output streams (1 and 2) that are terminals at the command, with their numbers of lines and columns."""


class RankActor:
    """The methods of the actor. They block, and run in threads of their own."""

    def __init__(self, rank: int, address: str, host: str) -> None:
        """`address` is that of the Ray cluster, and `host` that of this machine."""
        self._rank = rank
        self._address = address
        self._host = host
        self._store: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._outputs = selectors.DefaultSelector()

    def prepare(self, directory: str | None) -> tuple[str, int]:
        """Go to the directory of the command, unless it is that of the runtime environment. Returns the address of the store of
        the ranks, which is on rank 0; port 0 on the other ranks. Raises ConfigError."""
        if directory is not None:
            enter_directory(directory, f"trainer rank {self._rank}", "cluster.ranks.runtime_env.working_dir")
        if self._rank == 0:
            self._store = socket.create_server((self._host, 0))
        return self._host, 0 if self._store is None else self._store.getsockname()[1]

    def start(self, command: RankStart) -> str:
        """Start the process. Returns its place, for messages."""
        environment = {**os.environ, **command.environment, RAY_ADDRESS: self._address, "PYTHONUNBUFFERED": "1"}
        inherited: tuple[int, ...] = ()
        if self._store is not None:
            inherited = (self._store.fileno(),)
            environment["TURNWISE_STORE_FD"] = str(self._store.fileno())
        mine, its = zip(*(_stream(command.terminals.get(number)) for number in (1, 2)), strict=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "turnwise", *command.words],
            env=environment,
            pass_fds=inherited,
            stdin=subprocess.PIPE,  # closed when this process has gone
            stdout=its[0],
            stderr=its[1],
            start_new_session=True,
        )
        for number, descriptor in zip((1, 2), mine, strict=True):
            self._outputs.register(descriptor, selectors.EVENT_READ, number)
        for descriptor in its:
            os.close(descriptor)
        if self._store is not None:
            self._store.close()
        return f"{self._host}, process {self._process.pid}"

    def read(self) -> list[tuple[int, bytes]]:
        """The next output, with the number of its stream; empty if there will be no more. One call at a time."""
        while self._outputs.get_map():
            found: list[tuple[int, bytes]] = []
            for key, _ in self._outputs.select():
                data = b""
                with contextlib.suppress(OSError):  # EIO: the other side of a terminal is closed
                    data = os.read(key.fd, _CHUNK)
                if data:
                    found.append((key.data, data))
                else:
                    self._outputs.unregister(key.fd)
                    os.close(key.fd)
            if found:
                return found
        return []

    def wait(self) -> int:
        """The exit status of the process, after its end. Negative: the signal that has ended it."""
        return self._started.wait()

    def send_signal(self, number: int) -> None:
        """Send the process a signal, if it runs."""
        self._started.send_signal(number)

    def stop(self) -> None:
        """End the process at once."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the rank was not started"
        return self._process


def _stream(terminal: tuple[int, int] | None) -> tuple[int, int]:
    """A pipe, or a terminal of a size in lines and columns: the descriptor to read from, and the descriptor for the process."""
    if terminal is None:
        return os.pipe()
    mine, its = pty.openpty()
    termios.tcsetwinsize(its, terminal)
    attributes = termios.tcgetattr(its)
    attributes[1] &= ~termios.OPOST  # the terminal of the command adds carriage returns
    termios.tcsetattr(its, termios.TCSANOW, attributes)
    return mine, its


# the calls to Ray

_log = logging.getLogger(__name__)

_CONNECTIONS = 3
"""How often a connection by a client server (`ray://`) is tried: Ray starts a process for each, which can die at its start."""

_CONTROL_CALLS = 16
"""How many calls an actor can serve besides its conversations: signs of life, weights, start and stop."""


class WorkerLost(EngineError):
    """A worker does not exist any more, or cannot be reached."""


def needs_text(needs: WorkersSection | RanksSection) -> str:
    """What Ray reserves for a worker or a rank, for messages."""
    of_custom = "".join(f", {name}={amount:g}" for name, amount in needs.resources.items())
    return f"num_cpus={needs.num_cpus:g}, num_gpus={needs.num_gpus or 0:g}{of_custom}"


_COPIED = ("working_dir", "py_modules")


def _copied(runtime_env: Mapping[str, Any], option: str) -> dict[str, Any]:
    """The part of a runtime environment with directories of this machine. Ray takes it when it connects, copies the directories
    to the cluster, and gives it to all actors of the connection; of an actor, it takes addresses only. Raises ConfigError."""
    found: dict[str, Any] = {}
    for name, paths in _local(runtime_env).items():
        for path in filter(_is_local, paths):
            if not os.path.exists(os.path.expanduser(path)):
                raise ConfigError(f"{option}.{name}: there is no directory or file {path}; correct the path")
        local = [os.path.abspath(os.path.expanduser(path)) if _is_local(path) else path for path in paths]
        found[name] = local if isinstance(runtime_env[name], list) else local[0]
    if found and "excludes" in runtime_env:
        found["excludes"] = runtime_env["excludes"]
    return found


def _local(runtime_env: Mapping[str, Any]) -> dict[str, list[str]]:
    """The paths of each option that names a directory of this machine."""
    named = {name: runtime_env.get(name) for name in _COPIED}
    paths = {
        name: [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]
        for name, value in named.items()
    }
    return {name: found for name, found in paths.items() if any(map(_is_local, found))}


def _is_local(path: str) -> bool:
    return "://" not in path


def connect(address: str | None, needs: WorkersSection | RanksSection) -> bool:
    """Connect this process with a Ray cluster, unless it is connected. Returns whether it was not.

    Without an address: the cluster of RAY_ADDRESS, or one that runs on this machine, or a new one. The directories of
    `needs.runtime_env` are copied to the cluster. Raises ConfigError.
    """
    option = f"cluster.{'workers' if isinstance(needs, WorkersSection) else 'ranks'}.runtime_env"
    copied = _copied(needs.runtime_env, option)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with _own_handlers():
        try:
            import ray
            from ray.exceptions import RuntimeEnvSetupError
        except ImportError:
            raise ConfigError("cluster.launcher=ray needs the package `ray`: pip install 'turnwise[ray]'") from None
        if ray.is_initialized():
            if copied:
                raise ConfigError(
                    f"{option}.{next(iter(copied))}: Ray copies directories when it connects, and this process is connected "
                    f"already: give it to your ray.init(runtime_env=...) and remove it here, or do not connect before"
                )
            return False
        dashboard = None if address is not None or os.environ.get("RAY_ADDRESS") else False
        _await_head(address)
        for attempt in range(1, _CONNECTIONS + 1):
            try:
                ray.init(
                    address=address,
                    include_dashboard=dashboard,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    runtime_env=copied or None,
                )
                _watch_head(ray)
                return True
            except RuntimeEnvSetupError as error:
                reason = str(error).strip().splitlines()[-1].rstrip(".")  # the first line is a heading
                raise ConfigError(
                    f"{option}: Ray could not copy the directory to the cluster: {reason}. Leave large files out "
                    f"with {option}.excludes=[...], or share the directory among the machines and remove the option"
                ) from error
            except ConnectionAbortedError as error:
                # the client server is there, but not its process for this client
                if attempt == _CONNECTIONS:
                    raise _no_cluster(address, error) from error
                _log.warning("cluster.address=%s: %s. Connecting again", address, _first_line(error))
            except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
                raise _no_cluster(address, error) from error
    raise AssertionError("the loop above returns or raises")


_HEAD_SECONDS, _HEAD_WAIT = 20.0, 1.0
"""How long the head of a cluster may take to listen at its address, because a job may start its head and the driver at once; and
the seconds between two tries."""


def _await_head(address: str | None) -> None:
    """Raise ConfigError if nothing listens at the address of the cluster. Ray tries for minutes, and writes of its internals."""
    known, origin, fix = _known_address(address)
    host, _, port = known.rpartition(":")
    if "://" in known or not host or not port.isdigit():
        return  # `auto`, `local`, a client's address, or none: Ray answers at once
    end = time.monotonic() + _HEAD_SECONDS
    told = False
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), _HEAD_PAUSE).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise ConfigError(
                    f"{origin}{known}: nothing listens there: {error}. Start the cluster with `ray start --head`, {fix}"
                ) from None
        if not told:
            _log.warning("%s%s: nothing listens there yet, waiting for at most %g s", origin, known, _HEAD_SECONDS)
            told = True
        time.sleep(_HEAD_WAIT)


def _known_address(address: str | None) -> tuple[str, str, str]:
    """The address to which Ray connects, empty if it looks for one itself; where it stands, and what to do if it is wrong."""
    if address not in (None, "auto"):
        return address or "", "cluster.address=", "or correct the address"
    if given := os.environ.get("RAY_ADDRESS"):
        return given, "RAY_ADDRESS=", "or correct or remove the variable"
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    # written by `ray start`, and left there by a machine that went down
    file = Path(folder) / "ray" / "ray_current_cluster"
    try:
        kept = file.read_text().strip()
    except OSError:
        return "", "", ""
    fix = "remove the file if that cluster is gone, or set cluster.address=local for a cluster of this command"
    return kept, f"Ray's file of the last cluster on this machine, {file}: ", fix


_HEAD_PAUSE, _HEAD_ATTEMPTS = 3.0, 3
"""Seconds between two connections to the head of the cluster, and how many must fail one after the other."""


def _watch_head(ray: Any) -> None:
    """Say it if the head of the cluster (its GCS) is gone: Ray itself waits for a minute, and then ends this process from inside,
    where no exception can explain it."""
    if ray.util.client.ray.is_connected():
        return  # the server of the client ends the connection, which is an exception here
    address = ray.get_runtime_context().gcs_address
    host, _, port = address.rpartition(":")

    def watch() -> None:
        missed = 0
        while ray.is_initialized():
            time.sleep(_HEAD_PAUSE)
            try:
                socket.create_connection((host.strip("[]"), int(port)), _HEAD_PAUSE).close()
                missed = 0
            except OSError as error:
                missed += 1
                if missed == _HEAD_ATTEMPTS and ray.is_initialized():
                    print(
                        f"turnwise: the head of the Ray cluster ({address}) does not answer: {error}. Ray ends this process "
                        f"if it stays away. Then start the cluster and the same command again, with resume=auto, which goes "
                        f"on after the newest checkpoint",
                        file=sys.stderr,
                        flush=True,
                    )

    threading.Thread(target=watch, name="head of the Ray cluster", daemon=True).start()


def _no_cluster(address: str | None, error: Exception) -> ConfigError:
    # `ray start` makes a cluster with a token where it finds one; to an address that is given, Ray sends it only on request
    token = "RAY_AUTH_TOKEN, or ~/.ray/auth_token"
    if os.environ.get("RAY_AUTH_MODE") == "token":
        fix = f"correct the address or the token ({token})"
    else:
        fix = f"correct the address, or, if the cluster asks for a token ({token}), set RAY_AUTH_MODE=token"
    return ConfigError(
        f"cluster.address={address}: there is no Ray cluster to connect to: {_first_line(error)}. Start it with `ray "
        f"start --head`, {fix}"
    )


@contextlib.contextmanager
def _own_handlers() -> Any:
    """A context that keeps this process's handlers of signals and uncaught exceptions, which Ray replaces."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    handlers, hook = {number: signal.getsignal(number) for number in numbers}, sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def disconnect() -> None:
    """End the connection. Ray ends the actors of this process."""
    import ray

    ray.shutdown()


def create_actor(name: str, make: MakeWorker, needs: WorkersSection) -> Any:
    """A new actor, as soon as the cluster has its resources. Ray does not restart it, and spreads actors over the machines."""
    import ray

    directory = None if "working_dir" in needs.runtime_env else os.getcwd()
    return (
        ray.remote(WorkerActor)
        .options(
            **_reserving(needs),
            max_concurrency=needs.max_concurrent + _CONTROL_CALLS,
            scheduling_strategy="SPREAD",
        )
        .remote(name, make, directory)
    )


def _reserving(needs: WorkersSection | RanksSection) -> dict[str, Any]:
    """Ray's options of an actor that it does not restart. It has the directories of the connection."""
    copied = {*_local(needs.runtime_env), "excludes"}
    return {
        "num_cpus": needs.num_cpus,
        "num_gpus": needs.num_gpus or 0,
        "resources": dict(needs.resources),
        "runtime_env": {name: value for name, value in needs.runtime_env.items() if name not in copied},
        "max_restarts": 0,
    }


class _GpuHolder:
    """An actor that has a GPU of a machine reserved, and does not use it."""

    def gpus(self) -> list[str]:
        import ray

        return [str(number) for number in ray.get_gpu_ids()]


def hold_gpu(name: str, seconds: float) -> Any:
    """Reserve the GPU that this process uses on its machine, so that Ray gives it to no worker.

    `name` is that in CUDA_VISIBLE_DEVICES, or its number. Returns the handle of what holds it until it is killed or this process
    ends; None if Ray gives away no GPUs of this machine, or has reserved it for this process (`ray job submit
    --entrypoint-num-gpus`). Raises ConfigError if another actor has it.
    """
    import ray
    from ray.exceptions import GetTimeoutError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    count = sum(
        int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["NodeID"] == here and node["Alive"]
    )
    holder: Any = ray.remote(_GpuHolder).options(
        num_cpus=0, num_gpus=1, scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False)
    )
    holders: dict[str, Any] = {}  # Ray chooses the GPU: others are held until it is this one
    try:
        for _ in range(count):
            actor = holder.remote()
            holders[""] = actor
            found: str = ray.get(actor.gpus.remote(), timeout=seconds)[0]
            holders[found] = holders.pop("")
            if found == name:
                return holders.pop(found)
    except GetTimeoutError:
        pass  # all others are reserved
    finally:
        for actor in holders.values():
            kill(actor)
    of_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ and os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if count == 0 or (of_job and name in of_job):
        return None
    raise ConfigError(
        f"GPU {name} of this machine, on which the model is trained, is reserved by another actor of the Ray cluster, which has "
        f"{count} GPUs of this machine: set model.device=cuda:N to another one, start Ray without this GPU, or train in ranks on "
        f"the cluster (cluster.trainers)"
    )


def has_gpus() -> bool:
    """Whether the cluster has a GPU."""
    import ray

    return ray.cluster_resources().get("GPU", 0) > 0


def free_gpus() -> int:
    """The GPUs of the cluster that are not reserved."""
    import ray

    return int(ray.available_resources().get("GPU", 0))


def reserve(ranks: Sequence[RanksSection]) -> Any:
    """Ask Ray for the resources of all ranks together, on as few machines as possible. Returns their placement group."""
    from ray.util import placement_group

    bundles = [
        {name: float(amount) for name, amount in needed.items() if amount}
        for needed in ({"CPU": rank.num_cpus, "GPU": rank.num_gpus or 0, **rank.resources} for rank in ranks)
    ]
    return placement_group(bundles, strategy="PACK")


def reserved(group: Any, seconds: float) -> bool:
    """Wait, at most `seconds`, until the resources of a placement group are reserved."""
    return group.wait(seconds)


def release(group: Any) -> None:
    """Give the resources of a placement group back. Ray ends the actors in it."""
    from ray.exceptions import RayError
    from ray.util import remove_placement_group

    with contextlib.suppress(RayError, ConnectionError, ValueError):
        remove_placement_group(group)


def create_rank(rank: int, needs: RanksSection, group: Any) -> Any:
    """The actor of a training rank, in its part of a placement group. Ray does not restart it."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return (
        ray.remote(_RankActor)
        .options(
            **_reserving(needs),
            max_concurrency=_CONTROL_CALLS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        )
        .remote(rank)
    )


class _RankActor(RankActor):
    """A `RankActor` that knows its cluster and its machine."""

    def __init__(self, rank: int) -> None:
        import ray
        from ray.util import get_node_ip_address

        super().__init__(rank, ray.get_runtime_context().gcs_address, get_node_ip_address())


def kill(actor: Any) -> None:
    """End the process of an actor at once."""
    import ray
    from ray.exceptions import RayError

    with contextlib.suppress(RayError, ConnectionError, ValueError):
        ray.kill(actor, no_restart=True)


def put(value: Any) -> Any:
    """Put a value into the object store. Returns its reference, which keeps it there. Raises EngineError if there is no space."""
    import ray
    from ray.exceptions import RayError

    try:
        return ray.put(value)
    except RayError as error:
        raise EngineError(
            f"Ray's object store cannot take the weights: {_first_line(error)}. Start Ray with a larger --object-store-memory, "
            f"for two copies of them on each machine"
        ) from error


def free_resources() -> str:
    """The resources of the cluster that are not reserved, for messages."""
    import ray

    return resources_text(ray.available_resources())


def resources_text(amounts: Mapping[str, float]) -> str:
    """Resources as Ray counts them, for messages.

    Example: `{"CPU": 2.0, "memory": 9.6e9}` gives `CPU=2, memory=8.9 GiB`. Resources that stand for a machine are left out.
    """
    return ", ".join(
        f"{name}={amount / 2**30:.1f} GiB" if name in _BYTES else f"{name}={amount:g}"
        for name, amount in sorted(amounts.items())
        if not name.startswith("node:")
    )


_BYTES = ("memory", "object_store_memory")
"""Resources that Ray counts in bytes."""


async def answer(reference: Any) -> Any:
    """The result of a call to an actor. If this call is cancelled, the call to the actor is cancelled.

    Raises WorkerLost if the actor is gone, and EngineError or ConfigError if the actor raised an error.
    """
    with _errors_of_actors():
        try:
            return await reference
        except asyncio.CancelledError:
            _cancel(reference)
            raise


def ready(references: Sequence[Any], seconds: float, *, count: int = 1) -> list[Any]:
    """The calls to actors that have ended, after waiting for `count` of them, at most `seconds`."""
    import ray

    if not references:
        return []
    found, _ = ray.wait(list(references), num_returns=min(count, len(references)), timeout=seconds)
    more, _ = ray.wait(list(references), num_returns=len(references), timeout=0) if found else (found, [])
    return more


def result(reference: Any) -> Any:
    """As `answer`, outside of an event loop."""
    import ray

    with _errors_of_actors():
        return ray.get(reference)


@contextlib.contextmanager
def _errors_of_actors() -> Iterator[None]:
    """A context that raises turnwise's errors instead of Ray's: see `answer`."""
    from ray.exceptions import RayError, RayTaskError, TaskCancelledError

    try:
        yield
    except TaskCancelledError as error:
        raise WorkerLost("the call was cancelled") from error
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, TurnwiseError):
            raise cause from None
        raise EngineError(f"an actor on Ray has raised {type(cause or error).__name__}: {cause or error}") from error
    except RayError as error:
        raise WorkerLost(_first_line(error)) from error


def _cancel(reference: Any) -> None:
    import ray
    from ray.exceptions import RayError

    with contextlib.suppress(
        RayError, ConnectionError, ValueError, TypeError
    ):  # TypeError: the call is not known any more
        ray.cancel(reference)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    lines = text.splitlines()
    reason = next((line for line in lines if "died" in line and "actor" in line), lines[0])
    if "creation task" in reason:
        reason = f"its process could not be made ready: {lines[-1]}"  # Ray's text ends with the exception
    elif reason.endswith(":"):  # a heading, and the traceback of Ray's client server
        reason = f"{reason} {lines[-1].strip()}"
    return reason.strip().rstrip(".")[:300]
