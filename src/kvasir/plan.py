"""The interface between scheduler and runner: plans go down, results come back.

A plan is immutable, small, made of ints, tuples and bytes, and complete when it is created. It can be passed to another
process or over a network unchanged. Every rank gets the same plan.

The life of a sequence in plans: it *joins* (with all its ids) and gets a row of the runner, then appears in `work` of
every step that computes some of its tokens, and at the end its row is *left*. Preemption is leaving and later joining
again. Known ids are sent once, when a sequence joins; sampled ids stay in the runner's rows and come back in results.

    known     0 ........................ prompt ........ sampled ...... (values in the row)
    computed  0 ....... c                                               (keys and values in the cache)
    work            [c, c + count) is computed in this step; if it reaches `known`, the row may sample
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from kvasir.caches import CacheKind
from kvasir.fields import CARRYING, SamplerFields
from kvasir.inputs import NONE, Inputs

if TYPE_CHECKING:
    Bytes = bytes | memoryview  # read-only
else:
    Bytes = bytes  # what a decoder of messages makes
# A row of a pending step, and ids that follow its known ones: sampled by the step, then guessed -> the mask of the next
# id, None if every id is allowed, empty if none is.
Ahead = Callable[[int, Sequence[int]], "bytes | None"]

# Takes (step, cache group, block, offset, bytes) of `Work.grows`, on any thread; no bytes once a block is complete.
BlockSink = Callable[[int, int, int, int, "memoryview | None"], None]


def pack_ids(ids: list[int] | tuple[int, ...]) -> bytes:
    """Token ids as little-endian int32 (the byte order of every machine that the engine runs on)."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    ids = array("i")
    ids.frombytes(data)
    return ids.tolist()


