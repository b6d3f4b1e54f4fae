"""Measures the costs of a step on this machine: real steps, each measured several times; half of the distinct steps for
the fit, half to evaluate it; then a separate run, measured and simulated."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from kvasir.cli.resolve import resolve
from kvasir.cli.simulate.replica import Setup
from kvasir.cli.simulate.report import summarize
from kvasir.cli.simulate.trace import Asked, Prompts
from kvasir.cli.simulate.world import SimulatedShares, World
from kvasir.cli.waiting import loading, progress_bar, spinner
from kvasir.config import EngineOptions
from kvasir.engine.build import build_core
from kvasir.engine.core import EngineCore
from kvasir.errors import KvasirError
from kvasir.plan import StepPlan
from kvasir.sched.budget import StepLoad, StepTime, predict
from kvasir.sched.service import load_of
from kvasir.types import Delta, Request, SamplingParams

SEED = 0
WAVES = (1, 2, 4, 8, 16, 32)  # concurrent requests
ROUNDS = 5  # identical repetitions of each wave: the median of a step's times counts
_WAVES = (1, *WAVES * ROUNDS)
LONGEST, SHORTEST = 4096, 256  # maximum tokens of a request: alone, among many
STAGGER = 6  # steps before the second half of a wave arrives, so that prefill and decode share steps
SWEEPS = 200  # iterations of the solver
ROBUST = 20  # reweighted solutions; each gives less weight to steps with large errors before
LOAD = 0.6  # share of the machine's capacity in the predicted run
RUN_REQUESTS = 24

Measured = tuple[StepLoad, float]
Costs = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Calibration:
    """costs: as in StepTime. fitted, held_out: numbers of distinct steps. median_error, p90_error: of |predicted -
    measured| / measured over the held-out steps; total_error: of their sum. run: figures by name of a run that was not
    fitted to, as (measured, predicted)."""

    costs: Costs
    fitted: int
    held_out: int
    median_error: float
    p90_error: float
    total_error: float
    run: dict[str, tuple[float, float]] = field(default_factory=dict)


def calibrate(model: str, threads: int | None = None) -> Calibration:
    """Loads a model and computes with it for a few minutes. Raises KvasirError."""
    with spinner(loading(model)):
        core = build_core(resolve(EngineOptions(model, threads=threads, overlap=False, speculate="off"))[0])
    with progress_bar("measuring", len(_WAVES), still=True) as progress:
        found = fit(measure(core, progress))
    return replace(found, run=foresee(core, found.costs))


# -- steps -------------------------------------------------------------------------------------------------


def measure(core: EngineCore, progress: Callable[[int], None] = lambda done: None) -> list[Measured]:
    """Waves of requests of random lengths; each distinct step with the median of its times, planning included. The
    scheduler learns nothing meanwhile, so that its plans are the same in all rounds. The first wave warms up.
    progress: is called with the number of waves done."""
    service, times = core.scheduler.service, defaultdict[StepLoad, list[float]](list)
    plans: list[StepPlan] = []
    listen, service.observe, core.plan_listener = service.observe, lambda plan, seconds: None, plans.append
    try:
        for number, wave in enumerate(_WAVES):
            progress(number)
            for load, seconds in _wave(core, min(wave, core.scheduler.capacity.max_rows), number, plans):
                if number:
                    times[load].append(seconds)
    finally:
        service.observe, core.plan_listener = listen, None
    return [(load, median(found)) for load, found in times.items()]


def _wave(core: EngineCore, size: int, number: int, plans: list[StepPlan]) -> Iterable[Measured]:
    draw = random.Random(size)  # the same requests in each round
    requests = [_drawn(core, draw, f"calibrate-{number}-{i}", max(SHORTEST, LONGEST // size)) for i in range(size)]
    first = requests[: (size + 1) // 2]
    for request in first:
        core.add(request)
    steps = 0
    while core.has_work() or steps <= STAGGER:
        if steps == STAGGER:
            for request in requests[len(first) :]:
                core.add(request)
        plans.clear()
        begun = time.perf_counter()
        deltas = core.step()
        seconds = time.perf_counter() - begun
        steps += 1
        _checked(deltas)
        if plans and plans[0].computes:
            yield load_of(plans[0]), seconds


def _drawn(core: EngineCore, draw: random.Random, id: str, longest: int) -> Request:
    length = min(core.info.max_model_len, longest)
    return _request(core, draw, id, draw.randint(2, max(2, length // 2)), draw.randint(2, max(2, length // 8)))


def _request(core: EngineCore, draw: random.Random, id: str, prompt: int, answer: int) -> Request:
    ids = tuple(draw.randrange(core.info.vocab_size) for _ in range(prompt))
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, seed=0)
    return Request(id, ids, params, no_cache=True)


def _checked(deltas: list[Delta]) -> None:
    if failed := next((d for d in deltas if d.error), None):
        raise KvasirError(f"a request failed: {failed.error}", "see the log above")


# -- the fit -----------------------------------------------------------------------------------------------


def fit(measured: list[Measured]) -> Calibration:
    """Raises KvasirError if there are too few steps for a fit."""
    if len(measured) < 20:
        raise KvasirError(f"only {len(measured)} steps were measured", "give a model that generates")
    steps = list(measured)
    random.Random(SEED).shuffle(steps)
    middle = len(steps) // 2
    model = StepTime(_solve(steps[:middle]))
    held = [(predict(model, load), seconds) for load, seconds in steps[middle:]]
    errors = sorted(abs(foreseen - seconds) / seconds for foreseen, seconds in held)
    total = sum(seconds for _, seconds in held)
    return Calibration(
        model.costs,
        middle,
        len(held),
        median(errors),
        errors[int(0.9 * len(errors))],
        abs(sum(foreseen for foreseen, _ in held) - total) / total,
    )


def _solve(steps: list[Measured]) -> Costs:
    """Non-negative costs with the least sum of relative errors: iteratively reweighted least squares, with weights from
    the previous solution's errors, so that outliers count little."""
    loads = [(load.prefill_tokens, load.decode_rows, load.context, 1) for load, _ in steps]
    relative = np.array(loads, float) / np.array([[seconds] for _, seconds in steps])
    scale = np.maximum(relative.max(axis=0), 1e-300)
    x, found, weights = relative / scale, np.zeros(4), np.ones(len(steps))
    for _ in range(ROBUST):
        moments, sums = (x * weights[:, None]).T @ x, (x * weights[:, None]).sum(axis=0)
        for _ in range(SWEEPS):
            for i in range(4):
                if moments[i, i] > 0:
                    found[i] = max(0.0, found[i] + (sums[i] - moments[i] @ found) / moments[i, i])
        weights = 1 / np.maximum(abs(x @ found - 1), 1e-3)
    a, b, c, d = (found / scale).tolist()
    return a, b, c, d


