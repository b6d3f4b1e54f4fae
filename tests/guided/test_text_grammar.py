"""A client's grammar of a text: whatever is drawn inside a call follows it, in every format of calls."""

from __future__ import annotations

import json
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from kvasir.errors import InvalidRequest
from kvasir.guided.guide import make_tokenizer
from kvasir.guided.json_spelling import ESCAPES, Unwritable, literal, regex
from kvasir.guided.lark import Lark
from kvasir.guided.text_grammar import COMMON, TextGrammar, between_marks, in_json
from kvasir.guided.tools import Function, tool_grammar
from kvasir.parse.events import ParsedMessage
from kvasir.parse.format import Format, Style
from kvasir.parse.parser import Parser
from kvasir.parse.table import CALLS
from tests.examples import examples
from tests.guided.walk import SPECIALS, TOKENIZER, VOCABULARY, ids_of, make_guides, walk

GUIDES = make_guides()
LIBRARY = make_tokenizer(VOCABULARY)
FORMATS = {calls.name: calls for calls in CALLS if calls.enforced and calls.style is not Style.NONE}
SCHEMA = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
LANGUAGE = r"""
// every construct that is translated
start: query (";" query)~0..2
?query: "SELECT "i names [" FROM " NAME] -> selected
  | "\"" ESCAPED "\""
  | sum
names: NAME ("," NAME){0,2}
sum: NUMBER (("+" | "\\" | "é") NUMBER)* | "(" sum ")" | "a".."c"
ESCAPED: /[^"\n]{1,5}/ | /[\s"]{2}/
MARK: "<" "/"
%import common.CNAME -> NAME
%import common (NUMBER, WS)
%ignore /[ \n]/
"""
PATTERN = r'[a-z]{1,3}["\\\n]( (é|\t)){1,2}'


