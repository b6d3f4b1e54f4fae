"""`kvasir run`: what it prints, and what it ends with."""

from __future__ import annotations

import re

import pytest
from click.testing import Result
from typer.testing import CliRunner

import kvasir.cli.chat
import kvasir.cli.run
import kvasir.engine.async_llm
from kvasir.cli.app import app
from kvasir.cli.chat.conversation import ChatHistory
from kvasir.cli.chat.session import Session, Settings
from kvasir.cli.run import print_answer
from kvasir.engine.async_llm import AsyncLLM
from kvasir.engine.fake import FakeEngine
from kvasir.engine.front import Front
from kvasir.engine.load_text import load_text
from kvasir.errors import KvasirError
from kvasir.types import SamplingParams
from tests.cli.running import VOCABULARY, Terminal
from tests.cli.test_chat import Recorder, text_half
from tests.serve.fakes import POISON
from tests.serve.running import make_front

REDRAWN = "\x1b[?2026h"  # what precedes rendered Markdown


async def test_an_answer_is_printed_with_its_figures(capsys):
    front = make_front()
    await front.start()
    try:
        await print_answer(front, front.resolve(await front.encode("abc"), SamplingParams(max_tokens=4, seed=1)), False)
    finally:
        await front.stop()
    out, err = capsys.readouterr()
    assert len(out.rstrip("\n")) == 4 and "4 tokens at" in err and "seed 1" in err


async def test_an_engine_that_fails_is_an_error(capsys):
    front = make_front()
    await front.start()
    try:
        request = front.resolve(list(POISON.encode()), SamplingParams(max_tokens=4, seed=1))
        with pytest.raises(KvasirError, match="engine"):
            await print_answer(front, request, False)
    finally:
        await front.stop()
    assert "tokens at" not in capsys.readouterr().err


# -- arguments -------------------------------------------------------------------------------------------------


@pytest.fixture
def engines(monkeypatch):
    """Commands get fake engines; returns those that were started."""
    started: list[AsyncLLM] = []

    class Fake(AsyncLLM):
        def __init__(self, model: str, **options):
            super().__init__(model, engine=FakeEngine(vocab_size=VOCABULARY, max_model_len=256), **options)

        async def start(self) -> AsyncLLM:
            started.append(self)
            return await super().start()

    for module in (kvasir.cli.run, kvasir.cli.chat):
        monkeypatch.setattr(module, "AsyncLLM", Fake)
    return started


def invoke(*arguments: str, stdin: str | bytes = "") -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


SCHEMA = '{"type": "array", "uniqueItems": true}'
WRONG = [
    (["--temperature", "-1"], "temperature is -1"),
    (["--max-tokens", "0"], "max_tokens is 0"),
    (["--max-tokens", "10000000"], "max_tokens is 10000000"),
    (["--max-model-len", "64", "--max-tokens", "64"], "the context holds 64"),
    (["--top-p", "2"], "top_p is 2"),
    (["--frequency-penalty", "9"], "frequency_penalty is 9"),
    (["--seed", str(-(2**70))], "seed is"),
    (["--thinking-token-budget", "-5"], "thinking_token_budget is -5"),
    (["--json-schema", "schema.json"], "cannot be enforced"),
    (["--json-schema", "missing.json"], "missing.json cannot be read"),
    (["--grammar", "empty.lark"], "No 'root' rule"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=str)
@pytest.mark.parametrize("command", [["run", "kvasir-mini", "hi"], ["chat", "kvasir-mini"]], ids=["run", "chat"])
def test_arguments_are_looked_at_before_the_model_is_loaded(
    engines, tmp_path, monkeypatch, command, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schema.json").write_text(SCHEMA)
    (tmp_path / "empty.lark").write_text("")
    result = invoke(*command, *arguments, stdin="hi\n")
    assert isinstance(result.exception, KvasirError) and message in str(result.exception), result.exception
    assert not engines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "kvasir-mini", "hi", "--no-chat", "--thinking-token-budget", "5"], "a text to continue"),
        (["run", "kvasir-mini", ""], "prompt"),
        (["run", "kvasir-mini", "", "--no-chat"], "prompt"),
        (["run", "kvasir-mini", "-"], "standard input"),
        (["run", "kvasir-mini", "hi", "--prediction", "no.txt"], "no.txt: No such file"),
    ],
    ids=str,
)
def test_options_that_a_prompt_cannot_have_are_refused_before_the_model_is_loaded(engines, arguments, message):
    result = invoke(*arguments)
    assert isinstance(result.exception, KvasirError) and message in str(result.exception), result.exception
    assert not engines


def test_a_chat_needs_a_template_before_the_model_is_loaded(engines, monkeypatch):
    monkeypatch.setattr(kvasir.engine.async_llm, "load_text", lambda options: (load_text(options)[0], None))
    for command in (["run", "kvasir-mini", "hi", "--chat"], ["chat", "kvasir-mini"]):
        result = invoke(*command)
        assert "chat template" in str(result.exception) and not engines


@pytest.mark.parametrize(
    ("chat", "text"),
    [
        (["--no-chat"], "one\ntwo\n\nthree, é, €"),
        pytest.param([], "What is 23 + 45?\n\nAnd €?", marks=pytest.mark.slow),
    ],
)
def test_a_prompt_may_come_from_the_standard_input(engines, text, chat):
    options = ["--temperature", "0", "--max-tokens", "5", "--quiet", *chat]
    given = invoke("run", "kvasir-mini", text, *options)
    assert given.exit_code == 0 and given.stdout.strip()
    for end in ("", "\n"):
        assert invoke("run", "kvasir-mini", "-", *options, stdin=text + end).stdout == given.stdout
        assert invoke("run", "kvasir-mini", *options, stdin=text + end).stdout == given.stdout
    assert invoke("run", "kvasir-mini", "-", *options, stdin=text + "\n\n").stdout != given.stdout


