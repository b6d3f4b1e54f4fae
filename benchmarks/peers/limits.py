"""The limit of a figure: the longer of two times, reading what must be read at the measured bandwidth, and the
multiply-adds at the measured rate of the vector units: for int8, for int8 and weights of 4 bits, which most weights of
Q4_K_M have, or for bf16.

Read are all weights once, of a mixture the experts that independent tokens are expected to choose, the keys and values
of the context, and recurrent states, which are also written. Attention and recurrences count no multiply-adds, so the
limit of a long prompt is optimistic.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

from benchmarks.peers.probe import Rates
from benchmarks.peers.rows import Row
from kvasir.caches import State
from kvasir.cli.model_facts import Needs, TokenWork, read_needs, read_stored, token_work

_FLOATS = ("bf16", "F16", "F32")
_FOUR_BITS = ("MXFP4", "Q4_0", "Q4_K_M")


@cache
def work_of(model: Path) -> tuple[TokenWork, Needs]:
    """Raises KvasirError."""
    stored = read_stored(str(model))
    needs = read_needs(stored.files)
    return token_work(stored.tensors, needs.vocab_size), needs


@dataclass(frozen=True, slots=True)
class Experts:
    """Bytes and multiply-adds of all experts of a model, and the share of them that computes a token."""

    nbytes: int = 0
    macs: int = 0
    share: float = 0.0

    def chosen(self, tokens: int) -> float:
        """The share of the experts that `tokens` independent tokens are expected to choose."""
        return 1 - (1 - self.share) ** tokens


@cache
def experts_of(model: Path) -> Experts:
    """Of a GGUF file; its metadata have the numbers of experts."""
    stored = read_stored(str(model))
    values = {key.partition(".")[2]: value for key, value in stored.metadata.items()}
    if "expert_count" not in values:
        return Experts()
    tensors = [t for t in stored.tensors if "_exps." in t.name and len(t.shape) > 2]
    share = values["expert_used_count"] / values["expert_count"]
    return Experts(sum(t.nbytes for t in tensors), sum(prod(t.shape) for t in tensors), share)


@cache
def caches_of(model: Path) -> tuple[int, int]:
    """(bytes of keys and values in bfloat16 per token of context, bytes of a sequence's recurrent states). Windows are
    taken to be longer than the context."""
    from kvasir.models.registry import model_class_for
    from kvasir.runner.load import open_checkpoint

    config, source = open_checkpoint(read_stored(str(model)).files)
    source.close()
    kind = model_class_for(config)
    spec = kind(kind.Config.from_hf(config)).cache_spec()  # type: ignore[attr-defined]
    read = [spec[layer.layer] if not layer.owns else layer for layer in spec]
    widths = [one.key_dim if one.name == "latent" else one.width for one in read]
    return 2 * sum(widths), sum(4 * prod(one.state) for one in read if isinstance(one, State))


def kv_token(needs: Needs, dtype: str = "bfloat16") -> int:
    """Bytes of keys and values of one token."""
    return next(memory.kv_token for memory in needs.memory if memory.dtype == dtype)


def limit(row: Row, model: Path, rates: Rates) -> float | None:
    """The maximum tokens per second for decode and prefill, or texts per second; None for other figures, and if a rate
    is unknown."""
    macs = _macs_per_s(row.kind, rates)
    if row.figure == "decode":
        return row.users / _decode_step(row, model, rates.bytes_per_s, macs or float("inf"))
    if row.figure not in ("prefill", "embed") or not macs:
        return None
    texts = row.users if row.figure == "embed" else 1
    seconds = _prompts(row.prompt, texts, model, rates.bytes_per_s, macs, head=row.figure == "prefill")
    return row.users / seconds if row.figure == "embed" else row.prompt / seconds


def _macs_per_s(kind: str, rates: Rates) -> float:
    if kind in _FLOATS:
        return rates.bf16_macs_per_s
    return rates.int4_macs_per_s if kind in _FOUR_BITS else rates.int8_macs_per_s


def _decode_step(row: Row, model: Path, bytes_per_s: float, macs_per_s: float) -> float:
    """Seconds for one more token of each user, in the middle of the measurement."""
    work, experts, (per_token, states) = work_of(model)[0], experts_of(model), caches_of(model)
    nbytes = work.weight_bytes - experts.nbytes * (1 - experts.chosen(row.users))
    nbytes += row.users * ((row.prompt + row.new / 2) * per_token + 2 * states)
    macs = row.users * (work.body_macs + work.head_macs - experts.macs * (1 - experts.share))
    return max(nbytes / bytes_per_s, macs / macs_per_s)


def _prompts(tokens: int, texts: int, model: Path, bytes_per_s: float, macs_per_s: float, head: bool) -> float:
    """Seconds to compute `texts` prompts. head: whether each gives logits."""
    work, experts = work_of(model)[0], experts_of(model)
    macs = texts * tokens * (work.body_macs - experts.macs * (1 - experts.share)) + texts * head * work.head_macs
    nbytes = work.weight_bytes - experts.nbytes * (1 - experts.chosen(texts * tokens))
    return max(nbytes / bytes_per_s, macs / macs_per_s)
