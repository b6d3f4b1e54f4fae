"""The sampling half of the graph executor: ids are drawn on the device, where the next step reads them, and reach the
host's rows later. Specs that the device's sampler lacks are sampled on the host with the reference.

Logits are never kept: while works wait for a mask, no other step is computed, so they are computed from the step's
hidden states when the masks are there.

A draft is a slot for each of its positions. Its sampled ids are written over the drafted ones after all slots have read
these, so what is accepted and the next id lie where the next step of the row reads them; the rest is beyond the row's
known ids. No step of the row is planned before the host knows how many are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from torch import Tensor

from kvasir.device.replays import fetch
from kvasir.graph.draws import Draws, asked_of, slots_of
from kvasir.graph.forward import Forward
from kvasir.plan import Work
from kvasir.runner import host_sampling
from kvasir.runner.device_rows import DeviceRows
from kvasir.runner.drafts import accepted, masks_of
from kvasir.runner.executor import Entry, ExecutorStep, Taken
from kvasir.runner.graph_replays import Replays, bucket_of
from kvasir.runner.rows import Row
from kvasir.sampling.device_layout import MAX_BEST
from kvasir.sampling.device_state import bad_logits, entries, error_text, reason
from kvasir.sampling.logprobs import logprobs
from kvasir.sampling.rows import BadLogits


@dataclass(slots=True)
class Drawn:
    """Ids sampled on the device, on their way to the host. step: its number. places: of their works. fetched: waits for
    the tensors of `Draws.results`."""

    step: int
    places: Sequence[int]
    works: Sequence[Work]
    rows: Sequence[Row]
    fetched: Callable[[], list[np.ndarray]]


@dataclass(slots=True)
class Sampling:
    """What a step has sampled. drawn: on the device. taken: by the host, by place. before: the carries of the latter
    before they were sampled."""

    drawn: list[Drawn]
    taken: dict[int, Taken]
    before: dict[int, bytes]


class GraphSampler:
    """Samples the works of steps from the hidden states that the forward's last launches left."""

    def __init__(self, forward: Forward, draws: Draws, replays: Replays, rows: DeviceRows, vocab: int):
        self.unread: list[Drawn] = []  # whose ids the host's rows lack
        self._forward, self._draws, self._replays, self._rows, self._vocab = forward, draws, replays, rows, vocab

    def enter(self, place: int) -> None:
        """Writes the sampling parameters of the row at `place` to the device."""
        row = self._rows.host[place]
        if not reason(row.spec):
            self._draws.state.enter(place, row.spec, row.prompt_len)

    def logits(self, rows: Sequence[int]) -> Tensor:
        """The logits of at most `max_chosen` token rows, float32 [rows, vocabulary]; valid until the next call."""
        assert self._forward.logits is not None
        self._rows.writer.fill(self._forward.step.chosen[: len(rows)], np.array(rows, np.int32))
        self._replays("chosen", len(rows))
        return self._forward.value(self._forward.logits, len(rows))

    def entries(self, rows: Sequence[int], ids: Sequence[int], best: Sequence[int]) -> Sequence[Entry]:
        """Log-probabilities of known ids after at most `max_chosen` token rows, with so many best tokens each. Raises
        BadLogits as the reference does."""
        logits, draws, writer = self.logits(rows), self._draws, self._rows.writer
        if max(best) > MAX_BEST:
            return logprobs(logits.cpu(), ids, best)
        count, bucket = len(rows), bucket_of(len(rows), self._replays.max_chosen)
        writer.fill(draws.asked[:bucket], asked_of(best, bucket))
        writer.fill(draws.tokens[:count], np.array(ids, np.int32))
        self._replays("read", count)
        keys, own, ranks, best_ids, values = (part.tolist() for part in fetch(draws.readings(count))())
        for row in keys:
            if text := bad_logits(row):
                raise BadLogits(text)
        found = entries(ids, own, ranks, best_ids, values, best, self._vocab)
        return [entry for entry in found if entry is not None]

    def collect(self, under_way: int = -1, rows: Collection[int] = ()) -> None:
        """Completes the host's rows by the ids that were sampled on the device. Waits for them, except for those of the
        step `under_way`, unless this has checked a draft of one of `rows`."""

        def waits(drawn: Drawn) -> bool:
            return drawn.step == under_way and not any(w.drafted and w.row in rows for w in drawn.works)

        done = [drawn for drawn in self.unread if not waits(drawn)]
        self.unread = [drawn for drawn in self.unread if waits(drawn)]
        for drawn in done:
            for work, row, (tokens, _, carry, _) in zip(drawn.works, drawn.rows, self._read(drawn, False), strict=True):
                if not self._rows.host.has(work.row, row):
                    continue
                if not work.drafted:
                    row.ids[work.end] = tokens[0] if tokens else 0
                elif tokens:
                    row.take(work, tokens, carry)

    def sample(self, step: ExecutorStep) -> Sampling:
        """Samples `step.now`."""
        found = Sampling([], {}, {})
        here = [at for at in step.now if not self._on_device(step.works[at])]
        for part in self._parts(step, [at for at in step.now if at not in here] if here else step.now):
            found.drawn.append(drawn := self._draw(step, part, [None] * len(part)))
            _expect(drawn)
        if here:
            self.collect()
        for part in self._parts(step, here):
            works = [step.works[at] for at in part]
            found.before.update((at, self._row(work).carry) for at, work in zip(part, works, strict=True))
            logits = self._logits(step, part).cpu()
            sampled = host_sampling.take(logits, [self._row(work) for work in works], works, [None] * len(works))
            found.taken.update(zip(part, sampled, strict=True))
            self._write(works, sampled)
        return found

    def sample_masked(
        self, found: Sampling, step: ExecutorStep, places: Sequence[int], masks: Sequence[bytes | None]
    ) -> Sampling:
        """Samples works with their masks. What `sample` has sampled, in `found`, is replaced."""
        mask_of, masked = dict(zip(places, masks, strict=True)), Sampling([], {}, {})
        there = [at for at in places if self._on_device(step.works[at])]
        for part in self._parts(step, there):
            masked.drawn.append(drawn := self._draw(step, part, [mask_of[at] for at in part]))
            _expect(drawn, done=step.now)
        if here := [at for at in places if at not in there]:
            self.collect()
        for at in here:
            row = self._row(step.works[at])
            row.carry = found.before.get(at, row.carry)
            masked.taken[at] = self._sample_here(step, at, mask_of[at])
        return masked

    def read(self, found: Sampling, places: Sequence[int]) -> list[Taken]:
        """What was sampled for works; waits for it."""
        taken = dict(found.taken)
        for drawn in found.drawn:
            taken.update(zip(drawn.places, self._read(drawn), strict=True))
        return [taken[at] for at in places]

    def _read(self, drawn: Drawn, describes: bool = True) -> list[Taken]:
        """describes: whether log-probabilities are wanted."""
        tokens, errors, *described = (part.tolist() for part in drawn.fetched())
        specs = [row.spec for work, row in zip(drawn.works, drawn.rows, strict=True) for _ in range(1 + work.drafted)]
        found: list[Entry | None] = [None] * len(specs)
        if described and describes:
            own, ranks, best_ids, best = described
            found = entries(tokens, own, ranks, best_ids, best, [spec.logprobs for spec in specs], self._vocab)
        slots = (
            Taken(error=error_text(error, spec, self._vocab))
            if error
            else Taken((token,), () if entry is None else (entry,))
            for token, error, entry, spec in zip(tokens, errors, found, specs, strict=True)
        )
        return [accepted(work, list(islice(slots, 1 + work.drafted))) for work in drawn.works]

    def _row(self, work: Work) -> Row:
        return self._rows.host[work.row]

    def _on_device(self, work: Work) -> bool:
        return not reason(self._row(work).spec)

    def _parts(self, step: ExecutorStep, places: Sequence[int]) -> list[list[int]]:
        """Works whose logits are computed at a time."""
        parts: list[list[int]] = []
        room = 0
        for at in places:
            count = 1 + step.works[at].drafted
            if count > room:
                parts.append([])
                room = self._replays.max_chosen
            parts[-1].append(at)
            room -= count
        return parts

    def _logits(self, step: ExecutorStep, places: Sequence[int]) -> Tensor:
        """Of the last 1 + drafted token rows of each work."""
        ends = ((step.starts[at + 1], step.works[at].drafted) for at in places)
        return self.logits([n for end, drafted in ends for n in range(end - 1 - drafted, end)])

    def _draw(self, step: ExecutorStep, places: Sequence[int], masks: Sequence[bytes | None]) -> Drawn:
        """Starts to sample works on the device."""
        draws, writer, works = self._draws, self._rows.writer, [step.works[at] for at in places]
        self._logits(step, places)
        slot_masks = [mask for work, all_ in zip(works, masks, strict=True) for mask in masks_of(work, all_)]
        count = len(slot_masks)
        bucket = bucket_of(count, self._replays.max_chosen)
        level = draws.level([work.row for work in works], masked=any(mask is not None for mask in masks))
        for i, mask in enumerate(slot_masks):
            if mask is not None:
                writer.fill(draws.masks[i, : len(mask) // 4], np.frombuffer(mask, np.int32).copy())
        mask_of = [-1 if mask is None else i for i, mask in enumerate(slot_masks)]
        rows = [work.row for work in works for _ in range(1 + work.drafted)]
        known = [end for work in works for end in range(work.end - work.drafted, work.end + 1)]
        slots = slots_of(rows, known, mask_of, bucket)
        for target, values in zip((draws.rows, draws.known, draws.mask_of), slots, strict=True):
            writer.fill(target[:bucket], values)
        self._replays(f"sample {level}", count)
        results = fetch(draws.results(count, level))
        drawn = Drawn(step.plan.step, places, works, [self._row(work) for work in works], results)
        self.unread.append(drawn)
        return drawn

    def _sample_here(self, step: ExecutorStep, at: int, mask: bytes | None) -> Taken:
        """Samples a work on the host, along its draft if it has one."""
        work, logits = step.works[at], self._logits(step, [at]).cpu()
        [found] = host_sampling.take(logits, [self._row(work)], [work], [mask])
        self._write([work], [found])
        return found

    def _write(self, works: Sequence[Work], sampled: Sequence[Taken]) -> None:
        """Appends ids that the host has sampled to the rows, here and on the device."""
        for work, found in zip(works, sampled, strict=True):
            if not found.error:
                row = self._row(work)
                row.take(work, found.tokens, found.carry)
                self._rows.write_ids(work.row, work.end - work.drafted, row.known)


def _expect(drawn: Drawn, done: Collection[int] = ()) -> None:
    """Makes room for ids that are not known here until `collect`. done: places whose rows have it. A row with a draft
    keeps that until then."""
    for at, work, row in zip(drawn.places, drawn.works, drawn.rows, strict=True):
        if at not in done and not work.drafted:
            row.append(0)
