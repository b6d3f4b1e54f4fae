"""Cache kinds: where blocks lie in a sequence, by laws that hold for all of them; and no other module asks which kind a
cache is."""

from __future__ import annotations

import ast
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import kvasir
from kvasir.caches import CacheKind, Cross, Latent, PagedKV, State, Window
from kvasir.kv.blocks import BlockTable
from kvasir.kv.pool import SCRATCH, BlockPool
from tests.examples import examples
from tests.kv.chunked import Chunked

PACKAGE = Path(kvasir.__file__).parent
counts = st.integers(1, 40)
KINDS = st.one_of(
    st.builds(PagedKV),
    st.builds(Window, window=counts),
    st.builds(Latent),
    st.builds(State),
    st.builds(Cross, length=counts),
    st.builds(Chunked, chunk=counts),
)


@examples(100)
@given(KINDS, st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=12))
def test_a_sequence_holds_the_blocks_it_needs_within_the_stated_maximum(kind, size, chunks):
    """A table grows by chunks and is trimmed after each."""
    total, pool = sum(chunks), BlockPool(200)
    most, table, tokens = kind.most(total, max(chunks), size), BlockTable(pool, size, kind), 0
    for chunk in chunks:
        table.extend(tokens := tokens + chunk)
        assert pool.used <= most
        table.trim(tokens)
        assert len(table.ids) == kind.blocks(tokens, size)
        assert all(table.ids[i] != SCRATCH for i in kind.needed(tokens, size))
        assert kind.forgets or SCRATCH not in table.ids
    assert kind.comes_to(most, total, max(chunks), size) == total
    table.release()
    assert pool.free == pool.total


@examples(100)
@given(KINDS, st.integers(1, 9), st.integers(0, 12), st.integers(1, 12))
def test_held_and_added_blocks_are_the_needed_ones(kind, size, first, more):
    end = first + more
    had = set(kind.needed(first * size, size)) if first else set()
    assert set(kind.needed(end * size, size)) <= had | set(kind.added(first, end, size))
    assert set(kind.added(first, end, size)) <= set(kind.needed(end * size, size)) or kind.forgets


@examples(60)
@given(KINDS, st.integers(1, 9), st.integers(1, 80))
def test_a_block_that_is_no_longer_needed_is_never_needed_again(kind, size, tokens):
    before, after = kind.needed(tokens, size), kind.needed(tokens + 1, size)
    assert kind.low(tokens) <= kind.low(tokens + 1) and before.start <= after.start and before.stop <= after.stop
    assert len(after), "there is always a block to go on from"
    assert kind.first(tokens, size) * size <= max(kind.low(tokens), tokens - 1)
    assert set(range(kind.kept(tokens, size))) <= set(range(kind.blocks(tokens, size)))


# -- no other module asks --------------------------------------------------------------------------------------------


def subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


OURS = {kind for kind in subclasses(CacheKind) if kind.__module__.startswith("kvasir.")}
NAMES, CLASSES = {kind.name for kind in OURS if kind.name}, {kind.__name__ for kind in OURS}


def reported(node: ast.AST, constants: set[str], classes: set[str]) -> bool:
    """Whether the expression names a kind: as a string or as a class."""
    parts = list(ast.walk(node))
    return any(
        (isinstance(p, ast.Constant) and p.value in constants)
        or (isinstance(p, ast.Name) and p.id in classes)
        or (isinstance(p, ast.Attribute) and p.attr in classes)
        for p in parts
    )


def asks(source: str) -> list[int]:
    """Lines that find out which kind of cache something is: by its name, by its class, or by a case."""
    found = []
    if not any(name in source for name in NAMES | CLASSES):
        return found  # most modules, without reading them as Python
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            by_kind = any(isinstance(p, ast.Attribute) and p.attr in ("kind", "name", "needs") for p in sides)
            if by_kind and any(reported(side, NAMES, CLASSES) for side in sides):
                found.append(node.lineno)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass", "type"):
            if any(reported(argument, set(), CLASSES) for argument in node.args[1:]):
                found.append(node.lineno)
        elif isinstance(node, ast.match_case) and reported(node.pattern, NAMES, CLASSES):
            found.append(node.pattern.lineno)
    return found


def test_no_other_module_compares_cache_kinds():
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "caches.py"]
    assert len(files) > 300
    sources = {path: path.read_text(encoding="utf-8") for path in files}
    assert {str(path): lines for path, text in sources.items() if (lines := asks(text))} == {}


def test_a_module_that_asks_is_found():
    planted = (
        'if cache.kind == "state": pass',
        'x = [c for c in spec if c.kind.name in ("window", "full")]',
        "y = isinstance(kind, State)",
        "y = isinstance(kind, (int, caches.Window))",
        "match kind:\n    case Latent(): pass",
    )
    assert all(asks(line) for line in planted)
    assert not asks('if device.kind == "cuda" and isinstance(kind, Kinder): pass')
