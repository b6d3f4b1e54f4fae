"""Types shared by all packages: requests to the engine and its results.

Everything here is a frozen value of plain types, so that it can be passed to another thread or process (msgspec) or
over a network unchanged. Ids in, ids out: text appears only in `text/`, `engine/front.py` and the edges.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvasir.fields import LISTS, RequestFields
from kvasir.inputs import NONE, Adapter, Inputs, Source
from kvasir.speculation import Speculation
from kvasir.validate import check_sampling, check_structured


class FinishReason(StrEnum):
    """Why a choice ended. The names are those of the OpenAI API where it has one."""

    STOP = "stop"  # an end-of-sequence id, a stop id or a stop string
    LENGTH = "length"  # max_tokens or the end of the context
    ABORT = "abort"  # the client disconnected or cancelled
    ERROR = "error"  # see `Delta.error`; `Delta.refused`: whether the request caused it
    TIMEOUT = "timeout"  # the request's deadline passed; the tokens emitted by then are valid


class ServiceClass(StrEnum):
    """How urgent a request is. Classes are served in this order."""

    INTERACTIVE = "interactive"  # a person reads the answer as it is generated
    BATCH = "batch"  # the client waits for the whole answer
    BACKGROUND = "background"  # nothing waits for it; it gets the capacity that is left

    @property
    def rank(self) -> int:
        """0 for the class that is served first."""
        return _RANKS[self]


_RANKS = {service_class: rank for rank, service_class in enumerate(ServiceClass)}


@dataclass(frozen=True, slots=True)
class Target:
    """Latency targets of a class, in seconds. ttft: from arrival to the first token. tpot: from each token to the
    next."""

    ttft: float
    tpot: float


class Task(StrEnum):
    GENERATE = "generate"
    EMBED = "embed"
    CLASSIFY = "classify"  # the logits of a classifier, or the score of a pair of texts
    TOKEN_EMBED = "token_embed"  # an embedding of each token
    TOKEN_CLASSIFY = "token_classify"  # the logits of a classifier of each token


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """A value of `schema` between two texts."""

    begin: str
    schema: dict[str, Any] | bool
    end: str = ""


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The structure that a choice must follow: exactly one of the first six fields. Names are vLLM's where it has one.

    json: a JSON schema, as an object or as text. grammar: Lark, or llama.cpp's GBNF. tags: free text in which one of
    the `triggers` must continue as a tag that begins with it; at_least_one, at_most_one: bounds on the number of tags.
    lenient: schema keywords that cannot be enforced are ignored instead of refused.
    """

    json: dict[str, Any] | bool | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    tags: tuple[StructuralTag, ...] | None = None
    triggers: tuple[str, ...] = ()
    at_least_one: bool = False
    at_most_one: bool = False
    lenient: bool = False

    def __post_init__(self) -> None:
        if self.choice is not None and not isinstance(self.choice, tuple):
            object.__setattr__(self, "choice", tuple(self.choice))
        check_structured(self)


