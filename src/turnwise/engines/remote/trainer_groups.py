"""The trainer's groups with the workers of several servers, over which weights are broadcast."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from turnwise.engines.remote.collective import Backend, GroupAddress, TrainerGroup
from turnwise.engines.remote.http import ServerLost

__all__ = ["TrainerGroups"]


class TrainerGroups:
    """A `TrainerGroup` for each server, by the server's URL. A group that failed is left; the next update makes a new group."""

    def __init__(self, backend: Backend) -> None:
        self.backend: Backend = backend
        self._groups: dict[str, TrainerGroup] = {}

    async def open(self, server: str, workers: int, invite: Callable[[GroupAddress], Awaitable[Any]]) -> GroupAddress:
        """The group with a server, made now if there is none. `invite` as in `TrainerGroup.create`."""
        if server not in self._groups:
            self._groups[server] = await TrainerGroup.create(server, workers, self.backend, invite)
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
