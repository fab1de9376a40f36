"""Weight updates through calls of `worker.WeightReceiver`, the same for servers and for the engine in this process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

from turnwise.engines.remote.collective import Backend
from turnwise.engines.remote.http import ServerLost
from turnwise.engines.remote.trainer_groups import TrainerGroups
from turnwise.engines.remote.weights import WeightUpdate
from turnwise.errors import EngineError

__all__ = ["WeightSender", "WorkerCall"]

WorkerCall = Callable[[str, Mapping[str, Any]], Awaitable[list[dict[str, Any]]]]
"""Calls a method of `worker.WeightReceiver` in all workers of a server, with these arguments. Returns one result of each."""


class WeightSender:
    """Sends updates to the workers of servers, as the owner of the servers' weights (`Owner.name`). `lease` is the time in
    seconds after which another owner may take over. `backend` is that of broadcasts."""

    def __init__(self, owner: str, lease: float, backend: Backend) -> None:
        self._claim = {"owner": owner, "lease": lease}
        self._groups = TrainerGroups(backend)

    async def claim(self, server: str, call: WorkerCall) -> None:
        """Become the owner of the weights of the server at this URL."""
        self._groups.drop(server)  # the workers are new if the server was started again
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
        self._groups.close()

    async def _broadcast(
        self, server: str, tensors: Mapping[str, Any], checksum: str, call: WorkerCall
    ) -> list[dict[str, Any]]:
        weights = [
            [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()
        ]
        workers = await _all(server, call("turnwise_expect", {**self._claim, "weights": weights}))
        await self._groups.open(
            server,
            len(workers),
            lambda where: _all(server, call("turnwise_join", {**self._claim, "address": asdict(where)})),
        )
        arguments = {"weights": weights, "checksum": checksum, "backend": self._groups.backend}
        return await self._groups.send(server, tensors.values(), _all(server, call("turnwise_receive", arguments)))


async def _all(server: str, call: Awaitable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The results of all workers. Raises EngineError if one reports an error."""
    results = await call
    for result in results:
        if "error" in result:
            raise (ServerLost if result.get("broken") else EngineError)(f"{server}: {result['error']}")
    return results
