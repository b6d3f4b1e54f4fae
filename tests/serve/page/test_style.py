"""The page's colours in both themes, and the libraries that it brings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvasir.serve.page import static
from kvasir.serve.page.static import FILES

LEAST_LINE = 3.0  # WCAG 2.2, 1.4.11: what one must see to use a control
LEAST_TEXT = 4.5  # WCAG 2.2, 1.4.3
LINES = ("line", "accent", "error", "low", "mid", "high", "decode", "prefill")
TEXTS = ("ink", "muted", "accent", "error")
CODE = ("keyword", "string", "number", "comment", "title", "type")
GROUNDS = ("page", "surface", "sunken", "user")
MOST_BYTES = 1_200_000  # of all files
CSS = FILES["/page/style.css"].content.decode()
VENDOR = Path(static.__file__).parent / "files" / "vendor"


def theme(name: str) -> dict[str, str]:
    """The colours of a theme: of the dark one, those that it changes."""
    light, dark = (CSS.split(f"{start} {{", 1)[1].split("}", 1)[0] for start in (":root", ":root[data-theme=dark]"))
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light))
    return found if name == "light" else found | dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", dark))


def luminance(colour: str) -> float:
    """https://www.w3.org/TR/WCAG22/#dfn-relative-luminance"""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_the_standard():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


@pytest.mark.parametrize("name", ["light", "dark"])
def test_borders_underlines_and_texts_stand_out(name):
    colours = theme(name)
    for ground in GROUNDS:
        for line in LINES:
            assert contrast(colours[line], colours[ground]) >= LEAST_LINE, (line, ground)
        for text in TEXTS:
            assert contrast(colours[text], colours[ground]) >= LEAST_TEXT, (text, ground)
    for text in CODE:
        assert contrast(colours[text], colours["surface"]) >= LEAST_TEXT, text
    assert contrast(colours["on-accent"], colours["accent"]) >= LEAST_TEXT


def test_both_themes_have_the_same_colours_and_every_variable_is_defined():
    light, dark = theme("light"), theme("dark")
    assert set(light) == set(dark) and all(light[name] != dark[name] for name in light)
    assert set(re.findall(r"var\(--([\w-]+)\)", CSS)) <= set(light) | {"row-light"}


def test_borders_have_colours_of_the_theme():
    borders = re.findall(r"\bborder(?:-(?!radius|collapse)\w+)?: ([^;]+);", CSS)
    assert borders
    for border in borders:
        assert re.fullmatch(r"0|(?:[\d.]+px solid(?: |$))?(?:var\(--[\w-]+\)|transparent)?", border), border


def test_libraries_have_licences_and_are_small():
    versions = (VENDOR / "VERSIONS").read_text().splitlines()
    assert [line.split()[0] for line in versions] == ["katex", "@highlightjs/cdn-assets"]
    notices = (Path(__file__).parents[3] / "THIRD-PARTY.md").read_text()
    for line in versions:
        name, version, licence = line.split()
        assert name in notices and version in notices and licence in notices
    assert version in FILES["/page/vendor/highlight.js"].content.decode()
    assert {path.name for path in VENDOR.glob("*.LICENSE")} == {"katex.LICENSE", "highlight.LICENSE"}
    assert {path.suffix for path in (VENDOR / "fonts").iterdir()} == {".woff2"}
    assert sum(len(file.content) for file in FILES.values()) <= MOST_BYTES
