"""Weights on their way to servers: files, copies, broadcasts, and the check of names and shapes.

A server reads files, in shared memory or on a disk, or receives copies by broadcasts of torch.distributed: gloo on CPUs, NCCL
between GPUs. Invariant: the weights of an update stay until the next weights have arrived, so that a server can get them again
after a failed update or a restart. An update must have all names and shapes of the model's weights.

Each server has a group of its own: the trainer has rank 0, the workers have the ranks 1 to n. The group is independent of other
groups of both programs, and is made in the same way as SGLang makes its group for weight updates.

Used by the trainer, and inside vLLM's workers, where only the source of turnwise is on the path: needs torch and no other
packages. Does not know learners, requests or routes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import tempfile
import threading
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar
from urllib.parse import urlsplit

from turnwise.engines.remote.http import ServerLost
from turnwise.engines.remote.shared_buffer import checked_values, checksum_of_all
from turnwise.errors import EngineError
from turnwise.models.streamed import StreamedWeights

T = TypeVar("T")

# Store: the weights of an update, as files or as copies

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "turnwise-weights-"
_SPARE = 1.1
"""Free space that must be there, as a multiple of the size of the weights."""
_BLOCK = 16 << 20  # bytes read at once for a checksum


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """Weights that servers load."""

    version: int
    path: Path | None = None
    """A safetensors file with Hugging Face's names of the state dict; for an adapter, a directory in peft's format. None if
    `tensors` are broadcast."""
    tensors: Mapping[str, Any] | None = None
    """The weights on the CPU, by the same names; None if they are in a file."""
    adapter: bool
    checksum: str
    """CRC-32 of the file, or of the bytes of all tensors. A worker computes it again from what it has received."""
    size: int
    """Bytes of the weights."""
    policy: str = ""
    """The policy whose adapter it is; empty: the recipe's model."""
    checksums: Mapping[str, int] | None = None
    """The checksum of each of `tensors` (`shared_buffer.checksum_of_values`), if they go through memory that the server sees."""
    live: dict[str, Any] = field(default_factory=dict[str, Any])
    """The trainer's own tensors on its device, while it waits for the update; then empty, because it changes them."""

    @property
    def source(self) -> Mapping[str, Any]:
        """The tensors that are sent: from the device, if they are still there."""
        return self.live or self.tensors or {}


class WeightStore(Protocol):
    """Keeps the weights of updates until no server needs them any more. All methods raise EngineError."""

    def write(self, version: int, weights: Mapping[str, Any]) -> WeightUpdate:
        """Keep a copy of tensors: names of the state dict to tensors, without tied copies."""
        ...

    def write_adapter(self, version: int, write: Callable[[Path], None]) -> WeightUpdate:
        """Keep an adapter: `write(folder)` writes its files into a new directory."""
        ...

    def discard(self, update: WeightUpdate) -> None:
        """Free an update that no server needs any more."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


class WeightCopies:
    """Keeps weights in the memory of this process, for broadcasts (`engine.weight_transfer: collective`)."""

    def write(self, version: int, weights: Mapping[str, Any]) -> WeightUpdate:
        """A copy of the tensors on the CPU: the trainer's own change in place. Those of several ranks are in a file without a
        name, of which memory has what is read at present. Raises EngineError if it cannot be written."""
        if isinstance(weights, StreamedWeights):
            tensors = _in_file(weights)
        else:
            tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights.items()}
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        checksum = checksum_of_tensors(tensors.values())
        return WeightUpdate(version=version, tensors=tensors, adapter=False, checksum=checksum, size=size)

    def write_adapter(self, version: int, write: Callable[[Path], None]) -> WeightUpdate:
        raise EngineError("an adapter is sent as files: set engine.weight_transfer=files")

    def discard(self, update: WeightUpdate) -> None:
        """Nothing to do: the copy is freed with the update."""

    def close(self) -> None:
        """Nothing to do."""


FILES_INSTEAD = "set engine.weight_transfer=files"


class CannotShare(EngineError):
    """A server cannot read memory of the trainer's device."""


