"""Copies in disguise that the pipeline must find, and look-alikes with another answer that dedup must keep.

    python -m benchmarks.pipeline.lookalikes --data ../shared/data/math/sets   # writes pipeline-lookalikes.json
    python -m benchmarks.pipeline.lookalikes --data ... --half development --misses runs/x.jsonl --output runs/x.json

The rows of `lookalikes.toml` and the functions below make copies and look-alikes of real problems, at most one of each
problem, which are put among the problems of their set. Rows and problems are split into two halves by hashes. The
misses of both halves were read while the rules were made. The rows of `lookalikes_fresh.toml` are a third set, whose
misses were not read. All rows are mechanical, and their authors knew the rules. The texts of `lookalikes_by_hand.toml`
were edited one by one by another author, before the rules were read; those of `lookalikes_unseen.toml` by authors who
knew them.

Dedup: recall is the share of copies that are dropped for their original. Precision: of the planted texts that are
dropped, the share that are such copies. Decontamination: share of the copies of test problems that are dropped.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from benchmarks.pipeline.plants import EVALUATION, plant
from benchmarks.shared import FIGURES, parser_of, write_figure
from magicrl.evaluation.provenance import environment_facts
from magicrl.pipeline.decontaminate_step import find_contamination
from magicrl.pipeline.dedup_step import find_duplicates
from magicrl.pipeline.entry import Document
from magicrl.pipeline.pipeline_schema import DecontaminationSettings, DedupSettings

TABLES, FRESH_TABLES, BY_HAND, UNSEEN = (
    tomllib.loads(Path(__file__).with_name(f"lookalikes{name}.toml").read_text(encoding="utf-8"))
    for name in ("", "_fresh", "_by_hand", "_unseen")
)
HAND_SETS = {
    "gsm8k": ("gsm8k/simple_gsm8k_train.jsonl", "problem"),
    "math": ("math_train/simple_math_train.jsonl", "problem"),
    "svamp": ("svamp/simple_svamp.jsonl", "problem"),
    "deepmath": ("deepmath_5k/math_deepmath_deal.jsonl", "prompt"),
}
SETS = {
    "gsm8k": ("gsm8k/simple_gsm8k_train.jsonl", "gsm8k/simple_gsm8k_test.jsonl"),
    "math": ("math_train/simple_math_train.jsonl", "math500/simple_math500.jsonl"),
}
HALVES = ("development", "held_out")
FRESH = "fresh"
Change = Callable[[str, random.Random], str | None]
Planted = list[tuple[str, str, str]]
"""Row, id of the original, text."""

_WORDS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
_TENS = {20: "twenty", 30: "thirty", 40: "forty", 50: "fifty", 60: "sixty", 70: "seventy", 80: "eighty", 90: "ninety"}
SPOKEN = dict(enumerate(_WORDS.split(" "))) | _TENS
SPOKEN |= {tens + unit: f"{word}-{SPOKEN[unit]}" for tens, word in _TENS.items() for unit in range(1, 10)}
SPOKEN |= {100 * unit: f"{SPOKEN[unit]} hundred" for unit in range(1, 10)}
SPOKEN |= {1000 * unit: f"{SPOKEN[unit]} thousand" for unit in range(1, 10)}
_NUMBER = re.compile(r"(?<![\w.,$^{\\/:*-])\d{1,4}(?![\w%}$^/:*]|[.,]\d|\s?[-+=])")
_NAME = re.compile(r"(?<=[a-z,;] )[A-Z][a-z]{2,}\b(?=(?:'s)? [a-z]|[.?,])")
_CALENDAR = re.compile(r"\w+day|January|February|March|April|May|June|July|August|\w+ber")


def numerals(text: str, rng: random.Random) -> str | None:
    return _NUMBER.sub(lambda m: SPOKEN.get(int(m[0]), m[0]), text)


def digits(text: str, rng: random.Random) -> str | None:
    small = {word: str(number) for number, word in SPOKEN.items() if number > 1}
    pattern = rf"(?<![-\w])(?:{'|'.join(sorted(small, key=len, reverse=True))})(?![-\w]| (?:hundred|thousand|million))"
    return re.sub(pattern, lambda m: small[m[0]], text)


def _typo(change: Callable[[str], str]) -> Change:
    """Change some letters inside a long word."""

    def made(text: str, rng: random.Random) -> str | None:
        words = list(re.finditer(r"(?<![\\\w{])[a-z]{7,}(?![\w}])", text))
        place = rng.choice(words).start() + rng.randint(2, 4) if words else 0
        return text[:place] + change(text[place : place + 2]) + text[place + 2 :] if words else None

    return made


def lower(text: str, rng: random.Random) -> str | None:
    return None if "\\" in text or re.search(r"\$(?!\d)", text) else text.lower()


def upper(text: str, rng: random.Random) -> str | None:
    return None if "\\" in text or re.search(r"\$(?!\d)", text) else text.upper()


def renamed(text: str, rng: random.Random) -> str | None:
    return plant("renamed", text, EVALUATION, rng)


def other_number(text: str, rng: random.Random) -> str | None:
    places = list(re.finditer(r"(?<![\w.,^{\\])\d{1,4}(?![\w}]|[.,]\d)", text))
    if not places:
        return None
    place = rng.choice(places)
    return text[: place.start()] + str(int(place[0]) + rng.randint(1, 9)) + text[place.end() :]


def exchanged_numbers(text: str, rng: random.Random) -> str | None:
    places = list(re.finditer(r"(?<![\w.,^{\\])\d{1,4}(?![\w}]|[.,]\d)", text))
    if len({place[0] for place in places}) < 2:
        return None
    one, other = rng.sample(places, 2)
    if one[0] == other[0]:
        return None
    one, other = sorted((one, other), key=lambda m: m.start())
    return text[: one.start()] + other[0] + text[one.end() : other.start()] + one[0] + text[other.end() :]


def _people(text: str) -> tuple[list[str], int]:
    """Return the names of a story, and where its last sentence begins."""
    names = dict.fromkeys(name for name in _NAME.findall(text) if not _CALENDAR.fullmatch(name))
    return list(names), max((m.end() for m in re.finditer(r"[.?!]\s+(?=[A-Z])", text.strip())), default=0)


def other_person(text: str, rng: random.Random) -> str | None:
    """Ask about somebody else of the story."""
    names, start = _people(text)
    asked = [name for name in names if re.search(rf"\b{name}\b", text[start:])]
    others = [name for name in names if name not in asked and name in text[:start]]
    if not (start and asked and others):
        return None
    return text[:start] + re.sub(rf"\b{rng.choice(asked)}\b", rng.choice(others), text[start:])


def exchanged_people(text: str, rng: random.Random) -> str | None:
    """Swap two people of one sentence."""
    names, _ = _people(text)
    sentences = re.split(r"(?<=[.?!])(\s+)", text)
    told = [[name for name in names if re.search(rf"\b{name}\b", part)] for part in sentences]
    fits = [place for place, people in enumerate(told) if len(people) == 2]
    if not fits or len(sentences) < 3:
        return None
    place = rng.choice(fits)
    one, other = told[place]
    elsewhere = re.search(rf"\b(?:{one}|{other})\b", "".join(sentences[:place] + sentences[place + 1 :]))
    if elsewhere is None or re.search(rf"\b(?:{one}|{other})(?:,| and|, and) (?:{one}|{other})\b", sentences[place]):
        return None  # other names only, or a list, in which the order does not count
    swap = {one: other, other: one}
    sentences[place] = re.sub(rf"\b(?:{one}|{other})\b", lambda m: swap[m[0]], sentences[place])
    return "".join(sentences)


def other_variable(text: str, rng: random.Random) -> str | None:
    """Ask for another variable of the problem."""
    asked = re.search(r"([Ff]ind|[Cc]ompute|[Ww]hat is|[Dd]etermine) \$([a-z])\$", text)
    others = sorted({*re.findall(r"\$([a-z])(?=[$ ,=+])", text)} - {asked[2]}) if asked else []
    return text[: asked.start(2)] + rng.choice(others) + text[asked.end(2) :] if asked and others else None


def added_step(text: str, rng: random.Random) -> str | None:
    _, start = _people(text)
    step = rng.choice(("Half of these are then given away. ", "Later the same thing happens again. "))
    return text[:start] + step + text[start:] if start else None


_OF_SIGNS = ("dollars_after", "usd", "usd_after", "two_places", "delimiters", "display")


def _filled(form: str, match: re.Match[str]) -> str:
    return re.sub(r"\\(\d)", lambda m: match[int(m[1])], form)  # not expand(): forms hold LaTeX commands


def _rewritten(pairs: Sequence[tuple[str, str]], name: str) -> Change:
    def change(text: str, rng: random.Random) -> str | None:
        # whether the dollar signs are those of formulas
        if (re.search(r"\$(?!\d)", text) is None) == (name in ("delimiters", "display")) and name in _OF_SIGNS:
            return None
        for pattern, form in pairs:
            text = re.sub(pattern, lambda m, form=form: _filled(form, m), text)
        return text

    return change


def _edited(pairs: Sequence[tuple[str, str]]) -> Change:
    def change(text: str, rng: random.Random) -> str | None:
        for pattern, form in pairs:
            if places := list(re.finditer(pattern, text)):
                place = rng.choice(places)
                form = _filled(form, place)
                form = form.capitalize() if place[0][:1].isupper() else form
                return text[: place.start()] + form + text[place.end() :]
        return None

    return change


def _templated(before: str, after: str) -> Change:
    return lambda text, rng: f"{before}{text.strip()}{after}"


def of_half(rows: Mapping[str, Any], half: str) -> dict[str, Any]:
    """Return every other row, in the order of the hashes of their names; all rows of the fresh set."""
    if half == FRESH:
        return dict(rows)
    return {name: rows[name] for name in sorted(rows, key=lambda name: crc32(name.encode()))[HALVES.index(half) :: 2]}


def rows(half: str) -> tuple[dict[str, Change], dict[str, Change]]:
    """The changes of a half that make copies, and those that make look-alikes."""
    tables = FRESH_TABLES if half == FRESH else TABLES
    templates = of_half({name: _templated(*ends) for name, ends in tables["templates"].items()}, half)
    functions: tuple[Change, ...] = (numerals, digits, lower, upper, renamed)
    rewrites = {name: _rewritten(pairs, name) for name, pairs in tables["rewrites"].items()}
    rewrites |= {"letters_swapped": _typo(lambda two: two[::-1]), "letter_lost": _typo(lambda two: two[0])}
    rewrites |= {one.__name__: one for one in functions}
    rewrites = of_half(rewrites, half)

    def both(text: str, rng: random.Random) -> str | None:
        inner = rng.choice(list(rewrites.values()))(text, rng)
        return None if inner in (None, text) else rng.choice(list(templates.values()))(inner, rng)

    functions = (other_number, exchanged_numbers, other_person, exchanged_people, other_variable, added_step)
    edits = {name: _edited(pairs) for name, pairs in tables["edits"].items()} | {one.__name__: one for one in functions}
    return templates | rewrites | {"template_and_rewrite": both}, of_half(edits, half)


def planted(
    base: Mapping[str, str], changes: Mapping[str, Change], each: int, rng: random.Random, used: set[str]
) -> Planted:
    """Up to ``each`` texts of every row, each of another problem than those ``used``, which grow."""
    made: Planted = []
    for row, change in changes.items():
        count = 0
        for name in rng.sample(sorted(base), len(base)):
            text = change(base[name], rng) if name not in used and "[asy]" not in base[name] else None
            if text is not None and " ".join(text.split()) != " ".join(base[name].split()):
                made.append((row, name, text))
                used.add(name)
                count += 1
            if count == each:
                break
    return made


def read(path: Path, half: str, most: int) -> dict[str, str]:
    """Problems of a half of a set, by their ids."""
    with path.open(encoding="utf-8") as file:
        texts = dict.fromkeys(json.loads(line)["problem"] for line in file)
    mine = of_half(dict(zip(texts, texts, strict=True)), half)
    return {f"{path.stem}/{number}": text for number, text in zip(range(most), mine, strict=False)}


def shares(plants: Planted, hit: Sequence[bool]) -> dict[str, str]:
    """Return how many of how many, by row."""
    asked, found = Counter(row for row, _, _ in plants), Counter(p[0] for p, h in zip(plants, hit, strict=True) if h)
    return {row: f"{found[row]}/{count}" for row, count in asked.items()}


def dedup_figures(base: Mapping[str, str], half: str, each: int, misses: list[Any]) -> dict[str, Any]:
    disguises, edits = rows(half)
    rng, used = random.Random(crc32(half.encode())), set[str]()
    # look-alikes first: their rows fit fewer problems
    others, copies = (planted(base, changes, each, rng, used) for changes in (edits, disguises))
    documents = [Document(name, text, (1.0,)) for name, text in base.items()]
    documents += [Document(f"+{i}", text, (0.0,)) for i, (_, _, text) in enumerate(copies + others)]
    began = time.process_time()
    with tempfile.TemporaryDirectory(prefix="lookalikes-") as folder:
        found, _ = find_duplicates(documents, DedupSettings(), folder=Path(folder))
    seconds = time.process_time() - began
    kept = [found[f"+{i}"].kept if f"+{i}" in found else None for i in range(len(copies + others))]
    last = {name: found[name].kept if name in found else name for name in base}
    right = [kept[i] is not None and kept[i] == last[name] for i, (_, name, _) in enumerate(copies)]
    lost = [one is not None for one in kept[len(copies) :]]
    wrong = [*(not hit for hit in right), *lost]
    misses += [(row, base[name], text) for (row, name, text), miss in zip(copies + others, wrong, strict=True) if miss]
    dropped = sum(one is not None for one in kept)
    return {
        "documents": len(documents),
        "copies": len(copies),
        "look_alikes": len(others),
        "recall": round(sum(right) / len(copies), 4),
        "precision": round(sum(right) / dropped, 4),
        "look_alikes_dropped": round(sum(lost) / len(others), 4),
        "copies_found": shares(copies, right),
        "look_alikes_dropped_by_row": shares(others, lost),
        "dropped_of_the_set_itself": sum(name in found for name in base),
        "cpu_seconds": round(seconds, 1),
    }


def decontamination_figures(
    base: Mapping[str, str], tests: Mapping[str, str], half: str, each: int, misses: list[Any]
) -> dict[str, Any]:
    """Copies of test problems among training problems: how many are dropped."""
    copies = planted(tests, rows(half)[0], each, random.Random(crc32(half.encode())), set())
    documents = [Document(name, text) for name, text in base.items()]
    documents += [Document(f"+{i}", text) for i, (_, _, text) in enumerate(copies)]
    references = {"tests": [Document(name, text) for name, text in tests.items()]}
    settings = DecontaminationSettings()
    began = time.process_time()
    with tempfile.TemporaryDirectory(prefix="lookalikes-") as folder:
        hits = list(find_contamination(documents, references, settings, folder=Path(folder)))
    dropped = {(hit.document, hit.reference) for hit in hits if hit.kind in settings.drop}
    hit = [(f"+{i}", name) in dropped for i, (_, name, _) in enumerate(copies)]
    misses += [(f"test {row}", tests[name], text) for (row, name, text), h in zip(copies, hit, strict=True) if not h]
    return {
        "copies": len(copies),
        "dropped": round(sum(hit) / len(copies), 4),
        "copies_dropped": shares(copies, hit),
        "training_problems_dropped": len({hit for hit, _ in dropped} & {*base}),
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def figures(data: Path, half: str, most: int, each: int, misses: list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, (train, test) in SETS.items():
        base, tests = read(data / train, half, most), read(data / test, half, most)
        dedup = dedup_figures(base, half, each, misses)
        yield name, {"dedup": dedup, "decontamination": decontamination_figures(base, tests, half, each // 4, misses)}


def by_hand_figures(data: Path, rows: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return recall, precision and dropped copies of test problems for the texts that were edited by hand."""
    base: dict[str, str] = {}
    for name, (file, column) in HAND_SETS.items():
        with (data / file).open(encoding="utf-8") as lines:
            base |= {f"{name}/{number}": json.loads(line)[column] for number, line in enumerate(lines)}
    plants: Planted = []
    for kind in ("copies", "look_alikes"):
        for row in rows[kind]:
            original = f"{row['set']}/{row['line']}"
            text = base[original]
            for old, new in row["change"]:
                text = text.replace(old, new)
            plants.append((kind, original, f"{row.get('before', '')}{text}{row.get('after', '')}"))
    own = {name for _, name, _ in plants}
    few = {name: text for name, text in base.items() if name in own or int(name.partition("/")[2]) < 1200}
    documents = [Document(name, text, (1.0,)) for name, text in few.items()]
    documents += [Document(f"+{i}", text, (0.0,)) for i, (_, _, text) in enumerate(plants)]
    tests = {"tests": [Document(name, base[name]) for name in sorted(own)]}
    settings = DecontaminationSettings()
    with tempfile.TemporaryDirectory(prefix="lookalikes-") as folder:
        found, _ = find_duplicates(documents, DedupSettings(), folder=Path(folder) / "dedup")
        hits = list(find_contamination(documents[len(few) :], tests, settings, folder=Path(folder) / "hits"))
    kept = {name: found[name].kept if name in found else name for name in own}
    gone = [found[f"+{i}"].kept if f"+{i}" in found else None for i in range(len(plants))]
    copies = [i for i, (kind, _, _) in enumerate(plants) if kind == "copies"]
    right = sum(gone[i] == kept[plants[i][1]] for i in copies)
    dropped = {(hit.document, hit.reference) for hit in hits if hit.kind in settings.drop}
    return {
        "copies": len(copies),
        "look_alikes": len(plants) - len(copies),
        "recall": round(right / len(copies), 4),
        "precision": round(right / sum(one is not None for one in gone), 4),
        "decontamination_dropped": round(sum((f"+{i}", plants[i][1]) in dropped for i in copies) / len(copies), 4),
    }


