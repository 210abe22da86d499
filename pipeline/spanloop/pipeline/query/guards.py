"""What a process gives up for good before it runs a stranger's SQL: limits, files, network, other processes.

Place in the flow: only ``sandbox`` calls it, after its imports and before DuckDB makes threads. Standard library only.

Invariants: nothing here can be taken back by the process itself. Each guard says whether it is in force; the limits hold on
every POSIX system, Landlock and seccomp on Linux (x86-64, arm64) where the kernel has them. DuckDB's own restrictions come on
top and hold everywhere.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys
from collections.abc import Iterable

__all__ = ["confine_files", "confine_syscalls", "limit", "no_more_threads", "with_parent"]

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_SIGKILL = 9
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ_FILE = 1 << 2
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All rights on files that a Landlock version knows."""
_NET_RIGHTS = 0b11
_SCOPES = 0b11


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def with_parent(parent: int) -> None:
    """Die when the parent does (Linux), leave no core, let no other process look in."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        libc = _libc()
        libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
        libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def limit(*, memory_bytes: int, cpu_s: int, files: int) -> list[str]:
    """Bound address space (beyond what is mapped now), processor time and open files; no file can be written.

    Returns the limits in force.
    """
    wanted = {
        "address space": (resource.RLIMIT_AS, _mapped_bytes() + memory_bytes),
        "processor time": (resource.RLIMIT_CPU, cpu_s),
        "open files": (resource.RLIMIT_NOFILE, files),
        "no written files": (resource.RLIMIT_FSIZE, 0),
    }
    held = []
    for name, (what, value) in wanted.items():
        _, hard = resource.getrlimit(what)
        bounded = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(what, (bounded, bounded))
            held.append(name)
        except (OSError, ValueError):  # macOS refuses some of them
            continue
    return held


def no_more_threads() -> list[str]:
    """No further process or thread of this user can be started from here (does not bind root)."""
    try:
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    except (OSError, ValueError):
        return []
    return ["no new processes"]


def _mapped_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 2**30


# ---------------------------------------------------------------- files and network: Landlock


def confine_files(folders: Iterable[str]) -> list[str]:
    """Only files below these folders can be opened, and only for reading; no TCP (kernel 6.7). Returns what is in force.

    Source: https://docs.kernel.org/userspace-api/landlock.html.
    """
    if sys.platform != "linux":
        return []
    libc = _libc()
    version = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return []
    rights = max(value for known, value in _FILE_RIGHTS.items() if known <= version)
    attributes = struct.pack("<Q", rights)
    if version >= 4:
        attributes += struct.pack("<Q", _NET_RIGHTS)
    if version >= 6:
        attributes += struct.pack("<Q", _SCOPES)
    ruleset = libc.syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0)
    if ruleset < 0:
        return []
    try:
        for folder in folders:
            handle = os.open(folder, os.O_PATH | os.O_CLOEXEC)
            try:
                rule = struct.pack("<Qi", _READ_FILE, handle)
                if libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0):
                    return []
            finally:
                os.close(handle)
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0):
            return []
    finally:
        os.close(ruleset)
    return ["landlock: no other files" + (", no TCP" if version >= 4 else "")]


# ---------------------------------------------------------------- system calls: seccomp

_ARCHITECTURES = {"x86_64": (0xC000003E, 317, 0), "aarch64": (0xC00000B7, 277, 1)}
"""Machine -> (audit architecture, number of seccomp(2), column in the tables below)."""
_DENIED = {
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "accept": (43, 202), "bind": (49, 200), "listen": (50, 201),
    "accept4": (288, 242), "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "ptrace": (101, 117), "kill": (62, 129), "tkill": (200, 130), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "creat": (85, None),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "unlink": (87, None), "unlinkat": (263, 35),
    "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "link": (86, None), "linkat": (265, 37),
    "symlink": (88, None), "symlinkat": (266, 36), "mknod": (133, None), "mknodat": (259, 33), "chmod": (90, None),
    "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None), "fchown": (93, 55), "fchownat": (260, 54),
    "truncate": (76, 45), "mount": (165, 40), "umount2": (166, 39), "chroot": (161, 51), "pivot_root": (155, 41),
    "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104), "reboot": (169, 142),
    "setuid": (105, 146), "setgid": (106, 144), "setreuid": (113, 145), "setresuid": (117, 147), "setresgid": (119, 149),
    "capset": (126, 91), "personality": (135, 92), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
}  # fmt: skip
_UNKNOWN = {"clone3": (435, 435), "openat2": (437, 437)}
"""Their arguments lie in memory, where a filter cannot look: they answer ENOSYS, and libc takes the older call."""
_OPENAT, _OPEN, _CLONE, _TGKILL = (257, 56), (2, None), (56, 220), (234, 131)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CLONE_THREAD = 0x10000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38


def _filter(architecture: int, column: int) -> list[tuple[int, int, int, int]]:
    """The program: (code, jump if true, jump if false, operand); jumps are relative."""
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    if column == 0:  # x32 numbers on x86-64
        program += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    for table, answer in ((_DENIED, _EPERM), (_UNKNOWN, _ENOSYS)):
        for numbers in table.values():
            if numbers[column] is not None:
                program += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _ERRNO | answer)]

    def argument(numbers: tuple[int | None, ...], index: int, test: tuple[int, int, int, int]) -> None:
        """Where the call is the one and the test on its argument (low half) jumps past the refusal, allow."""
        number = numbers[column]
        if number is not None:
            program.extend([
                (_EQUAL, 0, 4, number), (_LOAD, 0, 0, 16 + 8 * index), test, (_RETURN, 0, 0, _ERRNO | _EPERM),
                (_RETURN, 0, 0, _ALLOW),
            ])  # fmt: skip

    argument(_OPENAT, 2, (_ANY_BIT, 0, 1, _WRITES))
    argument(_OPEN, 1, (_ANY_BIT, 0, 1, _WRITES))
    argument(_CLONE, 0, (_ANY_BIT, 1, 0, _CLONE_THREAD))
    argument(_TGKILL, 0, (_EQUAL, 1, 0, os.getpid()))
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def confine_syscalls() -> list[str]:
    """No socket, no process, no signal to others, no file opened for writing, no change of any name. Call it before threads
    are made; they inherit it. Returns what is in force."""
    known = _ARCHITECTURES.get(os.uname().machine)
    if sys.platform != "linux" or known is None:
        return []
    architecture, seccomp, column = known
    program = b"".join(struct.pack("<HBBI", *line) for line in _filter(architecture, column))
    text = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(text))
    libc = _libc()
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(seccomp, 1, 1, header):
        return []
    return ["seccomp: no network, processes or writes"]
