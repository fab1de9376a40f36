"""How a program is locked in on this machine.

Writes command lines, and runs nothing but the one probe that shows that they work. In the jail there are an interpreter and
the system's libraries, read-only, and a working directory in memory; no network, no /proc, no home, no /etc, no other
programs.

Started by root, the program gets a user id of its own that no other program has: the kernel counts processes by user, does
not count root's at all, and lets nobody touch another's. Started by anybody else, it gets a user namespace, in which (from
Linux 5.14 on) it is counted alone.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.environments.sandbox.bounds import Bounds
from turnwise.environments.sandbox.seccomp import MACHINES, filter_program
from turnwise.errors import ConfigError

__all__ = [
    "BOOT",
    "HOW_TO_GO_ON",
    "WORK",
    "Jail",
    "boot_arguments",
    "find_jail",
    "first_process",
    "interpreter",
    "scratch_file",
]

WORK = "/sandbox"
"""The working directory, and the home and /tmp, of a program in the jail."""

HOW_TO_GO_ON = (
    "install bubblewrap (apt-get install bubblewrap), use turnwise.environments.sandbox.SandboxFusion with a server, or, "
    "if whatever the model writes may do what you may do on this machine, say unsandboxed=True"
)

BOOT = """\
import os, resource, sys
started, files, *rest = sys.argv[1:]
started, files = int(started), int(files)
command = rest[rest.index("--") + 1:]
for word in rest[:rest.index("--")]:
    name, _, value = word.partition("=")
    kind = getattr(resource, name, None)
    if kind is None:
        continue
    soft, _, hard = value.partition(":")
    most = resource.getrlimit(kind)[1]
    hard = int(hard or soft) if most < 0 else min(int(hard or soft), most)
    try:
        resource.setrlimit(kind, (min(int(soft), hard), hard))
    except (ValueError, OSError):
        if sys.platform == "linux":
            raise
os.write(started, b"1")
if files >= 0:
    import tarfile
    os.set_inheritable(files, False)
    tarfile.TarFile.extraction_filter = staticmethod(lambda member, path: member)  # its own files, to itself
    if os.path.getsize("/code/files.tar"):
        with tarfile.open("/code/files.tar") as tar:
            tar.extractall(".")
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        try:
            with os.fdopen(files, "wb") as out, tarfile.open(fileobj=out, mode="w") as tar:
                tar.add(".", filter=lambda one: one if one.isreg() or one.isdir() or one.issym() else None)
            os.write(started, b"2")
        except (OSError, ValueError, MemoryError, RecursionError, tarfile.TarError):
            os.write(started, b"3")
        os._exit(status if status >= 0 else 128 - status)
os.set_inheritable(started, False)
os.execv(command[0], command)
"""
"""Runs first, in the jail: sets the limits, and says on the descriptor `started` that it could. With a descriptor for files
it also unpacks those of the call before and, when the program has ended, packs what is there now, and says whether it could."""

_NAMESPACES = """
    --unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try --die-with-parent --new-session
    --clearenv --hostname sandbox --cap-drop ALL
"""
_RIGHTS = "--clear-groups --inh-caps=-all --ambient-caps=-all --bounding-set=-all --no-new-privs"
_SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")
_UIDS = range(65536, 524288)  # unused by anybody (systemd's and Debian's tables agree)
_uids = itertools.count(os.getpid() * 997)


@dataclass(frozen=True, slots=True)
class Jail:
    """What this machine has to lock a program in with."""

    bwrap: str
    setpriv: str | None
    """Where root started us: what gives the program another user."""

    def command(
        self,
        program: Sequence[str],
        *,
        bounds: Bounds,
        packages: Sequence[Path] = (),
        data: Sequence[tuple[int, str]] = (),
        seccomp: int,
        info: int | None = None,
    ) -> list[str]:
        """The command that runs `program` in the jail.

        `data` are open files and the places in the jail where they are copied to; `seccomp` holds the filter; the jail's first
        process is told on `info`.
        """
        own = [*interpreter_paths(), *([Path(self.setpriv)] if self.setpriv else [])]
        lent = [(str(path), f"/packages/{number}") for number, path in enumerate(packages)]
        uid = 65534 if self.setpriv is None else _UIDS[next(_uids) % len(_UIDS)]
        command = [self.bwrap, *_NAMESPACES.split()]
        if self.setpriv is None:
            command += ["--unshare-user", "--uid", str(uid), "--gid", str(uid)]
        else:  # what it takes to become somebody else, and to give away even that
            command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
        for name, value in {"HOME": WORK, "TMPDIR": WORK, "LANG": "C.UTF-8", "USER": "sandbox"}.items():
            command += ["--setenv", name, value]
        command += ["--setenv", "PYTHONPATH", ":".join([WORK, *(place for _, place in lent)])]
        command += [*_mounts(own), *["--perms", "0755", "--dir", "/packages", "--perms", "0755", "--dir", "/code"]]
        for path, place in lent:
            command += ["--ro-bind", path, place]
        for file, place in data:
            command += ["--perms", "0644", "--ro-bind-data", str(file), place]
        command += f"--dev /dev --perms 1777 --size {1 << 22} --tmpfs /dev/shm --remount-ro /dev".split()
        command += f"--perms 1777 --size {bounds.disk_mb << 20} --tmpfs {WORK}".split()
        if not any(path.is_relative_to("/tmp") for path in own):
            command += ["--symlink", WORK[1:], "/tmp"]
        command += f"--remount-ro / --chdir {WORK} --seccomp {seccomp}".split()
        command += [] if info is None else ["--info-fd", str(info)]
        command.append("--")
        if self.setpriv is not None:
            command += [self.setpriv, f"--reuid={uid}", f"--regid={uid}", *_RIGHTS.split(), "--"]
        return [*command, *program]


def boot_arguments(bounds: Bounds, *, started: int, files: int = -1, alone: bool = True) -> list[str]:
    """The interpreter with `BOOT`, up to the command that it is to go on with. `alone`: nobody else has the program's user."""
    limits = {
        "RLIMIT_CPU": f"{bounds.cpu_seconds}:{bounds.cpu_seconds + 1}",  # asked to end, then killed
        "RLIMIT_AS": str(bounds.memory_mb << 20),
        "RLIMIT_FSIZE": str(bounds.disk_mb << 20),
        "RLIMIT_NOFILE": str(bounds.open_files),
        "RLIMIT_CORE": "0",
        "RLIMIT_MSGQUEUE": "0",
        "RLIMIT_MEMLOCK": "0",
    }
    if alone:
        limits["RLIMIT_NPROC"] = str(bounds.processes)
    words = [f"{name}={value}" for name, value in limits.items()]
    return [interpreter(), "-I", "-S", "-c", BOOT, str(started), str(files), *words, "--"]


