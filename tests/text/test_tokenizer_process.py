"""Tokenizers in processes: they give the same ids, and a hostile file or text affects no other request."""

from __future__ import annotations

import os
import signal
import threading
import time
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace

import psutil
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from kvasir.errors import InvalidRequest, KvasirError, ModelFileError
from kvasir.text import bounds, tokenizer_process, tokenizer_wire
from kvasir.text.sandbox import Hold
from kvasir.text.table import AddedToken, Table
from kvasir.text.tokenizer import Tokenizer
from kvasir.text.tokenizer_process import TokenizerPool
from tests._shared import SHARED, need
from tests.examples import examples
from tests.text import hostile
from tests.text.vocabularies import (
    FEW_TOKENIZERS,
    SHARED_TOKENIZERS,
    TINY,
    any_tokenizer,
    gguf_metadata,
)

TEXTS = ["", " ", "Hello, wörld! 日本語 😀\n\n  don't  12345\t<tool> e\u0301", "<|im_end|></s>[SEP]", "a" * 3000]


def until(fact: Callable[[], bool]) -> None:
    for _ in range(4000):
        if fact():
            return
        time.sleep(0.005)
    raise AssertionError("it never came to be")


def pool_of(tokenizer: Tokenizer) -> TokenizerPool:
    assert isinstance(tokenizer.encoder, TokenizerPool)
    return tokenizer.encoder


