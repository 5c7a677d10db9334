"""The few Linux calls that Python does not offer, through ctypes. Imports nothing but the standard library.

Every function raises OSError with the kernel's errno.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable
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

_SIGPROCMASK, _DUP2, _CLONE, _SIGTIMEDWAIT, _PIVOT_ROOT, _PRCTL, _STATX = 14, 33, 56, 128, 155, 157, 332  # x86-64
_PR_GET_TID_ADDRESS = 40
_CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x00200000, 0x01000000
_AT_FDCWD, _STATX_BASIC = -100, 0x7FF
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


Call = tuple[int, int, int, int, int, int]
"""A system call prepared before a fork: its number and five arguments, pointers as numbers."""

raw = _libc_holding_lock.syscall
"""The bare call: six numbers in, the answer or -1 out."""
raw.restype = ctypes.c_long
raw.argtypes = [ctypes.c_long] * 6


def perform(calls: Iterable[Call]) -> None:
    """Prepared system calls one after another, at a quarter of the cost of the functions above.

    For what runs between forks: every object that is touched for the first time after one costs a page.

    Raises:
        OSError: one of them failed; says which.
    """
    for call in calls:
        if raw(*call) < 0:
            raise OSError(f"system call {call[0]} failed")


class Wait:
    """For the end of a child of this process, for a while (less than a second). Blocks SIGCHLD in this thread."""

    def __init__(self, seconds: float) -> None:
        self._signals = ctypes.c_uint64(1 << (signal.SIGCHLD - 1))
        self._time = (ctypes.c_long * 2)()
        self._first = ctypes.c_long(int(seconds * 1e9))
        self.nanoseconds = address(self._time) + 8
        """Where the time stands: a number of four bytes."""
        self.first = address(self._first)
        """Where such a number stands that is a child's first wait."""
        perform([(_SIGPROCMASK, signal.SIG_BLOCK, address(self._signals), 0, 8, 0)])
        self.call: Call = (_SIGTIMEDWAIT, address(self._signals), 0, address(self._time), 8, 0)

    def change(self, seconds: float) -> None:
        """How long the next one may take."""
        self._time[1] = int(seconds * 1e9)


class Folder:
    """Notices that something was made in a folder of a memory file system, even if it is gone again."""

    def __init__(self, path: str) -> None:
        self._path = ctypes.create_string_buffer(os.fsencode(path))
        self._found = ctypes.create_string_buffer(256)
        self._before = ctypes.create_string_buffer(256)
        self.look: Call = (_STATX, _AT_FDCWD, address(self._path), 0, _STATX_BASIC, address(self._found))
        """Ask for its state as it is now."""
        perform([self.look])
        self._before.raw = self._found.raw
        now, before = address(self._found), address(self._before)
        # links, owner, mode, size; times of change, not of access
        self.states = tuple((now + place, before + place, words) for place, words in ((16, 6), (96, 4)))
        """Addresses of the state after `look` and as it was when this object was made, and how many words are there."""

    def changed(self) -> bool:
        """Since this object was made."""
        perform([self.look])
        now, before = self._found.raw, self._before.raw
        return now[16:64] + now[96:128] != before[16:64] + before[96:128]


def address(buffer: Any) -> int:
    """Where a ctypes object lies. The caller keeps it alive."""
    return ctypes.addressof(buffer)


class _CapabilityHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


_header = _CapabilityHeader(_CAPABILITY_VERSION_3, 0)
_no_capabilities = (ctypes.c_uint32 * 6)()


DROP_CAPABILITIES: Call = (126, address(_header), address(_no_capabilities), 0, 0, 0)
"""Give up every capability of this process; with no_new_privs there is no way back."""


def _fork_call() -> Call:
    """Bare fork, without the handlers of Python and of its C library, which touch many pages.

    Only for a process of one thread that holds no lock: what those handlers repair is then whole, but for the C
    library's note of its thread's number, which the kernel is asked to write. `random` is not seeded anew.
    """
    note = ctypes.c_uint64(0)
    flags = int(signal.SIGCHLD)
    if raw(_PRCTL, _PR_GET_TID_ADDRESS, address(note), 0, 0, 0) == 0 and note.value:
        flags |= _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID
    return (_CLONE, flags, 0, 0, note.value, 0)


FORK: Call = _fork_call()


def duplicate(fd: int, number: int) -> Call:
    """Put a descriptor at another number."""
    return (_DUP2, fd, number, 0, 0, 0)


def cpu_seconds(pid: int) -> float:
    """CPU seconds (all threads, user and system) of a child that has not been waited for."""
    return time.clock_gettime((~pid << 3) | 2)  # the kernel's clock id of another process: CPUCLOCK_SCHED
