"""Put one deliberate fault at a time into a copy of the source and report which tests fail.

python benchmarks/mutants.py --output benchmarks/results/mutants.json
python benchmarks/mutants.py --only clip_high --again    # some rows, also those that have a result
python benchmarks/mutants.py --only pipeline/            # one table
python benchmarks/mutants.py --sample 8 --seed 0         # eight rows at random

The rows are in `benchmarks/faults/*.toml`, one table per package. A row names the symbol that holds the fault, the
exact old text inside it, the new text, what the fault breaks, and the tests that should see it, nearest first. A symbol
is found anywhere in the package, so a row still fits after its function moves to another file. The command
fails if an old text is not found exactly once. The tests must pass on the unchanged copy. Results are kept in the
work folder under a checksum of fault, source and tests, so an interrupted command continues where it stopped.

Each fault runs in its own process, forked from this one: torch and transformers are imported once, magicrl is read from
the copy. The working tree is only read. Exit status 1: a fault survived for which the table states no reason.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import functools
import hashlib
import importlib
import io
import json
import os
import py_compile
import random
import re
import resource
import shutil
import signal
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

ROOT = Path(__file__).resolve().parents[1]
TABLES = Path(__file__).with_name("faults")
PACKAGES = (Path("src/magicrl"), Path("packages/verifiers/src/magicrl_verifiers"))
"""Folders of packages; files of the second are named with the package's name before them."""
CPU_LIMIT, WALL_LIMIT = 240, 1800
"""Time limits for the tests of one fault, in seconds, because a fault may make them compute or wait endlessly."""
_WORTH_SHARING = 5  # with more rows than this, third-party packages are imported once for all of them
_BROKEN_RUN = (3, 4, 5)  # pytest's internal error, wrong usage, no tests
_RED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One row of a table."""

    name: str  # unique
    table: str  # ``package/group``, such as ``training/step``
    edits: tuple[tuple[str, str, str], ...]  # (place, old text, new text); see `located`
    breaks: str  # consequence, for a reader
    tests: tuple[str, ...]  # arguments of pytest, nearest first
    survives: str = ""  # why no test can see it; empty if a test must see it


class TableError(SystemExit):
    """Error of a table that does not fit the source or the tests."""


def read_tables(folder: Path = TABLES) -> list[Fault]:
    """Return all faults, in the order of the tables."""
    documents = {path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.toml"))}
    suites: dict[str, list[str]] = {}
    for document in documents.values():
        suites |= document.pop("suites", {})
    faults: list[Fault] = []
    for table, document in documents.items():
        for group, settings in document.items():
            faults += [_row(f"{table}/{group}", row, settings["tests"], suites) for row in settings["faults"]]
    return faults


def _row(table: str, row: dict[str, Any], group_tests: Sequence[str], suites: Mapping[str, Sequence[str]]) -> Fault:
    old, new = (row[side] if isinstance(row[side], list) else [row[side]] for side in ("old", "new"))
    place = row.get("symbol", row.get("file"))
    places = place if isinstance(place, list) else [place] * len(old)
    # A test is the name of a suite or an argument of pytest.
    tests = dict.fromkeys(test for name in (*row.get("tests", ()), *group_tests) for test in suites.get(name, [name]))
    return Fault(
        name=row["name"],
        table=table,
        edits=tuple(zip(places, old, new, strict=True)),
        breaks=row["breaks"],
        tests=tuple(tests),
        survives=row.get("survives", ""),
    )


def located(place: str, old: str, root: Path = ROOT) -> tuple[str, int]:
    """Return the file, as `_path` reads it, and the offset in it of the only match of `old` at `place`.

    Args:
        place: A symbol (`Trainer.step`, a function, class or module constant by its qualified name), a symbol of one
            file (`training/step.py:Trainer.step`), or a file.
        old: The text to look for, within the symbol or file.

    Raises:
        TableError: if there is no match, or more than one.
    """
    file, _, symbol = place.rpartition(":")
    if "/" in symbol or symbol.endswith(".py"):  # no symbol: the whole file
        file, symbol = symbol, ""
    if symbol:
        spans = [s for s in _symbols(root).get(symbol, ()) if not file or s[0] == file]
    else:
        spans = [(file, 0, len(_text(root, file)))]
    found = [
        (name, match.start() + start)
        for name, start, end in spans
        for match in re.finditer(re.escape(old), _text(root, name)[start:end])
    ]
    if len(found) != 1:
        raise TableError(f"its old text is found {len(found)} times in {place}:\n{old}")
    return found[0]


def _path(root: Path, file: str) -> Path:
    """Return where a file is: `training/step.py` in the first package, `magicrl_verifiers/pool.py` in the second."""
    package = next((one for one in PACKAGES[1:] if file.startswith(f"{one.name}/")), None)
    return root / (PACKAGES[0] / file if package is None else package.parent / file)


@functools.cache
def _text(root: Path, file: str) -> str:
    path = _path(root, file)
    return path.read_text(encoding="utf-8") if path.is_file() else ""


@functools.cache
def _symbols(root: Path) -> dict[str, list[tuple[str, int, int]]]:
    """Return the places of each qualified name in the package: file, first and last offset, decorators included."""
    found: dict[str, list[tuple[str, int, int]]] = {}
    files = [path.relative_to(root / PACKAGES[0]) for path in (root / PACKAGES[0]).rglob("*.py")]
    for package in PACKAGES[1:]:
        files += [path.relative_to(root / package.parent) for path in (root / package).rglob("*.py")]
    for file in sorted(one.as_posix() for one in files):
        lines = io.StringIO(_text(root, file), newline="\n").readlines()  # as ast counts them
        offsets = [0]
        for line in lines:
            offsets.append(offsets[-1] + len(line))

        def walk(body: Iterable[ast.AST], prefix: str, file: str = file, offsets: list[int] = offsets) -> None:
            for node in body:
                names: list[str] = []
                first = getattr(node, "lineno", 0)
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    names = [node.name]
                    first = min([first, *(d.lineno for d in node.decorator_list)])
                elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
                for name in names:
                    end = offsets[getattr(node, "end_lineno", 0)]
                    found.setdefault(prefix + name, []).append((file, offsets[first - 1], end))
                if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                    walk(node.body, f"{prefix}{node.name}.")
                elif isinstance(node, (ast.If, ast.Try)):
                    walk(ast.iter_child_nodes(node), prefix)

        walk(ast.parse(_text(root, file)).body, "")
    return found


def changed(fault: Fault, root: Path = ROOT) -> dict[str, str]:
    """Return the text of each file that the fault changes. Raises `TableError` if the table does not fit the source."""
    edits: dict[str, list[tuple[int, str, str]]] = {}
    for place, old, new in fault.edits:
        try:
            file, offset = located(place, old, root)
        except TableError as error:
            raise TableError(f"{fault.name}: {error}") from None
        edits.setdefault(file, []).append((offset, old, new))
    texts: dict[str, str] = {}
    for file, changes in edits.items():
        text = _text(root, file)
        for offset, old, new in sorted(changes, reverse=True):
            text = text[:offset] + new + text[offset + len(old) :]
        if file.endswith(".py"):
            try:
                compile(text, file, "exec")
            except SyntaxError as error:
                raise TableError(f"{fault.name}: {file} would be no Python: {error}") from None
        texts[file] = text
    return texts


def check_tables(faults: Sequence[Fault], root: Path = ROOT) -> None:
    """Raise `TableError` that names every row that is not true any more."""
    names = [fault.name for fault in faults]
    wrong = [f"{name} is there twice" for name in sorted({name for name in names if names.count(name) > 1})]
    for fault in faults:
        try:
            changed(fault, root)
        except TableError as error:
            wrong.append(str(error))
        wrong += [f"{fault.name}: there is no {t}" for t in fault.tests if not (root / t.split("::")[0]).exists()]
    if wrong:
        raise TableError("benchmarks/faults does not fit the source:\n" + "\n".join(wrong))


class Copy:
    """Copy of the packages in a separate folder, for inserting faults."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "src"
        shutil.rmtree(self.folder, ignore_errors=True)
        for package in PACKAGES:
            shutil.copytree(ROOT / package, self.folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))
        # Bytecode is checked by content, not by time: a file may change twice within a second.
        compileall.compile_dir(self.folder, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)

    def place(self, file: str) -> Path:
        """Return where a file of the packages is in the copy."""
        return self.folder / (file if _path(Path(), file).is_relative_to(PACKAGES[1]) else f"magicrl/{file}")

    def run(self, tests: Sequence[str], log: Path, *, stop_at_first: bool = True) -> tuple[int, float]:
        """Run these tests; return pytest's exit status (-1 at a time limit) and CPU seconds with its children."""
        pid = os.fork()
        if pid == 0:
            self._live(tests, log, stop_at_first)
        end, cpu_limit = time.monotonic() + WALL_LIMIT, CPU_LIMIT if stop_at_first else 10 * CPU_LIMIT
        while True:
            found, status, usage = os.wait4(pid, os.WNOHANG)
            if found:
                code = os.waitstatus_to_exitcode(status)
                return (-1 if code < 0 else code), usage.ru_utime + usage.ru_stime
            if time.monotonic() > end or _cpu_seconds(pid) > cpu_limit:
                os.killpg(pid, signal.SIGKILL)
            time.sleep(0.05)

    def share(self, tests: Sequence[str]) -> list[str]:
        """Import third-party packages of these tests once for all faults; return the names of slow tests."""
        found = self.folder / "collected.json"
        pid = os.fork()
        if pid == 0:
            self._live(tests, Path(os.devnull), True, found)
        os.waitpid(pid, 0)
        collected = json.loads(found.read_text())
        for name in collected["modules"]:
            with contextlib.suppress(Exception):  # a module that fails on its own is imported by its package
                importlib.import_module(name)
        assert not {"magicrl", "magicrl_verifiers"} & set(sys.modules), "every fault's process must read the copy"
        return collected["slow"]

    def _live(self, tests: Sequence[str], log: Path, stop_at_first: bool, collected: Path | None = None) -> None:
        status = 3
        try:
            os.setsid()
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(ROOT)
            os.environ["PYTHONPATH"] = str(self.folder)
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            os.environ["XDG_CACHE_HOME"] = str(self.folder / "cache")  # faulty kernels stay here
            sys.path.insert(0, str(self.folder))
            sys.dont_write_bytecode = True
            if collected is not None:
                seen = _Collected()
                pytest.main(["--collect-only", "-qq", "-m", "", *tests], plugins=[seen])
                foreign = [name for name, module in sys.modules.items() if _is_foreign(module)]
                collected.write_text(json.dumps({"modules": foreign, "slow": seen.slow}))
                os._exit(0)
            first = ["-x"] if stop_at_first else []
            found = int(pytest.main([*first, "-m", "", "-p", "no:cacheprovider", "--no-header", "--tb=short", *tests]))
            origins = [sys.modules[p.name].__file__ or "" for p in PACKAGES if p.name in sys.modules]
            assert all(origin.startswith(str(self.folder)) for origin in origins), f"the tests read {origins}"
            status = found
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


