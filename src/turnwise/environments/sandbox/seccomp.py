"""The kernel filter (seccomp) that refuses system calls of a program in the sandbox.

The filter allows the calls that Python programs need. It refuses calls that

- give more rights or another view of the system (namespaces, mounts, memory of other processes),
- allocate memory that no limit counts (memfd, System V),
- use resources with one quota for the entire machine (asynchronous I/O),
- reach kernel parts with many past security problems (bpf, io_uring, userfaultfd, keyrings),
- open sockets other than local and internet sockets (a network namespace does not isolate a vsock).

Layout of a filter: linux/filter.h and linux/seccomp.h.
"""

from __future__ import annotations

import errno
import platform
import struct

__all__ = ["MACHINES", "filter_program"]

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
