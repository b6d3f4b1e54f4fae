"""Where each character of a rendered text is from: a message's are of one alphabet, a template's of another.

The alphabets share no character, so the text itself says what the marks should be.
"""

import json

import markupsafe
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError

from kvasir.text.marked_string import MODEL, OUTSIDE, TEMPLATE, from_outside, marked, marks_of, outside
from kvasir.text.template_worker import ENVIRONMENT, marked_variables, render
from tests._shared import SHARED, need
from tests.examples import examples
from tests.text.test_chat import CONVERSATIONS, NOW, TEMPLATES, TOKENS

# A message with Greek, a letter that grows in upper case, special white space, and quotes of JSON and HTML.
THEIRS = 'αβγδεσςΑΒΓΔΕΣΐ\u2003\u2028\x85"\\<>&΄·'
OURS = "abcXYZ \n\t.,:|%{}[]0123456789'-"

theirs = st.text(THEIRS, max_size=12)
ours = st.text("abXY .,|", max_size=5)
number = st.integers(-3, 6)


def literal(text: str) -> str:
    return json.dumps(text).replace("\\u00", "\\x") if text.isascii() else repr(text)


def exact(text: str) -> None:
    """Each character has the mark of its alphabet; what HTML and JSON write for one counts as its own."""
    for c, mark in zip(text, marks_of(text), strict=True):
        if c in THEIRS and c not in '"<>&\\':
            assert mark == OUTSIDE, (text, c)
        elif c in "XY .,|" or (c in "ab" and "&" not in text and "\\" not in text):
            assert mark == TEMPLATE, (text, c)


def safe(text: str) -> None:
    """No character of a message counts as the template's."""
    assert all(mark != TEMPLATE for c, mark in zip(text, marks_of(text), strict=True) if ord(c) > 127), text


VALUES = st.sampled_from(
    ["m", "w", "'ab |'", "'X,Y'", "m[1:]", "(m ~ 'a|b' ~ w)", "('a' + m)", "l[0]", "d.b", "(m|safe)"]
)

METHODS = [
    "strip()", "lstrip()", "rstrip()", "strip('ab')", "lstrip(m)", "split()", "split('a')",
    "split(m[:1] or 'x')", "split(none, 1)",
    "rsplit()", "rsplit(none, 1)", "rsplit('|', 1)", "splitlines()", "splitlines(true)", "partition('a')",
    "rpartition('|')", "replace('a', 'b')", "replace('a', m)", "replace(m[:1] or 'q', 'X')", "replace('b', w, 1)",
    "removeprefix('a')", "removesuffix('b')", "ljust(9)", "rjust(9, '.')", "lower()", "upper()", "swapcase()",
    "title()", "capitalize()", "casefold()", "join(['a', m, w])", "join(w)", "format(m, w)", "format_map(d)",
]  # fmt: skip
FILTERS = [
    "trim", "trim('ab')", "upper", "lower", "title", "capitalize", "string", "safe", "replace('a', m)", "indent(2)",
    "indent('. ', true, true)", "first", "last", "list", "reverse", "join('|')", "list|join(m)", "batch(2)|list|first",
    "tojson", "tojson(indent=2)", "unique|list", "sort", "map('upper')|join(',')", "default('X')", "select|list",
    "format(m, w)", "random", "slice(2)|first|join", "min", "max", "groupby(0)|list", "e", "escape", "forceescape",
]  # fmt: skip
LOSING = [
    "zfill(9)", "center(9)", "expandtabs(2)", "translate({97: 'q'})", "encode().decode()", "replace('', m)",
    "__len__()", "isupper()",
]  # fmt: skip
LOSING_FILTERS = [
    "center(9)", "truncate(3)", "wordwrap(2)", "pprint", "striptags", "urlencode", "urlize", "list|string",
    "list|pprint", "length", "int", "float", "wordcount", "sort|list|string",
]  # fmt: skip
SHAPES = [
    "{{ X }}", "{{ X ~ 'a' ~ m }}", "{{ 'a' + X }}", "{{ X + ',' }}", "{{ X * 2 }}", "{{ X[1:] }}", "{{ X[::-1] }}",
    "{% for c in X %}{{ c }}|{% endfor %}", "{% set v %}a{{ X }}b{% endset %}{{ v | trim }}",
    "{% macro f(x) %}{{ x }}.{% endmacro %}{{ f(X) }}", "{% filter upper %}{{ X }}{% endfilter %}",
    "{% set n = namespace(v='a') %}{% set n.v = n.v ~ X %}{{ n.v }}", "{{ 'a%s|' % X }}", "{{ '%s,%s' % (X, m) }}",
    "{{ 'a{}b{}'.format(X, w) }}", "{{ [X, 'a'] | join(m) }}", "{{ '%(k)s.' % {'k': X} }}", "{{ 'a|'.join([X, X]) }}",
    "{{ {'a': X, w: [X, 1, none, true, 1.5]} | tojson }}", "{{ (X if m else 'a') or 'b' }}", "{{ ' '.join(X) }}",
    "{% macro f() %}a{{ caller(X) }}{% endmacro %}{% call(y) f() %}{{ y }}{% endcall %}",
    "{{ {'b': X}.b ~ {'b': X}['b'] }}", "{{ X.split('a') | join(',') }}",
    "{{ dict(a=X).values() | list | first }}", "{{ '{a}{b:>4}|'.format(a=X, b='a') }}", "{{ '%5s|%s' % (X, 'a') }}",
]  # fmt: skip


