"""System calls one after another without Python between them. Standard library only; x86-64.

Python cannot make a system call without writing to its own heap (reference counts), and after a fork the first write
to each page costs a fault and, while the child lives, a copy. So what has to happen around a fork is written down
before it, as records, and a few instructions go through them: the parent's heap then stays untouched until the child
has ended, the child's until its guards are in force.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

from magicrl.verifiers.code import kernel

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
        kernel.perform([(_MPROTECT, start, mmap.PAGESIZE, _READ_EXECUTE, 0, 0)])
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

    def call(self, call: kernel.Call, low: int = 0, high: int = MOST, *, zero: int = -1) -> int:
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