@dataclass(frozen=True, slots=True)
class SamplingParams(RequestFields):
    """How tokens are sampled: the fields of the table in `fields`, and the structure of the answer.

    Names and defaults are vLLM's, or llama.cpp's for parameters that vLLM lacks. seed: if None, the front draws one and
    returns it.
    logprobs: None for none, 0 for the sampled token's only, k for the k best as well; from the raw float32 logits.
    stop: strings, matched in the front; the core sees only ids.
    """

    structured_outputs: StructuredOutputs | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def dry(self) -> bool:
        return self.dry_multiplier != 0.0 and self.dry_penalty_last_n != 0

    def __post_init__(self) -> None:
        for name in LISTS:
            if not isinstance(value := getattr(self, name), tuple):
                object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value or ()))
        check_sampling(self, self.structured_outputs)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer of a prompt's computed blocks from one engine to another.

    id: a name that both engines are given, and that nobody can guess. address: of the other engine, which this one
    connects to; "": the other one connects. seconds: time limit of the transfer."""

    id: str
    address: str = ""
    seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Note:
    """What happened to a traced request, for its trace. begin, end: in seconds since 1970. facts: numbers and texts by
    name."""

    name: str
    begin: float
    end: float
    facts: dict[str, int | float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the core takes it. prompt_ids: token ids. `params.seed` and `params.max_tokens` must be set.

    resume_ids: for each choice, the ids streamed before an engine died; they are taken as known, and the stream
    continues after them with the same tokens as without the crash. If not empty, the request was accepted before, and
    the queue's bound does not apply to it. resume_carries: for each choice, the carry of its last delta.
    done: indexes of choices that are not to be computed (again).
    deaths: engines whose death the request may have caused. lives: engines that died with it. Both since its last
    token.
    tenant: the name of the key that sent the request; tenants share a class by their weights.
    deadline: seconds from arrival; a choice that is not complete by then ends with TIMEOUT.
    waited: seconds from the request's arrival until the engine got it.
    sends: the prompt's blocks are sent to another engine as they are computed. takes: they come from another engine;
    what has not arrived in time is computed.
    eos_ids: the tokenizer's end-of-sequence ids; None for those of the model's own configuration.
    bad_word_ids, dry_breakers, dry_breaker_sequences: the params' texts as ids, as in `plan.SamplingSpec`.
    trace: the W3C traceparent of a traced request, whose deltas have notes; "" for any other.
    progress: deltas without tokens tell how much of the prompt is computed.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    task: Task = Task.GENERATE
    slo: ServiceClass = ServiceClass.INTERACTIVE
    priority: int = 0  # within its tenant and class: lower goes first
    tenant: str = ""
    weight: float = 1.0  # the tenant's share relative to other tenants, the same in all its requests
    deadline: float | None = None
    waited: float = 0.0
    adapters: tuple[Adapter, ...] = ()  # in the order in which they are added
    inputs: Inputs = NONE  # what the prompt is computed from besides its ids
    sources: tuple[Source, ...] = ()  # encoder inputs of the contents that `inputs` names
    cache_salt: str | None = None  # requests with different salts share no cached prefix
    no_cache: bool = False  # neither use cached prefixes nor add any
    cache_ttl: float | None = None  # seconds for which the prompt is pinned in the prefix cache
    speculation: Speculation | None = None  # which drafts it gets; None: as the engine decides
    prediction: tuple[int, ...] = ()  # ids that the client expects in the answer, as a draft
    resume_ids: tuple[tuple[int, ...], ...] = ()
    resume_carries: tuple[bytes, ...] = ()
    done: tuple[int, ...] = ()
    sends: Transfer | None = None
    takes: Transfer | None = None
    deaths: int = 0
    lives: int = 0
    eos_ids: tuple[int, ...] | None = None
    grammar: str | None = None  # the rule that the choices follow, in the form that guided.guide reads
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    dry_breakers: bytes = b""
    dry_breaker_sequences: tuple[tuple[int, ...], ...] = ()
    trace: str = ""
    progress: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token and of the best tokens at its position: natural log, float32, of the raw logits.

    rank: from 1 (most probable). top: sorted by descending log-probability, ties by ascending id.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of a prompt is computed. tokens: including those that were cached. seconds: since the first step."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0  # of completion_tokens
    accepted_tokens: int = 0  # drafted ids that are part of the completion
    rejected_tokens: int = 0  # drafted ids that are not


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step adds to choice `index` of request `id`. The last delta carries a finish reason.

    stop_token: the id that ended the choice, if one did. It is the last of `token_ids`, and the front leaves it out of
    the text.
    prompt_logprobs: only in the first delta of choice 0: one entry per prompt token, the first None.
    embedding: the result of any other task than Task.GENERATE, float32 values; those of tokens one after another.
    cached_tokens: tokens of the prompt that were not computed for this choice.
    carry: the sampler's state after these tokens, if it has one; needed to resume from here.
    drafted: ids of the draft that the step checked. accepted: how many of these are right and among `token_ids`.
    refused: whether the error is caused by the request rather than by the engine.
    at: when the tokens were available, in seconds of the engine's time.monotonic; 0 if not known.
    notes: what has happened to a traced request since its last delta.
    progress: of the prompt, in a delta with nothing else.
    """

    id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    embedding: tuple[float, ...] | None = None
    cached_tokens: int = 0
    error: str | None = None
    carry: bytes = b""
    refused: bool = False
    drafted: int = field(default=0, compare=False)
    accepted: int = field(default=0, compare=False)
    at: float = field(default=0.0, compare=False)
    notes: tuple[Note, ...] = field(default=(), compare=False)
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """What one step adds to many choices that each get a single token and nothing else: stands for one Delta each.
    ids: of requests. tokens: packed int32. at: as in a Delta."""

    ids: tuple[str, ...]
    indexes: tuple[int, ...]
    tokens: bytes
    at: float = field(default=0.0, compare=False)

    def deltas(self) -> list[Delta]:
        tokens = array("i", self.tokens)
        parts = zip(self.ids, self.indexes, tokens, strict=True)
        return [Delta(id, index, (token,), at=self.at) for id, index, token in parts]


