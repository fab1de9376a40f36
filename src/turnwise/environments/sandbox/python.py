"""Runs Python programs written by a model in isolation.

`Sandbox` runs each program separately and keeps no files. `PythonSession` is a tool for one conversation and keeps the files
between calls. `code_interpreter` is the tool without options.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from turnwise.environments.sandbox.jail import boot_arguments, find_jail, interpreter, scratch_file
from turnwise.environments.sandbox.machine import run_in_jail
from turnwise.environments.sandbox.process import Bounds, Ran, SandboxError, run
from turnwise.environments.tools.tool import requires
from turnwise.errors import ConfigError

_CODE = "/code/main.py"
_LONGEST = 1_000_000  # maximum characters of a program
_making = threading.Lock()


class Sandbox:
    """Runs each Python program in a separate process, without network, within resource limits (docs/sandbox.md).

    `packages`: directories that programs may import from, in addition to the standard library. `max_concurrent`: maximum number
    of programs at the same time; other programs wait, and the waiting time does not count. `unsandboxed=True` runs programs
    without a jail, with the rights and files of the current user.

    Raises ConfigError if an option is invalid, or if this machine cannot create a jail and `unsandboxed` is False.
    """

    def __init__(
        self,
        *,
        bounds: Bounds | Mapping[str, float] | None = None,
        max_concurrent: int = 8,
        packages: Sequence[str | Path] = (),
        unsandboxed: bool = False,
    ) -> None:
        self.bounds = Bounds.of(bounds)
        if max_concurrent < 1:
            raise ConfigError(f"the sandbox's max_concurrent is {max_concurrent}; it must be at least 1")
        if not isinstance(unsandboxed, bool):
            raise ConfigError(f"the sandbox's unsandboxed is {unsandboxed!r}; it must be true or false")
        self._packages = tuple(Path(package).resolve() for package in packages)
        for package in self._packages:
            if not package.is_dir() or ":" in str(package):
                raise ConfigError(f"the sandbox's packages: {package} must be a directory, without a colon in its path")
        self._concurrent = max_concurrent
        self._jail = None if unsandboxed else find_jail()
        for package in self._packages:
            if self._jail is not None and self._jail.setpriv is not None and package.stat().st_mode & 0o005 != 0o005:
                raise ConfigError(
                    f"the sandbox's packages: programs run as the user nobody, which cannot read {package}. "
                    f"Run: chmod -R o+rX {package}"
                )
        # A semaphore belongs to one event loop; a sandbox may be used in several event loops.
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def locked(self) -> bool:
        """Whether programs run in a jail."""
        return self._jail is not None

    async def code_interpreter(self, code: str) -> str:
        """Run a Python program and get what it printed. Print what you want to see. Nothing is kept between two calls.

        Args:
            code: The program.
        """
        return (await self.run(code)).text_for_model()

    async def run(self, code: str, *, files: int | None = None, directory: Path | None = None) -> Ran:
        """Run a program.

        With a jail, `files` is the descriptor of an archive of the working directory. After the run, the archive is replaced
        by the new state of the working directory. Without a jail, `directory` is the working directory. The session owns both.

        Raises SandboxError if the program could not be started, ValueError if `code` is longer than 1,000,000 characters.
        """
        if len(code) > _LONGEST:
            raise ValueError(f"the program has {len(code)} characters; at most {_LONGEST} are allowed")
        source = code.encode("utf-8", errors="replace")
        async with self._slot():
            if self._jail is None:
                return await self._run_free(source, directory)
            return await self._run_jailed(source, files)

    def _slot(self) -> asyncio.Semaphore:
        return self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._concurrent))

    async def _run_jailed(self, source: bytes, files: int | None) -> Ran:
        assert self._jail is not None
        return await run_in_jail(
            self._jail,
            _program(_CODE),
            bounds=self.bounds,
            data={_CODE: source},
            files=files,
            packages=self._packages,
        )

    async def _run_free(self, source: bytes, directory: Path | None) -> Ran:
        with contextlib.ExitStack() as opened:
            place = Path(
                opened.enter_context(tempfile.TemporaryDirectory(prefix="turnwise-", ignore_cleanup_errors=True))
            )
            work = directory if directory is not None else place / "work"
            work.mkdir(exist_ok=True)
            (place / "main.py").write_bytes(source)
            started = opened.enter_context(tempfile.TemporaryFile())
            path = ":".join(map(str, [work, *self._packages]))
            command = boot_arguments(self.bounds, started=started.fileno(), alone=False)
            ran = await run(
                [*command, *_program(str(place / "main.py"))],
                bounds=self.bounds,
                env={"HOME": str(work), "TMPDIR": str(work), "LANG": "C.UTF-8", "PYTHONPATH": path},
                cwd=str(work),
                pass_fds=[started.fileno()],
            )
            started.seek(0)
            if not started.read() and ran.stopped is None:
                raise SandboxError(f"the program could not be started: {ran.output.strip()[-500:]}")
            return ran


class PythonSession:
    """A Python interpreter for one conversation. Variables last for one call; files last until the end of the conversation.

    With a jail, nothing is written to the disk of this machine: between two calls the files are an archive in memory, limited
    by `disk_mb`. Sessions with the same options share one sandbox, and therefore its `max_concurrent`.

    Raises ConfigError in the same cases as `Sandbox`.
    """

    def __init__(
        self,
        *,
        bounds: Bounds | Mapping[str, float] | None = None,
        max_concurrent: int = 8,
        packages: Sequence[str | Path] = (),
        unsandboxed: bool = False,
    ) -> None:
        self._sandbox = shared(Bounds.of(bounds), max_concurrent, tuple(map(str, packages)), unsandboxed)
        self._files: int | None = None
        self._directory: Path | None = None
        self._turn = asyncio.Lock()
        self._closed = False

    async def code_interpreter(self, code: str) -> str:
        """Run a Python program and get what it printed. Print what you want to see. Files are kept for later calls.

        Args:
            code: The program.
        """
        async with self._turn:  # concurrent programs would overwrite each other's files
            if self._closed:
                raise ValueError("the conversation has ended: the interpreter is closed")
            if self._sandbox.locked and self._files is None:
                self._files = scratch_file()
            if not self._sandbox.locked and self._directory is None:
                self._directory = Path(tempfile.mkdtemp(prefix="turnwise-session-"))
            return (await self._sandbox.run(code, files=self._files, directory=self._directory)).text_for_model()

    async def close(self) -> None:
        """Delete the files. Later calls raise ValueError."""
        async with self._turn:
            self._closed = True
            if self._files is not None:
                os.close(self._files)
                self._files = None
            if self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)
                self._directory = None


@requires(lambda: shared(Bounds(), 8, (), False))
async def code_interpreter(code: str) -> str:
    """Run a Python program and get what it printed. Print what you want to see. Nothing is kept between two calls.

    Args:
        code: The program.
    """
    return await shared(Bounds(), 8, (), False).code_interpreter(code)


def shared(bounds: Bounds, max_concurrent: int, packages: tuple[str, ...], unsandboxed: bool) -> Sandbox:
    """The sandbox with these options. All callers with the same options share it."""
    with _making:  # sessions are created in several threads; without the lock, each could create a sandbox
        return _shared(bounds, max_concurrent, packages, unsandboxed)


@functools.lru_cache(maxsize=64)
def _shared(bounds: Bounds, max_concurrent: int, packages: tuple[str, ...], unsandboxed: bool) -> Sandbox:
    return Sandbox(bounds=bounds, max_concurrent=max_concurrent, packages=packages, unsandboxed=unsandboxed)


def _program(path: str) -> list[str]:
    # No user site directory, no bytecode files, no buffering: the output before a kill is kept.
    return [interpreter(), "-P", "-s", "-B", "-u", "-X", "utf8", path]