def processes() -> set[int]:
    """The processes of tokenizers that this process has."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if str(tokenizer_process.SCRIPT) in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.add(child.pid)
    return found


def in_processes(name: str) -> Tokenizer:
    if name in TINY:
        return Tokenizer.from_gguf(TINY[name]())
    need(SHARED_TOKENIZERS[name])
    path = SHARED / SHARED_TOKENIZERS[name]
    return Tokenizer.from_gguf(gguf_metadata(path)) if path.is_file() else Tokenizer.from_folder(path)


@pytest.fixture
def others() -> set[int]:
    return processes()


@pytest.fixture
def honest(others, tmp_path):
    tokenizer = Tokenizer.from_folder(hostile.plain(tmp_path))
    yield tokenizer
    tokenizer.close()


@pytest.fixture
def endless(others, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_process, "SECONDS", 2.0)
    tokenizer = Tokenizer.from_folder(hostile.endless(tmp_path))
    yield tokenizer
    tokenizer.close()


# --- the same as in one process ------------------------------------------------------------------------


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FEW_TOKENIZERS)
def test_ids_and_tables_are_those_of_the_library_in_this_process(name):
    there, here = in_processes(name), any_tokenizer(name)
    try:
        assert there.table == here.table
        for special in (True, False):
            for parse in (True, False):
                assert there.encode_many(TEXTS, special, parse) == here.encode_many(TEXTS, special, parse)

        @examples(20, suppress_health_check=list(HealthCheck))
        @given(st.lists(st.text(max_size=40), max_size=8))
        def equal(texts):
            assert there.encode_many(texts) == here.encode_many(texts)

        equal()
        if here.table.form != "library":
            hidden = {text: i for text, i, special in here.added_tokens if special}
            assert [there.speller(hidden)(t) for t in TEXTS] == [here.speller(hidden)(t) for t in TEXTS]
    finally:
        there.close()


@given(st.text(alphabet=st.sampled_from("Ká한α\u0301\u0308K≠ǖ \n\U0001d400") | st.characters(codec="utf-8")))
@examples(200)
def test_the_bytes_bound_the_tokens_of_a_text_from_below(text):
    for name in TINY:
        table, encode = any_tokenizer(name).table, any_tokenizer(name).encode
        size = len(text.encode())
        assert not table.bytes_per_token or len(encode(text, False)) * table.bytes_per_token >= size


def test_common_tokenizers_have_a_bound_unless_text_may_vanish():
    known = {name: any_tokenizer(name).table.bytes_per_token > 0 for name in TINY}
    assert known["tiny byte-level"] and known["tiny sentencepiece"] and not known["tiny wordpiece"]


@pytest.mark.slow
def test_normalization_shortens_no_character_beyond_what_the_bounds_say():
    for form, most in bounds.SHORTEN.items():
        if form.startswith("NF"):
            for code in (c for c in range(0x110000) if not 0xD800 <= c < 0xE000):
                character = chr(code)
                parts = unicodedata.normalize("NFD" if "K" not in form else "NFKD", character)
                shortest = unicodedata.normalize(form, character)
                assert len(character.encode()) <= most * len(shortest.encode())
                assert len(parts.encode()) <= most * len(unicodedata.normalize(form, parts).encode())


# --- hostile files -------------------------------------------------------------------------------------


def test_a_text_on_which_the_library_never_ends_fails_alone(endless, others):
    with ThreadPoolExecutor() as threads:
        stuck = threads.submit(endless.encode, hostile.HANGS)
        until(lambda: len(processes() - others) == 2)
        served = 0
        while not stuck.done():
            assert endless.encode("h", add_special_tokens=False) == [1]
            served += 1
        with pytest.raises(InvalidRequest, match=r"7 bytes.*2 seconds"):
            stuck.result()
    assert served > 1 and endless.encode("h", add_special_tokens=False) == [1]


def test_a_panic_while_loading_is_an_error_of_the_file(tmp_path):
    with pytest.raises(ModelFileError, match="bounds"):
        Tokenizer.from_folder(hostile.panics(tmp_path))


def test_a_file_that_asks_for_too_much_memory_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match="process"):
        Tokenizer.from_folder(hostile.greedy(tmp_path))


def test_a_file_that_takes_too_long_to_load_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_process, "LOAD_SECONDS", 0.01)
    with pytest.raises(ModelFileError, match="more than"):
        Tokenizer.from_folder(hostile.large(tmp_path))


def test_memory_beyond_the_limit_ends_the_job_alone(honest, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_process, "MEMORY", 320 << 20)
    small = Tokenizer(honest.table, TokenizerPool(tokenizer_wire.LoadFolder(60.0, str(tmp_path))))
    try:
        with pytest.raises(KvasirError):
            small.encode("he " * (4 << 20))
        assert small.encode("he") == [256]
    finally:
        small.close()


# --- processes that end --------------------------------------------------------------------------------


def test_copies_and_the_first_process_are_replaced(honest, others):
    pool, (first,) = pool_of(honest), processes() - others
    assert honest.encode("he") == [256]
    os.kill(pool.idle[0].process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    until(lambda: pool.idle[0].process.poll() is not None)
    assert honest.encode("he") == [256]
    os.kill(first, signal.SIGKILL)
    until(lambda: first not in processes())
    pool.idle.pop().kill()
    assert honest.encode("he") == [256] and processes() - others


def test_a_changed_folder_is_detected(honest, tmp_path):
    honest.close()
    hostile.endless(tmp_path)
    with pytest.raises(KvasirError, match="changed"):
        honest.encode("he")
    assert not pool_of(honest).idle


def test_no_process_outlives_its_tokenizer(honest, others):
    honest.encode("he")
    assert len(processes() - others) == 2
    honest.close()
    until(lambda: processes() <= others)


def test_a_held_job_is_ended_from_another_thread_and_its_process_with_it(endless, others, monkeypatch):
    for name in ("SECONDS", "MOST_SECONDS"):
        monkeypatch.setattr(tokenizer_process, name, 600.0)  # it is not the limit of time that ends it
    (first,), begun = processes() - others, threading.Event()

    class Noted(Hold):
        @contextmanager
        def on(self, worker):
            with super().on(worker):
                begun.set()
                yield

    hold = Noted()
    with ThreadPoolExecutor() as threads:
        job = threads.submit(endless.encode_many, [hostile.HANGS], hold=hold)
        try:
            assert begun.wait(30)
            (copy,) = processes() - others - {first}
            hold.end()
            with pytest.raises(InvalidRequest, match="cancelled") as error:
                job.result(60)
            assert not error.value.hint and copy not in processes()
        finally:
            endless.close()  # which ends the job in any case
    assert endless.encode("h", add_special_tokens=False) == [1]
    with pytest.raises(InvalidRequest, match="cancelled") as error:
        endless.encode_many(["h"], hold=hold)
    assert not error.value.hint


# --- frames --------------------------------------------------------------------------------------------


@given(st.binary(max_size=200))
def test_a_malformed_reply_is_decoded_or_refused(data):
    with suppress(ModelFileError):
        tokenizer_wire.decode_reply(data)


@pytest.mark.parametrize("wrong", ["form", "added", "id_bytes"])
def test_a_table_that_contradicts_itself_is_refused(wrong):
    table = any_tokenizer("tiny byte-level").table
    more = {"form": "odd", "added": [AddedToken(1 << 30, "x", True)], "id_bytes": [b"a"]}
    with pytest.raises(ModelFileError):
        replace(table, **{wrong: more[wrong]}).check()


def test_the_table_of_a_process_is_checked(others, tmp_path, monkeypatch):
    def refuse(table):
        raise ModelFileError("it contradicts itself")

    monkeypatch.setattr(Table, "check", refuse)
    with pytest.raises(ModelFileError, match="contradicts"):
        Tokenizer.from_folder(hostile.plain(tmp_path))
    until(lambda: processes() <= others)


@pytest.mark.parametrize(
    ("texts", "sizes"),
    [
        (["he"] * 10, [4, 4, 2]),
        (["x" * 40] * 5, [2, 2, 1]),
        (["x" * 500] * 2, [1, 1]),
        (["x", "y" * 99], [2]),
        ([], []),
    ],
)
def test_many_texts_go_in_several_frames(honest, monkeypatch, texts, sizes):
    expected, frames, run = [honest.encode(text) for text in texts], [], TokenizerPool.run_bytes
    monkeypatch.setattr(tokenizer_process, "SLICE_TEXTS", 4)
    monkeypatch.setattr(tokenizer_process, "SLICE_BYTES", 100)
    monkeypatch.setattr(
        TokenizerPool, "run_bytes", lambda pool, frame, *a: frames.append(frame) or run(pool, frame, *a)
    )
    foreign = [[(0, i)] for i in range(len(texts))]
    assert honest.encode_many(texts, foreign=foreign) == expected
    jobs = [tokenizer_wire.decode_job(frame[4:]).what for frame in frames]
    assert [len(job.texts) for job in jobs] == sizes
    assert [[tuple(span) for span in spans] for job in jobs for spans in job.foreign] == foreign
