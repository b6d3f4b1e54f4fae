"""`kvasir inspect --quantize`: the result of load-time quantization for each matrix, and the errors of its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvasir.cli.show import bytes_text, count_text, plain, print_pairs, print_table
from kvasir.cli.waiting import spinner

if TYPE_CHECKING:
    import numpy as np

    from kvasir.ops.linear.packed import PackedMatrix


def quantize_facts(model: str, quantize: str, dtype: str = "auto") -> dict[str, Any]:
    """Loads the model for the program executor. Errors are relative to the RMS of a matrix's original weights; the
    total's mean is over all weights. Raises KvasirError if the model cannot run as a program, or for an unknown
    name."""
    from kvasir.device import detect
    from kvasir.ops.linear.packed import error_of
    from kvasir.runner.load import LoadOptions, load_model
    from kvasir.weights.find import find_model

    tensors: list[dict[str, Any]] = []

    def report(name: str, packed: PackedMatrix, before: np.ndarray) -> None:
        moved = error_of(packed, before)
        tensors.append(
            {
                "name": name,
                "shape": list(packed.shape),
                "format": packed.format,
                "bytes": packed.nbytes,
                "max_error": moved.max,
                "mean_error": moved.mean,
            }
        )

    options = LoadOptions("program", quantize=quantize, threads=detect("cpu").threads)
    with spinner(f"Quantizing {plain(model)}"):
        loaded = load_model(find_model(model), dtype, options=options, report=report)
    size = sum(t["bytes"] for t in tensors)
    return {
        "model": model,
        "class": loaded.architecture,
        "quantize": quantize,
        "file_bytes": loaded.bytes,
        "weight_bytes": dict(loaded.formats),
        "kept_bytes": sum(loaded.formats.values()) - size,
        "tensors": tensors,
        "total": _total(tensors, size),
    }


def _total(tensors: list[dict[str, Any]], size: int) -> dict[str, Any]:
    counts = [t["shape"][0] * t["shape"][1] for t in tensors]
    moved = sum(count * t["mean_error"] for count, t in zip(counts, tensors, strict=True))
    return {
        "tensors": len(tensors),
        "parameters": sum(counts),
        "bytes": size,
        "max_error": max((t["max_error"] for t in tensors), default=0.0),
        "mean_error": moved / max(sum(counts), 1),
    }


def show_quantized(facts: dict[str, Any]) -> None:
    total = facts["total"]
    formats = sorted(facts["weight_bytes"].items(), key=lambda item: -item[1])
    print_pairs(
        [
            ("model", f"{facts['model']}, {facts['class']}, files of {bytes_text(facts['file_bytes'])}"),
            ("matrices", ", ".join(f"{name} {bytes_text(size)}" for name, size in formats)),
            ("of them", f"{bytes_text(total['bytes'])} quantized now, {bytes_text(facts['kept_bytes'])} as they were"),
        ]
    )
    if not total["tensors"]:
        print("\nnothing was quantized: no matrix is stored as floats whose rows are whole groups of 32")
        return
    rows = [
        (t["name"], " x ".join(map(str, t["shape"])), t["format"], bytes_text(t["bytes"]), *_errors(t))
        for t in facts["tensors"]
    ]
    rows.append(("all", count_text(total["parameters"]), "", bytes_text(total["bytes"]), *_errors(total)))
    title = f"Quantized to {facts['quantize']}: differences of weights, relative to their matrix's rms"
    print_table(("tensor", "shape", "format", ">bytes", ">max", ">mean"), rows, title)


def _errors(row: dict[str, Any]) -> tuple[str, str]:
    return f"{row['max_error']:.2%}", f"{row['mean_error']:.2%}"
