"""The runs of one request as a script: fork, guards, wait, and what is looked at between two children.

As long as each child ends soon, and as it should, Python is not needed between the first fork and the last; whatever
else happens ends the script there and is the zygote's to deal with.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from magicrl.verifiers.code import kernel
from magicrl.verifiers.code.child import Binding
from magicrl.verifiers.code.script import LEAST, Machine, Script

_READ, _LSEEK, _WAIT4, _FCNTL, _SIGTIMEDWAIT, _UNSHARE, _SETNS = 0, 8, 61, 72, 128, 272, 308  # x86-64
_SET_FLAGS = 4  # F_SETFL
_RECORDS, _FIXED = 28, 64
"""Of a run, and of all together: the most."""
_WORDS = 20  # of a run: status, usage (18), what it told
_MAX_TOLD = 8

Places = Sequence[tuple[int, int]]
"""Descriptors, each with the number that a child finds it at."""


@dataclass(frozen=True, slots=True)
class World:
    """What all runs of a zygote have in common.

    Attributes:
        machine: goes through the scripts.
        waiting: for the end of a child, for a while.
        told: the end of the pipe on which children say that their guards are in force. It does not block.
        own_numbers: the namespace of process numbers to go back to after each fork; -1: children share it.
    """

    machine: Machine
    waiting: kernel.Wait
    told: int
    own_numbers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What the runs of a request are given.

    Attributes:
        common: descriptors of every run.
        own: further ones of each run, which it may write to.
        errors: the memory file behind standard error, the same for all.
        room: bytes in a descriptor of its own with which a run may end without being looked at.
        stop: do not go on after a run whose status is not 0.
        scratch: the folder that programs may write to, or None.
    """

    common: Places
    own: Sequence[Places]
    errors: int
    room: int
    stop: bool
    scratch: kernel.Folder | None


class Batch:
    """Runs of one program, one after another, numbered from 0.

    Args:
        inside: what a child does; told whether its guards are in force.
    """

    def __init__(self, world: World, binding: Binding, plan: Plan, inside: Callable[[bool], NoReturn]) -> None:
        self._world = world
        self._plan = plan
        self._inside = inside
        self._binding = binding  # holds what the script points to
        self._count = len(plan.own)
        self._memory = (ctypes.c_int64 * (_WORDS * self._count + 1))()
        self._script = Script(world.machine, _RECORDS * self._count + _FIXED)
        self._begins: list[int] = []
        self._forks: list[int] = []
        self._waits: list[int] = []
        for run, places in enumerate(plan.own):
            self._parent(run, places)
        self._end = self._script.stop()
        self._children()
        self._inside_end = self._script.stop()
        self._at = 0

    def _parent(self, run: int, places: Places) -> None:
        """What the zygote does for a run."""
        script, plan, world = self._script, self._plan, self._world
        memory, numbers = kernel.address(self._memory) + 8 * _WORDS * run, world.own_numbers
        # one file for what all runs write on standard error: nothing of its state passes from one to the next
        self._begins.append(script.call((_LSEEK, plan.errors, 0, os.SEEK_SET, 0, 0)))
        script.call((_FCNTL, plan.errors, _SET_FLAGS, 0, 0, 0))
        script.store(world.waiting.nanoseconds, world.waiting.first)
        if numbers >= 0:
            script.call((_UNSHARE, kernel.CLONE_NEWPID, 0, 0, 0, 0))
        self._forks.append(script.call(kernel.FORK))
        if numbers >= 0:
            script.call((_SETNS, numbers, kernel.CLONE_NEWPID, 0, 0, 0))
        script.call(world.waiting.call, LEAST)
        self._waits.append(script.call((_WAIT4, -1, memory, os.WNOHANG, memory + 8, 0), 1))
        script.call((_READ, world.told, memory + 8 * (_WORDS - 1), _MAX_TOLD, 0, 0), 2, 2)
        script.call((_LSEEK, plan.errors, 0, os.SEEK_END, 0, 0), 0, 0)
        if plan.scratch is not None:
            script.call(plan.scratch.look)
            for now, before, words in plan.scratch.states:
                script.same(now, before, words)
        for fd, _ in places:
            script.call((_LSEEK, fd, 0, os.SEEK_END, 0, 0), 0, plan.room)
        if plan.stop:
            script.same(memory, kernel.address(self._memory) + 8 * _WORDS * self._count, 1)

    def _children(self) -> None:
        """What the children do, each with its own descriptors first."""
        script, jumps = self._script, list[int]()
        for fork, places in zip(self._forks, self._plan.own, strict=True):
            script.lead(fork, len(script))
            for fd, number in places:
                script.call(kernel.duplicate(fd, number))
            jumps.append(script.jump(0))
        for jump in jumps:
            script.lead(jump, len(script))
        for fd, number in self._plan.common:
            script.call(kernel.duplicate(fd, number))
        self._binding.write(script)

    @property
    def errors(self) -> int:
        """The memory file behind standard error."""
        return self._plan.errors

    def __len__(self) -> int:
        return self._count

    def go(self, run: int) -> int:
        """Go on with the beginning of this run. Returns the first that did not end, or not as it should.

        Raises:
            OSError: no process could be made.
        """
        return self._go(self._begins[run])

    def resume(self, run: int) -> int:
        """Go on with waiting for the end of this run; else as `go`."""
        return self._go(self._waits[run] - 1)

    def _go(self, place: int) -> int:
        end = self._script.run(place)
        if end > self._end:
            self._inside(end == self._inside_end)
        self._at = end
        if end == self._end:
            return self._count
        run = max(number for number, begin in enumerate(self._begins) if begin <= end)
        if end <= self._forks[run]:
            if self._world.own_numbers >= 0:
                kernel.setns(self._world.own_numbers, kernel.CLONE_NEWPID)
            error = -self._script.answer(end)
            raise OSError(error, os.strerror(error))
        assert end >= self._waits[run], "a child in a namespace that could not be left"
        return run

    def alive(self, run: int) -> int:
        """The process of the run that was returned last, if it has not ended, else 0."""
        return self._script.answer(self._forks[run]) if self._at == self._waits[run] else 0

    def report(self, run: int) -> dict[str, Any]:
        """Of a run that ended: ``status`` as ``os.wait4`` says it, ``cpu`` seconds, ``peak`` KiB and what it told."""
        status, *usage = self._memory[_WORDS * run : _WORDS * (run + 1)]
        told = usage.pop().to_bytes(_MAX_TOLD, "little").rstrip(b"\0").decode("ascii")
        cpu = usage[0] + usage[2] + (usage[1] + usage[3]) / 1e6
        return {"status": status, "cpu": cpu, "peak": usage[4], "told": told}
