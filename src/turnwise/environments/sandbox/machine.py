"""Runs commands one after the other on the same files, isolated: what a conversation takes for its own computer.

`JailMachine` is a jail of this machine (`jail.py`) for each command. Between two commands its files are an archive in memory; no
process outlives its command. `run_in_jail` is one such command.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import os
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from turnwise.environments.sandbox.jail import (
    WORK,
    Jail,
    Layout,
    boot_arguments,
    filter_program,
    first_process,
    interpreter,
    scratch_file,
)
from turnwise.environments.sandbox.process import Bounds, Ran, SandboxError, run
from turnwise.user_code.calls import waiting_for_others

_FILES = "/code/files.tar"
_INPUT = "/code/input"
IN_DIRECTORY = 'mkdir -p "$1" && cd "$1" && shift && exec "$@"'
"""Runs the words after a directory in it, which is made if it is missing."""
_UNPACK = (
    "import sys, tarfile; tarfile.TarFile.extraction_filter = staticmethod(lambda member, path: member); "
    "tarfile.open(fileobj=sys.stdin.buffer, mode='r|').extractall('/')"
)


class Machine(Protocol):
    """Runs commands on the same files."""

    async def run(
        self,
        words: Sequence[str],
        *,
        cwd: str | None = None,
        seconds: float | None = None,
        output_bytes: int | None = None,
        given: bytes = b"",
        environment: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Ran:
        """Run a command, after all earlier ones, with `given` as its standard input. None: as the machine says; the user "" is
        that of the image.

        Raises SandboxError if it could not be run.
        """
        ...

    async def put(self, archive: bytes) -> None:
        """Unpack a tar archive at /. Raises SandboxError."""
        ...

    async def end_processes(self) -> None:
        """End what earlier commands have left running. Raises SandboxError."""
        ...

    async def close(self) -> None:
        """End what runs, and delete the files. Called once."""
        ...


class JailMachine:
    """A jail for each command, on files in memory. All methods are called in one event loop.

    `files` is the descriptor of the archive of the files at the beginning, which is only read, and is the machine's to close;
    None: there are none. `slots` bounds the commands that run at the same time.
    """

    def __init__(
        self,
        jail: Jail,
        layout: Layout,
        bounds: Bounds,
        *,
        cwd: str,
        slots: asyncio.Semaphore,
        files: int | None = None,
    ) -> None:
        self._jail, self._layout, self._bounds = jail, layout, bounds
        self._cwd, self._slots = cwd, slots
        self._files = scratch_file() if files is None else files
        self._turn = asyncio.Lock()
        self._closed = False

    async def run(
        self,
        words: Sequence[str],
        *,
        cwd: str | None = None,
        seconds: float | None = None,
        output_bytes: int | None = None,
        given: bytes = b"",
        environment: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Ran:
        assert user in (None, "", "root", "0"), "a jail has one user"
        bounds = self._bounds
        if seconds is not None:
            bounds = replace(bounds, seconds=seconds, cpu_seconds=max(1, int(seconds)))
        if output_bytes is not None:
            bounds = replace(bounds, output_bytes=output_bytes)
        layout = replace(self._layout, environment={**self._layout.environment, **(environment or {})})
        inside = f"{IN_DIRECTORY} < {_INPUT}" if given else IN_DIRECTORY
        program = ["/bin/sh", "-c", inside, "sh", cwd or self._cwd, *words]
        async with self._turn:
            if self._closed:
                raise SandboxError("the conversation has ended: its sandbox is closed")
            with waiting_for_others():
                await self._slots.acquire()
            try:
                return await run_in_jail(
                    self._jail,
                    program,
                    bounds=bounds,
                    data={_INPUT: given} if given else {},
                    files=self._files,
                    layout=layout,
                )
            finally:
                self._slots.release()

    async def put(self, archive: bytes) -> None:
        ran = await self.run([interpreter(), "-I", "-S", "-c", _UNPACK], cwd="/", given=archive)
        if ran.status or ran.stopped or ran.notes:
            raise SandboxError(f"files could not be copied into the sandbox: {ran.text_for_model()[-300:]}")

    async def end_processes(self) -> None:
        """No process outlives its command."""

    def archive(self) -> int:
        """The descriptor of the archive of the files as they are now. The caller closes it."""
        return reopened(self._files)

    async def close(self) -> None:
        self._closed = True
        async with self._turn:
            os.close(self._files)


async def run_in_jail(
    jail: Jail,
    program: Sequence[str],
    *,
    bounds: Bounds,
    data: Mapping[str, bytes],
    files: int | None = None,
    packages: Sequence[Path] = (),
    layout: Layout | None = None,
) -> Ran:
    """Run a program in a jail.

    `data`: the content of files by their paths in the jail. `files` is the descriptor of an archive of the writable directories.
    After the run, it is that of another archive, with the new state of these directories.

    Raises SandboxError if the program could not be started.
    """
    with contextlib.ExitStack() as opened:

        def scratch(content: bytes = b"") -> int:
            file = scratch_file(content)
            opened.callback(os.close, file)
            return file

        lent = [(scratch(content), place) for place, content in data.items()]
        seccomp, info, started = scratch(filter_program()), scratch(), scratch()
        fds, after = [*(file for file, _ in lent), seccomp, info, started], -1
        if files is not None:
            os.lseek(files, 0, os.SEEK_SET)
            after = scratch()
            lent, fds = [*lent, (files, _FILES)], [*fds, files, after]
        writable = (WORK,) if layout is None else tuple(layout.writable)
        kept = () if layout is None else writable
        command = jail.command(
            [*boot_arguments(bounds, started=started, files=after, kept=kept), *program],
            bounds=bounds,
            packages=packages,
            data=lent,
            seccomp=seccomp,
            info=info,
            layout=layout,
        )
        ran = await run(
            command,
            bounds=bounds,
            env={},
            pass_fds=fds,
            first=functools.partial(first_process, info),
            counted=lambda: (*writable, "/dev/shm") if os.pread(started, 1, 0) else (),
        )
        report = os.pread(started, 2, 0)
        if not report and ran.stopped is None:
            raise SandboxError(
                f"the sandbox could not be set up, so the program did not run: {ran.output.strip()[-500:]}"
            )
        if files is None:
            return ran
        return _kept(ran, files, after, report)


def _kept(ran: Ran, files: int, after: int, report: bytes) -> Ran:
    """Let `files` be the archive `after` if `BOOT` reported in `report` that packing succeeded ("12"). Nothing is copied."""
    if report != b"12":
        note = "the file changes of this call were not kept"
        if report == b"13":
            note += ": the files are too large, nested too deeply, or cannot be read"
        return Ran(output=ran.output, status=ran.status, stopped=ran.stopped, seconds=ran.seconds, notes=(note,))
    os.dup2(after, files, inheritable=False)
    return ran


def reopened(file: int) -> int:
    """Another descriptor of a file, to read it with a position of its own. The caller closes it."""
    return os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)


def tar_of(content: Mapping[str, Path], *, mode: int | None = None) -> bytes:
    """A tar archive of files and folders of this machine by their absolute paths in the sandbox.

    Owners are not kept; `mode` are the permissions of all files, None for their own. Raises OSError, and ValueError for a
    link that may lead out of its folder.
    """

    def packed(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()):
            return None
        if entry.issym() and (entry.linkname.startswith("/") or ".." in Path(entry.linkname).parts):
            raise ValueError(f"{entry.name!r} is a link to {entry.linkname!r}; links must lead to places inside")
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        if mode is not None and entry.isreg():
            entry.mode = mode
        return entry

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", dereference=False) as tar:
        for place, source in content.items():
            tar.add(source, arcname=place.strip("/") or ".", filter=packed)
    return out.getvalue()
