"""Measures published weight formats of safetensors against Q4_K_M of the same shape, in the same run.

    python -m benchmarks.formats                                  all formats: minutes each
    python -m benchmarks.formats --only awq --only nf4 --rounds 3
    python -m benchmarks.formats --quantize q8                    the embedding and head of unquantized ones in 8 bits
    python -m benchmarks.formats --layers 4                       a quick look

The models have the shape of Qwen3-0.6B and random weights, the same in every layer. Q4_K_M has its head in 6 bits, as
llama.cpp mixes it; published formats leave the embedding, which is the head, too, in bfloat16, which is most of what
decoding reads of this small shape: --quantize q8 compares the layers. A round measures the reference and the format one
after the other, every second round in the other order: tokens per second of one greedy request (decode), and of its
prompt of 512 ids (prefill). The medians of the ratios should be at least 0.9, of NF4 0.6.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import shapes
from benchmarks.peers import random_gguf
from benchmarks.peers.random_gguf import Tensor, matrix, norm
from kvasir.cli.bench.probe import ForeignLoad
from kvasir.cli.machine import machine_facts, software_facts
from kvasir.cli.simulate import report
from kvasir.config import EngineOptions
from kvasir.engine.build import build_core
from kvasir.engine.core import EngineCore
from kvasir.types import Request, SamplingParams
from tests.weights.published.encode import FORMATS, write

REFERENCE = "Q4_K_M"
PROMPT, READ, TOKENS = 32, 512, 64
AIMS = {"nf4": 0.6, "nf4-nested": 0.6}
AIMED = ("awq", "gptq", "w4a16", "mlx-4", "mxfp4", *AIMS)  # the others are measured without an aim
Pair = tuple[float, float]  # tokens per second: decode, prefill


# --- models -----------------------------------------------------------------------------------------


def config_of(layers: int) -> dict[str, Any]:
    return {**shapes.SHAPES["qwen3-0.6b"], "num_hidden_layers": layers}


def make_reference(config: dict[str, Any], path: Path) -> str:
    """A GGUF file of random blocks."""
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    tensors: list[Tensor] = [matrix("token_embd", config["vocab_size"], width), *norm("output_norm", width)]
    for layer in range(config["num_hidden_layers"]):
        block = f"blk.{layer}"
        tensors += [*norm(f"{block}.attn_norm", width), *norm(f"{block}.ffn_norm", width)]
        tensors += [*norm(f"{block}.attn_q_norm", head), *norm(f"{block}.attn_k_norm", head)]
        tensors += [matrix(f"{block}.attn_{name}", rows, width) for name, rows in (("q", q), ("k", kv), ("v", kv))]
        tensors += [matrix(f"{block}.attn_output", width, q), matrix(f"{block}.ffn_down", width, inner)]
        tensors += [matrix(f"{block}.ffn_{name}", inner, width) for name in ("gate", "up")]

    def add(writer: Any) -> None:
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(width)
        writer.add_feed_forward_length(inner)
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(head)
        writer.add_value_length(head)
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base(config["rope_theta"])
        writer.add_vocab_size(config["vocab_size"])
        writer.add_tokenizer_model("none")

    random_gguf.write(path, "qwen3", add, tensors, REFERENCE, config["num_hidden_layers"])
    return str(path)


def make_published(config: dict[str, Any], folder: Path, name: str) -> str:
    """A folder of safetensors; a layer's tensors are drawn once and serve for all layers."""
    drawn: dict[str, np.ndarray] = {}
    tensors: dict[str, np.ndarray] = {}
    numbers = np.random.default_rng(0)
    for tensor, shape in shapes.tensor_shapes(config):
        key = tensor.partition("layers.")[2].partition(".")[2] or tensor
        if key not in drawn:
            values = numbers.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
            drawn[key] = values if len(shape) > 1 else np.ones(shape, np.float32)
        tensors[tensor] = drawn[key]
    return str(write(folder, config, tensors, name))


# --- measuring --------------------------------------------------------------------------------------


