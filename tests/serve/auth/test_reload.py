"""Keys that come, go and change while the server runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.errors import ConfigError
from kvasir.serve.auth.keyring import KeyRing
from kvasir.serve.auth.keys import Key, KeyLimits, read_keys
from kvasir.serve.auth.quota import Quotas
from kvasir.serve.settings import ServeSettings
from kvasir.serve.watch import FileWatch
from tests.serve.running import live
from tests.serve.test_server import process

ANN = {"key": "first-key", "name": "ann"}
BOB = {"key": "second-key", "name": "bob"}
BODY = {"prompt": "ab", "max_tokens": 2, "temperature": 0}


def write(path: Path, entries: object) -> Path:
    """As careful people do it: whole, and under its name at once."""
    new = path.with_suffix(".new")
    new.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    new.chmod(0o600)
    os.replace(new, path)
    return path


def settings_of(path: Path, **more) -> ServeSettings:
    return ServeSettings(port=0, keys=read_keys(path), keys_file=path, **more)


def bearer(secret: str) -> dict:
    return {"Authorization": f"Bearer {secret}"}


def until(condition, seconds: float = 60.0):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def status(url: str, secret: str) -> int:
    return httpx.get(f"{url}/v1/models", headers=bearer(secret)).status_code


ENTRIES = st.dictionaries(st.integers(0, 5), st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1)


@given(st.lists(ENTRIES, min_size=1, max_size=6))
def test_the_keys_are_those_of_the_last_good_file(tmp_path_factory, contents):
    """contents: by name, the key's number and its limit."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    write(path, [ANN])
    settings = settings_of(path, api_keys=("plain-key",))
    quotas = Quotas(settings.all_keys, lambda: 0)
    ring = KeyRing(settings.all_keys, quotas.take, settings.keys_file, settings.plain_keys)
    good, used = [ANN], Counter()
    for content in contents:
        entries = [
            {"key": f"secret-{number}", "name": f"name-{name}", "limits": {"requests_per_minute": limit}}
            for name, (number, limit) in content.items()
        ]
        write(path, entries)
        if len({entry["key"] for entry in entries}) == len(entries):
            asyncio.run(ring.reload())
            good = entries
            used = Counter({name: count for name, count in used.items() if name in {e["name"] for e in good}})
        else:
            with pytest.raises(ConfigError, match="same key"):
                asyncio.run(ring.reload())
        assert len(ring) == len(good) + 1
        for secret in ("first-key", "plain-key", *(f"secret-{i}" for i in range(6))):
            found = ring.find(secret.encode())
            wanted = next((e["name"] for e in good if e["key"] == secret), None)
            assert (found and found.name) == wanted or secret == "plain-key"
        for entry in good:
            account = quotas.accounts[entry["name"]]
            if "limits" in entry:
                reported = dict(account.headers())
                assert int(reported[b"x-ratelimit-limit-requests"]) == entry["limits"]["requests_per_minute"]
                fresh = reported[b"x-ratelimit-remaining-requests"] == reported[b"x-ratelimit-limit-requests"]
                assert fresh == (not used[entry["name"]]), "what a kept name has used stays used"
                if fresh:
                    account.open()
                    used[entry["name"]] += 1


def test_a_changed_limit_keeps_the_part_that_is_used():
    quotas = Quotas([Key("first-key", "ann", limits=KeyLimits(requests_per_minute=4))], lambda: 0)
    for _ in range(2):
        quotas.accounts["ann"].open()
    quotas.take([Key("other-key", "ann", limits=KeyLimits(requests_per_minute=20, tokens_per_minute=7))])
    reported = dict(quotas.accounts["ann"].headers())
    assert reported[b"x-ratelimit-remaining-requests"] == b"10" and reported[b"x-ratelimit-remaining-tokens"] == b"7"
    quotas.take([Key("other-key", "ann")])
    assert quotas.accounts["ann"].headers() == []


async def test_a_watch_rereads_a_changed_file_or_on_request(tmp_path):
    path, outcomes, read = write(tmp_path / "file", "a"), Counter(), asyncio.Queue()

    async def reload() -> None:
        text = path.read_text()
        read.put_nowait(text)
        if text == "bad":
            raise ConfigError("it is bad")
        if text == "c" and outcomes["file", "failed"] == 1:
            raise OSError(24, "Too many open files")

    watch = FileWatch("file", [path], reload, outcomes, pause=0.01)
    task = asyncio.ensure_future(watch.run())
    async with asyncio.timeout(20):
        assert await read.get() == "a"
        for text in ("b", "bad", "c"):
            write(path, text)
            assert await read.get() == text
        assert await read.get() == "c", "what failed for another reason is tried again"
        assert read.empty()
        watch.ask()
        assert await read.get() == "c"
    task.cancel()
    assert outcomes == {("file", "ok"): 4, ("file", "failed"): 2}


@contextmanager
def streaming(url: str, secret: str, max_tokens: int):
    """A stream that has begun."""
    body = {"prompt": "ab", "max_tokens": max_tokens, "temperature": 0, "stream": True}
    headers = bearer(secret)
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        yield lines


@pytest.mark.slow
def test_key_changes_apply_while_streams_continue(tmp_path):
    path = write(tmp_path / "keys.json", [ANN])
    with live(settings_of(path), step_seconds=0.02) as server:
        url = server.url
        assert (status(url, "first-key"), status(url, "second-key")) == (200, 401)
        with streaming(url, "first-key", 200) as lines:
            write(path, [BOB])
            until(lambda: status(url, "second-key") == 200)
            assert status(url, "first-key") == 401
            assert httpx.post(f"{url}/v1/completions", json=BODY, headers=bearer("first-key")).status_code == 401
            rest = "\n".join(lines)
        assert '"length"' in rest and "[DONE]" in rest


@pytest.mark.parametrize(
    "broken",
    [
        "[{",
        "open to others",
        *(pytest.param(b, marks=pytest.mark.slow) for b in ([], [ANN, ANN | {"name": "b"}], "gone")),
    ],
)
def test_a_broken_file_changes_nothing_and_is_logged(tmp_path, caplog, broken):
    path = write(tmp_path / "keys.json", [ANN])
    with live(settings_of(path)) as server:

        def failures() -> bool:
            text = httpx.get(f"{server.url}/metrics", headers=bearer("first-key")).text
            return 'kvasir_reloads_total{file="keys",outcome="failed"} 1.0' in text

        if broken == "open to others":
            path.chmod(0o644)
        elif broken == "gone":
            path.unlink()
        else:
            write(path, broken)
        until(failures)
        assert status(server.url, "first-key") == 200
        assert "stays in force" in caplog.text and "first-key" not in caplog.text
        write(path, [ANN, BOB])
        until(lambda: status(server.url, "second-key") == 200)


def test_sighup_rereads_the_files_at_once(tmp_path):
    path = write(tmp_path / "keys.json", [ANN])
    with process({"keys_file": str(path)}, {}) as (server, url):
        until(lambda: status(url, "first-key") == 200)
        server.send_signal(signal.SIGHUP)

        def readings() -> float:
            text = httpx.get(f"{url}/metrics", headers=bearer("first-key")).text
            found = [line for line in text.splitlines() if line.startswith("kvasir_reloads_total")]
            return float(found[0].rpartition(" ")[2]) if found else 0.0

        until(lambda: readings() == 2)
        assert server.poll() is None
