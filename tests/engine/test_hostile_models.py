"""A model whose files hold any value in any field starts, or is refused with a KvasirError that says what to do.

Small valid models with one or a few fields changed, as folders and as GGUF files, through everything that a start and
`kvasir inspect` read: the text half, the engine's core with its memory and self-test, and the facts that are shown.
"""

import io
import json
from contextlib import redirect_stdout
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kvasir.cli import inspect
from kvasir.cli.model_facts import problem_of, read_needs, read_stored
from kvasir.cli.show import json_text
from kvasir.config import EngineOptions
from kvasir.engine.build import build_core
from kvasir.errors import ConfigError, KvasirError
from kvasir.layers.tensors import tensor_of
from kvasir.models.registry import model_class_for
from kvasir.store.facts import read_details, read_model_info
from kvasir.weights.gguf_split import open_gguf
from kvasir.weights.local import find_local, gguf_chat_templates
from tests.fuzz.loaders import CONFIG_WORDS, GGUF_WORDS, TOKENIZER, _pair
from tests.fuzz.mutate import VALUES, _places
from tests.fuzz.target import scratch
from tests.fuzz.tokenizers import from_folder, from_gguf
from tests.models.families import FAMILIES, config_of
from tests.models.oracle import dummy_source
from tests.weights import _files as write

SHARD = "model-00001-of-00001.safetensors"
INDEX = "model.safetensors.index.json"
EXAMPLES = 12 if settings.get_current_profile_name() == "kvasir" else 250

HOSTILE = (
    st.sampled_from(VALUES)
    | st.integers(-3, 300)
    | st.floats()
    | st.lists(st.sampled_from(VALUES), max_size=3)
    | st.sampled_from(["\ud800", "x" * 5000, [[[[]]]], {"a": [1, {"b": None}]}, ["llama"], 10**400])
)
# Which file, which of its places (modulo their number), and what is put there; or a new key.
CHANGE = st.tuples(st.integers(0, 99), st.integers(0, 999), st.none() | st.sampled_from(CONFIG_WORDS), HOSTILE)


def start(path: Path, executor: str) -> None:
    """The engine's core, as its process builds it."""
    options = EngineOptions(
        str(path), executor=executor, threads=1, device="cpu", kv_memory=16 << 20, max_num_seqs=2, block_size=16
    )
    core = build_core(options)
    core.close()


def show(path: Path) -> None:
    """What `kvasir inspect` prints."""
    stored, needs, problem = read_stored(str(path)), None, None
    try:
        needs = read_needs(stored.files)
    except ConfigError:
        raise
    except KvasirError as error:
        problem = problem_of(error)
        assert problem["message"].isprintable() and problem["next"]
    json_text(inspect.as_dict(str(path), stored, needs, problem, tensors=True)).encode()
    with redirect_stdout(io.StringIO()) as printed:
        inspect.show(str(path), stored, needs, problem, tensors=False)
    printed.getvalue().encode()


def describe(path: Path) -> None:
    """What the store says of it."""
    files = find_local(path)
    read_details(files)
    json.dumps(read_model_info(files, verbose=True)).encode()


def attempt(*steps) -> None:
    """Each by itself: a value, or a refusal in words that can be printed."""
    for step in steps:
        try:
            step()
        except KvasirError as error:
            str(error).encode()
            assert len(str(error)) < 2100 and error.message


# --- folders ----------------------------------------------------------------------------------------

TOKENIZER_CONFIG = {
    "bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "add_bos_token": True,
    "chat_template": "{{ bos_token }}{{ messages[0].content }}", "model_max_length": 256,
    "added_tokens_decoder": {"0": {"content": "<s>", "special": True}},
}  # fmt: skip
GENERATION = {"eos_token_id": [1, 2], "temperature": 0.6, "top_k": 20, "top_p": 0.9, "do_sample": True}


@cache
def valid_folder(name: str) -> tuple[Path, dict[str, Any]]:
    """A folder with the weights and the tokenizer, and its JSON files by their names."""
    config = config_of(name)
    kind = model_class_for(config)
    source = dummy_source(kind(kind.Config.from_hf(config)))
    folder = scratch() / f"hostile-{name}"
    folder.mkdir()
    tensors = {tensor: tensor_of(source.array(tensor)).contiguous() for tensor in source.names()}
    save_file(tensors, folder / SHARD)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return folder, {
        "config.json": config,
        "tokenizer_config.json": TOKENIZER_CONFIG,
        "generation_config.json": GENERATION,
        INDEX: {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, SHARD)},
    }


def changed(values: Any, place: int, key: str | None, value: Any) -> Any:
    root = [deepcopy(values)]
    if key is not None and isinstance(root[0], dict):
        root[0][key] = value
        return root[0]
    places = list(_places(root))
    container, index = places[place % len(places)]
    container[index] = value
    return root[0]


def write_folder(name: str, changes: list[tuple[int, int, str | None, Any]]) -> Path:
    folder, files = valid_folder(name)
    files = dict(files)
    for number, place, key, value in changes:
        file = ("config.json", *files)[number % (len(files) + 1)]  # the config twice as often
        files[file] = changed(files[file], place, key, value)
    for file, value in files.items():
        (folder / file).write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize("executor", ["auto", "eager"])
@pytest.mark.parametrize("name", ["mistral", "phi3-longrope"])
def test_the_valid_folders_start(name, executor):
    start(write_folder(name, []), executor)


