"""Whether speculative decoding from a group's own responses would pay, from recorded rollouts of real runs.

    python benchmarks/speculation.py runs/smollm2 runs/quickstart     # a minute; writes docs/figures/speculation.json

A random number of the engine depends on (seed, draw, sample, position) alone, so a drafted token is right exactly when
it is the token that was sampled there, and the recorded rollouts tell what any draft would have gained: the tokens stay
the same. Here the rows of a step are played again. Each round every row drafts up to ``k`` tokens by looking up its
last ``n`` tokens in what its group has sampled so far (its own response and its siblings'), checks them in one pass of
``k + 1`` positions and keeps the leading right ones. What a pass costs against its number of positions is the engine's
own decode rate against rows, as ``rollout_growth.py`` measured it (the drafts of a row share its cache, so attention
would cost less than counted: a favour of a few per cent withheld). Drafting itself is free here, in favour of it.

``tail`` drafts only when at most ``rows`` rows are left, the place where a pass costs least.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from measure import FIGURES, ROOT, document, rounded
from page_sections import put_section

from magicrl.training.recorder import write_atomically

Response = Sequence[int]
DRAFTS = (2, 4, 8)
TAILS = (1, 4, 16, None)  # rows left at which drafting begins; None: from the first token
NGRAM = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """A step played again."""

    cost: float  # CPU seconds of its passes
    passes: int  # forward passes. drafted, kept: tokens drafted, and those of them that were right.
    drafted: int
    kept: int


class Group:
    """The responses of one prompt, as far as they have come, and where each n-gram was seen in them."""

    def __init__(self, responses: Sequence[Response]) -> None:
        self.responses = responses
        self.done = [0] * len(responses)
        self._seen: dict[tuple[int, ...], tuple[int, int]] = {}

    def advance(self, row: int, tokens: int) -> None:
        """``tokens`` more of a response are there."""
        response = self.responses[row]
        for end in range(self.done[row], self.done[row] + tokens):
            self._seen.update({tuple(response[end - n : end]): (row, end) for n in range(1, min(NGRAM, end) + 1)})
        self.done[row] += tokens

    def draft(self, row: int, most: int) -> Response:
        """What followed the longest n-gram that ends this response, where it was last seen with a token behind it."""
        response, done = self.responses[row], self.done[row]
        for n in range(min(NGRAM, done), 0, -1):
            found = self._seen.get(tuple(response[done - n : done]))
            if found is not None:
                other, end = found
                return self.responses[other][end : min(end + most, self.done[other])]
        return ()

    def right(self, row: int, draft: Response) -> int:
        """How many leading tokens of the draft are those that are sampled."""
        rest = self.responses[row][self.done[row] :]
        return next(
            (i for i, (a, b) in enumerate(zip(draft, rest, strict=False)) if a != b), min(len(draft), len(rest))
        )


def play(groups: Sequence[Sequence[Response]], cost: Callable[[int], float], most: int, tail: int | None) -> Played:
    """A step's decoding with drafts of up to ``most`` tokens (0: without)."""
    states = [Group(responses) for responses in groups]
    total, passes, drafted, kept = 0.0, 0, 0, 0
    while True:
        rows = [(s, i) for s in states for i, r in enumerate(s.responses) if s.done[i] < len(r)]
        if not rows:
            return Played(cost=total, passes=passes, drafted=drafted, kept=kept)
        drafting = most > 0 and (tail is None or len(rows) <= tail)
        drafts = [s.draft(i, most) if drafting else () for s, i in rows]
        right = [s.right(i, draft) for (s, i), draft in zip(rows, drafts, strict=True)]
        for (state, i), good in zip(rows, right, strict=True):
            state.advance(i, min(good + 1, len(state.responses[i]) - state.done[i]))
        total += cost(len(rows) + sum(map(len, drafts)))
        passes, drafted, kept = passes + 1, drafted + sum(map(len, drafts)), kept + sum(right)


