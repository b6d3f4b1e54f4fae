"""Pads kvasir-mini to the cost of a larger model: the same text, many more bytes and products.

    python -m benchmarks.padded /tmp/padded                        model.gguf in Q4_K_M: the bytes of Qwen3-0.6B
    python -m benchmarks.padded /tmp/padded --draft DIR --eagle3 DIR --mtp DIR
                                                                   and the drafters of recipes.mini.draft.train, padded
    python -m benchmarks.padded /tmp/padded --kind Q8_0 --layers 8 --safetensors

Rows of the hidden state get further columns that stay zero, and norms the factor that undoes their larger width. More
heads and channels of the MLP have random weights, but zeros in o_proj and down_proj drop what they compute. More layers
come after the model's own and add nothing, so an EAGLE-3 head reads the same rows by the same numbers. Every weight is
read and multiplied: no kernel looks for zeros.

A layer has the sizes of Qwen3-0.6B but for its MLP, which is wider in place of that model's large vocabulary. A draft
model is padded to a tenth of the model's bytes; heads get the width and the MLP of the model's layers.

It writes `model.gguf`, `draft.gguf`, `mtp.gguf` (the model with its layer for multi-token prediction), and in bfloat16
the folders `eagle3` and, with --safetensors, `model`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.peers import random_gguf
from benchmarks.peers.random_gguf import Tensor
from kvasir.quant.gguf_types import GGMLType
from tests.program.mini import FOLDER, add_sizes, add_vocabulary
from tests.quant.kquants import quantize

KINDS = ("Q4_K_M", "Q8_0", "BF16")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
NORM, JOIN = ("norm", "enorm", "hnorm"), ("fc", "eh_proj")
TABLE, WRITER = ("embed_tokens", "lm_head"), ("o_proj", "down_proj")
DRAFTING = "num_nextn_predict_layers"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a decoder; heads keep their size and number per key/value head."""

    hidden: int
    inner: int
    layers: int
    kv_heads: int

    @staticmethod
    def of(config: Mapping[str, Any]) -> Sizes:
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads")
        return Sizes(*(config[name] for name in names))

    def check(self, config: Mapping[str, Any], kind: str) -> None:
        """Raises ValueError if a model does not fit in, or if rows are not whole blocks."""
        for name in self.__slots__:
            if getattr(self, name) < (least := getattr(Sizes.of(config), name)):
                raise ValueError(f"{name} is {getattr(self, name)}: the model has {least}, and padding adds to it")
        block = 256 if kind == "Q4_K_M" else 32
        rows = {"hidden": self.hidden, "inner": self.inner, "query heads": _heads(config, self) * config["head_dim"]}
        for name, width in rows.items():
            if width % block:
                raise ValueError(f"{name}: rows of {width} are not whole blocks of {block}, which {kind} needs")


MODEL = Sizes(hidden=1024, inner=5632, layers=28, kv_heads=16)
DRAFT = Sizes(hidden=512, inner=2560, layers=12, kv_heads=8)


