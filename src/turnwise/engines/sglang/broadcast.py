"""Weights to SGLang's workers by broadcasts: `/init_weights_update_group` and `/update_weights_from_distributed`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise.engines.remote.collective import Backend, GroupAddress, TrainerGroup
from turnwise.engines.remote.http import HttpServer, ServerLost
from turnwise.errors import EngineError

__all__ = ["Broadcasts"]


class Broadcasts:
    """The groups with the workers of servers."""

    def __init__(self, backend: Backend) -> None:
        self._backend: Backend = backend
        self._groups: dict[str, TrainerGroup] = {}

    async def send(self, server: HttpServer, tensors: Mapping[str, Any], *, workers: int, flush_cache: bool) -> None:
        """Replace the weights of a server. Raises EngineError if it has the previous weights, ServerLost if it may not."""
        if server.url not in self._groups:
            self._groups[server.url] = await TrainerGroup.create(
                server.url, workers, self._backend, lambda where: _invite(server, where)
            )
        group = self._groups[server.url]
        body = {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "group_name": group.where.name,
            "flush_cache": flush_cache,
        }
        await server.post("/begin_weight_update", {})
        try:
            await group.send(tensors.values(), _call(server, "/update_weights_from_distributed", body))
        except BaseException as error:
            self.drop(server.url)
            if isinstance(error, RuntimeError):  # a broadcast failed: a worker has gone
                raise ServerLost(f"{server.url} was lost during the broadcast of weights: {error}") from error
            raise
        finally:
            await server.post("/end_weight_update", {})

    def drop(self, url: str) -> None:
        """Leave the group with a server. The next update makes a new one."""
        group = self._groups.pop(url, None)
        if group is not None:
            group.close()

    def close(self) -> None:
        """Leave all groups."""
        for url in list(self._groups):
            self.drop(url)


async def _invite(server: HttpServer, where: GroupAddress) -> None:
    body = {
        "master_address": where.address,
        "master_port": where.port,
        "rank_offset": 1,
        "world_size": where.size,
        "group_name": where.name,
        "backend": where.backend,
    }
    await _call(server, "/init_weights_update_group", body)


async def _call(server: HttpServer, path: str, body: Mapping[str, Any]) -> None:
    """A POST request whose answer says whether it has succeeded. Raises EngineError if it has not."""
    answer = await server.post(path, dict(body))
    if not (answer or {}).get("success"):
        raise EngineError(f"{server.url}{path} failed: {(answer or {}).get('message', answer)}")