def rendered(source: str, m: str, w: str) -> str:
    """The text, marked; it is what Jinja makes of plain strings."""
    variables = {"m": m, "w": w, "l": [m, w], "d": {"a": w, "b": m}}
    text = render(source, marked_variables(source, variables, {}), "2025-01-01", 1 << 20)
    return text


def tried(source: str, m: str, w: str) -> str | None:
    try:
        return rendered(source, m, w)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError, TemplateError):
        return None  # as Python and Jinja have it


@examples(600)
@given(value=VALUES, step=st.sampled_from([f".{m}" for m in METHODS] + [f"|{f}" for f in FILTERS]),
       shape=st.sampled_from(SHAPES), m=theirs, w=theirs)  # fmt: skip
def test_marks_are_exact(value, step, shape, m, w):
    text = tried(shape.replace("X", f"({value}){step}", 1).replace("X", value), m, w)
    if text is not None and not shape.startswith("{{ '%5s"):
        exact_or_printed(text, step, shape)


def exact_or_printed(text: str, step: str, shape: str) -> None:
    """Outside as a whole is a list that is printed as Python writes it, a form that is from outside, and letters that
    are more in capitals."""
    safe(text)
    grows = any(word in step + shape for word in ("upper", "title", "capital", "swapcase", "casefold"))
    grows = grows or step.removeprefix("|").removeprefix(".").startswith("format")
    if not ("['" in text or '["' in text or "('" in text or '("' in text or "[]" in text or grows):
        exact(text)


@examples(150)
@given(value=VALUES, step=st.sampled_from([f".{m}" for m in LOSING] + [f"|{f}" for f in LOSING_FILTERS]),
       shape=st.sampled_from(SHAPES), m=theirs, w=theirs)  # fmt: skip
def test_results_without_marks_are_all_outside(value, step, shape, m, w):
    text = tried(shape.replace("X", f"({value}){step}", 1).replace("X", value), m, w)
    if text is not None:
        safe(text)


def test_every_filter_and_method_is_among_these():
    """A new version of Jinja2 or Python brings none that is not looked at."""
    named = {f.split("(")[0].strip() for f in "|".join(FILTERS + LOSING_FILTERS).replace("'|'", "").split("|")}
    rest = {"abs", "attr", "count", "d", "dictsort", "filesizeformat", "items", "reject", "rejectattr", "round",
            "selectattr", "sum", "xmlattr"}  # fmt: skip
    assert set(ENVIRONMENT.filters) == named | rest
    methods = {m.split("(")[0] for m in METHODS + LOSING}
    plain = {m for m in dir(str) if not m.startswith("_") and not m.startswith("is")}
    assert plain - methods == {"count", "find", "index", "rfind", "rindex", "startswith", "endswith", "maketrans"}


