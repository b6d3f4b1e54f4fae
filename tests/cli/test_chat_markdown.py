"""Markdown on a terminal: what is rendered does not depend on how the text was divided."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.cli.chat.markdown import MarkdownView, rows_of, split_block

TEXT = "# A title\n\nSome *text*, `code`.\n\n- one\n- two\n\n```python\nx = 1\n\ny = 2\n```\nThe **end**"


class Screen:
    """The lines of a terminal that understands what the view writes. 40 columns."""

    def __init__(self, rows: int = 30):
        self.rows, self.lines, self.row, self.column = rows, [""], 0, 0
        self.view = MarkdownView(self.write, lambda: (40, self.rows), colour=False)

    def write(self, text: str) -> None:
        for part in re.findall(r"\x1b\[[?0-9;]*[a-zA-Z]|[^\x1b]", text):
            if part.startswith("\x1b"):
                self._control(part)
            elif part == "\n":
                self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row >= len(self.lines))
            elif part == "\r":
                self.column = 0
            else:
                if self.column == 40:
                    self.write("\n")
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + part + line[self.column + 1 :]
                self.column += 1

    def _control(self, code: str) -> None:
        if code.endswith("A"):
            self.row -= int(code[2:-1])
            assert self.row >= 0
        elif code == "\x1b[J":
            self.lines[self.row + 1 :] = []
            self.lines[self.row] = self.lines[self.row][: self.column]

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)


def shown(text: str, cuts: list[int], rows: int = 30) -> str:
    screen, begun = Screen(rows), 0
    for end in (*sorted(cuts), len(text)):
        screen.view.push(text[begun:end])
        begun = end
    screen.view.flush()
    return screen.text


@given(st.lists(st.integers(0, len(TEXT)), max_size=30))
def test_the_screen_does_not_depend_on_the_pieces(cuts):
    lines = [line.strip() for line in shown(TEXT, [*cuts, *range(len(TEXT))]).splitlines() if line.strip()]
    assert lines == ["A title", "Some text, code.", "• one", "• two", "x = 1", "y = 2", "The end"]


def test_a_block_higher_than_the_terminal_stays_as_it_is():
    text = "\n".join(f"line *{i}*" for i in range(20)) + "\n\nthe *end*"
    result = shown(text, list(range(len(text))), rows=5)
    assert "line *3*" in result and "line *19*" in result and result.rstrip().endswith("the end")


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ("a\n", ""),
        ("a\n\nb", "a\n\n"),
        ("```\na\n\nb", ""),
        ("```\na\n\n```\nb", "```\na\n\n```\n"),
        ("~~~\n```\n\n", ""),
        ("a\n\nb\n\nc", "a\n\nb\n\n"),
    ],
)
def test_blocks(text, done):
    assert split_block(text) == (done, text[len(done) :])


def test_rows():
    assert [rows_of(text, 4) for text in ("", "abcd", "abcde", "a\nb", "日本語", "abcdefghi")] == [0, 0, 1, 1, 1, 2]