@settings(max_examples=EXAMPLES)
@given(st.sampled_from(sorted(FAMILIES)), st.sampled_from(["auto", "eager"]), st.lists(CHANGE, min_size=1, max_size=2))
@example("llama", "auto", [(0, 0, "model_type", ["llama"])])
@example("llama", "auto", [(2, 0, "bos_token", "\ud800")])
@example("llama", "auto", [(4, 0, "weight_map", {"model.norm.weight": "x" * 5000 + ".safetensors"})])
@example("mistral", "auto", [(0, 0, "sliding_window", 1)])
@example("llama", "auto", [(0, 0, "model_type", "\ud800")])
@example("gemma2", "eager", [(0, 0, "sliding_window", 1)])
@example("phi3-longrope", "auto", [(0, 0, "original_max_position_embeddings", 1)])
def test_any_value_in_a_folders_files_is_used_or_refused(name, executor, changes):
    folder = write_folder(name, changes)
    attempt(
        lambda: from_folder(folder), lambda: start(folder, executor), lambda: show(folder), lambda: describe(folder)
    )


@pytest.mark.parametrize("executor", ["auto", "eager"])
@pytest.mark.parametrize(
    "dtype", ["BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "C64", "F6_E2M3", "F4"]
)
def test_weights_of_any_type_are_used_or_refused(dtype, executor):
    folder, _ = valid_folder("llama")
    other = scratch() / f"hostile-{dtype}"
    other.mkdir(exist_ok=True)
    for file in ("config.json", "tokenizer.json"):
        (other / file).write_text((folder / file).read_text() if (folder / file).exists() else "{}")
    (other / "config.json").write_text(json.dumps(config_of("llama")))
    raw = (folder / SHARD).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    (other / "model.safetensors").write_bytes(_retyped(header, raw[8 + length :], "model.norm.weight", dtype))
    with pytest.raises(KvasirError, match=r"model\.norm\.weight"):
        start(other, executor)
    attempt(lambda: show(other))


def _retyped(header: dict[str, Any], data: bytes, name: str, dtype: str) -> bytes:
    """The file with a tensor of another type, of zeros."""
    from kvasir.weights.safetensors import DTYPES

    parts, end = [], 0
    for tensor, entry in header.items():
        if tensor == "__metadata__":
            continue
        first, stop = entry["data_offsets"]
        part = data[first:stop]
        if tensor == name:
            part, entry["dtype"] = bytes(int(np.prod(entry["shape"])) * DTYPES[dtype][0] // 8), dtype
        entry["data_offsets"] = [end, end + len(part)]
        end += len(part)
        parts.append(part)
    return write.safetensors_bytes(header, b"".join(parts))


# --- GGUF -------------------------------------------------------------------------------------------

LAYER = {
    "attn_norm": [32], "attn_q": [32, 32], "attn_k": [16, 32], "attn_v": [16, 32], "attn_output": [32, 32],
    "ffn_norm": [32], "ffn_gate": [48, 32], "ffn_up": [48, 32], "ffn_down": [32, 48],
}  # fmt: skip
METADATA: dict[str, Any] = {
    "general.architecture": "llama", "general.name": "small", "general.file_type": 0,
    "llama.block_count": 2, "llama.context_length": 64, "llama.embedding_length": 32,
    "llama.feed_forward_length": 48, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": 8, "llama.attention.value_length": 8, "llama.rope.dimension_count": 8,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 1e4, "llama.vocab_size": 5,
    "llama.attention.sliding_window": 16, "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0,
    "llama.rope.scaling.original_context_length": 32,
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b", "ab"],
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1], "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.chat_template": "{{ messages[0].content }}",
}  # fmt: skip


@cache
def tensors() -> tuple[list[bytes], bytes]:
    """Their entries, and their float32 numbers."""
    shapes = {"token_embd.weight": [5, 32], "output_norm.weight": [32], "output.weight": [5, 32]}
    for layer in range(2):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in LAYER.items()}
    random, entries, data = np.random.default_rng(0), [], b""
    for name, shape in shapes.items():
        entries.append(write.entry(name, shape[::-1], 0, len(data)))
        data += random.normal(size=shape).astype(np.float32).tobytes()
        data += bytes(-len(data) % 32)
    return entries, data


def write_model(metadata: dict[str, Any]) -> Path:
    pairs = [pair for key, value in metadata.items() if (pair := _pair(key, value))]
    path = scratch() / "hostile.gguf"
    path.write_bytes(write.gguf_bytes(pairs, *tensors()))
    return path


@pytest.mark.parametrize("executor", ["auto", "eager"])
def test_the_valid_file_starts(executor):
    start(write_model(METADATA), executor)


@settings(max_examples=EXAMPLES)
@given(
    st.sampled_from(["auto", "eager"]),
    st.dictionaries(st.sampled_from([*METADATA, *GGUF_WORDS]), HOSTILE, min_size=1, max_size=2),
)
@example("auto", {"llama.attention.sliding_window": 1})
@example("auto", {"llama.rope.scaling.factor": float("nan")})
def test_any_value_in_a_gguf_file_is_used_or_refused(executor, changes):
    path = write_model({**METADATA, **changes})
    attempt(lambda: _read_text(path), lambda: start(path, executor), lambda: show(path), lambda: describe(path))


def _read_text(path: Path) -> None:
    with open_gguf(path) as model:
        gguf_chat_templates(model.metadata)
        from_gguf(model.metadata)
