"""Hostile templates: each ends within its limits, and the next rendering works."""

import gc
import json
import subprocess
import sys
import threading
import time
from datetime import datetime

import pytest

from kvasir.errors import TemplateError
from kvasir.text.sandbox import SandboxedProcess, make_frame
from kvasir.text.template_process import SCRIPT, WHAT, TemplateLimits, TemplateRenderer
from kvasir.text.worker_limits import OUT_OF_TIME

LIMITS = TemplateLimits(seconds=0.7, max_output=10_000, max_source=100_000, memory=256 << 20)
FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"

HOSTILE = {
    "nested loops": (FOREVER, "more than 0.7 seconds"),
    "a power": ("{{ 10 ** (10 ** 10) }}", "more than 0.7 seconds"),
    "a huge range": ("{{ range(10**9) | list }}", "exceeded its limits"),
    "a giant string": ("{{ 'a' * 10**10 }}", "MemoryError"),
    "a giant list": ("{{ ([0] * 10**9) | length }}", "MemoryError"),
    "a string that doubles": (
        "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "limits|seconds",
    ),
    "long output": ("{% for i in range(9999) %}{{ 'abc' }}{% endfor %}", "10000 characters"),
    "long output at once": ("{{ 'a' * 10001 }}", "10000 characters"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "deep nesting": ("{{" + "(" * 20_000 + "1" + ")" * 20_000 + "}}", "RecursionError|crashed its process"),
    "a class": ("{{ ''.__class__.__mro__ }}", "sandbox forbids"),
    "a function's globals": ("{{ raise_exception.__globals__.json }}", "sandbox forbids"),
    "code of a macro": ("{% macro f() %}{% endmacro %}{{ f._func.__code__ }}", "sandbox forbids"),
    "a namespace's class": ("{{ namespace(__class__=1) }}", "sandbox forbids"),
    "a namespace's dict": ("{% set n = namespace() %}{% set n.__dict__ = 1 %}", "sandbox forbids"),
    "a format string": ("{{ '{0.__class__.__mro__}'.format(1) }}", "sandbox forbids"),
    "changing its input": ("{{ messages.append(1) }}", "sandbox forbids"),
    "including files": ("{% include '/etc/passwd' %}", "no loader"),
    "bad syntax": ("{% for %}", r"malformed: .*line 1"),
    "its own refusal": ("{{ raise_exception('Roles must <alternate>') }}", "^Roles must <alternate>$"),
    "an undefined value": ("{{ nothing.here }}", "'nothing' is undefined"),
    "a failing expression": ("{{ 'a' + 1 }}", "TypeError"),
    "a long source": ("x" * 100_001, "100001 characters"),
}


@pytest.fixture(scope="module")
def renderer():
    renderer = TemplateRenderer(LIMITS)
    yield renderer
    renderer.close()


@pytest.mark.parametrize(("source", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_templates_end_and_the_next_one_renders(renderer, source, message):
    began = time.monotonic()
    with pytest.raises(TemplateError, match=message) as caught:
        renderer.render(source, {"messages": [1]})
    assert len(str(caught.value)) < 1100
    assert time.monotonic() - began < 20, "a machine under load is slow, but not without bound"
    assert renderer.render("{{ x }}", {"x": "fine"}).text == "fine"


def test_a_hanging_template_does_not_keep_others_waiting_for_ever():
    renderer = TemplateRenderer(LIMITS, max_workers=2)
    failures: list[str] = []

    def hang() -> None:
        with pytest.raises(TemplateError) as caught:
            renderer.render(FOREVER, {})
        failures.append(str(caught.value))

    threads = [threading.Thread(target=hang) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert [renderer.render("{{ x }}", {"x": str(i)}).text for i in range(5)] == list("01234")
    for thread in threads:
        thread.join()
    assert len(failures) == 4 and all("more than 0.7 seconds" in failure for failure in failures)
    renderer.close()


def test_threads_get_their_own_answers():
    renderer = TemplateRenderer(max_workers=3)
    wrong: list[str] = []

    def work(name: str) -> None:
        for i in range(50):
            text = renderer.render("{% for m in messages %}{{ m }};{% endfor %}", {"messages": [name, i]}).text
            if text != f"{name};{i};":
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(name * 2000,)) for name in "abcdef"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    renderer.close()


def test_a_large_conversation_goes_through():
    renderer = TemplateRenderer()
    text = "é😀" * 200_000
    assert renderer.render("{{ text }}", {"text": text}).text == text
    renderer.close()


def test_input_that_is_not_json_is_refused(renderer):
    with pytest.raises(TemplateError, match="JSON"):
        renderer.render("x", {"messages": [object()]})


def test_the_clock_is_the_parents(renderer):
    now = datetime(2024, 2, 29, 13, 5)
    assert renderer.render("{{ strftime_now('%d %b %Y %H:%M') }}", {}, now).text == "29 Feb 2024 13:05"


def test_the_worker_sees_no_environment_and_few_modules(renderer, monkeypatch):
    started = {}
    popen = subprocess.Popen

    def spy(command, **options):
        started.update(options, command=command)
        return popen(command, **options)

    monkeypatch.setattr(subprocess, "Popen", spy)
    fresh = TemplateRenderer(LIMITS)
    fresh.prewarm()
    fresh.close()
    assert started["env"] == {} and {"-I", "-S"} <= set(started["command"])
    loaded = subprocess.run(
        [
            sys.executable,
            "-X",
            "importtime",
            started["command"][-2],
            json.dumps({"path": [], "memory": 1 << 30}),
        ],
        capture_output=True,
        text=True,
        input="",
    ).stderr
    assert "No module named 'jinja2'" in loaded, "imports come from the path it is given"


def test_dropped_and_closed_renderers_leave_no_process():
    renderer = TemplateRenderer(LIMITS)
    assert renderer.render("a", {}).text == "a"
    process = renderer.sandbox.idle[0].process
    renderer.close()
    assert process.poll() is not None
    assert renderer.render("a", {}).text == "a", "a closed renderer starts again when asked"
    process = renderer.sandbox.idle[0].process
    del renderer
    gc.collect()
    assert process.poll() is not None


def test_a_worker_that_was_killed_while_idle_is_replaced(renderer):
    renderer.render("a", {})
    renderer.sandbox.idle[-1].process.kill()
    renderer.sandbox.idle[-1].process.wait()
    assert renderer.render("a", {}).text == "a"


def test_a_hanging_worker_ends_itself_when_its_parent_does_not():
    worker = SandboxedProcess(SCRIPT, WHAT, LIMITS.memory)
    request = {"source": FOREVER, "variables": {}, "now": "2024-01-01", "max_output": 9, "seconds": 0.2}
    worker.socket.sendall(make_frame(request))
    assert worker.process.wait(timeout=20) == -OUT_OF_TIME
    worker.kill()


def test_an_idle_worker_ends_with_its_parent():
    worker = SandboxedProcess(SCRIPT, WHAT, LIMITS.memory)
    worker.socket.close()
    assert worker.process.wait(timeout=20) == 0
