"""The one table of request fields: a row states a field's name, type, range, default, place of computation, names in
the dialects, flag and line in the docs.

Everything else is derived from the rows: `types.SamplingParams` and its checks (`validate`), the wire types and
conversions of the dialects (`serve/`), the page's settings (`serve/page/settings`), a Modelfile's parameters
(`store/parameters`), flags (`cli/sampler`), the sampler's part of a plan (`plan.SamplingSpec`), the native structure
(`csrc/sampler_fields.h`) and the table in `docs/sampling.md`. `scripts/make_fields.py` writes the last two.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

# ruff: noqa: RUF009 - what the rows make are fields

MAX_N = 128
MAX_LOGPROBS = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 128
MAX_BREAKERS = 32
MAX_BREAKER_CHARS = 40
INT32 = 2**31 - 1


class FieldKind(Enum):
    NUMBER = "number"
    INTEGER = "integer"
    CHOICE = "one of"
    FLAG = "boolean"
    TEXTS = "list of texts"
    IDS = "list of token ids"
    BIAS = "token ids to numbers"


class ChainSampler(NamedTuple):
    """A sampler in llama.cpp's chain, `samplers`: its name, its letter, and whether it may be anywhere in it."""

    name: str
    letter: str
    anywhere: bool = False


class FieldRow(NamedTuple):
    """One row of the table.

    doc: its line in the docs. low, high: its range, both included unless open_low. optional: None is allowed.
    choices: value -> meaning. most, chars: the most entries, and the most characters of each. alone: a single entry may
    be given without a list.
    names: dialect -> its name there, "" if it is the same. own: dialects that declare and convert it themselves, since
    its type, its meaning or the object that it belongs to differs there.
    where: what computes with it. native: its C type in the sampler's structure, "" if it is not copied there.
    sampler, off: llama.cpp's sampler that it belongs to, and the value that disables it.
    carries: with any other value, the sampler has a carry: state that is not a function of the ids.
    recommended: a model's generation_config.json may set it.
    flag: the help of its flag of `kvasir run` and `kvasir chat`; the page shows it as well.
    """

    kind: FieldKind
    default: Any
    doc: str
    low: float = 0
    high: float = 0
    open_low: bool = False
    optional: bool = False
    choices: Mapping[int, str] = {}
    most: int = 0
    chars: int = 0
    alone: bool = False
    names: Mapping[str, str] = {}
    own: tuple[str, ...] = ()
    where: str = "sampler"
    native: str = ""
    sampler: ChainSampler | None = None
    off: Any = None
    carries: bool = False
    recommended: bool = False
    flag: str = ""
    name: str = ""


def _field(row: FieldRow) -> Any:
    """The declaration of a dataclass field."""
    if isinstance(row.default, dict):
        return dataclasses.field(default_factory=dict, metadata={"row": row})
    return dataclasses.field(default=row.default, metadata={"row": row})


def number(default: float, low: float, high: float, doc: str, **more: Any) -> Any:
    return _field(FieldRow(FieldKind.NUMBER, default, doc, low, high, **{"native": "double", **more}))


def integer(default: int | None, low: int, high: int, doc: str, **more: Any) -> Any:
    return _field(FieldRow(FieldKind.INTEGER, default, doc, low, high, **{"optional": default is None, **more}))


def choice(default: int, choices: Mapping[int, str], doc: str, **more: Any) -> Any:
    return _field(FieldRow(FieldKind.CHOICE, default, doc, choices=choices, **more))


def flag(default: bool, doc: str, **more: Any) -> Any:
    return _field(FieldRow(FieldKind.FLAG, default, doc, **more))


def texts(default: tuple[str, ...], most: int, chars: int, doc: str, **more: Any) -> Any:
    return _field(FieldRow(FieldKind.TEXTS, default, doc, most=most, chars=chars, **more))


EVERY = {"openai": "", "ollama": "", "llamacpp": ""}
MODELFILE = EVERY | {"modelfile": ""}
TGI = {"tgi": ""}
SGLANG = {"sglang": ""}
REPEAT = dict.fromkeys(("ollama", "llamacpp", "modelfile"), "repeat_penalty")
LAST_N = dict.fromkeys(("ollama", "llamacpp", "modelfile"), "repeat_last_n")

