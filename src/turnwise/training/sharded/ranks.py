"""The process groups of a training, what ranks send each other besides tensors, and their signs of life.

Rank 0 leads: it sends commands, and the other ranks wait for them. There are two process groups. The *data* group (gloo or
nccl) adds up and gathers tensors; its operations fail after a time limit. The *control* group (gloo) sends Python objects. It
has no time limit, because the other ranks wait in it while rank 0 runs conversations. If a process ends, the operations of the
others fail at once.

`Liveness` notices a rank that does not end, but does not answer either: each rank counts in the store while its process runs,
and watches the counters of the others. A rank that raises writes its error there. Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import (
    PrefixStore,
    ProcessGroup,
    Store,
    _set_pg_timeout,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.rendezvous import rendezvous

from turnwise.errors import ConfigError, RunError
from turnwise.models.device import GpuMemory, gpu_memory, sees_gpu, why_no_gpu, without_cudnn_attention
from turnwise.options.engines import ClusterSection

_log = logging.getLogger(__name__)

# Signs of life: which rank has ended or does not respond

_SIGN_PAUSE, _LONGEST_TICK = 1.0, 2.0
"""Seconds between two signs of life; of the time between two looks for those of others, more does not count."""
_FIRST = "error"
"""The key of the first rank that has written down an error: those of others may only be its consequences."""
_PATIENCE = 5.0
"""After a lost connection: seconds until the rank at its other end is known by its missing signs of life."""


@dataclass(frozen=True, slots=True)
class LostRank:
    """A rank that has ended, or that has given no sign of life."""

    rank: int
    place: str
    """Its machine and process."""
    reason: str
    again: bool = True
    """Whether the ranks may go on in a new start."""

    def __str__(self) -> str:
        return f"trainer rank {self.rank} ({self.place}) {self.reason}"


class Liveness:
    """The signs of life of this rank, and those of the others. `limit` is in seconds."""

    def __init__(self, store: Store, *, rank: int, size: int, limit: float) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._rank = rank
        self._limit = limit
        self._seen = {other: (-1, time.monotonic()) for other in range(size) if other != rank}
        self._silent = dict.fromkeys(self._seen, 0.0)
        """Seconds without a sign of each other rank, in which this thread ran: after a pause of this machine, all look silent."""
        self._places: dict[int, str] = {}
        self._closing = threading.Event()
        self.on_lost: Callable[[LostRank], None] = lambda lost: None
        """Called in a thread of its own if a rank gives no sign of life for `limit` seconds."""
        self._store.set(f"place/{rank}", f"{socket.gethostname()}, process {os.getpid()}")
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)
        self._thread.start()

    def report(self, reason: str, *, again: bool = True) -> None:
        """Write down why this rank ends. `again`: a new start may go on. The others end their operations within a second or two:
        connections that are lost end those of gloo at once, but those of NCCL only after their time limit."""
        with self._lock, contextlib.suppress(RuntimeError):  # the store is gone, and with it those who would read it
            self._store.set(f"error/{self._rank}", f"{int(again)}{reason}")
            self._store.compare_set(_FIRST, "", str(self._rank))

    def lost(self) -> LostRank | None:
        """The rank whose connection was lost, after waiting until it is known; None if all ranks are alive.

        An error that a rank has written down names it at once.
        """
        started = time.monotonic()
        while True:
            lost = self._find(since=started)
            if lost is not None or time.monotonic() - started > _PATIENCE:
                return lost
            time.sleep(_SIGN_PAUSE / 4)

    def close(self) -> None:
        """End the thread. This rank gives no further signs of life."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        count, before = 0, time.monotonic()
        while not self._closing.wait(_SIGN_PAUSE):
            count += 1
            now = time.monotonic()
            self._silent = {
                other: seconds + min(now - before, _LONGEST_TICK) for other, seconds in self._silent.items()
            }
            before = now
            try:
                with self._lock:
                    self._store.set(f"alive/{self._rank}", str(count))
                self._read()
                error = self._error()
            except RuntimeError:  # the store is gone, and with it the rank or the agent that holds it
                if not self._closing.is_set():
                    self.on_lost(LostRank(0, "the store of the ranks", "cannot be reached"))
                return
            if error is not None:
                self.on_lost(error)
                return
            for other, silent in self._silent.items():
                if silent > self._limit:
                    reason = f"has given no sign of life for {self._limit:g} seconds (cluster.heartbeat)"
                    self.on_lost(LostRank(other, self._place(other), reason))
                    return

    def _read(self) -> None:
        for other, (seen, _) in list(self._seen.items()):
            with self._lock:
                if not self._store.check([f"alive/{other}"]):
                    continue
                count = int(self._store.get(f"alive/{other}"))
                if other not in self._places and self._store.check([f"place/{other}"]):
                    self._places[other] = self._store.get(f"place/{other}").decode()
            if count != seen:
                self._seen[other], self._silent[other] = (count, time.monotonic()), 0.0

    def _find(self, *, since: float) -> LostRank | None:
        """A rank that has written down an error, or that has given no sign of life for some seconds."""
        try:
            if (error := self._error()) is not None:
                return error
        except RuntimeError:
            return LostRank(0, self._place(0), "has ended, or its machine cannot be reached")
        now = time.monotonic()
        for other, (_, seen) in self._seen.items():
            if now - since > 3 * _SIGN_PAUSE and now - seen > 3 * _SIGN_PAUSE:
                return LostRank(other, self._place(other), "has ended, or does not answer")
        return None

    def _error(self) -> LostRank | None:
        """The first rank that has written down an error, if it is another one."""
        with self._lock:
            if not self._store.check([_FIRST]):
                return None
            first = int(self._store.get(_FIRST))
            again, text = (found := self._store.get(f"error/{first}").decode(errors="replace"))[:1], found[1:]
        if first == self._rank:
            return None
        return LostRank(first, self._place(first), f"has ended: {text}", again=again == "1")

    def _place(self, other: int) -> str:
        return self._places.get(other, "place unknown")


