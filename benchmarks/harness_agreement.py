"""The same texts scored by magicrl and by lm-evaluation-harness, and every disagreement put in a class.

Texts: the stored samples of evaluations (``magicrl eval``), the written-out solutions that come with
GSM8K and MATH-500 under their own gold, and the same solutions under the gold of the next problem. lm_eval lives in
an environment of its own and is run there (``harness_peer.py``):

    python3 -m venv runs/peer && runs/peer/bin/pip install 'lm_eval[math]==0.4.13'
    python benchmarks/harness_agreement.py --peer runs/peer/bin/python --data ../shared/data \
        --evaluation runs/eval-smollm2/maths/trained --figure docs/figures/harness-agreement.json

The figure holds ids and classes only, no text of a problem or a response.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

from common import parser_of, write_figure

from magicrl.evaluation.provenance import environment_facts, git_commit, now
from magicrl.evaluation.samples import EvaluationFolder
from magicrl.records import Problem
from magicrl_verifiers.service import VerifierPool

FORMS = {"gsm8k": "number", "svamp": "number", "math500": "maths"}
SOLUTIONS = 300  # of each set, the first ones
NOTHING = ("[invalid]", "[invalidanswer]", "[none]", "")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One text and magicrl's verdict."""

    key: str
    texts: str  # which population
    form: str  # ``number`` or ``maths``: which of the peer's scorers
    gold: str
    response: str
    correct: bool
    judged_correct: bool
    cut: bool  # the response was cut at the limit, which makes it wrong here whatever it says
    extracted: str | None


def sampled(folder: Path) -> Iterator[Item]:
    """The stored samples of an evaluation, with the verdicts stored beside them."""
    for name, form in FORMS.items():
        evaluation = EvaluationFolder(folder / name)
        if not evaluation.path.exists():
            continue
        with (evaluation.path / "problems.jsonl").open(encoding="utf-8") as lines:
            golds = {row["id"]: row["golds"][0] for row in map(json.loads, lines)}
        for row in evaluation.rows():
            if row.counted:
                yield Item(
                    key=f"{folder.name}/{row.problem}/{row.sample}",
                    texts=f"samples, {name}",
                    form=form,
                    gold=golds[row.problem],
                    response=row.text,
                    correct=row.correct,
                    judged_correct=row.outcome == "correct",
                    cut=row.truncated,
                    extracted=row.extracted,
                )


def solutions(data: Path) -> Iterator[tuple[str, str, str, str]]:
    """(id, form, gold, solution) of GSM8K's training set and of MATH-500."""
    with (data / "math/sets/gsm8k/train.jsonl").open(encoding="utf-8") as lines:
        for place, line in enumerate(islice(lines, SOLUTIONS)):
            text = json.loads(line)["answer"]
            yield f"gsm8k-train-{place}", "number", text.rpartition("####")[2].strip(), text
    with (data / "math/sets/math_test/test.jsonl").open(encoding="utf-8") as lines:
        texts = {row["problem"].strip(): row["solution"] for row in map(json.loads, lines)}
    with (data / "math/sets/math500/simple_math500.jsonl").open(encoding="utf-8") as lines:
        for row in islice(map(json.loads, lines), SOLUTIONS):
            if row["problem"].strip() in texts:
                yield row["id"], "maths", row["answer"], texts[row["problem"].strip()]


def written_out(data: Path, workers: int) -> Iterator[Item]:
    """Solutions under their own gold, and under the gold of the next problem of the set."""
    known = list(solutions(data))
    pairs: list[tuple[str, Problem, str, str]] = []
    for form in ("number", "maths"):
        rows = [row for row in known if row[1] == form]
        for (name, _, own, text), (_, _, other, _) in zip(rows, [*rows[1:], rows[0]], strict=True):
            for texts, gold in ((f"solutions, {form}", own), (f"another's solutions, {form}", other)):
                problem = Problem(id=name, prompt="?", golds=(gold,), verifier="maths", source="solutions")
                pairs.append((texts, problem, form, text))
    with VerifierPool(workers=workers, time_limit=10.0) as pool:
        tickets = [pool.submit(problem, [text]) for _, problem, _, text in pairs]
        for (texts, problem, form, text), ticket in zip(pairs, tickets, strict=True):
            (verdict,) = pool.result(ticket)
            yield Item(
                key=f"{texts}/{problem.id}",
                texts=texts,
                form=form,
                gold=problem.golds[0],
                response=text,
                correct=verdict.correct,
                judged_correct=verdict.correct,
                cut=False,
                extracted=verdict.extracted,
            )


