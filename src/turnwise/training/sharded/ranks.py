"""The process group: the ranks of a training, and what they send each other besides tensors.

Rank 0 leads: it sends commands, and the other ranks wait for them. There are two process groups. The *data* group (gloo or nccl)
adds up and gathers tensors; its operations fail after a time limit. The *control* group (gloo) sends Python objects. It has no
time limit, because the other ranks wait in it while rank 0 runs conversations. If a process ends, the operations of the others
fail at once. `Liveness` (liveness.py) notices a rank that does not end, but does not answer either.
"""

from __future__ import annotations

import datetime
import os
import time
import uuid
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, Store
from torch.distributed.rendezvous import rendezvous

from turnwise.errors import ConfigError, RunError
from turnwise.training.sharded.liveness import Liveness
from turnwise.training.sharded.options import RankOptions

__all__ = ["Ranks"]

_NO_LIMIT = datetime.timedelta(days=365)
_CONNECT = datetime.timedelta(minutes=10)
_PAUSE = 0.02
"""Seconds between two looks for the other ranks."""


class Ranks:
    """This process among the ranks of a training."""

    def __init__(self, options: RankOptions) -> None:
        """Connect to the other ranks, which the environment variables of torchrun describe.

        Raises ConfigError if the variables are missing, or if the device or the backend does not exist.
        """
        self.rank, self.size, local = (_number(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        self.device = _device(options.device, local)
        backend = _backend(options.backend, self.device)
        raw = _store(self.rank, self.size)
        start = f"turnwise/{_name_of_start(raw, self.rank, self.size)}"
        store = PrefixStore(start, raw)
        dist.init_process_group(
            backend=backend,
            store=PrefixStore("data", store),
            rank=self.rank,
            world_size=self.size,
            timeout=datetime.timedelta(seconds=options.timeout),
        )
        control = dist.new_group(backend="gloo", timeout=_NO_LIMIT)
        assert isinstance(control, ProcessGroup)
        self._control = control
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (self.size,))
        # a connection of its own: a connection serves one thread at a time
        own: Store = raw.clone()  # pyright: ignore[reportAttributeAccessIssue]
        self.liveness = Liveness(PrefixStore(start, own), rank=self.rank, size=self.size, limit=options.heartbeat)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def scatter(self, items: Sequence[Any] | None) -> Any:
        """The item of this rank from rank 0's list, which has an item for each rank. The other ranks give None."""
        received = [None]
        dist.scatter_object_list(received, None if items is None else list(items), src=0, group=self._control)
        return received[0]

    def gather(self, item: Any) -> list[Any]:
        """The items of all ranks, in their order, on rank 0; an empty list on the other ranks."""
        items: list[Any] | None = [None] * self.size if self.leads else None
        dist.gather_object(item, items, dst=0, group=self._control)
        return items or []

    def agree(self, flag: bool) -> bool:
        """Rank 0's flag, on all ranks."""
        value = torch.tensor([flag], dtype=torch.uint8)
        dist.broadcast(value, src=0, group=self._control)
        return bool(value.item())

    def abort(self) -> None:
        """End all operations that run, with an error on this rank."""
        for group in (dist.group.WORLD, self._control):
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
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if kind not in ("auto", "cuda"):
        raise ConfigError(f"model.device={kind} cannot be used with several ranks: set auto, cuda or cpu")
    count = torch.cuda.device_count()
    if local >= count:
        raise ConfigError(
            f"this machine has {count} GPUs, and local rank {local} needs one of its own: start at most {count} ranks on it, or "
            f"set model.device=cpu"
        )
    torch.cuda.set_device(local)
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
