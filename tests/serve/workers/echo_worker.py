"""The API worker of echo_main."""

import signal
import sys

from kvasir.engine.front import Front
from kvasir.serve.workers.spec import WorkerSpec, decode
from kvasir.serve.workers.worker import end_with_main, run
from tests.serve.fakes import byte_tokenizer, template

if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit(0)
    spec = decode(line, WorkerSpec)
    end_with_main()
    run(Front(spec.remote_engine(), byte_tokenizer(), template()), spec)
