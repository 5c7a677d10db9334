"""Measure the size of the code, and how much of it a reader has to open.

    python -m tools.size [--json] [--step]

Figures of ``src`` and ``packages``: files, lines, code lines (without blank lines, comments and docstrings), comment
lines as a percentage of code lines in the packages `COMMENTED` (comments after code do not count), record types
(dataclasses, named tuples, typed dictionaries, pydantic's models) per 1,000 code lines, code lines per function and in
the longest one, private functions that are called once, public names defined in several modules, import circles.
Also lines of ``benchmarks``, ``studies`` and ``tests``. With ``--step`` also the files whose functions run in the first
training step of the recipe ``tiny``: in ``Trainer.step``, and with recording.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import importlib
import io
import json
import sys
import tempfile
import threading
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (ROOT / "src", ROOT / "packages" / "verifiers" / "src")
COMMENTED = ("algorithms", "training", "rollout", "models", "distributed")
_RECORD_BASES = {"NamedTuple", "TypedDict", "BaseModel"}
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Measured(Exception):
    """Signal that the measured step has ended."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--step", action="store_true", help="run one training step and count its files")
    options = parser.parse_args()
    found = figures({file: file.read_text(encoding="utf-8") for source in SOURCES for file in source.rglob("*.py")})
    for folder in ("benchmarks", "studies", "tests"):
        found[f"lines_of_{folder}"] = sum(len(file.read_text("utf-8").splitlines()) for file in python_files(folder))
    if options.step:
        found |= {f"files_in_a_step_{part}": len(files) for part, files in files_of_a_step().items()}
    if options.json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
        return
    for name, value in found.items():
        sys.stdout.write(f"{name.replace('_', ' ')}: {value}\n")


def python_files(folder: str) -> list[Path]:
    """Return the Python files of a folder of the repository."""
    return sorted((ROOT / folder).rglob("*.py"))


def figures(texts: Mapping[Path, str]) -> dict[str, Any]:
    """Return every figure that the text of the files gives."""
    trees = {file: ast.parse(text) for file, text in texts.items()}
    code = {file: code_lines(text, trees[file]) for file, text in texts.items()}
    total = sum(map(len, code.values()))
    lengths = {
        f"{file.name}:{node.name}": len(code[file] & set(range(node.lineno, (node.end_lineno or 0) + 1)))
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, Function)
    }
    records = record_types(trees.values())
    longest = max(lengths, key=lambda name: lengths[name])
    several = sorted(names_with_several_meanings(trees))
    return {
        "files": len(texts),
        "lines": sum(len(text.splitlines()) for text in texts.values()),
        "code_lines": total,
        "comment_percent": comment_percent(texts, code),
        "record_types": records,
        "record_types_per_1000_code_lines": round(1000 * records / total, 2),
        "code_lines_per_function": round(sum(lengths.values()) / len(lengths), 1),
        "longest_function": f"{longest} ({lengths[longest]})",
        "private_functions_called_once": called_once(trees),
        "public_names_with_several_meanings": len(several),
        "these_names": ", ".join(several),
        "import_circles": circles(imports(trees)),
    }


