"""Responses on a page: of evaluations in columns next to each other, and of a run's recorded rollouts.

A browser shows the same problems in several columns (before and after training, variants, models). A page has only a
limited number of them, selected so that every kind of outcome is included, and says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from magicrl.evaluation.samples import SampleRow, whole_prompt
from magicrl.reporting.read_folders import (
    EvaluatedProblem,
    RecordedEvaluation,
    RecordedRun,
    RunFolderError,
    SetEvaluation,
    by_benchmark,
    scored_samples,
)
from magicrl.reporting.scores import comparisons
from magicrl.reporting.variants import Variant
from magicrl.reporting.wording import temperature_text, visible

Kind: TypeAlias = Literal["lost", "won", "wrong", "truncated", "not_judged", "right"]
KINDS: tuple[Kind, ...] = ("lost", "won", "wrong", "truncated", "not_judged", "right")

MOST_PROBLEMS = 60
"""Maximum number of problems of one set on a page."""
MOST_CHARACTERS = 600_000
"""Maximum number of characters of all responses of one set on a page."""
HEAD, TAIL = 1_500, 2_500
"""Characters shown at the two ends of a long response. The answer is at its end."""
MOST_VARIANTS = 3
"""Maximum number of variants next to each other, in addition to the initial checkpoint."""
MOST_COLUMNS = 4
"""Maximum number of evaluations next to each other. The responses of the others are in their folders."""

Column: TypeAlias = Sequence[SampleRow]
"""A problem's responses of one model."""
LabelledRow: TypeAlias = tuple[str, tuple[SampleRow | None, ...]]
"""A label and one response per column; None where a column has none."""


BrowsedProblem: TypeAlias = dict[str, Any]
"""One problem with its responses: ``id``, ``prompt``, ``reference``; ``marks``, by column the outcomes of all samples;
``rows``, the `LabelledRow` of the responses that are shown; ``kinds``, the `Kind` that the filter finds it by."""


def browser(name: str, columns: Sequence[str], problems: Sequence[BrowsedProblem], *, note: str = "") -> dict[str, Any]:
    """Return the data of the template that shows one set, in the order of the set.

    It has at most ``MOST_PROBLEMS`` problems and ``MOST_CHARACTERS`` characters. ``total`` and ``counts`` (by kind) are
    the problems before this selection, ``kind_words`` the labels of the filter for the kinds that occur. ``note`` says
    how the outcome of a column follows from several samples.
    """
    counts: dict[Kind, int] = {kind: sum(kind in problem["kinds"] for problem in problems) for kind in KINDS}
    words: dict[Kind, str] = {kind: kind.replace("_", " ") for kind in KINDS[2:]}
    if len(columns) > 1:  # lost and won need two columns
        first, others = columns if len(columns) == 2 else ("the first", "another")
        moved = "{} {}, {} {}" if first == "before" else "{1}: {0}, {3}: {2}"
        lost, won = moved.format("right", first, "wrong", others), moved.format("wrong", first, "right", others)
        words = {"lost": lost, "won": won, **words}
    occurring: dict[Kind, str] = {kind: text for kind, text in words.items() if counts[kind]}
    return {
        "name": name,
        "columns": tuple(columns),
        "problems": chosen(problems),
        "total": len(problems),
        "counts": counts,
        "kind_words": occurring,
        "note": note,
    }


def outcome_kinds(columns: Sequence[Column]) -> frozenset[Kind]:
    """Return the kinds of a problem from the responses of each column.

    A column is right where at least half of its judged responses are. ``lost``: the first column is right and another
    one is not. ``won``: the opposite.
    """
    every = [response for column in columns for response in column]
    judged = [[r.correct for r in column if r.outcome in ("correct", "wrong")] for column in columns]
    verdicts = [2 * sum(right) >= len(right) if right else None for right in judged] or [None]
    first, others = verdicts[0], verdicts[1:]
    present: dict[Kind, bool] = {
        "wrong": any(response.outcome == "wrong" and not response.truncated for response in every),
        "truncated": any(response.truncated for response in every),
        "not_judged": any(response.outcome not in ("correct", "wrong") for response in every),
        "right": any(response.correct for response in every),
        "lost": first is True and False in others,
        "won": first is False and True in others,
    }
    return frozenset(kind for kind, found in present.items() if found)


