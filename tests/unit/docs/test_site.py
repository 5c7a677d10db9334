"""The site: content generated from the source, and a build without a warning."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from magicrl.commands.main import app
from magicrl.training.health import RULES
from tools import symptom_figures
from tools.site import generated

ROOT = Path(__file__).resolve().parents[3]


def test_every_command_is_in_the_reference() -> None:
    page = generated.commands()
    for name in app.resolved_commands():
        if not name.startswith("-"):
            assert f"\n### magicrl {name}\n" in page, name
    assert "**[required]**" in page
    assert "```console\n$ magicrl train quickstart" in page


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="the extra `docs`")
    build = [sys.executable, "-m", "sphinx", "-c", "tools/site", "-W", "--keep-going", "-q", ".", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first = (tmp_path / "docs" / "index.html").read_text()
    layers = ["Start", "Guides", "Reference", "Evidence"]
    assert re.findall(r'class="caption".*?>([\w-]+)<', first)[:4] == layers
    # long names may break after their separators, never inside a word
    settings = (tmp_path / "docs" / "guides" / "what-to-set.html").read_text()
    assert '<span class="pre">optimizer.<wbr>learning_<wbr>rate</span>' in settings
    assert '<span class="pre whole">group_size</span>' in settings
    assert '<span class="whole">--output</span>' in first, "a browser would break the line after a hyphen"
    assert "pre { white-space: pre-wrap; overflow-wrap: normal; }" in (tmp_path / "_static" / "site.css").read_text()
    # an opened page loads nothing
    scripts = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]+)"', first)
    styles = re.findall(r'<link[^>]* rel="stylesheet"[^>]* href="([^"]+)"', first)
    assert scripts
    assert styles
    assert not [address for address in scripts + styles if address.startswith(("http", "//"))]


def test_every_health_rule_has_its_symptom_on_the_page() -> None:
    page = (ROOT / "docs" / "guides" / "preflight-and-explain.md").read_text()
    recorded = json.loads((ROOT / "tests" / "unit" / "training" / "recorded_health_runs.json").read_text())
    for rule in RULES:
        assert f"](../figures/symptoms/{rule.name}.svg)" in page
        assert all(f"`{setting}`" in page for setting in recorded[rule.name]["settings"]), rule.name


@pytest.mark.parametrize("rule", symptom_figures.FIGURES)
def test_the_curves_of_symptoms_are_the_recorded_runs(rule: str) -> None:
    assert (symptom_figures.FOLDER / f"{rule}.svg").read_text() == symptom_figures.picture(rule)
