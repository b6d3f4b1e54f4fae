"""The API worker of api_workers.py."""

import sys

from kvasir.config import EngineOptions
from kvasir.engine.front import Front
from kvasir.engine.load_text import load_text
from kvasir.serve.workers.spec import WorkerSpec, decode
from kvasir.serve.workers.worker import end_with_main, run

MODEL = EngineOptions(model="kvasir-mini")


def main() -> None:
    """Serves as MainProcess asks."""
    if line := sys.stdin.buffer.readline():
        spec = decode(line, WorkerSpec)
        end_with_main()
        run(Front(spec.remote_engine(), *load_text(MODEL)), spec)


if __name__ == "__main__":
    main()
