"""One benchmark of an evaluation on its way: what it costs, its pilot, its samples, its account."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from magicrl.evaluation.benchmarks import LoadedBenchmark
from magicrl.evaluation.engines import OpenedEngine
from magicrl.evaluation.folder import EvaluationFolder
from magicrl.evaluation.job import SamplingPlan, requests_for, run_job
from magicrl.evaluation.samples import SampleFile, SampleRow
from magicrl.evaluation.usage import Meter, Price
from magicrl.verifiers.pool import VerifierPool

PILOT_SAMPLES = 32
"""Most samples of a pilot; it is run where at least four times as many are to come."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a benchmark's job costs at most: samples that are missing of all, and their tokens.

    Attributes:
        prompt_tokens: to read for what is missing, a prompt once a sample; None where a server makes the prompts.
        price: None where none was given.
    """

    name: str
    problems: int
    samples: int
    missing: int
    wanted: int
    max_tokens: int
    prompt_tokens: int | None = None
    price: Price | None = None

    @property
    def most_tokens(self) -> int:
        return self.missing * self.max_tokens

    @property
    def most_price(self) -> float | None:
        """None without a price, or where the prompts' tokens are unknown and cost something."""
        if self.price is None or (self.prompt_tokens is None and self.price.per_million_in):
            return None
        return self.price.of(self.prompt_tokens or 0, self.most_tokens)


class Watcher(Protocol):
    """Who is told how an evaluation goes. It only listens."""

    def cost(self, costs: Sequence[Cost]) -> None:
        """Before anything is generated."""
        ...

    def note(self, text: str) -> None:
        """Something a person should know."""
        ...

    def progress(self, name: str, done: int, total: int) -> None:
        """A sample is done."""
        ...

    def sample(self, name: str, row: SampleRow) -> None:
        """A judged sample."""
        ...

    def estimate(self, name: str, seconds: float, mean_tokens: float) -> None:
        """After the pilot: how long the rest takes, and how long its responses are."""
        ...


@dataclass(kw_only=True, slots=True)
class Task:
    """A benchmark at one response limit.

    Attributes:
        name: what the watcher is told.
        loaded: the problems.
        folder: of its files.
        plan: what is asked of each problem.
        price: of tokens, for the estimate.
    """

    name: str
    loaded: LoadedBenchmark
    folder: EvaluationFolder
    plan: SamplingPlan
    price: Price | None

    def cost(self, opened: OpenedEngine) -> Cost:
        """What is missing, and what that costs at most."""
        known = self._done()
        asked = requests_for(self.loaded.problems, self.plan, opened.encode, known)
        prompts = [(len(request.prompt_tokens), len(request.indices)) for request in asked]
        return Cost(
            name=self.name,
            problems=len(self.loaded.problems),
            samples=self.plan.samples,
            missing=sum(count for _, count in prompts),
            wanted=self.plan.wanted(self.loaded.problems),
            max_tokens=self.plan.max_tokens,
            prompt_tokens=None if any(not n for n, _ in prompts) else sum(n * count for n, count in prompts),
            price=self.price,
        )

    def run(self, opened: OpenedEngine, judge: VerifierPool, watcher: Watcher) -> None:
        """Generate and judge what is missing, the pilot first."""
        with self.folder.writing(self.plan.shard) as path:
            missing = self.cost(opened).missing
            if not missing:
                return
            file = SampleFile(path)
            meter = Meter(self.folder.usage, gpus=opened.gpus, workers=lambda: judge.worker_pids, served=opened.served)
            try:
                if missing >= 4 * PILOT_SAMPLES:
                    began = time.monotonic()
                    rows = self._generate(opened, judge, watcher, file, meter, most=PILOT_SAMPLES)
                    mean = sum(row.tokens for row in rows) / len(rows)
                    seconds = (time.monotonic() - began) / len(rows) * (missing - len(rows))
                    watcher.estimate(self.name, seconds, mean)
                self._generate(opened, judge, watcher, file, meter)
            finally:
                file.close()
                meter.write(ended=True)

    def _generate(
        self,
        opened: OpenedEngine,
        judge: VerifierPool,
        watcher: Watcher,
        file: SampleFile,
        meter: Meter,
        most: int | None = None,
    ) -> list[SampleRow]:
        written: list[SampleRow] = []

        def write(row: SampleRow) -> None:
            file.append(row)
            written.append(row)
            meter.count(row)
            watcher.sample(self.name, row)

        run_job(
            self.loaded.problems,
            self.plan,
            opened.engine,
            judge,
            opened.encode,
            write=write,
            done=self._own(),
            progress=lambda done, total: watcher.progress(self.name, done, total),
            most=most,
        )
        return written

    def _own(self) -> list[SampleRow]:
        """Rows that exist of this shard's problems."""
        places = {problem.id: place for place, problem in enumerate(self.loaded.problems)}
        rows = self.folder.rows(self.plan.samples)
        return [row for row in rows if row.problem in places and self.plan.owns(places[row.problem])]

    def _done(self) -> dict[str, set[int]]:
        known: dict[str, set[int]] = {}
        for row in self._own():
            known.setdefault(row.problem, set()).add(row.sample)
        return known