# Process groups

_NO_LIMIT = datetime.timedelta(days=365)
_CONNECT = datetime.timedelta(minutes=10)
_PAUSE = 0.02
"""Seconds between two looks for the other ranks."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """How a model is divided among the ranks. Of a mesh with two dimensions, the model is copied along the first."""

    layers: DeviceMesh
    """Among the ranks of its last dimension, the parameters of layers are divided."""
    root: DeviceMesh
    """The same for all other parameters."""
    tensor: DeviceMesh | None
    """The ranks that compute the same tokens; None: each rank computes alone."""
    context: DeviceMesh | None
    """The ranks that have the parts of the tokens of a micro-batch; None: each rank has all."""
    together: DeviceMesh | None
    """The ranks that compute the same micro-batch; None: each rank computes alone."""
    expert: DeviceMesh | None
    """The ranks among which the experts of layers are divided; None: as other parameters."""
    experts: DeviceMesh | None
    """Among the ranks of its last dimension, which have the same experts, the parameters of these are divided."""

    @classmethod
    def of(cls, device: str, groups: int, shard: int, context: int, tensor: int, expert: int) -> Mesh:
        """The mesh of all ranks, of which those with consecutive numbers are near. All ranks must call this."""
        names = ("shard",) if groups == 1 else ("replicate", "shard")
        # gradients of the ranks with parts of a micro-batch are parts, as those of different micro-batches
        shape = (shard * context,) if groups == 1 else (groups, shard * context)
        if tensor == 1:
            layers = root = init_device_mesh(device, shape, mesh_dim_names=names)
        else:
            layers = init_device_mesh(device, (*shape, tensor), mesh_dim_names=(*names, "tensor"))[names]
            root = init_device_mesh(device, (*shape[:-1], shape[-1] * tensor), mesh_dim_names=names)
        with_experts = None
        if expert > 1:  # not beside `tensor`
            with_experts = init_device_mesh(
                device, (*shape[:-1], shape[-1] // expert, expert), mesh_dim_names=(*names, "expert")
            )
        parts = ("sets", "context", "tensor")
        every = init_device_mesh(device, (groups * shard, context, tensor), mesh_dim_names=parts)
        together = init_device_mesh(device, (groups * shard, context * tensor), mesh_dim_names=("sets", "together"))
        return cls(
            layers,
            root,
            tensor=every["tensor"] if tensor > 1 else None,
            context=every["context"] if context > 1 else None,
            together=together["together"] if context * tensor > 1 else None,
            expert=None if with_experts is None else with_experts["expert"],
            experts=None if with_experts is None else with_experts[names],
        )

    @property
    def context_size(self) -> int:
        """Into how many parts the tokens of a micro-batch are divided."""
        return 1 if self.context is None else self.context.size()

    @property
    def set_size(self) -> int:
        """How many ranks compute the same micro-batch."""
        return 1 if self.together is None else self.together.size()

    def groups(self) -> Iterator[ProcessGroup]:
        """The process groups of this rank in all meshes."""
        for field in fields(self):
            mesh = getattr(self, field.name)
            yield from () if mesh is None else mesh.get_all_groups()


class Ranks:
    """This process among the ranks of a training."""

    def __init__(self, options: ClusterSection, *, device: str) -> None:
        """Connect to the other ranks, which the environment variables of torchrun describe.

        `device` is the kind of device of each rank: `auto`, `cpu` or `cuda`.

        Raises ConfigError if the variables are missing, if the device or the backend does not exist, or if the ranks cannot be
        arranged as `options.mesh` says.
        """
        self.rank, self.size, local = (_number(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        self._shape = shape = options.mesh.shape(self.size)
        self.device = _device(device, local)
        backend = _backend(options.backend, self.device)
        raw = _store(self.rank, self.size)
        start = f"turnwise/{_name_of_start(raw, self.rank, self.size)}"
        store = PrefixStore(start, raw)
        limit = datetime.timedelta(seconds=options.timeout)
        dist.init_process_group(
            backend=backend,
            store=PrefixStore("data", store),
            rank=self.rank,
            world_size=self.size,
            timeout=limit,
        )
        control = dist.new_group(backend="gloo", timeout=_NO_LIMIT)
        assert isinstance(control, ProcessGroup)
        self._control = control
        saving = dist.new_group(backend="gloo", timeout=_NO_LIMIT)
        assert isinstance(saving, ProcessGroup)
        self.saving = saving
        """For what ranks tell each other while they write a checkpoint, also beside other commands."""
        self.mesh = Mesh.of(self.device.type, *shape, options.mesh.expert)
        for group in self.mesh.groups():  # which torch gives its own limit: 30 minutes for gloo, 10 for NCCL
            _set_pg_timeout(limit, group)
        # a connection of its own: a connection serves one thread at a time
        own: Store = raw.clone()  # pyright: ignore[reportAttributeAccessIssue]
        self.liveness = Liveness(PrefixStore(start, own), rank=self.rank, size=self.size, limit=options.heartbeat)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def sets(self) -> int:
        """How many sets of ranks compute micro-batches of their own."""
        return self.size // self.mesh.set_size

    @property
    def counts(self) -> bool:
        """Whether this is the rank of its set whose results are used."""
        return self.rank % self.mesh.set_size == 0

    def scatter(self, items: Sequence[Any] | None) -> Any:
        """The item of this rank from rank 0's list, which has an item for each rank. The other ranks give None."""
        received = [None]
        dist.scatter_object_list(received, None if items is None else list(items), src=0, group=self._control)
        return received[0]

    def gather(self, item: Any) -> list[Any]:
        """The items of one rank of each set, in their order, on rank 0; an empty list on the other ranks."""
        return self.gather_each(item if self.counts else None)[:: self.mesh.set_size]

    def gather_each(self, item: Any) -> list[Any]:
        """The items of all ranks, in their order, on rank 0; an empty list on the other ranks."""
        items: list[Any] | None = [None] * self.size if self.leads else None
        dist.gather_object(item, items, dst=0, group=self._control)
        return items or []

    def share(self, item: Any) -> list[Any]:
        """The items of all ranks, in their order, on all ranks."""
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item, group=self._control)
        return items

    def gpus(self) -> list[GpuMemory]:
        """The memory of the GPUs of all ranks, on all ranks; empty if they compute on CPUs."""
        own = gpu_memory(str(self.device)) if self.device.type == "cuda" else None
        return [memory for memory in self.share(own) if memory is not None]

    def place(self, card: str) -> str:
        """On which GPUs these ranks are, and how they are arranged; the same on all ranks. `card` is that of this rank."""
        cards = ", ".join(sorted(set(self.share(card))))
        return f"{self.size} ranks ({' x '.join(map(str, self._shape))}) on {cards}"

    def agree(self, flag: bool) -> bool:
        """Rank 0's flag, on all ranks."""
        value = torch.tensor([flag], dtype=torch.uint8)
        dist.broadcast(value, src=0, group=self._control)
        return bool(value.item())

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of the values over one rank of each set, on the CPU of all ranks."""
        values = values.cpu().clone() if self.counts else torch.zeros_like(values, device="cpu")
        dist.all_reduce(values, group=self._control)
        return values

    def abort(self) -> None:
        """End all operations that run, with an error on this rank."""
        for group in (dist.group.WORLD, self._control, self.saving):
            if isinstance(group, ProcessGroup):
                group.abort()

    def close(self) -> None:
        """Leave the group. Called when no rank computes."""
        self.liveness.close()
        dist.destroy_process_group()


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise ConfigError(
            f"training on several ranks needs the environment variable {name}, which torchrun sets: start the command with "
            f"`torchrun --nproc-per-node 2 -m turnwise ...`, or use cluster=local with `turnwise train` or `turnwise sft`"
        )
    return int(text)


def _device(kind: str, local: int) -> torch.device:
    """The device of this rank: the GPU with the local rank's number, or the CPU."""
    if kind == "cpu":
        return torch.device("cpu")
    if kind == "auto" and not sees_gpu():
        if local == 0 and (reason := why_no_gpu()) is not None:
            _log.warning(
                "model.device=auto: ranks compute on CPUs, although this machine has a GPU's driver: %s", reason
            )
        return torch.device("cpu")
    if kind not in ("auto", "cuda"):
        raise ConfigError(f"model.device={kind} cannot be used with several ranks: set auto, cuda or cpu")
    count = torch.cuda.device_count()
    if count == 0:
        reason = why_no_gpu() or "this machine has no GPU that torch sees"
        raise ConfigError(f"model.device=cuda cannot be used: {reason}")
    if local >= count:
        raise ConfigError(
            f"this machine has {count} GPUs, and local rank {local} needs one of its own: start at most {count} ranks on it, or "
            f"set model.device=cpu"
        )
    torch.cuda.set_device(local)
    without_cudnn_attention()
    return torch.device("cuda", local)


