"""The limit for each figure: the best that this machine could achieve with a perfect engine.

A step cannot be faster than reading all weights once (as the engine holds them) and the keys and values it attends to
at the measured bandwidth, nor than its multiply-adds at the measured rate; the two may overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvasir.cli.bench.measure import AT, Shape, loads
from kvasir.cli.bench.probe import Probe
from kvasir.cli.model_facts import TokenWork


@dataclass(frozen=True, slots=True)
class Machine:
    """The work of a model and the rates of a machine. kv_token: bytes of keys and values per token of context;
    max_rows: sequences computed at once."""

    work: TokenWork
    kv_token: float
    probe: Probe
    max_rows: int = 1

    def prefill(self, tokens: int, rows: int = 1) -> float:
        """Minimum seconds from `rows` prompts of `tokens` tokens to their first sampled tokens."""
        macs = rows * (tokens * self.work.body_macs + self.work.head_macs)
        return max(self.work.weight_bytes / self.probe.bytes_per_s, macs / self.probe.macs_per_s)

    def decode_step(self, context: float, rows: int = 1) -> float:
        """Minimum seconds for one more token of each of `rows` sequences after `context` tokens each."""
        nbytes = self.work.weight_bytes + rows * context * self.kv_token
        macs = rows * (self.work.body_macs + self.work.head_macs)
        return max(nbytes / self.probe.bytes_per_s, macs / self.probe.macs_per_s)


def limits(machine: Machine, mode: str, shape: Shape) -> dict[str, float]:
    """Limits by the names of the figures; figures without a limit are omitted."""
    steps, middle = shape.output_len - 1, shape.middle
    if mode == "throughput":
        return _whole_run(machine, shape, steps, middle)
    if mode == "load":
        return {
            f"{AT}{count}_{name}": value
            for count in loads(shape.num_prompts)
            for name, value in _whole_run(machine, replace(shape, num_prompts=count), steps, middle).items()
        }
    first, step = machine.prefill(shape.input_len), machine.decode_step(middle)
    alone = {"ttft": first, "tpot": step, "e2e": first + steps * step}
    if mode == "serve":  # no request can be served faster than alone
        return {f"{name}_p{p}_s": value for name, value in alone.items() for p in (50, 90, 99)}
    rates = {"prompt_tokens_per_s": shape.input_len / first, "output_tokens_per_s": 1 / step}
    rates["read_gb_per_s"] = machine.probe.bytes_per_s / 1e9
    return {**{f"{name}_s": value for name, value in alone.items()}, **rates}


def _whole_run(machine: Machine, shape: Shape, steps: int, middle: float) -> dict[str, float]:
    """Full batches one after another: each step reads the weights once, whatever the batch size."""
    full, rest = divmod(shape.num_prompts, machine.max_rows)
    seconds = sum(
        machine.prefill(shape.input_len, rows) + steps * machine.decode_step(middle, rows)
        for rows in [machine.max_rows] * full + [rest] * (rest > 0)
    )
    count = shape.num_prompts
    return {
        "duration_s": seconds,
        "requests_per_s": count / seconds,
        "prompt_tokens_per_s": count * shape.input_len / seconds,
        "output_tokens_per_s": count * shape.output_len / seconds,
    }
