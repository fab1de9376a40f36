"""Tensors from the trainer to the workers of a server by broadcasts of torch.distributed: gloo on CPUs, NCCL between GPUs.

Each server has a group of its own: the trainer has rank 0, the workers have the ranks 1 to n. The group is independent of other
groups of both programs. It is made in the same way as SGLang makes its group for weight updates. This module is imported in the
trainer and in vLLM's workers; it needs torch only.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlsplit

__all__ = ["Backend", "GroupAddress", "TrainerGroup", "join", "leave"]

Backend = Literal["gloo", "nccl"]
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


def join(where: GroupAddress, rank: int, *, seconds: float = _JOIN_SECONDS) -> Any:
    """Become a member of a group: a `torch.distributed.ProcessGroup`. Returns when all members have joined.

    Raises torch.distributed.DistError, RuntimeError or ValueError if that takes longer than `seconds`.
    """
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    limit = timedelta(seconds=seconds)
    method = f"tcp://{where.address}:{where.port}"
    store, _, _ = next(rendezvous(method, rank, where.size, timeout=limit))
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


class TrainerGroup:
    """The trainer's end of a group with the workers of one server. Raises RuntimeError if the group fails."""

    def __init__(self, group: Any, where: GroupAddress) -> None:
        self._group = group
        self.where = where

    @classmethod
    async def create(
        cls, server: str, workers: int, backend: Backend, invite: Callable[[GroupAddress], Awaitable[Any]]
    ) -> TrainerGroup:
        """Make a group with the `workers` of a server at the URL `server`. `invite` lets the workers join, and returns then."""
        where = GroupAddress(
            address=_own_address(server),
            port=_free_port(),
            name=f"turnwise-{secrets.token_hex(4)}",
            size=1 + workers,
            backend=backend,
        )
        joining = asyncio.ensure_future(asyncio.to_thread(join, where, 0))
        try:
            await invite(where)
        except BaseException:
            joining.cancel()
            raise
        return cls(await joining, where)

    async def send(self, tensors: Iterable[Any], receive: Coroutine[Any, Any, Any]) -> Any:
        """Broadcast tensors, in order, while `receive` lets the workers receive them. Returns the result of `receive`.

        `tensors` are on the CPU; NCCL sends copies on the GPU.
        """
        import torch

        receiving = asyncio.ensure_future(receive)
        try:
            device = "cpu" if self.where.backend == "gloo" else torch.device("cuda", torch.cuda.current_device())
            sent = [tensor.to(device) for tensor in tensors]
            waiting = [self._group.broadcast(tensor, 0) for tensor in sent]
            result = await receiving
        finally:
            receiving.cancel()
        for work in waiting:
            work.wait()
        return result

    def close(self) -> None:
        """Leave the group."""
        leave(self._group)


def _own_address(server: str) -> str:
    """The address of this machine as the machine of a server reaches it."""
    host = urlsplit(server).hostname or "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing: it only chooses a route
        except OSError:  # a name without an address, such as that of the engine in this process
            return "127.0.0.1"
        return probe.getsockname()[0]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]
