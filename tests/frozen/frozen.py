"""Compare current behaviour with the committed records, and accept an intended change.

    make frozen                                         # python tests/frozen/frozen.py check [PART ...]
    make frozen-accept WHAT=help REASON="why it changed"

A part is a function that returns rows, which are texts by a key. A check names every row that differs from the record,
with the text before and after. All calls use public entry points (``python -m magicrl``, ``import magicrl``, the files
that they write), so moved code needs no change here.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.util
import io
import json
import logging
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
TESTS, ROOT = HERE.parent, HERE.parents[1]
RECORDS, LOG = HERE / "records", HERE / "ACCEPTED.md"
SHARED = ROOT.parent / "shared" / "data"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "NO_COLOR": "1"}
COMMANDS = os.environ | ENVIRONMENT
"""Environment of commands in separate processes."""
MOST_LINES = 20
"""Lines that a check prints for one part."""
TOLERANCE = 1e-5
"""Relative difference that counts as none: CPUs round a forward pass differently."""
NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?|-?\d+e[+-]?\d+")
Rows = dict[str, str]

sys.path.append(str(TESTS / "helpers"))


def module(path: str) -> ModuleType:
    """Import a script by its path from `tests`."""
    spec = importlib.util.spec_from_file_location(f"frozen_{Path(path).stem}", TESTS / path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def command(*words: str) -> str:
    """Run ``python -m magicrl`` with these words in this process, and return what it prints in lines of any width.

    Raises:
        RuntimeError: The exit status is not 0.
    """
    printed = io.StringIO()
    with (
        patch.dict(os.environ, ENVIRONMENT | {"COLUMNS": "2000", "TERM": "dumb"}),
        patch.object(sys, "argv", ["magicrl", *words]),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        try:
            runpy.run_module("magicrl", run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"magicrl {' '.join(words)}: status {end.code}\n{printed.getvalue()}") from None
    return printed.getvalue()


def digest(value: Any) -> str:
    """Return a hash of a value with eight hexadecimal digits."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def shown(value: Any) -> str:
    """Return a value as text. Numbers have six significant digits."""
    if isinstance(value, float):
        return repr(float(f"{value:.6g}"))
    return f"[{', '.join(map(shown, value))}]" if isinstance(value, list) else json.dumps(value, sort_keys=True)


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of nested dicts; the dicts of a list have the keys ``name[0]``, ``name[1]``, ..."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from leaves(value, f"{name}.{key}".lstrip("."))
    elif isinstance(tree, list) and tree and all(isinstance(item, dict) for item in tree):
        for number, item in enumerate(tree):
            yield from leaves(item, f"{name}[{number}]")
    else:
        yield name, tree


# --- help ------------------------------------------------------------------------------------------------------------


def help_rows(words: tuple[str, ...] = ()) -> Rows:
    """Return the text of every command and option in ``--help``, without the frames around it."""
    name = " ".join(("magicrl", *words))
    rows: Rows = {}
    panel, key = "", name
    for line in command(*words, "--help").splitlines():
        text = " ".join(line.strip("│╭╰╮╯─ ").split())
        if line.startswith("╭"):
            panel = text
        elif panel == "Commands" and text and not text.startswith("-"):
            rows |= help_rows((*words, text.split()[0]))
        elif text:
            option = re.search(r"(?<!\S)--?[a-z][\w-]*", text) if panel else None
            key = f"{name} {option[0]}" if option else key
            rows[key] = f"{rows[key]} / {text}" if key in rows else text
    return rows


# --- a run, an evaluation, a data pipeline ---------------------------------------------------------------------------