def chosen(problems: Sequence[BrowsedProblem]) -> list[BrowsedProblem]:
    """Select of each kind in turn the first problem not yet selected, until the page is full; in the given order."""
    waiting = [[i for i, problem in enumerate(problems) if kind in problem["kinds"]] for kind in KINDS]
    taken: set[int] = set()
    room = MOST_CHARACTERS
    while any(waiting) and len(taken) < MOST_PROBLEMS:
        for queue in waiting:
            while queue and queue[0] in taken:
                queue.pop(0)
            if not queue or len(taken) >= MOST_PROBLEMS:
                continue
            i = queue.pop(0)
            shown = [problems[i]["prompt"]]
            shown += [clipped(response.text) for _, row in problems[i]["rows"] for response in row if response]
            size = sum(map(len, shown))
            if size <= room or not taken:
                taken.add(i)
                room -= size
    return [problems[i] for i in sorted(taken)]


def clipped(text: str) -> str:
    """Return a response in full, or its two ends with a note on the characters left out between them."""
    if len(text) <= HEAD + TAIL:
        return text
    return f"{text[:HEAD]}\n[… {len(text) - HEAD - TAIL} characters left out …]\n{text[-TAIL:]}"


# The test sets of training runs: before and after training, or the variants of a comparison.


def run_browsers(run: RecordedRun) -> list[dict[str, Any]]:
    """Return a browser per test set with the responses before and after training."""
    browsers: list[dict[str, Any]] = []
    for comparison in comparisons(run):
        sides = _problems_of(comparison.before), _problems_of(comparison.after)
        problems: list[BrowsedProblem] = []
        for key in dict.fromkeys([*sides[0], *sides[1]]):
            old, new = (side[key].responses if key in side else {} for side in sides)
            pairs = [(t, *pair) for t in sorted({*old, *new}) for pair in zip_longest(old.get(t, ()), new.get(t, ()))]
            # each temperature has its own kinds
            kinds = (outcome_kinds([[a] if a else [], [b] if b else []]) for _, a, b in pairs)
            columns = [[a for _, a, _ in pairs if a is not None], [b for _, _, b in pairs if b is not None]]
            rows = [(f"Temperature {temperature_text(t)}", (a, b)) for t, a, b in pairs]
            problem = sides[1].get(key) or sides[0][key]
            problems.append(_browsed(problem, columns, rows, frozenset[Kind]().union(*kinds)))
        if problems:
            browsers.append(browser(comparison.set_name, ("before", "after"), problems))
    return browsers


