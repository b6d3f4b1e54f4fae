"""The processes of a model's ranks and stages, started and watched by the engine's process, which is rank 0 of the last
stage.

They meet in shared memory, which has no name in the file system and ends with its last process. The system kills them
when the thread that started them ends. If one of them dies, or stands still while the others wait for it, all waits
end, and so does the engine (`DeviceFault`): its supervisor starts another, with ranks of its own.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from kvasir import device as devices
from kvasir.config import EngineOptions
from kvasir.engine import rank_messages as messages
from kvasir.engine.watchdog import Watchdog, use_of
from kvasir.environment import engine_environment
from kvasir.errors import ConfigError, DeviceFault
from kvasir.layers.moe import MoE
from kvasir.memory import Footprint
from kvasir.models.drafting import drafts_blocks
from kvasir.parallel import ExpertShare, Mesh
from kvasir.parallel.channel import Channel
from kvasir.plan import Bytes
from kvasir.program.program import Program
from kvasir.program.remote import RemoteProgram
from kvasir.program.shared import SharedRank, memory_file, segment_bytes
from kvasir.program.staged import StagedProgram
from kvasir.program.trace import Trace, trace_correct
from kvasir.runner.allotment import Needs, allot
from kvasir.runner.load import LoadedModel
from kvasir.runner.program_draft import draft_traces
from kvasir.runner.streaming import held_folder

if TYPE_CHECKING:
    from kvasir.parallel.group import GroupRank
    from kvasir.runner.graph_executor import GraphExecutor

log = logging.getLogger("kvasir.engine")

STDERR = 2
PAUSE = 0.25  # seconds between two looks at the ranks
IDLE_SECONDS = 10.0  # for which a rank may stand still while the others wait for it
LOAD_SECONDS = 60.0  # the same while rank 0 has loaded its part and waits for theirs: disks may be remote
LONGEST_WAIT = 600.0  # seconds of a meeting without a watcher
# Of a communicator, of which there is one for each number of parts: up to 32 channels of 4 MiB (NCCL_BUFFSIZE) and
# smaller buffers of other protocols. NCCL takes them when ranks first meet, after the KV cache has its memory.
NCCL_BYTES = 256 << 20
END_SECONDS = 3.0  # until a rank that was asked to stop is killed


def of_ranks(size: int, stages: int, one: Footprint, kind: str = "cpu") -> Footprint:
    """The memory of `size` ranks in each of `stages` besides their weights, of what one needs. Only one samples. kind:
    of the device; GPUs have memory of their own."""
    count = size * stages
    if count == 1:
        return one
    if kind == "cuda":
        return replace(one, buffers=one.buffers + NCCL_BYTES * (size.bit_length() - 1))
    return replace(one, buffers=count * one.buffers + segment_bytes(size, stages), angles=count * one.angles)


def _meets(trace: Trace) -> bool:
    """Whether ranks exchange anything."""
    return any(isinstance(x, Mesh | ExpertShare) for node in trace.graph.nodes for x in node.inputs)


def _of_draft(loaded: LoadedModel) -> Iterator[Trace | None]:
    assert loaded.draft and loaded.trace
    layers, joining = draft_traces(loaded.draft, loaded.trace)
    yield from layers
    yield joining
    yield trace_correct(loaded.draft) if drafts_blocks(loaded.draft) else None


def _mib(sizes: Sequence[int]) -> str:
    return ", ".join(f"{size / 2**20:.0f}" for size in sizes)


def _not_by_id(model: Any) -> str:
    """Why the ranks do not share the model's experts by id; "" if they do."""
    shares = [part.share for _, part in model.walk() if isinstance(part, MoE)]
    if not shares:
        return "the model has no mixture"
    return "" if all(share and share.experts.parts > 1 for share in shares) else "a mixture has fewer experts"


def executor_of(options: EngineOptions, device: devices.Device) -> str:
    """The executor of a model with ranks or stages. Raises ConfigError if the device has too few GPUs for it."""
    if options.executor == "auto":
        executor = "program" if device.kind == "cpu" else "graph"
    else:
        executor = options.executor
    size = options.tensor_parallel
    if executor == "program":
        if device.kind != "cpu":
            raise ConfigError("the program executor runs on the CPU", "use --device cpu")
        return executor
    if options.pipeline_parallel > 1:
        raise ConfigError(
            "the graph executor has no pipeline stages", "leave --pipeline-parallel out, or use --device cpu"
        )
    if device.kind == "cuda" and (found := devices.count()) < size:
        raise ConfigError(
            f"{size} ranks need as many GPUs, and this machine has {found}",
            "set --tensor-parallel to the number of GPUs, or use --device cpu",
        )
    return executor


