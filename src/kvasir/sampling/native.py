"""The structures of csrc/sampler.h, and the native sampler: `sampler.sample` for float32 logits in CPU memory, with the
same bits.

A model's program fills the structures and samples within its own call; `NativeSampler` is for existing logits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from typing import Any, Protocol

import numpy as np

from kvasir.fields import NATIVE
from kvasir.ops import native
from kvasir.plan import SamplingSpec
from kvasir.sampling import dry, rows
from kvasir.sampling.carry import CARRIED, carried, packed
from kvasir.sampling.rows import MAX_VOCAB, NOTHING_ALLOWED, BadLogits, Entry, RowContext, fault

MAX_LOGPROBS = 128
SAMPLE_ERRORS = {
    1: fault(float("nan")),
    2: fault(float("-inf")),
    3: NOTHING_ALLOWED,
    4: "logit_bias names a token outside the vocabulary",
}
BIAS_OUTSIDE = 4
_INT32 = np.iinfo(np.int32)


class IdLists(Structure):
    """Sequences of ids (csrc/sampler.h)."""

    _fields_ = (("ids", c_void_p), ("ends", c_void_p), ("count", c_int64))


class Dry(Structure):
    """What DRY needs besides its request fields (csrc/sampler.h)."""

    _fields_ = (
        ("breakers", c_void_p),
        ("breaker_words", c_int64),
        ("heads", c_void_p),
        ("head_words", c_int64),
        ("sequences", IdLists),
    )


_TYPES = {"double": c_double, "float": c_float, "int64_t": c_int64, "int32_t": c_int32}


class SampleRow(Structure):
    """A row's sampling parameters and state (csrc/sampler.h)."""

    _fields_ = (
        *((row.name, _TYPES[row.native]) for row in NATIVE),
        ("logprobs", c_int32),
        ("given", c_int32),
        ("carry", c_double * CARRIED),
        ("seed", c_uint64),
        ("position", c_int64),
        ("ids", c_void_p),
        ("num_ids", c_int64),
        ("prompt_len", c_int64),
        ("min_tokens", c_int64),
        ("stop_ids", c_void_p),
        ("num_stop_ids", c_int64),
        ("bias_ids", c_void_p),
        ("bias", c_void_p),
        ("num_bias", c_int64),
        ("bad_words", IdLists),
        ("dry", Dry),
        ("mask", c_void_p),
        ("mask_words", c_int64),
    )


class SampledStruct(Structure):
    """The result of a row (csrc/sampler.h)."""

    _fields_ = (
        ("token", c_int32),
        ("error", c_int32),
        ("logprob", c_float),
        ("rank", c_int32),
        ("best_ids", c_int32 * MAX_LOGPROBS),
        ("best_logprobs", c_float * MAX_LOGPROBS),
        ("carry", c_double * CARRIED),
    )


class SampleArgs(Structure):
    """The arguments of one kernel call (csrc/sampler.h)."""

    _fields_ = (
        ("logits", c_void_p),
        ("stride", c_int64),
        ("vocab", c_int64),
        ("rows", c_int64),
        ("specs", c_void_p),
        ("results", c_void_p),
        ("scratch", c_void_p),
        ("dry_room", c_void_p),
        ("dry_ids", c_int64),
    )


class PoolHandle(Protocol):
    """A thread pool of the library: its address and its number of threads."""

    @property
    def address(self) -> int | None: ...

    @property
    def threads(self) -> int: ...


SAME_NAMES = (*(row.name for row in NATIVE), "min_tokens", "logprobs")


def fill_spec(target: SampleRow, spec: SamplingSpec, prompt_len: int) -> list[np.ndarray]:
    """Writes a spec to the structure that the kernels read; returns the arrays that must outlive the structure.

    Does not set position, ids, num_ids and carry, which change at each step. Raises ValueError if the spec asks for
    more log-probabilities than the kernel supports.
    """
    if max(spec.logprobs, spec.prompt_logprobs) > MAX_LOGPROBS:
        raise ValueError(f"the native sampler gives {MAX_LOGPROBS} log-probabilities at most, requested by {spec}")
    for name in SAME_NAMES:
        setattr(target, name, getattr(spec, name))
    target.top_k, target.seed = min(max(0, spec.top_k), _INT32.max), spec.seed & (2**64 - 1)
    target.prompt_len = prompt_len
    totals = _totals(spec)
    stop, ids, values = _ids(spec.stop_ids), _ids(totals), np.array(list(totals.values()), np.float32)
    target.stop_ids, target.num_stop_ids = stop.ctypes.data, len(stop)
    target.bias_ids, target.bias, target.num_bias = ids.ctypes.data, values.ctypes.data, len(ids)
    target.mask, target.mask_words, target.given = None, 0, 0
    kept = [stop, ids, values, *_fill_lists(target.bad_words, [_exact(word) for word in spec.bad_words])]
    return kept + _fill_dry(target.dry, spec)