def timed(core: EngineCore, ids: tuple[int, ...], tokens: int) -> tuple[float, float]:
    """Seconds to the first token and from the first to the last."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens)
    begun = time.perf_counter()
    core.add(Request("r", ids, params, no_cache=True))
    times: list[float] = []
    while core.has_work():
        deltas, now = core.step(), time.perf_counter()
        for delta in deltas:
            if delta.error:
                raise RuntimeError(delta.error)
            times += [now] * len(delta.token_ids)
    return times[0] - begun, times[-1] - times[0]


def speeds(core: EngineCore, seed: int) -> Pair:
    draw = random.Random(seed)
    short, long = (tuple(draw.randrange(1000) for _ in range(count)) for count in (PROMPT, READ))
    return (TOKENS - 1) / timed(core, short, TOKENS)[1], READ / timed(core, long, 1)[0]


def compared(reference: EngineCore, core: EngineCore, rounds: int) -> dict[str, Any]:
    """Median speeds of both, and the medians of the ratios of each round."""
    for warm in (reference, core):
        speeds(warm, 0)
    runs: list[tuple[Pair, Pair]] = []
    for turn in range(rounds):
        order: list[Callable[[], Pair]] = [lambda turn=turn: speeds(reference, turn + 1)]
        order.append(lambda turn=turn: speeds(core, turn + 1))
        if turn % 2:
            own = order[1]()
            runs.append((order[0](), own))
        else:
            runs.append((order[0](), order[1]()))
    found: dict[str, Any] = {"runs": runs}
    for place, what in enumerate(("decode", "prefill")):
        found[what] = median(own[place] for _, own in runs)
        found[f"{what}_reference"] = median(theirs[place] for theirs, _ in runs)
        found[f"{what}_ratio"] = median(own[place] / theirs[place] for theirs, own in runs)
    return found


def built(model: str, args: argparse.Namespace) -> EngineCore:
    options = EngineOptions(
        model=model, threads=args.threads, quantize=args.quantize, max_model_len=2 * READ, speculate="off"
    )
    return build_core(options)


def closed(core: EngineCore) -> None:
    core.close()
    core.runner.close()


def misses(name: str, row: dict[str, Any]) -> bool:
    return name in AIMED and min(row["decode_ratio"], row["prefill_ratio"]) < AIMS.get(name, 0.9)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=FORMATS, help="measure only this format; repeatable")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=shapes.SHAPES["qwen3-0.6b"]["num_hidden_layers"])
    parser.add_argument("--threads", type=int, help="computing threads")
    parser.add_argument("--quantize", choices=("q8", "q4"), help="as of kvasir serve: float matrices")
    parser.add_argument("--dir", type=Path, help="folder for the models (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="folder for the JSON and the plot")
    args = parser.parse_args()
    config, others, found = config_of(args.layers), ForeignLoad(), {}
    if args.dir:
        args.dir.mkdir(parents=True, exist_ok=True)
    print(f"{'format':18} {'decode/s':>9} {'ratio':>6} {'prefill/s':>10} {'ratio':>6}")
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        reference = built(make_reference(config, Path(folder) / f"{REFERENCE}.gguf"), args)
        for name in args.only or FORMATS:
            core = built(make_published(config, Path(folder) / name, name), args)
            row = found[name] = compared(reference, core, args.rounds)
            closed(core)
            mark = "  below the aim" if misses(name, row) else ""
            print(
                f"{name:18} {row['decode']:9.1f} {row['decode_ratio']:6.2f} {row['prefill']:10.1f} "
                f"{row['prefill_ratio']:6.2f}{mark}",
                flush=True,
            )
        closed(reference)
    facts = {"machine": machine_facts(), "software": software_facts(), "quantize": args.quantize or ""}
    print(f"other programs used {others.share():.0%} of the CPU time")
    if args.out:
        report.write(args.out, "formats", {**facts, "layers": args.layers, "formats": found}, lambda f: draw(f, found))
    return int(any(misses(name, row) for name, row in found.items()))


def draw(figure: Any, found: dict[str, Any]) -> None:
    panel = figure.subplots()
    for place, what in enumerate(("decode", "prefill")):
        heights = [row[f"{what}_ratio"] for row in found.values()]
        panel.bar([i + 0.4 * place for i in range(len(found))], heights, 0.4, label=what)
    panel.set_xticks(range(len(found)), list(found), fontsize=7, rotation=30)
    panel.axhline(0.9, color="tab:gray", linestyle="--", linewidth=1)
    panel.set_title(f"speed relative to {REFERENCE}", fontsize=9)
    panel.legend()


if __name__ == "__main__":
    sys.exit(main())
