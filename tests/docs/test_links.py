"""Every link of a page to a file or a heading leads somewhere."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs import PAGES, ROOT, prose, text_of

LINK = re.compile(r"\]\(([^)\s]+)\)")


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", text_of(path), flags=re.M | re.S)
    found: dict[str, int] = {}
    names = []
    for title in re.findall(r"^#+ +(.*)$", text, re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "").lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        names.append(f"{name}-{found[name]}" if name in found else name)
        found[name] = found.get(name, 0) + 1
    return frozenset(names)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page):
    broken = []
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z+]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / page.parent / file).resolve() if file else ROOT / page
        if not path.exists():
            broken.append(f"{target}: there is no {path.relative_to(ROOT)}")
        elif anchor and path.suffix == ".md" and anchor not in anchors(path.relative_to(ROOT)):
            broken.append(f"{target}: {path.name} has no such heading")
    assert not broken


def test_the_index_lists_every_page():
    index = text_of(Path("docs/index.md"))
    listed = {*re.findall(r"^[\w./-]+$", index, re.M)}
    for page in PAGES:
        if page.parts[0] == "docs" and page.parts[1] not in ("adr", "index.md"):
            assert page.with_suffix("").relative_to("docs").as_posix() in listed, page
