"""The system calls a program may make: an allow-list, compiled to a BPF decision tree.

Everything that is not named here answers EPERM. Calls that only an attack makes end the program (status
``security``). One process, threads only: nothing can be forked, so nothing can be left running. x86-64.

The kernel runs the filter for every call number when it takes it in, and at every call: hence the tree, of depth 7.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

from magicrl_verifiers.code import kernel

AUDIT_ARCH_X86_64 = 0xC000003E
_X32_BIT = 0x40000000

# fmt: off
_FREE = {
    # files that are open, memory, time, threads, its own signals and identity
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
    "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "pipe": 22, "select": 23,
    "sched_yield": 24, "mremap": 25, "msync": 26, "mincore": 27, "madvise": 28, "dup": 32, "dup2": 33, "pause": 34,
    "nanosleep": 35, "getitimer": 36, "alarm": 37, "setitimer": 38, "getpid": 39, "sendfile": 40, "recvfrom": 45,
    "recvmsg": 47, "shutdown": 48, "getsockname": 51, "getpeername": 52, "getsockopt": 55, "exit": 60, "wait4": 61,
    "uname": 63, "fsync": 74, "fdatasync": 75, "ftruncate": 77, "getdents": 78, "getcwd": 79, "chdir": 80,
    "readlink": 89, "umask": 95, "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "sysinfo": 99, "times": 100,
    "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "getpgrp": 111, "getgroups": 115,
    "getresuid": 118, "getresgid": 120, "getpgid": 121, "getsid": 124, "rt_sigpending": 127, "rt_sigtimedwait": 128,
    "rt_sigsuspend": 130, "sigaltstack": 131, "sched_getparam": 143, "sched_getscheduler": 145, "arch_prctl": 158,
    "gettid": 186, "time": 201, "futex": 202, "sched_getaffinity": 204, "epoll_create": 213,
    "getdents64": 217, "set_tid_address": 218, "restart_syscall": 219, "fadvise64": 221, "clock_gettime": 228,
    "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231, "epoll_wait": 232, "epoll_ctl": 233,
    "waitid": 247, "newfstatat": 262, "readlinkat": 267, "faccessat": 269, "pselect6": 270, "ppoll": 271,
    "set_robust_list": 273, "get_robust_list": 274, "epoll_pwait": 281, "eventfd2": 290, "epoll_create1": 291,
    "dup3": 292, "pipe2": 293, "preadv": 295, "pwritev": 296, "getcpu": 309, "getrandom": 318, "membarrier": 324,
    "statx": 332, "rseq": 334, "close_range": 436, "faccessat2": 439,
    # landlock decides which paths these reach
    "open": 2, "openat": 257, "rename": 82, "mkdir": 83, "rmdir": 84, "unlink": 87, "mkdirat": 258, "unlinkat": 263,
    "renameat": 264, "renameat2": 316,
}
_EXEC = {"execve": 59, "execveat": 322}
_FATAL = {
    "ptrace": 101, "syslog": 103, "personality": 135, "pivot_root": 155, "adjtimex": 159, "chroot": 161, "acct": 163,
    "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "iopl": 172,
    "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179, "clock_settime": 227, "kexec_load": 246,
    "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298, "name_to_handle_at": 303,
    "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311,
    "kcmp": 312, "finit_module": 313, "bpf": 321, "userfaultfd": 323, "pidfd_send_signal": 424, "io_uring_setup": 425,
    "io_uring_enter": 426, "io_uring_register": 427, "pidfd_open": 434, "pidfd_getfd": 438, "process_madvise": 440,
}
# fmt: on
_IOCTL, _SENDTO, _SOCKETPAIR, _CLONE, _KILL, _FCNTL = 16, 44, 53, 56, 62, 72
_PRCTL, _SETRLIMIT, _SET_AFFINITY, _TGKILL, _PRLIMIT, _CLONE3 = 157, 160, 203, 234, 302, 435

_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)  # not F_SETOWN: it aims SIGIO at any process; no larger pipes
_PRCTLS = (3, 15, 16, 23, 0x53564D41)  # dumpable?, set and get name, capability?, name a mapping
_KEPT_LIMITS = (0, 1, 9)  # RLIMIT_CPU, RLIMIT_FSIZE, RLIMIT_AS
_CLONE_THREAD = 0x00010F00  # and with the same memory, folder, signals and descriptors, whose number is limited
_CLONE_NAMESPACES = 0x7E020080
_AF_UNIX, _SOCK_STREAM, _SOCK_KIND = 1, 1, 0xF
_SIGKILL = 9
_MODE_FILTER = 2

_LOAD = 0x20
_AND = 0x54
_JEQ, _JGE, _JSET = 0x15, 0x35, 0x45
_RET = 0x06
_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_EPERM, _ENOSYS, _ENOTTY = 0x00050001, 0x00050026, 0x00050019

_PID = 0x50494421
"""Stands for the program's own pid until the filter is installed."""

_Op = tuple[int, int, int, int]


def _ret(action: int) -> _Op:
    return (_RET, 0, 0, action)


# struct seccomp_data: the number at 0, the architecture at 4, six 64-bit arguments from 16, the low half first
def _argument(index: int, *, high: bool = False) -> _Op:
    return (_LOAD, 0, 0, 16 + 8 * index + (4 if high else 0))


