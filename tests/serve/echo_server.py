"""A server as a separate process: python -m tests.serve.echo_server '{"drain": 1.0}' '{"step_seconds": 0.01}'"""

import json
import sys
from pathlib import Path

from kvasir.serve.auth.keys import read_keys
from kvasir.serve.hosting.catalogue import OneModel
from kvasir.serve.server import run
from kvasir.serve.settings import ServeSettings
from tests.serve.running import make_front

if __name__ == "__main__":
    settings, runner = (json.loads(argument) for argument in sys.argv[1:])
    settings |= {name: Path(settings[name]) for name in ("keys_file", "access_log", "data_dir") if name in settings}
    keys = read_keys(settings["keys_file"]) if "keys_file" in settings else ()
    run(OneModel(make_front(**runner), ServeSettings(port=0, keys=keys, **settings)))
