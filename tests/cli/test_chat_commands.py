"""The commands of a chat that are Ollama's: /set, /show, /save, /load."""

from __future__ import annotations

import pytest

from kvasir.cli.chat.commands import obey
from kvasir.cli.chat.conversation import ChatHistory
from kvasir.cli.chat.saving import OtherModel
from kvasir.errors import InvalidRequest, KvasirError
from kvasir.store.store import ModelStore
from tests.cli.test_chat import chat


@pytest.fixture
async def session(tmp_path, monkeypatch):
    monkeypatch.setattr("kvasir.store.store.models_dir", lambda: tmp_path / "store")
    session = chat()
    await session.front.start()
    yield session
    await session.front.stop()


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("/set parameter temperature 0.25", "temperature", 0.25),
        ("/set parameter num_predict 3", "max_tokens", 3),
        ("/set parameter repeat_penalty 1.5", "more", {"repetition_penalty": 1.5}),
        ("/set nothink", "think", False),
    ],
)
async def test_ollamas_names_set_our_settings(session, line, name, value):
    await obey(session, line)
    assert getattr(session.settings, name) == value


async def test_switches(session):
    await obey(session, "/set quiet")
    await obey(session, "/set nomarkdown")
    session.screen.notes.clear()
    await session.ask("Hello")
    assert not any("tokens/s" in note for note in session.screen.notes)
    await obey(session, '/set system "Be brief."')
    assert session.conversation.system == "Be brief."
    await obey(session, "/set format json")
    assert session.settings.params({}).structured_outputs.json == {"type": "object"}
    await obey(session, "/set noformat")
    assert session.settings.params({}).structured_outputs is None


@pytest.mark.parametrize("subject", ["", "info", "parameters", "system", "template", "license"])
async def test_facts_are_shown(session, subject):
    await obey(session, f"/show {subject}")
    assert session.screen.notes
    with pytest.raises(InvalidRequest, match="Modelfile"):
        await obey(session, "/show modelfile")
    with pytest.raises(InvalidRequest):
        await obey(session, "/show everything")


async def test_each_parameter_is_shown_once(session):
    await obey(session, "/seed 7")
    await obey(session, "/temperature 0.5")
    session.screen.notes.clear()
    await obey(session, "/show parameters")
    names = [note.split()[0] for note in session.screen.notes]
    assert names.count("seed") == names.count("temperature") == 1 and len(set(names)) == len(names)


async def test_a_session_becomes_a_model(session):
    session.model = "kvasir-mini"
    await obey(session, "/set system Speak like a fox.")
    await obey(session, "/temperature 0.5")
    await session.ask("Hello")
    [(question, answer)] = session.conversation.turns
    await obey(session, "/save fox")
    entry = ModelStore().get("fox")
    assert entry.system == "Speak like a fox." and entry.parameters["temperature"] == 0.5
    assert [m["content"] for m in entry.messages] == [question, answer]


async def test_another_model_is_chosen_only_if_it_exists(session):
    with pytest.raises(OtherModel) as chosen:
        await obey(session, "/load kvasir-mini")
    assert chosen.value.model == "kvasir-mini"
    before = ChatHistory(session.conversation.system, list(session.conversation.turns))
    for name in ("no-such-model", "missing.json", ""):
        with pytest.raises(KvasirError):
            await obey(session, f"/load {name}")
    assert session.conversation == before
