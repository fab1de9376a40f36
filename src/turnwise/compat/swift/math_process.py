"""Runs math-verify in a worker process, so that a run in any thread can use it and no call blocks the event loop.

math-verify limits its time by SIGALRM, which Python allows in the main thread only, and its parser can run for a long time
inside one C call, which no signal ends. The worker (`math_worker`) has its own main thread, and is killed and started again if it
does not answer.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

__all__ = ["MathProcess"]

_PROGRAM = Path(__file__).with_name("math_worker.py")
_LIMIT = 60.0
"""Seconds for one answer. math-verify's own limits are 5 seconds for each of its parts; the start of the process counts too."""


class MathProcess:
    """One worker process, which is started at the first call. Several threads may call it; it answers one after the other."""

    def __init__(self, program: Path = _PROGRAM, limit: float = _LIMIT) -> None:
        self.limit = limit
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def agree(self, completion: str, solution: str) -> float:
        """1.0 if math-verify finds that the answer of a completion equals the solution, else 0.0. Blocks its thread.

        Raises RuntimeError if math-verify raises, if the worker ends, or if it has not answered in time.
        """
        with self._lock:
            reply = self._ask(json.dumps([completion, solution]))
        if "error" in reply:
            raise RuntimeError(f"math-verify raised {reply['error']}")
        return reply["agree"]

    def close(self) -> None:
        """End the worker. The next call starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, line: str) -> dict[str, Any]:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(self.limit, process.kill)
        timer.start()
        try:
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:  # it ended before it read the line
            reply = b""
        finally:
            late = not timer.is_alive()
            timer.cancel()
        if reply:
            return json.loads(reply)
        if not late:  # the exit status of a process that has just ended
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
        self.close()
        if late:
            raise RuntimeError(f"math-verify took longer than {self.limit:g} s: the answer is too hard to compare")
        raise RuntimeError(f"the process of math-verify ended with exit status {process.returncode}")

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            atexit.unregister(self.close)
            atexit.register(self.close)
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(self._program)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                start_new_session=True,  # Ctrl-C stops the run, which then ends the worker
            )
        return self._process