def _fill_dry(target: Dry, spec: SamplingSpec) -> list[np.ndarray]:
    if not dry.is_on(spec):
        return []
    breakers = np.frombuffer(spec.dry_breakers, "<i4")
    target.breakers, target.breaker_words = breakers.ctypes.data, len(breakers)
    sequences = sorted({_exact(sequence) for sequence in spec.dry_breaker_sequences if sequence})
    heads = _bits([sequence[0] for sequence in sequences if sequence[0] >= 0])
    target.heads, target.head_words = heads.ctypes.data, len(heads)
    return [breakers, heads, *_fill_lists(target.sequences, sequences)]


def _fill_lists(target: IdLists, lists: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    ids = np.array([i for one in lists for i in one], np.int32)
    ends = np.cumsum([len(one) for one in lists], dtype=np.int64)
    target.ids, target.ends, target.count = ids.ctypes.data, ends.ctypes.data, len(lists)
    return [ids, ends]


def fill_carry(target: SampleRow, spec: SamplingSpec, carry: bytes) -> None:
    """Writes the sampler's carry."""
    for i, value in enumerate(carried(spec, carry)):
        target.carry[i] = value


def sample_scratch(vocab: int) -> int:
    """Bytes of scratch memory per thread."""
    return native.declare("kvasir_sample_scratch", c_int64, c_int64)(vocab)


class NativeSampler:
    """Samples rows over one vocabulary. It owns the kernel's scratch memory, so calls must not overlap."""

    def __init__(self, vocab: int, pool: PoolHandle | None = None):
        """pool: the threads to run on, by default only the caller's.

        Raises ValueError for a vocabulary that is empty or too large, ConfigError without the library.
        """
        if not 0 < vocab <= MAX_VOCAB:
            raise ValueError(f"a vocabulary of {vocab} is empty or beyond {MAX_VOCAB}")
        self._vocab, self._pool = vocab, pool
        self._threads = pool.threads if pool else 1
        self._scratch = np.empty(sample_scratch(vocab) // 8 * self._threads, np.int64)
        self._dry_room = np.empty(0, np.int32)

    def sample(self, logits_RV: Any, contexts: Sequence[RowContext]) -> list[rows.Sampled]:
        """As `sampler.sample`, with the same bits. logits_RV: as in `run`.

        Raises ValueError for a wrong shape, or if more log-probabilities are asked for than the kernel supports.
        """
        specs = (SampleRow * len(contexts))()
        kept = [_fill_row(spec, row) for spec, row in zip(specs, contexts, strict=True)]
        results = self.run(logits_RV, specs)
        del kept  # keeps the arrays alive until after the kernel's call
        return [self._result(found, row) for found, row in zip(results, contexts, strict=True)]

    def describe(self, logits_RV: Any, tokens: Sequence[int], best: Sequence[int]) -> list[Entry]:
        """As `logprobs.logprobs`, with the same bits, for logits as in `run`."""
        specs = (SampleRow * len(tokens))()
        for spec, token, asked in zip(specs, tokens, best, strict=True):
            if not 0 <= token < self._vocab or asked > MAX_LOGPROBS:
                raise ValueError(f"{asked} log-probabilities beside token {token} of {self._vocab}")
            spec.given, spec.logprobs = token + 1, max(asked, 0)
        entries: list[Entry] = []
        for found, asked in zip(self.run(logits_RV, specs), best, strict=True):
            if found.error:
                raise BadLogits(SAMPLE_ERRORS[found.error])
            entry = entry_of(found, max(asked, 0), self._vocab)
            assert entry is not None
            entries.append(entry)
        return entries

    def run(self, logits_RV: Any, specs: Any) -> Any:
        """An array of SampledStruct for an array of SampleRow. logits_RV: [rows, vocabulary], anything that NumPy can
        view as an array. Float32 rows are read where they are, at any distance from each other; other numbers are
        copied. The arrays that the rows point to must stay alive during the call."""
        logits_RV = _readable(logits_RV)
        if logits_RV.shape != (len(specs), self._vocab):
            raise ValueError(f"logits of shape {logits_RV.shape} for {len(specs)} contexts of {self._vocab}")
        results = (SampledStruct * len(specs))()
        dry_ids = max((spec.num_ids for spec in specs if spec.dry_multiplier), default=0)
        if dry_ids * self._threads > len(self._dry_room):
            self._dry_room = np.empty(2 * dry_ids * self._threads, np.int32)
        args = SampleArgs(
            logits_RV.ctypes.data,
            logits_RV.strides[0] // logits_RV.itemsize,
            self._vocab,
            len(specs),
            ctypes.addressof(specs),
            ctypes.addressof(results),
            self._scratch.ctypes.data,
            self._dry_room.ctypes.data,
            dry_ids,
        )
        _call()(ctypes.addressof(args), self._pool.address if self._pool else None)
        return results

    def _result(self, found: SampledStruct, row: RowContext) -> rows.Sampled:
        if found.error:
            return rows.Sampled(-1, None, row.carry, self._error(found.error, row.spec))
        entry = entry_of(found, row.spec.logprobs, self._vocab)
        return rows.Sampled(found.token, entry, next_carry(found, row.spec, row.carry))

    def _error(self, error: int, spec: SamplingSpec) -> str:
        if error != BIAS_OUTSIDE:
            return SAMPLE_ERRORS[error]
        outside = next(i for i in _totals(spec) if not 0 <= i < self._vocab)
        return f"logit_bias names token {outside}, the vocabulary has {self._vocab}"


def _readable(logits: Any) -> np.ndarray:
    """The logits in float32 with adjacent values in a row; a copy unless they are so already."""
    array = np.asarray(logits, np.float32)
    whole = array.ndim == 2 and array.strides[1] == array.itemsize and array.strides[0] % array.itemsize == 0
    return array if whole else np.ascontiguousarray(array)


def entry_of(found: SampledStruct, asked: int, vocab: int) -> Entry | None:
    """The requested log-probabilities. asked: -1 for none, else how many besides the token's own."""
    if asked < 0:
        return None
    k = min(asked, vocab)
    return found.token, found.logprob, found.rank, tuple(zip(found.best_ids[:k], found.best_logprobs[:k], strict=True))


def next_carry(found: SampledStruct, spec: SamplingSpec, carry: bytes) -> bytes:
    """The carry after the token. carry: the previous one."""
    count = len(carried(spec, carry))
    return packed(found.carry[:count]) if count else carry


def _fill_row(target: SampleRow, row: RowContext) -> list[np.ndarray]:
    """Writes a row to the structure that the kernel reads; returns the arrays that must outlive the structure."""
    ids = np.ascontiguousarray(row.ids, np.int32)
    kept = fill_spec(target, row.spec, row.prompt_len)
    fill_carry(target, row.spec, row.carry)
    target.position, target.ids, target.num_ids = row.position, ids.ctypes.data, len(ids)
    if row.mask is None:
        return [*kept, ids]
    mask = np.ascontiguousarray(row.mask, np.int32)
    target.mask, target.mask_words = mask.ctypes.data, len(mask)
    return [*kept, ids, mask]


def _totals(spec: SamplingSpec) -> dict[int, float]:
    """The total bias of each id, in the order of first occurrence."""
    totals: dict[int, float] = {}
    for token, value in spec.logit_bias:
        totals[token] = totals.get(token, 0.0) + value
    return totals


def _ids(ids: Any) -> np.ndarray:
    """As int32, with -1 (no token) for values out of range."""
    return np.array([i if 0 <= i <= _INT32.max else -1 for i in ids], np.int32)


def _exact(ids: Sequence[int]) -> tuple[int, ...]:
    """As int32; values out of range become a number that is not an id."""
    return tuple(i if _INT32.min < i <= _INT32.max else _INT32.min for i in ids)


def _bits(ids: Sequence[int]) -> np.ndarray:
    """int32 words with bit i & 31 of word i >> 5 set for each of the ids."""
    words = np.zeros(max(ids, default=-1) // 32 + 1, np.uint32)
    for i in ids:
        words[i >> 5] |= np.uint32(1 << (i & 31))
    return words.view(np.int32)


@cache
def _call() -> Any:
    return native.declare("kvasir_sample", None, c_void_p, c_void_p)
