"""The checkpoint of a job: rows that survive any death of their writers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.data.checkpoint import Checkpoint, content_key
from kvasir.errors import ConfigError
from tests.examples import examples

KEYS = [content_key(i) for i in range(40)]


def row(i: int, version: int = 0) -> bytes:
    return json.dumps({"i": i, "version": version, "text": "ä\n" * i}).encode()


def test_rows_are_found_again_by_their_keys(tmp_path):
    first = Checkpoint(tmp_path / "kept")
    for i in range(20):
        first.add(KEYS[i], row(i))
        assert first.get(KEYS[i]) == row(i)
    first.close()
    second = Checkpoint(tmp_path / "kept")
    assert [second.get(key) for key in KEYS] == [row(i) for i in range(20)] + [None] * 20
    second.add(KEYS[3], row(3, 1))
    second.add(KEYS[25], row(25))
    assert (second.get(KEYS[3]), second.get(KEYS[25]), second.get(KEYS[4])) == (row(3, 1), row(25), row(4))
    second.close()
    third = Checkpoint(tmp_path / "kept")
    assert (third.get(KEYS[3]), third.get(KEYS[25]), third.get(KEYS[4])) == (row(3, 1), row(25), row(4)), "the latest"


@pytest.mark.parametrize("most", [1, 2, 7, 100])
def test_rows_are_found_wherever_the_recent_ones_end(tmp_path, monkeypatch, most):
    monkeypatch.setattr("kvasir.data.checkpoint.MOST_RECENT", most)
    kept, dead = Checkpoint(tmp_path), Checkpoint(tmp_path)
    expected: dict[bytes, bytes] = {}
    for i in range(200):
        key = KEYS[i * 7 % 20]
        expected[key] = row(i % 20, i)
        kept.add(key, expected[key])
        assert all(kept.get(key) == found for key, found in expected.items())
    dead.add(KEYS[30], row(30))
    dead.close()
    kept.refresh()
    assert [kept.get(key) for key in KEYS] == [expected.get(key) for key in KEYS[:30]] + [row(30)] + [None] * 9
    kept.close()


def test_keys_are_those_of_the_content():
    one = {"prompt": [1, 2], "params": {"n": 1, "seed": None}}
    same = {"params": {"seed": None, "n": 1}, "prompt": [1, 2]}
    assert content_key(one) == content_key(same)
    assert len({content_key(x) for x in (one, {**one, "prompt": [1, 3]}, {**one, "params": {}}, [one], "1", 1)}) == 6


@examples(30)
@given(st.data())
def test_what_a_dead_writer_left_is_complete_but_for_its_last_line(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("kept")
    writer = Checkpoint(folder)
    for i in range(6):
        writer.add(KEYS[i], row(i))
    writer.close()
    [path] = folder.glob("*.jsonl")
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    left = whole[:cut].count(b"\n")
    again = Checkpoint(folder)
    assert [again.get(key) for key in KEYS[:6]] == [row(i) for i in range(left)] + [None] * (6 - left)
    again.add(KEYS[5], row(5, 1))
    assert again.get(KEYS[5]) == row(5, 1)
    again.close()


def test_damaged_lines_are_skipped(tmp_path):
    writer = Checkpoint(tmp_path)
    for i in range(3):
        writer.add(KEYS[i], row(i))
    writer.close()
    [path] = tmp_path.glob("*.jsonl")
    lines = path.read_bytes().splitlines(True)
    junk = [b"\n", b"[]\n", b'{"key":"zz","row":1}\n', b'{"key":"00","row":1}\n', b"\xff\n", b'{"key":1}\n']
    path.write_bytes(b"".join([lines[0], *junk, lines[1], b"\x00" * 9 + b"\n", lines[2]]))
    (tmp_path / "notes.txt").write_text("not ours")
    assert [Checkpoint(tmp_path).get(key) for key in KEYS[:3]] == [row(i) for i in range(3)]


def test_keys_that_begin_alike_are_told_apart(tmp_path):
    keys = [b"same8888" + bytes([i]) * 8 for i in range(5)]
    writer = Checkpoint(tmp_path)
    for i, key in enumerate(keys[:4]):
        writer.add(key, row(i))
    writer.close()
    again = Checkpoint(tmp_path)
    assert [again.get(key) for key in keys] == [row(i) for i in range(4)] + [None]


def test_rows_of_writers_that_have_ended_become_known(tmp_path):
    one, other = Checkpoint(tmp_path), Checkpoint(tmp_path)
    other.add(KEYS[0], row(0))
    one.refresh()
    assert one.get(KEYS[0]) is None, "its writer lives"
    other.close()
    one.refresh()
    assert one.get(KEYS[0]) == row(0)
    one.add(KEYS[1], row(1))
    one.refresh()
    assert (one.get(KEYS[0]), one.get(KEYS[1])) == (row(0), row(1))


def test_a_killed_writer_loses_no_row(tmp_path):
    code = (
        "import sys; from pathlib import Path; from kvasir.data.checkpoint import Checkpoint, content_key\n"
        "kept = Checkpoint(Path(sys.argv[1]))\n"
        "for i in range(10**6):\n"
        "    kept.add(content_key(i), b'{\"i\":%d}' % i)\n"
        "    print(i, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while int(process.stdout.readline()) < 100:
        pass
    os.kill(process.pid, signal.SIGKILL)
    last = max(map(int, process.communicate()[0].split()), default=100)
    kept = Checkpoint(tmp_path)
    assert all(kept.get(content_key(i)) == b'{"i":%d}' % i for i in range(last + 1))


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    kept, write = Checkpoint(tmp_path), os.write
    kept.add(KEYS[0], row(0))

    def full(file, data):
        write(file, bytes(data)[:7])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="space"):
            kept.add(KEYS[1], row(1))
    kept.add(KEYS[2], row(2))
    kept.close()
    again = Checkpoint(tmp_path)
    assert [again.get(key) for key in KEYS[:3]] == [row(0), None, row(2)]


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="folder"):
        Checkpoint(tmp_path / "file")
