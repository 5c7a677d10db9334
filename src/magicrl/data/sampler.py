"""Stateful prompt sampler, which draws the problems of each training step.

Every epoch visits each remaining problem once, in an order that depends only on (seed, epoch). A removed problem is
skipped from then on, together with all problems that have the same prompt (``Problem.key``). The order of the others
does not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from magicrl.algorithms.filters import PassCount
from magicrl.data.curricula import Curriculum
from magicrl.data.sources import problems_fingerprint
from magicrl.records import Problem, ScoredGroup


class PromptSampler:
    """Sampler of problems over endless epochs, whose state is a small JSON object.

    A draw may cross the end of an epoch, so a problem can occur twice in a batch, as two groups.

    Example:
        >>> problems = [Problem(id=str(i), prompt="", references=("0",), verifier="exact", source="doc")
        ...             for i in range(3)]
        >>> sampler = PromptSampler(problems, seed=0)
        >>> sorted(p.id for p in sampler.next(3)), sampler.epoch
        (['0', '1', '2'], 0)
    """

    def __init__(self, problems: Sequence[Problem], seed: int, curriculum: Curriculum | None = None) -> None:
        """Create a sampler of ``problems`` with unique ids.

        ``seed`` fixes the order of every epoch, unless a ``curriculum`` chooses the problems.
        """
        if not problems:
            raise ValueError("the prompt sampler got no problems; check [data.train] and what its filters removed")
        if seed < 0:
            raise ValueError(f"seed must be >= 0, got {seed}")
        self._problems = tuple(problems)
        self._index = {p.id: i for i, p in enumerate(self._problems)}
        if len(self._index) < len(self._problems):
            doubled = next(p.id for i, p in enumerate(self._problems) if self._index[p.id] != i)
            raise ValueError(f"problem id {doubled!r} appears twice in the training set; ids must be unique")
        self._seed, self._curriculum = seed, curriculum
        self._of_key: dict[str, list[str]] = {}
        for problem in self._problems:
            # ids with the same prompt (a source listed twice) are removed together
            self._of_key.setdefault(problem.key, []).append(problem.id)
        self._removed: set[str] = set()
        self.fingerprint = problems_fingerprint(self._problems)  # before any removal
        self._start_epoch(0)

    def _start_epoch(self, epoch: int, position: int = 0) -> None:
        self.epoch = epoch  # completed passes; the current one ends when the next draw needs more problems
        self.position = position  # position in the order of this epoch, removed problems included
        # depends only on seed and epoch, so a checkpoint needs the position but not the generator's state
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, epoch])))
        self._order = rng.permutation(len(self._problems))

    @property
    def removed(self) -> frozenset[str]:
        """Ids."""
        return frozenset(self._removed)

    @property
    def remaining(self) -> tuple[Problem, ...]:
        """The problems still drawn from, in the order of the training set."""
        return tuple(p for p in self._problems if p.id not in self._removed)

    def named(self, id: str) -> Problem:
        """The problem of this id, removed or not.

        Raises:
            ValueError: there is none.
        """
        if id not in self._index:
            raise ValueError(f"no problem {id!r} in the training set; resume with the data that the run began with")
        return self._problems[self._index[id]]

    def __len__(self) -> int:
        """Number of problems still drawn from."""
        return len(self._problems) - len(self._removed)

    def next(self, n: int) -> list[Problem]:
        """The next ``n`` problems.

        Raises:
            ValueError: n is below 1, or the curriculum returns other than ``n`` problems of those that are left.
        """
        if n < 1:
            raise ValueError(f"a draw takes at least one problem, got n = {n}")
        assert len(self) > 0, "remove() and restore() leave at least one problem"
        if self._curriculum is not None:
            return self._chosen(n, self._curriculum)
        drawn: list[Problem] = []
        # the border of an epoch may lie inside a draw
        while len(drawn) < n:
            if self.position == len(self._problems):
                self._start_epoch(self.epoch + 1)
            problem = self._problems[self._order[self.position]]
            self.position += 1
            # removed ones are skipped in place: the order of the others stays
            if problem.id not in self._removed:
                drawn.append(problem)
        return drawn

    def _chosen(self, n: int, curriculum: Curriculum) -> list[Problem]:
        """Return the problems that a curriculum chooses. A wrong choice ends the run, which can be resumed."""
        remaining = self.remaining
        # A user's code may return anything.
        returned: Any = curriculum.next(n, remaining)
        names: list[Any] = list(returned) if isinstance(returned, Iterable) and not isinstance(returned, str) else []
        left = {problem.id for problem in remaining}
        wrong = next((repr(name)[:60] for name in names if not isinstance(name, str) or name not in left), None)
        if len(names) != n or wrong is not None:
            what = f"{len(names)} ids" if wrong is None else f"{wrong}, which is not one of them"
            raise ValueError(
                f"the sampler {type(curriculum).__name__} must return the ids of {n} of the {len(left)} problems that "
                f"it is given, and next({n}, ...) returned {what}. Correct it, then continue with --resume"
            )
        return [self._problems[self._index[name]] for name in names]

    def observe(self, group: ScoredGroup) -> None:
        """Show the curriculum the outcome of a visit."""
        if self._curriculum is not None:
            count = PassCount.of(group)
            self._curriculum.observe(group.group.request.problem, count.correct, count.counted)

    def remove(self, keys: Iterable[str]) -> int:
        """Never draw the problems of these keys again (section 3, the online filter); how many were still there.

        Raises:
            ValueError: an unknown key, or nothing would be left; the sampler is then unchanged.
        """
        wanted = set(keys)
        unknown = sorted(wanted - self._of_key.keys())
        if unknown:
            raise ValueError(f"cannot remove prompt {unknown[0]!r}: no problem in the training set has this key")
        new = {name for key in wanted for name in self._of_key[key]} - self._removed
        if len(new) == len(self):
            raise ValueError(
                f"removing {len(new)} problems would leave none of {len(self._problems)}: every remaining one is "
                "to go (solved?); add harder problems or set data.online_filter = false"
            )
        self._removed |= new
        return len(new)

    def state(self) -> dict[str, Any]:
        """Return the state needed to continue, as JSON values."""
        return {
            "seed": self._seed,
            "epoch": self.epoch,
            "position": self.position,
            "removed": sorted(self._removed),
            "fingerprint": self.fingerprint,
        } | ({} if self._curriculum is None else {"curriculum": self._curriculum.state()})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``: the next draws are the ones that would have followed it.

        Raises:
            ValueError: the state belongs to another training set or is damaged; the sampler is then unchanged.
        """
        missing = sorted({"seed", "epoch", "position", "removed", "fingerprint"} - state.keys())
        if missing:
            raise ValueError(f"the saved sampler state lacks {missing[0]!r}; the checkpoint is damaged")
        if state["fingerprint"] not in (self.fingerprint, problems_fingerprint(self._problems, folders=True)):
            raise ValueError(
                "the saved sampler state belongs to another training set "
                f"(checksum {str(state['fingerprint'])[:12]}, here {self.fingerprint[:12]}); "
                "resume with the same data, or start a new run"
            )
        removed = set(state["removed"])
        epoch, position = int(state["epoch"]), int(state["position"])
        if not removed < self._index.keys() or epoch < 0 or not 0 <= position <= len(self._problems):
            raise ValueError(
                f"the saved sampler state does not fit its training set (epoch {epoch}, position {position}, "
                f"{len(removed)} removed of {len(self._problems)}); the checkpoint is damaged"
            )
        if self._curriculum is not None:
            self._curriculum.restore(state["curriculum"])
        self._seed = int(state["seed"])
        self._removed = removed
        self._start_epoch(epoch, position)
