"""What Linux offers and Python does not, through ctypes: calls, scripts of calls, Landlock, namespaces, large pages.

Standard library only; x86-64. Functions raise OSError with the kernel's errno.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import stat
import struct
import time
from collections.abc import Iterable, Sequence
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


_WORDS = 11  # of a record: number, six arguments, answer, lowest and highest answer to go on after, where to go after 0
_SIZE = 8 * _WORDS
_STOP, _SAME, _STORE = -1, -2, -3
LEAST, MOST = -(1 << 63), (1 << 63) - 1
_MPROTECT, _READ_EXECUTE = 10, 5
_READ_ONLY_AND_RUN = mmap.PROT_READ | mmap.PROT_EXEC

# fmt: off
_INSTRUCTIONS = (
    "53",              # 00        push rbx
    "48 89 fb",        # 01        mov  rbx, rdi           the record to begin with
    "48 8b 03",        # 04 turn:  mov  rax, [rbx]
    "48 83 f8 ff",     # 07        cmp  rax, -1
    "74 72",           # 0b        je   end
    "48 83 f8 fe",     # 0d        cmp  rax, -2
    "74 49",           # 11        je   same
    "48 83 f8 fd",     # 13        cmp  rax, -3
    "74 58",           # 17        je   store
    "48 8b 7b 08",     # 19        mov  rdi, [rbx + 8]
    "48 8b 73 10",     # 1d        mov  rsi, [rbx + 16]
    "48 8b 53 18",     # 21        mov  rdx, [rbx + 24]
    "4c 8b 53 20",     # 25        mov  r10, [rbx + 32]
    "4c 8b 43 28",     # 29        mov  r8, [rbx + 40]
    "4c 8b 4b 30",     # 2d        mov  r9, [rbx + 48]
    "0f 05",           # 31        syscall
    "48 89 43 38",     # 33        mov  [rbx + 56], rax
    "48 3b 43 40",     # 37        cmp  rax, [rbx + 64]
    "7c 42",           # 3b        jl   end
    "48 3b 43 48",     # 3d        cmp  rax, [rbx + 72]
    "7f 3c",           # 41        jg   end
    "48 85 c0",        # 43 after: test rax, rax
    "75 0e",           # 46        jne  step
    "48 8b 4b 50",     # 48        mov  rcx, [rbx + 80]
    "48 85 c9",        # 4c        test rcx, rcx
    "74 05",           # 4f        je   step
    "48 89 cb",        # 51        mov  rbx, rcx
    "eb ae",           # 54        jmp  turn
    "48 83 c3 58",     # 56 step:  add  rbx, 88
    "eb a8",           # 5a        jmp  turn
    "48 8b 7b 08",     # 5c same:  mov  rdi, [rbx + 8]
    "48 8b 73 10",     # 60        mov  rsi, [rbx + 16]
    "48 8b 4b 18",     # 64        mov  rcx, [rbx + 24]
    "31 c0",           # 68        xor  eax, eax           equal, if there is nothing to compare
    "f3 48 a7",        # 6a        repe cmpsq
    "74 d4",           # 6d        je   after
    "eb 0e",           # 6f        jmp  end
    "48 8b 4b 08",     # 71 store: mov  rcx, [rbx + 8]
    "48 8b 53 10",     # 75        mov  rdx, [rbx + 16]
    "8b 12",           # 79        mov  edx, [rdx]
    "89 11",           # 7b        mov  [rcx], edx
    "eb d7",           # 7d        jmp  step
    "48 89 d8",        # 7f end:   mov  rax, rbx           the record where it ended
    "5b",              # 82        pop  rbx
    "c3",              # 83        ret
)
# fmt: on


# Python cannot make a system call without writing to its own heap (reference counts), and after a fork the first write
# to each page costs a fault and, while the child lives, a copy. So what has to happen around a fork is written down
# before it, as records, and a few instructions go through them: the parent's heap then stays untouched until the child
# has ended, the child's until its guards are in force.


class Machine:
    """The instructions, in memory that can be run and not written.

    Raises:
        OSError: this system forbids a process to make such memory.
    """

    def __init__(self) -> None:
        code = bytes.fromhex("".join(_INSTRUCTIONS))
        self._memory = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.write(code)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        perform([(_MPROTECT, start, mmap.PAGESIZE, _READ_EXECUTE, 0, 0)])
        # the interpreter's lock stays held: a child in which nobody holds it could not go on
        self.run = ctypes.PYFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64)(start)


class Script:
    """Records, made once and gone through by a `Machine`.

    A call whose answer lies outside of what was asked for ends the run there. Addresses that records hold have to stay
    valid as long as the script.

    Args:
        machine: what goes through it.
        room: the most records.
    """

    def __init__(self, machine: Machine, room: int) -> None:
        self._machine = machine
        self._words = (ctypes.c_int64 * (_WORDS * room))()
        self._start = ctypes.addressof(self._words)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def call(self, call: Call, low: int = 0, high: int = MOST, *, zero: int = -1) -> int:
        """Make a call and go on if ``low <= answer <= high``. Returns the record's place.

        Args:
            zero: the place to go on at after the answer 0 (in a child after a fork); -1: the next one.
        """
        return self._add((*call, 0, 0, low, high, self._address(zero)))

    def same(self, first: int, second: int, words: int, *, then: int = -1) -> int:
        """Go on, at ``then``, if this many words of eight bytes at two addresses are equal."""
        return self._add((_SAME, first, second, words, 0, 0, 0, 0, 0, 0, self._address(then)))

    def jump(self, to: int) -> int:
        """Go on elsewhere."""
        return self.same(0, 0, 0, then=to)

    def store(self, target: int, source: int) -> int:
        """Copy four bytes from an address to another."""
        return self._add((_STORE, target, source, 0, 0, 0, 0, 0, 0, 0, 0))

    def stop(self) -> int:
        """End here."""
        return self._add((_STOP, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0))

    def _add(self, words: Sequence[int]) -> int:
        place = self._length
        self._words[_WORDS * place : _WORDS * (place + 1)] = words
        self._length += 1
        return place

    def _address(self, place: int) -> int:
        return 0 if place < 0 else self._start + _SIZE * place

    def lead(self, place: int, to: int) -> None:
        """Where to go after the answer 0, of a record that exists."""
        self._words[_WORDS * place + 10] = self._address(to)

    def change(self, place: int, argument: int, value: int) -> None:
        """Another argument (from 0) for a record that exists."""
        self._words[_WORDS * place + 1 + argument] = value

    def answer(self, place: int) -> int:
        """What the call of a record said at its last run: its result, or the negative error."""
        return self._words[_WORDS * place + 7]

    def answer_address(self, place: int) -> int:
        """Where that lies."""
        return self._start + _SIZE * place + 56

    def run(self, place: int) -> int:
        """Go through the records from this place on. Returns the place of the last one, in a child as in its parent."""
        return (self._machine.run(self._start + _SIZE * place) - self._start) // _SIZE


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
        return syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_LANDLOCK_VERSION))
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
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    fd = syscall(_CREATE, attributes, ctypes.c_size_t(size), ctypes.c_uint32(0))
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
        syscall(_ADD_RULE, ctypes.c_int(rules), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
    finally:
        os.close(beneath)


def landlock_restriction(rules: int) -> Call:
    """The call that binds a process and all it starts to the rules, for ever. Needs no_new_privs."""
    return (_RESTRICT, rules, 0, 0, 0, 0)


SCRATCH_FOLDER = "/tmp"
_SCRATCH_OPTIONS = "size=64m,nr_inodes=2000,mode=0700"
_LOCKED = MS_NOSUID | MS_NODEV
_DEVICES = ("null", "zero", "full", "random", "urandom")
_INNER_ID = 1000
_STAGE = "/tmp"


def enter_namespaces() -> None:
    """New namespaces for this process; its next child is the first of its own process numbers.

    Raises:
        OSError: the system does not allow it.
    """
    uid, gid = os.getuid(), os.getgid()
    unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWPID)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{_INNER_ID} {uid} 1")
    _write("/proc/self/gid_map", f"{_INNER_ID} {gid} 1")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def private_tree(readable: list[str]) -> bool:
    """Replace the file tree by one that holds ``readable`` (read-only), devices and an empty scratch folder.

    Returns whether /proc could be mounted (the process numbers' own; a container may forbid it).

    Raises:
        OSError: the system does not allow it.
    """
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", _STAGE, "tmpfs", _LOCKED, "size=1m,mode=0755")
    root = os.path.join(_STAGE, "root")
    os.mkdir(root)
    mount("tmpfs", root, "tmpfs", _LOCKED, "size=1m,mode=0755")
    for path in readable:
        _bind(path, root + path)
    for device in _DEVICES:
        _bind("/dev/" + device, f"{root}/dev/{device}", read_only=False)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{root}/dev/{name}")
    os.symlink("/proc/self/fd", f"{root}/dev/fd")
    for folder in ("proc", "old"):
        os.mkdir(f"{root}/{folder}")
    os.makedirs(root + SCRATCH_FOLDER, exist_ok=True)
    pivot_root(root, root + "/old")
    os.chdir("/")
    has_proc = True
    try:
        mount("proc", "/proc", "proc", _LOCKED | MS_NOEXEC)
    except OSError:
        has_proc = False
    umount("/old", MNT_DETACH)
    os.rmdir("/old")
    mount("none", "/", None, MS_REMOUNT | MS_RDONLY | MS_BIND | _LOCKED)
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
    mount(source, target, None, MS_BIND | MS_REC)
    if read_only:
        flags = MS_REMOUNT | MS_BIND | MS_RDONLY
        # flags that the outer world set are locked and must be repeated
        mount("none", target, None, flags | _inherited(target))


def _inherited(path: str) -> int:
    present = os.statvfs(path).f_flag
    kept = 0
    for have, flag in (
        (os.ST_NOSUID, MS_NOSUID),
        (os.ST_NODEV, MS_NODEV),
        (os.ST_NOEXEC, MS_NOEXEC),
        (os.ST_NOATIME, 1024),
        (os.ST_NODIRATIME, 2048),
        (os.ST_RELATIME, 1 << 21),
    ):
        if present & have:
            kept |= flag
    return kept


def fresh_scratch() -> None:
    """An empty scratch folder over the old one."""
    with contextlib.suppress(OSError):
        umount(SCRATCH_FOLDER, MNT_DETACH)
    mount("tmpfs", SCRATCH_FOLDER, "tmpfs", _LOCKED, _SCRATCH_OPTIONS)


_LARGE = 2 << 20
_MREMAP_FIXED_MAYMOVE = 3
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_READ_WRITE = 3
_FAILED = ctypes.c_void_p(-1).value
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
