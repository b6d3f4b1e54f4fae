"""Signals that the parent process ignores: background jobs of scripts ignore SIGINT, `nohup` SIGHUP, and processes
started by the tests would inherit that."""

from __future__ import annotations

import signal

INHERITED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def heed() -> None:
    """Processes that this one starts from now on begin with the default actions. This one still survives SIGHUP and
    SIGQUIT where its parent ignores them, since a handler does not outlive exec."""
    for name in INHERITED:
        if signal.getsignal(name) == signal.SIG_IGN:
            signal.signal(name, _ACTIONS.get(name, _nothing))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, INHERITED)


def _nothing(*_: object) -> None:
    pass


_ACTIONS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
