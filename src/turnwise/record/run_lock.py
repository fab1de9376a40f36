"""One process at a time writes a directory. The lock is the kernel's: it is gone with the process, however that ends."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import weakref
from pathlib import Path

from turnwise.errors import RunError

__all__ = ["RunLock"]

_log = logging.getLogger(__name__)


class RunLock:
    """A lock on a directory that exists, held from `__init__` until `release`, or until the process ends.

    Raises RunError if another process holds it. A POSIX record lock: child processes do not inherit it, so a child that
    outlives the run does not hold it.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / ".lock"
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._close = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                _log.warning(
                    "%s cannot be locked (%s), so a second run in the same directory would not be detected",
                    directory,
                    error.strerror,
                )
                return
            holder = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip() or "unknown"
            self._close()
            raise RunError(
                f"another process ({holder}) is writing {directory}: wait until it has ended, or choose another directory"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Let others write the directory. A second call does nothing."""
        self._close()