@dataclass(frozen=True, slots=True)
class Padded:
    """A weight of the wider model. pieces: values of the model with the row and the column where they begin. rest: what
    the others are: "zero", "one" or "random", with variance 1 / row length."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, int, np.ndarray], ...]
    rest: str

    def dense(self) -> np.ndarray:
        """The values in float32."""
        if self.rest == "random":
            found = self._random().standard_normal(self.shape, np.float32) * np.float32(self.shape[-1] ** -0.5)
        else:
            found = np.full(self.shape, float(self.rest == "one"), np.float32)
        for row, column, values in self.pieces:
            place = (slice(row, row + len(values)), slice(column, column + values.shape[-1]))[: values.ndim]
            found[place] = values
        return found

    def blocks(self, kind: GGMLType) -> np.ndarray:
        """The rows of a matrix in GGML type `kind`: uint8 [rows, row bytes]. Blocks of the model's values are as if it
        had been quantized alone, zeros in the rest of a last block."""
        count = self.shape[0] * self.shape[1] // kind.block_size
        if self.rest == "random":
            found = random_gguf.blocks(kind, count, self.shape[1] ** -0.5, self._random())
        else:
            found = np.zeros(count, kind.layout)
        rows = found.view(np.uint8).reshape(self.shape[0], -1)
        for row, column, values in self.pieces:
            whole = np.pad(values, ((0, 0), (0, -values.shape[1] % kind.block_size)))
            own, begin = quantize(whole, kind.name), column // kind.block_size * kind.type_size
            rows[row : row + len(own), begin : begin + own.shape[1]] = own
        return rows

    def _random(self) -> np.random.Generator:
        return np.random.default_rng(zlib.crc32(self.name.encode()))


# --- padding ----------------------------------------------------------------------------------------


def padded_config(config: Mapping[str, Any], to: Sizes) -> dict[str, Any]:
    """The squares of a row, whose mean a norm adds its epsilon to, are spread over more columns."""
    return {
        **config,
        "hidden_size": to.hidden,
        "intermediate_size": to.inner,
        "num_hidden_layers": to.layers,
        "num_attention_heads": _heads(config, to),
        "num_key_value_heads": to.kv_heads,
        "rms_norm_eps": config["rms_norm_eps"] * config["hidden_size"] / to.hidden,
    }


def _heads(config: Mapping[str, Any], to: Sizes) -> int:
    return config["num_attention_heads"] // config["num_key_value_heads"] * to.kv_heads


def padded(tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], to: Sizes) -> Iterator[Padded]:
    """The weights of a Llama with or without layers for multi-token prediction, or of an EAGLE-3 head.

    tensors: the float weights as in a checkpoint.
    """
    own = Sizes.of(config)
    for name, values in tensors.items():
        yield _weight(_renumbered(name, own.layers, to.layers), values, config, to)
    first = {n: v for n, v in tensors.items() if n.startswith("model.layers.0.")}
    for layer in range(own.layers, to.layers if first else 0):
        for name, values in first.items():
            weight = _weight(name.replace(".0.", f".{layer}.", 1), values, config, to)
            yield Padded(weight.name, weight.shape, (), weight.rest)


def _renumbered(name: str, own: int, layers: int) -> str:
    """Layers for multi-token prediction come after all others."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
    if found is None or int(found[1]) < own:
        return name
    return f"model.layers.{int(found[1]) - own + layers}.{found[2]}"


def _weight(name: str, values: np.ndarray, config: Mapping[str, Any], to: Sizes) -> Padded:
    own, role = config["hidden_size"], name.split(".")[-2]
    if role.endswith(NORM):
        scaled = values * np.float32((own / to.hidden) ** 0.5)
        return Padded(name, (to.hidden,), ((0, 0, scaled),), "one")
    heads = {"q_proj": _heads(config, to), "k_proj": to.kv_heads, "v_proj": to.kv_heads}
    if role in WRITER:
        columns = to.inner if role == "down_proj" else _heads(config, to) * config["head_dim"]
        return Padded(name, (to.hidden, columns), ((0, 0, values),), "zero")
    if role in TABLE:
        rows = len(values)
    elif role in JOIN:
        rows = to.hidden
    else:
        rows = heads[role] * config["head_dim"] if role in heads else to.inner
    parts = np.split(values, values.shape[1] // own, axis=1)  # one for each hidden row that it reads
    pieces = tuple((0, place * to.hidden, part) for place, part in enumerate(parts))
    return Padded(name, (rows, len(parts) * to.hidden), pieces, "zero" if role in TABLE + JOIN else "random")


# --- files ------------------------------------------------------------------------------------------


def read(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, torch.Tensor]]:
    """A folder's config, its floats in float32, and its other tensors."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    floats = {name: tensor.float().numpy() for name, tensor in tensors.items() if tensor.is_floating_point()}
    return config, floats, {name: tensor for name, tensor in tensors.items() if name not in floats}


def write_folder(source: Path, to: Sizes, folder: Path) -> Path:
    """A padded checkpoint in bfloat16."""
    config, tensors, others = read(source)
    to.check(config, "BF16")
    folder.mkdir(parents=True, exist_ok=True)
    found = {weight.name: torch.from_numpy(weight.dense()).bfloat16() for weight in padded(tensors, config, to)}
    save_file(found | others, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(padded_config(config, to), indent=2) + "\n")
    for name in TOKENIZER:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    return folder


def write_gguf(source: Path, to: Sizes, path: Path, kind: str) -> Path:
    """A padded Llama with kvasir-mini's tokens. kind: as of `random_gguf.kinds`."""
    config, tensors, _ = read(source)
    to.check(config, kind)
    wide, drafting = padded_config(config, to), config.get(DRAFTING, 0)
    weights = {name: weight for weight in padded(tensors, config, to) for name in [_name(weight.name, to.layers)]}

    def add(writer: gguf.GGUFWriter) -> None:
        add_sizes(writer, wide | {"num_hidden_layers": to.layers + drafting})
        add_vocabulary(writer)
        if drafting:
            writer.add_nextn_predict_layers(drafting)

    def contents(tensor: Tensor, ggml_type: GGMLType) -> Iterable[np.ndarray]:
        if tensor.draw is not None:
            return random_gguf.chunks(tensor, ggml_type)
        return [_paired(weights[tensor.name], config["head_dim"]).blocks(ggml_type)]

    random_gguf.write(path, "llama", add, [_tensor(n, w) for n, w in weights.items()], kind, to.layers, contents)
    return path


