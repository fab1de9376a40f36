"""A Ray cluster of several nodes on this machine, for the tests of rollout workers."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # addresses on the loopback device
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    # a busy machine answers late; the end of a node's process is noticed by its connection
    "RAY_health_check_timeout_ms": "30000",
    "RAY_health_check_failure_threshold": "20",
    "PYTHONPATH": os.pathsep.join(str(Path(__file__).parent.parent.parent / name) for name in ("src", "tests")),
}
_STORE = 100 << 20


@contextlib.contextmanager
def cluster(*nodes: dict[str, float], cpus: int = 0, gpus: int = 0, client_port: int | None = None) -> Iterator[Any]:
    """A cluster with a head of `cpus` CPUs and `gpus` GPUs, which do not exist, and a node with the custom resources of each of
    `nodes`. With `client_port`, the head takes connections from machines outside of the cluster (`ray://`)."""
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from ray.cluster_utils import Cluster

            head = {"num_cpus": cpus, "num_gpus": gpus, "object_store_memory": _STORE, "include_dashboard": False}
            started = Cluster(
                initialize_head=True,
                head_node_args=head if client_port is None else {**head, "ray_client_server_port": client_port},
            )
        try:
            for resources in nodes:
                add_node(started, resources)
            yield started
        finally:
            import ray

            ray.shutdown()  # a failed test may have left its connection
            started.shutdown()
    finally:
        os.environ.clear()
        os.environ.update(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def add_node(started: Any, resources: dict[str, float]) -> Any:
    return started.add_node(num_cpus=2, object_store_memory=_STORE, resources=resources)
