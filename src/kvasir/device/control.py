"""Operations on a device: its threads, its queue, its memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvasir.device.capability import Device
from kvasir.errors import ConfigError, DeviceFault
from kvasir.memory import host_memory

MAX_THREADS = 1024


def set_threads(count: int) -> None:
    """Sets how many threads torch's own operations use in this process; does nothing if torch is not loaded. Raises
    ConfigError outside [1, 1024]."""
    if not 1 <= count <= MAX_THREADS:
        raise ConfigError(f"threads is {count}", f"expected a number in [1, {MAX_THREADS}]")
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(count)


def synchronize(device: Device) -> None:
    """Returns when all work queued on the device is done."""
    if device.kind == "cuda":
        import torch

        torch.cuda.synchronize()


def target() -> str:
    """The GPU's architecture, as compilers name it: "sm_90" or "gfx942"."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if torch.version.hip:
        return properties.gcnArchName.partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def available(kind: str) -> int:
    """Free bytes of the device; memory that torch's allocator only caches is released first."""
    if kind != "cuda":
        return host_memory()[1]
    import torch

    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def count() -> int:
    """The number of GPUs that torch sees."""
    import torch

    return torch.cuda.device_count()


def use(kind: str, number: int) -> None:
    """Makes a GPU, by its number, the one of this process. Nothing to do for a CPU."""
    if kind == "cuda":
        import torch

        torch.cuda.set_device(number)


def allocated(kind: str) -> int:
    """Bytes of tensors on a GPU; 0 on the CPU, where torch does not count them."""
    if kind != "cuda":
        return 0
    import torch

    return torch.cuda.memory_allocated()


@contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Raises ConfigError if memory runs out within the block. what: it is allocated for."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        torch = sys.modules.get("torch")
        on_device = torch is not None and isinstance(error, torch.OutOfMemoryError)
        if not (on_device or isinstance(error, MemoryError) or "can't allocate memory" in str(error)):
            raise
        advice = "lower --max-num-seqs, --max-num-batched-tokens or --memory-fraction, or end what else uses it"
        raise ConfigError(f"memory ran out for {what}", advice) from error


def raise_fault(error: Exception) -> None:
    """Raises DeviceFault if the error is one, or torch's error of a GPU that has failed. Such a failure is sticky: all
    later calls of the process fail too. Running out of memory is not."""
    if isinstance(error, DeviceFault):
        raise error
    torch = sys.modules.get("torch")
    if torch and isinstance(error, getattr(torch, "AcceleratorError", ())):
        raise DeviceFault(str(error).partition("\n")[0]) from error
