"""Responses to read on a page: of tests and evaluations side by side, and of a run's recorded rollouts.

A browser shows the same problems in several columns (before and after, variants, models). A page holds a bounded part of
them, chosen so that every kind of outcome is there, and says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from magicrl.evaluation.samples import AskedProblem, SampleRow
from magicrl.reporting.variants import Variant
from magicrl.reporting.read_folders import (
    EvaluatedSample,
    Evaluation,
    RecordedEvaluation,
    RecordedRun,
    RunFolderError,
    SampledResponse,
    by_benchmark,
    evaluated,
)
from magicrl.reporting.scores import comparisons
from magicrl.reporting.wording import temperature, visible

Kind: TypeAlias = Literal["lost", "won", "wrong", "truncated", "not_judged", "right"]
KINDS: tuple[Kind, ...] = ("lost", "won", "wrong", "truncated", "not_judged", "right")

MOST_PROBLEMS = 60
"""Problems of one set on a page."""
MOST_CHARACTERS = 600_000
"""Of all responses of one set on a page."""
HEAD, TAIL = 1_500, 2_500
"""Characters at the two ends of a long response that are shown: the answer stands at its end."""
MOST_VARIANTS = 3
"""Variants side by side, behind the start."""
MOST_COLUMNS = 4
"""Evaluations side by side; the responses of further ones are in their folders."""

Answer: TypeAlias = SampledResponse | SampleRow
Column: TypeAlias = Sequence[Answer]
"""A problem's responses of one model."""


