"""The jail: how a program is isolated on this machine.

This module builds command lines. It runs only one program, a probe that checks that the jail works. The jail contains an
interpreter and the system's libraries (read-only) and a working directory in memory. It has no network, no /proc, no home
directory, no /etc and no other programs.

If root starts the jail, each program gets a separate user id: the kernel counts processes per user, does not limit root's
processes, and prevents access to the processes of another user. If another user starts the jail, the program gets a user
namespace, in which its processes are counted separately (since Linux 5.14).

The kernel filter (seccomp) allows the calls that Python programs need. It refuses calls that

- give more rights or another view of the system (namespaces, mounts, memory of other processes),
- allocate memory that no limit counts (memfd, System V),
- use resources with one quota for the entire machine (asynchronous I/O),
- reach kernel parts with many past security problems (bpf, io_uring, userfaultfd, keyrings),
- open sockets other than local and internet sockets (a network namespace does not isolate a vsock).

Layout of a filter: linux/filter.h and linux/seccomp.h.
"""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import platform
import shutil
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.environments.sandbox.process import Bounds
from turnwise.errors import ConfigError

# the filter of system calls

_LOAD, _EQUALS, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _MACHINE, _ARGUMENTS = 0, 4, 16  # byte offsets in struct seccomp_data; an argument has 8 bytes, low half first

MACHINES = {"x86_64": 0, "aarch64": 1}
"""Supported machines, and their column in the tables of system call numbers."""

_AUDIT = (0xC000003E, 0xC00000B7)
_CLONE, _CLONE3, _SOCKET, _SOCKETPAIR, _IOCTL = (56, 220), (435, 435), (41, 198), (53, 199), (16, 29)
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
_FAMILIES = (1, 2, 10)  # unix, inet, inet6
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX

_REFUSED: dict[str, tuple[int, int]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_setup": (206, 0),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "vhangup": (153, 58),
}


def filter_program(machine: str | None = None) -> bytes:
    """The filter for `bwrap --seccomp`, 8 bytes per instruction.

    Raises KeyError for a machine that is not in `MACHINES`.
    """
    column = MACHINES[machine or platform.machine()]
    eperm = _ERRNO | errno.EPERM
    # Each test here skips the next instruction or does not, so no jump distances need to be counted.
    program = [
        _step(_LOAD, _MACHINE),
        _step(_EQUALS, _AUDIT[column], yes=1),
        _step(_RETURN, _KILL),  # 32-bit calls have different numbers
        _step(_LOAD, _NUMBER),
    ]
    if column == MACHINES["x86_64"]:  # x32 calls also have different numbers
        program += [_step(_AT_LEAST, 0x40000000, no=1), _step(_RETURN, _KILL)]
    for numbers in _REFUSED.values():
        program += [_step(_EQUALS, numbers[column], no=1), _step(_RETURN, eperm)]
    # A filter cannot read the flags of clone3 behind the pointer. After ENOSYS, the C library uses clone.
    program += [_step(_EQUALS, _CLONE3[column], no=1), _step(_RETURN, _ERRNO | errno.ENOSYS)]
    program += _about(
        _CLONE[column], 0, [_step(_ANY_BIT, _NEW_NAMESPACES, no=1), _step(_RETURN, eperm), _step(_RETURN, _ALLOW)]
    )
    for number in (_SOCKET[column], _SOCKETPAIR[column]):
        allowed = [step for family in _FAMILIES for step in (_step(_EQUALS, family, no=1), _step(_RETURN, _ALLOW))]
        program += _about(number, 0, [*allowed, _step(_RETURN, _ERRNO | errno.EAFNOSUPPORT)])
    refused = [step for request in _TERMINAL_INPUT for step in (_step(_EQUALS, request, no=1), _step(_RETURN, eperm))]
    program += _about(_IOCTL[column], 1, [*refused, _step(_RETURN, _ALLOW)])
    return b"".join([*program, _step(_RETURN, _ALLOW)])


def _about(number: int, argument: int, judge: list[bytes]) -> list[bytes]:
    """If the call has this number: load one argument and run `judge`, which must always end in a return."""
    return [_step(_EQUALS, number, no=1 + len(judge)), _step(_LOAD, _ARGUMENTS + 8 * argument), *judge]


