"""Compiles recorded launches for a target and reads registers, spills, shared memory and instructions."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvasir.ops.launch import Launch

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}  # bytes of a program
_POINTERS = {
    **{"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "float64": "*fp64"},
    **{"int8": "*i8", "uint8": "*u8", "int16": "*i16", "int32": "*i32", "int64": "*i64", "bool": "*i1"},
}
_MMA = {
    "cuda": r"wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)|tcgen05\.mma\.(\S+)|mma\.sync\.aligned\.(m\d+n\d+k\d+)",
    "hip": r"v_mfma_(\w+)",
}
PRODUCTS = ("product", "whole", "gated", "expert_gated", "expert_down")
_WIDE = {"cuda": r"ld\.global\S*\.v4|cp\.async\.cg", "hip": r"(global|buffer)_load_dwordx4"}


_HELD = re.compile(r"dot_op<\{opIdx = (\d), [^}]*?kWidth = (\d+)\}>")


@dataclass(frozen=True)
class Case:
    """A kernel with the types of its arguments, its constants and options: what one compilation depends on."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return self.kernel.__name__.strip("_").removesuffix("_kernel")

    @property
    def key(self) -> tuple:
        return self.kernel.__name__, self.signature, self.constants, self.aligned, self.options


class Measures(NamedTuple):
    """What a target's compiler made of a case. spills: bytes of the stack, or registers on gfx942. shared: bytes. mma:
    the kind of matrix instruction with its steps, without the number of its columns. wide: whether loads of 16 bytes
    occur. order: what determines the order of sums, see `order_of`. columns: of sm_100's tensor memory. waits: whether
    the program waits for the kernel before it (PDL, `ops.launch`) before it touches memory. seconds: of compiling."""

    registers: int
    spills: int
    shared: int
    mma: str
    wide: bool
    order: str
    columns: int = 0
    waits: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class Wanted:
    """A case, and the sums that its launches compute: what has one value must be summed in one order. See `sums_of`."""

    case: Case
    sums: frozenset[tuple]


@dataclass(frozen=True)
class Compiled:
    case: Case
    target: str
    found: Measures
    sums: frozenset[tuple] = frozenset()


def cases_of(launches: Iterable[Launch]) -> list[Wanted]:
    """The distinct cases of launches, in order."""
    found: dict[tuple, tuple[Case, set[tuple]]] = {}
    for launch in launches:
        case = case_of(launch)
        found.setdefault(case.key, (case, set()))[1].update(sums_of(case, launch))
    return [Wanted(case, frozenset(sums)) for case, sums in found.values()]


def sums_of(case: Case, launch: Launch) -> list[tuple]:
    """What a row's bits in the launch follow from, beside its numbers: launches with one of these may differ in the
    number of rows and in the tile, but not in the order of a row's sums."""
    names = [p.name for p in launch.kernel.params if p.name not in launch.constants]
    args = {**dict(zip(names, launch.args, strict=True)), **launch.constants}
    if case.name in PRODUCTS:
        cols = args["K"]
        segments = args["S"] if "S" in args else cols // args["width"] if "width" in args else 1
        # A matrix in segments is multiplied by either, according to the number of rows.
        family = "product" if case.name == "whole" else case.name
        return [(family, args["N"], cols, args["FORMAT"], segments, str(args["DTYPE"]))]
    if case.name in ("join_norm", "norm"):
        kinds = dict(case.signature)
        described = ("x", "bias", "residual", "total", "weight", "post_weight", "norm_bias", "out")
        return [(case.name, args["D"], *(kinds.get(name, "") for name in described))]
    if case.name == "rope_store":
        return [(case.name, args["D"], args["q_norm"] is None, args["k_scales"] is None)]
    return []