class AnswerRow(NamedTuple):
    """Responses side by side, one a column; None where a column has none."""

    label: str
    answers: tuple[Answer | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Browsed:
    """One problem."""

    id: str
    prompt: str
    reference: str
    marks: tuple[tuple[str, ...], ...]  # by column the outcome of every sample, shown or not
    rows: tuple[AnswerRow, ...]  # the responses that are shown
    kinds: frozenset[Kind]  # what there is to find in it

    @property
    def size(self) -> int:
        """Characters on the page."""
        texts = (clipped(answer.text) for row in self.rows for answer in row.answers if answer is not None)
        return len(self.prompt) + sum(len(text) for text in texts)


class SampleBrowser(NamedTuple):
    """The problems of one set that a page shows, in the order of the set."""

    name: str
    columns: tuple[str, ...]
    items: tuple[Browsed, ...]
    total: int  # problems that there were to choose from
    counts: Mapping[Kind, int]  # problems of each kind, of all there were
    kind_words: Mapping[Kind, str]  # what the filter calls each kind that is there
    note: str = ""  # how the outcome of a column is told from several samples; empty where each has one


def browser(name: str, columns: Sequence[str], problems: Sequence[Browsed], *, note: str = "") -> SampleBrowser:
    """The browser of one set, with at most ``MOST_PROBLEMS`` problems and ``MOST_CHARACTERS`` characters."""
    counts: dict[Kind, int] = {kind: sum(kind in problem.kinds for problem in problems) for kind in KINDS}
    words: dict[Kind, str] = {kind: kind.replace("_", " ") for kind in KINDS[2:]}
    if len(columns) > 1:  # what changed needs two columns
        first, others = columns if len(columns) == 2 else ("the first", "another")
        moved = "{} {}, {} {}" if first == "before" else "{1}: {0}, {3}: {2}"
        lost, won = moved.format("right", first, "wrong", others), moved.format("wrong", first, "right", others)
        words = {"lost": lost, "won": won, **words}
    there: dict[Kind, str] = {kind: text for kind, text in words.items() if counts[kind]}
    return SampleBrowser(name, tuple(columns), tuple(chosen(problems)), len(problems), counts, there, note)


def kinds_of(columns: Sequence[Column]) -> frozenset[Kind]:
    """What a problem's responses are, from those of each column.

    A column is right where at least half of its judged responses are. ``lost``: the first column is right and another
    is not; ``won``: the other way round.
    """
    every = [answer for column in columns for answer in column]
    verdicts = [_right(column) for column in columns] or [None]
    first, others = verdicts[0], verdicts[1:]
    present: dict[Kind, bool] = {
        "wrong": any(answer.outcome == "wrong" and not answer.truncated for answer in every),
        "truncated": any(answer.truncated for answer in every),
        "not_judged": any(answer.outcome not in ("correct", "wrong") for answer in every),
        "right": any(answer.correct for answer in every),
        "lost": first is True and False in others,
        "won": first is False and True in others,
    }
    return frozenset(kind for kind, there in present.items() if there)


def _right(answers: Column) -> bool | None:
    judged = [answer.correct for answer in answers if answer.outcome in ("correct", "wrong")]
    return 2 * sum(judged) >= len(judged) if judged else None


def chosen(problems: Sequence[Browsed]) -> list[Browsed]:
    """Of each kind in turn the first problem that is not yet there, until the page is full; in the given order."""
    waiting = [[i for i, problem in enumerate(problems) if kind in problem.kinds] for kind in KINDS]
    taken: set[int] = set()
    room = MOST_CHARACTERS
    while any(waiting) and len(taken) < MOST_PROBLEMS:
        for queue in waiting:
            while queue and queue[0] in taken:
                queue.pop(0)
            if not queue or len(taken) >= MOST_PROBLEMS:
                continue
            i = queue.pop(0)
            if problems[i].size <= room or not taken:
                taken.add(i)
                room -= problems[i].size
    return [problems[i] for i in sorted(taken)]


def clipped(text: str) -> str:
    """A response as the page shows it: whole, or its two ends with what is left out between them."""
    if len(text) <= HEAD + TAIL:
        return text
    return f"{text[:HEAD]}\n[… {len(text) - HEAD - TAIL} characters left out …]\n{text[-TAIL:]}"


# The tests of training runs: before and after, or the variants of a comparison.


def run_browsers(run: RecordedRun) -> list[SampleBrowser]:
    """A browser a test set: what the start and the trained model wrote."""
    browsers: list[SampleBrowser] = []
    for comparison in comparisons(run):
        old, new = _by_id(comparison.before), _by_id(comparison.after)
        problems = [_pair(old.get(key), new.get(key)) for key in dict.fromkeys([*old, *new])]
        if problems:
            browsers.append(browser(comparison.set_name, ("before", "after"), problems))
    return browsers


def _pair(before: EvaluatedSample | None, after: EvaluatedSample | None) -> Browsed:
    """One test problem, its responses by temperature; what changed is told at each temperature by itself."""
    problem = after or before
    assert problem is not None, "a problem of one of the two"
    old, new = _by_temperature(before), _by_temperature(after)
    pairs = [(t, *pair) for t in sorted({*old, *new}) for pair in zip_longest(old.get(t, []), new.get(t, []))]
    kinds = (kinds_of([[first] if first else [], [second] if second else []]) for _, first, second in pairs)
    columns = [[a for _, a, _ in pairs if a is not None], [a for _, _, a in pairs if a is not None]]
    rows = [AnswerRow(f"Temperature {temperature(t)}", (first, second)) for t, first, second in pairs]
    return _browsed(problem, columns, rows, frozenset[Kind]().union(*kinds))


def variant_browsers(variants: Sequence[Variant]) -> list[SampleBrowser]:
    """A browser a test set: what the start of the first variant and the first tested run of each variant wrote, at the
    temperature of training."""
    browsers: list[SampleBrowser] = []
    for name in dict.fromkeys(name for variant in variants for run in variant.runs for name in run.sets):
        starts = (run.evaluation("before", name) for run in variants[0].runs)
        tested = [
            (variant, next(filter(None, (run.evaluation("after", name) for run in variant.runs)), None))
            for variant in variants
        ]
        columns = [("start", next(filter(None, starts), None)), *((variant.name, e) for variant, e in tested)]
        there = [(label, evaluation) for label, evaluation in columns if evaluation is not None and evaluation.samples]
        shown = there[: MOST_VARIANTS + 1]
        problems = _side_by_side([evaluation for _, evaluation in shown])
        if len(shown) > 1 and problems:
            note = "Of each variant the first run that was tested, at the temperature of training."
            if len(there) > len(shown):
                note += f" {len(there) - len(shown)} more variants are in their folders."
            browsers.append(browser(name, [label for label, _ in shown], problems, note=note))
    return browsers


def _side_by_side(evaluations: Sequence[Evaluation]) -> list[Browsed]:
    tables = [_by_id(evaluation) for evaluation in evaluations]
    at = max((t for evaluation in evaluations for t in evaluation.temperatures), default=1.0)
    found: list[Browsed] = []
    for key in dict.fromkeys(key for table in tables for key in table):
        problem = next(table[key] for table in tables if key in table)
        columns = [_by_temperature(table.get(key)).get(at, [])[:1] for table in tables]
        if any(columns):
            answers = tuple(column[0] if column else None for column in columns)
            row = AnswerRow(f"Temperature {temperature(at)}", answers)
            found.append(_browsed(problem, columns, [row], kinds_of(columns)))
    return found


def _browsed(
    problem: EvaluatedSample, columns: Sequence[Column], rows: Sequence[AnswerRow], kinds: frozenset[Kind]
) -> Browsed:
    reference = problem.reference if isinstance(problem.reference, str) else " or ".join(problem.reference)
    marks, shown = _marks(columns), tuple(rows)
    return Browsed(
        id=problem.problem_id, prompt=problem.prompt, reference=reference, marks=marks, rows=shown, kinds=kinds
    )


def _marks(columns: Sequence[Column]) -> tuple[tuple[str, ...], ...]:
    """Outcomes in one word; a truncated response is truncated whatever stands in it."""
    return tuple(tuple("truncated" if a.truncated else a.outcome for a in column) for column in columns)


def _by_id(evaluation: Evaluation | None) -> dict[str, EvaluatedSample]:
    return {sample.problem_id: sample for sample in (evaluation.samples if evaluation else ())}


def _by_temperature(sample: EvaluatedSample | None) -> dict[float, list[SampledResponse]]:
    found: dict[float, list[SampledResponse]] = {}
    for response in sample.responses if sample else ():
        found.setdefault(response.temperature, []).append(response)
    return found


# Evaluations: a column an evaluation, a browser a benchmark.


def evaluation_browsers(evaluations: Sequence[RecordedEvaluation], names: Sequence[str]) -> list[SampleBrowser]:
    """A browser a benchmark of which the folders hold problems and samples.

    Evaluations of other problems than the first's have no common rows: a problem is matched by its id.
    """
    found: list[SampleBrowser] = []
    for benchmark, results in by_benchmark(evaluations).items():
        shown = results[:MOST_COLUMNS]
        asked: dict[str, AskedProblem] = {}
        columns: list[dict[str, list[Answer]]] = []
        for i, result in shown:
            problems_of, rows = evaluated(evaluations[i].path / benchmark, result.samples)
            asked = asked | {problem.id: asked.get(problem.id, problem) for problem in problems_of}
            columns.append({})
            for row in rows:
                columns[-1].setdefault(row.problem, []).append(row)
        sampled = {key for column in columns for key in column}
        problems: list[Browsed] = []
        for key in (key for key in dict.fromkeys([*asked, *(k for c in columns for k in c)]) if key in sampled):
            prompt, reference = (asked[key].prompt, " or ".join(asked[key].references)) if key in asked else ("", "")
            problems.append(_of_samples(key, prompt, reference, [column.get(key, []) for column in columns]))
        if problems:
            several = max(result.samples for _, result in shown) > 1
            note = "A model counts as right on a problem where at least half of its samples are." if several else ""
            if len(results) > MOST_COLUMNS:
                note += f" The first {MOST_COLUMNS} of {len(results)} evaluations are shown."
            found.append(browser(benchmark, [names[i] for i, _ in shown], problems, note=note))
    return found


def _of_samples(name: str, prompt: str, reference: str, columns: Sequence[Column]) -> Browsed:
    """One problem: of each column's samples the first right and the first other one."""
    rows: list[AnswerRow] = []
    for label, wanted in (("first right sample", True), ("first sample that is not right", False)):
        answers = tuple(next((a for a in column if a.correct is wanted), None) for column in columns)
        if any(answers):
            rows.append(AnswerRow(label, answers))
    marks, shown, kinds = _marks(columns), tuple(rows), kinds_of(columns)
    return Browsed(id=name, prompt=prompt, reference=reference, marks=marks, rows=shown, kinds=kinds)


# Rollouts: a few of a few steps, their tokens coloured by entropy where the tokenizer can be read.

MOST_ROLLOUT_STEPS = 6
MOST_TOKENS = 600
"""Of one response on the page; the parquet file has all."""
MOST_ROLLOUT_CHARACTERS = 6000
LEVELS = (0.1, 0.5, 1.0, 2.0)
"""Nats at which a token's colour deepens."""

_COLUMNS = (
    "draw", "sample", "problem_id", "level", "temperature", "max_tokens", "prompt_tokens", "tokens",
    "sampler_entropies", "finish_reason", "text", "policy_version", "episode",
    "outcome", "status", "reason", "decided_by", "extracted", "reward",
)  # fmt: skip


class Piece(NamedTuple):
    """Neighbouring tokens of one colour: ``level`` 0 (below 0.1 nats) to 4, ``nats`` of a single token; or what an
    environment answered."""

    text: str
    level: int
    nats: float | None
    observed: bool = False


Rollout: TypeAlias = dict[str, Any]
"""A recorded response with what the page says of it: its row of the recording, and what ``_rollout`` adds."""


def shown_rollouts(run: RecordedRun) -> list[list[Rollout]]:
    """A few rollouts a step, of the first and last recorded step of each stage.

    Raises:
        RunFolderError: a recording that is no parquet file of rollouts.
    """
    paths = recordings(run.path / "rollouts")
    tokenizer = run_tokenizer(run)
    return [_step_rollouts(step, paths[step], tokenizer) for step in rollout_steps(run, sorted(paths))]


def recordings(folder: Path) -> dict[int, Path]:
    """The recorded steps of a run's ``rollouts`` folder."""
    named = {path.stem.removeprefix("step-"): path for path in folder.glob("step-*.parquet")}
    return {int(digits): path for digits, path in named.items() if digits.isdigit()}


def rollout_steps(run: RecordedRun, recorded: Sequence[int]) -> list[int]:
    """The first and last recorded step of each stage, at most ``MOST_ROLLOUT_STEPS``; of one stage its middle too."""
    stages = [[step for step in recorded if s.first_step <= step <= s.last_step] for s in run.stages]
    inside = [steps for steps in stages if steps]
    chosen = {step for steps in inside for step in (steps[0], steps[-1])}
    if len(inside) == 1 and len(chosen) == 2:
        chosen.add(inside[0][len(inside[0]) // 2])
    ordered = sorted(chosen)
    return ordered if len(ordered) <= MOST_ROLLOUT_STEPS else [*ordered[:1], *ordered[1 - MOST_ROLLOUT_STEPS :]]


def run_tokenizer(run: RecordedRun) -> Tokenizer | None:
    """The saved model's tokenizer, else the start model's."""
    start = run.run.get("start_model")
    folders = [run.path / "model", *([Path(start)] if isinstance(start, str) and start else [])]
    for folder in folders:
        path = folder / "tokenizer.json"
        if path.is_file():
            try:
                return Tokenizer.from_file(str(path))
            except Exception as error:  # noqa: BLE001 - the library raises bare Exception for a broken file
                raise RunFolderError(f"{path}: no tokenizer: {error}") from None
    return None


def _step_rollouts(step: int, path: Path, tokenizer: Tokenizer | None) -> list[Rollout]:
    try:
        there = pq.read_schema(path).names  # older recordings have no episodes
        columns = [name for name in _COLUMNS if name in there or name != "episode"]
        rows = cast("list[dict[str, Any]]", pq.read_table(path, columns=columns).to_pylist())
    except (pa.ArrowException, OSError) as error:
        raise RunFolderError(f"{path}: no recording of rollouts: {error}; remove the file") from None
    groups = {draw: list(group) for draw, group in groupby(rows, key=lambda row: row["draw"])}
    return [_rollout(step, why, row, groups[row["draw"]], tokenizer) for why, row in _told_rollouts(rows)]


def _told_rollouts(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """The first right, wrong and cut one and the one of highest mean entropy; each only once."""
    wanted: list[tuple[str, list[Mapping[str, Any]]]] = [
        ("the first right one", [r for r in rows if r["outcome"] == "correct"][:1]),
        ("the first wrong one", [r for r in rows if r["outcome"] == "wrong" and r["finish_reason"] != "length"][:1]),
        ("the first cut at T", [r for r in rows if r["finish_reason"] == "length"][:1]),
        ("the least certain", sorted(rows, key=lambda r: -(_mean_entropy(r) or 0.0))),
    ]
    chosen: list[tuple[str, Mapping[str, Any]]] = []
    for why, candidates in wanted:
        fresh = [r for r in candidates if all(r is not taken for _, taken in chosen)]
        chosen += [(why, r) for r in fresh[:1]]
    return chosen


def _rollout(
    step: int, why: str, row: Mapping[str, Any], group: Sequence[Mapping[str, Any]], tokenizer: Tokenizer | None
) -> Rollout:
    tokens = cast("list[int]", row["tokens"])
    entropies = cast("list[float] | None", row["sampler_entropies"])
    observed = observed_spans(row.get("episode"))
    shown = _token_texts(tokenizer, tokens[:MOST_TOKENS]) if tokenizer is not None else None
    if shown is not None and (entropies is not None or observed):
        pieces = coloured_pieces(shown, entropies or [0.0] * len(tokens), observed)
        words = f"{len(tokens) - MOST_TOKENS} more tokens" if len(tokens) > MOST_TOKENS else ""
    else:
        text = str(row["text"])
        pieces = (Piece(visible(text[:MOST_ROLLOUT_CHARACTERS]), 0, None),)
        words = f"{len(text) - MOST_ROLLOUT_CHARACTERS} more characters" if len(text) > MOST_ROLLOUT_CHARACTERS else ""
    prompt = cast("list[int]", row["prompt_tokens"])[-MOST_TOKENS:]
    return {
        **row,
        "outcome": row["outcome"] or "not_judged",
        **{key: row[key] or "" for key in ("status", "reason", "decided_by")},
        "step": step,
        "why": why,
        "group_right": sum(r["outcome"] == "correct" for r in group),
        "group_size": len(group),
        "prompt": None if tokenizer is None else str(tokenizer.decode(prompt, skip_special_tokens=False)),
        "pieces": pieces,
        "left_out": words,
        "coloured": shown is not None and entropies is not None,
        "tokens": len(tokens) - sum(count for _, count in observed),
        "entropy": _mean_entropy(row),
    }


def _token_texts(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    """A text a token; a token that ends inside a character is empty, and the next one has it whole."""
    stream = DecodeStream(skip_special_tokens=False)
    return [str(stream.step(tokenizer, token) or "") for token in ids]


def observed_spans(episode: str | None) -> list[tuple[int, int]]:
    """``(first token, tokens)`` of what an environment answered, from a recording's column ``episode``."""
    return [] if episode is None else [(first, count) for first, count in json.loads(episode)["observed"]]


def coloured_pieces(
    texts: Sequence[str], entropies: Sequence[float], observed: Sequence[tuple[int, int]] = ()
) -> tuple[Piece, ...]:
    """Tokens as pieces of text: certain neighbours together, an environment's answers (``observed``: first, number)
    as well, each other token by itself with its entropy.

    At most ``MOST_ROLLOUT_CHARACTERS`` in all: a token's text may be as long as its vocabulary allows.
    """
    pieces: list[Piece] = []
    room = MOST_ROLLOUT_CHARACTERS
    answered = {place for first, count in observed for place in range(first, first + count)}
    for place, (text, nats) in enumerate(zip(texts, entropies, strict=False)):  # the texts may have been cut
        shown = visible(text[:room])
        room -= len(text[:room])
        level = sum(nats >= edge for edge in LEVELS)
        if not shown:
            continue
        piece = Piece(shown, level, nats if level else None, place in answered)
        if level == 0 and pieces and pieces[-1][1:] == piece[1:]:
            piece = piece._replace(text=pieces.pop().text + shown)
        pieces.append(piece)
    return tuple(pieces)


def _mean_entropy(row: Mapping[str, Any]) -> float | None:
    """Over the tokens that were sampled; those that an environment answered have 0 in the recording."""
    values = cast("list[float] | None", row["sampler_entropies"])
    if not values:
        return None
    return sum(values) / (len(values) - sum(count for _, count in observed_spans(row.get("episode"))))
