"""The limit of a figure: the longer of two times, reading weights, keys and values at the measured bandwidth, and the
multiply-adds at the measured rate of the vector units (int8 for quantized weights, bf16 for others)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from benchmarks.peers.probe import Rates
from benchmarks.peers.rows import Row
from kvasir.cli.bench.limits import Machine
from kvasir.cli.bench.probe import Probe
from kvasir.cli.model_facts import Needs, TokenWork, read_needs, read_stored, token_work


@cache
def work_of(model: Path) -> tuple[TokenWork, Needs]:
    """Raises KvasirError."""
    stored = read_stored(str(model))
    needs = read_needs(stored.files)
    return token_work(stored.tensors, needs.vocab_size), needs


def kv_token(needs: Needs, dtype: str = "bfloat16") -> int:
    """Bytes of keys and values of one token."""
    return next(memory.kv_token for memory in needs.memory if memory.dtype == dtype)


def limit(row: Row, model: Path, rates: Rates) -> float | None:
    """The maximum tokens per second for decode and prefill; None for other figures, and if a rate is unknown."""
    if row.figure not in ("decode", "prefill"):
        return None
    work, needs = work_of(model)
    macs = rates.bf16_macs_per_s if row.kind == "bf16" else rates.int8_macs_per_s
    if not macs and row.figure == "prefill":
        return None
    machine = Machine(work, kv_token(needs), Probe(rates.bytes_per_s, macs or float("inf")))
    if row.figure == "prefill":
        return row.prompt / machine.prefill(row.prompt)
    return row.users / machine.decode_step(row.prompt + row.new / 2, row.users)
