"""The difficulty step: N rollouts a problem at tau; what a model never or always solves teaches it nothing.

Samples are kept in ``work/samples-*.jsonl`` as they are judged, under the problem's id and a hash of its prompt and
golds: a kill loses none, and a rerun with other problems samples only the new ones. A sample's random numbers depend on
that name, not on the problem's place among the others.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from magicrl.evaluation.engines import OpenedEngine, model_checksums, open_engine
from magicrl.evaluation.job import SamplingPlan, run_job
from magicrl.evaluation.samples import SampleFile, SampleRow, read_samples
from magicrl.files import write_atomically
from magicrl.models.model_files import find_model
from magicrl.models.small_models import find_gguf, prepare_gguf_package
from magicrl.pipeline.card import bars
from magicrl.pipeline.entry import Entry, entries_of
from magicrl.pipeline.frame import Context, Decide, Decision, Drop, Step, by_entry
from magicrl.pipeline.maths_rules import note_of
from magicrl.pipeline.parts import Part, StepFolder, hash_of, read_part
from magicrl.pipeline.pipeline_schema import DifficultyStep, EarlyStop
from magicrl.records import Problem
from magicrl.rollout.engines import EngineSettings
from magicrl.verifiers.base import JudgeOptions
from magicrl.verifiers.pool import VerifierPool


def chance_of_the_same(counted: int, total: int, prior: float) -> float:
    """The chance that all further samples turn out as all before did.

    The pass rate has a Beta(prior, prior) distribution; after ``counted`` equal outcomes the rest of ``total`` is equal
    with probability B(prior + total, prior) / B(prior + counted, prior).

    Example:
        >>> round(chance_of_the_same(4, 16, 0.5), 3)
        0.512
        >>> chance_of_the_same(16, 16, 0.5)
        1.0
    """
    assert 0 <= counted <= total, (counted, total)
    return math.exp(_log_beta(prior + total, prior) - _log_beta(prior + counted, prior))


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def is_closed(correct: int, counted: int, total: int, rule: EarlyStop) -> bool:
    """Whether it is settled that the problem is solved sometimes, or sure enough that it is never or always.

    Args:
        correct: right samples so far.
        counted: judged samples so far.
        total: N.
        rule: first round, confidence and prior.
    """
    if counted >= total or 0 < correct < counted:
        return True
    return counted >= rule.first and chance_of_the_same(counted, total, rule.prior) >= rule.confidence


def failures_of_sixteen(correct: int, counted: int) -> int:
    """``model_difficulty`` as it was released: failures of 16; 0 and 16 only where every sample says so.

    Example:
        >>> [failures_of_sixteen(correct, 8) for correct in (0, 1, 7, 8)]
        [16, 14, 2, 0]
        >>> failures_of_sixteen(63, 64)
        1
    """
    assert 0 <= correct <= counted
    assert counted > 0
    scaled = round(16 * (counted - correct) / counted)
    return min(max(scaled, int(correct < counted)), 16 - int(correct > 0))


ABILITIES = {"math": "maths", "code": "code"}


def difficulty_table(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """By ability: problems, never (0/N), always (N/N) and sometimes solved, and what could not be measured.

    Args:
        document: ``counts.json`` of the difficulty step: ``counts`` holds (ability, correct, judged, N) by problem.
    """
    overlong = set(document["overlong"])
    table: list[dict[str, Any]] = []
    for ability, word in ABILITIES.items():
        rows = [(name, row) for name, row in document["counts"].items() if row[0] == ability]
        measured = [row for name, row in rows if row[2] > 0 and name not in overlong]
        if not rows:
            continue
        never = sum(correct == 0 for _, correct, _, _ in measured)
        always = sum(correct == counted for _, correct, counted, _ in measured)
        table.append(
            {
                "ability": word,
                "problems": len(measured),
                "never": never,
                "always": always,
                "kept": len(measured) - never - always,
                "unmeasured": len(rows) - len(measured),
            }
        )
    return table


def write_difficulty_report(document: Mapping[str, Any], folder: Path) -> str:
    """Write ``difficulty.json``, ``difficulty.txt`` and ``difficulty.svg``; returns the text."""
    table = difficulty_table(document)
    told: dict[str, Any] = {
        "model": document["model"],
        "temperature": document["temperature"],
        "max_tokens": document["max_tokens"],
        "samples": document["samples"],
        "table": table,
        "early_stop": document["early_stop"],
    }
    lines = [f"difficulty under {document['model']} (tau {document['temperature']:g}, T {document['max_tokens']})"]
    lines.append(f"{'':8}{'problems':>10}{'0/N':>10}{'N/N':>10}{'kept':>10}{'unmeasured':>12}")
    for row in table:
        shares = [f"{100 * row[name] / max(1, row['problems']):.1f} %" for name in ("never", "always", "kept")]
        cells = "".join(f"{share:>10}" for share in shares)
        lines.append(f"{row['ability']:8}{row['problems']:>10}{cells}{row['unmeasured']:>12}")
    samples = document["samples"]
    lines.append(f"{samples['made']} of {samples['wanted']} samples made")
    if document["early_stop"] is not None:
        wrong = expected_errors(document["counts"].values(), EarlyStop.model_validate(document["early_stop"]))
        told["expected_errors"] = round(wrong, 2)
        share = samples["saved"] / max(1, samples["wanted"])
        lines.append(
            f"early stopping saved {samples['saved']} samples ({100 * share:.1f} %); of the problems closed early as "
            f"never or always solved, {wrong:.1f} are expected to be neither"
        )
    text = "\n".join(lines)
    write_atomically(folder / "difficulty.json", json.dumps(told, indent=1))
    write_atomically(folder / "difficulty.txt", text + "\n")
    write_atomically(folder / "difficulty.svg", _picture(document))
    return text


def expected_errors(counts: Sequence[Any] | Any, rule: EarlyStop) -> float:
    """How many of the problems closed early as never or always solved are expected to be neither."""
    closed = [(n, total) for _, correct, n, total in counts if 0 < n < total and correct in (0, n)]
    return sum(1 - chance_of_the_same(n, total, rule.prior) for n, total in closed)


def _picture(document: Mapping[str, Any]) -> str:
    """Problems by failures of 16."""
    found = Counter(
        failures_of_sixteen(correct, counted) for _, correct, counted, _ in document["counts"].values() if counted
    )
    labels = [str(failures) for failures in range(17)]
    return bars(
        f"Problems by failures of 16, {document['model']}",
        labels,
        [found[failures] for failures in range(17)],
        faint={0, 16},
        note="0: always solved, 16: never solved; both are dropped",
    )


PILOT_SAMPLES = 32
UNFIT = "prompt unfit for the model"


@dataclass(slots=True)
class Count:
    """Samples of one problem: which exist, how many were judged, how many are right."""

    total: int
    ability: str
    indices: set[int] = field(default_factory=set[int])
    counted: int = 0
    correct: int = 0

    def add(self, row: SampleRow) -> None:
        """Count a sample, each index once."""
        if row.sample not in self.indices:
            self.indices.add(row.sample)
            self.counted += row.counted
            self.correct += row.counted and row.correct


class Difficulty(Step[DifficultyStep]):
    """Measures first, with one engine; then rows are dropped or get their ``model_difficulty``."""

    use = "difficulty"

    @property
    def label(self) -> str:
        """The model's name in ``model_difficulty``."""
        sampler = self._settings.sampler
        return self._settings.label or Path(sampler.model or sampler.gguf_package or "").name

    def identity(self, context: Context) -> Any:
        known = self._settings.model_dump(mode="json", exclude={"name"})
        sampler = self._settings.sampler
        for name in ("max_rows", "memory_limit_mb", "threads", "device"):
            known["sampler"].pop(name)
        known["sampler"]["options"] = {name: v for name, v in sampler.options.items() if name in ("mode", "tokenizer")}
        if sampler.gguf_package is not None:
            known["weights"] = hashlib.sha256(find_gguf(sampler.gguf_package).read_bytes()).hexdigest()
        elif sampler.engine != "openai":
            known["weights"] = model_checksums(find_model(self._model(context)))
            known["sampler"].pop("model")  # the same weights in another place give the same samples
        return known

    def _model(self, context: Context) -> str:
        sampler = self._settings.sampler
        if sampler.gguf_package is not None:
            return str(prepare_gguf_package(sampler.gguf_package, context.output / "models" / sampler.gguf_package))
        assert sampler.model is not None, "the schema checks it"
        return sampler.model

    def prepare(self, parts: Sequence[Part], folder: StepFolder, context: Context) -> None:
        path = folder.work / "counts.json"
        settings = self._settings
        problems, counts = self._problems(parts)
        samples = folder.work / f"samples-{hash_of(self._sampling_identity(context))[:12]}.jsonl"
        for row in read_samples([samples]) if samples.exists() else ():
            if row.problem in counts:
                counts[row.problem].add(row)
        overlong: dict[str, str] = {}
        if any(self._open(count) for count in counts.values()):
            sampler = settings.sampler
            opened = open_engine(
                sampler.engine,
                EngineSettings(
                    model=self._model(context),
                    dtype=sampler.dtype,
                    device=sampler.device,
                    max_rows=sampler.max_rows,
                    memory_limit_mb=sampler.memory_limit_mb,
                    threads=sampler.threads,
                    options=dict(sampler.options),
                ),
            )
            try:
                overlong = self._overlong(problems, opened)
                fitting = [problem for problem in problems if problem.id not in overlong]
                self._sample(fitting, counts, opened, samples, context)
            finally:
                opened.engine.close()
        wanted = sum(count.total for name, count in counts.items() if name not in overlong)
        made = sum(len(count.indices) for count in counts.values())
        document = {
            "model": self.label,
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
            "samples": {"wanted": wanted, "made": made, "saved": wanted - made},
            "early_stop": None if settings.early_stop is None else settings.early_stop.model_dump(),
            "overlong": overlong,
            "counts": {name: [c.ability, c.correct, c.counted, c.total] for name, c in counts.items()},
        }
        write_atomically(path, json.dumps(document))

    def _sampling_identity(self, context: Context) -> Any:
        """What a single sample depends on: how many are wanted, and when to stop, is no part of it."""
        known = dict(self.identity(context))
        for name in ("samples", "code_samples", "early_stop", "keep", "label", "overlong_prompts"):
            known.pop(name)
        return known

    def _problems(self, parts: Sequence[Part]) -> tuple[list[Problem], dict[str, Count]]:
        problems: list[Problem] = []
        counts: dict[str, Count] = {}
        for part in parts:
            for entry in entries_of(read_part(part.path)):
                name = sampled_name(entry)
                problems.append(replace(entry.as_problem(), id=name))
                code = entry.ability == "code"
                total = self._settings.code_samples if code else self._settings.samples
                counts[name] = Count(total, entry.ability)
        return problems, counts

    def _open(self, count: Count) -> bool:
        """Whether the problem still needs samples."""
        rule = self._settings.early_stop
        if len(count.indices) >= count.total:
            return False
        return rule is None or not is_closed(count.correct, count.counted, count.total, rule)

    def _overlong(self, problems: Sequence[Problem], opened: OpenedEngine) -> dict[str, str]:
        """Problems that cannot be put to the model, with the reason.

        Raises:
            ValueError: there is one and the settings say that there must be none, or no prompt could fit at all.
        """
        room = opened.max_context - self._settings.max_tokens
        if room <= 0:
            raise ValueError(
                f"max_tokens = {self._settings.max_tokens} leaves no room for a prompt in the model's context of "
                f"{opened.max_context} tokens; set it lower"
            )
        found: dict[str, str] = {}
        for problem in problems:
            try:
                tokens = len(opened.encode(problem))
            except ValueError as error:  # longer than the whole context, or with symbols that the model lacks
                found[problem.id] = str(error)
                continue
            if tokens > room:
                found[problem.id] = f"{tokens} tokens, and {room} fit beside max_tokens = {self._settings.max_tokens}"
        if found and self._settings.overlong_prompts == "error":
            name, why = next(iter(found.items()))
            raise ValueError(f"{len(found)} prompts cannot be put to the model, e.g. {name}: {why}")
        return found

    def _sample(
        self,
        problems: Sequence[Problem],
        counts: Mapping[str, Count],
        opened: OpenedEngine,
        path: Path,
        context: Context,
    ) -> None:
        """Rounds of samples; without early stopping there is one."""
        settings = self._settings
        reasoning = settings.reasoning or ("required" if opened.opens_reasoning else "auto")
        judging = JudgeOptions(reasoning=reasoning, extract=settings.extract)
        self._tell_cost(problems, counts, context)
        file = SampleFile(path)
        try:
            with VerifierPool(options=judging, time_limit=settings.time_limit, workers=context.workers) as judge:
                rounds = _Rounds(settings=settings, counts=counts, opened=opened, judge=judge, file=file, path=path)
                rounds.run(problems, context, self._open)
        finally:
            file.close()

    def _tell_cost(self, problems: Sequence[Problem], counts: Mapping[str, Count], context: Context) -> None:
        missing = sum(counts[p.id].total - len(counts[p.id].indices) for p in problems if self._open(counts[p.id]))
        context.watcher.note(
            f"{self.label}: {len(problems)} problems, {missing} samples to make at most, "
            f"{missing * self._settings.max_tokens} tokens at most"
        )

    def decide(self, folder: StepFolder) -> Decide:
        document = json.loads((folder.work / "counts.json").read_text(encoding="utf-8"))
        counts, overlong = document["counts"], document["overlong"]

        def one(entry: Entry) -> Decision:
            name = sampled_name(entry)
            if name in overlong:
                return Drop(UNFIT, overlong[name])
            _, correct, counted, total = counts[name]
            if counted == 0:
                return Drop("no sample could be judged", f"{total} samples")
            if self._settings.keep == "sometimes" and correct in (0, counted):
                word = "never solved" if correct == 0 else "always solved"
                return Drop(f"{word} by {self.label}", f"{correct} of {counted} judged samples right, N = {total}")
            difficulty = {**entry.difficulty, self.label: failures_of_sixteen(correct, counted)}
            rates = {**entry.notes.get("pass_rate", {}), self.label: [correct, counted]}
            return replace(entry, difficulty=difficulty, notes=note_of(entry, pass_rate=rates))

        return by_entry(one)

    def finish(self, parts: Sequence[Part], folder: StepFolder, context: Context) -> None:
        """``work/difficulty.{txt,json,svg}``: the report's table for this model."""
        document = json.loads((folder.work / "counts.json").read_text(encoding="utf-8"))
        context.watcher.note(write_difficulty_report(document, folder.work))


