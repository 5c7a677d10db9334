r"""Answers in running text, judged by this library and by Math-Verify: wrong accepted and correct missed, by class.

    python -m benchmarks.verifiers.clause_probes [--show development|all] [--tables]

The probes of `packages/verifiers/tests/maths/clause_probes.toml` are split into two halves by a hash of their text.
Mistakes of the development half may be read (``--show``) and fixed; the held-out half only measures. ``--tables`` adds
the tables ``running_*.txt`` of the tests.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections import Counter, defaultdict

from benchmarks.shared import ROOT, parser_of
from benchmarks.verifiers.maths_verifier import bare, warm_verifier

TABLES = ROOT / "packages" / "verifiers" / "tests" / "maths"
Probe = tuple[str, str, str, bool]
"""Class, reference, response, and whether the response gives the reference."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--show", choices=("development", "all"), help="print mistakes of this half, or of both")
    parser.add_argument("--tables", action="store_true", help="also judge the tests' tables running_*.txt")
    arguments = parser.parse_args()
    verifier = warm_verifier()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for name, reference, response, right in own_probes() + (running_tables() if arguments.tables else []):
        own_part = not name.startswith("running_")
        held_out = own_part and is_held_out(reference, response)
        rows = [name] if not own_part else [name, "all held out" if held_out else "all development"]
        fault = "missed" if right else "accepted"
        ours, theirs = verifier.judge([reference], response).correct, bare([reference], response)
        for row in rows:
            counts[row]["right" if right else "wrong"] += 1
            counts[row][f"ours {fault}"] += ours != right
            counts[row][f"Math-Verify {fault}"] += theirs != right
        if ours != right and arguments.show and (arguments.show == "all" or not held_out):
            print(f"{fault}: {name} | {reference} | {response}")
    print(f"{'class':28} right wrong | accepted, missed: ours, Math-Verify")
    for row, count in counts.items():
        said = [count[f"{who} {fault}"] for who in ("ours", "Math-Verify") for fault in ("accepted", "missed")]
        print(f"{row:28} {count['right']:5} {count['wrong']:5} | {said[0]:3} {said[1]:3} | {said[2]:3} {said[3]:3}")


def is_held_out(reference: str, response: str) -> bool:
    """Return whether a probe belongs to the held-out half."""
    return hashlib.sha256(f"{reference}\n{response}".encode()).digest()[0] % 2 == 1


def own_probes() -> list[Probe]:
    """Return the probes of `clause_probes.toml`."""
    rows = tomllib.loads((TABLES / "clause_probes.toml").read_text(encoding="utf-8"))["probes"]
    return [
        (row["class"], row["reference"], response, kind == "right")
        for row in rows
        for kind in ("right", "wrong")
        for response in row[kind]
    ]


def running_tables() -> list[Probe]:
    """Return the tables of the tests: ``=`` a reference, ``+`` correct responses, ``-`` wrong ones."""
    found: list[Probe] = []
    for path in sorted(TABLES.glob("running_*.txt")):
        reference = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            mark, _, rest = line.partition(" ")
            reference = rest if mark == "=" else reference
            found += [(path.stem, reference, one, mark == "+") for one in rest.split(" || ") if mark in ("+", "-")]
    return found


if __name__ == "__main__":
    main()
