"""Third-party clients in separate environments (scripts/install_clients.sh) against a real server: each of them
recognizes the server's responses and errors with its own classes and loops."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.server import serving
from tests.serve.dialects.anthropic.messages_help import CALL, front
from tests.serve.dialects.anthropic.test_tool_runner import GIVEN, TEMPLATE
from tests.serve.running import live

HERE = Path(__file__).with_name("outside")
CLIENTS = Path(__file__).resolve().parents[3] / ".clients"
PYTHON = CLIENTS / "venv" / "bin" / "python"
TYPED = CLIENTS / "typed" / "bin" / "python"  # clients of an older openai
NODE = shutil.which("node")
HOW = "(scripts/install_clients.sh installs them)"
SECONDS = 300

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 60)]
needs_python = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"litellm, langchain and openai-agents are not here {HOW}"
)
needs_node = pytest.mark.skipif(
    NODE is None or not (CLIENTS / "node_modules" / "@anthropic-ai").exists(),
    reason=f"node and Anthropic's JavaScript client are not here {HOW}",
)


def run(*command: object) -> dict:
    """What a script prints at last."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OPENAI", "ANTHROPIC"))}
    answer = subprocess.run([*map(str, command)], capture_output=True, text=True, env=own, timeout=SECONDS)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def tools():
    """A server whose model calls, and then says what the tool gave."""
    with live(front=front(TEMPLATE)) as server:
        yield server


@needs_python
def test_a_prompt_that_is_too_long_raises_the_clients_class(server):
    found = run(PYTHON, HERE / "too_long.py", server.url)
    classes = {"litellm": "ContextWindowExceededError", "langchain": "ContextOverflowError"}
    wrong = {name: kinds for name, kinds in found.items() if classes[name.split()[0]] not in kinds}
    assert len(found) == 26 and not wrong


@needs_python
def test_an_agent_with_an_output_type_calls_its_tool_first(tools):
    found = run(PYTHON, HERE / "agents_pair.py", tools.url, "fake")
    for api, result in found.items():
        assert result.get("asked") == ["Oslo"] and result["output"].keys() == {"sky", "windy"}, (api, result)
    assert len(found) == 4


@needs_node
def test_the_tool_runner_in_javascript(tools):
    found = run(NODE, HERE / "tool_runner.mjs", tools.url, "fake", f"{CALL}<eos>", CLIENTS)
    expected = {"reasons": ["tool_use", "end_turn"], "text": GIVEN}
    assert found == dict.fromkeys(("zod", "json", "stream", "eager", "unthreaded"), expected)


@pytest.fixture(scope="module")
def mini():
    """A server of the bundled model, which answers sums."""
    with serving("kvasir-mini") as (base, _):
        yield base


@pytest.mark.skipif(not TYPED.exists(), reason=f"instructor and pydantic-ai are not here {HOW}")
def test_answers_of_a_type_are_made_by_other_clients(mini):
    found = run(TYPED, HERE / "typed.py", mini, "kvasir-mini")
    assert "68" in found.pop("text")
    assert len(found) == 4 and all(answer.keys() == {"left", "right"} for answer in found.values()), found


@needs_python
def test_chats_of_other_clients_have_one_text(mini):
    found = run(PYTHON, HERE / "chains.py", mini, "kvasir-mini")
    texts = {found[name] for name in ("litellm", "litellm stream", "langchain", "langchain stream")}
    assert len(texts) == 1 and "68" in texts.pop()
    assert found["tokens"][0] == found["tokens"][1] > 0 and found["vectors"] == [2, 1]


@pytest.mark.skipif(
    NODE is None or not (CLIENTS / "node_modules" / "ai").exists(), reason=f"node and Vercel's ai are not here {HOW}"
)
def test_chats_of_vercels_client(mini):
    found = run(NODE, HERE / "vercel.mjs", mini, "kvasir-mini", CLIENTS)
    assert found["whole"] == found["streamed"] and "68" in found["whole"] and found["reason"] == "stop"
    assert found["tokens"][0] == found["tokens"][1] > 0 and found["typed"].keys() == {"left", "right"}
