"""A server with API workers over the echo engine: python -m tests.serve.workers.echo_main 3 '{"drain": 1.0}' '{}'"""

import json
import sys
import time
from pathlib import Path

from kvasir.serve.auth.keys import read_keys
from kvasir.serve.hosting.catalogue import OneModel
from kvasir.serve.server import run_in_loop
from kvasir.serve.settings import ServeSettings
from kvasir.serve.workers.main_process import MainProcess
from kvasir.serve.workers.spec import WorkerSpec, encode
from tests.serve.running import make_front

PATHS = ("keys_file", "access_log", "audit_log", "data_dir", "tls_cert", "tls_key")

if __name__ == "__main__":
    count, settings, runner = (json.loads(argument) for argument in sys.argv[1:])
    hang = settings.pop("hang_seconds", 20.0)
    settings |= {name: Path(settings[name]) for name in PATHS if name in settings}
    settings["lora_dirs"] = tuple(map(Path, settings.get("lora_dirs", ())))
    keys = read_keys(settings["keys_file"]) if "keys_file" in settings else ()
    given = ServeSettings(port=0, keys=keys, **settings)
    created = int(time.time())

    def spec(number: int, listener: int, *, engine: Path, main: Path) -> bytes:
        return encode(WorkerSpec(number, count, listener, str(engine), str(main), created, given))

    catalogue = OneModel(make_front(**runner), given)
    run_in_loop(MainProcess(catalogue, count, "tests.serve.workers.echo_worker", spec, hang).serve())
