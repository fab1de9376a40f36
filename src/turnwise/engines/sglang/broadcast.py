"""Weights to SGLang's workers by broadcasts: `/init_weights_update_group` and `/update_weights_from_distributed`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise.engines.remote.collective import GroupAddress
from turnwise.engines.remote.http import HttpServer
from turnwise.engines.remote.trainer_groups import TrainerGroups
from turnwise.errors import EngineError

__all__ = ["broadcast"]


async def broadcast(
    groups: TrainerGroups, server: HttpServer, tensors: Mapping[str, Any], *, workers: int, flush_cache: bool
) -> None:
    """Replace the weights of a server. Raises EngineError if it has the previous weights, ServerLost if it may not."""
    where = await groups.open(server.url, workers, lambda where: _invite(server, where))
    body = {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "group_name": where.name,
        "flush_cache": flush_cache,
    }
    await server.post("/begin_weight_update", {})
    try:
        await groups.send(server.url, tensors.values(), _call(server, "/update_weights_from_distributed", body))
    finally:
        await server.post("/end_weight_update", {})


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