def main() -> None:
    parser = parser_of(__doc__, FIGURES / "pipeline-lookalikes.json")
    parser.add_argument("--data", type=Path, required=True, help="folder of the sets")
    parser.add_argument("--half", choices=(*HALVES, FRESH), help="only this half, or the third set")
    parser.add_argument("--most", type=int, default=4000, help="problems of each half of a set")
    parser.add_argument("--each", type=int, default=40, help="texts of each row")
    parser.add_argument("--misses", type=Path, help="JSON Lines of what went wrong in one half")
    given = parser.parse_args()
    misses: dict[str, list[Any]] = {half: [] for half in (*HALVES, FRESH)}
    halves = [given.half] if given.half else [*HALVES, FRESH]
    told = {half: dict(figures(given.data, half, given.most, given.each, misses[half])) for half in halves}
    if given.misses:
        given.misses.write_text(
            "".join(json.dumps(miss) + "\n" for miss in misses[given.half or "development"]), encoding="utf-8"
        )
    tables = {"by_hand": BY_HAND} | {f"unseen_{name}": rows for name, rows in UNSEEN.items()}
    by_hand = {name: by_hand_figures(given.data, rows) for name, rows in tables.items()}
    write_figure(given.output, {"environment": environment_facts(), "each": given.each} | by_hand | told)
    for name, of in by_hand.items():
        print(name, of["recall"], of["precision"], of["decontamination_dropped"])
    for half, sets in told.items():
        for name, of in sets.items():
            print(half, name, of["dedup"]["recall"], of["dedup"]["precision"], of["decontamination"]["dropped"])


if __name__ == "__main__":
    main()