class _Collected:
    """Pytest plugin that collects the names of the tests marked slow."""

    def __init__(self) -> None:
        self.slow: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.slow += [item.nodeid for item in items if item.get_closest_marker("slow")]


def _is_foreign(module: object) -> bool:
    """Return whether a module belongs to an installed package and not to the tests' own machinery."""
    file = getattr(module, "__file__", None) or ""
    return "site-packages" in file and "pytest" not in file


def _cpu_seconds(pid: int) -> float:
    """Return CPU seconds of a child that may have ended; its own children count once they have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class Study:
    """Faults with their known results, and the folder that keeps these results."""

    def __init__(self, faults: Sequence[Fault], work: Path) -> None:
        self.faults = faults
        self.work = work
        work.mkdir(parents=True, exist_ok=True)
        self.copy = Copy(work)
        self._kept = work / "found.jsonl"
        lines = self._kept.read_text().splitlines() if self._kept.exists() else []
        self.known: dict[str, dict[str, Any]] = {row["key"]: row for row in map(json.loads, lines)}

    def baseline(self, faults: Iterable[Fault]) -> float:
        """Check that the tests pass without a fault; return CPU seconds, 0 if already known."""
        tests = sorted({test for fault in faults for test in fault.tests})
        key = self._key("baseline", tests, _code_of(*(ROOT / package for package in PACKAGES)))
        if key in self.known or not tests:
            return 0.0
        log = self.work / "baseline.log"
        status, seconds = self.copy.run(tests, log, stop_at_first=False)
        if status:
            raise SystemExit(f"the tests fail without any fault ({log}):\n{log.read_text()[-3000:]}")
        self._keep({"key": key, "name": "baseline", "cpu_seconds": round(seconds, 1)})
        return seconds

    def result(self, fault: Fault, *, again: bool = False) -> dict[str, Any]:
        """Insert the fault, run its tests and remove the fault."""
        texts = changed(fault)
        key = self._key_of(fault, texts)
        if key in self.known and not again:
            return self.known[key]
        log = self.work / f"{fault.name}.log"
        places = {self.copy.place(file): text for file, text in texts.items()}
        whole = {place: place.read_text(encoding="utf-8") for place in places}
        for place, text in places.items():
            place.write_text(text, encoding="utf-8")
        try:
            status, seconds = self.copy.run(fault.tests, log)
        finally:
            for place, text in whole.items():
                place.write_text(text, encoding="utf-8")
        if status in _BROKEN_RUN:
            raise SystemExit(f"{fault.name}: pytest ended with {status} ({log}):\n{log.read_text()[-3000:]}")
        red = _RED.search(log.read_text(errors="replace"))
        by = "a limit of time" if status < 0 else red.group(1) if red else "the import" if status else None
        return self._keep({"key": key, "name": fault.name, "killed_by": by, "cpu_seconds": round(seconds, 1)})

    def is_known(self, fault: Fault) -> bool:
        return self._key_of(fault, changed(fault)) in self.known

    def _key_of(self, fault: Fault, texts: Mapping[str, str]) -> str:
        return self._key(fault.name, fault.tests, "\0".join(map(_code, texts.values())))

    def _keep(self, row: dict[str, Any]) -> dict[str, Any]:
        self.known[row["key"]] = row
        with self._kept.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return row

    @staticmethod
    def _key(name: str, tests: Sequence[str], code: str) -> str:
        files = [_code_of(ROOT / test.split("::")[0]) for test in tests]
        return hashlib.sha256("\0".join([name, *tests, *files, code]).encode()).hexdigest()[:16]


@functools.cache
def _code_of(*places: Path) -> str:
    paths = [p for place in places for p in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]
    return "\0".join(_code(p.read_text(encoding="utf-8")) for p in paths)


def _code(text: str) -> str:
    """Return the part of a file that can change a result: of Python, without comments and layout."""
    try:
        return ast.dump(ast.parse(text))
    except SyntaxError:
        return text


def chosen(faults: Sequence[Fault], arguments: argparse.Namespace) -> list[Fault]:
    """Return the selected rows in the order in which they run."""
    found = [f for f in faults if any(part in f.name or part in f.table for part in arguments.only or ("",))]
    if arguments.sample:
        random.Random(arguments.seed).shuffle(found)
    return found


def _by_package(faults: Sequence[Fault]) -> dict[str, list[Fault]]:
    groups: dict[str, list[Fault]] = {}
    for fault in faults:
        groups.setdefault(fault.table.split("/")[0], []).append(fault)
    return groups


def document(study: Study, rows: Mapping[str, dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    tried = [fault for fault in study.faults if fault.name in rows]
    killed = [fault for fault in tried if rows[fault.name]["killed_by"]]
    survivors = {fault.name: fault.survives for fault in tried if not rows[fault.name]["killed_by"]}
    return {
        "command": "python benchmarks/mutants.py"
        + (f" --sample {arguments.sample} --seed {arguments.seed}" if arguments.sample else ""),
        "table": len(study.faults),
        "tried": len(tried),
        "killed": len(killed),
        "share": round(len(killed) / max(len(tried), 1), 4),
        "packages": {
            package: f"{sum(rows[f.name]['killed_by'] is not None for f in group)} of {len(group)}"
            for package, group in _by_package(tried).items()
        },
        "survivors": survivors,
        "cpu_seconds": round(sum(row["cpu_seconds"] for row in rows.values()), 1),
        "faults": {
            fault.name: {"table": fault.table, "breaks": fault.breaks, "killed_by": rows[fault.name]["killed_by"]}
            for fault in tried
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="rows whose name or `package/group` contains this text")
    parser.add_argument("--again", action="store_true", help="run rows again that have a result")
    parser.add_argument("--sample", type=int, help="number of random rows without slow tests")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--known", action="store_true", help="use only results of earlier runs that are still valid")
    parser.add_argument("--check", action="store_true", help="only check that the tables fit the source")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "mutants")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    faults = read_tables()
    check_tables(faults)
    if arguments.check:
        print(f"{len(faults)} faults fit the source")
        return
    study = Study(faults, arguments.work.resolve())
    wanted, rows, spent = chosen(faults, arguments), {}, 0.0
    if arguments.known:
        wanted = [fault for fault in wanted if study.is_known(fault)]
    elif len(wanted) > _WORTH_SHARING:
        slow = study.copy.share(sorted({test.split("::")[0] for fault in wanted for test in fault.tests}))
        if arguments.sample:
            wanted = [f for f in wanted if not any(name.startswith(test) for test in f.tests for name in slow)]
    wanted = wanted[: arguments.sample]
    if not arguments.sample and not arguments.known:
        spent += study.baseline(wanted)
    for fault in wanted:
        fresh = arguments.again or not study.is_known(fault)
        row = rows[fault.name] = study.result(fault, again=arguments.again)
        spent += row["cpu_seconds"] if fresh else 0.0
        print(
            f"{'killed  ' if row['killed_by'] else 'SURVIVED'} {fault.name}: {row['killed_by'] or fault.breaks}",
            flush=True,
        )
    found = document(study, rows, arguments)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{found['killed']} of {found['tried']} faults killed ({len(faults)} in the table), {spent:.0f} s of CPU")
    if unexplained := [name for name, reason in found["survivors"].items() if not reason]:
        raise SystemExit(f"survived, and the table gives no reason: {', '.join(unexplained)}")


if __name__ == "__main__":
    import pytest

    # Every fault's process shares these imports; magicrl itself comes from the copy.
    import torch
    import transformers.models.llama.modeling_llama
    import transformers.pytorch_utils  # noqa: F401

    torch.set_num_threads(1)
    assert "magicrl" not in sys.modules
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
