"""How large the package is, and how much of it one has to read.

    python -m tools.house [--parameter correction_cap ...] [--source src] [--json]

Printed are: files and lines of ``src/magicrl``; files with a function that runs in one training step of the recipe
``tiny`` (all threads of the process; ``session`` counts what is recorded of the step, ``algorithm`` only
``Trainer.step``); the share of lines with a comment in function bodies, docstrings, blank lines and directives to tools
aside; modules that exactly one other imports; the files that name a hyper-parameter; and the words of the documentation
that is written by hand: of README.md and its neighbours and of ``docs/*.md``, without pages and sections that a script
writes, code blocks, comments and punctuation that stands alone. ``docs/log`` is no part of the site.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import re
import sys
import tempfile
import threading
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WRITTEN_BY_SCRIPTS = ("recipe-reference.md", "errors.md", "dependencies.md")
DIRECTIVES = ("noqa", "pyright:", "type:", "fmt:")


class Measured(Exception):
    """The step that is counted is over."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=ROOT / "src", help="the folder that holds magicrl")
    parser.add_argument("--parameter", nargs="+", default=["correction_cap"], help="hyper-parameters to look for")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of lines")
    options = parser.parse_args()
    source = options.source.resolve()
    files = sorted((source / "magicrl").rglob("*.py"))
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    comments, lines = comment_share(texts.values())
    found: dict[str, Any] = {
        "files": len(files),
        "lines": sum(text.count("\n") for text in texts.values()),
        "comment_share": round(comments / lines, 4),
        "modules_with_one_importer": sum(len(who) == 1 for who in importers(texts, source).values()),
        "files_naming": {word: sum(word in text for text in texts.values()) for word in options.parameter},
    }
    pages = [page for folder in (ROOT, ROOT / "docs") for page in sorted(folder.glob("*.md"))]
    words = {page.name: words_of(page.read_text("utf-8")) for page in pages if page.name not in WRITTEN_BY_SCRIPTS}
    found["words_of_documentation"] = sum(words.values())
    step = files_of_a_step(source)
    found["files_per_training_step"] = {part: len(names) for part, names in step.items()}
    if options.json:
        sys.stdout.write(json.dumps(found | {"step": step, "words": words}, indent=1) + "\n")
        return
    for name, value in found.items():
        sys.stdout.write(f"{name.replace('_', ' ')}: {value}\n")


def words_of(page: str) -> int:
    """The words of a Markdown page that somebody wrote."""
    for part in (r"<!-- begin [\w-]+ -->.*?<!-- end [\w-]+ -->", r"^ *```.*?^ *```$", r"<!--.*?-->"):
        page = re.sub(part, " ", page, flags=re.DOTALL | re.MULTILINE)
    return len(re.findall(r"\S*\w\S*", page))


def comment_share(texts: Any) -> tuple[int, int]:
    """Lines with a comment, and all lines of code and comments, in function bodies."""
    comments = lines = 0
    for text in texts:
        inside: set[int] = set()
        rows = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                if body:
                    first = body[0].lineno
                    while rows[first - 2].lstrip().startswith("#"):  # what is said before the first statement
                        first -= 1
                    inside |= set(range(first, (node.end_lineno or 0) + 1))
        blank = {number for number, line in enumerate(rows, 1) if not line.strip()}
        told = {
            token.start[0]
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type == tokenize.COMMENT and not token.string.lstrip("# ").startswith(DIRECTIVES)
        }
        lines += len(inside - blank)
        comments += len(inside & told)
    return comments, lines


def importers(texts: dict[Path, str], source: Path) -> dict[str, set[str]]:
    """Module -> the modules that import it, here or inside a function."""
    names = {path: ".".join(path.relative_to(source).with_suffix("").parts) for path in texts}
    modules = {name for name in names.values() if not name.endswith(("__init__", "__main__"))}
    found: dict[str, set[str]] = {name: set() for name in modules}
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            targets: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module:
                targets = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            for target in targets:
                if target in found and target != names[path]:
                    found[target].add(names[path])
    return found


def files_of_a_step(source: Path) -> dict[str, list[str]]:
    """The files whose functions run in the first training step of the recipe ``tiny``."""
    sys.path.insert(0, str(source))
    import importlib
    from importlib.util import find_spec

    # before this edition the two modules had other names
    new = find_spec("magicrl.training.rollout_queue") is not None
    recorder, trainer = (f"magicrl.training.{name}" for name in (("recorder", "step") if new else ("observer", "loop")))
    observer = importlib.import_module(recorder).NullObserver
    session = importlib.import_module("magicrl.training.session")
    step_module = importlib.import_module(trainer)
    from magicrl.config.loader import load_train_recipe

    package = str(source / "magicrl")
    seen: dict[str, set[str]] = {"session": set(), "algorithm": set()}
    running: list[str] = []

    def profile(frame: Any, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if running and event == "call" and name.startswith(package) and frame.f_code.co_name != "<module>":
            for part in running:
                seen[part].add(str(Path(name).relative_to(source)))

    def counted(part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            running.append(part)
            result = method(*args, **kwargs)
            running.remove(part)
            if not running:
                raise Measured
            return result

        return run

    session.Session._one_step = counted("session", session.Session._one_step)
    step_module.Trainer.step = counted("algorithm", step_module.Trainer.step)
    with tempfile.TemporaryDirectory(prefix="magicrl-house-") as folder:
        recipe = source / "magicrl" / "recipes" / "tiny.toml"
        config = load_train_recipe(recipe)
        threading.setprofile(profile)  # also in the threads that carry answers to the verifier's processes
        sys.setprofile(profile)
        try:
            with contextlib.suppress(Measured):
                session.train(config, Path(folder) / "run", observer(), resume=False)
        finally:
            sys.setprofile(None)
    return {part: sorted(names) for part, names in seen.items()}


if __name__ == "__main__":
    main()
