"""Which files a program may reach, enforced by the kernel's Landlock (5.13 and later), no rights needed.

Also no TCP (ABI 4), no abstract Unix sockets and no signals to the outside (ABI 6). What Landlock does not cover
(UDP, chmod, stat) the system-call filter or the private file tree do.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from magicrl.verifiers.code import kernel

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_ALL_FILES_ABI1 = (1 << 13) - 1
_REFER, _TRUNCATE, _IOCTL = 1 << 13, 1 << 14, 1 << 15
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_NETWORK = 3
_SCOPES = 3

READ = _READ_FILE | _READ_DIR
SCRATCH = READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _TRUNCATE
DEVICE = _READ_FILE | _WRITE_FILE
_FILE_RIGHTS = _READ_FILE | _WRITE_FILE | _TRUNCATE


def abi() -> int:
    """Landlock's version in this kernel, 0 if it has none."""
    try:
        return kernel.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    except OSError:
        return 0


def ruleset(paths: Iterable[tuple[str, int]]) -> int:
    """A descriptor of the rules: nothing but ``paths``, each with its rights and all beneath it.

    Paths that do not exist are left out. Executing is not restricted here (the system-call filter does that).

    Raises:
        OSError: the kernel has no Landlock.
    """
    version = abi()
    handled = _ALL_FILES_ABI1 & ~_EXECUTE
    if version >= 2:
        handled |= _REFER
    if version >= 3:
        handled |= _TRUNCATE
    if version >= 5:
        handled |= _IOCTL
    attributes = struct.pack("<QQQ", handled, _NETWORK, _SCOPES)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    fd = kernel.syscall(_CREATE, attributes, ctypes.c_size_t(size), ctypes.c_uint32(0))
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
            rights &= _FILE_RIGHTS
        rule = struct.pack("<Qi", rights, beneath)
        kernel.syscall(_ADD_RULE, ctypes.c_int(rules), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
    finally:
        os.close(beneath)


def restriction(rules: int) -> kernel.Call:
    """The call that binds a process and all it starts to the rules, for ever. Needs no_new_privs."""
    return (_RESTRICT, rules, 0, 0, 0, 0)