def _tensor(name: str, weight: Padded) -> Tensor:
    return Tensor(name, weight.shape, draw=(lambda *_: weight.dense()) if len(weight.shape) == 1 else None)


def _name(name: str, layers: int) -> str:
    """A tensor's name in a GGUF file; those of heads are the same in all architectures."""
    for architecture in (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.GLM4_MOE):
        if found := gguf.get_tensor_name_map(architecture, layers + 1).get_name(name, (".weight",)):
            return found
    raise ValueError(f"{name} has no name in a GGUF file")


def _paired(weight: Padded, head_dim: int) -> Padded:
    """Queries and keys in llama.cpp's order, which turns neighbours where Hugging Face turns halves."""
    if not weight.name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    pieces = tuple(
        (row, column, values.reshape(-1, 2, head_dim // 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape))
        for row, column, values in weight.pieces
    )
    return Padded(weight.name, weight.shape, pieces, weight.rest)


# --- the command ------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="Q4_K_M")
    for name in Sizes.__slots__:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(MODEL, name))
    for name in ("draft", "eagle3", "mtp"):
        parser.add_argument(f"--{name}", type=Path, help=f"folder of kvasir-mini's {name} drafter")
    parser.add_argument("--safetensors", action="store_true", help="the model in bfloat16 as well: 1.3 GB")
    args = parser.parse_args()
    to, out = Sizes(*(getattr(args, name) for name in Sizes.__slots__)), args.folder
    out.mkdir(parents=True, exist_ok=True)
    try:
        to.check(read(FOLDER)[0], args.kind)
        _report(write_gguf, FOLDER, to, out / "model.gguf", args.kind)
        if args.safetensors:
            _report(write_folder, FOLDER, to, out / "model")
        if args.draft:
            _report(write_gguf, args.draft, DRAFT, out / "draft.gguf", args.kind)
        if args.mtp:
            _report(write_gguf, args.mtp, to, out / "mtp.gguf", args.kind)
        if args.eagle3:
            config, _, _ = read(args.eagle3)
            head = Sizes(to.hidden, to.inner, config["num_hidden_layers"], to.kv_heads)
            _report(write_folder, args.eagle3, head, out / "eagle3")
    except ValueError as error:
        parser.error(str(error))
    return 0


def _report(write: Any, source: Path, to: Sizes, path: Path, *more: str) -> None:
    begun = time.monotonic()
    write(source, to, path, *more)
    size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))
    print(f"{path}: {size / 1e6:.1f} MB, {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
