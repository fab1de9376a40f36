"""A real docker or podman for tests, where one runs containers: images are made here, because there may be no registry."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_BUSYBOX = Path("/bin/busybox")
_UNIFIED = Path("/sys/fs/cgroup/unified")
_PODMAN = """#!/bin/sh
export CONTAINERS_CONF={conf}
exec {enter} {podman} "$@"
"""


@contextlib.contextmanager
def real_tool(name: str, folder: Path) -> Iterator[Path]:
    """A directory with docker or podman and nothing else, for PATH. Skips the test, with the reason, if it runs no container. One
    test of this machine at a time has it: tests look for containers that are left, and each run removes those of ended ones."""
    if not _BUSYBOX.exists() or b"/lib64/ld-linux" in _BUSYBOX.read_bytes():
        pytest.skip("there is no statically linked busybox (Debian: busybox-static)")
    if (path := shutil.which(name)) is None:
        pytest.skip(f"{name} is not installed")
    (place := folder / "bin").mkdir(parents=True)
    tool = place / name
    with contextlib.ExitStack() as holding:
        lock = holding.enter_context(Path(tempfile.gettempdir(), "turnwise-real-containers.lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        tool.symlink_to(path)
        if (why := _refused(tool, folder)) and name == "podman" and os.getuid() == 0:
            tool.unlink()
            tool.write_text(holding.enter_context(_allowed(path, folder)), encoding="utf-8")
            tool.chmod(0o755)
            why = _refused(tool, folder)
        if why:
            pytest.skip(f"{name} runs no container here: {why[-300:]}")
        yield place


def busybox_folder(folder: Path, *more: str) -> Path:
    """Put the files of an image with a small system in a folder. `more` are lines of its Dockerfile."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / "system.tar", "w") as tar:
        tar.add(_BUSYBOX, "bin/busybox")
        tar.add("/tmp", "tmp", recursive=False)
    lines = ["FROM scratch", "ADD system.tar /", 'RUN ["/bin/busybox", "--install", "-s", "/bin"]', *more]
    (folder / "Dockerfile").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def has_containers(tool: Path) -> bool:
    """Whether containers of turnwise are there, running or not."""
    command = [str(tool), "ps", "--all", "--quiet", "--filter=label=turnwise.process"]
    return bool(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


def _refused(tool: Path, folder: Path) -> str:
    """Why the tool does not build the image `turnwise-test` and run its containers; empty if it does."""
    image = busybox_folder(folder / "image")
    limits = ["--memory=64m", "--pids-limit=32", "--cpus=1"]
    for command in (["build", "--tag=turnwise-test", str(image)], ["run", "--rm", *limits, "turnwise-test", "true"]):
        done = subprocess.run([str(tool), *command], capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            return done.stderr.strip() or f"exit status {done.returncode}"
    return ""


@contextlib.contextmanager
def _allowed(podman: str, folder: Path) -> Iterator[str]:
    """A script that calls podman as a root user may who cannot raise limits, and without the second hierarchy of cgroups, which
    crun refuses beside the first one: in a mount namespace of its own, so that the machine's stays as it is."""
    limits = '"nofile=1024:1024", "nproc=1024:1024"'
    conf = folder / "containers.conf"
    conf.write_text(f"[containers]\ndefault_ulimits = [{limits}]\n", encoding="utf-8")
    hide = f"umount {_UNIFIED}; " if _UNIFIED.is_mount() else ""
    command = ["unshare", "--mount", "sh", "-c", f"{hide}echo; exec sleep infinity"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            holder.stdout.readline()
            yield _PODMAN.format(conf=conf, enter=f"nsenter --mount=/proc/{holder.pid}/ns/mnt --", podman=podman)
        finally:
            holder.kill()