PENALTIES, DRY = ChainSampler("penalties", "e"), ChainSampler("dry", "d")
TEMPERATURE = ChainSampler("temperature", "t", anywhere=True)
TOP_N_SIGMA, TOP_K, TYPICAL_P = (
    ChainSampler("top_n_sigma", "s"),
    ChainSampler("top_k", "k"),
    ChainSampler("typ_p", "y"),
)
TOP_P, MIN_P, XTC = ChainSampler("top_p", "p"), ChainSampler("min_p", "m"), ChainSampler("xtc", "x")
ADAPTIVE_P = ChainSampler("adaptive_p", "a", anywhere=True)


@dataclass(frozen=True, slots=True)
class SamplerFields:
    """The fields that the sampler uses unchanged, in the order in which they act."""

    repetition_penalty: float = number(
        1.0, 0.0, 10.0, "divides the positive logits of ids that occurred, and multiplies their negative ones",
        open_low=True, names=EVERY | REPEAT | TGI | SGLANG, native="float", sampler=PENALTIES, off=1.0,
        recommended=True,
        flag="Above 1: penalize tokens of the prompt and the output.",
    )  # fmt: skip
    repetition_last_n: int = integer(
        -1, -1, INT32, "how many of the last ids the repetition penalty considers, prompt included; -1: all",
        names=LAST_N, native="int64_t",
    )  # fmt: skip
    frequency_penalty: float = number(
        0.0, -2.0, 2.0, "subtracted from the logit of an id, as often as it is in the output",
        names=MODELFILE | TGI | SGLANG, native="float", sampler=PENALTIES, off=0.0,
        flag="Above 0: penalize output tokens by their count.",
    )  # fmt: skip
    presence_penalty: float = number(
        0.0, -2.0, 2.0, "subtracted once from the logit of an id that is in the output",
        names=MODELFILE | SGLANG, native="float", sampler=PENALTIES, off=0.0,
        flag="Above 0: penalize tokens that the output contains.",
    )  # fmt: skip
    occurrence_last_n: int = integer(
        0, -1, INT32,
        "how many of the last ids frequency and presence penalty consider, prompt included; -1: all, 0: the output",
        names=LAST_N, own=tuple(LAST_N), native="int64_t",
    )  # fmt: skip
    dry_multiplier: float = number(
        0.0, 0.0, 1000.0, "DRY: penalty of a repetition of the allowed length; 0: off",
        names=EVERY, sampler=DRY, off=0.0,
    )  # fmt: skip
    dry_base: float = number(1.75, 1.0, 1000.0, "DRY: factor of the penalty for each further id", names=EVERY)
    dry_allowed_length: int = integer(
        2, 0, INT32, "DRY: length of repetitions that are not penalized", names=EVERY, native="int64_t"
    )
    dry_penalty_last_n: int = integer(
        64, -1, INT32, "DRY: how many of the last ids are searched; -1: all", names=EVERY, native="int64_t"
    )
    temperature: float = number(
        1.0, 0.0, 100.0, "divides the logits: lower is more predictable, below 1e-5 the best token is taken",
        names=MODELFILE | TGI | {"anthropic": ""} | SGLANG, sampler=TEMPERATURE, off=1.0, recommended=True,
    )  # fmt: skip
    top_n_sigma: float = number(
        -1.0, -1.0, 1000.0, "keeps logits within this many standard deviations of the best; 0 or below: all",
        names=EVERY, sampler=TOP_N_SIGMA, off=-1.0,
    )  # fmt: skip
    top_k: int = integer(
        0, -1, INT32, "keeps this many of the best tokens; 0 or -1: all",
        names=MODELFILE | TGI | {"anthropic": ""} | SGLANG, native="int32_t", sampler=TOP_K, off=0, recommended=True,
        flag="Keep the k most probable tokens; 0: all.",
    )  # fmt: skip
    typical_p: float = number(
        1.0, 0.0, 1.0, "keeps the tokens of most typical surprise up to this sum of probabilities; 1: all",
        open_low=True, names=MODELFILE | TGI, sampler=TYPICAL_P, off=1.0,
    )  # fmt: skip
    top_p: float = number(
        1.0, 0.0, 1.0, "keeps the most probable tokens up to this sum of probabilities; 1: all", open_low=True,
        names=MODELFILE | TGI | {"anthropic": ""} | SGLANG, sampler=TOP_P, off=1.0, recommended=True,
        flag="Keep the most probable tokens up to this sum of probabilities.",
    )  # fmt: skip
    min_p: float = number(
        0.0, 0.0, 1.0, "keeps tokens of at least this share of the best one's probability; 0: all",
        names=MODELFILE | SGLANG, sampler=MIN_P, off=0.0, recommended=True,
        flag="Keep tokens of at least this share of the best one's probability.",
    )  # fmt: skip
    xtc_probability: float = number(
        0.0, 0.0, 1.0, "XTC: the probability that it applies; 0: never", names=EVERY, sampler=XTC, off=0.0
    )
    xtc_threshold: float = number(
        0.1, 0.0, 1.0, "XTC: of tokens with at least this probability, only the least probable stays", names=EVERY
    )
    dynatemp_range: float = number(
        0.0, 0.0, 100.0, "dynamic temperature by entropy: how far it goes below and above temperature; 0: off",
        names=EVERY, sampler=TEMPERATURE, off=0.0,
    )  # fmt: skip
    dynatemp_exponent: float = number(
        1.0, 0.0, 100.0, "dynamic temperature: exponent of the normalized entropy", names=EVERY
    )
    mirostat: int = choice(
        0, {0: "off", 2: "version 2"}, "Mirostat: keeps the surprise of tokens near a target",
        names=MODELFILE, native="int32_t", off=0, carries=True,
    )  # fmt: skip
    mirostat_tau: float = number(5.0, 0.0, 100.0, "Mirostat: target of the surprise, in bits", names=MODELFILE)
    mirostat_eta: float = number(0.1, 0.0, 10.0, "Mirostat: learning rate", names=MODELFILE)
    adaptive_target: float = number(
        -1.0, -1.0, 1.0, "adaptive-p: prefers tokens of about this probability; below 0: off",
        names=EVERY, sampler=ADAPTIVE_P, off=-1.0, carries=True,
    )  # fmt: skip
    adaptive_decay: float = number(
        0.9, 0.0, 0.99, "adaptive-p: share of the history that each token keeps", names=EVERY
    )