SOURCES = [
    "{{ m | attr('upper')() }}|{{ 'a' | attr('join')([m]) }}",
    "{{ [[m]] | sum(start=[]) | join }}{{ {'a': m} | dictsort | first | last }}{{ {m: 'a'} | items | first | first }}",
    "{{ [{'k': m}] | selectattr('k') | map(attribute='k') | first }}{{ {'k': m} | xmlattr }}",
    "{% for x in cycler(m, 'a').next() %}{{ x }}{% endfor %}{{ loop }}",
    "{% set j = joiner(m) %}{{ j() }}{{ j() }}{% for x in [1, 2] %}{{ loop.cycle(m, w) }}{% endfor %}",
    "{{ lipsum() ~ m }}{{ lipsum(html=false) + m }}{{ m + lipsum() }}",
    "{{ '%s' | format(m) }}{{ '%c%r%%' % (m[0] or 'x', m) }}{{ '{!r}{0[0]}'.format(m) }}{{ '{:*>{}}'.format(m, 9) }}",
    "{{ (m | safe) + '<' + m }}{{ '<' + (m | safe) }}{{ (m | safe).join([m, '<']) }}{{ (m | safe) % m }}",
    "{{ (('<a>' | safe) + m) | upper }}{{ ('<%s>' | safe) % m }}{{ ('{}' | safe).format(m) }}{{ 'a' | urlize + m }}",
    "{{ namespace(a=m) }}{{ [m] }}{{ {m: m} }}{{ (m, 1) }}{{ m.upper }}{{ [m].index }}{{ {1: m}.items() }}",
    "{{ strftime_now(m) }}{{ range(m | length) | list }}{{ {}.fromkeys(m, m) }}{{ m.maketrans({}) }}",
    "{{ [m, w] | map('replace', 'α', 'b') | join }}{{ [m] | map('attr', 'lower') | list }}{{ m.encode() }}",
    "{{ [m, w] | tojson(sort_keys=true) }}{{ {m: {w: [m]}, 1: '1', none: '1'} | tojson(indent=1) }}",
    "{{ (m ~ 'ab') | tojson(ensure_ascii=true) }}{{ {w: 1, 'a': m} | tojson(sort_keys=true) }}{{ l | tojson }}",
]


@examples(150)
@given(source=st.sampled_from(SOURCES), m=theirs, w=theirs)
def test_edge_cases_of_jinja_keep_marks(source, m, w):
    for part in source.replace("{{", "\0{{").split("\0"):
        text = tried(part, m, w) if "{%" not in source else tried(source, m, w)
        if text is not None:
            safe(text)


@examples(200)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | theirs | st.text(max_size=4),
                    lambda v: st.lists(v, max_size=3) | st.dictionaries(theirs | st.integers(0, 1), v, max_size=3)),
       st.booleans(), st.sampled_from([None, 2]))  # fmt: skip
def test_json_has_the_marks_of_its_strings(value, ensure_ascii, indent):
    from kvasir.text.template_filters import tojson

    text = tojson(from_outside_any(value), ensure_ascii=ensure_ascii, indent=indent)
    assert text == json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
    inside, quoted = [], False
    i = 0
    while i < len(text):  # what stands between quotes is a string's, but for keys that are numbers
        step = 2 if quoted and text[i] == "\\" else 1
        if text[i] == '"':
            quoted = not quoted
            inside.append(False)
        else:
            inside += [quoted] * step
        i += step
    marks = marks_of(text)
    for i, within in enumerate(inside):
        assert within or marks[i] == TEMPLATE
        assert not within or marks[i] == OUTSIDE or text[i].isdigit()