def peer_scores(python: Path, items: Iterable[Item]) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Versions, and what lm_eval says of every item."""
    asked = "".join(
        json.dumps({"key": i.key, "form": i.form, "gold": i.gold, "response": i.response}) + "\n" for i in items
    )
    script = Path(__file__).with_name("harness_peer.py")
    environment = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(python), str(script)], input=asked, capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise SystemExit(f"{script.name} failed:\n{done.stderr[-2000:]}")
    first, *rest = map(json.loads, done.stdout.splitlines())
    return first["versions"], {row["key"]: row for row in rest}


def number(text: str | None) -> Fraction | None:
    """The only number in a text, commas left out; None where there is none or several."""
    found = _NUMBER.findall(text or "")
    return Fraction(found[0].replace(",", "").rstrip(".")) if len(found) == 1 else None


def why(item: Item, scorer: str, right: bool, read: str) -> str:
    """The class of a disagreement: what each side read, and what it then made of it."""
    if item.cut and item.judged_correct == right:
        return "cut at the limit: wrong for magicrl whatever stands there, scored as it stands by lm_eval"
    if read.strip() in NOTHING:
        return "the form lm_eval looks for (####, 'The answer is', 'Final Answer:') is absent: it reads nothing"
    if item.extracted is None:
        return "no answer is marked: magicrl reads none, lm_eval the last number"
    mine, theirs, gold = number(item.extracted), number(read), number(item.gold)
    if right:
        if mine is not None and mine == theirs:
            return "the same number is read: magicrl wants its unit or form"
        if "####" in item.response:
            return "two answers are marked, '#### N' and one in words: lm_eval takes the first, magicrl that in words"
        return "another answer is read: lm_eval takes the last number or formula, magicrl the one marked as the answer"
    if "math_verify" in scorer and re.search(re.escape(item.extracted) + r"\s*=", item.response):
        return "the answer is followed by '= ...', another value: magicrl takes the one before, lm_eval the one after"
    if scorer.startswith("hendrycks"):
        return "lm_eval reads all between the first and the last $: an answer only where the response is one formula"
    if theirs is not None and theirs == gold:
        return "the same number in another writing (18.00, 1,000): lm_eval compares text"
    if mine is not None and theirs is not None and mine != theirs:
        return "another number is read: a number that is not the answer stands last"
    return "the answer is written in another form: lm_eval cannot read or compare it"


def tables(items: list[Item], peers: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """By population and scorer: the four counts, and classes with the ids in them."""
    found: dict[str, dict[str, Any]] = {}
    for item in items:
        for scorer, score in peers[item.key]["scores"].items():
            cell = found.setdefault(item.texts, {}).setdefault(scorer, {"both": Counter(), "classes": {}})
            right = score == 1.0
            cell["both"][("right" if item.correct else "wrong", "right" if right else "wrong")] += 1
            if right != item.correct:
                side = "only lm_eval right" if right else "only magicrl right"
                name = f"{side}: {why(item, scorer, right, peers[item.key]['read'][scorer])}"
                cell["classes"].setdefault(name, []).append(item.key)
    return {texts: {scorer: _cell(cell) for scorer, cell in by.items()} for texts, by in found.items()}


def _cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    both: Counter[tuple[str, str]] = cell["both"]
    return {
        "texts": sum(both.values()),
        "both_right": both["right", "right"],
        "both_wrong": both["wrong", "wrong"],
        "only_magicrl_right": both["right", "wrong"],
        "only_lm_eval_right": both["wrong", "right"],
        "classes": {name: {"count": len(keys), "ids": keys} for name, keys in sorted(cell["classes"].items())},
    }


def main() -> None:
    """Score both ways, write the figure, and say the counts."""
    parser = parser_of(__doc__)
    parser.add_argument("--peer", type=Path, required=True, help="python of the environment that has lm_eval")
    parser.add_argument("--data", type=Path, required=True, help="folder with math/sets")
    parser.add_argument("--evaluation", type=Path, action="append", default=[], help="output of magicrl eval")
    parser.add_argument("--figure", type=Path, required=True, help="JSON to write")
    parser.add_argument("--show", metavar="CLASS", help="print the texts of classes that hold this word (not stored)")
    given = parser.parse_args()
    items = [item for folder in given.evaluation for item in sampled(folder)]
    items += written_out(given.data, workers=1)
    versions, peers = peer_scores(given.peer, items)
    document = {
        "command": "python benchmarks/harness_agreement.py " + " ".join(sys.argv[1:]),
        "machine": environment_facts()["machine"],
        "written": now(),
        "git": git_commit(),
        "peer": versions,
        "tables": tables(items, peers),
    }
    write_figure(given.figure, document)
    for texts, scorers in document["tables"].items():
        for scorer, cell in scorers.items():
            counts = ", ".join(f"{name} {cell[name]}" for name in list(cell)[1:5])
            print(f"{texts} | {scorer}: {counts}")
            for name, found in cell["classes"].items():
                print(f"    {found['count']:5d}  {name}")
                shown = [item for item in items if given.show and given.show in name and item.key in found["ids"]]
                for item in shown:
                    read = peers[item.key]["read"][scorer]
                    print(f"{item.key} gold={item.gold!r} ours={item.extracted!r} theirs={read!r}")


if __name__ == "__main__":
    main()
