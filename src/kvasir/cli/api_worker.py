"""The process of an API worker of `kvasir serve --api-workers N`, started by the main process (api_workers.py)."""

from __future__ import annotations

import signal
import sys

from kvasir.cli.api_workers import ApiWorkerSpec
from kvasir.cli.front_maker import FrontMaker
from kvasir.engine.load_text import load_text
from kvasir.serve.workers.spec import decode
from kvasir.serve.workers.worker import end_with_main, run


def main() -> int:
    for kind in (signal.SIGHUP, signal.SIGUSR1):  # until the server handles them
        signal.signal(kind, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line:  # the main process has ended already
        return 0
    spec = decode(line, ApiWorkerSpec)
    end_with_main()
    make = FrontMaker(spec.seed, spec.tool_format, spec.reasoning_format, spec.engine_timeout)
    run(make.front(spec.options, spec.worker.remote_engine(), *load_text(spec.options)), spec.worker)
    return 0


if __name__ == "__main__":
    sys.exit(main())
