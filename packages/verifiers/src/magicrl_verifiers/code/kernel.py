"""Linux calls that Python lacks, through ctypes: a bare fork, Landlock, namespaces, a private file tree, seccomp.

Standard library only; x86-64. Functions raise OSError with the kernel's errno.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
import time
from collections.abc import Iterable, Sequence
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_RELATIME = 4096, 16384, 1 << 18, 1 << 21
_MNT_DETACH = 2

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

_CAPSET, _PIVOT_ROOT = 126, 155  # x86-64
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)
_libc_holding_lock = ctypes.PyDLL(None, use_errno=True)
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


def _syscall(number: int, *arguments: Any) -> int:
    """Make a system call that glibc does not wrap; arguments are ints, bytes or ctypes references."""
    return _check(_libc.syscall(ctypes.c_long(number), *arguments), f"syscall {number}")


def unshare(flags: int) -> None:
    _check(_libc.unshare(ctypes.c_int(flags)), f"unshare({flags:#x})")


def setns(fd: int, kind: int) -> None:
    _check(_libc.setns(fd, kind), "setns")


def fork() -> int:
    """Call the C library's fork, without Python's handlers for it: they touch many pages, and seed `random` again.

    Only for a process of one thread that holds no lock: what those handlers repair is then whole.
    """
    # the interpreter's lock stays held: a child in which nobody holds it could not go on
    return _check(_libc_holding_lock.fork(), "fork")


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds (all threads, user and system) of a child that has not been waited for."""
    return time.clock_gettime((~pid << 3) | 2)  # the kernel's clock id of another process: CPUCLOCK_SCHED


def drop_capabilities() -> None:
    """Give up every capability of this process; with no_new_privs there is no way back."""
    _syscall(_CAPSET, struct.pack("<Ii", _CAPABILITY_VERSION_3, 0), bytes(24))


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    names = (os.fsencode(source), os.fsencode(target), kind and kind.encode())
    _check(_libc.mount(*names, flags, options and options.encode()), f"mount {source} on {target}")


def _umount(target: str) -> None:
    _check(_libc.umount2(os.fsencode(target), _MNT_DETACH), f"umount {target}")


_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_LANDLOCK_VERSION = 1
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_ALL_FILES_ABI1 = (1 << 13) - 1
_REFER, _TRUNCATE, _IOCTL = 1 << 13, 1 << 14, 1 << 15
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_NETWORK = 3
_SCOPES = 3

READ_RIGHTS = _READ_FILE | _READ_DIR
SCRATCH_RIGHTS = READ_RIGHTS | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _TRUNCATE
DEVICE_RIGHTS = _READ_FILE | _WRITE_FILE
_FILE_RIGHTS = _READ_FILE | _WRITE_FILE | _TRUNCATE


def landlock_abi() -> int:
    """Landlock's version in this kernel, 0 if it has none."""
    try:
        return _syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_LANDLOCK_VERSION))
    except OSError:
        return 0


