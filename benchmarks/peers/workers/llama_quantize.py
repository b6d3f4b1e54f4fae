"""python -m benchmarks.peers.workers.llama_quantize BF16.gguf OUT.gguf Q4_K_M: llama.cpp's quantizer."""

# pyright: reportMissingImports=false
from __future__ import annotations

import ctypes
import os
import sys

import llama_cpp as api


def main() -> None:
    source, to, kind = sys.argv[1:4]
    params = api.llama_model_quantize_default_params()
    params.nthread = os.cpu_count() or 1
    params.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if api.llama_model_quantize(source.encode(), to.encode(), ctypes.byref(params)):
        sys.exit(f"{source} cannot be quantized to {kind}")


if __name__ == "__main__":
    main()