@dataclass(kw_only=True, slots=True)
class _Rounds:
    """The sampling job in rounds: after each, problems that are settled get no more samples."""

    settings: DifficultyStep
    counts: Mapping[str, Count]
    opened: OpenedEngine
    judge: VerifierPool
    file: SampleFile
    path: Path

    def run(self, problems: Sequence[Problem], context: Context, needs_more: Any) -> None:
        rule = self.settings.early_stop
        most = max((self.counts[problem.id].total for problem in problems), default=0)
        first = rule.first if rule is not None else most
        piloted = False
        for bound in range(first, most + first, first):
            waiting = [problem for problem in problems if needs_more(self.counts[problem.id])]
            groups: dict[int, list[Problem]] = {}
            for problem in waiting:
                groups.setdefault(min(bound, self.counts[problem.id].total), []).append(problem)
            if groups and not piloted:  # of the most: a handful of code problems says nothing of the rest
                piloted = True
                total = max(groups, key=lambda total: total * len(groups[total]))
                self._pilot(groups[total], total, waiting, context)
            for total in sorted(groups):
                self._job(groups[total], total, context, None)

    def _pilot(self, some: Sequence[Problem], total: int, waiting: Sequence[Problem], context: Context) -> None:
        """A few samples over many problems, and from them what the rest costs."""
        missing = sum(self.counts[p.id].total - len(self.counts[p.id].indices) for p in waiting)
        if missing < 4 * PILOT_SAMPLES:
            return
        began = time.monotonic()
        rows = self._job(some, total, context, PILOT_SAMPLES)
        if rows:
            seconds = (time.monotonic() - began) / len(rows) * (missing - len(rows))
            mean = sum(row.tokens for row in rows) / len(rows)
            context.watcher.note(
                f"pilot: {mean:.0f} tokens a sample; the rest takes about {seconds / 60:.1f} minutes"
                + (" without early stopping" if self.settings.early_stop is not None else "")
            )

    def _job(self, some: Sequence[Problem], total: int, context: Context, most: int | None) -> list[SampleRow]:
        plan = SamplingPlan(
            samples=total,
            temperature=self.settings.temperature,
            max_tokens=self.settings.max_tokens,
            seed=self.settings.seed,
            draws={problem.id: draw_of(problem.id) for problem in some},
        )
        written: list[SampleRow] = []

        def write(row: SampleRow) -> None:
            self.file.append(row)
            self.counts[row.problem].add(row)
            if most is not None:
                written.append(row)

        run_job(
            some,
            plan,
            self.opened.engine,
            self.judge,
            self.opened.encode,
            write=write,
            done=read_samples([self.path]),
            progress=lambda done, of: context.watcher.progress("difficulty", done, of, "samples"),
            most=most,
        )
        return written


def sampled_name(entry: Entry) -> str:
    """The name that samples are kept under: another prompt or gold is another problem."""
    return f"{entry.id}@{hash_of(entry.prompt, list(entry.golds))[:12]}"


def draw_of(name: str) -> int:
    """A 48-bit draw number that depends on the problem alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
