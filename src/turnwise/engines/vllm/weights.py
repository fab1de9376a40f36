"""Weight updates through calls of `worker.WeightReceiver`, the same for servers and for the engine in this process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

from turnwise.engines.remote.collective import Backend, TrainerGroup
from turnwise.engines.remote.http import ServerLost
from turnwise.engines.remote.weights import WeightUpdate
from turnwise.errors import EngineError

__all__ = ["WeightSender", "WorkerCall"]

WorkerCall = Callable[[str, Mapping[str, Any]], Awaitable[list[dict[str, Any]]]]
"""Calls a method of `worker.WeightReceiver` in all workers of a server, with these arguments. Returns one result of each."""


class WeightSender:
    """Sends updates to the workers of servers, as the owner of the servers' weights. `lease` is the time in seconds after which
    another owner may take over. `backend` is that of broadcasts."""

    def __init__(self, owner: str, lease: float, backend: Backend) -> None:
        self._claim = {"owner": owner, "lease": lease}
        self._backend: Backend = backend
        self._groups: dict[str, TrainerGroup] = {}
        """The group with the workers of each server."""

    async def claim(self, server: str, call: WorkerCall) -> None:
        """Become the owner of the weights of the server at this URL."""
        self._drop(server)  # the workers are new if the server was started again
        await _all(server, call("turnwise_claim", self._claim))

    async def send(self, server: str, update: WeightUpdate, call: WorkerCall) -> None:
        """Replace the weights of all workers. Raises EngineError if they have the previous weights, ServerLost if they do not."""
        if update.tensors is None:
            arguments = {**self._claim, "path": str(update.path), "checksum": update.checksum}
            results = await _all(server, call("turnwise_load", arguments))
        else:
            results = await self._broadcast(server, update.tensors, update.checksum, call)
        for result in results:
            if result.get("checksum") != update.checksum:
                raise EngineError(f"{server} has loaded other weights than those of the trainer: it reports {result}")

    def close(self) -> None:
        """Leave all groups."""
        for server in list(self._groups):
            self._drop(server)

    async def _broadcast(
        self, server: str, tensors: Mapping[str, Any], checksum: str, call: WorkerCall
    ) -> list[dict[str, Any]]:
        weights = [
            [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()
        ]
        workers = await _all(server, call("turnwise_expect", {**self._claim, "weights": weights}))
        if server not in self._groups:
            self._groups[server] = await TrainerGroup.create(
                server,
                len(workers),
                self._backend,
                lambda where: _all(server, call("turnwise_join", {**self._claim, "address": asdict(where)})),
            )
        arguments = {"weights": weights, "checksum": checksum, "backend": self._backend}
        try:
            return await self._groups[server].send(tensors.values(), _all(server, call("turnwise_receive", arguments)))
        except BaseException as error:
            self._drop(server)
            if isinstance(error, RuntimeError):  # a broadcast failed: a worker has gone
                raise ServerLost(f"{server} was lost during the broadcast of weights: {error}") from error
            raise

    def _drop(self, server: str) -> None:
        group = self._groups.pop(server, None)
        if group is not None:
            group.close()


async def _all(server: str, call: Awaitable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The results of all workers. Raises EngineError if one reports an error."""
    results = await call
    for result in results:
        if "error" in result:
            raise (ServerLost if result.get("broken") else EngineError)(f"{server}: {result['error']}")
    return results