@dataclass(frozen=True, slots=True)
class RequestFields(SamplerFields):
    """All fields of a request to generate, except the structure of its output."""

    n: int = integer(
        1, 1, MAX_N, "number of choices", where="scheduler",
        names=EVERY | {"llamacpp": "n_cmpl", "tgi": "best_of"} | SGLANG,
        own=("openai", "ollama", "llamacpp", "tgi", "sglang"),
    )  # fmt: skip
    dry_sequence_breakers: tuple[str, ...] = texts(
        ("\n", ":", '"', "*"),
        MAX_BREAKERS,
        MAX_BREAKER_CHARS,
        "DRY: texts that no repetition extends across",
        names=EVERY,
    )
    bad_words: tuple[str, ...] = texts(
        (),
        MAX_BAD_WORDS,
        MAX_BAD_WORD_CHARS,
        "texts that must not occur in the output",
        names={"openai": "", "ollama": ""},
    )
    logit_bias: dict[int, float] = _field(
        FieldRow(
            FieldKind.BIAS,
            {},
            "added to the logits",
            -100,
            100,
            most=MAX_LOGIT_BIAS,
            names=EVERY | SGLANG,
            own=("llamacpp",),
        )
    )
    seed: int | None = integer(
        None, -(2**63), 2**64 - 1, "the same seed gives the same answer; drawn and returned if absent",
        names=MODELFILE | TGI | {"anthropic": "", "sglang": "sampling_seed"},
    )  # fmt: skip
    max_tokens: int | None = integer(
        16, 1, INT32, "maximum tokens of a choice; by default a chat has what the context leaves",
        optional=True, where="scheduler",
        names=dict.fromkeys(("openai", "anthropic"), "") | dict.fromkeys(("ollama", "modelfile"), "num_predict")
        | {"llamacpp": "n_predict", "tgi": "max_new_tokens", "sglang": "max_new_tokens"},
        own=("openai", "ollama", "llamacpp", "anthropic", "tgi", "sglang"),
    )  # fmt: skip
    min_tokens: int = integer(
        0, 0, INT32, "minimum tokens of a choice: no stop id is sampled before them",
        names={"openai": "", "ollama": "", "sglang": "min_new_tokens"},
    )  # fmt: skip
    stop: tuple[str, ...] = texts(
        (), MAX_STOP_STRINGS, MAX_STOP_CHARS, "texts that end a choice", alone=True,
        where="front", names=MODELFILE | TGI | {"anthropic": "stop_sequences"} | SGLANG, own=("anthropic",),
    )  # fmt: skip
    stop_token_ids: tuple[int, ...] = _field(
        FieldRow(FieldKind.IDS, (), "ids that end a choice", names={"openai": ""} | SGLANG, where="scheduler")
    )
    include_stop_str_in_output: bool = flag(
        False, "the stop string stays in the text", where="front", names={"openai": "", "sglang": "no_stop_trim"}
    )
    ignore_eos: bool = flag(
        False, "the end-of-sequence id does not end a choice", where="scheduler", names=EVERY | SGLANG
    )
    skip_special_tokens: bool = flag(
        True, "leave special tokens out of the text", where="front", names={"openai": "", "sglang": ""}
    )
    logprobs: int | None = integer(
        None, 0, MAX_LOGPROBS, "log-probabilities of the sampled token and of this many of the best",
        names=EVERY | {"llamacpp": "n_probs", "tgi": "top_n_tokens"}, own=("openai", "ollama", "llamacpp", "tgi"),
    )  # fmt: skip
    prompt_logprobs: int | None = integer(
        None,
        0,
        MAX_LOGPROBS,
        "log-probabilities of the tokens of the prompt, and of this many of the best at each place",
        names={"openai": ""},
        own=("openai",),
    )
    thinking_token_budget: int | None = integer(
        None, 0, INT32, "reasoning tokens after which the end of reasoning is forced",
        where="grammar", names={"openai": "", "ollama": ""}, flag="Maximum reasoning tokens in a chat.",
    )  # fmt: skip


