"""The typer application: the commands' names, options and help texts; each command is implemented in its own module."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvasir.cli import talk_commands
from kvasir.cli.arguments import MODEL, Model, Verbose
from kvasir.cli.bench_command import bench
from kvasir.cli.flags import engine_flags, fleet_flags, models_flags, operation_flags
from kvasir.cli.fleet import app as fleet_app
from kvasir.cli.fleet_options import FleetOptions
from kvasir.cli.help import App
from kvasir.cli.models import ModelsOptions
from kvasir.cli.operation import OperationOptions
from kvasir.cli.panels import FORMATS, OPERATION
from kvasir.cli.quantities import parse_bytes, parse_tokens
from kvasir.cli.replica_command import replica
from kvasir.cli.simulate_command import simulate
from kvasir.config import EngineOptions
from kvasir.errors import ConfigError

app = App(
    name="kvasir",
    help="An LLM inference engine: the same tokens always, on a laptop CPU or on GPUs.",
    pretty_exceptions_enable=False,
)

app.add_typer(fleet_app, name="fleet", rich_help_panel="Serve and process")

SERVER = "http://127.0.0.1:8000"
TALKING, SERVING, MODELS, LOOKING = (
    "Talk to a model",
    "Serve and process",
    "Models of your store",
    "Measure and inspect",
)
Stored = Annotated[str, typer.Argument(help="Name in the store, as `kvasir list` shows it.")]
Url = Annotated[str, typer.Option(help="Where the server is.")]
Key = Annotated[str | None, typer.Option("--api-key", help="Key of the server.")]
ToolFormat = Annotated[
    str, typer.Option(help="Format of tool calls (auto: detect from the chat template).", rich_help_panel=FORMATS)
]
ReasoningFormat = Annotated[
    str, typer.Option(help="Format of reasoning; none leaves it in the content.", rich_help_panel=FORMATS)
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


def _version(show: bool) -> None:
    if show:
        from kvasir import __version__

        typer.echo(f"kvasir {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


app.command(rich_help_panel=TALKING)(talk_commands.run)
app.command(rich_help_panel=TALKING)(talk_commands.chat)


@app.command(rich_help_panel=SERVING)
@engine_flags
@operation_flags
@models_flags
@fleet_flags
def serve(
    model: Annotated[
        list[str] | None, typer.Argument(help=f"{MODEL} Several models, or none for all of the store.")
    ] = None,
    *,
    engine: EngineOptions,
    operation: OperationOptions,
    models: ModelsOptions,
    fleet: FleetOptions,
    host: Annotated[str, typer.Option(help="Address to listen on; a public one needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8000,
    api_key: Annotated[list[str] | None, typer.Option(help="Key that requests must carry (repeatable).")] = None,
    keys: Annotated[Path | None, typer.Option(help="JSON file of keys with names, classes, limits (mode 600).")] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="Further Host names to accept.", rich_help_panel=OPERATION)
    ] = None,
    allowed_origin: Annotated[
        list[str] | None, typer.Option(help="Web origins that may send requests.", rich_help_panel=OPERATION)
    ] = None,
    drain: Annotated[
        float,
        typer.Option(help="Seconds for running requests to finish at a graceful stop.", rich_help_panel=OPERATION),
    ] = 30.0,
    seed: Annotated[int | None, typer.Option(help="Seed of requests without one (default: random).")] = None,
    tool_format: ToolFormat = "auto",
    reasoning_format: ReasoningFormat = "auto",
    verbose: Verbose = False,
) -> None:
    """Serve one or more models over HTTP; with several, each is loaded on first use.

    Example: kvasir serve kvasir-mini --port 8000

    Example: kvasir serve --keep-alive 600

    Example: kvasir serve qwen3-8b --lora sql=loras/sql --lora-dir loras  (requests then have the model sql)

    Example: kvasir serve qwen3-8b --replicas 4

    Example: kvasir serve qwen3-8b --speculate ngram,suffix,draft=qwen3-0.6b --draft-max 8
    """
    from kvasir.cli import serve as command

    hosts, origins = allowed_host or [], allowed_origin or []
    formats = tool_format, reasoning_format
    where = host, port, api_key or [], keys, hosts, origins
    command.run(engine, model or [], *where, drain, seed, *formats, operation, models, fleet, verbose)


@app.command(rich_help_panel=SERVING)
@engine_flags
@fleet_flags
def batch(
    file: Annotated[Path, typer.Argument(help="File with a request in each line, in the format of OpenAI's batches.")],
    model: Annotated[str, typer.Option("--model", "-m", help=MODEL)],
    output: Annotated[Path, typer.Option("--output-file", "-o", help="File for the answers, in the same order.")],
    *,
    engine: EngineOptions,
    fleet: FleetOptions,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder of finished lines (default: OUTPUT.checkpoint, until all are).")
    ] = None,
    batch_width: Annotated[
        int | None, typer.Option(help="Lines at once (default: a quarter more than all engines compute).", min=1)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of requests without one (default: random).")] = None,
    tool_format: ToolFormat = "auto",
    reasoning_format: ReasoningFormat = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Answer the lines of a file without a server; the same command continues a job that was interrupted.

    Example: kvasir batch questions.jsonl --model qwen3-8b -o answers.jsonl

    Example: kvasir batch questions.jsonl --model qwen3-8b -o answers.jsonl --replicas 4
    """
    from kvasir.cli import batch as command

    formats = tool_format, reasoning_format
    command.run(engine, fleet, file, output, checkpoint, batch_width, seed, *formats, quiet)


