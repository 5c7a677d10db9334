"""The two halves of the system-call filter hold together as the one list that they were made from."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest

from magicrl.verifiers.code import seccomp

ALLOW, KILL, EPERM = 0x7FFF0000, 0x80000000, 0x00050001
OWN_PID = seccomp._PID  # pyright: ignore[reportPrivateUsage]
ARGUMENTS = [
    (0, 0, 0, 0, 0, 0),
    (1, 1, 0, 0, 0, 0),
    (OWN_PID, 9, 9, 0, 0, 0),
    (OWN_PID, 15, 15, 0, 0, 0),
    (OWN_PID + 1, 15, 9, 0, 0, 0),
    (0x003D0F00, 0, 0, 0, 0, 0),  # what libc's threads are made with
    (0x7C020011, 0, 0, 0, 0, 0),
    (15, 0x5413, 1, 2, 0, 0),
    (22, 2, 7, 1 << 40, 1 << 40, 0),
]


def answer(ops: Sequence[tuple[int, int, int, int]], number: int, arguments: Sequence[int], arch: int) -> int:
    """What the kernel's interpreter makes of these operations."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments)
    place, register = 0, 0
    while True:
        code, yes, no, value = ops[place]
        place += 1
        if code == 0x06:
            return value
        if code == 0x20:
            (register,) = struct.unpack_from("<I", data, value)
        elif code == 0x54:
            register &= value
        else:
            holds = {0x15: register == value, 0x35: register >= value, 0x45: bool(register & value)}[code]
            place += yes if holds else no


@pytest.mark.parametrize("execute", [False, True])
def test_base_and_child_filter_together_are_the_whole_list(execute: bool) -> None:
    rules = seccomp._rules(execute)  # pyright: ignore[reportPrivateUsage]
    whole = seccomp.Filter(rules, otherwise=EPERM).ops
    base, child = seccomp.base_filter().ops, seccomp.child_filter(allow_exec=execute).ops
    strictness = {KILL: 0, ALLOW: 9}  # errors in between, as the kernel ranks the answers of several filters
    arch = seccomp.AUDIT_ARCH_X86_64
    for number in [*range(480), 0x40000000, 0x40000001, 0xFFFFFFFF]:
        for arguments in ARGUMENTS:
            both = [answer(ops, number, arguments, arch) for ops in (base, child)]
            strictest = min(both, key=lambda found: strictness.get(found, 5))
            assert strictest == answer(whole, number, arguments, arch), (number, arguments)
    assert answer(base, 0, ARGUMENTS[0], 0x40000003) == answer(child, 0, ARGUMENTS[0], 0x40000003) == KILL  # 32 bits
