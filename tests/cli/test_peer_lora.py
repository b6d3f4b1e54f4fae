"""vLLM's, SGLang's and llama.cpp's flags for adapters, as users of those engines write them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvasir.adapters import AdapterOption, parse_adapters
from kvasir.cli.peer_lora import spread
from kvasir.config import check
from kvasir.errors import ConfigError
from tests.cli.test_peer_flags import chosen

SQL, MATH = AdapterOption("sql", "a/sql"), AdapterOption("math", "b")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), []),
        (("--lora", "sql=a/sql", "--lora", "math=b"), [SQL, MATH]),
        (("--enable-lora", "--lora-modules", "sql=a/sql", "--lora-modules", "math=b"), [SQL, MATH]),
        (("--lora-modules", '{"name": "sql", "path": "a/sql", "base_model_name": "x"}'), [SQL]),
        (("--lora-paths", "sql=a/sql", "--lora-paths", "./b"), [SQL, AdapterOption("./b", "./b")]),
        (("--lora-paths", '{"lora_name": "math", "lora_path": "b", "pinned": true}'), [replace(MATH, pinned=True)]),
        (("--lora", "x/a.gguf,b.gguf"), [AdapterOption("a", "x/a.gguf", 1, 1), AdapterOption("b", "b.gguf", 1, 1)]),
        (("--lora-scaled", "a.gguf:0.5"), [AdapterOption("a", "a.gguf", 0.5, 0.5)]),
        (("--lora-init-without-apply", "--lora", "a.gguf"), [AdapterOption("a", "a.gguf")]),
    ],
)  # fmt: skip
def test_adapters_of_other_engines_are_ours(arguments, expected):
    assert list(parse_adapters(chosen(*arguments)[0].lora or ())) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("serve m --lora-modules a=b c=d -x", "serve m --lora-modules a=b --lora-modules c=d -x"),
        ("serve m --lora-paths a=b {} c=d m", "serve m --lora-paths a=b --lora-paths {} --lora-paths c=d m"),
        ("--lora-modules a=b --port 1 c=d", "--lora-modules a=b --port 1 c=d"),
        ("--lora-modules", "--lora-modules"),
        ("run m a=b --x=y --lora a=b c=d", "run m a=b --x=y --lora a=b c=d"),
    ],
)
def test_a_list_after_one_flag_is_a_flag_for_each(given, expected):
    assert spread(given.split()) == expected.split()


def test_fewer_in_memory_are_fewer_in_a_step():
    check(chosen("--max-cpu-loras", "8")[0])


def test_flags_without_effect_say_so():
    _, notes = chosen("--lora-dtype", "bfloat16", "--max-loaded-loras", "9", "--fully-sharded-loras")
    assert notes.count("no effect") == 3


@pytest.mark.parametrize("arguments", [("--lora", "=a"), ("--max-loras", "0"), ("--lora-modules", "{")])
def test_what_cannot_be_is_refused(arguments):
    with pytest.raises(ConfigError):
        check(chosen(*arguments)[0])