@app.command(rich_help_panel=SERVING)
@engine_flags
def embed(
    model: Model,
    texts: Annotated[list[str] | None, typer.Argument(help="Texts; none or -: the lines of standard input.")] = None,
    *,
    engine: EngineOptions,
    dimensions: Annotated[int | None, typer.Option(help="First dimensions only, normalised.", min=1)] = None,
    prompt_name: Annotated[str | None, typer.Option(help="Which of the model's prompts precedes the texts.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the embeddings only.")] = False,
    verbose: Verbose = False,
) -> None:
    """Print the embeddings of texts, as a line of JSON each.

    Example: kvasir embed sentence-transformers/all-MiniLM-L6-v2 "a text" "another"

    Example: kvasir embed Qwen/Qwen3-Embedding-0.6B --prompt-name query --dimensions 256 < questions.txt
    """
    from kvasir.cli import compare as command

    command.embed(engine, texts or [], dimensions, prompt_name, quiet, verbose)


@app.command(rich_help_panel=SERVING)
@engine_flags
def rerank(
    model: Model,
    query: Annotated[str, typer.Argument(help="What the documents are compared with.")],
    documents: Annotated[
        list[str] | None, typer.Argument(help="Documents; none or -: the lines of standard input.")
    ] = None,
    *,
    engine: EngineOptions,
    top_n: Annotated[int | None, typer.Option(help="Print only the best.", min=1)] = None,
    instruction: Annotated[str, typer.Option(help="What counts as a fit, for models that read it.")] = "",
    json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the documents only.")] = False,
    verbose: Verbose = False,
) -> None:
    """Print documents in the order in which they fit a query, with their scores.

    Example: kvasir rerank BAAI/bge-reranker-v2-m3 "capital of France" "Paris is a capital." "Cats are animals."

    Example: kvasir rerank Qwen/Qwen3-Reranker-0.6B "how do I reset it?" --top-n 5 < manual.txt
    """
    from kvasir.cli import compare as command

    command.rerank(engine, query, documents or [], top_n, instruction, json, quiet, verbose)


@app.command(rich_help_panel=MODELS)
def pull(
    model: Annotated[str, typer.Argument(help="qwen3:0.6b, org/repo, org/repo:Q4_K_M, hf.co/..., or a path.")],
    name: Annotated[str | None, typer.Option(help="Name in the store (default: as given).")] = None,
) -> None:
    """Download a model from the hub, or register a local one, under a name.

    Example: kvasir pull Qwen/Qwen3-0.6B-GGUF:Q8_0
    """
    from kvasir.cli import store as command

    command.pull(model, name)


@app.command(rich_help_panel=MODELS)
def create(
    name: Annotated[str, typer.Argument(help="Name of the new model.")],
    file: Annotated[Path, typer.Option("--file", "-f", help="Modelfile; - reads standard input.")] = Path("Modelfile"),
    quantize: Annotated[str | None, typer.Option(help="Quantize float weights while loading: q8 or q4.")] = None,
    draft_quantize: Annotated[str | None, typer.Option(help="The same for DRAFT: q8, q4 or none.")] = None,
) -> None:
    """Create a model from a Modelfile: a base model with its own system prompt, parameters or template.

    Example: kvasir create mario -f Modelfile
    """
    from kvasir.cli import store as command

    command.create(name, file, quantize, draft_quantize)


@app.command("list", rich_help_panel=MODELS)
def list_models(
    json: AsJson = False,
    names: Annotated[bool, typer.Option("--names", help="Instead: all short names, and where they lead.")] = False,
) -> None:
    """List the models of the store.

    Example: kvasir list

    Example: kvasir list --names
    """
    from kvasir.cli import store as command

    command.list_names(json) if names else command.list_models(json)


@app.command(rich_help_panel=MODELS)
def show(
    model: Stored,
    modelfile: Annotated[bool, typer.Option(help="Print it as a Modelfile.")] = False,
    json: AsJson = False,
) -> None:
    """Show the details of a stored model.

    Example: kvasir show qwen3 --modelfile
    """
    from kvasir.cli import store as command

    command.show(model, modelfile, json)


