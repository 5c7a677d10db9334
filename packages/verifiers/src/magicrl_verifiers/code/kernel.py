"""What Linux offers and Python does not, through ctypes: a bare fork, Landlock, namespaces, a private file tree.

Standard library only; x86-64. Functions raise OSError with the kernel's errno.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
import time
from collections.abc import Iterable
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
    """A system call that glibc does not wrap; arguments are ints, bytes or ctypes references."""
    return _check(_libc.syscall(ctypes.c_long(number), *arguments), f"syscall {number}")


def unshare(flags: int) -> None:
    _check(_libc.unshare(ctypes.c_int(flags)), f"unshare({flags:#x})")


def setns(fd: int, kind: int) -> None:
    _check(_libc.setns(fd, kind), "setns")


def fork() -> int:
    """The C library's fork, without Python's handlers for it: they touch many pages, and seed `random` anew.

    Only for a process of one thread that holds no lock: what those handlers repair is then whole.
    """
    # the interpreter's lock stays held: a child in which nobody holds it could not go on
    return _check(_libc_holding_lock.fork(), "fork")


def cpu_seconds(pid: int) -> float:
    """CPU seconds (all threads, user and system) of a child that has not been waited for."""
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
    """A descriptor of the rules: nothing but ``paths``, each with its rights and all beneath it.

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
    # when everything stands: the root itself is read-only, the scratch folder is a mount of its own
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
        flags = _MS_REMOUNT | _MS_BIND | _MS_RDONLY
        # flags that the outer world set are locked and must be repeated
        _mount("none", target, None, flags | _inherited(target))


def _inherited(path: str) -> int:
    present = os.statvfs(path).f_flag
    # the first five have the same bits in both
    same = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME
    return present & same | (_MS_RELATIME if present & os.ST_RELATIME else 0)


def fresh_scratch() -> None:
    """An empty scratch folder over the old one."""
    with contextlib.suppress(OSError):
        _umount(SCRATCH_FOLDER)
    _mount("tmpfs", SCRATCH_FOLDER, "tmpfs", _LOCKED, _SCRATCH_OPTIONS)
