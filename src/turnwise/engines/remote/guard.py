"""Runs a command as the child of this program, and stops it when the program that started this one has gone.

Run as a script: `python guard.py COMMAND...`. It needs nothing of turnwise. Standard input is a pipe from the parent. When the
pipe is closed, because the parent closed it or died, even by SIGKILL, the process group of this program is stopped.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

GRACE = 10.0  # seconds between SIGTERM and SIGKILL


def main() -> int:
    """Run the command until it ends or the pipe is closed. All processes of its group end with it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the group is stopped by this program, which must live until the end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(
        sys.argv[1:],
        stdin=subprocess.DEVNULL,
        preexec_fn=_default_signals,
    )
    threading.Thread(target=_stop_with_parent, args=(child,), daemon=True).start()
    status = child.wait()
    ending = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    print(f"[turnwise] the server process has ended with {ending}", file=sys.stderr, flush=True)
    _stop_group()  # workers that the command has left behind, and this program
    return status


def _default_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # ignored signals would be inherited


def _stop_with_parent(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    _stop_group()


def _stop_group() -> None:
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
