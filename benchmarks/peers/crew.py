"""The engines of a row: workers, loaded once for all rows of a model, and servers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from benchmarks.peers.engines import MISSING, Setup, Worker, start
from benchmarks.peers.limits import kv_token, work_of
from benchmarks.peers.places import AnswersTooShort, PeerError
from benchmarks.peers.prompts import prompts_of, value_of
from benchmarks.peers.rows import LLAMA, LLAMA_BENCH, OUR_SERVER, OURS, Row
from benchmarks.peers.servers import Server

BLOCK = 64  # tokens
TRIED = 16  # new tokens of a trial
WARM_UP = 2**20  # number of the unmeasured round
SAMPLING = {"temperature": 0.7, "top_p": 0.95, "top_k": 20, "logprobs": 5, "seed": 0}


class Contestant(Protocol):
    """An engine that continues prompts and reports its figures. facts: version, flags etc., for the results."""

    name: str
    pids: tuple[int, ...]
    facts: dict[str, Any]

    @property
    def peak_rss(self) -> int:
        """Bytes; 0 if unknown."""
        ...

    def measure(self, row: Row, prompts: Sequence[Sequence[int]], new: int) -> dict[str, float]: ...


class InProcess:
    """An engine in its worker, with the options of its requests."""

    def __init__(self, worker: Worker, facts: dict[str, Any], **options: Any):
        self.name, self.worker, self.options = worker.name, worker, options
        self.pids, self.facts = (worker.pid,), {**facts, "options": options}

    @property
    def peak_rss(self) -> int:
        return self.worker.peak_rss

    def asking(self, **options: Any) -> InProcess:
        """The same engine with other options."""
        return InProcess(self.worker, self.facts, **options)

    def measure(self, row: Row, prompts: Sequence[Sequence[int]], new: int) -> dict[str, float]:
        if row.figure == "embed":
            return self.worker.ask("embed", prompts=prompts, **self.options)
        return self.worker.ask("answer", prompts=prompts, new=new, **self.options)


class Crew:
    """The loaded workers, of one model at a time. close() ends them."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self._model: tuple[str, str] | None = None
        self._loaded: dict[str, tuple[Worker, dict[str, Any]]] = {}

    def get(self, name: str, row: Row, rows: Iterable[Row]) -> InProcess:
        """rows: all rows to be measured; the engine gets memory for those of this model. Raises PeerError."""
        if self._model != (row.model, row.kind):
            self.close()
            self._model = row.model, row.kind
        if name not in self._loaded:
            group = [r for r in rows if (r.model, r.kind) == self._model and r.figure != "http"]
            self._loaded[name] = self._load(name, row, group)
        return InProcess(*self._loaded[name])

    def close(self) -> None:
        for worker, _ in self._loaded.values():
            worker.close()
        self._loaded.clear()

    def _load(self, name: str, row: Row, group: Sequence[Row]) -> tuple[Worker, dict[str, Any]]:
        model, begun = self.setup.file(name, row), time.perf_counter()
        worker = start(name, self.setup)
        try:
            _, needs = work_of(self.setup.file(OURS, row))
            room = sizes(group, needs.max_context, kv_token(needs, "float32"))
            if name != OURS:
                del room["kv_memory"]
            facts = worker.ask("load", model=str(model), threads=self.setup.threads, **room)
            first = [list(range(8))]
            if row.figure == "embed":
                worker.ask("embed", prompts=first)
            else:
                worker.ask("answer", prompts=first, new=1)
        except BaseException:
            worker.close()
            raise
        return worker, {**facts, "startup_s": time.perf_counter() - begun}


def sizes(group: Sequence[Row], max_context: int, kv_bytes: int) -> dict[str, int]:
    """Load options with enough memory for these rows, plus a quarter. kv_bytes: per token, at most."""
    length = max(-(-(row.prompt + row.longest) // BLOCK) * BLOCK for row in group)
    tokens = max(row.users * (row.prompt + row.longest + BLOCK) for row in group)
    return {
        "max_model_len": min(length, max_context),
        "max_num_seqs": max(row.users for row in group),
        "kv_memory": int(1.25 * max(tokens, length + 2 * BLOCK) * kv_bytes),
    }


def contestants(row: Row, crew: Crew, rows: Iterable[Row]) -> tuple[list[Contestant], dict[str, str]]:
    """Kvasir first, then the available peers, each with its best options; and the reasons why others are unavailable.

    The caller closes the servers among them. Raises PeerError if Kvasir is unavailable.
    """
    found: list[Contestant] = []
    missing: dict[str, str] = {}
    for name in (OUR_SERVER if row.figure == "http" else OURS, *row.peers):
        try:
            if (find := MISSING.get(name)) and (reason := find(crew.setup)):
                raise PeerError(reason)
            found.append(_server(name, crew, row) if row.figure == "http" else _best(name, crew, row, rows))
        except PeerError as error:
            if not found:
                raise
            missing[name] = str(error)
    if row.figure == "sampling":
        found.append(crew.get(OURS, row, rows).asking(sampling=SAMPLING))
        found[-1].name = "kvasir, sampling"
    return found, missing


def _server(name: str, crew: Crew, row: Row) -> Server:
    crew.close()
    server = Server(name, crew.setup, row)
    try:
        server.measure(row, _trial(crew.setup, row), row.new)
    except BaseException:
        server.close()
        raise
    return server


def _best(name: str, crew: Crew, row: Row, rows: Iterable[Row]) -> InProcess:
    """The engine with its fastest options. Tries each combination once, which also warms up the engine."""
    ways, trial = _ways(row, crew.get(name, row, rows)), _trial(crew.setup, row)
    values = [_tried(row, way, trial) for way in ways]
    best = ways[values.index(max(values))]
    best.facts["tried"] = [{**way.options, "value": value} for way, value in zip(ways, values, strict=True)]
    return best


def _tried(row: Row, way: InProcess, trial: Sequence[Sequence[int]]) -> float:
    """The value for a few new tokens, or for as many as the measurement needs."""
    new = min(row.new, TRIED)
    while True:
        try:
            return value_of(row, way.measure(row, trial, new), new)
        except AnswersTooShort:
            if 2 * new > row.longest:
                raise
        new *= 2


def _ways(row: Row, engine: InProcess) -> list[InProcess]:
    """The engine with each combination of options to try: for llama.cpp, its two attention settings, and the number of
    texts in a batch."""
    if engine.name == LLAMA and row.figure == "embed":
        together = sorted({1, min(8, row.users), row.users})
        return [engine.asking(flash_attn=f, together=n) for f, n in itertools.product((True, False), together)]
    if engine.name in (LLAMA, LLAMA_BENCH):
        unified = (False, True) if row.users > 1 else (False,)
        return [engine.asking(flash_attn=f, kv_unified=u) for f, u in itertools.product((True, False), unified)]
    return [engine.asking(generate=True) if row.figure == "total" else engine]


def _trial(setup: Setup, row: Row) -> list[list[int]]:
    return prompts_of(row, WARM_UP, work_of(setup.file(OURS, row))[1].vocab_size)