SUMS = [{"id": f"sum-{n}", "problem": f"{n % 3} + {n % 4}", "answer": str(n % 3 + n % 4)} for n in range(14)]
RUN = {
    "run.threads": 1, "data.difficulty_filter.samples": 4, "rollout.temperature": 1.0, "verifier.workers": 1,
    "stages.0.max_steps": 1, "stages.1.max_steps": 1, "stages.1.max_tokens": 12, "evaluation.every": 1,
    "evaluation.samples": 2, "checkpoint.every": 1, "data.test.held_out.count": 4,
    "data.test.held_out.verifier": "exact",
}  # fmt: skip
MEASURED = re.compile(
    r"second|time|date|version|commit|machine|path|folder|command|sha256|checksum|host|written|\.environment\.|\.source\.source$"
    r"|\.model\.model"
)
"""Keys of ``results.json`` whose values depend on the machine or the time."""


def model(folder: Path) -> Path:
    """Write a model of one token per ASCII character and one per boxed digit, with the same weights on every machine.

    numpy draws the weights, since torch's generators may differ in the last bit between machines.
    """
    import numpy as np
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    letters = [symbol for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()) if symbol.isascii() or symbol in "ĠĊ"]
    symbols = ["<pad>", "<end>", *letters]
    backend = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(symbols)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([f"\\boxed{{{digit}}}" for digit in range(6)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    made = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **sizes, **ends))
    rng = np.random.Generator(np.random.PCG64(0))
    with torch.no_grad():
        for parameter in made.parameters():
            values = rng.normal(0.0, 0.15, tuple(parameter.shape)).astype(np.float32)
            parameter.copy_(torch.from_numpy(values + (1.0 if parameter.ndim == 1 else 0.0)))
        # the first dimension makes an end, or a boxed digit, far likelier than another token
        made.model.embed_tokens.weight[:, 0] = 1.0
        made.model.embed_tokens.weight[[1, *range(len(symbols), len(tokenizer))], 0] = 2.6
    made.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    disable_progress_bar()
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def keys_of(path: Path) -> list[str]:
    """Return the columns of a table, or the keys of a JSON, JSON Lines or TOML file."""
    import pyarrow.parquet

    if path.suffix == ".parquet":
        return [f"{field.name}:{field.type}" for field in pyarrow.parquet.read_schema(path)]
    readers: dict[str, Callable[[str], Any]] = {
        ".json": json.loads,
        ".jsonl": lambda text: [json.loads(line) for line in text.splitlines()],
        ".toml": tomllib.loads,
    }
    tree = readers[path.suffix](path.read_text(encoding="utf-8")) if path.suffix in readers else {}
    # ids of problems are replaced, since they vary
    return sorted({re.sub(r"\[\d+\]", "[]", re.sub(r"(?<=sums-)\d+", "N", key)) for key, _ in leaves(tree)})


