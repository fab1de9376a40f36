"""Weight updates of a rollout server, and the lease that lets one trainer at a time make them.

All methods are called in the event loop of the engine.
"""

from __future__ import annotations

import asyncio
import secrets
import stat
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.engines.engine import Engine
from turnwise.engines.remote.weights import checksum_of
from turnwise.errors import ConfigError, EngineError
from turnwise.rollout_server.adapters import LoadAdapter, packed_config, unpack_adapter
from turnwise.rollout_server.metrics import ServerMetrics
from turnwise.serve.http import RequestRefused

__all__ = ["LEASE_SECONDS", "Leases", "TrainerLease", "WeightUpdates"]

LEASE_SECONDS = 120.0
"""A lease ends when its trainer has not been received of for this time."""


@dataclass(slots=True)
class TrainerLease:
    """The right of one trainer to change the weights."""

    id: str
    owner: str
    """The trainer's name for itself."""
    used: float
    """When the trainer last used the lease, on the clock of `Leases`."""


class Leases:
    """At most one lease at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lease: TrainerLease | None = None

    def take(self, owner: str) -> TrainerLease:
        """A lease for `owner`; its earlier lease ends. Raises RequestRefused if another trainer has the lease."""
        now = self._clock()
        lease = self._lease
        if lease is not None and lease.owner != owner and now - lease.used < LEASE_SECONDS:
            raise RequestRefused(
                409,
                f"the trainer {lease.owner} uses this server, and the weights of two trainers cannot be served at once: stop "
                f"that trainer, or start another server. The server is free {LEASE_SECONDS:g} s after the trainer's last "
                f"request; the last request was {now - lease.used:.0f} s ago",
            )
        self._lease = TrainerLease(secrets.token_hex(16), owner, now)
        return self._lease

    def use(self, id: str | None) -> None:
        """Note that the trainer with this lease is alive. Raises RequestRefused if it is not the present lease."""
        if self._lease is None or id is None or not secrets.compare_digest(id.encode(), self._lease.id.encode()):
            raise RequestRefused(
                409, "the lease is missing, or another trainer has taken it: take a lease first (POST /lease)"
            )
        self._lease.used = self._clock()

    def renew(self, id: str | None) -> None:
        """As `use`, but an unknown lease is ignored: clients without a lease may run conversations."""
        if self._lease is not None and id == self._lease.id:
            self._lease.used = self._clock()

    def release(self, id: str | None) -> None:
        """End the lease. Raises RequestRefused if it is not the present lease."""
        self.use(id)
        self._lease = None

    @property
    def owner(self) -> str | None:
        """The trainer that has the lease; None if there is none, or the trainer is silent for too long."""
        if self._lease is None or self._clock() - self._lease.used >= LEASE_SECONDS:
            return None
        return self._lease.owner


class WeightUpdates:
    """Loads weights into the engine, one update after the other."""

    def __init__(self, engine: Engine, metrics: ServerMetrics, *, load_adapter: LoadAdapter | None = None) -> None:
        """`load_adapter` is given if the recipe has an adapter (model.lora)."""
        self._engine = engine
        self._load_adapter = load_adapter
        self._metrics = metrics
        self._lock = asyncio.Lock()
        metrics.version.set(engine.version)

    @property
    def version(self) -> int:
        """The version of the engine's weights."""
        return self._engine.version

    async def update(self, version: int, path: Path, checksum: str | None = None) -> dict[str, Any]:
        """Load the weights in a safetensors file, and sample with them as `version` from now on.

        After a failed update the engine samples with the old weights, under the old version. Raises RequestRefused.
        """
        return await self._counted(version, lambda: self._load_file(version, path, checksum))

    async def load(self, version: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The same with tensors in memory."""

        async def load() -> int:
            self._refuse_without_adapter()
            _refuse_not_finite(tensors)
            await self._engine.load_weights(version, tensors)
            return len(tensors)

        return await self._counted(version, load)

    async def _load_file(self, version: int, path: Path, checksum: str | None) -> int:
        """Load a file with all weights, or with an adapter. Returns the number of tensors."""
        tensors, config = await asyncio.to_thread(_read_tensors, path, checksum)
        if config is None:
            self._refuse_without_adapter()
            await self._engine.load_weights(version, tensors)
        elif self._load_adapter is None:
            raise RequestRefused(
                422,
                "the file contains a LoRA adapter, and the server's recipe has none: set the same options model.lora for "
                "`turnwise serve` and `turnwise train`",
            )
        else:
            with tempfile.TemporaryDirectory(prefix="turnwise-adapter-") as folder:
                await asyncio.to_thread(unpack_adapter, path, config, Path(folder))
                await self._load_adapter(version, Path(folder))
        return len(tensors)

    def _refuse_without_adapter(self) -> None:
        if self._load_adapter is not None:
            raise RequestRefused(
                422,
                "the server's recipe has a LoRA adapter (model.lora), and the weights are all weights of a model: send the "
                "adapter, or remove model.lora for `turnwise serve`",
            )

    async def _counted(self, version: int, load: Callable[[], Awaitable[int]]) -> dict[str, Any]:
        """Load weights after the updates before, and count the result. `load` returns the number of tensors."""
        started = time.perf_counter()
        try:
            async with self._lock:
                count = await load()
        except (RequestRefused, EngineError, ConfigError) as error:
            self._metrics.updates.labels(result="failed").inc()
            if isinstance(error, RequestRefused):
                raise
            raise RequestRefused(
                422,
                f"the weights of version {version} cannot be loaded: {error}. The server goes on with version "
                f"{self._engine.version}",
            ) from error
        seconds = time.perf_counter() - started
        self._metrics.updates.labels(result="loaded").inc()
        self._metrics.update_seconds.observe(seconds)
        self._metrics.version.set(self._engine.version)
        return {"version": self._engine.version, "tensors": count, "seconds": round(seconds, 4)}


def _read_tensors(path: Path, checksum: str | None) -> tuple[dict[str, Any], str | None]:
    """The tensors of a safetensors file, mapped into memory, and the configuration of the adapter if they are an adapter.

    Raises RequestRefused if the file cannot be read, or is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file  # torch

    try:
        _refuse_special_file(path)
        if checksum is not None and (found := checksum_of(path)) != checksum:
            raise RequestRefused(
                422,
                f"the weights are damaged: their CRC-32 is {found}, and the trainer's is {checksum}. Send them again",
            )
        tensors, config = load_file(path), packed_config(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise RequestRefused(
            422,
            f"the weights cannot be read: {error}. They must be one complete safetensors file, which the server can open",
        ) from error
    _refuse_not_finite(tensors)
    return tensors, config


def _refuse_special_file(path: Path) -> None:
    """Raise RequestRefused for a pipe or a device, which would be read for ever. Raises OSError if there is nothing."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise RequestRefused(
            422, f"{path} is no regular file ({stat.filemode(mode)}): give the path of a safetensors file"
        )


def _refuse_not_finite(tensors: Mapping[str, Any]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise RequestRefused(
                422, f"the weight {name} contains NaN or infinity: the server goes on with its old weights"
            )
