"""`kvasir simulate`: its options. What it does is in the package `simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def simulate(
    trace: Annotated[Path | None, typer.Argument(help="Azure's .csv or Mooncake's .jsonl.")] = None,
    rate: Annotated[str, typer.Option(help="Speed-up of the trace's arrivals; several separated by commas.")] = "1",
    policy: Annotated[str, typer.Option(help="ours, fcfs, static; several separated by commas, or all.")] = "ours",
    memory: Annotated[int, typer.Option(help="Size of the KV cache in tokens.", min=1)] = 400_000,
    costs: Annotated[
        str | None, typer.Option(help="Seconds per prefill token, decode row, key, step: a,b,c,d or a file.")
    ] = None,
    calibrate: Annotated[str | None, typer.Option(help="Model to measure the costs with on this machine.")] = None,
    rows: Annotated[int, typer.Option(help="Maximum sequences per step.", min=1)] = 256,
    step_tokens: Annotated[int, typer.Option(help="Maximum tokens per step.", min=1)] = 2048,
    block_size: Annotated[int, typer.Option(help="Tokens in a block of the KV cache.", min=1)] = 64,
    replicas: Annotated[int, typer.Option(help="Engines that compute whole requests.", min=1)] = 1,
    prefill: Annotated[int, typer.Option(help="Instead of --replicas: engines that compute prompts.", min=0)] = 0,
    decode: Annotated[int, typer.Option(help="With --prefill: engines that compute the answers.", min=0)] = 0,
    min_replicas: Annotated[
        int | None, typer.Option(help="Let the load change the number of replicas, down to this one.", min=0)
    ] = None,
    max_replicas: Annotated[int | None, typer.Option(help="With --min-replicas: most replicas.", min=1)] = None,
    scale_down_delay: Annotated[
        float, typer.Option(help="Seconds of less load after which replicas end.", min=0)
    ] = 300.0,
    start_seconds: Annotated[float, typer.Option(help="Seconds in which a replica starts.", min=0)] = 30.0,
    router: Annotated[
        str, typer.Option(help="cost, round-robin, least-busy, dynamo, prefix; several separated by commas, or all.")
    ] = "cost",
    transfer: Annotated[
        float, typer.Option(help="Seconds to send a token's keys and values to another engine.", min=0)
    ] = 5e-6,
    coarse: Annotated[bool, typer.Option(help="Simulate engines roughly, a hundred times as fast.")] = False,
    goodput: Annotated[
        bool, typer.Option(help="Also find the rate at which 90 % of the requests are in time.")
    ] = False,
    ratios: Annotated[
        bool, typer.Option(help="Find it also for the replicas divided into prefill and decode.")
    ] = False,
    ttft: Annotated[float, typer.Option(help="Target: seconds to the first token.")] = 2.0,
    tpot: Annotated[float, typer.Option(help="Target: seconds per further token.")] = 0.1,
    limit: Annotated[int | None, typer.Option(help="Use only the first N requests.", min=1)] = None,
    adapters: Annotated[int, typer.Option(help="Adapters, of which each request has one.", min=0)] = 0,
    zipf: Annotated[float, typer.Option(help="Exponent of the adapters' popularity; 0: all have the same.")] = 1.0,
    max_loras: Annotated[int, typer.Option(help="Adapters in memory.", min=1)] = 64,
    lora_seconds: Annotated[float, typer.Option(help="Time in which an adapter is loaded.")] = 0.05,
    out: Annotated[Path | None, typer.Option(help="Folder for the JSON and the plot.")] = None,
) -> None:
    """Replay a trace in virtual time with the real scheduler and a simulated machine, or a fleet of them.

    Example: kvasir simulate azure_llm_2023_conv.csv --rate 0.5,1,2 --policy all --limit 2000

    Example: kvasir simulate azure_llm_2023_conv.csv --replicas 5 --ratios --coarse --tpot 0.02

    Example: kvasir simulate azure_llm_2023_conv.csv --rate 4 --min-replicas 1 --max-replicas 4 --coarse
    """
    from kvasir.cli import simulate as command
    from kvasir.cli.simulate.adapters import AdapterSetup
    from kvasir.cli.simulate.replica import Setup
    from kvasir.errors import ConfigError
    from kvasir.fleet.autoscale import Limits
    from kvasir.types import Target

    limits = None
    if min_replicas is not None or max_replicas is not None:
        if min_replicas is None or max_replicas is None or min_replicas > max_replicas:
            raise ConfigError("--min-replicas and --max-replicas are one range", "give both, the smaller one first")
        limits = Limits(min_replicas, max_replicas, scale_down_delay)
    chosen = AdapterSetup(adapters, zipf, max_loras, lora_seconds)
    base = Setup(
        "", (0.0, 0.0, 0.0, 0.0), 1.0, memory, rows, step_tokens, block_size,
        target=Target(ttft, tpot), replicas=replicas, prefill=prefill, decode=decode, transfer=transfer,
        adapters=chosen, limits=limits, start=start_seconds,
    )  # fmt: skip
    command.run(trace, rate, policy, costs, calibrate, base, router, coarse, goodput, ratios, limit, out)
