"""The calls to Ray. No other module imports Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.errors import ConfigError, EngineError, TurnwiseError
from turnwise.ray_workers.actor import MakeWorker, WorkerActor
from turnwise.ray_workers.rank_actor import RankActor

__all__ = [
    "ActorOptions",
    "WorkerLost",
    "answer",
    "connect",
    "create_actor",
    "create_rank",
    "disconnect",
    "free_resources",
    "has_gpus",
    "kill",
    "put",
    "ready",
    "release",
    "reserve",
    "reserved",
    "result",
]

_log = logging.getLogger(__name__)

_CONNECTIONS = 3
"""How often a connection by a client server (`ray://`) is tried: Ray starts a process for each, which can die at its start."""

_CONTROL_CALLS = 16
"""How many calls an actor can serve besides its conversations: signs of life, weights, start and stop."""


class WorkerLost(EngineError):
    """A worker does not exist any more, or cannot be reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorOptions:
    """What Ray reserves for a worker, and where it runs."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    max_concurrent: int = 1000
    """Conversations that run at the same time."""

    @property
    def text(self) -> str:
        """The resources, for messages."""
        of_custom = "".join(f", {name}={amount:g}" for name, amount in self.resources.items())
        return f"num_cpus={self.num_cpus:g}, num_gpus={self.num_gpus:g}{of_custom}"

    def with_gpus(self, count: int) -> ActorOptions:
        """The same with another number of GPUs."""
        return replace(self, num_gpus=count)


def connect(address: str | None) -> bool:
    """Connect this process with a Ray cluster, unless it is connected. Returns whether it was not.

    Without an address: the cluster of RAY_ADDRESS, or one that runs on this machine, or a new one. Raises ConfigError.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with _own_handlers():
        try:
            import ray
        except ImportError:
            raise ConfigError("cluster.launcher=ray needs the package `ray`: pip install 'turnwise[ray]'") from None
        if ray.is_initialized():
            return False
        dashboard = None if address is not None or os.environ.get("RAY_ADDRESS") else False
        for attempt in range(1, _CONNECTIONS + 1):
            try:
                ray.init(address=address, include_dashboard=dashboard, log_to_driver=False, logging_level=logging.ERROR)
                return True
            except ConnectionAbortedError as error:
                # the client server is there, but not its process for this client
                if attempt == _CONNECTIONS:
                    raise _no_cluster(address, error) from error
                _log.warning("cluster.address=%s: %s. Connecting again", address, _first_line(error))
            except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
                raise _no_cluster(address, error) from error
    raise AssertionError("the loop above returns or raises")


def _no_cluster(address: str | None, error: Exception) -> ConfigError:
    return ConfigError(
        f"cluster.address={address}: there is no Ray cluster to connect to: {_first_line(error)}. Start it with `ray "
        f"start --head`, or correct the address"
    )


@contextlib.contextmanager
def _own_handlers() -> Any:
    """A context that keeps this process's handlers of signals and uncaught exceptions, which Ray replaces."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    handlers, hook = {number: signal.getsignal(number) for number in numbers}, sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def disconnect() -> None:
    """End the connection. Ray ends the actors of this process."""
    import ray

    ray.shutdown()


def create_actor(make: MakeWorker, options: ActorOptions) -> Any:
    """A new actor, as soon as the cluster has its resources. Ray does not restart it, and spreads actors over the machines."""
    import ray

    directory = None if "working_dir" in options.runtime_env else os.getcwd()
    return (
        ray.remote(WorkerActor)
        .options(
            **_reserving(options),
            max_concurrency=options.max_concurrent + _CONTROL_CALLS,
            scheduling_strategy="SPREAD",
        )
        .remote(make, directory)
    )


def _reserving(options: ActorOptions) -> dict[str, Any]:
    """Ray's options of an actor that it does not restart."""
    return {
        "num_cpus": options.num_cpus,
        "num_gpus": options.num_gpus,
        "resources": dict(options.resources),
        "runtime_env": dict(options.runtime_env),
        "max_restarts": 0,
    }


def has_gpus() -> bool:
    """Whether the cluster has a GPU."""
    import ray

    return ray.cluster_resources().get("GPU", 0) > 0


