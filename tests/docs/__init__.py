"""The pages of the documentation, for their tests."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT)
    for path in (
        *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks/README.md", ROOT / "recipes/mini/README.md"
    )
)  # fmt: skip
_FENCE = re.compile(r"^```+([^\n`]*)\n(.*?)^```+\s*$", re.M | re.S)
_INDENTED = re.compile(r"(?<=\n\n)((?:    .*\n|\n(?=    ))+)")


@dataclass(frozen=True)
class Block:
    """A block of code. language: empty for one that is only indented. line: of its first line, counted from 1."""

    page: Path
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def text_of(page: Path) -> str:
    return (ROOT / page).read_text()


def blocks(page: Path) -> Iterator[Block]:
    """All blocks of a page."""
    text = text_of(page)
    for found in _FENCE.finditer(text):
        yield Block(page, text.count("\n", 0, found.start()) + 2, found[1].strip(), found[2])
    rest = _FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)
    for found in _INDENTED.finditer(rest):
        yield Block(page, rest.count("\n", 0, found.start()) + 1, "", textwrap.dedent(found[1]))


_COMMENT = re.compile(r"\s+#\s.*$")


def is_shell(block: Block) -> bool:
    """Whether a block has commands: those that are only indented do, too."""
    return block.language in ("", "sh", "console")


def shell_lines(block: Block) -> Iterator[str]:
    """The commands of a block, without comments. With prompts, only what follows one is a command."""
    prompts = re.search(r"^\$ ", block.code, re.M)
    lines = iter(block.code.replace("\\\n", " ").splitlines())
    for line in lines:
        if not line.strip() or line[0].isspace() or line[0] == "#" or (prompts and not line.startswith("$ ")):
            continue
        text = _COMMENT.sub("", line.removeprefix("$ "))
        while _open(text):
            text += " " + next(lines)
        yield text


def _open(text: str) -> bool:
    """Whether a quote has no end yet."""
    try:
        shlex.split(text)
    except ValueError:
        return True
    return False


def prose(page: Path) -> str:
    """A page without its fenced blocks and without code in its sentences."""
    return re.sub(r"`[^`\n]+`", "", _FENCE.sub("", text_of(page)))
