"""The pages over several folders in a real browser: widths, colours, keys, the axis switch, files, paper."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from xml.etree import ElementTree

import pytest
from playwright.sync_api import Browser, Page

from magicrl.reporting.comparison_page import write_comparison_page

from .browsing import CONTRASTS, Watched, fits_and_keeps_to_itself, saved
from .conftest import HOSTILE, write_evaluation, write_rollout_recording, write_variant

pytestmark = pytest.mark.slow


@pytest.fixture
def page_file(variant_folders: list[Path], evaluation_folders: list[Path], tmp_path: Path) -> Path:
    """Write runs and evaluations on one page: variants with long hostile names, a longer run, a broken run."""
    write_rollout_recording(variant_folders[0])
    long = "W" * 60 + "<img src=x onerror=alert(1)>"
    more = [
        write_variant(tmp_path / "runs" / "long-0", 0, loss=long, status=HOSTILE.replace("\ud800", "")),
        write_variant(tmp_path / "runs" / "long-1", 1, loss=long, steps=25, without=("tokens/sampled",)),
        tmp_path / "nowhere",
    ]
    folders = [*variant_folders, *more, *evaluation_folders]
    write_comparison_page(folders, tmp_path / "page.html", command="magicrl report")
    return tmp_path / "page.html"


@pytest.mark.parametrize("width", [320, 375, 768, 1280])
def test_it_fits_is_readable_and_keeps_to_itself(browser: Browser, page_file: Path, width: int) -> None:
    fits_and_keeps_to_itself(browser, page_file, width)


def shown_axes(page: Page) -> set[str]:
    return set(
        page.evaluate(
            "[...document.querySelectorAll('svg[data-axis]')].filter((s) => s.checkVisibility())"
            ".map((s) => s.dataset.axis)"
        )
    )


def test_one_switch_changes_the_x_axis_of_every_figure_by_keys_alone(browser: Browser, page_file: Path) -> None:
    page = Watched(browser, page_file).page
    assert shown_axes(page) == {"steps"}
    page.locator("#learning .axes input[value=steps]").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#learning .axes input[value=tokens]").is_checked()
    assert page.locator("#time .axes input[value=tokens]").is_checked(), "every switch goes along"
    assert shown_axes(page) == {"tokens"}
    chart = page.locator('svg[data-chart="entropy@tokens"]')
    chart.focus()
    page.keyboard.press("End")
    assert page.locator("#tip").inner_text().splitlines()[0] == "12.8 thousand response tokens sampled"
    assert "loss magic 0.3000" in str(chart.get_attribute("aria-valuetext"))
    other = page.locator('svg[data-chart="length@tokens"] .cross')
    assert other.get_attribute("visibility") == "visible", "one crosshair in all figures over this axis"
    apart = page.locator('svg[data-chart="over_limits"] .cross')
    assert apart.get_attribute("visibility") == "hidden", "a figure over something else has its own"
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_what_is_shown_is_what_is_saved(browser: Browser, page_file: Path) -> None:
    page = Watched(browser, page_file).page
    page.locator("#learning .axes label", has_text="wall time").click()
    drawing = ElementTree.fromstring(saved(page, "accuracy.svg").read_text())
    texts = [e.text or "" for e in drawing.iter()]
    assert "seconds of training steps" in texts
    assert "loss magic" in texts
    assert any(e.get("class") == "band f0" for e in drawing.iter())
    assert saved(page, "accuracy.png").read_bytes()[:4] == b"\x89PNG"
    rows = list(csv.DictReader(io.StringIO(saved(page, "accuracy.csv").read_text())))
    first = rows[0]
    assert list(first) == [
        "variant", "step", "thousand response tokens sampled", "seconds of training steps", "device seconds",
        "mean", "smallest", "largest", "runs",
    ]  # fmt: skip
    assert (first["variant"], first["step"], first["runs"]) == ("loss magic", "1", "2")
    assert (float(first["mean"]), float(first["smallest"])) == pytest.approx((0.42, 0.41), abs=0.001)
    assert any(", run " in row["variant"] for row in rows)
    without = next(row for row in rows if "WWW" in row["variant"] and ", run " not in row["variant"])
    assert without["thousand response tokens sampled"] == "", "one of its runs did not record it"


def test_the_filter_of_responses_works_by_keys(browser: Browser, page_file: Path) -> None:
    page = Watched(browser, page_file).page
    select = page.locator("#responses [data-filter=kind]")
    select.focus()
    select.select_option("lost")
    assert page.locator("#responses .browsed:visible").count() == 1
    assert page.locator("#responses .found").inner_text() == "1 problem here"
    select.select_option("")
    assert page.locator("#responses .browsed:visible").count() == 3
    summary = page.locator("#responses .browsed summary").nth(1)
    summary.focus()
    page.keyboard.press("Enter")
    assert "decided by string" in page.locator("#responses .browsed").nth(1).inner_text()
    assert "<script>alert(1)</script>" in page.locator("#responses .browsed").nth(1).inner_text()


def test_paper_shows_the_chosen_axis_everything_open_and_no_controls(browser: Browser, page_file: Path) -> None:
    page = Watched(browser, page_file, viewport={"width": 700, "height": 1000}).page
    page.locator("#learning .axes label", has_text="tokens").click()
    page.emulate_media(media="print", color_scheme="dark")
    for control in ("nav", ".exports", ".filters", ".axes", ".values"):
        assert page.locator(f"{control}:visible").count() == 0, control
    assert shown_axes(page) == {"tokens"}
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("document.documentElement.scrollWidth") <= 700
    assert page.evaluate(CONTRASTS) == []
    assert page.pdf(format="A4").startswith(b"%PDF")


def test_without_its_script_the_page_still_shows_every_figure(browser: Browser, page_file: Path) -> None:
    page = browser.new_page(java_script_enabled=False)
    page.goto(page_file.as_uri())
    assert page.locator('svg[data-chart="entropy@steps"]').is_visible()
    assert page.locator(".axes").first.is_hidden(), "no control that does nothing"
    assert page.locator("[data-save]").first.is_hidden()
    page.close()


def test_a_single_evaluation_has_a_page_of_its_own(browser: Browser, tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "e", {"a": [True], "b": [False]})
    write_comparison_page([folder], folder / "report.html")
    watched = Watched(browser, folder / "report.html")
    assert watched.page.locator(".brand").inner_text() == "magicrl · evaluation"
    assert watched.page.locator('svg[data-chart="over_limits"]').is_visible()
    assert watched.said == []
