"""The calls to Ray. No other module imports Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from turnwise.errors import ConfigError, EngineError, TurnwiseError
from turnwise.ray_workers.actor import MakeWorker, WorkerActor

__all__ = [
    "ActorOptions",
    "WorkerLost",
    "answer",
    "connect",
    "create_actor",
    "disconnect",
    "free_resources",
    "kill",
    "put",
]

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
        try:
            ray.init(address=address, include_dashboard=dashboard, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            raise ConfigError(
                f"cluster.address={address}: there is no Ray cluster to connect to: {_first_line(error)}. Start it with `ray "
                f"start --head`, or correct the address"
            ) from error
    return True


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
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            resources=dict(options.resources),
            runtime_env=dict(options.runtime_env),
            max_concurrency=options.max_concurrent + _CONTROL_CALLS,
            max_restarts=0,
            scheduling_strategy="SPREAD",
        )
        .remote(make, directory)
    )


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
    from ray.exceptions import RayError, RayTaskError, TaskCancelledError

    try:
        return await reference
    except asyncio.CancelledError:
        _cancel(reference)
        raise
    except TaskCancelledError as error:
        raise WorkerLost("the call was cancelled") from error
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, TurnwiseError):
            raise cause from None
        raise EngineError(f"a rollout worker has raised {type(cause or error).__name__}: {cause or error}") from error
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
    return reason.strip().rstrip(".")[:300]
