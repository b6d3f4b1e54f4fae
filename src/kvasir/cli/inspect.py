"""`kvasir inspect`: the contents of a model's files and the memory needed to run it."""

from __future__ import annotations

from typing import Any

from kvasir.cli.model_facts import Needs, Stored, problem_of, read_needs, read_stored
from kvasir.cli.show import bytes_text, count_text, plain, print_json, print_pairs, print_table
from kvasir.cli.streaming_facts import StreamingFacts, read_streaming, streaming_dict, streaming_lines
from kvasir.config import EngineOptions, check
from kvasir.environment import prepare_torch
from kvasir.errors import ConfigError, KvasirError


def prepare() -> None:
    """Prepares the environment for computing; call it before loading a model."""
    prepare_torch()


def run(
    model: str,
    tensors: bool,
    max_model_len: int | None,
    json: bool,
    weights_memory: int | None = None,
    ranks: int = 1,
    stages: int = 1,
) -> None:
    check(EngineOptions(model, tensor_parallel=ranks, pipeline_parallel=stages))
    stored = read_stored(model)
    needs, streaming, problem = None, None, None
    try:
        needs = read_needs(stored.files, max_model_len)
        streaming = read_streaming(stored.files, needs, weights_memory, ranks, stages)
    except ConfigError:
        raise
    except KvasirError as error:
        problem = problem_of(error)
    if json:
        value = as_dict(model, stored, needs, problem, tensors)
        print_json(value | ({"streaming": streaming_dict(streaming)} if streaming else {}))
    else:
        show(model, stored, needs, problem, tensors, streaming)


def as_dict(
    model: str, stored: Stored, needs: Needs | None, problem: dict[str, str] | None, tensors: bool
) -> dict[str, Any]:
    """The facts as plain values; sizes in bytes."""
    files = stored.files
    value: dict[str, Any] = {
        "model": model,
        "format": "gguf" if files.kind == "gguf" else "safetensors",
        "files": [{"path": str(path), "bytes": path.stat().st_size} for path in files.weights],
        "architecture": stored.architecture,
        "supported": problem is None,
        "problem": problem,
        "parameters": stored.parameters,
        "weight_bytes": stored.nbytes,
        "types": [
            {"type": name, "tensors": n, "parameters": p, "bytes": b, "share": b / max(stored.nbytes, 1)}
            for name, n, p, b in stored.by_type()
        ],
        "tokenizer": stored.tokenizer,
        "tokenizer_vocabulary": stored.vocabulary,
        "chat_templates": list(stored.templates),
        "metadata": dict(stored.metadata),
    }
    if needs:
        value |= {
            "class": needs.architecture,
            "tasks": list(needs.tasks),
            "vocab_size": needs.vocab_size,
            "max_context": needs.max_context,
            "auto_dtype": needs.auto_dtype,
            "memory": {
                "executor": needs.executor,
                "reason": needs.reason,
                "context": needs.context,
                "by_dtype": {
                    m.dtype: {
                        "weights": m.weights,
                        "kv_per_token": m.kv_token,
                        "kv_of_one_context": m.kv_context,
                        "total": m.weights + m.kv_context,
                    }
                    for m in needs.memory
                },
            },
        }
    if tensors:
        value["tensors"] = [
            {"name": t.name, "type": t.dtype, "shape": list(t.shape), "bytes": t.nbytes} for t in stored.tensors
        ]
    return value


def show(
    model: str,
    stored: Stored,
    needs: Needs | None,
    problem: dict[str, str] | None,
    tensors: bool,
    streaming: StreamingFacts | None = None,
) -> None:
    print_pairs(_summary(model, stored, needs, problem))
    print_table(
        ("type", ">tensors", ">parameters", ">bytes", ">share"),
        (
            (name, n, count_text(p), bytes_text(b), f"{b / max(stored.nbytes, 1):.1%}")
            for name, n, p, b in stored.by_type()
        ),
        "Tensors",
    )
    if needs:
        print_table(
            ("computing in", ">weights", ">KV per token", f">KV of {needs.context} tokens", ">together"),
            (
                (
                    m.dtype + (" (auto)" if m.dtype == needs.auto_dtype else ""),
                    bytes_text(m.weights),
                    bytes_text(m.kv_token),
                    bytes_text(m.kv_context),
                    bytes_text(m.weights + m.kv_context),
                )
                for m in needs.memory
            ),
            f"Memory on the {needs.executor} executor, for one sequence of full length",
        )
        if needs.reason:
            print(f"\nnot the program executor: {plain(needs.reason)}")
    if streaming:
        print("", *streaming_lines(streaming), sep="\n")
    print_table(("key", "value"), stored.metadata.items(), "Metadata")
    if tensors:
        print_table(
            ("tensor", "type", "shape", ">bytes"),
            ((t.name, t.dtype, " x ".join(map(str, t.shape)), bytes_text(t.nbytes)) for t in stored.tensors),
            "All tensors",
        )


def _summary(model: str, stored: Stored, needs: Needs | None, problem: dict[str, str] | None) -> list[tuple[str, Any]]:
    files = stored.files
    container = "GGUF" if files.kind == "gguf" else "safetensors"
    size = bytes_text(sum(path.stat().st_size for path in files.weights))
    first, *more = files.weights
    parts = f"{container} in {len(more) + 1} files" if more else container
    lines: list[tuple[str, Any]] = [
        ("model", model),
        ("files", f"{first}, {parts}, {size}"),
        ("architecture", stored.architecture + (f", runs as {needs.architecture}" if needs else "")),
        ("parameters", count_text(stored.parameters)),
    ]
    if needs:
        lines += [
            ("does", ", ".join(needs.tasks)),
            ("context", f"{needs.max_context} tokens"),
            ("vocabulary", needs.vocab_size),
        ]
    entries = f", {stored.vocabulary} entries" if stored.vocabulary else ""
    lines += [
        ("tokenizer", f"{stored.tokenizer}{entries}" if stored.tokenizer else "none: prompts must be token ids"),
        ("chat template", ", ".join(stored.templates) or "none"),
    ]
    if problem:
        lines += [("NOT SUPPORTED", problem["message"]), ("", problem["next"])]
    return lines