def _backend(name: str, device: torch.device) -> str:
    if name == "auto":
        name = "nccl" if device.type == "cuda" else "gloo"
    if name == "nccl" and device.type != "cuda":
        raise ConfigError("cluster.backend=nccl needs GPUs, and the model is on the CPU: set cluster.backend=auto")
    # tensors on the CPU are sent by gloo in any case
    return "cpu:gloo,cuda:nccl" if name == "nccl" else "gloo"


def _store(rank: int, size: int) -> Store:
    """The key-value store of the ranks. It is on rank 0, or in torchrun's agent."""
    listening = os.environ.get("TURNWISE_STORE_FD")
    if listening is not None and rank == 0:
        port = _number("MASTER_PORT")
        return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            os.environ["MASTER_ADDR"],
            port,
            size,
            True,
            _CONNECT,
            wait_for_workers=False,
            master_listen_fd=int(listening),
        )
    store, _, _ = next(rendezvous("env://", timeout=_CONNECT))
    return store


def _name_of_start(store: Store, rank: int, size: int) -> str:
    """A name for this start of the ranks, which rank 0 chooses and sends to the others.

    torchrun keeps its store when it starts ranks again. Without such a name, they would read the addresses of the ranks before.
    Keys of earlier starts are harmless here: each answer belongs to a question with a random name, and rank 0 waits until each
    rank has confirmed the name.
    """
    own = uuid.uuid4().hex
    deadline = time.monotonic() + _CONNECT.total_seconds()
    if rank != 0:
        store.set(f"turnwise/question/{rank}", own)
        store.wait([f"turnwise/answer/{own}"], _CONNECT)
        name = store.get(f"turnwise/answer/{own}").decode()
        store.set(f"turnwise/confirmed/{name}/{rank}", "")
        return name
    missing = set(range(1, size))
    while missing:
        for other in missing:
            if store.check([f"turnwise/question/{other}"]):
                store.set(f"turnwise/answer/{store.get(f'turnwise/question/{other}').decode()}", own)
        time.sleep(_PAUSE)
        missing = {other for other in missing if not store.check([f"turnwise/confirmed/{own}/{other}"])}
        if time.monotonic() > deadline:
            raise RunError(
                f"trainer ranks {sorted(missing)} have not connected for {_CONNECT.total_seconds():g} s: look into their logs, "
                f"and start all ranks again"
            )
    return own