@app.command(rich_help_panel=MODELS)
def cp(model: Stored, name: Annotated[str, typer.Argument(help="Name of the copy.")]) -> None:
    """Copy a model to another name.

    Example: kvasir cp Qwen/Qwen3-0.6B-GGUF:Q8_0 qwen3
    """
    from kvasir.cli import store as command

    command.copy(model, name)


@app.command(rich_help_panel=MODELS)
def rm(model: Annotated[list[str], typer.Argument(help="Names in the store.")]) -> None:
    """Remove models from the store, with downloaded and packed weights that no other model uses.

    Example: kvasir rm qwen3
    """
    from kvasir.cli import store as command

    command.remove(model)


@app.command(rich_help_panel=SERVING)
def ps(url: Url = SERVER, api_key: Key = None, json: AsJson = False) -> None:
    """List the models that a running server has loaded.

    Example: kvasir ps --url http://127.0.0.1:8000
    """
    from kvasir.cli import store as command

    command.ps(url, api_key, json)


@app.command(rich_help_panel=SERVING)
def stop(model: Stored, url: Url = SERVER, api_key: Key = None) -> None:
    """Unload a model from a running server when its requests have ended.

    Example: kvasir stop qwen3
    """
    from kvasir.cli import store as command

    command.stop(model, url, api_key)


app.command(rich_help_panel=LOOKING)(bench)


@app.command(rich_help_panel=LOOKING)
def inspect(
    model: Model,
    tensors: Annotated[bool, typer.Option(help="List every tensor.")] = False,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len",
            *("--ctx-size", "-c"),
            help="Context for the memory estimate.",
            parser=parse_tokens,
            metavar="TOKENS",
        ),
    ] = None,
    weights_memory: Annotated[
        int | None,
        typer.Option(
            help="Memory for the weights; shows what to expect if other layers are read from disk.",
            parser=parse_bytes,
            metavar="SIZE",
        ),
    ] = None,
    tensor_parallel: Annotated[
        int,
        typer.Option(
            "--tensor-parallel", "--tensor-parallel-size", "-tp", help="Ranks that share each matrix.", metavar="RANKS"
        ),
    ] = 1,
    pipeline_parallel: Annotated[
        int,
        typer.Option(
            *("--pipeline-parallel", "--pipeline-parallel-size", "-pp"),
            help="Stages that divide the layers.",
            metavar="STAGES",
        ),
    ] = 1,
    program: Annotated[bool, typer.Option(help="Load the model, and show the native program of a step.")] = False,
    quantize: Annotated[
        str | None, typer.Option(help="Quantize to q8 or q4 while loading, and show each tensor's error.")
    ] = None,
    base: Annotated[str | None, typer.Option("--model", help="For an adapter: the model to check it against.")] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show a model's tensors and the memory it needs; loads it only with --program or --quantize.

    Example: kvasir inspect model.gguf

    Example: kvasir inspect kvasir-mini --quantize q4

    Example: kvasir inspect config.json  (no weights: memory by format, context and number of devices)

    Example: kvasir inspect adapters/sql --model qwen3  (an adapter: its modules and ranks, and whether it fits)
    """
    from kvasir.cli import adapter_facts, config_facts, program_view, quantize_view
    from kvasir.cli import inspect as command
    from kvasir.cli.resolve import resolve

    if adapter := adapter_facts.adapter_path(model):
        if program or quantize or max_model_len is not None:
            raise ConfigError(
                "an adapter has no program, weights to quantize or context", "give only --model, --tensors"
            )
        return adapter_facts.run(adapter, base and resolve(EngineOptions(base))[0].model, tensors, json)
    if base is not None:
        raise ConfigError("--model is for inspecting an adapter, which this is not", f"kvasir inspect {base}")
    if (config := config_facts.config_path(model)) and not (program or quantize or tensors):
        command.prepare()
        return config_facts.run(config, max_model_len, json)
    model = resolve(EngineOptions(model))[0].model
    if program:
        command.prepare()
        facts = program_view.program_facts(model, quantize or "")
        return command.print_json(facts) if json else program_view.show_program(facts)
    if quantize:
        command.prepare()
        facts = quantize_view.quantize_facts(model, quantize)
        return command.print_json(facts) if json else quantize_view.show_quantized(facts)
    command.run(model, tensors, max_model_len, json, weights_memory, tensor_parallel, pipeline_parallel)


@app.command(rich_help_panel=LOOKING)
def doctor(
    models: Annotated[list[str] | None, typer.Argument(help="Models whose chat templates to check as well.")] = None,
    json: AsJson = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also the versions of all packages, and how each op is computed.")
    ] = False,
) -> None:
    """Check this machine: hardware, executors, kernels and exactness grade, and the tool-call formats of the
    stored and the named models.

    Example: kvasir doctor
    """
    from kvasir.cli import doctor as command

    command.run(json, models or (), verbose)


app.command(rich_help_panel=LOOKING)(simulate)
app.command(rich_help_panel=SERVING)(replica)