def _one_of(index: int, values: Sequence[int], otherwise: int, *, found: int = _ALLOW) -> list[_Op]:
    """What to answer when the low half of an argument is one of ``values``. (The kernel reads these as 32 bits.)"""
    count = len(values)
    # a jump skips so many operations: over the tests that are left and the refusal
    tests = [(_JEQ, count - place, 0, value) for place, value in enumerate(values)]
    return [_argument(index), *tests, _ret(otherwise), _ret(found)]


def _signal(sender_index: int, signal_index: int) -> list[_Op]:
    """Only to itself; SIGKILL to itself ends it here, because the first process of a namespace would survive it."""
    return [
        _argument(sender_index),
        (_JEQ, 1, 0, _PID),
        _ret(_EPERM),
        _argument(signal_index),
        (_JEQ, 0, 1, _SIGKILL),
        _ret(_KILL_PROCESS),
        _ret(_ALLOW),
    ]


def _limits(index: int) -> list[_Op]:
    """A limit of its own, but for CPU time (whoever lowers that is killed as if from outside), size and memory."""
    return _one_of(index, _KEPT_LIMITS, _ALLOW, found=_EPERM)


def _rules(allow_exec: bool) -> dict[int, list[_Op]]:
    rules: dict[int, list[_Op]] = {number: [_ret(_ALLOW)] for number in _FREE.values()}
    rules.update({number: [_ret(_KILL_PROCESS)] for number in _FATAL.values()})
    if allow_exec:
        rules.update({number: [_ret(_ALLOW)] for number in _EXEC.values()})
    # ENOTTY is what a file answers that is no terminal: `isatty` expects it
    rules[_IOCTL] = _one_of(1, _IOCTLS, _ENOTTY)
    rules[_FCNTL] = _one_of(1, _FCNTLS, _EPERM)
    rules[_PRCTL] = _one_of(0, _PRCTLS, _EPERM)
    rules[_SETRLIMIT] = _limits(0)
    # process 0 is the caller; nobody else's limits
    rules[_PRLIMIT] = [_argument(0), (_JEQ, 1, 0, 0), _ret(_EPERM), *_limits(1)]
    rules[_SET_AFFINITY] = _one_of(0, (0,), _EPERM)
    rules[_CLONE3] = [_ret(_ENOSYS)]  # its flags lie in memory, where a filter cannot look; libc then uses clone
    rules[_CLONE] = [
        _argument(0),
        (_JSET, 3, 0, _CLONE_NAMESPACES),
        (_AND, 0, 0, _CLONE_THREAD),
        (_JEQ, 0, 1, _CLONE_THREAD),
        _ret(_ALLOW),
        _ret(_EPERM),
    ]
    # what asyncio needs: a connected pair of stream sockets, sent to without an address
    rules[_SOCKETPAIR] = [
        _argument(0),
        (_JEQ, 0, 3, _AF_UNIX),
        _argument(1),
        (_AND, 0, 0, _SOCK_KIND),
        (_JEQ, 1, 0, _SOCK_STREAM),
        _ret(_EPERM),
        _ret(_ALLOW),
    ]
    rules[_SENDTO] = [
        _argument(4),
        (_JEQ, 0, 3, 0),
        _argument(4, high=True),
        (_JEQ, 0, 1, 0),
        _ret(_ALLOW),
        _ret(_EPERM),
    ]
    rules[_KILL] = _signal(0, 1)
    rules[_TGKILL] = _signal(0, 2)
    return rules


def _segments(rules: dict[int, list[_Op]], otherwise: list[_Op]) -> list[tuple[int, list[_Op]]]:
    """Runs of call numbers with one answer, as (first number, code), covering every number from 0."""
    found: list[tuple[int, list[_Op]]] = []
    for number in range(max(rules) + 2):
        code = rules.get(number, otherwise)
        if not found or found[-1][1] != code:
            found.append((number, code))
    # calls of the x32 interface have numbers of their own, which the list says nothing about
    found.append((_X32_BIT, [_ret(_KILL_PROCESS)]))
    return found


def _tree(segments: Sequence[tuple[int, list[_Op]]]) -> list[_Op]:
    if len(segments) == 1:
        return segments[0][1]
    middle = len(segments) // 2
    below, above = _tree(segments[:middle]), _tree(segments[middle:])
    # a jump of BPF has one byte
    assert len(below) < 256, len(below)
    return [(_JGE, len(below), 0, segments[middle][0]), *below, *above]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]


class Filter:
    """A filter made before the forks, for each child to install. Needs no_new_privs (or CAP_SYS_ADMIN).

    Args:
        allow_exec: also allow execve, for a compiled checker.
    """

    def __init__(self, *, allow_exec: bool = False) -> None:
        # under another architecture (32-bit calls) the same numbers mean other calls
        head: list[_Op] = [(_LOAD, 0, 0, 4), (_JEQ, 1, 0, AUDIT_ARCH_X86_64), _ret(_KILL_PROCESS), (_LOAD, 0, 0, 0)]
        self.ops = (*head, *_tree(_segments(_rules(allow_exec), [_ret(_EPERM)])))
        self._code = bytearray(b"".join(struct.pack("<HBBI", *op) for op in self.ops))
        # an operation takes 8 bytes, its constant the last four
        self._own = [8 * place + 4 for place, op in enumerate(self.ops) if op[3] == _PID]
        self._buffer = (ctypes.c_char * len(self._code)).from_buffer(self._code)
        self._program = _Program(len(self.ops), ctypes.addressof(self._buffer))

    def install(self) -> None:
        """Bind this thread and all it starts, for ever; the only process that it may signal is itself."""
        for place in self._own:
            struct.pack_into("<I", self._code, place, os.getpid())
        kernel.prctl(kernel.PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(self._program))
