"""The commands of the pages run, as a reader would copy them: against the bundled model and real servers.

All commands run except those that NOT_HERE names, with a reason each."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.docs import PAGES, Block, blocks, is_shell, shell_lines
from tests.docs.place import env_of, fill_store, make_place, write_commands

NOT_HERE = {
    r".*\bsudo |journalctl ": "changes the system",
    r"podman |helm |kubectl |kvasir fleet status --api-key": "needs a container engine or a cluster",
    r"git clone |pip |python3 -m venv |source ": "installs; tests/test_install_script.py does that",
    r"make ": "minutes to hours, and `make test` would call itself",
    r"cmake |export KVASIR_LIBRARY": "builds the native library",
    r"python -m (pytest|recipes)|python .*\bscheduler_defaults": "minutes to hours",
    r"python (-m )?(benchmarks|tests)(?!.*--help)": "minutes to hours, or needs other engines",
    r"kvasir pull (?!\./)": "downloads",
    r"kvasir (embed|rerank) (Qwen|BAAI)": "needs prompts or a classifier that the bundled model does not have",
    r".*retrieval\.query": "needs Jina's adapters",
    r".*eagle3\.gguf": "needs a head",
    r".*tls://(one|10)|kvasir replica MODEL .*\.\.\.|scp ": "needs several machines",
    r"kvasir fleet fleet\.yaml$": "needs Ray",
}
# Servers that commands expect to run already.
SERVERS = {
    r"kvasir fleet ": "kvasir serve kvasir-mini --replicas 2 --max-replicas 4",
    r"kvasir (ps|stop) ?": "kvasir serve",
    r"curl ": "kvasir serve kvasir-mini",
}
# Places that only root or several machines have, and a context that is beyond the bundled model's.
INSTEAD = {
    " /run/kv": " run/kv",
    "/etc/kvasir/keys.json": "keys.json",
    "10.0.0.1": "127.0.0.1",
    "10.0.0.2": "127.0.0.2",
    "--ctx-size 4k": "--ctx-size 1k",
}
# Options that make a command shorter.
SHORTER = {r"kvasir bench (?!--trace)": "--repeats 1 --num-prompts 2 --output-len 4"}
# Seconds for a command, the start and the end of a server: many, since other tests may take all processors.
PATIENCE = 900
STDIN = "Once upon a time\n/bye\n"


def reason(line: str) -> str | None:
    """Why a command does not run here."""
    return next((why for pattern, why in NOT_HERE.items() if re.match(pattern, line)), None)


SHOWN = [block for page in PAGES for block in blocks(page) if is_shell(block)]
RUN = [block for block in SHOWN if any(not reason(line) for line in shell_lines(block))]


class Terminal:
    """Runs commands in a place. Servers get free ports, and commands that follow find them there."""

    def __init__(self, place: Path) -> None:
        self.place, self.env = place, env_of(place)
        self.ports: dict[int, int] = {}  # the port in the page -> the port here
        self.servers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        for server in reversed(self.servers):
            server.send_signal(signal.SIGTERM)
            output = server.communicate(timeout=PATIENCE)[0]
            assert server.returncode in (0, -signal.SIGTERM), output

    def run(self, line: str) -> str:
        for there, here in INSTEAD.items():
            line = line.replace(there, here)
        line = " ".join((line, *(options for pattern, options in SHORTER.items() if re.match(pattern, line))))
        if re.match(r"kvasir (serve|replica) ", line + " "):
            self._start(line)
            return ""
        for pattern, server in SERVERS.items():
            if re.match(pattern, line) and not self.servers and "--check" not in line:
                self._start(server)
        done = self._call(self._adapted(line))
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        if line.startswith("curl "):
            json.loads(done.stdout)
        return done.stdout

    def _call(self, line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", line],
            cwd=self.place,
            env=self.env,
            input=STDIN,
            text=True,
            capture_output=True,
            timeout=PATIENCE,
        )

    def _adapted(self, line: str) -> str:
        """A command with the ports that servers have here."""
        if re.match(r"kvasir (ps|stop|fleet (status|restart|scale))", line) and "--url" not in line:
            line += " --url http://127.0.0.1:8000"
        line = re.sub(r"^curl ", "curl -sS --fail-with-body ", line)
        return re.sub(r"(?<=:)\d{4}\b", lambda found: str(self.ports.get(int(found[0]), found[0])), line)

    def _start(self, line: str) -> None:
        """Starts a server, and waits until it answers."""
        given = re.search(r"--port (\d+)", line)
        there = int(given[1]) if given else 9100 if " replica " in line else 8000
        here = self.ports[there] = _free_port()
        line = line.replace(given[0], f"--port {here}") if given else f"{line} --port {here}"
        server = subprocess.Popen(
            ["bash", "-c", f"exec {line}"], cwd=self.place, env=self.env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self.servers.append(server)
        for _ in range(10 * PATIENCE):
            if server.poll() is not None:
                self.servers.remove(server)
                raise AssertionError(f"{line}\n{server.communicate()[0]}")
            if _answers(here, " replica " in line, "--tls-cert" in line):
                return
            time.sleep(0.1)
        raise AssertionError(f"{line}: no answer")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _answers(port: int, replica: bool, tls: bool) -> bool:
    try:
        if replica:
            socket.create_connection(("127.0.0.1", port), 2).close()
            return True
        unverified = ssl._create_unverified_context() if tls else True
        return httpx.get(f"http{'s' * tls}://localhost:{port}/health", timeout=2, verify=unverified).status_code == 200
    except (OSError, httpx.HTTPError):
        return False


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    place = make_place(tmp_path_factory.mktemp("docs") / "home")
    fill_store(place)
    return place


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize("block", RUN, ids=str)
def test_the_commands_of_a_block_run(block: Block, made, tmp_path):
    place = tmp_path / "home"
    shutil.copytree(made, place, symlinks=True)
    with Terminal(place) as terminal:
        for line in shell_lines(block):
            if not reason(line):
                terminal.run(line)


def test_a_first_command_runs(tmp_path):
    block = next(block for block in RUN if str(block.page) == "docs/quickstart.md" and "Once upon a time" in block.code)
    with Terminal(write_commands(tmp_path)) as terminal:
        assert [terminal.run(line) for line in shell_lines(block)]


def test_each_reason_is_of_some_command():
    lines = [line for block in SHOWN for line in shell_lines(block)]
    for pattern in NOT_HERE:
        assert any(re.match(pattern, line) for line in lines), pattern


def test_each_line_begins_with_a_command():
    """What is no command stands in a block of another language, such as text."""
    known = (
        "kvasir python python3 pip make cmake git source export curl openssl echo head chmod scp sudo journalctl "
        "podman kubectl helm"
    ).split()
    for block in SHOWN:
        for line in shell_lines(block):
            assert line.split()[0] in known, f"{block}: {line}"


def test_most_commands_run():
    lines = [line for block in SHOWN for line in shell_lines(block)]
    assert sum(not reason(line) for line in lines) > 0.5 * len(lines)


def test_a_command_that_does_not_exist_fails(tmp_path):
    with Terminal(tmp_path) as terminal, pytest.raises(AssertionError, match="no-such-command"):
        terminal.run("no-such-command --at-all")