@dataclass(frozen=True, slots=True)
class SamplingSpec(SamplerFields):
    """The sampler's part of SamplingParams, in ids. seed: the choice's own, hash(request seed, choice index).

    stop_ids: ids that end the sequence; they are forbidden while fewer than `min_tokens` are sampled.
    bad_words: sequences of ids; the last id of one is forbidden if the sampled ids end with its other ids.
    dry_breakers: bit set of ids that no repetition extends across, bit i & 31 of int32 word i >> 5.
    dry_breaker_sequences: sequences of ids with the same effect.
    guided: any step that samples may come with a mask.
    logprobs, prompt_logprobs: -1 for none, else the number of top entries besides the token itself.
    carries: the sampler may have state that is not a function of the ids.
    """

    temperature: float = 0.0
    dry_breakers: Bytes = b""
    dry_breaker_sequences: tuple[tuple[int, ...], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    guided: bool = False
    logprobs: int = -1
    prompt_logprobs: int = -1
    carries: bool = field(init=False, default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "carries", any(getattr(self, name) != off for name, off in CARRYING))


class Adapted(NamedTuple):
    """An adapter: its id (0: none), its scale, and the first position that it applies to."""

    adapter: int
    scale: float = 1.0
    start: int = 0


@dataclass(frozen=True, slots=True)
class Join:
    """A sequence takes row `row`. ids: all known ids (pack_ids), of which the first `prompt_len` are the prompt.
    inputs: what it is computed from besides its ids. adapters: in the order in which they are added."""

    row: int
    ids: bytes
    prompt_len: int
    spec: SamplingSpec
    adapters: tuple[Adapted, ...] = ()
    carry: bytes = b""  # the sampler's carry at the last known position (such as Mirostat's mu)
    inputs: Inputs = NONE


@dataclass(frozen=True, slots=True)
class Work:
    """Compute tokens [start, start + count) of the sequence in row `row`.

    blocks: per cache group, the block ids added to the row's table since the last plan, as (first index, ids).
    appended: ids that become known with this plan without being sampled, packed. The last `drafted` of them are a
    draft: an id is sampled at the position before the draft and at each of its positions, and the draft is dropped from
    the first mismatch on.
    sample: sample from the logits of the last computed token. Otherwise the step only fills the cache.
    masked: a mask will probably arrive, and the sampler must wait for it; only a hint.
    read: positions [first, end) among the computed ones; log-probabilities of the known ids after them are returned.
    want_pooled: the task (types.Task) whose result is pooled from the computed tokens, "" for none.
    want_hidden: names of outputs to return for all computed tokens: hidden states or attention weights.
    indivisible: the tokens attend to each other in both directions and must be computed in one step.
    pending: transfers of a connector that must have arrived before the step reads these blocks.
    propose: how many of the next ids are guessed after sampling. There may be fewer, and no guess is an error. A guess
    is computed in blocks of the row's table, so a row whose table ends with its known ids has none.
    grows: (cache group, block) that are full after the step, whose bytes are wanted as soon as their layers are
    computed (`Runner.watch`). Only of the groups that `Capacity.grows` names.
    """

    row: int
    start: int
    count: int
    blocks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    appended: bytes = b""
    drafted: int = 0
    sample: bool = False
    masked: bool = False
    read: tuple[int, int] = (0, 0)
    want_pooled: str = ""
    want_hidden: tuple[str, ...] = ()
    indivisible: bool = False
    pending: tuple[int, ...] = ()
    propose: int = 0
    grows: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class EncoderWork:
    """Make the `length` embeddings of `content` from `data`, an encoder's input. The runner holds them until a plan's
    `dropped` names the content."""

    content: bytes
    length: int
    data: Bytes


@dataclass(frozen=True, slots=True)
class Decodes:
    """Work of many rows as columns: each row computes its last known token and samples the next, without a mask, a
    carry or log-probabilities. Equivalent to a Work of one token for each row.

    rows, starts: packed int32 of equal length. blocks: added to block tables, as (place in `rows`, cache group, index
    in the table, block id).
    """

    rows: bytes = b""
    starts: bytes = b""
    blocks: tuple[tuple[int, int, int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.rows) // 4

    def works(self) -> tuple[Work, ...]:
        """The same as one Work per row."""
        added: dict[int, dict[int, tuple[int, tuple[int, ...]]]] = {}
        for place, group, index, block in self.blocks:
            added.setdefault(place, {})[group] = index, (block,)
        blocks = {
            place: tuple(tables.get(group, (0, ())) for group in range(max(tables) + 1))
            for place, tables in added.items()
        }
        pairs = enumerate(zip(unpack_ids(self.rows), unpack_ids(self.starts), strict=True))
        return tuple(Work(row, start, 1, blocks.get(place, ()), sample=True) for place, (row, start) in pairs)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Order of execution: `adapters` are installed, `left` rows freed, `joined` rows set, `dropped` encoder
    outputs dropped, `encodes` made, `saves` read, `copies` made, `loads` written, `decodes` and `work` computed. No row
    is in both of the last two.

    saves: (cache group, block) whose bytes are returned in the result, in the cache's portable order.
    copies: (cache group, source block, target block), all read before any is written.
    loads: (cache group, block, the bytes of an earlier save).
    adapters: (id, content hash) that the id stands for from this step on, "" for none. Who executes the plan installs
    them with `Runner.set_adapter`; no row of an earlier step that still runs has such an id.
    """

    step: int
    joined: tuple[Join, ...] = ()
    work: tuple[Work, ...] = ()
    left: tuple[int, ...] = ()
    copies: tuple[tuple[int, int, int], ...] = ()
    saves: tuple[tuple[int, int], ...] = ()
    loads: tuple[tuple[int, int, Bytes], ...] = ()
    encodes: tuple[EncoderWork, ...] = ()
    dropped: tuple[bytes, ...] = ()  # contents; the runner may not hold all of them
    decodes: Decodes = Decodes()
    adapters: tuple[tuple[int, str], ...] = ()

    @property
    def computes(self) -> bool:
        return bool(self.work or self.decodes)

    @property
    def leads(self) -> bool:
        """Whether later steps build on what it computes or writes."""
        return bool(self.computes or self.copies or self.loads or self.encodes)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(w.count for w in self.work)

    @property
    def works(self) -> tuple[Work, ...]:
        """The works of all rows: the decodes as one Work each, then `work`."""
        return (*self.decodes.works(), *self.work) if self.decodes else self.work

    def expanded(self) -> StepPlan:
        """The same plan without columns."""
        return replace(self, work=self.works, decodes=Decodes())


@dataclass(frozen=True, slots=True)
class RowResult:
    """The result of row `row` of the plan. tokens: the sampled ids (several after an accepted draft).

    logprobs: one entry per sampled token: (token, logprob, rank, ((id, logprob), ...)).
    read: one such entry for each position of the work's `read`, with as many top entries as the spec wants for prompt
    ids or for sampled ids.
    pooled: float32 bytes of the pooled result. accepted: number of drafted ids that match the sampled ids;
    `tokens` then holds these and one more. error: this row failed, the other rows are sound. A failure at a drafted id
    ends the draft before it instead: the next step meets it again. proposed: ids that may follow `tokens`, as the work
    asked.
    hidden: float32 bytes by output name: [count, width] for a hidden state, [count, heads, start + count] for a layer's
    attention weights.
    """

    row: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[tuple[int, float, int, tuple[tuple[int, float], ...]], ...] = ()
    read: tuple[tuple[int, float, int, tuple[tuple[int, float], ...]], ...] = ()
    carry: bytes = b""
    pooled: bytes = b""
    hidden: tuple[tuple[str, bytes], ...] = ()
    accepted: int = 0
    error: str = ""
    proposed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of the plan's `work`, and the bytes of its `saves`, in their orders.

    decoded: the ids sampled for the plan's `decodes`, packed, -1 for each row that failed. failed: the results of the
    failed rows. proposing: seconds spent on `Work.propose`.
    """

    step: int
    rows: tuple[RowResult, ...] = ()
    saved: tuple[Bytes, ...] = ()
    decoded: bytes = b""
    failed: tuple[RowResult, ...] = ()
    proposing: float = field(default=0.0, compare=False)

    def of(self, plan: StepPlan) -> tuple[RowResult, ...]:
        """The results of the plan's `works`."""
        if not plan.decodes:
            return self.rows
        failed, ids = {r.row: r for r in self.failed}, unpack_ids(self.decoded)
        decoded = (
            failed[row] if token < 0 else RowResult(row, (token,))
            for row, token in zip(unpack_ids(plan.decodes.rows), ids, strict=True)
        )
        return (*decoded, *self.rows)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one block table. kind: the first layer's; determines which positions the blocks cover.
    bytes_per_block: of all layers of the group together.
    """

    kind: CacheKind
    layers: tuple[int, ...]
    bytes_per_block: int


@dataclass(frozen=True, slots=True)
class Encoders:
    """Limits of a runner's encoders. max_bytes: of all outputs that it holds. bytes_each: of one embedding, those for
    further layers included. per_step: most embeddings that a step may make."""

    max_bytes: int
    bytes_each: int
    per_step: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """Limits of a runner, within which the scheduler plans. The only description of the runner that the scheduler
    gets."""

    max_rows: int
    max_tokens_per_step: int
    max_model_len: int
    block_size: int
    groups: tuple[CacheGroup, ...] = field(default_factory=tuple)
    num_blocks: tuple[int, ...] = ()
    vocab_size: int = 0
    adapters: int = 0  # greatest id of an adapter (Adapted), and so the number that may be installed at a time
    max_drafted: int = 0  # most drafted ids of a row in a step
    computes: tuple[str, ...] = ()  # names of inputs.FEATURES
    encoders: Encoders | None = None
    grows: tuple[int, ...] = ()  # cache groups whose blocks can be read while a step computes them (Work.grows)
    proposes: int = 0  # positions up to which work may ask for ids (Work.propose), 0 if it may not
