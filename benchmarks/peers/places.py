"""Where things lie: this checkout, what is shared between checkouts, and the folder of the peers."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
PEERS = ROOT / ".peers"
RESULTS = ROOT / "benchmarks" / "results"


class PeerError(Exception):
    """A peer, a model or a measurement that cannot be had, with the reason for people."""


class AnswersTooShort(PeerError):
    """The answers hardly overlapped; longer ones can be measured."""
