"""List what an installation of magicrl includes: every distribution with version, licence, size and purpose.

    python -m tools.dependencies --page docs/reference/dependencies.md --sbom dist/magicrl.cdx.json

Page and bill of materials (CycloneDX 1.6) come from the metadata of what is installed here, without extras.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
WHY = {
    "torch": "tensors, autograd, the learner",
    "transformers": "models and tokenizers' settings",
    "numpy": "records, statistics",
    "scipy": "intervals, tests",
    "safetensors": "weights and checkpoints",
    "huggingface-hub": "models and data by hub name, push",
    "httpx2": "served models and judges",
    "tokenizers": "tokens of the report's rollouts",
    "pydantic": "the recipe's schema",
    "cyclopts": "the command line",
    "rich": "tables and live displays",
    "tomli-w": "a run's config.toml",
    "math-verify": "LaTeX to expressions",
    "antlr4-python3-runtime": "grammar of math-verify",
    "datasets": "data by hub name, saved data sets",
    "pyarrow": "rollouts and pipeline rows",
    "pandas": "data frames of magicrl.load_run",
    "jinja2": "report pages",
    "psutil": "memory",
    "packaging": "magicrl doctor",
    "python-flint": "exact arithmetic of the maths verifier",
    "rensa": "MinHash of the data pipeline",
}
"""Purpose of each direct dependency."""
# Licences read from the licence files of distributions whose metadata have none.
READ = {"antlr4-python3-runtime": "BSD", "mdurl": "MIT", "setuptools": "MIT"}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(extra: str = "") -> dict[str, importlib.metadata.Distribution]:
    """Return every distribution that magicrl with this extra installs, by canonical name."""
    found: dict[str, importlib.metadata.Distribution] = {}

    def add(name: str, extras: frozenset[str]) -> None:
        distribution = importlib.metadata.distribution(name)
        key = canonical(name)
        if key in found and not extras:
            return
        found[key] = distribution
        for text in distribution.requires or ():
            wanted = Requirement(text)
            asked = wanted.marker is None or any(wanted.marker.evaluate({"extra": one}) for one in ("", *extras))
            if asked and (canonical(wanted.name) not in found or wanted.extras):
                add(wanted.name, frozenset(wanted.extras))

    for text in direct(extra):
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate():
            add(wanted.name, frozenset(wanted.extras))
    return found


def direct(extra: str = "") -> list[str]:
    """Return the direct dependencies of both packages of this repository, as pyproject.toml names them."""
    files = (ROOT / "pyproject.toml", ROOT / "packages" / "verifiers" / "pyproject.toml")
    projects = [tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in files]
    named = {canonical(Requirement(text).name): text for project in projects for text in project["dependencies"]}
    del named["magicrl-verifiers"]
    return [*named.values(), *(projects[0]["optional-dependencies"][extra] if extra else ())]


def licence(distribution: importlib.metadata.Distribution) -> str:
    """Return the SPDX expression of the metadata, else its classifiers, else the first line of the licence field."""
    told: Any = distribution.metadata
    classifiers = [c.rpartition(":: ")[2] for c in told.get_all("Classifier") or () if c.startswith("License ::")]
    words = [c for c in classifiers if c != "OSI Approved"]
    # `get`, since a package that imports importlib_metadata replaces these objects by ones that raise KeyError
    field = (told.get("License") or "").strip().partition("\n")[0]
    stated = told.get("License-Expression") or ", ".join(words) or field
    return stated if stated and stated != "UNKNOWN" else READ.get(canonical(told["Name"]), "not stated")


def size(distribution: importlib.metadata.Distribution) -> int:
    """Return the bytes of its files, without bytecode."""
    files = [file for file in distribution.files or () if file.suffix != ".pyc"]
    return sum(place.stat().st_size for file in files if (place := Path(str(distribution.locate_file(file)))).is_file())


def page(found: dict[str, importlib.metadata.Distribution]) -> str:
    names = {canonical(Requirement(text).name): Requirement(text) for text in direct()}
    first = sorted((key for key in found if key in names), key=lambda key: -size(found[key]))
    rest = sorted((key for key in found if key not in names), key=lambda key: -size(found[key]))
    total = sum(size(one) for one in found.values())
    lines = [
        "# Dependencies",
        "",
        f"`pip install magicrl` without extras installs {len(found)} packages, {total / 1e6:,.0f} MB. torch's CPU",
        f"build has {size(found['torch']) / 1e6:,.0f} MB; its CUDA build adds NVIDIA's libraries, about 4 GB.",
        "`make dependencies` writes this page from the metadata of the packages pinned in `constraints.txt`, and",
        "`dist/magicrl.cdx.json`, a CycloneDX bill of materials. `magicrl doctor` shows which extras are installed.",
        "",
        "## Direct dependencies",
        "",
        "| package | range | version | licence | MB | purpose |",
        "|---|---|---|---|---|---|",
    ]
    for key in first:
        one = found[key]
        cells = (key, f"`{names[key].specifier}`", one.version, licence(one), f"{size(one) / 1e6:.1f}", WHY[key])
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Their dependencies", "", "| package | version | licence | MB |", "|---|---|---|---|"]
    lines += [
        f"| {key} | {found[key].version} | {licence(found[key])} | {size(found[key]) / 1e6:.1f} |" for key in rest
    ]
    return "\n".join(lines) + "\n"


def sbom(found: dict[str, importlib.metadata.Distribution]) -> dict[str, Any]:
    """Return the bill of materials, CycloneDX 1.6: one component per distribution, reproducible."""
    version = importlib.metadata.version("magicrl")

    def component(key: str, one: importlib.metadata.Distribution) -> dict[str, Any]:
        purl = f"pkg:pypi/{key}@{one.version}"
        stated = licence(one)
        spdx = "License-Expression" in one.metadata
        told = {"expression": stated} if spdx else {"license": {"name": stated}}
        named = {"type": "library", "name": key, "version": one.version}
        return named | {"bom-ref": purl, "purl": purl, "licenses": [told]}

    main = {"type": "application", "name": "magicrl", "version": version, "bom-ref": f"pkg:pypi/magicrl@{version}"}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": main | {"licenses": [{"expression": "Apache-2.0"}]}},
        "components": [component(key, found[key]) for key in sorted(found)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--sbom", type=Path)
    arguments = parser.parse_args()
    found = installed()
    if arguments.page is not None:
        arguments.page.write_text(page(found), encoding="utf-8")
    if arguments.sbom is not None:
        arguments.sbom.parent.mkdir(parents=True, exist_ok=True)
        arguments.sbom.write_text(json.dumps(sbom(found), indent=1) + "\n", encoding="utf-8")
    print(f"{len(found)} distributions, {sum(size(one) for one in found.values()) / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