def first_process(info: int) -> int | None:
    """The jail's first process, as bubblewrap told on `--info-fd`; None before it is known and after it has ended."""
    told = os.pread(info, 4096, 0).decode("ascii", errors="replace")
    try:
        known = json.loads(told)
        pid = int(known["child-pid"])
        # its number may be somebody else's by now; a namespace's is not
        return pid if os.stat(f"/proc/{pid}/ns/pid").st_ino == known["pid-namespace"] else None
    except (ValueError, KeyError, OSError):
        return None


def scratch_file(content: bytes = b"") -> int:
    """An open file without a name, positioned at its beginning. The caller closes it."""
    file = os.memfd_create("sandbox")
    with os.fdopen(os.dup(file), "wb") as out:
        out.write(content)
    os.lseek(file, 0, os.SEEK_SET)
    return file


@functools.cache
def find_jail() -> Jail:
    """What this machine has, tried out.

    Raises ConfigError, with the reason and what to do, where a program cannot be locked in.
    """
    bwrap = shutil.which("bwrap")
    if sys.platform != "linux":
        raise ConfigError(f"the sandbox needs Linux, and this is {sys.platform}: {HOW_TO_GO_ON}")
    if platform.machine() not in MACHINES:
        known = ", ".join(MACHINES)
        raise ConfigError(f"the sandbox knows the machines {known}, and this is {platform.machine()}: {HOW_TO_GO_ON}")
    if bwrap is None:
        raise ConfigError(f"the sandbox needs bubblewrap, and there is no `bwrap` on the PATH: {HOW_TO_GO_ON}")
    setpriv = shutil.which("setpriv")
    if os.getuid() == 0 and setpriv is None:
        raise ConfigError(
            f"the sandbox, started by root, needs `setpriv` (package util-linux), and there is none on the PATH: "
            f"install it, or be another user; or {HOW_TO_GO_ON}"
        )
    jail = Jail(bwrap, setpriv if os.getuid() == 0 else None)
    problem = _probe(jail)
    if problem is not None:
        raise ConfigError(f"the sandbox cannot run on this machine: {problem}. To go on: {HOW_TO_GO_ON}")
    return jail


def _probe(jail: Jail) -> str | None:
    """What goes wrong when a program that prints `fine` is run, or None."""
    seccomp, started = scratch_file(filter_program()), scratch_file()
    bounds = Bounds()
    program = [*boot_arguments(bounds, started=started), interpreter(), "-I", "-c", "print('fine')"]
    try:
        done = subprocess.run(
            jail.command(program, bounds=bounds, seccomp=seccomp),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={},
            pass_fds=(seccomp, started),
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        os.close(seccomp)
        os.close(started)
    said = done.stdout.decode("utf-8", errors="replace").strip()
    if done.returncode == 0 and said == "fine":
        return None
    return " ".join(said.split())[-300:] or f"bubblewrap ended with status {done.returncode}"


def interpreter() -> str:
    """The interpreter itself, not a virtual environment's link to it."""
    return os.path.realpath(sys.executable)


@functools.cache
def interpreter_paths() -> tuple[Path, ...]:
    """The interpreter and its standard library; of one that shares its prefix with the system, nothing else of that."""
    program = Path(interpreter())
    if sys.base_prefix not in ("/usr", "/usr/local"):
        return program, Path(sys.base_prefix, "lib")
    library = Path(str(sysconfig.get_config_var("LIBDIR")), str(sysconfig.get_config_var("INSTSONAME")))
    return program, Path(sysconfig.get_path("stdlib")), *([library] if library.is_file() else [])


def _mounts(paths: Sequence[Path]) -> list[str]:
    """Read-only binds; what is above them is made first, because bubblewrap would make it readable by nobody else."""
    system = [Path(path) for path in _SYSTEM if Path(path).exists()]
    wanted = [*system, *(path for path in paths if not any(path.is_relative_to(one) for one in system))]
    above = {parent for path in wanted for parent in path.parents if str(parent) != "/"}
    command = [word for path in sorted(above) for word in ("--perms", "0755", "--dir", str(path))]
    for path in wanted:
        command += ["--ro-bind", str(path), str(path)]
    return command
