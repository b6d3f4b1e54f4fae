"""Compiles kernels before they are launched, several at a time: without this, each is compiled at its first launch.

Triton's compiler releases Python's lock while it computes, so threads suffice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed

import triton
from triton import knobs
from triton.runtime._async_compile import AsyncCompileMode

from kvasir.device import core_counts
from kvasir.device.kernel_cache import kernel_folder
from kvasir.ops.launch import INTERPRETED, Launch

Progress = Callable[[int, int], None]  # kernels compiled so far, and in total


def use_private_cache(target: str) -> str:
    """Makes Triton keep compiled kernels in a folder of ours; call it before the first launch. target: "sm_90". Returns
    a note for the user, or ""."""
    folder, note = kernel_folder(triton.__version__, target)
    knobs.cache.dir = str(folder)
    return note


def compile_all(launches: Iterable[Launch], progress: Progress | None = None, threads: int = 0) -> int:
    """Compiles the distinct kernels of launches, and returns their number; those that this process has already are left
    out, those in the cache are only loaded. threads: 0 for one on each processor. progress: called on this thread; an
    error that it raises ends the compilation.

    A kernel that cannot be compiled is left out as well: launching it raises the error.
    """
    if INTERPRETED:
        return 0
    done = 0
    with ThreadPoolExecutor(threads or core_counts()[1]) as pool:
        mode = AsyncCompileMode(pool, ignore_errors=True)
        with mode:
            for found in launches:
                named = {**found.constants, **found.options, "enable_fp_fusion": False}
                found.kernel.warmup(*found.args, grid=found.grid, **named)
            total = len(mode.raw_futures)
            try:
                for done, _ in enumerate(as_completed(mode.raw_futures), 1):
                    if progress:
                        progress(done, total)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return done