def landlock_rules(paths: Iterable[tuple[str, int]]) -> int:
    """Return a descriptor of the rules: nothing but ``paths``, each with its rights and all beneath it.

    Paths that do not exist are left out. Executing is not restricted here (the system-call filter does that).

    Raises:
        OSError: the kernel has no Landlock.
    """
    version = landlock_abi()
    handled = _ALL_FILES_ABI1 & ~_EXECUTE
    if version >= 2:
        handled |= _REFER
    if version >= 3:
        handled |= _TRUNCATE
    if version >= 5:
        handled |= _IOCTL
    attributes = struct.pack("<QQQ", handled, _NETWORK, _SCOPES)
    # each version of the kernel knows so many of the three fields, and refuses more
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    fd = _syscall(_CREATE, attributes, ctypes.c_size_t(size), ctypes.c_uint32(0))
    for path, rights in paths:
        _allow(fd, path, rights & handled)
    return fd


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(beneath).st_mode):
            # the kernel refuses rights of folders in a file's rule
            rights &= _FILE_RIGHTS
        rule = struct.pack("<Qi", rights, beneath)
        _syscall(_ADD_RULE, ctypes.c_int(rules), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
    finally:
        os.close(beneath)


def landlock_restrict(rules: int) -> None:
    """Bind this process and all it starts to the rules, for ever. Needs no_new_privs."""
    _syscall(_RESTRICT, ctypes.c_int(rules), ctypes.c_uint32(0))


SCRATCH_FOLDER = "/tmp"
_SCRATCH_OPTIONS = "size=64m,nr_inodes=2000,mode=0700"
_LOCKED = _MS_NOSUID | _MS_NODEV
DEVICES = ("null", "zero", "full", "random", "urandom")
_INNER_ID = 1000
_STAGE = "/tmp"


def enter_namespaces() -> None:
    """New namespaces for this process; its next child is the first of its own process numbers.

    Raises:
        OSError: the system does not allow it.
    """
    uid, gid = os.getuid(), os.getgid()
    unshare(_CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS | CLONE_NEWPID)
    # setgroups first: without it the kernel refuses the map of groups to an unprivileged process
    maps = {"setgroups": "deny", "uid_map": f"{_INNER_ID} {uid} 1", "gid_map": f"{_INNER_ID} {gid} 1"}
    for name, text in maps.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def private_tree(readable: list[str]) -> bool:
    """Replace the file tree by one that holds ``readable`` (read-only), devices and an empty scratch folder.

    Returns whether /proc could be mounted (the process numbers' own; a container may forbid it).

    Raises:
        OSError: the system does not allow it.
    """
    # else what is mounted from here on would appear in the machine's own tree
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", _STAGE, "tmpfs", _LOCKED, "size=1m,mode=0755")
    root = os.path.join(_STAGE, "root")
    os.mkdir(root)
    # pivot_root wants a mount point
    _mount("tmpfs", root, "tmpfs", _LOCKED, "size=1m,mode=0755")
    for path in readable:
        _bind(path, root + path)
    for device in DEVICES:
        _bind("/dev/" + device, f"{root}/dev/{device}", read_only=False)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{root}/dev/{name}")
    os.symlink("/proc/self/fd", f"{root}/dev/fd")
    for folder in ("proc", "old"):
        os.mkdir(f"{root}/{folder}")
    os.makedirs(root + SCRATCH_FOLDER, exist_ok=True)
    _syscall(_PIVOT_ROOT, os.fsencode(root), os.fsencode(root + "/old"))
    os.chdir("/")
    has_proc = True
    try:
        _mount("proc", "/proc", "proc", _LOCKED | _MS_NOEXEC)
    except OSError:
        has_proc = False
    # from here on the machine's files cannot be reached
    _umount("/old")
    os.rmdir("/old")
    # last: the root becomes read-only, and the scratch folder a separate mount
    _mount("none", "/", None, _MS_REMOUNT | _MS_RDONLY | _MS_BIND | _LOCKED)
    fresh_scratch()
    return has_proc


def _bind(source: str, target: str, *, read_only: bool = True) -> None:
    if not os.path.exists(source):
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, target, None, _MS_BIND | _MS_REC)
    if read_only:
        # flags that the outer world set are locked and must be repeated; the first five have the same bits in both
        present = os.statvfs(target).f_flag
        same = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME
        locked = present & same | (_MS_RELATIME if present & os.ST_RELATIME else 0)
        _mount("none", target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | locked)


def fresh_scratch() -> None:
    """Mount an empty scratch folder over the old one."""
    with contextlib.suppress(OSError):
        _umount(SCRATCH_FOLDER)
    _mount("tmpfs", SCRATCH_FOLDER, "tmpfs", _LOCKED, _SCRATCH_OPTIONS)


# --- The system calls that a program may make -----------------------------------------------------------------------
#
# An allow-list, compiled to a BPF decision tree. Every call that is not named here fails with EPERM. Calls that only an
# attack makes end the program (status ``security``). Threads are allowed and processes are not, so nothing can be left
# running. The kernel interprets the filter at every call, hence a tree (depth 7) and no list.

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
_NR_IOCTL, _SENDTO, _SOCKETPAIR, _CLONE, _KILL, _FCNTL = 16, 44, 53, 56, 62, 72
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
    """Return operations that test the low half of an argument for ``values``. (The kernel reads these as 32 bits.)"""
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
    """Allow a process its own limits except CPU time (lowering it looks like a kill from outside), size and memory."""
    return _one_of(index, _KEPT_LIMITS, _ALLOW, found=_EPERM)


def _rules(allow_exec: bool) -> dict[int, list[_Op]]:
    rules: dict[int, list[_Op]] = {number: [_ret(_ALLOW)] for number in _FREE.values()}
    rules.update({number: [_ret(_KILL_PROCESS)] for number in _FATAL.values()})
    if allow_exec:
        rules.update({number: [_ret(_ALLOW)] for number in _EXEC.values()})
    # ENOTTY is what a file answers that is no terminal: `isatty` expects it
    rules[_NR_IOCTL] = _one_of(1, _IOCTLS, _ENOTTY)
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
    # calls of the x32 interface have separate numbers, which the list does not cover
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
        prctl(PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(self._program))
