"""The commands `kvasir run` and `kvasir chat`: names, options and help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvasir.cli.arguments import MaxTokens, Model, Seed, Temperature, Verbose
from kvasir.cli.flags import engine_flags, sampler_flags
from kvasir.cli.sampler import SamplerOptions
from kvasir.config import EngineOptions


@engine_flags
@sampler_flags
def run(
    model: Model,
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="A message, or a text to continue; - reads standard input. Without it, a terminal starts a chat."
        ),
    ] = None,
    *,
    engine: EngineOptions,
    sampler: SamplerOptions,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            help="Answer the prompt as a message, or continue it as a text. Default: answer, if the model can."
        ),
    ] = None,
    prediction: Annotated[
        Path | None, typer.Option(help="File with the expected answer; if right, it comes faster.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the output only, without statistics.")] = False,
    verbose: Verbose = False,
) -> None:
    """Answer a message, continue a text, or start a chat.

    Example: kvasir run kvasir-mini "What is 23 + 45?" --temp 0

    Example: kvasir run kvasir-mini "Once upon a time" --no-chat -n 60

    Example: kvasir run qwen3:0.6b  (a chat)

    Example: kvasir run kvasir-mini "Who are you?" --json-schema person.json --top-p 0.9

    Example: kvasir run kvasir-mini --speculate ngram < question.txt

    Example: kvasir run qwen3-8b "Ten best customers" --lora loras/sql --ctx-size 4k -n 200
    """
    import sys

    if prompt is None and sys.stdin.isatty():
        from kvasir.cli import chat as conversation

        return conversation.run(engine, None, temperature, max_tokens, seed, sampler, verbose)
    from kvasir.cli import run as command

    asked = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    command.run(engine, "-" if prompt is None else prompt, asked, chat, quiet, verbose, sampler, prediction)


@engine_flags
@sampler_flags
def chat(
    model: Model,
    engine: EngineOptions,
    sampler: SamplerOptions,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    verbose: Verbose = False,
) -> None:
    """Chat with a model in the terminal; /? lists the commands.

    Example: kvasir chat kvasir-mini

    Example: kvasir chat qwen3-8b --lora loras/sql:0.5

    Example: kvasir chat qwen3-8b.gguf -md qwen3-8b-eagle3.gguf --spec-type draft-eagle3
    """
    from kvasir.cli import chat as command

    command.run(engine, system, temperature, max_tokens, seed, sampler, verbose)
