"""What a step costs on this machine: a short real run, half of its steps to fit, the others to say how good it is."""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import median

from kvasir.config import EngineOptions
from kvasir.engine.build import build_core
from kvasir.engine.core import EngineCore
from kvasir.errors import KvasirError
from kvasir.plan import StepPlan
from kvasir.sched.budget import StepLoad, StepTime, observe, predict
from kvasir.sched.service import load_of
from kvasir.types import Request, SamplingParams

SEED = 0
WAVES = (1, 2, 4, 8, 16, 32)  # requests at once
ROUNDS = 3

Measured = tuple[StepLoad, float]


@dataclass(frozen=True, slots=True)
class Calibration:
    """costs: as StepTime has them. held_out: steps that were not fitted to. median_error, p90_error: of |predicted -
    measured| / measured over these; total_error: of their sum."""

    costs: tuple[float, float, float, float]
    held_out: int
    median_error: float
    p90_error: float
    total_error: float


def calibrate(model: str, threads: int | None = None) -> Calibration:
    """Loads a model and computes with it for some seconds. Raises KvasirError."""
    core = build_core(EngineOptions(model, threads=threads, overlap=False))
    return fit(measure(core))


def measure(core: EngineCore) -> list[Measured]:
    """Waves of requests of drawn lengths; each step with its time. The first wave warms up and does not count."""
    measured: list[Measured] = []
    service, listen = core.scheduler.service, core.scheduler.service.observe

    def note(plan: StepPlan, seconds: float) -> None:
        measured.append((load_of(plan.work), seconds))
        listen(plan, seconds)

    draw, number = random.Random(SEED), 0
    for wave in (1, *WAVES * ROUNDS):
        for _ in range(min(wave, core.scheduler.capacity.max_rows)):
            core.add(_request(core, draw, number))
            number += 1
        while core.has_work():
            for delta in core.step():
                if delta.error:
                    raise KvasirError(f"a request failed: {delta.error}", "see the log above")
        service.observe = note
    service.observe = listen
    return [m for m in measured if m[0].decode_rows or m[0].prefill_tokens]


def _request(core: EngineCore, draw: random.Random, number: int) -> Request:
    length = min(core.info.max_model_len, 4096)
    prompt = draw.randint(2, max(2, length // 2))
    ids = tuple(draw.randrange(core.info.vocab_size) for _ in range(prompt))
    params = SamplingParams(temperature=0.0, max_tokens=draw.randint(1, max(1, length // 8)), ignore_eos=True, seed=0)
    return Request(f"calibrate-{number}", ids, params)


def fit(measured: list[Measured]) -> Calibration:
    """Raises KvasirError for a run too short to tell anything."""
    if len(measured) < 20:
        raise KvasirError(f"only {len(measured)} steps were measured", "give a model that generates")
    steps = list(measured)
    random.Random(SEED).shuffle(steps)
    middle = len(steps) // 2
    model = StepTime()
    for load, seconds in steps[:middle]:
        model = observe(model, load, seconds)
    held = [(predict(model, load), seconds) for load, seconds in steps[middle:]]
    errors = sorted(abs(foreseen - seconds) / seconds for foreseen, seconds in held)
    total = sum(seconds for _, seconds in held)
    return Calibration(
        model.costs,
        len(held),
        median(errors),
        errors[int(0.9 * len(errors))],
        abs(sum(foreseen for foreseen, _ in held) - total) / total,
    )