def each_delta(parts: Iterable[Delta | Tokens]) -> list[Delta]:
    """The same as Deltas, one for each choice."""
    return [d for part in parts for d in (part.deltas() if isinstance(part, Tokens) else (part,))]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the front and the edges need to know about an engine's model."""

    name: str
    architecture: str
    tasks: tuple[Task, ...]
    vocab_size: int
    max_model_len: int
    eos_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    device: str = "cpu"
    # Whether bits are independent of batch, chunk and threads here: "exact", "close", or "untested" if the engine is
    # too small for the self-test.
    grade: str = "exact"
    numerics: str = ""  # the numerics version, in hexadecimal: engines with an equal one compute equal bits
    executor: str = "eager"
    num_parameters: int = 0
    embedding_size: int = 0
    token_embedding_size: int = 0  # of Task.TOKEN_EMBED
    token_weights: bool = False  # Task.TOKEN_CLASSIFY gives a weight per token, for lexical matching
    labels: tuple[str, ...] = ()  # of a classifier, in the order of its logits
    activation: str = ""  # the function of a classifier's logits that gives scores: identity, sigmoid, softmax or tanh
    pair_types: bool = False  # whether the second text of a pair has a token type of its own
    default_sampling: dict[str, float] = field(default_factory=dict)  # from generation_config.json
    weight_bytes_read: int = 0  # of matrices, by a step of one row; 0 if the executor does not know
    kv_bytes_per_token: tuple[tuple[int, int], ...] = ()  # (window, or 0 for all tokens; bytes) of each cache group
    targets: dict[ServiceClass, Target] = field(default_factory=dict)  # of each class
    drafters: tuple[str, ...] = ()  # names of speculation.METHODS, in the order in which they are asked
    draft_max: int = 0  # drafted ids of a sequence in a step, at most; 0 without drafters
    max_adapters: int = 0  # how many adapters may be in memory at once; 0: requests may not name any
    adapter_bytes: int = 0  # of their matrices, at most
    # Blocks of prompts that it exchanges with other engines: "prefill" (sends them), "decode" (takes them), "both"; ""
    # if it exchanges none. engine_id: drawn at its start. transfers_at: where others can connect, "" if they cannot.
    role: str = ""
    engine_id: str = ""
    transfers_at: str = ""
    block_size: int = 1  # tokens in a block of the cache


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A low-rank adapter that requests may name.

    path: of its folder or file, absolute. content: hash of what changes the arithmetic, hexadecimal: adapters with an
    equal one compute equal bits. kind: "peft", "gguf" or "mlx". rank: the greatest. nbytes: of its tensors.
    base: what it says about its base model ("name", "revision", "architecture").
    invocation: ids after whose last occurrence in the prompt it applies (aLoRA), () for always.
    fixed_scale: requests may only use it with the scale 1 (DoRA). pinned: it stays in memory until it is unloaded.
    """

    name: str
    path: str
    content: str
    kind: str = ""
    rank: int = 0
    nbytes: int = 0
    base: dict[str, str] = field(default_factory=dict)
    invocation: tuple[int, ...] = ()
    fixed_scale: bool = False
    pinned: bool = False
