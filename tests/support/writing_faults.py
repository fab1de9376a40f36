"""`low_bytes`, in a process where writing the checkpoint of a step goes wrong: `TURNWISE_TEST_WRITING=kill:3` and so on.

The module of an environment is imported by the process that has rank 0, and may do to it what users' code may.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

from support.places import low_bytes
from turnwise.training import checkpoint, fingerprint
from turnwise.training.sharded import shards

__all__ = ["low_bytes"]

_KIND, _, _STEP = os.environ.get("TURNWISE_TEST_WRITING", "").partition(":")

_failed: list[Path] = []


def _faulty(path: Path) -> str:
    """`sync_file`, which is called after each file of a checkpoint."""
    if f"writing-{int(_STEP):06d}" in path.parts:
        if _KIND == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if _KIND == "kill-other":
            os.kill(_other_rank(), signal.SIGKILL)
            time.sleep(5)  # the rank is lost before this one has written
        if _KIND == "slow":
            time.sleep(1)
        if _KIND == "fail-once" and not _failed:
            _failed.append(path)
            raise OSError(28, "No space left on device")
        if _KIND == "full" and "shards" in path.parts:
            raise OSError(28, "No space left on device")
    return fingerprint.sync_file(path)


def _other_rank() -> int:
    """The process of rank 1: the other one that the parent of this rank has started."""
    found = [
        int(child)
        for children in Path(f"/proc/{os.getppid()}/task").glob("*/children")
        for child in children.read_text().split()
    ]
    (other,) = (child for child in found if child != os.getpid())
    return other


if _KIND == "limit":  # of the bytes of a file
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(_STEP), int(_STEP)))
elif _KIND:
    checkpoint.sync_file = _faulty
    shards.sync_file = _faulty