@contextlib.contextmanager
def sharing_with(server: str) -> Iterator[None]:
    """Raise EngineError if torch's code inside has no memory for the buffer, or cannot share it."""
    try:
        yield
    except RuntimeError as error:
        raise EngineError(f"weights could not be shared with {server}: {error}; {FILES_INSTEAD}") from error


class SharedCopies(WeightCopies):
    """Keeps weights in the memory of this process, for servers that read them in memory of the trainer's device
    (`engine.weight_transfer: ipc`). They are sent from the device; the copy is for servers that are started again, and for the
    way back. `instead` keeps the weights if the servers cannot; None: that is an error."""

    def __init__(self, instead: WeightStore | None = None) -> None:
        self.instead = instead

    def write(self, version: int, weights: Mapping[str, Any]) -> WeightUpdate:
        """A copy of the tensors, with checksums that the device has computed. Raises EngineError if values are not finite, or if
        there is no memory for the copy."""
        live = {name: tensor.detach() for name, tensor in weights.items()}
        try:
            checksums = checked_values(live)
            tensors = _on_host(live)
        except ValueError as error:
            raise EngineError(str(error)) from error
        except RuntimeError as error:
            size = sum(tensor.nbytes for tensor in live.values()) / 1e9
            raise EngineError(
                f"the {size:.1f} GB of weights of version {version} could not be copied into the machine's memory, which "
                f"engine.weight_transfer=ipc needs: {error}; {FILES_INSTEAD}"
            ) from error
        return WeightUpdate(
            version=version,
            tensors=tensors,
            adapter=False,
            checksum=checksum_of_all(checksums),
            size=sum(tensor.nbytes for tensor in tensors.values()),
            checksums=checksums,
            live=live,
        )

    def write_adapter(self, version: int, write: Callable[[Path], None]) -> WeightUpdate:
        raise EngineError("an adapter is sent as files: remove engine.weight_transfer")