def from_outside_any(value):
    if isinstance(value, dict):
        return {outside(k) if isinstance(k, str) else k: from_outside_any(v) for k, v in value.items()}
    return [from_outside_any(v) for v in value] if isinstance(value, list) else from_outside(value)


@examples(200)
@given(st.text(THEIRS + "ab<&", max_size=9), st.text(OURS + "<&", max_size=9))
def test_html_is_as_jinja_has_it(m, w):
    source = "{{ (m | safe) + w }}|{{ w + (m | safe) }}|{{ (m | safe) ~ w }}|{{ (m | e).replace('&', w) }}|{{ w | e }}"
    html = markupsafe.Markup(m)
    expected = f"{html + w}|{w + html}|{m}{w}|{markupsafe.escape(m).replace('&', w)}|{markupsafe.escape(w)}"
    assert render(source, {"m": outside(m), "w": w}, "2025-01-01", 1 << 20) == expected


def test_the_contents_of_a_models_turns_are_its_own():
    messages = [
        {"role": "user", "content": "α", "name": "β"},
        {"role": "assistant", "content": [{"type": "text", "text": "γ"}], "reasoning_content": "δ"},
    ]
    source = (
        "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.content[0].text }}{{ m.reasoning_content }}{% endfor %}"
    )
    made = marked_variables(source, {"messages": messages}, {})["messages"]
    assert [marks_of(made[0][key])[0] for key in ("content", "name", "role")] == [OUTSIDE, OUTSIDE, TEMPLATE]
    assert marks_of(made[1]["content"][0]["text"])[0] == MODEL and marks_of(made[1]["reasoning_content"])[0] == OUTSIDE


@pytest.mark.parametrize(
    ("role", "source", "mark"),
    [("user", "", 0), ("model", "'model'", 0), ("model", "", 1), ("im_start", "'<|im_start|>'", 1)],
)
def test_only_known_roles_are_the_templates(role, source, mark):
    made = marked_variables(source, {"messages": [{"role": role}]}, {})
    assert set(marks_of(made["messages"][0]["role"])) == {mark}


def plain_render(source: str, variables: dict) -> str:
    return render(source, variables, NOW.isoformat(), 1 << 20)


@pytest.mark.few(8)
@pytest.mark.parametrize("name", TEMPLATES)
def test_real_templates_keep_untrusted_text_marked(name):
    """Of Greek conversations, exactly the Greek letters are foreign, but for JSON's and HTML's own signs."""
    source = need("chat_templates", name).read_text(encoding="utf-8")
    for case in CONVERSATIONS.values():
        case = {key: greek(value) for key, value in case.items()}
        variables = {"messages": case["messages"], "tools": case.get("tools"), "documents": case.get("documents")}
        own = {**TOKENS, "add_generation_prompt": True}
        try:
            text = render(source, marked_variables(source, variables, own), NOW.isoformat(), 1 << 20)
        except Exception:
            continue
        letters = [(c, mark) for c, mark in zip(text, marks_of(text), strict=True) if c.isalpha()]
        assert all(mark for c, mark in letters if is_greek(c)), text
        assert any(is_greek(c) for c, _ in letters) and any(not mark for _, mark in letters)


def is_greek(c: str) -> bool:
    return "\u0370" <= c <= "\u03ff"


def greek(value, key=""):
    if isinstance(value, str):
        keep = key in ("role", "type") or value == ""
        return value if keep else "".join(chr(0x3B1 + ord(c) % 17) if c.isalpha() else c for c in value)
    if isinstance(value, list):
        return [greek(item, key) for item in value]
    return {k: greek(v, k) for k, v in value.items()} if isinstance(value, dict) else value


def test_templates_have_no_autoescape():
    with pytest.raises(Exception, match="no autoescape"):
        rendered("{% autoescape true %}{{ m }}{% endautoescape %}", "α", "")


def test_a_plain_string_is_the_templates():
    assert marks_of("ab") == marks_of(marked("ab")) == bytes(2) and marks_of(marked(outside("ab"))) == b"\1\1"
    assert SHARED is not None
