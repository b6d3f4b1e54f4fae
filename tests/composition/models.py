"""The models of the matrix: kvasir-mini, itself as a GGUF file of mixed types, and a tiny random one of each family."""

from __future__ import annotations

import atexit
import os
import re
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from kvasir.config import EngineOptions
from kvasir.engine.build import build_core
from kvasir.engine.load_text import load_text
from kvasir.errors import ConfigError
from kvasir.models.config import read_hf_config
from kvasir.models.registry import model_class_for
from kvasir.text.tokenizer import Tokenizer
from kvasir.weights.find import find_model
from tests.engine.cores import CONFIGS, random_model
from tests.models import dflash_heads
from tests.models.families import SWITCHED
from tests.program.mini import TEXT, write_mini

# Of the families with other settings some stand for all: one with sinks, one with experts chosen by sigmoid scores and
# biases, one with latent attention.
_OTHERS = {"bert", "qwen3-5-tiled", *SWITCHED} - {"gpt-oss", "glm4-moe", "deepseek-v2"}
GENERATING = [name for name, config in CONFIGS.items() if config["vocab_size"] < 10000 and name not in _OTHERS]
_GGUF = "kvasir-mini Q4_K_M"
_numbers = count()


def options(name: str) -> dict[str, Any]:
    """Options of an engine for it."""
    if name == "kvasir-mini":
        return {"model": name}
    if name == _GGUF:
        return {"model": _gguf(), "tokenizer": "kvasir-mini"}
    return {"model": _random(name)}


@cache
def tokenizer(model: str, tokenizer: str | None) -> Tokenizer | None:
    """The tokenizer of an engine with these options: one for all runs, since each starts its own processes."""
    return load_text(EngineOptions(model=model, tokenizer=tokenizer))[0]


def architecture(name: str) -> str:
    """As ModelInfo has it."""
    return model_class_for(CONFIGS[name] if name in CONFIGS else CONFIGS["llama"]).__name__


@cache
def block_drafter(model: str, variant: str) -> str:
    """A random drafter of blocks for it (a variant of tests.models.dflash_heads), which reads the rows after its first
    layer."""
    own = read_hf_config(config_file("kvasir-mini" if model.endswith(".gguf") else model))
    config = model_class_for(own).Config.from_hf(own)
    s = dflash_heads.settings(
        variant, target=config.width, vocab=config.vocab_size, draft=config.vocab_size, mask=config.vocab_size - 1,
        ids=(0,), layers=1, embed=True, head=True,
    )  # fmt: skip
    written = {**dflash_heads.config_of(s, variant), "num_target_layers": config.num_layers}
    return str(dflash_heads.write(_home() / f"drafter {next(_numbers)}", written, dflash_heads.tensors_of(s)))


def config_file(model: str) -> Path:
    found = find_model(model).config
    assert found is not None, f"{model} has no config.json"
    return found


def streamed(options: dict[str, Any]) -> dict[str, Any]:
    """The least memory for the weights of an engine with these options, as its refusal of too little names it. The
    layers are packed into a folder of the matrix."""
    os.environ["KVASIR_PACKED"] = str(_home() / "packed")
    names = "model", "executor", "dtype", "quantize", "speculate", "threads", "tensor_parallel", "pipeline_parallel"
    return {"weights_memory": _least_memory(tuple((name, options[name]) for name in names if name in options))}


@cache
def _least_memory(options: tuple[tuple[str, Any], ...]) -> int:
    with pytest.raises(ConfigError, match=r"too few|only the program executor") as refused:
        build_core(EngineOptions(**dict(options), weights_memory=1)).close()
    found = re.search(r"needs (\d+) KiB", str(refused.value))
    return int(found[1]) << 10 if found else 1


def fresh_folder() -> str:
    """Where there is none yet; gone with the others at the end."""
    return str(_home() / f"folder {next(_numbers)}")


@cache
def _gguf() -> str:
    """As llama.cpp mixes Q4_K_M: half of the value and down matrices have six bits. The table stays in F16."""

    def kind(name: str) -> str:
        if "embd" in name:
            return "F16"
        return "Q6_K" if name.startswith(("blk.0.", "blk.2.")) and ("attn_v" in name or "ffn_down" in name) else "Q4_K"

    return str(write_mini(_home() / "mini.gguf", kind))


@cache
def _random(name: str) -> str:
    folder = _home() / name
    folder.mkdir()
    random_model(name, folder)
    _tokenizer(CONFIGS[name]["vocab_size"]).save(str(folder / "tokenizer.json"))
    return str(folder)


@cache
def _tokenizer(vocab_size: int) -> Any:
    """Every byte and a few pairs of them, so that tokens are halves of characters too."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([TEXT], trainer)
    return made


@cache
def _home() -> Path:
    folder = TemporaryDirectory(prefix="kvasir-composition-")
    atexit.register(folder.cleanup)
    return Path(folder.name)
