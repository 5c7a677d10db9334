"""The page of a plan in a real browser: widths, colours, the crosshair over accelerators, exports, no request."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from magicrl.commands.main import app

from .browsing import Watched, fits_and_keeps_to_itself, saved

pytestmark = pytest.mark.slow

BROKEN_WORDS = """() => {
  const broken = [];
  const walker = document.createTreeWalker(document.querySelector(".stages"), NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    for (const word of node.textContent.matchAll(/\\S+/g)) {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map((box) => box.top)).size > 1) broken.push(word[0]);
    }
  }
  return broken;
}"""

PAPER = str(Path(__file__).resolve().parents[3] / "studies/bases/paper-7b.toml")


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = tmp_path_factory.mktemp("plan") / "plan.html"
    words = [PAPER, "--gpus", "8", "--gpu", "H800-80G", "--compare", "gpus=1", "--page", str(page)]
    assert app(["plan", *words], result_action="return_value") == 0
    return page


@pytest.mark.parametrize("width", [320, 375, 1280])
def test_it_fits_is_readable_and_keeps_to_itself(browser: Browser, page_file: Path, width: int) -> None:
    fits_and_keeps_to_itself(browser, page_file, width)


def test_the_arrow_keys_read_the_curve_and_its_export_holds_the_range(browser: Browser, page_file: Path) -> None:
    page = Watched(browser, page_file).page
    page.locator('svg[data-chart="step_over_gpus"]').focus()
    for key in ("Home", "ArrowRight"):
        page.keyboard.press(key)
    assert page.locator("#tip").inner_text().startswith("accelerators 4\n")
    with saved(page, "step_over_gpus.csv").open() as file:
        rows = list(csv.DictReader(file))
    step = "step, with its range"
    assert [row["accelerators"] for row in rows] == ["2", "4", "8", "16", "32", "64"]
    assert all(float(row[f"{step}, low"]) <= float(row[step]) <= float(row[f"{step}, high"]) for row in rows)


def test_on_paper_no_number_of_the_table_is_broken_over_lines(browser: Browser, page_file: Path) -> None:
    page = Watched(browser, page_file, viewport={"width": 690, "height": 1000}, color_scheme="dark").page
    page.emulate_media(media="print")
    assert page.evaluate(BROKEN_WORDS) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 690
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
