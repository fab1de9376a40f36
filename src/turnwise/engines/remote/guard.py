"""Runs a command as the child of this program, and stops it when the program that started this one has gone.

Run as a script: `python guard.py COMMAND...`. It needs nothing of turnwise. Standard input is a pipe from the parent. When the
pipe is closed, because the parent closed it or died, even by SIGKILL, the process group of this program is stopped.

Python programs leave the removal of their shared memory to a process of their own, the resource tracker, which removes it after
all others have ended. It is in the same group. A tracker that is killed with the others leaves the memory to the machine: vLLM
has 420 MB in /dev/shm. Therefore a group is ended with `end_group`, which lets the trackers finish.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time

GRACE = 10.0
"""Seconds between SIGTERM and SIGKILL."""
WORKER_GRACE = 3.0
"""Seconds that the other processes have after the end of the command, within GRACE."""
KILL_GRACE = 60.0
"""Seconds in which killed processes must have ended."""
TRACKER_GRACE = 20.0
"""Seconds that resource trackers have to remove shared memory, after all other processes of the group have ended."""

_TRACKER = b"multiprocessing.resource_tracker"
_POLL = 0.02


def main() -> int:
    """Run the command until it ends or the pipe is closed. All processes of its group end with it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the group is stopped by this program, which must live until the end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(
        sys.argv[1:],
        stdin=subprocess.DEVNULL,
        preexec_fn=_default_signals,
    )
    stopping = threading.Event()
    stopper = threading.Thread(target=_stop_with_parent, args=(child, stopping), daemon=True)
    stopper.start()
    status = child.wait()
    ending = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    print(f"[turnwise] the server process has ended with {ending}", file=sys.stderr, flush=True)
    if stopping.is_set():
        stopper.join()
    end_group(os.getpgrp())  # workers that the command has left behind, and this program
    return status


def kill_group(group: int) -> bool:
    """Kill all processes of a group but its resource trackers and this process. Returns whether there were any."""
    trackers, others = _members(group)
    for process in others:
        _kill(process, signal.SIGKILL)
    for process in trackers:
        _kill(process, signal.SIGCONT)  # in a group that was stopped
    return bool(others)


def end_group(group: int) -> None:
    """Kill all processes of a group and wait for their end. The resource trackers among them end by themselves, unless they need
    too long. If this process is in the group, it is killed last.

    A killed process keeps its files open while the kernel frees its memory, which takes seconds on a busy machine. Trackers wait
    for that.
    """
    deadline = time.monotonic() + KILL_GRACE
    while kill_group(group) and time.monotonic() < deadline:
        time.sleep(_POLL)
    deadline = time.monotonic() + TRACKER_GRACE
    while _members(group)[0] and time.monotonic() < deadline:
        time.sleep(_POLL)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all have ended
        os.killpg(group, signal.SIGKILL)


def _members(group: int) -> tuple[list[int], list[int]]:
    """The resource trackers of a group, and its other processes without this one. Both are empty where there is no /proc."""
    trackers: list[int] = []
    others: list[int] = []
    try:
        names = os.listdir("/proc")
    except OSError:
        return [], []
    for name in names:
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, _, own = file.read().rpartition(b")")[2].split()[:3]
            if int(own) != group or state in (b"Z", b"X"):
                continue
            with open(f"/proc/{name}/cmdline", "rb") as file:
                (trackers if _TRACKER in file.read() else others).append(int(name))
        except (OSError, ValueError):  # it has ended
            continue
    return trackers, others


def sockets_of(group: int) -> set[str]:
    """The inodes of all sockets that processes of a group have open. Needs /proc."""
    found: set[str] = set()
    for process in itertools.chain(*_members(group)):
        with contextlib.suppress(OSError):  # it has ended
            for name in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    kind, _, inode = os.readlink(f"/proc/{process}/fd/{name}").partition(":[")
                    if kind == "socket":
                        found.add(inode.rstrip("]"))
    return found


def _kill(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


def _default_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # ignored signals would be inherited


def _stop_with_parent(child: subprocess.Popen[bytes], stopping: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    stopping.set()
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(_POLL)
    deadline = min(deadline, time.monotonic() + WORKER_GRACE)
    while _members(os.getpgrp())[1] and time.monotonic() < deadline:
        time.sleep(_POLL)
    end_group(os.getpgrp())


if __name__ == "__main__":
    sys.exit(main())
