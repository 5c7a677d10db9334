"""The page in a real browser: Debian's Chromium, driven by playwright. ``make browser`` installs it."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from playwright.sync_api import Browser

from magicrl.reporting.run_page import write_run_page

from .browsing import CONTRASTS, Watched, fits_and_keeps_to_itself, saved, scrolled_by

pytestmark = pytest.mark.slow


@pytest.fixture
def page_file(rich_run: Path) -> Path:
    """Write the page of a small run with everything, some of it hostile, such as a line of a megabyte."""
    path = rich_run / "evaluations" / "after.json"
    document = json.loads(path.read_text())
    document["samples"][0]["responses"][0]["text"] = "<script>document.title='hit'</script>" + "W" * 10**6
    document["samples"][0]["problem_id"] = "p" * 400
    path.write_text(json.dumps(document))
    event = {"kind": "health", "rule": "own", "severity": "warning", "step": 2, "message": "m" * 300, "remedy": "r"}
    with (rich_run / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    return write_run_page(rich_run)


@pytest.mark.parametrize("width", [320, 375, 768, 1280])
def test_it_fits_is_readable_and_keeps_to_itself(browser: Browser, page_file: Path, width: int) -> None:
    assert fits_and_keeps_to_itself(browser, page_file, width).title() == "small · magicrl report"


def test_the_content_policy_stops_what_an_escape_would_let_through(browser: Browser, page_file: Path) -> None:
    watched = Watched(browser, page_file)
    watched.page.evaluate(
        "const s = document.createElement('script'); s.textContent = 'document.title = 1'; document.body.append(s);"
        "const i = new Image(); i.src = 'http://127.0.0.1:9/x.png'; document.body.append(i)"
    )
    while sum("Content Security Policy" in said for said in watched.said) < 2:
        watched.page.wait_for_event("console")
    assert watched.page.title() == "small · magicrl report"


def test_figures_are_saved_as_svg_png_and_csv(browser: Browser, page_file: Path) -> None:
    watched = Watched(browser, page_file)
    page = watched.page
    entropy = ElementTree.fromstring(saved(page, "entropy.svg").read_text())
    assert "Entropy" in "".join(entropy.itertext())
    shapes = {e.get("class") for e in entropy.iter()}
    assert {"grid", "line d0 s0", "target"} <= shapes, "the drawing is in the file"
    assert "cross" not in shapes
    assert ".s0{stroke:#1a3fc9}" in "".join(entropy.itertext()), "with its own colours"
    ElementTree.fromstring(saved(page, "timeline.svg").read_text())
    picture = saved(page, "entropy.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(picture[16:20]) == 4 * 460, "four dots a unit of the drawing"
    assert len(list(csv.reader(io.StringIO(saved(page, "step_time.csv").read_text())))) == 41
    assert list(csv.reader(io.StringIO(saved(page, "test.csv").read_text())))[3][0] == "1"
    assert watched.said == []
    assert {url.partition(":")[0] for url in watched.asked} <= {"file", "data", "blob"}


def test_a_pointed_box_goes_with_the_first_scroll(browser: Browser, page_file: Path) -> None:
    page = Watched(browser, page_file).page
    chart = page.locator('svg[data-chart="entropy"]')
    chart.scroll_into_view_if_needed()
    page.evaluate("() => new Promise((next) => requestAnimationFrame(() => requestAnimationFrame(next)))")
    chart.hover()
    assert page.locator("#tip").is_visible()
    scrolled_by(page, 40)
    assert page.locator("#tip").is_hidden()


def test_the_arrow_keys_move_the_crosshair_and_say_the_values(browser: Browser, page_file: Path) -> None:
    page = Watched(browser, page_file).page
    chart = page.locator('svg[data-chart="entropy"]')
    chart.focus()
    page.keyboard.press("End")
    assert page.locator("#tip").inner_text().splitlines()[0] == "step 40"
    assert page.locator("#tip").inner_text().splitlines()[-1] == "0.3000"
    page.keyboard.press("ArrowLeft")
    assert chart.get_attribute("aria-valuetext") == "step 39: exact 0.3050"
    scrolled_by(page, 40)
    assert page.locator("#tip").is_visible(), "scrolling takes the box along: focusing alone scrolls a chart into view"
    page.keyboard.press("Home")
    page.keyboard.press("ArrowLeft")
    assert chart.get_attribute("aria-valuenow") == "1"
    line = page.locator('svg[data-chart="alpha"] .cross')
    assert line.get_attribute("visibility") == "visible", "one crosshair in all figures"
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    assert line.get_attribute("visibility") == "hidden"


def test_the_tab_key_reaches_everything_in_order_and_shows_where_it_is(browser: Browser, page_file: Path) -> None:
    page = Watched(browser, page_file, viewport={"width": 1280, "height": 800}).page
    wanted = page.locator("a, button, summary, select, input, svg[tabindex]")
    reached: list[int] = []
    for _ in range(wanted.count() + 12):  # Areas that scroll are separate tab stops.
        page.keyboard.press("Tab")
        at, outline = page.evaluate(
            "() => { const e = document.activeElement; return ["
            "[...document.querySelectorAll('a, button, summary, select, input, svg[tabindex]')].indexOf(e),"
            " e.matches(':focus-visible') ? getComputedStyle(e).outlineStyle : 'body'] }"
        )
        if at >= 0:
            assert outline not in ("none", "body"), "a visible focus"
            reached.append(at)
        if len(reached) > 1 and reached[-1] == 0:
            break
    hidden = page.evaluate(
        "[...document.querySelectorAll('a, button, summary, select, input, svg[tabindex]')]"
        ".map((e, i) => e.checkVisibility() ? -1 : i).filter((i) => i >= 0)"
    )
    visible = [i for i in range(wanted.count()) if i not in hidden]
    assert [i for i in reached if i in visible][: len(visible)] == visible


def test_keys_open_what_is_folded_and_filter_the_rollouts(browser: Browser, page_file: Path) -> None:
    page = Watched(browser, page_file).page
    summary = page.locator("#configuration summary")
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("pre.config").is_visible()
    page.locator("[data-filter=outcome]").select_option("correct")
    page.locator("[data-filter=step]").select_option("20")
    assert page.locator(".rollout:visible").count() == 1
    assert page.locator(".nothing").is_hidden()
    page.locator("[data-filter=text]").fill(page.locator(".rollout:visible .response").text_content()[:12].upper())
    assert page.locator(".rollout:visible").count() == 1
    page.locator("[data-filter=text]").fill("no response holds this")
    assert page.locator(".nothing").is_visible()
    page.locator("[data-filter=text]").fill("")
    page.locator("[data-filter=outcome]").select_option("not_judged")
    assert page.locator(".nothing").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_paper_is_light_open_whole_and_without_controls(browser: Browser, page_file: Path, scheme: str) -> None:
    page = Watched(browser, page_file, viewport={"width": 700, "height": 1000}, color_scheme=scheme).page
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.querySelector('.s0')).stroke") == "rgb(26, 63, 201)"
    for control in ("nav", ".exports", ".filters", ".values", ".skip"):
        assert page.locator(f"{control}:visible").count() == 0, control
    texts = page.evaluate("[...document.querySelectorAll('pre.text')].map((e) => e.getBoundingClientRect().height)")
    assert min(texts) > 10, "folded texts are open"
    assert page.evaluate("document.documentElement.scrollWidth") <= 700
    tallest = page.evaluate("Math.max(...[...document.querySelectorAll('figure')].map((e) => e.offsetHeight))")
    assert tallest < 960, "each figure fits a page, so that none is cut"
    assert page.evaluate("getComputedStyle(document.querySelector('figure')).breakInside") == "avoid"
    assert page.evaluate(CONTRASTS) == []
    pdf = page.pdf(format="A4")
    assert pdf.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) >= 4


def test_what_was_folded_is_folded_again_after_printing(browser: Browser, page_file: Path) -> None:
    page = Watched(browser, page_file).page
    closed = page.locator("details:not([open])").count()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open]):not(.values)").count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details:not([open])").count() == closed
