"""The pictures of the terminal: the emulated terminal shows what a command prints, and the kept pictures are used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvasir import __version__

pytest.importorskip("pyte")
from scripts import make_terminal_images

DOCS = Path(__file__).parents[2] / "docs"


def test_the_emulated_terminal_shows_a_command_and_its_output(tmp_path, monkeypatch):
    terminal = make_terminal_images.Terminal("kvasir --version", 10, str(tmp_path))
    terminal.wait_for_end()
    lines = terminal.lines()
    assert [line.plain for line in lines] == ["$ kvasir --version", f"kvasir {__version__}"]
    monkeypatch.setattr(make_terminal_images, "FOLDER", tmp_path)
    svg = make_terminal_images.draw("version", "kvasir", lines).read_text()
    assert f"kvasir&#160;{__version__}" in svg


@pytest.mark.parametrize("name", make_terminal_images.PICTURES)
def test_each_picture_is_kept_used_and_loads_nothing(name):
    svg = (DOCS / "images" / f"terminal-{name}.svg").read_text()
    assert "@font-face" not in svg and "@import" not in svg
    assert all(target.startswith("#") for target in re.findall(r"""(?:url\(|href=)["']?([^"')]+)""", svg))
    assert any(f"images/terminal-{name}.svg" in page.read_text() for page in DOCS.glob("*.md"))
