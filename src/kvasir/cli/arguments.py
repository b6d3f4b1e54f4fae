"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

MODEL = (
    "Short name (qwen3:0.6b), folder, .gguf file, name in the store, hub id (org/name), or kvasir-mini, which is "
    "bundled."
)
Model = Annotated[str, typer.Argument(help=MODEL)]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", "--temp", help="0 is greedy (default: the model's own, else 1)."),
]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", "--n-predict", "-n", help="Maximum output tokens.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same output (default: random, and printed).")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print what the engine decided, and why.")]