def reserve(ranks: Sequence[ActorOptions]) -> Any:
    """Ask Ray for the resources of all ranks together, on as few machines as possible. Returns their placement group."""
    from ray.util import placement_group

    bundles = [
        {name: float(amount) for name, amount in needed.items() if amount}
        for needed in ({"CPU": rank.num_cpus, "GPU": rank.num_gpus, **rank.resources} for rank in ranks)
    ]
    return placement_group(bundles, strategy="PACK")


def reserved(group: Any, seconds: float) -> bool:
    """Wait, at most `seconds`, until the resources of a placement group are reserved."""
    return group.wait(seconds)


def release(group: Any) -> None:
    """Give the resources of a placement group back. Ray ends the actors in it."""
    from ray.exceptions import RayError
    from ray.util import remove_placement_group

    with contextlib.suppress(RayError, ConnectionError, ValueError):
        remove_placement_group(group)


def create_rank(rank: int, options: ActorOptions, group: Any) -> Any:
    """The actor of a training rank, in its part of a placement group. Ray does not restart it."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return (
        ray.remote(_RankActor)
        .options(
            **_reserving(options),
            max_concurrency=_CONTROL_CALLS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        )
        .remote(rank)
    )


class _RankActor(RankActor):
    """A `RankActor` that knows its cluster and its machine."""

    def __init__(self, rank: int) -> None:
        import ray
        from ray.util import get_node_ip_address

        super().__init__(rank, ray.get_runtime_context().gcs_address, get_node_ip_address())


def kill(actor: Any) -> None:
    """End the process of an actor at once."""
    import ray
    from ray.exceptions import RayError

    with contextlib.suppress(RayError, ConnectionError, ValueError):
        ray.kill(actor, no_restart=True)


def put(value: Any) -> Any:
    """Put a value into the object store. Returns its reference, which keeps it there."""
    import ray

    return ray.put(value)


def free_resources() -> str:
    """The resources of the cluster that are not reserved, for messages."""
    import ray

    free = ray.available_resources()
    return ", ".join(f"{name}={amount:g}" for name, amount in sorted(free.items()) if not name.startswith("node:"))


async def answer(reference: Any) -> Any:
    """The result of a call to an actor. If this call is cancelled, the call to the actor is cancelled.

    Raises WorkerLost if the actor is gone, and EngineError or ConfigError if the actor raised an error.
    """
    with _errors_of_actors():
        try:
            return await reference
        except asyncio.CancelledError:
            _cancel(reference)
            raise


def ready(references: Sequence[Any], seconds: float, *, count: int = 1) -> list[Any]:
    """The calls to actors that have ended, after waiting for `count` of them, at most `seconds`."""
    import ray

    if not references:
        return []
    found, _ = ray.wait(list(references), num_returns=min(count, len(references)), timeout=seconds)
    more, _ = ray.wait(list(references), num_returns=len(references), timeout=0) if found else (found, [])
    return more


def result(reference: Any) -> Any:
    """As `answer`, outside of an event loop."""
    import ray

    with _errors_of_actors():
        return ray.get(reference)


@contextlib.contextmanager
def _errors_of_actors() -> Iterator[None]:
    """A context that raises turnwise's errors instead of Ray's: see `answer`."""
    from ray.exceptions import RayError, RayTaskError, TaskCancelledError

    try:
        yield
    except TaskCancelledError as error:
        raise WorkerLost("the call was cancelled") from error
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, TurnwiseError):
            raise cause from None
        raise EngineError(f"an actor on Ray has raised {type(cause or error).__name__}: {cause or error}") from error
    except RayError as error:
        raise WorkerLost(_first_line(error)) from error


def _cancel(reference: Any) -> None:
    import ray
    from ray.exceptions import RayError

    with contextlib.suppress(
        RayError, ConnectionError, ValueError, TypeError
    ):  # TypeError: the call is not known any more
        ray.cancel(reference)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    lines = text.splitlines()
    reason = next((line for line in lines if "died" in line and "actor" in line), lines[0])
    if "creation task" in reason:
        reason = f"its process could not be made ready: {lines[-1]}"  # Ray's text ends with the exception
    elif reason.endswith(":"):  # a heading, and the traceback of Ray's client server
        reason = f"{reason} {lines[-1].strip()}"
    return reason.strip().rstrip(".")[:300]