def case_of(launch: Launch) -> Case:
    kernel, constants = launch.kernel, dict(launch.constants)
    names = [p.name for p in kernel.params if p.name not in constants]
    fixed = {p.name for p in kernel.params if p.do_not_specialize}
    signature, aligned = {}, []
    for name, value in zip(names, launch.args, strict=True):
        if value is None:
            signature[name], constants[name] = "constexpr", None
        elif hasattr(value, "dtype"):
            signature[name] = _POINTERS[str(value.dtype).removeprefix("torch.")]
            if value.storage_offset() * value.element_size() % 16 == 0:
                aligned.append(kernel.arg_names.index(name))
        elif isinstance(value, bool):
            signature[name] = "i1"
        elif isinstance(value, int):
            if value == 1 and name not in fixed:
                signature[name], constants[name] = "constexpr", 1
                continue
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and name not in fixed:
                aligned.append(kernel.arg_names.index(name))
        else:
            signature[name] = "fp32"
    signature |= dict.fromkeys(launch.constants, "constexpr")
    ordered = tuple((p.name, signature[p.name]) for p in kernel.params)
    options = tuple(sorted(launch.options.items()))
    return Case(kernel, ordered, tuple(sorted(constants.items(), key=lambda c: c[0])), tuple(sorted(aligned)), options)


def compile_case(case: Case, target: str) -> Any:
    """Triton's compiled kernel, with `asm`."""
    names = case.kernel.arg_names
    source = ASTSource(
        case.kernel,
        signature=dict(case.signature),
        constexprs={(names.index(name),): value for name, value in case.constants},
        attrs={(i,): [["tt.divisibility", 16]] for i in case.aligned},
    )
    options = {**dict(case.options), "enable_fp_fusion": False}
    return triton.compile(source, target=TARGETS[target], options=options)


def measured(case: Case, target: str) -> Measures:
    """Compiles a case and reads the result."""
    begun = time.perf_counter()
    compiled = compile_case(case, target)
    seconds = time.perf_counter() - begun
    kind = TARGETS[target].backend
    text = compiled.asm["ptx" if kind == "cuda" else "amdgcn"]
    registers, spills = _nvidia(compiled.asm["cubin"]) if kind == "cuda" else _amd(text)
    mma = sorted({_steps(match) for match in re.finditer(_MMA[kind], text)})
    wide = re.search(_WIDE[kind], text) is not None
    order = order_of(compiled.asm["ttgir"])
    columns = getattr(compiled.metadata, "tmem_size", None) or 0
    first = re.search(r"griddepcontrol\.wait|ld\.global|st\.global|cp\.async", text)
    waits = first is not None and "wait" in first[0]
    return Measures(registers, spills, compiled.metadata.shared, " ".join(mma), wide, order, columns, waits, seconds)


def order_of(ttgir: str) -> str:
    """What determines the order of a kernel's sums in Triton's GPU IR: the shape of the matrix instructions without
    their columns, how many neighbouring k a thread holds of an operand, and the layouts that `tt.reduce` sums over."""
    names = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    found = (re.search(r"instrShape = \[(\d+), \d+(?:, (\d+))?\]", text) for text in names.values())
    shapes = {f"rows {shape[1]}, step {shape[2] or 16}" for shape in found if shape}
    reduced = {names.get(name, name) for name in re.findall(r"\}\) : \(tensor<[^,]+, (#\w+)>\) ->", ttgir)}
    widths = {f"{found} k of operand {operand}" for operand, found in _HELD.findall(ttgir)}
    return "; ".join(
        [*sorted(shapes), *sorted(widths), *(["tcgen05"] if "tc_gen5_mma" in ttgir else []), *sorted(reduced)]
    )


def _steps(match: re.Match) -> str:
    """The kind of an instruction without the number of its columns, which do not enter its sums."""
    found = next(group for group in match.groups() if group)
    family = match.group(0).split(".")[0]
    return found if family == match.group(0) else f"{family} {re.sub(r'n[0-9]+', '', found)}"


def _nvidia(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of the stack, which spills take."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def _amd(text: str) -> tuple[int, int]:
    registers = re.search(r"\.vgpr_count:\s+(\d+)", text)
    spills = re.search(r"\.vgpr_spill_count:\s+(\d+)", text)
    assert registers and spills, "no resource counts in the assembly"
    return int(registers[1]), int(spills[1])
