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
        from kvasir.cli.show import fitted

        lines = [f"error: {error.message}", *([f"  try: {error.hint}"] if error.hint else [])]
        print(fitted("\n".join(lines), sys.stderr), file=sys.stderr)
        sys.exit(2)