def variant_browsers(variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Return a browser per test set with responses at the temperature of training.

    The columns are the initial checkpoint of the first variant, and the first evaluated run of each variant.
    """
    browsers: list[dict[str, Any]] = []
    for name in dict.fromkeys(name for variant in variants for run in variant.runs for name in run.sets):
        columns = [("initial checkpoint", [run.evaluation("before", name) for run in variants[0].runs])]
        columns += [(v.name, [run.evaluation("after", name) for run in v.runs]) for v in variants]
        found = [(label, next(filter(None, evaluations), None)) for label, evaluations in columns]
        available = [
            (label, evaluation) for label, evaluation in found if evaluation is not None and evaluation.samples
        ]
        shown = available[: MOST_VARIANTS + 1]
        evaluations = [evaluation for _, evaluation in shown]
        at = variants[0].runs[0].training_temperature(*evaluations)
        problems = _in_columns(evaluations, 1.0 if at is None else at)
        if len(shown) > 1 and problems:
            note = "Responses of the first evaluated run of each variant, at the temperature of training."
            if len(available) > len(shown):
                note += f" {len(available) - len(shown)} more variants are in their folders."
            browsers.append(browser(name, [label for label, _ in shown], problems, note=note))
    return browsers


def _in_columns(evaluations: Sequence[SetEvaluation], at: float) -> list[BrowsedProblem]:
    tables = [_problems_of(evaluation) for evaluation in evaluations]
    found: list[BrowsedProblem] = []
    for key in dict.fromkeys(key for table in tables for key in table):
        problem = next(table[key] for table in tables if key in table)
        columns = [table[key].responses.get(at, ())[:1] if key in table else () for table in tables]
        if any(columns):
            row = (f"Temperature {temperature_text(at)}", tuple(column[0] if column else None for column in columns))
            found.append(_browsed(problem, columns, [row], outcome_kinds(columns)))
    return found


def _browsed(
    problem: EvaluatedProblem, columns: Sequence[Column], rows: Sequence[LabelledRow], kinds: frozenset[Kind]
) -> BrowsedProblem:
    reference = problem.references if isinstance(problem.references, str) else " or ".join(problem.references)
    shown = {"id": problem.problem_id, "prompt": problem.prompt, "reference": reference}
    return shown | {"marks": _marks(columns), "rows": rows, "kinds": kinds}


def _marks(columns: Sequence[Column]) -> tuple[tuple[str, ...], ...]:
    """Return the outcomes in one word. A truncated response is truncated whatever its verdict."""
    return tuple(tuple("truncated" if a.truncated else a.outcome for a in column) for column in columns)


_Key: TypeAlias = tuple[str, str, str | tuple[str, ...]]
"""Id, prompt and reference of a problem: other data may use the same ids."""


def _problems_of(evaluation: SetEvaluation | None) -> dict[_Key, EvaluatedProblem]:
    return {(p.problem_id, p.prompt, p.references): p for p in (evaluation.samples if evaluation else ())}


# Evaluations: one column per evaluation, one browser per benchmark.


def evaluation_browsers(evaluations: Sequence[RecordedEvaluation], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return a browser per benchmark whose folders have problems and samples.

    Problems are matched like those of runs, so that evaluations of different problems have no common rows.
    """
    found: list[dict[str, Any]] = []
    for benchmark, results in by_benchmark(evaluations).items():
        shown = results[:MOST_COLUMNS]
        known: dict[_Key, None] = {}
        columns: list[dict[_Key, list[SampleRow]]] = []
        for i, result in shown:
            listed, rows = scored_samples(evaluations[i].path / benchmark, result.samples)
            keys: dict[str, _Key] = {p.id: (p.id, whole_prompt(p), p.references) for p in listed}
            known |= dict.fromkeys(keys.values())
            columns.append({})
            for row in rows:
                columns[-1].setdefault(keys.get(row.problem, (row.problem, "", ())), []).append(row)
        sampled = dict.fromkeys(key for column in columns for key in column)
        order = [key for key in known if key in sampled] + [key for key in sampled if key not in known]
        problems = [_of_samples(key, [column.get(key, []) for column in columns]) for key in order]
        if problems:
            several = max(result.samples for _, result in shown) > 1
            note = "A model counts as right on a problem where at least half of its samples are." if several else ""
            if len(results) > MOST_COLUMNS:
                note += f" The first {MOST_COLUMNS} of {len(results)} evaluations are shown."
            if apart := sum(any(key not in column for column in columns) for key in order):
                note += f" {apart} problems are not in all evaluations (by id, prompt and reference answer)."
            found.append(browser(benchmark, [names[i] for i, _ in shown], problems, note=note))
    return found


def _of_samples(key: _Key, columns: Sequence[Column]) -> BrowsedProblem:
    """Return one problem with the first right and the first other sample of each column."""
    rows: list[LabelledRow] = []
    for label, wanted in (("first right sample", True), ("first sample that is not right", False)):
        responses = tuple(next((a for a in column if a.correct is wanted), None) for column in columns)
        if any(responses):
            rows.append((label, responses))
    shown = {"id": key[0], "prompt": key[1], "reference": " or ".join(key[2])}
    return shown | {"marks": _marks(columns), "rows": rows, "kinds": outcome_kinds(columns)}


# Rollouts: a few responses of a few steps. Tokens are coloured by entropy where the tokenizer can be read.

MOST_ROLLOUT_STEPS = 6
MOST_TOKENS = 600
"""Maximum number of tokens of one rollout on the page. The Parquet file has all of them."""
MOST_ROLLOUT_CHARACTERS = 6000
LEVELS = (0.1, 0.5, 1.0, 2.0)
"""Entropies in nats from which a token has the next darker colour."""

_COLUMNS = (
    "draw", "sample", "problem_id", "level", "temperature", "max_tokens", "prompt_tokens", "tokens",
    "sampler_entropies", "finish_reason", "text", "policy_version", "episode",
    "outcome", "status", "reason", "decided_by", "extracted", "reward",
)  # fmt: skip


TextPiece: TypeAlias = tuple[str, int, float | None, bool]
"""Text of neighbouring tokens of one colour: the text, its level from 0 (below 0.1 nats) to 4, the entropy of a single
token, and whether it is an observation of an environment."""
Rollout: TypeAlias = dict[str, Any]
"""A row of the recording with the additional fields that ``_rollout`` computes for the page."""


def shown_rollouts(run: RecordedRun) -> list[list[Rollout]]:
    """Return a few rollouts of the first and the last recorded step of each stage, by step.

    Raises:
        RunFolderError: a recording is not a Parquet file of rollouts.
    """
    files = {path.stem.removeprefix("step-"): path for path in (run.path / "rollouts").glob("step-*.parquet")}
    paths = {int(digits): path for digits, path in files.items() if digits.isdigit()}
    tokenizer = run_tokenizer(run)
    found: list[list[Rollout]] = []
    for step in rollout_steps(run, sorted(paths)):
        path = paths[step]
        try:
            available = pq.read_schema(path).names  # older recordings have no episodes
            columns = [name for name in _COLUMNS if name in available or name != "episode"]
            rows = cast("list[dict[str, Any]]", pq.read_table(path, columns=columns).to_pylist())
        except (pa.ArrowException, OSError) as error:
            raise RunFolderError(f"{path}: no recording of rollouts: {error}; remove the file") from None
        groups = {draw: list(group) for draw, group in groupby(rows, key=lambda row: row["draw"])}
        wanted: list[tuple[str, Sequence[Mapping[str, Any]]]] = [
            ("the first right one", [r for r in rows if _is_right(r)][:1]),
            (
                "the first wrong one",
                [r for r in rows if r["outcome"] == "wrong" and r["finish_reason"] != "length"][:1],
            ),
            ("the first truncated one", [r for r in rows if r["finish_reason"] == "length"][:1]),
            ("the highest mean entropy", sorted(rows, key=lambda r: -(_mean_entropy(r) or 0.0))),
        ]
        selected: list[tuple[str, Mapping[str, Any]]] = []
        for why, candidates in wanted:
            fresh = [r for r in candidates if all(r is not taken for _, taken in selected)]
            selected += [(why, r) for r in fresh[:1]]
        found.append([_rollout(step, why, row, groups[row["draw"]], tokenizer) for why, row in selected])
    return found


def rollout_steps(run: RecordedRun, recorded: Sequence[int]) -> list[int]:
    """Select the first and last recorded step of each stage, at most ``MOST_ROLLOUT_STEPS``; of a single stage also
    its middle step."""
    stages = [[step for step in recorded if first <= step <= last] for _, first, last, _ in run.stages]
    inside = [steps for steps in stages if steps]
    selected = {step for steps in inside for step in (steps[0], steps[-1])}
    if len(inside) == 1 and len(selected) == 2:
        selected.add(inside[0][len(inside[0]) // 2])
    ordered = sorted(selected)
    return ordered if len(ordered) <= MOST_ROLLOUT_STEPS else [*ordered[:1], *ordered[1 - MOST_ROLLOUT_STEPS :]]


def run_tokenizer(run: RecordedRun) -> Tokenizer | None:
    """Return the tokenizer of the saved model, else of the initial model."""
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


def _is_right(row: Mapping[str, Any]) -> bool:
    """Return whether a rollout earned its reward: a truncated one counts as wrong, whatever it had written."""
    return row["outcome"] == "correct" and row["finish_reason"] != "length"


def _rollout(
    step: int, why: str, row: Mapping[str, Any], group: Sequence[Mapping[str, Any]], tokenizer: Tokenizer | None
) -> Rollout:
    tokens = cast("list[int]", row["tokens"])
    entropies = cast("list[float] | None", row["sampler_entropies"])
    observed = observed_spans(row.get("episode"))
    shown: list[str] | None = None
    if tokenizer is not None:
        # a token that ends inside a character is empty, and the next one has the character
        stream = DecodeStream(skip_special_tokens=False)
        shown = [str(stream.step(tokenizer, token) or "") for token in tokens[:MOST_TOKENS]]
    if shown is not None and (entropies is not None or observed):
        pieces = coloured_pieces(shown, entropies or [0.0] * len(tokens), observed)
        words = f"{len(tokens) - MOST_TOKENS} more tokens" if len(tokens) > MOST_TOKENS else ""
    else:
        text = str(row["text"])
        pieces = [(visible(text[:MOST_ROLLOUT_CHARACTERS]), 0, None, False)]
        words = f"{len(text) - MOST_ROLLOUT_CHARACTERS} more characters" if len(text) > MOST_ROLLOUT_CHARACTERS else ""
    prompt = cast("list[int]", row["prompt_tokens"])[-MOST_TOKENS:]
    return {
        **row,
        "outcome": "truncated" if row["finish_reason"] == "length" else row["outcome"] or "not_judged",
        **{key: row[key] or "" for key in ("status", "reason", "decided_by")},
        "step": step,
        "why": why,
        "group_right": sum(map(_is_right, group)),
        "group_size": len(group),
        "prompt": None if tokenizer is None else str(tokenizer.decode(prompt, skip_special_tokens=False)),
        "pieces": pieces,
        "left_out": words,
        "coloured": shown is not None and entropies is not None,
        "tokens": len(tokens) - sum(count for _, count in observed),
        "entropy": _mean_entropy(row),
    }


def observed_spans(episode: str | None) -> list[tuple[int, int]]:
    """Return ``(first token, number of tokens)`` of each observation in a recording's column ``episode``."""
    return [] if episode is None else [(first, count) for first, count in json.loads(episode)["observed"]]


def coloured_pieces(
    texts: Sequence[str], entropies: Sequence[float], observed: Sequence[tuple[int, int]] = ()
) -> list[TextPiece]:
    """Join neighbouring tokens of low entropy, and tokens of an observation, into pieces of text.

    Every other token is a piece with its entropy. All pieces together have at most ``MOST_ROLLOUT_CHARACTERS``, since
    a token's text may be as long as its vocabulary allows.

    Args:
        texts: text of each token.
        entropies: entropy of each token, in nats.
        observed: (first token, number of tokens) of each observation of an environment.
    """
    pieces: list[TextPiece] = []
    room = MOST_ROLLOUT_CHARACTERS
    answered = {place for first, count in observed for place in range(first, first + count)}
    for place, (text, nats) in enumerate(zip(texts, entropies, strict=False)):  # texts may be fewer
        shown = visible(text[:room])
        room -= len(text[:room])
        level = sum(nats >= edge for edge in LEVELS)
        if not shown:
            continue
        kind = (level, nats if level else None, place in answered)
        if level == 0 and pieces and pieces[-1][1:] == kind:
            shown = pieces.pop()[0] + shown
        pieces.append((shown, *kind))
    return pieces


def _mean_entropy(row: Mapping[str, Any]) -> float | None:
    """Return the mean over the sampled tokens. Tokens of observations have entropy 0 in the recording."""
    values = cast("list[float] | None", row["sampler_entropies"])
    if not values:
        return None
    return sum(values) / (len(values) - sum(count for _, count in observed_spans(row.get("episode"))))