def accepts(grammar: str, text: str) -> bool:
    """Whether the library, given a grammar as the client wrote it, accepts a whole text."""
    matcher = LLMatcher(LIBRARY, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = ids_of(text)
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


@pytest.mark.few(16)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("grammar", [TextGrammar("lark", LANGUAGE), TextGrammar("regex", PATTERN)],
                         ids=lambda g: g.syntax)  # fmt: skip
@examples(4)
@given(seed=st.integers(0, 2**32))
def test_the_text_of_a_call_follows_its_grammar(name, grammar, seed):
    format, schema = Format(FORMATS[name]), SCHEMA
    if grammar.syntax == "regex":
        schema = SCHEMA | {"properties": {"input": {"type": "string", "pattern": f"^(?:{PATTERN})$"}}}
    functions = [Function("query", schema, True, grammar)]
    guide = GUIDES.take(GUIDES.begin(tool_grammar(format, functions, SPECIALS, required=True, parallel=False)))
    ids = walk(guide, seed, limit=300)
    if ids is None:
        return
    parser = Parser(format, {"query": schema}, calls=True)
    written = TOKENIZER.decode(ids, skip_special_tokens=False)
    [call] = ParsedMessage.of([*parser.push(written), *parser.finish()]).calls
    text = json.loads(call.arguments)["input"]
    # After the last terminal that can be, the library ignores nothing; Lark does.
    assert accepts(grammar.source().text, text) or accepts(grammar.source().text, text.rstrip(" \n")), written


PATTERNS = (
    r"[^a]", r".", r"\s\S", r"\d+\D", r"[\w\n-]", r"[]a]", r"[^\]\\]", r"(?i:a\n)", r"^a|\"$", r"\x41\u{e9}",
    r"(?:a|b){2}",
    r"\p{Lu}[\pN]", r"[\t-z]", r"[a-]", r"<\/a>", r"(?P<x>a)\.", r"[!-\/]", r"[^\s]", r"a{2,}", r"\\n", r"&&--~~",
    r"[&-]", "é",
)  # fmt: skip
CHARACTERS = [
    '"',
    "\\",
    "\b",
    "\t",
    "\n",
    "\f",
    "\r",
    "a",
    "A",
    "é",
    "1",
    " ",
    "-",
    "&",
    "~",
    "]",
    "/",
    "z",
    "<",
    ">",
    ".",
    "n",
]


@pytest.mark.parametrize("pattern", PATTERNS)
@examples(40)
@given(text=st.text(CHARACTERS, min_size=1, max_size=4))
def test_a_regular_expression_matches_the_spelling_of_what_it_matched(pattern, text):
    spelled = json.dumps(text, ensure_ascii=False)[1:-1]
    assert accepts(f"start: /{pattern}/s", text) == accepts(f"start: {regex(pattern, 's')}", spelled)
    assert accepts(f"start: /{pattern}/i", text) == accepts(f"start: {regex(pattern, 'i')}", spelled)


@examples(40)
@given(text=st.text(CHARACTERS, min_size=1, max_size=4), any_case=st.booleans())
def test_a_literal_is_its_spelling(text, any_case):
    found = f"start: {literal(text, any_case)}"
    assert accepts(found, json.dumps(text, ensure_ascii=False)[1:-1])
    assert not any_case or accepts(found, json.dumps(text.swapcase(), ensure_ascii=False)[1:-1])
    if text[-1] in ESCAPES:
        assert not accepts(found, json.dumps(text, ensure_ascii=False)[1:-2] + "Z")


@pytest.mark.parametrize("name", COMMON)
def test_common_terminals_are_those_of_the_library(name):
    samples = ["1", "1.5", ".5", "-2e9", "+7", "e9", '"a\\"b"', "ab_1", "AB", " \t", "\r\n", "\n", "# x", "// x",
               "-- x", "/* a * b */", "/**/", "F", "g", "Word", "\f"]  # fmt: skip
    for text in samples:
        assert accepts(f"%import common.{name}\nstart: {name}", text) == accepts(f"start: /{COMMON[name]}/", text), text


REFUSED = (
    ("start: a\na: /x/ & /y/", "line 2 of the grammar: a: /x/ & /y/"),
    ("start: ~/x/", "complement"),
    ('%declare A\nstart: "a"', "%declare"),
    ("%import mine.A\nstart: A", "import"),
    ("start: <|im_end|>", "<|im_end|>"),
    ("start: @other", "@other"),
    ("start.2: /a/", "priority"),
    ("start[capture]: /a/", "attribute"),
    ('start: %json {"type": "null"}', "%json"),
    ("start: £", "£"),
    ('"a"', "a rule or a terminal is expected"),
    ('start: "ab".."c"', "range"),
)


@pytest.mark.parametrize(("grammar", "said"), REFUSED)
def test_what_is_not_translated_is_refused_with_its_line(grammar, said):
    wrong = TextGrammar("lark", grammar, "tools.0")
    for embed in (in_json, partial(between_marks, end=['"</p>"'])):
        with pytest.raises(InvalidRequest) as error:
            embed(Lark({}), "text", wrong)
        assert said in str(error.value) and error.value.param == "tools.0"


NO_SPELLING = (
    r"\bx", "(?=x)", "(?<!x)y", "x*?", "x++", r"\1", "[[a]b]", "[a&&b]", "(?x:a)", "a^", "$a", r"\p{Greek}", "a{,3}",
    "\x01", r"\x01", r"[b-a]", "[a", r"\u{110000}", "(?s)a",
)  # fmt: skip


@pytest.mark.parametrize("pattern", NO_SPELLING)
def test_a_regular_expression_that_has_no_spelling_is_refused(pattern):
    with pytest.raises(Unwritable):
        regex(pattern)


END = '"</p>"'


def test_a_mark_never_stands_inside_a_terminal():
    lark, grammar = Lark({}), TextGrammar("lark", 'start: /[a-z\\n]+/ MARK?\nMARK: "</p>" | "</i>"')
    lark.rule("start", f'"<p>" {between_marks(lark, "text", grammar, [END], ["</p>"])}')
    assert accepts(lark.text(), "<p>a\n</p>") and accepts(lark.text(), "<p>a</i></p>")
    assert not accepts(lark.text(), "<p>a</p></p>")


@pytest.mark.parametrize("definition", ["start: /(.|\\n)*/", "start: ALL\nALL: /(.|\\n)/*"])
def test_a_terminal_that_is_the_whole_text_ends_at_the_mark(definition):
    lark = Lark({})
    lark.rule("start", f'"<p>" {between_marks(lark, "text", TextGrammar("lark", definition), [END], ["</p>"])}')
    for text in ("", "a < b\n", "</", "<</p"):
        assert accepts(lark.text(), f"<p>{text}</p>"), text
    assert not accepts(lark.text(), "<p></p></p>")
