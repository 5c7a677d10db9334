"""The interpreter's code in large pages: a child then finds it mapped, where it would take forty faults to map it.

Standard library only. Nothing but the cost of a fork depends on it; where the system forbids it, nothing changes.
"""

from __future__ import annotations

import ctypes
import mmap

_LARGE = 2 << 20
_MREMAP_FIXED_MAYMOVE = 3
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_READ_WRITE, _READ_EXECUTE = 3, 5
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_word, _int = ctypes.c_size_t, ctypes.c_int
_libc.mmap.argtypes = [_word, _word, _int, _int, _int, ctypes.c_long]
_libc.mremap.argtypes = [_word, _word, _word, _int, _word]
_libc.munmap.argtypes = [_word, _word]
_libc.madvise.argtypes = _libc.mprotect.argtypes = [_word, _word, _int]


def enlarge_code() -> bool:
    """Put a copy of the interpreter's code and constants, in large pages, in their place. Returns whether it was done.

    Only whole large pages of what is mapped without the right to write. Needs transparent large pages and Linux 6.1.
    """
    start, end = _code()
    start, end = -(-start // _LARGE) * _LARGE, end // _LARGE * _LARGE
    size = end - start
    if size <= 0:
        return False
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    room = _libc.mmap(0, size + _LARGE, _READ_WRITE, flags, -1, 0)
    if room == _FAILED:
        return False
    copy = -(-room // _LARGE) * _LARGE
    ctypes.memmove(copy, start, size)
    _libc.madvise(copy, size, _MADV_HUGEPAGE)
    # in small pages it would cost each fork more than it saves
    if _libc.madvise(copy, size, _MADV_COLLAPSE) != 0 or _libc.mprotect(copy, size, _READ_EXECUTE) != 0:
        _libc.munmap(room, size + _LARGE)
        return False
    done = _libc.mremap(copy, size, size, _MREMAP_FIXED_MAYMOVE, start) == start
    _libc.munmap(room, copy - room)
    _libc.munmap(copy + size, room + _LARGE - copy)
    return done


def _code() -> tuple[int, int]:
    """Addresses of the interpreter's mappings that cannot be written to; (0, 0) if they are not found."""
    inside = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value or 0
    mappings: list[tuple[int, int, str, str]] = []
    try:
        with open("/proc/self/maps") as file:
            for line in file:
                fields = line.split(maxsplit=5)
                first, last = (int(part, 16) for part in fields[0].split("-"))
                mappings.append((first, last, fields[1], fields[5].strip() if len(fields) > 5 else ""))
    except OSError:
        return 0, 0
    path = next((name for first, last, _, name in mappings if first <= inside < last), "")
    own = [(first, last) for first, last, rights, name in mappings if path and name == path and "w" not in rights]
    start = end = own[0][0] if own else 0
    for first, last in own:
        if first != end:  # what follows a hole is changed by the linker before it is made read-only
            break
        end = last
    return start, end