def run_rows() -> Rows:
    """Return the files of a short run of the recipe ``tiny``, and each key or column of a file as a separate row.

    The files of the model folder have only names: transformers writes them.
    """
    import magicrl

    with tempfile.TemporaryDirectory() as made:
        start, folder = model(Path(made) / "start"), Path(made) / "run"
        (Path(made) / "sums.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in SUMS))
        data = {"data.train": [{"path": str(Path(made) / "sums.jsonl"), "verifier": "exact"}]}
        magicrl.train("tiny", settings=RUN | data, model=start, output=folder, progress=False)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        found = [(path.relative_to(folder).as_posix(), path) for path in files]
        keys = {name: [] if name.startswith("model/") else keys_of(path) for name, path in found}
        return {row: "" for name, inside in keys.items() for row in (name, *(f"{name} {key}" for key in inside if key))}


def evaluation_rows() -> Rows:
    """Return every key and value of an evaluation's ``results.json`` but times, paths, versions and checksums."""
    import magicrl

    with tempfile.TemporaryDirectory() as made:
        folder, output = model(Path(made) / "model"), Path(made) / "evaluation"
        wanted: dict[str, Any] = {"samples": 8, "max_tokens": 24, "seed": 1, "pass_at": [1, 4], "majority_at": [4]}
        magicrl.evaluate(folder, {"sums": SUMS}, output=output, threads=1, reward="exact", progress=False, **wanted)
        results = json.loads((output / "results.json").read_text())
    return {key: shown(value) for key, value in leaves(results) if not MEASURED.search(key)}


def pipeline_rows() -> Rows:
    """Return what every step of the shipped pipeline ``laptop`` keeps and drops of ``problems.json``, and why.

    The model above samples in the difficulty step, and a local server votes in place of the judge.
    """
    import pyarrow.parquet
    import scripted

    rows: Rows = {}
    votes = scripted.serving(lambda body, number: scripted.verdict(not re.search("kite|baked", str(body))))
    with tempfile.TemporaryDirectory() as made, votes as judge:
        folder, output = Path(made), Path(made) / "out"
        for name, records in json.loads((HERE / "problems.json").read_text()).items():
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        settings = [
            f"sources.{n}.path={folder}/{name}.jsonl" for n, name in enumerate(("svamp", "gsm8k", "math", "mbpp"))
        ]
        settings += [f'steps.2.against={{held={{path="{folder}/held.jsonl"}}}}', "steps.3.sampler.threads=1"]
        settings += [f"steps.3.sampler.model={model(folder / 'model')}", "steps.3.sampler.dtype=float32"]
        # hash the step as a whole, since the pipeline's own hash names a package that holds the judge
        voter = f'{{model="judge", base_url="{judge.url}", votes=4, concurrency=1}}'
        settings += ["steps.3.max_tokens=24", f'steps.4={{use="judge", settings={{keep_votes=1, judges=[{voter}]}}}}']
        words = [word for setting in [*settings, "workers=1"] for word in ("--set", setting)]
        command("data", "build", "laptop", "--output", str(output), *words)
        for path in sorted(output.rglob("*.parquet")):
            step = path.parent.relative_to(output).as_posix()
            for number, row in enumerate(pyarrow.parquet.read_table(path).to_pylist()):
                content = {key: value for key, value in row.items() if key != "where"}
                text = json.dumps(content, sort_keys=True, default=str).replace(made, "")
                rows[f"{step} {row.get('id', number)}"] = f"{row.get('reason') or ''} {digest(text)}".strip()
    return rows


# --- verdicts --------------------------------------------------------------------------------------------------------

SETS = tomllib.loads((HERE / "sets.toml").read_text(encoding="utf-8"))
LETTERS: dict[str, str] = SETS["letters"]
LETTER_OF = {status: letter for letter, status in LETTERS.items()}
LIMITED = {"timeout", "memory", "time_limit", "memory_limit", "worker_lost"}
"""Statuses that depend on the speed or the memory of the machine."""
Judgement = tuple[str, dict[str, Any]]
"""A key ``SET ROW RESPONSE``, and a line of the input of ``magicrl verify``."""
names: dict[str, str] = {}
"""Ids in the data, by ``SET ROW``."""
answers: dict[str, str] = {}
"""Extracted answers, by key."""
uncompared: set[str] = set()
"""Keys that a check does not judge, since the record does not compare them: these cost most of the time."""


def rows_of(folder: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield set, ``SET ROW`` and record of every row that is judged."""
    for name, (path, stride) in SETS[folder].items():
        text = (SHARED / folder / path).read_text(encoding="utf-8")
        lines = text.splitlines() if path.endswith(".jsonl") else []
        records = [json.loads(line) for line in lines if line.strip()] or json.loads(text)
        for number, record in list(enumerate(records))[::stride]:
            names[f"{name} {number}"] = str(record.get("id", ""))
            yield name, f"{name} {number}", record


def maths_lines() -> Iterator[Judgement]:
    """Yield every maths response that is judged."""
    for name, row, record in rows_of("math"):
        reference = str(record.get("gold") or record.get("answer") or record.get("ground_truth") or "").strip()
        if name == "math_test":
            # the set has no references: the record holds the extracted answers of its solutions
            yield f"{row} solution", {"gold": "0", "response": record["solution"]}
        elif "label" in record:
            parts = record.get("response_parts") or [[record["response"], 1]]
            yield f"{row} response", {"gold": record["gold"], "response": "".join(text * many for text, many in parts)}
        elif reference:
            yield f"{row} bare", {"gold": reference, "response": reference}
            yield f"{row} boxed", {"gold": reference, "response": f"\\boxed{{{reference}}}"}


def code_lines() -> Iterator[Judgement]:
    """Yield every program that is judged. Attacks are included only where the data mark them as harmless."""
    for name, row, record in rows_of("code"):
        tests = {key: value for key, value in record["tests"].items() if key != "prelude"}
        if name == "adversarial_dev":
            if record["danger"] == "none":
                yield f"{row} program", {"program": record["program"], "tests": tests}
            continue
        if tests.get("type") == "checker":
            tests = {"fn_name": "sol", "inputs": [[]], "checker": tests["checker"]}
        tests |= {"entry_point": record["entry_point"]} if "entry_point" in record else {}
        tests |= {"import_prefix": record["prelude"]} if "prelude" in record else {}
        yield f"{row} reference", {"program": record["reference_solution"], "tests": tests}
        if "buggy_solution" in record:
            yield f"{row} buggy", {"program": record["buggy_solution"], "tests": tests}


def judged(kind: str, lines: Iterable[Judgement], *options: str, suffix: str = "", slow: float) -> Rows:
    """Return the verdicts of ``magicrl verify KIND`` on these lines: a letter for the status, then details.

    For a program, the details are tests passed of all. For an answer they are a hash of status, correctness and the
    extracted answer, or nothing where the letter is enough.

    Args:
        suffix: Last part of the keys.
        slow: Seconds from which on a time limit might decide on another machine: ``~`` marks the verdict.
    """
    rows: Rows = {}
    with tempfile.TemporaryDirectory() as made:
        given, found = Path(made) / "given.jsonl", Path(made) / "found.jsonl"
        wanted = [(key, line) for key, line in lines if key + suffix not in uncompared]
        if not wanted:
            return rows
        given.write_text("".join(json.dumps({"id": key} | line) + "\n" for key, line in wanted))
        words = [sys.executable, "-m", "magicrl", "verify", kind, "--input", str(given), "--output", str(found)]
        done = subprocess.run([*words, *options], cwd=ROOT, env=COMMANDS, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"magicrl verify {kind}: status {done.returncode}\n{done.stderr}")
        for line in found.read_text(encoding="utf-8").splitlines():
            verdict = json.loads(line)
            status, correct = verdict["status"], verdict["correct"]
            key, letter = verdict["id"] + suffix, LETTER_OF.get(status, f"[{status}]")
            if kind == "code":
                rows[key] = f"{letter}{verdict['passed']}/{verdict['total']}" + "!" * (correct != (status == "passed"))
            else:
                answers[key] = verdict["extracted"] or ""
                plain = verdict["extracted"] is None and correct == (status == "matched")
                rows[key] = letter if plain else letter + digest([status, correct, verdict["extracted"]])
            rows[key] += "~" * (status in LIMITED or verdict["seconds"] > slow)
    return rows


def maths_rows() -> Rows:
    """Return the verdicts on maths answers under both extraction policies."""
    lines = list(maths_lines())
    found = {}
    for policy in ("box", "lenient"):
        found |= judged("math", lines, "--extract", policy, suffix=f" {policy}", slow=0.3)
    return {key: found[key] for line, _ in lines for key in (f"{line} box", f"{line} lenient") if key in found}


def code_rows() -> Rows:
    """Return the verdicts on programs; the attacks run in the strictest tier of the sandbox."""
    attacks, references = [], []
    for key, line in code_lines():
        (attacks if key.startswith("adversarial_dev ") else references).append((key, line))
    strict = ("--tier", "B", "--stop-at-failure", "--time-limit", "4", "--memory-limit-mb", "1024")
    usual = ("--preload", "sortedcontainers", "--time-limit", "10", "--total-limit", "10")
    return judged("code", attacks, *strict, slow=2.0) | judged("code", references, *usual, slow=3.0)


# --- records that other tests own ------------------------------------------------------------------------------------


def signature_rows(text: str) -> Rows:
    """Return what each public name returns, and its parameters."""
    rows: Rows = {}
    name = ""
    for line in text.splitlines():
        name = name if line.startswith(" ") else line.split(" ")[0]
        rows[f"{name} {line.split(':')[0].strip()}" if line.startswith(" ") else name] = line.strip()
    return rows


def golden_rows(updates: list[dict[str, float]]) -> Rows:
    """Return every metric of every update."""
    return {
        f"update {number} {key}": repr(value) for number, row in enumerate(updates, 1) for key, value in row.items()
    }


def error_rows(page: str) -> Rows:
    """Return exit status and message of every error of ``docs/reference/errors.md``."""
    entries = re.findall(r"^### ([^\n]+)\n\n```text\n(.*?)\n```\n\nExit status (\d)", page, re.MULTILINE | re.DOTALL)
    return {title: f"{status} {text}" for title, text, status in entries}


def made_errors() -> Rows:
    """Return the exit status and message of every error of that page, by causing it."""
    script = module("../tools/errors_page.py")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "cases").mkdir()
        return error_rows(script.page(script.Desk.prepare(Path(made)), Path(made) / "cases"))


# --- records, comparison, acceptance ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Recorded behaviour.

    Attributes:
        now: Return today's rows.
        verdicts: Its rows are verdicts on ``../shared/data``: a file per set, a line per row of the data.
        rounded: Numbers in its rows may differ by rounding.
        kept: Return the committed rows of a record that another test owns.
        regenerator: Script that writes that record, by its path from `tests`.
    """

    now: Callable[[], Rows]
    verdicts: bool = False
    rounded: bool = False
    kept: Callable[[], Rows] | None = None
    regenerator: str = ""


PARTS = {
    "help": Part(help_rows),
    "run": Part(run_rows),
    "evaluation": Part(evaluation_rows, rounded=True),
    "pipeline": Part(pipeline_rows),
    "signatures": Part(
        lambda: signature_rows(module("unit/test_api.py").signatures()),
        kept=lambda: signature_rows((TESTS / "unit" / "api.txt").read_text()),
        regenerator="unit/test_api.py",
    ),
    "golden": Part(
        lambda: golden_rows(module("golden/regenerate.py").trajectory()),
        kept=lambda: golden_rows(json.loads((TESTS / "golden" / "trajectory.json").read_text())),
        regenerator="golden/regenerate.py",
        rounded=True,
    ),
    "errors": Part(
        made_errors,
        kept=lambda: error_rows((ROOT / "docs" / "reference" / "errors.md").read_text()),
        regenerator="../tools/errors_page.py",
    ),
    "maths": Part(maths_rows, verdicts=True),
    "code": Part(code_rows, verdicts=True),
}


def read(name: str) -> Rows:
    """Return the committed rows of a part; none if it was never recorded."""
    part = PARTS[name]
    if part.kept is not None:
        return part.kept()
    rows: Rows = {}
    for path in sorted(RECORDS.glob(f"{name}/*.txt" if part.verdicts else f"{name}.txt")):
        text = path.read_text(encoding="utf-8")
        if not part.verdicts:
            return dict(line.split("\t") for line in text.replace("\n\t/ ", " / ").splitlines())
        lines = text.splitlines()
        _, *kinds = lines[0].split()
        for number, *tokens in map(str.split, lines[1:]):
            for at, (kind, token) in enumerate(zip(kinds, tokens, strict=True)):
                tokens[at] = tokens[at - 1] if token == "=" else token
                rows[f"{path.stem} {number} {kind.replace('/', ' ')}"] = tokens[at]
    return {key: value for key, value in rows.items() if value != "-"}


def write(name: str, rows: Rows) -> None:
    """Write the record of a part."""
    part = PARTS[name]
    if part.regenerator:
        subprocess.run([sys.executable, str(TESTS / part.regenerator)], check=True)
    elif not part.verdicts:
        text = "".join(f"{key}\t{value}\n" for key, value in rows.items())
        (RECORDS / f"{name}.txt").write_text(text.replace(" / ", "\n\t/ "), encoding="utf-8")  # a part per line
    else:
        shutil.rmtree(RECORDS / name, ignore_errors=True)
        (RECORDS / name).mkdir(parents=True)
        tables: dict[str, dict[str, Rows]] = {}
        for key, token in rows.items():
            chosen, number, kind = key.split(" ", 2)
            tables.setdefault(chosen, {}).setdefault(number, {})[kind] = "~" if token.endswith("~") else token
        for chosen, table in tables.items():
            kinds = list(dict.fromkeys(kind for tokens in table.values() for kind in tokens))
            lines = [" ".join(["row", *(kind.replace(" ", "/") for kind in kinds)])]
            for number, found in table.items():
                tokens = [found.get(kind, "-") for kind in kinds]
                # a token like the one before it takes one character
                again = [at > 0 and len(token) > 1 and token == tokens[at - 1] for at, token in enumerate(tokens)]
                tokens = ["=" if same else token for same, token in zip(again, tokens, strict=True)]
                lines.append(" ".join([number, *tokens]))
            (RECORDS / name / f"{chosen}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def alike(before: str | None, after: str | None, *, rounded: bool = False) -> bool:
    """Return whether rows agree, or the record excludes the row. With ``rounded``, ignore the rounding of numbers."""
    if before in (after, "~"):
        return True
    if before is None or after is None or not rounded:
        return after is not None and before == after.removesuffix("~")
    numbers = zip(NUMBER.findall(before), NUMBER.findall(after), strict=False)
    return NUMBER.sub("#", before) == NUMBER.sub("#", after) and all(
        math.isclose(float(old), float(new), rel_tol=TOLERANCE) for old, new in numbers
    )


def differences(name: str, before: Rows, after: Rows) -> list[str]:
    """Return a line per row that changed, is new or is missing."""
    lines: list[str] = []
    for key in dict.fromkeys([*before, *after]):
        if alike(before.get(key), after.get(key), rounded=PARTS[name].rounded):
            continue
        if not PARTS[name].verdicts:
            old, new = before.get(key, "(none)"), after.get(key, "(none)")
            if len(old) > 200 and len(new) > 200:  # a long text: show only the words that differ
                words = [set(text.split()) for text in (old, new)]
                old, new = (" ".join(sorted(one - other)) for one, other in (words, words[::-1]))
            lines.append(f"{key}: {old} -> {new}")
            continue
        chosen, number, kind = key.split(" ", 2)
        tokens = [rows.get(key, "(none)") for rows in (before, after)]
        was, now = (f"{LETTERS.get(token[0], token)} [{token}]" for token in tokens)
        answer = f", extracted {answers[key]!r:.60}" if answers.get(key) else ""
        lines.append(f"{chosen} row {number} {names.get(f'{chosen} {number}', '')} {kind}: {was} -> {now}{answer}")
    return lines


def check(name: str) -> list[str] | None:
    """Return the differences of a part from its record, or None if ``../shared`` is missing."""
    if PARTS[name].verdicts and not SHARED.is_dir():
        return None
    kept = read(name)
    uncompared.update(key for key, token in kept.items() if token == "~")
    return differences(name, kept, PARTS[name].now())


def report(name: str, lines: list[str], then: str = "") -> str:
    """Return the first lines of differences from a record, and what follows from them."""
    kept = [line if len(line) <= 400 else line[:400] + "..." for line in lines[: MOST_LINES - 2]]
    more = [f"... and {len(lines) - len(kept)} more"] if len(lines) > len(kept) else []
    then = then or f'If this is meant: make frozen-accept WHAT={name} REASON="why"'
    return "\n  ".join([f"{name}: {len(lines)} rows differ from the record.", *kept, *more, then])


def known(parts: list[str]) -> list[str]:
    """Return these parts. Raise `SystemExit` for an unknown one, or if there is none."""
    unknown = [name for name in parts if name not in PARTS]
    if unknown or not parts:
        raise SystemExit(f"WHAT must be parts of {', '.join(PARTS)}, got {' '.join(unknown) or 'nothing'}")
    return parts


def in_order(before: Rows, after: Rows) -> Rows:
    """Return the rows of ``after`` in the order of ``before``. A new row follows the row before it."""
    known = None
    new: dict[str | None, list[str]] = {}
    for key in after:
        if key in before:
            known = key
        else:
            new.setdefault(known, []).append(key)
    keys = [*new.get(None, ()), *(one for key in before if key in after for one in (key, *new.get(key, ())))]
    return {key: after[key] for key in keys}


def accept(parts: list[str], reason: str) -> None:
    """Write the records of these parts, and append date and reason to the log."""
    known(parts)
    if not reason.strip():
        raise SystemExit('REASON is empty. State why the behaviour changes: REASON="..."')
    for name in parts:
        if PARTS[name].verdicts and not SHARED.is_dir():
            raise SystemExit(f"{name} needs ../shared/data, which is missing")
        kept = read(name)
        left_out = {key: token for key, token in kept.items() if token == "~"}
        uncompared.update(left_out)
        rows = PARTS[name].now() | left_out
        # an unchanged row that a busy or slow machine would exclude stays compared
        rows |= {key: token for key, token in kept.items() if key in rows and alike(token, rows[key])}
        lines = differences(name, kept, rows)
        if not lines:
            print(f"{name}: nothing changed")
            continue
        write(name, in_order(kept, rows))
        with LOG.open("a", encoding="utf-8") as log:
            log.write(f"- {datetime.date.today()} `{name}`, {len(lines)} rows: {' '.join(reason.split())}\n")
        print(report(name, lines, f"Accepted. The commit must state the reason: {reason}"))


def outcome(name: str) -> tuple[list[str] | None, float]:
    """Return what `check` returns for a part, or the end of a traceback, and its seconds."""
    start = time.monotonic()
    try:
        lines = check(name)
    except Exception:  # noqa: BLE001 - a part that fails must not hide the others
        lines = traceback.format_exc().splitlines()[1 - MOST_LINES :]
    return lines, time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("check").add_argument("parts", nargs="*", help=", ".join(PARTS))
    accepting = actions.add_parser("accept")
    accepting.add_argument("--what", default="")
    accepting.add_argument("--reason", default="")
    given = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    if given.action == "accept":
        accept(given.what.replace(",", " ").split(), given.reason)
        return
    parts = known(given.parts or list(PARTS))
    failed = False
    # verdicts come from other processes, so the second core judges while this process computes the other parts
    with ThreadPoolExecutor(1) as judge:
        judging = {name: judge.submit(outcome, name) for name in parts if PARTS[name].verdicts}
        for name in sorted(parts, key=lambda name: name in judging):
            lines, seconds = judging[name].result() if name in judging else outcome(name)
            said = "skipped, ../shared/data is missing" if lines is None else "as recorded"
            print(report(name, lines) if lines else f"{name}: {said} ({seconds:.0f} s)", flush=True)
            failed = failed or bool(lines)
    sys.exit(failed)


if __name__ == "__main__":
    main()
