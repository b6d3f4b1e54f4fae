"""`kvasir bench`: its options. What it does is in the package `bench`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvasir.cli.arguments import Verbose
from kvasir.cli.flags import engine_flags
from kvasir.config import EngineOptions
from kvasir.errors import ConfigError


@engine_flags
def bench(
    model: Annotated[
        str,
        typer.Argument(help="Model, as for run; or `prefix` for the prefix cache, `grammar` for structured output."),
    ],
    engine: EngineOptions,
    prefix_model: Annotated[
        str | None, typer.Argument(help="Model for prefix and grammar, unless --trace or --tokenizer-folder is given.")
    ] = None,
    mode: Annotated[
        str, typer.Option(help="latency, throughput, serve, or load (throughput with 1, 2, 4 ... at once).")
    ] = "latency",
    input_len: Annotated[
        int | None, typer.Option(help="Prompt tokens (default 128; prefix: a turn's, 48).", min=1)
    ] = None,
    output_len: Annotated[int | None, typer.Option(help="Output tokens (default 64; prefix 32).", min=1)] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(help="Number of requests in throughput and serve (default 32); prefix: users (4).", min=1),
    ] = None,
    request_rate: Annotated[float, typer.Option(help="Requests per second in serve mode; 0: all at once.")] = 0.0,
    repeats: Annotated[int, typer.Option(help="Runs; the median is reported.", min=1)] = 5,
    out: Annotated[Path | None, typer.Option(help="Folder for the JSON and the plot.")] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="prefix: few-shot, multi-turn, tree-of-thought, agents, no-reuse (repeatable; default: all)."
        ),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="prefix: trace with hash ids (Mooncake's .jsonl).")] = None,
    memory: Annotated[
        list[int] | None, typer.Option(help="With --trace: size of the KV cache in tokens (repeatable).", min=1)
    ] = None,
    tokenizer_folder: Annotated[
        list[Path] | None, typer.Option(help="grammar: folder with a tokenizer.json (repeatable).")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Measure latency, throughput, serving, the prefix cache or structured output, as a table, JSON and a plot.

    Drafters are off unless options name them: answers to random prompts repeat themselves.

    Example: kvasir bench kvasir-mini --mode throughput --out bench-out

    Example: kvasir bench kvasir-mini --quantize q8 --threads 1

    Example: kvasir bench kvasir-mini --speculative-config '{"method": "ngram", "num_speculative_tokens": 5}'

    Example: kvasir bench prefix kvasir-mini --out bench-out

    Example: kvasir bench prefix --trace mooncake.jsonl --memory 4000000

    Example: kvasir bench grammar kvasir-mini --out bench-out
    """
    from kvasir.cli import bench as command

    if model == "grammar":
        if prefix_model is None and not tokenizer_folder:
            raise ConfigError("bench grammar needs a model or a --tokenizer-folder", "give one of them, or both")
        from kvasir.cli.bench import grammar

        own = replace(engine, model=prefix_model) if prefix_model else None
        grammar.run(own, tokenizer_folder or [], repeats, out)
        return
    if model != "prefix":
        if prefix_model is not None:
            raise ConfigError(
                f"two models, {model} and {prefix_model}", "name one, optionally after `prefix` or `grammar`"
            )
        return command.run(
            engine, mode, input_len or 128, output_len or 64, num_prompts or 32, request_rate, repeats, out, verbose
        )
    if (prefix_model is None) == (trace is None):
        raise ConfigError("bench prefix needs a model or a --trace", "give one of them")
    if trace is not None:
        from kvasir.cli.simulate import prefix

        return prefix.run(trace, memory or [], engine.block_size, out)
    from kvasir.cli.bench import prefix
    from kvasir.cli.bench.workloads import Load

    load = Load(num_prompts or 4, input_len or 48, output_len or 32)
    prefix.run(replace(engine, model=prefix_model), load, repeats, workload or [], out, verbose)
