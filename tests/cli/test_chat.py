"""Chat: what is shown, kept, undone and saved; and a real terminal with Ctrl-C and Ctrl-D."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.cli.chat import run as run_chat
from kvasir.cli.chat.commands import COMMANDS, obey
from kvasir.cli.chat.conversation import ChatHistory, ConversationError, read
from kvasir.cli.chat.screen import CLOSE, OPEN, ThinkingView
from kvasir.cli.chat.session import Session, Settings
from kvasir.config import EngineOptions
from kvasir.engine.async_llm import AsyncLLM
from kvasir.engine.fake import FakeEngine
from kvasir.engine.front import Front
from kvasir.engine.load_text import load_text
from kvasir.errors import InvalidRequest, KvasirError
from kvasir.runner.fake import fake_next
from tests._shared import need
from tests.cli.running import VOCABULARY, Terminal, run

FAKE = "tests.cli.fake_chat"


class Recorder:
    """A screen that remembers."""

    def __init__(self):
        self.shown: list[tuple[str, bool]] = []
        self.notes: list[str] = []

    def pieces(self, pieces):
        self.shown += pieces

    renders = False

    def begin_answer(self):
        pass

    def end_answer(self):
        pass

    def note(self, text):
        self.notes.append(text)

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.shown)


@cache
def text_half():
    """The tokenizer and template of the bundled model, with one template process for all tests."""
    return load_text(EngineOptions("kvasir-mini"))


def chat(max_tokens: int | None = 8, context: int = 256, **fake) -> Session:
    front = Front(FakeEngine(vocab_size=VOCABULARY, max_model_len=context, **fake), *text_half())
    settings = Settings(temperature=0.0, max_tokens=max_tokens)
    return Session(front, Recorder(), ChatHistory(), settings)  # type: ignore[arg-type]


@pytest.fixture
async def session():
    session = chat()
    await session.front.start()
    yield session
    await session.front.stop()


async def by_hand(session: Session, question: str, count: int) -> str:
    ids = list(await session.front.encode_chat(session.conversation.messages(question)))
    begun = len(ids)
    for _ in range(count):
        ids.append(fake_next(ids, len(ids), 0, VOCABULARY))
    return await session.front.decode(ids[begun:], skip_special_tokens=True)


# -- thinking ----------------------------------------------------------------------------------------------


def split(text: str, inside: bool, cuts: list[int]) -> list[tuple[str, bool]]:
    """What Thinking says of each character, whatever the pieces."""
    thinking, pieces = ThinkingView(inside), []
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in pairwise(places):
        pieces += thinking.push(text[start:end])
    pieces += thinking.flush()
    return [(character, thought) for piece, thought in pieces for character in piece]


pieces_of_answers = st.lists(st.sampled_from([OPEN, CLOSE, "<", "</th", "think>", " ", "\n", "words"]), max_size=8)


@given(pieces_of_answers.map("".join), st.booleans(), st.lists(st.integers(0, 60), max_size=12))
def test_thinking_does_not_depend_on_the_pieces_and_loses_nothing(text, inside, cuts):
    whole = split(text, inside, [])
    assert split(text, inside, cuts) == whole
    assert "".join(character for character, _ in whole) == text


@pytest.mark.parametrize(
    ("text", "inside", "thought"),
    [
        ("plain", False, ""),
        ("<think>a</think>b", False, "<think>a</think>"),
        ("\n <think>a</think>b</think>", False, "\n <think>a</think>"),
        ("a</think>b", True, "a</think>"),
        ("never closed", True, "never closed"),
        ("so <think>a</think>", False, ""),
        ("<thin", False, ""),
    ],
)
def test_thinking_is_split_from_content(text, inside, thought):
    assert "".join(character for character, is_thought in split(text, inside, []) if is_thought) == thought


# -- conversations -----------------------------------------------------------------------------------------

texts = st.text(st.characters(codec="utf-8"), max_size=20)


@given(system=st.none() | texts, turns=st.lists(st.tuples(texts, texts), max_size=3))
def test_a_saved_conversation_comes_back(tmp_path_factory, system, turns):
    path = tmp_path_factory.mktemp("chat") / "chat.json"
    ChatHistory(system, turns).save(path, "m")
    assert read(path) == ChatHistory(system, turns)


def test_saving_never_replaces_another_file(tmp_path):
    path = tmp_path / "precious"
    path.write_text('{"a": 1}')
    with pytest.raises(ConversationError, match="messages"):
        ChatHistory().save(path, "m")
    assert path.read_text() == '{"a": 1}'


@pytest.mark.parametrize(
    "content",
    [
        "no json",
        "[]",
        '{"messages": 3}',
        '{"messages": [{"role": "user", "content": 1}]}',
        '{"messages": [{"role": "user", "content": "without an answer"}]}',
        '{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}',
        "[" * 100_000,
        b"\xff\xfe".decode("latin-1"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, content):
    path = tmp_path / "chat.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ConversationError):
        read(path)


# -- asking ------------------------------------------------------------------------------------------------


async def test_responses_are_shown_and_added_to_the_history(session):
    first = await by_hand(session, "Hello", 8)
    await session.ask("Hello")
    assert session.screen.text == first
    second = await by_hand(session, "Again", 8)
    await session.ask("Again")
    assert session.conversation.turns == [("Hello", first), ("Again", second)]
    assert session.screen.text == first + second
    assert "8 tokens" in session.screen.notes[0]
    assert "tokens/s" in session.screen.notes[1] and "256" in session.screen.notes[1]


async def test_the_system_prompt_counts(session):
    await obey(session, "/system Speak like a fox.")
    answer = await by_hand(session, "Hello", 8)
    await session.ask("Hello")
    assert session.conversation.turns == [("Hello", answer)]
    await obey(session, "/system default")
    await obey(session, "/undo")
    assert answer != await by_hand(session, "Hello", 8)
    assert session.conversation == ChatHistory()


async def test_a_full_context_is_an_error_and_cuts_nothing(session):
    question = "word " * 20
    with pytest.raises(InvalidRequest, match="context holds 256") as caught:
        for _ in range(50):
            await session.ask(question)
    assert "/undo" in caught.value.hint
    turns = list(session.conversation.turns)
    assert turns and all(asked == question for asked, _ in turns)
    await obey(session, "/undo")
    await session.ask("short")
    assert session.conversation.turns[:-1] == turns[:-1]


async def test_an_answer_that_fills_the_context_has_a_note():
    session = chat(max_tokens=None, context=64)
    await session.front.start()
    await session.ask("Hello")
    assert "[the context is full]" in session.screen.notes
    assert session.figures is not None and session.figures.context == 64
    await session.front.stop()


async def test_stopping_keeps_what_came():
    session = chat(max_tokens=200, step_seconds=0.01)
    await session.front.start()
    task = asyncio.create_task(session.ask("Hello"))
    while not session.screen.text:
        await asyncio.sleep(0.005)
    task.cancel()
    await task
    [(question, answer)] = session.conversation.turns
    assert question == "Hello" and answer == session.screen.text
    assert (await by_hand(chat_like(session), "Hello", 200)).startswith(answer.rstrip("\ufffd"))
    while (stats := await session.front.stats()).running:
        await asyncio.sleep(0.01)
    assert stats.blocks_used == 0 and stats.aborted == 1
    await session.front.stop()


def chat_like(session: Session) -> Session:
    return Session(session.front, session.screen, ChatHistory(), session.settings)


async def test_a_failed_answer_is_an_error_and_not_kept():
    def fault(plan):
        raise RuntimeError("a broken kernel")

    session = chat(fault=fault)
    await session.front.start()
    with pytest.raises(KvasirError, match="a broken kernel"):
        await session.ask("Hello")
    assert session.conversation.turns == []
    await session.front.stop()


async def test_retry_gives_another_answer_and_keeps_the_old_one_where_it_cannot(session):
    session.settings.temperature = 1.0
    session.settings.seed = 1
    await session.ask("Hello")
    [old] = session.conversation.turns
    await obey(session, "/seed 2")
    await obey(session, "/retry")
    [new] = session.conversation.turns
    assert new[0] == old[0] and new[1] != old[1]
    await obey(session, "/max 250")
    with pytest.raises(InvalidRequest, match="context"):
        await obey(session, "/retry")
    assert session.conversation.turns == [new]


# -- commands ----------------------------------------------------------------------------------------------


async def test_help_names_every_command(session):
    await obey(session, "/help")
    reported = "\n".join(session.screen.notes)
    assert all(name in reported for name in COMMANDS)
    assert "backslash" in reported and "Ctrl-C" in reported


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("/temperature 0.5", "temperature", 0.5),
        ("/temperature default", "temperature", None),
        ("/max 3", "max_tokens", 3),
        ("/seed 7", "seed", 7),
        ("/set temperature 0.25", "temperature", 0.25),
        ("/set top_p 0.5", "more", {"top_p": 0.5}),
        ("/set top_k default", "more", {}),
        ("/think on", "think", True),
        ("/think off", "think", False),
    ],
)
async def test_settings_are_set(session, line, field, value):
    await obey(session, line)
    assert getattr(session.settings, field) == value


@pytest.mark.parametrize(
    "line",
    [
        "/temperature warm",
        "/temperature -1",
        "/max 0",
        "/max 1.5",
        "/seed",
        "/think maybe",
        "/nothing",
        "/set nothing 3",
        "/set top_p 2",
        "/set top_p warm",
        "/save",
    ],
)
async def test_invalid_settings_are_refused_and_change_nothing(session, line):
    before = Settings(**vars(session.settings))
    if line == "/seed":
        await obey(session, line)  # only shows it
    else:
        with pytest.raises(InvalidRequest):
            await obey(session, line)
    assert session.settings == before


async def test_thinking_is_switched_in_the_template(session, monkeypatch):
    prompts, stream = [], session.front.stream
    monkeypatch.setattr(session.front, "stream", lambda r: prompts.append(r.prompt_ids) or stream(r))
    for think in (True, True, False):
        session.settings.think = think
        await session.ask("Hello")
        await obey(session, "/clear")
    assert prompts[0] == prompts[1] != prompts[2]


async def test_save_clear_load(session, tmp_path):
    await session.ask("Hello")
    kept = list(session.conversation.turns)
    await obey(session, f"/save {tmp_path}/a chat.json")
    await obey(session, "/clear")
    assert session.conversation.turns == []
    await obey(session, f"/load {tmp_path}/a chat.json")
    assert session.conversation.turns == kept
    await obey(session, "/stats")
    assert any("blocks" in note for note in session.screen.notes)
    with pytest.raises(EOFError):
        await obey(session, "/bye")


# -- as a process ------------------------------------------------------------------------------------------


def test_a_pipe_of_questions_and_commands(tmp_path):
    lines = ["Hello", "/nothing", "two \\", "lines", '"""three', 'lines"""', f"/save {tmp_path}/c.json"]
    done = run(FAKE, "0", "256", "6", stdin="\n".join(lines) + "\n")
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "c.json").read_text())["messages"]
    assert [m["content"] for m in saved if m["role"] == "user"] == ["Hello", "two \nlines", "three\nlines"]
    answers = [m["content"] for m in saved if m["role"] == "assistant"]
    assert done.stdout == "".join(answer + "\n" for answer in answers)
    assert "/nothing" in done.stderr and "/?" in done.stderr
    assert "tokens/s" in done.stderr


def test_a_terminal_with_ctrl_c_and_ctrl_d(tmp_path):
    with Terminal(FAKE, "0.02", "400", "300", XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.wait_for("/? lists the commands")
        terminal.wait_for(">")
        terminal.type("Hello\r")
        terminal.wait_for("Hello")
        terminal.wait_for("\n")
        terminal.wait_for(" ")  # of the answer
        terminal.type("\x03")
        terminal.wait_for("[stopped;")
        terminal.wait_for(">")
        terminal.type("/undo\r")
        terminal.wait_for("removed: Hello")
        terminal.wait_for(">")
        terminal.type("half a line")
        terminal.wait_for("half a line")
        terminal.wait_for("[Ctrl-D or /bye exits]", pressing="\x03")
        terminal.wait_for(">")
        terminal.type("\x04")
        assert terminal.end() == 0
    history = tmp_path / "kvasir" / "chat_history"
    assert "+Hello" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


UP, LEFT = "\x1b[A", "\x1b[D"


def test_arrow_keys_recall_and_edit_earlier_lines(tmp_path):
    with Terminal(FAKE, "0", "400", "2", XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.wait_for(">")
        terminal.type("one\r")
        terminal.wait_for("tokens of context")
        terminal.wait_for(">")
        terminal.type(UP + LEFT + LEFT + "X\r")
        terminal.wait_for("tokens of context")
        terminal.wait_for(">")
        terminal.type(f"/save {tmp_path}/c.json\r")
        terminal.wait_for("saved 2 exchanges in")
        terminal.wait_for(">")
        terminal.type("/bye\r")
        assert terminal.end() == 0
    messages = json.loads((tmp_path / "c.json").read_text())["messages"]
    assert [m["content"] for m in messages[::2]] == ["one", "oXne"]


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("one\x1b\rtwo\\\rthree\r", "one\ntwo\nthree"),
        ('"""one\rtwo\r"""\r', "one\ntwo"),
        ('"""\ra "" b\r\rc\r"""\r', 'a "" b\n\nc'),
    ],
)
def test_several_lines_at_the_prompt(tmp_path, keys, text):
    with Terminal(FAKE, "0", "400", "4", XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.wait_for(">")
        terminal.type(keys)
        terminal.wait_for("tokens of context")
        terminal.wait_for(">")
        terminal.type(f"/save {tmp_path}/c.json\r")
        terminal.wait_for("saved 1 exchange in")
        terminal.wait_for(">")
        terminal.type("\x04")
        assert terminal.end() == 0
    messages = json.loads((tmp_path / "c.json").read_text())["messages"]
    assert messages[0]["content"] == text


@pytest.mark.parametrize(("name", "problem"), [("stories260K", "chat template"), ("gpt-nano-sort", "tokenizer")])
def test_a_model_that_cannot_chat_is_refused_with_a_next_step(name, problem):
    with pytest.raises(KvasirError, match=f"has no {problem}") as caught:
        run_chat(EngineOptions(str(need("models", name))), None, None, None, None)
    assert caught.value.hint


def test_a_wrong_option_is_refused_before_anything_is_loaded():
    with pytest.raises(InvalidRequest, match="temperature"):
        run_chat(EngineOptions("kvasir-mini"), None, -1.0, None, None)


@pytest.mark.slow
def test_the_real_model_chats():
    options = ["--temperature", "0", "--max-tokens", "4", "--threads", "1"]
    done = run("kvasir.cli", "chat", "kvasir-mini", *options, stdin="Hello!\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and "tokens/s" in done.stderr


async def test_an_answer_can_be_made_to_follow_a_file(tmp_path):
    (tmp_path / "schema.json").write_text(
        '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'
    )
    (tmp_path / "words.gbnf").write_text('root ::= "yes" | "no"')
    (tmp_path / "broken.json").write_text("{")
    session = Session(AsyncLLM("kvasir-mini").front, Recorder(), ChatHistory(), Settings(0.0, 80))  # type: ignore
    await session.front.start()
    try:
        await obey(session, f"/set json_schema {tmp_path / 'schema.json'}")
        assert session.screen.notes[-1].startswith('json_schema: {"type": "object"')  # type: ignore[attr-defined]
        await session.ask("Hi")
        assert json.loads(session.conversation.turns[-1][1].split("</think>")[-1])["a"] in (1, 2)
        await obey(session, f"/set grammar {tmp_path / 'words.gbnf'}")
        await obey(session, "/set thinking_token_budget 0")
        await session.ask("Hi")
        assert session.conversation.turns[-1][1].split("</think>")[-1].strip() in ("yes", "no")
        before = Settings(**vars(session.settings))
        for wrong in ("broken.json", "nothing.json"):
            with pytest.raises(KvasirError, match=r"json_schema|nothing\.json"):
                await obey(session, f"/set json_schema {tmp_path / wrong}")
        assert session.settings == before
        await obey(session, "/set")
        assert any("thinking_token_budget: 0" in note for note in session.screen.notes)
    finally:
        await session.front.stop()
