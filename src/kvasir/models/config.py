"""Reads `config.json` and `generation_config.json`: bounded JSON, typed fields, no relevant field ignored.

A model's config class reads its fields through `Fields`, each with a range, and calls `finish()` at the end. An unread
field raises an error if its name suggests that it affects the arithmetic (`attn_logit_softcapping` on a llama, a
window, a multiplier); it is ignored if it is about training, bookkeeping or generation:

    f = Fields(config)
    hidden = f.integer("hidden_size", 1, MAX_WIDTH)
    theta, scaling = read_rope(f, max_position)  # kvasir.models.rope
    f.finish()

Format: https://huggingface.co/docs/transformers/main_classes/configuration
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import Repr
from typing import Any

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.fields import FIELDS, FieldKind
from kvasir.json_file import read_json_object

MAX_CONFIG_BYTES = 4 << 20

# Upper limits of a config's values: above any published model, and low enough that a typo cannot exhaust memory.
MAX_WIDTH = 1 << 18
MAX_LAYERS = 1024
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_VOCAB = 1 << 22
MAX_POSITIONS = 1 << 26
MAX_EOS_IDS = 64
MAX_SUPPRESSED = 1024
MAX_EXPERTS = 1024

_REQUIRED: Any = object()
_REPR = Repr()


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Fields that do not affect the forward pass.
HARMLESS = frozenset(
    _words("""
    architectures model_type auto_map torch_dtype dtype tokenizer_class torchscript attn_implementation
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id
    use_cache chunk_size_feed_forward keys_to_ignore_at_inference initializer_range initializer_factor
    gradient_checkpointing pretraining_tp n_ctx id2label label2id num_labels problem_type finetuning_task
    task_specific_params output_attentions output_hidden_states return_dict is_encoder_decoder is_decoder
    matryoshka_dimensions
    """)
)
# A field is assumed to affect the arithmetic if a word of its name begins with one of these.
_MEANING = _words("""
    attention attn qk kv query key value head sink causal window sliding rope rotary alibi position embed embd
    tie vocab hidden intermediate layer norm rms eps bias act activation mlp ffn dense gate residual parallel
    softcap capping logit scale scaling multiplier mup clip dim size expert moe router conv ssm mamba mtp
    quant compress lora adapter
    """)


@dataclass(slots=True)
class Fields:
    """A config's fields, read one by one with range checks. `null` counts as absent, as in transformers.

    The getters raise ModelFileError with the field's name, its value and the expected range.
    """

    values: Mapping[str, Any]
    where: str = "config.json"
    read: set[str] = field(default_factory=set)

    def get(self, name: str) -> Any:
        """The raw value (None if absent). Marks the field as read."""
        self.read.add(name)
        return self.values.get(name)

    def integer(self, name: str, low: int, high: int, default: int = _REQUIRED) -> int:
        """An integer in [low, high]; `default` if the field is absent."""
        return self._checked(name, default, lambda v: type(v) is int and low <= v <= high,
                             f"an integer in [{low}, {high}]")  # fmt: skip

    def number(self, name: str, low: float, high: float, default: float = _REQUIRED) -> float:
        """A number in [low, high], as a float; `default` if the field is absent."""
        value = self._checked(name, default, lambda v: is_number(v) and low <= v <= high,
                              f"a number in [{low:g}, {high:g}]")  # fmt: skip
        return float(value)

    def flag(self, name: str, default: bool = _REQUIRED) -> bool:
        """A boolean; `default` if the field is absent."""
        return self._checked(name, default, lambda v: isinstance(v, bool), "true or false")

    def choice(self, name: str, options: Sequence[str], default: str = _REQUIRED) -> str:
        """One of `options`. Raises UnsupportedModel for any other string."""
        value = self._checked(name, default, lambda v: isinstance(v, str), "a string")
        if value not in options:
            raise UnsupportedModel(f"{self.where}: {name} is {value!r}", f"supported: {', '.join(options)}")
        return value

    def expect(self, name: str, value: Any) -> None:
        """Raises UnsupportedModel unless the field is absent or equals `value`, the only value that this model's code
        supports."""
        given = self.get(name)
        if given is not None and given != value:
            raise UnsupportedModel(f"{self.where}: {name} is {given!r}", f"this model's code supports only {value!r}")

    def finish(self) -> None:
        """Raises UnsupportedModel for a quantized checkpoint or an unread field that affects the arithmetic."""
        for name in ("quantization_config", "compression_config"):
            if self.values.get(name) is not None:
                self._refuse_quantization(name)
        if "is_causal" not in self.read:
            self.expect("is_causal", True)  # false changes what is computed, too
        for name, value in self.values.items():
            if name not in self.read and not _neutral(value) and affects_arithmetic(name):
                raise UnsupportedModel(
                    f"{self.where}: the field {name} = {_short(value)} is unknown for this model",
                    "it may change what is computed, so it is not ignored; see docs/howto/add-a-model.md",
                )

    def _refuse_quantization(self, name: str) -> None:
        value = self.values[name]
        method = value.get("quant_method") if isinstance(value, dict) else None
        raise UnsupportedModel(
            f"{self.where}: {name} selects the weight format {_short(method or value)}",
            "use the unquantized checkpoint or a GGUF file of the model",
        )

    def _checked(self, name: str, default: Any, ok: Callable[[Any], bool], expected: str) -> Any:
        value = self.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ModelFileError(f"{self.where}: the field {name} is missing", f"expected {expected}")
            return default
        if not ok(value):
            raise ModelFileError(f"{self.where}: {name} is {_short(value)}", f"expected {expected}")
        return value


def inner_object(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A copy of the object `name` of a config.json, empty if it is absent. Raises ModelFileError for other values."""
    value = config.get(name)
    if _neutral(value):
        return {}
    if not isinstance(value, Mapping):
        raise ModelFileError(f"config.json: {name} is {_short(value)}", "expected an object")
    return dict(value)


