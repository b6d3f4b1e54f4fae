"""The recorded launches of the graph executor: one replay per kind of launches and bucket of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvasir.graph.draws import LEVELS, Draws
from kvasir.graph.forward import Forward
from kvasir.ops.compiling import Progress, compile_all
from kvasir.ops.launch import Launch, recording

Run = Callable[[], None]
Record = Callable[[Run], Run]


def bucket_of(count: int, most: int) -> int:
    """The bucket of `count` rows: the next power of two, at most `most`."""
    return min(1 << max(0, count - 1).bit_length(), most)


def buckets(most: int) -> list[int]:
    """All buckets up to `most` rows."""
    return sorted({bucket_of(1 << i, most) for i in range(most.bit_length() + 1)})


class Replays:
    """The launches of a forward and of its sampler. max_tokens, max_chosen: the largest buckets of token rows and of
    rows of logits. record: makes a replay of launches.

        rows           all token rows of a step
        chosen         the logits of the chosen rows
        adapted <...>  of these, with the adapters of the rows
        sample <i>     tokens from these logits, as LEVELS[i] needs
        read           log-probabilities of known ids from these logits
    """

    def __init__(self, forward: Forward, draws: Draws | None, max_tokens: int, max_chosen: int, record: Record):
        self.max_tokens, self.max_chosen = max_tokens, max_chosen
        self._forward, self._draws, self._record = forward, draws, record
        self._recorded: dict[tuple[str, int], Run] = {}
        self.adapted: frozenset[str] = frozenset()  # the kinds that are launched with adapters

    def __call__(self, name: str, count: int) -> None:
        """Makes the launches for `count` rows, padded to their bucket."""
        name = f"adapted {name}" if name in self.adapted else name
        self._replay(name, bucket_of(count, self._most(name)))()

    def record_all(self, progress: Progress | None = None) -> None:
        """Compiles the kernels of every bucket, several at a time, then records the launches."""
        compile_all(self.launches(), progress)
        for name, bucket in self._all():
            self._replay(name, bucket)

    def launches(self) -> list[Launch]:
        """The launches of every bucket, without running them."""
        with recording(dry=True) as found:
            for name, bucket in self._all():
                self._launch(name, bucket)
        return found

    def __len__(self) -> int:
        """The number of replays that `record_all` makes."""
        return len(list(self._all()))

    def _all(self) -> Iterator[tuple[str, int]]:
        return ((name, bucket) for name in self._names() for bucket in buckets(self._most(name)))

    def _names(self) -> Iterator[str]:
        adapted = self._forward.adapters is not None
        yield from ("rows", "adapted rows") if adapted else ("rows",)
        if self._forward.logits is not None:
            yield from ("chosen", "adapted chosen") if adapted else ("chosen",)
        if self._draws:
            yield from (f"sample {level}" for level in range(len(LEVELS)))
            yield "read"

    def _most(self, name: str) -> int:
        return self.max_tokens if name.endswith("rows") else self.max_chosen

    def _replay(self, name: str, bucket: int) -> Run:
        if (name, bucket) not in self._recorded:
            self._recorded[name, bucket] = self._record(lambda: self._launch(name, bucket))
        return self._recorded[name, bucket]

    def _launch(self, name: str, bucket: int) -> None:
        if name.endswith("rows"):
            self._forward.run_rows(bucket, adapted=name == "adapted rows")
        elif name.endswith("chosen"):
            self._forward.run_chosen(bucket, adapted=name == "adapted chosen")
        else:
            assert self._draws is not None and self._forward.logits is not None
            logits = self._forward.value(self._forward.logits, bucket)
            if name == "read":
                self._draws.read(logits)
            else:
                self._draws.run(logits, int(name.removeprefix("sample ")))
