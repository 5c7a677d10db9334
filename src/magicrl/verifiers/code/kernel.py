"""The few Linux calls that Python does not offer, through ctypes. Imports nothing but the standard library.

Every function raises OSError with the kernel's errno.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

_PIVOT_ROOT = 155  # x86-64
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)
_libc_holding_lock = ctypes.PyDLL(None)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
_libc.syscall.restype = ctypes.c_long


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, first: int, second: Any = None) -> None:
    _check(_libc.prctl(option, first, second, 0, 0), f"prctl({option})")


def syscall(number: int, *arguments: Any) -> int:
    """A system call that glibc does not wrap; arguments are ints, bytes or ctypes references."""
    return _check(_libc.syscall(ctypes.c_long(number), *arguments), f"syscall {number}")


def unshare(flags: int) -> None:
    _check(_libc.unshare(ctypes.c_int(flags)), f"unshare({flags:#x})")


def setns(fd: int, kind: int) -> None:
    _check(_libc.setns(fd, kind), "setns")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = None if kind is None else kind.encode()
    data = None if options is None else options.encode()
    result = _libc.mount(os.fsencode(source), os.fsencode(target), encoded, flags, data)
    _check(result, f"mount {source} on {target}")


def umount(target: str, flags: int) -> None:
    _check(_libc.umount2(os.fsencode(target), flags), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    syscall(_PIVOT_ROOT, os.fsencode(new), os.fsencode(old))


class _CapabilityHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


_header = _CapabilityHeader(_CAPABILITY_VERSION_3, 0)
_no_capabilities = (ctypes.c_uint32 * 6)()


def drop_capabilities() -> None:
    """Give up every capability of this process; with no_new_privs there is no way back."""
    _check(_libc.capset(ctypes.byref(_header), ctypes.byref(_no_capabilities)), "capset")


def fork() -> int:
    """The C library's fork, without Python's handlers for it, which touch four times as many pages as the rest.

    Only for a process of one thread that holds no lock: what those handlers repair is then whole. `random` is not
    seeded anew.

    Raises:
        OSError: no process could be made.
    """
    pid = _libc_holding_lock.fork()
    if pid < 0:
        raise OSError("fork failed")
    return pid


def cpu_seconds(pid: int) -> float:
    """CPU seconds (all threads, user and system) of a child that has not been waited for."""
    return time.clock_gettime((~pid << 3) | 2)  # the kernel's clock id of another process: CPUCLOCK_SCHED
