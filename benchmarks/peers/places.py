"""Paths: this checkout, data shared between checkouts, the folder of the peers, the results."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
PEERS = ROOT / ".peers"
RESULTS = ROOT / "benchmarks" / "results"


class PeerError(Exception):
    """A peer, a model or a measurement is unavailable; the message gives the reason."""


class AnswersTooShort(PeerError):
    """The choices hardly overlapped; with more new tokens the measurement works."""
