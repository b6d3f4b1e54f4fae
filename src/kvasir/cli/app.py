"""The typer application: names and one-line helps here, the work in one module a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvasir.cli.flags import engine_flags
from kvasir.config import EngineOptions

app = typer.Typer(
    name="kvasir",
    help="An LLM inference engine: the same tokens always, on a laptop CPU or on GPUs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str, typer.Argument(help="Folder, .gguf file, hub id (org/name), or kvasir-mini (bundled).")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy (default: the model's own, else 1).")]
MaxTokens = Annotated[int | None, typer.Option(help="Longest answer in tokens.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same answer (default: drawn and printed).")]


def _version(show: bool) -> None:
    if show:
        from kvasir import __version__

        typer.echo(f"kvasir {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    pass


@app.command()
@engine_flags
def serve(
    model: Model,
    engine: EngineOptions,
    host: Annotated[str, typer.Option(help="Address to listen on; a public one needs --api-key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8000,
    api_key: Annotated[list[str] | None, typer.Option(help="Key that requests must carry (repeatable).")] = None,
    allowed_host: Annotated[list[str] | None, typer.Option(help="Further Host names to answer to.")] = None,
    allowed_origin: Annotated[list[str] | None, typer.Option(help="Web origins that may call.")] = None,
    drain: Annotated[float, typer.Option(help="Seconds that running answers get at a graceful stop.")] = 30.0,
    seed: Annotated[int | None, typer.Option(help="Seed of every request that brings none (default: drawn).")] = None,
) -> None:
    """Serve a model over the OpenAI protocol.

    Example: kvasir serve kvasir-mini --port 8000
    """
    from kvasir.cli import serve as command

    command.run(engine, host, port, api_key or [], allowed_host or [], allowed_origin or [], drain, seed)


@app.command()
@engine_flags
def run(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="Text to go on from.")],
    engine: EngineOptions,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    chat: Annotated[bool, typer.Option(help="Put the prompt into the model's chat template.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="The answer alone, no figures.")] = False,
) -> None:
    """Answer one prompt and stop.

    Example: kvasir run kvasir-mini "What is 23 + 45?" --chat --temperature 0
    """
    from kvasir.cli import run as command

    command.run(engine, prompt, temperature, max_tokens, seed, chat, quiet)


@app.command()
@engine_flags
def chat(
    model: Model,
    engine: EngineOptions,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
) -> None:
    """Talk to a model in the terminal; /help shows the commands.

    Example: kvasir chat kvasir-mini
    """
    from kvasir.cli import chat as command

    command.run(engine, system, temperature, max_tokens, seed)


@app.command()
@engine_flags
def bench(
    model: Model,
    engine: EngineOptions,
    mode: Annotated[str, typer.Option(help="latency, throughput or serve.")] = "latency",
    input_len: Annotated[int, typer.Option(help="Prompt tokens.", min=1)] = 128,
    output_len: Annotated[int, typer.Option(help="Answer tokens.", min=1)] = 64,
    num_prompts: Annotated[int, typer.Option(help="Requests (throughput, serve).", min=1)] = 32,
    request_rate: Annotated[float, typer.Option(help="Requests per second in serve mode; 0: all at once.")] = 0.0,
    repeats: Annotated[int, typer.Option(help="Runs; the median is reported.", min=1)] = 5,
    out: Annotated[Path | None, typer.Option(help="Folder for the JSON and the plot.")] = None,
) -> None:
    """Measure latency, throughput or serving, as a table, JSON and a plot.

    Example: kvasir bench kvasir-mini --mode throughput --out bench-out
    """
    from kvasir.cli import bench as command

    command.run(engine, mode, input_len, output_len, num_prompts, request_rate, repeats, out)


@app.command()
def inspect(
    model: Model,
    tensors: Annotated[bool, typer.Option(help="List every tensor.")] = False,
    max_model_len: Annotated[int | None, typer.Option(help="Context for the memory estimate.")] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show what a model file holds and the memory it will need, without loading it.

    Example: kvasir inspect model.gguf
    """
    from kvasir.cli import inspect as command

    command.run(model, tensors, max_model_len, json)


@app.command()
def doctor(json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Show what this machine offers, and which executor, grade and kernels will run.

    Example: kvasir doctor
    """
    from kvasir.cli import doctor as command

    command.run(json)
