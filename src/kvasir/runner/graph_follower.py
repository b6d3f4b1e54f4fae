"""The work of a rank of the graph executor that follows rank 0: it computes what rank 0 says until all waits end."""

from __future__ import annotations

from kvasir.parallel.channel import Channel
from kvasir.program.shared import SharedRank
from kvasir.program.shared_packing import FollowingPacking
from kvasir.runner.blocks import wait_all
from kvasir.runner.executor import ExecutorStep
from kvasir.runner.graph_executor import GraphExecutor, Results
from kvasir.runner.graph_ranks import Draw, Install, Saved, Step, decode, encode


class GraphFollower:
    """channel, packing: to rank 0, the latter for adapters. mesh: counts the commands."""

    def __init__(self, executor: GraphExecutor, mesh: SharedRank, channel: Channel, packing: Channel):
        self._executor, self._mesh, self._channel = executor, mesh, channel
        self._packing = FollowingPacking(executor.packing, packing)
        self._step: ExecutorStep | None = None
        self._results: Results | None = None

    def serve(self) -> None:
        """Returns once the ranks are aborted, which is also how they end. Raises what a command raises."""
        while self._mesh.next():
            match decode(self._channel.receive()):
                case Step(plan, places, starts, now, later):
                    step = ExecutorStep(plan, [plan.work[place] for place in places], starts, now, later)
                    self._step, self._results = step, self._executor.compute(step)
                    if plan.saves:
                        shards = [bytes(shard) for shard in wait_all(self._results.saved)]
                        self._channel.send(encode(Saved(plan.step, shards)))
                case Draw(at, masks):
                    assert self._step is not None and self._results is not None
                    self._executor.draw_works(self._results, self._step, at, masks)
                case Install(adapter, key, dropped):
                    self._executor.install(adapter, None if key is None else self._packing.take(key, 0))
                    self._packing.drop(dropped)
            self._mesh.done()