def _on_host(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Copies on the CPU, in pinned memory if a tensor is on a GPU. Raises RuntimeError if there is not so much memory."""
    import torch

    gpus = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
    copies = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=bool(gpus)) for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():
        copies[name].copy_(tensor, non_blocking=True)
    for gpu in gpus:  # by name: the current one of this thread is the first
        torch.cuda.synchronize(gpu)
    return copies


class WeightFiles:
    """Writes weights into files below `folder`; None: in shared memory, or in the system's temporary directory if that is full.

    Every object has a directory of its own, which `close` removes. The directory of a process that was killed is removed by the
    next object that writes to the same place. Below a `folder`, nothing is removed, because other machines may use it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._own: Path | None = None
        self._lock: int | None = None
        """The file descriptor whose lock says that this process uses the directory."""

    def write(self, version: int, weights: Mapping[str, Any]) -> WeightUpdate:
        """Write tensors into a safetensors file. `weights` maps the names of the state dict to tensors, without tied copies.

        Raises EngineError if they cannot be written.
        """
        size = _size(weights)
        path = self._directory(size) / f"{version}-{os.urandom(4).hex()}.safetensors"
        with _writing(path):
            _save(weights, path)
        return WeightUpdate(version=version, path=path, adapter=False, checksum=checksum_of(path), size=size)

    def write_adapter(self, version: int, write: Callable[[Path], None]) -> WeightUpdate:
        """The same with an adapter: `write(folder)` writes its files into a new directory."""
        path = self._directory(0) / f"{version}-{os.urandom(4).hex()}"
        with _writing(path):
            path.mkdir()
            write(path)
        weights = path / "adapter_model.safetensors"
        return WeightUpdate(
            version=version, path=path, adapter=True, checksum=checksum_of(weights), size=weights.stat().st_size
        )

    def discard(self, update: WeightUpdate) -> None:
        """Remove the files of an update that no server needs any more."""
        assert update.path is not None
        if update.adapter:
            shutil.rmtree(update.path, ignore_errors=True)
        else:
            update.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove all files."""
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            self._own = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _directory(self, size: int) -> Path:
        if self._own is None:
            parent = self._folder or _parent_for(size)
            try:
                parent.mkdir(parents=True, exist_ok=True)
                if self._folder is None:
                    _remove_abandoned(parent)
                self._own = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
                self._lock = _locked(self._own)
            except OSError as error:
                raise EngineError(
                    f"weights for the engine's servers cannot be written to {parent}: {error}. Set engine.weight_folder to a "
                    f"directory that the server can read, too"
                ) from error
        return self._own


def _size(weights: Mapping[str, Any]) -> int:
    empty = weights.empty if isinstance(weights, StreamedWeights) else weights
    return sum(tensor.numel() * tensor.element_size() for tensor in empty.values())


def _save(weights: Mapping[str, Any], path: Path) -> None:
    """Write a safetensors file: those of several ranks a tensor at a time, behind a header that has all names and places."""
    from safetensors.torch import save_file

    if not isinstance(weights, StreamedWeights):
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, path)
        return
    import torch

    types = {getattr(torch, torch_name): name for name, torch_name in _TYPES.items()}
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in weights.empty.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": types[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in weights.empty:
            file.write(weights[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)


_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Names of torch's types in safetensors files."""


def _in_file(weights: StreamedWeights) -> dict[str, Any]:
    """The tensors in a file that has no name from the start: a process that is killed leaves nothing, and the system frees it
    with the last tensor."""
    from safetensors.torch import load_file

    parent = Path(tempfile.gettempdir())
    with _writing(parent, "Set the environment variable TMPDIR"), tempfile.TemporaryFile(dir=parent) as file:
        path = Path(f"/dev/fd/{file.fileno()}")
        _save(weights, path)
        return load_file(path)


def _locked(directory: Path) -> int:
    """The descriptor of a new file `.lock` in a directory. The file has its name only after it is locked."""
    new = directory / ".lock.new"
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    new.rename(directory / ".lock")
    return descriptor


def _remove_abandoned(parent: Path) -> None:
    """Remove the directories of processes that have ended without removing them. Their locks are free."""
    for lock in parent.glob(f"{_PREFIX}*/.lock"):
        with (
            contextlib.suppress(OSError),
            lock.open("rb") as file,
        ):  # in use, of another user, or removed by another process
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


def checksum_of(path: Path) -> str:
    """CRC-32 of a file, as 8 hexadecimal digits."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def checksum_of_tensors(tensors: Iterable[Any]) -> str:
    """CRC-32 of the bytes of tensors on the CPU, one after the other, as 8 hexadecimal digits."""
    import torch

    value = 0
    for tensor in tensors:
        value = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy(), value)
    return f"{value:08x}"


def _parent_for(size: int) -> Path:
    """Shared memory, if two copies of the weights fit into it (the present and the next ones); else the temporary directory."""
    with contextlib.suppress(OSError):
        if os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > 2 * _SPARE * size:
            return SHARED_MEMORY
    return Path(tempfile.gettempdir())


@contextlib.contextmanager
def _writing(path: Path, fix: str = "Set engine.weight_folder") -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        raise EngineError(
            f"weights for the engine's servers cannot be written to {path}: {error}. {fix} to a directory with more free "
            f"space"
        ) from error


# Shapes: the check that an update has all weights


@dataclass(frozen=True, slots=True)
class WeightShapes:
    """The names and the shapes of all weights of a model."""

    shapes: Mapping[str, Sequence[int]]

    def check(self, given: Mapping[str, Sequence[int]]) -> None:
        """Raise EngineError if an update does not have all of these weights, with these shapes, and no others.

        The weights of an output layer may be missing or added: tied embeddings have one name in a file.
        """
        tied = {"lm_head.weight"}
        missing = sorted(self.shapes.keys() - given.keys() - tied)
        unknown = sorted(given.keys() - self.shapes.keys() - tied)
        other = sorted(name for name, shape in given.items() if list(self.shapes.get(name, shape)) != list(shape))
        refuse_weights(
            missing, unknown, other, rule="An update must have all weights of the model that the server serves"
        )


def refuse_weights(missing: Sequence[str], unknown: Sequence[str], other_shape: Sequence[str], *, rule: str) -> None:
    """Raise EngineError if one of these lists has names of weights. `rule` says what an update must have."""
    for names, problem in (
        (missing, "are missing"),
        (unknown, "are not the model's"),
        (other_shape, "have another shape"),
    ):
        if names:
            raise EngineError(
                f"{len(names)} of the weights {problem}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}. {rule}"
            )


def read_shapes(files: Sequence[Path]) -> WeightShapes:
    """The names and shapes in the headers of safetensors files."""
    return WeightShapes(
        {
            name: entry["shape"]
            for file in files
            for name, entry in read_header(file)[0].items()
            if name != "__metadata__"
        }
    )


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and the position of the first tensor's bytes."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        return json.loads(stream.read(size)), 8 + size


# Broadcasts: groups of the trainer and the workers of a server

Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class Sending:
    """How the trainer's process broadcasts."""

    backend: Backend = "gloo"
    device: str = "cpu"
    """The device from which it sends: with NCCL the GPU on which the model is trained, such as `cuda:1`."""
    shared: bool = False
    """Whether servers read weights in memory of this device, without broadcasts."""


BY_GLOO = Sending()

_JOIN_SECONDS = 120.0
"""The longest time until all members have joined a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAddress:
    """Where the members of a group meet. All members give the same values."""

    address: str
    """The trainer's address, as the workers reach it."""
    port: int
    name: str
    size: int
    """The number of members: the trainer, and the workers of the server."""
    backend: Backend
    nccl: str = ""
    """The version of the trainer's NCCL; empty with gloo."""


def join(
    where: GroupAddress, rank: int, *, seconds: float = _JOIN_SECONDS, listening: socket.socket | None = None
) -> Any:
    """Become a member of a group: a `torch.distributed.ProcessGroup`. Returns when all members have joined.

    Rank 0 gives the socket that is `listening` at the address, and that belongs to the group then: a port that was free is not
    lost to another program.

    Raises torch.distributed.DistError, RuntimeError or ValueError if that takes longer than `seconds`.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    limit = timedelta(seconds=seconds)
    if listening is not None:
        store = TCPStore(where.address, where.port, where.size, True, limit, master_listen_fd=listening.detach())
    else:
        store, _, _ = next(rendezvous(f"tcp://{where.address}:{where.port}", rank, where.size, timeout=limit))
    store.set_timeout(limit)
    group, _ = c10d._new_process_group_helper(
        where.size,
        rank,
        [],
        c10d.Backend(where.backend),
        c10d.PrefixStore(where.name, store),
        group_name=c10d.GroupName(where.name),
        timeout=limit,
    )
    c10d._world.pg_group_ranks[group] = {index: index for index in range(where.size)}  # pyright: ignore[reportArgumentType]
    return group


def leave(group: Any) -> None:
    """End the membership. Broadcasts that still wait for other members are given up."""
    from torch.distributed import destroy_process_group

    destroy_process_group(group)


def refuse_other_nccl(where: GroupAddress) -> None:
    """Raise EngineError if this process has another version of NCCL than the trainer: NCCL joins equal versions only."""
    if where.backend == "nccl" and (own := nccl_version()) != where.nccl:
        raise EngineError(
            f"the server has NCCL {own}, and the trainer {where.nccl}: broadcasts need equal versions. Install the version of "
            f"torch in the trainer's environment that the server has, or set engine.weight_transfer=files"
        )


def nccl_version() -> str:
    """The version of NCCL that torch uses here, such as `2.29.7`."""
    from torch.cuda import nccl

    return ".".join(map(str, nccl.version()))


class TrainerGroup:
    """The trainer's end of a group with the workers of one server, which sends from `device`. Raises RuntimeError if the group
    fails."""

    def __init__(self, group: Any, where: GroupAddress, device: str = "cpu") -> None:
        self._group = group
        self._device = device
        self.where = where

    @classmethod
    async def create(
        cls, server: str, workers: int, sending: Sending, invite: Callable[[GroupAddress], Awaitable[Any]]
    ) -> TrainerGroup:
        """Make a group with the `workers` of a server at the URL `server`. `invite` lets the workers join, and returns then."""
        listening = socket.create_server(("", 0))
        where = GroupAddress(
            address=_own_address(server),
            port=listening.getsockname()[1],
            name=f"turnwise-{secrets.token_hex(4)}",
            size=1 + workers,
            backend=sending.backend,
            nccl=nccl_version() if sending.backend == "nccl" else "",
        )
        joining = _in_thread(lambda: join(where, 0, listening=listening))
        try:
            await invite(where)
        except BaseException:
            joining.cancel()
            raise
        return cls(await joining, where, sending.device)

    async def send(self, tensors: Iterable[Any], receive: Coroutine[Any, Any, Any]) -> Any:
        """Broadcast tensors, in order, while `receive` lets the workers receive them. Returns the result of `receive`.

        `tensors` are on the CPU; NCCL sends copies on the GPU. The broadcasts are in a thread of their own: the first one of NCCL
        does not return before all workers have begun to receive, and `receive` has to ask them to.
        """
        receiving = asyncio.ensure_future(receive)
        sending = _in_thread(lambda: self._broadcast(tensors))
        try:
            await asyncio.wait({receiving, sending}, return_when=asyncio.FIRST_EXCEPTION)
            if receiving.done():
                receiving.result()  # the worker's own error, if there is one
            sending.result()
            return receiving.result()
        finally:
            receiving.cancel()
            sending.cancel()

    def _broadcast(self, tensors: Iterable[Any]) -> None:
        import torch

        on_gpu = torch.device(self._device).type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self._device)  # of this thread
        waiting: list[Any] = []
        for tensor in tensors:
            work = self._group.broadcast(tensor.to(self._device), 0)
            if on_gpu:
                work.wait()  # one copy at a time on the GPU
            else:
                waiting.append(work)
        for work in waiting:
            work.wait()
        if on_gpu:
            torch.cuda.synchronize()

    def close(self) -> None:
        """Leave the group."""
        leave(self._group)


def _in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """The result of `work`, in a thread that does not keep the program from ending: it may wait for a worker that has gone."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except (RuntimeError, ValueError, OSError) as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return asyncio.wrap_future(future)


def _own_address(server: str) -> str:
    """The address of this machine as the machine of a server reaches it."""
    host = urlsplit(server).hostname or "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing: it only chooses a route
        except OSError:  # a name without an address, such as that of the engine in this process
            return "127.0.0.1"
        return probe.getsockname()[0]


class TrainerGroups:
    """A `TrainerGroup` for each server, by the server's URL. A group that failed is left; the next update makes a new group."""

    def __init__(self, sending: Sending) -> None:
        self.sending = sending
        self._groups: dict[str, TrainerGroup] = {}

    async def open(self, server: str, workers: int, invite: Callable[[GroupAddress], Awaitable[Any]]) -> GroupAddress:
        """The group with a server, made now if there is none. `invite` as in `TrainerGroup.create`."""
        if server not in self._groups:
            self._groups[server] = await TrainerGroup.create(server, workers, self.sending, invite)
        return self._groups[server].where

    async def send(self, server: str, tensors: Iterable[Any], receive: Coroutine[Any, Any, Any]) -> Any:
        """See `TrainerGroup.send`. The group must be open. Raises ServerLost if a worker has gone."""
        try:
            return await self._groups[server].send(tensors, receive)
        except BaseException as error:
            self.drop(server)
            if isinstance(error, RuntimeError):  # a broadcast failed: a worker has gone
                raise ServerLost(f"{server} was lost during the broadcast of weights: {error}") from error
            raise

    def drop(self, server: str) -> None:
        """Leave the group with a server."""
        group = self._groups.pop(server, None)
        if group is not None:
            group.close()

    def close(self) -> None:
        """Leave all groups."""
        for server in list(self._groups):
            self.drop(server)