def _step(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("<HBBI", code, yes, no, value)


# namespaces and mounts

WORK = "/sandbox"
"""The working directory of a program in the jail; also its home directory and /tmp."""

HOW_TO_GO_ON = (
    "install bubblewrap (apt-get install bubblewrap), or use turnwise.environments.sandbox.SandboxFusion with a server, or "
    "set unsandboxed=True: the model's programs then run with all your permissions on this machine"
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
    places = [word.partition("=")[2] for word in rest[:rest.index("--")] if word.startswith("KEPT=")] or ["."]
    root = "/" if places != ["."] else "."
    if os.path.getsize("/code/files.tar"):
        with tarfile.open("/code/files.tar") as tar:
            tar.extractall(root)
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        try:
            with os.fdopen(files, "wb") as out, tarfile.open(fileobj=out, mode="w") as tar:
                for place in places:
                    device = os.stat(place).st_dev
                    def kept(one):
                        ours = os.lstat(os.path.join(root, one.name)).st_dev == device  # not what is mounted inside
                        return one if ours and (one.isreg() or one.isdir() or one.issym() or one.islnk()) else None
                    tar.add(place, filter=kept)
            os.write(started, b"2")
        except (OSError, ValueError, MemoryError, RecursionError, tarfile.TarError):
            os.write(started, b"3")
        os._exit(status if status >= 0 else 128 - status)
os.set_inheritable(started, False)
os.execv(command[0], command)
"""
"""The first program in the jail. It sets the limits, and then writes "1" to the descriptor `started`. If `files` is a
descriptor (not -1), it also unpacks the files of the previous call. After the end of the program it packs the current files
into `files`: those of the directories `KEPT=...`, or of the working directory if there are none. It then writes "2" (success) or
"3" (failure) to `started`."""

_NAMESPACES = """
    --unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try --die-with-parent --new-session
    --clearenv --hostname sandbox --cap-drop ALL
"""
_RIGHTS = "--clear-groups --inh-caps=-all --ambient-caps=-all --bounding-set=-all --no-new-privs"
_SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")
_UIDS = range(65536, 524288)  # not allocated in the tables of systemd and Debian
_uids = itertools.count(os.getpid() * 997)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a jail shows instead of one working directory: more programs of this machine, and several writable directories."""

    writable: Sequence[str]
    """Directories directly below /, such as `/app`; each is empty at the beginning, and in memory."""
    environment: Mapping[str, str]
    read_only: Sequence[str] = ("/usr", "/bin", "/sbin", "/etc/alternatives")
    """Paths of this machine that the jail can read; those that do not exist are left out."""


@dataclass(frozen=True, slots=True)
class Jail:
    """The programs of this machine that create the jail."""

    bwrap: str
    setpriv: str | None
    """Path of the program that changes the user id; None if this process does not run as root."""

    def command(
        self,
        program: Sequence[str],
        *,
        bounds: Bounds,
        packages: Sequence[Path] = (),
        data: Sequence[tuple[int, str]] = (),
        seccomp: int,
        info: int | None = None,
        layout: Layout | None = None,
    ) -> list[str]:
        """The command that runs `program` in the jail.

        `data`: pairs of a file descriptor and the path in the jail that receives a copy. `packages`: directories to import
        from. `seccomp`: the descriptor with the filter. `info`: the descriptor to which bubblewrap writes the process id of
        the first process in the jail. `layout`: other directories than `WORK`.
        """
        own = [*interpreter_paths(), *([Path(self.setpriv)] if self.setpriv else [])]
        lent = [(str(path), f"/packages/{number}") for number, path in enumerate(packages)]
        uid = 65534 if self.setpriv is None else _UIDS[next(_uids) % len(_UIDS)]
        command = [self.bwrap, *_NAMESPACES.split()]
        if self.setpriv is None:
            command += ["--unshare-user", "--uid", str(uid), "--gid", str(uid)]
        else:  # needed to change the user and group id, and then to drop all capabilities
            command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
        path = ":".join([WORK, *(place for _, place in lent)])
        variables = {"HOME": WORK, "TMPDIR": WORK, "LANG": "C.UTF-8", "USER": "sandbox", "PYTHONPATH": path}
        for name, value in (variables if layout is None else layout.environment).items():
            command += ["--setenv", name, value]
        tmpfs = f"--perms 1777 --size {bounds.disk_mb << 20} --tmpfs".split()
        if layout is not None:
            own += [Path(path) for path in layout.read_only if Path(path).exists()]
            command += [word for place in layout.writable for word in (*tmpfs, place)]  # before what may lie inside
        command += [*_mounts(own), *["--perms", "0755", "--dir", "/packages", "--perms", "0755", "--dir", "/code"]]
        for path, place in lent:
            command += ["--ro-bind", path, place]
        for file, place in data:
            command += ["--perms", "0644", "--ro-bind-data", str(file), place]
        command += f"--dev /dev --perms 1777 --size {1 << 22} --tmpfs /dev/shm --remount-ro /dev".split()
        if layout is None:
            command += [*tmpfs, WORK]
            if not any(path.is_relative_to("/tmp") for path in own):
                command += ["--symlink", WORK[1:], "/tmp"]
        command += f"--remount-ro / --chdir {WORK if layout is None else '/'} --seccomp {seccomp}".split()
        command += [] if info is None else ["--info-fd", str(info)]
        command.append("--")
        if self.setpriv is not None:
            command += [self.setpriv, f"--reuid={uid}", f"--regid={uid}", *_RIGHTS.split(), "--"]
        return [*command, *program]


def boot_arguments(
    bounds: Bounds, *, started: int, files: int = -1, alone: bool = True, kept: Sequence[str] = ()
) -> list[str]:
    """The command line of the interpreter with `BOOT`; append the program. `alone`: the user id is used by this program only.
    `kept`: the directories that are packed, if not the working directory."""
    limits = {
        "RLIMIT_CPU": f"{bounds.cpu_seconds}:{bounds.cpu_seconds + 1}",  # SIGXCPU, then SIGKILL
        "RLIMIT_AS": str(bounds.memory_mb << 20),
        "RLIMIT_FSIZE": str(bounds.disk_mb << 20),
        "RLIMIT_NOFILE": str(bounds.open_files),
        "RLIMIT_CORE": "0",
        "RLIMIT_MSGQUEUE": "0",
        "RLIMIT_MEMLOCK": "0",
    }
    if alone:
        limits["RLIMIT_NPROC"] = str(bounds.processes)
    words = [*(f"{name}={value}" for name, value in limits.items()), *(f"KEPT={place}" for place in kept)]
    return [interpreter(), "-I", "-S", "-c", BOOT, str(started), str(files), *words, "--"]


def first_process(info: int) -> int | None:
    """The process id of the jail's first process, from bubblewrap's `--info-fd`; None if unknown or ended."""
    text = os.pread(info, 4096, 0).decode("ascii", errors="replace")
    try:
        known = json.loads(text)
        pid = int(known["child-pid"])
        # the process id may have been reused; the id of the namespace identifies the jail
        return pid if os.stat(f"/proc/{pid}/ns/pid").st_ino == known["pid-namespace"] else None
    except (ValueError, KeyError, OSError):
        return None


def scratch_file(content: bytes = b"") -> int:
    """The descriptor of an anonymous file in memory, positioned at the beginning. The caller closes the descriptor."""
    file = os.memfd_create("sandbox")
    with os.fdopen(os.dup(file), "wb") as out:
        out.write(content)
    os.lseek(file, 0, os.SEEK_SET)
    return file


@functools.cache
def find_jail() -> Jail:
    """The jail of this machine, after a successful probe. The result is cached.

    Raises ConfigError, with the reason and the fix, if no jail can be created.
    """
    bwrap = shutil.which("bwrap")
    if sys.platform != "linux":
        raise ConfigError(f"the sandbox needs Linux, and this system is {sys.platform}. To go on: {HOW_TO_GO_ON}")
    if platform.machine() not in MACHINES:
        known = ", ".join(MACHINES)
        raise ConfigError(
            f"the sandbox supports {known}, and this machine is {platform.machine()}. To go on: {HOW_TO_GO_ON}"
        )
    if bwrap is None:
        raise ConfigError(
            f"the sandbox needs bubblewrap, and there is no `bwrap` on the PATH. To go on: {HOW_TO_GO_ON}"
        )
    setpriv = shutil.which("setpriv")
    if os.getuid() == 0 and setpriv is None:
        raise ConfigError(
            f"a sandbox that root starts needs `setpriv` (package util-linux), and there is none on the PATH. Install it, or run "
            f"as another user; or {HOW_TO_GO_ON}"
        )
    jail = Jail(bwrap, setpriv if os.getuid() == 0 else None)
    problem = _probe(jail)
    if problem is not None:
        raise ConfigError(f"the sandbox cannot run on this machine: {problem}. To go on: {HOW_TO_GO_ON}")
    return jail


def _probe(jail: Jail) -> str | None:
    """Run a program that prints `fine` in the jail. Returns the problem, or None after success."""
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
    output = done.stdout.decode("utf-8", errors="replace").strip()
    if done.returncode == 0 and output == "fine":
        return None
    return " ".join(output.split())[-300:] or f"bubblewrap ended with status {done.returncode}"


def interpreter() -> str:
    """The path of the interpreter, with the links of a virtual environment resolved."""
    return os.path.realpath(sys.executable)


@functools.cache
def interpreter_paths() -> tuple[Path, ...]:
    """The paths of the interpreter and its libraries. If its prefix is a system prefix, only its own files there."""
    program = Path(interpreter())
    if sys.base_prefix not in ("/usr", "/usr/local"):
        return program, Path(sys.base_prefix, "lib")
    library = Path(str(sysconfig.get_config_var("LIBDIR")), str(sysconfig.get_config_var("INSTSONAME")))
    return program, Path(sysconfig.get_path("stdlib")), *([library] if library.is_file() else [])


def _mounts(paths: Sequence[Path]) -> list[str]:
    """Read-only binds. Parents are created first with mode 0755: bubblewrap would create them unreadable for other users."""
    system = [Path(path) for path in _SYSTEM if Path(path).exists()]
    wanted = [*system, *(path for path in paths if not any(path.is_relative_to(parent) for parent in system))]
    above = {parent for path in wanted for parent in path.parents if str(parent) != "/"}
    command = [word for path in sorted(above) for word in ("--perms", "0755", "--dir", str(path))]
    for path in wanted:
        command += ["--ro-bind", str(path), str(path)]
    return command
