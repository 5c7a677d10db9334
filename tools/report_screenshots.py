"""Take screenshots of pages for the documentation: run, comparison, evaluations, plan.

python -m tools.report_screenshots docs/quickstart.html --output docs/figures
python -m tools.report_screenshots comparison.html --kind comparison --output docs/figures

`magicrl report` writes pages of runs and evaluations, `magicrl plan --page` that of a plan. Needs Chromium (`make
browser`), driven by playwright. No picture may exceed 250 kB.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from playwright.sync_api import Page, sync_playwright

from magicrl.commands.doctor import BROWSERS

LARGEST = 250_000  # bytes of one picture


Opened: TypeAlias = Callable[..., Page]
"""Function that opens the page in a window of this width, height and colour scheme."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--kind", choices=tuple(SHOTS), default="report")
    arguments = parser.parse_args()
    page_file: Path = arguments.page.resolve()
    folder: Path = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])

        def opened(width: int, height: int, scheme: str = "light") -> Page:
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(page_file.as_uri())
            return page

        SHOTS[arguments.kind](opened, folder)
        browser.close()
    for picture in sorted(folder.glob(f"{arguments.kind}-*.png")):
        size = picture.stat().st_size
        print(f"{picture}: {size / 1000:.0f} kB")
        if size > LARGEST:
            raise SystemExit(f"{picture} has {size} bytes, more than {LARGEST}: show less of the page")


def of_run(opened: Opened, folder: Path) -> None:
    """Take the pictures of a run's page."""
    opened(1280, 1150).screenshot(path=folder / "report-desktop.png")
    opened(375, 1150).screenshot(path=folder / "report-phone.png")
    dark = opened(1280, 1150, "dark")
    at_section(dark, "learning")
    chart = dark.locator('svg[data-chart="entropy"]')
    chart.focus()
    for key in ("Home", *["PageUp"] * 4):
        dark.keyboard.press(key)
    dark.screenshot(path=folder / "report-dark.png")
    rollouts = opened(1280, 620)
    at_section(rollouts, "rollouts")
    rollouts.screenshot(path=folder / "report-rollouts.png")
    paper = opened(794, 1123)  # A4 at 96 dots an inch
    paper.emulate_media(media="print")
    paper.add_style_tag(content="body { padding: 14mm 13mm; }")  # the margins of the sheet
    paper.screenshot(path=folder / "report-print.png")


def of_comparison(opened: Opened, folder: Path) -> None:
    """Take pictures of variants, scores and curves over tokens."""
    opened(1280, 1400).screenshot(path=folder / "comparison-head.png")
    curves = opened(1280, 900, "dark")
    at_section(curves, "learning")
    curves.locator("#learning .axes label", has_text="tokens").click()
    chart = curves.locator('svg[data-chart="accuracy@tokens"]')
    chart.focus()
    for key in ("End", *["PageDown"] * 2):
        curves.keyboard.press(key)
    curves.evaluate("scrollBy(0, 70)")
    curves.wait_for_timeout(200)
    curves.screenshot(path=folder / "comparison-curves.png")


def of_evaluations(opened: Opened, folder: Path) -> None:
    """Take pictures of scores and scaling."""
    opened(1280, 1250).screenshot(path=folder / "evaluation-head.png")


def of_plan(opened: Opened, folder: Path) -> None:
    """Take pictures of memory, times and the curve over accelerators."""
    opened(1280, 1150).screenshot(path=folder / "plan-head.png")
    more = opened(1280, 1000, "dark")
    at_section(more, "more")
    chart = more.locator('svg[data-chart="step_over_gpus"]')
    chart.focus()
    for key in ("Home", "ArrowRight", "ArrowRight"):
        more.keyboard.press(key)
    more.screenshot(path=folder / "plan-more.png")


SHOTS = {"report": of_run, "comparison": of_comparison, "evaluation": of_evaluations, "plan": of_plan}


def at_section(page: Page, key: str) -> None:
    """Scroll so that the section's heading is at the top."""
    page.evaluate(f"document.getElementById('{key}').scrollIntoView()")
    page.wait_for_timeout(200)


if __name__ == "__main__":
    main()
