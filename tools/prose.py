"""Check the style of text: odd idioms, first words of docstrings, long lines and sentences, size of the documentation.

    python -m tools.prose            # fails above a limit; part of `make check`
    python -m tools.prose --show     # also prints every place
    python -m tools.prose --show docs/guides/runs.md    # places of these files only

A word can be right in its place, so the limits in ``prose.toml`` are rates, not zero. They are what was reached: lower
them after an improvement. Pages that a command generates, ``docs/log`` and generated sections are not measured. A page
whose main part the site generates is not one of the pages by hand, but its words count.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = Path(__file__).with_suffix(".toml")
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
LIST_ITEM = re.compile(r"^[\s>]*(?:[-*]|\d+\.) ")
SENTENCE_END = re.compile(r"(?<=[.!?])[*_)\]]*\s+(?=[A-Z*`\[(])")
GENERATED_BY_THE_SITE = ("<!-- commands -->", "<!-- begin metrics -->", "```{eval-rst}")


@dataclass
class Group:
    """Counts of one group of files."""

    words: int = 0
    pages: int = 0
    docstrings: int = 0
    idioms: list[str] = field(default_factory=list)  # "FILE:LINE: NAME: TEXT"
    sentences: list[int] = field(default_factory=list)  # words per sentence of Markdown
    openings: list[str] = field(default_factory=list)  # docstrings of functions that do not begin with a verb
    lines: list[str] = field(default_factory=list)  # prose lines and table cells that are too long

    def rates(self) -> dict[str, float]:
        """Return the measured figures by the name of their limit."""
        return {
            "idioms_per_10000_words": round(1e4 * len(self.idioms) / max(self.words, 1), 1),
            "openings_percent": round(100 * len(self.openings) / max(self.docstrings, 1), 1),
            "long_lines": len(self.lines),
            "words_per_sentence": round(sum(self.sentences) / max(len(self.sentences), 1), 1),
            "words": self.words,
            "pages": self.pages,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="print only the places of these files and folders")
    parser.add_argument("--show", action="store_true", help="print every place")
    options = parser.parse_args()
    settings = tomllib.loads(SETTINGS.read_text(encoding="utf-8"))
    failed = False
    for name, wanted in settings["groups"].items():
        group = measure(files_of(wanted, settings["generated"], options.paths), settings)
        if options.show:
            sys.stdout.writelines(f"{place}\n" for place in (*group.idioms, *group.openings, *group.lines))
        found = group.rates()
        said = [f"{key} {found[key]:g} of {limit:g}" for key, limit in wanted["limits"].items()]
        sys.stdout.write(f"{name}: {', '.join(said)}\n")
        if over := [] if options.paths else exceeded(found, wanted["limits"]):
            failed = True
            sys.stdout.write(f"{name}: above the limit of tools/prose.toml: {', '.join(over)}; see --show\n")
    return int(failed)


def files_of(wanted: Mapping[str, Any], generated: list[str], chosen: list[Path]) -> list[Path]:
    """Return the files of a group without generated ones, and of ``chosen`` paths only if there are any."""
    found = {file for pattern in wanted["files"] for file in ROOT.glob(pattern) if file.is_file()}
    left_out = {file for pattern in generated for file in ROOT.glob(pattern)}
    places = [path.resolve() for path in chosen]
    return sorted(
        file
        for file in found - left_out
        if not places or any(file == place or place in file.parents for place in places)
    )


def exceeded(found: Mapping[str, float], limits: Mapping[str, float]) -> list[str]:
    """Return the names of the figures above their limit."""
    return [key for key, limit in limits.items() if found[key] > limit]


def measure(files: list[Path], settings: Mapping[str, Any]) -> Group:
    """Measure these Python and Markdown files."""
    idioms = {name: re.compile(rule) for name, rule in settings["idioms"].items()}
    group = Group()
    for file in files:
        source = file.read_text(encoding="utf-8")
        shown = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
        if file.suffix == ".py":
            tree = ast.parse(source)
            texts = list(python_texts(source, tree))
            _check_openings(tree, settings, group, str(shown))
        else:
            group.pages += not any(mark in source for mark in GENERATED_BY_THE_SITE)
            group.sentences += sentence_lengths(source)
            texts = list(markdown_texts(source))
            group.lines += [f"{shown}:{number}: long: {text}" for number, text in long_lines(source)]
        for number, text in texts:
            plain = re.sub(r"``[^`]*``|`[^`]*`", " x ", text)
            group.words += len(WORD.findall(plain))
            for name, rule in idioms.items():
                group.idioms += [
                    f"{shown}:{number}: {name}: {plain[max(0, m.start() - 30) : m.end() + 30].strip()}"
                    for m in rule.finditer(plain)
                ]
    return group


def _check_openings(tree: ast.Module, settings: Mapping[str, Any], group: Group, shown: str) -> None:
    nouns = set(settings["openings"])
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if any("property" in ast.unparse(mark) for mark in node.decorator_list):
            continue  # a property is named like an attribute
        text = ast.get_docstring(node)
        if text is None:
            continue
        group.docstrings += 1
        first = re.split(r"[\s:,.]", text, maxsplit=1)[0]
        if first.lower() in nouns or not first[:1].isalpha() or first.endswith("ing"):
            group.openings.append(f"{shown}:{node.lineno}: first word: {text.splitlines()[0]}")


def python_texts(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring and comment."""
    for node in ast.walk(tree):
        body: Any = getattr(node, "body", None)
        for one in body if isinstance(body, list) else ():
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
                yield one.lineno, one.value.value.strip()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def prose_lines(source: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of the lines of a page outside code blocks and generated sections."""
    fenced = generated = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif "<!-- begin " in line or "<!-- end " in line:
            generated = "<!-- begin " in line
        elif not fenced and not generated and not line.startswith("    ") and line.strip():
            yield number, re.sub(r"<!--.*?-->", "", line)


def markdown_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the prose of a page without code, link targets and the marks at the beginning of a line."""
    for number, line in prose_lines(source):
        yield number, re.sub(r"`[^`]*`|\]\([^)]*\)", " ", line).lstrip("#->* |0123456789.")


def sentence_lengths(source: str) -> list[int]:
    """Return the words of each sentence of a page's paragraphs and list items, without headings and tables."""
    paragraphs: list[str] = []
    last = 0
    for number, line in prose_lines(source):
        if not line.startswith(("#", "|")):
            text = re.sub(r"`[^`]*`", " x ", re.sub(r"\]\([^)]*\)", "]", LIST_ITEM.sub("", line)))
            if number == last + 1 and not LIST_ITEM.match(line):
                paragraphs[-1] += f" {text}"
            else:
                paragraphs.append(text)
            last = number
    lengths = [len(WORD.findall(one)) for text in paragraphs for one in SENTENCE_END.split(text)]
    return [length for length in lengths if length]


def long_lines(source: str) -> Iterator[tuple[int, str]]:
    """Yield prose lines over 120 characters and table cells over 140; a link that cannot be broken is allowed."""
    for number, line in prose_lines(source):
        if line.startswith("|"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]
            if any(len(re.sub(r"\]\([^)]*\)", "]", cell)) > 140 for cell in cells):
                yield number, line[:80]
        elif len(line) > 120 and len(LIST_ITEM.sub("", line).split()) > 3:
            yield number, line[:80]


if __name__ == "__main__":
    sys.exit(main())
