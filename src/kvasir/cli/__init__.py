"""The command line. `main` starts fast: each command imports its dependencies when it runs."""

from __future__ import annotations


def main() -> None:
    """Entry point of `kvasir`. Errors meant for users are printed without a traceback; the exit status is then 2."""
    import sys

    from kvasir.cli.app import app
    from kvasir.cli.peer_lora import spread
    from kvasir.errors import KvasirError

    try:
        app(spread(sys.argv[1:]))
    except KvasirError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"  try: {error.hint}", file=sys.stderr)
        sys.exit(2)
