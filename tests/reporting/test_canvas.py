"""Colours that can be read and told apart, by everyone, and drawings that stand alone."""

from __future__ import annotations

import itertools
import math
import re
from importlib.resources import files
from xml.etree import ElementTree

import pytest

from magicrl.reporting.canvas import DARK_PALETTE, DASHES, PALETTE, Entry, picture, series_css

Triple = tuple[float, float, float]

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
SEEN: dict[str, tuple[Triple, Triple, Triple]] = {
    "all colours": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900),
    ),
}  # fmt: skip


def linear(colour: str) -> list[float]:
    digits = colour.lstrip("#")
    digits = "".join(c * 2 for c in digits) if len(digits) == 3 else digits
    values = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


def luminance(colour: str) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: str, b: str) -> float:
    """WCAG 2."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def lab(colour: str, kind: str) -> Triple:
    rgb = linear(colour)
    r, g, b = (min(1.0, max(0.0, sum(m * v for m, v in zip(row, rgb, strict=True)))) for row in SEEN[kind])
    xyz = (
        (0.4124564 * r + 0.3575761 * g + 0.1804375 * b) / 0.95047,
        0.2126729 * r + 0.7151522 * g + 0.0721750 * b,
        (0.0193339 * r + 0.1191920 * g + 0.9503041 * b) / 1.08883,
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("kind", SEEN)
@pytest.mark.parametrize("palette", [PALETTE, DARK_PALETTE], ids=["light", "dark"])
def test_any_two_series_are_told_apart(palette: tuple[str, ...], kind: str) -> None:
    for a, b in itertools.combinations(palette, 2):
        assert math.dist(lab(a, kind), lab(b, kind)) > 20, (a, b)


def test_each_line_of_a_drawing_has_its_own_dash() -> None:
    assert len(set(DASHES)) == len(DASHES) >= len(PALETTE)


def variables(scheme: str) -> dict[str, str]:
    """The page's colours in ``light``, ``dark`` or ``print``."""
    css = files("magicrl.reporting").joinpath("templates", "page.css").read_text(encoding="utf-8")
    parts = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    found = dict(re.findall(r"--(\w+): (#\w+)", parts[0]))
    if scheme != "light":
        found |= dict(re.findall(r"--(\w+): (#\w+)", parts[1 if scheme == "dark" else 2]))
    return found


@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
def test_text_has_enough_contrast_on_every_ground(scheme: str) -> None:
    colours = variables(scheme)
    for text, ground in itertools.product(
        ("ink", "soft", "muted", "good", "bad", "warn", "accent"), ("bg", "card", "code")
    ):
        assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)


@pytest.mark.parametrize(("scheme", "palette"), [("light", PALETTE), ("dark", DARK_PALETTE)])
def test_series_stand_out_from_their_card(scheme: str, palette: tuple[str, ...]) -> None:
    assert all(contrast(colour, variables(scheme)["card"]) >= 3 for colour in palette)


def test_a_file_of_its_own_needs_no_page() -> None:
    legend = [Entry(label="a <b> & c", sign=sign, color=i) for i, sign in enumerate(("line", "area", "dot", "diamond"))]
    drawn = picture(key="k", title="<t>", description="<d>", height=100, body="", legend=legend, alone=True)
    ElementTree.fromstring(drawn)
    assert "var(" not in drawn
    assert "a &lt;b&gt; &amp; c" in drawn
    assert "&lt;t&gt;" in drawn
    assert "var(--c0)" in series_css()
