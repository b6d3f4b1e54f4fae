"""The only package that knows the machine: everything else reads the `Device` record.

The vendor's names (torch.cuda) occur only here.
"""

from kvasir.device.capability import Device, core_counts, detect, has_driver, processors_by_core
from kvasir.device.control import (
    allocated,
    available,
    count,
    memory_for,
    raise_fault,
    set_threads,
    synchronize,
    target,
    use,
)
from kvasir.device.topology import memory_nodes, shares, stay_on
from kvasir.device.torch_extra import INSTALL_TORCH, has_torch, need_torch
from kvasir.device.triton_extra import no_triton, rounds_float32
from kvasir.memory import host_memory

__all__ = [
    "INSTALL_TORCH",
    "Device",
    "allocated",
    "available",
    "core_counts",
    "count",
    "detect",
    "has_driver",
    "has_torch",
    "host_memory",
    "memory_for",
    "memory_nodes",
    "need_torch",
    "no_triton",
    "processors_by_core",
    "raise_fault",
    "rounds_float32",
    "set_threads",
    "shares",
    "stay_on",
    "synchronize",
    "target",
    "use",
]