def code_lines(text: str, tree: ast.Module) -> set[int]:
    """Return the numbers of lines that hold code: no blank lines, comments or docstrings."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            found |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        for one in node.body if isinstance(node, ast.Module | ast.ClassDef | Function) else ():
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
                found -= set(range(one.lineno, (one.end_lineno or 0) + 1))
    return found


def comment_percent(texts: Mapping[Path, str], code: Mapping[Path, set[int]]) -> str:
    """Return for each of the packages `COMMENTED` its comment lines as a percentage of its code lines."""
    found: list[str] = []
    for package in COMMENTED:
        files = [file for file in texts if (ROOT / "src" / "magicrl" / package) in file.parents]
        comments = sum(line.lstrip().startswith("# ") for file in files for line in texts[file].splitlines())
        found.append(f"{package} {100 * comments / max(sum(len(code[file]) for file in files), 1):.1f}")
    return ", ".join(found)


def record_types(trees: Iterable[ast.Module]) -> int:
    """Return how many classes only hold fields: dataclasses, named tuples, typed dictionaries, pydantic's models."""
    classes = [
        (node.name, {ast.unparse(one).partition("[")[0].rpartition(".")[2] for one in (*marks(node), *node.bases)})
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    found = {"dataclass", *_RECORD_BASES}
    while more := {name for name, marked in classes if name not in found and marked & found}:
        found |= more
    return sum(bool(marked & found) for _, marked in classes)


def marks(node: ast.ClassDef) -> list[ast.expr]:
    """Return the decorators of a class without their arguments."""
    return [one.func if isinstance(one, ast.Call) else one for one in node.decorator_list]


def called_once(trees: Mapping[Path, ast.Module]) -> int:
    """Return how many private functions and methods are named in one place only, their definition aside."""
    count = 0
    for tree in trees.values():
        private = {n.name for n in ast.walk(tree) if isinstance(n, Function) and is_private(n.name)}
        used = collections.Counter(
            node.id if isinstance(node, ast.Name) else node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Name | ast.Attribute)
        )
        count += sum(used[name] == 1 for name in private)
    return count


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_with_several_meanings(trees: Mapping[Path, ast.Module]) -> Iterator[str]:
    """Yield the names of public classes and functions that several modules define."""
    places: dict[str, set[Path]] = {}
    for file, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_"):
                places.setdefault(node.name, set()).add(file)
    yield from (name for name, files in places.items() if len(files) > 1)


def imports(trees: Mapping[Path, ast.Module]) -> dict[str, set[str]]:
    """Return for each module the modules that it imports when it is imported."""
    names = {file: module_name(file) for file in trees}
    known = set(names.values())
    found: dict[str, set[str]] = {name: set() for name in known}
    for file, tree in trees.items():
        for node in tree.body:
            targets: Iterable[str] = ()
            if isinstance(node, ast.ImportFrom) and node.module:
                targets = (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
            elif isinstance(node, ast.Import):
                targets = (alias.name for alias in node.names)
            found[names[file]] |= {target for target in targets if target in known} - {names[file]}
    return found


def module_name(file: Path) -> str:
    source = next((one for one in SOURCES if file.is_relative_to(one)), file.parent)
    return ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


def circles(graph: Mapping[str, set[str]]) -> int:
    """Return how many modules import themselves by way of others."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [*graph[start]]
        while todo:
            if (one := todo.pop()) not in seen:
                seen.add(one)
                todo += graph[one]
        return seen

    return sum(name in reached(name) for name in graph)


def files_of_a_step() -> dict[str, set[str]]:
    """Return the files whose functions run in the first step of ``tiny``: in `Trainer.step`, and with recording."""
    from magicrl.config.loader import load_train_recipe
    from magicrl.training.recorder import NullObserver

    session = importlib.import_module("magicrl.training.session")
    step = importlib.import_module("magicrl.training.step")
    seen: dict[str, set[str]] = {"with_recording": set(), "of_the_algorithm": set()}
    running: list[str] = []
    places = tuple(str(source) for source in SOURCES)

    def profile(frame: Any, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if running and event == "call" and name.startswith(places) and frame.f_code.co_name != "<module>":
            for part in running:
                seen[part].add(name)

    def counted(part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            running.append(part)
            result = method(*args, **kwargs)
            running.remove(part)
            if not running:
                raise Measured
            return result

        return run

    session.Session._one_step = counted("with_recording", session.Session._one_step)
    step.Trainer.step = counted("of_the_algorithm", step.Trainer.step)
    sys.setprofile(profile)
    threading.setprofile(profile)
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Measured):
            session.run_training(load_train_recipe(Path("tiny")), Path(folder) / "run", NullObserver(), resume=False)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return seen


if __name__ == "__main__":
    main()