def _rows(table: type) -> tuple[FieldRow, ...]:
    return tuple(f.metadata["row"]._replace(name=f.name) for f in dataclasses.fields(table))


SAMPLER: tuple[FieldRow, ...] = _rows(SamplerFields)  # those that the sampler uses unchanged
FIELDS: tuple[FieldRow, ...] = _rows(RequestFields)  # all of them
LISTS = tuple(row.name for row in FIELDS if row.kind in (FieldKind.TEXTS, FieldKind.IDS))
CARRYING = tuple((row.name, row.off) for row in SAMPLER if row.carries)

# The structure's members: the larger types first, so that there are no gaps between them.
_TYPES = ("double", "int64_t", "float", "int32_t")
NATIVE: tuple[FieldRow, ...] = tuple(row for kind in _TYPES for row in SAMPLER if row.native == kind)
# Differs if a library was built for other members; 31 bits.
LAYOUT = zlib.crc32(" ".join(f"{row.native} {row.name};" for row in NATIVE).encode()) >> 1


@cache
def fields_of(dialect: str) -> Mapping[str, FieldRow]:
    """The fields that a dialect has and converts like all others, by their names there."""
    rows = (row for row in FIELDS if dialect in row.names and dialect not in row.own)
    return MappingProxyType({row.names[dialect] or row.name: row for row in rows})


def names_in(dialect: str) -> dict[str, str]:
    """The names of all fields that a dialect has: ours -> theirs."""
    return {row.name: row.names[dialect] or row.name for row in FIELDS if dialect in row.names}
