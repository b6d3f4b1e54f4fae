"""The limit for each figure: what no engine on this machine could exceed.

Weights have to be read once by each step (as the engine holds them), and the keys and values that it attends to, at the
measured bandwidth; each token has to be multiplied with the matrices, at the measured rate of that instruction. The two
may overlap, also those of prompts with those of other requests' tokens. Attention's own products are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvasir.cli.bench.measure import AT, PERCENTILES, Shape, loads
from kvasir.cli.bench.probe import Probe
from kvasir.cli.model_facts import TokenWork


@dataclass(frozen=True, slots=True)
class Machine:
    """The work of a model and the rates of a machine. kv_token: bytes of keys and values per token of context;
    max_rows: sequences computed at once; drafts: whether a step may give a sequence more than one token."""

    work: TokenWork
    kv_token: float
    probe: Probe
    max_rows: int = 1
    drafts: bool = False

    def seconds(self, nbytes: float, macs: float) -> float:
        """Minimum time of so many bytes and multiply-adds."""
        rate = self.probe.macs_per_s
        return max(nbytes / self.probe.bytes_per_s, macs / rate if rate else 0.0)

    def prefill(self, tokens: int) -> float:
        """Minimum seconds from a prompt of `tokens` tokens to its first sampled token."""
        return self.seconds(self.work.weight_bytes, tokens * self.work.body_macs + self.work.head_macs)

    def decode_step(self, context: float) -> float:
        """Minimum seconds for one more token of a sequence after `context` tokens."""
        nbytes = self.work.weight_bytes + context * self.kv_token
        return self.seconds(nbytes, self.work.body_macs + self.work.head_macs)


def limits(machine: Machine, mode: str, shape: Shape) -> dict[str, float]:
    """Limits by the names of the figures; figures without a limit are omitted. With drafts, what later tokens take has
    none: it depends on how many are right."""
    if mode in ("throughput", "load"):
        if machine.drafts:
            return {}
        if mode == "throughput":
            return _whole_run(machine, shape)
        return {
            f"{AT}{count}_{name}": value
            for count in loads(shape.num_prompts)
            for name, value in _whole_run(machine, replace(shape, num_prompts=count)).items()
        }
    first, step = machine.prefill(shape.input_len), machine.decode_step(shape.middle)
    alone = {"ttft": first, "tpot": step, "e2e": first + (shape.output_len - 1) * step}
    if machine.drafts:
        alone = {"ttft": first}
    if mode == "serve":  # no request can be served faster than alone
        return {f"{name}_p{p}_s": value for name, value in alone.items() for p in PERCENTILES}
    found = {f"{name}_s": value for name, value in alone.items()} | {"prompt_tokens_per_s": shape.input_len / first}
    if not machine.drafts:
        found |= {"output_tokens_per_s": 1 / step, "read_gb_per_s": machine.probe.bytes_per_s / 1e9}
    return found


def _whole_run(machine: Machine, shape: Shape) -> dict[str, float]:
    """All requests at once. A step reads the weights once for up to `max_rows` sequences."""
    count, work = shape.num_prompts, machine.work
    steps = shape.output_len * max(1.0, count / machine.max_rows)
    nbytes = steps * work.weight_bytes + count * (shape.output_len - 1) * shape.middle * machine.kv_token
    tokens = shape.input_len + shape.output_len - 1
    seconds = machine.seconds(nbytes, count * (tokens * work.body_macs + shape.output_len * work.head_macs))
    return {
        "duration_s": seconds,
        "requests_per_s": count / seconds,
        "prompt_tokens_per_s": count * shape.input_len / seconds,
        "output_tokens_per_s": count * shape.output_len / seconds,
    }