# -- a run -------------------------------------------------------------------------------------------------


def foresee(core: EngineCore, costs: Costs, requests: int = RUN_REQUESTS) -> dict[str, tuple[float, float]]:
    """Random arrivals at LOAD of the machine's capacity: figures as (measured, predicted by the simulation with these
    costs)."""
    draw, capacity = random.Random(SEED + 1), core.scheduler.capacity
    length, at = min(capacity.max_model_len, LONGEST // 4), 0.0
    trace: list[Asked] = []
    for _ in range(requests):
        trace.append(Asked(at, draw.randint(2, max(2, length // 2)), draw.randint(2, max(2, length // 8))))
        alone = StepLoad(trace[-1].answer, trace[-1].prompt, trace[-1].prompt * (trace[-1].prompt // 2))
        at += draw.expovariate(LOAD / max(predict(StepTime(costs), alone), 1e-6))
    room = (min(capacity.num_blocks) - 1) * capacity.block_size
    setup = Setup(
        "ours", costs, 1.0, room, capacity.max_rows, capacity.max_tokens_per_step, capacity.block_size, len(trace)
    )
    world = World(trace, setup, Prompts(trace))
    predicted = summarize(setup, world.run())
    world.outcome.served, world.outcome.seconds = _serve(core, trace)
    measured = summarize(setup, world.outcome)
    tokens = sum(a.answer for a in trace)
    names = ("ttft_p50_s", "ttft_p90_s", "tpot_p50_s", "tpot_p90_s")
    found = {name: (measured[name], predicted[name]) for name in names}
    return found | {"tokens_per_s": (tokens / measured["seconds"], tokens / predicted["seconds"])}


def _serve(core: EngineCore, trace: list[Asked]) -> tuple[list[SimulatedShares | None], float]:
    """Serves the trace in real time; also returns the seconds until all requests have ended."""
    draw, served = random.Random(SEED), [SimulatedShares(a.at) for a in trace]
    requests = [_request(core, draw, str(i), a.prompt, a.answer) for i, a in enumerate(trace)]
    due, start = 0, time.perf_counter()
    while due < len(trace) or core.has_work():
        while due < len(trace) and trace[due].at <= time.perf_counter() - start:
            core.add(requests[due])
            due += 1
        if not core.has_work():
            time.sleep(max(0.0, trace[due].at - (time.perf_counter() - start)))
            continue
        deltas = core.step()
        _checked(deltas)
        now = time.perf_counter() - start
        for delta in deltas:
            served[int(delta.id)].take(len(delta.token_ids), now, delta.finish_reason is not None)
    return [*served], time.perf_counter() - start