def test_the_figures_are_one_line_unless_more_is_asked_for(engines):
    options = ["--temp", "0", "-n", "5", "--ctx-size", "128", "--dtype", "bf16"]
    [line] = invoke("run", "kvasir-mini", "hi", *options).stderr.splitlines()
    assert "5 tokens" in line and engines[-1].options.max_model_len == 128
    assert engines[-1].options.dtype == "bfloat16"
    assert invoke("run", "kvasir-mini", "hi", *options, "--quiet").stderr == ""


def test_a_prompt_is_a_message_if_the_model_has_a_template(engines, monkeypatch):
    options = ["--temp", "0", "-n", "5", "--quiet"]
    answer, text = (invoke("run", "kvasir-mini", "hi", *options, how).stdout for how in ("--chat", "--no-chat"))
    assert answer != text and invoke("run", "kvasir-mini", "hi", *options).stdout == answer
    monkeypatch.setattr(kvasir.engine.async_llm, "load_text", lambda options: (load_text(options)[0], None))
    assert invoke("run", "kvasir-mini", "hi", *options).stdout == text


@pytest.mark.slow
def test_a_terminal_renders_an_answer_and_leaves_a_text_as_it_is():
    options = ["--temp", "0", "-n", "40", "--threads", "1", "--quiet"]
    with Terminal("kvasir.cli", "run", "kvasir-mini", "What is 23 + 45?", *options) as terminal:
        terminal.wait_for("23 + 45 = 68.", timeout=60)
        assert terminal.end() == 0 and REDRAWN in terminal.shown
    with Terminal("kvasir.cli", "run", "kvasir-mini", "Once upon a time", "--no-chat", *options) as terminal:
        terminal.wait_for("there was", timeout=60)
        assert terminal.end() == 0 and REDRAWN not in terminal.shown


@pytest.mark.slow
def test_without_a_prompt_a_terminal_starts_a_chat(tmp_path):
    command = ["run", "kvasir-mini", "--temp", "0", "-n", "20", "--threads", "1"]
    with Terminal("kvasir.cli", *command, XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.wait_for("/? lists the commands", timeout=60)
        terminal.wait_for(">")
        terminal.type("What is 23 + 45?\r")
        terminal.wait_for("tokens of context")
        terminal.wait_for(">")
        terminal.type("/bye\r")
        assert terminal.end() == 0


def test_an_input_that_is_no_text_is_refused(engines):
    result = invoke("run", "kvasir-mini", "-", stdin=b"\xff\xfe")
    assert isinstance(result.exception, KvasirError) and "UTF-8" in str(result.exception) and not engines


# -- rates -----------------------------------------------------------------------------------------------------


class Late:
    """A front half whose reader gets everything at once, some time after it was computed."""

    def __init__(self, front):
        self._front = front

    def __getattr__(self, name):
        return getattr(self._front, name)

    async def stream(self, request):
        deltas = [delta async for delta in self._front.stream(request)]
        for delta in deltas:
            yield delta


async def test_the_rate_of_a_chat_is_the_engines_as_well():
    front = Front(FakeEngine(vocab_size=VOCABULARY, max_model_len=256, step_seconds=0.02), *text_half())
    await front.start()
    try:
        session = Session(Late(front), Recorder(), ChatHistory(), Settings(temperature=0.0, max_tokens=8))
        await session.ask("Hello")
    finally:
        await front.stop()
    assert session.figures.tokens_per_second <= 50


async def test_a_rate_is_the_engines_however_late_its_tokens_are_read(capsys):
    front = make_front(step_seconds=0.02)
    await front.start()
    try:
        request = front.resolve(await front.encode("abc"), SamplingParams(max_tokens=8, seed=1, ignore_eos=True))
        await print_answer(Late(front), request, False)
        request = front.resolve(await front.encode("abc"), SamplingParams(max_tokens=1, seed=1))
        await print_answer(Late(front), request, False)
    finally:
        await front.stop()
    several, one = capsys.readouterr().err.splitlines()
    assert 0 < float(re.search(r"8 tokens at ([\d.]+)/s", several)[1]) <= 50
    assert "1 token," in one and "/s" not in one  # there is nothing to tell a rate by


@pytest.mark.parametrize("chat", [["--no-chat"], []])
def test_a_file_may_predict_the_answer(engines, monkeypatch, tmp_path, chat):
    (tmp_path / "expected.txt").write_text("five €")
    options = ["--temperature", "0", "--max-tokens", "5", "--quiet", *chat]
    made, resolve = [], Front.resolve
    monkeypatch.setattr(Front, "resolve", lambda *args, **fields: made.append(resolve(*args, **fields)) or made[-1])
    plain = invoke("run", "kvasir-mini", "What is 2 + 3?", *options)
    found = invoke("run", "kvasir-mini", "What is 2 + 3?", *options, "--prediction", str(tmp_path / "expected.txt"))
    assert found.exit_code == 0 and found.stdout == plain.stdout
    tokenizer = engines[0].front.tokenizer
    assert [request.prediction for request in made] == [(), tuple(tokenizer.encode("five €", add_special_tokens=False))]
