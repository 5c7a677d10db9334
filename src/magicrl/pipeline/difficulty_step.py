"""The difficulty step: N rollouts per problem; a model learns nothing from problems it never or always solves.

Every sample is written to ``work/samples-*.jsonl`` when it is judged, under the problem's id and a hash of its prompt
and reference answers. A kill loses no sample, and a rerun with other problems samples only the new ones. The random
numbers of a sample depend on that name, not on the order of the problems.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import betaln

from magicrl.evaluation.engines import OpenedEngine, model_checksums, open_engine
from magicrl.evaluation.job import SamplingPlan, run_job
from magicrl.evaluation.samples import SampleFile, SampleRow, read_samples
from magicrl.files import write_atomically
from magicrl.models.model_files import find_model
from magicrl.models.small_models import find_gguf, prepare_gguf_package
from magicrl.pipeline.card import bars
from magicrl.pipeline.entry import Entry, entries_of
from magicrl.pipeline.frame import Context, Decide, Decision, Drop, PipelineStep, by_entry
from magicrl.pipeline.parts import Part, StepFolder, hash_of, read_part
from magicrl.pipeline.pipeline_schema import DifficultyStep, EarlyStop
from magicrl.records import Problem, SamplingParams
from magicrl.rollout.engine_settings import EngineSettings
from magicrl_verifiers.records import JudgeOptions
from magicrl_verifiers.references import file_fingerprint
from magicrl_verifiers.service import VerifierPool


def chance_of_the_same(counted: int, total: int, prior: float) -> float:
    """Return the probability that all further samples have the same outcome as all previous ones.

    The pass rate has a Beta(prior, prior) distribution; after ``counted`` equal outcomes the rest of ``total`` is equal
    with probability B(prior + total, prior) / B(prior + counted, prior).

    Example:
        >>> round(chance_of_the_same(4, 16, 0.5), 3)
        0.512
        >>> chance_of_the_same(16, 16, 0.5)
        1.0
    """
    assert 0 <= counted <= total, (counted, total)
    return float(np.exp(betaln(prior + total, prior) - betaln(prior + counted, prior)))


def is_closed(correct: int, counted: int, total: int, rule: EarlyStop) -> bool:
    """Return whether a problem needs no more samples.

    This is so if it is sometimes solved, or never or always solved with enough confidence.

    Args:
        correct: Number of correct samples.
        counted: Number of judged samples.
        total: Number of samples wanted.
        rule: Confidence and prior.
    """
    # one correct and one wrong sample settle "sometimes"
    if counted >= total or 0 < correct < counted:
        return True
    return counted >= rule.first and chance_of_the_same(counted, total, rule.prior) >= rule.confidence


def failures_of_sixteen(correct: int, counted: int) -> int:
    """Return ``model_difficulty`` in the released form: failures of 16. Only unanimous samples give 0 or 16.

    Example:
        >>> [failures_of_sixteen(correct, 8) for correct in (0, 1, 7, 8)]
        [16, 14, 2, 0]
        >>> failures_of_sixteen(63, 64)
        1
    """
    assert 0 <= correct <= counted
    assert counted > 0
    scaled = round(16 * (counted - correct) / counted)
    # rounding must not turn a problem that is sometimes solved into 0 or 16, which are dropped
    return min(max(scaled, int(correct < counted)), 16 - int(correct > 0))


def is_measured(correct: int, counted: int, total: int, rule: EarlyStop | None) -> bool:
    """Return whether enough samples were judged: half of them, or as many as the stopping rule needs.

    Also one correct and one wrong sample are enough. Other problems say more about the verifier's failures.
    """
    return (
        2 * counted >= total or 0 < correct < counted or (rule is not None and is_closed(correct, counted, total, rule))
    )


ABILITIES = {"math": "maths", "code": "code"}
UNFIT = "prompt unfit for the model"
_FREE = {
    *("base_url", "key_variable", "concurrency", "attempts", "attempt_seconds", "total_seconds"),
    *("max_rows", "gpus", "cache_mb", "gpu_share", "eager", "logprobs", "processed_logprobs", "max_tokens_field"),
}
"""Options of an engine that do not affect samples."""
_PILOT = 32  # samples


@dataclass(slots=True)
class Count:
    """Samples of a problem: their indices, how many were judged, and how many are correct."""

    total: int
    ability: str
    indices: set[int] = field(default_factory=set[int])
    counted: int = 0
    correct: int = 0

    def add(self, row: SampleRow) -> None:
        """Count a sample, each index once. The file may hold more than this run wants, from one with a larger N."""
        if row.sample < self.total and row.sample not in self.indices:
            self.indices.add(row.sample)
            self.counted += row.counted
            self.correct += row.counted and row.correct

    @property
    def missing(self) -> int:
        return self.total - len(self.indices)

    def is_open(self, rule: EarlyStop | None) -> bool:
        """Return whether the problem needs more samples."""
        return self.missing > 0 and (rule is None or not is_closed(self.correct, self.counted, self.total, rule))


class Difficulty(PipelineStep[DifficultyStep]):
    """Samples all problems first, then drops rows or adds their ``model_difficulty``."""

    use = "difficulty"
    version = 2

    def identity(self, context: Context) -> Any:
        sampler = self._settings.sampler
        costs = {"max_rows", "memory_limit_mb", "threads", "device"}  # do not affect samples
        known = self._settings.model_dump(mode="json", exclude={"name": True, "sampler": costs})
        known["sampler"]["options"] = {name: v for name, v in sampler.options.items() if name not in _FREE}
        if (code := file_fingerprint(sampler.engine)) is not None:  # of a custom engine
            known["engine_sha256"] = code
        if sampler.gguf_package is not None:
            known["weights"] = hashlib.sha256(find_gguf(sampler.gguf_package).read_bytes()).hexdigest()
        elif sampler.engine != "openai":
            known["weights"] = model_checksums(find_model(self._model(context)))
            known["sampler"].pop("model")  # the same weights elsewhere give the same samples
        return known

    @property
    def _drops(self) -> bool:
        """Whether problems that are never or always solved are dropped."""
        return self._settings.keep == "sometimes"

    def _model(self, context: Context) -> str:
        sampler = self._settings.sampler
        if sampler.gguf_package is not None:
            return str(prepare_gguf_package(sampler.gguf_package, context.output / "models" / sampler.gguf_package))
        assert sampler.model is not None, "the schema checks it"
        return sampler.model

    def prepare(self, parts: Sequence[Part], folder: StepFolder, context: Context) -> None:
        settings = self._settings
        problems: list[Problem] = []
        counts: dict[str, Count] = {}
        for entry in (entry for part in parts for entry in entries_of(read_part(part.path))):
            name = sampled_name(entry)
            problems.append(replace(entry.as_problem(), id=name))
            counts[name] = Count(settings.code_samples if entry.ability == "code" else settings.samples, entry.ability)
        # the number of samples and the stopping rule do not affect a single sample
        known: dict[str, Any] = self.identity(context)
        for name in ("samples", "code_samples", "early_stop", "keep", "label", "overlong_prompts"):
            known.pop(name)
        samples = folder.work / f"samples-{hash_of(known)[:12]}.jsonl"
        for row in read_samples([samples]) if samples.exists() else ():
            # a sample that was not judged is made again
            if row.problem in counts and row.counted:
                counts[row.problem].add(row)
        overlong: dict[str, str] = {}
        if any(count.is_open(settings.early_stop) for count in counts.values()):
            own: dict[str, Any] = settings.sampler.model_dump(exclude={"engine", "gguf_package", "model"})
            opened = open_engine(settings.sampler.engine, EngineSettings(model=self._model(context), **own))
            try:
                overlong = self._overlong(problems, opened)
                fitting = [problem for problem in problems if problem.id not in overlong]
                self._sample(fitting, counts, opened, samples, context)
            finally:
                opened.engine.close()
        wanted = sum(count.total for name, count in counts.items() if name not in overlong)
        made = sum(len(count.indices) for count in counts.values())
        document = {
            "model": settings.model_label,
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
            "samples": {"wanted": wanted, "made": made, "saved": wanted - made},
            "early_stop": None if settings.early_stop is None else settings.early_stop.model_dump(),
            "overlong": overlong,
            "counts": {name: [c.ability, c.correct, c.counted, c.total] for name, c in counts.items()},
        }
        write_atomically(folder.work / "counts.json", json.dumps(document))

    def _overlong(self, problems: Sequence[Problem], opened: OpenedEngine) -> dict[str, str]:
        """Return the problems whose prompt does not fit, with the reason.

        Raises:
            ValueError: There is such a problem and the settings make it an error, or no prompt can fit.
        """
        limit = self._settings.max_tokens
        room = opened.max_context - limit
        if room <= 0:
            raise ValueError(
                f"max_tokens = {limit} leaves no room for a prompt in the model's context of {opened.max_context} "
                "tokens; set it lower"
            )
        found: dict[str, str] = {}
        for problem in problems:
            try:
                tokens = len(opened.encode(problem))
            except ValueError as error:  # longer than the context, or with symbols that the model lacks
                found[problem.id] = str(error)
                continue
            if tokens > room:
                found[problem.id] = f"{tokens} tokens, and {room} fit beside max_tokens = {limit}"
        if found and self._settings.overlong_prompts == "error":
            name, why = next(iter(found.items()))
            raise ValueError(f"{len(found)} prompts cannot be encoded for the model, e.g. {name}: {why}")
        return found

    def _sample(
        self,
        problems: Sequence[Problem],
        counts: Mapping[str, Count],
        opened: OpenedEngine,
        path: Path,
        context: Context,
    ) -> None:
        """Sample in rounds. Closed problems get no more samples. Without early stopping there is one round."""
        settings, rule = self._settings, self._settings.early_stop
        # if the template opens <think>, a response without </think> has no answer
        reasoning = settings.reasoning or ("required" if opened.opens_reasoning else "auto")
        options = JudgeOptions(reasoning=reasoning, extract=settings.extract)
        pool = VerifierPool(options=options, time_limit=settings.time_limit, workers=context.workers)
        with pool as judge, closing(SampleFile(path)) as file:

            def job(some: Sequence[Problem], total: int, most: int | None = None) -> list[int]:
                """Make the missing samples up to ``total`` and return their numbers of tokens."""
                tokens: list[int] = []

                def write(row: SampleRow) -> None:
                    file.append(row)
                    counts[row.problem].add(row)
                    tokens.append(row.tokens)

                plan = SamplingPlan(
                    samples=total,
                    sampling=SamplingParams(
                        temperature=settings.temperature, max_tokens=settings.max_tokens, seed=settings.seed
                    ),
                    # by name, so that other problems in the list do not change a problem's samples
                    draws={problem.id: draw_of(problem.id) for problem in some},
                )
                run_job(
                    some,
                    plan,
                    opened.engine,
                    judge,
                    opened.encode,
                    write=write,
                    done=(
                        row
                        for row in read_samples([path])
                        if row.problem in counts and row.sample in counts[row.problem].indices
                    ),
                    progress=lambda done, of: context.watcher.progress(self.use, done, of, "samples"),
                    most=most,
                )
                return tokens

            longest = max((counts[problem.id].total for problem in problems), default=0)
            first = longest if rule is None else rule.first
            # maths and code problems have different N
            for bound in range(first, longest + first, first):
                groups: dict[int, list[Problem]] = {}
                for problem in problems:
                    count = counts[problem.id]
                    if count.is_open(rule):
                        groups.setdefault(min(bound, count.total), []).append(problem)
                if bound == first:  # samples of the pilot are kept, so it costs nothing
                    self._tell_cost(groups, counts, job, context)
                for total in sorted(groups):
                    job(groups[total], total)

    def _tell_cost(
        self,
        groups: Mapping[int, Sequence[Problem]],
        counts: Mapping[str, Count],
        job: Callable[[Sequence[Problem], int, int], list[int]],
        context: Context,
    ) -> None:
        """Show the largest cost of sampling. For many samples, a pilot over a few problems estimates the time."""
        missing = sum(counts[problem.id].missing for some in groups.values() for problem in some)
        label, tokens_each = self._settings.model_label, self._settings.max_tokens
        context.watcher.note(f"{label}: {missing} samples to make at most, {missing * tokens_each} tokens at most")
        # a pilot is pointless if it is a large part of the work
        if missing < 4 * _PILOT:
            return
        # from the larger group: a few code problems say nothing about maths problems
        total = max(groups, key=lambda total: total * len(groups[total]))
        began = time.monotonic()
        tokens = job(groups[total], total, _PILOT)
        if tokens:
            minutes = (time.monotonic() - began) / len(tokens) * (missing - len(tokens)) / 60
            mean = sum(tokens) / len(tokens)
            context.watcher.note(f"pilot: {mean:.0f} tokens a sample; all the rest takes about {minutes:.1f} minutes")

    def decide(self, folder: StepFolder) -> Decide:
        document = json.loads((folder.work / "counts.json").read_text(encoding="utf-8"))
        counts, overlong, label = document["counts"], document["overlong"], self._settings.model_label
        rule = self._settings.early_stop

        def one(entry: Entry) -> Decision:
            name = sampled_name(entry)
            if name in overlong:
                return Drop(UNFIT, overlong[name])
            _, correct, counted, total = counts[name]
            if not is_measured(correct, counted, total, rule):
                return Drop("too few samples could be judged", f"{counted} of {total} samples")
            if self._drops and correct in (0, counted):
                word = "never solved" if correct == 0 else "always solved"
                return Drop(f"{word} by {label}", f"{correct} of {counted} judged samples right, N = {total}")
            difficulty = {**entry.difficulty, label: failures_of_sixteen(correct, counted)}
            rates = {**entry.notes.get("pass_rate", {}), label: [correct, counted]}
            return replace(entry, difficulty=difficulty, notes={**entry.notes, "pass_rate": rates})

        return by_entry(one)

    def finish(self, parts: Sequence[Part], folder: StepFolder, context: Context) -> None:
        """Write ``work/difficulty.{txt,json,svg}``: the report's table for this model."""
        document = json.loads((folder.work / "counts.json").read_text(encoding="utf-8"))
        told, text = difficulty_report(document, drops=self._drops)
        measured = _measured(document, self._settings.early_stop)
        failures = Counter(failures_of_sixteen(correct, counted) for _, correct, counted, _ in measured)
        picture = bars(
            f"Problems by failures of 16, {document['model']}",
            [failures[number] for number in range(17)],
            faint={0, 16} if self._drops else (),
            note=f"0: always solved, 16: never solved; both are {'dropped' if self._drops else 'kept'}",
        )
        write_atomically(folder.work / "difficulty.json", json.dumps(told, indent=1))
        write_atomically(folder.work / "difficulty.txt", text + "\n")
        write_atomically(folder.work / "difficulty.svg", picture)
        context.watcher.note(text)
        unmeasured = len(document["counts"]) - len(document["overlong"]) - len(measured)
        if unmeasured:
            context.watcher.note(
                f"{unmeasured} problems were dropped because too few of their samples could be judged; "
                f"to judge them again, delete {folder.kept}, {folder.work / 'prepared.key'} and the folders of later "
                "steps, and run the same command again"
            )


