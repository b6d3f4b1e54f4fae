"""The only package that knows the machine: everything else reads the `Device` record.

The vendor's names (torch.cuda) occur only here.
"""

from kvasir.device.capability import Device, detect
from kvasir.device.control import allocated, available, set_threads, synchronize
from kvasir.device.copies import Copier, copier
from kvasir.memory import host_memory

__all__ = [
    "Copier",
    "Device",
    "allocated",
    "available",
    "copier",
    "detect",
    "host_memory",
    "set_threads",
    "synchronize",
]
