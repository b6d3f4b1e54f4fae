"""Checkpoints whose matrices are quantized in a published format: a view of the file with the names and shapes of the
model before quantization, so that every family loads from every format."""

from kvasir.weights.published.choose import unquantized, with_own_file, with_rounded_rows

__all__ = ["unquantized", "with_own_file", "with_rounded_rows"]
