"""Start a server on the bundled model, ask it something through the official OpenAI client, and stop it.

python examples/demo.py [--ask "A question"] [--model kvasir-mini]
"""

import argparse
import itertools
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from openai import OpenAI, OpenAIError

QUESTION = "Tell me a short story about a fox."
START_TIMEOUT = 120.0  # seconds; a start takes a few
STOP_TIMEOUT = 15.0


class ServerFailed(Exception):
    """The server ended, or did not answer in time."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def server(model: str) -> Iterator[str]:
    """The address of a server that runs until leaving. Raises ServerFailed with the end of its log."""
    port = free_port()
    command = [sys.executable, "-m", "kvasir.cli", "serve", model, "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until_ready(process, f"http://127.0.0.1:{port}/health")
            yield f"http://127.0.0.1:{port}"
        except (ServerFailed, OpenAIError) as failure:
            stop(process)
            raise ServerFailed(f"{failure}\n--- the end of the server's log ---\n{tail(log)}") from None
        finally:
            stopped = stop(process)
        if not stopped:
            raise ServerFailed(f"The server did not stop within {STOP_TIMEOUT:.0f} seconds and was killed.")


def wait_until_ready(process: subprocess.Popen, health: str) -> None:
    begin = time.monotonic()
    with spinner("Starting the server") as turn:
        while time.monotonic() - begin < START_TIMEOUT:
            if process.poll() is not None:
                raise ServerFailed(f"The server ended with code {process.returncode} before it was ready.")
            if is_healthy(health):
                return
            turn()
            time.sleep(0.1)
    raise ServerFailed(f"The server was not ready within {START_TIMEOUT:.0f} seconds.")


def is_healthy(health: str) -> bool:
    try:
        with urllib.request.urlopen(health, timeout=2) as answer:
            return answer.status == 200
    except OSError:  # refused, reset, timed out, or an HTTP error: not yet
        return False


def stop(process: subprocess.Popen) -> bool:
    """Ask the server to finish and wait; False if it had to be killed."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


def tail(log: IO[bytes], lines: int = 25) -> str:
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:]) or "(empty)"


@contextmanager
def spinner(text: str) -> Iterator[Callable[[], None]]:
    """A function that turns the spinner by one; a plain line where the output is no terminal."""
    frames = itertools.cycle("|/-\\")
    if not sys.stdout.isatty():
        print(text, "...", flush=True)
        yield lambda: None
        return
    try:
        yield lambda: print(f"\r{next(frames)} {text}", end="", flush=True)
    finally:
        print("\r\033[K", end="", flush=True)


def ask(address: str, question: str) -> dict[str, float]:
    """Print the answer as it comes. Returns seconds to the first token, tokens, and their rate after it."""
    client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    print(f"\033[1m{question}\033[0m" if sys.stdout.isatty() else question, end="\n\n")
    begin = time.perf_counter()
    first = None
    tokens = 0
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=200,
    )
    for chunk in stream:
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter()
            print(chunk.choices[0].delta.content, end="", flush=True)
    end = time.perf_counter()
    print("\n")
    if first is None:
        raise ServerFailed("The server answered without any text.")
    return {
        "first": first - begin,
        "tokens": tokens,
        "rate": (tokens - 1) / (end - first) if tokens > 1 else 0.0,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask the bundled model something through a server of its own.")
    parser.add_argument("--ask", default=QUESTION, metavar="TEXT", help="the question")
    parser.add_argument("--model", default="kvasir-mini", help="what to serve")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    try:
        with server(arguments.model) as address:
            started = time.perf_counter() - begin
            print(f"{arguments.model} is ready at {address}, {started:.1f} s after the start\n")
            figures = ask(address, arguments.ask)
            print(
                f"first token after {figures['first'] * 1000:.0f} ms, then {figures['rate']:.0f} tokens/s",
                end="",
            )
            print(f" ({figures['tokens']} tokens)")
    except ServerFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
