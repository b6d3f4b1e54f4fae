"""`kvasir simulate`: serves a trace in virtual time, to predict the effect of a policy, a memory size or a faster
machine."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvasir.cli.machine import machine_facts, software_facts
from kvasir.cli.show import number_text, print_pairs
from kvasir.cli.simulate import report
from kvasir.cli.simulate.coarse_scaling import ScaledWorld
from kvasir.cli.simulate.coarse_world import CoarseWorld
from kvasir.cli.simulate.replica import POLICIES, Setup
from kvasir.cli.simulate.trace import Asked, Prompts, read_trace
from kvasir.cli.simulate.world import World
from kvasir.cli.waiting import progress_bar
from kvasir.errors import ConfigError
from kvasir.fleet.cost import POLICIES as ROUTERS

if TYPE_CHECKING:
    from kvasir.cli.simulate.calibrate import Calibration

# Seconds per prefill token, decode row, key read and step: roughly an 8B model in 16 bits on a large GPU.
COSTS = (1e-4, 5e-5, 1e-8, 8e-3)
DIVISIONS = 9  # ways to divide replicas that are tried


def run(
    trace: Path | None,
    rates: str,
    policies: str,
    costs: str | None,
    model: str | None,
    base: Setup,
    routers: str,
    coarse: bool,
    goodput: bool,
    ratios: bool,
    limit: int | None,
    out: Path | None,
) -> None:
    """base: all that is the same in every run. Raises KvasirError."""
    adapters = base.adapters
    if not (0 <= adapters.zipf < math.inf and 0 < adapters.seconds < math.inf):
        message = f"zipf is {adapters.zipf:g}, and a load of an adapter takes {adapters.seconds:g} s"
        raise ConfigError(message, "expected an exponent of 0 or more, and more than no time")
    if costs is not None and model is not None:
        raise ConfigError("both --costs and --calibrate are given", "give one of them")
    if trace is None and model is None:
        raise ConfigError("nothing to do", "give a trace, or --calibrate a model")
    if not (0 < base.target.ttft < math.inf and 0 < base.target.tpot < math.inf):
        raise ConfigError("a target is not a time", "expected more than 0 s for --ttft and --tpot")
    if bool(base.prefill) != bool(base.decode):
        raise ConfigError("only one of --prefill and --decode is given", "give both")
    measured = _calibrate(model, out) if model is not None else None
    base = replace(base, costs=measured.costs if measured else read_costs(costs) if costs else COSTS)
    if trace is not None:
        setups = [
            replace(base, policy=policy, router=router, rate=rate)
            for policy in _named("policy", policies, POLICIES)
            for router in _named("router", routers, ROUTERS)
            for rate in _numbers("rate", rates)
        ]
        if coarse and (adapters.count or any(setup.policy != "ours" for setup in setups)):
            raise ConfigError("--coarse knows only --policy ours without adapters", "leave out what it does not know")
        if base.limits and (not coarse or base.prefill or ratios):
            hint = "give --coarse, and no other number of replicas"
            raise ConfigError("--min-replicas is simulated with coarse replicas without roles", hint)
        if ratios:
            if base.prefill or base.replicas < 2:
                raise ConfigError("--ratios divides --replicas", "give at least 2 replicas, and no --prefill")
            setups = [part for setup in setups for part in divisions(setup)]
        _simulate(trace, setups, coarse, goodput or ratios, limit, measured, out)


def divisions(setup: Setup) -> list[Setup]:
    """The replicas as a whole, then divided into some for prompts and some for answers, in at most DIVISIONS ways."""
    n = setup.replicas
    numbers = {max(1, min(n - 1, round(n * k / (DIVISIONS + 1)))) for k in range(1, DIVISIONS + 1)}
    return [setup, *(replace(setup, prefill=p, decode=n - p) for p in sorted(numbers))]


def world_of(asked: list[Asked], setup: Setup, coarse: bool, prompts: Prompts | None = None) -> World | CoarseWorld:
    """What runs a setup. prompts: of the trace, where they are there already."""
    if setup.limits:
        return ScaledWorld(asked, setup, setup.limits)
    return CoarseWorld(asked, setup) if coarse else World(asked, setup, prompts)


def _simulate(
    trace: Path,
    setups: list[Setup],
    coarse: bool,
    goodput: bool,
    limit: int | None,
    measured: Calibration | None,
    out: Path | None,
) -> None:
    asked, setup = read_trace(trace, limit), setups[0]
    check_memory([setup.memory], asked, setup.block_size)
    prompts = Prompts(asked)

    def served(s: Setup) -> report.Row:
        with progress_bar(f"{s.name} x {s.rate:g}", len(asked)) as progress:
            return report.summarize(s, world_of(asked, s, coarse, prompts).run(progress))

    rows = [row for s in setups for row in _with_fixed(s, served(s), served)]
    targets = f"{setup.target.ttft:g} s and {setup.target.tpot:g} s"
    title = f"{trace.name}: {len(asked)} requests, {setup.memory} tokens of memory, targets {targets}"
    report.print_rows(rows, title)
    if goodput:
        found = {s.name: report.most_in_time(lambda rate, s=s: served(replace(s, rate=rate))) for s in setups}
        print_pairs((f"{name}: {report.ENOUGH:.0%} in time", f"up to {r:.3g} requests/s") for name, r in found.items())
        if len(found) > 1:
            best = max(found, key=found.__getitem__)
            rest = (f"{found[best] / r:.2f} times as much as {name}" for name, r in found.items() if r and name != best)
            print(f"the most: {best}", *rest, sep=", ")
    if out:
        varied = ("policy", "rate", "router", *(("replicas", "prefill", "decode") if len(setups) > 1 else ()))
        fixed = {name: value for name, value in asdict(setup).items() if name not in varied}
        facts = {"trace": trace.name, "requests": len(asked), "setup": fixed, "software": software_facts()}
        facts |= {"coarse": coarse, "calibration": asdict(measured) if measured else None, "rows": rows}
        facts |= {"goodput": found} if goodput else {}
        report.write(out, f"simulate-{trace.stem}", facts, lambda figure: report.plot_rows(figure, rows, title))


def _with_fixed(setup: Setup, row: report.Row, served: Callable[[Setup], report.Row]) -> list[report.Row]:
    """The row; of a number of replicas that follows the load also the rows of its mean and of its limit."""
    if not setup.limits:
        return [row]
    mean = max(1, round(row["replica_hours"] * 3600 / max(row["seconds"], 1e-9)))
    fixed = sorted({mean, setup.limits.most})
    return [row, *(served(replace(setup, limits=None, replicas=n)) for n in fixed)]


def check_memory(sizes: Sequence[int], asked: list[Asked], block_size: int) -> None:
    """Raises ConfigError if the longest request can never be served."""
    longest = max(a.prompt + a.answer for a in asked)
    if small := [size for size in sizes if size < longest + block_size]:
        raise ConfigError(f"a memory of {small[0]} tokens", f"the longest request has {longest}")


def _named(what: str, text: str, known: Sequence[str]) -> list[str]:
    names = [*known] if text == "all" else text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"{what} {unknown[0]!r}", f"expected all, or some of {', '.join(known)}")
    return names


def _calibrate(model: str, out: Path | None) -> Calibration:
    from kvasir.cli.simulate.calibrate import calibrate

    found, name = calibrate(model), Path(model).name
    units = ("prefill token", "decode row", "key", "step")
    print_pairs((unit, f"{1e6 * cost:.4g} us") for unit, cost in zip(units, found.costs, strict=True))
    print(
        f"error over {found.held_out} held-out steps: median {found.median_error:.1%}, "
        f"p90 {found.p90_error:.1%}, of their sum {found.total_error:.1%}"
    )
    print("a held-out run:")
    print_pairs(
        (key, f"measured {number_text(was)}, predicted {number_text(forecast)}, {forecast / max(was, 1e-12) - 1:+.1%}")
        for key, (was, forecast) in found.run.items()
    )
    if out:
        facts = {"model": name, **asdict(found), "machine": machine_facts(), "software": software_facts()}
        report.write_json(out / f"costs-{name}.json", facts)
    return found


def read_costs(text: str) -> tuple[float, float, float, float]:
    """The costs in "a,b,c,d", or in a file that a calibration wrote. Raises ConfigError."""
    if "," in text:
        found = _numbers("costs", text, zero=True)
    else:
        try:
            held = json.loads(Path(text).read_text(encoding="utf-8"))["costs"]
            found = _numbers("costs", ",".join(map(str, held)), zero=True)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{text} holds no costs", "give a,b,c,d or a file with costs") from error
    if len(found) != 4 or not any(found):
        raise ConfigError(f"costs {text!r}", "expected seconds per prefill token, decode row, key, step; not all 0")
    return found[0], found[1], found[2], found[3]


def _numbers(name: str, text: str, zero: bool = False) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [math.nan]
    if not all((n > 0 or (zero and n == 0)) and n < math.inf for n in found):
        raise ConfigError(f"{name} is {text!r}", "expected positive numbers separated by commas")
    return found
