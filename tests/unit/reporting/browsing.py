"""Helpers of tests in a real browser: Debian's Chromium, driven by playwright. ``make browser`` installs it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

CONTRASTS = """() => {
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const lum = (c) => c.slice(0, 3).map((v) => linear(v / 255))
    .reduce((s, v, i) => s + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => {
    const layers = [];
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor), a = c.length > 3 ? c[3] : 1;
      if (a > 0) layers.push([c, a]);
      if (a === 1) break;
    }
    return layers.reverse().reduce((under, [c, a]) => under.map((v, i) => v * (1 - a) + c[i] * a), [255, 255, 255]);
  };
  const bad = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const e = node.parentElement;
    if (!node.textContent.trim() || !e.getClientRects().length || e.closest("script")) continue;
    const style = getComputedStyle(e), ink = e instanceof SVGElement ? style.fill : style.color;
    const pair = [lum(parse(ink)), lum(ground(e))].sort((a, b) => a - b);
    const contrast = (pair[1] + 0.05) / (pair[0] + 0.05);
    if (contrast < 4.5) bad.push([node.textContent.trim().slice(0, 30), e.className, contrast.toFixed(2)]);
  }
  return bad;
}"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the system's browser without a window, or else playwright's."""
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield started
        finally:
            started.close()


class Watched:
    """Page with its console messages and requests."""

    def __init__(self, browser: Browser, file: Path, **options: Any) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page: Page = browser.new_page(**options)
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append(dialog.message))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri())


def fits_and_keeps_to_itself(browser: Browser, file: Path, width: int) -> Page:
    """Check a page, all parts open: no horizontal scroll, enough contrast in both schemes, no request, no message."""
    watched = Watched(browser, file, viewport={"width": width, "height": 800})
    page = watched.page
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "no horizontal scroll"
    wide = page.evaluate(
        f"[...document.querySelectorAll('section .card')].filter((e) => e.getBoundingClientRect().right > {width})"
        ".map((e) => e.className)"
    )
    assert wide == []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(CONTRASTS) == [], scheme
    assert page.locator("script").count() == 2
    assert page.locator("img, iframe, object, link").count() == 0
    assert watched.asked == [file.as_uri()]
    assert watched.said == []
    return page


def saved(page: Page, name: str) -> Path:
    """Press the button (or link) that saves this file, and return its path."""
    stem, _, kind = name.rpartition(".")
    view = page.locator(f'figure.view[data-name="{stem}"]')
    with page.expect_download() as download:
        view.locator(f'[data-save="{kind}"], a[download="{name}"]').click()
    assert download.value.suggested_filename == name
    return Path(download.value.path())


def scrolled_by(page: Page, pixels: int) -> None:
    """Scroll and wait for the page's event, which comes with a later frame."""
    page.evaluate(
        "(pixels) => new Promise((told) => {"
        " addEventListener('scroll', () => requestAnimationFrame(told), { once: true }); scrollBy(0, pixels); })",
        pixels,
    )
