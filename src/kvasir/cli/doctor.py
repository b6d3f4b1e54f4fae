"""`kvasir doctor`: the machine, the installation, a real start of the engine, and the problems found."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvasir.cli.formats import formats
from kvasir.cli.machine import machine_facts, software_facts, versions
from kvasir.cli.show import bytes_text, fitted, plain, print_json, print_pairs, print_table
from kvasir.cli.waiting import spinner
from kvasir.config import GIB, EngineOptions
from kvasir.device import INSTALL_TORCH, has_driver, has_torch
from kvasir.engine.build import need_executor
from kvasir.engine.sockets import make_socket_path, remove_socket
from kvasir.environment import env, prepare_torch
from kvasir.errors import ConfigError, KvasirError
from kvasir.types import Request, SamplingParams

MODEL = "kvasir-mini"
NEEDED = """
    numpy ml_dtypes tokenizers huggingface_hub jinja2 llguidance msgspec typer rich fastapi uvicorn
    pydantic pyzmq prometheus-client psutil prompt_toolkit
    """.split()
OPTIONAL = ("commit", "torch")  # of the facts of software
# Extra -> (a distribution whose presence shows that it is installed, the feature that needs it).
EXTRAS = {
    "torch": ("torch", "eager executor: GPUs, machines without the native kernels"),
    "gpu": ("triton", "graph executor: Triton kernels on a GPU"),
    "bench": ("matplotlib", "plots of kvasir bench"),
    "fleet": ("ray", "kvasir fleet CONFIG and kvasir.data over Ray"),
    "demo": ("openai", "make demo"),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """fatal: the engine cannot be used; otherwise it works with limitations."""

    message: str
    next: str
    fatal: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """A start of the engine with the bundled model in one dtype: its choices, or why it did not start."""

    dtype: str
    grade: str = ""
    executor: str = ""
    device: str = ""
    summary: tuple[str, ...] = ()
    error: str = ""
    numerics: str = ""


def run(json: bool, models: Sequence[str] = (), verbose: bool = False) -> None:
    """models: additional models, besides the store's, whose chat templates are examined. verbose: shows the versions of
    all packages, and how each op is computed."""
    with spinner("Checking this machine"):
        facts, problems = examine(models)
    if json:
        print_json({**facts, "problems": [asdict(problem) for problem in problems]})
    else:
        show(facts, problems, verbose)
    sys.exit(any(problem.fatal for problem in problems))


def examine(models: Sequence[str] = ()) -> tuple[dict[str, Any], list[Problem]]:
    """All facts, and the problems found. Failures of a part of the examination are reported as problems, not raised."""
    prepare_torch()
    broken = _broken_installation()
    if broken:
        return {"software": {**software_facts(), **versions(NEEDED)}}, [broken]
    starts = [start(dtype) for dtype in ("auto", "float32")]
    facts = {
        "machine": machine_facts(),
        "software": {**software_facts(), **versions(NEEDED)},
        "native": native_facts(),
        "ops": op_table(),
        "starts": [asdict(each) for each in starts],
        "extras": {extra: versions((name,))[name] for extra, (name, _) in EXTRAS.items()},
        "formats": [asdict(each) for each in formats(models)],
    }
    return facts, [*_problems(facts, starts)]


def _broken_installation() -> Problem | None:
    missing = [name for name, version in versions(NEEDED).items() if version is None]
    if missing:
        hint = "install Kvasir with its dependencies: pip install kvasir-llm"
        return Problem(f"not installed: {', '.join(missing)}", hint, fatal=True)
    try:
        need_executor()
    except ConfigError as error:
        return Problem(error.message, error.hint, fatal=True)
    return _broken_torch()


def _broken_torch() -> Problem | None:
    if not has_torch():
        return None
    try:
        import torch  # noqa: F401
    except Exception as error:  # a damaged library can raise anything
        return Problem(f"torch cannot be imported: {error}", "reinstall torch, or remove it", fatal=True)
    return None


def native_facts() -> dict[str, Any]:
    """Whether programs run here, and with which instruction set. lower: the instruction sets that KVASIR_ISA can force
    instead."""
    from kvasir.ops import native

    facts: dict[str, Any] = {"available": native.available(), "reason": native.reason(), "isa": None, "features": []}
    facts |= {"lower": [], "forced": bool(env("KVASIR_ISA"))}
    if native.available():
        isa = native.isa()
        facts |= {"isa": isa, "lower": list(native.ISAS[: native.ISAS.index(isa)])}
        facts["features"] = list(native.cpu_features())
    return facts


def op_table() -> list[dict[str, Any]]:
    """The implementation chosen for each op by an engine started in this process, and why others were refused."""
    from kvasir import ops

    return [{"op": c.op, "device": c.device, "chosen": c.chosen, "refused": dict(c.refused)} for c in ops.table()]


def start(dtype: str) -> Start:
    """Starts the engine on the bundled model, including the self-test, and generates a few tokens."""
    from kvasir.engine.build import build_core

    try:
        core = build_core(EngineOptions(MODEL, dtype=dtype, max_num_seqs=2, max_model_len=128))
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, seed=0)
        core.add(Request("doctor", (1, 2, 3), params))
        deltas = [delta for _ in range(8) if core.has_work() for delta in core.step()]
    except Exception as error:  # the doctor continues after any error and reports it
        kind = "" if isinstance(error, KvasirError) else f"{type(error).__name__}: "
        return Start(dtype, error=f"{kind}{error}")
    failed = next((delta.error for delta in deltas if delta.error), "")
    done = sum(len(delta.token_ids) for delta in deltas) == 4
    error = failed or ("" if done else "the engine answered with too few tokens")
    info = core.info
    return Start(info.dtype, info.grade, info.executor, info.device, core.summary, error, info.numerics)


def _problems(facts: dict[str, Any], starts: list[Start]) -> Iterator[Problem]:
    for each in starts:
        if each.error:
            hint = "run `kvasir run kvasir-mini hello` to see it; if the files are damaged, reinstall Kvasir"
            yield Problem(f"the engine does not run in {each.dtype}: {each.error}", hint, fatal=True)
        elif each.grade == "untested":
            yield Problem(f"the self-test was not run in {each.dtype}", "it needs memory for two short sequences")
        elif each.grade != "exact":
            yield Problem(
                f"the self-test graded {each.dtype} as {each.grade!r}: outputs may depend on the batch",
                "try another build of torch, or another --dtype",
            )
    if not facts["native"]["available"]:
        yield Problem(facts["native"]["reason"], "install a C++ compiler and install Kvasir again")
    machine = facts["machine"]
    if platform.machine() in ("x86_64", "AMD64") and "avx2" not in machine["features"]:
        yield Problem("this processor has no AVX2: computing will be slow", "choose a small model")
    if machine["memory_available_bytes"] < GIB:
        yield Problem(
            f"only {bytes_text(machine['memory_available_bytes'])} of memory is free",
            "stop other programs, raise the container's limit, or choose a small model",
        )
    for each in facts["formats"]:
        if each["fault"]:
            hint = "name the format with --tool-format; until then tool calls are returned as content"
            yield Problem(f"{each['model']}: {each['fault']}", hint)
    try:
        remove_socket(make_socket_path())
    except (ConfigError, OSError) as error:
        hint = getattr(error, "hint", "") or "set XDG_RUNTIME_DIR to a folder of your own"
        yield Problem(f"kvasir serve cannot create its socket: {error}", hint, fatal=True)


def show(facts: dict[str, Any], problems: list[Problem], verbose: bool = True) -> None:
    software = {k: v or ("none" if k in OPTIONAL else "MISSING") for k, v in facts["software"].items()}
    software = {k: v for k, v in software.items() if verbose or v == "MISSING"}
    if "machine" in facts:
        _show_machine(facts)
    if software:
        print_table(("package", "version"), software.items(), "Software")
    if facts.get("formats"):
        rows = ((f["model"], f["tools"], f["reasoning"]) for f in facts["formats"])
        print_table(("model", "tool calls", "reasoning"), rows, "Formats detected in the chat templates")
    if verbose and "ops" in facts:
        print_table(
            ("op", "device", "runs as", "why no other format"),
            ((o["op"], o["device"], o["chosen"], _reasons(o["refused"])) for o in facts["ops"]),
            "Ops of the eager executor; programs use native kernels",
        )
    if "extras" in facts:
        print_table(
            ("extra", "for", "installed"),
            ((f"[{extra}]", EXTRAS[extra][1], version or "no") for extra, version in facts["extras"].items()),
            "Extras",
        )
    print(f"\n{len(problems) or 'no'} problem{'s' * (len(problems) != 1)}{' found' * (not problems)}")
    for problem in problems:
        print(fitted(f"  {'ERROR' if problem.fatal else 'note'}: {plain(problem.message)}", sys.stdout))
        print(fitted(f"    try: {plain(problem.next)}", sys.stdout))


def _executor(native: dict[str, Any], cores: int) -> Iterator[tuple[str, str]]:
    """The executor on the CPU, unless --executor or --threads override it."""
    threads = f"{cores} thread{'s' if cores > 1 else ''}"
    if not native["available"]:
        yield "on the CPU", f"eager executor on {threads}; no program executor: {native['reason']}"
        return
    forced = ", set by KVASIR_ISA" if native["forced"] else ""
    yield "on the CPU", f"program executor on {threads}, {native['isa']} kernels{forced}"
    if native["lower"]:
        yield "", f"KVASIR_ISA={' or '.join(native['lower'])} selects lower ones: same outputs, slower"


def _gpu(gpu: dict[str, Any] | None) -> str:
    if gpu:
        return f"{gpu['name']}, {bytes_text(gpu['memory_bytes'])}"
    if has_driver() and not has_torch():
        return f"not used, since torch is not installed: {INSTALL_TORCH}"
    return "none"


def _reasons(refused: dict[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in refused.items())


def _show_machine(facts: dict[str, Any]) -> None:
    machine, native = facts["machine"], facts["native"]
    pairs = [
        ("processor", f"{machine['cpu']}, {machine['cores']} of {machine['logical_cpus']} for this process"),
        ("features", " ".join(machine["features"]) or "none set"),
        (
            "memory",
            f"{bytes_text(machine['memory_available_bytes'])} free of {bytes_text(machine['memory_bytes'])}",
        ),
        ("GPU", _gpu(machine["gpu"])),
        ("system", machine["system"]),
        *_executor(native, machine["cores"]),
    ]
    for each in facts["starts"]:
        description = f"{each['executor']} executor on {each['device']}, grade {each['grade']}"
        description += f", numerics {each['numerics'][:16]}"
        pairs.append((f"{each['dtype']}", each["error"] or description))
    print_pairs(pairs)