def _measured(document: Mapping[str, Any], rule: EarlyStop | None) -> list[tuple[str, int, int, int]]:
    """Return (ability, correct, judged, N) of each problem that fits the model and of which enough was judged."""
    return [
        (ability, correct, counted, total)
        for name, (ability, correct, counted, total) in document["counts"].items()
        if name not in document["overlong"] and is_measured(correct, counted, total, rule)
    ]


def difficulty_report(document: Mapping[str, Any], *, drops: bool) -> tuple[dict[str, Any], str]:
    """Count never (0/N), always (N/N) and sometimes solved problems by ability, and those with too few judged samples.

    Args:
        document: Contents of ``counts.json``, with (ability, correct, judged, N) by problem.
        drops: Only problems that are sometimes solved are kept.

    Returns:
        The counts as JSON values, and as text.
    """
    rule = None if document["early_stop"] is None else EarlyStop.model_validate(document["early_stop"])
    lines = [f"difficulty under {document['model']} (tau {document['temperature']:g}, T {document['max_tokens']})"]
    rest = "kept" if drops else "sometimes"
    lines.append(f"{'':8}{'problems':>10}{'0/N':>10}{'N/N':>10}{rest:>10}{'unmeasured':>12}")
    table: list[dict[str, Any]] = []
    known = _measured(document, rule)
    for ability, word in ABILITIES.items():
        rows = sum(row[0] == ability for row in document["counts"].values())
        measured = [row for row in known if row[0] == ability]
        never = sum(correct == 0 for _, correct, _, _ in measured)
        always = sum(correct == counted for _, correct, counted, _ in measured)
        shares = {"never": never, "always": always, rest: len(measured) - never - always}
        if rows:
            unmeasured = rows - len(measured)
            table.append({"ability": word, "problems": len(measured), **shares, "unmeasured": unmeasured})
            cells = "".join(f"{f'{100 * n / max(1, len(measured)):.1f} %':>10}" for n in shares.values())
            lines.append(f"{word:8}{len(measured):>10}{cells}{unmeasured:>12}")
    samples = document["samples"]
    lines.append(f"{samples['made']} of {samples['wanted']} samples made")
    told = {name: document[name] for name in ("model", "temperature", "max_tokens", "samples", "early_stop")}
    told["table"] = table
    if rule is not None:
        closed = [(n, total) for _, correct, n, total in known if correct in (0, n) and n < total]
        # the expected number of problems for which a further sample would have had another outcome
        wrong = sum(1 - chance_of_the_same(n, total, rule.prior) for n, total in closed)
        told["expected_errors"] = round(wrong, 2)
        share = samples["saved"] / max(1, samples["wanted"])
        lines.append(
            f"early stopping saved {samples['saved']} samples ({100 * share:.1f} %); of the problems closed early as "
            f"never or always solved, {wrong:.1f} are expected to be neither"
        )
    return told, "\n".join(lines)


def sampled_name(entry: Entry) -> str:
    """Return the name of a problem in the sample file. Another prompt or reference answer gives another name."""
    return f"{entry.id}@{hash_of(entry.prompt, list(entry.references))[:12]}"


def draw_of(name: str) -> int:
    """Return a 48-bit draw number that depends only on the problem."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
