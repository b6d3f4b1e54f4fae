"""The process of a rank: `python -m kvasir.engine.rank FILE`, started and watched by the engine's process (`ranks`), to
which the open file is a channel.

It loads its part of the model, makes its program, and carries out what rank 0 commands. It ends with the engine's
process, even while it is stopped.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from dataclasses import replace

from kvasir import device as devices
from kvasir.engine import rank_messages as messages
from kvasir.environment import prepare_torch
from kvasir.errors import KvasirError
from kvasir.models.drafting import TARGET
from kvasir.parallel.channel import Channel
from kvasir.program.cache import NativeCache
from kvasir.program.calls import NO_HOOKS
from kvasir.program.following import Follower
from kvasir.program.program import Program
from kvasir.program.shared import SharedRank, end_with_parent
from kvasir.program.staged import StagedProgram
from kvasir.program.trace import trace
from kvasir.runner.allotment import Needs
from kvasir.runner.load import LoadedModel
from kvasir.runner.make_program import held_layout, program_of

log = logging.getLogger("kvasir.engine")


def main() -> int:
    """Runs the process; returns its exit status."""
    end_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for kind in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides when to stop
        signal.signal(kind, signal.SIG_IGN)
    prepare_torch()
    channel = Channel.of(int(sys.argv[1]))
    try:
        return _run(channel, messages.decode_spec(channel.receive()))
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the engine has ended
        return 1


def _run(channel: Channel, spec: messages.RankSpec) -> int:
    if os.getppid() != spec.parent:
        return 1
    if spec.processors:
        devices.stay_on(spec.processors)
    size, stages = spec.options.tensor_parallel, spec.options.pipeline_parallel
    mesh = SharedRank(spec.segment, spec.rank, size, spec.spins, spec.seconds, spec.stage, stages)
    try:
        loaded = _load(spec, mesh, channel)
    except KvasirError as error:
        channel.send(messages.encode(messages.RankFailed(error.message, error.hint)))
        return 2
    streamed = loaded.stream.per_step if loaded.stream else -1
    channel.send(messages.encode(messages.RankLoaded(loaded.held, loaded.mapped, loaded.weight_bytes_read, streamed)))
    program = _program(loaded, messages.decode_sizes(channel.receive()), spec.threads, spec.options.pin)
    follower = Follower(program, mesh, spec.steps, spec.rows, spec.pipe, channel, Channel.of(spec.packing))
    channel.send(messages.encode(messages.RankReady()))
    try:
        follower.serve()
    except BaseException:
        log.exception("rank %d of stage %d failed", spec.rank, spec.stage)
        mesh.abort()
        return 1
    finally:
        if loaded.stream:
            loaded.stream.close()
    return 0


def _load(spec: messages.RankSpec, mesh: SharedRank, channel: Channel) -> LoadedModel:
    from kvasir.engine import parts

    def agree(needs: Needs) -> int:
        channel.send(messages.encode(messages.RankNeeds(needs.fixed, needs.layers)))
        return messages.decode_share(channel.receive()).budget

    return parts.load_part(spec.options, spec.threads, mesh, agree)


def _program(
    loaded: LoadedModel, sizes: messages.RankSizes, threads: int, pin: bool
) -> Program | StagedProgram:  # fmt: skip
    loaded = replace(loaded, trace=trace(loaded.model, sizes.exports))
    for rope in loaded.ropes():
        rope.serve(sizes.max_model_len)
    devices.set_threads(1)  # torch's threads, if it is loaded, must not compete with the program's
    # Groups after the model's own are those of a draft model, which only rank 0 has.
    num_blocks = sizes.num_blocks[: len(loaded.layout.groups)]
    cache = NativeCache(held_layout(loaded), num_blocks, sizes.block_size, sizes.kv_dtype)
    return program_of(
        loaded, cache.of(TARGET), max_tokens=sizes.max_tokens, max_rows=sizes.max_rows,
        max_positions=sizes.max_model_len + 1, threads=threads, max_drafted=sizes.max_drafted, pin=pin, samples=False,
        hooks=loaded.stream.hooks if loaded.stream else NO_HOOKS,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
