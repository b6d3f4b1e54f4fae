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
from typing import TYPE_CHECKING

from kvasir import device as devices
from kvasir.engine import rank_messages as messages
from kvasir.environment import prepare_torch
from kvasir.errors import KvasirError
from kvasir.models.drafting import TARGET
from kvasir.parallel import Mesh
from kvasir.parallel.channel import Channel
from kvasir.plan import Capacity
from kvasir.program.cache import NativeCache
from kvasir.program.calls import NO_HOOKS
from kvasir.program.following import Follower
from kvasir.program.shared import SharedRank, end_with_parent
from kvasir.program.trace import trace
from kvasir.runner import make
from kvasir.runner.allotment import Needs
from kvasir.runner.load import LoadedModel
from kvasir.runner.make_program import held_layout, program_of

if TYPE_CHECKING:
    from kvasir.parallel.group import GroupRank
    from kvasir.runner.graph_follower import GraphFollower

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
    group = _group(spec)
    try:
        loaded = _load(spec, group or mesh, channel)
    except KvasirError as error:
        channel.send(messages.encode(messages.RankFailed(error.message, error.hint)))
        return 2
    channel.send(messages.encode(_loaded(loaded, devices.available(spec.device))))
    sizes = messages.decode_sizes(channel.receive())
    follower = (
        _executor(loaded, sizes, spec, group, mesh, channel) if group else _program(loaded, sizes, spec, mesh, channel)
    )
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


def _loaded(loaded: LoadedModel, available: int) -> messages.RankLoaded:
    streamed = loaded.stream.per_step if loaded.stream else -1
    return messages.RankLoaded(loaded.held, loaded.mapped, loaded.weight_bytes_read, streamed, available)


def _group(spec: messages.RankSpec) -> GroupRank | None:
    """This process's rank of the group in which ranks of the graph executor meet; None for a program."""
    if not spec.meeting:
        return None
    from kvasir.parallel.group import GroupRank

    devices.use(spec.device, spec.rank)
    return GroupRank(spec.rank, spec.options.tensor_parallel)


def _load(spec: messages.RankSpec, mesh: Mesh, channel: Channel) -> LoadedModel:
    from kvasir.engine import parts

    def agree(needs: Needs) -> int:
        channel.send(messages.encode(messages.RankNeeds(needs.fixed, needs.layers)))
        return messages.decode_share(channel.receive()).budget

    return parts.load_part(spec.options, spec.threads, mesh, spec.device, agree)


def _of_sizes(loaded: LoadedModel, sizes: messages.RankSizes) -> LoadedModel:
    """The model as rank 0 has traced it, for contexts of its length."""
    for rope in loaded.ropes():
        rope.serve(sizes.max_model_len)
    return replace(loaded, trace=trace(loaded.model, sizes.exports))


def _program(
    loaded: LoadedModel, sizes: messages.RankSizes, spec: messages.RankSpec, mesh: SharedRank, channel: Channel
) -> Follower:
    loaded = _of_sizes(loaded, sizes)
    devices.set_threads(1)  # torch's threads, if it is loaded, must not compete with the program's
    # Groups after the model's own are those of a draft model, which only rank 0 has.
    num_blocks = sizes.num_blocks[: len(loaded.layout.groups)]
    cache = NativeCache(held_layout(loaded), num_blocks, sizes.block_size, sizes.kv_dtype)
    program = program_of(
        loaded, cache.of(TARGET), max_tokens=sizes.max_tokens, max_rows=sizes.max_rows,
        max_positions=sizes.max_model_len + 1, threads=spec.threads, max_drafted=sizes.max_drafted,
        pin=spec.options.pin, samples=False, hooks=loaded.stream.hooks if loaded.stream else NO_HOOKS,
    )  # fmt: skip
    return Follower(program, mesh, spec.steps, spec.rows, spec.pipe, channel, Channel.of(spec.packing))


def _executor(
    loaded: LoadedModel, sizes: messages.RankSizes, spec: messages.RankSpec, group: GroupRank, mesh: SharedRank,
    channel: Channel,
) -> GraphFollower:  # fmt: skip
    from kvasir.runner.graph_follower import GraphFollower
    from kvasir.runner.make_graph import make_following

    group.connect(spec.meeting, "nccl" if spec.device == "cuda" else "gloo", spec.seconds)
    groups = make.cache_groups_of(loaded, sizes.block_size, sizes.kv_dtype)
    capacity = Capacity(
        sizes.max_rows, sizes.max_tokens, sizes.max_model_len, sizes.block_size, groups,
        sizes.num_blocks[: len(groups)], loaded.model.config.vocab_size, max_drafted=sizes.max_drafted,
    )  # fmt: skip
    executor = make_following(
        _of_sizes(loaded, sizes), capacity, sizes.kv_dtype, spec.device, adapters=spec.options.expects_adapters
    )
    return GraphFollower(executor, mesh, channel, Channel.of(spec.packing))


if __name__ == "__main__":
    sys.exit(main())
