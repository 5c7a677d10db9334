"""Statements of the documentation: examples in docstrings run, commands parse, links and paths exist."""

from __future__ import annotations

import doctest
import importlib
import re
import shlex
from pathlib import Path

import pytest

from magicrl.algorithms.losses import LOSSES
from magicrl.commands.main import app
from magicrl.config.loader import load_sft_recipe, load_train_recipe
from magicrl.config.paths import FOLDER
from magicrl.registry import BUILTINS
from tools import recipe_page

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("start", "guides", "reference", "evidence")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / "docs" / folder).glob("*.md"))])
PAGES.append(ROOT / "docs" / "index.md")
MODULES = sorted(
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
    for path in (ROOT / "src").rglob("*.py")
    if ">>>" in path.read_text()
)


def text_of(page: Path) -> str:
    return page.read_text()


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0
    assert results.failed == 0


def test_examples_of_the_page_of_custom_parts_run() -> None:
    page = ROOT / "docs" / "guides" / "custom-parts.md"
    results = doctest.testfile(str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0
    assert results.failed == 0


def test_the_first_page_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w/-]+\.md)", text_of(ROOT / "docs" / "index.md")))
    assert linked >= {f"{folder}/{page.name}" for folder in FOLDERS for page in (ROOT / "docs" / folder).glob("*.md")}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        target, _, anchor = link.partition("#")
        if not target.startswith("http"):
            path = page.parent / target if target else page
            assert path.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(path), f"{page.name}: {link}"


def anchors(page: Path) -> set[str]:
    """Return the possible link targets of a page: its headings as the site and the repository's host write them."""
    headings = re.findall(r"^#{1,3} (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_named_files_exist(page: Path) -> None:
    for name in re.findall(r"`((?:src|benchmarks|recipes|tests|docs|studies|tools)/[\w./-]+)`", text_of(page)):
        assert (ROOT / name).exists(), f"{page.name}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_named_scripts_exist(page: Path) -> None:
    """A page that names a script of an earlier commit must name the commit."""
    text = text_of(page)
    names = re.findall(r"python -m ((?:benchmarks|tools)\.[\w.]+)", text)
    files = [f"{name.replace('.', '/')}.py" for name in names]
    files += re.findall(r"python ((?:benchmarks|tests)/\S+\.py)", text)
    gone = [file for file in files if not (ROOT / file).exists()]
    assert not gone or re.search(r"commit [0-9a-f]{8}", text), gone


def test_make_targets_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {target for page in PAGES for target in re.findall(r"\bmake ([a-z][a-z-]+)\b(?=[`\s])", text_of(page))}
    words = {"a", "another", "it", "sure"}
    assert named - words <= targets, named - words - targets


def commands() -> list[str]:
    lines = [line.strip() for page in PAGES for line in text_of(page).splitlines()]
    recipes = [line.lstrip("# ").strip() for path in FOLDER.rglob("*.toml") for line in path.read_text().splitlines()]
    found = [
        line.split("magicrl ", 1)[1]
        for line in (*lines, *recipes)
        if re.search(r"(^|bin/| )magicrl (train|sft) ", line)
    ]
    return sorted({line.split("`")[0] for line in found})


@pytest.mark.parametrize("command", commands())
def test_training_commands_on_pages_load(command: str) -> None:
    # names that belong to the reader: a loss, a recipe, and files relative to the repository's root
    own = {
        "my_loss.py": "examples/loss.py",
        "my_reward.py": "examples/reward.py",
        "train recipe.toml": "train tiny",
        "train run.toml": "train tiny",
    }
    for page, here in own.items():
        command = command.replace(page, here)
    command = command.replace("examples/", f"{ROOT}/examples/")
    words = shlex.split(command)
    recipe = Path(words[1])
    overrides = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    load = load_train_recipe if words[0] == "train" else load_sft_recipe
    assert load(recipe, overrides)


@pytest.mark.parametrize("command", ["train", "sft", "report", "watch", "eval", "plan", "doctor", "verify math"])
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    app([*command.split(), "--help"], result_action="return_value")
    assert f"Example: magicrl {command}" in capsys.readouterr().out


def test_the_recipe_page_is_the_schema_and_explains_every_setting() -> None:
    assert recipe_page.PAGE.read_text() == recipe_page.page(), "python -m tools.recipe_page"
    assert "|  |\n" not in recipe_page.page(), "a setting without a text under it in src/magicrl/config"


def test_the_page_of_losses_has_every_built_in_as_it_is() -> None:
    rows = [
        re.findall(r"[^|]+", line)
        for line in text_of(ROOT / "docs" / "guides" / "custom-parts.md").splitlines()
        if "| `" in line
    ]
    told = {row[0].strip(" `"): [cell.strip() for cell in row] for row in rows}
    for name, row in LOSSES.items():
        if name != "nll":  # belongs to the supervised start and is rejected in training
            clip = [] if row.clip is None else [float(eps) for eps in told[name][3].split(", ")]
            assert clip == list(row.clip or ()), name
            assert f"`{row.reducer.__name__}`" in told[name], name
    assert set(BUILTINS["advantage"]) <= set(told)
