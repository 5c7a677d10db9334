"""A forked child restricts itself before it reads a byte of its program."""

from __future__ import annotations

import os
import sys

import pytest

from magicrl_verifiers.code import forkserver, kernel
from magicrl_verifiers.code.values import SLOTS

REQUEST = {"role": "program", "compiled": False, "common": ["source"], "each": []}


@pytest.mark.parametrize(("broken", "status", "told"), [(False, 0, b"RC"), (True, 1, b"")])
def test_a_guard_that_cannot_be_set_ends_the_child(broken: bool, status: int, told: bytes) -> None:
    """Landlock's descriptor is missing: nothing of the program runs, and the child never reports confinement."""
    if kernel.landlock_abi() == 0 or sys.platform != "linux":
        pytest.skip("kernel lacks the primitive: Landlock")
    hears, says = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    source, out = os.memfd_create("source"), os.memfd_create("out")
    os.write(source, b"import os; os.write(1, b'x')")
    parent = os.getpid()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        rules = 9999 if broken else kernel.landlock_rules([("/usr", kernel.READ_RIGHTS)])
        made = kernel.Filter()
        guards = forkserver.Guards(rules=rules, filter=made, exec_filter=made, folder="/", parent=parent)
        forkserver.run(REQUEST, [(source, SLOTS["source"]), (says, SLOTS["status"]), (out, 1), (out, 2)], guards, 5.0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status
    os.close(says)
    assert os.read(hears, 9) == told
    assert os.pread(out, 1, 0) == (b"\n" if broken else b"x"), "the error's text, or what the program wrote"
    for fd in (hears, source, out):
        os.close(fd)