def pass_cost(growth: Path) -> tuple[Callable[[int], float], list[tuple[float, float]]]:
    """CPU seconds of a pass against its positions, interpolated between measured counts; beyond them in proportion."""
    points = [p for p in json.loads(growth.read_text())["points"] if p["question"] == "rows"]
    known = sorted((float(p["samples"]), p["samples"] / p["decode_tokens_per_cpu_s"]) for p in points)
    counts, seconds = (np.array(column) for column in zip(*known, strict=True))

    def cost(positions: int) -> float:
        if positions > counts[-1]:
            return float(seconds[-1] * positions / counts[-1])
        return float(np.interp(positions, counts, seconds))

    return cost, known


def steps_of(run: Path, count: int) -> list[tuple[int, list[list[Response]]]]:
    """``count`` recorded steps spread over a run: their numbers and groups of responses."""
    files = sorted((run / "rollouts").glob("*.parquet"))
    chosen = sorted({round(i) for i in np.linspace(0, len(files) - 1, count)})
    found: list[tuple[int, list[list[Response]]]] = []
    for index in chosen:
        table = pq.read_table(files[index], columns=["step", "draw", "tokens"]).to_pydict()
        groups: dict[int, list[Response]] = {}
        for draw, tokens in zip(table["draw"], table["tokens"], strict=True):
            groups.setdefault(draw, []).append(tokens)
        found.append((table["step"][0], list(groups.values())))
    return found


def study(run: Path, cost: Callable[[int], float], count: int) -> dict[str, Any]:
    """Cost of the run's steps with drafts against without."""
    steps = steps_of(run, count)
    plain = [play(groups, cost, 0, None) for _, groups in steps]
    rows: list[dict[str, Any]] = []
    for most in DRAFTS:
        for tail in TAILS:
            played = [play(groups, cost, most, tail) for _, groups in steps]
            drafted = sum(p.drafted for p in played)
            rows.append(
                {
                    "draft_tokens": most,
                    "rows_left": tail,
                    "kept_share": rounded(sum(p.kept for p in played) / max(drafted, 1)),
                    "passes_ratio": rounded(sum(p.passes for p in played) / sum(p.passes for p in plain)),
                    "time_ratio": rounded(sum(p.cost for p in played) / sum(p.cost for p in plain)),
                }
            )
    return {"run": run.name, "steps": [number for number, _ in steps], "drafts": rows}


def section(studies: Sequence[dict[str, Any]]) -> str:
    """What the page says: the best and the plainest draft of each run, and what follows."""
    lines = [
        "## Speculative decoding from a group's own responses",
        "",
        "Not built, since it would not pay here. `python benchmarks/speculation.py runs/smollm2 runs/quickstart` plays",
        "recorded steps again with drafts looked up in what the group has sampled so far, at the pass costs measured",
        "above and with free drafting. A time ratio below 1 is a gain; passes are what a device bound by reading",
        "weights would save at most.",
        "",
        "| run | drafts | kept | passes | CPU time of decoding |",
        "|---|---|---|---|---|",
    ]
    for study in studies:
        rows = study["drafts"]
        always = min((r for r in rows if r["rows_left"] is None), key=lambda r: r["time_ratio"])
        best = min(rows, key=lambda r: r["time_ratio"])
        for row, name in ((best, f"best: at most {best['rows_left']} rows left"), (always, "from the first token")):
            lines.append(
                f"| {study['run']} | {row['draft_tokens']} tokens, {name} | {row['kept_share']:.0%} | "
                f"x {row['passes_ratio']:.2f} | x {row['time_ratio']:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders with recorded rollouts")
    parser.add_argument("--steps", type=int, default=8, help="steps of each run, spread over it")
    parser.add_argument("--growth", type=Path, default=FIGURES / "growth-rollout.json", help="of rollout_growth.py")
    parser.add_argument("--output", type=Path, default=FIGURES / "speculation.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md")
    arguments = parser.parse_args()
    cost, known = pass_cost(arguments.growth)
    found = [study(run, cost, arguments.steps) for run in arguments.runs]
    report = {
        "run": document({"ngram": NGRAM}),
        "pass_seconds": [[int(count), rounded(seconds)] for count, seconds in known],
        "studies": found,
    }
    write_atomically(arguments.output, json.dumps(report, indent=1, allow_nan=False) + "\n")
    put_section(arguments.page, "speculation", section(found))
    for entry in found:
        print(entry["run"])
        for row in entry["drafts"]:
            print("  ", row)


if __name__ == "__main__":
    main()
