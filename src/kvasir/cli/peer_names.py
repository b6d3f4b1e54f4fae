"""Options of llama.cpp, vLLM and SGLang that have no meaning here or another name: what to give instead.

Options that mean the same are accepted under their own names; docs/migration.md lists both."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_MODEL = "The model is an argument: kvasir serve MODEL"
_PARTS = "A model is wholly on the GPU or wholly on the CPU: --device"
_TOKENS = "Its name here is --max-num-batched-tokens"
_KV_DTYPE = "Its name here is --kv-dtype"
_FRACTION = "Its name here is --memory-fraction, of the free memory"
_ON = "It is always on: leave it out"
_TEMPLATE = "Formats are found from the chat template"
_NOT_COMPILED = "Nothing is compiled: leave it out"

ADVICE = {
    **dict.fromkeys(("-m", "--model", "--model-path", "-hf", "--hf-repo"), _MODEL),
    **dict.fromkeys(("-p", "--prompt"), "The prompt is an argument: kvasir run MODEL PROMPT"),
    **dict.fromkeys(("-cnv", "--conversation"), "kvasir run answers messages by default: leave it out"),
    **dict.fromkeys(("-no-cnv", "--no-conversation"), "Its name in kvasir run is --no-chat"),
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers"), _PARTS),
    **dict.fromkeys(("-b", "--batch-size", "-ub", "--ubatch-size", "--chunked-prefill-size"), _TOKENS),
    **dict.fromkeys(("-fa", "--flash-attn"), "Attention is always computed this way: leave it out"),
    **dict.fromkeys(("-ctk", "--cache-type-k", "-ctv", "--cache-type-v", "--kv-cache-dtype"), _KV_DTYPE),
    "--slot-save-path": "Prefixes are stored and found by themselves: --cache-dir",
    **dict.fromkeys(("--gpu-memory-utilization", "--mem-fraction-static"), _FRACTION),
    "--quantization": "It is found in the checkpoint; --quantize rounds float weights",
    **dict.fromkeys(("--enable-prefix-caching", "--enable-chunked-prefill"), _ON),
    "--enable-auto-tool-choice": f"{_TEMPLATE}: leave it out",
    "--tool-call-parser": f"{_TEMPLATE}; --tool-format names another one",
    "--reasoning-parser": f"{_TEMPLATE}; --reasoning-format names another one",
    **dict.fromkeys(("--enforce-eager", "--compilation-config"), _NOT_COMPILED),
    "--trust-remote-code": "Code of a repository is never run: leave it out",
    "--guided-decoding-backend": "There is one for all grammars: leave it out",
    "--disable-radix-cache": "Its name here is --no-prefix-cache",
}


def advice(given: Sequence[str], known: Collection[str]) -> str | None:
    """What to say of the first given option that another engine has and this command has not. known: the command's
    options."""
    for name in (word.partition("=")[0] for word in given):
        if name in ADVICE and name not in known:
            return f"No such option: {name}. {ADVICE[name]}"
    return None