class RankProcesses:
    """The other ranks and stages of a model, as `program.remote.Others` and `runner.graph_ranks.Others`. Processes are
    numbered from the last stage to the first, the engine's as 0. threads: of each process. read: bytes of weights that
    a step of one row reads. available: free bytes of the fullest of their devices. mesh: counts commands, and the ranks
    of programs meet there. model_mesh: for which the model is loaded: `mesh`, or rank 0 of a group.

    on_loss(reason) is called on a thread of its own when a rank is lost, after all waits have ended.
    """

    def __init__(self, options: EngineOptions, device: devices.Device, on_loss: Callable[[str], None] | None = None):
        size, stages = options.tensor_parallel, options.pipeline_parallel
        count = size * stages
        self.read = self.available = 0
        self.size, self._stages, self._on_loss, self._reason, self._closing = size, stages, on_loss, "", False
        self._by_expert, self._weights_memory = options.expert_parallel, options.weights_memory
        self._folder, self._streams = ExitStack(), False
        self._made = self._waits = False  # whether the others wait for commands, and rank 0 for them before that
        self.threads = max(1, (options.threads or device.threads) // count)
        spins = count * self.threads <= device.processors
        segment = memory_file("ranks", segment_bytes(size, stages))
        self.steps, self.rows, self.pipe = (memory_file(name) for name in ("steps", "rows", "pipe"))
        self._files = segment, self.steps, self.rows, self.pipe
        self.mesh = SharedRank(segment, 0, size, spins, LONGEST_WAIT, stages - 1, stages)
        self.model_mesh: Mesh = self.mesh
        self._group: GroupRank | None = None
        self._store = ""
        if executor_of(options, device) == "graph":
            from kvasir.parallel.group import GroupRank

            self.model_mesh = self._group = GroupRank(0, size)
            self._store = tempfile.mkdtemp(prefix="kvasir-ranks-")  # only this user can read it
        self._backend = "nccl" if device.kind == "cuda" else "gloo"
        nodes = devices.memory_nodes()
        shares = devices.shares(nodes, count) if len(nodes) > 1 or options.pin else None
        self._channels: list[Channel] = []
        self._packing: list[Channel] = []
        self._processes: list[subprocess.Popen] = []
        try:
            for number in range(1, count):
                own, theirs = Channel.pair()
                self._packing.append(own)
                spec = messages.RankSpec(
                    options, number % size, stages - 1 - number // size, os.getpid(), theirs.fileno(), *self._files,
                    self.threads, spins, LONGEST_WAIT, self._meeting, device.kind, shares[number] if shares else None,
                )  # fmt: skip
                self._spawn(spec)
                theirs.close()
        except BaseException:
            self.close()
            raise
        if shares:
            devices.stay_on(shares[0])
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="kvasir-ranks")
        self._watcher.start()

    def _spawn(self, spec: messages.RankSpec) -> None:
        own, theirs = Channel.pair()
        self._channels.append(own)
        command = [sys.executable, "-m", "kvasir.engine.rank", str(theirs.fileno())]
        # Standard output belongs to the engine's supervisor.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=STDERR, env=engine_environment(),
            pass_fds=(theirs.fileno(), spec.packing, *self._files),
        )  # fmt: skip
        self._processes.append(process)
        theirs.close()
        own.send(msgspec.json.encode(spec))

    @property
    def _meeting(self) -> str:
        """The file where the ranks of a group find each other; "" without one."""
        return os.path.join(self._store, "store") if self._store else ""

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        return [process.pid for process in self._processes]

    # -- the start

    def agree(self, needs: Needs) -> int:
        """Divides the memory for weights between all processes, of which rank 0 has these needs; returns its own share
        (see runner.load.LoadOptions). If weights are streamed, no other engine packs any until all ranks have loaded
        their parts. Raises ConfigError."""
        theirs = [Needs(event.fixed, event.layers) for event in self._events() if isinstance(event, messages.RankNeeds)]
        own, *others = allot([needs, *theirs], devices.available("cpu"), self._weights_memory)
        self._streams = own > 0
        if self._streams:
            self._folder.enter_context(held_folder())
        for channel, budget in zip(self._channels, others, strict=True):
            self._send([channel], messages.encode(messages.RankShare(budget)))
        return own

    def shared(self, loaded: LoadedModel) -> LoadedModel:
        """The model with the bytes of all ranks, once all have loaded their parts. Raises ConfigError if one cannot, or
        if there is nothing that they can share."""
        assert loaded.trace is not None
        if self.size > 1 and not _meets(loaded.trace):
            raise ConfigError(
                f"{self.size} ranks cannot share {loaded.architecture}: no sum of its matrices has so many segments",
                "use fewer, or leave --tensor-parallel out",
            )
        if self._by_expert and (reason := _not_by_id(loaded.model)):
            raise ConfigError(f"{self.size} ranks cannot share experts by id: {reason}", "leave --expert-parallel out")
        if loaded.draft and any(one and _meets(one) for one in _of_draft(loaded)):
            raise ConfigError(
                "rank 0 drafts alone, and this head uses parts of the model that ranks share",
                "use another drafter, like draft=MODEL, ngram or suffix",
            )
        theirs = [event for event in self._events() if isinstance(event, messages.RankLoaded)]
        self.available = min((event.available for event in theirs), default=0)
        self._folder.close()
        held = [loaded.held, *(event.held for event in theirs)]
        who = "ranks" if self._stages == 1 else "stages, from the last to the first,"
        note, notes = f"{who} hold {_mib(held)} MiB of weights", loaded.notes
        if loaded.stream:
            read = [loaded.stream.per_step, *(event.streamed for event in theirs)]
            loaded.stream.of_all = sum(read)
            note = (
                f"the weights are streamed: {note}, and read {_mib(read)} MiB from {loaded.stream.folder} in each step"
            )
            notes = tuple(one for one in notes if one != loaded.stream.note)
        mapped = loaded.mapped + sum(event.mapped for event in theirs)
        self.read = loaded.weight_bytes_read + sum(event.read for event in theirs)
        if self._backend == "nccl":  # each has memory of its own
            return replace(loaded, notes=(*notes, note))
        return replace(loaded, held=sum(held), mapped=mapped, notes=(*notes, note))

    def make(self, program: Program | StagedProgram, sizes: messages.RankSizes) -> RemoteProgram:
        """The program of all ranks, led by rank 0's own."""
        self.send(messages.encode(sizes))
        self._ready()
        return RemoteProgram(program, self, whole=self._streams)

    def lead(self, make: Callable[[], GraphExecutor], sizes: messages.RankSizes) -> GraphExecutor:
        """The executor that `make` makes, which leads those of the other ranks: all of them record their launches at
        the same time."""
        from kvasir.runner.graph_ranks import Lead

        assert self._group is not None
        self.send(messages.encode(sizes))
        self._waits = True
        self._group.connect(self._meeting, self._backend, LONGEST_WAIT)
        executor = make()
        self._ready()
        executor.lead = Lead(self, len(executor.forward.cache.groups), executor.packing)
        return executor

    def _ready(self) -> None:
        self._events()
        self._made = True

    def _events(self) -> list[messages.RankEvent]:
        self._waits = True
        found = [messages.decode_event(answer) for answer in self.receive()]
        self._waits = False
        for event in found:
            if isinstance(event, messages.RankFailed):
                raise ConfigError(event.message, event.hint)
        return found

    # -- messages

    def send(self, message: Bytes) -> None:
        self._send(self._channels, message)

    def send_each(self, messages: Sequence[Bytes]) -> None:
        for channel, message in zip(self._channels, messages, strict=True):
            self._send((channel,), message)

    def receive(self) -> Sequence[Bytes]:
        return self._receive(self._channels)

    def ask(self, message: Bytes) -> Callable[[], Sequence[Bytes]]:
        self._send(self._packing, message)
        return lambda: self._receive(self._packing)

    def _send(self, channels: Sequence[Channel], message: Bytes) -> None:
        try:
            for channel in channels:
                channel.send(message)
        except OSError as error:
            raise self._fault() from error

    def _receive(self, channels: Sequence[Channel]) -> Sequence[Bytes]:
        try:
            return [channel.receive() for channel in channels]
        except (OSError, EOFError) as error:
            raise self._fault() from error

    def _fault(self) -> DeviceFault:
        self._watcher.join(1.0)
        return DeviceFault(f"the ranks of the model have stopped: {self.lost()}")

    def lost(self) -> str:
        return self._reason or "one of them does not answer"

    # -- supervision

    def _watch(self) -> None:
        dogs = [Watchdog(LOAD_SECONDS) for _ in self._processes]
        ends, last, progress = select.poll(), time.monotonic(), dict[int, int]()
        for channel in self._channels:
            ends.register(channel.fileno(), 0)  # only that the other end is closed
        while not self._closing:
            ends.poll(1000 * PAUSE)
            now = time.monotonic()
            if self._made and dogs[0].floor == LOAD_SECONDS:
                dogs = [Watchdog(IDLE_SECONDS) for _ in self._processes]
            for number, (process, dog) in enumerate(zip(self._processes, dogs, strict=True), 1):
                if process.poll() is not None:
                    return self._lose(f"{self._name(number)} exited with status {process.returncode}")
                before, progress[number] = progress.get(number), self.mesh.progress(number)
                owes = self.mesh.behind(number) and progress[number] == before if self._made else self._waits
                if owes:
                    dog.tick(now - last, use_of(process.pid))
                else:
                    dog.heard()
                if dog.verdict:
                    return self._lose(f"{self._name(number)}: {dog.verdict}")
            last = now

    def _name(self, number: int) -> str:
        """Of a process, for users."""
        stage, rank = self._stages - 1 - number // self.size, number % self.size
        if self._stages == 1:
            return f"rank {rank}"
        return f"stage {stage}" if self.size == 1 else f"rank {rank} of stage {stage}"

    def _lose(self, reason: str) -> None:
        if self._closing:
            return
        self._reason = reason
        log.error("the ranks of the model have stopped: %s", reason)
        self.mesh.abort()
        for process in self._processes:
            process.kill()
        if self._on_loss:
            self._on_loss(reason)

    # -- the end

    def close(self) -> None:
        """Ends all processes. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._folder.close()
        self.mesh.abort()
        for channel in (*self._channels, *self._packing):
            channel.close()
        for process in self._processes if not self._made else ():
            process.kill()
        deadline = time.monotonic() + END_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._group:
            self._group.close()
            shutil.rmtree(self._store, ignore_errors=True)
        for fd in self._files:
            os.close(fd)