def is_number(value: Any) -> bool:
    """Whether the value is a finite int or float within the range of a float64; a bool is not a number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _neutral(value: Any) -> bool:
    """Whether the value enables nothing: null, false, 0, or an empty list, object or string."""
    return value is None or value is False or value in (0, "", [], {})


def affects_arithmetic(name: str) -> bool:
    """Whether a field of this name is refused unless it is read."""
    if name in HARMLESS or name.startswith("_") or "dropout" in name or "pdrop" in name:
        return False
    return any(word.startswith(_MEANING) for word in re.split(r"[._]", name.lower()))


def quoted_value(value: Any) -> str:
    """A value of a config for messages."""
    return _short(value)


def _short(value: Any) -> str:
    """The value's repr for messages, at most 80 characters; a long value is never formatted in full."""
    text = _REPR.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# --- files ------------------------------------------------------------------------------------------


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """The `config.json` in a model folder (or the file at `path`): an object of bounded size and depth."""
    path = Path(path)
    return read_json_object(path / "config.json" if path.is_dir() else path, MAX_CONFIG_BYTES)


# --- generation -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The generation settings that a model's authors recommend. `sampling` uses the names of `SamplingParams`."""

    eos_ids: tuple[int, ...] = ()
    sampling: dict[str, float] = field(default_factory=dict)
    suppressed: tuple[int, ...] = ()  # never sampled


def read_generation_config(path: str | Path, config: Mapping[str, Any] | None = None) -> GenerationDefaults:
    """Reads the `generation_config.json` of a folder, if present. config: the model's own, for its EOS ids.

    As in transformers, its `eos_token_id` overrides the one in config.json, and an explicit `do_sample: false` discards
    its sampling values. Raises ModelFileError for values out of range, UnsupportedModel for ids that are suppressed at
    the first position only.
    """
    path = Path(path) / "generation_config.json"
    values = read_json_object(path, MAX_CONFIG_BYTES) if path.exists() else {}
    f = Fields(values, path.name)
    config = config or {}
    text = config.get("text_config")  # of a multimodal model
    given = (f, Fields(config), Fields(text if isinstance(text, Mapping) else {}))
    eos_ids = next((ids for ids in map(read_eos_ids, given) if ids), ())
    suppressed = _read_ids(f, "suppress_tokens", MAX_SUPPRESSED)
    if first := _read_ids(f, "begin_suppress_tokens", MAX_SUPPRESSED):
        raise UnsupportedModel(
            f"{f.where}: begin_suppress_tokens is {_short(list(first))}: ids that are not sampled first",
            "supported: suppress_tokens; without the field, these ids may come first",
        )
    if not f.flag("do_sample", True):
        return GenerationDefaults(eos_ids, suppressed=suppressed)
    sampling: dict[str, float] = {}
    for row in FIELDS:
        if row.recommended and f.get(row.name) is not None:
            low, high = row.low, row.high
            if row.kind is FieldKind.INTEGER:
                sampling[row.name] = f.integer(row.name, int(low), int(high))
            else:
                sampling[row.name] = f.number(row.name, low, high)
    return GenerationDefaults(eos_ids, sampling, suppressed)


def read_eos_ids(f: Fields) -> tuple[int, ...]:
    """The ids in `eos_token_id`, which is one id or a list of ids. Drops duplicates and keeps the order."""
    return _read_ids(f, "eos_token_id", MAX_EOS_IDS)


def _read_ids(f: Fields, name: str, most: int) -> tuple[int, ...]:
    value = f.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > most or any(type(i) is not int or not 0 <= i < MAX_VOCAB for i in ids):
        raise ModelFileError(f"{f.where}: {name} is {_short(value)}", f"expected a token id or at most {most} of them")
    return tuple(dict.fromkeys(ids))


# --- windows ----------------------------------------------------------------------------------------


def read_layer_windows(f: Fields, num_layers: int) -> tuple[int, ...]:
    """The sliding window of each layer in tokens, 0 for full attention, from the fields of the Qwen families.

    Without `layer_types`, the layers from `max_window_layers` on have a window. All windows are 0 unless
    `use_sliding_window` is set.
    """
    use = f.flag("use_sliding_window", False)
    first = f.integer("max_window_layers", 0, MAX_LAYERS, 28)
    size = f.integer("sliding_window", 1, MAX_POSITIONS, 4096)
    slides = read_sliding_layers(f, num_layers)
    if slides is None:
        slides = tuple(i >= first for i in range(num_layers))
    return tuple(size if use and sliding else 0 for sliding in slides)


def read_sliding_layers(f: Fields, num_layers: int) -> tuple[bool, ...] | None:
    """Which layers have a sliding window, from `layer_types`; None if the field is absent."""
    kinds = f.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelFileError(f"{f.where}: layer_types is {_short(kinds)}", f"expected a list of {num_layers} names")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModel(f"{f.where}: layer_types names {kind!r}",
                                   "supported: full_attention, sliding_attention")  # fmt: skip
    return tuple(kind == "sliding_attention" for kind in kinds)
